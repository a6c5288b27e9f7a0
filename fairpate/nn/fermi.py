"""The steps of FERMI under privacy: a descent of the model against an ascent of matrices that watch its predictions.

Every record has a label and, unless it plays no game, a *cell*: its event and its group in one code. The matrix of
event e in ``matrix_EGC`` earns on a record of group g with predictions F = softmax(outputs)

    psi = <scale_eg W_eg - c_e, F> - 1,     c_ej = sum over groups of W_ej^2,     scale = 2 / sqrt(share)

so that all the model learns of it is a *pull* on its predictions: lambda (scale_eg W_eg - c_e), fixed within a step.
The gradient of the matrices is linear in the sums of predictions by cell, which the loss hands over as it sees them.

Two trainings: one hides whole records, one their group alone. Both draw noise of multipliers that they are given; what
these guarantee is for their caller to say.

Shapes: N records, B of a batch, E events, G groups, Q = E G cells, C classes, K = C + Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.models import scale_bytes
from fairpate.nn.private_fit import GaussianNoise, PrivateRandomness, PrivateSteps, PrivateTraining

FloatArray = npt.NDArray[np.float64]


def watched_targets(labels_N: Tensor, cells_N: Tensor, *, num_classes: int, num_cells: int) -> Tensor:
    """What the losses here read of a record: its label and its cell as indicators, (N, K) ``float32``, K = C + Q.

    A cell of ``num_cells`` is none. As indicators, since products with them are quicker than looking codes up.
    """
    labels_NC = functional.one_hot(labels_N.long(), num_classes)
    cells_NQ = functional.one_hot(cells_N.long(), num_cells + 1)[:, :-1]
    return torch.cat([labels_NC, cells_NQ], dim=1).float()


class MatrixGame:
    """The matrices, their pulls on records, and what the records of a batch make of them.

    ``shares_EG``: positive shares of groups in events. The Frobenius norm of an event's matrix is at most ``radius``. A
    ``weight`` (lambda) of 0 leaves all at 0. Numbers this few are quicker in numpy than in torch.
    """

    def __init__(
        self,
        shares_EG: npt.ArrayLike,
        *,
        num_classes: int,
        weight: float,
        radius: float,
        device: torch.device | None = None,
    ) -> None:
        shares = np.asarray(shares_EG, dtype=np.float64)
        if shares.ndim != 2 or not (shares > 0).all():
            raise ValueError(f"Expected positive shares by event and group, got {shares.tolist()}.")
        if not weight >= 0 or not radius > 0:
            raise ValueError(f"Expected weight >= 0 and radius > 0, got {weight} and {radius}.")
        self.weight, self.radius, self.num_classes = weight, radius, num_classes
        self._scale_EG1 = 2 / np.sqrt(shares)[:, :, None]
        self.matrix_EGC = np.zeros((*shares.shape, num_classes))
        # Labels come first in targets and so in what is multiplied by them; they pull nothing.
        self._sums_KC = torch.zeros(num_classes + shares.size, num_classes, device=device)
        self.pull_KC, self.common_pull_KC, self.own_pull_KC = (torch.zeros_like(self._sums_KC) for _ in range(3))

    @property
    def record_sensitivity(self) -> float:
        """The L2 norm of one record's gradient of psi with respect to the matrices, at most."""
        # scale F in the record's row less 2 W F in all: |F| <= 1, and |W| <= radius.
        return float(self._scale_EG1.max()) + 2 * self.radius

    @property
    def group_sensitivity(self) -> float:
        """How far another group of the record may move that gradient, at most."""
        # Another group takes the predictions, of norm at most 1, from one row to another; the term in W stays.
        two_largest_E2 = np.sort(self._scale_EG1[:, :, 0], axis=1)[:, -2:]
        return float(np.linalg.norm(two_largest_E2, axis=1).max())

    def observe(self, probability_BC: Tensor, targets_BK: Tensor) -> None:
        """Take in the predictions of a part of the batch; the next :meth:`ascend` uses and forgets them.

        A prediction that is not a number counts as 0: the noise covers one record, not a sum that it has spoilt.
        """
        self._sums_KC.addmm_(targets_BK.mT, probability_BC.nan_to_num())

    def gradient(self) -> FloatArray:
        """The gradient of the summed psi of all records observed with respect to the matrices, (E, G, C)."""
        sums_EGC = self._sums_KC.cpu().numpy()[self.num_classes :].reshape(self.matrix_EGC.shape)
        played_E1C = np.add.reduce(sums_EGC, axis=1, keepdims=True)
        gradient_EGC: FloatArray = self._scale_EG1 * sums_EGC - 2 * played_E1C * self.matrix_EGC
        return gradient_EGC

    def ascend(self, noise: GaussianNoise, *, stddev: float, learning_rate: float) -> None:
        """One step up, with noise on the sums, and back into the ball; ``learning_rate`` is of the sums."""
        if not self.weight:
            return
        gradient_EGC = self.gradient()
        self._sums_KC.zero_()
        if stddev:
            gradient_EGC += stddev * noise.take(gradient_EGC.size).numpy().reshape(gradient_EGC.shape)
        self.move_to(self.matrix_EGC + learning_rate * gradient_EGC)

    def move_to(self, matrix_EGC: FloatArray) -> None:
        """The matrices become those; an event's outside the ball, the nearest inside."""
        cost_E1C = np.add.reduce(matrix_EGC * matrix_EGC, axis=1, keepdims=True)
        norm_E11 = np.sqrt(np.add.reduce(cost_E1C, axis=2, keepdims=True))
        # Never above 1: a matrix inside the ball stays where it is.
        shrink_E11 = self.radius / np.maximum(norm_E11, self.radius)
        self.matrix_EGC = shrink_E11 * matrix_EGC
        # shrink^2 times the cost is that of the shrunk matrix, without squaring it again.
        self._write(
            self.pull_KC, self.weight * (self._scale_EG1 * self.matrix_EGC - shrink_E11 * shrink_E11 * cost_E1C)
        )

    def split_pulls(self) -> None:
        """Bring the parts of the pull up to date: ``own`` group's less the mean over groups, and what is ``common``."""
        gain_EGC = self._scale_EG1 * self.matrix_EGC
        self._write(self.own_pull_KC, self.weight * (gain_EGC - gain_EGC.mean(axis=1, keepdims=True)))
        torch.sub(self.pull_KC, self.own_pull_KC, out=self.common_pull_KC)

    def _write(self, table_KC: Tensor, values_EGC: FloatArray) -> None:
        table_KC[self.num_classes :] = torch.from_numpy(values_EGC.reshape(-1, self.num_classes))


class FermiLoss:
    """``<pull, F>`` of every record, and its cross entropy where it ``reads_labels``, for :func:`watched_targets`.

    ``pull_KC`` is read anew at every call. ``observe`` hears the predictions (B, C) and the targets (B, K).
    """

    def __init__(
        self, pull_KC: Tensor, *, reads_labels: bool = True, observe: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        self._pull_KC, self._reads_labels, self._observe = pull_KC, reads_labels, observe
        self._ones_C1 = pull_KC.new_ones(pull_KC.shape[1], 1)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, shape (B,)."""
        probability_BC = outputs.softmax(dim=1)
        if self._observe is not None:
            self._observe(probability_BC.detach(), targets)
        pulled_B = (targets @ self._pull_KC * probability_BC).sum(dim=1)
        if not self._reads_labels:
            return pulled_B
        return pulled_B + functional.cross_entropy(outputs, targets[:, : outputs.shape[1]], reduction="none")

    @torch.no_grad()
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed losses with respect to ``outputs`` (B, C)."""
        # For the few classes there are, this is quicker than the softmax itself.
        probability_BC = torch.log_softmax(outputs, dim=1).exp_()
        if self._observe is not None:
            self._observe(probability_BC, targets)
        # The softmax's derivative likewise: F (pull - <pull, F>), its sum by a product.
        gradient_BC: Tensor = targets @ self._pull_KC
        pulled_B1 = (gradient_BC * probability_BC) @ self._ones_C1
        gradient_BC.sub_(pulled_B1).mul_(probability_BC)
        if not self._reads_labels:
            return gradient_BC
        return gradient_BC.add_(probability_BC).sub_(targets[:, : outputs.shape[1]])


class FermiTraining(PrivateTraining):
    """Hides whole records: a record's loss and its pull are clipped as one.

    Or whole persons, by their average gradient, and by their average prediction in the sums of the matrices.

    ``targets`` are :func:`watched_targets`.
    ``matrix_noise_multiplier`` and ``steps.noise_multiplier`` are standard deviations over what one record may add to
    the two sums. ValueError for a model whose layers have no gradients in closed form.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        targets: Tensor,
        game: MatrixGame,
        steps: PrivateSteps,
        *,
        matrix_noise_multiplier: float,
        matrix_learning_rate: float,
        randomness: PrivateRandomness,
        loss: FermiLoss | None = None,
        person_N: Tensor | None = None,
    ) -> None:
        loss = loss or FermiLoss(game.pull_KC, observe=self._observe)
        super().__init__(model, x, targets, loss, steps, randomness=randomness, person_N=person_N)
        if self._clipper.engine == "functional":
            raise ValueError(
                "Expected a model whose layers all have gradients in closed form, such as a CNN or an MLP."
            )
        self._game, self._matrix_noise = game, GaussianNoise(randomness)
        self._matrix_stddev = matrix_noise_multiplier * self._matrix_sensitivity
        self._matrix_learning_rate = matrix_learning_rate / steps.expected_batch_size

    def _observe(self, probability_BC: Tensor, targets_BK: Tensor) -> None:
        share_B = self._clipper.share_B
        self._game.observe(probability_BC if share_B is None else probability_BC * share_B[:, None], targets_BK)

    @property
    def _matrix_sensitivity(self) -> float:
        return self._game.record_sensitivity

    def step(self) -> None:
        """Descend with the old matrices, then let them ascend from the old model's predictions."""
        super().step()
        self._game.ascend(self._matrix_noise, stddev=self._matrix_stddev, learning_rate=self._matrix_learning_rate)


class GroupFermiTraining(FermiTraining):
    """Hides the group alone: noise covers what depends on it, a clipped part of each record's gradient, and no more.

    Multipliers are over what another group may move: 2 ``clip_norm`` and :attr:`MatrixGame.group_sensitivity`.
    ``batches`` replaces secret Poisson samples.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, targets: Tensor, game: MatrixGame, steps: PrivateSteps, **options: Any
    ) -> None:
        batches: Batches | None = options.pop("batches", None)
        own = FermiLoss(game.own_pull_KC, reads_labels=False)
        super().__init__(model, x, targets, game, steps, loss=own, **options)
        self._common = FermiLoss(game.common_pull_KC, observe=game.observe)
        self._drawn: Batches = self._batches if batches is None else batches

    @property
    def _matrix_sensitivity(self) -> float:
        return self._game.group_sensitivity

    def step(self) -> None:
        """As the parent's, from two gradients of the same batch."""
        steps, rows = self._steps, self._drawn.next().to(self._x.device)
        batch = scale_bytes(self._x.index_select(0, rows)).contiguous(memory_format=self._memory_format)
        targets = self._targets.index_select(0, rows)
        sums = self._clipper.sum(batch, targets).gradients
        # Another group replaces a clipped part by another one: twice the clip norm.
        self._noise.add_to(sums, 2 * steps.noise_multiplier * steps.clip_norm)
        size = steps.max_records or max(1, len(rows))
        for part, part_targets in zip(batch.split(size), targets.split(size), strict=True):
            if len(part):
                # Neither clipped nor noisy: the common part of the pull is the same for every group.
                loss = self._common(self._model(part), part_targets).sum()
                torch._foreach_add_(sums, torch.autograd.grad(loss, self.parameters))
        self._update(sums)
        self._game.ascend(self._matrix_noise, stddev=self._matrix_stddev, learning_rate=self._matrix_learning_rate)
        self._game.split_pulls()


class Batches(Protocol):
    """One batch of rows after another."""

    def next(self) -> Tensor:
        """``int64``."""
        ...


class PublicPartitions:
    """Every epoch divides all records at random into batches of ``batch_size``, the last of which may be smaller."""

    def __init__(self, num_records: int, batch_size: int, generator: torch.Generator) -> None:
        self._num_records, self._batch_size, self._generator = num_records, batch_size, generator
        self._left: list[Tensor] = []

    def next(self) -> Tensor:
        """The rows of the next batch."""
        if not self._left:
            self._left = list(torch.randperm(self._num_records, generator=self._generator).split(self._batch_size))
        return self._left.pop()


def default_radius(num_classes: int) -> float:
    """Half as much again as the norm that W has where predictions and groups are independent: sqrt(C)."""
    return 1.5 * math.sqrt(num_classes)
