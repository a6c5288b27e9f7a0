"""SF-PATE: what a changed attribute reaches, what identical teachers release, and at which price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import read_json

from aggregator.service.actor import ServiceSettings
from fairpate.config import ConfigError, DataConfig, ShardsConfig, apply_override
from fairpate.data import Dataset, Split, load_data
from fairpate.methods import sf_pate
from fairpate.methods.base import config_digest
from fairpate.methods.base import configured as load
from fairpate.methods.parity import UNKNOWN
from fairpate.methods.sf_pate import SfPate
from fairpate.privacy import accountant
from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.privacy.mechanism_events import AttributeQueries
from fairpate.releases.directory import RunDirectory, RunFolderError, read_labels
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.run import serve
from fairpate.run.folder import as_trained, create_run_directory
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import LabelledSet, Unit, VoteBatch
from teachers.ensemble import rows_of_teachers

pytestmark = pytest.mark.usefixtures("light_runs")

SMALL = [
    "method=sf_pate",
    "data.options={colour_as_feature: false}",
    "target.epsilon=20",
    "student.model={name: mlp, hidden: [16]}",
    "student.fit.epochs=3",
    "teachers.num_teachers=10",
    "teachers.fit.epochs=2",
    "f_ld={warmup_epochs: 1, epochs: 2}",
    "aggregator.num_queries=40",
    "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}",
    "ray.num_actors=0",
]

DATA = DataConfig(options={"colour_as_feature": False})


def configured(out: Path, *overrides: str, file: Sequence[str] = ()) -> SfPate:
    """``file``: settings of a file, which may hold what a variant leaves unread."""
    values: dict[str, Any] = {}
    for setting in (*SMALL, *file):
        apply_override(values, setting)
    config = load(values, [f"out={out}", *overrides])
    assert isinstance(config, SfPate)
    return config


def identical_teachers(config: SfPate, dataset: Dataset, queries: Split, folder: Path, _: Reporter) -> VoteBatch:
    """All of them know the truth."""
    assert not folder.with_name("votes.parquet").exists()
    votes_QC = config.teachers.num_teachers * np.eye(dataset.num_classes, dtype=np.int64)[queries.y.numpy()]
    return VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble="identical")


def test_identical_teachers_release_the_attribute_that_they_agree_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 of them no noise at this epsilon is large enough to overturn a label."""
    monkeypatch.setattr(SfPate, "collect_votes", identical_teachers)
    run = run_method(configured(tmp_path / "run", "teachers.num_teachers=1000"), Reporter(quiet=True))
    private = as_trained(run, configured(tmp_path / "run"), load_data(DATA)).private
    labelled = read_labels(run.labels)
    z_of = dict(zip(private.record_id, private.z.tolist(), strict=True))
    assert len(labelled.labels) == 40
    assert [z_of[record_id] for record_id in labelled.record_ids] == labelled.labels.tolist()


@pytest.mark.parametrize("variant", ["sf_s", "sf_t"])
def test_both_variants_are_priced_as_gnmax_for_a_smaller_unit(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SfPate, "collect_votes", identical_teachers)
    run: RunDirectory = run_method(configured(tmp_path / "run", f"sf_pate.variant={variant}"), Reporter(quiet=True))
    statement, costs = read_json(run.statement), read_json(run.costs)
    assert (statement["unit"], statement["relation"]) == ("sensitive attribute", "replace one")
    assert (costs["unit"], costs["relation"]) == ("sensitive attribute", "replace one")
    (stated,) = statement["events"]
    event = {name: value for name, value in stated.items() if name not in ("kind", "noun")}
    assert (stated["kind"], event["count"]) == ("AttributeQueries", 40)
    expected = accountant.epsilon([ConfidentGnmaxQueries(**event)], target_delta=1e-5).epsilon
    assert statement["epsilon"] == pytest.approx(expected, rel=1e-12)
    assert 19.9 < statement["epsilon"] <= 20
    for mine, theirs in zip(
        accountant.rdp([AttributeQueries(**event)]), accountant.rdp([ConfidentGnmaxQueries(**event)]), strict=True
    ):
        assert mine == theirs


def test_teachers_of_attributes_read_labels_and_nobody_else_s_attribute() -> None:
    """One changed attribute changes the records of one teacher, and nothing that is asked."""
    dataset = load_data(DATA)
    asked = sf_pate.attribute_questions(dataset)
    assert asked.num_classes == dataset.num_groups
    assert torch.equal(asked.private.y, dataset.private.z)
    assert torch.equal(asked.private.x[:, :-1], dataset.private.x)
    assert not asked.public.z.any()
    z = dataset.private.z.clone()
    z[17] = (z[17] + 1) % dataset.num_groups
    rows_T = rows_of_teachers(dataset.private, ShardsConfig(num_teachers=10), 0)
    assert sum(not torch.equal(z[rows], dataset.private.z[rows]) for rows in map(torch.from_numpy, rows_T)) == 1


def test_labels_become_features() -> None:
    def asked(x: torch.Tensor, labels: list[int]) -> torch.Tensor:
        split = Split(x=x, y=torch.tensor(labels), z=torch.zeros(2, dtype=torch.int64), record_id=("a", "b"))
        dataset = replace(load_data(DATA), private=split, label_names=("no", "maybe", "yes"))
        return sf_pate.attribute_questions(dataset).private.x

    assert asked(torch.tensor([[0.5], [0.25]]), [2, 0]).tolist() == [[0.5, 0.0, 0.0, 1.0], [0.25, 1.0, 0.0, 0.0]]
    images = asked(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), [1, 2])
    assert images.shape == (2, 4, 4, 4)
    assert images.dtype == torch.uint8
    assert (images[:, 3].flatten(1) == torch.tensor([[127], [255]])).all()


def test_records_whose_attribute_was_not_released_have_an_unknown_group() -> None:
    private = load_data(DATA).private.take(range(5))
    ids = (private.record_id[3], private.record_id[1])
    labelled = LabelledSet(record_ids=ids, labels=np.array([2, 0]), groups=np.array([0, 0]))
    groups = sf_pate.released_groups(private, labelled)
    assert groups.tolist() == [UNKNOWN, 0, UNKNOWN, 2, UNKNOWN]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("target.relation=add or remove one", "target.relation: sf_pate does not read it"),
        ("aggregator.budget={max_queries: 5}", "aggregator.budget"),
        ("aggregator.release=counts", "aggregator.release: sf_pate does not read it"),
    ],
)
def test_what_is_priced_for_other_units_is_refused(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_method(configured(tmp_path / "run", setting), Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("unit", "refused"), [("record", False), ("sensitive attribute", True)])
def test_only_a_limit_on_attributes_stops_it_and_before_any_teacher_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: Unit, refused: bool
) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", unit, epsilon=0.1, delta=1e-5)

    def trains(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(SfPate, "collect_votes", trains)
    with pytest.raises(LimitReachedError if refused else InterruptedError):
        run_method(configured(tmp_path / "run"), Reporter(quiet=True))


def test_teachers_that_were_not_kept_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SfPate, "collect_votes", identical_teachers)
    run = run_method(configured(tmp_path / "run", "sf_pate.variant=sf_t"), Reporter(quiet=True))
    settings = ServiceSettings(port=1)
    with pytest.raises(RunFolderError, match="whose teachers were not kept"):
        serve.serve_aggregator(run.root, settings, data_dir=None, detach=False)


@pytest.mark.parametrize(
    ("variant", "unread", "read"),
    [
        ("sf_s", "student.fit.epochs=7", "teachers.fit.epochs=7"),
        ("sf_t", "teachers.fit.epochs=7", "student.fit.epochs=7"),
    ],
)
def test_what_a_variant_does_not_read_changes_no_digest(tmp_path: Path, variant: str, unread: str, read: str) -> None:
    plain, other, changed = (
        configured(tmp_path / "run", f"sf_pate.variant={variant}", file=more) for more in ((), (unread,), (read,))
    )
    assert config_digest(other) == config_digest(plain) != config_digest(changed)
    create_run_directory(plain)
    create_run_directory(other)  # the same run
    with pytest.raises(RunFolderError, match=read.partition("=")[0]):
        create_run_directory(changed)
