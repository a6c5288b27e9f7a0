"""What methods that protect the sensitive attribute alone must not be given: features that show it.

To them features are public, so an attribute among the features is published by whatever is learned from these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def require_unseen(x: Tensor, groups: Tensor, *, method: str) -> None:
    """ValueError where a column of a table ``x`` (N, F) is a function of ``groups`` (N,), such as an encoding of it.

    Such a column takes one value in every group, and not the same in all. Pictures are not searched.
    """
    if x.ndim != 2 or not len(x):
        return
    members = [x[groups == group] for group in torch.unique(groups)]
    low, high = (torch.stack([extreme(part, dim=0) for part in members]) for extreme in (torch.amin, torch.amax))
    # Any code of the group, whatever its values; a column that is the same for all shows nothing.
    shown = (low == high).all(dim=0) & (low != low[0]).any(dim=0)
    if shown.any():
        columns = ", ".join(str(column) for column in shown.nonzero().flatten().tolist())
        raise ValueError(
            f"{method} protects sensitive_features alone, and features count as public: expected none that "
            f"sensitive_features determine, got column(s) {columns} of X; leave them out, or choose a method that "
            "protects whole records."
        )
