"""DP-SGD: Poisson batches, clipped per-example gradients, Gaussian noise (Abadi et al. 2016, arXiv 1607.00133).

One step is a Gaussian sum over a Poisson sample: every record enters independently with probability ``sampling_rate``,
and a batch may be empty; noise of standard deviation ``noise_multiplier * clip_norm`` is added to the sum of clipped
gradients; the sum is divided by the constant ``expected_batch_size``, never by the realised size. Where records belong
to persons, persons are sampled, and the average gradient of a person's records is clipped: a person then adds no more
than one record.

:class:`PrivateTraining` is the training loop of DP-SGD, FairDP-SGD, DP-FERMI and RaCO-DP. A method gives it a
:class:`StepPlan`: how batches are drawn and clipped, what else a step releases, and the events of all steps.

The sample and the noise have a source of randomness of their own: the operating system, or a seed, with which the
training is not private. The noise is floating-point, so the guarantee is that of research code.

Shapes: N records, B records of a batch, P parameters or values of one parameter.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from fairpate.config import ConfigError, PositiveShare
from fairpate.nn import per_example
from fairpate.nn.fit import exact_convolutions
from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.per_example import GradientClipper, LayerGradient, PerExampleLoss, WeightedSums, layer_gradient
from fairpate.privacy.accountant import Event, spent
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, SEEDED

PublicGradient = Callable[[nn.Module], Sequence[Tensor]]
_DRAWN_AT_ONCE, _NORMALS_PER_PIECE = 2**12, 2**16


CPU = torch.device("cpu")


class OsRandomness:
    """Random words from a stream cipher with a key from the operating system's entropy: AES-256 in counter mode, or
    ChaCha20 where the words are drawn on a GPU.

    The operating system itself would be too slow, and so would the way of the words of millions of parameters to a GPU.
    ``machine_words(size, device)`` returns independent uniform 64-bit words, ``int64`` of shape (size,).
    """

    label = OS_ENTROPY

    def __init__(self) -> None:
        # A counter from 0 is safe, since each key serves one stream.
        self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
        self._device_key, self._num_device_draws = os.urandom(32), 0

    def machine_words(self, size: int, device: torch.device = CPU) -> Tensor:
        if device.type != "cpu":
            # A nonce of its own for every draw: no block of the stream is used twice.
            self._num_device_draws += 1
            return chacha20_words(self._device_key, self._num_device_draws, size, device)
        words = torch.empty(size, dtype=torch.int64)
        if size:
            # Zeros, encrypted, are the stream of the cipher itself.
            self._stream.update_into(bytes(8 * size), words.numpy().view("uint8").data)
        return words


class SeededRandomness:
    """Random words from a seed: reproducible, and therefore not private."""

    label = SEEDED

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def machine_words(self, size: int, device: torch.device = CPU) -> Tensor:
        # None as the upper end: all words of 64 bits, -2^63 included. Drawn on the processor, so that a seed means the
        # same words for every device.
        return torch.empty(size, dtype=torch.int64).random_(-(2**63), None, generator=self._generator).to(device)


_CHACHA_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<i4")
_WORDS_PER_BLOCK = 8  # of 64 bits


def chacha20_words(key: bytes, nonce: int, size: int, device: torch.device) -> Tensor:
    """Return ``size`` words of 64 bits of the stream of ChaCha20 (RFC 8439), computed on ``device``, ``int64``.

    ``key``: 32 bytes. ``nonce``: a number below 2^96 that is used once with this key.
    """
    num_blocks = -(-size // _WORDS_PER_BLOCK)
    if num_blocks > 2**31:
        raise ValueError(f"Expected at most 2^34 words in one draw, got {size}; draw them in parts.")
    fixed = np.frombuffer(key + bytes(4) + nonce.to_bytes(12, "little"), dtype="<i4")
    state = torch.from_numpy(np.concatenate([_CHACHA_CONSTANTS, fixed])).to(device)[:, None].repeat(1, num_blocks)
    state[12] = torch.arange(num_blocks, dtype=torch.int32, device=device)

    def mixed(a: Tensor, b: Tensor, by: Tensor, bits: int) -> None:
        """Add ``b`` to ``a``, and the sum to ``by`` by exclusive or; then rotate ``by`` to the left."""
        by.bitwise_xor_(a.add_(b))
        # The shift to the right copies the sign, which a rotation must not.
        low = by.bitwise_right_shift(32 - bits).bitwise_and_(2**bits - 1)
        by.bitwise_left_shift_(bits).bitwise_or_(low)

    rows = [row.clone() for row in state.split(4)]
    for turn in range(20):
        a, b, c, d = rows
        for bits_d, bits_b in ((16, 12), (8, 7)):
            mixed(a, b, d, bits_d)
            mixed(c, d, b, bits_b)
        # Columns, then diagonals, which a turn of the rows makes columns.
        ways = (0, -1, -2, -3) if turn % 2 == 0 else (0, 1, 2, 3)
        rows = [row if not way else row.roll(way, 0) for row, way in zip(rows, ways, strict=True)]
    # Addition wraps around at 2^32, as the cipher asks.
    return state.add_(torch.cat(rows)).T.flatten().view(torch.int64)[:size]


PrivateRandomness = OsRandomness | SeededRandomness
"""The source of the randomness that must stay secret for the guarantee to hold: the Poisson samples and the noise."""


@validated(frozen=True, kw_only=True)
class PrivateSteps:
    """The settings of one training by DP-SGD: those that determine its privacy cost, and learning rate and momentum.

    ``max_records``: how many records are in memory at once. ``records_per_person``: how many records of a sampled
    person are used in a step.
    """

    num_steps: int = Field(ge=0)
    sampling_rate: PositiveShare
    expected_batch_size: FiniteFloat = Field(gt=0)
    clip_norm: FiniteFloat = Field(gt=0)
    noise_multiplier: float = Field(ge=0)
    learning_rate: FiniteFloat = Field(gt=0)
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_records: int | None = None
    records_per_person: int = 32


BatchSampler = Callable[[], Tensor]
"""Draws the rows of the next batch, ``int64``."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The parts of a training step in which a method may differ from DP-SGD.

    ``clipper(model, loss, clip_norm=..., max_records=...)`` returns the object that sums a batch's clipped gradients.
    ``sampler`` draws the rows of each batch; None: Poisson samples. ``reach`` is the L2 sensitivity of the clipped sum
    in multiples of ``clip_norm``. ``add_unprotected(sums, x, targets)`` runs after the noise and adds gradients that do
    not depend on what the method protects, such as the sensitive attribute. ``release_more`` runs after the update and
    makes the other releases of a step. ``events`` describe the releases of all steps together to the accountant.
    """

    clipper: Callable[..., Any] = GradientClipper
    sampler: BatchSampler | None = None
    reach: float = 1.0
    add_unprotected: Callable[[list[Tensor], Tensor, Tensor], None] | None = None
    release_more: Callable[[], None] | None = None
    events: tuple[Event, ...] = ()


DP_SGD = StepPlan()


def training_device(model: nn.Module) -> torch.device:
    """Return the GPU if there is one and ``model`` is on the CPU and has convolutions; else the model's own device.

    Without convolutions a GPU would not be faster.
    """
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    device: torch.device = next(model.parameters()).device
    return torch.device("cuda") if has_convolutions and torch.cuda.is_available() and device.type == "cpu" else device


class PrivateTraining:
    """Trains ``model`` in place by DP-SGD, on :func:`training_device`; keeps momentum, sampler and noise between steps.

    ``x`` (N, ...) holds bytes or floats. ``person_N`` gives the index of each record's person; None: every record is
    protected by itself. ``public_gradient(model)`` returns one tensor per trainable parameter, computed from public
    records only; these tensors are added after the noise and cost no privacy. ``watch`` sees every noisy sum
    (:class:`fairpate.methods.base.Watch`). ValueError for a layer that mixes records, ConfigError for dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        targets: Tensor,
        loss: PerExampleLoss,
        steps: PrivateSteps,
        *,
        randomness: PrivateRandomness,
        public_gradient: PublicGradient | None = None,
        person_N: Tensor | None = None,
        plan: StepPlan = DP_SGD,
        watch: Callable[..., None] | None = None,
    ) -> None:
        if len(x) != len(targets):
            raise ValueError(f"Expected one target per record, got {len(x)} records and {len(targets)} targets.")
        # A mask follows the place of its record in the batch: one record more would move the gradients of all after it.
        if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
            raise ConfigError("model: the privacy guarantee of DP-SGD does not hold with dropout; leave dropout out.")
        self._home, device = next(model.parameters()).device, training_device(model)
        self._model, self._x, self._targets = model.train().to(device), x.to(device), targets.to(device)
        self._steps, self._plan, rate = steps, plan, steps.sampling_rate
        self._public_gradient = public_gradient
        self._memory_format = memory_format_for(x)
        to_memory_format(model, self._memory_format)
        self.clipper: Any = plan.clipper(model, loss, clip_norm=steps.clip_norm, max_records=steps.max_records)
        self.parameters: list[Tensor] = self.clipper.parameters
        """The trainable parameters, in the order of the gradients."""
        self._velocities = [torch.zeros_like(p) for p in self.parameters]
        self._next_rows: BatchSampler = plan.sampler or PoissonBatches(len(x), rate, randomness).next
        self._persons = None
        if person_N is not None:
            self._persons = PersonBatches(person_N, rate, randomness, most_records=steps.records_per_person)
        self._noise, self._label = GaussianNoise(randomness), randomness.label
        self._watch = watch

    def run(
        self, *, averaged_share: float = 0.0, on_progress: Callable[[int, int], None] = lambda *_: None
    ) -> tuple[Event, ...]:
        """Take all steps, leave the model in evaluation mode, and return the privacy events of all their releases.

        The model gets the mean of the weights of the last ``averaged_share`` of the steps, 0 to 1; with 0, the weights
        of the last step. SpentError if the weights become NaN or infinite: it contains the privacy events, which must
        still be charged.
        """
        num_steps, parameters = self._steps.num_steps, self.parameters
        means: list[Tensor] = []
        num_skipped = num_steps - round(averaged_share * num_steps)
        with exact_convolutions(), ExitStack() as after_first:
            for step in range(1, num_steps + 1):
                self.step()
                if step == 1:
                    # From now on an error reveals released weights, so the events count as spent. An error in the first
                    # step comes from the model or a layer, before any noise is drawn.
                    after_first.enter_context(spent(self._plan.events, noise=self._label))
                # Polyak and Juditsky 1992. Where every step's weights could be released, so could their mean: it costs
                # no privacy, and takes out much of a step's noise and of the circling of a game between two players.
                if step == num_skipped + 1:
                    means = [p.detach().clone() for p in parameters]
                elif step > num_skipped:
                    with torch.no_grad():
                        # mean + (x - mean) / k, which needs no sum that grows.
                        torch._foreach_lerp_(means, parameters, 1 / (step - num_skipped))
                on_progress(step, num_steps)
        if means:
            with torch.no_grad():
                torch._foreach_copy_(parameters, means)
        self._model.eval().to(self._home)
        return self._plan.events

    def step(self) -> None:
        """Take one step: sample, clip, add noise, divide, update; then make the step's further noisy releases."""
        steps, device, plan = self._steps, self._x.device, self._plan
        if self._persons is None:
            rows, owner_B = self._next_rows().to(device), None
        else:
            rows, owner_B = (index.to(device) for index in self._persons.next())
        batch = scale_bytes(self._x.index_select(0, rows)).contiguous(memory_format=self._memory_format)
        targets = self._targets.index_select(0, rows)
        sums: list[Tensor] = self.clipper.sum(batch, targets, owner_B).gradients
        exact = [] if self._watch is None else [values.clone() for values in sums]
        # To an empty sample's zeros as well: an empty sample must not show.
        self._noise.add_to(sums, plan.reach * steps.noise_multiplier * steps.clip_norm)
        if self._watch is not None:
            self._watch("gradients", exact, sums, norm=plan.reach * steps.clip_norm)
        if plan.add_unprotected is not None:
            plan.add_unprotected(sums, batch, targets)
        public = None if self._public_gradient is None else list(self._public_gradient(self._model))
        with torch.no_grad():
            if public is not None:
                # At the scale of sums, which the rate below divides again.
                torch._foreach_add_(sums, public, alpha=steps.expected_batch_size)
            # Past sums have their noise already: momentum is post-processing.
            if steps.momentum:
                torch._foreach_mul_(self._velocities, steps.momentum)
                torch._foreach_add_(self._velocities, sums)
                sums = self._velocities
            # By the expected size: the realised one depends on who was drawn.
            torch._foreach_add_(self.parameters, sums, alpha=-steps.learning_rate / steps.expected_batch_size)
        if plan.release_more is not None:
            plan.release_more()


class PoissonBatches:
    """Draws Poisson samples: every record enters each batch independently with probability ``sampling_rate``.

    A batch may be empty. For speed, no number is drawn for a record that is left out: the gaps between sampled records
    are drawn, which follow a geometric distribution.
    """

    def __init__(self, num_records: int, sampling_rate: float, randomness: PrivateRandomness) -> None:
        self._num_records, self._randomness = num_records, randomness
        # With rate 1 every gap is ln u / -inf, rounded down to 0: every record is in every batch.
        self._log_tails = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf
        self._gaps_at_once = max(_DRAWN_AT_ONCE, round(num_records * sampling_rate))
        self._heads = torch.empty(0, dtype=torch.int64)
        self._num_decided = 0

    def next(self) -> Tensor:
        """Draw the next batch and return the indices of its records in ascending order, ``int64``."""
        while self._num_decided < self._num_records:
            # k tails before a head have probability (1 - q)^k q: the floor of ln u / ln(1 - q).
            words = self._randomness.machine_words(self._gaps_at_once)
            # Doubles: rounded to a float's 24 bits, long gaps would be wrong by whole records.
            gaps = _log_uniform(words.double()).div_(self._log_tails).floor_().long()
            # Positions count from the first coin of this batch.
            self._heads = torch.cat([self._heads, gaps.add_(1).cumsum(0).add_(self._num_decided - 1)])
            self._num_decided = int(self._heads[-1]) + 1
        count = int(torch.searchsorted(self._heads, self._num_records))
        # The heads beyond this batch's coins belong to the next: no coin is tossed twice.
        rows = self._heads[:count]
        self._heads = self._heads[count:] - self._num_records
        self._num_decided -= self._num_records
        return rows


class PersonBatches:
    """Draws Poisson samples of persons, with all records of a sampled person or ``most_records`` of them at random.

    ``person_N`` gives the index of each record's person.
    """

    def __init__(
        self, person_N: Tensor, sampling_rate: float, randomness: PrivateRandomness, *, most_records: int
    ) -> None:
        self._row_N = torch.argsort(person_N, stable=True).cpu()
        self._count_P = torch.bincount(person_N).cpu()
        self._start_P = self._count_P.cumsum(0) - self._count_P
        self._sampled = PoissonBatches(len(self._count_P), sampling_rate, randomness)
        self._randomness, self._most_records = randomness, most_records

    def next(self) -> tuple[Tensor, Tensor]:
        """Draw the next batch. Return the indices of its records, person by person (B,), and for each of these records
        the number of its person among the sampled persons, counted from 0 (B,)."""
        persons = self._sampled.next()
        counts = self._count_P[persons]
        owner_B = torch.repeat_interleave(torch.arange(len(persons)), counts)
        first_B = (counts.cumsum(0) - counts)[owner_B]
        place_B = torch.arange(len(owner_B)) - first_B
        rows_B = self._row_N[self._start_P[persons][owner_B] + place_B]
        # The limit bounds work and not sensitivity: a person's average is clipped in any case.
        if not (counts > self._most_records).any():
            return rows_B, owner_B
        # The records of each person are put in random order; the first ``most_records`` of them are used.
        drawn_B = self._randomness.machine_words(len(owner_B))
        # By the draw, then stably by owner: a random order within each person.
        order_B = torch.argsort(drawn_B)
        order_B = order_B[torch.argsort(owner_B[order_B], stable=True)]
        chosen = order_B[place_B < self._most_records].sort().values
        return rows_B[chosen], owner_B[chosen]


class GaussianNoise:
    """Draws independent standard normal values, ``float32``, thousands at once, because small draws would be slow."""

    def __init__(self, randomness: PrivateRandomness) -> None:
        self._randomness = randomness
        self._left = torch.empty(0)

    def add_to(self, sums: Sequence[Tensor], stddev: float) -> None:
        """Add independent Gaussian noise of standard deviation ``stddev`` to every value of ``sums``, in place."""
        if not stddev:
            return
        sizes = [values.numel() for values in sums]
        # Every device and precision gets the noise of one stream; a GPU rounds its logarithms in its own way.
        parts = self.take(sum(sizes), sums[0].device).to(sums[0]).split(sizes)
        shaped = [part.view(values.shape) for part, values in zip(parts, sums, strict=True)]
        torch._foreach_add_(list(sums), shaped, alpha=stddev)

    def take(self, size: int, device: torch.device = CPU) -> Tensor:
        """Return fresh standard normal values, shape (size,), that were made on ``device``."""
        if self._left.device != device:
            self._left = torch.empty(0, device=device)
        if len(self._left) < size:
            drawn = max(size, _DRAWN_AT_ONCE)
            # An even number, because normals come in pairs.
            self._left = self._normals(drawn + drawn % 2, device)[:drawn]
        # Each normal is used once: noise that two sums share would cancel in their difference.
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def _normals(self, size: int, device: torch.device) -> Tensor:
        """Draw ``size`` normals, an even number, by Box and Muller: a radius from one word, an angle from another."""
        if device.type != "cpu":
            return normals_of(self._randomness.machine_words(size, device))
        normals = torch.empty(size)
        # In pieces that stay in a processor's cache.
        for piece in torch.split(normals, _NORMALS_PER_PIECE):
            first, second = torch.chunk(piece, 2)
            radius, angle = _polar(self._randomness.machine_words(len(piece)))
            torch.cos(angle, out=first).mul_(radius)
            torch.sin(angle, out=second).mul_(radius)
        return normals


def normals_of(words: Tensor) -> Tensor:
    """Return one standard normal value for each of ``words``, an even number, as :class:`GaussianNoise` pairs them on a
    processor."""
    whole = len(words) - len(words) % _NORMALS_PER_PIECE
    parts = []
    for part in (words[:whole].view(-1, _NORMALS_PER_PIECE), words[whole:].view(1, -1)):
        radius, angle = _polar(part)
        parts.append(torch.cat([torch.cos(angle).mul_(radius), torch.sin(angle).mul_(radius)], dim=1).flatten())
    return torch.cat(parts)


def _polar(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the radii and the angles of pairs of normals, from the first and the second half of the last axis of
    ``words``."""
    radius_words, angle_words = torch.chunk(words, 2, dim=-1)
    # No radius is beyond sqrt(128 ln 2) = 9.42, which a normal pair exceeds with probability 2^-64.
    radius = _log_uniform(radius_words.float()).mul_(-2).sqrt_()
    # Words have a sign: angles from -pi to pi.
    return radius, angle_words.float().mul_(math.pi * 2.0**-63)


class LaplaceNoise:
    """Draws independent Laplace values of one scale, ``float64``, in blocks, as differences of exponential
    variables."""

    def __init__(self, randomness: PrivateRandomness, *, scale: float) -> None:
        self._randomness, self._scale = randomness, scale
        self._values, self._num_taken = np.empty(0), 0

    def take(self, size: int) -> npt.NDArray[np.float64]:
        """Return fresh Laplace values, shape (size,)."""
        start = self._num_taken
        if start + size > len(self._values):
            first, second = self._randomness.machine_words(2 * max(size, _DRAWN_AT_ONCE)).double().chunk(2)
            # -ln u is exponential, and the difference of two exponentials is a Laplace variable.
            self._values, start = (_log_uniform(first) - _log_uniform(second)).numpy() * self._scale, 0
        self._num_taken = start + size
        return self._values[start : start + size]


def _log_uniform(words: Tensor) -> Tensor:
    """Compute, in place, the logarithm of uniform numbers in (0, 1] from random words that were rounded to floats.

    A word of 0, which is as rare as 1 in 2**63, is replaced by one half, so that the logarithm is finite.
    """
    return words.abs_().clamp_(min=0.5).mul_(2.0**-63).log_()


_VALUES_AT_ONCE = 2**24
# Where a record's gradient cancels the shift to less than a hundredth, its shifted gradient is formed. Elsewhere the
# closed form in float64 loses less of a norm than the share by which the clipping bound is lowered.
_LEAST_LEFT, _LOST_AT_MOST = 1e-4, 1e-6


class ShiftedClipper(GradientClipper):
    """Computes sums of ``clip(g_i + shift)``, where g_i is a record's gradient; its interface is that of
    :class:`GradientClipper`.

    FairDP-SGD as in the paper (FairPATE, Algorithm 6) needs these sums. ``shift`` has one tensor per trainable
    parameter; None means no shift. If the function ``public_gradient`` is given, it computes the shift from the current
    model before each sum. A person's average gradient is shifted once, which is the average of the shifted gradients.

    Squared norms are ``|g_i|^2 + 2 <g_i, r> + |r|^2`` with the shift r, in ``float64``. If the gradient of some record
    is near -r, rounding would lose the digits of this sum: the shifted gradients of that part of the batch are then
    materialised. Sums are returned in ``float64``, so that :class:`PrivateTraining` adds noise before anything is
    rounded to ``float32``. ``squared_norms_B`` in the result are those of the shifted gradients.
    """

    shift: Sequence[Tensor] | None = None

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        max_records: int | None = None,
        public_gradient: PublicGradient | None = None,
        **options: Any,
    ) -> None:
        num_values = sum(p.numel() for p in model.parameters() if p.requires_grad)
        # Every gradient is formed in double precision: memory limits how many there may be at a time.
        at_once = max(1, _VALUES_AT_ONCE // max(1, num_values))
        at_once = min(max_records or at_once, at_once)
        super().__init__(copy.deepcopy(model).double(), loss, max_records=at_once, **options)
        self._original, self._public_gradient = model, public_gradient
        # What is released belongs to the original; `_trained` stays with the twin.
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> per_example.ClippedSum:
        """Return the sum over records of ``clip(g_i + shift)`` for the current weights of the model; arguments and
        errors as in :meth:`GradientClipper.sum`."""
        if self._public_gradient is not None:
            self.shift = list(self._public_gradient(self._original))
            if not all(bool(values.isfinite().all()) for values in self.shift):
                raise ValueError(
                    "The gradient of the fairness regulariser is not finite; lower the learning rate or the weight of "
                    "the regulariser."
                )
        # The twin in double precision follows the model that the steps move.
        self.model.load_state_dict(self._original.state_dict())
        self.model.train(self._original.training)
        return super().sum(x.double() if x.is_floating_point() else x, targets, owner_B)

    def _part(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> per_example.ClippedSum:
        if self.shift is None:
            return super()._part(x, targets, owner_B)
        shift = [(p, part.double()) for p, part in zip(self._trained, self.shift, strict=True)]
        calls = self._layer_calls(x, targets)
        if owner_B is None:
            with torch.no_grad():
                shifted = _Shifted([layer_gradient(*call) for call in calls], shift)
            # False for NaN: what is not finite is left to the sum of the others, which leaves it out.
            if not bool((shifted.squared_norms() < _LEAST_LEFT * shifted.squares_B).any()):
                return self._clipped(
                    lambda kept: [_Shifted([layer_gradient(layer, *kept(*values)) for layer, *values in calls], shift)],
                    [shifted],
                )
        rows = self._rows(calls, owner_B)
        return self._clipped_rows([values + part.flatten() for values, (_, part) in zip(rows, shift, strict=True)])

    def _clip_factors(self, squared_norms_B: Tensor) -> Tensor:
        return super()._clip_factors(squared_norms_B) * (1 - _LOST_AT_MOST)


class _Shifted:
    """Per-example gradients over all layers; ``shift`` (one tensor per trainable parameter) is added to each
    gradient."""

    def __init__(self, layers: list[LayerGradient], shift: WeightedSums) -> None:
        self._layers, self._shift = layers, shift
        by_id = {id(p): part for p, part in shift}
        length = sum(float(part.square().sum()) for _, part in shift)
        self.squares_B: Tensor = torch.stack([layer.squared_norms() for layer in layers]).sum(dim=0) + length
        products_B = torch.stack([layer.products(by_id) for layer in layers]).sum(dim=0)
        self._squared_norms_B = (self.squares_B + 2 * products_B).clamp_(min=0)

    def squared_norms(self) -> Tensor:
        return self._squared_norms_B

    def weighted_sums(self, weights_B: Tensor) -> WeightedSums:
        sums = {id(p): value for layer in self._layers for p, value in layer.weighted_sums(weights_B)}
        total = weights_B.sum()
        return [(p, sums.get(id(p), 0) + total * part) for p, part in self._shift]
