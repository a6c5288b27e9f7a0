"""Training with a gradient and a histogram of every batch, both noisy: how it is planned, run and reported.

A step releases a Laplace histogram and a Gaussian sum of one Poisson sample (:mod:`fairpate.nn.priced_fit`). That is
one event, composed before it is amplified; one number says how a budget is split between the two. A second Gaussian sum
of the sample may release how many records each cell has: with the gradient's it counts as one Gaussian of less noise.
What a method makes of the histogram is its own matter, and free.

Shapes: N records, Q cells, K columns of the histogram.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from pydantic import Field, field_serializer
from torch import Tensor, nn

from fairpate.config import Fraction, PrivacyTarget, Section
from fairpate.methods import dp_sgd
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.trained import Progress
from fairpate.nn.priced_fit import PricedTraining, Pricing, Rows
from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps
from fairpate.privacy.accountant import Accounting
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.events import Event
from fairpate.privacy.fair_training import PoissonGaussianLaplaces, joint_multiplier

SHARE_OF_SMALL_CELLS = 0.3  # the best of 0, .1 and .3 under equalized odds: docs/coverage.md, RaCO-DP


class NoisyHistogramConfig(Section):
    """What the methods share that release a histogram of every batch; their gradients are as `dp_sgd` says."""

    histogram_share: float = Field(0.1, gt=0, lt=1, description="Part of the budget that the histograms take.")
    min_share: float = Field(
        0.01, gt=0, le=1, description="Least share of the expected batch that a set of records counts as: public."
    )
    size_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Of the gradient's part, for a release of sizes beside the histogram, which it makes more exact; "
        "null: .3 where cells are of a label and a group, 0 elsewhere.",
    )
    averaged_share: Fraction = Field(0.5, description="Of the last steps, whose weights are averaged; 0: the last.")

    @property
    def has_small_cells(self) -> bool:
        """Whether cells are of a true label and a group."""
        return False

    @property
    def resolved_size_share(self) -> float:
        """``size_share``, or its default."""
        if self.size_share is not None:
            return self.size_share
        return SHARE_OF_SMALL_CELLS if self.has_small_cells else 0.0

    # What is written down and what decides a digest is what is meant; plain values may still be laid over.
    @field_serializer("size_share", when_used="json")
    def _resolved(self, _: float | None) -> float:
        return self.resolved_size_share


@dataclass(frozen=True, kw_only=True)
class HistogramSteps:
    """DP-SGD's steps and, beside them, the histogram's.

    ``laplace_scale``: of the noise on every entry, of which a record moves all by 1 in L1; ``size_floor``: the least
    number of records that a union of cells counts as; ``averaged_share``: of the steps, whose weights are averaged;
    ``size_noise``: standard deviation on the number of records of every cell, of which a record moves all by 1 in L2;
    None: these are not released.
    """

    gradient: PrivateSteps
    laplace_scale: float
    size_floor: float
    averaged_share: float = 0.0
    size_noise: float | None = None

    def __post_init__(self) -> None:
        if not self.size_floor > 0:
            raise ValueError(f"Expected size_floor > 0, got {self.size_floor}: noise can make a size negative.")

    @property
    def event(self) -> PoissonGaussianLaplaces:
        """What they release of private records."""
        # Gradients and sizes are Gaussians of one sample, so one of less noise; with the histogram amplified once.
        sizes = () if self.size_noise is None else (self.size_noise,)
        return PoissonGaussianLaplaces(
            count=self.gradient.num_steps,
            gradient_noise_multiplier=joint_multiplier(self.gradient.noise_multiplier, *sizes),
            laplace_scale=self.laplace_scale,
            sampling_rate=self.gradient.sampling_rate,
        )


def plan_steps(
    training: DpSgdConfig,
    config: NoisyHistogramConfig,
    *,
    num_records: int,
    noise_multiplier: float,
    laplace_scale: float,
) -> HistogramSteps:
    """The steps that ``training`` means for ``num_records``, with these noises.

    ``noise_multiplier`` is that of gradient and sizes together: of its inverse square the sizes have ``size_share``.
    """
    # Inverse squares add up: (1 - share) / noise^2 for the gradient and share / noise^2 for the sizes.
    size_share = config.resolved_size_share
    of_gradient = noise_multiplier / math.sqrt(1 - size_share)
    gradient = dp_sgd.plan_steps(training, num_records=num_records, noise_multiplier=of_gradient)
    return HistogramSteps(
        gradient=gradient,
        laplace_scale=laplace_scale,
        # Of the expected batch: the realised one is private.
        size_floor=config.min_share * gradient.expected_batch_size,
        averaged_share=config.averaged_share,
        size_noise=noise_multiplier / math.sqrt(size_share) if size_share else None,
    )


def calibrated_steps(
    training: DpSgdConfig, config: NoisyHistogramConfig, target: PrivacyTarget, *, num_records: int
) -> HistogramSteps:
    """The steps with the least noise that keeps them within ``target``, split as ``histogram_share`` says.

    ValueError for a target out of reach, and for a relation that the event is not priced under.
    """
    if target.record_relation != "add or remove one":
        raise ValueError(
            f"Expected target.relation 'add or remove one', got {target.record_relation!r}: Laplace and Gaussian noise "
            "on one sample are priced under it alone."
        )

    silent = plan_steps(training, config, num_records=num_records, noise_multiplier=0.0, laplace_scale=0.0)
    # Looked up by what the price depends on alone, so that seeds and learning rates share one search.
    joint = _least_joint_noise(silent.event, config.histogram_share, target.epsilon, target.delta, target.accounting)
    noise_multiplier, laplace_scale = split_noise(joint, histogram_share=config.histogram_share)
    return plan_steps(
        training, config, num_records=num_records, noise_multiplier=noise_multiplier, laplace_scale=laplace_scale
    )


@lru_cache
def _least_joint_noise(
    silent: PoissonGaussianLaplaces, histogram_share: float, epsilon: float, delta: float, accounting: Accounting
) -> float:
    def events(joint: float) -> list[Event]:
        noise_multiplier, laplace_scale = split_noise(joint, histogram_share=histogram_share)
        return [replace(silent, gradient_noise_multiplier=noise_multiplier, laplace_scale=laplace_scale)]

    return least_noise(events, target_epsilon=epsilon, target_delta=delta, accounting=accounting)


def split_noise(joint: float, *, histogram_share: float) -> tuple[float, float]:
    """A Gaussian multiplier and a Laplace scale with ``1 / joint^2 = 1 / multiplier^2 + 1 / scale^2``.

    Where noise is large, each release costs about half its inverse square: ``histogram_share`` is the histogram's part
    of the budget.
    """
    if not 0 < histogram_share < 1:
        raise ValueError(f"Expected 0 < histogram_share < 1, got {histogram_share}: both releases need noise.")
    return joint / math.sqrt(1 - histogram_share), joint / math.sqrt(histogram_share)


def fit(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    cells: Tensor,
    steps: HistogramSteps,
    *,
    rows: Rows,
    num_cells: int,
    num_classes: int,
    pricing: Pricing,
    randomness: PrivateRandomness,
    histogram_randomness: PrivateRandomness,
    generator: torch.Generator,
    person_N: Tensor | None = None,
    on_progress: Progress = lambda *_: None,
) -> None:
    """Train ``model`` in place on private ``x`` (N, ...), ``labels`` (N,) and ``cells`` (N,), and average its weights.

    ``person_N`` numbers whose the records are. ``generator`` drives dropout alone. The histogram's noise has a
    randomness of its own, so that prices of 0 are DP-SGD, bit for bit. Errors as
    :class:`fairpate.nn.priced_fit.PricedTraining`.
    """
    training = PricedTraining(
        model,
        x,
        labels,
        cells,
        steps.gradient,
        rows=rows,
        num_cells=num_cells,
        num_classes=num_classes,
        laplace_scale=steps.laplace_scale,
        size_noise=steps.size_noise,
        pricing=pricing,
        randomness=randomness,
        histogram_randomness=histogram_randomness,
        person_N=person_N,
    )
    training.run(generator=generator, averaged_share=steps.averaged_share, on_progress=on_progress)
