"""Ordinary training without privacy: augmentation, optimisers, the fit loop, prediction, and parity penalties.

The fit loop trains teachers, students and ordinary classifiers. It is deterministic: the order of the records and their
augmentation come from the caller's generator. An epoch visits every record once, in batches whose sizes differ by at
most one record; without records the model is unchanged.

Random changes of images are drawn by ``draw_changes``, the same number of random numbers per image for every
configuration, and applied by ``apply_changes``, a pure function. An ensemble can therefore draw per teacher and apply
to many teachers' images together.

The demographic-parity regulariser (DPFR) of FairDP-SGD (FairPATE, Algorithm 6) sharpens logits u_i of public records,
``s_i = softmax(u_i / temperature)``. The gap of a group and a class is the mean of s in the group minus its mean in all
other groups, and DPFR is the largest gap. ``hardmax`` uses the largest gap itself, as the published code does;
``softmax`` weights all gaps by ``softmax(gap / max_temperature)``, as the paper's text says, and differentiates the
weights too. Groups and records must be public: with DPFR of a private batch, every record's gradient would depend on
the other records, and clipping would not bound one record's contribution.

Shapes: R members, N records, B records of a public batch, D features, C classes, G groups with a member and a
complement.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.sgd import sgd

from fairpate.config import AugmentConfig, CalibrationConfig, DpfrConfig, FitConfig, ModelConfig, PenaltyConfig
from fairpate.nn.models import HEAD_OF, build_model, memory_format_for, scale_bytes, to_memory_format

# Rotation, shift (2), zoom, shear; flip, channel swap, erasing; position and size of the erased rectangle (4).
_FIXED_DRAWS = 12
_ELASTIC_SIDE = 5  # an elastic change moves a coarse grid of points, this many on a side
_SMALLEST_ERASED_SHARE, _LARGEST_ERASED_SHARE = 0.1, 0.4
ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
SGD_MOMENTUM = 0.9
_RECORDS_AUGMENTED_AT_ONCE = 1024
_MAX_RECORDS_AT_ONCE, _MAX_VALUES_AT_ONCE = 1024, 2**24  # at prediction
_QUARTERS = 4
UNCHANGED = AugmentConfig()
# A quarter decides when a calibration stops; a batch has members of every group that is not rare.
_HELD_OUT, _CALIBRATION_BATCH, _CALIBRATION_EPOCHS, _CALIBRATION_RATE = 0.25, 256, 20, 1e-3
ERASED = 0.2
"""Share of the strongly changed copies of FixMatch that lose a rectangle (Sohn et al. 2020 erase too)."""
Penalty = Callable[[nn.Module], Tensor]


def augment(x_BCHW: Tensor, config: AugmentConfig, generator: torch.Generator, *, erase: float = 0.0) -> Tensor:
    """Return randomly changed copies of float images, each changed independently.

    Pixels moved out of the frame are lost, and pixels that enter are 0. ``erase`` is the probability of setting one
    random rectangle to 0.
    """
    if config == UNCHANGED and not erase:
        return x_BCHW
    changes = draw_changes(len(x_BCHW), num_channels=x_BCHW.shape[1], generator=generator)
    # Drawn on the generator's device and moved: a GPU sees the same changes as a CPU.
    return apply_changes(x_BCHW, config, changes.to(x_BCHW.device), erase=erase)


def draw_changes(num_images: int, *, num_channels: int, generator: torch.Generator) -> Tensor:
    """Return uniform numbers in [0, 1), one row (num_images, draws) per image: all randomness of its augmentation."""
    return torch.rand(num_images, _FIXED_DRAWS + num_channels + 2 * _ELASTIC_SIDE**2, generator=generator)


def apply_changes(x_BCHW: Tensor, config: AugmentConfig, changes: Tensor, *, erase: float = 0.0) -> Tensor:
    """Return the images augmented as ``config`` says, by the random numbers ``changes`` of :func:`draw_changes`.

    ``erase`` is the probability of setting one random rectangle to 0.
    """
    if x_BCHW.ndim != 4:
        raise ValueError(
            f"Augmentation reads images of shape (batch, channels, height, width), got {tuple(x_BCHW.shape)}; leave "
            "augmentation out."
        )
    x, shape, num_channels = x_BCHW, x_BCHW.shape, x_BCHW.shape[1]
    changes = changes.to(x.dtype)
    flip = changes[:, 5] < config.horizontal_flip
    affine = (config.rotation_degrees, config.translation_fraction, config.scale_fraction, config.shear_degrees)
    if any((*affine, config.elastic_fraction)):
        # `affine_grid` maps output to input: shear, zoom, rotation and shift about the centre are inverted, and come in
        # reverse order.
        (height, width), signed = shape[-2:], 2 * changes[:, :5] - 1
        angle = signed[:, 0] * math.radians(config.rotation_degrees)
        shift = 2 * signed[:, 1:3] * config.translation_fraction
        zoom = 1 + signed[:, 3] * config.scale_fraction
        shear = torch.tan(signed[:, 4] * math.radians(config.shear_degrees))
        cosine, sine = torch.cos(angle), torch.sin(angle)
        rotation = torch.stack([cosine, sine, -sine, cosine], dim=1).view(-1, 2, 2)
        ones, zeros = torch.ones_like(shear), torch.zeros_like(shear)
        unshear = torch.stack([ones, -shear, zeros, ones], dim=1).view(-1, 2, 2)
        linear = (unshear @ rotation) / zoom[:, None, None]
        # Coordinates run over [-1, 1] on both axes: a rotation of a non-square image is corrected by its aspect ratio.
        aspect = torch.tensor([[1.0, height / width], [width / height, 1.0]], dtype=signed.dtype, device=signed.device)
        linear = linear * aspect
        matrix = torch.cat([linear, -(linear @ shift[:, :, None])], dim=2)
        # A flip mirrors the first coordinate of the input, across the image.
        mirror = torch.where(flip, -1.0, 1.0).to(signed.dtype)
        matrix = torch.cat([matrix[:, :1] * mirror[:, None, None], matrix[:, 1:]], dim=1)
        grid = functional.affine_grid(matrix, list(shape), align_corners=False)
        if config.elastic_fraction:
            # Shifts of a coarse grid, each up to a fraction of a side (which is 2, from -1 to 1), and smooth between.
            signed = (2 * changes[:, _FIXED_DRAWS + num_channels :] - 1).view(-1, 2, _ELASTIC_SIDE, _ELASTIC_SIDE)
            coarse = 2 * config.elastic_fraction * signed
            fine = functional.interpolate(coarse, size=list(shape[-2:]), mode="bicubic", align_corners=True)
            grid = grid + fine.permute(0, 2, 3, 1)
        x = functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    elif config.horizontal_flip:
        x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    if config.channel_swap:
        keys = changes[:, _FIXED_DRAWS : _FIXED_DRAWS + num_channels]
        identity = torch.arange(num_channels, device=x.device)
        # The order of random keys is a uniform permutation of the channels.
        order = torch.where((changes[:, 6] < config.channel_swap)[:, None], keys.argsort(dim=1), identity)
        x = x.gather(1, order[:, :, None, None].expand_as(x))
    if erase:
        inside, spread = (changes[:, 7] < erase)[:, None, None], _LARGEST_ERASED_SHARE - _SMALLEST_ERASED_SHARE
        for axis, side in enumerate(shape[-2:]):
            length = ((_SMALLEST_ERASED_SHARE + spread * changes[:, 8 + axis]) * side).ceil()
            start = (changes[:, 10 + axis] * (side - length + 1)).floor()
            pixel = torch.arange(side, device=x.device)
            covered = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])
            inside = inside & (covered[:, :, None] if axis == 0 else covered[:, None, :])
        x = x.masked_fill(inside[:, None], 0.0)
    return x


def strengthened(config: AugmentConfig) -> AugmentConfig:
    """Return the strong augmentation of FixMatch: rotation, shift and zoom are up to twice as large as in ``config``,
    and shear and elastic changes are added."""
    limits = {"rotation_degrees": 180.0, "translation_fraction": 0.5, "scale_fraction": 0.5}
    doubled = {name: min(limit, 2 * getattr(config, name)) for name, limit in limits.items()}
    wanted = doubled | {"shear_degrees": 15.0, "elastic_fraction": 0.03}
    return config.model_copy(update={name: max(value, getattr(config, name)) for name, value in wanted.items()})


class Optimizer:
    """Updates ``parameters`` in place by SGD or Adam; weight decay is added to the gradient.

    The learning rate is constant, or falls with the epochs (counted from 0) in a half cosine from the full rate to 0.
    A gradient must have the memory layout of its parameter, as after ``backward``: the kernels read both in the order
    of memory.
    """

    def __init__(self, parameters: Iterable[Tensor], config: FitConfig):
        self._parameters = list(parameters)
        self._config = config
        self._first_moments = [torch.zeros_like(p) for p in self._parameters]  # of SGD, its momentum
        self._second_moments = [torch.zeros_like(p) for p in self._parameters] if config.optimizer == "adam" else []
        device = self._parameters[0].device if self._parameters else None
        # A count per parameter: of stacked teachers some make fewer steps.
        self._steps = torch.zeros(len(self._parameters), device=device)
        # Views of the one tensor: all counts rise in one operation, and the kernel reads one for each parameter.
        self._step_counts = list(self._steps.unbind())

    @torch.no_grad()
    def step(self, gradients: list[Tensor], epoch: int, *, only: Sequence[int] | None = None) -> None:
        """Update parameters and their optimiser state by ``gradients``, one for each parameter. ``only``: the positions
        of the parameters to update; None: all parameters."""
        if not self._parameters or (only is not None and not only):
            return
        config, learning_rate = self._config, self._config.learning_rate
        if config.schedule == "cosine":
            learning_rate *= 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))
        parameters, first_moments, second_moments, step_counts = (
            values if only is None or not values else [values[place] for place in only]
            for values in (self._parameters, self._first_moments, self._second_moments, self._step_counts)
        )
        options: dict[str, Any] = {"lr": learning_rate, "weight_decay": config.weight_decay, "maximize": False}
        # Kernels, called directly: classes of torch.optim would import a compiler, seconds for each worker process.
        if config.optimizer == "adam":
            # The kernel's bias correction takes counts that include the present step.
            self._steps[slice(None) if only is None else list(only)] += 1
            beta1, beta2 = ADAM_BETAS
            options |= {"beta1": beta1, "beta2": beta2, "eps": ADAM_EPSILON, "amsgrad": False}
            torch._fused_adam_(parameters, gradients, first_moments, second_moments, [], step_counts, **options)
        else:
            options |= {"momentum": SGD_MOMENTUM, "dampening": 0.0, "nesterov": False, "fused": True}
            sgd(parameters, gradients, [*first_moments], **options)

    def step_from_backward(self, epoch: int) -> None:
        """Update all parameters by the gradients that ``backward`` left in them, and clear these gradients. A missing
        gradient counts as 0."""
        self.step([p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters], epoch)
        for parameter in self._parameters:
            # Not zeros: the next backward pass then writes the gradient instead of adding to it.
            parameter.grad = None


class DivergedError(ValueError):
    """Raised if the training loss is not finite."""


def fit(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    config: FitConfig,
    *,
    generator: torch.Generator,
    augmentation: AugmentConfig = UNCHANGED,
    on_epoch: Callable[[int, float], None] | None = None,
    penalty: Penalty | None = None,
) -> None:
    """Train ``model`` in place on its own device, and leave it in evaluation mode.

    ``x`` (N, ...) holds bytes or floats; ``targets`` are classes (N,) ``int64`` or probabilities (N, C).
    ``augmentation`` changes pictures anew in every epoch. ``on_epoch(epoch, mean_loss)`` runs after each epoch, counted
    from 0. ``penalty(model)`` is added to the loss of every step. :class:`DivergedError` if a loss is not finite.
    """
    if len(x) != len(targets):
        raise ValueError(f"Expected one target per record, got {len(x)} records and {len(targets)} targets.")
    device = next(model.parameters()).device
    to_memory_format(model, memory_format_for(x))
    optimizer = Optimizer((p for p in model.parameters() if p.requires_grad), config)
    model.train()
    for epoch in range(config.epochs if len(x) else 0):
        loss_sum = torch.zeros((), device=device)
        for batch_x, batch_targets in epoch_batches(x, targets, config, augmentation, generator, device):
            with precision_of(config, device):
                logits = model(batch_x)
                loss = functional.cross_entropy(logits, batch_targets, label_smoothing=config.label_smoothing)
                if penalty is not None:
                    loss = loss + penalty(model)
            torch.autograd.backward(loss)
            optimizer.step_from_backward(epoch)
            # Added up on the device: reading a number at each step would wait for the device.
            loss_sum += loss.detach() * len(batch_x)
        # One loss that is not finite makes the sum of its epoch not finite: one check per epoch is enough.
        mean_loss = float(loss_sum) / len(x)
        if not math.isfinite(mean_loss):
            raise DivergedError(f"Training diverged in epoch {epoch}: loss {mean_loss}; lower learning_rate.")
        if on_epoch is not None:
            on_epoch(epoch, mean_loss)
    model.eval()


def precision_of(config: FitConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager for the forward pass and the loss of one step, inside which they run in the precision of
    ``config``.

    The backward pass needs no context: it uses the types of the forward pass.
    """
    if config.precision == "float32":
        return nullcontext()
    # Losses need no scaling up: bfloat16 has float32's range of exponents.
    return torch.autocast(device.type, dtype=torch.bfloat16)


exact_convolutions: Callable[[], AbstractContextManager[object]] = partial(
    torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False
)
"""Returns a context in which a GPU's convolutions are deterministic and compute in full ``float32`` precision.

Otherwise cuDNN may choose its algorithm by timing, and rounds the factors of ``float32`` products to eleven bits.
"""


def epoch_batches(
    x: Tensor,
    targets: Tensor,
    config: FitConfig,
    augmentation: AugmentConfig,
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch on ``device``: records and targets, shuffled, scaled and augmented.

    Augmentations are drawn in the order of the records, before shuffling.
    """
    order, changes = draw_epoch(x, augmentation, generator)
    bounds = batch_bounds(len(x), config.batch_size)
    per_segment = max(1, _RECORDS_AUGMENTED_AT_ONCE // config.batch_size)
    for first in range(0, len(bounds) - 1, per_segment):
        segment = bounds[first : first + per_segment + 1]
        rows = order[segment[0] : segment[-1]]
        segment_x = scale_bytes(x[rows].to(device))
        if changes is not None:
            # By row: a record's change depends neither on its position in the epoch nor on the batch size.
            segment_x = apply_changes(segment_x, augmentation, changes[rows].to(device))
        segment_x = segment_x.contiguous(memory_format=memory_format_for(x))
        sizes = [stop - start for start, stop in itertools.pairwise(segment)]
        yield from zip(torch.split(segment_x, sizes), torch.split(targets[rows].to(device), sizes), strict=True)


def draw_epoch(x: Tensor, augmentation: AugmentConfig, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Draw all randomness of one epoch over ``x``. Return the order of the records (N,), and the random numbers for the
    augmentation; None if ``augmentation`` changes nothing."""
    # First, so that the order is the same with augmentation and without.
    order = torch.randperm(len(x), generator=generator)
    if augmentation == UNCHANGED:
        return order, None
    return order, draw_changes(len(x), num_channels=x.shape[1], generator=generator)


def batch_bounds(num_records: int, batch_size: int) -> list[int]:
    """Return the positions in an epoch's records at which its ``ceil(N / batch_size)`` batches begin and end; batch
    sizes differ by at most 1."""
    # Nearly equal: the few records of a short last batch would weigh more than all others.
    num_batches = math.ceil(num_records / batch_size)
    return [num_records * batch // max(num_batches, 1) for batch in range(num_batches + 1)]


@torch.inference_mode()
def predict_logits(model: nn.Module, x: Tensor, *, one_by_one: bool = False) -> Tensor:
    """Return the model's logits (N, C), on the CPU, for ``x`` (N, ...) of bytes or floats; the model is left in
    evaluation mode.

    Batches have 1,024 records, or fewer if records are large; with ``one_by_one`` they have one, so that not even the
    last digit of a sum depends on another record. Images have the channels-last layout, which makes convolutions 2 to 3
    times as fast on a CPU.
    """
    at_once = min(_MAX_RECORDS_AT_ONCE, _MAX_VALUES_AT_ONCE // max(1, x[:1].numel()))
    batch_size = 1 if one_by_one else max(1, at_once)
    memory_format = memory_format_for(x)
    device = next(model.parameters()).device
    # Both go through all modules, which costs more than the prediction of a single record.
    if model.training:
        model.eval()
    if x.ndim == 4:
        to_memory_format(model, memory_format)
    batches = (b.to(device).contiguous(memory_format=memory_format) for b in torch.split(x, batch_size))
    return torch.cat([model(scale_bytes(batch)).cpu() for batch in batches])


def predict_probabilities(model: nn.Module, x: Tensor, *, one_by_one: bool = False) -> Tensor:
    """Return the softmax of :func:`predict_logits`, (N, C)."""
    logits = predict_logits(model, x, one_by_one=one_by_one)
    return torch.cat([row.softmax(dim=1) for row in logits.split(1)]) if one_by_one else logits.softmax(dim=1)


def frozen_features(config: ModelConfig, x: Tensor, *, device: str = "cpu") -> Tensor:
    """Return the features of a frozen backbone, the inputs of its last layer, for images (N, channels, height, width).

    ``config`` names the model, of which the last layer alone is trained. Features are ``float32`` (N, features),
    computed on ``device`` and returned on the CPU.
    """
    return predict_logits(_headless(config, tuple(x.shape[1:]), device), x)


# One: blocks of teachers come one after another, and all read the same backbone.
@lru_cache(maxsize=1)
def _headless(config: ModelConfig, input_shape: tuple[int, ...], device: str) -> nn.Module:
    # The head is taken off again, so that neither classes nor seed decide anything.
    model = build_model(config, input_shape=input_shape, num_classes=2, generator_seed=0)
    setattr(model.get_submodule("1"), HEAD_OF[config.name], nn.Identity())
    return model.to(torch.device(device))


class Mixture(nn.Module):
    """A model that predicts each label with the probability that a randomly drawn one of its ``members`` predicts it.

    ``members`` are models from records to logits (N, C); each predicts its most likely label.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise ValueError("Expected at least one model in members, got none; give one or more.")
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Return log P[label], shape (N, C); ``-inf`` for a label that no member predicts."""
        votes = []
        for member in self.members:
            logits = member(x)
            votes.append(functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(logits.dtype))
        total: Tensor = sum(votes[1:], start=votes[0])
        # Logarithms: the softmax of these logits is the share of votes itself.
        return (total / len(votes)).log()


def said_labels(model: nn.Module, x: Tensor, *, one_by_one: bool = False) -> npt.NDArray[np.float32]:
    """Return the probability that ``model`` predicts each label, shape (N, C): 0 or 1 unless it is a
    :class:`Mixture`. ``one_by_one`` as in :func:`predict_logits`."""
    probabilities: npt.NDArray[np.float32] = predict_probabilities(model, x, one_by_one=one_by_one).numpy()
    if isinstance(model, Mixture):
        return probabilities
    return np.eye(probabilities.shape[1], dtype=np.float32)[probabilities.argmax(axis=1)]


def linear_rules(coefficients_RD: npt.ArrayLike, *, input_shape: tuple[int, ...]) -> Mixture:
    """Return the mixture of R linear rules; rule r, with the coefficients c in row r, predicts 1 if (x, 1) . c > 0.

    The intercept comes last in a row. Members are ``logistic`` models of records of ``input_shape``. ValueError for
    coefficients of another length.
    """
    members = []
    for row in torch.from_numpy(np.asarray(coefficients_RD, dtype=np.float32)):
        model = build_model(ModelConfig(name="logistic"), input_shape=input_shape, num_classes=2, generator_seed=0)
        set_rule(model, row)
        members.append(model)
    return Mixture(members).eval()


def set_rule(model: nn.Module, row: Tensor) -> None:
    """Set the weights of a ``logistic`` model so that the log-odds of label 1 are (x, 1) . ``row``.

    ValueError for a ``row`` of another length than the number of features plus 1.
    """
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    if len(row) != layer.in_features + 1:
        raise ValueError(
            f"Expected {layer.in_features + 1} coefficients per rule (features and intercept), got {len(row)}."
        )
    with torch.no_grad():
        # Class 0 scores 0 and argmax takes the first of equals, so that a tie is 0, as "> 0" says.
        layer.weight.copy_(torch.stack([torch.zeros_like(row[:-1]), row[:-1]]))
        layer.bias.copy_(torch.stack([torch.zeros_like(row[-1]), row[-1]]))


def pretrain_by_rotations(
    model: nn.Module, architecture: ModelConfig, public_x: Tensor, *, epochs: int, generator: torch.Generator
) -> None:
    """Pretrain ``model``, built from ``architecture``, by rotation prediction: set all weights but the last layer's.

    A classifier of the same architecture learns by how many quarter turns an image was rotated (Gidaris, Singh and
    Komodakis 2018, arXiv 1803.07728), with the default optimiser of :class:`FitConfig`; its weights are copied. It
    reads public features only, so it costs no privacy.

    ``public_x`` (N, channels, side, side). ValueError for records that are not square images, and for no records.
    """
    if public_x.ndim != 4 or public_x.shape[2] != public_x.shape[3] or not len(public_x):
        raise ValueError(
            f"Expected square public images, got shape {tuple(public_x.shape)}; leave public_data.pretrain out."
        )
    turned = torch.cat([public_x.rot90(quarters, (2, 3)) for quarters in range(_QUARTERS)])
    turns = torch.arange(_QUARTERS).repeat_interleave(len(public_x))
    seed, shape = int(torch.randint(2**62, (), generator=generator)), tuple(public_x.shape[1:])
    classifier = build_model(architecture, input_shape=shape, num_classes=_QUARTERS, generator_seed=seed)
    # Not as the student's fit: augmentation would rotate pictures whose rotation is the label.
    fit(classifier, turned, turns, FitConfig(epochs=epochs), generator=generator)
    learned = dict(classifier.named_parameters())
    # The last layer predicts turns, not classes.
    head = list(learned)[-1].rpartition(".")[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0] != head:
                parameter.copy_(learned[name])


def dpfr(logits_BC: Tensor, groups_B: Tensor, config: DpfrConfig) -> Tensor:
    """Return the demographic-parity regulariser DPFR as a scalar, without its weight; differentiable by ``logits_BC``.

    With fewer than two groups in the batch it is 0, with a gradient of 0. If the temperature is much smaller than the
    differences of logits, only records near a tie have a gradient, of size 1 / temperature.
    """
    mass_BC = (logits_BC / config.temperature).softmax(dim=1)
    gaps_GC = contrast(groups_B, mass_BC.dtype) @ mass_BC
    if not len(gaps_GC):
        # Not a plain 0, which has no graph to differentiate.
        return logits_BC.sum() * 0
    gaps = gaps_GC.flatten()
    if config.maximum == "hardmax":
        # The first of equal gaps, where `max` would share the gradient among them.
        return gaps[gaps.argmax()]
    return (gaps / config.max_temperature).softmax(dim=0) @ gaps


@torch.no_grad()
def dpfr_gradient(logits_BC: Tensor, contrast_GB: Tensor, config: DpfrConfig) -> Tensor:
    """Return the gradient of the parity regulariser :func:`dpfr` with respect to the logits, (B, C), in closed form,
    which is faster.

    ``contrast_GB`` is the matrix that :func:`contrast` returns for the batch's groups, at least two.
    """
    mass_BC = (logits_BC / config.temperature).softmax(dim=1)
    gaps_GC = contrast_GB @ mass_BC
    if config.maximum == "hardmax":
        group, label = divmod(int(gaps_GC.argmax()), gaps_GC.shape[1])
        # contrast / T times mass_l (1[k = l] - mass_k), the softmax's derivative at the largest gap's label l.
        pull_B = (contrast_GB[group] / -config.temperature).mul_(mass_BC[:, label])
        gradient_BC = mass_BC.mul_(pull_B[:, None])
        gradient_BC[:, label].sub_(pull_B)
        return gradient_BC
    share_GC = (gaps_GC / config.max_temperature).flatten().softmax(dim=0).view_as(gaps_GC)
    # The derivative of sum softmax(gap / T) gap, the weights' own included.
    slope_GC = share_GC * (1 + (gaps_GC - (share_GC * gaps_GC).sum()) / config.max_temperature)
    slope_BC = contrast_GB.mT @ slope_GC
    return (slope_BC - (slope_BC * mass_BC).sum(dim=1, keepdim=True)) * mass_BC / config.temperature


def contrast(groups_B: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix (G, B) whose product with predictions (B, C) is each group's mean prediction minus that of all
    other records.

    A row holds 1 / n for the n members of its group and -1 / m for the m other records. Groups are in ascending order;
    the matrix has no rows for fewer than two groups.
    """
    present_G = groups_B.unique()
    if len(present_G) < 2:
        return torch.zeros(0, len(groups_B), dtype=dtype, device=groups_B.device)
    members_GB = (groups_B == present_G[:, None]).to(dtype)
    size_G1 = members_GB.sum(dim=1, keepdim=True)
    return members_GB / size_G1 - (1 - members_GB) / (len(groups_B) - size_G1)


def hard_disparity(logits_NC: Tensor, groups_N: Tensor) -> float:
    """Return the demographic-parity gap of the labels that ``logits_NC`` predict; NaN with fewer than two groups.

    It is the largest difference, over groups and classes, between a group's rate and the rate of all other groups.
    """
    labels_NC = functional.one_hot(logits_NC.argmax(dim=1), logits_NC.shape[1]).double()
    gaps_GC = contrast(groups_N, labels_NC.dtype) @ labels_NC
    return float(gaps_GC.max()) if len(gaps_GC) else float("nan")


def public_penalty(
    x: Tensor, groups: Tensor, config: PenaltyConfig, *, generator: torch.Generator
) -> Callable[[nn.Module], Tensor] | None:
    """Return a function that maps a model to its weighted demographic-parity regulariser (:func:`dpfr`); each call uses
    a new batch of public ``x`` (M, ...).

    None if the weight is 0.
    """
    if not config.weight:
        return None
    regulariser = DpfrConfig()
    batches, memory_format = group_batches(groups, config.batch_size, generator), memory_format_for(x)

    def penalty(model: nn.Module) -> Tensor:
        rows = next(batches)
        logits = model(scale_bytes(x[rows]).contiguous(memory_format=memory_format))
        return config.weight * dpfr(logits, groups[rows], regulariser)

    return penalty


def group_batches(groups_M: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of batches of public records, without end, stratified by group.

    Every batch has the same number of records of a group: its share of all public records, at least one. Each pass over
    the records is shuffled, and its remainder is left out. ValueError for fewer than two groups.
    """
    if not len(groups_M) or groups_M.min() == groups_M.max():
        raise ValueError(
            "Expected public records of two groups or more, got fewer; raise data.num_public, or add public records of "
            "other groups."
        )
    share = min(1.0, batch_size / len(groups_M))
    members = [torch.nonzero(groups_M == group).flatten() for group in sorted(set(groups_M.tolist()))]
    sizes = [max(1, math.floor(share * len(rows))) for rows in members]
    num_batches = min(len(rows) // size for rows, size in zip(members, sizes, strict=True))
    while True:
        orders = [rows[torch.randperm(len(rows), generator=generator)] for rows in members]
        parts = [order[: num_batches * size].view(-1, size) for order, size in zip(orders, sizes, strict=True)]
        yield from torch.cat(parts, dim=1)


def calibrate(
    model: nn.Module, x: Tensor, groups: Tensor, config: CalibrationConfig, *, y: Tensor, generator: torch.Generator
) -> list[float]:
    """Fine-tune ``model`` in place towards demographic parity on public records ``x`` (N, ...), ``groups`` (N,).

    This is the calibration of FairPATE, Appendix D.1. The paper shows its algorithm in a figure only. Each step lowers
    ``weight`` times the regulariser :func:`dpfr`, plus a cross entropy whose targets are the model's predictions before
    the calibration. With ``config.labels`` (Appendix C) a record's target is its label in ``y`` (N,) instead, if it has
    one (-1: no label). Training stops after 20 epochs, or when predictions for held-out public records have no
    demographic-parity gap. Return that gap before each epoch and after the last.

    ValueError if the public records are too few, if the held-out or the other records have fewer than two groups, or if
    labels are needed and there are none.
    """
    if config.labels and not (y >= 0).any():
        raise ValueError("public_data.calibration.labels: no public record has a label; set it to false.")
    order, size = torch.randperm(len(groups), generator=generator), round(_HELD_OUT * len(groups))
    held_out, rows = order[:size], order[size:]
    for name, part in (("held-out", held_out), ("other", rows)):
        if len(groups[part].unique()) < 2:
            what = f"the {len(part)} {name} records have fewer than two groups"
            raise ValueError(f"public_data.calibration: {what}; use more public records, of several groups.")
    logits = predict_logits(model, x)
    optimizer = Optimizer(model.parameters(), FitConfig(optimizer="adam", learning_rate=_CALIBRATION_RATE))
    disparities = [hard_disparity(logits[held_out], groups[held_out])]
    target_NC, memory_format, regulariser = logits.softmax(dim=1), memory_format_for(x), DpfrConfig()
    if config.labels:
        target_NC[y >= 0] = functional.one_hot(y[y >= 0], target_NC.shape[1]).to(target_NC.dtype)
    to_memory_format(model, memory_format)
    # `!=`, so that a disparity that is NaN does not end the calibration.
    while len(disparities) <= _CALIBRATION_EPOCHS and disparities[-1] != 0:
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(_CALIBRATION_BATCH):
            batch_logits = model(scale_bytes(x[batch]).contiguous(memory_format=memory_format))
            loss = config.weight * dpfr(batch_logits, groups[batch], regulariser)
            loss = loss + functional.cross_entropy(batch_logits, target_NC[batch])
            torch.autograd.backward(loss)
            optimizer.step_from_backward(epoch=0)
        disparities.append(hard_disparity(predict_logits(model, x[held_out]), groups[held_out]))
    return disparities
