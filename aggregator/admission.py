"""Which queries to submit next, decided from what is public, so that the gate refuses fewer of them after they are
paid.

A label that the gate rejects costs what an answer costs, because the votes were drawn. Whether it will be rejected
can be guessed beforehand: a model of the labels already released predicts the next one, and the gate's counters are
public. A query that the gate would then reject is left out for now, without touching a vote, and may be admitted later,
when the counters have moved. All of this is post-processing of released labels and costs nothing; a wrong guess costs
what any query costs and breaks nothing, since the gate itself still decides.

Knows no model: predictions come as probabilities. Shapes: N candidates, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairpate.fairness.gate import DemographicParityGate

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def admit_queries(
    probabilities_NC: FloatArray, groups_N: IntArray, *, gate: DemographicParityGate, count: int, uncertain_first: bool
) -> list[int]:
    """Rows of at most ``count`` candidates that ``gate`` is expected to accept, in the order to submit them.

    ``gate`` counts what was released; it is used up: each admitted candidate is counted in it as if answered with its
    likeliest label. Candidates are looked at in their order, or those with the least likely likeliest label first, and
    again from the start while one was admitted, for each of them moves the counters.
    """
    likeliest_N, confidence_N = probabilities_NC.argmax(axis=1), probabilities_NC.max(axis=1)
    waiting: list[int] = (
        # Stable: equally sure ones stay in their order, whatever sorts them.
        np.argsort(confidence_N, kind="stable") if uncertain_first else np.arange(len(groups_N))
    ).tolist()
    admitted: list[int] = []
    progress = True
    while progress and len(admitted) < count:
        progress, left = False, []
        for row in waiting:
            if len(admitted) < count and gate.admit(int(groups_N[row]), int(likeliest_N[row])):
                admitted.append(row)
                progress = True
            else:
                left.append(row)
        waiting = left
    return admitted
