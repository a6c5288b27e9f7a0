"""Private, public and test records from files of their own: who goes where, what their names tell, what may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairpate.config import DataConfig
from fairpate.data import DataError, Dataset, describe, load_data, load_once
from fairpate.data.dataset import DataSettingsError

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARATION = """
name: clinic
files: {private: private-*.csv, public: public.csv, test: test.csv}
label: {column: y, classes: [no, yes]}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100]}
"""
HEADER = "age,sex,y\n"
FILES = {
    "private-1.csv": HEADER + "1,F,no\n2,M,yes\n",
    "private-2.csv": HEADER + "3,F,yes\n4,M,no\n1,F,no\n",
    "public.csv": "age,sex\n1,F\n2,M\n3,F\n",
    "test.csv": HEADER + "9,F,no\n8,M,yes\n",
}


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    (tmp_path / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def configured(folder: Path, **options: object) -> DataConfig:
    return DataConfig.model_validate({"name": "clinic", "declaration": {"path": folder / "clinic.yaml"}} | options)


def load(folder: Path, **options: object) -> Dataset:
    return load_data(configured(folder, **options))


def change(folder: Path, old: str, new: str, file: str = "clinic.yaml") -> None:
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def ages(dataset: Dataset) -> dict[str, list[int]]:
    return {name: [round(100 * x) for x in split.x[:, 0].tolist()] for name, split in dataset.splits.items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_each_record_goes_to_the_part_of_its_file(seed: int, clinic: Path) -> None:
    dataset = load(clinic, seed=seed)
    assert ages(dataset) == {"private": [1, 2, 3, 4, 1], "public": [1, 2, 3], "validation": [], "test": [9, 8]}
    assert dataset.public.y.tolist() == [-1, -1, -1]
    assert dataset.private.y.tolist() == [0, 1, 1, 0, 0]


def test_records_are_kept_until_a_file_changes(clinic: Path) -> None:
    config = configured(clinic)
    first = load_once(config)
    assert load_once(config) is first
    change(clinic, "4,M,no\n", "4,M,no\n60,M,no\n", file="private-2.csv")
    assert ages(load_once(config))["private"] == [1, 2, 3, 4, 60, 1]
    (clinic / "private-3.csv").write_text(HEADER + "70,F,no\n", encoding="utf-8")
    assert ages(load_once(config))["private"] == [1, 2, 3, 4, 60, 1, 70]
    (clinic / "test.csv").unlink()
    with pytest.raises(DataError, match="missing file"):
        load_once(config)


def test_a_folder_that_matches_the_pattern_of_a_tables_files_is_passed_over(clinic: Path) -> None:
    (clinic / "private-0.csv").mkdir()
    config = configured(clinic)
    assert ages(load_once(config))["private"] == [1, 2, 3, 4, 1]
    change(clinic, "private-*.csv", "private-0.csv", file="clinic.yaml")
    with pytest.raises(DataError, match=r"private-0\.csv: missing file\. "):
        load_once(configured(clinic))


def test_public_names_do_not_depend_on_private_records(clinic: Path) -> None:
    before = load(clinic)
    change(clinic, "1,F,no\n", "", file="private-1.csv")
    change(clinic, "1,F,no\n", "7,F,no\n", file="private-2.csv")
    after = load(clinic)
    assert after.public.record_id == before.public.record_id
    assert after.test.record_id == before.test.record_id
    every = [name for split in before.splits.values() for name in split.record_id]
    assert len(set(every)) == len(every)


def test_a_larger_part_may_be_taken_in_part(clinic: Path) -> None:
    seed = next(seed for seed in range(20) if _has_every_group(clinic, seed=seed, num_public=2))
    dataset = load(clinic, seed=seed, num_public=2)
    assert len(dataset.public) == 2
    assert set(dataset.public.record_id) < set(load(clinic).public.record_id)


def _has_every_group(clinic: Path, **options: int) -> bool:
    try:
        load(clinic, **options)
    except DataError:
        return False
    return True


def test_records_are_divided_into_the_parts_that_have_no_files(clinic: Path) -> None:
    change(clinic, "private: private-*.csv", "records: private-*.csv")
    change(clinic, "name:", "num_validation: 2\nname:")
    change(clinic, "4,M", "4,F", file="private-2.csv")
    change(clinic, "age,sex,y\n1,F", "age,sex,y\n5,M", file="private-1.csv")
    found = next(ages(load(clinic, seed=seed)) for seed in range(20) if _has_every_group(clinic, seed=seed))
    assert (found["public"], found["test"]) == ([1, 2, 3], [9, 8])
    assert len(found["validation"]) == 2
    assert sorted(found["validation"] + found["private"]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rows", ["", "rows: 8\n"])
def test_a_quarter_of_the_declared_rows_is_tested_on(rows: str, clinic: Path) -> None:
    change(clinic, "{private: private-*.csv, public: public.csv, test: test.csv}", "{records: private-*.csv}")
    change(clinic, "name:", f"{rows}num_public: 1\nnum_validation: 0\nname:")
    with pytest.raises(DataError, match="no member of" if rows else "clinic: rows: missing; declare how many"):
        load(clinic)


def test_without_test_records_there_are_none(clinic: Path) -> None:
    change(clinic, ", test: test.csv", "")
    assert len(load(clinic).test) == 0
    with pytest.raises(DataSettingsError, match=r"data\.num_test: expected at most 0, .* got 1"):
        load(clinic, num_test=1)


def test_records_without_a_label_are_counted_by_group_alone(clinic: Path) -> None:
    described = describe(load(clinic))
    counts = {part.name: (part.records, part.counts_GC) for part in described.splits}
    assert counts["public"] == (3, ((0, 0), (0, 0)))
    assert counts["private"] == (5, ((2, 1), (1, 1)))


@pytest.mark.parametrize("part", ["test", "private-1"])
def test_only_public_records_may_lack_a_label(part: str, clinic: Path) -> None:
    for file in ("test.csv", "private-1.csv", "private-2.csv") if part == "test" else ("private-1.csv",):
        change(clinic, ",yes", ",", file=file)
    with pytest.raises(DataError, match=rf"{part}\.csv: column y: expected a class, got none in 1 row; only public"):
        load(clinic)


def test_a_person_is_in_one_part(clinic: Path) -> None:
    for file, text in FILES.items():
        rows = text.splitlines()
        lines = [f"who,{rows[0]}", *(f"{file}{place},{row}" for place, row in enumerate(rows[1:]))]
        (clinic / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    change(clinic, "name:", "person: who\nname:")
    assert len(load(clinic).private) == 5
    assert [load(clinic, unit=unit).records_alone for unit in (None, "record")] == [False, True]
    change(clinic, "test.csv0", "public.csv1", file="test.csv")
    change(clinic, "test.csv1", "public.csv1", file="test.csv")
    change(clinic, "private-2.csv1", "", file="private-2.csv")
    with pytest.raises(DataError) as error:
        load(clinic)
    assert str(error.value).splitlines() == [
        "private-2.csv: column who: expected a person, got none in 1 row; give each row its person, or "
        "protect each record by itself (data.unit=record).",
        "test.csv: column who: expected other persons than in other parts, got persons of another part in 2 rows; "
        "keep all rows of this person in one part, or protect each record by itself (data.unit=record).",
    ]
    change(clinic, "y\npublic.csv1", "y\npublic.csv0", file="test.csv")
    with pytest.raises(DataError, match=r"2 rows; keep all rows of each of these 2 persons in one part"):
        load(clinic)
    alone = load(clinic, unit="record")
    assert (alone.unit, len(alone.private), len(alone.test)) == ("record", 5, 2)


def test_under_the_record_unit_a_row_without_a_person_is_its_own(clinic: Path) -> None:
    rows = "\n".join(f",{age},{'MF'[age // 2 % 2]},{['no', 'yes'][age % 2]}" for age in range(40))
    (clinic / "all.csv").write_text(f"who,age,sex,y\n{rows}\n", encoding="utf-8")
    change(clinic, "{private: private-*.csv, public: public.csv, test: test.csv}", "{records: all.csv}\nperson: who")
    dataset = load(clinic, unit="record", num_public=10, num_validation=0, num_test=10)
    assert (len(dataset.public), len(dataset.test), len(dataset.private)) == (10, 10, 20)


def test_a_key_names_one_record_of_all_parts(clinic: Path) -> None:
    change(clinic, "name:", "identity: {key: age}\nname:")
    with pytest.raises(DataError, match=r"Expected a different name for each record, got 4 .*such as"):
        load(clinic)


def test_faults_of_all_files_are_told_at_once(clinic: Path) -> None:
    change(clinic, "2,M,yes", "two,X,maybe", file="private-1.csv")
    change(clinic, "8,M", "8,", file="test.csv")
    with pytest.raises(DataError) as error:
        load(clinic)
    assert str(error.value).splitlines() == [
        "private-1.csv: column age: expected a number, got 'two' in 1 row; correct it, or declare it as `unknown`.",
        "private-1.csv: column y: expected a declared class, got 'maybe' in 1 row; declared: no, yes.",
        "private-1.csv: column sex: expected a declared group, got 'X' in 1 row; declared: F, M.",
        "test.csv: column sex: expected a group, got none in 1 row; declare what an empty cell means, or leave the row "
        "out with `keep`.",
    ]
