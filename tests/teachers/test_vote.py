"""Votes against one model at a time."""

from typing import Any

import numpy as np
import pytest
import torch

import teachers.ensemble
from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.models import build_model
from teachers.ensemble import CountTask, count_block, count_votes, predict_votes
from teachers.teacher import Shard, StackedWeights, TeacherSpec, train_teachers


def _spec(model: str) -> TeacherSpec:
    architecture = ModelConfig(name=model, hidden=(4,) if model == "cnn" else (6, 5))
    fit = FitConfig(epochs=3, learning_rate=0.01)
    return TeacherSpec(model=architecture, fit=fit, num_classes=3, seed=2)


def _records(shape: tuple[int, ...], count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 3:
        return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return torch.randn(count, *shape, generator=generator) * 3 + 1


def _one_at_a_time(weights: StackedWeights, spec: TeacherSpec, x: torch.Tensor) -> np.ndarray:
    chosen = []
    for t in range(len(next(iter(weights.values())))):
        model = build_model(spec.model, input_shape=tuple(x.shape[1:]), num_classes=3, generator_seed=0)
        model.load_state_dict({k: v[t] for k, v in weights.items()})
        own = x.float() / 255 if x.dtype == torch.uint8 else x
        with torch.no_grad():
            chosen.append(model(own).argmax(dim=1).numpy())
    return np.stack(chosen)


@pytest.mark.parametrize(
    ("model", "shape"),
    [("logistic", (7,)), ("mlp", (7,)), ("mlp", (2, 8, 8)), ("lenet", (2, 8, 8)), ("cnn", (1, 8, 8))],
)
def test_predictions_are_those_of_each_model(model: str, shape: tuple[int, ...]) -> None:
    spec = _spec(model)
    shards = [Shard(x=_records(shape, n, n), y=torch.arange(n) % 3) for n in (20, 9, 0)]
    weights = train_teachers(shards, spec)
    queries = _records(shape, 50, 1)
    predictions = predict_votes(weights, spec, queries.numpy())
    assert (predictions.shape, predictions.dtype) == ((3, 50), np.int16)
    np.testing.assert_array_equal(predictions, _one_at_a_time(weights, spec, queries))


def test_no_queries_get_no_votes() -> None:
    spec = _spec("logistic")
    weights = train_teachers([Shard(x=_records((7,), 5, 0), y=torch.arange(5) % 3)], spec)
    assert predict_votes(weights, spec, np.zeros((0, 7), dtype=np.float32)).shape == (1, 0)


def test_votes_are_counts_per_class() -> None:
    predictions = np.array([[0, 2, 1], [0, 2, 2], [1, 2, 0]], dtype=np.int16)
    votes = count_votes(predictions, 4)
    assert votes.tolist() == [[2, 1, 0, 0], [0, 0, 3, 0], [1, 1, 1, 0]]
    assert votes.dtype == np.int64


@pytest.mark.parametrize(("model", "shape"), [("mlp", (7,)), ("cnn", (1, 8, 8))])
def test_many_queries_are_counted_a_few_at_a_time(
    model: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, queries = _spec(model), _records(shape, 50, 1)
    weights = train_teachers([Shard(x=_records(shape, n, n), y=torch.arange(n) % 3) for n in (20, 9, 0)], spec)
    expected = count_votes(_one_at_a_time(weights, spec, queries), 3)
    monkeypatch.setattr(teachers.ensemble, "_MAX_VALUES_AT_ONCE", queries[0].numel() * 20)
    read = _recorded(monkeypatch, "predict_logits" if model == "cnn" else "scale_bytes")
    built = _recorded(monkeypatch, "build_model")
    np.testing.assert_array_equal(count_block(CountTask(spec=spec, queries=queries.numpy()), weights, "cpu"), expected)
    assert [len(call[-1]) for call in read] == [20, 20, 10] * (3 if model == "cnn" else 1)
    assert len(built) == (model == "cnn")


def _recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    calls, function = [], getattr(teachers.ensemble, name)
    monkeypatch.setattr(teachers.ensemble, name, lambda *a, **o: calls.append(a) or function(*a, **o))
    return calls


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_vote_for_an_unknown_class_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"predictions in 0\.\.2"):
        count_votes(np.array([[0, wrong]], dtype=np.int16), 3)
