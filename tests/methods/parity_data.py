"""Records on which a classifier without any constraint is unfair, its weights, and the numbers it is judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fairpate.config import ModelConfig
from fairpate.data import Dataset, Split
from fairpate.methods.base import Method, Training
from fairpate.nn.models import build_model
from fairpate.releases.directory import RunDirectory
from fairpate.terminal import Reporter

Floats = npt.NDArray[np.float64]


def records(count: int, seed: int, *, num_groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, 3), labels and groups; the last feature betrays the group, and groups differ in their labels."""
    generator = np.random.default_rng(seed)
    groups = generator.integers(num_groups, size=count)
    x = generator.normal(size=(count, 3))
    x[:, 2] += 1.5 * groups
    chance = 1 / (1 + np.exp(-(1.5 * x[:, 0] + 0.8 * (x[:, 2] - 1))))
    labels = generator.random(count) < chance
    return torch.from_numpy(x).float(), torch.from_numpy(labels).long(), torch.from_numpy(groups)


def signal_records(count: int, seed: int = 0, num_groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The label follows a signal and the group, which is a feature too."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.arange(count) % num_groups
    signal = torch.randn(count, generator=generator)
    x = torch.stack([signal, z.float(), torch.randn(count, generator=generator)], dim=1)
    return x, (signal + 1.5 * z - 0.75 > 0).long(), z


def trained_on(method: Method, x: Tensor, y: Tensor, z: Tensor) -> Any:
    """What ``method`` learns from these private records: two classes, a logistic model, nothing stored."""
    private, groups = Split(x=x, y=y, z=z, record_id=tuple(map(str, range(len(x))))), tuple(map(str, z.unique()))
    none = private.take([])
    dataset = Dataset(
        name="records",
        kind="tabular",
        private=private,
        public=none,
        validation=none,
        test=none,
        label_names=("no", "yes"),
        group_names=groups,
        sensitive_attribute="z",
    )
    logistic = ModelConfig(name="logistic")
    model = build_model(logistic, input_shape=tuple(x.shape[1:]), num_classes=2, generator_seed=0)
    run, reporter = RunDirectory(root=Path("nowhere")), Reporter(quiet=True)
    return method.train(Training(dataset=dataset, model=model, run=run, reporter=reporter, seed=method.seed))


def weights(model: nn.Module) -> Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def error(positive_N: npt.ArrayLike, labels: Tensor) -> float:
    """Expected share of mistakes of a classifier that says 1 with these probabilities."""
    positive, y = np.asarray(positive_N, dtype=np.float64), labels.numpy()
    return float(np.where(y == 1, 1 - positive, positive).mean())


def odds_gap(positive_N: npt.ArrayLike, labels: Tensor, groups: Tensor) -> float:
    """The largest gap of true or false positive rates to group 0."""
    positive, y, z = np.asarray(positive_N, dtype=np.float64), labels.numpy(), groups.numpy()
    rate = {(a, k): positive[(z == a) & (y == k)].mean() for a in np.unique(z) for k in (0, 1)}
    return max(abs(rate[a, k] - rate[0, k]) for a, k in rate)
