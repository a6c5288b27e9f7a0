"""Persons in private training: their average gradient is autograd's, clipped; nobody moves a sum by more.

Persons have 1, 2 and 5 records. Everything is compared with one plain backward pass per person.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from fairpate.methods.dp_fermi import DpFermiConfig, FermiSteps, MatrixGame, fermi_training, watched_targets
from fairpate.methods.raco_dp import HistogramSteps, PricedLoss, RacoDpConfig, priced_training
from fairpate.nn.per_example import CrossEntropy, GradientClipper, part_bounds
from fairpate.nn.private_fit import PersonBatches, PrivateSteps, PrivateTraining, SeededRandomness, ShiftedClipper
from fairpate.privacy.mechanism_events import AttributeGaussians

pytestmark = pytest.mark.usefixtures("light_runs")

CLIP_NORM = 0.3
OWNERS = torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 3, 4, 4])
NUM_OWNERS = 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
    "positions": lambda: nn.Sequential(
        nn.Flatten(2), nn.Linear(36, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(10, 3)
    ),
    "frozen": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3)),
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(11, 2, 6, 6, generator=generator), torch.randint(0, 3, (11,), generator=generator)


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[kind]()


def by_autograd(model: nn.Module, x: Tensor, y: Tensor, shift: list[Tensor] | None = None) -> list[list[Tensor]]:
    """The gradient of every person's mean loss, unclipped, in double precision."""
    model = model.double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for owner in range(NUM_OWNERS):
        own = owner == OWNERS
        loss = functional.cross_entropy(model(x[own].double()), y[own])
        gradients = list(torch.autograd.grad(loss, parameters))
        found.append(gradients if shift is None else [g + s.double() for g, s in zip(gradients, shift, strict=True)])
    return found


def norm_of(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(values.double().square().sum()) for values in gradients))


def clipped(gradients: list[Tensor]) -> list[Tensor]:
    factor = min(1.0, CLIP_NORM / norm_of(gradients))
    return [factor * values for values in gradients]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("max_records", [None, 1, 4])
def test_the_average_gradient_of_a_person_is_clipped(kind: str, max_records: int | None) -> None:
    (x, y), model = batch(), made(kind)
    found = GradientClipper(model, CrossEntropy(), clip_norm=CLIP_NORM, max_records=max_records).sum(x, y, OWNERS)
    plain = by_autograd(made(kind), x, y)
    assert found.squared_norms_B.sqrt().tolist() == pytest.approx([norm_of(gradients) for gradients in plain], rel=1e-5)
    assert min(found.squared_norms_B.sqrt()) < max(found.squared_norms_B.sqrt())
    expected = [sum(parts) for parts in zip(*map(clipped, plain), strict=True)]
    for ours, theirs in zip(found.gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MODELS)
def test_the_records_of_a_person_removed_are_one_clipped_contribution_less(kind: str) -> None:
    """Brute force over all persons, at a bound that clips every one of them."""
    (x, y), bound = batch(), 1e-3
    clipper = GradientClipper(made(kind), CrossEntropy(), clip_norm=bound)
    everybody = clipper.sum(x, y, OWNERS)
    for owner in range(NUM_OWNERS):
        others = owner != OWNERS
        without = clipper.sum(x[others], y[others], OWNERS[others])
        moved = [a - b for a, b in zip(everybody.gradients, without.gradients, strict=True)]
        assert 0.99 * bound < norm_of(moved) < 1.001 * bound
        torch.testing.assert_close(
            without.squared_norms_B.sqrt(), everybody.squared_norms_B.sqrt()[torch.arange(NUM_OWNERS) != owner]
        )


@pytest.mark.parametrize("kind", ["chain", "convolution"])
def test_a_public_shift_joins_the_average_before_it_is_clipped(kind: str) -> None:
    (x, y), model = batch(), made(kind)
    shift = [torch.full_like(p, 0.05) for p in model.parameters()]
    clipper = ShiftedClipper(model, CrossEntropy(), clip_norm=CLIP_NORM)
    clipper.shift = shift
    expected = [sum(parts) for parts in zip(*map(clipped, by_autograd(made(kind), x, y, shift)), strict=True)]
    for ours, theirs in zip(clipper.sum(x, y, OWNERS).gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)  # type: ignore[arg-type]


def test_a_person_with_a_record_that_is_no_number_adds_nothing() -> None:
    (x, y), model = batch(), made("chain")
    clipper = GradientClipper(model, CrossEntropy(), clip_norm=CLIP_NORM)
    others = OWNERS != 2
    without = clipper.sum(x[others], y[others], OWNERS[others]).gradients
    x[4] = math.inf
    for ours, theirs in zip(clipper.sum(x, y, OWNERS).gradients, without, strict=True):
        torch.testing.assert_close(ours, theirs)


def steps(**changes: object) -> PrivateSteps:
    values = {"num_steps": 3, "sampling_rate": 1.0, "expected_batch_size": 5, "clip_norm": CLIP_NORM}
    return PrivateSteps(**values | {"noise_multiplier": 1.0, "learning_rate": 0.5, "momentum": 0.5} | changes)  # type: ignore[arg-type]


def test_persons_of_one_record_train_as_records_do() -> None:
    (x, y), trained = batch(), []
    for person_N in (None, torch.arange(len(x))):
        model = made("chain")
        training = PrivateTraining(
            model, x, y, CrossEntropy(), steps(sampling_rate=0.5), randomness=SeededRandomness(3), person_N=person_N
        )
        for _ in range(3):
            training.step()
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(trained[0], trained[1])


def test_a_person_s_records_in_another_order_train_alike() -> None:
    (x, y), trained = batch(), []
    for order in (torch.arange(11), torch.tensor([5, 10, 0, 2, 7, 3, 8, 1, 4, 9, 6])):
        model = made("chain")
        # The numbers of persons keep their meaning: only rows are shuffled.
        training = PrivateTraining(
            model, x[order], y[order], CrossEntropy(), steps(), randomness=SeededRandomness(3), person_N=OWNERS[order]
        )
        training.step()
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(trained[0], trained[1])


@pytest.mark.parametrize(("rate", "most"), [(0.3, 2), pytest.param(0.7, 5, marks=pytest.mark.slow)])
def test_persons_are_sampled_independently_and_their_records_uniformly(rate: float, most: int) -> None:
    draws, shuffled = 1500, torch.tensor([5, 10, 0, 2, 7, 3, 8, 1, 4, 9, 6])
    person_N = OWNERS[shuffled]
    batches = PersonBatches(person_N, rate, SeededRandomness(0), most_records=most)
    sampled, pairs, records, sizes = Counter[int](), 0, Counter[int](), []
    for _ in range(draws):
        rows, owner_B = batches.next()
        persons = person_N[rows]
        assert torch.equal(owner_B, torch.unique_consecutive(persons, return_inverse=True)[1])
        assert (persons.diff() >= 0).all()
        of_each = Counter(persons.tolist())
        assert all(count == min(most, int((person_N == person).sum())) for person, count in of_each.items())
        assert len(set(rows.tolist())) == len(rows)
        sampled.update(of_each.keys())
        records.update(rows.tolist())
        pairs += {0, 2} <= of_each.keys()
        sizes.append(len(of_each))
    for person in range(NUM_OWNERS):
        assert stats.binomtest(sampled[person], draws, rate).pvalue > 1e-4
    assert stats.binomtest(pairs, draws, rate**2).pvalue > 1e-4
    assert stats.binomtest(sizes.count(0), draws, (1 - rate) ** NUM_OWNERS).pvalue > 1e-4
    for row in (person_N == 2).nonzero()[:, 0].tolist():
        assert stats.binomtest(records[row], draws, rate * min(1, most / 5)).pvalue > 1e-4


def test_parts_of_a_batch_hold_whole_persons() -> None:
    assert part_bounds(11, 4, OWNERS) == [(0, 3), (3, 8), (8, 11)]
    assert part_bounds(11, 100, OWNERS) == [(0, 11)]
    assert part_bounds(11, 1, OWNERS) == [(0, 1), (1, 3), (3, 8), (8, 9), (9, 11)]
    assert part_bounds(0, 4, OWNERS[:0]) == []
    assert part_bounds(5, 2) == [(0, 2), (2, 4), (4, 5)]


# What other methods release of the same sample.

NUM_CELLS, NUM_CLASSES = 2, 3


@pytest.mark.parametrize("max_records", [None, 4])
def test_a_histogram_has_the_average_row_of_each_person(max_records: int | None) -> None:
    """Against plain averages; without one of the persons it is 1 less in L1, in however many cells they are."""
    (x, y), cells, seen = batch(), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1]), []

    def release(histogram_QK: Tensor) -> npt.NDArray[np.float64]:
        seen.append(histogram_QK.double().clone())
        return np.array([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])

    def summed(kept: Tensor) -> list[Tensor]:
        loss = PricedLoss(num_cells=NUM_CELLS, num_classes=NUM_CLASSES, release=release, sharpness=2.0)
        clipper = GradientClipper(made("chain"), loss, clip_norm=CLIP_NORM, max_records=max_records)
        return clipper.sum(x[kept], loss.targets(y[kept], cells[kept]), OWNERS[kept]).gradients

    gradients = summed(OWNERS >= 0)
    rows = (2 * made("chain")(x)).softmax(dim=1).detach().double()
    plain = torch.zeros(NUM_CELLS, NUM_CLASSES, dtype=torch.float64)
    for owner in range(NUM_OWNERS):
        for place in (owner == OWNERS).nonzero()[:, 0]:
            plain[cells[place]] += rows[place] / (owner == OWNERS).sum()
    torch.testing.assert_close(seen[0], plain, atol=1e-6, rtol=1e-6)
    assert len(seen) == 1
    expected = []
    for owner in range(NUM_OWNERS):
        network, own = made("chain"), owner == OWNERS
        outputs, prices = network(x[own]), torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]])[cells[own]]
        loss = functional.cross_entropy(outputs, y[own]) + (prices * (2 * outputs).softmax(1)).sum(1).mean()
        expected.append(clipped(list(torch.autograd.grad(loss, list(network.parameters())))))
    for ours, theirs in zip(gradients, [sum(parts) for parts in zip(*expected, strict=True)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
    for owner in range(NUM_OWNERS):
        summed(owner != OWNERS)
        moved = seen[0] - seen[-1]
        assert float(moved.abs().sum()) == pytest.approx(1, abs=1e-5)
    summed(OWNERS < 0)
    assert float(seen[-1].abs().sum()) == 0


def test_a_histogram_is_released_once_a_step_also_for_nobody() -> None:
    (x, y), releases = batch(), []

    def pricing(noisy_QK: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        releases.append(noisy_QK)
        return np.zeros((NUM_CELLS, NUM_CLASSES))

    training = priced_training(
        made("chain"), x, y, torch.zeros(11, dtype=torch.int64),
        HistogramSteps(gradient=steps(sampling_rate=1e-9), laplace_scale=1.0, size_floor=1.0), RacoDpConfig(),
        num_cells=NUM_CELLS, num_classes=NUM_CLASSES, pricing=pricing,
        randomness=SeededRandomness(0), histogram_randomness=SeededRandomness(1), person_N=OWNERS,
    )  # fmt: skip
    for _ in range(4):
        training.step()
    assert len(releases) == 4
    assert all((noisy != 0).all() for noisy in releases)


@pytest.mark.parametrize("max_records", [None, 4])
def test_no_person_moves_the_gradient_of_the_matrices_by_more_than_a_record_may(max_records: int | None) -> None:
    """FERMI's matrices see a person's average prediction: brute force over persons, at matrices on their ball."""
    (x, y), cells = batch(), torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 2])  # the last plays no game
    targets, radius, shares = watched_targets(y, cells, num_classes=3, num_cells=2), 2.0, [[0.2, 0.8]]

    def seen_by(kept: Tensor) -> npt.NDArray[np.float64]:
        game = MatrixGame(shares, num_classes=3, weight=1.0, radius=radius)
        matrix = np.array([[[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]]])
        game.move_to(matrix)
        planned = FermiSteps(
            steps=steps(max_records=max_records, noise_multiplier=0.0),
            matrix_noise_multiplier=0.0,
            event=AttributeGaussians(count=0, attribute_noise_multiplier=1.0),
        )
        training = fermi_training(
            made("chain"), x[kept], targets[kept], game, planned, DpFermiConfig(), randomness=SeededRandomness(0),
            person_N=torch.unique_consecutive(OWNERS[kept], return_inverse=True)[1],
        )  # fmt: skip
        observed: list[npt.NDArray[np.float64]] = []
        game.ascend = lambda *_, **__: observed.append(game.gradient())  # type: ignore[method-assign]
        training.step()
        return observed[0]

    everybody, sensitivity = seen_by(OWNERS >= 0), MatrixGame(shares, num_classes=3, weight=1.0, radius=radius)
    rows = made("chain")(x).softmax(dim=1).detach().double().numpy()
    plain = np.zeros((1, 2, 3))
    shrunk = np.array([[[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]]])
    shrunk = shrunk * min(1.0, radius / np.linalg.norm(shrunk))
    for place, owner in enumerate(OWNERS.tolist()):
        share = 1 / int((owner == OWNERS).sum())
        if cells[place] < 2:
            plain[0, cells[place]] += share * 2 / math.sqrt(shares[0][int(cells[place])]) * rows[place]
            plain[0] -= share * 2 * rows[place] * shrunk[0]
    np.testing.assert_allclose(everybody, plain, rtol=1e-4, atol=1e-5)
    for owner in range(NUM_OWNERS):
        moved = everybody - seen_by(owner != OWNERS)
        assert 0 < np.linalg.norm(moved) <= sensitivity.record_sensitivity
