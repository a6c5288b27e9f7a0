"""DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1).

    g_i = grad l(theta; x_i, y_i) for every record of a Poisson sample of rate q = L / N
    g   = (sum_i g_i min(1, C / |g_i|) + N(0, (zeta C)^2 I)) / L
    v   <- momentum v + g,   theta <- theta - learning_rate v

Where the data set names persons, these are sampled, N and L count them, and g_i is the average over a person's records,
or over ``records_per_person`` of them chosen at random.

Deviations from the paper:
- The cost is composed by Renyi curves or privacy loss distributions, not by the moments accountant: both are tighter.
- Momentum: post-processing of what a step releases.
- One norm over all parameters; the paper also clips layer by layer.
- q is L over a declared number of records. Left out, the real number is used and so treated as public.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fairpate.config import Count, Positive, PrivacyTarget, Section
from fairpate.methods.definition import PrivateMethod, Training, arguments
from fairpate.methods.trained import Progress, Trained
from fairpate.nn.per_example import CrossEntropy
from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps, PrivateTraining, PublicGradient
from fairpate.nn.shifted_fit import ShiftedTraining
from fairpate.privacy.calibration import noise_multiplier_for
from fairpate.privacy.events import PoissonGaussians
from fairpate.types import Relation


class DpSgdConfig(Section):
    """DP-SGD. Its noise multiplier is not set here: it follows from a target, or is given where training starts."""

    epochs: Positive = Field(20.0, description="Expected passes over the private records.")
    batch_size: Count = Field(
        256,
        description="Expected records (persons, where these are protected) of a Poisson batch, and the constant "
        "denominator.",
    )
    clip_norm: Positive = 1.0
    learning_rate: Positive = 0.5
    momentum: float = Field(0.9, ge=0, lt=1)
    num_records: Count | None = Field(
        None,
        description="Public number of private records (persons, where these are protected) that the sampling rate is "
        "set for; null: the real number, which is then public.",
    )
    records_per_person: Count = Field(
        32, description="Most records of a person in one step, chosen at random; of no effect where none has several."
    )
    max_records: Count = Field(512, description="Records in memory at once; changes no result.")


def plan_steps(config: DpSgdConfig, *, num_records: int, noise_multiplier: float) -> PrivateSteps:
    """The steps that ``config`` means for ``num_records`` private ones, or persons, unless it declares the number.

    ValueError for an expected batch larger than that number.
    """
    # A declared number wins: the rate and the number of steps are published, and would tell the real one.
    size = config.num_records or num_records
    if config.batch_size > size:
        raise ValueError(
            f"Expected dp_sgd.batch_size <= {size} private records, or persons where these are protected, got "
            f"{config.batch_size}; lower it."
        )
    return PrivateSteps(
        num_steps=math.ceil(config.epochs * size / config.batch_size),
        sampling_rate=config.batch_size / size,
        expected_batch_size=config.batch_size,
        clip_norm=config.clip_norm,
        noise_multiplier=noise_multiplier,
        learning_rate=config.learning_rate,
        momentum=config.momentum,
        max_records=config.max_records,
        records_per_person=config.records_per_person,
    )


def calibrated_steps(config: DpSgdConfig, target: PrivacyTarget, *, num_records: int) -> PrivateSteps:
    """The steps with the least noise that keeps them within ``target``. ValueError for a target out of reach."""
    # How many steps there are, and of which rate, does not depend on the noise.
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
    person_N: Tensor | None = None,
    on_progress: Progress = lambda *_: None,
    public_gradient: PublicGradient | None = None,
    before_clipping: bool = False,
) -> Trained:
    """Train ``model`` in place on private ``x`` (N, ...) and ``y`` (N,).

    ``person_N`` numbers whose the records are, and then persons are protected. ``generator`` drives dropout alone:
    sampling and noise come from ``randomness``. ``public_gradient`` is added after the noise, or to every record's
    gradient ``before_clipping``; neither changes the events. Errors as
    :class:`fairpate.nn.private_fit.PrivateTraining`.
    """
    loss = CrossEntropy()
    # Shifted by a public vector a gradient has another norm, so each has to be formed before it is clipped.
    kind = ShiftedTraining if public_gradient is not None and before_clipping else PrivateTraining
    options: dict[str, Any] = {"public_gradient": public_gradient, "person_N": person_N}
    training = kind(model, x, y, loss, steps, randomness=randomness, **options)
    training.run(generator=generator, on_progress=on_progress)
    # The multiplier is all that counts: clip norm and denominator scale the sum and its noise alike.
    event = PoissonGaussians(
        count=steps.num_steps,
        noise_multiplier=steps.noise_multiplier,
        sampling_rate=steps.sampling_rate,
        unit="record" if person_N is None else "person",
        relation=relation,
    )
    return Trained(model=model, events=(event,), noise=randomness.label)


class DpSgdFamily(PrivateMethod):
    """Methods whose steps are DP-SGD's."""

    dp_sgd: DpSgdConfig = DpSgdConfig()

    @property
    def declared_size(self) -> int | None:
        """As ``dp_sgd`` declares it."""
        return self.dp_sgd.num_records

    def sgd_arguments(self, training: Training) -> dict[str, Any]:
        """What :func:`train` takes, but for progress."""
        private = training.dataset.private
        # Persons where these are protected: the rate is that of what is sampled.
        steps = calibrated_steps(self.dp_sgd, self.target, num_records=private.num_protected)
        given = {"steps": steps, "randomness": self.randomness(), "relation": self.target.record_relation}
        return arguments(training) | given | {"person_N": private.person_N}


class DpSgd(DpSgdFamily):
    """Within the target for one record or person."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "DP-SGD"
    paper: ClassVar[str] = "Abadi et al. 2016, arXiv 1607.00133"
    reads_groups: ClassVar[bool] = False

    method: str = "dp_sgd"

    def train(self, training: Training) -> Trained:
        """With the least noise that the target allows."""
        with training.reporter.stage(self.method) as advance:
            return train(**self.sgd_arguments(training), on_progress=advance)
