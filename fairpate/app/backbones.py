"""Weights files of a run: found, pinned to a checksum and tried before any work starts."""

from __future__ import annotations

from collections.abc import Mapping

from fairpate.app.progress import Reporter
from fairpate.config import Config, ModelConfig
from fairpate.data import Dataset
from fairpate.nn.models import build_model
from fairpate.nn.weights import pin_weights


def with_pinned_weights(config: Config) -> Config:
    """``config`` with the checksums of all weights files; `imagenet` is downloaded where it is not there yet."""
    teachers = config.teachers.model_copy(update={"model": pin_weights(config.teachers.model)})
    student = config.student.model_copy(update={"model": pin_weights(config.student.model)})
    return config.model_copy(update={"teachers": teachers, "student": student})


def check_weights(models: Mapping[str, ModelConfig], dataset: Dataset, reporter: Reporter) -> None:
    """Build what starts from a file once, and say which file; ValueError where it does not fit."""
    shape = tuple(dataset.public.x.shape[1:])
    for name, model in models.items():
        if model.weights is not None:
            build_model(model, input_shape=shape, num_classes=dataset.num_classes, generator_seed=0)
            reporter.note("weights", f"{name} start from {model.weights.path}, sha256 {model.weights.sha256}")
