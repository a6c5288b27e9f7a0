"""A uniform mixture of classifiers: what a prediction is when one of several is drawn for each record.

Nothing is drawn here. The outputs are the logarithms of the probabilities with which each label is predicted, so that
the usual softmax gives these back and rates can be taken by expectation.

Shapes: R members, N records, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_probabilities

LINEAR = ModelConfig(name="logistic")


class Mixture(nn.Module):
    """``members`` map records to logits (N, C); each votes for its most likely label."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise ValueError("Expected at least one member to draw, got none.")
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """log P[label], shape (N, C); ``-inf`` where no member predicts it."""
        total: Tensor | None = None
        for member in self.members:
            logits = member(x)
            votes = functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(logits.dtype)
            total = votes if total is None else total + votes
        assert total is not None
        return (total / len(self.members)).log()


def said_labels(model: nn.Module, x: Tensor) -> npt.NDArray[np.float32]:
    """How often ``model`` says each label, shape (N, C): 0 or 1 unless it is a :class:`Mixture`."""
    probabilities: npt.NDArray[np.float32] = predict_probabilities(model, x).numpy()
    if isinstance(model, Mixture):
        return probabilities
    said: npt.NDArray[np.float32] = np.eye(probabilities.shape[1], dtype=np.float32)[probabilities.argmax(axis=1)]
    return said


def draw_labels(
    probabilities_NC: npt.NDArray[np.floating[Any]], uniforms_N: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """One label per record, from numbers uniform on [0, 1); the last class takes what rounding leaves of the mass."""
    passed_NC = uniforms_N[:, None] >= probabilities_NC.cumsum(axis=1)[:, :-1]
    drawn: npt.NDArray[np.int64] = passed_NC.sum(axis=1)
    return drawn


def linear_rules(coefficients_RD: npt.ArrayLike, *, input_shape: tuple[int, ...]) -> Mixture:
    """The mixture of R rules that predict 1 where (x, 1) . c_r > 0; the constant's coefficient comes last.

    Members are ``logistic`` models of records of ``input_shape``. ValueError for coefficients of another length.
    """
    members = []
    for row in torch.from_numpy(np.asarray(coefficients_RD, dtype=np.float32)):
        model = build_model(LINEAR, input_shape=input_shape, num_classes=2, generator_seed=0)
        set_rule(model, row)
        members.append(model)
    return Mixture(members).eval()


def set_rule(model: nn.Module, row: Tensor) -> None:
    """Make a ``logistic`` model predict 1 where (x, 1) . ``row`` > 0, the log-odds of 1. ValueError as above."""
    layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
    if len(row) != layer.in_features + 1:
        raise ValueError(f"Expected {layer.in_features + 1} coefficients per rule, got {len(row)}.")
    with torch.no_grad():
        # Class 0 scores 0 and argmax takes the first of equals, so that a tie is 0, as "> 0" says.
        layer.weight.copy_(torch.stack([torch.zeros_like(row[:-1]), row[:-1]]))
        layer.bias.copy_(torch.stack([torch.zeros_like(row[-1]), row[-1]]))
