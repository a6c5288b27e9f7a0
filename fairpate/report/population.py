"""How a model treats the groups of the population from which private records come, as estimated from a released table.

Rates and gaps have intervals that cover the noise of the table and the draw of the records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fairpate import types
from fairpate.fairness import rates
from fairpate.fairness.rates import Population, PopulationEstimate, estimated_gap, estimated_rates
from fairpate.pages import decimal, interval, percent
from fairpate.report.metrics import GAPS, LEVEL, describe_cell
from fairpate.types import FloatArray, strict

POPULATION_FORMAT = "fairpate.private_population/1"
_NEARLY_ONE = 0.995  # the estimate of a constant prediction comes this near to 1


@dataclass(frozen=True, kw_only=True)
class GroupEstimate:
    """Estimates for one group of private records: its number of ``records``, and shares of them.

    ``coverage``: the share that gets an answer. Of answered records: the share predicted correctly (``accuracy``), the
    share with each prediction (``predicted``), and the recall of each true label (``found``), which is the share of the
    records with this label that are predicted correctly.
    """

    name: str
    records: PopulationEstimate
    coverage: PopulationEstimate
    accuracy: PopulationEstimate
    predicted: tuple[PopulationEstimate, ...]
    found: tuple[PopulationEstimate, ...]


@dataclass(frozen=True, kw_only=True)
class GapBetweenGroups(PopulationEstimate):
    """The estimate of a fairness gap, the largest difference between groups; ``where`` describes it in words.

    ``n_undefined``: the number of rates that are left out, because the noise is too large for their few records.
    """

    where: str
    n_undefined: int


@dataclass(frozen=True, kw_only=True)
class PrivatePopulation:
    """Estimates of how a model treats the groups of the population from which the private records come. They are
    computed from a release of noisy sums by group.

    The estimates are post-processing of what was released (:mod:`fairpate.fairness.rates`): they have no privacy cost
    and its epsilon covers them, unlike exact metrics of test records. Each has an interval at ``level``; gaps are over
    answered records.
    """

    level: float
    class_names: tuple[str, ...]
    groups: tuple[GroupEstimate, ...]
    gaps: Mapping[str, GapBetweenGroups]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON values; undefined numbers are null."""
        return {"format": POPULATION_FORMAT, **strict(asdict(self))}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> PrivatePopulation:
        """Return the estimates that :meth:`to_json` wrote. TypeError when fields are missing or unknown."""
        return types.restored(cls, {name: plain[name] for name in plain if name != "format"})

    @property
    def words(self) -> str:
        """Two sentences: the main estimates, and the assumption on which the estimates rest."""
        parity, level = self.gaps["dp_one_vs_rest"], percent(self.level, digits=0)
        gap = "undefined" if math.isnan(parity.value) else f"{decimal(parity.value)} ({interval(parity)})"
        accuracies = (
            f"{percent(group.accuracy.value)} ({interval(group.accuracy, percent)}) of {group.name}"
            for group in self.groups
        )
        # A constant prediction has small gaps, which the sentence should not praise.
        always = [
            name
            for place, name in enumerate(self.class_names)
            if self.groups and all(group.predicted[place].value >= _NEARLY_ONE for group in self.groups)
        ]
        named = f" (it predicts {always[0]!r} for nearly every record)" if always else ""
        return (
            f"Among the private records the demographic-parity gap is {gap}{named}, and the model is right for "
            f"{', '.join(accuracies)}; {level} intervals. Estimated from the released table and public records, at no "
            "privacy cost, assuming that private records are predicted like public ones of their group that vote alike."
        )


def private_population(
    population: Population, *, group_names: Sequence[str], class_names: Sequence[str]
) -> PrivatePopulation:
    """Return estimates of how a model treats the groups of the population, computed from ``population``, the estimated
    counts by group, true label and outcome; the last outcome is a refusal."""
    joint, draws = population.joint_GYJ, population.draws_RGYJ
    # Rates and gaps are over answered records: all outcomes but the last.
    answered = joint[..., :-1], draws[..., :-1]

    def coverages(joint_GYJ: FloatArray) -> rates.Events:
        sizes_1G = joint_GYJ.sum(axis=(-2, -1))[..., None, :]
        refused_1G = joint_GYJ[..., -1].sum(axis=-1)[..., None, :]
        return rates.Events(hits_EG=sizes_1G - refused_1G, sizes_EG=sizes_1G, cells=[])

    predicted = estimated_rates(rates.predicted, *answered)
    correct = estimated_rates(rates.correct, *answered)
    # The first half of the events: for each true label, the records predicted as this label.
    found = estimated_rates(rates.found_or_mistaken, *answered)[: len(class_names)]
    coverage = estimated_rates(coverages, joint, draws)
    count_G, count_RG = joint.sum(axis=(-2, -1)), draws.sum(axis=(-2, -1))
    # Draws contain the error of the estimate: their quantiles are the ends of its interval.
    low_G, high_G = np.quantile(count_RG, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    gaps = {}
    for name, metric in GAPS.items():
        gap = estimated_gap(metric, *answered)
        where = describe_cell(gap.where, group_names=group_names, class_names=class_names)
        gaps[name] = GapBetweenGroups(**vars(gap) | {"where": where})
    return PrivatePopulation(
        level=LEVEL,
        class_names=tuple(class_names),
        groups=tuple(
            GroupEstimate(
                name=name,
                records=PopulationEstimate(value=float(count_G[z]), low=float(low_G[z]), high=float(high_G[z])),
                coverage=coverage[0][z],
                accuracy=correct[0][z],
                predicted=tuple(row[z] for row in predicted),
                found=tuple(row[z] for row in found),
            )
            for z, name in enumerate(group_names)
        ),
        gaps=gaps,
    )
