"""The pictures of docs/concepts.md, computed by the code that they explain.

    python docs/pictures.py

Shards are those of the keyed hash, prices those of the accountant, refusals those of the gate. Streams are seeded, so
that the same files come out every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fairpate.fairness.bounded_errors import NUM_BINS, ConfidenceBins, answered_bins, first_tests
from fairpate.fairness.gate import DemographicParityGate, filter_stream
from fairpate.pages import least_wrong, most_detected
from fairpate.privacy.accountant import DEFAULT_ORDERS, epsilon_of_curve, least_noise
from fairpate.privacy.gnmax import gaussian_rdp, gnmax_rdp, log_q
from fairpate.privacy.mechanism_events import PredictionTables, VoteSums
from fairpate.types import ErrorBound, GateRule
from teachers.ensemble import assign_teachers, shard_key

FOLDER = Path(__file__).parent / "img"
DELTA = 1e-5
_INK, _MUTED, _GROUPS = "#18212b", "#5b6672", ("#00224e", "#b07d00")


def main(folder: Path = FOLDER) -> None:
    """Draw all of them."""
    look = {"svg.fonttype": "none", "svg.hashsalt": "fairpate", "font.size": 9, "axes.titlesize": 10}
    with matplotlib.rc_context(cast("Any", look)):
        for name, draw in PICTURES.items():
            figure = Figure(figsize=(5, 3), layout="constrained")  # read on a telephone too
            draw(figure)
            figure.savefig(folder / f"concept-{name}.svg", metadata={"Date": None})


def unit(figure: Figure) -> None:
    """Twenty records of two classes in the shards of five teachers, with and without one of them."""
    figure.set_size_inches(5, 4.5)
    names = [f"record {number}" for number in range(20)]
    labels = np.random.default_rng(4).integers(0, 2, len(names))
    for axis, left_out in zip(figure.subplots(2, 1, sharex=True), (None, 7), strict=True):
        kept = [number for number in range(len(names)) if number != left_out]
        teachers = assign_teachers([names[number] for number in kept], 5, shard_key(0))
        votes = [0, 0]
        for teacher in range(5):
            shard = [number for number, where in zip(kept, teachers, strict=True) if where == teacher]
            for height, number in enumerate(shard):
                edge = "#c00000" if number == 7 else "white"
                axis.scatter(teacher, height, 110, _GROUPS[labels[number]], edgecolor=edge, linewidth=2)
            votes[int(2 * labels[shard].sum() > len(shard))] += 1
        axis.set(xticks=range(5), xticklabels=[f"teacher {n + 1}" for n in range(5)], yticks=[], ylim=(-0.6, 6.4))
        axis.set_title(f"{len(kept)} records: votes {votes[0]} to {votes[1]}", color=_INK)
        axis.spines[["top", "left", "right"]].set_visible(False)


def cost(figure: Figure) -> None:
    """Epsilon of 300 noisy argmaxes of 100 teachers, by how far two classes are apart."""
    gaps = np.arange(0, 101, 2)
    votes_QC = np.stack([50 + gaps // 2, 50 - gaps // 2], axis=1)
    log_q_Q = log_q(votes_QC, noise_stddev_votes=12, tail="discrete")
    realised_QA = 300 * gnmax_rdp(log_q_Q, noise_stddev_votes=12, orders_A=DEFAULT_ORDERS)
    worst_A = 300 * gaussian_rdp(2.0, "noise_stddev_votes", 12, DEFAULT_ORDERS)
    axis = figure.subplots()
    axis.axhline(_epsilon(worst_A), color=_INK, label="data-independent: may be published")
    label = "data-dependent: for the operator alone"
    axis.plot(gaps, [_epsilon(rdp_A) for rdp_A in realised_QA], "--", color=_GROUPS[1], label=label)
    axis.set(xlabel="votes between the two classes, of 100", ylabel="epsilon of 300 queries", ylim=0)
    axis.legend()


def _epsilon(rdp_A: Any) -> float:
    return epsilon_of_curve(rdp_A, DEFAULT_ORDERS, target_delta=DELTA)[0]


def gate(figure: Figure) -> None:
    """The gap of what was answered, along a stream of labels: one group gets the label more often."""
    groups, labels = _stream(400)
    axis = figure.subplots()
    for margin, words, colour in ((np.inf, "without a gate", _MUTED), (0.1, "with a gate at .10", _GROUPS[0])):
        rule = GateRule(max_disparity=margin, min_count=25)
        stream = DemographicParityGate(rule, num_groups=2, num_classes=2)
        accepted, gaps = [], []
        for group, label in zip(groups, labels, strict=True):
            accepted.append(stream.admit(group, label))
            gaps.append(_gap(stream.counts_GC))
        axis.plot(gaps, color=colour, label=f"{words}: {accepted.count(False)} refused")
        refused = np.flatnonzero(~np.array(accepted))
        axis.plot(refused, np.zeros(len(refused)), "|", color=colour)
    axis.axhline(0.1, color=_INK, linewidth=0.8, linestyle=":")
    axis.set(xlabel="labels offered", ylabel="gap between two groups", ylim=(-0.01, 0.5))
    axis.legend()


def _stream(count: int) -> tuple[Sequence[int], Sequence[int]]:
    draws = np.random.default_rng(1)
    groups = draws.integers(0, 2, count)
    return groups.tolist(), (draws.random(count) < np.where(groups == 0, 0.6, 0.35)).astype(int).tolist()


def _gap(counts_GC: Any) -> float:
    size_G = counts_GC.sum(axis=1)
    return float("nan") if size_G.min() < 10 else abs(np.diff(counts_GC[:, 1] / size_G)[0])


def reject(figure: Figure) -> None:
    """Share of predictions that are answered, and their gap, by the margin of the reject option."""
    groups, labels = map(np.array, _stream(2000))
    margins = np.array([0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3])
    coverage, gaps = [], []
    for margin in margins:
        rule = GateRule(max_disparity=float(margin), min_count=25)
        answered = filter_stream(labels, groups, rule=rule, num_groups=2, num_classes=2)
        coverage.append(answered.mean())
        rates = [labels[answered & (groups == group)].mean() for group in (0, 1)]
        gaps.append(abs(rates[0] - rates[1]))
    figure.set_size_inches(5, 4.5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(margins, coverage, "o-", color=_GROUPS[0])
    upper.set(ylabel="share answered", ylim=(0, 1.05))
    lower.plot(margins, gaps, "o-", color=_GROUPS[0])
    lower.plot(margins, margins, ":", color=_MUTED, label="the margin itself")
    lower.set(ylabel="gap of what is answered", ylim=0, xlabel="margin of the reject option")
    lower.legend()


def votes(figure: Figure) -> None:
    """Noise of one released table against the votes of one class, by their number."""
    counts, scale = np.geomspace(30, 30_000, 40), 10_000
    axis = figure.subplots()
    for epsilon, style in ((0.1, "-"), (1.0, "--"), (5.0, ":")):
        noise = least_noise(
            lambda stddev: [VoteSums(count=1, noise_stddev_votes=stddev * scale, norm=scale)],
            target_epsilon=epsilon,
            target_delta=DELTA,
        )
        axis.loglog(
            counts, noise / counts, style, color=_GROUPS[0], label=f"epsilon {epsilon:g}: noise {noise:.1f} votes"
        )
    axis.set(xlabel="private records of one class", ylabel="noise, as a share of their sum")
    axis.legend()


def covered(figure: Figure) -> None:
    """The parts of the private records, what is released of each, and what no epsilon covers."""
    figure.set_size_inches(6.4, 3.9)
    axis = figure.subplots()
    axis.set(xlim=(0, 10), ylim=(-1.2, 3.8))
    axis.axis("off")
    # Each at epsilon 1, in parallel: a table of predictions has the noise that this price asks for.
    table = least_noise(
        lambda noise: [PredictionTables(count=1, noise_stddev_records=noise, weight=2**20)],
        target_epsilon=1.0,
        target_delta=DELTA,
        accounting="pld",
    )
    rows = (
        ("training records", "noisy sums, votes, gradients", "the model"),
        ("validation records", "a choice of settings, or scores of trials", "its settings"),
        ("test records", f"a table of counts, noise of {table:.1f} records", "its metrics"),
    )
    for row, words in enumerate(rows):
        for left, text, colour in zip((0.1, 3.0, 7.6), words, (_GROUPS[0], _INK, _GROUPS[1]), strict=True):
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour}
            axis.text(left, 3 - row, text, va="center", color=colour, bbox=box)
        for left, right in ((2.35, 2.85), (6.85, 7.45)):
            axis.annotate("", (right, 3 - row), (left, 3 - row), arrowprops={"arrowstyle": "->", "color": _MUTED})
    rule = "a keyed hash sends each private record to one part: ε is the largest of three"
    axis.text(0.1, 3.6, rule, color=_MUTED, va="center")
    axis.text(9.3, 2, "ε = 1 each", rotation=90, va="center", color=_INK)
    outside = (
        "not covered: public records; defaults and lists of settings that others made;",
        "errors of reading; exact metrics, where no private ones are asked for;",
        "other releases of the same records, which the odometer adds up",
    )
    for row, line in enumerate(outside):
        axis.text(0.1, 0.15 - 0.5 * row, line, color="#c00000", va="center")


def risk(figure: Figure) -> None:
    """The largest share of units that an attacker finds, by the share of false alarms, at three epsilons."""
    alarms = np.concatenate([[0.0], np.geomspace(1e-4, 1, 300)])
    axis = figure.subplots()
    for epsilon, style in ((3.0, ":"), (1.0, "--"), (0.3, "-")):
        found = [most_detected(float(share), epsilon, DELTA) for share in alarms]
        right = 100 * (1 - least_wrong(epsilon, DELTA))
        label = f"ε = {epsilon:g}: right {right:.0f} % of the time at even odds"
        axis.plot(alarms, found, style, color=_GROUPS[0], label=label)
    axis.plot([0, 1], [0, 1], color=_MUTED, linewidth=0.8, label="guesses without a look")
    axis.set(xlabel="false alarms, as a share of units that are not there", ylabel="units found, at most")
    axis.legend(loc="lower right")


def answers(figure: Figure) -> None:
    """The error rate of the most confident answers of two groups, and where they end under a bound of 5 %: from exact
    counts of 8,000 test records of each group, and from counts with the noise of epsilon 1."""
    generator, bound, axis = np.random.default_rng(0), ErrorBound(max_error=0.05), figure.subplots()
    confidence = 0.5 + 0.5 * generator.beta(1.2, 0.7, (2, 8000))
    # Of the second group the model is more often wrong than it believes.
    wrong = generator.random(confidence.shape) < (1 - confidence) * np.array([[0.6], [1.3]])
    groups = np.repeat([0, 1], 8000)
    bins = ConfidenceBins.of(confidence.ravel(), groups, num_strata=2, num_classes=2)
    counts = np.zeros((2, NUM_BINS, 2))
    np.add.at(counts, (groups, bins.numbers(confidence.ravel()), wrong.ravel().astype(int)), 1)
    noise = least_noise(
        lambda noise: (PredictionTables(count=2, noise_stddev_records=noise, weight=2**20),),
        target_epsilon=1,
        target_delta=DELTA,
        accounting="pld",
    )
    noisy = counts + generator.normal(0, noise, counts.shape)
    for group, colour in enumerate(_GROUPS):
        share = np.cumsum(counts[group].sum(axis=1)) / counts[group].sum()
        error = np.cumsum(counts[group, :, 1]) / np.cumsum(counts[group].sum(axis=1))
        axis.plot(share, error, color=colour, label=f"group {'AB'[group]}")
        for table, stddev, marker in ((counts, 0.0, "o"), (noisy, noise, "D")):
            first = first_tests(table.sum(axis=(1, 2)), bins, bound, noise_stddev=stddev)
            end = int(answered_bins(table, first, bound, noise_stddev=stddev)[group])
            if end:
                filled = colour if marker == "D" else "white"
                axis.plot(share[end - 1], error[end - 1], marker, color=colour, markerfacecolor=filled)
    axis.axhline(bound.max_error, color=_MUTED, linestyle=":")
    axis.set(
        xlabel="share of records that are answered", ylabel="errors among the answers", xlim=(0, 1.02), ylim=(0, 0.25)
    )
    axis.legend(frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, Callable[[Figure], None]] = {
    "unit": unit,
    "cost": cost,
    "gate": gate,
    "reject": reject,
    "answers": answers,
    "votes": votes,
    "covered": covered,
    "risk": risk,
}

if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
