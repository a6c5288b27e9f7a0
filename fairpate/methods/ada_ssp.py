"""AdaSSP: least squares from noisy moments of the private records (Wang 2018, arXiv 1803.02596, Algorithm 2).

    phi(x)       whole numbers of L2 norm at most U, as in weighted votes: the constant and a public embedding
    sums         S[c] = the sum of phi over records of label c, + N_Z(0, s_1^2)
    moments      G = the sum of phi phi^T, + symmetric noise of variance s_2^2, half of it off the diagonal
    eigenvalue   m = the least eigenvalue of the exact sum of phi phi^T, + N_Z(0, s_3^2), - s_3 sqrt(ln(6 / delta))
    ridge        k = max(0, r sqrt(W ln(2 W^2 / rho)) s_2 / sqrt(2) - max(0, m))
    rule         W = S (G + k I)^-1, the least-squares fit of indicators of labels; a record gets the largest score's

Adding or removing a record moves S by at most U, and the sum of phi phi^T by at most U^2 in Frobenius norm; no
eigenvalue of a symmetric matrix moves by more than that norm (Weyl). m is a lower bound on the least eigenvalue, so
that moments which stand out against the noise in every direction get no ridge.

Deviations from the paper: indicators of several labels instead of one number, as in Mehta et al. 2022 (arXiv
2211.13403), whose DP-FC, Newton steps with noisy moments, is the private curvature of
:mod:`fairpate.methods.residual_votes`. r = .15 instead of 1: the bound on the noise is twice its typical norm, and a
ridge of that size lost 30 points on one data set (docs/training.md). Exact noise on whole numbers. A third of the
squared sensitivity over variance for each release, composed in the accountant, instead of a third of epsilon and delta
for each: less noise. Noise off the diagonal has half the variance, because the Frobenius norm counts these numbers
twice. Negative eigenvalues of G are set to 0, and the ridge is at least the weight of one record. Persons are bounded
as in residual votes. As there, the rule is published, or a student that learns its labels of the public pool.

Shapes: M public records, C classes, W numbers per class.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fairpate.methods.base import Trained, Training, noise_within
from fairpate.methods.record_votes import (
    UNITS,
    PoolLabels,
    VectorsConfig,
    WeightedBallot,
    labels_of_chances,
    with_noise,
)
from fairpate.methods.residual_votes import (
    RecordSums,
    RulesOfRecords,
    curvature_inverse,
    indicators,
    noisy_moments,
    votes_themselves,
)
from fairpate.privacy.accountant import of_unit
from fairpate.privacy.mechanism_events import MomentSums, VoteSums
from fairpate.run.release_log import Released
from fairpate.types import IntArray
from teachers.ray_pool import open_pool

DoubleArray = npt.NDArray[np.float64]
EIGENVALUE_NORM = UNITS**2 + UNITS
"""The largest move of the released eigenvalue: U^2, and a margin for its rounding, far above that of 64-bit floats up
to 10^10 / W records."""


class AdaSspConfig(VectorsConfig):
    """The ridge penalty, and the labels that the student learns from."""

    ridge_share: float = Field(
        0.15,
        gt=0,
        le=1,
        description="r: share of the bound on the noise of the moments that the ridge penalty makes up for; 1: all, as "
        "in the paper.",
    )
    failure_probability: float = Field(
        0.05, gt=0, lt=1, description="rho: probability that the noise of the moments is larger than the ridge assumes."
    )


def events_of(noise: float) -> tuple[VoteSums, MomentSums, VoteSums]:
    """Sums, moments and eigenvalue, which together cost as much as one Gaussian release with noise multiplier
    ``noise``."""
    each = noise * math.sqrt(3)
    return (
        VoteSums(count=1, noise_stddev_votes=each * UNITS, norm=UNITS),
        MomentSums(count=1, noise_stddev_votes=each * UNITS**2, norm=UNITS**2),
        VoteSums(count=1, noise_stddev_votes=each * EIGENVALUE_NORM, norm=EIGENVALUE_NORM),
    )


def least_eigenvalue(moments_WW: IntArray) -> IntArray:
    """The least eigenvalue of the exact moments, in whole numbers; shape (1, 1)."""
    # Rounded down, which with the rounding of floats moves it by less than the margin in EIGENVALUE_NORM.
    return np.array([[math.floor(np.linalg.eigvalsh(moments_WW.astype(np.float64))[0])]], dtype=np.int64)


class AdaSsp(RulesOfRecords):
    """Releases noisy sums, second moments and their least eigenvalue once, and fits least squares to them."""

    title: ClassVar[str] = "AdaSSP"
    paper: ClassVar[str] = "Wang 2018, arXiv 1803.02596"
    learned: ClassVar[tuple[str, ...]] = ("ridge_share", "failure_probability")

    method: str = "ada_ssp"
    ada_ssp: AdaSspConfig = AdaSspConfig()

    def events(self) -> tuple[VoteSums, MomentSums, VoteSums]:
        """The events of the release, with the least noise that the target allows."""
        return events_of(noise_within(self.target, events_of))

    def measure(self, training: Training) -> Released:
        """Release sums, moments and the least eigenvalue."""
        dataset, source = training.dataset, self.source
        sums, moments, eigenvalue = events = self.events()
        with training.reporter.stage("votes"), open_pool(self.ray) as pool:
            ballot = WeightedBallot.of(dataset, self.ada_ssp.embedding)
            records = RecordSums.of(ballot, dataset.private, pool)
            exact_CW = records.total(indicators(dataset.num_classes), norm=UNITS)
            exact_WW = records.total(votes_themselves, norm=UNITS**2)
            released = tuple(of_unit(event, dataset.unit) for event in events)
            training.reserve(released, source.label)
            arrays: dict[str, npt.NDArray[Any]] = {
                "pool_MW": ballot.votes(dataset.public.x).astype(np.int16),
                "sums_CW": with_noise(exact_CW, stddev=sums.noise_stddev_votes, source=source, row="sums, class"),
                # The exact moments are read twice, for two events: under noise, and for their least eigenvalue.
                "moments_WW": noisy_moments(exact_WW, moments.noise_stddev_votes, source),
                "eigenvalue_11": with_noise(
                    least_eigenvalue(exact_WW), stddev=eigenvalue.noise_stddev_votes, source=source, row="eigenvalue"
                ),
            }
        training.reporter.note("votes", f"{len(exact_WW)} numbers per class, and their second moments")
        return Released(arrays=arrays, events=released)

    def learn(self, training: Training, released: Released) -> Trained:
        """Fit least squares to the release. Publish the rule, or a student of its labels where settings ask for one."""
        rule_CW = self.rule(released)
        said = labels_of_scores(released.arrays["pool_MW"] / UNITS @ rule_CW.T)
        # Scores of two labels add up to one; twice their difference is the logit, to first order around one half.
        return self.published(training, released, 2 * rule_CW, said)

    def rule(self, released: Released) -> DoubleArray:
        """The least-squares rule (C, W), for features of norm one."""
        # The same search as in `measure`: it is deterministic, and so gives the noise of the release.
        arrays, (_, moments, eigenvalue) = released.arrays, self.events()
        width = len(arrays["moments_WW"])
        doubt = eigenvalue.noise_stddev_votes * math.sqrt(math.log(6 / self.target.delta))
        least = max(0.0, float(arrays["eigenvalue_11"][0, 0]) - doubt) / UNITS**2
        factor = math.sqrt(width * math.log(2 * width**2 / self.ada_ssp.failure_probability))
        bound = factor * moments.noise_stddev_votes / math.sqrt(2) / UNITS**2
        # At least the weight of one record, so that the inverse exists for any noise.
        ridge = max(self.ada_ssp.ridge_share * bound - least, 1.0)
        inverse_WW = curvature_inverse(arrays["moments_WW"] / UNITS**2, floor=ridge)
        rule_CW: DoubleArray = arrays["sums_CW"] / UNITS @ inverse_WW
        return rule_CW


def labels_of_scores(scores_MC: DoubleArray) -> PoolLabels:
    """The pool's labels by scores that estimate indicators of labels: clipped at 0, they count as probabilities."""
    # The largest score's label keeps a share if no score is positive.
    clipped_MC = np.maximum(scores_MC, 0.0)
    clipped_MC[np.arange(len(scores_MC)), scores_MC.argmax(axis=1)] += 1e-9
    return labels_of_chances(clipped_MC / clipped_MC.sum(axis=1, keepdims=True))
