"""The pipeline, stage by stage: data, teachers, votes, aggregator, labels, student, evaluation.

A stage whose file exists is done and is read back; an interrupted one starts again, except that trained teachers and
ledger entries are kept one by one. From ``private/`` to ``public/`` there is one way: the aggregator's ledger.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aggregator.ledger import Charge, Ledger, LedgerTerms
from aggregator.session import answer_queries, query_key
from fairpate.app.progress import Reporter
from fairpate.app.reporting import Spending, write_reports
from fairpate.app.rundir import RunDirectory, create_run_directory, write_atomically, write_json
from fairpate.app.tables import read_votes, write_labels, write_votes
from fairpate.config import ConfigError, RunConfig
from fairpate.data import Dataset, Split, load_dataset
from fairpate.evaluation.metrics import Evaluation, evaluate
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.types import LabelledSet, PrivacyStatement, VoteBatch
from student.predict import Student, StudentCard, load_student, save_student
from student.train import PublicRecords, train_student
from teachers.ensemble import collect_votes, train_ensemble
from teachers.pool import RayPool, start_ray
from teachers.vote import count_votes

_STUDENT_STREAM, _BOOTSTRAP_STREAM = 1, 2
_MAX_STUDENT_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Release:
    """What came out of the aggregator: labels and a statement for everybody, spending for the operator."""

    labelled: LabelledSet
    statement: PrivacyStatement
    spending: Spending


def run_pipeline(config: RunConfig, reporter: Reporter) -> RunDirectory:
    """Run every stage that is not done yet, and leave the run directory complete.

    Errors name the field or file, the value and the remedy; whatever was finished stays.
    """
    with reporter.stage("data"):
        dataset = load_dataset(config.data)
        _check_augmentation(dataset, config)
        queries = _choose_queries(dataset, config)
    run = create_run_directory(config)
    reporter.note("data", f"{dataset.name}: {len(dataset.private)} private, {len(dataset.public)} public records")
    votes = ask_teachers(run, config, dataset, queries, reporter)
    release = aggregate(run, config, dataset, queries, votes, reporter)
    student = learn(run, config, dataset, release.labelled, reporter)
    evaluations = assess(run, config, dataset, student)
    with reporter.stage("report"):
        write_reports(
            run,
            title=dataset.name,
            num_public_records=len(dataset.public),
            spending=release.spending,
            statement=release.statement,
            evaluations=evaluations,
        )
    return run


def ask_teachers(
    run: RunDirectory, config: RunConfig, dataset: Dataset, queries: Split, reporter: Reporter
) -> VoteBatch:
    """Train the teachers that are missing and let all of them vote on the queries."""
    if run.votes.exists():
        reporter.note("teachers", "votes are there already")
        return read_votes(run.votes)
    with start_ray(config.ray), RayPool(config.ray) as pool:
        with reporter.stage("teachers") as advance:
            ensemble = train_ensemble(
                dataset.private,
                config.teachers,
                num_classes=dataset.num_classes,
                seed=config.seed,
                checkpoint_dir=config.teachers.checkpoint_dir or run.teachers,
                pool=pool,
                on_progress=advance,
            )
        with reporter.stage("votes") as advance:
            predictions_TQ = collect_votes(ensemble, queries.x, pool=pool, on_progress=advance)
    votes_QC = count_votes(predictions_TQ, dataset.num_classes)
    batch = VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC)
    write_votes(batch, run.votes)
    return batch


def aggregate(
    run: RunDirectory, config: RunConfig, dataset: Dataset, queries: Split, votes: VoteBatch, reporter: Reporter
) -> Release:
    """Ask the aggregator every query; the ledger makes this the same release however often it is run."""
    settings = config.aggregator
    source: NoiseSource = OsEntropy() if settings.noise == "os_entropy" else SeededSource(config.seed)
    terms = LedgerTerms(
        mechanism=settings.mechanism,
        gate=settings.gate,
        num_teachers=config.teachers.num_teachers,
        num_classes=dataset.num_classes,
        num_groups=dataset.num_groups,
        noise=source.label,
        ensemble=_ensemble_digest(config),
    )
    keys = [query_key(x, group) for x, group in zip(queries.x.numpy(), queries.z.tolist(), strict=True)]
    with reporter.stage("aggregator") as advance, Ledger(run.ledger, terms) as ledger:
        session = answer_queries(
            votes, keys=keys, ledger=ledger, source=source, on_progress=lambda done: advance(done, len(keys))
        )
        charges_Q = charges_per_query(keys, ledger.charges)
    spending = Spending(
        votes=votes,
        session=session,
        charges_Q=charges_Q,
        terms=terms,
        target_delta=settings.target_delta,
        tail=settings.tail,
    )
    statement = state_privacy(spending)
    write_labels(session.labelled, run.labels)
    write_json(run.statement, statement.to_json())
    reporter.note("aggregator", f"{statement.answered} of {statement.queries_posed} queries answered")
    return Release(labelled=session.labelled, statement=statement, spending=spending)


def charges_per_query(keys: Sequence[str], charges: Sequence[Charge]) -> npt.NDArray[np.int64]:
    """How often each query was charged; a repeated query counts where it was first asked."""
    charged = Counter(
        charge.reservation.key for charge in charges if charge.outcome is None or charge.outcome.is_charged
    )
    return np.array([charged.pop(key, 0) for key in keys], dtype=np.int64)


def state_privacy(spending: Spending) -> PrivacyStatement:
    """The publishable claim: every reservation that touched votes, open ones included, at its full cost."""
    session, event = spending.session, spending.queries(0, len(spending.charges_Q))
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


def learn(run: RunDirectory, config: RunConfig, dataset: Dataset, labelled: LabelledSet, reporter: Reporter) -> Student:
    """Train the student on released labels and on the public records that have none."""
    if run.student.exists():
        reporter.note("student", "trained already")
        return load_student(run.student)
    torch.set_num_threads(min(os.cpu_count() or 1, _MAX_STUDENT_THREADS))
    with reporter.stage("student") as advance:
        network = train_student(
            public_records(dataset.public, labelled),
            config.student,
            num_classes=dataset.num_classes,
            generator=torch.Generator().manual_seed(_stream_seed(config, _STUDENT_STREAM)),
            on_progress=advance,
        )
    card = StudentCard(
        model=config.student.model,
        input_shape=tuple(dataset.public.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        idp3=config.student.idp3,
    )
    student = Student(card=card, network=network)
    write_atomically(run.student, lambda path: save_student(student, path))
    return student


def public_records(public: Split, labelled: LabelledSet) -> PublicRecords:
    """Features of the public split with the released labels; the split's own labels are not read."""
    row_of = {record_id: row for row, record_id in enumerate(public.record_id)}
    answered = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    is_answered = torch.zeros(len(public), dtype=torch.bool)
    is_answered[answered] = True
    return PublicRecords(
        answered_x=public.x[answered], labels=torch.from_numpy(labelled.labels), unlabelled_x=public.x[~is_answered]
    )


def assess(run: RunDirectory, config: RunConfig, dataset: Dataset, student: Student) -> dict[str, Evaluation]:
    """Measure the student on the test split: as it predicts, and with IDP3 also as it would without refusing."""
    test = dataset.test
    prediction = student.predict(test.x, test.z.numpy())

    def measure(answered_N: npt.NDArray[np.bool_]) -> Evaluation:
        return evaluate(
            prediction.labels,
            labels_N=test.y.numpy(),
            groups_N=test.z.numpy(),
            answered_N=answered_N,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            generator=np.random.default_rng(_stream_seed(config, _BOOTSTRAP_STREAM)),
        )

    evaluations = {"student": measure(prediction.answered)}
    if student.card.idp3 is not None:
        evaluations = {
            "student with IDP3": evaluations["student"],
            "student without refusals": measure(np.ones(len(test), dtype=np.bool_)),
        }
    headline, *others = evaluations.values()
    write_json(run.metrics, headline.to_json() | {"without_refusals": others[0].to_json() if others else None})
    return evaluations


def _check_augmentation(dataset: Dataset, config: RunConfig) -> None:
    augmented = {
        "teachers.fit.augment": config.teachers.fit.augment,
        "student.fit.augment": config.student.fit.augment,
        "student.strong_augment": config.student.strong_augment,
    }
    for field, augment in augmented.items():
        if dataset.kind != "image" and not augment.is_identity:
            raise ConfigError(f"{field}: changes images, and {dataset.name} is a table; leave it out.")


def _choose_queries(dataset: Dataset, config: RunConfig) -> Split:
    wanted = config.aggregator.num_queries
    if wanted is None:
        return dataset.public
    if wanted > len(dataset.public):
        raise ConfigError(
            f"aggregator.num_queries: {wanted} queries asked, {len(dataset.public)} public records there; "
            "lower it, or raise data.num_public."
        )
    return dataset.public.take(range(wanted))


def _ensemble_digest(config: RunConfig) -> str:
    """What determines the teachers, as one name: a ledger refuses the votes of others."""
    teachers = config.teachers.model_dump(mode="json", exclude={"checkpoint_dir", "engine", "block_size"})
    data = config.data.model_dump(mode="json", exclude={"data_dir"})
    text = json.dumps([data, teachers, config.seed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stream_seed(config: RunConfig, stream: int) -> int:
    """Independent seeds for the parts of a run that draw random numbers."""
    return int(np.random.SeedSequence([config.seed, stream]).generate_state(1, np.uint64)[0] >> 1)
