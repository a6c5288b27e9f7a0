"""The page of a comparison: the best within a budget, charts, choices, who dominates whom, and what failed.

One panel (data set, unit, relation, delta) at a time, because guarantees of different kinds do not compare. A budget is
a level of epsilon, and within it is every configuration that costs no more. Degenerate predictors, undefined values,
epsilons that depend on private votes and runs without a finite epsilon are in no budget, and are counted.

The page is one HTML file with its scripts inside; its content policy forbids every request. What depends on private
votes is left out of a page to publish, and marked with a dagger and hollow shapes on the operator's; results without
privacy are left out too, unless the data are public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from markupsafe import Markup

from fairpate.fairness.rates import DEFAULT, NOTIONS
from fairpate.report.figures import (
    COLOURS,
    DARK_COLOURS,
    MOST_SHIFT,
    PAIRS,
    SeriesStyle,
    by_family,
    class_label,
    coverage_range,
    epsilon_levels,
    level_of,
    looks,
    middle_level,
    on_frontier,
    script_data,
    size_of,
    sound,
    titles,
    with_spread,
)
from fairpate.report.frontier import (
    FAILED,
    FIRST,
    OBJECTIVES,
    Dominance,
    FloatArray,
    Objective,
    Panel,
    Point,
    Row,
    SelectionRule,
    Setting,
    Threshold,
    best_error,
    by_panel,
    by_series,
    dominance,
    frontier,
    guaranteed,
    is_seeded,
    left_out_by,
    notions_of,
    points_of,
    select,
)
from fairpate.report.page import count, counted, decimal, epsilon_text, percent, render
from fairpate.types import NotionName

_GAP_DIGITS = 3
_MOST_BUDGETS, _MOST_NAMES = 4, 4
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The best within one level of epsilon: a sentence, and a row of the table for each method.

    A row is the method, its seeds, its highest mean accuracy, its smallest mean gap with the accuracy there; means have
    their standard errors.
    """

    epsilon: float
    sentence: str
    rows: tuple[tuple[str, ...], ...]


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
        budgets=tuple(_budget(told, levels, number) for number in _some(len(levels), first=middle_level(told))),
        left_out=tuple(_left_out(points)),
        unsaid=(*_underserving(told), *_unmeasured(told)),
    )


def _budget(points: Sequence[Point], levels: Sequence[float], number: int) -> Budget:
    """What is reached by configurations that cost no more than one level."""
    affordable = [point for point in points if level_of(point, levels) <= number]
    best, fairest = _most_accurate(affordable), _fairest(affordable)
    measure = NOTIONS[best.notion].measure
    rows = []
    for name, found in by_series(affordable).items():
        own, own_fairest = _most_accurate(found), _fairest(found)
        seeds = min(len(point.seeds) for point in (own, own_fairest))
        gap = decimal(own_fairest.value("disparity")) + _plus_minus(own_fairest, "disparity", 1, decimal)
        rows.append((name, str(seeds), _accuracy_with_error(own), gap, _accuracy_with_error(own_fairest)))
    return Budget(
        epsilon=levels[number],
        sentence=f"The highest mean accuracy is {best.method}’s, {_accuracy_words(best)}. The smallest mean {measure} "
        f"is {fairest.method}’s, {_gap(fairest)} at {_accuracy_words(fairest)}.",
        rows=tuple(rows),
    )


def _accuracy_with_error(point: Point) -> str:
    return percent(1 - point.value("error")) + _plus_minus(point, "error", 100, "{:.1f}".format)


def _plus_minus(point: Point, objective: Objective, unit: float, write: Callable[[float], str]) -> str:
    """One standard error; nothing for a single seed."""
    error = float(standard_errors(point)[OBJECTIVES.index(objective)])
    return "" if math.isnan(error) else f" ± {write(unit * error)}"


def standard_errors(point: Point) -> FloatArray:
    """Of each objective's mean over seeds; NaN for a single seed."""
    errors: FloatArray = point.spread_O / math.sqrt(len(point.seeds))
    return errors


def _is_told(point: Point) -> bool:
    is_published = not point.epsilon_is_data_dependent and math.isfinite(point.value("epsilon"))
    return is_published and not point.degenerate and not point.num_undefined


def _some(count: int, *, first: int) -> list[int]:
    """``first``, and some others of so many, from the least to the last."""
    if not count:
        return []
    others = np.linspace(0, count - 1, min(count, _MOST_BUDGETS)).round().astype(int).tolist()
    return list(dict.fromkeys([first, *others]))


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


def _gap(point: Point) -> str:
    return _short(round(point.value("disparity"), _GAP_DIGITS))


def _short(value: float) -> str:
    """.01 for 0.01."""
    return f"{value:g}".removeprefix("0") or "0"


def _listed(names: Sequence[str]) -> str:
    """``a, b and c``; of many the first ones and how many more."""
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} others"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_PERCENT = "\u00a0%"


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


_PLANES = ((2, "coverage over ε"), (3, "disparity over ε"), (4, "accuracy over coverage"))
"""What the third plane of a data set shows, by its number among all planes."""
_MOST_COLUMNS, _MOST_LISTED = 5, 2000


@dataclass(frozen=True, kw_only=True)
class FrontierReport:
    """What the page shows: rows of a comparison, and how choices and intervals are made.

    With ``for_operator`` rows whose epsilon depends on private votes are shown and marked; otherwise they are left out
    and counted, and so are rows without privacy unless ``publish_unprotected``. Why a run failed only the operator
    reads. ``num_replicates`` bootstrap replicates come from a generator with ``bootstrap_seed``. ``notion`` is the one
    that the page opens with; the reader may choose any other that was recorded.
    """

    title: str
    rows: Sequence[Row]
    for_operator: bool = False
    publish_unprotected: bool = False
    notion: NotionName = DEFAULT
    rule: SelectionRule = field(default_factory=SelectionRule)

    @property
    def shown(self) -> list[Row]:
        """Rows that this page may show."""
        return [row for row in self.rows if self.for_operator or self._is_public(row)]

    @property
    def secret(self) -> list[Row]:
        """Rows that only the operator may see."""
        return [row for row in self.rows if not self._is_public(row)]

    @property
    def failed(self) -> list[Row]:
        """Rows without a record that this page may show."""
        return [row for row in self.shown if row.record is None]

    def points(self) -> list[Point]:
        """The finished rows joined over seeds."""
        done = [(row.record, row.command) for row in self.shown if row.record is not None]
        records, commands = [record for record, _ in done], [command for _, command in done]
        return points_of(records, commands=commands, notion=self.notion)

    def notions(self, points: Sequence[Point]) -> tuple[NotionName, ...]:
        """What the reader may choose from, the one to open with first."""
        return tuple(dict.fromkeys((self.notion, *notions_of(points))))

    def _is_public(self, row: Row) -> bool:
        return not row.is_private and (self.publish_unprotected or not row.is_unprotected)


def frontier_report(report: FrontierReport) -> str:
    """The page, as one HTML document of about 1 MB: most of it is the library that draws."""
    points = report.points()
    series = looks(points)
    members = on_frontier(points)
    notions = report.notions(points)
    seen = [[point.seen_by(notion) for point in points] for notion in notions]
    panels = by_panel(points)
    number_of = {panel: number for number, panel in enumerate(panels)}
    names = titles(report.notion) | {"epsilon": "ε", "disparity": "disparity"}
    pairs = [f"{names[first]} and {names[second]}" for first, second in PAIRS]
    return render(
        "frontier.html",
        report=report,
        secrets=_reasons_for_secrecy(report.secret) if report.for_operator else [],
        num_seeded=sum(is_seeded(r.config) for r in report.shown if r.record is not None and not r.is_unprotected),
        figures=_figures(report, points),
        points=points,
        index={point: index for found in seen for index, point in enumerate(found)},
        members={point for point in points if id(point) in members},
        listed=[point for point in points if len(points) <= _MOST_LISTED or id(point) in members],
        series=series,
        series_number={name: number for number, name in enumerate(series)},
        classes=[
            _class_view(
                report,
                [[point for point in found if point.panel.privacy == privacy] for found in seen],
                number_of,
                list(series.values()),
            )
            for privacy in sorted({panel.privacy for panel in panels})
        ],
        notions=[NOTIONS[notion] for notion in notions],
        rules=[rule_words(report.rule, notion) for notion in notions],
        settings=[settings_words(notion) for notion in notions],
        fairness={point: fairness_words(point, notions) for point in points},
        planes=_PLANES,
        colours=list(enumerate(zip(COLOURS, DARK_COLOURS, strict=True))),
        most_shift=MOST_SHIFT / 1000,
        pairs=list(enumerate(pairs)),
        dots=[round(size_of(end, (0.0, 1.0))) for end in (0, 1)],
        lowest=coverage_range(points)[0],
        cells=cells,
        class_label=class_label,
        epsilons_words=epsilons_words,
        failed_words=FAILED,
        left_out=_left_out_rows(report),
        model=script_data(points, notions=notions),
        library=_library(),
    )


_EXPORTED = "window.vegaEmbed = vegaEmbed;"


@cache
def _library() -> Markup:
    """Vega, Vega-Lite and Vega-Embed as one script without imports; to bundle it takes seconds."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle(_EXPORTED))  # noqa: S704 - the library's own script


def _class_view(
    report: FrontierReport,
    seen: Sequence[Sequence[Point]],
    number_of: Mapping[Panel, int],
    known: Sequence[SeriesStyle],
) -> dict[str, Any]:
    """What the section of one privacy class shows; ``seen`` are its points by each notion."""
    panels_by_notion = [by_panel(found) for found in seen]
    points, panels = seen[0], panels_by_notion[0]
    privacy, names = points[0].panel.privacy, by_series(points).keys()
    most = max(len(by_series(found)) for found in panels.values())
    return {
        "label": class_label(privacy),
        "families": by_family(look for look in known if look.series in names),
        "names": [look.series for look in known if look.series in names],
        "panels": [
            _panel_view(report, [found[panel] for found in panels_by_notion], number_of[panel]) for panel in panels
        ],
        "has_pairs": most > 1,
        "has_wide_matrix": most > _MOST_COLUMNS or len(panels) == 1,
        "is_alone": len(panels) == 1,
    }


def _panel_view(report: FrontierReport, seen: Sequence[Sequence[Point]], number: int) -> dict[str, Any]:
    """What the cards of one data set show; ``seen`` are its points by each notion."""
    points, panel = seen[0], seen[0][0].panel
    label, compared = class_label(panel.privacy), baseline_words(baselines(points))
    levels = epsilon_levels(points)
    return {
        "data": panel.data,
        "number": number,
        "label": label,
        "compared": compared,
        "levels": [(place, epsilon_text(level)) for place, level in enumerate(levels)],
        "level": middle_level(points),
        "names": list(looks(points)),
        "seen": [_seen_view(report, found, compared) for found in seen],
    }


def _seen_view(report: FrontierReport, points: Sequence[Point], compared: str) -> dict[str, Any]:
    """What depends on the notion of fairness that disparity is of."""
    num_undefined = len(frontier(points).undefined)
    undefined = f"Left out, because a value is undefined: {counted(num_undefined, 'configuration')}."
    return {
        "undefined": undefined if num_undefined else "",
        "findings": findings(points),
        "choice_words": " ".join(filter(None, (compared, left_out_words(report.rule, points)))),
        "choices": choices(report.rule, points),
        "dominance": dominance_by_pair(points),
    }


def _reasons_for_secrecy(secret: Sequence[Row]) -> list[str]:
    reasons = []
    if any(row.is_private for row in secret):
        reasons.append(
            "An ε marked † depends on the private votes of teachers; it is itself private and carries no guarantee for "
            "other votes."
        )
    if any(row.is_unprotected for row in secret):
        reasons.append(f"Results without privacy tell of the private records: {_methods(secret)}.")
    return reasons


def _methods(rows: Sequence[Row]) -> str:
    """Those of the rows without privacy."""
    return ", ".join(dict.fromkeys(row.method for row in rows if row.is_unprotected))


def _figures(report: FrontierReport, points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """The headline: a name, a value and a detail each."""
    done = [row for row in report.shown if row.record is not None]
    methods, data_sets = (sorted({getattr(row, name) for row in report.shown}) for name in ("method", "data"))
    by = NOTIONS[report.notion].measure
    seeds = counted(len({row.seed for row in done}), "seed")
    return [
        ("Methods", count(len(methods)), ", ".join(methods)),
        ("Data sets", count(len(data_sets)), ", ".join(data_sets)),
        ("Configurations", count(len(points)), f"{count(len(on_frontier(points)))} of them on a frontier by {by}"),
        ("Runs", count(len(done)), f"{seeds}; {count(len(report.failed))} failed"),
    ]


def _left_out_rows(report: FrontierReport) -> list[str]:
    """What a page to publish does not show."""
    left_out = [] if report.for_operator else report.secret
    by_votes, unprotected = (sum(row.is_private for row in left_out), sum(row.is_unprotected for row in left_out))
    words = []
    if by_votes:
        words.append(f"{counted(by_votes, 'row')} whose ε depends on private votes; for the operator.")
    if unprotected:
        words.append(f"{counted(unprotected, 'row')} without privacy; for the operator: {_methods(left_out)}.")
    return words
