"""A rule from noisy counts or labels: what it converges to, whose records its table depends on, and what both releases
cost."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from method_kinds import quick_and_slow
from scipy.stats import norm

from fairpate.config import ConfigError, DataConfig, EmbeddingConfig
from fairpate.data import Dataset, load_data
from fairpate.methods.base import Training, configured
from fairpate.methods.defaults import multiplier_within
from fairpate.methods.noisy_counts import (
    _POWERS,
    _SCALES,
    _UNEXPLAINED,
    Bins,
    NoisyCounts,
    ServiceRule,
    ThresholdsConfig,
    fitted_rule,
    offsets_of,
    table_event,
)
from fairpate.methods.record_votes import UNITS, WeightedBallot
from fairpate.methods.voting import ReleasedLabels, VotingMethod
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import VoteSums
from fairpate.releases.directory import RunDirectory
from fairpate.types import IntArray
from tests.methods.test_teacher_votes import QUIET, dataset, records

pytestmark = pytest.mark.usefixtures("light_runs")

BALLOT = WeightedBallot(embedding=None)
DRAWS = np.random.default_rng(0)
POOL = BALLOT.votes(torch.from_numpy(DRAWS.normal(size=(900, 5)) * [2.0, 1.0, 0.5, 0.3, 0.1]))
RULE = np.array([[0.1, 0.5, -0.2, 0.1, 0.3, 0.0], [-0.1, -0.5, 0.2, -0.1, -0.3, 0.0]])


def counts_of(rule_CW: np.ndarray, num_voters: int) -> np.ndarray:
    shares = 1 / len(rule_CW) + POOL / UNITS @ rule_CW.T
    return np.rint(shares * num_voters).astype(np.int64)


def test_without_noise_it_is_least_squares_of_the_shares() -> None:
    counts_QC = counts_of(RULE, 10**9)
    found_CW = fitted_rule(POOL, counts_QC, num_voters=10**9, noise_stddev_votes=1.0)
    expected_WC = np.linalg.lstsq(POOL / UNITS, counts_QC / 10**9, rcond=None)[0]
    # The constant of a vote is rounded, and the prior is wide but finite.
    np.testing.assert_allclose(POOL / UNITS @ found_CW.T, POOL / UNITS @ expected_WC, atol=1e-4)


def test_noise_of_the_size_of_the_leads_averages_out_and_pure_noise_gives_no_rule() -> None:
    exact = POOL / UNITS @ (RULE[0] - RULE[1])
    noise = exact.std() * 2000  # on a share of 2,000 votes: as large as what is to be found
    noisy = counts_of(RULE, 2000) + np.rint(np.random.default_rng(1).normal(0, noise, (900, 2))).astype(np.int64)
    found_CW = fitted_rule(POOL, noisy, num_voters=2000, noise_stddev_votes=noise)
    said = POOL / UNITS @ (found_CW[0] - found_CW[1])
    assert np.corrcoef(said, exact)[0, 1] > 0.95
    # A single query is right far less often than the rule.
    assert ((said > 0) == (exact > 0)).mean() > 0.93 > 0.85 > ((noisy[:, 0] > noisy[:, 1]) == (exact > 0)).mean()
    nothing = np.rint(np.random.default_rng(2).normal(1000, noise, (900, 2))).astype(np.int64)
    flat_CW = fitted_rule(POOL, nothing, num_voters=2000, noise_stddev_votes=noise)
    assert (POOL / UNITS @ (flat_CW[0] - flat_CW[1])).std() < 0.1 * exact.std()


def of_labels(labels_Q: np.ndarray, num_classes: int = 2) -> np.ndarray:
    answers = NoisyCounts.of_labels(labels_Q, [str(row) for row in range(len(labels_Q))], num_classes=num_classes)
    found_CW = fitted_rule(
        POOL[: len(labels_Q)], answers.counts_QC, num_voters=answers.num_voters, noise_stddev_votes=None
    )
    assert np.isfinite(found_CW).all()
    return found_CW


@pytest.mark.parametrize("num_classes", [2, 3])
def test_labels_that_no_noise_reverses_give_ridge_regression_of_one_hot_labels(num_classes: int) -> None:
    """The posterior mean of a Gaussian process with a linear kernel, whose hyperparameters have the largest density of
    the labels: by Cholesky factors of whole covariances, without components."""
    # Of three classes the last one never has the most votes.
    labels, x_QD = (POOL[:90] / UNITS @ RULE.T).argmax(axis=1), POOL[:90, 1:] / UNITS
    one_hot_QC, x_QD = np.eye(num_classes)[labels], x_QD - x_QD.mean(axis=0)
    centred_QC = one_hot_QC - one_hot_QC.mean(axis=0)
    variances_D, axes_DD = np.linalg.eigh(x_QD.T @ x_QD / 90)
    contrasts_QN = scipy.linalg.null_space(np.ones((1, 90)))
    best, expected_QC = -math.inf, one_hot_QC
    for power, share in itertools.product(_POWERS, _UNEXPLAINED):
        prior_D = variances_D**power / (variances_D**power).mean() / variances_D
        kernel_QQ = (x_QD @ axes_DD * prior_D) @ (x_QD @ axes_DD).T
        rest = one_hot_QC.var(axis=0).mean() * share
        for scale in _SCALES:
            cov_QQ = scale * kernel_QQ + rest * np.eye(90)
            of_contrasts = scipy.linalg.cho_factor(contrasts_QN.T @ cov_QQ @ contrasts_QN)
            seen_NC = contrasts_QN.T @ one_hot_QC
            density = -num_classes * np.log(np.diag(of_contrasts[0])).sum()
            density -= (seen_NC * scipy.linalg.cho_solve(of_contrasts, seen_NC)).sum() / 2
            if density > best:
                best = density
                expected_QC = one_hot_QC.mean(axis=0) + scale * kernel_QQ @ np.linalg.solve(cov_QQ, centred_QC)
    found_CW = of_labels(labels, num_classes)
    np.testing.assert_allclose(POOL[:90] / UNITS @ found_CW.T, expected_QC, atol=1e-8)
    np.testing.assert_array_equal(found_CW, of_labels(labels, num_classes))


def test_labels_of_which_hardly_seven_in_ten_are_right_show_nearly_what_counts_show() -> None:
    draws, exact = np.random.default_rng(1), POOL / UNITS @ (RULE[0] - RULE[1])
    noise = 1.5 * exact.std() * 2000
    noisy = counts_of(RULE, 2000) + np.rint(draws.normal(0, noise, (900, 2))).astype(np.int64)
    labels, truth = noisy.argmax(axis=1), (exact < 0).astype(np.int64)
    assert 0.6 < (labels == truth).mean() < 0.75
    said = [
        POOL / UNITS @ (rule_CW[0] - rule_CW[1])
        for rule_CW in (fitted_rule(POOL, noisy, num_voters=2000, noise_stddev_votes=noise), of_labels(labels))
    ]
    alike = [float(np.corrcoef(each, exact)[0, 1]) for each in said]
    assert alike[1] > 0.93
    assert alike[1] > alike[0] - 0.04
    nothing = of_labels(draws.integers(0, 2, 900))
    assert (POOL / UNITS @ (nothing[0] - nothing[1])).std() < 0.15


def test_equal_labels_show_how_common_a_class_is_and_no_direction() -> None:
    for row in (1, 2):
        scores = POOL / UNITS @ of_labels(np.full(900, row), 3).T
        np.testing.assert_allclose(scores, np.broadcast_to(np.eye(3)[row], scores.shape), atol=1e-3)
    of_labels(np.array([0]))  # a single answer
    # Thresholds then show the share of the class among private records, whichever label was released.
    bins = Bins.of(of_labels(np.full(900, 0)), POOL, num_bins=24)
    exact = bins.table(POOL, (np.arange(900) % 4 > 0).astype(np.int64))
    rule_CW = bins.calibrated(exact, table_event("record", noise_multiplier=1.0))
    chances = scipy.special.softmax(POOL / UNITS @ rule_CW.T, axis=1)
    np.testing.assert_allclose(chances[:, 1], 0.75, atol=0.01)
    assert ((POOL / UNITS @ bins.uncalibrated().T).argmax(axis=1) == 0).all()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_record_is_in_one_cell_whichever_others_there_are(num_classes: int) -> None:
    rule_CW = np.random.default_rng(3).normal(size=(num_classes, 6))
    bins = Bins.of(rule_CW, POOL, num_bins=24)
    assert bins.centre_KC.shape == (24, num_classes)
    private = BALLOT.votes(torch.from_numpy(np.random.default_rng(4).normal(size=(60, 5)) * 3))
    labels = np.random.default_rng(5).integers(0, num_classes, 60)
    alone = np.concatenate([bins.numbers(private[row : row + 1]) for row in range(60)])
    np.testing.assert_array_equal(bins.numbers(private), alone)
    whole = bins.table(private, labels)
    assert whole.sum() == 60
    for row in range(60):
        others = np.arange(60) != row
        moved = whole - bins.table(private[others], labels[others])
        assert sorted(moved.ravel().tolist())[-2:] == [0, 1]
        assert moved.sum() == 1


def test_a_person_has_one_unit_of_mass_however_many_records() -> None:
    bins = Bins.of(np.random.default_rng(3).normal(size=(2, 6)), POOL, num_bins=24)
    private = BALLOT.votes(torch.from_numpy(np.random.default_rng(4).normal(size=(60, 5)) * 3))
    labels, person = np.random.default_rng(5).integers(0, 2, 60), np.minimum(np.arange(60) // 3, 11)  # one has 27
    whole, norms = bins.table(private, labels, person), []
    for each in range(12):
        kept = person != each
        moved = whole - bins.table(private[kept], labels[kept], person[kept])
        assert (moved >= 0).all()
        norms.append(np.linalg.norm(moved))
    unit = table_event("person", noise_multiplier=1.0).noise_stddev_votes
    assert max(norms) <= unit
    # Three records in one cell have nearly all of the unit: the bound is not loose.
    assert max(norms) > 0.5 * unit


@pytest.mark.parametrize("by_person", [False, True])
def test_thresholds_find_how_common_classes_are(by_person: bool) -> None:
    """Labels of known probabilities: the rule's score is right up to an intercept and a scale."""
    draws = np.random.default_rng(6)
    private = BALLOT.votes(torch.from_numpy(draws.normal(size=(20_000, 5)) * [2.0, 1.0, 0.5, 0.3, 0.1]))
    logit = 3 * (private / UNITS @ (RULE[1] - RULE[0])) - 2
    labels = (draws.random(20_000) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    bins = Bins.of(RULE, POOL, num_bins=24)
    event = table_event("person" if by_person else "record", noise_multiplier=5.0)
    exact = bins.table(private, labels, np.arange(20_000) if by_person else None)
    noisy = exact + np.rint(draws.normal(0, event.noise_stddev_votes, exact.shape)).astype(np.int64)
    rule_CW = bins.calibrated(noisy, event)
    said = private / UNITS @ (rule_CW[1] - rule_CW[0])
    assert np.abs(said - logit).mean() < 0.15
    # Without the table a record has the label with the larger score, which is right for the direction alone.
    plain = (private / UNITS @ bins.uncalibrated().T).argmax(axis=1)
    assert (plain == (private / UNITS @ RULE.T).argmax(axis=1)).mean() > 0.999
    assert plain.mean() > 0.4 > 2 * labels.mean()


def test_a_table_of_nothing_but_noise_leaves_a_finite_rule() -> None:
    bins = Bins.of(RULE, POOL, num_bins=24)
    for seed in range(20):
        noisy = np.rint(np.random.default_rng(seed).normal(0, 1000, (24, 2))).astype(np.int64)
        rule_CW = bins.calibrated(noisy, table_event("record", noise_multiplier=1000.0))
        assert np.isfinite(rule_CW).all()
        shares = (POOL / UNITS @ rule_CW.T).argmax(axis=1).mean()
        assert 0 <= shares <= 1


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of mu-Gaussian privacy, by bisection (Balle and Wang 2018, Theorem 8)."""
    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        spent = norm.cdf(-middle / mu + mu / 2) - math.exp(middle) * norm.cdf(-middle / mu - mu / 2)
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


@pytest.mark.parametrize(("epsilon", "share"), [(0.3, 0.1), (1.0, 0.1), (3.0, 0.4)])
def test_counts_and_table_together_cost_the_target(epsilon: float, share: float) -> None:
    settings = {"thresholds": {"share": share}, "target": {"epsilon": epsilon}, "ray": {"num_actors": 0}}
    values = {"teachers": {"model": "ridge", "num_teachers": 1000}, "aggregator": {"release": "counts"}}
    values["aggregator"]["mechanism"] = {"threshold": -math.inf, "noise_stddev_votes": 50}
    config = configured(values | settings, method="fairpate")
    assert isinstance(config, VotingMethod)
    plan = config.plan(dataset(records(0, 90)))
    counts, table = plan.worst_case(45)
    assert accountant.epsilon([counts, table], target_delta=1e-5).epsilon == pytest.approx(epsilon, rel=2e-3)
    # One voter moves two counts of every query; one record one cell. The Renyi bound is a little above the exact cost.
    squared = 2 * 45 / plan.mechanism.noise_stddev_votes**2 + 1 / table.noise_stddev_votes**2
    assert 0.85 * epsilon < gaussian_epsilon(math.sqrt(squared), 1e-5) <= epsilon
    assert 1 / table.noise_stddev_votes**2 / squared == pytest.approx(share, rel=0.02)
    assert plan.count_fitting() == 45
    terms = plan.terms("somebody")
    assert terms.from_json(terms.to_json()) == terms
    assert terms.beside == (table,)


@pytest.mark.parametrize("by_person", [False, True])
def test_no_neighbour_of_a_tiny_data_set_moves_both_releases_by_more_than_the_target(
    by_person: bool, tmp_path: Path
) -> None:
    """Brute force over everybody: votes of retrained teachers, and the table on bins of the same released counts."""
    private = records(0, 15, persons=by_person)
    units = sorted(set(private.person_id if by_person else private.record_id))
    data, config = dataset(private), small_teachers("fairpate", "counts", num_queries=20)
    assert data.unit == ("person" if by_person else "record")
    config = config.model_copy(update={"teachers": config.teachers.model_copy(update={"num_teachers": 8})})
    plan, (event,) = config.plan(data), config.beside(data)
    noise = plan.mechanism.noise_stddev_votes

    def votes(split: Any, name: str) -> IntArray:
        neighbour = dataclasses.replace(data, private=split)
        return config.collect_votes(neighbour, plan.queries, tmp_path / name, QUIET).votes_QC

    whole, draws = votes(private, "whole"), np.random.default_rng(2)
    # Few and many released counts that another draw of the noise may show: the bins of the table follow from them.
    released = [whole + np.rint(draws.normal(0, scale, whole.shape)).astype(np.int64) for scale in (0, 1, noise)]
    worst = 0.0
    for unit in units:
        others = [row for row, name in enumerate(private.person_id or private.record_id) if name != unit]
        squared = np.square(whole - votes(private.take(others), unit)).sum() / noise**2
        for counts_QC in released:
            counts = NoisyCounts(
                counts_QC=counts_QC, record_ids=plan.queries.record_id, num_voters=8, noise_stddev_votes=noise
            )
            with_all, without_unit = (
                counts.table(
                    dataclasses.replace(data, private=split), event, config.thresholds, lambda exact_KC, **_: exact_KC
                )
                for split in (private, private.take(others))
            )
            moved = np.square(with_all - without_unit).sum() / event.noise_stddev_votes**2
            worst = max(worst, squared + moved)
    # Gaussian releases whose settings follow from earlier ones compose by the sum of mu squared (Dong et al. 2022).
    spent = gaussian_epsilon(math.sqrt(worst), config.target.delta)
    assert 0.5 * config.target.epsilon < spent <= config.target.epsilon


def small_teachers(method: str, release: str, **aggregator: Any) -> Any:
    values = {"teachers": {"model": "ridge", "num_teachers": 250}, "ray": {"num_actors": 0}, "noise": "seeded"}
    asked = {"release": release, "mechanism": {"threshold": -math.inf, "noise_stddev_votes": 50}} | aggregator
    learning = {"student": {"model": "logistic", "fit": {"epochs": 40, "learning_rate": 0.05}}}
    return configured(
        values | learning | {"aggregator": asked, "target": {"epsilon": 0.5}, "thresholds": {"num_bins": 8}},
        method=method,
    )


@pytest.mark.parametrize("release", ["counts", "label"])
@pytest.mark.parametrize("method", ["fairpate", "pate", "pate_s_pre", "pate_s_in"])
def test_students_learn_from_all_answers_of_small_teachers(method: str, release: str, tmp_path: Path) -> None:
    """Also without the queries that the gate refused, which nobody sees."""
    gate = {} if method in ("pate", "pate_s_in") else {"gate": {"max_disparity": 0.1, "min_count": 10}}
    config, data = small_teachers(method, release, **gate), dataset(records(0, 3000))
    run = RunDirectory(root=tmp_path)
    for folder in (run.public, run.private):
        folder.mkdir()
    training = Training(dataset=data, model=torch.nn.Linear(3, 2), run=run, reporter=QUIET, seed=0)
    labels = config.release(training)
    assert isinstance(labels, ReleasedLabels) and labels.queries is not None
    answered = len(labels.labelled.labels)
    assert (answered < labels.queries.submitted) == (method == "fairpate")
    assert (labels.labelled.counts is None) == (release == "label")
    assert labels.table_KC is not None and labels.table_KC.shape == (8, 2)
    truth = (data.public.x[:, 0] > 0).long().numpy()
    row_of = {name: row for row, name in enumerate(data.public.record_id)}
    rows = [row_of[name] for name in labels.labelled.record_ids]
    assert (labels.labelled.labels == truth[rows]).mean() < 0.95
    said = config.said(training, labels)
    assert len(said.labels) == len(truth)
    assert (said.labels == truth).mean() > 0.85
    fresh = records(50_000, 1000)
    model = config.learn(training, labels).model
    assert (model(fresh.x).argmax(dim=1) == fresh.y).float().mean() > 0.8


def test_labels_cost_what_counts_cost_with_the_table_and_without() -> None:
    data = dataset(records(0, 300))
    for share in (0.0, 0.1):
        plans = []
        for release in ("counts", "label"):
            config = small_teachers("pate", release)
            config = config.model_copy(update={"thresholds": config.thresholds.model_copy(update={"share": share})})
            plans.append(config.plan(data))
        costs = [accountant.least_epsilon(plan.worst_case(45), target_delta=1e-5) for plan in plans]
        assert costs[0] == costs[1] <= 0.5
        assert vars(plans[0].mechanism) == vars(plans[1].mechanism)
        assert len(plans[1].beside) == (share > 0)


def test_a_table_alone_costs_the_target_and_a_person_pays_as_a_record() -> None:
    multiplier = multiplier_within(1.0, 1e-5)
    record, person = (table_event(unit, noise_multiplier=multiplier) for unit in ("record", "person"))
    assert accountant.epsilon([record], target_delta=1e-5).epsilon == pytest.approx(1, rel=2e-3)
    assert isinstance(person, VoteSums)
    assert accountant.epsilon([person], target_delta=1e-5).epsilon == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["teachers.model=mlp"], "teachers.model"),
        (["target.epsilon=null"], "target.epsilon"),
    ],
)
def test_thresholds_that_are_not_released_are_refused(overrides: list[str], cause: str) -> None:
    small = {"teachers": {"model": "ridge"}, "aggregator": {"release": "counts"}, "target": {"epsilon": 1.0}}
    with pytest.raises(ConfigError, match=f"thresholds.num_bins: not read because of {cause}"):
        configured(small, [*overrides, "thresholds.num_bins=12"], method="fairpate")


@pytest.mark.parametrize("stddev", quick_and_slow([0.02, 0.1, 0.3], [0.1]))
def test_offsets_make_noisy_shares_right_as_often_as_any_offset_does(stddev: float) -> None:
    """On two classes, of which one is as rare as on tables of people, against every offset of a fine grid."""
    share_M = np.random.default_rng(3).normal(0.2, 0.06, 4000)
    shares_MC = np.stack([1 - share_M, share_M], axis=1)
    right_M = 1 / (1 + np.exp(-(share_M - 0.25) * 60))
    chances_MC = np.stack([1 - right_M, right_M], axis=1)

    def right(offset: float) -> float:
        says_one_M = norm.cdf((2 * share_M - 1 + offset) / (math.sqrt(2) * stddev))
        return float((says_one_M * right_M + (1 - says_one_M) * (1 - right_M)).mean())

    zero, found = offsets_of(chances_MC, shares_MC, stddev=stddev)
    assert zero == 0
    best = max(map(right, np.linspace(-1, 2, 3001)))
    assert best - 0.002 < right(found) <= best
    if stddev < 0.3:
        assert right(found) > right(0.0) + 0.02, "without offsets one class has all answers"
    np.testing.assert_array_equal(offsets_of(chances_MC, shares_MC, stddev=stddev), [zero, found])


def test_offsets_of_more_classes_undo_what_their_votes_lack() -> None:
    generator = np.random.default_rng(4)
    chances_MC = generator.dirichlet([2.0, 1.0, 0.6, 0.4], size=3000)
    lacking_C = np.array([0.0, 0.2, -0.1, 0.3])
    shares_MC = 0.1 * np.log(chances_MC) - lacking_C
    found_C = offsets_of(chances_MC, shares_MC, stddev=1e-4)
    np.testing.assert_allclose(found_C, lacking_C, atol=5e-3)
    assert ((shares_MC + found_C).argmax(axis=1) == chances_MC.argmax(axis=1)).mean() > 0.98


def service_rule_of(
    dataset: Dataset, counts: NoisyCounts, table_KC: IntArray, *, answers_free: bool = True
) -> ServiceRule:
    event = table_event("record", noise_multiplier=2.0)
    return counts.service_rule(dataset, event, table_KC, ThresholdsConfig(), answers_free=answers_free)


def test_what_a_service_adds_and_answers_is_a_function_of_released_and_public_values() -> None:
    dataset = load_data(DataConfig(name="loans", num_public=600, unit="record", embedding=EmbeddingConfig()))
    generator = np.random.default_rng(5)
    x_NF = dataset.private.x.double()
    # With a penalty: without one, directions in which hardly any record differs take any slope.
    moments_FF = x_NF.T @ x_NF / len(x_NF) + 1e-3 * torch.eye(x_NF.shape[1], dtype=torch.float64)
    slope_F = torch.linalg.solve(moments_FF, x_NF.T @ (dataset.private.y - 0.5).double() / len(x_NF)).float()

    def votes_on(x: torch.Tensor) -> np.ndarray:
        """Few vote for class 1, also where it is the likelier label."""
        share_N = 0.3 + 0.2 * (x @ slope_F).numpy()
        return 3000 * np.stack([1 - share_N, share_N], axis=1)

    exact_QC = np.rint(votes_on(dataset.public.x)).astype(np.int64)
    counts = NoisyCounts(
        counts_QC=exact_QC + np.rint(generator.normal(0, 60, exact_QC.shape)).astype(np.int64),
        record_ids=dataset.public.record_id,
        num_voters=3000,
        noise_stddev_votes=60.0,
    )
    table_KC = counts.table(dataset, table_event("record", noise_multiplier=2.0), ThresholdsConfig(), lambda t, **_: t)
    rule = service_rule_of(dataset, counts, table_KC)
    assert rule.offsets[0] == 0 != rule.offsets[1]
    # Other private records, labels, or none at all: the same offsets and labels, bit for bit.
    private = dataset.private
    for other in (
        private.take(list(range(50))),
        dataclasses.replace(private, y=1 - private.y, x=private.x.flip(0) * 3),
    ):
        again = service_rule_of(dataclasses.replace(dataset, private=other), counts, table_KC)
        assert (again.offsets, again.released) == (rule.offsets, rule.released)
        assert again.labels(dataset.test.x, rule.offsets) == rule.labels(dataset.test.x, rule.offsets)
    other_KC = table_KC + np.eye(len(table_KC), 2, dtype=np.int64)
    assert service_rule_of(dataset, counts, other_KC).released != rule.released
    # A record's label does not depend on those that are asked with it.
    labels = rule.labels(dataset.test.x, rule.offsets)
    assert [rule.labels(row[None], rule.offsets)[0] for row in dataset.test.x[:50]] == labels[:50]
    assert service_rule_of(dataset, counts, table_KC, answers_free=False).labels(dataset.test.x, rule.offsets) == [
        None
    ] * len(dataset.test)
    # Where it answers, a query would have named the same label 19 times in 20, and some records are left to votes.
    known_N = np.array([label is not None for label in labels])
    assert 0.1 < known_N.mean() < 0.98
    votes_NC = votes_on(dataset.test.x)
    agrees = [
        (votes_NC + generator.normal(0, 60, votes_NC.shape) + rule.offsets).argmax(axis=1)[known_N]
        == np.array(labels)[known_N].astype(np.int64)
        for _ in range(20)
    ]
    assert np.mean(agrees) > 0.95
