"""The sweep: what runs, what is kept, what is found again, and who may see what."""

import hashlib
import io
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from rich.console import Console

from fairpate.app.backbones import with_pinned_weights
from fairpate.app.compare.cells import Cell, cells_of
from fairpate.app.compare.folder import SweepFolder, open_sweep_folder, sole_driver
from fairpate.app.compare.outcome import comparison_outcome
from fairpate.app.compare.report import summarise_comparison, write_frontier_reports
from fairpate.app.compare.run import Comparison, compare, run_cell
from fairpate.app.compare.table import SweepTable
from fairpate.app.progress import Reporter
from fairpate.app.records_table import Row, read_rows, write_rows
from fairpate.app.run import run_method
from fairpate.app.rundir import RunDirectoryError, check_run_directory
from fairpate.compare_config import SweepConfig
from fairpate.config_reader import parse_config
from fairpate.methods.definition import Method
from fairpate.strict_json import strict
from fairpate.types import RunRecord, VoteBatch
from teachers.pool import PoolError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import this module
pytestmark = pytest.mark.usefixtures("ray_session")
QUIET = Console(quiet=True)
SMALL = {
    "target.accounting": "rdp",
    "noise": "seeded",
    "dp_sgd": {"epochs": 1, "batch_size": 200},
    "sgd": {"epochs": 2},
    "student": {"model": {"name": "mlp", "hidden": [16]}, "fit": {"epochs": 2}},
    "teachers": {"num_teachers": 8, "fit": {"epochs": 2}},
    "aggregator": {
        "num_queries": 30,
        "mechanism": {"threshold": 0, "threshold_stddev_votes": 1, "noise_stddev_votes": 1},
    },
}

# A method that protects the colour alone must not see it.
COLOUR_UNSEEN = {"settings": {"data.options.colour_as_feature": False}}
SF_PATE = {"sf_pate": COLOUR_UNSEEN}


def sweep_of(**values: Any) -> SweepConfig:
    defaults: dict[str, Any] = {
        "data_sets": ["color_digits"],
        "methods": ["dp_sgd"],
        "settings": SMALL,
        "grid": {"target.epsilon": [1, 2, 3]},
        "ray": {"num_actors": 1},
        "tasks": {"num_cpus": 0.5, "max_retries": 0},
    }
    return parse_config(defaults | values, SweepConfig)


def run(root: Path, compute: Callable[..., list[Row]] | None, **values: Any) -> Comparison:
    sweep = sweep_of(**values)
    return compare(sweep, cells_of(sweep, folder=Path()), root, QUIET, compute=compute)


def measured(cell: Cell, epsilon: float, *, data_dependent: bool = False) -> Row:
    config = cell.config.model_dump(mode="json")
    record = RunRecord(
        method=cell.method,
        data=cell.data,
        seed=cell.config.seed,
        unit="record",
        relation="add or remove one",
        delta=1e-5,
        epsilon=epsilon,
        epsilon_is_data_dependent=data_dependent,
        accuracy=0.5,
        coverage=1.0,
        disparity=0.1,
        config=config,
    )
    return Row(
        digest=cell.digest,
        method=cell.method,
        data=cell.data,
        seed=cell.config.seed,
        config=config,
        command=cell.command,
        minutes=0.0,
        record=record,
    )


def counted(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    """Leaves a trace of having run, and fails for epsilon 2 while the trouble lasts."""
    root = out.parents[1]
    with (root / "ran").open("a") as ran:
        ran.write(f"{cell.digest}\n")
    if cell.config.target.epsilon == 2 and (root / "trouble").exists():
        raise ValueError("epsilon 2 is\n  not for us")
    return [measured(cell, cell.config.target.epsilon)]


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split() if (root / "ran").exists() else []


def test_only_what_is_missing_runs(tmp_path: Path) -> None:
    first = run(tmp_path, counted)
    assert [row.record and row.record.epsilon for row in first.rows] == [1, 2, 3]
    assert sorted(ran(tmp_path)) == sorted(row.digest for row in first.rows)
    again = run(tmp_path, counted)
    assert not again.changed
    assert again.rows == first.rows
    wider = run(tmp_path, counted, grid={"target.epsilon": [3, 4]}, seeds=[0, 1])
    assert [(row.seed, row.record and row.record.epsilon) for row in wider.rows] == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert len(ran(tmp_path)) == 3 + 3
    back = run(tmp_path, counted)
    assert back.changed
    assert back.rows == first.rows
    assert len(ran(tmp_path)) == 6


def test_the_command_of_a_failed_cell_is_printed_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "private" / "parts").mkdir(parents=True)
    (tmp_path / "trouble").touch()
    troubled = run(tmp_path, counted)
    printed = io.StringIO()
    Console(file=printed, width=80).print(summarise_comparison(troubled), crop=False)
    (failure,) = troubled.failed
    assert len(failure.command) > 80
    assert f"failed: {failure.command}\n" in printed.getvalue()
    told = comparison_outcome(troubled)
    assert (told.code, told.failure) == (1, "1 cell failed; the same command tries them again.")
    assert [each["command"] for each in told.facts["failed"]] == [failure.command]
    (methods,) = [each["methods"] for each in strict(told.facts)["data_sets"]]
    assert (methods[0]["cells"], methods[0]["finished"], methods[0]["epsilon"]) == (3, 2, [1, 3])


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "private" / "parts").mkdir(parents=True)
    (tmp_path / "trouble").touch()
    troubled = run(tmp_path, counted)
    (failure,) = troubled.failed
    assert failure.error == "ValueError: epsilon 2 is not for us"
    assert [row.error for row in troubled.rows] == ["", "failed", ""]
    assert failure.config["target"]["epsilon"] == 2
    assert "--set target.epsilon=2.0" in failure.command
    assert [row.status for row in troubled.rows] == ["ok", "failed", "ok"]
    (tmp_path / "trouble").unlink()
    mended = run(tmp_path, counted)
    assert not mended.failed
    assert len(ran(tmp_path)) == 4
    assert not list(mended.folder.failed.iterdir())


def hanging(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.config.target.epsilon == 2:
        time.sleep(600)
    return [measured(cell, cell.config.target.epsilon)]


def test_a_cell_that_hangs_ends_with_its_cause_and_the_next_one_has_its_own_time(tmp_path: Path) -> None:
    ended = run(tmp_path, hanging, tasks={"num_cpus": 1, "max_retries": 0, "max_minutes": 0.02})
    assert [row.status for row in ended.rows] == ["ok", "failed", "ok"]
    (failure,) = ended.failed
    assert failure.error == "CellTimeoutError: ran longer than tasks.max_minutes=0.02; raise it, or train less."


def dying(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.config.target.epsilon == 2:
        os._exit(1)
    return [measured(cell, cell.config.target.epsilon)]


def test_a_worker_that_dies_is_a_cause(tmp_path: Path) -> None:
    comparison = run(tmp_path, dying)
    assert [row.status for row in comparison.rows] == ["ok", "failed", "ok"]
    assert "WorkerCrashedError" in comparison.failed[0].error


def test_an_interrupt_loses_nothing_that_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = SweepTable.add

    def interrupted(self: SweepTable, cell: Cell, row: Row) -> None:
        add(self, cell, row)
        if self.done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(SweepTable, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, counted, tasks={"num_cpus": 2})
    finished = {row.digest for row in read_rows(tmp_path / "results.parquet")}
    assert len(finished) == 2
    monkeypatch.setattr(SweepTable, "add", add)
    assert len(run(tmp_path, counted, tasks={"num_cpus": 2}).rows) == 3
    assert all(ran(tmp_path).count(digest) == 1 for digest in finished)


def test_a_driver_that_was_killed_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    sweep = sweep_of()
    cells = cells_of(sweep, folder=Path())
    folder = open_sweep_folder(tmp_path, sweep)
    for cell in cells[:2]:
        folder.add(cell, [measured(cell, cell.config.target.epsilon)])
    assert len(run(tmp_path, counted).rows) == 3
    assert ran(tmp_path) == [cells[2].digest]
    folder.results.write_bytes(b"damaged")
    assert len(run(tmp_path, counted).rows) == 3
    assert ran(tmp_path) == [cells[2].digest]


def priced(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.method == "sgd":
        return [measured(cell, math.inf)]
    return [measured(cell, 2.0), measured(cell, 1.25, data_dependent=True)]


def epsilons(rows: list[Row]) -> list[float | None]:
    return [row.record and row.record.epsilon for row in rows]


def test_prices_of_votes_and_results_without_privacy_are_the_operators(tmp_path: Path) -> None:
    values = {"methods": ["sgd", "dp_sgd"], "grid": {}}
    comparison = run(tmp_path / "benchmark", priced, publish_unprotected=True, **values)
    assert epsilons(comparison.rows) == [math.inf, 2.0]
    assert epsilons(comparison.operators_rows) == [math.inf, 2.0, 1.25]
    comparison = run(tmp_path / "strict", priced, **values)
    assert epsilons(comparison.rows) == [2.0]
    assert sorted(epsilons(comparison.operators_rows), key=str) == [1.25, 2.0, math.inf]
    assert not run(tmp_path / "strict", priced, **values).changed
    root = tmp_path / "strict"
    public = [path for path in root.rglob("*.parquet") if "private" not in path.parts]
    assert [path.relative_to(root) for path in public] == [Path("results.parquet")]
    assert all(not row.is_private and not row.is_unprotected for path in public for row in read_rows(path))
    assert stat.S_IMODE((root / "private").stat().st_mode) == 0o700


def test_turning_publication_off_takes_back_what_has_no_privacy_and_runs_nothing(tmp_path: Path) -> None:
    values = {"methods": ["sgd", "dp_sgd"], "grid": {}}
    run(tmp_path, priced, publish_unprotected=True, **values)
    strict = run(tmp_path, refused, **values)
    assert epsilons(strict.rows) == [2.0]
    assert sorted(epsilons(strict.operators_rows), key=str) == [1.25, 2.0, math.inf]
    assert [row.method for row in strict.withheld] == ["sgd"]
    public = [path for path in tmp_path.rglob("*.parquet") if "private" not in path.parts]
    assert all(not row.is_unprotected for path in public for row in read_rows(path))
    assert not run(tmp_path, refused, **values).changed
    back = run(tmp_path, refused, publish_unprotected=True, **values)
    assert epsilons(back.rows) == [math.inf, 2.0]
    assert not back.withheld


def refused(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    raise ValueError("ran again")


def diverging(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.method in ("sgd", "pf_ld"):
        raise FloatingPointError("Training diverged at record 4711 of 1234.")
    return [measured(cell, 2.0)]


SECRETS = (b"4711 of 1234", b"Training diverged", b"FloatingPointError")


def published_bytes(root: Path) -> dict[str, bytes]:
    """Every file of a sweep outside of `private/` folders and its own settings; Parquet as text."""
    files = [path for path in root.rglob("*") if path.is_file() and "private" not in path.parts]
    return {
        str(path.relative_to(root)): (
            json.dumps(pq.read_table(path).to_pylist()).encode() if path.suffix == ".parquet" else path.read_bytes()
        )
        for path in files
    }


def test_why_a_run_failed_and_how_long_one_took_are_the_operators(tmp_path: Path) -> None:
    comparison = run(tmp_path, diverging, methods={"sgd": {}, "pf_ld": COLOUR_UNSEEN, "dp_sgd": {}}, grid={})
    write_frontier_reports(comparison, title="sweep")
    for name, content in published_bytes(tmp_path).items():
        assert not any(secret in content for secret in SECRETS), name
    rows = {row.method: row for row in comparison.rows}
    assert rows.keys() == {"pf_ld", "dp_sgd"}, "not even that a run without privacy failed is published"
    assert rows["pf_ld"].error == "failed"
    assert all(math.isnan(row.minutes) for row in comparison.rows)
    told = {row.method: row for row in comparison.operators_rows}
    assert "diverged at record 4711" in told["sgd"].error
    assert told["dp_sgd"].minutes == 0.0
    public, private = (tmp_path / name for name in ("report.html", "private/report.html"))
    assert "1 run without a result" in public.read_text()
    assert "That a run failed is outside every guarantee." in public.read_text()
    assert "2 runs without a result" in private.read_text()
    assert "diverged at record 4711" in private.read_text()
    printed = io.StringIO()
    Console(file=printed, width=120).print(summarise_comparison(comparison), crop=False)
    assert printed.getvalue().count("diverged at record 4711") == 2


def test_the_terminal_shows_the_baseline_and_names_degenerate_models_within_80_columns(tmp_path: Path) -> None:
    cells = cells_of(sweep_of(methods=["dp_sgd"]), folder=Path())
    folder = open_sweep_folder(tmp_path, sweep_of())
    constant = {"majority_accuracy": 0.76, "degenerate": ("predicts 'no' for every record",)}
    for cell, values in zip(cells, (constant, {"majority_accuracy": 0.76}, {}), strict=True):
        row = measured(cell, cell.config.target.epsilon)
        assert row.record is not None
        folder.add(cell, [replace(row, record=replace(row.record, **values))])
    folder.assemble(cells)
    printed = io.StringIO()
    Console(file=printed, width=80).print(summarise_comparison(Comparison(folder=folder, changed=True)), crop=False)
    assert "accuracy of always the most common class: .760" in printed.getvalue()
    named = f"degenerate: dp_sgd on color_digits, seed 0, {cells[0].digest}: predicts 'no' for every record\n"
    assert named in printed.getvalue()


def test_what_is_left_out_does_not_tell_whether_it_failed(tmp_path: Path) -> None:
    pages = []
    for compute in (diverging, priced):
        root = tmp_path / compute.__name__
        write_frontier_reports(run(root, compute, methods=["sgd"], grid={}), title="sweep")
        pages.append((root / "report.html").read_text())
    assert "Left out: 1 row without privacy; for the operator: sgd." in pages[0]
    assert pages[0] == pages[1]


def test_what_an_earlier_version_kept_in_the_open_is_taken_back(tmp_path: Path) -> None:
    sweep = sweep_of(methods=["sgd", "dp_sgd", "pate"], grid={})
    cells = cells_of(sweep, folder=Path())
    for name in ("parts", "failed", "private/parts"):
        (tmp_path / name).mkdir(parents=True)
    cause = replace(measured(cells[0], 1.0), record=None, error="ValueError: record 4711 diverged", has_guarantee=False)
    write_rows([cause], tmp_path / "failed" / f"{cells[0].digest}.parquet")
    write_rows([cause], tmp_path / "results.parquet")
    (tmp_path / "report.html").write_text("record 4711 diverged")
    slow = replace(measured(cells[1], 2.0), minutes=12.34)
    write_rows([slow], tmp_path / "parts" / f"{cells[1].digest}.parquet")
    secret = measured(cells[2], 1.25, data_dependent=True)
    write_rows([measured(cells[2], 2.0)], tmp_path / "parts" / f"{cells[2].digest}.parquet")
    write_rows([secret], tmp_path / "private" / "parts" / f"{cells[2].digest}.parquet", private=True)
    folder = open_sweep_folder(tmp_path, sweep)
    assert not (tmp_path / "report.html").exists()
    assert folder.finished(cells) == {cells[1].digest, cells[2].digest}
    comparison = run(tmp_path, diverging, methods=["sgd", "dp_sgd", "pate"], grid={})
    assert epsilons(comparison.rows) == [2.0, 2.0]
    assert [row.record and row.record.epsilon for row in comparison.operators_rows] == [None, 2.0, 2.0, 1.25]
    assert comparison.operators_rows[1].minutes == 12.34
    for name, content in published_bytes(tmp_path).items():
        assert not any(secret in content for secret in (b"4711", b"12.34")), name


def test_what_is_left_out_is_said_and_the_operators_page_is_marked(tmp_path: Path) -> None:
    comparison = run(tmp_path, unvoted, methods=["sgd", "dp_sgd"], grid={})
    write_frontier_reports(comparison, title="sweep")
    public, private = (tmp_path / name for name in ("report.html", "private/report.html"))
    assert "Do not publish" in private.read_text()
    assert "Do not publish" not in public.read_text()
    assert "Left out: 1 row without privacy; for the operator: sgd." in public.read_text()
    printed = io.StringIO()
    Console(file=printed, width=120).print(summarise_comparison(comparison))
    assert "1 result without privacy: sgd" in printed.getvalue()


def unvoted(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    return [measured(cell, math.inf if cell.method == "sgd" else 2.0)]


def test_pages_that_an_interrupt_left_old_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_frontier_reports(run(tmp_path, counted, grid={}), title="sweep")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("fairpate.app.compare.report.frontier_figures", interrupted)
        write_frontier_reports(run(tmp_path, counted, grid={}, seeds=[0, 1]), title="sweep")
    again = run(tmp_path, counted, grid={}, seeds=[0, 1])
    assert not again.changed
    write_frontier_reports(again, title="sweep")
    for page in (tmp_path / "report.html", tmp_path / "private" / "report.html"):
        assert "2 seeds" in page.read_text()
    written = (tmp_path / "report.html").stat().st_mtime_ns
    write_frontier_reports(again, title="sweep")
    assert (tmp_path / "report.html").stat().st_mtime_ns == written
    by_odds = run(tmp_path, counted, grid={}, seeds=[0, 1], notion="equalized_odds")
    assert not by_odds.changed
    write_frontier_reports(by_odds, title="sweep")
    words = (tmp_path / "report.html").read_text()
    assert words.index(">equalized-odds gap</option>") < words.index(">demographic-parity gap</option>")
    printed = io.StringIO()
    Console(file=printed, width=80).print(summarise_comparison(by_odds), crop=False)
    assert "equalized-" in printed.getvalue()


def test_cells_that_no_node_can_hold_are_refused_before_teachers_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairpate.app.compare.run.collect_shared_votes", refused)
    with pytest.raises(PoolError, match=r"tasks\.num_cpus=1000 .* the cluster has .* CPUs .*ray\.wait_for_nodes_s"):
        run(tmp_path, counted, tasks={"num_cpus": 1000})


def test_nodes_that_come_on_demand_are_waited_for(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"tasks\.num_cpus=1000 .*wait_for_nodes_s, now 1, if"):
        run(tmp_path, counted, tasks={"num_cpus": 1000}, ray={"wait_for_nodes_s": 1})
    assert ran(tmp_path) == []


def test_two_drivers_do_not_share_a_folder_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    sweep = sweep_of()
    folder = open_sweep_folder(tmp_path / "sweep", sweep)
    with sole_driver(folder, sweep), pytest.raises(RunDirectoryError, match="another `fairpate compare` works here"):
        run(tmp_path / "sweep", counted)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match="not empty and no sweep"):
        run(tmp_path / "other", counted)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Comparison:
    root = tmp_path_factory.mktemp("sweep")
    methods = dict.fromkeys(["sgd", "dp_sgd", "pate", "fairpate"]) | SF_PATE
    return run(root, None, methods=methods, grid={"target.epsilon": [2]}, seeds=[1])


def test_teachers_and_votes_are_shared(trained: Comparison) -> None:
    assert not trained.failed
    folder = trained.folder
    assert len(list(folder.votes.iterdir())) == 1
    # Eight teachers in one block of stacked ones, or in two of looped ones, whatever the number of methods.
    assert len(list(folder.teachers.iterdir())) <= 2
    assert [path.parts[-3].split("-")[0] for path in folder.root.glob("runs/*/private/teachers")] == ["sf_pate"]
    assert {(row.method, row.seed) for row in trained.rows} == {
        (method, 1) for method in ("dp_sgd", "pate", "fairpate", "sf_pate")
    }
    assert sum(row.is_private for row in trained.operators_rows) == 3
    assert sum(row.is_unprotected for row in trained.operators_rows) == 1


@pytest.mark.parametrize("method", ["dp_sgd", "fairpate", "sf_pate"])
def test_a_cell_is_what_the_run_command_computes(method: str, trained: Comparison, tmp_path: Path) -> None:
    row = next(row for row in trained.rows if (row.method, row.seed) == (method, 1))
    methods = SF_PATE if method == "sf_pate" else {method: None}
    sweep = sweep_of(methods=methods, grid={"target.epsilon": [2]}, seeds=[1])
    (cell,) = cells_of(sweep, folder=Path())
    assert cell.digest == row.digest
    alone = run_method(cell.config.model_copy(update={"out": tmp_path / "alone"}), Reporter(quiet=True))
    record = json.loads(alone.record.read_text())
    assert row.record is not None
    for field in ("epsilon", "accuracy", "disparity", "coverage", "unit", "relation", "delta"):
        assert getattr(row.record, field) == record[field], field


def test_votes_that_cannot_be_had_fail_the_cells_that_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no teacher came")

    monkeypatch.setattr("fairpate.app.compare.votes.collect_vote_batch", refused)
    comparison = run(tmp_path, counted, methods=["dp_sgd", "pate"], grid={})
    assert [(row.method, row.error) for row in comparison.rows] == [("dp_sgd", ""), ("pate", "failed")]
    assert [row.error for row in comparison.failed] == ["RuntimeError: no teacher came"]


def test_a_cell_needs_no_ray_and_clears_what_a_dead_worker_began(tmp_path: Path) -> None:
    (cell,) = cells_of(sweep_of(grid={"target.epsilon": [2]}), folder=Path())
    (tmp_path / "runs" / "cell").mkdir(parents=True)
    (tmp_path / "runs" / "cell" / ".config.yaml.1.tmp").touch()
    (row,) = run_cell(cell, tmp_path / "runs" / "cell", None)
    assert row.record is not None
    assert row.record.epsilon <= 2
    assert row.minutes > 0
    assert "out" not in row.config


def test_a_folder_that_got_votes_is_that_of_the_run_whose_weights_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(config: Method, *_: object, **__: object) -> None:
        check_run_directory(with_pinned_weights(config))
        raise KeyboardInterrupt

    (tmp_path / "weights.pth").write_bytes(b"weights")
    monkeypatch.setattr("fairpate.nn.weights.imagenet_file", lambda _: tmp_path / "weights.pth")
    monkeypatch.setattr("fairpate.app.compare.run.run_method", begun)
    student = {"student.model": {"name": "resnet18", "weights": "imagenet"}}
    (cell,) = cells_of(sweep_of(methods=["pate"], grid={}, settings=SMALL | student), folder=Path())
    votes = VoteBatch(
        record_ids=("0",), groups_Q=np.zeros(1, dtype=np.int64), votes_QC=np.eye(1, 10, dtype=np.int64), ensemble="e"
    )
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path / "cell", votes)
    assert hashlib.sha256(b"weights").hexdigest() in (tmp_path / "cell" / "config.yaml").read_text()


def test_progress_is_a_table_on_a_terminal_and_lines_in_a_log() -> None:
    cells = cells_of(sweep_of(), folder=Path())
    failure = Row(
        digest=cells[1].digest,
        method="dp_sgd",
        data="color_digits",
        seed=0,
        config={},
        command="",
        minutes=math.nan,
        error="ValueError: [no] room",
    )
    outputs = {}
    for terminal in (True, False):
        file = io.StringIO()
        table = SweepTable(cells, {cells[2].digest}, Console(file=file, force_terminal=terminal, width=100))
        with table.shown():
            table.add(cells[0], measured(cells[0], 1.0))
            table.add(cells[1], failure)
        assert (table.done, table.failed, table.total) == (3, 1, 3)
        outputs[terminal] = file.getvalue()
    assert "3 of 3 cells" in outputs[True]
    lines = outputs[False].splitlines()
    assert lines[0] == "3 cells, 1 of them finished before"
    assert lines[1].startswith("2/3 dp_sgd on color_digits, seed 0")
    assert lines[2].endswith("failed: ValueError: [no] room")


def test_the_folder_names_a_run_by_its_cell(tmp_path: Path) -> None:
    (cell, *_) = cells_of(sweep_of(), folder=Path())
    assert SweepFolder(root=tmp_path).run(cell).name == f"dp_sgd-color_digits-{cell.digest}"


def test_a_table_of_ones_own_is_compared(tmp_path: Path) -> None:
    """Workers read its declaration from JSON, as every cell's configuration."""
    rows = [f"{i},{20 + i % 60},{'FM'[i % 2]},{'yes' if i % 60 > 30 else 'no'}" for i in range(400)]
    (tmp_path / "clinic.csv").write_text("\n".join(["id,age,sex,y", *rows]) + "\n", encoding="utf-8")
    (tmp_path / "clinic.yaml").write_text(
        "name: clinic\nfiles: {records: clinic.csv}\nlabel: {column: y, classes: ['no', 'yes']}\n"
        "group: {column: sex, values: [F, M]}\nidentity: {key: id}\nfeatures: {age: {bounds: [18, 80]}}\n",
        encoding="utf-8",
    )
    sizes = {"data.num_public": 100, "data.num_validation": 0, "data.num_test": 100}
    settings = {"data.declaration": str(tmp_path / "clinic.yaml"), **sizes}
    compared = run(tmp_path / "sweep", None, data_sets={"clinic": {"settings": settings}}, grid={"target.epsilon": [3]})
    (row,) = compared.rows
    assert row.record is not None
    assert row.data == "clinic"
