"""From YAML and ``section.field=value`` to the configuration of one method.

A file may serve several methods: what another method reads in it is checked and left out here, what none reads is an
error. An option that the method does not read is an error, since it would change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from fairpate.config import ConfigError, apply_override, merge, parse_config, read_yaml
from fairpate.methods import DEFAULT, all_methods, find_method
from fairpate.methods.definition import Method

Values = dict[str, Any]


def load_method(path: Path | None, overrides: Sequence[str] = (), *, method: str | None = None) -> Method:
    """The configuration in ``path`` with ``overrides`` on top; ``method`` None: the one that they name.

    ConfigError lists every fault with its field, value and remedy.
    """
    return configured(read_yaml(path) if path is not None else {}, overrides, method=method)


def configured(values: Values, overrides: Sequence[str] = (), *, method: str | None = None) -> Method:
    """As :func:`load_method`, from the values of a file."""
    if {"methods", "data_sets"} & values.keys():
        raise ConfigError("this is a sweep, with methods and data_sets; `fairpate compare` runs it.")
    said: Values = {}
    for override in overrides:
        apply_override(said, override)
    name = method or said.get("method") or values.get("method") or DEFAULT
    if not isinstance(name, str):
        raise ConfigError(f"method: expected a name, got {name!r}.")
    schema = find_method(name)
    unread = [path for path, _ in unread_by(schema, said)]
    if unread:
        raise ConfigError("\n".join(f"{path}: {name} does not read it; leave it out." for path in unread))
    full = start_of(schema)
    full = merge(full, read_of(schema, values))
    for override in overrides:
        apply_override(full, override)
    return parse_config(full | {"method": name}, schema)


def start_of(schema: type[Method]) -> Values:
    """The defaults of a method as plain values."""
    return schema().model_dump()


def read_of(schema: type[Method], values: Values) -> Values:
    """``values`` without what other methods read. ConfigError where that is wrong in itself."""
    faults = []
    for path, value in unread_by(schema, values):
        faults += _faults(path, value)
        values = _without(values, path.split("."))
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return values


def unread_by(schema: type[Method], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted fields that other methods have and ``schema`` has not, with their values."""
    yield from _unread(schema, list(all_methods().values()), values, "")


def _unread(schema: Any, others: Sequence[Any], values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    own = _fields(schema)
    for name, value in values.items():
        theirs = [found[name] for other in others if name in (found := _fields(other))]
        path = f"{prefix}{name}"
        if name not in own:
            if theirs:
                yield path, value
        elif isinstance(value, Mapping):
            yield from _unread(own[name], theirs, value, f"{path}.")


def _fields(annotation: Any) -> dict[str, Any]:
    """The fields of a section, or of the one that may also be null."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return {name: field.annotation for name, field in part.model_fields.items()}
    return {}


def _faults(path: str, value: Any) -> list[str]:
    """What is wrong with a value, unless some method takes it."""
    faults: list[str] = []
    for other in all_methods().values():
        annotation: Any = other
        for name in path.split("."):
            annotation = _fields(annotation).get(name)
        if annotation is None:
            continue
        try:
            TypeAdapter(annotation).validate_python(_completed(other, path, value))
        except ValidationError as error:
            faults = [f"{'.'.join([path, *map(str, fault['loc'])])}: {fault['msg']}." for fault in error.errors()]
        else:
            return []
    return faults


def _completed(schema: type[Method], path: str, value: Any) -> Any:
    """A partial section over its defaults."""
    default: Any = start_of(schema)
    for name in path.split("."):
        default = default.get(name) if isinstance(default, dict) else None
    return merge(default, value) if isinstance(default, dict) and isinstance(value, dict) else value


def _without(values: Values, path: Sequence[str]) -> Values:
    rest = dict(values)
    if len(path) == 1:
        del rest[path[0]]
    else:
        rest[path[0]] = _without(rest[path[0]], path[1:])
    return rest
