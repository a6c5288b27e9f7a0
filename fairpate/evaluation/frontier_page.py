"""The comparison as one page: frontiers to turn and to click, choices, dominance, hypervolumes, and what failed.

The page is one HTML file with its scripts inside; its content policy forbids every request. What depends on private
votes is left out of a page to publish, and marked with a dagger and hollow shapes on the operator's; results without
privacy are left out too, unless the data are public. Each privacy class (unit, relation, delta) has a section of its
own, because its epsilons share no axis with those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from fairpate.evaluation.frontier import (
    Panel,
    Point,
    PrivacyClass,
    baselines,
    by_panel,
    frontier,
    is_seeded,
    points_of,
)
from fairpate.evaluation.frontier_charts import (
    PAIRS,
    TITLES,
    Look,
    accuracy_range,
    class_label,
    coverage_range,
    looks,
    on_frontier,
    script_data,
    size_of,
)
from fairpate.evaluation.frontier_tables import (
    baseline_words,
    dominance_matrix,
    every_point,
    failures,
    part,
    selection,
    several,
    shape,
    volumes,
)
from fairpate.evaluation.page import card, count, counted, page, percent, resource, section
from fairpate.evaluation.rows import Row
from fairpate.evaluation.selection import SelectionRule

_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:\">"
)
_SLICES = (
    ("0,1", "ε and disparity"),
    ("0,2", "ε and accuracy"),
    ("1,2", "disparity and accuracy"),
    ("3,2", "coverage and accuracy"),
    ("0,3", "ε and coverage"),
)


@dataclass(frozen=True, kw_only=True)
class FrontierReport:
    """What the page shows: rows of a comparison, and how choices and intervals are made.

    With ``for_operator`` rows whose epsilon depends on private votes are shown and marked; otherwise they are left out
    and counted, and so are rows without privacy unless ``publish_unprotected``. Why a run failed only the operator
    reads. ``num_replicates`` bootstrap replicates
    come from a generator with ``bootstrap_seed``.
    """

    title: str
    rows: Sequence[Row]
    for_operator: bool = False
    publish_unprotected: bool = False
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
        return points_of([record for record, _ in done], commands=[command for _, command in done])

    def _is_public(self, row: Row) -> bool:
        return not row.is_private and (self.publish_unprotected or not row.is_unprotected)


def frontier_report(report: FrontierReport) -> str:
    """The page, as one HTML document of about 5 MB: most of it is the library that draws."""
    points = report.points()
    series = looks(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    panels = by_panel(points)
    body = _banners(report) + _opening(report, points)
    for number, privacy in enumerate(sorted({panel.privacy for panel in panels})):
        own = {panel: found for panel, found in panels.items() if panel.privacy == privacy}
        body += _class_section(report, number, privacy, own, series, index_of, list(panels))
    body += (
        every_point(points, series, on_frontier(points))
        + failures(report.failed, with_causes=report.for_operator)
        + _reading(report)
        + _dialog()
    )
    document = page(
        title=f"{report.title} · frontier",
        body=body,
        style=resource("frontier.css"),
        scripts=_scripts(points),
    )
    return document.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{_POLICY}', 1)


def _scripts(points: Sequence[Point]) -> str:
    plotly = resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    return (
        f'<script type="application/json" id="model">{script_data(points)}</script>\n'
        f"<script>{plotly}</script>\n<script>{resource('frontier.js')}</script>\n"
    )


def _banners(report: FrontierReport) -> str:
    banners = ""
    reasons = _reasons_for_secrecy(report.secret) if report.for_operator else ""
    if reasons:
        banners += f'<div class="banner alarm" role="alert"><b>Operator only. Do not publish.</b>{reasons}</div>'
    seeded = sum(is_seeded(row.config) for row in report.shown if row.record is not None and not row.is_unprotected)
    if seeded:
        banners += (
            f'<div class="banner warn" role="note"><b>Reproducible runs: not private.</b>{counted(seeded, "run")} drew '
            "noise from a seed. Each ε is what the same run would have with fresh noise.</div>"
        )
    return banners


def _reasons_for_secrecy(secret: Sequence[Row]) -> str:
    reasons = []
    if any(row.is_private for row in secret):
        reasons.append(
            "An ε marked † depends on the private votes of teachers; it is itself private and carries no guarantee for "
            "other votes."
        )
    if any(row.is_unprotected for row in secret):
        reasons.append(f"Results without privacy tell of the private records: {_methods(secret)}.")
    return " ".join(reasons)


def _methods(rows: Sequence[Row]) -> str:
    """Those of the rows without privacy."""
    return escape(", ".join(dict.fromkeys(row.method for row in rows if row.is_unprotected)))


def _opening(report: FrontierReport, points: Sequence[Point]) -> str:
    done = [row for row in report.shown if row.record is not None]
    members = on_frontier(points)
    figures = [
        (
            "Methods",
            count(len({row.method for row in report.shown})),
            ", ".join(sorted({row.method for row in report.shown})),
        ),
        (
            "Data sets",
            count(len({row.data for row in report.shown})),
            ", ".join(sorted({row.data for row in report.shown})),
        ),
        ("Configurations", count(len(points)), f"{count(len(members))} of them on a frontier"),
        (
            "Runs",
            count(len(done)),
            f"{counted(len({row.seed for row in done}), 'seed')}; {count(len(report.failed))} failed",
        ),
    ]
    cells = "".join(
        f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="detail">{escape(detail)}</dd></div>'
        for name, value, detail in figures
    )
    return (
        f'<header><p class="kicker">Frontier of privacy, fairness and accuracy</p><h1>{escape(report.title)}</h1>'
        '<p class="outcome">Every configuration is a point. It is on the frontier if no other is at least as good in '
        "ε (rounded up to .01), disparity, accuracy and coverage, and better in one. Click a point for its "
        "configuration and the command that repeats it.</p>"
        f'<dl class="figures">{cells}</dl></header>\n'
    )


def _class_section(
    report: FrontierReport,
    number: int,
    privacy: PrivacyClass,
    panels: Mapping[Panel, Sequence[Point]],
    series: Mapping[str, Look],
    index_of: Mapping[int, int],
    order: Sequence[Panel],
) -> str:
    points = [point for found in panels.values() for point in found]
    ids = {panel: order.index(panel) for panel in panels}
    own = {name: look for name, look in series.items() if name in {point.series for point in points}}
    return (
        f'<section class="class"><h2>Guarantee {escape(class_label(privacy))}</h2>'
        + _keys(own, list(series))
        + _space(number, privacy, ids)
        + _planes(number, panels, ids, points)
        + selection(report.rule, panels, series, index_of)
        + dominance_matrix(panels, series)
        + volumes(panels, bootstrap_seed=report.bootstrap_seed, num_replicates=report.num_replicates)
        + _attainment(number, panels, ids, own, list(series))
        + "</section>\n"
    )


def _keys(own: Mapping[str, Look], order: Sequence[str]) -> str:
    buttons = "".join(
        f'<button type="button" data-series="{order.index(name)}" aria-pressed="true">{shape(look)}{escape(name)}'
        "</button>"
        for name, look in own.items()
    )
    return f'<div class="keys" role="group" aria-label="Methods shown">{buttons}</div>'


def _space(number: int, privacy: PrivacyClass, ids: Mapping[Panel, int]) -> str:
    first = next(iter(ids.values()))
    controls = _checkbox(number, "only", "plane space", "only the frontier")
    if len(ids) > 1:
        controls = (
            _choice(number, "panel", "space", "data set", [(str(i), panel.data) for panel, i in ids.items()]) + controls
        )
    plot = _plot("space", number, first, "Frontier in three dimensions", only="0")
    return (
        part("Frontier", "Drag to turn it. Large marks are on the frontier, small ones are dominated.")
        + f'<div class="scales">{controls}</div><div class="cards">'
        + card(
            "ε, disparity and accuracy; hue is coverage",
            f"Every ε {class_label(privacy)}; logarithmic.",
            plot,
            wide=True,
        )
        + "</div>"
    )


def _planes(
    number: int, panels: Mapping[Panel, Sequence[Point]], ids: Mapping[Panel, int], points: Sequence[Point]
) -> str:
    low, high = coverage_range(points)
    scales = (
        f"<span>coverage {percent(low)}<b class=ramp></b>{percent(high)}</span>"
        f"<span>accuracy: low {_dot(0)} high {_dot(1)}</span>"
    )
    figures = []
    for panel, found in panels.items():
        least, most = accuracy_range(found)
        caption = f"{class_label(panel.privacy)}; accuracy {percent(least)} to {percent(most)}."
        caption = " ".join(filter(None, (caption, baseline_words(baselines(found)))))
        lacking = frontier(found).undefined
        if lacking:
            caption += f" Left out, because a value is undefined: {several(len(lacking), 'configuration')}."
        figures.append(card(panel.data, caption, _plot("plane", number, ids[panel], panel.data, axes="0,1", only="0")))
    return (
        part("Slices by data set", "Shape is the method, size is accuracy, hue is coverage; what is dominated is pale.")
        + f'<div class="scales">{_choice(number, "axes", "plane", "axes", _SLICES)}{scales}</div>'
        + f'<div class="cards small">{"".join(figures)}</div>'
    )


def _dot(accuracy: float) -> str:
    side = round(size_of(accuracy, (0.0, 1.0)))
    return f'<i style="width:{side}px;height:{side}px"></i>'


def _plot(chart: str, number: int, panel: int, label: str, **values: str) -> str:
    data = "".join(f' data-{name}="{escape(value)}"' for name, value in values.items())
    return (
        f'<div class="plot {chart}" role="group" aria-label="{escape(label)}" data-chart="{chart}" '
        f'data-section="{number}" data-panel="{panel}"{data}></div>'
    )


def _choice(number: int, name: str, chart: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{escape(value)}">{escape(words)}</option>' for value, words in options)
    return (
        f'<label>{escape(label)} <select data-sets="{name}" data-section="{number}" data-charts="{chart}">'
        f"{items}</select></label>"
    )


def _checkbox(number: int, name: str, chart: str, label: str) -> str:
    return (
        f'<label><input type="checkbox" data-sets="{name}" data-section="{number}" data-charts="{chart}">'
        f"{escape(label)}</label>"
    )


def _attainment(
    number: int,
    panels: Mapping[Panel, Sequence[Point]],
    ids: Mapping[Panel, int],
    own: Mapping[str, Look],
    order: Sequence[str],
) -> str:
    pairs = [
        (str(index), f"{TITLES[first].replace('privacy budget ', '')} and {TITLES[second]}")
        for index, (first, second) in enumerate(PAIRS)
    ]
    chosen = [("", "none"), *((str(order.index(name)), name) for name in own)]
    controls = _choice(number, "pair", "attainment", "axes", pairs) + _choice(
        number, "chosen", "attainment", "best and worst seed of", chosen
    )
    figures = [
        card(
            panel.data,
            f"{class_label(panel.privacy)}.",
            _plot("attainment", number, ids[panel], panel.data, pair="0", chosen=""),
        )
        for panel in panels
    ]
    lead = (
        "What at least half of the seeds reach: the median frontier of each method, whatever the other two objectives."
    )
    return (
        part("Attained by half of the seeds", lead)
        + f'<div class="scales">{controls}</div><div class="cards small">{"".join(figures)}</div>'
    )


def _reading(report: FrontierReport) -> str:
    left_out = [] if report.for_operator else report.secret
    by_votes, unprotected = (sum(row.is_private for row in left_out), sum(row.is_unprotected for row in left_out))
    hidden = ""
    if by_votes:
        hidden += f"<li>Left out: {counted(by_votes, 'row')} whose ε depends on private votes; for the operator.</li>"
    if unprotected:
        hidden += (
            f"<li>Left out: {counted(unprotected, 'row')} without privacy; for the operator: {_methods(left_out)}.</li>"
        )
    marked = (
        "<li>A configuration marked † strikes none without the mark off the frontier: its ε is a weaker claim.</li>"
        if any(row.is_private for row in report.shown)
        else ""
    )
    failed = "<li>That a run failed is outside every guarantee.</li>" if report.failed else ""
    return section(
        "How to read this",
        "",
        '<div class="promises"><ul>'
        "<li>Each ε holds for the unit, relation and δ of its section. Sections share no axis.</li>"
        "<li>Disparity, accuracy and coverage were measured on test records; they are outside every guarantee.</li>"
        f"{failed}"
        "<li>Choosing a configuration by these results costs privacy that no ε here includes.</li>"
        "<li>Where an objective is undefined in one run, its configuration is on no frontier that uses it.</li>"
        f"{marked}"
        f"{hidden}</ul></div>",
    )


def _dialog() -> str:
    return (
        '<dialog id="point" aria-label="Configuration of a point"><button type="button" class="close" data-close '
        'aria-label="Close">×</button><div id="point-body"></div></dialog>'
        '<noscript><p class="note">The charts need scripts; the tables do not.</p></noscript>'
    )
