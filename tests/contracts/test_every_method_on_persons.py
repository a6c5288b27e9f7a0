"""What holds for every registered method where a data set names persons: it protects them, or refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fixed_results import SMALL, TARGET, two_labels
from method_kinds import quick_and_slow
from test_every_method import QUICK

from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.methods.base import all_methods, configured
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Event, epsilon_pld, of_unit
from fairpate.privacy.mechanism_events import event_from
from fairpate.releases.directory import read_json, read_statement
from fairpate.releases.odometer import Odometer
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

VALUES: dict[str, Any] = {**SMALL, **TARGET, **QUICK}
PROTECTING = {
    *("fairpate", "pate", "pate_s_pre", "pate_s_in", "private_knn", "record_votes", "weighted_votes"),
    *("residual_votes", "ada_ssp", "teacher_votes"),
    *("dp_sgd", "fair_dp_sgd", "dp_fermi", "raco_dp"),
}
UNPROTECTED = {"sgd", "f_ld", "covariance_constraint"}


@pytest.fixture(scope="module")
def visits() -> Dataset:
    """Digits of which one, two, three, one, ... are of one person."""
    dataset, number = two_labels(), 0
    persons: list[str] = []
    while len(persons) < len(dataset.private):
        persons += [f"person {number}"] * (1 + number % 3)
        number += 1
    private = dataclasses.replace(dataset.private, person_id=tuple(persons[: len(dataset.private)]))
    return dataclasses.replace(dataset, private=private)


def epsilon_of_curves(events: list[Event], *, target_delta: float) -> float:
    return accountant.epsilon(events, target_delta=target_delta).epsilon


@pytest.mark.parametrize("name", quick_and_slow(all_methods()))
def test_a_method_protects_persons_or_refuses(
    name: str, visits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    values = VALUES | {"dp_sgd": {"epochs": 2, "batch_size": 100, "learning_rate": 0.3}}
    config = configured(values, [f"out={tmp_path / 'run'}"], method=name)
    if name not in PROTECTING | UNPROTECTED:
        with pytest.raises(ConfigError, match=f"data.unit: {name} .* names persons; set data.unit=record"):
            run_method(config, Reporter(quiet=True), visits)
        assert not (tmp_path / "run").exists()
        return
    run = run_method(config, Reporter(quiet=True), visits)
    statement = read_statement(run)
    assert statement.unit == "person"
    assert read_json(run.record)["unit"] == "person"
    assert all(event["unit"] == "person" for event in statement.events)
    if name in UNPROTECTED:
        return
    rates = [event["sampling_rate"] for event in statement.events if event.get("sampling_rate", 1) < 1]
    if hasattr(config, "dp_sgd"):
        assert rates == [100 / visits.private.num_protected]
        assert "number of private persons" in " ".join(statement.remarks)
    assert statement.epsilon is not None
    of_records = [of_unit(event_from(event), "record") for event in statement.events]
    price = epsilon_pld if statement.accounting == "pld" else epsilon_of_curves
    assert price(of_records, target_delta=statement.delta) - 1e-9 <= statement.epsilon <= 8
    assert [total.unit for total in Odometer().totals(delta=statement.delta)] == ["person"]
    if run.public_report.exists():
        assert "for everything about one person (add or remove one)" in run.public_report.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(PROTECTING))
def test_records_by_themselves_are_protected_as_ever(name: str, visits: Dataset) -> None:
    """Where persons do not count, what a method says of itself is the record."""
    alone = dataclasses.replace(visits, private=dataclasses.replace(visits.private, person_id=()))
    config = configured(VALUES, [], method=name)
    config.check_data(alone)
    assert (config.unit_of(alone), config.unit_of(visits)) == ("record", "person")
    assert config.unit == "record or person"
