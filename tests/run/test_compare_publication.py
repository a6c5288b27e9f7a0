"""Of a sweep, who may see what: results, causes of failures and times, and pages of both kinds."""

import io
import json
import math
import stat
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from sweeps import COLOUR_UNSEEN, counted, epsilons, measured, refused
from sweeps import run as run_sweep

from fairpate.report.frontier import Row
from fairpate.run.compare import comparison_outcome, write_frontier_reports
from fairpate.run.sweep import Cell, read_rows
from fairpate.types import VoteBatch

pytestmark = pytest.mark.usefixtures("light_runs")

run = partial(run_sweep, ray={"num_actors": 0})
"""In this process: what is published does not depend on where a cell ran."""


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their letters are most of the time of a page."""
    monkeypatch.setattr("fairpate.run.compare.frontier_figures", lambda _: {})


def priced(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    if cell.method == "sgd":
        return [measured(cell, math.inf)]
    return [measured(cell, 2.0), measured(cell, 1.25, data_dependent=True)]


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


def test_why_a_run_failed_and_how_long_one_took_are_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(  # what is drawn, which the compressed letters of a picture hide
        "fairpate.run.compare.frontier_figures", lambda points: {"slices.txt": repr(points).encode()}
    )
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
    Console(file=printed, width=120).print(comparison_outcome(comparison).words, crop=False)
    assert printed.getvalue().count("diverged at record 4711") == 2


@pytest.mark.usefixtures("without_figures")
def test_what_is_left_out_does_not_tell_whether_it_failed(tmp_path: Path) -> None:
    pages = []
    for compute in (diverging, priced):
        root = tmp_path / compute.__name__
        write_frontier_reports(run(root, compute, methods=["sgd"], grid={}), title="sweep")
        pages.append((root / "report.html").read_text())
    assert "Left out: 1 row without privacy, which the operator’s page shows: sgd." in pages[0]
    assert pages[0] == pages[1]


@pytest.mark.usefixtures("without_figures")
def test_what_is_left_out_is_said_and_the_operators_page_is_marked(tmp_path: Path) -> None:
    comparison = run(tmp_path, unvoted, methods=["sgd", "dp_sgd"], grid={})
    write_frontier_reports(comparison, title="sweep")
    public, private = (tmp_path / name for name in ("report.html", "private/report.html"))
    assert "Do not publish" in private.read_text()
    assert "Do not publish" not in public.read_text()
    assert "Left out: 1 row without privacy, which the operator’s page shows: sgd." in public.read_text()
    printed = io.StringIO()
    Console(file=printed, width=120).print(comparison_outcome(comparison).words)
    assert "1 result without privacy: sgd" in printed.getvalue()


def unvoted(cell: Cell, out: Path, votes: VoteBatch | None, torch_threads: int) -> list[Row]:
    return [measured(cell, math.inf if cell.method == "sgd" else 2.0)]


@pytest.mark.usefixtures("without_figures")
def test_pages_that_an_interrupt_left_old_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_frontier_reports(run(tmp_path, counted, grid={}), title="sweep")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("fairpate.run.compare.frontier_figures", interrupted)
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
    Console(file=printed, width=80).print(comparison_outcome(by_odds).words, crop=False)
    assert "equalized-" in printed.getvalue()
