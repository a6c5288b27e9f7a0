"""Residual votes: what one record or person can move, bit for bit, and what the releases are priced as."""

import math

import numpy as np
import pytest
from scipy.special import softmax

from fairpate.methods.record_votes import UNITS
from fairpate.methods.residual_votes import curvature_inverse, product_sum, residuals, shortened, whole_rule

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


@pytest.mark.parametrize("num_persons", [1, 40, 4000])
def test_a_person_moves_a_sum_by_at_most_the_norm_of_one_record(num_persons: int) -> None:
    person, norm = RANDOM.integers(0, num_persons, len(PHI)), UNITS**2
    total = product_sum(PHI, PHI, norm=norm, person_N=person)
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
