"""What each feature of a declared table is computed from, in words that need no part of this package.

Only declared constants are told, which are public: a model that leaves the house carries them beside it. A feature is
one of six, which :func:`fairpate.data.declared.encode.encode` computes:

    number      (s(v) - s(low)) / (s(high) - s(low)), clipped to [0, 1]; v is ``missing`` where it is not known
    missing     1 where v is not known, else 0
    category    1 where the text is one of ``values``, else 0
    other       1 where the text is none of ``values``, else 0
    element     the number at ``place`` of the list
    band        1 where ``at_least`` <= v < ``below``, else 0; without ``below``, no end binds

with s(v) = v, or sign(v) ln(1 + |v|) for ``scale: log``. A number is not known where its text is in ``unknown``, or is
another spelling of a number in it: 9.0 or 09 where 9 is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fairpate.data.declared.columns import OTHER, Feature


@dataclass(frozen=True, kw_only=True)
class FeatureCode:
    """One feature, of one published ``column``; what does not belong to its ``kind`` is null."""

    feature: str
    column: str
    kind: str
    low: float | None = None
    high: float | None = None
    scale: str | None = None
    missing: float | None = None
    unknown: tuple[str, ...] | None = None
    values: tuple[str, ...] | None = None
    at_least: float | None = None
    below: float | None = None
    place: int | None = None

    def is_unknown(self, value: float | str) -> bool:
        """Whether a number, or its text, means a missing one."""
        unknown = self.unknown or ()
        number = _number_in(value)
        return value in unknown or (number is not None and number in map(_number_in, unknown))

    def to_json(self) -> dict[str, Any]:
        """Without what is null."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def feature_codes(features: Sequence[tuple[str, Feature]]) -> tuple[FeatureCode, ...]:
    """One per feature of these columns, in the order of :func:`fairpate.data.declared.encode.encode`."""
    return tuple(code for column, feature in features for code in _codes(column, feature))


def _codes(column: str, feature: Feature) -> Iterator[FeatureCode]:
    if feature.bounds is not None:
        return _number(column, feature)
    if feature.vector is not None:
        return _vector(column, feature.vector)
    return _bands(column, feature) if feature.bands else _category(column, feature)


def _number(column: str, feature: Feature) -> Iterator[FeatureCode]:
    assert feature.bounds is not None
    code = FeatureCode(
        feature=column,
        column=column,
        kind="number",
        low=feature.bounds[0],
        high=feature.bounds[1],
        scale=feature.scale,
    )
    if not feature.may_be_missing:
        yield code
        return
    unknown = ("", *feature.unknown)
    yield FeatureCode(**vars(code) | {"missing": feature.stands_for_missing, "unknown": unknown})
    yield FeatureCode(feature=f"{column}=missing", column=column, kind="missing", unknown=unknown)


def _number_in(value: float | str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _vector(column: str, size: int) -> Iterator[FeatureCode]:
    for place in range(size):
        yield FeatureCode(feature=f"{column}[{place}]", column=column, kind="element", place=place)


def _category(column: str, feature: Feature) -> Iterator[FeatureCode]:
    places = feature.places
    for place, name in enumerate(feature.own_categories):
        is_other = feature.other and name == OTHER
        values = tuple(value for value, found in places.items() if (found == place) != is_other)
        kind = "other" if is_other else "category"
        yield FeatureCode(feature=f"{column}={name}", column=column, kind=kind, values=values)


def _bands(column: str, feature: Feature) -> Iterator[FeatureCode]:
    for (name, start), (_, end) in itertools.pairwise([*feature.bands.items(), ("", None)]):
        yield FeatureCode(feature=f"{column}={name}", column=column, kind="band", at_least=start, below=end)
