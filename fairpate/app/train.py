"""Train one method on the splits of a data set, post-process on public records, price it, evaluate it.

The same steps for every method: its model starts from the same seed, public records may pre-train, label and
calibrate it, the reject option may refuse predictions, and one RunRecord results. What has no privacy at all goes to
``private/``; everything else is published with the statement that prices it.

A model that was released is never trained again: a repeated command goes on from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text
from torch import nn

from fairpate.app.backbones import check_weights, with_pinned_weights
from fairpate.app.methods import METHODS
from fairpate.app.methods.training import Method, Training
from fairpate.app.odometer import Meter, Odometer, Standing, event_from, standing_remarks
from fairpate.app.pipeline import assess, check_teachers, read_student, student_card
from fairpate.app.progress import Reporter
from fairpate.app.rundir import (
    RunDirectory,
    RunDirectoryError,
    check_run_directory,
    config_digest,
    create_run_directory,
    determining_values,
    read_json,
    write_json,
)
from fairpate.app.seeds import Stream, stream_seed, torch_generator
from fairpate.app.summary import baseline_rows, interval_text, number_text
from fairpate.app.terminal import facts
from fairpate.app.trained_on import record_data, with_given_data
from fairpate.baselines.attribute import require_unseen
from fairpate.baselines.method import Price, Trained, price
from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, load_dataset
from fairpate.evaluation.metrics import Evaluation, nan_to_none
from fairpate.evaluation.page import epsilon_text
from fairpate.files import write_atomically
from fairpate.names import nearest
from fairpate.nn.calibrate import calibrate
from fairpate.nn.mixture import Mixture
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_probabilities
from fairpate.nn.pretrain import pretrain_by_rotations
from fairpate.privacy.accountant import Event
from fairpate.train_config import TrainConfig
from fairpate.types import TELLS_SIZE, RunRecord, Unit
from student.predict import Student, StudentCard, save_student
from student.train import PublicRecords, train_student

_NOT_PROTECTED: dict[Unit, str | None] = {
    "record": None,
    "sensitive attribute": "features and labels, which the model is trained on as if they were public",
}


@dataclass(frozen=True, kw_only=True)
class TrainingStatement:
    """The claim that is published with a trained model.

    ``epsilon`` is null where nothing is promised. ``events`` are what was priced; ``noise`` is ``os_entropy`` or says
    why nobody is protected. ``not_protected``: what the model may reveal without noise. ``epsilon_as_published`` is the
    paper's number, where its own accounting was asked for: no guarantee. ``earlier_releases`` on the same data set were
    counted before this one and cost ``epsilon_with_earlier`` together with it; null where it is not private.
    """

    method: str
    unit: str
    relation: str
    delta: float
    epsilon: float | None
    accounting: str
    noise: str
    events: tuple[Event, ...]
    not_protected: str | None = None
    remarks: tuple[str, ...] = ()
    epsilon_as_published: float | None = None
    earlier_releases: int | None = None
    epsilon_with_earlier: float | None = None
    tuning_accounted: bool = False


@dataclass(frozen=True, kw_only=True)
class UnprotectedRun(RunDirectory):
    """The folder of a run without any privacy: nothing of it may be published."""

    @property
    def public(self) -> Path:
        """Everything is the operator's."""
        return self.private


def train_method(
    config: TrainConfig,
    reporter: Reporter,
    dataset: Dataset | None = None,
    *,
    load: Callable[[DataConfig], Dataset] | None = None,
) -> RunDirectory:
    """Train ``config.method``, or go on where an earlier command left off, and leave the run directory complete.

    ``dataset`` None reads what ``config.data`` names, with ``load`` where one is given. Any other is trained on as it
    is, and every file that describes the run names it; ``config.data`` then counts for nothing. Errors name the field
    or file, the value and the remedy. Nothing is charged twice: a released model stays.
    """
    is_given = dataset is not None
    method = METHODS.get(config.method)
    if method is None:
        raise ConfigError(f"method: no method {config.method!r}{nearest(config.method, METHODS)}.")
    if dataset is None:
        method.require_trainable(config)
    else:  # its features are looked at themselves, below
        method.check(config)
    learns_from_labels = method.asks_teachers or method.has_own_teachers
    config = with_pinned_weights(config)
    if dataset is not None:
        config = with_given_data(config, dataset)
    config = config.model_copy(update={"out": config.out or default_folder(config)})
    check_run_directory(config)
    with reporter.stage("data"):
        dataset = (load or load_dataset)(config.data) if dataset is None else dataset
        _check_image_settings(dataset, config)
        if method.attribute_only(config):
            require_unseen(dataset.private.x, dataset.private.z, method=config.method)
        if learns_from_labels:
            check_teachers(dataset, config)
    run = create_run_directory(config)
    record_data(run, dataset, given_from_python=is_given)
    if not method.promises(config):
        run.public.rmdir()
        run = UnprotectedRun(root=run.root)
    meter = Meter(run, Odometer(), data=dataset.name, method=config.method)
    is_free = learns_from_labels or not method.promises(config)
    if run.student.exists():
        _count_earlier(meter, run)
    else:
        _require_unreleased(run, is_free=is_free)
        if not is_free:
            meter.start_another()
        teachers = {"teachers": config.teachers.model} if learns_from_labels else {}
        check_weights(teachers | {"model": config.student.model}, dataset, reporter)
        student = _train(method, dataset, config, run, reporter, meter)
        write_atomically(run.student, lambda path: save_student(student, path))
    reporter.note("model", str(run.student))
    assessment = assess(run, config, dataset, read_student(run, is_free=is_free))
    headline = next(iter(assessment.evaluations.values()))
    record = _record(config, read_statement(run), headline)
    write_json(run.record, plain(asdict(record)))
    if run.costs.exists():
        spent = read_json(run.costs)["epsilon_data_dependent"]
        write_json(run.private_record, plain(asdict(replace(record, epsilon=spent, epsilon_is_data_dependent=True))))
    return run


def _require_unreleased(run: RunDirectory, *, is_free: bool) -> None:
    """RunDirectoryError where a model was released and is gone, and training it again would be another release."""
    if run.statement.exists() and not is_free:
        raise RunDirectoryError(
            f"{run.student}: gone, although {run.statement} says it was released. Training again would be a second "
            "release of the same records: restore it from a copy, or start a new run folder with --out and count both "
            "epsilons."
        )


def _check_image_settings(dataset: Dataset, config: TrainConfig) -> None:
    asked = {
        "sgd.augment": not config.sgd.augment.is_identity,
        "student.fit.augment": not config.student.fit.augment.is_identity,
        "public_data.pretrain": config.public_data.pretrain is not None,
    }
    for field, is_asked in asked.items():
        if is_asked and dataset.kind != "image":
            raise ConfigError(f"{field}: changes images, and {dataset.name} is a table; leave it out.")


def _train(
    method: Method, dataset: Dataset, config: TrainConfig, run: RunDirectory, reporter: Reporter, meter: Meter
) -> Student:
    model = _initial_model(dataset, config)
    training = Training(dataset=dataset, config=config, run=run, model=model, reporter=reporter, meter=meter)
    trained = method.train(training)
    network = _post_process(trained.model, dataset, config, reporter)
    cost = price(trained.events, config.target)
    # A ledger's labels are out by now, within the limit; all else is released from here on.
    meter.record(trained.events, noise=trained.noise, enforce=meter.stored() is None)
    standing = meter.standing(delta=cost.delta)
    # Right before the model: a statement without a model says that one was released and is gone.
    write_json(run.statement, plain(asdict(_statement(config, trained, cost, standing))))
    return Student(card=_card(config, dataset, trained, network), network=network)


def _count_earlier(meter: Meter, run: RunDirectory) -> None:
    """Count a model that a version without an odometer released, by its statement."""
    if meter.stored() is None:
        statement = read_statement(run)
        events = [event_from(values, statement["unit"]) for values in statement["events"]]
        meter.record(events, noise=statement["noise"], enforce=False)


def _card(config: TrainConfig, dataset: Dataset, trained: Trained, network: nn.Module) -> StudentCard:
    mixing = trained.mixing_GCC
    return replace(
        student_card(config, dataset),
        num_members=len(network.members) if isinstance(network, Mixture) else None,
        mixing=None if mixing is None else tuple(tuple(tuple(row) for row in table) for table in mixing.tolist()),
    )


def _initial_model(dataset: Dataset, config: TrainConfig) -> nn.Module:
    architecture = config.student.model
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


def _post_process(model: nn.Module, dataset: Dataset, config: TrainConfig, reporter: Reporter) -> nn.Module:
    """Self-labelling and calibration, which read the released model and public features and groups only."""
    public, settings = dataset.public, config.public_data
    if settings.self_label:
        with reporter.stage("self-label") as advance:
            probability, label = predict_probabilities(model, public.x).max(dim=1)
            sure = probability >= config.student.confidence
            if not sure.any():
                raise ConfigError(
                    f"student.confidence: no public label is as sure as {config.student.confidence}; lower it."
                )
            model = train_student(
                PublicRecords(answered_x=public.x[sure], labels=label[sure], unlabelled_x=public.x[~sure]),
                config.student,
                num_classes=dataset.num_classes,
                generator=torch_generator(config.seed, Stream.LABELLING),
                on_progress=advance,
                initial_model=_initial_model(dataset, config) if settings.pretrain is not None else None,
            )
    if settings.calibration is not None:
        with reporter.stage("calibration"):
            generator = torch_generator(config.seed, Stream.CALIBRATION)
            done = calibrate(model, public.x, public.z, settings.calibration, generator=generator)
        course = " -> ".join(f"{disparity:.3f}" for disparity in (done.disparities[0], done.disparities[-1]))
        reporter.note("calibration", f"{done.num_epochs} epochs, disparity on held-out public records {course}")
    return model


def default_folder(config: TrainConfig) -> Path:
    """``runs/METHOD-DATA-DIGEST``."""
    return Path("runs") / f"{config.method}-{re.sub('[^A-Za-z0-9_.-]+', '-', config.data.name)}-{config_digest(config)}"


def _statement(config: TrainConfig, trained: Trained, cost: Price, standing: Standing | None) -> TrainingStatement:
    return TrainingStatement(
        method=config.method,
        unit=cost.unit,
        relation=cost.relation,
        delta=cost.delta,
        epsilon=cost.epsilon,
        accounting=cost.accounting,
        noise=trained.noise,
        events=trained.events,
        not_protected=_NOT_PROTECTED[cost.unit],
        remarks=(
            *trained.remarks,
            *size_remarks(config, trained.events, cost.unit),
            *standing_remarks(standing, delta=cost.delta),
        ),
        epsilon_as_published=trained.epsilon_as_published,
        earlier_releases=None if standing is None else standing.earlier,
        epsilon_with_earlier=None if standing is None else standing.epsilon,
    )


def size_remarks(config: TrainConfig, events: Sequence[Event], unit: Unit) -> tuple[str, ...]:
    """Where records come and go their number is private, but a sampling rate that is set for it tells it."""
    samples = any(getattr(event, "sampling_rate", 1) < 1 for event in events)
    return (TELLS_SIZE,) if samples and unit == "record" and config.dp_sgd.num_records is None else ()


def _record(config: TrainConfig, statement: dict[str, Any], headline: Evaluation) -> RunRecord:
    return RunRecord(
        method=config.method,
        data=config.data.name,
        seed=config.seed,
        unit=statement["unit"],
        relation=statement["relation"],
        delta=statement["delta"],
        epsilon=math.inf if statement["epsilon"] is None else statement["epsilon"],
        epsilon_is_data_dependent=False,
        accuracy=headline.accuracy,
        coverage=headline.coverage,
        disparity=headline.disparity,
        config=determining_values(config),
        majority_accuracy=headline.majority_accuracy,
        degenerate=headline.degenerate,
    )


def read_statement(run: RunDirectory) -> dict[str, Any]:
    """The published statement as plain values."""
    return read_json(run.statement)


def plain(value: Any) -> Any:
    """Strict JSON values: an undefined number and an infinite one are null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else nan_to_none(value)


def summarise_training(run: RunDirectory) -> Group:
    """The numbers of a finished training, and where its files are."""
    statement = read_statement(run)
    record, metrics = read_json(run.record), read_json(run.metrics)
    gap = metrics["gaps"]["dp_one_vs_rest"]
    epsilon = "none: no guarantee" if statement["epsilon"] is None else epsilon_text(statement["epsilon"])
    guarantee = (
        f"{epsilon} at delta {statement['delta']:g} ({statement['relation']} {statement['unit']}; "
        f"{statement['accounting']}; noise: {statement['noise']})"
    )
    rows = [
        ("method", f"{record['method']} on {record['data']}, seed {record['seed']}"),
        ("accuracy", f"{number_text(record['accuracy'])} on {metrics['num_answered']} test records"),
        *baseline_rows(metrics),
        ("coverage", number_text(record["coverage"])),
        ("demographic disparity", f"{number_text(record['disparity'])}, {interval_text(gap)}"),
        ("epsilon", guarantee),
        ("model", str(run.student)),
        ("record", str(run.record)),
    ]
    return Group(Text(), facts(rows))
