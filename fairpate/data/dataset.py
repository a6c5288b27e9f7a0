"""One data set in four splits: what every stage reads.

Tensors in memory, Parquet on disk. Images stay ``uint8`` and tabular features are already scaled by public
constants, so nothing here is fitted to private records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fairpate.data.embedding import Embedding
    from fairpate.data.feature_codes import FeatureCode

SPLIT_NAMES = ("private", "public", "validation", "test")
FeatureKind = Literal["image", "tabular"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """N records: features ``x`` (N, ...), labels ``y`` (N,), groups ``z`` (N,), and a stable ``record_id`` each.

    ``x`` is ``uint8`` (N, channels, height, width) for images and ``float32`` (N, features) for tables; ``y`` and
    ``z`` are ``int64``. Identifiers are unique within a data set and say nothing about ``z``. Records with one
    ``unit_id`` go to one teacher together: those that only ``z`` tells apart. Left empty, every record is a unit.
    """

    x: Tensor
    y: Tensor
    z: Tensor
    record_id: tuple[str, ...]
    unit_id: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.unit_id:
            object.__setattr__(self, "unit_id", self.record_id)
        sizes = {len(values) for values in (self.x, self.y, self.z, self.record_id, self.unit_id)}
        if len(sizes) != 1:
            raise ValueError(f"Expected x, y, z, record_id and unit_id of one length, got lengths {sorted(sizes)}.")

    def __len__(self) -> int:
        return len(self.record_id)

    def take(self, indices: Tensor | Sequence[int]) -> Split:
        """The records at ``indices``, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return self.take_with(self.x[index], index)

    def take_with(self, x: Tensor, index: Tensor) -> Split:
        """The records at ``index``, whose features the caller has taken: ``x``."""
        ids, units = (tuple(names[i] for i in index.tolist()) for names in (self.record_id, self.unit_id))
        return Split(x=x, y=self.y[index], z=self.z[index], record_id=ids, unit_id=units)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Private, public, validation and test records of one data set, and the public words for its codes.

    ``label_names[k]`` names class k and ``group_names[g]`` group g of the ``sensitive_attribute``. The labels of the
    public split are never read by a private method; they are kept for evaluation. ``notes`` are public remarks about
    the files, such as how many malformed names were left out. ``embedding``: what made the features, if anything did.
    ``feature_codes``: how a declared table's features (before an embedding) are computed from its columns.
    """

    name: str
    kind: FeatureKind
    private: Split
    public: Split
    validation: Split
    test: Split
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    feature_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    embedding: Embedding | None = None
    feature_codes: tuple[FeatureCode, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.label_names)

    @property
    def num_groups(self) -> int:
        """Number of groups G."""
        return len(self.group_names)

    @property
    def splits(self) -> dict[str, Split]:
        """The four splits by name."""
        return {name: getattr(self, name) for name in SPLIT_NAMES}
