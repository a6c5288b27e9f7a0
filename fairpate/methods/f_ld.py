"""The Lagrangian methods: F-LD and PF-LD (Tran, Fioretto and Van Hentenryck 2021, arXiv 2009.12562); covariances.

F-LD (Tran, Fioretto and Van Hentenryck 2021, "Differentially Private and Fair Deep Learning: A Lagrangian Dual
Approach", arXiv 2009.12562): fairness by Lagrange multipliers, without privacy.

With v_i the violation of constraint i (:mod:`fairpate.methods.parity`) and one epoch at a time,

    lambda_i <- min(lambda_max, lambda_i + s |v_i(D)|),   then for every batch B
    theta    <- theta - a grad( J(B) + sum_i lambda_i |v_i(B)| )

Deviations from the paper:
- Multipliers move before an epoch and not after it: with one warm-up epoch more this is the paper's order.
- ``two_sided`` multipliers, one for each direction of a violation, fall again when it turns; the paper's only rise.
- A ``tolerance`` that raises no multiplier, any number of classes, momentum and Adam.

Shapes: N records, B of a batch, C classes, U populations, G groups, K values of h (see mean_parity).

Logistic regression whose boundary does not vary with the group (Zafar, Valera, Gomez Rodriguez and Gummadi 2017,
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

PF-LD (Tran, Fioretto and Van Hentenryck 2021, "Differentially Private and Fair Deep Learning: A Lagrangian Dual
Approach", arXiv 2009.12562): fairness by Lagrange multipliers, private for the sensitive attribute.

The steps are those of :mod:`fairpate.methods.f_ld`. What is hidden is the sensitive attribute alone: features, labels
and their number are public. Released are

    sizes      n~_i = n_i + noise                                                               once, unless declared
    violation  v~_i = mean over P_i of clip(h) - sum over G_i of clip(h) / n~_i + noise         before every epoch
    gradient   sum_i mu_i (mean over P_i of clip(grad h) - sum over G_i of clip(grad h) / n~_i) + noise    every batch

with mu_i = lambda_i sign(v~_i); grad J reads no attribute and has no noise. One changed attribute moves a record from
one group to another, which moves a violation by at most C_d sqrt(1 / n~_i^2 + 1 / n~_j^2) and a gradient by at most
C_p |mu_i / n~_i - mu_j / n~_j| over the batch's share of the records. Batches of an epoch are a public partition, so a
record enters one gradient per epoch; on secret Poisson samples the mixture bound applies.

Deviations from the paper (benchmarks/reproductions/pf_ld_as_in_paper.py runs it as printed):
- Sizes are released or declared. The paper's are private, and with them its sensitivities are too small.
- The sign is that of a violation released with its sign; the paper's code takes the exact one for free.
- Clipping acts on population and group alike. On the group alone it makes a violation of its own.
- The gradient's noise follows the multipliers as they are, not their largest value.
- Multipliers move before an epoch and not after it, without the release that no step reads.
- What F-LD's deviate in.

Shapes: N records, B of a batch, C classes, U populations, G groups, K values of h (see mean_parity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from scipy.linalg import null_space
from scipy.optimize import LinearConstraint, minimize
from scipy.special import expit
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import (
    ConfigError,
    Count,
    CountOrZero,
    FitConfig,
    NotNegative,
    Positive,
    PrivacyTarget,
    PublishedConfig,
    Section,
)
from fairpate.data import Dataset
from fairpate.methods.base import NO_NOISE, AttributeMethod, Progress, Trained, Training, UnprotectedMethod, arguments
from fairpate.methods.parity import UNKNOWN, DualAscent, MeanParity, ValueAlong, require_codes
from fairpate.nn.fit import LINEAR, Optimizer, batch_bounds, epoch_learning_rate, predict_logits, set_rule
from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.per_example import GuidedGradients
from fairpate.nn.private_fit import GaussianNoise, PoissonBatches, PrivateRandomness
from fairpate.privacy import accountant
from fairpate.privacy.events import Event, PoissonGaussians
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians
from fairpate.terminal import Reporter


class FldConfig(Section):
    """F-LD: means of groups are held to those of the population by Lagrange multipliers."""

    constraint: Literal["demographic_parity", "equalized_odds", "accuracy_parity"] = Field(
        "demographic_parity", description="Means of predictions, of predictions per true label, or of the loss."
    )
    sharpness: Positive = Field(
        1.0, description="Of the logits whose probabilities are compared: means come closer to those of labels."
    )
    warmup_epochs: CountOrZero = Field(20, description="First epochs without constraints; they read no group.")
    epochs: CountOrZero = Field(50, description="Epochs under constraints.")
    batch_size: Count = 256
    optimizer: Literal["sgd", "adam"] = "adam"
    learning_rate: Positive = 1e-3
    momentum: float = Field(0.9, ge=0, lt=1, description="Of SGD.")
    schedule: Literal["constant", "cosine"] = "constant"
    multipliers: Literal["absolute", "two_sided"] = Field(
        "two_sided", description="Rise with |violation|, act in its direction, as in the paper; or one per direction."
    )
    dual_step: NotNegative = Field(0.5, description="What a violation of 1 adds to its multiplier; 0 switches off.")
    max_multiplier: NotNegative = Field(5.0, description="lambda_max; 0 is plain training.")
    tolerance: NotNegative = Field(0.0, description="Violation that raises no multiplier.")

    @property
    def fit(self) -> FitConfig:
        """The optimiser and its schedule, over all epochs."""
        return FitConfig(
            epochs=self.warmup_epochs + self.epochs,
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            schedule=self.schedule,
        )


def train_f_ld(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: FldConfig,
    *,
    parity: MeanParity,
    generator: torch.Generator,
    allow_empty_cells: bool = False,
    on_progress: Progress = lambda *_: None,
) -> Trained:
    """F-LD, without privacy: ``model`` in place on ``x`` (N, ...), ``y`` and ``groups`` (N,), some perhaps ``UNKNOWN``.

    A cell that a batch lacks has no violation there. ValueError for a cell that nobody is in, unless that is allowed:
    it has no constraint then.
    """
    cells = parity.cells(y, groups)
    sizes_UG = parity.group_sizes(cells)
    if not allow_empty_cells:
        require_members(sizes_UG)
    descent, ascent = Descent(model, x, y, config, generator), Ascent(parity, config)
    for epoch in range(config.warmup_epochs + config.epochs):
        if epoch >= config.warmup_epochs:
            exact_UGK = measured_violations(model, x, y, cells, parity=parity, sizes_UG=sizes_UG)
            # A cell that nobody is in has no mean, and its multiplier stays at 0.
            ascent.step(torch.where((sizes_UG > 0)[..., None], exact_UGK, 0.0))
        for rows, _ in descent.batches():
            outputs = model(descent.features(rows))
            loss = functional.cross_entropy(outputs, y[rows])
            if ascent.is_active:
                loss = loss + _penalty(outputs, y[rows], cells[rows], parity, ascent)
            descent.step(list(torch.autograd.grad(loss, descent.parameters)), epoch)
        on_progress(epoch + 1, config.warmup_epochs + config.epochs)
    # An event without noise: that private records were read is stated, and costs infinity.
    event = PoissonGaussians(count=1, noise_multiplier=0.0, sampling_rate=1.0)
    return Trained(model=model.eval(), events=(event,), noise=NO_NOISE)


def require_members(sizes_UG: Tensor) -> None:
    """ValueError naming a constrained cell that has no record."""
    for population, group in (sizes_UG == 0).nonzero().tolist():
        label = f" with label {population}" if len(sizes_UG) > 1 else ""
        raise ValueError(f"Expected records of every group, got none of group {group}{label}; merge groups.")


@torch.no_grad()
def measured_violations(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    cells: Tensor,
    *,
    parity: MeanParity,
    sizes_UG: Tensor,
    clip_value: float = math.inf,
) -> Tensor:
    """The violations of all records, (U, G, K) ``float64``, by the model in evaluation mode; then in training mode.

    Exact, and so private. ``clip_value`` bounds the L2 norm of a record's values.
    """
    values_NK = parity.values(predict_logits(model, x), y).double()
    model.train()
    norms_N = torch.linalg.vector_norm(values_NK, dim=1, keepdim=True)
    clipped_NK = values_NK * (clip_value / norms_N).clamp(max=1) if clip_value < math.inf else values_NK
    return parity.violations(clipped_NK, y, cells, sizes_UG=sizes_UG)


class Ascent:
    """The multipliers of all constraints; a positive one pushes the group's mean up to the population's."""

    def __init__(self, parity: MeanParity, config: FldConfig) -> None:
        self._two_sided, self._tolerance = config.multipliers == "two_sided", config.tolerance
        self.multipliers_UGK = torch.zeros(parity.shape, dtype=torch.float64)
        size = self.multipliers_UGK.numel() * (2 if self._two_sided else 1)
        self._ascent = (
            DualAscent(size, learning_rate=config.dual_step, cap=config.max_multiplier)
            if config.max_multiplier
            else None
        )

    @property
    def is_active(self) -> bool:
        """Whether any constraint pulls at the model."""
        return bool(self.multipliers_UGK.any())

    def step(self, violations_UGK: Tensor) -> None:
        """Ascend signed violations."""
        if self._ascent is None:
            return
        violation_J = violations_UGK.flatten().numpy()
        if self._two_sided:
            both = self._ascent.step(np.concatenate([violation_J, -violation_J]) - self._tolerance)
            signed_J = both[: len(violation_J)] - both[len(violation_J) :]
        else:
            # The direction is that of the numbers given: PF-LD gives noisy ones, whose sign is free.
            signed_J = self._ascent.step(np.abs(violation_J) - self._tolerance) * np.sign(violation_J)
        self.multipliers_UGK = torch.from_numpy(signed_J.copy()).view_as(self.multipliers_UGK)

    def penalty(self, violations_UGK: Tensor) -> Tensor:
        """``lambda |violation|`` of the paper, or multiplier times violation; shape (U, G, K)."""
        products = self.multipliers_UGK.to(violations_UGK) * violations_UGK
        return products if self._two_sided else self.multipliers_UGK.abs().to(violations_UGK) * violations_UGK.abs()


class Descent:
    """The model, its optimiser and its batches; all but secret batches read features and labels only."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        config: FldConfig,
        generator: torch.Generator,
    ) -> None:
        if len(x) != len(y) or not len(x):
            raise ValueError(f"Expected one label per record and one record at least, got {len(x)} and {len(y)}.")
        self._x, self._fit, self._generator = x, config.fit, generator
        self._memory_format = memory_format_for(x)
        to_memory_format(model.train(), self._memory_format)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = Optimizer(self.parameters, self._fit)

    def batches(self, secret: PoissonBatches | None = None) -> Iterator[tuple[Tensor, float]]:
        """The rows of every batch of an epoch, and the share of all records that it stands for."""
        size = len(self._x)
        if secret is not None:
            # As many samples as a partition has batches; each stands for a share of the records, whatever it really
            # holds.
            for _ in range(math.ceil(size / self._fit.batch_size)):
                yield secret.next(), min(1.0, self._fit.batch_size / size)
            return
        order, bounds = torch.randperm(size, generator=self._generator), batch_bounds(size, self._fit.batch_size)
        for rows in torch.split(order, np.diff(bounds).tolist()):
            yield rows, len(rows) / size

    def features(self, rows: Tensor) -> Tensor:
        """A batch as the model reads it."""
        return scale_bytes(self._x.index_select(0, rows)).contiguous(memory_format=self._memory_format)

    def step(self, gradients: list[Tensor], epoch: int) -> None:
        """ValueError for a gradient that is not finite."""
        # One number for all parameters: what is not finite anywhere shows in the sum of norms.
        if not math.isfinite(sum(torch._foreach_norm(gradients))):
            raise ValueError("A gradient is not finite; lower the learning rate or scale the features.")
        self._optimizer.step(gradients, epoch_learning_rate(self._fit, epoch))


def _penalty(outputs: Tensor, y: Tensor, cells: Tensor, parity: MeanParity, ascent: Ascent) -> Tensor:
    """What the multipliers add to the loss of a batch; cells without records in it add 0."""
    sizes_UG = parity.group_sizes(cells)
    # By 1 in the place of 0: `where` below would pass on the gradient of what is not a number.
    violations_UGK = parity.violations(parity.values(outputs, y), y, cells, sizes_UG=sizes_UG.clamp(min=1))
    there_UG1 = (sizes_UG > 0)[..., None]
    return torch.where(there_UG1, ascent.penalty(violations_UGK), 0.0).sum()


class FLd(UnprotectedMethod):
    """No privacy: for comparison only."""

    title: ClassVar[str] = "F-LD"
    paper: ClassVar[str] = "Tran, Fioretto and Van Hentenryck 2021, arXiv 2009.12562"

    method: str = "f_ld"
    f_ld: FldConfig = FldConfig()

    @property
    def protects_attribute_only(self) -> bool:
        """Compared with methods that do: it reads no attribute as a feature."""
        return True

    def train(self, training: Training) -> Trained:
        """On private records, without noise."""
        parity = told(parity_of(self.f_ld, training.dataset), self.f_ld, training.reporter)
        with training.reporter.stage(self.method) as advance:
            trained = train_f_ld(
                **arguments(training, groups=True), config=self.f_ld, parity=parity, on_progress=advance
            )
        return trained.of_unit(training.dataset.unit)


def told(parity: MeanParity, config: FldConfig, reporter: Reporter) -> MeanParity:
    """``parity``, after a warning where it may level down."""
    warning = parity.levels_down(config.max_multiplier)
    if warning is not None:
        reporter.note("warning", warning)
    return parity


def parity_of(config: FldConfig, dataset: Dataset) -> MeanParity:
    """The constraint of ``config`` over the groups of a data set."""
    return MeanParity(
        constraint=config.constraint,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        sharpness=config.sharpness,
    )


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


class PfLdConfig(FldConfig):
    """PF-LD: F-LD that hides the sensitive attribute. Its noise follows from the target."""

    clip_norm: Positive = Field(1.0, description="C_p, of a record's gradient in a group's term.")
    clip_value: Positive = Field(1.0, description="C_d, of what a record adds to a group's mean; probabilities need 1.")
    dual_share: float = Field(0.2, gt=0, lt=1, description="Of the budget, for the violations.")
    size_share: float = Field(0.02, gt=0, lt=1, description="Of the budget, for the sizes of groups.")
    group_sizes: tuple[Positive, ...] | None = Field(
        None, description="Public sizes, those of one label after another for equalized odds; null: released once."
    )
    min_group_share: float = Field(
        0.02, gt=0, le=1, description="Declared least share of a group in its population; smaller sizes count as that."
    )
    batches: Literal["public", "poisson"] = Field(
        "public", description="A partition known to everybody, drawn anew for each epoch; or secret samples."
    )

    @model_validator(mode="after")
    def _shares_leave_a_rest(self) -> PfLdConfig:
        if self.dual_share + self.size_share >= 1:
            raise ValueError(
                f"Expected dual_share + size_share < 1, got {self.dual_share} + {self.size_share}: gradients take the "
                "rest."
            )
        return self


@dataclass(frozen=True, kw_only=True)
class PfLdNoise:
    """Noise multipliers: standard deviations over what one changed attribute may move. 0 is no noise."""

    gradient: float
    violation: float
    size: float


@dataclass(frozen=True, kw_only=True)
class Released:
    """What PF-LD knew before an epoch: all of it public once released. Shapes (U, G, K) and, of sizes, (U, G)."""

    violations: Tensor
    multipliers: Tensor
    sizes: Tensor


OnRelease = Callable[[Released], None]


def train_pf_ld(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: PfLdConfig,
    noise: PfLdNoise,
    *,
    parity: MeanParity,
    randomness: PrivateRandomness,
    generator: torch.Generator,
    on_progress: Progress = lambda *_: None,
    on_release: OnRelease = lambda _: None,
) -> Trained:
    """PF-LD: ``model`` in place on ``x`` (N, ...), ``y`` (N,) and private ``groups`` (N,).

    ``generator`` draws public batches; secret ones and noise come from ``randomness``. ``on_release`` hears what is
    public before each epoch under constraints. ValueError for a record without a group and a population without one.
    """
    cells = parity.cells(y, groups)
    if (cells == UNKNOWN).any():
        raise ValueError("Expected the group of every record, got some unknown; leave those records out.")
    normals = GaussianNoise(randomness)
    sizes_UG = _public_sizes(cells, y, config, noise.size, parity=parity, normals=normals)
    descent, ascent = Descent(model, x, y, config, generator), Ascent(parity, config)
    gradients = _NoisyGradients(
        model, y, cells, config, noise.gradient, parity=parity, sizes_UG=sizes_UG, normals=normals
    )
    secret = PoissonBatches(len(x), sampling_rate(config, len(x)), randomness) if config.batches == "poisson" else None
    # Of sizes that are public by now; the paper's noise is scaled by private ones and so tells of them.
    spread = noise.violation * violation_sensitivity(sizes_UG, clip_value=config.clip_value)
    for epoch in range(config.warmup_epochs + config.epochs):
        constrained = epoch >= config.warmup_epochs
        if constrained and config.dual_step:
            violations_UGK = measured_violations(
                model, x, y, cells, parity=parity, sizes_UG=sizes_UG, clip_value=config.clip_value
            )
            normals.add_to([violations_UGK], spread)
            ascent.step(violations_UGK)
            # The gradient's noise follows the multipliers: these come from noisy violations alone.
            gradients.follow(ascent.multipliers_UGK)
            on_release(Released(violations=violations_UGK, multipliers=ascent.multipliers_UGK, sizes=sizes_UG))
        # Epochs before constraints read no group: their batches may be known, and are not among the events.
        for rows, share in descent.batches(secret if constrained else None):
            descent.step(gradients.of(descent.features(rows), rows, share), epoch)
        on_progress(epoch + 1, config.warmup_epochs + config.epochs)
    return Trained(model=model.eval(), events=pf_ld_events(config, noise, len(x)), noise=randomness.label)


def pf_ld_events(config: PfLdConfig, noise: PfLdNoise, num_records: int) -> tuple[Event, ...]:
    """What training with ``config`` releases: no gradients without multipliers, and nothing without a dual step."""
    num_duals = config.epochs if config.dual_step else 0
    # Multipliers that stay at 0 give no record a weight, and no gradient of groups is released.
    num_primals = num_duals if config.max_multiplier else 0
    num_sizes = 1 if num_duals and config.group_sizes is None else 0
    gradients: Event = AttributeGaussians(count=num_primals, attribute_noise_multiplier=noise.gradient)
    if config.batches == "poisson":
        gradients = SecretBatchAttributeGaussians(
            count=num_primals * math.ceil(num_records / config.batch_size),
            attribute_noise_multiplier=noise.gradient,
            sampling_rate=sampling_rate(config, num_records),
        )
    return (
        gradients,
        AttributeGaussians(count=num_duals, attribute_noise_multiplier=noise.violation),
        AttributeGaussians(count=num_sizes, attribute_noise_multiplier=noise.size),
    )


def calibrated_noise(config: PfLdConfig, target: PrivacyTarget, *, num_records: int) -> PfLdNoise:
    """The least noise that keeps training within ``target``, shared out as ``config`` says.

    ``dual_share`` and ``size_share`` divide the sum of ``count / multiplier^2``, which for public batches is all that
    the price depends on. ValueError for a target that no noise reaches.
    """

    def noise_at(scale: float) -> PfLdNoise:
        epochs, sizes = max(config.epochs, 1), config.size_share if config.group_sizes is None else 0.0
        rest = 1 - config.dual_share - sizes
        # epochs / multiplier^2 = rest / scale^2: every release has its part of the sum of inverse squares.
        return PfLdNoise(
            gradient=scale * math.sqrt(epochs / rest),
            violation=scale * math.sqrt(epochs / config.dual_share),
            size=scale / math.sqrt(config.size_share),
        )

    def events_at(scale: float) -> tuple[Event, ...]:
        return pf_ld_events(config, noise_at(scale), num_records)

    return noise_at(
        accountant.least_noise(
            events_at, target_epsilon=target.epsilon, target_delta=target.delta, accounting=target.accounting
        )
    )


def gradient_sensitivity(slopes_UGK: Tensor, *, clip_norm: float) -> float:
    """How far one record that changes its group moves a sum of clipped gradients weighted by ``slopes_UGK``.

    With one value the gradient stays and its weight changes; with several its direction changes too.
    """
    if slopes_UGK.shape[2] == 1:
        weights_UG = slopes_UGK[..., 0]
        return clip_norm * float((weights_UG.amax(dim=1) - weights_UG.amin(dim=1)).max())
    # From the end of the longest slope to that of the next: at most both lengths together, whatever their directions.
    longest_UG = torch.linalg.vector_norm(slopes_UGK, dim=2).topk(2, dim=1).values
    return clip_norm * float(longest_UG.sum(dim=1).max())


def violation_sensitivity(sizes_UG: Tensor, *, clip_value: float) -> float:
    """How far one record that changes its group moves all violations together, in L2."""
    # A record leaves one group of its population for another: the two smallest are the worst pair.
    inverse_UG = sizes_UG.double().reciprocal().topk(2, dim=1).values
    return clip_value * float(torch.linalg.vector_norm(inverse_UG, dim=1).max())


def sampling_rate(config: PfLdConfig, num_records: int) -> float:
    """Of secret batches."""
    return min(1.0, config.batch_size / num_records)


class _NoisyGradients:
    """The gradient of J plus the noisy one of ``sum of multipliers times violations``.

    Cells do not overlap, so the second is one sum over records: each gradient of h, along the slopes of its record's
    cell, is clipped and weighted by their length.
    """

    def __init__(
        self,
        model: nn.Module,
        y: Tensor,
        cells: Tensor,
        config: PfLdConfig,
        noise_multiplier: float,
        *,
        parity: MeanParity,
        sizes_UG: Tensor,
        normals: GaussianNoise,
    ) -> None:
        self._gradients = GuidedGradients(model, ValueAlong(parity), clip_norm=config.clip_norm)
        self._y, self._cells, self._parity, self._sizes_UG, self._normals = y, cells, parity, sizes_UG, normals
        self._clip_norm, self._noise_multiplier = config.clip_norm, noise_multiplier
        self.follow(torch.zeros(parity.shape, dtype=torch.float64))

    def follow(self, multipliers_UGK: Tensor) -> None:
        """Use these multipliers from now on."""
        slopes_UGK = self._parity.slopes(multipliers_UGK, self._y, sizes_UG=self._sizes_UG)
        lengths_UG = torch.linalg.vector_norm(slopes_UGK, dim=2)
        # A slope of 0 has no direction, and its length of 0 takes the record out.
        directions_UGK = slopes_UGK / lengths_UG.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
        self._is_silent = not multipliers_UGK.any()
        self._lengths_J, self._directions_JK = lengths_UG.float().flatten(), directions_UGK.float().flatten(0, 1)
        # While no multiplier is at work no group is read, and the slopes' sensitivity is 0.
        self._noise_stddev = 0.0
        if self._noise_multiplier:
            self._noise_stddev = self._noise_multiplier * gradient_sensitivity(slopes_UGK, clip_norm=self._clip_norm)

    def of(self, x: Tensor, rows: Tensor, share: float) -> list[Tensor]:
        """For the batch ``x`` of ``rows``, which stands for ``share`` of all records."""
        y = self._y.index_select(0, rows)
        if self._is_silent:
            gradients = self._gradients.loss(x, y)
            torch._foreach_mul_(gradients, 1 / (share * len(self._y)))
            return gradients
        cells = self._cells.index_select(0, rows)
        targets = torch.cat([y[:, None], self._directions_JK.index_select(0, cells)], dim=1)
        weights_B = self._lengths_J.index_select(0, cells)
        gradients, term = self._gradients.loss_and_clipped(x, y, targets, weights_B)
        self._normals.add_to(term, self._noise_stddev)
        # By the number that the batch stands for: how many a secret sample really holds is private.
        torch._foreach_mul_(gradients, 1 / (share * len(self._y)))
        torch._foreach_add_(gradients, term, alpha=1 / share)
        return gradients


def _public_sizes(
    cells: Tensor, y: Tensor, config: PfLdConfig, noise_multiplier: float, *, parity: MeanParity, normals: GaussianNoise
) -> Tensor:
    """Declared sizes, or sizes released once and raised to the declared floor, (U, G)."""
    num_populations, num_groups, _ = parity.shape
    population_U = parity.population_sizes(y)
    if not population_U.all():
        raise ValueError(f"Expected records of every label, got {population_U.long().tolist()}; leave the label out.")
    if config.group_sizes is not None:
        if len(config.group_sizes) != num_populations * num_groups:
            raise ValueError(
                f"Expected pf_ld.group_sizes of {num_populations * num_groups} cells ({num_groups} groups, "
                f"{num_populations} populations), got {len(config.group_sizes)}."
            )
        return torch.tensor(config.group_sizes, dtype=torch.float64).view(num_populations, num_groups)
    sizes_UG = parity.group_sizes(cells)
    # A changed attribute moves two sizes by 1 each: sqrt(2) in L2.
    normals.add_to([sizes_UG], noise_multiplier * math.sqrt(2))
    # A noisy size near 0 would blow up slopes and noise alike. Populations follow from labels, which are public.
    return torch.maximum(sizes_UG, config.min_group_share * population_U[:, None])


class PfLd(AttributeMethod):
    """Within the target for one sensitive attribute."""

    title: ClassVar[str] = "PF-LD"
    paper: ClassVar[str] = FLd.paper

    method: str = "pf_ld"
    pf_ld: PfLdConfig = PfLdConfig()

    @property
    def unread(self) -> dict[str, str]:
        """Fields of the release of sizes, where sizes are declared."""
        if self.pf_ld.group_sizes is None:
            return {}
        return dict.fromkeys(("pf_ld.size_share", "pf_ld.min_group_share"), "pf_ld.group_sizes")

    def train(self, training: Training) -> Trained:
        config = self.pf_ld
        parity = told(parity_of(config, training.dataset), config, training.reporter)
        noise = calibrated_noise(config, self.target, num_records=len(training.dataset.private))
        with training.reporter.stage(self.method) as advance:
            return train_pf_ld(
                **arguments(training, groups=True),
                config=config,
                noise=noise,
                parity=parity,
                randomness=self.randomness(),
                on_progress=advance,
            )
