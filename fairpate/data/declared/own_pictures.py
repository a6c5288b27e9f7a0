"""Pictures of a declared data set: a column of paths, or a folder of folders, which is read as a table of its pictures.

Decoded and kept as those of publishers are (:mod:`fairpate.data.images`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field

from fairpate.config import Section
from fairpate.data.declared.faults import Faults
from fairpate.data.entry import DataError
from fairpate.data.images import PICTURE_SUFFIXES, Pictures, decode
from fairpate.data.mapped import Pixels
from fairpate.named_code import PLACE

PATH, NAME, LEVEL = "path", "name", "level_"


def _as_number(value: Any) -> Any:
    return int(value) if value in ("1", "3") else value


class PicturesConfig(Section):
    """Where pictures lie, and what a model sees of them."""

    column: str = Field(PATH, description="Holds the path of each picture, below the data folder.")
    size: int = Field(64, ge=8, le=512, description="Height and width in pixels: the centre square is resized.")
    channels: Annotated[Literal[1, 3], BeforeValidator(_as_number)] = Field(3, description="3: colour; 1: grey.")
    features: str = Field(
        "pixels",
        pattern=rf"^(pixels|oriented_gradients|{PLACE.pattern})$",
        description="Default of the option `features`: the picture, `oriented_gradients`, which are 900 histogram "
        "values of its edges, or `module:function` of a picture to a vector, code that runs with `--allow-code` only.",
    )


def folder_table(folder: Path, below: Path) -> pa.Table:
    """A row per picture in ``folder``: `path` from ``below``, its `name`, and the folders between as `level_1`, ..."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
    levels = [path.relative_to(folder).parts[:-1] for path in files]
    if not files or len({len(each) for each in levels}) != 1:
        raise DataError(
            f"{folder}: expected pictures ({', '.join(PICTURE_SUFFIXES)}) at one depth, got {len(files)} at "
            f"{len({len(each) for each in levels})}; lay them as CLASS/GROUP/PICTURE."
        )
    columns = {PATH: [path.relative_to(below).as_posix() for path in files], NAME: [path.name for path in files]}
    for place, values in enumerate(zip(*levels, strict=True), start=1):
        columns[f"{LEVEL}{place}"] = list(values)
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def check_paths(paths: Sequence[str], folder: Path, file: str, column: str, faults: Faults) -> None:
    """A fault for each path that is no file below ``folder``."""
    # A table's paths lead to no file outside the data folder either.
    wrong = [path for path in paths if {"..", "/"} & set(PurePosixPath(path).parts) or not (folder / path).is_file()]
    remedy = "correct the path, which begins in the data folder, or put the picture there"
    faults.add(file, column, expected="a picture", remedy=remedy, rows=len(wrong), values=dict.fromkeys(wrong))


def read_pictures(paths: Sequence[str], folder: Path, config: PicturesConfig) -> Pixels:
    """(N, channels, size, size) pixels of the pictures at ``paths``."""
    stats = ((path, (folder / path).stat()) for path in paths)
    told = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)

    def read(wanted: Sequence[str], keep: Callable[[str, bytes], None]) -> None:
        for path in wanted:
            keep(path, (folder / path).read_bytes())

    key = hashlib.sha256(told.encode()).hexdigest()
    pictures = Pictures(origin=folder, key=key, names=tuple(paths), read=read)
    return decode(pictures, paths, size=config.size, mode="RGB" if config.channels == 3 else "L")
