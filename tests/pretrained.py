"""Weights files for tests: torchvision's architectures with random values; nothing is downloaded."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from torch import nn

from fairpate.nn.models import prepare_torchvision

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
