"""Records of a batch that belong to owners, who are persons with several: parts of whole owners, shares, averages.

``owner_B`` says whose each record is, in numbers that ascend. Shapes: B records of a batch; P values of one parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def part_bounds(num_records: int, size: int, owner_B: Tensor | None = None) -> list[tuple[int, int]]:
    """First and last record but one of parts of at most ``size``, or of whole owners of about as many."""
    if owner_B is None or not num_records:
        return [(start, min(start + size, num_records)) for start in range(0, num_records, max(1, size))]
    # Owners ascend, so that one ends where the number changes.
    firsts = [0, *(torch.diff(owner_B).nonzero()[:, 0] + 1).tolist()]
    starts: list[int] = []
    for first, after in zip(firsts, [*firsts[1:], num_records], strict=True):
        # Never through an owner, whose average needs all of its records.
        if not starts or after - starts[-1] > size:
            starts.append(first)
    return list(zip(starts, [*starts[1:], num_records], strict=True))


def shares_of(owner_B: Tensor) -> Tensor:
    """One over the number of records of each record's owner, (B,) ``float32``."""
    _, owner_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
    share_B: Tensor = (1 / counts.float())[owner_B]
    return share_B


def averages(values_BP: Tensor, owner_B: Tensor) -> Tensor:
    """The average row of each owner, in their order."""
    _, owner_B, counts = torch.unique_consecutive(owner_B, return_inverse=True, return_counts=True)
    sums = values_BP.new_zeros(len(counts), values_BP.shape[1]).index_add_(0, owner_B, values_BP)
    return sums.div_(counts[:, None])
