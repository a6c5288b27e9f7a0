"""A user's own declaration of records: drafted from public records, and checked against the files that it declares.

A draft is YAML with a comment on each line. Lines that only somebody who knows the records can confirm end with a
question (``# ?``).

Drafts of private files and checks count private records exactly: they are for people who may see the data, never for
`public/`.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.config import DataConfig, nearest
from fairpate.data import dataset as datasets
from fairpate.data import table_files, tables
from fairpate.data.dataset import Alike, Part
from fairpate.data.dates import ISO_DATE, day_of
from fairpate.data.declaration import PARTS, read_declaration, read_records, rows_of
from fairpate.data.overlap import doubts_of
from fairpate.data.pictures import LEVEL, folder_table
from fairpate.data.registry import REGISTRY, dataset_of, entry_for, request_of
from fairpate.data.table_files import TYPED_SUFFIXES, USUAL, Layout
from fairpate.data.tables import DATES, TableFaults
from fairpate.types import DataError, DataSettingsError, IntArray

# Limits on listed categories, on whole numbers that look like codes, and on remembered values.
_MOST_CATEGORIES, _MOST_CODES, _MOST_KEPT = 30, 10, 1000
_SEPARATORS = (",", ";", "\t", "|")
_LABELS = re.compile(r"^(label|target|class|outcome|y)$", re.IGNORECASE)
_GROUPS = re.compile(
    r"(^|[^a-z])(sex|gender|geschlecht|sexe|sexo|genero|género|race|ethnic\w*|religion|nationality)([^a-z]|$)",
    re.IGNORECASE,
)
_PERSONS = re.compile(r"(patient|person|subject|client|customer|kunde|user|member|student)(?!s)", re.IGNORECASE)
_IDS = re.compile(r"(^|[^a-z])(id|no|number|key|code)\.?$|nr\.?$|nummer$|n[uú]m[eé]ro$", re.IGNORECASE)
# Date formats, the most usual first; only days after the 12th distinguish the last two.
_DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
_FROM_PRIVATE = "confirm from knowledge: read from private rows"
# Rows of one id may differ a fifth as often as by chance; few values in more rows each are categories.
_MOST_MIXED, _MOST_ROWS = 0.2, 20
_MARK = re.compile(r"n/?a|n\.a\.|#n/a|nan|null|none|missing|unknown|k\.a\.|keineangabe|\?|--?|\.")
_DATE, _AMOUNT = re.compile(DATES), re.compile(r"[-+]?\d[\d.,]*$")
# Ids of persons: values have as many rows each, on average, or more; with fewer they may repeat by chance.
_LEAST_ROWS, _MOST_REMEMBERED = 1.5, 2**20


@dataclass(kw_only=True)
class Repeats:
    """How the values of a column repeat, whatever its name: the signs of ids of persons who have several rows.

    Rows are added batch by batch, with their ``traits``: hashes of the values of other columns by name, such as the
    group. Of a column and of its pairs with each trait, hashes of distinct values are remembered, up to a million.
    """

    values: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    counts: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pairs: dict[str, IntArray] = field(default_factory=dict)
    shares: dict[str, Counter[int]] = field(default_factory=dict)
    is_name: bool = True
    is_number: bool = True

    def add(self, text: pa.Array, traits: Mapping[str, IntArray]) -> None:
        is_given = pc.not_equal(text, "")
        text, given_N = text.filter(is_given), np.asarray(is_given)
        distinct = pc.unique(text).to_pylist()
        # Dates and amounts repeat too, and name nobody.
        self.is_name = self.is_name and not any(
            _DATE.match(each) or (_AMOUNT.match(each) and not re.fullmatch(r"\d+(\.0+)?", each)) for each in distinct
        )
        self.is_number = self.is_number and all(map(_AMOUNT.match, distinct))
        if not self.is_name or not distinct or len(self.values) > _MOST_REMEMBERED:
            return
        value_N = hashes(text)
        self.values, place_N = np.unique(np.concatenate([self.values, value_N]), return_inverse=True)
        counts_N = np.concatenate([self.counts, np.ones(len(value_N), dtype=np.int64)])
        self.counts = np.bincount(place_N, weights=counts_N).astype(np.int64)
        for name, trait_N in traits.items():
            own_N = trait_N[given_N]
            codes, numbers = np.unique(own_N, return_counts=True)
            self.shares.setdefault(name, Counter()).update(dict(zip(codes.tolist(), numbers.tolist(), strict=True)))
            known = self.pairs.get(name, self.values[:0])
            self.pairs[name] = np.union1d(known, value_N ^ (own_N >> 1))

    @property
    def rows(self) -> int:
        """The number of rows with a value."""
        return int(self.counts.sum())

    @property
    def mixed(self) -> float | None:
        """How often rows of one value differ in a trait, as a share of what chance would give, for the trait in which
        they differ least; None if chance would give too few differences to tell."""
        found, (times, number) = [], np.unique(self.counts, return_counts=True)
        for name, shares in self.shares.items():
            # Each value has one trait at least; so many further ones are expected of unrelated columns.
            by_chance = -float(len(self.values))
            for share in shares.values():
                by_chance += float(number @ (1 - (1 - share / self.rows) ** times))
            if by_chance >= _MOST_CODES:
                found.append((len(self.pairs[name]) - len(self.values)) / by_chance)
        return min(found, default=None)

    @property
    def may_be_persons(self) -> bool:
        """True if there are many values, none of them a date or an amount, that have several rows each, and the rows of
        one value nearly always share a trait. Where traits do not tell, values that are no numbers suffice."""
        if not self.is_name or len(self.values) <= _MOST_CATEGORIES or self.rows < _LEAST_ROWS * len(self.values):
            return False
        return not self.is_number if self.mixed is None else self.mixed < _MOST_MIXED


def hashes(text: pa.Array) -> IntArray:
    """Return a hash of each value, which differs between processes."""
    encoded = text.dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    return np.fromiter(map(hash, distinct), np.int64, len(distinct))[encoded.indices.to_numpy()]


def repeats_of(
    batches: Iterator[pa.Table], traits: Collection[str], left_out: Collection[str] = ()
) -> dict[str, Repeats]:
    """Return how the values of every column of a table repeat, compared with those in the columns ``traits``; columns
    in ``left_out``, and those of vectors, are left out."""
    found: dict[str, Repeats] = {}
    for rows in batches:
        own = {column: hashes(table_files.text_of(rows[column])) for column in traits if column in rows.column_names}
        for column in rows.column_names:
            if column not in left_out and not table_files.is_vectors(rows[column].type):
                others = {trait: each for trait, each in own.items() if trait != column}
                found.setdefault(column, Repeats()).add(table_files.text_of(rows[column]), others)
    return found


# Names of files and folders that say which part of the records they hold, and not of which data set.
_NAMES_OF_PARTS = {"private", "public", "pool", "test", "train", "training", "validation", "data", "records"}
_PLAIN = re.compile(r"^[A-Za-z_][\w.() -]*$")


@dataclass(kw_only=True)
class SeenColumn:
    """Facts about one column of a file, from which a declaration of this column is drafted: its values, their range,
    the number of missing ones. They are collected batch by batch.

    ``marks`` are values such as `n/a`, which often mean that a value is missing. In a column of numbers they are taken
    as missing values, in a column of words as text.
    """

    rows: int = 0
    missing: int = 0
    values: dict[str, None] = field(default_factory=dict)
    marks: dict[str, None] = field(default_factory=dict)
    repeats: bool = False
    low: float = math.inf
    high: float = -math.inf
    is_number: bool = True

    def add(self, text: pa.Array) -> None:
        present = text.filter(pc.not_equal(text, ""))
        self.rows += len(text)
        self.missing += len(text) - len(present)
        distinct = pc.unique(present).to_pylist()
        self.repeats |= len(distinct) < len(present) or any(value in self.values for value in distinct)
        # Bounded: otherwise all values of a column of names would stay in memory.
        self.values |= dict.fromkeys(distinct[: max(0, _MOST_KEPT - len(self.values))])
        marks = [value for value in distinct if _MARK.fullmatch(value.replace(" ", "").lower())]
        self.marks |= dict.fromkeys(marks)
        others = pa.array([value for value in distinct if value not in marks], pa.string())
        try:
            numbers = np.array(pc.cast(others, pa.float64()).to_numpy(zero_copy_only=False))
        except pa.ArrowInvalid:
            self.is_number = False
            return
        if len(numbers):
            self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))

    @property
    def is_repeated_id(self) -> bool:
        """True if the column looks like the id of persons who have several rows: some values repeat, and there are more
        distinct values than a column of categories has."""
        return self.repeats and len(self.values) > _MOST_CATEGORIES and len(self.values) < self.rows - self.missing

    @property
    def may_be_id(self) -> bool:
        """False if the column cannot name persons: it has dates or amounts, or few values in many rows each."""
        is_few = len(self.values) <= _MOST_CATEGORIES and self.rows > _MOST_ROWS * len(self.values)
        return not is_few and self.kind not in ("date", "comma")

    @property
    def date_format(self) -> str | None:
        """The one usual date format that fits all values of the column; None if several or none fit."""
        plain = [value[:10] for value in self.values if value not in self.marks]
        fitting = [each for each in _DATE_FORMATS if all(day_of(value, each) for value in plain)]
        return fitting[0] if len(fitting) == 1 else None

    @property
    def years(self) -> tuple[int, int]:
        """The first and the last year of the column's dates, as bounds. If all dates are of one year, the second number
        is the year after it."""
        form = self.date_format
        assert form is not None
        years = [date.year for value in self.values if (date := day_of(value[:10], form))]
        return min(years), max(*years, min(years) + 1)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest number, rounded outwards."""
        return outwards(self.low, self.high)

    @property
    def kind(self) -> str:
        """The likely kind of the column: `number`, `category`, `name` (of a record), `date`, `comma` (numbers with
        commas), `text`, `constant` or `empty`."""
        if not self.values:
            return "empty"
        if len(self.values) == 1:
            return "constant"
        plain = self.values.keys() - (self.marks.keys() if self.is_number else ())
        # Dates and amounts are checked before names of records, because each may differ in each row.
        if len(words := self.values.keys() - self.marks.keys()) > _MOST_CODES:
            if all(map(_DATE.match, words)):
                return "date"
            if any("," in word for word in words) and all(map(_AMOUNT.match, words)):
                return "comma"
        is_whole = all(re.fullmatch(r"[-+]?\d+", value) for value in plain)
        # A different value in each row suggests names of records; with few rows it may be chance.
        if not self.repeats and self.rows > _MOST_CODES and (is_whole or not self.is_number):
            return "name"
        # A few whole numbers are codes, and 0.5 and 1.5 may be classes; many different numbers are amounts.
        if self.is_number and math.isfinite(self.low + self.high):
            return "number" if len(plain) > (_MOST_CODES if is_whole else 2) else "category"
        return "category" if len(self.values) <= _MOST_CATEGORIES else "text"


def draft_declaration(
    file: Path,
    public: Path | None,
    folder: Path,
    *,
    label: str | None = None,
    group: str | None = None,
    person: str | None = None,
    test: Path | None = None,
    intended_use: str | None = None,
    reads_private: bool = False,
) -> str:
    """Return a draft of a declaration from public records: YAML with a comment on each line, questions after ``# ?``.

    Only the header of the private ``file`` is read. Bounds are those of the ``public`` file, rounded outwards, and its
    categories are listed; both are questions, because private records may have others. Columns that look like names of
    records or free text are left out with a remark. A column whose values repeat as ids of persons do is asked about,
    whatever its name. Without a ``public`` file, every column is a question. Both files are below ``folder``, and may
    be folders of pictures.

    ``label``, ``group`` and ``person`` name columns; if None, they are guessed. The ``test`` file is listed, not read.
    ``intended_use``: what a model of the records is for; None: the draft asks.
    ``reads_private``: private rows are read too, for the classes of the label and for ids that repeat, never for bounds
    and categories; each such line asks the user to confirm it. :class:`DataError` for a file that cannot be
    read, :class:`DataSettingsError` for a file that is no table and for a column that does not exist.
    """
    kind = "a folder of pictures" if file.is_dir() else "a table"
    for option, given in (("public", public), ("test", test)):
        if given is not None and given.is_dir() != file.is_dir():
            raise DataSettingsError(
                f"--{option}: expected {kind}, as {file.name} is, got {given.name}; give the same kind."
            )
    if file.is_dir():
        return _draft_of_pictures(file, public, test, folder, intended_use=intended_use, reads_private=reads_private)
    layout = layout_of(public or file, with_rows=public is not None)
    columns = table_files.column_names(file, file.name, layout)
    # The header of a letter, a PDF or an archive; text has no null byte.
    if len(columns) < 2 or any("\0" in column for column in columns):
        raise DataSettingsError(
            f"{file.name}: not a table of records, as its first line does not name two columns or more; give a Parquet "
            "or Feather file, or text with a header and columns separated by comma, semicolon, tab or |."
        )
    for option, column in (("label", label), ("group", group), ("person", person)):
        if column is not None and column not in columns:
            raise DataSettingsError(f"--{option}: {file.name} has no column {column}{nearest(column, columns)}.")
    seen, seen_private = (
        {} if each is None else _seen(each, layout) for each in (public, file if reads_private else None)
    )
    # If another sign separates the fields, a comma in a number is its decimal sign.
    has_decimal_comma = layout.separator not in (None, ",") and any(each.kind == "comma" for each in seen.values())
    if has_decimal_comma and public:
        seen = _seen(public, layout, [each for each in seen if seen[each].kind in ("comma", "number")])
    known = seen_private | seen
    free = [column for column in columns if column not in (group, person)]
    categories = [column for column in columns if column in seen and seen[column].kind == "category"]
    # Public records often lack the label: a column that they lack is likelier to be it than the last category.
    lacking = [column for column in free if column not in seen] if public else []
    labels = [column for column in free if _LABELS.match(column)]
    # Without public records only names tell; where none does, the label is often the last column.
    last = [each for each in reversed(free) if not any(like.search(each) for like in (_GROUPS, _PERSONS, _IDS))]
    likely = (*labels, *lacking, *([each for each in reversed(categories) if each in free] if public else last))
    label = label or next(iter(likely), None)
    candidates = categories if public else columns
    named = (each for each in candidates if _GROUPS.search(each) and each not in (label, person))
    group = group or next(named, None)
    others = [column for column in columns if column not in (label, group)]
    is_given = person is not None
    person_words = "all rows of one person have one value; the unit of splits"
    decisive = seen | seen_private
    traits = [column for column in decisive if column == group or decisive[column].kind == "category"]
    of_public, of_private = (
        {} if each is None else repeats_of(table_files.read_batches(each, each.name, layout), traits)
        for each in (public, file if reads_private else None)
    )
    repeats = {column: each for column, each in (of_public | of_private).items() if column in others}
    # What is read decides before a name does: a customer's type, or a date, is no customer.
    named = (column for column in others if _PERSONS.search(column))
    person = person or next((each for each in named if each not in decisive or decisive[each].may_be_id), None)
    if person is None:
        # Repeated ids: many different values, each in few rows. Every trait of a person, such as a date of birth, has
        # at most as many values as the id.
        ids = (column for column in others if column in decisive and _IDS.search(column))
        person = next((column for column in ids if decisive[column].is_repeated_id), None)
        found = [column for column, each in repeats.items() if each.may_be_persons]
        person = person or max(found, key=lambda column: len(repeats[column].values), default=None)
        if person is not None:
            person_words = f"its values repeat: {person_words}"
            if not (person in seen and (seen[person].is_repeated_id or of_public[person].may_be_persons)):
                person_words = f"{_FROM_PRIVATE}. Its values repeat there: all rows of one person have one value"
    asked = [] if is_given else [each for each in repeats if each != person and repeats[each].may_be_persons]
    what = f"the {'rows' if reads_private else 'header'} of {file.name}"
    values = sorted(known[label].values) if label in known else []
    return _drafted(
        file,
        public,
        test,
        folder,
        source=f"from {public.name}, and {what}" if public else f"from {what}",
        intended_use=intended_use,
        separator=layout.separator,
        encoding=layout.encoding,
        has_decimal_comma=has_decimal_comma,
        label=label,
        classes=values if 2 <= len(values) <= _MOST_CATEGORIES else [],
        group=group,
        person=person,
        is_given=is_given,
        person_words=person_words,
        asked=asked,
        seen=seen,
        columns=columns,
        # In the order of the private file, which the user knows.
        rest=[column for column in columns if column not in (label, group, person)],
    )


def _seen(path: Path, layout: Layout, with_commas: Collection[str] = ()) -> dict[str, SeenColumn]:
    """Return facts about every column of a file. In the columns ``with_commas`` the comma is the decimal sign."""
    seen: dict[str, SeenColumn] = {}
    for batch in table_files.read_batches(path, path.name, layout):
        for column in batch.column_names:
            text = table_files.text_of(batch[column])
            seen.setdefault(column, SeenColumn()).add(
                tables.with_decimal_points(text) if column in with_commas else text
            )
    return seen


@cache
def _template() -> Any:
    import jinja2  # no other use of data needs it

    words = jinja2.Environment(  # noqa: S701 - YAML, not HTML
        line_statement_prefix="%", keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    words.filters |= {"listed": _listed, "number": "{:.10g}".format, "quoted": _quoted, "sorted": sorted}
    words.filters["text"] = partial(json.dumps, ensure_ascii=False)
    return words.from_string(Path(__file__).with_name("draft.txt").read_text(encoding="utf-8"))


def _drafted(file: Path, public: Path | None, test: Path | None, folder: Path, **facts: Any) -> str:
    """Return a drafted declaration: the template ``draft.txt``, filled in with ``facts`` about the columns of a table
    or the levels of folders."""
    # Of a file or folder that is called after its part, such as private/, the folder above it names the data set.
    names = (file.name.partition(".")[0], file.absolute().parent.name, "my_data")
    own, *_ = plain = [re.sub("[^a-z0-9]+", "_", each.lower()).strip("_") for each in names]
    name = next(each for each in plain if each and each not in _NAMES_OF_PARTS)
    name = f"my_{name}" if name in REGISTRY else name
    is_table = "levels" not in facts
    return _template().render(
        facts,
        name=name if name[:1].isalpha() else f"data_{name}",
        is_named_by_file=name == own,
        private=_below(file, folder),
        public=public and _below(public, folder),
        test=test and _below(test, folder),
        file_name=file.name,
        public_name=public and public.name,
        is_table=is_table,
        records="records" if is_table else "pictures",
        suffix=".csv" if is_table else "",
        from_private=_FROM_PRIVATE,
        most_categories=_MOST_CATEGORIES,
        iso_date=ISO_DATE,
    )


def layout_of(file: Path, *, with_rows: bool) -> Layout:
    """Return the likely layout of a table: the separator that splits the header into most fields, and the encoding.

    For a file format with column types, such as Parquet, the separator is None. The encoding is that of a byte-order
    mark at the start, otherwise UTF-8, or cp1252 if the header (``with_rows``: any line) is not valid UTF-8.
    """
    if file.suffix in TYPED_SUFFIXES:
        return USUAL
    encoding = "utf-8"
    if ".gz" not in file.suffixes and file.is_file():
        with file.open("rb") as stream:
            encoding = table_files.encoding_by_mark(stream.peek(4)) or encoding
            try:
                for line in stream if with_rows and encoding == "utf-8" else [stream.readline()]:
                    line.decode("utf-8")
            except UnicodeDecodeError:
                encoding = "cp1252" if encoding == "utf-8" else encoding
    layouts = (Layout(separator=each, encoding=encoding) for each in _SEPARATORS)
    return max(layouts, key=lambda layout: len(table_files.column_names(file, file.name, layout)))


def _draft_of_pictures(
    file: Path,
    public: Path | None,
    test: Path | None,
    folder: Path,
    *,
    intended_use: str | None,
    reads_private: bool,
) -> str:
    """Return a drafted declaration for folders of pictures: each split is a folder, with pictures arranged as
    CLASS/GROUP/PICTURE."""
    if (file / "private").is_dir():  # its folders would be read as classes
        others = [f" --{each} {file / name}" for each, name in (("public", "pool"), ("test", "test"))]
        there = [words for words, name in zip(others, ("pool", "test"), strict=True) if (file / name).is_dir()]
        raise DataSettingsError(
            f"{file}: has a folder `private`, so its folders are parts of the records and not classes; name each part, "
            f"as in `fairpate data declare {file / 'private'}{''.join(there)}`."
        )
    # The names of the folders between a folder and its pictures, by level.
    own, pool = (
        [set(table[name].to_pylist()) for name in table.column_names if name.startswith(LEVEL)] if table else []
        for table in (each and folder_table(each, each) for each in (file if reads_private else None, public))
    )
    levels = []
    parts = ("label", "classes", ["no", "yes"]), ("group", "values", ["a", "b"])
    for place, (what, values, names) in enumerate(parts):
        asks = "which?"
        for found, question in ((own, f"{_FROM_PRIVATE}. Are these all?"), (pool, "are these all?")):
            if len(found) > place and len(found[place]) >= 2:
                names, asks = sorted(found[place]), question
        levels.append((what, values, names, asks))
    return _drafted(
        file, public, test, folder, source="for folders of pictures", intended_use=intended_use, levels=levels
    )


def outwards(low: float, high: float) -> tuple[float, float]:
    """Return bounds that contain ``low`` and ``high``, rounded outwards to two digits of their difference."""
    # A column with one value gets a range as wide as the value is large.
    width = high - low or abs(high) or 1.0
    step = 10.0 ** (math.floor(math.log10(width)) - 1)
    return float(f"{math.floor(low / step) * step:.10g}"), float(f"{math.ceil(high / step) * step:.10g}")


def _listed(values: Sequence[str] | dict[str, None]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str | None) -> str:
    """Return ``text`` in the form for a YAML file: in quotes if YAML would read it as another value than this text."""
    assert text is not None
    return text if _PLAIN.match(text) and text == text.strip() else json.dumps(text, ensure_ascii=False)


def _below(path: Path, folder: Path) -> str:
    try:
        return _quoted(path.absolute().relative_to(folder.absolute()).as_posix())
    except ValueError:
        raise DataSettingsError(
            f"{path}: expected a file below {folder.absolute()}, where the declaration will be written; give -o in a "
            "folder above both files."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Numbers of rows in one column of ``file``: all ``rows``, those with a clipped value, with a missing value, and
    with a value that is not a declared category (``other``)."""

    file: str
    column: str
    rows: int
    clipped: int = 0
    missing: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A ``column`` of private records that may name persons: ``values`` values, which repeat in ``rows`` rows."""

    column: str
    values: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of a declaration's check.

    - ``rows``: numbers of rows read by file.
    - ``columns``: counts for the columns in which values were changed.
    - ``refused``: a message for each fault.
    - ``alike``: numbers of names (of persons, otherwise of records by a key) that are probably others.
    - ``repeated``: columns that the declaration leaves out and that may name persons, although it declares none.
    - ``doubts``: a sentence for each part that may contain changed copies of private records.
    """

    rows: dict[str, int]
    columns: tuple[Counted, ...]
    refused: tuple[str, ...]
    alike: tuple[Alike, ...] = ()
    repeated: tuple[Repeated, ...] = ()
    doubts: tuple[str, ...] = ()


def check_declaration(config: DataConfig) -> Check:
    """Read all files of the declaration that ``config`` names, and return its counts and faults.
    :class:`DataSettingsError` for a wrong declaration."""
    if config.declaration is None:
        raise DataSettingsError(
            f"{config.name}: expected the path of your own declaration (.yaml); only declarations can be checked."
        )
    entry, table, faults = entry_for(config), read_declaration(config.declaration.path), TableFaults()
    request, refused = request_of(config, entry), []
    similar: tuple[Alike, ...] = ()
    repeated: list[Repeated] = []
    doubts: tuple[str, ...] = ()
    try:
        records = read_records(table, request, faults)
        # Names of rows without a person, or by several columns, are none that somebody wrote.
        prefix = f"{table.person.prefix if table.person else table.identity.prefix or table.name}-"
        names = records.person_ids or (records.records.record_id if len(table.identity.key) == 1 else ())
        parts = records.origins or itertools.repeat("records")
        by_part: dict[str, set[str]] = {}
        for part, name in zip(parts, names, strict=False):
            if name.startswith(prefix):
                # Records to be divided are one part, whatever splits they may enter.
                part = part if part in PARTS else PARTS[0]
                by_part.setdefault(part, set()).add(name.removeprefix(prefix))
        similar = datasets.alike(by_part)
        if table.persons(request.options) is None and not table.pictures:
            protected: dict[Part, Any] = {"private": table.files.records or table.files.private}
            batches = (rows for *_, rows in rows_of(table, request, protected, others=True))
            traits = [column for column, each in table.visible(request.options) if each.categories]
            traits += [each.column for each in table.groups.values()]
            found = repeats_of(batches, dict.fromkeys(traits), table.used())
            repeated = [
                Repeated(column=column, values=len(each.values), rows=each.rows)
                for column, each in sorted(found.items())
                if each.may_be_persons
            ]
        # Only for its checks: repeated names, and sizes and splits that the records cannot fill.
        doubts = doubts_of(dataset_of(records, config, entry))
    except DataError as error:
        refused = str(error).splitlines()
    columns = []
    # In the order of the files, each once.
    for file, column in dict.fromkeys((file, column) for file, column, _ in faults.counts):
        counts = {what: faults.counts[file, column, what] for what in ("clipped", "missing", "other")}
        columns.append(Counted(file=file, column=column, rows=faults.rows[file], **counts))
    return Check(
        rows=dict(faults.rows),
        columns=tuple(columns),
        refused=tuple(refused),
        alike=similar,
        repeated=tuple(repeated),
        doubts=doubts,
    )
