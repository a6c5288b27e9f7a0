"""Votes where a data set names persons: nobody moves a table by more than one vote, and few records are as ever."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fairpate.config import DataConfig
from fairpate.data import Dataset, load_data
from fairpate.methods import record_votes
from fairpate.methods.base import configured
from fairpate.methods.record_votes import UNITS
from fairpate.privacy.mechanism_events import VoteSums
from fairpate.releases.directory import read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture(scope="module")
def visits() -> Dataset:
    """Forty digits of twelve persons, who have 1 to 8."""
    dataset = load_data(DataConfig(options={"colour_as_feature": False}))
    persons = [0] * 8 + [1] * 5 + [2] * 5 + [3] * 4 + [4] * 4 + [5] * 4 + [6] * 3 + [7] * 3 + [8, 9, 10, 11]
    private = dataset.private.take(range(40))
    named = dataclasses.replace(private, person_id=tuple(f"person {number}" for number in persons))
    return dataclasses.replace(dataset, private=named)


def table_of(name: str, dataset: Dataset, out: Path, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.int64]:
    """What is released, before noise."""
    tables: list[npt.NDArray[np.int64]] = []

    def kept(table: npt.NDArray[np.int64], **options: Any) -> npt.NDArray[np.int64]:
        tables.append(table)
        return release(table, **options)

    module = {"weighted_votes": record_votes, "record_votes": record_votes}[name]
    release = module.with_noise
    monkeypatch.setattr(module, "with_noise", kept)
    values = {
        "noise": "seeded",
        "target": {"epsilon": 2.0, "accounting": "rdp"},
        "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
        "student": {"model": {"name": "logistic"}, "fit": {"epochs": 1}},
    }
    run = run_method(configured(values, [f"out={out}"], method=name), Reporter(quiet=True), dataset)
    (stated,) = read_statement(run).events
    if dataset.unit == "person":
        assert stated == stated | {"kind": "VoteSums", "norm": UNITS, "unit": "person", "count": 1}
        assert stated["noise_stddev_votes"] > VoteSums(count=1, noise_stddev_votes=1.0, norm=UNITS).norm
    monkeypatch.setattr(module, "with_noise", release)
    return tables[0]


def without(dataset: Dataset, person: str) -> Dataset:
    kept = [row for row, name in enumerate(dataset.private.person_id) if name != person]
    return dataclasses.replace(dataset, private=dataset.private.take(kept))


@pytest.mark.parametrize("name", [pytest.param("weighted_votes", marks=pytest.mark.slow), "record_votes"])
def test_a_person_removed_moves_the_table_by_at_most_one_vote(
    name: str, visits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = table_of(name, visits, tmp_path / "all", monkeypatch)
    lengths = []
    for person in list(dict.fromkeys(visits.private.person_id))[::2]:
        moved = everybody - table_of(name, without(visits, person), tmp_path / person.replace(" ", "-"), monkeypatch)
        lengths.append(float(np.sqrt((moved * moved).sum())) / UNITS)
    assert max(lengths) <= 1
    # Of several records the vote is as long as may be; by themselves they would be longer.
    assert min(lengths[:4]) > 0.99


@pytest.mark.parametrize("name", ["record_votes", pytest.param("weighted_votes", marks=pytest.mark.slow)])
def test_persons_of_one_record_each_vote_as_records_do(
    name: str, visits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = visits.private
    alone, named = (dataclasses.replace(private, person_id=ids) for ids in ((), private.record_id))
    of_records = table_of(name, dataclasses.replace(visits, private=alone), tmp_path / "records", monkeypatch)
    of_persons = table_of(name, dataclasses.replace(visits, private=named), tmp_path / "persons", monkeypatch)
    assert (of_persons == of_records * (UNITS if name == "record_votes" else 1)).all()
