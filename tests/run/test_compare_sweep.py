"""The sweep: what runs, what is kept and what is found again."""

import hashlib
import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml
from rich.console import Console
from sweeps import COLOUR_UNSEEN, SMALL, counted, measured, ran, refused, run, sweep_of

from fairpate.methods.base import Method
from fairpate.releases.directory import RunDirectoryError, read_json, sole_worker
from fairpate.report.frontier import Row
from fairpate.run.compare import Comparison, compare, comparison_outcome, run_cell
from fairpate.run.folder import check_run_directory
from fairpate.run.run import run_method, with_pinned_weights
from fairpate.run.sweep import Cell, SweepFolder, cells_of, open_sweep_folder, read_rows
from fairpate.terminal import Reporter
from fairpate.types import VoteBatch, strict
from teachers.work import PoolError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import this module
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("ray_session"),
]
SF_PATE = {"sf_pate": COLOUR_UNSEEN}


def test_only_what_is_missing_runs(tmp_path: Path) -> None:
    first = run(tmp_path, counted)
    assert [row.record and row.record.epsilon for row in first.rows] == [1, 2, 3]
    assert sorted(ran(tmp_path)) == sorted(row.digest for row in first.rows)
    again = run(tmp_path, counted)
    assert not again.changed
    assert strict(again.rows) == strict(first.rows)
    wider = run(tmp_path, counted, grid={"target.epsilon": [3, 4]}, seeds=[0, 1])
    assert [(row.seed, row.record and row.record.epsilon) for row in wider.rows] == [(0, 3), (0, 4), (1, 3), (1, 4)]
    assert len(ran(tmp_path)) == 3 + 3
    back = run(tmp_path, counted)
    assert back.changed
    assert strict(back.rows) == strict(first.rows)
    assert len(ran(tmp_path)) == 6


def test_the_command_of_a_failed_cell_is_printed_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "private" / "parts").mkdir(parents=True)
    (tmp_path / "trouble").touch()
    troubled = run(tmp_path, counted)
    printed = io.StringIO()
    Console(file=printed, width=80).print(comparison_outcome(troubled).words, crop=False)
    (failure,) = troubled.failed
    assert len(failure.command) > 80
    assert f"failed: {failure.command}\n" in printed.getvalue()
    told = comparison_outcome(troubled)
    assert (told.code, told.failure) == (1, "1 run failed; the same command tries them again.")
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
    assert read_json(troubled.folder.work) == {"cells_done": 2, "cells_failed": 1}
    (tmp_path / "trouble").unlink()
    mended = run(tmp_path, counted)
    assert not mended.failed
    assert read_json(mended.folder.work) == {"cells_done": 1}
    assert len(ran(tmp_path)) == 4
    assert not list(mended.folder.failed.iterdir())


def test_without_actors_cells_run_in_this_process(tmp_path: Path) -> None:
    began: list[Path] = []

    def here(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
        began.append(out)
        return counted(cell, out, votes, torch_threads)

    (tmp_path / "private" / "parts").mkdir(parents=True)
    (tmp_path / "trouble").touch()
    comparison = run(tmp_path, here, ray={"num_actors": 0})
    assert len(began) == 3
    assert [row.status for row in comparison.rows] == ["ok", "failed", "ok"]
    assert comparison.failed[0].error == "ValueError: epsilon 2 is not for us"


def hanging(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.config.target.epsilon == 2:
        time.sleep(600)
    return [measured(cell, cell.config.target.epsilon)]


def test_a_cell_that_hangs_ends_with_its_cause_and_the_next_one_has_its_own_time(tmp_path: Path) -> None:
    ended = run(tmp_path, hanging, tasks={"num_cpus": 1, "max_retries": 0, "max_minutes": 0.02})
    assert [row.status for row in ended.rows] == ["ok", "failed", "ok"]
    (failure,) = ended.failed
    assert failure.error == (
        "CellTimeoutError: this run took longer than tasks.max_minutes=0.02; raise this limit, or lower the "
        "number of epochs."
    )


def dying(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.config.target.epsilon == 2:
        os._exit(1)
    return [measured(cell, cell.config.target.epsilon)]


def test_a_worker_that_dies_is_a_cause(tmp_path: Path) -> None:
    comparison = run(tmp_path, dying)
    assert [row.status for row in comparison.rows] == ["ok", "failed", "ok"]
    assert "WorkerCrashedError" in comparison.failed[0].error


def last_hangs(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.config.target.epsilon == 3:
        time.sleep(600)
    return counted(cell, out, votes, torch_threads)


@pytest.mark.slow
def test_an_interrupt_loses_no_finished_cell_and_stops_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SweepFolder.add

    def interrupted(self: SweepFolder, cell: Cell, rows: list[Row]) -> None:
        add(self, cell, rows)
        if len([*self.parts.iterdir()]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(SweepFolder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, last_hangs, tasks={"num_cpus": 2})
    finished = {row.digest for row in read_rows(tmp_path / "results.parquet")}
    assert len(finished) == 2
    monkeypatch.setattr(SweepFolder, "add", add)
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


def test_the_terminal_shows_the_baseline_and_names_degenerate_models_within_80_columns(tmp_path: Path) -> None:
    cells = cells_of(sweep_of(methods=["dp_sgd"]), folder=Path())
    folder = open_sweep_folder(tmp_path, sweep_of())
    constant = {"majority_accuracy": 0.76, "degenerate": ("predicts 'no' for every record",)}
    levelled = {"majority_accuracy": 0.76, "underserved_groups": ("red",)}
    for cell, values in zip(cells, (constant, levelled, {}), strict=True):
        row = measured(cell, cell.config.target.epsilon)
        assert row.record is not None
        folder.add(cell, [replace(row, record=replace(row.record, **values))])
    folder.assemble(cells)
    printed = io.StringIO()
    outcome = comparison_outcome(Comparison(folder=folder, changed=True))
    Console(file=printed, width=80).print(outcome.words, crop=False)
    assert "dp_sgd on color_digits: Served worse than by a constant: red (in 1 of 3 runs).\n" in printed.getvalue()
    assert outcome.facts["data_sets"][0]["methods"][0]["underserved_groups"] == {"red": 1}
    assert "accuracy of always the most common class: .760" in printed.getvalue()
    named = f"degenerate: dp_sgd on color_digits, seed 0, {cells[0].digest}: predicts 'no' for every record\n"
    assert named in printed.getvalue()


def test_cells_that_no_node_can_hold_are_refused_before_teachers_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairpate.run.compare.collect_shared_votes", refused)
    with pytest.raises(PoolError, match=r"tasks\.num_cpus=1000 .* the cluster has .* CPUs .*ray\.wait_for_nodes_s"):
        run(tmp_path, counted, tasks={"num_cpus": 1000})


def test_nodes_that_come_on_demand_are_waited_for(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"tasks\.num_cpus=1000 .*wait_for_nodes_s, now 1"):
        run(tmp_path, counted, tasks={"num_cpus": 1000}, ray={"wait_for_nodes_s": 1})
    with pytest.raises(PoolError, match=r"tasks\.num_cpus=1000 .*wait_for_nodes_s, now 1"):  # for a shared release
        run(
            tmp_path / "releases",
            counted,
            methods=["record_votes"],
            tasks={"num_cpus": 1000},
            ray={"wait_for_nodes_s": 1},
        )
    assert ran(tmp_path) == []


def test_two_drivers_do_not_share_a_folder_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    sweep = sweep_of()
    folder = open_sweep_folder(tmp_path / "sweep", sweep)
    with (
        sole_worker(folder.root, "fairpate compare"),
        pytest.raises(RunDirectoryError, match="another `fairpate compare` is running in this folder"),
    ):
        run(tmp_path / "sweep", counted)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match="not empty and holds no comparison"):
        run(tmp_path / "other", counted)
    (tmp_path / "stopped" / "private").mkdir(parents=True)  # by a crash before the first table
    assert open_sweep_folder(tmp_path / "stopped", sweep).parts.is_dir()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Comparison:
    root = tmp_path_factory.mktemp("sweep")
    methods = dict.fromkeys(["sgd", "dp_sgd", "pate", "fairpate"]) | SF_PATE
    return run(root, None, methods=methods, grid={"target.epsilon": [2]}, seeds=[1])


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_votes_that_cannot_be_had_fail_the_cells_that_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no teacher came")

    monkeypatch.setattr("fairpate.methods.pate.PateFamily.collect_votes", refused)
    comparison = run(tmp_path, counted, methods=["dp_sgd", "pate"], grid={}, ray={"num_actors": 0})
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
    monkeypatch.setattr("fairpate.nn.models.imagenet_file", lambda _: tmp_path / "weights.pth")
    monkeypatch.setattr("fairpate.run.compare.run_method", begun)
    student = {"student.model": "resnet18", "backbone.weights": "imagenet"}
    (cell,) = cells_of(sweep_of(methods=["pate"], grid={}, settings=SMALL | student), folder=Path())
    votes = VoteBatch(
        record_ids=("0",), groups_Q=np.zeros(1, dtype=np.int64), votes_QC=np.eye(1, 10, dtype=np.int64), ensemble="e"
    )
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, tmp_path / "cell", votes)
    assert hashlib.sha256(b"weights").hexdigest() in (tmp_path / "cell" / "config.yaml").read_text()


def test_a_log_counts_what_was_found_and_names_each_failure_in_one_line(tmp_path: Path) -> None:
    sweep, log = sweep_of(), io.StringIO()
    cells = cells_of(sweep, folder=Path())
    folder = open_sweep_folder(tmp_path, sweep)
    folder.add(cells[2], [measured(cells[2], 3.0)])
    (tmp_path / "trouble").touch()
    compare(sweep, cells, tmp_path, Reporter(Console(file=log, width=60)), compute=counted)
    lines = [line.split(maxsplit=1) for line in log.getvalue().splitlines()]
    assert ["runs", "3, 1 of them finished before"] in lines
    (failure,) = (words for name, words in lines if name == "failed")
    assert failure.startswith("dp_sgd on color_digits, seed 0, ")
    assert failure.endswith(": ValueError: epsilon 2 is not for us")


def test_the_folder_names_a_run_by_its_cell(tmp_path: Path) -> None:
    (cell, *_) = cells_of(sweep_of(), folder=Path())
    assert SweepFolder(root=tmp_path).run(cell).name == f"dp_sgd-color_digits-{cell.digest}"


def test_a_table_of_ones_own_is_compared(tmp_path: Path) -> None:
    """Workers read its declaration from JSON, as every cell's configuration."""
    rows = [f"{i},{20 + i % 60},{'FM'[i % 2]},{'yes' if i % 60 > 30 else 'no'}" for i in range(400)]
    (tmp_path / "clinic.csv").write_text("\n".join(["id,age,sex,y", *rows]) + "\n", encoding="utf-8")
    (tmp_path / "clinic.yaml").write_text(
        "name: clinic\nrows: 400\nfiles: {records: clinic.csv}\nlabel: {column: y, classes: ['no', 'yes']}\n"
        "group: {column: sex, values: [F, M]}\nidentity: {key: id}\nfeatures: {age: {bounds: [18, 80]}}\n",
        encoding="utf-8",
    )
    sizes = {"data.num_public": 100, "data.num_validation": 0, "data.num_test": 100}
    settings = {"data.declaration": str(tmp_path / "clinic.yaml"), **sizes}
    compared = run(tmp_path / "sweep", None, data_sets={"clinic": {"settings": settings}}, grid={"target.epsilon": [3]})
    (row,) = compared.rows
    assert row.record is not None
    assert row.data == "clinic"


@pytest.mark.slow
def test_a_comparison_of_the_examples_reads_embedded_data_alone(
    fairpate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAIRPATE_DATA", raising=False)
    monkeypatch.setattr("fairpate.run.compare.frontier_figures", lambda _: {})  # drawn in tests/report
    small = ["methods=[dp_sgd]", "seeds=[0]", "data_sets.color_digits.grid={}", "data_sets.loans.grid={}"]
    small += [f"data_sets.{name}.settings.dp_sgd.epochs=1" for name in ("color_digits", "loans")]
    settings = [word for setting in small for word in ("--set", setting)]
    code, output, errors = fairpate("compare", "--example", "quick", *settings, "--out", "out")
    assert code == 0, errors
    assert "color_digits" in output
    sweep = yaml.safe_load((tmp_path / "out" / "sweep.yaml").read_text(encoding="utf-8"))
    assert [*sweep["data_sets"]] == ["color_digits", "loans"]
