"""RaCO-DP: DP-SGD under rate constraints, with a noisy histogram of every batch beside its noisy gradient.

DP-SGD beside a noisy histogram of the same batch, from which the extra loss of every record is priced.

Every record belongs to one of Q cells, and its outputs become a row of K non-negative numbers that sum to 1: its soft
prediction, say. On one Poisson sample a step releases

    H[q] = sum of the rows of the records in cell q, with independent Laplace noise on all Q K entries
    the sum of the clipped gradients of  cross entropy + <price[q], row>  over the records, with Gaussian noise

where the prices are any function of the first release. A record moves H by exactly 1 in L1, whatever the model, and the
second sum by at most ``clip_norm`` once H is out. Where records belong to persons, H has the average row of each person
in its cells, which moves it by 1 likewise, and the second sum a person's clipped average gradient. Both see the same
sample: the caller reports them as one event. Knows neither what the prices mean nor any epsilon. The noise is
floating-point, see :mod:`fairpate.nn.private_fit`.

Shapes: N records, B records of a batch, C outputs, Q cells, K columns.

Training with a gradient and a histogram of every batch, both noisy: how it is planned, run and reported.

A step releases a Laplace histogram and a Gaussian sum of one Poisson sample (:mod:`fairpate.methods.raco_dp`). That is
one event, composed before it is amplified; one number says how a budget is split between the two. A second Gaussian sum
of the sample may release how many records each cell has: with the gradient's it counts as one Gaussian of less noise.
What a method makes of the histogram is its own matter, and free.

Shapes: N records, Q cells, K columns of the histogram.

RaCO-DP: DP-SGD under rate constraints ("Private Rate-Constrained Optimization with Applications to Fair Learning").

    min over theta, max over lambda >= 0:   loss(theta) + sum_j lambda_j (Gamma_j(theta) - bound_j)

for generalised rate constraints Gamma_j (:mod:`fairpate.fairness.constraints`). One step (Algorithm 1), with a
Poisson sample of rate r, L = r N, soft predictions s(x) = softmax(sharpness h(x)) and record x in cell q(x):

    H[q, k] = sum of s(x)_k over the sample's records in q, + Laplace(b) on every entry
    size_I  = max(floor, sum of H over the cells of I and all classes)            for every union I of a constraint
    g_x     = grad loss_x + L sum_j lambda_j sum_I,k a_jIk [q(x) in I] / size_I grad s(x)_k, clipped to C as one vector
    theta  <- theta - rate (sum_x clip(g_x) + N(0, (zeta C)^2 I)) / L
    lambda <- P(lambda + dual rate (Gamma of the noisy H and its sizes - bound))

With ``counts`` labels, H counts predicted labels in the place of s(x): the hard dual update of its Appendix E.4.
Gradients are of s(x) all the same, and sizes do not change.

With ``size_share`` each cell's number of records is released too, under Gaussian noise (its Remark 3; cells are a
partition): H becomes the nearest histogram to both releases, and sizes are sums of that.

A record moves H by 1 in L1, the sizes by 1 in L2 and the sum by C in L2, on the same sample: one event, composed before
it is amplified, in which the two Gaussians count as one.
Where the data set names persons, these are sampled, s(x) in H and g_x are averages over a person's records, and L and
the sizes count persons: the average of rows that sum to 1 moves H by 1 in L1 too, in however many cells they are.

Deviations from the paper and its code:
- The paper amplifies Laplace and Gaussian noise separately and adds: too cheap, as both read one sample.
  :func:`epsilon_as_in_paper` is that number, for comparison.
- The relation is adding or removing a record, which its sensitivities are for; it writes replacing one.
- Sizes have a public floor: with noise they may be negative. Its code charges nothing for group sizes that it releases.
- Remark 3 has Laplace noise on sizes and does not say what it costs. Gaussian noise here, and H gains from it too.
- Every entry of H has noise of its own, and there are no padded rows. Sums are divided by L, not by the sample's size.
- The last weights are averaged; the paper takes the best of many checkpoints by private validation data, uncharged.
- Momentum, as DP-SGD has it here; 0 is the paper's.

Shapes: N records, Q cells, C classes, J constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import Field, field_serializer
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ConfigError, CountOrZero, Fraction, NotNegative, Positive, PrivacyTarget, Section
from fairpate.fairness.constraints import ConstraintName, Pricer, RateConstraints, named_constraints
from fairpate.fairness.rates import FloatArray
from fairpate.methods import dp_sgd
from fairpate.methods.base import Progress, Stream, Trained, Training, arguments
from fairpate.methods.dp_sgd import DpSgdConfig, DpSgdFamily
from fairpate.methods.parity import DualAscent
from fairpate.nn.per_example import ClippedSum, GradientClipper, shares_of
from fairpate.nn.private_fit import (
    GaussianNoise,
    LaplaceNoise,
    Plan,
    PrivateRandomness,
    PrivateSteps,
    PrivateTraining,
)
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Accounting, epsilon_of_curve, least_noise
from fairpate.privacy.events import Event
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces, joint_multiplier
from fairpate.terminal import Reporter

Pricing = Callable[[FloatArray], FloatArray]


class Rows(Protocol):
    """How outputs become rows of non-negative numbers that sum to 1: what makes the sensitivity of H equal 1."""

    def __call__(self, outputs_BC: Tensor, probability_BC: Tensor) -> Tensor:
        """Rows (B, K), differentiable; ``probability_BC`` is the softmax of the outputs."""
        ...

    def add_pulled_back(self, base_BC: Tensor, probability_BC: Tensor, rows_BK: Tensor, prices_BK: Tensor) -> Tensor:
        """``base`` plus the gradient of the summed ``prices * rows`` with respect to the outputs, in fresh memory."""
        ...

    def counted(self, rows_BK: Tensor) -> Tensor:
        """What the histogram adds up of them: rows of non-negative numbers that sum to 1 too."""
        ...


@dataclass(frozen=True)
class SoftPrediction:
    """softmax(``sharpness`` * outputs): an inverse temperature, so predictions harden as it grows.

    ``counts_labels``: the histogram counts the predicted label of a record instead of its probabilities.
    """

    sharpness: float = 1.0
    counts_labels: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.sharpness < math.inf:
            raise ValueError(f"Expected sharpness > 0 and finite, got {self.sharpness}.")

    def __call__(self, outputs_BC: Tensor, probability_BC: Tensor) -> Tensor:
        """Rows (B, C)."""
        return probability_BC if self.sharpness == 1 else _softmax(self.sharpness * outputs_BC)

    def add_pulled_back(
        self,
        base_BC: Tensor,
        probability_BC: Tensor,  # noqa: ARG002
        rows_BK: Tensor,
        prices_BK: Tensor,
    ) -> Tensor:
        """In closed form."""
        mean_price_B = torch.linalg.vecdot(rows_BK, prices_BK)
        return torch.addcmul(base_BC, rows_BK, prices_BK - mean_price_B.unsqueeze(1), value=self.sharpness)

    def counted(self, rows_BK: Tensor) -> Tensor:
        """The rows themselves, or 1 where each is largest."""
        if not self.counts_labels:
            return rows_BK
        return functional.one_hot(rows_BK.argmax(dim=1), rows_BK.shape[1]).to(rows_BK)


class PricedLoss:
    """Cross entropy plus the price of the record's row, for targets as :meth:`targets` makes them.

    ``prices_QK`` None: the outputs of the next call are the whole batch, and set them. ``share_B``: which share of its
    person each record is that is counted next; None: the whole.
    """

    def __init__(
        self, rows: Rows, *, num_cells: int, num_classes: int, release: Callable[[Tensor], FloatArray]
    ) -> None:
        self._rows, self._num_cells, self._num_classes, self._release = rows, num_cells, num_classes, release
        self._by_target: Tensor | None = None
        self.prices_QK: FloatArray | None = None
        self.share_B: Tensor | None = None

    def targets(self, labels_N: Tensor, cells_N: Tensor) -> Tensor:
        """Cell and label of every record in one number, shape (N,). ValueError for lengths that differ."""
        if len(labels_N) != len(cells_N):
            raise ValueError(f"Expected one cell per label, got {len(cells_N)} cells and {len(labels_N)} labels.")
        return cells_N * self._num_classes + labels_N

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, shape (B,)."""
        rows_BK = self._rows(outputs, _softmax(outputs))
        prices_QK = torch.as_tensor(self._prices(rows_BK, targets), dtype=rows_BK.dtype, device=rows_BK.device)
        cells = torch.div(targets, self._num_classes, rounding_mode="floor")
        labels = targets - cells * self._num_classes
        priced_B: Tensor = (prices_QK[cells] * rows_BK).sum(dim=1)
        return functional.cross_entropy(outputs, labels, reduction="none") + priced_B

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient of the summed losses with respect to ``outputs`` (B, C), which need no gradient themselves."""
        probability_BC = torch.log_softmax(outputs, dim=1).exp_()
        rows_BK = self._rows(outputs, probability_BC)
        table = self._lookup(self._prices(rows_BK, targets), rows_BK).index_select(0, targets)
        prices_BK, truth_BC = table.tensor_split((rows_BK.shape[1],), dim=1)
        return self._rows.add_pulled_back(probability_BC, probability_BC, rows_BK, prices_BK).sub_(truth_BC)

    def observe(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The histogram of these outputs, shape (Q, K)."""
        return self._histogram(self._rows(outputs, _softmax(outputs)), targets)

    def release(self, histogram_QK: Tensor) -> FloatArray:
        """Fix the prices from a histogram that noise is added to."""
        self.prices_QK = self._release(histogram_QK)
        return self.prices_QK

    def _prices(self, rows_BK: Tensor, targets: Tensor) -> FloatArray:
        return self.release(self._histogram(rows_BK.detach(), targets)) if self.prices_QK is None else self.prices_QK

    def _histogram(self, rows_BK: Tensor, targets: Tensor) -> Tensor:
        counted_BK = self._rows.counted(
            rows_BK
        ).nan_to_num()  # a row that is not a number would spoil the sums of all others
        if self.share_B is not None:
            counted_BK = counted_BK * self.share_B[:, None]
        sums = counted_BK.new_zeros(self._num_cells * self._num_classes, rows_BK.shape[1])
        # By target, cell and label in one number, so that no cell has to be looked up first; labels are summed out.
        sums.index_add_(0, targets, counted_BK)
        return sums.view(self._num_cells, self._num_classes, -1).sum(dim=1)

    def _lookup(self, prices_QK: FloatArray, rows_BK: Tensor) -> Tensor:
        """For every target its cell's prices, then its label one-hot: one look-up per record fetches both."""
        if self._by_target is None:
            one_hot = torch.eye(self._num_classes, dtype=rows_BK.dtype).repeat(self._num_cells, 1)
            prices = one_hot.new_zeros(len(one_hot), rows_BK.shape[1])
            self._by_target = torch.cat([prices, one_hot], dim=1)
            by_cell = self._by_target.numpy().reshape(self._num_cells, self._num_classes, -1)
            self._price_part = by_cell[:, :, : rows_BK.shape[1]]
        self._price_part[...] = prices_QK[:, None]
        return self._by_target.to(rows_BK.device)


class PricedClipper(GradientClipper):
    """A sum per batch, before which the batch's histogram is released and sets the prices: empty batches included.

    A batch that is taken in parts, or record by record, is passed through the model once more beforehand.
    """

    def __init__(self, model: nn.Module, loss: PricedLoss, *, clip_norm: float, max_records: int | None = None) -> None:
        super().__init__(model, loss, clip_norm=clip_norm, max_records=max_records)
        self._priced = loss

    def sum(self, x: Tensor, targets: Tensor, owner_B: Tensor | None = None) -> ClippedSum:
        """As the parent's."""
        # Prices of the last batch must not serve this one: its histogram is released exactly once, as it is charged.
        self._priced.prices_QK = None
        in_one_pass = self.engine == "book_keeping" and 0 < len(x) <= (self._max_records or len(x))
        if not in_one_pass or owner_B is not None:
            self._priced.release(self._histogram(x, targets, owner_B))
        return super().sum(x, targets, owner_B)

    @torch.no_grad()
    def _histogram(self, x: Tensor, targets: Tensor, owner_B: Tensor | None) -> Tensor:
        # An empty batch is one empty part: its zeros get their noise as any others.
        size = self._max_records or max(1, len(x))
        parts = list(zip(torch.split(x, size), torch.split(targets, size), strict=True))
        # Of the whole batch: a person may be in two parts, for shares add up over rows.
        shares = [None] * len(parts) if owner_B is None else torch.split(shares_of(owner_B), size)
        histograms = []
        for (part, codes), self._priced.share_B in zip(parts, shares, strict=True):
            histograms.append(self._priced.observe(self._model(part), codes))
        self._priced.share_B = None
        return torch.stack(histograms).sum(dim=0)


def priced_training(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    cells: Tensor,
    steps: PrivateSteps,
    *,
    rows: Rows,
    num_cells: int,
    num_classes: int,
    laplace_scale: float,
    pricing: Pricing,
    randomness: PrivateRandomness,
    histogram_randomness: PrivateRandomness,
    person_N: Tensor | None = None,
    size_noise: float | None = None,
    events: tuple[Event, ...] = (),
) -> PrivateTraining:
    """DP-SGD on private ``x`` (N, ...), ``labels`` (N,) and ``cells`` (N,), with a noisy histogram before each sum.

    ``pricing`` maps each noisy histogram (Q, K) to prices of that shape. With ``size_noise`` the number of records of
    every cell is released too, under Gaussian noise of that standard deviation, and the histogram is :func:`refined` by
    it. ``histogram_randomness`` is apart from that of sampling and gradients, so that a price of 0 leaves DP-SGD as it
    is, bit for bit.
    """
    for name, noise in (("laplace_scale", laplace_scale), ("size_noise", size_noise or 0.0)):
        if not 0 <= noise < math.inf:
            raise ValueError(f"Expected {name} >= 0 and finite, got {noise}.")
    laplace, sizes = LaplaceNoise(histogram_randomness, scale=laplace_scale), GaussianNoise(histogram_randomness)

    def release(histogram_QK: Tensor) -> FloatArray:
        exact_QK = histogram_QK.numpy(force=True)
        noisy_QK = exact_QK + laplace.take(exact_QK.size).reshape(exact_QK.shape)
        if size_noise is not None:
            # Of the exact histogram, under noise of its own: a noisy row's sum has the variance of all its entries.
            sizes_Q = exact_QK.sum(axis=1, dtype=np.float64) + size_noise * sizes.take(len(exact_QK)).numpy()
            noisy_QK = refined(noisy_QK, sizes_Q, laplace_scale=laplace_scale, size_noise=size_noise)
        return pricing(noisy_QK)

    loss = PricedLoss(rows, num_cells=num_cells, num_classes=num_classes, release=release)
    targets, plan = loss.targets(labels, cells), Plan(clipper=PricedClipper, events=events)
    return PrivateTraining(model, x, targets, loss, steps, randomness=randomness, person_N=person_N, plan=plan)


def refined(histogram_QK: FloatArray, sizes_Q: FloatArray, *, laplace_scale: float, size_noise: float) -> FloatArray:
    """The histogram nearest to a noisy one and to noisy row sums: least squares, each weighed by its variance."""
    variance = 2 * laplace_scale**2
    if not variance:
        return histogram_QK
    # An entry's covariance with the row's misfit over the misfit's variance, K entries and the size's own noise.
    weight = variance / (histogram_QK.shape[1] * variance + size_noise**2)
    nearest_QK: FloatArray = histogram_QK + weight * (sizes_Q - histogram_QK.sum(axis=1))[:, None]
    return nearest_QK


def _softmax(outputs_BC: Tensor) -> Tensor:
    # For the few classes there are, quicker than the softmax itself.
    return torch.log_softmax(outputs_BC, dim=1).exp()


SHARE_OF_SMALL_CELLS = 0.3  # the best of 0, .1 and .3 under equalized odds: docs/coverage.md, RaCO-DP


class NoisyHistogramConfig(Section):
    """What the methods share that release a histogram of every batch; their gradients are as `dp_sgd` says."""

    histogram_share: float = Field(0.1, gt=0, lt=1, description="Part of the budget that the histograms take.")
    min_share: float = Field(
        0.01, gt=0, le=1, description="Least share of the expected batch that a set of records counts as: public."
    )
    size_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Of the gradient's part, for a release of sizes beside the histogram, which it makes more exact; "
        "null: .3 where cells are of a label and a group, 0 elsewhere.",
    )
    averaged_share: Fraction = Field(0.5, description="Of the last steps, whose weights are averaged; 0: the last.")

    @property
    def has_small_cells(self) -> bool:
        """Whether cells are of a true label and a group."""
        return False

    @property
    def resolved_size_share(self) -> float:
        """``size_share``, or its default."""
        if self.size_share is not None:
            return self.size_share
        return SHARE_OF_SMALL_CELLS if self.has_small_cells else 0.0

    # What is written down and what decides a digest is what is meant; plain values may still be laid over.
    @field_serializer("size_share", when_used="json")
    def _resolved(self, _: float | None) -> float:
        return self.resolved_size_share


@dataclass(frozen=True, kw_only=True)
class HistogramSteps:
    """DP-SGD's steps and, beside them, the histogram's.

    ``laplace_scale``: of the noise on every entry, of which a record moves all by 1 in L1; ``size_floor``: the least
    number of records that a union of cells counts as; ``averaged_share``: of the steps, whose weights are averaged;
    ``size_noise``: standard deviation on the number of records of every cell, of which a record moves all by 1 in L2;
    None: these are not released.
    """

    gradient: PrivateSteps
    laplace_scale: float
    size_floor: float
    averaged_share: float = 0.0
    size_noise: float | None = None

    def __post_init__(self) -> None:
        if not self.size_floor > 0:
            raise ValueError(f"Expected size_floor > 0, got {self.size_floor}: noise can make a size negative.")

    @property
    def event(self) -> PoissonGaussianLaplaces:
        """What they release of private records."""
        # Gradients and sizes are Gaussians of one sample, so one of less noise; with the histogram amplified once.
        sizes = () if self.size_noise is None else (self.size_noise,)
        return PoissonGaussianLaplaces(
            count=self.gradient.num_steps,
            gradient_noise_multiplier=joint_multiplier(self.gradient.noise_multiplier, *sizes),
            laplace_scale=self.laplace_scale,
            sampling_rate=self.gradient.sampling_rate,
        )


def plan_steps(
    training: DpSgdConfig,
    config: NoisyHistogramConfig,
    *,
    num_records: int,
    noise_multiplier: float,
    laplace_scale: float,
) -> HistogramSteps:
    """The steps that ``training`` means for ``num_records``, with these noises.

    ``noise_multiplier`` is that of gradient and sizes together: of its inverse square the sizes have ``size_share``.
    """
    # Inverse squares add up: (1 - share) / noise^2 for the gradient and share / noise^2 for the sizes.
    size_share = config.resolved_size_share
    of_gradient = noise_multiplier / math.sqrt(1 - size_share)
    gradient = dp_sgd.plan_steps(training, num_records=num_records, noise_multiplier=of_gradient)
    return HistogramSteps(
        gradient=gradient,
        laplace_scale=laplace_scale,
        # Of the expected batch: the realised one is private.
        size_floor=config.min_share * gradient.expected_batch_size,
        averaged_share=config.averaged_share,
        size_noise=noise_multiplier / math.sqrt(size_share) if size_share else None,
    )


def calibrated_steps(
    training: DpSgdConfig, config: NoisyHistogramConfig, target: PrivacyTarget, *, num_records: int
) -> HistogramSteps:
    """The steps with the least noise that keeps them within ``target``, split as ``histogram_share`` says.

    ValueError for a target out of reach, and for a relation that the event is not priced under.
    """
    if target.record_relation != "add or remove one":
        raise ValueError(
            f"Expected target.relation 'add or remove one', got {target.record_relation!r}: Laplace and Gaussian noise "
            "on one sample are priced under it alone."
        )

    silent = plan_steps(training, config, num_records=num_records, noise_multiplier=0.0, laplace_scale=0.0)
    # Looked up by what the price depends on alone, so that seeds and learning rates share one search.
    joint = _least_joint_noise(silent.event, config.histogram_share, target.epsilon, target.delta, target.accounting)
    noise_multiplier, laplace_scale = split_noise(joint, histogram_share=config.histogram_share)
    return plan_steps(
        training, config, num_records=num_records, noise_multiplier=noise_multiplier, laplace_scale=laplace_scale
    )


@lru_cache
def _least_joint_noise(
    silent: PoissonGaussianLaplaces, histogram_share: float, epsilon: float, delta: float, accounting: Accounting
) -> float:
    def events(joint: float) -> list[Event]:
        noise_multiplier, laplace_scale = split_noise(joint, histogram_share=histogram_share)
        return [replace(silent, gradient_noise_multiplier=noise_multiplier, laplace_scale=laplace_scale)]

    return least_noise(events, target_epsilon=epsilon, target_delta=delta, accounting=accounting)


def split_noise(joint: float, *, histogram_share: float) -> tuple[float, float]:
    """A Gaussian multiplier and a Laplace scale with ``1 / joint^2 = 1 / multiplier^2 + 1 / scale^2``.

    Where noise is large, each release costs about half its inverse square: ``histogram_share`` is the histogram's part
    of the budget.
    """
    if not 0 < histogram_share < 1:
        raise ValueError(f"Expected 0 < histogram_share < 1, got {histogram_share}: both releases need noise.")
    return joint / math.sqrt(1 - histogram_share), joint / math.sqrt(histogram_share)


class RacoDpConfig(NoisyHistogramConfig):
    """RaCO-DP: which rate constraint, how tight, and how its multipliers move."""

    constraint: ConstraintName = "demographic_parity"
    bound: Annotated[float, Field(ge=-1, le=1)] = Field(
        0.05, description="On the signed gap of a group to all others, or on the rate itself."
    )
    label: CountOrZero | None = Field(1, description="Code of the positive class; null: one constraint per class.")
    constraints: RateConstraints | None = Field(
        None, description="Any others over codes of labels and groups, in place of constraint, bound and label."
    )
    sharpness: Positive = Field(1.0, description="Inverse temperature of the predictions that rates are taken of.")
    counts: Literal["probabilities", "labels"] = Field(
        "probabilities", description="What histograms, and so multipliers, see of a prediction; theory has the first."
    )
    dual_learning_rate: NotNegative = Field(0.1, description="Of the multipliers; 0 leaves them at 0.")
    max_multiplier: Positive | None = Field(None, description="Cap on each multiplier; or:")
    max_total_multiplier: Positive | None = Field(None, description="Cap on the sum of all.")

    @property
    def has_small_cells(self) -> bool:
        """As the constraint's partition says."""
        if self.constraints is None:
            return self.constraint in ("equalized_odds", "equal_opportunity")
        partition = self.constraints.partition
        return partition.num_labels > 1 and partition.num_groups > 1


@dataclass(frozen=True, kw_only=True)
class ConstraintReport:
    """How the constraints fared on soft predictions of private records, from noisy histograms: may be published.

    ``values`` are Gamma of the mean histogram over the second half of the steps; ``floored`` names the constraints that
    rest on a union smaller than the declared floor there, which were thus held more loosely than stated.
    """

    names: tuple[str, ...]
    bounds: tuple[float, ...]
    values: tuple[float, ...]
    multipliers: tuple[float, ...]
    floored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RacoTrained(Trained):
    """What is released besides the model."""

    report: ConstraintReport


def constraints_of(config: RacoDpConfig, *, num_classes: int, num_groups: int) -> RateConstraints:
    """The constraints that ``config`` states or names. ValueError for those of other data or of no sense."""
    if (own := config.constraints) is not None:
        # A partition of one label, or of one group, does not distinguish them.
        sizes = (("classes", own.num_classes, {num_classes}), ("groups", own.partition.num_groups, {1, num_groups}))
        labels = ("labels", own.partition.num_labels, {1, num_classes})
        for words, found, fitting in (*sizes, labels):
            if found not in fitting:
                raise ValueError(f"Expected raco_dp.constraints over {max(fitting)} {words}, got {found}.")
        return own
    return named_constraints(
        config.constraint, num_classes=num_classes, num_groups=num_groups, bound=config.bound, label=config.label
    )


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    steps: HistogramSteps,
    config: RacoDpConfig,
    *,
    constraints: RateConstraints,
    randomness: PrivateRandomness,
    histogram_randomness: PrivateRandomness,
    generator: torch.Generator,
    person_N: Tensor | None = None,
    on_progress: Progress = lambda *_: None,
) -> RacoTrained:
    """Train ``model`` in place on private ``x`` (N, ...), ``y`` (N,) and ``groups`` (N,), all of them protected.

    ``person_N`` gives the number of each record's person, and then persons are protected. ``generator`` drives dropout
    alone; the histogram's noise has a randomness of its own, so that prices of 0 are DP-SGD, bit for bit. Errors as
    :func:`priced_training`; also ValueError for labels or groups that the constraints' partition does not have.
    """
    lagrangian = Lagrangian(constraints, config, steps)
    cells_N = constraints.partition.cells(y.cpu().numpy(), groups.cpu().numpy())
    training = priced_training(
        model,
        x,
        y,
        torch.from_numpy(cells_N).to(y.device),
        steps.gradient,
        rows=SoftPrediction(config.sharpness, counts_labels=config.counts == "labels"),
        num_cells=constraints.partition.num_cells,
        num_classes=constraints.num_classes,
        laplace_scale=steps.laplace_scale,
        size_noise=steps.size_noise,
        pricing=lagrangian,
        randomness=randomness,
        histogram_randomness=histogram_randomness,
        person_N=person_N,
        # A person's average row sums to 1 as a record's does: the same event holds for persons.
        events=(steps.event if person_N is None else replace(steps.event, unit="person"),),
    )
    events = training.run(generator=generator, averaged_share=steps.averaged_share, on_progress=on_progress)
    return RacoTrained(model=model, events=events, noise=randomness.label, report=lagrangian.report())


class Lagrangian:
    """The multipliers, and the prices that they put on a record's predictions given a noisy histogram.

    A step's prices hold the multipliers from before it; then the multipliers move. All of it is post-processing.
    """

    def __init__(self, constraints: RateConstraints, config: RacoDpConfig, steps: HistogramSteps) -> None:
        self.dual = DualAscent(
            len(constraints.constraints),
            learning_rate=config.dual_learning_rate,
            cap=config.max_multiplier or math.inf,
            l1_radius=config.max_total_multiplier or math.inf,
        )
        self._constraints, self._size_floor = constraints, steps.size_floor
        self._batch_size = steps.gradient.expected_batch_size
        self._pricer = Pricer(constraints, size_floor=self._size_floor, num_records=self._batch_size)
        # The first half describes models that are far from the published one.
        self._first_kept, self._num_seen = steps.gradient.num_steps // 2, 0
        self._sum_QC = np.zeros((constraints.partition.num_cells, constraints.num_classes))

    def __call__(self, noisy_histogram_QC: FloatArray) -> FloatArray:
        """Prices (Q, C) at the scale of sums over the expected batch."""
        # Prices first, of the multipliers that earlier steps released: the gradient and the dual step read one
        # histogram.
        values_J, prices_QC = self._pricer(noisy_histogram_QC, self.dual.multipliers_J)
        self.dual.step(values_J - self._constraints.bounds_J)
        if self._num_seen >= self._first_kept:
            self._sum_QC += noisy_histogram_QC
        self._num_seen += 1
        return prices_QC

    def report(self) -> ConstraintReport:
        """Of the steps so far."""
        mean_QC = self._sum_QC / max(1, self._num_seen - self._first_kept)
        values_J = self._constraints.values(mean_QC, size_floor=self._size_floor, num_records=self._batch_size)
        return ConstraintReport(
            names=self._constraints.names,
            bounds=tuple(self._constraints.bounds_J.tolist()),
            values=tuple(values_J.tolist()),
            multipliers=tuple(self.dual.multipliers_J.tolist()),
            floored=self._constraints.floored(mean_QC, size_floor=self._size_floor),
        )


def epsilon_as_in_paper(steps: HistogramSteps, *, target_delta: float) -> float:
    """What the paper's accounting says, in Renyi curves: each noise amplified by itself. Not a guarantee.

    Sizes count for nothing, since it does not say what they cost.
    """
    noises = (
        accountant.gaussian_log_moments(steps.gradient.noise_multiplier),
        accountant.laplace_log_moments(steps.laplace_scale),
    )
    orders = accountant.DEFAULT_ORDERS
    curves = [
        accountant.poisson_rdp(moments, sampling_rate=steps.gradient.sampling_rate, orders_A=orders)
        for moments in noises
    ]
    total_A = steps.gradient.num_steps * np.sum(curves, axis=0)
    return epsilon_of_curve(total_A, orders, target_delta=target_delta)[0]


class RacoDp(DpSgdFamily):
    """Within the target for one record or person; the constraint holds for the groups and labels of private records."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "RaCO-DP"
    paper: ClassVar[str] = "Private Rate-Constrained Optimization with Applications to Fair Learning"

    method: str = "raco_dp"
    raco_dp: RacoDpConfig = RacoDpConfig()

    @property
    def unread(self) -> dict[str, str]:
        """What names a constraint, where others are given."""
        named = ("constraint", "bound", "label") if self.raco_dp.constraints is not None else ()
        return {f"raco_dp.{field}": "raco_dp.constraints" for field in named}

    def check(self) -> None:
        """ConfigError for a target that a histogram beside the gradient is not priced under, or two caps at once."""
        if self.target.record_relation != "add or remove one":
            raise ConfigError(
                f"target.relation: {self.target.relation!r} is not priced for {self.method}, whose Laplace and "
                "Gaussian noise fall on one sample; use 'add or remove one'."
            )
        if self.raco_dp.max_multiplier is not None and self.raco_dp.max_total_multiplier is not None:
            raise ConfigError(
                "raco_dp.max_multiplier: expected this or raco_dp.max_total_multiplier, got both; leave one."
            )

    def train(self, training: Training) -> Trained:
        """DP-SGD beside a noisy histogram of every batch."""
        dataset, config = training.dataset, self.raco_dp
        with training.reporter.stage(self.method) as advance:
            trained = train(
                **arguments(training, groups=True),
                config=config,
                person_N=dataset.private.person_N,
                steps=calibrated_steps(self.dp_sgd, config, self.target, num_records=dataset.private.num_protected),
                constraints=constraints_of(config, num_classes=dataset.num_classes, num_groups=dataset.num_groups),
                randomness=self.randomness(),
                # Apart from the gradient's, so that multipliers of 0 leave DP-SGD as it is, bit for bit.
                histogram_randomness=self.randomness(Stream.HISTOGRAM_NOISE),
                on_progress=advance,
            )
        _tell(trained.report, training.reporter)
        return trained


def _tell(report: ConstraintReport, reporter: Reporter) -> None:
    worst = max(range(len(report.names)), key=lambda j: report.values[j] - report.bounds[j])
    reporter.note("constraint", f"{report.names[worst]} at {report.values[worst]:.3f}, bound {report.bounds[worst]:g}")
    if report.floored:
        reporter.note(
            "floor", f"fewer than raco_dp.min_share records behind {', '.join(report.floored)}: held more loosely"
        )
