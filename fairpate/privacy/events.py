"""Events: everything that touches private data, each with the unit it protects and the neighbouring relation.

:mod:`fairpate.privacy.accountant` prices these, and the events of other modules of this package.
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
        """The unit whose change the price covers: ``record``, all records of a ``person``, ``sensitive attribute``."""
        ...

    @property
    def relation(self) -> Relation:
        """The difference between neighbouring data sets: one unit added or removed, or replaced."""
        ...

    @property
    def noun(self) -> str:
        """Singular name of the event for pages and statements; the words before `` of `` take the plural s."""
        ...

    @property
    def data_dependent(self) -> bool:
        """True if the price is computed from private values and must stay with the operator."""
        ...


class SpentError(ValueError):
    """An error that depends on a release: it ends the work, its message reveals the release, and ``events`` are spent.

    ``noise`` is the label of the noise source.
    """

    def __init__(self, cause: ValueError, events: Sequence[Event], noise: str) -> None:
        super().__init__(str(cause))
        self.events, self.noise = tuple(events), noise


@contextmanager
def spent(events: Sequence[Event], *, noise: str) -> Iterator[None]:
    """Turn a ValueError raised after the release of ``events`` into a SpentError, so that they are still charged."""
    try:
        yield
    # A ValueError's message depends on the release. Any other error is a fault of the program, and passes unchanged.
    except ValueError as error:
        raise SpentError(error, events, noise) from error


class CountedEvent:
    """``count`` times the same; a field of the event, in the order in which statements list it."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"Expected count >= 0, got {self.count}.")


@dataclass(frozen=True, kw_only=True)
class TeacherEvent:
    """One ``unit`` touches one teacher, and so moves at most one vote per query."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class ThresholdChecks(CountedEvent, TeacherEvent):
    """``count`` noisy comparisons of the largest vote count with a finite threshold, passed or not."""

    noun: ClassVar[str] = "noisy count of teachers who agree"
    count: int
    threshold_stddev_votes: float


@dataclass(frozen=True, kw_only=True)
class NoisyArgmaxes(CountedEvent, TeacherEvent):
    """``count`` noisy argmaxes that ran, including those with labels that were withheld.

    With ``ThresholdChecks``, the realised charges of confident queries: sound as what a filter with a limit fixed in
    advance has spent, since each step's charge is known before it runs.
    """

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    noise_stddev_votes: float


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmaxQueries(CountedEvent, TeacherEvent):
    """``count`` Confident-GNMax queries submitted, both steps charged for each: holds for any votes."""

    noun: ClassVar[str] = "noisy vote of teachers"
    count: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float


# By identity: an array can neither be compared in one bool nor hashed.
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
    # The noise that is drawn is discrete; the continuous tail is for comparison with published numbers.
    tail: Tail = "discrete"


@dataclass(frozen=True, kw_only=True)
class PoissonGaussians(CountedEvent):
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
        super().__post_init__()
        # `not >=` refuses NaN as well.
        if not self.noise_multiplier >= 0 or not 0 < self.sampling_rate <= 1:
            raise ValueError(
                "Expected noise_multiplier >= 0 and 0 < sampling_rate <= 1, got "
                f"{self.noise_multiplier} and {self.sampling_rate}."
            )


def of_unit(event: Any, unit: Unit) -> Any:
    """The same event at the same price, with ``unit`` (such as a person) in place of a record.

    TypeError for an event that is priced for one unit alone.
    """
    if event.unit == unit:
        return event
    # A unit that is no field belongs to the definition of the event: its price holds for no other unit.
    if "unit" not in {column.name for column in fields(event)}:
        raise TypeError(f"{type(event).__name__} is priced per {event.unit} alone, not per {unit}.")
    return replace(event, unit=unit)
