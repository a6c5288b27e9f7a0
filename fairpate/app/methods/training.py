"""What a method is given by `fairpate train`, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory
from fairpate.app.seeds import Stream, torch_generator
from fairpate.baselines.method import Trained
from fairpate.data import Dataset
from fairpate.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Training:
    """The data, the whole configuration, the folder, the model to start from, and where progress is told."""

    dataset: Dataset
    config: TrainConfig
    run: RunDirectory
    model: nn.Module
    reporter: Reporter

    def generator(self, stream: Stream) -> torch.Generator:
        """A generator for one part of the run, apart from all others."""
        return torch_generator(self.config.seed, stream)


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a method is trained.

    Where ``promises`` says no for a configuration, nobody is protected and nothing is published. It either
    ``asks_teachers`` about public records, whose votes runs may share, or ``has_own_teachers``.
    ``check`` raises ConfigError for a configuration that it cannot train, before anything is written.
    """

    train: Callable[[Training], Trained]
    promises: Callable[[TrainConfig], bool] = lambda _: True
    asks_teachers: bool = False
    has_own_teachers: bool = False
    check: Callable[[TrainConfig], None] = lambda _: None
