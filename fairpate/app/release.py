"""The one way from ``private/`` to ``public/``: votes go in, labels and a priced statement come out.

The ledger decides what a repeated run may do. It is opened only if it is the ledger behind the labels that were
released and is asked the same queries; then asking again returns what it holds and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.ledger import Charge, Ledger, LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import answer_queries, query_key
from fairpate.app.progress import Advance
from fairpate.app.reporting import Spending
from fairpate.app.rundir import RunDirectory, RunDirectoryError, write_json
from fairpate.app.tables import read_labels, write_labels
from fairpate.config import ConfigError, RunConfig
from fairpate.data import Dataset, Split
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.types import LabelledSet, PrivacyStatement, VoteBatch


@dataclass(frozen=True, kw_only=True)
class Release:
    """What came out of the aggregator: labels and a statement for everybody, spending for the operator."""

    labelled: LabelledSet
    statement: PrivacyStatement
    spending: Spending


def choose_queries(dataset: Dataset, config: RunConfig) -> Split:
    """The first public records, each content once: equal records are one query."""
    first_of: dict[str, int] = {}
    for row, key in enumerate(_keys(dataset.public)):
        first_of.setdefault(key, row)
    wanted = config.aggregator.num_queries or len(first_of)
    if wanted > len(first_of):
        raise ConfigError(
            f"aggregator.num_queries: {wanted} queries asked, {len(first_of)} different public records there; "
            "lower it, or raise data.num_public."
        )
    return dataset.public.take(list(first_of.values())[:wanted])


def release_labels(
    run: RunDirectory, config: RunConfig, dataset: Dataset, queries: Split, votes: VoteBatch, on_progress: Advance
) -> Release:
    """Ask the aggregator every query, and write labels and statement. However often it runs, one release results."""
    settings, keys = config.aggregator, _keys(queries)
    source: NoiseSource = OsEntropy() if settings.noise == "os_entropy" else SeededSource(config.seed)
    terms = LedgerTerms(
        mechanism=settings.mechanism,
        gate=settings.gate,
        num_teachers=config.teachers.num_teachers,
        num_classes=dataset.num_classes,
        num_groups=dataset.num_groups,
        noise=source.label,
        ensemble=votes.ensemble,
    )
    with _open_ledger(run, terms, dict(zip(queries.record_id, keys, strict=True))) as ledger:
        session = answer_queries(
            votes, keys=keys, ledger=ledger, source=source, on_progress=lambda done: on_progress(done, len(keys))
        )
        charges = ledger.charges
    charges_of: dict[str, list[Charge]] = {key: [] for key in keys}
    for charge in charges:
        charges_of[charge.reservation.key].append(charge)
    spending = Spending(
        session=session,
        charges_Q=list(charges_of.values()),
        terms=terms,
        target_delta=settings.target_delta,
    )
    statement = state_privacy(spending)
    write_labels(session.labelled, run.labels)
    write_json(run.statement, statement.to_json())
    return Release(labelled=session.labelled, statement=statement, spending=spending)


def state_privacy(spending: Spending) -> PrivacyStatement:
    """The publishable claim: every reservation at its full cost, whatever came of it."""
    session, event = spending.session, spending.posed(0, len(spending.charges_Q))
    price = accountant.epsilon([event], target_delta=spending.target_delta)
    return PrivacyStatement(
        unit=event.unit,
        relation=event.relation,
        delta=price.delta,
        epsilon_data_independent=price.epsilon,
        epsilon_sanitised=None,
        queries_posed=len(session.replies),
        answered=len(session.labelled.record_ids),
        rejected_confidence=session.count("confidence"),
        rejected_fairness=session.count("fairness"),
        refused_free=session.count("free"),
        noise=spending.terms.noise,
        tuning_accounted=False,
    )


def _open_ledger(run: RunDirectory, terms: LedgerTerms, key_of: dict[str, str]) -> Ledger:
    if run.labels.exists() and not run.ledger.exists():
        raise RunDirectoryError(
            f"{run.ledger}: gone, although {run.labels} was released from it; restore it, or start a new run folder."
        )
    ledger = Ledger(run.ledger, terms)
    unknown = {charge.reservation.key for charge in ledger.charges} - set(key_of.values())
    lost = [record_id for record_id, label in _released(run) if not _knows(ledger, key_of.get(record_id), label)]
    if unknown or lost:
        ledger.close()
        raise RunDirectoryError(
            f"{run.ledger}: holds {len(unknown)} queries that are not asked here, and lacks {len(lost)} labels that "
            "were released; restore the ledger and the public records of this run, or start a new run folder."
        )
    return ledger


def _released(run: RunDirectory) -> Sequence[tuple[str, int]]:
    if not run.labels.exists():
        return ()
    labelled = read_labels(run.labels)
    return list(zip(labelled.record_ids, labelled.labels.tolist(), strict=True))


def _knows(ledger: Ledger, key: str | None, label: int) -> bool:
    return key is not None and ledger.outcome(key) == Outcome(verdict="answer", label=label)


def _keys(queries: Split) -> list[str]:
    return [query_key(x, group) for x, group in zip(queries.x.numpy(), queries.z.tolist(), strict=True)]
