"""PF-LD (Tran, Fioretto and Van Hentenryck 2021, "Differentially Private and Fair Deep Learning: A Lagrangian Dual
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

Deviations from the paper, which is kept in :mod:`fairpate.methods.pf_ld_as_in_paper`:
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fairpate.config import Positive, PrivacyTarget
from fairpate.methods.definition import AttributeMethod, Training, arguments
from fairpate.methods.f_ld import Ascent, Descent, FLd, FldConfig, measured_violations, parity_of, told
from fairpate.methods.mean_parity import UNKNOWN, MeanParity, ValueAlong
from fairpate.methods.trained import Progress, Trained
from fairpate.nn.guided_gradients import GuidedGradients
from fairpate.nn.private_fit import GaussianNoise, PoissonBatches, PrivateRandomness
from fairpate.privacy import calibration
from fairpate.privacy.events import Event
from fairpate.privacy.fair_training import AttributeGaussians, SecretBatchAttributeGaussians


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
    form: Literal["corrected", "as_in_paper"] = Field("corrected", description="`as_in_paper` guarantees nothing.")

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
        calibration.least_noise(
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
    """Within the target for one sensitive attribute; in the paper's form without any guarantee."""

    title: ClassVar[str] = "PF-LD"
    paper: ClassVar[str] = FLd.paper

    method: str = "pf_ld"
    pf_ld: PfLdConfig = PfLdConfig()

    @property
    def is_private(self) -> bool:
        """The paper's form releases exact violations and undercharges the rest."""
        return super().is_private and self.pf_ld.form != "as_in_paper"

    @property
    def unread(self) -> dict[str, str]:
        """What the paper's form does not have, and the release of sizes that are declared."""
        sizes = ("size_share", "min_group_share")
        if self.pf_ld.form == "as_in_paper":
            unread = ("batches", "multipliers", "tolerance", "dual_share", "group_sizes", *sizes)
            return {f"pf_ld.{field}": "pf_ld.form" for field in unread}
        return {} if self.pf_ld.group_sizes is None else {f"pf_ld.{field}": "pf_ld.group_sizes" for field in sizes}

    def train(self, training: Training) -> Trained:
        """With noise on violations and gradients."""
        from fairpate.methods import pf_ld_as_in_paper  # which builds on this file

        config, size = self.pf_ld, len(training.dataset.private)
        given = arguments(training, groups=True) | {"config": config, "randomness": self.randomness()}
        given["parity"] = told(parity_of(config, training.dataset), config, training.reporter)
        with training.reporter.stage(self.method) as advance:
            given["on_progress"] = advance
            if config.form == "as_in_paper":
                noise = pf_ld_as_in_paper.published_noise(config, self.target, num_records=size)
                return pf_ld_as_in_paper.train_as_in_paper(**given, noise=noise, target=self.target)
            return train_pf_ld(**given, noise=calibrated_noise(config, self.target, num_records=size))
