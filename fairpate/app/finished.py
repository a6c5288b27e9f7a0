"""A run that is done: its folder as its method divides it, read without what trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairpate.app.rundir import RunDirectory, open_run_directory
from fairpate.methods.definition import Method
from fairpate.methods.pate import PateFamily


@dataclass(frozen=True, kw_only=True)
class UnprotectedRun(RunDirectory):
    """The folder of a run without any privacy: nothing of it may be published."""

    @property
    def public(self) -> Path:
        """Everything is the operator's."""
        return self.private


def own_folder(run: RunDirectory, config: Method) -> RunDirectory:
    """The folder as ``config`` divides it."""
    return run if config.is_private else UnprotectedRun(root=run.root)


def finished_run(root: Path) -> tuple[RunDirectory, Method]:
    """The run in ``root``, whose every stage that costs something is done. RunDirectoryError otherwise."""
    run, config = open_run_directory(root)
    run = own_folder(run, config)
    run.require_finished(with_ledger=config.asks_teachers, with_votes=isinstance(config, PateFamily))
    return run, config
