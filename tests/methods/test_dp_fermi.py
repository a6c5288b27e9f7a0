"""DP-FERMI: the objective by hand, its limits, sensitivities by search, and what it reports."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow
from parity_data import signal_records, weights
from priced import priced
from sklearn.base import clone
from torch import Tensor, nn

from fairpate.config import ModelConfig, PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.fairness.rates import ermi
from fairpate.methods import dp_fermi, dp_sgd
from fairpate.methods.base import Trained
from fairpate.methods.dp_fermi import (
    DpFermiConfig,
    FermiLoss,
    FermiSteps,
    MatrixGame,
    Shares,
    fermi_training,
    public_partitions,
    release_shares,
    share_events,
    watched_targets,
)
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.parity import ParityCells
from fairpate.nn.fit import hard_disparity, predict_logits
from fairpate.nn.models import build_model
from fairpate.nn.per_example import GradientClipper
from fairpate.nn.private_fit import GaussianNoise, PrivateRandomness, SeededRandomness
from fairpate.privacy.accountant import PoissonGaussians, SpentError
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians

pytestmark = pytest.mark.usefixtures("light_runs")

BASE = DpSgdConfig(epochs=4, batch_size=100, learning_rate=1.0)
MODES = ["all", "sens_public_batches", "sens_secret_batches"]


def network(num_classes: int = 2, hidden: tuple[int, ...] = ()) -> nn.Module:
    name = "mlp" if hidden else "logistic"
    return build_model(
        ModelConfig(name=name, hidden=hidden), input_shape=(3,), num_classes=num_classes, generator_seed=0
    )


def cells_of(y: Tensor, z: Tensor, config: DpFermiConfig, **sizes: int) -> ParityCells:
    return ParityCells.of(y, z, constraint=config.constraint, positive_label=config.positive_label, **sizes)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    cells: ParityCells,
    steps: FermiSteps,
    config: DpFermiConfig,
    *,
    shares: Shares,
    randomness: PrivateRandomness,
    generator: torch.Generator,
) -> Trained:
    """The game of ``config`` from the given steps and shares."""
    num_classes = next(reversed(list(model.parameters()))).shape[0]
    game = MatrixGame(shares.shares_EG, num_classes=num_classes, weight=config.weight, radius=config.radius)
    public, size = config.mode == "sens_public_batches", round(steps.steps.expected_batch_size)
    events = fermi_training(
        model,
        x,
        watched_targets(y, torch.from_numpy(cells.cells_N), num_classes=num_classes, num_cells=cells.num_cells),
        game,
        steps,
        config,
        randomness=randomness,
        sampler=partial(next, public_partitions(len(x), size, generator)) if public else None,
        events=(steps.event, *shares.events),
    ).run(averaged_share=config.averaged_share)
    return Trained(model=model, events=events, noise=randomness.label)


def without_noise(config: DpFermiConfig, base: DpSgdConfig, size: int) -> FermiSteps:
    steps = dp_fermi.calibrated_steps(config, base, PrivacyTarget(accounting="rdp"), num_records=size)
    quiet = dp_sgd.plan_steps(base, num_records=size, noise_multiplier=0.0)
    quiet_steps = type(quiet)(**vars(quiet) | {"num_steps": steps.steps.num_steps})
    return FermiSteps(steps=quiet_steps, matrix_noise_multiplier=0.0, event=steps.event)


def run(base: DpSgdConfig = BASE, *, noisy: bool = True, hidden: tuple[int, ...] = (), **settings: Any) -> Trained:
    x, y, z = signal_records(800)
    config = DpFermiConfig(**{"averaged_share": 0.0} | settings)
    target = PrivacyTarget(epsilon=3, accounting="rdp")
    cells = cells_of(y, z, config, num_classes=2, num_groups=2)
    steps = dp_fermi.calibrated_steps(config, base, target, num_records=len(x))
    randomness = SeededRandomness(3)
    shares = release_shares(cells, config, relation=target.record_relation, randomness=randomness)
    return train(
        network(hidden=hidden),
        x,
        y,
        cells,
        steps if noisy else without_noise(config, base, len(x)),
        config,
        shares=shares,
        randomness=randomness,
        generator=torch.Generator().manual_seed(0),
    )


def psi_by_hand(matrix_GC: np.ndarray, probability_C: np.ndarray, group: int, share_G: np.ndarray) -> float:
    cost = sum(probability_C[j] * (matrix_GC[:, j] ** 2).sum() for j in range(len(probability_C)))
    return float(-cost + 2 * matrix_GC[group] @ probability_C / math.sqrt(share_G[group]) - 1)


def best_matrix(joint_CG: np.ndarray) -> np.ndarray:
    """Diag(p_group)^(-1/2) P^T Diag(p_class)^(-1), shape (G, C)."""
    matrix: np.ndarray = joint_CG.T / np.sqrt(joint_CG.sum(axis=0))[:, None] / joint_CG.sum(axis=1)
    return matrix


def game_of(share_EG: np.ndarray, num_classes: int, *, radius: float = 1e9, weight: float = 1.0) -> MatrixGame:
    return MatrixGame(share_EG, num_classes=num_classes, weight=weight, radius=radius)


def test_the_golden_joint() -> None:
    joint_CG = np.array([[0.3, 0.1], [0.2, 0.4]])
    matrix_GC, share_G = best_matrix(joint_CG), joint_CG.sum(axis=0)
    value = sum(joint_CG[j, g] * psi_by_hand(matrix_GC, np.eye(2)[j], g, share_G) for j in (0, 1) for g in (0, 1))
    assert value == pytest.approx(1 / 6, abs=1e-12)
    assert np.linalg.norm(matrix_GC) == pytest.approx(1.5365907, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_the_ascent_ends_at_ermi(seed: int) -> None:
    """Mean psi at its best matrix is ERMI, by the metric; there the game's own gradient vanishes."""
    generator = np.random.default_rng(seed)
    joint_CG = generator.dirichlet(np.ones(12)).reshape(4, 3)
    share_G, matrix_GC = joint_CG.sum(axis=0), best_matrix(joint_CG)
    value = sum(joint_CG[j, g] * psi_by_hand(matrix_GC, np.eye(4)[j], g, share_G) for j in range(4) for g in range(3))
    table_GYC = np.zeros((3, 4, 4))
    table_GYC[:, 0] = joint_CG.T
    assert value == pytest.approx(ermi(table_GYC), abs=1e-10)
    game = game_of(share_G[None], 4)
    game.move_to(matrix_GC[None])
    counts = torch.tensor(np.repeat(np.eye(4), 3, axis=0) * joint_CG.reshape(-1, 1), dtype=torch.float32)
    cells = torch.arange(3).repeat(4)
    game.observe(counts, watched_targets(torch.zeros(12), cells, num_classes=4, num_cells=3))
    assert np.abs(game.gradient()).max() < 1e-6


@pytest.mark.parametrize("num_events", [1, 2])
def test_the_gradients_are_autograds(num_events: int) -> None:
    """Of the loss with respect to outputs, and of the matrices, against psi written out in double precision."""
    generator = torch.Generator().manual_seed(1)
    share_EG = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])[:num_events]
    outputs = torch.randn(40, 4, generator=generator)
    labels = torch.randint(4, (40,), generator=generator)
    cells = torch.randint(3 * num_events + 1, (40,), generator=generator)
    game = game_of(share_EG, 4, weight=1.7)
    game.move_to(torch.randn(num_events, 3, 4, generator=generator).double().numpy())
    targets = watched_targets(labels, cells, num_classes=4, num_cells=3 * num_events)
    loss = FermiLoss(game.pull_KC, observe=game.observe)

    u = outputs.double().requires_grad_()
    matrix = torch.tensor(game.matrix_EGC, requires_grad=True)
    total, psi = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i, cell in enumerate(cells.tolist()):
        total = total + nn.functional.cross_entropy(u[i], labels[i])
        if cell < 3 * num_events:
            event, group = divmod(cell, 3)
            f = u[i].softmax(dim=0)
            pulled = 2 * matrix[event, group] @ f / math.sqrt(share_EG[event, group])
            psi = psi + pulled - (f * matrix[event].square().sum(dim=0)).sum() - 1
    (expected,) = torch.autograd.grad(total + 1.7 * psi, u, retain_graph=True)
    torch.testing.assert_close(loss.gradient(outputs, targets).double(), expected, atol=1e-4, rtol=1e-4)
    (expected_matrix,) = torch.autograd.grad(psi, matrix)
    np.testing.assert_allclose(game.gradient(), expected_matrix.numpy(), atol=1e-3)
    leaf = outputs.clone().requires_grad_()
    (automatic,) = torch.autograd.grad(FermiLoss(game.pull_KC)(leaf, targets).sum(), leaf)
    torch.testing.assert_close(automatic.double(), expected, atol=1e-4, rtol=1e-4)


def test_common_and_own_pulls_add_up_and_own_ones_cancel_over_groups() -> None:
    game = game_of(np.array([[0.2, 0.8], [0.5, 0.5]]), 3, weight=2.0)
    game.move_to(np.random.default_rng(0).normal(size=(2, 2, 3)))
    game.split_pulls()
    torch.testing.assert_close(game.common_pull_KC + game.own_pull_KC, game.pull_KC)
    own_EGC = game.own_pull_KC[3:].view(2, 2, 3)
    torch.testing.assert_close(own_EGC.sum(dim=1), torch.zeros(2, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(game.common_pull_KC[3], game.common_pull_KC[4])


def matrix_gradient(game: MatrixGame, probability_C: Tensor, cell: int) -> np.ndarray:
    targets = watched_targets(torch.zeros(1), torch.tensor([cell]), num_classes=3, num_cells=6)
    game._sums_KC.zero_()
    game.observe(probability_C[None], targets)
    return game.gradient()


def test_no_record_and_no_change_of_group_moves_the_matrix_gradient_further_than_the_bounds() -> None:
    """A random search over predictions and matrices on the ball; another group's bound is attained."""
    generator = torch.Generator().manual_seed(0)
    share_EG = np.array([[0.1, 0.3, 0.6], [0.25, 0.25, 0.5]])
    game = game_of(share_EG, 3, radius=1.3)
    most_record = most_group = 0.0
    for trial in range(400):
        game.move_to(5 * torch.randn(2, 3, 3, generator=generator).double().numpy())
        logits = (1 + trial % 30) * torch.randn(3, generator=generator)
        gradients = [matrix_gradient(game, logits.softmax(dim=0), cell) for cell in range(6)]
        most_record = max(most_record, *(float(np.linalg.norm(g)) for g in gradients))
        for first, second in itertools.combinations(range(3), 2):
            for event in (0, 3):
                apart = gradients[event + first] - gradients[event + second]
                most_group = max(most_group, float(np.linalg.norm(apart)))
    assert game.record_sensitivity == pytest.approx(2 / math.sqrt(0.1) + 2 * 1.3)
    assert game.group_sensitivity == pytest.approx(2 * math.sqrt(1 / 0.1 + 1 / 0.3))
    assert 0.6 * game.record_sensitivity < most_record <= game.record_sensitivity
    assert 0.99 * game.group_sensitivity < most_group <= game.group_sensitivity * (1 + 1e-6)


def test_a_record_that_is_not_finite_spoils_neither_of_the_two_sums() -> None:
    x, y, z = signal_records(6, seed=4)
    x[2] = torch.inf
    game = game_of(np.array([[0.5, 0.5]]), 2, weight=3.0)
    clipper = GradientClipper(network(), FermiLoss(game.pull_KC, observe=game.observe), clip_norm=0.7)
    targets = watched_targets(y, z, num_classes=2, num_cells=2)
    sums = torch.cat([g.flatten() for g in clipper.sum(x, targets).gradients])
    of_all = game.gradient()
    assert sums.norm() <= 5 * 0.7
    rest = [0, 1, 3, 4, 5]
    other = game_of(np.array([[0.5, 0.5]]), 2, weight=3.0)
    clipper = GradientClipper(network(), FermiLoss(other.pull_KC, observe=other.observe), clip_norm=0.7)
    torch.testing.assert_close(sums, torch.cat([g.flatten() for g in clipper.sum(x[rest], targets[rest]).gradients]))
    np.testing.assert_allclose(of_all, other.gradient(), rtol=1e-5)


def test_another_group_moves_the_clipped_sum_by_twice_the_clip_norm_at_most() -> None:
    x, y, _ = signal_records(60, seed=4)
    game = game_of(np.array([[0.1, 0.9]]), 2, weight=30.0, radius=2.0)
    game.move_to(np.array([[[1.5, -1.0], [-0.5, 1.0]]]))
    game.split_pulls()
    model = network()
    clipper = GradientClipper(model, FermiLoss(game.own_pull_KC, reads_labels=False), clip_norm=0.7)

    def gradient(i: int, group: int) -> Tensor:
        targets = watched_targets(y[i : i + 1], torch.tensor([group]), num_classes=2, num_cells=2)
        return torch.cat([g.flatten() for g in clipper.sum(x[i : i + 1], targets).gradients])

    apart = [float((gradient(i, 0) - gradient(i, 1)).norm()) for i in range(60)]
    assert 1.3 < max(apart) <= 1.4 + 1e-5


def test_the_matrices_stay_in_their_balls() -> None:
    game = game_of(np.array([[0.5, 0.5], [0.1, 0.9]]), 2, radius=1.5)
    noise = GaussianNoise(SeededRandomness(0))
    for _ in range(50):
        game.ascend(noise, stddev=100.0, learning_rate=1.0)
        assert (np.linalg.norm(game.matrix_EGC, axis=(1, 2)) <= 1.5 + 1e-9).all()
    inside = np.full((2, 2, 2), 0.1)
    game.move_to(inside)
    np.testing.assert_array_equal(game.matrix_EGC, inside)


def test_a_weight_of_zero_is_dp_sgd_with_the_same_noise() -> None:
    x, y, _ = signal_records(800)
    steps = dp_sgd.calibrated_steps(BASE, PrivacyTarget(epsilon=3, accounting="rdp"), num_records=800)
    plain = dp_sgd.train_dp_sgd(network(), x, y, steps, randomness=SeededRandomness(3))
    fermi = run(weight=0.0)
    torch.testing.assert_close(weights(fermi.model), weights(plain.model), rtol=0, atol=1e-6)
    assert fermi.events == plain.events
    assert not torch.allclose(weights(run(weight=0.5).model), weights(plain.model), atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("constraint", ["demographic_parity", "equalized_odds"])
def test_without_noise_it_is_plain_descent_and_ascent(mode: str, constraint: str) -> None:
    """Full batches, no clipping: against the two updates written out with autograd, whatever the mode."""
    base = DpSgdConfig(epochs=15, batch_size=800, clip_norm=1e6, learning_rate=0.8, momentum=0.0)
    num_events = 1 if constraint == "demographic_parity" else 2
    share_EG = ((0.5, 0.5),) * num_events
    settings: dict[str, Any] = {"mode": mode, "constraint": constraint, "weight": 1.5, "matrix_learning_rate": 0.4}
    ours = run(base, noisy=False, shares=share_EG, radius=1.2, **settings)
    x, y, z = signal_records(800)
    model, matrix_EGC = network(), torch.zeros(num_events, 2, 2, requires_grad=True)
    parameters = list(model.parameters())
    event = y if num_events == 2 else torch.zeros_like(y)
    for _ in range(15):
        probability_NC = model(x).softmax(dim=1)
        gain_N = 2 * (matrix_EGC[event, z] * probability_NC).sum(dim=1) / math.sqrt(0.5)
        cost_N = (matrix_EGC.square().sum(dim=1)[event] * probability_NC).sum(dim=1)
        psi = (gain_N - cost_N - 1).mean()
        down = torch.autograd.grad(nn.functional.cross_entropy(model(x), y) + 1.5 * psi, parameters, retain_graph=True)
        (up,) = torch.autograd.grad(psi, matrix_EGC)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, down, strict=True):
                parameter -= 0.8 * gradient
            matrix_EGC += 0.4 * up
            norms = matrix_EGC.flatten(1).norm(dim=1)[:, None, None]
            matrix_EGC *= (1.2 / norms).clamp(max=1)
    torch.testing.assert_close(weights(ours.model), weights(model), atol=2e-5, rtol=1e-4)


def test_equalized_odds_of_one_label_is_demographic_parity() -> None:
    _, y, z = signal_records(30)
    config = DpFermiConfig(constraint="equalized_odds")
    one = cells_of(torch.zeros_like(y), z, config, num_classes=1, num_groups=2)
    parity = cells_of(y, z, DpFermiConfig(), num_classes=2, num_groups=2)
    assert np.array_equal(one.cells_N, parity.cells_N)
    assert one.num_events == parity.num_events == 1


def test_cells_of_each_constraint() -> None:
    y, z = torch.tensor([0, 1, 2, 1]), torch.tensor([2, 0, 1, 1])

    def cells(**settings: Any) -> ParityCells:
        return cells_of(y, z, DpFermiConfig(**settings), num_classes=3, num_groups=3)

    assert cells().cells_N.tolist() == [2, 0, 1, 1]
    assert cells(constraint="equalized_odds").cells_N.tolist() == [2, 3, 7, 4]
    assert cells(constraint="equal_opportunity", positive_label=1).cells_N.tolist() == [3, 0, 3, 1]
    nobody = watched_targets(y, torch.full((4,), 3), num_classes=3, num_cells=3)
    assert nobody[:, 3:].sum() == 0


@pytest.mark.parametrize("mode", quick_and_slow(MODES, ("all",)))
def test_the_regulariser_narrows_the_gap(mode: str) -> None:
    x, _, z = signal_records(3000, seed=5)
    base = BASE.model_copy(update={"epochs": 30})
    plain, fair = (
        hard_disparity(predict_logits(run(base, noisy=False, weight=weight, mode=mode).model, x), z)
        for weight in (0.0, 4.0)
    )
    assert plain > 0.35
    assert fair < 0.7 * plain


@pytest.mark.parametrize(
    ("mode", "accounting"),
    [
        *((mode, "rdp") for mode in MODES),
        *(pytest.param(mode, "pld", marks=pytest.mark.slow) for mode in ("all", "sens_secret_batches")),
        ("sens_public_batches", "pld"),
    ],
)
def test_all_that_was_released_stays_within_the_target(mode: str, accounting: Any) -> None:
    target = PrivacyTarget(epsilon=2, accounting=accounting)
    config = DpFermiConfig(mode=mode)
    steps = dp_fermi.calibrated_steps(config, BASE, target, num_records=800)
    _, y, z = signal_records(800)
    cells = cells_of(y, z, config, num_classes=2, num_groups=2)
    shares = release_shares(cells, config, relation="add or remove one", randomness=SeededRandomness(0))
    cost = priced([steps.event, *shares.events], target)
    assert 1.98 < cost.epsilon <= 2
    unit = ("record", "add or remove one") if mode == "all" else ("sensitive attribute", "replace one")
    assert (cost.unit, cost.relation, cost.accounting) == (*unit, accounting)
    theta, matrix = steps.steps.noise_multiplier, steps.matrix_noise_multiplier
    joint = getattr(steps.event, "noise_multiplier", None) or getattr(steps.event, "attribute_noise_multiplier", None)
    assert (theta**-2 + matrix**-2) ** -0.5 == pytest.approx(joint)
    assert matrix == pytest.approx(config.matrix_noise_ratio * theta)


def test_the_events_say_what_each_mode_does() -> None:
    events = {mode: run(mode=mode).events for mode in MODES}
    sampled, shares = events["all"]
    assert isinstance(sampled, PoissonGaussians)
    assert (sampled.count, sampled.sampling_rate) == (32, 0.125)
    assert shares == PoissonGaussians(count=1, noise_multiplier=30.0, sampling_rate=1.0)
    public, public_shares = events["sens_public_batches"]
    assert isinstance(public, AttributeGaussians)
    assert public.count == 4
    assert public_shares == AttributeGaussians(count=1, attribute_noise_multiplier=30 / math.sqrt(2))
    hidden, _ = events["sens_secret_batches"]
    assert isinstance(hidden, SecretBatchAttributeGaussians)
    assert (hidden.count, hidden.sampling_rate) == (32, 0.125)
    assert len(run(shares=((0.5, 0.5),)).events) == 1
    assert priced(run(weight=0.0, mode="sens_public_batches").events, PrivacyTarget()).epsilon == 0


def test_replacing_a_record_takes_more_noise() -> None:
    config = DpFermiConfig()
    targets = PrivacyTarget(epsilon=2, accounting="rdp"), PrivacyTarget(epsilon=2, relation="replace one")
    added, replaced = (dp_fermi.calibrated_steps(config, BASE, target, num_records=800) for target in targets)
    assert replaced.steps.noise_multiplier > 1.3 * added.steps.noise_multiplier
    cost = priced([replaced.event], targets[1])
    assert (cost.relation, cost.accounting) == ("replace one", "pld")
    assert 1.9 < cost.epsilon < 2


def counted_shares(config: DpFermiConfig, counts: tuple[int, ...], seed: int = 0) -> Shares:
    z = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    cells = cells_of(torch.zeros_like(z), z, config, num_classes=2, num_groups=len(counts))
    return release_shares(cells, config, relation="add or remove one", randomness=SeededRandomness(seed))


def test_released_shares_are_noisy_counts_of_the_stated_noise() -> None:
    config = DpFermiConfig(share_noise=20.0)
    shares_SG = np.array([counted_shares(config, (4000, 6000), seed).shares_EG[0] for seed in range(300)])
    np.testing.assert_allclose(shares_SG.mean(axis=0), [0.4, 0.6], atol=5e-4)
    # The share's first-order deviation: sqrt((0.6^2 + 0.4^2)) 20 / 10000.
    assert 0.85 < shares_SG[:, 0].std() / (math.hypot(0.6, 0.4) * 20 / 10000) < 1.15


def test_small_groups_are_floored_and_said_to_be() -> None:
    config = DpFermiConfig(share_noise=1.0, min_share=0.05)
    shares = counted_shares(config, (900, 90, 10))
    assert shares.shares_EG.min() == 0.05
    assert "group 2 of event 0" in shares.remarks[0]
    assert counted_shares(config, (500, 500, 500)).remarks == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shares": ((0.5, 0.5), (0.5, 0.5))}, "each of 2 numbers, one per group"),
        ({"shares": ((0.5, 0.6),)}, "sum to 1"),
        ({"shares": ((0.999, 0.001),)}, "sum to 1"),
        ({"constraint": "equal_opportunity", "positive_label": 2}, "positive_label < 2"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**settings)


def test_an_event_without_records_and_bad_codes_are_refused() -> None:
    with pytest.raises(SpentError, match="Expected records in every event") as refused:
        config = DpFermiConfig(constraint="equalized_odds", share_noise=1e-6)
        for seed in range(20):
            counted_shares(config, (30, 30), seed)
    assert refused.value.events == share_events(config, "add or remove one") != ()
    assert refused.value.noise == SeededRandomness(0).label
    with pytest.raises(ValueError, match="at least 2 groups"):
        counted_shares(DpFermiConfig(), (30,))
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="groups to be codes from 0 to 1"):
        cells_of(y, torch.tensor([0, 1, 2, 0]), DpFermiConfig(), num_classes=2, num_groups=2)
    with pytest.raises(ValueError, match="one group per label"):
        cells_of(y, y[:3], DpFermiConfig(), num_classes=2, num_groups=2)


def test_a_target_that_the_shares_alone_exceed_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match="some noise reaches"):
        dp_fermi.calibrated_steps(
            DpFermiConfig(share_noise=0.1), BASE, PrivacyTarget(epsilon=1, accounting="rdp"), num_records=800
        )


def test_public_batches_divide_the_records_every_epoch() -> None:
    batches = public_partitions(10, 4, torch.Generator().manual_seed(0))
    for _ in range(3):
        epoch = [next(batches) for _ in range(3)]
        assert sorted(len(rows) for rows in epoch) == [2, 4, 4]
        assert sorted(torch.cat(epoch).tolist()) == list(range(10))


@pytest.mark.parametrize("mode", quick_and_slow(MODES, ("sens_secret_batches",)))
def test_records_in_memory_at_once_change_nothing(mode: str) -> None:
    few, many = (run(BASE.model_copy(update={"max_records": size}), mode=mode) for size in (17, 4096))
    torch.testing.assert_close(weights(few.model), weights(many.model), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_images_many_classes_and_groups(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 2, 28, 28), generator=generator, dtype=torch.uint8)
    y, z = torch.arange(40) % 5, torch.arange(40) % 3
    config = DpFermiConfig(mode=mode, constraint="equalized_odds", averaged_share=0.5, share_noise=1.0)
    base = DpSgdConfig(epochs=1, batch_size=20, max_records=7)
    steps = dp_fermi.calibrated_steps(config, base, PrivacyTarget(epsilon=8, accounting="rdp"), num_records=40)
    model = build_model(ModelConfig(name="lenet"), input_shape=(2, 28, 28), num_classes=5, generator_seed=0)
    before = weights(model)
    cells = cells_of(y, z, config, num_classes=5, num_groups=3)
    randomness = SeededRandomness(0)
    shares = release_shares(cells, config, relation="add or remove one", randomness=randomness)
    train(model, x, y, cells, steps, config, shares=shares, randomness=randomness, generator=generator)
    after = weights(model)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def test_the_estimator_follows_scikit_learn_and_forgets_the_groups() -> None:
    x, y, z = (values.numpy() for values in signal_records(600))
    x[:, 1] += 0.1 * x[:, 2]  # the group itself is no feature for a method that protects it alone
    names = np.array(["b", "a"])[z]
    classifier = FairClassifier(
        "dp_fermi",
        model=ModelConfig(name="logistic"),
        dp_sgd={"epochs": 4, "batch_size": 100},
        noise="seeded",
        target={"accounting": "rdp"},
        random_state=0,
    )
    fitted = clone(classifier).fit(x, y, sensitive_features=names)
    assert fitted.groups_.tolist() == ["a", "b"]
    assert fitted.trained_.shares_EG.shape == (1, 2)
    assert not any(np.array_equal(value, names) for value in vars(fitted).values() if isinstance(value, np.ndarray))
    assert fitted.privacy_.epsilon <= 3
    np.testing.assert_array_equal(fitted.predict(x), clone(classifier).fit(x, y, sensitive_features=names).predict(x))
    attribute = clone(classifier).set_params(dp_fermi__mode="sens_public_batches").fit(x, y, sensitive_features=names)
    assert attribute.privacy_.unit == "sensitive attribute"
    with pytest.raises(ValueError, match="sensitive_features"):
        classifier.fit(x, y)
    with pytest.raises(ValueError, match="sensitive_features: expected one value per record"):
        classifier.fit(x, y, sensitive_features=names[:5])


def test_shares_count_every_person_once_in_all() -> None:
    """By hand: persons with 1, 2 and 4 records, and noise too small to see."""
    groups, labels = torch.tensor([0, 0, 1, 1, 1, 1, 0]), torch.tensor([1, 1, 1, 0, 1, 1, 1])
    persons = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    config = DpFermiConfig(constraint="equal_opportunity", share_noise=1e-9)
    cells = cells_of(labels, groups, config, num_classes=2, num_groups=2)
    shares = release_shares(
        cells, config, relation="add or remove one", randomness=SeededRandomness(0), person_N=persons
    )
    # Group 0: 1 + 1/2 + 1/4; group 1: 1/2 + 2/4, since one record of the last person is in no event.
    np.testing.assert_allclose(shares.shares_EG, [[1.75 / 2.75, 1 / 2.75]], atol=1e-6)
