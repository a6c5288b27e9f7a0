"""What `fairpate methods` prints: every method with what it protects and its source, or all fields of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.text import Text

from fairpate.app.kept import kept
from fairpate.app.terminal.console import listing
from fairpate.app.terminal.output import Output
from fairpate.config import ConfigError, Section
from fairpate.methods import find_method, method_names, own_names

_PICTURES = ("color_digits", "color_mnist", "utkface", "fairface", "celeba", "chexpert")
_CODEBOOKS = Path(__file__).parents[2] / "data/codebooks"
_WIDTH = 100  # of prose in columns, which would else be as wide as its longest sentence


def data_set_names() -> list[str]:
    """As :data:`fairpate.data.REGISTRY` knows them, which takes seconds to load."""
    return [*_PICTURES, *(path.stem for path in sorted(_CODEBOOKS.glob("*.yaml")))]


def list_methods() -> Output:
    """One line per registered method, under its default configuration."""
    ours = kept("all", lambda: {name: _method_facts(name) for name in own_names()})
    found = [ours.get(name) or _method_facts(name) for name in method_names()]
    table = listing("name", "method", "protects", "source")
    for each in found:
        if "broken" in each:
            table.add_row(each["name"], "broken", "", Text(each["broken"]))
        else:
            table.add_row(*each.values())
    return Output(facts={"methods": found}, words=Constrain(table, _WIDTH))


def _method_facts(name: str) -> dict[str, str]:
    try:
        method = find_method(name)
    except ConfigError as error:  # of another package, and no reason to hide the others
        return {"name": name, "broken": str(error)}
    return {"name": name, "title": method.title, "protects": method().unit, "source": method.paper}


def describe_method(name: str) -> Output:
    """Every field with its default, as ``--set`` takes it, and its meaning. ConfigError for an unknown name."""
    method = find_method(name)
    found = list(fields_of(method()))
    heading = Text(f"{method.title}: {method.paper}\n{(method.__doc__ or '').strip().splitlines()[0]}\n")
    lines: list[RenderableType] = [heading]
    for each in found:
        lines.append(Text(each.get("set", each["field"]), style="bold"))
        if each["meaning"]:
            lines.append(Padding(Text(each["meaning"]), (0, 0, 0, 4), expand=False))
    return Output(facts=_method_facts(name) | {"fields": found}, words=Constrain(Group(*lines), _WIDTH))


def fields_of(section: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Section by section, each ``field`` (dotted), its ``default``, the two as ``set`` takes them, and its ``meaning``.

    A section that is described has a line of its own, without a default.
    """
    described = getattr(type(section), "model_fields", {})
    for name in described or [field.name for field in fields(section)]:
        value, meaning = getattr(section, name), (described[name].description or "") if described else ""
        known = {"field": f"{prefix}{name}", "meaning": meaning}
        if isinstance(value, Section) or is_dataclass(value):
            if meaning:
                yield known
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield known | {"default": value, "set": f"{prefix}{name}={as_yaml(value)}"}


def as_yaml(value: Any) -> str:
    """A value as it is given with ``--set``."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace("Infinity", "inf")
