"""Released arrays in a file, with their privacy events and their origin: all that a student needs in order to learn
from them without any private record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fairpate.files import arrays_digest, write_atomically
from fairpate.privacy.accountant import Event
from fairpate.privacy.mechanism_events import event_from, event_json
from fairpate.releases.directory import RunDirectory, RunDirectoryError, RunFolderError, changed_fields

Arrays = Mapping[str, npt.NDArray[Any]]
FORMAT = "fairpate.release/1"


@dataclass(frozen=True, kw_only=True)
class ReleasedArrays:
    """Released arrays by name, and all privacy events of drawing them from private records."""

    arrays: Arrays
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of released arrays: everything that determines them, except private records and noise. A run compares
    it with its own settings and public records before it uses a stored release.

    ``id``: the id of their run in the odometer (the database of privacy costs). ``settings``: the settings of the
    configuration on which the arrays depend. ``pool``: a digest of the public records. ``after``: digests of the
    earlier releases of the same run.
    """

    id: str
    settings: dict[str, Any]
    pool: str
    after: tuple[str, ...] = ()


def save_release(path: Path, released: ReleasedArrays, origin: Origin) -> None:
    """Write released arrays and their origin to the file ``path``; a student can be trained from this file without any
    private record."""
    arrays = {name: np.ascontiguousarray(array) for name, array in released.arrays.items()}
    header: dict[str, Any] = {"format": FORMAT, "id": origin.id, "settings": origin.settings, "pool": origin.pool}
    header |= {"events": list(map(event_json, released.events)), "sha256": arrays_digest(arrays)}
    if origin.after:
        header["after"] = origin.after
    write_atomically(path, lambda temporary: temporary.write_bytes(save(arrays, {"release": json.dumps(header)})))
    # Released arrays are public, also under a strict umask.
    path.chmod(0o644)


def read_release(path: Path) -> tuple[ReleasedArrays, Origin]:
    """Return the released arrays and their origin that :func:`save_release` wrote to ``path``; RunDirectoryError if the
    file is missing, damaged or of another kind."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["release"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        if header["format"] != FORMAT or header["sha256"] != arrays_digest(arrays):
            raise ValueError(f"the file must have format {FORMAT}, and arrays that match its checksum")  # noqa: TRY301
        released = ReleasedArrays(arrays=arrays, events=tuple(map(event_from, header["events"])))
        after = tuple(header.get("after", ()))
        return released, Origin(**{name: header[name] for name in ("id", "settings", "pool")}, after=after)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path}: not a readable release ({error}). A release cannot be drawn again: restore this file from a "
            "copy, or start a new run folder with --out and add up both epsilons."
        ) from error


def require_same_settings(origin: Origin, settings: Mapping[str, Any], path: Path) -> None:
    """Raise RunFolderError if the release in the file ``path``, whose origin is ``origin``, was made under settings
    other than ``settings``."""
    if changes := changed_fields(origin.settings, settings):
        raise RunFolderError(
            f"{path}: was released under other settings ({'; '.join(changes.values())}); set them back, or let the run "
            "make a release of its own, which costs its epsilon in addition."
        )


def take_release(run: RunDirectory, source: Path, candidate: str) -> None:
    """Copy the release of the run in the folder ``source`` to ``run``, whose model then learns from it.

    ``source`` may also contain a private choice: the release of which candidate settings are best on the validation
    records. If the chosen settings have the digest ``candidate``, the file of the choice is copied too. RunFolderError
    if ``run`` has another release already.
    """
    given = RunDirectory(root=source)
    content = given.released.read_bytes()
    has_started = run.statement.exists() or run.receipt.exists() or run.released.exists()
    # The same release again is not a second one: the command of an interrupted run may be repeated.
    if has_started and not (run.released.exists() and run.released.read_bytes() == content):
        raise RunFolderError(f"{run.root}: this run has a release of its own already; give another folder with --out.")
    write_atomically(run.released, lambda temporary: temporary.write_bytes(content))
    if given.choice.exists() and not run.choice.exists():
        made, origin = read_release(given.choice)
        if origin.settings["candidates"][int(made.arrays["chosen"][0])] == candidate:
            write_atomically(run.choice, lambda temporary: temporary.write_bytes(given.choice.read_bytes()))
