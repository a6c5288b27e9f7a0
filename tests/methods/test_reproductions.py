"""The forms of three papers that guarantee nothing: what they claim, and what that costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from parity_data import signal_records, weights
from priced import priced
from reproductions import dp_fermi_noise, oracle_as_in_paper, pf_ld_as_in_paper

from fairpate.config import ModelConfig, PrivacyTarget
from fairpate.methods.dp_fair_learning import DpOracleLearnerConfig, GameRules, Setting, play
from fairpate.methods.f_ld import PfLdConfig, PfLdNoise
from fairpate.methods.parity import MeanParity, ParityCells
from fairpate.nn.models import build_model
from fairpate.nn.private_fit import OsRandomness
from fairpate.privacy import accountant
from fairpate.privacy.accountant import epsilon_pld
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians


def test_pf_lds_example_is_claimed_at_2_and_costs_11() -> None:
    config = PfLdConfig(epochs=100, batch_size=500)
    noise = PfLdNoise(gradient=5.0, violation=50.0, size=0.0)
    claimed = pf_ld_as_in_paper.epsilon_as_in_paper(config, noise, num_records=10_000, target_delta=1e-5)
    assert claimed == pytest.approx(2.15, abs=0.005)
    whole_orders = [float(order) for order in range(2, 257)]
    duals = AttributeGaussians(count=100, attribute_noise_multiplier=50.0)
    for gradients, expected in (
        (AttributeGaussians(count=100, attribute_noise_multiplier=5.0), 10.86),
        (SecretBatchAttributeGaussians(count=2000, attribute_noise_multiplier=5.0, sampling_rate=0.05), 11.22),
    ):
        cost = accountant.epsilon([gradients, duals], target_delta=1e-5, orders_A=whole_orders)
        assert cost.epsilon == pytest.approx(expected, abs=0.005)


def pf_ld(num_classes: int, config: PfLdConfig, noise: PfLdNoise):
    x, y, z = signal_records(256)
    model = build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=num_classes, generator_seed=0)
    start = weights(model)
    done = pf_ld_as_in_paper.train(
        model,
        x,
        y,
        z,
        config,
        noise,
        parity=MeanParity(constraint="demographic_parity", num_groups=2, num_classes=num_classes),
        randomness=OsRandomness(),
        generator=torch.Generator().manual_seed(0),
    )
    return done, start


def test_pf_ld_as_printed_costs_infinity() -> None:
    config, target = PfLdConfig(epochs=4, warmup_epochs=1, batch_size=64), PrivacyTarget(epsilon=3.0)
    noise = pf_ld_as_in_paper.published_noise(config, target, num_records=256)
    done, start = pf_ld(2, config, noise)
    assert priced(done.events, target).epsilon == math.inf
    claimed = pf_ld_as_in_paper.epsilon_as_in_paper(config, noise, num_records=256, target_delta=target.delta)
    assert claimed == pytest.approx(3.0, rel=0.01)
    assert not np.array_equal(weights(done.model), start)
    with pytest.raises(ValueError, match="2 classes in the paper's form"):
        pf_ld(3, config, noise)


def test_dp_fermis_noise_costs_what_the_sheet_says() -> None:
    """Adult at epsilon 1 (n = 36631, batch 1024, 7200 steps): one stream 0.852, both 1.227, by loss distributions."""
    target, steps = PrivacyTarget(epsilon=1, delta=36631**-2), dp_fermi_noise.adult_steps()
    assert steps.num_steps in (7200, 7201)
    one, both = (dp_fermi_noise.streams(target, steps, count=count) for count in (1, 2))
    assert epsilon_pld([one], target_delta=target.delta) == pytest.approx(0.852, rel=2e-3)
    assert priced([both], target).epsilon == pytest.approx(1.227, rel=2e-3)
    with pytest.raises(ValueError, match="at least"):
        dp_fermi_noise.published_noise_multiplier(PrivacyTarget(epsilon=200), steps)


@pytest.mark.parametrize(("nominal", "true"), [(10, 5.83), (30, 23.7), (60, 73.6)])
def test_advanced_composition_in_full_of_the_printed_rounds(nominal: float, true: float) -> None:
    """Twice 20 releases at delta 1e-7, by Dwork, Rothblum and Vadhan 2010; the paper stops at the first term."""
    epsilon = oracle_as_in_paper.published_round_epsilon(epsilon=nominal, delta=1e-7, num_rounds=20)
    assert epsilon == pytest.approx(nominal / (4 * math.sqrt(20 * math.log(1e7))))
    found = math.sqrt(80 * math.log(1e7)) * epsilon + 40 * epsilon * math.expm1(epsilon)
    assert found == pytest.approx(true, abs=0.05)
    assert oracle_as_in_paper.composed_in_full(epsilon, delta=1e-7, num_rounds=20) == pytest.approx(found)


def oracle(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Setting:
    config = DpOracleLearnerConfig(num_rounds=6)
    return Setting(
        features=np.hstack([x.double().numpy(), np.ones((len(x), 1))]),
        cells=ParityCells.of(y.numpy(), z.numpy(), num_groups=2, constraint=config.constraint),
        config=config,
        target=PrivacyTarget(epsilon=8, delta=1e-6),
        rules=GameRules(num_rounds=6, dual_bound=2.0, learning_rate=0.5, max_gap=0.02),
        source=SeededSource(0),
        reserve=lambda *_: None,
    )


def test_the_printed_oracle_learner_costs_infinity() -> None:
    setting = oracle(*signal_records(600))
    sides = oracle_as_in_paper.sides_as_in_paper(setting)
    answers, _ = play(setting.rules, sides.shares_GE, answer=sides.answer, violations=sides.violations)
    assert len(answers) == 6
    assert priced(sides.events, setting.target).epsilon == math.inf
    assert sides.round_epsilon == pytest.approx(8 / (4 * math.sqrt(6 * math.log(1e6))))
    x, _, _ = signal_records(8)
    with pytest.raises(ValueError, match="more than one record in every cell"):
        oracle_as_in_paper.sides_as_in_paper(oracle(x, torch.arange(8) % 2, (torch.arange(8) < 2).long()))


def test_the_printed_term_of_pf_ld_moves_no_prediction_of_a_softmax_of_two_classes() -> None:
    x, *_ = signal_records(256)
    config = PfLdConfig(warmup_epochs=1, epochs=3, batch_size=64, learning_rate=0.1, dual_step=5.0, optimizer="sgd")
    none = PfLdNoise(gradient=0.0, violation=0.0, size=0.0)
    printed, plain = (
        pf_ld(2, config.model_copy(update={"max_multiplier": most}), none)[0].model for most in (5.0, 1e-12)
    )
    assert not torch.allclose(printed(x), plain(x), atol=1e-3)
    assert torch.allclose(printed(x).softmax(dim=1), plain(x).softmax(dim=1), atol=1e-5)
