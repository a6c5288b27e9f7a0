"""One teacher: its shard, what determines it, its weights before training and the randomness it draws.

Everything a teacher draws (its initial weights, the order of its records, its augmentation) comes from
``(seed, teacher index)``, so a teacher does not depend on who is trained beside it, or how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.models import build_model, scale_bytes

StackedWeights = dict[str, Tensor]
SHARD_MEAN, SHARD_STD = "shard.mean", "shard.std"
_INITIALISATION, _TRAINING = 0, 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One teacher's records: ``x`` (N, ...) bytes or floats, ``y`` (N,) classes."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """What determines a teacher beside its shard, all of it public.

    ``standardize`` scales inputs by the shard's own mean and spread. No shard has more than ``max_shard_size`` records.
    """

    model: ModelConfig
    fit: FitConfig
    num_classes: int
    seed: int
    standardize: bool = False
    max_shard_size: int | None = None

    @property
    def largest_batch(self) -> int:
        """The most records that a batch can have."""
        return min(self.fit.batch_size, self.max_shard_size or self.fit.batch_size)


def head_of(spec: TeacherSpec) -> TeacherSpec:
    """The teacher that reads a frozen backbone's features instead of pictures: logistic regression."""
    return replace(spec, model=ModelConfig(name="logistic"))


def initial_model(spec: TeacherSpec, teacher: int, shard: Shard) -> nn.Module:
    """Teacher number ``teacher`` before training, in the precision of its shard (``uint8`` means ``float32``)."""
    shape = tuple(shard.x.shape[1:])
    seed = _seed_of(spec.seed, teacher, _INITIALISATION)
    model = build_model(spec.model, input_shape=shape, num_classes=spec.num_classes, generator_seed=seed)
    return model.to(shard.x.dtype if shard.x.is_floating_point() else torch.float32)


def training_generator(spec: TeacherSpec, teacher: int) -> torch.Generator:
    """The source of everything teacher number ``teacher`` draws while training."""
    return torch.Generator().manual_seed(seed_of_training(spec.seed, teacher))


def seed_of_training(seed: int, teacher: int) -> int:
    """Of everything that teacher number ``teacher`` of a run with ``seed`` draws while training; below 2^63."""
    return _seed_of(seed, teacher, _TRAINING)


def standardized(shard: Shard) -> tuple[Shard, StackedWeights]:
    """The shard at mean 0 and standard deviation 1 per feature or channel, and the statistics, part of the weights.

    A constant feature, or a shard without records, is only centred or left as it is.
    """
    x = scale_bytes(shard.x)
    over = [axis for axis in range(x.ndim) if axis != 1]
    mean = x.mean(dim=over) if len(x) else x.new_zeros(x.shape[1])
    # Without correction, which divides by N - 1: of one record the spread would be NaN.
    std = x.std(dim=over, correction=0) if len(x) else x.new_ones(x.shape[1])
    std = torch.where(std > 0, std, torch.ones_like(std))
    return Shard(x=standardize(x, mean, std), y=shard.y), {SHARD_MEAN: mean, SHARD_STD: std}


def standardize(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """``(x - mean) / std`` along axis 1."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) / std.view(shape)


def stack_weights(weights: Sequence[StackedWeights]) -> StackedWeights:
    """One dictionary of (T, ...) tensors from T dictionaries of equal keys."""
    return {name: torch.stack([teacher[name] for teacher in weights]) for name in weights[0]}


def _seed_of(seed: int, teacher: int, purpose: int) -> int:
    """63 bits that differ between runs, teachers and purposes."""
    return int(np.random.SeedSequence([seed, teacher, purpose]).generate_state(1, np.uint64)[0] >> 1)
