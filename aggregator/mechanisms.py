"""The mechanisms there are, by the name that ledgers store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from aggregator.gnmax import ConfidentGnmax
from aggregator.mechanism import Mechanism
from aggregator.neighbours import NearestCounts, NearestRecords
from aggregator.noisy_counts import ConfidentCounts
from fairpate.types import MechanismParameters, ReleaseKind

KindT = TypeVar("KindT", bound=type[Mechanism])
_KINDS: dict[str, type[Mechanism]] = {}


def register(kind: KindT) -> KindT:
    """Make a mechanism known by its name; also as a decorator. ValueError for a name that another one has."""
    # A ledger knows its mechanism by this name: another class under it would price the same entries otherwise.
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"{kind.name}: names another mechanism already; give {kind.__qualname__} a name of its own.")
    return kind


def mechanism_named(name: str, parameters: Mapping[str, Any]) -> Mechanism:
    """The mechanism of this name with these parameters. ValueError for an unknown name or parameters it has not."""
    if name not in _KINDS:
        raise ValueError(f"unknown mechanism {name!r}, known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"mechanism {name}: {error}") from error


def mechanism_of(parameters: MechanismParameters, release: ReleaseKind = "label") -> Mechanism:
    """The mechanism that a configuration's parameters are of, and that releases what it asks for."""
    kinds = [kind for kind in _KINDS.values() if issubclass(kind, type(parameters))]
    (kind,) = (kind for kind in kinds if kind.releases == release)
    return kind(**vars(parameters))


register(ConfidentGnmax)
register(ConfidentCounts)
register(NearestRecords)
register(NearestCounts)
