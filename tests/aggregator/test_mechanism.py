import math
from collections import Counter

import numpy as np
import pytest

from aggregator.mechanism import ConfidentGnmax, Outcome
from fairpate.fairness.gate import DemographicParityGate, filter_stream
from fairpate.privacy.discrete_gaussian import OsEntropy, SeededSource, discrete_gaussians
from fairpate.types import GateRule

NO_NOISE = ConfidentGnmax(threshold=0, threshold_stddev_votes=0, noise_stddev_votes=0)
NEVER = ConfidentGnmax(threshold=math.inf, threshold_stddev_votes=0, noise_stddev_votes=0)
OPEN = GateRule(max_disparity=math.inf, min_count=0)


def run_stream(votes_QC, groups, *, parameters, rule, seed=0, block_size=50):
    gate = DemographicParityGate(rule, num_groups=2, num_classes=votes_QC.shape[1])
    outcomes = []
    for start in range(0, len(votes_QC), block_size):
        block = range(start, min(start + block_size, len(votes_QC)))
        outcomes += parameters.answer(
            votes_QC[block],
            groups=[int(groups[index]) for index in block],
            keys=[str(index) for index in block],
            gate=gate,
            source=SeededSource(seed),
        )
    return outcomes, gate


def one_hot_votes(labels, num_classes=2, num_teachers=10):
    return num_teachers * np.eye(num_classes, dtype=np.int64)[labels]


def random_votes(generator, num_queries=200, num_classes=4, num_teachers=60):
    profiles = generator.dirichlet(np.full(num_classes, 0.4), size=num_queries)
    return np.array([generator.multinomial(num_teachers, profile) for profile in profiles])


def test_without_noise_and_threshold_the_plurality_wins():
    votes_QC = np.array([[5, 3, 2], [1, 8, 1], [0, 4, 6]])
    outcomes, _ = run_stream(votes_QC, [0, 1, 0], parameters=NO_NOISE, rule=OPEN)
    assert [outcome.label for outcome in outcomes] == [0, 1, 2]


def test_a_threshold_of_minus_infinity_is_gnmax_and_of_infinity_refuses_everything():
    votes_QC = np.array([[20, 22, 18]])
    always = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=5, noise_stddev_votes=0)
    never = ConfidentGnmax(threshold=math.inf, threshold_stddev_votes=5, noise_stddev_votes=0)
    for parameters, expected in (
        (always, [Outcome(verdict="answer", label=1)]),
        (never, [Outcome(verdict="confidence")]),
    ):
        assert run_stream(votes_QC, [0], parameters=parameters, rule=OPEN, seed=1)[0] == expected


@pytest.mark.parametrize("block_size", [1, 7, 8, 200])
def test_how_queries_are_put_together_changes_no_outcome(block_size):
    votes_QC, groups = random_votes(np.random.default_rng(4)), np.random.default_rng(5).integers(0, 2, 200)
    parameters = ConfidentGnmax(threshold=30, threshold_stddev_votes=10, noise_stddev_votes=6)
    rule = GateRule(max_disparity=0.05, min_count=10)
    together, gate = run_stream(votes_QC, groups, parameters=parameters, rule=rule)
    again, other_gate = run_stream(votes_QC, groups, parameters=parameters, rule=rule, block_size=block_size)
    assert again == together
    np.testing.assert_array_equal(other_gate.counts_GC, gate.counts_GC)
    assert len({outcome.verdict for outcome in together}) == 3


STREAM = [(0, 1), (0, 1), (1, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("max_disparity", "accepted", "counts"),
    [(0.11, "111101101011", [[2, 2], [2, 3]]), (0.0, "111101101000", [[2, 2], [2, 1]])],
)
def test_the_accept_pattern_worked_out_by_hand(max_disparity, accepted, counts):
    groups, labels = zip(*STREAM, strict=True)
    rule = GateRule(max_disparity=max_disparity, min_count=2)
    outcomes, gate = run_stream(one_hot_votes(list(labels)), groups, parameters=NO_NOISE, rule=rule)
    assert "".join("1" if outcome.verdict == "answer" else "0" for outcome in outcomes) == accepted
    assert gate.counts_GC.tolist() == counts


@pytest.mark.parametrize("rule", [OPEN, GateRule(max_disparity=0, min_count=10**9)])
def test_an_open_gate_or_an_endless_cold_start_is_confident_gnmax_bit_for_bit(rule):
    votes_QC = random_votes(np.random.default_rng(0))
    parameters = ConfidentGnmax(threshold=30, threshold_stddev_votes=10, noise_stddev_votes=6)
    outcomes, _ = run_stream(votes_QC, np.arange(200) % 2, parameters=parameters, rule=rule)
    source = SeededSource(0)
    words = source.machine_words([str(index) for index in range(200)], 5)
    passes_Q = votes_QC.max(axis=1) + discrete_gaussians(10, words[:, 0], source) >= 30
    noisy_QC = votes_QC + discrete_gaussians(6, words[:, 1:], source)
    assert [outcome.label is not None for outcome in outcomes] == passes_Q.tolist()
    assert all(
        row[outcome.label] == row.max()
        for row, outcome in zip(noisy_QC, outcomes, strict=True)
        if outcome.label is not None
    )
    assert 0 < passes_Q.sum() < 200


def test_fairpate_keeps_exactly_what_filtering_pate_answers_keeps():
    votes_QC, groups = random_votes(np.random.default_rng(1)), np.random.default_rng(2).integers(0, 2, 200)
    parameters = ConfidentGnmax(threshold=30, threshold_stddev_votes=10, noise_stddev_votes=6)
    # After 20 answers (K - 1) / (K (n + 1)) is below 0.05: some label always fits, so no refusal is free.
    rule = GateRule(max_disparity=0.05, min_count=20)
    fair, _ = run_stream(votes_QC, groups, parameters=parameters, rule=rule)
    plain, _ = run_stream(votes_QC, groups, parameters=parameters, rule=OPEN)

    answered = [index for index, outcome in enumerate(plain) if outcome.label is not None]
    kept = filter_stream(
        [plain[index].label for index in answered], groups[answered], rule=rule, num_groups=2, num_classes=4
    )
    filtered = {index: plain[index].label for index, keep in zip(answered, kept, strict=True) if keep}
    assert {i: outcome.label for i, outcome in enumerate(fair) if outcome.verdict == "answer"} == filtered
    assert {outcome.verdict for outcome in fair} == {"answer", "confidence", "fairness"}
    # The same votes were touched by both, so both are charged for the same queries.
    assert [outcome.is_charged for outcome in fair] == [outcome.is_charged for outcome in plain]


def test_a_group_for_which_every_label_is_refused_is_turned_away_whatever_its_votes():
    rule, counts_GC = GateRule(max_disparity=0, min_count=0), np.array([[5, 5], [5, 5]])
    for votes_C, parameters in [([60, 0], NO_NOISE), ([0, 60], NO_NOISE), ([30, 30], NEVER)]:
        gate = DemographicParityGate(rule, num_groups=2, num_classes=2, counts_GC=counts_GC)
        (outcome,) = parameters.answer(np.array([votes_C]), groups=[0], keys=["q"], gate=gate, source=OsEntropy())
        assert outcome == Outcome(verdict="free")
        assert not outcome.is_charged


def binomial_interval(probability, trials, deviations=5.0):
    spread = deviations * math.sqrt(probability * (1 - probability) / trials)
    return probability - spread, probability + spread


@pytest.mark.parametrize(("scale", "inside"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_the_noise_of_threshold_and_argmax_has_the_declared_scale(scale, inside):
    # Oracle: direct summation of the discrete Gaussian mass function at the declared scale.
    stddev, trials, source = 6.0, 6000, SeededSource(11)
    integers = np.arange(-200, 201)
    mass = np.exp(-(integers**2) / (2 * stddev**2))
    mass /= mass.sum()
    passes = mass[20 + integers >= 24].sum()
    difference = np.convolve(mass, mass)
    gaps = np.arange(-400, 401)
    wins = difference[gaps < 5].sum() + difference[gaps == 5].sum() / 2

    def labels(votes_C, *, threshold):
        parameters = ConfidentGnmax(
            threshold=threshold, threshold_stddev_votes=scale * stddev, noise_stddev_votes=scale * stddev
        )
        gate = DemographicParityGate(OPEN, num_groups=1, num_classes=2)
        keys, votes_QC = [str(i) for i in range(trials)], np.tile(votes_C, (trials, 1))
        outcomes = parameters.answer(votes_QC, groups=[0] * trials, keys=keys, gate=gate, source=source)
        return [outcome.label for outcome in outcomes]

    confident = trials - labels([20, 3], threshold=24).count(None)
    won = labels([20, 15], threshold=-math.inf).count(0)
    for count, probability in ((confident, passes), (won, wins)):
        low, high = binomial_interval(probability, trials)
        assert bool(low <= count / trials <= high) is inside


@pytest.mark.parametrize("block_size", [1, 100])
def test_ties_are_broken_without_favour(block_size):
    votes_QC = np.tile([7, 7, 0], (400, 1))
    outcomes, _ = run_stream(votes_QC, np.zeros(400), parameters=NO_NOISE, rule=OPEN, block_size=block_size)
    wins = Counter(outcome.label for outcome in outcomes)
    assert set(wins) == {0, 1}
    low, high = binomial_interval(0.5, 400)
    assert low <= wins[0] / 400 <= high


def test_a_mechanism_says_in_words_what_it_does():
    checked = ConfidentGnmax(threshold=60, threshold_stddev_votes=40, noise_stddev_votes=15)
    assert checked.describe() == "Threshold 60 votes, threshold noise σ₁ = 40 votes, label noise σ₂ = 15 votes"
    unchecked = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=40, noise_stddev_votes=15)
    assert unchecked.describe() == "No check of consensus, label noise σ₂ = 15 votes"
