"""One loop of stochastic gradient descent, for teachers, students and ordinary classifiers.

Deterministic: the order of the records, the augmentation and dropout all come from the generator that is handed in.
An epoch visits every record once in batches whose sizes differ by at most one record, so no batch is a small
remainder; fewer records than a batch are one batch; no records at all leave the model as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import FitConfig
from fairpate.nn.augment import apply_changes, draw_changes
from fairpate.nn.models import memory_format_for, scale_bytes, seeded_torch, to_memory_format
from fairpate.nn.optimizer import Optimizer, epoch_learning_rate

EpochCallback = Callable[[int, float], None]
Penalty = Callable[[nn.Module], Tensor]
_RECORDS_AUGMENTED_AT_ONCE = 1024


class DivergedError(ValueError):
    """A loss that is not finite."""


def fit(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    config: FitConfig,
    *,
    generator: torch.Generator,
    on_epoch: EpochCallback | None = None,
    penalty: Penalty | None = None,
) -> None:
    """Train ``model`` in place on its own device, and leave it in evaluation mode.

    ``x`` (N, ...) holds bytes or floats; ``targets`` are classes (N,) ``int64`` or probabilities (N, C).
    ``on_epoch(epoch, mean_loss)`` runs after each epoch, counted from 0. ``penalty(model)`` joins the loss of every
    step. :class:`DivergedError` if a loss is not finite.
    """
    if len(x) != len(targets):
        raise ValueError(f"Expected one target per record, got {len(x)} records and {len(targets)} targets.")
    device = next(model.parameters()).device
    to_memory_format(model, memory_format_for(x))
    optimizer = Optimizer((p for p in model.parameters() if p.requires_grad), config)
    model.train()
    with seeded_dropout(model, generator):
        for epoch in range(config.epochs if len(x) else 0):
            loss_sum = torch.zeros((), device=device)
            learning_rate = epoch_learning_rate(config, epoch)
            for batch_x, batch_targets in epoch_batches(x, targets, config, generator=generator, device=device):
                with precision_of(config, device):
                    logits = model(batch_x)
                    loss = functional.cross_entropy(logits, batch_targets, label_smoothing=config.label_smoothing)
                    if penalty is not None:
                        loss = loss + penalty(model)
                torch.autograd.backward(loss)
                optimizer.step_from_backward(learning_rate)
                # Added up on the device: a number that is read at each step would wait for it.
                loss_sum += loss.detach() * len(batch_x)
            # One loss of the epoch that is not finite leaves no sum that is.
            mean_loss = float(loss_sum) / len(x)
            if not math.isfinite(mean_loss):
                raise DivergedError(f"Training diverged in epoch {epoch}: loss {mean_loss}; lower learning_rate.")
            if on_epoch is not None:
                on_epoch(epoch, mean_loss)
    model.eval()


def precision_of(config: FitConfig, device: torch.device) -> AbstractContextManager[object]:
    """What the forward pass and the loss of one step run in; the backward pass follows the forward one's types."""
    if config.precision == "float32":
        return nullcontext()
    # Losses need no scaling up: bfloat16 has float32's range of exponents.
    return torch.autocast(device.type, dtype=torch.bfloat16)


def epoch_batches(
    x: Tensor, targets: Tensor, config: FitConfig, *, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch on ``device``: shuffled, scaled and augmented. Augmentation is drawn in record order."""
    order, changes = draw_epoch(x, config, generator)
    bounds = batch_bounds(len(x), config.batch_size)
    per_segment = max(1, _RECORDS_AUGMENTED_AT_ONCE // config.batch_size)
    for first in range(0, len(bounds) - 1, per_segment):
        segment = bounds[first : first + per_segment + 1]
        rows = order[segment[0] : segment[-1]]
        segment_x = scale_bytes(x[rows].to(device))
        if changes is not None:
            segment_x = apply_changes(segment_x, config.augment, changes[rows].to(device))
        segment_x = segment_x.contiguous(memory_format=memory_format_for(x))
        sizes = [stop - start for start, stop in itertools.pairwise(segment)]
        yield from zip(torch.split(segment_x, sizes), torch.split(targets[rows].to(device), sizes), strict=True)


def draw_epoch(x: Tensor, config: FitConfig, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """All randomness of one epoch over ``x``: the order (N,), then the augmentation draws or None."""
    order = torch.randperm(len(x), generator=generator)
    if config.augment.is_identity:
        return order, None
    return order, draw_changes(len(x), num_channels=x.shape[1], generator=generator)


def batch_bounds(num_records: int, batch_size: int) -> list[int]:
    """Where an epoch's batches start and end: ``ceil(N / batch_size)`` batches of nearly equal size."""
    num_batches = math.ceil(num_records / batch_size)
    return [num_records * batch // max(num_batches, 1) for batch in range(num_batches + 1)]


def seeded_dropout(model: nn.Module, generator: torch.Generator) -> AbstractContextManager[None]:
    """For the steps of a training: what dropout draws comes from ``generator``, of which a model without reads nothing.

    Dropout itself takes no generator: torch's own is seeded meanwhile, and left as it was.
    """
    if not uses_dropout(model):
        return nullcontext()
    return seeded_torch(int(torch.randint(2**62, (), generator=generator)))


def uses_dropout(model: nn.Module) -> bool:
    """Whether training this model draws random numbers of its own."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
