"""From YAML and ``section.field=value`` to the configuration of one method.

A file may serve several methods: what another method reads in it is checked and left out here, what none reads is an
error. An option that the method does not read is an error, since it would change nothing, and so is one that other
settings leave unread; a file may hold those, as the configuration of a finished run does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from fairpate.app.identity import flattened
from fairpate.config import ConfigError
from fairpate.config_reader import apply_override, merge, parse_config, read_yaml
from fairpate.evaluation.settings_read import unread_because_of
from fairpate.methods import DEFAULT, all_methods, find_method
from fairpate.methods.definition import Method
from fairpate.named_code import PLACE, REMEDY, may_run
from fairpate.names import nearest

Values = dict[str, Any]
Names = tuple[str, ...]
"""A field, as the names of the sections that it is in and its own."""


def load_method(path: Path | str | None, overrides: Sequence[str] = (), *, method: str | None = None) -> Method:
    """The configuration in ``path`` with ``overrides`` on top; ``method`` None: the one that they name.

    ConfigError lists every fault with its field, value and remedy: of an override also that nothing reads it.
    """
    values = {} if path is None else read_yaml(path)
    if {"methods", "data_sets"} & values.keys():
        raise ConfigError(f"{path}: a sweep, with methods and data_sets; `fairpate compare` runs it.")
    # A file may come from anybody; what is said on the command line was typed by its user.
    if path is not None and method is None and "method" not in _said(overrides):
        require_trusted(values.get("method"), Path(path))
    return configured(values, overrides, method=method)


def require_trusted(method: Any, path: Path) -> None:
    """ConfigError for ``module:Class`` that the file ``path`` names, where files may not."""
    if isinstance(method, str) and PLACE.fullmatch(method) and not may_run(method):
        raise ConfigError(f"method: {path} names {method}, code that would run with your rights; {REMEDY}.")


def configured(values: Values, overrides: Sequence[str] = (), *, method: str | None = None) -> Method:
    """As :func:`load_method`, from the values of a file."""
    said = _said(overrides)
    name = _name(values, said, method)
    schema = find_method(name)
    faults = [fault for path, value in unread_by([schema], values) for fault in refused(path, value)]
    faults += _unread_faults(schema, said, [override.partition("=")[0] for override in overrides], method=name)
    try:
        config = parse_config(merged(values, overrides, method=name) | {"method": name}, schema)
    except ConfigError as error:
        faults.append(str(error))
    else:
        faults += _left_unread(config, said)
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return config


def _left_unread(config: Method, said: Values) -> list[str]:
    """What is wrong with fields that were said to this run although other settings leave them unread."""
    settings, faults = flattened(config.model_dump(mode="json")), []
    for field, value in flattened(said).items():
        # With a dot behind both, as the name of one field may begin that of another.
        own = [cause for unread, cause in config.unread.items() if f"{field}.".startswith(f"{unread}.")]
        cause = own[0] if own else unread_because_of(field, settings)
        if cause is not None and value is not None:
            found = f"={json.dumps(settings[cause])}".replace('"', "") if cause in settings else ""
            faults.append(f"{field}: {cause}{found} leaves it unread; leave it out, or change {cause}.")
    return faults


def configured_exactly(values: Values, *, method: str) -> Method:
    """``values`` over the defaults of ``method``. ConfigError besides for what it does not read."""
    schema = find_method(method)
    faults = _unread_faults(schema, values, method=method)
    if faults:
        raise ConfigError("\n".join(faults))
    return parse_config(merge(start_of(schema), values) | {"method": method}, schema)


def _unread_faults(schema: type[Method], said: Values, options: Sequence[str] = (), *, method: str) -> list[str]:
    """What is wrong with fields that were said to this method alone and that it has not; ``options``: as given."""
    faults = []
    for path, value in unread_by([schema], said):
        dotted = ".".join(path)
        given = [option for option in options if option.startswith(f"{dotted}.")] or [dotted]
        faults += refused(path, value) or [f"{option}: {method} does not read it; leave it out." for option in given]
    return faults


def merged(values: Values, overrides: Sequence[str], *, method: str | None) -> Values:
    """What the method reads: its defaults, a file's ``values`` over them, ``overrides`` on top; nothing is checked."""
    schema = find_method(_name(values, _said(overrides), method))
    full = merge(start_of(schema), values)
    for override in overrides:
        apply_override(full, override)
    return read_of(schema, full)


def _said(overrides: Sequence[str]) -> Values:
    said: Values = {}
    for override in overrides:
        apply_override(said, override)
    return said


def _name(values: Values, said: Values, method: str | None) -> str:
    """Of the method: as it is asked for, as an option says, as the file says, or the default."""
    if method is not None and said.get("method", method) != method:
        raise ConfigError(f"method: {method} is asked for, and --set says {said['method']}; leave one of them out.")
    named = (method, said.get("method"), values.get("method"), DEFAULT)
    name = next(name for name in named if name is not None)
    if not isinstance(name, str):
        raise ConfigError(f"method: expected a name, got {name!r}.")
    return name


def start_of(schema: type[Method]) -> Values:
    """The defaults of a method as plain values."""
    return schema().model_dump()


def read_of(schema: Any, values: Mapping[str, Any]) -> Values:
    """``values`` without what the method, or section, does not have."""
    own = _fields(schema)
    return {
        name: read_of(own[name], value) if name in own and isinstance(value, Mapping) else value
        for name, value in values.items()
        if name in own or not own
    }


def unread_by(schemas: Sequence[Any], values: Mapping[str, Any], *sections: str) -> Iterator[tuple[Names, Any]]:
    """Fields that none of ``schemas`` has, with their values."""
    own = [_fields(schema) for schema in schemas]
    if not all(own):  # any name may stand there, or its own type says which
        return
    for name, value in values.items():
        inner = [fields[name] for fields in own if name in fields]
        if not inner:
            yield (*sections, str(name)), value
        elif isinstance(value, Mapping):
            yield from unread_by(inner, value, *sections, name)


def refused(path: Names, value: Any) -> list[str]:
    """Why no method takes ``value`` as its field ``path``; nothing where one does."""
    *sections, last = path
    known = {other: _fields_in(other, sections) for other in all_methods().values()}
    names = dict.fromkeys(name for fields in known.values() for name in fields)
    faults = [f"{'.'.join(path)}: unknown field{nearest(last, names)}."]
    for name in reversed(path):
        value = {name: value}
    closest = 0
    for other in (other for other, fields in known.items() if last in fields):
        try:
            parse_config(merge(start_of(other), value), other)
        except ConfigError as error:
            found = str(error).splitlines()
            depth = max(fault.partition(":")[0].count(".") for fault in found)
            if depth >= closest:  # of the method that has most of what is said
                faults, closest = found, depth
        else:
            return []
    return faults


def _fields_in(schema: Any, sections: Sequence[str]) -> Values:
    for name in sections:
        schema = _fields(schema).get(name)
    return _fields(schema)


def _fields(annotation: Any) -> Values:
    """The fields of a section, or of the one that may also be null."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return {name: field.annotation for name, field in part.model_fields.items()}
    return {}
