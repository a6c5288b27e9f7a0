"""One run of one method: data, training or votes, the published model, its price, its metrics and its pages.

The same steps for every method. A model starts from the same seed, public records may pre-train, label and calibrate
it, the reject option may refuse predictions, and one statement, one record and one report result. What has no privacy
at all goes to ``private/``; everything else is published with the statement that prices it.

A stage whose file exists is done and is read back. A model that was released is never trained again: a repeated command
goes on from it. From ``private/`` to ``public/`` there is one way: what a method's events price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from torch import nn

from fairpate.app.assess import Assessment, assess
from fairpate.app.backbones import with_pinned_weights
from fairpate.app.baseline import without_privacy
from fairpate.app.early_checks import check_data, check_model_files, check_queries
from fairpate.app.finished import own_folder
from fairpate.app.identity import determining_values
from fairpate.app.model import card_of_model, initial_model, post_process
from fairpate.app.planning.outlook import cautions
from fairpate.app.publication.portable import write_portable
from fairpate.app.publication.reporting import write_reports
from fairpate.app.released import read_release, release_id
from fairpate.app.rundir import (
    RunDirectory,
    check_run_directory,
    create_run_directory,
    read_json,
    read_statement,
    sole_worker,
    write_json,
)
from fairpate.app.spending.meter import Meter
from fairpate.app.spending.odometer import Odometer
from fairpate.app.spending.stating import count_earlier, require_statement, require_unreleased, state_release
from fairpate.app.students import read_student
from fairpate.app.terminal.progress import Reporter
from fairpate.app.trained_on import as_trained, keep_embedding, load_for, record_data, with_given_data
from fairpate.config import DataConfig
from fairpate.data import Dataset, load_dataset
from fairpate.evaluation.private_population import PrivatePopulation
from fairpate.files import write_atomically
from fairpate.methods.definition import Method, Training
from fairpate.methods.pate import require_allowed
from fairpate.methods.releasing import ReleasingMethod, check_release_of, kept_release, take_release
from fairpate.methods.trained import Trained
from fairpate.methods.voting import Labels, VotingMethod
from fairpate.privacy.events import SpentError
from fairpate.strict_json import strict
from fairpate.types import PrivacyStatement, RunRecord
from student.predict import Student, save_student


def run_method(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_dataset,
    release_of: Path | None = None,
    with_graph: bool = False,
    allow_code: bool = False,
) -> RunDirectory:
    """Run one method, or go on where an earlier command left off, and leave the run directory complete.

    ``dataset`` None reads what ``config.data`` names, with ``load``. Any other is trained on as it is, and every file
    that describes the run names it; ``config.data`` then counts for nothing. ``release_of``: the folder of a run from
    whose release this one goes on, without a look at private records. ``with_graph``: also ``model.onnx``, which takes
    seconds. ``allow_code``: whether code that the configuration names may run. Errors name the field or file, the value
    and the remedy; what was finished stays, and nothing is charged twice.
    """
    given = config.own_dataset() if dataset is None else dataset
    opened = _opened(config, reporter, given, load=load, release_of=release_of, allow_code=allow_code)
    with opened as (config, dataset, run, meter):
        if isinstance(config, VotingMethod):
            check_queries(config, dataset, meter, reporter)
        if not run.student.exists() and not reporter.console.quiet:
            for words in cautions(config, dataset, run):
                reporter.note("caution", words)
        student, labels = _student(config, dataset, run, reporter, meter)
        reporter.note("model", str(run.student))
        if with_graph:
            write_portable(run, student, dataset, reporter)
        _report(config, dataset, run, student, labels, reporter)
    return run


def _report(
    config: Method, dataset: Dataset, run: RunDirectory, student: Student, labels: Labels | None, reporter: Reporter
) -> None:
    """Metrics, records and pages of a model that was released."""
    assessment = assess(student, dataset, seed=config.seed, least_cell=config.evaluation.least_cell)
    write_json(run.metrics, assessment.to_json())
    baseline = without_privacy(dataset.private, dataset.test, assessment.measured_N)
    if baseline is None:
        run.without_privacy.unlink(missing_ok=True)  # an earlier version had one of fewer records
    else:
        write_json(run.without_privacy, asdict(baseline), private=True)
    population = _private_population(config, run, dataset, student)
    statement = read_statement(run)
    _write_records(config, run, statement, assessment, labels)
    with reporter.stage("report"):
        write_reports(
            run,
            title=dataset.name,
            num_public_records=len(dataset.public),
            spending=None if labels is None else labels.spending,
            statement=statement,
            assessment=assessment,
            num_training_labels=student.card.num_training_labels,
            private_population=population,
            without_privacy=baseline,
        )


def make_release(config: ReleasingMethod, reporter: Reporter) -> RunDirectory:
    """The release of ``config`` alone, for runs that go on from it: drawn and counted once.

    Errors as :func:`run_method`.
    """
    with _opened(config, reporter, None) as (opened, dataset, run, meter):
        assert isinstance(opened, ReleasingMethod)
        if not run.released.exists():
            meter.start_another()
        kept_release(opened, _without_model(opened, dataset, run, reporter, meter))
    return run


def release_alone(config: VotingMethod, reporter: Reporter, dataset: Dataset) -> RunDirectory:
    """Released labels with their statement, and no model of them; however often it runs. Errors as :func:`run_method`.

    For public records of which no features are known.
    """
    with _opened(config, reporter, dataset, command="fairpate aggregate") as (opened, dataset, run, meter):
        assert isinstance(opened, VotingMethod)
        check_queries(opened, dataset, meter, reporter)
        labels = opened.release(_without_model(opened, dataset, run, reporter, meter))
        state_release(opened, run, dataset, labels, meter, reporter)
    reporter.note("labels", str(run.labels))
    return run


def _without_model(config: Method, dataset: Dataset, run: RunDirectory, reporter: Reporter, meter: Meter) -> Training:
    """What a release is drawn with of which no model is trained."""
    return Training(dataset=dataset, model=nn.Identity(), run=run, reporter=reporter, seed=config.seed, meter=meter)


@contextmanager
def _opened(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None,
    *,
    load: Callable[[DataConfig], Dataset] = load_dataset,
    release_of: Path | None = None,
    allow_code: bool = False,
    command: str = "fairpate run",
) -> Iterator[tuple[Method, Dataset, RunDirectory, Meter]]:
    """What a run starts from: its configuration, checked; its data set; its folder, described; its meter.

    Inside, no other process works in the folder.
    """
    is_given = dataset is not None
    if dataset is None:
        config.require_trainable()
    else:  # its features are looked at themselves, below
        config.check()
        config = with_given_data(config, dataset)
    config = with_pinned_weights(config)
    # Before data are read: a folder that is no place for this run should cost no time.
    embedded = found = own_folder(check_run_directory(config), config)
    # With votes in the folder no voter is made, so that nothing runs of what the configuration names.
    if not found.votes.exists():
        require_allowed(config, allow_code=allow_code)
    if release_of is not None:
        check_release_of(config, release_of)
        embedded = found if found.embedding.exists() else RunDirectory(root=release_of)
    with reporter.stage("data"):
        dataset = load_for(embedded, config.data, load) if dataset is None else dataset
        check_data(config, dataset)
    # Two at once would each release, and leave one's model beside the other's statement, or under its configuration.
    # The meter is made inside: before, it might not see the receipt of the run that it waits for, and count what that
    # released once more.
    found.root.mkdir(parents=True, exist_ok=True)
    with sole_worker(found.root, command):
        run = own_folder(create_run_directory(config), config)
        record_data(run, dataset, given_from_python=is_given)
        keep_embedding(run, dataset)
        if release_of is not None:
            take_release(run, release_of)
        reporter.note("data", f"{dataset.name}: {len(dataset.private)} private, {len(dataset.public)} public records")
        meter = Meter(run, Odometer(), data=dataset.name, method=config.method, release=release_id(run))
        yield config, as_trained(run, config, dataset), run, meter


def train_model(config: Method, dataset: Dataset, reporter: Reporter, *, folder: Path) -> tuple[Trained, Student]:
    """Train on a data set from Python, then post-process on its public records: what was released, and the student.

    As :func:`run_method`, but no release is counted in the operator's odometer, and little is stored in
    ``folder``: what belongs to the ledger of a method that asks teachers, and the key of an order of records.
    """
    config.check()
    config = with_pinned_weights(with_given_data(config, dataset).model_copy(update={"out": folder}))
    check_data(config, dataset)
    run = RunDirectory(root=folder)
    if config.asks_teachers:
        run = create_run_directory(config)
        record_data(run, dataset, given_from_python=True)
    check_model_files(config, dataset, reporter)
    dataset = as_trained(run, config, dataset)
    training = Training(
        dataset=dataset, model=initial_model(config, dataset), run=run, reporter=reporter, seed=config.seed
    )
    trained = config.train(training)
    network = post_process(trained.model, config, training)
    student = Student(
        card=card_of_model(config, dataset, trained, network), network=network, embedding=dataset.embedding
    )
    return trained, student


def _student(
    config: Method, dataset: Dataset, run: RunDirectory, reporter: Reporter, meter: Meter
) -> tuple[Student, Labels | None]:
    """The published student, trained if it is not there; and the labels that were released, where some were."""
    # What follows from released labels or from a kept release costs nothing again, however often it is trained.
    is_free = isinstance(config, VotingMethod) or not config.is_private or run.released.exists()
    is_trained = run.student.exists()
    if not is_trained:
        require_unreleased(config, run, is_free=is_free)
        # A model that is trained again is another release of the same records, whatever became of the first.
        if not is_free:
            meter.start_another()
        check_model_files(config, dataset, reporter)
    model = None if is_trained else initial_model(config, dataset)
    training = Training(
        dataset=dataset,
        model=nn.Identity() if model is None else model,
        run=run,
        reporter=reporter,
        seed=config.seed,
        meter=meter,
    )
    labels = None
    if isinstance(config, VotingMethod):
        # A service may have asked since, so what was released is stated again.
        labels = config.release(training)
        state_release(config, run, dataset, labels, meter, reporter)
    if is_trained:
        if labels is None:
            require_statement(run, is_free=is_free)
            count_earlier(meter, run)
        return read_student(run, is_free=is_free), labels
    if labels is not None:
        trained = config.learn(training, labels)  # type: ignore[attr-defined]
    elif isinstance(config, ReleasingMethod):
        trained = config.learn(training, kept_release(config, training))
    else:
        trained = _counted_training(config, training, meter)
    network = post_process(trained.model, config, training)
    if labels is None:
        # The odometer, then the statement, then the model: a statement without a model says that one was released.
        if not isinstance(config, ReleasingMethod):
            meter.record(trained.events, noise=trained.noise, enforce=meter.stored() is None)
        state_release(config, run, dataset, trained, meter, reporter)
    student = Student(card=card_of_model(config, dataset, trained, network, run), network=network)
    # Last of all: a model that is there has its price stated and counted.
    write_atomically(run.student, lambda path: save_student(student, path))
    return student, labels


def _counted_training(config: Method, training: Training, meter: Meter) -> Trained:
    """What the method trains; a release that makes it give up is counted, as its message tells what it was."""
    try:
        return config.train(training)
    except SpentError as error:
        reason = error
    # Outside of the handler: where a limit has no room for the release, its refusal must not carry that message.
    meter.record_given_up(reason.events, noise=reason.noise)
    raise reason


def _private_population(
    config: Method, run: RunDirectory, dataset: Dataset, student: Student
) -> PrivatePopulation | None:
    """What the run's release tells of the private population, written down where it does."""
    if not isinstance(config, ReleasingMethod) or not run.released.exists():
        return None
    found = config.private_population(read_release(run.released)[0], dataset, student)
    if found is not None:
        write_json(run.private_population, found.to_json())
    return found


def _write_records(
    config: Method, run: RunDirectory, statement: PrivacyStatement, assessment: Assessment, labels: Labels | None
) -> None:
    """The run as a point of a comparison; and for the operator at the data-dependent privacy cost."""
    headline = assessment.headline
    record = RunRecord(
        method=config.method,
        data=config.data.name,
        seed=config.seed,
        unit=statement.unit,
        relation=statement.relation,
        delta=statement.delta,
        epsilon=math.inf if statement.epsilon is None else statement.epsilon,
        epsilon_is_data_dependent=False,
        accuracy=headline.accuracy,
        coverage=headline.coverage,
        disparity=headline.disparity,
        config=determining_values(config),
        majority_accuracy=headline.majority_accuracy,
        degenerate=headline.degenerate,
        underserved_groups=headline.underserved_groups,
        unmeasured_groups=headline.not_measured,
        fairness=headline.fairness,
        answered=None if statement.queries is None else statement.queries.answered,
        answered_by_group=None if labels is None else _by_group(labels, len(headline.group_names)),
    )
    write_json(run.record, strict(asdict(record)))
    if run.costs.exists():
        spent = read_json(run.costs)["epsilon_data_dependent"]
        write_json(run.private_record, strict(asdict(replace(record, epsilon=spent, epsilon_is_data_dependent=True))))


def _by_group(labels: Labels, num_groups: int) -> tuple[int, ...] | None:
    """Released labels of each public group; None where queries are asked of other groups than those of the records."""
    if labels.spending is None:
        return None
    return tuple(np.bincount(labels.labelled.groups, minlength=num_groups).tolist())
