"""DP-SGD beside a noisy histogram of the same batch, from which the extra loss of every record is priced.

Every record belongs to one of Q cells, and its outputs become a row of K non-negative numbers that sum to 1: its soft
prediction, say. On one Poisson sample a step releases

    H[q] = sum of the rows of the records in cell q, with independent Laplace noise on all Q K entries
    the sum of the clipped gradients of  cross entropy + <price[q], row>  over the records, with Gaussian noise

where the prices are any function of the first release. A record moves H by exactly 1 in L1, whatever the model, and the
second sum by at most ``clip_norm`` once H is out. Where records belong to persons, H has the average row of each person
in its cells, which moves it by 1 likewise, and the second sum a person's clipped average gradient. Both see the same
sample: the caller reports them as one event. Knows neither what the prices mean nor any epsilon. The noise is
floating-point, see :mod:`fairpate.nn.private_fit`.

Shapes: N records, B records of a batch, C outputs, Q cells, K columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.owners import shares_of
from fairpate.nn.per_example import ClippedSum, GradientClipper
from fairpate.nn.private_fit import (
    GaussianNoise,
    LaplaceNoise,
    PrivateRandomness,
    PrivateSteps,
    PrivateTraining,
)

FloatArray = npt.NDArray[np.float64]
Pricing = Callable[[FloatArray], FloatArray]


class Rows(Protocol):
    """How outputs become rows of non-negative numbers that sum to 1: what makes the sensitivity of H equal 1."""

    def __call__(self, outputs_BC: Tensor, probability_BC: Tensor) -> Tensor:
        """Rows (B, K), differentiable; ``probability_BC`` is the softmax of the outputs."""
        ...

    def add_pulled_back(self, base_BC: Tensor, probability_BC: Tensor, rows_BK: Tensor, prices_BK: Tensor) -> Tensor:
        """``base`` plus the gradient of the summed ``prices * rows`` with respect to the outputs, in fresh memory."""
        ...

    def counted(self, rows_BK: Tensor) -> Tensor:
        """What the histogram adds up of them: rows of non-negative numbers that sum to 1 too."""
        ...


@dataclass(frozen=True)
class SoftPrediction:
    """softmax(``sharpness`` * outputs): an inverse temperature, so predictions harden as it grows.

    ``counts_labels``: the histogram counts the predicted label of a record instead of its probabilities.
    """

    sharpness: float = 1.0
    counts_labels: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.sharpness < math.inf:
            raise ValueError(f"Expected sharpness > 0 and finite, got {self.sharpness}.")

    def __call__(self, outputs_BC: Tensor, probability_BC: Tensor) -> Tensor:
        """Rows (B, C)."""
        return probability_BC if self.sharpness == 1 else _softmax(self.sharpness * outputs_BC)

    def add_pulled_back(
        self,
        base_BC: Tensor,
        probability_BC: Tensor,  # noqa: ARG002
        rows_BK: Tensor,
        prices_BK: Tensor,
    ) -> Tensor:
        """In closed form."""
        mean_price_B = torch.linalg.vecdot(rows_BK, prices_BK)
        return torch.addcmul(base_BC, rows_BK, prices_BK - mean_price_B.unsqueeze(1), value=self.sharpness)

    def counted(self, rows_BK: Tensor) -> Tensor:
        """The rows themselves, or 1 where each is largest."""
        if not self.counts_labels:
            return rows_BK
        return functional.one_hot(rows_BK.argmax(dim=1), rows_BK.shape[1]).to(rows_BK)


class PricedLoss:
    """Cross entropy plus the price of the record's row, for targets as :meth:`targets` makes them.

    ``prices_QK`` None: the outputs of the next call are the whole batch, and set them. ``share_B``: which share of its
    person each record is that is counted next; None: the whole.
    """

    def __init__(
        self, rows: Rows, *, num_cells: int, num_classes: int, release: Callable[[Tensor], FloatArray]
    ) -> None:
        self._rows, self._num_cells, self._num_classes, self._release = rows, num_cells, num_classes, release
        self._by_target: Tensor | None = None
        self.prices_QK: FloatArray | None = None
        self.share_B: Tensor | None = None

    def targets(self, labels_N: Tensor, cells_N: Tensor) -> Tensor:
        """Cell and label of every record in one number, shape (N,). ValueError for lengths that differ."""
        if len(labels_N) != len(cells_N):
            raise ValueError(f"Expected one cell per label, got {len(cells_N)} cells and {len(labels_N)} labels.")
        return cells_N * self._num_classes + labels_N

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, shape (B,)."""
        rows_BK = self._rows(outputs, _softmax(outputs))
        prices_QK = torch.as_tensor(self._prices(rows_BK, targets), dtype=rows_BK.dtype, device=rows_BK.device)
        cells = torch.div(targets, self._num_classes, rounding_mode="floor")
        labels = targets - cells * self._num_classes
        priced_B: Tensor = (prices_QK[cells] * rows_BK).sum(dim=1)
        return functional.cross_entropy(outputs, labels, reduction="none") + priced_B

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed losses with respect to ``outputs`` (B, C), which need no gradient themselves."""
        probability_BC = torch.log_softmax(outputs, dim=1).exp_()
        rows_BK = self._rows(outputs, probability_BC)
        table = self._lookup(self._prices(rows_BK, targets), rows_BK).index_select(0, targets)
        prices_BK, truth_BC = table.tensor_split((rows_BK.shape[1],), dim=1)
        return self._rows.add_pulled_back(probability_BC, probability_BC, rows_BK, prices_BK).sub_(truth_BC)

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The histogram of these outputs, shape (Q, K)."""
        return self._histogram(self._rows(outputs, _softmax(outputs)), targets)

    def release(self, histogram_QK: Tensor) -> FloatArray:
        """Fix the prices from a histogram that noise is added to."""
        self.prices_QK = self._release(histogram_QK)
        return self.prices_QK

    def _prices(self, rows_BK: Tensor, targets: Tensor) -> FloatArray:
        return self.release(self._histogram(rows_BK.detach(), targets)) if self.prices_QK is None else self.prices_QK

    def _histogram(self, rows_BK: Tensor, targets: Tensor) -> Tensor:
        counted_BK = self._rows.counted(
            rows_BK
        ).nan_to_num()  # a row that is not a number would spoil the sums of all others
        if self.share_B is not None:
            counted_BK = counted_BK * self.share_B[:, None]
        sums = counted_BK.new_zeros(self._num_cells * self._num_classes, rows_BK.shape[1])
        # By target, cell and label in one number, so that no cell has to be looked up first; labels are summed out.
        sums.index_add_(0, targets, counted_BK)
        return sums.view(self._num_cells, self._num_classes, -1).sum(dim=1)

    def _lookup(self, prices_QK: FloatArray, rows_BK: Tensor) -> Tensor:
        """For every target its cell's prices, then its label one-hot: one look-up per record fetches both."""
        if self._by_target is None:
            one_hot = torch.eye(self._num_classes, dtype=rows_BK.dtype).repeat(self._num_cells, 1)
            prices = one_hot.new_zeros(len(one_hot), rows_BK.shape[1])
            self._by_target = torch.cat([prices, one_hot], dim=1)
            by_cell = self._by_target.numpy().reshape(self._num_cells, self._num_classes, -1)
            self._price_part = by_cell[:, :, : rows_BK.shape[1]]
        self._price_part[...] = prices_QK[:, None]
        return self._by_target.to(rows_BK.device)


class PricedClipper(GradientClipper):
    """A sum per batch, before which the batch's histogram is released and sets the prices: empty batches included.

    A batch that is taken in parts, or record by record, is passed through the model once more beforehand.
    """

    def __init__(self, model: nn.Module, loss: PricedLoss, *, clip_norm: float, max_records: int | None = None) -> None:
        super().__init__(model, loss, clip_norm=clip_norm, max_records=max_records)
        self._priced = loss

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        """As the parent's."""
        # Prices of the last batch must not serve this one: its histogram is released exactly once, as it is charged.
        self._priced.prices_QK = None
        in_one_pass = self.engine == "book_keeping" and 0 < len(x) <= (self._max_records or len(x))
        if not in_one_pass or owner_B is not None:
            self._priced.release(self._histogram(x, targets, owner_B))
        return super().sum(x, targets, owner_B)

    @torch.no_grad()
    def _histogram(self, x: Tensor, targets: Tensor, owner_B: Tensor | None) -> Tensor:
        # An empty batch is one empty part: its zeros get their noise as any others.
        size = self._max_records or max(1, len(x))
        parts = list(zip(torch.split(x, size), torch.split(targets, size), strict=True))
        # Of the whole batch: a person may be in two parts, for shares add up over rows.
        shares = [None] * len(parts) if owner_B is None else torch.split(shares_of(owner_B), size)
        histograms = []
        for (part, codes), self._priced.share_B in zip(parts, shares, strict=True):
            histograms.append(self._priced.observe(self._model(part), codes))
        self._priced.share_B = None
        return torch.stack(histograms).sum(dim=0)


class PricedTraining(PrivateTraining):
    """Steps on private ``x`` (N, ...), ``labels`` (N,) below ``num_classes`` and ``cells`` (N,) below ``num_cells``.

    ``pricing`` maps each noisy histogram (Q, K) to prices of that shape. With ``size_noise`` the number of records of
    every cell is released too, under Gaussian noise of that standard deviation, and the histogram is :func:`refined` by
    it. ``histogram_randomness`` is apart from that of sampling and gradients, so that a price of 0 leaves DP-SGD as it
    is, bit for bit.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        labels: Tensor,
        cells: Tensor,
        steps: PrivateSteps,
        *,
        rows: Rows,
        num_cells: int,
        num_classes: int,
        laplace_scale: float,
        pricing: Pricing,
        randomness: PrivateRandomness,
        histogram_randomness: PrivateRandomness,
        person_N: Tensor | None = None,
        size_noise: float | None = None,
    ) -> None:
        for name, noise in (("laplace_scale", laplace_scale), ("size_noise", size_noise or 0.0)):
            if not 0 <= noise < math.inf:
                raise ValueError(f"Expected {name} >= 0 and finite, got {noise}.")
        loss = PricedLoss(rows, num_cells=num_cells, num_classes=num_classes, release=self._release)
        super().__init__(model, x, loss.targets(labels, cells), loss, steps, randomness=randomness, person_N=person_N)
        self._clipper = PricedClipper(model, loss, clip_norm=steps.clip_norm, max_records=steps.max_records)
        self._pricing, self._laplace = pricing, LaplaceNoise(histogram_randomness, scale=laplace_scale)
        self._sizes, self._scales = GaussianNoise(histogram_randomness), (laplace_scale, size_noise)

    def _release(self, histogram_QK: Tensor) -> FloatArray:
        exact_QK = histogram_QK.numpy(force=True)
        noisy_QK = exact_QK + self._laplace.take(exact_QK.size).reshape(exact_QK.shape)
        laplace_scale, size_noise = self._scales
        if size_noise is not None:
            # Of the exact histogram, under noise of its own: a noisy row's sum has the variance of all its entries.
            sizes_Q = exact_QK.sum(axis=1, dtype=np.float64) + size_noise * self._sizes.take(len(exact_QK)).numpy()
            noisy_QK = refined(noisy_QK, sizes_Q, laplace_scale=laplace_scale, size_noise=size_noise)
        return self._pricing(noisy_QK)


def refined(histogram_QK: FloatArray, sizes_Q: FloatArray, *, laplace_scale: float, size_noise: float) -> FloatArray:
    """The histogram nearest to a noisy one and to noisy row sums: least squares, each weighed by its variance."""
    variance = 2 * laplace_scale**2
    if not variance:
        return histogram_QK
    # An entry's covariance with the row's misfit over the misfit's variance, K entries and the size's own noise.
    weight = variance / (histogram_QK.shape[1] * variance + size_noise**2)
    nearest_QK: FloatArray = histogram_QK + weight * (sizes_Q - histogram_QK.sum(axis=1))[:, None]
    return nearest_QK


def _softmax(outputs_BC: Tensor) -> Tensor:
    # For the few classes there are, quicker than the softmax itself.
    return torch.log_softmax(outputs_BC, dim=1).exp()
