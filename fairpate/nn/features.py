"""What a frozen backbone sees in a picture: a fixed public function of that picture, computed once.

Training the last layer only is logistic regression on these features; a caller that trains many heads on one backbone
reads every picture once, whatever the number of heads and epochs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_logits
from fairpate.nn.weights import HEAD_OF


def frozen_features(config: ModelConfig, x: Tensor, *, device: str = "cpu") -> Tensor:
    """What the last layer of ``config`` reads of images (N, channels, height, width): (N, features) ``float32``.

    On the CPU, whatever ``device`` computes them. ValueError for a model whose backbone is trained.
    """
    if config.trainable != "head":
        raise ValueError(f"Expected trainable: head, got {config.trainable}: its features change while it is trained.")
    return predict_logits(_headless(config, tuple(x.shape[1:]), device), x)


# One: blocks of teachers come one after another, and all read the same backbone.
@lru_cache(maxsize=1)
def _headless(config: ModelConfig, input_shape: tuple[int, ...], device: str) -> nn.Module:
    # The head is taken off again, so that neither classes nor seed decide anything.
    model = build_model(config, input_shape=input_shape, num_classes=2, generator_seed=0)
    setattr(model.get_submodule("1"), HEAD_OF[config.name], nn.Identity())
    return model.to(torch.device(device))
