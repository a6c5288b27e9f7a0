"""What the frontier's charts share: who is on a frontier, words for numbers, and what the page's script draws."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairpate.evaluation.frontier import (
    OBJECTIVES,
    Objective,
    Panel,
    Point,
    PrivacyClass,
    by_panel,
    by_series,
    defined,
    frontier,
)
from fairpate.evaluation.frontier_looks import COLOURS, Look, looks
from fairpate.evaluation.frontier_planes import (
    PLANES,
    EpsilonAxis,
    coordinates,
    coverage_range,
    epsilon_axis,
    epsilon_levels,
    extents,
    joined,
    level_of,
    shifts,
    size_of,
)
from fairpate.evaluation.hypervolume import attainment_surface, sets_by_seed
from fairpate.evaluation.page import decimal, epsilon_text, percent
from fairpate.evaluation.settings_read import settings_read, shared_settings
from fairpate.fairness.notions import DEFAULT, NOTIONS, NotionName
from fairpate.meaning import delta_text
from fairpate.strict_json import strict

PAIRS: tuple[tuple[Objective, Objective], ...] = (
    ("epsilon", "error"),
    ("disparity", "error"),
    ("epsilon", "disparity"),
)
TITLES: Mapping[Objective, str] = {
    "epsilon": "privacy budget ε",
    "disparity": "disparity",
    "error": "accuracy",
    "refused": "coverage",
}


def titles(notion: NotionName) -> dict[Objective, str]:
    """What each objective is called where disparity is that of ``notion``."""
    return {**TITLES, "disparity": NOTIONS[notion].measure}


def class_label(privacy: PrivacyClass) -> str:
    """A privacy class in words."""
    return f"per {privacy.unit}, {privacy.relation}, δ = {delta_text(privacy.delta)}"


def sound(points: Sequence[Point]) -> list[Point]:
    """Those that are not degenerate: what is says nothing about a method, and strikes no other off a frontier."""
    return [point for point in points if not point.degenerate]


def on_frontier(points: Sequence[Point]) -> set[int]:
    """``id`` of every point that no other point of its panel dominates in the four objectives; none is degenerate.

    An epsilon that depends on private votes is a weaker claim, so such a point never strikes out one that may be
    published: those are judged among themselves.
    """
    members = set()
    for found in by_panel(sound(points)).values():
        published = [point for point in found if not point.epsilon_is_data_dependent]
        members |= {id(point) for point in frontier(published).members}
        members |= {id(point) for point in frontier(found).members if point.epsilon_is_data_dependent}
    return members


def script_data(points: Sequence[Point], *, notions: Sequence[NotionName] = ()) -> dict[str, Any]:
    """Everything that the page's script draws, as values of strict JSON.

    ``points[i]`` is ``points[i]`` here: buttons on the page refer to it by that index. ``notions`` holds what another
    choice of the disparity changes.
    """
    series = looks(points)
    names = {name: number for number, name in enumerate(series)}
    read = {id(point): settings_read(point.settings) for point in points}
    shared = {name: shared_settings([read[id(p)] for p in found]) for name, found in by_series(points).items()}
    members = on_frontier(points)
    panels = by_panel(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    data = {
        "points": [
            _plain_point(point, names[point.series], _without(read[id(point)], shared[point.series]))
            | {"front": id(point) in members}
            for point in points
        ],
        "series": [_plain_look(look, shared[look.series]) for look in series.values()],
        "panels": [_plain_panel(panel, found, index_of, names) for panel, found in panels.items()],
        "planes": PLANES,
        "ink": len(COLOURS) - 1,
        "titles": [*titles(points[0].notion if points else DEFAULT).values()],
        "notions": [_plain_notion([point.seen_by(notion) for point in points], notion, names) for notion in notions],
    }
    plain: dict[str, Any] = strict(data)
    return plain


def _plain_notion(points: Sequence[Point], notion: NotionName, names: Mapping[str, int]) -> dict[str, Any]:
    """Of every point disparity, its words, whether it is on the frontier and undefined; and what panels draw."""
    members = on_frontier(points)
    index_of = {id(point): index for index, point in enumerate(points)}
    return {
        "measure": NOTIONS[notion].measure,
        "points": [
            [round(point.value("disparity"), 5), with_spread(point)[0], id(point) in members, point.num_undefined]
            for point in points
        ],
        "panels": [_drawn_points(found, index_of, names) for found in by_panel(points).values()],
    }


def _without(settings: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, str]:
    return {name: _words(value) for name, value in settings.items() if name not in common}


def _plain_point(point: Point, series: int, settings: Mapping[str, str]) -> dict[str, Any]:
    epsilon, disparity, error, refused = point.mean_O.tolist()
    return {
        "series": series,
        "data": point.panel.data,
        "privacy": class_label(point.panel.privacy),
        "values": [round(value, 5) for value in (epsilon, disparity, 1 - error, 1 - refused)],
        "words": [
            f"{epsilon_text(epsilon)}{' †' if point.epsilon_is_data_dependent else ''}",
            *with_spread(point),
        ],
        "undefined": point.num_undefined,
        "seeds": point.seeds,
        "remarks": point.remarks,
        "degenerate": point.degenerate,
        "cautions": point.cautions,
        "settings": settings,
        "commands": point.commands if any(point.commands) else [],
    }


def with_spread(point: Point) -> list[str]:
    """Disparity, accuracy and coverage in words: mean ± standard deviation over seeds."""
    _, disparity, error, refused = point.mean_O.tolist()
    _, *spreads = point.spread_O.tolist()
    gap = "" if math.isnan(spreads[0]) else f" ± {decimal(spreads[0])}"
    shares = [
        percent(1 - value) + ("" if math.isnan(spread) else f" ± {100 * spread:.1f}")
        for value, spread in zip((error, refused), spreads[1:], strict=True)
    ]
    return [decimal(disparity) + gap, *shares]


def _plain_look(look: Look, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": look.series,
        "symbol": look.symbol,
        "space": look.symbol_in_space,
        "path": look.shape.path,
        "hollow": look.hollow,
        "place": look.place,
        "dash": look.dash,
        "shared": _without(common, {}),
    }


def _plain_panel(
    panel: Panel, points: Sequence[Point], index_of: Mapping[int, int], names: Mapping[str, int]
) -> dict[str, Any]:
    return {
        "data": panel.data,
        "privacy": class_label(panel.privacy),
        "ticks": epsilon_axis(points).ticks,
        **_drawn_points(points, index_of, names),
    }


def _drawn_points(points: Sequence[Point], index_of: Mapping[int, int], names: Mapping[str, int]) -> dict[str, Any]:
    """What the charts of one panel show, of the points with everything defined; ``lines`` by rank among them."""
    axis, levels, between = epsilon_axis(points), epsilon_levels(points), coverage_range(points)
    complete, _ = defined(points, OBJECTIVES)
    drawn_N4 = coordinates(complete, axis)
    ends = extents(drawn_N4, axis)
    rank_of = {id(point): rank for rank, point in enumerate(complete)}
    return {
        "points": [index_of[id(point)] for point in complete],
        "positions": [round(position, 4) for position in drawn_N4[:, 0].tolist()],
        "levels": [level_of(point, levels) for point in complete],
        "sizes": [round(size_of(1 - point.value("refused"), between), 1) for point in complete],
        "extents": [[round(end, 5) for end in pair] for pair in ends],
        "shifts": [shifts(drawn_N4, ends, plane) for plane in PLANES],
        "lines": [[names[name], [rank_of[id(point)] for point in line]] for name, line in joined(complete).items()],
        "attainment": [_plain_attainment(sound(points), pair, axis, names) for pair in PAIRS],
    }


def _plain_attainment(
    points: Sequence[Point], pair: tuple[Objective, Objective], axis: EpsilonAxis, names: Mapping[str, int]
) -> list[dict[str, Any]]:
    return [
        {"series": names[series], "best": best, "median": median, "worst": worst}
        for series, found in by_series(points).items()
        for best, median, worst in [attainment(found, pair, axis)]
    ]


def attainment(
    points: Sequence[Point], pair: tuple[Objective, Objective], axis: EpsilonAxis
) -> list[list[list[float]]]:
    """Staircases of one series as drawn: attained by the best seed, by at least half of them, by all of them."""
    sets = sets_by_seed(points, pair)
    numbers = (1, math.ceil(len(sets) / 2), len(sets))
    surfaces = [attainment_surface(sets, num_seeds=number) for number in numbers]
    return [[[_drawn(pair[0], x, axis), _drawn(pair[1], y, axis)] for x, y in surface.tolist()] for surface in surfaces]


def _drawn(objective: Objective, value: float, axis: EpsilonAxis) -> float:
    if objective == "epsilon":
        return round(axis.position(value), 4)
    return round(1 - value if objective in ("error", "refused") else value, 5)


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
