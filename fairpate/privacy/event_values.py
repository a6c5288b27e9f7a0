"""Events as plain values: how statements, receipts and the odometer hold them, and how they are read again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from fairpate.privacy import accountant, fair_training, record_votes  # noqa: F401 - registers their events
from fairpate.privacy.events import Event
from fairpate.types import Unit


def event_json(event: Event) -> dict[str, Any]:
    """An event as plain values, with its kind and noun. ValueError for one that depends on private values."""
    # What is stored ends in statements and the odometer, where votes must never get.
    if event.data_dependent:
        raise ValueError(f"{type(event).__name__} depends on private votes and is not to be stored.")
    return {"kind": type(event).__name__, "noun": event.noun, **asdict(event)}  # type: ignore[call-overload]


def event_from(values: Mapping[str, Any], unit: Unit | None = None) -> Event:
    """The event of :func:`event_json`; without a kind, as statements hold it, that of its fields and ``unit``."""
    kinds = accountant.event_kinds()
    rest = {name: _number(value) for name, value in values.items() if name not in ("kind", "noun")}
    if "kind" not in values:
        rest = {name: _not_finite(name) if value is None else value for name, value in rest.items()}
        names = set(rest)
        # Earlier events had no field for the unit that most are priced for.
        found = [kind for kind in kinds.values() if {column.name for column in fields(kind)} ^ names <= {"unit"}]
        of_unit = [kind for kind in found if unit is None or getattr(kind, "unit", unit) == unit]
        found = of_unit or [kind for kind in found if rest.get("unit") == unit]
        # A kind and its refinement look alike: the first costs at least as much.
        found = [kind for kind in found if not any(kind is not other and issubclass(kind, other) for other in found)]
        if len(found) != 1:
            raise ValueError(f"no event has the fields {sorted(names)} and unit {unit}.")
        event: Event = found[0](**rest)
        return event
    if values["kind"] not in kinds:
        raise ValueError(f"unknown event {values['kind']}; use the version that wrote it.")
    named: Event = kinds[values["kind"]](**rest)
    return named


def _number(value: Any) -> Any:
    """Infinities come as words."""
    return float(value) if value in ("inf", "-inf") else value


def _not_finite(name: str) -> float:
    """What null stands for in a statement; a threshold of 0 costs what any finite one does."""
    return 0.0 if name == "threshold" else math.inf


def merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """The same events, equal ones counted together."""
    return _events_of(_counts(events))


def covering(events: Sequence[Event], others: Sequence[Event]) -> tuple[Event, ...]:
    """Each event as often as it is in ``events`` or in ``others``, whichever has more of it."""
    return _events_of(_counts(events) | _counts(others))


def _counts(events: Sequence[Event]) -> Counter[Event]:
    counts: Counter[Event] = Counter()
    for event in events:
        count = getattr(event, "count", None)
        if isinstance(count, int):
            counts[replace(event, count=1)] += count  # type: ignore[type-var]
        else:
            counts[event] += 1
    return counts


def _events_of(counts: Counter[Event]) -> tuple[Event, ...]:
    found: list[Event] = []
    for event, count in counts.items():
        if hasattr(event, "count"):
            found.append(replace(event, count=count))  # type: ignore[type-var]
        else:
            found += [event] * count
    return tuple(found)
