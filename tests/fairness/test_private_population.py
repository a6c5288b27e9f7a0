"""Rates of private records by group from noisy sums: hand arithmetic, thinning, and how often intervals hold."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest

from fairpate.fairness import rates as gaps
from fairpate.fairness.rates import (
    KEPT_NOISE,
    TAUGHT_NOISE,
    LabelledRecords,
    Population,
    PopulationEstimate,
    TableByGroup,
    estimated_gap,
    estimated_population,
    estimated_rates,
    thinned,
)
from fairpate.types import FloatArray

CELLS, GROUPS = 12, 2
SHARE_GK = np.random.default_rng(0).dirichlet(np.ones(CELLS), GROUPS)
LABEL_GK = np.random.default_rng(1).uniform(0.1, 0.9, (GROUPS, CELLS))
"""How likely a record of a group and cell has label 1, and is predicted 1."""
PREDICTED_GK = np.random.default_rng(2).uniform(0, 1, (GROUPS, CELLS))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def records(seed: int, size: int) -> tuple[np.ndarray, ...]:
    """Group, cell, label and prediction; a prediction follows group and cell alone, so that the assumption holds."""
    draws = generator(seed)
    group = draws.integers(0, GROUPS, size)
    cell = (draws.random(size)[:, None] > SHARE_GK.cumsum(axis=1)[group, :-1]).sum(axis=1)
    label, predicted = (draws.random(size) < chance[group, cell] for chance in (LABEL_GK, PREDICTED_GK))
    return group, cell, label.astype(int), predicted.astype(int)


def counted(group: np.ndarray, label: np.ndarray, cell: np.ndarray, *, width: int) -> FloatArray:
    table = np.zeros((GROUPS, 2, width))
    np.add.at(table, (group, label, cell), 1)
    return table


def in_cells(table: FloatArray, stddev: float) -> TableByGroup:
    return TableByGroup(sums_GYW=table, stddev=stddev, one_W=np.ones(table.shape[2]))


def public_of(group: np.ndarray, cell: np.ndarray, predicted: np.ndarray, *, width: int = CELLS) -> LabelledRecords:
    return LabelledRecords(
        votes_MW=np.eye(width)[cell],
        groups_M=group,
        likely_MY=np.full((len(group), 2), 0.5),
        outcome_MJ=np.eye(2)[predicted],
    )


def test_a_count_is_spread_as_public_records_of_its_cell_and_group_are_predicted() -> None:
    """Two cells. A fit is drawn to the one before by one record, and a record weighs how likely it has the label."""
    group, cell, predicted = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1]), np.array([1, 0, 1, 0, 0])
    likely = np.array([0.8, 0.4, 0.5, 1.0, 0.5])
    public = replace(public_of(group, cell, predicted, width=2), likely_MY=np.stack([likely, likely], axis=1))
    table = np.arange(1.0, 9.0).reshape(2, 2, 2)
    found = estimated_population(in_cells(table, 0.0), public, generator=generator()).joint_GYJ
    average = (0.8 + 0.5) / 3.2
    over_all = ((0.8 + 0.5 + average) / (1.7 + 1), (0 + average) / (1.5 + 1))
    group_0 = ((0.8 + over_all[0]) / (1.2 + 1), over_all[1])  # it has no record in cell 1
    group_1 = ((0.5 + over_all[0]) / (0.5 + 1), (0 + over_all[1]) / (1.5 + 1))
    for z, shares in enumerate((group_0, group_1)):
        for y in (0, 1):
            assert found[z, y, 1] == pytest.approx(table[z, y] @ shares)
            assert found[z, y].sum() == pytest.approx(table[z, y].sum())


def test_vectors_that_say_the_prediction_give_its_rates_exactly() -> None:
    """Where a prediction is linear in the vote there is nothing to assume, whatever the weights."""
    draws = generator()
    votes, group, label = draws.normal(size=(4000, 3)), draws.integers(0, 2, 4000), draws.integers(0, 2, 4000)
    predicted = (votes[:, 0] > 0).astype(int)
    votes = np.column_stack([np.ones(4000), votes, predicted])
    table = np.stack([[votes[(group == z) & (label == y)].sum(axis=0) for y in (0, 1)] for z in (0, 1)])
    public = LabelledRecords(
        votes_MW=votes[::2],
        groups_M=group[::2],
        likely_MY=draws.random((2000, 2)),
        outcome_MJ=np.eye(2)[predicted[::2]],
    )
    named = TableByGroup(sums_GYW=table, stddev=0.0, one_W=np.eye(5)[0])
    found = estimated_population(named, public, generator=generator()).joint_GYJ
    truth = counted(group, label, predicted, width=2)
    np.testing.assert_allclose(found, truth, rtol=0.01)


@cache
def simulated(seed: int, *, claimed: float = 1.0, stddev: float = 45.0) -> list[tuple[float, PopulationEstimate]]:
    """True and estimated rates and gaps, where noise of ``stddev`` is said to be ``claimed`` times as wide."""
    group, cell, label, predicted = records(2 * seed, 6000)
    noise = generator(2 * seed + 7).normal(scale=stddev, size=(GROUPS, 2, CELLS))
    table = in_cells(counted(group, label, cell, width=CELLS) + noise, claimed * stddev)
    seen_group, seen_cell, _, seen = records(2 * seed + 1, 3000)
    found = estimated_population(
        table, public_of(seen_group, seen_cell, seen), generator=generator(seed), num_draws=300
    )
    truth = np.zeros((GROUPS, 2, 2))
    np.add.at(truth, (group, label, predicted), 1)
    drawn = found.joint_GYJ, found.draws_RGYJ
    told: list[tuple[float, PopulationEstimate]] = []
    for events in (gaps.correct, gaps.predicted, gaps.found_or_mistaken):
        exact = events(truth)
        rates = exact.hits_EG / exact.sizes_EG
        told += zip(rates.ravel().tolist(), chain(*estimated_rates(events, *drawn)), strict=True)
    metrics = (gaps.dp_one_vs_rest, gaps.eo_lowy, gaps.accuracy_parity, gaps.found_apart)
    return told + [(metric(truth).value, estimated_gap(metric, *drawn)) for metric in metrics]


@pytest.mark.parametrize(
    ("claimed", "fits"), [(1.0, True), (2 / 3, False), pytest.param(3 / 2, False, marks=pytest.mark.slow)]
)
def test_intervals_hold_as_often_as_they_say_and_only_for_the_noise_that_was_added(claimed: float, fits: bool) -> None:
    runs = [simulated(seed, claimed=claimed) for seed in range(60)]
    held = np.array([[found.low <= true <= found.high for true, found in run] for run in runs])
    of_rates, of_gaps = held[:, :-4], held[:, -4:]
    assert (0.93 < of_rates.mean() < 0.97) == fits
    if fits:
        assert (of_rates.mean(axis=0) > 0.88).all()
        assert (of_gaps.mean(axis=0) > 0.9).all()


def test_estimates_are_right_on_average() -> None:
    runs = [simulated(seed, claimed=1.0) for seed in range(60)]
    errors = np.array([[found.value - true for true, found in run[:-4]] for run in runs])
    assert (np.abs(errors.mean(axis=0)) < 4 * errors.std(axis=0) / math.sqrt(len(runs)) + 0.003).all()


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_a_thinned_table_is_two_of_independent_noise(factor: float, fits: bool) -> None:
    stddev, size = 20.0, 40_000
    noise = np.rint(generator(1).normal(scale=factor * stddev, size=size)).astype(np.int64)
    taught, kept = thinned(1000 + noise, stddev=stddev, generator=generator(2))
    correlation = np.corrcoef(taught, kept)[0, 1]
    assert (abs(correlation) < 4 / math.sqrt(size)) == fits
    if fits:
        assert taught.std() == pytest.approx(TAUGHT_NOISE * stddev, rel=0.02)
        assert kept.std() == pytest.approx(KEPT_NOISE * stddev, rel=0.02)
        assert taught.mean() == pytest.approx(1000, abs=1)
        assert kept.mean() == pytest.approx(1000, abs=1)
    again = thinned(1000 + noise, stddev=stddev, generator=generator(2))
    np.testing.assert_array_equal(again[0], taught)


def test_what_learned_from_the_noise_that_is_used_looks_better_than_it_is() -> None:
    """Labels that say nothing: a student of the table's own majority seems right unless the table was thinned."""
    group, cell = np.arange(4000) % 2, np.arange(4000) // 2 % 40
    label = generator(3).integers(0, 2, 4000)
    stddev = 20.0
    own, apart = [], []
    for seed in range(8):
        table = counted(group, label, cell, width=40) + np.rint(generator(seed).normal(scale=stddev, size=(2, 2, 40)))
        taught, kept = thinned(table.astype(np.int64), stddev=stddev, generator=generator(seed + 100))
        for learned, used, noise, accuracies in ((table, table, 1.0, own), (taught, kept, KEPT_NOISE, apart)):
            says = (learned.sum(axis=0)[1] > learned.sum(axis=0)[0]).astype(int)
            public = public_of(group, cell, says[cell], width=40)
            found = estimated_population(in_cells(used, noise * stddev), public, generator=generator(), num_draws=2)
            accuracies.append(np.trace(found.joint_GYJ.sum(axis=0)) / found.joint_GYJ.sum())
    assert np.mean(own) > 0.56
    assert np.mean(apart) == pytest.approx(0.5, abs=0.04)


def test_what_cannot_be_told_is_undefined_and_counted() -> None:
    group, cell, label, _ = records(0, 3000)
    table = counted(group, label, cell, width=CELLS)
    alone = np.zeros(500, dtype=int)
    public = public_of(alone, generator().integers(0, CELLS, 500), np.arange(500) % 2)
    found = estimated_population(in_cells(table, 1.0), public, generator=generator(), num_draws=50)
    assert np.isnan(found.joint_GYJ[1]).all()
    drawn = found.joint_GYJ, found.draws_RGYJ
    gap = estimated_gap(gaps.dp_one_vs_rest, *drawn)
    assert math.isnan(gap.value)
    assert math.isnan(gap.low)
    assert gap.where is None
    assert gap.n_undefined == 2
    ((first, second),) = estimated_rates(gaps.correct, *drawn)
    assert 0 < first.low < first.high < 1
    assert math.isnan(second.value)
    drowned = estimated_population(
        in_cells(table, 1000.0), public_of(*records(1, 900)[:2], np.arange(900) % 2), generator=generator()
    )
    assert estimated_gap(gaps.accuracy_parity, drowned.joint_GYJ, drowned.draws_RGYJ).n_undefined == 2


def test_the_interval_of_a_largest_gap_is_the_largest_of_simultaneous_ones() -> None:
    """Two groups, one rate: the difference is normal, so that 1.96 deviations of it are covered."""
    joint = np.zeros((2, 1, 2))
    joint[:, 0] = [[5000, 5000], [6000, 4000]]
    draws = np.repeat(joint[None], 200_000, axis=0)
    moved = generator().normal(scale=100, size=(len(draws), 2))
    draws[:, :, 0, 0] += moved
    draws[:, :, 0, 1] -= moved
    tables = Population(joint_GYJ=joint, draws_RGYJ=draws)
    gap = partial(estimated_gap, gaps.dp_one_vs_rest, tables.joint_GYJ, tables.draws_RGYJ)
    spread = math.sqrt(2) * 100 / 10_000
    assert gap().value == pytest.approx(0.1)
    for level, deviations in ((0.95, 1.96), (0.8, 1.2816)):
        found = gap(level=level)
        assert found.low == pytest.approx(0.1 - deviations * spread, rel=0.01)
        assert found.high == pytest.approx(0.1 + deviations * spread, rel=0.01)
