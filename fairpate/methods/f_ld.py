"""F-LD (Tran, Fioretto and Van Hentenryck 2021, "Differentially Private and Fair Deep Learning: A Lagrangian Dual
Approach", arXiv 2009.12562): fairness by Lagrange multipliers, without privacy.

With v_i the violation of constraint i (:mod:`fairpate.methods.mean_parity`) and one epoch at a time,

    lambda_i <- min(lambda_max, lambda_i + s |v_i(D)|),   then for every batch B
    theta    <- theta - a grad( J(B) + sum_i lambda_i |v_i(B)| )

Deviations from the paper:
- Multipliers move before an epoch and not after it: with one warm-up epoch more this is the paper's order.
- ``two_sided`` multipliers, one for each direction of a violation, fall again when it turns; the paper's only rise.
- A ``tolerance`` that raises no multiplier, any number of classes, momentum and Adam.

Shapes: N records, B of a batch, C classes, U populations, G groups, K values of h (see mean_parity).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fairpate.app.terminal.progress import Reporter
from fairpate.config import Count, CountOrZero, FitConfig, NotNegative, Positive, Section
from fairpate.data import Dataset
from fairpate.methods.definition import Training, UnprotectedMethod, arguments
from fairpate.methods.dual_ascent import DualAscent
from fairpate.methods.mean_parity import MeanParity
from fairpate.methods.trained import NO_NOISE, Progress, Trained
from fairpate.nn.fit import batch_bounds
from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.optimizer import Optimizer, epoch_learning_rate
from fairpate.nn.predict import predict_logits
from fairpate.nn.private_fit import PoissonBatches
from fairpate.privacy.events import PoissonGaussians


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
