"""The estimators: what each reads, asks for, refuses and guarantees; tests/contracts holds what is common to them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fairlearn.metrics import MetricFrame, count, false_negative_rate, false_positive_rate, selection_rate
from method_kinds import quick_and_slow
from priced import priced
from sklearn.base import clone
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, recall_score
from sklearn.model_selection import GridSearchCV
from two_groups import two_groups

import fairpate.nn.fit
from fairpate.config import CalibrationConfig, ConfigError, FitConfig, LoopConfig, PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.fairness.group_tables import calibration_error, rates_by_group
from fairpate.methods.dp_sgd import DpSgd, DpSgdConfig
from fairpate.methods.f_ld import FairLoopConfig
from fairpate.releases.directory import RunDirectory, read_labels
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.search import FairSearchCV
from fairpate.types import GateRule

pytestmark = pytest.mark.usefixtures("light_runs")

LOGISTIC = {"name": "logistic"}
PRIVATE: dict[str, Any] = {
    "model": LOGISTIC,
    "dp_sgd": {"epochs": 8, "batch_size": 100},
    "noise": "seeded",
    "target": {"accounting": "rdp"},
    "random_state": 0,
}
SGD, DP_SGD, FAIR_DP_SGD = ESTIMATORS = (
    FairClassifier("sgd", model=LOGISTIC, sgd=FitConfig(epochs=10, learning_rate=0.02), random_state=0),
    FairClassifier("dp_sgd", **PRIVATE),
    FairClassifier("fair_dp_sgd", **PRIVATE, fair_dp_sgd={"weight": 0.3, "temperature": 0.5}),
)
X, Y, Z = two_groups(1000, 0)
PUBLIC_X, _, PUBLIC_Z = two_groups(300, 1)
PUBLIC: dict[str, Any] = {"public_X": PUBLIC_X, "public_sensitive_features": PUBLIC_Z}
FIT = LoopConfig(epochs=20, batch_size=16, learning_rate=0.02)
ASKING: dict[str, Any] = {
    "epsilon": 40.0,
    "embedding": None,
    "teachers": {"num_teachers": 40, "model": LOGISTIC, "fit": FIT},
    "aggregator": {"mechanism": {"threshold": 20, "threshold_stddev_votes": 4, "noise_stddev_votes": 3}},
    "noise": "seeded",
    "ray": {"num_actors": 0},
    "student": {"model": LOGISTIC, "fit": FIT},
    "random_state": 0,
}
SGD_TRAINING = {"optimizer": "sgd"}
FAIR = FairLoopConfig(warmup_epochs=5, epochs=30, batch_size=500, learning_rate=0.5, dual_step=1.0)
MANY_X, MANY_Y, MANY_Z = two_groups(2000, 0)
by_name = pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.method)


def gap(says_yes: npt.ArrayLike, groups: npt.NDArray[Any]) -> float:
    said = np.asarray(says_yes)
    return abs(float(said[groups == "a"].mean() - said[groups == "b"].mean()))


@by_name
def test_it_learns_and_another_seed_learns_otherwise(estimator: Any) -> None:
    fitted = clone(estimator).fit(X, Y, sensitive_features=Z, **PUBLIC)
    assert fitted.classes_.tolist() == ["no", "yes"]
    probabilities = fitted.predict_proba(X)
    np.testing.assert_array_equal(fitted.predict(X), fitted.classes_[probabilities.argmax(axis=1)])
    assert fitted.score(X, Y) > 0.85
    other = clone(estimator).set_params(random_state=5).fit(X, Y, **PUBLIC)
    assert not np.array_equal(other.predict_proba(X), probabilities)


def test_the_price_keeps_the_target_and_names_its_terms() -> None:
    target = PrivacyTarget(relation="replace one", epsilon=7.0)
    fitted = clone(DP_SGD).set_params(target=target, epsilon=1.5, delta=1e-6, dp_sgd={"epochs": 2}).fit(X, Y)
    assert 1.4 < fitted.privacy_.epsilon <= 1.5
    assert (fitted.privacy_.delta, fitted.privacy_.unit) == (1e-6, "record")
    assert fitted.privacy_.relation == fitted.events_[0].relation == "replace one"
    assert fitted.privacy_ == priced(fitted.events_, fitted.config_.target)
    # Records are replaced: their number is public, and may choose the size of a batch.
    assert "Settings were chosen by the real number" not in " ".join(fitted.statement().remarks)
    assert fitted.noise_ == "seeded: not private"
    assert clone(SGD).fit(X, Y).privacy_.epsilon == np.inf


def test_no_release_is_counted_and_noise_is_fresh_unless_it_is_seeded() -> None:
    before = Odometer().totals(delta=1e-5)
    first, second = (clone(DP_SGD).set_params(noise="os_entropy").fit(X, Y).predict_proba(X) for _ in range(2))
    assert not np.array_equal(first, second)
    assert Odometer().totals(delta=1e-5) == before
    assert "names_earlier" not in DP_SGD.get_params()


def test_groups_of_private_records_are_not_read_where_public_ones_do() -> None:
    with_groups = clone(FAIR_DP_SGD).fit(X, Y, sensitive_features=Z, **PUBLIC).predict_proba(X)
    shuffled = clone(FAIR_DP_SGD).fit(X, Y, sensitive_features=Z[::-1], **PUBLIC).predict_proba(X)
    np.testing.assert_array_equal(with_groups, shuffled)


def test_a_table_by_group_has_the_numbers_of_fairlearn() -> None:
    fitted = clone(SGD).fit(X, Y, sensitive_features=Z, **PUBLIC)
    said = fitted.predict(X)
    metrics = {
        "accuracy": accuracy_score,
        "selection_rate": partial(selection_rate, pos_label="yes"),
        "recall": partial(recall_score, pos_label="yes"),
        "false_negative_rate": partial(false_negative_rate, pos_label="yes"),
        "false_positive_rate": partial(false_positive_rate, pos_label="yes"),
        "count": count,
    }
    expected = MetricFrame(metrics=metrics, y_true=Y, y_pred=said, sensitive_features=Z)
    frame = fitted.by_group(X, Y, sensitive_features=Z)
    assert frame.index.tolist() == ["a", "b", "all"]
    for name in metrics:
        np.testing.assert_allclose(frame.loc[["a", "b"], name], expected.by_group[name].astype(float), atol=1e-12)
        assert frame.loc["all", name] == pytest.approx(expected.overall[name])
    assert frame.attrs["difference"]["selection_rate"] == pytest.approx(expected.difference()["selection_rate"])
    assert frame.attrs["ratio"]["recall"] == pytest.approx(expected.ratio()["recall"])
    assert (frame.coverage == 1).all()
    # A group without positives has no recall.
    none = fitted.by_group(X[Y == "no"], Y[Y == "no"], sensitive_features=Z[Y == "no"])
    assert none["recall"].isna().all()


def calibration_oracle(hits: np.ndarray, scores: np.ndarray) -> float:
    """The expected calibration error from scikit-learn's curve, whose bins are weighted by their sizes."""
    shares, means = calibration_curve(hits, scores, n_bins=10, strategy="uniform")
    sizes = np.bincount(np.digitize(scores, np.linspace(0, 1, 11)[1:-1], right=True), minlength=10)
    return float(np.abs(shares - means) @ sizes[sizes > 0] / len(scores))


def test_calibration_thresholds_and_disparities_are_those_of_other_libraries() -> None:
    fitted = clone(SGD).fit(X, Y, sensitive_features=Z, **PUBLIC)
    scores, truth = fitted.predict_proba(X)[:, 1], (Y == "yes").astype(int)
    frame = fitted.by_group(X, Y, sensitive_features=Z, reference="a")
    expected = MetricFrame(
        metrics=calibration_oracle, y_true=truth, y_pred=scores.astype(np.float64), sensitive_features=Z
    )
    assert frame.loc["all", "calibration_error"] == pytest.approx(expected.overall, abs=1e-6)
    for group in "ab":
        assert frame.loc[group, "calibration_error"] == pytest.approx(expected.by_group[group], abs=1e-6)
    # Against the reference group; of two groups the other one has the difference between groups.
    metrics = {"accuracy": accuracy_score, "selection_rate": partial(selection_rate, pos_label="yes")}
    compared = MetricFrame(metrics=metrics, y_true=Y, y_pred=fitted.predict(X), sensitive_features=Z)
    for name in metrics:
        of_a, of_b = compared.by_group.loc["a", name], compared.by_group.loc["b", name]
        assert frame.loc["b", f"{name}_difference"] == pytest.approx(of_b - of_a)
        assert abs(frame.loc["b", f"{name}_difference"]) == pytest.approx(compared.difference()[name])
        assert frame.loc["b", f"{name}_ratio"] == pytest.approx(of_b / of_a)
        assert frame.loc["a", [f"{name}_difference", f"{name}_ratio"]].tolist() == [0, 1]
    assert {"selection_rate", "calibration_error"} <= frame.attrs["difference"].keys()
    assert not any(name.endswith(("_difference", "_ratio")) for name in frame.attrs["difference"])
    with pytest.raises(ValueError, match=r"reference: no group 'c'.*known: a, b"):
        fitted.by_group(X, Y, sensitive_features=Z, reference="c")

    at = fitted.by_threshold(X, Y, sensitive_features=Z, thresholds=[0.3, 0.5, 1])
    assert at.index.names == ["threshold", "group"] and len(at) == 9
    rates = {"selection_rate": selection_rate, "false_positive_rate": false_positive_rate, "recall": recall_score}
    for threshold in (0.3, 0.5):
        expected = MetricFrame(
            metrics=rates, y_true=truth, y_pred=(scores >= threshold).astype(int), sensitive_features=Z
        )
        for name in rates:
            np.testing.assert_allclose(at.loc[threshold].loc[["a", "b"], name], expected.by_group[name].astype(float))
            assert at.loc[(threshold, "all"), name] == pytest.approx(expected.overall[name])
    # The model's own threshold is one half.
    same = fitted.by_group(X, Y, sensitive_features=Z)
    np.testing.assert_allclose(at.loc[0.5].loc["b", "accuracy"], same.loc["b", "accuracy"])
    with pytest.raises(ValueError, match=r"thresholds: expected numbers from 0 to 1, got 1.5"):
        fitted.by_threshold(X, Y, thresholds=[1.5])


def test_calibration_by_hand() -> None:
    """Two bins: three scores of .25 with one hit, one of .95 that is right: (3 |.25 - 1/3| + |.95 - 1|) / 4."""
    scores, hits = np.array([0.25, 0.25, 0.25, 0.95]), np.array([True, False, False, True])
    assert calibration_error(scores, hits) == pytest.approx((3 * (1 / 3 - 0.25) + 0.05) / 4)
    assert np.isnan(calibration_error(scores[:0], hits[:0]))
    # Of three classes the score is that of the predicted one.
    rows = rates_by_group(
        np.array([0, 1, 2]),
        np.array([0, 1, 1]),
        np.zeros(3),
        answered_N=np.array([True, True, False]),
        class_names=("x", "y", "z"),
        group_names=("everyone",),
        scores_NC=np.array([[0.8, 0.1, 0.1], [0.1, 0.6, 0.3], [0.3, 0.4, 0.3]]),
    )
    assert rows["all"]["calibration_error"] == pytest.approx((0.2 + 0.4) / 2)
    assert list(rows) == ["all"]


@by_name
def test_the_reject_option_masks_and_asks_for_groups(estimator: Any) -> None:
    pool = PUBLIC if estimator is FAIR_DP_SGD else {}
    fitted = clone(estimator).set_params(idp3=GateRule(max_disparity=0.05, min_count=20)).fit(X, Y, **pool)
    labels = fitted.predict(X, sensitive_features=Z)
    assert 0.3 < labels.count() / len(labels) < 1
    answered = ~np.ma.getmaskarray(labels)
    assert gap((labels.data == "yes")[answered], Z[answered]) < 0.06
    with pytest.raises(ValueError, match="sensitive_features"):
        fitted.predict(X)
    open_to_all = clone(fitted).set_params(idp3=GateRule(max_disparity=np.inf, min_count=0)).fit(X, Y, **PUBLIC)
    assert open_to_all.predict(X, sensitive_features=Z).count() == len(X)
    with pytest.raises(ValueError, match="among"):
        open_to_all.predict(X, sensitive_features=np.full(len(X), "c"))


@by_name
def test_calibration_is_open_to_all(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairpate.nn.fit, "_CALIBRATION_RATE", 0.1)  # of few public records
    plain = clone(estimator).fit(X, Y, **PUBLIC)
    settings = CalibrationConfig(weight=5.0)
    calibrated = clone(estimator).set_params(calibration=settings).fit(X, Y, **PUBLIC)
    assert calibrated.events_ == plain.events_
    assert gap(calibrated.predict(X) == "yes", Z) < 0.7 * gap(plain.predict(X) == "yes", Z)
    with pytest.raises(ValueError, match="calibration needs public records"):
        clone(DP_SGD).set_params(calibration=settings).fit(X, Y)


def test_a_large_delta_is_warned_of_and_stated() -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, size=(600, 2))
    labels = rows[:, 0] > 0
    for size, words in ((600, "here 1/600. .* 1.2 of them on average"), (None, "only if there are fewer than 500;")):
        model = FairClassifier("weighted_votes", epsilon=3.0, delta=2e-3, public_X=100, num_records=size)
        with pytest.warns(UserWarning, match=words):
            model.fit(rows, labels)
        assert model.statement().declared_units == size
        assert re.search(words, model.statement().remarks[0])
    # Settings that follow from the real number state it: teachers.
    model = FairClassifier("fairpate", epsilon=3.0, delta=2e-3, public_X=100, embedding=None, ray={"num_actors": 0})
    with pytest.warns(UserWarning, match="here 1/600"):
        model.fit(rows, labels, sensitive_features=labels, public_sensitive_features=np.arange(100) % 2 == 0)
    search = FairSearchCV(
        FairClassifier("dp_sgd", dp_sgd={"batch_size": 60, "epochs": 1, "num_records": 480}, target=PRIVATE["target"]),
        {"dp_sgd__learning_rate": [0.1, 0.5]},
        delta=0.1,
        epsilon=5.0,
        expected_trials=2.0,
    )
    with pytest.warns(UserWarning, match="here 1/480. .* 48 of them on average"):
        search.fit(rows, labels)
    cautions = [remark for remark in search.statement().remarks if "1/480" in remark]
    assert len(cautions) == 1


def test_images_of_bytes_and_what_cannot_be_fitted() -> None:
    images = np.random.default_rng(0).integers(256, size=(60, 1, 8, 8), dtype=np.uint8)
    fitted = clone(DP_SGD).set_params(dp_sgd__batch_size=30).fit(images, np.arange(60) % 3)
    assert fitted.predict(images).shape == (60,)
    with pytest.raises(ValueError, match=r"features of shape \(N, \*\(1, 8, 8\)\)"):
        fitted.predict(images[:, :, :4])
    for estimator, given, message in (
        (FAIR_DP_SGD, {}, "fair_dp_sgd needs public records"),
        (FAIR_DP_SGD, {"public_X": X}, "together"),
        (FAIR_DP_SGD, {**PUBLIC, "public_X": X}, "sensitive_features: expected one value per record, got 300"),
        (FAIR_DP_SGD, {**PUBLIC, "public_X": PUBLIC_X[:, :1]}, "public_X: X has 1 features, but .* is expecting 2"),
        (FairClassifier("raco_dp", **PRIVATE), {}, "raco_dp reads groups: give sensitive_features"),
        (FairClassifier("raco_dp", **PRIVATE), {"sensitive_features": Z[:9]}, ": expected one value per record"),
        (clone(DP_SGD).set_params(epsilon=-1.0), {}, r"target\.epsilon: expected > 0"),
        (clone(DP_SGD).set_params(dp_sgd__batch_size=5000), {}, r"dp_sgd\.batch_size <= 1000"),
        (clone(DP_SGD).set_params(dp_sgd={"batch_sise": 1}), {}, r"dp_sgd\.batch_sise: unknown field; did you mean"),
        (clone(DP_SGD).set_params(student={"fit": {}}), {}, r"student\.fit: not read because of public_data"),
        (clone(DP_SGD).set_params(target=3), {}, "target: "),
        (clone(DP_SGD).set_params(random_state=-1), {}, "seed: "),
    ):
        with pytest.raises(ValueError, match=message):
            clone(estimator).fit(X, Y, **given)
    for x, y, message in (
        (X[:0], Y[:0], "0 sample"),
        (X[:, 0], Y, "Expected 2D array, got 1D"),
        (X, Y[:5], "inconsistent numbers of samples"),
    ):
        with pytest.raises(ValueError, match=message):
            clone(DP_SGD).fit(x, y)


@pytest.mark.slow
def test_a_search_goes_over_settings_of_sections_and_over_methods() -> None:
    grid = {"dp_fermi__weight": np.array([0.0, 1.0]), "dp_sgd__epochs": np.arange(1, 2)}
    search = GridSearchCV(FairClassifier("dp_fermi", **PRIVATE), grid, cv=2, error_score="raise")
    search.fit(X[:400], Y[:400], sensitive_features=Z[:400])
    assert search.best_estimator_.config_.dp_fermi.weight == search.best_params_["dp_fermi__weight"]
    methods = GridSearchCV(FairClassifier("dp_sgd", **PRIVATE), {"method": ["dp_sgd", "raco_dp"]}, cv=2)
    assert (
        methods.fit(X[:400], Y[:400], sensitive_features=Z[:400]).best_estimator_.config_.method
        == methods.best_params_["method"]
    )


class HalfRate(DpSgd):
    """A method from outside the package."""

    title = "DP-SGD at half the learning rate"
    method: str = "half_rate"
    dp_sgd: DpSgdConfig = DpSgdConfig(learning_rate=0.25)


def test_a_method_from_outside_the_package_is_a_classifier() -> None:
    own = FairClassifier(method=f"{__name__}:HalfRate", **PRIVATE).fit(X, Y)
    same = clone(DP_SGD).set_params(dp_sgd__learning_rate=0.25).fit(X, Y)
    np.testing.assert_array_equal(own.predict_proba(X), same.predict_proba(X))
    with pytest.raises(ConfigError, match=r"no method 'dp_sdg'; did you mean dp_sgd"):
        FairClassifier("dp_sdg")


def test_a_randomised_prediction_is_drawn_from_its_expectation() -> None:
    rules = {"max_gap": 0.02}
    mixing = FairClassifier(
        "dp_postprocessing", epsilon=9.0, model=LOGISTIC, dp_postprocessing=rules, noise="seeded", random_state=0
    )
    mixing.fit(MANY_X[:, :1], MANY_Y, sensitive_features=MANY_Z)
    options = {"sensitive_features": MANY_Z}
    expected = mixing.predict_proba(MANY_X[:, :1], **options)
    draws = [mixing.predict(MANY_X[:, :1], **options, random_state=seed) == "yes" for seed in range(15)]
    assert len({draw.tobytes() for draw in draws}) > 1
    np.testing.assert_array_equal(mixing.predict(MANY_X[:, :1], **options, random_state=3) == "yes", draws[3])
    assert np.mean(draws) == pytest.approx(expected[:, 1].mean(), abs=0.01)
    with pytest.raises(ValueError, match="sensitive_features"):
        mixing.predict_proba(MANY_X[:, :1])


class TestPersons:
    PERSONS = np.arange(len(X)) // 4

    def test_all_records_of_a_person_are_protected_together(self) -> None:
        model = clone(DP_SGD).fit(X, Y, persons=self.PERSONS)
        statement = model.statement()
        assert statement.unit == "person"
        assert [event["sampling_rate"] for event in statement.events] == [100 / 250]
        assert "the real number of private persons" in " ".join(statement.remarks)
        assert clone(DP_SGD).fit(X, Y).statement().unit == "record"

    @pytest.mark.parametrize("same", [PERSONS.astype(float), [f" {person}" for person in PERSONS.tolist()]])
    def test_one_person_has_one_name_however_it_is_written(self, same: Any) -> None:
        first, again = (clone(DP_SGD).fit(X, Y, persons=persons) for persons in (self.PERSONS, same))
        for ours, theirs in zip(first.network_.parameters(), again.network_.parameters(), strict=True):
            assert ours.equal(theirs)

    @pytest.mark.parametrize(
        ("persons", "words"),
        [
            (PERSONS[1:], "persons: expected a person for each of 1000 records, got 999"),
            ([None, *PERSONS[1:]], "persons: expected a person for every record, got 1 records without"),
            ([" ", *map(str, PERSONS[1:])], "persons: expected a person for every record, got 1 records without"),
            (
                ["3;4", *map(str, PERSONS[1:])],
                "expected one person per record, got , or ; or | in 1 of 1000 names",
            ),
        ],
    )
    def test_each_record_has_a_person(self, persons: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            clone(DP_SGD).fit(X, Y, persons=persons)

    def test_persons_who_are_probably_one_are_told(self) -> None:
        written = [f"{person}{'.0' if place % 2 else ''}" for place, person in enumerate(self.PERSONS.tolist())]
        with pytest.warns(UserWarning, match="persons: 500 names equal another one as numbers, like 7, 07 and 7.0"):
            clone(DP_SGD).fit(X, Y, persons=written)

    def test_a_method_that_cannot_bound_a_person_is_refused(self) -> None:
        refused = FairClassifier("pf_ld", epsilon=3.0, model=LOGISTIC, noise="seeded", random_state=0)
        with pytest.raises(ValueError, match="persons: pf_ld does not bound"):
            refused.fit(X, Y, sensitive_features=Z, persons=self.PERSONS)


class TestTeachers:
    @pytest.mark.parametrize(
        "name", quick_and_slow(["fairpate", "pate", "pate_s_in", "pate_s_pre"], ["fairpate", "pate"])
    )
    def test_a_member_of_the_family_learns_within_its_target(self, name: str) -> None:

        pool = {key: values[:200] for key, values in PUBLIC.items()}
        model = FairClassifier(name, **ASKING)
        if name in ("fairpate", "pate_s_pre"):
            model.set_params(aggregator__gate={"max_disparity": 0.05, "min_count": 5})
        model.fit(MANY_X, MANY_Y, **pool)
        assert 30 < model.privacy_.epsilon <= 40
        assert (model.privacy_.unit, model.privacy_.relation) == ("record", "add or remove one")
        assert model.events_[0].count == 200
        assert model.trained_.queries.submitted == 200
        assert model.score(MANY_X, MANY_Y) > 0.7

    @pytest.mark.slow
    def test_parity_in_the_loss_narrows_the_gap_that_pate_leaves(self) -> None:
        plain = FairClassifier("pate", **ASKING).fit(MANY_X, MANY_Y, **PUBLIC)
        fair = FairClassifier("pate_s_in", **ASKING, pate_s_in={"weight": 3.0}).fit(MANY_X, MANY_Y, **PUBLIC)
        gaps = [gap(model.predict(PUBLIC_X) == "yes", PUBLIC_Z) for model in (fair, plain)]
        assert gaps[0] < 0.5 * gaps[1]

    def test_the_folder_keeps_the_ledger_and_the_labels(self, tmp_path: Path) -> None:
        model = FairClassifier("fairpate", **ASKING, folder=tmp_path / "run")
        model.set_params(aggregator__gate={"max_disparity": 0.05, "min_count": 5}).fit(MANY_X, MANY_Y, **PUBLIC)
        run = RunDirectory(root=tmp_path / "run")
        assert run.ledger.is_file()
        labelled = read_labels(run.labels)
        counts = np.zeros((2, 2), dtype=int)
        np.add.at(counts, (labelled.groups, labelled.labels), 1)
        assert counts.sum(axis=1).min() > 5
        rates = counts[:, 1] / counts.sum(axis=1)
        assert abs(rates[0] - rates[1]) < 0.15

    def test_public_records_are_asked_for_and_equal_records_told_apart(self) -> None:
        with pytest.raises(ValueError, match="pate needs public records"):
            FairClassifier("pate", **ASKING).fit(X, Y)
        twice = {"X": np.concatenate([MANY_X, MANY_X[:5]]), "y": np.concatenate([MANY_Y, MANY_Y[:5]])}
        assert FairClassifier("pate", **ASKING).fit(**twice, **PUBLIC).score(MANY_X, MANY_Y) > 0.7

    @pytest.mark.parametrize("variant", quick_and_slow(["sf_s", "sf_t"], ["sf_s"]))
    def test_the_attribute_is_what_sf_pate_protects(self, variant: str) -> None:
        quick = FAIR.model_copy(update={"epochs": 8})
        model = FairClassifier("sf_pate", **ASKING, f_ld=quick, training=SGD_TRAINING, sf_pate={"variant": variant})
        model.set_params(aggregator__num_queries=300).fit(MANY_X, MANY_Y, sensitive_features=MANY_Z, **PUBLIC)
        assert (model.privacy_.unit, model.privacy_.relation) == ("sensitive attribute", "replace one")
        assert 30 < model.privacy_.epsilon <= 40
        assert model.events_[0].count == 300

    @pytest.mark.slow
    def test_multipliers_narrow_the_gap_that_none_leave(self) -> None:
        """Without a multiplier the model follows the group's feature: the classes differ by about a third."""
        model = FairClassifier("sf_pate", **ASKING, f_ld=FAIR, training=SGD_TRAINING)
        model.set_params(aggregator__num_queries=400)
        gaps = []
        for step in (0.0, 3.0):
            model.set_params(f_ld__dual_step=step).fit(MANY_X, MANY_Y, sensitive_features=MANY_Z)
            gaps.append(gap(model.predict(PUBLIC_X) == "yes", PUBLIC_Z))
        assert gaps[0] > 0.25
        assert gaps[1] < 0.5 * gaps[0]
        with pytest.raises(ValueError, match="sf_pate needs public records"):
            model.set_params(sf_pate__variant="sf_t").fit(X, Y, sensitive_features=Z)
        with pytest.raises(ValueError, match="give sensitive_features"):
            model.fit(X, Y)


GROUPS = np.array(["b", "a", "c"])[np.arange(60) % 3]
FEW: dict[str, Any] = {"dp_sgd": {"epochs": 1, "batch_size": 20}, "target": {"accounting": "rdp"}}
# Seeded, since the noise on the sizes of groups may leave none of sixty records.
PUBLIC_BATCHES = FairClassifier(
    "dp_fermi", dp_fermi={"mode": "sens_public_batches"}, noise="seeded", random_state=0, **FEW
)
BY_ROUNDING = FairClassifier("dp_postprocessing", epsilon=50, noise="seeded", random_state=0, model=LOGISTIC)
REFUSING = (
    FairClassifier("f_ld"),
    FairClassifier("pf_ld"),
    PUBLIC_BATCHES,
    BY_ROUNDING,
    FairClassifier("dp_oracle_learner"),
    FairClassifier("randomised_response", model=LOGISTIC),
    FairClassifier("sf_pate"),
)
ENCODINGS = {
    "its codes": np.unique(GROUPS, return_inverse=True)[1],
    "other numbers": np.array([5.0, -1.0, 0.25])[np.arange(60) % 3],
    "one indicator": GROUPS == "c",
}


def fit_beside(classifier: Any, column: npt.NDArray[Any]) -> None:
    x = np.stack([np.random.default_rng(0).normal(size=60), np.ones(60), column], axis=1)
    clone(classifier).fit(x, np.where(x[:, 0] > 0, "yes", "no"), sensitive_features=GROUPS)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("classifier", REFUSING, ids=lambda classifier: type(classifier).__name__)
def test_an_estimator_is_refused_a_column_that_the_groups_determine(classifier: Any, encoding: str) -> None:
    with pytest.raises(ValueError, match=r"protects sensitive_features alone .* 2 of X; leave them out"):
        fit_beside(classifier, ENCODINGS[encoding])


@pytest.mark.parametrize(
    "classifier",
    [FairClassifier("f_ld", f_ld={"epochs": 1, "warmup_epochs": 1}), PUBLIC_BATCHES, BY_ROUNDING],
    ids=lambda classifier: type(classifier).__name__,
)
def test_a_column_that_tells_all_groups_but_one_record_s_is_a_feature(classifier: Any) -> None:
    column = ENCODINGS["its codes"].copy()
    column[7] = (column[7] + 1) % 3
    fit_beside(classifier, column)


@pytest.mark.parametrize(
    "classifier",
    [
        FairClassifier("dp_fermi", noise="seeded", random_state=0, **FEW),  # noise may leave no record in an event
        FairClassifier("raco_dp", **FEW),
        clone(BY_ROUNDING).set_params(dp_postprocessing__base="dp_sgd", **FEW),
    ],
    ids=lambda classifier: type(classifier).__name__,
)
def test_estimators_that_protect_whole_records_may_see_the_group(classifier: Any) -> None:
    fit_beside(classifier, ENCODINGS["its codes"])


def test_a_fit_is_counted_where_it_is_given_an_odometer(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path))
    draws = np.random.default_rng(0)
    x = draws.normal(size=(200, 3)).astype(np.float32)
    for odometer, releases in ((None, []), ("clinic", [1]), ("clinic", [2])):
        found = FairClassifier("weighted_votes", epsilon=1.0, odometer=odometer, random_state=0)
        found.fit(x, (x[:, 0] > 0).astype(int), public_X=x[:100] + 1)
        assert [total.releases for total in Odometer().totals(delta=1e-5, data="clinic")] == releases
        assert any("did not count" in remark for remark in found.statement().remarks) == (odometer is None)
    Odometer().set_limit("clinic", "record", epsilon=1.5, delta=1e-5)
    with pytest.raises(LimitReachedError, match="clinic, unit record: 2 releases"):
        found.fit(x, (x[:, 0] > 0).astype(int), public_X=x[:100] + 1)


def test_a_remark_of_the_default_method_is_a_limit_also_where_it_is_read_alone() -> None:
    """A printed statement has no heading that says what is not guaranteed."""
    fitted = FairClassifier(epsilon=3.0, random_state=0).fit(MANY_X, MANY_Y, **PUBLIC)
    statement = fitted.statement()
    assert statement.method == "residual_votes"
    (remark,) = (each for each in statement.remarks if "variant" in each)
    assert remark.startswith(
        "A variant of the method was chosen from public facts and released sums; another may be better. "
    )
    assert "is the best one" not in str(statement)
    # Every remark is a sentence of its own, and no clause of a sentence that stands elsewhere.
    assert not any(each.startswith(("That ", "Whether ")) and each.count(".") < 2 for each in statement.remarks)
