"""Division by ranked hashes: sizes are met, disjoint, and private records move nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.config import DataConfig
from fairpate.data import DataError, Dataset, Split, load_data
from fairpate.data.dataset import (
    SPLIT_NAMES,
    DatasetEntry,
    LoadedRecords,
    check_members,
    divide,
    origins,
)
from fairpate.types import UserError

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

SIZES = {"public": 7, "validation": 3, "test": 9}


def records_of(names: list[str], **words: object) -> LoadedRecords:
    count = len(names)
    split = Split(
        x=torch.arange(count, dtype=torch.float32)[:, None],
        y=torch.arange(count) % 2,
        z=(torch.arange(count) // 2) % 2,
        record_id=tuple(names),
    )
    base = LoadedRecords(
        kind="tabular", records=split, label_names=("no", "yes"), group_names=("a", "b"), sensitive_attribute="g"
    )
    return replace(base, **words)  # type: ignore[arg-type]


def members(splits: dict[str, Split]) -> dict[str, set[str]]:
    return {name: set(split.record_id) for name, split in splits.items()}


def names(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


@given(count=st.integers(19, 60), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_sizes_are_exact_and_every_record_is_in_one_split(count: int, seed: int) -> None:
    splits = divide(records_of(names(count)), SIZES, seed=seed)
    assert {name: len(split) for name, split in splits.items()} == {
        "public": 7,
        "validation": 3,
        "test": 9,
        "private": count - 19,
    }
    assert set().union(*members(splits).values()) == set(names(count))


@given(order_seed=st.integers(0, 1000), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_splits_do_not_depend_on_row_order(order_seed: int, seed: int) -> None:
    shuffled = [f"r{i}" for i in np.random.default_rng(order_seed).permutation(40)]
    assert members(divide(records_of(shuffled), SIZES, seed=seed)) == members(
        divide(records_of(names(40)), SIZES, seed=seed)
    )


@given(seed=st.integers(0, 1000), victim=st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_removing_a_private_record_moves_no_other_record(seed: int, victim: int) -> None:
    before = members(divide(records_of(names(40)), SIZES, seed=seed))
    removed = sorted(before["private"])[victim]
    after = members(divide(records_of([name for name in names(40) if name != removed]), SIZES, seed=seed))
    assert after == before | {"private": before["private"] - {removed}}


def test_a_larger_public_split_contains_the_smaller_one() -> None:
    small, large = (
        members(divide(records_of(names(100)), SIZES | {"public": size}, seed=0))["public"] for size in (10, 30)
    )
    assert small < large


def test_seeds_give_different_divisions() -> None:
    first, second = (members(divide(records_of(names(100)), SIZES, seed=seed))["public"] for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("kind", ["persons", "equal records"])
def test_a_unit_stays_together_and_sizes_are_lower_bounds(kind: str) -> None:
    persons = tuple(f"p{i // 4}" for i in range(80))
    apart = records_of(names(80))
    records = (
        replace(apart, person_ids=persons)
        if kind == "persons"
        else replace(apart, records=replace(apart.records, unit_id=persons))
    )
    splits = divide(records, SIZES, seed=3)
    persons_in = {name: {persons[int(i[1:])] for i in split.record_id} for name, split in splits.items()}
    assert sum(len(part) for part in persons_in.values()) == 20
    assert [len(splits[name]) for name in ("public", "validation", "test")] == [8, 4, 12]


def test_origins_are_respected() -> None:
    records = records_of(names(100), origins=origins(private=20, training=40, held_out=30, test=10))
    splits = divide(records, {"public": 10, "validation": 5, "test": None}, seed=0)
    number = {name: {int(i[1:]) for i in split.record_id} for name, split in splits.items()}
    assert number["public"] | number["validation"] <= set(range(20, 90))
    assert number["test"] == set(range(60, 100)) - number["public"] - number["validation"]
    assert number["private"] == set(range(60)) - number["public"] - number["validation"]


def entry_of(records: LoadedRecords, *, rows: int, num_test: int | None = None) -> DatasetEntry:
    words = dict.fromkeys(("task", "sensitive", "publisher", "address", "licence"), "")
    sizes = {"num_public": 8, "num_validation": 8, "num_test": num_test}
    return DatasetEntry(name="t", rows=rows, kind="tabular", load=lambda _: records, **sizes, **words)  # type: ignore[arg-type]


def test_the_default_test_size_is_declared_set_aside_or_a_quarter_of_the_published_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, set_aside = records_of(names(40)), records_of(names(40), origins=origins(training=35, test=5))
    for records, rows, declared, size in ((free, 50, None, 12), (free, 50, 5, 5), (set_aside, 4, None, 5)):
        entry = entry_of(records, rows=rows, num_test=declared)
        monkeypatch.setattr("fairpate.data.registry.entry_for", lambda _, entry=entry: entry)
        assert len(load_data(DataConfig(name="t")).test) == size


@pytest.mark.parametrize("victim", range(0, 40, 5))
def test_with_default_sizes_a_private_record_moves_no_other_record(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(kept: list[int]) -> dict[str, set[str]]:
        everyone = records_of(names(100))
        found = replace(everyone, records=everyone.records.take(kept))
        monkeypatch.setattr("fairpate.data.registry.entry_for", lambda _: entry_of(found, rows=100))
        return members(load_data(DataConfig(name="t")).splits)

    before = load(list(range(100)))
    removed = sorted(before["private"])[victim]
    after = load([i for i in range(100) if f"r{i}" != removed])
    assert [len(before[name]) for name in ("public", "validation", "test", "private")] == [8, 8, 25, 59]
    assert after == before | {"private": before["private"] - {removed}}


def test_a_size_that_cannot_be_met_names_the_field() -> None:
    with pytest.raises(DataError, match=r"data\.num_public: expected at most 5, .* got 7") as raised:
        divide(records_of(names(5)), SIZES, seed=0)
    assert isinstance(raised.value, UserError)


def dataset_of(**splits: Split) -> Dataset:
    whole = records_of(names(8)).records
    parts = dict.fromkeys(("private", "public", "validation", "test"), whole) | splits
    return Dataset(
        name="t", kind="tabular", label_names=("no", "yes"), group_names=("a", "b"), sensitive_attribute="g", **parts
    )


def test_an_empty_validation_split_is_allowed() -> None:
    whole = records_of(names(8)).records
    check_members(dataset_of(validation=whole.take([])), *SPLIT_NAMES)


def test_a_group_without_a_member_is_named() -> None:
    whole = records_of(names(8)).records
    with pytest.raises(
        DataError, match=r"group of g b\. If the split has its own file, add such records .*; if it is drawn"
    ):
        check_members(dataset_of(public=whole.take([0, 1, 4])), *SPLIT_NAMES)
    check_members(dataset_of(public=whole.take([0, 1, 4])), "private", "test")


def test_a_class_without_a_private_member_is_named() -> None:
    whole = records_of(names(8)).records
    with pytest.raises(DataError, match="private split has no member of class yes"):
        check_members(dataset_of(private=whole.take([0, 2])), "private")
