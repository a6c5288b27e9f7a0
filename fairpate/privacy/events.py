"""What touches private data: events, each with the unit it protects and the neighbouring relation.

:mod:`fairpate.privacy.accountant` prices them, and those of other modules of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from fairpate.types import IntArray, Relation, Tail, Unit


class Event(Protocol):
    """Something that touched private data, with the guarantee it is priced under."""

    @property
    def unit(self) -> Unit:
        """Whose change the price covers: a ``record``, all records of a ``person``, or a ``sensitive attribute``."""
        ...

    @property
    def relation(self) -> Relation:
        """How neighbouring data sets differ in that unit."""
        ...

    @property
    def noun(self) -> str:
        """What one of them is called, on every page; what stands before `` of `` takes the s."""
        ...

    @property
    def data_dependent(self) -> bool:
        """Whether the price is computed from private values and must stay with the operator."""
        ...


class SpentError(ValueError):
    """What a release told ends the work, and whoever reads why has seen it: ``events`` are spent under ``noise``."""

    def __init__(self, cause: ValueError, events: Sequence[Event], noise: str) -> None:
        super().__init__(str(cause))
        self.events, self.noise = tuple(events), noise


@contextmanager
def spent(events: Sequence[Event], *, noise: str) -> Iterator[None]:
    """SpentError for a ValueError from what follows on the release of ``events``."""
    try:
        yield
    except ValueError as error:
        raise SpentError(error, events, noise) from error


@dataclass(frozen=True, kw_only=True)
class TeacherEvent:
    """One ``unit`` touches one teacher, and so moves at most one vote per query."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ThresholdChecks(TeacherEvent):
    """``count`` noisy comparisons of the largest vote count with a finite threshold, whatever their outcome."""

    noun: ClassVar[str] = "noisy count of teachers who agree"
    count: int
    threshold_stddev_votes: float

    def __post_init__(self) -> None:
        _require_count(self.count)


@dataclass(frozen=True, kw_only=True)
class NoisyArgmaxes(TeacherEvent):
    """``count`` noisy argmaxes that ran, whatever became of their labels.

    With ``ThresholdChecks``, the realised charges of confident queries: sound as what a filter with a limit fixed in
    advance has spent, since each step's charge is known before it runs.
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    noise_stddev_votes: float

    def __post_init__(self) -> None:
        _require_count(self.count)


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmaxQueries(TeacherEvent):
    """``count`` Confident-GNMax queries submitted, both steps charged for each: holds for any votes."""

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float

    def __post_init__(self) -> None:
        _require_count(self.count)


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfidentGnmaxVotes(TeacherEvent):
    """Confident-GNMax queries with the votes they drew: every row is one query submitted, answered or not.

    Priced at the exact joint cost of threshold bit and noisy argmax. ``votes_QC``: whole votes, shape (Q, C).
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    data_dependent: ClassVar[bool] = True
    votes_QC: IntArray
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float
    tail: Tail = "discrete"


@dataclass(frozen=True, kw_only=True)
class PoissonGaussians:
    """``count`` Gaussian sums, each over a fresh Poisson sample of the units: records or persons.

    ``noise_multiplier``: standard deviation over the L2 norm that one unit may add. Renyi curves price adding or
    removing one; replacing one is priced by :func:`epsilon_pld` alone.
    """

    noun: ClassVar[str] = "Gaussian sum"
    data_dependent: ClassVar[bool] = False
    count: int
    noise_multiplier: float
    sampling_rate: float
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    def __post_init__(self) -> None:
        _require_count(self.count)
        if not self.noise_multiplier >= 0 or not 0 < self.sampling_rate <= 1:
            raise ValueError(
                "Expected noise_multiplier >= 0 and 0 < sampling_rate <= 1, got "
                f"{self.noise_multiplier} and {self.sampling_rate}."
            )


def _require_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"Expected count >= 0, got {count}.")


def of_unit(event: Any, unit: Unit) -> Any:
    """The same event, priced alike, where all that a ``unit`` holds stands where one record stood.

    TypeError for an event that is priced for one unit alone.
    """
    if event.unit == unit:
        return event
    if "unit" not in {column.name for column in fields(event)}:
        raise TypeError(f"{type(event).__name__} is priced per {event.unit} alone, not per {unit}.")
    return replace(event, unit=unit)
