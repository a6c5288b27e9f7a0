"""Discrete Gaussian noise, sampled exactly, and its masses and tails in log space.

The discrete Gaussian N_Z(0, s^2) puts mass proportional to exp(-x^2 / (2 s^2)) on every integer x. One sample at a time
follows Canonne, Kamath and Steinke 2020 (arXiv 2004.00010, Algorithms 1 to 3): rational arithmetic on uniform integers.
Many samples at a time invert the distribution function: the first 64 binary digits of a uniform real number decide,
unless they equal those of a cut (a value of the distribution function); then further digits are drawn. Cuts are exact
to the last digit, so in neither way does a rounded real number decide an outcome. ``s`` is the exact rational value of
the given float.
"""

from __future__ import annotations

import bisect
import decimal
import hashlib
import math
import os
import random
import secrets
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fairpate.types import FloatArray, IntArray

WordArray = npt.NDArray[np.uint64]

OS_ENTROPY = "os_entropy"
SEEDED = "seeded: not private"


class OsEntropy:
    """Noise from the operating system's entropy: the only source for a release that claims privacy.

    ``label`` states whether the noise of a source is private, and is stored with every result of a run.
    ``derive(*parts)`` returns a source for the one release that ``parts`` name; draws for different releases are
    independent.
    """

    label = OS_ENTROPY

    def randbelow(self, n: int) -> int:
        """Draw one integer, uniform on 0 .. n - 1; n >= 1 may exceed 64 bits."""
        return secrets.randbelow(n)

    def derive(self, *parts: str | int) -> OsEntropy:  # noqa: ARG002 - every draw is fresh already
        """Return this source itself: all draws from operating-system entropy are independent."""
        return self

    def machine_words(self, keys: Sequence[str], count: int) -> WordArray:
        """Draw fresh uniform 64-bit words, ``count`` for each of ``keys``, shape (len(keys), count); keys only matter
        for seeded sources."""
        return np.frombuffer(os.urandom(8 * len(keys) * count), dtype=np.uint64).reshape(len(keys), count)


class _BufferedEntropy(OsEntropy):
    """Entropy of the operating system, read 4,096 bits at a time instead of once for every integer."""

    def __init__(self) -> None:
        self._bits, self._num_bits = 0, 0

    def randbelow(self, n: int) -> int:
        wanted = (n - 1).bit_length()
        while True:
            if self._num_bits < wanted:
                # The bits that are left are dropped; whether they are depends on earlier ones only.
                num_bytes = max(512, -(-wanted // 8))
                self._bits, self._num_bits = int.from_bytes(os.urandom(num_bytes), "little"), 8 * num_bytes
            drawn = self._bits & ((1 << wanted) - 1)
            self._bits >>= wanted
            self._num_bits -= wanted
            if drawn < n:
                return drawn


class SeededSource:
    """Reproducible noise from a seed, for experiments and tests: a release with it is not private.

    ``derive(query, attempt)`` depends on the seed and its arguments alone, so a query has the same noise in any order,
    in any process and after resuming.
    """

    label = SEEDED

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._generator = random.Random(seed)

    def randbelow(self, n: int) -> int:
        """Draw one integer, uniform on 0 .. n - 1; this does not change what sources made by ``derive`` draw."""
        return self._generator.randrange(n)

    def derive(self, *parts: str | int) -> SeededSource:
        """Return an independent source for ``parts``; 1 and "1" give different ones, and so do ("ab",) and ("a",
        "b")."""
        return SeededSource(self._digest(parts).hexdigest())

    def machine_words(self, keys: Sequence[str], count: int) -> WordArray:
        """Return uniform 64-bit words, shape (len(keys), count); each row depends on the seed and its key alone."""
        # The suffix keeps these words independent of `derive`, which may break a tie of the same release.
        streams = b"".join(hashlib.shake_256(self._digest((key, "words")).digest()).digest(8 * count) for key in keys)
        # Little-endian on every machine, so that a seed means the same noise everywhere.
        return np.frombuffer(streams, dtype="<u8").astype(np.uint64, copy=False).reshape(len(keys), count)

    def _digest(self, parts: tuple[str | int, ...]) -> hashlib._Hash:
        # `repr` quotes text and separates parts: joined text would give ("ab",) and ("a", "b") one stream.
        return hashlib.sha256(repr((self._seed, *parts)).encode())


NoiseSource = OsEntropy | SeededSource


def buffered(source: NoiseSource) -> NoiseSource:
    """Return a source that reads entropy ahead, for thousands of draws in one call; a seeded one is returned unchanged.
    Never keep it: a forked process would repeat its bits."""
    return _BufferedEntropy() if type(source) is OsEntropy else source


def sample_discrete_gaussian(stddev: float | Fraction, source: NoiseSource) -> int:
    """Draw one exact sample of N_Z(0, stddev^2); ``stddev`` 0 gives 0.

    ValueError for a negative, infinite or undefined ``stddev``.
    """
    if stddev == 0:
        return 0
    variance, scale = _exact_parameters(stddev)
    numerator, denominator = variance.numerator, variance.denominator
    # Accept y with probability exp(-(|y| - variance / scale)^2 / (2 variance)), over one common denominator.
    shift, divisor = denominator * scale, 2 * numerator * denominator * scale * scale
    while True:
        candidate = sample_discrete_laplace(scale, source)
        if bernoulli_exp((abs(candidate) * shift - numerator) ** 2, divisor, source):
            return candidate


@lru_cache(maxsize=64)
def _exact_parameters(stddev: float | Fraction) -> tuple[Fraction, int]:
    require_positive("stddev", float(stddev))
    exact = Fraction(stddev)
    # Candidates of any scale give exact draws; close to the standard deviation, few are rejected (their Algorithm 3).
    return exact**2, math.floor(exact) + 1


def sample_discrete_laplace(scale: int | Fraction, source: NoiseSource) -> int:
    """Draw one exact sample x with mass proportional to ``exp(-|x| / scale)`` on the integers; ``scale`` > 0."""
    numerator, denominator = scale.numerator, scale.denominator
    while True:
        # On a lattice `denominator` times finer the scale is the whole number `numerator`; the division leads back.
        remainder = source.randbelow(numerator)
        if not bernoulli_exp(remainder, numerator, source):
            continue
        # A remainder below the scale and a geometric number of scales: exp(-m / scale) falls into these two factors.
        multiple = 0
        while bernoulli_exp(1, 1, source):
            multiple += 1
        magnitude = (remainder + numerator * multiple) // denominator
        negative = source.randbelow(2)
        if magnitude or not negative:  # otherwise zero would be drawn under both signs
            return -magnitude if negative else magnitude


def bernoulli_exp(numerator: int, denominator: int, source: NoiseSource) -> bool:
    """Draw True with probability exp(-numerator / denominator), exactly, for any ratio >= 0."""
    while True:
        # A factor exp(-1) for every whole of the ratio, then that of the rest.
        step, unit = (numerator, denominator) if numerator <= denominator else (1, 1)
        length = 1
        # Von Neumann's series: with x the ratio, P[length > k] = x^k / k!, so P[length is odd] = 1 - x + x^2 / 2 - ...
        # = exp(-x).
        while source.randbelow(unit * length) < step:
            length += 1
        if numerator <= denominator or length % 2 == 0:
            return length % 2 == 1
        numerator -= denominator


def discrete_gaussians(stddev: float, words: WordArray, source: NoiseSource) -> IntArray:
    """Return one exact sample of N_Z(0, stddev^2) for each of the uniform 64-bit ``words``, in their shape; ``stddev``
    0 gives 0.

    If a word does not decide its sample (less than once in 2^40 words), ``source`` draws further digits. If ``stddev``
    is so large that a table of the distribution function would be too long, ``source`` draws the samples and the words
    are not used. ValueError for a negative, infinite or undefined ``stddev``.
    """
    if stddev == 0:
        return np.zeros(words.shape, dtype=np.int64)
    if stddev > _WIDEST_TABLE:
        source = buffered(source)
        draws = [sample_discrete_gaussian(stddev, source) for _ in range(words.size)]
        return np.array(draws, dtype=np.int64).reshape(words.shape)
    least, cuts = _word_cuts(stddev)
    last_below = cuts.searchsorted(words, side="right") - 1  # the first cut is 0
    drawn: IntArray = last_below + (least + 1)
    undecided = cuts.take(last_below) == words
    if undecided.any():
        drawn[undecided] = [_decided(stddev, word, source) for word in words[undecided].tolist()]
    return drawn


def _decided(stddev: float, digits: int, source: NoiseSource) -> int:
    """Return the sample of a word that equals the ``digits`` of a cut, which leaves open on which side of the cut the
    uniform number lies: ``source`` draws further digits until they differ."""
    num_digits = 64
    while True:
        digits, num_digits = (digits << 64) | source.randbelow(2**64), num_digits + 64
        least, cuts = exact_cuts(stddev, num_digits)
        below = bisect.bisect_right(cuts, digits)
        if cuts[below - 1] != digits:
            return least + below


# The widest noise drawn from a table, which then has about a hundred thousand exact cuts.
_WIDEST_TABLE = 2.0**12


@lru_cache(maxsize=64)
def _word_cuts(stddev: float) -> tuple[int, WordArray]:
    """Return the 64-digit :func:`exact_cuts` of the distribution function: the least integer x, and the cuts as a
    read-only array."""
    require_positive("stddev", stddev)
    least, cuts = exact_cuts(stddev, 64)
    table = np.array(cuts, dtype=np.uint64)
    # Cached, so every caller gets the same array.
    table.setflags(write=False)
    return least, table


def exact_cuts(stddev: float, num_digits: int) -> tuple[int, list[int]]:
    """Return (least, cuts): for x = least, least + 1, ..., each cut has the first ``num_digits`` binary digits of P[N
    <= x], N ~ N_Z(0, stddev^2), as an integer.

    The first cut is 0, and all digits of the last are 1. Every digit is exact: upper and lower bounds of the sums are
    computed with increasing precision until they agree.
    """
    twice_variance, spare = 2 * Fraction(stddev) ** 2, 32
    while True:
        precision = num_digits + spare
        # From here on a mass is below 2^-precision.
        reach = math.ceil(stddev * math.sqrt(2 * math.log(2) * precision)) + 2
        # log10(2) < 1/3: these decimal digits hold `precision` binary ones, with 20 to spare.
        context = decimal.Context(prec=precision // 3 + 20, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
        unit, numerator = decimal.Decimal(2**precision), decimal.Decimal(twice_variance.numerator)
        # exp(-x^2 / (2 stddev^2)) 2^precision for x = 0 .. reach, each within one unit.
        half = []
        for x in range(reach + 1):
            exponent = context.divide(decimal.Decimal(-(x**2) * twice_variance.denominator), numerator)
            half.append(int(context.multiply(context.exp(exponent), unit)))
        masses = [*half[:0:-1], *half]
        # Each mass may be off by one unit, and all that is left out on one side together by less than ``reach`` units.
        error = len(masses) + 2 * reach
        total, running, cuts = sum(masses), 0, []
        for mass in masses:
            running += mass
            low = (max(running - error, 0) << num_digits) // (total + error)
            high = ((running + error) << num_digits) // (total - error)
            # The upper bound of the last cut may pass 1.
            if low != min(high, 2**num_digits - 1):
                break  # the bounds leave a digit open
            cuts.append(low)
        else:
            assert cuts[0] == 0
            assert cuts[-1] == 2**num_digits - 1
            return -reach, cuts
        spare *= 2


def require_positive(field: str, value: float) -> None:
    """Raise ValueError, which names ``field``, unless ``value`` is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"Expected 0 < {field} < inf, got {value}.")


def log_survival_table(stddev: float, max_value: int, *, of_difference: bool = False) -> FloatArray:
    """Return ln P[N >= t] for t = 0 .. max_value and N ~ N_Z(0, stddev^2); read-only, shape (max_value + 1,).

    With ``of_difference``, return ln P[N_a - N_b >= t] for two independent such variables. Their difference is not a
    discrete Gaussian: its mass at d is exp(-d^2 / (4 s^2)) times a sum over the integers (d even) or over the half
    integers (d odd), and these sums differ visibly below s = 1.
    """
    if not 0 <= max_value <= 2**24:
        raise ValueError(
            f"Expected 0 <= max_value <= 2^24, got {max_value}; lower it, or make the threshold behind it inf."
        )
    # The next power of two, so that similar sizes share one cached table.
    size = 1 << max(8, int(max_value).bit_length())
    return _tails(float(stddev), size, of_difference=of_difference)[: max_value + 1]


def log_masses(stddev: float) -> tuple[IntArray, FloatArray]:
    """Return all values x of N ~ N_Z(0, stddev^2) within 14 standard deviations, ascending, and ln P[N = x]."""
    require_positive("stddev", stddev)
    values = np.arange(-_margin(stddev), _margin(stddev) + 1)
    return values, -(values.astype(np.float64) ** 2) / (2 * stddev**2) - _log_lattice_sum(math.sqrt(2) * stddev, 0.0)


def log_difference_masses(stddev: float) -> tuple[IntArray, FloatArray]:
    """Return all values d of the difference N_a - N_b of two variables of N_Z(0, stddev^2), each within 14 standard
    deviations, ascending, and ln P[N_a - N_b = d]."""
    require_positive("stddev", stddev)
    values = np.arange(-2 * _margin(stddev), 2 * _margin(stddev) + 1)
    log_lattice_sums = np.array([_log_lattice_sum(stddev, offset) for offset in (0.0, 0.5)])[values % 2]
    squares = values.astype(np.float64) ** 2 / (4 * stddev**2)
    # The last term is the normaliser of both variables: sum over x of exp(-x^2 / (2 s^2)), squared.
    return values, log_lattice_sums - squares - 2 * _log_lattice_sum(math.sqrt(2) * stddev, 0.0)


def log_survival_and_complement(stddev: float, at_V: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return ln P[N >= t] and ln P[N < t] for the integers t in ``at_V``, of either sign, and N ~ N_Z(0, stddev^2).

    The smaller of the two is computed directly, because 1 minus the larger would lose its digits.
    """
    # By symmetry P[N < t] = P[N >= 1 - t]; of t and 1 - t exactly one is positive and has the smaller tail.
    upper_V = np.maximum(at_V, 1 - at_V)
    small_V = log_survival_table(stddev, int(upper_V.max(initial=1)))[upper_V]
    # The small tail is below 1/2, so that 1 - p keeps its digits.
    large_V = np.log1p(-np.exp(small_V))
    return np.where(at_V >= 1, small_V, large_V), np.where(at_V >= 1, large_V, small_V)


@lru_cache(maxsize=128)
def _tails(stddev: float, max_value: int, *, of_difference: bool) -> FloatArray:
    """Return the table of :func:`log_survival_table`, read-only because the cached array is shared by all callers."""
    require_positive("stddev", stddev)
    values = np.arange(max_value + _margin(stddev))
    log_masses = -(values.astype(np.float64) ** 2) / ((4 if of_difference else 2) * stddev**2)
    if of_difference:
        log_masses += np.where(values % 2 == 0, _log_lattice_sum(stddev, 0.0), _log_lattice_sum(stddev, 0.5))
        # The mass at 0 counts once, every other one under both signs.
        log_total = np.logaddexp(log_masses[0], math.log(2) + np.logaddexp.reduce(log_masses[1:]))
    else:
        log_total = math.log(1 + 2 * float(np.exp(log_masses[1:]).sum()))
    # From the smallest mass on, in log space: far tails keep their digits.
    tails = np.minimum(np.logaddexp.accumulate((log_masses - log_total)[::-1])[::-1], 0.0)  # rounding may pass ln 1
    tails.setflags(write=False)
    return tails[: max_value + 1]


def _log_lattice_sum(stddev: float, offset: float) -> float:
    """Return ln of the sum over the integers x of exp(-(x + offset)^2 / stddev^2)."""
    points = np.arange(-_margin(stddev), _margin(stddev) + 1) + offset
    return float(np.logaddexp.reduce(-(points**2) / stddev**2))


def _margin(stddev: float) -> int:
    """Return how many integers beyond the last value of a table are summed too: about 14 standard deviations. The
    probability mass beyond these is below e^-49 of the table's."""
    return math.ceil(14 * stddev) + 10
