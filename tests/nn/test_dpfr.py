"""DPFR: its values by hand, its gradient in closed form, and what it leaves out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairpate.config import DpfrConfig, ModelConfig
from fairpate.nn.fit import contrast, dpfr, dpfr_gradient, group_batches, hard_disparity
from fairpate.nn.models import build_model

pytestmark = pytest.mark.usefixtures("light_runs")

LOGITS = torch.tensor([[2.0, 0], [0, 1], [1, 0], [0, 3], [0.5, 0], [0, 0.2]], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
VARIANTS = [
    DpfrConfig(temperature=temperature, maximum=maximum)
    for temperature in (1.0, 0.1)
    for maximum in ("hardmax", "softmax")
]


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (DpfrConfig(temperature=1.0), 0.2535820),
        (DpfrConfig(temperature=0.1), 0.2958300),
        (DpfrConfig(temperature=0.01), 1 / 3),
        (DpfrConfig(temperature=1.0, maximum="softmax", max_temperature=0.1), 0.2504208),
    ],
)
def test_values_of_six_records(config: DpfrConfig, value: float) -> None:
    assert dpfr(LOGITS, GROUPS, config).item() == pytest.approx(value, abs=5e-8)


def closed_form(logits: Tensor, groups: Tensor, config: DpfrConfig) -> Tensor:
    """dDPFR/du by the formula of the specification, record by record and cell by cell."""
    rows, classes = logits.tolist(), range(logits.shape[1])
    total = len(rows)
    s = []
    for row in rows:
        top = max(row)
        powers = [math.exp((u - top) / config.temperature) for u in row]
        s.append([power / sum(powers) for power in powers])
    members = {z: [i for i in range(total) if groups[i] == z] for z in sorted(set(groups.tolist()))}
    c = {z: [1 / len(own) if i in own else -1 / (total - len(own)) for i in range(total)] for z, own in members.items()}
    gap = {(z, k): sum(c[z][i] * s[i][k] for i in range(total)) for z in members for k in classes}
    if config.maximum == "hardmax":
        first = max(gap, key=gap.__getitem__)
        weight = {cell: float(cell == first) for cell in gap}
    else:
        powers = {cell: math.exp(value / config.max_temperature) for cell, value in gap.items()}
        share = {cell: power / sum(powers.values()) for cell, power in powers.items()}
        mean = sum(share[cell] * gap[cell] for cell in gap)
        weight = {cell: share[cell] * (1 + (gap[cell] - mean) / config.max_temperature) for cell in gap}
    gradient = [
        [
            sum(weight[z, k] * c[z][i] * s[i][k] * ((j == k) - s[i][j]) for z, k in gap) / config.temperature
            for j in classes
        ]
        for i in range(total)
    ]
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("config", VARIANTS)
def test_the_gradient_is_the_closed_form(config: DpfrConfig) -> None:
    generator = torch.Generator().manual_seed(4)
    many = torch.randn(17, 4, generator=generator, dtype=torch.float64)
    for logits, groups in ((LOGITS, GROUPS), (many, torch.arange(17) % 3)):
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(dpfr(leaf, groups, config), leaf)
        torch.testing.assert_close(gradient, closed_form(logits, groups, config), atol=1e-10, rtol=1e-8)
        quick = dpfr_gradient(logits, contrast(groups, torch.float64), config)
        torch.testing.assert_close(quick, gradient, atol=1e-10, rtol=1e-8)


@given(
    logits=st.lists(st.lists(st.floats(-4, 4), min_size=3, max_size=3), min_size=4, max_size=9),
    shift=st.integers(0, 2),
)
@settings(max_examples=60)
def test_the_largest_gap_is_never_negative_nor_below_the_soft_one(logits: list[list[float]], shift: int) -> None:
    values = torch.tensor(logits, dtype=torch.float64)
    groups = (torch.arange(len(logits)) + shift) % 3
    hard = dpfr(values, groups, DpfrConfig(temperature=1.0)).item()
    soft = dpfr(values, groups, DpfrConfig(temperature=1.0, maximum="softmax")).item()
    assert hard >= -1e-12
    assert soft <= hard + 1e-12


def test_with_two_groups_and_two_classes_all_gaps_are_one_number() -> None:
    gaps_GC = contrast(GROUPS, LOGITS.dtype) @ LOGITS.softmax(dim=1)
    torch.testing.assert_close(gaps_GC.abs(), gaps_GC.abs().max().expand(2, 2))


def test_a_group_that_is_absent_changes_nothing_and_one_alone_compares_with_nobody() -> None:
    config = DpfrConfig(temperature=1.0)
    assert dpfr(LOGITS, GROUPS * 7 + 1, config) == dpfr(LOGITS, GROUPS, config)
    leaf = LOGITS.clone().requires_grad_()
    value = dpfr(leaf, torch.zeros_like(GROUPS), config)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert value == 0
    assert not gradient.any()


def test_the_first_of_equal_gaps_gets_all_of_the_gradient() -> None:
    """Groups 0 and 1 are alike and unlike group 2: the maximum is attained twice."""
    leaf = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    gaps = (contrast(torch.arange(3), leaf.dtype) @ leaf.softmax(dim=1)).flatten().tolist()
    assert gaps.index(max(gaps)) == 5  # predicted 1 in group 2
    # All probabilities are exactly 1/2, so all four gaps are exactly 0 by any exponential function.
    leaf = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    config = DpfrConfig(temperature=1.0)
    (gradient,) = torch.autograd.grad(dpfr(leaf, torch.tensor([0, 0, 1, 1]), config), leaf)
    torch.testing.assert_close(
        gradient, closed_form(leaf.detach(), torch.tensor([0, 0, 1, 1]), config), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("config", VARIANTS)
def test_records_that_are_all_alike_leave_the_parameters_where_they_are(config: DpfrConfig) -> None:
    model = build_model(ModelConfig(name="logistic"), input_shape=(4,), num_classes=3, generator_seed=0).double()
    x = torch.ones(8, 4, dtype=torch.float64)
    gradients = torch.autograd.grad(dpfr(model(x), torch.arange(8) % 2, config), list(model.parameters()))
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-12, rtol=0)


def test_the_disparity_of_labels_is_counted() -> None:
    """Labels 0 1 0 in one group and 1 0 1 in the other: rates of label 0 are 2/3 and 1/3."""
    assert hard_disparity(LOGITS, GROUPS) == pytest.approx(1 / 3)


def test_public_batches_hold_every_group_in_its_proportion_and_pass_over_the_pool() -> None:
    groups = torch.tensor([0] * 60 + [1] * 30 + [2] * 3)
    drawn = group_batches(groups, 31, torch.Generator().manual_seed(0))
    batches = [next(drawn) for _ in range(6)]
    assert all(torch.bincount(groups[rows]).tolist() == [20, 10, 1] for rows in batches)
    assert sorted(torch.cat(batches[:3]).tolist()) == sorted(torch.cat(batches[3:]).tolist()) == list(range(93))
    whole = group_batches(groups, 500, torch.Generator().manual_seed(0))
    assert sorted(next(whole).tolist()) == list(range(93))


def test_batches_of_one_group_are_refused() -> None:
    with pytest.raises(ValueError, match="two groups or more"):
        next(group_batches(torch.zeros(5, dtype=torch.int64), 2, torch.Generator()))
