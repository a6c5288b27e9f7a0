"""RaCO-DP: its limits are DP-SGD and plain descent-ascent, its gradient is autograd's, its price is the joint one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exact_rates import exact_values
from method_kinds import quick_and_slow
from parity_data import weights
from priced import priced
from torch import Tensor, nn

from fairpate.config import ModelConfig, PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.methods import dp_sgd, raco_dp
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.raco_dp import (
    NAMED_CONSTRAINTS,
    ConstraintReport,
    HistogramSteps,
    Partition,
    RacoDpConfig,
    RateConstraint,
    RateConstraints,
    RateTerm,
    named_constraints,
)
from fairpate.nn.fit import predict_logits
from fairpate.nn.models import build_model
from fairpate.nn.private_fit import PrivateSteps, SeededRandomness
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Event

pytestmark = pytest.mark.usefixtures("light_runs")

NUM_CLASSES, NUM_GROUPS = 3, 2


def model(name: str = "logistic", *, num_classes: int = NUM_CLASSES) -> nn.Module:
    return build_model(ModelConfig(name=name, hidden=(8,)), input_shape=(3,), num_classes=num_classes, generator_seed=0)


def records(count: int, *, num_classes: int = NUM_CLASSES, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The label follows a signal and the group, which is a feature too."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.arange(count) % NUM_GROUPS
    signal = torch.randn(count, generator=generator)
    x = torch.stack([signal, z.float(), torch.randn(count, generator=generator)], dim=1)
    y = (signal + 1.5 * z + 0.25).clamp(0, num_classes - 1).round().long()
    return x, y, z


def steps(count: int, *, noise: float = 1.0, laplace_scale: float = 2.0, **changed: Any) -> HistogramSteps:
    settings: dict[str, Any] = {
        "num_steps": 6,
        "sampling_rate": 0.25,
        "expected_batch_size": 0.25 * count,
        "clip_norm": 1.0,
        "noise_multiplier": noise,
        "learning_rate": 0.5,
    }
    gradient = PrivateSteps(**settings | changed)
    return HistogramSteps(gradient=gradient, laplace_scale=laplace_scale, size_floor=0.01 * count)


class Done(NamedTuple):
    events: tuple[Event, ...]
    report: ConstraintReport


def train(
    network: nn.Module,
    data: tuple[Tensor, Tensor, Tensor],
    planned: HistogramSteps,
    *,
    averaged_share: float = 0.0,
    **settings: Any,
) -> Done:
    config, (x, y, z) = RacoDpConfig(**settings), data
    num_classes = next(reversed(list(network.parameters()))).shape[0]
    constraints = raco_dp.constraints_of(config, num_classes=num_classes, num_groups=NUM_GROUPS)
    lagrangian = raco_dp.Lagrangian(constraints, config, planned)
    training = raco_dp.priced_training(
        network,
        x,
        y,
        torch.from_numpy(constraints.partition.cells(y.numpy(), z.numpy())),
        planned,
        config,
        num_cells=constraints.partition.num_cells,
        num_classes=num_classes,
        pricing=lagrangian,
        randomness=SeededRandomness(3),
        histogram_randomness=SeededRandomness(4),
    )
    return Done(training.run(averaged_share=averaged_share), lagrangian.report())


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_multipliers_that_stay_at_zero_are_dp_sgd_bit_for_bit(name: str) -> None:
    x, y, z = records(400)
    ours, theirs, moved = model(name), model(name), model(name)
    train(ours, (x, y, z), steps(400), dual_learning_rate=0.0)
    train(moved, (x, y, z), steps(400), dual_learning_rate=5.0)
    randomness = SeededRandomness(3)
    dp_sgd.train_dp_sgd(theirs, x, y, steps(400).gradient, randomness=randomness)
    assert torch.equal(weights(ours), weights(theirs))
    assert (weights(moved) - weights(theirs)).abs().max() > 1e-3


@pytest.mark.parametrize("constraint", NAMED_CONSTRAINTS)
@pytest.mark.parametrize(("sharpness", "counts"), [(1.0, "probabilities"), (2.5, "probabilities"), (2.5, "labels")])
def test_without_noise_and_clipping_it_is_plain_descent_ascent(constraint: str, sharpness: float, counts: str) -> None:
    """Against autograd through the rates themselves, on the whole data at every step."""
    x, y, z = records(120)
    settings: dict[str, Any] = {"constraint": constraint, "bound": 0.02, "dual_learning_rate": 2.0, "label": 1}
    settings |= {"counts": counts}
    whole = {"sampling_rate": 1.0, "expected_batch_size": 120.0, "clip_norm": 1e9, "learning_rate": 0.2}
    ours = model()
    planned = steps(120, noise=0.0, laplace_scale=0.0, **whole)
    trained = train(ours, (x, y, z), planned, sharpness=sharpness, **settings)

    theirs = model()
    parameters = list(theirs.parameters())
    multipliers: Tensor | None = None
    for _ in range(planned.gradient.num_steps):
        logits = theirs(x)
        soft = torch.softmax(sharpness * logits, dim=1)
        violations = torch.stack(violations_by_hand(constraint, soft, y, z, 0.02))
        multipliers = torch.zeros(len(violations)) if multipliers is None else multipliers
        objective = nn.functional.cross_entropy(logits, y) + (multipliers * violations).sum()
        with torch.no_grad():
            for p, slope in zip(parameters, torch.autograd.grad(objective, parameters), strict=True):
                p -= 0.2 * slope
            if counts == "labels":
                hard = nn.functional.one_hot(logits.argmax(dim=1), NUM_CLASSES).float()
                violations = torch.stack(violations_by_hand(constraint, hard, y, z, 0.02))
            multipliers = (multipliers + 2.0 * violations).clamp(min=0)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)
    assert multipliers is not None
    np.testing.assert_allclose(trained.report.multipliers, multipliers.numpy(), atol=1e-4)


def violations_by_hand(name: str, soft: Tensor, y: Tensor, z: Tensor, bound: float) -> list[Tensor]:
    """Gamma less its bound, by boolean indexing."""
    groups, classes = range(NUM_GROUPS), range(NUM_CLASSES)
    if name == "demographic_parity":
        return [soft[z == a, k].mean() - soft[z != a, k].mean() - bound for a in groups for k in classes]
    if name == "equalized_odds":
        return [
            soft[(z == a) & (y == c), k].mean() - soft[(z != a) & (y == c), k].mean() - bound
            for c in classes
            for a in groups
            for k in classes
        ]
    if name == "equal_opportunity":
        return [soft[(z == a) & (y == 1), 1].mean() - soft[(z != a) & (y == 1), 1].mean() - bound for a in groups]
    if name == "false_negative_rate":
        return [1 - soft[y == 1, 1].mean() - bound]
    if name == "false_positive_rate":
        return [soft[y != 1, 1].mean() - bound]
    return [((1 - bound) * soft[y != 1, 1].sum() - bound * soft[y == 1, 1].sum()) / len(y)]


def test_the_report_is_of_the_histograms_and_names_what_was_floored() -> None:
    """A model that does not move has one exact histogram; group 1 has fewer records than the floor."""
    x, y, z = records(200)
    z = torch.where(torch.arange(200) == 1, 1, 0)
    network = model()
    still = steps(200, noise=0.0, laplace_scale=0.0, sampling_rate=1.0, expected_batch_size=200.0, learning_rate=1e-30)
    report = train(network, (x, y, z), still, dual_learning_rate=0.0).report
    soft = torch.softmax(predict_logits(model(), x), dim=1)
    gap = soft[z == 0].mean(dim=0) - soft[1] / 2
    np.testing.assert_allclose(report.values[:3], gap.numpy(), atol=1e-5)
    assert report.floored == report.names
    assert report.bounds == (0.05,) * 6


def test_multipliers_stay_in_their_set_under_noise() -> None:
    data = records(300)
    seen: list[Any] = []
    config = RacoDpConfig(dual_learning_rate=1.0, bound=0.0)
    constraints = raco_dp.constraints_of(config, num_classes=NUM_CLASSES, num_groups=NUM_GROUPS)
    lagrangian = raco_dp.Lagrangian(constraints, config, steps(300))
    generator = np.random.default_rng(0)
    for _ in range(50):
        prices = lagrangian(generator.laplace(size=(2, 3), scale=40) + 30)
        seen.append(lagrangian.dual.multipliers_J)
        assert (seen[-1] >= 0).all()
        assert np.isfinite(prices).all()
    assert max(each.max() for each in seen) > 0.3
    assert all(value >= 0 for value in train(model(), data, steps(300), bound=0.0).report.multipliers)


@pytest.mark.parametrize("constraint", quick_and_slow(["demographic_parity", "equalized_odds"], ["equalized_odds"]))
def test_constraints_are_kept_within_a_budget(constraint: str) -> None:
    x, _, z = records(3000)
    y = (torch.rand(3000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(2 * x[:, 0] + 3 * z - 1.5)).long()
    base = DpSgdConfig(epochs=10, batch_size=300, learning_rate=0.5, clip_norm=4.0)
    target = PrivacyTarget(epsilon=3.0, accounting="rdp")

    def gap(**settings: Any) -> float:
        config = RacoDpConfig(constraint=constraint, bound=0.02, sharpness=2.0, **settings)
        planned = raco_dp.calibrated_steps(base, config, target, num_records=len(x))
        network = model(num_classes=2)
        share = raco_dp.AVERAGED_SHARE
        trained = train(network, (x, y, z), planned, averaged_share=share, **config.model_dump())
        assert priced(trained.events, target).epsilon <= 3.0
        hard = torch.eye(2)[predict_logits(network, x).argmax(dim=1)]
        constraints = raco_dp.constraints_of(config, num_classes=2, num_groups=2)
        return max(exact_values(constraints, hard.numpy(), y.numpy(), z.numpy()).values())

    plain = gap(dual_learning_rate=0.0)
    assert plain > 0.3
    assert gap(dual_learning_rate=0.3) < 0.5 * plain


@pytest.mark.parametrize(
    ("steps_of", "delta", "apart", "joint"),
    [((36631, 4096, 1000, 4.0, 2.0), 1e-4, 9.05, 9.38), ((31136, 512, 500, 1.0, 1.0), 1e-5, 2.99, 4.32)],
)
def test_one_sample_is_amplified_once_and_the_published_number_is_too_small(
    steps_of: tuple[int, int, int, float, float], delta: float, apart: float, joint: float
) -> None:
    """The numbers of the two accountings were computed elsewhere."""
    size, batch, count, noise, scale = steps_of
    planned = steps(size, noise=noise, laplace_scale=scale, num_steps=count, sampling_rate=batch / size)
    # The paper's accounting, in Renyi curves: each noise amplified by itself.
    orders = accountant.DEFAULT_ORDERS
    curves = [
        accountant.poisson_rdp(moments, sampling_rate=batch / size, orders_A=orders)
        for moments in (accountant.gaussian_log_moments(noise), accountant.laplace_log_moments(scale))
    ]
    published, _ = accountant.epsilon_of_curve(count * np.sum(curves, axis=0), orders, target_delta=delta)
    assert published == pytest.approx(apart, abs=0.006)
    assert accountant.epsilon([planned.event], target_delta=delta).epsilon == pytest.approx(joint, abs=0.006)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_split_keeps_the_budget(share: float) -> None:
    target, config = PrivacyTarget(epsilon=1.5, accounting="rdp"), RacoDpConfig(histogram_share=share)
    planned = raco_dp.calibrated_steps(DpSgdConfig(epochs=2), config, target, num_records=5000)
    assert 1.47 < priced([planned.event], target).epsilon <= 1.5
    ratio = planned.gradient.noise_multiplier**-2 / planned.laplace_scale**-2
    assert ratio == pytest.approx((1 - share) / share)
    assert planned.size_floor == pytest.approx(0.01 * 256)


def test_what_cannot_be_promised_or_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="'replace one' is not supported by raco_dp"):
        raco_dp.RacoDp(target=PrivacyTarget(relation="replace one")).check()
    with pytest.raises(ValueError, match="cannot be kept"):
        train(model(), records(100), steps(100), constraint="false_negative_rate", bound=-0.1)
    x, y, z = records(100)
    with pytest.raises(ValueError, match="groups_N to be codes from 0 to 1"):
        train(model(), (x, y, z + 1), steps(100))


ESTIMATOR: dict[str, Any] = {
    "model": ModelConfig(name="logistic"),
    "dp_sgd": {"epochs": 5, "batch_size": 60, "clip_norm": 1.0},
    "noise": "seeded",
    "target": {"accounting": "rdp"},
    "random_state": 0,
}


def test_the_estimator_takes_named_constraints_and_ones_own() -> None:
    x, y, z = (values.numpy() for values in records(600, num_classes=2))
    groups = np.array(["b", "a"])[z]
    named = FairClassifier("raco_dp", **ESTIMATOR, raco_dp={"bound": 0.1}).fit(x, y, sensitive_features=groups)
    given = FairClassifier(
        "raco_dp",
        **ESTIMATOR,
        raco_dp={"constraints": named_constraints("demographic_parity", num_groups=2, num_classes=2, bound=0.1)},
    )
    given.fit(x, y, sensitive_features=groups)
    np.testing.assert_array_equal(named.predict_proba(x), given.predict_proba(x))
    assert named.privacy_.unit == "record"
    assert named.privacy_.epsilon <= 3.0
    term = RateTerm(cells=(0,), weights=(0.0, -1.0))
    own = RateConstraints(
        partition=Partition(num_groups=2),
        constraints=(RateConstraint(name="a is accepted", terms=(term,), bound=-0.9),),
    )
    accepted = FairClassifier("raco_dp", **ESTIMATOR, raco_dp={"constraints": own, "dual_learning_rate": 3.0})
    accepted.set_params(dp_sgd__clip_norm=5.0)
    accepted.fit(x, y, sensitive_features=groups)
    share = accepted.predict(x)[groups == "a"].mean()
    assert share > 0.8
    assert named.predict(x)[groups == "a"].mean() < share
    assert accepted.trained_.report.names == ("a is accepted",)
    with pytest.raises(ValueError, match="2 groups, got constraints for 3"):
        FairClassifier(
            "raco_dp",
            **ESTIMATOR,
            raco_dp={"constraints": named_constraints("demographic_parity", num_groups=3, num_classes=2, bound=0.1)},
        ).fit(x, y, sensitive_features=groups)
    with pytest.raises(ValueError, match="give sensitive_features"):
        FairClassifier("raco_dp", **ESTIMATOR).fit(x, y)
