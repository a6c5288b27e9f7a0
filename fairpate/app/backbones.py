"""Weights files of a run: found, pinned to a checksum and tried before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fairpate.app.terminal.progress import Reporter
from fairpate.config import ModelConfig, Section
from fairpate.data import Dataset
from fairpate.nn.models import build_model
from fairpate.nn.weights import pin_weights

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
