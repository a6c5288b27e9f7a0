"""One data set in four splits: what every stage reads.

Tensors in memory, Parquet on disk. Images stay ``uint8`` and tabular features are already scaled by public
constants, so nothing here is fitted to private records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fairpate.data.record_names import as_names
from fairpate.data.spill import run_of
from fairpate.later import torch
from fairpate.types import Unit

if TYPE_CHECKING:
    from torch import Tensor

    from fairpate.config import DataConfig
    from fairpate.data.declared.feature_codes import FeatureCode
    from fairpate.data.embedding import Embedding

SPLIT_NAMES = ("private", "public", "validation", "test")
NAMED_BY = ("record_id", "unit_id", "person_id")
FeatureKind = Literal["image", "tabular"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """N records: features ``x`` (N, ...), labels ``y`` (N,), groups ``z`` (N,), and a stable ``record_id`` each.

    ``x`` is ``uint8`` (N, channels, height, width) for images and ``float32`` (N, features) for tables; ``y`` and
    ``z`` are ``int64``. Identifiers are unique within a data set and say nothing about ``z``. Records with one
    ``unit_id`` go to one teacher together: those that only ``z`` tells apart. Left empty, every record is a unit.
    ``person_id`` names the person behind each record, where all of a person's records are protected together; empty:
    each record is protected by itself. Identifiers are kept packed (:class:`fairpate.data.record_names.Names`).
    """

    x: Tensor
    y: Tensor
    z: Tensor
    record_id: Sequence[str]
    unit_id: Sequence[str] = ()
    person_id: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in NAMED_BY:
            object.__setattr__(self, name, as_names(getattr(self, name)))
        if not self.unit_id:
            object.__setattr__(self, "unit_id", self.record_id)
        names = (self.record_id, self.unit_id, self.person_id or self.record_id)
        sizes = {*map(len, (self.x, self.y, self.z)), *map(len, names)}
        if len(sizes) != 1:
            raise ValueError(f"Expected x, y, z and identifiers of one length, got lengths {sorted(sizes)}.")
        if missing := as_names(self.person_id).num_empty:
            raise ValueError(f"Expected a person_id for every record or for none, got {missing} without.")

    def __len__(self) -> int:
        return len(self.record_id)

    @property
    def together(self) -> Sequence[str]:
        """Of each record what goes to one teacher together: its person, or its unit where persons do not count."""
        return self.person_id or self.unit_id

    @property
    def num_protected(self) -> int:
        """How many are protected: persons, or records where persons do not count."""
        return as_names(self.person_id).num_distinct if self.person_id else len(self)

    @property
    def person_N(self) -> Tensor | None:
        """A number from 0 on for each record's person, in order of appearance; None where persons do not count."""
        if not self.person_id:
            return None
        return torch.from_numpy(as_names(self.person_id).numbered())

    def take(self, indices: Tensor | Sequence[int]) -> Split:
        """The records at ``indices``, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return self.take_with(self.x[index], index)

    def take_with(self, x: Tensor, index: Tensor) -> Split:
        """The records at ``index``, whose features the caller has taken: ``x``; views of the rest where it is a run."""
        rows = index.numpy()
        taken = index if (run := run_of(rows)) is None else run
        names = {name: as_names(values).take(rows) for name in NAMED_BY if (values := getattr(self, name))}
        # One sequence stands for both, so that no name is kept twice.
        if self.unit_id is self.record_id:
            names.pop("unit_id", None)
        return Split(x=x, y=self.y[taken], z=self.z[taken], **({"record_id": ()} | names))


@dataclass(frozen=True, kw_only=True)
class BeforeEmbedding:
    """What an embedding took: public ``examples`` (N, ...), and the names of a table's features."""

    examples: Tensor
    feature_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Private, public, validation and test records of one data set, and the public words for its codes.

    ``label_names[k]`` names class k and ``group_names[g]`` group g of the ``sensitive_attribute``. The labels of the
    public split are never read by a private method; they are kept for evaluation. ``notes`` are public remarks about
    the files, such as how many malformed names were left out. ``embedding``: what made the features, if anything did;
    ``before_embedding``: a few public records as they were before it, and the names of their features.
    ``feature_codes``: how a declared table's features (before an embedding) are computed from its columns.
    ``records_alone``: the source names persons, and each record is protected by itself all the same. ``source``: what
    gives the same data set again, on any machine that has its files; null where it came from Python.
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
    before_embedding: BeforeEmbedding | None = None
    feature_codes: tuple[FeatureCode, ...] = ()
    records_alone: bool = False
    source: DataConfig | None = None

    @property
    def unit(self) -> Unit:
        """What is protected as a whole: a ``person`` where private records say whose they are, else a ``record``."""
        return "person" if self.private.person_id else "record"

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
