"""One teacher and many at once: its shard and randomness, stacked training, and the memory that a block needs.

How many teachers an accelerator's memory holds at once: measured on real training steps, not guessed.

Where memory is measured is a value, so that the arithmetic needs no accelerator. The answer decides how many teachers
share a program, never what they learn.

One teacher: its shard, what determines it, its weights before training and the randomness it draws.

Everything a teacher draws (its initial weights, the order of its records, its augmentation) comes from
``(seed, teacher index)``, so a teacher does not depend on who is trained beside it, or how.

Many teachers as one program: parameters stacked along a first axis, one forward and backward pass for all.

Dense layers become batched matrix products and convolutions grouped ones; any other architecture runs through
``torch.func.vmap``. The result is that of the loop up to rounding, and it is a function of a teacher's own shard, bit
for bit: a teacher keeps its row of the stack, whatever computes runs on shapes made of public numbers, and every
teacher has an optimiser state of its own. Shards are ragged: records of zeros without weight fill a batch up, and a
teacher without a batch is computed on such records alone and not updated. The longest shard of a stack decides how many
steps an epoch has, and a step leaves a teacher that has no batch in it as it was.

Shapes: T teachers, B records of a batch, N records of the longest shard, F features, C classes.

Train a block of teachers: a pure function from shards to weights, with two engines behind one interface.

``loop`` fits one teacher after another; ``stacked`` runs a block as one program (see :mod:`teachers.teacher`). Both
give the same teachers up to rounding, and with both a teacher is a function of its own shard and of public numbers, bit
for bit. A teacher without records keeps its initial weights: its votes are then a fixed public function of the query.
So does one whose training diverged, because an error would tell of its shard.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.fit import (
    DivergedError,
    Optimizer,
    apply_changes,
    batch_bounds,
    draw_epoch,
    epoch_learning_rate,
    fit,
    frozen_features,
    precision_of,
    uses_dropout,
)
from fairpate.nn.models import ScaleBytes, build_model, is_convolutional, scale_bytes

_SAFE_SHARE = 0.8  # the rest is the driver's context, libraries' workspaces, and pieces too small to use


class Memory(Protocol):
    """A device's memory, as far as this process may use it."""

    @property
    def available_bytes(self) -> float:
        """What this process may use."""
        ...

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        """The most that ``compute()`` held at once; infinity where it did not fit."""
        ...


class CudaMemory:
    """Memory of a CUDA device: this process's share of it, which a pool of several workers per device sets."""

    def __init__(self, device: torch.device):
        self._device = device

    @property
    def available_bytes(self) -> float:
        """As :attr:`Memory.available_bytes`."""
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        return total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        """As :meth:`Memory.peak_bytes`; what the allocator reserves counts, for nobody else can use it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            compute()
        except torch.OutOfMemoryError:
            return math.inf
        return torch.cuda.max_memory_reserved(self._device)


def stack_that_fits(train_step: Callable[[int], None], memory: Memory, num_teachers: int) -> int:
    """The most teachers, up to ``num_teachers``, that fit four fifths of ``memory`` side by side.

    ``train_step(k)`` trains k of them for a step. A line through the peaks of one and of two says how many fit; that
    many are then tried, and fewer where the line was wrong. The very first step also sets up libraries' workspaces, so
    that it is made twice and a process's first answer is like its later ones. ValueError where one does not fit.
    """
    limit = _SAFE_SHARE * memory.available_bytes

    def peak(count: int) -> float:
        return memory.peak_bytes(lambda: train_step(count))

    peak(1)
    one = peak(1)
    if one > limit:
        raise ValueError(
            f"One teacher needs {one / 2**30:.3g} GiB for a training step, and {limit / 2**30:.3g} GiB of a worker's "
            "memory may be used; raise ray.num_gpus, or lower teachers.fit.batch_size."
        )
    if num_teachers == 1 or (two := peak(2)) > limit:
        return 1
    # At least a byte each: memory is reserved in large pieces, and a second teacher may need no further one.
    count = min(num_teachers, 1 + int((limit - one) / max(1.0, two - one)))
    while count > 2 and peak(count) > limit:
        count //= 2
    return count


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


# On a CPU a stack should stay near the caches; an accelerator takes what its memory holds.
_PARAMETERS_AT_ONCE, _FEWEST_TEACHERS_AT_ONCE = 2**20, 8


def train_stacked(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    indices: Sequence[int],
    *,
    device: torch.device,
    memory: Memory | None = None,
) -> list[StackedWeights]:
    """Each teacher's weights after training, on the CPU; arguments as :func:`teachers.teacher.train_teachers`.

    Shards are already standardised. ``memory`` None is that of a CUDA device; a CPU's is not asked.
    """
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)

    def rehearse(count: int) -> None:
        # Rehearsed on made-up records of public sizes: how many teachers fit must not follow private shards.
        _Stack([_public_shard(spec, shards[0])] * count, spec, indices[:count], device).rehearse()

    size = _stack_size(spec, shards[0]) if memory is None else stack_that_fits(rehearse, memory, len(shards))
    trained: list[StackedWeights] = []
    for start in range(0, len(shards), size):
        stack = _Stack(shards[start : start + size], spec, indices[start : start + size], device)
        stack.train()
        trained += stack.weights()
    return trained


def stacked_logits(model: nn.Module, parameters: StackedWeights, x_TB: Tensor) -> Tensor:
    """Logits (T, B, C): teacher t, with ``parameters[name][t]`` in place of the model's own, reads ``x_TB[t]``."""
    if not isinstance(model, nn.Sequential) or any(type(layer) not in _LAYERS for layer in model):
        forward = vmap(lambda values, x: functional_call(model, values, (x,)))
        result: Tensor = forward(parameters, x_TB)
        return result
    x = x_TB
    for index, layer in enumerate(model):
        own = {name: parameters[f"{index}.{name}"] for name, _ in layer.named_parameters()}
        x = _LAYERS[type(layer)](layer, own, x)
    return x.transpose(1, 2)


class _Stack:
    """T teachers in training, each in its row. Parameters live in tensors (T, ...)."""

    def __init__(self, shards: Sequence[Shard], spec: TeacherSpec, teachers: Sequence[int], device: torch.device):
        models = [initial_model(spec, teacher, shard) for teacher, shard in zip(teachers, shards, strict=True)]
        if uses_dropout(models[0]):
            raise ValueError("engine=stacked trains without dropout; set model.dropout=0 or engine=loop.")
        self._template = models[0].to(device)
        states: list[StackedWeights] = [
            {name: p for name, p in model.named_parameters() if p.requires_grad} for model in models
        ]
        self._parameters = {name: value.detach().to(device) for name, value in stack_weights(states).items()}
        # Views of the stack, one list for all teachers: a state each, updated where the parameters live.
        rows = zip(*(value.unbind() for value in self._parameters.values()), strict=True)
        self._optimizer = Optimizer([parameter for row in rows for parameter in row], spec.fit)
        self._fit, self._device, self._shards = spec.fit, device, shards
        self._generators = [training_generator(spec, teacher) for teacher in teachers]
        self._records = _Records(shards, spec, device)
        self._steps = _steps_of_an_epoch([len(shard.y) for shard in shards], spec.largest_batch, self._records)

    def train(self) -> None:
        """All epochs."""
        for epoch in range(self._fit.epochs if self._steps else 0):
            rows, changes = self._shuffled_epoch()
            learning_rate = epoch_learning_rate(self._fit, epoch)
            for step in self._steps:
                self._step(step, rows, changes, learning_rate)

    def rehearse(self) -> None:
        """One step, to measure what a step needs: all have the same shapes."""
        self._step(self._steps[0], *self._shuffled_epoch(), self._fit.learning_rate)

    def weights(self) -> list[StackedWeights]:
        """Each teacher's weights on the CPU."""
        fixed = {name: value for name, value in self._template.state_dict().items() if name not in self._parameters}
        everyones = {name: value.expand(len(self._generators), *value.shape) for name, value in fixed.items()}
        stacked = {name: value.cpu() for name, value in (self._parameters | everyones).items()}
        # Cloned: a view would keep the whole stack in memory.
        return [{name: value[t].clone() for name, value in stacked.items()} for t in range(len(self._generators))]

    def _shuffled_epoch(self) -> tuple[Tensor, Tensor | None]:
        """Every teacher's rows in the order of an epoch (T, N + 1), and the augmentation of all records or None."""
        draws = [draw_epoch(shard.x, self._fit, g) for shard, g in zip(self._shards, self._generators, strict=True)]
        changes = [change for _, change in draws if change is not None]
        return self._records.rows([order for order, _ in draws]), _with_filler(changes) if changes else None

    def _step(self, step: _Step, rows: Tensor, changes: Tensor | None, learning_rate: float) -> None:
        """One step of every teacher that has this batch."""
        # Teachers without a batch are computed too: the shape of a kernel must not follow who has one.
        chosen_TB = rows.gather(1, step.positions_TB)
        x_TB, targets_TBC = self._records.batch(chosen_TB, changes)
        active = {name: value.detach().requires_grad_() for name, value in self._parameters.items()}
        with precision_of(self._fit, self._device):
            log_p_TBC = functional.log_softmax(stacked_logits(self._template, active, x_TB), dim=2)
            # A sum over teachers: the gradient in each row is that of its own teacher's loss alone.
            loss = -((targets_TBC * log_p_TBC).sum(dim=2) * step.weights_TB).sum()
        torch.autograd.backward(loss)
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).unbind() for p in active.values()]
        own = [gradient[t] for t in step.teachers for gradient in gradients]
        count = len(gradients)
        # By parameter: a teacher without a batch keeps its momentum and its number of steps too.
        only = None if len(own) == count * len(x_TB) else [t * count + k for t in step.teachers for k in range(count)]
        self._optimizer.step(own, learning_rate, only=only)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One batch of every teacher that has one, which are ``teachers``.

    ``positions_TB`` count in a shuffled shard; ``weights_TB`` are 1 / batch size, and 0 where the batch is filled up.
    """

    teachers: Sequence[int]
    positions_TB: Tensor
    weights_TB: Tensor


class _Records:
    """The records of a stack end to end and, last, a record of zeros, with which batches are filled up.

    A device holds them only where the configuration bounds their number: what it has room for must not follow private
    sizes. Otherwise they stay here and come by the batch.
    """

    def __init__(self, shards: Sequence[Shard], spec: TeacherSpec, device: torch.device) -> None:
        home = torch.device("cpu") if spec.max_shard_size is None else device
        starts = torch.tensor([0, *(len(shard.y) for shard in shards)]).cumsum(0).tolist()
        self._starts, self.filler, self.longest = starts[:-1], starts[-1], max(len(shard.y) for shard in shards)
        self._x = _with_filler([shard.x for shard in shards]).to(home)
        self._y = torch.cat([*(shard.y for shard in shards), torch.tensor([spec.num_classes])]).to(home)
        self.dtype = self._x.dtype if self._x.is_floating_point() else torch.float32
        self._targets = _smoothed_classes(spec, self.dtype).to(device)
        self._augment, self._home, self._device = spec.fit.augment, home, device

    def rows(self, orders: Sequence[Tensor]) -> Tensor:
        """Rows (T, N + 1) of shards in these orders; the end of a shorter one, and the last column, are the filler."""
        shifted = [order + start for order, start in zip(orders, self._starts, strict=True)]
        rows = nn.utils.rnn.pad_sequence(shifted, batch_first=True, padding_value=self.filler)
        return functional.pad(rows, (0, 1), value=self.filler)

    def batch(self, chosen_TB: Tensor, changes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Records (T, B, ...), scaled and augmented, and their targets (T, B, C), on the device."""
        chosen = chosen_TB.flatten()
        at_home = chosen.to(self._home)
        x = scale_bytes(self._x.index_select(0, at_home).to(self._device))
        if changes is not None:
            x = apply_changes(x, self._augment, changes.index_select(0, chosen).to(self._device))
        targets = self._targets.index_select(0, self._y.index_select(0, at_home).to(self._device))
        return x.unflatten(0, chosen_TB.shape), targets.unflatten(0, chosen_TB.shape)

    def weights(self, inside_TB: Tensor, size_T: Tensor) -> Tensor:
        """1 / size where ``inside_TB``, else 0, as the loss reads it."""
        # A teacher without a batch has weights 0, not 0 / 0.
        return (inside_TB.to(self.dtype) / size_T.clamp(min=1)[:, None]).to(self._device)


def _steps_of_an_epoch(sizes: Sequence[int], batch_size: int, records: _Records) -> list[_Step]:
    bounds = [batch_bounds(size, batch_size) for size in sizes]
    column = torch.arange(batch_size)
    steps = []
    for number in range(max(len(b) for b in bounds) - 1):
        teachers = [t for t, b in enumerate(bounds) if len(b) > number + 1]
        start, stop = torch.tensor([b[number : number + 2] if len(b) > number + 1 else (0, 0) for b in bounds]).T
        inside = column < (stop - start)[:, None]
        # The column behind the longest shard holds the filler in every row.
        positions = torch.where(inside, start[:, None] + column, records.longest)
        weights = records.weights(inside, stop - start)
        steps.append(_Step(teachers=teachers, positions_TB=positions, weights_TB=weights))
    return steps


def _with_filler(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])])


def _public_shard(spec: TeacherSpec, like: Shard) -> Shard:
    """As many records of zeros as the configuration says a shard may have, or one batch of them."""
    size = spec.max_shard_size or spec.largest_batch
    return Shard(x=like.x.new_zeros(size, *like.x.shape[1:]), y=like.y.new_zeros(size))


def _smoothed_classes(spec: TeacherSpec, dtype: torch.dtype) -> Tensor:
    """The target of each class, then that of the filler: zeros."""
    smoothing, classes = spec.fit.label_smoothing, torch.eye(spec.num_classes, dtype=dtype)
    return functional.pad(classes * (1 - smoothing) + smoothing / spec.num_classes, (0, 0, 0, 1))


def _stack_size(spec: TeacherSpec, like: Shard) -> int:
    num_parameters = sum(p.numel() for p in initial_model(spec, 0, like).parameters())
    return max(_FEWEST_TEACHERS_AT_ONCE, _PARAMETERS_AT_ONCE // num_parameters)


# Layers of a stack. Dense activations are (T, F, B), the layout that leaves weight gradients contiguous; images
# (T, B, channels, H, W) run as (B, T * channels, H, W).


def _linear(_: nn.Module, own: StackedWeights, x: Tensor) -> Tensor:
    return torch.baddbmm(own["bias"][:, :, None], own["weight"], x)


def _convolution(layer: nn.Module, own: StackedWeights, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Conv2d)
    num_teachers = len(own["weight"])
    bias = own["bias"].flatten() if "bias" in own else None
    out = functional.conv2d(
        _side_by_side(x), own["weight"].flatten(0, 1), bias, layer.stride, layer.padding, groups=num_teachers
    )
    return _apart(out, num_teachers)


def _group_norm(layer: nn.Module, own: StackedWeights, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.GroupNorm)
    num_groups = len(x) * layer.num_groups
    scale, shift = own["weight"].flatten(), own["bias"].flatten()
    out = functional.group_norm(_side_by_side(x), num_groups, scale, shift, layer.eps)
    return _apart(out, len(x))


def _per_image(layer: nn.Module, _: StackedWeights, x: Tensor) -> Tensor:
    out: Tensor = layer(_side_by_side(x))
    return _apart(out, len(x))


def _per_element(layer: nn.Module, _: StackedWeights, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def _flatten(_: nn.Module, __: StackedWeights, x: Tensor) -> Tensor:
    return x.flatten(start_dim=2).transpose(1, 2)


def _side_by_side(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1, 2)


def _apart(x: Tensor, num_teachers: int) -> Tensor:
    apart: Tensor = x.unflatten(1, (num_teachers, -1))
    return apart.transpose(0, 1)


_LAYERS: dict[type[nn.Module], Callable[[nn.Module, StackedWeights, Tensor], Tensor]] = {
    ScaleBytes: _per_element,
    nn.Flatten: _flatten,
    nn.Linear: _linear,
    nn.ReLU: _per_element,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.MaxPool2d: _per_image,
    nn.AdaptiveAvgPool2d: _per_image,
}


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
