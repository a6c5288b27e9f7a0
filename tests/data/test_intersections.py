"""Groups that are combinations of several attributes: codes by hand, what is hidden, and what names may tell."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fairpate
from fairpate.config import DataConfig
from fairpate.data import DataError, load_data
from fairpate.data.dataset import DataSettingsError

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARED: dict[str, Any] = {
    "name": "court",
    "label": {"column": "y", "classes": ["no", "yes"]},
    "groups": {"race": {"values": {"white": "w", "other": ["b", "h"]}}, "sex": {"values": ["F", "M"]}},
    "intersections": {"race_and_sex": ["race", "sex"], "sex_and_race": ["sex", "race"]},
    "features": {
        "age": {"bounds": [0, 1000]},
        "race": {"categories": ["w", "b", "h"]},
        "sex": {"categories": ["F", "M"]},
    },
    "num_public": 40,
    "num_validation": 0,
    "num_test": 40,
}
PEOPLE = list(itertools.product("wbh", "FM", ("no", "yes"), range(12)))


def table(people: list[tuple[str, str, str, int]]) -> dict[str, list[Any]]:
    """Each with an age of its own, so that no two share a name."""
    race, sex, label, _ = zip(*people, strict=True)
    return {"age": list(range(len(people))), "race": race, "sex": sex, "y": label}


def read(people: list[tuple[str, str, str, int]], sensitive: str, **changes: Any) -> fairpate.Dataset:
    return fairpate.load_data(DECLARED | changes, records=table(people), options={"sensitive": sensitive})


def test_every_combination_is_a_group_in_the_order_of_the_names() -> None:
    by_race = read(PEOPLE, "race_and_sex")
    assert by_race.group_names == ("white & F", "white & M", "other & F", "other & M")
    assert by_race.sensitive_attribute == "race and sex"
    assert read(PEOPLE, "sex_and_race").group_names == ("F & white", "F & other", "M & white", "M & other")
    for split in by_race.splits.values():
        for age, z in zip(split.x[:, 0], split.z, strict=True):
            race, sex, *_ = PEOPLE[round(1000 * float(age))]
            assert by_race.group_names[int(z)] == f"{'white' if race == 'w' else 'other'} & {sex}"


def test_different_combinations_have_different_names() -> None:
    groups = {"one": {"values": ["x", "x & y"]}, "other": {"values": ["z", "y & z"]}}
    people = list(itertools.product(["x", "x & y"], ["z", "y & z"], ["no", "yes"], range(20)))
    one, other, label, _ = zip(*people, strict=True)
    declared = DECLARED | {"groups": groups, "intersections": {"both": ["one", "other"]}}
    declared["features"] = {"age": {"bounds": [0, 1000]}}
    rows = {"age": list(range(len(people))), "one": one, "other": other, "y": label}
    names = fairpate.load_data(declared, records=rows, options={"sensitive": "both"}).group_names
    assert names == ("x & z", 'x & "y & z"', '"x & y" & z', '"x & y" & "y & z"')


def test_none_of_its_attributes_is_a_feature_unless_asked_for() -> None:
    assert read(PEOPLE, "race_and_sex").feature_names == ("age",)
    assert read(PEOPLE, "race").feature_names == ("age", "sex=F", "sex=M")
    options = {"sensitive": "race_and_sex", "sensitive_as_feature": True}
    seen = fairpate.load_data(DECLARED, records=table(PEOPLE), options=options)
    assert seen.feature_names == ("age", "race=w", "race=b", "race=h", "sex=F", "sex=M")


@pytest.mark.parametrize("text", [None, ["age", "sex", "y"]])
def test_names_tell_no_attribute_that_is_in_force(text: list[str] | None) -> None:
    """Where somebody changes race or sex, names and the division stay; where sex alone is not in force it may name."""
    named = {} if text is None else {"identity": {"text": text}}
    before = read(PEOPLE, "race_and_sex", **named)
    race, sex, label, number = PEOPLE[40]
    for other in (("h" if race != "h" else "w", sex), (race, "F" if sex == "M" else "M")):
        after = read([*PEOPLE[:40], (*other, label, number), *PEOPLE[41:]], "race_and_sex", **named)
        for name, split in before.splits.items():
            assert tuple(after.splits[name].record_id) == tuple(split.record_id)
            assert torch.equal(after.splits[name].x, split.x)
        moved = [(a.z != b.z).sum() for a, b in zip(after.splits.values(), before.splits.values(), strict=True)]
        assert sum(moved) == (other[1] != sex or (race == "w") != (other[0] == "w"))
    by_race, of_both = read(PEOPLE, "race", **named), before
    same = set(by_race.test.record_id) == set(of_both.test.record_id)
    assert same == (text is None), "a declared text follows the choice, and the default one does not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intersections": {"race_and_age": ["race", "age"]}}, "intersections.race_and_age: no group age"),
        ({"intersections": {"race": ["race", "sex"]}}, "intersections.race: this is a group; choose another name"),
        (
            {"intersections": {"both": ["race"]}},
            "intersections.both: expected two groups or more, each with its own column",
        ),
        ({"intersections": {"both": ["race", "race"]}}, "intersections.both: expected two groups or more"),
        ({"identity": {"text": ["race", "y"]}}, "identity: race may be the sensitive attribute"),
        ({"identity": {"text": ["sex"]}}, "identity.text: expected a column that is not a group"),
        ({"identity": {"key": ["sex"]}}, "identity: sex may be the sensitive attribute"),
    ],
)
def test_what_cannot_be_crossed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataSettingsError, match=message.replace(".", r"\.")):
        read(PEOPLE, "race", **changes)


def test_a_combination_without_a_member_is_named() -> None:
    people = [each for each in PEOPLE if each[:2] != ("w", "M")]
    with pytest.raises(DataError, match="no member of group of race and sex white & M"):
        read(people, "race_and_sex")


def test_adult_by_race_and_sex_counts_as_its_files_do(data_dir: Path) -> None:
    counts: Counter[str] = Counter()
    for name in ("adult.data", "adult.test"):
        path = data_dir / "adult" / name
        text = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.decode().splitlines()) if len(row) == 15]
        counts.update(f"{row[8]} & {row[9]}" for row in rows)
    options = {"sensitive": "race_and_sex"}
    dataset = load_data(DataConfig(name="adult", data_dir=data_dir, options=options, num_public=6000))
    z = torch.cat([split.z for split in dataset.splits.values()])
    assert {name: int((z == code).sum()) for code, name in enumerate(dataset.group_names)} == counts
    assert not any(name.startswith(("race", "sex")) for name in dataset.feature_names)
