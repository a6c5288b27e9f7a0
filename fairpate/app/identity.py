"""What a configuration computes, whatever the places where that happens: its values, their digest, a folder's name."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairpate.config import EvaluationConfig

if TYPE_CHECKING:
    from fairpate.methods.definition import Method

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


def config_digest(config: Method) -> str:
    """Twelve hexadecimal digits that identify what ``config`` computes, wherever and on however many CPUs."""
    return values_digest(determining_values(config))


def determining_values(config: Method) -> dict[str, Any]:
    """What ``config`` computes, as plain values: without the places where it happens, and what it does not read."""
    return determining(config.model_dump(mode="json"), config)


def determining(values: dict[str, Any], config: Method) -> dict[str, Any]:
    """``values`` of the method of ``config`` without what decides nothing there."""
    kept = _without(values, (*_PLACES, *config.unread))
    # At its default it is left out: digests of runs from before it could be set stay.
    if kept.get("evaluation") == EvaluationConfig().model_dump():
        del kept["evaluation"]
    return kept


def placeless_values(config: Method) -> dict[str, Any]:
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


def default_folder(config: Method) -> Path:
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
