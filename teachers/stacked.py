"""Many teachers as one program: parameters stacked along a first axis, one forward and backward pass for all.

Dense layers become batched matrix products and convolutions grouped ones; any other architecture runs through
``torch.func.vmap``. Shards are ragged: the teachers of a stack are sorted by the number of batches in an epoch, so
those that still have one are a prefix, and a teacher that has none left takes no step; teachers with equally many
batches stand side by side and share one optimiser. Rows that pad a batch carry weight 0. The result is that of the
loop up to rounding. Shapes: T teachers, B records of a batch, F features, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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
) -> StackedWeights:
    """As :func:`teachers.train.train_teachers`, on shards that are already standardised.

    ``memory`` None is that of a CUDA device; a CPU's is not asked.
    """
    by_size = sorted(range(len(shards)), key=lambda t: -len(shards[t].x))
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)

    def rehearse(count: int) -> None:
        largest = by_size[:count]
        _Stack([shards[t] for t in largest], spec, [indices[t] for t in largest], device).rehearse()

    size = _stack_size(shards, spec) if memory is None else stack_that_fits(rehearse, memory, len(shards))
    trained: list[StackedWeights] = [{} for _ in shards]
    for start in range(0, len(by_size), size):
        members = by_size[start : start + size]
        stack = _Stack([shards[t] for t in members], spec, [indices[t] for t in members], device)
        stack.train()
        for position, weights in zip(members, stack.weights(), strict=True):
            trained[position] = weights
    return stack_weights(trained)


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
    """T teachers in training, sorted by falling shard size. Parameters live in tensors (T, ...)."""

    def __init__(self, shards: Sequence[Shard], spec: TeacherSpec, teachers: Sequence[int], device: torch.device):
        models = [initial_model(spec, teacher, shard) for teacher, shard in zip(teachers, shards, strict=True)]
        if uses_dropout(models[0]):
            raise ValueError("engine=stacked trains without dropout; set model.dropout=0 or engine=loop.")
        self._template = models[0].to(device)
        states: list[StackedWeights] = [_trained_parameters(model) for model in models]
        self._parameters = {name: value.detach().to(device) for name, value in stack_weights(states).items()}
        self._fit = spec.fit
        self._generators = [training_generator(spec, teacher) for teacher in teachers]
        self._shards_x = [shard.x for shard in shards]
        self._x = scale_bytes(torch.cat(self._shards_x).to(device))  # the shards end to end
        self._layout = _BatchLayout([len(shard.y) for shard in shards], spec.fit.batch_size, self._x)
        self._targets = _smoothed_one_hot(torch.cat([s.y for s in shards]), spec, self._x.dtype).to(device)
        self._optimizers = [
            Optimizer([value[start:stop] for value in self._parameters.values()], spec.fit)
            for start, stop in self._layout.equals
        ]
        self._device = device

    def train(self) -> None:
        """All epochs."""
        for epoch in range(self._fit.epochs if self._layout.batches else 0):
            rows, x = self._shuffled_epoch()
            learning_rate = epoch_learning_rate(self._fit, epoch)
            for num_active, positions, weights_TB in self._layout.batches:
                self._train_batch(rows[:num_active].gather(1, positions), x, weights_TB, learning_rate)
        if not all(bool(value.isfinite().all()) for value in self._parameters.values()):
            raise ValueError(f"Training diverged at learning_rate={self._fit.learning_rate}; lower it.")

    def rehearse(self) -> None:
        """The first step, which is the largest: for who wants to know what it needs."""
        for num_active, positions, weights_TB in self._layout.batches[:1]:
            rows, x = self._shuffled_epoch()
            self._train_batch(rows[:num_active].gather(1, positions), x, weights_TB, self._fit.learning_rate)

    def weights(self) -> list[StackedWeights]:
        """Each teacher's weights on the CPU."""
        fixed = {name: value for name, value in self._template.state_dict().items() if name not in self._parameters}
        everyones = {name: value.expand(len(self._generators), *value.shape) for name, value in fixed.items()}
        stacked = {name: value.cpu() for name, value in (self._parameters | everyones).items()}
        return [{name: value[t].clone() for name, value in stacked.items()} for t in range(len(self._generators))]

    def _shuffled_epoch(self) -> tuple[Tensor, Tensor]:
        """Row numbers (T, longest shard) into all shards laid end to end, and those records, augmented."""
        draws = [draw_epoch(x, self._fit, g) for x, g in zip(self._shards_x, self._generators, strict=True)]
        rows = nn.utils.rnn.pad_sequence([order for order, _ in draws], batch_first=True)
        x = self._x
        changes = [change for _, change in draws if change is not None]
        if changes:
            x = apply_changes(x, self._fit.augment, torch.cat(changes).to(self._device))
        return rows.to(self._device) + self._layout.offsets[:, None], x

    def _train_batch(self, chosen_TB: Tensor, x: Tensor, weights_TB: Tensor, learning_rate: float) -> None:
        """One step on the records ``chosen_TB`` of ``x``."""
        batch_x = x.index_select(0, chosen_TB.flatten()).unflatten(0, chosen_TB.shape)
        self._step(batch_x, self._targets[chosen_TB], weights_TB, learning_rate)

    def _step(self, x_TB: Tensor, targets_TBC: Tensor, weights_TB: Tensor, learning_rate: float) -> None:
        """One step of every teacher that has this batch."""
        num_active = len(x_TB)
        active = {name: value[:num_active].detach().requires_grad_() for name, value in self._parameters.items()}
        with precision_of(self._fit, self._device):
            log_p_TBC = functional.log_softmax(stacked_logits(self._template, active, x_TB), dim=2)
            loss = -((targets_TBC * log_p_TBC).sum(dim=2) * weights_TB).sum()
        torch.autograd.backward(loss)
        for (start, stop), optimizer in zip(self._layout.equals, self._optimizers, strict=True):
            if start < num_active:
                optimizer.step([_gradient(p)[start:stop] for p in active.values()], learning_rate)


def _trained_parameters(model: nn.Module) -> StackedWeights:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


class _BatchLayout:
    """Where the records of each batch of an epoch stand in their teachers' shuffled shards.

    ``batches`` holds, per step, how many teachers still have a batch, the positions (those teachers, B) of its
    records, and weights (those teachers, B): 1 / batch size, or 0 for padding. ``equals`` holds the ranges of
    teachers with equally many batches.
    """

    def __init__(self, sizes: Sequence[int], batch_size: int, like: Tensor):
        starts = [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()[:-1]]
        self.offsets = torch.tensor(starts, device=like.device)
        bounds = [batch_bounds(size, batch_size) for size in sizes]
        self.batches = [
            self._batch([b[step : step + 2] for b in bounds if len(b) > step + 1], like)
            for step in range(len(bounds[0]) - 1)
        ]
        counts = [len(b) for b in bounds]
        edges = [0, *(t for t in range(1, len(counts)) if counts[t] != counts[t - 1]), len(counts)]
        self.equals = list(itertools.pairwise(edges))

    @staticmethod
    def _batch(ranges: list[list[int]], like: Tensor) -> tuple[int, Tensor, Tensor]:
        start, stop = torch.tensor(ranges, device=like.device).T
        size = stop - start
        column = torch.arange(int(size.max()), device=like.device)
        inside = column < size[:, None]
        positions = torch.where(inside, start[:, None] + column, 0)
        return len(ranges), positions, inside.to(like.dtype) / size[:, None]


def _smoothed_one_hot(y: Tensor, spec: TeacherSpec, dtype: torch.dtype) -> Tensor:
    one_hot = functional.one_hot(y, spec.num_classes).to(dtype)
    return one_hot * (1 - spec.fit.label_smoothing) + spec.fit.label_smoothing / spec.num_classes


def _stack_size(shards: Sequence[Shard], spec: TeacherSpec) -> int:
    num_parameters = sum(p.numel() for p in initial_model(spec, 0, shards[0]).parameters())
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
