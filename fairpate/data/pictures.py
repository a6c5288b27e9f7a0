"""Read and decode pictures, from a publisher's archive or from the user's own files.

The centre square of each picture is resized to one size and kept as uint8. Decoded pixels are kept under FAIRPATE_CACHE
(default ~/.cache/fairpate) in a file named by a hash of the archive, the names and the size, and mapped into memory
from there; a damaged file is noticed by its checksum and decoded again. It holds records, so its folder is readable by
its owner only. Pictures of a declared data set are listed in a column of paths, or are a folder of folders, which is
read as a table of its pictures.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from PIL import Image, UnidentifiedImageError
from pydantic import BeforeValidator, Field

from fairpate.config import PLACE, Section
from fairpate.data.dataset import DataError, Option, SourceFile, check_archive, locate
from fairpate.data.large_arrays import Append, PixelArray, Pixels, kept_pixels
from fairpate.data.tables import TableFaults
from fairpate.files import cache_dir
from fairpate.later import torch

CACHE_VERSION = 2  # raise it with any change that decodes the same archive to other pixels
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png")
IMAGE_SIZE = Option(default=64, allowed=(32, 48, 64, 96, 128, 224), description="Height and width in pixels.")
Mode = Literal["RGB", "L"]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Encoded pictures by name. ``key`` changes when any picture changes; ``read`` returns pictures in the requested
    order."""

    origin: Path
    key: str
    names: tuple[str, ...]
    read: Callable[[Sequence[str], Callable[[str, bytes], None]], None]


def open_pictures(archive: SourceFile, data_dir: Path | None) -> Pictures:
    """The pictures of the extracted folder if it exists, else of the ``archive``, checksum verified."""
    choice, path = locate(archive, data_dir)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_picture(file.name))
        return _of_files([file.relative_to(path).as_posix() for file in files], path)
    key = check_archive(choice, path)
    try:
        with zipfile.ZipFile(path) as opened:
            # Sorted, because the order inside an archive means nothing and may differ between copies.
            names = tuple(sorted(name for name in opened.namelist() if _is_picture(name)))
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: damaged archive ({error}); delete it and fetch it again.") from error

    def read(wanted: Sequence[str], keep: Callable[[str, bytes], None]) -> None:
        with zipfile.ZipFile(path) as opened:
            for name in wanted:
                keep(name, opened.read(name))

    return Pictures(origin=path, key=key, names=names, read=read)


def _of_files(names: Sequence[str], folder: Path) -> Pictures:
    # Keyed by paths, sizes and modification times: hashing every picture would cost as much as decoding it.
    stats = ((folder / name, (folder / name).stat()) for name in names)
    described = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)

    def read(wanted: Sequence[str], keep: Callable[[str, bytes], None]) -> None:
        for name in wanted:
            keep(name, (folder / name).read_bytes())

    return Pictures(origin=folder, key=hashlib.sha256(described.encode()).hexdigest(), names=tuple(names), read=read)


def decode(pictures: Pictures, names: Sequence[str], *, size: int, mode: Mode = "RGB") -> Pixels:
    """Pixels (N, channels, size, size) of ``names`` in that order, from the cache if it has them."""
    shape = (len(names), 3 if mode == "RGB" else 1, size, size)
    # All that decides the pixels is in the name, so that no file of the cache is ever out of date.
    recipe = "\n".join((str(CACHE_VERSION), pictures.key, mode, str(size), *names))
    path = cache_dir() / f"pictures-{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.arrow"

    def fill(append: Append) -> None:
        pictures.read(names, lambda name, content: append(_pixels(content, f"{pictures.origin}: {name}", size, mode)))

    kept = kept_pixels(path, shape, fill) if names else None
    if kept is not None:
        return Pixels(x=kept, file=path)
    decoded: list[PixelArray] = []
    fill(decoded.append)
    return Pixels(x=torch.from_numpy(np.array(decoded, dtype=np.uint8).reshape(shape)))


def base_name(name: str) -> str:
    """The last component of a picture's path."""
    return name.rpartition("/")[2]


def _is_picture(name: str) -> bool:
    # macOS adds a file of attributes, ._NAME, for each picture of an archive.
    return name.lower().endswith(PICTURE_SUFFIXES) and not base_name(name).startswith("._")


def _pixels(content: bytes, where: str, size: int, mode: Mode) -> PixelArray:
    """Pixels (channels, size, size) of the centre square of one encoded picture."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            image = picture.convert(mode)
    # A header of billions of pixels is refused too, before memory is asked for them.
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        why = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{where}: not a readable picture ({why}); restore the file, or leave it out.") from error
    if image.size != (size, size):
        edge = min(image.size)
        left, top = (image.width - edge) // 2, (image.height - edge) // 2
        # Cropped and resized in one step, without a copy of the square.
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge))
    return np.asarray(image, dtype=np.uint8).reshape(size, size, -1).transpose(2, 0, 1)


PATH, NAME, LEVEL = "path", "name", "level_"
_Channels = BeforeValidator(lambda value: int(value) if value in ("1", "3") else value)


class PicturesConfig(Section):
    """The pictures of a declared data set, and the features that a model sees."""

    column: str = Field(PATH, description="Column with the path of each picture, below the data folder.")
    size: int = Field(64, ge=8, le=512, description="Height and width in pixels: the centre square is resized.")
    channels: Annotated[Literal[1, 3], _Channels] = Field(3, description="3: colour; 1: grey.")
    features: str = Field(
        "pixels",
        pattern=rf"^(pixels|oriented_gradients|{PLACE.pattern})$",
        description="Default of the option `features`: the picture, `oriented_gradients`, which are 900 histogram "
        "values of its edges, or `module:function` of a picture to a vector, code that runs with FAIRPATE_ALLOW_CODE=1 "
        "only.",
    )


def folder_table(folder: Path, below: Path) -> pa.Table:
    """A row per picture in ``folder``: `path` from ``below``, `name`, and the folders in between as `level_1`, ..."""
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


def check_paths(paths: Sequence[str], folder: Path, file: str, column: str, faults: TableFaults) -> None:
    """Add a fault for each path that is not a file below ``folder``."""
    # A table from a stranger must not read files outside the data folder.
    wrong = [path for path in paths if {"..", "/"} & set(PurePosixPath(path).parts) or not (folder / path).is_file()]
    remedy = "correct the path, which begins in the data folder, or put the picture there"
    faults.add(file, column, expected="a picture", remedy=remedy, rows=len(wrong), values=dict.fromkeys(wrong))


def read_pictures(paths: Sequence[str], folder: Path, config: PicturesConfig) -> Pixels:
    """Pixels (N, channels, size, size) of the pictures at ``paths``."""
    return decode(_of_files(paths, folder), paths, size=config.size, mode="RGB" if config.channels == 3 else "L")
