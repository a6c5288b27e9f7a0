"""One run from configuration to pages: check, load, release, learn, measure, state, draw.

What methods that protect the sensitive attribute alone must not be given: features that show it.

To them features are public, so an attribute among the features is published by whatever is learned from these.

A run that is done: its folder as its method divides it, read without what trains.

Weights files of a run: found, pinned to a checksum and tried before any work starts.

What a run's settings ask of a data set, a budget and model files: refused before anything is computed.

The model that a run publishes: what it starts from, what public records make of it, and what its file says.

How well a simple model does without privacy, for the operator: to stand beside an accuracy.

A logistic model that learns without noise from the private records, all of those that the measured method had. Its
accuracy depends on every one of them, so that it stays in ``private/``, on the operator's page and on the terminal.
Nothing that is published is compared with it. Where the records are too many for seconds there is none: one of fewer
would compare thousands of records with more.

Pictures are seen small, and features beyond 256 by their principal components, so that it takes seconds.

The claim under which a run publishes: one statement that prices what was released, written before anything is shown.

A released model is never trained again, and a statement that is gone is not made up again.

One run of one method: data, training or votes, the published model, its price, its metrics and its pages.

The same steps for every method. A model starts from the same seed, public records may pre-train, label and calibrate
it, the reject option may refuse predictions, and one statement, one record and one report result. What has no privacy
at all goes to ``private/``; everything else is published with the statement that prices it.

A stage whose file exists is done and is read back. A model that was released is never trained again: a repeated command
goes on from it. From ``private/`` to ``public/`` there is one way: what a method's events price.

`fairpate aggregate`: labels, and perhaps a student, of votes that were made elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aggregator.service.wire import worded
from fairpate.config import AugmentConfig, ConfigError, DataConfig, ModelConfig, Section, StudentConfig
from fairpate.config_reader import Override, determining_values
from fairpate.data import REGISTRY, Dataset, load_data
from fairpate.data.dataset import Split, sha256_of
from fairpate.files import write_atomically
from fairpate.later import functional, sklearn
from fairpate.methods.base import Method, Stream, Trained, Training, configured, stream_seed, torch_generator
from fairpate.methods.own_votes import OwnVotes, read_votes_file, resolved
from fairpate.methods.pate import Labels, PateFamily, VotingMethod
from fairpate.methods.record_votes import ReleasingMethod, check_release_of, kept_release, shared_remarks, take_release
from fairpate.nn.fit import Mixture, calibrate, predict_probabilities, pretrain_by_rotations
from fairpate.nn.models import build_model, pin_weights
from fairpate.privacy.events import Event, SpentError
from fairpate.privacy.mechanism_events import event_from, event_json
from fairpate.report.metrics import WithoutPrivacy
from fairpate.report.records import PrivatePopulation
from fairpate.run.context import RunDirectory, RunDirectoryError, read_json, read_statement, sole_worker, write_json
from fairpate.run.folder import check_run_directory, create_run_directory
from fairpate.run.learn import (
    Assessment,
    as_trained,
    assess,
    keep_embedding,
    load_for,
    read_student,
    record_data,
    student_card,
    with_given_data,
)
from fairpate.run.plan import cautions
from fairpate.run.publication import write_portable, write_reports
from fairpate.run.release_log import Meter, Odometer, Standing, read_release, release_id, standing_remarks
from fairpate.terminal import Reporter
from fairpate.types import READING_TELLS, RECORDS_ALONE, TELLS_SIZE, IntArray, PrivacyStatement, RunRecord, Unit, strict
from student.card import StudentCard
from student.student import PublicRecords, Student, save_student, train_student


def require_unseen(x: Tensor, groups: Tensor, *, method: str) -> None:
    """ValueError where a column of a table ``x`` (N, F) is a function of ``groups`` (N,), such as an encoding of it.

    Such a column takes one value in every group, and not the same in all. Pictures are not searched.
    """
    if x.ndim != 2 or not len(x):
        return
    members = [x[groups == group] for group in torch.unique(groups)]
    low, high = (torch.stack([extreme(part, dim=0) for part in members]) for extreme in (torch.amin, torch.amax))
    # Any code of the group, whatever its values; a column that is the same for all shows nothing.
    shown = (low == high).all(dim=0) & (low != low[0]).any(dim=0)
    if shown.any():
        columns = ", ".join(str(column) for column in shown.nonzero().flatten().tolist())
        raise ValueError(
            f"{method} protects sensitive_features alone, and features count as public: expected none that "
            f"sensitive_features determine, got column(s) {columns} of X; leave them out, or choose a method that "
            "protects whole records."
        )


AnySection = TypeVar("AnySection", bound=Section)


def with_pinned_weights(config: AnySection) -> AnySection:
    """``config`` with the checksums of all weights files; `imagenet` is downloaded where it is not there yet."""
    if isinstance(config, ModelConfig):
        return pin_weights(config)  # type: ignore[return-value]
    sections = {name: value for name, value in config if isinstance(value, Section)}
    return config.model_copy(update={name: with_pinned_weights(value) for name, value in sections.items()})


def check_weights(models: Mapping[str, ModelConfig], dataset: Dataset, reporter: Reporter) -> None:
    """Build what starts from a file once, and say which file; ValueError where it does not fit."""
    shape = tuple(dataset.public.x.shape[1:])
    for name, model in models.items():
        if model.weights is not None:
            build_model(model, input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
            reporter.note("weights", f"{name} start from {model.weights.path}, sha256 {model.weights.sha256}")


def check_data(config: Method, dataset: Dataset) -> None:
    """ConfigError for settings that the data set rules out."""
    if dataset.kind != "image":
        if config.public_data.pretrain is not None:
            raise ConfigError(f"public_data.pretrain: learns from images, and {dataset.name} is a table; leave it out.")
        for field in _augmented(config):
            raise ConfigError(f"{field}: changes images, and {dataset.name} is a table; leave it out.")
    config.require_unit(dataset)
    if config.protects_attribute_only:
        if dataset.embedding is not None:
            raise ConfigError(
                f"data.embedding: {config.method} protects the sensitive attribute alone, and an embedding hides "
                "whether a column shows it; set it to null."
            )
        require_unseen(dataset.private.x, dataset.private.z, method=config.method)
    config.check_data(dataset)


def _augmented(section: Section, prefix: str = "") -> list[str]:
    """The dotted fields that ask for changes of images."""
    found = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, AugmentConfig):
            found += [] if value.is_identity else [f"{prefix}{name}"]
        elif isinstance(value, Section):
            found += _augmented(value, f"{prefix}{name}.")
    return found


def check_queries(config: VotingMethod, dataset: Dataset, meter: Meter, reporter: Reporter) -> None:
    """LimitReachedError before any teacher is trained; and a word where the budget is smaller than the plan."""
    plan, num_fitting = config.plan(config.queried(dataset)), config.num_fitting(dataset)
    planned = plan.settings.num_queries
    # What is counted was admitted; the ledger's own meter asks for whatever is charged beyond it.
    if meter.stored() is None:
        meter.check([plan.worst_case(num_fitting)], noise=plan.source.label)
    if planned is not None and num_fitting < planned:
        reporter.note("budget", f"has room for {num_fitting} of {planned} queries; the others will not be asked")


def check_model_files(config: Method, dataset: Dataset, reporter: Reporter) -> None:
    """Errors of :func:`fairpate.run.run.check_weights`, for every model that starts from a file."""
    models: dict[str, ModelConfig] = {"teachers": config.teachers.model} if isinstance(config, PateFamily) else {}
    models["model"] = config.student.model
    if published_model(config) != config.student.model:
        models["published model"] = published_model(config)
    check_weights(models, dataset, reporter)


def published_model(config: Method) -> ModelConfig:
    """The architecture of what is published: that of self-labelling's student where it has one of its own."""
    labelling = config.public_data.self_label
    return (labelling and labelling.model) or config.student.model


def initial_model(config: Method, dataset: Dataset, architecture: ModelConfig | None = None) -> nn.Module:
    """What training starts from: random weights of the run's seed, perhaps pre-trained on public pictures.

    ``architecture`` None is ``student.model``.
    """
    architecture = architecture or config.student.model
    model = build_model(
        architecture,
        input_shape=tuple(dataset.public.x.shape[1:]),
        num_classes=dataset.num_classes,
        generator_seed=stream_seed(config.seed, Stream.MODEL),
    )
    if config.public_data.pretrain is not None:
        generator = torch_generator(config.seed, Stream.PRETRAINING)
        pretrain_by_rotations(model, architecture, dataset.public.x, config.public_data.pretrain, generator=generator)
    return model


def card_of_model(
    config: Method, dataset: Dataset, trained: Trained, network: nn.Module, run: RunDirectory | None = None
) -> StudentCard:
    """What the file says; ``run`` is where an embedding is kept."""
    mixing = trained.mixing_GCC
    return replace(
        student_card(config.student, dataset),
        model=published_model(config),
        num_members=len(network.members) if isinstance(network, Mixture) else None,
        mixing=None if mixing is None else tuple(tuple(tuple(row) for row in table) for table in mixing.tolist()),
        num_training_labels=trained.num_training_labels,
        embedding=sha256_of(run.embedding) if run is not None and dataset.embedding is not None else None,
    )


def post_process(model: nn.Module, config: Method, training: Training) -> nn.Module:
    """Self-labelling and calibration, which read the released model and public features and groups only."""
    dataset, reporter, settings = training.dataset, training.reporter, config.public_data
    public = dataset.public
    if settings.self_label is not None:
        with reporter.stage("self-label") as advance:
            probability, label = predict_probabilities(model, public.x).max(dim=1)
            sure = probability >= settings.self_label.confidence
            if not sure.any():
                raise ConfigError(
                    f"public_data.self_label.confidence: no public label is as sure as "
                    f"{settings.self_label.confidence}; lower it."
                )
            architecture = published_model(config)
            model = train_student(
                PublicRecords(answered_x=public.x[sure], labels=label[sure], unlabelled_x=public.x[~sure]),
                StudentConfig(**dict(settings.self_label) | {"model": architecture}),
                num_classes=dataset.num_classes,
                generator=torch_generator(config.seed, Stream.LABELLING),
                on_progress=advance,
                initial_model=None if settings.pretrain is None else initial_model(config, dataset, architecture),
            )
    if settings.calibration is not None:
        with reporter.stage("calibration"):
            generator = torch_generator(config.seed, Stream.CALIBRATION)
            done = calibrate(model, public.x, public.z, settings.calibration, generator=generator)
        course = " -> ".join(f"{disparity:.3f}" for disparity in (done.disparities[0], done.disparities[-1]))
        reporter.note("calibration", f"{done.num_epochs} epochs, disparity on held-out public records {course}")
    return model


_MOST_VALUES = 50_000_000  # 0.4 GB
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_AT_ONCE = 4096  # pictures
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[bytes, IntArray] = {}


def without_privacy(private: Split, test: Split, measured_N: npt.NDArray[np.bool_]) -> WithoutPrivacy | None:
    """Accuracy on the test records ``measured_N`` of what learns from ``private``.

    None where no test record is measured, where there is one class to learn from, where records are too many, and where
    features are missing or not finite: a run that was paid for must not end here.
    """
    parts = (private.x, test.x)
    if not measured_N.any() or len(np.unique(private.y.numpy())) < 2 or len(private) * _width(private.x) > _MOST_VALUES:
        return None
    if any(not (x.numel() and x.isfinite().all()) for x in parts):
        return None
    predicted = _predicted(_features(private.x), _features(test.x), private.y.numpy())
    return WithoutPrivacy(accuracy=float((predicted == test.y.numpy())[measured_N].mean()), num_records=len(private))


def _predicted(x_NF: npt.NDArray[np.float64], test_MF: npt.NDArray[np.float64], labels_N: IntArray) -> IntArray:
    """Classes of test records; once for the same records, on which a sweep measures many models."""
    key = hashlib.blake2b(
        b"|".join(each.tobytes() for each in (np.array(x_NF.shape), x_NF, test_MF, labels_N))
    ).digest()
    predicted = _predictions.get(key)
    if predicted is None:
        steps = [sklearn.preprocessing.StandardScaler()]
        if x_NF.shape[1] > _MOST_FEATURES:
            # Not "auto", which takes a randomised solver for some shapes: equal records must give an equal baseline.
            steps = [sklearn.decomposition.PCA(min(_COMPONENTS, len(x_NF)), svd_solver="covariance_eigh"), *steps]
        model = sklearn.pipeline.make_pipeline(*steps, sklearn.linear_model.LogisticRegression(max_iter=100, tol=1e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # near enough for a comparison
            predicted = model.fit(x_NF, labels_N).predict(test_MF)
        while len(_predictions) >= _MOST_KEPT:
            _predictions.pop(next(iter(_predictions)), None)
        _predictions[key] = predicted
    return predicted


def _features(x: Tensor) -> npt.NDArray[np.float64]:
    """Records as rows of numbers, pictures at most 16 pixels a side."""
    if x.ndim == 4:
        side = (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE))
        x = torch.cat([functional.adaptive_avg_pool2d(some.float(), side) for some in x.split(_AT_ONCE)])
    rows: npt.NDArray[np.float64] = x.flatten(1).numpy().astype(np.float64)
    return rows


def _width(x: Tensor) -> int:
    """The numbers of a row of :func:`_features`."""
    return math.prod(min(side, _SIDE) if x.ndim == 4 and place else side for place, side in enumerate(x.shape[1:]))


_NOT_PROTECTED: dict[Unit, str] = {
    "sensitive attribute": "features and labels, which the model is trained on as if they were public",
}


def require_unreleased(config: Method, run: RunDirectory, *, is_free: bool) -> None:
    """RunDirectoryError where what was released is gone, and making it again would be another release."""
    if run.statement.exists() and not is_free:
        gone = run.released if isinstance(config, ReleasingMethod) else run.student
        raise RunDirectoryError(
            f"{gone}: gone, although {run.statement} says it was released. Training again would be a second "
            "release of the same records: restore it from a copy, or start a new run folder with --out and count both "
            "epsilons."
        )


def require_statement(run: RunDirectory, *, is_free: bool) -> None:
    """RunDirectoryError where the statement of a released model is gone: what qualifies the claim stood there only."""
    if not run.statement.exists():
        remedy = f"delete {run.student} and give the same command again" if is_free else "restore it from a copy"
        raise RunDirectoryError(f"{run.statement}: gone, although {run.student} was released under it; {remedy}.")


def count_earlier(meter: Meter, run: RunDirectory) -> None:
    """Count a model that a version without an odometer released, by its statement.

    So is a kept release that another run drew and this odometer does not know.
    """
    if meter.stored() is not None:
        return
    statement = read_statement(run)
    events = [event_from(values, statement.unit) for values in statement.events]
    if run.released.exists():
        meter.count_again(events, noise=statement.noise)
    else:
        meter.record(events, noise=statement.noise, enforce=False)


def state_release(
    config: Method, run: RunDirectory, dataset: Dataset, trained: Trained, meter: Meter, reporter: Reporter
) -> None:
    """Write the statement that prices what was released, and show the operator what earlier releases add to it."""
    standing = meter.standing(delta=config.target.delta)
    for remark in standing_remarks(standing, delta=config.target.delta):
        reporter.note("odometer", remark)
    alone, shared = dataset.records_alone, shared_remarks(run)
    statement = statement_of(config, trained, standing=standing, records_alone=alone, shared=shared)
    write_json(run.statement, strict(statement.to_json()))


def statement_of(
    config: Method,
    trained: Trained,
    *,
    standing: Standing | None = None,
    records_alone: bool = False,
    shared: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> PrivacyStatement:
    """The claim that prices ``trained``.

    ``standing``: what the operator's odometer says of it and of earlier releases, for ``names_earlier``; None where it
    was not counted.
    ``records_alone``: as the data set says. ``shared`` are remarks about a release that several runs go on from, and
    ``remarks`` come last.
    """
    cost = config.price(trained)
    if standing is not None:  # the odometer composes events, and a bound fixed beforehand may be above what they cost
        standing = replace(
            standing,
            epsilon=max(standing.epsilon, cost.epsilon),
            epsilon_adaptive=max(standing.epsilon_adaptive, cost.epsilon),
        )
    if not config.names_earlier:
        standing = None
    return PrivacyStatement(
        method=config.method,
        unit=cost.unit,
        relation=cost.relation,
        delta=cost.delta,
        epsilon=None if math.isinf(cost.epsilon) else cost.epsilon,
        accounting=cost.accounting,
        noise=trained.noise,
        events=tuple(worded(event_json(event)) for event in trained.events),
        queries=trained.queries,
        not_protected=_NOT_PROTECTED.get(cost.unit),
        earlier_releases=None if standing is None else standing.earlier,
        epsilon_with_earlier=None if standing is None else standing.epsilon,
        epsilon_adaptive_with_earlier=None if standing is None else standing.epsilon_adaptive,
        remarks=(
            *trained.remarks,
            *shared,
            *size_remarks(config, trained.events, cost.unit),
            *unit_remarks(config, cost.unit, records_alone=records_alone),
            *((READING_TELLS,) if config.is_private and config.data.name not in REGISTRY else ()),
            *standing_remarks(standing, delta=cost.delta),
            *remarks,
        ),
    )


def size_remarks(config: Method, events: tuple[Event, ...], unit: Unit) -> tuple[str, ...]:
    """Where records or persons come and go their number is private, but a sampling rate that is set for it tells it."""
    samples = any(getattr(event, "sampling_rate", 1) < 1 for event in events)
    return (TELLS_SIZE[unit],) if samples and unit in TELLS_SIZE and config.rate_tells_size else ()


def unit_remarks(config: Method, unit: Unit, *, records_alone: bool) -> tuple[str, ...]:
    """Where a person may have several records, and each is protected by itself."""
    return (RECORDS_ALONE,) if config.is_private and records_alone and unit == "record" else ()


def run_method(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
    with_graph: bool = False,
) -> RunDirectory:
    """Run one method, or go on where an earlier command left off, and leave the run directory complete.

    ``dataset`` None reads what ``config.data`` names, with ``load``. Any other is trained on as it is, and every file
    that describes the run names it; ``config.data`` then counts for nothing. ``release_of``: the folder of a run from
    whose release this one goes on, without a look at private records. ``with_graph``: also ``model.onnx``, which takes
    seconds. Errors name the field or file, the value and the remedy; what was finished stays, and nothing is charged
    twice.
    """
    given = config.own_dataset() if dataset is None else dataset
    opened = _opened(config, reporter, given, load=load, release_of=release_of)
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
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
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
    embedded = found = check_run_directory(config)
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
        run = create_run_directory(config)
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


def aggregate(values: dict[str, Any], overrides: Sequence[Override], reporter: Reporter) -> RunDirectory:
    """One release of the labels of a file of votes, however often the command is given; with features, a student too.

    ``values`` and ``overrides`` configure :class:`OwnVotes`. VotesFileError lists all that is wrong with the file,
    ConfigError what is wrong with the settings.
    """
    config = configured(values, overrides, method="own_votes")
    assert isinstance(config, OwnVotes)
    config.check()
    config = config.model_copy(update={"votes": resolved(config.votes)})
    if config.votes.features:
        return run_method(config, reporter, with_graph=True)
    return release_alone(config, reporter, read_votes_file(config.votes).dataset)
