"""Which settings of a configuration its run read, and what left the others unread.

Sections mean the same in every method. Left out are what is switched off (nothing is given), and what another setting
makes irrelevant: widths of an architecture that is not used, momentum of another optimiser, weights of unlabelled
records where none are learned from. What a method's own settings leave unread it says itself (``Method.unread``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    return _of_own_teachers(name, settings)


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


def _of_own_teachers(name: str, settings: Settings) -> str | None:
    """A model of one's own stands for architecture, fit and scale."""
    own = "teachers.model.python"
    if settings.get(own) is None or name == own:
        return None
    reads_not = name.startswith(("teachers.model.", "teachers.fit.")) or name == "teachers.standardize"
    return own if reads_not else None
