"""Weights to start from, learned on public images without labels: by how much was an image turned?

Gidaris, Singh and Komodakis 2018 ("Unsupervised Representation Learning by Predicting Image Rotations", arXiv
1803.07728). Only public features are read, so it costs no privacy, and it serves every method alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.fit import fit
from fairpate.nn.models import build_model

_QUARTERS = 4


def pretrain_by_rotations(
    model: nn.Module, architecture: ModelConfig, public_x: Tensor, config: FitConfig, *, generator: torch.Generator
) -> None:
    """Give ``model``, built from ``architecture``, all weights of a rotation classifier except its last layer's.

    ``public_x`` (N, channels, side, side). ValueError for records that are not square images, and for none.
    """
    if public_x.ndim != 4 or public_x.shape[2] != public_x.shape[3] or not len(public_x):
        raise ValueError(
            f"Expected square public images to pre-train on, got shape {tuple(public_x.shape)}; leave pretrain out."
        )
    turned = torch.cat([public_x.rot90(quarters, (2, 3)) for quarters in range(_QUARTERS)])
    turns = torch.arange(_QUARTERS).repeat_interleave(len(public_x))
    seed = int(torch.randint(2**62, (), generator=generator))
    classifier = build_model(
        architecture, input_shape=tuple(public_x.shape[1:]), num_classes=_QUARTERS, generator_seed=seed
    )
    fit(classifier, turned, turns, config, generator=generator)
    learned = dict(classifier.named_parameters())
    # The last layer tells turns apart, and no classes.
    head = list(learned)[-1].rpartition(".")[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0] != head:
                parameter.copy_(learned[name])
