"""A wrong declaration is refused by file, field and remedy."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from fairpate.data.dataset import DataSettingsError
from fairpate.data.declaration import read_declaration
from fairpate.data.registry import Registry

SMALL = """
name: shop
task: buys again
rows: 40
files: {records: shop.csv}
features:
  age: {bounds: [0, 100]}
  places: {columns: [city, town], categories: [a, b]}
label: {column: again, classes: {stays: no, buys: yes}}
group: {column: sex, values: {female: f, male: m}}
"""
LABEL = "{stays: no, buys: yes}"
CHOICE = "options: {seen: {default: false, description: x}}\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bounds", "bound", r"features\.age\.bound: unknown field; did you mean bounds\?"),
        ("label:", "lable:", r"label: missing; add it\.\n.*lable: unknown field; did you mean label\?"),
        ("group:", "gruop:", r"groups: missing; add it\.\n.*gruop: unknown field"),
        (
            "records: shop.csv",
            "records: {path: shop.csv, sha: x}",
            r"files\.records\.0\.sha: unknown field; .* sha256\?",
        ),
        ("[city, town]", "[city, age]", r"features: age is declared twice"),
        ("[city, town]", "[city, again]", r"features: again is the label; a model may not see it"),
        ("rows: 40", "rows: 40\nrows: 50", r"cannot be read as YAML: rows is given twice"),
        ("rows: 40", "rows: many", r"rows: expected a whole number, got 'many'\."),
        ("[0, 100]", "[zero, 100]", r"features\.age\.bounds\.0: .*got 'zero'\."),
        ("[0, 100]", "[nan, 100]", r"features\.age\.bounds\.0: .*got 'nan'\."),
        ("[0, 100]", "[0, 1e300]", r"features\.age\.bounds\.1: .*got '1e300'\."),
        ("[0, 100]", "[200, 100]", r"features\.age: expected bounds .*low < high, got \[200, 100\]"),
        ("[0, 100]", "[99.99999999999999, 100], scale: log", r"features\.age: expected bounds .*low < high"),
        ("bounds: [0, 100]", "", r"features\.age: expected one of: bounds"),
        ("[0, 100]", "[0, 100], categories: [a]", r"features\.age: expected one of: bounds"),
        ("bounds: [0, 100]", "bands: {x: 5, y: 3}", r"features\.age: expected bands whose first codes increase"),
        ("[a, b]", "[a, a]", r"features\.places: expected each value once, got 'a' twice"),
        ("[a, b]", "[a, b], unknown: a", r"features\.places: expected each value once, got 'a' twice"),
        ("[a, b]", "[a, b], aliases: {c: d}", r"features\.places: expected aliases of declared categories, got 'd'"),
        ("[a, b]", "[a, b], scale: log", r"features\.places: .*`scale`.*`bounds`"),
        (LABEL, "{stays: no}", r"label\.classes: expected two names or more"),
        (LABEL, "{stays: no, buys: no}", r"label\.classes: expected each value once, got 'no' twice"),
        (LABEL, "[no, no]", r"label\.classes: expected each value once, got 'no' twice"),
        (LABEL, "{a: {below: 5}, b: {above: 4}}", r"label\.classes: expected ranges that do not overlap"),
        (LABEL, "{a: {at_most: 5}, b: {at_least: 5}}", r"label\.classes: expected ranges that do not overlap"),
        (
            LABEL,
            "{a: {bellow: 5}, b: {above: 4}}",
            r"label\.classes\.a\.0\.bellow: unknown field; did you mean below\?",
        ),
        (
            LABEL,
            "{a: {above: 5, below: 5}, b: {above: 9}}",
            r"label\.classes\.a\.0: expected a range with a number in it",
        ),
        (LABEL, "{a: {}, b: {above: 4}}", r"label\.classes\.a\.0: expected a published value, or a range"),
        (LABEL, "{a: x, b: {above: 4}}", r"label\.classes: expected values or ranges, got both"),
        (LABEL, "{a: [], b: [x]}", r"label\.classes: expected two names or more, each with a value"),
        (
            "records: shop.csv",
            "records: ../shop.csv",
            r"files\.records\.0\.path: expected a path below the data folder",
        ),
        (
            "records: shop.csv",
            "records: /etc/passwd",
            r"files\.records\.0\.path: expected .* --data-dir",
        ),
        ("records: shop.csv", "records: {path: a, sha256: abc}", r"files\.records\.0\.sha256: .*got 'abc'\."),
        ("shop.csv", "shop.zip", r"files: shop\.zip: expected a table, which may be gzipped, got an archive"),
        ("records: shop.csv", "records: {path: a, extracted: shop}", r"files: a: expected a table"),
        ("{records: shop.csv}", "{}", r"files: .*`records`.*`private`.*got neither"),
        ("records: shop.csv", "records: a, private: b", r"files: expected `records`, .* got both"),
        (
            "records: shop.csv",
            "records: a, pooled: {sensitive_as_feature: true}",
            r"files: .*`pooled`.*`records`.*`test`",
        ),
        ("records: shop.csv", "records: a, train: b", r"files\.train: unknown field"),
        (
            "[0, 100]",
            "[0, 100], when: {seen: true}",
            r"features\.age\.when: no option seen; known: sensitive_as_feature",
        ),
        (
            "rows",
            f"{CHOICE}keep: [{{column: age, above: 1, when: {{seen: maybe}}}}]\nrows",
            r"keep\.age\.when: no value 'may",
        ),
        ("rows", "keep: [{column: age}]\nrows", r"keep\.0: expected a range .* or other_than"),
        (
            "rows",
            "options: {x: {default: c, values: [a, b], description: x}}\nrows",
            r"options\.x: expected a default among",
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
        (
            "rows",
            "identity: {text: [age], key: [city]}\nrows",
            r"expected one of key, text and by_text, got key \('city',\), text \('age',\)",
        ),
        ("rows", "person: {column: sex}\nrows", r"person: sex may be the sensitive attribute"),
        ("rows", "header: [age, city, town, again, sx]\nrows", r"header: no column sex; did you mean sx\?"),
        (
            "records: shop.csv}",
            f"records: {{path: a, when: {{seen: true}}}}}}\n{CHOICE}",
            r"files: none with seen: false; add one",
        ),
        ("task: buys", "task: !!python/object/apply:os.system [buys]", r"cannot be read as YAML"),
        ("task: buys", f"task: {'[' * 1000}", r"cannot be read as YAML"),
        ("name: shop", "name: ../shop", r"name: .*got '\.\./shop'\."),
        ("name: shop", "name: store", r"name: expected shop, as the file is called, got store"),
    ],
)
def test_a_wrong_declaration_names_file_field_and_remedy(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in SMALL
    for text, refusal in (
        (SMALL, nullcontext()),
        (SMALL.replace(old, new, 1), pytest.raises(DataSettingsError, match=rf"shop\.yaml: (.|\n)*{message}")),
    ):
        (tmp_path / "shop.yaml").write_text(text, encoding="utf-8")
        with refusal:
            Registry(tmp_path)["shop"]


@pytest.mark.parametrize("text", ["", "- a", "features: 3", "features: [a]", "files: []", "\x00", "a: b: c"])
def test_what_is_no_declaration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataSettingsError, match=r"shop\.yaml: "):
        Registry(tmp_path)["shop"]


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Where YAML would make a flag, a number, an octal number, a date or nothing of them."""
    texts = ["no", "1.0", "007", "2020-01-01", "null", "1e3", "~"]
    text = SMALL.replace("[a, b]", f"[{', '.join(texts)}]")
    (tmp_path / "shop.yaml").write_text(text, encoding="utf-8")
    assert read_declaration(tmp_path / "shop.yaml").features["places"].categories == tuple(texts)
