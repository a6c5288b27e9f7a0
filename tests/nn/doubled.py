"""A layer that is a linear one by its class and parameters, and none by what it computes."""

from __future__ import annotations

from torch import Tensor, nn


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the parent's name
        return 2 * super().forward(input)
