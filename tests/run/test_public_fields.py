"""Every file and field that small runs publish, against a list: a new one has to be considered before it is published.

What belongs on the list: what the statement of the run covers (released labels, the student, the statement itself),
metrics on test records, which are outside the guarantee and say so, and public settings. What does not: run times,
messages, paths, machines, and counts of private records.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from small_runs import read_json

from fairpate.config import SweepConfig, parse_config
from fairpate.fairness.rates import NOTIONS
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory
from fairpate.report.frontier_page import FrontierReport
from fairpate.report.records import AnsweredQueries, Guarantee, PublicReport, RunStatement
from fairpate.run.compare import Comparison, run_cell, write_frontier_reports
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.run.sweep import cells_of, open_sweep_folder, write_rows
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

GROUPS = {"name", "num_records", "num_answered", "coverage", "accuracy"}
GAP = {"value", "low", "high", "level", "n_undefined", "min_cell_size", "where", "left_out"}
EVALUATION = {
    *("num_records", "num_answered", "accuracy", "coverage", "group_names", "class_names", "ermi", "ermi_given_label"),
    *("rates_GC", "confusion_GYC", "majority_class", "majority_accuracy", "degenerate"),
    *("underserved", "underserved_groups", "not_measured", "least_cell", "hides_predictions", "perfect_gap"),
    *("num_left_out", "num_persons", "num_persons_left_out"),
    *("metrics", "noise_stddev", "per_person", "estimates", "fair_at.notion", "fair_at.limit"),
    *(f"groups.{name}" for name in GROUPS),
    *(f"gaps.*.{name}" for name in GAP),
}
SPREAD = {"low", "mean", "high", "n_undefined"}
RULE = {"max_disparity", "min_count", "cold_start", "gap"}
ANSWERS = {
    *(f"rule.bound.{name}" for name in ("max_error", "confidence", "of", "groups", "otherwise")),
    *("rule.thresholds_GC", "group_names", "class_names", "num_records", "unit", "metrics", "said"),
    *(f"answered.{name}" for name in ("name", "kind", "value", "low", "high")),
}
METRICS = {
    *EVALUATION,
    *(f"answers.{name}" for name in ANSWERS),
    *(f"without_refusals.{name}" for name in EVALUATION),
    *(
        f"orders.orders.{name}"
        for name in ("accuracy", "coverage", "final_gap", "max_gap", "max_gap_from", "coverage_G")
    ),
    "orders.num_records",
    *(f"orders.rule.{name}" for name in RULE),
    *(
        f"orders.{name}.{end}"
        for name in ("accuracy", "coverage", "final_gap", "max_gap", "coverage_G")
        for end in SPREAD
    ),
}
CLAIM = {"unit", "relation", "delta", "noise", "tuning_accounted", "remarks"}
CLAIM |= {
    "earlier_releases",
    # Declared in the configuration or by its data set, never counted.
    "declared_units",
    "epsilon_with_earlier",
    "epsilon_adaptive_with_earlier",
}  # of events that hold for any data
OUTCOMES = {"submitted", "answered", "rejected_confidence", "rejected_fairness", "refused_free"}
EVENT = {
    *("kind", "noun"),
    *("count", "noise_multiplier", "sampling_rate", "relation", "unit"),
    *("threshold", "threshold_stddev_votes", "noise_stddev_votes", "norm"),
}
STATEMENT = {
    *(CLAIM | {"method", "epsilon", "accounting", "not_protected", "epsilon_as_in_paper"}),
    *(f"events.{name}" for name in EVENT),
    *("queries", *(f"queries.{name}" for name in OUTCOMES | {"epsilon_submitted"})),
    "part_events",
    "errors_of_answers",  # words on the groups for which a bound that was asked for holds
}
ENDS = ("value", "low", "high", "fair_from")
RECORD = {
    *("method", "data", "seed", "unit", "relation", "delta", "epsilon", "epsilon_is_data_dependent"),
    *("accuracy", "coverage", "disparity", "majority_accuracy", "degenerate", "answered", "answered_by_group"),
    *("underserved_groups", "unmeasured_groups", "metrics", "declared_units"),
    *("max_error", "max_error_confidence"),  # the bound that was asked for, if it holds for every group
    *(f"fairness.{name}.{end}" for name in NOTIONS for end in ENDS),
}
FAIRNESS = {f"{name}_{end}".removesuffix("_value") for name in NOTIONS for end in ENDS}
ROW = {name for name in RECORD if not name.startswith("fairness.")} | FAIRNESS
ROW |= {"config", "digest", "status", "error", "command", "minutes", "has_guarantee"}
STUDENT = {
    "num_training_labels",
    "sha256",
    "format",
    "input_shape",
    "label_names",
    "group_names",
    "sensitive_attribute",
    "num_members",
    "mixing",
    "embedding",
}
CARD = {
    *(
        "format",
        "publishable",
        "not_publishable",
        "limits",
        "protects",
        "description",
        "verdict",
        "meaning",
        "small_cells",
    ),
    *(
        f"model.{name}"
        for name in ("method", "architecture", "input_shape", "classes", "groups", "sensitive_attribute")
    ),
    *("model.method_title", "model.made_on"),
    *("model.sha256", "model.made_by", "model.num_training_labels", *(f"model.reject_option.{name}" for name in RULE)),
    *(f"privacy.{name}" for name in CLAIM | {"epsilon", "accounting", "events", "not_protected"}),
    "choice",  # what choosing this model by results costs, as the page of its comparison says
    "privacy.parts",  # which records are protected: validation and test records by releases of their own
    "privacy.tells_size",
    "privacy.declared_units",
    *(f"data.{name}" for name in ("name", "task", "publisher", "address", "licence", "split_seed", "kind")),
    "data.given_from_python",
    *(f"use.{name}" for name in ("intended", "out_of_scope", "contact")),
    *(f"evaluation.{name}" for name in EVALUATION),
    *(f"refusals.{name}" for name in ("num_orders", "accuracy", "coverage")),
    "answers",
    *(f"refusals.unrefused.{name}" for name in EVALUATION),
}
ESTIMATE = {"value", "low", "high"}
POPULATION = {
    *("format", "level", "class_names"),
    "groups.name",
    *(
        f"groups.{name}.{number}"
        for name in ("records", "coverage", "accuracy", "predicted", "found")
        for number in ESTIMATE
    ),
    *(f"gaps.*.{name}" for name in ESTIMATE | {"where", "n_undefined"}),
}
CARD |= {"private_population", *(f"private_population.{name}" for name in POPULATION)}
IDP3 = "student.idp3={max_disparity: 0.1, min_count: 10}"
PLACES = ("out", "storage", "ray", "data_dir", "block_size", "path")
RUN_FILES = {"student.safetensors", "statement.json", "record.json", "metrics.json", "report.html"}
CARD_FILES = {"card.html", "card.json"}
TRAIN = {
    "target.epsilon": 2,
    "target.accounting": "rdp",
    "dp_sgd": {"epochs": 1, "batch_size": 200, "num_records": 200},
    "sgd": {"epochs": 1},
    "student": {"model": {"name": "mlp", "hidden": [16]}, "idp3": {"max_disparity": 0.05, "min_count": 10}},
    "data": {"num_test": 60},
}


def fields(value: Any, path: str = "") -> Iterator[str]:
    """Dotted names of all leaves; entries of a list share one name, and so do those of ``gaps``."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            name = "*" if path.endswith("gaps") else name
            yield from fields(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from fields(item, path)
    else:
        yield path


def unlisted(value: Any, listed: set[str], *, settings: tuple[str, ...] = ()) -> set[str]:
    """Fields that are not listed; those below ``settings`` are a configuration, in which places are not."""
    found = set(fields(value))
    of_settings = {name for name in found if name.startswith(settings)} if settings else set()
    places = {name for name in of_settings if any(part in PLACES for part in name.split("."))}
    return (found - of_settings - listed) | places


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def student_card(run: RunDirectory) -> Any:
    with safe_open(run.student, framework="pt") as file:
        metadata = file.metadata()
    assert set(metadata) == {"card"}
    return json.loads(metadata["card"])


@pytest.fixture(scope="module")
def asked(finished: Any) -> RunDirectory:
    """A run with votes."""
    run: RunDirectory = finished[0]
    return run


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A cell that may be published, one that may not, and one that failed; none of them needs Ray."""
    unseen = {"settings": {"data.options.colour_as_feature": False}}
    methods = {"dp_sgd": {}, "sgd": {}, "f_ld": unseen, "pf_ld": unseen}
    values = {"data_sets": ["color_digits"], "methods": methods, "settings": TRAIN}
    asked = parse_config(values, SweepConfig)
    cells = cells_of(asked, folder=Path())
    folder = open_sweep_folder(tmp_path_factory.mktemp("public") / "sweep", asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(folder.root.parent / "state"))  # to compose with nothing
        for cell in cells[:2]:
            folder.add(cell, run_cell(cell, folder.run(cell), None))
    for cell in cells[2:]:
        row = cell.row(minutes=math.nan, error="ValueError: 4711 private records")
        write_rows([row], folder.failed / f"{cell.digest}.parquet", private=True)
    folder.assemble(cells)
    comparison = Comparison(folder=folder, changed=True)
    with pytest.MonkeyPatch.context() as patched:  # what is drawn: tests/run/test_paper_figures.py
        patched.setattr("fairpate.run.compare.frontier_figures", lambda points: {"slices.pdf": bytes(len(points))})
        write_frontier_reports(comparison, title="sweep")
    return comparison


def check_run(run: RunDirectory) -> None:
    assert not unlisted(read_json(run.statement), STATEMENT)
    assert not unlisted(read_json(run.metrics), METRICS)
    assert not unlisted(read_json(run.record), RECORD, settings=("config.",))
    assert not unlisted(student_card(run), STUDENT | {f"idp3.{name}" for name in RULE}, settings=("model.",))


def test_a_run_with_votes_publishes_what_is_listed(asked: RunDirectory) -> None:
    assert names(asked.public) == RUN_FILES | {"labels.parquet"}
    assert pq.read_table(asked.labels).column_names == ["record_id", "group", "label"]
    check_run(asked)


def test_a_run_that_releases_counts_publishes_them_beside_its_labels(small_config: Any, tmp_path: Path) -> None:
    run = run_method(small_config(tmp_path / "run", "aggregator.release=counts", IDP3), Reporter(quiet=True))
    assert names(run.public) == RUN_FILES | {"labels.parquet"}
    assert pq.read_table(run.labels).column_names == ["record_id", "group", "label", "counts"]
    check_run(run)


def test_a_training_publishes_what_is_listed(sweep: Comparison) -> None:
    folders = sorted((sweep.folder.root / "runs").iterdir())
    assert [folder.name.partition("-")[0] for folder in folders] == ["dp_sgd", "sgd"]
    protected, unprotected = (RunDirectory(root=folder) for folder in folders)
    assert not unprotected.public.exists()
    assert names(protected.public) == RUN_FILES | {"embedding.safetensors"}  # learned from public records
    check_run(protected)


def test_a_release_by_group_publishes_estimates_besides(tmp_path: Path) -> None:
    values = {
        "noise": "seeded",
        "target": {"epsilon": 2, "accounting": "rdp"},
        "student": TRAIN["student"],
        "data": TRAIN["data"],
        "weighted_votes": {"by_group": True, "embedding": {"num_components": 20, "graph_share": 0}},
    }
    run = run_method(configured(values, [f"out={tmp_path / 'run'}"], method="weighted_votes"), Reporter(quiet=True))
    assert names(run.public) == RUN_FILES | {"released.safetensors", "private_population.json"}
    assert not unlisted(read_json(run.private_population), POPULATION)
    check_run(run)
    _, plain = write_card(run.root)
    assert not unlisted(read_json(plain), CARD, settings=("data.options",))


def test_cards_publish_what_is_listed(asked: RunDirectory, sweep: Comparison) -> None:
    trained = next(sweep.folder.root.glob("runs/dp_sgd-*"))
    for root in (asked.root, trained):
        _, plain = write_card(root)
        assert names(plain.parent) >= CARD_FILES
        assert not unlisted(read_json(plain), CARD, settings=("data.options",))
        for path in CARD_FILES:
            (plain.parent / path).unlink()


def test_a_sweep_publishes_what_is_listed(sweep: Comparison) -> None:
    root = sweep.folder.root
    assert names(root) == {"results.parquet", "report.html", "figures", "private", "runs"}
    table = pq.read_table(sweep.folder.results)
    assert set(table.column_names) == ROW
    assert table["method"].to_pylist() == ["dp_sgd", "pf_ld"]
    assert table["minutes"].to_pylist() == [None, None]
    assert table["error"].to_pylist() == ["", "failed"]
    for config in table["config"].to_pylist():
        assert not unlisted({"config": json.loads(config)}, set(), settings=("config.",))
    assert b"4711" not in (root / "results.parquet").read_bytes()
    assert "4711 private" not in sweep.folder.report.read_text()
    assert "4711 private" in sweep.folder.private_report.read_text()


def test_pages_are_made_of_what_is_listed() -> None:
    """A page shows what its record holds, and nothing else reaches it."""
    assert {field.name for field in dataclasses.fields(PublicReport)} == {
        *("title", "method", "claims", "voting", "evaluations", "reject_option"),
        *("num_training_labels", "private_population", "made"),
    }
    assert {field.name for field in dataclasses.fields(RunStatement)} == {
        *("guarantee", "measured", "answers", "has_reject_option", "intended_use", "audited", "choice"),
        *("for_operator", "without_privacy"),  # a public report refuses these
    }
    assert {field.name for field in dataclasses.fields(Guarantee)} == {
        *("unit", "relation", "epsilon", "delta", "accounting", "noise", "tuning_accounted", "events"),
        *("not_protected", "parts", "remarks", "tells_size", "earlier_releases", "declared_units"),
        *("epsilon_with_earlier", "epsilon_adaptive_with_earlier"),
    }
    assert {field.name for field in dataclasses.fields(AnsweredQueries)} == OUTCOMES | {
        "epsilon_submitted",
        *("mechanism", "gate", "num_teachers", "voters", "num_public_records"),
        *("epsilon_course", "outcomes_GO", "answered_GC"),
    }
    assert {field.name for field in dataclasses.fields(FrontierReport)} == {
        *("title", "rows", "for_operator", "publish_unprotected", "notion", "fair_at", "looks", "choices")
    }
