"""Small cells: which numbers of an evaluation may be shown, so that no group's few records can be counted.

A cell is a group, or the records of a group with one true label, with one prediction, with both, or with a right, a
wrong or a refused prediction; its size counts records, or persons if the data set names them. A cell with at least 1
and fewer than ``least`` is small, and no number may reveal it. All groups together are no cell: their totals are shown
unless a cell follows from them. A small group is left out of everything: of gaps, of totals, and of the records that
other groups are compared with. The total number of test records may be public (``data.num_test``), so every small group
leaves out exactly ``least``: its own and the last ones of the largest group. The number left out then reveals nothing,
even if two groups are small. Two published evaluations of the same records also reveal their difference, so the records
that only one of them includes must not form a small cell either.

Of the other groups, numbers are hidden group by group (:func:`hidden_numbers`): first those that count a small cell,
then more, the least informative first, until no small cell follows from the rest. A cell follows if its size is known
to lie in a range narrower than three tenths of ``least`` (six tenths for a cell by label, or of right or wrong ones):
the range over all tables of numbers from 0 on that agree with what is shown, which linear programs find. Hidden of a
group are its confusion table, then the right predictions of each class, then accuracy or rates of predictions.
Evaluations of other models on the same records may be published too. So counts by true label are hidden by the labels
alone, in each evaluation alike, and all others count as known, unless so few predictions are wrong that rates of
predictions or the accuracy of all would have to be hidden for this reason alone: then only what the evaluation itself
shows counts.

Shapes: N records, G groups, C classes, Y true labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.fairness import rates
from fairpate.types import BoolArray, FloatArray

_Array = npt.NDArray[Any]

_ROUNDING = 1e-9
_LEAST_RANGE = 0.3  # of the least size: of ten, four sizes
_SLACK = 1e-6  # records, in linear programs


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The records ``kept_N`` (a mask) that public numbers may describe without revealing the size of a small group.
    They exclude the groups ``small_G`` (a mask)."""

    kept_N: BoolArray
    small_G: BoolArray


def shown_records(
    groups_N: _Array,
    answered_N: BoolArray,
    *,
    least: int,
    num_groups: int,
    persons_N: npt.ArrayLike | None = None,
    apart_N: BoolArray | None = None,
) -> Shown:
    """Choose which of the answered records (mask ``answered_N``) public numbers may describe, so that no number reveals
    the size of a small group.

    ``least``: a cell of fewer records, or persons, is small. ``apart_N`` marks records that another published
    evaluation of the same records leaves out.
    """
    units_N = np.arange(len(groups_N)) if persons_N is None else np.unique(persons_N, return_inverse=True)[1]
    published = [answered_N] if apart_N is None else [answered_N, answered_N & apart_N]

    def small(part_N: BoolArray) -> BoolArray:
        """Return a mask of the groups with too few records (or persons) among those that ``part_N`` marks."""
        return is_small(_group_sizes(groups_N, part_N, units_N, num_groups), least)

    # Sizes over all records decide, so that the same records are left out for every model that is measured on them.
    small_G = small(np.ones(len(groups_N), dtype=np.bool_))
    kept_N = ~small_G[groups_N]
    while kept_N.any() and (lacking := least * int(small_G.sum()) - len(np.unique(units_N[~kept_N]))) > 0:
        largest = np.bincount(groups_N[kept_N]).argmax()
        # The last records of the largest group fill up the number; the choice depends on no prediction.
        last = list(dict.fromkeys(units_N[kept_N & (groups_N == largest)].tolist()))[-lacking:]
        fewer_N = kept_N & ~np.isin(units_N, last)
        became_small_G = small(fewer_N)
        # An empty cell is not small, but a group that was emptied has to be left out all the same.
        became_small_G[largest] |= not fewer_N[groups_N == largest].any()
        if not became_small_G.any():
            kept_N = fewer_N
            break
        # A group that became small leaves out `least` of its own, and the filling begins again.
        small_G = small_G | became_small_G
        kept_N = ~small_G[groups_N]
    # Last, because it may differ between models: a group of enough records may have too few answers.
    small_G = np.any([small_G, *(small(kept_N & part_N) for part_N in published)], axis=0)
    kept_N &= ~small_G[groups_N]
    return Shown(kept_N=kept_N, small_G=small_G)


@dataclass(frozen=True, kw_only=True)
class HiddenNumbers:
    """The numbers of shown groups that are not published, since a small cell could be computed from them.

    Masks of groups (G,): ``table_G``, whose counts by label and prediction are hidden; ``found_G``, whose right
    predictions of each class are; ``right_G``, whose right predictions are; ``predicted_G``, whose counts by prediction
    are; ``label_G``, whose counts by true label are. Each is part of those before it. Whether numbers of all groups
    together are hidden: ``labels``, by true label; ``errors``, by prediction, and right ones of each class;
    ``accuracy``, the right predictions.
    """

    table_G: BoolArray
    found_G: BoolArray
    right_G: BoolArray
    predicted_G: BoolArray
    label_G: BoolArray
    labels: bool = False
    errors: bool = False
    accuracy: bool = False

    def of(self, name: str) -> BoolArray:
        """Return the mask of the groups that the fairness gap ``name`` has to leave out."""
        needs = {"eo_full": self.table_G, "eo_lowy": self.found_G, "equal_opportunity": self.found_G}
        return needs.get(name, self.right_G if name == "accuracy_parity" else self.predicted_G)

    @property
    def is_ordered(self) -> bool:
        """True if the masks are nested: a group whose single rates are hidden has its larger tables hidden too."""
        parts = self.right_G | self.predicted_G | self.label_G
        return bool((self.found_G >= parts).all() and (self.table_G >= self.found_G).all())


def is_small(sizes: FloatArray, least: int) -> BoolArray:
    """Return a mask of the cells with too few units; an empty cell is not small."""
    # Sums of probabilities are not quite whole.
    small: BoolArray = (sizes > _ROUNDING) & (sizes < least - _ROUNDING) & (least > 1)
    return small


def unit_counts(mass_NK: FloatArray, cells_N: _Array, num_cells: int, units_N: _Array) -> FloatArray:
    """Return how many units (records or persons) have records in each cell, for each of K outcomes (num_cells, K). A
    record has an outcome with the probability ``mass_NK``; a unit with several records in a cell counts at most
    once."""
    pairs, pair_N = np.unique(cells_N * (units_N.max(initial=0) + 1) + units_N, return_inverse=True)
    found = np.zeros((num_cells, mass_NK.shape[1]))
    for k, mass_N in enumerate(mass_NK.T):
        of_pair = np.minimum(np.bincount(pair_N, weights=mass_N, minlength=len(pairs)), 1.0)
        cell = pairs // (units_N.max(initial=0) + 1)
        found[:, k] = np.bincount(cell, weights=of_pair, minlength=num_cells)
    return found


def _group_sizes(groups_N: _Array, part_N: BoolArray, units_N: _Array, num_groups: int) -> FloatArray:
    """Return how many units (records or persons) each group has among the records that ``part_N`` marks."""
    return unit_counts(np.ones((int(part_N.sum()), 1)), groups_N[part_N], num_groups, units_N[part_N])[:, 0]


_MOST_CELLS = 1000
"""The most cells by group, label and prediction for which linear programs decide what follows."""


def hidden_numbers(
    predictions_N: _Array,
    records: Mapping[str, Any],
    units_N: _Array,
    parts: Sequence[BoolArray],
    least: int,
    least_predicted: int,
    *,
    labels_together: bool,
) -> HiddenNumbers:
    """Choose what is not published of the shown records, so that no small cell follows from what is.

    ``records`` are the arguments of :func:`rates.joint_table`, ``parts`` marks of records whose counts are public, each
    by itself; ``least_predicted`` is the size that cells by prediction need, and ``least`` that of cells by label.
    """
    small = [_small_cells(predictions_N, records, units_N, part_N, least, least_predicted) for part_N in parts]
    of_labels, cells = [each.of_labels for each in small], [each.cells for each in small]
    few = {name: np.any([each.few[name] for each in small], axis=0) for name in small[0].few}
    num_groups = records["num_groups"]
    size_G = small[0].table.sum(axis=(1, 2))
    present_G, nobody_G = size_G > 0, np.zeros(num_groups, np.bool_)

    def grown(mask_G: BoolArray) -> Iterator[BoolArray]:
        """Yield ``mask_G``, then with one more group each time, smaller ones first, up to all groups."""
        yield mask_G
        for z in np.argsort(size_G, kind="stable"):
            if present_G[z] and not mask_G[z]:
                mask_G = mask_G | (np.arange(num_groups) == z)
                yield mask_G

    # Tables that agreed with what was shown before: most agree with the next choice too.
    possible: list[list[FloatArray]] = [[each.table] for each in small]

    def is_safe(tried: HiddenNumbers, of: Sequence[list[_Cell]]) -> bool:
        for known, each in zip(possible, of, strict=True):
            if (place := _following(known, each, tried, least)) is not None:
                # Next time first: a cell often still follows when one number more is hidden.
                each.insert(0, each.pop(place))
                return False
        return True

    # Labels first, and from labels alone: any model that is measured on these records may show the others.
    every: dict[str, Any] = dict.fromkeys(("table_G", "found_G", "right_G", "predicted_G"), ~nobody_G)
    hidden = HiddenNumbers(**every, label_G=nobody_G, errors=True, accuracy=True)
    if labels_together and few["label_G"].any():
        few["label_G"] = present_G
    for label_G in grown(few["label_G"]):
        hidden = replace(hidden, label_G=label_G)
        if is_safe(hidden, of_labels):
            break
    else:
        hidden = replace(hidden, labels=True)

    # Then what depends on the model.
    few["found_G"] = few["found_G"] | few["right_G"] | few["predicted_G"] | hidden.label_G
    few["table_G"] = few["table_G"] | few["found_G"]
    first: dict[str, Any] = {name: few[name] for name in every} | {"errors": False, "accuracy": False}
    all_hidden: dict[str, Any] = dict.fromkeys(every, present_G) | {"errors": True, "accuracy": True}
    hidden = replace(hidden, **first)
    first["label_G"], all_hidden["label_G"] = hidden.label_G, present_G
    steps = ["table_G", "found_G", "right_G", "errors", "label_G"]
    steps += ["predicted_G", "accuracy"] if least_predicted > 1 else ["accuracy"]
    if small[0].table.size > _MOST_CELLS and any(cells):
        # What is left of so many cells has room enough.
        kept = [] if few["predicted_G"].any() else ["predicted_G"]
        kept += ["accuracy"] if present_G.sum() > 1 or not few["right_G"].any() else []
        of_all: dict[str, Any] = {name: value for name, value in all_hidden.items() if name not in kept}
        return replace(hidden, **of_all)
    # The least informative numbers go first, and come back one by one where others suffice.
    done = list[str]()
    for step in steps:
        if np.array_equal(first[step], all_hidden[step]):
            continue
        if is_safe(hidden, cells):
            break
        hidden = replace(hidden, **{step: all_hidden[step]})
        done.append(step)
    for step in reversed(done[:-1]):
        for value in grown(first[step]) if step.endswith("_G") else [False]:
            change: dict[str, Any] = {step: value}
            tried = replace(hidden, **change)
            if np.array_equal(value, all_hidden[step]):
                break
            if tried.is_ordered and is_safe(tried, cells):
                hidden = tried
                break
    return hidden


_Cell = tuple[int, BoolArray]
"""A group, and which of its counts by label and prediction (Y, C) are in the cell."""


class _SmallCells(NamedTuple):
    """The table of counts (G, Y, C) of some records, all its small cells and those by true label alone
    (``of_labels``), and by the names of :class:`HiddenNumbers` which groups (G,) have one."""

    table: FloatArray
    of_labels: list[_Cell]
    cells: list[_Cell]
    few: dict[str, BoolArray]


def _small_cells(
    predictions_N: _Array,
    records: Mapping[str, Any],
    units_N: _Array,
    part_N: BoolArray,
    least: int,
    least_predicted: int,
) -> _SmallCells:
    """Return the small cells of the records that ``part_N`` marks; other arguments as in :func:`hidden_numbers`."""
    num_groups, num_classes = records["num_groups"], records["num_classes"]
    groups, labels, units = records["groups_N"][part_N], records["labels_N"][part_N], units_N[part_N]
    predicted = predictions_N[part_N]
    mass_NC = np.eye(num_classes)[predicted.astype(np.int64)] if predicted.ndim == 1 else predicted
    label_NC = np.eye(num_classes)[labels]
    right_NC = mass_NC * label_NC
    right_N = right_NC.sum(axis=1)
    both = unit_counts(mass_NC, groups * num_classes + labels, num_groups * num_classes, units)
    small_of = {"table_G": is_small(both.reshape(num_groups, -1), least_predicted)}
    for name, mass_NK in {
        "label_G": label_NC,
        # Of each class, the records that are missed and those taken for it.
        "found_G": np.concatenate([label_NC - right_NC, mass_NC - right_NC], axis=1),
        "predicted_G": mass_NC,
        "right_G": np.stack([1 - right_N, right_N], axis=1),
    }.items():
        size = least if name == "label_G" else least_predicted
        small_of[name] = is_small(unit_counts(mass_NK, groups, num_groups, units), size)
    missed_GC, mistaken_GC = np.split(small_of["found_G"], 2, axis=1)
    right_YC, all_YC = np.eye(num_classes) == 1, np.ones((num_classes, num_classes)) == 1
    of_labels = [(z, all_YC & right_YC[:, [y]]) for z, y in np.argwhere(small_of["label_G"])]
    cells = [
        *((z, all_YC & right_YC[k]) for z, k in np.argwhere(small_of["predicted_G"])),
        *((z, right_YC == bool(right)) for z, right in np.argwhere(small_of["right_G"])),
        *of_labels,
        *((z, all_YC & right_YC[:, [c]] & ~right_YC) for z, c in np.argwhere(missed_GC)),
        *((z, all_YC & right_YC[c] & ~right_YC) for z, c in np.argwhere(mistaken_GC)),
        *(
            (z, np.arange(num_classes**2).reshape(num_classes, -1) == cell)
            for z, cell in np.argwhere(small_of["table_G"])
        ),
    ]
    return _SmallCells(
        table=rates.joint_table(predictions_N, **{**records, "answered_N": part_N}),
        of_labels=of_labels,
        cells=cells,
        few={name: np.asarray(small_GK.any(axis=1)) for name, small_GK in small_of.items()},
    )


def _following(possible: list[FloatArray], cells: Sequence[_Cell], hidden: HiddenNumbers, least: int) -> int | None:
    """Return the place of a cell whose size is known to lie in a range narrower than ``_LEAST_RANGE`` times ``least``
    (twice as much for a cell by label, or of right or wrong ones), given all numbers of a table that are not
    ``hidden``; None if there is none. The first cell is tried first.

    The range is that of all tables of numbers from 0 on, whole or not, that agree with the numbers shown: two linear
    programs. The first of the ``possible`` tables (G, Y, C) is that of the counts; others that are found are added.
    """
    if not cells:
        return None
    table_GYC = possible[0]
    at = np.flatnonzero(hidden.table_G & (table_GYC.sum(axis=(1, 2)) > 0))
    unknown_GYC = table_GYC[at]
    z, y, k = np.indices(unknown_GYC.shape).reshape(3, -1)
    is_right, classes = y == k, range(table_GYC.shape[2])
    known = []
    for place, group in enumerate(at.tolist()):
        here = z == place
        known.append(here)
        known += [] if hidden.predicted_G[group] else [here & (k == each) for each in classes]
        known += [] if hidden.label_G[group] else [here & (y == each) for each in classes]
        known += [] if hidden.right_G[group] else [here & is_right]
        known += [] if hidden.found_G[group] else [here & is_right & (y == each) for each in classes]
    # An error rate is of the records with a label, or with a prediction.
    known += [] if hidden.labels and hidden.errors else [y == each for each in classes]
    known += [] if hidden.accuracy else [is_right]
    if not hidden.errors:
        known += [k == each for each in classes]
        known += [is_right & (y == each) for each in classes]
    rows = np.array(known, np.float64)
    values = rows @ unknown_GYC.ravel()
    constraint = scipy.optimize.LinearConstraint(scipy.sparse.csc_array(rows), values - _SLACK, values + _SLACK)
    cells_K = np.zeros((len(cells), *table_GYC.shape))
    for mask_GYC, (of_group, counts_YC) in zip(cells_K, cells, strict=True):
        mask_GYC[of_group] = counts_YC
    cells_K = cells_K[:, at].reshape(len(cells), -1)
    # Every solution shows possible sizes of all cells, so that few cells need programs of their own.
    others = np.delete(np.arange(len(table_GYC)), at)
    agree = [
        each[at].ravel()
        for each in possible
        if np.array_equal(each[others], table_GYC[others])
        and (np.abs(rows @ each[at].ravel() - values) <= 2 * _SLACK).all()
    ]
    sizes_KS = cells_K @ np.array(agree).T
    low_K, high_K = sizes_KS.min(axis=1), sizes_KS.max(axis=1)
    # One error more of each kind changes the wrong ones by two, and, where accuracies are known, those with a label.
    right_YC = np.eye(len(classes)) == 1
    of_two = (each.all(axis=1).any() or (each == right_YC).all() or (each != right_YC).all() for _, each in cells)
    steps_K = np.where(list(of_two), 2, 1)
    enough_K = steps_K * _LEAST_RANGE * least - 2 * _SLACK * len(rows)

    def solve(costs: FloatArray) -> None:
        nonlocal low_K, high_K
        found = scipy.optimize.milp(costs, constraints=constraint, bounds=scipy.optimize.Bounds(0))
        if found.success:
            solution_GYC = table_GYC.copy()
            solution_GYC[at] = found.x.reshape(unknown_GYC.shape)
            possible.append(solution_GYC)
            low_K, high_K = np.minimum(low_K, cells_K @ found.x), np.maximum(high_K, cells_K @ found.x)

    def is_narrow(place: int) -> bool:
        for sign in (-1, 1):  # more first: of a small cell few records can be missing
            if high_K[place] - low_K[place] < enough_K[place]:
                solve(sign * cells_K[place])
        return bool(high_K[place] - low_K[place] < enough_K[place])

    if is_narrow(0):
        return 0
    # Corners in random directions of the cells that are open, while they show something new.
    generator, before = np.random.default_rng(0), len(cells) + 1
    while 4 < (open_K := high_K - low_K < enough_K).sum() < before:
        before = int(open_K.sum())
        for _ in range(4):
            solve(generator.normal(size=before) @ cells_K[open_K])
    return next((place for place in np.argsort(high_K - low_K).tolist() if is_narrow(place)), None)


def few_refused(groups_N: _Array, refused_N: BoolArray, shown: Shown, units_N: _Array, least: int) -> BoolArray:
    """Return a mask of the groups (G,) whose number of refused records must not be shown: those with few, and never one
    alone, whose number the total would give."""
    size_G = _group_sizes(groups_N, refused_N, units_N, len(shown.small_G))
    hidden_G = is_small(size_G, least)
    others = np.setdiff1d(np.unique(groups_N[shown.kept_N]), np.flatnonzero(hidden_G))
    if hidden_G.sum() == 1 and len(others):
        hidden_G[others[size_G[others].argmin()]] = True
    return hidden_G
