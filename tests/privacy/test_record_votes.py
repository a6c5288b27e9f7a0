"""Votes of records: no two neighbouring data sets tell more than their price, by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from divergences import delta_at
from method_kinds import quick_and_slow

from fairpate.privacy import accountant, mechanism_events
from fairpate.privacy.accountant import Event, PoissonGaussians, event_pld
from fairpate.privacy.mechanism_events import (
    MomentSums,
    NeighbourVotes,
    VoteSums,
    VoteTables,
    both,
    one_count_moves,
    two_counts_move,
)

pytestmark = pytest.mark.usefixtures("light_runs")

FloatArray = npt.NDArray[np.float64]
EPSILONS = (0.0, 0.05, 0.2, 0.5, 1.0, 2.0)
REACH = 14  # noise beyond it has no mass to speak of, for the small deviations used here
Record = tuple[int, int]  # its place in the order of distances, and its label


def masses(stddev: float, centre: int) -> FloatArray:
    """N_Z(centre, stddev^2) on -REACH .. REACH."""
    weights = np.exp(-((np.arange(-REACH, REACH + 1) - centre) ** 2.0) / (2 * stddev**2))
    total = sum(math.exp(-(x**2) / (2 * stddev**2)) for x in range(-60, 61))
    return np.asarray(weights / total)


def outputs(counts: tuple[int, ...], stddevs: tuple[float, ...]) -> FloatArray:
    """The joint distribution of noisy counts, flat."""
    joint = np.ones(1)
    for count, stddev in zip(counts, stddevs, strict=True):
        joint = np.multiply.outer(joint, masses(stddev, count))
    return joint.ravel()


def samples(records: tuple[Record, ...], rate: float) -> list[tuple[float, tuple[Record, ...]]]:
    """Every Poisson sample with its probability."""
    chosen = [tuple(itertools.compress(records, bits)) for bits in itertools.product((0, 1), repeat=len(records))]
    return [(rate ** len(s) * (1 - rate) ** (len(records) - len(s)), s) for s in chosen]


def neighbours_release(
    records: tuple[Record, ...], *, k: int, rate: float, stddev: float, check: float | None
) -> FloatArray:
    """The distribution of what one query of the neighbours shows: the noisy largest count and both noisy counts."""
    total: FloatArray | float = 0.0
    for probability, sample in samples(records, rate):
        nearest = sorted(sample)[:k]
        counts = tuple(sum(label == c for _, label in nearest) for c in (0, 1))
        shown, stddevs = (
            (counts, (stddev, stddev)) if check is None else ((max(counts), *counts), (check,) + 2 * (stddev,))
        )
        total = total + probability * outputs(shown, stddevs)
    return np.asarray(total)


def table_release(records: tuple[Record, ...], *, rate: float, stddev: float) -> FloatArray:
    """The distribution of a table of two cells."""
    return np.asarray(
        sum(
            probability * outputs(tuple(sum(cell == c for _, cell in sample) for c in (0, 1)), (stddev, stddev))
            for probability, sample in samples(records, rate)
        )
    )


def hockey_stick(p: FloatArray, q: FloatArray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def priced(event: Event) -> FloatArray:
    """The divergence at EPSILONS that the accountant grants."""
    distribution = event_pld(event, 1e-3)
    assert distribution is not None
    return np.array([delta_at(distribution, epsilon) for epsilon in EPSILONS])


def largest_divergence(with_one: FloatArray, without: FloatArray, epsilon: float) -> float:
    return max(hockey_stick(with_one, without, epsilon), hockey_stick(without, with_one, epsilon))


ALL_DATA = tuple(
    tuple(enumerate(labels)) for n in range(4) for labels in itertools.product((0, 1), repeat=n)
)  # at most three other records


@pytest.mark.parametrize("check", [None, 0.8])
@pytest.mark.parametrize("rate", quick_and_slow([0.3, 1.0], [0.3]))
def test_no_added_record_moves_the_neighbours_counts_by_more_than_is_priced(rate: float, check: float | None) -> None:
    setting = {"rate": rate, "stddev": 0.9, "check": check}
    event = NeighbourVotes(count=1, noise_stddev_votes=0.9, sampling_rate=rate, threshold_stddev_votes=check)
    bounds = priced(event)
    worst = np.zeros(len(EPSILONS))
    data_sets = ALL_DATA if check is None else ALL_DATA[-8:]
    for others, k in itertools.product(data_sets, (1, 2)):
        without = neighbours_release(others, k=k, **setting)
        for place, label in itertools.product((-1.0, 0.5, 1.5), (0, 1)):
            with_one = neighbours_release((*others, (place, label)), k=k, **setting)  # type: ignore[arg-type]
            worst = np.maximum(worst, [largest_divergence(with_one, without, epsilon) for epsilon in EPSILONS])
    assert (worst <= bounds + 1e-9).all()
    if rate == 1.0 and check is None:  # one nearest record gives way to another of the other class: attained
        np.testing.assert_allclose(worst, bounds, atol=1e-4)


def test_a_price_for_one_moving_count_would_be_too_low_for_neighbours() -> None:
    without = neighbours_release(((0, 0),), k=1, rate=1.0, stddev=0.9, check=None)
    with_one = neighbours_release(((0, 0), (-1, 1)), k=1, rate=1.0, stddev=0.9, check=None)
    too_low = priced(VoteTables(count=1, noise_stddev_votes=0.9))[EPSILONS.index(0.5)]
    assert largest_divergence(with_one, without, 0.5) > 1.3 * too_low


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_a_table_of_votes_tells_exactly_what_is_priced_whatever_the_others_vote(rate: float) -> None:
    event = VoteTables(count=1, noise_stddev_votes=0.9, sampling_rate=rate)
    bounds = priced(event)
    for others in ALL_DATA:
        without = table_release(others, rate=rate, stddev=0.9)
        with_one = table_release((*others, (9, 0)), rate=rate, stddev=0.9)
        told = [largest_divergence(with_one, without, epsilon) for epsilon in EPSILONS]
        assert (np.array(told) <= bounds + 1e-9).all()
        if not others:
            np.testing.assert_allclose(told, bounds, atol=1e-4)


@pytest.mark.parametrize(
    ("stddev", "epsilon"),
    [(100, 0.027), (50, 0.059), (30, 0.103), (15, 0.219), (8, 0.434), (6, 0.594), (4, 0.926), (3, 1.27)],
)
def test_one_table_costs_what_a_gaussian_of_sensitivity_one_costs(stddev: float, epsilon: float) -> None:
    event = VoteTables(count=1, noise_stddev_votes=stddev)
    assert accountant.epsilon_pld([event], target_delta=1e-5) == pytest.approx(epsilon, rel=0.02)


@pytest.mark.parametrize(
    ("rate", "stddev", "of_100", "of_1000"),
    [
        pytest.param(0.05, 20, 0.11, 0.39, marks=pytest.mark.slow),
        pytest.param(0.1, 20, 0.24, 0.82, marks=pytest.mark.slow),
        (0.05, 10, 0.24, 0.83),
        (0.3, 20, 0.78, 2.78),
    ],
)
def test_neighbours_cost_what_two_gaussian_counts_on_a_sample_cost(
    rate: float, stddev: float, of_100: float, of_1000: float
) -> None:
    """With wide noise the integers no longer matter; the numbers are those of dp_accounting's continuous Gaussian."""
    for count, epsilon in ((100, of_100), (1000, of_1000)):
        event = NeighbourVotes(count=count, noise_stddev_votes=stddev, sampling_rate=rate)
        continuous = PoissonGaussians(count=count, noise_multiplier=stddev / math.sqrt(2), sampling_rate=rate)
        spent = accountant.epsilon_pld([event], target_delta=1e-5)
        assert spent == pytest.approx(epsilon, abs=0.006)
        assert spent == pytest.approx(accountant.epsilon_pld([continuous], target_delta=1e-5), rel=2e-3)


def test_the_check_joins_the_counts_before_the_sample_amplifies() -> None:
    event = NeighbourVotes(count=50, noise_stddev_votes=20, sampling_rate=0.1, threshold_stddev_votes=30)
    together = PoissonGaussians(count=50, noise_multiplier=1 / math.sqrt(2 / 400 + 1 / 900), sampling_rate=0.1)
    without = NeighbourVotes(count=50, noise_stddev_votes=20, sampling_rate=0.1)
    both, as_one, counts = (accountant.epsilon_pld([each], target_delta=1e-5) for each in (event, together, without))
    assert both == pytest.approx(as_one, rel=2e-3)
    assert both > counts


@pytest.mark.parametrize(
    "event",
    [
        VoteTables(count=3, noise_stddev_votes=4),
        VoteTables(count=20, noise_stddev_votes=2, sampling_rate=0.1),
        NeighbourVotes(count=30, noise_stddev_votes=5, sampling_rate=0.05),
        NeighbourVotes(count=30, noise_stddev_votes=5, sampling_rate=0.05, threshold_stddev_votes=3),
    ],
)
def test_renyi_curves_bound_loss_distributions(event: Event) -> None:
    renyi = accountant.epsilon([event], target_delta=1e-5).epsilon
    assert 0.5 * renyi < accountant.epsilon_pld([event], target_delta=1e-5) < renyi


def test_the_renyi_curve_of_the_integers_stays_below_the_continuous_one() -> None:
    orders = np.array([2.0, 3.0, 8.0])
    for pair, precision in ((one_count_moves(0.7), 1 / 0.49), (two_counts_move(0.7), 2 / 0.49)):
        exponents = np.logaddexp.reduce(pair.log_masses + np.multiply.outer(orders - 1, pair.losses), axis=1)
        assert (exponents / (orders - 1) <= orders * precision / 2 + 1e-9).all()


@pytest.mark.parametrize(
    "pair", [one_count_moves(0.8), two_counts_move(0.8), both(two_counts_move(0.8), one_count_moves(1.1))]
)
def test_a_pair_is_two_distributions_and_its_own_mirror_image(pair: object) -> None:
    losses, log_masses = pair.losses, pair.log_masses  # type: ignore[attr-defined]
    assert np.exp(log_masses).sum() == pytest.approx(1.0)
    assert np.exp(log_masses - losses).sum() == pytest.approx(1.0)
    for epsilon in EPSILONS:
        forth = np.maximum(np.exp(log_masses) - np.exp(epsilon + log_masses - losses), 0).sum()
        back = np.maximum(np.exp(log_masses - losses) - np.exp(epsilon + log_masses), 0).sum()
        assert forth == pytest.approx(back)
        assert pair.divergence(np.array([epsilon]))[0] == pytest.approx(forth)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stddev", "threshold_stddev"), [(12.0, 8.0), (4.0, 30.0)])
def test_losses_on_a_grid_dominate_and_are_hardly_larger(
    monkeypatch: pytest.MonkeyPatch, stddev: float, threshold_stddev: float
) -> None:
    pairs = two_counts_move(stddev), one_count_moves(threshold_stddev)
    exact = both(*pairs)
    monkeypatch.setattr(mechanism_events, "_MOST_ATOMS", 0)
    rounded = both.__wrapped__(*pairs)  # past the cache
    assert len(rounded.losses) < len(exact.losses)
    epsilons = np.linspace(-2.0, 2.0, 81) / stddev
    unmoved = exact.log_masses - exact.losses
    divergence = np.array([np.maximum(np.exp(exact.log_masses) - np.exp(e + unmoved), 0).sum() for e in epsilons])
    assert (rounded.divergence(epsilons) >= divergence - 1e-12).all()
    np.testing.assert_allclose(rounded.divergence(epsilons), divergence, rtol=2e-3, atol=1e-9)
    assert np.exp(rounded.log_masses).sum() == pytest.approx(1.0, abs=1e-12)


def test_wide_noise_of_counts_and_check_is_priced_in_little_memory() -> None:
    wide = NeighbourVotes(count=100, noise_stddev_votes=3000, sampling_rate=0.1, threshold_stddev_votes=4000)
    price = accountant.epsilon_pld([wide], target_delta=1e-5)
    assert 0 < price < accountant.epsilon([wide], target_delta=1e-5).epsilon


def test_nothing_done_costs_nothing_and_no_noise_promises_nothing() -> None:
    for kind in (VoteTables, VoteSums, NeighbourVotes):
        assert accountant.epsilon_pld([kind(count=0, noise_stddev_votes=0.0)], target_delta=1e-5) == 0
        assert accountant.epsilon([kind(count=0, noise_stddev_votes=0.0)], target_delta=1e-5).epsilon == 0
        assert accountant.epsilon_pld([kind(count=1, noise_stddev_votes=0.0)], target_delta=1e-5) == math.inf
        assert accountant.epsilon([kind(count=1, noise_stddev_votes=0.0)], target_delta=1e-5).epsilon == math.inf
    unchecked = NeighbourVotes(count=1, noise_stddev_votes=5.0, threshold_stddev_votes=0.0)
    assert accountant.epsilon_pld([unchecked], target_delta=1e-5) == math.inf


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"count": -1}, "count >= 0"),
        ({"noise_stddev_votes": math.nan}, "noise_stddev_votes >= 0"),
        ({"sampling_rate": 0.0}, "0 < sampling_rate <= 1"),
        ({"sampling_rate": 1.5}, "0 < sampling_rate <= 1"),
    ],
)
def test_impossible_events_are_refused(fields: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {expected}"):
        VoteTables(**{"count": 1, "noise_stddev_votes": 1.0} | fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold_stddev_votes"):
        NeighbourVotes(count=1, noise_stddev_votes=1.0, threshold_stddev_votes=-1.0)


def sums_release(vector: tuple[int, int], *, stddev: float, reach: int) -> FloatArray:
    """The distribution of two noisy sums, flat."""
    noise = np.arange(-reach, reach + 1)
    weights = [np.exp(-((noise - number) ** 2.0) / (2 * stddev**2)) for number in vector]
    total = math.fsum(math.exp(-(x**2) / (2 * stddev**2)) for x in range(-2 * reach, 2 * reach + 1))
    return np.multiply.outer(weights[0] / total, weights[1] / total).ravel()


@pytest.mark.parametrize(("vector", "stddev"), [((3, 4), 8.0), ((5, 0), 8.0), ((9, 12), 30.0)])
def test_sums_tell_no_more_than_a_continuous_gaussian_of_slightly_less_noise(
    vector: tuple[int, int], stddev: float
) -> None:
    norm = math.hypot(*vector)
    bounds = priced(VoteSums(count=1, noise_stddev_votes=stddev, norm=round(norm)))
    reach = round(8 * stddev)
    with_one, without = (sums_release(v, stddev=stddev, reach=reach) for v in (vector, (0, 0)))
    told = np.array([largest_divergence(with_one, without, epsilon) for epsilon in EPSILONS])
    assert (told <= bounds + 1e-9).all()
    np.testing.assert_allclose(told, bounds, atol=0.003 if stddev > 20 else 0.03)  # what t costs at little noise
    too_low = priced(VoteSums(count=1, noise_stddev_votes=stddev, norm=max(1, round(norm / 2))))
    assert (told > too_low).any()


@pytest.mark.parametrize("phi", [(2, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 1), (3, 0)))])
def test_moments_with_half_the_variance_above_the_diagonal_reveal_no_more_than_they_are_priced_at(
    phi: tuple[int, int],
) -> None:
    """The three numbers of phi phi^T at W = 2, with their whole distribution under noise."""
    stddev, norm = 8.0, phi[0] ** 2 + phi[1] ** 2  # the Frobenius norm of phi phi^T
    moments = ((phi[0] ** 2, stddev), (phi[0] * phi[1], stddev / math.sqrt(2)), (phi[1] ** 2, stddev))
    reach = round(8 * stddev)
    noise = np.arange(-reach, reach + 1)

    def release(share: int) -> FloatArray:
        parts = []
        for number, width in moments:
            weights = np.exp(-((noise - share * number) ** 2.0) / (2 * width**2))
            parts.append(weights / math.fsum(np.exp(-(np.arange(-2 * reach, 2 * reach + 1) ** 2.0) / (2 * width**2))))
        return np.multiply.outer(np.multiply.outer(*parts[:2]), parts[2]).ravel()

    shown = np.array([largest_divergence(release(1), release(0), epsilon) for epsilon in EPSILONS])
    assert (shown <= priced(MomentSums(count=1, noise_stddev_votes=stddev, norm=norm)) + 1e-9).all()
    assert (shown > priced(MomentSums(count=1, noise_stddev_votes=stddev, norm=max(1, norm // 2)))).any()


def test_replacing_reals_by_integers_at_random_makes_discrete_noise_of_continuous() -> None:
    """The step of the proof: N(0, s^2 - t^2), then an integer near it, is N_Z(0, s^2) to within 1e-12."""
    stddev, rounding = 5.0, 3.0
    reals = np.linspace(-60, 60, 6001)
    density = np.exp(-(reals**2) / (2 * (stddev**2 - rounding**2)))
    density /= density.sum()
    integers = np.arange(-80, 81)
    near = np.exp(-((integers[:, None] - reals) ** 2) / (2 * rounding**2))
    made = (near / near.sum(axis=0)) @ density
    discrete = np.exp(-(integers**2) / (2 * stddev**2))
    np.testing.assert_allclose(made, discrete / discrete.sum(), rtol=1e-9, atol=1e-12)


def test_one_table_of_sums_costs_what_a_gaussian_of_its_norm_costs_whatever_the_units() -> None:
    for units in (1, 100, 2**14):
        event = VoteSums(count=1, noise_stddev_votes=50.0 * units, norm=units)
        assert accountant.epsilon_pld([event], target_delta=1e-5) == pytest.approx(0.059, rel=0.02)
        renyi = accountant.epsilon([event], target_delta=1e-5).epsilon
        assert accountant.epsilon_pld([event], target_delta=1e-5) < renyi
    sampled = VoteSums(count=20, noise_stddev_votes=2000.0, norm=1000, sampling_rate=0.1)
    counts = VoteTables(count=20, noise_stddev_votes=2.0, sampling_rate=0.1)
    assert accountant.epsilon_pld([sampled], target_delta=1e-5) == pytest.approx(
        accountant.epsilon_pld([counts], target_delta=1e-5), rel=0.05
    )


def test_sums_with_noise_below_the_rounding_promise_nothing() -> None:
    assert accountant.epsilon_pld([VoteSums(count=1, noise_stddev_votes=3.0)], target_delta=1e-5) == math.inf
    with pytest.raises(ValueError, match="norm >= 1"):
        VoteSums(count=1, noise_stddev_votes=3.0, norm=0)
