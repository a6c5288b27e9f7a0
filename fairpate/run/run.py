"""One run of one method: check, load data, release, train, measure, state the guarantee, and write the pages.

The steps are the same for every method. Public records may pre-train, label and calibrate the model; a reject option
may refuse predictions; the run writes one statement, one record and one report. A model without a privacy guarantee is
written to ``private/``. Everything else is published with the statement of its cost: private records affect ``public/``
only through the events of the method's releases (:class:`fairpate.releases.log.ReleaseLog`), and test records through
exact metrics, which no guarantee covers unless they are asked for as private.

The model starts from random or given weights, which must fit the records (:func:`initial_model`); public records may
label and calibrate it after training (:func:`post_process`).

A stage whose file exists is finished and is read back, so that a repeated command resumes the run. A released model is
never trained again.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fairpate import types
from fairpate.config import AugmentConfig, ConfigError, DataConfig, ModelConfig, Override, values_digest
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import check_members, sha256_of
from fairpate.data.embedding import save_embedding
from fairpate.data.overlap import doubts_of, require_apart
from fairpate.files import make_folder, write_atomically
from fairpate.methods import base
from fairpate.methods.base import Method, Stream, Trained, Training
from fairpate.methods.own_votes import OwnVotes, read_votes_file
from fairpate.methods.voting import ReleasedLabels
from fairpate.nn.fit import Mixture, calibrate, predict_probabilities, pretrain_by_rotations
from fairpate.nn.models import build_model, pin_weights
from fairpate.pages import listed, percent
from fairpate.privacy.accountant import PureReleases
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import event_from
from fairpate.releases.directory import (
    Origin,
    ReleasedArrays,
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_release,
    read_statement,
    save_release,
    sole_worker,
    take_release,
    write_json,
)
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import Odometer, RunCharge, charge_values
from fairpate.report.answers import AnswerGuarantee
from fairpate.run import folder as folders
from fairpate.run.baseline import without_privacy
from fairpate.run.bounded_answers import check_bound
from fairpate.run.folder import as_trained, create_run_directory, record_data
from fairpate.run.forecast import announce_delta, announce_spending, announce_votes, draft_caution, public_units
from fairpate.run.opened import OpenRun
from fairpate.run.private_metrics import (
    Assessment,
    assess,
    assess_privately,
    check_metrics,
    exact_guarantee,
    table_event,
)
from fairpate.run.publication import write_portable, write_reports
from fairpate.run.statement import state_release, with_lost_tables
from fairpate.terminal import Reporter
from fairpate.types import PrivacyStatement, Relation, UserError, stream_seed, strict
from student.card import StudentCard
from student.student import PublicRecords, Student, save_student, train_student
from teachers.ray_cluster import require_cluster
from teachers.ray_pool import open_pool
from teachers.vectors import vectors_on
from teachers.work import tallied

# Makes the noisy sum over several sites from which a run draws its release.
Sums = Callable[[RunDirectory, ReleaseLog], base.NoisySum]
AnyMethod = TypeVar("AnyMethod", bound=Method)
# Label of the noise in the odometer's row for exact metrics of test records that a hash drew from private ones.
EXACT_METRICS = "exact metrics of private test records: not private"


def check_data(config: Method, dataset: Dataset) -> None:
    """Raise ConfigError if the settings ``config`` do not suit the data set. Raise ValueError if features reveal the
    sensitive attribute although this attribute is all that the method protects."""
    if dataset.kind != "image":
        if config.public_data.pretrain is not None:
            raise ConfigError(
                f"public_data.pretrain: learns from images, but {dataset.name} is a table; leave this field out."
            )
        if config.augment != AugmentConfig() and "augment" not in config.unread:
            raise ConfigError(f"augment: changes images, but {dataset.name} is a table; leave this section out.")
        if config.student.method == "fixmatch" and "student.method" not in config.unread:
            raise ConfigError(
                f"student.method: fixmatch changes images, but {dataset.name} is a table; set student.method to "
                "pseudo_label."
            )
    if config.protects_attribute_only:
        if dataset.embedding is not None:
            raise ConfigError(
                f"data.embedding: {config.method} protects the sensitive attribute alone, and with an embedding it "
                "cannot be checked that no column reveals the attribute; set data.embedding to null."
            )
        x, groups = dataset.private.x, dataset.private.z
        # Features are public here, so an attribute among them is published by any model. Pictures are not searched.
        if x.ndim == 2 and len(x):
            members = [x[groups == group] for group in torch.unique(groups)]
            low, high = (torch.stack([bound(part, dim=0) for part in members]) for bound in (torch.amin, torch.amax))
            # Finds any encoding of the group, with any values; a column that is equal in all groups shows nothing.
            shown = ((low == high).all(dim=0) & (low != low[0]).any(dim=0)).nonzero().flatten().tolist()
            if shown:
                raise ValueError(
                    f"{config.method} protects sensitive_features alone and treats X as public, but sensitive_features "
                    f"determine column(s) {', '.join(map(str, shown))} of X; leave them out, or choose a "
                    "method that protects whole records."
                )
    config.check_data(dataset)
    if config.student.reject is not None:
        check_bound(config.student.reject, config, dataset)
    if config.evaluation.metrics != "outside":
        check_metrics(config, dataset)


def run_method(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
    with_graph: bool = False,
    sums: Sums | None = None,
    remarks: Sequence[str] = (),
) -> RunDirectory:
    """Run one method: train and publish its model, or resume where an earlier call or command stopped. Return the paths
    of the run's files, which are then complete.

    Args:
        config: The method with its settings.
        reporter: Displays progress.
        dataset: The records. None: the data set that ``config.data`` names is read with ``load``; otherwise
            ``config.data`` is not read, and every file that describes the run names this data set.
        load: Reads a data set.
        release_of: The folder of a run from whose release this one learns, without reading private records.
        with_graph: Whether to write the ONNX graph ``model.onnx`` too, which takes seconds.
        sums: Makes the noisy sum from which the release is drawn, if private records are at several sites
            (:mod:`fairpate.sites`).
        remarks: Further remarks for the privacy statement.

    Raises:
        UserError, ValueError: Names the field or file, the value and the remedy. Finished stages stay, and nothing is
            charged twice.
    """
    if dataset is None:
        # Votes that were made elsewhere bring their public records along.
        dataset = config.own_dataset(to_train=True)
    with open_run(config, reporter, dataset, load=load, release_of=release_of) as opened, tallied() as worked:
        is_trained = opened.run.student.exists()
        if opened.config.evaluation.metrics == "private" and not opened.config.is_seeded and not is_trained:
            # If a limit has no room for the table of private metrics, nothing is trained.
            table, cost = opened.log.of_part("test"), opened.config.planned_cost(opened.dataset)
            assert cost is not None  # `check_metrics` refuses a method without a guarantee
            if table.stored() is None:
                event = table_event(cost, opened.config.student.reject)
                table.check([event], noise=OS_ENTROPY)
        if not is_trained and not reporter.console.quiet:
            announce_votes(opened)
        opened = replace(opened, noisy_sum=None if sums is None else sums(opened.run, opened.log))
        student, labels = _student(opened, remarks)
        reporter.note("model", str(opened.run.student))
        if worked:  # a repeated call keeps the numbers of the one that worked
            write_json(opened.run.work, worked, private=True)
        assessment, student = _measured(opened, student)
        if with_graph:
            weights = opened.config.data.weights
            encoder_file = None if weights is None else weights.path
            write_portable(opened.run, student, opened.dataset, reporter, encoder_file=encoder_file)
        _report(opened, student, assessment, labels)
    return opened.run


def aggregate(values: dict[str, Any], overrides: Sequence[Override], reporter: Reporter) -> RunDirectory:
    """Release labels from a file of votes made elsewhere; if the file has features, train a student on the labels too.
    A repeated call releases nothing more.

    ``values`` and ``overrides`` configure :class:`OwnVotes`. VotesFileError lists all faults of the file, ConfigError
    all faults of the settings. Without features there is no model, only labels and their privacy statement.
    """
    config = base.configured(values, overrides, method="own_votes")
    # This command is for one method alone, whose settings name the file of votes.
    assert isinstance(config, OwnVotes)
    config.check()
    votes = config.votes
    assert votes.path is not None
    # Absolute: the configuration is stored with the run, and read from other folders.
    places = {"path": votes.path.absolute(), "test": None if votes.test is None else votes.test.absolute()}
    found = read_votes_file(votes)
    votes = votes.model_copy(update=places | {"num_voters": found.num_voters})
    config = config.model_copy(update={"votes": votes})
    if votes.features:
        return run_method(config, reporter, with_graph=True)
    with open_run(config, reporter, found.dataset, command="fairpate aggregate") as opened:
        state_release(opened, opened.config.release(opened))
    reporter.note("labels", str(opened.run.labels))
    return opened.run


@contextmanager
def open_run(
    config: Method,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] = load_data,
    release_of: Path | None = None,
    command: str = "fairpate run",
) -> Iterator[OpenRun]:
    """Context manager: check everything for which a run can be refused before training, and yield the open run. Its
    folder is locked inside the ``with`` block. ``opened.config.release(opened)`` draws and charges the run's release
    without training a model; other runs can then learn from it.

    Arguments and errors as in :func:`run_method`; ``command`` is the running command, for error messages.
    """
    is_given = dataset is not None
    if dataset is None:
        config.require_trainable()
    else:  # `check_data` looks at its features, below
        config.check()
        # Without the data options, which were not read.
        config = config.model_copy(update={"data": DataConfig(name=dataset.name)})
    config = with_pinned_weights(config)
    # Before data are read: a folder that this run cannot use should cost no time.
    embedded = found = folders.check_run_directory(config)
    if release_of is not None:
        base.check_release_of(config, release_of)
        # The released arrays belong to the coordinates of the run that drew them.
        embedded = found if found.embedding.exists() else RunDirectory(root=release_of)
    workers, made = config.worker_ray, (found.votes, found.ledger, found.released, found.student)
    if release_of is None and workers is not None and workers.num_actors != 0 and not any(map(Path.exists, made)):
        require_cluster()
    # Cells of a comparison, which read records once for all, run on workers themselves.
    own = workers if load is load_data and workers is not None and workers.num_actors != 0 else None
    with reporter.stage("data"), nullcontext() if own is None else vectors_on(partial(open_pool, own)):
        dataset = folders.load_for(embedded, config.data, load) if dataset is None else dataset
        check_data(config, dataset)
        if is_given:  # what is loaded was checked with its files
            require_apart(dataset)
        elif config.reads_public_groups:
            check_members(dataset, "public")
    for doubt in (draft_caution(config.data), *doubts_of(dataset)):
        if doubt:
            reporter.note("caution", doubt)
    # Two processes at once would each release, and leave one's model with the other's statement, or under its
    # configuration. The log is made inside the lock: made earlier, it might not see the receipt of the run that it
    # waits for, and charge that run's release once more.
    make_folder(found.root)
    with sole_worker(found.root, command):
        run = create_run_directory(config)
        record_data(run, dataset, given_from_python=is_given)
        if dataset.embedding is not None and not run.embedding.exists():
            save_embedding(dataset.embedding, run.embedding)  # it made the features that the student will read
        if release_of is not None:
            take_release(run, release_of, values_digest(config.settings_without()))
        reporter.note("data", f"{dataset.name}: {len(dataset.private)} private, {len(dataset.public)} public records")
        log = ReleaseLog(run, Odometer(), data=dataset.name, method=config.method, part=dataset.part)
        # A quiet run that asks nobody need not announce its cost.
        is_heard = reporter.asks or not reporter.console.quiet
        if log.stored() is None and release_of is None and is_heard and not config.is_seeded:
            cost, has_votes = config.planned_cost(dataset), config.brings_data
            is_own = config.data.declaration is not None
            # A limit on votes made elsewhere refuses without a question.
            announce_spending(cost, dataset.name, Reporter(reporter.console) if has_votes else reporter, is_own=is_own)
            if cost is not None:
                units = public_units(config, dataset)
                announce_delta(cost.delta, units, cost.unit, reporter, is_own=is_own or has_votes)
        dataset = as_trained(run, config, dataset)
        if left_out := config.check_room(dataset, log):
            reporter.note("budget", left_out)
        yield OpenRun(
            config=config, dataset=dataset, model=nn.Identity(), run=run, log=log, reporter=reporter, seed=config.seed
        )


def train_model(
    config: Method, dataset: Dataset, reporter: Reporter, *, folder: Path, odometer: str | None = None
) -> tuple[Trained, Student]:
    """Train on a data set from Python, without the folder of a run. Return the training's result, and the student after
    self-labelling and calibration on public records.

    ``folder`` is for the files of a method that asks teachers, such as its ledger, and for the key by which records are
    ordered. ``odometer``: the name of the data set under which the operator's odometer charges the release; None: the
    release is not charged. LimitReachedError if the limit for that name would be exceeded.
    """
    config.check()
    if config.student.reject is not None:
        raise ConfigError(
            "student.reject: needs test records, which a fit does not have; publish the model by fairpate.run_method, "
            "or leave this field out."
        )
    config = with_pinned_weights(config.model_copy(update={"data": DataConfig(name=dataset.name), "out": folder}))
    check_data(config, dataset)
    run = RunDirectory(root=folder)
    if config.asks_teachers or odometer is not None:
        run = create_run_directory(config)
        record_data(run, dataset, given_from_python=True)
    log = None
    if odometer is not None and config.is_private:
        log = ReleaseLog(run, Odometer(), data=odometer, method=config.method)
        cost = None if config.is_seeded else config.planned_cost(dataset)
        announce_spending(cost, odometer, reporter, is_own=True)
        if cost is not None:
            announce_delta(cost.delta, public_units(config, dataset), cost.unit, reporter, is_own=True)
    check_model_files(config, dataset, reporter)
    return trained_student(config, as_trained(run, config, dataset), run, reporter, log)


def trained_student(
    config: Method, dataset: Dataset, run: RunDirectory, reporter: Reporter, log: ReleaseLog | None = None
) -> tuple[Trained, Student]:
    """Train a model, then apply self-labelling and calibration on public records to it; return the training's result
    and the student.

    ``log`` charges and stores releases; if it is None, nothing is charged or stored.
    """
    model = initial_model(config, dataset)
    training = Training(dataset=dataset, model=model, run=run, reporter=reporter, seed=config.seed, log=log)
    # Labels are counted query by query, as their ledger charges them.
    if log is None or config.asks_teachers:
        trained = config.train(training)
    else:
        trained = log.model(lambda: config.train(training), is_release=config.releases_model)
    student = student_of(config, dataset, post_process(trained, config, training))
    return trained, replace(student, embedding=dataset.embedding)


def students_of(opened: OpenRun, configs: Sequence[Method], released: ReleasedArrays) -> list[Student]:
    """Train one model for each of ``configs`` from the release that they share, and return the models. This has no
    further privacy cost."""
    students, quiet = [], Reporter(quiet=True)
    with opened.reporter.stage("candidates") as advance:
        for number, config in enumerate(configs, start=1):
            model = initial_model(config, opened.dataset)
            training = replace(opened, model=model, reporter=quiet, seed=config.seed)
            trained = post_process(config.learn(training, released), config, training)
            students.append(student_of(config, opened.dataset, trained))
            advance(number, len(configs))
    return students


def publish_trained(
    config: Method,
    student: Student,
    *,
    counted_by: RunCharge,
    choice: tuple[ReleasedArrays, Origin],
    remarks: Sequence[str],
    environment: Mapping[str, Any],
    reporter: Reporter,
) -> RunDirectory:
    """Publish in ``config.out`` a student that was trained and charged before.

    ``counted_by``: the odometer's row in which the training is charged. ``choice``: the private choice by which the
    student's settings were selected, a release computed from validation records, and its origin. ``environment``: the
    software and machine on which the training began. A repeated call resumes; errors as in :func:`run_method`.
    """
    run = create_run_directory(config)
    write_json(run.environment, environment)
    if student.embedding is not None and not run.embedding.exists():
        save_embedding(student.embedding, run.embedding)
    write_json(run.receipt, charge_values(counted_by))
    save_release(run.choice, *choice)
    with open_run(config, reporter) as opened:
        if not run.student.exists():
            trained = Trained(
                model=student.network, events=counted_by.events, noise=counted_by.noise, remarks=tuple(remarks)
            )
            state_release(opened, trained)
            embedding = None if student.embedding is None else sha256_of(run.embedding)
            placed = replace(student, card=replace(student.card, embedding=embedding))
            write_atomically(run.student, lambda path: save_student(placed, path))
    return run_method(config, reporter)


def _student(opened: OpenRun, remarks: Sequence[str]) -> tuple[Student, ReleasedLabels | None]:
    """Return the published student and the released labels (None for a method that releases no labels). The student is
    trained if it does not exist yet."""
    config, dataset, run, log = opened.config, opened.dataset, opened.run, opened.log
    is_trained = run.student.exists()
    labels: ReleasedLabels | None = None
    if not is_trained:
        check_model_files(config, dataset, opened.reporter)
    if config.asks_teachers:
        # A service may have answered queries since, so what was released is stated again.
        labels = config.release(opened)
        state_release(opened, labels)
    if is_trained:
        # Learned from a ledger or from kept releases, or without privacy, it can be learned again at no cost.
        is_free = labels is not None or not config.is_private or run.released.exists()
        if labels is None:
            if not run.statement.exists():
                again = f"delete {run.student} and give the same command again"
                remedy = again if is_free else "restore it from a copy"
                raise RunDirectoryError(
                    f"{run.statement}: missing, although {run.student} was released with it; {remedy}."
                )
            # Another odometer may know the release, and this one not.
            statement = read_statement(run)
            log.count_published(list(map(event_from, statement.events)), noise=statement.noise)
            if run.choice.exists():
                log.of_part("validation").count_published((), noise=statement.noise)
        return folders.read_student(run, is_free=is_free), labels

    training = replace(opened, model=initial_model(config, dataset))
    if labels is None:
        # Charged before it is post-processed, which may fail with an error that reveals something about the model.
        trained = log.model(lambda: config.train(training), is_release=config.releases_model and config.is_private)
        trained = post_process(trained, config, training)
        # The odometer, then the statement, then the model: a statement without a model says that one was released.
        state_release(opened, trained, remarks)
    else:
        trained = post_process(config.learn(training, labels), config, training)
    student = student_of(config, dataset, trained, embedding=run.embedding)
    # Last of all: the cost of a model that exists has been stated and charged.
    write_atomically(run.student, lambda path: save_student(student, path))
    return student, labels


def with_pinned_weights(config: AnyMethod) -> AnyMethod:
    """Return ``config`` with the checksum of its file of initial weights, if it names such a file, so that the same
    weights are used when the run is repeated. The weights `imagenet` are downloaded if missing."""
    for model in config.networks.values():
        if model.weights is not None:
            pinned = config.backbone.model_copy(update={"weights": pin_weights(model).weights})
            return config.model_copy(update={"backbone": pinned})
    return config


def published_model(config: Method) -> ModelConfig:
    """Return the architecture of the published model: ``student.model``, or with self-labelling that of the second
    student, which learns from the labels of the first."""
    name = config.public_data.self_label
    return config.student_training.model if name in (None, config.student.model.name) else ModelConfig(name=name)


def initial_model(config: Method, dataset: Dataset, architecture: ModelConfig | None = None) -> nn.Module:
    """Return the model from which training starts. Its initial weights are those of the configured weights file, or
    else random, from the run's seed. If pre-training is configured, the model is then trained on public pictures.

    ``architecture``: the layers of the model; None: those of ``student.model``.
    """
    architecture = architecture or config.student_training.model
    shape, seed = tuple(dataset.public.x.shape[1:]), stream_seed(config.seed, Stream.MODEL)
    model = build_model(architecture, input_shape=shape, num_classes=dataset.num_classes, generator_seed=seed)
    if (epochs := config.public_data.pretrain) is not None:
        # A stream of its own: later draws are the same with pre-training and without.
        generator = base.torch_generator(config.seed, Stream.PRETRAINING)
        pretrain_by_rotations(model, architecture, dataset.public.x, epochs=epochs, generator=generator)
    return model


def post_process(trained: Trained, config: Method, training: Training) -> Trained:
    """Return the trained model after self-labelling and calibration, if these are configured. Both read only the
    released model and public features and groups; calibration also reads public labels if it is configured to learn
    from them."""
    dataset, reporter, settings, model = training.dataset, training.reporter, config.public_data, trained.model
    public = dataset.public
    if settings.self_label is not None:
        with reporter.stage("self-label") as advance:
            probability, label = predict_probabilities(model, public.x).max(dim=1)
            sure = probability >= config.student.confidence
            if not sure.any():
                raise ConfigError(
                    f"student.confidence: no public record is labelled with confidence {config.student.confidence}; "
                    "lower student.confidence."
                )
            architecture = published_model(config)
            model = train_student(
                PublicRecords(answered_x=public.x[sure], labels=label[sure], unlabelled_x=public.x[~sure]),
                config.student_training.model_copy(update={"model": architecture}),
                num_classes=dataset.num_classes,
                augmentation=config.augment,
                generator=base.torch_generator(config.seed, Stream.LABELLING),
                on_progress=advance,
                # Pre-trained as well, where the first model was.
                initial_model=None if settings.pretrain is None else initial_model(config, dataset, architecture),
            )
            # The released model had that architecture; this one has the architecture of self-labelling.
            trained = replace(trained, architecture=None)
    if settings.calibration is not None:
        with reporter.stage("calibration"):
            generator = base.torch_generator(config.seed, Stream.CALIBRATION)
            gaps = calibrate(model, public.x, public.z, settings.calibration, y=public.y, generator=generator)
        course = f"disparity on held-out public records {gaps[0]:.3f} -> {gaps[-1]:.3f}"
        reporter.note("calibration", f"{len(gaps) - 1} epochs, {course}")
    return replace(trained, model=model)


def student_of(config: Method, dataset: Dataset, trained: Trained, *, embedding: Path | None = None) -> Student:
    """Return the published model with the description (architecture, classes, groups, checksums) that is stored in its
    file. ``embedding``: the file of the embedding that the model reads, if any."""
    mixing, network = trained.mixing_GCC, trained.model
    card = StudentCard(
        model=trained.architecture or published_model(config),
        input_shape=tuple(dataset.public.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        idp3=config.student.idp3,
        num_members=len(network.members) if isinstance(network, Mixture) else None,
        mixing=None if mixing is None else tuple(tuple(tuple(row) for row in table) for table in mixing.tolist()),
        num_training_labels=trained.num_training_labels,
        embedding=sha256_of(embedding) if embedding is not None and dataset.embedding is not None else None,
        encoder=dataset.encoder,
    )
    return Student(card=card, network=network)


def check_model_files(config: Method, dataset: Dataset, reporter: Reporter) -> None:
    """Build every model for which ``config`` names a file of initial weights, and the student that self-labelling
    trains, to check that they fit the records.

    Prints which weights files are used. ValueError if a weights file or an architecture does not fit.
    """
    shape = tuple(dataset.public.x.shape[1:])
    # Before anything is trained or charged: a model that does not fit would end the run only after that.
    for name, model in config.networks.items():
        if model.weights is not None:
            build_model(model, input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
            reporter.note("weights", f"{name} starts from {model.weights.path}, sha256 {model.weights.sha256}")
    if config.public_data.self_label is not None:
        try:
            build_model(published_model(config), input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
        except ValueError as error:
            raise ConfigError(f"public_data.self_label: the self-labelled model cannot be built: {error}") from error


def _measured(opened: OpenRun, student: Student) -> tuple[Assessment, Student]:
    """Measure the published model on the test records, by a table that was charged for if metrics are private. If a
    bound on the errors of its answers is asked for, add the thresholds that keep it to the model's file. Return the
    measurement and the published model.

    BoundError if the bound cannot be kept for a group and the run should stop then.
    """
    config, dataset, bound = opened.config, opened.dataset, opened.config.student.reject
    # The thresholds of an earlier call are computed again from the same table.
    student = replace(student, card=replace(student.card, answers=None))
    if config.evaluation.metrics == "private":
        statement = with_lost_tables(opened, read_statement(opened.run))
        with opened.reporter.stage("metrics"):
            assessment = assess_privately(opened, student, statement)
        if assessment.answers is not None:
            student = _bounded(opened, student, assessment.answers)
    else:
        if dataset.part and config.is_private:
            # The hash drew test records from private ones: a later table of them should not look like the first. No sum
            # covers exact metrics, so that the odometer lists them alone.
            relation: Relation = "replace one" if config.protects_attribute_only else "add or remove one"
            event = PureReleases(count=1, epsilon=math.inf, unit=config.unit_of(dataset), relation=relation)
            opened.log.of_part("test").charge([event], noise=EXACT_METRICS)
        answers = None if bound is None else exact_guarantee(bound, student, dataset, config)
        if answers is not None:
            student = _bounded(opened, student, answers)
        assessment = assess(student, dataset, config.evaluation, seed=config.seed)
        if answers is not None:
            assessment = replace(assessment, answers=answers.shown_as(assessment.headline))
    if assessment.answers is not None:
        said = replace(read_statement(opened.run), errors_of_answers=assessment.answers.sentence)
        write_json(opened.run.statement, strict(said))
        opened.reporter.note("answers", f"{assessment.answers.sentence}.")
        opened.reporter.note("answered", assessment.answers.answered_words)
    return assessment, student


class BoundError(UserError):
    """Raised for a bound on the errors of answers that cannot be guaranteed for every group."""


def _bounded(opened: OpenRun, student: Student, answers: AnswerGuarantee) -> Student:
    """Write the thresholds to the model's file, and return the model with them."""
    if answers.bound.otherwise == "stop" and answers.unmet:
        raise BoundError(
            f"student.reject: at most {percent(answers.bound.max_error)} wrong answers cannot be guaranteed for "
            f"{listed(answers.unmet)}, so nothing more is published. {opened.run.student} is a model that answers "
            "everything, without this guarantee. Allow more errors in another run folder, or refuse these groups with "
            "--set student.reject.otherwise=refuse."
        )
    student = replace(student, card=replace(student.card, answers=answers.rule))
    write_atomically(opened.run.student, lambda path: save_student(student, path))
    return student


def record_of(
    config: Method, statement: PrivacyStatement, assessment: Assessment, labels: ReleasedLabels | None
) -> types.RunRecord:
    """Return a run as a row of a comparison, at its published privacy cost: its configuration, its ``statement``, the
    metrics of its published model with all that it refuses, and the numbers of its ``labels``, if it released any."""
    measured, answers = assessment.of_answers, assessment.answers
    answered_by_group = None
    # Without `spending`, queries are asked of other groups than those of the records.
    if labels is not None and labels.spending is not None:
        counts = np.bincount(labels.labelled.groups, minlength=len(measured.group_names))
        answered_by_group = tuple(counts.tolist())
    stated = ("method", "unit", "relation", "delta", "declared_units")
    metrics = ("accuracy", "coverage", "disparity", "majority_accuracy", "fairness", "metrics")
    return types.RunRecord(
        data=config.data.name,
        seed=config.seed,
        config=base.determining_values(config),
        **{name: getattr(statement, name) for name in stated},
        epsilon=math.inf if statement.epsilon is None else statement.epsilon,
        epsilon_is_data_dependent=False,
        **{name: getattr(measured, name) for name in (*metrics, "degenerate", "underserved_groups")},
        unmeasured_groups=measured.not_measured,
        answered=None if statement.queries is None else statement.queries.answered,
        answered_by_group=answered_by_group,
        **({} if answers is None else answers.kept),
    )


def _report(opened: OpenRun, student: Student, assessment: Assessment, labels: ReleasedLabels | None) -> None:
    """Write the metrics of the published model, the run's row of a comparison and the report pages."""
    config, dataset, run = opened.config, opened.dataset, opened.run
    statement = read_statement(run)
    write_json(run.metrics, assessment.to_json())
    baseline = without_privacy(dataset.private, dataset.test, assessment.measured_N)
    if baseline is None:
        run.without_privacy.unlink(missing_ok=True)  # that of an evaluation with other settings
    else:
        write_json(run.without_privacy, asdict(baseline), private=True)
    private = None
    if config.keeps_release and run.released.exists():
        private = config.private_population(read_release(run.released)[0], dataset, student)
        if private is not None:
            write_json(run.private_population, private.to_json())
    record = record_of(config, statement, assessment, labels)
    write_json(run.record, strict(asdict(record)))
    if run.costs.exists():  # the same row at the data-dependent privacy cost, not to be published
        spent = read_json(run.costs)["epsilon_data_dependent"]
        write_json(run.private_record, strict(asdict(replace(record, epsilon=spent, epsilon_is_data_dependent=True))))
    with opened.reporter.stage("report"):
        write_reports(
            run,
            dataset,
            student,
            assessment,
            spending=None if labels is None else labels.spending,
            private_population=private,
        )
