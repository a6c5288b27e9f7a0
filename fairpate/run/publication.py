"""What a run hands out: report, card, portable model, and the same in a notebook.

What results show of themselves in a notebook: their guarantee, their measures, and how to reach card and statement.

HTML of a few kilobytes, escaped, without a script and without colours of its own, so that it reads in light and dark
notebooks. Of a run only what is published is read.

What a comparison shows of itself in a notebook: its sentences and one picture, of what may be published.

Never its page, whose drawing library alone is megabytes: the size is that of one picture, some hundred kilobytes.

The privacy-and-fairness card of a published student: what it guarantees, how it treats groups, what it must not
claim.

Everything is read from the public part of a run directory, from what the run recorded of its data set, and from the
public entry of that; the private part is not opened, and of the configuration only the data set's options and the
method enter. Of a data set that was given from Python no publisher is known, and the card says so. It is written
beside the student, as JSON and as a page.

From what a run left to its two pages, and the operator's summary of what was really spent.

The published student once more, for those without this package: ``model.onnx`` beside it, and ``model.json``.

Made of the student, public records and declared constants, so it costs nothing and can be made again at any time. It
is left out, with a line that says why, where the packages are not installed or torch cannot write the model: the run
is whole without it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from fairpate import __version__
from fairpate.config import PLACE, ConfigError, DataConfig
from fairpate.config_reader import parse_config
from fairpate.data import Dataset, entry_for
from fairpate.data.dataset import sha256_of
from fairpate.data.embedding import feature_names
from fairpate.files import write_atomically
from fairpate.methods.base import method_title
from fairpate.methods.label_queries import Spending
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, epsilon_of_curve
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import event_from
from fairpate.report.figures import class_label, slices_picture
from fairpate.report.frontier import Point, by_panel
from fairpate.report.frontier_page import FrontierReport, findings
from fairpate.report.metrics import Evaluation, WithoutPrivacy
from fairpate.report.page import counted, decimal, epsilon_text, made_words, percent, render
from fairpate.report.records import (
    GroupOutcomes,
    Guarantee,
    Outcome,
    PrivatePopulation,
    PrivateReport,
    PublicReport,
    Voting,
    verdict,
)
from fairpate.report.run_page import (
    Card,
    CardData,
    CardModel,
    CardRefusals,
    IntendedUse,
    card_page,
    private_report,
    public_report,
)
from fairpate.run.context import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_statement,
    run_at,
    write_json,
    write_text,
)
from fairpate.run.learn import Assessment, DataRecord, require_data, require_student_of
from fairpate.terminal import Reporter
from fairpate.types import PrivacyStatement, Unit, stepwise, strict, tell
from fairpate.words import delta_text, meaning
from student.card import read_card as read_student_card

if TYPE_CHECKING:
    from fairpate.run.compare import Comparison
    from student.student import Student

_SEEN = "all that is published"
Rows = list[tuple[str, str]]


def run_html(run: RunDirectory) -> str:
    """A run in a notebook: what may be claimed, what was measured, where its files are."""
    try:
        return _published_html(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunDirectoryError):
        words = (
            f"No published result in {run.root}: the run is unfinished or damaged, or without privacy and so the "
            "operator's alone."
        )
        return notebook_html(title="Run", sentences=[words])


def _published_html(run: RunDirectory) -> str:
    """Errors of any kind for files that are missing or damaged."""
    statement, record, metrics = read_statement(run), read_json(run.record), read_json(run.metrics)
    places = (
        ("report", run.public_report),
        ("card", run.card_page),
        ("statement", run.statement),
        ("model", run.student),
    )
    return notebook_html(
        title=f"{record['method']} on {record['data']}, seed {record['seed']}",
        sentences=[_meaning(statement)],
        rows=[*_guarantee(statement), *_measured(metrics), *((name, from_here(p)) for name, p in places if p.exists())],
        remarks=statement.remarks,
        commands=[
            ("Card", f"fairpate card {shlex.quote(from_here(run.root))}"),
            ("Statement in Python", "fairpate.read_statement(run)"),
        ],
    )


def from_here(path: Path) -> str:
    """A path as it is reached from where the notebook runs; one that lies elsewhere as it is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def fitted_html(statement: PrivacyStatement, *, name: str) -> str:
    """A fitted estimator in a notebook. Nothing was measured: that takes test records."""
    calls = "X_test, y_test, sensitive_features=groups"
    card = [] if statement.epsilon is None else [("Card", f".card(folder, {calls})")]
    return notebook_html(
        title=name,
        sentences=[_meaning(statement)],
        rows=_guarantee(statement),
        remarks=statement.remarks,
        commands=[("Accuracy, disparity and coverage", f".plot({calls})"), ("Statement", ".statement()"), *card],
    )


def _meaning(statement: PrivacyStatement) -> str:
    """What the epsilon means for one unit; nothing of noise from a seed."""
    if statement.noise != OS_ENTROPY:
        return f"Not private: the noise is {statement.noise.partition(':')[0]}."
    epsilon = math.inf if statement.epsilon is None else statement.epsilon
    return meaning(epsilon, statement.delta, unit=statement.unit, relation=statement.relation, seen=_SEEN)


def _guarantee(statement: PrivacyStatement) -> Rows:
    if statement.epsilon is None:
        return [("ε", "none: no guarantee")]
    of = f"per {statement.unit}, {statement.relation}"
    at = f"{epsilon_text(statement.epsilon)} at δ = {delta_text(statement.delta)}"
    return [("ε", f"{at}, {of} ({statement.accounting})")]


def _measured(metrics: dict[str, Any]) -> Rows:
    """Accuracy beside the most common class, demographic parity with its interval, coverage, what is degenerate."""
    if not metrics["num_records"]:
        few = "too few" if metrics.get("not_measured") else "no"
        return [("accuracy, disparity, coverage", f"not measured: {few} test records")]
    gap = metrics["gaps"]["dp_one_vs_rest"]
    interval = f", 95 % interval {_decimal(gap['low'])} to {_decimal(gap['high'])}" if gap["low"] is not None else ""
    common = metrics["majority_class"]
    always = "" if common is None else f"; {_percent(metrics['majority_accuracy'])} for always {common!r}"
    return [
        ("accuracy", f"{_percent(metrics['accuracy'])} of {metrics['num_answered']:,} test records{always}"),
        ("disparity", f"demographic-parity gap {_decimal(gap['value'])}{interval}"),
        ("coverage", _percent(metrics["coverage"])),
        *(("warning", f"degenerate: the model {words}") for words in metrics["degenerate"]),
        *(("warning", f"the model {words}") for words in metrics.get("underserved", ())),
        *(
            ("warning", f"gaps leave out {name}: too few answered test records")
            for name in metrics.get("not_measured", ())
        ),
    ]


def _decimal(value: float | None) -> str:
    return decimal(math.nan if value is None else value)


def _percent(value: float | None) -> str:
    return percent(math.nan if value is None else value)


def notebook_html(
    *,
    title: str,
    sentences: Sequence[str],
    rows: Rows | None = None,
    remarks: Sequence[str] = (),
    commands: Sequence[tuple[str, str]] = (),
    picture: str = "",
    alt: str = "",
) -> str:
    """Sentences, a table of names and words, remarks to unfold, a picture (PNG in base 64), and how to go on."""
    return render(
        "notebook.html",
        title=title,
        sentences=sentences,
        rows=rows or [],
        remarks=remarks,
        commands=commands,
        picture=picture,
        alt=alt,
    )


_MOST_POINTS = 1000  # a picture of more takes seconds, each time that it is shown
_MOST_PANELS = 12


def comparison_html(comparison: Comparison) -> str:
    """A comparison in a notebook: its page's sentences about what may be published, and the slices of one data set."""
    folder = comparison.folder
    report = FrontierReport(
        title=folder.root.name,
        rows=comparison.rows,
        publish_unprotected=folder.publish_unprotected,
        notion=comparison.notion,
    )
    points = report.points()
    panels = by_panel(points)
    seeded = ["Noise from a seed: not private."] if any(point.is_seeded for point in points) else []
    told = [*seeded, *(sentence for found in list(panels.values())[:_MOST_PANELS] for sentence in _panel_words(found))]
    if len(panels) > _MOST_PANELS:
        told.append(f"{counted(len(panels) - _MOST_PANELS, 'more data set')} on the page.")
    shown = next((found for found in panels.values() if len(found) <= _MOST_POINTS), [])
    picture = slices_picture(shown) if shown else b""
    done = sum(row.record is not None for row in comparison.rows)
    return notebook_html(
        title=f"{report.title}: {counted(len(points), 'configuration')}, {counted(done, 'run')}",
        sentences=told,
        picture=base64.b64encode(picture).decode("ascii"),
        alt=f"Slices of {shown[0].panel.data}" if shown else "",
        commands=[
            ("Page", from_here(folder.report)),
            ("For a paper", f"fairpate compare {shlex.quote(from_here(folder.root))} --figures paper"),
        ],
    )


def _panel_words(points: Sequence[Point]) -> list[str]:
    panel = points[0].panel
    found = findings(points)
    of = f"{panel.data}, {class_label(panel.privacy)}"
    if not found.budgets:
        return [f"{of}: no configuration with a finite ε can be compared."]
    first = found.budgets[0]
    aside = f" Left out: {'; '.join(found.left_out)}." if found.left_out else ""
    return [f"{of}, ε up to {epsilon_text(first.epsilon)}: {first.sentence}{aside}"]


FORMAT = "fairpate.card/1"


def write_card(
    root: Path, *, intended_use: str | None = None, out_of_scope: str | None = None, contact: str | None = None
) -> tuple[Path, Path]:
    """Write ``public/card.html`` and ``public/card.json`` of the run in ``root``, and return their paths.

    What the caller does not say of the use is named as not stated. RunFolderError for a folder without
    a run, RunDirectoryError for a run that published nothing.
    """
    run = run_at(root)
    card = read_card(run, use=IntendedUse(intended=intended_use, out_of_scope=out_of_scope, contact=contact))
    tell(1, 3)
    write_json(run.card, card_values(card))
    tell(2, 3)
    write_text(run.card_page, card_page(card))
    tell(3, 3)
    return run.card_page, run.card


def card_values(card: Card) -> dict[str, Any]:
    """What ``card.json`` holds."""
    derived = {name: getattr(card, name) for name in ("description", "publishable", "not_publishable", "limits")}
    said = verdict(card.evaluation, card.privacy)
    derived |= {"verdict": said.line, "meaning": said.meaning}
    protects = {"protects": card.privacy.protects}
    plain = asdict(card) | {"evaluation": card.evaluation.to_json()}
    if card.refusals is not None and card.refusals.unrefused is not None:
        plain["refusals"]["unrefused"] = card.refusals.unrefused.to_json()
    values: dict[str, Any] = strict({"format": FORMAT, **plain, **derived, **protects})
    return values


def read_card(run: RunDirectory, *, use: IntendedUse) -> Card:
    """The card of a run; only its public part, its method and what names its data set are read."""
    for path in (run.statement, run.metrics, run.student):
        if not path.is_file():
            raise RunDirectoryError(
                f"{path}: missing; a card is of a published student: finish the run first. A run of a method without "
                "privacy publishes nothing."
            )
    if "least_cell" not in read_json(run.metrics):
        raise RunDirectoryError(
            f"{run.metrics}: measured by an earlier version, which showed groups of any size; repeat the run's "
            "command, which measures the same model again and charges nothing."
        )
    # As plain values: a card needs the method's name, and not the package that it is from.
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    trained_on = require_data(run)
    require_student_of(run, trained_on, read_student_card(run.student))
    return card_of(run, method=config["method"], data=_data(trained_on, config["data"]), use=use, made_on=run.made_on)


def card_of(run: RunDirectory, *, method: str, data: CardData, use: IntendedUse, made_on: str | None) -> Card:
    """The card that follows from statement, metrics and student of ``run``, and what else is to be said."""
    statement, metrics = read_statement(run), read_json(run.metrics)
    population = read_json(run.private_population) if run.private_population.is_file() else None
    refusals, unrefused = metrics.pop("orders", None), metrics.pop("without_refusals", None)
    metrics.pop("without_privacy", None)  # published by earlier versions, of a model that learned from test records
    student = read_student_card(run.student)
    return Card(
        model=CardModel(
            method=method,
            architecture=student.model.name,
            input_shape=student.input_shape,
            classes=student.label_names,
            groups=student.group_names,
            sensitive_attribute=student.sensitive_attribute,
            reject_option=student.idp3,
            sha256=sha256_of(run.student),
            method_title=method_title(method),
            made_on=made_on,
            made_by=f"FairPATE {__version__}",
            num_training_labels=student.num_training_labels,
        ),
        privacy=guarantee_of(statement),
        data=data,
        use=use,
        evaluation=Evaluation.from_json(metrics),
        refusals=None if refusals is None else _refusals(refusals, unrefused),
        private_population=None if population is None else PrivatePopulation.from_json(population),
    )


def guarantee_of(statement: PrivacyStatement) -> Guarantee:
    """The statement in the words of pages."""
    queries, events = statement.queries, statement.events
    return Guarantee(
        unit=statement.unit,
        relation=statement.relation,
        epsilon=math.inf if statement.epsilon is None else statement.epsilon,
        delta=statement.delta,
        accounting=statement.accounting,
        noise=statement.noise,
        tuning_accounted=statement.tuning_accounted,
        events=[described_event(event, statement.unit) for event in events]
        if queries is None
        else [f"{queries.submitted} queries to {_voters(statement)}, every one priced at its worst case"],
        not_protected=statement.not_protected,
        remarks=statement.remarks,
        earlier_releases=statement.earlier_releases or 0,
        epsilon_with_earlier=statement.epsilon_with_earlier,
        epsilon_adaptive_with_earlier=statement.epsilon_adaptive_with_earlier,
        # Neighbours are sampled at a rate that is configured, whatever the number of records.
        tells_size=queries is None and any(event.get("sampling_rate", 1) < 1 for event in events),
    )


def _voters(statement: PrivacyStatement) -> str:
    """Who was asked, by what was priced."""
    sampled = any("sampling_rate" in event for event in statement.events)
    whose = " of persons" if statement.unit == "person" else ""
    return f"the nearest records of Poisson samples{whose}" if sampled else "teachers"


def described_event(event: Mapping[str, Any], unit: Unit | None = None) -> str:
    """One event of a statement as a line; ``unit`` is the statement's."""
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {f'{value:,.0f}' if 1e4 <= abs(value) < math.inf else f'{value:.4g}'}"
        for name, value in event.items()
        if isinstance(value, int | float) and name != "count"
    )
    # Older statements lack the noun.
    head, *of = str(event.get("noun") or event_from(event, unit).noun).partition(" of ")
    sample = "over Poisson samples" if event.get("sampling_rate", 1) < 1 else ""
    number = event.get("count", 1)
    each = " each" if number > 1 else ""
    words = [counted(number, head) + "".join(of), sample, f"({numbers}{each})" if numbers else ""]
    return " ".join(filter(None, words))


def _data(trained_on: DataRecord, values: Mapping[str, Any]) -> CardData:
    if trained_on.given_from_python:
        return CardData(name=trained_on.name, kind=trained_on.kind, given_from_python=True)
    config = parse_config(
        {name: values[name] for name in ("name", "seed", "options", "declaration") if name in values}, DataConfig
    )
    if config.name != trained_on.name:
        raise ConfigError(f"data.name: the run was trained on {trained_on.name}, its configuration says {config.name}.")
    entry = entry_for(config)
    return CardData(
        name=entry.name,
        kind=trained_on.kind,
        task=entry.task,
        publisher=entry.publisher,
        address=entry.address,
        licence=entry.licence,
        options=entry.complete_options(config.options),
        split_seed=config.seed,
    )


def _refusals(orders: Mapping[str, Any], unrefused: Mapping[str, Any] | None) -> CardRefusals:
    lowest, highest = ([orders[name][end] for name in ("accuracy", "coverage")] for end in ("low", "high"))
    return CardRefusals(
        num_orders=len(orders["orders"]),
        accuracy=(lowest[0], highest[0]),
        coverage=(lowest[1], highest[1]),
        unrefused=None if unrefused is None else Evaluation.from_json(unrefused),
    )


FloatArray = npt.NDArray[np.float64]
_MAX_COURSE_POINTS, _MAX_COMPOSED_POINTS = 200, 8


def write_reports(
    run: RunDirectory,
    *,
    title: str,
    num_public_records: int,
    spending: Spending | None,
    statement: PrivacyStatement,
    assessment: Assessment,
    num_training_labels: int | None,
    private_population: PrivatePopulation | None,
    without_privacy: WithoutPrivacy | None,
) -> None:
    """Write ``public/report.html``, and ``private/report.html`` where queries were spent."""
    evaluations = assessment.evaluations
    if spending is None:  # without teachers nobody calls it a student
        evaluations = {name.replace("student", "model"): found for name, found in evaluations.items()}
    public = PublicReport(
        title=title,
        method=method_title(statement.method),
        guarantee=guarantee_of(statement),
        voting=None if spending is None else _voting(spending, statement, assessment.headline, num_public_records),
        evaluations=evaluations,
        reject_option=assessment.reject_option,
        num_training_labels=num_training_labels,
        private_population=private_population,
        made=made_words(run.made_on, __version__),
    )
    if spending is not None:
        write_text(run.private_report, private_report(_private_report(public, spending, without_privacy)))
    write_text(run.public_report, public_report(public))


def _voting(spending: Spending, statement: PrivacyStatement, headline: Evaluation, num_public_records: int) -> Voting:
    queries, terms = statement.queries, spending.terms
    assert queries is not None
    return Voting(
        mechanism=terms.mechanism.describe(),
        gate=terms.gate,
        num_teachers=terms.num_teachers,
        voters=terms.mechanism.voters,
        num_public_records=num_public_records,
        queries_submitted=queries.submitted,
        answered=queries.answered,
        rejected_confidence=queries.rejected_confidence,
        rejected_fairness=queries.rejected_fairness,
        refused_free=queries.refused_free,
        epsilon_course_Q=_course_beforehand(spending),
        outcomes=_outcomes_by_group(spending, headline),
        answered_GC=_answers_by_group(spending),
    )


def _private_report(public: PublicReport, spending: Spending, without_privacy: WithoutPrivacy | None) -> PrivateReport:
    submitted = range(len(spending.charges_Q))
    drawn = spending.drawn(0, len(submitted))
    best = accountant.epsilon_data_dependent([drawn], target_delta=spending.target_delta)
    depends_on_votes = drawn.data_dependent
    worst = float(accountant.rdp([spending.terms.mechanism.worst_case(1)], [best.order])[0])
    assert public.voting is not None
    beforehand_Q = public.voting.epsilon_course_Q
    return PrivateReport(
        public=public,
        rdp_order=best.order,
        rdp_Q=[
            float(accountant.rdp_data_dependent([spending.drawn(query, query + 1)], [best.order])[0])
            for query in stepwise(submitted)
        ],
        epsilon_data_dependent_course_Q=_course(
            spending, lambda a, b: accountant.rdp_data_dependent([spending.drawn(a, b)])
        )
        if depends_on_votes
        else beforehand_Q,
        epsilon_as_in_paper_course_Q=_course(spending, spending.as_in_paper) if depends_on_votes else beforehand_Q,
        rdp_worst_Q=[worst * len(charges) for charges in spending.charges_Q],
        outcomes_Q=spending.outcomes_Q,
        without_privacy=without_privacy,
        **_votes_of(spending),
    )


def _votes_of(spending: Spending) -> dict[str, Any]:
    """How each query was voted on, for whom, when and who asked."""
    last_Q = [charges[-1].reservation for charges in spending.charges_Q]
    ranked_Q = [sorted(reservation.votes, reverse=True) for reservation in last_Q]
    return {
        "plurality_votes_Q": [votes[0] for votes in ranked_Q],
        "runner_up_votes_Q": [votes[1] for votes in ranked_Q],
        "num_votes_Q": [sum(votes) for votes in ranked_Q],
        "groups_Q": [reservation.group for reservation in last_Q],
        "at_Q": [reservation.at_s for reservation in last_Q],
        "callers_Q": [reservation.asker.caller for reservation in last_Q],
    }


def _course_beforehand(spending: Spending) -> Sequence[float]:
    """Epsilon after each query, whatever the votes: as :func:`_course`, or by loss distributions where there are."""
    submitted = len(spending.charges_Q)
    if not accountant.has_loss_distributions([spending.submitted(0, submitted)]):
        return _course(spending, lambda a, b: accountant.rdp([spending.submitted(a, b)]))
    # Composing is slow, and the course bends most at its start.
    ends = np.unique(np.ceil(submitted * np.linspace(0, 1, _MAX_COMPOSED_POINTS + 1)[1:] ** 2).astype(int)).tolist()
    epsilons = [
        accountant.least_epsilon([spending.submitted(0, end)], target_delta=spending.target_delta)
        for end in stepwise(ends)
    ]
    course: list[float] = np.interp(np.arange(1, submitted + 1), ends, epsilons).tolist()
    return course


def _course(spending: Spending, price: Callable[[int, int], FloatArray]) -> Sequence[float]:
    """Epsilon after each query: exact at up to 200 of them, the last included, straight lines between."""
    submitted = len(spending.charges_Q)
    ends = np.unique(np.linspace(1, submitted, min(submitted, _MAX_COURSE_POINTS)).round().astype(int))
    curve_A = np.zeros(len(DEFAULT_ORDERS))
    epsilons, start = [], 0
    for end in stepwise(ends.tolist()):
        # Curves add up, so that each query is priced once, not again for every point after it.
        curve_A = curve_A + price(start, end)
        epsilons.append(epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=spending.target_delta)[0])
        start = end
    course: list[float] = np.interp(np.arange(1, submitted + 1), ends, epsilons).tolist()
    return course


def _outcomes_by_group(spending: Spending, evaluation: Evaluation) -> list[GroupOutcomes]:
    groups = np.array([charges[-1].reservation.group for charges in spending.charges_Q])
    outcomes = np.array(spending.outcomes_Q)

    def count(group: int, outcome: Outcome) -> int:
        return int(((groups == group) & (outcomes == outcome)).sum())

    return [
        GroupOutcomes(
            name=name,
            answered=count(group, "answered"),
            rejected_confidence=count(group, "confidence"),
            rejected_fairness=count(group, "fairness"),
            refused_free=count(group, "free"),
        )
        for group, name in enumerate(evaluation.group_names)
    ]


def _answers_by_group(spending: Spending) -> list[list[int]]:
    counts = [[0] * spending.terms.num_classes for _ in range(spending.terms.num_groups)]
    for charges in spending.charges_Q:
        settled = charges[-1].outcome
        if settled is not None and settled.label is not None:
            counts[charges[-1].reservation.group][settled.label] += 1
    return counts


_MOST_RECORDS = 256


def write_portable(run: RunDirectory, student: Student, dataset: Dataset, reporter: Reporter) -> None:
    """Write both files, unless they are there and belong to this student."""
    from student.portable import PortableError, missing_packages, portable  # of torch, which a card does without

    if _is_there(run):
        return
    missing = missing_packages()
    if missing:
        reporter.note("onnx", f"no model.onnx: {', '.join(missing)} missing; pip install 'fairpate[onnx]', run again")
        return
    records = dataset.public.x[:_MOST_RECORDS]
    if dataset.before_embedding is not None:  # with the embedding inside, checked on public records from before it
        student, records = replace(student, embedding=dataset.embedding), dataset.before_embedding.examples
    try:
        with reporter.stage("onnx"):
            made = portable(student, records, encoding=encoding_of(dataset, tuple(records.shape[1:])))
    except PortableError as error:
        reporter.note("onnx", str(error))
        return
    # The description last: with it both are whole.
    write_atomically(run.graph, lambda path: path.write_bytes(made.graph))
    write_json(run.graph_description, made.description | {"student_sha256": sha256_of(run.student)})


def _is_there(run: RunDirectory) -> bool:
    if not (run.graph.is_file() and run.graph_description.is_file()):
        return False
    described = read_json(run.graph_description)
    found = {"sha256": hashlib.sha256(run.graph.read_bytes()).hexdigest(), "student_sha256": sha256_of(run.student)}
    return found.items() <= described.items()


def encoding_of(dataset: Dataset, record_shape: tuple[int, ...]) -> dict[str, Any]:
    """How a raw row becomes what the graph reads, as far as that was declared."""
    if len(record_shape) > 1:
        inside = "" if dataset.embedding is None else " and places them in the public embedding"
        return {"of": f"bytes 0 to 255: channels, rows, columns; the graph scales them{inside}"}
    if not dataset.feature_codes:
        before = dataset.before_embedding
        names = dataset.feature_names if before is None else before.feature_names
        return {"of": _of_named(names), "features": [{"feature": name} for name in names]}
    return {
        "of": "features of declared columns, in this order",
        "kinds": {
            "number": "(s(v) - s(low)) / (s(high) - s(low)), clipped to 0..1, where s(v) = v, or "
            "sign(v) ln(1 + |v|) for scale log; v is `missing` where it is not known: where its text is in `unknown`, "
            "or is a number equal to one in it, such as 9.0 where 9 is",
            "missing": "1 where v is not known, else 0",
            "category": "1 where the text is one of values, else 0",
            "element": "the number at `place` of the list, from 0",
            "other": "1 where the text is none of values, else 0",
            "band": "1 where at_least <= v < below, else 0; a last band has no below",
        },
        "features": [code.to_json() for code in dataset.feature_codes],
    }


def _of_named(names: tuple[str, ...]) -> str:
    if names == feature_names():
        return "histograms of a picture's oriented gradients (fairpate.oriented_gradients), in place of the picture"
    place = names[0].rpartition(" ")[0] if names else ""
    if PLACE.fullmatch(place):
        return f"what {place} gives for a picture, which is code that no graph holds: run it first"
    return "features in the order of the data set"
