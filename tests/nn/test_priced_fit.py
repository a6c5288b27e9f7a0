"""A priced step: its gradient is autograd's, every way of taking a batch agrees, each entry has noise of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from fairpate.config import ModelConfig
from fairpate.methods.raco_dp import HistogramSteps, PricedLoss, RacoDpConfig, priced_training
from fairpate.nn.models import build_model
from fairpate.nn.per_example import GradientClipper
from fairpate.nn.private_fit import LaplaceNoise, PrivateSteps, PrivateTraining, SeededRandomness

NUM_CELLS, NUM_CLASSES = 4, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(50, 5, generator=GENERATOR)
LABELS = torch.randint(NUM_CLASSES, (50,), generator=GENERATOR)
CELLS = torch.randint(NUM_CELLS, (50,), generator=GENERATOR)


def model(kind: str) -> nn.Module:
    """A chain of dense layers, one behind a layer that hides it, and an image model."""
    if kind == "image":
        torch.manual_seed(0)
        network = nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3)), nn.Flatten(), nn.Linear(12, 3))
    else:
        network = build_model(
            ModelConfig(name="mlp", hidden=(6,)), input_shape=(5,), num_classes=NUM_CLASSES, generator_seed=0
        )
    if kind == "hidden":
        network = nn.Sequential(nn.Identity(), network)
    return network


def release_of(seen: list[Tensor]) -> Callable[[Tensor], npt.NDArray[np.float64]]:
    """Prices that depend on the whole histogram."""

    def release(histogram: Tensor) -> npt.NDArray[np.float64]:
        seen.append(histogram.clone())
        return (3 * torch.sin(histogram + histogram.sum(dim=0))).double().numpy()

    return release


@pytest.mark.parametrize("kind", ["chain", "hidden", "image"])
@pytest.mark.parametrize("max_records", [None, 17])
@pytest.mark.parametrize("sharpness", [1.0, 2.5])
def test_every_way_of_taking_a_batch_gives_the_sum_of_autograds_gradients(
    kind: str, max_records: int | None, sharpness: float
) -> None:
    network = model(kind)
    seen: list[Tensor] = []
    loss = PricedLoss(num_cells=NUM_CELLS, num_classes=NUM_CLASSES, release=release_of(seen), sharpness=sharpness)
    clipper = GradientClipper(network, loss, clip_norm=1e9, max_records=max_records)
    sums = clipper.sum(X, loss.targets(LABELS, CELLS)).gradients

    logits = network(X)
    soft = torch.softmax(sharpness * logits, dim=1)
    histogram = torch.stack([soft[cell == CELLS].sum(dim=0) for cell in range(NUM_CELLS)])
    (released,) = seen
    torch.testing.assert_close(released, histogram.detach())
    prices = torch.from_numpy(release_of([])(histogram.detach())).float()
    objective = nn.functional.cross_entropy(logits, LABELS, reduction="sum") + (prices * histogram).sum()
    for ours, theirs in zip(sums, torch.autograd.grad(objective, clipper.parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["chain", "hidden"])
def test_a_record_that_is_not_finite_spoils_neither_the_histogram_nor_the_sum(kind: str) -> None:
    network, bad = model(kind), X.clone()
    bad[7] = torch.inf
    seen: list[Tensor] = []
    loss = PricedLoss(num_cells=NUM_CELLS, num_classes=NUM_CLASSES, release=release_of(seen))
    clipper = GradientClipper(network, loss, clip_norm=0.1)
    spoilt = clipper.sum(bad, loss.targets(LABELS, CELLS)).gradients
    rest = torch.arange(len(X)) != 7
    expected = clipper.sum(X[rest], loss.targets(LABELS, CELLS)[rest]).gradients
    torch.testing.assert_close(seen[0], seen[1])
    for ours, theirs in zip(spoilt, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_histogram_of_labels_counts_each_record_once() -> None:
    loss = PricedLoss(
        num_cells=NUM_CELLS, num_classes=NUM_CLASSES, release=release_of([]), sharpness=2.5, counts_labels=True
    )
    outputs, targets = model("chain")(X).detach(), loss.targets(LABELS, CELLS)
    expected = torch.zeros(NUM_CELLS, NUM_CLASSES)
    for cell, label in zip(CELLS.tolist(), outputs.argmax(dim=1).tolist(), strict=True):
        expected[cell, label] += 1
    torch.testing.assert_close(loss.histogram(outputs, targets), expected)
    without = loss.histogram(outputs[1:], targets[1:])
    assert (expected - without).abs().sum() == 1


def test_the_two_losses_are_clipped_as_one_vector() -> None:
    network = model("chain")
    loss = PricedLoss(num_cells=NUM_CELLS, num_classes=NUM_CLASSES, release=release_of([]))
    targets = loss.targets(LABELS, CELLS)
    clipper = GradientClipper(network, loss, clip_norm=0.1)
    sums = clipper.sum(X, targets)
    assert loss.prices_QC is not None
    prices = torch.from_numpy(loss.prices_QC).float()

    def record_loss(outputs: Tensor, codes: Tensor) -> Tensor:
        labels, cells = codes % NUM_CLASSES, codes // NUM_CLASSES
        extra = (prices[cells] * torch.softmax(outputs, dim=1)).sum(dim=1)
        return nn.functional.cross_entropy(outputs, labels, reduction="none") + extra

    expected = [torch.zeros_like(p) for p in network.parameters()]
    for i in range(len(X)):
        own = record_loss(network(X[i : i + 1]), targets[i : i + 1])[0]
        gradients = torch.autograd.grad(own, list(network.parameters()))
        factor = min(1.0, 0.1 / float(torch.cat([g.flatten() for g in gradients]).norm()))
        expected = [total + factor * gradient for total, gradient in zip(expected, gradients, strict=True)]
    torch.testing.assert_close(sums.gradients, expected, rtol=1e-4, atol=1e-5)
    assert sums.squared_norms_B.max() > 0.01


def test_an_empty_batch_releases_noise_all_the_same() -> None:
    seen: list[npt.NDArray[np.float64]] = []

    def pricing(noisy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        seen.append(noisy.copy())
        return np.zeros_like(noisy)

    network = model("chain")
    before = [p.detach().clone() for p in network.parameters()]
    training = trainer(network, pricing, laplace_scale=3.0, sampling_rate=1e-12, noise_multiplier=1.0)
    for _ in range(700):
        training.step()
    noise = np.array(seen)
    assert noise.shape == (700, NUM_CELLS, NUM_CLASSES)
    assert any(not torch.equal(p, q) for p, q in zip(before, network.parameters(), strict=True))
    # The mean magnitude of Laplace noise is its scale, with standard error scale / sqrt(8400).
    assert abs(np.abs(noise).mean() - 3.0) < 5 * 3.0 / np.sqrt(noise.size)
    correlations = np.corrcoef(noise.reshape(700, -1).T) - np.eye(NUM_CELLS * NUM_CLASSES)
    assert np.abs(correlations).max() < 5 / np.sqrt(700)


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 1.5])
def test_the_noise_is_laplaces_of_its_scale(factor: float) -> None:
    """P[|noise| > t] = exp(-t / scale), at several t; other scales and other laws are told apart."""
    draws = np.abs(LaplaceNoise(SeededRandomness(1), scale=2.0).take(200_000))
    fits = all(
        abs((draws > t).mean() - np.exp(-t / (2.0 * factor))) < 5 * np.sqrt(0.25 / len(draws)) for t in (0.5, 2.0, 8.0)
    )
    assert fits == (factor == 1.0)


def test_noise_is_never_handed_out_twice() -> None:
    noise = LaplaceNoise(SeededRandomness(1), scale=1.0)
    taken = np.concatenate([noise.take(size).copy() for size in (3, 4000, 5, 9000, 1)])
    assert len(np.unique(taken)) == len(taken)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="laplace_scale >= 0"):
        trainer(model("chain"), lambda h: h, laplace_scale=-1.0)


def trainer(
    network: nn.Module,
    pricing: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    *,
    cells: Tensor = CELLS,
    laplace_scale: float = 1.0,
    sampling_rate: float = 0.5,
    noise_multiplier: float = 0.0,
) -> PrivateTraining:
    steps = PrivateSteps(
        num_steps=1,
        sampling_rate=sampling_rate,
        expected_batch_size=25,
        clip_norm=1.0,
        noise_multiplier=noise_multiplier,
        learning_rate=0.1,
    )
    return priced_training(
        network,
        X,
        LABELS,
        cells,
        HistogramSteps(gradient=steps, laplace_scale=laplace_scale, size_floor=1.0),
        RacoDpConfig(),
        num_cells=NUM_CELLS,
        num_classes=NUM_CLASSES,
        pricing=pricing,
        randomness=SeededRandomness(0),
        histogram_randomness=SeededRandomness(1),
    )
