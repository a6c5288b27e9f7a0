"""Residual votes: a linear rule from several noisy sums, each of which corrects the rule of those before it.

Related work: weighted votes (:mod:`fairpate.methods.record_votes`); distributed Newton methods (DANE, Shamir, Srebro
and Zhang 2014, arXiv 1312.7853); private second-order optimisation (DP-FC, Mehta et al. 2022, arXiv 2211.13403; AdaSSP,
Wang 2018, arXiv 1803.02596); the quadratic bound on the logistic loss (Boehning 1992).

    phi(x)       whole numbers of L2 norm at most U, as in weighted votes
    release 1    S[c] = the sum of phi over private records of label c, + N_Z(0, s_1^2)
    curvature    G = the sum of phi phi^T: n times the mean over public records, tilted to S; or a release of its own
    rule         W_0 fits S as in weighted votes; with a released G it is a (S - mean over classes) H^-1
    release t    g_t = the sum of clip(e_y - softmax(W_(t-1) phi)) phi^T, + N_Z(0, s_t^2)
    step         W_t = W_(t-1) + b g_t H^-1;  H: G with eigenvalues cut at 0, plus a floor in proportion to the noise

g_t is the gradient of the *private* log likelihood, so the steps undo what the public records got wrong. The Hessian of
that likelihood is at most G / 2 for any W, so steps of b < 4 do not diverge. The residuals of well-predicted records
are short: clipped to the norm c < 1 they need c times the noise of S.

Adding or removing a record moves S by at most U, G by at most U^2 in Frobenius norm, and g_t by at most c U^2
(:class:`fairpate.privacy.mechanism_events.VoteSums`, :class:`fairpate.privacy.mechanism_events.MomentSums`). All noise
is fixed before anything is drawn, so that the adaptive releases compose in the accountant. A record's part of a release
is a function of that record and of released numbers alone, bit for bit: scores, probabilities and products are whole
numbers, whose sums are exact in any order. All numbers of a person are added up and shortened to the norm of one
record.

Shapes: N private records, M public ones, C classes, W numbers per class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fairpate.methods.record_votes import UNITS
from fairpate.types import IntArray

DoubleArray = npt.NDArray[np.float64]
_AT_ONCE = 8192
_RULE_DIGITS, _SCORE_DIGITS = 12, 10
"""Binary digits after the point of a rule's numbers, and of the scores whose softmax is taken."""
_LARGEST_RULE = 2.0**24
_LEAST_CHANCE = 24  # scores that lie this far below the largest count as this far: exp(-24) = 4e-11
_EXPONENTIALS = np.rint(2.0**30 * np.exp(-np.arange(_LEAST_CHANCE << _SCORE_DIGITS) / 2.0**_SCORE_DIGITS)).astype(
    np.int64
)


def whole_rule(rule_CW: DoubleArray) -> IntArray:
    """The rule (C, W) that private records are compared with: whole multiples of 2^-12, rows of norm 2^24 at most."""
    # Longer rules would make sums of products inexact; none is in use.
    longest = np.linalg.norm(rule_CW, axis=1).max(initial=0.0)
    return np.rint(
        rule_CW * 2.0**_RULE_DIGITS * min(1.0, _LARGEST_RULE / 2.0**_RULE_DIGITS / max(longest, 1e-30))
    ).astype(np.int64)


def residuals(phi_NW: IntArray, labels_N: IntArray, rule_CW: IntArray, *, bound: int) -> IntArray:
    """``e_y - softmax(W phi)`` in units of 1 / :data:`UNITS`, shortened to the L2 norm ``bound`` at most: (N, C).

    ``rule_CW`` comes from :func:`whole_rule`. Whole numbers; a row is a function of its record and the rule alone.
    """
    # Whole numbers below 2^53 in float64: exact in any order of summation, and fast.
    scores_NC = (phi_NW.astype(np.float64) @ rule_CW.T.astype(np.float64)).astype(np.int64)
    below_NC = (scores_NC.max(axis=1, keepdims=True) - scores_NC) // (UNITS << _RULE_DIGITS >> _SCORE_DIGITS)
    # A table of whole numbers: library functions may round a number differently at another place of an array.
    weights_NC = _EXPONENTIALS[np.minimum(below_NC, len(_EXPONENTIALS) - 1)]
    found_NC = -(weights_NC * UNITS // weights_NC.sum(axis=1, keepdims=True))
    found_NC[np.arange(len(labels_N)), labels_N] += UNITS
    squared_N1 = (found_NC * found_NC).sum(axis=1, keepdims=True)
    # Towards zero, and a little shorter than the bound, so that no rounding of floats makes a residual longer.
    shorter_NC = np.trunc(found_NC * (bound - 1) / np.sqrt(np.maximum(squared_N1, 1))).astype(np.int64)
    return np.where(squared_N1 > bound**2, shorter_NC, found_NC)


def product_sum(left_NA: IntArray, right_NB: IntArray, *, norm: int, person_N: IntArray | None = None) -> IntArray:
    """The sum over records of ``left right^T`` (A, B), exactly.

    No record's product has a Frobenius norm above ``norm``, below 2^30. With ``person_N``, products of a person are
    added up and shortened to ``norm`` where they are longer.
    """
    if person_N is None:
        # 2^13 products below 2^30 add up to less than 2^53: exact in float64.
        parts = (
            left_NA[start : start + _AT_ONCE].T.astype(np.float64)
            @ right_NB[start : start + _AT_ONCE].astype(np.float64)
            for start in range(0, max(len(left_NA), 1), _AT_ONCE)
        )
        total: IntArray = sum((part.astype(np.int64) for part in parts), np.zeros((), dtype=np.int64))
        return total
    total = np.zeros((left_NA.shape[1], right_NB.shape[1]), dtype=np.int64)
    for rows in _rows_of_persons(person_N):
        total += shortened(product_sum(left_NA[rows], right_NB[rows], norm=norm), norm=norm)
    return total


def shortened(matrix: IntArray, *, norm: int) -> IntArray:
    """A person's ``matrix``, shortened to the Frobenius norm ``norm`` where it is longer; whole numbers."""
    squared = float(np.square(matrix.astype(np.float64)).sum())
    # The margin covers the rounding of the sum of squares, so that the whole numbers are within the norm for certain.
    limit = norm * (1 - 2.0**-30)
    if squared <= limit**2:
        return matrix
    return np.trunc(matrix * (limit / math.sqrt(squared))).astype(np.int64)


def _rows_of_persons(person_N: IntArray) -> Iterator[IntArray]:
    rows = np.argsort(person_N, kind="stable")
    yield from np.split(rows, np.flatnonzero(np.diff(person_N[rows])) + 1) if len(rows) else ()


def curvature_inverse(moments_WW: DoubleArray, *, floor: float) -> DoubleArray:
    """H^-1 (W, W): of symmetric ``moments_WW`` with negative eigenvalues cut at 0, plus ``floor`` > 0."""
    values_W, vectors_WW = np.linalg.eigh(moments_WW)
    inverse_WW: DoubleArray = (vectors_WW / (np.maximum(values_W, 0.0) + floor)) @ vectors_WW.T
    return inverse_WW
