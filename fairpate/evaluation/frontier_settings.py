"""Which settings of a configuration its run read: what the details of a point list.

Sections mean the same in every method. Left out are what is switched off (nothing is given), and what another setting
of the same section makes irrelevant: widths of an architecture that is not used, momentum of another optimiser, weights
of unlabelled records where none are learned from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]
_UNREAD_BY_LEARNING: Mapping[Any, tuple[str, ...]] = {
    "supervised": ("confidence", "unlabelled_weight", "unlabelled_ratio", "rounds", "strong_augment"),
    "fixmatch": ("rounds",),
    "pseudo_label": ("unlabelled_ratio", "strong_augment"),
}


def settings_read(settings: Settings) -> dict[str, Any]:
    """Those of dotted names that were read."""
    return {name: value for name, value in settings.items() if not _is_unread(name, value, settings)}


def shared_settings(of_points: Sequence[Settings]) -> dict[str, Any]:
    """Settings that all have in common."""
    first, *others = of_points
    return {name: first[name] for name in first if all(name in o and o[name] == first[name] for o in others)}


def _is_unread(name: str, value: Any, settings: Settings) -> bool:
    section, _, field = name.rpartition(".")
    return (
        value is None
        or value == {}
        or ("augment." in name and not value)
        or (section.endswith("model") and _is_of_another_architecture(section, field, settings))
        or (field == "momentum" and settings.get(f"{section}.optimizer", "sgd") != "sgd")
        or _is_of_unlabelled_records(name, settings)
        or _is_of_other_teachers(name, settings)
    )


def _is_of_another_architecture(section: str, field: str, settings: Settings) -> bool:
    architecture = settings.get(f"{section}.name")
    has_weights = any(other.startswith(f"{section}.weights.") for other in settings)
    return (
        (field == "hidden" and architecture != "mlp")
        or (field == "width" and architecture != "cnn")
        or (field == "dropout" and architecture in ("logistic", "hog_logistic"))
        or (field in ("norm", "trainable") and not has_weights)
    )


def _is_of_unlabelled_records(name: str, settings: Settings) -> bool:
    section, _, field = name.partition(".")
    unread = _UNREAD_BY_LEARNING.get(settings.get("student.method"), ())
    return section == "student" and field.partition(".")[0] in unread


def _is_of_other_teachers(name: str, settings: Settings) -> bool:
    """A model of one's own stands for architecture, fit and scale."""
    if settings.get("teachers.model.python") is None or name == "teachers.model.python":
        return False
    return name.startswith(("teachers.model.", "teachers.fit.")) or name == "teachers.standardize"
