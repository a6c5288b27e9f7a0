"""`fairpate data declare` reads public records and one header; `fairpate data check` counts what a declaration does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from fairpate.data import load_data
from fairpate.data.declaration import read_declaration
from fairpate.data.draft import outwards
from fairpate.pages import delta_caution
from fairpate.releases.odometer import Odometer
from fairpate.types import REMARKS

pytestmark = pytest.mark.usefixtures("light_runs")

HEADER = "id;patient;age;weight;ward;sex;note;again"
PUBLIC = [
    f"{i};p{i // 2};{20 + i % 39};{'' if i % 4 == 0 else 50.5 + i};{'CAB'[i % 3]};{'FM'[i % 2]};text {i}"
    for i in range(40)
]


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    (tmp_path / "patients.csv").write_text(f"{HEADER}\n1;SECRET;999;1;Z;X;n;maybe\n", encoding="utf-8")
    (tmp_path / "pool.csv").write_text("\n".join([HEADER.removesuffix(";again"), *PUBLIC]) + "\n", encoding="utf-8")
    return tmp_path


def test_a_draft_is_a_declaration_with_questions(clinic, fairpate):
    assert fairpate("data", "declare", "patients.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    text = (clinic / "own.yaml").read_text(encoding="utf-8")
    found = read_declaration(clinic / "own.yaml")
    assert (found.name, found.separator, found.label.column, found.person.column) == (
        "patients",
        ";",
        "again",
        "patient",
    )
    assert found.groups["sex"].names == ("F", "M")
    assert found.features["age"].bounds == (20, 58)
    assert found.features["weight"].bounds == (51, 90)
    assert found.features["weight"].missing is not None
    assert found.features["ward"].categories == ("A", "B", "C")
    assert set(found.features) == {"age", "weight", "ward"}
    assert "# id: left out: another value in each row. If it names records: `identity: {key: id}`" in text
    assert "# note: left out" in text
    assert all("#" in line for line in text.splitlines() if line and not line.startswith("files:"))
    for field in ("label", "group", "person", "  age", "  # test"):
        assert any(line.startswith(field) and "# ?" in line for line in text.splitlines()), field


def test_without_public_records_every_column_is_a_question(clinic, fairpate):
    (clinic / "patients.csv").write_bytes(HEADER.encode() + b"\n\xff\xff;no;table;at;all\n\x00" * 100)
    assert fairpate("data", "declare", "patients.csv", "-o", "own.yaml")[0] == 0
    found, text = read_declaration(clinic / "own.yaml"), (clinic / "own.yaml").read_text(encoding="utf-8")
    assert (found.separator, found.person.column, found.groups["sex"].column) == (";", "patient", "sex")
    assert found.files.public == ()
    for feature in found.features:
        assert any(line.startswith(f"  {feature}: ") and "# ?" in line for line in text.splitlines()), feature
    assert {"age", "weight", "ward"} < set(found.features)


def test_dates_that_may_be_read_in_two_ways_and_commas_are_left_out_with_what_to_declare(tmp_path, fairpate):
    rows = [f'{1 + i % 12}/03/20{i % 3 + 20},"{i % 35 + 1},500",{i % 3}' for i in range(90)]
    for name in ("own.csv", "pool.csv"):
        (tmp_path / name).write_text("\n".join(["seen,paid,y", *rows]) + "\n", encoding="utf-8")
    assert fairpate("data", "declare", "own.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    text = (tmp_path / "own.yaml").read_text(encoding="utf-8")
    assert "# seen: left out: dates. To use them, declare `date: year`" in text
    assert "# paid: left out: numbers with commas. To use them, write" in text


def german(i: int) -> str:
    return f"{1 + i % 28:02d}.{1 + i % 12:02d}.{1950 + i % 50};{1 + i % 40}.00{i % 10},5;{'FM'[i % 2]};c{i // 3:04d}"


@pytest.fixture
def kunden(tmp_path: Path) -> Path:
    """A German export: semicolons, decimal commas, days first, cp1252, and a customer with three rows."""
    rows = [f"{german(i)};{('Zürich', 'Bern')[i // 2 % 2]}" for i in range(300)]
    labelled = [f"{row};{('ja', 'nein')[i // 4 % 2]}" for i, row in enumerate(rows)]
    header = "geburt;betrag;sex;kd_nr;ort"
    for name, lines in (("kunden.csv", [f"{header};ausfall", *labelled]), ("pool.csv", [header, *rows[:150]])):
        (tmp_path / name).write_bytes("\n".join(lines).encode("cp1252"))
    return tmp_path


def test_a_german_export_is_drafted_and_read(kunden, fairpate):
    assert fairpate("data", "declare", "kunden.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    path = kunden / "own.yaml"
    found = read_declaration(path)
    assert (found.encoding, found.decimal, found.separator) == ("cp1252", ",", ";")
    # A customer's rows share an id, though its name does not say that it is of persons.
    assert (found.label.column, found.person.column) == ("ausfall", "kd_nr")
    assert found.features["betrag"].bounds == (1000, 41000)
    assert found.features["ort"].categories == ("Bern", "Zürich")
    birth = found.features["geburt"]
    assert (birth.date, birth.date_format, birth.bounds) == ("year", "%d.%m.%Y", (1950, 1999))
    text = path.read_text(encoding="utf-8")
    assert "Zürich" not in fairpate("data", "declare", "kunden.csv")[1]  # private rows are not read
    text = text.replace("classes: [no, yes]", "classes: [ja, nein]").replace("person: kd_nr", "# person: kd_nr")
    age = "{date: age, age_on: 2020-06-15, date_format: '%d.%m.%Y', bounds: [0, 100]}"
    text = "\n".join(f"  geburt: {age}" if line.startswith("  geburt") else line for line in text.splitlines())
    path.write_text(text, encoding="utf-8")
    private = load_data(path).private.x
    found = sorted((round(row[0] * 100), round(row[1] * 40000 + 1000, 1)) for row in private.tolist())
    # On 15 June, persons born later in the year are a year younger.
    expected = [
        (2020 - (1950 + i % 50) - ((1 + i % 12, 1 + i % 28) > (6, 15)), (1 + i % 40) * 1000 + i % 10 + 0.5)
        for i in range(300)
    ]
    assert [age for age, _ in found] == [age for age, _ in sorted(expected)]
    assert [paid for _, paid in found] == pytest.approx([paid for _, paid in sorted(expected)], abs=0.2)


def test_what_was_read_from_private_rows_asks_to_be_confirmed_and_is_no_bound(kunden, fairpate):
    private = (kunden / "kunden.csv").read_bytes().decode("cp1252").splitlines()
    # No id repeats in the pool.
    (kunden / "pool.csv").write_bytes("\n".join(line.rpartition(";")[0] for line in private[:300:3]).encode("cp1252"))
    pool_only = fairpate("data", "declare", "kunden.csv", "--public", "pool.csv")[1]
    code, text, _ = fairpate("data", "declare", "kunden.csv", "--public", "pool.csv", "--read-private")
    assert code == 0
    confirmed = [line for line in text.splitlines() if "confirm from knowledge" in line]
    assert [line.partition(":")[0] for line in confirmed] == ["label", "person"]
    assert "classes: [ja, nein]" in confirmed[0]
    assert "ja, nein" not in pool_only
    # Features are those of the pool; the person is none.
    (features, of_pool) = (each.partition("features:")[2].splitlines() for each in (text, pool_only))
    assert features == [line for line in of_pool if not line.startswith("  # kd_nr")]


def test_a_number_of_customers_and_marks_among_decimal_commas_and_dates_are_found(tmp_path, fairpate):
    """Two rows for each Kundennr, amounts that may be "k. A." or whole, others in each row, and days that may lack."""
    rows = [
        f"K{i // 2};{'k. A.' if i % 9 == 4 else f'{i % 900}.000,5'};{i + 1},CENT;{i % 40 / 2:g};"
        f"{'' if i % 50 == 7 else f'{1 + i % 28:02d}.03.{1950 + i % 40}'};{'ab'[i % 2]}"
        for i in range(1200)
    ]
    rows = [row.replace(".5;", ",5;") for row in rows]
    head = "Kundennr;Betrag;Kredit;Jahre;Geburt;sex"
    labelled = [f"{head};y", *(f"{row};{'ja' if i % 2 else 'nein'}" for i, row in enumerate(rows))]
    # Other customers with other amounts: a pool of the same ones would be a copy of private records.
    for name, lines, cent in (
        ("own.csv", labelled, "25"),
        ("pool.csv", [head, *(f"P{row}" for row in rows)], "5"),
        ("test.csv", [line if line == labelled[0] else f"T{line}" for line in labelled], "75"),
    ):
        (tmp_path / name).write_text("\n".join(lines).replace("CENT", cent), encoding="utf-8")
    asked = ("data", "declare", "own.csv", "--public", "pool.csv", "--test", "test.csv", "--read-private")
    assert fairpate(*asked, "-o", "own.yaml")[0] == 0
    found = read_declaration(tmp_path / "own.yaml")
    assert found.person.column == "Kundennr"
    assert found.features["Betrag"].unknown == ("k. A.",)
    assert found.features["Kredit"].bounds == (0, 1300)  # also of what comes after the thousandth value
    assert found.features["Jahre"].bounds == (0, 20)
    assert (found.features["Geburt"].bounds, found.features["Geburt"].missing) == ((1950, 1989), "1969")
    assert [each.path for each in found.files.test] == ["test.csv"]
    code, output, _ = fairpate("data", "check", "own.yaml")
    assert code == 0, output
    assert "questions of the draft to answer: the lines with `# ?`" in output
    text = (tmp_path / "own.yaml").read_text(encoding="utf-8")
    cautioned = "11 questions of the draft to answer (the lines with `# ?`)"
    planned = ("run", "--data", "own.yaml", "--epsilon", "1", "--dry-run")
    assert cautioned in " ".join(fairpate(*planned)[1].split())
    assert cautioned.partition(" (")[0] in output
    (tmp_path / "own.yaml").write_text(text.replace("# ?", "#"), encoding="utf-8")
    assert "to answer" not in fairpate("data", "check", "own.yaml")[1]
    assert "to answer" not in fairpate(*planned)[1]


def test_columns_may_be_named(kunden, fairpate):
    named = ("--label", "ort", "--group", "ausfall", "--person", "kd_nr")
    text = fairpate("data", "declare", "kunden.csv", "--public", "pool.csv", *named)[1]
    assert "label: {column: ort, classes: [Bern, Zürich]}" in text
    assert "group: {column: ausfall," in text
    assert "person: kd_nr  # all rows of one person" in text
    code, _, said = fairpate("data", "declare", "kunden.csv", "--public", "pool.csv", "--person", "kunden_nr")
    assert (code, "--person: kunden.csv has no column kunden_nr; did you mean kd_nr?" in said) == (2, True), said


def test_folders_of_pictures_are_drafted(tmp_path, fairpate):
    for place in ("own/no/F/1", "own/yes/M/2", "pool/no/F/3", "pool/no/M/4"):
        path = tmp_path / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    plain = fairpate("data", "declare", "own", "--public", "pool")[1]
    assert "group: {column: level_2, values: [F, M]}  # ? the names of the folders at level 2: are these all?" in plain
    assert "which?" in next(line for line in plain.splitlines() if line.startswith("label"))
    assert fairpate("data", "declare", "own", "--public", "pool", "--read-private", "-o", "own.yaml")[0] == 0
    found = read_declaration(tmp_path / "own.yaml")
    assert (found.kind, found.label.column, found.label.names) == ("images", "level_1", ("no", "yes"))
    code, _, said = fairpate("data", "declare", "own", "--public", "own.yaml")
    assert (code, "is a declaration or a configuration" in said) == (2, True), said
    assert "  test: pool  # labelled pictures" in fairpate("data", "declare", "own", "--test", "pool")[1]
    code, _, said = fairpate("data", "declare", "own", "--test", "own/no/F/1.png")
    assert (code, "--test: expected a folder of pictures" in said) == (2, True), said
    # A folder of parts is not one of classes.
    (tmp_path / "all").mkdir()
    for part, name in (("own", "private"), ("pool", "pool")):
        (tmp_path / part).rename(tmp_path / "all" / name)
    code, _, said = fairpate("data", "declare", "all")
    assert (code, "`fairpate data declare all/private --public all/pool`" in said) == (2, True), said


@pytest.mark.parametrize(
    ("private", "name", "asks"),
    [
        ("private.csv", "clinic", True),
        ("training/private.csv", "my_data", True),
        ("wards.csv", "wards", False),
        ("bank.csv", "my_bank", True),  # `bank` is a data set that everybody knows
    ],
)
def test_a_file_or_folder_called_after_its_part_does_not_name_the_data_set(fairpate, tmp_path, private, name, asks):
    """The odometer adds up by this name: two data sets called "private" would be one."""
    file = tmp_path / "clinic" / private
    file.parent.mkdir(parents=True)
    file.write_text(f"{HEADER}\n", encoding="utf-8")
    code, _, _ = fairpate("data", "declare", file, "-o", tmp_path / "clinic" / "own.yaml")
    line = (tmp_path / "clinic" / "own.yaml").read_text(encoding="utf-8").splitlines()[2]
    assert (code, line.split()[:2], "# ?" in line) == (0, ["name:", name], asks)


def test_a_folder_of_pictures_called_private_does_not_name_the_data_set(fairpate, tmp_path):
    (tmp_path / "scans" / "private" / "no" / "F").mkdir(parents=True)
    said = fairpate("data", "declare", "scans/private")[1]
    assert "name: scans  # ? " in said and 'private: "scans/private"  # what' in said


def test_the_intended_use_is_asked_once_and_the_card_states_it(fairpate, clinic):
    use = "Planning calls: 'who?' and \"when?\" für München"
    draft = ("data", "declare", "patients.csv", "--public", "pool.csv")
    asked, answered = fairpate(*draft)[1], fairpate(*draft, "--intended-use", use)[1]
    assert 'intended_use: ""  # ? ' in asked
    assert asked.count("# ?") == answered.count("# ?") + 1
    assert yaml.safe_load(answered)["intended_use"] == use
    # From the project to the card: nobody has to say it again.
    assert fairpate("new", "ward", "--intended-use", use)[0] == 0
    fast = ("--set", "student.fit.epochs=1", "--out", "ward/run")
    assert fairpate("run", "--data", "ward/data.yaml", "--method", "weighted_votes", "--epsilon", 2, *fast)[0] == 0
    assert fairpate("card", "ward/run", "--contact", "me")[0] == 0
    card = json.loads((clinic / "ward/run/public/card.json").read_text(encoding="utf-8"))
    assert card["use"] == {"intended": use, "out_of_scope": None, "contact": "me"}
    page = (clinic / "ward/run/public/card.html").read_text(encoding="utf-8")
    # What nobody states is named in one line of a table, not in one line each.
    assert "publisher, address and licence" in page and page.count("Not stated") == 2
    assert "not stated by" not in page
    assert fairpate("card", "ward/run", "--intended-use", "Another.")[0] == 0
    card = json.loads((clinic / "ward/run/public/card.json").read_text(encoding="utf-8"))
    assert card["use"]["intended"] == "Another."


SCANS = """name: scans
kind: images
rows: 100
files: {private: private, public: public, test: test}
pictures: {size: 16, channels: 1}
label: {column: level_1, classes: [no, yes]}
group: {column: level_2, values: [F, M]}
"""


@pytest.mark.slow
def test_folders_of_pictures_are_forecast_and_compared(tmp_path, fairpate):
    generator = np.random.default_rng(0)
    for part, count in (("private", 60), ("public", 24), ("test", 24)):
        for place in range(count):
            path = tmp_path / part / ("no", "yes")[place % 2] / "FM"[place // 2 % 2] / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 128, (16, 16), dtype=np.uint8) + 100 * (place % 2)).save(path)
    (tmp_path / "scans.yaml").write_text(SCANS, encoding="utf-8")
    code, said, errors = fairpate("run", "--dry-run", "--data", "scans.yaml", "--epsilon", "1")
    assert code == 0, errors
    assert "would spend at most ε = 1.00" in said
    (tmp_path / "own.yaml").write_text(
        "methods: {weighted_votes: {settings: {target.epsilon: 1}}}\nray: {num_actors: 0}\n"
        "data_sets: {scans: {settings: {data.declaration: scans.yaml}}}\n",
        encoding="utf-8",
    )
    code, said, errors = fairpate("compare", "own.yaml", "--out", "compared")
    assert code == 0, errors
    assert "weighted_votes" in said
    (tmp_path / "public").rename(tmp_path / "pool")
    code, _, errors = fairpate("compare", "own.yaml", "--out", "other")
    assert (code, "public: missing file. Put public into" in errors) == (2, True), errors


def test_a_row_with_too_many_cells_is_not_printed(clinic, fairpate):
    header, *rows = (clinic / "pool.csv").read_text(encoding="utf-8").splitlines()
    rows[20] += ";HIV positive"
    (clinic / "pool.csv").write_text("\n".join([header, *rows]), encoding="utf-8")
    code, said, errors = fairpate("data", "declare", "patients.csv", "--public", "pool.csv")
    assert code == 1
    assert "pool.csv: not a readable table" in errors
    assert "Expected 7 columns, got 8" in errors
    assert "HIV" not in said + errors
    assert "p10" not in errors


@pytest.mark.parametrize("name", ["own.xlsx", "own.sqlite"])
def test_what_pandas_reads_is_named(name, tmp_path, fairpate):
    (tmp_path / name).write_bytes(b"PK")
    code, _, said = fairpate("data", "declare", name)
    assert code == 1
    assert f"{name}: a {'spreadsheet' if name.endswith('xlsx') else 'database'}, which is not read here" in said
    assert "pandas.read_" in said


def test_nothing_but_the_header_of_private_records_is_read(clinic, fairpate):
    before = fairpate("data", "declare", "patients.csv", "--public", "pool.csv")
    (clinic / "patients.csv").write_bytes(HEADER.encode() + b"\n\xff\xff;no;table;at;all\n\x00" * 100)
    assert fairpate("data", "declare", "patients.csv", "--public", "pool.csv") == before
    assert before[0] == 0
    assert "SECRET" not in before[1]
    assert fairpate("data", "declare", "patients.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    code, _, said = fairpate("data", "declare", "patients.csv", "--public", "pool.csv", "-o", "own.yaml")
    assert code == 2
    assert "own.yaml exists already" in said


def test_numbers_among_marks_of_what_is_missing_are_numbers(tmp_path, fairpate):
    """`NA` in a column of numbers; where all are words it is a word (Namibia)."""
    doses = ["NA", "n/a", "?", "", *(f"{10 + i // 2}" for i in range(36))]
    rows = [f"{dose},{['NA', 'DE'][i % 2]},{'FM'[i % 2]},a" for i, dose in enumerate(doses)]
    for name in ("own.csv", "pool.csv"):
        (tmp_path / name).write_text("\n".join(["dose,country,sex,y", *rows]) + "\n", encoding="utf-8")
    assert fairpate("data", "declare", "own.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    found = read_declaration(tmp_path / "own.yaml").features
    assert found["dose"].bounds == (10, 27)
    assert float(found["dose"].missing) == 18.5
    assert set(found["dose"].unknown) == {"NA", "n/a", "?"}
    assert found["country"].categories == ("DE", "NA")
    assert found["country"].missing is None


@pytest.mark.parametrize(("file", "public"), [("nothing.csv", "pool.csv"), ("patients.csv", "nothing.csv")])
def test_a_table_that_is_not_there_is_a_wrong_request(clinic, fairpate, file, public):
    code, _, said = fairpate("data", "declare", file, "--public", public)
    assert (code, "nothing.csv not found; give the path of a table." in said) == (2, True), said


def test_hostile_names_are_quoted(tmp_path, fairpate):
    names = ["a: b", "#c", "d, e", "[f]", "g'h", 'i"j', "no", "*k", "ü", " l", "- m", "{n}"]
    columns = {name: [i % 3 for i in range(30)] for name in names} | {"sex": list("FM") * 15, "y": ["a", "b"] * 15}
    pq.write_table(pa.table(columns), tmp_path / "pool.parquet")
    pq.write_table(pa.table(columns).slice(0, 1), tmp_path / "own.parquet")
    assert fairpate("data", "declare", "own.parquet", "--public", "pool.parquet", "-o", "own.yaml")[0] == 0
    assert set(read_declaration(tmp_path / "own.yaml").features) == set(names)
    code, _, said = fairpate("data", "check", "own.yaml")
    assert code == 1
    assert "The private split has no member of group of sex M" in "".join((_, said))
    (tmp_path / "own.parquet").write_bytes(b"")
    assert "own.parquet: " in fairpate("data", "check", "own.yaml")[1]


@pytest.mark.parametrize(
    ("public", "bounds"),
    [
        ((20, 59), (20, 59)),
        ((0.013, 0.0377), (0.013, 0.038)),
        ((-5, 5), (-5, 5)),
        ((0, 12345), (0, 13000)),
        ((7, 7), (7, 7)),
    ],
)
def test_bounds_are_rounded_outwards(public, bounds):
    assert outwards(*public) == pytest.approx(bounds)
    low, high = outwards(*public)
    assert low <= public[0] <= public[1] <= high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.csv", "--public", "pool.csv"], "gone.csv not found; give the path of a table"),
        (["patients.csv", "--public", "gone.csv"], "gone.csv not found; give the path of a table"),
        (["patients.csv", "--public", "deep"], "--public: expected a table, as patients.csv is, got deep"),
        (["patients.csv", "--public", "pool.csv", "-o", "deep/own.yaml"], "expected a file below"),
        (["report.pdf"], "report.pdf: not a table of records, as its first line does not name two columns or more"),
        (["archive.csv"], "archive.csv: not a table of records, as its first line does not name two columns or more"),
    ],
)
def test_what_cannot_be_drafted_is_refused(arguments, message, clinic, fairpate):
    (clinic / "deep").mkdir()
    (clinic / "report.pdf").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n<<>>\n")
    (clinic / "archive.csv").write_bytes(b"PK\x03\x04\x14\x00\x08,\x00\x07\n")
    code, printed, said = fairpate("data", "declare", *arguments)
    assert code
    assert not printed
    assert message in said


DECLARED = """
name: clinic
files: {private: private.csv, public: public.csv, test: test.csv}
label: {column: y, classes: [no, yes]}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100], missing: 50}
  ward: {categories: [A], other: true}
"""


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    (tmp_path / "clinic.yaml").write_text(DECLARED, encoding="utf-8")
    (tmp_path / "private.csv").write_text(
        "age,ward,sex,y\n-1,A,F,no\n101,B,M,yes\n,C,F,no\n5,A,F,no\n", encoding="utf-8"
    )
    (tmp_path / "public.csv").write_text("age,ward,sex\n1,A,F\n100,A,M\n", encoding="utf-8")
    (tmp_path / "test.csv").write_text("age,ward,sex,y\n1,A,F,no\n500,A,M,yes\n", encoding="utf-8")
    return tmp_path


def test_a_check_counts_what_is_clipped_missing_and_other(declared, fairpate):
    code, said, _ = fairpate("data", "check", "clinic.yaml", "--json")
    assert code == 0
    found = json.loads(said)
    assert found["rows"] == {"private.csv": 4, "public.csv": 2, "test.csv": 2}
    names = ("file", "column", "clipped", "missing", "other")
    assert [[each[name] for name in names] for each in found["columns"]] == [
        ["private.csv", "age", 2, 1, 0],
        ["private.csv", "ward", 0, 0, 2],
        ["test.csv", "age", 1, 0, 0],
    ]
    assert found["refused"] == []
    assert "learns that about the records" in found["remarks"][0]
    assert "nothing is refused; fairpate run --data clinic.yaml" in fairpate("data", "check", "clinic.yaml")[1]


def test_a_check_lists_all_that_is_refused(declared, fairpate):
    path = declared / "test.csv"
    path.write_text(path.read_text(encoding="utf-8") + "old,A,X,perhaps\n", encoding="utf-8")
    code, said, _ = fairpate("data", "check", "clinic.yaml")
    assert code == 1
    for words in ("'old' in 1 row", "'X' in 1 row", "'perhaps' in 1 row", "refused: 3 faults"):
        assert words in said
    assert fairpate("data", "check", "adult")[0] == 2


def test_that_reading_itself_tells_of_private_records_is_said_first_and_in_the_statement(declared, fairpate):
    said = " ".join(fairpate("data", "check", "clinic.yaml")[1].split())
    assert said.startswith(REMARKS["reading_tells"])
    (declared / "private.csv").write_text(
        "age,ward,sex,y\n" + "".join(f"{i},A,{'FM'[i % 2]},{('no', 'yes')[i // 2 % 2]}\n" for i in range(40))
    )
    (declared / "clinic.yaml").write_text(f"{DECLARED}rows: 40\n", encoding="utf-8")
    settings = ("--method", "dp_sgd", "--out", "run", "--set", "dp_sgd.batch_size=10", "--set", "dp_sgd.epochs=1")
    code, _, said = fairpate("run", "--data", "clinic.yaml", *settings)
    assert code == 0, said
    statement = json.loads((declared / "run" / "public" / "statement.json").read_text(encoding="utf-8"))
    assert REMARKS["reading_tells"] in statement["remarks"]


def test_a_large_delta_is_cautioned_everywhere_and_asked_about_before_anything_is_spent(
    declared, fairpate, monkeypatch
):
    """At delta .003 a mechanism may publish 12 of 4,000 records; 1/4,000 = .00025."""
    monkeypatch.setenv("FAIRPATE_STATE", str(declared / "state"))
    (declared / "private.csv").write_text(
        "age,ward,sex,y\n" + "".join(f"{i % 90},A,{'FM'[i % 2]},{('no', 'yes')[i // 2 % 2]}\n" for i in range(80))
    )
    (declared / "clinic.yaml").write_text(f"{DECLARED}rows: 4000\n", encoding="utf-8")
    caution = delta_caution(0.003, 4000, "record")
    assert "1/4,000" in caution
    assert "12 of them" in caution
    small = ("--set", "dp_sgd.batch_size=10", "--set", "dp_sgd.epochs=1")
    command = ("run", "--data", "clinic.yaml", "--method", "dp_sgd", "--epsilon", "1", *small)
    code, said, errors = fairpate(*command, "--dry-run", "--delta", "0.003")
    assert (code, caution in " ".join(said.split())) == (0, True), errors
    assert json.loads(fairpate(*command, "--dry-run", "--delta", "0.003", "--json")[1])["caution"] == caution
    assert "1/4,000" not in fairpate(*command, "--dry-run", "--delta", "1e-5")[1]
    code, _, errors = fairpate(*command, "--delta", "0.003", "--out", "run")
    assert code == 2, errors
    assert "the guarantee says next to nothing about one record; lower it with --delta" in errors
    assert "give --yes" in errors
    assert not Odometer().totals(delta=1e-5)
    code, _, errors = fairpate(*command, "--delta", "0.0003", "--out", "small")
    assert (code, delta_caution(0.0003, 4000, "record") in " ".join(errors.split())) == (0, True), errors
    code, said, errors = fairpate(*command, "--delta", "0.003", "--out", "run", "--yes")
    assert code == 0, errors
    assert caution in " ".join(said.split())
    public = declared / "run" / "public"
    statement = json.loads((public / "statement.json").read_text(encoding="utf-8"))
    assert (statement["declared_units"], statement["remarks"][0]) == (4000, caution)
    assert fairpate("card", "run")[0] == 0
    card = json.loads((public / "card.json").read_text(encoding="utf-8"))
    assert caution in card["limits"]
    assert "Private in name only" in (public / "report.html").read_text(encoding="utf-8")
    for form in ("nist", "egress"):
        assert fairpate("dossier", "run", "--for", form, "--out", f"{form}.json")[0] == 0
        assert caution in (declared / f"{form}.md").read_text(encoding="utf-8")
    (declared / "own.yaml").write_text(
        "methods: {weighted_votes: {settings: {target.epsilon: 1, target.delta: 0.003}}}\nray: {num_actors: 0}\n"
        "data_sets: {clinic: {settings: {data.declaration: clinic.yaml}}}\n",
        encoding="utf-8",
    )
    code, _, errors = fairpate("compare", "own.yaml", "--out", "compared")
    assert (code, caution in " ".join(errors.split()), "lower it with --delta" in errors) == (2, True, True), errors
    # A plan over sites too, before it is written.
    keys = [fairpate("site", "key", f"{name}.key")[1].strip() for name in ("a", "b")]
    (declared / "sites.yaml").write_text("".join(f"{n}: {k}\n" for n, k in zip("ab", keys, strict=True)), "utf-8")
    plan = (
        "site",
        "plan",
        "clinic.yaml",
        "--sites",
        "sites.yaml",
        "-o",
        "plan.json",
        "--epsilon",
        "1",
        "--delta",
        "0.003",
    )
    code, _, errors = fairpate(*plan)
    assert (code, caution in " ".join(errors.split()), "lower it with --delta" in errors) == (2, True, True), errors
    assert not (declared / "plan.json").exists()
    assert fairpate(*plan, "--yes")[0] == 0


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_a_list_of_persons_is_refused(kind, declared, fairpate):
    declaration = declared / "clinic.yaml"
    declaration.write_text(
        DECLARED.replace("private.csv", "private.parquet") + "person: who\nidentity: {text: [age]}\n", encoding="utf-8"
    )
    rows = {"age": [1, 2], "ward": ["A", "A"], "sex": ["F", "M"], "y": ["no", "yes"]}
    persons = pa.array([[1, 2], [3]], pa.list_(pa.int64())).cast(pa.list_(kind))
    pq.write_table(pa.table({**rows, "who": persons}), declared / "private.parquet")
    for name in ("public.csv", "test.csv"):
        header, *others = (declared / name).read_text(encoding="utf-8").split()
        text = "\n".join([f"{header},who", *(f"{row},{name}{i}" for i, row in enumerate(others))])
        (declared / name).write_text(text, encoding="utf-8")
    code, said, _ = fairpate("data", "check", "clinic.yaml")
    assert code == 1
    assert "private.parquet: column who: " in said
    pq.write_table(pa.table({**rows, "who": ["a", "b"]}), declared / "private.parquet")
    assert fairpate("data", "check", "clinic.yaml")[0] == 0


def test_a_check_counts_names_that_are_probably_one(tmp_path, fairpate):
    """A column of numbers with a gap is written as 7.0: the same persons in two files, and in a test file."""

    def write(name: str, ids: list[str]) -> None:
        rows = [f"{each},{'FM'[i % 2]},{20 + i},{('no', 'yes')[i // 2 % 2]}" for i, each in enumerate(ids)]
        (tmp_path / name).write_text("\n".join(["id,sex,age,y", *rows]) + "\n", encoding="utf-8")

    write("jan.csv", [str(i) for i in range(25)] * 2)
    write("feb.csv", [f"{i}.0" for i in range(25)] * 2)
    write("test.csv", [f"{i}.0" for i in range(15)] * 2)
    write("keys.csv", [f"{i:03d}" if i > 30 else str(i) for i in [*range(40), *range(3, 13)]])
    declared = (
        'name: own\nrows: 100\nfiles: FILES\nlabel: {column: y, classes: ["no", "yes"]}\n'
        "group: {column: sex, values: [F, M]}\nfeatures: {age: {bounds: [0, 100]}}\n"
    )
    for name, files, more in (
        ("two", "{private: [jan.csv, feb.csv]}", "person: id"),
        ("tested", "{private: jan.csv, test: test.csv}", "person: id"),
        ("alone", "{private: jan.csv}", "person: id"),
        ("divided", "{records: [jan.csv, feb.csv]}\nnum_public: 10\nnum_validation: 0\nnum_test: 10", "person: id"),
        ("keyed", "{private: jan.csv, test: test.csv}", "identity: {key: [id, age]}"),
    ):
        text = declared.replace("FILES", files).replace("own", name) + more
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    found = {}
    for name in ("two", "tested", "alone", "divided", "keyed"):
        code, said, _ = fairpate("data", "check", f"{name}.yaml", "--json")
        assert code == 0, said
        found[name] = [
            (each["part"], each["how"], each["names"], each["other_part"]) for each in json.loads(said)["alike"]
        ]
    assert found == {
        "two": [("private", "numbers", 50, "")],
        "tested": [("test", "numbers", 15, "private")],
        "alone": [],
        "divided": [("records", "numbers", 50, "")],
        "keyed": [],
    }
    said = " ".join(fairpate("data", "check", "tested.yaml")[1].split())
    assert "test: 15 names of persons or records equal one in private as numbers, like 7, 07 and 7.0" in said
    # A key names a record: `4` and `004` may be one.
    keyed = declared.replace("FILES", "{private: keys.csv}") + "identity: {key: id}"
    (tmp_path / "keyed.yaml").write_text(keyed, encoding="utf-8")
    (tmp_path / "keys.csv").write_text(
        (tmp_path / "jan.csv").read_text(encoding="utf-8").replace("\n4,M,74", "\n004,M,74")
    )
    text = (
        "\n".join(dict.fromkeys((tmp_path / "keys.csv").read_text(encoding="utf-8").splitlines()[:26]))
        + "\n004,M,74,yes\n"
    )
    (tmp_path / "keys.csv").write_text(text, encoding="utf-8")
    code, said, _ = fairpate("data", "check", "keyed.yaml", "--json")
    assert (code, json.loads(said)["alike"]) == (
        0,
        [{"part": "private", "how": "numbers", "names": 2, "other_part": ""}],
    ), said


def customers(spelling: str, count: int = 900) -> list[dict[str, object]]:
    """Rows of customers with about four each; cities and jobs repeat too, and so do amounts and days."""
    draw = random.Random(3)
    persons = [
        {"ref": spelling.format(1000 + i), "sex": draw.choice("FM"), "city": f"city {draw.randrange(60)}"}
        for i in range(count // 4)
    ]
    return [
        draw.choice(persons)
        | {
            "contract": f"v{i}", "job": f"job {draw.randrange(90)}", "paid": f"{draw.randrange(200)}.50",
            "seen": f"2020-{1 + draw.randrange(12):02}-{1 + draw.randrange(28):02}", "hours": draw.randrange(80),
            "way": draw.choice(["post", "web"]), "y": ["no", "yes"][i % 2],
        }
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("Kunden-Nr.", "K{}"), ("Aktenzeichen", "x-{}-a"), ("ref", "{}"), ("konto", "{}.0"), ("who?", "K{}")],
)
@pytest.mark.parametrize("reads", [("--public", "pool.csv"), ("--read-private",)], ids=["pool", "private"])
def test_an_id_that_repeats_is_asked_about_whatever_its_name(name, spelling, reads, tmp_path, fairpate):
    rows = [
        {name if column == "ref" else column: value for column, value in row.items()} for row in customers(spelling)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "own.csv", index=False)
    pd.DataFrame(rows).drop(columns="y").to_csv(tmp_path / "pool.csv", index=False)
    code, text, _ = fairpate("data", "declare", "own.csv", *reads)
    assert code == 0
    line = next(line for line in text.splitlines() if line.startswith("person: "))
    assert yaml.safe_load(line) == {"person": name}
    assert "# ? " in line
    if name != "Kunden-Nr.":  # a name that tells needs no rows
        assert "repeat" in line
        assert ("confirm from knowledge" in line) == (reads == ("--read-private",))


def test_what_repeats_and_is_no_person_is_not_asked_about(tmp_path, fairpate):
    """Neither a customer's type nor the day of a visit, whatever they are called; a city is not one person's."""
    frame = pd.DataFrame(customers("K{}")).drop(columns="ref")
    frame = frame.rename(columns={"way": "customer_type", "seen": "client_since"})
    frame.to_csv(tmp_path / "own.csv", index=False)
    frame.drop(columns="y").to_csv(tmp_path / "pool.csv", index=False)
    text = fairpate("data", "declare", "own.csv", "--public", "pool.csv")[1]
    assert "# person: patient_id  # ? the column that is the same" in text
    assert "name a person" not in text


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("group", ["sex", "way"])
@pytest.mark.parametrize("spelling", ["K{}", "{}"])
def test_a_check_names_a_column_that_is_left_out_and_may_name_persons(suffix, group, spelling, tmp_path, fairpate):
    frame = pd.DataFrame(customers(spelling)).rename(columns={"ref": "Kunden-Nr."})
    if suffix == "csv":
        frame.to_csv(tmp_path / "own.csv", index=False)
    else:
        frame.assign(blob=[b"1"] * len(frame), more=[[1]] * len(frame)).to_parquet(tmp_path / "own.parquet")
    declared = (
        f"name: own\nrows: 900\nfiles: {{private: own.{suffix}}}\nlabel: {{column: y, classes: ['no', 'yes']}}\n"
        f"group: {{column: {group}, values: {'[F, M]' if group == 'sex' else '[post, web]'}}}\n"
        "features: {hours: {bounds: [0, 100]}, sex: {categories: [F, M]}}\n"
    )
    (tmp_path / "own.yaml").write_text(declared, encoding="utf-8")
    code, said, _ = fairpate("data", "check", "own.yaml", "--json")
    known = frame["Kunden-Nr."].nunique()
    assert (code, json.loads(said)["repeated"]) == (0, [{"column": "Kunden-Nr.", "values": known, "rows": 900}])
    words = " ".join(fairpate("data", "check", "own.yaml")[1].split())
    assert "column Kunden-Nr. is left out, and its" in words and "declare `person: Kunden-Nr.`" in words
    (tmp_path / "own.yaml").write_text(declared + "person: Kunden-Nr.\n", encoding="utf-8")
    assert json.loads(fairpate("data", "check", "own.yaml", "--json")[1])["repeated"] == []


def test_without_public_records_the_last_column_is_the_label_and_a_pool_is_advised(tmp_path, fairpate):
    (tmp_path / "own.csv").write_text("Kunden-Nr.;Alter;Entscheidung;sex\n", encoding="utf-8")
    code, said, _ = fairpate("data", "declare", "own.csv", "-o", "own.yaml")
    assert code == 0
    assert "Without --public every column is a question" in said
    found = read_declaration(tmp_path / "own.yaml")
    assert found.person is not None
    assert (found.label.column, found.person.column) == ("Entscheidung", "Kunden-Nr.")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
def test_the_mark_of_an_encoding_is_read(encoding, tmp_path, fairpate):
    rows = [f"{20 + i % 31};{'FM'[i % 2]};{('nö', 'ja')[i // 2 % 2]}" for i in range(60)]
    (tmp_path / "own.csv").write_bytes("\n".join(["größe;sex;y", *rows]).encode(encoding))
    (tmp_path / "pool.csv").write_bytes("\n".join(["größe;sex;y", *rows]).encode(encoding))
    assert fairpate("data", "declare", "own.csv", "--public", "pool.csv", "-o", "own.yaml")[0] == 0
    found = read_declaration(tmp_path / "own.yaml")
    assert found.encoding == encoding.replace("-sig", "")
    assert found.label.names == ("ja", "nö")
    assert fairpate("data", "check", "own.yaml")[0] == 0
