"""What `fairpate new` writes: a folder with a declaration, made-up records, a configuration, a README and a test.

Everything in it works as it is written, for records that are rows of a table, pictures, or vectors.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template

from fairpate.app.example_records import Kind, example_files
from fairpate.app.terminal.catalogue import data_set_names
from fairpate.files import PlaceError
from fairpate.types import UsageError

_TEMPLATES = Path(__file__).with_name("project")
_FILES = {
    "README.md": "README.md",
    "data_{kind}.yaml": "data.yaml",
    "settings_{kind}.yaml": "settings.yaml",
    "test_project.txt": "test_project.py",
}
_LONGEST = 64
_BESIDE: Mapping[Kind, str] = {
    "table": "",
    "images": "| `pictures/` | what the tables name by path |\n",
    "embeddings": "| `example_*.npy` | a vector for each row of the table of that name |\n",
}
_FIRST_STEP: Mapping[Kind, str] = {
    "table": """\
`fairpate data declare PRIVATE.csv --public PUBLIC.csv -o yours.yaml` drafts a declaration with questions; of the
   private file the header alone is read. Put it in the place of `data.yaml`, or change the columns there.""",
    "images": """\
Write tables with the paths of your pictures and what is known of each, or give folders in their place; say in
   `data.yaml` at which size they are read. With `features: oriented_gradients` few numbers stand for each.""",
    "embeddings": """\
Write tables of your records, with vectors in an array beside them or in a list column of Parquet, and say in
   `data.yaml` how long they are. A public model makes them, one record at a time.""",
}


class ProjectError(UsageError, ValueError):
    """A name that no project can have."""


def write_project(folder: Path, kind: Kind = "table") -> tuple[str, list[Path]]:
    """Write a project of ``kind`` at ``folder``, whole or not at all; the name of its data set, and its files.

    ProjectError for a name without a letter or with a control character, or that of a known data set; PlaceError where
    something is already, or nothing can be written.
    """
    name = data_set_name(folder)
    try:
        _require_nothing_at(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk: there a rename is one step.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            made = Path(scratch) / "project"
            made.mkdir()
            for file, content in _contents(name, kind).items():
                (made / file).parent.mkdir(exist_ok=True)
                (made / file).write_bytes(content)
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


def _contents(name: str, kind: Kind) -> dict[str, bytes]:
    words = {"name": name, "beside": _BESIDE[kind], "first_step": _FIRST_STEP[kind]}
    texts = {
        target: Template((_TEMPLATES / source.format(kind=kind)).read_text(encoding="utf-8")).substitute(words)
        for source, target in _FILES.items()
    }
    return {file: text.encode() for file, text in (texts | {".gitignore": "runs/\n"}).items()} | example_files(kind)
