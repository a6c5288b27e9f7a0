"""DP-postprocessing (Jagielski et al. 2019, "Differentially Private Fair Learning", arXiv 1812.02696, Algorithm 1).

A classifier Yhat was trained without the sensitive attribute. Its joint counts with labels and groups are released
under Laplace noise, and a linear programme on them mixes its predictions per group:

    n~[j, a, y] = n[j, a, y] + Lap(2 / epsilon)          one changed z moves two counts by 1
    p[k | j, a]: minimise the error of the mixture on n~, subject for every event to
    |rate_a(k) - rate_ref(k)| <= max_gap + slack_a,   slack_a = 4 ln(4 G / beta) / (min(n~_a, n~_ref) epsilon)

The guarantee is pure: epsilon for one person's sensitive attribute. Features and labels are not protected, so Yhat,
trained on them by SGD, may be published. With ``base`` dp_sgd whole records are protected: replacing one also moves two
counts by 1, adding one moves one. Either way, prediction needs the group.

A constant rule meets every constraint, so the programme always has a solution. The slack pays for the noise with
probability 1 - beta and often exceeds ``max_gap``; the result reports it. benchmarks/posthoc.py has the paper's bounds.

Deviations from the paper:
- Noise is an exact discrete Laplace variable, not a float. Noisy counts below 0 are set to 0.
- C classes: p mixes C predictions into C labels, and every label's rate is constrained. The slack grows by C - 1, since
  a rate that is a mean of C numbers moves by that much more, and its logarithm counts C^2 G cells: C = 2 is the paper.
- Demographic parity (its counts merge C cells, so its slack is C times as large), equal opportunity and equal false
  positives alone (which merge C - 1), in addition to equalized odds.
- A cell whose released share is below ``min_share`` is an error: a rate over it means nothing.
- ``slack=False`` leaves the slack out: fairer, still solvable, without the paper's bound on the error.
- A private Yhat, for a guarantee on whole records: only released counts are read, never their number N.

Shapes: N records, G groups, C classes, Y true labels (= C), K constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.optimize import linprog

from fairpate.config import FitConfig
from fairpate.fairness.rates import joint_table
from fairpate.methods import dp_sgd
from fairpate.methods.base import Trained, Training, arguments
from fairpate.methods.dp_sgd import DpSgdFamily
from fairpate.methods.parity import FloatArray, ParityConfig, require_codes, require_shares
from fairpate.privacy.accountant import Event, spent
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, NoiseSource
from fairpate.privacy.laplace import LaplaceReleases, add_laplace
from fairpate.types import Relation


class DpPostprocessingConfig(ParityConfig):
    """Jagielski et al. 2019, Algorithm 1. The base classifier is trained as `sgd` or `dp_sgd` says."""

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


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """``mixing_GCC[a, j, k]``: the probability of label k where Yhat says j for a member of group a.

    ``error`` is the programme's value and ``max_slack`` its largest slack, both on the released counts.
    """

    mixing_GCC: FloatArray
    error: float
    max_slack: float


@dataclass(frozen=True, kw_only=True)
class Postprocessed(Trained):
    """The trained model, the solution of the linear programme, and the noisy counts (G, Y, C) that the programme
    read."""

    mixing: Mixing
    counts_GYC: FloatArray


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
    """Noisy counts of ``predictions``, codes (N,) or probabilities (N, C), by group and label: shape (G, Y, C), >= 0.

    ``epsilon`` inf adds no noise. ValueError for codes out of range.
    """
    labels, groups = np.asarray(labels_N), np.asarray(groups_N)
    require_codes("labels", labels, num_classes)
    require_codes("groups", groups, num_groups)
    exact_GYC = joint_table(predictions, groups, num_groups=num_groups, num_classes=num_classes, labels_N=labels)
    # A replaced record, or group, leaves one count for another; an added record enters one.
    moved = 2.0 if relation == "replace one" else 1.0
    noisy_GYC = add_laplace(exact_GYC, l1_sensitivity=moved, epsilon=epsilon, source=source)
    # Post-processing: rates and shares are made of these, and a negative count has none.
    released_GYC: FloatArray = np.maximum(noisy_GYC, 0.0)
    return released_GYC


def fair_mixing(counts_GYC: FloatArray, config: DpPostprocessingConfig, *, epsilon: float) -> Mixing:
    """The linear programme on counts released under ``epsilon``; ``inf`` for exact ones, which need no slack.

    ValueError for counts that are negative or undefined, fewer than two groups, a cell below ``min_share``, and where
    the solver fails.
    """
    num_groups, num_labels, num_classes = counts_GYC.shape
    if num_groups < 2 or num_labels != num_classes or num_classes < 2:
        raise ValueError(f"Expected counts of >= 2 groups, >= 2 labels and as many classes, got {counts_GYC.shape}.")
    if not (counts_GYC >= 0).all() or not counts_GYC.any():
        raise ValueError("Expected counts without NaN or negative values, and some above 0.")
    if not (reference := config.reference_group) < num_groups:
        raise ValueError(f"Expected reference_group < {num_groups}, got {reference}.")
    parity_KGCC, slack_KG = _constraints(counts_GYC, config, epsilon)
    # Of the released total: where whole records are protected, their number is private.
    share_GYC = counts_GYC / counts_GYC.sum()
    # The error of predicting k where Yhat says j, (G, j, k).
    wrong_GCC = share_GYC.sum(axis=1)[:, :, None] - share_GYC.transpose(0, 2, 1)
    rows, bounds = [], []
    for row_GCC, bound_G in zip(parity_KGCC, slack_KG + config.max_gap, strict=True):
        for group in (group for group in range(num_groups) if group != reference):
            difference_GCC = np.zeros_like(row_GCC)
            difference_GCC[group], difference_GCC[reference] = row_GCC[group], -row_GCC[reference]
            # Both signs, because a linear programme has no absolute value.
            rows += [difference_GCC.ravel(), -difference_GCC.ravel()]
            bounds += [bound_G[group]] * 2
    # What a member of a group with one prediction gets is a distribution: it sums to 1.
    total = np.kron(np.eye(num_groups * num_classes), np.ones(num_classes))
    ones = np.ones(num_groups * num_classes)
    found = linprog(wrong_GCC.ravel(), np.array(rows), np.array(bounds), total, ones, bounds=(0, 1), method="highs")
    if found.status != 0 or found.x is None or found.fun is None:
        raise ValueError(f"The linear programme for the mixing has no solution that the solver finds: {found.message}")
    mixing_GCC = np.clip(found.x.reshape(wrong_GCC.shape), 0.0, 1.0)
    # The solver keeps bounds and sums up to a tolerance.
    mixing_GCC = mixing_GCC / mixing_GCC.sum(axis=2, keepdims=True)
    return Mixing(mixing_GCC=mixing_GCC, error=float(found.fun), max_slack=float(slack_KG.max()))


def _constraints(
    counts_GYC: FloatArray, config: DpPostprocessingConfig, epsilon: float
) -> tuple[FloatArray, FloatArray]:
    """The rates as linear functions of the mixing (K, G, C, C), and the slack of each group (K, G)."""
    num_groups, num_labels, num_classes = counts_GYC.shape
    # Of two labels, the rate of one determines that of the other.
    labels = [1] if num_classes == 2 else list(range(num_classes))
    # Counts of each event (G, E, C), and how many true labels an event merges.
    events_GEC, merged = counts_GYC, 1
    if config.constraint == "demographic_parity":
        events_GEC, merged = counts_GYC.sum(axis=1, keepdims=True), num_labels
    elif config.constraint == "equal_opportunity":
        events_GEC = counts_GYC[:, labels]
    elif config.constraint == "equal_false_positives":
        # The records of all labels but one.
        events_GEC, merged = (counts_GYC.sum(axis=1, keepdims=True) - counts_GYC)[:, labels], num_labels - 1
    cells_GE = events_GEC.sum(axis=2)
    require_shares(cells_GE / counts_GYC.sum(), config.min_share)
    if config.constraint in ("equal_opportunity", "equal_false_positives"):
        # Each of these events belongs to one label.
        pairs = list(enumerate(labels))
    else:
        pairs = [(event, label) for event in range(cells_GE.shape[1]) for label in labels]
    parity_KGCC = np.zeros((len(pairs), num_groups, num_classes, num_classes))
    slack_KG = np.zeros((len(pairs), num_groups))
    # A union bound over all noisy counts.
    logarithm = math.log(num_groups * num_labels * num_classes / config.failure_probability)
    for row, (event, label) in enumerate(pairs):
        parity_KGCC[row, :, :, label] = events_GEC[:, event] / cells_GE[:, event, None]
        if config.slack:
            # The paper's bound on both rates' errors with probability 1 - beta; every cell that is merged brings its
            # own noise.
            smaller_G = np.minimum(cells_GE[:, event], cells_GE[config.reference_group, event])
            slack_KG[row] = 4 * (num_classes - 1) * merged * logarithm / (smaller_G * epsilon)
    return parity_KGCC, slack_KG


class Postprocessing(DpSgdFamily):
    """Noise is calibrated to the target: one sensitive attribute is protected, or one record with a private base."""

    title: ClassVar[str] = "DP-postprocessing"
    paper: ClassVar[str] = "Jagielski et al. 2019, arXiv 1812.02696, Algorithm 1"

    method: str = "dp_postprocessing"
    dp_postprocessing: DpPostprocessingConfig = DpPostprocessingConfig()
    sgd: FitConfig = FitConfig()

    @property
    def protects_attribute_only(self) -> bool:  # type: ignore[override]
        """True unless the base is private too."""
        return self.dp_postprocessing.base == "sgd"

    @property
    def unread(self) -> dict[str, str]:
        """Fields that only train the other base."""
        unread = ("dp_sgd", "dp_postprocessing.count_share") if self.protects_attribute_only else ("sgd",)
        return super().unread | dict.fromkeys(unread, "dp_postprocessing.base")

    def check(self) -> None:
        """Raise ConfigError for what would undo the mixing, and for a target under another relation."""
        self.require_as_released()
        self.require_replacing()

    def train(self, training: Training) -> Postprocessed:
        """Train the base, and mix its predictions by group.

        ValueError as :func:`released_counts` and :func:`fair_mixing`, and for a target that the base cannot keep.
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
                steps = dp_sgd.calibrated_steps(self.dp_sgd, rest, num_records=len(private))
                base = dp_sgd.train_dp_sgd(
                    model,
                    private.x,
                    private.y,
                    steps,
                    relation=relation,
                    randomness=self.randomness(),
                    on_progress=advance,
                )
                events = base.events
                counted = LaplaceReleases(count=1, epsilon=share * target.epsilon, unit="record", relation=relation)
                # One seeded source is enough to make the result not private, so its label is the one that is stated.
                noise = source.label if base.noise == OS_ENTROPY else base.noise
            said_NC = said_labels(model, private.x)
            counts_GYC = released_counts(
                said_NC,
                private.y.numpy(),
                private.z.numpy(),
                epsilon=counted.epsilon,
                relation=counted.relation,
                source=source,
                num_groups=training.dataset.num_groups,
                num_classes=said_NC.shape[1],
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
        return Postprocessed(
            model=model,
            events=events,
            noise=noise,
            mixing_GCC=mixing.mixing_GCC,
            remarks=remarks,
            mixing=mixing,
            counts_GYC=counts_GYC,
        )
