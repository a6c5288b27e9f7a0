"""Columns of declared tables: what each published value means.

A declaration gives the meaning of each published column: a feature, the label, or the group. It contains every bound,
category and threshold, so that none is a statistic of private records. A :class:`FeatureCode` describes how one feature
is computed from these public constants (:mod:`fairpate.data.tables` computes it).
"""

from __future__ import annotations

import datetime
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fairpate.config import CODE_NAME, LARGEST, Count, Fraction, Refused, Section, short_for
from fairpate.data import word_vectors
from fairpate.data.dates import ISO_DATE, is_date_format, is_short
from fairpate.types import FloatArray

Mask = npt.NDArray[np.bool_]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
When = dict[str, str]
OTHER = "other"


def stretched(values: FloatArray, scale: str | None) -> FloatArray:
    """Return ``values`` on the declared scale: sign(v) ln(1 + |v|) of each value v for ``log``, otherwise v itself."""
    # Unlike ln v, this is defined at 0 and for negative amounts.
    return np.sign(values) * np.log1p(np.abs(values)) if scale == "log" else values


def several(value: Any) -> Any:
    """Return a text or a dictionary as a tuple with one item; return any other value, such as a list, unchanged."""
    return (value,) if isinstance(value, (str, dict)) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(several)]
Value = bool | int | float | str | None
"""One value of a record: a number, a truth value, the text of a category, or None if unknown."""


class Feature(Section):
    """The declaration of a published column that becomes features: one feature for a number; several for categories,
    for intervals of a code (bands), or for a vector."""

    columns: Texts = Field(
        (), description="Columns in the file that share this declaration; empty: the one with the feature's own name."
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
        description="Category: whether undeclared values have a feature `column=other`; without, they are errors.",
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
    text: Count | None = Field(
        None,
        description="The column holds text: its n-grams are hashed to this many numbers, each a feature; 2048 suits "
        "short texts.",
    )
    ngrams: str = Field(
        "words",
        pattern=rf"^(words|characters|{word_vectors.NAME}|{CODE_NAME.pattern})$",
        description="Text: `words` (single ones and pairs), `characters` (3 to 5 within words, for typing errors and "
        "languages that inflect), or instead of n-grams `glove`, the mean of public vectors of English words (50 "
        "numbers), or `module:function` of a text to a vector of this length, code that runs with "
        "FAIRPATE_ALLOW_CODE=1 only.",
    )
    missing: str | None = Field(
        None,
        description="Replacement for a missing value. Number: a public constant within the bounds, flagged by a "
        "feature `column=missing`. Category: a category, with a feature of its own. Empty: a missing value is an "
        "error; if `unknown` is given, it becomes the lower bound, or no category.",
    )
    unknown: Texts = Field((), description="Further values in the file that mean a missing one, like an empty cell.")
    date: Literal["year", "age"] | None = Field(
        None, description="Number: the column has dates, which become their year, or the years from them to `age_on`."
    )
    date_format: str = Field(
        ISO_DATE,
        description="Date: how text writes it, as in %d.%m.%Y or %m/%d/%Y; columns with a date type need none. A year "
        "of two digits (%y) is the last one before `age_on`, or the one within `bounds`.",
    )
    age_on: datetime.date | None = Field(None, description="Date: the public day on which an age is taken.")
    when: When = Field({}, description="Options with the values for which this declaration applies.")

    @property
    def may_be_missing(self) -> bool:
        """True if the declaration says what a missing value of this column means."""
        return self.missing is not None or bool(self.unknown)

    @property
    def stands_for_missing(self) -> float:
        """The number that replaces a missing value of this column."""
        assert self.bounds is not None
        return self.bounds[0] if self.missing is None else float(self.missing)

    @property
    def own_categories(self) -> tuple[str, ...]:
        """The categories that have a feature each: the declared ones, then one for missing and one for undeclared
        values, if such values may occur."""
        names = (*self.categories, *([self.missing] if self.missing is not None else []), *([OTHER] * self.other))
        # Without duplicates: a missing value may be replaced by a declared category.
        return tuple(dict.fromkeys(names))

    @property
    def places(self) -> dict[str, int]:
        """A mapping from each value that the file may contain to the index of its category in `own_categories`; the
        index after the last one means that the value has no category."""
        names = self.own_categories
        places = {value: place for place, value in enumerate(names) if not (self.other and value == OTHER)}
        places |= {alias: places[value] for alias, value in self.aliases.items()}
        if self.may_be_missing:
            missing = len(names) if self.missing is None else names.index(self.missing)
            # Declared categories take precedence, because the empty text may be one.
            places = dict.fromkeys(("", *self.unknown), missing) | places
        return places

    refused: ClassVar[Refused] = {
        "Expected one of: bounds (a number), categories, bands (of a numeric code), vector, text": lambda feature: (
            sum(map(bool, (feature.bounds, feature.categories, feature.bands, feature.vector, feature.text))) != 1
        ),
        "Expected `ngrams` only together with `text`": lambda feature: (
            feature.ngrams != "words" and feature.text is None
        ),
        f"Expected `text: {word_vectors.SIZE}` with `ngrams: {word_vectors.NAME}`, got {{0.text}}": lambda feature: (
            feature.ngrams == word_vectors.NAME and feature.text not in (None, word_vectors.SIZE)
        ),
        "Expected no missing value of a text: an empty cell is a text without words": lambda feature: (
            feature.text is not None and feature.may_be_missing
        ),
        "Expected `array` only together with `vector`": lambda feature: feature.array and feature.vector is None,
        "Expected no missing value of a vector; leave such rows out of the file": lambda feature: (
            feature.vector is not None and feature.may_be_missing
        ),
        "Expected `scale` and `date` only together with `bounds`": lambda feature: (
            feature.bounds is None and (feature.scale != "linear" or feature.date is not None)
        ),
        "Expected `age_on`, a public day such as 2025-12-31, with date: age and only there": lambda feature: (
            (feature.date == "age") != (feature.age_on is not None)
        ),
        "Expected `date_format` only together with `date`": lambda feature: (
            feature.date_format != ISO_DATE and feature.date is None
        ),
        "Expected `date_format` with the year, and for an age with the month, such as %d.%m.%Y, got {0.date_format!r}; "
        "%d and %m also read one digit": lambda feature: (
            feature.date is not None and not is_date_format(feature.date_format, needs_month=feature.date == "age")
        ),
        "Expected bounds of less than 100 years with the two digits of %y, got {0.bounds}": lambda feature: (
            feature.date == "year"
            and feature.bounds is not None
            and feature.bounds[1] - feature.bounds[0] >= 100
            and is_short(feature.date_format)
        ),
        "Expected `aliases` and `other` only together with `categories`": lambda feature: (
            not feature.categories and (feature.aliases or feature.other)
        ),
        "Expected bands whose first codes increase, and no missing value with them": lambda feature: (
            feature.bands
            and (feature.may_be_missing or any(not a < b for a, b in itertools.pairwise(feature.bands.values())))
        ),
        f"Expected no category {OTHER!r} with other: true; rename it, or leave one out": lambda feature: (
            feature.other and OTHER in feature.categories
        ),
    }

    @model_validator(mode="after")
    def _replaces_missing_values(self) -> Feature:
        if self.bounds is not None:
            (low, high), number = self.bounds, number_in(self.missing)
            # After scaling too: logarithms of two large bounds may be one float.
            if not np.less(*stretched(np.array(self.bounds), self.scale)):
                raise ValueError(f"Expected bounds [low, high] with low < high, got [{low:g}, {high:g}]; correct them")
            if self.missing is not None and (number is None or not low <= number <= high):
                raise ValueError(
                    "missing: expected a number within the bounds, which replaces missing values, got "
                    f"{self.missing!r}; list values of the file that mark a missing one in `unknown`"
                )
        for alias, value in self.aliases.items():
            if value not in self.categories:
                raise ValueError(
                    f"Expected aliases of declared categories, got {value!r} for {alias!r}; add this category to "
                    "`categories`"
                )
        _require_distinct([*self.categories, *self.aliases, *self.unknown])
        return self


class NumberRange(Section):
    """A range of numbers; a missing bound means no limit on that side."""

    above: Finite | None = Field(None, description="value > above")
    at_least: Finite | None = Field(None, description="value >= at_least")
    below: Finite | None = Field(None, description="value < below")
    at_most: Finite | None = Field(None, description="value <= at_most")

    refused: ClassVar[Refused] = {
        "Expected above or at_least, got both": lambda each: None not in (each.above, each.at_least),
        "Expected below or at_most, got both": lambda each: None not in (each.below, each.at_most),
        # Compared with their sides: at equal numbers, an open end (1 or -1) leaves no number in the range.
        "Expected a range with a number in it": lambda each: each.bounds[0] > each.bounds[1],
    }

    @property
    def bounds(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """The lower and the upper bound, each as a pair that can be compared with pairs of other ranges: the bound and
        0 if the bound belongs to the range; otherwise the bound and 1 (lower) or -1 (upper).
        """
        lower = (-math.inf if self.at_least is None else self.at_least, 0)
        upper = (math.inf if self.at_most is None else self.at_most, 0)
        return lower if self.above is None else (self.above, 1), upper if self.below is None else (self.below, -1)

    @property
    def has_range(self) -> bool:
        """True if any bound is given."""
        return any(bound is not None for bound in (self.above, self.at_least, self.below, self.at_most))

    def holds(self, values: FloatArray) -> Mask:
        """Return for each value whether it is in this range; NaN is in no range."""
        (low, low_side), (high, high_side) = self.bounds
        return (values > low if low_side else values >= low) & (values < high if high_side else values <= high)


class Meaning(NumberRange):
    """The published values that mean one class or group: a single value, or a range of numbers. In YAML, a text is
    short for `{value: TEXT}`."""

    value: str | None = Field(None, description="The published value.")

    _from_text = short_for("value")

    refused: ClassVar[Refused] = {
        "Expected a published value, or a range of numbers: above, at_least, below, at_most": lambda meaning: (
            (meaning.value is None) != meaning.has_range
        )
    }


def _named(values: Any) -> Any:
    """Return a mapping from the name of each class or group to a tuple of the published values that mean it. If
    ``values`` is a list, every value is its own name; if it is a mapping, a single value becomes a tuple."""
    if isinstance(values, (list, tuple)):
        _require_distinct([str(value) for value in values])
        return {str(value): (value,) for value in values}
    if isinstance(values, dict):
        return {name: each if isinstance(each, (list, tuple)) else (each,) for name, each in values.items()}
    return values


def _unambiguous(values: dict[str, tuple[Meaning, ...]]) -> dict[str, tuple[Meaning, ...]]:
    # With fewer than two classes or groups there is nothing to compare.
    if len(values) < 2 or not all(values.values()):
        raise ValueError(
            "Expected two names or more, each with a value or a range that means this class or group, got "
            f"{', '.join(values)}; add what is missing"
        )
    every = [meaning for each in values.values() for meaning in each]
    ranges = [meaning for meaning in every if meaning.value is None]
    if ranges and len(ranges) < len(every):
        raise ValueError("Expected values or ranges, got both; give every class or group a value, or every one a range")
    _require_distinct([meaning.value for meaning in every if meaning.value is not None])
    for one, other in itertools.combinations(ranges, 2):
        (low, high), (other_low, other_high) = one.bounds, other.bounds
        # Compared with the sides of their bounds: `below 5` and `at_least 5` touch and do not overlap.
        if max(low, other_low) <= min(high, other_high):
            raise ValueError("Expected ranges that do not overlap, got two that do; correct their ends")
    return values


Meanings = Annotated[dict[str, tuple[Meaning, ...]], BeforeValidator(_named), AfterValidator(_unambiguous)]


class Coding(Section):
    """A published column whose values are classes or groups: code k is the k-th name in the declaration."""

    column: str = Field(description="Name of the column in the file.")
    meant_by: ClassVar[str]
    """The name of the field that declares which published values or ranges mean each class or group."""

    @property
    def meanings(self) -> dict[str, tuple[Meaning, ...]]:
        """A mapping from the name of each class or group to the published values or ranges that mean it."""
        return getattr(self, self.meant_by)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes or groups, in the order of their codes."""
        return tuple(self.meanings)


class Label(Coding):
    """The label column: its values are the classes y, and the population share of each class may be declared."""

    meant_by = "classes"

    classes: Meanings = Field(
        description="Name and meaning of each class: a published value, a range of numbers (above, at_least, below, "
        "at_most), or a list of these. In a list of values without names each value is its own name."
    )
    shares: tuple[Fraction, ...] = Field(
        (), description="Approximate share of each class, if that is public, in the same order; empty: not known."
    )

    refused: ClassVar[Refused] = {
        "shares: expected one for each class, of sum 1, got {0.shares}": lambda label: (
            label.shares and (len(label.shares) != len(label.classes) or abs(sum(label.shares) - 1) > 0.01)
        )
    }


class Group(Coding):
    """One sensitive attribute of a data set, which an option may choose as the group z."""

    meant_by = "values"

    column: str = Field(
        description="Name of the column in the file. An entry of `groups` may leave it out: then its own name is used."
    )
    attribute: str = Field("", description="Name of the attribute in reports; empty: the name in `groups`, or column.")
    values: Meanings = Field(description="Name and meaning of each group, like `classes` of the label.")


def number_in(value: float | str | None) -> float | None:
    """Return ``value`` as a float if it is a finite number, or a text that Arrow can read as one; otherwise None."""
    try:
        # Not `float`, which also reads 1_000: a value must mean the same as when Arrow casts its whole column.
        number = pc.cast(pa.scalar(value.strip()), pa.float64()).as_py() if isinstance(value, str) else value
        return float(number) if number is not None and math.isfinite(number) else None
    except (pa.ArrowInvalid, OverflowError):  # a whole number may be too large for a float
        return None


# By name, so that pandas is not imported only to know its types.
_TYPES_OF_NOTHING = ("NAType", "NaTType", "NoneType", "MaskedConstant")


def is_missing(value: Any) -> bool:
    """Return True for a missing value of Python, NumPy or pandas: None, NaN, NaT, NA, or a masked one."""
    if type(value).__name__ in _TYPES_OF_NOTHING:
        return True
    # Of all scalars, only those that are not a number differ from themselves.
    return not hasattr(value, "__len__") and bool(value != value)


class PublishedValues:
    """The values that a column of classes, groups or categories may have, each with its code.

    It decides for a cell of a file and for a value of a record alike:

    - a text has the code of exactly this text, without spaces around it: `2`, `02` and `2.0` are three texts;
    - a number has the code of the text that writes it. 2 and 2.0 are one number, with the code of `2`, or, if that is
      not published, of its other spelling, such as `02`. If several others have different codes, it has none;
    - true and false are these two texts, and a missing value (None or NaN) is the empty text.
    """

    def __init__(self, codes: Mapping[str, int]) -> None:
        self.codes = codes

    @cached_property
    def _text_of_number(self) -> Mapping[float, str]:
        spellings: dict[float, list[str]] = {}
        for text in self.codes:
            if (number := self.number(text)) is not None:
                spellings.setdefault(number, []).append(text)
        chosen = {}
        for number, own in spellings.items():
            if (text := self.text(number)) in own:
                chosen[number] = text
            elif len({self.codes[each] for each in own}) == 1:  # of several that mean the same, any will do
                chosen[number] = own[0]
        return chosen

    @staticmethod
    def number(text: str) -> float | None:
        """Return the number that ``text`` writes, whole numbers exactly; None if it is none."""
        # A float would make neighbours of whole numbers above 2^53.
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,400}", text) else number_in(text)

    @staticmethod
    def text(value: Value) -> str:
        """Return the text that ``value`` has in a delimited file; a missing value is empty."""
        if is_missing(value):
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        # As in a column of whole numbers.
        if isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53:
            return str(int(value))
        return str(value).strip()

    def spelling(self, value: Value) -> str:
        """Return the published text that ``value`` means; if it means none, its own text."""
        if isinstance(value, int | float) and not isinstance(value, bool) and value in self._text_of_number:
            return self._text_of_number[value]
        return self.text(value)

    def code(self, value: Value) -> int:
        """Return the code of ``value``; -1 if it has none."""
        return self.codes.get(self.spelling(value), -1)


def _require_distinct(values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"Expected each value once, got {value!r} twice; leave one out")


HASHED = "hashed"
"""The kind of a feature that is a number of a text's vector."""


@dataclass(frozen=True, kw_only=True)
class FeatureCode:
    """The rule by which one feature is computed from one published ``column``; fields that belong to other kinds of
    features are None.

    There are seven kinds, which :func:`encode` computes:

    - ``number``: (s(v) - s(low)) / (s(high) - s(low)), clipped to [0, 1]; v is ``missing`` if the value is unknown;
    - ``missing``: 1 if v is unknown, else 0;
    - ``category``: 1 if the text is one of ``values``, else 0. A text in ``unknown`` is in no category;
    - ``other``: 1 if the text is none of ``values``, else 0;
    - ``element``: the number at ``place`` of the list;
    - ``hashed``: the number at ``place`` of the text's vector, which ``ngrams`` determine (:func:`text_vectors`);
    - ``band``: 1 if ``at_least`` <= v < ``below``, else 0; without ``below`` the band is open;

    with s(v) = v, or sign(v) ln(1 + abs(v)) for ``scale: log``. A number is unknown if its text is in ``unknown``, or
    is another spelling of a number in it: 9.0 or 09 for 9. Values of categories with a type, such as the number 2.0,
    have the text that :class:`PublishedValues` says.
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
    ngrams: str | None = None


def feature_codes(features: Sequence[tuple[str, Feature]]) -> tuple[FeatureCode, ...]:
    """Return how every feature of these columns is computed, in the order in which :func:`encode` computes them."""
    codes: list[FeatureCode] = []
    for column, feature in features:
        code = partial(FeatureCode, column=column)
        if feature.bounds is not None:
            low, high = feature.bounds
            number = partial(code, feature=column, kind="number", low=low, high=high, scale=feature.scale)
            if not feature.may_be_missing:
                codes.append(number())
                continue
            # What marks a missing date in a file is no year or age: the age 99 is not the unknown date 99.
            unknown = ("",) if feature.date else ("", *feature.unknown)
            codes.append(number(missing=feature.stands_for_missing, unknown=unknown))
            codes.append(code(feature=f"{column}=missing", kind="missing", unknown=unknown))
        elif feature.vector is not None:
            elements = range(feature.vector)
            codes += [code(feature=f"{column}[{place}]", kind="element", place=place) for place in elements]
        elif feature.text is not None:
            hashed = partial(code, kind=HASHED, ngrams=feature.ngrams)
            codes += [hashed(feature=f"{column}[{place}]", place=place) for place in range(feature.text)]
        elif feature.bands:
            # A band ends where the next one begins; the last one is open.
            for (name, start), (_, end) in itertools.pairwise([*feature.bands.items(), ("", None)]):
                codes.append(code(feature=f"{column}={name}", kind="band", at_least=start, below=end))
        else:
            places, names = feature.places, feature.own_categories
            unknown = tuple(value for value, place in places.items() if place == len(names))
            for place, name in enumerate(names):
                is_other = feature.other and name == OTHER
                # `other` has the values of all its siblings: it is 1 for every text that is not among them.
                values = tuple(value for value, found in places.items() if (found == place) != is_other)
                kind = "other" if is_other else "category"
                codes.append(code(feature=f"{column}={name}", kind=kind, values=values, unknown=unknown or None))
    return tuple(codes)


def even_records(codes: Sequence[FeatureCode], count: int) -> npt.NDArray[np.float32]:
    """Return ``count`` made-up records with the features ``codes``, (count, F), which depend on the declaration alone.

    Numbers are evenly spaced between their bounds, and one in ten is missing if it may be. The categories of a column,
    and its bands, are equally common. Columns are independent.
    """
    # A fixed seed: these records are constants of the declaration.
    draws = np.random.default_rng(0)
    features: list[Mask | FloatArray] = []
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
