"""F-LD and PF-LD: limits that must agree, sensitivities by brute force, the paper's example of its accounting."""

from __future__ import annotations

import io
import itertools
import math
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from method_kinds import quick_and_slow
from priced import priced
from rich.console import Console
from scipy.stats import norm
from sklearn.base import clone
from torch import Tensor, nn

from fairpate.config import ModelConfig, PrivacyTarget
from fairpate.data import Dataset
from fairpate.estimators import FairClassifier
from fairpate.methods import f_ld
from fairpate.methods.f_ld import FldConfig, PfLdConfig, PfLdNoise, parity_of
from fairpate.methods.parity import UNKNOWN, MeanConstraint, MeanParity, ValueAlong
from fairpate.nn.models import build_model
from fairpate.nn.per_example import GuidedGradients
from fairpate.nn.private_fit import SeededRandomness
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

CONSTRAINTS: tuple[MeanConstraint, ...] = ("demographic_parity", "equalized_odds", "accuracy_parity")
SILENT = PfLdNoise(gradient=0.0, violation=0.0, size=0.0)
HUGE = 1e6
Records = tuple[Tensor, Tensor, Tensor]


def records(size: int, *, groups: int = 3, classes: int = 2, seed: int = 0) -> Records:
    """Every cell of label and group has a record; the label follows the group, and the second feature tells it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator)
    z = (torch.rand(size, generator=generator) * groups).long()
    x[:, 1] += 2 * z
    y = ((x[:, 0] + z + torch.randn(size, generator=generator)).argsort().argsort() * classes) // size
    cells = list(itertools.product(range(classes), range(groups)))
    for row, (label, group) in enumerate(cells):
        y[row], z[row] = label, group
    return x, y, z


def network(classes: int = 2, name: str = "mlp", seed: int = 0) -> nn.Module:
    config = ModelConfig(name=name, hidden=(5,))  # type: ignore[arg-type]
    return build_model(config, input_shape=(4,), num_classes=classes, generator_seed=seed)


def weights(model: nn.Module) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    return values


def trained(
    data: Records, config: FldConfig, *, classes: int = 2, groups: int = 3, noise: PfLdNoise = SILENT, **options: Any
) -> npt.NDArray[np.float32]:
    """The weights that training leaves."""
    model = network(classes)
    shared: dict[str, Any] = {
        "parity": MeanParity(constraint=config.constraint, num_groups=groups, num_classes=classes),
        "generator": torch.Generator().manual_seed(3),
    }
    if isinstance(config, PfLdConfig):
        f_ld.train_pf_ld(model, *data, config, noise, randomness=SeededRandomness(5), **shared, **options)
    else:
        f_ld.train_f_ld(model, *data, config, **shared)
    return weights(model)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("classes", quick_and_slow([2, 3], [3]))
@pytest.mark.parametrize("multipliers", ["absolute", "two_sided"])
def test_without_noise_and_clips_and_with_exact_sizes_it_is_f_ld(
    constraint: MeanConstraint, classes: int, multipliers: str
) -> None:
    """On one batch of all records, whose violations have the signs of the data's, being the data's."""
    data = records(60, classes=classes)
    common: dict[str, Any] = {
        "constraint": constraint, "warmup_epochs": 2, "epochs": 12, "batch_size": 60, "optimizer": "sgd",
        "learning_rate": 0.3, "dual_step": 2.0, "max_multiplier": 3.0, "multipliers": multipliers,
    }  # fmt: skip
    fair = trained(data, FldConfig(**common), classes=classes)
    private = trained(
        data, PfLdConfig(**common, clip_norm=HUGE, clip_value=HUGE, min_group_share=1e-9), classes=classes
    )
    plain = trained(data, FldConfig(**common | {"max_multiplier": 0.0}), classes=classes)
    np.testing.assert_allclose(private, fair, atol=2e-5)
    assert np.abs(fair - plain).max() > 0.01


@pytest.mark.parametrize("off", [{"max_multiplier": 0.0}, {"dual_step": 0.0}])
def test_without_multipliers_it_is_plain_training_whatever_the_noise(off: dict[str, float]) -> None:
    data, noise = records(50), PfLdNoise(gradient=9.0, violation=9.0, size=9.0)
    common = {"warmup_epochs": 1, "epochs": 3, "batch_size": 16}
    plain = trained(data, FldConfig(**common, max_multiplier=0.0))
    np.testing.assert_allclose(trained(data, PfLdConfig(**common, **off), noise=noise), plain, atol=1e-6)


def test_what_is_off_costs_nothing() -> None:
    noise = PfLdNoise(gradient=3.0, violation=4.0, size=5.0)
    target = PrivacyTarget(accounting="rdp")

    def cost(**settings: Any) -> float:
        return priced(f_ld.pf_ld_events(PfLdConfig(epochs=7, **settings), noise, 1000), target).epsilon

    def alone(*events: AttributeGaussians) -> float:
        return accountant.epsilon(events, target_delta=target.delta).epsilon

    duals = AttributeGaussians(count=7, attribute_noise_multiplier=4.0)
    assert cost(max_multiplier=0.0, group_sizes=(5, 5)) == alone(duals)
    assert cost(max_multiplier=0.0) == alone(duals, AttributeGaussians(count=1, attribute_noise_multiplier=5.0))
    assert cost(dual_step=0.0) == 0
    assert cost(group_sizes=(5, 5)) == alone(duals, AttributeGaussians(count=7, attribute_noise_multiplier=3.0))


class PublicState(NamedTuple):
    violations: Tensor
    multipliers: Tensor
    sizes: Tensor


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[PublicState]:
    """What every epoch under constraints releases, and the multipliers that follow from it."""
    states: list[PublicState] = []
    step, slopes = f_ld.Ascent.step, MeanParity.slopes
    violations: list[Tensor] = []

    def heard_step(ascent: f_ld.Ascent, violations_UGK: Tensor) -> None:
        violations.append(violations_UGK)
        step(ascent, violations_UGK)

    def heard_slopes(parity: MeanParity, multipliers_UGK: Tensor, labels_N: Tensor, *, sizes_UG: Tensor) -> Tensor:
        states.append(PublicState(violations[-1], multipliers_UGK, sizes_UG))
        return slopes(parity, multipliers_UGK, labels_N, sizes_UG=sizes_UG)

    monkeypatch.setattr(f_ld.Ascent, "step", heard_step)
    monkeypatch.setattr(MeanParity, "slopes", heard_slopes)
    return states


@pytest.mark.parametrize("multipliers", ["absolute", "two_sided"])
def test_multipliers_stay_within_their_bounds_and_absolute_ones_never_fall(
    multipliers: str, heard: list[PublicState]
) -> None:
    settings: dict[str, Any] = {"warmup_epochs": 0, "epochs": 15, "batch_size": 32, "multipliers": multipliers}
    config = PfLdConfig(**settings, dual_step=3.0, max_multiplier=0.8)
    trained(records(64), config, noise=PfLdNoise(gradient=0.1, violation=2.0, size=1.0))
    sizes = torch.stack([release.multipliers.abs() for release in heard])
    assert len(heard) == 15
    assert float(sizes.max()) == 0.8
    if multipliers == "absolute":
        assert (sizes.diff(dim=0) >= 0).all()
        assert all((r.multipliers.sign() == r.violations.sign()).all() for r in heard)


def test_a_tolerated_violation_raises_no_multiplier() -> None:
    config = {"warmup_epochs": 0, "epochs": 4, "batch_size": 16, "max_multiplier": 2.0}
    assert np.array_equal(
        trained(records(50), FldConfig(**config, tolerance=1.0)),
        trained(records(50), FldConfig(**config, dual_step=0.0)),
    )


def group_term(model: nn.Module, data: Records, slopes_UGK: Tensor, parity: MeanParity, clip_norm: float) -> Tensor:
    """The sum over records of the clipped gradient along its cell's slopes, by autograd, one record after another."""
    x, y, z = data
    terms = (
        record_term(model, x[row], y[row], slopes_UGK.flatten(0, 1)[cell].float(), parity, clip_norm)
        for row, cell in enumerate(parity.cells(y, z).tolist())
    )
    return torch.stack(list(terms)).sum(dim=0)


def record_term(
    model: nn.Module, x: Tensor, y: Tensor, slope_K: Tensor, parity: MeanParity, clip_norm: float
) -> Tensor:
    """What one record adds to it."""
    value = parity.values(model(x[None]), y[None])[0] @ (slope_K / slope_K.norm())
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
    return slope_K.norm() * gradient * min(1.0, clip_norm / float(gradient.norm()))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["mlp", "functional"])
def test_the_weighted_sum_of_clipped_gradients_is_the_sum_record_by_record(
    constraint: MeanConstraint, classes: int, name: str
) -> None:
    data, parity = records(20, classes=classes), MeanParity(constraint=constraint, num_groups=3, num_classes=classes)
    model = network(classes)
    guided = nn.Sequential(model, nn.Softplus()) if name == "functional" else model
    slopes_UGK = torch.randn(parity.shape, generator=torch.Generator().manual_seed(1))
    lengths_J = slopes_UGK.norm(dim=2).flatten()
    cells = parity.cells(data[1], data[2])
    directions = (slopes_UGK / slopes_UGK.norm(dim=2, keepdim=True)).flatten(0, 1)[cells]
    targets = torch.cat([data[1][:, None], directions], dim=1)
    gradients = GuidedGradients(guided, ValueAlong(parity), clip_norm=0.05)
    loss, term = gradients.both(data[0], data[1], targets, lengths_J[cells])
    expected = group_term(guided, data, slopes_UGK, parity, clip_norm=0.05)
    torch.testing.assert_close(torch.cat([t.flatten() for t in term]), expected, atol=1e-6, rtol=1e-4)
    whole = nn.functional.cross_entropy(guided(data[0]), data[1], reduction="sum")
    torch.testing.assert_close(loss, list(torch.autograd.grad(whole, gradients.parameters)), atol=1e-5, rtol=1e-4)


def neighbours(z: Tensor, groups: int) -> list[Tensor]:
    """Every way to change one group."""
    found = []
    for row, group in itertools.product(range(len(z)), range(groups)):
        other = z.clone()
        other[row] = group
        found.append(other)
    return found


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("classes", [2, 3])
def test_no_changed_attribute_moves_a_release_further_than_its_sensitivity(
    constraint: MeanConstraint, classes: int
) -> None:
    data, parity = records(12, classes=classes), MeanParity(constraint=constraint, num_groups=3, num_classes=classes)
    x, y, z = data
    sizes_UG = torch.tensor([[2.0, 3.0, 4.0]] * parity.shape[0], dtype=torch.float64)
    multipliers_UGK = torch.randn(parity.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    slopes_UGK = parity.slopes(multipliers_UGK, y, sizes_UG=sizes_UG)
    model, clip_norm, clip_value = network(classes), 0.1, 0.5

    def violations(groups: Tensor) -> Tensor:
        return parity.measured(model, x, y, parity.cells(y, groups), sizes_UG, clip_value=clip_value)

    @cache
    def term(row: int, cell: int) -> Tensor:
        return record_term(model, x[row], y[row], slopes_UGK.flatten(0, 1)[cell].float(), parity, clip_norm)

    def gradient(groups: Tensor) -> Tensor:
        return torch.stack([term(*placed) for placed in enumerate(parity.cells(y, groups).tolist())]).sum(dim=0)

    moved = [
        (float((violations(z) - violations(other)).norm()), float((gradient(z) - gradient(other)).norm()))
        for other in neighbours(z, 3)
    ]
    furthest = [max(column) for column in zip(*moved, strict=True)]
    bounds = [
        f_ld.violation_sensitivity(sizes_UG, clip_value=clip_value),
        f_ld.gradient_sensitivity(slopes_UGK, clip_norm=clip_norm),
    ]
    for reached, bound in zip(furthest, bounds, strict=True):
        assert reached <= bound * (1 + 1e-5)
        # Nobody's values need to be as large as the clip, but these data come near it.
        assert reached > 0.4 * bound


def test_the_sensitivities_are_those_of_hand_arithmetic() -> None:
    """Sizes 2 and 4, slopes 3 and -1; then the lengths 5 and 13 of two-dimensional slopes."""
    sizes = torch.tensor([[2.0, 4.0]])
    assert f_ld.violation_sensitivity(sizes, clip_value=2.0) == pytest.approx(2 * math.sqrt(1 / 4 + 1 / 16))
    assert f_ld.gradient_sensitivity(torch.tensor([[[3.0], [-1.0]]]), clip_norm=0.5) == pytest.approx(2.0)
    assert f_ld.gradient_sensitivity(torch.tensor([[[3.0, 4.0], [5.0, -12.0]]]), clip_norm=0.5) == pytest.approx(9.0)


def test_the_printed_sensitivities_are_exceeded() -> None:
    """Means over real members: one of ten moves, pointing the other way than the rest; clip and multipliers are 1."""
    records_N = np.array([1.0] * 9 + [-1.0] + [1.0] * 10)

    def means(num_first: int) -> npt.NDArray[np.float64]:
        return np.array([records_N[:num_first].mean(), records_N[num_first:].mean()])

    moved = means(9) - means(10)
    assert abs(moved @ [1, -1]) == pytest.approx(2 * (1 / 10 + 1 / 11), rel=1e-12)
    assert abs(moved @ [1, -1]) > 2 / (10 - 1)
    assert np.linalg.norm(moved) == pytest.approx(0.2703, abs=5e-5)
    assert np.linalg.norm(moved) > math.sqrt(2) / (10 - 1)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Of a Gaussian mechanism, from Balle and Wang 2018, Theorem 8, by bisection."""

    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)) - delta

    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.parametrize("group_sizes", [None, (300.0, 700.0)])
def test_noise_meets_the_target_as_one_gaussian_mechanism_on_public_batches(group_sizes: tuple[float, ...]) -> None:
    config = PfLdConfig(epochs=30, dual_share=0.3, size_share=0.05, group_sizes=group_sizes)
    target = PrivacyTarget(epsilon=1.0)
    noise = f_ld.calibrated_noise(config, target, num_records=1000)
    squares = {"gradient": 30 / noise.gradient**2, "violation": 30 / noise.violation**2, "size": noise.size**-2}
    if group_sizes is not None:
        squares["size"] = 0.0
    mu = math.sqrt(sum(squares.values()))
    assert 0.995 < gaussian_epsilon(mu, target.delta) <= 1.0
    assert squares["violation"] / mu**2 == pytest.approx(0.3)
    assert squares["size"] / mu**2 == pytest.approx(0.05 if group_sizes is None else 0.0)
    cost = priced(f_ld.pf_ld_events(config, noise, 1000), target)
    assert (cost.unit, cost.relation) == ("sensitive attribute", "replace one")
    assert cost.epsilon == pytest.approx(gaussian_epsilon(mu, target.delta), rel=2e-3)


def test_secret_batches_are_charged_step_by_step_by_the_mixture_bound() -> None:
    config = PfLdConfig(epochs=3, batch_size=100, batches="poisson")
    events = f_ld.pf_ld_events(config, PfLdNoise(gradient=3.0, violation=4.0, size=5.0), 1000)
    assert events[0] == SecretBatchAttributeGaussians(count=30, attribute_noise_multiplier=3.0, sampling_rate=0.1)
    noise = f_ld.calibrated_noise(config, PrivacyTarget(epsilon=1.0, accounting="rdp"), num_records=1000)
    cost = priced(f_ld.pf_ld_events(config, noise, 1000), PrivacyTarget(accounting="rdp")).epsilon
    assert 0.99 < cost <= 1.0


@pytest.mark.parametrize("batches", ["public", "poisson"])
def test_the_noise_of_a_gradient_is_multiplier_times_sensitivity(batches: str, heard: list[PublicState]) -> None:
    """One step of plain descent by 1 on one batch: what differs from a silent step is the noise of every weight."""
    data = records(200, groups=2)
    config = PfLdConfig(
        warmup_epochs=0, epochs=1, batch_size=200, optimizer="sgd", learning_rate=1.0,
        group_sizes=(80.0, 120.0), dual_step=1.0, max_multiplier=0.5, clip_norm=0.1, batches=batches,
    )  # fmt: skip
    loud = PfLdNoise(gradient=3.0, violation=0.0, size=0.0)
    noises = []
    silent = trained(data, config, groups=2)
    for seed in range(12):
        model = network()
        f_ld.train_pf_ld(
            model, *data, config, loud, randomness=SeededRandomness(seed), generator=torch.Generator().manual_seed(3),
            parity=MeanParity(constraint="demographic_parity", num_groups=2, num_classes=2),
        )  # fmt: skip
        noises.append(weights(model) - silent)
    first, second = heard[0].multipliers.flatten().tolist()
    expected = 3.0 * 0.1 * abs(first / 80 - second / 120)
    assert 0.85 * expected < np.std(noises) < 1.15 * expected


@pytest.mark.parametrize("declared", [None, pytest.param((150.0, 250.0), marks=pytest.mark.slow)])
def test_released_sizes_and_violations_have_noise_of_their_multipliers(
    declared: tuple[float, ...] | None, heard: list[PublicState]
) -> None:
    """Sizes at their sensitivity, the root of 2, and never below the floor; violations of declared sizes at theirs."""
    data = records(400, groups=2)
    config = PfLdConfig(
        warmup_epochs=0, epochs=1, batch_size=400, max_multiplier=0.0, min_group_share=0.3, group_sizes=declared
    )
    for seed in range(80):
        f_ld.train_pf_ld(
            network(), *data, config, PfLdNoise(gradient=0.0, violation=5.0, size=20.0),
            parity=MeanParity(constraint="demographic_parity", num_groups=2, num_classes=2),
            randomness=SeededRandomness(seed), generator=torch.Generator(),
        )  # fmt: skip
    sizes = torch.stack([release.sizes[0] for release in heard])
    if declared is None:
        assert float(sizes.min()) >= 0.3 * 400
        assert 0.85 * 20 * math.sqrt(2) < float((sizes - torch.bincount(data[2])).std()) < 1.15 * 20 * math.sqrt(2)
    else:
        assert (sizes == torch.tensor(declared)).all()
        noises = torch.stack([release.violations.flatten() for release in heard])
        expected = 5 * math.sqrt(1 / 150**2 + 1 / 250**2)
        assert 0.85 * expected < float((noises - noises.mean(dim=0)).std()) < 1.15 * expected


def test_f_ld_narrows_the_gap_that_plain_training_leaves() -> None:
    x, y, z = records(600, groups=2)
    for constraint in CONSTRAINTS:
        parity = MeanParity(constraint=constraint, num_groups=2, num_classes=2)
        cells, gaps = parity.cells(y, z), []
        for max_multiplier in (0.0, 5.0):
            model = network(name="logistic")
            config = FldConfig(
                constraint=constraint, warmup_epochs=5, epochs=15, batch_size=64, learning_rate=0.03,
                dual_step=2.0, max_multiplier=max_multiplier,
            )  # fmt: skip
            f_ld.train_f_ld(model, x, y, z, config, parity=parity, generator=torch.Generator().manual_seed(0))
            exact = parity.measured(model, x, y, cells, parity.group_sizes(cells))
            gaps.append(float(exact.abs().max()))
        assert gaps[1] < 0.5 * gaps[0], constraint


def test_violations_are_differences_of_means() -> None:
    """Equalized odds of six records by hand; a record of unknown group counts in its population alone."""
    parity = MeanParity(constraint="equalized_odds", num_groups=2, num_classes=2)
    y, z = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, UNKNOWN, 0, 0, 1])
    h = torch.tensor([[0.1], [0.4], [0.7], [0.2], [0.6], [1.0]], dtype=torch.float64)
    cells = parity.cells(y, z)
    found = parity.violations(h, y, cells, sizes_UG=parity.group_sizes(cells))
    np.testing.assert_allclose(found[..., 0], [[0.3, 0.0], [0.2, -0.4]], atol=1e-12)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("classes", [2, 4])
def test_slopes_are_the_derivatives_of_violations_and_values_have_the_gradient_they_say(
    constraint: MeanConstraint, classes: int
) -> None:
    parity = MeanParity(constraint=constraint, num_groups=2, num_classes=classes, sharpness=1.7)
    _, y, z = records(30, groups=2, classes=classes)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(30, classes, generator=generator, requires_grad=True)
    cells = parity.cells(y, z)
    sizes_UG = torch.full(parity.shape[:2], 7.0, dtype=torch.float64)
    multipliers_UGK = torch.randn(parity.shape, generator=generator, dtype=torch.float64)
    values = parity.values(outputs, y).double()
    total = (parity.violations(values, y, cells, sizes_UG=sizes_UG) * multipliers_UGK).sum()
    (slopes,) = torch.autograd.grad(total, values, retain_graph=True)
    expected = parity.slopes(multipliers_UGK, y, sizes_UG=sizes_UG).flatten(0, 1)[cells]
    torch.testing.assert_close(slopes, expected)
    targets = torch.cat([y[:, None], torch.randn(30, parity.shape[2], generator=generator)], dim=1)
    along = ValueAlong(parity)
    (by_autograd,) = torch.autograd.grad(along(outputs, targets).sum(), outputs)
    torch.testing.assert_close(along.gradient(outputs.detach(), targets), by_autograd, atol=1e-6, rtol=1e-5)


def test_accuracy_parity_raises_a_groups_loss_from_its_share_on() -> None:
    """The weight of a record's loss is its derivative: 1 / N from the mean, and its slope from the violations."""
    y = torch.zeros(100, dtype=torch.long)
    parity, sizes = MeanParity(constraint="accuracy_parity", num_groups=2, num_classes=2), torch.tensor([[30.0, 70.0]])
    for cap, is_lowered in ((0.29, True), (0.31, False)):
        corners = [torch.tensor(signs).view(1, 2, 1) * cap for signs in itertools.product((-1.0, 0.0, 1.0), repeat=2)]
        weights_G = [100 * (1 / 100 + parity.slopes(mu, y, sizes_UG=sizes)).flatten() for mu in corners]
        lightest = min(float(weight.min()) for weight in weights_G)
        assert lightest == pytest.approx(1 - cap / 0.3)
        assert (lightest > 0) == is_lowered


@pytest.mark.parametrize(
    ("constraint", "cap", "warns"),
    [("accuracy_parity", 0.5, False), ("accuracy_parity", 0.51, True), ("demographic_parity", 5.0, False)],
)
def test_a_run_warns_of_levelling_down(constraint: Any, cap: float, warns: bool) -> None:
    shown, two_groups = io.StringIO(), cast("Dataset", SimpleNamespace(num_groups=2, num_classes=2))
    config = FldConfig(constraint=constraint, max_multiplier=cap)
    parity_of(config, two_groups, Reporter(Console(file=shown, width=1000)))
    assert ("keep max_multiplier below" in shown.getvalue()) == warns


def test_bad_input_names_the_field_and_the_remedy() -> None:
    x, y, z = records(40, groups=2)
    unknown = z.clone()
    unknown[0] = UNKNOWN
    with pytest.raises(ValueError, match="group of every record"):
        trained((x, y, unknown), PfLdConfig(epochs=1), groups=2)
    with pytest.raises(ValueError, match="none of group 2; merge groups"):
        trained((x, y, z), FldConfig(epochs=1), groups=3)
    with pytest.raises(ValueError, match="none of group 1 with label 0"):
        trained((x, y, y), FldConfig(epochs=1, constraint="equalized_odds"), groups=2)
    with pytest.raises(ValueError, match="groups to be codes from 0 to 1"):
        trained((x, y, z + (torch.arange(40) == 3)), FldConfig(epochs=1), groups=2)
    with pytest.raises(ValueError, match=r"group_sizes: expected 4 sizes .* got 2"):
        trained((x, y, z), PfLdConfig(epochs=1, constraint="equalized_odds", group_sizes=(20, 20)), groups=2)
    with pytest.raises(ValueError, match="records of every label"):
        trained((x, y * 0, z), PfLdConfig(epochs=1, constraint="equalized_odds"), groups=2)
    with pytest.raises(ValueError, match="2 groups and 2 classes"):
        MeanParity(constraint="demographic_parity", num_groups=1, num_classes=2)
    with pytest.raises(ValueError, match=r"dual_share \+ size_share < 1"):
        PfLdConfig(dual_share=0.6, size_share=0.5)


def test_estimators_are_clonable_and_state_their_unit() -> None:
    x, y, z = (values.numpy() for values in records(300, groups=2))
    names = np.array(["no", "yes"])[y]
    private = FairClassifier(
        "pf_ld",
        epsilon=2.0,
        target={"accounting": "rdp"},
        pf_ld={"epochs": 5, "batch_size": 300},
        noise="seeded",
        random_state=0,
    )
    fitted = clone(private).fit(x, names, sensitive_features=z)
    assert set(fitted.predict(x)) <= {"no", "yes"}
    assert fitted.predict_proba(x).shape == (300, 2)
    assert (fitted.privacy_.unit, fitted.privacy_.relation) == ("sensitive attribute", "replace one")
    assert 1.99 < fitted.privacy_.epsilon <= 2.0
    again = clone(private).fit(x, names, sensitive_features=z)
    assert np.array_equal(fitted.predict_proba(x), again.predict_proba(x))
    open_to_all = FairClassifier("f_ld", f_ld={"epochs": 2}, random_state=0).fit(x, names, sensitive_features=z)
    assert open_to_all.privacy_.epsilon == math.inf
    with pytest.raises(ValueError, match="give sensitive_features"):
        clone(private).fit(x, names)
