"""A linear rule from noisy vote counts or labels, and its thresholds from a noisy table of private labels.

Thousands of small teachers vote on the whole public pool, and all noisy counts are released. One count says little,
since its noise may be as large as the lead of a class; but the noise is independent from query to query, and averages
out in a fit to all of them.

    counts       m[q, c] = n[q, c] + noise of known variance s^2, for every query q and class c
    regression   the shares m / T on the features of the public records, in their principal components. The prior
                 variance of a coefficient is tau r^p, with r the component's share of the public variance; tau, p and
                 the variance that is not noise maximise the evidence (MacKay 1992) over a grid, in closed form
    table        how many private records with label c have scores in bin b, + noise on every cell, also on empty ones
    thresholds   an intercept for each class and one scale, by logistic regression on the table

If only the label with the largest noisy count is released, the regression is of one-hot labels. Its mean at a record is
the probability of each label under the noise, which grows with the lead of the class. The variance of a label is not
known, so the evidence chooses it. A label shows little of a lead that no noise would reverse.

The shares show the direction in which the classes differ. They do not show how common a class is, since small teachers
weigh the classes of their shards equally: the thresholds add that. Scores are whole numbers, computed from a record and
released numbers alone, and bins come from the public pool. So a record is in the same cell with or without another, and
one record changes one cell by one. The records of a person share one unit, divided equally and rounded down.

**A service** after the run adds offsets to the noisy counts of a new query, since the thresholds that the table adds to
the rule are missing in single counts. The offsets are those of a logistic regression of labels on noisy shares, where
labels and shares of public records are those that the rule predicts: the noisier a count, the more does the most common
class get. They depend on released numbers and public records alone, and are fixed before the first query. Where the
rule predicts shares whose lead the noise would overturn less than once in 20 queries, the label is known without a
query: a service gives the rule's own label, for free.

Shapes: M public records, Q of them with counts, N private records, W numbers of a vote phi, D = W - 1 coordinates,
C classes, K bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import scipy
from pydantic import Field
from scipy.special import log_softmax, softmax

from aggregator.mechanism import chance_to_win
from fairpate.config import Count, EmbeddingConfig, Section
from fairpate.data import Dataset
from fairpate.files import arrays_digest
from fairpate.methods.record_votes import ONE_RECORD, UNITS, PoolLabels, WeightedBallot, labels_of_chances, leads
from fairpate.methods.residual_votes import Whole, whole_rule
from fairpate.privacy.mechanism_events import VoteSums, VoteTables
from fairpate.types import FloatArray, IntArray, Unit

if TYPE_CHECKING:
    from torch import Tensor

_POWERS = (0.0, 0.5, 1.0, 1.5)
_SCALES = np.geomspace(1e-8, 10.0, 46)
_MISFITS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # variance that is not noise, in units of that of the noise
_SURE = 0.95  # that a query would name the same label
_NOISY_RECORDS = 40_000  # public records with noisy shares, from which offsets are computed
_UNEXPLAINED = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01)  # shares of the variance of released labels
_LEAST_SHARE = 1e-3  # of the votes, as a line may leave the range of shares
_PERSON = 2**16
"""The unit of mass of a person, which all records of the person share in whole numbers."""


class ThresholdsConfig(Section):
    """The settings of the thresholds between classes, from a second release: a noisy table of private labels by
    score."""

    share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the target that the table gets, in squared sensitivity over variance of its noise.",
    )
    num_bins: Count = Field(24, ge=2, description="Number of bins of scores, over all classes.")


def fitted_rule(
    phi_QW: Whole, counts_QC: npt.NDArray[np.integer], *, num_voters: int, noise_stddev_votes: float | None
) -> FloatArray:
    """Return the linear rule (C, W) that predicts each class's share of the votes from the features of a record.

    ``phi_QW`` are the whole-number features of the queries, the first of which is constant. ``counts_QC`` are the noisy
    counts of ``num_voters`` voters, with noise of standard deviation ``noise_stddev_votes`` on each; None: it is not
    known, as that of one-hot labels. Without noise and prior it is least squares.
    """
    x_QD, shares_QC = phi_QW[:, 1:] / UNITS, counts_QC / num_voters
    mean_D, mean_C = x_QD.mean(axis=0), shares_QC.mean(axis=0)
    # In principal components of the queries, whose variances are known to be public.
    variances_D, axes_DD = np.linalg.eigh(np.cov(x_QD.T, bias=True).reshape(len(mean_D), -1))
    kept = variances_D > 1e-12 * max(variances_D[-1], 1e-300)
    variances_D, axes_DD = variances_D[kept], axes_DD[:, kept]
    num_queries, num_classes = shares_QC.shape
    # U^T y for the orthonormal left singular vectors U of the centred features, and what lies outside of their span.
    scores_QD = (x_QD - mean_D) @ axes_DD / np.sqrt(num_queries * variances_D)
    inside_DC = scores_QD.T @ (shares_QC - mean_C)
    outside = float(((shares_QC - mean_C) ** 2).sum() - (inside_DC**2).sum())
    if noise_stddev_votes is None:
        # Equal labels have no variance, and no direction either.
        rests = [max(float(shares_QC.var(axis=0).mean()), 1e-12) * share for share in _UNEXPLAINED]
    else:
        rests = [(noise_stddev_votes / num_voters) ** 2 * (1 + misfit) for misfit in _MISFITS]
    freedom = max(0, num_queries - 1 - len(variances_D)) * num_classes
    squares_D = (inside_DC**2).sum(axis=1)
    best, shrunk_D = -math.inf, np.ones_like(variances_D)
    # Equal records, or a single one, leave nothing to choose.
    for power in _POWERS if len(variances_D) else ():
        prior_D = (variances_D / variances_D.sum()) ** power
        prior_D /= prior_D.mean()
        # Standardised components: a coefficient of one moves the share by one for a standard deviation.
        signal_SD = _SCALES[:, None] * prior_D * num_queries
        for rest in rests:
            total_SD = signal_SD + rest
            evidence_S = -0.5 * (
                (squares_D / total_SD).sum(axis=1)
                + num_classes * np.log(total_SD).sum(axis=1)
                + outside / rest
                + freedom * math.log(rest)
            )
            scale = int(evidence_S.argmax())
            if evidence_S[scale] > best:
                best, shrunk_D = evidence_S[scale], signal_SD[scale] / total_SD[scale]
    weights_DC = axes_DD @ (inside_DC * shrunk_D[:, None] / np.sqrt(num_queries * variances_D)[:, None])
    constant = phi_QW[0, 0] / UNITS
    return np.hstack([((mean_C - mean_D @ weights_DC) / constant)[:, None], weights_DC.T])


@dataclass(frozen=True, kw_only=True)
class Bins:
    """The bins of scores, from released numbers and the public pool: a record is in the bin of the class with its
    largest score, less the pool's mean score of that class, and of the lead of that score over the next one.

    ``rule_CW`` is a linear rule in whole numbers; ``mean_C`` are the pool's mean scores; ``edges_CE`` are the edges
    between the leads of each class; ``centre_KC`` are the pool's mean scores in each bin, in units of ``unit``, their
    standard deviation over the pool; NaN for a bin without public records. The number of bins is fixed: K = C (E + 1).
    """

    rule_CW: IntArray
    mean_C: IntArray
    edges_CE: IntArray
    centre_KC: FloatArray
    unit: float

    @classmethod
    def of(cls, rule_CW: FloatArray, pool_MW: Whole, *, num_bins: int) -> Bins:
        """Return about ``num_bins`` bins; those of one class hold about equally many records of the public pool."""
        # As large as whole rules may be: only the scores' ratios matter, and small ones would be rounded away.
        whole_CW = whole_rule(rule_CW * 2.0**40)
        scores_MC = exact_scores(pool_MW, whole_CW)
        mean_C = scores_MC.sum(axis=0) // len(scores_MC)
        centred_MC = scores_MC - mean_C
        first_M, lead_M = leads(centred_MC)
        num_classes = len(mean_C)
        each = max(2, round(num_bins / num_classes))
        # A class that leads for no public record has all of its records in its first bin.
        edges_CE = np.full((num_classes, each - 1), np.iinfo(np.int64).max)
        for c in np.unique(first_M):
            edges_CE[c] = np.quantile(lead_M[first_M == c], np.arange(1, each) / each, method="lower")
        unit, number_M = float(centred_MC.std()) or 1.0, _numbers(first_M, lead_M, edges_CE)
        sums_KC = [np.bincount(number_M, scores, num_classes * each) for scores in centred_MC.T / unit]
        with np.errstate(invalid="ignore"):
            centre_KC = np.stack(sums_KC, axis=1) / np.bincount(number_M, minlength=num_classes * each)[:, None]
        return cls(rule_CW=whole_CW, mean_C=mean_C, edges_CE=edges_CE, centre_KC=centre_KC, unit=unit)

    def numbers(self, phi_NW: Whole) -> IntArray:
        """Return the number of each record's bin (N,), given its features; it depends on that record alone."""
        return _numbers(*leads(exact_scores(phi_NW, self.rule_CW) - self.mean_C), self.edges_CE)

    def table(self, phi_NW: Whole, labels_N: IntArray, person_N: IntArray | None = None) -> IntArray:
        """Return the exact table (K, C) of private records by bin and label, before noise; with ``person_N``, in units
        of :data:`_PERSON` for each person."""
        table_KC = np.zeros(self.centre_KC.shape, dtype=np.int64)
        mass: IntArray | int = 1
        if person_N is not None:
            _, row_N, counts = np.unique(person_N, return_inverse=True, return_counts=True)
            # Rounded down: the mass of a person is at most one unit, and so is its norm.
            mass = _PERSON // counts[row_N]
        np.add.at(table_KC, (self.numbers(phi_NW), labels_N), mass)
        return table_KC

    def calibrated(self, table_KC: IntArray, event: VoteTables | VoteSums) -> FloatArray:
        """Return the linear rule (C, W) whose softmax gives the probabilities of the classes, from the released
        ``table_KC``, whose noise ``event`` states."""
        known, unit = ~np.isnan(self.centre_KC).any(axis=1), getattr(event, "norm", 1)
        centre_KC, counts_KC = self.centre_KC[known], table_KC[known] / unit
        totals_K, num_classes = counts_KC.sum(axis=1), counts_KC.shape[1]
        # The pull of pure noise on an intercept is about its sum over the bins: the prior bounds it there.
        prior = event.noise_stddev_votes / unit * math.sqrt(len(counts_KC)) / 2

        def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
            scale, intercept_C = math.exp(parameters[0]), parameters[1:]
            log_p_KC = log_softmax(scale * centre_KC + intercept_C, axis=1)
            slope_KC = totals_K[:, None] * np.exp(log_p_KC) - counts_KC
            gradient = np.array([(slope_KC * centre_KC).sum() * scale, *slope_KC.sum(axis=0)])
            value = -(counts_KC * log_p_KC).sum() + prior / 2 * (parameters**2).sum()
            return float(value), gradient + prior * parameters

        bounds = [(-5.0, 5.0), *[(-20.0, 20.0)] * num_classes]
        found = scipy.optimize.minimize(loss, np.zeros(1 + num_classes), jac=True, method="L-BFGS-B", bounds=bounds).x
        return self._rule(math.exp(found[0]), found[1:])

    def uncalibrated(self) -> FloatArray:
        """Return the rule (C, W) of scores from which nothing is subtracted: every class as common as its votes."""
        return self._rule(1.0, self.mean_C / self.unit)

    def _rule(self, scale: float, intercept_C: FloatArray) -> FloatArray:
        # Features and rule are whole numbers here; the rule that is published reads features of norm one.
        rule_CW = self.rule_CW.astype(np.float64) * (scale / self.unit * UNITS)
        rule_CW[:, 0] += (intercept_C - scale * self.mean_C / self.unit) * UNITS / ONE_RECORD
        return rule_CW


def exact_scores(phi_NW: Whole, rule_CW: IntArray) -> IntArray:
    """Return the scores (N, C) of a rule in whole numbers: sums below 2^53, exact in any order."""
    return (phi_NW.astype(np.float64) @ rule_CW.T.astype(np.float64)).astype(np.int64)


def _numbers(first_N: IntArray, lead_N: IntArray, edges_CE: IntArray) -> IntArray:
    """Return the numbers of the bins (N,) of records whose largest score is that of class ``first_N``."""
    within_N = (lead_N[:, None] >= edges_CE[first_N]).sum(axis=1)
    return first_N * (edges_CE.shape[1] + 1) + within_N


def table_event(unit: Unit, *, noise_multiplier: float) -> VoteTables | VoteSums:
    """Return the privacy event of the noisy table: a record adds one to one cell; a person adds one unit in all, of L2
    norm one unit at most. ``noise_multiplier``: standard deviation of the noise over that norm."""
    if unit == "person":
        return VoteSums(count=1, noise_stddev_votes=noise_multiplier * _PERSON, norm=_PERSON, unit=unit)
    return VoteTables(count=1, noise_stddev_votes=noise_multiplier, unit=unit)


@dataclass(frozen=True, kw_only=True)
class NoisyCounts:
    """Released noisy counts: ``counts_QC`` of ``num_voters`` voters on the public records ``record_ids``, with noise of
    standard deviation ``noise_stddev_votes`` on each; None: of unknown size."""

    counts_QC: IntArray
    record_ids: Sequence[str]
    num_voters: int
    noise_stddev_votes: float | None

    @classmethod
    def of_labels(cls, labels_Q: IntArray, record_ids: Sequence[str], *, num_classes: int) -> NoisyCounts:
        """Return released labels as the counts of one voter, whose choice is the noisy plurality of all."""
        counts_QC = np.eye(num_classes, dtype=np.int64)[labels_Q]
        return cls(counts_QC=counts_QC, record_ids=record_ids, num_voters=1, noise_stddev_votes=None)

    def rule(self, dataset: Dataset) -> tuple[FloatArray, Whole, WeightedBallot]:
        """Fit the linear rule (C, W) of shares to the counts; return it with the features of the public pool that it
        reads, and with their map."""
        ballot = WeightedBallot.of(dataset, EmbeddingConfig(graph_share=0))
        pool_MW = ballot.votes(dataset.public.x)
        rule_CW = fitted_rule(
            pool_MW[dataset.public.rows_of(self.record_ids)],
            self.counts_QC,
            num_voters=self.num_voters,
            noise_stddev_votes=self.noise_stddev_votes,
        )
        return rule_CW, pool_MW, ballot

    def shares(self, dataset: Dataset) -> FloatArray:
        """Return the rule's estimate of the share of the votes that each class gets, for every record of the public
        pool (M, C); rows sum to one."""
        rule_CW, pool_MW, _ = self.rule(dataset)
        shares_MC = np.clip(pool_MW / UNITS @ rule_CW.T, _LEAST_SHARE, 1.0)
        return shares_MC / shares_MC.sum(axis=1, keepdims=True)

    def bins(self, dataset: Dataset, *, num_bins: int) -> tuple[Bins, WeightedBallot]:
        """Fit the linear rule to the counts; return the bins of its scores, and the map of the features it reads."""
        rule_CW, pool_MW, ballot = self.rule(dataset)
        return Bins.of(rule_CW, pool_MW, num_bins=num_bins), ballot

    def table(
        self, dataset: Dataset, event: VoteTables | VoteSums, config: ThresholdsConfig, draw: Callable[..., IntArray]
    ) -> IntArray:
        """Read the private records and return their noisy table by bin and label; ``draw(exact_KC, stddev=...)`` adds
        the noise."""
        (bins, ballot), private = self.bins(dataset, num_bins=config.num_bins), dataset.private
        person_N = None if private.person_N is None else private.person_N.numpy()
        exact_KC = bins.table(ballot.votes(private.x), private.y.numpy(), person_N)
        return draw(exact_KC, stddev=event.noise_stddev_votes)

    def learned(
        self, dataset: Dataset, event: VoteTables | VoteSums | None, table_KC: IntArray | None, config: ThresholdsConfig
    ) -> tuple[FloatArray, PoolLabels]:
        """Return the linear rule (C, W) with the thresholds of the released table, if there is one, and the rule's
        labels of the whole public pool."""
        bins, ballot = self.bins(dataset, num_bins=config.num_bins)
        rule_CW = bins.uncalibrated() if table_KC is None or event is None else bins.calibrated(table_KC, event)
        return rule_CW, labels_of_chances(softmax(ballot.votes(dataset.public.x) / UNITS @ rule_CW.T, axis=1))

    def service_rule(
        self,
        dataset: Dataset,
        event: VoteTables | VoteSums,
        table_KC: IntArray,
        config: ThresholdsConfig,
        *,
        answers_free: bool,
    ) -> ServiceRule:
        """Return what the released counts, the released ``table_KC`` and public records say about the votes on any
        record. With ``answers_free``, the rule gives labels without votes."""
        shares_CW, pool_MW, ballot = self.rule(dataset)
        bins = Bins.of(shares_CW, pool_MW, num_bins=config.num_bins)
        chances_CW, x_MW = bins.calibrated(table_KC, event), pool_MW / UNITS
        shares_MC = x_MW @ shares_CW.T
        # Noise, and what exact counts differ from the rule by.
        spread = float((self.counts_QC / self.num_voters - shares_MC[dataset.public.rows_of(self.record_ids)]).std())
        assert self.noise_stddev_votes is not None
        stddev = max(spread, self.noise_stddev_votes / self.num_voters)
        offsets_C = offsets_of(softmax(x_MW @ chances_CW.T, axis=1), shares_MC, stddev=stddev)
        return ServiceRule(
            shares_CW=shares_CW,
            chances_CW=chances_CW,
            ballot=ballot,
            num_voters=self.num_voters,
            stddev_votes=stddev * self.num_voters,
            offsets=tuple(np.rint(self.num_voters * offsets_C).astype(np.int64).tolist()),
            released=arrays_digest({"counts": self.counts_QC, "table": table_KC}),
            answers_free=answers_free,
        )


@dataclass(frozen=True, kw_only=True)
class ServiceRule:
    """What a service knows about the votes on any record without asking the voters, from public records and released
    numbers alone.

    ``shares_CW`` is the linear rule of the shares of votes, ``chances_CW`` that of the labels' probabilities, with
    thresholds. ``stddev_votes`` is the standard deviation of a noisy count about its prediction. ``offsets`` are the
    whole numbers of votes that are added to noisy counts, ``released`` a digest of the numbers from which all of this
    was computed.
    """

    shares_CW: FloatArray
    chances_CW: FloatArray
    ballot: WeightedBallot
    num_voters: int
    stddev_votes: float
    offsets: tuple[int, ...]
    released: str
    answers_free: bool

    def labels(self, x: Tensor, offsets: Sequence[int]) -> list[int | None]:
        """Return the rule's own label of each record in ``x``, or None where a query with these ``offsets`` would name
        another label more often than once in 20 times."""
        if not self.answers_free or not len(x):
            return [None] * len(x)
        x_NW = self.ballot.votes(x) / UNITS
        label_N = (x_NW @ self.chances_CW.T).argmax(axis=1)
        votes_NC = x_NW @ self.shares_CW.T * self.num_voters + np.array(offsets)
        sure_N = chance_to_win(votes_NC, label_N, noise_stddev_votes=self.stddev_votes) >= _SURE
        return [label if sure else None for label, sure in zip(label_N.tolist(), sure_N.tolist(), strict=True)]


def offsets_of(chances_MC: FloatArray, shares_MC: FloatArray, *, stddev: float) -> FloatArray:
    """Return numbers o_c (C,), the first of them 0, so that the class with the largest noisy share + o_c is the label
    as often as possible, for records with these probabilities of labels and shares of votes.

    ``stddev`` is the standard deviation of the noise on each share. They are the intercepts, over the scale, of a
    logistic regression of labels on noisy shares. All numbers given are public, and the noise is simulated with a fixed
    seed, so that the same numbers give the same offsets.
    """
    num_records, num_classes = shares_MC.shape
    copies = max(1, _NOISY_RECORDS // num_records)
    simulated = np.random.default_rng(0).standard_normal((copies, num_records, num_classes))
    noisy_NC = (shares_MC + stddev * simulated).reshape(-1, num_classes)
    unit, chances_NC = float(noisy_NC.std()) or 1.0, np.tile(chances_MC, (copies, 1))

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        log_p_NC = log_softmax(parameters[0] * noisy_NC / unit + np.append(0.0, parameters[1:]), axis=1)
        slope_NC = np.exp(log_p_NC) - chances_NC
        gradient = np.append((slope_NC * noisy_NC).sum() / unit, slope_NC.sum(axis=0)[1:])
        return float(-(chances_NC * log_p_NC).sum() / len(noisy_NC)), gradient / len(noisy_NC)

    # Scales below this one say that the shares say nothing: then one class has all answers, by any large offset.
    bounds = [(0.01, None), *[(-20.0, 20.0)] * (num_classes - 1)]
    start = np.append(1.0, np.zeros(num_classes - 1))
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return np.append(0.0, found[1:] / found[0] * unit)
