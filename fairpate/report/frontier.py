"""The points of a comparison, which of them are on the Pareto frontier, and how large a hypervolume they dominate.

A configuration is a point in up to four objectives, all minimised: epsilon, disparity, error (1 - accuracy) and the
share refused (1 - coverage). Disparity is the value of one notion of fairness (:mod:`fairpate.fairness.rates`). A point
dominates another if it is nowhere worse and somewhere better; the Pareto set contains the points that none dominates.
Epsilons are compared as they are guaranteed, rounded up to hundredths: calibrated noise costs a little less than its
target, by an amount that depends on the method, and that must not decide.

Points are compared only within a panel: one data set, unit of privacy, relation and delta. A point with an undefined
objective (NaN) is in no set that uses the objective, but it is returned separately.

Hypervolume (Zitzler and Thiele 1998) is the volume of the region that some points dominate, up to a reference point.
The empirical attainment function (Grunert da Fonseca, Fonseca and Hall 2001) is the share of seeds whose points reach a
pair of objectives; its level sets are the median, best and worst frontiers of a method.

Shapes: N points (M of another series), O objectives, S seeds, P corners of a staircase.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from fairpate.config import NOT_IN_DIGESTS, SEEDS, flattened
from fairpate.fairness.rates import DEFAULT, NAMES, NOTIONS
from fairpate.report.metrics import GroupsTold
from fairpate.types import REMARKS, FloatArray, NotionName, Relation, RunRecord, Unit

Status = Literal["ok", "failed"]
FAILED = "failed"
"""The published text in place of every error."""
Objective = Literal["epsilon", "disparity", "error", "refused"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

# Indices in `OBJECTIVES`.
_EPSILON, _DISPARITY = 0, 1
# Means of equal numbers differ by less where they were added in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of a comparison: its configuration, and its results or the cause of its failure.

    ``digest`` identifies the configuration. ``record`` has the results; it is None exactly if the run failed, and then
    ``error`` is the cause in one line. ``command`` repeats the run in a shell. ``minutes`` is the wall-clock time of
    the run alone, NaN if unknown. ``has_guarantee``: whether the configuration guarantees any privacy, even if the run
    failed. ``minutes`` and ``error`` depend on private records: in a published row ``minutes`` is NaN, and every error
    is the text ``FAILED``.
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

    @property
    def status(self) -> Status:
        return "failed" if self.record is None else "ok"

    @property
    def name(self) -> str:
        """The run in words that no other run of the comparison has."""
        return f"{self.method} on {self.data}, seed {self.seed}, {self.digest}"

    @property
    def is_private(self) -> bool:
        """True if this row must not be published, because its epsilon depends on private votes."""
        return self.record is not None and self.record.epsilon_is_data_dependent

    @property
    def is_unprotected(self) -> bool:
        """True if the run of this row has no privacy guarantee."""
        return not self.has_guarantee or (self.record is not None and math.isinf(self.record.epsilon))


Look = tuple[str, int]
"""How charts draw a method: its family, a name in looks.yaml, and the index of its colour among those of its family."""


@dataclass(frozen=True, kw_only=True, order=True)
class PrivacyClass:
    """The privacy unit, neighbouring relation and delta for which an epsilon holds. Epsilons of different classes are
    not comparable."""

    unit: Unit
    relation: Relation
    delta: float


@dataclass(frozen=True, kw_only=True, order=True)
class Panel:
    """The key of the set within which points are compared: one privacy class (unit, relation and delta) on one data
    set."""

    privacy: PrivacyClass
    data: str


# Compared by identity: the equality of arrays is not one truth value.
@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """The results of one configuration on one data set, over its seeds.

    ``values_SO[s]`` are the objectives of the run with ``seeds[s]``, in the order of ``OBJECTIVES``; NaN is undefined.
    Disparity is the value of the notion of fairness ``notion``; ``fairness_S`` has the values of all notions for each
    seed, and ``ends_S3`` the two ends of their intervals and the smallest limit for which their records suffice.
    ``settings`` is the configuration by dotted names, without seeds and paths, ``commands[s]`` repeats run s with fresh
    noise. ``majority_accuracy`` is the mean accuracy of the most common class on the same records, NaN if unknown.
    ``degenerate`` has the reasons why the model's gaps are meaningless for some seed, in words. ``units`` is the public
    number of protected units, with which delta is compared, None if none is. ``groups`` counts, for each group, the
    seeds in which a constant prediction would serve the group better, and those in which the group had no answered test
    record. ``max_error_S``: for each seed, the share of answers of which the run guarantees in every group that no more
    are wrong, with ``max_error_confidence``; NaN where it guarantees none. ``look`` is the method's family and the
    index of its colour, None for a method of another package.
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
    units: int | None = None
    notion: NotionName = DEFAULT
    fairness_S: Mapping[NotionName, FloatArray] = field(default_factory=dict)
    ends_S3: Mapping[NotionName, FloatArray] = field(default_factory=dict)
    max_error_S: FloatArray = field(default_factory=lambda: np.full(1, math.nan))
    max_error_confidence: float = math.nan
    look: Look | None = None

    @cached_property
    def mean_O(self) -> FloatArray:
        """The position of the point: the largest epsilon, and the mean of each other objective."""
        # NaN in one run makes the mean NaN: averaging the other runs would favour what fails on some seeds.
        mean_O = self.values_SO.mean(axis=0)
        mean_O[_EPSILON] = self.values_SO[:, _EPSILON].max()  # a guarantee has to hold for every run
        return mean_O

    @cached_property
    def spread_O(self) -> FloatArray:
        """The sample standard deviation of each objective over seeds; NaN for a single seed."""
        if len(self.seeds) == 1:
            return np.full(len(OBJECTIVES), math.nan)
        # The spread of infinite epsilons is inf - inf: NaN, and no reason for a warning.
        with np.errstate(invalid="ignore"):
            return self.values_SO.std(axis=0, ddof=1)

    @cached_property
    def num_undefined(self) -> int:
        """The number of runs with an undefined objective."""
        return int(np.isnan(self.values_SO).any(axis=1).sum())

    @property
    def series(self) -> str:
        """The name of the point's series: the method, with a dagger if the epsilon depends on private votes."""
        return f"{self.method} †" if self.epsilon_is_data_dependent else self.method

    @property
    def is_seeded(self) -> bool:
        """True if the noise of this point's runs comes from a seed: the runs are reproducible and not private."""
        return math.isfinite(self.value("epsilon")) and is_seeded(self.settings)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that qualify the point's numbers."""
        stops = self.settings.get("aggregator.budget.accept_leak") is True
        bound = []
        if not math.isnan(self.max_error):
            bound = [
                f"Of the answers in every group at most {100 * self.max_error:.3g} % are wrong, with probability "
                f"{100 * self.max_error_confidence:.3g} % in each run."
            ]
        return (*((REMARKS["stopped_by_votes"],) if stops else ()), *bound, *self.cautions)

    @property
    def max_error(self) -> float:
        """The bound on the share of wrong answers that holds in every group and for every seed; NaN without one."""
        return float(self.max_error_S.max())

    @property
    def cautions(self) -> tuple[str, ...]:
        """Sentences on why a small gap of this point is weak evidence of fairness, such as a degenerate model."""
        return (*self.degenerate, *self.groups.words("run"))

    def ends_of(self, notion: NotionName) -> FloatArray:
        """Return the values of ``ends_S3`` for one notion; NaN where it was not recorded."""
        return self.ends_S3.get(notion, np.full((len(self.seeds), 3), math.nan))

    def fair_from(self, notion: NotionName) -> FloatArray:
        """Return for each seed (S,) the smallest limit at which this point is called fair, as a report judges it: the
        whole interval is at or below the limit, and the records suffice. NaN where it is undefined."""
        _, high_S, fair_from_S = self.ends_of(notion).T
        return np.maximum(high_S, fair_from_S)

    def value(self, objective: Objective) -> float:
        """Return the value of one objective over all seeds: the mean, or for epsilon the largest."""
        return float(self.mean_O[OBJECTIVES.index(objective)])

    def seen_by(self, notion: NotionName) -> Point:
        """Return the same point with disparity measured by another notion of fairness, NaN if that was not recorded."""
        if notion == self.notion:
            return self
        values_SO = self.values_SO.copy()
        values_SO[:, _DISPARITY] = self.fairness_S.get(notion, math.nan)
        return replace(self, values_SO=values_SO, notion=notion)


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The points of one panel (data set and privacy class), sorted into three fields: those in the Pareto set
    (``members``), those dominated by another point, and those with an undefined objective."""

    members: tuple[Point, ...]
    dominated: tuple[Point, ...]
    # Listed and not dropped, so that a page can count them.
    undefined: tuple[Point, ...]


def points_of(
    records: Sequence[RunRecord],
    *,
    commands: Sequence[str] = (),
    notion: NotionName = DEFAULT,
    looks: Mapping[str, Look] | None = None,
) -> list[Point]:
    """Return one point for each configuration, in order of first appearance; a point joins the records of all seeds of
    its configuration.

    Disparity is measured by ``notion``. ``commands[i]`` repeats ``records[i]``; the commands of a point draw fresh
    noise. Of two records with the same configuration and seeds the later one is used. ``looks``: those of methods by
    name. ValueError if there are commands, but not one per record.
    """
    if commands and len(commands) != len(records):
        raise ValueError(f"Expected one command per record, got {len(commands)} for {len(records)} records.")
    runs: dict[str, dict[str, tuple[RunRecord, str]]] = {}
    for record, command in zip(records, commands or [""] * len(records), strict=True):
        # An epsilon that depends on votes is another claim, so the same configuration becomes another point.
        configuration: list[Any] = [record.method, record.data, record.unit, record.relation, record.delta]
        configuration += [record.epsilon_is_data_dependent, settings_of(record.config)]
        key = json.dumps(configuration, sort_keys=True, default=str)
        # Every seed in the configuration: data may be divided by a seed of its own.
        seeds = {path: seed for path, seed in flattened(record.config).items() if path in SEEDS}
        seed_key = json.dumps([record.seed, seeds], sort_keys=True, default=str)
        # The command draws fresh noise, also where this run had noise from a seed.
        runs.setdefault(key, {})[seed_key] = (record, re.sub(r" --set noise=seeded(?= |$)", "", command))
    points = []
    for repetitions in runs.values():
        of_point = sorted(repetitions.values(), key=lambda run: run[0].seed)
        found = [record for record, _ in of_point]
        first = found[0]
        # As float64, which turns None into NaN.
        values_SO = np.array([(r.epsilon, r.disparity, r.accuracy, r.coverage) for r in found], np.float64)
        values_SO[:, 2:] = 1 - values_SO[:, 2:]
        seeds_by_word = Counter(word for record in found for word in dict.fromkeys(record.degenerate))
        privacy = PrivacyClass(unit=first.unit, relation=first.relation, delta=first.delta)
        points.append(
            Point(
                method=first.method,
                look=(looks or {}).get(first.method),
                panel=Panel(privacy=privacy, data=first.data),
                epsilon_is_data_dependent=first.epsilon_is_data_dependent,
                settings=settings_of(first.config),
                seeds=tuple(record.seed for record in found),
                values_SO=values_SO,
                commands=tuple(command for _, command in of_point),
                majority_accuracy=float(np.array([each.majority_accuracy for each in found], np.float64).mean()),
                degenerate=tuple(
                    f"Degenerate: {word}" + ("." if len(found) == 1 else f", in {number} of {len(found)} runs.")
                    for word, number in seeds_by_word.items()
                ),
                groups=GroupsTold.of(found),
                max_error_S=np.array([each.max_error for each in found], np.float64),
                max_error_confidence=float(np.array([each.max_error_confidence for each in found], np.float64).min()),
                units=max((each.declared_units for each in found if each.declared_units is not None), default=None),
                fairness_S={name: np.array([notion_value(each, name) for each in found], np.float64) for name in NAMES},
                ends_S3={name: np.array([_ends(each, name) for each in found], np.float64) for name in NAMES},
            )
        )
    unmeasured_by_all = {
        panel: frozenset.intersection(*(frozenset(point.groups.unmeasured) for point in of_panel))
        for panel, of_panel in by_panel(points).items()
    }
    for place, point in enumerate(points):
        # A gap that leaves out a group which another point measures is smaller for that reason alone: it is undefined.
        if not point.groups.unmeasured.keys() <= unmeasured_by_all[point.panel]:
            values_SO = point.values_SO.copy()
            values_SO[:, _DISPARITY] = math.nan
            rates = {name: value_S for name, value_S in point.fairness_S.items() if NOTIONS[name].bounds_rate}
            ends_S3 = {name: ends for name, ends in point.ends_S3.items() if NOTIONS[name].bounds_rate}
            points[place] = replace(point, values_SO=values_SO, fairness_S=rates, ends_S3=ends_S3)
    return [point.seen_by(notion) for point in points]


def notion_value(record: RunRecord, notion: NotionName) -> float | None:
    """Return the value of a notion of fairness in the record of a run; None if it is undefined."""
    # A record that was made by hand may hold the default notion as disparity alone.
    return record.disparity if notion == DEFAULT else record.fairness.get(notion, {}).get("value")


def _ends(record: RunRecord, notion: NotionName) -> list[float | None]:
    known = record.fairness.get(notion, {})
    return [known.get(name) for name in ("low", "high", "fair_from")]


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration by dotted names, without its seeds and places. An option of a loader is a
    setting, whatever its name."""
    left_out = tuple(f"{name}." for name in (*NOT_IN_DIGESTS, *SEEDS))
    return {path: value for path, value in flattened(dict(config)).items() if not f"{path}.".startswith(left_out)}


def is_seeded(config: Mapping[str, Any]) -> bool:
    """Return True if any noise of a configuration (nested or by dotted names) comes from a seed, and so is not
    private."""
    return any(value == "seeded" and path.split(".")[-1] == "noise" for path, value in flattened(dict(config)).items())


def by_panel(points: Sequence[Point]) -> dict[Panel, list[Point]]:
    """Return the points grouped by panel (data set and privacy class), sorted by unit, relation, delta and data set."""
    panels: dict[Panel, list[Point]] = {panel: [] for panel in sorted({point.panel for point in points})}
    for point in points:
        panels[point.panel].append(point)
    return panels


def by_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points grouped by the name of their series: the method, where points whose epsilon depends on private
    votes form a series of their own."""
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(point.series, []).append(point)
    return series


def matrix(points: Sequence[Point], objectives: Sequence[Objective], *, guaranteed: bool = False) -> FloatArray:
    """Return the values of ``objectives`` for each point, as a matrix (N, O); with ``guaranteed``, epsilons are rounded
    up to hundredths."""
    columns = [OBJECTIVES.index(objective) for objective in objectives]
    values_NO = np.array([point.mean_O[columns] for point in points], dtype=np.float64).reshape(-1, len(columns))
    if guaranteed and "epsilon" in objectives:
        column = list(objectives).index("epsilon")
        values_NO[:, column] = [rounded_up(epsilon) for epsilon in values_NO[:, column].tolist()]
    return values_NO


def rounded_up(epsilon: float) -> float:
    """Return an epsilon rounded up to hundredths, the form in which epsilons are guaranteed and compared."""
    # 0.07 * 100 is a little above 7 in floating point, and stays 0.07; adding 0.0 makes 0 of -0.
    return float(np.ceil(epsilon * 100 - 1e-9)) / 100 + 0.0


def defined(points: Sequence[Point], objectives: Sequence[Objective]) -> tuple[list[Point], list[Point]]:
    """Split points into two lists: those for which all ``objectives`` are defined, and the others."""
    lacking_N = np.any(np.isnan(matrix(points, objectives)), axis=1)
    return list(itertools.compress(points, ~lacking_N)), list(itertools.compress(points, lacking_N))


def frontier(points: Sequence[Point], objectives: Sequence[Objective] = OBJECTIVES) -> Frontier:
    """Return which of the points of one panel (data set and privacy class) are in the Pareto set. ValueError for points
    of several panels or notions."""
    require_one_panel(points)
    have, lacking = defined(points, objectives)
    mask_N = pareto_mask(matrix(have, objectives, guaranteed=True))
    members, dominated = (tuple(itertools.compress(have, chosen_N)) for chosen_N in (mask_N, ~mask_N))
    return Frontier(members=members, dominated=dominated, undefined=tuple(lacking))


def pareto_mask(values_NO: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of the rows that no other row dominates, with all objectives minimised.

    Of equal rows all are marked; ``inf`` is the worst value. ValueError for NaN, or no objective.
    """
    values = np.asarray(values_NO, dtype=np.float64)
    if values.ndim != 2 or not values.shape[1]:
        raise ValueError(f"Expected a row of at least one objective per point, got shape {values.shape}.")
    if np.isnan(values).any():
        raise ValueError("Expected values_NO without nan; leave out points one of whose objectives is undefined.")
    # Minus zero becomes zero. Rows are sorted: one is dominated by those before it alone.
    rows_NO, row_N = np.unique(values + 0.0, axis=0, return_inverse=True)
    is_best_N = np.zeros(len(rows_NO), dtype=np.bool_)
    for number, row in enumerate(rows_NO):
        is_best_N[number] = not (rows_NO[:number][is_best_N[:number]] <= row).all(axis=1).any()
    return is_best_N[row_N.reshape(-1)]


def require_one_panel(points: Sequence[Point]) -> None:
    """Raise ValueError if ``points`` are from several panels (data set and privacy class) or notions of fairness,
    because these are not comparable."""
    notions = sorted({point.notion for point in points})
    if len(notions) > 1:
        raise ValueError(f"Expected the disparities of one notion, got {', '.join(notions)}; choose one with seen_by.")
    panels = {point.panel for point in points}
    if len(panels) > 1:
        raise ValueError(
            f"Expected points of one data set, unit, relation and delta, got {len(panels)}: "
            f"{'; '.join(map(str, sorted(panels)))}. Split them with by_panel."
        )


Setting = Literal["fair", "private", "accurate"]
Threshold = Literal["coverage", "accuracy", "degenerate", "definition"]
FIRST: Mapping[Setting, Objective] = {"fair": "disparity", "private": "epsilon", "accurate": "error"}
"""The objective that each of the FairPATE paper's three settings optimises first."""
THEN: tuple[Objective, ...] = ("error", "disparity", "epsilon", "refused")
"""The objectives that break ties between configurations, in this order."""


@dataclass(frozen=True, kw_only=True)
class SelectionRule:
    """The thresholds by which a configuration is chosen in each of the FairPATE paper's three settings. They are this
    package's own, as the paper states none.

    A configuration is eligible if its coverage is at least ``min_coverage``, its accuracy is at most
    ``max_accuracy_loss`` below the best that a finite epsilon reaches in its panel, and it is not degenerate. Each
    setting compares eligible configurations by its first objective. Those whose value is at most ``tolerance`` above
    the best count as equal; among them the highest accuracy wins.
    """

    # Without thresholds, the smallest disparity or epsilon would reward models that refuse or answer all records alike.

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
    """Return the best of one method's ``points`` in one of the FairPATE paper's three settings, by the thresholds of
    ``rule``; None if no point meets them.

    ``best_error``: the least error in the panel (:func:`best_error`). Undefined points are not eligible.
    """
    eligible = [point for point in points if not _below_thresholds(point, rule, best_error)]
    if not eligible:
        return None
    first = FIRST[setting]
    # Epsilons are compared as they are guaranteed, not as they were calibrated.
    first_N = matrix(eligible, [first], guaranteed=True)[:, 0]
    level = itertools.compress(eligible, first_N <= first_N.min() + rule.tolerance.get(first, 0.0) + _ROUNDING)
    # Rounded: means that differ only by the order of their sum are equal, and the next objective decides.
    return min(level, key=lambda point: [round(point.value(name), 9) for name in THEN])


def left_out_by(points: Sequence[Point], *, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    """Return the thresholds of ``rule`` that exclude a method from all of the paper's settings; empty if one of its
    ``points`` is eligible.

    A point is excluded if it does not meet a threshold. The result has the thresholds that no point meets or, if there
    is none, all thresholds that some point does not meet. ``definition`` means that an objective is undefined.
    """
    below = [_below_thresholds(point, rule, best_error) for point in points]
    if not all(below):
        return frozenset()
    return frozenset.intersection(*below) or frozenset.union(*below)


def _below_thresholds(point: Point, rule: SelectionRule, best_error: float) -> frozenset[Threshold]:
    if point.num_undefined:
        return frozenset({"definition"})
    thresholds: Mapping[Threshold, bool] = {
        "coverage": 1 - point.value("refused") < rule.min_coverage - _ROUNDING,
        "accuracy": point.value("error") > best_error + rule.max_accuracy_loss + _ROUNDING,
        "degenerate": bool(point.degenerate),
    }
    return frozenset(name for name, is_below in thresholds.items() if is_below)


def best_error(points: Sequence[Point], rule: SelectionRule) -> float:
    """Return the least error among the configurations of a panel (data set and privacy class) with a coverage of at
    least ``rule.min_coverage``; inf without such a configuration.

    Configurations without a privacy guarantee count only if there are no others.
    """
    covered = [
        point
        for point in points
        if 1 - point.value("refused") >= rule.min_coverage - _ROUNDING and not math.isnan(point.value("error"))
    ]
    # Otherwise a run without privacy would set a bar that no private one can meet.
    protected = [point for point in covered if math.isfinite(point.value("epsilon"))]
    return min((point.value("error") for point in protected or covered), default=math.inf)


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The accuracies with which the points of a panel (data set and privacy class) are compared; NaN if unknown.

    ``majority``: accuracy of the most common class, mean over seeds. ``unprotected``: the best accuracy of a run
    without privacy among the points that may be published, and ``unprotected_method`` its method.
    """

    majority: float
    unprotected: float
    unprotected_method: str


def baselines(points: Sequence[Point]) -> Baselines:
    """Return the baseline accuracies of one panel (data set and privacy class); the majority accuracy is taken from the
    point with the highest coverage."""
    # With a reject option the majority is that of answered records, so the point that answers most is used.
    known = [point for point in points if not math.isnan(point.majority_accuracy)]
    widest = min(known, key=lambda point: point.value("refused"), default=None)
    free = [p for p in points if math.isinf(p.value("epsilon")) and not math.isnan(p.value("error"))]
    best = min(free, key=lambda point: point.value("error"), default=None)
    return Baselines(
        majority=math.nan if widest is None else widest.majority_accuracy,
        unprotected=math.nan if best is None else 1 - best.value("error"),
        unprotected_method="" if best is None else best.method,
    )


class Dominance(NamedTuple):
    """The share and the epsilons of the points of one series (method) that some point of another dominates."""

    share: float
    epsilons: tuple[float, ...]


def dominance(points: Sequence[Point]) -> dict[tuple[str, str], Dominance]:
    """Return, for each ordered pair of series (methods) in one panel (data set and privacy class), how many points of
    the second are dominated by some point of the first."""
    require_one_panel(points)
    series = by_series(defined(points, OBJECTIVES)[0])
    values = {name: matrix(found, OBJECTIVES, guaranteed=True) for name, found in series.items()}
    pairs = {}
    for (winner, better_NO), (loser, worse_MO) in itertools.permutations(values.items(), 2):
        # Every point of one series against every point of the other: (N, 1, O) against (M, O).
        nowhere_worse = (better_NO[:, None] <= worse_MO).all(axis=-1)
        somewhere_better = (better_NO[:, None] < worse_MO).any(axis=-1)
        beaten_M = np.any(nowhere_worse & somewhere_better, axis=0)
        epsilons = [point.value("epsilon") for point in itertools.compress(series[loser], beaten_M)]
        pairs[winner, loser] = Dominance(len(epsilons) / len(worse_MO), tuple(sorted(set(epsilons))))
    return pairs


def hypervolume(values_NO: npt.ArrayLike, *, reference_O: npt.ArrayLike) -> float:
    """Return the exact volume of the region that is dominated by the points (rows of ``values_NO``) and bounded by
    ``reference_O``, in 1 to 4 objectives.

    A point that is not below the reference in every objective (for example with infinite epsilon) adds nothing. Only
    volumes with the same reference point are comparable.
    """
    reference = np.asarray(reference_O, dtype=np.float64)
    values = np.asarray(values_NO, dtype=np.float64).reshape(-1, len(reference))
    return _volume(values[(values < reference).all(axis=1)], reference)


def _volume(values_NO: FloatArray, reference_O: FloatArray) -> float:
    """Return the volume between points and a reference that is above all of them, slab by slab of the last
    objective."""
    values_NO = values_NO[np.argsort(values_NO[:, -1], kind="stable")]
    heights_N = np.diff(values_NO[:, -1], append=reference_O[-1])
    if len(reference_O) == 1:
        return float(heights_N.sum())
    if len(reference_O) == 2:
        return float(heights_N @ (reference_O[0] - np.minimum.accumulate(values_NO[:, 0])))
    if not (is_best_N := pareto_mask(values_NO)).all():
        return _volume(values_NO[is_best_N], reference_O)
    return sum(
        height * _volume(values_NO[: number + 1, :-1], reference_O[:-1])
        for number, height in enumerate(heights_N.tolist())
        if height > 0
    )


def reference_point(points: Sequence[Point]) -> FloatArray:
    """Return the reference point of the hypervolume: 1 for error and refusals, otherwise the next of 1, 2, 5, 10, ...
    above every point.

    Infinite and undefined values are ignored; ValueError for points of several panels.
    """
    require_one_panel(points)
    corner = []
    for objective in OBJECTIVES:
        largest = max((v for point in points if math.isfinite(v := point.value(objective))), default=0.0)
        if objective in ("error", "refused") or largest <= 0:
            corner.append(1.0)
            continue
        # A round number, which small changes of the points do not move: so volumes of two sweeps can be compared.
        power = 10.0 ** math.floor(math.log10(largest))
        # 20 too: the logarithm may have been rounded down, and then 10 is not above the largest value.
        steps = (step * power for step in (1.0, 2.0, 5.0, 10.0, 20.0))
        corner.append(next(step for step in steps if step > largest * (1 + 1e-9)))
    return np.array(corner)


def attainment_surface(sets_SN2: Sequence[FloatArray], *, num_seeds: int) -> FloatArray:
    """Return the corners (P, 2) of the staircase that bounds the pairs of objectives which at least ``num_seeds`` of
    the seeds attain. ``sets_SN2`` has for each seed the pairs of its points.

    Corners are sorted by their first objective. ``num_seeds`` 1 is the best case over seeds, ``len(sets_SN2)`` the
    worst. Empty if no pair is attained that often; infinite values are never attained.
    """
    finite = [points_N2[np.isfinite(points_N2).all(axis=1)] for points_N2 in sets_SN2]
    attaining = [points_N2 for points_N2 in finite if len(points_N2)]
    if len(attaining) < num_seeds:
        return np.empty((0, 2))
    # Of each seed the least second objective that it attains with a first one of at most x.
    x_P = np.unique(np.concatenate(attaining)[:, 0])
    least_SP = np.full((len(attaining), len(x_P)), math.inf)
    for least_P, points_N2 in zip(least_SP, attaining, strict=True):
        np.minimum.at(least_P, np.searchsorted(x_P, points_N2[:, 0]), points_N2[:, 1])
    y_P = np.sort(np.minimum.accumulate(least_SP, axis=1), axis=0)[num_seeds - 1]
    is_corner_P = y_P < np.concatenate([[math.inf], y_P[:-1]])
    return np.stack([x_P, y_P], axis=1)[is_corner_P]


def sets_by_seed(points: Sequence[Point], objectives: tuple[Objective, Objective]) -> list[FloatArray]:
    """Return, for each seed, the pairs (N, 2) of two objectives that its runs reached, as a list over seeds; pairs with
    undefined values are left out."""
    require_one_panel(points)
    columns = [OBJECTIVES.index(objective) for objective in objectives]
    seed_N = np.array([seed for point in points for seed in point.seeds])
    # The empty array comes first, because numpy cannot concatenate the values of no points.
    values_N2 = np.concatenate([np.empty((0, 2)), *(point.values_SO[:, columns] for point in points)])
    is_defined_N = ~np.isnan(values_N2).any(axis=1)
    return [values_N2[is_defined_N & (seed_N == seed)] for seed in np.unique(seed_N)]
