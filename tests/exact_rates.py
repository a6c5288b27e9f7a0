"""Values of rate constraints on exact histograms of predictions, without noise and without a floor of sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fairpate.fairness.rates import divide
from fairpate.methods.raco_dp import RateConstraints
from fairpate.types import FloatArray


def histogram_of(constraints: RateConstraints, probabilities_NC: npt.ArrayLike, cells_N: npt.ArrayLike) -> FloatArray:
    """The predicted mass by cell and class; each record adds 1 in all."""
    histogram_QC = np.zeros((constraints.partition.num_cells, constraints.num_classes))
    # Plain indexing would count a cell once, however many records it has.
    np.add.at(histogram_QC, np.asarray(cells_N), np.asarray(probabilities_NC, np.float64))
    return histogram_QC


def exact_values(
    constraints: RateConstraints, probabilities_NC: npt.ArrayLike, labels_N: npt.ArrayLike, groups_N: npt.ArrayLike
) -> dict[str, float]:
    """The value of every constraint on these records, by name; NaN if a union that it uses has no records."""
    histogram_QC = histogram_of(constraints, probabilities_NC, constraints.partition.cells(labels_N, groups_N))
    members_UQ, of_all_U, weights_JUC = constraints.unions
    sizes_U = np.where(of_all_U, histogram_QC.sum(), members_UQ @ histogram_QC.sum(axis=1))
    rates_UC = divide(members_UQ @ histogram_QC, sizes_U[:, None])
    # A union that a constraint does not use may be empty, and 0 times NaN is NaN.
    values_J = np.where(weights_JUC == 0, 0.0, weights_JUC * rates_UC).sum(axis=(1, 2))
    return dict(zip(constraints.names, values_J.tolist(), strict=True))
