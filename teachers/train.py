"""Train a block of teachers: a pure function from shards to weights, with two engines behind one interface.

``loop`` fits one teacher after another; ``stacked`` runs a block as one program (see :mod:`teachers.stacked`). Both
give the same teachers up to rounding, and with both a teacher is a function of its own shard and of public numbers, bit
for bit. A teacher without records keeps its initial weights: its votes are then a fixed public function of the query.
So does one whose training diverged, because an error would tell of its shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from fairpate.config import ModelConfig
from fairpate.nn.features import frozen_features
from fairpate.nn.fit import DivergedError, fit
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
_log = logging.getLogger(__name__)


def train_teachers(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    *,
    teacher_indices: Sequence[int] | None = None,
    engine: Literal["auto"] | Engine = "auto",
    device: str = "cpu",
    on_diverged: Callable[[int], None] | None = None,
) -> StackedWeights:
    """The weights of one teacher per shard, each entry stacked along a first axis of T teachers, on the CPU.

    ``teacher_indices`` (default 0..T-1) are the teachers' numbers in the whole ensemble. ``on_diverged`` hears the
    number of each teacher whose weights did not stay finite, which keeps its initial ones; None logs it. ValueError
    where ``stacked`` is asked of a model with dropout, and for a shard above the specification's ``max_shard_size``.
    """
    indices = list(range(len(shards))) if teacher_indices is None else list(teacher_indices)
    if len(indices) != len(shards) or not shards:
        raise ValueError(f"Expected one teacher index per shard and a shard, got {len(indices)} and {len(shards)}.")
    if spec.max_shard_size is not None and any(len(shard.y) > spec.max_shard_size for shard in shards):
        raise ValueError(f"Expected at most max_shard_size={spec.max_shard_size} records per shard; trim them first.")
    if spec.model.trainable == "head":
        # Once per record: layers that are not trained give the same features in every epoch.
        shards = [Shard(x=frozen_features(spec.model, shard.x, device=device), y=shard.y) for shard in shards]
        spec = head_of(spec)
    chosen = choose_engine(spec.model, device) if engine == "auto" else engine
    inputs = [standardized(shard) if spec.standardize else (shard, {}) for shard in shards]
    own_shards, statistics = [shard for shard, _ in inputs], [values for _, values in inputs]
    train = train_stacked if chosen == "stacked" else _train_loop
    with _repeatable_convolutions():
        trained = train(own_shards, spec, indices, device=torch.device(device))
    weights = [own | scale for own, scale in zip(trained, statistics, strict=True)]
    return stack_weights(
        [
            own if _is_finite(own) else _untrained(spec, teacher, shard, on_diverged or _warn)
            for own, teacher, shard in zip(weights, indices, shards, strict=True)
        ]
    )


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
) -> list[StackedWeights]:
    return [_fitted(shard, spec, teacher, device) for shard, teacher in zip(shards, indices, strict=True)]


def _fitted(shard: Shard, spec: TeacherSpec, teacher: int, device: torch.device) -> StackedWeights:
    """The teacher after training; weights that are not numbers where it diverged."""
    model = initial_model(spec, teacher, shard).to(device)
    try:
        fit(model, shard.x, shard.y, spec.fit, generator=training_generator(spec, teacher))
    except DivergedError:
        for parameter in model.parameters():
            # The mark that the stacked engine leaves by itself, so that both are handled in one place.
            parameter.data.fill_(torch.nan)
    return _state(model)


def _state(model: nn.Module) -> StackedWeights:
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def _is_finite(weights: StackedWeights) -> bool:
    return all(bool(value.isfinite().all()) for value in weights.values())


def _untrained(spec: TeacherSpec, teacher: int, shard: Shard, on_diverged: Callable[[int], None]) -> StackedWeights:
    """The teacher as it is without records."""
    on_diverged(teacher)
    empty = Shard(x=shard.x[:0], y=shard.y[:0])
    statistics = standardized(empty)[1] if spec.standardize else {}
    return _state(initial_model(spec, teacher, empty)) | statistics


def _warn(teacher: int) -> None:
    _log.warning("Teacher %d diverged and keeps its initial weights; lower its learning_rate.", teacher)


@contextmanager
def _repeatable_convolutions() -> Iterator[None]:
    """A GPU's convolutions by algorithms that give equal bits for equal inputs, chosen by shapes alone."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
