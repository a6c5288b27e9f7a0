"""RaCO-DP: DP-SGD under rate constraints ("Private Rate-Constrained Optimization with Applications to Fair Learning").

    min over theta, max over lambda >= 0:   loss(theta) + sum_j lambda_j (Gamma_j(theta) - bound_j)

for generalised rate constraints Gamma_j (:mod:`fairpate.fairness.rate_constraints`). One step (Algorithm 1), with a
Poisson sample of rate r, L = r N, soft predictions s(x) = softmax(sharpness h(x)) and record x in cell q(x):

    H[q, k] = sum of s(x)_k over the sample's records in q, + Laplace(b) on every entry
    size_I  = max(floor, sum of H over the cells of I and all classes)            for every union I of a constraint
    g_x     = grad loss_x + L sum_j lambda_j sum_I,k a_jIk [q(x) in I] / size_I grad s(x)_k, clipped to C as one vector
    theta  <- theta - rate (sum_x clip(g_x) + N(0, (zeta C)^2 I)) / L
    lambda <- P(lambda + dual rate (Gamma of the noisy H and its sizes - bound))

A record moves H by 1 in L1 and the sum by C in L2, on the same sample: one event, composed before it is amplified.

Deviations from the paper and its code:
- The paper amplifies Laplace and Gaussian noise separately and adds: too cheap, as both read one sample.
  :func:`epsilon_as_published` is that number, for comparison.
- The relation is adding or removing a record, which its sensitivities are for; it writes replacing one.
- Sizes have a public floor: with noise they may be negative. Its code charges nothing for group sizes that it releases.
- Every entry of H has noise of its own, and there are no padded rows.
- The last weights are averaged; the paper takes the best of many checkpoints by private validation data, uncharged.
- Momentum, as DP-SGD has it here; 0 is the paper's.

Shapes: N records, Q cells, C classes, J constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fairpate.baselines import noisy_histogram
from fairpate.baselines.dual_ascent import DualAscent
from fairpate.baselines.method import Progress, Trained
from fairpate.baselines.noisy_histogram import HistogramSteps
from fairpate.fairness.rate_constraints import Pricer, RateConstraints, named_constraints
from fairpate.fairness.rates import FloatArray
from fairpate.nn.priced_fit import SoftPrediction
from fairpate.nn.private_fit import PrivateRandomness
from fairpate.privacy import accountant, subsampled
from fairpate.train_config import RacoDpConfig


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
    """The constraints that ``config`` names. ValueError for a bound or a label that makes no sense."""
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
    on_progress: Progress = lambda *_: None,
) -> RacoTrained:
    """Train ``model`` in place on private ``x`` (N, ...), ``y`` (N,) and ``groups`` (N,), all of them protected.

    Randomness and errors as :func:`fairpate.baselines.noisy_histogram.fit`; also ValueError for labels or groups that
    the constraints' partition does not have.
    """
    lagrangian = Lagrangian(constraints, config, steps)
    cells_N = constraints.partition.cells(y.cpu().numpy(), groups.cpu().numpy())
    noisy_histogram.fit(
        model,
        x,
        y,
        torch.from_numpy(cells_N).to(y.device),
        steps,
        rows=SoftPrediction(config.sharpness),
        num_cells=constraints.partition.num_cells,
        num_classes=constraints.num_classes,
        pricing=lagrangian,
        randomness=randomness,
        histogram_randomness=histogram_randomness,
        generator=generator,
        on_progress=on_progress,
    )
    return RacoTrained(model=model, events=(steps.event,), noise=randomness.label, report=lagrangian.report())


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
        self._first_kept, self._num_seen = steps.gradient.num_steps // 2, 0
        self._sum_QC = np.zeros((constraints.partition.num_cells, constraints.num_classes))

    def __call__(self, noisy_histogram_QC: FloatArray) -> FloatArray:
        """Prices (Q, C) at the scale of sums over the expected batch."""
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


def epsilon_as_published(steps: HistogramSteps, *, target_delta: float) -> float:
    """What the paper's accounting says, in Renyi curves: each noise amplified by itself. Not a promise."""
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
    return accountant.epsilon_of_curve(total_A, orders, target_delta=target_delta)[0]
