"""Sums of clipped per-example gradients, which is all that differentially private SGD ever sees of a batch.

Abadi et al. 2016 ("Deep Learning with Differential Privacy", arXiv 1607.00133): every record's gradient, over all
parameters together, is scaled down to an L2 norm of at most ``clip_norm`` before the sum. Two engines give the same
sum. ``book_keeping`` runs one backward pass that keeps each layer's input and output gradient, takes the norms in
closed form from these and then the weighted sum from the same tensors (Bu et al. 2023, arXiv 2210.00038).
``functional`` maps ``torch.func.grad`` over the records and works for any module, more slowly.

A layer that mixes the records of a batch has no per-example gradient and is refused. This module draws no noise and
knows no epsilon.

Shapes: B records of a batch; T positions; P values of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fairpate.nn.layer_gradients import LayerGradient, layer_gradient, supports

Engine = Literal["book_keeping", "functional"]
PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
_MIXES_RECORDS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, kw_only=True)
class ClippedSum:
    """``gradients``: one sum per trainable parameter, in their order. ``norms_B`` and ``losses_B`` are private."""

    gradients: list[Tensor]
    norms_B: Tensor
    losses_B: Tensor


def clipped_gradient_sum(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    loss: PerExampleLoss,
    *,
    clip_norm: float,
    engine: Literal["auto"] | Engine = "auto",
    max_records: int | None = None,
) -> ClippedSum:
    """The sum over records of min(1, clip_norm / norm) times the gradient of the record's loss; zeros for no record.

    ``loss(outputs, targets)`` gives one value per record, shape (B,). ``max_records`` bounds how many records are in
    memory at once; the sum does not depend on it. The model should be in the mode that training wants.

    ValueError for a layer that mixes records, for a gradient that is not finite, and where ``book_keeping`` is asked of
    a model that it does not cover.
    """
    if not clip_norm > 0:
        raise ValueError(f"Expected clip_norm > 0, got {clip_norm}.")
    refuse_mixing_layers(model)
    chosen = choose_engine(model) if engine == "auto" else engine
    parts_of = _book_keeping if chosen == "book_keeping" else _functional
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    norms, losses = [torch.zeros(0, device=x.device)], [torch.zeros(0, device=x.device)]
    size = max_records or max(1, len(x))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        sums, norms_B, losses_B = parts_of(model, x[rows], targets[rows], loss, clip_norm)
        torch._foreach_add_(total, sums)
        norms.append(norms_B)
        losses.append(losses_B)
    return ClippedSum(gradients=total, norms_B=torch.cat(norms), losses_B=torch.cat(losses))


def choose_engine(model: nn.Module) -> Engine:
    """``book_keeping`` where every parameter belongs to one layer that has a closed form, else ``functional``."""
    return "functional" if _uncovered(model) else "book_keeping"


def refuse_mixing_layers(model: nn.Module) -> None:
    """ValueError that names the first layer whose output for one record depends on the others."""
    mixing = [(name, module) for name, module in model.named_modules() if isinstance(module, _MIXES_RECORDS)]
    if mixing:
        name, module = mixing[0]
        raise ValueError(
            f"Layer {name} ({type(module).__name__}) mixes the records of a batch, so no record has a gradient of its "
            "own; use GroupNorm or LayerNorm."
        )


def _uncovered(model: nn.Module) -> str | None:
    """The first trainable parameter without a closed form, or that two layers share."""
    seen: set[int] = set()
    for layer_name, module in model.named_modules():
        for name, parameter in module.named_parameters(layer_name, recurse=False):
            if parameter.requires_grad and (not supports(module) or id(parameter) in seen):
                return str(name)
            seen.add(id(parameter))
    return None


def _clip_factors(squared_norms_B: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    norms_B = squared_norms_B.sqrt()
    if not torch.isfinite(norms_B).all():
        raise ValueError("The gradient of a record is not finite; lower the learning rate or scale the features.")
    return norms_B, clip_norm / norms_B.clamp(min=clip_norm)


def _book_keeping(
    model: nn.Module, x: Tensor, targets: Tensor, loss: PerExampleLoss, clip_norm: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    if (name := _uncovered(model)) is not None:
        raise ValueError(f"Parameter {name} has no closed form for its norm; use engine `functional`.")
    calls = _LayerCalls(model)
    with calls:
        losses_B = loss(model(x), targets)
    _check_losses(losses_B, len(x))
    output_gradients = torch.autograd.grad(losses_B.sum(), [output for _, _, output in calls.made])
    with torch.no_grad():
        layers: list[LayerGradient] = []
        for (layer, layer_input, _), output_gradient in zip(calls.made, output_gradients, strict=True):
            if len(layer_input) != len(x):
                raise ValueError(
                    f"{type(layer).__name__} reads {len(layer_input)} rows for {len(x)} records: records must stay "
                    "along the first axis; use engine `functional`."
                )
            layers.append(layer_gradient(layer, layer_input, output_gradient))
        squared_norms_B = torch.stack([layer.squared_norms() for layer in layers]).sum(dim=0)
        norms_B, factors_B = _clip_factors(squared_norms_B, clip_norm)
        sums = {id(p): value for layer in layers for p, value in layer.weighted_sums(factors_B)}
    # A layer that the loss does not reach made no call and has gradient 0.
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [sums.get(id(p), torch.zeros_like(p)) for p in trainable], norms_B, losses_B.detach()


class _LayerCalls:
    """Keeps the input and the output of every trainable layer that runs inside the block."""

    def __init__(self, model: nn.Module) -> None:
        self.made: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        self._handles = [layer.register_forward_hook(self._keep) for layer in self._layers]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if any(layer is known for known, _, _ in self.made):
            raise ValueError(f"{type(layer).__name__} runs twice for one record; use engine `functional`.")
        self.made.append((layer, inputs[0].detach(), output))


def _functional(
    model: nn.Module, x: Tensor, targets: Tensor, loss: PerExampleLoss, clip_norm: float
) -> tuple[list[Tensor], Tensor, Tensor]:
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad} | dict(
        model.named_buffers()
    )

    def record_loss(parameters: dict[str, Tensor], record: Tensor, target: Tensor) -> Tensor:
        output = functional_call(model, parameters | fixed, (record[None],))
        return loss(output, target[None])[0]

    per_record = vmap(grad_and_value(record_loss), in_dims=(None, 0, 0), randomness="different")
    gradients, losses_B = per_record(trainable, x, targets)
    flat = [gradient.flatten(1) for gradient in gradients.values()]
    squared_norms_B = torch.stack([values.square().sum(dim=1) for values in flat]).sum(dim=0)
    norms_B, factors_B = _clip_factors(squared_norms_B, clip_norm)
    sums = [(factors_B @ values).reshape(p.shape) for values, p in zip(flat, trainable.values(), strict=True)]
    return sums, norms_B, losses_B


def _check_losses(losses_B: Tensor, num_records: int) -> None:
    if losses_B.shape != (num_records,):
        raise ValueError(f"Expected one loss per record, shape ({num_records},), got {tuple(losses_B.shape)}.")


def per_example_norms(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norms over all parameters together of stacked per-example gradients, each (B, ...)."""
    return torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).sqrt()
