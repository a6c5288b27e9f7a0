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
from fairpate.app.identity import determining_values
from fairpate.app.release import choose_queries
from fairpate.app.rundir import checkpoint_folder
from fairpate.app.tables import write_votes
from fairpate.app.terminal.progress import Reporter
from fairpate.app.votes import collect_vote_batch
from fairpate.config import RayConfig
from fairpate.data import load_dataset
from fairpate.methods.definition import Method
from fairpate.methods.pate import PateFamily
from fairpate.types import UserError, VoteBatch
from teachers.cluster import open_pool
from teachers.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Where that is which cells share, by its name, and why some of it is missing."""

    paths: dict[str, Path]
    faults: dict[str, str]


def ballot(cell: Cell) -> str | None:
    """What names the teachers of a cell and the queries they vote on; None without teachers, or with its own kind."""
    config = _sharing(cell.config)
    if config is None:
        return None
    values = determining_values(config)
    # Nothing of what follows the votes (mechanism, gate, budget, student): cells that differ there share them.
    asked = {
        **{name: values[name] for name in ("data", "seed", "teachers")},
        "num_queries": config.aggregator.num_queries,
        "all_are_candidates": config.aggregator.admission is not None,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _sharing(config: Method) -> PateFamily | None:
    """A configuration whose votes others may use: none that asks in a way, or questions, of its own."""
    if not isinstance(config, PateFamily):
        return None
    method = type(config)
    return config if (method.ask, method.queried) == (PateFamily.ask, PateFamily.queried) else None


def collect_shared_votes(cells: Sequence[Cell], folder: SweepFolder, reporter: Reporter, cluster: RayConfig) -> Shared:
    """Train what is missing and let it vote, one ballot after the other, on the Ray that is there.

    A fault of one ballot does not stop the next.
    """
    cell_of = {name: cell for cell in cells if (name := ballot(cell)) is not None}
    shared = Shared(paths={name: folder.votes / f"{name}.parquet" for name in cell_of}, faults={})
    missing = [name for name, path in shared.paths.items() if not path.exists()]
    if missing:
        with open_pool(cluster) as pool:
            for name in missing:
                cell = cell_of[name]
                reporter.note("teachers", f"for {cell.data}, seed {cell.config.seed}")
                try:
                    write_votes(_collect(cell, folder, reporter, pool), shared.paths[name])
                except (UserError, ValueError, OSError, RuntimeError) as error:
                    shared.faults[name] = f"{type(error).__name__}: {error}"
    return shared


def _collect(cell: Cell, folder: SweepFolder, reporter: Reporter, pool: Pool) -> VoteBatch:
    config = _sharing(cell.config)
    assert config is not None
    dataset = load_dataset(config.data)
    return collect_vote_batch(
        dataset,
        choose_queries(dataset, config.aggregator),
        config.teachers,
        seed=config.seed,
        ray=config.ray,
        checkpoint_dir=checkpoint_folder(config.storage, folder.teachers),
        reporter=reporter,
        pool=pool,
    )
