"""The fit loop against torch.optim, and its edge cases."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fairpate.config import AugmentConfig, FitConfig, ModelConfig
from fairpate.nn.fit import Optimizer, batch_bounds, draw_epoch, fit
from fairpate.nn.models import build_model


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _table(count: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 5, generator=_generator(1), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def _model(name: str = "mlp", shape: tuple[int, ...] = (5,), **options: Any) -> nn.Module:
    config = ModelConfig(name=name, **options)
    return build_model(config, input_shape=shape, num_classes=2, generator_seed=0).double()


pytestmark = pytest.mark.xdist_group("torchvision")  # optimisers import a compiler, as torchvision does

OPTIMIZERS: dict[str, Callable[[Any, FitConfig], torch.optim.Optimizer]] = {
    "adam": lambda p, c: torch.optim.Adam(p, lr=c.learning_rate, weight_decay=c.weight_decay),
    "sgd": lambda p, c: torch.optim.SGD(p, lr=c.learning_rate, weight_decay=c.weight_decay, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_training_is_that_of_torch_optim(optimizer: str, schedule: str) -> None:
    config = FitConfig(
        epochs=4,
        batch_size=16,
        optimizer=optimizer,
        schedule=schedule,
        learning_rate=0.01,
        weight_decay=0.1,
        label_smoothing=0.2,
    )
    (x, y), model, twin = _table(), _model(), _model()
    fit(model, x, y, config, generator=_generator())
    reference, generator = OPTIMIZERS[optimizer](twin.parameters(), config), _generator()
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.2)
    for epoch in range(4):
        falling = (1 + math.cos(math.pi * epoch / 4)) / 2
        reference.param_groups[0]["lr"] = 0.01 * (falling if schedule == "cosine" else 1)
        order = torch.randperm(50, generator=generator)
        for rows in order[:12], order[12:25], order[25:37], order[37:]:
            reference.zero_grad()
            loss_function(twin(x[rows]), y[rows]).backward()
            reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_penalty_joins_every_step() -> None:
    """Half the squared weights are weight decay, which the optimiser knows by itself."""
    (x, y), model, twin = _table(), _model(), _model()
    config = FitConfig(epochs=3, batch_size=16, optimizer="sgd", learning_rate=0.1)
    fit(
        model,
        x,
        y,
        config,
        generator=_generator(),
        penalty=lambda network: 0.05 * torch.stack([p.square().sum() for p in network.parameters()]).sum(),
    )
    fit(twin, x, y, config.model_copy(update={"weight_decay": 0.1}), generator=_generator())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_channels_last_convolutions_train_as_contiguous_ones() -> None:
    x = torch.rand(20, 2, 8, 8, generator=_generator(2), dtype=torch.float64)
    y = torch.arange(20) % 2
    config = FitConfig(epochs=2, batch_size=20)
    model, twin = (_model("lenet", (2, 8, 8)) for _ in range(2))
    fit(model, x, y, config, generator=_generator())
    reference = torch.optim.Adam(twin.parameters(), lr=config.learning_rate)
    for _ in range(2):
        reference.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_cosine_falls_from_the_full_rate_through_half_of_it() -> None:
    config = FitConfig(epochs=10, learning_rate=0.4, schedule="cosine", optimizer="sgd")
    steps = []
    for epoch in (0, 5, 9):
        parameter = torch.zeros(1)
        Optimizer([parameter], config).step([-torch.ones(1)], epoch)
        steps.append(parameter.item())
    assert steps[:2] == pytest.approx([0.4, 0.2])
    assert 0 < steps[2] < 0.02


@pytest.mark.parametrize(("size", "expected"), [(0, []), (1, [1]), (32, [32]), (33, [16, 17]), (100, [25, 25, 25, 25])])
def test_batches_differ_by_at_most_one_record(size: int, expected: list[int]) -> None:
    bounds = batch_bounds(size, 32)
    assert [stop - start for start, stop in itertools.pairwise(bounds)] == expected


def test_no_records_or_no_epochs_leave_the_model_as_it_was() -> None:
    x, y = _table()
    model, untouched = _model(), _model()
    fit(model, x[:0], y[:0], FitConfig(), generator=_generator())
    fit(model, x, y, FitConfig(epochs=0), generator=_generator())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched.parameters(), strict=True))


def test_a_few_records_are_learned() -> None:
    x, y = _table(6)
    model, losses = _model("logistic"), []
    config = FitConfig(epochs=60, learning_rate=0.1)
    fit(model, x, y, config, generator=_generator(), on_epoch=lambda _, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(model(x).argmax(dim=1), y)
    assert not model.training


def test_certain_soft_targets_are_classes() -> None:
    (x, y), hard, soft = _table(), _model(), _model()
    fit(hard, x, y, FitConfig(epochs=2), generator=_generator())
    fit(soft, x, nn.functional.one_hot(y, 2).double(), FitConfig(epochs=2), generator=_generator())
    for a, b in zip(hard.parameters(), soft.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_augmentation_is_drawn_in_record_order() -> None:
    x = torch.zeros(5, 3, 8, 8)
    order, changes = draw_epoch(x, AugmentConfig(channel_swap=1.0), _generator())
    generator = _generator()
    assert torch.equal(order, torch.randperm(5, generator=generator))
    assert changes is not None
    assert torch.equal(changes, torch.rand(changes.shape, generator=generator))


def test_many_records_are_augmented_in_segments() -> None:
    x = torch.randint(0, 256, (1200, 1, 8, 8), dtype=torch.uint8, generator=_generator(3))
    y = (x.float().mean(dim=(1, 2, 3)) > 127).long()
    model = build_model(ModelConfig(name="logistic"), input_shape=(1, 8, 8), num_classes=2, generator_seed=0)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    flips = AugmentConfig(horizontal_flip=0.5)
    fit(model, x, y, FitConfig(epochs=1, batch_size=100), generator=_generator(), augmentation=flips)
    assert seen == [100] * 12


def test_divergence_and_mismatched_targets_are_errors() -> None:
    x, y = _table()
    with pytest.raises(ValueError, match="diverged in epoch 0"):
        fit(_model(), x * torch.nan, y, FitConfig(), generator=_generator())
    with pytest.raises(ValueError, match="50 records and 49 targets"):
        fit(_model(), x, y[1:], FitConfig(), generator=_generator())
