"""How much a method's frontier covers: hypervolume with bootstrap intervals, and attainment over seeds.

Hypervolume (Zitzler and Thiele 1998) is the measure of what the points dominate inside the box below a reference
point; it grows with every point that nothing dominated before, and no set of points has more of it than a set that
dominates it. The empirical attainment function (Grunert da Fonseca, Fonseca and Hall 2001) is the share of seeds
whose points reach a given pair of objectives; its level sets are the median, best and worst frontiers of a method.

Both are computed by moocore. Neither knows what an objective means: values are minimised. Only differences against the
same reference compare.

Shapes: N points, O objectives, S seeds, P corners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import moocore
import numpy as np
import numpy.typing as npt

from fairpate.evaluation.frontier import (
    OBJECTIVES,
    FloatArray,
    Objective,
    Point,
    defined,
    matrix,
    require_one_panel,
    summary,
)

MAX_OBJECTIVES = len(OBJECTIVES)
_BOUNDED: dict[Objective, float] = {"error": 1.0, "refused": 1.0}
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class VolumeInterval:
    """A hypervolume as a share of the box between 0 and the reference, with its 95 % percentile interval over seeds.

    ``low`` and ``high`` are NaN where some configuration has a single seed: nothing is known of its spread.
    """

    value: float
    low: float
    high: float
    num_points: int
    num_undefined: int


def hypervolume(values_NO: npt.ArrayLike, *, reference_O: npt.ArrayLike) -> float:
    """Measure of the union of the boxes from each point to the reference: exact, for 1 to 4 objectives.

    A point that is not below the reference in every objective (an infinite epsilon, for one) adds nothing.
    ValueError for NaN, an infinite reference, or a number of objectives out of range.
    """
    reference = np.asarray(reference_O, dtype=np.float64)
    values = np.asarray(values_NO, dtype=np.float64).reshape(-1, len(reference))
    if not 1 <= len(reference) <= MAX_OBJECTIVES or not np.isfinite(reference).all():
        raise ValueError(f"Expected 1 to {MAX_OBJECTIVES} finite reference values, got {reference.tolist()}.")
    if np.isnan(values).any():
        raise ValueError("Expected defined objectives, got nan; leave such points out and count them.")
    return float(moocore.hypervolume(values, ref=reference))


def reference_point(points: Sequence[Point], objectives: Sequence[Objective]) -> FloatArray:
    """The corner that bounds the volume: 1 for error and refusals, else the next of 1, 2, 5, 10, ... above every point.

    Infinite and undefined values do not count; ValueError for points of several panels.
    """
    require_one_panel(points)
    return np.array([_BOUNDED.get(objective) or _round_above(points, objective) for objective in objectives])


def _round_above(points: Sequence[Point], objective: Objective) -> float:
    largest = max((v for point in points if math.isfinite(v := point.value(objective))), default=0.0)
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    # 20 as well: where the logarithm was rounded down, 10 is not above.
    return float(next(step * power for step in (*_STEPS, 20.0) if step * power > largest * (1 + 1e-9)))


def volume_interval(
    points: Sequence[Point],
    *,
    reference_O: npt.ArrayLike,
    generator: np.random.Generator,
    num_replicates: int = 400,
) -> VolumeInterval:
    """Hypervolume of one panel's points with a 95 % percentile bootstrap over seeds.

    A replicate draws seeds with replacement and joins each configuration's runs as ``summary`` does. Configurations
    with the same seeds share the draw, because a seed is one split and one start for all of them. The interval
    describes the spread over seeds alone; with few seeds it is too narrow.
    """
    require_one_panel(points)
    have, lacking = defined(points, OBJECTIVES)
    reference = np.asarray(reference_O, dtype=np.float64)
    box = float(reference.prod())
    low = high = math.nan
    if have and all(len(point.seeds) > 1 for point in have):
        drawn_RNO = _resampled(have, generator, num_replicates)
        volumes = [hypervolume(values_NO, reference_O=reference) / box for values_NO in drawn_RNO]
        low, high = np.quantile(volumes, [0.025, 0.975]).tolist()
    return VolumeInterval(
        value=hypervolume(matrix(have, OBJECTIVES), reference_O=reference) / box,
        low=low,
        high=high,
        num_points=len(have),
        num_undefined=len(lacking),
    )


def _resampled(points: Sequence[Point], generator: np.random.Generator, num_replicates: int) -> FloatArray:
    """``values_RNO`` of the points over R draws of their seeds."""
    drawn_RS = {
        seeds: generator.integers(len(seeds), size=(num_replicates, len(seeds)))
        for seeds in dict.fromkeys(point.seeds for point in points)
    }
    return np.stack([summary(point.values_SO[drawn_RS[point.seeds]]) for point in points], axis=1)


def attainment_surface(sets_SN2: Sequence[FloatArray], *, num_seeds: int) -> FloatArray:
    """Corners (P, 2) of the staircase above which at least ``num_seeds`` of the sets attain a pair, by first objective.

    1 is the best case over seeds, ``len(sets_SN2)`` the worst. Empty where no pair is attained that often; infinite
    values are never attained. ValueError if ``num_seeds`` is out of range.
    """
    if not 1 <= num_seeds <= len(sets_SN2):
        raise ValueError(f"Expected 1 <= num_seeds <= {len(sets_SN2)} sets, got {num_seeds}.")
    finite = [points_N2[np.isfinite(points_N2).all(axis=1)] for points_N2 in sets_SN2]
    attaining = [points_N2 for points_N2 in finite if len(points_N2)]
    if len(attaining) < num_seeds:
        return np.empty((0, 2))
    owners = np.repeat(np.arange(len(attaining)), [len(points_N2) for points_N2 in attaining])
    # As many sets as asked for, as a share of those that attain anything.
    corners = moocore.eaf(np.concatenate(attaining), owners, percentiles=[100 * num_seeds / len(attaining)])[:, :2]
    surface: FloatArray = corners[np.argsort(corners[:, 0])]
    return surface


def sets_by_seed(points: Sequence[Point], objectives: tuple[Objective, Objective]) -> list[FloatArray]:
    """What each seed's runs reached, undefined runs left out: the input of attainment, one set per seed."""
    require_one_panel(points)
    columns = [OBJECTIVES.index(objective) for objective in objectives]
    rows: dict[int, list[FloatArray]] = {seed: [] for seed in sorted({s for point in points for s in point.seeds})}
    for point in points:
        for seed, values_O in zip(point.seeds, point.values_SO[:, columns], strict=True):
            if not np.isnan(values_O).any():
                rows[seed].append(values_O)
    return [np.array(found, dtype=np.float64).reshape(-1, 2) for found in rows.values()]
