"""A first draft of a declaration from a table, and the check of a declaration against its files.

What a declaration makes of its files, counted for the operator before anything is trained.

Counts are exact and cover private records: they are for those who may see the data.

A declaration drafted from public records: what they tell of columns, and questions about all else.

Of the private file nothing but its header is read. Bounds are those of the public file, rounded outwards, and its
categories are listed; both are questions, because private records may hold others. What looks like a name of a record
or like free text is left out with a remark.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.config import DataConfig
from fairpate.data.dataset import DataError, DataSettingsError
from fairpate.data.declaration import read_declaration, read_records
from fairpate.data.registry import dataset_of, entry_for, request_of
from fairpate.data.tables import COMMAS, DATES, TYPED_SUFFIXES, TableFaults, column_names, read_batches, text_of


@dataclass(frozen=True, kw_only=True)
class Counted:
    """How many of the ``rows`` of a column of ``file`` were clipped, missing, or of no declared category."""

    file: str
    column: str
    rows: int
    clipped: int = 0
    missing: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """``rows`` by file, what was done to columns where anything was, and ``refused``: every fault in words."""

    rows: dict[str, int]
    columns: tuple[Counted, ...]
    refused: tuple[str, ...]


def check_declaration(config: DataConfig) -> Check:
    """Read all files of the declaration that ``config`` names; :class:`DataSettingsError` where it is wrong itself."""
    if config.declaration is None:
        raise DataSettingsError(f"{config.name}: expected a declaration (.yaml) of your own to check.")
    entry, faults = entry_for(config), TableFaults()
    try:
        records = read_records(read_declaration(config.declaration.path), request_of(config, entry), faults)
        dataset_of(records, config, entry)
        refused = []
    except DataError as error:
        refused = str(error).splitlines()
    named = {(file, column): None for file, column, _ in faults.counts}
    columns = tuple(
        Counted(
            file=file,
            column=column,
            rows=faults.rows[file],
            **{what: faults.counts[file, column, what] for what in ("clipped", "missing", "other")},
        )
        for file, column in named
    )
    return Check(rows=dict(faults.rows), columns=columns, refused=tuple(refused))


QUESTION = "# ?"
_MOST_CATEGORIES, _MOST_CODES, _MOST_KEPT = 30, 10, 1000
_SEPARATORS = (",", ";", "\t", "|")
_LABELS = re.compile(r"^(label|target|class|outcome|y)$", re.IGNORECASE)
_GROUPS = re.compile(
    r"(^|[^a-z])(sex|gender|geschlecht|sexe|sexo|genero|género|race|ethnic\w*|religion|nationality)([^a-z]|$)",
    re.IGNORECASE,
)
_PERSONS = re.compile(r"(patient|person|subject|client|customer|user|member|student)(?!s)", re.IGNORECASE)
_MARKS = frozenset({"na", "n/a", "nan", "null", "none", "missing", "unknown", "?", "-", "."})
_LIKE = {"date": re.compile(DATES), "comma": re.compile(COMMAS)}
_PLAIN = re.compile(r"^[A-Za-z_][\w.() -]*$")


@dataclass(kw_only=True)
class Seen:
    """What public records tell of one column.

    ``marks`` are the values that often mean a missing one. Among numbers they mean it; among words they are words.
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
        """More rows."""
        present = text.filter(pc.not_equal(text, ""))
        self.rows += len(text)
        self.missing += len(text) - len(present)
        distinct = pc.unique(present).to_pylist()
        self.repeats |= len(distinct) < len(present) or any(value in self.values for value in distinct)
        # Bounded: of a column of names all values would stay in memory.
        self.values |= dict.fromkeys(distinct[: max(0, _MOST_KEPT - len(self.values))])
        marks = [value for value in distinct if value.strip().lower() in _MARKS]
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
    def kind(self) -> str:
        """What it looks like: `number`, `category`, `name`, `date`, `comma`, `text`, `constant` or `empty`."""
        if not self.values:
            return "empty"
        if len(self.values) == 1:
            return "constant"
        plain = self.values.keys() - (self.marks.keys() if self.is_number else ())
        is_whole = all(re.fullmatch(r"[-+]?\d+", value) for value in plain)
        if not self.repeats and self.rows > _MOST_CODES and (is_whole or not self.is_number):
            return "name"
        if self.is_number and math.isfinite(self.low + self.high):
            return "number" if len(plain) > (_MOST_CODES if is_whole else 2) else "category"
        if len(self.values) <= _MOST_CATEGORIES:
            return "category"
        return next((kind for kind, like in _LIKE.items() if all(map(like.match, plain - self.marks.keys()))), "text")


def draft_declaration(file: Path, public: Path, folder: Path) -> str:
    """YAML with a comment on each line, questions after ``# ?``; the files lie below ``folder``.

    :class:`DataError` for a file that cannot be read.
    """
    separator = _separator_of(public)
    private_columns = column_names(file, file.name, separator=separator if file.suffix not in TYPED_SUFFIXES else None)
    seen = _look_at(public, separator)
    columns = [column for column in private_columns if column in seen]
    missing = [column for column in private_columns if column not in seen]
    label, group, person = _roles(private_columns, seen, missing)
    lines = [
        f"# Drafted from {public.name}, and the header of {file.name}. Answer every line with `{QUESTION}`, then:",
        "#   fairpate data check THIS_FILE",
        f"name: {_name_of(file)}  # of the data set, in commands and in what is published",
        "kind: table  # a record is a row",
        f'task: ""  {QUESTION} what the label says, in a few words',
        "files:",
        f"  private: {_below(file, folder)}  # what is protected",
        f"  public: {_below(public, folder)}  # what is not; it needs no label",
        f"  # test: held_out.csv  {QUESTION} labelled records to measure on; without, no accuracy is claimed",
    ]
    if separator not in (None, ","):
        lines.append(f"separator: {json.dumps(separator)}  # between two fields")
    lines += [f"# rows: 10000  {QUESTION} about how many private records, if that is public; some methods need it"]
    lines += _label_lines(label, seen.get(label or ""))
    lines += _group_lines(group, seen.get(group or ""))
    lines.append(
        f"person: {_quoted(person)}  {QUESTION} all rows of one person have one value; the unit of splits"
        if person
        else f"# person: patient_id  {QUESTION} the column that is the same in all rows of one person, if there is one"
    )
    lines.append("features:  # public constants: from a codebook or a law, never from private records")
    used = {label, group, person}
    lines += [line for column in columns if column not in used for line in _feature_lines(column, seen[column])]
    lines += [f"  # {column}: not in {public.name}, so it is no feature" for column in missing if column not in used]
    lines += [
        f"  # {column}: not in {file.name}, so it is no feature" for column in seen if column not in private_columns
    ]
    return "\n".join(lines) + "\n"


def _look_at(public: Path, separator: str | None) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for batch in read_batches(public, public.name, separator=separator):
        for column in batch.column_names:
            seen.setdefault(column, Seen()).add(text_of(batch[column]))
    return seen


def _separator_of(public: Path) -> str | None:
    """The one that splits the public header into most fields; null for a file with types."""
    if public.suffix in TYPED_SUFFIXES:
        return None
    return max(_SEPARATORS, key=lambda each: len(column_names(public, public.name, separator=each)))


def _roles(columns: Sequence[str], seen: dict[str, Seen], missing: Sequence[str]) -> tuple[str | None, ...]:
    """What the label, the group and the person may be."""
    categories = [column for column in columns if column in seen and seen[column].kind == "category"]
    label = next((column for column in columns if _LABELS.match(column)), None)
    label = label or next(iter(missing), None) or next(iter(reversed(categories)), None)
    group = next((column for column in categories if _GROUPS.search(column) and column != label), None)
    person = next((column for column in columns if _PERSONS.search(column) and column not in (label, group)), None)
    return label, group, person


def _label_lines(label: str | None, seen: Seen | None) -> Iterator[str]:
    if label is None:
        yield f'label: {{column: label, classes: ["no", "yes"]}}  {QUESTION} which column, and its values'
        return
    known = list(seen.values) if seen is not None and 2 <= len(seen.values) <= _MOST_CATEGORIES else []
    values = _listed(sorted(known) or ["no", "yes"])
    why = (
        "is this the label, and are these all its values?"
        if known
        else "the label? its values are not in the public file"
    )
    yield f"label: {{column: {_quoted(label)}, classes: {values}}}  {QUESTION} {why}"


def _group_lines(group: str | None, seen: Seen | None) -> Iterator[str]:
    if group is None or seen is None:
        yield f"group: {{column: sex, values: [F, M]}}  {QUESTION} whose fairness counts: which column, and its values"
        return
    yield (
        f"group: {{column: {_quoted(group)}, values: {_listed(sorted(seen.values))}}}  {QUESTION} is this the group "
        "whose fairness counts, and are these all its values?"
    )


def _feature_lines(column: str, seen: Seen) -> Iterator[str]:
    name = _quoted(column)
    if seen.kind == "number":
        low, high = outwards(seen.low, seen.high)
        missing = f", missing: {_number((low + high) / 2)}" if seen.missing or seen.marks else ""
        missing += f", unknown: {_listed(seen.marks)}" if seen.marks else ""
        asks = "the least and the greatest that there can be?" + " and for a missing one?" * bool(missing)
        yield f"  {name}: {{bounds: [{_number(low)}, {_number(high)}]{missing}}}  {QUESTION} {asks}"
    elif seen.kind == "category":
        missing = ", missing: unknown" if seen.missing else ""
        numeric = " or a number, with bounds?" if seen.is_number else ""
        asks = f"all values? others are an error, unless `other: true`.{numeric}"
        yield f"  {name}: {{categories: {_listed(sorted(seen.values))}{missing}}}  {QUESTION} {asks}"
    else:
        remark = {
            "name": "left out: another value in each row. If it names records: `identity: {key: COLUMN}`",
            "date": "left out: dates. To use them, write what counts of them as a number, such as the year",
            "comma": "left out: numbers with commas. To use them, write a decimal point, and nothing between thousands",
            "text": f"left out: free text, or more than {_MOST_CATEGORIES} values",
            "constant": "left out: one value in all public records",
            "empty": "left out: empty in all public records",
        }[seen.kind]
        yield f"  # {column}: {remark.replace('COLUMN', _quoted(column))}"


def outwards(low: float, high: float) -> tuple[float, float]:
    """Bounds that hold both, rounded away from each other to the second digit of their distance."""
    width = high - low or abs(high) or 1.0
    step = 10.0 ** (math.floor(math.log10(width)) - 1)
    return float(_number(math.floor(low / step) * step)), float(_number(math.ceil(high / step) * step))


def _number(value: float) -> str:
    return f"{value:.10g}"


def _listed(values: Sequence[str] | dict[str, None]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str | None) -> str:
    """Text as YAML reads it back."""
    assert text is not None
    return text if _PLAIN.match(text) and text == text.strip() else json.dumps(text, ensure_ascii=False)


def _name_of(file: Path) -> str:
    name = re.sub(r"\W+", "_", file.name.partition(".")[0].lower()).strip("_")
    return name if re.match("[a-z]", name) else f"data_{name}"


def _below(path: Path, folder: Path) -> str:
    try:
        return _quoted(path.absolute().relative_to(folder.absolute()).as_posix())
    except ValueError:
        raise DataSettingsError(
            f"{path}: expected a file below {folder.absolute()}, where the declaration will lie; give -o in a folder "
            "above both files."
        ) from None
