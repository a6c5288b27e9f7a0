"""The documentation site: what it takes from the code is complete, it builds without a warning, and asks no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import _tree as command_tree

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import generated  # noqa: E402
import pictures  # noqa: E402

import fairpate  # noqa: E402
from fairpate.app.catalogue import as_yaml, fields_of  # noqa: E402
from fairpate.methods import all_methods  # noqa: E402

PAGES = [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in (".md", ".ipynb")]


def test_the_index_lists_every_page_below_one_heading():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))\)", index)
    assert sorted(listed) == [str(path.relative_to(ROOT / "docs")) for path in PAGES if path.name != "index.md"]
    found = generated.navigation(index)
    for page in listed:
        assert f"\n{page.rpartition('.')[0]}\n" in found


def test_every_field_of_every_method_is_in_the_reference():
    text = generated.configuration()
    for method in all_methods().values():
        for each in fields_of(method()):
            assert f"| `{each['field']}` |" in text or each["field"] == "method", each
            assert as_yaml(each.get("default", "")) in text
            assert " ".join(each["meaning"].split()).replace("``", "`").replace("|", "&#124;") in text
    for inside in ("student.idp3.max_disparity", "data.embedding.pixels", "public_data.pretrain.momentum"):
        assert f"| `{inside}` |" in text  # sections that are null by default


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("| `seed` | whole number at least 0<br>default `0` |", "never of noise"),
        ("| `data.unit` | `record` or null<br>default `null` |", "all records of a person together"),
        ("| `student.model.dropout` | number at least 0 and below 1<br>default `0.0` |", ""),
        ("| `teachers.num_teachers` | whole number at least 2<br>default `100` |", "*Read by fairpate, "),
        ("| `noise` | `os_entropy`, `seeded`<br>default `os_entropy` |", "*Read by all but sgd, f_ld.*"),
    ],
)
def test_a_row_says_values_default_meaning_and_readers(start, words):
    rows = [row for row in generated.configuration().splitlines() if row.startswith(start)]
    assert len(rows) == 1
    assert words in rows[0]


def test_every_command_is_in_the_reference():
    text = generated.commands()
    for path in paths(command_tree()["fairpate"], "fairpate"):
        assert f"`{path}`\n" in text, path
    assert "`--set <list[str]>`: section.field=value" in text


def paths(command, path):
    inner = getattr(command, "commands", {})
    return [longer for name in inner for longer in paths(inner[name], f"{path} {name}")] or [path]


def test_every_public_name_is_in_the_reference():
    text = generated.interface("python")
    for name in fairpate.__all__:
        assert f":: fairpate.{name}\n" in text or name == "__version__"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, tutorials run."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-d", folder / "doctrees", ROOT / "docs", folder / "site"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *options], capture_output=True, text=True, check=False)  # noqa: S603
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three notebooks that train, serve and sweep
def test_it_builds_and_asks_no_other_host(site):
    loads = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]*)|<link\b[^>]*\bhref="([^"]*)""")
    for page in site.rglob("*.html"):
        for address in ("".join(found) for found in loads.findall(page.read_text(encoding="utf-8"))):
            assert not re.match(r"(https?:)?//", address), (page, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_pictures_are_those_of_the_code(tmp_path):
    pictures.main(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == 5
    for name, text in drawn.items():
        kept = (ROOT / "docs" / "img" / name).read_text(encoding="utf-8")
        assert words_of(text) == words_of(kept), "draw them anew: python docs/pictures.py"


def words_of(picture):
    return re.findall(r"<text[^>]*>([^<]*)<", picture)


def test_notebooks_keep_no_outputs():
    for path in PAGES:
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path
