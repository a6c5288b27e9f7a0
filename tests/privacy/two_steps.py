"""The two steps of a query, each with its cost and sensitivity per query, as the tests of a published cost ask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairpate.privacy import smooth_sensitivity
from fairpate.privacy.smooth_sensitivity import distinct_votes
from fairpate.types import MechanismParameters, Tail


def two_step_rdp(
    votes: npt.ArrayLike, *, order: float, tail: Tail = "discrete", **mechanism: float
) -> npt.NDArray[np.float64]:
    """Threshold check and argmax priced separately, (Q,)."""
    ranked, _, row = distinct_votes(votes)
    return smooth_sensitivity.two_step_rdp(ranked, MechanismParameters(**mechanism), order=order, tail=tail)[row]


def argmax_sensitivity(
    votes: npt.ArrayLike, *, noise_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> npt.NDArray[np.float64]:
    """The largest change of the argmax's cost by one moved vote, among votes at most d moves away, (Q, D)."""
    mechanism = MechanismParameters(threshold=0, threshold_stddev_votes=1, noise_stddev_votes=noise_stddev_votes)
    ranked, _, row = distinct_votes(votes)
    return smooth_sensitivity.argmax_sensitivity(ranked, mechanism, order=order, tail=tail)[row]


def threshold_sensitivity(
    votes: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> npt.NDArray[np.float64]:
    """The same of the threshold bit."""
    mechanism = MechanismParameters(
        threshold=threshold, threshold_stddev_votes=threshold_stddev_votes, noise_stddev_votes=1
    )
    ranked, _, row = distinct_votes(votes)
    return smooth_sensitivity.threshold_sensitivity(ranked, mechanism, order=order, tail=tail)[row]
