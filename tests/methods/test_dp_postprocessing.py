"""DP-postprocessing: the programme's values by hand and by fairlearn, its sensitivity by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fairlearn.postprocessing import ThresholdOptimizer
from parity_data import error, odds_gap, records, trained_on
from posthoc import mixing_bounds
from priced import priced
from scipy.optimize import OptimizeResult
from sklearn.base import BaseEstimator

from fairpate.config import FitConfig, ModelConfig, PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.fairness.rates import eo_lowy, joint_table
from fairpate.methods.dp_fair_learning import DpPostprocessingConfig, Postprocessing, fair_mixing, released_counts
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.privacy.discrete_gaussian import SeededSource

pytestmark = pytest.mark.usefixtures("light_runs")

Floats = npt.NDArray[np.float64]
SHARES_GYC = np.array([[[0.28, 0.07], [0.05, 0.20]], [[0.22, 0.03], [0.08, 0.07]]])
COUNTS_GYC = 2000 * SHARES_GYC


def config(**changes: Any) -> DpPostprocessingConfig:
    return DpPostprocessingConfig(**changes)


def rates(mixing_GCC: Floats, counts_GYC: Floats) -> Floats:
    """P[label k | group, true label] of the mixed predictions, shape (G, Y, C)."""
    mixed = np.einsum("gyj,gjk->gyk", counts_GYC, mixing_GCC)
    conditional: Floats = mixed / mixed.sum(axis=2, keepdims=True)
    return conditional


def as_records(counts_GYC: Floats) -> tuple[npt.NDArray[np.int64], ...]:
    """Predictions, labels and groups with these counts."""
    cells = np.repeat(np.arange(counts_GYC.size), counts_GYC.ravel().round().astype(int))
    groups, labels, predictions = np.unravel_index(cells, counts_GYC.shape)
    return predictions, labels, groups


@pytest.mark.parametrize(
    ("max_gap", "value"), [(0, 0.2853333), (0.02, 0.2809167), (0.05, 0.2760417), (0.1, 0.2679167), (1, 0.23)]
)
def test_the_programme_has_its_values(max_gap: float, value: float) -> None:
    mixing = fair_mixing(COUNTS_GYC, config(max_gap=max_gap), epsilon=math.inf)
    assert mixing.error == pytest.approx(value, abs=1e-7)
    assert mixing.max_slack == 0
    found = rates(mixing.mixing_GCC, COUNTS_GYC)[:, :, 1]
    assert np.abs(found[1] - found[0]).max() <= max_gap + 1e-9
    wrong = sum(np.einsum("gj,gj->", SHARES_GYC[:, y], mixing.mixing_GCC[:, :, 1 - y]) for y in (0, 1))
    assert mixing.error == pytest.approx(wrong)


def test_the_solution_at_gap_zero_and_where_nothing_binds() -> None:
    exact = fair_mixing(COUNTS_GYC, config(max_gap=0), epsilon=math.inf).mixing_GCC[:, :, 1]
    np.testing.assert_allclose(exact, [[0.0044444, 0.5822222], [0, 1]], atol=1e-7)
    free = fair_mixing(COUNTS_GYC, config(max_gap=1), epsilon=math.inf).mixing_GCC
    np.testing.assert_allclose(free, [np.eye(2), np.eye(2)], atol=1e-12)


def test_the_slack_of_the_paper_and_what_it_buys() -> None:
    mixing = fair_mixing(COUNTS_GYC, config(max_gap=0.02), epsilon=1.0)
    assert mixing.max_slack == pytest.approx(0.0676690, abs=1e-7)  # of the true positive rates
    assert mixing.error == pytest.approx(0.2699205, abs=1e-7)
    gap_Y = np.abs(np.diff(rates(mixing.mixing_GCC, COUNTS_GYC)[:, :, 1], axis=0))[0]
    assert (gap_Y <= 0.02 + np.array([0.0406014, 0.0676690]) + 1e-6).all()
    assert (gap_Y > 0.02 + 0.01).any()
    opportunity = fair_mixing(COUNTS_GYC, config(constraint="equal_opportunity"), epsilon=1.0)
    assert opportunity.max_slack == mixing.max_slack
    parity = fair_mixing(COUNTS_GYC, config(constraint="demographic_parity"), epsilon=1.0)
    assert parity.max_slack == pytest.approx(2 * 4 * math.log(8 / 0.05) / (0.4 * 2000))
    assert fair_mixing(COUNTS_GYC, config(slack=False), epsilon=1.0).max_slack == 0


@pytest.mark.parametrize(
    ("constraint", "theirs"),
    [
        ("equalized_odds", "equalized_odds"),
        ("demographic_parity", "demographic_parity"),
        ("equal_opportunity", "true_positive_rate_parity"),
        ("equal_false_positives", "false_positive_rate_parity"),
    ],
)
def test_without_noise_it_is_the_postprocessing_of_hardt_et_al(constraint: Any, theirs: str) -> None:
    """fairlearn's ThresholdOptimizer sees the hard prediction as its score, on a grid of rates."""
    predictions, labels, groups = as_records(COUNTS_GYC)

    class Says(BaseEstimator):  # type: ignore[misc]
        def __sklearn_is_fitted__(self) -> bool:
            return True

        def fit(self, *_: Any) -> Says:
            return self

        def predict(self, X: Any) -> Any:
            return np.asarray(X)[:, 0]

    optimizer = ThresholdOptimizer(estimator=Says(), constraints=theirs, prefit=True, predict_method="predict")
    x = predictions[:, None].astype(float)
    optimizer.fit(x, labels, sensitive_features=groups)
    positive = optimizer._pmf_predict(x, sensitive_features=groups)[:, 1]
    reference = error(positive, torch.from_numpy(labels))
    mixing = fair_mixing(COUNTS_GYC, config(constraint=constraint, max_gap=0), epsilon=math.inf)
    assert mixing.error == pytest.approx(reference, abs=2e-3)
    assert mixing.error <= reference + 1e-9


def test_several_groups_and_classes_against_a_search() -> None:
    """Two classes, three groups: no better mixing is found at random; four classes: every rate is within the gap."""
    generator = np.random.default_rng(0)
    counts = generator.integers(30, 90, size=(3, 2, 2)).astype(float)
    best = fair_mixing(counts, config(max_gap=0.05, reference_group=1), epsilon=math.inf)
    found = rates(best.mixing_GCC, counts)
    assert np.abs(found - found[1]).max() <= 0.05 + 1e-9
    says_GJ = generator.random((50_000, 3, 2))
    says_GJ[: len(says_GJ) // 2] = says_GJ[: len(says_GJ) // 2].round()
    mixed = np.stack([1 - says_GJ, says_GJ], axis=3)
    rate = np.einsum("gyj,rgjk->rgyk", counts / counts.sum(axis=2, keepdims=True), mixed)
    fair = np.abs(rate - rate[:, 1:2]).max(axis=(1, 2, 3)) <= 0.05
    errors = 1 - np.einsum("gyj,rgjy->r", counts / counts.sum(), mixed)
    assert fair.sum() > 20
    assert best.error <= errors[fair].min() + 1e-9
    many = generator.integers(5, 50, size=(2, 4, 4)).astype(float)
    mixing = fair_mixing(many, config(max_gap=0.03), epsilon=math.inf)
    spread = rates(mixing.mixing_GCC, many)
    assert np.abs(spread[0] - spread[1]).max() <= 0.03 + 1e-9
    np.testing.assert_allclose(mixing.mixing_GCC.sum(axis=2), 1)


def test_false_positives_of_several_classes_are_those_among_records_of_all_other_labels() -> None:
    counts = np.random.default_rng(1).integers(5, 50, size=(2, 4, 4)).astype(float)
    mixing_GCC = fair_mixing(
        counts, config(constraint="equal_false_positives", max_gap=0.03), epsilon=math.inf
    ).mixing_GCC
    said_GYK = np.einsum("gyj,gjk->gyk", counts, mixing_GCC)
    for label in range(4):
        others = [other for other in range(4) if other != label]
        false = said_GYK[:, others, label].sum(axis=1) / counts[:, others].sum(axis=(1, 2))
        assert abs(false[0] - false[1]) <= 0.03 + 1e-9


@pytest.mark.parametrize("relation", ["replace one", "add or remove one"])
def test_the_counts_move_by_no_more_than_their_noise_is_scaled_to(relation: Any) -> None:
    """Brute force over every change of one record, with the noise's scale read off its spread."""
    predictions, labels, groups = as_records(COUNTS_GYC / 40)

    def exact(p: Any, y: Any, z: Any) -> Floats:
        return released_counts(p, y, z, epsilon=math.inf, source=SeededSource(0), num_groups=3, relation=relation)

    before, moved = exact(predictions, labels, groups), []
    for row in range(len(groups)):
        if relation == "add or remove one":
            kept = np.arange(len(groups)) != row
            moved.append(np.abs(exact(predictions[kept], labels[kept], groups[kept]) - before).sum())
        else:
            for other in range(3):
                changed = groups.copy()
                changed[row] = other
                moved.append(np.abs(exact(predictions, labels, changed) - before).sum())
    arguments: dict[str, Any] = {"epsilon": 0.5, "num_groups": 2, "relation": relation}
    large = as_records(1000 * COUNTS_GYC / COUNTS_GYC.min())
    noise = np.concatenate(
        [
            (
                released_counts(*large, **arguments, source=SeededSource(seed)) - 1000 * COUNTS_GYC / COUNTS_GYC.min()
            ).ravel()
            for seed in range(100)
        ]
    )
    assert np.abs(noise).mean() == pytest.approx(max(moved) / 0.5, rel=0.12)


def test_the_papers_guarantee_holds_as_often_as_it_says() -> None:
    """Error and gaps on the true counts, over the noise."""
    predictions, labels, groups = as_records(10 * COUNTS_GYC)
    sizes = {"epsilon": 1.0, "failure_probability": 0.05, "num_records": 20_000, "num_groups": 2}
    bounds, least = mixing_bounds(**sizes, smallest_share=0.15), 4 * math.log(160) / 20_000
    assert bounds.error == pytest.approx(12 * least)
    assert mixing_bounds(**sizes, smallest_share=least * (1 - 1e-9)).error == math.inf
    assert mixing_bounds(**sizes, smallest_share=least * (1 + 1e-9)).gap < math.inf
    best = fair_mixing(COUNTS_GYC, config(max_gap=0.02), epsilon=math.inf).error
    broken = 0
    for seed in range(40):
        counts = released_counts(predictions, labels, groups, epsilon=1.0, source=SeededSource(seed), num_groups=2)
        mixing = fair_mixing(counts, config(max_gap=0.02), epsilon=1.0).mixing_GCC
        gap = np.abs(np.diff(rates(mixing, COUNTS_GYC)[:, :, 1], axis=0)).max()
        wrong = sum(np.einsum("gj,gj->", SHARES_GYC[:, y], mixing[:, :, 1 - y]) for y in (0, 1))
        broken += gap > 0.02 + bounds.gap or wrong > best + bounds.error
    assert broken <= 6


def trained(base: str, epsilon: float, **changes: Any) -> tuple[Any, PrivacyTarget]:
    target = PrivacyTarget(epsilon=epsilon, delta=1e-5, accounting="rdp")
    method = Postprocessing(
        target=target,
        noise="seeded",
        dp_postprocessing=config(base=base, **changes),
        sgd=FitConfig(epochs=5, learning_rate=0.05),
        dp_sgd=DpSgdConfig(epochs=4, batch_size=200),
    )
    return trained_on(method, *records(2000, 1)), target


def test_a_base_without_privacy_protects_the_attribute_and_a_private_one_the_record() -> None:
    plain, target = trained("sgd", 2.0)
    cost = priced(plain.events, target)
    assert (cost.unit, cost.relation) == ("sensitive attribute", "replace one")
    assert 1.99 < cost.epsilon <= 2
    private, target = trained("dp_sgd", 2.0, count_share=0.25)
    cost = priced(private.events, target)
    assert (cost.unit, cost.relation) == ("record", "add or remove one")
    assert 1.5 < cost.epsilon <= 2
    assert [event.epsilon for event in private.events[1:]] == [0.5]
    assert private.noise == plain.noise == "seeded: not private"
    assert plain.remarks[0].startswith("largest slack added to max_gap 0.02: 0.0")


def test_the_estimator_mixes_by_group_and_says_how_often() -> None:
    x, y, z = (values.numpy() for values in records(3000, 2))
    names = np.array(["no", "yes"])[y]
    estimator = FairClassifier(
        "dp_postprocessing",
        epsilon=math.inf,
        model=ModelConfig(name="logistic"),
        dp_postprocessing={"max_gap": 0.02},
        sgd=FitConfig(epochs=5, learning_rate=0.05),
        noise="seeded",
        random_state=0,
    )
    estimator.fit(x, names, sensitive_features=z)
    probabilities = estimator.predict_proba(x, sensitive_features=z)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert odds_gap(probabilities[:, 1], torch.from_numpy(y), torch.from_numpy(z)) <= 0.02 + 1e-6
    said = estimator.trained_.model(torch.from_numpy(x)).argmax(dim=1)
    assert odds_gap(said, torch.from_numpy(y), torch.from_numpy(z)) > 0.1
    assert eo_lowy(joint_table(said, z, num_groups=2, num_classes=2, labels_N=y)).value > 0.1
    drawn = estimator.predict(x, sensitive_features=z)
    np.testing.assert_array_equal(drawn, estimator.predict(x, sensitive_features=z))
    assert np.mean(drawn == "yes") == pytest.approx(probabilities[:, 1].mean(), abs=0.03)
    assert estimator.privacy_.epsilon == math.inf
    with pytest.raises(ValueError, match="sensitive_features"):
        estimator.predict(x)
    with pytest.raises(ValueError, match="among"):
        estimator.predict(x, sensitive_features=z + 7)


def test_what_has_no_solution_or_no_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = COUNTS_GYC.copy()
    small[1, 1] = 0.5
    for counts, settings, message in (
        (small, {}, "min_share 0.001, got 0.0005.* in group 1, event 1"),
        (COUNTS_GYC[:1], {}, "2 groups"),
        (-COUNTS_GYC, {}, "negative"),
        (math.nan * COUNTS_GYC, {}, "NaN"),
        (0 * COUNTS_GYC, {}, "above 0"),
        (COUNTS_GYC, {"reference_group": 2}, "reference_group < 2"),
    ):
        with pytest.raises(ValueError, match=message):
            fair_mixing(counts, config(**settings), epsilon=math.inf)
    with pytest.raises(ValueError, match="labels_N to be codes from 0 to 1"):
        released_counts([0, 1], [0, 2], [0, 1], epsilon=1.0, source=SeededSource(0), num_groups=2)
    failed = OptimizeResult(status=7, x=None, fun=None, message="no luck")
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="no luck"):
        fair_mixing(COUNTS_GYC, config(), epsilon=math.inf)
