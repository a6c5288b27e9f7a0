"""Train a block of teachers: a pure function from shards to weights, with two engines behind one interface.

``loop`` fits one teacher after another; ``stacked`` runs a block as one program (see :mod:`teachers.stacked`). Both
give the same teachers up to rounding. A teacher without records keeps its initial weights: its votes are then a fixed
public function of the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fairpate.config import ModelConfig
from fairpate.nn.features import frozen_features
from fairpate.nn.fit import fit
from fairpate.nn.models import is_convolutional
from teachers.stacked import train_stacked
from teachers.teacher import (
    Shard,
    StackedWeights,
    TeacherSpec,
    head_of,
    initial_model,
    stack_weights,
    standardized,
    training_generator,
)

Engine = Literal["loop", "stacked"]


def train_teachers(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    *,
    teacher_indices: Sequence[int] | None = None,
    engine: Literal["auto"] | Engine = "auto",
    device: str = "cpu",
) -> StackedWeights:
    """The weights of one teacher per shard, each entry stacked along a first axis of T teachers, on the CPU.

    ``teacher_indices`` (default 0..T-1) are the teachers' numbers in the whole ensemble. ValueError where
    ``stacked`` is asked of a model with dropout.
    """
    indices = list(range(len(shards))) if teacher_indices is None else list(teacher_indices)
    if len(indices) != len(shards) or not shards:
        raise ValueError(f"Expected one teacher index per shard and a shard, got {len(indices)} and {len(shards)}.")
    if spec.model.trainable == "head":
        shards = [Shard(x=frozen_features(spec.model, shard.x, device=device), y=shard.y) for shard in shards]
        spec = head_of(spec)
    chosen = choose_engine(spec.model, device) if engine == "auto" else engine
    inputs = [standardized(shard) if spec.standardize else (shard, {}) for shard in shards]
    own_shards, statistics = [shard for shard, _ in inputs], [values for _, values in inputs]
    train = train_stacked if chosen == "stacked" else _train_loop
    return train(own_shards, spec, indices, device=torch.device(device)) | stack_weights(statistics)


def choose_engine(model: ModelConfig, device: str) -> Engine:
    """Measured on two CPU cores: stacking wins for small dense models, channels-last loops for convolutions.

    An accelerator always has room for the whole stack.
    """
    if model.dropout:
        return "loop"
    trains_convolutions = is_convolutional(model) and model.trainable == "all"
    return "loop" if device == "cpu" and trains_convolutions else "stacked"


def _train_loop(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    indices: Sequence[int],
    *,
    device: torch.device,
) -> StackedWeights:
    trained = []
    for shard, teacher in zip(shards, indices, strict=True):
        model = initial_model(spec, teacher, shard).to(device)
        fit(model, shard.x, shard.y, spec.fit, generator=training_generator(spec, teacher))
        trained.append({name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()})
    return stack_weights(trained)
