"""Every data set the project knows, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fairpate.data import (
    acs,
    adult,
    bank,
    celeba,
    chexpert,
    color_digits,
    color_mnist,
    communities,
    compas,
    credit_default,
    fairface,
    folktables,
    heart,
    parkinsons,
    retired_adult,
    utkface,
)
from fairpate.data.entry import DatasetEntry, DataSettingsError
from fairpate.names import nearest

_MODULES = (
    color_digits,
    color_mnist,
    utkface,
    fairface,
    celeba,
    chexpert,
    adult,
    retired_adult,
    acs,
    folktables,
    credit_default,
    bank,
    compas,
    parkinsons,
    communities,
    heart,
)
REGISTRY: Mapping[str, DatasetEntry] = MappingProxyType({module.ENTRY.name: module.ENTRY for module in _MODULES})


def option_showing_attribute(name: str, options: Mapping[str, Any]) -> str | None:
    """The option of data set ``name`` that makes the sensitive attribute a feature; None where none does.

    What else may be wrong with the name or the options is not this function's to say.
    """
    known = REGISTRY[name].options if name in REGISTRY else {}
    for option, choice in known.items():
        if choice.shows_attribute is not None and options.get(option, choice.default) == choice.shows_attribute:
            return option
    return None


def find_entry(name: str) -> DatasetEntry:
    """The entry called ``name``; :class:`DataError` with the nearest known name."""
    if name not in REGISTRY:
        raise DataSettingsError(f"data.name: unknown data set {name!r}{nearest(name, REGISTRY)}.")
    return REGISTRY[name]
