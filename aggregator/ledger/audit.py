"""Reading a ledger without being its writer: is it whole, what does it hold, a copy of it for other tools.

Everything here verifies every entry first, needs no lock and writes nothing beside the ledger, so that it may run while
a service writes. All of it is for the operator: rows hold votes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from aggregator.ledger.budget import epsilon_data_independent
from aggregator.ledger.chain import Head
from aggregator.ledger.entries import Charge, LedgerState, OwnLimit
from aggregator.ledger.files import LedgerError
from aggregator.ledger.ledger import read_ledger
from aggregator.ledger.stores import Place, shown
from aggregator.ledger.terms import LedgerTerms
from fairpate.files import write_atomically
from fairpate.meaning import delta_text
from fairpate.strict_json import strict
from fairpate.types import Budget, UserError


@dataclass(frozen=True, kw_only=True)
class VerifiedLedger:
    """A ledger whose chain holds, in numbers. ``open`` reservations were left by a crash: charged, never answered."""

    entries: int
    head: str
    reservations: int
    queries: int
    answered: int
    refused: int
    open: int
    publications: int
    epsilon_submitted: float
    delta: float
    budget: str
    noise: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One reservation, what became of it and who asked; ``verdict`` is ``open`` where a crash left it so."""

    number: int
    key: str
    group: int
    verdict: str
    label: int | None
    votes: tuple[int, ...]
    caller: str
    request: str
    at_s: float


def stored_limits(place: Place) -> Mapping[str, OwnLimit]:
    """What each caller may spend, as the ledger has it. LedgerError where an entry was changed."""
    return _read(place, None)[1].limits


def verify(place: Place, *, anchor: Place | None = None) -> VerifiedLedger:
    """Check every entry against its predecessor, and those that were noted as last. LedgerError if one fails."""
    terms, state, head = _read(place, anchor)
    verdicts = Counter("open" if settled is None else settled.verdict for settled in state.outcomes)
    return VerifiedLedger(
        entries=head.number,
        head=head.digest,
        reservations=len(state.keys),
        # Fewer than reservations where a query whose first one a crash left open was asked again.
        queries=len(set(state.keys)),
        answered=verdicts["answer"],
        refused=verdicts["confidence"] + verdicts["fairness"] + verdicts["free"],
        open=verdicts["open"],
        publications=len(state.publications),
        epsilon_submitted=epsilon_data_independent(
            terms, num_queries=len(state.keys), num_publications=len(state.publications)
        ),
        delta=terms.budget.delta,
        budget=_budget_text(terms.budget),
        noise=terms.noise,
    )


def rows(place: Place, *, anchor: Place | None = None) -> Sequence[Row]:
    """Every reservation in the order it was made. LedgerError as :func:`verify`."""
    terms, state, _ = _read(place, anchor)
    return [_row(charge) for charge in state.charges(terms.num_classes)]


def export(place: Place, out: Path) -> None:
    """Write terms and rows to ``out``, whole or not at all: ``.parquet`` (terms in its metadata) or ``.json``.

    LedgerError as :func:`verify`; UserError for another ending or where something is already.
    """
    if out.suffix not in (".parquet", ".json"):
        raise UserError(f"{out}: expected a name that ends in .parquet or .json.")
    if out.exists():
        raise UserError(f"{out}: is there already; remove it, or give another name.")
    terms, state, _ = _read(place)
    found = [asdict(_row(charge)) for charge in state.charges(terms.num_classes)]
    write = _write_json if out.suffix == ".json" else _write_parquet
    write_atomically(out, lambda unfinished: write(unfinished, terms.to_json(), found), private=True)


def _read(place: Place, anchor: Place | None = None) -> tuple[LedgerTerms, LedgerState, Head]:
    stored, _, state, head = read_ledger(place, anchor)
    return _terms_of(stored, shown(place)), state, head


def _terms_of(stored: dict[str, Any], name: str) -> LedgerTerms:
    try:
        return LedgerTerms.from_json(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"{name}: its terms are not those of a ledger ({error}); restore it from a copy.") from error


def _row(charge: Charge) -> Row:
    reservation, settled = charge.reservation, charge.outcome
    return Row(
        number=reservation.number,
        key=reservation.key,
        group=reservation.group,
        verdict="open" if settled is None else settled.verdict,
        label=None if settled is None else settled.label,
        votes=reservation.votes,
        caller=reservation.asker.caller,
        request=reservation.asker.request,
        at_s=reservation.at_s,
    )


def _budget_text(budget: Budget) -> str:
    limit = f"{budget.max_queries} queries" if budget.epsilon is None else f"epsilon {budget.epsilon:g}"
    return f"{budget.kind}, {limit} at delta {delta_text(budget.delta)}"


_COLUMNS = pa.schema(
    [
        ("number", pa.int64()),
        ("key", pa.string()),
        ("group", pa.int64()),
        ("verdict", pa.string()),
        ("label", pa.int64()),
        ("votes", pa.list_(pa.int64())),
        ("caller", pa.string()),
        ("request", pa.string()),
        ("at_s", pa.float64()),
    ]
)


def _write_parquet(path: Path, terms: dict[str, Any], found: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(found, schema=_COLUMNS.with_metadata({"terms": json.dumps(strict(terms))}))
    pq.write_table(table, path)


def _write_json(path: Path, terms: dict[str, Any], found: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"terms": strict(terms), "rows": found}, allow_nan=False), encoding="utf-8")
