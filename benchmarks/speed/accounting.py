"""Accounting at scale: confident queries against a loop over queries, loss distributions against dp_accounting.

**Queries.** Both price the same exact joint cost (threshold bit and noisy argmax) of 10,000 queries at 102 Renyi
orders, 200 teachers, 10 classes, continuous noise. The loop is written here from the formulas, independently of the
library: one query at a time, numpy over orders, as published PATE code does it. It is timed on every ``--stride``-th
query and scaled up; library and loop alternate, and the least processor time of ``--repeats`` runs counts for each.

**Loss distributions.** The epsilon of many Gaussian sums over Poisson samples, on a grid of 1e-4: of dp_accounting, of
the library, and of the library's masses composed by a transform without a tilt and without a bound on its rounding.
That is right at a delta of 1e-5, and below the truth at small ones.

    OMP_NUM_THREADS=1 python benchmarks/speed/accounting.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import erfc, log_ndtr

from fairpate.privacy import gnmax
from fairpate.privacy.loss_distributions import Sum, epsilon_and_excess, poisson_gaussians
from fairpate.types import Relation

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

THRESHOLD, THRESHOLD_STDDEV, NOISE_STDDEV = 120.0, 110.0, 20.0
ORDERS_A = np.concatenate([np.arange(2.0, 51.0), np.arange(2.5, 22.0), np.geomspace(52, 512, 33)])


def loop_one_query(votes_C: IntArray, orders_A: FloatArray) -> FloatArray:
    """The joint cost of one query, straight from the formulas."""
    largest = votes_C.max()
    gaps = largest - np.delete(votes_C, votes_C.argmax())
    wrong = min(0.5 * erfc(gaps / (2 * NOISE_STDDEV)).sum(), 1 - 1 / len(votes_C))
    argmax_A = loop_theorem_6(np.log(wrong), orders_A)
    log_yes, log_no = log_answer_probability(largest)
    costs = []
    for neighbour in (largest - 1, largest, largest + 1):
        log_yes_other, log_no_other = log_answer_probability(neighbour)
        answered_A = orders_A * log_yes + (1 - orders_A) * log_yes_other + (orders_A - 1) * argmax_A
        refused_A = orders_A * log_no + (1 - orders_A) * log_no_other
        costs.append(np.logaddexp(answered_A, refused_A) / (orders_A - 1))
    best_A: FloatArray = np.max(costs, axis=0)
    return best_A


def log_answer_probability(largest: int) -> tuple[float, float]:
    """ln P[threshold passed] and ln P[not passed]."""
    margin = (THRESHOLD - largest) / THRESHOLD_STDDEV
    return float(log_ndtr(-margin)), float(log_ndtr(margin))


def loop_theorem_6(log_q: float, orders_A: FloatArray) -> FloatArray:
    """One noisy argmax, numpy over orders."""
    independent_A = orders_A / NOISE_STDDEV**2
    mu2 = NOISE_STDDEV * np.sqrt(-log_q)
    mu1 = mu2 + 1
    cost1, cost2 = mu1 / NOISE_STDDEV**2, mu2 / NOISE_STDDEV**2
    if not (mu2 > 1 and -log_q > cost2):
        return independent_A
    if log_q > (mu2 - 1) * cost2 - mu2 * (np.log1p(1 / (mu1 - 1)) + np.log1p(1 / (mu2 - 1))):
        return independent_A
    log_stay = np.log1p(-np.exp(log_q))
    log_a = log_stay - np.log1p(-np.exp((log_q + cost2) * (1 - 1 / mu2)))
    log_b = cost1 - log_q / (mu1 - 1)
    moments_A = np.logaddexp(log_stay + (orders_A - 1) * log_a, log_q + (orders_A - 1) * log_b)
    return np.where(orders_A < mu1, np.minimum(independent_A, moments_A / (orders_A - 1)), independent_A)


def profiles(num_queries: int, num_teachers: int, num_classes: int) -> dict[str, IntArray]:
    """Histograms with many repeats (confident), and three kinds almost without: unsure, of all kinds, fairly sure."""
    generator = np.random.default_rng(0)

    def draw(concentration_C: FloatArray) -> IntArray:
        shares_QC = generator.dirichlet(concentration_C, size=num_queries)
        return generator.permuted(generator.multinomial(num_teachers, shares_QC), axis=1)

    rest = np.ones(num_classes - 1)
    return {
        "confident": draw(np.concatenate([[200.0], 0.2 * rest])),
        "uniform": draw(np.ones(num_classes)),
        "sparse": draw(np.full(num_classes, 0.1)),
        "spread": draw(np.concatenate([[20.0], rest])),
    }


def best_times(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best processor time of each candidate, in seconds; candidates alternate so that a busy minute hits all."""
    times: dict[str, float] = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, candidate in candidates.items():
            start = time.process_time()
            candidate()
            times[name] = min(times[name], time.process_time() - start)
    return times


def compare(votes_QC: IntArray, stride: int, repeats: int) -> dict[str, float]:
    """Seconds of each way on one profile, after checking that all agree on a sample."""
    sample_QC, first_QC = votes_QC[::stride], votes_QC[:1]
    mechanism: dict[str, Any] = {
        "threshold": THRESHOLD,
        "threshold_stddev_votes": THRESHOLD_STDDEV,
        "noise_stddev_votes": NOISE_STDDEV,
        "orders_A": ORDERS_A,
        "tail": "gaussian",
    }

    def loop() -> FloatArray:
        return np.array([loop_one_query(votes_C, ORDERS_A) for votes_C in sample_QC])

    if not np.allclose(gnmax.confident_gnmax_rdp(sample_QC, **mechanism), loop(), rtol=1e-6, atol=1e-13):
        raise AssertionError("The library and the plain loop disagree.")
    times = best_times(
        {
            "loop": loop,
            "total": lambda: gnmax.confident_gnmax_rdp(votes_QC, **mechanism, total=True),
            "matrix": lambda: gnmax.confident_gnmax_rdp(votes_QC, **mechanism),
            "loop, one query": lambda: loop_one_query(first_QC[0], ORDERS_A),
            "one query": lambda: gnmax.confident_gnmax_rdp(first_QC, **mechanism, total=True),
        },
        repeats,
    )
    times["loop"] *= len(votes_QC) / len(sample_QC)
    return times


def untilted_epsilon(direction: Sum, delta: float) -> float:
    """Epsilon by one transform of all masses as they are; the window is where Chernoff's bound leaves 1e-15."""
    ((losses, count),) = direction
    masses_L, size = losses.masses_L, len(losses.masses_L)
    growth_L, first, last = np.exp(np.arange(size) / size), 0, (size - 1) * count
    rising_L, falling_L = masses_L, masses_L
    for order in range(1, 21):
        rising_L, falling_L = rising_L * growth_L, falling_L / growth_L
        above, below = ((count * np.log(m.sum()) + np.log(2e15)) * size / order for m in (rising_L, falling_L))
        first, last = max(first, math.floor(-below)), min(last, math.ceil(above))
    length = next_fast_len(max(last - first + 1, size), real=True)
    sums = np.maximum(irfft(rfft(masses_L, length) ** count, length), 0.0)
    sums_S = np.roll(sums, -first)[: last - first + 1]
    losses_S = losses.interval * (losses.lowest * count + first + np.arange(len(sums_S)))
    above_S, moved_S = (np.cumsum(values[::-1])[::-1] for values in (sums_S, sums_S * np.exp(-losses_S)))
    enough = np.flatnonzero(above_S - np.exp(losses_S) * moved_S <= delta)[0]
    return max(0.0, math.log((above_S[enough] - delta) / moved_S[enough]))


def compare_losses(count: int, noise: float, rate: float, relation: Relation, repeats: int) -> tuple[float, ...]:
    """Seconds of dp_accounting, of no tilt and of the library, and how far apart the first's epsilon at 1e-5 is."""

    def theirs() -> float:
        neighbours = {"add or remove one": "ADD_OR_REMOVE_ONE", "replace one": "REPLACE_ONE"}[relation]
        step = pld.from_gaussian_mechanism(noise, sampling_prob=rate, neighboring_relation=pld.NeighborRel[neighbours])
        return float(step.self_compose(count).get_epsilon_for_delta(1e-5))

    def ours() -> float:
        total = poisson_gaussians(count, noise, sampling_rate=rate, relation=relation)
        return epsilon_and_excess(total, 1e-5)[0]

    def untilted() -> float:
        total = poisson_gaussians(count, noise, sampling_rate=rate, relation=relation)
        assert total is not None
        return max(untilted_epsilon(direction, 1e-5) for direction in total.directions)

    times = best_times({"theirs": theirs, "untilted": untilted, "ours": ours}, repeats)
    return times["theirs"], times["untilted"], times["ours"], abs(ours() / theirs() - 1)


def main() -> None:
    """Print one row per profile, then one per training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--stride", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    print(f"{options.queries} queries, {len(ORDERS_A)} orders; loop on every {options.stride}th query, scaled")
    print(
        f"{'votes':<10} {'distinct':>8} {'loop s':>8} {'total ms':>9} {'ratio':>6} {'matrix ms':>9} {'ratio':>6}",
        end="",
    )
    print(f" {'one us':>7} {'loop us':>7}")
    for name, votes_QC in profiles(options.queries, 200, 10).items():
        distinct = len(np.unique(np.sort(votes_QC, axis=1), axis=0))
        seconds = compare(votes_QC, options.stride, options.repeats)
        loop, total, matrix = seconds["loop"], seconds["total"], seconds["matrix"]
        print(f"{name:<10} {distinct:>8} {loop:>8.2f} {1e3 * total:>9.1f} {loop / total:>6.0f}", end="")
        print(f" {1e3 * matrix:>9.1f} {loop / matrix:>6.0f}", end="")
        print(f" {1e6 * seconds['one query']:>7.0f} {1e6 * seconds['loop, one query']:>7.0f}")
    columns = "theirs ms", "no tilt ms", "ms"
    print(f"\n{'steps':>6} {'noise':>5} {'rate':>5} {'relation':<18}", *(f"{name:>10}" for name in columns), end="")
    print(f" {'ratio':>6} {'no tilt':>7} {'apart':>8}")
    for count, noise, rate in ((1000, 1.0, 0.01), (200, 0.7, 0.1), (30_000, 0.9, 0.002), (50, 5.0, 0.5)):
        for relation in get_args(Relation):
            theirs, untilted, ours, apart = compare_losses(count, noise, rate, relation, options.repeats)
            milliseconds = (f"{1e3 * seconds:>10.0f}" for seconds in (theirs, untilted, ours))
            print(f"{count:>6} {noise:>5} {rate:>5} {relation:<18}", *milliseconds, end="")
            print(f" {theirs / ours:>6.1f} {untilted / ours:>7.2f} {apart:>8.0e}")


if __name__ == "__main__":
    main()
