"""A run's folder: configuration, ``private/`` and ``public/``, tables, and what is finished.

The run directory: what may be published, what may not, and what made it.

``public/`` holds released labels, the student, the statement, metrics and the report; ``private/`` (mode 0700) holds
teachers, votes and the ledger. A file that exists is whole, and an interrupted stage is simply done again.

The run directory's Parquet tables: votes, which are private, and released labels, which are not.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fairpate import __version__
from fairpate.config import ConfigError
from fairpate.config_reader import default_folder, determining, determining_values, flat_values, read_yaml
from fairpate.files import PathIn, Storage, check_output_folder, open_storage, private_folder, write_atomically
from fairpate.types import IntArray, LabelledSet, PrivacyStatement, UsageError, UserError, VoteBatch

if TYPE_CHECKING:
    from fairpate.methods.base import Method

LIBRARIES = ("dp-accounting", "numpy", "pyarrow", "ray", "scikit-learn", "scipy", "torch", "torchvision")

_TESTED_BY = ("votes.test", "votes.label", "evaluation.least_cell")  # measures a model, and determines nothing of it
_LOCK = ".lock"  # comes before all else in a folder
_JOB_FOLDER = "runtime_resources"  # where Ray unpacks the working directory of a job


class RunDirectoryError(UserError):
    """A folder that does not hold what was asked for; nothing in it was changed."""


class RunFolderError(RunDirectoryError, UsageError):
    """A folder that cannot be the one that was meant: no run, another run, something else."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Paths of one run. Made by :func:`create_run_directory`, found again by :func:`open_run_directory`."""

    root: Path

    @property
    def public(self) -> Path:
        """What may be published."""
        return self.root / "public"

    @property
    def private(self) -> Path:
        """What only the operator may see."""
        return self.root / "private"

    teachers = PathIn("private", "teachers")
    """Checkpoints of the teachers."""
    votes = PathIn("private", "votes.parquet")
    """Votes per query and class."""
    ledger = PathIn("private", "ledger.sqlite")
    """Reservations and outcomes."""
    ledger_place = PathIn("private", "ledger.json")
    """Where the ledger lies, if not there, and its anchor, if it has one."""
    ledger_backup = PathIn("private", "ledger.backup")
    """Written to whenever the ledger was copied."""
    actions = PathIn("private", "actions.jsonl")
    """What operators did: tokens, reading, copies, restores, take-overs."""
    tokens = PathIn("private", "tokens.json")
    """Who may ask the run's service."""
    receipt = PathIn("private", "release.json")
    """What the odometer counts of this run, and the id under which it does."""
    released = PathIn("public", "released.safetensors")
    """What private records were read for, where that is kept: all else follows from it and public records."""
    embedding = PathIn("public", "embedding.safetensors")
    """What every record of the run went through, where that is anything: made once, of public records alone."""
    labels = PathIn("public", "labels.parquet")
    """Released labels."""
    student = PathIn("public", "student.safetensors")
    """The published model."""
    graph = PathIn("public", "model.onnx")
    """The published model for those without this package."""
    graph_description = PathIn("public", "model.json")
    """How it is used."""
    statement = PathIn("public", "statement.json")
    """The published claim of privacy."""
    metrics = PathIn("public", "metrics.json")
    """The student's metrics."""
    private_population = PathIn("public", "private_population.json")
    """How the student treats the groups of private records, as far as the release tells."""
    card = PathIn("public", "card.json")
    """What the student guarantees and how it treats groups."""
    card_page = PathIn("public", "card.html")
    """The same as a page."""
    public_report = PathIn("public", "report.html")
    """The page for everybody."""
    record = PathIn("public", "record.json")
    """The run as one point of a comparison."""
    private_record = PathIn("private", "record.json")
    """The same point at the price that depends on votes, where there is one; for the operator."""
    costs = PathIn("private", "costs.json")
    """What was really spent; for the operator."""
    without_privacy = PathIn("private", "without_privacy.json")
    """What a model without noise reaches that learned from private records; for the operator."""
    private_report = PathIn("private", "report.html")
    """The page for the operator."""
    config = PathIn("root", "config.yaml")
    """The resolved configuration."""
    data = PathIn("root", "data.json")
    """What the run was trained on: names, no records."""
    environment = PathIn("root", "environment.json")
    """Versions, machine and revision."""

    @property
    def made_on(self) -> str | None:
        """The day on which it was begun, in UTC; None where an earlier version did not record it."""
        return read_json(self.environment).get("made_on") if self.environment.is_file() else None

    def _repr_html_(self) -> str:
        from fairpate.run.publication import run_html  # reads run directories, so not above

        return run_html(self)

    def require_finished(self, *, with_ledger: bool, with_votes: bool, with_student: bool = True) -> None:
        """RunDirectoryError if a stage that costs something is still to be done; each where there is one."""
        ledger = self.ledger if self.ledger.exists() else self.ledger_place  # what of them is there
        ledger = ledger if ledger.exists() else self.ledger
        of_votes = (*([self.votes] if with_votes else []), *([ledger] if with_ledger else []))
        of_student = (self.student, self.metrics) if with_student else ()
        for path in (*of_votes, self.statement, *of_student):
            if not path.is_file():
                raise RunDirectoryError(f"{path}: missing; finish the run with `fairpate run` first.")


def checkpoint_folder(storage: str | None, own: Path) -> Path | Storage:
    """Where teachers are kept: the configured ``storage``, or the folder ``own`` of this machine.

    StorageError where the storage cannot be used.
    """
    return own if storage is None else open_storage(storage)


def check_run_directory(config: Method) -> RunDirectory:
    """Where this configuration runs, found fit for it; nothing is written. Errors as :func:`create_run_directory`."""
    run = RunDirectory(root=config.out or default_folder(config))
    if _JOB_FOLDER in run.root.absolute().parts:
        raise RunFolderError(
            f"{run.root}: lies in the working directory of a Ray job, which is deleted after it, the ledger too; "
            "give an absolute path outside of it with --out."
        )
    check_output_folder(run.root, "--out")
    if run.config.exists():
        _require_same(run, config)
    elif run.root.exists() and not all(_is_of_a_beginning(entry) for entry in run.root.iterdir()):
        raise RunFolderError(f"{run.root}: not empty and no run; give another folder with --out.")
    return run


def _is_of_a_beginning(entry: Path) -> bool:
    """Whether a run leaves this that was killed before it had written its configuration."""
    return entry.name == _LOCK or fnmatch(entry.name, ".config.yaml.*.tmp")


def create_run_directory(config: Method) -> RunDirectory:
    """The directory of this configuration: a new one, or the one where an earlier run of it left off.

    RunFolderError if the folder holds a run of another configuration; the differing fields are named. PlaceError where
    nothing can be written.
    """
    # Looked at again: another run may have begun here since the caller looked.
    run = check_run_directory(config)
    if not run.config.exists() or _is_tested_otherwise(run, config):
        # The configuration comes first: by it a folder that a crash left is known as this run's.
        run.root.mkdir(parents=True, exist_ok=True)
        write_text(run.config, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    if config.is_private:  # what has no privacy has nothing to publish
        run.public.mkdir(exist_ok=True)
    private_folder(run.private)
    if not run.environment.exists():
        write_json(run.environment, environment())
    return run


@contextmanager
def sole_worker(folder: Path, command: str) -> Iterator[None]:
    """Keep a second process out of a folder that ``command`` writes. RunDirectoryError where one is at work."""
    with (folder / _LOCK).open("a") as lock:  # cuts off nothing, should the name lead elsewhere
        try:
            # Held by the open file: it ends with its process, so that a crash leaves no stale lock.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"{folder}: another `{command}` works here; wait for it.") from None
        yield


def open_run_directory(root: Path) -> tuple[RunDirectory, Method]:
    """The run in ``root`` and its configuration, whatever its method."""
    from fairpate.methods.base import load_method  # methods know of run directories, so not above

    run = run_at(root)
    return run, load_method(run.config)


def run_at(root: Path) -> RunDirectory:
    """The run in ``root``. RunFolderError where there is none."""
    run = RunDirectory(root=root)
    if not run.config.is_file():
        reason = "no config.yaml" if root.is_dir() else "no such folder"
        raise RunFolderError(f"{root}: holds no run ({reason}); give the folder that `fairpate run` named.")
    return run


def _require_same(run: RunDirectory, config: Method) -> None:
    before, now = flat_values(determining(_stored(run), config)), flat_values(determining_values(config))
    names = sorted(before.keys() | now.keys())
    if before.get("method", now["method"]) != now["method"]:
        names = ["method"]  # the sections of another method are others too
    changes = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name) and name not in _TESTED_BY
    ]
    if changes:
        raise RunFolderError(
            f"{run.root}: holds a run of another configuration ({'; '.join(changes)}); give another folder with --out."
        )


def _is_tested_otherwise(run: RunDirectory, config: Method) -> bool:
    before, now = flat_values(read_yaml(run.config)), flat_values(config.model_dump(mode="json"))
    return any(before.get(name) != now.get(name) for name in _TESTED_BY if name in now)


def _stored(run: RunDirectory) -> dict[str, Any]:
    """The run's configuration; what an earlier version had no field for is at its default, as it was then."""
    try:
        return open_run_directory(run.root)[1].model_dump(mode="json")
    except ConfigError:  # another version's, whose fields are compared as they stand
        return read_yaml(run.config)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` atomically, as UTF-8; ``private``: for its owner only."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=private)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write strict JSON atomically: a NaN must have become null before."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", private=private)


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote. RunDirectoryError for a missing or damaged file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); restore it from a copy.") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: damaged ({error}); restore it from a copy.") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path}: damaged, expected an object; restore it from a copy.")
    return value


def read_statement(run: RunDirectory) -> PrivacyStatement:
    """The published statement. RunDirectoryError for a missing or damaged one."""
    values = read_json(run.statement)
    try:
        return PrivacyStatement.from_json(values)
    except (TypeError, KeyError) as error:
        raise RunDirectoryError(f"{run.statement}: damaged ({error}); restore it from a copy.") from error


def environment() -> dict[str, Any]:
    """Day, versions of this project and its libraries, machine, and the revision of the checkout if there is one."""
    return {
        "fairpate": __version__,
        "made_on": datetime.now(UTC).date().isoformat(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "revision": _revision(Path(__file__).parents[2]),
    }


_version = lru_cache(metadata.version)


# Once, as libraries' versions: a process goes on with the code that it began with, and a sweep makes many folders.
@lru_cache
def _revision(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():  # git would answer for any repository that the installed package lies in
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


_ENSEMBLE = b"ensemble"


def write_votes(batch: VoteBatch, path: Path) -> None:
    """One row per query: record_id, group, and how many teachers chose each class; the metadata name the teachers."""
    table = pa.table({"record_id": list(batch.record_ids), "group": batch.groups_Q, "votes": _rows(batch.votes_QC)})
    table = table.replace_schema_metadata({_ENSEMBLE: batch.ensemble})
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=True)


def read_votes(path: Path) -> VoteBatch:
    """The votes that :func:`write_votes` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    metadata = table.schema.metadata or {}
    if _ENSEMBLE not in metadata:
        raise RunDirectoryError(f"{path}: does not say which teachers voted; delete it and run again.")
    return VoteBatch(
        record_ids=table["record_id"].to_pylist(),
        groups_Q=table["group"].to_numpy().astype(np.int64),
        votes_QC=np.array(table["votes"].to_pylist(), dtype=np.int64),
        ensemble=metadata[_ENSEMBLE].decode(),
    )


def write_labels(labelled: LabelledSet, path: Path) -> None:
    """One row per answered query, in the order asked: record_id, group, label, and noisy counts if released."""
    columns = {"record_id": list(labelled.record_ids), "group": labelled.groups, "label": labelled.labels}
    if labelled.counts is not None:
        columns["counts"] = _rows(labelled.counts)
    table = pa.table(columns)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_labels(path: Path) -> LabelledSet:
    """What :func:`write_labels` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    counts = table["counts"].to_pylist() if "counts" in table.column_names else None
    return LabelledSet(
        record_ids=tuple(table["record_id"].to_pylist()),
        labels=table["label"].to_numpy().astype(np.int64),
        groups=table["group"].to_numpy().astype(np.int64),
        # For no row numpy cannot infer the number of classes.
        counts=None if counts is None else np.array(counts, dtype=np.int64).reshape(len(counts), -1 if counts else 0),
    )


def _rows(values_QC: IntArray) -> pa.Array:
    return pa.array(values_QC.tolist(), type=pa.list_(pa.int64(), values_QC.shape[1]))


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); delete it and run again.") from error
