"""What `fairpate new` writes: a folder with a declaration, made-up records, a configuration, a README and a test.

Everything in it works as it is written; the records are drawn from a fixed seed and say of nobody anything.
"""

from __future__ import annotations

import csv
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from string import Template

import numpy as np

from fairpate.app.catalogue import data_set_names
from fairpate.files import PlaceError
from fairpate.types import UsageError

_TEMPLATES = Path(__file__).with_name("project")
_FILES = {
    "README.md": "README.md",
    "data.yaml": "data.yaml",
    "settings.yaml": "settings.yaml",
    "test_project.txt": "test_project.py",
}
_SIZES = {"private": 1200, "public": 400, "test": 400}
_HEADER = ("visit", "sex", "age", "days", "earlier_visits", "ward", "readmitted")
_WARDS = ("surgery", "medicine", "other")
_SEED = 20260101
_LONGEST = 64


class ProjectError(UsageError, ValueError):
    """A name that no project can have."""


def write_project(folder: Path) -> tuple[str, list[Path]]:
    """Write the project at ``folder``, whole or not at all; the name of its data set, and its files.

    ProjectError for a name without a letter or with a control character, or that of a known data set; PlaceError where
    something is already, or nothing can be written.
    """
    name = data_set_name(folder)
    try:
        _require_nothing_at(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            made = Path(scratch) / "project"
            made.mkdir()
            for file, content in _contents(name).items():
                (made / file).write_text(content, encoding="utf-8")
            made.rename(folder)
    except PlaceError:
        raise
    except OSError as error:
        raise PlaceError(f"NAME: {folder} cannot be written ({error.strerror}); give another place.") from error
    return name, sorted(folder.iterdir())


def _require_nothing_at(folder: Path) -> None:
    if folder.is_symlink() or folder.exists():
        raise PlaceError(f"NAME: {folder} exists already; give another name, or remove it.")


def data_set_name(folder: Path) -> str:
    """What the data set of a project in ``folder`` is called: lower case, digits and underscores."""
    if not folder.name.isprintable():
        raise ProjectError(f"NAME: {str(folder)!r} holds a character that cannot be shown; leave it out.")
    name = re.sub(r"[^a-z0-9]+", "_", folder.name.lower()).strip("_")[:_LONGEST]
    if not re.match("[a-z]", name):
        raise ProjectError(f"NAME: {str(folder)!r} has no letter a-z to begin with; give a name such as hospital.")
    if name in data_set_names():
        raise ProjectError(f"NAME: {name} is the name of a known data set; give another, such as my_{name}.")
    return name


def _contents(name: str) -> dict[str, str]:
    texts = {
        target: Template((_TEMPLATES / source).read_text(encoding="utf-8")).substitute(name=name)
        for source, target in _FILES.items()
    }
    return texts | _tables() | {".gitignore": "runs/\n"}


def _tables() -> dict[str, str]:
    """Made-up visits to a hospital by file; public ones have no label."""
    rows = _visits(np.random.default_rng(_SEED), sum(_SIZES.values()))
    found = {}
    for part, size in _SIZES.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        width = len(_HEADER) - (part == "public")
        writer.writerow(_HEADER[:width])
        writer.writerows([next(rows)[:width] for _ in range(size)])
        found[f"example_{part}.csv"] = text.getvalue()
    return found


def _visits(generator: np.random.Generator, count: int) -> Iterator[tuple[object, ...]]:
    """Older patients with longer and earlier stays come back more often, and women a little more often than men."""
    is_woman_N = generator.random(count) < 0.5
    age_N = np.clip(generator.normal(62, 15, count), 18, 100).round().astype(int)
    days_N = np.minimum(generator.poisson(6, count), 30)
    earlier_N = np.minimum(generator.poisson(1.2, count), 10)
    ward_N = generator.integers(len(_WARDS), size=count)
    score_N = 0.09 * (age_N - 62) + 0.35 * (days_N - 6) + 0.9 * (earlier_N - 1.2) + 0.3 * is_woman_N
    back_N = generator.logistic(size=count) < 1.5 * score_N
    for number in range(count):
        words = ("F" if is_woman_N[number] else "M", age_N[number], days_N[number], earlier_N[number])
        yield f"v{number:05d}", *words, _WARDS[ward_N[number]], "yes" if back_N[number] else "no"
