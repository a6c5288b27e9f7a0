"""Audits: lower bounds on epsilon, at a level of confidence, from what an attacker sees of releases.

**One run.** Steinke, Nasr and Jagielski 2023 ("Privacy Auditing with One (1) Training Run", arXiv 2305.08846, Theorem
5.2): M canaries enter the data or not, each by a fair coin of its own; the run's output gives every canary a score; an
attacker who guesses the coins, for any number of canaries, is right about no more of them than randomised response at
epsilon would allow, up to a term in delta. Too many right guesses refute the epsilon. The number of guesses must be
fixed before the coins are seen.

**Many releases.** Where one release is cheap it is repeated, of data with the canary and of data without it. Whether a
score reaches a threshold distinguishes the two, and an (epsilon, delta) mechanism bounds how well: P[reached with] <=
e^epsilon P[reached without] + delta, the same for the complement, and for both with the two exchanged (Kairouz, Oh and
Viswanath 2015, arXiv 1311.0776). The probabilities are bounded by Clopper-Pearson intervals.

Any attacker may be used: a low bound proves nothing, a bound above the claim proves a fault. Scores are made elsewhere.

Shapes: M canaries; R releases with the canary, S without; T thresholds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]
_LARGEST_EPSILON = 1e3
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of one run's guesses: ``num_correct`` of ``num_guesses`` are right, out of ``num_canaries``."""

    num_canaries: int
    num_guesses: int
    num_correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_correct <= self.num_guesses <= self.num_canaries:
            raise ValueError(
                "Expected 0 <= num_correct <= num_guesses <= num_canaries, got "
                f"{self.num_correct}, {self.num_guesses} and {self.num_canaries}."
            )


def guess(scores_M: npt.ArrayLike, included_M: npt.ArrayLike, *, num_guessed_in: int, num_guessed_out: int) -> Guesses:
    """Guess that the highest scores were included and the lowest were not, and count what is right.

    ``included_M``: the fair coins, booleans. ValueError for a NaN score, for unequal lengths, and for more guesses than
    canaries.
    """
    scores, included = np.asarray(scores_M, dtype=np.float64), np.asarray(included_M, dtype=bool)
    if scores.ndim != 1 or scores.shape != included.shape:
        raise ValueError(f"Expected one score and one coin per canary, got {scores.shape} and {included.shape}.")
    if np.isnan(scores).any():
        raise ValueError("Expected a score for every canary, got NaN.")
    if min(num_guessed_in, num_guessed_out) < 0 or num_guessed_in + num_guessed_out > len(scores):
        raise ValueError(
            f"Expected at most {len(scores)} guesses, one per canary, got {num_guessed_in} and {num_guessed_out}."
        )
    # Ties are broken by position: the coins must not decide which canaries are guessed.
    ascending = included[np.argsort(scores, kind="stable")]
    num_correct = ascending[len(scores) - num_guessed_in :].sum() + (~ascending[:num_guessed_out]).sum()
    return Guesses(num_canaries=len(scores), num_guesses=num_guessed_in + num_guessed_out, num_correct=int(num_correct))


def p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """A bound on the probability that an (epsilon, delta) mechanism lets anyone guess this well.

    ValueError unless epsilon >= 0 and 0 <= delta <= 1.
    """
    if not epsilon >= 0 or not 0 <= delta <= 1:
        raise ValueError(f"Expected epsilon >= 0 and 0 <= delta <= 1, got {epsilon} and {delta}.")
    # Randomised response is right with this probability, each guess on its own.
    right = 1 / (1 + math.exp(-epsilon))
    correct, count = guesses.num_correct, guesses.num_guesses
    # P[at least ``correct`` of ``count`` guesses are right]; ``bdtrc`` counts those strictly above its argument.
    at_least = float(scipy.special.bdtrc(correct - 1, count, right)) if correct else 1.0
    if not correct or not delta:
        return at_least
    # The theorem's term in delta: 2 M delta times the largest P[correct - i <= right < correct] / i.
    below = np.cumsum(scipy.stats.binom.pmf(np.arange(correct - 1, -1, -1), count, right))
    slope = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, at_least + 2 * guesses.num_canaries * delta * slope)


def epsilon_lower_bound(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> float:
    """The epsilon up to which every (epsilon, delta) claim is refuted; 0 when the guesses refute none.

    A mechanism that keeps its claim exceeds it here with probability at most 1 - ``confidence``. ValueError unless
    0 < confidence < 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")

    def is_refuted(epsilon: float) -> bool:
        return p_value(guesses, epsilon=epsilon, delta=delta) < 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    # A mechanism without noise is refuted at any epsilon.
    while is_refuted(high) and high < _LARGEST_EPSILON:
        low, high = high, 2 * high
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    # The lower end: it was refuted itself, the upper one was not.
    return low


def epsilon_of_best_threshold(
    with_R: npt.ArrayLike, without_S: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> float:
    """The epsilon up to which every (epsilon, delta) claim is refuted by scores of releases with and without a canary.

    Scores must be independent. Half of them choose the threshold and the side, the other half is counted. A mechanism
    that keeps its claim exceeds it here with probability at most 1 - ``confidence``. ValueError for fewer than two
    scores a side, for NaN, and unless 0 <= delta <= 1 and 0 < confidence < 1.
    """
    if not 0 <= delta <= 1 or not 0 < confidence < 1:
        raise ValueError(f"Expected 0 <= delta <= 1 and 0 < confidence < 1, got {delta} and {confidence}.")
    sides = [np.asarray(scores, dtype=np.float64) for scores in (with_R, without_S)]
    if any(scores.ndim != 1 or len(scores) < 2 or np.isnan(scores).any() for scores in sides):
        raise ValueError("Expected two scores or more of releases with and without the canary, and no NaN.")
    # Halves: on the scores that chose it, a threshold looks better than it is.
    chosen, counted = ([np.sort(scores[half::2]) for scores in sides] for half in (0, 1))
    ascending = np.sort(np.concatenate(chosen))
    # A few of the scores, close together at both ends, where the rare outcomes lie.
    ranks = np.unique(np.geomspace(1, len(ascending), 200).astype(np.int64))
    thresholds_T: FloatArray = np.unique(ascending[np.concatenate([ranks - 1, len(ascending) - ranks])])
    # At a level that holds for all thresholds at once: otherwise chance in the tails would choose the threshold.
    for_all = 1 - (1 - confidence) / (4 * len(thresholds_T))
    promising_4T = _bounds(chosen[0], chosen[1], thresholds_T, delta=delta, confidence=for_all)
    test, threshold = np.unravel_index(promising_4T.argmax(), promising_4T.shape)
    found_4T = _bounds(counted[0], counted[1], thresholds_T[[threshold]], delta=delta, confidence=confidence)
    return max(0.0, float(found_4T[test, 0]))


def _bounds(
    with_R: FloatArray, without_S: FloatArray, thresholds_T: FloatArray, *, delta: float, confidence: float
) -> FloatArray:
    """Lower bounds (4, T) on epsilon from each threshold: releases with the canary against those without and the
    reverse, each for scores at or above the threshold and for scores below it.

    Scores must be sorted in ascending order. A bound is -inf where the scores refute no epsilon.
    """
    # The number of sorted scores that reach each threshold.
    counts = [len(scores) - np.searchsorted(scores, thresholds_T) for scores in (with_R, without_S)]
    totals = len(with_R), len(without_S)
    # A quotient has two one-sided limits: each may fail with half of what confidence leaves.
    level = (1 - confidence) / 2
    bounds = []
    for reached in (counts, [total - count for total, count in zip(totals, counts, strict=True)]):
        for likely, rare in ((0, 1), (1, 0)):
            low = scipy.stats.beta.ppf(level, reached[likely], totals[likely] - reached[likely] + 1)
            high = scipy.stats.beta.ppf(1 - level, reached[rare] + 1, totals[rare] - reached[rare])
            # Clopper-Pearson limits of 0 and of all successes have no beta distribution: they are 0 and 1.
            low = np.where(reached[likely] == 0, 0.0, low)
            high = np.where(reached[rare] == totals[rare], 1.0, high)
            with np.errstate(divide="ignore"):
                bounds.append(np.log(np.maximum(low - delta, 0.0)) - np.log(high))
    return np.stack(bounds)
