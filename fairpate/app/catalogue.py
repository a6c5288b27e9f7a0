"""What `fairpate methods` prints: every method with what it protects and its source, or all fields of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairpate.config import ConfigError, Section
from fairpate.methods import find_method, method_names


def list_methods() -> Table:
    """One line per registered method, under its default configuration."""
    table = Table("name", "method", "protects", "source", box=SIMPLE_HEAD)
    for name in method_names():
        try:
            method = find_method(name)
        except ConfigError as error:  # of another package, and no reason to hide the others
            table.add_row(name, "broken", "", Text(str(error)))
        else:
            table.add_row(name, method.title, method().unit, method.paper)
    return table


def describe_method(name: str) -> Group:
    """Every field with its default, as ``--set`` takes it, and its meaning. ConfigError for an unknown name."""
    method = find_method(name)
    heading = Text(f"{method.title}: {method.paper}\n{(method.__doc__ or '').strip().splitlines()[0]}\n")
    lines: list[RenderableType] = [heading]
    for path, default, meaning in fields_of(method()):
        lines.append(Text(f"{path}={default}" if default else path, style="bold"))
        if meaning:
            lines.append(Padding(Text(meaning), (0, 0, 0, 4), expand=False))
    return Group(*lines)


def fields_of(section: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted field, value and description, section by section; a section that is described has a line of its own."""
    described = getattr(type(section), "model_fields", {})
    for name in described or [field.name for field in fields(section)]:
        value, meaning = getattr(section, name), (described[name].description or "") if described else ""
        if isinstance(value, Section) or is_dataclass(value):
            if meaning:
                yield f"{prefix}{name}", "", meaning
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", as_yaml(value), meaning


def as_yaml(value: Any) -> str:
    """A value as it is given with ``--set``."""
    return value if isinstance(value, str) else json.dumps(value, default=str).replace("Infinity", "inf")
