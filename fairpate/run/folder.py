"""Make the folder of a run for a configuration, or reopen an existing one with its recorded configuration and data set.

A folder that contains a run of another configuration is refused, with the fields that differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from fairpate import __version__
from fairpate.config import ConfigError, DataConfig, read_yaml
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import without_order
from fairpate.data.embedding import EmbeddingFileError, read_embedding
from fairpate.data.registry import embedded, load_at_site
from fairpate.files import PathIn, check_output, make_folder, private_folder
from fairpate.methods.base import Method, Stream, config_digest, configured, determining_values
from fairpate.releases.directory import (
    LOCK,
    DataRecord,
    RunDirectory,
    RunDirectoryError,
    RunFolderError,
    changed_fields,
    recorded_data,
    require_data_by_name,
    require_student_of,
    run_at,
    write_json,
    write_text,
)
from fairpate.types import stream_seed
from student.card import StudentFileError, read_card

if TYPE_CHECKING:
    from student.student import Student

LIBRARIES = ("numpy", "pyarrow", "ray", "scikit-learn", "scipy", "torch", "torchvision")

# These settings measure a model and do not change it, so that a run may be measured again with others.
_TESTED_BY = ("votes.test", "votes.label", "evaluation.least_cell", "evaluation.fair_at")
_JOB_FOLDER = "runtime_resources"  # where Ray unpacks the working directory of a job
# That of the C library, where PyYAML was built with it, takes a tenth of the time.
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True, kw_only=True)
class ShownRun(RunDirectory):
    """The folder of a run, which a notebook displays as the metrics and files of the run."""

    def _repr_html_(self) -> str:
        from fairpate.run.publication import run_html  # its pages take a second to import

        return run_html(self)


@dataclass(frozen=True, kw_only=True)
class UnprotectedRun(ShownRun):
    """The folder of a run without privacy; nothing in it may be published."""

    public = PathIn("root", "private")


def check_run_directory(config: Method) -> RunDirectory:
    """Check that a run of ``config`` may use the folder ``config.out``, and return the paths of its files; nothing is
    written.

    Errors as in :func:`create_run_directory`.
    """
    root = config.out
    if root is None:
        words = [re.sub("[^A-Za-z0-9_.-]+", "-", word) for word in (config.method, config.data.name)]
        root = Path("runs") / f"{'-'.join(words)}-{config_digest(config)}"
    run = (ShownRun if config.is_private else UnprotectedRun)(root=root)
    if _JOB_FOLDER in run.root.absolute().parts:
        raise RunFolderError(
            f"{run.root}: this folder is in the working directory of a Ray job, which Ray deletes after the job, with "
            "the ledger; give an absolute path outside of that directory with --out."
        )
    check_output(run.root, "--out")
    if run.config.exists():
        try:
            # A field that an earlier version did not have is at its default, as it was then.
            stored = open_run_directory(run.root)[1].model_dump(mode="json")
        except ConfigError:  # another version's, whose fields are compared as they are written
            stored = read_yaml(run.config)
        changed = changed_fields(determining_values(config, stored), determining_values(config))
        # The sections of another method differ as well.
        names = ["method"] if "method" in changed and stored.get("method") else changed
        if changes := [changed[name] for name in names if name not in _TESTED_BY]:
            raise RunFolderError(
                f"{run.root}: holds a run of another configuration ({'; '.join(changes)}); give another folder with "
                "--out."
            )
        return run
    # A run that was killed before it had written its configuration leaves these.
    begun = (LOCK, ".config.yaml.*.tmp")
    if run.root.exists() and not all(any(fnmatch(each.name, name) for name in begun) for each in run.root.iterdir()):
        raise RunFolderError(f"{run.root}: this folder is not empty and holds no run; give another folder with --out.")
    return run


def create_run_directory(config: Method) -> RunDirectory:
    """Create the folder ``config.out`` for a run, or reopen it if it contains an earlier, perhaps unfinished, run of
    the same configuration; return the paths of its files.

    RunFolderError, with the differing fields, if the folder holds a run of another configuration. PlaceError if the
    folder cannot be written.
    """
    # Checked again: another run may have begun here since the caller checked.
    run = check_run_directory(config)
    values = config.model_dump(mode="json")
    if not run.config.exists() or changed_fields(read_yaml(run.config), values).keys() & {*_TESTED_BY}:
        # The configuration comes first: by it, the folder is recognised after a crash.
        make_folder(run.root)
        write_text(run.config, yaml.dump(values, Dumper=_Dumper, sort_keys=False))
    if config.is_private:  # without privacy there is nothing to publish
        make_folder(run.public)
    private_folder(run.private)
    if not run.environment.exists():
        write_json(run.environment, environment())
    return run


def open_run_directory(root: Path) -> tuple[RunDirectory, Method]:
    """Return the run in the folder ``root``, of any method, and its configuration.

    RunFolderError if the folder holds no run, ConfigError if the configuration cannot be read.
    """
    return ShownRun(root=root), configured(run_at(root).config)


def finished_run(root: Path) -> tuple[RunDirectory, Method]:
    """Return the finished run in the folder ``root`` and its configuration. RunDirectoryError if the run is not
    finished."""
    run, config = open_run_directory(root)
    run = run if config.is_private else UnprotectedRun(root=root)
    run.require_finished(with_ledger=config.asks_teachers, with_votes=config.keeps_votes)
    return run, config


def record_data(run: RunDirectory, dataset: Dataset, *, given_from_python: bool) -> None:
    """Record in the run's folder which data set the run is trained on; RunDirectoryError if another data set was
    recorded before.

    ``given_from_python``: the caller passed the data set in instead of naming it. Then a digest of its records, which
    is stored in ``private/``, is compared too.
    """
    found, shape = recorded_data(run), tuple(dataset.private.x.shape[1:])
    same = ("name", "kind", "label_names", "group_names", "sensitive_attribute", "unit")
    now = DataRecord(
        **{name: getattr(dataset, name) for name in same}, record_shape=shape, given_from_python=given_from_python
    )
    if found is not None:
        if not given_from_python:
            require_data_by_name(run)
        if changes := changed_fields(asdict(found), asdict(now)):
            raise RunDirectoryError(
                f"{run.root}: this run was trained on another data set ({'; '.join(changes.values())}); restore the "
                "data set, or give another folder with --out."
            )
    if given_from_python:
        digest, path = _digest(dataset), run.private / "data.sha256"
        if not path.exists():
            write_text(path, digest + "\n", private=True)
        elif path.read_text(encoding="utf-8").strip() != digest:
            raise RunDirectoryError(
                f"{run.root}: this run was trained on other records than those given now; give the earlier records, or "
                "another folder (out)."
            )
    if found is None:
        if run.student.exists():  # the record was lost, and the student may be of other data
            require_student_of(run, now, read_card(run.student))
        write_json(run.data, asdict(now))


def load_for(run: RunDirectory, data: DataConfig, load: Callable[[DataConfig], Dataset] = load_data) -> Dataset:
    """Read with ``load`` the data set that ``data`` names, and return it. If ``run`` stores an embedding, the records
    are embedded by it.

    RunDirectoryError if the stored embedding is damaged, or missing although the student was trained on embedded
    records.
    """
    if load is load_data and run.journal.exists() and run.student.exists():
        # The model was learned from a sum over several sites: its private records are elsewhere and no longer needed.
        load = partial(load_at_site, has_private=False)
    if data.embedding is not None and run.embedding.exists():
        try:
            # By the stored embedding: one that is fitted again may have other axes.
            return embedded(load(data.model_copy(update={"embedding": None})), read_embedding(run.embedding))
        except EmbeddingFileError as error:
            raise RunDirectoryError(str(error)) from error
    # Fitted again it may have other axes, and the student's weights belong to the old ones.
    if data.embedding is not None and run.student.exists():
        raise RunDirectoryError(
            f"{run.embedding}: missing, although {run.student} reads embedded records; restore this file from a copy, "
            "or start a new run folder with --out."
        )
    return load(data)


def as_trained(run: RunDirectory, config: Method, dataset: Dataset) -> Dataset:
    """Return ``dataset`` in the form that the method of ``config`` reads. If the method protects only the sensitive
    attribute, records are reordered and renamed so that neither order nor names reveal the attribute; else nothing
    changes.

    The secret key that determines the order is drawn once per run and stored in ``private/``. With seeded noise the key
    is derived from the seed.
    """
    if not (config.protects_attribute_only and config.is_private):
        return dataset
    path = run.private / "order.key"
    if config.is_seeded:
        # A seeded run is not private anyway, and can be repeated on any machine.
        secret = stream_seed(config.seed, Stream.ORDER_OF_RECORDS).to_bytes(8, "little")
    else:
        if not path.exists():
            if run.receipt.exists():
                raise RunDirectoryError(
                    f"{path}: missing, although a release of this run read the records in the order that this key "
                    "determines; restore this file from a copy, or start a new run folder with --out."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, secrets.token_hex(32) + "\n", private=True)
        secret = bytes.fromhex(path.read_text(encoding="utf-8").strip())
    return replace(dataset, private=without_order(dataset.private, seed=config.seed, secret=secret))


def _digest(dataset: Dataset) -> str:
    """Return a digest of all records in order. The digest must not be published, because it would confirm a guess about
    the records."""
    # Test records given with votes made elsewhere, where no record is private, may be named later.
    if not len(dataset.private):
        dataset = replace(dataset, test=dataset.private)
    digest = hashlib.sha256()
    for split in dataset.splits.values():
        # JSON of names and shape, name by name: where records do not fit into memory, a list of names may not.
        digest.update(b"[[")
        for row, name in enumerate(split.record_id):
            digest.update(f"{', ' if row else ''}{json.dumps(name)}".encode())
        digest.update(f"], {json.dumps(list(split.x.shape))}]".encode())
        for values in (split.x, split.y, split.z):
            digest.update(np.ascontiguousarray(values.numpy()).data)
        # Only where they say more than the names of records.
        together = {"unit_id": split.unit_id, "person_id": split.person_id}
        if others := {name: list(ids) for name, ids in together.items() if len(ids) and ids != split.record_id}:
            digest.update(json.dumps(others).encode())
    return digest.hexdigest()


def read_student(run: RunDirectory, *, is_free: bool) -> Student:
    """Return the published student without its embedding, because :func:`load_for` embeds the records already.

    RunDirectoryError for a damaged file. ``is_free``: the student can be trained again at no privacy cost, and the
    error message says so.
    """
    from student.student import load_student  # with torch, which most readers of a run do not need

    try:
        # Records are embedded when they are loaded (:func:`load_for`): the model gets coordinates.
        return replace(load_student(run.student), embedding=None)
    except StudentFileError as error:
        remedy = (
            "Or delete it and give the same command again: the student is then trained again from the released "
            "labels, at no privacy cost."
            if is_free
            else "It cannot be trained again: another training would be a second release of the same records. Without "
            "a copy, start a new run folder with --out and count both epsilons."
        )
        raise RunDirectoryError(f"{error} {remedy}") from error


def environment() -> dict[str, Any]:
    """Return the software and machine that a run records, by name: date, versions of this project and its libraries,
    machine, and the git revision if known."""
    return {
        "fairpate": __version__,
        "made_on": datetime.now(UTC).date().isoformat(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        **_software(Path(__file__).parents[2]),
    }


# Once: a process keeps the code that it began with, and a sweep makes many folders.
@lru_cache
def _software(checkout: Path) -> dict[str, Any]:
    """Return the versions of the libraries, and the git revision of this project's ``checkout``, None if it is none."""
    found: dict[str, Any] = {"libraries": {}, "revision": None}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):  # torchvision comes with an extra
            found["libraries"][name] = metadata.version(name)
    if (checkout / ".git").exists():  # otherwise git would answer for any repository around the installed package
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        with suppress(OSError, subprocess.TimeoutExpired):
            run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
            found["revision"] = run.stdout.strip() or None if run.returncode == 0 else None
    return found
