"""What the entries of a ledger mean: reservations, their outcomes, publications of what they cost."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.chain import EntryKind
from aggregator.mechanism import Outcome, outcome
from fairpate.privacy.smooth_sensitivity import SanitisedRdp, SmoothRelease
from fairpate.types import IntArray


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One query, charged in full. ``votes`` are the teachers' counts per class; ``number`` counts reservations."""

    number: int
    key: str
    group: int
    votes: tuple[int, ...]


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
    """What the entries of a ledger add up to. By reservation number, but for ``votes``: a block per entry."""

    keys: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    votes: list[IntArray] = field(default_factory=list)
    outcomes: list[Outcome | None] = field(default_factory=list)
    outcome_of: dict[str, Outcome] = field(default_factory=dict)
    publications: list[Publication] = field(default_factory=list)

    def apply(self, kind: EntryKind, payload: dict[str, Any]) -> None:
        """Take in one stored entry."""
        if kind == "publish":
            price = SanitisedRdp(**{**payload["price"], "release": SmoothRelease(**payload["price"]["release"])})
            self.publications.append(Publication(num_reservations=payload["num_reservations"], price=price))
        elif kind == "reserve":
            keys = payload["keys"].split()
            self.reserve(keys, payload["groups"], _votes_from(payload["votes"], len(keys)))
        else:
            self.settle(payload["first"], [_outcome_from(word) for word in payload["outcomes"]])

    def reserve(self, keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray) -> None:
        """Further reservations, open as yet."""
        self.keys += keys
        self.groups += groups
        self.votes.append(votes_QC)
        self.outcomes += [None] * len(keys)

    def settle(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """The reservations from number ``first`` on have their outcomes."""
        last = first + len(outcomes)
        self.outcomes[first:last] = outcomes
        self.outcome_of.update(zip(self.keys[first:last], outcomes, strict=True))

    def charges(self) -> tuple[Charge, ...]:
        """Every reservation and what became of it."""
        votes = (votes_C for block_QC in self.votes for votes_C in block_QC.tolist())
        columns = zip(self.keys, self.groups, votes, self.outcomes, strict=True)
        return tuple(
            Charge(reservation=Reservation(number=number, key=key, group=group, votes=tuple(votes_C)), outcome=settled)
            for number, (key, group, votes_C, settled) in enumerate(columns)
        )


def reserve_entry(keys: Sequence[str], groups: Sequence[int], votes_QC: IntArray) -> dict[str, Any]:
    """What is stored of further reservations. ValueError for a key that :meth:`LedgerState.apply` would not find."""
    words = " ".join(keys)
    if len(words.split()) != len(keys):
        raise ValueError("Expected keys without white space.")
    return {"groups": groups, "keys": words, "votes": _votes_text(votes_QC)}


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


def _votes_from(text: str, num_queries: int) -> IntArray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(num_queries, -1).astype(np.int64)
