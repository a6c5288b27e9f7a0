"""DP-FERMI: DP-SGD against a fairness adversary (Lowy, Gupta and Razaviyayn 2023, arXiv 2210.08781).

ERMI measures how far predictions depend on groups. It is the maximum over matrices W of a mean over records, so descent
in theta and ascent in W need only sums over records. With predictions F = softmax(h(x)), group shares p, the record's
group s and ``psi(F, s; W) = - sum_j F_j |W[:, j]|^2 + 2 <W[s], F> / sqrt(p_s) - 1``

    min over theta, max over |W| <= R:    mean over records of  loss + lambda psi

Demographic parity has one event, to which all records belong, with one W and one p. Equalized odds has one event, W and
p for each label; equal opportunity has one event for one label, and the other records belong to none. The *cell* of a
record is its event and group in one code. Within a step psi is linear in the predictions: its coefficients lambda (2
W[s] / sqrt(p_s) - |W[:, j]|^2) for every class j are called the *pull*. One step on a batch of L expected records:

    theta <- theta - rate ((sum of clip(grad loss + lambda grad psi, C) + N(0, (zeta C)^2)) / L)
    W     <- project(W + matrix rate ((sum of grad_W psi + N(0, (zeta_W C_W)^2)) / L)),    C_W = 2 / sqrt(min p) + 2 R

C_W bounds |grad_W psi| for every record, so W's gradients need no clipping. The mode determines what is protected:

- ``all``, the default: the whole record, on Poisson batches. The two sums cost as much as one Gaussian of multiplier
  (zeta^-2 + zeta_W^-2)^-1/2 on one sample. If the data set names persons, persons are sampled. A person adds the
  clipped average gradient of its records, the average of their grad_W psi, which C_W bounds too, and a total count of
  one to the released shares.
- ``sens_public_batches``: only the group. Batches are a public partition of the records. The part of the gradient that
  does not depend on the group has no noise; the rest is centred over groups and clipped to C. Another group changes it
  by at most 2 C, and W's gradient by 2 sqrt(1 / p_a + 1 / p_b). A record is in one batch per epoch.
- ``sens_secret_batches``: only the group, on Poisson batches. The part without noise shows who is in the batch, so
  amplification is only that of a mixture.

Group shares are declared, or released once with noise of their own, and floored.

Deviations from the paper and its code:
- The paper calibrates two streams of noise to the whole budget each; here they share it.
- Its amplification by sampling although batches are visible, and its guarantee for whole records although the loss has
  no noise, do not hold. benchmarks/papers/reproductions/dp_fermi_noise.py computes what its closed form of the noise
  costs.
- Its matrix step contains lambda, with noise for lambda = 1; here the learning rate of W includes lambda. Its listing
  multiplies theta's noise by lambda, only for the fairness term; here noise is on the sum of clipped gradients.
- Sums are divided by the expected size L, not by the size of the batch.
- Per-record clipping replaces a Lipschitz constant, which is unknown in practice; the code divides before it clips.
- The mean of the last iterates may be returned; the theory draws one at random. Momentum is available.

Shapes: N records, B of a batch, E events, G groups, Q = E G cells, C classes, K = C + Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.config import CountOrZero, Disables, Fraction, NotNegative, Positive, PrivacyTarget, Section
from fairpate.lazy import functional, torch
from fairpate.methods import dp_sgd
from fairpate.methods.base import Stream, Trained, Training, Watch, noise_within
from fairpate.methods.parity import ParityCells
from fairpate.privacy.accountant import Event, PoissonGaussians, SpentError, of_unit
from fairpate.privacy.mechanism_events import AttributeGaussians, SecretBatchAttributeGaussians
from fairpate.types import FloatArray, Relation, Unit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fairpate.nn.private_fit import BatchSampler, GaussianNoise, PrivateRandomness, PrivateSteps, PrivateTraining


class DpFermiConfig(Section):
    """Settings of DP-FERMI; steps, clipping and learning rate are set in ``dp_sgd``."""

    constraint: Literal["demographic_parity", "equalized_odds", "equal_opportunity"] = "demographic_parity"
    positive_label: CountOrZero = Field(1, description="The label of equal_opportunity.")
    mode: Literal["all", "sens_public_batches", "sens_secret_batches"] = Field(
        "all", description="What is protected: the whole record, or the sensitive attribute alone."
    )
    weight: NotNegative = Field(1.0, description="lambda, weight of the fairness term; 0 is DP-SGD.")
    radius: Positive | None = Field(
        None, description="R, largest norm of each W; null: 1.5 times the root of the number of classes."
    )
    matrix_learning_rate: Positive = Field(0.3, description="Learning rate of W, lambda included.")
    matrix_noise_ratio: Positive = Field(2.0, description="Noise multiplier of W as a multiple of the model's.")
    shares: tuple[tuple[Fraction, ...], ...] | None = Field(
        None, description="Public share of each group in each event, declared; null releases them."
    )
    share_noise: Positive = Field(
        30.0, description="Standard deviation of the noise on the released counts, in records or persons."
    )
    min_share: float = Field(0.01, gt=0, lt=1, description="Released shares below this one are raised to it.")
    averaged_share: Fraction = Field(
        0.5, description="Share of the last steps whose weights are averaged; 0: the last step alone."
    )

    # Declared shares need no release.
    disables: ClassVar[Disables] = {
        ("shares", ...): ("share_noise",),
        ("constraint", "demographic_parity"): ("positive_label",),
        ("constraint", "equalized_odds"): ("positive_label",),
    }


def watched_targets(labels_N: Tensor, cells_N: Tensor, *, num_classes: int, num_cells: int) -> Tensor:
    """Return the one-hot label and the one-hot cell (event and group) of every record, (N, K) ``float32``, K = C + Q.

    A record of cell ``num_cells`` belongs to no cell. Products with one-hot rows are faster than indexing by codes.
    """
    labels_NC = functional.one_hot(labels_N.long(), num_classes)
    cells_NQ = functional.one_hot(cells_N.long(), num_cells + 1)[:, :-1]
    return torch.cat([labels_NC, cells_NQ], dim=1).float()


class MatrixGame:
    """The fairness adversary of DP-FERMI: a matrix W for each event (a condition under which groups are compared), and
    gradient ascent on these matrices.

    - ``shares_EG``: the share of each group in each event, all positive.
    - ``weight``: lambda; with 0 all matrices stay 0.
    - ``radius``: the largest Frobenius norm of an event's matrix; None: 1.5 sqrt(C), which is 1.5 times the norm that
      the matrix has if predictions and groups are independent.
    - ``pull_KC``: the coefficients of the linear term that the adversary adds to a record's loss: ``<t @ pull_KC, F>``
      for targets t (:func:`watched_targets`) and predictions F.
    - ``record_sensitivity``, ``group_sensitivity``: the largest L2 change of the gradient with respect to the matrices,
      by one record, and by a change of one record's group.
    """

    def __init__(
        self, shares_EG: npt.ArrayLike, *, num_classes: int, weight: float, radius: float | None = None
    ) -> None:
        shares = np.asarray(shares_EG, dtype=np.float64)
        radius = 1.5 * math.sqrt(num_classes) if radius is None else radius
        self.weight, self.radius, self.num_classes = weight, radius, num_classes
        self._scale_EG1 = 2 / np.sqrt(shares)[:, :, None]
        # A record's gradient is scale F in its row less 2 W F in all: |F| <= 1, and |W| <= radius.
        self.record_sensitivity = float(self._scale_EG1.max()) + 2 * radius
        # Another group takes the predictions, of norm at most 1, from one row to another; the term in W stays.
        two_largest_E2 = np.sort(self._scale_EG1[:, :, 0], axis=1)[:, -2:]
        self.group_sensitivity = float(np.linalg.norm(two_largest_E2, axis=1).max())
        self.matrix_EGC = np.zeros((*shares.shape, num_classes))
        # One row per column of the targets: labels come first, and pull nothing.
        self._sums_KC = torch.zeros(num_classes + shares.size, num_classes)
        self.pull_KC, self.common_pull_KC, self.own_pull_KC = (torch.zeros_like(self._sums_KC) for _ in range(3))

    def observe(self, probability_BC: Tensor, targets_BK: Tensor) -> None:
        """Add the predictions of a part of the batch to the sums from which the next :meth:`ascend` computes its
        gradient.

        A NaN prediction is replaced by 0: it would make the whole sum NaN, which would reveal the record.
        """
        self._sums_KC.addmm_(targets_BK.mT, probability_BC.nan_to_num())

    def gradient(self) -> FloatArray:
        """Return the gradient of the fairness term psi, summed over all observed records, with respect to the matrices
        W, (E, G, C)."""
        sums_EGC = self._sums_KC.cpu().numpy()[self.num_classes :].reshape(self.matrix_EGC.shape)
        # By event, the predictions of all records that play in it.
        played_E1C = np.add.reduce(sums_EGC, axis=1, keepdims=True)
        return self._scale_EG1 * sums_EGC - 2 * played_E1C * self.matrix_EGC

    def ascend(
        self,
        noise: GaussianNoise,
        *,
        stddev: float,
        learning_rate: float,
        watch: Callable[[FloatArray, FloatArray], None] | None = None,
    ) -> None:
        """Move the adversary's matrices one step along the noisy gradient of all observed records, project them onto
        the allowed norm, and clear the observed sums.

        ``learning_rate`` multiplies the sum over records, not the mean. ``watch`` sees the exact and the noisy
        gradient.
        """
        if not self.weight:
            return
        gradient_EGC = self.gradient()
        self._sums_KC.zero_()
        exact_EGC = gradient_EGC.copy()
        if stddev:
            gradient_EGC += stddev * noise.take(gradient_EGC.size).numpy().reshape(gradient_EGC.shape)
        if watch is not None:
            watch(exact_EGC, gradient_EGC)
        self.move_to(self.matrix_EGC + learning_rate * gradient_EGC)

    def move_to(self, matrix_EGC: FloatArray) -> None:
        """Set the matrices W to ``matrix_EGC``, each scaled down to a norm of at most ``radius``, and update the
        coefficients ``pull_KC`` of the linear loss term."""
        cost_E1C = np.add.reduce(matrix_EGC * matrix_EGC, axis=1, keepdims=True)
        norm_E11 = np.sqrt(np.add.reduce(cost_E1C, axis=2, keepdims=True))
        # Never above 1: a matrix inside the ball stays where it is.
        shrink_E11 = self.radius / np.maximum(norm_E11, self.radius)
        self.matrix_EGC = shrink_E11 * matrix_EGC
        # shrink^2 times the cost is that of the shrunk matrix, without squaring it again.
        pull_EGC = self.weight * (self._scale_EG1 * self.matrix_EGC - shrink_E11 * shrink_E11 * cost_E1C)
        self.pull_KC[self.num_classes :] = torch.from_numpy(pull_EGC.reshape(-1, self.num_classes))

    def split_pulls(self) -> None:
        """Split the coefficients ``pull_KC`` of the linear loss term into a part that is the same for all groups
        (``common_pull_KC``), and one whose mean over groups is 0 (``own_pull_KC``). Only gradients of the latter depend
        on the group, and need noise if only the group is protected.
        """
        gain_EGC = self._scale_EG1 * self.matrix_EGC
        own_EGC = self.weight * (gain_EGC - gain_EGC.mean(axis=1, keepdims=True))
        self.own_pull_KC[self.num_classes :] = torch.from_numpy(own_EGC.reshape(-1, self.num_classes))
        torch.sub(self.pull_KC, self.own_pull_KC, out=self.common_pull_KC)


class FermiLoss:
    """The fairness loss ``<t @ pull_KC, F>`` of each record, plus its cross entropy if ``reads_labels``.

    F are the record's predictions, t its targets (:func:`watched_targets`), and ``pull_KC`` the current coefficients of
    the predictions; the caller may change them between calls. ``observe`` is called with the predictions (B, C) and the
    targets (B, K).
    """

    def __init__(
        self, pull_KC: Tensor, *, reads_labels: bool = True, observe: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        self._pull_KC, self._reads_labels, self._observe = pull_KC, reads_labels, observe
        self._ones_C1 = pull_KC.new_ones(pull_KC.shape[1], 1)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per record, shape (B,)."""
        probability_BC = outputs.softmax(dim=1)
        if self._observe is not None:
            # Detached: the ascent on W needs predictions and no gradient of the model.
            self._observe(probability_BC.detach(), targets)
        pulled_B = (targets @ self._pull_KC * probability_BC).sum(dim=1)
        if not self._reads_labels:
            return pulled_B
        return pulled_B + functional.cross_entropy(outputs, targets[:, : outputs.shape[1]], reduction="none")

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of the summed losses with respect to ``outputs`` (B, C)."""
        with torch.no_grad():
            # For a few classes this is quicker than softmax.
            probability_BC = torch.log_softmax(outputs, dim=1).exp_()
            if self._observe is not None:
                self._observe(probability_BC, targets)
            # The softmax's derivative likewise: F (pull - <pull, F>), its sum by a product.
            gradient_BC: Tensor = targets @ self._pull_KC
            pulled_B1 = (gradient_BC * probability_BC) @ self._ones_C1
            gradient_BC.sub_(pulled_B1).mul_(probability_BC)
            if self._reads_labels:
                gradient_BC.add_(probability_BC).sub_(targets[:, : outputs.shape[1]])
            return gradient_BC


def public_partitions(num_records: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of the records of each batch, without end: every epoch is a random partition of all records
    into batches of ``batch_size``, of which one may be smaller."""
    while True:
        yield from reversed(torch.randperm(num_records, generator=generator).split(batch_size))


def fermi_training(
    model: nn.Module,
    x: Tensor,
    targets: Tensor,
    game: MatrixGame,
    steps: FermiSteps,
    config: DpFermiConfig,
    *,
    randomness: PrivateRandomness,
    person_N: Tensor | None = None,
    sampler: BatchSampler | None = None,
    events: tuple[Event, ...] = (),
    watch: Watch | None = None,
) -> PrivateTraining:
    """Return a DP-FERMI training in ``config.mode`` that is ready to run; ``targets`` come from
    :func:`watched_targets`.

    In mode ``all`` whole records or persons are protected: the gradient of a record's loss, including the linear term,
    is clipped, and a person contributes its average gradient and average prediction. In the other modes only the part
    of the gradient that depends on the group is clipped and gets noise. ``sampler`` may replace secret Poisson samples.
    ``watch`` sees the gradients of the model and of the matrices.
    Errors as :class:`fairpate.nn.per_example.GradientClipper`.
    """
    # A configuration is read without torch.
    from fairpate.nn.private_fit import GaussianNoise, PrivateTraining, StepPlan, training_device

    # Sums and coefficients are where predictions are made.
    for name in ("_sums_KC", "pull_KC", "common_pull_KC", "own_pull_KC"):
        setattr(game, name, getattr(game, name).to(training_device(model)))
    hides_group_alone = config.mode != "all"
    noise, plan_of = GaussianNoise(randomness), steps.steps
    rate = config.matrix_learning_rate / plan_of.expected_batch_size
    sensitivity = game.group_sensitivity if hides_group_alone else game.record_sensitivity
    stddev = steps.matrix_noise_multiplier * sensitivity

    def saw(exact_EGC: FloatArray, released_EGC: FloatArray) -> None:
        if watch is not None:
            watch("matrices", [exact_EGC], [released_EGC], norm=sensitivity)

    def ascend() -> None:
        game.ascend(noise, stddev=stddev, learning_rate=rate, watch=saw)
        if hides_group_alone:
            game.split_pulls()

    def observe(probability_BC: Tensor, targets_BK: Tensor) -> None:
        share_B = training.clipper.share_B
        # A person's predictions are averaged, so that a person moves the sum no more than a record does.
        game.observe(probability_BC if share_B is None else probability_BC * share_B[:, None], targets_BK)

    def add_common(sums: list[Tensor], x: Tensor, targets: Tensor) -> None:
        size = plan_of.max_records or max(1, len(x))
        for part, part_targets in zip(x.split(size), targets.split(size), strict=True):
            if len(part):
                # Neither clipped nor noisy: the common part of the pull is the same for every group.
                total = common(model(part), part_targets).sum()
                torch._foreach_add_(sums, torch.autograd.grad(total, training.parameters))

    # In either mode: descend with the old matrices, then let them ascend from the old model's predictions.
    if hides_group_alone:
        common = FermiLoss(game.common_pull_KC, observe=game.observe)
        loss = FermiLoss(game.own_pull_KC, reads_labels=False)
        # Another group replaces a clipped part by another one: twice the clip norm.
        plan = StepPlan(sampler=sampler, reach=2.0, add_unprotected=add_common, release_more=ascend, events=events)
    else:
        loss, plan = FermiLoss(game.pull_KC, observe=observe), StepPlan(release_more=ascend, events=events)
    drawn: dict[str, Any] = {"randomness": randomness, "person_N": person_N, "watch": watch}
    training = PrivateTraining(model, x, targets, loss, plan_of, plan=plan, **drawn)
    return training


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The public, positive share of each group in each event, and the ``events`` of their release.

    ``remarks``, for the run's privacy statement, name released shares that were below the declared floor and were
    raised to it.
    """

    shares_EG: FloatArray
    events: tuple[Event, ...] = ()
    remarks: tuple[str, ...] = ()


def release_shares(
    cells: ParityCells,
    config: DpFermiConfig,
    *,
    relation: Relation,
    randomness: PrivateRandomness,
    person_N: Tensor | None = None,
    watch: Watch | None = None,
) -> Shares:
    """Return the declared shares of groups in events, or release noisy counts of records once and return the shares
    computed from them.

    With ``person_N``, the person of each record, a person's records count 1 together. ``watch`` sees the counts.
    ValueError for declared shares of another shape or sum; SpentError for an event (such as a label) whose noisy counts
    are all 0.
    """
    from fairpate.nn.private_fit import GaussianNoise  # a configuration is read without torch

    shape = (cells.num_events, cells.num_groups)
    if config.shares is not None:
        widths = [len(row) for row in config.shares]
        if widths != [cells.num_groups] * cells.num_events:
            raise ValueError(
                f"Expected dp_fermi.shares to have {shape[0]} rows, one per fairness event (a label, or all records), "
                f"each of {shape[1]} numbers, one per group; got rows of {widths} numbers. Correct the rows."
            )
        declared_EG = np.asarray(config.shares, dtype=np.float64)
        # Declared shares may be rounded to three digits.
        if not np.allclose(declared_EG.sum(axis=1), 1, atol=1e-3) or not (declared_EG >= config.min_share).all():
            raise ValueError(
                f"Expected dp_fermi.shares >= {config.min_share} that sum to 1 in each row, "
                f"got {declared_EG.tolist()}; correct them."
            )
        return Shares(shares_EG=declared_EG)
    if not config.weight:
        # Without a weight nothing reads the shares, so nothing is released.
        return Shares(shares_EG=np.full(shape, 1 / cells.num_groups))
    # A person counts one in all, however many records: adding a person moves the counts by 1 in L1, so at most 1 in L2.
    share_N = None if person_N is None else (1 / torch.bincount(person_N).double())[person_N]
    # The last code is that of records in no event.
    cells_N = torch.from_numpy(cells.cells_N)
    counts_Q = torch.bincount(cells_N, weights=share_N, minlength=cells.num_cells + 1)[:-1].double()
    noise_Q = GaussianNoise(randomness).take(cells.num_cells).double()
    noisy_Q = counts_Q + config.share_noise * noise_Q.to(counts_Q)
    if watch is not None:
        watch("group shares", [counts_Q], [noisy_Q], norm=1.0)
    counts_EG = noisy_Q.clamp(min=0).cpu().numpy().reshape(shape)
    totals_E1 = counts_EG.sum(axis=1, keepdims=True)
    events = share_events(config, relation, "record" if person_N is None else "person")
    if not (totals_E1 > 0).all():
        empty = np.flatnonzero(totals_E1 <= 0).tolist()
        error = ValueError(
            f"Expected records in every event, found none in {empty} (labels, under equalized_odds) under noise of "
            f"{config.share_noise:g} records; declare dp_fermi.shares, or use another constraint. The cost of the "
            "released counts has been spent."
        )
        raise SpentError(error, events, randomness.label)
    # From here on shares are public, and with them the scales of pulls and of W's sensitivity.
    shares_EG = counts_EG / totals_E1
    floored = [f"group {group} of event {event}" for event, group in np.argwhere(shares_EG < config.min_share)]
    remark = f"group shares raised to dp_fermi.min_share, so that these groups weigh too little: {', '.join(floored)}"
    return Shares(
        # Pulls and sensitivities grow with 1 / sqrt(share): the floor bounds them for any noise.
        shares_EG=np.maximum(shares_EG, config.min_share),
        events=events,
        remarks=(remark,) if floored else (),
    )


def share_events(config: DpFermiConfig, relation: Relation, unit: Unit = "record") -> tuple[Event, ...]:
    """Return the event of releasing the groups' shares, or no event if the shares are declared or not needed."""
    if not config.weight or config.shares is not None:
        return ()
    if config.mode == "all":
        sums = PoissonGaussians(count=1, noise_multiplier=config.share_noise, sampling_rate=1.0, relation=relation)
        return (of_unit(sums, unit),)
    # Two counts move by 1 each.
    return (AttributeGaussians(count=1, attribute_noise_multiplier=config.share_noise / math.sqrt(2)),)


@dataclass(frozen=True, kw_only=True)
class FermiSteps:
    """The ``steps`` with the noise multiplier of the model's gradients, the noise multiplier of the matrices W, and the
    ``event`` of all steps.

    Noise multipliers are standard deviations of the noise over the L2 sensitivity of a sum.
    """

    steps: PrivateSteps
    matrix_noise_multiplier: float
    event: Event


def calibrated_steps(
    config: DpFermiConfig, base: dp_sgd.DpSgdConfig, target: PrivacyTarget, *, num_records: int, unit: Unit = "record"
) -> FermiSteps:
    """Return the training steps with the least noise at which they, together with the release of shares, cost at most
    ``target``.

    ``config`` has the settings of DP-FERMI, ``base`` those of gradient steps. ``unit`` is the unit of privacy in mode
    ``all``: record or person. ValueError for a target that no noise reaches.
    """
    plan = dp_sgd.plan_steps(base, num_records=num_records, noise_multiplier=0.0)
    num_epochs, ratio = math.ceil(base.epochs), config.matrix_noise_ratio
    if config.mode == "sens_public_batches":
        # A partition visits every record once, so there is no part of an epoch.
        plan = replace(plan, num_steps=num_epochs * math.ceil(num_records / base.batch_size))

    def event(joint: float) -> Event:
        """Return the event of all steps, whose two releases (clipped sum and matrix gradient) together cost as one
        Gaussian of multiplier ``joint``."""
        if config.mode == "all":
            return dp_sgd.event_of(replace(plan, noise_multiplier=joint), unit=unit, relation=target.record_relation)
        # Plain SGD on public features and labels: no group was read.
        if not config.weight:
            return AttributeGaussians(count=0, attribute_noise_multiplier=1.0)
        # A record is in one batch of an epoch's partition: all the batches of an epoch are one event for it.
        if config.mode == "sens_public_batches":
            return AttributeGaussians(count=num_epochs, attribute_noise_multiplier=joint)
        count, rate = plan.num_steps, plan.sampling_rate
        return SecretBatchAttributeGaussians(count=count, attribute_noise_multiplier=joint, sampling_rate=rate)

    if config.mode != "all" and not config.weight:
        # No step depends on the groups, so that none has noise.
        return FermiSteps(steps=plan, matrix_noise_multiplier=0.0, event=event(1.0))
    shares = share_events(config, target.record_relation, unit)
    joint = noise_within(target, lambda noise: (event(noise), *shares))
    # 1 / joint^2 = 1 / theta^2 + 1 / (ratio theta)^2, solved for theta.
    theta = joint * math.sqrt(1 + ratio**-2) if config.weight else joint
    matrix = ratio * theta if config.weight else 0.0
    return FermiSteps(steps=replace(plan, noise_multiplier=theta), matrix_noise_multiplier=matrix, event=event(joint))


@dataclass(frozen=True, kw_only=True)
class FermiTrained(Trained):
    """The trained model, and the shares (E, G) of groups that were declared or released."""

    shares_EG: FloatArray


class DpFermi(dp_sgd.DpSgdFamily):
    """DP-FERMI, with noise calibrated to the target. It protects records or persons, or only a sensitive attribute."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "DP-FERMI"
    paper: ClassVar[str] = "Lowy, Gupta and Razaviyayn 2023, arXiv 2210.08781"
    colour: ClassVar[int] = 5

    method: str = "dp_fermi"
    dp_fermi: DpFermiConfig = DpFermiConfig()

    @property
    def protects_attribute_only(self) -> bool:  # type: ignore[override]
        """True in the two modes that protect only the group."""
        return self.dp_fermi.mode != "all"

    def train(self, training: Training) -> Trained:
        """Release the group shares, train the model and the adversary's matrices against each other, and return the
        model."""
        dataset, private, settings = training.dataset, training.dataset.private, self.dp_fermi
        randomness, model, num_classes = self.randomness(), training.model, dataset.num_classes
        person_N = None if self.protects_attribute_only else private.person_N
        drawn: dict[str, Any] = {"randomness": randomness, "person_N": person_N, "watch": training.watch}
        # Modes that protect the attribute alone count records, not persons.
        unit: Unit = "record" if person_N is None else "person"
        num_protected = len(private) if person_N is None else private.num_protected
        steps = calibrated_steps(settings, self.dp_sgd, self.target, num_records=num_protected, unit=unit)
        rule = settings.model_dump(include={"constraint", "positive_label"})
        cells = ParityCells.of(private.y, private.z, num_groups=dataset.num_groups, num_classes=num_classes, **rule)
        relation = self.target.record_relation
        # Before the shares are drawn, which may end the run: a refusal afterwards would reveal that they did not.
        training.reserve((steps.event, *share_events(settings, relation, unit)), randomness.label)
        shares = release_shares(cells, settings, relation=relation, **drawn)
        for remark in shares.remarks:
            training.reporter.note("shares", remark)
        game = MatrixGame(shares.shares_EG, num_classes=num_classes, weight=settings.weight, radius=settings.radius)
        cells_N = torch.from_numpy(cells.cells_N)
        targets = watched_targets(private.y, cells_N, num_classes=num_classes, num_cells=cells.num_cells)
        drawn["events"] = (steps.event, *shares.events)
        if settings.mode == "sens_public_batches":
            # From the training seed: a public partition needs no secret randomness.
            generator = training.generator(Stream.TRAINING)
            size = round(steps.steps.expected_batch_size)
            drawn["sampler"] = partial(next, public_partitions(len(private), size, generator))
        with training.reporter.stage(self.method) as advance:
            playing = fermi_training(model, private.x, targets, game, steps, settings, **drawn)
            events = playing.run(averaged_share=settings.averaged_share, on_progress=advance)
        return FermiTrained(
            model=model, shares_EG=shares.shares_EG, events=events, noise=randomness.label, remarks=shares.remarks
        )

    def noise_of_steps(self, events: Sequence[Any]) -> dict[str, tuple[float, float, float]]:
        """Return the noise of gradients, of matrices and of group shares, as the parent class does."""
        (of_steps, *others), normal, ratio = events, (1.0, 3.0), self.dp_fermi.matrix_noise_ratio
        if not self.dp_fermi.weight:
            return super().noise_of_steps(events)
        of_model = of_steps.noise_multiplier * math.sqrt(1 + ratio**-2)
        found = {"gradients": (of_model, *normal), "matrices": (ratio * of_model, *normal)}
        for of_shares in others:
            found["group shares"] = (of_shares.noise_multiplier, *normal)
        return found

    def with_public_shares(self, *, num_groups: int, num_classes: int) -> Self:
        """Return this configuration with equal shares of groups, unless it declares shares."""
        if self.dp_fermi.shares is not None:
            return self
        num_events = num_classes if self.dp_fermi.constraint == "equalized_odds" else 1
        shares = ((1 / num_groups,) * num_groups,) * num_events
        return self.model_copy(update={"dp_fermi": self.dp_fermi.model_copy(update={"shares": shares})})
