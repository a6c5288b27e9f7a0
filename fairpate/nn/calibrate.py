"""Fairness calibration on public records: a trained model is fine-tuned towards demographic parity (FairPATE, D.1).

Public records and a released model are all that is read, so it costs no privacy. The paper shows its algorithm in a
figure only; here each step lowers ``weight * DPFR + anchor * CE``, where CE compares with what the model said before
the calibration. Training stops at the first epoch whose disparity on held-out public records is small enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import CalibrationConfig, FitConfig
from fairpate.nn.dpfr import dpfr, hard_disparity
from fairpate.nn.models import memory_format_for, scale_bytes, to_memory_format
from fairpate.nn.optimizer import Optimizer
from fairpate.nn.predict import predict_logits


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How many epochs ran, and the public hold-out's disparity before each of them and after the last."""

    num_epochs: int
    disparities: tuple[float, ...]


def calibrate(
    model: nn.Module, x: Tensor, groups: Tensor, config: CalibrationConfig, *, generator: torch.Generator
) -> Calibration:
    """Fine-tune ``model`` in place on public ``x`` (N, ...) of ``groups`` (N,); zero epochs change no bit of it.

    ValueError where the public records are too few to hold some out, or hold one group only.
    """
    held_out, rows = _divide(groups, config, generator)
    logits = predict_logits(model, x)
    optimizer = Optimizer(model.parameters(), FitConfig(optimizer="adam", learning_rate=config.learning_rate))
    disparities = [hard_disparity(logits[held_out], groups[held_out])]
    before_NC, memory_format = logits.softmax(dim=1), memory_format_for(x)
    to_memory_format(model, memory_format)
    while len(disparities) <= config.epochs and not disparities[-1] <= config.max_disparity:
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(config.batch_size):
            batch_logits = model(scale_bytes(x[batch]).contiguous(memory_format=memory_format))
            loss = config.weight * dpfr(batch_logits, groups[batch], config)
            # Towards what the model said before, not towards labels: public records have none.
            loss = loss + config.anchor * functional.cross_entropy(batch_logits, before_NC[batch])
            torch.autograd.backward(loss)
            optimizer.step_from_backward(config.learning_rate)
        disparities.append(hard_disparity(predict_logits(model, x[held_out]), groups[held_out]))
    return Calibration(num_epochs=len(disparities) - 1, disparities=tuple(disparities))


def _divide(groups: Tensor, config: CalibrationConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(groups), generator=generator)
    size = round(config.held_out * len(groups))
    for name, part in (("held-out", order[:size]), ("other", order[size:])):
        if len(groups[part].unique()) < 2:
            raise ValueError(
                f"The {name} public records of the calibration hold fewer than two groups ({len(part)} records); "
                "give more public records, or another held_out."
            )
    return order[:size], order[size:]
