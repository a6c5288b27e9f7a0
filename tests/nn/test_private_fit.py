"""DP-SGD's steps: who is sampled, what is divided, how much noise, and what a seed or a public term changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ModelConfig
from fairpate.nn import private_fit
from fairpate.nn.models import build_model
from fairpate.nn.private_fit import (
    GaussianNoise,
    OsRandomness,
    PoissonBatches,
    PrivateRandomness,
    PrivateSteps,
    PrivateTraining,
    PublicGradient,
    SeededRandomness,
    StepPlan,
    chacha20_words,
    normals_of,
)
from fairpate.privacy.accountant import PoissonGaussians, SpentError
from tests.accelerator import NEEDS_GPU

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

SETTINGS: dict[str, Any] = {
    "num_steps": 1,
    "sampling_rate": 1.0,
    "expected_batch_size": 8.0,
    "clip_norm": 0.5,
    "noise_multiplier": 0.0,
    "learning_rate": 1.0,
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def model() -> nn.Module:
    return build_model(ModelConfig(name="logistic"), input_shape=(4,), num_classes=2, generator_seed=0)


def records(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def weights(trained: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


def trained(x: Tensor, y: Tensor, *, randomness: PrivateRandomness | None = None, **changed: Any) -> Tensor:
    network = model()
    steps = PrivateSteps(**SETTINGS | changed)
    PrivateTraining(network, x, y, loss, steps, randomness=randomness or SeededRandomness(0)).run()
    return weights(network)


@pytest.mark.parametrize("randomness", [OsRandomness(), SeededRandomness(3)])
def test_every_record_enters_independently_with_the_rate(randomness: PrivateRandomness) -> None:
    draws, count, rate = 2000, 40, 0.15
    batches = PoissonBatches(count, rate, randomness)
    drawn = [batches.next() for _ in range(draws)]
    sizes = np.array([len(rows) for rows in drawn])
    spread = math.sqrt(count * rate * (1 - rate))
    assert abs(sizes.mean() - count * rate) < 5 * spread / math.sqrt(draws)
    # A fixed-size or shuffled batch has no spread; Poisson sampling has the binomial one.
    assert 0.85 < sizes.std() / spread < 1.15
    assert all(len(set(rows.tolist())) == len(rows) for rows in drawn)
    entered = np.zeros((draws, count))
    for step, rows in enumerate(drawn):
        entered[step, rows] = 1
    assert stats.chisquare(entered.sum(axis=0)).pvalue > 1e-8
    # Neither the neighbour in the same batch nor the same record in the next batch says who else enters.
    for first, second in ((entered[:, :-1], entered[:, 1:]), (entered[:-1], entered[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("rate", [1.0, 0.9, 1e-4])
def test_the_extremes_of_the_rate_are_sampled_rightly(rate: float) -> None:
    batches, count, draws = PoissonBatches(1000, rate, SeededRandomness(0)), 1000, 400
    sizes = np.array([len(batches.next()) for _ in range(draws)])
    expected, spread = count * rate, math.sqrt(count * rate * (1 - rate))
    assert abs(sizes.mean() - expected) <= 5 * spread / math.sqrt(draws)
    assert abs(sizes.std() - spread) <= 0.2 * spread


@pytest.mark.parametrize("randomness", [OsRandomness(), SeededRandomness(3)])
def test_noise_is_gaussian_with_the_standard_deviation_that_was_asked(randomness: PrivateRandomness) -> None:
    sums = [torch.zeros(300, 200), torch.zeros(40_001)]
    GaussianNoise(randomness).add_to(sums, 2.5)
    values = torch.cat([part.flatten() for part in sums]).double().numpy()
    assert stats.kstest(values / 2.5, "norm").pvalue > 1e-8
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(values / (2.5 * wrong), "norm").pvalue < 1e-12
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_noise_asked_for_in_small_amounts_is_never_handed_out_twice() -> None:
    noise = GaussianNoise(SeededRandomness(5))
    values = torch.cat([noise.take(size) for size in [7, 206, 1, 5000] * 6]).double().numpy()
    assert len(np.unique(values)) > 0.999 * len(values) == 0.999 * 6 * 5214
    assert stats.kstest(values, "norm").pvalue > 1e-8


@pytest.mark.parametrize("size", [10, 2**16, 3 * 2**16 + 1234])
def test_normals_that_are_made_whole_as_on_a_gpu_are_those_of_the_pieces_of_a_processor(size: int) -> None:
    drawn = max(size, 2**12)
    words = SeededRandomness(3).machine_words(drawn)
    torch.testing.assert_close(normals_of(words)[:size], GaussianNoise(SeededRandomness(3)).take(size))


@pytest.mark.parametrize(("nonce", "size"), [(1, 8), (5, 1001), (2**70 + 3, 64)])
def test_the_stream_of_a_gpu_is_that_of_chacha20(nonce: int, size: int) -> None:
    """Against OpenSSL's, whose nonce of 16 bytes begins with the counter."""
    key = bytes(range(32))
    cipher = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce.to_bytes(12, "little")), mode=None)
    expected = np.frombuffer(cipher.encryptor().update(bytes(8 * size)), dtype="<i8")
    assert chacha20_words(key, nonce, size, torch.device("cpu")).numpy().tolist() == expected.tolist()


def test_no_two_draws_of_a_gpu_share_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: its words are computed on the processor here."""
    stream = chacha20_words
    monkeypatch.setattr(private_fit, "chacha20_words", lambda *given: stream(*given[:3], torch.device("cpu")))
    randomness, cuda = OsRandomness(), torch.device("cuda")
    words = torch.cat([randomness.machine_words(size, cuda) for size in (100, 100, 7)])
    words = torch.cat([words, OsRandomness().machine_words(100, cuda)])
    assert len(words.unique()) == 307
    assert stats.kstest(normals_of(randomness.machine_words(50_000, cuda)).numpy(), "norm").pvalue > 1e-8


def test_weights_that_diverge_are_an_error_whose_steps_are_spent() -> None:
    """The message tells of weights that earlier steps released; a first step that is refused has released nothing."""
    events = (PoissonGaussians(count=9, noise_multiplier=2.0, sampling_rate=1.0),)
    settings = SETTINGS | {"num_steps": 9, "noise_multiplier": 2.0}

    def training(public_gradient: PublicGradient | None = None, **changed: Any) -> PrivateTraining:
        options: dict[str, Any] = {"plan": StepPlan(events=events), "public_gradient": public_gradient}
        steps = PrivateSteps(**settings | changed)
        return PrivateTraining(model(), *records(40), loss, steps, randomness=SeededRandomness(0), **options)

    with pytest.raises(SpentError, match="weights are not finite") as diverged:
        training(clip_norm=1e3, learning_rate=1e38).run()
    assert (diverged.value.events, diverged.value.noise) == (events, SeededRandomness(0).label)

    def refuse(_: nn.Module) -> list[Tensor]:
        raise ValueError("no public records")

    with pytest.raises(ValueError, match="no public records") as refused:
        training(refuse).run()
    assert not isinstance(refused.value, SpentError)


@NEEDS_GPU
@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "resnet18"])
def test_on_a_gpu_a_record_moves_a_step_by_the_clip_norm_and_a_seed_means_what_it_means_on_a_cpu(name: Any) -> None:
    x = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(24) % 2

    def step(kept: slice, device: str, noise: float) -> Tensor:
        network = build_model(ModelConfig(name=name), input_shape=(3, 32, 32), num_classes=2, generator_seed=0)
        steps = PrivateSteps(**SETTINGS | {"noise_multiplier": noise, "sampling_rate": 1.0})
        data = x[kept].to(device), y[kept].to(device)
        PrivateTraining(network.to(device), *data, loss, steps, randomness=SeededRandomness(0)).run()
        return weights(network).cpu()

    moved = (step(slice(0, 24), "cuda", 0.0) - step(slice(1, 24), "cuda", 0.0)).norm()
    bound = SETTINGS["clip_norm"] / SETTINGS["expected_batch_size"]
    assert 0.5 * bound < float(moved) <= bound * (1 + 1e-4)
    torch.testing.assert_close(step(slice(0, 24), "cuda", 1.0), step(slice(0, 24), "cpu", 1.0), atol=2e-4, rtol=1e-3)


def test_one_record_moves_a_step_by_at_most_clip_norm_over_the_constant_denominator() -> None:
    x, y = records(9)
    everyone, without_one = trained(100 * x, y), trained(100 * x[1:], y[1:])
    moved = float((everyone - without_one).norm())
    assert 0.5 * 0.5 / 8 < moved <= 0.5 / 8 * (1 + 1e-4)


def test_the_denominator_is_constant_whatever_the_batch() -> None:
    x, y = records(4)
    start = weights(model())
    once, twice = trained(x, y) - start, trained(x.repeat(2, 1), y.repeat(2)) - start
    torch.testing.assert_close(twice, 2 * once)


def test_an_empty_batch_still_adds_noise() -> None:
    x, y = records(0)
    moved = trained(x, y, noise_multiplier=4.0) - weights(model())
    assert 0.5 < float(moved.std()) / (4.0 * 0.5 / 8) < 1.6


def test_virtual_batches_change_memory_and_nothing_else() -> None:
    x, y = records(30)
    changed: dict[str, Any] = {"num_steps": 5, "noise_multiplier": 1.0, "sampling_rate": 0.5, "momentum": 0.9}
    torch.testing.assert_close(trained(x, y, **changed), trained(x, y, max_records=4, **changed))


def test_a_seed_repeats_everything_and_the_operating_system_nothing() -> None:
    x, y = records(20)
    noisy: dict[str, Any] = {"num_steps": 3, "noise_multiplier": 1.0, "sampling_rate": 0.5}
    assert torch.equal(trained(x, y, **noisy), trained(x, y, **noisy))
    assert not torch.equal(
        trained(x, y, randomness=OsRandomness(), **noisy), trained(x, y, randomness=OsRandomness(), **noisy)
    )
    assert (OsRandomness().label, SeededRandomness(0).label) == ("os_entropy", "seeded: not private")


def test_a_public_term_is_added_after_clipping_and_noise_and_zero_changes_no_bit() -> None:
    x, y = records(20)

    def run(size: float) -> Tensor:
        network = model()
        steps = PrivateSteps(**SETTINGS | {"noise_multiplier": 1.0})
        PrivateTraining(
            network,
            x,
            y,
            loss,
            steps,
            randomness=SeededRandomness(0),
            public_gradient=lambda m: [torch.full_like(p, size) for p in m.parameters()],
        ).run()
        return weights(network)

    without = trained(x, y, noise_multiplier=1.0)
    assert torch.equal(run(0.0), without)
    torch.testing.assert_close(run(3.0), without - 3.0)


def test_training_learns() -> None:
    x, y = records(500)
    network = model()
    steps = PrivateSteps(
        **SETTINGS | {"num_steps": 150, "sampling_rate": 0.1, "expected_batch_size": 50.0, "noise_multiplier": 0.8}
    )
    PrivateTraining(network, x, y, loss, steps, randomness=SeededRandomness(1)).run()
    assert not network.training
    assert (network(x).argmax(dim=1) == y).float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling_rate", 0.0),
        ("sampling_rate", 1.3),
        ("clip_norm", 0.0),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", math.nan),
        ("expected_batch_size", math.inf),
        ("momentum", 1.0),
        ("num_steps", -1),
    ],
)
def test_impossible_steps_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        PrivateSteps(**SETTINGS | {name: value})
