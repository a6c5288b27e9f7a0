"""Networks for tests: torchvision's architectures with random values, and pictures for them; nothing is downloaded."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from fairpate.encoders import prepare_torchvision

BACKBONES = ("resnet18", "resnet50", "densenet121")


def published(name: str) -> nn.Module:
    """torchvision's network with random weights and random statistics, in evaluation mode: a copy of one's own."""
    return deepcopy(_network(name))


@cache
def _network(name: str) -> nn.Module:
    prepare_torchvision()
    from torchvision import models

    with torch.random.fork_rng():
        torch.manual_seed(BACKBONES.index(name))
        network: nn.Module = getattr(models, name)(weights=None)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.2)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return network.eval()


SMALL = "shufflenet_v2_x0_5"  # the smallest that ends in a linear layer: 5 MB, vectors of 1,024 numbers


def small_network() -> nn.Module:
    """The smallest encoder with random weights and the statistics of random pictures, as torchvision makes it."""
    prepare_torchvision()
    from torchvision import models

    with torch.random.fork_rng():
        torch.manual_seed(5)
        made: nn.Module = models.get_model(SMALL, weights=None)
        for module in made.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        with torch.no_grad():
            made(torch.randn(8, 3, 128, 128))  # else its vectors would hardly depend on the picture
    return made.eval()


def write_pictures(folder: Path, features: str = f"encoder:{SMALL}") -> Path:
    """Write pictures in folders of classes and groups, and return the path of their declaration."""
    generator = np.random.default_rng(2)
    for part, count in (("private", 8), ("public", 6), ("test", 4)):
        for place in range(count):
            path = folder / part / ("no", "yes")[place % 2] / "FM"[place // 2 % 2] / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)
    declaration = folder / "scans.yaml"
    declaration.write_text(
        f"""
name: scans
kind: images
files: {{private: private, public: public, test: test}}
pictures: {{size: 16, features: "{features}"}}
label: {{column: level_1, classes: [no, yes]}}
group: {{column: level_2, values: [F, M]}}
""",
        encoding="utf-8",
    )
    return declaration
