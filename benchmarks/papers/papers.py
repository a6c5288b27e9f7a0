"""Run a sweep of configs/paper/ cell by cell in this process, and keep what it measures in docs/results/.

    nice -n 19 python benchmarks/papers/papers.py configs/paper/table1_utkface.yaml [--seeds 0 1] [--cells NAME ...]

The cells are those of ``fairpate compare FILE``, one seed after the other, in a folder for what is kept between
commands; what is finished there is not run again, and the file of results is written after every cell. A cell is named
DATA/METHOD/WHAT VARIES, where only fields that differ between the sweep's cells of that method are named.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import torch

from fairpate.config import RayConfig, flattened
from fairpate.data import load_data, load_once
from fairpate.fairness import rates
from fairpate.methods.base import determining_values
from fairpate.releases.directory import RunDirectory, read_json, read_labels, read_statement, read_votes, write_votes
from fairpate.run.compare import run_cell
from fairpate.run.folder import UnprotectedRun
from fairpate.run.sweep import Cell, SweepFolder, cells_of, load_sweep
from fairpate.terminal import Reporter
from fairpate.types import UserError, VoteBatch
from student.student import load_student

GAPS = {
    "parity": "dp_one_vs_rest",
    "parity_pairwise": "dp_pairwise",
    "odds": "eo_lowy",
    "odds_full": "eo_full",
    "accuracy_parity": "accuracy_parity",
}
RATES = {"fnr": "false_negative_rate", "fpr": "false_positive_rate"}
_SEEDS = ("seed", "data.seed")


def main() -> None:
    """Run what is missing, and write the file of results."""
    options = _parse()
    torch.set_num_threads(1)
    sweep = load_sweep(options.config, options.overrides)
    cells = cells_of(sweep, folder=options.config.parent)
    names = cell_names(cells)
    found = measured.read(options.config.stem)
    for seed in options.seeds if options.seeds is not None else sweep.seeds:
        for cell in cells:
            name, methods, data = names[cell.digest], options.methods or sweep.methods, options.data or sweep.data_sets
            chosen = cell.method in methods and cell.data in data and (not options.cells or name in options.cells)
            if cell.config.seed != seed or not chosen or seed in found.get(name, {}).get("seeds", ()):
                continue
            numbers = run_one(cell, options.state / options.config.stem, train_gaps=options.train_gaps)
            print(f"{name}, seed {seed}: {numbers.get('failed') or numbers['accuracy']}", flush=True)
            if "failed" in numbers:
                continue
            add(found, name, seed, numbers)
            measuring = f"python benchmarks/papers/papers.py {options.config} --train-gaps"
            command = measuring if options.train_gaps else f"fairpate compare {options.config}"
            measured.write(options.config.stem, command=command, cells=found)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--data", nargs="+")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="names of cells; all others are left out")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument(
        "--train-gaps", action="store_true", help="parity on private records too (public data sets only)"
    )
    parser.add_argument("--state", type=Path, default=Path("runs"), help="folder that is kept between commands")
    return parser.parse_args()


def cell_names(cells: Sequence[Cell]) -> dict[str, str]:
    """A name for every cell by its digest; those of other seeds have the same."""
    flat = {cell.digest: _without_seeds(cell) for cell in cells}
    of_method: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in cells:
        of_method[cell.data, cell.method].append(cell.digest)
    names: dict[str, str] = {}
    for (data, method), digests in of_method.items():
        fields = sorted({field for digest in digests for field in flat[digest]})
        varying = [field for field in fields if len({str(flat[digest].get(field)) for digest in digests}) > 1]
        several = [f for f in varying if len({str(flat[d].get(f)) for d in digests if flat[d].get(f) is not None}) > 1]
        for said in (several, varying):
            words = {digest: _words({field: flat[digest].get(field) for field in said}) for digest in digests}
            if len(set(words.values())) == len({str(flat[digest]) for digest in digests}):
                break
        names |= {digest: "/".join(word for word in (data, method, words[digest]) if word) for digest in digests}
    return names


def _without_seeds(cell: Cell) -> dict[str, Any]:
    return {name: value for name, value in flattened(determining_values(cell.config)).items() if name not in _SEEDS}


def _words(said: dict[str, Any]) -> str:
    """What varies, as one word that a link may hold; of fields that move together, once."""
    known = {field.rpartition(".")[2]: value for field, value in said.items() if value is not None}
    words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in known.items()]
    return ",".join(words).replace(" ", "").replace(")", "").replace("(", "")


def run_one(cell: Cell, state: Path, *, train_gaps: bool = False) -> dict[str, Any]:
    """The numbers of one cell, or why it failed; with the gap on the records that it learned from."""
    update: dict[str, Any] = {"ray": RayConfig(num_actors=0)} if "ray" in type(cell.config).model_fields else {}
    if "storage" in type(cell.config).model_fields:
        update["storage"] = str((state.parent / "teachers").absolute())
    out = state / f"{cell.method}-{cell.data}-{cell.digest}"
    here = Cell(data=cell.data, config=cell.config.model_copy(update=update), digest=cell.digest)
    try:
        run_cell(here, out, shared_votes(here, state.parent / "votes"))
    except (UserError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    run = RunDirectory(root=out) if here.config.is_private else UnprotectedRun(root=out)
    return numbers_of(run) | ({"train_parity": train_parity(cell, run)} if train_gaps else {})


def train_parity(cell: Cell, run: RunDirectory) -> float | None:
    """The demographic-parity gap of the published model on the records that it learned from."""
    dataset = load_data(cell.config.data)
    answers = load_student(run.student).predict(dataset.private.x, dataset.private.z.numpy())
    names = {"num_groups": dataset.num_groups, "num_classes": dataset.num_classes}
    table_GYC = rates.joint_table(answers.labels, dataset.private.z.numpy(), **names)
    return rates.dp_one_vs_rest(table_GYC).value


def shared_votes(cell: Cell, folder: Path) -> VoteBatch | None:
    """The votes that cells with the same teachers and queries share; teachers that are missing are trained."""
    shared = SweepFolder(root=folder).shared_file(cell)
    if shared is None or shared.suffix != ".parquet":
        return None
    path = folder / shared.name
    if not path.exists():
        # As a comparison does, but pictures are embedded once for all cells of a seed.
        votes = cell.config.votes_to_share(load_once(cell.config.data), folder, Reporter(quiet=True))
        folder.mkdir(parents=True, exist_ok=True)
        write_votes(votes, path)
    return read_votes(path)


def numbers_of(run: RunDirectory) -> dict[str, Any]:
    """What a finished run measured, and what it guarantees."""
    metrics, statement = read_json(run.metrics), read_statement(run)
    costs = read_json(run.costs) if run.costs.exists() else {}
    unrefused = metrics.get("without_refusals", metrics)
    numbers = {
        "unit": statement.unit,
        "relation": statement.relation,
        "delta": statement.delta,
        "epsilon": math.inf if statement.epsilon is None else statement.epsilon,
        "epsilon_data_dependent": costs.get("epsilon_data_dependent"),
        "epsilon_as_in_paper": costs.get("epsilon_as_in_paper"),
        "accuracy": metrics["accuracy"],
        "coverage": metrics["coverage"],
        "majority_accuracy": metrics["majority_accuracy"],
        "unrefused_accuracy": unrefused["accuracy"],
        # Accuracy and gaps are of the records of groups that are large enough: these are in none.
        "left_out": metrics["num_left_out"],
        "unrefused_left_out": unrefused["num_left_out"],
        "unrefused_parity": unrefused["gaps"]["dp_one_vs_rest"]["value"],
        "degenerate": len(metrics["degenerate"]),
        **{name: metrics["gaps"][gap]["value"] for name, gap in GAPS.items()},
        **{name: metrics["gaps"][gap]["value"] for name, gap in RATES.items() if len(metrics["class_names"]) == 2},
    }
    if statement.queries is not None:
        numbers |= {"submitted": statement.queries.submitted, "answered": statement.queries.answered}
        if run.labels.exists():
            groups = read_labels(run.labels).groups
            numbers |= {f"answered_{z}": int((groups == z).sum()) for z in range(len(metrics["group_names"]))}
    return numbers


def add(cells: measured.Cells, name: str, seed: int, numbers: dict[str, Any]) -> None:
    """One more seed of a cell: a list for everything that may differ between seeds, in their order."""
    cell = cells.setdefault(name, {"seeds": []})
    fixed: dict[str, Any] = {field: numbers.pop(field) for field in ("unit", "relation", "delta") if field in numbers}
    if fixed and cell.keys() & fixed.keys() and any(cell.get(field) != value for field, value in fixed.items()):
        raise ValueError(f"{name}: {fixed} differs from what other seeds guarantee: {cell}.")
    length = len(cell["seeds"])
    for field in numbers.keys() | (cell.keys() - {"seeds", "unit", "relation", "delta"}):
        cell[field] = [*cell.get(field, [None] * length), _rounded(numbers.get(field))]
    cell |= fixed
    cell["seeds"] = [*cell["seeds"], seed]
    order = sorted(range(length + 1), key=cell["seeds"].__getitem__)
    cell |= {name: [values[i] for i in order] for name, values in cell.items() if isinstance(values, list)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value


if __name__ == "__main__":
    main()
