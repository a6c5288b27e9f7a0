"""The cost of a run and the effect of its noise on labels, forecast from public facts alone.

`fairpate run --dry-run` prints a :class:`RunForecast` of the run and, where no method was named, one of each other kind
of voters. No private record is read and nothing is assumed about the voters. The noise on the votes decides by how much
the winning class has to lead: two Gaussian noises of standard deviation sigma differ by at most 1.645 sqrt(2) sigma
19 times in 20.

A run warns before it spends anything where it cannot beat the most common class (:func:`cautions`), for two reasons:

* The labels carry too little information even if all voters are right. Q labels that are right with probability p among
  C classes are worth W = Q ((p - 1/C) / (1 - 1/C))^2 noiseless labels (uniform label noise, to first order). If the
  most common class has the share m, W (1 - m) of them are of another class. Fewer than one teach nothing.
* A published run of the same method on the same data, at no smaller epsilon, did not beat m.

m is the declaration's (``label.shares``), or that of labels of public records, or what published runs measured. Where
none of them is known, m is taken as small as it can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Column
from rich.text import Text

from aggregator.mechanism import ConfidentGnmax
from fairpate.config import ConfigError, DataConfig
from fairpate.config_reader import Override
from fairpate.data import Dataset, entry_for, load_data
from fairpate.data.dataset import DatasetEntry, DataSettingsError
from fairpate.methods.base import ExpectedVotes, Method, Price, PrivateMethod, count_protected, price, resolved
from fairpate.methods.pate import VotingMethod
from fairpate.pages import counted, epsilon_text, percent
from fairpate.privacy.mechanism_events import beyond
from fairpate.run.context import RunDirectory
from fairpate.run.release_log import Odometer, Release, composed_epsilon
from fairpate.terminal import listing
from fairpate.types import Relation, stepwise
from fairpate.words import delta_text

VOTERS = {
    "weighted_votes": "every record, a vector",
    "residual_votes": "every record, several times",
    "record_votes": "every record, one count",
    "private_knn": "nearest records of a secret sample",
    "fairpate": "models trained on shards",
}
"""Methods with one kind of voters each, and who votes."""
_OFTEN = 0.95


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The cost of a run of ``method``, and the noise on its labels.

    ``epsilon`` is what the run would publish; None: no guarantee. ``votes`` decide a label, ``noise_stddev_votes`` is
    the standard deviation of the noise on each count, ``labels`` public records get a label, and noise leaves a label
    unchanged 19 times in 20 where the winning class leads by ``lead_needed`` of the votes (above 1: never). These are
    None for a method that releases no labels. ``measured``: the accuracy of earlier runs of the method on the data set
    at about this epsilon, no forecast. ``caution``: why the model cannot beat the most common class.
    ``refused``: why this method cannot run; then there are no numbers.
    """

    method: str
    epsilon: float | None = None
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    lead_needed: float | None = None
    measured: tuple[float, ...] = ()
    caution: str | None = None
    refused: str | None = None


def forecast(config: Method, dataset: Dataset, cost: Price | None) -> RunForecast:
    """Return the forecast of a run of ``config`` that costs ``cost``, from public records and sizes of ``dataset``."""
    epsilon = None if cost is None else cost.epsilon
    voting, caution = _voting(config, dataset), None
    if voting is None:
        return RunForecast(method=config.method, epsilon=epsilon)
    if not config.protects_attribute_only:  # otherwise the votes are about groups, not about classes
        caution = too_little_to_learn(voting, dataset.num_classes, known_majority(config.data, dataset))
    # The difference of two independent noises has a standard deviation larger by sqrt(2).
    lead = NormalDist().inv_cdf(_OFTEN) * math.sqrt(2) * voting.noise_stddev_votes / voting.votes
    return RunForecast(method=config.method, epsilon=epsilon, **vars(voting), lead_needed=lead, caution=caution)


def _voting(config: Method, dataset: Dataset) -> ExpectedVotes | None:
    """Return how many votes decide a label; None without votes or a public number of private records."""
    entry = _entry(config.data, dataset)
    if entry is None or entry.rows is None:
        return None
    # The publisher's count of what is protected, records or persons, less those of the other splits.
    others = [split for name, split in dataset.splits.items() if name != "private"]
    by_person = dataset.unit == "person" and entry.persons is not None
    apart = sum(split.num_protected if by_person else len(split) for split in others)
    # At least one: a publisher's count may be below the records of the other splits.
    return config.voting(dataset, max(1, count_protected(config.data) - apart))


def planned_cost(config: Method, dataset: Dataset) -> Price | None:
    """Return the largest cost that a run of ``config`` may publish; None without a guarantee.

    A target is used up with any data. Without a target, the queries that fit the budget are priced as if all of
    them were submitted.
    """
    if isinstance(config, VotingMethod):
        # Every query that fits is charged in full, with any outcome.
        asked = config.queried(dataset)
        event = config.plan(asked).worst_case(config.num_fitting(dataset))
        return price([event], delta=config.target.delta, relation=event.relation)
    if not (isinstance(config, PrivateMethod) and config.is_private):
        return None
    unit = config.unit_of(dataset)
    # An attribute is exchanged while its record stays: nothing is added or removed.
    own: Relation = "replace one" if unit == "sensitive attribute" else "add or remove one"
    target = config.target
    return Price(
        epsilon=target.epsilon,
        delta=target.delta,
        unit=unit,
        relation=target.relation or own,
        accounting=target.accounting,
    )


def spending(config: Method, dataset: Dataset, odometer: Odometer) -> str:
    """Say what a run of ``config`` may spend, and what earlier releases on the data set cost; empty without a
    guarantee, and for seeded noise, which is not private."""
    cost = None if config.is_seeded else planned_cost(config, dataset)
    if cost is None:
        return ""
    most = f"at most ε = {epsilon_text(cost.epsilon)} (δ = {delta_text(cost.delta)}) of each {cost.unit}"
    return f"{most}; so far {spent(dataset.name, odometer, delta=cost.delta)}"


def spent(data: str, odometer: Odometer, *, delta: float) -> str:
    """Say how many releases on ``data`` the operator counted, what they cost together, and the limit, by unit."""
    totals = [
        f"{counted(total.releases, 'release')} at ε = {epsilon_text(total.epsilon)} per {total.unit}, "
        + ("no limit" if total.epsilon_limit is None else f"limit {epsilon_text(total.epsilon_limit)}")
        for total in odometer.totals(delta=delta, data=data)
        if total.releases
    ]
    return "; ".join(totals) or "nothing"


def spent_since(before: Mapping[str, Release], data: str, odometer: Odometer, *, delta: float) -> str:
    """Say what was released on ``data`` since the odometer held ``before``, and what all releases cost; empty if
    nothing private was."""
    of_kind: dict[tuple[str, str], list[Release]] = {}
    for run, release in odometer.released(data).items():
        events = beyond(release.events, before[run].events if run in before else ())
        if events and release.is_private:
            new = replace(release, events=events, plan=(), rdp_A=np.zeros(0))
            of_kind.setdefault((release.unit, release.relation), []).append(new)
    now = [
        f"ε = {epsilon_text(composed_epsilon(found, delta=delta))} of each {unit}"
        for (unit, _), found in of_kind.items()
    ]
    return f"{' and '.join(now)} of {data}; so far {spent(data, odometer, delta=delta)}" if now else ""


ASK_ABOVE = 10.0
"""Epsilon of all releases on records of the user's own above which a command asks first, where no limit is set: such a
sum bounds an improved guess by a factor of 22,000."""


def question_above(data: str, *, planned: float, odometer: Odometer, delta: float, is_own: bool) -> str | None:
    """Return what to ask before releases on ``data`` that cost ``planned`` in sum; None if nothing needs to be asked.

    Asked is above the operator's limit, which will refuse a part of them, and where there is none above
    :data:`ASK_ABOVE`, if the records are the user's own and not a published data set.
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
    """Return forecasts of the other kinds of voters, with the settings that fit the data set under ``overrides``.

    The smallest lead comes first, refused methods last. DataError as :func:`fairpate.data.load_data`.
    """
    # Several kinds see the pool through the same embedding, and one may take a minute to compute.
    loaded: dict[str, Dataset] = {}
    found = []
    for method in stepwise([name for name in VOTERS if name != chosen]):
        try:
            config = resolved(overrides, method)
            config.require_trainable()
            key = config.data.model_dump_json()  # same records, options and embedding
            dataset = loaded[key] = loaded[key] if key in loaded else load_data(config.data)
            config.check_data(dataset)
            found.append(forecast(config, dataset, planned_cost(config, dataset)))
        except (ConfigError, DataSettingsError) as error:
            found.append(RunForecast(method=method, refused=str(error)))
    return sorted(found, key=lambda each: math.inf if each.lead_needed is None else each.lead_needed)


_NEAR = 1.25  # factor between epsilons that count as about the same


def measured_before(folder: Path, found: Sequence[RunForecast], data: str) -> list[RunForecast]:
    """Return ``found`` with the accuracy of finished runs in ``folder`` of the same methods on ``data``, at about the
    same epsilon."""
    accuracies: dict[str, list[tuple[float, float]]] = {}
    for record in _records_in(folder).values():
        epsilon, accuracy = record.get("epsilon"), record.get("accuracy")
        if record.get("data") == data and epsilon is not None and accuracy is not None:
            accuracies.setdefault(record.get("method", ""), []).append((epsilon, accuracy))
    return [
        replace(
            each,
            measured=tuple(
                sorted(
                    accuracy
                    for epsilon, accuracy in accuracies.get(each.method, ())
                    if each.epsilon is not None and max(epsilon, each.epsilon) <= _NEAR * min(epsilon, each.epsilon)
                )
            ),
        )
        for each in found
    ]


def describe(data: str, cost: Price | None, spent: str | None, found: Sequence[RunForecast]) -> Group:
    """Return one sentence and one table of forecasts, the run's own first. ``spent`` explains why nothing more is
    spent.

    Accuracy is not forecast: how often a label survives its noise says little about how often voters are right. The
    table holds what earlier runs measured instead, where there are some.
    """
    run = found[0]
    if spent is not None:
        sentence = f"{run.method} on {data} would spend nothing more: {spent}."
    elif cost is None:
        sentence = f"{run.method} on {data} would give no privacy guarantee."
    else:
        sentence = (
            f"{run.method} on {data} would spend epsilon {epsilon_text(cost.epsilon)} at delta "
            f"{delta_text(cost.delta)} ({cost.relation} {cost.unit}): all that it publishes improves a guess about one "
            f"{cost.unit} by a factor of {math.exp(min(cost.epsilon, 700)):.3g} at most."
        )
    headings = ("epsilon", "votes a label", "noise", "lead needed", "labels")
    has_runs = any(each.measured for each in found)
    right = [Column(name, justify="right") for name in (*headings, *(["accuracy of earlier runs"] * has_runs))]
    table = listing("method", "who votes", *right)
    for each in found:
        voters = VOTERS.get(each.method, "nobody" if each.votes is None and not each.refused else "teachers")
        numbers = [""] * 5
        if each.refused is None:
            numbers[0] = "none" if each.epsilon is None else epsilon_text(each.epsilon)
        if each.votes is not None and each.lead_needed is not None:
            lead = percent(each.lead_needed) if each.lead_needed <= 1 else "never"
            numbers[1:] = [f"{each.votes:,}", f"{each.noise_stddev_votes:.3g}", lead, f"{each.labels:,}"]
        if has_runs:
            ends = dict.fromkeys(map(percent, (each.measured[0], each.measured[-1]) if each.measured else ()))
            numbers.append(f"{' to '.join(ends)} ({counted(len(each.measured), 'run')})" if ends else "")
        table.add_row(each.method, voters, *numbers)
    notes = [f"{each.method}: {each.refused or each.caution}" for each in found if each.refused or each.caution]
    notes.append("Nothing was trained, charged or written; accuracy is not forecast.")
    if any(each.votes is not None for each in found):
        notes.append(
            "lead needed: by this share of votes the first class must lead for noise to leave it first 19 times in 20."
        )
    return Group(Text(f"{sentence}\n"), table, Text("\n" + "\n".join(notes)))


# Public labels; the share of the most common class among fewer is mostly chance.
_FEWEST_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The share of the most common class, and the source that gives it."""

    share: float
    source: str


def cautions(config: Method, dataset: Dataset, run: RunDirectory) -> tuple[str, ...]:
    """Return the reasons why a run of ``config`` cannot beat the most common class; empty if it may."""
    majority, found = known_majority(config.data, dataset), []
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
    voting = None if config.protects_attribute_only else _voting(config, dataset)
    if voting is not None and (words := too_little_to_learn(voting, dataset.num_classes, majority)):
        found.append(words)
    return tuple(found)


def _records_in(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return the readable records of the finished runs in ``folder``, by path."""
    found = {}
    for path in sorted(folder.glob("*/public/record.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # damaged, or of another program
            continue
        if isinstance(record, dict):
            found[path] = record
    return found


def too_little_to_learn(voting: ExpectedVotes, num_classes: int, majority: Majority | None) -> str | None:
    """Return why labels under this noise teach only the most common class even if all voters are right; None: they may.

    Without a known ``majority`` all classes are taken to be equally common.
    """
    # All voters agree: no other votes survive the noise more often.
    agreed_1C = np.array([[voting.votes, *[0] * (num_classes - 1)]])
    # Only the noise on the counts is read: every query passes a threshold of -inf.
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    right = float(noisy.right_probability(agreed_1C, np.zeros(1, dtype=np.int64))[0])
    worth = worth_of(voting.labels, right, num_classes=num_classes)
    share = 1 / num_classes if majority is None else majority.share
    if worth * (1 - share) >= 1:
        return None
    known = "" if majority is None else f", which is {percent(share)} of records by {majority.source}"
    return (
        f"cannot be expected to beat the most common class{known}: under this noise "
        f"{counted(voting.labels, 'label')} stand for {worth:.2g} without noise even if all voters are right, so for "
        f"{worth * (1 - share):.2g} of another class"
    )


def worth_of(labels: float, right: float, *, num_classes: int) -> float:
    """Return how many noiseless labels teach as much as ``labels`` labels of which a share ``right`` is correct."""
    chance = 1 / num_classes
    return labels * max(0.0, (right - chance) / (1 - chance)) ** 2


def known_majority(data: DataConfig, dataset: Dataset) -> Majority | None:
    """Return the share of the most common class, as declared or from public labels; None if neither is known."""
    entry = _entry(data, dataset)
    if entry is not None and entry.class_shares:
        return Majority(share=max(entry.class_shares), source="the declaration")
    labels = dataset.public.y.numpy()
    # -1 marks a public record without a label.
    known = labels[labels >= 0]
    if len(known) < _FEWEST_LABELS:
        return None
    return Majority(share=float(np.bincount(known).max() / len(known)), source="labels of public records")


def _entry(data: DataConfig, dataset: Dataset) -> DatasetEntry | None:
    """Return the public facts of the data set; None for one that was given from Python or comes with votes."""
    try:
        entry = entry_for(data)
    except DataSettingsError:
        return None
    return entry if entry.name == dataset.name else None
