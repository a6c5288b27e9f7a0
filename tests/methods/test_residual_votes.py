"""Residual votes: what one record or person can move, bit for bit, and what the releases are priced as."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow
from scipy.special import softmax

from fairpate.config import DataConfig, RayConfig
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import Split
from fairpate.methods import residual_votes
from fairpate.methods.base import Training, configured
from fairpate.methods.record_votes import ONE_RECORD, UNITS, WeightedBallot, rule_network
from fairpate.methods.residual_votes import (
    RecordSums,
    ResidualVotes,
    curvature_inverse,
    indicators,
    product_sum,
    residuals,
    shortened,
    votes_themselves,
    whole_rule,
)
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.releases.directory import ReleasedArrays, RunDirectory
from fairpate.terminal import Reporter
from teachers.ray_pool import open_pool
from teachers.work import BlockPool

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

RANDOM = np.random.default_rng(7)
BOUND = UNITS // 2


def votes(count: int, width: int = 12) -> np.ndarray:
    """Whole numbers of L2 norm at most U, many of them of exactly that length."""
    raw = RANDOM.normal(size=(count, width)) * RANDOM.choice([0.01, 1.0, 100.0], size=(count, 1))
    return np.trunc(raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1.0) * (UNITS - 1)).astype(np.int64)


PHI, LABELS = votes(4000), RANDOM.integers(0, 3, 4000)
RULES = [whole_rule(RANDOM.normal(size=(3, 12)) * scale) for scale in (0.0, 1.0, 30.0, 1e9)]


@pytest.mark.parametrize("rule", RULES)
def test_residuals_are_those_of_the_softmax_and_never_longer_than_the_bound(rule: np.ndarray) -> None:
    found = residuals(PHI, LABELS, rule, bound=BOUND)
    assert (np.array([sum(int(x) ** 2 for x in row) for row in found]) <= BOUND**2).all()
    exact = np.eye(3)[LABELS] - softmax(PHI / UNITS @ (rule / 2**12).T, axis=1)
    exact *= np.minimum(1.0, BOUND / UNITS / np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-9))
    np.testing.assert_allclose(found / UNITS, exact, atol=2e-3)


@pytest.mark.parametrize("rule", RULES)
def test_a_record_adds_the_same_numbers_alone_and_in_any_batch(rule: np.ndarray) -> None:
    together = residuals(PHI, LABELS, rule, bound=BOUND)
    order = RANDOM.permutation(len(PHI))
    np.testing.assert_array_equal(residuals(PHI[order], LABELS[order], rule, bound=BOUND), together[order])
    for row in (0, 1, 17, 3999):
        alone = residuals(PHI[row : row + 1], LABELS[row : row + 1], rule, bound=BOUND)
        np.testing.assert_array_equal(alone[0], together[row])


def test_sums_of_products_are_exact_in_any_order_and_a_record_moves_them_by_its_own_product() -> None:
    left = residuals(PHI, LABELS, RULES[2], bound=BOUND)
    total = product_sum(left, PHI, norm=UNITS * BOUND)
    exact = [[sum(int(a) * int(b) for a, b in zip(x, y, strict=True)) for y in PHI.T] for x in left.T]
    np.testing.assert_array_equal(total, exact)
    order = RANDOM.permutation(len(PHI))
    np.testing.assert_array_equal(product_sum(left[order], PHI[order], norm=UNITS * BOUND), total)
    for row in (0, 5, 3999):
        others = np.arange(len(PHI)) != row
        moved = total - product_sum(left[others], PHI[others], norm=UNITS * BOUND)
        np.testing.assert_array_equal(moved, np.outer(left[row], PHI[row]))
        assert sum(int(x) ** 2 for x in moved.ravel()) <= (UNITS * BOUND) ** 2
    assert not product_sum(left[:0], PHI[:0], norm=UNITS * BOUND).any()


@pytest.mark.parametrize("num_persons", quick_and_slow([1, 40, 4000], [1, 40]))
def test_a_person_moves_a_sum_by_at_most_the_norm_of_one_record(num_persons: int) -> None:
    person, norm = RANDOM.integers(0, num_persons, len(PHI)), UNITS**2
    total = product_sum(PHI, PHI, norm=norm, person_N=person)
    of_each = (PHI[person == one].astype(np.int64) for one in np.unique(person))
    np.testing.assert_array_equal(total, sum(shortened(phi.T @ phi, norm=norm) for phi in of_each))
    for one in np.unique(person)[:5]:
        others = person != one
        moved = total - product_sum(PHI[others], PHI[others], norm=norm, person_N=person[others])
        assert sum(int(x) ** 2 for x in moved.ravel()) <= norm**2
    single = product_sum(PHI, PHI, norm=norm, person_N=np.arange(len(PHI)))
    np.testing.assert_array_equal(single, product_sum(PHI, PHI, norm=norm))


def test_shortening_keeps_direction_and_whole_numbers_within_the_norm() -> None:
    for scale in (1, 3, 1000, 10**6):
        matrix = RANDOM.integers(-(UNITS**2) * scale, UNITS**2 * scale, size=(30, 30))
        short = shortened(matrix, norm=UNITS**2)
        assert sum(int(x) ** 2 for x in short.ravel()) <= UNITS**4
        assert (short.astype(float) * matrix).sum() / np.linalg.norm(matrix.astype(float)) > 0.999999 * UNITS**2
    inside = np.full((2, 2), UNITS**2 // 2 - 1)
    assert shortened(inside, norm=UNITS**2) is inside


def records_of(count: int, num_persons: int | None, pool: BlockPool) -> tuple[RecordSums, torch.Tensor]:
    """The sums of ``count`` records in seven dimensions, of which a few are far longer than a vote."""
    generator = np.random.default_rng(5)
    x = torch.from_numpy(generator.normal(size=(count, 7)) * generator.choice([0.4, 4, 120], (count, 1))).float()
    persons = () if num_persons is None else tuple(f"p{n}" for n in generator.integers(0, num_persons, count))
    names = tuple(str(n) for n in range(count))
    labels = torch.from_numpy(generator.integers(0, 3, count))
    split = Split(x=x, y=labels, z=torch.zeros(count, dtype=torch.int64), record_id=names, person_id=persons)
    return RecordSums.of(WeightedBallot(embedding=None), split, pool), x


LEFT = {
    "indicators": partial(indicators, num_classes=3),
    "votes": votes_themselves,
    "residuals": partial(residuals, rule_CW=whole_rule(np.arange(24.0).reshape(3, 8) / 5), bound=BOUND),
}


@pytest.mark.parametrize("num_persons", [None, 300])
def test_sums_by_parts_and_from_a_mapped_file_are_those_of_all_records_at_once(
    num_persons: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fairpate.methods.residual_votes._AT_ONCE", 256)
    monkeypatch.setattr("fairpate.data.large_arrays.KEPT_BYTES", 1000)
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path))
    records, x = records_of(1500, num_persons, BlockPool())
    assert not records.phi_NW.flags.owndata  # a view of a file
    phi, labels = WeightedBallot(embedding=None).votes(x), records.labels_N
    np.testing.assert_array_equal(records.phi_NW, phi)
    for left in LEFT.values():
        whole = product_sum(left(phi, labels), phi, norm=UNITS**2, person_N=records.person_N)
        np.testing.assert_array_equal(records.total(left, norm=UNITS**2), whole)
    none, _ = records_of(0, num_persons, BlockPool())
    assert not none.total(votes_themselves, norm=UNITS**2).any()
    assert none.total(votes_themselves, norm=UNITS**2).shape == (8, 8)


@pytest.mark.slow
def test_several_ray_workers_give_the_bits_of_one_process(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairpate.methods.residual_votes._AT_ONCE", 64)  # of this process: parts for every worker
    with open_pool(RayConfig(num_actors=2, num_cpus=0.5)) as pool:
        for num_persons in (None, 40):
            here, _ = records_of(1000, num_persons, BlockPool())
            there, _ = records_of(1000, num_persons, pool)
            np.testing.assert_array_equal(there.phi_NW, here.phi_NW)
            for left in LEFT.values():
                np.testing.assert_array_equal(there.total(left, norm=UNITS**2), here.total(left, norm=UNITS**2))


@pytest.mark.parametrize("epsilon", quick_and_slow([0.03, 1.0, 8.0], [0.03, 1.0]))
def test_both_plans_cost_the_target_and_begin_with_the_same_release(epsilon: float) -> None:
    method = configured({"target": {"epsilon": epsilon, "delta": 1e-5}}, method="residual_votes")
    assert isinstance(method, ResidualVotes)
    plans = [method.residual_votes.events(method.multiplier(), curvature) for curvature in ("public", "private")]
    assert plans[0][0] == plans[1][0]
    for events in plans:
        assert 0.98 * epsilon < accountant.epsilon_pld(events, target_delta=1e-5) <= epsilon
    assert [type(event).__name__ for event in plans[1]] == ["VoteSums", "MomentSums", "VoteSums"]
    assert [event.count for event in plans[1]] == [1, 1, 8]


def test_the_published_network_scores_records_as_the_rule_scores_their_votes() -> None:
    """Also records far longer than the radius, which are shortened, and one at the origin."""
    embedded = RANDOM.normal(size=(500, 12)) * RANDOM.choice([0.1, 1.0, 100.0], size=(500, 1))
    embedded[0] = 0.0
    x, rule = torch.from_numpy(embedded).float(), RANDOM.normal(size=(3, 13)) * 20
    architecture, network = rule_network(rule)
    votes_NW = WeightedBallot(embedding=None).votes(x)
    with torch.no_grad():
        np.testing.assert_allclose(network(x).numpy(), votes_NW / UNITS @ rule.T, atol=0.02)
    assert architecture.name == "bounded_logistic"
    assert (votes_NW[:, 0] == ONE_RECORD).all()


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_data(DataConfig(embedding={"num_components": 6, "graph_share": 0}))


def released(dataset: Dataset, tmp_path: Path, *, epsilon: float = 8.0, **settings: Any) -> ReleasedArrays:
    values = {"target": {"epsilon": epsilon, "delta": 1e-5}, "noise": "seeded", "residual_votes": settings}
    method = configured(values, method="residual_votes")
    assert isinstance(method, ResidualVotes)
    training = Training(
        dataset=dataset, model=None, run=RunDirectory(root=tmp_path), reporter=Reporter(quiet=True), seed=0
    )
    return method.measure(training)


def test_one_record_moves_the_first_releases_by_its_own_numbers(digits: Dataset, tmp_path: Path) -> None:
    """The noise is seeded, so that it is the same for both data sets; what comes later sees other rules."""
    without = replace(digits, private=digits.private.take(torch.arange(1, len(digits.private))))
    with_one, others = (released(each, tmp_path, epsilon=1.0, curvature="private").arrays for each in (digits, without))
    ballot = WeightedBallot.of(digits, ResidualVotes().residual_votes.embedding)
    phi_W = ballot.votes(digits.private.x[:1])[0]
    moved = with_one["sums_CW"] - others["sums_CW"]
    np.testing.assert_array_equal(moved[int(digits.private.y[0])], phi_W)
    assert not np.delete(moved, int(digits.private.y[0]), axis=0).any()
    np.testing.assert_array_equal(with_one["moments_WW"] - others["moments_WW"], np.outer(phi_W, phi_W))


def test_noise_of_moments_is_symmetric_with_half_the_variance_off_the_diagonal(digits: Dataset, tmp_path: Path) -> None:
    arrays = released(digits, tmp_path, curvature="private")
    ballot = WeightedBallot.of(digits, ResidualVotes().residual_votes.embedding)
    phi_NW = ballot.votes(digits.private.x)
    noise = arrays.arrays["moments_WW"] - phi_NW.T @ phi_NW
    np.testing.assert_array_equal(noise, noise.T)
    stddev = arrays.events[1].noise_stddev_votes
    above, diagonal = noise[np.triu_indices(len(noise), 1)] / stddev, np.diag(noise) / stddev
    assert 0.5 < above.std() * math.sqrt(2) < 1.5
    assert 0.4 < diagonal.std() < 2


def test_the_curvature_is_private_where_the_pool_is_small_for_the_noise(digits: Dataset, tmp_path: Path) -> None:
    def is_private(pool: int, epsilon: float, *, persons: int | None = None) -> bool:
        few = replace(digits, public=digits.public.take(torch.arange(pool)), public_persons=persons)
        return "moments_WW" in released(few, tmp_path, epsilon=epsilon).arrays

    assert is_private(12, 0.5)
    assert not is_private(300, 0.1)
    assert is_private(300, 8.0)
    # Records of few persons say as little of the others as few records do.
    assert is_private(300, 0.1, persons=3)
    assert not is_private(300, 0.1, persons=300)


def test_persons_behind_public_records_are_counted_also_where_each_record_is_protected() -> None:
    by_person, by_record = (load_data(DataConfig(name="loans", unit=unit)) for unit in (None, "record"))
    assert by_record.public_persons == by_person.public_persons == by_person.public.num_protected
    assert by_record.public_persons < len(by_record.public)
    assert load_data(DataConfig()).public_persons is None


def test_the_inverse_of_noisy_moments_is_positive_and_its_floor_bounds_it() -> None:
    noisy = RANDOM.normal(size=(20, 20))
    inverse = curvature_inverse(noisy + noisy.T, floor=0.5)
    values = np.linalg.eigvalsh(inverse)
    assert values.min() > 0
    assert values.max() == pytest.approx(2.0)
    definite = noisy @ noisy.T
    np.testing.assert_allclose(curvature_inverse(definite, floor=0.1), np.linalg.inv(definite + 0.1 * np.eye(20)))


def test_without_noise_the_steps_end_in_the_private_logistic_regression() -> None:
    """The fixed point of unclipped steps with the true curvature, against scikit-learn's optimum."""
    from sklearn.linear_model import LogisticRegression

    truth = RANDOM.normal(size=(2, 12)) * 3
    phi = votes(6000)
    labels = np.array([RANDOM.choice(2, p=row) for row in softmax(phi / UNITS @ truth.T, axis=1)])
    inverse, rule = curvature_inverse((phi / UNITS).T @ (phi / UNITS), floor=1e-6), np.zeros((2, 12))
    for _ in range(300):
        found = product_sum(residuals(phi, labels, whole_rule(rule), bound=2 * UNITS), phi, norm=2 * UNITS**2)
        rule = rule + 2.0 * found / UNITS**2 @ inverse
    exact = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-9, max_iter=5000).fit(phi / UNITS, labels)
    np.testing.assert_allclose(rule[1] - rule[0], exact.coef_[0], atol=0.05)
    assert math.isfinite(float(np.abs(rule).max()))


def test_noise_above_the_diagonal_has_at_least_half_of_the_priced_variance() -> None:
    drawn: dict[str, float] = {}

    def draw(exact_RW: Any, *, stddev: float, name: str, **_: Any) -> Any:
        drawn[name] = stddev
        return exact_RW

    for stddev in np.random.default_rng(0).uniform(1, 1e6, 2000).tolist():
        residual_votes.noisy_moments(np.zeros((2, 2), dtype=np.int64), stddev, OsEntropy(), draw)
        assert drawn["squares"] == stddev
        assert 2 * Fraction(drawn["moments"]) ** 2 >= Fraction(stddev) ** 2
