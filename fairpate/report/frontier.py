"""Points of a comparison, those that no other dominates, and how much of the plane they cover.

One row of a comparison: a configuration that was run, and the record that came out or the cause why none did.

The frontier of privacy, fairness, accuracy and coverage: configurations that no other one beats.

No objective is fixed beforehand. A configuration is a point in up to four objectives, all minimised: epsilon,
disparity, error (1 - accuracy) and the share refused (1 - coverage). Disparity is the value of one notion of fairness
(:mod:`fairpate.fairness.rates`), by choice; a frontier is of one notion. A point dominates another that it is nowhere
worse than and somewhere better than; the Pareto set is what nothing dominates. Epsilon is compared rounded up to
hundredths, as it is guaranteed: noise that is calibrated to 1 costs a little less, by method, and that is no merit.

Points are compared only within a panel: one data set, one unit of privacy, one relation, one delta. An undefined
objective (NaN) leaves a point out of every set that uses the objective, and such points are returned, not dropped. So
are gaps that leave out a group which another point of the panel measures.

Shapes: N points, O objectives, S seeds.

Choosing on a frontier: the three settings of the FairPATE paper.

The paper's tables show one configuration per method in three settings: *fair* takes the smallest disparity first,
*private* the smallest epsilon, *accurate* the highest accuracy. Left alone, the first two reward models that answer
nobody or everybody alike, so a configuration has to keep a stated coverage and stay within a stated distance of the
best accuracy, and may not be degenerate (one class for everyone); these thresholds are ours, the paper leaves them
open. Epsilons are ranked as they are guaranteed.

How often some point of one series of a panel beats those of another, pair by pair.

Shapes: N points of the winner, M of the loser, O objectives.

How much a method's frontier covers: hypervolume, and attainment over seeds.

Hypervolume (Zitzler and Thiele 1998) is the measure of what the points dominate inside the box below a reference
point; it grows with every point that nothing dominated before, and no set of points has more of it than a set that
dominates it. The empirical attainment function (Grunert da Fonseca, Fonseca and Hall 2001) is the share of seeds
whose points reach a given pair of objectives; its level sets are the median, best and worst frontiers of a method.

Both are computed by moocore. Neither knows what an objective means: values are minimised. Only differences against the
same reference compare.

Shapes: N points, O objectives, S seeds, P corners.
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

from fairpate.fairness.rates import DEFAULT, NAMES, NOTIONS
from fairpate.report.metrics import GroupsTold
from fairpate.types import STOPPED_BY_VOTES, NotionName, Relation, RunRecord, Unit

Status = Literal["ok", "failed"]
FAILED = "failed"
"""All that is published of an error."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of a comparison.

    ``digest`` identifies the configuration. ``record`` is None exactly where the run failed, and then ``error`` says
    why in one line; ``method``, ``data``, ``seed`` and ``config`` are known in both cases. ``command`` makes the run
    again in a shell. ``minutes`` is wall-clock time of the run alone, NaN where it is not known. ``has_guarantee``:
    whether the configuration guarantees any privacy, whatever became of the run. Time and error depend on private
    records: a published row has no time, and ``FAILED`` for every error.
    """

    digest: str
    method: str
    data: str
    seed: int
    config: dict[str, Any]
    command: str
    minutes: float
    record: RunRecord | None = None
    error: str = ""
    has_guarantee: bool = True

    def __post_init__(self) -> None:
        if (self.record is None) != bool(self.error):
            raise ValueError(f"Expected a record or an error and not both, got {self.record} and {self.error!r}.")
        if self.minutes < 0:
            raise ValueError(f"Expected minutes >= 0, or NaN where unknown, got {self.minutes}.")
        if self.record is not None and self._names != (self.record.method, self.record.data, self.record.seed):
            raise ValueError(f"Expected the record of {self._names}, got that of {self.record.method}.")

    @property
    def status(self) -> Status:
        """Whether there is a record."""
        return "failed" if self.record is None else "ok"

    @property
    def is_private(self) -> bool:
        """Whether the row must not be published: its price depends on private votes."""
        return self.record is not None and self.record.epsilon_is_data_dependent

    @property
    def is_unprotected(self) -> bool:
        """Whether the row is of a run without privacy guarantee."""
        return not self.has_guarantee or (self.record is not None and math.isinf(self.record.epsilon))

    @property
    def _names(self) -> tuple[str, str, int]:
        return self.method, self.data, self.seed


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


Setting = Literal["fair", "private", "accurate"]
Threshold = Literal["coverage", "accuracy", "degenerate", "definition"]
FIRST: Mapping[Setting, Objective] = {"fair": "disparity", "private": "epsilon", "accurate": "error"}
THEN: tuple[Objective, ...] = ("error", "disparity", "epsilon", "refused")
"""What decides among configurations that are level, in this order."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class SelectionRule:
    """Thresholds of the three settings.

    A configuration takes part with at least ``min_coverage`` and at most ``max_accuracy_loss`` below the best accuracy
    that a finite epsilon reaches in its panel. Values of the first objective that are no further than its ``tolerance``
    from the best are level; among those the highest accuracy wins.
    """

    min_coverage: float = 0.6
    max_accuracy_loss: float = 0.15
    tolerance: Mapping[Objective, float] = field(
        default_factory=lambda: {"disparity": 0.005, "epsilon": 0.01, "error": 0.005}
    )

    def __post_init__(self) -> None:
        for name in ("min_coverage", "max_accuracy_loss"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"Expected 0 <= {name} <= 1, got {value}.")


def select(points: Sequence[Point], setting: Setting, *, rule: SelectionRule, best_error: float) -> Point | None:
    """The configuration that one method shows in ``setting``; None if none of ``points`` takes part.

    ``best_error`` is the panel's. Undefined points take no part.
    """
    eligible = [point for point in points if not _below_thresholds(point, rule, best_error)]
    if not eligible:
        return None
    first = FIRST[setting]
    first_N = guaranteed(eligible, [first])[:, 0]
    is_level_N = first_N <= first_N.min() + rule.tolerance.get(first, 0.0) + _ROUNDING
    level = [point for point, is_level in zip(eligible, is_level_N, strict=True) if is_level]
    # Rounded: means that differ by the order of their sum are equal, and the next objective decides.
    return min(level, key=lambda point: [round(point.value(name), 9) for name in THEN])


def left_out_by(points: Sequence[Point], *, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    """The thresholds that keep one method out of all settings: those below which each of its points stays, or else all.

    Empty where a point takes part; ``definition`` says that an objective is undefined.
    """
    below = [_below_thresholds(point, rule, best_error) for point in points]
    if not all(below):
        return frozenset()
    return frozenset.intersection(*below) or frozenset.union(*below)


def _below_thresholds(point: Point, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    if point.num_undefined:
        return frozenset({"definition"})
    thresholds: Mapping[Threshold, bool] = {
        "coverage": not _is_covered(point, rule),
        "accuracy": point.value("error") > best_error + rule.max_accuracy_loss + _ROUNDING,
        "degenerate": bool(point.degenerate),
    }
    return frozenset(name for name, is_below in thresholds.items() if is_below)


def _is_covered(point: Point, rule: SelectionRule) -> bool:
    return 1 - point.value("refused") >= rule.min_coverage - _ROUNDING


def best_error(points: Sequence[Point], rule: SelectionRule) -> float:
    """Least error of a panel among configurations that keep the rule's coverage; inf if there is none.

    Those that guarantee nothing count only where no other is left.
    """
    covered = [point for point in points if _is_covered(point, rule) and not math.isnan(point.value("error"))]
    protected = [point for point in covered if math.isfinite(point.value("epsilon"))]
    return min((point.value("error") for point in protected or covered), default=math.inf)


@dataclass(frozen=True, kw_only=True)
class Dominance:
    """How many points of ``loser`` some point of ``winner`` dominates, and at which epsilons of the loser."""

    winner: str
    loser: str
    num_dominated: int
    num_points: int
    epsilons: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of the loser's points; NaN where it has none."""
        return self.num_dominated / self.num_points if self.num_points else math.nan


def dominance(points: Sequence[Point]) -> list[Dominance]:
    """For each ordered pair of series in one panel: what of the second some point of the first dominates."""
    require_one_panel(points)
    series = by_series(defined(points, OBJECTIVES)[0])
    return [_dominance(winner, loser, series) for winner in series for loser in series if winner != loser]


def _dominance(winner: str, loser: str, series: Mapping[str, Sequence[Point]]) -> Dominance:
    better_NO, worse_MO = guaranteed(series[winner], OBJECTIVES), guaranteed(series[loser], OBJECTIVES)
    nowhere_worse = (better_NO[:, None] <= worse_MO).all(axis=-1)
    somewhere_better = (better_NO[:, None] < worse_MO).any(axis=-1)
    beaten_M = np.any(nowhere_worse & somewhere_better, axis=0)
    return Dominance(
        winner=winner,
        loser=loser,
        num_dominated=int(beaten_M.sum()),
        num_points=len(worse_MO),
        epsilons=tuple(
            sorted({point.value("epsilon") for point, beaten in zip(series[loser], beaten_M, strict=True) if beaten})
        ),
    )


MAX_OBJECTIVES = len(OBJECTIVES)
_BOUNDED: dict[Objective, float] = {"error": 1.0, "refused": 1.0}
_STEPS = (1.0, 2.0, 5.0, 10.0)


def hypervolume(values_NO: npt.ArrayLike, *, reference_O: npt.ArrayLike) -> float:
    """Measure of the union of the boxes from each point to the reference: exact, for 1 to 4 objectives.

    A point that is not below the reference in every objective (an infinite epsilon, for one) adds nothing.
    ValueError for NaN, an infinite reference, or a number of objectives out of range.
    """
    reference = np.asarray(reference_O, dtype=np.float64)
    values = np.asarray(values_NO, dtype=np.float64).reshape(-1, len(reference))
    if not 1 <= len(reference) <= MAX_OBJECTIVES or not np.isfinite(reference).all():
        raise ValueError(f"Expected 1 to {MAX_OBJECTIVES} finite reference values, got {reference.tolist()}.")
    if np.isnan(values).any():
        raise ValueError("Expected defined objectives, got nan; leave such points out and count them.")
    return float(moocore.hypervolume(values, ref=reference))


def reference_point(points: Sequence[Point], objectives: Sequence[Objective]) -> FloatArray:
    """The corner that bounds the volume: 1 for error and refusals, else the next of 1, 2, 5, 10, ... above every point.

    Infinite and undefined values do not count; ValueError for points of several panels.
    """
    require_one_panel(points)
    return np.array([_BOUNDED.get(objective) or _round_above(points, objective) for objective in objectives])


def _round_above(points: Sequence[Point], objective: Objective) -> float:
    largest = max((v for point in points if math.isfinite(v := point.value(objective))), default=0.0)
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    # 20 as well: where the logarithm was rounded down, 10 is not above.
    return float(next(step * power for step in (*_STEPS, 20.0) if step * power > largest * (1 + 1e-9)))


def attainment_surface(sets_SN2: Sequence[FloatArray], *, num_seeds: int) -> FloatArray:
    """Corners (P, 2) of the staircase above which at least ``num_seeds`` of the sets attain a pair, by first objective.

    1 is the best case over seeds, ``len(sets_SN2)`` the worst. Empty where no pair is attained that often; infinite
    values are never attained. ValueError if ``num_seeds`` is out of range.
    """
    if not 1 <= num_seeds <= len(sets_SN2):
        raise ValueError(f"Expected 1 <= num_seeds <= {len(sets_SN2)} sets, got {num_seeds}.")
    finite = [points_N2[np.isfinite(points_N2).all(axis=1)] for points_N2 in sets_SN2]
    attaining = [points_N2 for points_N2 in finite if len(points_N2)]
    if len(attaining) < num_seeds:
        return np.empty((0, 2))
    owners = np.repeat(np.arange(len(attaining)), [len(points_N2) for points_N2 in attaining])
    # As many sets as asked for, as a share of those that attain anything.
    corners = moocore.eaf(np.concatenate(attaining), owners, percentiles=[100 * num_seeds / len(attaining)])[:, :2]
    surface: FloatArray = corners[np.argsort(corners[:, 0])]
    return surface


def sets_by_seed(points: Sequence[Point], objectives: tuple[Objective, Objective]) -> list[FloatArray]:
    """What each seed's runs reached, undefined runs left out: the input of attainment, one set per seed."""
    require_one_panel(points)
    columns = [OBJECTIVES.index(objective) for objective in objectives]
    rows: dict[int, list[FloatArray]] = {seed: [] for seed in sorted({s for point in points for s in point.seeds})}
    for point in points:
        for seed, values_O in zip(point.seeds, point.values_SO[:, columns], strict=True):
            if not np.isnan(values_O).any():
                rows[seed].append(values_O)
    return [np.array(found, dtype=np.float64).reshape(-1, 2) for found in rows.values()]
