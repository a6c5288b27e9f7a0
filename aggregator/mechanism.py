"""Mechanisms: how votes become released labels or counts, and which privacy events that is.

A mechanism is a frozen dataclass of public parameters with a registered name; a ledger stores name and parameters. It
draws outcomes from votes and returns two events: the worst case of its queries, which a ledger reserves and whose cost
may be published, and the realised event, which may depend on votes and stays with the operator. To add one, subclass
:class:`Mechanism` and :func:`register` the class.

* :class:`ConfidentGnmax`: GNMax releases the class with the most votes after noise (Papernot et al. 2018, arXiv
  1802.08908). Confident-GNMax first checks, with separate noise, that the largest vote count reaches a threshold (their
  Algorithm 1). Followed by the demographic-parity gate, it is CF-GNMax (FairPATE, arXiv 2302.09183, Algorithm 1). Votes
  are integers, so the noise is discrete Gaussian and sampled exactly.
* :class:`ConfidentCounts` releases all noisy counts with each label. The data-independent cost of GNMax already covers
  the counts, since one teacher changes two of them by one each. A data-dependent cost would hold for the argmax alone
  (Papernot et al. 2018, Theorem 6), so none is computed.
* :class:`NearestRecords` is for votes of the nearest records of a fresh secret sample (Private-kNN: Zhu, Yu, Chandraker
  and Wang, CVPR 2020); :class:`NearestCounts` releases all noisy counts. The cost holds for any votes.

Shapes: Q queries, C classes, A orders, K values of a count or nodes of a quadrature; ``votes_QC[i, k]`` counts the
voters that chose class k for query i.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.accountant import ConfidentGnmaxQueries, ConfidentGnmaxVotes, Event
from fairpate.privacy.discrete_gaussian import NoiseSource, discrete_gaussians
from fairpate.privacy.mechanism_events import NeighbourVotes, as_in_paper_rdp
from fairpate.types import FloatArray, IntArray, MechanismParameters, ReleaseKind

Verdict = Literal["answer", "confidence", "fairness", "free"]
NOT_CONFIDENT = -1
"""The label of a query whose votes did not pass the threshold check."""
_NODES_K, _WEIGHTS_K = np.polynomial.hermite_e.hermegauss(64)
# Weights for exp(-x^2 / 2), which integrates to sqrt(2 pi), become those of a standard normal.
_WEIGHTS_K = _WEIGHTS_K / _WEIGHTS_K.sum()
_COUNTS_AT_ONCE = 64  # queries whose label probabilities are computed together
# The shift in `label_chances` matters to rounding alone: 2^-40 of the searched interval is more than enough.
_HALVINGS = 40
_LOG_ROOT_TAU = 0.5 * math.log(2 * math.pi)
_OFTEN = 0.95


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one query: ``verdict`` is ``answer``, with a ``label``, or names the step that refused the query.

    The steps: ``free`` (refused before the vote, so it costs nothing), ``confidence`` (the threshold check of the
    largest vote count), ``fairness`` (the demographic-parity gate). ``label`` is None for every refusal: a noisy argmax
    that the gate rejected is charged but not stored. ``counts`` are noisy vote counts released with an answer; None if
    the mechanism releases labels only.
    """

    verdict: Verdict
    label: int | None = None
    counts: tuple[int, ...] | None = None

    @property
    def is_charged(self) -> bool:
        """True if the query used private votes, and so costs privacy."""
        return self.verdict != "free"


# A long ledger holds as many outcomes as reservations, and few different ones: equal values give the same object.
outcome = lru_cache(maxsize=1024)(Outcome)


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """A mechanism draws released labels from votes, and returns the privacy events of doing so.

    It is a frozen dataclass of public parameters, all plain numbers. ``name`` is stored in ledgers and must never be
    given to another mechanism. ``voters`` is the word for the voters in reports, such as teachers. ``releases`` says
    what is released with an answer. ``all_vote`` is False if not every voter votes on every query, as with the
    neighbours in a small sample. ``takes_offsets`` is True if :meth:`answer` has an argument ``offsets_C``.
    """

    name: ClassVar[str]
    voters: ClassVar[str] = "teachers"
    releases: ClassVar[ReleaseKind] = "label"
    all_vote: ClassVar[bool] = True
    takes_offsets: ClassVar[bool] = False

    @abstractmethod
    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """Draw an outcome for each query from its votes ``votes_QC`` (integers >= 0), and return them in order.

        Labels pass the demographic-parity ``gate``, which counts the answers. The noise of query i is derived from
        ``keys[i]``, so that results do not depend on how queries are grouped into blocks. The caller must charge the
        queries before this call, and store the outcomes before they are released.
        """

    @abstractmethod
    def worst_case(self, num_queries: int) -> Event:
        """Return the privacy event of answering ``num_queries`` queries, whose cost is that of the worst votes. A
        ledger charges this cost, which may be published."""

    def realised(self, votes_QC: IntArray) -> Event:
        """Return the privacy event of answering queries with these votes. Its cost may depend on the votes, so it is
        for the operator only; it is never above the worst case.

        The default is the worst case, for mechanisms whose cost does not depend on votes.
        """
        return self.worst_case(len(votes_QC))

    def realised_rdp(self, votes_QC: IntArray, orders_A: FloatArray) -> FloatArray:
        """Return the Renyi curve of each query, shape (Q, A), that follows from its votes (:meth:`realised`); for the
        operator only."""
        event = self.realised(votes_QC)
        if isinstance(event, accountant.ConfidentGnmaxVotes):
            return accountant.rdp_of_votes_data_dependent(event, orders_A)
        # One by one; where votes do not matter, all queries have the curve of one.
        rows = votes_QC[:, None] if event.data_dependent else votes_QC[:1, None]
        curves = [accountant.rdp_data_dependent([self.realised(row_1C)], orders_A) for row_1C in rows]
        return np.broadcast_to(np.reshape(curves, (len(rows), len(orders_A))), (len(votes_QC), len(orders_A)))

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Return this mechanism with all noise multiplied by ``factor``; a larger factor never costs more."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the mechanism's parameters in words, which begin with a capital letter and may be published."""

    @property
    def lead_needed(self) -> float | None:
        """By how many votes a class must lead to stand out from the noise (:func:`lead_needed`); None if this is
        unknown. A public number."""
        return None

    def columns(self) -> dict[str, str]:
        """Return the mechanism's parameters for a table of results: short column names, and values as text."""
        return {name: f"{value:g}" for name, value in asdict(self).items()}

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:  # noqa: ARG002 - of the subclass
        """Return the probability of every label for each query, given the query's released noisy counts, shape (Q, C);
        rows sum to one.

        ValueError if the mechanism releases no counts.
        """
        raise ValueError(
            f"{self.name} releases labels only, so label probabilities are unknown; choose a mechanism that "
            "releases counts."
        )

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:  # noqa: ARG002
        """Return the Renyi curve (A,) that the code published with the mechanism's paper charges, for comparison only.

        ``rejected_Q`` marks the queries whose label the demographic-parity gate refused. The default is the
        data-dependent cost (:meth:`realised`), for mechanisms whose published code is not known to differ.
        """
        return accountant.rdp_data_dependent([self.realised(votes_QC)])


KindT = TypeVar("KindT", bound=type[Mechanism])
_KINDS: dict[str, type[Mechanism]] = {}


def register(kind: KindT) -> KindT:
    """Register a mechanism class under its name and return the class; usable as a decorator.

    ValueError if another mechanism has this name.
    """
    # A ledger knows its mechanism by this name: another class under it would price the same entries otherwise.
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"{kind.name}: another mechanism has this name; give {kind.__qualname__} a different one.")
    return kind


def gated(labels: Sequence[int], groups: Sequence[int], gate: DemographicParityGate) -> list[Outcome]:
    """Pass labels through the demographic-parity gate (FairPATE, arXiv 2302.09183, Algorithm 1); return the queries'
    outcomes.

    A refusal is ``free`` if public counts alone show that the gate would reject every label for the group; the label
    drawn for such a query is ignored. A ``fairness`` refusal comes after the vote and so costs what an answer costs.
    """
    outcomes = []
    for group, label in zip(groups, labels, strict=True):
        if label != NOT_CONFIDENT and gate.admit(group, label):
            outcomes.append(outcome(verdict="answer", label=label))
        # Asked second: a label that the gate admits shows already that it does not reject them all.
        elif not gate.accepts_any(group):
            outcomes.append(outcome(verdict="free"))
        else:
            outcomes.append(outcome(verdict="confidence" if label == NOT_CONFIDENT else "fairness"))
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ConfidentVotes(MechanismParameters, Mechanism):
    """A mechanism that releases the noisy argmax of the votes after a noisy threshold check of the largest count.
    Subclasses decide who votes (teachers or neighbours), and whether the noisy counts are released too.

    ``offsets_C`` of :meth:`answer` are public whole numbers of votes for each class, by default none. They are added to
    the noisy counts, after the noise, so that they change no sensitivity and no cost. They decide which label is
    released; the counts that are released with it are those without offsets.
    """

    takes_offsets: ClassVar[bool] = True

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
        offsets_C: Sequence[int] | None = None,
    ) -> list[Outcome]:
        # Word 0 of a row is for the check, the others for one class each: a draw never shifts another, in any block.
        words = source.machine_words(keys, 1 + votes_QC.shape[1])
        noise_Q = discrete_gaussians(self.threshold_stddev_votes, words[:, 0], source)
        (confident,) = (votes_QC.max(axis=1) + noise_Q >= self.threshold).nonzero()
        # Nothing is drawn for a query that failed the check; it is charged for both steps all the same.
        noise_QC = discrete_gaussians(self.noise_stddev_votes, words[confident, 1:], source)
        noisy_QC = votes_QC[confident] + noise_QC
        score_QC = noisy_QC if offsets_C is None else noisy_QC + np.array(offsets_C, dtype=np.int64)
        label_Q = np.full(len(keys), NOT_CONFIDENT)
        label_Q[confident] = score_QC.argmax(axis=1)
        is_leader_QC = score_QC == score_QC.max(axis=1, keepdims=True)
        # Ties are broken uniformly.
        for row in (is_leader_QC.sum(axis=1) > 1).nonzero()[0].tolist():
            query = confident[row]
            # A stream of its own: the same winner in any order and any block.
            leaders = is_leader_QC[row].nonzero()[0].tolist()
            label_Q[query] = leaders[source.derive(keys[query], "tie").randbelow(len(leaders))]
        outcomes = gated(label_Q.tolist(), groups, gate)
        if self.releases == "counts":
            # After the gate: the counts behind a label that it refused are not released.
            for query, counts_C in zip(confident.tolist(), noisy_QC.tolist(), strict=True):
                if outcomes[query].label is not None:
                    outcomes[query] = replace(outcomes[query], counts=tuple(counts_C))
        return outcomes

    def worst_case(self, num_queries: int) -> Event:
        return ConfidentGnmaxQueries(count=num_queries, **asdict(self))

    def scaled(self, factor: float) -> Self:
        return replace(
            self,
            threshold_stddev_votes=factor * self.threshold_stddev_votes,
            noise_stddev_votes=factor * self.noise_stddev_votes,
        )

    def describe(self) -> str:
        check = (
            "No check of consensus"
            if self.threshold == -math.inf
            else f"Threshold {self.threshold:g} votes, threshold noise σ₁ = {self.threshold_stddev_votes:g} votes"
        )
        counts = ", noisy counts released with every label" if self.releases == "counts" else ""
        return f"{check}, label noise σ₂ = {self.noise_stddev_votes:g} votes{counts}"

    @property
    def lead_needed(self) -> float:
        return lead_needed(self.noise_stddev_votes)

    def columns(self) -> dict[str, str]:
        """Return the mechanism's parameters for a table of results, named by the symbols of Confident-GNMax: T, sigma1
        and sigma2. Without a threshold check, T is "none" and sigma1, the noise of the check, is "-"."""
        has_check = math.isfinite(self.threshold)
        return {
            "T": f"{self.threshold:.0f}" if has_check else "none",
            "sigma1": f"{self.threshold_stddev_votes:.1f}" if has_check else "-",
            "sigma2": f"{self.noise_stddev_votes:.1f}",
        }

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:
        if self.releases == "label":
            return super().chances(counts_QC, num_teachers=num_teachers)
        # For neighbours, as in samples in which all ``num_teachers`` neighbours were found.
        return label_chances(counts_QC, num_teachers=num_teachers, noise_stddev_votes=self.noise_stddev_votes)


@register
@dataclass(frozen=True, kw_only=True)
class ConfidentGnmax(ConfidentVotes):
    """Confident-GNMax: releases the noisy argmax of the votes on each query on which enough teachers agree.

    The data-dependent cost is the exact joint cost of the threshold check and the noisy argmax.
    """

    name: ClassVar[str] = "confident_gnmax"

    def realised(self, votes_QC: IntArray) -> ConfidentGnmaxVotes:
        return ConfidentGnmaxVotes(votes_QC=votes_QC, **asdict(self))

    def right_probability(self, votes_QC: IntArray, right_Q: IntArray) -> FloatArray:
        """Return P[the noisy argmax is the right class] for each query, shape (Q,); ``right_Q`` are the right
        classes."""
        return chance_to_win(votes_QC, right_Q, noise_stddev_votes=self.noise_stddev_votes)

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:
        """Return the Renyi curve of the code published with FairPATE, which charges nothing for a label that the
        demographic-parity gate refused."""
        return as_in_paper_rdp(self.realised(votes_QC), fairness_rejected_Q=rejected_Q)


@register
@dataclass(frozen=True, kw_only=True)
class ConfidentCounts(ConfidentVotes):
    """Confident-GNMax that releases all noisy counts with each answer. The demographic-parity gate reads only the
    label."""

    name: ClassVar[str] = "confident_counts"
    releases: ClassVar[ReleaseKind] = "counts"


@register
@dataclass(frozen=True, kw_only=True)
class NearestRecords(ConfidentVotes):
    """Private-kNN: for each query, a random sample of the private records is drawn at ``sampling_rate``, and the
    ``num_neighbours`` sampled records nearest to the query vote with their labels. The noisy argmax is released.

    With a threshold of ``-inf`` there is no threshold check, and its cost is not charged. ValueError for a sampling
    rate outside (0, 1] and for fewer than one neighbour.
    """

    name: ClassVar[str] = "nearest_records"
    voters: ClassVar[str] = "neighbours"
    all_vote: ClassVar[bool] = False
    sampling_rate: float
    num_neighbours: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.sampling_rate <= 1 or self.num_neighbours < 1:
            given = self.sampling_rate, self.num_neighbours
            raise ValueError(f"Expected 0 < sampling_rate <= 1 and num_neighbours >= 1, got {given}.")

    def worst_case(self, num_queries: int) -> NeighbourVotes:
        return NeighbourVotes(
            count=num_queries,
            noise_stddev_votes=self.noise_stddev_votes,
            sampling_rate=self.sampling_rate,
            # The check reads the same sample as the counts, so both are one event. A check that all pass costs nothing.
            threshold_stddev_votes=None if self.threshold == -math.inf else self.threshold_stddev_votes,
        )

    def describe(self) -> str:
        return (
            f"The {self.num_neighbours} nearest records of a fresh secret sample at rate {self.sampling_rate:g} vote. "
            f"{super().describe()}"
        )

    def columns(self) -> dict[str, str]:
        return {"gamma": f"{self.sampling_rate:g}", "k": f"{self.num_neighbours}", **super().columns()}


@register
@dataclass(frozen=True, kw_only=True)
class NearestCounts(NearestRecords):
    """:class:`NearestRecords` that releases all noisy counts with each answer, at the same cost."""

    name: ClassVar[str] = "nearest_counts"
    releases: ClassVar[ReleaseKind] = "counts"


def lead_needed(noise_stddev_votes: float) -> float:
    """Return the number of votes by which a class must lead so that, after noise of this standard deviation on each
    count, it still leads another class 19 times in 20."""
    # The difference of two independent noises has a standard deviation larger by sqrt(2).
    return NormalDist().inv_cdf(_OFTEN) * math.sqrt(2) * noise_stddev_votes


def chance_to_win(scores_QC: npt.ArrayLike, class_Q: IntArray, *, noise_stddev_votes: float) -> FloatArray:
    """Return P[class_Q[q] has the largest score after noise] for each row of scores, shape (Q,), for independent
    continuous Gaussian noise of this standard deviation on every score.

    With X the noise of that class, it is E[prod over other classes of Phi(lead / sigma + X)], where lead is its score
    less the other's, computed by Gauss-Hermite quadrature. Discrete noise with a standard deviation of several votes
    differs only by its rare ties.
    """
    scores_QC = np.asarray(scores_QC, dtype=np.float64)
    rows = np.arange(len(scores_QC))
    lead_QC = (scores_QC[rows, class_Q][:, None] - scores_QC) / noise_stddev_votes
    # In logarithms: a product over many classes of small probabilities would underflow.
    log_wins_QCK = scipy.special.log_ndtr(lead_QC[:, :, None] + _NODES_K)
    # The class is not compared with itself.
    log_wins_QCK[rows, class_Q] = 0.0
    return np.exp(log_wins_QCK.sum(axis=1)) @ _WEIGHTS_K


def label_chances(counts_QC: IntArray, *, num_teachers: int, noise_stddev_votes: float) -> FloatArray:
    """Return P[label = c | noisy counts m], shape (Q, C), by Bayes' rule; exact for discrete Gaussian noise.

    The model: the shares of the classes are uniform on the simplex, T votes n are drawn from them, m = n + N_Z(0,
    sigma^2), and the label is one more vote:

            P[n | m]  ~  prod_c exp(-(m_c - n_c)^2 / (2 sigma^2)),  n_c >= 0,  sum_c n_c = T
            P[label = c | m] = (E[n_c | m] + 1) / (T + C)

    because uniform shares make all tables of T votes equally likely, and the mean share given n is (n + 1) / (T + C)
    (Laplace's rule of succession). The sum over tables is a convolution over classes. The information that the
    threshold check passed is not used. ValueError unless there are at least two classes, one teacher and positive
    noise.
    """
    if counts_QC.ndim != 2 or counts_QC.shape[1] < 2:
        raise ValueError(f"Expected counts for at least two classes, got shape {counts_QC.shape}.")
    if num_teachers < 1 or not noise_stddev_votes > 0:
        given = num_teachers, noise_stddev_votes
        raise ValueError(f"Expected num_teachers >= 1 and noise_stddev_votes > 0, got {given}.")
    total, stddev, num_classes = num_teachers, noise_stddev_votes, counts_QC.shape[1]
    # In parts: weights take Q * C * (T + 1) numbers of eight bytes.
    if not 0 < len(counts_QC) <= _COUNTS_AT_ONCE:
        starts = range(0, len(counts_QC), _COUNTS_AT_ONCE)
        parts = [
            label_chances(counts_QC[start : start + _COUNTS_AT_ONCE], num_teachers=total, noise_stddev_votes=stddev)
            for start in starts
        ]
        return np.concatenate([np.zeros((0, num_classes)), *parts])
    # As votes sum to the total, adding a constant to all counts of a row changes only rounding errors, which are least
    # if the total is a likely sum of independent classes. With u a count over sigma, the expectation of a count that
    # is not negative is sigma (u + phi(u) / Phi(u)): below sigma / -u where u < 0, above u sigma always. The shift is
    # found by bisection between these two bounds.
    most_Q = counts_QC.max(axis=1).astype(np.float64)
    low_Q: FloatArray = -most_Q - num_classes * stddev**2 / total
    high_Q: FloatArray = total - most_Q
    for _ in range(_HALVINGS):
        middle_Q = (low_Q + high_Q) / 2
        u_QC = (counts_QC + middle_Q[:, None]) / stddev
        # The ratio phi / Phi from logarithms: far below 0 both underflow, and their quotient does not.
        expected_Q = stddev * (u_QC + np.exp(-0.5 * u_QC**2 - _LOG_ROOT_TAU - scipy.special.log_ndtr(u_QC))).sum(axis=1)
        too_low_Q = expected_Q < total
        low_Q, high_Q = np.where(too_low_Q, middle_Q, low_Q), np.where(too_low_Q, high_Q, middle_Q)
    votes_K = np.arange(total + 1)
    # Less its maximum, so that no row underflows to zeros: a factor per row cancels in the expectation.
    log_weight_QCK = -0.5 * ((votes_K - (counts_QC + high_Q[:, None])[:, :, None]) / stddev) ** 2
    weight_CQK = np.exp(log_weight_QCK - log_weight_QCK.max(axis=2, keepdims=True)).swapaxes(0, 1)

    def convolved(a_QK: FloatArray, b_QK: FloatArray) -> FloatArray:
        # A transform leaves small negative numbers where there is no weight. Only ratios matter, so rows are scaled.
        product_QK = np.maximum(scipy.signal.fftconvolve(a_QK, b_QK, axes=1)[:, : a_QK.shape[1]], 0.0)
        return product_QK / product_QK.max(axis=1, keepdims=True)

    # The weight of every sum of the votes of all classes but one, by products from both ends: 3 C convolutions instead
    # of C^2.
    ends: list[list[FloatArray]] = []
    for weights_CQK in (weight_CQK, weight_CQK[::-1]):
        none_QK = np.zeros(weight_CQK.shape[1:])
        none_QK[:, 0] = 1.0
        products = [none_QK]
        for weight_QK in weights_CQK[:-1]:
            products.append(convolved(products[-1], weight_QK))
        ends.append(products)
    before, after = ends[0], ends[1][::-1]
    # Reversed: where this class has n votes, the others have the rest of the total.
    joint_CQK = weight_CQK * np.stack([convolved(b, a)[:, ::-1] for b, a in zip(before, after, strict=True)])
    expected_CQ = (joint_CQK @ votes_K) / joint_CQK.sum(axis=2)
    # Rounding moved the sum a little; scaled, it is the total again.
    expected_QC = (total * expected_CQ / expected_CQ.sum(axis=0)).T
    return (expected_QC + 1) / (num_teachers + num_classes)


def mechanism_named(name: str, parameters: Mapping[str, Any]) -> Mechanism:
    """Return the registered mechanism ``name`` with ``parameters``. ValueError for an unknown name or wrong
    parameters."""
    if name not in _KINDS:
        raise ValueError(f"unknown mechanism {name!r}; give one of: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"mechanism {name}: its parameters are wrong ({error}); correct them") from error
