"""Estimators that are told epsilon alone, beside ones with the plain defaults of every section and no embedding.

python benchmarks/papers/estimators.py [DATA ...] [--methods NAME ...] [--epsilon 1] [--seeds 0 1 2] [--sizes N ...]

Both see the same private and public records and are measured on the same test records. Data sets other than the digits
are read from FAIRPATE_DATA. With ``--sizes``, each estimator is told epsilon and the number N of private records, and
learns from the first N.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from fairpate.config import DataConfig
from fairpate.data import Dataset, load_data
from fairpate.estimators import FairClassifier
from fairpate.methods.base import find_method


def main() -> None:
    """Print one row per data set and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=["color_digits", "adult", "heart"])
    parser.add_argument("--methods", nargs="+", default=["fairpate", "dp_sgd", "weighted_votes", "residual_votes"])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sizes", type=int, nargs="+")
    given = parser.parse_args()
    if given.sizes:
        _by_size(given.data, given.sizes, given.methods, given.epsilon, given.seeds)
        return
    print(f"| data | method | plain defaults | told epsilon {given.epsilon:g} alone | most common label |")
    print("|-|-|-|-|-|")
    for name in given.data:
        dataset = load_data(DataConfig(name=name))
        common = np.bincount(dataset.test.y.numpy()).max() / len(dataset.test)
        for method in given.methods:
            cells = [
                _accuracies(method, dataset, given.epsilon, given.seeds, **settings)
                for settings in (_plain(method), {})
            ]
            print(f"| {name} | `{method}` | {cells[0]} | {cells[1]} | {common:.1%} |", flush=True)


def _by_size(names: list[str], sizes: list[int], methods: list[str], epsilon: float, seeds: list[int]) -> None:
    print(f"| data | private records | {' | '.join(f'`{method}`' for method in methods)} | most common label |")
    print("|-" * (len(methods) + 3) + "|")
    for name in names:
        dataset = load_data(DataConfig(name=name))
        common = np.bincount(dataset.test.y.numpy()).max() / len(dataset.test)
        for size in sizes:
            fewer = replace(dataset, private=dataset.private.take(range(size)))
            found = [_accuracies(method, fewer, epsilon, seeds, num_records=size) for method in methods]
            print(f"| {name} | {size:,} | {' | '.join(found)} | {common:.1%} |", flush=True)


def _plain(method: str) -> dict[str, Any]:
    """All that the method's class has as defaults, said."""
    sections = ((name, value) for name, value in find_method(method)() if isinstance(value, BaseModel))
    return {name: value.model_dump() for name, value in sections if name not in ("data", "ray")} | {"embedding": None}


def _accuracies(method: str, dataset: Dataset, epsilon: float, seeds: list[int], **settings: Any) -> str:
    """Mean and standard deviation in per cent."""
    private, public, test = dataset.private, dataset.public, dataset.test
    local: dict[str, Any] = {"ray": {"num_actors": 0}} if find_method(method).asks_teachers else {}
    found = []
    for seed in seeds:
        model = FairClassifier(method, epsilon=epsilon, random_state=seed, **local, **settings)
        model.fit(
            private.x.numpy(),
            private.y.numpy(),
            public_X=public.x.numpy(),
            public_sensitive_features=public.z.numpy(),
        )
        found.append(100 * model.score(test.x.numpy(), test.y.numpy()))
    return f"{np.mean(found):.1f} ± {np.std(found, ddof=min(1, len(found) - 1)):.1f} %"


if __name__ == "__main__":
    main()
