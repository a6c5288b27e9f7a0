"""Which test records may stand behind public numbers: cells of a least size, and nothing from which a smaller follows.

A cell is a group, or the records of a group with one true label; its size is its number of records, or of persons where
the data set names them. A cell of at least 1 and fewer than ``least`` is small.

A small group is left out of everything: of gaps, of totals, and of the records that other groups are compared with.
The number of test records may be public (``data.num_test``), so that every small group leaves out exactly ``least``:
its own and the last ones of the largest group. How many are left out then says nothing of any, also where two are
small. A group that is large, but of which few records are answered, is left out whole.

Counts by true label (confusion matrices, gaps given the true label) are shown of all groups or of none: shown of some,
those of the others would follow from totals. Two published evaluations of the same records show their difference too,
so that the records that are in one alone may be no small cell either.

Shapes: N records, G groups, Y true labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
_Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What public numbers may be of.

    ``kept_N``: the records; ``small_G``: the groups left out; ``by_label``: whether counts by group and true label may
    be shown, ``totals_by_label`` whether those of all groups together.
    """

    kept_N: BoolArray
    small_G: BoolArray
    by_label: bool
    totals_by_label: bool


def shown_records(
    groups_N: _Array,
    labels_N: _Array,
    answered_N: BoolArray,
    *,
    least: int,
    num_groups: int,
    persons_N: npt.ArrayLike | None = None,
    apart_N: BoolArray | None = None,
) -> Shown:
    """What may be shown of the records ``answered_N``; ``apart_N``: those that another evaluation leaves out."""
    units_N = np.arange(len(groups_N)) if persons_N is None else np.unique(persons_N, return_inverse=True)[1]
    published = [answered_N] if apart_N is None else [answered_N, answered_N & apart_N]

    def small(cells_N: _Array, num_cells: int, of: list[BoolArray]) -> BoolArray:
        """The cells that are small among one of the sets of records."""
        sizes = [_sizes(cells_N[part], units_N[part], num_cells) for part in of]
        found: BoolArray = np.any([(size > 0) & (size < least) for size in sizes], axis=0)
        return found

    # By all records: what is left out is then the same for every model that is measured on them.
    small_G = small(groups_N, num_groups, [np.ones(len(groups_N), dtype=np.bool_)])
    kept_N = ~small_G[groups_N]
    while kept_N.any() and (lacking := least * int(small_G.sum()) - len(np.unique(units_N[~kept_N]))) > 0:
        largest = np.bincount(groups_N[kept_N]).argmax()
        last = list(dict.fromkeys(units_N[kept_N & (groups_N == largest)].tolist()))[-lacking:]
        fewer_N = kept_N & ~np.isin(units_N, last)
        became_small_G = small(groups_N, num_groups, [fewer_N])
        became_small_G[largest] |= not fewer_N[groups_N == largest].any()
        if not became_small_G.any():
            kept_N = fewer_N
            break
        small_G = small_G | became_small_G
        kept_N = ~small_G[groups_N]
    small_G = small_G | small(groups_N, num_groups, [kept_N & part for part in published])
    kept_N &= ~small_G[groups_N]
    kept = [kept_N & part for part in published]
    # What one evaluation hides the other may not show.
    by_label = kept if apart_N is None else [*kept, kept_N & answered_N & ~apart_N]
    num_labels = int(labels_N.max(initial=0)) + 1
    return Shown(
        kept_N=kept_N,
        small_G=small_G,
        by_label=not small(groups_N * num_labels + labels_N, num_groups * num_labels, by_label).any(),
        totals_by_label=not small(labels_N, num_labels, kept).any(),
    )


def _sizes(cells_M: _Array, units_M: _Array, num_cells: int) -> _Array:
    """How many different units each cell has."""
    num_units = int(units_M.max(initial=0)) + 1
    return np.bincount(np.unique(cells_M * num_units + units_M) // num_units, minlength=num_cells)
