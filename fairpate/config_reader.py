"""From YAML, `--set` and Python to a checked section of a configuration, and the digest of what it computes.

:func:`parse_config` reports every fault in the user's words: field, value and what was expected, which is the remedy
too. :func:`config_digest` identifies what a configuration computes, without the places where that happens and without
what it does not read. Sections mean the same in every method: a setting is unread where another one makes it
irrelevant (:func:`unread_because_of`), such as the widths of an architecture that is not used or the momentum of
another optimiser. What the settings of one method leave unread is in ``Method.unread``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import yaml
from pydantic import ValidationError

from fairpate.config import ConfigError, DataConfig, EvaluationConfig, Section, nearest

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


def exact_text(value: float) -> str:
    """Return a number in as few digits as are exact: what is typed in a command must mean the same again."""
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def expected(fault: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors asks for, such as ``expected > 0``; other kinds in pydantic's words."""
    kind, context, message = str(fault["type"]), fault.get("ctx", {}), str(fault["msg"])
    if kind == "value_error":  # raised by a check of ours
        said = message.removeprefix("Value error, ").rstrip(".")
        # It follows the field's name, not the start of a sentence.
        return said.replace("Expected", "expected", 1) if said.startswith("Expected ") else said
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        return f"expected {sign} {exact_text(context[name])}"
    for ending, words in (("too_short", "at least"), ("too_long", "at most")):
        if kind in (ending, f"string_{ending}"):
            number = context["min_length" if ending == "too_short" else "max_length"]
            noun = "character" if kind.startswith("string") else "item"
            return f"expected {words} {number} {noun}{'' if number == 1 else 's'}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"expected {_FORMS.get(context['pattern'], 'text of the form ' + context['pattern'])}"
    # `int_type`, `int_parsing`, `int_from_float` and the like.
    known = next((words for name, words in _KINDS.items() if kind == name or kind.startswith(f"{name}_")), None)
    if known is not None:
        return f"expected {known}"
    return message.replace("Input should be", "expected", 1).replace("Input should have", "expected", 1)


_AUGMENT = "is `augment` now, one for teachers and students; set it there"
_SOFTNESS = {"temperature": 1.0, "maximum": "hardmax", "max_temperature": 0.1}
_TAUGHT = ("record_votes", "weighted_votes", "residual_votes", "ada_ssp", "teacher_votes")
_LEARNERS = ("teachers", "student")
_EMBEDDED = ("data", "weighted_votes", "residual_votes", "ada_ssp")
_FIXED: dict[str, Any] = {
    **{f"{learner}.model.dropout": 0.0 for learner in _LEARNERS},
    **{f"{loop}.momentum": 0.9 for loop in ("teachers.fit", "student.fit", "sgd", "f_ld", "pf_ld")},
    "teachers.standardize": False,
    "teachers.engine": "auto",
    "teachers.fit.label_smoothing": 0.0,
    "student.rounds": 1,
    "student.unlabelled_ratio": 4,
    "student.unlabelled_weight": 1.0,
    **{
        f"{section}.{name}": value
        for section in (*(f"{method}.penalty" for method in _TAUGHT), "pate_s_in")
        for name, value in _SOFTNESS.items()
    },
    **{f"{learner}.model.norm": None for learner in _LEARNERS},
    **{
        f"{section}.embedding.{name}": value for section in _EMBEDDED for name, value in (("steps", 10), ("pixels", 16))
    },
    **{
        f"public_data.calibration.{name}": value
        for name, value in (("epochs", 20), ("max_disparity", 0.0), ("learning_rate", 0.001), *_SOFTNESS.items())
    },
    "public_data.calibration.anchor": 1.0,
    "public_data.calibration.held_out": 0.25,
    "public_data.calibration.batch_size": 256,
    "augment.erase": 0.0,
    "raco_dp.averaged_share": 0.5,
    "raco_dp.max_multiplier": None,
    "raco_dp.max_total_multiplier": None,
    "ray.max_restarts": 3,
    "ray.read_shards": False,
    "ray.torch_threads": 1,
    "aggregator.admission.uncertain_first": False,
    **{f"{section}.gate.cold_start": "group" for section in ("aggregator", *_TAUGHT)},
}
"""Fields of earlier versions that nobody set, by their dotted names, and the value that each has now."""
_MOVED = {
    **{f"{loop}.augment": _AUGMENT for loop in ("teachers.fit", "student.fit", "sgd")},
    "student.strong_augment": "follows from `augment` now; leave it out",
    **{
        f"{learner}.fit.{name}": f"is training.{name} now, one for teachers and students; set it there"
        for learner in _LEARNERS
        for name in ("optimizer", "weight_decay", "schedule", "precision")
    },
    "student.fit.label_smoothing": "is student.label_smoothing now; set it there",
    **{f"data.{name}": f"is data.split.{name} now; set it there" for name in ("test_share", "validation_share")},
    "aggregator.budget.kind": "follows from max_queries, epsilon and accept_leak (data_dependent) now; leave it out",
    **{
        f"{learner}.model.{name}": f"is backbone.{name} now, one for teachers and students; set it there"
        for learner in _LEARNERS
        for name in ("weights", "trainable")
    },
    **{
        f"{learner}.model.width": "is the one number of hidden of a cnn now; set it there, and leave it out for others"
        for learner in _LEARNERS
    },
    "public_data.self_label": "is the name of the published architecture now, such as mlp; give the name alone, and "
    "set confidence, fit and method in `student`",
    "public_data.pretrain": "is a number of epochs now, and all else of it is fixed; give the number alone",
    "aggregator.admission.fit": "is as student.fit now; leave it out",
}
"""Fields of earlier versions by their dotted names, and what became of them."""


def moved(path: str, value: Any) -> str | None:
    """Return what became of a field of an earlier version, empty if ``value`` says what is the case now; None for other
    names."""
    if path in _FIXED:
        return "" if value == _FIXED[path] else f"{path}: is fixed now, at {json.dumps(_FIXED[path])}; leave it out."
    if path not in _MOVED:
        return None
    # A section that was off.
    return "" if isinstance(value, Mapping) and not any(value.values()) else f"{path}: {_MOVED[path]}."


def as_now(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values without fields of earlier versions that say what is the case now; settings that differ only in
    these compare equal."""
    return {
        name: as_now(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if moved(f"{prefix}{name}", value) != ""
    }


_ECHO_LENGTH = 120
_MOST_VALUES = 100_000  # a few nested anchors expand to billions
_SHORT = 2**16  # longer texts are not cached
AnySection = TypeVar("AnySection", bound=Section)


def parse_config(values: dict[str, Any], schema: type[AnySection]) -> AnySection:
    """Validate ``values``; :class:`ConfigError` lists every fault as ``field: value: remedy``."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            path = ".".join(str(part) for part in fault["loc"]) or "config"
            is_unknown = fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")
            if (is_unknown or isinstance(fault["input"], dict)) and (was := moved(path, fault["input"])):
                faults.append(was)
            elif is_unknown:
                names = _names_beside(fault["loc"], schema)
                faults.append(f"{path}: unknown field{nearest(fault['loc'][-1], names) if names else ''}.")
            elif fault["type"] in ("missing", "missing_keyword_only_argument"):
                faults.append(f"{path}: missing; add it.")
            elif fault["type"] == "value_error" and not fault["loc"]:  # of several sections: it names its field
                faults.append(f"{expected(fault)}.")
            elif fault["type"] == "value_error":  # our own checks name the value in their message
                faults.append(f"{path}: {expected(fault)}.")
            else:
                got = repr(fault["input"])
                got = got if len(got) <= _ECHO_LENGTH else f"{got[:_ECHO_LENGTH]}..."
                faults.append(f"{path}: {expected(fault)}, got {got}.")
        raise ConfigError("\n".join(faults)) from error


def _names_beside(location: tuple[Any, ...], schema: type[Section]) -> Iterable[str]:
    """Return the field names of the section that ``location`` points into; empty if the section takes any name."""
    section: Any = schema
    for name in location[:-1]:
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:
            # A mapping of named sections, or a list of them: the name is free, its section is known.
            section = next(reversed([part for part in get_args(section) if part is not ...]), None)
            continue
        section = field.annotation
        parts = [part for part in get_args(section) if part is not type(None)]
        if len(parts) == 1 and type(None) in get_args(section):  # a section that may be null
            (section,) = parts
    return getattr(section, "model_fields", None) or getattr(section, "__dataclass_fields__", {})


def read_yaml(path: Path | str, *, as_text: bool = False) -> dict[str, Any]:
    """Return the mapping of sections in a YAML file; :class:`ConfigError` for anything else.

    ``as_text`` reads every value as text: `no`, `1.0` and `007` too.
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
    """Refuses names that occur twice in a mapping: YAML would silently take the last one.

    Anchors that contain themselves, or that expand to too many values, are refused too.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        # Before any of it becomes a value, which might fill the memory.
        if node is not None and _written_out(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"its anchors expand to more than {_MOST_VALUES} values; write them out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is given twice; leave one out", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)


def _written_out(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values ``node`` has with every alias replaced; ``counted`` holds the counts of nodes by id."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise yaml.YAMLError("an anchor contains itself; write it out")
        return counted[id(node)]
    # 0 while its parts are counted, so that an alias of it among them is found.
    counted[id(node)] = 0
    parts: list[Any] = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in parts for part in pair]
    counted[id(node)] = 1 + sum(_written_out(part, counted) for part in parts)
    return counted[id(node)]


class _TextLoader(_Loader):
    """Reads no value as a number, a flag or a date, so that a published `no` or `007` stays text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as the parent has it


def _load_yaml(text: str, *, as_text: bool = False) -> Any:
    """Return the value of ``text``. yaml.YAMLError or ValueError where it is not YAML, or gives a name twice."""
    try:
        # A copy, because `--set` writes into what was read, and the cached value must stay as the file has it.
        return deepcopy(_parsed(text, as_text)) if len(text) < _SHORT else _parsed.__wrapped__(text, as_text)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


# A run reads its configuration several times, and YAML takes a hundred times as long to read as its values to copy.
@lru_cache(maxsize=1024)
def _parsed(text: str, as_text: bool) -> Any:
    return yaml.load(text, Loader=_TextLoader if as_text else _Loader)  # noqa: S506 - safe loaders


def merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` over ``defaults``, section by section."""
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
        # A section that is null is off; setting one of its fields switches it on.
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {name} is a value, not a section.")
    section[field] = value


# Where a run happens, and what its pages name or call fair, does not change what it computes; a file of weights is
# identified by its checksum.
_PLACES = (
    "out",
    "names_earlier",
    "storage",
    "ray",
    "data.data_dir",
    "data.declaration.path",
    "teachers.block_size",
    "backbone.weights.path",
    "evaluation.fair_at",
    "votes.path",
    "votes.test",
    "votes.label",
)


class Configuration(Protocol):
    """The part of a method's configuration that its digest needs (:class:`fairpate.methods.base.Method`)."""

    @property
    def method(self) -> str: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def unread(self) -> Mapping[str, str]: ...
    def model_dump(self, *, mode: str = ...) -> dict[str, Any]: ...


def config_digest(config: Configuration) -> str:
    """Return twelve hexadecimal digits that identify what ``config`` computes, on any machine."""
    return values_digest(determining_values(config))


def determining_values(config: Configuration, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the plain values that determine what ``config`` computes, without paths and without unread settings.

    ``values`` None are those of ``config``.
    """
    kept = _without(config.model_dump(mode="json") if values is None else values, (*_PLACES, *config.unread))
    # Left out at their defaults, so that runs from before they could be set keep their digests.
    if kept.get("evaluation") == EvaluationConfig().model_dump(mode="json", exclude={"fair_at"}):
        del kept["evaluation"]
    elif kept.get("evaluation", {}).get("metrics") == "outside":
        kept = _without(kept, ("evaluation.metrics", "evaluation.score_edges"))
    if kept["data"].get("split") is None:
        kept = _without(kept, ("data.split",))
    if "keep" in (aggregator := kept.get("aggregator", {})) and not aggregator["keep"]:
        kept = _without(kept, ("aggregator.keep",))
    return kept


def placeless_values(config: Configuration) -> dict[str, Any]:
    """Return all values of ``config`` except paths, unread ones included, as settings for a run elsewhere."""
    return _without(config.model_dump(mode="json"), _PLACES)


def _without(values: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    # Sections that lose nothing are shared with ``values``: a sweep asks thousands of times.
    kept = dict(values)
    # A field that the method does not have is no error: the same list of places serves all methods.
    for place in fields:
        section, _, field = place.partition(".")
        if not field:
            kept.pop(section, None)
        elif isinstance(kept.get(section), dict):
            kept[section] = _without(kept[section], (field,))
    return kept


def values_digest(values: dict[str, Any]) -> str:
    """Return the digest of :func:`determining_values`."""
    # 48 bits: of ten thousand configurations two share a digest with a probability below 1e-6.
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves by dotted paths; an empty section is a leaf."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        path: leaf
        for name, value in values.items()
        for path, leaf in flattened(value, f"{prefix}.{name}" if prefix else name).items()
    }


Settings = Mapping[str, Any]
"""Values by dotted names."""
_NOT_OF_A_LABEL = ("demographic_parity", "equalized_odds")
_UNREAD_BESIDE: Mapping[str, tuple[str, Sequence[Any]]] = {
    "max_temperature": ("maximum", ("hardmax",)),
    "sharpness": ("constraint", ("accuracy_parity",)),
    "positive_label": ("constraint", _NOT_OF_A_LABEL),
    "label": ("constraint", _NOT_OF_A_LABEL),
    "threshold_stddev_votes": ("threshold", (None,)),
    "failure_probability": ("slack", (False,)),
}
"""A field, another one of its section, and the values of that other one under which nothing reads the first."""


def shared_settings(of_points: Sequence[Settings]) -> dict[str, Any]:
    """Return the settings that all have in common."""
    first, *others = of_points
    return {name: first[name] for name in first if all(name in o and o[name] == first[name] for o in others)}


def is_read(name: str, value: Any, settings: Settings) -> bool:
    """Return whether a setting is switched on and may be read."""
    # A share or an angle of 0 switches an augmentation off.
    is_off = value is None or value == {} or (name.startswith("augment.") and not value)
    return not is_off and unread_because_of(name, settings) is None


def unread_because_of(name: str, settings: Settings) -> str | None:
    """Return the field whose value keeps ``name`` from being read; None if ``name`` may be read."""
    section, _, field = name.rpartition(".")
    if section.endswith("model") and field == "hidden" and settings.get(f"{section}.name") not in ("mlp", "cnn"):
        return f"{section}.name"
    if name in ("backbone.norm", "backbone.trainable"):
        is_given = any(other.startswith("backbone.weights.") for other in settings)
        return None if is_given else "backbone.weights"
    other, values = _UNREAD_BESIDE.get(field, ("", ()))
    # `...` and not None, which is one of the listed values.
    if settings.get(beside := f"{section}.{other}", ...) in values:
        return beside
    rounds = "dp_oracle_learner.num_rounds"  # the paper derives it from the failure probability
    if name == "dp_oracle_learner.failure_probability" and settings.get(rounds) is not None:
        return rounds
    method, self_label = settings.get("student.method"), settings.get("public_data.self_label")
    is_unread = name == "student.confidence" and method == "supervised" and self_label is None
    return "student.method" if is_unread else None
