"""Pictures as a table of their oriented gradients (:mod:`fairpate.oriented_gradients`): an option of data sets."""

from __future__ import annotations

from dataclasses import replace

from fairpate.data.entry import Option, Records
from fairpate.oriented_gradients import NUM_CELLS as NUM_CELLS
from fairpate.oriented_gradients import NUM_DIRECTIONS as NUM_DIRECTIONS
from fairpate.oriented_gradients import oriented_gradients as oriented_gradients

FEATURES = Option(
    default="pixels",
    allowed=("pixels", "oriented_gradients"),
    description="What a model sees: the picture, or 900 histogram values of its edges as a table.",
)


def with_features(records: Records, features: str) -> Records:
    """Records of pictures as they are (``pixels``), or as a table of ``oriented_gradients``."""
    if features == "pixels":
        return records
    x = oriented_gradients(records.records.x)
    return replace(
        records, kind="tabular", records=replace(records.records, x=x), feature_names=feature_names(), pixels=None
    )


def feature_names() -> tuple[str, ...]:
    """A name per column of :func:`oriented_gradients`."""
    directions, cells = range(NUM_DIRECTIONS), range(NUM_CELLS)
    return tuple(
        f"direction {180 * d // NUM_DIRECTIONS}, row {i}, column {j}" for d in directions for i in cells for j in cells
    )
