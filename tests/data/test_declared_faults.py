"""Faults that a newcomer makes in a declaration or in files: each is told with its field, its value and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairpate import load_data
from fairpate.data import DataError

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

YAML, PRIVATE, PUBLIC, TEST = "own.yaml", "patients.csv", "pool.csv", "held_out.csv"
FILES = {
    YAML: """name: hospital
task: readmitted
files: {private: patients.csv, public: pool.csv, test: held_out.csv}
label: {column: readmitted, classes: [no, yes]}
group: {column: sex, values: [F, M]}
person: patient
features:
  age: {bounds: [0, 110]}
  weight: {bounds: [20, 250], missing: 75}
  ward: {categories: [A, B], missing: unknown}
identity: {key: visit}
""",
    PRIVATE: "visit,patient,age,weight,ward,sex,readmitted\n1,p,50,70.5,A,F,no\n2,p,60,,B,F,yes\n3,q,7,30,,M,no\n",
    PUBLIC: "visit,patient,age,weight,ward,sex\n4,r,50,70.5,A,F\n5,s,60,,B,M\n",
    TEST: "visit,patient,age,weight,ward,sex,readmitted\n6,t,50,70.5,A,F,no\n7,u,60,,B,M,yes\n",
}
GROUP = "group: {column: sex, values: [F, M]}"
LABEL = "label: {column: readmitted, classes: [no, yes]}"
FILE_LIST = "{private: patients.csv, public: pool.csv, test: held_out.csv}"
AGE = "  age: {bounds: [0, 110]}\n"
# File, what stands there, what stands there instead, and the words of the message.
FAULTS: list[tuple[str, str, str, tuple[str, ...]]] = [
    # The declaration as YAML.
    (YAML, "name: hospital", "name: hospital\nname: other", ("cannot be read as YAML", "name is given twice")),
    (YAML, "name: hospital", "name: [hospital", ("own.yaml", "cannot be read as YAML")),
    (YAML, "name: hospital", "name:\thospital\n\ttab: x", ("own.yaml", "cannot be read as YAML")),
    (YAML, FILES[YAML], "- hospital\n", ("own.yaml", "expected a mapping", "got list")),
    (YAML, FILES[YAML], "", ("own.yaml: name: missing; add it", "own.yaml: features: missing; add it")),
    # Its fields.
    (YAML, "name: hospital", "name: Our Hospital", ("name", "got 'Our Hospital'")),
    (YAML, "name: hospital\n", "", ("name: missing; add it",)),
    (YAML, "name: hospital\n", "name: hospital\nkind: tables\n", ("kind", "'table'", "got 'tables'")),
    (YAML, "task:", "tsk:", ("tsk: unknown field; did you mean task?",)),
    (YAML, "features:", "columns:", ("columns: unknown field", "features: missing; add it")),
    (YAML, "name: hospital\n", "name: hospital\nrows: many\n", ("rows", "got 'many'")),
    (YAML, "name: hospital\n", "name: hospital\nrows: 0\n", ("rows", "expected > 0", "got '0'")),
    (YAML, "name: hospital\n", "name: hospital\nseparator: ';;'\n", ("separator", "got ';;'")),
    # Files.
    (YAML, FILE_LIST, "patients.csv", ("files: expected `records:`", "got 'patients.csv'")),
    (YAML, FILE_LIST, "{}", ("files: expected `records`", "or `private`", "got neither")),
    (
        YAML,
        "private: patients.csv",
        "private: patients.csv, records: pool.csv",
        ("files: expected `records`", "got both"),
    ),
    (YAML, "test:", "tests:", ("files.tests: unknown field; did you mean test?",)),
    (YAML, "pool.csv", "../pool.csv", ("files.public.0.path", "got '../pool.csv'", "--data-dir")),
    (YAML, "pool.csv", "/srv/pool.csv", ("files.public.0.path", "got '/srv/pool.csv'", "--data-dir")),
    (YAML, "pool.csv", "pool.csv.zip", ("files: pool.csv.zip", "which may be gzipped, got an archive")),
    (YAML, "pool.csv", "gone.csv", ("gone.csv: missing file. Put gone.csv into",)),
    (YAML, "pool.csv", "gone-*.csv", ("gone-*.csv: no file matches", "correct the pattern")),
    (YAML, "pool.csv", "[pool.csv, pool.csv]", ("different name for each record, got 2", "remove the copies")),
    # The label and the group.
    (YAML, LABEL, "label: readmitted", ("label", "got 'readmitted'")),
    (YAML, LABEL, "label: {column: readmitted}", ("label.classes: missing; add it",)),
    (YAML, "[no, yes]", "[no]", ("label.classes: expected two names or more", "got no")),
    (YAML, "[no, yes]", "[no, no]", ("label.classes: expected each value once, got 'no' twice",)),
    (YAML, "classes: [no, yes]", "values: [no, yes]", ("label.classes: missing", "label.values: unknown field")),
    (YAML, "[no, yes]", "{no: {below: 5}, yes: {above: 3}}", ("label.classes: expected ranges that do not overlap",)),
    (YAML, "column: readmitted", "column: readmited", ("no column readmited; did you mean readmitted?",)),
    (YAML, GROUP, "", ("groups: missing; add it",)),
    (
        YAML,
        GROUP,
        "group: sex",
        ("group or groups: missing; add it", "group: expected a mapping with `column`", "'sex'"),
    ),
    (YAML, "group:", "grupe:", ("group or groups: missing; add it", "grupe: unknown field; did you mean group?")),
    (YAML, "group:", "grp:", ("num_test, group.",)),
    (YAML, "group:", "groups:", ("groups: expected a name for each group", "write `group` instead of `groups`")),
    (YAML, GROUP, GROUP.replace("values", "valus"), ("yaml: group.valus: unknown field; did you mean values?",)),
    (YAML, GROUP, f"{GROUP}\ngroups: {{sex: {{values: [F, M]}}}}", ("group: expected group or groups, got both",)),
    (YAML, "values: [F, M]", "values: [F]", ("values: expected two names or more", "got F")),
    # Features.
    (YAML, AGE, "  age: [0, 110]\n", ("features.age", "got ['0', '110']")),
    (YAML, AGE, "  age: {}\n", ("features.age: expected one of: bounds (a number), categories, bands",)),
    (YAML, "[0, 110]", "[110, 0]", ("features.age: expected bounds [low, high] with low < high, got [110, 0]",)),
    (YAML, "[0, 110]", "[0]", ("features.age.bounds.1: missing; add it",)),
    (YAML, "[0, 110]", "[0, old]", ("features.age.bounds.1", "got 'old'")),
    (YAML, "[0, 110]", "[0, inf]", ("features.age.bounds.1", "got 'inf'")),
    (YAML, "[0, 110]}", "[0, 110], scale: ln}", ("features.age.scale", "'linear' or 'log'", "got 'ln'")),
    (YAML, "[0, 110]}", "[0, 110], categories: [1]}", ("features.age: expected one of: bounds",)),
    (YAML, "[0, 110]}", "[0, 110], other: true}", ("features.age", "`aliases`", "`other`", "`categories`")),
    (
        YAML,
        "missing: 75",
        "missing: 999",
        ("features.weight: missing: expected a number within the bounds", "`unknown`"),
    ),
    (YAML, "missing: 75", "missing: none", ("features.weight: missing: expected a number", "got 'none'")),
    (YAML, "[A, B]", "[A, A]", ("features.ward: expected each value once, got 'A' twice",)),
    (YAML, "[A, B]", "[A, B], aliases: {a: C}", ("features.ward: expected aliases of declared categories, got 'C'",)),
    (YAML, "[A, B]", "[A, other], other: true", ("features.ward: expected no category 'other' with other: true",)),
    (YAML, AGE, AGE + "  readmitted: {categories: [no]}\n", ("features: readmitted is the label; a model may not",)),
    (YAML, AGE, AGE + "  years: {columns: age, bounds: [0, 9]}\n", ("features: age is declared twice; leave one out",)),
    (YAML, "  age:", "  aeg:", ("no column aeg; did you mean age?",)),
    # What names records and persons.
    (YAML, "key: visit", "key: sex", ("identity: sex may be the sensitive attribute", "leave it out")),
    (YAML, "person: patient", "person: sex", ("person: sex may be the sensitive attribute", "leave it out")),
    (YAML, "person: patient", "person: pat", ("no column pat; did you mean patient?",)),
    (PRIVATE, "2,p", "1,p", ("different name for each record, got 1", "such as 'hospital-1'", "identity.key")),
    (PUBLIC, "4,r", "1,r", ("different name for each record, got 1", "also those in other files")),
    (TEST, "6,t", "6,q", ("held_out.csv: column patient", "other persons than in other parts", "in 1 row", "one part")),
    (TEST, "6,t", "6,", ("held_out.csv: column patient: expected a person, got none in 1 row; give each row",)),
    (PRIVATE, "2,p", "2,p;q", ("patients.csv: column patient: expected one person in each row, got 'p;q' in 1 row",)),
    (PUBLIC, "4,r", "4,r|s", ("pool.csv: column patient: expected one person", "'r|s'", "separators", "data.unit")),
    # Files that are no table.
    (PUBLIC, FILES[PUBLIC], "", ("pool.csv: not a readable table (it is empty",)),
    (PUBLIC, "\n4,r,50,70.5,A,F\n5,s,60,,B,M\n", "\n", ("pool.csv: not a readable table (it has no row)",)),
    (PUBLIC, "50,70.5", "50,70,5", ("pool.csv: not a readable table", "Expected 6 columns, got 7", "separator")),
    (
        PUBLIC,
        "visit,patient",
        "visit,visit",
        ("pool.csv: column visit: two columns with different values have this name",),
    ),
    (PUBLIC, ",ward", ",wards", ("pool.csv: no column ward; did you mean wards?",)),
    (PUBLIC, ",", ";", ("pool.csv: no column visit", "looks like several: declare the `separator`")),
    # Values.
    (PRIVATE, "60,,B", "sixty,,B", ("patients.csv: column age: expected a number, got 'sixty' in 1 row", "`unknown`")),
    (PRIVATE, "60,,B", '"60,5",,B', ("column age: expected a number, got '60,5' in 1 row", "decimal point")),
    (PRIVATE, "60,,B", ",,B", ("patients.csv: column age: expected a value, got none in 1 row", "with `missing`")),
    (PRIVATE, "60,,B", "1e999,,B", ("column age: expected a number, got '1e999' in 1 row",)),
    (TEST, "B,M", "Z,M", ("held_out.csv: column ward", "got 'Z' in 1 row; declared: A, B", "`other: true`")),
    (TEST, "yes", "Yes", ("held_out.csv: column readmitted", "got 'Yes' in 1 row; declared: no, yes")),
    (PRIVATE, ",no\n", ",\n", ("patients.csv: column readmitted: expected a class, got none in 2 rows", "only public")),
    (PUBLIC, "B,M", "B,D", ("pool.csv: column sex: expected a declared group, got 'D' in 1 row; declared: F, M",)),
    (PUBLIC, "B,M", "B,", ("pool.csv: column sex: expected a group, got none in 1 row",)),
    (
        TEST,
        "B,M",
        "B,F",
        ("The test split has no member of group of sex M", "If the split has its own file, add such records to it"),
    ),
    (
        PRIVATE,
        "yes",
        "no",
        (
            "The private split has no member of class yes",
            "or leave the missing names out of the declaration and their records out of all",
        ),
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_without_a_fault_the_data_set_is_read(folder: Path) -> None:
    dataset = load_data(folder / YAML)
    assert {name: len(split) for name, split in dataset.splits.items()} == {
        "private": 3,
        "public": 2,
        "validation": 0,
        "test": 2,
    }


@pytest.mark.parametrize(("file", "old", "new", "words"), FAULTS)
def test_a_fault_is_told_with_field_value_and_remedy(
    file: str, old: str, new: str, words: tuple[str, ...], folder: Path
) -> None:
    assert old in FILES[file]
    (folder / file).write_text(FILES[file].replace(old, new), encoding="utf-8")
    with pytest.raises(DataError) as error:
        load_data(folder / YAML)
    for part in words:
        assert part in str(error.value)


def test_there_are_many() -> None:
    assert len({fault[:3] for fault in FAULTS}) >= 75


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.rstrip("\n").encode(),
        lambda text: text.replace(",A,", ',"A",').encode(),
        lambda text: text.replace(",", " , ").encode(),
    ],
    ids=["byte order mark", "CRLF", "no last newline", "quotes", "spaces"],
)
def test_how_text_is_written_makes_no_difference(encode: object, folder: Path) -> None:
    before = load_data(folder / YAML)
    for name in (PRIVATE, PUBLIC, TEST):
        (folder / name).write_bytes(encode(FILES[name]))  # type: ignore[operator]
    after = load_data(folder / YAML)
    for name, split in before.splits.items():
        assert split.x.tolist() == after.splits[name].x.tolist()
        assert split.record_id == after.splits[name].record_id


def test_a_character_that_belongs_to_names_is_declared(folder: Path) -> None:
    (folder / PRIVATE).write_text(FILES[PRIVATE].replace("2,p", '2,"Doe, Jane"'), encoding="utf-8")
    with pytest.raises(DataError, match=r"expected one person in each row, got 'Doe, Jane' in 1 row"):
        load_data(folder / YAML)
    declared = FILES[YAML].replace("person: patient", "person: {column: patient, separators: ';'}")
    (folder / YAML).write_text(declared, encoding="utf-8")
    assert set(load_data(folder / YAML).private.person_id) == {"person-p", "person-Doe, Jane", "person-q"}


def test_wrong_bytes_are_told(folder: Path) -> None:
    (folder / PUBLIC).write_bytes(FILES[PUBLIC].replace("5,s", "5,Jürgen").encode("latin-1"))
    with pytest.raises(DataError, match=r"pool\.csv: not a readable table \(.*UTF8.*in UTF-8"):
        load_data(folder / YAML)
    (folder / YAML).write_bytes(FILES[YAML].replace("task: readmitted", "task: Rückkehr").encode("latin-1"))
    with pytest.raises(DataError, match=r"own\.yaml: cannot be read as YAML: .*utf-8"):
        load_data(folder / YAML)
