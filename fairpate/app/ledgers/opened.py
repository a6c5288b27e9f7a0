"""The ledger of a run, opened only if it holds all that was released; and the statement that a service answers under.

Once anything was released, a ledger that is missing, or lacks a part of it, is never made anew: its charges would be
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aggregator.ledger.budget import (
    epsilon_fixed_beforehand,
)
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.terms import LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import query_key
from fairpate.app.ledgers.place import place_of
from fairpate.app.rundir import RunDirectory, RunDirectoryError, read_json, read_statement, write_json
from fairpate.app.spending.meter import LedgerMeter
from fairpate.app.tables import read_labels
from fairpate.data import Split
from fairpate.strict_json import strict

ANSWERED_BY_SERVICE = (
    "A service answers further queries from the same ledger. ε is the bound that was fixed beforehand for all of them; "
    "a sum with earlier releases is that of the queries submitted so far."
)


def state_for_service(run: RunDirectory, terms: LedgerTerms) -> None:
    """State the bound of the ledger before a service answers from it; a statement that is no smaller stays.

    What the run's own queries cost says too little from the first query of an analyst on.
    """
    statement, bound = read_statement(run), epsilon_fixed_beforehand(terms)
    if bound is None or statement.epsilon is None or bound <= statement.epsilon:
        return
    sums: dict[str, Any] = {
        name: None if (earlier := getattr(statement, name)) is None else max(earlier, bound)
        for name in ("epsilon_with_earlier", "epsilon_adaptive_with_earlier")
    }
    served = replace(statement, epsilon=bound, **sums, remarks=(*statement.remarks, ANSWERED_BY_SERVICE))
    write_json(run.statement, strict(served.to_json()))


def open_ledger(
    run: RunDirectory,
    terms: LedgerTerms,
    queries: Split,
    *,
    create: bool,
    meter: LedgerMeter | None,
    take_over: bool = False,
) -> Ledger:
    """The run's ledger, if it holds all that was released; ``queries`` are the records that the run asks about.

    With ``create``, and only while nothing was released, a missing one is made. From then on ``meter`` counts what it
    charges; ``take_over`` ends another writer, where that can be. RunDirectoryError for a ledger that lacks something,
    LedgerError as :class:`Ledger`.
    """
    released = sorted(run.public.iterdir()) if run.public.exists() else []
    released = [path for path in released if path != run.embedding]  # of public records alone, before any vote
    place = place_of(run)
    if released and place.is_in_folder and not run.ledger.exists():
        raise RunDirectoryError(
            f"{run.ledger}: gone, although {released[0]} was released from it; restore all its files from one copy, or "
            "start a new run folder."
        )
    # Once something was released, a missing ledger is never made again: its charges would be forgotten.
    may_create = create and not released and place.is_in_folder
    ledger = Ledger(place.ledger, terms, create=may_create, anchor=place.anchor, take_over=take_over)
    try:
        # Before the meter, which would settle the odometer to a ledger that lacks what was released.
        _check_released(run, ledger, queries)
        if meter is not None:
            meter.open(ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _check_released(run: RunDirectory, ledger: Ledger, queries: Split) -> None:
    """RunDirectoryError unless the ledger holds every released label and as many queries as the statement prices."""
    _, lost = missing_labels(run, queries, ledger.outcome)
    stated = 0
    if run.statement.exists():
        stated = read_json(run.statement)["queries"]["submitted"]
    if lost or ledger.num_outcomes < stated:
        lacks = f"{lost} labels" if lost else f"{stated - ledger.num_outcomes} of {stated} queries"
        raise RunDirectoryError(
            f"{ledger.name}: lacks {lacks} that were released; restore the ledger's files and the public records of "
            "this run from one copy, or start a new run folder."
        )


def missing_labels(run: RunDirectory, queries: Split, outcome: Callable[[str], Outcome | None]) -> tuple[int, int]:
    """How many labels were released, and how many of them ``outcome``, a ledger's, does not hold."""
    key_of = dict(zip(queries.record_id, keys_of(queries), strict=True))
    released = _released(run)
    # A released record that is no query here has no key, and counts as lost.
    lost = [answer for record_id, answer in released if outcome(key_of.get(record_id, "")) != answer]
    return len(released), len(lost)


def _released(run: RunDirectory) -> Sequence[tuple[str, Outcome]]:
    if not run.labels.exists():
        return ()
    labelled = read_labels(run.labels)
    counts = [None] * len(labelled.labels) if labelled.counts is None else map(tuple, labelled.counts.tolist())
    answers = [
        Outcome(verdict="answer", label=label, counts=row)
        for label, row in zip(labelled.labels.tolist(), counts, strict=True)
    ]
    return list(zip(labelled.record_ids, answers, strict=True))


def keys_of(queries: Split) -> list[str]:
    """What identifies each record as a query: its content."""
    return [query_key(x, group) for x, group in zip(queries.x.numpy(), queries.z.tolist(), strict=True)]
