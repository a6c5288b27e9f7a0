"""Privacy loss distributions of sampled mechanisms, on a grid and rounded to the safe side.

Gaussians come from dp_accounting. A mechanism whose loss distribution is known on *all* records is put on a Poisson
sample here. With D its hockey-stick curve at thresholds of any sign, a sample of rate r has for adding and for removing
a record

    removing:  r D(ln((e^eps - 1 + r) / r))                                for e^eps > 1 - r, else 1 - e^eps
    adding:    (1 - (1 - r) e^eps) D(ln(r e^eps / (1 - (1 - r) e^eps)))    for e^eps < 1 / (1 - r), else 0

Both are non-negative multiples of D, so that a base which dominates gives a sample that does. The curves are joined by
the pessimistic connect-the-dots rule (Doroshenko et al. 2022, arXiv 2207.04380).

None stands for the loss distribution of what guarantees nothing. Not known here: events, units, who is protected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.later import pld, pld_pmf
from fairpate.types import Relation

FloatArray = npt.NDArray[np.float64]
if TYPE_CHECKING:
    LossDistribution: TypeAlias = pld.PrivacyLossDistribution
else:  # registries read the annotations of their functions, for the first argument's alone
    LossDistribution = Any
DEFAULT_INTERVAL = 1e-4
_MOST_DEVIATIONS = 9.0  # of a Gaussian: 1e-19 lies beyond
_LEAST_NODES, _NODES_PER_DEVIATION, _MOST_NODES = 16, 8, 512
_NEIGHBOURS = {"add or remove one": "ADD_OR_REMOVE_ONE", "replace one": "REPLACE_ONE"}


def nothing(interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """No loss with certainty."""
    return pld.identity(value_discretization_interval=interval)


def gaussians(count: int, noise_multiplier: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution | None:
    """``count`` Gaussian releases of sensitivity 1, which are as telling as one with less noise."""
    if not count or not noise_multiplier:
        return None if count else nothing(interval)
    return pld.from_gaussian_mechanism(noise_multiplier / math.sqrt(count), value_discretization_interval=interval)


def poisson_gaussians(
    count: int,
    noise_multiplier: float,
    *,
    sampling_rate: float,
    relation: Relation = "add or remove one",
    interval: float = DEFAULT_INTERVAL,
) -> LossDistribution | None:
    """``count`` Gaussian sums, each over a fresh Poisson sample; a record adds at most 1 to one."""
    if not count or not noise_multiplier:
        return None if count else nothing(interval)
    step = pld.from_gaussian_mechanism(
        noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=sampling_rate,
        neighboring_relation=pld.NeighborRel[_NEIGHBOURS[relation]],
    )
    return repeated(step, count)


def repeated(step: LossDistribution, count: int) -> LossDistribution:
    """``count`` steps, one after another."""
    # Tails are cut where the tightest of many moments bounds them. One beyond any float bounds nothing, and is skipped.
    with np.errstate(over="ignore"):
        return step.self_compose(count)


def composed(parts: Sequence[LossDistribution | None]) -> LossDistribution | None:
    """All of ``parts``, at least one; each may depend on what those before it released."""
    total = parts[0]
    for part in parts[1:]:
        total = None if total is None or part is None else total.compose(part)
    return total


def mixed_with_nothing(base: LossDistribution, share: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """``base`` with probability ``share``, else nothing happens, and everybody sees which: a bound by convexity."""
    return base.compute_mixture(nothing(interval), share) if share < 1 else base


class WorstPair(Protocol):
    """Two output distributions that dominate all neighbours', and are each other's mirror image."""

    @property
    def largest_loss(self) -> float:
        """Beyond it there is no mass to speak of."""
        ...

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianAndLaplace:
    """One Gaussian and one Laplace release of the same records, each of sensitivity 1 and with noise."""

    noise_multiplier: float
    laplace_scale: float

    @property
    def largest_loss(self) -> float:
        """Beyond it there is no mass to speak of."""
        return 1 / self.laplace_scale + (0.5 / self.noise_multiplier + _MOST_DEVIATIONS) / self.noise_multiplier

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign: the Gaussian's, over the Laplace release's losses.

        These are 1 / scale with mass 1/2, its negative with mass exp(-1 / scale) / 2, and between them have the density
        exp((loss - 1 / scale) / 2) / 4.
        """
        most, mu = 1 / self.laplace_scale, 1 / self.noise_multiplier
        total = (_gaussian(epsilons - most, mu) + math.exp(-most) * _gaussian(epsilons + most, mu)) / 2
        # The integrand is a Gaussian's divergence seen over most / mu of its deviations; nodes follow that width.
        num_nodes = min(_MOST_NODES, _LEAST_NODES + math.ceil(_NODES_PER_DEVIATION * most / mu))
        for node, weight in zip(*np.polynomial.legendre.leggauss(num_nodes), strict=True):
            total += most * weight * math.exp(most * (node - 1) / 2) / 4 * _gaussian(epsilons - most * node, mu)
        return np.clip(total, 0.0, 1.0)


def on_poisson_sample(base: WorstPair, *, sampling_rate: float, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """``base`` on a Poisson sample, for adding or removing a record.

    What is used of it holds for any mechanism whose mirror image has the same losses.
    """
    # With rate 1 there is no mass outside the sample: the base's own least loss bounds the grid.
    log_out = math.log1p(-sampling_rate) if sampling_rate < 1 else -base.largest_loss
    # A sample shifts the largest loss to ln(1 - rate + rate e^loss), and no loss of removing is below ln(1 - rate).
    highest = math.ceil(float(np.logaddexp(log_out, math.log(sampling_rate) + base.largest_loss)) / interval)
    removing = np.arange(math.floor(log_out / interval), highest + 1)
    adding = np.arange(-highest, math.ceil(-log_out / interval) + 1)
    return pld.PrivacyLossDistribution(
        _connected(interval, removing, _removing(base, interval * removing.astype(np.float64), sampling_rate)),
        _connected(interval, adding, _adding(base, interval * adding.astype(np.float64), sampling_rate)),
    )


def epsilon_at(distribution: LossDistribution | None, target_delta: float) -> float:
    """The least epsilon at which the divergence is at most ``target_delta``; ``inf`` where there is none."""
    return math.inf if distribution is None else float(distribution.get_epsilon_for_delta(target_delta))


def _gaussian(epsilons: FloatArray, mu: float) -> FloatArray:
    """The hockey-stick divergence of two unit Gaussians that lie ``mu`` apart (Balle and Wang 2018, Theorem 8)."""
    # In log space: e^epsilon overflows where the tail that it multiplies vanishes.
    below = np.exp(epsilons + scipy.special.log_ndtr(-epsilons / mu - mu / 2))
    difference: FloatArray = scipy.special.ndtr(mu / 2 - epsilons / mu) - below
    return difference


def _removing(base: WorstPair, epsilons: FloatArray, rate: float) -> FloatArray:
    # e^epsilon - (1 - rate), with its digits kept near epsilon 0.
    share = np.expm1(epsilons) + rate
    inside = share > 0
    at = np.log(np.where(inside, share, 1.0) / rate)
    # Up to ln(1 - rate) the mixture exceeds e^epsilon times the other everywhere: the divergence is 1 - e^epsilon.
    return np.where(inside, rate * base.divergence(at), -np.expm1(epsilons))


def _adding(base: WorstPair, epsilons: FloatArray, rate: float) -> FloatArray:
    left = 1 - (1 - rate) * np.exp(epsilons)
    inside = left > 0
    at = np.log(rate) + epsilons - np.log(np.where(inside, left, 1.0))
    # From -ln(1 - rate) on, e^epsilon times the mixture covers the other everywhere.
    return np.where(inside, left * base.divergence(at), 0.0)


def _connected(interval: float, grid: npt.NDArray[np.int64], deltas: FloatArray) -> pld_pmf.PLDPmf:
    # A divergence never rises with epsilon; where rounding lets it, connecting the dots would give negative mass.
    falling = np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
    return pld_pmf.create_pmf_pessimistic_connect_dots(interval, grid, falling)
