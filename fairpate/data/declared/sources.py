"""Which files hold which part of a data set.

Either `records` are divided by a keyed hash of their names, or each part has files of its own; or both: what has files
of its own is not taken from `records`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, model_validator

from fairpate.config import Section
from fairpate.data.declared.columns import When, several
from fairpate.data.entry import Origin, Part, SourceFile, holds

PARTS: tuple[Part, ...] = get_args(Part)


def _as_files(value: Any) -> Any:
    """A path stands for the file there."""
    several_files = several(value)
    if not isinstance(several_files, (list, tuple)):
        return several_files
    return tuple({"path": each} if isinstance(each, str) else each for each in several_files)


Sources = Annotated[tuple[SourceFile, ...], BeforeValidator(_as_files)]


class Files(Section):
    """Each a path below the data folder, a pattern such as `visits-*.csv`, or a list of them."""

    records: Sources = Field((), description="Divided into the parts that have no files of their own.")
    private: Sources = Field((), description="Instead of `records`: what is protected.")
    public: Sources = Field((), description="What is not protected; labels may be missing.")
    validation: Sources = Field((), description="Set aside for choosing settings; empty with `private`: none.")
    test: Sources = Field((), description="What the result is measured on; empty with `private`: it is not measured.")
    pooled: When = Field({}, description="Options and the value at which `test` is divided together with `records`.")

    @model_validator(mode="before")
    @classmethod
    def _is_by_part(cls, values: Any) -> Any:
        if isinstance(values, (str, list, tuple)):
            raise ValueError(f"Expected `records:`, or `private:`, `public:` and `test:`, got {values!r}")  # noqa: TRY004
        return values

    @model_validator(mode="after")
    def _private_records_come_from_one_place(self) -> Files:
        if self.records and self.private:
            raise ValueError("Expected records, which are divided, or private, got both")
        if not self.records and not self.private:
            raise ValueError("Expected records, which are divided, or private, got neither")
        if self.private and not self.public:
            raise ValueError(
                "Expected public with private: name the file of public records, or name the private one `records`, "
                "from which public ones are then set aside"
            )
        if self.pooled and not (self.records and self.test):
            raise ValueError("Expected pooled with records and test only")
        return self

    @property
    def parts(self) -> dict[Part, tuple[SourceFile, ...]]:
        """The files of each part that has any."""
        return {part: files for part in PARTS if (files := getattr(self, part))}

    @property
    def all(self) -> tuple[SourceFile, ...]:
        """Every file, in the order in which they are read."""
        return tuple(file for files in self.parts.values() for file in files)

    def origin(self, part: Part, options: Mapping[str, Any]) -> Origin:
        """Where the records of ``part`` may go."""
        if self.pooled and holds(self.pooled, options):
            return "any"
        if part == "records":
            return "training" if self.test else "any"
        return part
