"""DP-SGD in which one public vector is added to every record's gradient *before* it is clipped.

A person's average gradient is shifted as a record's is: the average of the shifted ones is the same.

FairDP-SGD as in the paper (FairPATE, Algorithm 6) needs sums of ``clip(g_i + r)``. Where r is long, a record may have a
gradient near -r, and closed forms fail: ``|g_i|^2 + 2 <g_i, r> + |r|^2`` loses in ``float32`` what is left of the norm,
and so does a sum that is put together from multiples of g_i and of r. Every shifted gradient is therefore formed, in
``float64``, its norm taken and itself scaled and added; noise joins before anything is rounded to ``float32``.

Shapes: B records of a batch, P values of one parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fairpate.nn.per_example import ClippedSum, GradientClipper, PerExampleLoss
from fairpate.nn.private_fit import PrivateSteps, PrivateTraining, PublicGradient

_VALUES_AT_ONCE = 2**24


class ShiftedClipper(GradientClipper):
    """Sums of ``clip(g_i + shift)``; ``shift`` holds one tensor per trainable parameter, or None for no shift.

    Sums are ``float64``. ``norms_B`` are those of the shifted gradients. Otherwise as :class:`GradientClipper`.
    """

    shift: Sequence[Tensor] | None = None

    def __init__(
        self, model: nn.Module, loss: PerExampleLoss, *, max_records: int | None = None, **options: Any
    ) -> None:
        num_values = sum(p.numel() for p in model.parameters() if p.requires_grad)
        at_once = max(1, _VALUES_AT_ONCE // max(1, num_values))
        super().__init__(
            copy.deepcopy(model).double(), loss, max_records=min(max_records or at_once, at_once), **options
        )
        self._original = model
        # What is released belongs to the original; `_trained` stays with the twin.
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        """As the parent's, of the model as it is now."""
        # The twin in double precision follows the model that the steps move.
        self._model.load_state_dict(self._original.state_dict())
        self._model.train(self._original.training)
        return super().sum(x.double() if x.is_floating_point() else x, targets, owner_B)

    def _part(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        rows = self._rows(x, targets, owner_B)
        if self.shift is not None:
            rows = [values + part.double().flatten() for values, part in zip(rows, self.shift, strict=True)]
        return self._clipped_rows(rows)


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
        public_gradient: PublicGradient,
        **options: Any,
    ) -> None:
        super().__init__(model, x, targets, loss, steps, **options)
        self._shifted = ShiftedClipper(model, loss, clip_norm=steps.clip_norm, max_records=steps.max_records)
        self._clipper, self._shift = self._shifted, public_gradient

    def step(self) -> None:
        """As the parent's, with the public gradient of the model as it is now."""
        self._shifted.shift = list(self._shift(self._model))
        if not all(bool(values.isfinite().all()) for values in self._shifted.shift):
            raise ValueError("The public gradient is not finite; lower the learning rate, or the regulariser's weight.")
        super().step()
