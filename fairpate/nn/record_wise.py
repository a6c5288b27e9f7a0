"""Does a model treat every record by itself? By the layers it is made of, or by trying.

Clipping bounds what one record adds to a sum only if a record has a gradient of its own. The closed forms of
:mod:`fairpate.nn.layer_gradients` need more: every layer runs once, on its own weights, with records along the first
axis. A list of layers and containers whose code is known proves both. Any other model has to go through
``torch.func.vmap`` one record at a time, where no record can reach another; trying it out then finds what would still
train something else than was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fairpate.nn.layer_gradients import supports
from fairpate.nn.models import FrozenBatchNorm, ImageNetScale, OrientedGradients, ScaleBytes, seeded_torch

# By name: torchvision is not imported for a model that has none of it.
_CONTAINERS = frozenset(
    {
        "torch.nn.modules.container.Sequential",
        "torchvision.models.resnet.ResNet",
        "torchvision.models.resnet.BasicBlock",
        "torchvision.models.resnet.Bottleneck",
        "torchvision.models.densenet.DenseNet",
        "torchvision.models.densenet._DenseBlock",
        "torchvision.models.densenet._DenseLayer",
        "torchvision.models.densenet._Transition",
    }
)
_WITHOUT_PARAMETERS: frozenset[type[nn.Module]] = frozenset(
    {
        ScaleBytes,
        ImageNetScale,
        OrientedGradients,
        FrozenBatchNorm,
        nn.Identity,
        nn.Dropout,
        nn.ReLU,
        nn.ELU,
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.Softplus,
        nn.LeakyReLU,
        nn.MaxPool2d,
        nn.AvgPool2d,
        nn.AdaptiveAvgPool2d,
    }
)
_NUM_TRIED, _TOLERANCE = 3, 1e-3
Gradients = Callable[[nn.Module, Tensor, Tensor], list[Tensor]]


def unknown_module(model: nn.Module) -> str | None:
    """The first module, by name and type, that keeps a model from the closed forms; None if there is none.

    That is one whose code is not on the list, one that was altered (a hook, a method of its own, a foreign parameter),
    or a layer or parameter in training that stands in the model twice.
    """
    seen: set[int] = set()
    # A module that stands in the model twice has to be met twice.
    for name, module in model.named_modules(remove_duplicate=False):
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not _is_known(module) or any(id(p) in seen for p in own):
            return _described(name, module)
        # A parameter with two places has a sum of gradients, of which no single place has the norm.
        seen.update(map(id, own))
    return None


def refuse_statistics(model: nn.Module) -> None:
    """ValueError for a layer that computes with statistics of a batch, or keeps some of all records it has seen."""
    for name, module in model.named_modules():
        keeps = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
        if keeps or isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{_described(name, module)} mixes the records of a batch: it normalises by their statistics, or keeps "
                "them, so no record has a gradient of its own; use GroupNorm or LayerNorm."
            )


def try_records_apart(model: nn.Module, gradients: Gradients, x: Tensor) -> None:
    """ValueError where a model trains on more than the record it is given; a few passes, and the model stays as it is.

    ``gradients(model, x, weights)`` are those of the outputs times ``weights``, summed, of every record of ``x`` by the
    engine that is to be used: one (B, ...) per trainable parameter. Made-up records are tried where ``x`` holds floats
    or bytes, else its first ones. Dropout is left out.
    """
    tried = _made_up(x) if not _is_index(x) else x[:_NUM_TRIED]
    if not len(tried):
        return
    with _without_dropout(model):
        with _unchanged(model):
            together = _outputs(model, tried)
            alone = [_outputs(model, record[None]) for record in tried]
            # Random numbers of a layer's own, and what it keeps without a buffer, show at a second call alone.
            again = _outputs(model, tried)
        if not _are_close(together[-1][1], _joined(alone), len(tried)) or not _are_close(
            again[-1][1], together[-1][1], len(tried)
        ):
            raise ValueError(
                f"{_where_they_part(together, alone)} gives a record another output beside other records, or at "
                "another call: it mixes records, so no record has a gradient of its own. Normalise within a record, "
                "keep records along the first axis, and draw random numbers by nn.Dropout alone."
            )
        _refuse_other_gradients(model, gradients, tried)


def _is_known(module: nn.Module) -> bool:
    is_altered = has_hooks(module) or "forward" in vars(module)
    if is_altered or not {name for name, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}:
        return False
    if type(module) is nn.Flatten:
        # From axis 0 on it would join the records into one.
        return module.start_dim >= 1
    if type(module) is nn.Unflatten:
        return isinstance(module.dim, int) and module.dim >= 1
    if f"{type(module).__module__}.{type(module).__qualname__}" in _CONTAINERS:
        return not any(True for _ in module.parameters(recurse=False))
    trains = any(p.requires_grad for p in module.parameters(recurse=False))
    if type(module) is nn.LayerNorm and not trains:
        return len(module.normalized_shape) == 1  # more axes could be the records', and only training layers are asked
    return type(module) in _WITHOUT_PARAMETERS or supports(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether something is called around the module's passes."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _described(name: str, module: nn.Module) -> str:
    return f"Module {name or 'of the model itself'} ({type(module).__name__})"


def _is_index(x: Tensor) -> bool:
    return not x.is_floating_point() and x.dtype != torch.uint8


def _made_up(x: Tensor) -> Tensor:
    # A generator of its own: a trial moves no stream of the training.
    drawn = torch.rand(_NUM_TRIED, *x.shape[1:], generator=torch.Generator().manual_seed(0))
    return (drawn * 255).to(x) if x.dtype == torch.uint8 else drawn.to(x)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    dropout = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for module in dropout:
        module.eval()
    try:
        yield
    finally:
        for module in dropout:
            module.train()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """ValueError if the passes inside the block change a parameter or a buffer, which then has its values again."""
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    before = {name: value.detach().clone() for name, value in values.items()}
    changed: list[str] = []
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in values.items():
                # NaN does not equal itself, and one that stayed is no change.
                if not torch.equal(value.nan_to_num(), before[name].nan_to_num()):
                    changed.append(name)
                    value.copy_(before[name])
    if changed:
        raise ValueError(
            f"The forward pass changes {changed[0]}, so that records reach the model unclipped and without noise; use "
            "layers that keep nothing of what they see."
        )


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> list[tuple[str, Any]]:
    """What every module says, in the order of calls: the model itself comes last."""
    said: list[tuple[str, Any]] = []

    def keep(name: str) -> Callable[..., None]:
        return lambda module, _, output: said.append((_described(name, module), _copied(output)))

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return said


def _copied(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output


def _joined(alone: list[list[tuple[str, Any]]]) -> Tensor:
    return torch.cat([said[-1][1] for said in alone])


def _are_close(left: Tensor, right: Tensor, count: int) -> bool:
    """Equal up to what kernels for other shapes round differently, with ``count`` rows."""
    if left.shape != right.shape or len(left) != count:
        return False
    scale = float(torch.nan_to_num(right.double()).abs().max()) if right.numel() else 0.0
    return torch.allclose(left.double(), right.double(), rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _where_they_part(together: list[tuple[str, Any]], alone: list[list[tuple[str, Any]]]) -> str:
    """The first module, in the order of calls, whose outputs differ; the model where none is found."""
    count = len(alone)
    for position, (name, output) in enumerate(together):
        parts = [said[position][1] for said in alone if len(said) > position]
        if not isinstance(output, Tensor) or not all(isinstance(part, Tensor) and len(part) == 1 for part in parts):
            continue
        if len(parts) == count and len(output) == count and not _are_close(output, torch.cat(parts), count):
            return name
    return together[-1][0]


def _refuse_other_gradients(model: nn.Module, gradients: Gradients, x: Tensor) -> None:
    """A parameter that the engine does not see everywhere (in a list, in a closure) has another gradient there."""
    with torch.enable_grad(), seeded_torch(0):
        outputs = model(x)
        weights = torch.randn(outputs.shape, dtype=outputs.dtype).to(outputs.device)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        expected = torch.autograd.grad(
            (outputs * weights).sum(), [p for _, p in named], allow_unused=True, materialize_grads=True
        )
    found = [values.sum(dim=0) for values in gradients(model, x, weights)]
    for (name, _), theirs, ours in zip(named, expected, found, strict=True):
        if not _are_close(ours[None], theirs[None], 1):
            raise ValueError(
                f"Parameter {name} has another gradient record by record than by autograd: the model reads it from "
                "another place than its module. Read it from there."
            )
