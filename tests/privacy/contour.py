"""Delta of composed releases without grids of losses and without Fourier transforms: by a contour integral.

For losses l with ln-moments K(t) = ln E[exp(t l)], summed over the releases, the hockey-stick divergence is

    delta(eps) = 1 / (2 pi i) * integral of exp(K(t) - t eps) / (t (t + 1)) dt   along Re t = c, for any c > 0

(Mellin inversion of (1 - exp(eps - l))_+). At the saddle point c nothing cancels, so that the trapezoidal rule keeps
its digits however small delta is. Moments are sums over outputs: exact for noise on the integers, and the trapezoidal
rule for continuous noise, which converges faster than any power.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outputs:
    """ln of the probabilities of all outputs that matter, with one unit and without it."""

    log_with: FloatArray
    log_without: FloatArray

    def sampled(self, rate: float) -> Outputs:
        """The unit takes part with probability ``rate``."""
        if rate == 1:
            return self
        mixed = np.logaddexp(math.log(rate) + self.log_with, math.log1p(-rate) + self.log_without)
        return Outputs(mixed, self.log_without)

    def with_chance(self, share: float) -> Outputs:
        """The release happens with probability ``share``, and everybody sees whether."""
        nothing = math.log1p(-share)
        return Outputs(
            np.append(math.log(share) + self.log_with, nothing), np.append(math.log(share) + self.log_without, nothing)
        )

    def mirrored(self) -> Outputs:
        return Outputs(self.log_without, self.log_with)


def gaussian(noise: float, *, moved_back: bool = False, points: int = 8001) -> Outputs:
    """A Gaussian sum that the unit moves by 1, or from -1 to 1; densities are sums of the trapezoidal rule."""
    x = np.linspace(-1 - 40 * noise, 2 + 40 * noise, points)
    step = math.log(x[1] - x[0]) - math.log(noise) - math.log(2 * math.pi) / 2
    return Outputs(step - ((x - 1) / noise) ** 2 / 2, step - ((x + moved_back) / noise) ** 2 / 2)


def replaced(noise: float, rate: float) -> Outputs:
    """One record of a Poisson sample stands for another, which moves the sum the other way."""
    x = np.linspace(-2 - 40 * noise, 2 + 40 * noise, 8001)
    step = math.log(x[1] - x[0]) - math.log(noise) - math.log(2 * math.pi) / 2
    up, none, down = (step - ((x - move) / noise) ** 2 / 2 for move in (1, 0, -1))
    log_out = math.log1p(-rate) if rate < 1 else -math.inf
    return Outputs(*(np.logaddexp(math.log(rate) + each, log_out + none) for each in (up, down)))


def laplace(scale: float) -> Outputs:
    """Losses 1 / scale (mass 1 / 2), -1 / scale, and between them by Gauss and Legendre's rule."""
    most = 1 / scale
    nodes, weights = np.polynomial.legendre.leggauss(400)
    inner = nodes * most
    log_with = np.log(weights * most / 4) + (inner - most) / 2
    ends = np.array([math.log(0.5), -most - math.log(2)])
    return Outputs(np.append(log_with, ends), np.append(log_with - inner, ends - np.array([most, -most])))


def response(epsilon: float) -> Outputs:
    """A bit that is true with odds e^epsilon to 1."""
    log_masses = -np.logaddexp(0.0, np.array([-epsilon, epsilon]))
    return Outputs(log_masses, log_masses[::-1])


def integers(noise: float) -> Outputs:
    """A count with discrete Gaussian noise, moved by one."""
    x = np.arange(-math.ceil(40 * noise) - 2, math.ceil(40 * noise) + 4, dtype=np.float64)
    moved, unmoved = (-((x - move) ** 2) / (2 * noise**2) for move in (1, 0))
    return Outputs(moved - scipy.special.logsumexp(moved), unmoved - scipy.special.logsumexp(unmoved))


def two_integers(noise: float) -> Outputs:
    """Two such counts, one moved up and one down, by the difference of their noises, which alone decides the loss."""
    x = np.arange(-math.ceil(26 * noise) - 2, math.ceil(26 * noise) + 3, dtype=np.float64)
    masses = np.exp(-(x**2) / (2 * noise**2))
    both = np.convolve(masses, masses)
    difference = (np.arange(len(both)) + 2 * x[0])[both > 0]
    log_with = np.log(both[both > 0]) - 2 * math.log(masses.sum())
    return Outputs(log_with, log_with - (difference + 1) / noise**2)


def together(*parts: Outputs) -> Outputs:
    """Independent releases at once."""
    total = parts[0]
    for part in parts[1:]:
        total = Outputs(
            np.add.outer(total.log_with, part.log_with).ravel(),
            np.add.outer(total.log_without, part.log_without).ravel(),
        )
    return total


Parts = Sequence[tuple[Outputs, int]]


class Composed:
    """The sum of the losses of ``parts``, each so many times, in one direction."""

    def __init__(self, parts: Parts) -> None:
        self.parts = [(part.log_with, part.log_with - part.log_without, count) for part, count in parts]

    def log_moment(self, t: float) -> tuple[float, float, float]:
        """K and its first two derivatives at a real t."""
        total = np.zeros(3)
        for log_masses, losses, count in self.parts:
            exponents = log_masses + t * losses
            largest = exponents.max()
            weights = np.exp(exponents - largest)
            whole = weights.sum()
            mean = float(weights @ losses / whole)
            total += count * np.array([largest + np.log(whole), mean, weights @ (losses - mean) ** 2 / whole])
        return float(total[0]), float(total[1]), float(total[2])

    def log_delta(self, epsilon: float) -> float:
        """ln of the hockey-stick divergence at ``epsilon``."""

        def slope(log_t: float) -> float:
            t = math.exp(log_t)
            return self.log_moment(t)[1] - epsilon - 1 / t - 1 / (t + 1)

        low, high = -14.0, 0.0
        while slope(high) < 0 and high < 14:
            high += 1.0
        if not slope(low) < 0 < slope(high):  # beyond all losses, where Chernoff's bound falls without end
            return self.log_moment(math.exp(high))[0] - math.exp(high) * epsilon
        c = math.exp(scipy.optimize.brentq(slope, low, high, xtol=1e-3))  # any c will do, near the saddle
        value, _, variance = self.log_moment(c)
        tilted = []
        for log_masses, losses, count in self.parts:
            exponents = log_masses + c * losses
            matters = exponents > exponents.max() - 70  # all others together have less than 1e-24 of the mass
            weights = np.exp(exponents[matters] - exponents.max())
            tilted.append((weights / weights.sum(), losses[matters], count))
        # Of ln of the integrand, 1 / t and 1 / (t + 1) included. A pole is no nearer than one width, so that steps of a
        # fifth of it leave an error of about exp(-2 pi 5) = 2e-14.
        width = 1 / math.sqrt(variance + c**-2 + (c + 1) ** -2)
        total, step = 0.0, width / 5
        # From term to term each output turns by the same angle: a product, far cheaper than its sine and cosine.
        turned = [(weights.astype(complex), np.exp(1j * step * losses), count) for weights, losses, count in tilted]
        for number in itertools.count():
            t = complex(c, number * step)
            log_term = -1j * t.imag * epsilon
            for outputs, angles, count in turned:
                log_term += count * np.log(outputs.sum())
                outputs *= angles
            term = np.exp(log_term) / (t * (t + 1))
            total += float(term.real) * (0.5 if not number else 1.0)
            if abs(term) * 200 < 1e-7 * abs(total) / (1 + number / 100) or number > 20_000:
                break
        return value - c * epsilon + math.log(total * step / math.pi)


def log_delta(parts: Parts, epsilon: float) -> float:
    """ln of the larger hockey-stick divergence of both directions."""
    return max(Composed(each).log_delta(epsilon) for each in (parts, [(p.mirrored(), n) for p, n in parts]))
