"""Architectures: shapes, seeds, and a prediction that depends on one record only."""

import pytest
import torch
from torch import nn

from fairpate.config import ModelConfig
from fairpate.nn.fit import predict_logits, predict_probabilities
from fairpate.nn.models import build_model, seeded_torch
from fairpate.oriented_gradients import oriented_gradients

pytestmark = pytest.mark.xdist_group("torchvision")

CASES = [
    ("logistic", (7,)),
    ("bounded_logistic", (7,)),
    ("logistic", (2, 8, 8)),
    ("hog_logistic", (2, 8, 8)),
    ("mlp", (7,)),
    ("lenet", (2, 8, 8)),
    ("lenet", (2, 28, 28)),
    ("cnn", (1, 8, 8)),
    ("cnn", (3, 28, 28)),
    ("cnn", (3, 64, 64)),
    ("cnn", (3, 128, 128)),
    ("resnet18", (2, 32, 32)),
    pytest.param("resnet50", (3, 32, 32), marks=pytest.mark.slow),
    pytest.param("densenet121", (1, 32, 32), marks=pytest.mark.slow),
]


def _records(shape: tuple[int, ...], count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if len(shape) == 1:
        return torch.randn(count, *shape, generator=generator)
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_prediction_has_one_logit_per_class_and_depends_on_one_record(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(ModelConfig(name=name, hidden=(8,)), input_shape=shape, num_classes=4, generator_seed=1)
    x = _records(shape)
    together = predict_logits(model, x)
    assert together.shape == (3, 4)
    alone = torch.cat([predict_logits(model, x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("name", ["mlp", "cnn", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_weights_follow_the_seed_and_leave_torch_alone(name: str) -> None:
    before = torch.get_rng_state()
    states = [
        build_model(ModelConfig(name=name), input_shape=(1, 28, 28), num_classes=2, generator_seed=seed).state_dict()
        for seed in (3, 3, 4)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


def test_torch_is_seeded_as_it_seeds_itself_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = torch.rand(3)
    before = torch.get_rng_state()
    if not torch.accelerator.is_available():  # then torch would queue each seed, with a formatted call stack
        monkeypatch.setattr(torch, "manual_seed", None)
    with seeded_torch(7):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_are_scaled_by_a_public_constant() -> None:
    model = build_model(ModelConfig(name="cnn"), input_shape=(1, 28, 28), num_classes=2, generator_seed=0)
    x = _records((1, 28, 28))
    torch.testing.assert_close(model(x), model(x.float() / 255))


def test_logistic_regression_on_gradients_is_that_of_the_table_of_their_roots() -> None:
    shape = (3, 28, 28)
    model = build_model(ModelConfig(name="hog_logistic"), input_shape=shape, num_classes=4, generator_seed=0)
    table = build_model(ModelConfig(name="logistic"), input_shape=(900,), num_classes=4, generator_seed=0)
    x = _records(shape)
    torch.testing.assert_close(predict_logits(model, x), predict_logits(table, oriented_gradients(x).sqrt()))


def test_lenet_on_colour_mnist_has_the_published_size() -> None:
    model = build_model(ModelConfig(name="lenet"), input_shape=(2, 28, 28), num_classes=10, generator_seed=0)
    convolutions = (2 * 25 + 1) * 20 + (20 * 25 + 1) * 50
    dense = (4 * 4 * 50 + 1) * 500 + 501 * 10
    assert sum(p.numel() for p in model.parameters()) == convolutions + dense


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet", (7,), "reads images"),
        ("hog_logistic", (7,), "reads images"),
        ("cnn", (3, 4, 28), "at least 8 pixels"),
        ("densenet121", (3, 28, 28), "at least 32 pixels"),
    ],
)
def test_a_model_refuses_a_shape_it_cannot_read(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig(name=name), input_shape=shape, num_classes=2, generator_seed=0)


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="num_classes >= 2, got 1"):
        build_model(ModelConfig(), input_shape=(3,), num_classes=1, generator_seed=0)


def test_large_pictures_are_predicted_a_few_at_a_time() -> None:
    model = build_model(ModelConfig(name="logistic"), input_shape=(3, 1024, 1024), num_classes=2, generator_seed=0)
    sizes: list[int] = []
    model.register_forward_hook(lambda _module, inputs, _output: sizes.append(len(inputs[0])))
    x = _records((3, 1024, 1024), count=12)
    predict_logits(model, x)
    assert sizes == [5, 5, 2]


def test_batched_prediction_covers_every_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairpate.nn.fit._MAX_RECORDS_AT_ONCE", 4)
    model = build_model(ModelConfig(name="mlp"), input_shape=(7,), num_classes=3, generator_seed=0)
    x = _records((7,), count=11)
    torch.testing.assert_close(predict_logits(model, x), model(x))
    torch.testing.assert_close(predict_probabilities(model, x).sum(dim=1), torch.ones(11))
    assert predict_logits(model, x[:0]).shape == (0, 3)
