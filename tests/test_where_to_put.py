"""docs/architecture.md says what somebody who adds something writes and which other files they touch: it is true."""

import re
from functools import cache
from pathlib import Path

import pytest

from fairpate.methods.base import all_methods

ROOT = Path(__file__).parent.parent
MOST = {"a method": 0, "a data set": 0, "a mechanism": 0, "a page": 1}
"""How many files beside its own somebody touches at most."""
# Examples, the embedded table and what Python and sites take where nothing is named; no list of all.
NAMED = {"fairpate", "sgd", "dp_sgd", "dp_fermi", "weighted_votes", "adult", "loans"}


@cache
def table() -> dict[str, tuple[str, str]]:
    """What to write and what to touch, by what is added."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Where to put what\n")[2]
    rows = [re.findall(r"[^|]+", line) for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert rows[0] == [" to add ", " write ", " and touch "]
    return {what.strip(): (write.strip(), touch.strip()) for what, write, touch in rows[1:]}


@cache
def sources() -> dict[str, str]:
    folders = (ROOT / package for package in ("fairpate", "aggregator", "teachers", "student"))
    paths = [path for folder in folders for path in folder.rglob("*.py") if "examples" not in path.parts]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("what", table())
def test_the_files_and_folders_that_it_names_are_there(what: str) -> None:
    for name in re.findall(r"`([\w./]+/[\w./]*|\w+\.(?:yaml|py))`", " ".join(table()[what])):
        by_name = [path for folder in ("fairpate", "tests") for path in (ROOT / folder).rglob(name)]
        assert (ROOT / name).exists() or by_name, name


@pytest.mark.parametrize(("what", "most"), MOST.items())
def test_few_other_files_are_touched(what: str, most: int) -> None:
    touch = table()[what][1]
    files = re.findall(r"`[\w./]+\.(?:py|yaml)`", touch)
    if touch.startswith("the "):  # one file, which depends on what is added
        files = [touch]
    assert len(files) <= most
    assert touch.startswith("nothing") == (files == [])


def test_no_module_lists_methods_or_data_sets() -> None:
    data_sets = {path.stem for path in (ROOT / "fairpate" / "data" / "codebooks").glob("*.yaml")}
    outside = "\n".join(text for name, text in sources().items() if not name.startswith("fairpate/methods/"))
    named = {name for name in {*all_methods(), *data_sets} if re.search(f"[\"']{name}[\"']", outside)}
    assert len(data_sets) > 10
    assert named <= NAMED


def test_each_page_is_written_by_one_module() -> None:
    templates = ROOT / "fairpate" / "templates"
    texts = {path.name: path.read_text(encoding="utf-8") for path in templates.rglob("*.html")}
    used_by_others = {name for name in texts for other, text in texts.items() if other != name and f'"{name}"' in text}
    pages = texts.keys() - used_by_others
    assert len(pages) > 5
    for page in pages:
        writers = [name for name, text in sources().items() if re.search(rf'render\(\s*"{page}"', text)]
        assert len(writers) == 1, (page, writers)
