"""The parts of a declaration that are neither a feature nor a class: choices, rows, names, persons."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from fairpate.config import Count, Section
from fairpate.data.declared.columns import Interval, Texts, When
from fairpate.data.entry import Option
from fairpate.data.persons import SEPARATORS


class Choice(Section):
    """An option of a data set, which other parts of the declaration refer to with `when`."""

    default: str = Field(description="Where nothing else is asked for.")
    values: tuple[str, ...] = Field((), description="What it may be; empty: true or false.")
    description: str = Field(description="What it decides, in a sentence.")

    @model_validator(mode="after")
    def _default_is_allowed(self) -> Choice:
        allowed = self.values or ("true", "false")
        if self.default not in allowed:
            raise ValueError(f"Expected a default among {', '.join(allowed)}, got {self.default!r}")
        return self

    @property
    def option(self) -> Option:
        """The option as every data set has them."""
        if self.values:
            return Option(default=self.default, allowed=self.values, description=self.description)
        default = self.default == "true"
        return Option(default=default, allowed=(default, not default), description=self.description)


class Trim(Section):
    """Characters that are not part of a column's values: removed before anything else, but never a whole value."""

    columns: Texts = Field(description="Their names in the file.")
    start: str = Field("", description="Characters removed from the start, such as 0.")
    end: str = Field("", description="Characters removed from the end.")


class Rule(Interval):
    """Which rows are kept: those whose value is in the range and none of `other_than`."""

    column: str = Field(description="Its name in the file.")
    other_than: Texts = Field((), description="Published values of rows that are left out.")
    unknown: Texts = Field(
        (), description="With a range: what means a missing value, beside an empty cell; such rows are left out."
    )
    note: str = Field("", description="Public remark behind the count of rows left out; empty: no remark.")
    when: When = Field({}, description="Options and the value at which the rule holds.")

    @model_validator(mode="after")
    def _leaves_something_out(self) -> Rule:
        if not self.other_than and not self.has_range:
            raise ValueError("Expected a range (above, at_least, below, at_most) or other_than")
        return self


class Identity(Section):
    """What names a record: the publisher's own key, or a hash of its features and label, or of its published text.

    Never the sensitive attribute. Names decide the part and the teacher of a record.
    """

    prefix: str = Field("", description="Begins every name; empty: the name of the data set.")
    key: Texts = Field((), description="Columns that name a record together; empty: its features and label do.")
    text: Texts = Field((), description="Columns whose text is hashed instead of features and label.")
    as_written: bool = Field(
        False,
        description="Whether the text of all declared columns is hashed instead, without groups' and those computed "
        "from them: `30` and `30.0` are then two records.",
    )

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Identity:
        given = [name for name in ("key", "text", "as_written") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"Expected one of key, text and as_written, got {' and '.join(given)}")
        return self


class Person(Section):
    """Who stands behind a record, where several records share a person: what is protected, and no split parts.

    The name of a column alone stands for it.
    """

    column: str = Field(description="Its name in the file; it may not tell the sensitive attribute.")
    prefix: str = Field("person", description="Begins every name.")
    separators: str = Field(
        SEPARATORS,
        description="Characters between several persons in one cell: such a row is refused. Empty: a cell is one name.",
    )
    count: Count | None = Field(None, description="The publisher's count of persons: a public number.")
    when: When = Field({}, description="Options and the value at which persons are protected, and kept together.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value
