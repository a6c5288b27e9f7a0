"""What the tables of the frontier's page say: which configuration to choose, who dominates whom, hypervolumes.

Rows and words only; the page's template lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fairpate.evaluation.dominance import Dominance, dominance
from fairpate.evaluation.frontier import OBJECTIVES, Point, by_series, guaranteed
from fairpate.evaluation.frontier_charts import sound, titles, with_spread
from fairpate.evaluation.hypervolume import VolumeInterval, reference_point, volume_interval
from fairpate.evaluation.page import counted, epsilon_text, percent
from fairpate.evaluation.selection import FIRST, SelectionRule, Setting, Threshold, best_error, left_out_by, select
from fairpate.fairness.notions import NOTIONS, NotionName

_PERCENT = "\u00a0%"


@dataclass(frozen=True, kw_only=True)
class Volumes:
    """Hypervolumes of one panel: up to which corner, and a row of (series, words, interval) each, largest first."""

    corner: str
    rows: Sequence[tuple[str, str, VolumeInterval]]

    @property
    def ends(self) -> list[float]:
        """What a scale has to reach."""
        return [end for _, _, volume in self.rows for end in (volume.value, volume.high)]


def settings_words(notion: NotionName) -> dict[Setting, tuple[str, str]]:
    """The three settings, and what is looked at first in each."""
    return {
        "fair": ("Fair", f"the smallest {NOTIONS[notion].measure} first"),
        "private": ("Private", "the smallest ε first"),
        "accurate": ("Accurate", "the highest accuracy first"),
    }


def rule_words(rule: SelectionRule, notion: NotionName) -> str:
    """What a configuration must keep to be chosen."""
    level = ", ".join(f"{value:g} in {titles(notion)[name]}" for name, value in rule.tolerance.items())
    return (
        "One configuration of each method in the three settings of the FairPATE paper. It keeps a coverage of at least "
        f"{percent(rule.min_coverage)} and an accuracy at most {percent(rule.max_accuracy_loss)} below the best that a "
        "finite ε reaches on its data set, and is not degenerate (one class for everyone, or no better than one); "
        f"differences up to {level} count as level, and then accuracy decides."
    )


def choices(rule: SelectionRule, points: Sequence[Point]) -> dict[Setting, list[Point]]:
    """One configuration per method of a panel in each of the paper's three settings, the first in rank first."""
    least = best_error(points, rule)
    chosen = {
        setting: [select(found, setting, rule=rule, best_error=least) for found in by_series(points).values()]
        for setting in FIRST
    }
    return {
        setting: sorted((point for point in found if point is not None), key=partial(_rank, setting))
        for setting, found in chosen.items()
    }


def _rank(setting: Setting, point: Point) -> list[float]:
    rank: list[float] = guaranteed([point], (FIRST[setting], "error"))[0].tolist()
    return rank


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """What an accuracy of a panel is to be compared with; NaN where it is not known.

    ``majority``: the most common class, mean over seeds. ``unprotected``: the best accuracy of a run without privacy
    among the points that may be shown, and ``unprotected_method`` what reached it.
    """

    majority: float
    unprotected: float
    unprotected_method: str


def baselines(points: Sequence[Point]) -> Baselines:
    """The baselines of one panel. Of points that cover test records differently the majority is of the most covered."""
    known = [point for point in points if not math.isnan(point.majority_accuracy)]
    widest = min(known, key=lambda point: point.value("refused"), default=None)
    free = [p for p in points if math.isinf(p.value("epsilon")) and not math.isnan(p.value("error"))]
    best = min(free, key=lambda point: point.value("error"), default=None)
    return Baselines(
        majority=math.nan if widest is None else widest.majority_accuracy,
        unprotected=math.nan if best is None else 1 - best.value("error"),
        unprotected_method="" if best is None else best.method,
    )


def baseline_words(found: Baselines) -> str:
    """What the accuracies of a panel are to be compared with; empty where nothing is known."""
    words = [] if math.isnan(found.majority) else [f"always the most common class: {percent(found.majority)}"]
    if not math.isnan(found.unprotected):
        words.append(f"best without privacy: {percent(found.unprotected)} ({found.unprotected_method})")
    return f"Accuracy to compare with: {'; '.join(words)}." if words else ""


def left_out_words(rule: SelectionRule, points: Sequence[Point]) -> str:
    """Which series are in no setting, by the thresholds that keep them out."""
    least = best_error(points, rule)
    words: Mapping[Threshold, str] = {
        "coverage": f"coverage below {percent(rule.min_coverage)}",
        "accuracy": f"accuracy below {percent(1 - least - rule.max_accuracy_loss)}",
        "degenerate": "degenerate",
        "definition": "a value is undefined",
    }
    names_by: dict[str, list[str]] = {}
    for name, found in by_series(points).items():
        below = left_out_by(found, rule=rule, best_error=least)
        if below:
            names_by.setdefault(" or ".join(words[b] for b in words if b in below), []).append(name)
    left_out = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by.items())
    return f"Left out: {left_out}." if left_out else ""


def cells(point: Point) -> list[tuple[str, str]]:
    """Epsilon, disparity, accuracy and coverage of a configuration, each with its spread over seeds."""
    dagger = " †" if point.epsilon_is_data_dependent else ""
    parts = [words.partition(" ± ") for words in with_spread(point)]
    spreads = [(value.removesuffix(_PERCENT), plus + spread) for value, plus, spread in parts]
    return [(epsilon_text(point.value("epsilon")) + dagger, ""), *spreads]


def fairness_words(point: Point, notions: Sequence[NotionName]) -> list[str]:
    """The value of each notion with its spread over seeds."""
    return [with_spread(point.seen_by(notion))[0] for notion in notions]


def dominance_by_pair(points: Sequence[Point]) -> dict[tuple[str, str], Dominance]:
    """How much of the second series the first dominates, of configurations that are not degenerate."""
    return {(pair.winner, pair.loser): pair for pair in dominance(sound(points))}


def epsilons_words(epsilons: Sequence[float]) -> str:
    """From the least to the largest epsilon."""
    ends = [epsilon_text(value).rstrip("0").rstrip(".") for value in (epsilons[0], epsilons[-1])]
    return f"ε {ends[0]}" if ends[0] == ends[1] else f"ε {ends[0]}–{ends[1]}"


def volumes(points: Sequence[Point], *, bootstrap_seed: int, num_replicates: int) -> Volumes:
    """Hypervolumes of a panel's series with their intervals, of configurations that are not degenerate."""
    names = titles(points[0].notion)
    points = sound(points)
    reference_O = reference_point(points, OBJECTIVES)
    generator = np.random.default_rng(bootstrap_seed)
    found = {
        name: volume_interval(own, reference_O=reference_O, generator=generator, num_replicates=num_replicates)
        for name, own in by_series(points).items()
    }
    ends = [
        f"{names[name]} {1 - end if name in ('error', 'refused') else end:g}"
        for name, end in zip(OBJECTIVES, reference_O.tolist(), strict=True)
    ]
    rows = [
        (f"{name}, {counted(volume.num_points, 'point')}", _volume_words(volume), volume)
        for name, volume in sorted(found.items(), key=lambda item: -item[1].value)
    ]
    return Volumes(corner=", ".join(ends), rows=rows)


def _volume_words(volume: VolumeInterval) -> str:
    interval = "one seed" if math.isnan(volume.low) else f"{volume.low:.3f} to {volume.high:.3f}"
    return f"{volume.value:.3f} ({interval})"
