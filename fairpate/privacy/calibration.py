"""How much noise a target needs: one search, in which the accountant prices what is planned.

What is planned is a function from a noise to events, such that more noise never costs more. The search knows nothing
else about them, so that a method with several noises scales them by one factor, and one that has spent something
already lists it among the events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import scipy

from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting
from fairpate.privacy.events import Event, PoissonGaussians
from fairpate.types import Relation

EventsOfNoise = Callable[[float], Sequence[Event]]
_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 2.0**14
# A stride aims a factor short of the target: pricing with far too little noise is what takes long.
_LARGEST_STRIDE, _CAREFUL = 64.0, 4.0


def least_noise(
    events_of: EventsOfNoise,
    *,
    target_epsilon: float,
    target_delta: float,
    accounting: Accounting = "rdp",
    tolerance: float = 1e-3,
    largest_noise: float = _LARGEST_NOISE,
) -> float:
    """The least noise, up to ``tolerance`` of it and from above, at which ``events_of`` it stay within the target.

    None above ``largest_noise`` is tried. ValueError for an infinite target, and for one that no noise reaches, such as
    one that other events among them already exceed; errors as
    :func:`fairpate.privacy.accountant.epsilon_of`.
    """

    if target_epsilon == math.inf:
        raise ValueError("Expected a finite target_epsilon, got inf: there is no least noise; give a number.")

    def spent(noise: float) -> float:
        return accountant.epsilon_of(events_of(noise), target_delta=target_delta, accounting=accounting)

    low, high = _bracket(spent, target_epsilon, largest_noise)
    if low == high:
        return high
    ends = {math.log(noise): noise for noise in (low, high)}  # spent already, and not quite exp(log(noise))

    def excess(log_noise: float) -> float:
        # Epsilon falls about as the inverse of the noise: nearly a line in logarithms. Clipped, as it may be 0 or inf.
        noise = ends.get(log_noise) or math.exp(log_noise)
        return math.log(min(max(spent(noise) / target_epsilon, 1e-9), 1e9))

    noise = math.exp(scipy.optimize.brentq(excess, math.log(low), math.log(high), xtol=tolerance / 4))
    # The root is found up to a tolerance, on either side; noise is only ever rounded up.
    while spent(noise) > target_epsilon:
        noise *= 1 + tolerance / 2
    return noise


def _bracket(spent: Callable[[float], float], target_epsilon: float, largest_noise: float) -> tuple[float, float]:
    """Noises below and above the one looked for; equal where even the smallest is enough.

    From above, where loss distributions are quick to compose: with much noise, epsilon falls about as its inverse.
    """
    high = largest_noise
    cost = spent(high)
    # `not >` refuses a NaN as well.
    if not target_epsilon > 0 or cost > target_epsilon:
        raise ValueError(
            f"Expected a target_epsilon that some noise reaches, got {target_epsilon}: the largest noise spends "
            f"{cost:.3g}; raise it, or spend less on what does not scale with the noise."
        )
    while high > _SMALLEST_NOISE:
        left = target_epsilon / cost if cost else math.inf
        low = high / min(max(left / _CAREFUL, 2.0), _LARGEST_STRIDE)
        cost = spent(low)
        if cost > target_epsilon:
            return low, high
        high = low
    return high, high


@lru_cache
def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sampling_rate: float,
    num_steps: int,
    relation: Relation = "add or remove one",
    accounting: Accounting = "rdp",
    tolerance: float = 1e-3,
) -> float:
    """:func:`least_noise` of ``num_steps`` Gaussian sums over Poisson samples.

    ValueError for a target that no noise reaches, and for Renyi curves under replacing a record.
    """

    def events(noise_multiplier: float) -> tuple[PoissonGaussians]:
        return (
            PoissonGaussians(
                count=num_steps, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, relation=relation
            ),
        )

    return least_noise(
        events,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        accounting=accounting,
        tolerance=tolerance,
    )
