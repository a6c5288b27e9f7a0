"""A table by group: what one record moves, what it costs, what students see of it, and what it tells of groups."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow

from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, load_data
from fairpate.fairness import rates
from fairpate.fairness.rates import TAUGHT_NOISE
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory, read_json, read_release, read_statement
from fairpate.report.population import PrivatePopulation
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.student import load_student

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("own_state"),
]

METHODS = ("record_votes", "weighted_votes")
TABLES = {"record_votes": "votes_GKC", "weighted_votes": "sums_GCW"}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    """Of two classes, so that no rate is of a handful of records."""
    found = load_data(DataConfig(options={"colour_as_feature": False}))
    halves = {
        name: dataclasses.replace(part := getattr(found, name), y=(part.y >= 5).long())
        for name in ("private", "public", "validation", "test")
    }
    return dataclasses.replace(found, **halves, label_names=("low", "high"))


def settings(out: Path, method: str, *overrides: str, by_group: bool = True) -> Any:
    values = {
        "noise": "seeded",
        "target": {"epsilon": 2.0, "accounting": "rdp"},
        "student": {"model": {"name": "logistic"}, "fit": {"epochs": 5}},
        "record_votes": {"num_prototypes": 20, "by_group": by_group},
        "weighted_votes": {"by_group": by_group, "embedding": {"graph_share": 0.0}},
    }
    return configured(values, [f"out={out}", *overrides], method=method)


def run(config: Any, dataset: Dataset, *, of: Path | None = None) -> RunDirectory:
    return run_method(config, Reporter(quiet=True), dataset, release_of=of)


def table_of(done: RunDirectory, method: str) -> np.ndarray:
    return read_release(done.released)[0].arrays[TABLES[method]]


def population_of(done: RunDirectory) -> PrivatePopulation:
    return PrivatePopulation.from_json(read_json(done.private_population))


@pytest.mark.parametrize("method", ["record_votes", pytest.param("weighted_votes", marks=pytest.mark.slow)])
def test_one_record_moves_one_row_of_its_group_and_the_price_is_the_same(
    method: str, digits: Dataset, tmp_path: Path
) -> None:
    """The noise is equal in all runs, so that tables differ by what the record did."""
    private = digits.private
    fewer = dataclasses.replace(digits, private=private.take(range(1, len(private))))
    other = private.z.clone()
    other[0] = 1 - other[0]
    moved = dataclasses.replace(digits, private=dataclasses.replace(private, z=other))
    runs = {
        name: run(settings(tmp_path / name, method), data) for name, data in (("a", digits), ("b", fewer), ("c", moved))
    }
    tables = {name: table_of(done, method) for name, done in runs.items()}
    one, label = int(private.z[0]), int(private.y[0])
    added, exchanged = tables["a"] - tables["b"], tables["a"] - tables["c"]
    rows = added.swapaxes(1, 2) if method == "record_votes" else added
    assert {tuple(place) for place in np.argwhere(rows)[:, :2].tolist()} == {(one, label)}
    np.testing.assert_array_equal(exchanged[one], added[one])
    np.testing.assert_array_equal(exchanged[1 - one], -added[one])
    alone = run(settings(tmp_path / "d", method, by_group=False), digits)
    told = [read_statement(done) for done in (*runs.values(), alone)]
    assert all(statement.events == told[0].events for statement in told)
    assert np.square(added).sum() <= told[0].events[0].get("norm", 1) ** 2
    assert not alone.private_population.exists()


@pytest.mark.parametrize("method", quick_and_slow(METHODS, ("weighted_votes",)))
def test_what_a_release_tells_needs_no_private_record_and_belongs_to_its_student(
    method: str, digits: Dataset, tmp_path: Path
) -> None:
    first = run(settings(tmp_path / "first", method), digits)
    private = digits.private
    ruined = dataclasses.replace(private, **{name: torch.zeros_like(getattr(private, name)) for name in "xyz"})
    blind = dataclasses.replace(digits, private=ruined)
    gate = "student.idp3={max_disparity: 0.01, min_count: 20}"
    same, gated = (
        run(settings(tmp_path / str(number), method, *overrides), blind, of=first.root)
        for number, overrides in enumerate(((), (gate,)))
    )
    assert same.private_population.read_bytes() == first.private_population.read_bytes()
    found, refused = population_of(first), population_of(gated)
    assert refused.gaps != found.gaps
    assert all(group.coverage.value == pytest.approx(1) for group in found.groups)
    assert all(group.coverage.value < 0.99 for group in refused.groups)
    public = load_student(gated.student).predict(digits.public.x, digits.public.z.numpy()).answered
    assert np.mean([group.coverage.value for group in refused.groups]) == pytest.approx(public.mean(), abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["record_votes", "weighted_votes"])
def test_intervals_hold_the_true_rates_of_private_records(method: str, digits: Dataset, tmp_path: Path) -> None:
    """Over noises and students: of all rates and gaps, in sum, about as many as is said."""
    held = []
    for seed in range(4):
        done = run(settings(tmp_path / str(seed), method, f"seed={seed}", "target.epsilon=5"), digits)
        private, found = digits.private, population_of(done)
        said = load_student(done.student).predict(private.x, private.z.numpy()).labels
        truth = rates.joint_table(said, private.z.numpy(), num_groups=2, num_classes=2, labels_N=private.y.numpy())
        right_G, size_G = rates.accuracies(truth)[1], truth.sum(axis=(1, 2))
        pairs = [
            *((group.accuracy, right) for group, right in zip(found.groups, right_G, strict=True)),
            *((group.records, size) for group, size in zip(found.groups, size_G, strict=True)),
            (found.gaps["dp_one_vs_rest"], rates.dp_one_vs_rest(truth).value),
            (found.gaps["eo_lowy"], rates.eo_lowy(truth).value),
        ]
        held += [estimate.low <= true <= estimate.high for estimate, true in pairs]
    assert np.mean(held) > 0.8


def test_students_see_the_sum_over_groups_with_the_noise_of_all(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", "weighted_votes")
    table_G = np.zeros((3, 200, 50), dtype=np.int64)
    seen, stddev, _ = config.thinned(table_G, stddev=100.0)
    assert stddev == pytest.approx(math.sqrt(3) * TAUGHT_NOISE * 100)
    released = TAUGHT_NOISE**2 - 1  # what thinning adds to noise that this table lacks
    assert seen.std() == pytest.approx(math.sqrt(3 * released) * 100, rel=0.05)
    again, *_ = config.thinned(table_G, stddev=100.0)
    np.testing.assert_array_equal(seen, again)


@pytest.mark.parametrize("method", METHODS)
def test_groups_of_persons_are_refused(method: str, digits: Dataset, tmp_path: Path) -> None:
    """A person's votes are shortened, so that their sums count no records."""
    private = dataclasses.replace(
        digits.private, person_id=tuple(f"person {n // 2}" for n in range(len(digits.private)))
    )
    of_persons = dataclasses.replace(digits, private=private)
    with pytest.raises(ConfigError, match=f"{method}.by_group: counts private records by group"):
        run(settings(tmp_path / "run", method), of_persons)


def test_pages_say_what_was_found(digits: Dataset, tmp_path: Path) -> None:
    done = run(settings(tmp_path / "run", "weighted_votes"), digits)
    page, plain = write_card(done.root)
    found = population_of(done)
    gap = found.gaps["dp_one_vs_rest"]
    words = f"the demographic-parity gap is {gap.value:.3f} ({gap.low:.3f} to {gap.high:.3f})"
    for text in (page.read_text(), done.public_report.read_text()):
        assert words in text
        assert "Equal opportunity" in text
    card = json.loads(plain.read_text())["private_population"]
    assert card["gaps"]["dp_one_vs_rest"]["value"] == gap.value
    assert set(found.gaps) == {
        *("dp_one_vs_rest", "dp_pairwise", "dp_to_overall", "eo_full", "eo_lowy", "accuracy_parity"),
        *("equal_opportunity", "false_negative_rate", "false_positive_rate", "false_discovery_rate", "impact_ratio"),
    }
    bare = run(settings(tmp_path / "bare", "weighted_votes", by_group=False), digits)
    assert "private population" not in bare.public_report.read_text()


def test_a_population_is_read_back_as_it_was_written(digits: Dataset, tmp_path: Path) -> None:
    done = run(settings(tmp_path / "run", "record_votes", "target.epsilon=0.02"), digits)
    found = population_of(done)
    assert json.loads(json.dumps(found.to_json())) == read_json(done.private_population)
    assert any(math.isnan(gap.value) for gap in found.gaps.values()), "noise of 130 on 20 cells drowns a few records"
    assert "undefined" in done.public_report.read_text()
