"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1).

    g_i = grad l(theta; x_i, y_i) for every record of a Poisson sample of rate q = L / N
    g   = (sum_i g_i min(1, C / |g_i|) + N(0, (zeta C)^2 I)) / L
    v   <- momentum v + g,   theta <- theta - learning_rate v

Deviations from the paper:
- The cost is composed by Renyi curves or privacy loss distributions, not by the moments accountant: both are tighter.
- Momentum: post-processing of what a step releases.
- One norm over all parameters; the paper also clips layer by layer.
- q is L over a declared number of records. Left out, the real number is used and so treated as public.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fairpate.baselines.method import Progress, Trained
from fairpate.nn.fit import uses_dropout
from fairpate.nn.models import seeded_torch
from fairpate.nn.per_example import CrossEntropy
from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps, PrivateTraining, PublicGradient
from fairpate.nn.shifted_fit import ShiftedTraining
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.privacy.calibration import noise_multiplier_for
from fairpate.train_config import DpSgdConfig, PrivacyTarget
from fairpate.types import Relation


def plan_steps(config: DpSgdConfig, *, num_records: int, noise_multiplier: float) -> PrivateSteps:
    """The steps that ``config`` means for ``num_records`` private ones, unless it declares their number itself.

    ValueError for an expected batch larger than that number.
    """
    size = config.num_records or num_records
    if config.batch_size > size:
        raise ValueError(f"Expected dp_sgd.batch_size <= {size} private records, got {config.batch_size}; lower it.")
    return PrivateSteps(
        num_steps=math.ceil(config.epochs * size / config.batch_size),
        sampling_rate=config.batch_size / size,
        expected_batch_size=config.batch_size,
        clip_norm=config.clip_norm,
        noise_multiplier=noise_multiplier,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        max_records=config.max_records,
    )


def calibrated_steps(config: DpSgdConfig, target: PrivacyTarget, *, num_records: int) -> PrivateSteps:
    """The steps with the least noise that keeps them within ``target``. ValueError for a target out of reach."""
    plan = plan_steps(config, num_records=num_records, noise_multiplier=0.0)
    noise = noise_multiplier_for(
        target_epsilon=target.epsilon,
        target_delta=target.delta,
        sampling_rate=plan.sampling_rate,
        num_steps=plan.num_steps,
        relation=target.record_relation,
        accounting=target.accounting,
    )
    return plan_steps(config, num_records=num_records, noise_multiplier=noise)


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: PrivateSteps,
    *,
    randomness: PrivateRandomness,
    generator: torch.Generator,
    relation: Relation = "add or remove one",
    on_progress: Progress = lambda *_: None,
    public_gradient: PublicGradient | None = None,
    before_clipping: bool = False,
) -> Trained:
    """Train ``model`` in place on private ``x`` (N, ...) and ``y`` (N,).

    ``generator`` drives dropout alone: sampling and noise come from ``randomness``. ``public_gradient`` is added after
    the noise, or to every record's gradient ``before_clipping``; neither changes the events. Errors as
    :func:`fairpate.nn.private_fit.fit_privately`.
    """
    loss = CrossEntropy()
    training: PrivateTraining
    if public_gradient is not None and before_clipping:
        training = ShiftedTraining(model, x, y, loss, steps, randomness=randomness, public_gradient=public_gradient)
    else:
        training = PrivateTraining(model, x, y, loss, steps, randomness=randomness, public_gradient=public_gradient)
    with ExitStack() as stack:
        if uses_dropout(model):
            stack.enter_context(seeded_torch(int(torch.randint(2**62, (), generator=generator))))
        for step in range(steps.num_steps):
            training.step()
            on_progress(step + 1, steps.num_steps)
    event = PoissonGaussians(
        count=steps.num_steps,
        noise_multiplier=steps.noise_multiplier,
        sampling_rate=steps.sampling_rate,
        relation=relation,
    )
    return Trained(model=model.eval(), events=(event,), noise=randomness.label)
