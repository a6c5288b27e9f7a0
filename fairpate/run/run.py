"""One run of one method: forecast its cost and accuracy, check, load data, release, train, measure, state the
guarantee, and write the pages.

The steps are the same for every method. Public records may pre-train, label and calibrate the model; a reject option
may refuse predictions; the run writes one statement, one record and one report. A model without a privacy guarantee is
written to ``private/``. Everything else is published with the statement of its cost: private records affect ``public/``
only through the events of the method's releases (:class:`fairpate.releases.log.ReleaseLog`), and test records
through exact metrics, which no guarantee covers unless they are asked for as private.

A stage whose file exists is finished and is read back, so that a repeated command resumes the run. A released model is
never trained again.

**Forecast** (`fairpate run --dry-run`, :class:`RunForecast`), from public facts alone: no private record is read, and
no assumption is made about how far voters agree. The noise on the votes determines by how many votes the winning class
has to lead: the difference of two Gaussian noises of standard deviation sigma is at most 1.645 sqrt(2) sigma 19 times
in 20.

A run warns before it spends anything if it cannot beat the most common class (:func:`cautions`), for two reasons:

* The labels carry too little information even if all voters are right. Q labels that are right with probability p among
  C classes teach as much as W = Q ((p - 1/C) / (1 - 1/C))^2 noiseless labels (uniform label noise, to first order). If
  the most common class has the share m, W (1 - m) of them are of another class. Fewer than one teach nothing.
* A published run of the same method on the same data, at no smaller epsilon, did not beat m.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Group
from rich.table import Column
from rich.text import Text
from torch import nn

from aggregator.mechanism import ConfidentGnmax
from fairpate import types
from fairpate.config import AugmentConfig, ConfigError, DataConfig, ModelConfig, Override, read_yaml, values_digest
from fairpate.data import REGISTRY, Dataset, entry_for, load_data, load_once
from fairpate.data.dataset import DatasetEntry, Split, check_members, sha256_of
from fairpate.data.embedding import save_embedding
from fairpate.data.overlap import require_apart
from fairpate.data.registry import compared_on
from fairpate.files import make_folder, write_atomically
from fairpate.methods import base
from fairpate.methods.base import Method, OpenRun, Price, ReleasingMethod, Stream, Trained, Training
from fairpate.methods.own_votes import OwnVotes, read_votes_file
from fairpate.methods.pate import Labels, VotingMethod
from fairpate.nn.fit import Mixture, calibrate, predict_probabilities, pretrain_by_rotations
from fairpate.nn.models import build_model, pin_weights
from fairpate.pages import at_most, counted, delta_caution, delta_text, epsilon_text, is_void_delta, percent, question
from fairpate.privacy.accountant import Event, PureReleases
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import SecretTrials, event_from, event_json, flat
from fairpate.releases.arrays import Origin, Released, read_release, save_release, take_release
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    changed_fields,
    read_json,
    read_statement,
    sole_worker,
    write_json,
)
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import Odometer, Release, Standing, release_values, spent, standing_remarks
from fairpate.report.metrics import WithoutPrivacy
from fairpate.report.records import WORDS
from fairpate.run import folder as folders
from fairpate.run.folder import as_trained, create_run_directory, record_data
from fairpate.run.private_metrics import assess, assess_privately, check_metrics, stated_tables, table_event
from fairpate.run.publication import write_portable, write_reports
from fairpate.terminal import Reporter, listing
from fairpate.types import REMARKS, IntArray, PrivacyStatement, Relation, sklearn, stream_seed, strict
from student.card import StudentCard
from student.student import PublicRecords, Student, save_student, train_student

VOTERS: Mapping[str, str] = WORDS["voters"]


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The forecast of a run of ``method``, which `fairpate run --dry-run` displays: the run's cost, the noise on its
    labels, and the accuracy to expect.

    ``epsilon``: the epsilon that the run would publish; None: no guarantee. ``votes``: the number of votes that decide
    a label. ``noise_stddev_votes``: the standard deviation of the noise on each count of votes. ``labels``: the number
    of public records that get a label. ``lead_needed``: the share of votes by which the winning class must lead to win
    despite the noise 19 times in 20 (above 1: it cannot). ``votes``, ``noise_stddev_votes``, ``labels`` and
    ``lead_needed`` are None for a method that releases no labels, and if the number of private records is not public.

    ``expected``: the range that contains the accuracy of 9 of 10 published runs (:func:`expected_accuracy`).
    ``measured``: the accuracies of the user's earlier runs of the method on the data set at about this epsilon.
    ``caution``: why the model cannot be more accurate than always predicting the most common class. ``refused``: why
    this method cannot run; then all numbers are None.
    """

    method: str
    epsilon: float | None = None
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    lead_needed: float | None = None
    expected: tuple[float, float] | None = None
    measured: tuple[float, ...] = ()
    caution: str | None = None
    refused: str | None = None


def forecast(config: Method, dataset: Dataset, cost: Price | None) -> RunForecast:
    """Return the forecast of a run of ``config`` whose privacy cost is ``cost``. It is computed from public facts: the
    public records of ``dataset``, its declaration, and published runs. Private records are not read."""
    epsilon = None if cost is None else cost.epsilon
    expected = expected_accuracy(config)
    (voting, majority), caution = known_beforehand(config, dataset), None
    if voting is None:
        return RunForecast(method=config.method, epsilon=epsilon, expected=expected)
    if not config.protects_attribute_only:  # otherwise the votes are about groups, not about classes
        caution = too_little_to_learn(voting, dataset.num_classes, majority)
    facts = {name: getattr(voting, name) for name in ("votes", "noise_stddev_votes", "labels", "lead_needed")}
    return RunForecast(method=config.method, epsilon=epsilon, expected=expected, caution=caution, **facts)


def expected_accuracy(config: Method) -> tuple[float, float] | None:
    """Return the range that contains the accuracy of 9 of 10 published runs of ``config`` on its data set.

    `benchmarks/papers/marks.py` computes the ranges, which are in expected_accuracy.yaml. Between two measured epsilons
    the returned range covers the ranges of both. Return None if a setting is not at its default for the data set, if no
    runs of the method on the data set were published, or if epsilon is outside the measured range.
    """
    epsilon = getattr(config.target, "epsilon", None)
    published = read_yaml(Path(__file__).parents[1] / "expected_accuracy.yaml")
    ranges: dict[float, tuple[float, float]] = published.get(config.data.name, {}).get(config.method, {})
    if not ranges or epsilon is None or config.data.declaration or not min(ranges) <= epsilon <= max(ranges):
        return None
    usual = base.resolved([f"data.name={config.data.name}", f"target.epsilon={epsilon}"], config.method)
    changed = changed_fields(base.determining_values(config), base.determining_values(usual))
    # A split by another seed is one more of those that the runs were spread over.
    if changed.keys() - {"seed", "noise", "data.seed"}:
        return None
    near = [ranges[max(e for e in ranges if e <= epsilon)], ranges[min(e for e in ranges if e >= epsilon)]]
    return min(low for low, _ in near), max(high for _, high in near)


# Public labels; the share of the most common class among fewer is mostly chance.
_FEWEST_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The share of the most common class among records, which the accuracy of a useful model must exceed; ``source``
    says in words where the number is from."""

    share: float
    source: str


def known_beforehand(config: Method, dataset: Dataset) -> tuple[base.ExpectedVotes | None, Majority | None]:
    """Return what public records and the data set's declaration (its public description) show about a run of
    ``config``. The first item is the expected votes: how many votes decide a label, with how much noise. The second is
    the share of the most common class.

    The votes are None without a public number of private records; the share is None without declared class shares or
    enough labels of public records.
    """
    try:
        entry: DatasetEntry | None = entry_for(config.data)
    except types.DataSettingsError:
        entry = None
    # A data set that was given from Python, or comes with votes, has no public entry.
    if entry is not None and entry.name != dataset.name:
        entry = None
    labels = dataset.public.y.numpy()
    known, majority = labels[labels >= 0], None  # -1 marks a public record without a label
    if entry is not None and entry.class_shares:
        majority = Majority(share=max(entry.class_shares), source="the declaration")
    elif len(known) >= _FEWEST_LABELS:
        majority = Majority(share=float(np.bincount(known).max() / len(known)), source="labels of public records")
    if entry is None or entry.rows is None:
        return None, majority
    # The publisher's count of what is protected, records or persons, less those of the other splits.
    others = [split for name, split in dataset.splits.items() if name != "private"]
    by_person = dataset.unit == "person" and entry.persons is not None
    apart = sum(split.num_protected if by_person else len(split) for split in others)
    # At least one: a publisher's count may be below the records of the other splits.
    private = entry.protected(config.data.options, config.data.unit)[0] - apart
    return config.voting(dataset, max(1, private)), majority


def planned_cost(config: Method, dataset: Dataset) -> Price | None:
    """Return the largest privacy cost that a run of ``config`` may publish; None for a run without a guarantee.

    A run with a target epsilon always spends it in full. For a run with a budget of queries instead, the cost is that
    of submitting all queries that fit the budget.
    """
    if isinstance(config, VotingMethod):
        # Every query that fits is charged in full, with any outcome.
        plan = config.plan(dataset)
        events = plan.worst_case(plan.count_fitting())
        return base.price(events, delta=config.target.delta, relation=events[0].relation)
    if not (isinstance(config, base.PrivateMethod) and config.is_private):
        return None
    unit, target, relation = config.unit_of(dataset), config.target, config.target.relation
    if relation is None:  # an attribute is exchanged while its record stays: nothing is added or removed
        relation = "replace one" if unit == "sensitive attribute" else "add or remove one"
    return Price(epsilon=target.epsilon, delta=target.delta, unit=unit, relation=relation, accounting=target.accounting)


def announce_spending(cost: Price | None, data: str, reporter: Reporter, *, is_own: bool) -> None:
    """Print what a release on the data set ``data`` may cost and what earlier releases cost; ask the user for
    confirmation if the total exceeds a limit.

    ``is_own``: the data set is the user's own. If ``cost`` is None, nothing is printed: the run has no guarantee, or
    its noise is seeded and so not private.
    """
    if cost is None:
        return
    odometer = Odometer()
    most = f"at most ε = {epsilon_text(cost.epsilon)} (δ = {delta_text(cost.delta)}) of each {cost.unit}"
    reporter.note("spends", f"{most}; so far {spent(data, odometer, delta=cost.delta)}")
    if question := question_above(data, planned=cost.epsilon, odometer=odometer, delta=cost.delta, is_own=is_own):
        reporter.consent(question)


def announce_delta(delta: float, units: int | None, unit: types.Unit, reporter: Reporter, *, is_own: bool) -> None:
    """Print a caution if ``delta`` is large for the public number of ``units`` (None: not public). Ask for confirmation
    if it is so large that a guarantee says next to nothing, and the records are the user's own (``is_own``)."""
    if caution := delta_caution(delta, units, unit):
        reporter.note("caution", caution)
        if is_own and is_void_delta(delta, units):
            reporter.consent(
                f"δ = {delta_text(delta)} is so large that the guarantee says next to nothing about one {unit}; lower "
                "it with --delta."
            )


def public_units(config: Method, dataset: Dataset, events: Sequence[Event] = ()) -> int | None:
    """Return the public number of protected units, with which delta is compared; None if it is not public.

    It is the declared number. Without one it is the real number only if ``events``, those of a release that is to be
    stated, publish it by their sampling rate.
    """
    section = getattr(config, "dp_sgd", None) if "dp_sgd" not in config.unread else None
    declared = getattr(section, "num_records", None) if dataset.declared_units is None else dataset.declared_units
    if declared is None and events and size_remarks(config, flat(events), dataset.unit):
        return dataset.private.num_protected
    return declared


# Total epsilon of releases on the user's own records above which a command asks for confirmation, if no limit is set:
# at this epsilon a guess about a record improves by a factor of at most 22,000.
ASK_ABOVE = 10.0


def question_above(data: str, *, planned: float, odometer: Odometer, delta: float, is_own: bool) -> str | None:
    """Return the question to ask the user before releases on ``data`` that cost an epsilon of ``planned`` in sum; None
    if no question is needed.

    A question is needed if the total with earlier releases exceeds the operator's limit, which will refuse some of the
    releases. Without a limit it is needed above :data:`ASK_ABOVE`, if the records are the user's own (``is_own``).
    """
    before = max((total.epsilon for total in odometer.totals(delta=delta, data=data) if total.releases), default=0.0)
    limit, after = min(odometer.limits(data).values(), default=None), before + planned
    if after <= (ASK_ABOVE if limit is None else limit) or (limit is None and not is_own):
        return None
    bound = (
        f"{ASK_ABOVE:g}, and no limit is set" if limit is None else f"the limit of {limit:g}, which refuses the rest"
    )
    return (
        f"The releases on {data} may come to ε = {epsilon_text(after)} in sum ({epsilon_text(before)} so far), above "
        f"{bound}."
    )


def other_voters(overrides: Sequence[Override], chosen: str) -> list[RunForecast]:
    """Return forecasts of runs on the same data by the other methods in :data:`VOTERS`, which label public records by
    the votes of teachers, nearest neighbours or single records. ``chosen`` is the method that is left out.

    ``overrides`` are the user's settings, including the data set; each method's other settings follow from them. The
    forecast in which the winning class needs the smallest lead comes first, methods that cannot run come last.
    DataError as in :func:`fairpate.data.load_data`.
    """
    found = []
    for method in types.stepwise([name for name in VOTERS if name != chosen]):
        try:
            config = base.resolved(overrides, method)
            config.require_trainable()
            # Several kinds see the pool through the same embedding, and one may take a minute to compute.
            dataset = load_once(config.data)
            config.check_data(dataset)
            found.append(forecast(config, dataset, planned_cost(config, dataset)))
        except (ConfigError, types.DataSettingsError) as error:
            found.append(RunForecast(method=method, refused=str(error)))
    return sorted(found, key=lambda each: math.inf if each.lead_needed is None else each.lead_needed)


_NEAR = 1.25  # factor between epsilons that count as about the same


def measured_before(folder: Path, found: Sequence[RunForecast], data: str) -> list[RunForecast]:
    """Return the forecasts ``found`` with the accuracies of earlier runs filled in. Earlier runs are the finished runs
    in ``folder`` that have the forecast's method, the data set ``data`` and about the forecast's epsilon."""
    accuracies: dict[str, list[tuple[float, float]]] = {}
    for record in _records_in(folder).values():
        epsilon, accuracy = record.get("epsilon"), record.get("accuracy")
        if record.get("data") == data and epsilon is not None and accuracy is not None:
            accuracies.setdefault(record.get("method", ""), []).append((epsilon, accuracy))
    filled = []
    for each in found:
        own, known = each.epsilon, accuracies.get(each.method, ())
        near = [] if own is None else [share for other, share in known if max(other, own) <= _NEAR * min(other, own)]
        filled.append(replace(each, measured=tuple(sorted(near))))
    return filled


def describe(
    data: str,
    cost: Price | None,
    spent: str | None,
    found: Sequence[RunForecast],
    *,
    why: str | None = None,
    caution: str = "",
) -> Group:
    """Return what `fairpate run --dry-run` displays: a sentence on the privacy cost of the run on the data set
    ``data``, and a table of the forecasts ``found``. The first forecast is that of the run itself.

    ``cost``: the privacy cost; None: the run has no guarantee. ``spent``: None or, if the run costs nothing more, the
    reason, which the sentence then states instead of the cost. ``why``: a sentence on why this method is run, if the
    user named none. ``caution``: a caution about delta.
    """
    run = found[0]
    if spent is not None:
        sentence = f"{run.method} on {data} would spend nothing more: {spent}."
    elif cost is None:
        sentence = f"{run.method} on {data} would give no privacy guarantee."
    else:
        factor = at_most(math.exp(min(cost.epsilon, 700)), digits=3)
        sentence = (
            f"{run.method} on {data} would spend epsilon {epsilon_text(cost.epsilon)} at delta "
            f"{delta_text(cost.delta)} ({cost.relation} {cost.unit}): its model improves the odds of a guess "
            f"{question(cost.unit, cost.relation)} by a factor of {factor} at most, but for delta."
        )
    headings = ["epsilon", "votes a label", "noise", "lead needed", "labels"]
    # Accuracy is forecast from published runs alone: how often a label survives its noise says little about how often
    # voters are right.
    is_expected, has_runs = (any(getattr(each, name) for each in found) for name in ("expected", "measured"))
    headings += ["accuracy expected"] * is_expected + ["accuracy of earlier runs"] * has_runs
    right = [Column(name, justify="right") for name in headings]
    table = listing("method", "who votes", *right)
    for each in found:
        voters = VOTERS.get(each.method, "nobody" if each.votes is None and not each.refused else "teachers")
        numbers = [""] * 5
        if each.refused is None:
            numbers[0] = "none" if each.epsilon is None else epsilon_text(each.epsilon)
        if each.votes is not None and each.lead_needed is not None:
            lead = percent(each.lead_needed) if each.lead_needed <= 1 else "never"
            numbers[1:] = [f"{each.votes:,}", f"{each.noise_stddev_votes:.3g}", lead, f"{each.labels:,}"]
        if is_expected:
            numbers.append("" if each.expected is None else " to ".join(map(percent, each.expected)))
        if has_runs:
            ends = dict.fromkeys(map(percent, (each.measured[0], each.measured[-1]) if each.measured else ()))
            numbers.append(f"{' to '.join(ends)} ({counted(len(each.measured), 'run')})" if ends else "")
        table.add_row(each.method, voters, *numbers)
    notes = [f"{each.method}: {each.refused or each.caution}" for each in found if each.refused or each.caution]
    if why is not None:
        notes.append(why)
    notes.append("Nothing was trained, charged or written.")
    notes.append(
        "accuracy expected: 9 of 10 runs with these settings lie there, by published runs on this data set."
        if is_expected
        else "Accuracy is not forecast: no run on this data set with these settings was published."
    )
    if any(each.votes is not None for each in found):
        notes.append(
            "lead needed: if a class leads by this share of the votes (of small teachers: on average over the queries, "
            "to whose counts one rule is fitted), it also leads with noise 19 times in 20."
        )
    sentence += f"\n{caution}" if caution else ""
    return Group(Text(f"{sentence}\n"), table, Text("\n" + "\n".join(notes)))


def cautions(config: Method, dataset: Dataset, run: RunDirectory) -> tuple[str, ...]:
    """Return the reasons why the model of ``config`` cannot be more accurate than always predicting the most common
    class; empty if no reason is known."""
    (voting, majority), found = known_beforehand(config, dataset), []
    epsilon = getattr(config.target, "epsilon", None)
    # Runs in the folder of this one: others are not searched for.
    for path, record in _records_in(run.root.parent).items():
        if path == run.record or record.get("data") != config.data.name:
            continue
        name, share, accuracy = path.parent.parent.name, record.get("majority_accuracy"), record.get("accuracy")
        if share is None or accuracy is None:
            continue
        majority = majority or Majority(share=share, source=f"the test records of {name}")
        # JSON has no infinity: null means infinite.
        other = math.inf if record.get("epsilon") is None else record["epsilon"]
        is_dearer = epsilon is not None and other >= epsilon
        if record.get("method") == config.method and is_dearer and accuracy <= share:
            found.append(
                f"an earlier run of {config.method}, {name}, did not beat the most common class at epsilon "
                f"{epsilon_text(other)}: {percent(accuracy)} of {percent(share)}"
            )
    # Where the attribute alone is protected, the votes are about groups, not about classes.
    if voting is not None and not config.protects_attribute_only:
        words = too_little_to_learn(voting, dataset.num_classes, majority)
        found += [] if words is None else [words]
    return tuple(found)


def _records_in(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the content of the files ``record.json`` (a run as one row of a comparison) of all finished runs in
    ``folder``, as a mapping from the files' paths; damaged files are left out."""
    found = {}
    for path in sorted(folder.glob("*/public/record.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # damaged, or of another program
            continue
        if isinstance(record, dict):
            found[path] = record
    return found


def too_little_to_learn(voting: base.ExpectedVotes, num_classes: int, majority: Majority | None) -> str | None:
    """Return, in words, why a student cannot learn more than the most common class from noisy labels, even if all
    voters are right; None if it may learn more.

    ``voting``: the number of labels, the votes that decide a label, and their noise. ``majority``: the share of the
    most common class; if it is None, all classes are assumed to be equally common.
    """
    # All voters agree: no other votes survive the noise more often.
    agreed_1C = np.array([[voting.votes, *[0] * (num_classes - 1)]])
    # Only the noise on the counts is read: every query passes a threshold of -inf.
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    right = float(noisy.right_probability(agreed_1C, np.zeros(1, dtype=np.int64))[0])
    # The labels without noise that teach as much.
    worth = voting.labels * max(0.0, (right - 1 / num_classes) / (1 - 1 / num_classes)) ** 2
    share = 1 / num_classes if majority is None else majority.share
    if worth * (1 - share) >= 1:
        return None
    known = "" if majority is None else f", which is {percent(share)} of records by {majority.source}"
    return (
        f"cannot be expected to beat the most common class{known}: under this noise "
        f"{counted(voting.labels, 'label')} stand for {worth:.2g} without noise even if all voters are right, so for "
        f"{worth * (1 - share):.2g} of another class"
    )


def unheard(config: Method, voting: base.ExpectedVotes) -> str | None:
    """Return, in words, that no lead of the votes stands out from their noise, and what would; None if some lead
    does."""
    if voting.lead_needed <= 1:
        return None
    remedies = [f"an epsilon about {voting.lead_needed:.1f} times as large"]
    if "teachers" in type(config).model_fields:
        remedies.insert(0, f"{math.ceil(voting.votes * voting.lead_needed):,} teachers")
        # The noise of single labels grows with the root of their number.
        if not voting.fitted_together and (queries := int(voting.labels / voting.lead_needed**2)):
            remedies.insert(1, counted(queries, "query", "queries"))
    *first, last = remedies
    would_do = f"{', '.join(first)} or {last}" if first else last
    return (
        f"Even if all {voting.votes:,} voters agree, the noise of {voting.noise_stddev_votes:.3g} votes on each count "
        f"hides it, so epsilon would be spent on chance: {would_do} would be heard."
    )


AnyMethod = TypeVar("AnyMethod", bound=Method)
# Makes the noisy sum over several sites from which a run draws its release.
Sums = Callable[[RunDirectory, ReleaseLog], base.NoisySum]


def with_pinned_weights(config: AnyMethod) -> AnyMethod:
    """Return ``config`` with the checksum of its file of initial weights, if it names such a file, so that the same
    weights are used when the run is repeated. The weights `imagenet` are downloaded if missing."""
    for model in config.networks.values():
        if model.weights is not None:
            pinned = config.backbone.model_copy(update={"weights": pin_weights(model).weights})
            return config.model_copy(update={"backbone": pinned})
    return config


def check_data(config: Method, dataset: Dataset) -> None:
    """Raise ConfigError if the settings ``config`` do not suit the data set. Raise ValueError if features reveal the
    sensitive attribute although this attribute is all that the method protects."""
    if dataset.kind != "image":
        if config.public_data.pretrain is not None:
            raise ConfigError(
                f"public_data.pretrain: learns from images, but {dataset.name} is a table; leave this field out."
            )
        if config.augment != AugmentConfig() and "augment" not in config.unread:
            raise ConfigError(f"augment: changes images, but {dataset.name} is a table; leave this section out.")
        if config.student.method == "fixmatch" and "student.method" not in config.unread:
            raise ConfigError(
                f"student.method: fixmatch changes images, but {dataset.name} is a table; set student.method to "
                "pseudo_label."
            )
    if config.protects_attribute_only:
        if dataset.embedding is not None:
            raise ConfigError(
                f"data.embedding: {config.method} protects the sensitive attribute alone, and with an embedding it "
                "cannot be checked that no column reveals the attribute; set data.embedding to null."
            )
        x, groups = dataset.private.x, dataset.private.z
        # Features are public here, so an attribute among them is published by any model. Pictures are not searched.
        if x.ndim == 2 and len(x):
            members = [x[groups == group] for group in torch.unique(groups)]
            low, high = (torch.stack([bound(part, dim=0) for part in members]) for bound in (torch.amin, torch.amax))
            # Finds any encoding of the group, with any values; a column that is equal in all groups shows nothing.
            shown = ((low == high).all(dim=0) & (low != low[0]).any(dim=0)).nonzero().flatten().tolist()
            if shown:
                raise ValueError(
                    f"{config.method} protects sensitive_features alone and treats X as public, but sensitive_features "
                    f"determine column(s) {', '.join(map(str, shown))} of X; leave them out, or choose a "
                    "method that protects whole records."
                )
    config.check_data(dataset)
    if config.evaluation.metrics != "outside":
        check_metrics(config, dataset)


def check_model_files(config: Method, dataset: Dataset, reporter: Reporter) -> None:
    """Build every model for which ``config`` names a file of initial weights, and the student that self-labelling
    trains, to check that they fit the records.

    Prints which weights files are used. ValueError if a weights file or an architecture does not fit.
    """
    models = config.networks
    shape = tuple(dataset.public.x.shape[1:])
    # Before anything is trained or charged: a model that does not fit would end the run only after that.
    for name, model in models.items():
        if model.weights is not None:
            build_model(model, input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
            reporter.note("weights", f"{name} starts from {model.weights.path}, sha256 {model.weights.sha256}")
    if config.public_data.self_label is not None:
        try:
            build_model(published_model(config), input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
        except ValueError as error:
            raise ConfigError(f"public_data.self_label: the self-labelled model cannot be built: {error}") from error


def published_model(config: Method) -> ModelConfig:
    """Return the architecture of the published model: ``student.model``, or with self-labelling that of the second
    student, which learns from the labels of the first."""
    name = config.public_data.self_label
    return config.student_training.model if name in (None, config.student.model.name) else ModelConfig(name=name)


def initial_model(config: Method, dataset: Dataset, architecture: ModelConfig | None = None) -> nn.Module:
    """Return the model from which training starts. Its initial weights are those of the configured weights file, or
    else random, from the run's seed. If pre-training is configured, the model is then trained on public pictures.

    ``architecture``: the layers of the model; None: those of ``student.model``.
    """
    architecture = architecture or config.student_training.model
    shape, seed = tuple(dataset.public.x.shape[1:]), stream_seed(config.seed, Stream.MODEL)
    model = build_model(architecture, input_shape=shape, num_classes=dataset.num_classes, generator_seed=seed)
    if config.public_data.pretrain is not None:
        # A stream of its own: later draws are the same with pre-training and without.
        generator = base.torch_generator(config.seed, Stream.PRETRAINING)
        epochs = config.public_data.pretrain
        pretrain_by_rotations(model, architecture, dataset.public.x, epochs=epochs, generator=generator)
    return model


def post_process(trained: Trained, config: Method, training: Training) -> Trained:
    """Return the trained model after self-labelling and calibration, if these are configured. Both read only the
    released model and public features and groups; calibration also reads public labels if it is configured to learn
    from them."""
    dataset, reporter, settings, model = training.dataset, training.reporter, config.public_data, trained.model
    public = dataset.public
    if settings.self_label is not None:
        with reporter.stage("self-label") as advance:
            probability, label = predict_probabilities(model, public.x).max(dim=1)
            sure = probability >= config.student.confidence
            if not sure.any():
                raise ConfigError(
                    f"student.confidence: no public record is labelled with confidence {config.student.confidence}; "
                    "lower student.confidence."
                )
            architecture = published_model(config)
            model = train_student(
                PublicRecords(answered_x=public.x[sure], labels=label[sure], unlabelled_x=public.x[~sure]),
                config.student_training.model_copy(update={"model": architecture}),
                num_classes=dataset.num_classes,
                augmentation=config.augment,
                generator=base.torch_generator(config.seed, Stream.LABELLING),
                on_progress=advance,
                # Pre-trained as well, where the first model was.
                initial_model=None if settings.pretrain is None else initial_model(config, dataset, architecture),
            )
            # The released model had that architecture; this one has the architecture of self-labelling.
            trained = replace(trained, architecture=None)
    if settings.calibration is not None:
        with reporter.stage("calibration"):
            generator = base.torch_generator(config.seed, Stream.CALIBRATION)
            gaps = calibrate(model, public.x, public.z, settings.calibration, y=public.y, generator=generator)
        course = f"disparity on held-out public records {gaps[0]:.3f} -> {gaps[-1]:.3f}"
        reporter.note("calibration", f"{len(gaps) - 1} epochs, {course}")
    return replace(trained, model=model)


def student_card(config: Method, dataset: Dataset, trained: Trained, *, embedding: Path | None = None) -> StudentCard:
    """Return the description of the published model (architecture, classes, groups, checksums) that is stored in the
    model's file. ``embedding``: the file of the embedding that the model reads, if any."""
    mixing, network = trained.mixing_GCC, trained.model
    return StudentCard(
        model=trained.architecture or published_model(config),
        input_shape=tuple(dataset.public.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        idp3=config.student.idp3,
        num_members=len(network.members) if isinstance(network, Mixture) else None,
        mixing=None if mixing is None else tuple(tuple(tuple(row) for row in table) for table in mixing.tolist()),
        num_training_labels=trained.num_training_labels,
        embedding=sha256_of(embedding) if embedding is not None and dataset.embedding is not None else None,
    )


# Label of the noise in the odometer's row for exact metrics of test records that a hash drew from private ones.
EXACT_METRICS = "exact metrics of private test records: not private"
_MOST_VALUES = 50_000_000  # 0.4 GB
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_AT_ONCE = 4096  # pictures
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[bytes, IntArray] = {}


def without_privacy(private: Split, test: Split, measured_N: npt.NDArray[np.bool_]) -> WithoutPrivacy | None:
    """Return the accuracy, on the test records that ``measured_N`` marks, of a logistic model learned from ``private``
    without noise.

    The operator compares it with the accuracy of the run's model. It must not be published, as it depends on every
    private record. Pictures are reduced to 16 pixels a side, and more than 256 features to principal components, so
    that it takes seconds.

    Return None if no test record is measured, if there is only one class, or if features are missing or not finite;
    also if there are too many records to learn from in seconds, because the accuracy for a subset would not be
    comparable. No error is raised, because it would end a run whose privacy cost was charged already.
    """
    parts, sizes = (private.x, test.x), private.x.shape[1:]
    width = math.prod(min(side, _SIDE) if private.x.ndim == 4 and place else side for place, side in enumerate(sizes))
    if not measured_N.any() or len(np.unique(private.y.numpy())) < 2 or len(private) * width > _MOST_VALUES:
        return None
    if any(not (x.numel() and x.isfinite().all()) for x in parts):
        return None
    # Records as rows of numbers; pictures are reduced to at most 16 pixels a side.
    rows = []
    for x in parts:
        if x.ndim == 4:
            side = (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE))
            x = torch.cat([types.functional.adaptive_avg_pool2d(some.float(), side) for some in x.split(_AT_ONCE)])
        rows.append(x.flatten(1).numpy().astype(np.float64))
    x_NF, test_MF = rows
    labels_N = private.y.numpy()
    # A sweep measures many models on the same records: it predicts them once.
    read = (np.array(x_NF.shape), x_NF, test_MF, labels_N)
    key = hashlib.blake2b(b"|".join(each.tobytes() for each in read)).digest()
    predicted = _predictions.get(key)
    if predicted is None:
        steps = [sklearn.preprocessing.StandardScaler()]
        if x_NF.shape[1] > _MOST_FEATURES:
            # Not "auto", which takes a randomised solver for some shapes: equal records must give an equal baseline.
            steps = [sklearn.decomposition.PCA(min(_COMPONENTS, len(x_NF)), svd_solver="covariance_eigh"), *steps]
        model = sklearn.pipeline.make_pipeline(*steps, sklearn.linear_model.LogisticRegression(max_iter=100, tol=1e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # near enough for a comparison
            predicted = model.fit(x_NF, labels_N).predict(test_MF)
        while len(_predictions) >= _MOST_KEPT:
            # The oldest entry; another thread may have removed it already.
            _predictions.pop(next(iter(_predictions)), None)
        _predictions[key] = predicted
    return WithoutPrivacy(accuracy=float((predicted == test.y.numpy())[measured_N].mean()), num_records=len(private))


def state_release(opened: OpenRun, trained: Trained, remarks: Sequence[str] = ()) -> None:
    """Write the privacy statement of what a run released, and print the total cost together with earlier releases.

    ``trained`` has the released model and its privacy events; ``remarks`` are further remarks for the statement.
    """
    config, run, log = opened.config, opened.run, opened.log
    parts: dict[Literal["test", "validation"], tuple[Event, ...]] = {}
    if config.evaluation.metrics == "private":
        # The table is drawn after this statement, which prices it before anything of it is visible.
        parts["test"] = stated_tables(run, lambda: table_event(config.price(trained)))
    if run.choice.exists():
        parts["validation"] = read_release(run.choice)[0].events
        # Made under another odometer, perhaps: this one counts it by the id of the choice, once.
        log.of_part("validation").count_published(parts["validation"], noise=trained.noise)
    and_of = [log.of_part(part).release(events, noise=trained.noise) for part, events in parts.items()]
    standing = log.standing(delta=config.target.delta, and_of=and_of)
    for remark in standing_remarks(standing, delta=config.target.delta):
        opened.reporter.note("odometer", remark)
    alone, shared = opened.dataset.records_alone, log.shared_remarks()
    statement = statement_of(
        config,
        trained,
        standing=standing,
        records_alone=alone,
        shared=shared,
        remarks=remarks,
        parts=parts,
        units=public_units(config, opened.dataset, trained.events),
    )
    write_json(run.statement, strict(statement))


def _with_lost_tables(opened: OpenRun, statement: PrivacyStatement) -> PrivacyStatement:
    """Return the privacy ``statement`` of an existing model after adding the cost of every noisy table that the run
    drew for private metrics, including tables whose files were deleted. Write the statement if it changed."""
    # The statement of an existing model is not made again, but its table of metrics may be drawn once more.
    log, tables = opened.log, stated_tables(opened.run, lambda: event_from(statement.part_events["test"][-1]))
    if list(map(event_json, tables)) == list(statement.part_events["test"]):
        return statement
    cost = base.price(tables, delta=statement.delta).epsilon
    standing = log.standing(delta=statement.delta, and_of=[log.of_part("test").release(tables, noise=statement.noise)])
    is_named = statement.earlier_releases is not None and standing is not None
    found = replace(
        statement,
        epsilon=None if statement.epsilon is None else max(statement.epsilon, cost),
        part_events={**statement.part_events, "test": tuple(map(event_json, tables))},
        epsilon_with_earlier=max(standing.epsilon, cost) if is_named and standing else None,
        epsilon_adaptive_with_earlier=max(standing.epsilon_adaptive, cost) if is_named and standing else None,
        remarks=(*(each for each in statement.remarks if each != REMARKS["tables_lost"]), REMARKS["tables_lost"]),
    )
    write_json(opened.run.statement, strict(found))
    return found


_AS_IF_PUBLIC = "features and labels, which the model is trained on as if they were public"


def statement_of(
    config: Method,
    trained: Trained,
    *,
    standing: Standing | None = None,
    records_alone: bool = False,
    shared: Sequence[str] = (),
    remarks: Sequence[str] = (),
    parts: Mapping[Any, Sequence[Event]] = MappingProxyType({}),
    units: int | None = None,
) -> PrivacyStatement:
    """Return the privacy statement of a trained model.

    ``standing``: the total cost with the operator's earlier releases, which is stated if ``config.names_earlier``; None
    if the release was not charged. ``records_alone``: True if a person may have several records, but the unit of
    privacy is a record. ``shared``: remarks on releases from which several runs learn. ``remarks``: further remarks,
    which come last. ``parts``: the privacy events on test or validation records, which are not among the events of
    ``trained``. ``units``: the public number of protected units, with which delta is compared.
    """
    cost = config.price(trained)
    for events in parts.values():  # in parallel: a unit is in one part, and the largest price holds for all
        cost = replace(cost, epsilon=max(cost.epsilon, base.price(events, delta=cost.delta).epsilon))
    if standing is not None:  # the odometer composes events, and a bound fixed beforehand may be above what they cost
        fixed, adaptive = (max(each, cost.epsilon) for each in (standing.epsilon, standing.epsilon_adaptive))
        standing = replace(standing, epsilon=fixed, epsilon_adaptive=adaptive)
    if not config.names_earlier:
        standing = None
    known = compared_on(config.data) if "validation" in parts else {}
    # Of a choice of settings, with the data sets on which the defaults were compared.
    choice = parts.get("validation", ())
    how = "tried" if any(isinstance(event, SecretTrials) for event in choice) else "chosen"
    defaults = {name: "tested_defaults" if protected else "public_defaults" for name, protected in known.items()}
    chosen = (REMARKS[how], *(REMARKS[words].format(name) for name, words in defaults.items()))
    keeps_key = bool(parts) and cost.relation == "replace one" and cost.unit != "sensitive attribute"
    return PrivacyStatement(
        method=config.method,
        unit=cost.unit,
        relation=cost.relation,
        delta=cost.delta,
        # JSON has no infinity.
        epsilon=None if math.isinf(cost.epsilon) else cost.epsilon,
        accounting=cost.accounting,
        noise=trained.noise,
        events=tuple(map(event_json, trained.events)),
        queries=trained.queries,
        not_protected=_AS_IF_PUBLIC if cost.unit == "sensitive attribute" else None,
        earlier_releases=None if standing is None else standing.earlier,
        epsilon_with_earlier=None if standing is None else standing.epsilon,
        epsilon_adaptive_with_earlier=None if standing is None else standing.epsilon_adaptive,
        # Defaults of this package were chosen by the test records of the data sets that it knows.
        tuning_accounted="validation" in parts and not any(known.values()),
        part_events={part: tuple(event_json(event) for event in events) for part, events in parts.items()},
        declared_units=units if config.is_private else None,
        remarks=(
            *filter(None, (delta_caution(cost.delta, units, cost.unit) if config.is_private else "",)),
            *trained.remarks,
            *shared,
            *((REMARKS["in_parallel"],) if "test" in parts else ()),
            *(chosen if choice else ()),
            *((REMARKS["tables_lost"],) if len(parts.get("test", ())) > 1 else ()),
            *((REMARKS["keeps_key"],) if keeps_key else ()),
            *size_remarks(config, flat(trained.events), cost.unit),
            *((REMARKS["records_alone"],) if config.is_private and records_alone and cost.unit == "record" else ()),
            *((REMARKS["persons_by_name"],) if cost.unit == "person" and config.data.name not in REGISTRY else ()),
            *((REMARKS["reading_tells"],) if config.is_private and config.data.name not in REGISTRY else ()),
            *standing_remarks(standing, delta=cost.delta),
            *remarks,
        ),
    )


def size_remarks(config: Method, events: tuple[Event, ...], unit: types.Unit) -> tuple[str, ...]:
    """Return the remark for a privacy statement that a published sampling rate reveals the private number of records or
    persons from which it was computed. Empty if no rate was computed from a private number."""
    # Events without sampling, and those that read every record, reveal no rate.
    samples = any(getattr(event, "sampling_rate", 1) < 1 for event in events)
    return (types.TELLS_SIZE[unit],) if samples and unit in types.TELLS_SIZE and config.rate_tells_size else ()


def run_method(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
    with_graph: bool = False,
    sums: Sums | None = None,
    remarks: Sequence[str] = (),
) -> RunDirectory:
    """Run one method: train and publish its model, or resume where an earlier call or command stopped. Return the paths
    of the run's files, which are then complete.

    Args:
        config: The method with its settings.
        reporter: Displays progress.
        dataset: The records. None: the data set that ``config.data`` names is read with ``load``; otherwise
            ``config.data`` is not read, and every file that describes the run names this data set.
        load: Reads a data set.
        release_of: The folder of a run from whose release this one learns, without reading private records.
        with_graph: Whether to write the ONNX graph ``model.onnx`` too, which takes seconds.
        sums: Makes the noisy sum from which the release is drawn, if private records are at several sites
            (:mod:`fairpate.sites`).
        remarks: Further remarks for the privacy statement.

    Raises:
        UserError, ValueError: Names the field or file, the value and the remedy. Finished stages stay, and nothing is
            charged twice.
    """
    if dataset is None and isinstance(config, OwnVotes):
        # Votes that were made elsewhere bring their public records along.
        config.check()
        if not config.votes.features:
            raise ConfigError(
                "votes.features: missing, so no student can be trained; name columns of features, or release labels "
                "alone by `fairpate aggregate`."
            )
        dataset = read_votes_file(config.votes).dataset
    with _opened(config, reporter, dataset, load=load, release_of=release_of) as opened:
        is_trained = opened.run.student.exists()
        if opened.config.evaluation.metrics == "private" and not opened.config.is_seeded and not is_trained:
            # If a limit has no room for the table of private metrics, nothing is trained.
            table, cost = opened.log.of_part("test"), planned_cost(opened.config, opened.dataset)
            assert cost is not None  # `check_metrics` refuses a method without a guarantee
            if table.stored() is None:
                table.check([table_event(cost)], noise=OS_ENTROPY)
        if not is_trained and not reporter.console.quiet:
            for words in cautions(opened.config, opened.dataset, opened.run):
                reporter.note("caution", words)
            voting, _ = known_beforehand(opened.config, opened.dataset)
            # Before anything is trained or charged; a run that was charged already loses nothing more.
            if voting is not None and opened.log.stored() is None:
                if question := unheard(opened.config, voting):
                    reporter.consent(question)
                else:
                    where = "on average over all queries" if voting.fitted_together else "on a record"
                    lead = f"a lead of {percent(voting.lead_needed)} of {voting.votes:,} votes {where}"
                    reporter.note("noise", f"{lead} stands out 19 times in 20")
                    if voting.fitted_together and getattr(opened.config, "leaves_room", False):
                        one = percent(voting.lead_of_one) if voting.lead_of_one <= 1 else "no lead"
                        reporter.note("noise", f"in a single answer of a service, {one} of them does")
        opened = replace(opened, noisy_sum=None if sums is None else sums(opened.run, opened.log))
        student, labels = _student(opened, remarks)
        reporter.note("model", str(opened.run.student))
        if with_graph:
            write_portable(opened.run, student, opened.dataset, reporter)
        _report(opened, student, labels)
    return opened.run


def make_release(
    config: ReleasingMethod | VotingMethod,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    sums: Sums | None = None,
    command: str = "fairpate run",
    then: Callable[[OpenRun, Any], object] = lambda *_: None,
) -> RunDirectory:
    """Draw and charge the release of ``config`` without training a model, and return the paths of the run's files;
    other runs can then learn from the release.

    ``command`` is the running command, for error messages. ``then`` is called with the open run and the release while
    the folder is still locked. Other arguments and errors as in :func:`run_method`.
    """
    with _opened(config, reporter, dataset, load=load, command=command) as opened:
        checked = opened.config
        assert isinstance(checked, ReleasingMethod | VotingMethod)
        opened = replace(opened, noisy_sum=None if sums is None else sums(opened.run, opened.log))
        then(opened, checked.release(opened))
    return opened.run


@contextmanager
def one_release(
    configs: Sequence[ReleasingMethod], reporter: Reporter, *, out: Path, check: Callable[[Dataset], None]
) -> Iterator[tuple[Dataset, ReleaseLog, Released, list[Student]]]:
    """Context manager: draw the release of arrays that all ``configs`` share, or read the stored release, and train one
    model for each of ``configs`` from it.

    The release is stored in the folder ``out``, which is locked inside the ``with`` block; training has no further
    privacy cost. Yields the data set, the release log, the release and the models. ``check`` may refuse the data set
    before the release is drawn. Errors as in :func:`run_method`.
    """
    # With the settings of the release alone, in which the candidates agree.
    with _opened(configs[0].release_alone.model_copy(update={"out": out}), reporter, None) as opened:
        assert isinstance(opened.config, ReleasingMethod)
        check(opened.dataset)
        students, quiet = [], Reporter(quiet=True)
        for each in configs:
            check_model_files(each, opened.dataset, quiet)
        released = opened.config.release(opened)
        with reporter.stage("candidates") as advance:
            for number, each in enumerate(configs, start=1):
                model = initial_model(each, opened.dataset)
                training = replace(opened, model=model, reporter=quiet, seed=each.seed)
                trained = post_process(each.learn(training, released), each, training)
                students.append(Student(card=student_card(each, opened.dataset, trained), network=trained.model))
                advance(number, len(configs))
        yield opened.dataset, opened.log, released, students


def aggregate(values: dict[str, Any], overrides: Sequence[Override], reporter: Reporter) -> RunDirectory:
    """Release labels from a file of votes made elsewhere; if the file has features, train a student on the labels too.
    A repeated call releases nothing more.

    ``values`` and ``overrides`` configure :class:`OwnVotes`. VotesFileError lists all faults of the file, ConfigError
    all faults of the settings. Without features there is no model, only labels and their privacy statement.
    """
    config = base.configured(values, overrides, method="own_votes")
    assert isinstance(config, OwnVotes)
    config.check()
    votes = config.votes
    assert votes.path is not None
    # Absolute: the configuration is stored with the run, and read from other folders.
    places = {"path": votes.path.absolute(), "test": None if votes.test is None else votes.test.absolute()}
    voters = {"num_voters": read_votes_file(votes).num_voters}
    config = config.model_copy(update={"votes": votes.model_copy(update=places | voters)})
    if config.votes.features:
        return run_method(config, reporter, with_graph=True)
    dataset = read_votes_file(config.votes).dataset
    run = make_release(config, reporter, dataset, command="fairpate aggregate", then=state_release)
    reporter.note("labels", str(run.labels))
    return run


@contextmanager
def _opened(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
    command: str = "fairpate run",
) -> Iterator[OpenRun]:
    """Context manager: check everything for which a run can be refused before training, and yield the open run. Its
    folder is locked inside the ``with`` block.

    Arguments as in :func:`run_method`; ``command`` is the running command, for error messages.
    """
    is_given = dataset is not None
    if dataset is None:
        config.require_trainable()
    else:  # `check_data` looks at its features, below
        config.check()
        # Without the data options, which were not read.
        config = config.model_copy(update={"data": DataConfig(name=dataset.name)})
    config = with_pinned_weights(config)
    # Before data are read: a folder that this run cannot use should cost no time.
    embedded = found = folders.check_run_directory(config)
    if release_of is not None:
        base.check_release_of(config, release_of)
        # The released arrays belong to the coordinates of the run that drew them.
        embedded = found if found.embedding.exists() else RunDirectory(root=release_of)
    with reporter.stage("data"):
        dataset = folders.load_for(embedded, config.data, load) if dataset is None else dataset
        check_data(config, dataset)
        if is_given:  # what is loaded was checked with its files
            require_apart(dataset)
        elif config.reads_public_groups:
            check_members(dataset, "public")
    # Two processes at once would each release, and leave one's model with the other's statement, or under its
    # configuration. The log is made inside the lock: made earlier, it might not see the receipt of the run that it
    # waits for, and charge that run's release once more.
    make_folder(found.root)
    with sole_worker(found.root, command):
        run = create_run_directory(config)
        record_data(run, dataset, given_from_python=is_given)
        if dataset.embedding is not None and not run.embedding.exists():
            save_embedding(dataset.embedding, run.embedding)  # it made the features that the student will read
        if release_of is not None:
            take_release(run, release_of, values_digest(config.settings_without()))
        reporter.note("data", f"{dataset.name}: {len(dataset.private)} private, {len(dataset.public)} public records")
        log = ReleaseLog(run, Odometer(), data=dataset.name, method=config.method, part=dataset.part)
        # A quiet run that asks nobody need not announce its cost.
        is_heard = reporter.asks or not reporter.console.quiet
        if log.stored() is None and release_of is None and is_heard and not config.is_seeded:
            cost, has_votes = planned_cost(config, dataset), isinstance(config, OwnVotes)
            is_own = config.data.declaration is not None
            # A limit on votes made elsewhere refuses without a question.
            announce_spending(cost, dataset.name, Reporter(reporter.console) if has_votes else reporter, is_own=is_own)
            if cost is not None:
                units = public_units(config, dataset)
                announce_delta(cost.delta, units, cost.unit, reporter, is_own=is_own or has_votes)
        dataset = as_trained(run, config, dataset)
        if isinstance(config, VotingMethod):
            plan, planned = config.plan(dataset), config.aggregator.num_queries
            # If a limit has no room for the planned queries, no teacher is trained. A stored release was admitted
            # already; the ledger's meter checks what is charged beyond it.
            fitting = plan.count_fitting()
            if log.stored() is None:
                log.check(plan.worst_case(fitting), noise=plan.source.label)
            if planned is not None and fitting < planned:
                reporter.note("budget", f"has room for {fitting} of {planned} queries; the others will not be asked")
        yield OpenRun(
            config=config, dataset=dataset, model=nn.Identity(), run=run, log=log, reporter=reporter, seed=config.seed
        )


def train_model(
    config: Method, dataset: Dataset, reporter: Reporter, *, folder: Path, odometer: str | None = None
) -> tuple[Trained, Student]:
    """Train on a data set from Python, without the folder of a run. Return the training's result, and the student after
    self-labelling and calibration on public records.

    ``folder`` is for the files of a method that asks teachers, such as its ledger, and for the key by which records are
    ordered. ``odometer``: the name of the data set under which the operator's odometer charges the release; None: the
    release is not charged. LimitReachedError if the limit for that name would be exceeded.
    """
    config.check()
    config = with_pinned_weights(config.model_copy(update={"data": DataConfig(name=dataset.name), "out": folder}))
    check_data(config, dataset)
    run = RunDirectory(root=folder)
    if config.asks_teachers or odometer is not None:
        run = create_run_directory(config)
        record_data(run, dataset, given_from_python=True)
    log = None
    if odometer is not None and config.is_private:
        log = ReleaseLog(run, Odometer(), data=odometer, method=config.method)
        cost = None if config.is_seeded else planned_cost(config, dataset)
        announce_spending(cost, odometer, reporter, is_own=True)
        if cost is not None:
            announce_delta(cost.delta, public_units(config, dataset), cost.unit, reporter, is_own=True)
    check_model_files(config, dataset, reporter)
    return trained_student(config, as_trained(run, config, dataset), run, reporter, log)


def trained_student(
    config: Method, dataset: Dataset, run: RunDirectory, reporter: Reporter, log: ReleaseLog | None = None
) -> tuple[Trained, Student]:
    """Train a model, then apply self-labelling and calibration on public records to it; return the training's result
    and the student.

    ``log`` charges and stores releases; if it is None, nothing is charged or stored.
    """
    model = initial_model(config, dataset)
    training = Training(dataset=dataset, model=model, run=run, reporter=reporter, seed=config.seed, log=log)
    # Labels are counted query by query, as their ledger charges them.
    if log is None or isinstance(config, VotingMethod):
        trained = config.train(training)
    else:
        trained = log.model(lambda: config.train(training), is_release=config.releases_model)
    processed = post_process(trained, config, training)
    card = student_card(config, dataset, processed)
    return trained, Student(card=card, network=processed.model, embedding=dataset.embedding)


def publish_trained(
    config: Method,
    student: Student,
    *,
    counted_by: Release,
    choice: tuple[Released, Origin],
    remarks: Sequence[str],
    environment: Mapping[str, Any],
    reporter: Reporter,
) -> RunDirectory:
    """Publish in ``config.out`` a student that was trained and charged before.

    ``counted_by``: the odometer's row in which the training is charged. ``choice``: the private choice by which the
    student's settings were selected, a release computed from validation records, and its origin. ``environment``: the
    software and machine on which the training began. A repeated call resumes; errors as in :func:`run_method`.
    """
    run = create_run_directory(config)
    write_json(run.environment, environment)
    if student.embedding is not None and not run.embedding.exists():
        save_embedding(student.embedding, run.embedding)
    write_json(run.receipt, release_values(counted_by))
    save_release(run.choice, *choice)
    with _opened(config, reporter, None) as opened:
        if not run.student.exists():
            trained = Trained(
                model=student.network, events=counted_by.events, noise=counted_by.noise, remarks=tuple(remarks)
            )
            state_release(opened, trained)
            embedding = None if student.embedding is None else sha256_of(run.embedding)
            placed = replace(student, card=replace(student.card, embedding=embedding))
            write_atomically(run.student, lambda path: save_student(placed, path))
    return run_method(config, reporter)


def _student(opened: OpenRun, remarks: Sequence[str]) -> tuple[Student, Labels | None]:
    """Return the published student and the released labels (None for a method that releases no labels). The student is
    trained if it does not exist yet."""
    config, dataset, run, log = opened.config, opened.dataset, opened.run, opened.log
    is_trained, labels = run.student.exists(), None
    if not is_trained:
        check_model_files(config, dataset, opened.reporter)
    if isinstance(config, VotingMethod):
        # A service may have answered queries since, so what was released is stated again.
        labels = config.release(opened)
        state_release(opened, labels)
    if is_trained:
        # Learned from a ledger or from kept releases, or without privacy, it can be learned again at no cost.
        is_free = labels is not None or not config.is_private or run.released.exists()
        if labels is None:
            if not run.statement.exists():
                remedy = "restore it from a copy"
                if is_free:
                    remedy = f"delete {run.student} and give the same command again"
                raise RunDirectoryError(
                    f"{run.statement}: missing, although {run.student} was released with it; {remedy}."
                )
            # A version without an odometer may have released it, or another odometer may know the release.
            statement = read_statement(run)
            log.count_published(list(map(event_from, statement.events)), noise=statement.noise)
            if run.choice.exists():
                log.of_part("validation").count_published((), noise=statement.noise)
        return folders.read_student(run, is_free=is_free), labels

    training = replace(opened, model=initial_model(config, dataset))
    if labels is None:
        # Charged before it is post-processed, which may fail with an error that reveals something about the model.
        trained = log.model(lambda: config.train(training), is_release=config.releases_model and config.is_private)
        trained = post_process(trained, config, training)
        # The odometer, then the statement, then the model: a statement without a model says that one was released.
        state_release(opened, trained, remarks)
    else:
        assert isinstance(config, VotingMethod)
        trained = post_process(config.learn(training, labels), config, training)
    card = student_card(config, dataset, trained, embedding=run.embedding)
    student = Student(card=card, network=trained.model)
    # Last of all: the cost of a model that exists has been stated and charged.
    write_atomically(run.student, lambda path: save_student(student, path))
    return student, labels


def _report(opened: OpenRun, student: Student, labels: Labels | None) -> None:
    """Measure the published model; write its metrics, the run's row of a comparison and the report pages."""
    config, dataset, run, log = opened.config, opened.dataset, opened.run, opened.log
    statement = read_statement(run)
    if config.evaluation.metrics == "private":
        statement = _with_lost_tables(opened, statement)
        with opened.reporter.stage("metrics"):
            assessment = assess_privately(opened, student, statement)
    else:
        if dataset.part and config.is_private:
            # The hash drew test records from private ones: a later table of them should not look like the first. No sum
            # covers exact metrics, so that the odometer lists them alone.
            relation: Relation = "replace one" if config.protects_attribute_only else "add or remove one"
            event = PureReleases(count=1, epsilon=math.inf, unit=config.unit_of(dataset), relation=relation)
            log.of_part("test").record([event], noise=EXACT_METRICS)
        assessment = assess(student, dataset, config.evaluation, seed=config.seed)
    write_json(run.metrics, assessment.to_json())
    baseline = without_privacy(dataset.private, dataset.test, assessment.measured_N)
    if baseline is None:
        run.without_privacy.unlink(missing_ok=True)  # an earlier version had one of fewer records
    else:
        write_json(run.without_privacy, asdict(baseline), private=True)
    private = None
    if isinstance(config, ReleasingMethod) and run.released.exists():
        private = config.private_population(read_release(run.released)[0], dataset, student)
        if private is not None:
            write_json(run.private_population, private.to_json())
    # The run as a row of a comparison; and, not to be published, the same row at the data-dependent privacy cost.
    headline = assessment.headline
    answered_by_group, spending = None, None if labels is None else labels.spending
    # Without `spending`, queries are asked of other groups than those of the records.
    if labels is not None and spending is not None:
        counts = np.bincount(labels.labelled.groups, minlength=len(headline.group_names))
        answered_by_group = tuple(counts.tolist())
    stated = ("method", "unit", "relation", "delta")
    measured = ("accuracy", "coverage", "disparity", "majority_accuracy", "fairness", "metrics")
    record = types.RunRecord(
        data=config.data.name,
        seed=config.seed,
        config=base.determining_values(config),
        **{name: getattr(statement, name) for name in stated},
        epsilon=math.inf if statement.epsilon is None else statement.epsilon,
        epsilon_is_data_dependent=False,
        **{name: getattr(headline, name) for name in (*measured, "degenerate", "underserved_groups")},
        unmeasured_groups=headline.not_measured,
        answered=None if statement.queries is None else statement.queries.answered,
        answered_by_group=answered_by_group,
        declared_units=statement.declared_units,
    )
    write_json(run.record, strict(asdict(record)))
    if run.costs.exists():
        spent = read_json(run.costs)["epsilon_data_dependent"]
        write_json(run.private_record, strict(asdict(replace(record, epsilon=spent, epsilon_is_data_dependent=True))))
    with opened.reporter.stage("report"):
        write_reports(
            run, dataset, student, assessment, spending=spending, private_population=private, without_privacy=baseline
        )
