"""Logistic regression whose boundary does not vary with the group (Zafar, Valera, Gomez Rodriguez and Gummadi 2017,
"Fairness Constraints: Mechanisms for Fair Classification", arXiv 1507.05259), without privacy.

With s_i = 1 or -1 for the label of record i, x_i ending in a constant and z_ig = 1 for a member of group g,

    minimise over theta    mean_i log(1 + exp(-s_i theta . x_i)) + ridge / 2 |theta without its constant|^2
    subject to             |mean_i (z_ig - mean of z_g) theta . x_i| <= max_covariance    for every group g

The mean is the covariance of being in the group with the signed distance to the boundary, up to the length of theta: a
linear function of theta, so the problem is convex. It stands in for demographic parity: at 0 all groups have the same
mean distance, and labels are the signs of distances, so that neither follows from the other. Two groups have one
constraint, since the other group's covariance is the same with the other sign. ``max_covariance`` 0 leaves the subspace
in which all covariances vanish, on which nothing constrains; anything else is solved by sequential quadratic
programming, as by the authors.

Deviations from the paper:
- ``ridge``, small by default: with features that determine one another, or labels that features determine, the paper's
  minimum is not unique or not attained.
- Left out: accuracy under a business necessity clause (its Section 3.3), which minimises the covariance under a bound
  on the loss; support vector machines; and the later constraints on misclassification rates (Zafar et al. 2017, WWW),
  which are not convex.

Shapes: N records, D features with a constant one, G groups, J constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from scipy.linalg import null_space
from scipy.optimize import LinearConstraint, minimize
from scipy.special import expit
from torch import Tensor, nn

from fairpate.config import ConfigError, Positive, PublishedConfig, Section
from fairpate.methods.definition import Training, UnprotectedMethod
from fairpate.methods.parity import require_codes
from fairpate.methods.trained import NO_NOISE, Trained
from fairpate.nn.mixture import LINEAR, set_rule
from fairpate.nn.models import scale_bytes
from fairpate.privacy.events import PoissonGaussians

FloatArray = npt.NDArray[np.float64]
Objective = Callable[[Any], tuple[float, FloatArray]]
_MOST_FEATURES = 1000  # the solver keeps square matrices of them
_PRECISION, _MOST_STEPS = 1e-12, 2000


class CovarianceConfig(Section):
    """Zafar et al. 2017: no group varies with the signed distance to the boundary."""

    max_covariance: float = Field(
        0.0, ge=0, description="c: of being in a group with the signed distance to the boundary; inf: no constraint."
    )
    ridge: Positive = Field(1e-6, description="Times half the squared length of the coefficients, added to the loss.")


def train(
    model: nn.Module, x: Tensor, y: Tensor, groups: Tensor, config: CovarianceConfig, *, num_groups: int
) -> Trained:
    """Fit the linear ``model`` in place to ``x`` (N, ...), bytes or floats, binary ``y`` (N,) and ``groups`` (N,).

    ValueError for codes out of range, a group without records, too many features, and where the solver fails.
    """
    plain_ND = scale_bytes(x).flatten(1).double().numpy()
    features_ND = np.hstack([plain_ND, np.ones((len(plain_ND), 1))])
    theta_D = coefficients(features_ND, y.numpy(), groups.numpy(), config, num_groups=num_groups)
    covariance_G = covariances(features_ND, groups.numpy(), num_groups=num_groups) @ theta_D
    set_rule(model, torch.from_numpy(theta_D))
    return Trained(
        model=model.eval(),
        events=(PoissonGaussians(count=1, noise_multiplier=0.0, sampling_rate=1.0),),
        noise=NO_NOISE,
        remarks=(f"largest covariance of a group with the distance to the boundary: {abs(covariance_G).max():.3g}",),
    )


def coefficients(
    features_ND: FloatArray,
    labels_N: npt.NDArray[np.int64],
    groups_N: npt.NDArray[np.int64],
    config: CovarianceConfig,
    *,
    num_groups: int,
) -> FloatArray:
    """theta (D,); the last of ``features_ND`` is the constant. Errors as :func:`train`."""
    _check(features_ND, labels_N, groups_N, num_groups)
    objective = logistic_loss(features_ND, np.where(labels_N == 1, 1.0, -1.0), ridge=config.ridge)
    covariance_GD = covariances(features_ND, groups_N, num_groups=num_groups)
    if config.max_covariance == 0:
        basis_DK = null_space(covariance_GD[:-1])  # the last one's follow, as all add up to 0
        found_D: FloatArray = basis_DK @ _solved(_within(objective, basis_DK), basis_DK.shape[1])
        return found_D
    constrained_JD = covariance_GD[:1] if num_groups == 2 else covariance_GD
    limited = LinearConstraint(constrained_JD, -config.max_covariance, config.max_covariance)
    return _solved(objective, features_ND.shape[1], [limited] if config.max_covariance < math.inf else [])


def covariances(features_ND: FloatArray, groups_N: npt.NDArray[np.int64], *, num_groups: int) -> FloatArray:
    """Of being in each group with each feature, (G, D)."""
    member_NG = np.eye(num_groups)[groups_N]
    covariance_GD: FloatArray = (member_NG - member_NG.mean(axis=0)).T @ features_ND / len(features_ND)
    return covariance_GD


def logistic_loss(features_ND: FloatArray, signs_N: FloatArray, *, ridge: float) -> Objective:
    """The mean loss under ``ridge``, with its gradient, as a function of theta; the last feature is not penalised."""
    penalised_D = np.append(np.ones(features_ND.shape[1] - 1), 0.0)

    def objective(theta_D: FloatArray) -> tuple[float, FloatArray]:
        margins_N, kept_D = signs_N * (features_ND @ theta_D), penalised_D * theta_D
        # ln(1 + e^-m), which overflows for no margin.
        value = np.logaddexp(0, -margins_N).mean() + ridge / 2 * kept_D @ kept_D
        slope_D = -features_ND.T @ (signs_N * expit(-margins_N)) / len(signs_N)
        return float(value), slope_D + ridge * kept_D

    return objective


def _within(objective: Objective, basis_DK: FloatArray) -> Objective:
    """The same as a function of coordinates in a subspace."""

    def inside(u_K: FloatArray) -> tuple[float, FloatArray]:
        value, slope_D = objective(basis_DK @ u_K)
        return value, basis_DK.T @ slope_D

    return inside


def _solved(objective: Objective, size: int, constraints: Sequence[LinearConstraint] = ()) -> FloatArray:
    """The minimum of ``objective``, from 0."""
    # Convex, so that the start decides nothing but the number of steps; at 0 every covariance is 0 and within bounds.
    found = minimize(
        objective,
        np.zeros(size),
        jac=True,
        method="SLSQP",
        constraints=constraints,
        options={"ftol": _PRECISION, "maxiter": _MOST_STEPS},
    )
    if not found.success:
        raise ValueError(f"The solver found no minimum ({found.message}); raise ridge or scale the features.")
    theta_D: FloatArray = found.x
    return theta_D


def _check(
    features_ND: FloatArray, labels_N: npt.NDArray[np.int64], groups_N: npt.NDArray[np.int64], num_groups: int
) -> None:
    require_codes("labels", labels_N, 2)
    require_codes("groups", groups_N, num_groups)
    missing = np.flatnonzero(np.bincount(groups_N, minlength=num_groups) == 0)
    if len(missing):
        raise ValueError(f"Expected records of every group, got none of group {missing[0]}; merge groups.")
    if features_ND.shape[1] > _MOST_FEATURES:
        raise ValueError(
            f"Expected at most {_MOST_FEATURES} features with the constant, got {features_ND.shape[1]}; choose f_ld."
        )


class CovarianceConstraint(UnprotectedMethod):
    """No privacy: for comparison only. Two classes."""

    title: ClassVar[str] = "covariance constraint"
    paper: ClassVar[str] = "Zafar et al. 2017, arXiv 1507.05259"

    method: str = "covariance_constraint"
    student: PublishedConfig = PublishedConfig(model=LINEAR)
    covariance_constraint: CovarianceConfig = CovarianceConfig()

    @property
    def protects_attribute_only(self) -> bool:
        """Compared with methods that do: it reads no attribute as a feature."""
        return True

    @property
    def learns_two_classes(self) -> bool:
        """A boundary has two sides."""
        return True

    def check(self) -> None:
        """ConfigError for a model that is not linear."""
        if self.student.model.name != LINEAR.name:
            raise ConfigError(
                f"student.model.name: {self.method} fits a linear rule, got {self.student.model.name}; set logistic."
            )

    def train(self, training: Training) -> Trained:
        """On private records, without noise."""
        private = training.dataset.private
        with training.reporter.stage(self.method):
            trained = train(
                training.model,
                private.x,
                private.y,
                private.z,
                self.covariance_constraint,
                num_groups=training.dataset.num_groups,
            )
        for remark in trained.remarks:
            training.reporter.note("covariance", remark)
        return trained.of_unit(training.dataset.unit)
