"""Parity as a game: a learner answers prices on groups, an auditor raises them on violations (exponentiated gradient).

Agarwal et al. 2018 (arXiv 1803.02453), as played in Jagielski et al. 2019 (arXiv 1812.02696). The auditor holds
multipliers of two signs for each group but the reference and each event of :mod:`fairpate.methods.parity`,

    lambda = B exp(theta) / (1 + sum exp(theta)),    theta <- theta + eta (+-(rate_a - rate_ref) - max_gap)

The learner sees prices: predicting 1 for a record of group a in event e costs, beside its error, W[a, e] / q[a, e] with
W the difference of the two signs (minus their sum for the reference) and q[a, e] that cell's share of all records. The
mean cost of a rule h then is its error plus sum lambda (+-)(rate_a - rate_ref), when q is exact. The outcome is the
uniform mixture of the learner's answers. Who learns and who measures is given; nothing here knows of privacy.

Shapes: G groups, E events, S = 2 signs, O = G - 1 groups other than the reference, N records, R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fairpate.later import sklearn
from fairpate.methods.parity import NO_EVENT, Cells, FloatArray

Rule = TypeVar("Rule")


@dataclass(frozen=True, kw_only=True)
class GameRules:
    """``dual_bound``: B, the most that all multipliers add up to. ``max_gap``: the parity asked for, in [0, 1].
    ``learning_rate``: eta."""

    num_rounds: int
    dual_bound: float
    learning_rate: float
    max_gap: float
    reference_group: int = 0

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ValueError(f"Expected num_rounds >= 1, got {self.num_rounds}.")
        if not 0 <= self.dual_bound < math.inf or not 0 < self.learning_rate < math.inf:
            raise ValueError(
                "Expected 0 <= dual_bound < inf and 0 < learning_rate < inf, got "
                f"{self.dual_bound} and {self.learning_rate}."
            )
        if not 0 <= self.max_gap <= 1:
            raise ValueError(f"Expected 0 <= max_gap <= 1, got {self.max_gap}.")


@dataclass(frozen=True, kw_only=True)
class Played(Generic[Rule]):
    """The learner's answer in every round, and the mean multipliers (S, O, E)."""

    answers: tuple[Rule, ...]
    mean_multipliers: FloatArray


def play(
    rules: GameRules,
    shares_GE: FloatArray,
    *,
    answer: Callable[[FloatArray], Rule],
    violations: Callable[[Rule], FloatArray],
    on_round: Callable[[int, int], None] = lambda *_: None,
) -> Played[Rule]:
    """``answer`` takes prices (G, E), ``violations`` gives what is added to theta (S, O, E) but for eta."""
    num_groups, num_events = shares_GE.shape
    theta = np.zeros((2, num_groups - 1, num_events))
    answers, total = [], np.zeros_like(theta)
    for done in range(rules.num_rounds):
        multipliers = multipliers_of(theta, rules.dual_bound)
        answers.append(answer(prices(multipliers, shares_GE, reference_group=rules.reference_group)))
        theta = theta + rules.learning_rate * violations(answers[-1])
        total += multipliers
        on_round(done + 1, rules.num_rounds)
    return Played(answers=tuple(answers), mean_multipliers=total / rules.num_rounds)


@dataclass(frozen=True, kw_only=True)
class GameGuarantee:
    """On the records that were learned from: ``error_excess`` over the best rule of the class that keeps ``max_gap``,
    ``gap_excess`` of every rate's gap to the reference over it."""

    error_excess: float
    gap_excess: float


def guarantee(nu: float, *, dual_bound: float, num_groups: int, has_indicators: bool = False) -> GameGuarantee:
    """Theorem 4.4 of Jagielski et al. 2019: what play within ``nu`` of an equilibrium bounds.

    ``has_indicators``: its Theorem 4.5, for equal false positives and a class with every group's indicator, where
    ``dual_bound`` exceeds G - 1; inf where it does not. Before play :func:`.game_regret.nu_before_play` bounds nu; of a
    play that is over it can be computed (:meth:`.oracle_releases.GroupRules.distance`).
    """
    if not (nu >= 0 and dual_bound > 0 and num_groups > 1):
        raise ValueError(
            f"Expected nu >= 0, dual_bound > 0 and num_groups > 1, got {nu}, {dual_bound} and {num_groups}."
        )
    if not has_indicators:
        return GameGuarantee(error_excess=2 * nu, gap_excess=(1 + 2 * nu) / dual_bound)
    room = dual_bound - (num_groups - 1)
    return GameGuarantee(error_excess=2 * nu, gap_excess=2 * nu / room if room > 0 else math.inf)


def multipliers_of(theta: FloatArray, dual_bound: float) -> FloatArray:
    """B exp(theta) / (1 + sum exp(theta)): all positive, their sum below B."""
    # The 1 of the denominator is exp(0): shifted by the largest exponent of all, none overflows.
    largest = max(float(theta.max()), 0.0)
    weights = np.exp(theta - largest)
    multipliers: FloatArray = dual_bound * weights / (math.exp(-largest) + weights.sum())
    return multipliers


def prices(multipliers_SOE: FloatArray, shares_GE: FloatArray, *, reference_group: int) -> FloatArray:
    """W / q, shape (G, E)."""
    signed_OE = multipliers_SOE[0] - multipliers_SOE[1]
    weights_GE = np.insert(signed_OE, reference_group, -signed_OE.sum(axis=0), axis=0)
    priced_GE: FloatArray = weights_GE / shares_GE
    return priced_GE


def violations_of(rates_GE: FloatArray, *, max_gap: float, reference_group: int) -> FloatArray:
    """+-(rate_a - rate_ref) - ``max_gap``, shape (S, O, E)."""
    gap_OE = np.delete(rates_GE - rates_GE[reference_group], reference_group, axis=0)
    violations: FloatArray = np.stack([gap_OE, -gap_OE]) - max_gap
    return violations


def cost_differences(cells: Cells, prices_GE: FloatArray) -> FloatArray:
    """What predicting 1 costs each record beyond predicting 0, shape (N,)."""
    inside = cells.events_N != NO_EVENT
    differences: FloatArray = (1.0 - 2.0 * cells.labels_N).astype(np.float64)
    differences[inside] += prices_GE[cells.groups_N[inside], cells.events_N[inside]]
    return differences


@dataclass(frozen=True)
class EstimatorMixture:
    """The uniform mixture of fitted binary classifiers: a prediction draws one."""

    members: tuple[Any, ...]


def fit_mixture(x: npt.ArrayLike, cells: Cells, estimator: Any, rules: GameRules) -> EstimatorMixture:
    """Play with exact rates and an ``estimator`` that takes ``sample_weight``: the reduction, without privacy.

    ValueError for an empty cell.
    """
    features, counts_GE = np.asarray(x), cells.counts()
    if not counts_GE.all():
        group, event = np.argwhere(counts_GE == 0)[0]
        raise ValueError(f"Expected records in every cell, got none in group {group}, event {event}; merge groups.")

    def answer(prices_GE: FloatArray) -> Any:
        differences = cost_differences(cells, prices_GE)
        target, weight = (differences < 0).astype(np.int64), np.abs(differences)
        # An estimator refuses a single class, of which the cheapest rule is constant.
        constant = len(np.unique(target[weight > 0])) < 2
        member = sklearn.dummy.DummyClassifier(strategy="most_frequent") if constant else sklearn.base.clone(estimator)
        # Weights of mean one, so that the estimator's own regularisation weighs as it does without any.
        return member.fit(features, target, sample_weight=weight * len(weight) / weight.sum())

    def violations(member: Any) -> FloatArray:
        rates_GE = cells.rates(member.predict(features))
        return violations_of(rates_GE, max_gap=rules.max_gap, reference_group=rules.reference_group)

    played = play(rules, counts_GE / len(features), answer=answer, violations=violations)
    return EstimatorMixture(played.answers)
