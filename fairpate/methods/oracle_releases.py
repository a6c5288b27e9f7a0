"""The two sides of DP-oracle-learner: a learner of linear rules or of rules by group, and what an auditor counts.

The class of rules by group (Jagielski et al. 2019, arXiv 1812.02696, Section 4.1) is that of all rules of a member's
group and of what one public classifier says: for every group one of 0, 1, what it says, and the contrary, so 4^G rules.
The indicator of every group and its complement are among them, as Theorem 4.5 asks.

    learner:   P[rule] ~ exp(-epsilon cost(rule) / (2 S)),   cost = sum over records where it predicts 1 of c[a, y]
    auditor:   how many of each cell the rule predicts 1 for, + Laplace(2 / epsilon)

c[a, y] = C1 - C0 is 1 - 2 y plus the price of group a in the event of label y: public. One changed z takes a record's
part from one group to another, so S is the largest |c[a, y]| and |c[a, y] - c[a', y]|. A cost is a sum over groups,
which are therefore chosen one by one: the product of their odds is that of the whole rule.

Shapes: N records, D features, G groups, E events, J = 2 things that the classifier says, K = 4 rules of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from fairpate.methods.parity import NO_EVENT, Cells, FloatArray
from fairpate.methods.parity_game import GameRules, prices, violations_of
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.laplace import PureReleases, add_laplace, choose_cheap

RULES_KJ: FloatArray = np.array([(0, 0), (0, 1), (1, 0), (1, 1)], dtype=np.float64)
_MOVED = 2.0  # one changed z leaves a cell and enters another


@dataclass(frozen=True)
class Sides:
    """Learner and auditor with the noise that they add, and what that costs."""

    answer: Callable[[FloatArray], FloatArray]
    violations: Callable[[FloatArray], FloatArray]
    shares_GE: FloatArray
    events: tuple[PureReleases, ...]
    round_epsilon: float


class Released:
    """Tables of sums over cells, noisy for all groups but the reference; that one follows from public totals."""

    def __init__(self, cells: Cells, reference_group: int, source: NoiseSource) -> None:
        self._cells, self._source, self._reference = cells, source, reference_group
        # Without the reference's row: of two groups one is left, of more a record may leave one row for another.
        self._moves = 1.0 if cells.num_groups == 2 else 2.0
        self._inside_NE = cells.events_N[:, None] == np.arange(cells.num_events)

    def table(self, values: FloatArray, *, norm: float, epsilon: float) -> FloatArray:
        """Sums of ``values`` (N, ...), public and of L1 norm at most ``norm`` a record, shape (G, E, ...)."""
        exact = self._cells.sums(values)
        totals = np.tensordot(self._inside_NE.astype(np.float64), values, axes=(0, 0))
        # One release for all rows: what one changed z moves in them together is what its noise must hide.
        noisy = add_laplace(
            np.delete(exact, self._reference, axis=0),
            l1_sensitivity=self._moves * norm,
            epsilon=epsilon,
            source=self._source,
        )
        return np.insert(noisy, self._reference, totals - noisy.sum(axis=0), axis=0)


class Regression:
    """The learner's answer but for what is private: beta1 - beta0 = public part + lift (sums over F' prices).

    F are the features or, with ``num_directions``, their leading principal components of unit length: a price then
    tilts the rules in these directions alone, and far less noise is needed.
    """

    def __init__(self, features: FloatArray, cells: Cells, *, ridge: float, num_directions: int | None) -> None:
        # What needs no group is solved once: a round multiplies by it.
        self._public = plain_rule(features, cells, ridge=ridge)
        if num_directions is None:
            self.components, self._lift = features, cho_solve(_factor(features, ridge), np.eye(features.shape[1]))
        else:
            left, lengths, right = (part[..., :num_directions] for part in _decomposed(features))
            # (X'X + ridge)^-1 X' in the basis of singular vectors.
            self.components, self._lift = left, right * lengths / (lengths**2 + ridge)
        # L1, as Laplace noise asks: what one record moves in all sums together.
        norms_N = np.abs(self.components).sum(axis=1)
        inside = [norms_N[cells.events_N == event] for event in range(cells.num_events)]
        self.norms_E: FloatArray = np.array([norms.max(initial=0.0) for norms in inside])

    def coefficients(self, priced: FloatArray) -> FloatArray:
        """beta1 - beta0, given the sums F' prices."""
        difference: FloatArray = self._public + self._lift @ priced
        return difference


def plain_rule(features: FloatArray, cells: Cells, *, ridge: float) -> FloatArray:
    """beta1 - beta0 without prices: of features and labels alone."""
    costs_N = 1.0 - 2.0 * cells.labels_N  # 1[Y != 1] - 1[Y != 0]
    rule_D: FloatArray = cho_solve(_factor(features, ridge), features.T @ costs_N)
    return rule_D


def _factor(features: FloatArray, ridge: float) -> tuple[FloatArray, bool]:
    """Of X'X + ridge."""
    factor: tuple[FloatArray, bool] = cho_factor(features.T @ features + ridge * np.eye(features.shape[1]))
    return factor


def _decomposed(features: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Singular vectors as columns and singular values, the longest first; directions without length are left out."""
    left, lengths, right = np.linalg.svd(features, full_matrices=False)
    # Below that a length is rounding, and its direction noise that would be magnified to unit length.
    rank = int((lengths > lengths[0] * 1e-10).sum())
    return left[:, :rank], lengths[:rank], right[:rank].T


class GroupRules:
    """The class on private records, of which ``said_N`` is what the public classifier says: 0 or 1."""

    def __init__(self, cells: Cells, said_N: npt.NDArray[Any]) -> None:
        self._cells, self._said_N = cells, said_N.astype(np.int64)
        # The event follows from the label: any record that has it tells which.
        self._event_of_label = [int(cells.events_N[cells.labels_N == y].max(initial=NO_EVENT)) for y in (0, 1)]
        self._counts_GYJ = np.zeros((cells.num_groups, 2, 2), dtype=np.int64)
        np.add.at(self._counts_GYJ, (cells.groups_N, cells.labels_N, self._said_N), 1)

    def choose(self, prices_GE: FloatArray, *, epsilon: float, source: NoiseSource) -> FloatArray:
        """What a rule predicts for every group and said label, (G, J), by the exponential mechanism."""
        differences_GY = self.differences(prices_GE)
        sensitivity = sensitivity_of(differences_GY)
        chosen = []
        for counts_YJ, difference_Y in zip(self._counts_GYJ.tolist(), differences_GY, strict=True):
            costs = [_cost(rule_J, counts_YJ, difference_Y) for rule_J in RULES_KJ.astype(int).tolist()]
            chosen.append(choose_cheap(costs, sensitivity=sensitivity, epsilon=epsilon, source=source))
        return RULES_KJ[chosen]

    def differences(self, prices_GE: FloatArray) -> list[list[Fraction]]:
        """What predicting 1 costs beyond predicting 0, (G, Y): exact, so that nothing is rounded before it is drawn."""
        return [
            [
                Fraction(1 - 2 * label) + (Fraction(0) if event == NO_EVENT else Fraction(float(price_E[event])))
                for label, event in enumerate(self._event_of_label)
            ]
            for price_E in prices_GE
        ]

    def distance(self, positive_GJ: FloatArray, multipliers_SOE: FloatArray, rules: GameRules) -> float:
        """nu: how much either side gains by leaving this mixture and these multipliers. Exact, and so private.

        ``positive_GJ``: how often the mixture predicts 1. The learner leaves for the best of the class, the auditor for
        ``dual_bound`` on the largest violation.
        """
        counts_GYJ, count = self._counts_GYJ, len(self._said_N)
        shares_GE = self._cells.counts() / count
        rates_GE = self._cells.rates(positive_GJ[self._cells.groups_N, self._said_N])
        violations_SOE = violations_of(rates_GE, max_gap=rules.max_gap, reference_group=rules.reference_group)
        priced = prices(multipliers_SOE, shares_GE, reference_group=rules.reference_group)
        difference_GY = np.array(self.differences(priced), dtype=np.float64)
        cost_GJ = np.einsum("gyj,gy->gj", counts_GYJ, difference_GY) / count
        learner = float((cost_GJ * positive_GJ).sum() - np.minimum(cost_GJ, 0).sum())
        auditor = rules.dual_bound * max(0.0, float(violations_SOE.max())) - float(
            (multipliers_SOE * violations_SOE).sum()
        )
        return max(learner, auditor)

    def positives(self, rule_GJ: FloatArray, *, epsilon: float, source: NoiseSource) -> FloatArray:
        """How many of each group and event the rule predicts 1 for, with noise: (G, E)."""
        exact_GE = self._cells.sums(rule_GJ[self._cells.groups_N, self._said_N])
        return add_laplace(exact_GE, l1_sensitivity=_MOVED, epsilon=epsilon, source=source)


def sensitivity_of(differences_GY: list[list[Fraction]]) -> Fraction:
    """The most that one changed group changes the cost of any rule."""
    by_label = zip(*differences_GY, strict=True)
    return max((max(*map(abs, of_G), max(of_G) - min(of_G)) for of_G in by_label), default=Fraction(0))


def _cost(rule_J: list[int], counts_YJ: list[list[int]], difference_Y: list[Fraction]) -> Fraction:
    total = Fraction(0)
    for counts_J, difference in zip(counts_YJ, difference_Y, strict=True):
        total += difference * sum(count * says for count, says in zip(counts_J, rule_J, strict=True))
    return total
