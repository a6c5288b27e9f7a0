"""The pipeline, stage by stage: data, teachers, votes, aggregator, labels, student, evaluation.

A stage whose file exists is done and is read back; an interrupted one starts again, except that trained teachers and
ledger entries are kept one by one. From ``private/`` to ``public/`` there is one way: the aggregator's ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fairpate.app.backbones import check_weights, with_pinned_weights
from fairpate.app.odometer import Meter, Odometer
from fairpate.app.progress import Reporter
from fairpate.app.release import check_budget, choose_queries, noise_source, release_labels
from fairpate.app.reporting import write_reports
from fairpate.app.rundir import (
    RunDirectory,
    RunDirectoryError,
    check_run_directory,
    checkpoint_folder,
    create_run_directory,
    write_json,
)
from fairpate.app.seeds import Stream, stream_seed, torch_generator
from fairpate.app.tables import read_votes, write_votes
from fairpate.app.trained_on import record_data
from fairpate.config import ConfigError, ModelConfig, RayConfig, RunConfig
from fairpate.data import Dataset, Split, load_dataset
from fairpate.evaluation.metrics import Evaluation, evaluate
from fairpate.evaluation.reject_option import RejectOptionSpread, reject_option_spread
from fairpate.files import write_atomically
from fairpate.nn.models import is_convolutional
from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.storage import Storage
from fairpate.types import LabelledSet, VoteBatch
from student.predict import Student, StudentCard, StudentFileError, load_student, save_student
from student.train import PublicRecords, train_student
from teachers.cluster import is_ray_worker, start_ray
from teachers.ensemble import collect_votes, train_ensemble
from teachers.pool import InProcessPool, Pool, RayPool

AskTeachers = Callable[[RunDirectory, RunConfig, Dataset, Split, Reporter], VoteBatch]
_MAX_STUDENT_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Metrics of the student by name, the headline first; with IDP3 also how much they depend on the test order."""

    evaluations: dict[str, Evaluation]
    reject_option: RejectOptionSpread | None = None


def run_pipeline(config: RunConfig, reporter: Reporter) -> RunDirectory:
    """Run every stage that is not done yet, and leave the run directory complete.

    Errors name the field or file, the value and the remedy; whatever was finished stays.
    """
    config = with_pinned_weights(config)
    check_run_directory(config)
    with reporter.stage("data"):
        dataset = load_dataset(config.data)
        _check_augmentation(dataset, config)
        check_teachers(dataset, config)
        queries = choose_queries(dataset, config)
        fitting = check_budget(config, dataset, queries)
    run = create_run_directory(config)
    record_data(run, dataset, given_from_python=False)
    meter = Meter(run, Odometer(), data=dataset.name, method="fairpate")
    if meter.stored() is None:
        queries_event = ConfidentGnmaxQueries(count=fitting, **asdict(config.aggregator.mechanism))
        meter.check([queries_event], noise=noise_source(config).label)
    if not run.student.exists():
        check_weights({"teachers": config.teachers.model, "student": config.student.model}, dataset, reporter)
    reporter.note("data", f"{dataset.name}: {len(dataset.private)} private, {len(dataset.public)} public records")
    if fitting < (planned := config.aggregator.num_queries or len(queries)):
        reporter.note("budget", f"has room for {fitting} of {planned} queries; the others will not be asked")
    votes = ask_teachers(run, config, dataset, queries, reporter)
    with reporter.stage("aggregator") as advance:
        release = release_labels(run, config, dataset, queries, votes, advance, meter=meter)
    statement = release.statement
    reporter.note("aggregator", f"{statement.answered} of {statement.queries_posed} queries answered")
    if release.over_budget:
        reporter.note("aggregator", f"{release.over_budget} queries found no room in the budget and were not asked")
    student = learn(run, config, dataset, release.labelled, reporter)
    assessment = assess(run, config, dataset, student)
    with reporter.stage("report"):
        write_reports(
            run,
            title=dataset.name,
            num_public_records=len(dataset.public),
            spending=release.spending,
            statement=statement,
            evaluations=assessment.evaluations,
            reject_option=assessment.reject_option,
            num_training_labels=student.card.num_training_labels,
        )
    return run


def ask_teachers(
    run: RunDirectory, config: RunConfig, dataset: Dataset, queries: Split, reporter: Reporter
) -> VoteBatch:
    """Train the teachers that are missing and let all of them vote on the queries."""
    if run.votes.exists():
        reporter.note("teachers", "votes are there already")
        return _votes_on(queries, run)
    checkpoints = checkpoint_folder(config, run.teachers)
    batch = collect_vote_batch(config, dataset, queries, reporter, checkpoint_dir=checkpoints)
    write_votes(batch, run.votes)
    return batch


def collect_vote_batch(
    config: RunConfig,
    dataset: Dataset,
    queries: Split,
    reporter: Reporter,
    *,
    checkpoint_dir: Path | Storage,
    pool: Pool | None = None,
) -> VoteBatch:
    """The votes of all teachers on the queries; those that ``checkpoint_dir`` lacks are trained first. Private.

    ``pool`` None opens one for the purpose.
    """
    with _pool(config.ray) if pool is None else nullcontext(pool) as workers:
        with reporter.stage("teachers") as advance:
            ensemble = train_ensemble(
                dataset.private,
                config.teachers,
                num_classes=dataset.num_classes,
                seed=config.seed,
                checkpoint_dir=checkpoint_dir,
                pool=workers,
                on_progress=advance,
            )
        with reporter.stage("votes") as advance:
            votes_QC = collect_votes(ensemble, queries.x, pool=workers, on_progress=advance)
    return VoteBatch(
        record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble=ensemble.digest
    )


@contextmanager
def _pool(config: RayConfig) -> Iterator[Pool]:
    """Ray's actors; or this process where it is a worker of Ray, which must not wait for CPUs that its like hold."""
    if is_ray_worker():
        yield InProcessPool("cuda" if config.num_gpus else "cpu")
        return
    with start_ray(config), RayPool(config) as pool:
        yield pool


def learn(run: RunDirectory, config: RunConfig, dataset: Dataset, labelled: LabelledSet, reporter: Reporter) -> Student:
    """Train the student on released labels and on the public records that have none."""
    if run.student.exists():
        reporter.note("student", "trained already")
        return read_student(run, is_free=True)
    network = fit_student(config, dataset, labelled, reporter)
    card = replace(student_card(config, dataset), num_training_labels=len(labelled.labels))
    student = Student(card=card, network=network)
    write_atomically(run.student, lambda path: save_student(student, path))
    return student


def read_student(run: RunDirectory, *, is_free: bool) -> Student:
    """The published student. RunDirectoryError for a damaged file; ``is_free``: training it again costs no privacy."""
    try:
        return load_student(run.student)
    except StudentFileError as error:
        remedy = (
            "Or delete it and give the same command again: it is then trained again from the released labels, at no "
            "privacy cost."
            if is_free
            else "It cannot be made again: another training would be a second release of the same records. Without a "
            "copy, start a new run folder with --out and count both epsilons."
        )
        raise RunDirectoryError(f"{error} {remedy}") from error


def fit_student(
    config: RunConfig, dataset: Dataset, labelled: LabelledSet, reporter: Reporter, **options: Any
) -> nn.Module:
    """A student of released labels; ``options`` as :func:`student.train.train_student` takes them."""
    with reporter.stage("student") as advance, _torch_threads(config.student.model):
        return train_student(
            public_records(dataset.public, labelled),
            config.student,
            num_classes=dataset.num_classes,
            generator=torch_generator(config.seed, Stream.STUDENT),
            on_progress=advance,
            **options,
        )


def student_card(config: RunConfig, dataset: Dataset) -> StudentCard:
    """What whoever uses the published model must know."""
    return StudentCard(
        model=config.student.model,
        input_shape=tuple(dataset.public.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        idp3=config.student.idp3,
    )


@contextmanager
def _torch_threads(model: ModelConfig) -> Iterator[None]:
    """One thread for small dense layers, which lose by sharing; a few for convolutions. Restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _MAX_STUDENT_THREADS) if is_convolutional(model) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def public_records(public: Split, labelled: LabelledSet) -> PublicRecords:
    """Features of the public split with the released labels; the split's own labels are not read."""
    row_of = {record_id: row for row, record_id in enumerate(public.record_id)}
    answered = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    is_answered = torch.zeros(len(public), dtype=torch.bool)
    is_answered[answered] = True
    return PublicRecords(
        answered_x=public.x[answered], labels=torch.from_numpy(labelled.labels), unlabelled_x=public.x[~is_answered]
    )


def assess(run: RunDirectory, config: RunConfig, dataset: Dataset, student: Student) -> Assessment:
    """Measure the student on the test split: as it predicts, and with IDP3 also unrefused and in other orders.

    A randomised student is measured by expectation, but where IDP3 refuses: that depends on the labels drawn.
    """
    test, rule = dataset.test, student.card.idp3
    groups = test.z.numpy()
    prediction = student.predict(test.x, groups, generator=_generator(config, Stream.PREDICTION))
    expected = prediction.probabilities_NC if student.card.is_randomised else prediction.labels

    def measure(predictions: npt.NDArray[Any], answered_N: npt.NDArray[np.bool_]) -> Evaluation:
        return evaluate(
            predictions,
            labels_N=test.y.numpy(),
            groups_N=groups,
            answered_N=answered_N,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            generator=_generator(config, Stream.BOOTSTRAP),
        )

    headline = measure(expected if rule is None else prediction.labels, prediction.answered)
    if rule is None:
        write_json(run.metrics, headline.to_json())
        return Assessment(evaluations={"student": headline})
    unrefused = measure(expected, np.ones(len(test), dtype=np.bool_))
    spread = reject_option_spread(
        prediction.labels,
        groups,
        true_labels_N=test.y.numpy(),
        rule=rule,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        generator=_generator(config, Stream.ORDERS),
    )
    others = {"without_refusals": unrefused.to_json(), "orders": spread.to_json()}
    write_json(run.metrics, headline.to_json() | others)
    return Assessment(
        evaluations={"student with IDP3": headline, "student without refusals": unrefused}, reject_option=spread
    )


def check_teachers(dataset: Dataset, config: RunConfig) -> None:
    """ConfigError for more teachers than private records. It does not tell how many there are."""
    if config.teachers.num_teachers > len(dataset.private):
        raise ConfigError(
            f"teachers.num_teachers: {config.teachers.num_teachers} teachers, but fewer private records in "
            f"{dataset.name}, so that most would learn from nothing; lower it."
        )


def _check_augmentation(dataset: Dataset, config: RunConfig) -> None:
    augmented = {
        "teachers.fit.augment": config.teachers.fit.augment,
        "student.fit.augment": config.student.fit.augment,
        "student.strong_augment": config.student.strong_augment,
    }
    for field, augment in augmented.items():
        if dataset.kind != "image" and not augment.is_identity:
            raise ConfigError(f"{field}: changes images, and {dataset.name} is a table; leave it out.")


def _votes_on(queries: Split, run: RunDirectory) -> VoteBatch:
    """The stored votes, if they are votes on these queries."""
    votes = read_votes(run.votes)
    if tuple(votes.record_ids) != queries.record_id or votes.groups_Q.tolist() != queries.z.tolist():
        raise RunDirectoryError(
            f"{run.votes}: votes on other records than this configuration asks about; restore the data set's files, or "
            "start a new run folder."
        )
    return votes


def _generator(config: RunConfig, stream: Stream) -> np.random.Generator:
    return np.random.default_rng(stream_seed(config.seed, stream))
