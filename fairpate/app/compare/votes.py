"""Teachers and votes of a sweep: trained once per data, seed and settings, and shared by every cell that asks them.

This comes before the cells, with the whole cluster for one ensemble at a time: a cell holds its CPUs while it waits,
and could wait for ever for those of teachers. Votes are private, and so are the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairpate.app.compare.cells import Cell
from fairpate.app.compare.folder import SweepFolder
from fairpate.app.methods import METHODS
from fairpate.app.pipeline import collect_vote_batch
from fairpate.app.progress import Reporter
from fairpate.app.release import choose_queries
from fairpate.app.rundir import checkpoint_folder, determining_values
from fairpate.app.tables import write_votes
from fairpate.data import load_dataset
from fairpate.types import UserError, VoteBatch
from teachers.pool import Pool, RayPool


@dataclass(frozen=True, kw_only=True)
class SharedVotes:
    """Where the votes of each ballot are, and why some ballots have none."""

    paths: dict[str, Path]
    faults: dict[str, str]


def ballot(cell: Cell) -> str | None:
    """What names the teachers of a cell and the queries they vote on; None for a method without teachers."""
    if not METHODS[cell.method].asks_teachers:
        return None
    values, settings = determining_values(cell.config), cell.config.aggregator
    asked = {
        **{name: values[name] for name in ("data", "seed", "teachers")},
        "num_queries": settings.num_queries,
        "all_are_candidates": settings.admission is not None,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def collect_shared_votes(cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter) -> SharedVotes:
    """Train what is missing and let it vote, one ballot after the other, on the Ray that is there.

    A fault of one ballot does not stop the next.
    """
    cell_of = {name: cell for cell in cells if (name := ballot(cell)) is not None}
    shared = SharedVotes(paths={name: folder.votes / f"{name}.parquet" for name in cell_of}, faults={})
    missing = [name for name, path in shared.paths.items() if not path.exists()]
    if missing:
        with RayPool(cell_of[missing[0]].config.ray) as pool:
            for name in missing:
                cell = cell_of[name]
                reporter.note("teachers", f"for {cell.data}, seed {cell.config.seed}")
                try:
                    write_votes(_collect(cell, folder, reporter, pool), shared.paths[name])
                except (UserError, ValueError, OSError, RuntimeError) as error:
                    shared.faults[name] = f"{type(error).__name__}: {error}"
    return shared


def _collect(cell: Cell, folder: SweepFolder, reporter: Reporter, pool: Pool) -> VoteBatch:
    dataset = load_dataset(cell.config.data)
    queries = choose_queries(dataset, cell.config)
    checkpoints = checkpoint_folder(cell.config, folder.teachers)
    return collect_vote_batch(cell.config, dataset, queries, reporter, checkpoint_dir=checkpoints, pool=pool)
