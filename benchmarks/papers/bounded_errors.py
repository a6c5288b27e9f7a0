"""How often is a bound on the errors of answers broken, and what does a model still answer under it?

    FAIRPATE_DATA=... OMP_NUM_THREADS=1 python benchmarks/papers/bounded_errors.py [--draws 1000] [--nulls 10000]

``populations``: records of a data set that did not train a logistic regression; some of them are the public pool that
fixes the bins. A draw takes private test records from the others with replacement (of loans: persons, one record of
each), and noise. ``broken`` says how often the error rate in the population exceeds the bound in some group;
``answered`` is the mean share of a group's records that are answered, ``without_noise`` the same from exact counts. The
unit is one record (loans: one person), added or removed; delta 1e-5; the table shares its noise with that of metrics.

``nulls``: populations in which every bin of every group has the error rate r + .001, so that each answer breaks the
bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import measured
import numpy as np
from sklearn.linear_model import LogisticRegression

from fairpate.config import DataConfig
from fairpate.data import load_data
from fairpate.fairness.bounded_errors import NUM_BINS, ConfidenceBins, answered_bins, confidences, first_tests
from fairpate.methods.base import Price
from fairpate.run.private_metrics import table_event
from fairpate.types import ErrorBound, FloatArray, IntArray

COMMAND = "python benchmarks/papers/bounded_errors.py"
DATA = {"adult": {}, "adult by race": {"sensitive": "race"}, "acs": {}, "loans": {}}
EPSILONS, RATES, SIZES = (0.3, 1.0, 3.0), (0.05, 0.1), (2000, 8000)
DELTA = 1e-5


def main() -> None:
    """Measure both, and write docs/results/bounded_errors.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--nulls", type=int, default=10_000)
    options = parser.parse_args()
    cells: measured.Cells = {}
    for name in DATA:
        cells |= _of_population(name, options.draws)
    cells |= _of_nulls(options.nulls)
    measured.write("bounded_errors", command=COMMAND, cells=cells)


def noise_of(epsilon: float) -> float:
    """Return the standard deviation of the noise on a count of records, where metrics share epsilon."""
    price = Price(epsilon=epsilon, delta=DELTA, unit="record", relation="add or remove one", accounting="pld")
    return table_event(price, ErrorBound(max_error=0.05)).noise_stddev_records


def _of_population(name: str, draws: int) -> measured.Cells:
    data = name.split()[0]
    dataset = load_data(DataConfig(name=data, options=DATA[name]))
    parts = (dataset.private, dataset.public, dataset.test)
    x, y, z = (np.concatenate([getattr(part, each).numpy() for part in parts]) for each in "xyz")
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(y))
    if dataset.unit == "person":  # one record of each person, drawn by chance
        codes = [part.person_N.numpy() for part in parts if part.person_N is not None]
        persons = np.concatenate([code + 10**7 * k for k, code in enumerate(codes)])
        rows = rows[np.unique(persons[rows], return_index=True)[1]]
        generator.shuffle(rows)
    train, pool, rest = np.split(rows, [len(rows) // 3, len(rows) // 3 + min(4000, len(rows) // 4)])
    model = LogisticRegression(max_iter=300).fit(x[train], y[train])
    chances = model.predict_proba(x)
    confidence, wrong = confidences(chances), chances.argmax(axis=1) != y
    groups = int(z.max()) + 1
    bins = ConfidenceBins.of(confidence[pool], z[pool], num_strata=groups, num_classes=chances.shape[1])
    number = bins.numbers(confidence)
    found: measured.Cells = {}
    for rate, size in itertools.product(RATES, SIZES):
        bound = ErrorBound(max_error=rate)
        for epsilon in EPSILONS:
            noise = noise_of(epsilon)
            broken, answered, exactly = 0, [], []
            for _ in range(draws):
                drawn = generator.choice(rest, size)
                counts = np.zeros((groups, NUM_BINS, 2))
                np.add.at(counts, (z[drawn], number[drawn], wrong[drawn].astype(int)), 1.0)
                sizes_S = counts.sum(axis=(1, 2))
                exact = _answered(counts, sizes_S, bins, bound, 0.0)
                # The sizes of the groups come from the table of metrics, four cells with a noise of their own.
                sizes_S += 2 * noise * generator.standard_normal(groups)
                noisy = _answered(counts + generator.normal(0, noise, counts.shape), sizes_S, bins, bound, noise)
                shown = number[rest] < noisy[z[rest]]
                of_group = [shown & (z[rest] == group) for group in range(groups)]
                broken += any(wrong[rest][each].mean() > rate for each in of_group if each.any())
                answered.append([each.sum() / (z[rest] == g).sum() for g, each in enumerate(of_group)])
                exactly.append([np.mean(number[rest][z[rest] == g] < exact[g]) for g in range(groups)])
            cell: dict[str, Any] = {"seeds": [0], "broken": [broken / draws], "draws": [draws], "delta": DELTA}
            cell |= {"unit": dataset.unit, "relation": "add or remove one"}
            for group, label in enumerate(dataset.group_names):
                cell[f"share_answered_{group}"] = [float(np.mean(answered, axis=0)[group])]
                cell[f"share_without_noise_{group}"] = [float(np.mean(exactly, axis=0)[group])]
                cell[f"group_{group}"] = label
            found[f"{name}, {epsilon:g}, {rate:g}, {size}"] = cell
            shares = ", ".join(
                f"{cell['share_answered_' + str(g)][0]:.0%} ({cell['share_without_noise_' + str(g)][0]:.0%})"
                for g in range(groups)
            )
            print(f"{name}, epsilon {epsilon:g}, r {rate:g}, {size}: broken {broken / draws:.1%}; {shares}", flush=True)
    return found


def _answered(
    counts_SB2: FloatArray, sizes_S: FloatArray, bins: ConfidenceBins, bound: ErrorBound, noise: float
) -> IntArray:
    return answered_bins(counts_SB2, first_tests(sizes_S, bins, bound, noise_stddev=noise), bound, noise_stddev=noise)


def _of_nulls(draws: int) -> measured.Cells:
    generator, found = np.random.default_rng(1), {}
    shapes = {"equal": np.ones(NUM_BINS), "falling": np.geomspace(1, 0.05, NUM_BINS)}
    shapes["rising"] = shapes["falling"][::-1]
    for (shape, weights_B), size, rate in itertools.product(shapes.items(), (500, 2000, 8000), RATES):
        shares_B = weights_B / weights_B.sum()
        bins = ConfidenceBins(
            edges=np.linspace(1, 0.5, NUM_BINS + 1)[1:-1],
            shares_SB=np.tile(shares_B, (2, 1)),
            # Confidences that promise much: the first test is then at few bins.
            doubts_SB=np.full((2, NUM_BINS), rate / 10),
        )
        bound = ErrorBound(max_error=rate)
        for epsilon in (*EPSILONS, math.inf):
            noise = noise_of(epsilon) if math.isfinite(epsilon) else 0.0
            first = first_tests(np.full(2, float(size)), bins, bound, noise_stddev=noise)
            sizes_RSB = generator.multinomial(size, shares_B, size=(draws, 2))
            wrong_RSB = generator.binomial(sizes_RSB, rate + 0.001)
            counts = np.stack([sizes_RSB - wrong_RSB, wrong_RSB], axis=-1).astype(np.float64)
            counts += noise * generator.standard_normal(counts.shape)
            broken = np.mean([(answered_bins(each, first, bound, noise_stddev=noise) > 0).any() for each in counts])
            cell = {"seeds": [1], "broken": [float(broken)], "draws": [draws], "delta": DELTA}
            cell |= {"unit": "record", "relation": "add or remove one"}
            found[f"null, {shape}, {epsilon:g}, {rate:g}, {size}"] = cell
            print(f"null, {shape}, epsilon {epsilon:g}, r {rate:g}, {size}: broken {broken:.2%}", flush=True)
    return found


if __name__ == "__main__":
    main()
