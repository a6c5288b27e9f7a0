"""What `fairpate compare` adds to the schema of :mod:`fairpate.config`: methods, data sets, seeds and grids.

A sweep names no setting of its own: everything in ``settings`` and ``grid`` is a field of some method, checked there.
For one cell they are laid over each other in this order: the configuration that `fairpate run` starts from, the
sweep's, the data set's and the method's; what the cell's method does not read is left out.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from fairpate.config import Count, CountOrZero, NotNegative, Positive, RayConfig, Section, Seed
from fairpate.types import DEFAULT_NOTION, NotionName

Settings = dict[str, Any]


def flat_grid(values: Any, prefix: str = "") -> Any:
    """Dotted names for nested ones; what stands later wins."""
    if not isinstance(values, dict):
        return values
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        flat.update(flat_grid(value, path) if isinstance(value, dict) else {path: value})
    return flat


def axis_fields(axis: str) -> list[str]:
    """The fields that move together along one axis."""
    return [field.strip() for field in axis.split(",")]


def overlapping(one: str, other: str) -> bool:
    """Whether two axes, or two fields, set the same field or a part of it."""
    pairs = itertools.product(axis_fields(one), axis_fields(other))
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a, b in pairs)


def _apart(grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for one, other in itertools.combinations(grid, 2):
        if overlapping(one, other):
            raise ValueError(f"Expected axes that share no field, got {one!r} and {other!r}; leave one out.")
    return grid


Grid = Annotated[
    dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(flat_grid), AfterValidator(_apart)
]
"""Dotted fields, each with the values that it takes; a cell for every combination. ``first, second`` move together."""


class SweepPart(Section):
    """What one method or one data set adds."""

    settings: Settings = Field(default_factory=dict, description="Sections, or dotted fields, with one value.")
    grid: Grid = Field(default_factory=dict, description="Dotted fields with a list of values each.")


class DataSetPart(SweepPart):
    """What one data set adds; its name is that of the data set unless ``settings`` name another."""

    file: Path | None = Field(
        None,
        description="Configuration to start from, seen from the sweep's file; null: what fits the data set, as in "
        "`fairpate run` without a configuration.",
    )


class MethodPart(SweepPart):
    """What one method adds, and where it runs."""

    data_sets: tuple[str, ...] | None = Field(None, description="Names of data sets to run it on; null: all.")


class TasksConfig(Section):
    """What one cell reserves of a node. Where no node has that, ``ray.wait_for_nodes_s`` says how long to wait."""

    num_cpus: Positive = Field(1.0, description="CPUs, possibly a fraction.")
    num_gpus: NotNegative = Field(0.0, description="GPUs, possibly a fraction.")
    max_retries: CountOrZero = Field(2, description="Times a cell is tried again whose worker died.")
    max_minutes: Positive | None = Field(None, description="After which a cell counts as failed; null: never.")
    torch_threads: Count = Field(1, description="Threads of one cell.")


class SweepConfig(Section):
    """Methods x data sets x seeds x grids.

    Where several grids name the same field, the method's is taken, then the data set's. A field of the sweep or of a
    data set varies for the methods that read it.
    """

    out: Path | None = Field(None, description="Folder of the sweep; null: named after the file.")
    seeds: tuple[Seed, ...] = Field((0,), min_length=1)
    split_by_seed: bool = Field(True, description="Divide the records anew for each seed; false: as data.seed says.")
    settings: Settings = Field(default_factory=dict, description="For every cell.")
    grid: Grid = Field(default_factory=dict, description="For every cell.")
    data_sets: dict[str, DataSetPart] = Field(min_length=1, description="By the name that results carry.")
    methods: dict[str, MethodPart] = Field(min_length=1, description="By name; a list where none has settings.")
    notion: NotionName = Field(
        DEFAULT_NOTION, description="Of fairness: what page, figures and tables show first; every cell records all."
    )
    ray: RayConfig = Field(RayConfig(), description="The cluster that the sweep runs on.")
    tasks: TasksConfig = TasksConfig()
    publish_unprotected: bool = Field(
        False, description="Count results of methods without privacy as public: right for public benchmark data only."
    )

    @field_validator("data_sets", "methods", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return {name: {} for name in value}
        if isinstance(value, dict):
            return {name: {} if part is None else part for name, part in value.items()}
        return value
