"""What methods that protect the sensitive attribute alone reach: error, discrepancy and slack, averaged over seeds.

Every seed is kept in docs/results/posthoc.json, beside the bounds of the paper's Theorem 3.1 where they say anything.

    FAIRPATE_DATA=... OMP_NUM_THREADS=1 python benchmarks/papers/posthoc.py [--seeds 5] [--only communities]

``communities``: DP-postprocessing of a logistic regression, and DP-oracle-learner with the printed releases, with those
that need less noise, and with rules that read the group, over the gap asked for; equalized odds to group 0, and equal
false positives alone, delta 1e-7, every epsilon the accountant's. ``response``: randomised response in both forms on
Bank (by age) and COMPAS (by race) at epsilon 1, beside the same learner on true groups and without a constraint.
``bound``: the oracle learner over the bound of its multipliers, and on ten copies of the records at a tenth of epsilon.
``separation``: Theorem 4.6 by brute force. The
seed is that of the split, of the noise and of training. Numbers are of the test records, by expectation; groups with
fewer than 30 records of a label are left out of the discrepancy. ``degenerate`` counts what makes a model worth
nothing, as every run does.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measured
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fairpate.config import DataConfig, FitConfig, ModelConfig, PrivacyTarget
from fairpate.data import Dataset, Split, load_data
from fairpate.methods import dp_fair_learning, dp_sgd
from fairpate.methods.base import Method, Training, price
from fairpate.methods.dp_fair_learning import (
    RULES_KJ,
    DpOracleLearnerConfig,
    DpPostprocessingConfig,
    GameRules,
    GroupRules,
    OracleLearner,
    prices,
    violations_of,
)
from fairpate.methods.parity import ParityCells
from fairpate.methods.randomised_response import RandomisedResponse, RandomisedResponseConfig
from fairpate.nn.fit import said_labels
from fairpate.nn.models import build_model
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.releases.directory import RunDirectory
from fairpate.report.metrics import evaluate
from fairpate.terminal import Reporter

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 1.0)
EPSILONS = (1.0, 3.0, 10.0, math.inf)
DELTA = 1e-7
COMMAND = "python benchmarks/papers/posthoc.py"  # all parts; --only NAME makes the cells of one
SMALLEST_CELL = 30
CONSTRAINTS = ("equalized_odds", "equal_false_positives")
COLUMNS = ("error", "odds", "false_positives", "degenerate")
ORACLES: dict[str, dict[str, Any]] = {
    "as_in_paper": {"release": "every_round", "num_directions": None},
    "once": {"release": "once", "num_directions": 16},
    "by_group": {"rules": "by_group"},
}
FIT = FitConfig(epochs=30, learning_rate=0.01)


def measure(said_NC: npt.NDArray[Any], split: Split) -> tuple[float, float, float, int]:
    """Expected error, the largest gap of true or false positive rates to group 0, and that of false ones alone.

    Then what makes the model worth nothing, counted, as a run counts it.
    """
    positive, labels, groups = said_NC[:, 1], split.y.numpy(), split.z.numpy()
    error = float(np.where(labels == 1, 1 - positive, positive).mean())
    gaps = []
    for label in (0, 1):
        cells = [(groups == group) & (labels == label) for group in np.unique(groups)]
        rates = [positive[cell].mean() for cell in cells if cell.sum() >= SMALLEST_CELL]
        gaps.append(max(abs(float(rate - rates[0])) for rate in rates))
    group_names = [str(group) for group in range(int(groups.max()) + 1)]
    judged = evaluate(
        said_NC,
        labels_N=labels,
        groups_N=groups,
        class_names=("0", "1"),
        group_names=group_names,
        generator=np.random.default_rng(0),
        num_replicates=1,
    )
    return error, max(gaps), gaps[0], len(judged.degenerate)


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
    table = table[:, ~np.isinf(table).any(axis=0)]
    return " | ".join(
        f"{mean:.3f} ± {spread:.3f}" for mean, spread in zip(table.mean(axis=0), table.std(axis=0), strict=True)
    )


def communities(seeds: int) -> None:
    """Both methods of Jagielski et al. over the gap that is asked for."""
    datasets = [load_data(DataConfig(name="communities", seed=seed)) for seed in range(seeds)]
    bases = [logistic_regression(dataset, seed) for seed, dataset in enumerate(datasets)]
    plain = [
        measure(said_labels(base, dataset.test.x), dataset.test) for base, dataset in zip(bases, datasets, strict=True)
    ]
    keep("communities/plain", plain, COLUMNS)
    for constraint, epsilon, gap in itertools.product(CONSTRAINTS, EPSILONS, GAPS):
        settings: dict[str, Any] = {"constraint": constraint, "max_gap": gap}
        said = f"{constraint}/epsilon={epsilon:g},gap={gap:g}"
        rows = [postprocessed(bases[seed], datasets[seed], epsilon, settings, seed) for seed in range(seeds)]
        keep(f"communities/postprocessing/{said}", rows, (*COLUMNS, "slack", "error_bound", "odds_bound"))
        for name, form in ORACLES.items():
            if constraint == "equalized_odds" or name != "as_in_paper":
                learnt = [learned(datasets[seed], epsilon, seed, settings | form) for seed in range(seeds)]
                bounds = ("nu", "nu_before", "error_bound", "odds_bound") if name == "by_group" else ()
                keep(f"communities/oracle_{name}/{said}", learnt, (*COLUMNS, "epsilon", *bounds))


def keep(name: str, rows: Sequence[Sequence[float] | None], columns: Sequence[str], *, delta: float = DELTA) -> None:
    """Print one cell, and keep it with the seeds that were not refused; what numbers guarantee stands beside them."""
    known = {seed: row for seed, row in enumerate(rows) if row is not None}
    if not known:
        print(f"{name}: refused for every seed", flush=True)
        return
    print(f"{name}: {over_seeds(list(known.values()))}", flush=True)
    guarantee = {"unit": "sensitive attribute", "relation": "replace one", "delta": delta}
    lists = {column: list(values) for column, values in zip(columns, zip(*known.values(), strict=True), strict=True)}
    cells = measured.read("posthoc") | {name: {"seeds": list(known)} | guarantee | lists}
    measured.write("posthoc", command=COMMAND, cells=cells)


def logistic_regression(dataset: Dataset, seed: int) -> torch.nn.Module:
    """The base of the post-processing: trained without groups."""
    shape = tuple(dataset.private.x.shape[1:])
    model = build_model(ModelConfig(name="logistic"), input_shape=shape, num_classes=2, generator_seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return dp_sgd.train_sgd(model, dataset.private.x, dataset.private.y, FIT, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """Bounds on what a fair classifier loses: ``error`` over the best fair one, ``gap`` of rates over ``max_gap``."""

    error: float
    gap: float


def mixing_bounds(
    *, epsilon: float, failure_probability: float, num_records: int, num_groups: int, smallest_share: float
) -> Excess:
    """Theorem 3.1 of Jagielski et al. 2019 for two classes and equalized odds.

    With probability 1 - beta over the noise. Error is over the best fair mixing of exact counts, gaps are true ones.
    Bounds are inf where ``smallest_share``, of any cell, is too small. That share is private; with a released one the
    result is an estimate.
    """
    noise = math.log(4 * num_groups / failure_probability) / (num_records * epsilon)
    if smallest_share <= 4 * noise:
        return Excess(error=math.inf, gap=math.inf)
    return Excess(error=24 * num_groups * noise, gap=8 * noise / (smallest_share - 4 * noise))


def game_bounds(nu: float, *, dual_bound: float, num_groups: int, has_indicators: bool = False) -> Excess:
    """Theorem 4.4: bounds for play within ``nu`` of an equilibrium, on the records that were learned from.

    ``has_indicators``: its Theorem 4.5, for equal false positives and a class with every group's indicator, where
    ``dual_bound`` exceeds G - 1; the gap is inf where it does not. Before play :func:`nu_before_play` bounds nu;
    after it :func:`distance` computes nu.
    """
    if not (nu >= 0 and dual_bound > 0 and num_groups > 1):
        raise ValueError(
            f"Expected nu >= 0, dual_bound > 0 and num_groups > 1, got {nu}, {dual_bound} and {num_groups}."
        )
    if not has_indicators:
        return Excess(error=2 * nu, gap=(1 + 2 * nu) / dual_bound)
    room = dual_bound - (num_groups - 1)
    return Excess(error=2 * nu, gap=2 * nu / room if room > 0 else math.inf)


def nu_before_play(
    rules: GameRules,
    *,
    num_records: int,
    num_groups: int,
    num_events: int,
    smallest_share: float,
    round_epsilon: float,
    size_epsilon: float,
    failure_probability: float,
) -> float:
    """Bound nu, how far rules by group may end from an equilibrium, before they are played (Theorem 4.3).

    The paper's bound hides logarithms, and the constants of its Lemma 4.2; these are ours, for :class:`GroupRules`
    under its own noise. With probability 1 - beta nobody gains more than nu by leaving the mean of T rounds, nu
    being the regrets of both sides (Freund and Schapire 1996):

        learner   2 S (G ln K + ln(3 T / beta)) / (m epsilon') + 4 B d    exponential mechanism; prices of noisy sizes
        auditor   B (ln(M + 1) / (eta T) + eta / 2) + 4 B (w + d)         exponentiated gradient, of gains within 2

    with M = 2 (G - 1) E multipliers, S the most that one attribute changes a cost, d the most that a released size is
    off and w the most noise of a counted rate, both as parts of the smallest cell. Cells count as the smallest released
    share, so that the bound is public once sizes are released. In units of the Lagrangian (an error rate); above 1 it
    is void.

    ``smallest_share``: of any released cell among ``num_records``; ``round_epsilon`` of either side's release in a
    round, ``size_epsilon`` of that of sizes, before. ValueError for arguments out of range.
    """
    if not (0 < smallest_share <= 1 and 0 < failure_probability < 1 and num_groups > 1 and num_events > 0):
        raise ValueError(
            "Expected 0 < smallest_share <= 1, 0 < failure_probability < 1, num_groups > 1 and num_events > 0, got "
            f"{smallest_share}, {failure_probability}, {num_groups} and {num_events}."
        )
    bound, rounds, others = rules.dual_bound, rules.num_rounds, num_groups - 1
    smallest = num_records * smallest_share
    # Each of the learner's answers, the sizes and the auditor's counts may fail with a third of beta.
    unlikely = 3 / failure_probability
    moves = 1 if num_groups == 2 else 2
    # The reference's size is what the others leave, and so off by the sum of their noises.
    size_error = others * moves / size_epsilon * math.log(others * num_events * unlikely) / smallest
    count_error = 2 / round_epsilon * math.log(rounds * num_groups * num_events * unlikely) / smallest
    # Of |c| and of |c - c'|, where c is 1 or -1 and a price of at most B over the cell's share.
    sensitivity = max(1 + bound / smallest_share, 2 * bound / smallest_share)
    complexity = num_groups * math.log(len(RULES_KJ)) + math.log(rounds * unlikely)
    learner = 2 * sensitivity * complexity / (num_records * round_epsilon) + 4 * bound * size_error
    auditor = bound * (math.log(2 * others * num_events + 1) / (rules.learning_rate * rounds) + rules.learning_rate / 2)
    return learner + auditor + 4 * bound * (count_error + size_error)


def distance(
    cells: ParityCells, said_N: npt.NDArray[Any], positive_GJ: Any, multipliers_SOE: Any, rules: GameRules
) -> float:
    """nu of Theorem 4.4: how much either side gains by leaving a mixture and multipliers. Exact, and so private.

    ``positive_GJ``: how often the mixture predicts 1. The learner leaves for the best rule by group, the auditor for
    ``dual_bound`` on the largest violation.
    """
    group_rules, shares_GE = GroupRules(cells, said_N), cells.counts() / len(said_N)
    rates_GE = cells.rates(positive_GJ[cells.groups_N, said_N.astype(np.int64)])
    violations_SOE = violations_of(rates_GE, max_gap=rules.max_gap, reference_group=rules.reference_group)
    priced_GE = prices(multipliers_SOE, shares_GE, reference_group=rules.reference_group)
    difference_GY = np.array(group_rules.differences(priced_GE), dtype=np.float64)
    cost_GJ = np.einsum("gyj,gy->gj", group_rules.counts_GYJ, difference_GY) / len(said_N)
    learner = float((cost_GJ * positive_GJ).sum() - np.minimum(cost_GJ, 0).sum())
    largest = max(0.0, float(violations_SOE.max()))
    return max(learner, rules.dual_bound * largest - float((multipliers_SOE * violations_SOE).sum()))


def postprocessed(
    base: torch.nn.Module, dataset: Dataset, epsilon: float, settings: dict[str, Any], seed: int
) -> list[float]:
    """What is measured, slack; and the most that Theorem 3.1 promises of error and discrepancy."""
    private, test = dataset.private, dataset.test
    config = DpPostprocessingConfig(**settings)
    released, exact = (
        dp_fair_learning.released_counts(
            said_labels(base, private.x),
            private.y.numpy(),
            private.z.numpy(),
            epsilon=spent,
            source=SeededSource(seed),
            num_groups=dataset.num_groups,
        )
        for spent in (epsilon, math.inf)
    )
    mixing = dp_fair_learning.fair_mixing(released, config, epsilon=epsilon)
    promise = mixing_bounds(
        epsilon=epsilon,
        failure_probability=config.failure_probability,
        num_records=len(private),
        num_groups=dataset.num_groups,
        smallest_share=float(exact.sum(axis=2).min() / exact.sum()),
    )
    best = dp_fair_learning.fair_mixing(exact, config, epsilon=math.inf).error
    said_NC = np.einsum("nj,njk->nk", said_labels(base, test.x), mixing.mixing_GCC[test.z.numpy()])
    bounds = (best + promise.error, config.max_gap + promise.gap)
    return [*measure(said_NC, test), mixing.max_slack, *bounds]


def learned(dataset: Dataset, epsilon: float, seed: int, settings: dict[str, Any]) -> list[float]:
    """What is measured, the epsilon that the accountant finds, and bounds for rules by group."""
    private, target = dataset.private, PrivacyTarget(epsilon=epsilon, delta=DELTA)
    config = DpOracleLearnerConfig(**settings)
    method = OracleLearner(target=target, noise="seeded", seed=seed, dp_oracle_learner=config)
    trained = trained_by(method, dataset)
    return [
        *measure(mixed(trained, dataset.test), dataset.test),
        price(trained.events, delta=target.delta, relation=target.relation, accounting=target.accounting).epsilon,
        *(bounds_of_game(trained, private, config, target, dataset.num_groups) if config.rules == "by_group" else ()),
    ]


def trained_by(method: Method, dataset: Dataset) -> Any:
    """What a method that makes its own model learns."""
    run, reporter = RunDirectory(root=Path("nowhere")), Reporter(quiet=True)
    return method.train(Training(dataset=dataset, model=nn.Identity(), run=run, reporter=reporter, seed=method.seed))


def bounds_of_game(
    trained: Any, private: Split, config: DpOracleLearnerConfig, target: PrivacyTarget, num_groups: int
) -> list[float]:
    """nu of the play, the bound on it before, and what Theorems 4.4 and 4.5 then allow of error and discrepancy.

    On the records learned from, from the nu of the play.
    """
    labels, groups = private.y.numpy(), private.z.numpy()
    said_NC = said_labels(trained.model, private.x)
    cells = ParityCells.of(labels, groups, num_groups=num_groups, constraint=config.constraint)
    assert config.num_rounds is not None and config.learning_rate is not None, "the defaults, which are numbers"
    rules = GameRules(
        num_rounds=config.num_rounds,
        dual_bound=config.dual_bound,
        learning_rate=config.learning_rate,
        max_gap=config.max_gap,
    )
    before = nu_before_play(
        rules,
        num_records=len(labels),
        num_groups=num_groups,
        num_events=cells.num_events,
        smallest_share=float(trained.shares_GE.min()),
        round_epsilon=trained.round_epsilon,
        size_epsilon=config.frequency_share * target.epsilon,
        failure_probability=config.failure_probability,
    )
    nu = distance(cells, said_NC.argmax(axis=1), trained.mixing_GCC[:, :, 1], trained.mean_multipliers, rules)
    promise = game_bounds(
        nu,
        dual_bound=config.dual_bound,
        num_groups=num_groups,
        has_indicators=config.constraint == "equal_false_positives",
    )
    counts_GYC = dp_fair_learning.released_counts(
        said_NC, labels, groups, epsilon=math.inf, source=SeededSource(0), num_groups=num_groups
    )
    whole = DpPostprocessingConfig(constraint=config.constraint, max_gap=config.max_gap)
    best = dp_fair_learning.fair_mixing(counts_GYC, whole, epsilon=math.inf).error
    return [nu, before, best + promise.error, config.max_gap + promise.gap]


def response(seeds: int) -> None:
    """Both forms at epsilon 1, beside the learner on true groups and without a constraint."""
    config = RandomisedResponseConfig(num_rounds=25, learning_rate=1.0, max_gap=0.02)
    contenders: dict[str, tuple[RandomisedResponseConfig, float]] = {
        "no_constraint": (config.model_copy(update={"num_rounds": 1, "max_gap": 1.0}), math.inf),
        "true_groups": (config, math.inf),
        "one_step": (config, 1.0),
        "one_step_as_asked": (config.model_copy(update={"corrects_bound": False}), 1.0),
        "two_steps": (config.model_copy(update={"form": "two_step"}), 1.0),
    }
    for name in ("bank", "compas"):
        datasets = [load_data(DataConfig(name=name, seed=seed)) for seed in range(seeds)]
        for label, (settings, epsilon) in contenders.items():
            rows = [responded(dataset, settings, epsilon, seed) for seed, dataset in enumerate(datasets)]
            keep(f"{name}/response/{label}", rows, COLUMNS, delta=0.0)


def responded(
    dataset: Dataset, config: RandomisedResponseConfig, epsilon: float, seed: int
) -> tuple[float, float, float, int] | None:
    """What :func:`measure` finds; None where the second step recovers too little of a group."""
    try:
        trained = respond(dataset, config, epsilon, seed)
    except ValueError as error:
        if "min_share" in str(error):
            return None
        raise
    return measure(mixed(trained, dataset.test), dataset.test)


def respond(dataset: Dataset, config: RandomisedResponseConfig, epsilon: float, seed: int) -> Any:
    """What randomised response releases."""
    method = RandomisedResponse(
        target=PrivacyTarget(epsilon=epsilon), noise="seeded", seed=seed, randomised_response=config
    )
    return trained_by(method, dataset)


def bound(seeds: int) -> None:
    """The oracle learner over the multipliers' bound B (Remark 4.1), and at a tenth of the epsilon on ten copies."""
    datasets = [load_data(DataConfig(name="communities", seed=seed)) for seed in range(seeds)]
    form = {"constraint": "equalized_odds", "max_gap": 0.0} | ORACLES["once"]
    columns = (*COLUMNS, "epsilon")
    for epsilon, dual_bound in itertools.product((10.0, math.inf), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)):
        rows = [learned(datasets[seed], epsilon, seed, form | {"dual_bound": dual_bound}) for seed in range(seeds)]
        keep(f"communities/oracle_once/epsilon={epsilon:g},bound={dual_bound:g}", rows, columns)
    copies = [replace(each, private=each.private.take(list(range(len(each.private))) * 10)) for each in datasets]
    for epsilon in EPSILONS[:-1]:
        rows = [learned(copies[seed], epsilon / 10, seed, form) for seed in range(seeds)]
        keep(f"communities/oracle_once/copies=10,epsilon={epsilon / 10:g}", rows, columns)


def separation(_: int) -> None:
    """Theorem 4.6 by brute force: how far one changed attribute moves the least error of a fair classifier.

    Over all data sets of m records with two features U and V and two groups R and B, where the records of each group
    with label 0 are at least a quarter of all. *blind* may predict 0, or 1 for U; *aware* also 1 for R, or 1 for B.
    Both may mix.
    """
    for num_records in (8, 12, 16, 20):
        tables = np.array(list(compositions(num_records, 8)), dtype=np.int64).reshape(-1, 2, 2, 2)
        tables = tables[(tables[..., 0].sum(axis=1) >= num_records / 4).all(axis=1)]
        for gap in sorted({2 / num_records, 0.25, 0.5}):
            moved = dict.fromkeys(("blind", "aware"), 0.0)
            for feature, label in itertools.product((0, 1), repeat=2):
                others = tables[tables[:, feature, 0, label] > 0].copy()
                before = {name: least_errors(others, gap, name) for name in moved}
                others[:, feature, 0, label] -= 1
                others[:, feature, 1, label] += 1
                kept = (others[..., 0].sum(axis=1) >= num_records / 4).all(axis=1)
                for name in moved:
                    change = np.abs(least_errors(others, gap, name) - before[name])[kept]
                    moved[name] = max(moved[name], float(change.max()) * num_records)
            found = {name: [value] for name, value in moved.items()}
            print(f"separation, m = {num_records}, gap {gap:g}: m times the sensitivity {found}", flush=True)
            cells = measured.read("posthoc") | {f"separation/records={num_records},gap={gap:g}": {"seeds": [0]} | found}
            measured.write("posthoc", command=COMMAND, cells=cells)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``total`` as a sum of ``parts`` numbers from 0 on, in order."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        ends = (-1, *bars, total + parts - 1)
        yield tuple(after - before - 1 for before, after in itertools.pairwise(ends))


def least_errors(tables: npt.NDArray[Any], gap: float, kind: str) -> npt.NDArray[Any]:
    """The least error of a mixture whose false positive rates differ by at most ``gap``, for each table of counts by
    feature, group and label.

    A linear program in the weights, whose optimum mixes at most two classifiers: either one that keeps the gap, or two
    whose mixture has exactly that gap.
    """
    negatives, positives, size = tables[..., 0], tables[..., 1], tables[0].sum()
    by_group = negatives.sum(axis=1)
    zero, ones = np.zeros(len(tables)), np.ones(len(tables))
    rates = negatives[:, 0] / by_group
    errors = [positives.sum(axis=(1, 2)), negatives[:, 0].sum(axis=1) + positives[:, 1].sum(axis=1)]
    gaps = [zero, rates[:, 0] - rates[:, 1]]
    if kind == "aware":
        errors += [by_group[:, group] + positives[:, :, 1 - group].sum(axis=1) for group in (0, 1)]
        gaps += [ones, -ones]
    least = np.full(len(tables), np.inf)
    for error, difference in zip(errors, gaps, strict=True):
        least = np.where(np.abs(difference) <= gap, np.minimum(least, error), least)
    for (i, j), limit in itertools.product(itertools.permutations(range(len(gaps)), 2), (-gap, gap)):
        between = gaps[i] - gaps[j]
        weight = np.where(between != 0, (limit - gaps[j]) / np.where(between != 0, between, 1), -1)
        mixed_error = weight * errors[i] + (1 - weight) * errors[j]
        least = np.where((weight >= 0) & (weight <= 1), np.fmin(least, mixed_error), least)
    shares: npt.NDArray[Any] = least / size
    return shares


PARTS: dict[str, Callable[[int], None]] = {
    "communities": communities,
    "response": response,
    "bound": bound,
    "separation": separation,
}


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
