"""What a run's settings ask of a data set, a budget and model files: refused before anything is computed."""

from __future__ import annotations

from fairpate.app.backbones import check_weights
from fairpate.app.spending.meter import Meter
from fairpate.app.terminal.progress import Reporter
from fairpate.config import AugmentConfig, ConfigError, ModelConfig, Section
from fairpate.data import Dataset
from fairpate.methods.attribute import require_unseen
from fairpate.methods.definition import Method
from fairpate.methods.pate import PateFamily
from fairpate.methods.voting import VotingMethod


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
        meter.check(plan.all_events(num_fitting, num_classes=dataset.num_classes), noise=plan.source.label)
    if planned is not None and num_fitting < planned:
        reporter.note("budget", f"has room for {num_fitting} of {planned} queries; the others will not be asked")


def check_model_files(config: Method, dataset: Dataset, reporter: Reporter) -> None:
    """Errors of :func:`fairpate.app.backbones.check_weights`, for every model that starts from a file."""
    models: dict[str, ModelConfig] = {"teachers": config.teachers.model} if isinstance(config, PateFamily) else {}
    models["model"] = config.student.model
    if published_model(config) != config.student.model:
        models["published model"] = published_model(config)
    check_weights(models, dataset, reporter)


def published_model(config: Method) -> ModelConfig:
    """The architecture of what is published: that of self-labelling's student where it has one of its own."""
    labelling = config.public_data.self_label
    return (labelling and labelling.model) or config.student.model
