"""`fairpate compare --figures`: vector pictures of a table of results, in a journal's width, font size and fonts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import pytest

from fairpate.report.figures import COLOURS
from fairpate.report.frontier import Row, points_of
from fairpate.report.paper_figures import FigureStyle, frontier_figures
from fairpate.run.compare import write_figures
from fairpate.run.sweep import write_rows
from fairpate.types import RunRecord, UsageError

pytestmark = pytest.mark.usefixtures("light_runs")


def row(method, epsilon, seed, **changes):
    config = {"method": method, "target": {"epsilon": epsilon}, "noise": "seeded"}
    fields = {
        "unit": "record",
        "relation": "add or remove one",
        "delta": 1e-5,
        "epsilon": epsilon,
        "epsilon_is_data_dependent": False,
        "accuracy": 0.7 + 0.02 * epsilon + 0.001 * seed,
        "coverage": 0.8 if method == "fairpate" else 1.0,
        "disparity": 0.01 if method == "fairpate" else 0.15,
    }
    identity = {"method": method, "data": "adult", "seed": seed, "config": config}
    record = RunRecord(**identity, **(fields | changes))
    return Row(digest=f"{method}{epsilon}{seed}", command="fairpate run", minutes=math.nan, record=record, **identity)


def table_in(root, folder="sweep", *, private=False, more=()):
    place = root / folder / "results.parquet"
    place.parent.mkdir(parents=True)
    rows = [row(m, e, s) for m in ("fairpate", "dp_sgd") for e in (1.0, 3.0) for s in (0, 1)]
    private = private or folder == "private"
    write_rows([*rows, row("sgd", math.inf, 0, accuracy=0.9), *more], place, private=private)
    return place


@pytest.fixture
def table(tmp_path):
    return partial(table_in, tmp_path)


def drawn(place):
    """The points that pictures of a table are drawn of."""
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fairpate.run.compare.frontier_figures", lambda points, _: asked.extend(points) or {})
        write_figures(place, style=FigureStyle())
    return {(point.method, point.epsilon_is_data_dependent, point.settings["target.epsilon"]) for point in asked}


PROTECTED = {(method, False, epsilon) for method in ("fairpate", "dp_sgd") for epsilon in (1.0, 3.0)}


def test_pictures_are_as_wide_as_a_column_with_one_font_size_that_is_embedded(table):
    written = write_figures(table(), style=FigureStyle(columns=1, font_size=7, formats=("pdf", "svg")))
    assert {path.name.partition("-")[0] for path in written} == {"slices", "attainment"}
    assert len(written) == 2 * 2
    for path in (path for path in written if path.suffix == ".pdf"):
        content = path.read_bytes()
        _, _, width, _ = re.search(rb"/MediaBox \[(\S+) (\S+) (\S+) (\S+)\]", content).groups()
        assert float(width) == pytest.approx(85 / 25.4 * 72, abs=1)
        assert b"/FontFile2" in content, "TrueType"
        assert b"/Type3" not in content
        assert b"/Subtype /Image" not in content, "vector"
    slices = next(path for path in written if path.name.startswith("slices") and path.suffix == ".svg").read_text()
    assert set(re.findall(r'font-size="([^"]*)"', slices)) == {"7px"}
    assert "<image" not in slices
    for place in (0, 2, 6):  # fairpate, dp_sgd and sgd, as on the page
        assert COLOURS[place] in slices
    assert COLOURS[4] not in slices


@pytest.mark.slow
def test_two_columns_and_the_same_file_every_time(table):
    style = FigureStyle(columns=2, formats=("svg",))
    place = table()
    first = [path.read_text() for path in write_figures(place, style=style)]
    again = [path.read_text() for path in write_figures(place.parent, style=style)]
    assert first == again
    widths = [float(re.search(r'<svg [^>]*width="([0-9.]+)pt"', text).group(1)) for text in first]
    assert max(widths) == pytest.approx(178 / 25.4 * 72, abs=1)


def test_of_an_operators_table_nothing_is_drawn_that_may_not_be_published(table):
    dependent = [row("fairpate", 0.4, seed, epsilon_is_data_dependent=True) for seed in (0, 1)]
    assert drawn(table("private", more=dependent)) == PROTECTED
    assert drawn(table("open")) == PROTECTED | {("sgd", False, None)}


@pytest.mark.parametrize(
    "told",
    [
        {"minutes": 2.0},
        {"record": None, "error": "ValueError: one private value"},
        {"record": replace(row("fairpate", 3.0, 1).record, epsilon_is_data_dependent=True)},
    ],
)
def test_an_operators_table_is_known_by_what_it_tells_wherever_it_was_copied(table, told):
    copied = table("copied", private=True, more=[replace(row("fairpate", 3.0, 1), **told)])
    assert drawn(copied) == PROTECTED


def test_the_command_says_what_it_wrote_and_what_it_cannot_draw(table, fairpate, tmp_path, monkeypatch):
    monkeypatch.setattr("fairpate.report.paper_figures._pictures", lambda *given: {given[-1].formats[0]: b""})
    place = table()
    code, output, _ = fairpate("compare", place, "--format", "pdf", "--width-mm", "120", "--figures", "here")
    assert code == 0
    assert output.split() == [
        f"here/{name}-adult-record-add-or-remove-one-1e-05.pdf" for name in ("slices", "attainment")
    ]
    assert all((tmp_path / name).exists() for name in output.split())
    for wrong, words in (
        (["--columns", "3"], "--columns: expected <= 2, got '3'"),
        (["--font-size", "0"], "--font-size: expected >= 4, got '0'"),
        (["--format", "gif"], "format: expected pdf, svg, png, got 'gif'"),
        (["--notion", "acuracy_parity"], "did you mean accuracy_parity?"),
        (["--width-mm", "nan"], "width"),
    ):
        code, _, errors = fairpate("compare", place, "--figures", "here", *wrong)
        assert (code, words in errors) == (2, True), errors
    code, _, errors = fairpate("compare", tmp_path / "nowhere", "--figures", "here")
    assert (code, "nowhere not found" in errors and "results.parquet" in errors) == (2, True), errors


def test_data_sets_whose_names_read_alike_have_files_of_their_own(monkeypatch):
    monkeypatch.setattr("fairpate.report.paper_figures._pictures", lambda *given: {given[-1].formats[0]: b""})
    records = [replace(row("dp_sgd", 1.0, 0).record, data=data) for data in ("my data", "my-data", "My_Data", "é")]
    assert len(frontier_figures(points_of(records), FigureStyle(formats=("png",)))) == 4 * 2


def test_a_table_without_anything_to_publish_is_refused(tmp_path):
    place = tmp_path / "results.parquet"
    write_rows([], place)
    with pytest.raises(UsageError, match="no finished run"):
        write_figures(place, style=FigureStyle())
