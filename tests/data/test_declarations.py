"""A table is one YAML file: read, listed, divided and described by that alone; a wrong one is refused by name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fairpate.config import DataConfig
from fairpate.data import REGISTRY, DataError, Dataset, describe, load_data
from fairpate.data.columns import Feature, Group, Label, Meaning
from fairpate.data.dataset import DatasetEntry, LoadedRecords, Request, SourceFile
from fairpate.data.declaration import Declaration, DeclaredOption, Files, Identity, Person, Rule, Trim
from fairpate.data.pictures import PicturesConfig
from fairpate.data.registry import CODEBOOKS, Registry

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

DECLARATION = """
name: shop
task: buys again
rows: 24
files:
  records: old.csv
  test: new.csv
separator: ;
header: [customer, age, city, sex, size, again, spent]
comment: "%"
trim:
  - {columns: city, start: 0, end: .}
options:
  branch: {default: both, values: [both, first], description: Which branch.}
  size_as_feature: {default: false, description: Whether the model may see it.}
  together: {default: true, description: Keep customers together.}
keep:
  - {column: spent, at_least: 0, note: refunds left out}
  - {column: city, other_than: [7], when: {branch: first}}
features:
  age: {bounds: [20, 60], unknown: "?"}
  city: {categories: [0, 7], aliases: {8: 7}}
  size: {bounds: [0, 10], when: {size_as_feature: true}}
  sex: {categories: [f, m]}
  spent: {bands: {little: 0, much: 100}}
label: {column: again, classes: {stays away: no, buys: yes}}
groups:
  sex: {values: {female: f, male: m}}
  years:
    attribute: age
    column: age
    values: {middle: {at_least: 30, below: 50}, other: [{below: 30}, {at_least: 50}]}
computed_from_group: [size]
person: {column: customer, prefix: customer, when: {together: true}}
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


def read(folder: Path, **options: Any) -> LoadedRecords:
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


@pytest.mark.parametrize("text", ["[city]", "[city, customer]"])
def test_names_do_not_depend_on_what_other_persons_have(text: str, shop: Path) -> None:
    changed(shop, "shop.yaml", "person:", f"identity: {{text: {text}}}\nperson:")
    before = read(shop).records
    assert len(set(before.unit_id)) == len(before)  # the cities of two persons are alike
    after = read(changed(shop, "old.csv", "ann;20;00;f;5;no;99\n", "")).records  # as cid's is, which comes later
    assert after.record_id == before.record_id[1:]


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
    monkeypatch.setattr(import_module("fairpate.data.registry"), "REGISTRY", registry)
    assert {name for name, entry in registry.items() if entry.is_in(shop)} == {"color_digits", "shop"}
    assert registry["shop"].option_showing_attribute({"sensitive_as_feature": True}) == "sensitive_as_feature"
    config = DataConfig(name="shop", data_dir=shop, num_public=20, num_validation=10)
    dataset = load_data(config)
    assert isinstance(dataset, Dataset)
    assert not dataset.records_alone
    assert load_data(config.model_copy(update={"options": {"together": False}})).records_alone
    assert sorted(dataset.test.record_id) == sorted(read(shop).records.record_id[60:])
    assert [part.records for part in describe(load_data(config)).splits] == [30, 20, 10, 20]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("new.csv", "eve;50", "eve;old", r"new\.csv: column age: expected a number, got 'old' in 1 row;"),
        (
            "old.csv",
            ";yes;100",
            ";perhaps;100",
            r"old\.csv: column again: expected a declared class, got 'perhaps' in 1 row; declared: no, yes\.$",
        ),
        (
            "new.csv",
            ";f;",
            ";x;",
            r"new\.csv: column sex: expected a declared group, got 'x' in 1 row; declared: f, m\.$",
        ),
        (
            "old.csv",
            "07.",
            "09.",
            r"old\.csv: column city: expected a declared category, got '9' in 1 row; declared: 0, 7;",
        ),
        ("new.csv", ";1000", "", r"new\.csv: not a readable table"),
        ("old.csv", "-3", "1_0", r"old\.csv: column spent: expected a number, got '1_0' in 1 row;"),
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
    changed(shop, "new.csv", "eve;50;8;f;3;no", "customer;age;again;sex;size;city;spent\neve;50;no;f;3;8")
    changed(shop, "new.csv", "eve;29;0;f;3;yes", "eve;29;yes;f;3;0")
    changed(shop, "shop.yaml", "  test: new.csv", "  test: new.csv\n  pooled: {together: true}")
    assert read(shop)
    changed(shop, "shop.yaml", "name: shop", "name: shop\nidentity: {by_text: true}")
    with pytest.raises(DataError, match=r"new\.csv: expected the columns of old\.csv, in their order"):
        read(shop)


FEATURE = re.compile(r"  \w+: \{(bounds|categories|bands)")


def test_no_feature_at_all_is_a_clear_error(shop: Path) -> None:
    text = (shop / "shop.yaml").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not FEATURE.match(line) or "[f, m]" in line]
    (shop / "shop.yaml").write_text("\n".join(kept), encoding="utf-8")
    with pytest.raises(DataError, match="shop: with these options no column is a feature"):
        read(shop)
    assert read(shop, sensitive_as_feature=True).feature_names == ("sex=f", "sex=m")


def test_no_record_at_all_is_a_clear_error(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(shop, "shop.yaml", "at_least: 0", "at_least: 1000000")
    monkeypatch.setattr("fairpate.data.registry.REGISTRY", Registry(shop))
    with pytest.raises(DataError, match="No record is left"):
        load_data(DataConfig(name="shop", data_dir=shop))


def test_every_codebook_of_the_project_is_a_data_set() -> None:
    names = [path.stem for path in CODEBOOKS.glob("*.yaml")]
    assert len(names) >= 11
    assert REGISTRY.keys() >= set(names)
    assert all(REGISTRY[name].name == name and REGISTRY[name].kind == "tabular" for name in names)
    assert torch.tensor([REGISTRY[name].options["sensitive_as_feature"].shows_attribute for name in names]).all()


SECTIONS = (
    Declaration,
    PicturesConfig,
    Files,
    SourceFile,
    Feature,
    Label,
    Group,
    Meaning,
    Rule,
    Trim,
    DeclaredOption,
    Identity,
    Person,
)


def test_the_documented_example_is_a_declaration(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (example,) = (part.partition("```")[0] for part in page.split("```yaml\n")[1:] if part.startswith("name:"))
    (tmp_path / "hospital.yaml").write_text(example, encoding="utf-8")
    columns = "visit,patient,age,weight,ward,sex,readmitted"
    (tmp_path / "patients.csv").write_text(f"{columns}\n1,p,55,,A,F,no\n2,p,110,250,Z,M,yes\n", encoding="utf-8")
    (tmp_path / "pool.csv").write_text("visit,patient,age,weight,ward,sex\n3,q,0,20,,F\n", encoding="utf-8")
    (tmp_path / "held_out.csv").write_text(f"{columns}\n4,r,0,20,B,F,no\n", encoding="utf-8")
    entry = Registry(tmp_path)["hospital"]
    found = entry.load(Request(data_dir=tmp_path, seed=0, options=entry.complete_options({})))
    assert found.records.record_id == ("hospital-1", "hospital-2", "hospital-3", "hospital-4")
    wards = ("ward=A", "ward=B", "ward=C", "ward=unknown", "ward=other")
    assert found.feature_names == ("age", "weight", "weight=missing", *wards)
    imputed = pytest.approx(55 / 230)
    assert found.records.x.tolist() == [
        [0.5, imputed, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
    ]
    assert found.records.y.tolist() == [0, 1, -1, 0]
    assert found.origins == ("private", "private", "public", "test")
    assert found.person_ids == ("person-p", "person-p", "person-q", "person-r")


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert f"| `{name}` | {field.description} |" in page, f"{section.__name__}.{name}"
