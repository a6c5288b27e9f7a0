"""What a run would spend and what its noise would leave of the labels, from public facts alone.

`fairpate run --dry-run` prints a :class:`Forecast` of the run and, where no method was named, one of each other kind of
voters. No private record is looked at and nothing is assumed about the voters. The noise on the votes tells how far
the winning class has to lead: two Gaussian noises of standard deviation sigma differ by at most 1.645 sqrt(2) sigma
19 times in 20.

A run also warns before it spends where it cannot beat the most common class (:func:`cautions`). Two facts say so:

* The labels carry too little information even if all voters are right. Q labels that are right with probability p among
  C classes are worth W = Q ((p - 1/C) / (1 - 1/C))^2 noiseless labels (uniform label noise, to first order), of which
  W (1 - m) are of another class than the most common one, whose share is m. Fewer than one teach nothing.
* A published run of the same method on the same data, at no smaller epsilon, did not beat m.

m is what the declaration says (``label.shares``), what labels of public records say, or what published runs measured;
where none of them does, it is taken to be as small as it can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Column
from rich.text import Text

from aggregator.mechanism import ConfidentGnmax
from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, entry_for, load_data
from fairpate.data.dataset import DatasetEntry, DataSettingsError
from fairpate.methods.base import ExpectedVotes, Method, Price, PrivateMethod, count_protected, price, resolved
from fairpate.methods.pate import VotingMethod
from fairpate.report.page import counted, epsilon_text, percent
from fairpate.run.context import RunDirectory
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
class Forecast:
    """What a run of ``method`` would spend, and under how much noise its labels would be released.

    ``epsilon`` is what the run would publish; None: no guarantee. ``votes`` decide a label, ``noise_stddev_votes`` is
    the standard deviation of the noise on each count, ``labels`` public records get a label, and noise leaves a label
    unchanged 19 times in 20 where the winning class leads by ``lead_needed`` of the votes (above 1: never). These are
    None for a method that releases no labels. ``caution``: why the model cannot beat the most common class.
    ``refused``: why this method cannot run; then there are no numbers.
    """

    method: str
    epsilon: float | None = None
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    lead_needed: float | None = None
    caution: str | None = None
    refused: str | None = None


def forecast(config: Method, dataset: Dataset, cost: Price | None) -> Forecast:
    """The forecast of a run of ``config`` that costs ``cost``; of ``dataset`` public records and sizes are read."""
    known: dict[str, Any] = {"method": config.method, "epsilon": None if cost is None else cost.epsilon}
    try:
        voting = config.voting(dataset, public_size(config.data, dataset))
    except (NotImplementedError, ConfigError):  # nobody votes, or the number of records is not public
        return Forecast(**known)
    lead = NormalDist().inv_cdf(_OFTEN) * math.sqrt(2) * voting.noise_stddev_votes / voting.votes
    caution = None
    if not config.protects_attribute_only:  # otherwise the votes are about groups, not about classes
        caution = too_little_to_learn(voting, dataset.num_classes, known_majority(config.data, dataset))
    return Forecast(**known, **vars(voting), lead_needed=lead, caution=caution)


def planned_cost(config: Method, dataset: Dataset) -> Price | None:
    """What a run of ``config`` would publish as its price at most; None without a guarantee.

    A target is used up, whatever the data; without one the queries that fit the budget are priced, all of them
    submitted.
    """
    if isinstance(config, VotingMethod):
        asked = config.queried(dataset)
        event = config.plan(asked).worst_case(config.num_fitting(dataset))
        return price([event], delta=config.target.delta, relation=event.relation)
    if not (isinstance(config, PrivateMethod) and config.is_private):
        return None
    unit = config.unit_of(dataset)
    own: Relation = "replace one" if unit == "sensitive attribute" else "add or remove one"
    target = config.target
    return Price(
        epsilon=target.epsilon,
        delta=target.delta,
        unit=unit,
        relation=target.relation or own,
        accounting=target.accounting,
    )


def other_voters(overrides: Sequence[str], chosen: str) -> list[Forecast]:
    """Forecasts of all kinds of voters but ``chosen``, with what fits the data set under ``overrides``.

    Those that need the smallest lead come first, then those that are refused. DataError as
    :func:`fairpate.data.load_data`.
    """
    # Several kinds see the pool through the same embedding, and one may take a minute to compute.
    loaded: dict[str, Dataset] = {}
    found = []
    for method in stepwise([name for name in VOTERS if name != chosen]):
        try:
            config = resolved(overrides, method)
            config.require_trainable()
            key = config.data.model_dump_json()
            dataset = loaded[key] = loaded[key] if key in loaded else load_data(config.data)
            config.check_data(dataset)
            found.append(forecast(config, dataset, planned_cost(config, dataset)))
        except ConfigError as error:
            found.append(Forecast(method=method, refused=str(error)))
    return sorted(found, key=lambda each: math.inf if each.lead_needed is None else each.lead_needed)


def describe(data: str, cost: Price | None, spent: str | None, found: Sequence[Forecast]) -> Group:
    """One sentence and one table; the first of ``found`` is the run. ``spent``: where nothing more would be spent."""
    run = found[0]
    if spent is not None:
        sentence = f"{run.method} on {data} would spend nothing more: {spent}."
    elif cost is None:
        sentence = f"{run.method} on {data} would give no privacy guarantee."
    else:
        sentence = (
            f"{run.method} on {data} would spend epsilon {epsilon_text(cost.epsilon)} at delta "
            f"{delta_text(cost.delta)} ({cost.relation} {cost.unit})."
        )
    right = [Column(name, justify="right") for name in ("epsilon", "votes a label", "noise", "lead needed", "labels")]
    table = listing("method", "who votes", *right)
    for each in found:
        voters = VOTERS.get(each.method, "teachers") if each.votes is not None or each.refused else "nobody"
        table.add_row(each.method, voters, *_numbers(each))
    notes = [f"{each.method}: {each.refused or each.caution}" for each in found if each.refused or each.caution]
    notes.append("Nothing was trained, charged or written.")
    if any(each.votes is not None for each in found):
        notes.append(
            "lead needed: by this share of votes the first class must lead for noise to leave it first 19 times in 20."
        )
    return Group(Text(f"{sentence}\n"), table, Text("\n" + "\n".join(notes)))


def _numbers(each: Forecast) -> list[str]:
    if each.refused is not None:
        return [""] * 5
    epsilon = "none" if each.epsilon is None else epsilon_text(each.epsilon)
    if each.votes is None or each.lead_needed is None:
        return [epsilon, *[""] * 4]
    lead = percent(each.lead_needed) if each.lead_needed <= 1 else "never"
    return [epsilon, f"{each.votes:,}", f"{each.noise_stddev_votes:.3g}", lead, f"{each.labels:,}"]


_FEWEST_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The share of the most common class, and who says so."""

    share: float
    source: str


def cautions(config: Method, dataset: Dataset, run: RunDirectory) -> tuple[str, ...]:
    """Why a run of ``config`` in the folder ``run`` cannot beat the most common class; empty where nothing says so."""
    earlier = list(_earlier(config, run))
    majority = known_majority(config.data, dataset) or next((each for each, _ in earlier), None)
    found = [words for _, words in earlier if words]
    try:
        # Voters where the attribute alone is protected name no class; of other data no public size is known.
        if not config.protects_attribute_only and _entry(config.data, dataset) is not None:
            voting = config.voting(dataset, public_size(config.data, dataset))
            found.append(too_little_to_learn(voting, dataset.num_classes, majority) or "")
    except (NotImplementedError, ConfigError):  # nobody votes; or the run itself says what is wrong
        pass
    return tuple(filter(None, found))


def too_little_to_learn(voting: ExpectedVotes, num_classes: int, majority: Majority | None) -> str | None:
    """Why labels under this noise teach no class but the most common, even if all voters are right; None if they may.

    Without a known ``majority`` classes are taken to be equally common.
    """
    agreed_1C = np.array([[voting.votes, *[0] * (num_classes - 1)]])
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
    """How many noiseless labels ``labels`` are worth of which a share of ``right`` is right."""
    chance = 1 / num_classes
    return labels * max(0.0, (right - chance) / (1 - chance)) ** 2


def known_majority(data: DataConfig, dataset: Dataset) -> Majority | None:
    """By the declaration, or by labels of public records; None where neither knows."""
    entry = _entry(data, dataset)
    if entry is not None and entry.class_shares:
        return Majority(share=max(entry.class_shares), source="the declaration")
    labels = dataset.public.y.numpy()
    known = labels[labels >= 0]
    if len(known) < _FEWEST_LABELS:
        return None
    return Majority(share=float(np.bincount(known).max() / len(known)), source="labels of public records")


def public_size(data: DataConfig, dataset: Dataset) -> int:
    """The publisher's count of what is protected, records or persons, less those of the other splits."""
    others = [split for name, split in dataset.splits.items() if name != "private"]
    by_person = dataset.unit == "person" and entry_for(data).persons is not None
    return max(1, count_protected(data) - sum(split.num_protected if by_person else len(split) for split in others))


def _entry(data: DataConfig, dataset: Dataset) -> DatasetEntry | None:
    """What is public of the data set; None for one that was given from Python or comes with votes."""
    try:
        entry = entry_for(data)
    except DataSettingsError:
        return None
    return entry if entry.name == dataset.name else None


def _earlier(config: Method, run: RunDirectory) -> Iterator[tuple[Majority, str]]:
    """Of published runs on the same data beside this one: the majority that they measured, and who did not beat it."""
    epsilon = getattr(config.target, "epsilon", None)
    for path in sorted(run.root.parent.glob("*/public/record.json")):
        record = _record(path)
        majority, accuracy = record.get("majority_accuracy"), record.get("accuracy")
        if record.get("data") != config.data.name or majority is None or accuracy is None or path == run.record:
            continue
        words = ""
        is_dearer = epsilon is not None and (record.get("epsilon") or math.inf) >= epsilon
        if record.get("method") == config.method and is_dearer and accuracy <= majority:
            words = (
                f"an earlier run of {config.method}, {path.parent.parent.name}, did not beat the most common class at "
                f"epsilon {epsilon_text(record['epsilon'])}: {percent(accuracy)} of {percent(majority)}"
            )
        yield Majority(share=majority, source=f"the test records of {path.parent.parent.name}"), words


def _record(path: Path) -> dict[str, Any]:
    """What an earlier run published; nothing of a damaged file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
