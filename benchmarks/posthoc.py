"""What methods that protect the sensitive attribute alone reach: error, discrepancy and slack, averaged over seeds.

    FAIRPATE_DATA=... OMP_NUM_THREADS=1 python benchmarks/posthoc.py [--seeds 5] [--only communities]

``communities``: DP-postprocessing of a logistic regression, and DP-oracle-learner with the printed releases and with
those that need less noise, over the gap asked for; equalized odds to group 0, delta 1e-7, every epsilon the
accountant's. ``response``: randomised response in both forms on Bank (by age) and COMPAS (by race) at epsilon 1, beside
the same learner on true groups and without a constraint. The seed is that of the split, of the noise and of training.
Numbers are of the test records, by expectation; groups with fewer than 30 records of a label are left out of the
discrepancy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fairpate.config import DataConfig, FitConfig, ModelConfig, PrivacyTarget
from fairpate.data import Dataset, Split, load_dataset
from fairpate.methods import dp_oracle_learner, dp_postprocessing, randomised_response, sgd
from fairpate.methods.dp_oracle_learner import DpOracleLearnerConfig
from fairpate.methods.dp_postprocessing import DpPostprocessingConfig
from fairpate.methods.randomised_response import RandomisedResponseConfig
from fairpate.methods.trained import price
from fairpate.nn.mixture import said_labels
from fairpate.nn.models import build_model
from fairpate.privacy.discrete_gaussian import SeededSource

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 1.0)
EPSILONS = (1.0, 3.0, 10.0, math.inf)
DELTA = 1e-7
SMALLEST_CELL = 30
ORACLES: dict[str, dict[str, Any]] = {
    "as in the paper": {"release": "every_round", "num_directions": None},
    "sums once, 16 directions": {"release": "once", "num_directions": 16},
}
FIT = FitConfig(epochs=30, learning_rate=0.01)


def measure(said_NC: npt.NDArray[Any], split: Split) -> tuple[float, float]:
    """Expected error, and the largest gap of true or false positive rates to group 0."""
    positive, labels, groups = said_NC[:, 1], split.y.numpy(), split.z.numpy()
    error = float(np.where(labels == 1, 1 - positive, positive).mean())
    gap = 0.0
    for label in (0, 1):
        cells = [(groups == group) & (labels == label) for group in np.unique(groups)]
        rates = [positive[cell].mean() for cell in cells if cell.sum() >= SMALLEST_CELL]
        gap = max([gap, *(abs(float(rate - rates[0])) for rate in rates)])
    return error, gap


def mixed(trained: Any, split: Split) -> npt.NDArray[Any]:
    """How often each label is predicted."""
    said_NC = said_labels(trained.model, split.x)
    if trained.mixing_GCC is None:
        return said_NC
    found: npt.NDArray[Any] = np.einsum("nj,njk->nk", said_NC, trained.mixing_GCC[split.z.numpy()])
    return found


def over_seeds(results: Sequence[Sequence[float]]) -> str:
    """Mean and standard deviation of each column, as cells of a table."""
    table = np.array(results)
    if np.isinf(table).any():
        table = table[:, ~np.isinf(table).any(axis=0)]
    return " | ".join(
        f"{mean:.3f} ± {spread:.3f}" for mean, spread in zip(table.mean(axis=0), table.std(axis=0), strict=True)
    )


def communities(seeds: int) -> None:
    """Both methods of Jagielski et al. over the gap that is asked for."""
    datasets = [load_dataset(DataConfig(name="communities", seed=seed)) for seed in range(seeds)]
    bases = [logistic_regression(dataset, seed) for seed, dataset in enumerate(datasets)]
    plain = [
        measure(said_labels(base, dataset.test.x), dataset.test) for base, dataset in zip(bases, datasets, strict=True)
    ]
    print("communities: logistic regression without a constraint: error, discrepancy")
    print(f"  {over_seeds(plain)}\n")
    print("| epsilon | gap | post-processing: error | discrepancy | slack |")
    print("|-|-|-|-|-|")
    for epsilon in EPSILONS:
        for gap in GAPS:
            rows = [postprocessed(bases[seed], datasets[seed], epsilon, gap, seed) for seed in range(seeds)]
            print(f"| {epsilon:g} | {gap:g} | {over_seeds(rows)} |", flush=True)
    for name, settings in ORACLES.items():
        print(f"\n| epsilon | gap | oracle learner, {name}: error | discrepancy | epsilon spent |")
        print("|-|-|-|-|-|")
        for epsilon in EPSILONS:
            for gap in GAPS:
                rows = [learned(datasets[seed], epsilon, gap, seed, settings) for seed in range(seeds)]
                print(f"| {epsilon:g} | {gap:g} | {over_seeds(rows)} |", flush=True)


def logistic_regression(dataset: Dataset, seed: int) -> torch.nn.Module:
    """The base of the post-processing: trained without groups."""
    shape = tuple(dataset.private.x.shape[1:])
    model = build_model(ModelConfig(name="logistic"), input_shape=shape, num_classes=2, generator_seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return sgd.train(model, dataset.private.x, dataset.private.y, FIT, generator=generator).model


def postprocessed(base: torch.nn.Module, dataset: Dataset, epsilon: float, gap: float, seed: int) -> list[float]:
    """Error, discrepancy, slack."""
    private, test = dataset.private, dataset.test
    counts_GYC = dp_postprocessing.released_counts(
        said_labels(base, private.x),
        private.y.numpy(),
        private.z.numpy(),
        epsilon=epsilon,
        source=SeededSource(seed),
        num_groups=dataset.num_groups,
    )
    mixing = dp_postprocessing.fair_mixing(counts_GYC, DpPostprocessingConfig(max_gap=gap), epsilon=epsilon)
    said_NC = np.einsum("nj,njk->nk", said_labels(base, test.x), mixing.mixing_GCC[test.z.numpy()])
    return [*measure(said_NC, test), mixing.max_slack]


def learned(dataset: Dataset, epsilon: float, gap: float, seed: int, settings: dict[str, Any]) -> list[float]:
    """Error, discrepancy, and the epsilon that the accountant finds."""
    private, target = dataset.private, PrivacyTarget(epsilon=epsilon, delta=DELTA)
    trained = dp_oracle_learner.train(
        private.x,
        private.y,
        private.z,
        DpOracleLearnerConfig(max_gap=gap, **settings),
        target=target,
        num_groups=dataset.num_groups,
        source=SeededSource(seed),
    )
    return [
        *measure(mixed(trained, dataset.test), dataset.test),
        price(trained.events, delta=target.delta, relation=target.relation, accounting=target.accounting).epsilon,
    ]


def response(seeds: int) -> None:
    """Both forms at epsilon 1, beside the learner on true groups and without a constraint."""
    config = RandomisedResponseConfig(num_rounds=25, learning_rate=1.0, max_gap=0.02)
    contenders: dict[str, tuple[RandomisedResponseConfig, float]] = {
        "no constraint": (config.model_copy(update={"num_rounds": 1, "max_gap": 1.0}), math.inf),
        "true groups": (config, math.inf),
        "one step, bound corrected": (config, 1.0),
        "one step, bound as asked": (config.model_copy(update={"corrects_bound": False}), 1.0),
        "two steps": (config.model_copy(update={"form": "two_step"}), 1.0),
    }
    for name in ("bank", "compas"):
        print(f"\n| {name}, epsilon 1, gap 0.02 | error | violation of equalized odds |")
        print("|-|-|-|")
        datasets = [load_dataset(DataConfig(name=name, seed=seed)) for seed in range(seeds)]
        for label, (settings, epsilon) in contenders.items():
            rows = [responded(dataset, settings, epsilon, seed) for seed, dataset in enumerate(datasets)]
            found = [row for row in rows if row is not None]
            refused = f" (refused for {seeds - len(found)} of {seeds} seeds)" if len(found) < seeds else ""
            print(f"| {label}{refused} | {over_seeds(found) if found else '- | -'} |", flush=True)


def responded(
    dataset: Dataset, config: RandomisedResponseConfig, epsilon: float, seed: int
) -> tuple[float, float] | None:
    """Error and violation; None where the second step recovers too little of a group."""
    try:
        trained = respond(dataset, config, epsilon, seed)
    except ValueError as error:
        if "min_share" in str(error):
            return None
        raise
    return measure(mixed(trained, dataset.test), dataset.test)


def respond(dataset: Dataset, config: RandomisedResponseConfig, epsilon: float, seed: int) -> Any:
    """What randomised response releases."""
    return randomised_response.train(
        dataset.private.x,
        dataset.private.y,
        dataset.private.z,
        config,
        epsilon=epsilon,
        num_groups=dataset.num_groups,
        source=SeededSource(seed),
        generator=torch.Generator().manual_seed(seed),
    )


PARTS: dict[str, Callable[[int], None]] = {"communities": communities, "response": response}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments.seeds)


if __name__ == "__main__":
    main()
