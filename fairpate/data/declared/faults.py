"""What of a file cannot be read as declared: counted by column while it is read, and told all at once.

The messages show a few of the values and are for those who may see the records; so are the counts of what was clipped,
missing or of no declared category.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fairpate.data.entry import DataError

_SHOWN, _LENGTH = 3, 40


@dataclass(kw_only=True)
class Fault:
    """One kind of fault in one column of a file."""

    met: str = "none"
    rows: int = 0
    values: dict[str, None] = field(default_factory=dict)

    def add(self, rows: int, values: Iterable[str]) -> None:
        """So many more rows, with these values among them."""
        self.rows += rows
        for value in values:
            # One more than is shown, which tells that there are others.
            if len(self.values) > _SHOWN:
                return
            self.values.setdefault(value if len(value) <= _LENGTH else f"{value[:_LENGTH]}...")

    def __str__(self) -> str:
        shown = [repr(value) for value in self.values][:_SHOWN] + ["..."] * (len(self.values) > _SHOWN)
        where = f"in {self.rows:,} row{'s' if self.rows != 1 else ''}"
        return f"{', '.join(shown) or self.met} {where}"


@dataclass(kw_only=True)
class Faults:
    """All faults of a data set, in the order in which they were met.

    ``counts`` of rows by file, column and what a declaration made of them; ``rows`` by file.
    """

    found: dict[tuple[str, str, str, str], Fault] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        file: str,
        column: str,
        *,
        expected: str,
        remedy: str,
        rows: int,
        values: Iterable[str] = (),
        met: str = "none",
    ) -> None:
        """``rows`` rows of ``column`` are not as ``expected``: ``values`` are among them, or without any, ``met``."""
        if rows:
            self.found.setdefault((file, column, expected, remedy), Fault(met=met)).add(rows, values)

    @property
    def lines(self) -> list[str]:
        """A line for each."""
        return [
            f"{file}: column {column}: expected {expected}, got {fault}; {remedy}."
            for (file, column, expected, remedy), fault in self.found.items()
        ]

    def require_none(self) -> None:
        """:class:`DataError` with every fault."""
        if self.found:
            raise DataError("\n".join(self.lines))
