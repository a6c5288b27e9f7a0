"""DP-SGD: Poisson batches, clipped per-example gradients, Gaussian noise (Abadi et al. 2016, arXiv 1607.00133).

One step is a Gaussian sum over a Poisson sample: every record enters independently with ``sampling_rate``, an empty
batch included; noise of standard deviation ``noise_multiplier * clip_norm`` is added to the sum of clipped gradients;
the sum is divided by the constant ``expected_batch_size``, never by the realised one. Whoever calls this reports that
event to the accountant: nothing here knows an epsilon.

The sample and the noise come from a randomness of their own, apart from the training seed: from the operating system,
or seeded, and then nobody is protected. The noise is floating-point, so the guarantee is that of research code.

A term computed from public records alone may be added to every gradient: it costs no privacy.

Shapes: N records, B records of a batch, P parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.per_example import GradientClipper, PerExampleLoss

NoiseLabel = Literal["os_entropy", "seeded: not private"]
PublicGradient = Callable[[nn.Module], Sequence[Tensor]]
_BITS_OF_A_UNIFORM = 53


class PrivateRandomness(Protocol):
    """What must stay secret for the guarantee to hold: who was sampled, and the noise."""

    @property
    def label(self) -> NoiseLabel:
        """Whether this randomness protects anyone."""
        ...

    def uniform(self, size: int) -> np.ndarray:
        """Independent numbers in [0, 1), float64."""
        ...


class OsRandomness:
    """Bytes of the operating system, 53 bits to a number."""

    label: NoiseLabel = "os_entropy"

    def uniform(self, size: int) -> np.ndarray:
        """Independent numbers in [0, 1)."""
        words = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(64 - _BITS_OF_A_UNIFORM)
        return words * 2.0**-_BITS_OF_A_UNIFORM


class SeededRandomness:
    """Reproducible, and therefore not private."""

    label: NoiseLabel = "seeded: not private"

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def uniform(self, size: int) -> np.ndarray:
        """Independent numbers in [0, 1)."""
        return self._generator.random(size)


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """The steps of one training: what the accountant is told, and how fast the model moves."""

    num_steps: int
    sampling_rate: float
    expected_batch_size: float
    clip_norm: float
    noise_multiplier: float
    learning_rate: float
    momentum: float = 0.0
    max_records: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"Expected 0 < sampling_rate <= 1, got {self.sampling_rate}.")
        if self.num_steps < 0 or not self.noise_multiplier >= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                "Expected num_steps >= 0, noise_multiplier >= 0 and 0 <= momentum < 1, got "
                f"{self.num_steps}, {self.noise_multiplier} and {self.momentum}."
            )
        for name in ("expected_batch_size", "clip_norm", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Expected {name} > 0 and finite, got {getattr(self, name)}.")


def fit_privately(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    loss: PerExampleLoss,
    steps: PrivateSteps,
    *,
    randomness: PrivateRandomness,
    public_gradient: PublicGradient | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> None:
    """Train ``model`` in place and leave it in evaluation mode.

    ``x`` (N, ...) holds bytes or floats. ``public_gradient(model)`` gives one tensor per trainable parameter, computed
    from public records only, and is added after the noise. ``on_step`` hears how many steps are done. ValueError for a
    layer that mixes records and for a gradient that is not finite.
    """
    if len(x) != len(targets):
        raise ValueError(f"Expected one target per record, got {len(x)} records and {len(targets)} targets.")
    memory_format = memory_format_for(x)
    to_memory_format(model, memory_format)
    clipper = GradientClipper(model, loss, clip_norm=steps.clip_norm, max_records=steps.max_records)
    velocities = [torch.zeros_like(p) for p in clipper.parameters]
    model.train()
    for step in range(steps.num_steps):
        rows = poisson_sample(len(x), steps.sampling_rate, randomness)
        batch = scale_bytes(x[rows]).contiguous(memory_format=memory_format)
        gradients = clipper.sum(batch, targets[rows]).gradients
        add_noise(gradients, steps.noise_multiplier * steps.clip_norm, randomness)
        torch._foreach_div_(gradients, steps.expected_batch_size)
        if public_gradient is not None:
            torch._foreach_add_(gradients, list(public_gradient(model)))
        torch._foreach_mul_(velocities, steps.momentum)
        torch._foreach_add_(velocities, gradients)
        with torch.no_grad():
            torch._foreach_add_(clipper.parameters, velocities, alpha=-steps.learning_rate)
        on_step(step + 1)
    model.eval()


def poisson_sample(num_records: int, sampling_rate: float, randomness: PrivateRandomness) -> Tensor:
    """The rows that enter, each independently with ``sampling_rate``; there may be none."""
    return torch.from_numpy(np.flatnonzero(randomness.uniform(num_records) < sampling_rate))


def add_noise(sums: Sequence[Tensor], stddev: float, randomness: PrivateRandomness) -> None:
    """Add independent Gaussian noise to every value in place."""
    if not stddev:
        return
    sizes = [values.numel() for values in sums]
    noise = torch.from_numpy(stddev * _standard_normals(sum(sizes), randomness))
    for values, part in zip(sums, torch.split(noise, sizes), strict=True):
        values.add_(part.to(values).reshape(values.shape))


def _standard_normals(size: int, randomness: PrivateRandomness) -> np.ndarray:
    """Box and Muller's pairs: radius from one uniform number, angle from another."""
    half = (size + 1) // 2
    uniform = randomness.uniform(2 * half)
    radius = np.sqrt(-2 * np.log1p(-uniform[:half]))
    angle = 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
