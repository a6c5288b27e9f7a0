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

    @property
    def relation(self) -> Relation:
        """The difference between neighbouring data sets: one unit added or removed, or replaced."""

    @property
    def noun(self) -> str:
        """Singular name of the event for pages and statements; the words before `` of `` take the plural s."""

    @property
    def data_dependent(self) -> bool:
        """True if the price is computed from private values and must stay with the operator."""


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
    """An event that happened ``count`` times. Subclasses declare the field themselves, at the place where statements
    list it.

    ValueError for a sampling rate outside (0, 1], a norm below 1, and any other number below 0 except a threshold.
    """

    count: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) or name == "threshold" or (name, value) == ("threshold_stddev_votes", None):
                continue
            if name == "sampling_rate":
                is_valid, expected = 0 < value <= 1, f"0 < {name} <= 1"
            else:
                least = 1 if name == "norm" else 0
                # NaN fails this comparison, and so is refused.
                is_valid, expected = value >= least, f"{name} >= {least}"
            # NaN fails each comparison.
            if not is_valid:
                raise ValueError(f"Expected {expected}, got {value}.")


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

    Together with ``ThresholdChecks``, these are the realised charges of confident queries. Each charge is known before
    its step runs, so a Renyi filter with a limit fixed in advance may admit them.
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


def of_unit(event: Any, unit: Unit) -> Any:
    """The same event at the same price, for ``unit`` (such as a person) instead of a record.

    TypeError for an event that is priced for one unit alone.
    """
    if event.unit == unit:
        return event
    # A unit that is no field belongs to the definition of the event: its price holds for no other unit.
    if "unit" not in {column.name for column in fields(event)}:
        raise TypeError(f"{type(event).__name__} is priced per {event.unit} alone, not per {unit}.")
    if hasattr(event, "trials"):  # of events, each of the same unit
        trials = tuple(tuple(of_unit(each, unit) for each in events) for events in event.trials)
        return replace(event, unit=unit, trials=trials)
    return replace(event, unit=unit)
