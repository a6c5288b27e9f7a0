"""SF-PATE as an estimator: what it promises, what it reads, and that its fairness reaches the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from two_groups import two_groups

from fairpate.config import AggregatorConfig, FitConfig, ModelConfig, RayConfig, StudentConfig, TeachersConfig
from fairpate.estimators import SfPateClassifier
from fairpate.methods.pf_ld import FldConfig
from fairpate.methods.sf_pate import SfPateConfig
from fairpate.types import MechanismParameters

FIT = FitConfig(epochs=20, batch_size=16, learning_rate=0.02)
FAIR = FldConfig(warmup_epochs=5, epochs=30, batch_size=500, optimizer="sgd", learning_rate=0.5, dual_step=1.0)
SETTINGS: dict[str, Any] = {
    "epsilon": 50.0,
    "teachers": TeachersConfig(num_teachers=40, model=ModelConfig(name="logistic"), fit=FIT),
    "aggregator": AggregatorConfig(
        num_queries=400,
        mechanism=MechanismParameters(threshold=20, threshold_stddev_votes=4, noise_stddev_votes=3),
        noise="seeded",
    ),
    "student": StudentConfig(model=ModelConfig(name="logistic"), fit=FIT),
    "fair": FAIR,
    "ray": RayConfig(num_actors=0),
    "random_state": 0,
}
X, Y, Z = two_groups(2000, 0)
PUBLIC_X, _, PUBLIC_Z = two_groups(400, 1)
PUBLIC: dict[str, Any] = {"public_X": PUBLIC_X, "public_sensitive_features": PUBLIC_Z}


def disparity(model: SfPateClassifier) -> float:
    says_yes = model.predict(PUBLIC_X) == "yes"
    return abs(float(says_yes[PUBLIC_Z == "a"].mean() - says_yes[PUBLIC_Z == "b"].mean()))


@pytest.mark.parametrize("variant", ["sf_s", "sf_t"])
def test_the_attribute_is_what_is_promised(variant: str) -> None:
    model = SfPateClassifier(**SETTINGS, sf_pate=SfPateConfig(variant=variant))
    model.fit(X, Y, sensitive_features=Z, **PUBLIC)
    assert (model.privacy_.unit, model.privacy_.relation) == ("sensitive attribute", "replace one")
    assert 40 < model.privacy_.epsilon <= 50
    assert model.events_[0].count == 400
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1, atol=1e-5)


def test_multipliers_narrow_the_gap_that_none_leave() -> None:
    """Without a multiplier the model follows the group's feature: the classes differ by about a third."""
    unconstrained = SfPateClassifier(**{**SETTINGS, "fair": FAIR.model_copy(update={"dual_step": 0.0})})
    fair = SfPateClassifier(**SETTINGS)
    gaps = [disparity(model.fit(X, Y, sensitive_features=Z)) for model in (unconstrained, fair)]
    assert gaps[0] > 0.25
    assert gaps[1] < 0.5 * gaps[0]


def test_groups_and_public_records_are_asked_for_where_they_are_read() -> None:
    with pytest.raises(ValueError, match="give sensitive_features"):
        SfPateClassifier(**SETTINGS).fit(X, Y)
    with pytest.raises(ValueError, match="SF-PATE with fair teachers needs public records"):
        SfPateClassifier(**SETTINGS, sf_pate=SfPateConfig(variant="sf_t")).fit(X, Y, sensitive_features=Z)
