"""The two steps of a query, each with its cost and sensitivity per query, as the tests of a published cost ask."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairpate.privacy.mechanism_events import DistinctVotes, TwoSteps
from fairpate.types import MechanismParameters, Tail


def two_step_rdp(
    votes: npt.ArrayLike, *, order: float, tail: Tail = "discrete", **mechanism: float
) -> npt.NDArray[np.float64]:
    """Threshold check and argmax priced separately, (Q,)."""
    distinct = DistinctVotes.of(votes)
    return TwoSteps(MechanismParameters(**mechanism), order, tail).rdp(distinct)[distinct.inverse_Q]


def argmax_sensitivity(
    votes: npt.ArrayLike, *, noise_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> npt.NDArray[np.float64]:
    """The largest change of the argmax's cost by one moved vote, among votes at most d moves away, (Q, D)."""
    mechanism = MechanismParameters(threshold=0, threshold_stddev_votes=1, noise_stddev_votes=noise_stddev_votes)
    distinct = DistinctVotes.of(votes)
    return TwoSteps(mechanism, order, tail).argmax_sensitivity(distinct)[distinct.inverse_Q]


def threshold_sensitivity(
    votes: npt.ArrayLike, *, threshold: float, threshold_stddev_votes: float, order: float, tail: Tail = "discrete"
) -> npt.NDArray[np.float64]:
    """The same of the threshold bit."""
    mechanism = MechanismParameters(
        threshold=threshold, threshold_stddev_votes=threshold_stddev_votes, noise_stddev_votes=1
    )
    distinct = DistinctVotes.of(votes)
    return TwoSteps(mechanism, order, tail).threshold_sensitivity(distinct)[distinct.inverse_Q]
