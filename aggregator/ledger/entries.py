"""What the entries of a ledger mean: reservations and who asked for them, outcomes, publications, limits of one's own.

Every reservation names who asked, in which request, and when. Those of earlier versions, and a run's own queries, name
nobody.
"""

from __future__ import annotations

import base64
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from aggregator.ledger.chain import EntryKind
from aggregator.mechanism import Outcome, outcome
from fairpate.privacy.smooth_release import SanitisedRdp, SmoothRelease
from fairpate.types import IntArray


class Asker(NamedTuple):
    """Who asks: the name of a caller, by which charges are told apart, and a request's id. Both empty: a run itself."""

    caller: str = ""
    request: str = ""


NOBODY = Asker()


class Asked(NamedTuple):
    """Reservations after each other of one request. ``at_s``: seconds since 1970; 0: not known."""

    first: int
    num_queries: int
    asker: Asker
    at_s: float


@dataclass(frozen=True, kw_only=True)
class OwnLimit:
    """What one caller may spend of what all share; None: no limit of one's own.

    ``epsilon`` is for the price of the caller's queries at their worst, at the budget's delta; ``max_queries`` for
    their number, and ``per_day`` for how many at once, refilled evenly over a day. ValueError for a limit that is
    negative, infinite or undefined; nought is one for ``max_queries`` alone.
    """

    epsilon: float | None = None
    max_queries: int | None = None
    per_day: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None or (name == "max_queries" and value == 0):
                continue
            if not 0 < value < float("inf"):
                raise ValueError(f"Expected 0 < {name} < inf, got {value}.")


NO_LIMIT = OwnLimit()


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One query, charged in full. ``votes`` are the teachers' counts per class; ``number`` counts reservations."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]
    asker: Asker = NOBODY
    at_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Charge:
    """A reservation and its outcome; None where a crash left it open: charged, and nothing was released."""

    reservation: Reservation
    outcome: Outcome | None


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What was published of the price of the first ``num_reservations`` reservations; charged as one release."""

    num_reservations: int
    price: SanitisedRdp


@dataclass(kw_only=True)
class LedgerState:
    """What the entries of a ledger add up to. By reservation number, but for ``votes``: blocks, as stored or read.

    ``asked``: who asked for which reservations, in order; ``charged_to`` counts reservations by caller.
    """

    keys: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    votes: list[str | IntArray] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    outcome_of: dict[str, Outcome] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    charged_to: Counter[str] = field(default_factory=Counter)
    limits: dict[str, OwnLimit] = field(default_factory=dict)
    _at_votes: threading.Lock = field(default_factory=threading.Lock)

    def apply(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        """Take in one stored entry."""
        if kind == "publish":
            price = SanitisedRdp(**{**payload["price"], "release": SmoothRelease(**payload["price"]["release"])})
            self.publications.append(Publication(num_reservations=payload["num_reservations"], price=price))
        elif kind == "reserve":
            keys = payload["keys"].split()
            # Entries of earlier versions do not say who asked, nor when.
            asked = payload.get("asked") or [["", "", len(keys)]]
            self.reserve(keys, payload["groups"], payload["votes"], asked, payload.get("at", 0.0))
        elif kind == "limit":
            self.limits[payload["caller"]] = OwnLimit(**payload["limit"])
        else:
            self.settle(payload["first"], [_outcome_from(word) for word in payload["outcomes"]])

    def reserve(
        self,
        keys: Sequence[str],
        groups: Sequence[int],
        votes: IntArray | str,
        asked: Sequence[tuple[str, str, int]],
        at_s: float,
    ) -> None:
        """Further reservations, open as yet, their votes as they are or as stored.

        ``asked``: caller, request, and how many of them, in order.
        """
        first = len(self.keys)
        for caller, request, count in asked:
            self.asked.append(Asked(first, count, Asker(caller, request), at_s))
            self.charged_to[caller] += count
            first += count
        self.groups += groups
        self.votes.append(votes)
        self.outcomes += [None] * len(keys)
        # Last: by their number other threads know how many reservations are there, and each must be whole.
        self.keys += keys

    def settle(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """The reservations from number ``first`` on have their outcomes."""
        last = first + len(outcomes)
        self.outcomes[first:last] = outcomes
        self.outcome_of.update(zip(self.keys[first:last], outcomes, strict=True))

    def votes_QC(self, num_classes: int) -> IntArray:
        """The votes of every reservation. Decoded when they are first asked for: few ever ask."""
        # Of two threads that joined blocks at once, the second would put its own over later ones.
        with self._at_votes:
            count = len(self.votes)
            if count != 1 or isinstance(self.votes[0], str):
                blocks = [_votes_from(b, num_classes) if isinstance(b, str) else b for b in self.votes[:count]]
                joined = np.concatenate([np.zeros((0, num_classes), dtype=np.int64), *blocks])
                # Only what was there then: the writer may have added a block meanwhile.
                self.votes[:count] = [joined]
            first = self.votes[0]
        assert not isinstance(first, str)
        return first

    def charges(self, num_classes: int) -> tuple[Charge, ...]:
        """Every reservation and what became of it."""
        count = len(self.keys)  # the writer may be adding to the other columns
        votes = self.votes_QC(num_classes)[:count].tolist()
        asked = islice(((asked.asker, asked.at_s) for asked in self.asked for _ in range(asked.num_queries)), count)
        columns = zip(self.keys[:count], self.groups[:count], votes, asked, self.outcomes[:count], strict=True)
        return tuple(
            Charge(
                reservation=Reservation(
                    number=number, key=key, group=group, votes=tuple(votes_C), asker=asker, at_s=at_s
                ),
                outcome=settled,
            )
            for number, (key, group, votes_C, (asker, at_s), settled) in enumerate(columns)
        )


def reserve_entry(
    keys: Sequence[str],
    groups: Sequence[int],
    votes_QC: IntArray,
    asked: Sequence[tuple[str, str, int]],
    at_s: float,
) -> dict[str, Any]:
    """What is stored of further reservations. ValueError for a key that :meth:`LedgerState.apply` would not find."""
    words = " ".join(keys)
    if len(words.split()) != len(keys):
        raise ValueError("Expected keys without white space.")
    return {"asked": asked, "at": at_s, "groups": groups, "keys": words, "votes": _votes_text(votes_QC)}


def in_runs(askers: Sequence[Asker]) -> list[tuple[str, str, int]]:
    """Caller, request, and how many after each other."""
    return [(*asker, len(list(equal))) for asker, equal in groupby(askers)]


def commit_entry(first: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is stored of the outcomes of the reservations from number ``first`` on."""
    return {"first": first, "outcomes": [_outcome_word(settled) for settled in outcomes]}


def _outcome_word(settled: Outcome) -> str | int | list[int]:
    """A refusal's verdict, an answer's label, or its label and then the counts that were released with it."""
    if settled.label is None:
        return settled.verdict
    return settled.label if settled.counts is None else [settled.label, *settled.counts]


def _outcome_from(word: Any) -> Outcome:
    if isinstance(word, list):
        return Outcome(verdict="answer", label=word[0], counts=tuple(word[1:]))
    return outcome("answer", word) if isinstance(word, int) else outcome(word)


def _votes_text(votes_QC: IntArray) -> str:
    """Counts as base64 of little-endian 32-bit integers, query by query."""
    return base64.b64encode(votes_QC.astype("<i4").tobytes()).decode("ascii")


def _votes_from(text: str, num_classes: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(-1, num_classes).astype(np.int64)
