"""What a run read private records for, kept in its public part: arrays, their events, and the settings behind them.

Anyone who has the file may go on from it, with other settings of all that comes after, and touches no private record:
the release is counted once, under the id in the file, whatever number of runs go on from it. A release whose file is
lost cannot be drawn again; another one is counted besides. Not known here: what the arrays mean, or who may share
them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from aggregator.service.wire import worded
from fairpate.app.rundir import RunDirectory, RunDirectoryError
from fairpate.files import write_atomically
from fairpate.privacy.event_values import event_from, event_json
from fairpate.privacy.events import Event

FORMAT = "fairpate.release/1"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Released:
    """Arrays by name, and all events that touched private records on the way to them."""

    arrays: Arrays
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """``id`` of the release in the operator's odometer, the ``settings`` it was made under, the ``pool`` it reads."""

    id: str
    settings: dict[str, Any]
    pool: str


def pool_digest(record_ids: Sequence[str]) -> str:
    """What public records, in which order: the arrays belong to them."""
    return hashlib.sha256(json.dumps(list(record_ids)).encode()).hexdigest()


def save_release(path: Path, released: Released, origin: Origin) -> None:
    """Write the file that :func:`read_release` reads."""
    arrays = {name: np.ascontiguousarray(array) for name, array in released.arrays.items()}
    header = {
        "format": FORMAT,
        "id": origin.id,
        "settings": origin.settings,
        "pool": origin.pool,
        "events": [worded(event_json(event)) for event in released.events],
        "sha256": _digest(arrays),
    }
    write_atomically(path, lambda temporary: temporary.write_bytes(save(arrays, {"release": json.dumps(header)})))
    path.chmod(0o644)


def read_release(path: Path) -> tuple[Released, Origin]:
    """What :func:`save_release` wrote. RunDirectoryError for a file that is missing, damaged or something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["release"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        _check(header, arrays)
        released = Released(arrays=arrays, events=tuple(map(event_from, header["events"])))
        return released, Origin(**{name: header[name] for name in ("id", "settings", "pool")})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path}: no release that can be read ({error}). It cannot be drawn again: restore it from a copy, or "
            "start a new run folder with --out and count both epsilons."
        ) from error


def release_id(run: RunDirectory) -> str | None:
    """The id of the release that ``run`` holds; None without one. Errors as :func:`read_release`."""
    return read_release(run.released)[1].id if run.released.exists() else None


def _check(header: dict[str, Any], arrays: Arrays) -> None:
    if header["format"] != FORMAT or header["sha256"] != _digest(arrays):
        raise ValueError(f"expected {FORMAT}, and the arrays of its checksum")


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    # By name, for a file has an order of its own; with type and shape, by which equal bytes are other arrays.
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
