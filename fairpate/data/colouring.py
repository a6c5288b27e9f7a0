"""Painting digits red or green, as in ColorMNIST (Arjovsky et al. 2019, arXiv:1907.02893, section 5).

A noisy binary label and a colour that is correlated with it turn a digit data set into one with a demographic group.
Both draws are keyed hashes of the record's name: the same record has the same colour whatever stands around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fairpate.data.entry import Option
from fairpate.data.identity import keyed_uniform

LABEL_FLIP = 0.25
FIRST_HIGH_DIGIT = 5
GROUPS = {"colour": ("red", "green"), "label": ("low digit", "high digit")}
SENSITIVE = Option(
    default="colour",
    allowed=("colour", "label"),
    description="The group z: the drawn colour, or the noisy binary label behind it.",
)
COLOUR_AS_FEATURE = Option(
    default=True,
    allowed=(True, False),
    description="Whether the image shows its colour; else it has one channel, and a model cannot learn from colour.",
    shows_attribute=True,  # the noisy label too: the colour is that label under public flips
)
Codes = npt.NDArray[np.int64]


def noisy_binary_label(digits: npt.ArrayLike, names: Sequence[str], *, seed: int) -> Codes:
    """1 for a digit of 5 or more, else 0; flipped with probability 0.25."""
    high = np.asarray(digits) >= FIRST_HIGH_DIGIT
    return (high ^ (keyed_uniform(names, seed=seed, purpose="label flip") < LABEL_FLIP)).astype(np.int64)


def colour_flips(names: Sequence[str], probability: npt.NDArray[np.float64], *, seed: int) -> Codes:
    """1 where the colour differs from the noisy binary label, each with its own ``probability``."""
    return (keyed_uniform(names, seed=seed, purpose="colour flip") < probability).astype(np.int64)


def paint(grey: npt.NDArray[np.uint8], colour: Codes, *, visible: bool = True) -> npt.NDArray[np.uint8]:
    """(N, height, width) ink into channel 0 (red) or 1 (green): (N, 2, height, width).

    Where colour is not ``visible`` the ink has one channel: (N, 1, height, width).
    """
    if not visible:
        return grey[:, None].copy()
    painted = np.zeros((len(grey), 2, *grey.shape[1:]), dtype=np.uint8)
    painted[np.arange(len(grey)), colour] = grey
    return painted
