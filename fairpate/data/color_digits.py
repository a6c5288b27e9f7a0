"""Colour digits: scikit-learn's handwritten digits, drawn in red or green. Needs no file.

The construction is ColorMNIST's (Arjovsky et al. 2019, arXiv:1907.02893, section 5) on 8 x 8 images: a binary label
says whether the digit is 5 or more, flipped with probability 0.25; the colour is that label flipped with probability
0.1. Green is then 0.7 likely for a high digit and 0.3 for a low one, so even a perfect classifier of the digit shows a
demographic-parity gap of about 0.08. Every flip is a keyed hash of the record's name.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from fairpate.data.colouring import COLOUR_AS_FEATURE, GROUPS, SENSITIVE, colour_flips, noisy_binary_label, paint
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Records, Request
from fairpate.later import torch

COLOUR_FLIP = 0.1
INK_LEVELS = 16


def load(request: Request) -> Records:
    """All 1,797 digits as (2, 8, 8) images."""
    grey, digits = _published()
    ids = tuple(f"digit-{index:04d}" for index in range(len(digits)))
    binary = noisy_binary_label(digits, ids, seed=request.seed)
    colour = binary ^ colour_flips(ids, np.full(len(ids), COLOUR_FLIP), seed=request.seed)
    sensitive = request.options["sensitive"]
    return Records(
        kind="image",
        records=Split(
            x=torch.from_numpy(paint(grey, colour, visible=request.options["colour_as_feature"])),
            y=torch.from_numpy(digits.copy()),
            z=torch.from_numpy(colour if sensitive == "colour" else binary),
            record_id=ids,
        ),
        label_names=tuple(str(digit) for digit in range(10)),
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive,
    )


@cache
def _published() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Ink (1797, 8, 8) and digits, read once a process; only to be copied."""
    from sklearn.datasets import load_digits  # costs a second, and no other loader needs it

    published = load_digits()
    return np.rint(published.images * (255 / INK_LEVELS)).astype(np.uint8), published.target.astype(np.int64)


ENTRY = DatasetEntry(
    name="color_digits",
    task="digit of a red or green image of 8 x 8 pixels",
    sensitive="colour or noisy binary label",
    publisher="scikit-learn, from UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak)",
    address="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    licence="CC BY 4.0",
    rows=1797,
    kind="image",
    load=load,
    options={"sensitive": SENSITIVE, "colour_as_feature": COLOUR_AS_FEATURE},
    num_public=300,
    num_validation=97,
    num_test=200,
)
