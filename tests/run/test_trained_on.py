"""What a run was trained on is what its files say, also where records came from Python and no name leads to them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from aggregator.service.actor import ServiceSettings
from fairpate.config import ConfigError, DataConfig, SweepConfig, parse_config
from fairpate.data import Dataset, load_data
from fairpate.estimators import FairClassifier
from fairpate.methods.base import Method, configured
from fairpate.releases.directory import RunDirectory, RunDirectoryError, recorded_data, require_data_by_name
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.run.serve import serve_aggregator
from fairpate.run.sweep import cells_of
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

QUIET = Reporter(quiet=True)
SETTINGS = [
    "method=dp_sgd",
    "noise=seeded",
    "target={epsilon: 2, accounting: rdp}",
    "dp_sgd={epochs: 1, batch_size: 100}",
    "student.model={name: mlp, hidden: [8]}",
]


def config_for(out: Path, *overrides: str) -> Method:
    return configured({}, [*SETTINGS, f"out={out}", *overrides])


@pytest.fixture(scope="module")
def hospital() -> Dataset:
    """Colour digits under names of their own, as a user would hand in."""
    digits = load_data(DataConfig())
    return replace(
        digits,
        name="hospital 7",
        label_names=tuple(f"ward {k}" for k in range(10)),
        group_names=("left", "right", "neither")[: digits.num_groups],
        sensitive_attribute="handedness",
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, hospital: Dataset) -> RunDirectory:
    return run_method(config_for(tmp_path_factory.mktemp("given") / "run"), QUIET, hospital)


def test_every_file_names_the_data_set_that_was_given(given: RunDirectory) -> None:
    record = recorded_data(given)
    assert record is not None
    assert (record.name, record.kind, record.given_from_python) == ("hospital 7", "image", True)
    assert record.sensitive_attribute == "handedness"
    assert json.loads(given.record.read_text())["data"] == "hospital 7"
    assert yaml.safe_load(given.config.read_text())["data"]["name"] == "hospital 7"
    page, plain = write_card(given.root)
    card = json.loads(plain.read_text())
    assert card["data"]["name"] == "hospital 7"
    assert card["data"]["given_from_python"] is True
    assert {card["data"][name] for name in ("task", "publisher", "address", "licence", "options", "split_seed")} == {
        None
    }
    for path in (page, plain, given.record, given.config, given.data):
        assert "color_digits" not in path.read_text(), path
        assert "scikit-learn" not in path.read_text(), path
    assert "task, publisher, address and licence: the records were given from Python" in page.read_text()


def test_a_default_folder_is_named_after_the_data_set_that_was_given(
    tmp_path: Path, hospital: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_for(tmp_path).model_copy(update={"out": None})
    run = run_method(config, QUIET, replace(hospital, name="../hospital/7"))
    assert run.root.parent == Path("runs")
    assert run.root.name.startswith("dp_sgd-..-hospital-7-")


def test_a_data_set_that_was_given_is_not_taken_for_a_published_one_of_the_same_name(
    tmp_path: Path, hospital: Dataset
) -> None:
    run = run_method(config_for(tmp_path / "run"), QUIET, replace(hospital, name="color_digits"))
    card = json.loads(write_card(run.root)[1].read_text())
    assert card["data"]["publisher"] is None
    with pytest.raises(RunDirectoryError, match="'color_digits', a data set that was given from Python"):
        run_method(config_for(tmp_path / "run"), QUIET)


def test_a_run_goes_on_with_its_own_records_only(tmp_path: Path, given: RunDirectory, hospital: Dataset) -> None:
    root = tmp_path / "run"
    shutil.copytree(given.root, root)
    published = (root / "public" / "record.json").read_bytes()
    assert run_method(config_for(root), QUIET, hospital).record.read_bytes() == published
    private = hospital.private
    changed = replace(hospital, private=replace(private, y=torch.cat([1 - private.y[:1], private.y[1:]])))
    with pytest.raises(RunDirectoryError, match="on other records than those given now"):
        run_method(config_for(root), QUIET, changed)
    renamed = replace(hospital, group_names=tuple(reversed(hospital.group_names)))
    with pytest.raises(RunDirectoryError, match="group_names: "):
        run_method(config_for(root), QUIET, renamed)
    assert (root / "public" / "record.json").read_bytes() == published


def test_a_run_goes_on_with_its_own_persons_and_units_only(
    tmp_path: Path, given: RunDirectory, hospital: Dataset
) -> None:
    def grouped(count: int, field: str) -> Dataset:
        names = tuple(f"{place // count}" for place in range(len(hospital.private)))
        return replace(hospital, private=replace(hospital.private, **{field: names}))  # type: ignore[arg-type]

    run_method(config_for(tmp_path / "persons"), QUIET, grouped(2, "person_id"))
    with pytest.raises(RunDirectoryError, match="on other records than those given now"):
        run_method(config_for(tmp_path / "persons"), QUIET, grouped(3, "person_id"))
    shutil.copytree(given.root, tmp_path / "units")
    with pytest.raises(RunDirectoryError, match="on other records than those given now"):
        run_method(config_for(tmp_path / "units"), QUIET, grouped(2, "unit_id"))


def test_the_digest_of_given_records_is_private(given: RunDirectory) -> None:
    digest = (given.private / "data.sha256").read_text().strip()
    assert len(digest) == 64
    open_files = [path for path in given.root.rglob("*") if path.is_file() and "private" not in path.parts]
    assert len(open_files) > 5
    assert not any(digest.encode() in path.read_bytes() for path in open_files)


def test_a_run_that_recorded_nothing_gets_no_card_until_it_is_repeated(
    tmp_path: Path, given: RunDirectory, hospital: Dataset
) -> None:
    root = tmp_path / "run"
    shutil.copytree(given.root, root)
    (root / "data.json").unlink()
    (root / "private" / "data.sha256").unlink()
    with pytest.raises(RunDirectoryError, match=r"data\.json: missing, so the data set of this run is not known"):
        write_card(root)
    digits = replace(hospital, label_names=tuple(map(str, range(10))))
    with pytest.raises(
        RunDirectoryError, match="not trained on the data set hospital 7, as they differ in label_names"
    ):
        run_method(config_for(root), QUIET, digits)
    run_method(config_for(root), QUIET, hospital)
    assert json.loads(write_card(root)[1].read_text())["data"]["name"] == "hospital 7"


def test_a_card_refuses_a_folder_that_contradicts_itself(tmp_path: Path, given: RunDirectory) -> None:
    root = tmp_path / "run"
    shutil.copytree(given.root, root)
    record = json.loads((root / "data.json").read_text())
    (root / "data.json").write_text(json.dumps(record | {"sensitive_attribute": "colour"}))
    with pytest.raises(RunDirectoryError, match="differ in sensitive_attribute"):
        write_card(root)
    (root / "data.json").write_text(json.dumps(record | {"given_from_python": False}))
    with pytest.raises((ConfigError, ValueError), match="unknown data set"):
        write_card(root)
    for damaged in ("{", "[]", '{"name": "x"}'):
        (root / "data.json").write_text(damaged)
        with pytest.raises(RunDirectoryError, match=r"data\.json: damaged"):
            write_card(root)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, small_config: Any) -> RunDirectory:
    """What an estimator leaves in a folder of its own: teachers, votes and a ledger of records that have no name."""
    config = small_config(tmp_path_factory.mktemp("fitted") / "run")
    digits = load_data(config.data)
    sections = {name: getattr(config, name) for name in ("teachers", "aggregator", "student", "ray")}
    private, public = digits.private, digits.public.take(range(100))
    pool = {"public_X": public.x.numpy(), "public_sensitive_features": public.z.numpy()}
    FairClassifier("fairpate", **sections, folder=config.out).fit(private.x.numpy(), private.y.numpy(), **pool)
    return RunDirectory(root=config.out)


def test_what_an_estimator_leaves_is_not_taken_for_the_default_data_set(fitted: RunDirectory) -> None:
    assert yaml.safe_load(fitted.config.read_text())["data"]["name"] == "records"
    with pytest.raises(RunDirectoryError, match="'records', a data set that was given from Python"):
        require_data_by_name(fitted)


def test_nothing_reloads_by_name_what_was_given(tmp_path: Path, finished: Any) -> None:
    """A finished run whose record says that its data set was given: neither a report nor a service reads another."""
    run = RunDirectory(root=shutil.copytree(finished[0].root, tmp_path / "run"))
    config = finished[1].model_copy(update={"out": run.root})
    record = recorded_data(run)
    assert record is not None
    assert not record.given_from_python
    run.data.write_text(json.dumps(json.loads(run.data.read_text()) | {"given_from_python": True}))
    before = {path: path.read_bytes() for path in run.public.iterdir()}
    listen = ServiceSettings()
    for again in (
        lambda: run_method(config, QUIET),
        lambda: serve_aggregator(run.root, listen, data_dir=None, detach=False),
    ):
        with pytest.raises(RunDirectoryError, match="given from Python"):
            again()
    assert {path: path.read_bytes() for path in run.public.iterdir()} == before


def test_results_of_a_sweep_do_not_carry_the_name_of_another_data_set() -> None:
    asked = {"data_sets": {"adult": {"settings": {"data.name": "color_digits"}}}, "methods": ["dp_sgd"]}
    with pytest.raises(ConfigError, match=r"data_sets\.adult: names another data set than data\.name=color"):
        cells_of(parse_config(asked, SweepConfig), folder=Path())
