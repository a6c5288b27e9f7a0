"""Shifted gradients, clipped: against one backward pass per record, for every layer that has a closed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairpate.nn.per_example import CrossEntropy
from fairpate.nn.private_fit import PrivateSteps, PrivateTraining, SeededRandomness, ShiftedClipper, StepPlan

CLIP_NORM = 0.7
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, 3)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ),
    "positions": lambda: nn.Sequential(
        nn.Flatten(2), nn.Linear(36, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(10, 3)
    ),
}


def batch(count: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 6, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def shift_for(model: nn.Module, size: float = 0.1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [size * torch.randn(p.shape, generator=generator) for p in model.parameters()]


def by_hand(
    model: nn.Module, x: Tensor, y: Tensor, shift: list[Tensor], clip_norm: float = CLIP_NORM
) -> tuple[list[Tensor], Tensor]:
    parameters = list(model.parameters())
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        moved = [g + s for g, s in zip(torch.autograd.grad(loss, parameters), shift, strict=True)]
        norm = torch.cat([each.flatten() for each in moved]).norm()
        total = [t + min(1.0, float(clip_norm / norm)) * each for t, each in zip(total, moved, strict=True)]
        norms.append(norm)
    return total, torch.stack(norms)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_records", [None, 4])
def test_the_sum_of_shifted_and_clipped_gradients(name: str, max_records: int | None) -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](), batch()
    shift = shift_for(model)
    middle = float(by_hand(model, x, y, shift)[1].median())
    total, norms = by_hand(model, x, y, shift, middle)
    clipper = ShiftedClipper(model, CrossEntropy(), clip_norm=middle, max_records=max_records)
    clipper.shift = shift
    found = clipper.sum(x, y)
    for ours, theirs in zip(found.gradients, total, strict=True):
        torch.testing.assert_close(ours, theirs.double(), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(found.squared_norms_B.sqrt(), norms.double(), atol=2e-6, rtol=2e-5)


def test_no_shift_is_plain_clipping_and_no_record_is_no_sum() -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS["dense"](), batch()
    clipper = ShiftedClipper(model, CrossEntropy(), clip_norm=CLIP_NORM)
    total, _ = by_hand(model, x, y, [torch.zeros_like(p) for p in model.parameters()])
    for ours, theirs in zip(clipper.sum(x, y).gradients, total, strict=True):
        torch.testing.assert_close(ours, theirs.double(), atol=2e-6, rtol=2e-5)
    clipper.shift = shift_for(model)
    assert not any(gradient.any() for gradient in clipper.sum(x[:0], y[:0]).gradients)


def nearly_opposite(model: nn.Module, x: Tensor, y: Tensor, size: float) -> list[Tensor]:
    """A shift of norm ``size`` that the first record's gradient, made as long, all but cancels."""
    loss = nn.functional.cross_entropy(model(x[:1]), y[:1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    return [-size / norm * g for g in gradients]


class Steep:
    """Cross entropy times a number: gradients as long as a shift."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * nn.functional.cross_entropy(outputs, targets, reduction="none")


def length(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.double().flatten() for g in gradients]).norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [0.0, 1.0, 1.4e3, 1.4e4, 1e6])
def test_a_record_that_all_but_cancels_the_shift_is_clipped_exactly(name: str, size: float) -> None:
    """In ``float32``, |g|^2 + 2 <g, r> + |r|^2 lets through 1.15 clip norms at 1.4e3 and 5 at 1.4e4."""
    torch.manual_seed(0)
    model, (x, y) = MODELS[name](), batch()
    norm = length(torch.autograd.grad(nn.functional.cross_entropy(model(x[:1]), y[:1]), list(model.parameters())))
    loss = Steep(max(size, 1.0) / norm)
    clipper = ShiftedClipper(model, loss, clip_norm=CLIP_NORM)
    opposite = nearly_opposite(model, x, y, size)
    generator = torch.Generator().manual_seed(5)
    alone, moved = [], []
    for left in (0.0, 1.5 * CLIP_NORM, 5 * CLIP_NORM, 100 * CLIP_NORM):
        direction = [torch.randn(s.shape, generator=generator) for s in opposite]
        clipper.shift = [s + left / length(direction) * d for s, d in zip(opposite, direction, strict=True)]
        alone += [length(clipper.sum(x[i : i + 1], y[i : i + 1]).gradients) for i in range(3)]
        whole, rest = clipper.sum(x, y).gradients, clipper.sum(x[1:], y[1:]).gradients
        moved.append(length([a - b for a, b in zip(whole, rest, strict=True)]))
    assert max(alone) <= CLIP_NORM
    assert max(moved) <= CLIP_NORM * (1 + 1e-8)


@pytest.mark.parametrize("scale", [1.0, 1e4, torch.inf])
def test_one_record_moves_the_sum_by_at_most_the_clip_norm_however_large_the_shift(scale: float) -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS["convolution"](), batch()
    x[0] *= scale
    clipper = ShiftedClipper(model, CrossEntropy(), clip_norm=CLIP_NORM)
    clipper.shift = shift_for(model, size=5.0)
    with_all, without = clipper.sum(x, y).gradients, clipper.sum(x[1:], y[1:]).gradients
    assert length([a - b for a, b in zip(with_all, without, strict=True)]) <= CLIP_NORM * (1 + 1e-12)


def quarter(model: nn.Module) -> list[Tensor]:
    return [torch.full_like(p, 0.25) for p in model.parameters()]


SHIFTED = partial(ShiftedClipper, public_gradient=quarter)


def test_noise_joins_before_anything_is_rounded_and_the_model_keeps_its_precision() -> None:
    torch.manual_seed(0)
    model, (x, y) = MODELS["dense"](), batch(30)
    steps = PrivateSteps(
        num_steps=2,
        sampling_rate=0.5,
        expected_batch_size=15,
        clip_norm=1.0,
        noise_multiplier=1.0,
        learning_rate=0.1,
        momentum=0.5,
    )
    training = PrivateTraining(
        model, x, y, CrossEntropy(), steps, randomness=SeededRandomness(0), plan=StepPlan(clipper=SHIFTED)
    )
    before = [p.detach().clone() for p in model.parameters()]
    training.step()
    assert training.clipper.sum(x, y).gradients[0].dtype == torch.float64
    training.step()
    assert all(
        p.dtype == torch.float32 and not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)
    )


def test_without_clipping_the_shift_counts_once_per_sampled_record() -> None:
    """Before clipping it is added |B| times and divided by L; after the noise it is added once."""
    x, y = batch(30)

    def step(**options: Any) -> Tensor:
        torch.manual_seed(0)
        model = MODELS["dense"]()
        steps = PrivateSteps(
            num_steps=1,
            sampling_rate=0.5,
            expected_batch_size=15,
            clip_norm=1e6,
            noise_multiplier=0.0,
            learning_rate=1.0,
        )
        PrivateTraining(model, x, y, CrossEntropy(), steps, randomness=SeededRandomness(5), **options).step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    ratio = 1 - (step(plan=StepPlan(clipper=SHIFTED)) - step(public_gradient=quarter)) / 0.25  # |B| / L
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), atol=1e-4, rtol=0)
    assert (15 * ratio.mean()).item() == pytest.approx(round(15 * ratio.mean().item()), abs=1e-3)
    assert ratio.mean() != 1
