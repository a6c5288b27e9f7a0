"""The folder of a run: the paths of its files, and reading and writing them.

``public/`` holds released labels or arrays, the student, the statement, metrics and the report; ``private/`` (mode
0700) holds teachers, votes and the ledger. Every file is written to a temporary name and renamed, so a file that exists
is complete, and an interrupted stage is done again. Nothing here needs a method.

A configuration names a data set; a data set that was given from Python has no name that could be looked up. So the run
records the facts of the data set that it read in ``data.json``, next to the configuration. All that describes the run
or reads its data set again uses this record.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fairpate.config import flattened
from fairpate.files import PathIn, write_atomically
from fairpate.types import LabelledSet, PrivacyStatement, Unit, UsageError, UserError, VoteBatch, restored
from student.card import StudentCard

LOCK = ".lock"  # the first file that a run makes in its folder
_ENSEMBLE = b"ensemble"


class RunDirectoryError(UserError):
    """A file of the run is missing or damaged; nothing in the folder was changed."""


class RunFolderError(RunDirectoryError, UsageError):
    """The folder holds no run, or a run of another configuration."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Paths of one run: what ``fairpate.run_method`` returns and ``fairpate.open_run_directory`` finds again."""

    root: Path
    states_all_draws: ClassVar[bool] = False
    """Whether the file of a release also lists the events of earlier draws of it, whose files are gone."""

    public = PathIn("root", "public")
    """Files that may be published."""
    private = PathIn("root", "private")
    """Files that only the operator may see."""
    teachers = PathIn("private", "teachers")
    """Checkpoints of the teachers."""
    votes = PathIn("private", "votes.parquet")
    """Votes per query and class."""
    ledger = PathIn("private", "ledger.sqlite")
    """The ledger: reservations of queries and their outcomes."""
    ledger_place = PathIn("private", "ledger.json")
    """The place of a ledger that is not in the folder, and of its anchor, if it has one."""
    ledger_backup = PathIn("private", "ledger.backup")
    """Updated whenever the ledger was copied."""
    actions = PathIn("private", "actions.jsonl")
    """What operators did: tokens, reading, copies, restores, take-overs."""
    tokens = PathIn("private", "tokens.json")
    """Tokens of the run's service."""
    receipt = PathIn("private", "release.json")
    """The id of this run in the odometer, and the events that it counts."""
    journal = PathIn("private", "sites.sqlite")
    """What a site or a coordinator sent, where the release is a sum over several sites."""
    released = PathIn("public", "released.safetensors")
    """The arrays that the method released first: everything else is learned from releases and public records."""
    embedding = PathIn("public", "embedding.safetensors")
    """The embedding of all records, if there is one: made once, from public records alone."""
    labels = PathIn("public", "labels.parquet")
    """Released labels."""
    student = PathIn("public", "student.safetensors")
    """The published model."""
    graph = PathIn("public", "model.onnx")
    """The published model in ONNX, for use without this package."""
    graph_description = PathIn("public", "model.json")
    """Inputs and outputs of the ONNX model."""
    statement = PathIn("public", "statement.json")
    """The published privacy statement."""
    metrics = PathIn("public", "metrics.json")
    """The student's metrics."""
    metrics_table = PathIn("public", "metrics.safetensors")
    """The noisy table of test records from which private metrics are estimated."""
    choice = PathIn("public", "choice.safetensors")
    """The choice of these settings among several, if it was made by a private mechanism."""
    audit = PathIn("public", "audit.json")
    """Lower bounds on epsilon from attacks on shadow releases."""
    audit_page = PathIn("public", "audit.html")
    """The same as a page."""
    private_population = PathIn("public", "private_population.json")
    """How the student treats the groups of private records, estimated from the release."""
    card = PathIn("public", "card.json")
    """The model card."""
    card_page = PathIn("public", "card.html")
    """The model card as a page."""
    public_report = PathIn("public", "report.html")
    """The published report."""
    record = PathIn("public", "record.json")
    """The run as a point of a comparison, at its published epsilon."""
    private_record = PathIn("private", "record.json")
    """The same point at the data-dependent privacy cost, if there is one; for the operator."""
    costs = PathIn("private", "costs.json")
    """The data-dependent privacy cost; for the operator."""
    without_privacy = PathIn("private", "without_privacy.json")
    """Accuracy of a model that was trained on the private records without noise; for the operator."""
    private_report = PathIn("private", "report.html")
    """The operator's report."""
    config = PathIn("root", "config.yaml")
    """The resolved configuration."""
    data = PathIn("root", "data.json")
    """The names of the data set, its labels and groups; no records."""
    environment = PathIn("root", "environment.json")
    """Versions, machine and revision."""

    def release_files(self) -> list[Path]:
        """The files of all releases of arrays that the run keeps: each later one adds its name to that of the first."""
        return sorted(self.released.parent.glob(f"{self.released.stem}*.safetensors"))

    @property
    def made_on(self) -> str | None:
        """The day on which the run began, in UTC; None where an earlier version did not record it."""
        return read_json(self.environment).get("made_on") if self.environment.is_file() else None

    def require_finished(self, *, with_ledger: bool, with_votes: bool, with_student: bool = True) -> None:
        """Raise RunDirectoryError if a file of a stage that costs privacy or time is missing."""
        # Of a ledger in a database, only its place is in the folder.
        ledger = self.ledger_place if self.ledger_place.exists() and not self.ledger.exists() else self.ledger
        of_votes = (*([self.votes] if with_votes else []), *([ledger] if with_ledger else []))
        of_student = (self.student, self.metrics) if with_student else ()
        for path in (*of_votes, self.statement, *of_student):
            if not path.is_file():
                raise RunDirectoryError(f"{path}: missing; finish the run with `fairpate run` first.")


def run_at(root: Path) -> RunDirectory:
    """The run in ``root``. RunFolderError if there is no run."""
    run = RunDirectory(root=root)
    if not run.config.is_file():
        reason = "no config.yaml" if root.is_dir() else "a file" if root.is_file() else "no such folder"
        raise RunFolderError(f"{root}: holds no run ({reason}); give the folder that `fairpate run` printed.")
    return run


@contextmanager
def sole_worker(folder: Path, command: str) -> Iterator[None]:
    """Hold a lock on a folder that ``command`` writes. RunDirectoryError if another process holds it."""
    with (folder / LOCK).open("a") as lock:  # not "w", which would empty a file that a link points to
        try:
            # Held by the open file: it ends with its process, so that a crash leaves no stale lock.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"{folder}: another `{command}` works here; wait for it.") from None
        yield


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` atomically, as UTF-8; ``private``: for its owner only."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=private)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write strict JSON atomically: a NaN must have become null before."""
    # NaN is no JSON: browsers and other languages would refuse the whole file.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", private=private)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object that :func:`write_json` wrote. RunDirectoryError for a missing or damaged file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); restore it from a copy.") from error
    except ValueError as error:
        raise RunDirectoryError(f"{path}: damaged ({error}); restore it from a copy.") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path}: damaged, expected an object; restore it from a copy.")
    return value


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The fields that differ, dotted and in order, each as ``name: before -> now``; a missing one is shown as None."""
    # Earlier versions may not have written empty sections.
    old, new = ({path: leaf for path, leaf in flattened(values).items() if leaf != {}} for values in (before, now))
    names = sorted(old.keys() | new.keys())
    return {name: f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)}


def read_statement(run: RunDirectory) -> PrivacyStatement:
    """The published statement. RunDirectoryError for a missing or damaged one."""
    values = read_json(run.statement)
    try:
        return restored(PrivacyStatement, values)
    except (TypeError, KeyError) as error:
        raise RunDirectoryError(f"{run.statement}: damaged ({error}); restore it from a copy.") from error


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The public facts of a data set: its name, kind, names of labels and groups, and the shape of one record.

    ``given_from_python``: the caller handed the records in, and no name leads to them. ``unit``: what is protected as a
    whole.
    """

    name: str
    kind: str
    record_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    given_from_python: bool
    unit: Unit


def recorded_data(run: RunDirectory) -> DataRecord | None:
    """The recorded facts of the run's data set; None if there are none. RunDirectoryError if damaged."""
    if not run.data.is_file():
        return None
    try:
        return restored(DataRecord, read_json(run.data))
    except TypeError as error:
        raise RunDirectoryError(f"{run.data}: damaged ({error}); restore it from a copy.") from error


def require_data(run: RunDirectory) -> DataRecord:
    """The result of :func:`recorded_data`. RunDirectoryError if nothing is recorded."""
    record = recorded_data(run)
    if record is None:
        raise RunDirectoryError(
            f"{run.data}: missing, so it is not known what this run was trained on; give the command of the run again, "
            "which records it and trains nothing anew."
        )
    return record


def require_data_by_name(run: RunDirectory) -> None:
    """Raise RunDirectoryError if the run was trained on records that cannot be loaded by name."""
    record = recorded_data(run)
    if record is not None and record.given_from_python:
        raise RunDirectoryError(
            f"{run.root}: was trained on {record.name!r}, a data set that was given from Python; it cannot be loaded "
            "by its name, so continue this run from Python."
        )


def require_student_of(run: RunDirectory, record: DataRecord, student: StudentCard) -> None:
    """Raise RunDirectoryError if the run's student was trained on other data than ``record`` describes."""
    # A model of other data with equal names and shape is not told apart: its file holds no digest of records.
    words = ("label_names", "group_names", "sensitive_attribute")
    differing = [name for name in words if getattr(record, name) != getattr(student, name)]
    if record.record_shape != student.input_shape:
        differing.append("record_shape")
    if differing:
        raise RunDirectoryError(
            f"{run.student}: was not trained on {record.name}, it differs in {', '.join(differing)}; restore the "
            "folder, or start a new one."
        )


def write_votes(batch: VoteBatch, path: Path) -> None:
    """One row per query: record_id, group, and how many teachers chose each class; the metadata name the teachers."""
    # With its type: of no rows Arrow would infer the type null.
    votes = pa.array(batch.votes_QC.tolist(), type=pa.list_(pa.int64(), batch.votes_QC.shape[1]))
    table = pa.table({"record_id": list(batch.record_ids), "group": batch.groups_Q, "votes": votes})
    table = table.replace_schema_metadata({_ENSEMBLE: batch.ensemble})
    # For the operator alone: no noise is in the votes.
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=True)


def read_votes(path: Path) -> VoteBatch:
    """The votes that :func:`write_votes` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    metadata = table.schema.metadata or {}
    # Votes of unnamed teachers must not be charged as those of the present ones.
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
        columns["counts"] = pa.array(labelled.counts.tolist(), type=pa.list_(pa.int64(), labelled.counts.shape[1]))
    table = pa.table(columns)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_labels(path: Path) -> LabelledSet:
    """The labels that :func:`write_labels` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    counts = table["counts"].to_pylist() if "counts" in table.column_names else None
    return LabelledSet(
        record_ids=tuple(table["record_id"].to_pylist()),
        labels=table["label"].to_numpy().astype(np.int64),
        groups=table["group"].to_numpy().astype(np.int64),
        # For no row numpy cannot infer the number of classes.
        counts=None if counts is None else np.array(counts, dtype=np.int64).reshape(len(counts), -1 if counts else 0),
    )


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); delete it and run again.") from error
