"""What the charges of a ledger cost by its votes, and which ones cost most: for the operator alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from aggregator.ledger.ledger import Ledger
from aggregator.service.questions import PublicPool
from aggregator.service.writer import Books
from fairpate.privacy import accountant
from fairpate.query_costs import cost_words, dearest, shares_of_worst, votes_matter

_NUM_BINS = 20


def costs_of(books: Books, num_charges: int, pool: PublicPool) -> dict[str, Any]:
    """A :class:`aggregator.service.operator_wire.Costs` of the first charges; the running price has priced them."""
    ledger, cost_Q = books.ledger, books.price.costs(num_charges)
    worst = float(accountant.rdp([ledger.terms.mechanism.worst_case(1)], [books.price.order])[0])
    of_worst_Q = shares_of_worst(cost_Q, np.full(len(cost_Q), worst))
    varies = votes_matter(of_worst_Q, books.price.voted(num_charges))
    total = float(cost_Q.sum())
    return {
        "order": books.price.order,
        "words": cost_words(cost_Q, of_worst_Q, varies=varies),
        "bins": np.histogram(of_worst_Q, bins=_NUM_BINS, range=(0, 1))[0].tolist() if varies else [],
        "dearest": [
            _charge(ledger, pool, number, of_worst=float(of_worst_Q[number]), of_total=float(cost_Q[number]) / total)
            for number in (dearest(cost_Q) if varies else ())
        ],
    }


def _charge(ledger: Ledger, pool: PublicPool, number: int, *, of_worst: float, of_total: float) -> dict[str, Any]:
    (_, group, found), asked = ledger.charged(number, number + 1)[0], ledger.asked_for(number)
    most, second, *_ = sorted(ledger.votes_QC[number].tolist(), reverse=True)
    return {
        "number": number + 1,
        "group": pool.group_names[group],
        "verdict": "open" if found is None else found.verdict,
        "votes": [most, second],
        "of_worst": of_worst,
        "of_total": of_total,
        "caller": asked.asker.caller,
        "at_s": asked.at_s,
    }
