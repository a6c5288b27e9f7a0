"""What runs, estimators and comparisons show of themselves in a notebook: small, escaped, readable in any theme."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import sklearn
from browser import faults, opened_tab
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fairpate.estimators import FairClassifier
from fairpate.report.frontier import Row
from fairpate.run.compare import Comparison
from fairpate.run.folder import open_run_directory
from fairpate.run.sweep import SweepFolder, write_rows
from fairpate.types import RunRecord

pytestmark = pytest.mark.usefixtures("light_runs")

HOSTILE = "<img src=x onerror=alert(1)>"


def row(method, accuracy, disparity, seed, **changes):
    identity = {"method": method, "data": "adult", "seed": seed, "config": {"method": method}}
    fields = {"unit": "record", "relation": "add or remove one", "delta": 1e-5, "epsilon": 1.0, "coverage": 1.0}
    fields |= {"epsilon_is_data_dependent": False, "accuracy": accuracy, "disparity": disparity}
    record = RunRecord(**identity, **(fields | changes))
    return Row(digest=f"{method}{seed}", command="fairpate run", minutes=math.nan, record=record, **identity)


@pytest.fixture
def comparison(tmp_path):
    """Two methods, three seeds: means .85 and .80, standard errors .003; gaps .007 and .11."""
    rows = [row("dp_sgd", 0.845 + 0.005 * s, 0.006 + 0.001 * s, s) for s in (0, 1, 2)]
    rows += [row("pate", 0.795 + 0.005 * s, 0.10 + 0.01 * s, s) for s in (0, 1, 2)]
    write_rows(
        [replace(r, data=HOSTILE, record=replace(r.record, data=HOSTILE)) for r in rows], tmp_path / "results.parquet"
    )
    return Comparison(folder=SweepFolder(root=tmp_path), changed=False)


@pytest.fixture(scope="module")
def fitted():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 3))
    y = (x[:, 0] > 0).astype(int)
    settings = {"noise": "seeded", "dp_sgd": {"epochs": 1, "batch_size": 60}, "random_state": 0}
    return FairClassifier("dp_sgd", epsilon=1.0, num_records=120, **settings).fit(x, y), x, y, settings


def test_a_run_shows_its_guarantee_its_measures_and_where_its_files_are(finished):
    run, _ = finished
    shown = run._repr_html_()
    metrics, statement = json.loads(run.metrics.read_text()), json.loads(run.statement.read_text())
    assert "fairpate on color_digits, seed 0" in shown
    assert f"{math.ceil(100 * statement['epsilon']) / 100:.2f} at delta 10⁻⁵, per record, add or remove one" in shown
    assert "Its noise: seeded: not private. Nothing is bounded." in shown
    assert f"{100 * metrics['accuracy']:.1f}\u00a0% of {metrics['num_answered']} test records" in shown
    gap = metrics["gaps"]["dp_one_vs_rest"]
    assert f"{gap['value']:.3f}, with 95\u00a0% confidence {gap['low']:.3f} to {gap['high']:.3f}" in shown
    assert f"{100 * metrics['coverage']:.1f}\u00a0%" in shown
    assert f"fairpate card {run.root}" in shown
    assert str(run.statement) in shown
    assert "private/" not in shown.replace(str(run.root), "")
    assert len(shown) < 8_000


def test_what_a_run_means_is_said_where_its_noise_is_fresh(finished, tmp_path):
    shutil.copytree(finished[0].root, tmp_path / "run")
    run = open_run_directory(tmp_path / "run")[0]
    statement = json.loads(run.statement.read_text()) | {"noise": "os_entropy", "epsilon": 1.0, "remarks": [HOSTILE]}
    run.statement.write_text(json.dumps(statement))
    shown = run._repr_html_()
    assert "is right at most 73.2\u00a0% of the time" in shown  # e / (e + 1)
    assert HOSTILE not in shown
    assert "&lt;img" in shown
    assert "1 remark" in shown


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_run_without_results_says_so(finished, tmp_path, damage):
    shutil.copytree(finished[0].root, tmp_path / "run")
    run = open_run_directory(tmp_path / "run")[0]
    run.metrics.unlink() if damage == "missing" else run.metrics.write_text("{")
    assert "No published result" in run._repr_html_()


@pytest.mark.parametrize("place", ["metrics", "record", "statement"])
@pytest.mark.parametrize("content", ["{}", "[]", "\0"])
def test_files_that_hold_something_else_end_no_cell(finished, tmp_path, place, content):
    shutil.copytree(finished[0].root, tmp_path / "run")
    run = open_run_directory(tmp_path / "run")[0]
    getattr(run, place).write_text(content)
    assert "No published result" in run._repr_html_()


def test_a_statement_with_values_of_other_types_ends_no_cell(finished, tmp_path):
    shutil.copytree(finished[0].root, tmp_path / "run")
    run = open_run_directory(tmp_path / "run")[0]
    values = json.loads(run.statement.read_text())
    for wrong in ({"epsilon": "<b>"}, {"noise": None}):
        run.statement.write_text(json.dumps(values | wrong))
        assert "No published result" in run._repr_html_()


def test_an_estimator_shows_its_guarantee_above_scikit_learns_diagram(fitted):
    model, *_ = fitted
    bundle = model._repr_mimebundle_()
    assert "1.00 at delta 10⁻⁵, per record, add or remove one" in bundle["text/html"]
    assert "sk-" in bundle["text/html"]
    assert ".statement()" in bundle["text/html"]
    assert bundle["text/plain"] == repr(model)
    assert "Statement" in model._repr_html_()
    unfitted = FairClassifier("dp_sgd", epsilon=1.0)
    assert "at delta" not in unfitted._repr_html_()
    with sklearn.config_context(display="text"):
        assert set(model._repr_mimebundle_()) == {"text/plain"}
        assert not hasattr(model, "_repr_html_")


def test_in_a_pipeline_scikit_learns_own_diagram_stays(fitted):
    _, x, y, settings = fitted
    shown = make_pipeline(StandardScaler(), FairClassifier("dp_sgd", epsilon=1.0, **settings)).fit(x, y)._repr_html_()
    assert "StandardScaler" in shown
    assert "FairClassifier" in shown
    assert "at delta" not in shown


def test_a_model_without_privacy_offers_no_card(fitted):
    _, x, y, _ = fitted
    shown = FairClassifier("sgd", sgd={"epochs": 1}).fit(x, y)._repr_html_()
    assert "none: no guarantee" in shown
    assert ".card(" not in shown


def test_files_are_named_as_they_are_reached_from_here(comparison, tmp_path, monkeypatch):
    assert str(tmp_path / "report.html") in comparison._repr_html_()
    monkeypatch.chdir(tmp_path)
    shown = comparison._repr_html_()
    assert ">report.html<" in shown
    assert ">fairpate compare . --figures paper<" in shown
    assert str(tmp_path) not in shown


def test_a_comparison_shows_its_sentences_and_one_picture(comparison):
    shown = comparison._repr_html_()
    assert "The highest mean accuracy is dp_sgd’s, 85.0\u00a0%." in shown
    assert "2 configurations, 6 runs" in shown
    assert "--figures paper" in shown
    assert shown.count("data:image/png;base64,") == 1
    assert len(shown) < 500_000
    assert "<script" not in shown
    assert HOSTILE not in shown


def test_nothing_of_the_operators_table_is_shown(comparison, tmp_path):
    secret = row("fairpate", 0.99, 0.0, 0, epsilon=0.01, epsilon_is_data_dependent=True)
    (tmp_path / "private").mkdir()
    write_rows([secret], tmp_path / "private" / "results.parquet", private=True)
    assert "fairpate is" not in comparison._repr_html_()
    assert "99.0" not in comparison._repr_html_()


@pytest.mark.slow
def test_all_of_it_reads_in_light_and_dark_and_on_a_phone(comparison, finished, fitted, tmp_path):
    parts = [comparison._repr_html_(), finished[0]._repr_html_(), fitted[0]._repr_html_()]
    with opened_tab(tmp_path / "profile") as tab:
        for ground, ink in (("#ffffff", "rgb(17, 17, 17)"), ("#111111", "rgb(238, 238, 238)")):
            page = tmp_path / "notebook.html"
            head = '<!doctype html><html data-drawn="1"><meta charset="utf-8">'
            head += '<meta name="viewport" content="width=device-width">'
            body = f'<body style="background:{ground};color:{ink}">{"".join(parts)}</body></html>'
            page.write_text(f"{head}{body}", encoding="utf-8")
            for width in (1280, 390):
                tab.open(page.as_uri(), width=width, height=900)
                every = "[...document.querySelectorAll('.fairpate, .fairpate *')]"
                assert tab.run(f"[...new Set({every}.map(e => getComputedStyle(e).color))]") == [ink]
                assert tab.run(f"{every}.filter(e => e.getBoundingClientRect().right > innerWidth).length") == 0
                assert tab.run("[...document.querySelectorAll('.fairpate img')].every(i => i.naturalWidth > 500)")
                assert faults(tab) == []
