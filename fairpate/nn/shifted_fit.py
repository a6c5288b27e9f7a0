"""DP-SGD in which one public vector is added to every record's gradient *before* it is clipped.

FairDP-SGD as printed (FairPATE, Algorithm 6) needs sums of ``clip(g_i + r)``. The norms follow from those of g_i and
from the inner products with r, ``|g_i + r|^2 = |g_i|^2 + 2 <g_i, r> + |r|^2``, and all layers give their inner products
in closed form, so that the shifted gradients are never formed and nothing runs a second time.

Shapes: B records of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn import layer_gradients
from fairpate.nn.layer_gradients import LayerGradient
from fairpate.nn.per_example import ClippedSum, GradientClipper, PerExampleLoss
from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps, PrivateTraining, PublicGradient


class ShiftedClipper(GradientClipper):
    """Sums of ``clip(g_i + shift)``; ``shift`` holds one tensor per trainable parameter, or None for no shift.

    ``norms_B`` are those of the shifted gradients. Otherwise as :class:`GradientClipper`.
    """

    shift: Sequence[Tensor] | None = None

    def __init__(self, model: nn.Module, loss: PerExampleLoss, **options: Any) -> None:
        super().__init__(model, loss, **options)
        self._tilted: GradientClipper | None = None
        if self.engine == "functional":
            self._tilted = GradientClipper(_Tilted(model, self), _tilted(loss), **options | {"engine": "functional"})

    def _functional(self, x: Tensor, targets: Tensor) -> ClippedSum:
        if self.shift is None or self._tilted is None:
            return super()._functional(x, targets)
        return self._tilted.sum(x, targets)

    def _book_keeping(self, x: Tensor, targets: Tensor) -> ClippedSum:
        if self.shift is None:
            return super()._book_keeping(x, targets)
        layers = self._layer_gradients(x, targets)
        shift_of = {id(p): values for p, values in zip(self.parameters, self.shift, strict=True)}
        with torch.no_grad():
            squared_norms = [layer.squared_norms() for layer in layers]
            squared_norms += [2 * inner_products(layer, shift_of, len(x)) for layer in layers]
            squared_norms += [values.square().sum() for values in self.shift]
            squared_norms_B = torch.stack(torch.broadcast_tensors(*squared_norms)).sum(dim=0).clamp(min=0)
            factors_B = self._clip_factors(squared_norms_B)
            sums = {id(p): value for layer in layers for p, value in layer.weighted_sums(factors_B)}
            gradients = [sums.get(id(p), 0) + factors_B.sum() * shift_of[id(p)] for p in self.parameters]
        return ClippedSum(gradients=gradients, squared_norms_B=squared_norms_B)


class ShiftedTraining(PrivateTraining):
    """:class:`PrivateTraining` with ``public_gradient`` added to every record's gradient before it is clipped."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        targets: Tensor,
        loss: PerExampleLoss,
        steps: PrivateSteps,
        *,
        randomness: PrivateRandomness,
        public_gradient: PublicGradient,
    ) -> None:
        super().__init__(model, x, targets, loss, steps, randomness=randomness)
        self._shifted = ShiftedClipper(model, loss, clip_norm=steps.clip_norm, max_records=steps.max_records)
        self._clipper, self._shift = self._shifted, public_gradient

    def step(self) -> None:
        """As the parent's, with the public gradient of the model as it is now."""
        self._shifted.shift = list(self._shift(self._model))
        super().step()


class _Tilted(nn.Module):
    """A model that also says how far it lies along the shift: the gradient of that is the shift itself."""

    def __init__(self, model: nn.Module, clipper: ShiftedClipper) -> None:
        super().__init__()
        self.model = model
        self._shift = lambda: clipper.shift or ()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parameters = (p for p in self.model.parameters() if p.requires_grad)
        return self.model(x), sum((p * s).sum() for p, s in zip(parameters, self._shift(), strict=True))  # type: ignore[return-value]


def _tilted(loss: PerExampleLoss) -> Callable[..., Tensor]:
    return lambda outputs, targets: loss(outputs[0], targets) + outputs[1]


@singledispatch
def inner_products(layer: LayerGradient, shift_of: dict[int, Tensor], num_records: int) -> Tensor:
    """Inner product of every record's gradient with the shift of a layer's parameters (by ``id``), shape (B,).

    That is how the shift's product with a weighted sum of the gradients changes with the weights.
    """
    with torch.enable_grad():
        weights_B = torch.ones(num_records, requires_grad=True, device=next(iter(shift_of.values())).device)
        along = [(total * shift_of[id(p)]).sum() for p, total in layer.weighted_sums(weights_B)]
        (products_B,) = torch.autograd.grad(along, weights_B, [torch.ones_like(each) for each in along])
    return products_B


@inner_products.register
def _(layer: layer_gradients._Dense, shift_of: dict[int, Tensor], num_records: int) -> Tensor:  # noqa: ARG001
    dense = layer._layer
    weight = shift_of.get(id(dense.weight), torch.zeros_like(dense.weight))
    moved_BO = functional.linear(layer._input_BI, weight, shift_of.get(id(dense.bias)))
    products_B: Tensor = torch.linalg.vecdot(moved_BO, layer._gradient_BO)
    return products_B
