"""The pass by hand against autograd, and which models it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from doubled import Doubled
from torch import Tensor, nn

from fairpate.nn.models import ScaleBytes
from fairpate.nn.per_example import CrossEntropy, DenseChain, GradientClipper

BATCH = 6
CHAINS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(8, 3),
    "flattened": lambda: nn.Sequential(ScaleBytes(), nn.Flatten(), nn.Linear(8, 3)),
    "two activations": lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "activations in a row": lambda: nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Tanh(), nn.ReLU(), nn.Linear(5, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(8, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 5), nn.ReLU()), nn.Sequential(nn.Linear(5, 3))),
    "activation last": lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Tanh()),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator)
    return model


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 8, dtype=torch.float64, generator=generator), torch.arange(BATCH) % 3


def by_autograd(model: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = [nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
    return [list(torch.autograd.grad(loss, parameters)) for loss in losses]


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (-1,)])
@pytest.mark.parametrize("name", CHAINS)
def test_every_record_has_the_gradient_of_autograd(name: str, frozen: tuple[int, ...]) -> None:
    model, (x, y) = made(CHAINS[name]), records()
    parameters = list(model.parameters())
    for index in frozen[: len(parameters) - 1]:
        parameters[index % len(parameters)].requires_grad_(False)
    assert DenseChain.of(model) is not None
    expected = by_autograd(model, x, y)
    norms = torch.stack([torch.cat([g.flatten() for g in record]).norm() for record in expected])
    clip_norm = float(norms.median())
    got = GradientClipper(model, CrossEntropy(), clip_norm=clip_norm).sum(x, y)
    factors = (clip_norm / norms).clamp(max=1)
    torch.testing.assert_close(got.squared_norms_B.sqrt(), norms)
    for i, values in enumerate(got.gradients):
        torch.testing.assert_close(
            values, sum(f * record[i] for f, record in zip(factors, expected, strict=True)), rtol=1e-9, atol=1e-12
        )


def test_summed_gradients_are_those_of_autograd() -> None:
    model, (x, y) = made(CHAINS["two activations"]), records()
    chain = DenseChain.of(model)
    assert chain is not None
    values = chain.forward(x)
    found = {id(p): g for p, g in chain.summed_gradients(values, CrossEntropy().gradient(values[-1], y))}
    expected = torch.autograd.grad(CrossEntropy()(model(x), y).sum(), list(model.parameters()))
    torch.testing.assert_close([found[id(p)] for p in model.parameters()], list(expected))


def test_bytes_and_images_are_read_as_the_model_reads_them() -> None:
    model = nn.Sequential(ScaleBytes(), nn.Flatten(), nn.Linear(12, 3))
    x = torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chain = DenseChain.of(model)
    assert chain is not None
    torch.testing.assert_close(chain.forward(x)[-1], model(x).detach())


def test_records_of_several_rows_are_left_to_autograd() -> None:
    model = nn.Linear(4, 3).double()
    x = torch.randn(BATCH, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(BATCH) % 3

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.sum(dim=1), targets, reduction="none")

    got = GradientClipper(model, loss, clip_norm=1e9).sum(x, y)
    expected = torch.autograd.grad(loss(model(x), y).sum(), list(model.parameters()))
    torch.testing.assert_close(got.gradients, list(expected))


def test_the_loss_knows_its_gradient() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = 30 * torch.randn(7, 4, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 4, (7,), generator=generator)
    leaf = outputs.clone().requires_grad_()
    losses = CrossEntropy()(leaf, targets)
    (expected,) = torch.autograd.grad(losses.sum(), leaf)
    torch.testing.assert_close(CrossEntropy().gradient(outputs, targets), expected)
    assert losses.shape == (7,)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 3))
    model[0].register_forward_hook(lambda _, __, output: 2 * output)
    return model


def twice() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        twice,
        lambda: Doubled(8, 3),
        lambda: nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(8, 5), nn.Flatten(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(0), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 3)),
        lambda: nn.Sequential(nn.Flatten()),
        lambda: nn.Sequential(nn.Linear(8, 3).requires_grad_(False)),
    ],
)
def test_any_other_model_is_left_to_autograd(make: Callable[[], nn.Module]) -> None:
    assert DenseChain.of(make()) is None
