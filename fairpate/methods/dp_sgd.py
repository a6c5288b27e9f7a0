"""Stochastic gradient descent without privacy, DP-SGD, and FairDP-SGD.

DP-SGD (Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv 1607.00133, Algorithm 1):

    g_i = grad l(theta; x_i, y_i) for every record of a Poisson sample of rate q = L / N
    g   = (sum_i g_i min(1, C / |g_i|) + N(0, (zeta C)^2 I)) / L
    v   <- momentum v + g,   theta <- theta - learning_rate v

If the data set names persons, persons are sampled, N and L count persons, and g_i is the average gradient of a person's
records, or of ``records_per_person`` of them chosen at random.

Deviations from the paper:
- The cost is composed by Renyi curves or privacy loss distributions, not by the moments accountant: both are tighter.
- Momentum: post-processing of what a step releases.
- One norm over all parameters; the paper also clips layer by layer.
- q is L over a declared number of records. If none is declared, the real number is used, which is then public.

FairDP-SGD (Yaghini et al. 2023, FairPATE, Algorithm 6) adds a demographic-parity regulariser on public records. With r
= grad DPFR(theta; public batch) (:mod:`fairpate.nn.fit`):

    as_in_paper:  g = (sum_i clip(g_i + lambda r) + noise) / L
    post:         g = (sum_i clip(g_i) + noise) / L + lambda r

r depends on theta, which earlier steps released, and on public records. So as_in_paper is DP-SGD with other per-example
gradients, which are also clipped to C, and post is DP-SGD followed by post-processing: the events are those of DP-SGD,
and lambda = 0 is DP-SGD bit for bit. The public records and their groups must really be public.

Deviations from the paper:
- ``post`` is not the printed algorithm, and is the default: in ``as_in_paper`` one vector uses up every record's
  clipping bound, and the regulariser's strength follows the size of the sample.
- The sum is divided by L where the listing divides by the size of the sample, and the sample is Poisson.
- In the published code public records pass through the per-example gradients as if they were private ones; here they do
  not. Its other path, DPFR of the private batch, has no privacy and is left out.
- The temperature is 1, in the published code .01, at which the regulariser's gradient dominates the private one.
- r is computed on a public batch, in the listing on all public records; batches are stratified by group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from fairpate.config import Count, DpfrConfig, FitConfig, NotNegative, Positive, PrivacyTarget, RecordTerms, Section
from fairpate.lazy import Later, torch
from fairpate.methods import base
from fairpate.methods.base import PrivateMethod, Stream, Trained, Training, UnprotectedMethod
from fairpate.privacy.accountant import Event, PoissonGaussians
from fairpate.privacy.audit_bounds import Shadows
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces
from fairpate.types import Advance, Relation, Unit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairpate.data import Dataset
    from fairpate.nn import fit, models, per_example, private_fit
    from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps, PublicGradient
else:  # a configuration is read without torch
    fit, models = Later("fairpate.nn.fit"), Later("fairpate.nn.models")
    per_example, private_fit = Later("fairpate.nn.per_example"), Later("fairpate.nn.private_fit")


def train_sgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    config: FitConfig,
    *,
    generator: torch.Generator,
    on_progress: Advance = lambda *_: None,
) -> nn.Module:
    """Train ``model`` in place by SGD without privacy on ``x`` (N, ...) and ``y`` (N,), and return it.

    Errors as :func:`fairpate.nn.fit.fit`.
    """
    home = next(model.parameters()).device
    model.to(private_fit.training_device(model))
    fit.fit(model, x, y, config, generator=generator, on_epoch=lambda epoch, _: on_progress(epoch + 1, config.epochs))
    # The caller expects the model on its own device.
    return model.to(home)


class Sgd(UnprotectedMethod):
    """Plain SGD without privacy, for comparison only."""

    title: ClassVar[str] = "plain SGD"
    paper: ClassVar[str] = "Robbins and Monro 1951"
    family: ClassVar[str] = "dp_sgd"
    colour: ClassVar[int] = 6
    reads_groups: ClassVar[bool] = False

    method: str = "sgd"
    target: RecordTerms = RecordTerms()
    sgd: FitConfig = FitConfig()

    def train(self, training: Training) -> Trained:
        with training.reporter.stage(self.method) as advance:
            train_sgd(**base.arguments(training), config=self.sgd, on_progress=advance)
        return self.unprotected(training)


class DpSgdConfig(Section):
    """Settings of DP-SGD, without the noise multiplier, which is calibrated to the target."""

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
    records_per_person: Count = Field(32, description="Most records of a person in one step, chosen at random.")
    max_records: Count = Field(
        512, description="Largest number of records in memory at once; it does not change the result."
    )


def plan_steps(config: DpSgdConfig, *, num_records: int, noise_multiplier: float) -> PrivateSteps:
    """Return the steps of ``config``. Their number and the sampling rate are computed from the number of records that
    ``config`` declares, or else from ``num_records``, the number of private records or persons.

    ValueError if ``config.batch_size``, the expected size of a batch, is larger than this number of records.
    """
    # A declared number wins: the rate and the number of steps are published, and would reveal the real one.
    size = config.num_records or num_records
    if config.batch_size > size:
        what = f"{size} private records, or persons where these are protected"
        raise ValueError(f"Expected dp_sgd.batch_size <= {what}, got {config.batch_size}; lower it.")
    return private_fit.PrivateSteps(
        num_steps=math.ceil(config.epochs * size / config.batch_size),
        sampling_rate=config.batch_size / size,
        expected_batch_size=config.batch_size,
        noise_multiplier=noise_multiplier,
        **config.model_dump(exclude={"epochs", "batch_size", "num_records"}),
    )


def calibrated_steps(config: DpSgdConfig, target: PrivacyTarget, *, num_records: int) -> PrivateSteps:
    """Return the steps of ``config`` with the least noise at which they cost at most ``target``.

    ValueError if no noise suffices.
    """
    # The number of steps and their sampling rate do not depend on the noise.
    plan = plan_steps(config, num_records=num_records, noise_multiplier=0.0)
    silent = event_of(plan, unit="record", relation=target.record_relation)
    noise = base.noise_within(target, lambda noise: [replace(silent, noise_multiplier=noise)])
    return replace(plan, noise_multiplier=noise)


def train_dp_sgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: PrivateSteps,
    *,
    randomness: PrivateRandomness,
    relation: Relation = "add or remove one",
    person_N: Tensor | None = None,
    on_progress: Advance = lambda *_: None,
    public_gradient: PublicGradient | None = None,
    before_clipping: bool = False,
    watch: base.Watch | None = None,
) -> Trained:
    """Train ``model`` in place by DP-SGD on private ``x`` (N, ...) and ``y`` (N,), and return it with the event of all
    steps.

    ``person_N`` is the index of each record's person; if it is given, persons are protected. ``randomness`` is the
    source of samples and noise. ``public_gradient`` is added after the noise or, with ``before_clipping``, to every
    record's gradient before clipping; neither changes the event. ``watch`` and errors as in
    :class:`fairpate.nn.private_fit.PrivateTraining`.
    """
    # The multiplier is all that counts: clip norm and denominator scale the sum and its noise alike.
    event = event_of(steps, unit="record" if person_N is None else "person", relation=relation)
    clipper: Any = per_example.GradientClipper
    if public_gradient is not None and before_clipping:
        # A public vector changes each gradient's norm, so it is added before clipping, and not after the noise too.
        clipper, public_gradient = partial(private_fit.ShiftedClipper, public_gradient=public_gradient), None
    plan, loss = private_fit.StepPlan(clipper=clipper, events=(event,)), per_example.CrossEntropy()
    drawn: dict[str, Any] = {"randomness": randomness, "person_N": person_N, "public_gradient": public_gradient}
    drawn["watch"] = watch
    training = private_fit.PrivateTraining(model, x, y, loss, steps, plan=plan, **drawn)
    return Trained(model=model, events=training.run(on_progress=on_progress), noise=randomness.label)


def event_of(steps: PrivateSteps, *, unit: Unit, relation: Relation) -> PoissonGaussians:
    """Return the one event that describes all ``steps`` of a training to the accountant."""
    rate, noise = steps.sampling_rate, steps.noise_multiplier
    return PoissonGaussians(
        count=steps.num_steps, noise_multiplier=noise, sampling_rate=rate, unit=unit, relation=relation
    )


class DpSgdFamily(PrivateMethod):
    """Base class of the methods that train by DP-SGD, as section ``dp_sgd`` configures."""

    family: ClassVar[str] = "dp_sgd"
    dp_sgd: DpSgdConfig = DpSgdConfig()

    @property
    def rate_tells_size(self) -> bool:  # type: ignore[override]
        # Batch size over sampling rate is the number of records, and both are published.
        return self.dp_sgd.num_records is None

    def sgd_arguments(self, training: Training, target: PrivacyTarget) -> dict[str, Any]:
        """Return the keyword arguments of :func:`train_dp_sgd` for this run within ``target``, except
        ``on_progress``."""
        private = training.dataset.private
        # If persons are protected, persons are sampled: the rate is computed from their number.
        steps = calibrated_steps(self.dp_sgd, target, num_records=private.num_protected)
        records = {"model": training.model, "x": private.x, "y": private.y, "person_N": private.person_N}
        drawn = {"steps": steps, "randomness": self.randomness(), "relation": self.target.record_relation}
        return records | drawn | {"watch": training.watch}

    @property
    def declared_units(self) -> int | None:
        """The number of private records that section ``dp_sgd`` declares, if the method reads the section."""
        return None if "dp_sgd" in self.unread else self.dp_sgd.num_records

    def noise_of_steps(self, events: Sequence[Any]) -> dict[str, tuple[float, float, float]]:
        """Return for each release of a step its noise multiplier or scale, the variance of noise of scale 1, and its
        kurtosis. They follow from the ``events`` of the statement: one event may stand for two releases on one sample,
        whose squares of sensitivity over noise add up to the event's."""
        return {"gradients": (events[0].noise_multiplier, 1.0, 3.0)}

    def with_public_shares(self, *, num_groups: int, num_classes: int) -> Self:  # noqa: ARG002
        """Return a configuration whose steps do not depend on noisy shares of groups."""
        return self

    def attack(self, audited: base.Audited) -> Shadows | None:
        """Return an attack on the noisy steps of a training, if these are all that the run releases."""
        if not all(isinstance(event, PoissonGaussians | PoissonGaussianLaplaces) for event in audited.events):
            return None
        from fairpate.methods.attack_on_steps import attack_on_steps  # torch

        return attack_on_steps(self, audited)


class DpSgd(DpSgdFamily):
    """DP-SGD, with noise calibrated to the target. It protects one record or one person."""

    protects_persons: ClassVar[bool] = True
    known_before: ClassVar[str | None] = ""
    title: ClassVar[str] = "DP-SGD"
    paper: ClassVar[str] = "Abadi et al. 2016, arXiv 1607.00133"
    colour: ClassVar[int] = 2
    reads_groups: ClassVar[bool] = False

    method: str = "dp_sgd"

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...]:
        """Return the event of all steps of a training."""
        steps = calibrated_steps(self.dp_sgd, self.target, num_records=dataset.private.num_protected)
        return (event_of(steps, unit=dataset.unit, relation=self.target.record_relation),)

    def train(self, training: Training) -> Trained:
        with training.reporter.stage(self.method) as advance:
            return train_dp_sgd(**self.sgd_arguments(training, self.target), on_progress=advance)


class FairDpSgdConfig(DpfrConfig):
    """Settings of the parity regulariser of FairDP-SGD on public records."""

    weight: NotNegative = Field(0.3, description="lambda, weight of the regulariser; 0 switches it off.")
    variant: Literal["as_in_paper", "post"] = Field(
        "post",
        description="`as_in_paper`: the regulariser's gradient is added to every gradient before clipping; `post`: "
        "it is added once, after the noise.",
    )
    public_batch_size: Count = Field(64, description="Public records drawn for each step.")


def regulariser_gradient(
    public_x: Tensor, public_groups: Tensor, config: FairDpSgdConfig, generator: torch.Generator
) -> Callable[[nn.Module], list[Tensor]]:
    """Return a function that maps a model to the weighted gradient of the demographic-parity regulariser; each call
    uses a new batch of the public records (M, ...).

    Errors as :func:`fairpate.nn.fit.group_batches`.
    """
    # A generator of its own, so that switching the regulariser off leaves every other draw as it was.
    draws = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator.clone_state())))
    batches = fit.group_batches(public_groups, config.public_batch_size, draws)
    # Every batch has the same number of each group at the same places, so that one contrast serves all.
    fixed_GB = fit.contrast(public_groups[next(batches)])
    memory_format = models.memory_format_for(public_x)

    # Cached by identity: parameters change in place, so that a model's chain stays the same.
    @lru_cache(maxsize=1)
    def anatomy(model: nn.Module) -> tuple[per_example.DenseChain | None, list[Tensor]]:
        return per_example.DenseChain.of(model), [p for p in model.parameters() if p.requires_grad]

    def gradient(model: nn.Module) -> list[Tensor]:
        chain, parameters = anatomy(model)
        device = parameters[0].device
        x = models.scale_bytes(public_x.index_select(0, next(batches)).to(device))
        x = x.contiguous(memory_format=memory_format)
        contrast_GB = fixed_GB.to(device)
        if chain is None:
            logits = model(x)
            slope = config.weight * fit.dpfr_gradient(logits.detach(), contrast_GB, config)
            # A parameter that the logits do not read has a gradient of 0.
            return list(torch.autograd.grad(logits, parameters, slope, materialize_grads=True))
        values = chain.forward(x)
        slope = config.weight * fit.dpfr_gradient(values[-1], contrast_GB, config)
        sums = {id(p): total for p, total in chain.summed_gradients(values, slope)}
        return [sums[id(p)] for p in parameters]

    return gradient


class FairDpSgd(DpSgd):
    """FairDP-SGD: DP-SGD with a regulariser on public records that enforces demographic parity."""

    title: ClassVar[str] = "FairDP-SGD"
    paper: ClassVar[str] = "Yaghini et al. 2023 (FairPATE), Algorithm 6"
    colour: ClassVar[int] = 1

    reads_public: ClassVar[bool] = True

    method: str = "fair_dp_sgd"
    fair_dp_sgd: FairDpSgdConfig = FairDpSgdConfig()

    def train(self, training: Training) -> Trained:
        public, settings = training.dataset.public, self.fair_dp_sgd
        regulariser = partial(regulariser_gradient, public.x, public.z, settings)
        if settings.weight:
            # From a generator of its own, so that training draws the same; it reads public records alone.
            gradient = regulariser(training.generator(Stream.TRAINING))(training.model)
            norm = float(torch.stack([part.norm() for part in gradient]).norm())
            if norm > self.dp_sgd.clip_norm:
                training.reporter.note(
                    "regulariser",
                    f"at the start its gradient is {norm / self.dp_sgd.clip_norm:.1f} times dp_sgd.clip_norm and may "
                    "outweigh those of private records; lower fair_dp_sgd.weight, or raise its temperature",
                )
        with training.reporter.stage(self.method) as advance:
            return train_dp_sgd(
                **self.sgd_arguments(training, self.target),
                public_gradient=regulariser(training.generator(Stream.TRAINING)) if settings.weight else None,
                before_clipping=settings.variant == "as_in_paper",
                on_progress=advance,
            )
