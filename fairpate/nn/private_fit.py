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

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn

from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.per_example import GradientClipper, PerExampleLoss

NoiseLabel = Literal["os_entropy", "seeded: not private"]
PublicGradient = Callable[[nn.Module], Sequence[Tensor]]


class PrivateRandomness(Protocol):
    """What must stay secret for the guarantee to hold: who was sampled, and the noise."""

    @property
    def label(self) -> NoiseLabel:
        """Whether this randomness protects anyone."""
        ...

    def words(self, size: int) -> Tensor:
        """Independent uniform words of 64 bits, ``int64`` of shape (size,)."""
        ...


class OsRandomness:
    """AES-256 in counter mode under a key from the operating system, which is too slow to be asked for every word."""

    label: NoiseLabel = "os_entropy"

    def __init__(self) -> None:
        self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def words(self, size: int) -> Tensor:
        """Independent uniform words."""
        words = torch.empty(size, dtype=torch.int64)
        if size:
            self._stream.update_into(bytes(8 * size), words.numpy().view("uint8").data)
        return words


class SeededRandomness:
    """Reproducible, and therefore not private."""

    label: NoiseLabel = "seeded: not private"

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def words(self, size: int) -> Tensor:
        """Independent uniform words."""
        return torch.empty(size, dtype=torch.int64).random_(-(2**63), None, generator=self._generator)


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
    return torch.nonzero(_uniform(randomness.words(num_records)) < sampling_rate).flatten()


def add_noise(sums: Sequence[Tensor], stddev: float, randomness: PrivateRandomness) -> None:
    """Add independent Gaussian noise to every value in place."""
    if not stddev:
        return
    sizes = [values.numel() for values in sums]
    noise = stddev * _standard_normals(sum(sizes), randomness)
    for values, part in zip(sums, torch.split(noise, sizes), strict=True):
        values.add_(part.to(values).reshape(values.shape))


def _standard_normals(size: int, randomness: PrivateRandomness) -> Tensor:
    """``float32`` by the pairs of Box and Muller: a radius from one word, an angle from another."""
    radius_words, angle_words = torch.chunk(randomness.words(size + size % 2), 2)
    # 1 - uniform is never 0, and its 53 bits reach out to 8.5 standard deviations.
    radius = _uniform(radius_words).neg_().log1p_().mul_(-2).sqrt_().float()
    angle = angle_words.float().mul_(math.pi * 2.0**-63)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:size]


def _uniform(words: Tensor) -> Tensor:
    """Numbers in [0, 1), ``float64``, from the low 53 bits."""
    return (words & (2**53 - 1)).double().mul_(2.0**-53)
