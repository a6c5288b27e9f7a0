"""The page of a comparison: a choice within two limits, the best within a budget, charts, choices by the paper's rule,
which methods dominate which, and what failed.

The page shows one panel (data set, unit, relation, delta) at a time, because guarantees of different kinds are not
comparable. A budget is a level of epsilon; every configuration that costs no more is within it. Degenerate predictors,
undefined values, epsilons that depend on private votes and runs without a finite epsilon are within no budget; the page
states their number.

The page is one HTML file with its scripts inside. The public page leaves out what depends on private votes, and results
without privacy unless the data are public. The private page shows both, and marks epsilons that depend on private votes
with a dagger and hollow shapes.
"""

import base64
import gzip
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, get_args

import numpy as np

from fairpate import pages
from fairpate.fairness.rates import DEFAULT, NAMES, NOTIONS
from fairpate.pages import count, counted, decimal, epsilon_text, listed, percent, render
from fairpate.report import figures, frontier
from fairpate.report.frontier import Objective, Panel, Point, PrivacyClass, Row, Setting, Threshold, by_series
from fairpate.report.records import FAIR_IN_ANSWERS, WORDS, Verdict, ends_words, fair_words, verdict
from fairpate.types import FairRule, NotionName

_LEAST_SEEDS = 3
_MOST_BUDGETS, _MOST_NAMES = 4, 4
_MOST_COLUMNS, _MOST_LISTED = 5, 2000
_PERCENT = "\u00a0%"
_RULE = frontier.SelectionRule()


@dataclass(frozen=True, kw_only=True)
class BudgetFindings:
    """The best configurations whose epsilon is within one budget: a sentence, and a table row for each method.

    A row has the method, its number of seeds, its highest mean accuracy, and its smallest mean fairness gap with the
    accuracy of the configuration that has this gap; means have standard errors.
    """

    epsilon: float
    sentence: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The sentences about one panel (data set and privacy class) on the page of a comparison.

    ``budgets``: the best configurations within each level of epsilon, starting with the middle level. ``left_out``:
    sentences on points that are not compared, with the reason. ``unsaid``: sentences on groups for which a small gap is
    weak evidence.
    """

    budgets: tuple[BudgetFindings, ...]
    left_out: tuple[str, ...]
    unsaid: tuple[str, ...]


def findings(points: Sequence[Point]) -> Findings:
    """Return the sentences about the points of one panel (data set and privacy class). They describe the best
    configurations within the middle level of epsilon, then those within up to four other levels
    (:func:`fairpate.report.figures.epsilon_levels`)."""

    def best_of(found: Sequence[Point]) -> tuple[Point, Point]:
        """Return the most accurate and the fairest of the points ``found``. Ties in accuracy are broken by disparity,
        and ties in disparity by accuracy."""
        pairs: tuple[tuple[Objective, Objective], ...] = (("error", "disparity"), ("disparity", "error"))
        accurate, fair = (min(found, key=lambda each: [each.value(name) for name in pair]) for pair in pairs)
        return accurate, fair

    compared: list[Point] = []
    methods_by_reason: dict[str, list[str]] = {}
    for point in points:
        if point.degenerate:
            reason = "degenerate"
        elif point.epsilon_is_data_dependent:
            reason = "ε depends on private votes"
        elif point.num_undefined:
            words = {"error": "accuracy", "refused": "coverage", "disparity": NOTIONS[point.notion].measure}
            undefined = [words.get(name, name) for name in frontier.OBJECTIVES if np.isnan(point.value(name))]
            reason = f"{_listed(undefined)} undefined"
        elif math.isinf(point.value("epsilon")):
            reason = "not private"
        else:
            compared.append(point)
            continue
        methods_by_reason.setdefault(reason, []).append(point.method)
    left_out = [
        f"{counted(len(methods), 'configuration')} of {_listed(methods)}: {reason}"
        for reason, methods in methods_by_reason.items()
    ]

    levels = figures.epsilon_levels(compared)
    numbers = []
    if levels:
        # The smallest and the largest level are included, and the middle one comes first: a reader begins there.
        spaced = np.linspace(0, len(levels) - 1, min(len(levels), _MOST_BUDGETS)).round().astype(int).tolist()
        numbers = list(dict.fromkeys([figures.middle_level(compared), *spaced]))
    budgets = []
    for number in numbers:
        # A budget includes every configuration that costs no more.
        affordable = [point for point in compared if figures.level_of(point, levels) <= number]
        rows = []
        for name, found in by_series(affordable).items():
            best, fairest = best_of(found)
            # With standard errors of the means.
            _, highest, _ = figures.with_spread(best, math.sqrt(len(best.seeds)))
            gap, there, _ = figures.with_spread(fairest, math.sqrt(len(fairest.seeds)))
            # One number of seeds for both configurations of the row: the smaller.
            seeds = min(len(best.seeds), len(fairest.seeds))
            rows.append((name, str(seeds), highest, gap, there))
        # A sentence names a winner, so it needs means; the table lists single seeds too, with their number.
        repeated = [point for point in affordable if len(point.seeds) >= _LEAST_SEEDS]
        sentence = "No configuration has three runs: with fewer, a difference between methods may be chance."
        if repeated:
            best, fairest = best_of(repeated)
            gap = decimal(fairest.value("disparity"))
            sentence = (
                f"The highest mean accuracy is {best.method}’s, {_accuracy_words(best)}. The smallest mean "
                f"{NOTIONS[best.notion].measure} is {fairest.method}’s, {gap} at {_accuracy_words(fairest)}."
            )
            if len(repeated) < len(affordable):
                sentence = f"Only configurations with at least three runs are compared. {sentence}"
        budgets.append(BudgetFindings(epsilon=levels[number], sentence=sentence, rows=tuple(rows)))

    unsaid = []
    if underserving := [point for point in compared if point.groups.underserved]:
        methods = _listed([point.method for point in underserving])
        groups = _listed([name for point in underserving for name in point.groups.underserved])
        unsaid.append(
            f"{counted(len(underserving), 'configuration')} of {methods} with a group that is served worse than by a "
            f"constant in some run: {groups}."
        )
    if unmeasured := [name for point in compared for name in point.groups.unmeasured]:
        unsaid.append(f"Not known for {_listed(unmeasured)}: too few answered test records in some run, so no gap.")
    return Findings(budgets=tuple(budgets), left_out=tuple(left_out), unsaid=tuple(unsaid))


def _accuracy_words(point: Point) -> str:
    words, refused = percent(1 - point.value("error")), point.value("refused")
    # A mean of zeros over seeds may differ from 0 by rounding.
    return words if refused <= 1e-12 else f"{words} of the {percent(1 - refused)} answered"


def _listed(names: Sequence[str]) -> str:
    """Return the distinct ``names`` as text, ``a, b and c``. Of many names the text has only the first three, and the
    number of the others."""
    names = list(dict.fromkeys(names))
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} others"]
    return listed(names)


def ranked(points: Sequence[Point]) -> list[Point]:
    """Return the points among which a reader of the page can choose by limits, the most accurate first, as `fairpate
    specify` ranks them.

    Omitted are points with a degenerate model, with an epsilon that depends on votes, with an undefined value, or with
    a group that was not measured.
    """
    offered = [
        point
        for point in points
        if not (point.degenerate or point.epsilon_is_data_dependent or point.groups.unmeasured)
        and not np.isnan(point.mean_O).any()
    ]
    return sorted(offered, key=lambda point: [round(point.value(name), 9) for name in frontier.THEN])


def choices(points: Sequence[Point]) -> dict[Setting, list[Point]]:
    """Return, for each of the FairPATE paper's three settings, the best configuration of every method, the best method
    first; ``points`` are those of one panel (data set and privacy class)."""
    least = frontier.best_error(points, _RULE)
    chosen = {}
    for setting, first in frontier.FIRST.items():
        # Every method is judged by the panel's best accuracy, not by its own.
        found = [frontier.select(own, setting, rule=_RULE, best_error=least) for own in by_series(points).values()]
        chosen[setting] = sorted(
            (point for point in found if point is not None),
            key=lambda point: frontier.matrix([point], (first, "error"), guaranteed=True)[0].tolist(),
        )
    return chosen


def baseline_words(found: frontier.Baselines) -> str:
    """Return a sentence on the baseline accuracies of a panel (data set and privacy class); empty if they are
    unknown."""
    words = [] if math.isnan(found.majority) else [f"always the most common class: {percent(found.majority)}"]
    if not math.isnan(found.unprotected):
        words.append(f"best without privacy: {percent(found.unprotected)} ({found.unprotected_method})")
    return f"Accuracy to compare with: {'; '.join(words)}." if words else ""


def left_out_words(points: Sequence[Point]) -> str:
    """Return a sentence that names the excluded methods and the thresholds that they do not meet. A method is excluded
    from the choices in all of the paper's settings if none of its configurations meets all thresholds. Return an empty
    text if no method is excluded."""
    least = frontier.best_error(points, _RULE)
    words: Mapping[Threshold, str] = {
        "coverage": f"coverage below {percent(_RULE.min_coverage)}",
        "accuracy": f"accuracy below {percent(1 - least - _RULE.max_accuracy_loss)}",
        "degenerate": "degenerate",
        "definition": "a value is undefined",
    }
    names_by: dict[str, list[str]] = {}
    for name, found in by_series(points).items():
        if below := frontier.left_out_by(found, rule=_RULE, best_error=least):
            names_by.setdefault(" or ".join(words[b] for b in words if b in below), []).append(name)
    left_out = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by.items())
    return f"Left out: {left_out}." if left_out else ""


def judged_words(point: Point, rule: FairRule) -> str:
    """Return a sentence on whether a configuration is fair by the user's rule, which judges as a run's report does: the
    whole interval of every seed has to keep the limit. Empty if the gap is undefined."""
    measure = NOTIONS[rule.notion].measure
    value = point.seen_by(rule.notion).value("disparity")
    if math.isnan(value):
        return ""
    if point.degenerate:
        return f"Its {measure} says nothing about fairness: it is degenerate."
    ends, num_seeds = point.ends_of(rule.notion).tolist(), len(point.seeds)
    num_by_verdict = Counter(
        verdict(low=low, high=high, fair_from=fair_from, limit=rule.limit) for low, high, fair_from in ends
    )
    clear = next((each for each in ("fair", "not fair") if num_by_verdict[each] == num_seeds), None)
    word = clear or ("of unknown fairness" if num_by_verdict["unknown"] else "perhaps fair")
    missing = listed(list(point.groups.unmeasured)) if not NOTIONS[rule.notion].bounds_rate else ""
    among = f" where it is measured, but not known for {missing}," if missing else ""
    low, high, _ = ends[0]
    gap = figures.with_spread(point.seen_by(rule.notion))[0]
    if word == "fair" and point.value("refused") > 0:
        word = FAIR_IN_ANSWERS
    begin, limit = f"It is {word}{among} by its {measure} of {gap}", f"{rule.limit:g}"
    if num_seeds > 1:
        numbers = [f"{word} in {num_by_verdict[word]}" for word in get_args(Verdict) if num_by_verdict[word]]
        by_seed = f" in each of {num_seeds} runs" if clear else f": of {num_seeds} runs it is {listed(numbers)}"
        return f"{begin}{by_seed}. Fair means that the whole 95\u00a0% interval is at most {limit}."
    if math.isnan(low):
        return f"{begin}, which has no 95\u00a0% interval."
    interval = f"whose 95\u00a0% interval ({ends_words(value, low, high)})"
    if word == "perhaps fair":
        # Below the limit, an interval of few records does not suffice.
        why = f"goes beyond {limit}" if high > rule.limit else "is of too few records to decide"
        return f"{begin}, {interval} {why}."
    return f"{begin}, {interval} is {'above' if word == 'not fair' else 'at most'} {limit}."


def cells(point: Point) -> list[tuple[str, str]]:
    """Return the table cells of a configuration: epsilon, disparity, accuracy and coverage as pairs of texts, the value
    and its spread over seeds."""
    dagger = " †" if point.epsilon_is_data_dependent else ""
    parts = [words.partition(" ± ") for words in figures.with_spread(point)]
    spreads = [(value.removesuffix(_PERCENT), plus + spread) for value, plus, spread in parts]
    return [(epsilon_text(point.value("epsilon")) + dagger, ""), *spreads]


def epsilons_words(epsilons: Sequence[float]) -> str:
    """Return the range from the least to the largest epsilon, in words."""
    ends = [epsilon_text(value).rstrip("0").rstrip(".") for value in (epsilons[0], epsilons[-1])]
    return f"ε {ends[0]}" if ends[0] == ends[1] else f"ε {ends[0]}–{ends[1]}"


@dataclass(frozen=True, kw_only=True)
class FrontierReport:
    """The contents of a comparison's page: the rows of results, and which of them the page shows.

    With ``for_operator`` rows whose epsilon depends on private votes are shown and marked; otherwise they are left out
    and counted, and so are rows without privacy unless ``publish_unprotected``. Only the operator's page says why a run
    failed. ``notion``: the notion of fairness that the page opens with; the reader may choose any other that was
    recorded. ``fair_at``: the user's rule of fairness, at which the sliders begin. ``looks``: the family and the colour
    of methods by name. ``choices``: for data sets by name, a sentence on what a choice by these results costs.
    """

    title: str
    rows: Sequence[Row]
    for_operator: bool = False
    publish_unprotected: bool = False
    notion: NotionName = DEFAULT
    fair_at: FairRule = field(default_factory=FairRule)
    looks: Mapping[str, frontier.Look] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[Row]:
        """The rows that this page (the operator's or the public one) may show."""
        return [row for row in self.rows if self.for_operator or self.is_public(row)]

    def points(self) -> list[Point]:
        """Return the points that the page shows: the successful runs among its rows, joined over seeds."""
        done = [(row.record, row.command) for row in self.shown if row.record is not None]
        records, commands = [record for record, _ in done], [command for _, command in done]
        return frontier.points_of(records, commands=commands, notion=self.notion, looks=self.looks)

    def is_public(self, row: Row) -> bool:
        """Return True if ``row`` may appear on a page that is published."""
        return not row.is_private and (self.publish_unprotected or not row.is_unprotected)


def frontier_report(report: FrontierReport) -> str:
    """Return the page of a comparison as one HTML document of about 1 MB, with 0.4 MB for the charting library."""
    points, shown = report.points(), report.shown
    secret = [row for row in report.rows if not report.is_public(row)]
    series = figures.looks(points)
    members = figures.on_frontier(points)
    # The page opens with the first notion; parts that depend on the notion are written once for each.
    known = {name for point in points for name, value_S in point.fairness_S.items() if not np.isnan(value_S).all()}
    notions = tuple(dict.fromkeys((report.notion, *(name for name in NAMES if name in known or name == DEFAULT))))
    seen = [[point.seen_by(notion) for point in points] for notion in notions]
    by_notion = [frontier.by_panel(found) for found in seen]
    done = [row for row in shown if row.record is not None]
    failed = [row for row in shown if row.record is None]
    # Which runs have metrics that a guarantee covers.
    kinds = Counter(row.record.metrics for row in done if row.record is not None)
    covered = [
        f"{words} (in {counted(kinds[kind], 'run')})" if len(kinds) > 1 else words
        for kind, words in WORDS["metrics"].items()
        if kinds[kind]
    ]
    methods, data_sets = (sorted({getattr(row, name) for row in shown}) for name in ("method", "data"))
    on_frontiers = f"{count(len(members))} of them on a frontier by {NOTIONS[report.notion].measure}"
    seeds = counted(len({row.seed for row in done}), "seed")
    names = figures.titles(report.notion) | {"epsilon": "ε", "disparity": "gap"}
    # The thresholds that a configuration must keep to be chosen.
    rules = []
    for notion in notions:
        level = ", ".join(f"{value:g} in {figures.titles(notion)[name]}" for name, value in _RULE.tolerance.items())
        rules.append(
            "The best configuration of each method if fairness, privacy or accuracy comes first, as in the FairPATE "
            f"paper. Left out are those that answer less than {percent(_RULE.min_coverage)}, those that are more than "
            f"{100 * _RULE.max_accuracy_loss:g} points less accurate than the best private one, and degenerate ones "
            "(one class for everyone, or no better than that). Equal are differences of up to "
            f"{level}; then accuracy decides."
        )
    return render(
        "frontier.html",
        report=report,
        num_by_votes=sum(row.is_private for row in secret),
        num_unprotected=sum(row.is_unprotected for row in secret),
        unprotected_methods=list(dict.fromkeys(row.method for row in secret if row.is_unprotected)),
        num_seeded=sum(frontier.is_seeded(row.config) for row in done if not row.is_unprotected),
        figures=[
            ("Methods", count(len(methods)), ", ".join(methods)),
            ("Data sets", count(len(data_sets)), ", ".join(data_sets)),
            ("Configurations", count(len(points)), on_frontiers),
            ("Runs", count(len(done)), f"{seeds}; {count(len(failed))} failed"),
        ],
        failed=failed,
        covered=f"they are {', '.join(covered or [WORDS['metrics']['outside']])}",
        points=points,
        # A point seen by another notion is another object, with the same index.
        index={point: index for found in seen for index, point in enumerate(found)},
        members=members,
        # Of thousands of configurations the table lists only those on a frontier: a longer one would slow the page
        # down.
        listed=[point for point in points if len(points) <= _MOST_LISTED or point in members],
        series=series,
        series_number={name: number for number, name in enumerate(series)},
        classes=[
            _class_view(privacy, by_notion, list(series.values()), report.choices)
            for privacy in sorted({panel.privacy for panel in by_notion[0]})
        ],
        notions=[NOTIONS[notion] for notion in notions],
        rules=rules,
        fairness={point: [figures.with_spread(point.seen_by(notion))[0] for notion in notions] for point in points},
        # Two planes are fixed. The third plane of a data set is chosen by its number among all planes.
        planes=((2, "coverage over ε"), (3, "gap over ε"), (4, "accuracy over coverage")),
        colours=list(enumerate(zip(figures.COLOURS, figures.DARK_COLOURS, strict=True))),
        fair_words=fair_words(report.fair_at),
        # The slider begins at the user's limit where the page opens with the notion that it limits.
        gap=report.fair_at.limit if report.fair_at.notion == notions[0] else FairRule().limit,
        # Steps of a thousandth only for a limit that hundredths do not hold.
        gap_step=0.01 if math.isclose(100 * report.fair_at.limit, round(100 * report.fair_at.limit)) else 0.001,
        most_shift=figures.MOST_SHIFT / 1000,
        pairs=list(enumerate(f"{names[first]} and {names[second]}" for first, second in figures.PAIRS)),
        dots=[round(figures.size_of(end, (0.0, 1.0))) for end in (0, 1)],
        lowest=figures.coverage_range(points)[0],
        cells=cells,
        class_label=figures.class_label,
        epsilons_words=epsilons_words,
        failed_words=frontier.FAILED,
        model=figures.script_data(points, notions=notions)
        | {"fair": asdict(report.fair_at), "judged": [judged_words(point, report.fair_at) for point in points]},
        library=_library(),
    )


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script without imports: compressed, in base 64."""
    import vl_convert

    # Compressed, the script has 0.4 instead of 0.9 MB; the browser unpacks it. Bundling takes seconds, so it is cached.
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # Without a time: equal comparisons give equal pages.
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode("ascii")


def _class_view(
    privacy: PrivacyClass,
    by_notion: Sequence[Mapping[Panel, Sequence[Point]]],
    known: Sequence[figures.SeriesStyle],
    costs: Mapping[str, str],
) -> dict[str, Any]:
    """Return the template values for the section of the page on one privacy class. They include a list of panels (data
    sets). The list ``seen`` of a panel has the values that depend on the notion of fairness, one entry for each notion
    in ``by_notion``. ``costs``: the ``choices`` of the report."""
    panels: list[dict[str, Any]] = []
    # Numbered among all panels, as the script numbers its charts.
    for number, (panel, points) in enumerate(by_notion[0].items()):
        if panel.privacy != privacy:
            continue
        compared = baseline_words(frontier.baselines(points))
        # By printed text: two epsilons with one text are one choice.
        texts = {epsilon_text(point.value("epsilon")) for point in ranked(points)}
        budgets = {math.inf if text == "∞" else float(text): text for text in texts}
        # The slider begins at the largest budget that is called private.
        # Whatever epsilon is, a delta that is too large for the number of records is no privacy.
        units = max((point.units for point in points if point.units is not None), default=None)
        is_void = pages.is_void_delta(privacy.delta, units)
        private = [each for each in budgets if pages.strength(each, privacy.delta) == "bounded" and not is_void]
        has_guarantee = any(math.isfinite(point.value("epsilon")) for point in points)
        caution = pages.delta_caution(privacy.delta, units, privacy.unit) if has_guarantee else ""
        seen = []
        for found in (panels_of_notion[panel] for panels_of_notion in by_notion):
            num_undefined = len(frontier.frontier(found).undefined)
            undefined = f"Left out, because a value is undefined: {counted(num_undefined, 'configuration')}."
            seen.append(
                {
                    "undefined": undefined if num_undefined else "",
                    "findings": findings(found),
                    "choice_words": " ".join(filter(None, (compared, left_out_words(found)))),
                    "choices": choices(found),
                    "ranked": ranked(found),
                    "dominance": frontier.dominance(figures.sound(found)),
                }
            )
        panels.append(
            {
                "data": panel.data,
                "caution": caution,
                "choice": costs.get(panel.data, ""),
                "number": number,
                "compared": compared,
                "budgets": [budgets[budget] for budget in sorted(budgets)],
                "begin": max(len(private) - 1, 0),
                "levels": list(map(epsilon_text, figures.epsilon_levels(points))),
                "level": figures.middle_level(points),
                "names": list(figures.looks(points)),
                "seen": seen,
            }
        )
    names = {name for panel in panels for name in panel["names"]}
    shown = [look for look in known if look.series in names]
    families: dict[str, list[figures.SeriesStyle]] = {}
    for look in shown:
        families.setdefault(look.family, []).append(look)
    most = max(len(panel["names"]) for panel in panels)
    return {
        "label": figures.class_label(privacy),
        "families": families,
        "names": [look.series for look in shown],
        "panels": panels,
        "has_pairs": most > 1,
        "has_wide_matrix": most > _MOST_COLUMNS or len(panels) == 1,
        "is_alone": len(panels) == 1,
    }
