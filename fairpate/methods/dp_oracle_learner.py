"""DP-oracle-learner (Jagielski et al. 2019, "Differentially Private Fair Learning", arXiv 1812.02696, Algorithm 3).

The game of :mod:`fairpate.methods.parity_game` with a private learner and a private auditor. Only the sensitive
attribute is protected, so features X, labels Y and their number m are public, and it is not needed at prediction.

    learner:   beta1 = (X'X + ridge)^-1 (X' C1 + Laplace),   beta0 = (X'X + ridge)^-1 X' C0,   h = 1[x beta1 < x beta0]
    auditor:   positives of h per group and event + Laplace, over the released sizes of these cells

**Sensitivity.** Prices W / q are public in each round, as q is released once before. One changed z moves one entry of
C1, so X' C1 changes in L1 by at most the maximum over events of (largest |x_i|_1 in the event) (largest price -
smallest price), computed exactly from public values. Were q exact and recomputed, every record of two cells would
change. Counts of positives and of cells: totals over groups are public, so the reference group's follow from the
others', and one changed z moves these by 2 in L1, or by 1 with two groups.

**Price.** ``num_rounds`` answers of each side and the cell sizes, composed by the accountant; the noise of a round is
calibrated to (epsilon, delta).

**A class that may read the attribute** (Section 4.1, Theorem 4.5), with ``rules`` by_group: what one public classifier
says, its contrary, 0 or 1, as chosen for each group by the exponential mechanism (:mod:`.oracle_releases`). The mixture
is then a table, and it needs the group at prediction. The theorem asks for a ``dual_bound`` above G - 1, and says
something of equal false positives alone.

**Less noise for the same guarantee**, both by default. ``release`` once: X' C1 is a sum over cells of price times the
cell's feature sum, so those sums alone, released once, answer every round; only the auditor is then paid by the round.
``num_directions``: what needs no z in beta1 - beta0 is computed from all features without noise; prices tilt it within
the leading principal directions of X, which are public. With ``every_round`` and all directions it is the paper's.

Deviations from the paper:
- Its accounting, ``noise_rule`` as_in_paper: epsilon' = epsilon / (4 sqrt(T ln(1 / delta))) of a round holds the
  first term of advanced composition at epsilon / 2; the second, left out, exceeds the rest for large epsilon. Noise
  scales and costs use exact cell shares, which are private: nothing is guaranteed, the accountant says inf, and
  ``epsilon_as_in_paper`` is the paper's number.
- The auditor releases counts over public sizes rather than rates, whose denominators are private too.
- Demographic parity and equal opportunity beside equalized odds; several groups against a reference.
- T, eta and B are settings: eta and T of the paper are reconstructed from a damaged text. ``num_rounds=None`` takes the
  T of its Theorem, an error where that is below one round, as it is for linear rules on data of common size.
- The finite class is ours: the paper names none.
- The two ways to less noise above.
- Regression answers the learner's question heuristically: the bounds for a perfect answer do not hold.
- Noise is exact discrete Laplace on a fine grid.

Shapes: N records, D features with a constant one, G groups, E events, R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from fairpate.config import ConfigError, Count, NotNegative, Positive, PrivacyTarget, PublishedConfig
from fairpate.methods.definition import AttributeMethod, Training
from fairpate.methods.oracle_releases import RULES_KJ, plain_rule
from fairpate.methods.oracle_sides import Setting, as_in_paper, composed, of_groups
from fairpate.methods.parity import Cells, FloatArray, ParityConfig
from fairpate.methods.parity_game import GameRules, play
from fairpate.methods.trained import Progress, Trained
from fairpate.nn.mixture import LINEAR, linear_rules
from fairpate.nn.models import scale_bytes
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.events import Event


class DpOracleLearnerConfig(ParityConfig):
    """Jagielski et al. 2019, Algorithm 3."""

    rules: Literal["linear", "by_group"] = Field(
        "linear",
        description="Of features alone; or by_group: of the group and of what a public linear rule says, by the "
        "exponential mechanism.",
    )
    num_rounds: Count | None = Field(25, description="T; null takes the paper's formula.")
    dual_bound: NotNegative = Field(2.0, description="B: what all multipliers add up to at most.")
    learning_rate: Positive | None = Field(0.5, description="eta; null takes the paper's formula.")
    ridge: Positive = Field(1.0, description="Added to X'X.")
    num_directions: Count | None = Field(
        16, description="Principal directions of features in which prices tilt rules; null: all, as in the paper."
    )
    release: Literal["every_round", "once"] = Field(
        "once", description="Answer every round under noise, as in the paper; or release feature sums of cells once."
    )
    frequency_share: float = Field(0.1, gt=0, lt=1, description="Of epsilon, for the sizes of cells.")
    feature_share: float = Field(0.45, gt=0, lt=1, description="Of epsilon, for the feature sums of `once`.")
    min_share: float = Field(0.01, gt=0, lt=1, description="Least released share of a cell; fewer is an error.")
    failure_probability: float = Field(0.05, gt=0, lt=1, description="beta of the paper's T.")
    noise_rule: Literal["accounted", "as_in_paper"] = Field(
        "accounted", description="as_in_paper: the paper's noise and epsilon; nothing is guaranteed."
    )


@dataclass(frozen=True, kw_only=True)
class OracleTrained(Trained):
    """With the rules (x, 1) . c_t < 0 as rows c_t, the game's outcome and the epsilon' of one release in a round.

    Of rules by group the public one alone; what is made of it is in ``mixing_GCC``.
    """

    coefficients_RD: FloatArray
    mean_multipliers: FloatArray
    shares_GE: FloatArray
    round_epsilon: float


def train(
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: DpOracleLearnerConfig,
    *,
    target: PrivacyTarget,
    num_groups: int,
    source: NoiseSource,
    admit: Callable[[Sequence[Event], str], None] = lambda *_: None,
    on_progress: Progress = lambda *_: None,
) -> OracleTrained:
    """Learn from public ``x`` (N, ...), bytes or floats, and binary ``y`` (N,), and private ``groups`` (N,).

    ``admit`` is called with all events, and where noise comes from, before the first release.

    ValueError for codes out of range, a cell below ``min_share`` and an epsilon too small for the paper's first round.
    """
    plain = scale_bytes(x).flatten(1).double().numpy()
    features = np.hstack([plain, np.ones((len(plain), 1))])
    cells = Cells.of(y.numpy(), groups.numpy(), num_groups=num_groups, constraint=config.constraint)
    if not config.reference_group < num_groups:
        raise ValueError(f"Expected reference_group < {num_groups}, got {config.reference_group}.")
    rules = _rules(config, target, num_records=len(features), num_features=features.shape[1], num_groups=num_groups)
    by_group = config.rules == "by_group"
    build = as_in_paper if config.noise_rule == "as_in_paper" else of_groups if by_group else composed
    setting = Setting(
        features=features, cells=cells, config=config, target=target, rules=rules, source=source, admit=admit
    )
    sides = build(setting)
    played = play(rules, sides.shares_GE, answer=sides.answer, violations=sides.violations, on_round=on_progress)
    answers = np.stack(played.answers)
    coefficients_RD = plain_rule(features, cells, ridge=config.ridge)[None] if by_group else answers
    positive_GJ = answers.mean(axis=0)
    return OracleTrained(
        # These rules say 1 below 0, those of a mixture above.
        model=linear_rules(-coefficients_RD, input_shape=tuple(x.shape[1:])),
        events=sides.events,
        noise=source.label,
        mixing_GCC=np.stack([1 - positive_GJ, positive_GJ], axis=2) if by_group else None,
        coefficients_RD=coefficients_RD,
        mean_multipliers=played.mean_multipliers,
        shares_GE=sides.shares_GE,
        round_epsilon=sides.round_epsilon,
        epsilon_as_in_paper=target.epsilon if config.noise_rule == "as_in_paper" else None,
    )


def published_num_rounds(
    config: DpOracleLearnerConfig, target: PrivacyTarget, *, num_records: int, num_groups: int, vc_dimension: int
) -> float:
    """The paper's T, a real number; below 1 it says that epsilon is too small for its theorem.

    A finite class has the logarithm of its size in the place of ``vc_dimension`` ln ``num_records`` (Remark 4.2).
    """
    by_group = config.rules == "by_group"
    size = num_groups * math.log(len(RULES_KJ)) if by_group else vc_dimension * math.log(num_records)
    complexity = size + math.log(2 / config.failure_probability)
    spread = 2 * (2 * num_groups * config.dual_bound + 1) * math.sqrt(math.log(1 / target.delta))
    gain = config.dual_bound * math.sqrt(math.log(4 * num_groups - 3)) * num_records * target.epsilon
    return gain / (spread * complexity)


def _rules(
    config: DpOracleLearnerConfig, target: PrivacyTarget, *, num_records: int, num_features: int, num_groups: int
) -> GameRules:
    num_rounds = config.num_rounds
    if num_rounds is None:
        published = published_num_rounds(
            config, target, num_records=num_records, num_groups=num_groups, vc_dimension=num_features
        )
        if not 1 <= published < math.inf:
            raise ValueError(
                f"The paper's number of rounds is {published:.3g} at epsilon {target.epsilon:g} for {num_records} "
                f"records and {num_features} features, less than one; raise epsilon or set num_rounds."
                if published < 1
                else "The paper's number of rounds is infinite without noise; set num_rounds."
            )
        num_rounds = math.floor(published)
    rate = config.learning_rate
    return GameRules(
        num_rounds=num_rounds,
        dual_bound=config.dual_bound,
        # ln(4 G - 3), as in the paper: of 4 (G - 1) multipliers, two signs and two labels, and of what they leave of B.
        learning_rate=0.5 * math.sqrt(math.log(4 * num_groups - 3) / num_rounds) if rate is None else rate,
        max_gap=config.max_gap,
        reference_group=config.reference_group,
    )


class OracleLearner(AttributeMethod):
    """Within the target for one sensitive attribute: a mixture of linear rules, two classes."""

    title: ClassVar[str] = "DP-oracle-learner"
    paper: ClassVar[str] = "Jagielski et al. 2019, arXiv 1812.02696, Algorithm 3"

    method: str = "dp_oracle_learner"
    student: PublishedConfig = PublishedConfig(model=LINEAR)
    dp_oracle_learner: DpOracleLearnerConfig = DpOracleLearnerConfig()

    @property
    def is_private(self) -> bool:
        """The paper's noise depends on private counts: it guarantees nothing."""
        return super().is_private and self.dp_oracle_learner.noise_rule != "as_in_paper"

    def check(self) -> None:
        """ConfigError for another relation, a published model that is not linear, and noise that is of linear rules."""
        section = self.dp_oracle_learner
        if section.rules == "by_group" and section.noise_rule == "as_in_paper":
            raise ConfigError("dp_oracle_learner.noise_rule: as_in_paper has linear rules; set rules=linear.")
        super().check()
        self.require_linear_mixture()

    @property
    def unread(self) -> dict[str, str]:
        """What other rules, releases and noises have."""
        settings = self.dp_oracle_learner
        by_group, as_in_paper = settings.rules == "by_group", settings.noise_rule == "as_in_paper"
        causes = (
            (settings.release == "every_round", "release", ("feature_share",)),
            (by_group, "rules", ("feature_share", "num_directions", "release")),
            (as_in_paper, "noise_rule", ("feature_share", "num_directions", "release", "frequency_share", "min_share")),
        )
        prefix = "dp_oracle_learner."
        return {prefix + field: prefix + cause for holds, cause, fields in causes if holds for field in fields}

    @property
    def learns_two_classes(self) -> bool:
        """And no more."""
        return True

    def train(self, training: Training) -> Trained:
        """The game of learner and auditor."""
        private = training.dataset.private
        with training.reporter.stage(self.method) as advance:
            return train(
                private.x,
                private.y,
                private.z,
                self.dp_oracle_learner,
                target=self.target,
                num_groups=training.dataset.num_groups,
                source=self.source,
                admit=training.admit,
                on_progress=advance,
            )
