"""The products of a finished run: report, model card, portable model, and the view in a notebook.

The public and the private report are written at the end of a run, from its release and its evaluation. The card and the
notebook's view read only the public part of a run directory, and for the card also the method and data set in the run's
configuration. ``model.onnx`` is made from the student and public facts: it has no privacy cost.
"""

from __future__ import annotations

import base64
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpate import __version__
from fairpate.config import CODE_NAME, ConfigError, DataConfig, parse_config, read_yaml
from fairpate.data import Dataset, entry_for
from fairpate.data.dataset import DatasetEntry, sha256_of
from fairpate.data.features import feature_names
from fairpate.data.registry import completed_pool
from fairpate.encoders import Encoder
from fairpate.files import write_atomically
from fairpate.methods.base import looks_of, method_title
from fairpate.methods.voting import Spending
from fairpate.pages import counted, epsilon_text, made_words, render
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, epsilon_of_curve
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_statement,
    require_data,
    require_student_of,
    run_at,
    write_json,
    write_text,
)
from fairpate.report import records, run_page
from fairpate.report.answers import AnswerGuarantee
from fairpate.report.decision import Choice
from fairpate.report.figures import class_label
from fairpate.report.frontier import Row, by_panel, points_of
from fairpate.report.frontier_page import findings
from fairpate.report.metrics import Evaluation, WithoutPrivacy
from fairpate.report.model_card import Card, CardData, CardModel, CardRefusals, IntendedUse, card_page
from fairpate.report.paper_figures import slices_picture
from fairpate.report.population import PrivatePopulation
from fairpate.report.records import Guarantee, RunStatement
from fairpate.run.private_metrics import Assessment
from fairpate.terminal import Reporter
from fairpate.types import FloatArray, NotionName, PrivacyStatement, UserError, stepwise, strict, tell
from student.card import read_card as read_student_card

if TYPE_CHECKING:
    from fairpate.run.sweep import SweepFolder
    from student.student import Student


def read_evaluation(run: RunDirectory) -> Evaluation:
    """Return the published metrics of ``run`` on its test records. RunDirectoryError if the file is missing or is not
    JSON; KeyError, TypeError or another error if its fields are wrong."""
    return evaluation_of(read_json(run.metrics))


def evaluation_of(metrics: Mapping[str, Any]) -> Evaluation:
    """Return the metrics in ``metrics``, the content of a run's ``metrics.json``; errors as in
    :func:`read_evaluation`."""
    # The file also holds what :meth:`Assessment.to_json` adds to the headline.
    others = {"orders", "without_refusals", "answers"}
    return Evaluation.from_json({name: metrics[name] for name in metrics.keys() - others})


def read_answers(run: RunDirectory) -> AnswerGuarantee | None:
    """Return what ``run`` guarantees about the errors of its model's answers; None if no bound was asked for."""
    return _answers_of(read_json(run.metrics))


def _answers_of(metrics: Mapping[str, Any]) -> AnswerGuarantee | None:
    found = metrics.get("answers")
    return None if found is None else AnswerGuarantee.from_json(found)


def read_claims(run: RunDirectory, *, for_operator: bool = False) -> RunStatement:
    """Return what a finished run claims: its privacy guarantee and its metrics. With ``for_operator`` the result
    includes the accuracy of a model trained without privacy, if the run measured it."""
    baseline = None
    if for_operator and run.without_privacy.exists():
        baseline = WithoutPrivacy(**read_json(run.without_privacy))
    metrics = read_json(run.metrics)
    return RunStatement(
        guarantee=Guarantee.of(read_statement(run)),
        measured=evaluation_of(metrics),
        without_privacy=baseline,
        for_operator=for_operator,
        answers=_answers_of(metrics),
        has_reject_option="orders" in metrics,
        intended_use=stated_use(run).intended,
        audited=read_audited(run),
        choice=read_choice(run),
    )


def read_choice(run: RunDirectory) -> Choice | None:
    """Return what a choice by results costs in the comparison to which ``run`` belongs; None for a run alone."""
    return Choice(**read_json(run.comparison)) if run.comparison.is_file() else None


def state_choice(run: RunDirectory, choice: Choice | None) -> None:
    """Write what a choice by results costs in the comparison to which the finished ``run`` belongs, into its folder and
    on its public report; None: the comparison has no other release."""
    if choice == read_choice(run):
        return
    if choice is None:
        run.comparison.unlink()
    else:
        write_json(run.comparison, asdict(choice))
    renew_report(run)


def renew_report(run: RunDirectory) -> None:
    """Write on the reports of ``run`` what has become known since: an audit, the intended use, what a choice by results
    costs. A report that is missing is not written."""
    for path, for_operator in ((run.public_report, False), (run.private_report, True)):
        if path.is_file():
            html = path.read_text(encoding="utf-8")
            renewed = run_page.with_first_screen(html, read_claims(run, for_operator=for_operator))
            if renewed != html:
                write_text(path, renewed)


def stated_use(run: RunDirectory) -> IntendedUse:
    """Return what the model of ``run`` is for: as its card says or, without a card, as the declaration of its records
    does. Nothing is stated if neither can be read."""
    if run.card.is_file():
        given = read_json(run.card).get("use", {})
        return IntendedUse(**{name: given.get(name) for name in IntendedUse.__dataclass_fields__})
    try:
        if require_data(run).given_from_python:
            return IntendedUse()
        return _declared_use(entry_for(_chosen_data(run)))
    except (UserError, OSError):  # the declaration may be elsewhere
        return IntendedUse()


def write_audit(found: run_page.Audit, path: Path, page: Path, *, private: bool = False) -> None:
    """Write an audit to the file ``path`` as JSON, and as a page to ``page``."""
    write_json(path, strict(found.to_json()), private=private)
    write_text(page, run_page.audit_page(found), private=private)


def read_audited(run: RunDirectory) -> bool | None:
    """Return whether the published audit of ``run`` found no fault; None if there is none. An audit with the private
    records is not read: its result depends on them."""
    return not read_json(run.audit).get("refuted") if run.audit.is_file() else None


def _chosen_data(run: RunDirectory) -> DataConfig:
    """Return which data set the configuration of ``run`` names, without the folder of the data: a card can be made
    where the records are not."""
    data = read_yaml(run.config)["data"]
    return parse_config(
        {each: data[each] for each in ("name", "seed", "options", "declaration") if each in data}, DataConfig
    )


def _declared_use(entry: DatasetEntry) -> IntendedUse:
    return IntendedUse(
        intended=entry.intended_use or None, out_of_scope=entry.out_of_scope or None, contact=entry.contact or None
    )


def run_html(run: RunDirectory) -> str:
    """Return the HTML by which a notebook displays a run: its verdict on fairness, metrics and files."""
    try:
        claims, record = read_claims(run), read_json(run.record)
        places = {"report": run.public_report, "card": run.card_page, "statement": run.statement, "model": run.student}
        card = f"fairpate card {shlex.quote(_from_here(run.root))}"
        return render(
            "notebook.html",
            title=f"{record['method']} on {record['data']}, seed {record['seed']}",
            sentences=[claims.line, claims.guarantee.meaning],
            rows=[*claims.rows, *((name, _from_here(path)) for name, path in places.items() if path.exists())],
            remarks=claims.guarantee.remarks,
            commands={"Card": card, "Statement in Python": "fairpate.read_statement(run)"},
        )
    # A representation must not raise: the notebook would show a traceback in place of the run.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunDirectoryError):
        words = (
            f"No published result in {run.root}: the run is unfinished or damaged, or it has no privacy guarantee and "
            "belongs to the operator alone."
        )
        return render("notebook.html", title="Run", sentences=[words])


def fitted_html(statement: PrivacyStatement, *, name: str) -> str:
    """Return the HTML by which a notebook displays a fitted estimator: its privacy guarantee. There are no metrics,
    because they need test records."""
    guarantee, calls = Guarantee.of(statement), "X_test, y_test, sensitive_features=groups"
    commands = {"Accuracy, disparity and coverage": f".plot({calls})", "Statement": ".statement()"}
    if statement.epsilon is not None:
        commands["Card"] = f".card(folder, {calls})"
    return render(
        "notebook.html",
        title=name,
        sentences=[guarantee.meaning],
        rows=[guarantee.row],
        remarks=guarantee.remarks,
        commands=commands,
    )


_MOST_POINTS = 1000  # a picture of more takes seconds, each time that it is shown
_MOST_PANELS = 12


def comparison_html(folder: SweepFolder, rows: Sequence[Row], notion: NotionName) -> str:
    """Return the HTML by which a notebook displays a comparison of methods: one finding in words per data set and
    privacy class, and a figure of one data set.

    ``rows``: the rows of the results table in ``folder`` that may be published. ``notion``: the notion of fairness that
    comes first.
    """
    # Not the report page itself, which would add a drawing library to the notebook.
    done = [row.record for row in rows if row.record is not None]
    points = points_of(done, notion=notion, looks=looks_of({row.method for row in rows}))
    panels = list(by_panel(points).values())
    sentences = ["Noise from a seed: not private."] if any(point.is_seeded for point in points) else []
    for panel_points in panels[:_MOST_PANELS]:
        panel, found = panel_points[0].panel, findings(panel_points)
        of = f"{panel.data}, {class_label(panel.privacy)}"
        if found.budgets:
            first = found.budgets[0]
            left_out = f" Left out: {'; '.join(found.left_out)}." if found.left_out else ""
            sentences.append(f"{of}, ε up to {epsilon_text(first.epsilon)}: {first.sentence}{left_out}")
        else:
            sentences.append(f"{of}: no configuration with a finite ε can be compared.")
    if len(panels) > _MOST_PANELS:
        sentences.append(f"{counted(len(panels) - _MOST_PANELS, 'more data set')} on the page.")
    shown = next((found for found in panels if len(found) <= _MOST_POINTS), [])
    for_paper = f"fairpate compare {shlex.quote(_from_here(folder.root))} --figures paper"
    return render(
        "notebook.html",
        title=f"{folder.root.name}: {counted(len(points), 'configuration')}, {counted(len(done), 'run')}",
        sentences=sentences,
        picture=base64.b64encode(slices_picture(shown) if shown else b"").decode("ascii"),
        alt=f"Slices of {shown[0].panel.data}" if shown else "",
        commands={"Page": _from_here(folder.report), "For a paper": for_paper},
    )


def _from_here(path: Path) -> str:
    """Return ``path`` as text, relative to the notebook's working directory if it is inside it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


FORMAT = "fairpate.card/1"


def write_card(
    root: Path, *, intended_use: str | None = None, out_of_scope: str | None = None, contact: str | None = None
) -> tuple[Path, Path]:
    """Write the model card, ``public/card.html`` and ``public/card.json``, of the run in the folder ``root``, and
    return the paths of both files.

    An argument that is None is what the declaration of the data says of it; the card names what is stated nowhere.
    RunFolderError for a folder without a run, RunDirectoryError for a run that published nothing.
    """
    run = run_at(root)
    card = read_card(run, use=IntendedUse(intended=intended_use, out_of_scope=out_of_scope, contact=contact))
    tell(1, 3)
    write_json(run.card, card_values(card))
    tell(2, 3)
    write_text(run.card_page, card_page(card))
    renew_report(run)  # it says whether an intended use is stated
    tell(3, 3)
    return run.card_page, run.card


def require_card(run: RunDirectory, statement: PrivacyStatement) -> None:
    """Write the model card of ``run``, unless both of its files (HTML and JSON) exist and match ``statement`` and the
    run's student. The new card repeats the intended use that an earlier card states."""
    if run.card.is_file() and run.card_page.is_file():
        card = read_json(run.card)
        # A service that was started since may have raised what the statement claims, or answered more queries; and a
        # run may be measured again, with another least size of a cell.
        measured = read_evaluation(run).to_json() if run.metrics.is_file() else None
        current = strict({"privacy": asdict(Guarantee.of(statement)), "evaluation": measured})
        if current.items() <= card.items() and card.get("model", {}).get("sha256") == sha256_of(run.student):
            return
    use = stated_use(run)
    write_card(run.root, intended_use=use.intended, out_of_scope=use.out_of_scope, contact=use.contact)


def card_values(card: Card) -> dict[str, Any]:
    """Return the content of the file ``card.json`` for the model card ``card``."""
    plain = asdict(card) | {"evaluation": card.evaluation.to_json()}
    if card.refusals is not None and card.refusals.unrefused is not None:
        plain["refusals"]["unrefused"] = card.refusals.unrefused.to_json()
    sentences = card.sentences | {"verdict": card.statement.line, "meaning": card.privacy.meaning}
    return strict({"format": FORMAT, **plain, **sentences, "protects": card.privacy.protects})


def read_card(run: RunDirectory, *, use: IntendedUse) -> Card:
    """Return the model card of a run. It is made from the run's published files and from its configuration, which names
    the method and the data set. ``use``: the intended use that the card states; what is None in it is as the data set
    declares it.

    RunDirectoryError for a run that published no model, ConfigError if the configuration names another data set.
    """
    # The public part of a run without privacy does not exist, and that of an unfinished run is incomplete.
    for path in (run.statement, run.metrics, run.student):
        if not path.is_file():
            raise RunDirectoryError(
                f"{path}: missing, but a card describes a published student; repeat the run's command to finish the "
                "run. A run of a method without privacy publishes nothing and has no card."
            )
    trained_on = require_data(run)
    # The file may have been replaced by the model of another run.
    require_student_of(run, trained_on, read_student_card(run.student))
    data = CardData(name=trained_on.name, kind=trained_on.kind, given_from_python=True)
    if not trained_on.given_from_python:
        chosen = _chosen_data(run)
        if chosen.name != trained_on.name:
            raise ConfigError(
                f"data.name: the run was trained on {trained_on.name}, but its configuration names {chosen.name}; "
                "restore the run's config.yaml and data.json from one copy."
            )
        entry = entry_for(chosen)
        declared = _declared_use(entry)
        use = IntendedUse(**{name: given or getattr(declared, name) for name, given in asdict(use).items()})
        data = CardData(
            kind=trained_on.kind,
            **{name: getattr(entry, name) for name in ("name", "task", "publisher", "address", "licence")},
            options=entry.complete_options(chosen.options),
            split_seed=chosen.seed,
        )
    # Read as a plain value: a card needs the method's name, not the package that defines it.
    return card_of(run, method=read_yaml(run.config)["method"], data=data, use=use, made_on=run.made_on)


def card_of(run: RunDirectory, *, method: str, data: CardData, use: IntendedUse, made_on: str | None) -> Card:
    """Return the model card of ``run``. It combines the run's published statement, metrics and student with the
    arguments. ``made_on`` is the date on which the run began; None if unknown."""
    metrics, student = read_json(run.metrics), read_student_card(run.student)
    population = read_json(run.private_population) if run.private_population.is_file() else None
    orders, unrefused, refusals = metrics.get("orders"), metrics.get("without_refusals"), None
    if orders is not None:
        accuracy, coverage = ((orders[name]["low"], orders[name]["high"]) for name in ("accuracy", "coverage"))
        refusals = CardRefusals(
            num_orders=len(orders["orders"]),
            accuracy=accuracy,
            coverage=coverage,
            unrefused=None if unrefused is None else Evaluation.from_json(unrefused),
        )
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
        privacy=Guarantee.of(read_statement(run)),
        data=data,
        use=use,
        evaluation=read_evaluation(run),
        refusals=refusals,
        answers=read_answers(run),
        choice=read_choice(run),
        private_population=None if population is None else PrivatePopulation.from_json(population),
    )


# Points of the curve over queries: Renyi curves add up, loss distributions are composed anew for each point.
_MAX_COURSE_POINTS, _MAX_COMPOSED_POINTS = 200, 8


def write_reports(
    run: RunDirectory,
    dataset: Dataset,
    student: Student,
    assessment: Assessment,
    *,
    spending: Spending | None = None,
    private_population: PrivatePopulation | None = None,
) -> None:
    """Write the public report of a run, ``public/report.html``, and for a run with a privacy guarantee the operator's
    report, ``private/report.html``, which has the accuracy without noise and, if queries were answered, their costs.

    The claims are read from the files of ``run``; ``assessment`` has all metrics on test records. ``spending`` has the
    charges of the run's queries (None: its method submits none). ``private_population`` estimates how the student
    treats the private records.
    """
    statement = read_statement(run)
    method, evaluations, voting = method_title(statement.method), assessment.evaluations, None
    if method != statement.method:  # the registered name too, by which commands know it
        method = f"{method} ({statement.method})"
    if spending is None:  # a model without teachers is not called a student
        evaluations = {name.replace("student", "model"): found for name, found in evaluations.items()}
    else:
        # Public facts about the queries: their epsilon after each one is data-independent.
        queries, terms, num_submitted = statement.queries, spending.terms, len(spending.charges_Q)
        assert queries is not None
        if accountant.has_loss_distributions([spending.submitted(0, num_submitted), *terms.beside]):
            # Composing is slow, and the course bends most at its start.
            spaced = num_submitted * np.linspace(0, 1, _MAX_COMPOSED_POINTS + 1)[1:] ** 2
            ends = np.unique(np.ceil(spaced).astype(int)).tolist()
            epsilons = [
                accountant.least_epsilon([spending.submitted(0, end), *terms.beside], target_delta=terms.budget.delta)
                for end in stepwise(ends)
            ]
            course = [(0.0, 0.0), *zip(ends, epsilons, strict=True)] if num_submitted else []
        else:
            course = _course(spending, lambda start, end: accountant.rdp([spending.submitted(start, end)]))
        # The last reservation has the outcome: a crash left the earlier ones of a query open.
        asked = [charges[-1] for charges in spending.charges_Q]
        outcomes = Counter(zip((last.group for last in asked), spending.outcomes_Q, strict=True))
        released = ((last.group, last.outcome.label) for last in asked if last.outcome is not None)
        labels = Counter((group, label) for group, label in released if label is not None)
        voting = records.AnsweredQueries(
            mechanism=terms.mechanism.describe(),
            gate=terms.gate,
            num_teachers=terms.num_teachers,
            voters=terms.mechanism.voters,
            num_public_records=len(dataset.public),
            **vars(queries),
            epsilon_course=course,
            outcomes_GO=[[outcomes[group, each] for each in records.OUTCOMES] for group in range(terms.num_groups)],
            answered_GC=[[labels[group, k] for k in range(terms.num_classes)] for group in range(terms.num_groups)],
        )
    public = records.PublicReport(
        title=dataset.name,
        method=method,
        claims=read_claims(run),
        voting=voting,
        evaluations=evaluations,
        reject_option=assessment.reject_option,
        num_training_labels=student.card.num_training_labels,
        private_population=private_population,
        made=made_words(run.made_on, __version__),
    )
    operators = replace(public, claims=read_claims(run, for_operator=True))
    if spending is not None and voting is not None:
        # The operator's page: the data-dependent cost of each query, when it was charged, and to whom.
        submitted = range(len(spending.charges_Q))
        drawn = spending.drawn(0, len(submitted))
        best = accountant.epsilon_data_dependent(
            [drawn, *spending.terms.beside], target_delta=spending.terms.budget.delta
        )
        # At the one order that is best for the total: costs of single queries at orders of their own would not add up.
        worst = float(accountant.rdp([spending.terms.mechanism.worst_case(1)], [best.order])[0])
        # Where no cost depends on votes, all three courses are one.
        dependent = as_in_paper = voting.epsilon_course
        if drawn.data_dependent:
            dependent = _course(
                spending, lambda start, end: accountant.rdp_data_dependent([spending.drawn(start, end)])
            )
            as_in_paper = _course(spending, spending.as_in_paper)
        private = records.PrivateReport(
            operators=operators,
            rdp_order=best.order,
            rdp_Q=[
                float(accountant.rdp_data_dependent([spending.drawn(query, query + 1)], [best.order])[0])
                for query in stepwise(submitted)
            ],
            # Every reservation of a query was charged, those that a crash left open included.
            rdp_worst_Q=[worst * len(charges) for charges in spending.charges_Q],
            epsilon_data_dependent_course=dependent,
            epsilon_as_in_paper_course=as_in_paper,
            votes_QC=[reservation.votes for reservation in asked],
            groups_Q=[reservation.group for reservation in asked],
            outcomes_Q=spending.outcomes_Q,
            at_Q=[reservation.at_s for reservation in asked],
            callers_Q=[reservation.asker.caller for reservation in asked],
        )
        write_text(run.private_report, run_page.private_report(private))
    elif run.private_report != run.public_report:  # of a run without privacy all is the operator's
        write_text(run.private_report, run_page.operator_report(operators))
    write_text(run.public_report, run_page.public_report(public))


def _course(spending: Spending, price: Callable[[int, int], FloatArray]) -> list[tuple[float, float]]:
    """Return how epsilon grows with the queries that a ledger charged, as pairs (number of queries, their epsilon).

    The pairs are (0, 0) and up to 200 others, the last of which is for all queries. ``price(start, end)`` returns the
    Renyi curve of the queries ``start`` to ``end``. Releases beside the queries count from the first one on.
    """
    submitted = len(spending.charges_Q)
    ends = np.unique(np.linspace(1, submitted, min(submitted, _MAX_COURSE_POINTS)).round().astype(int))
    curve_A = spending.beside_rdp
    course, start = [(0.0, 0.0)] if submitted else [], 0
    for end in stepwise(ends.tolist()):
        # Curves add up, so that each query is priced once, not again for every point after it.
        curve_A = curve_A + price(start, end)
        course.append((end, epsilon_of_curve(curve_A, DEFAULT_ORDERS, target_delta=spending.terms.budget.delta)[0]))
        start = end
    return course


_MOST_RECORDS = 256


def write_portable(
    run: RunDirectory, student: Student, dataset: Dataset, reporter: Reporter, *, encoder_file: Path | None = None
) -> None:
    """Write the published model as an ONNX graph, ``model.onnx``, with its description ``model.json``, unless both
    files exist and were made from ``student``. ``encoder_file``: the weights of the encoder of the data set, if no
    package carries them.

    If packages are missing or torch cannot export the model, a note gives the reason, and nothing is raised, because a
    run is complete without these files.
    """
    from student.student import PortableError, missing_packages, portable  # imports torch, which a card does not need

    if run.graph.is_file() and run.graph_description.is_file():
        # Checked by content: file times do not survive a copy of the folder.
        found = {"sha256": sha256_of(run.graph), "student_sha256": sha256_of(run.student)}
        if found.items() <= read_json(run.graph_description).items():
            return
    if missing := missing_packages():
        reporter.note("onnx", f"no model.onnx: {', '.join(missing)} missing; pip install 'fairpate[onnx]', run again")
        return
    # The graph contains encoder and embedding, so it is checked on public records as they were before these.
    if dataset.encoder is not None and dataset.pictures is not None:
        encoder = Encoder.of(dataset.encoder, encoder_file)
        student, pool = replace(student, embedding=dataset.embedding, encoder=encoder), dataset.pictures
    elif dataset.before_embedding is not None:
        student, pool = replace(student, embedding=dataset.embedding), dataset.before_embedding.examples
    else:
        pool = completed_pool(dataset)[:_MOST_RECORDS]
    if not len(pool):
        reporter.note("onnx", "no model.onnx: there are no public records on which to check the exported model")
        return
    try:
        with reporter.stage("onnx"):
            made = portable(student, pool, encoding=encoding_of(dataset, tuple(pool.shape[1:])))
    except PortableError as error:
        reporter.note("onnx", str(error))
        return
    # The description last: with it both are whole.
    write_atomically(run.graph, lambda path: path.write_bytes(made.graph))
    write_json(run.graph_description, made.description | {"student_sha256": sha256_of(run.student)})


def encoding_of(dataset: Dataset, record_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a description of how a raw row of data is encoded as the input of the ONNX graph, as far as the data set
    declares the encoding; it is written to ``model.json``."""
    if len(record_shape) > 1:
        inside = "" if dataset.encoder is None else f", applies the encoder {dataset.encoder.name}"
        inside += "" if dataset.embedding is None else " and places them in the public embedding"
        return {"of": f"bytes 0 to 255: channels, rows, columns; the graph scales them{inside}"}
    if not dataset.feature_codes:
        before = dataset.before_embedding
        names = dataset.feature_names if before is None else before.feature_names
        place = names[0].rpartition(" ")[0] if names else ""
        of = "features in the order of the data set"
        if names == feature_names():
            of = "histograms of a picture's oriented gradients (fairpate.oriented_gradients), in place of the picture"
        elif CODE_NAME.fullmatch(place):
            of = f"what {place} gives for a picture, which is code that no graph holds: run it first"
        return {"of": of, "features": [{"feature": name} for name in names]}
    return {
        "of": "features of declared columns, in this order",
        "kinds": records.WORDS["features"],
        "features": [
            {name: value for name, value in asdict(code).items() if value is not None} for code in dataset.feature_codes
        ],
    }
