"""Sums of clipped per-example gradients, which is all that differentially private SGD sees of a batch.

Abadi et al. 2016 ("Deep Learning with Differential Privacy", arXiv 1607.00133): every record's gradient, over all
parameters together, is scaled down to an L2 norm of at most ``clip_norm`` before the sum. Two engines give the same
sum. ``book_keeping`` runs one backward pass that keeps each layer's input and output gradient, takes the norms from
these and then the weighted sum from the same tensors (Bu et al. 2023, arXiv 2210.00038). A chain of dense layers needs
no autograd for that. ``functional`` maps ``torch.func.grad`` over the records and works for any module, more slowly.
Only models of known layers use ``book_keeping``; any other uses ``functional``, where a record cannot reach another,
and is tried once (:mod:`fairpate.nn.layers`). A layer that mixes the records of a batch has no per-example gradient and
is refused.

Where records belong to owners (persons with several records each), the average gradient of each owner's records is
formed and clipped instead. ``owner_B`` gives each record's owner, in ascending numbers.

The bound holds for the values that the machine adds up: norms are those of the formed gradients up to a rounding error,
by which ``clip_norm`` is reduced beforehand, and a record whose gradient is not finite adds nothing. How rounding
changes the *other* records of a batch when one is left out is not covered: a few units in the last place of the sum, as
in any floating-point implementation. This module draws no noise and knows no epsilon.

Shapes: B records of a batch; T positions; C outputs; P values of one parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fairpate.nn.layers import (
    ROUNDING,
    DenseChain,
    layer_gradient,
    refuse_statistics,
    squared_norms,
    try_records_apart,
    unknown_module,
)

Engine = Literal["book_keeping", "functional"]
PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
"""One value per record. It may have a method ``gradient`` too, as below, where speed matters, and a method
``before_batch(clipper, x, targets, owner_B)`` for what has to be known of a batch before its first loss."""
# One call of a layer: the layer, its input and the gradient of its output.
LayerCall = tuple[nn.Module, Tensor, Tensor]
_LONGEST = 1e30  # in clip norms: the factor of anything longer has no precision left, and the record adds nothing
_log = logging.getLogger(__name__)


def part_bounds(num_records: int, size: int, owner_B: Tensor | None = None) -> list[tuple[int, int]]:
    """The bounds (start, stop) of parts of at most ``size`` records. With owners, the records of an owner stay in one
    part."""
    if owner_B is None or not num_records:
        return [(start, min(start + size, num_records)) for start in range(0, num_records, max(1, size))]
    # Owners ascend, so that one ends where the number changes.
    firsts = [0, *(torch.diff(owner_B).nonzero()[:, 0] + 1).tolist()]
    starts: list[int] = []
    for first, after in zip(firsts, [*firsts[1:], num_records], strict=True):
        # Never through an owner, whose average needs all of its records.
        if not starts or after - starts[-1] > size:
            starts.append(first)
    return list(zip(starts, [*starts[1:], num_records], strict=True))


def shares_of(owner_B: Tensor) -> Tensor:
    """One over the number of records of each record's owner, (B,) ``float32``."""
    _, owner_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
    share_B: Tensor = (1 / counts.float())[owner_B]
    return share_B


def averages(values_BP: Tensor, owner_B: Tensor) -> Tensor:
    """The average row of each owner, in their order."""
    _, owner_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
    sums = values_BP.new_zeros(len(counts), values_BP.shape[1]).index_add_(0, owner_B, values_BP)
    return sums.div_(counts[:, None])


class CrossEntropy:
    """Cross entropy per record for targets (B,) ``int64``; with its gradient, which small models need quickly."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, shape (B,)."""
        return functional.cross_entropy(outputs, targets, reduction="none")

    @torch.no_grad()
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed losses with respect to ``outputs`` (B, C): probability less truth."""
        # For the few classes there are, this is quicker than the softmax itself.
        probability = torch.log_softmax(outputs, dim=1).exp_()
        return probability.scatter_(1, targets[:, None], -1.0, reduce="add")


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """``gradients``: one sum per trainable parameter, in their order. What is known of single records is private."""

    gradients: list[Tensor]
    squared_norms_B: Tensor

    @property
    def norms_B(self) -> Tensor:
        """L2 norm of every record's or owner's gradient before clipping, shape (B,)."""
        return self.squared_norms_B.sqrt()


class GradientClipper:
    """Sums the clipped per-example gradients of one model, batch after batch."""

    def __init__(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        *,
        clip_norm: float,
        engine: Literal["auto"] | Engine = "auto",
        max_records: int | None = None,
    ) -> None:
        """``loss(outputs, targets)`` gives one value per record, shape (B,).

        ``max_records`` bounds how many records are in memory at once; the sum does not depend on it. ValueError for a
        layer that mixes records, and where ``book_keeping`` is asked of a model that it does not cover.
        """
        if not clip_norm > 0:
            raise ValueError(f"Expected clip_norm > 0, got {clip_norm}.")
        # With any engine: running statistics would keep private records in the model, without noise.
        refuse_statistics(model)
        unknown = unknown_module(model)
        if engine == "book_keeping" and unknown is not None:
            raise ValueError(
                f"{unknown} is not known to run once, on its own weights and on every record by itself; use engine "
                "`functional`."
            )
        self.engine: Engine = engine if engine != "auto" else "functional" if unknown else "book_keeping"
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        # Known layers need no trial, as their list proves that records stay apart.
        self._trained, self._is_tried, self._has_warned = self.parameters, unknown is None, False
        self.model, self.max_records, self._loss, self._clip_norm = model, max_records, loss, clip_norm
        self._gradient_of_loss: PerExampleLoss | None = getattr(loss, "gradient", None)
        self._before_batch: Callable[..., None] = getattr(loss, "before_batch", lambda *_: None)
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._chain = DenseChain.of(model)
        self.share_B: Tensor | None = None
        """While a part of a batch passes through the model: each record's share of its owner. None without owners."""

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        """The sum over records of min(1, clip_norm / norm) times the gradient of the record's loss; 0 for no record.

        With ``owner_B``, the owners of the records in numbers that ascend from 0, the sum is over owners, of their
        average gradients. A record whose gradient is not finite adds nothing, which the log reports once. The model
        should be in the mode that training wants. ValueError for weights that are not finite, and under autocast: a
        norm that was rounded to eight bits bounds nothing.
        """
        self._before_batch(self, x, targets, owner_B)
        if torch.is_autocast_enabled(x.device.type):
            raise ValueError("Per-example gradients are clipped in the parameters' own precision; leave autocast out.")
        if not self._is_tried and len(x):

            def gradients(model: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
                # Random weights of all outputs: a trial must not depend on what the loss reads.
                return self._mapped_gradients(model, lambda outputs, w: (outputs * w).flatten(1).sum(dim=1), x, weights)

            try_records_apart(self.model, gradients, x)
            self._is_tried = True
        size = self.max_records or len(x)
        if owner_B is None and 0 < len(x) <= size:
            return self._part(x, targets)
        bounds = part_bounds(len(x), size, owner_B)
        parts = [self._part(x[i:j], targets[i:j], None if owner_B is None else owner_B[i:j]) for i, j in bounds]
        if not parts:
            nothing = torch.zeros(0, device=x.device, dtype=torch.float64)
            return ClippedSum(gradients=[torch.zeros_like(p) for p in self.parameters], squared_norms_B=nothing)
        total = parts[0].gradients
        for each in parts[1:]:
            torch._foreach_add_(total, each.gradients)
        return ClippedSum(gradients=total, squared_norms_B=torch.cat([each.squared_norms_B for each in parts]))

    def _part(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        # Owners need formed gradients: the norm of an average does not follow from its records' norms.
        if owner_B is not None or self.engine == "functional":
            return self._clipped_rows(self._rows(x, targets, owner_B))
        calls = self._layer_calls(x, targets)
        with torch.no_grad():
            layers = [layer_gradient(*call) for call in calls]
            squared_norms_B = sum((layer.squared_norms() for layer in layers[1:]), start=layers[0].squared_norms())
            is_counted_B = self._is_counted(squared_norms_B)
            if is_counted_B is not None:
                # Formed again from zeros: a weight of 0 would not remove what is not finite from a sum.
                layers = [layer_gradient(layer, *_only(is_counted_B, *values)) for layer, *values in calls]
            factors_B = self._clip_factors(squared_norms_B, is_counted_B)
            sums = {id(p): value for layer in layers for p, value in layer.weighted_sums(factors_B)}
        # A layer that the outputs do not depend on made no call: its gradient is 0.
        gradients = [sums[id(p)] if id(p) in sums else torch.zeros_like(p) for p in self._trained]
        return ClippedSum(gradients=gradients, squared_norms_B=squared_norms_B)

    def _rows(self, x: Tensor, targets: Tensor, owner_B: Tensor | None) -> list[Tensor]:
        """Every record's gradient, or every owner's, (B, P) per trainable parameter."""
        self.share_B = None if owner_B is None else shares_of(owner_B)

        def formed(values_BP: Tensor) -> Tensor:
            return values_BP if owner_B is None else averages(values_BP, owner_B)

        if self.engine == "functional":
            return [formed(values.flatten(1)) for values in self._mapped_gradients(self.model, self._loss, x, targets)]
        calls = self._layer_calls(x, targets)
        with torch.no_grad():
            rows = {id(p): formed(values) for call in calls for p, values in layer_gradient(*call).per_record()}
        # A layer that the outputs do not depend on made no call: its gradient is 0.
        return [rows[id(p)] if id(p) in rows else formed(p.new_zeros(len(x), p.numel())) for p in self._trained]

    def _layer_calls(self, x: Tensor, targets: Tensor) -> list[LayerCall]:
        """One forward and one backward pass: every trained layer that ran, with its input and its output's gradient."""
        if self._chain is not None and self._chain.reads(x):
            values = self._chain.forward(x)
            return self._chain.backward(values, self._loss_gradient(values[-1], targets))
        # A later version shows that a layer has overwritten the input. Outputs may be overwritten: an edge of the graph
        # refers to the value before.
        calls: list[tuple[nn.Module, Tensor, int, GradientEdge]] = []

        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Norms are taken per call. A layer that runs twice has the sum of two gradients, which has another norm.
            if any(layer is other for other, *_ in calls):
                raise ValueError(f"{type(layer).__name__} runs twice for one record; use engine `functional`.")
            layer_input = inputs[0].detach()
            calls.append((layer, layer_input, layer_input._version, get_gradient_edge(output)))

        handles = [layer.register_forward_hook(keep) for layer in self._layers]
        try:
            losses_B = self._loss(self.model(x), targets)
        finally:
            for handle in handles:
                handle.remove()
        _check_losses(losses_B, len(x))
        output_gradients = torch.autograd.grad(losses_B.sum(), [edge for *_, edge in calls])
        for layer, layer_input, version, _ in calls:
            name = type(layer).__name__
            if len(layer_input) != len(x):
                raise ValueError(
                    f"{name} reads {len(layer_input)} rows for {len(x)} records: records must stay along the first "
                    "axis; use engine `functional`."
                )
            own_axes = len(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else 1
            if layer_input.ndim < 1 + (3 if isinstance(layer, nn.Conv2d) else own_axes):
                raise ValueError(f"{name} reads records without an axis of their own: {tuple(layer_input.shape)}.")
            if layer_input._version != version:
                raise ValueError(f"The input of {name} is overwritten by a later layer; use engine `functional`.")
        return [(call[0], call[1], gradient) for call, gradient in zip(calls, output_gradients, strict=True)]

    def _loss_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._gradient_of_loss is not None:
            return self._gradient_of_loss(outputs, targets)
        outputs = outputs.detach().requires_grad_()
        losses_B = self._loss(outputs, targets)
        _check_losses(losses_B, len(outputs))
        (gradient,) = torch.autograd.grad(losses_B.sum(), outputs)
        return gradient

    def _mapped_gradients(self, model: nn.Module, loss: PerExampleLoss, x: Tensor, targets: Tensor) -> list[Tensor]:
        """Every record's gradient, (B, ...) per trainable parameter, with one record in the model at a time."""
        named = dict(model.named_parameters())
        trainable = {name: p.detach() for name, p in named.items() if p.requires_grad}
        fixed = {name: p.detach() for name, p in named.items() if not p.requires_grad}
        fixed |= dict(model.named_buffers())

        def record_loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
            # A batch of one: a layer that mixes records has no other record to mix in.
            output = functional_call(model, parameters | fixed, (record[None],))
            return loss(output, target[None])[0]

        # Dropout draws for every record by itself, as in a batch.
        per_record = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")
        return list(per_record(trainable, x, targets).values())

    @torch.no_grad()
    def _clipped_rows(self, gradients: list[Tensor]) -> ClippedSum:
        """The clipped sum of gradients that are formed: one (B, ...) per trainable parameter."""
        rows = [values.flatten(1) for values in gradients]
        squared_norms_B = sum((squared_norms(values) for values in rows[1:]), start=squared_norms(rows[0]))
        is_counted_B = self._is_counted(squared_norms_B)
        if is_counted_B is not None:
            rows = _only(is_counted_B, *rows)
        factors_B = self._clip_factors(squared_norms_B, is_counted_B)
        sums = [(factors_B.to(values) @ values).reshape(p.shape) for values, p in zip(rows, self._trained, strict=True)]
        return ClippedSum(gradients=sums, squared_norms_B=squared_norms_B)

    def _is_counted(self, squared_norms_B: Tensor) -> Tensor | None:
        """A mask (B,) of the records that contribute to the sum; None if all do. ValueError for weights that are not
        finite.

        An error would reveal a record; weights are released anyway.
        """
        # NaN fails the comparison, as it should.
        is_counted_B = squared_norms_B <= (_LONGEST * self._clip_norm) ** 2
        if bool(is_counted_B.all()):
            return None
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise ValueError("The model's weights are not finite; lower the learning rate.")
        if not self._has_warned:
            _log.warning("The gradients of some records are not finite; such records add nothing to a step.")
            self._has_warned = True
        return is_counted_B

    def _clip_factors(self, squared_norms_B: Tensor, is_counted_B: Tensor | None) -> Tensor:
        """min(1, clip_norm / norm) per record in the parameters' precision, lowered by the rounding error; 0 for a
        record that is not counted."""
        precision = torch.finfo(self._trained[0].dtype).eps
        # A norm of 0 gives inf and so the factor 1. The bound is lowered by what the norm may be rounded down by.
        factors_B = squared_norms_B.rsqrt().mul_(self._clip_norm * (1 - ROUNDING * precision)).clamp_(max=1)
        if is_counted_B is not None:
            # Not a product: 0 times what is not finite is NaN.
            factors_B = factors_B.where(is_counted_B, 0)
        return factors_B.to(self._trained[0].dtype)


def _only(is_counted_B: Tensor, *values: Tensor) -> list[Tensor]:
    """The tensors (B, ...) with zeros for all records outside of the mask, even if their values are NaN."""
    return [each.masked_fill(~is_counted_B.view(-1, *[1] * (each.ndim - 1)), 0) for each in values]


def _check_losses(losses_B: Tensor, num_records: int) -> None:
    if losses_B.shape != (num_records,):
        raise ValueError(f"Expected one loss per record, shape ({num_records},), got {tuple(losses_B.shape)}.")


class GuidedGradients(GradientClipper):
    """Two gradients of one batch of float records. A single forward pass serves both if the model is a chain.

    One is that of the summed cross entropy. The other is a sum of clipped gradients of ``loss``, which here may be any
    value of a record, with a weight for each record: for terms that depend on the group that a record belongs to.
    """

    _weights_B: Tensor
    _values: list[Tensor] | None = None

    def cross_entropy(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        """Gradients of the summed cross entropy; 0 for no record. ``x`` (B, ...), ``labels`` (B,)."""
        self._values = None
        if not len(x):
            return [torch.zeros_like(p) for p in self.parameters]
        if self._chain is None or not self._chain.reads(x):
            loss = functional.cross_entropy(self.model(x), labels, reduction="sum")
            return list(torch.autograd.grad(loss, self.parameters))
        self._values = self._chain.forward(x)
        slope = CrossEntropy().gradient(self._values[-1], labels)
        sums = {id(p): total for p, total in self._chain.summed_gradients(self._values, slope)}
        return [sums[id(p)] for p in self.parameters]

    def both(self, x: Tensor, labels: Tensor, targets: Tensor, weights_B: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """:meth:`cross_entropy`, and the sum of the clipped gradients of the values times ``weights_B``."""
        gradients, self._weights_B = self.cross_entropy(x, labels), weights_B
        return gradients, self.sum(x, targets).gradients

    def _clip_factors(self, squared_norms_B: Tensor, is_counted_B: Tensor | None) -> Tensor:
        # After clipping: weights are public, and the noise is scaled to them.
        return super()._clip_factors(squared_norms_B, is_counted_B) * self._weights_B

    def _layer_calls(self, x: Tensor, targets: Tensor) -> list[LayerCall]:
        if self._values is None or self._chain is None:
            return super()._layer_calls(x, targets)
        return self._chain.backward(self._values, self._loss_gradient(self._values[-1], targets))
