"""A published student on the groups of the *private* population, estimated from a noisy table and public records.

The table has, for every group z and label y, the noisy sum S[z, y] of its private records' votes: vectors phi(x), or
for counts the unit vector of a record's cell. The number of them for which a student predicts j is estimated by

    J[z, y, j] = <beta[z, y, j], S[z, y]>

where beta is the regression of "x is predicted j" on phi(x) over the public records of group z, each weighted by
p(y | x), the probability that the release gives x the label y (regression estimators of surveys: Deville and Sarndal
1992). For counts it is the weighted share of j in the cell. Rates and gaps are ratios of such sums. All is
post-processing.

**Assumption.** Over the private records of a group and label, the residual of the regression is 0 on average, as
over the public records of that group under these weights. In cells: a private record is predicted like the public
records of its cell and group, weighted by their probability of that label. Where a group has no public record in a
cell, those of all groups are used, and where there is none at all, the label's average: each fit is shrunk towards the
coarser one with the weight of one record.

Shapes: M public records, W numbers per vote, G groups, Y labels, J outcomes (Y predictions, and perhaps a refusal), R
draws of the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from fairpate.fairness.rates import FloatArray, GroupCell, IndexArray, Metric, RateEvents, divide, located
from fairpate.types import IntArray

TAUGHT_NOISE, KEPT_NOISE = math.sqrt(1.5), math.sqrt(3.0)  # variance 1, and 1 / 2 or 2 by thinning
_LEAST_LIKELY = 1e-3  # a label that the release rules out keeps a weight
_RIDGE = 1.0  # records, of norm one
_LEAST_STDDEVS = 4.0  # of a count: below, it is no denominator


def thinned(table: IntArray, *, stddev: float, generator: np.random.Generator) -> tuple[IntArray, FloatArray]:
    """Split a noisy table, with noise of ``stddev`` on every number, into two tables with independent noise.

    A student that had learned from the very noise of the estimate would fit it and look better than it is. So the
    student learns from the first table, and the second is kept for the estimate (Leiner et al. 2023, arXiv 2112.11079).
    Noise of the first is ``TAUGHT_NOISE`` times as wide, of the second ``KEPT_NOISE`` times. Anyone may repeat it.
    """
    # Floats will do here: both tables are made of one that is released already.
    drawn = generator.normal(scale=stddev, size=table.shape)
    # Covariance stddev^2 (1 - sqrt(2) sqrt(1 / 2)) = 0.
    return np.rint(table + math.sqrt(0.5) * drawn).astype(np.int64), table - math.sqrt(2.0) * drawn


@dataclass(frozen=True, kw_only=True)
class TableByGroup:
    """A released table: sums of votes by group and label, each number with noise of ``stddev``.

    ``one_W``: the combination of a vote's numbers that is one for every record, so that it counts records.
    """

    sums_GYW: FloatArray
    stddev: float
    one_W: FloatArray


@dataclass(frozen=True, kw_only=True)
class LabelledRecords:
    """Public records with their votes, groups, probabilities of each label, and outcomes as 0 or 1."""

    votes_MW: FloatArray
    groups_M: IndexArray
    likely_MY: FloatArray
    outcome_MJ: FloatArray


@dataclass(frozen=True, kw_only=True)
class Population:
    """Estimated counts by group, label and outcome (G, Y, J), and draws that contain their error (R, G, Y, J)."""

    joint_GYJ: FloatArray
    draws_RGYJ: FloatArray


@dataclass(frozen=True, kw_only=True)
class PopulationEstimate:
    """A number with its interval; NaN where it is undefined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class GapEstimate(PopulationEstimate):
    """A largest difference, the cell that attains it, and the number of rates with too few records for the noise."""

    where: GroupCell | None
    n_undefined: int


def estimated_population(
    table: TableByGroup, public: LabelledRecords, *, generator: np.random.Generator, num_draws: int = 2000
) -> Population:
    """The estimate and its error; NaN for a group without public records, on which there is no information.

    The error covers the release's noise, ``sigma^2 |beta|^2``; the sampling of public records, by the influence of each
    on J (linearisation); and the sampling of private records, by the residuals. A false assumption is not covered.
    """
    num_groups, num_labels, _ = table.sums_GYW.shape
    num_outcomes = public.outcome_MJ.shape[1]
    joint_GYJ = np.full((num_groups, num_labels, num_outcomes), np.nan)
    draws_RGYJ = np.full((num_draws, *joint_GYJ.shape), np.nan)
    # Fits over all groups, shrunk towards the label's average; each group's fit is then shrunk towards them.
    coarse = []
    for label in range(num_labels):
        weights_M = np.maximum(public.likely_MY[:, label], _LEAST_LIKELY)
        average_WJ = np.outer(table.one_W, weights_M @ public.outcome_MJ / weights_M.sum())
        coarse.append(_Fit.of(public.votes_MW, weights_M, public.outcome_MJ, average_WJ))
    for group in range(num_groups):
        (rows,) = (public.groups_M == group).nonzero()
        if not len(rows):
            continue
        influences, noises = [], []
        for label, all_groups in enumerate(coarse):
            votes_MW, sum_W = public.votes_MW, table.sums_GYW[group, label]
            own = _Fit.of(votes_MW[rows], all_groups.weights_M[rows], public.outcome_MJ[rows], all_groups.beta_WJ)
            joint_GYJ[group, label] = sum_W @ own.beta_WJ
            # The derivative of J by a record's outcome: through the group's own fit, and through the coarser one.
            direct_W = np.linalg.solve(own.gram_WW, sum_W)
            # Of the coarser coefficients, a group's fit keeps the ridge times the inverse of its Gram matrix.
            drawn_W = _RIDGE * np.linalg.solve(all_groups.gram_WW, direct_W)
            influence_MJ = (all_groups.weights_M * (votes_MW @ drawn_W))[:, None] * all_groups.residual_MJ
            influence_MJ[rows] += (own.weights_M * (votes_MW[rows] @ direct_W))[:, None] * own.residual_MJ
            influences.append(influence_MJ)
            # A noisy count may be negative, a variance may not.
            count = max(float(table.one_W @ sum_W), 0.0)
            left_JJ = (own.residual_MJ * own.weights_M[:, None]).T @ own.residual_MJ / own.weights_M.sum()
            noises.append(table.stddev**2 * own.beta_WJ.T @ own.beta_WJ + count * left_JJ)
        influence = np.concatenate(influences, axis=1)
        # Public records are drawn independently: the squares of their influences add up.
        covariance = influence.T @ influence + scipy.linalg.block_diag(*noises)
        # An outcome that no public record has leaves the covariance singular, which a Cholesky factor refuses.
        errors = generator.multivariate_normal(np.zeros(len(covariance)), covariance, size=num_draws, method="eigh")
        draws_RGYJ[:, group] = joint_GYJ[group] + errors.reshape(num_draws, num_labels, num_outcomes)
    return Population(joint_GYJ=joint_GYJ, draws_RGYJ=draws_RGYJ)


def estimated_rates(
    events: RateEvents, joint_GYC: FloatArray, draws_RGYC: FloatArray, *, level: float = 0.95
) -> list[list[PopulationEstimate]]:
    """Every rate by event and group with an interval of its own, cut to 0 and 1; undefined for too few records."""
    hits_EG, sizes_EG, hits_REG, sizes_REG = _large_enough(events, joint_GYC, draws_RGYC)
    value_EG, rates_REG = divide(hits_EG, sizes_EG), divide(hits_REG, sizes_REG)
    low_EG, high_EG = np.quantile(rates_REG, [(1 - level) / 2, (1 + level) / 2], axis=0)
    ends = (np.clip(values, 0, 1).tolist() for values in (value_EG, low_EG, high_EG))
    return [
        [PopulationEstimate(value=v, low=a, high=b) for v, a, b in zip(*row, strict=True)]
        for row in zip(*ends, strict=True)
    ]


def estimated_gap(metric: Metric, joint_GYC: FloatArray, draws_RGYC: FloatArray, *, level: float = 0.95) -> GapEstimate:
    """The largest difference of ``metric`` among the private records, with its interval.

    The interval comes from simultaneous intervals for all differences, so its coverage is at least theirs.
    """
    hits_EG, sizes_EG, hits_REG, sizes_REG = _large_enough(metric.events, joint_GYC, draws_RGYC)
    differences = metric.compare(hits_EG, sizes_EG)
    value_D, value_RD = differences.ravel(), metric.compare(hits_REG, sizes_REG).reshape(len(draws_RGYC), -1)
    known_D = ~np.isnan(value_D)
    n_undefined = int((sizes_EG == 0).sum())
    if not known_D.any():
        return GapEstimate(value=math.nan, low=math.nan, high=math.nan, where=None, n_undefined=n_undefined)
    value_D, error_RD = value_D[known_D], value_RD[:, known_D] - value_D[known_D]
    spread_D = np.sqrt(np.square(error_RD).mean(axis=0))
    # One quantile of the largest standardised error serves every difference: the intervals hold together.
    farthest_R = np.abs(divide(error_RD, spread_D))
    # A difference without any error cannot be standardised, and is never the farthest.
    reach_D = spread_D * np.quantile(np.nan_to_num(farthest_R).max(axis=1), level)
    value, low, high = (float(np.clip(v.max(), 0, 1)) for v in (value_D, value_D - reach_D, value_D + reach_D))
    where = located(differences, metric.events(joint_GYC).cells)
    return GapEstimate(value=value, low=low, high=high, where=where, n_undefined=n_undefined)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A ridge regression of outcomes on votes, whose coefficients are shrunk towards those of a coarser regression.

    ``residual_MJ`` are leave-one-out residuals: those of a fit to few records would be too small.
    """

    beta_WJ: FloatArray
    gram_WW: FloatArray
    residual_MJ: FloatArray
    weights_M: FloatArray

    @classmethod
    def of(cls, votes_MW: FloatArray, weights_M: FloatArray, outcome_MJ: FloatArray, coarse_WJ: FloatArray) -> _Fit:
        weighted_WM = (votes_MW * weights_M[:, None]).T
        gram_WW = weighted_WM @ votes_MW
        gram_WW[np.diag_indices_from(gram_WW)] += _RIDGE
        pulled_WM = np.linalg.solve(gram_WW, weighted_WM)
        left_MJ = outcome_MJ - votes_MW @ coarse_WJ
        fitted_WJ = pulled_WM @ left_MJ
        leverage_M = np.einsum("mw,wm->m", votes_MW, pulled_WM)
        return cls(
            beta_WJ=coarse_WJ + fitted_WJ,
            gram_WW=gram_WW,
            # Divided by 1 - leverage: the residual of the fit without this record, without fitting again.
            residual_MJ=(left_MJ - votes_MW @ fitted_WJ) / (1 - leverage_M)[:, None],
            weights_M=weights_M,
        )


def _large_enough(
    events: RateEvents, joint_GYC: FloatArray, draws_RGYC: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Hits and sizes (E, G) of the table and of the draws. Both are 0 where a size is not significantly above 0."""
    found, drawn = events(joint_GYC), events(draws_RGYC)
    # A ratio over a size that may be 0 has no interval, so such rates are left out beforehand.
    error_EG = np.sqrt(np.square(drawn.sizes_EG - found.sizes_EG).mean(axis=0))
    is_known_EG = found.sizes_EG > _LEAST_STDDEVS * error_EG
    # `divide` turns sizes of 0 into undefined rates, as for groups without records.
    hits_EG, sizes_EG, hits_REG, sizes_REG = (
        np.where(is_known_EG, values, 0.0) for values in (found.hits_EG, found.sizes_EG, drawn.hits_EG, drawn.sizes_EG)
    )
    return hits_EG, sizes_EG, hits_REG, sizes_REG
