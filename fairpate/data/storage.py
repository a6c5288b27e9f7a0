"""Data sets on disk: one Parquet file per split and a `dataset.json`, exact in both directions.

Images are one fixed-size-binary column, tables one float32 column per feature. The manifest holds the sha256 of every
file and is written last. So a damaged or half-written data set is found and never trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from fairpate.data.dataset import SPLIT_NAMES, Dataset, Split
from fairpate.data.entry import DataError
from fairpate.data.files import sha256_of
from fairpate.data.record_names import Names, as_names
from fairpate.files import write_atomically
from fairpate.later import torch

FORMAT_VERSION = 3
MANIFEST = "dataset.json"
WORDS = ("name", "kind", "label_names", "group_names", "sensitive_attribute", "feature_names", "notes")
ROWS_PER_GROUP = 4096


def save_dataset(dataset: Dataset, folder: Path) -> None:
    """Write ``dataset`` into ``folder``, made where missing; the manifest comes last and marks it complete."""
    folder.mkdir(parents=True, exist_ok=True)
    # First: a crash among the files then leaves none that vouches for half of them.
    (folder / MANIFEST).unlink(missing_ok=True)
    for name, split in dataset.splits.items():
        write_parquet(_to_table(split, dataset), folder / f"{name}.parquet")
    manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "record_shape": list(dataset.private.x.shape[1:])}
    manifest["sha256"] = {name: sha256_of(folder / f"{name}.parquet") for name in SPLIT_NAMES}
    manifest |= {word: getattr(dataset, word) for word in WORDS}
    manifest["records_alone"] = dataset.records_alone
    text = json.dumps(manifest, indent=2) + "\n"
    write_atomically(folder / MANIFEST, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_dataset(folder: Path) -> Dataset:
    """What :func:`save_dataset` wrote; :class:`DataError` for an incomplete, damaged or newer folder."""
    manifest = _read_manifest(folder / MANIFEST)
    shape = tuple(manifest["record_shape"])
    for name, expected in manifest["sha256"].items():
        _check_split(folder / f"{name}.parquet", expected)
    splits: dict[str, Any] = {
        name: _from_table(read_parquet(folder / f"{name}.parquet"), manifest["kind"], shape) for name in SPLIT_NAMES
    }
    words: dict[str, Any] = {
        word: tuple(manifest[word]) if isinstance(manifest[word], list) else manifest[word] for word in WORDS
    }
    # Earlier versions did not write it.
    return Dataset(**words, **splits, records_alone=manifest.get("records_alone", False))


def write_parquet(table: pa.Table, path: Path) -> None:
    """``table`` with page checksums, whole at ``path`` or not there."""
    write_atomically(
        path,
        lambda partial: pq.write_table(
            table,
            partial,
            compression="lz4",
            write_page_checksum=True,
            row_group_size=ROWS_PER_GROUP,
            use_dictionary=False,
        ),
    )


def read_parquet(path: Path) -> pa.Table:
    """The table at ``path``, page checksums verified; :class:`DataError` where it is missing or damaged."""
    try:
        return pq.read_table(path, page_checksum_verification=True, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}: missing or damaged Parquet file ({error}); delete its folder and make it again."
        ) from error


def pixels_to_arrow(x: npt.NDArray[np.uint8]) -> pa.FixedSizeBinaryArray:
    """(N, ...) pixels as N fixed-size binaries."""
    size = math.prod(x.shape[1:])
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])


def pixels_from_arrow(column: pa.ChunkedArray, shape: Sequence[int]) -> npt.NDArray[np.uint8]:
    """(N, *shape) pixels, a copy of N fixed-size binaries."""
    size = math.prod(shape)
    out = np.empty((len(column), size), dtype=np.uint8)
    start = 0
    for chunk in column.chunks:
        flat = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)
        out[start : start + len(chunk)] = flat[chunk.offset * size : (chunk.offset + len(chunk)) * size].reshape(
            -1, size
        )
        start += len(chunk)
    return out.reshape(-1, *shape)


def _check_split(path: Path, expected: str) -> None:
    # No digest of private records in a message: it would confirm a guess about them.
    if not path.is_file():
        raise DataError(f"{path}: damaged: no file; save the data set again.")
    if sha256_of(path) != expected:
        raise DataError(f"{path}: damaged: not what was saved; save the data set again.")


def _to_table(split: Split, dataset: Dataset) -> pa.Table:
    columns: dict[str, Any] = {
        "record_id": as_names(split.record_id).packed.cast(pa.string()),
        "unit_id": as_names(split.unit_id).packed.cast(pa.string()),
        "y": split.y.numpy(),
        "z": split.z.numpy(),
    }
    if split.person_id:
        columns["person_id"] = as_names(split.person_id).packed.cast(pa.string())
    if dataset.kind == "image":
        return pa.table(columns | {"x": pixels_to_arrow(split.x.numpy())})
    features = split.x.numpy()
    return pa.table(columns | {f"x{place}": features[:, place] for place in range(features.shape[1])})


def _from_table(table: pa.Table, kind: str, shape: tuple[int, ...]) -> Split:
    if kind == "image":
        x = torch.from_numpy(pixels_from_arrow(table["x"], shape))
    else:
        features = np.empty((len(table), shape[0]), dtype=np.float32)
        for place in range(shape[0]):
            features[:, place] = table[f"x{place}"].to_numpy()
        x = torch.from_numpy(features)
    y, z = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("y", "z"))
    names = (name for name in ("record_id", "unit_id", "person_id") if name in table.column_names)
    return Split(x=x, y=y, z=z, **{name: Names(table[name].to_pylist()) for name in names})


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no complete data set here; save it again.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error}); delete its folder and save the data set again.") from error
    if manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version")
        raise DataError(f"{path}: expected format_version {FORMAT_VERSION}, got {found}; save the data set again.")
    return manifest
