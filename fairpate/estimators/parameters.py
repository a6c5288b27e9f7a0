"""What an estimator is given: parameters by name, and the configuration that they say of one method.

What is said stands. What is left out follows from public facts, as for a command without a configuration
(:mod:`fairpate.methods.fitted`): how many records there are, how many are public, and whether they are pictures. Of a
section that is given as an object only the fields that were set are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from typing import Any

import numpy as np
from pydantic import BaseModel
from sklearn.utils import check_random_state

from fairpate.config_reader import merge
from fairpate.methods import find_method
from fairpate.methods.definition import Method
from fairpate.methods.fitted import fitted_to
from fairpate.methods.load import configured_exactly, read_of

# No odometer counts what an estimator releases, so that there is no earlier release to name.
_NO_PARAMETERS = ("method", "out", "names_earlier", "seed", "data")
_SHORT = {
    "epsilon": ("target", "epsilon"),
    "delta": ("target", "delta"),
    "model": ("student", "model"),
    "idp3": ("student", "idp3"),
    "calibration": ("public_data", "calibration"),
}
_OF_ESTIMATORS = {
    "embedding": "auto",
    "sensitive_feature": None,
    "public_X": None,
    "public_sensitive_features": None,
    "num_records": None,
    "progress": False,
    "random_state": None,
}
_FEWEST, _MOST = 1, 10**9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Public facts that settings are chosen by: the number of private records, real or declared, and of public ones."""

    num_records: int
    num_public: int


@cache
def parameters_of(method: str) -> dict[str, Any]:
    """Name and default of every parameter of a classifier of ``method``."""
    schema = find_method(method)
    own = {name: value for name, value in schema() if name not in _NO_PARAMETERS}
    short = [name for name, (section, field) in _SHORT.items() if field in type(own[section]).model_fields]
    sections = {name: None if isinstance(value, BaseModel) else value for name, value in own.items()}
    folder = {"folder": None} if schema.asks_teachers else {}
    return dict.fromkeys(short) | sections | folder | _OF_ESTIMATORS


def configuration_of(method: str, given: Mapping[str, Any], sizes: Sizes, *, seed: int) -> Method:
    """What the parameters ``given`` say. ConfigError, a ValueError, for every fault with its field."""
    schema = find_method(method)
    base = read_of(schema, fitted_to(method, count=sizes.num_records, num_public=sizes.num_public))
    values = merge(base, _said(schema, given))
    if given["embedding"] == "auto":
        values["data"] = base.get("data", {}) if sizes.num_public else {}
    else:
        values["data"] = {"embedding": plain(given["embedding"])}
    declared = values.get("dp_sgd")
    if given["num_records"] is not None and isinstance(declared, dict):
        # What the section says itself stands above.
        values["dp_sgd"] = {"num_records": plain(given["num_records"])} | declared
    return configured_exactly(values | {"seed": seed}, method=method)


def follows_from_size(method: str, given: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether the number of private records decides any setting."""
    # Each setting moves one way with the size: where both ends agree, nothing follows from it.
    ends = (Sizes(num_records=size, num_public=sizes.num_public) for size in (_FEWEST, _MOST))
    few, many = (configuration_of(method, given, end, seed=0) for end in ends)
    return few != many


def _said(schema: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: plain(given[name]) for name in given if name in schema.model_fields and given[name] is not None}
    for name, (section, field) in _SHORT.items():
        said = plain(given.get(name))
        if name not in values and said is not None and isinstance(values.get(section, {}), dict):
            values[section] = values.get(section, {}) | {field: said}
    return values


def settings_in(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is in sections and mappings, by ``section__setting``."""
    for name, value in sections.items():
        if prefix:
            yield f"{prefix}{name}", value
        if isinstance(value, dict | BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
            yield from settings_in(value if isinstance(value, dict) else vars(value), f"{prefix}{name}__")


def with_setting(section: Any, path: list[str], value: Any) -> Any:
    """``section`` with the setting at ``path``, as a mapping; it is checked where it is used."""
    if not path:
        return value
    values = plain(section)
    if isinstance(values, str):  # the short form of an architecture
        values = {"name": values}
    values = values if isinstance(values, dict) else {}
    return values | {path[0]: with_setting(values.get(path[0]), path[1:], value)}


def plain(value: Any) -> Any:
    """What is said in sections, mappings and numpy's scalars, as plain values."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def seed_of(random_state: Any) -> int:
    """The seed of a configuration. ConfigError comes later, for one that is out of range."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))
