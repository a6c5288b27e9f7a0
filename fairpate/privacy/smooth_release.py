"""A price of votes that may be published: how it is released, what the release itself costs, and what it says.

The data-dependent price and its smooth sensitivity S are computed by ``fairpate.privacy.smooth_sensitivity``; both are
private.

**What the noise costs.** Noise of stddev s times the smooth sensitivity S is priced by the exact divergence between
Gaussians whose centres differ by at most S and S' and whose scales differ by a factor up to exp(beta). Theorem 23 of
the paper prices it otherwise, and for orders near 1 / (2 beta) below that divergence.

**What may be published** is in :class:`SanitisedRdp`: an unbiased estimate, no upper bound. S itself is private, but
ln S moves by at most beta from record to record: paying for a noisy ln S gives an upper confidence limit. Noise starts
as an exact discrete Gaussian on a grid of 2^-64 and is scaled in floats, then rounded: sound up to rounding, not exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.privacy.accountant import event_rdp
from fairpate.privacy.conversion import epsilon_of_curve
from fairpate.types import Relation, Unit

FloatArray = npt.NDArray[np.float64]

PUBLISHED_DECIMALS = 6


@dataclass(frozen=True, kw_only=True)
class SmoothRelease:
    """How a cost will be published, chosen before any vote is seen; also the accountant's event for having done so.

    ``order``: the Renyi order, 1 < order < 1 / (2 beta). ``beta``: discount per record. ``noise_stddev``: noise in
    multiples of the smooth sensitivity. ``scale_noise_stddev``: noise on ln(smooth sensitivity) in multiples of beta;
    ``inf``: that is not published.
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
        if not 0 < self.beta < math.inf:
            raise ValueError(f"Expected 0 < beta < inf, got {self.beta}.")
        if not 1 < self.order < 1 / (2 * self.beta):
            raise ValueError(
                f"Expected 1 < order < 1 / (2 beta) = {1 / (2 * self.beta):g}, got {self.order}; lower beta."
            )
        if not 0 < self.noise_stddev < math.inf:
            raise ValueError(f"Expected 0 < noise_stddev < inf, got {self.noise_stddev}.")
        if not self.scale_noise_stddev > 0:
            raise ValueError(f"Expected scale_noise_stddev > 0 or inf, got {self.scale_noise_stddev}.")


@event_rdp.register
def release_rdp(release: SmoothRelease, orders_A: npt.ArrayLike) -> FloatArray:
    """The Renyi cost of one release, shape (A,); ``inf`` from order 1 / (1 - exp(-2 beta)) on.

    Of all pairs of centres and scales that smoothness allows, the costliest has the scale fall by exp(beta) and the
    centre move by the smaller scale. The noisy logarithm of the scale, of sensitivity beta, adds its Gaussian cost.
    ValueError for an order <= 1.
    """
    orders = np.asarray(orders_A, dtype=np.float64)
    if not np.all(orders > 1):
        raise ValueError(f"Expected Renyi orders > 1, got {orders_A!r}.")
    # From that order on the Gaussian of the smaller scale has too light a tail: the moment diverges.
    finite_A = orders * -math.expm1(-2 * release.beta) < 1
    # Any order with finite logarithms: the result is inf there.
    inner = np.where(finite_A, orders, 1.0)
    shift_A = inner / (2 * release.noise_stddev**2 * (1 - (inner - 1) * math.expm1(2 * release.beta)))
    scale_A = -inner * release.beta - 0.5 * np.log1p(inner * math.expm1(-2 * release.beta))
    known_scale_A = orders / (2 * release.scale_noise_stddev**2)
    return np.where(finite_A, shift_A + scale_A / (orders - 1) + known_scale_A, math.inf)


@dataclass(frozen=True, kw_only=True)
class SanitisedRdp:
    """What may be published of votes' cost at ``release.order``; using it costs ``release_rdp``, whatever it says.

    ``rdp``: the cost plus noise of mean 0, possibly negative. ``log_scale``: noisy ln of the smooth sensitivity, None
    unless paid for. ``rdp_data_independent``: the same queries' cost for any votes. ``noise``: label of its source.
    """

    release: SmoothRelease
    rdp: float
    log_scale: float | None
    rdp_data_independent: float
    noise: str

    def upper(self, confidence: float) -> float:
        """A limit that the cost exceeds with probability at most 1 - ``confidence`` over the noise drawn.

        Half of that is left to each of the two noises. ValueError where the scale was not paid for.
        """
        if self.log_scale is None:
            raise ValueError("Expected a release with a finite scale_noise_stddev: without it only rdp is known.")
        if not 0 < confidence < 1:
            raise ValueError(f"Expected 0 < confidence < 1, got {confidence}.")
        quantile = float(scipy.special.ndtri((1 + confidence) / 2))
        # Published numbers were rounded; a unit of their grid is added back so that the limit holds for the exact ones.
        rounding = 10.0**-PUBLISHED_DECIMALS
        log_scale = self.log_scale + rounding + quantile * self.release.scale_noise_stddev * self.release.beta
        limit = self.rdp + rounding + quantile * self.release.noise_stddev * math.exp(log_scale)
        return min(max(limit, 0.0), self.rdp_data_independent)

    def epsilon(self, *, target_delta: float, confidence: float | None = None) -> float:
        """The epsilon of queries and release together, by the improved conversion at ``release.order``.

        An estimate, or with ``confidence`` from the limit :meth:`upper`. It speaks of these votes only: the guarantee
        for any votes is the data-independent one, with the release as one more event.
        """
        cost = min(max(self.rdp, 0.0), self.rdp_data_independent) if confidence is None else self.upper(confidence)
        orders = [self.release.order]
        return epsilon_of_curve(cost + release_rdp(self.release, orders), orders, target_delta=target_delta)[0]
