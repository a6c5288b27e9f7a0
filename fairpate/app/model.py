"""The model that a run publishes: what it starts from, what public records make of it, and what its file says."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fairpate.app.early_checks import published_model
from fairpate.app.rundir import (
    RunDirectory,
)
from fairpate.app.seeds import Stream, stream_seed, torch_generator
from fairpate.app.students import student_card
from fairpate.config import ConfigError, ModelConfig, StudentConfig
from fairpate.data import Dataset
from fairpate.data.files import sha256_of
from fairpate.methods.definition import Method, Training
from fairpate.methods.trained import Trained
from fairpate.nn.calibrate import calibrate
from fairpate.nn.mixture import Mixture
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_probabilities
from fairpate.nn.pretrain import pretrain_by_rotations
from student.card import StudentCard
from student.train import PublicRecords, train_student


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
