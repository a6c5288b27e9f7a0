"""DP-oracle-learner and DP-postprocessing (Jagielski et al. 2019, "Differentially Private Fair Learning", 1812.02696).

**DP-oracle-learner**, Algorithm 3: parity as a game between a learner and an auditor, the exponentiated gradient of
Agarwal et al. 2018 (arXiv 1803.02453) under privacy. Only the sensitive attribute is protected: features X and labels Y
are public. The auditor has multipliers of two signs for each event of :mod:`fairpate.methods.parity` and each group
except the reference group,

    lambda = B exp(theta) / (1 + sum exp(theta)),    theta <- theta + eta (+-(rate_a - rate_ref) - max_gap)

The learner gets prices: predicting 1 for a record of group a in event e costs, in addition to its error, W[a, e] / q[a,
e]. W is the difference of the two multipliers (for the reference group, minus the sum of these differences) and q[a, e]
is that cell's share of all records. With exact q, the mean cost of a rule h is its error plus sum lambda (+-)(rate_a -
rate_ref). The outcome is the uniform mixture of the learner's answers. :func:`play` is the game, for two kinds of
rules:

**Linear rules** (:func:`linear_sides`), which do not need the attribute at prediction:

    learner:   beta1 = (X'X + ridge)^-1 (X' C1 + Laplace),   beta0 = (X'X + ridge)^-1 X' C0,   h = 1[x beta1 < x beta0]
    auditor:   positives of h per group and event + Laplace, over the released sizes of these cells

C0 and C1 are the records' costs of predicting 0 and 1. q is released once, before the first round, so that the prices W
/ q of every round are public. A change of one attribute z changes one entry of C1, so X' C1 changes in L1 by at most
the maximum over events of (largest |x_i|_1 in the event) (largest price - smallest price), computed from public values.
Totals over groups are public, so the reference group's counts follow from those of the others; one changed z changes
these by 2 in L1, or by 1 with two groups. Two settings reduce the noise. With ``release`` once: X' C1 is a sum over
cells of price times the cell's feature sum, so these sums, released once, suffice for every round. With
``num_directions``: prices change beta1 - beta0 only within the leading principal directions of X, which are public.

**Rules by group** (:func:`group_sides`; Section 4.1, Theorem 4.5): a rule predicts, in every group, always 0, always 1,
the label of one public classifier, or the opposite label, so there are 4^G rules. The indicator of every group and its
complement are among them, as the theorem requires; it also requires a ``dual_bound`` above G - 1, and covers only equal
false positives. The mixture is a table that needs the group at prediction.

    learner:   P[rule] ~ exp(-epsilon cost(rule) / (2 S)),   cost = sum over records where it predicts 1 of c[a, y]
    auditor:   how many of each cell the rule predicts 1 for, + Laplace(2 / epsilon)

c[a, y] = C1 - C0 is 1 - 2 y plus the price of group a in the event of label y, and so public. One changed z moves a
record's cost from one group to another, so S is the largest |c[a, y]| and |c[a, y] - c[a', y]|. The cost of a rule is a
sum over groups, so each group's part is drawn separately: the product of their odds is that of the whole rule.

The accountant composes the sizes of cells and ``num_rounds`` answers of each side. benchmarks/papers/posthoc.py has the
paper's bounds on error and gaps, also those of Algorithm 1.

Deviations from the paper:
- The rounds are composed by the accountant, and prices use released sizes. The paper's rule for the noise of a round
  and its private cell shares guarantee nothing: benchmarks/papers/reproductions/oracle_as_in_paper.py.
- The auditor releases counts over public sizes rather than rates, whose denominators are private too.
- Demographic parity and equal opportunity in addition to equalized odds; several groups against a reference.
- T, eta and B are settings; the paper's formulas for eta and T are reconstructed from a damaged text.
  ``num_rounds=None`` uses the T of its theorem; it is an error if that is below one round.
- The finite class of rules and the two settings that reduce the noise are ours.
- Regression is a heuristic for the learner's problem: the paper's bounds for an exact solution do not hold.

**DP-postprocessing**, Algorithm 1. A classifier Yhat was trained without the sensitive attribute. The joint counts of
its predictions, labels and groups are released under Laplace noise, and a linear programme on them mixes its
predictions per group:

    n~[j, a, y] = n[j, a, y] + Lap(2 / epsilon)          one changed z moves two counts by 1
    p[k | j, a]: minimise the error of the mixture on n~, subject for every event to
    |rate_a(k) - rate_ref(k)| <= max_gap + slack_a,   slack_a = 4 ln(4 G / beta) / (min(n~_a, n~_ref) epsilon)

The guarantee is pure: epsilon for one person's sensitive attribute. Features and labels are not protected, so Yhat,
trained on them by SGD, may be published. With ``base`` dp_sgd whole records are protected: replacing one also moves two
counts by 1, adding one moves one. Either way, prediction needs the group. A constant rule meets every constraint, so
the programme always has a solution. The slack exceeds the effect of the noise with probability 1 - beta, and often
exceeds ``max_gap``; the result reports it.

Deviations from the paper:
- Noise is exact discrete Laplace, here as in Algorithm 3. Noisy counts below 0 are set to 0.
- C classes: p mixes C predictions into C labels, and every label's rate is constrained. The slack grows by the factor
  C - 1, as a rate that is a mean of C numbers moves by that much more, and its logarithm counts C^2 G cells.
- Demographic parity (its counts merge C cells, so its slack is C times as large), equal opportunity and equal false
  positives alone (which merge C - 1), in addition to equalized odds.
- A cell whose released share is below ``min_share`` is an error.
- ``slack=False`` leaves the slack out: fairer, still solvable, without the paper's bound on the error.
- A private Yhat, for a guarantee on whole records: only released counts are read, never their number N.

Shapes: N records, D features with a constant one, G groups, E events, S = 2 signs, O = G - 1 groups other than the
reference, R rounds, J = 2 labels of the public classifier, K = 4 rules of a group; in the programme C classes, Y true
labels (= C), K constraints.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import scipy
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated

from fairpate.config import (
    Count,
    Disables,
    FitConfig,
    NetworkConfig,
    NotNegative,
    Positive,
    PrivacyTarget,
    StudentConfig,
)
from fairpate.fairness.rates import joint_table
from fairpate.lazy import sklearn
from fairpate.methods import dp_sgd
from fairpate.methods.base import Audited, PrivateMethod, Trained, Training, arguments
from fairpate.methods.parity import NO_EVENT, ParityCells, ParityConfig, require_shares
from fairpate.privacy.accountant import Event, LaplaceReleases, PureReleases, spent
from fairpate.privacy.audit_bounds import Claimed, Coins, Drawn, IdealAttack, NoiseSeen, Seen, Shadows, normal_scores
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, NoiseSource
from fairpate.privacy.laplace import add_laplace, choose_cheap, release_epsilon_for
from fairpate.types import FloatArray, Relation

Rule = TypeVar("Rule")
RULES_KJ: FloatArray = np.array([(0, 0), (0, 1), (1, 0), (1, 1)], dtype=np.float64)
_NO_CELL = "its records leave a group without one of the labels, whose rates are then refused"
_FEW_RECORDS = ("classifier_data_not_an_array", "estimators_pickle", "pipeline_consistency")
_FEWER = ("classifiers_classes", "classifiers_train", "estimators_fit_returns_self", "estimators_overwrite_params")
_FEWEST = ("positive_only_tag_during_fit", "readonly_memmap_input")
WITHOUT_CELLS = {f"check_{name}": _NO_CELL for name in (*_FEW_RECORDS, *_FEWER, *_FEWEST)}
"""scikit-learn's checks with records that methods which fill every cell refuse, each with the reason."""
_DRAWN = "a randomised classifier draws the label of every record, in the order of X"
IN_ORDER = dict.fromkeys(("check_methods_sample_order_invariance", "check_methods_subset_invariance"), _DRAWN)
"""scikit-learn's checks that labels drawn in the order of X do not pass, each with the reason."""


class DpOracleLearnerConfig(ParityConfig):
    """Settings of DP-oracle-learner (Jagielski et al. 2019, Algorithm 3)."""

    rules: Literal["linear", "by_group"] = Field(
        "linear",
        description="linear: of features alone; by_group: of the group and of the prediction of a public linear rule, "
        "by the exponential mechanism.",
    )
    num_rounds: Count | None = Field(25, description="Number of rounds T; null: by the paper's formula.")
    dual_bound: NotNegative = Field(2.0, description="Bound B on the sum of all multipliers.")
    learning_rate: Positive | None = Field(
        0.5, description="Learning rate eta of the multipliers; null: by the paper's formula."
    )
    ridge: Positive = Field(1.0, description="Ridge penalty, added to the diagonal of X'X.")
    num_directions: Count | None = Field(
        16,
        description="Number of principal directions of the features in which fairness prices change the rules; null:"
        " all, as in the paper.",
    )
    release: Literal["every_round", "once"] = Field(
        "once", description="Answer every round under noise, as in the paper; or release feature sums of cells once."
    )
    frequency_share: float = Field(0.1, gt=0, lt=1, description="Share of epsilon for the sizes of cells.")
    feature_share: float = Field(0.45, gt=0, lt=1, description="Share of epsilon for the feature sums of `once`.")
    min_share: float = Field(
        0.01, gt=0, lt=1, description="Smallest allowed released share of a cell; a smaller share is an error."
    )
    failure_probability: float = Field(
        0.05, gt=0, lt=1, description="Failure probability beta in the paper's formula for T."
    )

    disables: ClassVar[Disables] = {
        ("release", "every_round"): ("feature_share",),
        ("rules", "by_group"): ("feature_share", "num_directions", "release"),
        ("num_rounds", ...): ("failure_probability",),  # which the paper's formula for T reads
    }


@validated(frozen=True, kw_only=True)
class GameRules:
    """Parameters of the game between a learner of rules and an auditor of fairness (Jagielski et al. 2019, Algorithm
    3).

    ``dual_bound`` B bounds the sum of all multipliers, ``learning_rate`` is eta, and ``max_gap`` is the allowed gap to
    the reference group, in [0, 1].
    """

    num_rounds: Count
    dual_bound: FiniteFloat = Field(ge=0)
    learning_rate: FiniteFloat = Field(gt=0)
    max_gap: float = Field(ge=0, le=1)
    reference_group: int = 0


def play(
    rules: GameRules,
    shares_GE: FloatArray,
    *,
    answer: Callable[[FloatArray], Rule],
    violations: Callable[[Rule], FloatArray],
    on_round: Callable[[int, int], None] = lambda *_: None,
) -> tuple[tuple[Rule, ...], FloatArray]:
    """Play the game between a learner of rules (classifiers) and an auditor of fairness. Return the learner's rule of
    every round, and the auditor's mean multipliers by sign, non-reference group and event (S, O, E).

    - ``rules``: the parameters of the game.
    - ``shares_GE``: the share of each group and event among all records.
    - ``answer``: the learner: maps prices (G, E), the extra costs of predicting 1, to a rule.
    - ``violations``: maps a rule to its violations (S, O, E) of the parity constraint, which change the auditor's
      multipliers.
    - ``on_round(done, total)``: called after each round.
    """
    num_groups, num_events = shares_GE.shape
    # Two signs, because each gap is bounded on both sides.
    theta = np.zeros((2, num_groups - 1, num_events))
    answers, total = [], np.zeros_like(theta)
    for done in range(rules.num_rounds):
        multipliers = multipliers_of(theta, rules.dual_bound)
        answers.append(answer(prices(multipliers, shares_GE, reference_group=rules.reference_group)))
        # Without a projection: the exponential weights keep multipliers positive and their sum below B.
        theta = theta + rules.learning_rate * violations(answers[-1])
        total += multipliers
        on_round(done + 1, rules.num_rounds)
    return tuple(answers), total / rules.num_rounds


def multipliers_of(theta: FloatArray, dual_bound: float) -> FloatArray:
    """Return the auditor's multipliers B exp(theta) / (1 + sum exp(theta)), B = ``dual_bound``: all are positive, and
    their sum is below B."""
    # The 1 of the denominator is exp(0): shifted by the largest exponent of all, none overflows.
    largest = max(float(theta.max()), 0.0)
    weights = np.exp(theta - largest)
    return dual_bound * weights / (math.exp(-largest) + weights.sum())


def prices(multipliers_SOE: FloatArray, shares_GE: FloatArray, *, reference_group: int) -> FloatArray:
    """Return the prices W / q (G, E), the extra cost of predicting 1 for a record of each group and event: signed
    multipliers W divided by the share q of the group and event among all records."""
    signed_OE = multipliers_SOE[0] - multipliers_SOE[1]
    # Every gap is measured to the reference, whose weight is therefore minus the sum of all others.
    weights_GE = np.insert(signed_OE, reference_group, -signed_OE.sum(axis=0), axis=0)
    return weights_GE / shares_GE


def violations_of(rates_GE: FloatArray, *, max_gap: float, reference_group: int) -> FloatArray:
    """Return the violations of the parity constraint by sign, non-reference group and event (S, O, E): plus and minus
    the gap rate_a - rate_ref, less ``max_gap``, for each group a except the reference group."""
    gap_OE = np.delete(rates_GE - rates_GE[reference_group], reference_group, axis=0)
    return np.stack([gap_OE, -gap_OE]) - max_gap


def cost_differences(cells: ParityCells, prices_GE: FloatArray) -> FloatArray:
    """Return, for each record, the cost of predicting 1 minus the cost of predicting 0, shape (N,)."""
    inside = cells.events_N != NO_EVENT
    differences: FloatArray = (1.0 - 2.0 * cells.labels_N).astype(np.float64)
    differences[inside] += prices_GE[cells.groups_N[inside], cells.events_N[inside]]
    return differences


def fit_mixture(x: npt.ArrayLike, cells: ParityCells, estimator: Any, rules: GameRules) -> tuple[Any, ...]:
    """Play the game of learner and auditor with exact rates, without privacy; return the members of a uniform mixture
    of binary classifiers.

    This is the reduction of Agarwal et al. 2018. ``estimator`` is a scikit-learn classifier that accepts
    ``sample_weight``. ValueError for an empty cell.
    """
    features, counts_GE = np.asarray(x), cells.counts()
    if not counts_GE.all():
        group, event = np.argwhere(counts_GE == 0)[0]
        raise ValueError(
            "Expected records of every group in every fairness event (a label, or all records), got none in group "
            f"{group}, event {event}; merge groups."
        )

    def answer(prices_GE: FloatArray) -> Any:
        differences = cost_differences(cells, prices_GE)
        # A learner of weighted labels minimises the cost: the cheaper label is the target, its advantage the weight.
        target, weight = (differences < 0).astype(np.int64), np.abs(differences)
        # An estimator refuses a single class; there the cheapest rule is constant.
        constant = len(np.unique(target[weight > 0])) < 2
        member = sklearn.dummy.DummyClassifier(strategy="most_frequent") if constant else sklearn.base.clone(estimator)
        # Weights of mean one, so that the estimator's own regularisation weighs as it does without any.
        return member.fit(features, target, sample_weight=weight * len(weight) / weight.sum())

    def violations(member: Any) -> FloatArray:
        rates_GE = cells.rates(member.predict(features))
        return violations_of(rates_GE, max_gap=rules.max_gap, reference_group=rules.reference_group)

    return play(rules, counts_GE / len(features), answer=answer, violations=violations)[0]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The inputs of a private game between learner and auditor: public features (the last is the constant 1), the
    records' cells of group and event, settings, and the source of noise.

    ``reserve(events, noise)`` charges events before their release.
    """

    features: FloatArray
    cells: ParityCells
    config: DpOracleLearnerConfig
    target: PrivacyTarget
    rules: GameRules
    source: NoiseSource
    reserve: Callable[[Sequence[Event], str], None]

    def begin(
        self, count: int, *kinds: type[PureReleases], others: tuple[PureReleases, ...] = ()
    ) -> tuple[float, tuple[PureReleases, ...], FloatArray]:
        """Charge all releases of the game between learner and auditor, and release the share of each cell (group and
        event) among all records. With these shares, the price of a violation depends on public numbers only.

        In its rounds the game makes ``count`` releases of each of the ``kinds``, which are classes of privacy events.
        ``others`` are the events of releases outside the rounds. Return the epsilon of one release in a round, all
        events, and the shares. ValueError, before anything is released, if the target leaves nothing for the rounds.
        """
        sizes = LaplaceReleases(count=1, epsilon=self.config.frequency_share * self.target.epsilon)
        epsilon = release_epsilon_for(
            target_epsilon=self.target.epsilon,
            target_delta=self.target.delta,
            count=count,
            others=(sizes, *others),
            kinds=kinds,
            accounting=self.target.accounting,
        )
        events = (sizes, *others, *(kind(count=count, epsilon=epsilon) for kind in kinds))
        # Before the draw, which may end the run: a refusal afterwards would reveal that it did not.
        self.reserve(events, self.source.label)
        sizes_GE = self.noisy_sums(np.ones(len(self.features)), norm=1.0, epsilon=sizes.epsilon)
        shares_GE: FloatArray = sizes_GE / len(self.features)
        with spent([sizes], noise=self.source.label):
            require_shares(shares_GE, self.config.min_share)
        return epsilon, events, shares_GE

    def noisy_sums(self, values: FloatArray, *, norm: float, epsilon: float) -> FloatArray:
        """Return noisy sums of ``values`` (N, ...) by group and event, shape (G, E, ...).

        The values are public, with an L1 norm of at most ``norm`` per record; only the groups are private.
        """
        cells, reference = self.cells, self.config.reference_group
        inside_NE = cells.events_N[:, None] == np.arange(cells.num_events)
        totals = np.tensordot(inside_NE.astype(np.float64), values, axes=(0, 0))
        # Totals over groups are public, so the reference's row needs no release. Of two groups one row is left then; of
        # more, a record may leave one row for another. All rows are one release: one changed z moves them together.
        moved, exact = (1.0 if cells.num_groups == 2 else 2.0) * norm, np.delete(cells.sums(values), reference, axis=0)
        noisy = add_laplace(exact, l1_sensitivity=moved, epsilon=epsilon, source=self.source)
        return np.insert(noisy, reference, totals - noisy.sum(axis=0), axis=0)

    def noisy_violations(self, positives_GE: FloatArray, shares_GE: FloatArray) -> FloatArray:
        """Return the violations of the parity constraint by sign, non-reference group and event (S, O, E), computed
        from rates that are noisy counts divided by released sizes."""
        # Noise leaves the range of rates; clipping is post-processing.
        rates_GE = np.clip(positives_GE / (len(self.features) * shares_GE), 0.0, 1.0)
        return violations_of(rates_GE, max_gap=self.rules.max_gap, reference_group=self.rules.reference_group)


@dataclass(frozen=True)
class Sides:
    """The private learner (``answer``) and auditor (``violations``) of a game, with the events of all releases.

    ``round_epsilon`` is the epsilon of one release in a round.
    """

    answer: Callable[[FloatArray], FloatArray]
    violations: Callable[[FloatArray], FloatArray]
    shares_GE: FloatArray
    events: tuple[PureReleases, ...]
    round_epsilon: float


def plain_rule(features: FloatArray, cells: ParityCells, *, ridge: float) -> FloatArray:
    """Return the coefficients beta1 - beta0 of the linear rule without fairness prices: a ridge regression on features
    and labels."""
    costs_N = 1.0 - 2.0 * cells.labels_N  # 1[Y != 1] - 1[Y != 0]
    factor = scipy.linalg.cho_factor(features.T @ features + ridge * np.eye(features.shape[1]))
    return scipy.linalg.cho_solve(factor, features.T @ costs_N)


class Regression:
    """The ridge regression by which the learner fits its linear rule in every round. Whatever does not depend on groups
    is computed once, in advance.

    The rule of a round has the coefficients ``public`` + ``lift`` F' p: p are the prices of the records in this round,
    F is ``components``, and the matrix ``lift`` maps F' p to coefficients. F are the features or, with
    ``num_directions``, their leading principal components of unit length. Prices then change rules in these directions
    only, for which far less noise is needed. ``norms_E``: the largest L1 norm of a record's row of F, by event.
    """

    def __init__(self, features: FloatArray, cells: ParityCells, *, ridge: float, num_directions: int | None) -> None:
        # What needs no group is solved once: a round multiplies by it.
        self.public = plain_rule(features, cells, ridge=ridge)
        if num_directions is None:
            factor = scipy.linalg.cho_factor(features.T @ features + ridge * np.eye(features.shape[1]))
            self.components, self.lift = features, scipy.linalg.cho_solve(factor, np.eye(features.shape[1]))
        else:
            left, lengths, right = np.linalg.svd(features, full_matrices=False)
            # Shorter lengths are rounding errors, whose directions would be magnified to unit length.
            rank = min(num_directions, int((lengths > lengths[0] * 1e-10).sum()))
            self.components, lengths = left[:, :rank], lengths[:rank]
            # (X'X + ridge)^-1 X' in the basis of singular vectors.
            self.lift = right[:rank].T * lengths / (lengths**2 + ridge)
        # L1, as Laplace noise asks: the most that one record moves in all sums together.
        norms_N = np.abs(self.components).sum(axis=1)
        inside = [norms_N[cells.events_N == event] for event in range(cells.num_events)]
        self.norms_E: FloatArray = np.array([norms.max(initial=0.0) for norms in inside])


def feature_sensitivity(prices_GE: FloatArray, norms_E: FloatArray) -> float:
    """Return the largest L1 change of X' C1 (features times the costs of predicting 1) if one record changes its group.

    ``norms_E`` are the largest L1 norms of a record's features per event.
    """
    return float(((prices_GE.max(axis=0) - prices_GE.min(axis=0)) * norms_E).max())


def linear_sides(setting: Setting) -> Sides:
    """Return the private learner and auditor of the game for linear rules."""
    config, features = setting.config, setting.features
    regression = Regression(features, setting.cells, ridge=config.ridge, num_directions=config.num_directions)
    num_rounds, once = setting.rules.num_rounds, config.release == "once"
    if once:
        sums = LaplaceReleases(count=1, epsilon=config.feature_share * setting.target.epsilon)
        round_epsilon, events, shares_GE = setting.begin(num_rounds, LaplaceReleases, others=(sums,))
        norm = float(regression.norms_E.max())
        sums_GED = setting.noisy_sums(regression.components, norm=norm, epsilon=sums.epsilon)
    else:
        round_epsilon, events, shares_GE = setting.begin(2 * num_rounds, LaplaceReleases)
        # Exact, and so private: every answer that reads them adds noise.
        sums_GED = setting.cells.sums(regression.components)

    def answer(prices_GE: FloatArray) -> FloatArray:
        priced_D = np.tensordot(prices_GE, sums_GED, axes=2)
        if not once:
            # Where all groups have one price the sum does not depend on the groups: sensitivity 0, and no noise.
            sensitivity = feature_sensitivity(prices_GE, regression.norms_E)
            priced_D = add_laplace(priced_D, l1_sensitivity=sensitivity, epsilon=round_epsilon, source=setting.source)
        return regression.public + regression.lift @ priced_D

    def violations(coefficients_D: FloatArray) -> FloatArray:
        is_positive_N = np.where(features @ coefficients_D < 0, 1.0, 0.0)
        # The rule is public once it is answered: a round pays for counting its positives, not for the rule again.
        positives_GE = setting.noisy_sums(is_positive_N, norm=1.0, epsilon=round_epsilon)
        return setting.noisy_violations(positives_GE, shares_GE)

    return Sides(answer, violations, shares_GE, events, round_epsilon)


class GroupRules:
    """The finite class of rules that read only the group and a public classifier's prediction.

    ``said_N`` are this classifier's predictions, 0 or 1, for the private records.
    """

    def __init__(self, cells: ParityCells, said_N: npt.NDArray[Any]) -> None:
        self._cells, self._said_N = cells, said_N.astype(np.int64)
        # The event follows from the label: read it off any record with that label.
        self._event_of_label = [int(cells.events_N[cells.labels_N == y].max(initial=NO_EVENT)) for y in (0, 1)]
        self.counts_GYJ = np.zeros((cells.num_groups, 2, 2), dtype=np.int64)
        np.add.at(self.counts_GYJ, (cells.groups_N, cells.labels_N, self._said_N), 1)

    def choose(self, prices_GE: FloatArray, *, epsilon: float, source: NoiseSource) -> FloatArray:
        """Choose a rule by the exponential mechanism; return its prediction for every group and public label,
        (G, J)."""
        differences_GY = self.differences(prices_GE)
        sensitivity = sensitivity_of(differences_GY)
        chosen = []
        # One release for all groups: a rule's odds are a product over groups, so each group's part is drawn by itself.
        for counts_YJ, difference_Y in zip(self.counts_GYJ.tolist(), differences_GY, strict=True):
            # The cost of predicting 1 where the public classifier says j; a rule's cost is the sum over its 1s.
            cost_J = [sum(d * counts[j] for d, counts in zip(difference_Y, counts_YJ, strict=True)) for j in (0, 1)]
            costs = [Fraction(zero * cost_J[0] + one * cost_J[1]) for zero, one in RULES_KJ.astype(int).tolist()]
            chosen.append(choose_cheap(costs, sensitivity=sensitivity, epsilon=epsilon, source=source))
        return RULES_KJ[chosen]

    def differences(self, prices_GE: FloatArray) -> list[list[Fraction]]:
        """Return the cost of predicting 1 minus that of predicting 0 for each group and label (G, Y), as exact
        fractions, so that the odds of the exponential mechanism are not rounded."""
        # A record in no event has the price 0.
        priced = [{NO_EVENT: Fraction(0)} | dict(enumerate(map(Fraction, price_E))) for price_E in prices_GE.tolist()]
        events = list(enumerate(self._event_of_label))
        return [[Fraction(1 - 2 * label) + prices[event] for label, event in events] for prices in priced]

    def positives(self, rule_GJ: FloatArray, *, epsilon: float, source: NoiseSource) -> FloatArray:
        """Return the noisy number of records of each group and event for which the rule predicts 1, (G, E)."""
        exact_GE = self._cells.sums(rule_GJ[self._cells.groups_N, self._said_N])
        # One changed z leaves a cell and enters another.
        return add_laplace(exact_GE, l1_sensitivity=2.0, epsilon=epsilon, source=source)


def sensitivity_of(differences_GY: list[list[Fraction]]) -> Fraction:
    """Return the largest change of any rule's cost if one record changes its group, given the cost differences (G, Y)
    of :meth:`GroupRules.differences`."""
    by_label = zip(*differences_GY, strict=True)
    return max((max(*map(abs, of_G), max(of_G) - min(of_G)) for of_G in by_label), default=Fraction(0))


def group_sides(setting: Setting) -> Sides:
    """Return the two private players of the game that chooses one classifier per group: in each round the learner
    draws a classifier by the exponential mechanism, and the auditor releases a noisy table of counts."""
    features, cells, source = setting.features, setting.cells, setting.source
    # As with all rules here, a score below 0 predicts 1.
    class_of_rules = GroupRules(cells, features @ plain_rule(features, cells, ridge=setting.config.ridge) < 0)
    # The learner's releases, and the auditor's.
    round_epsilon, events, shares_GE = setting.begin(setting.rules.num_rounds, PureReleases, LaplaceReleases)

    def violations(rule_GJ: FloatArray) -> FloatArray:
        positives_GE = class_of_rules.positives(rule_GJ, epsilon=round_epsilon, source=source)
        return setting.noisy_violations(positives_GE, shares_GE)

    answer = partial(class_of_rules.choose, epsilon=round_epsilon, source=source)
    return Sides(answer, violations, shares_GE, events, round_epsilon)


@dataclass(frozen=True, kw_only=True)
class OracleTrained(Trained):
    """The trained mixture and the outcome of the game.

    ``coefficients_RD``: a row c per rule, which predicts 1 if (x, 1) . c < 0. For rules by group there is one row, the
    public rule, whose predictions ``mixing_GCC`` changes by group. ``round_epsilon``: the epsilon of one release in
    a round.
    """

    coefficients_RD: FloatArray
    mean_multipliers: FloatArray
    shares_GE: FloatArray
    round_epsilon: float


def published_num_rounds(
    config: DpOracleLearnerConfig, target: PrivacyTarget, *, num_records: int, num_groups: int, vc_dimension: int
) -> float:
    """Return the paper's number T of rounds of the game, a real number; if it is below 1, epsilon is too small for the
    paper's theorem.

    For a finite class, the logarithm of its size replaces ``vc_dimension`` ln ``num_records`` (Remark 4.2).
    """
    by_group = config.rules == "by_group"
    size = num_groups * math.log(len(RULES_KJ)) if by_group else vc_dimension * math.log(num_records)
    complexity = size + math.log(2 / config.failure_probability)
    spread = 2 * (2 * num_groups * config.dual_bound + 1) * math.sqrt(math.log(1 / target.delta))
    gain = config.dual_bound * math.sqrt(math.log(4 * num_groups - 3)) * num_records * target.epsilon
    return gain / (spread * complexity)


class OracleLearner(PrivateMethod):
    """DP-oracle-learner for two classes. It protects each record's sensitive attribute, with noise calibrated to the
    target.
    """

    title: ClassVar[str] = "DP-oracle-learner"
    paper: ClassVar[str] = "Jagielski et al. 2019, arXiv 1812.02696, Algorithm 3"
    family: ClassVar[str] = "rates"
    colour: ClassVar[int] = 2
    learns_two_classes: ClassVar[bool] = True
    protects_attribute_only: ClassVar[bool] = True
    publishes_mixture: ClassVar[bool] = True
    publishes_linear_rules: ClassVar[bool] = True
    failed_checks: ClassVar[Mapping[str, str]] = WITHOUT_CELLS

    method: str = "dp_oracle_learner"
    student: StudentConfig = StudentConfig(model=NetworkConfig(name="logistic"))
    dp_oracle_learner: DpOracleLearnerConfig = DpOracleLearnerConfig()

    def train(self, training: Training) -> OracleTrained:
        """Play the game of learner and auditor, and return the mixture of the learner's rules.

        ValueError for a label or group out of range, for a cell with a share below ``min_share``, and, with the paper's
        number of rounds, for an epsilon too small for one round.
        """
        from fairpate.nn.fit import linear_rules  # a configuration is read without torch
        from fairpate.nn.models import scale_bytes

        private, config, num_groups = training.dataset.private, self.dp_oracle_learner, training.dataset.num_groups
        plain = scale_bytes(private.x).flatten(1).double().numpy()
        features = np.hstack([plain, np.ones((len(plain), 1))])
        cells = ParityCells.of(private.y, private.z, num_groups=num_groups, constraint=config.constraint)
        if not config.reference_group < num_groups:
            raise ValueError(
                f"Expected dp_oracle_learner.reference_group < {num_groups}, the number of groups, got "
                f"{config.reference_group}."
            )
        by_group, (num_records, num_features) = config.rules == "by_group", features.shape
        # Without a setting, the paper's number of rounds and learning rate are used.
        num_rounds, rate = config.num_rounds, config.learning_rate
        if num_rounds is None:
            published = published_num_rounds(
                config, self.target, num_records=num_records, num_groups=num_groups, vc_dimension=num_features
            )
            if not 1 <= published < math.inf:
                raise ValueError(
                    f"The paper's formula gives {published:.3g} rounds of training, not a finite number from 1 up, at "
                    f"epsilon {self.target.epsilon:g} for {num_records} records and {num_features} features; change "
                    "target.epsilon, or set dp_oracle_learner.num_rounds."
                )
            num_rounds = math.floor(published)
        if rate is None:
            # ln(4 G - 3), as in the paper: 4 (G - 1) multipliers of two signs and two labels, and the unused rest of B.
            rate = 0.5 * math.sqrt(math.log(4 * num_groups - 3) / num_rounds)
        shared = config.model_dump(include={"dual_bound", "max_gap", "reference_group"})
        rules = GameRules(num_rounds=num_rounds, learning_rate=rate, **shared)
        setting = Setting(
            features=features,
            cells=cells,
            config=config,
            target=self.target,
            rules=rules,
            source=self.source,
            reserve=training.reserve,
        )
        with training.reporter.stage(self.method) as advance:
            sides = group_sides(setting) if by_group else linear_sides(setting)
            played, mean_multipliers = play(
                rules, sides.shares_GE, answer=sides.answer, violations=sides.violations, on_round=advance
            )
        answers = np.stack(played)
        coefficients_RD = plain_rule(features, cells, ridge=config.ridge)[None] if by_group else answers
        # The uniform mixture of all rounds' rules.
        positive_GJ = answers.mean(axis=0)
        return OracleTrained(
            # These rules predict 1 below 0, those of a mixture above.
            model=linear_rules(-coefficients_RD, input_shape=tuple(private.x.shape[1:])),
            events=sides.events,
            noise=self.source.label,
            mixing_GCC=np.stack([1 - positive_GJ, positive_GJ], axis=2) if by_group else None,
            coefficients_RD=coefficients_RD,
            mean_multipliers=mean_multipliers,
            shares_GE=sides.shares_GE,
            round_epsilon=sides.round_epsilon,
        )


class DpPostprocessingConfig(ParityConfig):
    """Settings of DP-postprocessing (Jagielski et al. 2019, Algorithm 1). Those of the base classifier are in `sgd` or
    `dp_sgd`."""

    base: Literal["sgd", "dp_sgd"] = Field(
        "sgd",
        description="Training of the base classifier: `sgd` protects the sensitive attribute alone, `dp_sgd` the "
        "whole record.",
    )
    count_share: float = Field(0.1, gt=0, lt=1, description="Share of epsilon for the counts, with a `dp_sgd` base.")
    failure_probability: float = Field(
        0.05, gt=0, lt=1, description="Probability beta with which the slack may be smaller than the noise."
    )
    slack: bool = Field(
        True,
        description="Whether the constraints allow for noise in addition to max_gap; false is fairer, but without "
        "the paper's bound on the error.",
    )

    disables: ClassVar[Disables] = {("slack", False): ("failure_probability",)}


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """A randomised change of a base classifier's predictions by group: ``mixing_GCC[a, j, k]`` is the probability of
    predicting k for a member of group a if the base classifier predicts j.

    ``error`` is the error of the mixture and ``max_slack`` the largest slack of a constraint, both on the released
    counts.
    """

    mixing_GCC: FloatArray
    error: float
    max_slack: float


def released_counts(
    predictions: npt.ArrayLike,
    labels_N: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    epsilon: float,
    source: NoiseSource,
    num_groups: int,
    num_classes: int = 2,
    relation: Relation = "replace one",
) -> FloatArray:
    """Release noisy counts by group, label and prediction, shape (G, Y, C), >= 0.

    ``predictions`` are predicted labels (N,) or probabilities (N, C). ``epsilon`` inf adds no noise. ValueError for a
    label, group or prediction out of range.
    """
    exact_GYC = joint_table(predictions, groups_N, num_groups=num_groups, num_classes=num_classes, labels_N=labels_N)
    # A replaced record, or group, leaves one count for another; an added record enters one.
    moved = 2.0 if relation == "replace one" else 1.0
    noisy_GYC = add_laplace(exact_GYC, l1_sensitivity=moved, epsilon=epsilon, source=source)
    # Post-processing: rates and shares are made of these, and a negative count has none.
    return np.maximum(noisy_GYC, 0.0)


def fair_mixing(counts_GYC: FloatArray, config: DpPostprocessingConfig, *, epsilon: float) -> Mixing:
    """Find, on counts that were released with ``epsilon``, the mixing of predictions by group with the least error
    within the allowed gap; return this solution of a linear programme.

    ``epsilon`` inf is for exact counts, which need no slack. ValueError for counts that are negative or undefined, for
    fewer than two groups, for a cell with a share below ``min_share``, and if the solver fails.
    """
    num_groups, num_labels, num_classes = counts_GYC.shape
    if num_groups < 2 or num_labels != num_classes or num_classes < 2:
        raise ValueError(
            f"Expected counts_GYC of shape (G, C, C) with at least 2 groups and 2 classes, got {counts_GYC.shape}."
        )
    if not (counts_GYC >= 0).all() or not counts_GYC.any():
        raise ValueError("Expected counts_GYC without NaN or negative values, and some above 0; give released counts.")
    if not (reference := config.reference_group) < num_groups:
        raise ValueError(f"Expected reference_group < {num_groups}, the number of groups, got {reference}.")
    # Of two labels, the rate of one determines that of the other.
    labels = [1] if num_classes == 2 else list(range(num_classes))
    all_G1C = counts_GYC.sum(axis=1, keepdims=True)
    # Counts of each event (G, E, C), and how many true labels an event merges.
    events_GEC, merged = {
        "demographic_parity": (all_G1C, num_labels),
        "equalized_odds": (counts_GYC, 1),
        "equal_opportunity": (counts_GYC[:, labels], 1),
        # The records of all labels but one.
        "equal_false_positives": ((all_G1C - counts_GYC)[:, labels], num_labels - 1),
    }[config.constraint]
    cells_GE = events_GEC.sum(axis=2)
    require_shares(cells_GE / counts_GYC.sum(), config.min_share)
    if config.constraint in ("equal_opportunity", "equal_false_positives"):
        # Each of these events belongs to one label.
        pairs = list(enumerate(labels))
    else:
        pairs = [(event, label) for event in range(cells_GE.shape[1]) for label in labels]
    # Of the released total: where whole records are protected, their number is private.
    share_GYC = counts_GYC / counts_GYC.sum()
    # The error of predicting k where Yhat says j, (G, j, k).
    wrong_GCC = share_GYC.sum(axis=1)[:, :, None] - share_GYC.transpose(0, 2, 1)
    # A union bound over all noisy counts.
    logarithm = math.log(num_groups * num_labels * num_classes / config.failure_probability)
    rows, bounds, slacks = [], [], []
    for event, label in pairs:
        # The groups' rates are linear functions of the mixing.
        rates_GC = events_GEC[:, event] / cells_GE[:, event, None]
        for group in (group for group in range(num_groups) if group != reference):
            # The paper's bound on both rates' errors with probability 1 - beta; every cell that is merged brings its
            # own noise.
            smaller = min(cells_GE[group, event], cells_GE[reference, event])
            slacks.append(4 * (num_classes - 1) * merged * logarithm / (smaller * epsilon) if config.slack else 0.0)
            difference_GCC = np.zeros_like(wrong_GCC)
            difference_GCC[group, :, label], difference_GCC[reference, :, label] = rates_GC[group], -rates_GC[reference]
            # Both signs, because a linear programme has no absolute value.
            rows += [difference_GCC.ravel(), -difference_GCC.ravel()]
            bounds += [slacks[-1] + config.max_gap] * 2
    # What a member of a group with one prediction gets is a distribution: it sums to 1.
    total = np.kron(np.eye(num_groups * num_classes), np.ones(num_classes))
    ones = np.ones(num_groups * num_classes)
    found = scipy.optimize.linprog(
        wrong_GCC.ravel(), np.array(rows), np.array(bounds), total, ones, bounds=(0, 1), method="highs"
    )
    if found.status != 0 or found.x is None or found.fun is None:
        raise ValueError(
            f"The solver found no change of predictions by group that keeps the allowed gap ({found.message}); raise "
            "max_gap or epsilon."
        )
    mixing_GCC = np.clip(found.x.reshape(wrong_GCC.shape), 0.0, 1.0)
    # The solver keeps bounds and sums up to a tolerance.
    mixing_GCC = mixing_GCC / mixing_GCC.sum(axis=2, keepdims=True)
    return Mixing(mixing_GCC=mixing_GCC, error=float(found.fun), max_slack=float(max(slacks)))


class Postprocessing(dp_sgd.DpSgdFamily):
    """DP-postprocessing, which protects one sensitive attribute, or one record with a private base classifier."""

    title: ClassVar[str] = "DP-postprocessing"
    paper: ClassVar[str] = "Jagielski et al. 2019, arXiv 1812.02696, Algorithm 1"
    family: ClassVar[str] = "rates"
    colour: ClassVar[int] = 4
    publishes_mixture: ClassVar[bool] = True
    failed_checks: ClassVar[Mapping[str, str]] = {
        **{f"check_{name}": _NO_CELL for name in _FEW_RECORDS},
        "check_classifiers_train": _DRAWN,
        **IN_ORDER,
    }

    method: str = "dp_postprocessing"
    dp_postprocessing: DpPostprocessingConfig = DpPostprocessingConfig()
    sgd: FitConfig = FitConfig()

    @property
    def protects_attribute_only(self) -> bool:  # type: ignore[override]
        """True unless the base classifier is private too."""
        return self.dp_postprocessing.base == "sgd"

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it: those of the base classifier that ``base`` does
        not choose."""
        unread = ("dp_sgd", "dp_postprocessing.count_share") if self.protects_attribute_only else ("sgd",)
        return super().unread | dict.fromkeys(unread, "dp_postprocessing.base")

    def train(self, training: Training) -> Trained:
        """Train the base classifier, mix its predictions by group, and return the result.

        ValueError as :func:`released_counts` and :func:`fair_mixing`, and for a target that a private base classifier
        does not meet with any noise.
        """
        from fairpate.nn.fit import said_labels  # a configuration is read without torch

        config, target, source, private = self.dp_postprocessing, self.target, self.source, training.dataset.private
        model = training.model
        events: tuple[Event, ...] = ()
        with training.reporter.stage(self.method) as advance:
            if config.base == "sgd":
                # Features and labels are public then, and SGD reads nothing else: there is no event.
                dp_sgd.train_sgd(**arguments(training), config=self.sgd, on_progress=advance)
                counted, noise = LaplaceReleases(count=1, epsilon=target.epsilon), source.label
            else:
                # The counts are a pure release: their epsilon adds up with the base's, which keeps all of delta.
                share, relation = config.count_share, target.record_relation
                rest = target.model_copy(update={"epsilon": (1 - share) * target.epsilon})
                base = dp_sgd.train_dp_sgd(**self.sgd_arguments(training, rest), on_progress=advance)
                events = base.events
                counted = LaplaceReleases(count=1, epsilon=share * target.epsilon, unit="record", relation=relation)
                # One seeded source is enough to make the result not private, so its label is the one that is stated.
                noise = source.label if base.noise == OS_ENTROPY else base.noise
            said_NC = said_labels(model, private.x)
            truth_N, groups_N = private.y.numpy(), private.z.numpy()
            numbers = {"num_groups": training.dataset.num_groups, "num_classes": said_NC.shape[1]}
            counts_GYC = released_counts(
                said_NC, truth_N, groups_N, epsilon=counted.epsilon, relation=counted.relation, source=source, **numbers
            )
            # Both read the same records, so their events add up; the counts may depend on the base, which is released.
            events = (*events, counted)
            with spent(events, noise=noise):
                mixing = fair_mixing(counts_GYC, config, epsilon=counted.epsilon)
        remarks = (
            f"largest slack added to max_gap {config.max_gap:g}: {mixing.max_slack:.4g}",
            f"error of the mixing on released counts: {mixing.error:.4g}",
        )
        for remark in remarks:
            training.reporter.note("mixing", remark)
        return Trained(model=model, events=events, noise=noise, mixing_GCC=mixing.mixing_GCC, remarks=remarks)

    def attack(self, audited: Audited) -> Shadows | None:
        """Return an attack on the noisy counts by group, label and prediction of a base classifier without noise; for
        one that is trained by DP-SGD as the parent class does.

        For every label and prediction there are canaries (records that the attacker looks for); a fair coin for each
        canary decides to which of two groups it belongs.
        """
        if self.dp_postprocessing.base != "sgd":
            return super().attack(audited)
        from fairpate.methods.shadows import squares_seen  # torch

        facts, loaded = audited.facts, audited.loaded
        num_groups, num_classes = len(facts.group_names), len(facts.label_names)
        epsilon, pairs = self.target.epsilon * (2.0 if audited.is_control else 1.0), num_groups // 2
        pair_M, label_M, said_M = np.indices((pairs, num_classes, num_classes)).reshape(3, -1)
        first_M = 2 * pair_M
        # Large enough that no noisy count falls below 0, where it would be cut.
        crowd = 1000 + round(100 / self.target.epsilon)
        cells = np.indices((num_groups, num_classes, num_classes)).reshape(3, -1)
        groups_N, labels_N, saids_N = np.repeat(cells, crowd, axis=1)
        if loaded is not None:
            groups_N, labels_N = loaded.private.z.numpy(), loaded.private.y.numpy()
            saids_N = labels_N  # the predictions of a perfect model
        sizes: dict[str, Any] = {"num_groups": num_groups, "num_classes": num_classes}
        known_GYC = joint_table(saids_N, groups_N, labels_N=labels_N, **sizes)
        # What one unit of each label and prediction moves, from the first group to any other.
        moved = [
            joint_table(said, group, labels_N=label, **sizes).astype(np.float64)
            - joint_table(said, 0 * group, labels_N=label, **sizes)
            for group, label, said in cells.reshape(3, -1, 1).swapaxes(0, 1)
        ]
        reach = max(float(np.abs(each_GYC).sum()) for each_GYC in moved) / 2

        def play(included_M: Coins) -> Seen:
            found_GYC = released_counts(
                np.concatenate([saids_N, said_M]),
                np.concatenate([labels_N, label_M]),
                np.concatenate([groups_N, first_M + included_M]),
                epsilon=epsilon,
                source=self.source,
                **sizes,
            )
            without_M, with_M = (
                found_GYC[first_M + group, label_M, said_M] - known_GYC[first_M + group, label_M, said_M]
                for group in (0, 1)
            )
            # The log-likelihood ratio of Laplace noise, by the distances from the counts without and with the canary.
            ratio_M: FloatArray = np.abs(with_M) - np.abs(with_M - 1) + np.abs(without_M - 1) - np.abs(without_M)
            exact_GYC = known_GYC.copy()
            np.add.at(exact_GYC, (first_M + included_M, label_M, said_M), 1)
            noise_GYC = found_GYC - exact_GYC
            # A count that falls below 0 is cut.
            stddev, drawn = math.sqrt(2) * 2 / epsilon, Drawn(scores_RP=np.zeros((0, 0)))
            noise: tuple[NoiseSeen, ...] = ()
            if loaded is None:
                noise = (squares_seen(noise_GYC, stddev, kurtosis=6.0),)
                drawn = Drawn(scores_RP=normal_scores(noise_GYC.ravel(), stddev, laplace=True)[None])
            gains_SM = np.ones((1, len(ratio_M)))
            return Seen(scores_SM=(ratio_M * epsilon / 2)[None], gains_SM=gains_SM, noise=(noise,), draws=(drawn,))

        drawn = (LaplaceReleases(count=1, epsilon=epsilon),)
        return Shadows(
            attack="likelihood ratio of the two counts between which the canary's attribute decides",
            events=drawn,
            num_canaries=len(first_M),
            releases=(Claimed(name="counts", claim=IdealAttack(epsilon=epsilon, mu=None), reach=reach),),
            play=play,
            is_pure=True,
            control_noise=0.5 if audited.is_control else 1.0,
        )
