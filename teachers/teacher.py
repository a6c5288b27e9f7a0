"""Training of teachers: a pure function from shards to weights, with two engines for networks behind one interface,
and a closed form (:mod:`teachers.ridge`).

The engine ``loop`` fits one teacher after another. The engine ``stacked`` trains many teachers as one program: their
parameters are stacked along a first axis, with one forward and backward pass for all. Dense layers become batched
matrix products and convolutions grouped ones; any other architecture runs through ``torch.func.vmap``. Both engines
give the same teachers up to rounding.

With either engine a teacher is a function of its own shard and of public numbers, bit for bit. All its random numbers
(initial weights, order of records, augmentation) come from ``(seed, teacher index)``. In a stack each teacher has its
own row and its own optimiser state, and the shapes of all kernels depend on public numbers only. Shards differ in size:
batches are filled up with records of zeros that have weight 0, and a teacher without records for a batch is not
updated.

A teacher without records keeps its initial weights: its votes are then a fixed public function of the query. So does a
teacher whose training diverged, because an error would reveal something of its shard.

Shapes: T teachers, B records of a batch, N records of the longest shard, F features, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from fairpate.config import AugmentConfig, FitConfig, ModelConfig
from fairpate.files import arrays_digest
from fairpate.nn import fit as fitting
from fairpate.nn.fit import UNCHANGED, DivergedError, Optimizer
from fairpate.nn.models import CONVOLUTIONAL, ScaleBytes, build_model, scale_bytes
from fairpate.types import stream_seed
from teachers.ridge import FeatureMap, solve_teachers

Engine = Literal["loop", "stacked"]
StackedWeights = dict[str, Tensor]
# With a teacher's number: the streams of its random numbers.
INITIALISATION, TRAINING = 0, 1
# On a CPU a stack should stay near the caches; an accelerator takes what its memory holds.
_PARAMETERS_AT_ONCE, _FEWEST_TEACHERS_AT_ONCE = 2**20, 8
_SAFE_SHARE = 0.8  # the rest is the driver's context, libraries' workspaces, and pieces too small to use


class CudaMemory:
    """Measures the memory of a CUDA device that this process uses. The process may use only a share of the device's
    memory, which is set by a pool with several workers per device."""

    def __init__(self, device: torch.device):
        # By number: some of torch's questions about memory refuse `cuda` for the current device.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @property
    def available_bytes(self) -> float:
        """The number of bytes of the device's memory that this process may use."""
        total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        return total_bytes * torch.cuda.get_per_process_memory_fraction(self._device)

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        """Return the largest number of bytes of the device's memory that ``compute()`` used at any moment; infinity if
        it ran out of memory.

        Memory that torch has reserved counts as used, since no other process can have it.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            compute()
        except torch.OutOfMemoryError:
            return math.inf
        return torch.cuda.max_memory_reserved(self._device)


def stack_that_fits(train_step: Callable[[int], None], memory: CudaMemory, num_teachers: int) -> int:
    """Return how many teachers, up to ``num_teachers``, to train together, so that they fit in 4/5 of the available
    ``memory``.

    ``train_step(k)`` trains k teachers for one step. A line through the peak memory of one and of two teachers
    estimates the number that fits; that number is then tried. While it does not fit, the line through the measured peak
    gives a smaller one, so that a peak just above the limit costs few teachers; it is halved where memory ran out.
    ValueError if one teacher does not fit.
    """
    limit = _SAFE_SHARE * memory.available_bytes

    def peak(count: int) -> float:
        return memory.peak_bytes(lambda: train_step(count))

    peak(1)  # not counted: a process's first step also sets up the libraries' workspaces
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
    while count > 2 and (found := peak(count)) > limit:
        # Less than count - 1 times as much beside `one` as there may be, since the peak is above the limit.
        count = count // 2 if math.isinf(found) else max(2, 1 + int((limit - one) / (found - one) * (count - 1)))
    return count


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The private records of one teacher: features ``x`` (N, ...), bytes or floats, and classes ``y`` (N,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """The public settings of teachers in closed form: their feature map, and the ridge penalty in records."""

    features: FeatureMap
    penalty: float

    @property
    def digest(self) -> str:
        """A digest of these settings, which differs for teachers that were trained with others."""
        arrays = {name: value.numpy() for name, value in vars(self.features).items()}
        return arrays_digest({**arrays, "penalty": np.array(self.penalty)})


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """The public settings that, together with its shard of records, determine a teacher. No shard has more than
    ``max_shard_size`` records.

    ``ridge``: None for networks, which ``model``, ``fit`` and ``augment`` describe; other teachers do not read these.
    """

    model: ModelConfig
    fit: FitConfig
    num_classes: int
    seed: int
    augment: AugmentConfig = UNCHANGED
    max_shard_size: int | None = None
    ridge: Ridge | None = None


def initial_model(spec: TeacherSpec, teacher: int, shard: Shard) -> nn.Module:
    """Return the untrained model of teacher number ``teacher``, with parameters of the type of the shard's features
    (``float32`` for ``uint8``)."""
    shape = tuple(shard.x.shape[1:])
    seed = stream_seed(spec.seed, teacher, INITIALISATION)
    model = build_model(spec.model, input_shape=shape, num_classes=spec.num_classes, generator_seed=seed)
    return model.to(shard.x.dtype if shard.x.is_floating_point() else torch.float32)


def train_stacked(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    indices: Sequence[int],
    *,
    device: torch.device,
    memory: CudaMemory | None = None,
) -> list[StackedWeights]:
    """Train teachers as one program (the engine ``stacked``), and return each teacher's weights on the CPU.

    ``indices`` are the teachers' numbers in the whole ensemble. ``memory`` limits how many teachers train together.
    None means the memory of ``device``, if it is a CUDA device. On a CPU, their number of parameters is limited.
    """
    if memory is None and device.type == "cuda":
        memory = CudaMemory(device)

    def rehearse(count: int) -> None:
        # On records of zeros, the largest number that the configuration allows: the number of teachers that fit must
        # not depend on private shards.
        num_records, like = spec.max_shard_size or spec.fit.batch_size, shards[0]
        public = Shard(x=like.x.new_zeros(num_records, *like.x.shape[1:]), y=like.y.new_zeros(num_records))
        _Stack([public] * count, spec, indices[:count], device).train(is_rehearsal=True)

    if memory is None:
        num_parameters = sum(p.numel() for p in initial_model(spec, 0, shards[0]).parameters())
        size = max(_FEWEST_TEACHERS_AT_ONCE, _PARAMETERS_AT_ONCE // num_parameters)
    else:
        size = stack_that_fits(rehearse, memory, len(shards))
    trained: list[StackedWeights] = []
    for start in range(0, len(shards), size):
        trained += _Stack(shards[start : start + size], spec, indices[start : start + size], device).train()
    return trained


def stacked_logits(model: nn.Module, parameters: StackedWeights, x_TB: Tensor) -> Tensor:
    """Return logits (T, B, C) of T teachers: teacher t has the parameters ``parameters[name][t]`` and the inputs
    ``x_TB[t]``.

    Between layers, images are (T, B, channels, H, W) and dense activations (T, F, B), the layout that leaves weight
    gradients contiguous.
    """
    if not isinstance(model, nn.Sequential) or any(type(layer) not in _STACKED_LAYERS for layer in model):
        # vmap runs any architecture; the layers below have faster batched kernels.
        return vmap(lambda values, x: functional_call(model, values, (x,)))(parameters, x_TB)
    x = x_TB
    for index, layer in enumerate(model):
        own = {name: parameters[f"{index}.{name}"] for name, _ in layer.named_parameters()}
        if isinstance(layer, ScaleBytes | nn.ReLU):
            x = layer(x)
        elif isinstance(layer, nn.Flatten):
            x = x.flatten(start_dim=2).transpose(1, 2)
        elif isinstance(layer, nn.Linear):
            x = torch.baddbmm(own["bias"][:, :, None], own["weight"], x)
        else:
            # Teachers become groups of channels: (B, T * channels, H, W).
            num_teachers, images = len(x), x.transpose(0, 1).flatten(1, 2)
            if isinstance(layer, nn.Conv2d):
                bias = own["bias"].flatten() if "bias" in own else None
                weight = own["weight"].flatten(0, 1)
                out = functional.conv2d(images, weight, bias, layer.stride, layer.padding, groups=num_teachers)
            elif isinstance(layer, nn.GroupNorm):
                # T times as many groups: the statistics of each stay within one teacher.
                scale, shift = own["weight"].flatten(), own["bias"].flatten()
                out = functional.group_norm(images, num_teachers * layer.num_groups, scale, shift, layer.eps)
            else:
                # Pooling treats every channel, and so every teacher, by itself.
                out = layer(images)
            x = out.unflatten(1, (num_teachers, -1)).transpose(0, 1)
    return x.transpose(1, 2)


_DENSE_LAYERS = (ScaleBytes, nn.Flatten, nn.Linear, nn.ReLU)
_STACKED_LAYERS = (*_DENSE_LAYERS, nn.Conv2d, nn.GroupNorm, nn.MaxPool2d, nn.AdaptiveAvgPool2d)


class _Stack:
    """T teachers that are trained as one program; their parameters are rows of tensors (T, ...).

    The teachers' records are concatenated, followed by one record of zeros that fills incomplete batches. Records are
    on the device only if the configuration limits the size of a shard, since the use of device memory must not depend
    on private sizes. Otherwise they stay on the CPU and are sent batch by batch.
    """

    def __init__(self, shards: Sequence[Shard], spec: TeacherSpec, teachers: Sequence[int], device: torch.device):
        models = [initial_model(spec, teacher, shard) for teacher, shard in zip(teachers, shards, strict=True)]
        states: list[StackedWeights] = [
            {name: p for name, p in model.named_parameters() if p.requires_grad} for model in models
        ]
        self._parameters = {
            name: torch.stack([state[name] for state in states]).detach().to(device) for name in states[0]
        }
        # Afterwards: its own parameters move with it.
        self._template = models[0].to(device)
        # Views of the stack: the optimiser has a state for each teacher, and updates the stacked tensors in place.
        rows = zip(*(value.unbind() for value in self._parameters.values()), strict=True)
        self._optimizer = Optimizer([parameter for row in rows for parameter in row], spec.fit)
        self._fit, self._augment, self._device, self._shards = spec.fit, spec.augment, device, shards
        # Teachers that have not diverged.
        self._kept_T = torch.ones(len(shards), dtype=torch.bool)
        self._is_dense = all(type(layer) in _DENSE_LAYERS for layer in self._template.children())
        seeds = (stream_seed(spec.seed, teacher, TRAINING) for teacher in teachers)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._home = torch.device("cpu") if spec.max_shard_size is None else device
        # Where each shard begins, and the filler's row; its label is the number of the row of zeros in the targets.
        starts = torch.tensor([0, *(len(shard.y) for shard in shards)]).cumsum(0).tolist()
        self._starts, self._filler, like = starts[:-1], starts[-1], shards[0].x
        self._x = torch.cat([*(shard.x for shard in shards), like.new_zeros(1, *like.shape[1:])]).to(self._home)
        self._y = torch.cat([*(shard.y for shard in shards), torch.tensor([spec.num_classes])]).to(self._home)
        dtype = self._x.dtype if self._x.is_floating_point() else torch.float32
        smoothing, classes = spec.fit.label_smoothing, torch.eye(spec.num_classes, dtype=dtype)
        # The target of the filler is a row of zeros, so that it adds 0 to the loss and to every gradient.
        targets = functional.pad(classes * (1 - smoothing) + smoothing / spec.num_classes, (0, 0, 0, 1))
        self._targets = targets.to(device)
        batch_size = min(spec.fit.batch_size, spec.max_shard_size or spec.fit.batch_size)
        bounds, column = [fitting.batch_bounds(len(shard.y), batch_size) for shard in shards], torch.arange(batch_size)
        self._steps = []
        for number in range(max(len(b) for b in bounds) - 1):
            present = [t for t, b in enumerate(bounds) if len(b) > number + 1]
            start, stop = torch.tensor([b[number : number + 2] if len(b) > number + 1 else (0, 0) for b in bounds]).T
            inside = column < (stop - start)[:, None]
            # The column behind the longest shard holds the filler in every row.
            positions = torch.where(inside, start[:, None] + column, max(len(shard.y) for shard in shards))
            # A teacher without a batch has weights 0, not 0 / 0.
            weights = inside.to(dtype) / (stop - start).clamp(min=1)[:, None]
            self._steps.append(_Step(teachers=present, positions_TB=positions, weights_TB=weights.to(device)))

    def train(self, *, is_rehearsal: bool = False) -> list[StackedWeights]:
        """Train the teachers for all epochs, and return each teacher's weights on the CPU.

        A rehearsal stops after one step and returns no weights: it serves to measure the memory of a step, since all
        steps have the same shapes.
        """
        for epoch in range(self._fit.epochs if self._steps else 0):
            pairs = zip(self._shards, self._generators, strict=True)
            draws = [fitting.draw_epoch(shard.x, self._augment, generator) for shard, generator in pairs]
            # Every teacher's rows in the epoch's order (T, N + 1): the end of a shorter shard and the last column are
            # filler.
            shifted = [order + start for (order, _), start in zip(draws, self._starts, strict=True)]
            rows = nn.utils.rnn.pad_sequence(shifted, batch_first=True, padding_value=self._filler)
            rows = functional.pad(rows, (0, 1), value=self._filler)
            drawn = [change for _, change in draws if change is not None]
            # The last one belongs to the filler.
            drawn += [change.new_zeros(1, *change.shape[1:]) for change in drawn[:1]]
            changes = torch.cat(drawn) if drawn else None
            for step in self._steps:
                # Teachers without a batch are computed too: the shape of a kernel must not follow who has one.
                chosen_TB = rows.gather(1, step.positions_TB)
                chosen, at_home = chosen_TB.flatten(), chosen_TB.flatten().to(self._home)
                x = scale_bytes(self._x.index_select(0, at_home).to(self._device))
                if changes is not None:
                    x = fitting.apply_changes(x, self._augment, changes.index_select(0, chosen).to(self._device))
                targets = self._targets.index_select(0, self._y.index_select(0, at_home).to(self._device))
                batch = x.unflatten(0, chosen_TB.shape), targets.unflatten(0, chosen_TB.shape), step.weights_TB
                gradients = self._gradients(*batch, self._kept_T)
                # Batched products of dense layers keep teachers apart by themselves.
                if not self._is_dense and not (is_finite_T := _finite(gradients)).all():
                    gradients = self._without_diverged(is_finite_T, batch)
                by_teacher, count = [g.unbind() for g in gradients], len(gradients)
                own = [gradient[t] for t in step.teachers for gradient in by_teacher]
                # Updates of a teacher without a batch are left out: a gradient of 0 would still move momentum and step
                # counts.
                everyone = len(own) == count * len(chosen_TB)
                only = None if everyone else [t * count + k for t in step.teachers for k in range(count)]
                self._optimizer.step(own, epoch, only=only)
                if is_rehearsal:
                    return []
        fixed = {name: value for name, value in self._template.state_dict().items() if name not in self._parameters}
        everyones = {name: value.expand(len(self._generators), *value.shape) for name, value in fixed.items()}
        stacked = {name: value.cpu() for name, value in (self._parameters | everyones).items()}
        # Cloned: a view would keep the whole stack in memory.
        return [{name: value[t].clone() for name, value in stacked.items()} for t in range(len(self._generators))]

    def _gradients(self, x_TB: Tensor, targets_TBC: Tensor, weights_TB: Tensor, kept_T: Tensor) -> list[Tensor]:
        """Return every parameter's gradient (T, ...). Row t is the gradient of teacher t's loss alone.

        Where the mask ``kept_T`` is False, the teacher's parameters and records are replaced by zeros, so that it does
        not affect the others.
        """
        parameters, x = {name: value.detach() for name, value in self._parameters.items()}, x_TB
        if not kept_T.all():
            # Zeros in place of the others: the shapes of all kernels stay.
            parameters = {name: _rows(kept_T, value) for name, value in parameters.items()}
            x = _rows(kept_T, x)
        active = {name: value.requires_grad_() for name, value in parameters.items()}
        with fitting.precision_of(self._fit, self._device):
            log_p_TBC = functional.log_softmax(stacked_logits(self._template, active, x), dim=2)
            # A sum over teachers: the gradient in each row is that of its own teacher's loss alone.
            loss = -((targets_TBC * log_p_TBC).sum(dim=2) * weights_TB).sum()
        torch.autograd.backward(loss)
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in active.values()]

    def _without_diverged(self, is_finite_T: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Leave out the teachers whose training diverged, and return the gradients of the others on the same ``batch``.

        ``is_finite_T`` marks the teachers whose gradients are finite. A GPU's grouped convolution may multiply the
        values of a teacher by zeros for another one, and zero times infinity is NaN, which spreads from the teacher
        that diverged. To find that teacher, each teacher whose gradients are not finite is computed alone.
        """
        for teacher in torch.nonzero(~is_finite_T).flatten().tolist():
            alone_T = torch.zeros_like(self._kept_T)
            alone_T[teacher] = True
            if not _finite(self._gradients(*batch, alone_T))[teacher]:
                self._kept_T[teacher] = False
                for value in self._parameters.values():
                    value[teacher] = torch.nan
        return self._gradients(*batch, self._kept_T)


def _rows(kept_T: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` with zeros in the rows of the teachers that the mask ``kept_T`` excludes."""
    return values.where(kept_T.to(values.device).view(-1, *[1] * (values.ndim - 1)), 0)


def _finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return a mask (T,), on the CPU: True for a teacher whose gradients are all finite."""
    return torch.stack([g.isfinite().flatten(1).all(dim=1) for g in gradients]).all(dim=0).cpu()


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One training step of several teachers: a batch for each of ``teachers``, which are those that still have records
    in this step.

    ``positions_TB`` are positions in a shuffled shard; ``weights_TB`` are 1 / batch size, and 0 for records that only
    fill the batch.
    """

    teachers: Sequence[int]
    positions_TB: Tensor
    weights_TB: Tensor


def train_teachers(
    shards: Sequence[Shard],
    spec: TeacherSpec,
    *,
    teacher_indices: Sequence[int] | None = None,
    engine: Literal["auto"] | Engine = "auto",
    device: str = "cpu",
    on_diverged: Callable[[int], None] = lambda _: None,
) -> StackedWeights:
    """Train one teacher per shard; return their weights on the CPU, stacked along a first axis of T teachers.

    ``teacher_indices`` (default 0..T-1) are the teachers' numbers in the whole ensemble. A teacher whose weights do not
    stay finite gets its initial weights, and ``on_diverged`` is called with its number. No shard has more records than
    the specification's ``max_shard_size``.
    """
    indices = range(len(shards)) if teacher_indices is None else teacher_indices
    if spec.ridge is not None:
        own = [(spec.ridge.features(shard.x.to(device)), shard.y.to(device)) for shard in shards]
        return solve_teachers(own, indices, num_classes=spec.num_classes, penalty=spec.ridge.penalty)
    if spec.model.trainable == "head":
        # Once per record: layers that are not trained give the same features in every epoch. On these features the
        # teacher is a logistic regression.
        shards = [Shard(x=fitting.frozen_features(spec.model, shard.x, device=device), y=shard.y) for shard in shards]
        spec = replace(spec, model=ModelConfig(name="logistic"))
    chosen = choose_engine(spec.model, device) if engine == "auto" else engine
    with fitting.exact_convolutions():
        if chosen == "stacked":
            trained = train_stacked(shards, spec, indices, device=torch.device(device))
        else:
            trained = []
            for teacher, shard in zip(indices, shards, strict=True):
                model = initial_model(spec, teacher, shard).to(torch.device(device))
                generator = torch.Generator().manual_seed(stream_seed(spec.seed, teacher, TRAINING))
                try:
                    fitting.fit(model, shard.x, shard.y, spec.fit, generator=generator, augmentation=spec.augment)
                except DivergedError:
                    for parameter in model.parameters():
                        # NaN, as a diverged teacher has it in the stacked engine: both are handled below.
                        parameter.data.fill_(torch.nan)
                trained.append(_state(model))
    for place, (teacher, shard) in enumerate(zip(indices, shards, strict=True)):
        if all(bool(value.isfinite().all()) for value in trained[place].values()):
            continue
        on_diverged(teacher)
        # Its weights before training, as without records: an error would reveal something of the shard.
        trained[place] = _state(initial_model(spec, teacher, Shard(x=shard.x[:0], y=shard.y[:0])))
    return {name: torch.stack([teacher[name] for teacher in trained]) for name in trained[0]}


def choose_engine(model: ModelConfig, device: str) -> Engine:
    """Return the engine that trains teachers of this model faster on this device: ``stacked`` (all at once) or ``loop``
    (one by one).

    ``loop`` is for networks whose convolutions are trained: for all of them on a CPU, and on a GPU only for residual
    and densely connected networks, because a single one keeps the GPU busy. All other models are stacked. The choice
    follows measurements on two CPU cores and on an H100 (docs/scaling.md).
    """
    trains_convolutions = model.name in CONVOLUTIONAL and model.trainable == "all"
    is_large = model.name.startswith(("resnet", "densenet"))
    return "loop" if trains_convolutions and (device == "cpu" or is_large) else "stacked"


def _state(model: nn.Module) -> StackedWeights:
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
