"""Residual votes, in which each of several noisy sums corrects the linear rule of the earlier ones; and AdaSSP.

The rule itself is published, unless settings require a student, which learns from the rule's labels of public records.
With private second moments and an embedding from a declared table, no public record is read at all.

Related work: weighted votes (:mod:`fairpate.methods.record_votes`); DANE (Shamir et al. 2014, arXiv 1312.7853); DP-FC
(Mehta et al. 2022, arXiv 2211.13403); the quadratic bound on the logistic loss (Boehning 1992).

    phi(x)       whole numbers of L2 norm at most U, as in weighted votes
    release 1    S[c] = the sum of phi over private records of label c, + N_Z(0, s_1^2)
    curvature    G = the sum of phi phi^T: n times the mean over public records, tilted to S; or a release of its own
    rule         W_0 fits S as in weighted votes; with a released G it is a (S - mean over classes) H^-1
    release t    g_t = the sum of clip(e_y - softmax(W_(t-1) phi)) phi^T, + N_Z(0, s_t^2)
    step         W_t = W_(t-1) + b g_t H^-1;  H: G with eigenvalues cut at 0, plus a floor in proportion to the noise

g_t is the gradient of the *private* log likelihood, so the steps correct errors due to the public records. The Hessian
of that likelihood is at most G / 2 for any W, so steps of b < 4 do not diverge. The residuals of well-predicted records
are small: clipped to the norm c < 1, they need c times the noise of S.

Adding or removing a record changes S by at most U, G by at most U^2 in Frobenius norm, and g_t by at most c U^2
(:class:`fairpate.privacy.mechanism_events.VoteSums`, :class:`fairpate.privacy.mechanism_events.MomentSums`). All noise
is fixed before anything is drawn, so that the adaptive releases compose in the accountant. Scores, probabilities and
products are whole numbers, whose sums are exact in any order. The contributions of a person's records are added up and
scaled down to the norm of one record's.

**AdaSSP** (:class:`AdaSsp`), least squares from noisy moments of the private records (Wang 2018, arXiv 1803.02596,
Algorithm 2), for comparison:

    phi(x)       whole numbers of L2 norm at most U, as above
    sums         S[c] = the sum of phi over records of label c, + N_Z(0, s_1^2)
    moments      G = the sum of phi phi^T, + symmetric noise of variance s_2^2, half of it off the diagonal
    eigenvalue   m = the least eigenvalue of the exact sum of phi phi^T, + N_Z(0, s_3^2), - s_3 sqrt(ln(6 / delta))
    ridge        k = max(0, r sqrt(W ln(2 W^2 / rho)) s_2 / sqrt(2) - max(0, m))
    rule         W = S (G + k I)^-1, the least-squares fit of label indicators; the label with the largest score wins

No eigenvalue of a symmetric matrix changes by more than the Frobenius norm of a change of the matrix (Weyl). m is a
lower bound on the least eigenvalue, so moments that are significant in every direction get no ridge.

Deviations from the paper: indicators of several labels instead of one number, as in DP-FC, whose Newton steps with
noisy moments are the private curvature of :class:`ResidualVotes`. r = .15 instead of 1: the bound on the noise is twice
its typical norm (docs/training.md). A third of the squared sensitivity over variance for each release, composed in the
accountant, instead of a third of epsilon and delta for each: less noise. Noise off the diagonal has half the variance,
as the Frobenius norm counts these numbers twice. Negative eigenvalues of G are set to 0, and the ridge is at least the
weight of one record.

Shapes: N private records, M public ones, C classes, W numbers per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field
from scipy.special import softmax

from fairpate.config import ConfigError, Count, NetworkConfig, Positive, PositiveShare, RayConfig, StudentConfig
from fairpate.data import Dataset
from fairpate.data.dataset import Split, row_blocks
from fairpate.data.large_arrays import Gathered
from fairpate.methods import record_votes
from fairpate.methods.base import Audited, ExpectedVotes, NoisySum, Trained, Training, noise_within
from fairpate.methods.learning import unread_beside_rule
from fairpate.methods.record_votes import UNITS, PoolLabels, VectorsConfig, VotesOfRecords, WeightedBallot, with_noise
from fairpate.privacy.accountant import Event, of_unit
from fairpate.privacy.audit_bounds import Shadows
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.mechanism_events import MomentSums, VoteSums
from fairpate.releases.directory import ReleasedArrays
from fairpate.types import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

    from teachers.work import BlockPool

Whole = npt.NDArray[np.integer]
Curvature = Literal["public", "private"]
_AT_ONCE = 8192
_SHARE = 0.2
"""Share of the squared sensitivity over variance, whose total is 1, of the sums and of moments that are released; the
rounds of residuals divide the rest equally. The sums have it under both curvatures, which may be chosen after them."""
_START = 4.0  # a: the inverse of the Hessian of a rule that knows nothing, of two classes
_PUBLIC_FLOOR = 8.0  # in standard deviations of the noise of one release that costs as much as all
_PRIVATE_FLOOR = 0.5  # of the typical spectral norm of the noise of moments
_RULE_DIGITS, _SCORE_DIGITS = 12, 10
"""Binary digits after the point of a rule's numbers, and of the scores whose softmax is taken."""
_LARGEST_RULE = 2.0**24
_LEAST_CHANCE = 24  # scores that lie this far below the largest count as this far: exp(-24) = 4e-11
# 2^30 exp(-i / 2^10) in whole numbers, for the distance i of a score from the largest.
_EXPONENTIALS = np.rint(2.0**30 * np.exp(-np.arange(_LEAST_CHANCE << _SCORE_DIGITS) / 2.0**_SCORE_DIGITS)).astype(
    np.int64
)


def whole_rule(rule_CW: FloatArray) -> IntArray:
    """Return the linear rule (C, W) in whole multiples of 2^-12, so that scores of private records can be computed
    exactly. If a row's norm is above 2^24 in these units, the whole rule is scaled down to that norm."""
    # Larger rules would make sums of products inexact; the limit is far above the rules in use.
    longest = np.linalg.norm(rule_CW, axis=1).max(initial=0.0)
    scale = min(2.0**_RULE_DIGITS, _LARGEST_RULE / max(longest, 1e-30))
    return np.rint(rule_CW * scale).astype(np.int64)


def residuals(phi_NW: Whole, labels_N: IntArray, rule_CW: IntArray, *, bound: int) -> IntArray:
    """Return the residuals ``e_y - softmax(W phi)`` (N, C), one-hot label minus predicted probabilities, scaled down to
    an L2 norm of at most ``bound``.

    They are whole numbers in units of 1 / :data:`UNITS`, as ``bound`` is. ``rule_CW`` comes from :func:`whole_rule`. A
    row depends only on its record and the rule.
    """
    # Whole numbers below 2^53 in float64: exact in any order of summation, and fast.
    scores_NC = (phi_NW.astype(np.float64) @ rule_CW.T.astype(np.float64)).astype(np.int64)
    # Scores have 14 + 12 binary digits after the point, the table of exponentials has 10.
    below_NC = (scores_NC.max(axis=1, keepdims=True) - scores_NC) // (UNITS << _RULE_DIGITS >> _SCORE_DIGITS)
    # A table of whole numbers: library functions may round a number differently at another place of an array.
    weights_NC = _EXPONENTIALS[np.minimum(below_NC, len(_EXPONENTIALS) - 1)]
    # Rounding may make a residual longer: its norm is taken of the whole numbers.
    found_NC = -(weights_NC * UNITS // weights_NC.sum(axis=1, keepdims=True))
    found_NC[np.arange(len(labels_N)), labels_N] += UNITS
    squared_N1 = (found_NC * found_NC).sum(axis=1, keepdims=True)
    # Towards zero, and a little shorter than the bound, so that no rounding of floats makes a residual longer.
    shorter_NC = np.trunc(found_NC * (bound - 1) / np.sqrt(np.maximum(squared_N1, 1))).astype(np.int64)
    return np.where(squared_N1 > bound**2, shorter_NC, found_NC)


def product_sum(left_NA: Whole, right_NB: Whole, *, norm: int, person_N: IntArray | None = None) -> IntArray:
    """Return the exact sum over records of ``left right^T``, shape (A, B).

    The caller ensures that no record's product has a Frobenius norm above ``norm`` < 2^30. With ``person_N``, products
    of a person are added up and scaled down to ``norm`` if they exceed it.
    """
    if person_N is None:
        # 2^13 products below 2^30 add up to less than 2^53: exact in float64.
        blocks = row_blocks(len(left_NA), _AT_ONCE)
        parts = (left_NA[rows].T.astype(np.float64) @ right_NB[rows].astype(np.float64) for rows in blocks)
        return sum((part.astype(np.int64) for part in parts), np.zeros((), dtype=np.int64))
    # Most persons are within the norm even if their products all point in one direction: those are added up at once.
    norms_N = np.sqrt(np.square(left_NA.astype(np.float64)).sum(axis=1))
    norms_N *= np.sqrt(np.square(right_NB.astype(np.float64)).sum(axis=1))
    persons, person_N = np.unique(person_N, return_inverse=True)
    # The margin covers the rounding of these norms, so that what is added up at once would not have been scaled.
    is_long_N = (np.bincount(person_N, norms_N, minlength=len(persons)) > norm * (1 - 2.0**-29))[person_N]
    total = product_sum(left_NA[~is_long_N], right_NB[~is_long_N], norm=norm)
    left_NA, right_NB, person_N = left_NA[is_long_N], right_NB[is_long_N], person_N[is_long_N]
    by_person = np.argsort(person_N, kind="stable")
    # Without records numpy would still yield one part, and it would be empty.
    for rows in np.split(by_person, np.flatnonzero(np.diff(person_N[by_person])) + 1) if len(by_person) else ():
        total += shortened(product_sum(left_NA[rows], right_NB[rows], norm=norm), norm=norm)
    return total


def shortened(matrix: IntArray, *, norm: int) -> IntArray:
    """Return a person's contribution ``matrix`` (whole numbers), scaled down to a Frobenius norm of at most
    ``norm``."""
    squared = float(np.square(matrix.astype(np.float64)).sum())
    # The margin covers the rounding of the sum of squares, so that the whole numbers are within the norm for certain.
    limit = norm * (1 - 2.0**-30)
    if squared <= limit**2:
        return matrix
    return np.trunc(matrix * (limit / math.sqrt(squared))).astype(np.int64)


Left = Callable[[Whole, IntArray], Whole]
"""A function of votes (n, W) and labels (n,) of n records that returns the left factors (n, A) of their products."""
_Part = tuple[Whole, IntArray, IntArray | None]


def indicators(phi_NW: Whole, labels_N: IntArray, *, num_classes: int) -> Whole:  # noqa: ARG001 - of labels alone
    """Return one-hot labels (N, C): the left factors with which :meth:`RecordSums.total` sums the votes of each class.
    The votes ``phi_NW`` are not read."""
    return (labels_N[:, None] == np.arange(num_classes)).astype(np.int64)


def votes_themselves(phi_NW: Whole, labels_N: IntArray) -> Whole:  # noqa: ARG001 - the same for every label
    """Return the votes unchanged: the left factors with which :meth:`RecordSums.total` sums the second moments of
    votes. The labels are not read."""
    return phi_NW


@dataclass(frozen=True, kw_only=True)
class RecordSums:
    """Computes exact sums of ``left phi^T`` over private records, where phi is a record's vote and ``left`` another
    vector of the record. The workers of ``pool`` compute the sums of parts of the records.

    Votes of many records are in a memory-mapped file, so memory does not grow with their number. Sums of whole numbers
    are the same in any order, so they do not depend on parts or workers. ``person_N`` is the person of each record,
    None if persons are not protected.
    """

    phi_NW: Whole
    labels_N: IntArray
    person_N: IntArray | None
    pool: BlockPool

    @classmethod
    def of(cls, ballot: WeightedBallot, private: Split, pool: BlockPool) -> RecordSums:
        """Compute the votes phi of ``private`` records by the feature map ``ballot``, with the workers of ``pool``."""
        parts = (private.x[rows] for rows in row_blocks(len(private), _AT_ONCE))
        votes = Gathered()
        for part in pool.in_order(_votes_of_part, ballot, parts):
            votes.append(part)
        person_N = None if private.person_N is None else private.person_N.numpy()
        return cls(phi_NW=votes.array(), labels_N=private.y.numpy(), person_N=person_N, pool=pool)

    def total(self, left: Left, *, norm: int) -> IntArray:
        """Return the exact sum of ``left phi^T`` over all records, (A, W); ``norm`` as in :func:`product_sum`."""
        # Whole persons in every part: the sum of a person's products is scaled down as a whole.
        parts = (
            (self.phi_NW[rows], self.labels_N[rows], None if self.person_N is None else self.person_N[rows])
            for rows in row_blocks(len(self.labels_N), _AT_ONCE, self.person_N)
        )
        return self.pool.sum(_sum_of_part, (left, norm), parts).astype(np.int64)


def _votes_of_part(ballot: WeightedBallot, x: Tensor, device: str) -> Whole:  # noqa: ARG001 - whole numbers
    # In 16 bits: no number of a vote is above U, which is 2^14.
    return ballot.votes(x).astype(np.int16)


def _sum_of_part(how: tuple[Left, int], part: _Part, device: str) -> IntArray:  # noqa: ARG001
    (left, norm), (phi_NW, labels_N, person_N) = how, part
    return product_sum(left(phi_NW, labels_N), phi_NW, norm=norm, person_N=person_N)


class ResidualVotesConfig(VectorsConfig):
    """Settings of residual votes, noisy sums that fit a linear rule in rounds: the rounds, and the labels of a student
    if there is one."""

    curvature: Curvature | None = Field(
        None,
        description="Source of second moments: the `public` pool, or a `private` release. null: decided by the first "
        "release, which shows the number of private records: `private` if there are fewer public records than numbers "
        "in a vote, or if the noise of released moments is below the sampling error of the pool's (of its persons, "
        "where the source names them).",
    )
    public_rounds: Count = Field(5, description="Number of releases of residuals with public curvature.")
    private_rounds: Count = Field(8, description="Number of releases of residuals with private curvature.")
    clip: float = Field(0.5, gt=0, le=1, description="Bound on the L2 norm of a record's residual (1.41 without it).")
    step: float = Field(3.0, gt=0, lt=4, description="Length of a Newton step; below 4 none diverges without noise.")
    ridge: Positive = Field(
        2.0,
        description="Ridge penalty of the first linear rule with public curvature, as a multiple of the standard "
        "deviation of the noise divided by the number of records.",
    )

    @property
    def bound(self) -> int:
        """The bound on the L2 norm of a residual, in units of 1 / :data:`UNITS`."""
        return max(1, round(self.clip * UNITS))

    def events(self, noise: float, curvature: Curvature) -> tuple[VoteSums, ...]:
        """Return the privacy events of all releases, which together cost as much as one Gaussian release with the noise
        multiplier ``noise``. Second moments are among them if ``curvature`` is private, and not if it is public."""
        rounds, moments_share = (self.public_rounds, 0.0) if curvature == "public" else (self.private_rounds, _SHARE)
        sums = VoteSums(count=1, noise_stddev_votes=noise / math.sqrt(_SHARE) * UNITS, norm=UNITS)
        # A residual of at most ``bound`` units, times a vote of at most U units.
        # All rounds have equal parts of what is left.
        norm, each = self.bound * UNITS, (1 - _SHARE - moments_share) / rounds
        residual = VoteSums(count=rounds, noise_stddev_votes=noise / math.sqrt(each) * norm, norm=norm)
        if curvature == "public":
            return (sums, residual)
        moments = noise / math.sqrt(moments_share) * UNITS**2
        return (sums, MomentSums(count=1, noise_stddev_votes=moments, norm=UNITS**2), residual)


class RulesOfRecords(VotesOfRecords):
    """A method that learns a linear rule from releases. The rule is published, unless settings require a student."""

    ray: RayConfig = RayConfig(num_actors=0)

    @property
    def needing_public(self) -> tuple[str, ...]:
        """The dotted names of the settings that need public records: those that require a student, the student's reject
        option ``student.idp3``, uses of public data (``public_data``), and a ``curvature`` computed from public
        records."""
        idp3 = () if self.student.idp3 is None else ("student.idp3",)
        curvature = (f"{self.section}.curvature",) if getattr(self.own, "curvature", None) == "public" else ()
        return (*self.asking_student, *idp3, *super().needing_public[1:], *curvature)

    @property
    def unread(self) -> dict[str, str]:
        """The disabled fields, each with the setting that disables it: if the linear rule itself is published, the
        settings of a student's training."""
        return super().unread | (unread_beside_rule(self) if self.publishes_rule else {})

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError as the parent class does. Raise it also for a data set with neither public records nor an
        embedding, because votes cannot be computed from its records."""
        super().check_data(dataset)
        if not len(dataset.public) and dataset.embedding is None:
            raise ConfigError(
                f"data.embedding: got null, and {dataset.name} has no public records to fit an embedding to; set it to "
                f"{{}} (for a declared table), or name a file of public records (files.public)."
            )


class ResidualVotes(RulesOfRecords):
    """Residual votes: noisy sums of feature vectors, then noisy sums of residuals that improve a linear rule."""

    title: ClassVar[str] = "residual record votes"
    paper: ClassVar[str] = "here; related: arXiv 1312.7853, arXiv 2211.13403"
    colour: ClassVar[int] = 0
    voters: ClassVar[str] = "every record, several times"
    section: ClassVar[str] = "residual_votes"
    sums_over_sites: ClassVar[bool] = True
    known_before: ClassVar[str | None] = "with a curvature"

    method: str = "residual_votes"
    student: StudentConfig = StudentConfig(model=NetworkConfig(name="logistic"))
    residual_votes: ResidualVotesConfig = ResidualVotesConfig()

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes | None:
        """Estimate, for warnings before a run, how many votes decide a label in the first release, and how noisy they
        are. Return None without public records, from which this is estimated."""
        if not len(dataset.public):
            return None
        ballot = WeightedBallot.of(dataset, self.residual_votes.embedding)
        return ExpectedVotes(
            votes=ballot.similar(dataset.public.x, num_records),
            noise_stddev_votes=self.noise_of_sums,
            labels=round(self.residual_votes.taught_share * len(dataset.public)),
        )

    @property
    def noise_of_sums(self) -> float:
        """The standard deviation of the noise of the sums of votes by class, which are released first. Its unit is the
        largest norm of a vote."""
        sums, *_ = self.residual_votes.events(self.multiplier(), "public")
        return sums.noise_stddev_votes / UNITS

    def multiplier(self) -> float:
        """Return the noise multiplier of one Gaussian release that costs as much as all releases together.

        It holds for the configured ``curvature`` (second moments from public records, or released from private ones).
        If ``curvature`` is null, the multiplier suffices in both cases.
        """
        settings, kinds = self.residual_votes, get_args(Curvature)
        if settings.curvature is not None:
            kinds = (settings.curvature,)
        # Both plans have the same total of squared sensitivity over variance: the prices differ by rounding.
        # The larger noise serves both, because the sums are released before the curvature is chosen.
        return max(noise_within(self.target, partial(settings.events, curvature=kind)) for kind in kinds)

    def check_sites(self) -> None:
        """Raise ConfigError if released sums decide how many more follow: a plan of sites fixes them beforehand."""
        if self.residual_votes.curvature is None:
            raise ConfigError(
                "residual_votes.curvature: with null, released sums decide how many more follow, but a plan fixes them "
                "beforehand; set public or private."
            )

    def planned_events(self, dataset: Dataset) -> tuple[Event, ...] | None:
        """Return the privacy events of all releases. Return None if ``curvature`` is null: the first release then
        decides whether second moments of private records are released too."""
        return None if self.residual_votes.curvature is None else super().planned_events(dataset)

    def measure(self, training: Training) -> ReleasedArrays:
        """Release sums, then second moments if they come from private records, and residuals; each release depends on
        earlier ones."""
        from teachers.ray_pool import open_pool  # torch, which reading a configuration does not need

        dataset, settings = training.dataset, self.residual_votes
        noise, source = self.multiplier(), self.source
        with training.reporter.stage("votes"), open_pool(self.ray) as pool:
            ballot = WeightedBallot.of(dataset, settings.embedding)
            records = RecordSums.of(ballot, dataset.private, pool)

            def noisy_sum(left: Left, event: VoteSums, name: str) -> IntArray:
                exact_AW, stddev = records.total(left, norm=int(event.norm)), event.noise_stddev_votes
                row, over_sites = f"{name}, class", training.noisy_sum
                return with_noise(exact_AW, stddev=stddev, source=source, row=row, noisy_sum=over_sites)

            pool_MW = ballot.votes(dataset.public.x).astype(np.int16)
            sums = settings.events(noise, "public")[0]
            # Before the first draw, at the cost of both curvatures: which of them follows, released sums decide.
            planned = settings.events(noise, settings.curvature or "private")
            training.reserve([of_unit(event, dataset.unit) for event in planned], source.label)
            sums_CW = noisy_sum(partial(indicators, num_classes=dataset.num_classes), sums, "sums")
            # The constant's column counts records, under the same noise: the real number is never read.
            num_records = max(float(sums_CW[:, 0].sum()) / record_votes.ONE_RECORD, 1.0)
            # From the noisy number of records and public facts alone: the choice is post-processing.
            curvature = settings.curvature
            if curvature is None:
                num_public, width = pool_MW.shape
                # The noise: W^2 numbers of half the variance, of whose squares half are left once negative eigenvalues
                # are cut.
                error = width * noise / math.sqrt(_SHARE) / 2
                # Features have norm one at most, so that moments of M independent draws, counted as n, err by about
                # n / sqrt(M). Records of one person are one draw. The moments of fewer records than W are singular.
                draws = dataset.public_persons or num_public
                is_private = num_public < width or error < num_records / math.sqrt(draws)
                curvature = "private" if is_private else "public"
            events = settings.events(noise, curvature)
            arrays: dict[str, npt.NDArray[Any]] = {"pool_MW": pool_MW, "sums_CW": sums_CW}
            if curvature == "public":
                phi_MW, of_mean = pool_MW / UNITS, sums.noise_stddev_votes / UNITS / num_records
                rule_CW, weights_M = record_votes.fitted_rule(
                    sums_CW, pool_MW, num_records=num_records, noise=of_mean, ridge=settings.ridge
                )
                moments_WW = num_records * (phi_MW * weights_M[:, None]).T @ phi_MW
                # Noise dominates the steps in directions in which H is smaller.
                inverse_WW = curvature_inverse(moments_WW, floor=_PUBLIC_FLOOR * noise)
            else:
                exact_WW = records.total(votes_themselves, norm=UNITS**2)
                spread = events[1].noise_stddev_votes
                arrays["moments_WW"] = noisy_moments(exact_WW, spread, source, training.noisy_sum)
                # In proportion to the typical largest eigenvalue of the noise, a public number.
                floor = _PRIVATE_FLOOR * math.sqrt(2 * len(exact_WW)) * spread / UNITS**2
                inverse_WW = curvature_inverse(arrays["moments_WW"] / UNITS**2, floor=floor)
                # No pool to fit: from the rule that knows nothing, one step by the sums.
                # A shift common to all classes changes no softmax, so it is taken out.
                found_CW = sums_CW / UNITS
                rule_CW = _START * (found_CW - found_CW.mean(axis=0)) @ inverse_WW
            steps = []
            for number in range(events[-1].count):
                left = partial(residuals, rule_CW=whole_rule(rule_CW), bound=settings.bound)
                # Named by the round: under a seed, all rounds would otherwise draw the same noise.
                steps.append(noisy_sum(left, events[-1], f"residuals {number}"))
                # From released sums alone, so that the rule of the next round is public.
                rule_CW = rule_CW + settings.step * steps[-1] / UNITS**2 @ inverse_WW
        # Not which curvature: that would reveal something about a draw that is not charged yet. The report says it.
        training.reporter.note("votes", f"{pool_MW.shape[1]} numbers per class")
        arrays |= {"residuals_RCW": np.stack(steps), "rule_CW": rule_CW}
        return ReleasedArrays(arrays=arrays, events=tuple(of_unit(event, dataset.unit) for event in events))

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        """Return the linear rule of the last round as a model.

        If settings require a student, return a student that is trained on this rule's labels of the public pool.
        """
        rule_CW, pool_MW = released.arrays["rule_CW"], released.arrays["pool_MW"]
        said = record_votes.labels_of_chances(softmax(pool_MW / UNITS @ rule_CW.T, axis=1))
        trained = self.published(training, released, rule_CW, said)
        pool = f"{len(pool_MW):,} public records"
        moments = "a noisy release of private records" if "moments_WW" in released.arrays else f"those of {pool}"
        model = "this linear rule itself" if trained.architecture else f"a student, which learned from {pool}"
        # Read alone, as in a printed statement, and on pages as an item of what is not guaranteed.
        chosen = "A variant of the method was chosen from public facts and released sums; another may be better."
        remark = f"{chosen} Its linear rule uses second moments of features, {moments}; the model is {model}."
        return replace(trained, remarks=(remark,))

    def attack(self, audited: Audited) -> Shadows | None:
        """Return an attack on the noisy sums and residuals."""
        from fairpate.methods.attack_on_sums import attack_on_sums  # torch

        # The run's released sums chose the curvature; those of a shadow release might choose the other.
        kind = "private" if any(isinstance(event, MomentSums) for event in audited.events) else "public"
        own = self.residual_votes.model_copy(update={"curvature": kind})
        here = self.model_copy(update={"residual_votes": own, "ray": RayConfig(num_actors=0)})
        return attack_on_sums(here, audited)


def noisy_moments(
    exact_WW: IntArray, stddev: float, source: NoiseSource, noisy_sum: NoisySum | None = None
) -> IntArray:
    """Return the symmetric matrix ``exact_WW`` of second moments with noise; with ``noisy_sum``, the noisy sum of all
    sites' matrices.

    The noise has the standard deviation ``stddev`` on the diagonal, and at least ``stddev`` / sqrt(2) off it.
    """

    def here(exact_RW: IntArray, *, stddev: float, name: str) -> IntArray:
        return with_noise(exact_RW, stddev=stddev, source=source, row=f"{name}, class")

    draw = noisy_sum or here
    less = math.nextafter(stddev / math.sqrt(2), math.inf)
    # The quotient is rounded too: a float lower, the variance would be less than half of what is priced.
    while 2 * Fraction(less) ** 2 < Fraction(stddev) ** 2:
        less = math.nextafter(less, math.inf)
    # Only noise lies on and below the diagonal of this sum; it belongs to no number and is left out.
    above = np.triu(draw(np.triu(exact_WW, 1), stddev=less, name="moments"), 1)
    (diagonal,) = draw(exact_WW.diagonal()[None].copy(), stddev=stddev, name="squares")
    return above + above.T + np.diag(diagonal)


def curvature_inverse(moments_WW: FloatArray, *, floor: float) -> FloatArray:
    """Return the inverse (W, W) of the Hessian bound H: the symmetric ``moments_WW`` with negative eigenvalues set to
    0, plus ``floor`` > 0 times the identity."""
    # Second moments have no negative eigenvalue. Noise can make some, along which a Newton step goes uphill.
    values_W, vectors_WW = np.linalg.eigh(moments_WW)
    return (vectors_WW / (np.maximum(values_W, 0.0) + floor)) @ vectors_WW.T


EIGENVALUE_NORM = UNITS**2 + UNITS
"""The sensitivity of the released eigenvalue: U^2 plus a margin for rounding, which exceeds the rounding error of
64-bit floats up to 10^10 / W records."""


class AdaSspConfig(VectorsConfig):
    """Settings of AdaSSP: the ridge penalty, and the labels of a student if there is one."""

    ridge_share: PositiveShare = Field(
        0.15,
        description="r: share of the bound on the noise of the moments that the ridge penalty makes up for; 1: all, as "
        "in the paper.",
    )
    failure_probability: float = Field(
        0.05, gt=0, lt=1, description="rho: probability that the noise of the moments is larger than the ridge assumes."
    )


def least_squares_events(noise: float) -> tuple[VoteSums, MomentSums, VoteSums]:
    """Return the privacy events of AdaSSP's three releases (sums, second moments, least eigenvalue), which together
    cost as much as one Gaussian release with the noise multiplier ``noise``."""
    each = noise * math.sqrt(3)
    return (
        VoteSums(count=1, noise_stddev_votes=each * UNITS, norm=UNITS),
        MomentSums(count=1, noise_stddev_votes=each * UNITS**2, norm=UNITS**2),
        VoteSums(count=1, noise_stddev_votes=each * EIGENVALUE_NORM, norm=EIGENVALUE_NORM),
    )


def least_eigenvalue(moments_WW: IntArray) -> IntArray:
    """Return the least eigenvalue of the exact second moments, rounded down to a whole number, shape (1, 1)."""
    # Rounded down, which with the rounding of floats moves it by less than the margin in EIGENVALUE_NORM.
    return np.array([[math.floor(np.linalg.eigvalsh(moments_WW.astype(np.float64))[0])]], dtype=np.int64)


class AdaSsp(RulesOfRecords):
    """AdaSSP: one release of noisy sums, second moments and their least eigenvalue, and a least-squares fit to them."""

    title: ClassVar[str] = "AdaSSP"
    paper: ClassVar[str] = "Wang 2018, arXiv 1803.02596"
    colour: ClassVar[int] = 2
    learned: ClassVar[tuple[str, ...]] = ("ridge_share", "failure_probability")
    section: ClassVar[str] = "ada_ssp"

    method: str = "ada_ssp"
    ada_ssp: AdaSspConfig = AdaSspConfig()

    def events(self) -> tuple[VoteSums, MomentSums, VoteSums]:
        """Return the privacy events of AdaSSP's release (least squares from noisy moments), with the least noise that
        the target allows."""
        return least_squares_events(noise_within(self.target, least_squares_events))

    def measure(self, training: Training) -> ReleasedArrays:
        """Release noisy sums of votes by class, noisy second moments of the votes, and a noisy least eigenvalue of
        these moments."""
        from teachers.ray_pool import open_pool  # torch, which reading a configuration does not need

        dataset, source = training.dataset, self.source
        sums, moments, eigenvalue = events = self.events()
        with training.reporter.stage("votes"), open_pool(self.ray) as pool:
            ballot = WeightedBallot.of(dataset, self.ada_ssp.embedding)
            records = RecordSums.of(ballot, dataset.private, pool)
            exact_CW = records.total(partial(indicators, num_classes=dataset.num_classes), norm=UNITS)
            exact_WW = records.total(votes_themselves, norm=UNITS**2)
            released = tuple(of_unit(event, dataset.unit) for event in events)
            training.reserve(released, source.label)
            least, noisy_sum = least_eigenvalue(exact_WW), training.noisy_sum
            noisy = partial(with_noise, source=source, noisy_sum=noisy_sum)
            arrays: dict[str, npt.NDArray[Any]] = {
                "pool_MW": ballot.votes(dataset.public.x).astype(np.int16),
                "sums_CW": noisy(exact_CW, stddev=sums.noise_stddev_votes, row="sums, class"),
                # The exact moments are read twice, for two events: under noise, and for their least eigenvalue.
                "moments_WW": noisy_moments(exact_WW, moments.noise_stddev_votes, source, noisy_sum),
                "eigenvalue_11": noisy(least, stddev=eigenvalue.noise_stddev_votes, row="eigenvalue"),
            }
        training.reporter.note("votes", f"{len(exact_WW)} numbers per class, and their second moments")
        return ReleasedArrays(arrays=arrays, events=released)

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        """Fit the least-squares rule to the release; return it as a model, or a student of its labels if settings
        require one."""
        rule_CW = self.rule(released)
        said = labels_of_scores(released.arrays["pool_MW"] / UNITS @ rule_CW.T)
        # Scores of two labels add up to one; twice their difference is the logit, to first order around one half.
        return self.published(training, released, 2 * rule_CW, said)

    def rule(self, released: ReleasedArrays) -> FloatArray:
        """Return the least-squares rule (C, W), for features of norm one."""
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
        return arrays["sums_CW"] / UNITS @ inverse_WW

    def attack(self, audited: Audited) -> Shadows | None:
        """Return an attack on the noisy sums, second moments and their least eigenvalue."""
        from fairpate.methods.attack_on_sums import attack_on_sums  # torch

        here = self.model_copy(update={"ray": RayConfig(num_actors=0)})
        return attack_on_sums(here, audited, least_eigenvalue=least_eigenvalue)


def labels_of_scores(scores_MC: FloatArray) -> PoolLabels:
    """Return for each public record the label with the highest score and probabilities of all labels; the scores (M, C)
    estimate label indicators.

    The probabilities are the scores, clipped at 0 and normalised. No label is drawn from them at random.
    """
    # The label with the largest score keeps a small share if no score is positive.
    clipped_MC = np.maximum(scores_MC, 0.0)
    clipped_MC[np.arange(len(scores_MC)), scores_MC.argmax(axis=1)] += 1e-9
    return record_votes.labels_of_chances(clipped_MC / clipped_MC.sum(axis=1, keepdims=True))
