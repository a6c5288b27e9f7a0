"""RaCO-DP: DP-SGD under rate constraints ("Private Rate-Constrained Optimization with Applications to Fair Learning").

    min over theta, max over lambda >= 0:   loss(theta) + sum_j lambda_j (Gamma_j(theta) - bound_j)

for generalised rate constraints Gamma_j (:mod:`fairpate.fairness.rate_constraints`). One step (Algorithm 1), with a
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
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fairpate.app.seeds import Stream
from fairpate.app.terminal.progress import Reporter
from fairpate.config import ConfigError, CountOrZero, NotNegative, Positive
from fairpate.fairness.named_constraints import ConstraintName, named_constraints
from fairpate.fairness.rate_constraints import Pricer, RateConstraints
from fairpate.fairness.rates import FloatArray
from fairpate.methods import noisy_histogram
from fairpate.methods.definition import Training, arguments
from fairpate.methods.dp_sgd import DpSgdFamily
from fairpate.methods.dual_ascent import DualAscent
from fairpate.methods.noisy_histogram import HistogramSteps, NoisyHistogramConfig
from fairpate.methods.trained import Progress, Trained
from fairpate.nn.priced_fit import SoftPrediction
from fairpate.nn.private_fit import PrivateRandomness
from fairpate.privacy import accountant, subsampled
from fairpate.privacy.conversion import epsilon_of_curve


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

    ``person_N`` numbers whose the records are, and then persons are protected. Randomness and errors as
    :func:`fairpate.methods.noisy_histogram.fit`; also ValueError for labels or groups that the constraints' partition
    does not have.
    """
    lagrangian = Lagrangian(constraints, config, steps)
    cells_N = constraints.partition.cells(y.cpu().numpy(), groups.cpu().numpy())
    noisy_histogram.fit(
        model,
        x,
        y,
        torch.from_numpy(cells_N).to(y.device),
        steps,
        rows=SoftPrediction(config.sharpness, counts_labels=config.counts == "labels"),
        num_cells=constraints.partition.num_cells,
        num_classes=constraints.num_classes,
        pricing=lagrangian,
        randomness=randomness,
        histogram_randomness=histogram_randomness,
        generator=generator,
        person_N=person_N,
        on_progress=on_progress,
    )
    # A person's average row sums to 1 as a record's does: the same event holds for persons.
    event = steps.event if person_N is None else replace(steps.event, unit="person")
    return RacoTrained(model=model, events=(event,), noise=randomness.label, report=lagrangian.report())


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
        subsampled.gaussian_log_moments(steps.gradient.noise_multiplier),
        subsampled.laplace_log_moments(steps.laplace_scale),
    )
    orders = accountant.DEFAULT_ORDERS
    curves = [
        subsampled.poisson_rdp(moments, sampling_rate=steps.gradient.sampling_rate, orders_A=orders)
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
                steps=noisy_histogram.calibrated_steps(
                    self.dp_sgd, config, self.target, num_records=dataset.private.num_protected
                ),
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
