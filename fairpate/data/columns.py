"""Columns of a declared table: kinds, bounds and categories, how each becomes numbers, and the form that asks for them.

What a published column means: a feature, the label, or the group, by declared public constants only.

Every bound, category and threshold stands in the declaration, so that none is a statistic of private records.

What each feature of a declared table is computed from, in words that need no part of this package.

Only declared constants are told, which are public: a model that leaves the house carries them beside it. A feature is
one of six, which :func:`fairpate.data.tables.encode` computes:

    number      (s(v) - s(low)) / (s(high) - s(low)), clipped to [0, 1]; v is ``missing`` where it is not known
    missing     1 where v is not known, else 0
    category    1 where the text is one of ``values``, else 0
    other       1 where the text is none of ``values``, else 0
    element     the number at ``place`` of the list
    band        1 where ``at_least`` <= v < ``below``, else 0; without ``below``, no end binds

with s(v) = v, or sign(v) ln(1 + |v|) for ``scale: log``. A number is not known where its text is in ``unknown``, or is
another spelling of a number in it: 9.0 or 09 where 9 is.

One record from what a person types into a form: the inputs of a declared table, and its features again.

The inputs follow from :class:`.feature_codes.FeatureCode`, one per published column, and so does the encoding: what a
form says is encoded as the same row of a file would be, bit for bit, so that it is the same query.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fairpate.config import LARGEST, Count, Fraction, Section

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
When = dict[str, str]
OTHER = "other"


def several(value: Any) -> Any:
    """One value stands for a list of one."""
    return (value,) if isinstance(value, (str, dict)) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(several)]


class Feature(Section):
    """A published column that becomes features: one of a number, a category, or bands of a numeric code."""

    columns: Texts = Field((), description="Its columns in the file, all declared alike; empty: its name is the one.")
    bounds: tuple[Finite, Finite] | None = Field(
        None, description="Number: what becomes 0, and what becomes 1; a number beyond is clipped to the nearer."
    )
    scale: Literal["linear", "log"] = Field(
        "linear", description="Number: `log` first takes sign(v) ln(1 + abs(v)), for amounts."
    )
    categories: tuple[str, ...] = Field((), description="Category: the values in the file, one feature each.")
    other: bool = Field(
        False,
        description="Category: whether a value that is not declared has a feature `column=other`; without, it is an "
        "error.",
    )
    aliases: dict[str, str] = Field(
        {}, description="Category: further values in the file, and which of `categories` is meant."
    )
    bands: dict[str, Finite] = Field(
        {}, description="Numeric code: name and first code of each band, one feature each; the last band is open."
    )
    vector: Count | None = Field(
        None, description="List of so many numbers, such as an embedding: a feature each, as they are."
    )
    array: bool = Field(
        False, description="Vector: it lies beside each file, as NAME.npy with a row for each of its rows."
    )
    missing: str | None = Field(
        None,
        description="What a missing value counts as. Number: a public constant within the bounds; a feature "
        "`column=missing` says so. Category: a category, with a feature of its own. Empty: a missing value is an "
        "error, or with `unknown` the lower bound or no category.",
    )
    unknown: Texts = Field((), description="What else in the file means a missing value, beside an empty cell.")
    when: When = Field({}, description="Options and the value at which this declaration holds.")

    @property
    def may_be_missing(self) -> bool:
        """Whether a missing value has a meaning."""
        return self.missing is not None or bool(self.unknown)

    @property
    def stands_for_missing(self) -> float:
        """The number that a missing one counts as."""
        assert self.bounds is not None
        return self.bounds[0] if self.missing is None else float(self.missing)

    @property
    def own_categories(self) -> tuple[str, ...]:
        """All that have a feature: as declared, then what a missing and an undeclared value count as."""
        names = (*self.categories, *([self.missing] if self.missing is not None else []), *([OTHER] * self.other))
        # Once each: a missing value may count as a declared category.
        return tuple(dict.fromkeys(names))

    @property
    def places(self) -> dict[str, int]:
        """Category: which of `own_categories` a value in the file is; as many as there are stands for none of them."""
        names = self.own_categories
        places = {value: place for place, value in enumerate(names) if not (self.other and value == OTHER)}
        places |= {alias: places[value] for alias, value in self.aliases.items()}
        if self.may_be_missing:
            missing = len(names) if self.missing is None else names.index(self.missing)
            # A declared category stands above, as the empty text may be one.
            places = dict.fromkeys(("", *self.unknown), missing) | places
        return places

    def stretched(self, values: Floats) -> Floats:
        """On the scale that is linear between the bounds."""
        return np.sign(values) * np.log1p(np.abs(values)) if self.scale == "log" else values

    @model_validator(mode="after")
    def _is_one_kind(self) -> Feature:
        kinds = [self.bounds is not None, bool(self.categories), bool(self.bands), self.vector is not None]
        if sum(kinds) != 1:
            raise ValueError("Expected one of: bounds (a number), categories, bands (of a numeric code), vector")
        if self.array and self.vector is None:
            raise ValueError("Expected array with vector only")
        if self.vector is not None and self.may_be_missing:
            raise ValueError("Expected no missing value of a vector; leave such rows out of the file")
        if self.bounds is not None:
            low, high = self.stretched(np.array(self.bounds))
            if not low < high:
                raise ValueError(f"Expected bounds [low, high] with low < high, got {_listed(self.bounds)}")
        elif self.scale != "linear":
            raise ValueError("Expected scale with bounds only")
        if not self.categories and (self.aliases or self.other):
            raise ValueError("Expected aliases and other with categories only")
        if self.bands and (self.may_be_missing or any(not a < b for a, b in itertools.pairwise(self.bands.values()))):
            raise ValueError("Expected bands whose first codes increase, and no missing value with them")
        return self

    @model_validator(mode="after")
    def _missing_is_a_constant(self) -> Feature:
        if self.bounds is None or self.missing is None:
            return self
        low, high = self.bounds
        if not _is_number(self.missing) or not low <= float(self.missing) <= high:
            raise ValueError(
                f"missing: expected a number within the bounds, which a missing value counts as, got {self.missing!r}; "
                "what means a missing value in the file is `unknown`"
            )
        return self

    @model_validator(mode="after")
    def _values_are_told_apart(self) -> Feature:
        for alias, value in self.aliases.items():
            if value not in self.categories:
                raise ValueError(f"Expected aliases of declared categories, got {value!r} for {alias!r}")
        _require_distinct([*self.categories, *self.aliases, *self.unknown])
        if self.other and OTHER in self.categories:
            raise ValueError(f"Expected no category {OTHER!r} with other: true; rename it, or leave one out")
        return self


class NumberRange(Section):
    """A range of numbers; a bound that is left out does not bind."""

    above: Finite | None = Field(None, description="value > above")
    at_least: Finite | None = Field(None, description="value >= at_least")
    below: Finite | None = Field(None, description="value < below")
    at_most: Finite | None = Field(None, description="value <= at_most")

    @model_validator(mode="after")
    def _holds_a_number(self) -> NumberRange:
        for one, other in (("above", "at_least"), ("below", "at_most")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(f"Expected {one} or {other}, got both")
        lower, upper = self.bounds
        if lower > upper:
            raise ValueError("Expected a range with a number in it")
        return self

    @property
    def bounds(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Lower and upper end, each with 0 where it is in the range, else with the side on which the range lies."""
        lower = (-math.inf if self.at_least is None else self.at_least, 0)
        upper = (math.inf if self.at_most is None else self.at_most, 0)
        return lower if self.above is None else (self.above, 1), upper if self.below is None else (self.below, -1)

    @property
    def has_range(self) -> bool:
        """Whether there is any bound."""
        return any(bound is not None for bound in (self.above, self.at_least, self.below, self.at_most))

    def holds(self, values: Floats) -> Mask:
        """Where the value is in the range; never where it is nan."""
        (low, low_side), (high, high_side) = self.bounds
        return (values > low if low_side else values >= low) & (values < high if high_side else values <= high)


class Meaning(NumberRange):
    """What a class or group stands for: one published value, or a range of numbers. Text alone is a value."""

    value: str | None = Field(None, description="The published value.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Meaning:
        if (self.value is None) != self.has_range:
            raise ValueError("Expected a published value, or a range of numbers: above, at_least, below, at_most")
        return self


def _named(values: Any) -> Any:
    """Name and meanings, where values stand without names or without a list."""
    if isinstance(values, (list, tuple)):
        _require_distinct([str(value) for value in values])
        return {str(value): (value,) for value in values}
    if isinstance(values, dict):
        return {name: each if isinstance(each, (list, tuple)) else (each,) for name, each in values.items()}
    return values


def _unambiguous(values: dict[str, tuple[Meaning, ...]]) -> dict[str, tuple[Meaning, ...]]:
    if len(values) < 2 or not all(values.values()):
        raise ValueError(f"Expected two names or more, each with a value or a range, got {', '.join(values)}")
    every = [meaning for each in values.values() for meaning in each]
    ranges = [meaning for meaning in every if meaning.value is None]
    if ranges and len(ranges) < len(every):
        raise ValueError("Expected values or ranges, got both")
    _require_distinct([meaning.value for meaning in every if meaning.value is not None])
    for one, other in itertools.combinations(ranges, 2):
        (low, high), (other_low, other_high) = one.bounds, other.bounds
        if max(low, other_low) <= min(high, other_high):
            raise ValueError("Expected ranges that do not overlap")
    return values


Meanings = Annotated[dict[str, tuple[Meaning, ...]], BeforeValidator(_named), AfterValidator(_unambiguous)]


class Coding(Section):
    """A published column as classes or groups: code k is the k-th name, in the order of the declaration."""

    column: str = Field(description="Its name in the file.")

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        """What each name stands for."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each code."""
        return tuple(self.meanings)


class Label(Coding):
    """The class y."""

    classes: Meanings = Field(
        description="Name, and what it stands for: a published value, a range of numbers (above, at_least, below, "
        "at_most), or a list of them. A list of values without names: each is its own."
    )
    shares: tuple[Fraction, ...] = Field(
        (), description="How common each class is about, as far as that is public, in their order; empty: not known."
    )

    @model_validator(mode="after")
    def _has_a_share_for_each_class(self) -> Label:
        if self.shares and (len(self.shares) != len(self.classes) or abs(sum(self.shares) - 1) > 0.01):
            raise ValueError(
                f"shares: expected one for each of {len(self.classes)} classes and a sum of 1, got "
                f"{', '.join(f'{share:g}' for share in self.shares)}"
            )
        return self

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        """The classes."""
        return self.classes


class Group(Coding):
    """One sensitive attribute that the group z may be."""

    column: str = Field(description="Its name in the file; in `groups` empty: the name that it has there.")
    attribute: str = Field("", description="What it is called; empty: its name in `groups`, or its column.")
    values: Meanings = Field(description="As `classes` of the label: name, and what it stands for.")

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        """The groups."""
        return self.values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _listed(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


def _require_distinct(values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"Expected each value once, got {value!r} twice")


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
    """One per feature of these columns, in the order of :func:`fairpate.data.tables.encode`."""
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


Value = float | str | None
"""A number, the text of a category, or None: not known."""


@dataclass(frozen=True, kw_only=True)
class RecordField:
    """One input: a number between ``low`` and ``high`` (beyond them it is clipped), or one of ``choices``.

    ``is_optional``: a value may be missing; ``takes_other``: any other text has a meaning too.
    """

    name: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    is_optional: bool = False
    takes_other: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordForm:
    """The inputs of a table whose features ``codes`` describe."""

    codes: tuple[FeatureCode, ...]

    @property
    def fields(self) -> tuple[RecordField, ...]:
        """One per column, in order."""
        return tuple(_field(column, codes) for column, codes in self._columns.items())

    def encode(self, values: Mapping[str, Value]) -> npt.NDArray[np.float32]:
        """The features (F,) of a record. ValueError names a column without a value, or with one that means nothing."""
        return np.concatenate([_encoded(column, codes, values.get(column)) for column, codes in self._columns.items()])

    @property
    def _columns(self) -> dict[str, list[FeatureCode]]:
        return {column: list(codes) for column, codes in itertools.groupby(self.codes, key=lambda code: code.column)}


def form_of(codes: Sequence[FeatureCode]) -> RecordForm | None:
    """The form of these features; None where there are none, or a person cannot type them: lists of numbers."""
    if not codes or any(code.kind == "element" for code in codes):
        return None
    return RecordForm(codes=tuple(codes))


def _field(column: str, codes: Sequence[FeatureCode]) -> RecordField:
    first = codes[0]
    if first.kind == "number":
        return RecordField(name=column, low=first.low, high=first.high, is_optional=first.missing is not None)
    if first.kind == "band":
        return RecordField(name=column, low=first.at_least, high=codes[-1].at_least)
    values = [value for code in codes if code.kind == "category" for value in code.values or ()]
    return RecordField(
        name=column,
        choices=tuple(value for value in values if value),
        is_optional="" in values,
        takes_other=codes[-1].kind == "other",
    )


def _encoded(column: str, codes: Sequence[FeatureCode], value: Value) -> npt.NDArray[np.float32]:
    first = codes[0]
    if first.kind in ("number", "band"):
        number = None if value is None or first.is_unknown(value) else _number_field(column, value)
        features = _of_number(column, first, number) if first.kind == "number" else _of_band(column, codes, number)
        return np.array(features, dtype=np.float32)
    text = "" if value is None else str(value)
    row = [(text in (code.values or ())) != (code.kind == "other") for code in codes]
    is_declared = any(text in (code.values or ()) for code in codes)
    if not is_declared and (codes[-1].kind != "other" or not text):
        raise ValueError(f"{column}: expected one of its categories, got {text!r}")
    return np.array(row, dtype=np.float32)


def _of_number(column: str, code: FeatureCode, number: float | None) -> list[float]:
    assert code.low is not None
    assert code.high is not None
    if number is None and code.missing is None:
        raise ValueError(f"{column}: expected a number, got none")
    low, high = _stretched(code.low, code.scale), _stretched(code.high, code.scale)
    place = _stretched(code.missing if number is None else number, code.scale)
    scaled = float(np.clip((place - low) / (high - low), 0, 1))
    return [scaled] if code.missing is None else [scaled, float(number is None)]


def _of_band(column: str, codes: Sequence[FeatureCode], number: float | None) -> list[float]:
    if number is None or number < (codes[0].at_least or 0):
        raise ValueError(f"{column}: expected a number from {codes[0].at_least:g} on, got {number}")
    place = sum(number >= (code.at_least or 0) for code in codes) - 1
    return [float(place == each) for each in range(len(codes))]


def _number_field(column: str, value: float | str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{column}: expected a number, got {value!r}")
    return number


def _stretched(value: float | None, scale: str | None) -> np.float64:
    # The same operations as in `encode`, so that the bits agree.
    number = np.float64(value)
    return np.sign(number) * np.log1p(np.abs(number)) if scale == "log" else number
