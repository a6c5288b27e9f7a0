"""One weighted vote per record: what one record moves, what is noised, and what the released sums say."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fairpate.config import ConfigError, DataConfig, EmbeddingConfig, LoopConfig
from fairpate.data import Dataset, load_data
from fairpate.methods import record_votes
from fairpate.methods.base import configured
from fairpate.methods.record_votes import UNITS, WeightedBallot, balancing_weights, labels_of_sums, matched_rule
from fairpate.nn.fit import hard_disparity
from fairpate.nn.models import scale_bytes
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import VoteSums
from fairpate.releases.directory import RunDirectory, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture(scope="module")
def ballot(digits: Dataset) -> WeightedBallot:
    return WeightedBallot.of(digits, EmbeddingConfig())


SMALL: dict[str, Any] = {"graph_share": 0.0}  # fitted in less time


def settings(out: Path, accounting: str = "rdp", **changed: Any) -> Any:
    values = {
        "noise": "seeded",
        "target": {"epsilon": 2.0, "accounting": accounting},
        "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
        "student": {"model": {"name": "logistic"}, "fit": {"epochs": 2}},
        "weighted_votes": changed,
    }
    return configured(values, [f"out={out}"], method="weighted_votes")


def run(config: Any, dataset: Dataset) -> RunDirectory:
    return run_method(config, Reporter(quiet=True), dataset)


def test_one_record_moves_one_row_by_at_most_the_norm_and_nothing_else(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is equal in both runs, so that tables differ by what the record did."""
    tables: list[npt.NDArray[np.int64]] = []
    release = record_votes.with_noise

    def watched(*values: Any, **named: Any) -> Any:
        tables.append(release(*values, **named))
        return tables[-1]

    monkeypatch.setattr(record_votes, "with_noise", watched)
    smaller = dataclasses.replace(digits, private=digits.private.take(range(1, len(digits.private))))
    statements = [
        read_statement(run(settings(tmp_path / name, embedding=SMALL), dataset))
        for name, dataset in (("a", digits), ("b", smaller))
    ]
    moved, ballot = tables[0] - tables[1], WeightedBallot.of(digits, EmbeddingConfig(**SMALL))
    label = int(digits.private.y[0])
    np.testing.assert_array_equal(moved[label], ballot.votes(digits.private.x[:1])[0])
    assert not np.delete(moved, label, axis=0).any()
    assert 0 < (moved**2).sum() <= UNITS**2
    assert statements[0].events == statements[1].events
    assert statements[0].epsilon == statements[1].epsilon <= 2


def test_a_vote_is_short_and_its_own_record_s_affair(ballot: WeightedBallot, digits: Dataset) -> None:
    private = digits.private.x
    votes = ballot.votes(private)
    assert ((votes**2).sum(axis=1) <= UNITS**2).all()
    assert (votes[:, 0] == votes[0, 0]).all()
    for part in (slice(0, 1), slice(3, 9), slice(1, None)):
        np.testing.assert_array_equal(ballot.votes(private[part]), votes[part])


def test_no_record_whatever_it_says_votes_longer_than_one(digits: Dataset) -> None:
    for kind in (torch.full((3, 40), 1e30), torch.full((3, 40), -3e38), torch.zeros(3, 40)):
        assert ((WeightedBallot(embedding=None).votes(kind).astype(object) ** 2).sum(axis=1) <= UNITS**2).all()


def test_the_table_is_the_sum_of_votes_by_label(ballot: WeightedBallot, digits: Dataset, monkeypatch: Any) -> None:
    labels = digits.private.y.numpy()
    votes = ballot.votes(digits.private.x)
    expected = np.stack([votes[labels == c].sum(axis=0) for c in range(10)])
    monkeypatch.setattr(record_votes, "_AT_ONCE", 100)
    np.testing.assert_array_equal(ballot.table(digits.private.x, labels, num_classes=10), expected)
    nobody = ballot.table(digits.private.x[:0], labels[:0], num_classes=10)
    np.testing.assert_array_equal(nobody, np.zeros_like(expected))


def test_the_event_is_that_of_the_noise_that_was_added(digits: Dataset, tmp_path: Path) -> None:
    statement = read_statement(run(settings(tmp_path / "run", accounting="pld", embedding=SMALL), digits))
    (event,) = statement.events
    assert (event["norm"], event["count"], event["kind"]) == (UNITS, 1, "VoteSums")
    stated = VoteSums(count=1, noise_stddev_votes=event["noise_stddev_votes"], norm=event["norm"])
    assert statement.epsilon == pytest.approx(accountant.epsilon_pld([stated], target_delta=1e-5))
    assert 1.9 < statement.epsilon <= 2


def test_noise_reaches_every_number_also_of_classes_that_nobody_has(digits: Dataset, tmp_path: Path) -> None:
    empty = np.zeros((4, 500), dtype=np.int64)
    noisy = record_votes.with_noise(empty, stddev=30.0 * UNITS, source=settings(tmp_path / "x").source, row="class")
    assert noisy.std() == pytest.approx(30 * UNITS, rel=0.1)
    assert abs(noisy.mean()) < 4 * 30 * UNITS / math.sqrt(noisy.size)
    assert len(np.unique(noisy)) > 1990


def test_without_noise_and_on_the_same_records_it_is_logistic_regression() -> None:
    generator = np.random.default_rng(0)
    phi = np.hstack([np.ones((600, 1)), generator.normal(size=(600, 3))])
    label = (phi @ [0.2, 1.0, -1.0, 0.0] + generator.logistic(size=600) > 0).astype(int)
    moments = np.stack([phi[label == c].sum(axis=0) for c in (0, 1)]) / len(phi)
    even = np.full(len(phi), 1 / len(phi))
    rule = matched_rule(phi, moments, even, ridge=1e-6)
    theirs = LogisticRegression(C=1e6, fit_intercept=False, tol=1e-8, max_iter=1000).fit(phi, label)
    np.testing.assert_allclose(rule[1] - rule[0], theirs.coef_[0], atol=5e-3)
    shrunk = matched_rule(phi, moments, even, ridge=10.0)
    assert np.abs(shrunk).max() < 0.2 * np.abs(rule).max()


def test_public_records_are_weighted_until_their_mean_is_that_of_the_private_ones() -> None:
    generator = np.random.default_rng(1)
    phi = np.hstack([np.ones((4000, 1)), generator.normal(size=(4000, 2))])
    weights = balancing_weights(phi, np.array([1.0, 0.4, -0.2]), ridge=1e-6)
    np.testing.assert_allclose(weights @ phi, [1.0, 0.4, -0.2], atol=1e-3)
    assert weights.sum() == pytest.approx(1)
    # Gaussians of unit spread that are tilted by t are shifted by t.
    expected = np.exp(phi[:, 1:] @ [0.4, -0.2])
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=0.2)
    even = balancing_weights(phi, np.array([1.0, 0.4, -0.2]), ridge=1e3)
    np.testing.assert_allclose(even, 1 / len(phi), rtol=1e-2)


def test_a_pool_that_is_not_like_the_private_records_costs_less_with_weights() -> None:
    """Public records lie elsewhere: without weights the rule is that of other records."""
    generator = np.random.default_rng(2)

    def records(shift: float) -> npt.NDArray[np.int64]:
        x = np.clip(generator.normal(loc=(shift, -shift, 0, 0), size=(3000, 4)), -3, 3) / 8
        return np.rint(np.hstack([np.full((3000, 1), 0.5), x]) * UNITS).astype(np.int64)

    private, pool = records(1.0), records(0.0)
    label = (private @ [-0.4, 0.8, 0.0, 0.8, 0.0] > 0).astype(int)
    sums = np.stack([private[label == c].sum(axis=0) for c in (0, 1)])
    truth = (pool @ [-0.4, 0.8, 0.0, 0.8, 0.0] > 0).astype(int)
    said = labels_of_sums(sums, pool, stddev=0.5, ridge=2.0)
    even = np.full(len(pool), 1 / len(pool))
    unweighted = matched_rule(pool / UNITS, sums / UNITS / 3000, even, ridge=1.0 / 3000)
    right, right_unweighted = ((labels == truth).mean() for labels in (said.labels_M, (pool @ unweighted.T).argmax(1)))
    assert right > 0.9 > right_unweighted


def test_labels_of_the_pool_are_right_without_noise_and_useless_in_too_much_of_it(
    ballot: WeightedBallot, digits: Dataset
) -> None:
    sums = ballot.table(digits.private.x, digits.private.y.numpy(), num_classes=10)
    pool = ballot.votes(digits.public.x)
    truth = digits.public.y.numpy()
    said = labels_of_sums(sums, pool, stddev=1e-3, ridge=2.0)
    assert (said.labels_M == truth).mean() > 0.8
    assert said.chances_MC is not None
    np.testing.assert_allclose(said.chances_MC.sum(axis=1), 1.0)
    sure = said.certainty_M >= np.median(said.certainty_M)
    assert (said.labels_M == truth)[sure].mean() > (said.labels_M == truth)[~sure].mean()
    noise = np.random.default_rng(0).normal(size=sums.shape) * 3000 * UNITS
    drowned = labels_of_sums(sums + noise.astype(np.int64), pool, stddev=3000.0, ridge=2.0)
    assert (drowned.labels_M == truth).mean() < 0.4


def test_an_embedding_of_the_data_set_is_what_votes(tmp_path: Path) -> None:
    dataset = load_data(DataConfig(embedding=EmbeddingConfig(num_components=12, graph_share=0.0)))
    own = WeightedBallot.of(dataset, EmbeddingConfig())
    assert own.embedding is None
    assert own.votes(dataset.private.x).shape[1] == 13


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": {"epsilon": 50.0}}, "target.epsilon"),
        ({"target": {"epsilon": 1.0, "relation": "replace one"}}, "target.relation"),
        ({"weighted_votes": {"ridge": 0.0}}, "weighted_votes.ridge"),
        ({"data": {"embedding": {"num_components": 0}}}, "data.embedding.num_components"),
    ],
)
def test_settings_that_cannot_be_are_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(changed, [f"out={tmp_path / 'run'}"], method="weighted_votes").require_trainable()


def test_a_penalty_narrows_the_gap_of_the_student_and_costs_nothing(digits: Dataset, tmp_path: Path) -> None:
    gaps, told = [], []
    for number, penalty in enumerate((None, {"weight": 0.0}, {"weight": 80.0})):
        config = settings(tmp_path / str(number), penalty=penalty, embedding=SMALL)
        student = config.student.model_copy(update={"fit": LoopConfig(epochs=20)})
        config = config.model_copy(update={"student": student})
        done = run(config, digits)
        told.append(read_statement(done))
        with torch.no_grad():
            network = load_student(done.student).network
            gaps.append(hard_disparity(network(scale_bytes(digits.public.x)), digits.public.z))
    assert gaps[0] == gaps[1]
    assert gaps[2] < 0.7 * gaps[0]
    assert told[0] == told[1] == told[2]
