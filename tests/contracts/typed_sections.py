"""Write fairpate/methods/sections.py, the sections of all methods as types, from the classes of the methods.

python tests/contracts/typed_sections.py
"""

from __future__ import annotations

from pathlib import Path

from fairpate.config import Section
from fairpate.estimators import Parameters, parameters_of
from fairpate.methods import sections
from fairpate.methods.base import find_method, standing_here

HEAD = '''\
"""The sections of all methods as types, for editors and type checkers; `make stored` writes them from the classes."""

from collections.abc import Mapping
from typing import Any, TypedDict

from fairpate.config import Section

Setting = Mapping[str, Any] | Section | None


class Sections(TypedDict, total=False):
    """The sections of the methods' configurations, and what else a method configures, by name."""

'''


def written() -> str:
    """Return the content of the file for the methods that are there."""
    by_hand = Parameters.__annotations__.keys() - sections.Sections.__annotations__.keys()
    types = {}
    for name in standing_here():
        method = find_method(name)()
        for parameter in parameters_of(name).keys() - by_hand:
            types[parameter] = "Setting" if isinstance(getattr(method, parameter), Section) else "Any"
    return HEAD + "".join(f"    {name}: {types[name]}\n" for name in sorted(types))


def main() -> None:
    """Write the file."""
    Path(str(sections.__file__)).write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
