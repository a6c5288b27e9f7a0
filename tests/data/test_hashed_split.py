"""A hashed split: a unit that is added or removed changes one part, and moves no other unit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import fairpate
from fairpate.config import ConfigError, DataConfig
from fairpate.data import DataError, Dataset
from fairpate.methods.base import config_digest, configured

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARED: dict[str, Any] = {
    "name": "clinic",
    "label": {"column": "y", "classes": ["no", "yes"]},
    "group": {"column": "sex", "values": ["F", "M"]},
    "features": {"age": {"bounds": [0, 100]}},
    "rows": 60,
}
KEYED = {"identity": {"key": "id"}}
OF_PERSONS = {"person": "person"}
PARTS = ("private", "validation", "test")
DIGESTS = {"dp_sgd": "4d9be66b94b3", "fairpate": "4fec77688e41"}


def columns(rows: list[int], *, prefix: str = "r") -> dict[str, list[Any]]:
    """Rows by number; from one to the next third the same values come again, with another key."""
    return {
        "id": [f"{prefix}{row}" for row in rows],
        "age": [float(row % 20) for row in rows],
        "sex": ["FM"[row % 2] for row in rows],
        "y": ["no" if row % 20 < 9 else "yes" for row in rows],
        "person": [f"{prefix}{row // 3}" for row in rows],
    }


def loaded(rows: list[int], declared: dict[str, Any], **settings: Any) -> Dataset:
    split = {"test_share": 0.3, "validation_share": 0.2}
    settings = {"split": split | {name: settings.pop(name) for name in split if name in settings}} | settings
    public = columns(list(range(20)), prefix="p") | {"age": [50.0 + row for row in range(20)]}
    return fairpate.load_data(DECLARED | declared, private=columns(rows), public=public, **settings)


def members(dataset: Dataset) -> dict[str, list[Any]]:
    """The units of each part in their order, with all that a method reads of their records."""
    return {
        name: [
            (*each, tuple(x))
            for *each, x in zip(
                split.together, split.y.tolist(), split.z.tolist(), split.x.numpy().round(6).tolist(), strict=True
            )
        ]
        for name, split in dataset.splits.items()
    }


@pytest.mark.parametrize(
    "declared", [KEYED, {}, OF_PERSONS, KEYED | OF_PERSONS], ids=["key", "content", "person", "both"]
)
def test_each_record_or_person_changes_one_part_and_moves_no_other(declared: dict[str, Any]) -> None:
    everyone = list(range(30))
    whole = members(loaded(everyone, declared, seed=1))
    counts = {name: len(part) for name, part in whole.items()}
    assert sum(counts[name] for name in PARTS) == 30
    assert all(counts[name] for name in PARTS)
    changed = set()
    units = [[row] for row in everyone] if "person" not in declared else [everyone[i : i + 3] for i in range(0, 30, 3)]
    for unit in units:
        without = members(loaded([row for row in everyone if row not in unit], declared, seed=1))
        (part,) = [name for name in whole if whole[name] != without[name]]
        changed.add(part)
        # What is left stands in the same order, and what is missing is this unit.
        rest = copy.copy(whole[part])
        for each in without[part]:
            assert each in rest
            rest.remove(each)
        assert len(rest) == len(unit)
        others = [each for each in whole[part] if each not in rest or each in without[part]]
        assert [each for each in without[part] if each in others] == without[part]
    assert changed == set(PARTS)


def test_no_group_and_no_content_of_a_keyed_record_decides_its_part() -> None:
    rows = list(range(60))
    before = loaded(rows, KEYED)
    given = columns(rows) | {"sex": ["FM"[(row + 1) % 2] for row in rows], "age": [99.0] * 60}
    after = fairpate.load_data(
        DECLARED | KEYED,
        private=given,
        public=columns(list(range(20)), prefix="p"),
        split={"test_share": 0.3, "validation_share": 0.2},
    )
    assert [list(before.splits[name].record_id) for name in PARTS] == [
        list(after.splits[name].record_id) for name in PARTS
    ]
    assert before.keeps_names
    assert not loaded(rows, {}).keeps_names
    assert loaded(rows, OF_PERSONS).keeps_names
    # Each record of a person by itself: one that is replaced may be another person's.
    assert not loaded(rows, OF_PERSONS, unit="record").keeps_names


def test_shares_are_those_of_the_hash_and_equal_records_stay_together() -> None:
    rows = list(range(3000))
    sizes = {name: len(split) for name, split in loaded(rows, KEYED).splits.items()}
    assert sizes["public"] == 20
    for part, share in (("test", 0.3), ("validation", 0.2), ("private", 0.5)):
        assert abs(sizes[part] - 3000 * share) < 5 * np.sqrt(3000 * share * (1 - share))
    equal = members(loaded(rows, {}))
    assert not {each[0] for each in equal["private"]} & {each[0] for each in equal["test"]}


def test_parts_are_identified_by_all_that_moves_a_record() -> None:
    rows = list(range(60))
    first = loaded(rows, KEYED).parts
    assert loaded(rows[:50], KEYED).parts == first  # not by the records
    others = {
        loaded(rows, KEYED, seed=1).parts,
        loaded(rows, KEYED, test_share=0.31).parts,
        loaded(rows, KEYED, validation_share=0.1).parts,
        loaded(rows, {}).parts,
    }
    assert len(others | {first}) == 5


def test_a_test_file_of_its_own_is_the_test_split() -> None:
    private, public, test = (
        columns(list(range(count)), prefix=name) for count, name in ((60, "r"), (20, "p"), (9, "t"))
    )
    found = fairpate.load_data(DECLARED | KEYED, private=private, public=public, test=test, split="hashed")
    assert [len(found.splits[name]) for name in ("private", "validation", "test")] == [60, 0, 9]


def test_a_data_set_may_have_few_public_records_or_none() -> None:
    rows = list(range(60))
    whole, few, none = (loaded(rows, KEYED, **settings) for settings in ({}, {"num_public": 7}, {"num_public": 0}))
    assert [len(each.public) for each in (whole, few, none)] == [20, 7, 0]
    assert set(few.public.record_id) < set(whole.public.record_id)
    alone = fairpate.load_data(DECLARED | KEYED, private=columns(rows), split={"test_share": 0.3})
    assert len(alone.public) == 0
    assert members(none)["test"] == members(whole)["test"] == members(alone)["test"]


def test_a_pool_from_private_files_and_numbers_of_records_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.split: hashed needs public records in files of their own"):
        fairpate.load_data(DECLARED | KEYED, records=columns(list(range(60))), split="hashed", num_public=10)
    with pytest.raises(DataError, match=r"data\.split: hashed needs public"):
        fairpate.load_data(DataConfig(name="color_digits", split="hashed"))
    for field, value in (("num_test", 10), ("num_validation", 5)):
        with pytest.raises(ConfigError, match=rf"with a hashed split, got {field}={value}"):
            loaded(list(range(60)), KEYED, **{field: value})
    with pytest.raises(ConfigError, match=r"test_share \+ validation_share < 1"):
        loaded(list(range(60)), KEYED, test_share=0.5, validation_share=0.5)


def test_a_group_without_a_test_record_is_no_reason_to_refuse_a_run() -> None:
    """Whether it has one depends on private records, which the table of metrics protects."""
    rows = list(range(60))
    whole = loaded(rows, KEYED)
    kept = [name for name, z in zip(whole.test.record_id, whole.test.z.tolist(), strict=True) if z]
    alone = loaded([row for row in rows if f"clinic-r{row}" not in kept], KEYED)
    assert set(alone.test.z.tolist()) == {0}


def test_configurations_without_a_hashed_split_keep_their_digests() -> None:
    """Kept releases are found by them: another digest computes what is kept again, and the changelog has to say so."""
    assert config_digest(configured({}, method="dp_sgd")) == DIGESTS["dp_sgd"]
    assert config_digest(configured({"evaluation": {"least_cell": 5}}, method="fairpate")) == DIGESTS["fairpate"]
