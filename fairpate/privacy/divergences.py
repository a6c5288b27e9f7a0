"""Hockey-stick divergences of noise, and of noise on a Poisson sample: where loss distributions come from.

A mechanism whose divergence D is known on *all* records, at thresholds of any sign, is put on a Poisson sample here. A
sample of rate r has for adding and for removing a record

    removing:  r D(ln((e^eps - 1 + r) / r))                                for e^eps > 1 - r, else 1 - e^eps
    adding:    (1 - (1 - r) e^eps) D(ln(r e^eps / (1 - (1 - r) e^eps)))    for e^eps < 1 / (1 - r), else 0

Both are non-negative multiples of D, so that a base which dominates gives a sample that does. Replacing a record of a
sample has a worst pair of its own (:func:`_replacing`).

Not known here: events, units, who is protected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy

from fairpate.privacy.loss_distributions import (
    DEFAULT_INTERVAL,
    UNIT,
    FloatArray,
    LossDistribution,
    connected,
    nothing,
    repeated,
    symmetric,
)
from fairpate.types import Relation

_MOST_DEVIATIONS = 12.0  # of a Gaussian: 1e-33 lies beyond


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
class Gaussian:
    """One Gaussian release of sensitivity 1."""

    noise_multiplier: float

    @property
    def largest_loss(self) -> float:
        """Beyond it there is no mass to speak of."""
        return (0.5 / self.noise_multiplier + _MOST_DEVIATIONS) / self.noise_multiplier

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign (Balle and Wang 2018, Theorem 8)."""
        mu = 1 / self.noise_multiplier
        # In log space: e^epsilon overflows where the tail that it multiplies vanishes.
        behind, ahead = -epsilons / mu - mu / 2, mu / 2 - epsilons / mu
        below, above = np.exp(epsilons + scipy.special.log_ndtr(behind)), scipy.special.ndtr(ahead)
        return above - below + _rounding(above + below, behind, np.abs(epsilons))


@dataclass(frozen=True, kw_only=True)
class Laplace:
    """One release of sensitivity 1 with Laplace noise."""

    scale: float

    @property
    def largest_loss(self) -> float:
        """There is none beyond."""
        return 1 / self.scale

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign: 1 - e^((eps - a) / 2) within the largest loss a."""
        most = self.largest_loss
        half = (np.minimum(epsilons, most) - most) / 2
        inside = np.where(epsilons < most, -np.expm1(half) + _rounding(np.exp(half), 0.0, np.abs(epsilons) + most), 0.0)
        return np.where(epsilons < -most, -np.expm1(np.minimum(epsilons, 0.0)), inside)


@dataclass(frozen=True, kw_only=True)
class GaussianAndLaplace:
    """One Gaussian and one Laplace release of the same records, each of sensitivity 1 and with noise."""

    noise_multiplier: float
    laplace_scale: float

    @property
    def largest_loss(self) -> float:
        """Beyond it there is no mass to speak of."""
        return 1 / self.laplace_scale + Gaussian(noise_multiplier=self.noise_multiplier).largest_loss

    def divergence(self, epsilons: FloatArray) -> FloatArray:
        """The hockey-stick divergence at thresholds of any sign: the Gaussian's, over the Laplace release's losses.

        These are a = 1 / scale with mass 1/2, -a with mass exp(-a) / 2, and between them have the density
        exp((loss - a) / 2) / 4. With noise s and mu = 1 / s, integrated by parts, the divergence at e is

            Phi(s (a - e) + mu / 2) - exp(e) Phi(-s (a + e) - mu / 2)
                - exp((e - a) / 2 - mu^2 / 8) (Phi(s (a - e)) - Phi(-s (a + e)))
        """
        most, noise, half = 1 / self.laplace_scale, self.noise_multiplier, 0.5 / self.noise_multiplier
        ahead, behind = noise * (most - epsilons), -noise * (most + epsilons)
        log_scale, log_tail = (epsilons - most - half**2) / 2, scipy.special.log_ndtr
        # In log space: e^epsilon overflows where the tails that it multiplies vanish.
        near, less_near = scipy.special.ndtr(ahead + half), np.exp(log_scale + log_tail(ahead))
        far, less_far = np.exp(log_scale + log_tail(behind)), np.exp(epsilons + log_tail(behind - half))
        rounding = _rounding(near + less_near, np.minimum(ahead, 0.0), np.abs(log_scale))
        rounding += _rounding(far + less_far, np.minimum(behind - half, 0.0), np.abs(log_scale))
        within: FloatArray = np.clip(near - less_near + far - less_far + rounding, 0.0, 1.0)
        return within


def _rounding(terms: FloatArray, deviations: FloatArray | float, exponents: FloatArray) -> FloatArray:
    """More than rounding takes off a difference of ``terms``: exponentials of ``exponents``, and tails at so many
    ``deviations``, whose logarithms are about half the square."""
    return 4 * UNIT * terms * (16 + deviations**2 + exponents)


def gaussians(count: int, noise_multiplier: float, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution | None:
    """``count`` Gaussian releases of sensitivity 1, which are as telling as one with less noise."""
    if not count or not noise_multiplier:
        return None if count else nothing(interval)
    return unsampled(Gaussian(noise_multiplier=noise_multiplier / math.sqrt(count)), interval=interval)


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
    if relation == "replace one":
        step = _replacing(noise_multiplier, sampling_rate, interval)
    else:
        base = Gaussian(noise_multiplier=noise_multiplier)
        step = on_poisson_sample(base, sampling_rate=sampling_rate, interval=interval)
    return repeated(step, count)


def unsampled(base: WorstPair, *, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """``base`` itself, for adding or removing a record."""
    highest = math.ceil(base.largest_loss / interval) + 1
    return symmetric(connected(interval, -highest, _excess(base.divergence, _grid(interval, -highest, highest))))


def on_poisson_sample(base: WorstPair, *, sampling_rate: float, interval: float = DEFAULT_INTERVAL) -> LossDistribution:
    """``base`` on a Poisson sample, for adding or removing a record.

    What is used of it holds for any mechanism whose mirror image has the same losses.
    """
    if sampling_rate == 1:
        return unsampled(base, interval=interval)
    log_out = math.log1p(-sampling_rate)
    # A sample shifts the largest loss to ln(1 - rate + rate e^loss), and no loss of removing is below ln(1 - rate).
    highest = math.ceil(float(np.logaddexp(log_out, math.log(sampling_rate) + base.largest_loss)) / interval) + 1
    lowest = math.floor(log_out / interval) - 1
    epsilons = _grid(interval, lowest, highest)
    excess = _removing(base, epsilons, sampling_rate)
    # For adding, it is the mirror image: e^epsilon times that at -epsilon.
    mirrored = (np.exp(-epsilons) * excess * (1 + 4 * UNIT))[::-1]
    return LossDistribution(
        removing=((connected(interval, lowest, excess), 1),), adding=((connected(interval, -highest, mirrored), 1),)
    )


def _grid(interval: float, lowest: int, highest: int) -> FloatArray:
    return interval * np.arange(lowest, highest + 1, dtype=np.float64)


def _excess(divergence: Callable[[FloatArray], FloatArray], epsilons: FloatArray) -> FloatArray:
    """The divergence over that of no loss, max(0, 1 - e^epsilon): at -epsilon, e^-epsilon times that at epsilon."""
    excess: FloatArray = np.exp(np.minimum(epsilons, 0.0)) * divergence(np.abs(epsilons)) * (1 + 4 * UNIT)
    return excess


def _removing(base: WorstPair, epsilons: FloatArray, rate: float) -> FloatArray:
    """The excess of the divergence: that of ``base`` at the threshold on the sampled records, times the rate."""
    # ln of (e^epsilon - 1 + rate) / rate, with its digits kept near epsilon 0, and far from it without an overflow.
    ratio = np.expm1(np.minimum(epsilons, 1.0)) / rate
    inside = ratio > -1
    far = epsilons - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilons, 1.0)))
    at = np.where(epsilons < 1, np.log1p(np.where(inside, ratio, 0.0)), far)
    # Up to ln(1 - rate) the mixture exceeds e^epsilon times the other everywhere: there is no excess.
    return np.where(inside, rate * _excess(base.divergence, at) * (1 + 4 * UNIT), 0.0)


def _replacing(noise_multiplier: float, rate: float, interval: float) -> LossDistribution:
    """One Gaussian sum over a Poisson sample in which a record stands for another, which moves the sum the other way.

    The pair is (1 - r) N(0, s^2) + r N(1, s^2) against its mirror image, as dp_accounting takes it. The loss at output
    x is eps where x = s^2 (eps / 2 + asinh(a sinh(eps / 2))), with a = (1 - r) / r e^(1 / (2 s^2)).
    """
    variance = noise_multiplier**2
    log_in, log_out = math.log(rate), math.log1p(-rate) if rate < 1 else -math.inf

    def divergence(epsilons: FloatArray) -> FloatArray:
        half = np.abs(epsilons) / 2
        with np.errstate(divide="ignore"):
            # asinh(e^y) in log space, as each factor may overflow.
            log_sinh = log_out - log_in + 1 / (2 * variance) + half + np.log(-np.expm1(-2 * half) / 2)
        output = variance * (half + np.logaddexp(log_sinh, np.logaddexp(0.0, 2 * log_sinh) / 2)) * np.sign(epsilons)
        log_seen, log_mirrored = (
            np.logaddexp(
                log_out + scipy.special.log_ndtr(-output / noise_multiplier),
                log_in + scipy.special.log_ndtr((move - output) / noise_multiplier),
            )
            for move in (1, -1)
        )
        seen, mirrored = np.exp(log_seen), np.exp(epsilons + log_mirrored)
        deviations = (np.abs(output) + 1) / noise_multiplier
        return seen - mirrored + _rounding(seen + mirrored, deviations, np.abs(epsilons))

    # The loss at the largest output that there is mass to speak of.
    most = 1 + _MOST_DEVIATIONS * noise_multiplier
    against, for_it = (np.logaddexp(log_out, log_in + (2 * move * most - 1) / (2 * variance)) for move in (-1, 1))
    highest = math.ceil((for_it - against) / interval) + 1
    epsilons = _grid(interval, -highest, highest)
    return symmetric(connected(interval, -highest, _excess(divergence, epsilons)))
