"""The comparison in sentences, each computed from the rows: who is most accurate, fair and dominant within a budget.

One panel (data set, unit, relation, delta) at a time: guarantees of different kinds are in no sentence together. A
budget is a level of epsilon, and within it is every configuration that costs no more. Left out of all sentences, and
counted, are degenerate predictors, undefined values, epsilons that depend on private votes and runs without a finite
epsilon.

A difference of two means counts beyond one standard error of it: sqrt(s^2/n + t^2/m) for standard deviations s, t over
n, m seeds. Where one of the configurations has fewer than three seeds, or all seeds of both agree to the last digit,
next to nothing is known of that error, and neither is called better than the other. A method dominates another within a
budget when each configuration of the other is dominated by one of its own: nowhere worse in mean, in epsilon's level,
disparity, accuracy and coverage, and beyond one standard error better in disparity, accuracy or coverage, or at a lower
level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fairpate.evaluation.frontier import OBJECTIVES, FloatArray, Objective, Point, by_series
from fairpate.evaluation.frontier_planes import epsilon_levels, level_of, middle_level
from fairpate.evaluation.page import counted, percent
from fairpate.fairness.notions import NOTIONS

THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_GAP_DIGITS = 3
"""Round disparities that sentences may name."""
_NUMERALS = ("no", "one", "two")
_MOST_BUDGETS, _MOST_NAMES, _MOST_WINNERS = 4, 4, 2
_ROUNDING = 1e-12
LEAST_SEEDS = 3
"""Of a configuration that may be called better or worse than another."""
_MEASURED = [OBJECTIVES.index(name) for name in OBJECTIVES if name != "epsilon"]

Candidates = Mapping[str, Sequence[Point]]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What is said of one level of epsilon."""

    epsilon: float
    sentences: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is said of one panel: of the middle budget first, what no sentence is about, and what none of them says."""

    budgets: tuple[Budget, ...]
    left_out: tuple[str, ...]
    unsaid: tuple[str, ...]


def findings(points: Sequence[Point]) -> Findings:
    """The sentences of one panel: at the middle budget, then at no more than four others."""
    told = [point for point in points if _is_told(point)]
    levels = epsilon_levels(told)
    return Findings(
        budgets=tuple(
            Budget(epsilon=levels[number], sentences=tuple(_within(told, levels, number)))
            for number in _some(len(levels), first=middle_level(told))
        ),
        left_out=tuple(_left_out(points)),
        unsaid=(*_underserving(told), *_unmeasured(told)),
    )


def standard_errors(point: Point) -> FloatArray:
    """Of each objective's mean over seeds; NaN for a single seed."""
    errors: FloatArray = point.spread_O / math.sqrt(len(point.seeds))
    return errors


def is_beyond(better: Point, worse: Point, objective: Objective) -> bool:
    """Whether ``better`` is less by more than one standard error of the difference; False where that is unknown."""
    place = OBJECTIVES.index(objective)
    return bool(worse.mean_O[place] - better.mean_O[place] > _error_of_difference(better, worse, place) + _ROUNDING)


def _error_of_difference(one: Point, other: Point, place: int) -> float:
    """One standard error, NaN where no seed differs from another: a spread of zero was not measured."""
    error = math.hypot(standard_errors(one)[place], standard_errors(other)[place])
    return error if error > _ROUNDING else math.nan


def dominated(points: Sequence[Point], by: Sequence[Point], levels: Sequence[float]) -> bool:
    """Whether each of ``points`` is dominated, beyond standard errors, by one of ``by``."""
    means_N3, errors_N3, level_N = _measured(by, levels)
    for mean_3, error_3, level in zip(*_measured(points, levels), strict=True):
        saved_N = level - level_N
        gain_N3 = mean_3 - means_N3
        nowhere_worse_N = (saved_N >= 0) & (gain_N3 >= -_ROUNDING).all(axis=1)
        error_N3 = np.hypot(errors_N3, error_3)
        # Where no seed differs from another the spread was not measured, and no gain counts.
        beyond_N = ((error_N3 > _ROUNDING) & (gain_N3 > error_N3 + _ROUNDING)).any(axis=1)
        if not (nowhere_worse_N & ((saved_N > 0) | beyond_N)).any():
            return False
    return True


def _measured(points: Sequence[Point], levels: Sequence[float]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Means and standard errors (N, 3) of all objectives but epsilon, and the number (N,) of epsilon's level."""
    means_N3 = np.array([point.mean_O[_MEASURED] for point in points])
    errors_N3 = np.array([standard_errors(point)[_MEASURED] for point in points])
    return means_N3, errors_N3, np.array([float(level_of(point, levels)) for point in points])


def _is_told(point: Point) -> bool:
    is_published = not point.epsilon_is_data_dependent and math.isfinite(point.value("epsilon"))
    return is_published and not point.degenerate and not point.num_undefined


def _some(count: int, *, first: int) -> list[int]:
    """``first``, and some others of so many, from the least to the last."""
    if not count:
        return []
    others = np.linspace(0, count - 1, min(count, _MOST_BUDGETS)).round().astype(int).tolist()
    return list(dict.fromkeys([first, *others]))


def _within(points: Sequence[Point], levels: Sequence[float], number: int) -> list[str]:
    """The sentences about what costs no more than one level."""
    affordable = [point for point in points if level_of(point, levels) <= number]
    methods = by_series(affordable)
    if len(methods) == 1:
        return [_of_one(affordable)]
    fewest = min(len(point.seeds) for point in affordable)
    if fewest < LEAST_SEEDS:
        few = f"{_NUMERALS[fewest]} {'seed' if fewest == 1 else 'seeds'} alone"
        return [*_highest(methods), f"Some have {few}, so no method is called better than another."]
    return [_accuracy(methods), _fairness(methods), _dominance(methods, levels)]


def _of_one(points: Sequence[Point]) -> str:
    best = _most_accurate(points)
    measure = NOTIONS[best.notion].measure
    return (
        f"{best.method} is the only method: its highest accuracy is {_accuracy_words(best)}, its smallest {measure} "
        f"{_gap_words(_fairest(points))}."
    )


def _highest(methods: Candidates) -> list[str]:
    """Means, without a judgement."""
    best = _most_accurate([point for found in methods.values() for point in found])
    fairest = _fairest([point for found in methods.values() for point in found])
    return [
        f"The highest mean accuracy is {best.method}’s, {_accuracy_words(best)}.",
        f"The smallest mean {NOTIONS[fairest.notion].measure} is {fairest.method}’s, {_gap_words(fairest)}.",
    ]


def _accuracy(methods: Candidates) -> str:
    """Who is most accurate, or who is level with the most accurate."""
    best_of = sorted((_most_accurate(found) for found in methods.values()), key=lambda point: point.value("error"))
    first, others = best_of[0], best_of[1:]
    level = [point for point in others if not is_beyond(first, point, "error")]
    if not level:
        return f"{first.method} is the most accurate: {_accuracy_words(first)}."
    within = _within_words(first, level)
    if len(level) == len(others):
        return f"In accuracy all are level, within {within}: {first.method} has {_accuracy_words(first)}."
    names = [f"{point.method} ({_accuracy_words(point)})" for point in (first, *level)]
    return f"{_listed(names)} are the most accurate, within {within}."


def _within_words(first: Point, level: Sequence[Point]) -> str:
    """What keeps others level with ``first``: one standard error, or that no spread was measured."""
    place = OBJECTIVES.index("error")
    if not any(math.isnan(_error_of_difference(first, point, place)) for point in level):
        return "one standard error"
    return f"what {counted(min(len(point.seeds) for point in (first, *level)), 'seed')} can tell"


def _fairness(methods: Candidates) -> str:
    """Who stays below the least round disparity that anyone stays below, beyond a standard error."""
    fairest = _fairest([point for found in methods.values() for point in found])
    measure = NOTIONS[fairest.notion].measure
    for threshold in THRESHOLDS:
        below = {name: kept for name, found in methods.items() if (kept := _below(found, threshold))}
        if below:
            return _who_is_below(methods, below, measure, threshold)
    return f"No method has {_with_article(measure)} below {_short(THRESHOLDS[-1])}."


def _who_is_below(methods: Candidates, below: Candidates, measure: str, threshold: float) -> str:
    limit = f"{_with_article(measure)} below {_short(threshold)}"
    is_sure = all(name in below or _all_above(found, threshold) for name, found in methods.items())
    if len(below) == len(methods):
        fairest = _fairest([point for found in below.values() for point in found])
        return f"Every method has {limit}; the smallest is {fairest.method}’s, {_gap_words(fairest)}."
    names = list(below)
    if len(names) > 1:
        return f"Only {_listed(names)} have {limit}." if is_sure else f"{_listed(names)} have {limit}."
    found = _gap_words(_most_accurate(below[names[0]]))
    return f"{names[0]} {'is the only method with' if is_sure else 'has'} {limit} ({found})."


def _below(points: Sequence[Point], threshold: float) -> list[Point]:
    """As printed too: .0496 is shown as .05, which is not below it."""

    def largest(point: Point) -> float:
        gap = point.value("disparity")
        return max(gap, round(gap, _GAP_DIGITS)) + _gap_error(point)

    return [point for point in points if largest(point) < threshold]


def _all_above(points: Sequence[Point], threshold: float) -> bool:
    """Beyond an error that was measured."""
    return all(
        _gap_error(point) > _ROUNDING and point.value("disparity") - _gap_error(point) >= threshold for point in points
    )


def _gap_error(point: Point) -> float:
    return float(standard_errors(point)[OBJECTIVES.index("disparity")])


def _dominance(methods: Candidates, levels: Sequence[float]) -> str:
    """Which methods dominate which, the one that dominates most first."""
    beaten = {
        winner: [loser for loser in methods if loser != winner and dominated(methods[loser], methods[winner], levels)]
        for winner in methods
    }
    winners = sorted((name for name in beaten if beaten[name]), key=lambda name: -len(beaten[name]))
    if not winners:
        return "No method dominates another."
    return " ".join(_dominating(name, beaten[name], methods) for name in winners[:_MOST_WINNERS])


def _dominating(winner: str, losers: Sequence[str], methods: Candidates) -> str:
    is_all = len(losers) == len(methods) - 1 > 1
    return f"{winner} dominates {'every other method' if is_all else _listed(losers)}."


def _left_out(points: Sequence[Point]) -> list[str]:
    """What no sentence is about, with the first reason of each."""
    rest = [point for point in points if not _is_told(point)]
    reasons: dict[str, list[str]] = {}
    for point in rest:
        reasons.setdefault(_reason(point), []).append(point.method)
    return [
        f"{counted(len(names), 'configuration')} of {_listed(list(dict.fromkeys(names)))}: {reason}"
        for reason, names in reasons.items()
    ]


def _underserving(points: Sequence[Point]) -> list[str]:
    """How many of ``points`` have come to what they are by serving a group worse than a constant would."""
    found = [point for point in points if point.groups.underserved]
    if not found:
        return []
    methods, groups = (
        _listed(list(dict.fromkeys(names)))
        for names in ([point.method for point in found], [name for point in found for name in point.groups.underserved])
    )
    several = counted(len(found), "configuration")
    return [f"{several} of {methods} with a group that is served worse than by a constant in some seed: {groups}."]


def _unmeasured(points: Sequence[Point]) -> list[str]:
    """The groups that no gap of ``points`` compares."""
    names = list(dict.fromkeys(name for point in points for name in point.groups.unmeasured))
    return [f"Not known for {_listed(names)}: too few answered test records in some seed, so no gap."] if names else []


def _reason(point: Point) -> str:
    if point.degenerate:
        return "degenerate"
    if point.epsilon_is_data_dependent:
        return "ε depends on private votes"
    undefined = [name for name in OBJECTIVES if np.isnan(point.value(name))]
    names = {"error": "accuracy", "refused": "coverage", "disparity": NOTIONS[point.notion].measure}
    return f"{_listed([names.get(name, name) for name in undefined])} undefined" if undefined else "no finite ε"


def _most_accurate(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: (point.value("error"), point.value("disparity")))


def _fairest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: (point.value("disparity"), point.value("error")))


def _accuracy_words(point: Point) -> str:
    words = percent(1 - point.value("error"))
    return (
        words
        if point.value("refused") <= _ROUNDING
        else f"{words} of the {percent(1 - point.value('refused'))} answered"
    )


def _gap_words(point: Point) -> str:
    return f"{_gap(point)} at {_accuracy_words(point)}"


def _gap(point: Point) -> str:
    return _short(round(point.value("disparity"), _GAP_DIGITS))


def _with_article(measure: str) -> str:
    return f"{'an' if measure[0] in 'aeiou' else 'a'} {measure}"


def _short(value: float) -> str:
    """.01 for 0.01."""
    return f"{value:g}".removeprefix("0") or "0"


def _listed(names: Sequence[str]) -> str:
    """``a, b and c``; of many the first ones and how many more."""
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} others"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
