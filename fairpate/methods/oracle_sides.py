"""What answers a round of DP-oracle-learner's game, and its cost: linear rules, rules by group, the paper's form.

Shapes: N records, D features, G groups, E events, J = 2 things that the public rule says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fairpate.config import PrivacyTarget
from fairpate.methods.oracle_releases import GroupRules, Regression, Released, Sides, plain_rule
from fairpate.methods.parity import Cells, FloatArray, require_shares
from fairpate.methods.parity_game import GameRules, violations_of
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.events import Event, spent
from fairpate.privacy.laplace import LaplaceReleases, PureReleases, add_laplace, release_epsilon_for

if TYPE_CHECKING:
    from fairpate.methods.dp_oracle_learner import DpOracleLearnerConfig


def published_round_epsilon(*, epsilon: float, delta: float, num_rounds: int) -> float:
    """The paper's epsilon' of each of its 2 T releases."""
    return epsilon / (4 * math.sqrt(num_rounds * math.log(1 / delta)))


def feature_sensitivity(prices_GE: FloatArray, norms_E: FloatArray) -> float:
    """The most that X' C1 changes in L1 with one z: ``norms_E`` are the largest L1 norms of a record per event."""
    return float(((prices_GE.max(axis=0) - prices_GE.min(axis=0)) * norms_E).max())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a game is played about: public features, cells, the settings, and where noise comes from."""

    features: FloatArray
    cells: Cells
    config: DpOracleLearnerConfig
    target: PrivacyTarget
    rules: GameRules
    source: NoiseSource
    admit: Callable[[Sequence[Event], str], None]

    @property
    def sizes(self) -> LaplaceReleases:
        """The release of the sizes of cells."""
        return LaplaceReleases(count=1, epsilon=self.config.frequency_share * self.target.epsilon)

    @property
    def released(self) -> Released:
        """Tables over the cells, under noise."""
        return Released(self.cells, self.config.reference_group, self.source)

    def round_epsilon(
        self, count: int, others: Sequence[PureReleases], *, kinds: tuple[type[PureReleases], ...] = (LaplaceReleases,)
    ) -> float:
        """Of each of ``count`` releases of each kind, beside ``others``."""
        return release_epsilon_for(
            target_epsilon=self.target.epsilon,
            target_delta=self.target.delta,
            count=count,
            others=tuple(others),
            kinds=kinds,
            accounting=self.target.accounting,
        )

    def released_shares(self, events: Sequence[Event]) -> FloatArray:
        """Of all records, those of each cell: released once, before the game, so that its prices are public.

        ``events``: all that the game will release, these shares included.
        """
        self.admit(events, self.source.label)
        sizes_GE = self.released.table(np.ones(len(self.features)), norm=1.0, epsilon=self.sizes.epsilon)
        shares_GE: FloatArray = sizes_GE / len(self.features)
        with spent([self.sizes], noise=self.source.label):
            require_shares(shares_GE, self.config.min_share)
        return shares_GE

    def noisy_violations(self, positives_GE: FloatArray, shares_GE: FloatArray) -> FloatArray:
        """Of released counts over released sizes."""
        # Noise leaves the range of rates; clipping is post-processing.
        return self.violations(np.clip(positives_GE / (len(self.features) * shares_GE), 0.0, 1.0))

    def violations(self, rates_GE: FloatArray) -> FloatArray:
        """Of these rates."""
        return violations_of(rates_GE, max_gap=self.rules.max_gap, reference_group=self.rules.reference_group)


def composed(setting: Setting) -> Sides:
    """Linear rules, at a price that the accountant composes."""
    config, features, source, released = setting.config, setting.features, setting.source, setting.released
    regression = Regression(features, setting.cells, ridge=config.ridge, num_directions=config.num_directions)
    once = config.release == "once"
    fixed = [setting.sizes]
    if once:
        fixed.append(LaplaceReleases(count=1, epsilon=config.feature_share * setting.target.epsilon))
    num_releases = setting.rules.num_rounds * (1 if once else 2)
    # Before anything is released: a target that leaves nothing for the rounds is refused unspent.
    round_epsilon = setting.round_epsilon(num_releases, fixed)
    events = (*fixed, LaplaceReleases(count=num_releases, epsilon=round_epsilon))
    shares_GE = setting.released_shares(events)
    if once:
        sums_GED = released.table(regression.components, norm=float(regression.norms_E.max()), epsilon=fixed[1].epsilon)
    else:
        # Exact, and so private: every answer that reads them adds noise.
        sums_GED = setting.cells.sums(regression.components)

    def answer(prices_GE: FloatArray) -> FloatArray:
        priced_D = np.tensordot(prices_GE, sums_GED, axes=2)
        if not once:
            # Where all groups have one price the sum is the same whoever is in them: sensitivity 0, and no noise.
            sensitivity = feature_sensitivity(prices_GE, regression.norms_E)
            priced_D = add_laplace(priced_D, l1_sensitivity=sensitivity, epsilon=round_epsilon, source=source)
        return regression.coefficients(priced_D)

    def violations(coefficients_D: FloatArray) -> FloatArray:
        is_positive_N = np.where(features @ coefficients_D < 0, 1.0, 0.0)
        # The rule is public once it is answered: a round pays for counting what it says, not for the rule again.
        positives_GE = released.table(is_positive_N, norm=1.0, epsilon=round_epsilon)
        return setting.noisy_violations(positives_GE, shares_GE)

    return Sides(answer, violations, shares_GE, events, round_epsilon)


def of_groups(setting: Setting) -> Sides:
    """The finite class: an exponential mechanism and a table of counts a round."""
    features, cells, source = setting.features, setting.cells, setting.source
    said = GroupRules(cells, features @ plain_rule(features, cells, ridge=setting.config.ridge) < 0)
    kinds = (PureReleases, LaplaceReleases)  # the learner's, and the auditor's
    num_rounds = setting.rules.num_rounds
    # Before anything is released, as for linear rules.
    round_epsilon = setting.round_epsilon(num_rounds, (setting.sizes,), kinds=kinds)
    events = (setting.sizes, *(kind(count=num_rounds, epsilon=round_epsilon) for kind in kinds))
    shares_GE = setting.released_shares(events)

    def violations(rule_GJ: FloatArray) -> FloatArray:
        return setting.noisy_violations(said.positives(rule_GJ, epsilon=round_epsilon, source=source), shares_GE)

    return Sides(
        answer=lambda prices_GE: said.choose(prices_GE, epsilon=round_epsilon, source=source),
        violations=violations,
        shares_GE=shares_GE,
        events=events,
        round_epsilon=round_epsilon,
    )


def as_in_paper(setting: Setting) -> Sides:
    """Every round, in all directions; exact shares in costs and noise scales, which they are no cover for."""
    features, cells, target, source = setting.features, setting.cells, setting.target, setting.source
    regression = Regression(features, cells, ridge=setting.config.ridge, num_directions=None)
    count, num_rounds = len(features), setting.rules.num_rounds
    shares_GE, sums_GED = cells.counts() / count, cells.sums(regression.components)
    smallest = float(shares_GE.min())
    if not smallest * count > 1:
        raise ValueError("Expected more than one record in every cell, as the paper's noise does; merge groups.")
    epsilon = published_round_epsilon(epsilon=target.epsilon, delta=target.delta, num_rounds=num_rounds)
    feature_reach = 2 * float(regression.norms_E.max()) * setting.config.dual_bound / smallest
    rate_reach = 2 * cells.num_groups / (count * smallest - 1)

    def answer(prices_GE: FloatArray) -> FloatArray:
        priced_D = np.tensordot(prices_GE, sums_GED, axes=2)
        noisy_D = add_laplace(priced_D, l1_sensitivity=feature_reach, epsilon=epsilon, source=source)
        return regression.coefficients(noisy_D)

    def violations(coefficients_D: FloatArray) -> FloatArray:
        exact = setting.violations(cells.rates(features @ coefficients_D < 0))
        return add_laplace(exact, l1_sensitivity=rate_reach, epsilon=epsilon, source=source)

    # Exact shares are used unreleased: the accountant hears that nothing is guaranteed.
    return Sides(answer, violations, shares_GE, (PureReleases(count=1, epsilon=math.inf),), epsilon)
