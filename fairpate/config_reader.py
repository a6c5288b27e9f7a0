"""From YAML, `--set` and Python to a checked section of a configuration; a message for every fault in them."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from fairpate.config import ConfigError, Section
from fairpate.faults import expected
from fairpate.names import nearest

_ECHO_LENGTH = 120
_MOST_VALUES = 100_000
_SHORT = 2**16  # a longer text is not kept
AnySection = TypeVar("AnySection", bound=Section)


def parse_config(values: dict[str, Any], schema: type[AnySection]) -> AnySection:
    """Validate ``values``; :class:`ConfigError` lists every fault as ``field: value: remedy``."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(fault, schema) for fault in error.errors())) from error


def read_yaml(path: Path | str, *, as_text: bool = False) -> dict[str, Any]:
    """The mapping of sections in a YAML file; :class:`ConfigError` for anything else.

    ``as_text`` leaves every value as it is written: `no`, `1.0` and `007` are text then.
    """
    try:
        values = _load_yaml(Path(path).read_text(encoding="utf-8"), as_text=as_text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a YAML file.") from error
    except (UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of sections at the top, got {type(values).__name__}.")
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a name that one mapping has twice, of which YAML would take the last without a word.

    And anchors that contain themselves, or that stand for more values than anybody writes.
    """

    def get_single_node(self) -> yaml.Node | None:
        """The parent's, before any of it becomes a value."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its anchors stand for more than {_MOST_VALUES} values; write them out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The parent's, after a look at the names as they are written."""
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} stands there twice; leave one out", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _written_out(node: yaml.Node, counted: dict[int, int]) -> int:
    """How many values ``node`` stands for with every alias in it replaced; ``counted`` knows those of its parts."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise yaml.YAMLError("an anchor contains itself; write it out")
        return counted[id(node)]
    # Nought while its parts are counted: who meets it meanwhile is inside of it.
    counted[id(node)] = 0
    parts: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in parts for part in pair]
    counted[id(node)] = 1 + sum(_written_out(part, counted) for part in parts)
    return counted[id(node)]


class _TextLoader(_Loader):
    """Reads no value as a number, a flag or a date: a published `no` or `007` stays what it is."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the parent has it


def _load_yaml(text: str, *, as_text: bool = False) -> Any:
    """What ``text`` says. yaml.YAMLError or ValueError where it is no YAML, or says a name twice."""
    try:
        # A copy, for `--set` writes into what was read, and the kept one must stay as the file has it.
        return deepcopy(_parsed(text, as_text)) if len(text) < _SHORT else _parsed.__wrapped__(text, as_text)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


# A run reads its configuration several times, and YAML takes a hundred times as long to read as its values to copy.
@lru_cache(maxsize=64)
def _parsed(text: str, as_text: bool) -> Any:
    return yaml.load(text, Loader=_TextLoader if as_text else _Loader)  # noqa: S506 - safe loaders


def merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``values`` over ``defaults``, section by section."""
    merged = dict(defaults)
    for name, value in values.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both_sections else value
    return merged


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set ``section.field=value`` in ``values``; the value is read as YAML."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {override}: expected section.field=value.")
    *parents, field = dotted.split(".")
    section = values
    for name in parents:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section.")
    try:
        section[field] = _load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {override}: cannot be read as a YAML value: {error}") from error


def _describe(fault: Any, schema: type[Section]) -> str:
    path = ".".join(str(part) for part in fault["loc"]) or "config"
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{path}: unknown field{_suggestion(fault['loc'], schema)}."
    if fault["type"] in ("missing", "missing_keyword_only_argument"):
        return f"{path}: missing; add it."
    got = "" if fault["type"] == "value_error" else f", got {_echo(fault['input'])}"  # ours say it themselves
    return f"{path}: {expected(fault)}{got}."


def _echo(value: Any) -> str:
    """The value as it was given, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _ECHO_LENGTH else f"{text[:_ECHO_LENGTH]}..."


def _suggestion(location: tuple[Any, ...], schema: type[Section]) -> str:
    """The nearest field name of the section that ``location`` points into."""
    section: Any = schema
    for name in location[:-1]:
        field = getattr(section, "model_fields", {}).get(name)
        # A mapping of named sections, or a list of them: the name is free, its section is known.
        inner = [part for part in get_args(section) if part is not ...]
        section = _section_in(field.annotation) if field is not None else next(reversed(inner), None)
    names = getattr(section, "model_fields", None) or getattr(section, "__dataclass_fields__", {})
    return nearest(location[-1], names) if names else ""


def _section_in(annotation: Any) -> Any:
    """The section that may also be left out, or what stands there."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return parts[0] if len(parts) == 1 and type(None) in get_args(annotation) else annotation
