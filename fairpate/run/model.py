"""The model of a run: its initial weights, which must fit the records, its steps after training, and the description
in its file."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import nn

from fairpate.config import ConfigError, ModelConfig
from fairpate.data import Dataset
from fairpate.data.dataset import sha256_of
from fairpate.methods import base
from fairpate.methods.base import Method, Stream, Trained, Training
from fairpate.nn.fit import Mixture, calibrate, predict_probabilities, pretrain_by_rotations
from fairpate.nn.models import build_model, pin_weights
from fairpate.terminal import Reporter
from fairpate.types import stream_seed
from student.card import StudentCard
from student.student import PublicRecords, train_student

AnyMethod = TypeVar("AnyMethod", bound=Method)


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
    if config.public_data.pretrain is not None:
        # A stream of its own: later draws are the same with pre-training and without.
        generator = base.torch_generator(config.seed, Stream.PRETRAINING)
        epochs = config.public_data.pretrain
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


def student_card(config: Method, dataset: Dataset, trained: Trained, *, embedding: Path | None = None) -> StudentCard:
    """Return the description of the published model (architecture, classes, groups, checksums) that is stored in the
    model's file. ``embedding``: the file of the embedding that the model reads, if any."""
    mixing, network = trained.mixing_GCC, trained.model
    return StudentCard(
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


def check_model_files(config: Method, dataset: Dataset, reporter: Reporter) -> None:
    """Build every model for which ``config`` names a file of initial weights, and the student that self-labelling
    trains, to check that they fit the records.

    Prints which weights files are used. ValueError if a weights file or an architecture does not fit.
    """
    models = config.networks
    shape = tuple(dataset.public.x.shape[1:])
    # Before anything is trained or charged: a model that does not fit would end the run only after that.
    for name, model in models.items():
        if model.weights is not None:
            build_model(model, input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
            reporter.note("weights", f"{name} starts from {model.weights.path}, sha256 {model.weights.sha256}")
    if config.public_data.self_label is not None:
        try:
            build_model(published_model(config), input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
        except ValueError as error:
            raise ConfigError(f"public_data.self_label: the self-labelled model cannot be built: {error}") from error
