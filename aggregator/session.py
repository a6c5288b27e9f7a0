"""One querying session: votes in, answers out, with the ledger between the two.

Reserve, draw, commit, release, in this order and for a block of queries at a time: the reservation of a whole block is
durable before its first noise is drawn, and no answer of a block leaves before all its outcomes are durable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aggregator.ledger import Ledger, Reservation
from aggregator.mechanism import Outcome, confident_fair_gnmax
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.types import Answer, LabelledSet, Refusal, RefusalReason, VoteBatch


def query_key(features: npt.NDArray[np.generic], group: int) -> str:
    """What a query is: the hash of its features and its public group. The same content is the same query."""
    digest = hashlib.sha256(f"{features.dtype.str}{features.shape}{group}".encode())
    digest.update(np.ascontiguousarray(features).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """Answers and refusals in the order asked, and the part of them that may train a student."""

    replies: tuple[Answer | Refusal, ...]
    labelled: LabelledSet

    def count(self, reason: RefusalReason) -> int:
        """How many queries were refused for ``reason``."""
        return sum(isinstance(reply, Refusal) and reply.reason == reason for reply in self.replies)


def answer_queries(
    batch: VoteBatch,
    *,
    keys: list[str],
    ledger: Ledger,
    source: NoiseSource,
    block_size: int = 64,
    on_progress: Callable[[int], None] = lambda _: None,
) -> SessionResult:
    """Ask every query of ``batch`` in order; ``keys[i]`` identifies query i (see :func:`query_key`).

    A query that already has an outcome gets that one: nothing is drawn or charged. ``on_progress`` hears how many
    queries of the batch are done.
    """
    if source.label != ledger.terms.noise:
        raise ValueError(f"Expected a {ledger.terms.noise} source for this ledger, got {source.label}.")
    gate = _resumed_gate(ledger)
    for block in _blocks(len(keys), block_size):
        _answer_block(batch, keys, block, ledger, gate, source)
        on_progress(block.stop)
    return _collect(batch, keys, ledger)


def _resumed_gate(ledger: Ledger) -> DemographicParityGate:
    terms = ledger.terms
    return DemographicParityGate(
        terms.gate,
        num_groups=terms.num_groups,
        num_classes=terms.num_classes,
        counts_GC=np.array(ledger.counts_GC, dtype=np.int64),
    )


def _blocks(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))


def _answer_block(
    batch: VoteBatch, keys: list[str], block: range, ledger: Ledger, gate: DemographicParityGate, source: NoiseSource
) -> None:
    new = {keys[i]: i for i in reversed(block) if ledger.outcome(keys[i]) is None}  # the first of equal keys
    asked = sorted(new.values())
    queries = [(keys[i], int(batch.groups_Q[i]), batch.votes_QC[i].tolist()) for i in asked]
    outcomes: dict[Reservation, Outcome] = {}
    for reservation in ledger.reserve(queries):
        outcomes[reservation] = confident_fair_gnmax(
            np.array(reservation.votes, dtype=np.int64),
            group=reservation.group,
            gate=gate,
            parameters=ledger.terms.mechanism,
            source=source.derive(reservation.key),
        )
    ledger.commit(outcomes)


def _collect(batch: VoteBatch, keys: list[str], ledger: Ledger) -> SessionResult:
    replies: list[Answer | Refusal] = []
    answered: list[int] = []
    for i, (record_id, key) in enumerate(zip(batch.record_ids, keys, strict=True)):
        outcome = ledger.outcome(key)
        assert outcome is not None
        if outcome.verdict == "answer":
            assert outcome.label is not None
            replies.append(Answer(record_id=record_id, label=outcome.label))
            answered.append(i)
        else:
            replies.append(Refusal(record_id=record_id, reason=outcome.verdict))
    labels = [reply.label for reply in replies if isinstance(reply, Answer)]
    labelled = LabelledSet(
        record_ids=tuple(batch.record_ids[i] for i in answered),
        labels=np.array(labels, dtype=np.int64),
        groups=np.asarray(batch.groups_Q)[answered].astype(np.int64),
    )
    return SessionResult(replies=tuple(replies), labelled=labelled)
