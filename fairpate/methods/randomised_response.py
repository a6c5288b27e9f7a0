"""Randomised response on the sensitive attribute (Mozannar et al. 2020, "Fair Learning with Private Demographic Data").

For each record with the group A a group Z is reported: A is exp(epsilon) times as likely as each other group. This is
local privacy of A, hence a pure guarantee with the same epsilon if one A is replaced, without an accountant. Each A is
randomised once; doing so again for every epsilon, epoch or fold would cost epsilon each time.

- ``one_step``: a fair learner without privacy on (X, Y, Z), where A is not a feature: the baseline of PF-LD.
- ``two_step``: the same on one half of the records. On the other half, statistics over A are recovered from those over
  Z, P[A = a, event] = sum_z inverse[a, z] P[Z = z, event], and the linear programme of DP-postprocessing mixes the
  learner's predictions per group. Prediction then needs the group.

Gaps over Z are smaller than over A: by the factor (G pi - 1) / (G - 1) in balanced groups, with pi = P[Z = A].
``corrects_bound`` lowers the learner's allowed gap by this factor, which is exact for two balanced groups and a rule of
thumb otherwise. The multipliers of the default learner are raised by the same factor.

Deviations from the paper: responses are sampled exactly; counts recovered over A are clipped at 0 and scaled so that
every (label, prediction) keeps its public total; the allowed gap is corrected; the learner may be chosen.

Shapes: N records, D features, R rules, G groups, C classes, Y true labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fairpate.config import Count, Fraction, Positive
from fairpate.fairness.rates import indices, joint_table
from fairpate.lazy import sklearn, torch
from fairpate.methods.base import PrivateMethod, Stream, Trained, Training
from fairpate.methods.dp_fair_learning import (
    IN_ORDER,
    WITHOUT_CELLS,
    DpPostprocessingConfig,
    GameRules,
    fair_mixing,
    fit_mixture,
)
from fairpate.methods.f_ld import FldConfig, parity_of, train_f_ld
from fairpate.methods.parity import ParityCells, ParityConfig
from fairpate.privacy.accountant import PureReleases, spent
from fairpate.privacy.laplace import keep_probability, randomise_response
from fairpate.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor, nn


class RandomisedResponseConfig(ParityConfig):
    """Settings of randomised response (Mozannar et al. 2020). `num_rounds`, `dual_bound` and `learning_rate` are read
    only by the learner `exponentiated_gradient`."""

    form: Literal["one_step", "two_step"] = "one_step"
    learner: Literal["exponentiated_gradient", "f_ld"] = Field(
        "exponentiated_gradient",
        description="`exponentiated_gradient` over logistic regression, for two classes; or F-LD, with the settings "
        "in `f_ld`.",
    )
    corrects_bound: bool = Field(
        True, description="Give the learner a smaller max_gap, because gaps shrink over reported groups."
    )
    mixing_gap: Fraction = Field(1e-4, description="Largest gap over true groups that the second step allows.")
    num_rounds: Count = 50
    dual_bound: Positive = Field(2.0, description="Bound on the sum of all multipliers.")
    learning_rate: Positive = Field(0.5, description="Learning rate of the multipliers.")


def recovery(epsilon: float, num_groups: int) -> FloatArray:
    """Return the inverse (G, G) of the response matrix: it maps expected counts of reported groups to true counts.

    ValueError for epsilon 0, where reports do not depend on the group.
    """
    keep = keep_probability(epsilon, num_groups)
    scale = num_groups * keep - 1
    if not epsilon > 0 or scale <= 0:
        raise ValueError(
            f"Expected epsilon > 0, got {epsilon}, at which reports do not depend on the groups; raise it."
        )
    # The inverse of keep on the diagonal and (1 - keep) / (G - 1) elsewhere.
    inverse_GG = np.full((num_groups, num_groups), (keep - 1) / scale)
    np.fill_diagonal(inverse_GG, (num_groups - 2 + keep) / scale)
    return inverse_GG


def shrinkage(epsilon: float, num_groups: int) -> float:
    """Return the factor by which a fairness gap shrinks if it is measured over reported instead of true groups, for
    groups of equal sizes. The learner's allowed gap is multiplied by this factor, because the learner reads reported
    groups."""
    return (num_groups * keep_probability(epsilon, num_groups) - 1) / (num_groups - 1)


def recovered_counts(reported_GYC: FloatArray, inverse_GG: FloatArray) -> FloatArray:
    """Estimate counts by true group, label and prediction from ``reported_GYC``, counts by reported group, label and
    prediction.

    Unbiased estimates are clipped at 0. They are then rescaled, so that the sum over groups stays the same for each
    label and prediction.
    """
    # Unbiased estimates of small counts fall below 0. Totals over groups are known: labels and predictions are public.
    clipped_GYC = np.maximum(np.tensordot(inverse_GG, reported_GYC, axes=1), 0.0)
    found_YC, total_YC = clipped_GYC.sum(axis=0), reported_GYC.sum(axis=0)
    scale_YC = np.divide(total_YC, found_YC, out=np.zeros_like(total_YC), where=found_YC > 0)
    return clipped_GYC * scale_YC


class RandomisedResponse(PrivateMethod):
    """Local differential privacy for the sensitive attribute: a fair learner reads only randomised groups."""

    title: ClassVar[str] = "randomised response"
    paper: ClassVar[str] = "Mozannar et al. 2020"
    family: ClassVar[str] = "rates"
    colour: ClassVar[int] = 0
    protects_attribute_only: ClassVar[bool] = True
    failed_checks: ClassVar[Mapping[str, str]] = WITHOUT_CELLS | IN_ORDER

    method: str = "randomised_response"
    randomised_response: RandomisedResponseConfig = RandomisedResponseConfig()
    f_ld: FldConfig = FldConfig()

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it. A learner disables fields that only the other
        learner reads; the form `one_step` disables fields that only the second step of `two_step` reads."""
        by_f_ld, one_step = self.randomised_response.learner == "f_ld", self.randomised_response.form == "one_step"
        game = ("num_rounds", "dual_bound", "learning_rate", "max_gap", "corrects_bound") if by_f_ld else ()
        steps = ("mixing_gap", "min_share") if one_step else ()
        both = ("constraint", "reference_group") if one_step and by_f_ld else ()
        learner, form = "randomised_response.learner", "randomised_response.form"
        causes = dict.fromkeys((*game, *both), learner) | dict.fromkeys(steps, form)
        others = {} if by_f_ld else {"f_ld": learner}
        return super().unread | others | {f"randomised_response.{field}": cause for field, cause in causes.items()}

    @property
    def learns_two_classes(self) -> bool:  # type: ignore[override]
        """True for the learner `exponentiated_gradient`, which learns two classes. The other learner, F-LD (fairness by
        Lagrange multipliers), learns any number of classes."""
        return self.randomised_response.learner == "exponentiated_gradient"

    publishes_linear_rules = learns_two_classes  # the other learner's rules

    @property
    def publishes_mixture(self) -> bool:  # type: ignore[override]
        """True if the published classifier draws labels at random: with the learner `exponentiated_gradient`, whose
        model is a mixture of linear rules, or with the form `two_step`, which changes predictions at random by
        group."""
        return self.learns_two_classes or self.randomised_response.form == "two_step"

    def learned(
        self, training: Training, x: Tensor, labels: Tensor, reported: Tensor, *, max_gap: float, shrunk: float
    ) -> nn.Module:
        """Fit the configured learner to features (N, ...), labels (N,) and reported groups (N,); return the classifier.

        ``max_gap``: the allowed gap over reported groups. ``shrunk``: the ratio of gaps over reported groups to those
        over true groups. The exponentiated gradient is the reduction of Agarwal et al. 2018 over logistic regression: a
        mixture of linear rules, for two classes. Its learning rate and its bound on multipliers are divided by
        ``shrunk``.
        """
        config, dataset = self.randomised_response, training.dataset
        if config.learner == "f_ld":
            # F-LD drives violations to 0 for any allowed gap.
            parity, generator = parity_of(self.f_ld, dataset), training.generator(Stream.TRAINING)
            return train_f_ld(training.model, x, labels, reported, self.f_ld, parity=parity, generator=generator)
        from fairpate.nn.fit import linear_rules  # a configuration is read without torch
        from fairpate.nn.models import scale_bytes

        # Uniform reports show no gap, and there is nothing to scale.
        per_gap = 1 / shrunk if shrunk else 1.0
        scaled = {"dual_bound": config.dual_bound * per_gap, "learning_rate": config.learning_rate * per_gap}
        rules = GameRules(max_gap=max_gap, **config.model_dump(include={"num_rounds", "reference_group"}) | scaled)
        cells = ParityCells.of(labels, reported, num_groups=dataset.num_groups, constraint=config.constraint)
        features = scale_bytes(x).flatten(1).double().numpy()
        members = fit_mixture(features, cells, sklearn.linear_model.LogisticRegression(solver="liblinear"), rules)
        coefficients = []
        for member in members:
            if isinstance(member, sklearn.linear_model.LogisticRegression):
                coefficients.append(np.append(member.coef_[0], member.intercept_[0]))
            else:  # a constant rule
                constant = 1.0 if member.classes_[0] == 1 else -1.0
                coefficients.append(np.append(np.zeros(features.shape[1]), constant))
        return linear_rules(np.stack(coefficients), input_shape=tuple(x.shape[1:]))

    def train(self, training: Training) -> Trained:
        """Randomise the group of each record once, learn from the reported groups, and return the model.

        ValueError for a label or group out of range, and for too few records of a group with a fairness event, such as
        a true label.
        """
        from fairpate.nn.fit import said_labels  # a configuration is read without torch

        dataset, config, epsilon = training.dataset, self.randomised_response, self.target.epsilon
        x, y, num_groups = dataset.private.x, dataset.private.y, dataset.num_groups
        indices("labels", y.numpy(), dataset.num_classes)
        two_step = config.form == "two_step"
        inverse_GG = recovery(epsilon, num_groups) if two_step else None
        events, source = (PureReleases(count=1, epsilon=epsilon),), self.source
        # Once, before anything is learned: any further answer about the same attribute would cost epsilon again.
        codes_N = randomise_response(dataset.private.z.numpy(), num_values=num_groups, epsilon=epsilon, source=source)
        reported = torch.from_numpy(codes_N)
        # Two halves: a rule predicts the records that it was fitted to too well, and would mislead the second step.
        generator = training.generator(Stream.TRAINING)
        order = torch.randperm(len(y), generator=generator) if two_step else torch.arange(len(y))
        # With one step the first part is all records.
        first, second = order.tensor_split([len(order) // 2 if two_step else len(order)])
        # Every reported group mixes true ones: a gap between them is a share of the true gap, and so is the bound.
        shrunk = shrinkage(epsilon, num_groups) if config.corrects_bound else 1.0
        mixing_GCC = None
        # An error of the learner depends on the reports, and so reveals something about them.
        with training.reporter.stage(self.method), spent(events, noise=source.label):
            gaps = {"max_gap": config.max_gap * shrunk, "shrunk": shrunk}
            model = self.learned(training, x[first], y[first], reported[first], **gaps)
            if inverse_GG is not None:
                said_NC, labels_N, groups_N = said_labels(model, x[second]), y[second].numpy(), reported[second].numpy()
                numbers = {"num_groups": num_groups, "num_classes": dataset.num_classes}
                reported_GYC = joint_table(said_NC, groups_N, labels_N=labels_N, **numbers)
                shared = config.model_dump(include={"constraint", "min_share", "reference_group"})
                rules = DpPostprocessingConfig(max_gap=config.mixing_gap, **shared)
                # Without slack: its formula is that of Laplace noise on counts, and these have none.
                mixing_GCC = fair_mixing(recovered_counts(reported_GYC, inverse_GG), rules, epsilon=math.inf).mixing_GCC
        return Trained(model=model, events=events, noise=source.label, mixing_GCC=mixing_GCC)
