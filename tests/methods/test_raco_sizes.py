"""Sizes of cells released beside RaCO-DP's histogram: what they cost, what the histogram gains, and by how much."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from priced import priced

from fairpate.config import ModelConfig, PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.methods import raco_dp
from fairpate.methods.base import config_digest, configured, determining_values
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.raco_dp import HistogramSteps, RacoDpConfig, priced_training, refined
from fairpate.nn.models import build_model
from fairpate.nn.private_fit import PrivateSteps, SeededRandomness
from fairpate.privacy import accountant
from fairpate.privacy.accountant import PoissonGaussians

pytestmark = pytest.mark.usefixtures("light_runs")

CELLS, CLASSES, RECORDS = 2, 3, 30


def planned(*, noise: float, scale: float, size_noise: float | None, rate: float = 0.1, count: int = 50) -> Any:
    gradient = PrivateSteps(
        num_steps=count,
        sampling_rate=rate,
        expected_batch_size=rate * RECORDS,
        clip_norm=1.0,
        noise_multiplier=noise,
        learning_rate=0.1,
    )
    return HistogramSteps(gradient=gradient, laplace_scale=scale, size_floor=1.0, size_noise=size_noise)


def moment(order: int, rate: float, *, noise: float, scale: float, size_noise: float) -> float:
    """E[(1 - r + r L)^a] for L the product of three likelihood ratios: by binomials, each moment by itself."""

    def of_product(j: int) -> float:
        gaussians = math.exp((j * j - j) / (2 * noise**2)) * math.exp((j * j - j) / (2 * size_noise**2))
        # Of Laplace densities a shift of 1 apart: beyond both ends, and between them.
        return gaussians * (j * math.exp((j - 1) / scale) + (j - 1) * math.exp(-j / scale)) / (2 * j - 1)

    terms = (math.comb(order, j) * rate**j * (1 - rate) ** (order - j) * of_product(j) for j in range(order + 1))
    return math.fsum(terms)


@pytest.mark.parametrize("order", [2, 3, 8, 20])
@pytest.mark.parametrize(("noise", "scale", "size_noise"), [(2.0, 4.0, 3.0), (1.0, 1.5, 8.0), (5.0, 3.0, 1.2)])
def test_three_releases_of_one_sample_cost_the_moment_of_their_product(
    order: int, noise: float, scale: float, size_noise: float
) -> None:
    event = planned(noise=noise, scale=scale, size_noise=size_noise).event
    (curve,) = accountant.event_rdp(event, np.array([float(order)]))
    expected = math.log(moment(order, 0.1, noise=noise, scale=scale, size_noise=size_noise)) / (order - 1)
    assert curve == pytest.approx(50 * expected, rel=1e-6)


def test_on_one_sample_sizes_cost_more_than_on_a_sample_of_their_own() -> None:
    """So a price that amplifies each release by itself would be too cheap."""
    with_sizes, without = (planned(noise=2.0, scale=4.0, size_noise=size).event for size in (3.0, None))
    apart = PoissonGaussians(count=50, noise_multiplier=3.0, sampling_rate=0.1)
    without_any, by_itself, together = (
        accountant.epsilon(events, target_delta=1e-5).epsilon for events in ([without], [without, apart], [with_sizes])
    )
    assert without_any < 0.9 * by_itself
    assert by_itself < 0.99 * together
    assert planned(noise=2.0, scale=4.0, size_noise=0.0).event.gradient_noise_multiplier == 0, "no noise, no guarantee"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_the_split_keeps_the_budget_and_the_histogram_its_part(share: float) -> None:
    target = PrivacyTarget(epsilon=1.5, accounting="rdp")
    config = RacoDpConfig(histogram_share=0.3, size_share=share)
    steps = raco_dp.calibrated_steps(DpSgdConfig(epochs=2), config, target, num_records=5000)
    assert 1.47 < priced([steps.event], target).epsilon <= 1.5
    precisions = [steps.gradient.noise_multiplier**-2, steps.laplace_scale**-2, (steps.size_noise or math.inf) ** -2]
    assert [each / sum(precisions) for each in precisions] == pytest.approx([0.7 * (1 - share), 0.3, 0.7 * share])
    assert (steps.size_noise is None) == (share == 0)


OWN = {"constraints": [{"name": "own", "terms": [{"cells": [0], "weights": [0.0, 1.0]}], "bound": 0.1}]}


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.0),
        *(({"constraint": name}, 0.3) for name in ("equalized_odds", "equal_opportunity")),
        *(({"constraint": f"false_{name}_rate"}, 0.0) for name in ("negative", "positive", "discovery")),
        ({"constraint": "equalized_odds", "size_share": 0.0}, 0.0),
        ({"constraints": OWN | {"partition": {"num_labels": 2, "num_groups": 2}}}, 0.3),
        ({"constraints": OWN | {"partition": {"num_groups": 2}}}, 0.0),
    ],
)
def test_cells_of_a_label_and_a_group_have_their_sizes_released_unless_said(settings: Any, share: float) -> None:
    left_out = configured({"raco_dp": settings}, method="raco_dp")
    stated = configured({"raco_dp": settings | {"size_share": share}}, method="raco_dp")
    steps = raco_dp.plan_steps(
        DpSgdConfig(epochs=2), left_out.raco_dp, num_records=5000, noise_multiplier=1.0, laplace_scale=1.0
    )
    assert (steps.size_noise or math.inf) ** -2 == pytest.approx(share)
    assert config_digest(left_out) == config_digest(stated), "a digest is of what is computed"
    assert determining_values(left_out)["raco_dp"]["size_share"] == share


def test_what_a_row_lacks_is_spread_over_it_by_hand() -> None:
    """Variances 2 an entry and 4 of the size: of two lacking records each entry has 2 / (2 2 + 4) of them, 1/2."""
    found = refined(np.array([[3.0, 1.0]]), np.array([6.0]), laplace_scale=1.0, size_noise=2.0)
    assert found.tolist() == [[3.5, 1.5]]


@pytest.mark.parametrize(("scale", "size_noise"), [(1.0, 0.3), (0.5, 5.0), (2.0, 0.0), (0.0, 1.0)])
def test_it_is_the_weighted_least_squares_of_both_releases(scale: float, size_noise: float) -> None:
    draws = np.random.default_rng(0)
    row, size = draws.normal(size=3), draws.normal()
    found = refined(row[None], np.array([size]), laplace_scale=scale, size_noise=size_noise)[0]
    weights = 1 / np.array([*[max(math.sqrt(2) * scale, 1e-7)] * 3, max(size_noise, 1e-7)])
    rows = np.vstack([np.eye(3), np.ones(3)]) * weights[:, None]
    expected = np.linalg.lstsq(rows, np.append(row, size) * weights, rcond=None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@cache
def released(scale: float, size_noise: float | None, *, count: int, drop: int = 0) -> np.ndarray[Any, Any]:
    """The histograms (steps, Q, C) of a model that does not move, on all records at every step."""
    size = RECORDS - drop
    x = torch.linspace(-1, 1, RECORDS)[:size, None].repeat(1, 3)
    seen: list[Any] = []

    def pricing(histogram: Any) -> Any:
        seen.append(histogram.copy())
        return np.zeros_like(histogram)

    steps = planned(noise=0.0, scale=scale, size_noise=size_noise, rate=1.0)
    training = priced_training(
        build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=CLASSES, generator_seed=0),
        x,
        torch.zeros(size, dtype=torch.long),
        (torch.arange(size) >= 10).long(),
        replace(steps, gradient=replace(steps.gradient, learning_rate=1e-12)),
        RacoDpConfig(),
        num_cells=CELLS,
        num_classes=CLASSES,
        pricing=pricing,
        randomness=SeededRandomness(1),
        histogram_randomness=SeededRandomness(2),
    )
    for _ in range(count):
        training.step()
    return np.array(seen)


@pytest.mark.parametrize("factor", [2 / 3, 1.0, 3 / 2])
def test_sizes_have_the_noise_of_both_releases_together(factor: float) -> None:
    """Row sums: variance K v s / (K v + s) for v = 2 b^2 = 2 of each of K = 3 entries and s = 4; no other s fits."""
    found = released(1.0, 2.0, count=700)
    errors = found.sum(axis=2) - [10, 20]
    assert abs(errors.mean()) < 0.12
    expected = 6 * 4 * factor**2 / (6 + 4 * factor**2)
    assert (abs(errors.var() / expected - 1) < 0.08) == (factor == 1.0)
    alone = released(1.0, None, count=700)
    assert errors.var() < 0.5 * (alone.sum(axis=2) - [10, 20]).var()
    assert found.var(axis=0).mean() < 0.85 * alone.var(axis=0).mean(), "entries gain too"


def test_a_record_less_moves_the_sizes_of_its_cell_alone_by_one() -> None:
    """Noise from one seed is the same twice, so that the difference is the records' alone."""
    whole, less = (released(1.0, 0.5, count=3, drop=drop) for drop in (0, 1))
    moved = (whole - less).sum(axis=2)
    np.testing.assert_allclose(moved, [[0, 1]] * 3, atol=1e-4)


def test_without_sizes_nothing_is_drawn_for_them() -> None:
    np.testing.assert_array_equal(released(1.0, None, count=2), released(1.0, None, count=2))
    # Noise that is none costs infinity.
    assert planned(noise=1.0, scale=1.0, size_noise=-1.0).event.gradient_noise_multiplier == 0


def test_the_estimator_keeps_its_budget_with_sizes() -> None:
    draws = np.random.default_rng(0)
    features, groups = draws.normal(size=(400, 3)), np.arange(400) % 2
    settings: dict[str, Any] = {"target": {"accounting": "rdp"}, "raco_dp": {"size_share": 0.3}}
    fitted = FairClassifier("raco_dp", epsilon=2.0, **settings, noise="seeded", random_state=0).fit(
        features, (features[:, 0] > 0).astype(int), sensitive_features=groups
    )
    assert 1.9 < fitted.privacy_.epsilon <= 2.0
