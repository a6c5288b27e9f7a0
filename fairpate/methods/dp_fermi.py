"""DP-FERMI (Lowy, Gupta and Razaviyayn 2023, "Stochastic Differentially Private and Fair Learning", arXiv 2210.08781).

ERMI measures how far predictions depend on groups. It is the maximum over matrices W of a mean over records, so that a
descent in theta and an ascent in W need sums over records alone. With predictions F = softmax(h(x)), group shares p,
the record's group s and ``psi(F, s; W) = - sum_j F_j |W[:, j]|^2 + 2 <W[s], F> / sqrt(p_s) - 1``

    min over theta, max over |W| <= R:    mean over records of  loss + lambda psi

Demographic parity has one W and one p. Equalized odds has those of each label, and equal opportunity those of one: a
record plays in its own game, or in none. One step on a batch of L expected records, both with the old theta and W:

    theta <- theta - rate ((sum of clip(grad loss + lambda grad psi, C) + N(0, (zeta C)^2)) / L)
    W     <- project(W + matrix rate ((sum of grad_W psi + N(0, (zeta_W C_W)^2)) / L)),    C_W = 2 / sqrt(min p) + 2 R

C_W bounds |grad_W psi| for every record, so W's gradients need no clipping. What is protected depends on the mode:

- ``all``, the default: the whole record, on Poisson batches. The two sums are one Gaussian of multiplier
  (zeta^-2 + zeta_W^-2)^-1/2 on one sample. Where the data set names persons, these are sampled, and a person adds the
  averages over their records: of gradients, clipped, of grad_W psi, within C_W like each of them, and of a count of
  one, to the released shares.
- ``sens_public_batches``: the group alone. Batches partition the records and everybody knows them. The part of the
  gradient that does not depend on the group has no noise; what remains is centred over groups and clipped to C, so that
  another group moves it by 2 C, and W's by 2 sqrt(1 / p_a + 1 / p_b). No amplification: once an epoch, in full.
- ``sens_secret_batches``: the same on Poisson batches. The part without noise tells who is in the batch, so that
  sampling helps only as far as a mixture does.

Group shares enter every step. They are declared, or released once under a noise of their own, and floored.

Deviations from the paper and its code:
- The paper calibrates two streams of noise to the whole budget each; here they share it.
- Its amplification by sampling where batches show, and its claim for whole records while the loss has no noise, do not
  hold. ``noise_rule`` ``as_in_paper`` takes its closed form for the noise; the price stays the accountant's.
- Its matrix step carries lambda with noise for lambda = 1; here the rate of W stands for the product. In its listing
  theta's noise is multiplied by lambda and covers the fairness term alone; here it is on the sum of clipped gradients.
- Sums are divided by the expected size L where the listing divides by the size of the batch.
- Per-record clipping replaces a Lipschitz constant that nobody knows; the code divides before it clips.
- The mean of the last iterates may be returned, where the theory draws one. Momentum, as DP-SGD has it here.

Shapes: N records, B of a batch, E events (games), G groups, Q = E G cells, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fairpate.app.seeds import Stream
from fairpate.config import CountOrZero, Fraction, NotNegative, Positive, PrivacyTarget, Section
from fairpate.methods import dp_sgd
from fairpate.methods.definition import Training
from fairpate.methods.dp_sgd import DpSgdConfig, DpSgdFamily
from fairpate.methods.fermi_shares import Cells, Shares, release_shares, share_events
from fairpate.methods.parity import FloatArray
from fairpate.methods.trained import Progress, Trained
from fairpate.nn.fermi import (
    FermiTraining,
    GroupFermiTraining,
    MatrixGame,
    PublicPartitions,
    default_radius,
    watched_targets,
)
from fairpate.nn.private_fit import PrivateRandomness, PrivateSteps
from fairpate.privacy.calibration import least_noise
from fairpate.privacy.events import Event, PoissonGaussians, of_unit
from fairpate.privacy.fair_training import AttributeGaussians, SecretBatchAttributeGaussians


class DpFermiConfig(Section):
    """DP-FERMI. Steps, clipping and learning rate are those of ``dp_sgd``."""

    constraint: Literal["demographic_parity", "equalized_odds", "equal_opportunity"] = "demographic_parity"
    positive_label: CountOrZero = Field(1, description="The label of equal_opportunity.")
    mode: Literal["all", "sens_public_batches", "sens_secret_batches"] = Field(
        "all", description="What is protected: the whole record, or the sensitive attribute alone."
    )
    weight: NotNegative = Field(1.0, description="lambda; 0 is DP-SGD.")
    radius: Positive | None = Field(None, description="R, of each W; null: 1.5 times the root of the classes.")
    matrix_learning_rate: Positive = Field(0.3, description="Of W, lambda included.")
    matrix_noise_ratio: Positive = Field(2.0, description="Noise multiplier of W over that of the model.")
    shares: tuple[tuple[Fraction, ...], ...] | None = Field(
        None, description="Public share of each group in each event, declared; null releases them."
    )
    share_noise: Positive = Field(30.0, description="Standard deviation of the released counts, in records or persons.")
    min_share: float = Field(0.01, gt=0, lt=1, description="Smaller released shares are raised to it.")
    averaged_share: Fraction = Field(0.5, description="Of the last steps, whose weights are averaged; 0: the last.")
    noise_rule: Literal["accounted", "as_in_paper"] = Field(
        "accounted", description="as_in_paper: the paper's closed form, which costs more than the target."
    )


@dataclass(frozen=True, kw_only=True)
class FermiSteps:
    """``steps`` with theta's noise, W's ``matrix_noise_multiplier``, and the ``event`` that all of them are.

    ``epsilon_as_in_paper`` is what the paper would claim for them, where its noise was asked for.
    """

    steps: PrivateSteps
    matrix_noise_multiplier: float
    event: Event
    epsilon_as_in_paper: float | None = None


def calibrated_steps(
    config: DpFermiConfig, base: DpSgdConfig, target: PrivacyTarget, *, num_records: int
) -> FermiSteps:
    """The steps that ``config`` and ``base`` mean, with the least noise that keeps them within ``target``.

    What the release of shares costs is set aside. ``noise_rule`` ``as_in_paper`` takes the paper's noise instead,
    whatever it costs. ValueError for a target out of reach, or one that the paper's formula is not meant for.
    """
    plan = _plan(config, base, num_records=num_records)
    if config.noise_rule == "as_in_paper":
        # Two releases of one multiplier are one release of it over sqrt(2).
        joint = published_noise_multiplier(target, plan) / math.sqrt(2)
        steps = _with_noise(plan, config, base, target, joint, ratio=1.0)
        return replace(steps, epsilon_as_in_paper=target.epsilon)

    def steps_of(joint: float) -> FermiSteps:
        return _with_noise(plan, config, base, target, joint, ratio=config.matrix_noise_ratio)

    # Nothing of the groups is read then: any noise would keep the target, and none is drawn.
    if config.mode != "all" and not config.weight:
        return steps_of(1.0)
    shares = share_events(config, target.record_relation)
    joint = least_noise(
        lambda noise: (steps_of(noise).event, *shares),
        target_epsilon=target.epsilon,
        target_delta=target.delta,
        accounting=target.accounting,
    )
    return steps_of(joint)


def published_noise_multiplier(target: PrivacyTarget, steps: PrivateSteps) -> float:
    """The paper's noise of *each* of its two streams over a sum's sensitivity: q sqrt(2 T ln(1 / delta)) / epsilon.

    Its closed form is sigma^2 = 2 (m / n)^2 T S^2 ln(1 / delta) / epsilon^2 for a sensitivity S. ValueError outside the
    range that its theorem states.
    """
    log_inverse = math.log(1 / target.delta)
    least_steps = target.epsilon / (2 * steps.sampling_rate) ** 2
    if target.epsilon > 2 * log_inverse or steps.num_steps < least_steps:
        raise ValueError(
            f"Expected epsilon <= {2 * log_inverse:.3g} and at least {math.ceil(least_steps)} steps for noise_rule "
            f"as_in_paper, got {target.epsilon} and {steps.num_steps}."
        )
    return steps.sampling_rate * math.sqrt(2 * steps.num_steps * log_inverse) / target.epsilon


@dataclass(frozen=True, kw_only=True)
class FermiTrained(Trained):
    """With the shares (E, G) that were declared or released."""

    shares_EG: FloatArray


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    cells: Cells,
    steps: FermiSteps,
    config: DpFermiConfig,
    *,
    shares: Shares,
    randomness: PrivateRandomness,
    generator: torch.Generator,
    person_N: Tensor | None = None,
    on_progress: Progress = lambda *_: None,
) -> FermiTrained:
    """Train ``model`` in place on private ``x`` (N, ...) and ``y`` (N,).

    ``person_N``, in mode ``all`` alone, numbers whose the records are. ``generator`` drives dropout and public batches;
    secret samples and noise come from ``randomness``. Errors as :class:`fairpate.nn.fermi.FermiTraining`.
    """
    game = MatrixGame(
        shares.shares_EG,
        num_classes=cells.num_classes,
        weight=config.weight,
        radius=config.radius or default_radius(cells.num_classes),
        device=x.device,
    )
    targets = watched_targets(y, cells.cells_N, num_classes=cells.num_classes, num_cells=cells.num_cells)
    options: dict[str, Any] = {
        "matrix_noise_multiplier": steps.matrix_noise_multiplier,
        "matrix_learning_rate": config.matrix_learning_rate,
        "randomness": randomness,
    }
    if config.mode == "all":
        training = FermiTraining(model, x, targets, game, steps.steps, person_N=person_N, **options)
    else:
        if config.mode == "sens_public_batches":
            options["batches"] = PublicPartitions(len(x), round(steps.steps.expected_batch_size), generator)
        training = GroupFermiTraining(model, x, targets, game, steps.steps, **options)
    events = (steps.event, *shares.events)
    training.run(generator=generator, averaged_share=config.averaged_share, on_progress=on_progress)
    return FermiTrained(
        model=model,
        shares_EG=shares.shares_EG,
        events=events if person_N is None else tuple(of_unit(event, "person") for event in events),
        noise=randomness.label,
        remarks=shares.remarks,
        epsilon_as_in_paper=steps.epsilon_as_in_paper,
    )


def _plan(config: DpFermiConfig, base: DpSgdConfig, *, num_records: int) -> PrivateSteps:
    plan = dp_sgd.plan_steps(base, num_records=num_records, noise_multiplier=0.0)
    if config.mode != "sens_public_batches":
        return plan
    # A partition visits every record once: there is no part of an epoch.
    return replace(plan, num_steps=math.ceil(base.epochs) * math.ceil(num_records / base.batch_size))


def _with_noise(
    plan: PrivateSteps, config: DpFermiConfig, base: DpSgdConfig, target: PrivacyTarget, joint: float, ratio: float
) -> FermiSteps:
    """``joint`` is the multiplier of both releases of a step as one; ``ratio`` that of W's over theta's."""
    is_game = config.weight > 0
    # 1 / joint^2 = 1 / theta^2 + 1 / (ratio theta)^2, solved for theta.
    theta = joint * math.sqrt(1 + ratio**-2) if is_game else joint
    if config.mode != "all" and not is_game:
        theta = 0.0  # nothing of the step depends on the group
    return FermiSteps(
        steps=replace(plan, noise_multiplier=theta),
        matrix_noise_multiplier=ratio * theta if is_game else 0.0,
        event=_step_event(plan, config, base, target, joint),
    )


def _step_event(
    plan: PrivateSteps, config: DpFermiConfig, base: DpSgdConfig, target: PrivacyTarget, joint: float
) -> Event:
    if config.mode == "all":
        return PoissonGaussians(
            count=plan.num_steps,
            noise_multiplier=joint,
            sampling_rate=plan.sampling_rate,
            relation=target.record_relation,
        )
    # Plain SGD on public features and labels: of the groups nothing was read.
    if not config.weight:
        return AttributeGaussians(count=0, attribute_noise_multiplier=1.0)
    # A record is in one batch of an epoch's partition: all the batches of an epoch are one event for it.
    if config.mode == "sens_public_batches":
        return AttributeGaussians(count=math.ceil(base.epochs), attribute_noise_multiplier=joint)
    return SecretBatchAttributeGaussians(
        count=plan.num_steps, attribute_noise_multiplier=joint, sampling_rate=plan.sampling_rate
    )


class DpFermi(DpSgdFamily):
    """Within the target for whole records or persons, or for records' sensitive attribute alone."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "DP-FERMI"
    paper: ClassVar[str] = "Lowy, Gupta and Razaviyayn 2023, arXiv 2210.08781"

    method: str = "dp_fermi"
    dp_fermi: DpFermiConfig = DpFermiConfig()

    @property
    def protects_attribute_only(self) -> bool:
        """In the two modes that hide the group alone."""
        return self.dp_fermi.mode != "all"

    @property
    def unread(self) -> dict[str, str]:
        """The noise on shares that nothing releases."""
        return {} if self.dp_fermi.shares is None else {"dp_fermi.share_noise": "dp_fermi.shares"}

    def check(self) -> None:
        """ConfigError where the mode protects an attribute and the target speaks of records that come and go."""
        self.require_replacing()

    def train(self, training: Training) -> Trained:
        """Group shares first, then the game."""
        dataset, private, settings = training.dataset, training.dataset.private, self.dp_fermi
        randomness = self.randomness()
        person_N = None if self.protects_attribute_only else private.person_N
        # Modes that hide the attribute count records, whoever they belong to.
        num_protected = len(private) if person_N is None else private.num_protected
        steps = calibrated_steps(settings, self.dp_sgd, self.target, num_records=num_protected)
        cells = Cells.of(
            private.y, private.z, config=settings, num_classes=dataset.num_classes, num_groups=dataset.num_groups
        )
        planned = (steps.event, *share_events(settings, self.target.record_relation))
        training.admit(
            planned if person_N is None else [of_unit(event, "person") for event in planned], randomness.label
        )
        shares = release_shares(
            cells,
            settings,
            relation=self.target.record_relation,
            randomness=randomness,
            person_N=person_N,
        )
        for remark in shares.remarks:
            training.reporter.note("shares", remark)
        with training.reporter.stage(self.method) as advance:
            return train(
                training.model,
                private.x,
                private.y,
                cells,
                steps,
                settings,
                shares=shares,
                randomness=randomness,
                generator=training.generator(Stream.TRAINING),
                person_N=person_N,
                on_progress=advance,
            )
