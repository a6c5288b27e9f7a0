"""Two gradients of one batch: that of the summed cross entropy as it is, and that of another value, record by record.

The second is a sum of per-record gradients, each clipped and then given a weight of its own, as terms need that hide
which group a record belongs to. A chain of dense layers runs forward once for both (:mod:`fairpate.nn.dense_chain`).
Draws no noise and knows no epsilon.

Shapes: B records of a batch, C outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.per_example import ClippedSum, CrossEntropy, GradientClipper, LayerCall, PerExampleLoss


class GuidedGradients:
    """The gradients of ``model``, one per trainable parameter in their order; records are floats.

    ``value(outputs, targets)`` gives one value per record, shape (B,), and is quicker with a method ``gradient``. A
    norm above ``clip_norm`` is clipped. ValueError for a layer that mixes records.
    """

    def __init__(self, model: nn.Module, value: PerExampleLoss, *, clip_norm: float) -> None:
        self._model, self._clipper = model, _WeightedClipper(model, value, clip_norm=clip_norm)
        self._cross_entropy = CrossEntropy()

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters."""
        return self._clipper.parameters

    def loss(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        """Of the summed cross entropy; 0 for no record. ``x`` (B, ...), ``labels`` (B,)."""
        return self._of_loss(x, labels, self._clipper.run_forward(x))

    def loss_and_clipped(
        self, x: Tensor, labels: Tensor, targets: Tensor, weights_B: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """:meth:`loss`, and the sum of the clipped gradients of the values times ``weights_B``."""
        values = self._clipper.run_forward(x)
        loss = self._of_loss(x, labels, values)
        return loss, self._clipper.weighted(x, targets, weights_B, values).gradients

    def _of_loss(self, x: Tensor, labels: Tensor, values: list[Tensor] | None) -> list[Tensor]:
        if not len(x):
            return [torch.zeros_like(p) for p in self.parameters]
        if values is None:
            loss = functional.cross_entropy(self._model(x), labels, reduction="sum")
            return list(torch.autograd.grad(loss, self.parameters))
        return self._clipper.summed(values, self._cross_entropy.gradient(values[-1], labels))


class _WeightedClipper(GradientClipper):
    """Gives every clipped gradient a weight, and may start from a forward pass that was made already."""

    _weights_B: Tensor
    _values: list[Tensor] | None = None

    def run_forward(self, x: Tensor) -> list[Tensor] | None:
        """What every layer of a chain reads and the last one says; None where there is no chain or no record."""
        return self._chain.forward(x) if self._chain is not None and len(x) and self._chain.reads(x) else None

    def summed(self, values: list[Tensor], slope: Tensor) -> list[Tensor]:
        """The gradients of a chain summed over records, from those of its outputs (B, C)."""
        assert self._chain is not None
        sums = {id(p): total for p, total in self._chain.summed_gradients(values, slope)}
        return [sums[id(p)] for p in self.parameters]

    def weighted(self, x: Tensor, targets: Tensor, weights_B: Tensor, values: list[Tensor] | None) -> ClippedSum:
        """The sum, from ``values`` where there are any."""
        self._weights_B, self._values = weights_B, values
        return self.sum(x, targets)

    def _clip_factors(self, squared_norms_B: Tensor, is_counted_B: Tensor | None) -> Tensor:
        # After clipping: weights are public, and the noise is scaled to them.
        return super()._clip_factors(squared_norms_B, is_counted_B) * self._weights_B

    def _layer_calls(self, x: Tensor, targets: Tensor) -> list[LayerCall]:
        if self._values is None or self._chain is None:
            return super()._layer_calls(x, targets)
        return self._chain.backward(self._values, self._loss_gradient(self._values[-1], targets))
