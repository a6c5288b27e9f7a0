"""What releases labels or counts: Confident&Fair-GNMax, votes of neighbours, noisy counts; and the registry of these.

What a mechanism is: how votes become outcomes, and which events that is.

A mechanism is its parameters, frozen, under a name: a ledger stores both, and so knows what it is a ledger of. It draws
outcomes from votes; it names the event that its queries are at their worst, which is what a ledger reserves and what
may be published, and the event that they were, which may depend on votes and stays with the operator. It states no
epsilon, for the accountant alone prices events, and it knows no budget, ledger or file.

A new mechanism is a subclass in a module of its own and a line in :mod:`aggregator.mechanism`.

Shapes: Q queries, C classes, A orders; ``votes_QC[i, k]`` counts the voters that chose class k for query i.

Confident-GNMax: noisy votes, exactly.

GNMax releases the class with the most votes after noise (Papernot et al. 2018, arXiv 1802.08908); Confident-GNMax
first checks, with noise of its own, that the most votes reach a threshold (their Algorithm 1); with the
demographic-parity gate behind it, it is CF-GNMax (FairPATE, arXiv 2302.09183, Algorithm 1). Votes are integers, so the
noise is discrete Gaussian and its sampling exact.

Queries are drawn many at a time; each has noise of its own, found by its key, so that blocks change nothing.

Shapes: Q queries, C classes, A orders, K nodes of a quadrature.

Noisy counts as answers: where the price holds whatever the votes, they cost what their argmax costs.

The argmax is a function of the noisy counts, and the data-independent price of GNMax is that of the counts: one teacher
moves two of them by one each. Released together they also say how sure the teachers were. A price that depends on
votes would be that of the argmax alone (Papernot et al. 2018, Theorem 6), so there is none here.

What counts m of T teachers and noise sigma say of the label, by Bayes: shares of the classes p are uniform on the
simplex, T votes n are drawn from them, m = n + N_Z(0, sigma^2), and the label is one more vote.

    P[n | m]  ~  prod_c exp(-(m_c - n_c)^2 / (2 sigma^2)),  n_c >= 0,  sum_c n_c = T
    P[label = c | m] = (E[n_c | m] + 1) / (T + C)

for uniform shares make all tables of T votes equally likely, and n + 1 votes over T + C is the mean of p given n
(Laplace's rule of succession). The sum over tables is a convolution over classes. That the check of consensus passed is
not used.

Shapes: Q queries, C classes, K = T + 1 values of a count.

Labels of the nearest records of a secret sample (Private-kNN: Zhu, Yu, Chandraker and Wang, CVPR 2020).

Per query every private record enters a sample of its own with ``sampling_rate``; the ``num_neighbours`` nearest of them
vote for their own labels, all where there are fewer. What is released of the counts is what
:mod:`aggregator.mechanism` releases of teachers' votes: the noisy argmax, after an optional check of the largest count.

A record moves two counts by one each, and that only where it was sampled. So the price holds for any votes and has no
data-dependent form; the check reads the same sample, and is one event with the counts.

Not known here: who is near, and how the sample is drawn (:mod:`teachers.neighbours`). Every reservation of a ledger
needs votes of a sample that no other one has.

The mechanisms there are, by the name that ledgers store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import NoiseSource, WordArray, discrete_gaussian, discrete_gaussians
from fairpate.privacy.events import ConfidentGnmaxQueries, ConfidentGnmaxVotes, Event
from fairpate.privacy.mechanism_events import NeighbourVotes, as_in_paper_rdp
from fairpate.types import IntArray, MechanismParameters, ReleaseKind

FloatArray = npt.NDArray[np.float64]
Verdict = Literal["answer", "confidence", "fairness", "free"]
NOT_CONFIDENT = -1
"""Stands where a mechanism gives no label."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a query: an ``answer`` with its label, or the step that refused it (``free``: before the vote).

    ``label`` is None for every refusal: the noisy argmax that the gate rejected is forgotten, not its cost. ``counts``
    are noisy counts that were released with an answer; None where the mechanism releases labels alone.
    """

    verdict: Verdict
    label: int | None = None
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "answer") != (self.label is not None):
            raise ValueError(f"Expected a label for an answer and for nothing else, got {self.verdict}, {self.label}.")
        if self.counts is not None and self.label is None:
            raise ValueError(f"Expected counts with an answer only, got {self.verdict}.")

    @property
    def is_charged(self) -> bool:
        """Whether private votes were touched."""
        return self.verdict != "free"


# A long ledger holds as many outcomes as reservations, and few different ones.
@lru_cache(maxsize=1024)
def outcome(verdict: Verdict, label: int | None = None) -> Outcome:
    """The :class:`Outcome` of these values: equal ones are one object."""
    return Outcome(verdict=verdict, label=label)


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """Draws outcomes and names events; a frozen dataclass whose fields are its public parameters, plain numbers.

    ``name`` is stored in ledgers, and never given to another mechanism. ``voters``: who votes, in a word for pages.
    ``releases`` says what goes with an answer.
    """

    name: ClassVar[str]
    voters: ClassVar[str] = "teachers"
    releases: ClassVar[ReleaseKind] = "label"

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as a ledger stores them."""
        return asdict(self)

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
        """One outcome per query, in order; answers are counted in ``gate``.

        ``votes_QC`` passes :meth:`is_complete`. ``keys[i]`` finds the noise of query i, so that blocks change nothing.
        Called once the queries are reserved; what it returns is stored before anybody sees it.
        """

    @abstractmethod
    def worst_case(self, num_queries: int) -> Event:
        """The event that so many queries are whatever the votes: what is reserved, and the price that is published."""

    def realised(self, votes_QC: IntArray) -> Event:
        """The event that these queries were, for the operator alone; never dearer than the worst case.

        The worst case itself where no price depends on votes.
        """
        return self.worst_case(len(votes_QC))

    def realised_rdp(self, votes_QC: IntArray, orders_A: FloatArray) -> FloatArray:
        """The Renyi curve of each of these queries, shape (Q, A), for the operator alone."""
        event = self.realised(votes_QC)
        if accountant.prices_each(event):
            return accountant.rdp_of_each_data_dependent(event, orders_A)
        # One by one; where votes do not matter, one stands for all.
        rows = votes_QC[:, None] if event.data_dependent else votes_QC[:1, None]
        curves = [accountant.rdp_data_dependent([self.realised(row_1C)], orders_A) for row_1C in rows]
        return np.broadcast_to(np.reshape(curves, (len(rows), len(orders_A))), (len(votes_QC), len(orders_A)))

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same with every noise multiplied by ``factor``, so that a larger factor never costs more."""

    @abstractmethod
    def describe(self) -> str:
        """The parameters in words, a part of a sentence that begins in upper case and may be published."""

    def columns(self) -> dict[str, str]:
        """The parameters for a table: short names, and values as text."""
        return {name: f"{value:g}" for name, value in self.parameters.items()}

    def is_complete(self, votes_QC: IntArray, *, num_teachers: int) -> bool:
        """Whether all voters voted that must. ValueError unless these are counts for at least two classes."""
        return check_votes(votes_QC, num_teachers=num_teachers)

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:  # noqa: ARG002 - of the subclass
        """What released counts say of every label, shape (Q, C): rows sum to one. ValueError where there are none."""
        raise ValueError(f"{self.name} releases labels alone.")

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:  # noqa: ARG002
        """The Renyi curve (A,) that the code published with the paper would charge, for comparison only.

        ``rejected_Q``: labels that the gate refused. The realised price where that code is not known to differ.
        """
        return accountant.rdp_data_dependent([self.realised(votes_QC)])


def gated(labels: Sequence[int], groups: Sequence[int], gate: DemographicParityGate) -> list[Outcome]:
    """What the demographic-parity gate makes of labels, in order (FairPATE, arXiv 2302.09183, Algorithm 1).

    A refusal is ``free`` when, from public counts alone, the gate would reject every label for the group; what was
    drawn for such a query is not looked at. A ``fairness`` refusal comes after the vote and therefore costs what an
    answer costs.
    """
    return [_gated(gate, group, label) for group, label in zip(groups, labels, strict=True)]


def _gated(gate: DemographicParityGate, group: int, label: int) -> Outcome:
    # A label that the gate admits says already that it does not reject them all.
    if label != NOT_CONFIDENT and gate.admit(group, label):
        return outcome("answer", label)
    if not gate.accepts_any(group):
        return outcome("free")
    return outcome("confidence" if label == NOT_CONFIDENT else "fairness")


def check_votes(votes_QC: IntArray, *, num_teachers: int) -> bool:
    """Whether every teacher voted on every query. ValueError unless these are counts for at least two classes."""
    # Signed whole numbers alone: noise is negative too, and others would wrap around or be rounded.
    if votes_QC.ndim != 2 or votes_QC.shape[1] < 2 or votes_QC.dtype.kind != "i":
        raise ValueError(f"Expected integer votes for at least two classes, got {votes_QC.dtype} of {votes_QC.shape}.")
    if votes_QC.size and votes_QC.min() < 0:
        raise ValueError("Expected votes >= 0.")
    totals: list[int] = votes_QC.sum(axis=1).tolist()
    return totals.count(num_teachers) == len(totals)


_NODES_K, _WEIGHTS_K = np.polynomial.hermite_e.hermegauss(64)
# Weights for exp(-x^2 / 2), which integrates to sqrt(2 pi), become those of a standard normal.
_WEIGHTS_K = _WEIGHTS_K / _WEIGHTS_K.sum()
_FEW = 8  # fewer queries are faster one by one


@dataclass(frozen=True, kw_only=True)
class ConfidentVotes(MechanismParameters, Mechanism):
    """Votes behind a check of consensus: the draw, its worst case and its words, whatever is released of it."""

    def noisy_counts(self, votes_QC: IntArray, words: WordArray, source: NoiseSource) -> tuple[IntArray, IntArray]:
        """The rows whose noisy threshold check passes, and the noisy counts of those, shape (rows, C).

        The noise of the check and of every count are independent. Word 0 of each row of ``words`` is the check's, the
        others one per class: no draw shifts another, alone or in a block.
        """
        noise_Q = discrete_gaussians(self.threshold_stddev_votes, words[:, 0], source)
        (confident,) = (votes_QC.max(axis=1) + noise_Q >= self.threshold).nonzero()
        # Nothing is drawn for a query that failed the check; its price is that of both steps all the same.
        noise_QC = discrete_gaussians(self.noise_stddev_votes, words[confident, 1:], source)
        return confident, votes_QC[confident] + noise_QC

    def worst_case(self, num_queries: int) -> ConfidentGnmaxQueries:
        """Both steps for every query."""
        return ConfidentGnmaxQueries(count=num_queries, **self.parameters)

    def scaled(self, factor: float) -> Self:
        """Both noises multiplied; the threshold stays."""
        return replace(
            self,
            threshold_stddev_votes=factor * self.threshold_stddev_votes,
            noise_stddev_votes=factor * self.noise_stddev_votes,
        )

    def describe(self) -> str:
        """The check of consensus, or that there is none, and the noise of labels."""
        check = (
            "No check of consensus"
            if self.threshold == -math.inf
            else f"Threshold {self.threshold:g} votes, threshold noise σ₁ = {self.threshold_stddev_votes:g} votes"
        )
        return f"{check}, label noise σ₂ = {self.noise_stddev_votes:g} votes"

    def columns(self) -> dict[str, str]:
        """The symbols of the paper's algorithm; a check that never refuses has no noise to speak of."""
        has_check = math.isfinite(self.threshold)
        return {
            "T": f"{self.threshold:.0f}" if has_check else "none",
            "sigma1": f"{self.threshold_stddev_votes:.1f}" if has_check else "-",
            "sigma2": f"{self.noise_stddev_votes:.1f}",
        }


@dataclass(frozen=True, kw_only=True)
class ConfidentGnmax(ConfidentVotes):
    """Labels that enough teachers agree on. Realised price: the exact joint cost of threshold bit and noisy argmax."""

    name: ClassVar[str] = "confident_gnmax"

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """CF-GNMax on Q queries in order."""
        return gated(self.labels(votes_QC, keys=keys, source=source), groups, gate)

    def labels(self, votes_QC: IntArray, *, keys: Sequence[str], source: NoiseSource) -> list[int]:
        """Labels of the queries whose noisy threshold check passes, else ``NOT_CONFIDENT``.

        Ties are broken uniformly.
        """
        words = source.words(keys, 1 + votes_QC.shape[1])
        if len(keys) < _FEW:
            return [
                self._label(votes_C, key, words_C, source)
                for votes_C, key, words_C in zip(votes_QC.tolist(), keys, words.tolist(), strict=True)
            ]
        confident, noisy_QC = self.noisy_counts(votes_QC, words, source)
        return labels_of(noisy_QC, confident, keys=keys, source=source)

    def _label(self, votes_C: Sequence[int], key: str, words: Sequence[int], source: NoiseSource) -> int:
        """The same for one query, from the same words to the same label."""
        if max(votes_C) + discrete_gaussian(self.threshold_stddev_votes, words[0], source) < self.threshold:
            return NOT_CONFIDENT
        stddev = self.noise_stddev_votes
        noisy_C = [
            votes + discrete_gaussian(stddev, word, source) for votes, word in zip(votes_C, words[1:], strict=True)
        ]
        most = max(noisy_C)
        if noisy_C.count(most) == 1:
            return noisy_C.index(most)
        return _among([label for label, votes in enumerate(noisy_C) if votes == most], key, source)

    def realised(self, votes_QC: IntArray) -> ConfidentGnmaxVotes:
        """The queries with their votes."""
        return ConfidentGnmaxVotes(votes_QC=votes_QC, **self.parameters)

    def right_probability(self, votes_QC: IntArray, right_Q: IntArray) -> FloatArray:
        """P[the noisy argmax is class ``right_Q``] per query, shape (Q,), for continuous Gaussian noise.

        With X the noise of the right class, E[prod over other classes of Phi(lead / sigma + X)], by Gauss-Hermite
        quadrature; discrete noise of several votes differs by its rare ties.
        """
        rows = np.arange(len(votes_QC))
        lead_QC = (votes_QC[rows, right_Q][:, None] - votes_QC) / self.noise_stddev_votes
        log_wins_QCK = scipy.special.log_ndtr(lead_QC[:, :, None] + _NODES_K)
        # The right class is not compared with itself.
        log_wins_QCK[rows, right_Q] = 0.0
        won_Q: FloatArray = np.exp(log_wins_QCK.sum(axis=1)) @ _WEIGHTS_K
        return won_Q

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:
        """The published code charges nothing where the gate refused a label."""
        return as_in_paper_rdp(self.realised(votes_QC), fairness_rejected_Q=rejected_Q)


def labels_of(noisy_QC: IntArray, confident: IntArray, *, keys: Sequence[str], source: NoiseSource) -> list[int]:
    """The largest of the noisy counts of each query in ``confident``, ties broken uniformly; else ``NOT_CONFIDENT``."""
    labels_Q = np.full(len(keys), NOT_CONFIDENT, dtype=np.int64)
    labels_Q[confident] = _argmax(noisy_QC, [keys[i] for i in confident.tolist()], source)
    labels: list[int] = labels_Q.tolist()
    return labels


def _argmax(noisy_QC: IntArray, keys: Sequence[str], source: NoiseSource) -> IntArray:
    """The largest entry of each row, uniformly among equals."""
    labels_Q: IntArray = noisy_QC.argmax(axis=1)
    is_leader_QC = noisy_QC == noisy_QC.max(axis=1, keepdims=True)
    # Ties are rare; without one no row is looked at.
    if np.count_nonzero(is_leader_QC) > len(noisy_QC):
        for row in (is_leader_QC.sum(axis=1) > 1).nonzero()[0].tolist():
            labels_Q[row] = _among(is_leader_QC[row].nonzero()[0].tolist(), keys[row], source)
    return labels_Q


def _among(leaders: Sequence[int], key: str, source: NoiseSource) -> int:
    # A stream of its own: the same winner in any order and any block.
    return leaders[source.derive(key, "tie").randbelow(len(leaders))]


_AT_ONCE = 64
# The shift matters to rounding alone: 2^-40 of where it is looked for is more than enough.
_HALVINGS = 40
_LOG_ROOT_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class ConfidentCounts(ConfidentVotes):
    """Confident-GNMax whose answers come with all noisy counts. The gate looks at the label alone."""

    name: ClassVar[str] = "confident_counts"
    releases: ClassVar[ReleaseKind] = "counts"

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """The outcomes of Confident-GNMax from the same source, answers with the counts that they come from."""
        words = source.words(keys, 1 + votes_QC.shape[1])
        confident, noisy_QC = self.noisy_counts(votes_QC, words, source)
        outcomes = gated(labels_of(noisy_QC, confident, keys=keys, source=source), groups, gate)
        # After the gate: the counts behind a label that it refused are not released.
        for query, counts_C in zip(confident.tolist(), noisy_QC.tolist(), strict=True):
            if outcomes[query].label is not None:
                outcomes[query] = replace(outcomes[query], counts=tuple(counts_C))
        return outcomes

    def describe(self) -> str:
        """As Confident-GNMax, and what is released."""
        return f"{super().describe()}, noisy counts released with every label"

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:
        """As :func:`label_chances`."""
        return label_chances(counts_QC, num_teachers=num_teachers, noise_stddev_votes=self.noise_stddev_votes)


def label_chances(counts_QC: IntArray, *, num_teachers: int, noise_stddev_votes: float) -> FloatArray:
    """P[label = c | noisy counts], shape (Q, C), as the module says; exact for discrete Gaussian noise.

    ValueError unless there are two classes or more, a teacher and noise.
    """
    if counts_QC.ndim != 2 or counts_QC.shape[1] < 2:
        raise ValueError(f"Expected counts for at least two classes, got shape {counts_QC.shape}.")
    if num_teachers < 1 or not noise_stddev_votes > 0:
        raise ValueError(
            f"Expected num_teachers >= 1 and noise_stddev_votes > 0, got {num_teachers}, {noise_stddev_votes}."
        )
    num_classes = counts_QC.shape[1]
    parts = [np.zeros((0, num_classes))]
    for start in range(0, len(counts_QC), _AT_ONCE):
        parts.append(_expected_votes(counts_QC[start : start + _AT_ONCE], num_teachers, noise_stddev_votes))
    chances_QC: FloatArray = (np.concatenate(parts) + 1) / (num_teachers + num_classes)
    return chances_QC


def _expected_votes(counts_QC: IntArray, total: int, stddev: float) -> FloatArray:
    """E[n | m], shape (Q, C)."""
    votes_K = np.arange(total + 1)
    # As votes sum to the total, moving all counts together changes nothing but rounding, which is least where the
    # total is a likely sum of independent classes.
    centred_QC = counts_QC + _shift_to(counts_QC, total, stddev)[:, None]
    # Less its maximum, so that no row underflows to zeros: a factor per row cancels in the expectation.
    log_weight_QCK = -0.5 * ((votes_K - centred_QC[:, :, None]) / stddev) ** 2
    weight_CQK = np.exp(log_weight_QCK - log_weight_QCK.max(axis=2, keepdims=True)).swapaxes(0, 1)
    # Of all classes but one, by products from both ends: 3 C convolutions in the place of C^2.
    before, after = list(_products(weight_CQK)), list(_products(weight_CQK[::-1]))[::-1]
    # Reversed: where this class has n votes, the others have the rest of the total.
    joint_CQK = weight_CQK * np.stack([_convolved(b, a)[:, ::-1] for b, a in zip(before, after, strict=True)])
    expected_CQ = (joint_CQK @ votes_K) / joint_CQK.sum(axis=2)
    # Rounding alone moves their sum.
    expected_QC: FloatArray = (total * expected_CQ / expected_CQ.sum(axis=0)).T
    return expected_QC


def _shift_to(counts_QC: IntArray, total: int, stddev: float) -> FloatArray:
    """What to add to all counts of a row, (Q,), for their expectations, were each class alone, to sum to ``total``.

    With u a count over sigma, that of a count that is not negative is sigma (u + phi(u) / Phi(u)); it is below
    sigma / -u where u < 0, and above u sigma always: between these two the shift is halved.
    """
    most_Q, num_classes = counts_QC.max(axis=1).astype(np.float64), counts_QC.shape[1]
    low_Q: FloatArray = -most_Q - num_classes * stddev**2 / total
    high_Q: FloatArray = total - most_Q
    for _ in range(_HALVINGS):
        middle_Q = (low_Q + high_Q) / 2
        u_QC = (counts_QC + middle_Q[:, None]) / stddev
        # The ratio phi / Phi from logarithms: far below 0 both underflow, and their quotient does not.
        expected_Q = stddev * (u_QC + np.exp(-0.5 * u_QC**2 - _LOG_ROOT_TAU - scipy.special.log_ndtr(u_QC))).sum(axis=1)
        too_low_Q = expected_Q < total
        low_Q, high_Q = np.where(too_low_Q, middle_Q, low_Q), np.where(too_low_Q, high_Q, middle_Q)
    return high_Q


def _products(weight_CQK: FloatArray) -> Iterator[FloatArray]:
    """Before each class, the weight of every sum of the votes of the classes before it, up to a factor per query."""
    product_QK = np.zeros(weight_CQK.shape[1:])
    product_QK[:, 0] = 1.0
    for weight_QK in weight_CQK:
        yield product_QK
        product_QK = _convolved(product_QK, weight_QK)


def _convolved(a_QK: FloatArray, b_QK: FloatArray) -> FloatArray:
    # A transform leaves small negative numbers where there is no weight; and only ratios matter, so rows are scaled.
    product_QK = np.maximum(scipy.signal.fftconvolve(a_QK, b_QK, axes=1)[:, : a_QK.shape[1]], 0.0)
    scaled_QK: FloatArray = product_QK / product_QK.max(axis=1, keepdims=True)
    return scaled_QK


@dataclass(frozen=True, kw_only=True)
class NearestRecords(Mechanism):
    """The noisy argmax of the labels of at most ``num_neighbours`` sampled records.

    ``threshold`` and the two noises as in :class:`fairpate.types.MechanismParameters`: ``-inf`` is no check, which
    costs nothing. ValueError for a sampling rate outside (0, 1] or for no neighbours.
    """

    name: ClassVar[str] = "nearest_records"
    voters: ClassVar[str] = "neighbours"
    sampling_rate: float
    num_neighbours: int
    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1 or self.num_neighbours < 1:
            raise ValueError(
                "Expected 0 < sampling_rate <= 1 and num_neighbours >= 1, got "
                f"{self.sampling_rate} and {self.num_neighbours}."
            )
        # For its checks of range.
        MechanismParameters(**self._noises)

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """Q queries in order, the gate behind them."""
        return self._labelling.answer(votes_QC, groups=groups, keys=keys, gate=gate, source=source)

    def worst_case(self, num_queries: int) -> NeighbourVotes:
        """Check and counts of so many samples, whatever became of their labels."""
        return NeighbourVotes(
            count=num_queries,
            noise_stddev_votes=self.noise_stddev_votes,
            sampling_rate=self.sampling_rate,
            # A check that every count passes reads none.
            threshold_stddev_votes=None if self.threshold == -math.inf else self.threshold_stddev_votes,
        )

    def scaled(self, factor: float) -> Self:
        """Both noises multiplied; sample, neighbours and threshold stay."""
        return replace(
            self,
            threshold_stddev_votes=factor * self.threshold_stddev_votes,
            noise_stddev_votes=factor * self.noise_stddev_votes,
        )

    def describe(self) -> str:
        """The sample, then check and noise as of teachers' votes."""
        return (
            f"The {self.num_neighbours} nearest records of a fresh secret sample at rate {self.sampling_rate:g} vote. "
            f"{self._labelling.describe()}"
        )

    def columns(self) -> dict[str, str]:
        """Sampling rate and neighbours beside the symbols of teachers' votes."""
        return {"gamma": f"{self.sampling_rate:g}", "k": f"{self.num_neighbours}", **self._labelling.columns()}

    def is_complete(self, votes_QC: IntArray, *, num_teachers: int) -> bool:
        """At most ``num_neighbours`` votes: a sample may be smaller."""
        check_votes(votes_QC, num_teachers=num_teachers)
        return bool((votes_QC.sum(axis=1) <= num_teachers).all())

    @property
    def _noises(self) -> dict[str, float]:
        return {
            "threshold": self.threshold,
            "threshold_stddev_votes": self.threshold_stddev_votes,
            "noise_stddev_votes": self.noise_stddev_votes,
        }

    @property
    def _labelling(self) -> ConfidentGnmax | ConfidentCounts:
        """The same noises and the same argmax; who votes makes the difference, and the price."""
        return ConfidentGnmax(**self._noises)


@dataclass(frozen=True, kw_only=True)
class NearestCounts(NearestRecords):
    """The same with all noisy counts, whose price it is that neighbours have."""

    name: ClassVar[str] = "nearest_counts"
    releases: ClassVar[ReleaseKind] = "counts"

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:
        """As :func:`aggregator.mechanism.label_chances`, of samples in which all neighbours were found."""
        return self._labelling.chances(counts_QC, num_teachers=num_teachers)

    @property
    def _labelling(self) -> ConfidentCounts:
        return ConfidentCounts(**self._noises)


KindT = TypeVar("KindT", bound=type[Mechanism])
_KINDS: dict[str, type[Mechanism]] = {}


def register(kind: KindT) -> KindT:
    """Make a mechanism known by its name; also as a decorator. ValueError for a name that another one has."""
    # A ledger knows its mechanism by this name: another class under it would price the same entries otherwise.
    if _KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"{kind.name}: names another mechanism already; give {kind.__qualname__} a name of its own.")
    return kind


def mechanism_named(name: str, parameters: Mapping[str, Any]) -> Mechanism:
    """The mechanism of this name with these parameters. ValueError for an unknown name or parameters it has not."""
    if name not in _KINDS:
        raise ValueError(f"unknown mechanism {name!r}, known: {', '.join(sorted(_KINDS))}")
    try:
        return _KINDS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"mechanism {name}: {error}") from error


def mechanism_of(parameters: MechanismParameters, release: ReleaseKind = "label") -> Mechanism:
    """The mechanism that a configuration's parameters are of, and that releases what it asks for."""
    kinds = [kind for kind in _KINDS.values() if issubclass(kind, type(parameters))]
    (kind,) = (kind for kind in kinds if kind.releases == release)
    return kind(**vars(parameters))


register(ConfidentGnmax)
register(ConfidentCounts)
register(NearestRecords)
register(NearestCounts)
