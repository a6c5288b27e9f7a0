"""Every program in the documents runs as it stands, and every YAML text is what the page says it is.

A page's blocks run one after the other in a folder of their own. Names that a page takes for granted (``X``, ``pool``,
``groups``) are small tables made here. What other tests run from the page itself is named with the test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn

from fairpate.config import read_yaml
from fairpate.data.declaration import read_declaration
from fairpate.methods.base import configured
from fairpate.run.sweep import parse_sweep

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(json|python|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"docs/your-data.md"}  # tests/run/test_your_data_page.py
RUN_ELSEWHERE = ("import json, numpy, onnxruntime",)  # tests/run/test_portable_run.py


DECLARED = BLOCK.search((ROOT / "docs" / "your-data.md").read_text(encoding="utf-8"))[2]


def blocks(kind: str) -> dict[str, list[str]]:
    """The blocks of one language by page."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = str(path.relative_to(ROOT))
        texts = [text for of, text in BLOCK.findall(path.read_text(encoding="utf-8")) if of == kind]
        if texts and name not in ELSEWHERE:
            found[name] = texts
    return found


def test_there_are_snippets_and_each_has_a_language_that_is_tested() -> None:
    assert sum(map(len, blocks("python").values())) > 5
    known = {"", "json", "python", "yaml", "sh", "bash", "text", "{raw} html"}  # the last: pages that the build embeds
    for path in sorted((ROOT / "docs").rglob("*.md")):
        fences = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences) <= known, path


def taken_for_granted() -> dict[str, Any]:
    """Two classes that the first column nearly decides, and three groups."""
    draws = np.random.default_rng(0)

    def table(count: int) -> tuple[Any, Any]:
        x = draws.normal(size=(count, 4))
        return x, (x[:, 0] + draws.normal(scale=0.3, size=count) > 0).astype(int)

    (x, y), (x_test, y_test), (pool, _) = table(240), table(240), table(240)
    groups = draws.integers(0, 3, 240)
    return {"X": x, "y": y, "X_test": x_test, "y_test": y_test, "pool": pool, "groups": groups}


def write_clinic() -> None:
    """The declaration and tables that the page of Python reads: an age and a category that may be missing."""
    draws, kinds = np.random.default_rng(1), np.array(["walk-in", "referred", ""])
    for name, count in {"visits.csv": 400, "pool.csv": 200, "new.csv": 20}.items():
        age, kind = draws.integers(18, 90, count), kinds[draws.integers(0, 3, count)]
        again = np.where(age + draws.normal(scale=8, size=count) > 55, "yes", "no")
        sex = np.where(draws.random(count) < 0.5, "f", "m")
        rows = zip(age, kind, sex, *([again] if name == "visits.csv" else []), strict=True)
        head = "age,kind,sex" + (",again" if name == "visits.csv" else "")
        Path(name).write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    Path("clinic.yaml").write_text(
        "name: clinic\nfiles: {private: visits.csv, public: pool.csv, test: visits.csv}\n"
        "label: {column: again, classes: ['no', 'yes']}\ngroup: {column: sex, values: [f, m]}\nrows: 400\n"
        "features:\n  age: {bounds: [18, 90]}\n  kind: {categories: [walk-in, referred], missing: walk-in}\n",
        encoding="utf-8",
    )


def pages(kind: str) -> list[Any]:
    """Pages whose programs take seconds are slow: they train on pictures, or make a card and a plot."""
    is_slow = {("python", "docs/python.md"), ("python", "docs/training.md")}
    return [
        pytest.param(page, texts, id=page, marks=[pytest.mark.slow] if (kind, page) in is_slow else [])
        for page, texts in blocks(kind).items()
    ]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning:scipy")  # of loss distributions with empty cells
@pytest.mark.parametrize(("page", "texts"), pages("python"))
def test_programs_run_as_they_stand(page, texts, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = taken_for_granted()
    if page == "docs/python.md":
        write_clinic()
    with sklearn.config_context():
        for text in texts:
            if not text.startswith(RUN_ELSEWHERE):
                exec(compile(text, page, "exec"), names)  # noqa: S102 - the page is ours


@pytest.mark.parametrize(("page", "texts"), pages("json"))
def test_json_is_strict(page, texts) -> None:
    for text in texts:
        assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{page}: {name}"))


@pytest.mark.parametrize(("page", "texts"), pages("yaml"))
def test_yaml_is_what_its_reader_takes(page, texts, tmp_path) -> None:
    (tmp_path / "adult.yaml").write_bytes((ROOT / "configs" / "adult.yaml").read_bytes())
    (tmp_path / "clinic.yaml").write_text(DECLARED.replace("name: hospital", "name: clinic"), encoding="utf-8")
    for text in texts:
        (tmp_path / "text.yaml").write_text(text, encoding="utf-8")
        if "\nmethods:" in text:
            assert parse_sweep(read_yaml(tmp_path / "text.yaml"))
        elif "\nfeatures:" in text:
            assert read_declaration(tmp_path / "text.yaml")
        else:
            assert configured(tmp_path / "text.yaml")
