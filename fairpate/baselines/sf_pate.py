"""What SF-PATE adds to PATE: teachers that read the sensitive attribute alone (Tran, Zhu, Fioretto and Van Hentenryck,
"SF-PATE: Scalable, Fair, and Private Aggregation of Teacher Ensembles").

Features x and labels y are public, attributes a are not. Changing one attribute changes one teacher's shard, and so one
vote on every query: a label costs what it costs PATE, for a smaller unit. Queries may therefore be training records.

    SF_S   teachers predict a from (x, y); a fair student, F-LD, learns from (x, y, released a)
    SF_T   each teacher is a fair classifier, F-LD, on its shard; a student learns from released y

Deviations from the paper: its noise, number of teachers and the term that ties SF_T's student to the votes are not
taken over; labels come from the Confident-GNMax aggregator at a price that holds for any votes, where the paper's
depends on them and could not be published.

Shapes: N records, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.types import Relation, Unit


@dataclass(frozen=True, kw_only=True)
class AttributeQueries(ConfidentGnmaxQueries):
    """Confident-GNMax queries where only the teachers' sensitive attributes are hidden; priced as the parent."""

    unit: ClassVar[Unit] = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"


def with_labels(x: Tensor, labels_N: Tensor, num_classes: int) -> Tensor:
    """Features from which an attribute is predicted: one more column per label, or one more channel that is its shade.

    ``x``: a table (N, F) of floats or images (N, channels, height, width) of bytes.
    """
    if x.ndim == 2:
        return torch.cat([x, functional.one_hot(labels_N, num_classes).to(x.dtype)], dim=1)
    shade_N = (labels_N * 255 // max(num_classes - 1, 1)).to(x.dtype)
    return torch.cat([x, shade_N[:, None, None, None].expand(-1, 1, *x.shape[2:])], dim=1)
