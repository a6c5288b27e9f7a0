"""Many teachers as one program: parameters stacked along a first axis, one forward and backward pass for all.

Dense layers become batched matrix products and convolutions grouped ones; any other architecture runs through
``torch.func.vmap``. The result is that of the loop up to rounding, and it is a function of a teacher's own shard, bit
for bit: a teacher keeps its row of the stack, whatever computes runs on shapes made of public numbers, and every
teacher has an optimiser state of its own. Shards are ragged: records of zeros without weight fill a batch up, and a
teacher without a batch is computed on such records alone and not updated. The longest shard of a stack decides how many
steps an epoch has, and a step leaves a teacher that has no batch in it as it was.

Shapes: T teachers, B records of a batch, N records of the longest shard, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fairpate.nn.augment import apply_changes
from fairpate.nn.fit import batch_bounds, draw_epoch, precision_of, uses_dropout
from fairpate.nn.models import ScaleBytes, scale_bytes
from fairpate.nn.optimizer import Optimizer, epoch_learning_rate
from teachers.memory import CudaMemory, Memory, stack_that_fits
from teachers.teacher import (
    Shard,
    StackedWeights,
    TeacherSpec,
    initial_model,
    stack_weights,
    training_generator,
)

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
    """Each teacher's weights after training, on the CPU; arguments as :func:`teachers.train.train_teachers`.

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
