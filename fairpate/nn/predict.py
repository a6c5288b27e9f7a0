"""Batched inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format

_MAX_RECORDS_AT_ONCE, _MAX_VALUES_AT_ONCE = 1024, 2**24


@torch.inference_mode()
def predict_logits(model: nn.Module, x: Tensor, *, batch_size: int | None = None) -> Tensor:
    """Logits (N, C) on the CPU for ``x`` (N, ...) of bytes or floats; the model is left in evaluation mode.

    Images run channels last, which makes convolutions 2 to 3 times as fast on a CPU. ``batch_size`` None takes 1,024
    records, or fewer where they are large.
    """
    if batch_size is None:
        batch_size = max(1, min(_MAX_RECORDS_AT_ONCE, _MAX_VALUES_AT_ONCE // max(1, x[:1].numel())))
    if batch_size < 1:
        raise ValueError(f"Expected batch_size >= 1, got {batch_size}.")
    memory_format = memory_format_for(x)
    device = next(model.parameters()).device
    to_memory_format(model.eval(), memory_format)
    batches = (b.to(device).contiguous(memory_format=memory_format) for b in torch.split(x, batch_size))
    return torch.cat([model(scale_bytes(batch)).cpu() for batch in batches])


def predict_probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """Softmax of :func:`predict_logits`, (N, C)."""
    return predict_logits(model, x).softmax(dim=1)
