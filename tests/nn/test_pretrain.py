"""Rotation pre-training: which weights it sets, which not, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from fairpate.config import ModelConfig
from fairpate.nn.fit import pretrain_by_rotations
from fairpate.nn.models import build_model

ARCHITECTURE = ModelConfig(name="cnn", hidden=(4,))


def test_all_but_the_last_layer_is_learned_from_turned_images() -> None:
    x = (torch.rand(24, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    model = build_model(ARCHITECTURE, input_shape=(1, 16, 16), num_classes=4, generator_seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def pretrained(epochs: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        pretrain_by_rotations(model, ARCHITECTURE, x, epochs=epochs, generator=generator)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    start, learned = pretrained(0), pretrained(3)
    head = list(before)[-2:]
    assert all(torch.equal(learned[name], before[name]) for name in head)
    assert all(not torch.equal(learned[name], start[name]) for name in before if name not in head)


@pytest.mark.parametrize("shape", [(5, 7), (5, 1, 16, 12), (0, 1, 16, 16)])
def test_what_cannot_be_turned_is_refused(shape: tuple[int, ...]) -> None:
    architecture = ModelConfig(name="logistic")
    model = build_model(architecture, input_shape=shape[1:], num_classes=2, generator_seed=0)
    with pytest.raises(ValueError, match="square public images"):
        pretrain_by_rotations(model, architecture, torch.zeros(shape), epochs=1, generator=torch.Generator())
