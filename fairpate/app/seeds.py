"""Independent seeds for the parts of a run that draw random numbers; never for private noise that protects anyone."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fairpate.later import torch


class Stream(IntEnum):
    """The parts. Their numbers stay, or old runs could not be made again."""

    STUDENT = 1
    BOOTSTRAP = 2
    ORDERS = 3
    MODEL = 10
    TRAINING = 11
    NOISE = 12
    PRETRAINING = 13
    LABELLING = 14
    CALIBRATION = 15
    HISTOGRAM_NOISE = 16
    PENALTY = 17
    PUBLIC_POOL = 18
    PREDICTION = 20
    POPULATION = 21
    THINNING = 22
    ORDER_OF_RECORDS = 23


def stream_seed(seed: int, stream: Stream) -> int:
    """The seed of one part of a run with ``seed``, below 2**63."""
    # Hashed together: by a sum, one part of this seed would draw the numbers of another part of the next.
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)


def torch_generator(seed: int, stream: Stream) -> torch.Generator:
    """A generator for one part."""
    return torch.Generator().manual_seed(stream_seed(seed, stream))
