"""The tables of the frontier's page: which configuration to choose, who dominates whom, hypervolumes, what failed.

Every function returns HTML. A configuration is named by a button that carries its index among the page's points; the
page's script shows what stands behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape

import numpy as np

from fairpate.evaluation import charts
from fairpate.evaluation.frontier import OBJECTIVES, Baselines, Panel, Point, baselines, by_series, dominance, promised
from fairpate.evaluation.frontier_charts import TITLES, Look, class_label, with_spread
from fairpate.evaluation.hypervolume import VolumeInterval, reference_point, volume_interval
from fairpate.evaluation.page import card, cards, count, epsilon_text, percent, section
from fairpate.evaluation.rows import FAILED, Row
from fairpate.evaluation.selection import FIRST, SelectionRule, Setting, Threshold, best_error, left_out_by, select

_MOST_COLUMNS = 5
_PERCENT = "\u00a0%"
_NUMBERS = ("ε", "disparity", "accuracy %", "coverage %")
_SETTINGS: Mapping[Setting, str] = {
    "fair": "Fair: the smallest disparity first",
    "private": "Private: the smallest ε first",
    "accurate": "Accurate: the highest accuracy first",
}


def selection(
    rule: SelectionRule,
    panels: Mapping[Panel, Sequence[Point]],
    series: Mapping[str, Look],
    index_of: Mapping[int, int],
) -> str:
    """One configuration per method in each of the paper's three settings, by data set."""
    level = ", ".join(f"{value:g} in {TITLES[name]}" for name, value in rule.tolerance.items())
    lead = (
        "One configuration of each method in the three settings of the FairPATE paper. It keeps a coverage of at least "
        f"{percent(rule.min_coverage)} and an accuracy at most {percent(rule.max_accuracy_loss)} below the best that a "
        "finite ε reaches on its data set, and is not degenerate (one class for everyone, or no better than one); "
        f"differences up to {level} count as level, and then accuracy decides."
    )
    figures = [
        card(
            panel.data,
            " ".join(filter(None, (baseline_words(baselines(found)), _left_out(rule, found)))),
            _settings_table(rule, found, series, index_of),
        )
        for panel, found in panels.items()
    ]
    return part("Which one to choose", lead) + cards(*_wide_if_alone(figures))


def dominance_matrix(panels: Mapping[Panel, Sequence[Point]], series: Mapping[str, Look]) -> str:
    """For each data set a matrix: how much of the column's series the row's dominates. Empty for a single series."""
    wide = max(len(by_series(found)) for found in panels.values()) > _MOST_COLUMNS
    figures = [card(panel.data, "", _dominance_table(found, series), wide=wide) for panel, found in panels.items()]
    if all(len(by_series(found)) < 2 for found in panels.values()):
        return ""
    lead = (
        "How many of the column’s configurations some configuration of the row dominates: nowhere worse in ε, "
        "disparity, accuracy and coverage, better in one. Below the share: at which ε."
    )
    return part("Who dominates whom", lead) + cards(*_wide_if_alone(figures))


def volumes(panels: Mapping[Panel, Sequence[Point]], *, bootstrap_seed: int, num_replicates: int) -> str:
    """Hypervolumes with their intervals, by data set, largest first."""
    figures = []
    for panel, found in panels.items():
        reference_O = reference_point(found, OBJECTIVES)
        generator = np.random.default_rng(bootstrap_seed)
        found_volumes = {
            name: volume_interval(points, reference_O=reference_O, generator=generator, num_replicates=num_replicates)
            for name, points in by_series(found).items()
        }
        corner = ", ".join(
            f"{TITLES[name]} {1 - end if name in ('error', 'refused') else end:g}"
            for name, end in zip(OBJECTIVES, reference_O.tolist(), strict=True)
        )
        figures.append(card(panel.data, f"Share of the box up to {corner}.", _volume_chart(found_volumes, panel.data)))
    lead = (
        "What a method’s configurations dominate together, in ε, disparity, error and refusals. Larger is better; a "
        "run without a finite ε adds nothing. Intervals are 95 % bootstrap percentiles over seeds, each drawn for all "
        "configurations of the method that ran with it; with few seeds they are too narrow."
    )
    return part("Hypervolume", lead) + cards(*_wide_if_alone(figures))


def every_point(points: Sequence[Point], series: Mapping[str, Look], members: set[int]) -> str:
    """All configurations in one table that opens on demand."""
    index_of = {id(point): index for index, point in enumerate(points)}
    rows = "".join(
        f"<tr><td>{_button(point, series, index_of)}</td><td>{escape(point.panel.data)}</td>"
        f"{_values(point)}<td>{len(point.seeds)}</td><td>{_standing(point, members)}</td>"
        f"<td>{escape(class_label(point.panel.privacy))}</td></tr>"
        for point in points
    )
    names = ("method", "data set", *_NUMBERS, "seeds", "frontier", "guarantee")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    content = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return section(
        "Every configuration",
        "Mean and standard deviation over seeds; of ε the largest, for a promise has to hold in every run.",
        f"<details><summary>Show all {count(len(points))}</summary>{content}</details>",
    )


def failures(failed: Sequence[Row], *, with_causes: bool) -> str:
    """Runs without a result, each with its command; causes are for the operator, for they may quote private values."""
    if not failed:
        return section("Failed runs", "None of the runs shown.")
    rows = "".join(
        f"<tr><td>{escape(row.method)}</td><td>{escape(row.data)}, seed {row.seed}</td>"
        f"<td>{escape(row.error if with_causes else FAILED)}"
        f"<details><summary>command</summary><pre><code>{escape(row.command)}</code></pre></details></td></tr>"
        for row in failed
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("method", "run", "cause"))
    table = (
        f'<div class="scroll"><table class="failures"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return section("Failed runs", f"{several(len(failed), 'run')} without a result, in no figure above.", table)


def part(heading: str, lead: str) -> str:
    """A heading inside a section, with its explanation."""
    return f'<h3 class="part">{escape(heading)}</h3><p class="lead">{escape(lead)}</p>'


def shape(look: Look) -> str:
    """The shape of a series as a small picture."""
    css = "hollow" if look.hollow else "filled"
    return f'<svg class="{css}" viewBox="0 0 16 16" aria-hidden="true"><path d="{look.shape.path}"/></svg>'


def several(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def _settings_table(
    rule: SelectionRule, points: Sequence[Point], series: Mapping[str, Look], index_of: Mapping[int, int]
) -> str:
    rows, least = "", best_error(points, rule)
    for setting in FIRST:
        chosen = [select(found, setting, rule=rule, best_error=least) for found in by_series(points).values()]
        ranked = sorted((p for p in chosen if p is not None), key=partial(_rank, setting))
        heading, _, detail = _SETTINGS[setting].partition(": ")
        rows += f'<tr class="setting"><th colspan="5" scope="rowgroup">{heading}<small>{detail}</small></th></tr>'
        rows += "".join(_point_row(point, series, index_of) for point in ranked)
        if not ranked:
            rows += '<tr><td colspan="5">No configuration keeps these thresholds.</td></tr>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("method", *_NUMBERS))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _rank(setting: Setting, point: Point) -> list[float]:
    rank: list[float] = promised([point], (FIRST[setting], "error"))[0].tolist()
    return rank


def baseline_words(found: Baselines) -> str:
    """What the accuracies of a panel are to be compared with; empty where nothing is known."""
    words = [] if math.isnan(found.majority) else [f"always the most common class: {percent(found.majority)}"]
    if not math.isnan(found.unprotected):
        words.append(f"best without privacy: {percent(found.unprotected)} ({found.unprotected_method})")
    return f"Accuracy to compare with: {'; '.join(words)}." if words else ""


def _left_out(rule: SelectionRule, points: Sequence[Point]) -> str:
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


def _point_row(point: Point, series: Mapping[str, Look], index_of: Mapping[int, int]) -> str:
    return f"<tr><td>{_button(point, series, index_of)}</td>{_values(point)}</tr>"


def _values(point: Point) -> str:
    cells = ""
    for words in [_epsilon(point), *with_spread(point)]:
        value, plus, spread = words.partition(" ± ")
        cells += (
            f"<td>{escape(value.removesuffix(_PERCENT))}"
            + (f'<span class="sd">{escape(plus + spread)}</span>' if plus else "")
            + "</td>"
        )
    return cells


def _button(point: Point, series: Mapping[str, Look], index_of: Mapping[int, int]) -> str:
    return (
        f'<button type="button" class="name" data-point="{index_of[id(point)]}">{shape(series[point.series])} '
        f"{escape(point.series).replace('_', '_<wbr>')}</button>"
        + "".join(f"<small>{escape(words)}</small>" for words in point.degenerate)
    )


def _epsilon(point: Point) -> str:
    return epsilon_text(point.value("epsilon")) + (" †" if point.epsilon_is_data_dependent else "")


def _dominance_table(points: Sequence[Point], series: Mapping[str, Look]) -> str:
    names = [name for name in series if name in by_series(points)]
    found = {(pair.winner, pair.loser): pair for pair in dominance(points)}
    head = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
    rows = ""
    for winner in names:
        cells = ""
        for loser in names:
            pair = found.get((winner, loser))
            if pair is None:
                cells += '<td class="self">·</td>'
            else:
                where = f"<small>{_where(pair.epsilons)}</small>" if pair.epsilons else ""
                cells += f"<td{_shade(pair.share)}>{percent(pair.share, digits=0)}{where}</td>"
        rows += (
            f'<tr><th scope="row"><span class="name">{shape(series[winner])} {escape(winner)}</span></th>{cells}</tr>'
        )
    return f'<table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _where(epsilons: Sequence[float]) -> str:
    ends = [epsilon_text(value).rstrip("0").rstrip(".") for value in (epsilons[0], epsilons[-1])]
    return f"ε {ends[0]}" if ends[0] == ends[1] else f"ε {ends[0]}–{ends[1]}"


def _shade(share: float) -> str:
    if math.isnan(share) or not share:
        return ' class="self"'
    text = "var(--on-dark)" if share > 0.55 else "var(--ink)"
    mix = f"color-mix(in srgb, var(--answered) {round(100 * share)}%, var(--faint))"
    return f' style="background:{mix};color:{text}"'


def _volume_chart(volumes: Mapping[str, VolumeInterval], data: str) -> str:
    ranked = sorted(volumes.items(), key=lambda item: -item[1].value)
    rows = [
        charts.Whisker(
            name=f"{name}, {several(volume.num_points, 'point')}",
            detail=_volume_words(volume),
            value=volume.value,
            low=volume.low,
            high=volume.high,
        )
        for name, volume in ranked
    ]
    largest = max(v for volume in volumes.values() for v in (volume.value, volume.high) if not math.isnan(v))
    return charts.whiskers(rows, x_max=largest, x_label="share of the box", title=f"Hypervolumes on {data}")


def _volume_words(volume: VolumeInterval) -> str:
    interval = "one seed" if math.isnan(volume.low) else f"{volume.low:.3f} to {volume.high:.3f}"
    return f"{volume.value:.3f} ({interval})"


def _wide_if_alone(figures: Sequence[str]) -> list[str]:
    return (
        [figure.replace('class="card"', 'class="card wide"') for figure in figures]
        if len(figures) == 1
        else list(figures)
    )


def _standing(point: Point, members: set[int]) -> str:
    if point.num_undefined:
        return f"undefined in {several(point.num_undefined, 'run')}"
    return "yes" if id(point) in members else "no"
