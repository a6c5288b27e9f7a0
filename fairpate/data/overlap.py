"""Records of public parts that equal private ones: when chance explains them, and when only a copy does.

What is called public is read without noise: the pool trains and calibrates models, and test records give exact metrics.
If a public file is a copy of the private one, or contains a part of it, a run states an epsilon that protects nothing.
But equal records alone show no copy: in a table with few columns most records occur several times, in any two samples.
So the number of equal records in two parts is compared with what independent samples can have, even samples of two
different distributions. Records count as equal if they have equal features and groups, however a file writes them;
labels, which a pool lacks, are left out.

A value (features and group) occurs A times among private and B times among other records: independent Poisson numbers
with means a and b if the records are independent. Two tests follow, whatever a and b are for each value:

* **Values that occur once in each part.** With w = e^-(a + b), P[A = 1, B = 1] = a b w, P[A = 2, B = 0] = a^2 w / 2 and
  P[A = 0, B = 2] = b^2 w / 2. Summed over all values, the Cauchy-Schwarz inequality gives E[N11] <= 2 sqrt(E[N20]
  E[N02]): values meet across the parts at most as often as within them. A random division of a file with repeated
  records attains the bound. In a copy N11 is large and N02 = 0, since no record of it lacks a private one. The root of
  a Poisson number has a standard deviation of about 1/2, and each root may be wrong by three of these.
* **Values that all occur equally often in both parts.** Given A + B = 2k, P[A = B] <= C(2k, k) / 4^k, so two samples
  agree in all values with at most the product of these probabilities. This finds the copy of a table in which few
  values occur once.

Repetitions may have been changed: a part without any may have been cleaned of them, which hides how often chance
repeats a value, and a copy may repeat each record. So a third test counts each value once, and compares the number of
values that both parts have with what half of the columns explain: of the other part's values, the share of private
records that equal another one there. Where a part has no repetition, the first test needs to exceed this number too.

Copies that were changed (rounded, say) are not found, nor is a sample of a table in which every value occurs often,
which looks like any other sample of it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpate.data.dataset import SPLIT_NAMES, Dataset
from fairpate.types import DataError, IntArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    from torch import Tensor

    Records = tuple[Tensor, npt.NDArray[Any] | None]
    """Features (N, ...) and, if known, groups (N,), as codes or names."""

PUBLIC_RECORD = (
    "a public record is one that anyone may see, such as a published or a made-up one, and no copy of a private record"
)
_ROOT_ERROR = 1.5
_LOG_CHANCE = math.log(1e-9)


def require_no_copy(private: Records, others: Mapping[str, Records]) -> None:
    """Raise DataError for each of the ``others``, by name, of which more records equal one of ``private`` than chance
    explains. Groups are compared if both have them.

    The outcome depends on private records: it is an error for the operator, and is in no file under ``public/``. Anyone
    who sees the error, or that nothing was published, learns that many of these other records, which are public, are
    private ones too; the remark ``reading_tells`` of a statement says so.
    """
    (x, groups), faults = private, []
    if not len(x):
        return
    repeated = _repeated_in_part(x)
    for name, (other_x, other_groups) in others.items():
        has_groups = groups is not None and other_groups is not None
        private_N, other_M = (_keys(each, z if has_groups else None) for each, z in (private, others[name]))
        if equal := equal_by_copy(private_N, other_M, repeated_in_part=repeated):
            faults.append(
                f"{name}: {equal:,} of its {len(other_x):,} records equal private ones in features"
                f"{' and group' * has_groups}, more than chance explains; give records of another source: "
                f"{PUBLIC_RECORD}. Leaving out the equal ones does not help, because what is left then shows which "
                "records are private."
            )
    if faults:
        raise DataError("\n".join(faults))


def require_apart(dataset: Dataset) -> None:
    """Raise DataError if public, validation or test records of ``dataset`` are a copy of private ones; see
    :func:`require_no_copy`."""
    private, *others = ((split.x, split.z.numpy()) for split in dataset.splits.values())
    names = (f"The {name} split" for name in SPLIT_NAMES[1:])
    require_no_copy(private, {name: each for name, each in zip(names, others, strict=True) if len(each[0])})


def equal_by_copy(private_N: IntArray, other_M: IntArray, *, repeated_in_part: float) -> int:
    """Return how many of the M other records equal a private one if chance cannot explain so many, otherwise 0.

    ``private_N`` and ``other_M`` are keys of the records' values, such as hashes: equal values have equal keys.
    ``repeated_in_part``: the share of private records that equal another one in a part of the columns.
    """
    values, place_of = np.unique(np.concatenate([private_N, other_M]), return_inverse=True)
    private_V = np.bincount(place_of[: len(private_N)], minlength=len(values))
    other_V = np.bincount(place_of[len(private_N) :], minlength=len(values))
    if not (equal := int(other_V[private_V > 0].sum())):
        return 0
    pairs = (int(((private_V == here) & (other_V == there)).sum()) for here, there in ((1, 1), (2, 0), (0, 2)))
    across, within, within_other = (math.sqrt(number) for number in pairs)
    in_part = math.sqrt(int((other_V > 0).sum()) * repeated_in_part) + _ROOT_ERROR
    most = math.sqrt(2 * (within + _ROOT_ERROR) * (within_other + _ROOT_ERROR))
    if min(private_V.max(), other_V.max()) < 2:
        most = max(most, in_part)
    in_both = math.sqrt(int(((private_V > 0) & (other_V > 0)).sum()))
    if across - _ROOT_ERROR > most or in_both - _ROOT_ERROR > max(in_part, math.sqrt(2) * _ROOT_ERROR):
        return equal
    if private_V.max() > 1 and np.array_equal(private_V, other_V):
        chances = (math.lgamma(2 * k + 1) - 2 * math.lgamma(k + 1) - k * math.log(4) for k in private_V.tolist())
        return equal if sum(chances) < _LOG_CHANCE else 0
    return 0


def _repeated_in_part(x: Tensor) -> float:
    """Return the share of the records ``x`` that equal another one in half of the columns, for the half in which it is
    smaller. For pictures, of which hardly two are alike by chance, return the share that equals another one as a
    whole; for a single column, the share of the numbers on an even grid that are values of the column."""
    if x.ndim == 2 and x.shape[1] == 1:
        values = np.unique(x.numpy())
        steps = np.ptp(values) / np.diff(values).min() if len(values) > 1 else 0.0
        return float(len(values) / (1 + steps))
    parts = [x] if x.ndim > 2 else [x[:, 0::2], x[:, 1::2]]
    counts = (np.unique(_keys(part, None), return_counts=True)[1] for part in parts)
    return min(float(each[each > 1].sum()) for each in counts) / len(x)


def _keys(x: Tensor, groups: npt.NDArray[Any] | None) -> IntArray:
    """Return a 64-bit key of each record's features and group (without ``groups``: of its features), equal for equal
    records."""
    rows = x.numpy()
    if rows.dtype != np.uint8:
        rows = rows + np.float32(0)  # no negative zero, which is equal to zero and has other digits
    codes = itertools.repeat(0) if groups is None else groups.tolist()
    return np.fromiter((hash((row.tobytes(), code)) for row, code in zip(rows, codes, strict=False)), np.int64)
