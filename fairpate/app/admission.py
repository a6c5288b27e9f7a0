"""Posing queries in rounds: after each, a student of the labels released so far says what to pose next.

Everything between two rounds is computed from public records and released labels, and is a function of them and of the
run's seed; so it costs nothing, and a run that was interrupted poses the same queries again and gets the stored
answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from aggregator.admission import admit_queries
from aggregator.session import AggregatorSession, SessionResult, answer_queries
from fairpate.config import AdmissionConfig, RunConfig, StudentConfig
from fairpate.data import Dataset, Split
from fairpate.fairness.gate import DemographicParityGate
from fairpate.nn.predict import predict_probabilities
from fairpate.types import LabelledSet, VoteBatch
from student.train import PublicRecords, train_student


def answer_admitted(
    votes: VoteBatch,
    *,
    keys: Sequence[str],
    queries: Split,
    session: AggregatorSession,
    config: RunConfig,
    dataset: Dataset,
    seed: int,
    block_size: int,
    on_progress: Callable[[int], None],
) -> SessionResult:
    """Pose ``aggregator.num_queries`` of the candidates in ``queries``, or fewer where no more would be accepted.

    The first round takes them in their order, for nothing is known yet.
    """
    settings = config.aggregator.admission
    assert settings is not None
    assert config.aggregator.num_queries is not None
    total, waiting = config.aggregator.num_queries, list(range(len(keys)))
    results: list[SessionResult] = []
    for number in range(settings.rounds):
        posed = sum(result.num_queries for result in results)
        size = math.ceil((total - posed) / (settings.rounds - number))
        chosen = waiting[:size]
        if number:
            labelled = SessionResult.joined(results).labelled
            chosen = _choose(waiting, labelled, queries, config, dataset, size=size, seed=seed + number)
        results.append(
            answer_queries(
                _rows(votes, chosen),
                keys=[keys[row] for row in chosen],
                session=session,
                block_size=block_size,
                on_progress=lambda done, posed=posed: on_progress(posed + done),  # type: ignore[misc]
            )
        )
        waiting = sorted(set(waiting) - set(chosen))
    return SessionResult.joined(results)


def _choose(
    waiting: Sequence[int],
    labelled: LabelledSet,
    queries: Split,
    config: RunConfig,
    dataset: Dataset,
    *,
    size: int,
    seed: int,
) -> list[int]:
    """The rows to pose next."""
    settings = config.aggregator.admission
    assert settings is not None
    if not waiting or not len(labelled.labels):
        return list(waiting[:size])
    counts_GC = np.zeros((dataset.num_groups, dataset.num_classes), dtype=np.int64)
    np.add.at(counts_GC, (labelled.groups, labelled.labels), 1)
    gate = DemographicParityGate(
        config.aggregator.gate, num_groups=dataset.num_groups, num_classes=dataset.num_classes, counts_GC=counts_GC
    )
    rows = torch.tensor(waiting)
    admitted = admit_queries(
        _predict(labelled, queries, rows, config, settings, num_classes=dataset.num_classes, seed=seed),
        queries.z[rows].numpy(),
        gate=gate,
        count=size,
        uncertain_first=settings.uncertain_first,
    )
    return [waiting[row] for row in admitted]


def _predict(
    labelled: LabelledSet,
    queries: Split,
    rows: torch.Tensor,
    config: RunConfig,
    settings: AdmissionConfig,
    *,
    num_classes: int,
    seed: int,
) -> np.ndarray:
    row_of = {record_id: row for row, record_id in enumerate(queries.record_id)}
    answered = torch.tensor([row_of[record_id] for record_id in labelled.record_ids])
    known = PublicRecords(
        answered_x=queries.x[answered], labels=torch.from_numpy(labelled.labels), unlabelled_x=queries.x[:0]
    )
    network = train_student(
        known,
        StudentConfig(model=config.student.model, fit=settings.fit or config.student.fit),
        num_classes=num_classes,
        generator=torch.Generator().manual_seed(seed),
    )
    return predict_probabilities(network, queries.x[rows]).double().numpy()


def _rows(votes: VoteBatch, rows: Sequence[int]) -> VoteBatch:
    return VoteBatch(
        record_ids=[votes.record_ids[row] for row in rows],
        groups_Q=votes.groups_Q[list(rows)],
        votes_QC=votes.votes_QC[list(rows)],
        ensemble=votes.ensemble,
    )
