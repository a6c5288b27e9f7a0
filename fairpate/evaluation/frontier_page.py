"""The comparison as one page: in words, in planes, in space; choices, dominance, hypervolumes, and what failed.

The page is one HTML file with its scripts inside; its content policy forbids every request. What depends on private
votes is left out of a page to publish, and marked with a dagger and hollow shapes on the operator's; results without
privacy are left out too, unless the data are public. Each privacy class (unit, relation, delta) has a section of its
own, because its epsilons share no axis with those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fairpate.evaluation.frontier import (
    Panel,
    Point,
    by_panel,
    by_series,
    frontier,
    is_seeded,
    notions_of,
    points_of,
)
from fairpate.evaluation.frontier_charts import PAIRS, class_label, on_frontier, script_data, titles
from fairpate.evaluation.frontier_looks import COLOURS, DARK_COLOURS, Look, by_family, looks
from fairpate.evaluation.frontier_planes import MOST_SHIFT, coverage_range, epsilon_levels, middle_level, size_of
from fairpate.evaluation.frontier_tables import (
    baseline_words,
    baselines,
    cells,
    choices,
    dominance_by_pair,
    epsilons_words,
    fairness_words,
    left_out_words,
    rule_words,
    settings_words,
    volumes,
)
from fairpate.evaluation.frontier_words import findings
from fairpate.evaluation.page import count, counted, epsilon_text, render
from fairpate.evaluation.rows import FAILED, Row
from fairpate.evaluation.selection import SelectionRule
from fairpate.fairness.notions import DEFAULT, NOTIONS, NotionName

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
    num_replicates: int = 400
    bootstrap_seed: int = 0

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
    """The page, as one HTML document of about 5 MB: most of it is the library that draws."""
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
        left_out=_left_out(report),
        model=script_data(points, notions=notions),
        plotly=Markup(get_plotlyjs()),  # noqa: S704 - the library's own script
    )


def _class_view(
    report: FrontierReport, seen: Sequence[Sequence[Point]], number_of: Mapping[Panel, int], known: Sequence[Look]
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
        "volumes": volumes(points, bootstrap_seed=report.bootstrap_seed, num_replicates=report.num_replicates),
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


def _left_out(report: FrontierReport) -> list[str]:
    """What a page to publish does not show."""
    left_out = [] if report.for_operator else report.secret
    by_votes, unprotected = (sum(row.is_private for row in left_out), sum(row.is_unprotected for row in left_out))
    words = []
    if by_votes:
        words.append(f"{counted(by_votes, 'row')} whose ε depends on private votes; for the operator.")
    if unprotected:
        words.append(f"{counted(unprotected, 'row')} without privacy; for the operator: {_methods(left_out)}.")
    return words
