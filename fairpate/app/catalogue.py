"""What `fairpate methods` prints: every method with what it protects and its source, or all fields of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
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
    """Every field with its default and its meaning. ConfigError for an unknown name."""
    method = find_method(name)
    table = Table("field", "default", "meaning", box=SIMPLE_HEAD)
    for path, default, meaning in fields_of(method):
        table.add_row(path, default, meaning)
    heading = Text(f"{method.title}: {method.paper}\n{(method.__doc__ or '').strip().splitlines()[0]}")
    return Group(heading, table)


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Dotted field, default and description, section by section."""
    for name, field in section.model_fields.items():
        default: Any = field.get_default(call_default_factory=True) if not field.is_required() else "required"
        if isinstance(default, Section):
            yield from fields_of(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "null" if default is None else str(default), field.description or ""
