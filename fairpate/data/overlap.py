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

:func:`doubts` looks for weaker signs, which are said and refuse nothing. Copies that were rounded, or changed a little,
are found by the same tests on numbers that are rounded to coarser steps, in the four columns with most values. A few
private records among others are found by how many more values occur once in each part than repetitions explain. A
sample of a table in which every value occurs often looks like any other sample of it, and is not found: with a tenth of
private records in the pool of COMPAS, no statistic that was tried (values that occur once in each part, twice in all or
once in all, and the likelihood ratio of how often they occur) lies more than 2.3 standard deviations from that of a
random division. Where equal records were kept in one part (Adult), the share of records with an equal one shows such a
tenth, at five standard deviations; but a pool of another source, in which more records repeat, shows the same.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpate.data.dataset import SPLIT_NAMES, Dataset
from fairpate.types import DataError, FloatArray, IntArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    from torch import Tensor

    Records = tuple[Tensor, npt.NDArray[Any] | None]
    """Features (N, ...) and, if known, groups (N,), as codes or names."""

PUBLIC_RECORD = (
    "a public record is one that anyone may see, such as a published or a made-up one, and no copy of a private record"
)
_ROOT_ERROR = 1.5
_MOST_ROUNDED, _FEW_VALUES = 4, 20  # columns that are rounded; values of a column that is compared as it is
_ONE_NUMBER = 1e-6  # of the width of a column
# Steps over the least difference of a column (0: a share of its width), and where their ends lie: numbers may be
# rounded to the nearest one or cut off.
_ROUNDINGS = ((1, 0.5), (1, 0.01), (10, 0.5), (100, 0.5), (0, 0.5))
_LEAST_CELLS, _CELLS = 16, 64
_FAR = 4.0  # standard deviations
_KEYS_AT_ONCE = 4096
_LOG_CHANCE = math.log(1e-9)


def require_no_copy(private: Records, others: Mapping[str, Records]) -> None:
    """Raise DataError for each of the ``others``, by name, of which more records equal one of ``private`` than chance
    explains. Groups are compared if both have them.

    The outcome depends on private records: it is an error for the operator, and is in no file under ``public/``. Anyone
    who sees the error, or that nothing was published, learns that many of these other records, which are public, are
    private ones too; the remark ``reading_tells`` of a statement says so.
    """
    if not len(private[0]):
        return
    repeated, faults = _repeated_in_part(private[0]), []
    for name, has_groups, own_N, other_M in _compared(private, others):
        if equal := equal_by_copy(own_N, other_M, repeated_in_part=repeated):
            faults.append(
                f"{name}: {equal:,} of its {len(other_M):,} records equal private ones in features"
                f"{' and group' * has_groups}, more than chance explains; give records of another source: "
                f"{PUBLIC_RECORD}. Leaving out the equal ones does not help, because what is left then shows which "
                "records are private."
            )
    if faults:
        raise DataError("\n".join(faults))


def doubts(private: Records, others: Mapping[str, Records]) -> tuple[str, ...]:
    """Return a sentence for each of the ``others``, by name, that may contain changed copies of ``private`` records, or
    a few copies: signs that are too weak to refuse it.

    Like an error of :func:`require_no_copy`, they depend on private records and are for the operator alone.
    """
    x, found = private[0], []
    if x.ndim != 2 or x.shape[1] < 2 or not len(x):
        return ()
    some = {name: records for name, records in others.items() if len(records[0])}
    for name, _, own_N, other_M in _compared(private, some):
        alike, how = _more_than_chance(own_N, other_M), "equal private ones, of those that occur once,"
        if not alike:
            alike, how = _near(x.numpy(), some[name][0].numpy()), "equal private ones once numbers are rounded,"
        if alike:
            found.append(
                f"{name}: {alike:,} of its {len(other_M):,} records {how} more than chance explains; if they "
                f"were made from private records, epsilon does not cover them: {PUBLIC_RECORD}."
            )
    return tuple(found)


def _compared(private: Records, others: Mapping[str, Records]) -> Iterator[tuple[str, bool, IntArray, IntArray]]:
    """Yield for each of the ``others`` its name, whether groups are compared, which both need to have, and the keys of
    the private and of the other records."""
    (x, groups), own = private, dict[bool, IntArray]()
    for name, (other_x, other_groups) in others.items():
        has_groups = groups is not None and other_groups is not None
        if has_groups not in own:
            own[has_groups] = _keys(x, groups if has_groups else None)
        yield name, has_groups, own[has_groups], _keys(other_x, other_groups if has_groups else None)


def require_apart(dataset: Dataset) -> None:
    """Raise DataError if public, validation or test records of ``dataset`` are a copy of private ones; see
    :func:`require_no_copy`."""
    require_no_copy(*_parts(dataset))


def doubts_of(dataset: Dataset) -> tuple[str, ...]:
    """Return the :func:`doubts` about the public, validation and test records of ``dataset``."""
    return doubts(*_parts(dataset))


def _parts(dataset: Dataset) -> tuple[Records, dict[str, Records]]:
    private, *others = ((split.x, split.z.numpy()) for split in dataset.splits.values())
    return private, {f"The {name} split": each for name, each in zip(SPLIT_NAMES[1:], others, strict=True)}


def _occurrences(private_N: IntArray, other_M: IntArray) -> tuple[IntArray, IntArray]:
    """Return how often each value that occurs in either part occurs among the private and among the other records."""
    values, place_of = np.unique(np.concatenate([private_N, other_M]), return_inverse=True)
    private_V, other_V = (np.bincount(places, minlength=len(values)) for places in np.split(place_of, [len(private_N)]))
    return private_V, other_V


def _rare(private_V: IntArray, other_V: IntArray) -> tuple[int, ...]:
    """Return N11, N20 and N02: how many values occur once in each part, twice in the private one alone, and twice in
    the other one alone."""
    return tuple(int(((private_V == here) & (other_V == there)).sum()) for here, there in ((1, 1), (2, 0), (0, 2)))


def _more_than_chance(private_N: IntArray, other_M: IntArray) -> int:
    """Return how many of the other records equal a private one, if clearly more values occur once in each part than
    repetitions within either part explain; otherwise 0, as for a part without repetitions.

    Of one distribution, E[N11] is 2 M / N of E[N20] and 2 N / M of E[N02]. Of two it is at most the geometric mean of
    the two, which is below the larger one.
    """
    private_V, other_V = _occurrences(private_N, other_M)
    across, within, within_other = _rare(private_V, other_V)
    if min(private_V.max(), other_V.max()) < 2:
        return 0
    ratio = 2 * len(other_M) / len(private_N)
    expected, weight = max((within * ratio, ratio), (within_other * 4 / ratio, 4 / ratio))
    is_far = across - expected > _FAR * math.sqrt(across + weight * expected + weight**2)
    return int(other_V[private_V > 0].sum()) if is_far else 0


def _near(x: npt.NDArray[Any], other_x: npt.NDArray[Any]) -> int:
    """Return how many of the other records equal a private one after rounding, for the steps with which most do, if
    chance does not explain this number; otherwise 0."""
    parts, columns = (x, other_x), range(x.shape[1])
    # A thousand records show which columns have few values; columns of other kinds are not compared.
    seen = [len(np.unique(np.concatenate([part[:1000, column] for part in parts]))) for column in columns]
    kept = [column for column in columns if seen[column] <= _FEW_VALUES]
    rounded = [column for column in np.argsort(-np.array(seen), kind="stable")[:_MOST_ROUNDED] if column not in kept]
    odd = np.random.default_rng(0).integers(1, 2**62, size=(2, x.shape[1])) * 2 + 1

    def hashed(number_N: FloatArray, column: int) -> IntArray:
        # Equal numbers have equal hashes; both words spread their bits.
        word_N = (number_N.astype(np.float64) + 0.0).view(np.int64)
        return (word_N ^ (word_N >> 29)) * odd[0, column] ^ (word_N * odd[1, column] >> 17)

    # Two halves of the columns show what chance repeats.
    halves = [[np.zeros(len(part), np.int64) for _ in range(2)] for part in parts]
    for place, column in enumerate(kept):
        for part, of_part in zip(parts, halves, strict=True):
            of_part[place % 2] += hashed(part[:, column], column)
    # Origin, least difference and width of each rounded column, on the grid of the part with the coarser numbers.
    grids = []
    for column in rounded:
        values = [np.unique(part[:, column].astype(np.float64)) for part in parts]
        width = float(np.ptp(np.concatenate(values))) or 1.0
        # Floats that differ by their last digits are one number.
        gaps = (np.diff(each) for each in values)
        least = [float(each[each > _ONE_NUMBER * width].min(initial=width)) for each in gaps]
        grids.append((values[int(least[1] >= least[0])][0], max(least), width))
    found = 0
    for step, shift in _ROUNDINGS if rounded else ():
        keys = [[half.copy() for half in of_part] for of_part in halves]
        for place, (column, (origin, least_gap, width)) in enumerate(zip(rounded, grids, strict=True)):
            cell = min(least_gap * step, max(least_gap, width / _LEAST_CELLS)) if step else width / _CELLS
            for part, of_part in zip(parts, keys, strict=True):
                of_part[place % 2] += hashed(np.floor((part[:, column] - origin) / cell + shift), column)
        (one_N, other_N), (one_M, other_M) = keys
        counts = (np.unique(each, return_counts=True)[1] for each in (one_N, other_N))
        repeated = min(float(each[each > 1].sum()) for each in counts) / len(x)
        found = max(found, equal_by_copy(one_N + 3 * other_N, one_M + 3 * other_M, repeated_in_part=repeated))
    return found


def equal_by_copy(private_N: IntArray, other_M: IntArray, *, repeated_in_part: float) -> int:
    """Return how many of the M other records equal a private one if chance cannot explain so many, otherwise 0.

    ``private_N`` and ``other_M`` are keys of the records' values, such as hashes: equal values have equal keys.
    ``repeated_in_part``: the share of private records that equal another one in a part of the columns.
    """
    private_V, other_V = _occurrences(private_N, other_M)
    if not (equal := int(other_V[private_V > 0].sum())):
        return 0
    across, within, within_other = map(math.sqrt, _rare(private_V, other_V))
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
    rows, keys = x.numpy(), np.zeros(len(x), np.int64)
    for start in range(0, len(x) if x[:1].numel() else 0, _KEYS_AT_ONCE):  # pictures may not fit into memory
        here = slice(start, start + _KEYS_AT_ONCE)
        part = rows[here]
        if part.dtype != np.uint8:
            part = part + np.float32(0)  # no negative zero, which is equal to zero and has other digits
        # All rows of the part become bytes in one call, in half of the time of one row after the other.
        of_rows = np.ascontiguousarray(part).reshape(len(part), -1).view(f"V{part[0].nbytes}")[:, 0].tolist()
        codes = itertools.repeat(0) if groups is None else groups[here].tolist()
        keys[here] = np.fromiter(map(hash, zip(of_rows, codes, strict=False)), np.int64, len(part))
    return keys
