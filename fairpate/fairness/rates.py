"""Rates by group, all read from one contingency table.

Every metric of ``fairpate.fairness.gaps`` is a function of how much prediction mass falls on group z, true label y
and predicted label k. A hard label puts mass 1 on its class; a probabilistic prediction spreads it. A rate with an
empty denominator is NaN, never 0, and no denominator carries a small constant: an empty group has no rate.

Shapes: G groups, Y true labels, C predicted classes, N records, R bootstrap replicates. Y equals C, or is 1 when
true labels are not known. A leading ``...`` stands for any number of replicates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

_REPLICATES_PER_CHUNK = 64


def joint_table(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    num_groups: int,
    num_classes: int,
    labels_N: npt.ArrayLike | None = None,
    answered_N: npt.ArrayLike | None = None,
) -> FloatArray:
    """Prediction mass by group, true label and predicted label: shape (G, Y, C).

    ``predictions`` holds hard labels (N,) or probabilities (N, C). Only records with ``answered_N`` count; what the
    others hold is not read. ValueError for lengths that differ, labels or groups out of range and rows that are
    no probabilities.
    """
    groups, labels, mass_NC = _answered_records(
        predictions, groups_N, labels_N, answered_N, num_groups=num_groups, num_classes=num_classes
    )
    joint_GYC = np.zeros((num_groups, 1 if labels_N is None else num_classes, num_classes))
    np.add.at(joint_GYC, (groups, labels), mass_NC)
    return joint_GYC


def resampled_tables(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    *,
    num_groups: int,
    num_classes: int,
    generator: np.random.Generator,
    num_replicates: int,
    labels_N: npt.ArrayLike | None = None,
    answered_N: npt.ArrayLike | None = None,
    persons_N: npt.ArrayLike | None = None,
) -> FloatArray:
    """``joint_table`` of ``num_replicates`` bootstrap samples of the answered records: shape (R, G, Y, C).

    Hard labels are resampled as one multinomial of the table, which is the same distribution. ``persons_N`` says whose
    each record is: whole persons are drawn then, because their records are alike and would make intervals too narrow.
    """
    groups, labels, mass_NC = _answered_records(
        predictions, groups_N, labels_N, answered_N, num_groups=num_groups, num_classes=num_classes
    )
    num_labels = 1 if labels_N is None else num_classes
    shape = (num_replicates, num_groups, num_labels, num_classes)
    if len(groups) == 0:
        return np.zeros(shape)
    if persons_N is not None:
        # Persons of whom every record was refused are not drawn: a replicate has as many answered ones as the sample.
        kept = slice(None) if answered_N is None else np.asarray(answered_N, dtype=np.bool_)
        names, person_N = np.unique(np.asarray(persons_N)[kept], return_inverse=True)
        tables_P = np.zeros((len(names), *shape[1:]))
        np.add.at(tables_P, (person_N, groups, labels), mass_NC)
        return _resample_persons(tables_P, generator, num_replicates).reshape(shape)
    if np.asarray(predictions).ndim == 1:
        # A hard label is its cell and nothing else: records drawn evenly are one multinomial over cells.
        joint_GYC = np.zeros(shape[1:])
        np.add.at(joint_GYC, (groups, labels), mass_NC)
        drawn = generator.multinomial(len(groups), joint_GYC.ravel() / len(groups), size=num_replicates)
        return drawn.reshape(shape).astype(np.float64)
    cells = groups * num_labels + labels
    # In chunks: how often each record is drawn takes R times N numbers.
    chunks = [
        _resample_mass(cells, mass_NC, num_groups * num_labels, generator, len(chunk))
        for chunk in np.array_split(range(num_replicates), -(-num_replicates // _REPLICATES_PER_CHUNK))
    ]
    return np.concatenate(chunks).reshape(shape)


def cumulative_tables(
    labels_N: npt.ArrayLike, groups_N: npt.ArrayLike, *, num_groups: int, num_classes: int
) -> FloatArray:
    """The table after each released label of a stream, shape (N, G, 1, C): for a gap's course and its maximum."""
    groups, _, mass_NC = _answered_records(
        labels_N, groups_N, None, None, num_groups=num_groups, num_classes=num_classes
    )
    steps_NG1C = np.zeros((len(groups), num_groups, 1, num_classes))
    steps_NG1C[np.arange(len(groups)), groups, 0] = mass_NC
    return steps_NG1C.cumsum(axis=0)


def group_rates(joint_GYC: FloatArray) -> FloatArray:
    """r(z, k): how often group z is predicted k. Shape (..., G, C)."""
    counts_GC = joint_GYC.sum(axis=-2)
    return divide(counts_GC, counts_GC.sum(axis=-1, keepdims=True))


def conditional_rates(joint_GYC: FloatArray) -> FloatArray:
    """r(z, k | y): how often group z is predicted k when its true label is y. Shape (..., G, Y, C)."""
    return divide(joint_GYC, joint_GYC.sum(axis=-1, keepdims=True))


def accuracies(joint_GYC: FloatArray) -> tuple[float, FloatArray]:
    """Selective accuracy, over all answered records and per group (G,); NaN where none is answered."""
    right_G = np.trace(joint_GYC, axis1=-2, axis2=-1)
    size_G = joint_GYC.sum(axis=(-2, -1))
    return float(divide(right_G.sum(), size_G.sum())), divide(right_G, size_G)


def coverages(groups_N: npt.ArrayLike, answered_N: npt.ArrayLike, *, num_groups: int) -> tuple[float, FloatArray]:
    """The share of records that were answered, over all and per group (G,); NaN for a group without records."""
    groups, answered = _indices("groups_N", np.asarray(groups_N), num_groups), np.asarray(answered_N, dtype=np.bool_)
    size_G = np.bincount(groups, minlength=num_groups)
    answered_G = np.bincount(groups[answered], minlength=num_groups)
    return float(divide(answered_G.sum(), size_G.sum())), divide(answered_G, size_G)


def divide(numerator: npt.ArrayLike, denominator: npt.ArrayLike) -> FloatArray:
    """The quotient, NaN where the denominator is 0."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, np.float64), np.asarray(denominator, np.float64))
    quotient: FloatArray = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
    return quotient


def _answered_records(
    predictions: npt.ArrayLike,
    groups_N: npt.ArrayLike,
    labels_N: npt.ArrayLike | None,
    answered_N: npt.ArrayLike | None,
    *,
    num_groups: int,
    num_classes: int,
) -> tuple[IndexArray, IndexArray, FloatArray]:
    predicted, groups = np.asarray(predictions), np.asarray(groups_N)
    labels = np.zeros(len(groups), dtype=np.int64) if labels_N is None else np.asarray(labels_N)
    keep = np.ones(len(groups), np.bool_) if answered_N is None else np.asarray(answered_N, dtype=np.bool_)
    if not len(predicted) == len(groups) == len(labels) == len(keep):
        raise ValueError(
            f"Expected as many predictions, groups, labels and answered flags, got {len(predicted)}, "
            f"{len(groups)}, {len(labels)} and {len(keep)}."
        )
    return (
        _indices("groups_N", groups[keep], num_groups),
        _indices("labels_N", labels[keep], 1 if labels_N is None else num_classes),
        _mass(predicted[keep], num_classes),
    )


def _indices(name: str, values_N: npt.NDArray[np.generic], stop: int) -> IndexArray:
    indices_N = values_N.astype(np.int64)
    if (indices_N != values_N).any() or (indices_N < 0).any() or (indices_N >= stop).any():
        raise ValueError(f"Expected {name} to hold integers from 0 to {stop - 1}, got {np.unique(values_N)}.")
    return indices_N


def _mass(predicted: npt.NDArray[np.generic], num_classes: int) -> FloatArray:
    if predicted.ndim == 1:
        return np.eye(num_classes)[_indices("predictions", predicted, num_classes)]
    mass_NC = predicted.astype(np.float64)
    if mass_NC.ndim != 2 or mass_NC.shape[1] != num_classes:
        raise ValueError(f"Expected predictions of shape (N,) or (N, {num_classes}), got {predicted.shape}.")
    # Softmax in float32 sums to 1 up to rounding.
    if not ((mass_NC >= 0).all() and np.allclose(mass_NC.sum(axis=1), 1, atol=1e-4)):
        raise ValueError("Expected every row of predictions to be probabilities that sum to 1.")
    return mass_NC


def _resample_persons(tables_P: FloatArray, generator: np.random.Generator, num_replicates: int) -> FloatArray:
    """Sums of as many tables as there are persons, drawn evenly: (R, cells)."""
    even_P = np.full(len(tables_P), 1 / len(tables_P))
    chunks = [
        generator.multinomial(len(tables_P), even_P, size=len(chunk)) @ tables_P.reshape(len(tables_P), -1)
        for chunk in np.array_split(range(num_replicates), -(-num_replicates // _REPLICATES_PER_CHUNK))
    ]
    return np.concatenate(chunks)


def _resample_mass(
    cells_N: IndexArray, mass_NC: FloatArray, num_cells: int, generator: np.random.Generator, num_replicates: int
) -> FloatArray:
    num_records = len(cells_N)
    drawn_RN = generator.integers(num_records, size=(num_replicates, num_records))
    # How often each record was drawn: a product per cell then does what gathering every replicate would.
    weights_RN = np.stack([np.bincount(row, minlength=num_records) for row in drawn_RN]).astype(np.float64)
    table = np.zeros((num_replicates, num_cells, mass_NC.shape[1]))
    for cell in np.unique(cells_N):
        members = cells_N == cell
        table[:, cell] = weights_RN[:, members] @ mass_NC[members]
    return table
