"""The loop and the stacked engine train the same teachers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from fairpate.config import AugmentConfig, FitConfig, ModelConfig
from fairpate.nn.models import build_model
from teachers.teacher import (
    Shard,
    StackedWeights,
    TeacherSpec,
    choose_engine,
    stacked_logits,
    train_teachers,
)
from tests.accelerator import DEVICES, NEEDS_GPU

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

RAGGED = (37, 0, 64, 5, 33, 1)


def _tables(sizes: tuple[int, ...] = RAGGED, dtype: torch.dtype = torch.float64) -> list[Shard]:
    generator = torch.Generator().manual_seed(7)
    shards = []
    for size in sizes:
        x = torch.randn(size, 6, generator=generator, dtype=dtype)
        shards.append(Shard(x=x, y=torch.randint(0, 3, (size,), generator=generator)))
    return shards


def _images(sizes: tuple[int, ...], channels: int, side: int) -> list[Shard]:
    generator = torch.Generator().manual_seed(8)
    return [
        Shard(
            x=torch.rand(size, channels, side, side, generator=generator, dtype=torch.float64),
            y=torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def _spec(model: str = "mlp", **fit: Any) -> TeacherSpec:
    defaults = {"epochs": 5, "batch_size": 16, "learning_rate": 0.01}
    architecture = ModelConfig(name=model, hidden=(4,) if model == "cnn" else (8, 5))
    return TeacherSpec(model=architecture, fit=FitConfig(**defaults | fit), num_classes=3, seed=11)


def _assert_equal_weights(left: StackedWeights, right: StackedWeights, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _both(shards: list[Shard], spec: TeacherSpec, device: str = "cpu") -> tuple[StackedWeights, StackedWeights]:
    """The loop on a CPU, the stack on ``device``."""
    return train_teachers(shards, spec, engine="loop"), train_teachers(shards, spec, engine="stacked", device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize(
    "fit",
    [
        {"optimizer": "adam", "weight_decay": 0.1, "label_smoothing": 0.1},
        {"optimizer": "sgd", "schedule": "cosine"},
        {"optimizer": "sgd", "batch_size": 100},
    ],
)
def test_tabular_engines_agree_on_ragged_and_empty_shards(model: str, fit: dict[str, Any], device: str) -> None:
    _assert_equal_weights(*_both(_tables(), _spec(model, **fit), device), atol=1e-9)


def test_logistic_engines_agree_in_single_precision() -> None:
    _assert_equal_weights(*_both(_tables(dtype=torch.float32), _spec("logistic")), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "channels", "side"), [("lenet", 2, 8), ("lenet", 1, 28), ("cnn", 3, 16), ("cnn", 1, 56)]
)
def test_one_step_of_convolutional_teachers_is_the_same_gradient(
    model: str, channels: int, side: int, device: str
) -> None:
    augment = AugmentConfig(rotation_degrees=10, channel_swap=0.5)
    one_step = {"epochs": 1, "batch_size": 8, "optimizer": "sgd", "learning_rate": 1.0}
    spec = replace(_spec(model, **one_step), augment=augment)
    _assert_equal_weights(*_both(_images((8, 5, 0), channels, side), spec, device), atol=1e-10)


@NEEDS_GPU
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_single_precision_on_a_gpu_is_that_of_a_cpu(model: str, engine: Any) -> None:
    """Not TensorFloat-32, whose products have ten bits: a step would differ by a thousandth."""
    shards = [Shard(x=shard.x.float(), y=shard.y) for shard in _images((8, 5), 3, 64)]
    spec = _spec(model, epochs=1, batch_size=8, optimizer="sgd", learning_rate=1.0)
    started = train_teachers(shards, replace(spec, fit=spec.fit.model_copy(update={"epochs": 0})))
    on_cpu = train_teachers(shards, spec, engine="loop")
    on_gpu = train_teachers(shards, spec, engine=engine, device="cuda")
    for name, value in on_cpu.items():
        step = float((value - started[name]).norm())
        assert float((on_gpu[name] - value).norm()) <= 1e-4 * step + 1e-6, name


@pytest.mark.parametrize("name", [pytest.param("resnet18", marks=pytest.mark.slow), "hog_logistic"])
def test_any_other_architecture_is_stacked_by_vmap(name: Any) -> None:
    models = [
        build_model(ModelConfig(name=name), input_shape=(2, 16, 16), num_classes=3, generator_seed=s).double()
        for s in (0, 1)
    ]
    shards = _images((3, 3), 2, 16)
    names = list(models[0].state_dict())
    parameters = {name: torch.stack([model.state_dict()[name] for model in models]).requires_grad_() for name in names}
    logits = stacked_logits(models[0], parameters, torch.stack([shard.x for shard in shards]))
    losses = [functional.cross_entropy(logits[t], shards[t].y) for t in range(2)]
    gradients = dict(zip(names, torch.autograd.grad(sum(losses), list(parameters.values())), strict=True))
    for t, model in enumerate(models):
        own = {name: value.detach().requires_grad_() for name, value in model.state_dict().items()}
        loss = functional.cross_entropy(functional_call(model, own, (shards[t].x,)), shards[t].y)
        for name, expected in zip(names, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(gradients[name][t], expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_teacher_does_not_depend_on_its_company(engine: Any) -> None:
    shards, spec = _tables(), _spec()
    together = train_teachers(shards, spec, engine=engine)
    alone = train_teachers(shards[2:3], spec, teacher_indices=[2], engine=engine)
    _assert_equal_weights({k: v[2:3] for k, v in together.items()}, alone, atol=1e-12)
    other_number = train_teachers(shards[2:3], spec, teacher_indices=[3], engine=engine)
    assert not torch.equal(other_number["2.weight"], alone["2.weight"])


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_teacher_without_records_keeps_its_initial_weights(engine: Any) -> None:
    empty = Shard(x=torch.zeros(0, 6), y=torch.zeros(0, dtype=torch.int64))
    trained = train_teachers([empty], _spec(), engine=engine)
    initial = train_teachers([empty], _spec(epochs=0), engine=engine)
    _assert_equal_weights({k: trained[k] for k in initial}, initial, atol=0)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_teacher_that_diverges_is_one_without_records_and_the_caller_hears_of_it(engine: Any) -> None:
    """An error would tell all who wait for the run what is in one shard."""
    lost = Shard(x=torch.full((4, 6), torch.inf, dtype=torch.float64), y=torch.zeros(4, dtype=torch.int64))
    empty = Shard(x=lost.x[:0], y=lost.y[:0])
    shards, spec, heard = _tables(), _spec(), []
    trained = train_teachers([*shards, lost], spec, engine=engine, on_diverged=heard.append)
    expected = train_teachers([*shards, empty], spec, engine=engine)
    _assert_equal_weights(trained, expected, atol=0)
    assert heard == [len(shards)]
    train_teachers([lost], spec, teacher_indices=[17], engine=engine, on_diverged=heard.append)
    assert heard == [len(shards), 17]


def test_the_engine_follows_model_and_device() -> None:
    assert choose_engine(ModelConfig(name="mlp"), "cpu") == "stacked"
    assert choose_engine(ModelConfig(name="lenet"), "cpu") == "loop"
    assert choose_engine(ModelConfig(name="lenet"), "cuda") == "stacked"
    assert choose_engine(ModelConfig(name="resnet18"), "cuda") == "loop"
