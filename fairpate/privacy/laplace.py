"""Mechanisms of pure differential privacy: exact Laplace noise, randomised response, the exponential mechanism.

One release of any of them is epsilon-DP; :mod:`fairpate.privacy.accountant` has their events and costs.

**Exactness.** :func:`add_laplace` rounds to a grid 2^24 times finer than the sensitivity and adds a discrete Laplace
variable sampled from uniform integers (Canonne, Kamath and Steinke 2020, Algorithm 2). The noise is scaled for three
grid units per coordinate more than the sensitivity: one for rounding, one for floating-point error in the values, one
because a discrete Laplace of step h costs as much as a continuous one moved by 2 ln cosh(h / 2) more.

Shapes: N records.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, LaplaceReleases, PureReleases, pure_epsilon
from fairpate.privacy.discrete_gaussian import NoiseSource, bernoulli_exp, buffered, sample_discrete_laplace
from fairpate.privacy.loss_distributions import DEFAULT_INTERVAL
from fairpate.types import FloatArray, IntArray

_GRID_BITS = 24
_SPARE_UNITS = 3
_STEPS_PER_RELEASE, _TOLERANCE = 20, 1e-3  # of the search for an epsilon per release


@lru_cache
def release_epsilon_for(
    *,
    target_epsilon: float,
    target_delta: float,
    count: int,
    others: tuple[PureReleases, ...] = (),
    kinds: tuple[type[PureReleases], ...] = (LaplaceReleases,),
    accounting: Accounting = "pld",
) -> float:
    """Return the largest epsilon per release at which all releases together cost at most ``target_epsilon``: ``count``
    releases of each event type in ``kinds``, and the releases ``others``, whose epsilons are given.

    The result is rounded down by at most 0.1 %. It is at least the epsilon at which the sum of all epsilons is the
    target, and ``inf`` for a target of ``inf``. ValueError if ``others`` use up the target.
    """
    if math.isinf(target_epsilon):
        return math.inf
    # Plain addition of pure guarantees always holds: the search starts where it already fits.
    low = (target_epsilon - pure_epsilon(others)) / (count * len(kinds))
    if not low > 0:
        raise ValueError(
            f"Expected target_epsilon > {pure_epsilon(others):g}, the cost of the other releases, got "
            f"{target_epsilon:g}; raise target_epsilon."
        )
    # The search uses a coarse grid for speed; the result is then checked on the grid by which runs are priced.
    coarse = max(DEFAULT_INTERVAL, low / _STEPS_PER_RELEASE)

    def fits(epsilon: float, interval: float | None = coarse) -> bool:
        events = (*(kind(count=count, epsilon=epsilon) for kind in kinds), *others)
        if accounting == "rdp":
            return accountant.epsilon(events, target_delta=target_delta).epsilon <= target_epsilon
        return accountant.epsilon_pld(events, target_delta=target_delta, interval=interval) <= target_epsilon

    least, high = low, 2 * low
    # Doubled until the target is exceeded, then bisected.
    while fits(high):
        low, high = high, 2 * high
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # The coarse grid may have rounded in favour of a larger epsilon.
    while low > least and not fits(low, None):
        low *= 1 - _TOLERANCE
    return max(low, least)


def add_laplace(values: npt.ArrayLike, *, l1_sensitivity: float, epsilon: float, source: NoiseSource) -> FloatArray:
    """Return ``values`` plus independent Laplace noise of scale ``l1_sensitivity`` / ``epsilon``, in the same shape.

    ``l1_sensitivity`` bounds the L1 change of all ``values`` together; 0 means that they do not depend on private
    records. With ``epsilon`` inf or sensitivity 0 no noise is added. Cost: ``LaplaceReleases(count=1, epsilon)``.
    ValueError for values or parameters that are not finite numbers in range.
    """
    exact = np.asarray(values, dtype=np.float64)
    if not np.isfinite(exact).all() or not 0 <= l1_sensitivity < math.inf or not epsilon > 0:
        given = f"{l1_sensitivity} and {epsilon}"
        raise ValueError(f"Expected finite values, 0 <= l1_sensitivity < inf and epsilon > 0, got {given}.")
    if math.isinf(epsilon) or not l1_sensitivity:
        return exact.copy()
    # A power of two: dividing and multiplying by it rounds nothing.
    grid = 2.0 ** (math.floor(math.log2(l1_sensitivity)) - _GRID_BITS)
    units = math.ceil(l1_sensitivity / grid) + _SPARE_UNITS * exact.size
    # Exact rationals: no rounded real number decides an outcome.
    scale, source = Fraction(units) / Fraction(epsilon), buffered(source)
    # Rounding moves two neighbours' values apart by at most one grid unit: one of the spare units pays for it.
    noisy = [int(value) + sample_discrete_laplace(scale, source) for value in np.rint(exact.ravel() / grid)]
    # A whole number that a float does not hold is rounded after the noise: post-processing.
    return np.array([float(value) * grid for value in noisy]).reshape(exact.shape)


def randomise_response(codes_N: npt.ArrayLike, *, num_values: int, epsilon: float, source: NoiseSource) -> IntArray:
    """Return the codes after randomised response, shape (N,), sampled exactly.

    The true code is exp(``epsilon``) times as likely as each other value: a uniform candidate is accepted if it is the
    true code, and otherwise with probability exp(-epsilon). ``epsilon`` inf keeps every code, 0 gives uniform codes.
    ValueError for codes outside 0 .. num_values - 1 and epsilon < 0.
    """
    codes = np.asarray(codes_N)
    if num_values < 2 or not epsilon >= 0:
        raise ValueError(f"Expected num_values >= 2 and epsilon >= 0, got {num_values} and {epsilon}.")
    if len(codes) and not np.isin(codes, np.arange(num_values)).all():
        raise ValueError(f"Expected codes_N to hold integers from 0 to {num_values - 1}, got {np.unique(codes)}.")
    if math.isinf(epsilon):
        return codes.astype(np.int64)
    # The float's exact value, so that no rounding decides who answers what.
    exponent, source = Fraction(epsilon), buffered(source)
    responses_N = np.empty(len(codes), dtype=np.int64)
    for place, code in enumerate(codes.tolist()):
        while True:
            candidate = source.randbelow(num_values)
            if candidate == code or bernoulli_exp(exponent.numerator, exponent.denominator, source):
                break
        responses_N[place] = candidate
    return responses_N


def choose_cheap(costs: Sequence[Fraction], *, sensitivity: Fraction, epsilon: float, source: NoiseSource) -> int:
    """Return an index into ``costs``, drawn with probability proportional to exp(-``epsilon`` cost / (2
    ``sensitivity``)), exactly.

    This is the exponential mechanism (McSherry and Talwar 2007), by rejection sampling: a uniform index is accepted
    with its weight relative to the least cost. ``sensitivity``: the most that one unit changes any cost. ``epsilon``
    inf, or sensitivity 0, gives the first index of the least cost. Privacy cost: ``PureReleases(count=1, epsilon)``.
    ValueError for parameters out of range.
    """
    if not costs or not sensitivity >= 0 or not epsilon >= 0:
        given = len(costs), sensitivity, epsilon
        raise ValueError(f"Expected at least one cost, sensitivity >= 0 and epsilon >= 0, got {given}.")
    least = min(costs)
    if math.isinf(epsilon) or not sensitivity:
        return list(costs).index(least)
    # The 2 pays for the normaliser: one unit changes it too.
    slope = Fraction(epsilon) / (2 * sensitivity)
    while True:
        place = source.randbelow(len(costs))
        # Relative to the cheapest: odds are then at most 1, and the normaliser is never computed.
        exponent = slope * (costs[place] - least)
        if bernoulli_exp(exponent.numerator, exponent.denominator, source):
            return place


def keep_probability(epsilon: float, num_values: int) -> float:
    """Return the probability that :func:`randomise_response` reports the true value."""
    return 1 / (1 + (num_values - 1) * math.exp(-epsilon))
