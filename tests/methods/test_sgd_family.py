"""SGD, DP-SGD and FairDP-SGD: what they report, what a weight of zero is, and that the regulariser works."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import NEEDS_GPU
from method_kinds import quick_and_slow
from parity_data import signal_records, trained_on
from priced import priced
from torch import Tensor, nn

from fairpate.config import ConfigError, FitConfig, ModelConfig, PrivacyTarget
from fairpate.data import load_data
from fairpate.methods import dp_sgd
from fairpate.methods.base import Trained, configured
from fairpate.methods.dp_sgd import DpSgdConfig, FairDpSgdConfig
from fairpate.nn.fit import dpfr, hard_disparity, predict_logits
from fairpate.nn.models import build_model, seeded_torch
from fairpate.nn.per_example import CrossEntropy, GradientClipper
from fairpate.nn.private_fit import OsRandomness, SeededRandomness
from fairpate.privacy.accountant import NoisyArgmaxes, PoissonGaussians, epsilon, epsilon_pld
from fairpate.run.run import train_model
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

CONFIG = DpSgdConfig(epochs=4, batch_size=100, learning_rate=1.0)
VARIANTS = ["as_in_paper", "post"]


def model() -> nn.Module:
    return build_model(ModelConfig(name="mlp", hidden=(8,)), input_shape=(3,), num_classes=2, generator_seed=0)


def weights(trained: Trained) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def run_dp_sgd(noise_multiplier: float = 1.0, **changed: Any) -> Trained:
    x, y, _ = signal_records(800)
    steps = dp_sgd.plan_steps(CONFIG.model_copy(update=changed), num_records=len(x), noise_multiplier=noise_multiplier)
    return dp_sgd.train_dp_sgd(model(), x, y, steps, randomness=SeededRandomness(3))


def run_fair(noise_multiplier: float = 1.0, epochs: float = 4, **settings: Any) -> Trained:
    x, y, _ = signal_records(800)
    public_x, _, public_z = signal_records(300, seed=1)
    steps = dp_sgd.plan_steps(
        CONFIG.model_copy(update={"epochs": epochs}), num_records=len(x), noise_multiplier=noise_multiplier
    )
    config, generator = FairDpSgdConfig(**settings), torch.Generator().manual_seed(0)
    return dp_sgd.train_dp_sgd(
        model(),
        x,
        y,
        steps,
        public_gradient=dp_sgd.regulariser_gradient(public_x, public_z, config, generator) if config.weight else None,
        before_clipping=config.variant == "as_in_paper",
        randomness=SeededRandomness(3),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("maximum", quick_and_slow(["hardmax", "softmax"], ["softmax"]))
def test_a_weight_of_zero_is_dp_sgd_bit_for_bit(variant: str, maximum: str) -> None:
    assert torch.equal(weights(run_fair(weight=0.0, variant=variant, maximum=maximum)), weights(run_dp_sgd()))
    assert not torch.equal(weights(run_fair(weight=0.1, variant=variant, maximum=maximum)), weights(run_dp_sgd()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_events_do_not_know_the_weight(variant: str) -> None:
    events = {run_fair(weight=weight, variant=variant, epochs=0.25).events for weight in (0.0, 1.0, 10.0)}
    assert events == {run_dp_sgd(epochs=0.25).events}


@pytest.mark.parametrize("variant", quick_and_slow(VARIANTS, ("as_in_paper",)))
def test_the_regulariser_narrows_the_gap(variant: str) -> None:
    x, _, z = signal_records(2000, seed=2)

    def gap(trained: Trained) -> float:
        return hard_disparity(predict_logits(trained.model, x), z)

    plain, fair = gap(run_dp_sgd(epochs=20)), gap(run_fair(weight=1.0, variant=variant, temperature=0.5, epochs=20))
    assert plain > 0.35
    assert fair < 0.6 * plain


@pytest.mark.parametrize("hidden", [(8,), ()])
def test_the_gradient_of_the_regulariser_is_autograds(hidden: tuple[int, ...]) -> None:
    """By hand for a chain of dense layers, by autograd for one that a hook makes opaque: the same numbers."""
    x, _, z = signal_records(50)
    name = "mlp" if hidden else "logistic"
    network = build_model(ModelConfig(name=name, hidden=hidden), input_shape=(3,), num_classes=2, generator_seed=0)
    config = FairDpSgdConfig(weight=2.5, temperature=0.5, public_batch_size=50)
    expected = torch.autograd.grad(2.5 * dpfr(network(x), z, config), list(network.parameters()))
    for _ in range(2):
        gradient = dp_sgd.regulariser_gradient(x, z, config, torch.Generator())
        for ours, theirs in zip(gradient(network), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        network.register_forward_hook(lambda *_: None)


def test_dropout_is_refused_as_one_record_would_move_the_masks_of_all_after_it() -> None:
    x, y, _ = signal_records(200)
    mlp = build_model(ModelConfig(name="mlp", hidden=(32,)), input_shape=(3,), num_classes=2, generator_seed=0)
    network = nn.Sequential(*mlp[:-1], nn.Dropout(0.5), mlp[-1])  # type: ignore[index]
    clipper = GradientClipper(network.train(), CrossEntropy(), clip_norm=1.0)

    def clipped_sum(first: int) -> Tensor:
        with seeded_torch(7):
            return torch.cat([part.flatten() for part in clipper.sum(x[first:], y[first:]).gradients])

    assert (clipped_sum(0) - clipped_sum(1)).norm() > 2  # where 1 would be priced
    steps = dp_sgd.plan_steps(CONFIG, num_records=len(x), noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="does not hold with dropout"):
        dp_sgd.train_dp_sgd(network, x, y, steps, randomness=SeededRandomness(3))


def test_the_steps_follow_from_declared_and_from_real_sizes() -> None:
    steps = dp_sgd.plan_steps(DpSgdConfig(epochs=3, batch_size=50), num_records=1000, noise_multiplier=1.0)
    assert (steps.num_steps, steps.sampling_rate, steps.expected_batch_size) == (60, 0.05, 50)
    declared = DpSgdConfig(epochs=3, batch_size=50, num_records=500)
    assert dp_sgd.plan_steps(declared, num_records=1000, noise_multiplier=1.0).sampling_rate == 0.1
    with pytest.raises(ValueError, match=r"batch_size <= 10 .* got 50"):
        dp_sgd.plan_steps(DpSgdConfig(batch_size=50), num_records=10, noise_multiplier=1.0)


calibrated_steps = cache(dp_sgd.calibrated_steps)


@pytest.mark.parametrize(
    "target",
    [
        PrivacyTarget(epsilon=2.0, accounting="rdp"),
        pytest.param(PrivacyTarget(epsilon=2.0, accounting="pld"), marks=pytest.mark.slow),
        PrivacyTarget(epsilon=2.0, accounting="pld", relation="replace one"),
    ],
)
def test_noise_meets_the_target_under_its_own_relation_and_accountant(target: PrivacyTarget) -> None:
    steps = calibrated_steps(CONFIG, target, num_records=800)
    event = PoissonGaussians(
        count=steps.num_steps,
        noise_multiplier=steps.noise_multiplier,
        sampling_rate=steps.sampling_rate,
        relation=target.record_relation,
    )
    cost = priced([event], target)
    expected = epsilon_pld([event], target_delta=1e-5)
    if target.accounting == "rdp":
        expected = epsilon([event], target_delta=1e-5).epsilon
    assert cost.epsilon == expected
    assert 1.98 < cost.epsilon <= 2.0
    assert (cost.unit, cost.relation, cost.accounting) == ("record", target.record_relation, target.accounting)


def test_replacing_a_record_takes_more_noise_and_renyi_curves_do_not_price_it() -> None:
    """Even than Rényi curves ask for where a record is added."""
    targets = (
        PrivacyTarget(epsilon=2.0, accounting="pld", relation="replace one"),
        PrivacyTarget(epsilon=2.0, accounting="rdp"),
    )
    replaced, added = (calibrated_steps(CONFIG, target, num_records=800).noise_multiplier for target in targets)
    assert replaced > 1.3 * added
    with pytest.raises(ValueError, match="Expected accounting: pld"):
        PrivacyTarget(relation="replace one", accounting="rdp")


def test_events_under_another_relation_are_not_priced() -> None:
    with pytest.raises(ValueError, match="replace one"):
        priced(run_dp_sgd().events, PrivacyTarget(relation="replace one"))
    with pytest.raises(ValueError, match="Expected privacy events"):
        priced([], PrivacyTarget())


def test_queries_beside_sampled_steps_are_priced_by_renyi_curves() -> None:
    queries = NoisyArgmaxes(count=10, noise_stddev_votes=40.0)
    sampled = PoissonGaussians(count=20, noise_multiplier=2.0, sampling_rate=0.1)
    cost = priced([queries, sampled], PrivacyTarget(accounting="pld"))
    assert (cost.epsilon, cost.accounting) == (epsilon([queries, sampled], target_delta=1e-5).epsilon, "rdp")


def test_plain_sgd_learns_and_promises_nothing() -> None:
    x, y, z = signal_records(800)
    trained = trained_on(dp_sgd.Sgd(sgd=FitConfig(epochs=15, learning_rate=0.02)), x, y, z)
    assert (trained.model(x).argmax(dim=1) == y).float().mean() > 0.95
    for accounting in ("rdp", "pld"):
        assert priced(trained.events, PrivacyTarget(accounting=accounting)).epsilon == math.inf
    assert "not private" in trained.noise


def test_seeded_noise_says_so() -> None:
    assert run_dp_sgd().noise == "seeded: not private"
    assert OsRandomness().label == "os_entropy"


def test_public_records_of_one_group_are_refused() -> None:
    x, _, z = signal_records(10)
    with pytest.raises(ValueError, match="two groups"):
        dp_sgd.regulariser_gradient(x, torch.zeros_like(z), FairDpSgdConfig(), torch.Generator())


@NEEDS_GPU
@pytest.mark.parametrize("method", ["sgd", "dp_sgd", "fair_dp_sgd", "dp_fermi", "raco_dp"])
def test_convolutions_are_trained_on_a_gpu_where_a_seed_means_what_it_means_on_a_cpu(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {
        "data": {"name": "color_digits", "num_test": 200},
        "student": {"model": {"name": "cnn", "hidden": [8]}},
    }
    steps = {"noise": "seeded", "dp_sgd": {"epochs": 1, "batch_size": 200, "momentum": 0.0}}
    config = configured(values | ({"sgd": {"epochs": 1}} if method == "sgd" else steps), method=method)
    dataset = load_data(config.data)

    def trained_weights(place: str) -> Tensor:
        trained, _ = train_model(config, dataset, Reporter(quiet=True), folder=tmp_path / place)
        assert {p.device.type for p in trained.model.parameters()} == {"cpu"}
        return weights(trained)

    on_gpu, used = trained_weights("gpu"), torch.cuda.max_memory_allocated()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = trained_weights("cpu")
    assert used > 0
    torch.testing.assert_close(on_gpu, on_cpu, atol=2e-3, rtol=1e-2)
