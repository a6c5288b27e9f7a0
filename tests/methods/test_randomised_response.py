"""Randomised response: the channel's inverse, what it recovers, and both forms against their limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from parity_data import error, odds_gap, records, trained_on
from priced import priced
from torch import Tensor, nn

from fairpate.config import PrivacyTarget
from fairpate.estimators import FairClassifier
from fairpate.fairness.rates import joint_table
from fairpate.methods.base import Training
from fairpate.methods.dp_fair_learning import DpPostprocessingConfig, fair_mixing
from fairpate.methods.randomised_response import (
    RandomisedResponse,
    RandomisedResponseConfig,
    recovered_counts,
    recovery,
    shrinkage,
)
from fairpate.nn.fit import linear_rules, said_labels
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.laplace import keep_probability
from fairpate.privacy.laplace import randomise_response as respond

pytestmark = pytest.mark.usefixtures("light_runs")

X, Y, Z = records(3000, 4)


def train(epsilon: float, learner: Any = None, data: Any = (X, Y, Z), seed: int = 0, **changes: Any) -> Any:
    class Response(RandomisedResponse):
        def learned(self, training: Training, *records: Tensor, max_gap: float, shrunk: float) -> nn.Module:
            if learner is not None:
                return learner(*records, max_gap)
            return super().learned(training, *records, max_gap=max_gap, shrunk=shrunk)

    # An epsilon of 0, at which nothing is told, is no target of a run.
    target = PrivacyTarget.model_construct(**dict(PrivacyTarget()) | {"epsilon": epsilon})
    config = RandomisedResponseConfig(**{"num_rounds": 30} | changes)
    return trained_on(Response(target=target, noise="seeded", seed=seed, randomised_response=config), *data)


def positive(trained: Any) -> Any:
    said = said_labels(trained.model, X)
    if trained.mixing_GCC is not None:
        said = np.einsum("nj,njk->nk", said, trained.mixing_GCC[Z.numpy()])
    return said[:, 1]


@pytest.mark.parametrize(
    ("num_groups", "epsilon", "keep", "diagonal", "other"),
    [(2, 1.0, 0.7310586, 1.5819767, -0.5819767), (5, 0.5, 0.2918751, 7.1659763, -1.5414941)],
)
def test_the_inverse_of_the_channel(
    num_groups: int, epsilon: float, keep: float, diagonal: float, other: float
) -> None:
    assert keep_probability(epsilon, num_groups) == pytest.approx(keep, abs=1e-7)
    inverse = recovery(epsilon, num_groups)
    expected = np.full((num_groups, num_groups), other) + np.eye(num_groups) * (diagonal - other)
    np.testing.assert_allclose(inverse, expected, atol=1e-6)
    channel = np.full((num_groups, num_groups), (1 - keep) / (num_groups - 1))
    np.fill_diagonal(channel, keep)
    np.testing.assert_allclose(inverse, np.linalg.inv(channel), rtol=1e-5)
    np.testing.assert_array_equal(recovery(math.inf, num_groups), np.eye(num_groups))
    with pytest.raises(ValueError, match="Expected epsilon > 0, got 0"):
        recovery(0.0, num_groups)


def test_recovered_statistics_are_unbiased_and_keep_public_totals() -> None:
    """Over 100,000 people, whose true groups and events are known."""
    count, epsilon = 100_000, 0.7
    generator = np.random.default_rng(0)
    groups = generator.choice(3, size=count, p=[0.6, 0.3, 0.1])
    labels = (generator.random(count) < 0.2 + 0.2 * groups).astype(np.int64)
    said = (generator.random(count) < 0.3 + 0.4 * labels).astype(np.int64)
    shape: dict[str, Any] = {"num_groups": 3, "num_classes": 2, "labels_N": labels}
    true = joint_table(said, groups, **shape)
    told = respond(groups, num_values=3, epsilon=epsilon, source=SeededSource(1))
    reported, inverse = joint_table(said, told, **shape), recovery(epsilon, 3)
    raw = np.tensordot(inverse, reported, axes=1)
    deviation = np.sqrt((inverse**2) @ reported.reshape(3, -1)).reshape(true.shape)
    assert (np.abs(raw - true) < 4 * deviation).all()
    assert np.abs(reported - true).max() > 10 * np.abs(raw - true).max()
    clipped = recovered_counts(reported, inverse)
    assert (clipped >= 0).all()
    np.testing.assert_allclose(clipped.sum(axis=0), true.sum(axis=0))
    few = recovered_counts(np.array([[[9.0, 0.0]], [[1.0, 4.0]]]), recovery(0.1, 2))
    assert (few >= 0).all()
    np.testing.assert_allclose(few.sum(axis=0), [[10, 4]])


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_gaps_over_reports_shrink_as_the_bound_is_corrected(epsilon: float) -> None:
    """Two balanced groups whose rates differ by 0.6."""
    count = 60_000
    groups = np.arange(count) % 2
    said = np.random.default_rng(0).random(count) < 0.2 + 0.6 * groups
    told = respond(groups, num_values=2, epsilon=epsilon, source=SeededSource(2))
    gap = said[told == 1].mean() - said[told == 0].mean()
    assert gap == pytest.approx(0.6 * shrinkage(epsilon, 2), abs=0.012)
    assert shrinkage(math.inf, 4) == 1


def test_the_learner_sees_reports_alone_and_the_corrected_bound() -> None:
    seen: dict[str, Any] = {}

    def learner(x: Tensor, labels: Tensor, reported: Tensor, max_gap: float) -> nn.Module:
        seen.update(x=x, labels=labels, reported=reported, max_gap=max_gap)
        return linear_rules(np.array([[1.0, 0, 0, 0]]), input_shape=(3,))

    for epsilon in (0.0, 1.0, math.inf):
        trained = train(epsilon, learner, max_gap=0.1)
        assert torch.equal(seen["x"], X)
        assert torch.equal(seen["labels"], Y)
        share = 1 / (1 + math.exp(-epsilon))
        assert (seen["reported"] == Z).double().mean() == pytest.approx(share, abs=0.03)
        assert seen["max_gap"] == pytest.approx(0.1 * (2 * share - 1))
        assert trained.events[0].epsilon == epsilon
        assert trained.mixing_GCC is None
        cost = priced(trained.events, PrivacyTarget(epsilon=1, delta=1e-6))
        assert cost.epsilon == pytest.approx(epsilon, rel=1e-5)
        assert (cost.unit, cost.relation) == ("sensitive attribute", "replace one")
    train(1.0, learner, max_gap=0.1, corrects_bound=False)
    assert seen["max_gap"] == 0.1


def test_two_steps_learn_on_one_half_and_mix_on_the_other() -> None:
    seen: dict[str, Any] = {}

    def learner(x: Tensor, *_: Any) -> nn.Module:
        seen["x"] = x
        return linear_rules(np.array([[1.0, 0, 1.0, -0.5]]), input_shape=(3,))

    trained = train(math.inf, learner, form="two_step", mixing_gap=0.0)
    first = {tuple(row) for row in seen["x"].tolist()}
    assert len(first) == 1500
    second = torch.tensor([tuple(row) not in first for row in X.tolist()])
    said = (X[:, 0] + X[:, 2] > 0.5).long()
    exact = joint_table(
        said[second].numpy(), Z[second].numpy(), num_groups=2, num_classes=2, labels_N=Y[second].numpy()
    )
    expected = fair_mixing(exact, DpPostprocessingConfig(max_gap=0), epsilon=math.inf)
    np.testing.assert_allclose(trained.mixing_GCC, expected.mixing_GCC, atol=1e-9)
    with pytest.raises(ValueError, match="Expected epsilon > 0"):
        train(0.0, learner, form="two_step")


@pytest.mark.parametrize("form", ["one_step", pytest.param("two_step", marks=pytest.mark.slow)])
def test_fairness_for_true_groups_is_learned_from_reports(form: str) -> None:
    plain = positive(train(3.0, form="one_step", max_gap=1.0))
    assert odds_gap(plain, Y, Z) > 0.15
    fair = positive(train(3.0, form=form))
    assert odds_gap(fair, Y, Z) < 0.08
    assert error(fair, Y) < error(plain, Y) + 0.12
    exact = positive(train(math.inf, form=form))
    assert odds_gap(exact, Y, Z) < 0.06


def test_what_cannot_be_reported_or_recovered_is_refused() -> None:
    with pytest.raises(ValueError, match="codes_N to hold integers from 0 to 1"):
        train(1.0, data=(X, Y, Z - 1 + Z))
    with pytest.raises(ValueError, match="labels to be codes from 0 to 1"):
        train(1.0, data=(X, Y + 1, Z))
    alone = torch.zeros_like(Z)
    alone[:3] = 1
    with pytest.raises(ValueError, match="min_share"):
        train(0.05, data=(X, Y, alone), form="two_step", min_share=0.2, num_rounds=2)


def test_the_estimator_of_both_forms() -> None:
    x, names, groups = X.numpy(), np.array(["no", "yes"])[Y.numpy()], np.array(["a", "b"])[Z.numpy()]
    settings: dict[str, Any] = {"epsilon": 2.0, "model": {"name": "logistic"}, "noise": "seeded", "random_state": 0}
    one = FairClassifier("randomised_response", **settings, randomised_response={"num_rounds": 10})
    one.fit(x, names, sensitive_features=groups)
    assert one.predict(x).shape == (3000,)
    assert one.privacy_.epsilon == pytest.approx(2.0, abs=1e-3)
    two = FairClassifier("randomised_response", **settings, randomised_response={"form": "two_step", "num_rounds": 10})
    two.fit(x, names, sensitive_features=groups)
    with pytest.raises(ValueError, match="sensitive_features"):
        two.predict(x)
    by_group = two.predict_proba(x, sensitive_features=groups)
    assert odds_gap(by_group[:, 1], Y, Z) < 0.1
