"""Checks of a run before anything is trained or charged: do the settings suit the data set, and the weights files the
records?"""

import torch

from fairpate.config import AugmentConfig, ConfigError
from fairpate.data import Dataset
from fairpate.methods.base import Method
from fairpate.nn.models import build_model
from fairpate.run.answers import check_bound
from fairpate.run.model import published_model
from fairpate.run.private_metrics import check_metrics
from fairpate.terminal import Reporter


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
    check_bound(config, dataset)
    if config.evaluation.metrics != "outside":
        check_metrics(config, dataset)


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
