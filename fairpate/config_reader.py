"""From YAML and ``section.field=value`` to values; errors in the user's words; the digest of the settings that count.

What pydantic found wrong with a value, in this project's words: what was expected, which is the remedy too.

From YAML, `--set` and Python to a checked section of a configuration; a message for every fault in them.

What a configuration computes, whatever the places where that happens: its values, their digest, a folder's name.

Which settings of a configuration its run read, and what left the others unread.

Sections mean the same in every method. Left out are what is switched off (nothing is given), and what another setting
makes irrelevant: widths of an architecture that is not used, momentum of another optimiser, weights of unlabelled
records where none are learned from. What a method's own settings leave unread it says itself (``Method.unread``).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import yaml
from pydantic import ValidationError

from fairpate.config import ConfigError, DataConfig, EvaluationConfig, Section, nearest
from fairpate.words import exact_text

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_FORMS = {
    "^[a-z][a-z0-9_]*$": "a name of lower-case letters (a to z), digits and underscores that begins with a letter",
    "^[a-z][a-z ]{0,39}$": "at most 40 lower-case letters (a to z) and spaces that begin with a letter",
    "^[0-9a-f]{64}$": "a sha256 of 64 digits 0 to 9 and a to f",
    r"^(pixels|oriented_gradients|[\w.]+:[\w.]+)$": "'pixels', 'oriented_gradients' or module:function",
}


def expected(fault: Mapping[str, Any]) -> str:
    """What one of pydantic's errors asks for, such as ``expected > 0``; another kind of error in pydantic's words."""
    kind, context = str(fault["type"]), fault.get("ctx", {})
    if kind == "value_error":  # ours, which says what was wrong
        said = str(fault["msg"]).removeprefix("Value error, ").rstrip(".")
        # Behind the field's name: by itself it is a sentence.
        return said.replace("Expected", "expected", 1) if said.startswith("Expected ") else said
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"expected {sign} {exact_text(context[name])}"
    if kind in ("too_short", "string_too_short"):
        return f"expected at least {_counted(context['min_length'], kind)}"
    if kind in ("too_long", "string_too_long"):
        return f"expected at most {_counted(context['max_length'], kind)}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"expected {_FORMS.get(context['pattern'], 'text of the form ' + context['pattern'])}"
    # `int_type`, `int_parsing`, `int_from_float` and the like.
    known = next((words for name, words in _KINDS.items() if kind == name or kind.startswith(f"{name}_")), None)
    if known is not None:
        return f"expected {known}"
    message = str(fault["msg"])
    return message.replace("Input should be", "expected", 1).replace("Input should have", "expected", 1)


def _counted(number: int, kind: str) -> str:
    noun = "character" if kind.startswith("string") else "item"
    return f"{number} {noun}{'' if number == 1 else 's'}"


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


Override = str | tuple[str, Any]
"""``section.field=value``, as `--set` takes it, or a dotted field and its value."""


def apply_override(values: dict[str, Any], override: Override) -> None:
    """Set one field in ``values``; the value in a text is read as YAML."""
    if isinstance(override, str):
        dotted, separator, text = override.partition("=")
        if not separator or not dotted:
            raise ConfigError(f"--set {override}: expected section.field=value.")
        try:
            value = _load_yaml(text)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"--set {override}: cannot be read as a YAML value: {error}") from error
    else:
        dotted, value = override
    *parents, field = dotted.split(".")
    section = values
    for name in parents:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section.")
    section[field] = value


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


# Where a run happens, and what its pages name, does not change what it computes; a file of weights is known by its
# checksum.
_PLACES = (
    "out",
    "names_earlier",
    "storage",
    "ray",
    "data.data_dir",
    "data.declaration.path",
    "teachers.engine",
    "teachers.block_size",
    "teachers.model.weights.path",
    "votes.path",
    "votes.test",
    "votes.label",
    "student.model.weights.path",
    "public_data.self_label.model.weights.path",
)


class Configuration(Protocol):
    """A method's configuration, as far as its digest needs it (:class:`fairpate.methods.base.Method`)."""

    @property
    def method(self) -> str: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def unread(self) -> Mapping[str, str]: ...
    def model_dump(self, *, mode: str = ...) -> dict[str, Any]: ...


def config_digest(config: Configuration) -> str:
    """Twelve hexadecimal digits that identify what ``config`` computes, wherever and on however many CPUs."""
    return values_digest(determining_values(config))


def determining_values(config: Configuration) -> dict[str, Any]:
    """What ``config`` computes, as plain values: without the places where it happens, and what it does not read."""
    return determining(config.model_dump(mode="json"), config)


def determining(values: dict[str, Any], config: Configuration) -> dict[str, Any]:
    """``values`` of the method of ``config`` without what decides nothing there."""
    kept = _without(values, (*_PLACES, *config.unread))
    # At its default it is left out: digests of runs from before it could be set stay.
    if kept.get("evaluation") == EvaluationConfig().model_dump():
        del kept["evaluation"]
    return kept


def placeless_values(config: Configuration) -> dict[str, Any]:
    """All that ``config`` says but places, what it does not read too: as settings to start from elsewhere."""
    return _without(config.model_dump(mode="json"), _PLACES)


def _without(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    kept = copy.deepcopy(values)
    for place in fields:
        *parents, field = place.split(".")
        section: Any = kept
        for name in parents:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(field, None)
    return kept


def values_digest(values: dict[str, Any]) -> str:
    """The digest of :func:`determining_values`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def default_folder(config: Configuration) -> Path:
    """``runs/METHOD-DATA-DIGEST``."""
    words = (re.sub("[^A-Za-z0-9_.-]+", "-", word) for word in (config.method, config.data.name))
    return Path("runs") / f"{'-'.join(words)}-{config_digest(config)}"


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted paths of the leaves; an empty section is a leaf."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        path: leaf
        for name, value in values.items()
        for path, leaf in flattened(value, f"{prefix}.{name}" if prefix else name).items()
    }


def flat_values(values: Any) -> dict[str, Any]:
    """The same without empty sections, which earlier versions may not have written down."""
    return {path: leaf for path, leaf in flattened(values).items() if leaf != {}}


Settings = Mapping[str, Any]
"""Values by dotted names."""
_UNREAD_BY_LEARNING: Mapping[Any, tuple[str, ...]] = {
    "supervised": ("confidence", "unlabelled_weight", "unlabelled_ratio", "rounds", "strong_augment"),
    "fixmatch": ("rounds",),
    "pseudo_label": ("unlabelled_ratio", "strong_augment"),
}
_NOT_OF_A_LABEL = ("demographic_parity", "equalized_odds")
_UNREAD_BESIDE: Mapping[str, tuple[str, Sequence[Any]]] = {
    "momentum": ("optimizer", ("adam",)),
    "max_temperature": ("maximum", ("hardmax",)),
    "sharpness": ("constraint", ("accuracy_parity",)),
    "positive_label": ("constraint", _NOT_OF_A_LABEL),
    "label": ("constraint", _NOT_OF_A_LABEL),
    "threshold_stddev_votes": ("threshold", (None,)),
    "failure_probability": ("slack", (False,)),
}
"""A field, the one beside it, and the values of that under which nothing reads the first."""


def settings_read(settings: Settings) -> dict[str, Any]:
    """Those of dotted names that were read."""
    return {name: value for name, value in settings.items() if not _is_unread(name, value, settings)}


def shared_settings(of_points: Sequence[Settings]) -> dict[str, Any]:
    """Settings that all have in common."""
    first, *others = of_points
    return {name: first[name] for name in first if all(name in o and o[name] == first[name] for o in others)}


def unread_because_of(name: str, settings: Settings) -> str | None:
    """The field for whose value nothing reads ``name``; None where something may."""
    section, _, field = name.rpartition(".")
    if section.endswith("model") and (cause := _of_architecture(section, field, settings)):
        return cause
    other, values = _UNREAD_BESIDE.get(field, ("", ()))
    if settings.get(beside := f"{section}.{other}", ...) in values:
        return beside
    rounds = "dp_oracle_learner.num_rounds"  # of which the probability is only the paper's choice
    if name == "dp_oracle_learner.failure_probability" and settings.get(rounds) is not None:
        return rounds
    unread = _UNREAD_BY_LEARNING.get(settings.get("student.method"), ())
    if name.startswith(tuple(f"student.{part}" for part in unread)):
        return "student.method"
    return None


def _is_unread(name: str, value: Any, settings: Settings) -> bool:
    is_off = value is None or value == {} or ("augment." in name and not value)
    return is_off or unread_because_of(name, settings) is not None


def _of_architecture(section: str, field: str, settings: Settings) -> str | None:
    architecture = settings.get(f"{section}.name")
    if (
        (field == "hidden" and architecture != "mlp")
        or (field == "width" and architecture != "cnn")
        or (field == "dropout" and architecture in ("logistic", "hog_logistic"))
    ):
        return f"{section}.name"
    has_weights = any(other.startswith(f"{section}.weights.") for other in settings)
    return f"{section}.weights" if field in ("norm", "trainable") and not has_weights else None
