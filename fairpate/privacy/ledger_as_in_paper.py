"""What the published PATE and FairPATE code counts for its queries: for comparison with what the accountant says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairpate.privacy import gnmax
from fairpate.privacy.accountant import DEFAULT_ORDERS, FloatArray
from fairpate.privacy.events import ConfidentGnmaxVotes


def as_in_paper_rdp(
    event: ConfidentGnmaxVotes,
    *,
    fairness_rejected_Q: npt.ArrayLike | None = None,
    orders_A: npt.ArrayLike = DEFAULT_ORDERS,
) -> FloatArray:
    """The ledger of the published PATE and FairPATE code, shape (A,), for comparison only: NOT a valid privacy cost.

    Per query the threshold's cost plus P[answered] times the argmax's: an expectation, not what happened. Where
    ``fairness_rejected_Q`` says that the gate refused the label it charges nothing, although both steps ran.
    """
    charged_Q = np.ones(len(event.votes_QC), dtype=bool)
    if fairness_rejected_Q is not None:
        charged_Q = ~np.asarray(fairness_rejected_Q, dtype=bool)
    if charged_Q.shape != (len(event.votes_QC),):
        raise ValueError(f"Expected one flag per query ({len(event.votes_QC)}), got shape {charged_Q.shape}.")
    votes_QC, noise = np.asarray(event.votes_QC)[charged_Q], event.noise_stddev_votes
    threshold, threshold_stddev, tail = event.threshold, event.threshold_stddev_votes, event.tail
    log_q_Q = gnmax.log_q(votes_QC, noise_stddev_votes=noise, tail=tail)
    argmax_QA = gnmax.gnmax_rdp(log_q_Q, noise_stddev_votes=noise, orders_A=orders_A)
    answered_Q = gnmax.answer_probability(
        votes_QC, threshold=threshold, threshold_stddev_votes=threshold_stddev, tail=tail
    )
    threshold_QA = gnmax.threshold_rdp(
        votes_QC, threshold=threshold, threshold_stddev_votes=threshold_stddev, orders_A=orders_A, tail=tail
    )
    total_A: FloatArray = threshold_QA.sum(axis=0) + answered_Q @ argmax_QA
    return total_A
