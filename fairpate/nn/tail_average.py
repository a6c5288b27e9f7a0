"""The mean of the weights that the last steps of a training leave (Polyak and Juditsky 1992).

Where every step's weights are released, or could be, so is their mean: it costs no privacy. It takes out much of a
step's noise, and of the circling of a game between two players.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TailAverage:
    """The running mean of some parameters over the last ``share`` of ``num_steps`` steps; 0 keeps the last alone."""

    def __init__(self, parameters: Sequence[Tensor], *, num_steps: int, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"Expected a share of the steps from 0 to 1, got {share}.")
        self._parameters = list(parameters)
        self._to_skip = num_steps - round(share * num_steps)
        self._num_seen = 0
        self._means: list[Tensor] = []

    @torch.no_grad()
    def add(self) -> None:
        """Take in the parameters as a step left them."""
        self._num_seen += 1
        num_taken = self._num_seen - self._to_skip
        if num_taken == 1:
            self._means = [p.detach().clone() for p in self._parameters]
        elif num_taken > 1:
            # mean + (x - mean) / k, which needs no sum that grows.
            torch._foreach_lerp_(self._means, self._parameters, 1 / num_taken)

    @torch.no_grad()
    def settle(self) -> None:
        """Give the parameters their mean, where any step was taken in."""
        if self._means:
            torch._foreach_copy_(self._parameters, self._means)
