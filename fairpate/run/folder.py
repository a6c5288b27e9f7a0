"""The folder of a run: made for a configuration, or found again with the configuration that it holds.

The configuration is written first: by it, a folder that a crash left is known as the folder of this run. A folder that
holds a run of another configuration is refused, with the fields that differ.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from fairpate import __version__
from fairpate.config import ConfigError
from fairpate.config_reader import config_digest, determining, determining_values, flat_values, read_yaml
from fairpate.files import PathIn, check_output_folder, private_folder
from fairpate.methods.base import Method, configured
from fairpate.methods.pate import PateFamily
from fairpate.run.context import LOCK, RunDirectory, RunFolderError, changed_fields, run_at, write_json, write_text

LIBRARIES = ("dp-accounting", "numpy", "pyarrow", "ray", "scikit-learn", "scipy", "torch", "torchvision")

# They measure a model and do not change it.
_TESTED_BY = (
    "votes.test",
    "votes.label",
    "evaluation.least_cell",
    "evaluation.fair_at",
)
_JOB_FOLDER = "runtime_resources"  # where Ray unpacks the working directory of a job


@dataclass(frozen=True, kw_only=True)
class ShownRun(RunDirectory):
    """A run's folder that shows its result in a notebook."""

    def _repr_html_(self) -> str:
        from fairpate.run.publication import run_html  # its pages take a second to import

        return run_html(self)


@dataclass(frozen=True, kw_only=True)
class UnprotectedRun(ShownRun):
    """The folder of a run without privacy. Everything in it is for the operator, and nothing may be published."""

    public = PathIn("root", "private")


def own_folder(run: RunDirectory, config: Method) -> RunDirectory:
    """The run's folder. In a run without privacy everything is private, and nothing may be published."""
    return ShownRun(root=run.root) if config.is_private else UnprotectedRun(root=run.root)


def check_run_directory(config: Method) -> RunDirectory:
    """Return the folder of this configuration after checking that the run may use it; nothing is written.

    Errors as :func:`create_run_directory`.
    """
    root = config.out
    if root is None:
        words = [re.sub("[^A-Za-z0-9_.-]+", "-", word) for word in (config.method, config.data.name)]
        root = Path("runs") / f"{'-'.join(words)}-{config_digest(config)}"
    run = own_folder(RunDirectory(root=root), config)
    if _JOB_FOLDER in run.root.absolute().parts:
        raise RunFolderError(
            f"{run.root}: is in the working directory of a Ray job, which is deleted after it, the ledger too; give an "
            "absolute path outside of it with --out."
        )
    check_output_folder(run.root, "--out")
    if run.config.exists():
        try:
            # A field that an earlier version did not have is at its default, as it was then.
            stored = open_run_directory(run.root)[1].model_dump(mode="json")
        except ConfigError:  # another version's, whose fields are compared as they are written
            stored = read_yaml(run.config)
        before, now = flat_values(determining(stored, config)), flat_values(determining_values(config))
        changed = changed_fields(before, now)
        # The sections of another method differ as well.
        names = ["method"] if before.get("method", now["method"]) != now["method"] else changed
        changes = [changed[name] for name in names if name not in _TESTED_BY]
        if changes:
            raise RunFolderError(
                f"{run.root}: holds a run of another configuration ({'; '.join(changes)}); give another folder with "
                "--out."
            )
        return run
    # A run that was killed before it had written its configuration leaves these.
    begun = (LOCK, ".config.yaml.*.tmp")
    if run.root.exists() and not all(any(fnmatch(each.name, name) for name in begun) for each in run.root.iterdir()):
        raise RunFolderError(f"{run.root}: not empty and no run; give another folder with --out.")
    return run


def create_run_directory(config: Method) -> RunDirectory:
    """The directory of this configuration: a new one, or the one where an earlier run of it left off.

    RunFolderError if the folder holds a run of another configuration; the differing fields are named. PlaceError if
    nothing can be written.
    """
    # Looked at again: another run may have begun here since the caller looked.
    run = check_run_directory(config)
    values = config.model_dump(mode="json")
    before, now = (flat_values(read_yaml(run.config)) if run.config.exists() else None), flat_values(values)
    if before is None or any(before.get(name) != now.get(name) for name in _TESTED_BY if name in now):
        # The configuration comes first: by it a folder that a crash left is known as this run's.
        run.root.mkdir(parents=True, exist_ok=True)
        write_text(run.config, yaml.safe_dump(values, sort_keys=False))
    if config.is_private:  # without privacy there is nothing to publish
        run.public.mkdir(exist_ok=True)
    private_folder(run.private)
    if not run.environment.exists():
        write_json(run.environment, environment())
    return run


def open_run_directory(root: Path) -> tuple[RunDirectory, Method]:
    """The run in ``root`` and its configuration, for a run of any method.

    RunFolderError if ``root`` holds no run, ConfigError if its configuration cannot be read.
    """
    return ShownRun(root=root), configured(run_at(root).config)


def finished_run(root: Path) -> tuple[RunDirectory, Method]:
    """The finished run in ``root`` and its configuration. RunDirectoryError if a stage is missing."""
    run, config = open_run_directory(root)
    run = own_folder(run, config)
    run.require_finished(with_ledger=config.asks_teachers, with_votes=isinstance(config, PateFamily))
    return run, config


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


# Once, as libraries' versions: a process keeps the code that it began with, and a sweep makes many folders.
@lru_cache
def _revision(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():  # git would answer for any repository around the installed package
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
