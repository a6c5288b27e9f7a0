"""Fairness by Lagrange multipliers: F-LD, and PF-LD, which protects the sensitive attribute; and a covariance baseline.

Tran, Fioretto and Van Hentenryck 2021, "Differentially Private and Fair Deep Learning: A Lagrangian Dual Approach",
arXiv 2009.12562. Both methods run :func:`alternate`, with different violations and gradients. With v_i the violation of
constraint i (:mod:`fairpate.methods.parity`), every epoch of F-LD computes

    lambda_i <- min(lambda_max, lambda_i + s |v_i(D)|),   then for every batch B
    theta    <- theta - a grad( J(B) + sum_i lambda_i |v_i(B)| )

PF-LD protects only the sensitive attribute: features, labels and the number of records are public. It releases

    sizes      n~_i = n_i + noise                                                               once, unless declared
    violation  v~_i = mean over P_i of clip(h) - sum over G_i of clip(h) / n~_i + noise         before every epoch
    gradient   sum_i mu_i (mean over P_i of clip(grad h) - sum over G_i of clip(grad h) / n~_i) + noise    every batch

with mu_i = lambda_i sign(v~_i); grad J reads no attribute and has no noise. If one attribute changes, a record moves
from one group to another, which changes violations by at most C_d sqrt(1 / n~_i^2 + 1 / n~_j^2) and a gradient by at
most C_p |mu_i / n~_i - mu_j / n~_j| over the batch's share of the records. Batches of an epoch are a public partition,
so a record enters one gradient per epoch; on secret Poisson samples the mixture bound applies.

Deviations of both from the paper:
- Multipliers move before an epoch and not after it: with one warm-up epoch more this is the paper's order, and PF-LD
  saves a release that no step reads.
- ``two_sided`` multipliers, one for each direction of a violation, fall again when it turns; the paper's only rise.
- A ``tolerance`` that raises no multiplier, any number of classes, momentum and Adam.

Deviations of PF-LD (benchmarks/papers/reproductions/pf_ld_as_in_paper.py runs the paper's form):
- Sizes are released or declared. The paper's are private, and its sensitivities are too small.
- The violation is released with its sign; the paper's code uses the exact sign without a charge.
- Values of population and group are clipped alike: clipping only the group's would itself create a violation.
- The gradient's noise is scaled to the current multipliers, not to their largest possible value.

The covariance baseline (:class:`CovarianceConstraint`) is Zafar, Valera, Gomez Rodriguez and Gummadi 2017, "Fairness
Constraints: Mechanisms for Fair Classification", arXiv 1507.05259: logistic regression whose boundary does not vary
with the group, without privacy. With s_i = 1 or -1 for the label of record i, x_i ending in a constant and z_ig = 1 for
a member of g,

    minimise over theta    mean_i log(1 + exp(-s_i theta . x_i)) + ridge / 2 |theta without its constant|^2
    subject to             |mean_i (z_ig - mean of z_g) theta . x_i| <= max_covariance    for every group g

The mean is, up to the length of theta, the covariance of group membership with the signed distance to the boundary: a
linear function of theta, so the problem is convex. It is a proxy for demographic parity: at 0 all groups have the same
mean distance. With ``max_covariance`` 0 the loss is minimised without constraints in the subspace in which all
covariances are 0; any other value uses sequential quadratic programming, as the authors do.

Deviations of the baseline: ``ridge`` is added, as the paper's minimum need not be unique or attained. Left out are the
business necessity clause (its Section 3.3) and support vector machines.

Shapes: N records, B of a batch, C classes, U populations, G groups, K values h of a record, D features with a constant
one, J constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import scipy
from pydantic import Field
from scipy.special import expit

from fairpate.config import (
    Count,
    CountOrZero,
    Disables,
    FitConfig,
    NetworkConfig,
    NotNegative,
    Positive,
    PrivacyTarget,
    Refused,
    Section,
    StudentConfig,
)
from fairpate.data import Dataset
from fairpate.fairness.rates import indices
from fairpate.lazy import Later, functional, torch
from fairpate.methods import base
from fairpate.methods.base import PrivateMethod, Trained, Training, UnprotectedMethod
from fairpate.methods.parity import UNKNOWN, DualAscent, MeanParity, ValueAlong
from fairpate.privacy.accountant import Event, spent
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians
from fairpate.terminal import Reporter
from fairpate.types import Advance, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairpate.nn import fit, models, per_example, private_fit
else:  # a configuration is read without torch
    fit, models = Later("fairpate.nn.fit"), Later("fairpate.nn.models")
    per_example, private_fit = Later("fairpate.nn.per_example"), Later("fairpate.nn.private_fit")


class FairLoopConfig(Section):
    """Settings of the training loop of F-LD, and of PF-LD, its private variant. Lagrange multipliers make the mean of
    each group (of predictions or losses) approach the mean of all groups.
    """

    constraint: Literal["demographic_parity", "equalized_odds", "accuracy_parity"] = Field(
        "demographic_parity",
        description="Means that are equal across groups: of predictions, of predictions per true label, or of the "
        "loss.",
    )
    warmup_epochs: CountOrZero = Field(20, description="First epochs without constraints; they read no group.")
    epochs: CountOrZero = Field(50, description="Epochs under constraints.")
    batch_size: Count = 256
    learning_rate: Positive = 1e-3
    dual_step: NotNegative = Field(
        0.5, description="How much a violation of 1 adds to its multiplier; 0 switches the constraint off."
    )
    max_multiplier: NotNegative = Field(5.0, description="lambda_max, largest multiplier; 0 is plain training.")


class FldConfig(FairLoopConfig):
    """Settings of F-LD (Lagrangian dual training for fairness, Tran et al. 2021), including its optimiser and the rules
    for its multipliers."""

    sharpness: Positive = Field(
        1.0,
        description="Multiplier of the logits before the softmax whose probabilities are compared between groups. "
        "Larger values bring the probabilities closer to hard predictions.",
    )
    disables: ClassVar[Disables] = {("constraint", "accuracy_parity"): ("sharpness",)}
    optimizer: Literal["sgd", "adam"] = "adam"
    schedule: Literal["constant", "cosine"] = "constant"
    multipliers: Literal["absolute", "two_sided"] = Field(
        "two_sided",
        description="`absolute`: one multiplier per constraint, which rises with |violation| as in the paper; "
        "`two_sided`: one for each direction.",
    )
    tolerance: NotNegative = Field(0.0, description="Violations up to this size raise no multiplier.")


def parity_of(config: FldConfig, dataset: Dataset, reporter: Reporter | None = None) -> MeanParity:
    """Return the parity constraint of ``config`` over the groups of a data set.

    ``reporter`` shows a warning if accuracy parity may be reached by raising the loss of the group with lower loss.
    """
    # With multipliers up to c, the loss of a group with share s has a weight of at least 1 - c / s in the objective. A
    # negative weight raises the loss. The group with lower loss may be the smaller one, whose share is private and at
    # most 1 / 2.
    cap, num_groups = config.max_multiplier, dataset.num_groups
    if reporter is not None and config.constraint == "accuracy_parity" and cap * num_groups > 1:
        reporter.note(
            "warning",
            f"multipliers up to {cap:g} may keep accuracy parity by serving the better group worse: above a "
            "group's share of the records they raise its loss. Look at the accuracy of each group, or keep "
            f"max_multiplier below the smallest share, which is at most {1 / num_groups:.2g}.",
        )
    return MeanParity(
        constraint=config.constraint, num_groups=num_groups, num_classes=dataset.num_classes, sharpness=config.sharpness
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
    on_progress: Advance = lambda *_: None,
) -> nn.Module:
    """Train ``model`` in place by F-LD (fairness by Lagrange multipliers), without privacy, on ``x`` (N, ...), ``y``
    and ``groups`` (N,), and return it.

    A record whose group is ``UNKNOWN`` is in no group's mean. A cell is one group within a population: all records, or
    the records with one label. In a batch without records of a cell, the cell's violation counts as 0. ValueError for a
    cell without any record, unless ``allow_empty_cells``: then the cell has no constraint.
    """
    cells = parity.cells(y, groups)
    sizes_UG = parity.group_sizes(cells)
    if not allow_empty_cells:
        require_members(sizes_UG)
    descent, ascent = Descent(model, x, y, config, generator), Ascent(parity, config)

    def ascend() -> None:
        exact_UGK = parity.measured(model, x, y, cells, sizes_UG)
        # An empty cell has no mean, and its multiplier stays at 0.
        ascent.step(torch.where((sizes_UG > 0)[..., None], exact_UGK, 0.0))

    def gradients(rows: Tensor, _: float) -> list[Tensor]:
        outputs, labels, cells_B = model(descent.features(rows)), y[rows], cells[rows]
        loss = functional.cross_entropy(outputs, labels)
        if ascent.multipliers_UGK.any():
            here_UG = parity.group_sizes(cells_B)
            values = parity.values(outputs, labels)
            # A size of 0 counts as 1: a NaN in the branch that `where` leaves out would still reach the gradient.
            violations_UGK = parity.violations(values, labels, cells_B, sizes_UG=here_UG.clamp(min=1))
            penalty_UGK = ascent.multipliers_UGK.to(violations_UGK) * violations_UGK
            # As in the paper, lambda |violation|; of two-sided multipliers the sign counts.
            penalty_UGK = penalty_UGK if config.multipliers == "two_sided" else penalty_UGK.abs()
            loss = loss + torch.where((here_UG > 0)[..., None], penalty_UGK, 0.0).sum()
        return list(torch.autograd.grad(loss, descent.parameters))

    alternate(descent, config, ascend=ascend, gradients=gradients, on_progress=on_progress)
    return model.eval()


def alternate(
    descent: Descent,
    config: FldConfig,
    *,
    ascend: Callable[[], None],
    gradients: Callable[[Tensor, float], list[Tensor]],
    secret: private_fit.PoissonBatches | None = None,
    on_progress: Advance = lambda *_: None,
) -> None:
    """Run the training loop of F-LD and PF-LD: update the multipliers before every epoch with constraints, and take one
    gradient step for each batch of every epoch.

    ``ascend`` measures violations and updates the multipliers. ``gradients(rows, share)`` returns the gradients of a
    batch that represents ``share`` of all records. ``secret`` draws the batches of epochs with constraints; None: a
    public partition.
    """
    num_epochs = config.warmup_epochs + config.epochs
    for epoch in range(num_epochs):
        constrained = epoch >= config.warmup_epochs
        if constrained:
            ascend()
        # Epochs before constraints read no group: their batches may be known, and are not among the events.
        for rows, share in descent.batches(secret if constrained else None):
            descent.step(gradients(rows, share), epoch)
        on_progress(epoch + 1, num_epochs)


def require_members(sizes_UG: Tensor) -> None:
    """Raise ValueError, naming the group and label, if a constrained cell (a group within a population) has no
    record."""
    for population, group in (sizes_UG == 0).nonzero().tolist():
        label = f" with label {population}" if len(sizes_UG) > 1 else ""
        raise ValueError(f"Expected records of every group, got none of group {group}{label}; merge groups.")


class Ascent:
    """The Lagrange multipliers (U, G, K) of all constraints by population, group and value; a positive multiplier
    raises the group's mean towards the population's."""

    def __init__(self, parity: MeanParity, config: FldConfig) -> None:
        self._two_sided, self._tolerance = config.multipliers == "two_sided", config.tolerance
        self.multipliers_UGK = torch.zeros(parity.shape, dtype=torch.float64)
        size = self.multipliers_UGK.numel() * (2 if self._two_sided else 1)
        # A cap of 0 leaves all multipliers at 0.
        self._ascent = DualAscent(size, learning_rate=config.dual_step, cap=config.max_multiplier)

    def step(self, violations_UGK: Tensor) -> None:
        """Update the Lagrange multipliers by the signed violations (U, G, K) of their constraints."""
        violation_J = violations_UGK.flatten().numpy()
        if self._two_sided:
            # One multiplier for each direction; their difference has the sign of the violation.
            both = self._ascent.step(np.concatenate([violation_J, -violation_J]) - self._tolerance)
            signed_J = both[: len(violation_J)] - both[len(violation_J) :]
        else:
            # The sign of the numbers given: in PF-LD these are released, so the sign is free.
            signed_J = self._ascent.step(np.abs(violation_J) - self._tolerance) * np.sign(violation_J)
        self.multipliers_UGK = torch.from_numpy(signed_J.copy()).view_as(self.multipliers_UGK)


class Descent:
    """Takes the gradient steps of F-LD and PF-LD: it has the model with its optimiser, and draws batches of ``x`` and
    ``y``."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, config: FldConfig, generator: torch.Generator) -> None:
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"Expected one or more records, each with a label, got {len(x)} records and {len(y)} labels."
            )
        shared = config.model_dump(include={"batch_size", "optimizer", "learning_rate", "schedule"})
        self._x, self._generator, self._batch_size = x, generator, config.batch_size
        self._sizes: list[int] = np.diff(fit.batch_bounds(len(x), config.batch_size)).tolist()
        self._memory_format = models.memory_format_for(x)
        models.to_memory_format(model.train(), self._memory_format)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # After the layout is set: the optimiser's state has that of the parameters.
        epochs = config.warmup_epochs + config.epochs
        self._optimizer = fit.Optimizer(self.parameters, FitConfig(epochs=epochs, **shared))

    def batches(self, secret: private_fit.PoissonBatches | None = None) -> Iterator[tuple[Tensor, float]]:
        """Yield the rows of every batch of an epoch, each with the share of all records that the batch represents.

        ``secret`` draws the batches; None: a public partition of all records.
        """
        size = len(self._x)
        if secret is None:
            for rows in torch.split(torch.randperm(size, generator=self._generator), self._sizes):
                yield rows, len(rows) / size
        else:
            # As many samples as a partition has batches; each represents a share of the records, not those drawn.
            for _ in self._sizes:
                yield secret.next(), min(1.0, self._batch_size / size)

    def features(self, rows: Tensor) -> Tensor:
        """Return the features of a batch, scaled and in the memory layout of the model."""
        return models.scale_bytes(self._x.index_select(0, rows)).contiguous(memory_format=self._memory_format)

    def step(self, gradients: list[Tensor], epoch: int) -> None:
        """Update the model's parameters by ``gradients``. ValueError for a gradient that is not finite."""
        # One number for all parameters: what is not finite anywhere shows in the sum of norms.
        if not math.isfinite(sum(torch._foreach_norm(gradients))):
            raise ValueError("A gradient is not finite; lower the learning rate or scale the features.")
        self._optimizer.step(gradients, epoch)


class FLd(UnprotectedMethod):
    """F-LD (fairness by Lagrange multipliers, Tran et al. 2021) without privacy, for comparison only."""

    title: ClassVar[str] = "F-LD"
    paper: ClassVar[str] = "Tran, Fioretto and Van Hentenryck 2021, arXiv 2009.12562"
    family: ClassVar[str] = "dp_sgd"
    colour: ClassVar[int] = 0
    # It is compared with methods that protect the attribute alone: the attribute is not a feature.
    protects_attribute_only: ClassVar[bool] = True

    method: str = "f_ld"
    f_ld: FldConfig = FldConfig()

    def train(self, training: Training) -> Trained:
        parity = parity_of(self.f_ld, training.dataset, training.reporter)
        with training.reporter.stage(self.method) as advance:
            train_f_ld(**base.arguments(training, groups=True), config=self.f_ld, parity=parity, on_progress=advance)
        return self.unprotected(training)


class PfLdConfig(FldConfig):
    """Settings of PF-LD, which is F-LD (fairness by Lagrange multipliers) with privacy for the sensitive attribute."""

    clip_norm: Positive = Field(1.0, description="C_p, largest norm of a record's gradient in a group's term.")
    clip_value: Positive = Field(
        1.0, description="C_d, largest norm of a record's part of a group's mean; probabilities need 1."
    )
    dual_share: float = Field(0.2, gt=0, lt=1, description="Share of the budget for the violations.")
    size_share: float = Field(0.02, gt=0, lt=1, description="Share of the budget for the sizes of groups.")
    group_sizes: tuple[Positive, ...] | None = Field(
        None,
        description="Declared public sizes of groups, for equalized odds one label after another; null: noisy sizes "
        "are released once.",
    )
    min_group_share: float = Field(
        0.02, gt=0, le=1, description="Declared least share of a group in its population; smaller sizes count as that."
    )
    batches: Literal["public", "poisson"] = Field(
        "public",
        description="`public`: a public partition, drawn anew for each epoch; `poisson`: secret Poisson samples.",
    )

    # Declared sizes need no release.
    disables: ClassVar[Disables] = {("group_sizes", ...): ("size_share", "min_group_share")}
    refused: ClassVar[Refused] = {
        "Expected dual_share + size_share < 1, as gradients take the rest, got {0.dual_share} + {0.size_share}; lower "
        "one.": lambda config: config.dual_share + config.size_share >= 1
    }


@dataclass(frozen=True, kw_only=True)
class PfLdNoise:
    """The noise multipliers of gradients, violations and sizes: standard deviation of the noise over the L2 sensitivity
    to one changed attribute; 0 means no noise."""

    gradient: float
    violation: float
    size: float


def train_pf_ld(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: PfLdConfig,
    noise: PfLdNoise,
    *,
    parity: MeanParity,
    randomness: private_fit.PrivateRandomness,
    generator: torch.Generator,
    on_progress: Advance = lambda *_: None,
) -> Trained:
    """Train ``model`` in place by PF-LD, private training with fairness by Lagrange multipliers, on ``x`` (N, ...),
    ``y`` (N,) and private ``groups`` (N,), and return it.

    ``generator`` draws public batches; ``randomness`` draws secret batches and noise. ValueError for a record without a
    group and a label without records.
    """
    cells = parity.cells(y, groups)
    if (cells == UNKNOWN).any():
        raise ValueError("Expected the group of every record, got some unknown; leave those records out.")
    normals = private_fit.GaussianNoise(randomness)
    num_populations, num_groups, _ = parity.shape
    population_U = parity.population_sizes(y)
    if not population_U.all():
        raise ValueError(
            f"Expected records of every label, got {population_U.long().tolist()} records by label; leave labels "
            "without records out of the data set."
        )
    if config.group_sizes is None:
        sizes_UG = parity.group_sizes(cells)
        # A changed attribute moves two sizes by 1 each: sqrt(2) in L2.
        normals.add_to([sizes_UG], noise.size * math.sqrt(2))
        # A noisy size near 0 would blow up slopes and noise alike. Populations follow from labels, which are public.
        sizes_UG = torch.maximum(sizes_UG, config.min_group_share * population_U[:, None])
    elif len(config.group_sizes) == num_populations * num_groups:
        sizes_UG = torch.tensor(config.group_sizes, dtype=torch.float64).view(num_populations, num_groups)
    else:
        sizes = f"{num_populations * num_groups} sizes ({num_groups} groups in each of {num_populations} populations)"
        raise ValueError(f"pf_ld.group_sizes: expected {sizes}, got {len(config.group_sizes)}; give one size for each.")
    descent, ascent = Descent(model, x, y, config, generator), Ascent(parity, config)
    guided = per_example.GuidedGradients(model, ValueAlong(parity), clip_norm=config.clip_norm)
    rate = min(1.0, config.batch_size / len(x))
    secret = private_fit.PoissonBatches(len(x), rate, randomness) if config.batches == "poisson" else None
    # Of sizes that are public by now; the paper's noise is scaled by private ones and so reveals something about them.
    spread = noise.violation * violation_sensitivity(sizes_UG, clip_value=config.clip_value)
    # By cell the length and the direction of the slopes, and the noise that the gradient needs.
    lengths_J, directions_JK, stddev = torch.zeros(0), torch.zeros(0), 0.0

    def ascend() -> None:
        nonlocal lengths_J, directions_JK, stddev
        # Multipliers stay at 0, so that nothing reads a violation: none is released.
        if not config.dual_step:
            return
        violations_UGK = parity.measured(model, x, y, cells, sizes_UG, clip_value=config.clip_value)
        normals.add_to([violations_UGK], spread)
        ascent.step(violations_UGK)
        # The slopes, and the gradient's noise, follow the multipliers: these come from noisy violations alone.
        slopes_UGK = parity.slopes(ascent.multipliers_UGK, y, sizes_UG=sizes_UG)
        lengths_UG = torch.linalg.vector_norm(slopes_UGK, dim=2)
        # A slope of 0 has no direction, and its length of 0 takes the record out.
        directions_UGK = slopes_UGK / lengths_UG.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
        lengths_J, directions_JK = lengths_UG.float().flatten(), directions_UGK.float().flatten(0, 1)
        # Without noise it is 0 for any sensitivity.
        stddev = noise.gradient and noise.gradient * gradient_sensitivity(slopes_UGK, clip_norm=config.clip_norm)

    def gradients(rows: Tensor, share: float) -> list[Tensor]:
        """Return the gradient of the loss plus the noisy gradient of the fairness term, the sum of multipliers times
        violations, on the batch of the records ``rows``, which are ``share`` of all records.

        The fairness term is a weighted sum over records of the K values that the constraints compare between groups,
        such as the probability of each class. All records of a cell (a group within a population) have the same K
        weights. A record adds the gradient of its values in the direction of these weights, clipped, times their norm.
        """
        x_B, y_B = descent.features(rows), y.index_select(0, rows)
        # By the number that the batch represents: the real size of a secret sample is private.
        scale = 1 / (share * len(y))
        # While no multiplier is at work no group is read, and the slopes' sensitivity is 0.
        if not ascent.multipliers_UGK.any():
            total = guided.cross_entropy(x_B, y_B)
            torch._foreach_mul_(total, scale)
            return total
        cells_B = cells.index_select(0, rows)
        targets = torch.cat([y_B[:, None], directions_JK.index_select(0, cells_B)], dim=1)
        total, term = guided.both(x_B, y_B, targets, lengths_J.index_select(0, cells_B))
        # Noise on the groups' term alone: the gradient of J reads features and labels, which are public.
        normals.add_to(term, stddev)
        torch._foreach_mul_(total, scale)
        # Slopes are for a sum over all records, of which the batch is a share.
        torch._foreach_add_(total, term, alpha=1 / share)
        return total

    events = pf_ld_events(config, noise, len(x))
    with spent(events, noise=randomness.label):  # a gradient that is not finite may come from a noisy one
        alternate(descent, config, ascend=ascend, gradients=gradients, secret=secret, on_progress=on_progress)
    return Trained(model=model.eval(), events=events, noise=randomness.label)


def pf_ld_events(config: PfLdConfig, noise: PfLdNoise, num_records: int) -> tuple[Event, ...]:
    """Return the events of training by PF-LD with ``config`` and ``noise``.

    With ``max_multiplier`` 0 no noisy gradient is released, and with ``dual_step`` 0 nothing is.
    """
    num_duals = config.epochs if config.dual_step else 0
    # Multipliers that stay at 0 give no record a weight, and no gradient of groups is released.
    num_primals = num_duals if config.max_multiplier else 0
    num_sizes = 1 if num_duals and config.group_sizes is None else 0
    gradients: Event = AttributeGaussians(count=num_primals, attribute_noise_multiplier=noise.gradient)
    if config.batches == "poisson":
        gradients = SecretBatchAttributeGaussians(
            # As many samples in an epoch as a partition has batches.
            count=num_primals * math.ceil(num_records / config.batch_size),
            attribute_noise_multiplier=noise.gradient,
            sampling_rate=min(1.0, config.batch_size / num_records),
        )
    return (
        gradients,
        AttributeGaussians(count=num_duals, attribute_noise_multiplier=noise.violation),
        AttributeGaussians(count=num_sizes, attribute_noise_multiplier=noise.size),
    )


def calibrated_noise(config: PfLdConfig, target: PrivacyTarget, *, num_records: int) -> PfLdNoise:
    """Return the least noise multipliers at which PF-LD costs at most ``target``.

    ``config`` divides the budget among three kinds of releases. With public batches the cost grows with a sum over
    these kinds: the number of releases divided by the squared noise multiplier. ``config.dual_share`` is the share of
    violations in this sum, ``config.size_share`` that of sizes, and gradients have the rest. ValueError for a target
    that no noise reaches.
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

    return noise_at(base.noise_within(target, lambda scale: pf_ld_events(config, noise_at(scale), num_records)))


def gradient_sensitivity(slopes_UGK: Tensor, *, clip_norm: float) -> float:
    """Return a bound on the L2 change of the fairness term's gradient if one record changes its group.

    ``slopes_UGK``: the weights of a record's K values (what the constraints compare between groups, such as its loss or
    the probability of each class), by population and group. With one value (K = 1) another group changes only the
    weight of the record's clipped gradient; with several it changes the gradient's direction too.
    """
    if slopes_UGK.shape[2] == 1:
        weights_UG = slopes_UGK[..., 0]
        return clip_norm * float((weights_UG.amax(dim=1) - weights_UG.amin(dim=1)).max())
    # The slope of the record changes from one group's to another's: by at most the sum of the two longest.
    longest_UG = torch.linalg.vector_norm(slopes_UGK, dim=2).topk(2, dim=1).values
    return clip_norm * float(longest_UG.sum(dim=1).max())


def violation_sensitivity(sizes_UG: Tensor, *, clip_value: float) -> float:
    """Return a bound on the L2 change of all violations (differences of clipped means) together if one record changes
    its group."""
    # A record leaves one group of its population for another: the two smallest are the worst pair.
    inverse_UG = sizes_UG.double().reciprocal().topk(2, dim=1).values
    return clip_value * float(torch.linalg.vector_norm(inverse_UG, dim=1).max())


class PfLd(PrivateMethod):
    """PF-LD: private training with fairness by Lagrange multipliers. It protects one sensitive attribute, with noise
    calibrated to the target.
    """

    title: ClassVar[str] = "PF-LD"
    paper: ClassVar[str] = FLd.paper
    family: ClassVar[str] = "dp_sgd"
    colour: ClassVar[int] = 4
    protects_attribute_only: ClassVar[bool] = True

    method: str = "pf_ld"
    pf_ld: PfLdConfig = PfLdConfig()

    def train(self, training: Training) -> Trained:
        config = self.pf_ld
        parity = parity_of(config, training.dataset, training.reporter)
        noise = calibrated_noise(config, self.target, num_records=len(training.dataset.private))
        given = base.arguments(training, groups=True) | {"randomness": self.randomness()}
        with training.reporter.stage(self.method) as advance:
            return train_pf_ld(**given, config=config, noise=noise, parity=parity, on_progress=advance)


_MOST_FEATURES = 1000  # the solver keeps square matrices of them


class CovarianceConfig(Section):
    """Settings of Zafar et al. 2017: the bound on the covariance between group membership and the signed distance to
    the decision boundary."""

    max_covariance: float = Field(
        0.0,
        ge=0,
        description="c: largest covariance of group membership with the distance to the boundary; inf: no constraint.",
    )
    ridge: Positive = Field(1e-6, description="Weight of half the squared length of the coefficients in the loss.")


def coefficients(
    features_ND: FloatArray, labels_N: IntArray, groups_N: IntArray, config: CovarianceConfig, *, num_groups: int
) -> FloatArray:
    """Return the coefficients theta (D,) of the constrained logistic regression; the last feature is the constant.

    ValueError for a label or group out of range, a group without records, too many features, and if the solver fails.
    """
    indices("labels", labels_N, 2)
    indices("groups", groups_N, num_groups)
    missing = np.flatnonzero(np.bincount(groups_N, minlength=num_groups) == 0)
    if len(missing):
        raise ValueError(f"Expected records of every group, got none of group {missing[0]}; merge groups.")
    size = features_ND.shape[1]
    if size > _MOST_FEATURES:
        raise ValueError(
            f"Expected at most {_MOST_FEATURES} features, the constant included, got {size}; set method=f_ld, which "
            "has no limit."
        )
    # The constant, the last feature, is not penalised.
    signs_N, penalised_D = np.where(labels_N == 1, 1.0, -1.0), np.append(np.ones(size - 1), 0.0)
    covariance_GD = covariances(features_ND, groups_N, num_groups=num_groups)
    basis_DK: FloatArray | None = None
    constraints: list[scipy.optimize.LinearConstraint] = []
    if config.max_covariance == 0:
        # The last group's covariance is fixed by the others, as all add up to 0.
        # On the null space all covariances are 0, where a solver would keep constraints up to a tolerance.
        basis_DK = scipy.linalg.null_space(covariance_GD[:-1])
    elif config.max_covariance < math.inf:
        # Of two groups, the covariance of one is the negative of the other's.
        constrained_JD = covariance_GD[:1] if num_groups == 2 else covariance_GD
        constraints.append(
            scipy.optimize.LinearConstraint(constrained_JD, -config.max_covariance, config.max_covariance)
        )

    def loss(u_K: FloatArray) -> tuple[float, FloatArray]:
        theta_D = u_K if basis_DK is None else basis_DK @ u_K
        margins_N, kept_D = signs_N * (features_ND @ theta_D), penalised_D * theta_D
        # ln(1 + e^-m), which overflows for no margin.
        value = np.logaddexp(0, -margins_N).mean() + config.ridge / 2 * kept_D @ kept_D
        slope_D = -features_ND.T @ (signs_N * expit(-margins_N)) / len(signs_N) + config.ridge * kept_D
        return float(value), slope_D if basis_DK is None else basis_DK.T @ slope_D

    # The problem is convex, so the start changes the number of steps alone; at 0 every covariance is within bounds.
    start_K = np.zeros(size if basis_DK is None else basis_DK.shape[1])
    found = scipy.optimize.minimize(
        loss, start_K, jac=True, method="SLSQP", constraints=constraints, options={"ftol": 1e-12, "maxiter": 2000}
    )
    if not found.success:
        raise ValueError(
            f"The solver found no minimum ({found.message}); raise covariance_constraint.ridge or scale the features."
        )
    return found.x if basis_DK is None else basis_DK @ found.x


def covariances(features_ND: FloatArray, groups_N: IntArray, *, num_groups: int) -> FloatArray:
    """Return the covariance of membership in each group with each feature, (G, D)."""
    member_NG = np.eye(num_groups)[groups_N]
    return (member_NG - member_NG.mean(axis=0)).T @ features_ND / len(features_ND)


class CovarianceConstraint(UnprotectedMethod):
    """Logistic regression with a covariance constraint, for two classes, without privacy, for comparison only."""

    title: ClassVar[str] = "covariance constraint"
    paper: ClassVar[str] = "Zafar et al. 2017, arXiv 1507.05259"
    family: ClassVar[str] = "regression"
    colour: ClassVar[int] = 0
    protects_attribute_only: ClassVar[bool] = True  # as F-LD
    learns_two_classes: ClassVar[bool] = True
    publishes_linear_rules: ClassVar[bool] = True

    method: str = "covariance_constraint"
    student: StudentConfig = StudentConfig(model=NetworkConfig(name="logistic"))
    covariance_constraint: CovarianceConfig = CovarianceConfig()

    def train(self, training: Training) -> Trained:
        private, num_groups, config = training.dataset.private, training.dataset.num_groups, self.covariance_constraint
        groups_N = private.z.numpy()
        with training.reporter.stage(self.method):
            plain_ND = models.scale_bytes(private.x).flatten(1).double().numpy()
            features_ND = np.hstack([plain_ND, np.ones((len(plain_ND), 1))])
            theta_D = coefficients(features_ND, private.y.numpy(), groups_N, config, num_groups=num_groups)
            fit.set_rule(training.model, torch.from_numpy(theta_D))
        covariance_G = covariances(features_ND, groups_N, num_groups=num_groups) @ theta_D
        remark = f"largest covariance of a group with the distance to the boundary: {abs(covariance_G).max():.3g}"
        training.reporter.note("covariance", remark)
        return self.unprotected(training, remark)
