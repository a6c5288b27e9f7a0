"""Names, splits and shards do not depend on the sensitive attribute; one record reaches one teacher.

By brute force over small files in the publishers' layouts, full of records that only the attribute tells apart.
"""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow
from PIL import Image

from fairpate.data import entry_for, pictures
from fairpate.data.dataset import DataError, LoadedRecords, Request, divide
from fairpate.data.declaration import Declaration, read_declaration
from fairpate.data.registry import CODEBOOKS
from teachers.ensemble import assign_teachers, shard_key

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

SIZES = {"public": 3, "validation": 2, "test": 2}
NUM_TEACHERS = 7
Row = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A small file of a data set: 12 rows like ``row``, in which ``varied`` takes two values and ``attribute`` too."""

    path: str
    row: Row
    varied: str
    attribute: str
    values: tuple[str, str]
    variants: tuple[str, str]
    separator: str = ","
    has_header: bool = True
    options: Mapping[str, str | bool] = field(default_factory=dict)
    computed: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """Six copies of either variant; within them the attribute is as mixed as can be."""
        return [
            self.row | {self.varied: self.variants[i % 2], self.attribute: self.values[i // 2 % 3 % 2]}
            for i in range(12)
        ]

    def changed(self, row: Row) -> Row:
        """The same record with the other attribute, and what the publisher computed from it."""
        other = self.values[1 - self.values.index(row[self.attribute])]
        return row | {self.attribute: other} | {column: f"9{row[column]}" for column in self.computed}


def declared(name: str) -> Declaration:
    return read_declaration(CODEBOOKS / f"{name}.yaml")


def features_of(name: str) -> list[str]:
    return [column for column, _ in declared(name).columns]


ADULT = {
    "age": "39", "workclass": "State-gov", "fnlwgt": "77516", "education": "Bachelors", "education-num": "13",
    "marital-status": "Divorced", "occupation": "Sales", "relationship": "Unmarried", "race": "White", "sex": "Male",
    "capital-gain": "0", "capital-loss": "0", "hours-per-week": "40", "native-country": "Japan", "income": "<=50K",
}  # fmt: skip
BANK = {
    "age": "30", "job": "admin.", "marital": "single", "education": "illiterate", "default": "no", "housing": "no",
    "loan": "no", "contact": "cellular", "month": "may", "day_of_week": "mon", "duration": "1", "campaign": "1",
    "pdays": "999", "previous": "0", "poutcome": "failure", "emp.var.rate": "1", "cons.price.idx": "93",
    "cons.conf.idx": "-40", "euribor3m": "4", "nr.employed": "5000", "y": "no",
}  # fmt: skip
COMPAS = dict.fromkeys(declared("compas").identity.text, "0") | {
    "sex": "Male", "age": "30", "race": "Other", "c_charge_degree": "F", "is_recid": "0", "score_text": "Low",
}  # fmt: skip
HEART = dict.fromkeys(("HeartDiseaseorAttack", *features_of("heart")), "1.0")  # every answer's range holds 1
NIST = dict.fromkeys(features_of("acs"), "2") | {"PINCP": "100", "PWGTP": "7", "WGTP": "8"}
PARKINSONS = dict.fromkeys(("subject#", "total_UPDRS", *features_of("parkinsons")), "1")
RETIRED = {("gender" if name == "sex" else name): value for name, value in ADULT.items()} | {"income": "100"}
RETIRED.pop("fnlwgt")
FOLKTABLES = {
    "SERIALNO": "0", "SPORDER": "1", "PWGTP": "9", "AGEP": "40", "COW": "1", "SCHL": "1", "MAR": "1", "OCCP": "10",
    "POBP": "1", "RELP": "1", "WKHP": "40", "SEX": "1", "RAC1P": "1", "PINCP": "200",
}  # fmt: skip
POOLED = {"split": "pooled"}
# By one attribute and by two, a name that is computed from columns, and another publisher.
QUICK = ("adult by sex", "heart")
LAYOUTS = {
    "adult by sex": Layout(
        path="adult/adult.data", row=ADULT, varied="age", variants=("20", "30"), attribute="sex",
        values=("Male", "Female"), has_header=False, options=POOLED, computed=("fnlwgt",),
    ),
    "adult by race": Layout(
        path="adult/adult.data", row=ADULT, varied="age", variants=("20", "30"), attribute="race",
        values=("White", "Black"), has_header=False, options=POOLED | {"sensitive": "race"}, computed=("fnlwgt",),
    ),
    "adult, sex seen": Layout(
        path="adult/adult.data", row=ADULT, varied="age", variants=("20", "30"), attribute="sex",
        values=("Male", "Female"), has_header=False, options=POOLED | {"sensitive_as_feature": True},
    ),
    "retired_adult": Layout(
        path="retired_adult/adult_reconstruction.csv", row=RETIRED, varied="income", variants=("1", "60000"),
        attribute="gender", values=("Male", "Female"),
    ),
    "bank by age": Layout(
        path="bank/bank-additional-full.csv", row=BANK, varied="job", variants=("student", "retired"), attribute="age",
        values=("20", "40"), separator=";",
    ),
    "bank by marital status": Layout(
        path="bank/bank-additional-full.csv", row=BANK, varied="y", variants=("no", "yes"), attribute="marital",
        values=("single", "married"), separator=";", options={"sensitive": "marital"},
    ),
    "compas": Layout(
        path="compas/compas-scores-two-years.csv", row=COMPAS, varied="two_year_recid", variants=("0", "1"),
        attribute="race", values=("Caucasian", "Hispanic"),
    ),
    "heart": Layout(
        path="heart/heart_disease_health_indicators_BRFSS2015.csv", row=HEART, varied="BMI", variants=("20", "30"),
        attribute="Sex", values=("0.0", "1.0"),
    ),
    "acs by sex": Layout(
        path="acs/national2019.csv", row=NIST, varied="AGEP", variants=("20", "30"), attribute="SEX",
        values=("1", "2"), computed=("PWGTP", "WGTP"),
    ),
    "acs by race": Layout(
        path="acs/national2019.csv", row=NIST, varied="PINCP", variants=("20", "60000"), attribute="RAC1P",
        values=("1", "9"), options={"sensitive": "RAC1P"}, computed=("PWGTP",),
    ),
    "parkinsons": Layout(
        path="parkinsons/parkinsons_updrs.csv", row=PARKINSONS, varied="HNR", variants=("4", "5"), attribute="sex",
        values=("0", "1"), options={"split": "row"},
    ),
    "folktables by sex": Layout(
        path="folktables/psam_p06.csv", row=FOLKTABLES, varied="SERIALNO", variants=("1", "2"), attribute="SEX",
        values=("1", "2"), computed=("PWGTP",),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files pass for the publishers'."""
    monkeypatch.setattr("fairpate.data.dataset.check_sha256", lambda *_: None)


def write(path: Path, layout: Layout, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(layout.row), delimiter=layout.separator, lineterminator="\n")
        if layout.has_header:
            writer.writeheader()
        writer.writerows(rows)


def loader_of(name: str, folder: Path) -> Callable[[list[Row]], LoadedRecords]:
    layout, entry = LAYOUTS[name], entry_for(name.partition(" by ")[0].partition(",")[0])

    def load(rows: list[Row]) -> LoadedRecords:
        numbered = rows
        if name.startswith("folktables"):  # the publisher's own number keeps persons apart
            numbered = [row | {"SPORDER": str(place)} for place, row in enumerate(rows)]
        write(folder / layout.path, layout, numbered)
        if entry.name == "adult":
            write(folder / "adult" / "adult.test", layout, numbered[:1])
        return entry.load(Request(data_dir=folder, seed=0, options=entry.complete_options(layout.options)))

    return load


def drawn(records: LoadedRecords, kept: list[int], *, seed: int) -> tuple[dict[int, str], dict[int, int]]:
    """The split of every row, and the teacher of every private one; ``kept`` are the rows of the file."""
    numbers = torch.tensor(kept)[:, None]
    plain = replace(records, records=replace(records.records, x=numbers), mapped=None, origins=None)
    splits = divide(plain, SIZES, seed=seed)
    split_of = {int(row): name for name, split in splits.items() for row in split.x[:, 0]}
    private = splits["private"]
    teachers = assign_teachers(private.unit_id, NUM_TEACHERS, shard_key(seed))
    return split_of, dict(zip(private.x[:, 0].tolist(), teachers.tolist(), strict=True))


@pytest.mark.parametrize("name", quick_and_slow(LAYOUTS, QUICK))
def test_a_changed_attribute_changes_the_attribute_and_nothing_else(name: str, tmp_path: Path) -> None:
    layout, load = LAYOUTS[name], loader_of(name, tmp_path)
    rows = layout.rows()
    before = load(rows)
    assert len(set(before.records.record_id)) == len(before.records)
    for place, row in enumerate(rows[:6]):  # either variant with each value, before and behind its copies
        after = load([*rows[:place], layout.changed(row), *rows[place + 1 :]])
        others = [other for other in range(len(rows)) if other != place]
        assert after.records.record_id[: len(rows)] == before.records.record_id[: len(rows)]
        assert after.records.unit_id[: len(rows)] == before.records.unit_id[: len(rows)]
        assert torch.equal(after.records.y[: len(rows)], before.records.y[: len(rows)])
        assert torch.equal(after.records.x[others], before.records.x[others])
        assert torch.equal(after.records.x[place], before.records.x[place]) != ("seen" in name)
        assert torch.equal(after.records.z[others], before.records.z[others])
        assert after.records.z[place] != before.records.z[place]


@pytest.mark.parametrize("name", quick_and_slow((name for name in LAYOUTS if not name.startswith("folktables")), QUICK))
def test_a_removed_record_moves_no_other_and_reaches_one_teacher(name: str, tmp_path: Path) -> None:
    """Though each is one of four that share all but the attribute, which a counter in file order tells apart."""
    load, everyone = loader_of(name, tmp_path), several_units(LAYOUTS[name])
    count = len(everyone)
    whole = _first(load(everyone), count)
    before = [drawn(whole, list(range(count)), seed=seed) for seed in range(3)]
    assert all("private" in split_of.values() for split_of, _ in before)
    for place in range(count):
        kept = [other for other in range(count) if other != place]
        smaller = _first(load([everyone[i] for i in kept]), count - 1)
        for seed, (split_of, teacher_of) in enumerate(before):
            if place in teacher_of:
                split_after, teacher_after = drawn(smaller, kept, seed=seed)
                assert split_after == {row: name for row, name in split_of.items() if row != place}
                assert teacher_after == {row: teacher for row, teacher in teacher_of.items() if row != place}


def several_units(layout: Layout) -> list[Row]:
    """Four units of four records each."""
    number = {
        "adult": "hours-per-week",
        "retired_adult": "hours-per-week",
        "bank": "campaign",
        "compas": "priors_count",
    }
    number |= {"heart": "Income", "acs": "DENSITY", "parkinsons": "test_time"}
    column = number[layout.path.partition("/")[0]]
    return [row | {column: str(value)} for value in (1, 3) for row in layout.rows()[:8]]


def _first(records: LoadedRecords, count: int) -> LoadedRecords:
    return replace(records, records=records.records.take(range(count)))


def test_names_of_pictures_do_not_tell_the_group(tmp_path: Path) -> None:
    """Eight pictures of four pairs that have age, gender and date in common; of two fours with only age and date."""

    def load(groups: list[tuple[int, int]], sensitive: str) -> LoadedRecords:
        shutil.rmtree(tmp_path / "utkface", ignore_errors=True)
        for place, (gender, race) in enumerate(groups):
            path = tmp_path / "utkface" / "UTKFace" / str(place) / f"30_{gender}_{race}_{place // 4}.jpg"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 20 * place, np.uint8)).save(path, format="PNG")
        options = {"image_size": 32, "label": "age", "sensitive": sensitive}
        return pictures.load_utkface(
            Request(data_dir=tmp_path, seed=0, options=entry_for("utkface").complete_options(options))
        )

    groups = [(place % 2, place % 5) for place in range(8)]
    for sensitive, units, genders in (("race", 4, False), ("race_and_gender", 2, True)):
        before = load(groups, sensitive)
        assert len(set(before.records.unit_id)) == units
        for place in (0, 3, 6):  # of either gender and either four
            for other in itertools.product((0, 1) if genders else (groups[place][0],), range(5)):
                after = load([other if each == place else groups[each] for each in range(8)], sensitive)
                assert after.records.record_id == before.records.record_id
                assert torch.equal(after.records.x, before.records.x)
                assert torch.equal(after.records.y, before.records.y)
                assert int((after.records.z != before.records.z).sum()) == (other != groups[place])


def test_a_picture_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for part in ("part1", "part2"):
        path = tmp_path / "utkface" / "UTKFace" / part / "30_0_1_2017.jpg"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    with pytest.raises(DataError, match=r"one picture 2 times: part1/30_0_1_2017\.jpg, part2/30_0_1_2017\.jpg; remove"):
        pictures.load_utkface(
            Request(data_dir=tmp_path, seed=0, options=entry_for("utkface").complete_options({"image_size": 32}))
        )
