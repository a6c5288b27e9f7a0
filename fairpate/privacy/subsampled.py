"""Renyi cost of a mechanism on a Poisson sample: every record enters independently with one probability.

For a mechanism whose worst pair of output distributions is mirror symmetric (Gaussian and Laplace noise, products of
them) the cost at a whole order is the binomial mixture of its moments (Mironov, Talwar and Zhang 2019, arXiv
1908.10530; Zhu and Wang 2019, Theorem 6). Mechanisms on the *same* sample multiply their moments first and are then
amplified once. Between whole orders the chord of (alpha - 1) R, which is convex in alpha, is an upper bound; beyond
``_LARGEST_MIXTURE`` the two-point mixture is one.

Relation: add or remove one record. Nothing here holds for shuffled or fixed-size batches.

Shapes: A orders; K moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import scipy

FloatArray = npt.NDArray[np.float64]
LogMoments = Callable[[FloatArray], FloatArray]

# A mixture has as many terms as its order.
_LARGEST_MIXTURE = 1024


def gaussian_log_moments(noise_multiplier: float) -> LogMoments:
    """ln E[(mu1 / mu0)^k] of a Gaussian with standard deviation ``noise_multiplier`` times its L2 sensitivity."""
    if not noise_multiplier > 0:
        raise ValueError(f"Expected noise_multiplier > 0, got {noise_multiplier}.")
    return lambda k_K: k_K * (k_K - 1) / (2 * noise_multiplier**2)


def laplace_log_moments(scale: float) -> LogMoments:
    """ln E[(mu1 / mu0)^k] of Laplace noise of ``scale`` times its L1 sensitivity, k >= 0."""
    if not scale > 0:
        raise ValueError(f"Expected scale > 0, got {scale}.")

    def log_moments(k_K: FloatArray) -> FloatArray:
        # k / (2 k - 1) e^((k - 1) / b) + (k - 1) / (2 k - 1) e^(-k / b): Mironov 2017, Proposition 6.
        # The floors keep logarithms finite at k = 0 and 1, whose moments are 1.
        up_K = np.log(np.maximum(k_K, 0.75) / (2 * np.maximum(k_K, 0.75) - 1)) + (k_K - 1) / scale
        down_K = np.log(np.maximum(k_K - 1, 1e-300) / (2 * np.maximum(k_K, 0.75) - 1)) - k_K / scale
        return np.where(k_K < 2, 0.0, np.logaddexp(up_K, down_K))

    return log_moments


def combined_log_moments(*mechanisms: LogMoments) -> LogMoments:
    """The moments of several mechanisms that read the same sample: their product."""
    return lambda k_K: np.sum([log_moments(k_K) for log_moments in mechanisms], axis=0)


def poisson_rdp(log_moments: LogMoments, *, sampling_rate: float, orders_A: npt.ArrayLike) -> FloatArray:
    """RDP of one step on a Poisson sample, shape (A,). ValueError for an order <= 1 or a rate outside [0, 1]."""
    if not 0 <= sampling_rate <= 1:
        raise ValueError(f"Expected 0 <= sampling_rate <= 1, got {sampling_rate}.")
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError("Expected orders > 1.")
    if sampling_rate == 0:
        return np.zeros(len(orders))
    below_A, above_A = np.floor(orders), np.ceil(orders)
    whole = np.unique([below_A, above_A]).astype(int).tolist()
    exponent_of = dict(zip(whole, _exponents(log_moments, sampling_rate, whole), strict=True))
    share_A = orders - below_A
    below = np.array([exponent_of[order] for order in below_A])
    above = np.array([exponent_of[order] for order in above_A])
    rdp_A: FloatArray = ((1 - share_A) * below + share_A * above) / (orders - 1)
    return rdp_A


def poisson_gaussian_rdp(noise_multiplier: float, *, sampling_rate: float, orders_A: npt.ArrayLike) -> FloatArray:
    """:func:`poisson_rdp` of one Gaussian sum; errors as there and as :func:`gaussian_log_moments`."""
    orders = tuple(np.asarray(orders_A, dtype=np.float64).tolist())
    # The cached array is every caller's.
    return _poisson_gaussian_rdp(noise_multiplier, sampling_rate, orders).copy()


# A page of costs asks for the same step again and again, each time with another count.
@lru_cache(maxsize=1024)
def _poisson_gaussian_rdp(noise_multiplier: float, sampling_rate: float, orders: tuple[float, ...]) -> FloatArray:
    return poisson_rdp(gaussian_log_moments(noise_multiplier), sampling_rate=sampling_rate, orders_A=orders)


def _exponents(log_moments: LogMoments, sampling_rate: float, orders: Sequence[int]) -> list[float]:
    """(alpha - 1) R at whole orders; 0 at order 1."""
    if sampling_rate == 1:
        return [0.0 if order == 1 else float(log_moments(np.array([float(order)]))[0]) for order in orders]
    log_in, log_out = math.log(sampling_rate), math.log1p(-sampling_rate)
    # Every mixture takes the first of these terms: they are made once for all orders.
    k_K = np.arange(min(max(orders, default=1), _LARGEST_MIXTURE) + 1, dtype=np.float64)
    in_K, out_K, moments_K = k_K * log_in, k_K * log_out, log_moments(k_K)

    def exponent(order: int) -> float:
        if order == 1:
            return 0.0
        # An upper bound, as a power is convex: (1 - q + q L)^alpha <= 1 - q + q L^alpha.
        if order > _LARGEST_MIXTURE:
            return float(np.logaddexp(log_out, log_in + log_moments(np.array([float(order)]))[0]))
        terms_K = _log_choices(order) + in_K[: order + 1] + out_K[order::-1] + moments_K[: order + 1]
        return _log_sum(terms_K)

    return [exponent(order) for order in orders]


def _log_sum(terms_K: FloatArray) -> float:
    """ln of the sum of exponentials, at least 0; scipy's logsumexp to the digit, without its checks.

    They cost ten times as much, and a calibration makes thousands.
    """
    shift = terms_K.max()
    largest_K = terms_K == shift
    terms_K[largest_K] = -math.inf
    ties = np.count_nonzero(largest_K) or 1  # none where a moment is NaN
    total = np.log1p(np.exp(terms_K - shift).sum() / ties) + math.log(ties) + shift
    return float(np.maximum(total, 0.0))  # which keeps a NaN, for the accountant to refuse


@lru_cache(maxsize=_LARGEST_MIXTURE)
def _log_choices(order: int) -> FloatArray:
    k_K = np.arange(order + 1, dtype=np.float64)
    log_choices_K: FloatArray = (
        scipy.special.gammaln(order + 1) - scipy.special.gammaln(k_K + 1) - scipy.special.gammaln(order - k_K + 1)
    )
    return log_choices_K
