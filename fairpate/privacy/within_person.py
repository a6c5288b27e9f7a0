"""What a release that protects persons guarantees for one record: the person may stay while a record of theirs goes.

Then a person's part of what is released is replaced by another one: an average of clipped gradients turns by up to
twice the bound, a vote moves from one cell to another. A replaced part is two steps, one that takes it out and one that
puts the other in, and Renyi curves of neighbours join by the weak triangle inequality (Mironov 2017, arXiv:1702.07476,
proposition 11, p = q = 2):

    D_a(P || Q) <= (a - 1/2) / (a - 1) D_2a(P || R) + D_(2a - 1)(R || Q).

A Gaussian's curve, linear in a, comes out four times as high, as it does where its sensitivity doubles. Teachers need
none of this: all records of a person reach one teacher, who has one vote with or without any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairpate.privacy.accountant import event_rdp
from fairpate.privacy.events import Event, TeacherEvent, of_unit
from fairpate.privacy.smooth_release import SmoothRelease
from fairpate.types import Relation, Unit


@dataclass(frozen=True, kw_only=True)
class RecordWithinPerson:
    """``by_person``, an event priced for adding or removing a person, for one record of theirs."""

    by_person: Event
    unit: ClassVar[Unit] = "record"
    relation: ClassVar[Relation] = "add or remove one"
    noun: ClassVar[str] = "release by person"
    data_dependent: ClassVar[bool] = False


@event_rdp.register
def _(event: RecordWithinPerson, orders_A: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    out_A, in_A = (event_rdp(event.by_person, orders) for orders in (2 * orders_A, 2 * orders_A - 1))
    return np.asarray((orders_A - 0.5) / (orders_A - 1) * out_A + in_A)


def of_a_record(event: Any) -> Any:
    """What counts for one record of an event that is priced per person; TypeError as :func:`of_unit`.

    Where one is replaced, the event is as it is: a record that another of the same person replaces replaces the person.
    One that another person's replaces changes two persons, which is not covered.
    """
    if isinstance(event, TeacherEvent | SmoothRelease) or event.relation != "add or remove one":
        return of_unit(event, "record")
    # Called for its TypeError: what is priced for persons alone has no price for a record.
    of_unit(event, "record")
    return RecordWithinPerson(by_person=event)
