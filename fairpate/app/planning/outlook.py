"""Whether a run can beat the most common class, as far as public facts say: before anything is spent.

Two facts say that it cannot. Labels under so much noise that, were all voters right about every record, they would
stand for fewer than one noiseless label of another class than the most common one: of W noiseless labels
(:func:`fairpate.app.planning.plan.worth_of`) W (1 - m) are, where m is the share of the most common class. And an
earlier run of the same method on the same data, at no smaller epsilon, whose published accuracy is none above m.

m is what the declaration says (``label.shares``), what labels of public records say, or what published runs measured;
where none of them does, it is taken to be as small as it can be. No private record is looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aggregator.gnmax import ConfidentGnmax
from fairpate.app.planning.plan import worth_of
from fairpate.app.rundir import RunDirectory
from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, entry_for
from fairpate.data.entry import DatasetEntry, DataSettingsError
from fairpate.evaluation.page import counted, epsilon_text, percent
from fairpate.methods.definition import Method, Voting
from fairpate.methods.fitted import count_protected

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


def too_little_to_learn(voting: Voting, num_classes: int, majority: Majority | None) -> str | None:
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
