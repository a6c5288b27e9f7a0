"""`fairpate train`: one run directory per method, what is published in it, and what is not done twice."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from fairpate.app.train import METHODS, read_statement, train_method
from fairpate.methods.TODO import TrainConfig

from fairpate.app.odometer import LimitReachedError, Odometer
from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory, RunDirectoryError
from fairpate.config import ConfigError, DataConfig, load_config
from fairpate.data import find_entry, load_dataset
from fairpate.types import RunRecord
from student.predict import load_student

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
SMALL = [
    "target.accounting=rdp",
    "sgd.epochs=5",
    "dp_sgd.epochs=3",
    "dp_sgd.batch_size=200",
    "dp_sgd.learning_rate=1.0",
    "student.model={name: mlp, hidden: [16]}",
    "student.fit.epochs=3",
    "f_ld={warmup_epochs: 1, epochs: 2}",
    "randomised_response.learner=f_ld",
    "pf_ld={warmup_epochs: 1, epochs: 2}",
    "teachers.num_teachers=10",
    "teachers.fit.epochs=2",
    "aggregator.num_queries=40",
    "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}",
    "ray.num_actors=0",
]
PATE_FAMILY = ("pate", "fairpate", "pate_s_pre", "pate_s_in", "sf_pate")
ATTRIBUTE_METHODS = ("pf_ld", "sf_pate", "dp_postprocessing", "randomised_response")
ATTRIBUTE_ONLY = (*ATTRIBUTE_METHODS, "f_ld", "dp_oracle_learner")
TWO_CLASSES = ("dp_oracle_learner",)  # trained in test_posthoc_training.py: the digits are ten
RANDOMISED = ("dp_postprocessing", "dp_oracle_learner")  # fine-tuning would undo their mixing: refused there
CALIBRATION = "public_data.calibration={epochs: 2, batch_size: 64}"


def configured(out: Path, method: str, *overrides: str) -> TrainConfig:
    return load_config(
        None, [*SMALL, *unseen(method), f"method={method}", f"out={out}", *overrides], schema=TrainConfig
    )


def unseen(method: str) -> list[str]:
    """Overrides that hide the attribute from a method that counts features as public."""
    return ["data.options={colour_as_feature: false}"] if method in ATTRIBUTE_ONLY else []


def train(out: Path, method: str, *overrides: str) -> RunDirectory:
    return train_method(configured(out, method, *overrides), Reporter(quiet=True))


def weights(run: RunDirectory) -> dict[str, list[float]]:
    return {name: values.flatten().tolist() for name, values in load_student(run.student).network.state_dict().items()}


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("method", [method for method in METHODS if method not in TWO_CLASSES])
def test_every_method_leaves_a_record_a_statement_and_a_model(method: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", method, "target.epsilon=2", "target.delta=1.0e-4")
    record = read(run.record)
    assert set(record) == set(RunRecord.__dataclass_fields__)
    assert (record["method"], record["data"], record["delta"]) == (method, "color_digits", 1e-4)
    assert 0 <= record["accuracy"] <= 1
    assert record["coverage"] == 1
    assert record["config"]["method"] == method
    statement = read(run.statement)
    assert {"unit", "relation", "delta", "epsilon", "accounting", "noise", "events"} <= set(statement)
    hides_attribute = method in ATTRIBUTE_METHODS
    assert statement["unit"] == ("sensitive attribute" if hides_attribute else "record")
    assert statement["relation"] == ("replace one" if hides_attribute else "add or remove one")
    assert load_student(run.student).card.model.hidden == (16,)
    assert stat.S_IMODE(run.private.stat().st_mode) == 0o700
    assert not list(run.root.rglob("*.tmp"))
    if METHODS[method].promises(configured(tmp_path, method)):
        assert statement["epsilon"] <= 2
        assert statement["noise"] == "os_entropy"
        assert ({path.name for path in run.private.iterdir()} == {"release.json"}) == (method not in PATE_FAMILY)
    else:
        assert statement["epsilon"] is None
        assert "not private" in statement["noise"]
        assert not (run.root / "public").exists()


def test_all_methods_see_the_same_splits_and_start_from_the_same_weights(tmp_path: Path) -> None:
    """Without a step that moves them, DP-SGD and FairDP-SGD are the model they started from."""
    still = ("dp_sgd.epochs=1.0e-9", "dp_sgd.learning_rate=1.0e-30")
    first, second = (weights(train(tmp_path / method, method, *still)) for method in ("dp_sgd", "fair_dp_sgd"))
    assert first == second


def test_a_seeded_run_can_be_made_again_and_says_that_it_is_not_private(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, "fair_dp_sgd", "dp_sgd.noise=seeded") for name in ("one", "two")]
    assert weights(runs[0]) == weights(runs[1])
    assert read(runs[0].statement)["noise"] == "seeded: not private"
    other = train(tmp_path / "three", "fair_dp_sgd", "dp_sgd.noise=seeded", "seed=1")
    assert weights(other) != weights(runs[0])


def test_models_on_one_data_set_are_one_sum_and_older_ones_are_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    first, second = (train(tmp_path / f"run-{seed}", "dp_sgd", f"seed={seed}") for seed in range(2))
    alone, both = read(first.statement), read(second.statement)
    assert (alone["earlier_releases"], both["earlier_releases"]) == (0, 1)
    assert both["epsilon"] < both["epsilon_with_earlier"] < both["epsilon"] + alone["epsilon"]
    assert "1 earlier result" in both["remarks"][-1]
    counted = Odometer().totals(delta=both["delta"])
    assert [(total.releases, total.epsilon) for total in counted] == [(2, both["epsilon_with_earlier"])]
    Odometer().path.unlink()
    first.receipt.unlink()  # as a version without an odometer left it
    for seed in range(2):
        train(tmp_path / f"run-{seed}", "dp_sgd", f"seed={seed}")
    again = Odometer().totals(delta=both["delta"])
    assert [(total.releases, total.epsilon) for total in again] == [(2, pytest.approx(both["epsilon_with_earlier"]))]


def test_a_model_that_would_pass_the_limit_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", "record", epsilon=1.0, delta=1e-5)
    with pytest.raises(LimitReachedError, match=r"color_digits, unit record: 0 releases.*the limit is 1"):
        train(tmp_path / "run", "dp_sgd", "target.epsilon=2", "target.delta=1.0e-5")
    assert list((tmp_path / "run/public").iterdir()) == []
    assert not (tmp_path / "run/private/release.json").exists()


def test_a_released_model_is_not_trained_again(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "dp_sgd")
    model, record = run.student.read_bytes(), run.record.read_bytes()
    run.record.unlink()
    run.metrics.unlink()
    train(tmp_path / "run", "dp_sgd")
    assert (run.student.read_bytes(), run.record.read_bytes()) == (model, record)
    with pytest.raises(RunDirectoryError, match="dp_sgd -> fair_dp_sgd"):
        train(tmp_path / "run", "fair_dp_sgd")
    sgd = train(tmp_path / "sgd", "sgd")
    model = sgd.student.read_bytes()
    assert train(tmp_path / "sgd", "sgd").student.read_bytes() == model


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_or_lost_model_is_never_released_twice(tmp_path: Path, length: int) -> None:
    run = train(tmp_path / "run", "dp_sgd")
    statement = run.statement.read_bytes()
    run.student.write_bytes(run.student.read_bytes()[:length])
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors.*second release.*--out"):
        train(tmp_path / "run", "dp_sgd")
    run.student.unlink()
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors: gone.*second release"):
        train(tmp_path / "run", "dp_sgd")
    assert run.statement.read_bytes() == statement
    assert not run.student.exists()


def test_a_model_without_privacy_is_made_again(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "sgd")
    before = run.student.read_bytes()
    run.student.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=r"delete it and give the same command again"):
        train(tmp_path / "run", "sgd")
    run.student.unlink()
    assert train(tmp_path / "run", "sgd").student.read_bytes() == before


@pytest.mark.parametrize("method", [method for method in METHODS if method not in RANDOMISED])
def test_options_on_public_data_are_open_to_every_method_and_cost_nothing(method: str, tmp_path: Path) -> None:
    seeded = (
        *(f"{section}.noise=seeded" for section in ("dp_sgd", "pf_ld", "aggregator", "randomised_response")),
        f"storage={tmp_path / 'teachers'}",
    )
    plain = train(tmp_path / "plain", method, *seeded)
    run = train(
        tmp_path / "run",
        method,
        *seeded,
        CALIBRATION,
        "public_data.self_label=true",
        "student.confidence=0.1",
        "public_data.pretrain={epochs: 1}",
        "student.idp3={max_disparity: 0.0, min_count: 10}",
    )
    assert read(run.statement) == read(plain.statement)
    assert weights(run) != weights(plain)
    assert read(run.record)["coverage"] < 1
    assert {"without_refusals", "orders"} <= set(read(run.metrics))


def test_zero_epochs_of_calibration_change_no_bit(tmp_path: Path) -> None:
    runs = [
        train(tmp_path / name, "dp_sgd", "dp_sgd.noise=seeded", *extra)
        for name, extra in (("without", []), ("zero", ["public_data.calibration={epochs: 0}"]))
    ]
    assert weights(runs[0]) == weights(runs[1])


def test_the_relation_of_the_target_is_the_statements(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "dp_sgd", "target.relation=replace one", "target.accounting=pld", "dp_sgd.epochs=1")
    statement = read(run.statement)
    assert statement["relation"] == statement["events"][0]["relation"] == read(run.record)["relation"] == "replace one"


@pytest.mark.parametrize(
    ("field", "setting"),
    [("sgd.augment", "sgd.augment.rotation_degrees=5"), ("public_data.pretrain", "public_data.pretrain={epochs: 1}")],
)
def test_settings_for_images_are_refused_for_a_table(
    field: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataclasses.replace(load_dataset(DataConfig()), kind="tabular")
    monkeypatch.setattr("fairpate.app.train.load_dataset", lambda _: dataset)
    with pytest.raises(ConfigError, match=f"{field}: changes images"):
        train(tmp_path / "run", "sgd", setting)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_sure_of_nothing_labels_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"student.confidence: .* lower it"):
        train(tmp_path / "run", "dp_sgd", "public_data.self_label=true", "student.confidence=1.0")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", METHODS)
def test_every_configuration_that_is_offered_is_valid(path: Path, method: str) -> None:
    config = load_config(path, [f"method={method}"], schema=TrainConfig)
    assert find_entry(config.data.name).complete_options(config.data.options)


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method: no method 'dpsgd'; did you mean dp_sgd"):
        train(tmp_path / "run", "dpsgd")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif("FAIRPATE_DATA" not in os.environ, reason="FAIRPATE_DATA is not set: a data set of two classes")
def test_a_printed_form_publishes_nothing(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run", "pf_ld", "pf_ld.form=as_printed", "data.name=bank", "data.num_public=100", "data.options={}"
    )
    assert not (run.root / "public").exists()
    statement = read(run.statement)
    assert statement["epsilon"] is None
    assert statement["epsilon_as_published"] > 0
    published = configured(tmp_path, "dp_oracle_learner", "dp_oracle_learner.noise_rule=as_published")
    assert not METHODS["dp_oracle_learner"].promises(published)


def test_a_model_that_is_trained_again_after_its_files_were_deleted_is_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is drawn anew, so that both together tell more: a limit sees both."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    config = configured(tmp_path / "run", "dp_sgd", "target.epsilon=1")
    run = train_method(config, Reporter(quiet=True))
    first = run.student.read_bytes()
    shutil.rmtree(run.public)
    Odometer().set_limit("color_digits", "record", epsilon=1.01, delta=1e-5)
    with pytest.raises(LimitReachedError, match="1 releases"):
        train_method(config, Reporter(quiet=True))
    assert not run.student.exists()
    assert not run.statement.exists()
    Odometer().set_limit("color_digits", "record", epsilon=10, delta=1e-5)
    train_method(config, Reporter(quiet=True))
    assert run.student.read_bytes() != first
    assert read_statement(run)["earlier_releases"] == 1
    (total,) = Odometer().totals(delta=1e-5)
    assert total.releases == 2
