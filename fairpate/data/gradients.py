"""Pictures as a table: of oriented gradients (:mod:`fairpate.oriented_gradients`), or by a function of the user's.

An option of data sets. A declaration may name a function, ``module:function``, of one picture (channels, height,
width), bytes, to a vector of finite numbers. It is to be public, like bounds and categories. It sees one picture at a
time, so that no record's features depend on another's, and runs only where files may name code
(:mod:`fairpate.named_code`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fairpate.data.entry import DataError, DataSettingsError, Option, Records
from fairpate.later import torch
from fairpate.named_code import PLACE, REMEDY, may_run, named_object
from fairpate.oriented_gradients import NUM_CELLS as NUM_CELLS
from fairpate.oriented_gradients import NUM_DIRECTIONS as NUM_DIRECTIONS
from fairpate.oriented_gradients import oriented_gradients as oriented_gradients

if TYPE_CHECKING:
    from torch import Tensor

FEATURES = Option(
    default="pixels",
    allowed=("pixels", "oriented_gradients"),
    description="What a model sees: the picture, or 900 histogram values of its edges as a table.",
)


def with_features(records: Records, features: str) -> Records:
    """Pictures as they are (``pixels``), or as a table: of ``oriented_gradients``, or by ``module:function``."""
    if features == "pixels":
        return records
    if PLACE.fullmatch(features):
        x = _by_function(records.records.x, features)
        names = tuple(f"{features} {place}" for place in range(x.shape[1]))
    else:
        x, names = oriented_gradients(records.records.x), feature_names()
    return replace(records, kind="tabular", records=replace(records.records, x=x), feature_names=names, pixels=None)


def _by_function(pictures: Tensor, place: str) -> Tensor:
    """(N, F), ``float32``. DataSettingsError where the code may not run; DataError for what it raises or gives."""
    if not may_run(place):
        raise DataSettingsError(f"pictures.features: {place} is code that would run with your rights; {REMEDY}.")
    try:
        function = named_object(place)
        # One at a time and a copy, so that no picture meets another and none can be changed in place.
        rows = [torch.as_tensor(function(picture.clone()), dtype=torch.float32) for picture in pictures]
    except Exception as error:  # whatever the user's module raises
        raise DataError(f"pictures.features: {place} failed ({type(error).__name__}: {error}); correct it.") from error
    sizes = {tuple(row.shape) for row in rows}
    if len(sizes) != 1 or len(min(sizes)) != 1 or not all(bool(row.isfinite().all()) for row in rows):
        raise DataError(
            f"pictures.features: {place}: expected one vector of finite numbers per picture, all of one length, got "
            f"shapes {sorted(sizes)[:3]}; correct it."
        )
    return torch.stack(rows)


def feature_names() -> tuple[str, ...]:
    """A name per column of :func:`oriented_gradients`."""
    directions, cells = range(NUM_DIRECTIONS), range(NUM_CELLS)
    return tuple(
        f"direction {180 * d // NUM_DIRECTIONS}, row {i}, column {j}" for d in directions for i in cells for j in cells
    )
