"""The frontier of privacy, fairness, accuracy and coverage: configurations that no other one beats.

No objective is fixed beforehand. A configuration is a point in up to four objectives, all minimised: epsilon,
disparity, error (1 - accuracy) and the share refused (1 - coverage). Disparity is the value of one notion of fairness
(:mod:`fairpate.fairness.notions`), by choice; a frontier is of one notion. A point dominates another that it is nowhere
worse than and somewhere better than; the Pareto set is what nothing dominates. Epsilon is compared rounded up to
hundredths, as it is guaranteed: noise that is calibrated to 1 costs a little less, by method, and that is no merit.

Points are compared only within a panel: one data set, one unit of privacy, one relation, one delta. An undefined
objective (NaN) leaves a point out of every set that uses the objective, and such points are returned, not dropped. So
are gaps that leave out a group which another point of the panel measures.

Shapes: N points, O objectives, S seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import moocore
import numpy as np
import numpy.typing as npt

from fairpate.evaluation.degenerate import GroupsTold
from fairpate.fairness.notions import DEFAULT, NAMES, NOTIONS, NotionName
from fairpate.types import STOPPED_BY_VOTES, Relation, RunRecord, Unit

FloatArray = npt.NDArray[np.float64]
Objective = Literal["epsilon", "disparity", "error", "refused"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

# A seed repeats a configuration, and where something runs does not change what it computes.
_SEEDS = frozenset({"seed"})
_EPSILON_STEPS = 100  # of 1
_PLACES = frozenset({"out", "storage", "ray", "data_dir", "engine", "block_size"})


@dataclass(frozen=True, kw_only=True, order=True)
class PrivacyClass:
    """What an epsilon is an epsilon of. Epsilons of different classes are not numbers on one axis."""

    unit: Unit
    relation: Relation
    delta: float


@dataclass(frozen=True, kw_only=True, order=True)
class Panel:
    """Where points may be compared: one privacy class on one data set."""

    privacy: PrivacyClass
    data: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A configuration on one data set, over its seeds.

    ``values_SO[s]`` are the objectives of the run with ``seeds[s]``, in the order of ``OBJECTIVES``; NaN is undefined.
    Their disparity is that of ``notion``; ``fairness_S`` has those of all notions, which :meth:`seen_by` chooses from.
    ``settings`` is the flattened configuration without seeds and places, ``commands[s]`` repeats run s.
    ``majority_accuracy`` is the mean accuracy of the most common class on the same records, NaN where it is not known;
    ``degenerate`` names predictors that are worth nothing whatever their gaps, in any of the seeds; ``groups`` counts
    the seeds in which a constant would serve a group better, or a group had no answered test record.
    """

    method: str
    panel: Panel
    epsilon_is_data_dependent: bool
    settings: Mapping[str, Any]
    seeds: tuple[int, ...]
    values_SO: FloatArray
    commands: tuple[str, ...]
    majority_accuracy: float = math.nan
    degenerate: tuple[str, ...] = ()
    groups: GroupsTold = field(default_factory=GroupsTold)
    notion: NotionName = DEFAULT
    fairness_S: Mapping[NotionName, FloatArray] = field(default_factory=dict)
    mean_O: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        if self.values_SO.shape != (len(self.seeds), len(OBJECTIVES)) or not self.seeds:
            raise ValueError(
                f"Expected one row of {len(OBJECTIVES)} objectives for each of at least one seed, got shape "
                f"{self.values_SO.shape} for {len(self.seeds)} seeds."
            )
        object.__setattr__(self, "mean_O", summary(self.values_SO))

    @property
    def series(self) -> str:
        """The method, with a dagger where the epsilon depends on private votes: two claims, two series."""
        return f"{self.method} †" if self.epsilon_is_data_dependent else self.method

    @property
    def is_seeded(self) -> bool:
        """Whether the noise behind its epsilon comes from a seed: reproducible, not private."""
        return math.isfinite(self.value("epsilon")) and is_seeded(self.settings)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What qualifies its numbers, in words."""
        stops = self.settings.get("aggregator.budget.kind") == "data_dependent"
        return (*((STOPPED_BY_VOTES,) if stops else ()), *self.cautions)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a small gap does not tell of its predictors."""
        return (*self.degenerate, *self.groups.words("seed"))

    @property
    def spread_O(self) -> FloatArray:
        """Standard deviation over seeds, with one degree of freedom taken by the mean; NaN for a single seed."""
        if len(self.seeds) < 2:
            return np.full(len(OBJECTIVES), math.nan)
        with np.errstate(invalid="ignore"):
            spread: FloatArray = self.values_SO.std(axis=0, ddof=1)
        return spread

    def value(self, objective: Objective) -> float:
        """One objective over all seeds."""
        return float(self.mean_O[OBJECTIVES.index(objective)])

    def seen_by(self, notion: NotionName) -> Point:
        """The same configuration with the disparity of another notion; undefined where that was not recorded."""
        if notion == self.notion:
            return self
        values_SO = self.values_SO.copy()
        values_SO[:, OBJECTIVES.index("disparity")] = self.fairness_S.get(notion, math.nan)
        return replace(self, notion=notion, values_SO=values_SO)

    def fairness(self, notion: NotionName) -> float:
        """The value of any notion over all seeds; NaN where it is undefined in one."""
        return self.seen_by(notion).value("disparity")

    @property
    def num_undefined(self) -> int:
        """Runs in which at least one objective is undefined."""
        return int(np.isnan(self.values_SO).any(axis=1).sum())


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The points of one panel, each in exactly one part: on the Pareto set, dominated, or undefined."""

    objectives: tuple[Objective, ...]
    members: tuple[Point, ...]
    dominated: tuple[Point, ...]
    undefined: tuple[Point, ...]


def summary(values_SO: FloatArray) -> FloatArray:
    """A configuration's point from its runs: the mean of each objective, but the *largest* epsilon.

    A guarantee has to hold for every run. NaN in one run makes the objective NaN: averaging the other runs would
    favour what fails on some seeds. ``values_SO`` may carry leading axes.
    """
    mean_O: FloatArray = values_SO.mean(axis=-2)
    epsilon = OBJECTIVES.index("epsilon")
    mean_O[..., epsilon] = values_SO[..., epsilon].max(axis=-1)
    return mean_O


def points_of(
    records: Sequence[RunRecord], *, commands: Sequence[str] = (), notion: NotionName = DEFAULT
) -> list[Point]:
    """Records joined over seeds, in the order in which configurations first appear; their disparity is of ``notion``.

    ``commands[i]`` repeats ``records[i]``. Of two records of one configuration and one set of seeds the later counts.
    ValueError if there are commands, but not one per record.
    """
    if commands and len(commands) != len(records):
        raise ValueError(f"Expected one command per record, got {len(commands)} for {len(records)} records.")
    runs: dict[str, dict[str, tuple[RunRecord, str]]] = {}
    for record, command in zip(records, commands or [""] * len(records), strict=True):
        configuration = [record.method, record.data, record.unit, record.relation, record.delta]
        key = _text([*configuration, record.epsilon_is_data_dependent, settings_of(record.config)])
        repetition = _text([record.seed, dict(_leaves(record.config, only=_SEEDS))])
        runs.setdefault(key, {})[repetition] = (record, command)
    points = [_point(list(repetitions.values())) for repetitions in runs.values()]
    left_out = {panel: _left_out_by_all(of_panel) for panel, of_panel in by_panel(points).items()}
    return [
        (point if point.groups.unmeasured.keys() <= left_out[point.panel] else _without_gaps(point)).seen_by(notion)
        for point in points
    ]


def _left_out_by_all(points: Sequence[Point]) -> frozenset[str]:
    """The groups that no point of a panel measures in every seed."""
    return frozenset.intersection(*(frozenset(point.groups.unmeasured) for point in points))


def _without_gaps(point: Point) -> Point:
    """Without gaps, which leave out a group that others measure: a gap among fewer groups is smaller for that alone."""
    values_SO = point.values_SO.copy()
    values_SO[:, OBJECTIVES.index("disparity")] = math.nan
    rates = {name: value_S for name, value_S in point.fairness_S.items() if NOTIONS[name].bounds_rate}
    return replace(point, values_SO=values_SO, fairness_S=rates)


def notions_of(points: Sequence[Point]) -> tuple[NotionName, ...]:
    """The notions that are defined for some run of ``points``, and the default."""
    known = {name for point in points for name, value_S in point.fairness_S.items() if not np.isnan(value_S).all()}
    return tuple(name for name in NAMES if name in known or name == DEFAULT)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as dotted names, without seeds and without the places where it ran."""
    return dict(_leaves(config, without=_SEEDS | _PLACES))


def is_seeded(config: Mapping[str, Any]) -> bool:
    """Whether some noise of the configuration, nested or flat, comes from a seed: reproducible, not private."""
    return any(value == "seeded" and name.rpartition(".")[2] == "noise" for name, value in _leaves(config))


def by_panel(points: Sequence[Point]) -> dict[Panel, list[Point]]:
    """Points that may be compared, sorted by unit, relation, delta and data set."""
    panels: dict[Panel, list[Point]] = {panel: [] for panel in sorted({point.panel for point in points})}
    for point in points:
        panels[point.panel].append(point)
    return panels


def by_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by method, those whose epsilon depends on private votes apart."""
    series: dict[str, list[Point]] = {point.series: [] for point in points}
    for point in points:
        series[point.series].append(point)
    return series


def matrix(points: Sequence[Point], objectives: Sequence[Objective]) -> FloatArray:
    """``values_NO`` of the points over their seeds."""
    columns = [OBJECTIVES.index(objective) for objective in objectives]
    return np.array([point.mean_O[columns] for point in points], dtype=np.float64).reshape(-1, len(columns))


def guaranteed(points: Sequence[Point], objectives: Sequence[Objective]) -> FloatArray:
    """:func:`matrix` with every epsilon rounded up to hundredths."""
    values_NO = matrix(points, objectives)
    if "epsilon" in objectives:
        column = list(objectives).index("epsilon")
        values_NO[:, column] = [rounded_up(epsilon) for epsilon in values_NO[:, column].tolist()]
    return values_NO


def rounded_up(epsilon: float) -> float:
    """An epsilon as it is guaranteed and compared: rounded up to hundredths."""
    # 0.07 * 100 is a little above 7 in floating point, and stays 0.07.
    return float(np.ceil(epsilon * _EPSILON_STEPS - 1e-9)) / _EPSILON_STEPS + 0.0  # which makes 0 of -0


def defined(points: Sequence[Point], objectives: Sequence[Objective]) -> tuple[list[Point], list[Point]]:
    """Points with all the objectives, and those that lack one."""
    lacking_N = np.any(np.isnan(matrix(points, objectives)), axis=1)
    have = [point for point, lacks in zip(points, lacking_N, strict=True) if not lacks]
    return have, [point for point, lacks in zip(points, lacking_N, strict=True) if lacks]


def frontier(points: Sequence[Point], objectives: Sequence[Objective] = OBJECTIVES) -> Frontier:
    """The Pareto set of one panel's points. ValueError for points of several panels: those are never mixed."""
    require_one_panel(points)
    have, lacking = defined(points, objectives)
    mask_N = pareto_mask(guaranteed(have, objectives))
    return Frontier(
        objectives=tuple(objectives),
        members=tuple(point for point, kept in zip(have, mask_N, strict=True) if kept),
        dominated=tuple(point for point, kept in zip(have, mask_N, strict=True) if not kept),
        undefined=tuple(lacking),
    )


def pareto_mask(values_NO: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which rows no other row dominates, all objectives minimised; equal rows stay together, ``inf`` is worst.

    ValueError for NaN, or no objective.
    """
    values = np.asarray(values_NO, dtype=np.float64)
    if values.ndim != 2 or not values.shape[1]:
        raise ValueError(f"Expected a row of at least one objective per point, got shape {values.shape}.")
    if np.isnan(values).any():
        raise ValueError("Expected defined objectives, got nan; leave such points out and count them.")
    # moocore 0.3.2 drops members when three objectives or more hold infinities; the largest number stands for them.
    kept_N: npt.NDArray[np.bool_] = moocore.is_nondominated(np.nan_to_num(values), keep_weakly=True)
    return kept_N


def require_one_panel(points: Sequence[Point]) -> None:
    """ValueError for points that may not be compared."""
    notions = sorted({point.notion for point in points})
    if len(notions) > 1:
        raise ValueError(f"Expected the disparities of one notion, got {', '.join(notions)}; choose one with seen_by.")
    panels = {point.panel for point in points}
    if len(panels) > 1:
        raise ValueError(
            f"Expected points of one data set, unit, relation and delta, got {len(panels)}: "
            f"{'; '.join(map(str, sorted(panels)))}. Split them with by_panel."
        )


def _point(runs: Sequence[tuple[RunRecord, str]]) -> Point:
    runs = sorted(runs, key=lambda run: run[0].seed)
    first = runs[0][0]
    return Point(
        method=first.method,
        panel=Panel(privacy=PrivacyClass(unit=first.unit, relation=first.relation, delta=first.delta), data=first.data),
        epsilon_is_data_dependent=first.epsilon_is_data_dependent,
        settings=settings_of(first.config),
        seeds=tuple(record.seed for record, _ in runs),
        values_SO=np.array([_objectives(record) for record, _ in runs], dtype=np.float64),
        commands=tuple(command for _, command in runs),
        majority_accuracy=float(np.mean([_or_nan(record.majority_accuracy) for record, _ in runs])),
        degenerate=_degenerate([record.degenerate for record, _ in runs]),
        groups=GroupsTold.of([record for record, _ in runs]),
        fairness_S={name: np.array([_or_nan(notion_value(record, name)) for record, _ in runs]) for name in NAMES},
    )


def _degenerate(by_seed: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """One sentence for each thing that a predictor does in some seed."""
    words = dict.fromkeys(word for of_seed in by_seed for word in of_seed)
    counts = {word: sum(word in of_seed for of_seed in by_seed) for word in words}
    return tuple(
        f"Degenerate: {word}" + ("." if len(by_seed) == 1 else f", with {number} of {len(by_seed)} seeds.")
        for word, number in counts.items()
    )


def notion_value(record: RunRecord, notion: NotionName) -> float | None:
    """The value of a notion, None where it is undefined; earlier versions recorded the default one as disparity."""
    if notion == DEFAULT:
        return record.disparity
    return record.fairness.get(notion, {}).get("value")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _objectives(record: RunRecord) -> tuple[float, ...]:
    return (record.epsilon, _or_nan(record.disparity), 1 - _or_nan(record.accuracy), 1 - record.coverage)


def _leaves(
    value: Any, path: str = "", *, without: frozenset[str] = frozenset(), only: frozenset[str] | None = None
) -> Iterator[tuple[str, Any]]:
    name = path.rpartition(".")[2]
    if name in without:
        return
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key), without=without, only=only)
    elif only is None or name in only:
        yield path, value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
