"""How a published student treats the groups of the private population: estimates of a release by group, for pages.

The numbers are post-processing of what was released (:mod:`fairpate.fairness.private_population`), so that they cost no
privacy and may be published with it, unlike metrics on test records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from fairpate.evaluation.metrics import GAPS, describe_cell
from fairpate.evaluation.page import decimal, percent
from fairpate.fairness import gaps
from fairpate.fairness.private_population import Estimate, Population, estimated_gap, estimated_rates
from fairpate.fairness.rates import FloatArray
from fairpate.strict_json import strict

FORMAT = "fairpate.private_population/1"
_ALL = 0.995  # an estimate of a constant is as near to 1


@dataclass(frozen=True, kw_only=True)
class GroupEstimate:
    """One group: private records, the share that gets an answer, and among those: the share that is right, the share
    of each prediction, and of each true label the share that is predicted so."""

    name: str
    records: Estimate
    coverage: Estimate
    accuracy: Estimate
    predicted: tuple[Estimate, ...]
    found: tuple[Estimate, ...]


@dataclass(frozen=True, kw_only=True)
class GapBetweenGroups(Estimate):
    """A largest difference; ``where`` in words, ``n_undefined`` rates of too few records for the noise left out."""

    where: str
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class PrivatePopulation:
    """Estimates among the private records, each with an interval at ``level``; gaps are over answered records."""

    level: float
    class_names: tuple[str, ...]
    groups: tuple[GroupEstimate, ...]
    gaps: Mapping[str, GapBetweenGroups]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, field for field; undefined numbers are null."""
        return {"format": FORMAT, **strict(asdict(self))}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PrivatePopulation:
        """What :meth:`to_json` gave. KeyError or TypeError when fields are missing or unknown."""
        return cls(
            level=plain["level"],
            class_names=tuple(plain["class_names"]),
            groups=tuple(_group(values) for values in plain["groups"]),
            gaps={name: GapBetweenGroups(**_numbers(values)) for name, values in plain["gaps"].items()},
        )


def private_population(
    population: Population, *, group_names: Sequence[str], class_names: Sequence[str], level: float = 0.95
) -> PrivatePopulation:
    """All estimates; the last outcome of ``population`` is a refusal."""
    joint, draws = population.joint_GYJ, population.draws_RGYJ
    answered = joint[..., :-1], draws[..., :-1]
    rates = partial(estimated_rates, level=level)
    predicted, correct = rates(gaps.predicted, *answered), rates(gaps.correct, *answered)
    # The first half of the events: of each true label, how many are predicted so.
    found = rates(gaps.found_or_mistaken, *answered)[: len(class_names)]
    coverage, records = rates(_answered, joint, draws), _records(population, level)
    return PrivatePopulation(
        level=level,
        class_names=tuple(class_names),
        groups=tuple(
            GroupEstimate(
                name=name,
                records=records[z],
                coverage=coverage[0][z],
                accuracy=correct[0][z],
                predicted=tuple(row[z] for row in predicted),
                found=tuple(row[z] for row in found),
            )
            for z, name in enumerate(group_names)
        ),
        gaps={
            name: _gap(metric, *answered, level=level, group_names=group_names, class_names=class_names)
            for name, metric in GAPS.items()
        },
    )


def population_words(found: PrivatePopulation) -> str:
    """The estimates in a sentence or two, and what they assume."""
    parity, level = found.gaps["dp_one_vs_rest"], percent(found.level, digits=0)
    gap = "undefined" if math.isnan(parity.value) else f"{decimal(parity.value)} ({range_words(parity, decimal)})"
    accuracies = (f"{percent(g.accuracy.value)} ({range_words(g.accuracy, percent)}) of {g.name}" for g in found.groups)
    always = [
        name
        for place, name in enumerate(found.class_names)
        if found.groups and all(each.predicted[place].value >= _ALL for each in found.groups)
    ]
    named = f" (it predicts {always[0]!r} for nearly every record)" if always else ""
    return (
        f"Among the private records the demographic-parity gap is {gap}{named}, and the model is right for "
        f"{', '.join(accuracies)}; {level} intervals. Estimated from the released table and public records, at "
        "no privacy cost, assuming that private records are predicted like public ones of their group that vote alike."
    )


def range_words(found: Estimate, words: Callable[[float], str]) -> str:
    """An interval; undefined without one."""
    return "undefined" if math.isnan(found.low) else f"{words(found.low)} to {words(found.high)}"


def _gap(
    metric: gaps.Metric,
    joint: FloatArray,
    draws: FloatArray,
    *,
    level: float,
    group_names: Sequence[str],
    class_names: Sequence[str],
) -> GapBetweenGroups:
    found = estimated_gap(metric, joint, draws, level=level)
    return GapBetweenGroups(
        value=found.value,
        low=found.low,
        high=found.high,
        where=describe_cell(found.where, group_names=group_names, class_names=class_names),
        n_undefined=found.n_undefined,
    )


def _answered(joint_GYJ: FloatArray) -> gaps.Events:
    """All outcomes but the last."""
    sizes_1G = joint_GYJ.sum(axis=(-2, -1))[..., None, :]
    return gaps.Events(hits_EG=sizes_1G - joint_GYJ[..., -1].sum(axis=-1)[..., None, :], sizes_EG=sizes_1G, cells=[])


def _records(population: Population, level: float) -> list[Estimate]:
    """Of every group; NaN where nothing is known of it."""
    count_G, count_RG = (joint.sum(axis=(-2, -1)) for joint in (population.joint_GYJ, population.draws_RGYJ))
    low_G, high_G = np.quantile(count_RG, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return [
        Estimate(value=v, low=a, high=b)
        for v, a, b in zip(count_G.tolist(), low_G.tolist(), high_G.tolist(), strict=True)
    ]


def _group(values: Mapping[str, Any]) -> GroupEstimate:
    fields = dict(values)
    for name in ("records", "coverage", "accuracy"):
        fields[name] = Estimate(**_numbers(values[name]))
    for name in ("predicted", "found"):
        fields[name] = tuple(Estimate(**_numbers(each)) for each in values[name])
    return GroupEstimate(**fields)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in values.items()}
