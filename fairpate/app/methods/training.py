"""What a method is given by `fairpate train`, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fairpate.app.odometer import Meter
from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory
from fairpate.app.seeds import Stream, torch_generator
from fairpate.baselines.method import Trained
from fairpate.config import ConfigError, StudentConfig
from fairpate.data import Dataset, option_showing_attribute
from fairpate.train_config import TrainConfig

_OF_ALL = ("method", "seed", "out", "storage", "ray", "data", "target", "student", "public_data")
_HOW_A_STUDENT_LEARNS = tuple(
    f"student.{field}" for field in StudentConfig.model_fields if field not in ("model", "idp3")
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The data, the whole configuration, the folder, the model to start from, and where progress is told.

    ``meter`` counts what is released in the operator's odometer; None for an estimator, which is not counted.
    """

    dataset: Dataset
    config: TrainConfig
    run: RunDirectory
    model: nn.Module
    reporter: Reporter
    meter: Meter | None = None

    def generator(self, stream: Stream) -> torch.Generator:
        """A generator for one part of the run, apart from all others."""
        return torch_generator(self.config.seed, stream)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a method is trained.

    Where ``promises`` says no for a configuration, nobody is protected and nothing is published. It either
    ``asks_teachers`` about public records, whose votes runs may share, or ``has_own_teachers``. ``sections`` of the
    configuration are its own, but for the fields ``ignored`` in them; :meth:`reads` says what it reads in all.
    ``check`` raises ConfigError for a configuration that it cannot train, before anything is written.
    ``attribute_only`` says whether it protects the sensitive attribute alone and counts features as public.
    """

    train: Callable[[Training], Trained]
    sections: tuple[str, ...]
    promises: Callable[[TrainConfig], bool] = lambda _: True
    ignored: tuple[str, ...] = ()
    asks_teachers: bool = False
    has_own_teachers: bool = False
    check: Callable[[TrainConfig], None] = lambda _: None
    attribute_only: Callable[[TrainConfig], bool] = lambda _: False

    def reads(self, config: TrainConfig, field: str) -> bool:
        """Whether training with ``config`` reads the dotted ``field``; what all methods read is read."""
        if _is_in(field, self.ignored):
            return False
        if _is_in(field, _HOW_A_STUDENT_LEARNS):
            return self.asks_teachers or self.has_own_teachers or config.public_data.self_label
        return _is_in(field, (*_OF_ALL, *self.sections))

    def require_trainable(self, config: TrainConfig) -> None:
        """ConfigError for what ``check`` refuses, and for an attribute among the features that count as public."""
        self.check(config)
        option = option_showing_attribute(config.data.name, config.data.options)
        if option is not None and self.attribute_only(config):
            raise ConfigError(
                f"data.options.{option}: {config.method} protects the sensitive attribute alone and counts features as "
                "public, but with true they show it; set it to false, or choose a method that protects whole records."
            )


def _is_in(field: str, sections: tuple[str, ...]) -> bool:
    return any(f"{field}.".startswith(f"{section}.") for section in sections)
