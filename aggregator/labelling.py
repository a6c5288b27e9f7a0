"""A batch of public queries through a session: what came of each, and the labels that may train a student.

The queries of a run are asked in their order, a block of them at a time, with the votes of a :class:`Ballot`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from aggregator.ledger.terms import LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import AggregatorSession, Query, Reply
from fairpate.types import Answer, IntArray, LabelledSet, Refusal, RefusalReason


class Ballot(Protocol):
    """Public queries and who votes on them, as :class:`fairpate.types.VoteBatch` holds them; private.

    Where voters are drawn anew for each query, votes exist from the moment they are asked for.
    """

    @property
    def record_ids(self) -> Sequence[str]:
        """The public name of each query."""
        ...

    @property
    def groups_Q(self) -> IntArray:
        """The public group of each query."""
        ...

    @property
    def ensemble(self) -> str:
        """Who votes: a digest of what determines the votes."""
        ...

    def counts(self, rows: Sequence[int]) -> IntArray:
        """``votes_QC`` on the queries in ``rows``; for one answer each."""
        ...

    def take(self, rows: Sequence[int]) -> Self:
        """The queries in ``rows``, in their order."""
        ...


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """Answers and refusals in the order asked, and the part of them that may train a student.

    ``replies`` leaves out the ``over_budget`` queries, for which nothing was charged or drawn.
    """

    replies: tuple[Answer | Refusal, ...]
    labelled: LabelledSet
    over_budget: int = 0

    @property
    def num_queries(self) -> int:
        """How many were put to the session, those without room included."""
        return len(self.replies) + self.over_budget

    @classmethod
    def joined(cls, results: Sequence[SessionResult]) -> SessionResult:
        """Several results one after the other."""
        labelled = [result.labelled for result in results]
        return cls(
            replies=tuple(reply for result in results for reply in result.replies),
            labelled=LabelledSet(
                record_ids=tuple(record_id for part in labelled for record_id in part.record_ids),
                labels=np.concatenate([part.labels for part in labelled]),
                groups=np.concatenate([part.groups for part in labelled]),
                counts=_joined([part.counts for part in labelled]),
                chances=_joined([part.chances for part in labelled]),
            ),
            over_budget=sum(result.over_budget for result in results),
        )

    def count(self, reason: RefusalReason) -> int:
        """How many queries were refused for ``reason``."""
        return sum(isinstance(reply, Refusal) and reply.reason == reason for reply in self.replies)


def answer_queries(
    batch: Ballot,
    *,
    keys: Sequence[str],
    session: AggregatorSession,
    block_size: int = 256,
    on_progress: Callable[[int], None] = lambda _: None,
) -> SessionResult:
    """Ask every query of ``batch`` in order, with its votes; ``keys[i]`` identifies query i.

    ``on_progress`` hears how many queries of the batch are done.
    """
    # Reversed, so that the first of equal keys counts.
    row_of = {key: row for row, key in reversed(list(enumerate(keys)))}
    queries = [
        Query(key=key, group=group, record_id=record_id)
        for key, group, record_id in zip(keys, batch.groups_Q.tolist(), batch.record_ids, strict=True)
    ]
    replies: list[Reply] = []
    for start in range(0, len(queries), block_size):
        replies += session.ask(
            queries[start : start + block_size], lambda new: batch.counts([row_of[query.key] for query in new])
        )
        on_progress(len(replies))
    return _collect(queries, replies, session.terms)


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _collect(queries: Sequence[Query], replies: Sequence[Reply], terms: LedgerTerms) -> SessionResult:
    submitted = [(query, reply) for query, reply in zip(queries, replies, strict=True) if isinstance(reply, Outcome)]
    answered = [(query, reply) for query, reply in submitted if reply.label is not None]
    counts = None
    if terms.mechanism.releases == "counts":
        rows = [reply.counts for _, reply in answered]
        counts = np.array(rows, dtype=np.int64).reshape(len(rows), terms.num_classes)
    labelled = LabelledSet(
        record_ids=tuple(query.record_id for query, _ in answered),
        labels=np.array([reply.label for _, reply in answered], dtype=np.int64),
        groups=np.array([query.group for query, _ in answered], dtype=np.int64),
        counts=counts,
        chances=None if counts is None else terms.mechanism.chances(counts, num_teachers=terms.num_teachers),
    )
    return SessionResult(
        replies=tuple(_published(query, reply) for query, reply in submitted),
        labelled=labelled,
        over_budget=len(replies) - len(submitted),
    )


def _published(query: Query, reply: Outcome) -> Answer | Refusal:
    if reply.verdict == "answer":
        assert reply.label is not None
        return Answer(record_id=query.record_id, label=reply.label)
    return Refusal(record_id=query.record_id, reason=reply.verdict)
