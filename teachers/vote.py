"""What teachers say about public queries: predictions per teacher, then counts per class.

``predictions_TQ`` is private and never leaves the worker; the counts stay with the operator, and only the aggregator's
noise may turn them into labels. Shapes: T teachers, Q queries, C classes, F features.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fairpate.nn.features import frozen_features
from fairpate.nn.models import build_architecture, is_convolutional, scale_bytes
from fairpate.nn.predict import predict_logits
from teachers.teacher import SHARD_MEAN, SHARD_STD, StackedWeights, TeacherSpec, standardize

PredictionArray = npt.NDArray[np.int16]
VoteArray = npt.NDArray[np.int64]
Counts = npt.NDArray[np.integer[Any]]
_MAX_LOGITS_AT_ONCE = 2**18  # a batch's activations stay in the caches
_MAX_VALUES_AT_ONCE = 2**24  # of queries: what a worker copies and scales, however many there are


def count_block(
    weights: StackedWeights,
    spec: TeacherSpec,
    queries: npt.NDArray[np.generic],
    *,
    count_type: npt.DTypeLike = np.int64,
    device: str = "cpu",
) -> Counts:
    """``votes_QC`` of a block of teachers on features (Q, ...), a bounded number of queries at a time."""
    parts = [queries] if _one_by_one(spec) else _bounded(queries)
    return np.concatenate(
        [
            count_votes(predict_votes(weights, spec, part, device=device), spec.num_classes).astype(count_type)
            for part in parts
        ]
    )


@torch.inference_mode()
def predict_votes(
    weights: StackedWeights, spec: TeacherSpec, queries: npt.NDArray[np.generic], *, device: str = "cpu"
) -> PredictionArray:
    """The class each of T teachers chooses for each of Q queries, (T, Q) ``int16``; ties go to the smaller class."""
    network = {name: value for name, value in weights.items() if name not in (SHARD_MEAN, SHARD_STD)}
    statistics = (weights[SHARD_MEAN], weights[SHARD_STD]) if SHARD_MEAN in weights else None
    if _one_by_one(spec):
        predictions = _predict_one_by_one(network, statistics, spec, queries, device)
    else:
        x = _tensor(queries)
        if spec.model.trainable == "head":
            x = frozen_features(spec.model, x, device=device)
        predictions = _predict_stacked(network, statistics, x, device)
    return predictions.to(torch.int16).numpy()


def count_votes(predictions_TQ: PredictionArray, num_classes: int) -> VoteArray:
    """``votes_QC``: how many teachers chose each class. Every row sums to T.

    ValueError for a prediction outside ``range(num_classes)``.
    """
    predictions = np.asarray(predictions_TQ)
    if predictions.size and not 0 <= predictions.min() <= predictions.max() < num_classes:
        raise ValueError(f"Expected predictions in 0..{num_classes - 1}, got {predictions.min()}..{predictions.max()}.")
    return np.stack([(predictions == k).sum(axis=0, dtype=np.int64) for k in range(num_classes)], axis=1)


def _one_by_one(spec: TeacherSpec) -> bool:
    return is_convolutional(spec.model) and spec.model.trainable == "all"


def _bounded(queries: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
    at_once = max(1, _MAX_VALUES_AT_ONCE // max(1, math.prod(queries.shape[1:])))
    # One part at least, of no queries too: no parts could not be joined.
    return [queries[start : start + at_once] for start in range(0, max(1, len(queries)), at_once)]


def _tensor(queries: npt.NDArray[np.generic]) -> Tensor:
    return torch.tensor(queries)  # a copy in torch's own memory: the object store's is read-only, and less aligned


def _predict_one_by_one(
    weights: StackedWeights,
    statistics: tuple[Tensor, Tensor] | None,
    spec: TeacherSpec,
    queries: npt.NDArray[np.generic],
    device: str,
) -> Tensor:
    """Convolutional teachers in turn: each takes its place in one network once, whatever the number of queries."""
    model = build_architecture(spec.model, input_shape=queries.shape[1:], num_classes=spec.num_classes).to(device)
    predictions = []
    for teacher in range(len(next(iter(weights.values())))):
        model.load_state_dict({name: value[teacher] for name, value in weights.items()})
        scaling = None if statistics is None else (statistics[0][teacher], statistics[1][teacher])
        parts = [predict_logits(model, _scaled(part, scaling)).argmax(dim=1) for part in _bounded(queries)]
        predictions.append(torch.cat(parts))
    return torch.stack(predictions)


def _scaled(queries: npt.NDArray[np.generic], statistics: tuple[Tensor, Tensor] | None) -> Tensor:
    x = _tensor(queries)
    return x if statistics is None else standardize(scale_bytes(x), *statistics)


def _predict_stacked(
    weights: StackedWeights, statistics: tuple[Tensor, Tensor] | None, x: Tensor, device: str
) -> Tensor:
    """Dense teachers at once: their first layers, one above the other, are one wide matrix product."""
    layers = [(w.to(device), b.to(device)) for w, b in _dense_layers(weights, statistics)]
    layers[-1] = _relative_to_class_0(*layers[-1])
    queries = scale_bytes(x).flatten(start_dim=1).to(layers[0][0].dtype)
    num_teachers, widest = len(layers[0][0]), max(w.shape[1] for w, _ in layers)
    batches = torch.split(queries, max(1, _MAX_LOGITS_AT_ONCE // (num_teachers * widest)))
    return torch.cat([_largest_class(_dense_logits(layers, batch.to(device))).cpu() for batch in batches], dim=1)


def _dense_layers(weights: StackedWeights, statistics: tuple[Tensor, Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of each layer in order, shapes (T, out, in) and (T, out); a teacher's scaling joins the first."""
    # By number: as text, layer 10 comes before layer 2.
    names = sorted({name.split(".")[0] for name in weights}, key=int)
    layers = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
    if statistics is not None:
        weight, bias = layers[0]
        pixels = weight.shape[2] // statistics[0].shape[1]
        mean, std = (value.repeat_interleave(pixels, dim=1) for value in statistics)
        # W (x - mean) / std + b as one layer, so that scaling costs nothing at prediction.
        scaled = weight / std[:, None]
        layers[0] = (scaled, bias - (scaled @ mean[:, :, None])[:, :, 0])
    return layers


def _relative_to_class_0(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer for classes 1, 2, ... minus that for class 0, whose logit becomes 0 and costs nothing."""
    return weight[:, 1:] - weight[:, :1], bias[:, 1:] - bias[:, :1]


def _largest_class(logits: Tensor) -> Tensor:
    """The winner (T, B) ``int16`` from logits (T, C - 1, B) relative to class 0.

    Class by class over contiguous rows, which is 10 times as fast as ``argmax`` over few classes.
    """
    # Class 0 stands at 0, and strict comparisons leave ties to the smaller class.
    best = logits[:, 0].clamp(min=0)
    winner = (logits[:, 0] > 0).to(torch.int16)
    for k in range(1, logits.shape[1]):
        winner.masked_fill_(logits[:, k] > best, k + 1)
        best = torch.maximum(best, logits[:, k])
    return winner


def _dense_logits(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The last layer's values (T, out, B) for records (B, F) that all teachers share."""
    first_weight, first_bias = layers[0]
    num_teachers, width, _ = first_weight.shape
    out = torch.addmm(first_bias.reshape(-1, 1), first_weight.reshape(num_teachers * width, -1), x.T)
    out = out.view(num_teachers, width, len(x))
    for weight, bias in layers[1:]:
        out = torch.baddbmm(bias[:, :, None], weight, out.relu_())
    return out
