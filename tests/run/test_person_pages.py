"""What is published of a run that protects persons says so, in sentences that follow from the unit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, load_data
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_statement
from fairpate.releases.odometer import Odometer
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import REMARKS, TELLS_SIZE

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("own_state"),
]

VALUES: dict[str, Any] = {
    "target": {"epsilon": 4, "accounting": "rdp"},
    "dp_sgd": {"epochs": 1, "batch_size": 100},
    "student": {"model": {"name": "logistic"}},
}


@pytest.fixture(scope="module")
def visits() -> Dataset:
    """Two digits of each person."""
    dataset = load_data(DataConfig())
    persons = tuple(f"patient {place // 2}" for place in range(len(dataset.private)))
    return dataclasses.replace(dataset, private=dataclasses.replace(dataset.private, person_id=persons))


def train(dataset: Dataset, out: Path, *overrides: str, method: str = "dp_sgd") -> RunDirectory:
    return run_method(configured(VALUES, [f"out={out}", *overrides], method=method), Reporter(quiet=True), dataset)


def test_statement_card_report_and_odometer_say_person(visits: Dataset, tmp_path: Path) -> None:
    run = train(visits, tmp_path / "run")
    statement = read_statement(run)
    assert (statement.unit, statement.remarks) == ("person", (TELLS_SIZE["person"],))
    assert "number of private persons" in TELLS_SIZE["person"]
    page, plain = (path.read_text(encoding="utf-8") for path in write_card(run.root))
    assert "everything about one person in the private training records" in page
    assert "for the persons behind the private training records alone" in page
    assert "Protects everything about one person, even its presence (add or remove one)" in page
    assert "whether one given person was among the people of the private records" in page
    assert "All records of a person are protected together." in page
    assert json.loads(plain)["privacy"]["unit"] == "person"
    report = run.public_report.read_text(encoding="utf-8")
    assert "for everything about one person (add or remove one) among the private records" in report
    assert "one record" not in report
    assert [(total.unit, total.releases) for total in Odometer().totals(delta=1e-5)] == [("person", 1)]


def test_the_same_records_by_themselves_say_record(visits: Dataset, tmp_path: Path) -> None:
    alone = dataclasses.replace(visits, private=dataclasses.replace(visits.private, person_id=()))
    run = train(alone, tmp_path / "run")
    assert read_statement(run).unit == "record"
    assert "one record of the private training records" in write_card(run.root)[0].read_text(encoding="utf-8")
    assert "for one record (add or remove one)" in run.public_report.read_text(encoding="utf-8")


def test_a_statement_remarks_where_records_with_persons_are_protected_by_themselves(
    visits: Dataset, tmp_path: Path
) -> None:
    private = dataclasses.replace(visits.private, person_id=())
    run = train(dataclasses.replace(visits, private=private, records_alone=True), tmp_path / "run", "noise=seeded")
    statement = read_statement(run)
    assert (statement.unit, REMARKS["records_alone"] in statement.remarks) == ("record", True)
    assert "several records of one person" in write_card(run.root)[0].read_text(encoding="utf-8")


def test_a_rate_counts_persons_and_a_declared_number_tells_nothing(visits: Dataset, tmp_path: Path) -> None:
    persons = len(visits.private) // 2
    (event,) = read_statement(train(visits, tmp_path / "real", "noise=seeded")).events
    assert event["sampling_rate"] == 100 / persons
    assert event["count"] == -(-persons // 100)
    declared = read_statement(train(visits, tmp_path / "declared", "noise=seeded", "dp_sgd.num_records=500"))
    assert declared.events[0]["sampling_rate"] == 100 / 500
    assert TELLS_SIZE["person"] not in declared.remarks
    with pytest.raises(ValueError, match=rf"dp_sgd\.batch_size <= {persons} private records, or persons"):
        train(visits, tmp_path / "large", f"dp_sgd.batch_size={persons + 1}")


def test_a_run_of_records_does_not_go_on_with_persons(visits: Dataset, tmp_path: Path) -> None:
    alone = dataclasses.replace(visits, private=dataclasses.replace(visits.private, person_id=()))
    train(alone, tmp_path / "run", "noise=seeded")
    with pytest.raises(RunDirectoryError, match=r"trained on another data set \(unit: record -> person\)"):
        train(visits, tmp_path / "run", "noise=seeded")


def test_more_teachers_than_persons_are_refused(visits: Dataset, tmp_path: Path) -> None:
    few = dataclasses.replace(visits, private=visits.private.take(range(90)))
    settings = ("teachers.num_teachers=46", "aggregator.num_queries=10")
    with pytest.raises(ConfigError, match=r"46 teachers, but fewer private persons in color_digits"):
        train(few, tmp_path / "run", *settings, method="pate")


def test_attribute_modes_of_a_method_that_protects_persons_refuse_them(visits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.unit: dp_fermi protects the sensitive attribute of one record, and"):
        train(visits, tmp_path / "run", "dp_fermi.mode=sens_public_batches", method="dp_fermi")
    with pytest.raises(ConfigError, match=r"data.unit: dp_postprocessing has no privacy guarantee for all records"):
        train(visits, tmp_path / "run", "dp_postprocessing.base=dp_sgd", method="dp_postprocessing")
    assert not (tmp_path / "run").exists()
