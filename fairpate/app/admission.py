"""Queries in rounds: after each, a student of the labels released so far says what to submit next.

Everything between two rounds is computed from public records and released labels, and is a function of them and of the
run's seed; so it costs nothing, and a run that was interrupted submits the same queries again and gets the stored
answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from aggregator.admission import admit_queries
from aggregator.labelling import Ballot, SessionResult, answer_queries
from aggregator.session import AggregatorSession
from fairpate.config import StudentConfig
from fairpate.data import Split
from fairpate.fairness.gate import DemographicParityGate
from fairpate.later import torch
from fairpate.types import GateRule, LabelledSet
from fairpate.votes_config import AdmissionConfig


def answer_admitted(
    votes: Ballot,
    *,
    keys: Sequence[str],
    queries: Split,
    session: AggregatorSession,
    admission: AdmissionConfig,
    total: int,
    gate: GateRule,
    student: StudentConfig,
    num_classes: int,
    num_groups: int,
    seed: int,
    block_size: int,
    on_progress: Callable[[int], None],
) -> SessionResult:
    """Submit ``total`` of the candidates in ``queries``, or fewer where no more would be accepted.

    The first round takes them in their order, for nothing is known yet.
    """
    waiting = list(range(len(keys)))
    learning = StudentConfig(model=student.model, fit=admission.fit or student.fit)
    results: list[SessionResult] = []
    for number in range(admission.rounds):
        submitted = sum(result.num_queries for result in results)
        # What is left is divided anew: a round that the gate cut short is made up for by those after it.
        size = math.ceil((total - submitted) / (admission.rounds - number))
        chosen = waiting[:size]
        labelled = SessionResult.joined(results).labelled if number else None
        if labelled is not None and waiting and len(labelled.labels):
            rows = torch.tensor(waiting)
            admitted = admit_queries(
                _predict(labelled, queries, rows, learning, num_classes=num_classes, seed=seed + number),
                queries.z[rows].numpy(),
                gate=_after(labelled, gate, num_groups=num_groups, num_classes=num_classes),
                count=size,
                uncertain_first=admission.uncertain_first,
            )
            chosen = [waiting[row] for row in admitted]
        results.append(
            answer_queries(
                votes.take(chosen),
                keys=[keys[row] for row in chosen],
                session=session,
                block_size=block_size,
                on_progress=lambda done, before=submitted: on_progress(before + done),  # type: ignore[misc]
            )
        )
        # In public order again: a run that was interrupted must submit the same queries.
        waiting = sorted(set(waiting) - set(chosen))
    return SessionResult.joined(results)


def _after(labelled: LabelledSet, gate: GateRule, *, num_groups: int, num_classes: int) -> DemographicParityGate:
    """The gate as the labels released so far leave it."""
    counts_GC = np.zeros((num_groups, num_classes), dtype=np.int64)
    np.add.at(counts_GC, (labelled.groups, labelled.labels), 1)
    return DemographicParityGate(gate, num_groups=num_groups, num_classes=num_classes, counts_GC=counts_GC)


def _predict(
    labelled: LabelledSet,
    queries: Split,
    rows: torch.Tensor,
    learning: StudentConfig,
    *,
    num_classes: int,
    seed: int,
) -> np.ndarray:
    """Probabilities of the candidates in ``rows``, by a student of the labels released so far."""
    # Rounds are few runs', and all others release labels without torch.
    from fairpate.app.students import public_records
    from fairpate.nn.predict import predict_probabilities
    from student.train import train_student

    network = train_student(
        public_records(queries, labelled),
        learning,
        num_classes=num_classes,
        generator=torch.Generator().manual_seed(seed),
    )
    return predict_probabilities(network, queries.x[rows]).double().numpy()
