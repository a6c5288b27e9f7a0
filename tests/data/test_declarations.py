"""A table is one YAML file: read, listed, divided and described by that alone; a wrong one is refused by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fairpate.config import DataConfig
from fairpate.data import REGISTRY, DataError, Dataset, describe, list_datasets, load_dataset
from fairpate.data.codebook import Coding, Column, Meaning
from fairpate.data.declaration import (
    Choice,
    Declaration,
    Group,
    Identity,
    Origins,
    Person,
    Rule,
    Trim,
    read_declaration,
)
from fairpate.data.entry import DatasetEntry, DataSettingsError, Records, Request, SourceFile
from fairpate.data.registry import CODEBOOKS, Registry, option_showing_attribute

DECLARATION = """
name: shop
task: buys again
rows: 24
files:
  - {path: old.csv}
  - {path: new.csv}
separator: ;
header: [customer, age, city, sex, size, again, spent]
comment: "%"
trim:
  - {columns: [city], start: 0, end: .}
options:
  branch: {default: both, values: [both, first], description: Which branch.}
  size_as_feature: {default: false, description: Whether the model may see it.}
  together: {default: true, description: Keep customers together.}
keep:
  - {column: spent, at_least: 0, missing: "", note: refunds left out}
  - {column: city, other_than: [7], when: {branch: first}}
columns:
  - {column: age, low: 20, high: 60, missing: "?"}
  - {column: city, values: [0, 7], aliases: {8: 7}}
  - {column: size, low: 0, high: 10, when: {size_as_feature: true}}
  - {column: sex, values: [f, m]}
  - {column: spent, bands: {little: 0, much: 100}}
label: {column: again, values: {stays away: no, buys: yes}}
groups:
  sex: {values: {female: f, male: m}}
  years:
    attribute: age
    column: age
    values: {middle: {at_least: 30, below: 50}, other: [{below: 30}, {at_least: 50}]}
computed_from_group: [size]
person: {column: customer, prefix: customer, when: {together: true}}
origins:
  files: {old.csv: training, new.csv: test}
num_public: 4
num_validation: 2
"""
OLD = """% a remark
ann;20;00;f;5;no;99
ann;30;07.;f;4;yes;100
bob;40;8;m;9;no;-3
bob;60;7;m;9;no;
cid;49;0.;m;8;yes;5
"""
NEW = "eve;50;8;f;3;no;0\neve;29;0;f;3;yes;1000\n"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.yaml").write_text(DECLARATION, encoding="utf-8")
    (tmp_path / "old.csv").write_text(OLD, encoding="utf-8")
    (tmp_path / "new.csv").write_text(NEW, encoding="utf-8")
    return tmp_path


def entry_in(folder: Path) -> DatasetEntry:
    return Registry(folder)["shop"]


def read(folder: Path, **options: Any) -> Records:
    entry = entry_in(folder)
    return entry.load(Request(data_dir=folder, seed=0, options=entry.complete_options(options)))


def changed(folder: Path, file: str, old: str, new: str) -> Path:
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return folder


def test_records_are_what_the_declaration_says(shop: Path) -> None:
    found = read(shop)
    assert found.feature_names == ("age", "age=missing", "city=0", "city=7", "spent=little", "spent=much")
    assert found.records.x.tolist() == [
        [0, 0, 1, 0, 1, 0],
        [0.25, 0, 0, 1, 0, 1],
        [pytest.approx(0.725), 0, 1, 0, 1, 0],
        [0.75, 0, 0, 1, 1, 0],
        [pytest.approx(0.225), 0, 1, 0, 0, 1],
    ]
    assert (found.label_names, found.records.y.tolist()) == (("stays away", "buys"), [0, 1, 1, 0, 1])
    assert (found.group_names, found.records.z.tolist()) == (("female", "male"), [0, 0, 1, 0, 0])
    assert found.notes == ("2 refunds left out",)
    assert found.origins == ("training",) * 3 + ("test",) * 2
    assert found.person_ids == tuple(f"customer-{name}" for name in ("ann", "ann", "cid", "eve", "eve"))


def test_options_choose_rows_columns_groups_and_persons(shop: Path) -> None:
    found = read(shop, sensitive="years", branch="first", together=False)
    assert (found.sensitive_attribute, found.group_names) == ("age", ("middle", "other"))
    assert found.records.z.tolist() == [1, 0, 1, 1]
    assert found.feature_names == ("city=0", "city=7", "sex=f", "sex=m", "spent=little", "spent=much")
    assert found.person_ids is None


def test_what_was_computed_from_the_attribute_is_a_feature_only_with_it(shop: Path) -> None:
    assert "size" not in read(shop, size_as_feature=True).feature_names
    assert {"size", "sex=f"} <= set(read(shop, size_as_feature=True, sensitive_as_feature=True).feature_names)


@pytest.mark.parametrize("option", ["sex", "years"])
@pytest.mark.parametrize(("old", "new"), [("ann;20;00;f;5", "ann;20;00;m;5"), ("f;5", "f;6"), ("ann;20", "ann;59")])
def test_names_and_persons_do_not_tell_any_attribute(option: str, old: str, new: str, shop: Path) -> None:
    before = read(shop, sensitive=option)
    after = read(changed(shop, "old.csv", old, new), sensitive=option)
    assert after.records.record_id == before.records.record_id
    assert after.records.unit_id == before.records.unit_id
    assert after.person_ids == before.person_ids


def test_a_key_names_records_by_itself(shop: Path) -> None:
    changed(shop, "shop.yaml", "person:", "identity: {prefix: sale, key: [customer, spent]}\nperson:")
    assert read(shop).records.record_id == ("sale-ann-99", "sale-ann-100", "sale-cid-5", "sale-eve-0", "sale-eve-1000")


def test_the_listing_says_what_the_declaration_says(shop: Path) -> None:
    entry = entry_in(shop)
    assert (entry.sensitive, entry.rows, entry.kind) == ("sex or age", 24, "tabular")
    assert list(entry.options) == ["branch", "size_as_feature", "together", "sensitive", "sensitive_as_feature"]


def test_one_file_in_the_folder_is_all_that_a_table_needs(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"c{i};{20 + i % 40};{7 * (i % 3 == 0)};{'fm'[i % 2]};3;{('no', 'yes')[i // 2 % 2]};{i}" for i in range(80)]
    (shop / "old.csv").write_text("\n".join(rows[:60]) + "\n", encoding="utf-8")
    (shop / "new.csv").write_text("\n".join(rows[60:]) + "\n", encoding="utf-8")
    registry = Registry(shop)
    assert "shop" in registry
    assert set(registry) == {name for name, entry in REGISTRY.items() if entry.kind == "image"} | {"shop"}
    for module in ("registry", "describe"):
        monkeypatch.setattr(import_module(f"fairpate.data.{module}"), "REGISTRY", registry)
    assert {line.entry.name for line in list_datasets(shop) if line.present} == {"color_digits", "shop"}
    assert option_showing_attribute("shop", {"sensitive_as_feature": True}) == "sensitive_as_feature"
    config = DataConfig(name="shop", data_dir=shop, num_public=20, num_validation=10)
    dataset = load_dataset(config)
    assert isinstance(dataset, Dataset)
    assert sorted(dataset.test.record_id) == sorted(read(shop).records.record_id[60:])
    assert [part.records for part in describe(config).splits] == [30, 20, 10, 20]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("new.csv", "eve;50", "eve;old", r"new\.csv: column age: expected a number, got 'old'\.$"),
        (
            "old.csv",
            ";yes;100",
            ";perhaps;100",
            r"old\.csv: column again: unknown value 'perhaps'; declared: no, yes\.$",
        ),
        ("new.csv", ";f;", ";x;", r"new\.csv: column sex: unknown value 'x'; declared: f, m\.$"),
        ("old.csv", "07.", "09.", r"old\.csv: column city: unknown value '9'; declared: 0, 7, 8\.$"),
        ("new.csv", ";1000", "", r"new\.csv: not a readable table"),
        ("old.csv", "-3", "1_0", r"old\.csv: column spent: expected a number, got '1_0'\.$"),
    ],
)
def test_a_foreign_value_names_file_column_and_value(file: str, old: str, new: str, message: str, shop: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(changed(shop, file, old, new))


def test_a_missing_column_names_file_and_nearest(shop: Path) -> None:
    changed(shop, "shop.yaml", "header: [customer, age, city, sex, size, again, spent]", "")
    changed(shop, "old.csv", "% a remark", "% a remark\ncustomer;age;city;sex;siez;again;spent")
    with pytest.raises(DataError, match=r"old\.csv: no column size; did you mean siez\?"):
        read(shop)


def test_files_whose_rows_would_be_named_differently_are_refused(shop: Path) -> None:
    changed(shop, "shop.yaml", "header: [customer, age, city, sex, size, again, spent]", "")
    changed(shop, "old.csv", "% a remark", "customer;age;city;sex;size;again;spent")
    changed(shop, "new.csv", "eve;50;8", "age;customer;city;sex;size;again;spent\n50;eve;8")
    changed(shop, "new.csv", "eve;29", "29;eve")
    with pytest.raises(DataError, match=r"new\.csv: expected the columns of old\.csv, in their order"):
        read(shop)


def test_no_feature_at_all_is_a_clear_error(shop: Path) -> None:
    text = (shop / "shop.yaml").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith("  - {column: ") or "column: sex" in line]
    (shop / "shop.yaml").write_text("\n".join(kept).replace("keep:\n", ""), encoding="utf-8")
    with pytest.raises(DataError, match="shop: with these options no column is a feature"):
        read(shop)
    assert read(shop, sensitive_as_feature=True).feature_names == ("sex=f", "sex=m")


def test_no_record_at_all_is_a_clear_error(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(shop, "shop.yaml", "at_least: 0", "at_least: 1000000")
    monkeypatch.setattr("fairpate.data.registry.REGISTRY", Registry(shop))
    with pytest.raises(DataError, match="No record is left"):
        load_dataset(DataConfig(name="shop", data_dir=shop))


SMALL = """
name: shop
task: buys again
rows: 40
files: [{path: shop.csv}]
columns:
  - {column: age, low: 0, high: 100}
  - {columns: [city, town], values: [a, b]}
label: {column: again, values: {stays: no, buys: yes}}
groups:
  sex: {values: {female: f, male: m}}
"""
LABEL = "{stays: no, buys: yes}"
CHOICE = "options: {seen: {default: false, description: x}}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("low: 0", "lo: 0", r"columns\.age\.lo: unknown field; did you mean low\?"),
        ("label:", "lable:", r"label: missing; add it\.\n.*lable: unknown field; did you mean label\?"),
        ("path: shop.csv", "path: shop.csv, sha: x", r"files\.0\.sha: unknown field; did you mean sha256\?"),
        ("[city, town]", "[city, age]", r"columns: age is declared twice"),
        ("[city, town]", "[city, again]", r"columns: again is the label; a model may not see it"),
        ("rows: 40", "rows: 40\nrows: 50", r"cannot be read as YAML: rows stands there twice"),
        ("rows: 40", "rows: many", r"rows: Input should be a valid integer.* \(got 'many'\)"),
        ("low: 0", "low: zero", r"columns\.age\.low: .*\(got 'zero'\)"),
        ("low: 0", "low: nan", r"columns\.age\.low: .*\(got 'nan'\)"),
        ("high: 100", "high: 1e300", r"columns\.age\.high: .*\(got '1e300'\)"),
        ("low: 0", "low: 200", r"columns\.age: Expected low < high, got 200 and 100"),
        ("low: 0", "low: 99.99999999999999, scale: log", r"columns\.age: Expected low < high"),
        ("low: 0, ", "", r"columns\.age: Expected one of: low and high"),
        ("low: 0", "low: 0, values: [a]", r"columns\.age: Expected one of: low and high"),
        ("low: 0, high: 100", "bands: {x: 5, y: 3}", r"columns\.age: Expected bands whose first codes increase"),
        ("[a, b]", "[a, a]", r"columns\.city: Expected each value once, got 'a' twice"),
        ("[a, b]", "[a, b], missing: a", r"columns\.city: Expected each value once, got 'a' twice"),
        ("[a, b]", "[a, b], aliases: {c: d}", r"columns\.city: Expected aliases of declared values, got 'd'"),
        ("[a, b]", "[a, b], scale: log", r"columns\.city: Expected scale with low and high only"),
        (LABEL, "{stays: no}", r"label: Expected two names or more"),
        (LABEL, "{stays: no, buys: no}", r"label: Expected each value once, got 'no' twice"),
        (LABEL, "[no, no]", r"label\.values: Expected each value once, got 'no' twice"),
        (LABEL, "{a: {below: 5}, b: {above: 4}}", r"label: Expected ranges that do not overlap"),
        (LABEL, "{a: {at_most: 5}, b: {at_least: 5}}", r"label: Expected ranges that do not overlap"),
        (LABEL, "{a: {bellow: 5}, b: {above: 4}}", r"label\.values\.a\.0\.bellow: unknown field; did you mean below\?"),
        (
            LABEL,
            "{a: {above: 5, below: 5}, b: {above: 9}}",
            r"label\.values\.a\.0: Expected a range with a number in it",
        ),
        (LABEL, "{a: {}, b: {above: 4}}", r"label\.values\.a\.0: Expected a published value, or a range"),
        (LABEL, "{a: x, b: {above: 4}}", r"label: Expected values or ranges, got both"),
        (LABEL, "{a: [], b: [x]}", r"label: Expected two names or more, each with a value"),
        (
            "path: shop.csv",
            "path: ../shop.csv",
            r"files\.0\.path: Expected a path below the data folder, got '\.\./shop",
        ),
        ("path: shop.csv", "path: /etc/passwd", r"files\.0\.path: Expected a path below the data folder"),
        ("path: shop.csv", "path: a, sha256: abc", r"files\.0\.sha256: .*\(got 'abc'\)"),
        (
            "path: shop.csv",
            "path: shop.csv.gz",
            r"files: shop\.csv\.gz: expected a text file, which may lie there gzipped",
        ),
        ("path: shop.csv", "path: shop.csv, extracted: shop", r"files: shop\.csv: expected a text file"),
        ("[{path: shop.csv}]", "[]", r"files: expected one or more, got none"),
        (
            "high: 100",
            "high: 100, when: {seen: true}",
            r"columns\.age\.when: no option seen; known: sensitive_as_feature",
        ),
        (
            "rows",
            f"{CHOICE}keep: [{{column: age, above: 1, when: {{seen: maybe}}}}]\nrows",
            r"keep\.age\.when: no value 'may",
        ),
        ("rows", "keep: [{column: age}]\nrows", r"keep\.0: Expected a range .* or other_than"),
        (
            "rows",
            "options: {x: {default: c, values: [a, b], description: x}}\nrows",
            r"options\.x: Expected a default among",
        ),
        (
            "rows",
            "options: {sensitive: {default: false, description: x}}\nrows",
            r"options\.sensitive: this name is taken",
        ),
        ("rows", "identity: {key: [sex]}\nrows", r"identity: sex may be the sensitive attribute"),
        (
            "rows",
            "identity: {text: [age, w]}\ncomputed_from_group: [w]\nrows",
            r"identity: w may be the sensitive attribute",
        ),
        ("rows", "identity: {text: [age], key: [city]}\nrows", r"identity: Expected key or text, got both"),
        ("rows", "person: {column: sex}\nrows", r"person: sex may be the sensitive attribute"),
        ("rows", "header: [age, city, town, again, sx]\nrows", r"header: no column sex; did you mean sx\?"),
        ("rows", "origins: {files: {other.csv: test}}\nrows", r"origins\.files: expected shop\.csv"),
        ("shop.csv}", f"shop.csv, when: {{seen: true}}}}]\n{CHOICE}x: [", r"x: unknown field"),
        ("shop.csv}]", f"shop.csv, when: {{seen: true}}}}]\n{CHOICE}", r"files: none with seen: false; add one"),
        ("task: buys", "task: !!python/object/apply:os.system [buys]", r"cannot be read as YAML"),
        ("task: buys", f"task: {'[' * 3000}", r"cannot be read as YAML"),
        ("name: shop", "name: ../shop", r"name: .*\(got '\.\./shop'\)"),
        ("name: shop", "name: store", r"name: expected shop, as the file is called, got store"),
    ],
)
def test_a_wrong_declaration_names_file_field_and_remedy(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(SMALL, encoding="utf-8")
    assert entry_in(tmp_path).name == "shop"
    with pytest.raises(DataSettingsError, match=rf"shop\.yaml: (.|\n)*{message}"):
        entry_in(changed(tmp_path, "shop.yaml", old, new))


@pytest.mark.parametrize(
    "text", ["", "- a", "columns: 3", "columns: {age: {low: 0}}", "columns: [[a]]", "\x00", "a: b: c"]
)
def test_what_is_no_declaration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataSettingsError, match=r"shop\.yaml: "):
        entry_in(tmp_path)


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Where YAML would make a flag, a number, an octal number, a date or nothing of them."""
    texts = ["no", "1.0", "007", "2020-01-01", "null", "1e3", "~"]
    text = SMALL.replace("[a, b]", f"[{', '.join(texts)}]")
    (tmp_path / "shop.yaml").write_text(text, encoding="utf-8")
    assert read_declaration(tmp_path / "shop.yaml").columns[1].values == tuple(texts)


def test_every_codebook_of_the_project_is_a_data_set() -> None:
    names = [path.stem for path in CODEBOOKS.glob("*.yaml")]
    assert len(names) == 10
    assert all(REGISTRY[name].name == name and REGISTRY[name].kind == "tabular" for name in names)
    assert torch.tensor([REGISTRY[name].options["sensitive_as_feature"].shows_attribute for name in names]).all()


SECTIONS = (Declaration, SourceFile, Column, Coding, Group, Meaning, Rule, Trim, Choice, Identity, Person, Origins)


def test_the_documented_example_is_a_declaration(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (example,) = (part.partition("```")[0] for part in page.split("```yaml\n")[1:] if part.startswith("name:"))
    (tmp_path / "loans.yaml").write_text(example, encoding="utf-8")
    (tmp_path / "loans.csv").write_text("id,age,job,sex,paid\n1,30,clerk,f,no\n2,70,unknown,m,yes\n", encoding="utf-8")
    entry = Registry(tmp_path)["loans"]
    found = entry.load(Request(data_dir=tmp_path, seed=0, options=entry.complete_options({})))
    assert found.records.record_id == ("loans-1", "loans-2")
    assert found.feature_names == ("age", "job=clerk", "job=nurse")
    assert found.records.y.tolist() == [0, 1]


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert f"| `{name}` | {field.description} |" in page, f"{section.__name__}.{name}"
