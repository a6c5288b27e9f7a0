"""Adam and SGD on torch's functional kernels, as the fit loop needs them.

The same arithmetic as ``torch.optim`` without its per-step bookkeeping and without the compiler it imports when an
optimiser is constructed, which costs every short-lived worker process seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fairpate.config import FitConfig

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


def epoch_learning_rate(config: FitConfig, epoch: int) -> float:
    """The learning rate of ``epoch`` (from 0): constant, or a half cosine from the full rate towards 0."""
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


class Optimizer:
    """Updates ``parameters`` in place; weight decay is added to the gradient.

    A gradient must have the memory layout of its parameter, as ``backward`` leaves it: the kernels walk memory.
    """

    def __init__(self, parameters: Iterable[Tensor], config: FitConfig):
        self._parameters = list(parameters)
        self._config = config
        self._first_moments = [torch.zeros_like(p) for p in self._parameters]  # of SGD, its momentum
        self._second_moments = [torch.zeros_like(p) for p in self._parameters] if config.optimizer == "adam" else []
        device = self._parameters[0].device if self._parameters else None
        # A count per parameter: of stacked teachers some make fewer steps.
        self._steps = torch.zeros(len(self._parameters), device=device)
        self._step_counts = list(self._steps.unbind())

    @torch.no_grad()
    def step(self, gradients: list[Tensor], learning_rate: float, *, only: Sequence[int] | None = None) -> None:
        """One update of all parameters, or of those at the positions ``only``, and their state; one gradient each."""
        update = self._adam if self._config.optimizer == "adam" else self._sgd
        if self._parameters and (only is None or only):
            update(gradients, learning_rate, only)

    def step_from_backward(self, learning_rate: float) -> None:
        """One update from what ``backward`` left in the parameters, which is then cleared; none counts as 0."""
        self.step([p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters], learning_rate)
        for parameter in self._parameters:
            parameter.grad = None

    def _adam(self, gradients: list[Tensor], learning_rate: float, only: Sequence[int] | None) -> None:
        if only is None:
            self._steps += 1
        else:
            self._steps[list(only)] += 1
        torch._fused_adam_(
            _at(self._parameters, only),
            gradients,
            _at(self._first_moments, only),
            _at(self._second_moments, only),
            [],
            _at(self._step_counts, only),
            amsgrad=False,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            lr=learning_rate,
            weight_decay=self._config.weight_decay,
            eps=ADAM_EPSILON,
            maximize=False,
        )

    def _sgd(self, gradients: list[Tensor], learning_rate: float, only: Sequence[int] | None) -> None:
        sgd(
            _at(self._parameters, only),
            gradients,
            list(_at(self._first_moments, only)),
            fused=True,
            weight_decay=self._config.weight_decay,
            momentum=self._config.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def _at(values: list[Tensor], only: Sequence[int] | None) -> list[Tensor]:
    return values if only is None else [values[position] for position in only]
