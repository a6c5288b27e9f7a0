"""Counts as answers: what they say of the label, by enumeration and simulation, what they cost, and who sees them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import ledger_terms
import numpy as np
import pytest

from aggregator.ledger import Ledger
from aggregator.mechanism import ConfidentCounts, ConfidentGnmax, Outcome, label_chances, mechanism_named
from aggregator.service.api import reply_json, statement_json
from aggregator.service.writer import Books
from aggregator.session import AggregatorSession, PublicPool, SessionResult, answer_queries
from aggregator.store import LedgerError
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import SeededSource, discrete_gaussians
from fairpate.types import IntArray, QueryBudget, VoteBatch

pytestmark = pytest.mark.usefixtures("light_runs")

PARAMETERS = {"threshold": 30, "threshold_stddev_votes": 10, "noise_stddev_votes": 6}
COUNTS, LABELS = ConfidentCounts(**PARAMETERS), ConfidentGnmax(**PARAMETERS)
TERMS = dataclasses.replace(
    ledger_terms.TERMS,
    mechanism=COUNTS,
    budget=QueryBudget(kind="data_independent", delta=1e-5, epsilon=20),
    num_classes=4,
    noise=SeededSource(0).label,
)


def random_votes(count: int, *, seed: int = 0) -> IntArray:
    generator = np.random.default_rng(seed)
    return np.array([generator.multinomial(60, generator.dirichlet(np.full(4, 0.4))) for _ in range(count)])


def batch(count: int) -> VoteBatch:
    ids = [str(row) for row in range(count)]
    return VoteBatch(record_ids=ids, groups_Q=np.arange(count) % 2, votes_QC=random_votes(count), ensemble="teachers")


def ask(ledger: Ledger, count: int) -> SessionResult:
    votes = batch(count)
    return answer_queries(
        votes, keys=votes.record_ids, session=AggregatorSession(ledger, source=SeededSource(0)), block_size=7
    )


def by_enumeration(counts_C: IntArray, total: int, stddev: float) -> list[float]:
    """Every table of ``total`` votes is as likely as every other; the label is one more vote."""
    weights, rules = [], []
    for head in itertools.product(range(total + 1), repeat=len(counts_C) - 1):
        if sum(head) <= total:
            votes_C = np.array([*head, total - sum(head)])
            weights.append(math.exp(-((counts_C - votes_C) ** 2).sum() / (2 * stddev**2)))
            rules.append((votes_C + 1) / (total + len(counts_C)))
    return np.average(rules, axis=0, weights=weights).tolist()


@pytest.mark.parametrize(
    ("counts_C", "total", "stddev"),
    [
        ((5, 3), 8, 2.0),
        ((-4, 11), 6, 5.0),
        ((3, 3, 3), 9, 1.5),
        ((-9, 2, 14), 8, 4.0),
        ((0, 0, 12, -7), 10, 3.0),
        ((30, 1, 2), 8, 40.0),
        ((7, 1, 0), 8, 0.3),
    ],
)
def test_chances_are_those_of_all_tables_of_votes(counts_C: tuple[int, ...], total: int, stddev: float) -> None:
    chances_1C = label_chances(np.array([counts_C]), num_teachers=total, noise_stddev_votes=stddev)
    assert chances_1C[0].tolist() == pytest.approx(by_enumeration(np.array(counts_C), total, stddev), rel=1e-9)


@pytest.mark.slow
def test_chances_are_right_as_often_as_they_say() -> None:
    """Shares from the simplex, votes, noise and one more vote, drawn as the model says: chances of a half are right
    half the time. Those for other noise are not."""
    total, stddev, generator = 40, 12.0, np.random.default_rng(0)
    shares_QC = generator.dirichlet(np.ones(3), size=12_000)
    votes_QC = generator.multinomial(total, shares_QC)
    label_Q = (generator.random(len(shares_QC))[:, None] > shares_QC.cumsum(axis=1)).sum(axis=1)
    words = SeededSource(1).machine_words([str(row) for row in range(len(votes_QC))], 3)
    noisy_QC = votes_QC + discrete_gaussians(stddev, words, SeededSource(1))

    def worst_error(factor: float) -> float:
        chances_QC = label_chances(noisy_QC, num_teachers=total, noise_stddev_votes=factor * stddev)
        said_Q, right_Q = chances_QC.ravel(), (label_Q[:, None] == np.arange(3)).ravel()
        bins_Q = np.digitize(said_Q, np.quantile(said_Q, np.linspace(0, 1, 11)[1:-1]))
        return max(abs(said_Q[bins_Q == b].mean() - right_Q[bins_Q == b].mean()) for b in range(10))

    assert worst_error(1.0) < 0.02  # 3,600 draws in a bin: a standard error of 0.008
    assert worst_error(2 / 3) > 0.03
    assert worst_error(3 / 2) > 0.03


@pytest.mark.parametrize(("num_classes", "total", "stddev"), [(100, 200, 50.0), (10, 200, 300.0), (2, 2000, 0.5)])
def test_many_classes_and_much_noise_lose_no_digits(num_classes: int, total: int, stddev: float) -> None:
    """Against sums without transforms, which only add and multiply positive numbers."""
    generator = np.random.default_rng(3)
    votes_C = generator.multinomial(total, generator.dirichlet(np.full(num_classes, 0.3)))
    counts_C = votes_C + np.rint(generator.normal(0, stddev, num_classes)).astype(np.int64)
    chances_1C = label_chances(counts_C[None], num_teachers=total, noise_stddev_votes=stddev)
    votes_K = np.arange(total + 1)
    log_weight_CK = -((counts_C[:, None] - votes_K) ** 2) / (2 * stddev**2)
    weight_CK = np.exp(log_weight_CK - log_weight_CK.max(axis=1, keepdims=True))
    others_K = np.eye(1, total + 1)[0]
    for weight_K in weight_CK[1:]:
        others_K = np.convolve(others_K, weight_K)[: total + 1]
        others_K = others_K / others_K.max()
    joint_K = weight_CK[0] * others_K[::-1]
    expected = (joint_K @ votes_K / joint_K.sum() + 1) / (total + num_classes)
    assert chances_1C[0, 0] == pytest.approx(expected, rel=1e-9)
    assert chances_1C.sum() == pytest.approx(1)


def test_more_votes_mean_a_better_chance_and_counts_alike_an_equal_one() -> None:
    counts_QC = np.random.default_rng(1).integers(-30, 60, size=(200, 5))
    counts_QC[:, 1] = counts_QC[:, 0]
    chances_QC = label_chances(counts_QC, num_teachers=50, noise_stddev_votes=20.0)
    assert np.allclose(chances_QC[:, 0], chances_QC[:, 1])
    rows = np.arange(200)[:, None]
    assert (np.diff(chances_QC[rows, counts_QC.argsort(axis=1)], axis=1) > -1e-12).all()


@pytest.mark.parametrize(
    ("counts_QC", "options", "message"),
    [
        (np.zeros((3, 1), dtype=np.int64), {}, r"at least two classes, got shape \(3, 1\)"),
        (np.zeros((3, 2), dtype=np.int64), {"num_teachers": 0}, "num_teachers >= 1"),
        (np.zeros((3, 2), dtype=np.int64), {"noise_stddev_votes": 0.0}, "noise_stddev_votes > 0"),
    ],
)
def test_counts_that_say_nothing_are_refused(counts_QC: IntArray, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        label_chances(counts_QC, **{"num_teachers": 5, "noise_stddev_votes": 1.0, **options})  # type: ignore[arg-type]
    assert label_chances(counts_QC[:0, :].repeat(2, axis=1), num_teachers=5, noise_stddev_votes=1.0).shape[0] == 0


def test_labels_are_those_of_confident_gnmax_and_come_with_their_counts() -> None:
    votes_QC, keys = random_votes(200), [str(row) for row in range(200)]
    outcomes: dict[str, list[Outcome]] = {}
    for mechanism in (LABELS, COUNTS):
        outcomes[mechanism.name] = mechanism.answer(
            votes_QC,
            groups=[row % 2 for row in range(200)],
            keys=keys,
            gate=DemographicParityGate(TERMS.gate, num_groups=2, num_classes=4),
            source=SeededSource(0),
        )
    with_counts = outcomes[COUNTS.name]
    assert [dataclasses.replace(reply, counts=None) for reply in with_counts] == outcomes[LABELS.name]
    assert {reply.verdict for reply in with_counts} == {"answer", "confidence", "fairness"}
    for reply in with_counts:
        assert (reply.counts is None) == (reply.label is None)
        if reply.counts is not None:
            assert reply.counts[reply.label or 0] == max(reply.counts)
    answered = [row for row, reply in enumerate(with_counts) if reply.counts is not None]
    noise = np.array([with_counts[row].counts for row in answered]) - votes_QC[answered]
    # Given that the largest won, noise is still near its scale; without noise it would be 0.
    assert 0.9 < noise.std() / 6 < 1.1


def test_no_price_depends_on_votes() -> None:
    votes_QC = random_votes(20)
    assert COUNTS.realised(votes_QC) == COUNTS.worst_case(20) == LABELS.worst_case(20)
    curve_A = accountant.rdp([COUNTS.worst_case(20)])
    assert COUNTS.as_in_paper_rdp(votes_QC, rejected_Q=np.zeros(20, dtype=np.bool_)) == pytest.approx(curve_A)
    assert (accountant.rdp_data_dependent([LABELS.realised(votes_QC)]) < curve_A).any()
    with pytest.raises(ValueError, match="releases labels only"):
        LABELS.chances(votes_QC, num_teachers=60)


def test_one_vote_moves_counts_by_what_the_price_is_for() -> None:
    """Between all neighbours the Gaussian curve of the noisy counts is alpha |d|^2 / (2 sigma^2) with |d|^2 <= 2."""
    votes_C = np.array([3, 2, 1])
    moved = [votes_C - np.eye(3, dtype=int)[a] + np.eye(3, dtype=int)[b] for a in range(3) for b in range(3)]
    largest = max(int(((other - votes_C) ** 2).sum()) for other in moved)
    check = max(abs(int(other.max()) - 3) for other in moved)
    orders = np.array([2.0, 8.0])
    expected = orders * (largest / (2 * 6**2) + check**2 / (2 * 10**2))
    np.testing.assert_allclose(accountant.rdp([COUNTS.worst_case(1)], orders), expected)


def test_what_is_released_is_asked_for_by_name() -> None:
    assert mechanism_named("confident_gnmax", PARAMETERS) == LABELS
    assert mechanism_named("confident_counts", PARAMETERS) == COUNTS
    assert COUNTS.scaled(2).noise_stddev_votes == 12
    assert COUNTS.describe().endswith("label noise σ₂ = 6 votes, noisy counts released with every label")


def test_counts_teach_and_come_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, TERMS) as ledger:
        first = ask(ledger, 50)
    with Ledger(path, TERMS, create=False) as ledger:
        again = ask(ledger, 50)
    labelled = first.labelled
    assert labelled.counts is not None
    assert labelled.chances is not None
    assert labelled.counts.shape == labelled.chances.shape == (len(labelled.labels), 4)
    assert 0 < len(labelled.labels) < 50
    np.testing.assert_array_equal(labelled.counts.argmax(axis=1), labelled.labels)
    np.testing.assert_array_equal(labelled.counts, again.labelled.counts)
    np.testing.assert_array_equal(
        labelled.chances, label_chances(labelled.counts, num_teachers=60, noise_stddev_votes=6)
    )
    with Ledger(tmp_path / "labels.sqlite", dataclasses.replace(TERMS, mechanism=LABELS)) as ledger:
        plain = ask(ledger, 50).labelled
    assert plain.labels.tolist() == labelled.labels.tolist()
    assert plain.counts is None
    assert plain.chances is None


def test_what_a_ledger_releases_is_fixed_when_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, dataclasses.replace(TERMS, mechanism=LABELS)).close()
    with pytest.raises(LedgerError, match=r"mechanism = .*confident_gnmax.*confident_counts"):
        Ledger(path, TERMS)


def test_the_service_tells_the_label_and_its_lead(tmp_path: Path) -> None:
    answered = Outcome(verdict="answer", label=2, counts=(1, 2, 30, 4))
    pool = PublicPool(
        features=np.zeros((1, 2), dtype=np.float32),
        groups_N=np.zeros(1, dtype=np.int64),
        record_ids=("0",),
        group_names=("a", "b"),
        label_names=("w", "x", "y", "z"),
    )
    with Ledger(tmp_path / "ledger.sqlite", TERMS) as ledger:
        books = Books(ledger=ledger, session=AggregatorSession(ledger, source=SeededSource(0)))
        assert statement_json(pool, books.snapshot())["mechanism"] == {"name": "confident_counts", **PARAMETERS}
        told = {"key": "key", "status": "answered", "label": 2, "free": False, "lead": 26, "stands_out": True}
        assert reply_json("key", answered, books) == told
        refused = {"status": "refused", "label": None, "lead": None, "stands_out": None}
        assert reply_json("key", Outcome(verdict="fairness"), books) == told | refused
