"""Events of single mechanisms and their privacy costs; functions that store, read, merge and convert events.

This module registers Renyi curves and loss distributions with :mod:`fairpate.privacy.accountant`: for steps of
training, and for tables of the records' own votes, which have exact discrete Gaussian noise on whole numbers.

The pairs of output distributions under discrete noise are computed from their definition. Let u be the noise of a count
with standard deviation s. If one unit raises the count by one, the privacy loss is (1 + 2 u) / (2 s^2). If it raises
one count and lowers another, the loss is (d + 1) / s^2, where d is the difference of the two noises. A threshold check
on the same sample adds a loss on a second lattice. A change of one count is a marginal of a change of two. Sampling is
applied to the pair (:func:`fairpate.privacy.on_poisson_sample`), which bounds any sample of the
other records by joint convexity. Renyi curves of discrete Gaussians never exceed the continuous ones, which are used
(Canonne, Kamath and Steinke 2020, arXiv 2004.00010, Proposition 5).

**The best of a secret random number of private trials** and what its publication costs: Papernot and Steinke 2022,
"Hyperparameter Tuning with Renyi Differential Privacy" (arXiv 2110.03620, ICLR 2022), Theorem 2. K is drawn from a
truncated negative binomial law with parameters eta > -1 and 0 < gamma < 1,

    P[K = k]  is in proportion to  (1 - gamma)^k (eta (eta + 1) ... (eta + k - 1)) / k!,      k >= 1

where eta = 0 is the logarithmic law (1 - gamma)^k / k, and eta = 1 the geometric one. K independent trials of one
mechanism, each private together with its score, are run, and the best alone is published. If a trial has the Renyi
curve R, publication has, for every order b >= 1,

    R'(a) = R(a) + (1 + eta) ((1 - 1/b) R(b) + ln(1/gamma) / b) + ln E[K] / (a - 1)

A trial draws its settings at random, with replacement, from a list that was fixed beforehand. Its divergence at any
order is at most the largest of the list. This cost holds only if K and the trials that were not chosen stay secret.

**Publishing a data-dependent cost** (:mod:`fairpate.privacy.smooth_sensitivity`) is an event of its own,
:class:`SmoothRelease`.

Shapes: A orders, B orders b.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy import accountant, discrete_gaussian, gnmax, loss_distributions
from fairpate.privacy.accountant import CountedEvent, Event, event_pld, event_rdp
from fairpate.privacy.discrete_gaussian import NoiseSource, require_positive
from fairpate.privacy.loss_distributions import AtomicLoss, LossDistribution, gaussians, on_poisson_sample, repeated
from fairpate.types import FloatArray, Relation, Unit, worded


@dataclass(frozen=True, kw_only=True)
class SmoothRelease:
    """The event of publishing a data-dependent cost; its parameters are chosen before any vote is seen.

    ``order``: the Renyi order, 1 < order < 1 / (2 beta). ``beta``: smoothing parameter; the sensitivity at distance d
    is discounted by exp(-beta d). ``noise_stddev``: noise on the cost in multiples of the smooth sensitivity.
    ``scale_noise_stddev``: noise on ln(smooth sensitivity) in multiples of beta; with ``inf`` the smooth sensitivity is
    not published.
    """

    noun: ClassVar[str] = "release of the data-dependent privacy cost"
    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False
    order: float
    beta: float
    noise_stddev: float
    scale_noise_stddev: float = math.inf

    def __post_init__(self) -> None:
        require_positive("beta", self.beta)
        if not 1 < self.order < 1 / (2 * self.beta):
            raise ValueError(f"Expected 1 < order < 1 / (2 beta) = {0.5 / self.beta:g}, got {self.order}; lower beta.")
        require_positive("noise_stddev", self.noise_stddev)
        if not self.scale_noise_stddev > 0:
            raise ValueError(f"Expected scale_noise_stddev > 0 (inf is allowed), got {self.scale_noise_stddev}.")


@event_rdp.register
def release_rdp(release: SmoothRelease, orders_A: npt.ArrayLike) -> FloatArray:
    """Return the Renyi cost of publishing one data-dependent cost, shape (A,).

    It is ``inf`` from order 1 / (1 - exp(-2 beta)) on. The noise has the standard deviation s S, where S is the smooth
    sensitivity and s is ``noise_stddev``. Its cost is the largest divergence between two Gaussians, one for each of two
    neighbouring votes: their smooth sensitivities differ by a factor of at most exp(beta), and their means by at most
    the smaller of the two smooth sensitivities. The divergence is largest if both bounds are reached and the second
    Gaussian has the smaller standard deviation. (Theorem 23 of Papernot et al. 2018 states another cost, which is below
    this divergence for orders near 1 / (2 beta).) If ln S is published too, with noise, its Gaussian cost is added; the
    sensitivity of ln S is beta. ValueError for an order <= 1.
    """
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError(f"Expected Renyi orders > 1, got {orders_A!r}.")
    # From that order on the Gaussian of the smaller scale has too light a tail: the moment diverges.
    finite_A = orders * -math.expm1(-2 * release.beta) < 1
    # A placeholder with finite logarithms: the result is inf at these orders.
    inner = np.where(finite_A, orders, 1.0)
    shift_A = inner / (2 * release.noise_stddev**2 * (1 - (inner - 1) * math.expm1(2 * release.beta)))
    scale_A = -inner * release.beta - 0.5 * np.log1p(inner * math.expm1(-2 * release.beta))
    known_scale_A = orders / (2 * release.scale_noise_stddev**2)
    return np.where(finite_A, shift_A + scale_A / (orders - 1) + known_scale_A, math.inf)


@dataclass(frozen=True, kw_only=True)
class AttributeQueries(accountant.ConfidentGnmaxQueries):
    """Confident-GNMax queries that protect only the sensitive attribute of one training record. They cost as much as
    :class:`ConfidentGnmaxQueries`."""

    unit: Unit = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"


def of_teachers(event: Event, unit: Unit) -> Event:
    """Return the teachers' ``event`` at the same cost for another ``unit``, since any such unit touches only one
    teacher.

    For the unit "sensitive attribute" the relation becomes "replace one".
    """
    if unit != "sensitive attribute":
        return accountant.of_unit(event, unit)
    if not isinstance(event, accountant.ConfidentGnmaxQueries):
        return event
    return AttributeQueries(**vars(event) | {"unit": unit})


@dataclass(frozen=True, kw_only=True)
class PoissonGaussianLaplaces(CountedEvent):
    """``count`` steps, each a Gaussian sum and a Laplace sum over one fresh Poisson sample of records or persons.

    Because both sums read the same sample, they are composed first and then amplified once.
    ``gradient_noise_multiplier``: standard deviation over the L2 norm that a unit may add to the Gaussian sum;
    ``laplace_scale``: noise scale over the L1 norm that a unit may add to the Laplace sum.
    """

    noun: ClassVar[str] = "step of a Gaussian and a Laplace sum"
    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    count: int
    gradient_noise_multiplier: float
    laplace_scale: float
    sampling_rate: float


@dataclass(frozen=True, kw_only=True)
class AttributeGaussians(CountedEvent):
    """``count`` Gaussian releases that protect one record's sensitive attribute; features and labels count as public.

    ``attribute_noise_multiplier``: standard deviation over the L2 distance that a change of one attribute may make.
    """

    noun: ClassVar[str] = "attribute-level Gaussian sum"
    unit: ClassVar[Unit] = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"
    count: int
    attribute_noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class SecretBatchAttributeGaussians(AttributeGaussians):
    """``count`` Gaussian releases, each on a fresh secret Poisson batch, that protect only the records' sensitive
    attributes.

    The rest of a batch is not protected, so an attacker may see whether a record is in the batch. A release therefore
    costs as much as a mixture: a Gaussian release with probability ``sampling_rate``, otherwise nothing (joint
    convexity).
    """

    sampling_rate: float


def joint_multiplier(*multipliers: float) -> float:
    """Return the noise multiplier of one Gaussian release that costs as much as releases with ``multipliers`` on the
    same records; 0 if one of them has no noise."""
    if not all(multiplier > 0 for multiplier in multipliers):
        return 0.0
    # Independent Gaussians on the same records: their precisions add.
    return 1 / math.sqrt(sum(multiplier**-2 for multiplier in multipliers))


@event_rdp.register
def _(event: PoissonGaussianLaplaces, orders_A: FloatArray) -> FloatArray:
    if not event.gradient_noise_multiplier or not event.laplace_scale:
        return np.full(len(orders_A), math.inf)
    return event.count * _step_rdp(replace(event, count=1, unit="record"), tuple(orders_A.tolist()))


# A calibration tries many noises, and each training on as many records calibrates anew.
@lru_cache(maxsize=1024)
def _step_rdp(step: PoissonGaussianLaplaces, orders: tuple[float, ...]) -> FloatArray:
    # One sample serves both sums: their moments multiply first and are amplified once.
    gaussian = accountant.gaussian_log_moments(step.gradient_noise_multiplier)
    laplace = accountant.laplace_log_moments(step.laplace_scale)
    return accountant.poisson_rdp(
        lambda k_K: gaussian(k_K) + laplace(k_K), sampling_rate=step.sampling_rate, orders_A=orders
    )


@event_rdp.register
def _(event: AttributeGaussians, orders_A: FloatArray) -> FloatArray:
    if not event.attribute_noise_multiplier:
        return np.full(len(orders_A), math.inf)
    twice_variance = 2 * event.attribute_noise_multiplier**2
    if not isinstance(event, SecretBatchAttributeGaussians):
        return event.count * orders_A / twice_variance
    # Convexity of the moment: with probability 1 - rate the record is not in the batch, and nothing of it is lost.
    exponent_A = (orders_A - 1) * (orders_A / twice_variance)
    log_in = math.log(event.sampling_rate)
    # math.log1p(-1) is an error and not -inf.
    log_out = math.log1p(-event.sampling_rate) if event.sampling_rate < 1 else -math.inf
    return event.count * np.logaddexp(log_out, log_in + exponent_A) / (orders_A - 1)


@event_pld.register
def _(event: PoissonGaussianLaplaces, interval: float) -> LossDistribution | None:
    if not event.gradient_noise_multiplier or not event.laplace_scale:
        return None
    scales = {"noise_multiplier": event.gradient_noise_multiplier, "laplace_scale": event.laplace_scale}
    base = loss_distributions.GaussianAndLaplace(**scales)
    return repeated(on_poisson_sample(base, sampling_rate=event.sampling_rate, interval=interval), event.count)


@event_pld.register
def _(event: AttributeGaussians, interval: float) -> LossDistribution | None:
    if not isinstance(event, SecretBatchAttributeGaussians):
        return gaussians(event.count, event.attribute_noise_multiplier, interval=interval)
    # One step: each is mixed with nothing before steps are composed.
    inside = gaussians(1, event.attribute_noise_multiplier, interval=interval)
    if inside is None:
        return None
    return repeated(loss_distributions.mixed_with_nothing(inside, event.sampling_rate), event.count)


_ROUNDING = 3.0  # t of `VoteSums`: standard deviation of the rounding to whole numbers
_MOST_ATOMS, _MOST_STEPS = 2**20, 2**13


@dataclass(frozen=True, kw_only=True)
class _RecordsVote(CountedEvent):
    """``count`` releases of votes, each from a fresh Poisson sample of the units (records or persons)."""

    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    count: int
    noise_stddev_votes: float
    sampling_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class VoteTables(_RecordsVote):
    """``count`` tables of vote counts with noise on every cell, also on empty ones; a unit changes one count by one."""

    noun: ClassVar[str] = "noisy table of votes"


@dataclass(frozen=True, kw_only=True)
class VoteSums(_RecordsVote):
    """``count`` tables of sums with noise on every cell; a unit adds a vector of whole numbers to the sums, of L2 norm
    at most ``norm``.

    The privacy loss of such a vector has no simple lattice, so it is bounded by that of a continuous Gaussian. For any
    t < s, noise N_Z(0, s^2) is, up to a factor, the result of replacing every coordinate x of N(0, s^2 - t^2) by an
    integer k with probability proportional to exp(-(k - x)^2 / (2 t^2)). Integrated over x, the product of both
    densities is a multiple of exp(-k^2 / (2 s^2)). The normaliser depends on x by a relative 2 exp(-2 pi^2 t^2) at most
    (Poisson summation): at t = 3 by 1e-77 per coordinate, far below what a float resolves. The replacement reads the
    noisy sum alone, so it is post-processing of a Gaussian release with the multiplier sqrt(s^2 - t^2) / norm.
    """

    noun: ClassVar[str] = "noisy table of weighted votes"
    norm: float = 1


@dataclass(frozen=True, kw_only=True)
class MomentSums(VoteSums):
    """``count`` noisy symmetric matrices of second moments, each released as its diagonal and the numbers above it.

    A unit adds a symmetric matrix of whole numbers with a Frobenius norm of at most ``norm``. Numbers on the diagonal
    have noise of standard deviation ``noise_stddev_votes``. Numbers above the diagonal have noise of at least this
    standard deviation over sqrt(2), because the Frobenius norm counts them twice. The diagonal and the numbers above
    it, multiplied by sqrt(2), are a vector as in :class:`VoteSums`, and have its cost. The rounding of the numbers
    above the diagonal has variance t^2 / 2, so that the normaliser depends on x by a relative 2 exp(-pi^2 t^2) = 5e-39
    per number.
    """

    noun: ClassVar[str] = "noisy matrix of second moments"


@dataclass(frozen=True, kw_only=True)
class NeighbourVotes(_RecordsVote):
    """``count`` queries, each a noisy count of the labels of the nearest records in a fresh Poisson sample.

    A unit has one vote per query (Private-kNN; Zhu, Yu, Chandraker and Wang, CVPR 2020). A sampled unit that is near
    enough replaces the farthest voter, so that two counts change by one each. The largest count, which a threshold
    check may test first, changes by at most one. ``threshold_stddev_votes``: noise of the threshold check on the
    largest count; None if there is no check.
    """

    noun: ClassVar[str] = "noisy vote of nearest records"
    threshold_stddev_votes: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictionTables(CountedEvent):
    """``count`` noisy tables of predictions on test records that no other step of the run reads.

    A unit adds whole numbers >= 0 to the cells. They sum to at most ``weight``, and so have an L2 norm of at most
    ``weight``. Under "replace one" they are replaced by other such numbers, for example if a record changes its cell:
    the L2 distance is at most sqrt(2) times ``weight``. The noise on every cell is N_Z(0, s^2) with s = ``weight``
    times ``noise_stddev_records``; its cost is that of :class:`VoteSums`.
    """

    noun: ClassVar[str] = "noisy table of predictions"
    count: int
    noise_stddev_records: float
    weight: int
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    @property
    def noise_stddev_weights(self) -> float:
        """The standard deviation of the noise on each cell, in the units in which one record or person adds at most
        ``weight`` to the table."""
        return self.noise_stddev_records * self.weight

    @property
    def as_sums(self) -> VoteSums:
        """The event of noisy sums with the same cost."""
        # Rounded up to the whole number that the field takes: a larger norm only costs more.
        norm = self.weight if self.relation == "add or remove one" else math.ceil(math.sqrt(2) * self.weight)
        return VoteSums(count=self.count, noise_stddev_votes=self.noise_stddev_weights, norm=norm)


@lru_cache(maxsize=16)
def one_count_moves(noise_stddev_votes: float) -> AtomicLoss:
    """Return the privacy loss when one count rises by one: N_Z(1, s^2) against N_Z(0, s^2)."""
    noise, log_mass = discrete_gaussian.log_masses(noise_stddev_votes)
    # ln of the density ratio at output 1 + n: ((1 + n)^2 - n^2) / (2 s^2).
    return AtomicLoss(losses=(1 + 2 * noise) / (2 * noise_stddev_votes**2), log_masses=log_mass)


@lru_cache(maxsize=16)
def two_counts_move(noise_stddev_votes: float) -> AtomicLoss:
    """Return the privacy loss when one count rises by one and another falls by one, each with independent noise."""
    difference, log_mass = discrete_gaussian.log_difference_masses(noise_stddev_votes)
    # The losses of both counts added, (1 + 2 n) / (2 s^2) and (1 - 2 n') / (2 s^2), with d = n - n'.
    return AtomicLoss(losses=(difference + 1) / noise_stddev_votes**2, log_masses=log_mass)


# Keyed by identity: the arguments come out of the caches above, where equal noises are one object.
@lru_cache(maxsize=4)
def both(first: AtomicLoss, second: AtomicLoss) -> AtomicLoss:
    """Return the privacy loss of two independent releases of the same records together.

    Where there are too many pairs of losses, each loss is split between points of a grid, which never lowers the cost.
    """
    if len(first.losses) * len(second.losses) <= _MOST_ATOMS:
        losses = np.add.outer(first.losses, second.losses).ravel()
        order = np.argsort(losses)
        masses = np.add.outer(first.log_masses, second.log_masses).ravel()
        return AtomicLoss(losses=losses[order], log_masses=masses[order])
    # Every loss is split between two points of a grid: a pair that dominates, on a sample too.
    step = (max(first.losses[-1], second.losses[-1]) - min(first.losses[0], second.losses[0])) / _MOST_STEPS
    lowest, masses = 0, np.ones(1)
    for part in (first, second):
        start, end = math.floor(part.losses[0] / step), math.floor(part.losses[-1] / step) + 1
        own = np.zeros(end - start + 1)
        loss_distributions.add_split(own, part.losses, np.exp(part.log_masses), interval=step, lowest=start)
        # Sum by sum and not by a transform: the smallest masses keep their digits.
        lowest, masses = lowest + start, np.convolve(masses, own)
    kept = masses > 0
    losses = step * (lowest + np.arange(len(masses)))
    return AtomicLoss(losses=losses[kept], log_masses=np.log(masses[kept]))


@event_rdp.register
def _(event: VoteTables | VoteSums | NeighbourVotes, orders_A: FloatArray) -> FloatArray:
    precision = _precision(event)
    if not math.isfinite(precision):
        return np.full(len(orders_A), math.inf)
    # Continuous curves: those of discrete Gaussians never exceed them, for vectors too. So sums need no t here.
    multiplier, orders = 1 / math.sqrt(precision), tuple(orders_A.tolist())
    return event.count * accountant.poisson_gaussian_rdp(multiplier, event.sampling_rate, orders)


event_rdp.register(PredictionTables, lambda event, orders_A: event_rdp(event.as_sums, orders_A))
event_pld.register(PredictionTables, lambda event, interval: event_pld(event.as_sums, interval))


@event_pld.register
def _(event: VoteTables | NeighbourVotes, interval: float) -> LossDistribution | None:
    if not math.isfinite(_precision(event)):
        return None
    moves = one_count_moves if isinstance(event, VoteTables) else two_counts_move
    pair = moves(event.noise_stddev_votes)
    if isinstance(event, NeighbourVotes) and event.threshold_stddev_votes is not None:
        pair = both(pair, one_count_moves(event.threshold_stddev_votes))
    return repeated(on_poisson_sample(pair, sampling_rate=event.sampling_rate, interval=interval), event.count)


@event_pld.register
def _(event: VoteSums, interval: float) -> LossDistribution | None:
    # The rounding argument needs noise above t. Below, no bound is known, and none is claimed.
    if event.noise_stddev_votes <= _ROUNDING:
        return None
    multiplier = math.sqrt(event.noise_stddev_votes**2 - _ROUNDING**2) / event.norm
    rate = event.sampling_rate
    # Without sampling, n Gaussians are one with sqrt(n) times less noise: there is nothing to compose.
    if rate == 1:
        return gaussians(event.count, multiplier, interval=interval)
    return loss_distributions.poisson_gaussians(event.count, multiplier, sampling_rate=rate, interval=interval)


def _precision(event: VoteTables | VoteSums | NeighbourVotes) -> float:
    """Return the squared L2 sensitivity over the noise variance of one release: without a norm, the sum of 1 / variance
    over the vote counts that one record changes and, if ``event`` has one, the threshold check."""
    if isinstance(event, VoteSums):
        return (event.norm / event.noise_stddev_votes) ** 2 if event.noise_stddev_votes else math.inf
    stddevs = [event.noise_stddev_votes]
    if isinstance(event, NeighbourVotes):
        # The noise of the counts is listed twice, because two counts move.
        stddevs += [stddev for stddev in (event.noise_stddev_votes, event.threshold_stddev_votes) if stddev is not None]
    return math.fsum(1 / stddev**2 if stddev else math.inf for stddev in stddevs)


def as_in_paper_rdp(
    event: accountant.ConfidentGnmaxVotes,
    *,
    fairness_rejected_Q: npt.NDArray[np.bool_],
    orders_A: npt.ArrayLike = accountant.DEFAULT_ORDERS,
) -> FloatArray:
    """Return the cost that the published PATE and FairPATE code computes, shape (A,): NOT a valid privacy cost.

    It is for comparison only. Each query costs the threshold check plus P[answered] times the argmax: an expectation,
    not the cost of what happened. In that code a query whose label was withheld for fairness (``fairness_rejected_Q``)
    costs nothing, although both steps ran.
    """
    votes_QC, noise = np.asarray(event.votes_QC)[~fairness_rejected_Q], event.noise_stddev_votes
    check: dict[str, Any] = {"threshold": event.threshold, "threshold_stddev_votes": event.threshold_stddev_votes}
    check["tail"] = event.tail
    log_q_Q = gnmax.log_q(votes_QC, noise_stddev_votes=noise, tail=event.tail)
    argmax_QA = gnmax.gnmax_rdp(log_q_Q, noise_stddev_votes=noise, orders_A=orders_A)
    answered_Q = gnmax.answer_probability(votes_QC, **check)
    return gnmax.threshold_rdp(votes_QC, **check, orders_A=orders_A).sum(axis=0) + answered_Q @ argmax_QA


MOST_TRIALS = 1e4
"""The largest expected number of trials."""
_LEAST_GAMMA = 1e-12


@dataclass(frozen=True, kw_only=True)
class SecretTrials:
    """The event of publishing the best of a secret number K of trials.

    K follows a truncated negative binomial law with the mean ``expected_trials`` and the shape ``eta``. ``trials`` has
    one tuple for each of the settings that a trial may draw, with the events of a trial under these settings.
    ValueError for parameters out of range, for settings without events, and for events under another unit or relation.
    """

    noun: ClassVar[str] = "secret number of trials"
    data_dependent: ClassVar[bool] = False
    expected_trials: float
    trials: tuple[tuple[Event, ...], ...]
    eta: float = 0.0
    unit: Unit = "record"
    relation: Relation = "add or remove one"

    def __post_init__(self) -> None:
        if not 1 < self.expected_trials <= MOST_TRIALS or not -1 < self.eta < math.inf:
            given = self.expected_trials, self.eta
            raise ValueError(f"Expected 1 < expected_trials <= {MOST_TRIALS:g} and a finite eta > -1, got {given}.")
        guarantees = {(event.unit, event.relation) for events in self.trials for event in events}
        if not all(self.trials) or guarantees != {(self.unit, self.relation)}:
            expected = f"for {self.unit}, {self.relation}"
            raise ValueError(
                f"Expected events in every trial of SecretTrials, all {expected}, got {sorted(guarantees)}; give "
                "SecretTrials the unit and relation of its events."
            )

    @cached_property
    def gamma(self) -> float:
        """The parameter gamma at which K has the mean ``expected_trials``."""
        if mean_trials(_LEAST_GAMMA, self.eta) < self.expected_trials:
            raise ValueError(
                f"No parameter gamma gives a mean of {self.expected_trials} trials at eta {self.eta}; lower "
                "expected_trials or raise eta."
            )
        ends, mean = (math.log(_LEAST_GAMMA), math.log1p(-1e-9)), self.expected_trials
        found = scipy.optimize.brentq(
            lambda log_gamma: math.log(mean_trials(math.exp(log_gamma), self.eta) / mean), *ends, xtol=1e-12
        )
        return math.exp(found)

    def draw(self, source: NoiseSource) -> int:
        """Draw K, the secret number of trials, by inversion. 63 random bits and float sums change the distribution of K
        by less than 1e-12 in total variation."""
        left = (source.randbelow(2**63) + 0.5) / 2**63
        gamma, eta = self.gamma, self.eta
        chance, number = -(1 - gamma) / math.log(gamma), 1
        if eta:
            chance = eta * (1 - gamma) / math.expm1(-eta * math.log(gamma))
        # The second condition ends where rounding has left a remainder that no chance reaches.
        while left > chance and chance > 1e-300:
            left -= chance
            chance *= (1 - gamma) * (number + eta) / (number + 1)
            number += 1
        return number


def mean_trials(gamma: float, eta: float) -> float:
    """Return E[K], the expected number of trials, for the parameters ``gamma`` and ``eta`` of the distribution of K."""
    if not eta:
        return (1 / gamma - 1) / -math.log(gamma)
    return eta * (1 / gamma - 1) / -math.expm1(eta * math.log(gamma))


@event_rdp.register
def _(event: SecretTrials, orders_A: FloatArray) -> FloatArray:
    orders_B = np.array(accountant.DEFAULT_ORDERS)
    of_trial_B, of_trial_A = (
        np.maximum.reduce([accountant.rdp(events, orders) for events in event.trials])
        for orders in (orders_B, orders_A)
    )
    # Any order b will do, the same for all a: the least bound.
    extra = np.min((1 - 1 / orders_B) * of_trial_B - math.log(event.gamma) / orders_B)
    return of_trial_A + (1 + event.eta) * extra + math.log(event.expected_trials) / (orders_A - 1)


def flat(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return ``events``, in which each :class:`SecretTrials` is replaced by the events of its trials."""
    listed = (chain(*event.trials) if isinstance(event, SecretTrials) else (event,) for event in events)
    return tuple(chain.from_iterable(listed))


def event_json(event: Event) -> dict[str, Any]:
    """Return a privacy event as values of strict JSON, with its kind and noun.

    ValueError for an event that depends on private votes.
    """
    # Stored events reach statements and the odometer, which must never contain votes.
    if event.data_dependent:
        raise ValueError(
            f"{type(event).__name__} depends on private votes and must not be stored; store its data-independent event."
        )
    values = {"kind": type(event).__name__, "noun": event.noun, **asdict(event)}  # type: ignore[call-overload]
    if isinstance(event, SecretTrials):
        values["trials"] = [list(map(event_json, events)) for events in event.trials]
    return worded(values)


def event_from(values: Mapping[str, Any]) -> Event:
    """Return the privacy event that :func:`event_json` wrote. ValueError for an unknown kind."""
    kinds = accountant.event_kinds()
    if values.get("kind") not in kinds:
        raise ValueError(f"unknown event {values.get('kind')!r}; read it with the version of fairpate that wrote it.")
    # JSON has no infinite numbers: they are stored as text.
    given = {name: value for name, value in values.items() if name not in ("kind", "noun")}
    fields: dict[str, Any] = {name: float(each) if each in ("inf", "-inf") else each for name, each in given.items()}
    if "trials" in fields:
        fields["trials"] = tuple(tuple(map(event_from, events)) for events in fields["trials"])
    return kinds[values["kind"]](**fields)


def _counted(events: Sequence[Event]) -> Counter[Event]:
    counts: Counter[Event] = Counter()
    for event in events:
        # A count of 1 in the key: events that differ in their count alone are added up.
        key = replace(event, count=1) if hasattr(event, "count") else event  # type: ignore[type-var]
        counts[key] += getattr(event, "count", 1)
    return counts


def _listed(counts: Counter[Event]) -> tuple[Event, ...]:
    found: list[Event] = []
    for event, count in counts.items():
        found += [replace(event, count=count)] if hasattr(event, "count") else [event] * count  # type: ignore[type-var]
    return tuple(found)


def merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return ``events``, with events that differ only in their count merged into one, whose count is the sum."""
    return _listed(_counted(events))


def covering(events: Sequence[Event], others: Sequence[Event]) -> tuple[Event, ...]:
    """Return the union of two lists of privacy events, in which each event has the larger of its counts in the two
    lists."""
    # The union of two Counters takes the larger count of each key.
    return _listed(_counted(events) | _counted(others))


def beyond(events: Sequence[Event], others: Sequence[Event]) -> tuple[Event, ...]:
    """Return the part of the privacy events ``events`` that ``others`` do not contain: counts of equal events are
    subtracted."""
    # Without others the events are unchanged: a subtraction would drop events of count 0.
    return _listed(_counted(events) - _counted(others)) if others else tuple(events)


@dataclass(frozen=True, kw_only=True)
class PartOfUnit:
    """The event ``whole``, whose cost is for a record or a person, converted to a smaller unit of privacy: one record
    of a person who stays in the data, or the sensitive attribute of one record.

    If one record of a person goes and the person stays, the person's contribution to the release is replaced by another
    one: an average of clipped gradients changes by up to twice the clipping bound, a vote moves from one cell to
    another. Likewise, a record whose attribute changes is replaced. If the cost of ``whole`` is for "add or remove
    one", replacing is two steps: one removes the old contribution, one adds the new one. Their Renyi curves combine by
    the weak triangle inequality (Mironov 2017, arXiv:1702.07476, proposition 11, p = q = 2):

        D_a(P || Q) <= (a - 1/2) / (a - 1) D_2a(P || R) + D_(2a - 1)(R || Q).

    A Gaussian's curve, linear in a, becomes four times as high, as when its sensitivity doubles. Events of teachers
    need no conversion: all records of a person reach one teacher, who has one vote with or without any of them.
    """

    whole: Event
    unit: Unit = "record"
    relation: Relation = "add or remove one"
    noun: ClassVar[str] = "release by record or person"
    data_dependent: ClassVar[bool] = False


@event_rdp.register
def _(event: PartOfUnit, orders_A: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    whole = event.whole
    if isinstance(whole, accountant.TeacherEvent | SmoothRelease) or whole.relation == "replace one":
        return event_rdp(whole, orders_A)
    # Renyi curves alone: this triangle inequality has no counterpart here for loss distributions.
    out_A, in_A = (event_rdp(whole, orders) for orders in (2 * orders_A, 2 * orders_A - 1))
    return np.asarray((orders_A - 0.5) / (orders_A - 1) * out_A + in_A)


def part_of_unit(event: Any, unit: Unit) -> Any:
    """Return an event whose cost covers the smaller ``unit``: one record, from an ``event`` priced per person, or the
    sensitive attribute of one record, from an ``event`` priced per record or per person.

    If ``unit`` is a record and the relation is "replace one", only the unit changes: replacing a record of a person by
    another record of the same person is one way to replace the person. Replacing it by another person's record changes
    two persons and is not covered. TypeError if ``unit`` is a record and the cost of ``event`` cannot be stated per
    record (:func:`of_unit`).
    """
    if unit == "sensitive attribute":
        return PartOfUnit(whole=event, unit=unit, relation="replace one")
    # For its TypeError too: what is priced for persons alone has no price for a record.
    found = accountant.of_unit(event, "record")
    if isinstance(event, accountant.TeacherEvent | SmoothRelease) or event.relation != "add or remove one":
        return found
    return PartOfUnit(whole=event)
