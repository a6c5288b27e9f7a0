"""Records of two groups and a small student for them, for tests of estimators and of services."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.types import GateRule
from student.card import StudentCard
from student.student import Student


def two_groups(count: int, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Features, labels and groups. The second feature nearly is the group, and the label follows both features."""
    generator = np.random.default_rng(seed)
    group = np.array(["a", "b"])[np.arange(count) % 2]
    x = np.stack([generator.normal(size=count), (group == "b") + generator.normal(scale=0.1, size=count)], axis=1)
    return x, np.where(x[:, 0] + x[:, 1] - 0.5 > 0, "yes", "no"), group


def untrained_student(idp3: GateRule | None = None) -> Student:
    """Logistic regression with random weights on four features."""
    card = StudentCard(
        model=ModelConfig(name="logistic"),
        input_shape=(4,),
        label_names=("no", "yes"),
        group_names=("red", "green"),
        sensitive_attribute="colour",
        idp3=idp3,
    )
    network = build_model(card.model, input_shape=card.input_shape, num_classes=2, generator_seed=0).eval()
    return Student(card=card, network=network)
