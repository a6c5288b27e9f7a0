"""The estimators: scikit-learn's contract, the price they carry, and what public records they ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fairpate.methods.estimators import DpSgdClassifier, FairDpSgdClassifier, SgdClassifier
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from two_groups import two_groups

from fairpate.config import CalibrationConfig, FitConfig, ModelConfig
from fairpate.types import GateRule

MODEL = ModelConfig(name="logistic")
PRIVATE: dict[str, Any] = {
    "model": MODEL,
    "epochs": 8,
    "batch_size": 100,
    "noise": "seeded",
    "random_state": 0,
    "accounting": "rdp",
}
ESTIMATORS = [
    SgdClassifier(model=MODEL, fit_config=FitConfig(epochs=10, learning_rate=0.02), random_state=0),
    DpSgdClassifier(**PRIVATE),
    FairDpSgdClassifier(**PRIVATE, weight=0.3, temperature=0.5),
]
NAMES = [type(estimator).__name__ for estimator in ESTIMATORS]
X, Y, Z = two_groups(1000, 0)
PUBLIC_X, _, PUBLIC_Z = two_groups(300, 1)
PUBLIC: dict[str, Any] = {"public_X": PUBLIC_X, "public_sensitive_features": PUBLIC_Z}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_the_interface_of_scikit_learn(estimator: Any) -> None:
    fresh = clone(estimator)
    with pytest.raises(NotFittedError):
        fresh.predict(X)
    assert fresh.fit(X, Y, sensitive_features=Z, **PUBLIC) is fresh
    assert fresh.classes_.tolist() == ["no", "yes"]
    probabilities = fresh.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(fresh.predict(X), fresh.classes_[probabilities.argmax(axis=1)])
    assert fresh.score(X, Y) > 0.85
    again = clone(estimator).fit(X, Y, **PUBLIC)
    np.testing.assert_array_equal(again.predict_proba(X), probabilities)
    assert fresh.set_params(random_state=5).get_params()["random_state"] == 5
    assert not np.array_equal(fresh.fit(X, Y, **PUBLIC).predict_proba(X), probabilities)


def test_the_price_keeps_the_target_and_names_its_terms() -> None:
    fitted = (
        clone(ESTIMATORS[1]).set_params(epsilon=1.5, delta=1e-6, relation="replace one", accounting="pld").fit(X, Y)
    )
    assert 1.4 < fitted.privacy_.epsilon <= 1.5
    assert (fitted.privacy_.delta, fitted.privacy_.unit) == (1e-6, "record")
    assert fitted.privacy_.relation == fitted.events_[0].relation == "replace one"
    assert fitted.noise_ == "seeded: not private"
    assert clone(ESTIMATORS[0]).fit(X, Y).privacy_.epsilon == np.inf


def test_groups_of_private_records_are_not_read() -> None:
    with_groups = clone(ESTIMATORS[2]).fit(X, Y, sensitive_features=Z, **PUBLIC).predict_proba(X)
    shuffled = clone(ESTIMATORS[2]).fit(X, Y, sensitive_features=Z[::-1], **PUBLIC).predict_proba(X)
    np.testing.assert_array_equal(with_groups, shuffled)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_the_reject_option_masks_and_asks_for_groups(estimator: Any) -> None:
    fitted = clone(estimator).set_params(idp3=GateRule(max_disparity=0.05, min_count=20)).fit(X, Y, **PUBLIC)
    labels = fitted.predict(X, sensitive_features=Z)
    assert 0.3 < labels.count() / len(labels) < 1
    answered = ~np.ma.getmaskarray(labels)
    rates = [np.mean(labels.data[answered & (group == Z)] == "yes") for group in ("a", "b")]
    assert abs(rates[0] - rates[1]) < 0.06
    with pytest.raises(ValueError, match="sensitive_features"):
        fitted.predict(X)
    fitted.set_params(idp3=GateRule(max_disparity=np.inf, min_count=0))
    assert fitted.predict(X, sensitive_features=Z).count() == len(X)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=NAMES)
def test_calibration_is_open_to_all_and_zero_epochs_are_none(estimator: Any) -> None:
    plain = clone(estimator).fit(X, Y, **PUBLIC)
    untouched = clone(estimator).set_params(calibration=CalibrationConfig(epochs=0)).fit(X, Y, **PUBLIC)
    np.testing.assert_array_equal(untouched.predict_proba(X), plain.predict_proba(X))
    settings = CalibrationConfig(weight=5.0, learning_rate=0.03, batch_size=64)
    calibrated = clone(estimator).set_params(calibration=settings).fit(X, Y, **PUBLIC)
    assert calibrated.events_ == plain.events_

    def gap(fitted: Any) -> float:
        rates = [np.mean(fitted.predict(X[group == Z]) == "yes") for group in ("a", "b")]
        return abs(rates[0] - rates[1])

    assert gap(calibrated) < 0.7 * gap(plain)
    with pytest.raises(ValueError, match="calibration needs public records"):
        clone(ESTIMATORS[1]).set_params(calibration=settings).fit(X, Y)


def test_images_of_bytes_and_what_cannot_be_fitted() -> None:
    images = np.random.default_rng(0).integers(256, size=(60, 1, 8, 8), dtype=np.uint8)
    fitted = DpSgdClassifier(**PRIVATE | {"batch_size": 30}).fit(images, np.arange(60) % 3)
    assert fitted.predict(images).shape == (60,)
    with pytest.raises(ValueError, match="FairDP-SGD needs public records"):
        clone(ESTIMATORS[2]).fit(X, Y)
    with pytest.raises(ValueError, match="together"):
        clone(ESTIMATORS[2]).fit(X, Y, public_X=X)
    with pytest.raises(ValueError, match="epsilon"):
        clone(ESTIMATORS[1]).set_params(epsilon=-1.0).fit(X, Y)
    with pytest.raises(ValueError, match="batch_size"):
        clone(ESTIMATORS[1]).set_params(batch_size=5000).fit(X, Y)
