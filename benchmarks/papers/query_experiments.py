"""How many queries are answered over threshold, margin and budget (FairPATE, Appendix J, Figures 12 to 15); no student.

    nice -n 19 python benchmarks/papers/query_experiments.py [--data utkface ...] [--seeds 0 1 2 3 4] [--state FOLDER]
    nice -n 19 python benchmarks/papers/query_experiments.py --small-teachers --data utkface fairface --seeds 0

Votes of one ensemble per data set and seed; the noise of a query is the same in every cell. The budget is the papers':
queries stop where the price that depends on votes would pass epsilon, which leaks. ``answered`` is under the exact
joint price, in which an argmax that the gate refuses is paid; ``answered_as_in_paper`` under the published ledger, in
which it is free. ``answered_Z`` are those of public group Z, ``parity`` the largest gap of what was answered.

With small teachers epsilon is published: noise is scaled so that all queries fit, and none stops early. They are the
default ones of ``fairpate run`` for a larger pool, of which as many queries as the paper's are asked; both noises are
in the ratio of the paper's. ``label_accuracy`` is that of what was answered. Written to query_experiments_small.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import measured
import numpy as np
import papers

from aggregator.mechanism import NOT_CONFIDENT, ConfidentGnmax
from aggregator.session import mechanism_within
from fairpate.config import RayConfig, merge, read_yaml
from fairpate.data import load_once
from fairpate.fairness.gate import DemographicParityGate
from fairpate.fairness.rates import dp_one_vs_rest
from fairpate.methods.base import config_digest, configured
from fairpate.methods.defaults import resolved
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, RenyiFilter
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.run.sweep import Cell
from fairpate.types import GateRule, VoteBatch

FOLDER = Path(__file__).parents[2] / "configs"
DATA: dict[str, tuple[str, int, float, tuple[float, ...]]] = {
    "utkface": ("utkface.yaml", 1510, 1e-6, (1, 2, 4, 6, 8, 10)),
    "color_mnist": ("color_mnist_paper.yaml", 1000, 1e-5, (0.5, 1, 1.5, 2, 2.5, 3)),
    "fairface": ("fairface.yaml", 1510, 1e-6, (1, 2, 4, 6, 8, 10)),
}
"""Configuration, public records, delta, budgets."""
THRESHOLDS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
"""As shares of the teachers."""
MARGINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
MIN_COUNT = 50
SMALL: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "utkface": (("data.num_public=3000",), (1, 2, 3, 10)),
    "color_mnist": (("data.num_public=1000", "data.options.sensitive=label"), (1, 2.87)),
    "fairface": (("data.num_public=3000",), (1, 2, 3, 10)),
}
"""Of small teachers: settings of the data set, and published epsilons."""
SMALL_THRESHOLDS = (0.3, 0.5, 0.55, 0.6, 0.7)
SMALL_MARGINS = (0.01, 0.05, 0.5)
_ORDERS_A = np.array(DEFAULT_ORDERS)


def main() -> None:
    """Measure what is missing, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=sorted(DATA), default=["utkface", "color_mnist"])
    parser.add_argument("--small-teachers", action="store_true", help="thousands of them, at a published epsilon")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--state", type=Path, default=Path("runs"), help="folder that is kept between commands")
    options = parser.parse_args()
    file = "query_experiments_small" if options.small_teachers else "query_experiments"
    found, asked = measured.read(file), measure_small if options.small_teachers else measure
    for data, seed in itertools.product(options.data, options.seeds):
        if any(name.startswith(f"{data}/") and seed in cell["seeds"] for name, cell in found.items()):
            continue
        for name, numbers in asked(data, seed, options.state):
            papers.add(found, name, seed, numbers)
        there = " ".join(each for each in DATA if any(name.startswith(f"{each}/") for name in found))
        flag = "--small-teachers " if options.small_teachers else ""
        command = f"python benchmarks/papers/query_experiments.py {flag}--data {there}"
        measured.write(file, command=command, cells=found)
        print(f"{data}, seed {seed}", flush=True)


def measure(data: str, seed: int, state: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every threshold under every budget and margin."""
    file, num_public, delta, epsilons = DATA[data]
    said = {"seed": seed, "data": {"seed": seed, "num_public": num_public}, "aggregator": {"num_queries": None}}
    config: Any = configured(merge(read_yaml(FOLDER / file), said), method="fairpate")
    config = config.model_copy(update={"ray": RayConfig(num_actors=0), "storage": str((state / "teachers").absolute())})
    votes = papers.shared_votes(Cell(data=data, config=config, digest=config_digest(config)), state / "votes")
    assert votes is not None
    cells = []
    for share in THRESHOLDS:
        given = asdict(config.mechanism) | {"threshold": round(share * config.teachers.num_teachers)}
        stream = Stream(ConfidentGnmax(**given), votes, seed, delta)
        for epsilon, margin in itertools.product(epsilons, MARGINS):
            name = f"{data}/threshold={share:g},epsilon={epsilon:g},margin={margin:g}"
            cells.append(
                (
                    name,
                    {"unit": "record", "relation": "add or remove one", "delta": delta}
                    | stream.answered(epsilon, margin),
                )
            )
    return cells


def measure_small(data: str, seed: int, state: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every threshold under every budget and margin, of small teachers at a published epsilon."""
    file, num_queries, delta, _ = DATA[data]
    of_paper = read_yaml(FOLDER / file)["aggregator"]["mechanism"]
    (settings, epsilons), cells = SMALL[data], []
    for epsilon in epsilons:
        said = (f"data.name={data}", *settings, f"data.seed={seed}", f"seed={seed}")
        said += (f"target.epsilon={epsilon}", f"target.delta={delta}", "noise=seeded", "ray.num_actors=0")
        config: Any = resolved(said, "fairpate").model_copy(update={"storage": str((state / "teachers").absolute())})
        votes = papers.shared_votes(Cell(data=data, config=config, digest=config_digest(config)), state / "votes")
        assert votes is not None
        votes = votes.take(range(num_queries))
        scaled = mechanism_within(
            ConfidentGnmax(**of_paper), target_epsilon=epsilon, target_delta=delta, num_queries=num_queries
        )
        public = load_once(config.data.model_copy(update={"embedding": None})).public
        row_of = {record_id: row for row, record_id in enumerate(public.record_id)}
        truth_Q = public.y.numpy()[[row_of[record_id] for record_id in votes.record_ids]]
        for share in SMALL_THRESHOLDS:
            # The noise does not depend on the threshold.
            given = asdict(scaled) | {"threshold": round(share * config.teachers.num_teachers)}
            stream = Stream(ConfidentGnmax(**given), votes, seed, delta)
            for margin in SMALL_MARGINS:
                name = f"{data}/threshold={share:g},epsilon={epsilon:g},margin={margin:g}"
                fixed = {"unit": "record", "relation": "add or remove one", "delta": delta}
                cells.append((name, fixed | stream.answered_in_all(margin, truth_Q)))
    return cells


class Stream:
    """The queries in their order: the labels that a mechanism draws, and what they cost."""

    def __init__(self, mechanism: ConfidentGnmax, votes: VoteBatch, seed: int, delta: float) -> None:
        self._mechanism, self._votes, self._delta = mechanism, votes, delta
        self._num_groups = int(votes.groups_Q.max()) + 1
        gate = DemographicParityGate(
            GateRule(max_disparity=math.inf, min_count=0),
            num_groups=self._num_groups,
            num_classes=votes.votes_QC.shape[1],
        )
        outcomes = mechanism.answer(
            votes.votes_QC,
            groups=votes.groups_Q.tolist(),
            keys=list(votes.record_ids),
            gate=gate,
            source=SeededSource(seed),
        )
        self._labels = [NOT_CONFIDENT if outcome.label is None else outcome.label for outcome in outcomes]

    @cached_property
    def _spent_QA(self) -> np.ndarray[Any, Any]:
        price_QA = accountant.rdp_of_votes_data_dependent(self._mechanism.realised(self._votes.votes_QC), _ORDERS_A)
        return np.cumsum(price_QA, axis=0)

    def answered(self, epsilon: float, margin: float) -> dict[str, Any]:
        """What is answered before the budget is spent, in both ledgers."""
        limit_A = RenyiFilter(target_epsilon=epsilon, target_delta=self._delta).limit_A
        within_Q: np.ndarray[Any, Any] = np.any(self._spent_QA <= limit_A, axis=1)
        submitted = len(within_Q) if within_Q.all() else int(within_Q.argmin())
        counts_GC, rejected_Q = self._released(margin)
        final_GC = counts_GC[submitted]
        in_paper = self._submitted_as_in_paper(limit_A, rejected_Q)
        return {
            "submitted": submitted,
            "rejected": int(rejected_Q[:submitted].sum()),
            "answered_as_in_paper": int(counts_GC[in_paper].sum()),
            **_of_answers(final_GC),
        }

    def answered_in_all(self, margin: float, truth_Q: np.ndarray[Any, Any]) -> dict[str, Any]:
        """What is answered of all queries, and how many of these answers are right."""
        counts_GC, rejected_Q = self._released(margin)
        labels_Q = np.array(self._labels)
        answered_Q = (labels_Q != NOT_CONFIDENT) & ~rejected_Q
        right = float((labels_Q == truth_Q)[answered_Q].mean()) if answered_Q.any() else None
        return {
            "submitted": len(labels_Q),
            "rejected": int(rejected_Q.sum()),
            "label_accuracy": right,
            **_of_answers(counts_GC[-1]),
        }

    def _released(self, margin: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Released labels by group and class after every number of queries (Q + 1, G, C), and who was refused (Q,)."""
        num_classes = self._votes.votes_QC.shape[1]
        gate = DemographicParityGate(
            GateRule(max_disparity=margin, min_count=MIN_COUNT), num_groups=self._num_groups, num_classes=num_classes
        )
        counts, rejected = [gate.counts_GC], []
        for group, label in zip(self._votes.groups_Q.tolist(), self._labels, strict=True):
            rejected.append(label != NOT_CONFIDENT and not gate.admit(group, label))
            counts.append(gate.counts_GC)
        return np.array(counts), np.array(rejected)

    def _submitted_as_in_paper(self, limit_A: np.ndarray[Any, Any], rejected_Q: np.ndarray[Any, Any]) -> int:
        """The most queries that the published ledger prices within the limit, by bisection: its price only grows."""
        low, high = 0, len(rejected_Q)
        while low < high:
            middle = (low + high + 1) // 2
            spent_A = self._mechanism.as_in_paper_rdp(self._votes.votes_QC[:middle], rejected_Q=rejected_Q[:middle])
            low, high = (middle, high) if (spent_A <= limit_A).any() else (low, middle - 1)
        return low


def _of_answers(counts_GC: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Number of answers, of all and by group, and their largest gap."""
    sizes_G = counts_GC.sum(axis=1)
    gap = dp_one_vs_rest(counts_GC[:, None, :].astype(np.float64)).value if (sizes_G > 0).sum() > 1 else None
    by_group = {f"answered_{group}": int(size) for group, size in enumerate(sizes_G)}
    return {"answered": int(counts_GC.sum()), "parity": gap, **by_group}


if __name__ == "__main__":
    main()
