"""Randomised response on the sensitive attribute (Mozannar et al. 2020, "Fair Learning with Private Demographic Data").

Everyone reports Z = A with odds exp(epsilon) to 1 against each other group: local privacy of A, hence the same pure
epsilon when one A is replaced, with no accountant. A is used once; drawing it anew for every epsilon, epoch or fold
would cost each time.

- ``one_step``: a fair learner without privacy on (X, Y, Z), A no feature: the baseline of PF-LD.
- ``two_step``: that on one half; on the other, statistics over A are recovered from those over Z,
  P[A = a, event] = sum_z inverse[a, z] P[Z = z, event], and the linear programme of DP-postprocessing mixes the
  learner's predictions per group. It needs the group at prediction.

Gaps over Z are smaller than over A: by (G pi - 1) / (G - 1) in balanced groups, pi = P[Z = A]. ``corrects_bound`` asks
the learner for that smaller gap, exact for two balanced groups, a rule of thumb otherwise; a multiplier on it is worth
as much less, so that the default learner's are scaled up.

Deviations from the paper: response is drawn exactly; counts recovered over A are clipped at 0 and scaled so that every
(label, prediction) keeps its public total; the bound's correction; any learner, by default the exponentiated gradient
of :mod:`fairpate.baselines.parity_game` over logistic regression. With a learner of several classes both forms have
several.

Shapes: N records, D features, R rules, G groups, C classes, Y true labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from fairpate.baselines.dp_postprocessing import Mixing, fair_mixing
from fairpate.baselines.method import Trained
from fairpate.baselines.parity import Cells, FloatArray, require_codes
from fairpate.baselines.parity_game import GameRules, fit_mixture
from fairpate.fairness.rates import joint_table
from fairpate.nn.mixture import linear_rules, said_labels
from fairpate.nn.models import scale_bytes
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.laplace import PureReleases, keep_probability, randomise_response
from fairpate.train_config import DpPostprocessingConfig, RandomisedResponseConfig

Learner = Callable[[Tensor, Tensor, Tensor, float], nn.Module]
"""Takes features (N, ...), labels (N,), reported groups (N,) and the gap to keep over these; gives a classifier."""


@dataclass(frozen=True, kw_only=True)
class ResponseTrained(Trained):
    """``mixing`` is the second step's programme, None for ``one_step``; with it a prediction needs the group."""

    mixing: Mixing | None


def train(
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: RandomisedResponseConfig,
    *,
    epsilon: float,
    num_groups: int,
    source: NoiseSource,
    generator: torch.Generator,
    num_classes: int = 2,
    learner: Learner | None = None,
) -> ResponseTrained:
    """Report every one of ``groups`` (N,) once, and learn from what was reported.

    ``epsilon`` 0 reports uniform groups, ``inf`` true ones. ``generator`` halves the records for ``two_step``.
    ValueError for codes out of range, for a cell that holds too few records, and for ``two_step`` with epsilon 0,
    where nothing can be recovered.
    """
    require_codes("labels", y.numpy(), num_classes)
    two_step = config.form == "two_step"
    inverse_GG = recovery(epsilon, num_groups) if two_step else None
    reported = torch.from_numpy(
        randomise_response(groups.numpy(), num_values=num_groups, epsilon=epsilon, source=source)
    )
    order = torch.randperm(len(y), generator=generator) if two_step else torch.arange(len(y))
    first, second = order.tensor_split([len(order) // 2 if two_step else len(order)])
    shrunk = shrinkage(epsilon, num_groups) if config.corrects_bound else 1.0
    learn = learner or exponentiated_gradient(config, num_groups, shrunk=shrunk)
    model = learn(x[first], y[first], reported[first], config.max_gap * shrunk)
    mixing = None
    if inverse_GG is not None:
        reported_GYC = joint_table(
            said_labels(model, x[second]),
            reported[second].numpy(),
            num_groups=num_groups,
            num_classes=num_classes,
            labels_N=y[second].numpy(),
        )
        mixing = fair_mixing(recovered_counts(reported_GYC, inverse_GG), _second_step(config), epsilon=math.inf)
    return ResponseTrained(
        model=model,
        events=(PureReleases(count=1, epsilon=epsilon),),
        noise=source.label,
        mixing_GCC=None if mixing is None else mixing.mixing_GCC,
        mixing=mixing,
    )


def recovery(epsilon: float, num_groups: int) -> FloatArray:
    """The inverse of the response, shape (G, G): true counts are expected to be this times reported ones.

    ValueError for epsilon 0, where all groups report alike.
    """
    keep = keep_probability(epsilon, num_groups)
    scale = num_groups * keep - 1
    if not epsilon > 0 or scale <= 0:
        raise ValueError(f"Expected epsilon > 0, got {epsilon}: what groups report does not depend on them.")
    inverse_GG = np.full((num_groups, num_groups), (keep - 1) / scale)
    np.fill_diagonal(inverse_GG, (num_groups - 2 + keep) / scale)
    return inverse_GG


def shrinkage(epsilon: float, num_groups: int) -> float:
    """How much smaller a gap is over reported than over true groups, when these are balanced."""
    return (num_groups * keep_probability(epsilon, num_groups) - 1) / (num_groups - 1)


def recovered_counts(reported_GYC: FloatArray, inverse_GG: FloatArray) -> FloatArray:
    """Counts over true groups: unbiased, then clipped at 0 and scaled back to each (label, prediction)'s total."""
    clipped_GYC = np.maximum(np.tensordot(inverse_GG, reported_GYC, axes=1), 0.0)
    found_YC, total_YC = clipped_GYC.sum(axis=0), reported_GYC.sum(axis=0)
    scale_YC = np.divide(total_YC, found_YC, out=np.zeros_like(total_YC), where=found_YC > 0)
    recovered_GYC: FloatArray = clipped_GYC * scale_YC
    return recovered_GYC


def exponentiated_gradient(config: RandomisedResponseConfig, num_groups: int, *, shrunk: float = 1.0) -> Learner:
    """The reduction of Agarwal et al. 2018 over logistic regression: a mixture of linear rules, for two classes.

    Where gaps are ``shrunk`` to a share of themselves, multipliers grow faster and higher by as much.
    """
    per_gap = 1 / shrunk if shrunk else 1.0

    def learn(x: Tensor, labels: Tensor, reported: Tensor, max_gap: float) -> nn.Module:
        rules = GameRules(
            num_rounds=config.num_rounds,
            dual_bound=config.dual_bound * per_gap,
            learning_rate=config.learning_rate * per_gap,
            max_gap=max_gap,
            reference_group=config.reference_group,
        )
        cells = Cells.of(labels.numpy(), reported.numpy(), num_groups=num_groups, constraint=config.constraint)
        features = scale_bytes(x).flatten(1).double().numpy()
        mixture = fit_mixture(features, cells, LogisticRegression(solver="liblinear"), rules)
        coefficients = [_coefficients(member, features.shape[1]) for member in mixture.members]
        return linear_rules(np.stack(coefficients), input_shape=tuple(x.shape[1:]))

    return learn


def _coefficients(member: Any, num_features: int) -> FloatArray:
    """Of a fitted logistic regression, or of a rule that always says the same."""
    if isinstance(member, LogisticRegression):
        linear: FloatArray = np.append(member.coef_[0], member.intercept_[0])
        return linear
    return np.append(np.zeros(num_features), 1.0 if member.classes_[0] == 1 else -1.0)


def _second_step(config: RandomisedResponseConfig) -> DpPostprocessingConfig:
    return DpPostprocessingConfig(
        constraint=config.constraint,
        max_gap=config.mixing_gap,
        min_share=config.min_share,
        reference_group=config.reference_group,
    )
