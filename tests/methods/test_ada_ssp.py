"""AdaSSP: what neighbours can move, by brute force; the ridge and the rule against hand-made ones; the price."""

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow

from fairpate.config import ConfigError, DataConfig
from fairpate.data import Dataset, load_data
from fairpate.methods.base import Training, configured
from fairpate.methods.record_votes import UNITS, WeightedBallot
from fairpate.methods.residual_votes import (
    EIGENVALUE_NORM,
    AdaSsp,
    RecordSums,
    indicators,
    labels_of_scores,
    least_eigenvalue,
    least_squares_events,
    votes_themselves,
)
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import event_json
from fairpate.privacy.second_accountant import recomputed_epsilon
from fairpate.releases.directory import ReleasedArrays, RunDirectory
from fairpate.terminal import Reporter
from teachers.work import BlockPool

pytestmark = pytest.mark.usefixtures("light_runs")

EDGE = math.isqrt(UNITS**2 // 2)
VECTORS = [(UNITS, 0), (0, -UNITS), (EDGE, EDGE), (EDGE, -EDGE), (UNITS // 3, 1), (0, 0)]
RECORDS = list(itertools.product(VECTORS, (0, 1)))
NORMS = (UNITS, UNITS**2, EIGENVALUE_NORM)


def exact(records: tuple, persons: tuple[int, ...] | None = None) -> list[np.ndarray]:
    """The three exact values that noise is added to, of a list of (votes, label)."""
    phi = np.array([vote for vote, _ in records], dtype=np.int16).reshape(-1, 2)
    labels = np.array([label for _, label in records], dtype=np.int64)
    person = None if persons is None else np.array(persons, dtype=np.int64)
    sums = RecordSums(phi_NW=phi, labels_N=labels, person_N=person, pool=BlockPool())
    moments = sums.total(votes_themselves, norm=UNITS**2)
    return [sums.total(partial(indicators, num_classes=2), norm=UNITS), moments, least_eigenvalue(moments)]


def squared_moves(one: list[np.ndarray], other: list[np.ndarray]) -> list[int]:
    return [sum(int(x) ** 2 for x in (a - b).ravel()) for a, b in zip(one, other, strict=True)]


def test_no_neighbour_moves_a_release_by_more_than_its_event_says() -> None:
    """All data sets of up to three records of this list: one removed or added, and one replaced by another."""
    values = {records: exact(records) for n in range(4) for records in itertools.product(RECORDS, repeat=n)}
    largest = [0, 0, 0]
    for records, found in values.items():
        for place in range(len(records)):
            rest = records[:place] + records[place + 1 :]
            moved = squared_moves(found, values[rest])
            assert all(move <= norm**2 for move, norm in zip(moved, NORMS, strict=True)), (records, place)
            largest = [max(pair) for pair in zip(largest, moved, strict=True)]
    # Tight: the whole norm is needed, but for the margin of the eigenvalue.
    assert largest[0] == UNITS**2
    assert largest[1] == UNITS**4
    assert largest[2] > 0.999 * UNITS**4
    for rest in itertools.product(RECORDS, repeat=1):
        others = [values[(record, *rest)] for record in RECORDS]
        for one, other in itertools.combinations(others, 2):
            moved = squared_moves(one, other)
            assert all(move <= (2 * norm) ** 2 for move, norm in zip(moved, NORMS, strict=True))


def test_a_person_moves_a_release_no_more_than_a_record() -> None:
    for records in itertools.product(RECORDS[::2] + RECORDS[1::4], repeat=3):
        together, alone = exact(records, (4, 4, 9)), exact(records[2:], (9,))
        assert all(move <= norm**2 for move, norm in zip(squared_moves(together, alone), NORMS, strict=True)), records


def test_rounding_of_a_large_eigenvalue_stays_within_the_margin() -> None:
    """A thousand numbers, moments as of a billion records, whose least eigenvalue is known."""
    width, generator = 1000, np.random.default_rng(0)
    half = np.sign(generator.normal(size=width)).astype(np.int64)  # a reflection of whole numbers: no rounding
    moments = np.diag(np.full(width, 10**6 * UNITS**2)) + np.outer(half, half) * (10**3 * UNITS**2)
    assert abs(int(least_eigenvalue(moments)[0, 0]) - 10**6 * UNITS**2) < (EIGENVALUE_NORM - UNITS**2) / 4


@pytest.mark.parametrize("epsilon", quick_and_slow([0.03, 1.0, 8.0], [0.03, 1.0]))
def test_the_release_costs_the_target_for_both_accountants(epsilon: float) -> None:
    method = configured({"target": {"epsilon": epsilon, "delta": 1e-5}}, method="ada_ssp")
    assert isinstance(method, AdaSsp)
    events = method.events()
    found = accountant.epsilon_pld(events, target_delta=1e-5)
    assert 0.98 * epsilon < found <= epsilon
    assert recomputed_epsilon([event_json(event) for event in events], delta=1e-5) == pytest.approx(found, rel=0.01)


def test_another_relation_is_refused() -> None:
    method = configured({"target": {"epsilon": 1, "relation": "replace one"}}, method="ada_ssp")
    with pytest.raises(ConfigError, match="use 'add or remove one'"):
        method.check()


def released(sums_CW: np.ndarray, moments_WW: np.ndarray, eigenvalue: float) -> ReleasedArrays:
    """Exact values as if they were released, in units of one record."""
    scales = {"sums_CW": (sums_CW, UNITS), "moments_WW": (moments_WW, UNITS**2)}
    arrays = {name: np.rint(value * scale).astype(np.int64) for name, (value, scale) in scales.items()}
    arrays["eigenvalue_11"] = np.array([[round(eigenvalue * UNITS**2)]])
    return ReleasedArrays(arrays=arrays, events=least_squares_events(1.0))


def test_moments_that_stand_out_give_least_squares() -> None:
    generator = np.random.default_rng(3)
    phi, labels = generator.normal(size=(5000, 6)), generator.integers(0, 3, 5000)
    method = configured({"target": {"epsilon": 1}}, method="ada_ssp")
    found = method.rule(released(np.eye(3)[labels].T @ phi, phi.T @ phi, 1e6))
    # A ridge of one record's weight, as rows of a plain least-squares problem.
    rows, goals = np.vstack([phi, np.eye(6)]), np.vstack([np.eye(3)[labels], np.zeros((6, 3))])
    np.testing.assert_allclose(found, np.linalg.lstsq(rows, goals, rcond=None)[0].T, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("delta", "failure", "share"), [(1e-5, 0.05, 1.0), (1e-6, 0.3, 0.15)])
def test_the_ridge_is_a_share_of_the_bound_on_the_noise_less_the_least_eigenvalue(
    delta: float, failure: float, share: float
) -> None:
    settings = {"failure_probability": failure, "ridge_share": share}
    values = {"target": {"epsilon": 0.5, "delta": delta}, "ada_ssp": settings}
    method = configured(values, method="ada_ssp")
    noise = method.events()[1].noise_stddev_votes / UNITS**2  # of one number on the diagonal
    full = share * noise / math.sqrt(2) * math.sqrt(10 * math.log(2 * 10**2 / failure))

    def ridge(eigenvalue: float) -> float:
        rule = method.rule(released(np.full((2, 10), 5.0), 7.0 * np.eye(10), eigenvalue))
        return 5.0 / rule[0, 0] - 7.0

    assert ridge(-1e6) == ridge(0.0) == pytest.approx(full, rel=1e-6)
    certain = method.events()[2].noise_stddev_votes / UNITS**2 * math.sqrt(math.log(6 / delta))
    assert ridge(certain + full / 2) == pytest.approx(full / 2, rel=1e-4)
    assert ridge(certain + 2 * full) == pytest.approx(1.0)


def test_scores_become_probabilities_of_the_same_labels() -> None:
    scores = np.array([[0.9, 0.2, -0.1], [-0.3, -0.1, -0.2], [0.5, 0.5, 0.1]])
    said = labels_of_scores(scores)
    assert said.labels_M.tolist() == [0, 1, 0]
    assert said.chances_MC is not None
    np.testing.assert_allclose(said.chances_MC.sum(axis=1), 1)
    np.testing.assert_allclose(said.chances_MC[0], [9 / 11, 2 / 11, 0], atol=1e-6)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_data(DataConfig(embedding={"num_components": 6, "graph_share": 0}))


def measured(dataset: Dataset, tmp_path: Path) -> dict[str, np.ndarray]:
    method = configured({"target": {"epsilon": 1.0}, "noise": "seeded"}, method="ada_ssp")
    reporter = Reporter(quiet=True)
    training = Training(dataset=dataset, model=None, run=RunDirectory(root=tmp_path), reporter=reporter, seed=0)
    return method.measure(training).arrays


def test_one_record_moves_what_is_released_by_its_own_numbers(digits: Dataset, tmp_path: Path) -> None:
    """The noise is seeded, so that it is the same for both data sets."""
    without = replace(digits, private=digits.private.take(torch.arange(1, len(digits.private))))
    with_one, others = measured(digits, tmp_path), measured(without, tmp_path)
    ballot, label = WeightedBallot.of(digits, AdaSsp().ada_ssp.embedding), int(digits.private.y[0])
    phi = ballot.votes(digits.private.x[:1])[0]
    moved = with_one["sums_CW"] - others["sums_CW"]
    np.testing.assert_array_equal(moved[label], phi)
    assert not np.delete(moved, label, axis=0).any()
    np.testing.assert_array_equal(with_one["moments_WW"] - others["moments_WW"], np.outer(phi, phi))
    assert -1 <= int((with_one["eigenvalue_11"] - others["eigenvalue_11"])[0, 0]) <= EIGENVALUE_NORM


def test_noises_are_those_of_the_events(digits: Dataset, tmp_path: Path) -> None:
    arrays = measured(digits, tmp_path)
    ballot = WeightedBallot.of(digits, AdaSsp().ada_ssp.embedding)
    phi, labels = ballot.votes(digits.private.x), digits.private.y.numpy()
    sums, moments, _ = configured({"target": {"epsilon": 1.0}}, method="ada_ssp").events()
    in_sums = (arrays["sums_CW"] - np.eye(10, dtype=np.int64)[labels].T @ phi) / sums.noise_stddev_votes
    in_moments = (arrays["moments_WW"] - phi.T @ phi) / moments.noise_stddev_votes
    assert 0.7 < in_sums.std() < 1.4
    assert 0.5 < in_moments[np.triu_indices(len(in_moments), 1)].std() * math.sqrt(2) < 1.5
