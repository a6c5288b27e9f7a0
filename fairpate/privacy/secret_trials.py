"""The best of a secret random number of private trials, and what its publication costs (Papernot and Steinke 2022).

"Hyperparameter Tuning with Renyi Differential Privacy" (arXiv 2110.03620, ICLR 2022), Theorem 2. K is drawn from a
truncated negative binomial law with parameters eta > -1 and 0 < gamma < 1,

    P[K = k]  is in proportion to  (1 - gamma)^k (eta (eta + 1) ... (eta + k - 1)) / k!,      k >= 1

where eta = 0 is the logarithmic law (1 - gamma)^k / k, and eta = 1 the geometric one. K independent trials of one
mechanism, each private together with its score, are run, and the best alone is published. If a trial has the Renyi
curve R, publication has, for every order b >= 1,

    R'(a) = R(a) + (1 + eta) ((1 - 1/b) R(b) + ln(1/gamma) / b) + ln E[K] / (a - 1)

A trial draws its settings at random, with replacement, from a list that was fixed beforehand. Its divergence at any
order is at most the largest of the list. The price is that of a secret K and secret losers: nothing may reveal them.

Shapes: A orders, B orders b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import scipy

from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, Event, FloatArray, event_rdp
from fairpate.privacy.discrete_gaussian import RandomSource
from fairpate.types import Relation, Unit

MOST_TRIALS = 1e4
"""The largest expected number of trials."""
_LEAST_GAMMA = 1e-12


@dataclass(frozen=True, kw_only=True)
class SecretTrials:
    """Publication of the best of K trials, where K has the mean ``expected_trials`` and a law of the shape ``eta``.

    ``trials`` are the events of one trial, one tuple for each of the settings that it may draw. ValueError for
    parameters out of range, without trials, and for events under another unit or relation.
    """

    noun: ClassVar[str] = "secret number of trials"
    data_dependent: ClassVar[bool] = False
    expected_trials: float
    trials: tuple[tuple[Event, ...], ...]
    eta: float = 0.0
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    def __post_init__(self) -> None:
        if not 1 < self.expected_trials <= MOST_TRIALS or not -1 < self.eta < math.inf:
            raise ValueError(
                f"Expected 1 < expected_trials <= {MOST_TRIALS:g} and eta > -1, got {self.expected_trials} and "
                f"{self.eta}."
            )
        guarantees = {(event.unit, event.relation) for events in self.trials for event in events}
        if not all(self.trials) or guarantees != {(self.unit, self.relation)}:
            expected = f"trials with events for {self.unit}, {self.relation}"
            raise ValueError(f"Expected {expected}, got {sorted(guarantees)}.")

    @cached_property
    def gamma(self) -> float:
        """The parameter of the law with which ``expected_trials`` are expected."""

        def excess(log_gamma: float) -> float:
            return math.log(mean_trials(math.exp(log_gamma), self.eta) / self.expected_trials)

        low = math.log(_LEAST_GAMMA)
        if excess(low) < 0:
            raise ValueError(f"Expected fewer expected_trials at eta {self.eta}, got {self.expected_trials}.")
        return math.exp(scipy.optimize.brentq(excess, low, math.log1p(-1e-9), xtol=1e-12))

    def draw(self, source: RandomSource) -> int:
        """Draw K by inversion; 63 random bits and sums of floats move its law by less than 1e-12 in total."""
        left = (source.randbelow(2**63) + 0.5) / 2**63
        gamma, eta = self.gamma, self.eta
        chance, number = -(1 - gamma) / math.log(gamma), 1
        if eta:
            chance = eta * (1 - gamma) / math.expm1(-eta * math.log(gamma))
        # The second condition ends where rounding has left a remainder that no chance reaches.
        while left > chance and chance > 1e-300:
            left -= chance
            chance *= (1 - gamma) * (number + eta) / (number + 1)
            number += 1
        return number


def mean_trials(gamma: float, eta: float) -> float:
    """Return the expected number of trials, E[K]."""
    if not eta:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 / gamma - 1) / -math.expm1(eta * math.log(gamma))


@event_rdp.register
def _(event: SecretTrials, orders_A: FloatArray) -> FloatArray:
    def of_trial(orders: FloatArray) -> FloatArray:
        return np.asarray(np.maximum.reduce([accountant.rdp(events, orders) for events in event.trials]))

    orders_B = np.array(DEFAULT_ORDERS)
    # Any order b will do, the same for all a: the least bound.
    extra = np.min((1 - 1 / orders_B) * of_trial(orders_B) - math.log(event.gamma) / orders_B)
    curve_A: FloatArray = (
        of_trial(orders_A) + (1 + event.eta) * extra + math.log(event.expected_trials) / (orders_A - 1)
    )
    return curve_A


def flat(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return ``events`` with secret trials replaced by the events inside them."""
    return tuple(
        inner
        for event in events
        for inner in ((each for of in event.trials for each in of) if isinstance(event, SecretTrials) else (event,))
    )
