"""Persons behind records: kept together, stored and read back, refused where missing, and what they add to a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import fairpate
from fairpate.config import DataConfig
from fairpate.data import Dataset, Split, load_data
from fairpate.data.dataset import (
    Alike,
    DataError,
    DatasetEntry,
    LoadedRecords,
    alike,
    divide,
    row_blocks,
    shortened_by_person,
)
from fairpate.types import REMARKS

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

COUNT = 60
PERSONS = tuple(f"person {place % 17}" for place in range(COUNT))


def records(persons: tuple[str, ...] | None = PERSONS, **others: object) -> LoadedRecords:
    codes = torch.arange(COUNT) % 2
    split = Split(
        x=torch.arange(COUNT).float()[:, None], y=codes, z=codes, record_id=tuple(f"record {n}" for n in range(COUNT))
    )
    return LoadedRecords(
        kind="tabular",
        records=split,
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="group",
        person_ids=persons,
        **others,  # type: ignore[arg-type]
    )


def with_persons(found: LoadedRecords) -> LoadedRecords:
    """All records of a person are protected together."""
    assert found.person_ids is not None
    return dataclasses.replace(found, records=dataclasses.replace(found.records, person_id=found.person_ids))


def visits(persons: tuple[str, ...] = PERSONS) -> DatasetEntry:
    return DatasetEntry(
        name="visits", task="", sensitive="", publisher="", address="", licence="", rows=COUNT, kind="tabular",
        load=lambda _: records(persons), num_public=7, num_validation=2, num_test=9, persons=17,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_all_records_of_a_person_are_in_one_split_under_their_name(seed: int) -> None:
    splits = divide(with_persons(records()), {"public": 7, "validation": 5, "test": 9}, seed=seed)
    found = [
        (int(x), person) for split in splits.values() for (x,), person in zip(split.x, split.person_id, strict=True)
    ]
    assert sorted(found) == list(enumerate(PERSONS))
    parts = [set(split.person_id) for split in splits.values()]
    assert sum(map(len, parts)) == len(set().union(*parts))
    private = splits["private"]
    assert private.num_protected == len(set(private.person_id)) < len(private)
    assert private.together == private.person_id
    assert [private.person_id[row] for row in range(len(private))] == [
        list(dict.fromkeys(private.person_id))[number]
        for number in private.person_N.tolist()  # type: ignore[union-attr]
    ]


def test_where_persons_do_not_count_splits_keep_them_together_all_the_same() -> None:
    counted = divide(with_persons(records()), {"public": 7, "validation": 5, "test": 9}, seed=1)
    alone = divide(records(), {"public": 7, "validation": 5, "test": 9}, seed=1)
    for name, split in alone.items():
        assert split.record_id == counted[name].record_id
        assert (split.person_id, split.person_N) == ((), None)
        assert (split.num_protected, split.together) == (len(split), split.unit_id)


def test_a_record_without_a_person_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairpate.data.registry.entry_for", lambda _: visits(("", "", *PERSONS[2:])))
    with pytest.raises(DataError, match=r"got 2 without a person; complete .*data.unit=record"):
        load_data(DataConfig(name="visits"))
    split = records().records
    with pytest.raises(ValueError, match="a person for every record or for none, got 1 without"):
        dataclasses.replace(split, person_id=("", *PERSONS[1:]))
    with pytest.raises(ValueError, match="one length"):
        dataclasses.replace(split, person_id=PERSONS[1:])


def test_a_person_whom_the_publisher_parts_is_refused() -> None:
    origins = ("training",) * 30 + ("test",) * 30
    parted = records(origins=origins)
    alone = divide(parted, {"public": 3, "validation": 2, "test": None}, seed=0)
    assert alone["test"].person_id == ()
    private, test = ({PERSONS[int(x)] for x in alone[name].x} for name in ("private", "test"))
    words = rf"got {len(private & test)} persons with some in the private and some in the test split.*data.unit=record"
    with pytest.raises(DataError, match=words):
        divide(with_persons(parted), {"public": 3, "validation": 2, "test": None}, seed=0)


def dataset_of(persons: bool) -> Dataset:
    found = with_persons(records()) if persons else records()
    return Dataset(
        name="visits",
        kind="tabular",
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="group",
        **divide(found, {"public": 7, "validation": 0, "test": 9}, seed=0),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("persons", [True, False])
def test_parts_of_a_split_keep_their_persons(persons: bool) -> None:
    dataset = dataset_of(persons)
    assert dataset.unit == ("person" if persons else "record")
    private = dataset.private
    kept = private.take([3, 0])
    assert kept.person_id == ((private.person_id[3], private.person_id[0]) if persons else ())
    assert private.take([]).person_id == ()
    assert len(private.take([])) == 0


def test_the_configuration_says_whether_persons_count(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = visits()
    monkeypatch.setattr("fairpate.data.registry.entry_for", lambda _: entry)
    assert load_data(DataConfig(name="visits")).unit == "person"
    alone = load_data(DataConfig(name="visits", unit="record"))
    assert (alone.unit, alone.private.person_id) == ("record", ())
    assert (entry.protected({}, None), entry.protected({}, "record")) == ((17, "person"), (entry.rows, "record"))


@pytest.mark.parametrize("size", [1, 4, 10, 1000])
def test_parts_keep_persons_whole(size: int) -> None:
    person_N = np.random.default_rng(size).integers(0, 12, 50)
    parts = list(row_blocks(50, size, person_N))
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    seen = [set(person_N[part].tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert max(map(len, parts)) < size + np.bincount(person_N).max()


def test_votes_of_a_person_are_summed_and_shortened() -> None:
    """By hand: (3, 4) of length 5 for one person, (1, 0) twice in row 0 and once in row 1 for another, bound 4."""
    votes = np.array([[3, 4], [1, 0], [1, 0], [0, 1]])
    rows, shortened = shortened_by_person(votes, np.array([1, 0, 0, 1]), np.array([0, 1, 1, 1]), norm=4)
    assert rows.tolist() == [1, 0, 1]
    # 3 times (4 - 1) / 5 = 1.8 and 4 * 3 / 5 = 2.4, towards zero; sqrt(2^2 + 1) < 4 stays.
    assert shortened.tolist() == [[1, 2], [2, 0], [0, 1]]


def test_no_person_moves_a_table_by_more_than_the_bound_and_none_moves_anothers_votes() -> None:
    """Brute force: every person removed in turn."""
    generator, norm, shape = np.random.default_rng(0), 2**14, (4, 6)
    votes = generator.integers(-6000, 6000, (80, shape[1]))
    rows, persons = generator.integers(0, shape[0], 80), generator.integers(0, 20, 80)
    persons[:3] = 21  # three equal votes, as long as may be
    votes[:3], rows[:3] = 0, 2
    votes[:3, 1] = norm

    def table(kept: np.ndarray) -> np.ndarray:
        total = np.zeros(shape, dtype=np.int64)
        found, added = shortened_by_person(votes[kept], rows[kept], persons[kept], norm=norm)
        np.add.at(total, found, added)
        return total

    everybody, lengths = table(np.full(80, True)), []
    for person in np.unique(persons):
        moved = everybody - table(persons != person)
        assert (table(persons == person) == moved).all(), "what a person adds depends on nobody else"
        lengths.append(int((moved * moved).sum()))
        plain = np.zeros(shape, dtype=np.int64)
        np.add.at(plain, rows[persons == person], votes[persons == person])
        if (plain * plain).sum() <= norm**2:
            assert (plain == moved).all()
        else:
            cosine = (plain * moved).sum() / np.sqrt(float((plain * plain).sum()) * lengths[-1])
            assert cosine > 1 - 1e-6
            assert lengths[-1] > (norm - 8) ** 2
    assert max(lengths) <= norm**2


def test_more_records_of_one_person_than_can_be_squared_are_refused() -> None:
    count = 2**17 + 1
    with pytest.raises(ValueError, match="at most 131072 records of one person"):
        shortened_by_person(np.ones((count, 1), np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64), norm=4)


def test_a_declared_table_with_persons_protects_them(tmp_path: Path) -> None:
    lines = [f"{n % 21},{20 + n},{'FM'[n % 2]},{'no' if n % 3 else 'yes'}" for n in range(120)]
    declaration = tmp_path / "clinic.yaml"
    declaration.write_text(
        "name: clinic\ntask: ill or not\nrows: 120\nfiles: {records: all.csv}\n"
        "label: {column: ill, classes: ['no', 'yes']}\ngroup: {column: sex, values: [F, M]}\n"
        "person: patient\nfeatures: {age: {bounds: [0, 140]}}\n",
        encoding="utf-8",
    )

    def loaded(rows: list[str], **options: object) -> Dataset:
        (tmp_path / "all.csv").write_text("\n".join(["patient,age,sex,ill", *rows]) + "\n", encoding="utf-8")
        sizes = {"num_public": 30, "num_validation": 0, "num_test": 30}
        return load_data(DataConfig(name="clinic", declaration=declaration, **sizes, **options))  # type: ignore[arg-type]

    dataset = loaded(lines)
    assert dataset.unit == "person"
    named = [name for split in dataset.splits.values() for name in set(split.person_id)]
    assert len(named) == len(set(named)) == 21
    assert loaded(lines, unit="record").unit == "record"
    with pytest.raises(DataError, match=r"patient.*1 row.*person"):
        loaded([*lines[:-1], f",{lines[-1].partition(',')[2]}"])


@pytest.mark.parametrize(
    ("one", "others", "how"),
    [
        ("7", ["7.0", "07", "+7", "7.", "7e0", "\N{FULLWIDTH DIGIT SEVEN}", "7\N{ZERO WIDTH SPACE}"], "numbers"),
        ("0.5", [".5", "00.50", "5e-1"], "numbers"),
        ("9007199254740993", ["9007199254740993.0"], "numbers"),
        ("Zo\u00eb", ["Zoe\u0308", "ZOE\u0308"], "signs"),  # composed or not
        # Two spaces, one that does not break, small letters, a variation selector.
        ("Anna Ott", ["Anna  Ott", "Anna\u00a0Ott", "anna ott", "Anna Ott\ufe0f"], "signs"),
        # A byte-order mark, a soft hyphen, a mark of direction, a control character.
        ("K1", ["\ufeffK1", "K\u00ad1", "K1\u200f", "K\x001", "k1"], "signs"),
        ("\ufb01n", ["fin"], "signs"),  # a ligature
        ("stra\u00dfe", ["strasse"], "signs"),
    ],
)  # fmt: skip
def test_names_that_are_probably_one_are_counted_in_and_across_parts(one: str, others: list[str], how: str) -> None:
    """Names that are equal as text are one, and need no doubt."""
    far = ["8", "K2", "9007199254740992", "Anna Otto"]
    within = Alike(part="private", how=how, names=1 + len(others))  # type: ignore[arg-type]
    assert alike({"private": [one, *others, one, *far]}) == (within,)
    across = Alike(part="test", how=how, names=len(others), other_part="private")  # type: ignore[arg-type]
    assert across in alike({"private": [one, *far], "test": [one, *others, *far]})
    assert alike({"private": [one, *far], "test": [one, *far]}) == ()


def test_names_that_only_look_alike_are_different() -> None:
    assert alike({"private": ["7", "-7", "70", "0x7", "7a", "VII", "1_0", "10", "", ".", "e5", "-"]}) == ()


def test_a_statement_about_persons_says_that_they_are_names(tmp_path: Path) -> None:
    rows = "".join(f"{n % 30}{'.0' * (n % 2)},{20 + n},{'FM'[n % 2]},{('no', 'yes')[n // 2 % 2]}\n" for n in range(120))
    (tmp_path / "all.csv").write_text("patient,age,sex,ill\n" + rows, encoding="utf-8")
    declared = {
        "name": "clinic", "rows": 120, "files": {"private": "all.csv"}, "person": "patient",
        "label": {"column": "ill", "classes": ["no", "yes"]}, "group": {"column": "sex", "values": ["F", "M"]},
        "features": {"age": {"bounds": [0, 140]}},
    }  # fmt: skip
    dataset = fairpate.load_data(declared, data_dir=tmp_path)
    settings = {"out": tmp_path / "run", "dp_sgd": {"batch_size": 10, "epochs": 1}, "seed": 0}
    run = fairpate.run_method(fairpate.configured(settings, method="dp_sgd"), fairpate.Reporter(quiet=True), dataset)
    statement = fairpate.read_statement(run)
    assert (statement.unit, REMARKS["persons_by_name"] in statement.remarks) == ("person", True)
    alone = fairpate.load_data(declared, data_dir=tmp_path, unit="record")
    run = fairpate.run_method(
        fairpate.configured(settings | {"out": tmp_path / "alone"}, method="dp_sgd"),
        fairpate.Reporter(quiet=True),
        alone,
    )
    assert REMARKS["persons_by_name"] not in fairpate.read_statement(run).remarks
