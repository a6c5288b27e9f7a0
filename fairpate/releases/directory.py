"""The folder of a run: the paths of its files, and reading and writing them.

``public/`` holds released labels or arrays, the student, the statement, metrics and the report; ``private/`` (mode
0700) holds teachers, votes and the ledger. Every file is written to a temporary name and renamed, so a file that exists
is complete, and an interrupted stage is repeated.

A file of released arrays has their privacy events and their origin too: all that a student needs in order to learn from
them without any private record.

The run records the facts of its data set in ``data.json``, because a data set that was passed in from Python cannot be
looked up by the name in the configuration.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fairpate.config import flattened
from fairpate.files import PathIn, arrays_digest, give_to_owner, write_atomically
from fairpate.privacy.accountant import Event
from fairpate.privacy.mechanism_events import event_from, event_json
from fairpate.types import LabelledSet, PrivacyStatement, Unit, UsageError, UserError, VoteBatch, restored
from student.card import StudentCard

RecordT = TypeVar("RecordT")
LOCK = ".lock"  # the first file that a run makes in its folder
_ENSEMBLE = b"ensemble"


class RunDirectoryError(UserError):
    """Raised for a file of a run that is missing or damaged; nothing in the run's folder was changed."""


class RunFolderError(RunDirectoryError, UsageError):
    """Raised for a folder that contains no run, or a run of another configuration."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """The paths of the files of one run; ``fairpate.run_method`` and ``fairpate.open_run_directory`` return it."""

    root: Path
    # Whether the file of a release lists the privacy events of earlier draws too. A release is drawn again if its file
    # was deleted.
    states_all_draws: ClassVar[bool] = False

    public = PathIn("root", "public", "Files that may be published.")
    private = PathIn("root", "private", "Files that must not be published.")
    teachers = PathIn("private", "teachers", "Checkpoints of the teachers.")
    votes = PathIn("private", "votes.parquet", "Votes per query and class.")
    ledger = PathIn("private", "ledger.sqlite", "The ledger: queries, charged before they are answered.")
    ledger_place = PathIn("private", "ledger.json", "Where the ledger is, if outside the folder, and its anchor.")
    ledger_backup = PathIn("private", "ledger.backup", "An empty file, touched by each backup of the ledger.")
    actions = PathIn("private", "actions.jsonl", "What operators did to the run's tokens and ledger.")
    tokens = PathIn("private", "tokens.json", "Tokens of the run's service.")
    receipt = PathIn("private", "release.json", "The run's id in the odometer, and the events charged under it.")
    journal = PathIn("private", "sites.sqlite", "Messages sent for a sum over several sites.")
    released = PathIn("public", "released.safetensors", "The first released arrays, from which the student learns.")
    embedding = PathIn("public", "embedding.safetensors", "The embedding of records, computed from public ones alone.")
    labels = PathIn("public", "labels.parquet", "Released labels.")
    thresholds = PathIn("public", "thresholds.safetensors", "The noisy table of private labels by score.")
    student = PathIn("public", "student.safetensors", "The published model.")
    graph = PathIn("public", "model.onnx", "The published model in ONNX, for use without this package.")
    graph_description = PathIn("public", "model.json", "Inputs and outputs of the ONNX model.")
    statement = PathIn("public", "statement.json", "The published privacy statement.")
    metrics = PathIn("public", "metrics.json", "The student's metrics.")
    metrics_table = PathIn("public", "metrics.safetensors", "The noisy table of test records, for private metrics.")
    choice = PathIn("public", "choice.safetensors", "Which settings a private mechanism chose, if one did.")
    comparison = PathIn("public", "comparison.json", "What a choice by results costs in the run's comparison.")
    audit = PathIn("public", "audit.json", "Lower bounds on epsilon from attacks on shadow releases.")
    audit_page = PathIn("public", "audit.html", "The bounds of the audit as a page.")
    private_population = PathIn("public", "private_population.json", "Rates of private groups, from the release.")
    card = PathIn("public", "card.json", "The model card.")
    card_page = PathIn("public", "card.html", "The model card as a page.")
    public_report = PathIn("public", "report.html", "The published report.")
    record = PathIn("public", "record.json", "The run as one row of a comparison, at its published epsilon.")
    private_record = PathIn("private", "record.json", "The run's row at its data-dependent cost; not public.")
    costs = PathIn("private", "costs.json", "The data-dependent privacy cost; not to be published.")
    work = PathIn("private", "work.json", "What the workers of the run did, in numbers; for its operator.")
    without_privacy = PathIn("private", "without_privacy.json", "Accuracy of training without noise; not public.")
    private_report = PathIn("private", "report.html", "The report with data-dependent costs; not to be published.")
    config = PathIn("root", "config.yaml", "The resolved configuration.")
    data = PathIn("root", "data.json", "The names of the data set, its labels and groups; no records.")
    environment = PathIn("root", "environment.json", "Versions, machine and revision.")

    def release_files(self) -> list[Path]:
        """Return the paths of all files in the run's folder that contain released arrays."""
        # Each later file appends a name to that of the first.
        return sorted(self.released.parent.glob(f"{self.released.stem}*.safetensors"))

    @property
    def made_on(self) -> str | None:
        """The date on which the run began, in UTC; None if the folder does not say, as that of a bundle."""
        return read_json(self.environment)["made_on"] if self.environment.is_file() else None

    def require_finished(self, *, with_ledger: bool, with_votes: bool, with_student: bool = True) -> None:
        """Raise RunDirectoryError unless the run has its privacy statement and, as the arguments ask for them, its
        student with metrics, its ledger and its votes."""
        # Of a ledger in a database, only its place is in the folder.
        ledger = self.ledger_place if self.ledger_place.exists() and not self.ledger.exists() else self.ledger
        of_votes = (*([self.votes] if with_votes else []), *([ledger] if with_ledger else []))
        of_student = (self.student, self.metrics) if with_student else ()
        for path in (*of_votes, self.statement, *of_student):
            if not path.is_file():
                raise RunDirectoryError(f"{path}: missing; finish this run first, by repeating its command.")


def run_at(root: Path) -> RunDirectory:
    """Return the run in the folder ``root``; RunFolderError if this folder holds no run."""
    run = RunDirectory(root=root)
    if not run.config.is_file():
        reason = "no config.yaml" if root.is_dir() else "a file" if root.is_file() else "no such folder"
        raise RunFolderError(f"{root}: holds no run ({reason}); give the folder that `fairpate run` printed.")
    return run


@contextmanager
def sole_worker(folder: Path, command: str) -> Iterator[None]:
    """Context manager: lock ``folder`` inside the ``with`` block, so that no other process writes to it. ``command`` is
    the command that writes there, for the message of the RunDirectoryError that is raised if another process has locked
    the folder."""
    # Appended to, as "w" would empty a file that a link points to; no right to write for others under any umask.
    with open(folder / LOCK, "a", opener=lambda name, flags: os.open(name, flags, 0o664)) as lock:
        give_to_owner(lock.fileno(), folder)
        try:
            # The lock belongs to the open file: it ends with its process, so that a crash leaves no stale lock.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"{folder}: another `{command}` is running in this folder; wait until it ends, or give another folder."
            ) from None
        yield


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write ``text`` to ``path`` atomically, as UTF-8; with ``private`` only the file's owner may read it."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=private)


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Write ``value`` to ``path`` as strict JSON, atomically. ValueError for NaN or infinity, which the caller must
    replace by None."""
    # NaN is no JSON: browsers and other languages would refuse the whole file.
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n", private=private)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``, which :func:`write_json` wrote. RunDirectoryError for a missing or damaged
    file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")  # noqa: TRY301, TRY004 - reworded below
    except (OSError, ValueError) as error:
        fault = "cannot be read" if isinstance(error, OSError) else "damaged"
        raise RunDirectoryError(f"{path}: {fault} ({error}); restore the file from a copy.") from error
    return value


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields in which two configurations, ``before`` and ``now``, differ: a mapping from their dotted names,
    sorted, to texts of the form ``name: before -> now``. A missing value is shown as None."""
    old, new = (flattened(dict(values)) for values in (before, now))
    names = sorted(old.keys() | new.keys())
    return {name: f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)}


def read_statement(run: RunDirectory) -> PrivacyStatement:
    """Return the published privacy statement of ``run``; RunDirectoryError if it is missing or damaged."""
    return _read_record(PrivacyStatement, run.statement)


def _read_record(kind: type[RecordT], path: Path) -> RecordT:
    values = read_json(path)
    try:
        return restored(kind, values)
    except (TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path}: damaged ({error}); restore the file from a copy.") from error


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The public facts of the data set that a run was trained on: its name, kind, names of labels and groups, and the
    shape of one record.

    ``given_from_python``: the caller passed the records in, so they cannot be loaded by name. ``unit``: the unit of
    privacy.
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
    """Return the public facts of the data set that ``run`` was trained on, from its file ``data.json``; None if there
    is no such file. RunDirectoryError if the file is damaged."""
    return _read_record(DataRecord, run.data) if run.data.is_file() else None


def require_data(run: RunDirectory) -> DataRecord:
    """Return the public facts of the data set that ``run`` was trained on, from its file ``data.json``;
    RunDirectoryError if there is no such file."""
    record = recorded_data(run)
    if record is None:
        raise RunDirectoryError(
            f"{run.data}: missing, so the data set of this run is not known; repeat the run's command, which writes "
            "this file and does not train again."
        )
    return record


def require_data_by_name(run: RunDirectory) -> None:
    """Raise RunDirectoryError if ``run`` was trained on records that a Python program passed in, which cannot be loaded
    by name."""
    record = recorded_data(run)
    if record is not None and record.given_from_python:
        raise RunDirectoryError(
            f"{run.root}: this run was trained on {record.name!r}, a data set that was given from Python and cannot be "
            "loaded by name; continue the run from Python."
        )


def require_student_of(run: RunDirectory, record: DataRecord, student: StudentCard) -> None:
    """Raise RunDirectoryError if ``student``, the description in the run's model file, does not fit the data set that
    ``record`` describes: the model was then trained on other data."""
    # A model of other data with equal names and shape is not detected: its file holds no digest of records.
    words = ("label_names", "group_names", "sensitive_attribute")
    differing = [name for name in words if getattr(record, name) != getattr(student, name)]
    if record.record_shape != student.input_shape:
        differing.append("record_shape")
    if differing:
        raise RunDirectoryError(
            f"{run.student}: this model was not trained on the data set {record.name}, as they differ in "
            f"{', '.join(differing)}; restore the folder of the run from a copy, or give a new folder with --out."
        )


def write_votes(batch: VoteBatch, path: Path) -> None:
    """Write teachers' votes to a Parquet file with one row per query: record_id, group, and the number of votes per
    class. The file's metadata identify the ensemble of teachers."""
    # The type is given, because from no rows Arrow would infer the type null.
    votes = pa.array(batch.votes_QC.tolist(), type=pa.list_(pa.int64(), batch.votes_QC.shape[1]))
    table = pa.table({"record_id": list(batch.record_ids), "group": batch.groups_Q, "votes": votes})
    table = table.replace_schema_metadata({_ENSEMBLE: batch.ensemble})
    # Private: there is no noise in the votes.
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=True)


def read_votes(path: Path) -> VoteBatch:
    """Return the votes that :func:`write_votes` wrote; RunDirectoryError for a damaged file."""
    table = _read(path)
    metadata = table.schema.metadata or {}
    # Votes of an unknown ensemble must not be charged as those of the present one.
    if _ENSEMBLE not in metadata:
        raise RunDirectoryError(
            f"{path}: this file does not say which teachers voted; delete it and repeat the run's command."
        )
    return VoteBatch(
        record_ids=table["record_id"].to_pylist(),
        groups_Q=table["group"].to_numpy().astype(np.int64),
        votes_QC=np.array(table["votes"].to_pylist(), dtype=np.int64),
        ensemble=metadata[_ENSEMBLE].decode(),
    )


def write_labels(labelled: LabelledSet, path: Path) -> None:
    """Write the released labels to a Parquet file with one row per answered query, in order of submission: record_id,
    group, label, and the noisy vote counts if they are released too."""
    columns = {"record_id": list(labelled.record_ids), "group": labelled.groups, "label": labelled.labels}
    if labelled.counts is not None:
        columns["counts"] = pa.array(labelled.counts.tolist(), type=pa.list_(pa.int64(), labelled.counts.shape[1]))
    table = pa.table(columns)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_labels(path: Path) -> LabelledSet:
    """Return the labels that :func:`write_labels` wrote; RunDirectoryError for a damaged file."""
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
        raise RunDirectoryError(
            f"{path}: cannot be read ({error}); delete this file and repeat the run's command."
        ) from error


Arrays = Mapping[str, npt.NDArray[Any]]
FORMAT = "fairpate.release/1"  # of a file of released arrays


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

    def require_settings(self, settings: Mapping[str, Any], path: Path) -> None:
        """Raise RunFolderError if the arrays, which are in the file ``path``, were released under other settings."""
        if changes := changed_fields(self.settings, settings):
            raise RunFolderError(
                f"{path}: was released under other settings ({'; '.join(changes.values())}); set them back, or let the "
                "run make a release of its own, which costs its epsilon in addition."
            )


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
