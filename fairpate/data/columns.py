"""Columns of a declared table: kinds, bounds and categories, how each becomes numbers, and the form that asks for them.

A declaration gives the meaning of each published column: a feature, the label, or the group. It holds every bound,
category and threshold, so that none is a statistic of private records. A :class:`FeatureCode` describes how one feature
is computed, by these public constants only: a published model carries the descriptions. A :class:`RecordForm` asks a
person for one record.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fairpate.config import LARGEST, Count, Fraction, Section

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
When = dict[str, str]
OTHER = "other"
ISO_DATE = "%Y-%m-%d"


def stretched(values: Floats, scale: str | None) -> Floats:
    """Map ``values`` to the declared scale: sign(v) ln(1 + |v|) for ``log``, otherwise unchanged."""
    # Unlike ln v, this is defined at 0 and for negative amounts.
    return np.sign(values) * np.log1p(np.abs(values)) if scale == "log" else values


def several(value: Any) -> Any:
    """Make a list of a single value."""
    return (value,) if isinstance(value, (str, dict)) else value


def short_for(name: str) -> Any:
    """Return a validator for a section that reads plain text as ``{name: text}``."""
    return model_validator(mode="before")(lambda value: {name: value} if isinstance(value, str) else value)


Texts = Annotated[tuple[str, ...], BeforeValidator(several)]


class Feature(Section):
    """A published column that becomes features: one of a number, a category, or bands of a numeric code."""

    columns: Texts = Field(
        (),
        description="Columns in the file that share this declaration; empty: the column with the feature's own name.",
    )
    # Bounds and categories are declared: those found in private records would reveal that a record has them.
    bounds: tuple[Finite, Finite] | None = Field(
        None, description="Number: the values that become 0 and 1; a number beyond them is clipped to the nearer one."
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
        {}, description="Category: further values in the file, each with the one of `categories` that it means."
    )
    bands: dict[str, Finite] = Field(
        {}, description="Numeric code: name and first code of each band, one feature each; the last band is open."
    )
    vector: Count | None = Field(
        None, description="The column holds lists of this many numbers, such as embeddings; each number is a feature."
    )
    array: bool = Field(
        False, description="Vector: stored next to each file as NAME.npy, with one row for each row of the file."
    )
    missing: str | None = Field(
        None,
        description="Replacement for a missing value. Number: a public constant within the bounds, flagged by a "
        "feature `column=missing`. Category: a category, with a feature of its own. Empty: a missing value is an "
        "error, or with `unknown` the lower bound or no category.",
    )
    unknown: Texts = Field((), description="Further values in the file that mean a missing one, like an empty cell.")
    date: Literal["year", "age"] | None = Field(
        None, description="Number: the column holds dates, which count as their year, or as whole years up to `age_on`."
    )
    date_format: str = Field(ISO_DATE, description="Date: how it is written, as in %d.%m.%Y or %m/%d/%Y.")
    age_on: datetime.date | None = Field(None, description="Date: the public day on which an age is taken.")
    when: When = Field({}, description="Options and the value at which this declaration holds.")

    @property
    def may_be_missing(self) -> bool:
        """True if a missing value has a declared meaning."""
        return self.missing is not None or bool(self.unknown)

    @property
    def stands_for_missing(self) -> float:
        """The number that replaces a missing value."""
        assert self.bounds is not None
        return self.bounds[0] if self.missing is None else float(self.missing)

    @property
    def own_categories(self) -> tuple[str, ...]:
        """The categories that have a feature: the declared ones, then those for missing and for undeclared values."""
        names = (*self.categories, *([self.missing] if self.missing is not None else []), *([OTHER] * self.other))
        # Without duplicates: a missing value may count as a declared category.
        return tuple(dict.fromkeys(names))

    @property
    def places(self) -> dict[str, int]:
        """The index in `own_categories` for each value in the file. The number of categories as index means no
        category."""
        names = self.own_categories
        places = {value: place for place, value in enumerate(names) if not (self.other and value == OTHER)}
        places |= {alias: places[value] for alias, value in self.aliases.items()}
        if self.may_be_missing:
            missing = len(names) if self.missing is None else names.index(self.missing)
            # Declared categories win, because the empty text may be one.
            places = dict.fromkeys(("", *self.unknown), missing) | places
        return places

    @model_validator(mode="after")
    def _is_consistent(self) -> Feature:
        kinds = [self.bounds is not None, bool(self.categories), bool(self.bands), self.vector is not None]
        if sum(kinds) != 1:
            raise ValueError("Expected one of: bounds (a number), categories, bands (of a numeric code), vector")
        if self.array and self.vector is None:
            raise ValueError("Expected `array` only together with `vector`")
        if self.vector is not None and self.may_be_missing:
            raise ValueError("Expected no missing value of a vector; leave such rows out of the file")
        if self.bounds is not None:
            (low, high), number = self.bounds, number_in(self.missing)
            # On its scale too: logarithms of two large bounds may be one float.
            if not np.less(*stretched(np.array(self.bounds), self.scale)):
                raise ValueError(f"Expected bounds [low, high] with low < high, got [{low:g}, {high:g}]")
            if self.missing is not None and (number is None or not low <= number <= high):
                raise ValueError(
                    "missing: expected a number within the bounds, which a missing value counts as, got "
                    f"{self.missing!r}; what means a missing value in the file is `unknown`"
                )
        elif self.scale != "linear" or self.date is not None:
            raise ValueError("Expected `scale` and `date` only together with `bounds`")
        if (self.date == "age") != (self.age_on is not None):
            raise ValueError("Expected `age_on`, a public day such as 2025-12-31, with date: age and only there")
        if self.date_format != ISO_DATE and self.date is None:
            raise ValueError("Expected `date_format` only together with `date`")
        if not self.categories and (self.aliases or self.other):
            raise ValueError("Expected `aliases` and `other` only together with `categories`")
        if self.bands and (self.may_be_missing or any(not a < b for a, b in itertools.pairwise(self.bands.values()))):
            raise ValueError("Expected bands whose first codes increase, and no missing value with them")
        for alias, value in self.aliases.items():
            if value not in self.categories:
                raise ValueError(f"Expected aliases of declared categories, got {value!r} for {alias!r}")
        _require_distinct([*self.categories, *self.aliases, *self.unknown])
        if self.other and OTHER in self.categories:
            raise ValueError(f"Expected no category {OTHER!r} with other: true; rename it, or leave one out")
        return self


class NumberRange(Section):
    """A range of numbers; a missing bound means no limit on that side."""

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
        # Compared with their sides: at equal numbers, an open end (1 or -1) leaves no number in the range.
        if lower > upper:
            raise ValueError("Expected a range with a number in it")
        return self

    @property
    def bounds(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """The lower and the upper bound, each with 0 if the bound belongs to the range, else 1 or -1 for the side of
        the range."""
        lower = (-math.inf if self.at_least is None else self.at_least, 0)
        upper = (math.inf if self.at_most is None else self.at_most, 0)
        return lower if self.above is None else (self.above, 1), upper if self.below is None else (self.below, -1)

    @property
    def has_range(self) -> bool:
        """True if any bound is given."""
        return any(bound is not None for bound in (self.above, self.at_least, self.below, self.at_most))

    def holds(self, values: Floats) -> Mask:
        """True where the value is in the range; NaN never is."""
        (low, low_side), (high, high_side) = self.bounds
        return (values > low if low_side else values >= low) & (values < high if high_side else values <= high)


class Meaning(NumberRange):
    """The meaning of a class or group: one published value, or a range of numbers. Text alone is a value."""

    value: str | None = Field(None, description="The published value.")

    _from_text = short_for("value")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Meaning:
        if (self.value is None) != self.has_range:
            raise ValueError("Expected a published value, or a range of numbers: above, at_least, below, at_most")
        return self


def _named(values: Any) -> Any:
    """Return a mapping from names to lists of meanings, given a list of values or a mapping to single values."""
    if isinstance(values, (list, tuple)):
        _require_distinct([str(value) for value in values])
        return {str(value): (value,) for value in values}
    if isinstance(values, dict):
        return {name: each if isinstance(each, (list, tuple)) else (each,) for name, each in values.items()}
    return values


def _unambiguous(values: dict[str, tuple[Meaning, ...]]) -> dict[str, tuple[Meaning, ...]]:
    # One class or group cannot be compared with another.
    if len(values) < 2 or not all(values.values()):
        raise ValueError(f"Expected two names or more, each with a value or a range, got {', '.join(values)}")
    every = [meaning for each in values.values() for meaning in each]
    ranges = [meaning for meaning in every if meaning.value is None]
    if ranges and len(ranges) < len(every):
        raise ValueError("Expected values or ranges, got both")
    _require_distinct([meaning.value for meaning in every if meaning.value is not None])
    for one, other in itertools.combinations(ranges, 2):
        (low, high), (other_low, other_high) = one.bounds, other.bounds
        # With their sides: `below 5` and `at_least 5` touch and do not overlap.
        if max(low, other_low) <= min(high, other_high):
            raise ValueError("Expected ranges that do not overlap")
    return values


Meanings = Annotated[dict[str, tuple[Meaning, ...]], BeforeValidator(_named), AfterValidator(_unambiguous)]


class Coding(Section):
    """A published column as classes or groups: code k is the k-th name, in the order of the declaration."""

    column: str = Field(description="Name of the column in the file.")

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        """The published values or ranges of each name."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each code."""
        return tuple(self.meanings)


class Label(Coding):
    """The label column: the class y and, if known, the share of each class."""

    classes: Meanings = Field(
        description="Name and meaning of each class: a published value, a range of numbers (above, at_least, below, "
        "at_most), or a list of these. In a list of values without names each value is its own name."
    )
    shares: tuple[Fraction, ...] = Field(
        (), description="Approximate share of each class, if that is public, in the same order; empty: not known."
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
        return self.classes


class Group(Coding):
    """One sensitive attribute that may be chosen as the group z."""

    column: str = Field(
        description="Name of the column in the file. An entry of `groups` may leave it out: then its own name is used."
    )
    attribute: str = Field("", description="Name of the attribute in reports; empty: the name in `groups`, or column.")
    values: Meanings = Field(description="Name and meaning of each group, like `classes` of the label.")

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        return self.values


def number_in(value: float | str | None) -> float | None:
    """The finite number that ``value`` is, or that Arrow reads in its text; otherwise None."""
    try:
        # Not `float`, which also reads 1_000: a value must mean the same where its whole column is cast at once.
        number: float | None = (
            pc.cast(pa.scalar(value.strip()), pa.float64()).as_py() if isinstance(value, str) else value
        )
    except pa.ArrowInvalid:
        return None
    return float(number) if number is not None and math.isfinite(number) else None


def _require_distinct(values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"Expected each value once, got {value!r} twice")


@dataclass(frozen=True, kw_only=True)
class FeatureCode:
    """One feature, computed from one published ``column``; fields of other kinds are None.

    There are six kinds, which :func:`fairpate.data.tables.encode` computes:

    - ``number``: (s(v) - s(low)) / (s(high) - s(low)), clipped to [0, 1]; v is ``missing`` where it is not known;
    - ``missing``: 1 where v is not known, else 0;
    - ``category``: 1 where the text is one of ``values``, else 0;
    - ``other``: 1 where the text is none of ``values``, else 0;
    - ``element``: the number at ``place`` of the list;
    - ``band``: 1 where ``at_least`` <= v < ``below``, else 0; without ``below`` the band is open;

    with s(v) = v, or sign(v) ln(1 + abs(v)) for ``scale: log``. A number is not known where its text is in ``unknown``,
    or is another spelling of a number in it: 9.0 or 09 for 9.
    """

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

    def to_json(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def feature_codes(features: Sequence[tuple[str, Feature]]) -> tuple[FeatureCode, ...]:
    """The code of every feature of these columns, in the order of :func:`fairpate.data.tables.encode`."""
    return tuple(code for column, feature in features for code in _codes(column, feature))


def _codes(column: str, feature: Feature) -> Iterator[FeatureCode]:
    code = partial(FeatureCode, column=column)
    if feature.bounds is not None:
        low, high = feature.bounds
        number = partial(code, feature=column, kind="number", low=low, high=high, scale=feature.scale)
        if not feature.may_be_missing:
            yield number()
            return
        unknown = ("", *feature.unknown)
        yield number(missing=feature.stands_for_missing, unknown=unknown)
        yield code(feature=f"{column}=missing", kind="missing", unknown=unknown)
    elif feature.vector is not None:
        for place in range(feature.vector):
            yield code(feature=f"{column}[{place}]", kind="element", place=place)
    elif feature.bands:
        # A band ends where the next one begins; the last one is open.
        for (name, start), (_, end) in itertools.pairwise([*feature.bands.items(), ("", None)]):
            yield code(feature=f"{column}={name}", kind="band", at_least=start, below=end)
    else:
        places = feature.places
        for place, name in enumerate(feature.own_categories):
            is_other = feature.other and name == OTHER
            # `other` lists the values of all its siblings: it is 1 for every text that is not among them.
            values = tuple(value for value, found in places.items() if (found == place) != is_other)
            yield code(feature=f"{column}={name}", kind="other" if is_other else "category", values=values)


def even_records(codes: Sequence[FeatureCode], count: int) -> npt.NDArray[np.float32]:
    """Made-up records (count, F) with the features ``codes``, which depend on the declaration alone.

    Numbers are evenly spaced between their bounds, and one in ten is missing where it may be. The categories of a
    column, and its bands, are equally common. Columns are independent.
    """
    # A fixed seed: these records are constants of the declaration.
    draws = np.random.default_rng(0)
    features: list[Mask | Floats] = []
    for _, of_column in itertools.groupby(codes, key=lambda code: code.column):
        kinds = [code.kind for code in of_column]
        place_N = draws.permutation(count)
        if kinds[0] == "number":
            # In the middle of equal steps, so that no number is at a bound.
            features.append((place_N + 0.5) / count)
            features += [draws.permutation(count) < count / 10 for _ in kinds[1:]]
        else:
            features += [place_N % len(kinds) == place for place in range(len(kinds))]
    return np.column_stack(features).astype(np.float32)


Value = float | str | None
"""A number, the text of a category, or None if not known."""


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
    """The inputs for a record of the table with the features ``codes``: one per published column.

    The answers are encoded as the same row of a file would be, bit for bit, so that they are the same query.
    """

    codes: tuple[FeatureCode, ...]

    @property
    def fields(self) -> tuple[RecordField, ...]:
        """One field per column, in order."""
        found = []
        for column, codes in self._columns:
            first, last = codes[0], codes[-1]
            if first.kind == "number":
                bounds: dict[str, Any] = {"low": first.low, "high": first.high}
                found.append(RecordField(name=column, is_optional=first.missing is not None, **bounds))
            elif first.kind == "band":
                # The last band is open: the form suggests no number above its start.
                found.append(RecordField(name=column, low=first.at_least, high=last.at_least))
            else:
                values = [value for code in codes if code.kind == "category" for value in code.values or ()]
                found.append(
                    RecordField(
                        name=column,
                        choices=tuple(value for value in values if value),
                        is_optional="" in values,
                        takes_other=last.kind == "other",
                    )
                )
        return tuple(found)

    def encode(self, values: Mapping[str, Value]) -> npt.NDArray[np.float32]:
        """The features (F,) of a record. ValueError names a column without a value, or with an undeclared one."""
        features: list[float] = []
        for column, codes in self._columns:
            first, value = codes[0], values.get(column)
            if first.kind not in ("number", "band"):
                text = "" if value is None else str(value)
                is_declared = any(text in (code.values or ()) for code in codes)
                if not is_declared and (codes[-1].kind != "other" or not text):
                    raise ValueError(f"{column}: expected one of its categories, got {text!r}")
                # `other` holds the values of all other features of the column: it is 1 where the text is none of them.
                features += [(text in (code.values or ())) != (code.kind == "other") for code in codes]
                continue
            number, unknown = number_in(value), first.unknown or ()
            if value in unknown or (number is not None and number in map(number_in, unknown)):
                number = None
            elif value is not None and number is None:
                raise ValueError(f"{column}: expected a number, got {value!r}")
            if first.kind == "band":
                if number is None or number < (first.at_least or 0):
                    raise ValueError(f"{column}: expected a number from {first.at_least:g} on, got {number}")
                # Bands ascend, so that the last one whose start is reached holds the number.
                place = sum(number >= (code.at_least or 0) for code in codes) - 1
                features += [place == each for each in range(len(codes))]
                continue
            if number is None and first.missing is None:
                raise ValueError(f"{column}: expected a number, got none")
            # The same operations as for a file, so that a typed record has the bits of the same row there.
            given = np.array([first.low, first.high, first.missing if number is None else number], dtype=np.float64)
            low, high, scaled = stretched(given, first.scale)
            features.append(np.clip((scaled - low) / (high - low), 0, 1))
            features += [] if first.missing is None else [number is None]
        return np.array(features, dtype=np.float32)

    @property
    def _columns(self) -> Iterator[tuple[str, list[FeatureCode]]]:
        for column, codes in itertools.groupby(self.codes, key=lambda code: code.column):
            yield column, list(codes)


def form_of(codes: Sequence[FeatureCode]) -> RecordForm | None:
    """The form for records with these features; None without features, or if a column holds vectors, which nobody can
    type."""
    if not codes or any(code.kind == "element" for code in codes):
        return None
    return RecordForm(codes=tuple(codes))
