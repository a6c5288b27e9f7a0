"""Find which guarantees of privacy, fairness, accuracy and coverage hold together, from the results of a sweep.

A regulator demands, for example, epsilon at most 3 and a gap of at most 0.05. The answer, for each data set and privacy
class, lists the configurations whose means over seeds meet every demand, or the nearest ones on the frontier. With a
second table the choice is transferred (the third question of the FairPATE paper): made on one data set's frontier, and
compared on another data set with the choice that its own frontier gives.

Nothing is trained. The choice uses test records: no epsilon includes its privacy cost, and the chosen configuration
will look better here than on fresh data.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from fairpate.fairness.rates import DEFAULT, NAMES, NOTIONS, notion_named
from fairpate.pages import epsilon_text, in_two_lines
from fairpate.report import frontier
from fairpate.report.figures import class_label, with_spread
from fairpate.report.frontier import OBJECTIVES, Baselines, Objective, Panel, Point, by_panel
from fairpate.report.frontier_page import baseline_words
from fairpate.run.sweep import read_rows
from fairpate.types import FairRule, NotionName, UsageError, stepwise, strict

# Relative, as the excess is: means of the same numbers differ by less where they are added in another order.
_ROUNDING = 1e-9
# An excess over a limit of 0 is no share of it, so it is taken as a share of this.
_ZERO_SCALE = 0.01
_OBJECTIVE_OF: Mapping[str, Objective] = {"epsilon": "epsilon", "accuracy": "error", "coverage": "refused"}
_LEAST = ("coverage", "accuracy")
FAIR_AT = "fair_at"
"""The name of the limit that the user's rule of fairness sets, among the limits of a :class:`Demand`."""
MAX_ERROR = "max_error"
CONFIDENCE = 0.95
"""Of a bound on errors that counts as guaranteed."""
_MAKE_ONE = "make one with `fairpate compare --example quick` and give its results.parquet with --frontier"
DISTANCE = (
    "the largest relative excess over a demand (0.10: one is missed by 10 % of its value, 0 counts as 0.01), epsilon "
    "rounded up to 0.01; where it is equal, the smaller sum of all excesses comes first"
)
CAVEAT = (
    "Gaps, rates and accuracy are means over seeds among answered test records, epsilon is the largest of the seeds; "
    "seeds: how many meet the demand by themselves. "
    "Choosing by them costs privacy that no epsilon here includes."
)


class SpecifyError(UsageError):
    """Raised if the results tables cannot say which configurations meet the user's limits; the message says what to
    give instead."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The user's limits on a configuration: at most ``epsilon`` and ``disparity``, at least ``coverage`` and
    ``accuracy``; None sets no limit. ``max_error``: the run guarantees that of the answers in every group at most this
    share is wrong, with a confidence of at least ``CONFIDENCE``.

    ``disparity`` limits the gap of demographic parity; ``fairness`` limits the values of other notions of fairness, by
    name. Both limit means over seeds. ``fair_at`` is the user's rule of fairness, which judges as a report does: the
    whole interval of every seed has to keep its limit. ValueError for an epsilon below 0, another limit outside 0 to 1,
    an unknown notion, or two limits on demographic parity.
    """

    epsilon: float | None = None
    disparity: float | None = None
    coverage: float | None = None
    accuracy: float | None = None
    max_error: float | None = None
    fairness: Mapping[NotionName, float] = field(default_factory=dict)
    fair_at: FairRule | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon >= 0:
            raise ValueError(f"epsilon: expected a number of at least 0, got {self.epsilon}; give a limit such as 1.0.")
        for unknown in self.fairness.keys() - NOTIONS.keys():
            raise ValueError(f"fairness: {unknown!r} is not a notion of fairness; give one of {', '.join(NOTIONS)}.")
        shares = {name: getattr(self, name) for name in ("disparity", "coverage", "accuracy", MAX_ERROR)}
        for name, share in (shares | {f"fairness: {name}": limit for name, limit in self.fairness.items()}).items():
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a limit between 0 and 1, got {share}; give a limit such as 0.1.")
        if self.disparity is not None and DEFAULT in self.fairness:
            raise ValueError(
                f"disparity: limits the same gap as fairness {DEFAULT}, but both were given; leave one of them out."
            )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that the user set, by name. The limits on coverage and accuracy are minima; those on epsilon,
        disparity, errors and other notions of fairness are maxima."""
        named = {name: getattr(self, name) for name in ("epsilon", "disparity", "coverage", "accuracy", MAX_ERROR)}
        fair_at = {} if self.fair_at is None else {FAIR_AT: self.fair_at.limit}
        return {name: limit for name, limit in named.items() if limit is not None} | dict(self.fairness) | fair_at

    @property
    def notions(self) -> tuple[NotionName, ...]:
        """The notions of fairness that the user limits, or the default notion if the user limits none."""
        ruled = () if self.fair_at is None else (self.fair_at.notion,)
        named = (*((DEFAULT,) if self.disparity is not None else ()), *self.fairness, *ruled)
        return tuple(dict.fromkeys(named)) or (DEFAULT,)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One configuration of a comparison (``point``) compared with a demand, the user's limits.

    ``missed``: for each limit that is not met, by which share of the limit the value misses it. The value of epsilon is
    the published one, which is rounded up. ``distance``: the largest of these shares, so 0.1 means that a limit is
    missed by 10 %; 0 if all limits are met. ``seeds_met``: the number of seeds whose own run meets every limit.
    """

    point: Point
    missed: Mapping[str, float]
    distance: float
    seeds_met: int


@dataclass(frozen=True, kw_only=True)
class Achievable:
    """The answer to a demand, the user's limits, within one panel (data set and privacy class): the configurations that
    meet it, best first, or else the nearest ones.

    A degenerate predictor, which refuses most records or predicts one class, can meet many demands and still be
    useless: it is listed last in ``met`` and counted in ``num_degenerate``.
    """

    met: tuple[Offer, ...]
    nearest: tuple[Offer, ...]
    num_points: int
    num_undefined: int
    num_degenerate: int
    baselines: Baselines


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The performance on one data set (the target) of a configuration that was chosen on another data set (the source),
    and of all configurations on the source's frontier.

    ``chosen`` is the configuration that meets the demand best on the source, None if there is no configuration.
    ``there`` is the same configuration on the target, None if it was not run there. ``best`` is the target's
    configuration that meets the demand best. ``regret`` is the accuracy that ``there`` loses against ``best``, NaN
    unless both meet the demand.

    The source's frontier has ``num_members`` configurations, of which ``num_missing`` were not run on the target.
    ``hypervolume_transferred`` is the hypervolume that the others reach on the target, ``hypervolume_own`` that of all
    the target's configurations. ``regret_hypervolume`` is the share of ``hypervolume_own`` that
    ``hypervolume_transferred`` does not reach, NaN if ``hypervolume_own`` is 0.
    """

    chosen: Offer | None
    there: Offer | None
    best: Offer | None
    num_members: int
    num_missing: int
    hypervolume_transferred: float
    hypervolume_own: float
    regret: float
    regret_hypervolume: float


def offer(point: Point, demand: Demand) -> Offer:
    """Return by how much the configuration ``point`` misses each limit of ``demand``; an undefined value misses its
    limit infinitely far."""
    missed = _missed(_values(point, demand), demand)
    # Means may meet a demand that no single seed meets.
    seeds_met = sum(not _missed(_values(point, demand, seed), demand) for seed in range(len(point.seeds)))
    return Offer(point=point, missed=missed, distance=max(missed.values(), default=0.0), seeds_met=seeds_met)


def _values(point: Point, demand: Demand, seed: int | None = None) -> dict[str, float]:
    """Return the value that the configuration ``point`` has for each metric that ``demand`` limits: for one ``seed``,
    or the mean over all seeds.

    A fairness gap is NaN if it could not be measured for some group.
    """
    values: dict[str, float] = {}
    for name in demand.limits:
        if name == FAIR_AT:
            assert demand.fair_at is not None
            # The limit from which on all seeds are fair: one seed that is not makes the configuration perhaps fair.
            fair_from_S = point.fair_from(demand.fair_at.notion)
            unknown = point.groups.unmeasured and not NOTIONS[demand.fair_at.notion].bounds_rate
            values[name] = math.nan if unknown else float(fair_from_S.max() if seed is None else fair_from_S[seed])
            continue
        if name == MAX_ERROR:
            is_sure = point.max_error_confidence >= CONFIDENCE
            bound = point.max_error if seed is None else float(point.max_error_S[seed])
            values[name] = bound if is_sure else math.nan
            continue
        seen = point
        if name not in _OBJECTIVE_OF:
            seen = point.seen_by(DEFAULT if name == "disparity" else notion_named(name))
        objective = _OBJECTIVE_OF.get(name, "disparity")
        value = float((seen.mean_O if seed is None else seen.values_SO[seed])[OBJECTIVES.index(objective)])
        # Objectives are minimised: accuracy and coverage are the complements of error and refusals.
        values[name] = 1 - value if name in _LEAST else value
        # A gap among fewer groups is smaller for that reason alone, so it meets no limit.
        if objective == "disparity" and point.groups.unmeasured:
            values[name] = math.nan
    return values


def _missed(values: Mapping[str, float], demand: Demand) -> dict[str, float]:
    """Return, for each limit of ``demand`` that ``values`` do not meet, by which share of the limit the value misses
    it; infinite for an undefined value."""
    missed = {}
    for name, limit in demand.limits.items():
        value = values[name]
        # A true epsilon within the limit is no excess, though it is guaranteed rounded up.
        if value >= limit if name in _LEAST else value <= limit:
            continue
        if name == "epsilon":
            value = frontier.rounded_up(value)
        excess = math.inf if math.isnan(value) else abs(value - limit) / (limit or _ZERO_SCALE)
        # A limit that is missed by the rounding of a mean counts as met.
        if excess > _ROUNDING:
            missed[name] = excess
    return missed


def achievable(points: Sequence[Point], demand: Demand, *, num_nearest: int = 3) -> Achievable:
    """Return which of one panel's configurations (``points``) meet ``demand``, or if none does, the ``num_nearest``
    nearest ones.

    The nearest are taken from the configurations that no other one dominates in epsilon, error, refusals and every
    notion of fairness in the demand. They are sorted by ``Offer.distance``, then by the sum of ``Offer.missed``, then
    by accuracy.
    """
    offers = [offer(point, demand) for point in points if not np.isnan([*_values(point, demand).values()]).any()]
    met = [each for each in offers if not each.missed]
    nearest: list[Offer] = []
    if offers and not met:
        gaps = [[each.point.seen_by(name).value("disparity") for each in offers] for name in demand.notions]
        # A gap that was limited is defined here. One that was not excludes nothing: undefined, it is as the worst.
        gaps = np.nan_to_num(gaps, nan=np.inf).tolist()
        gaps += [[each.point.max_error for each in offers]] if MAX_ERROR in demand.limits else []
        gaps += [] if demand.fair_at is None else [[_values(each.point, demand)[FAIR_AT] for each in offers]]
        compared = frontier.matrix([o.point for o in offers], ("epsilon", "error", "refused"), guaranteed=True)
        values_NO = np.column_stack([compared, *gaps])
        # Undefined points are left out before: one that compares with none would be dominated by none.
        (defined_K,) = np.nonzero(~np.isnan(values_NO).any(axis=1))
        if len(defined_K):
            nearest = [offers[place] for place in defined_K[frontier.pareto_mask(values_NO[defined_K])].tolist()]
    return Achievable(
        met=tuple(sorted(met, key=_rank)),
        nearest=tuple(sorted(nearest, key=_rank)[:num_nearest]),
        num_points=len(points),
        num_undefined=len(points) - len(offers),
        num_degenerate=sum(bool(each.point.degenerate) for each in met),
        baselines=frontier.baselines(points),
    )


def _rank(found: Offer) -> tuple[float, ...]:
    """Return the sort key of a configuration compared with a demand: degenerate predictors last, then by distance from
    the limits (0 if all are met), then by accuracy."""
    # Rounded: distances that differ by floating point alone are equal, and accuracy decides.
    missed = (round(found.distance, 9), round(sum(found.missed.values()), 9))
    values = [found.point.value(name) for name in frontier.THEN]
    return bool(found.point.degenerate), *missed, *(math.inf if math.isnan(value) else value for value in values)


def transfer(source: Sequence[Point], target: Sequence[Point], demand: Demand) -> Transfer:
    """Return how a configuration that is chosen on one data set performs on another. The choice is the point of
    ``source`` that meets ``demand`` best; it is looked up in ``target``, like all points on the source's frontier."""
    # On each side the same rule chooses, so that the difference is that of the data sets.
    answers = [achievable(points, demand) for points in (source, target)]
    chosen, best = (next(iter(found.met or found.nearest), None) for found in answers)
    image = None if chosen is None else _image(chosen.point, source, target)
    there, regret = None if image is None else offer(image, demand), math.nan
    if there is not None and best is not None and not there.missed and not best.missed:
        # A difference of errors is one of accuracies, positive where the choice is worse.
        regret = there.point.value("error") - best.point.value("error")
    members = frontier.frontier(source, OBJECTIVES).members
    images = [_image(point, source, target) for point in members]
    # Without undefined points, which have no hypervolume.
    found, _ = frontier.defined([image for image in images if image is not None], OBJECTIVES)
    everything, _ = frontier.defined(target, OBJECTIVES)
    # One corner for both volumes: under different ones they do not compare.
    reference_O = frontier.reference_point(target)
    transferred, own = (
        frontier.hypervolume(frontier.matrix(reached, OBJECTIVES), reference_O=reference_O)
        for reached in (found, everything)
    )
    return Transfer(
        chosen=chosen,
        there=there,
        best=best,
        num_members=len(members),
        num_missing=sum(each is None for each in images),
        hypervolume_transferred=transferred,
        hypervolume_own=own,
        regret=regret,
        regret_hypervolume=1 - transferred / own if own else math.nan,
    )


def _image(point: Point, source: Sequence[Point], target: Sequence[Point]) -> Point | None:
    """Return the point of the data set ``target`` that has the same configuration as ``point`` has on ``source``; None
    unless there is exactly one such point.

    Two configurations count as the same if they agree in every setting that varies among the method's points on either
    data set. A setting that is constant on each data set is considered a property of the data set.
    """

    def setting(of: Point, name: str) -> str:
        return json.dumps(of.settings.get(name), sort_keys=True, default=str)

    sides = [[each for each in points if each.series == point.series] for points in (source, target)]
    # Settings of the data differ between data sets anyway, so they cannot distinguish configurations.
    names = {name for side in sides for each in side for name in each.settings if not name.startswith("data.")}
    varied = [name for name in names if any(len({setting(each, name) for each in side}) > 1 for side in sides)]
    same = [each for each in sides[1] if all(setting(each, name) == setting(point, name) for name in varied)]
    return same[0] if len(same) == 1 else None


@dataclass(frozen=True, kw_only=True)
class SpecifyAnswer:
    """The answer to ``demand``, the user's limits, from the results in ``table``. It says what is achievable in each
    panel (data set and privacy class), and how the configuration chosen on one panel performs on another."""

    demand: Demand
    table: Path
    panels: Mapping[Panel, Achievable]
    transfers: Mapping[tuple[Panel, Panel], Transfer]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as strict JSON values; infinite and undefined numbers are null."""
        answers = [
            {
                "data": panel.data,
                **asdict(panel.privacy),
                "achievable": bool(found.met),
                "num_configurations": found.num_points,
                "num_undefined": found.num_undefined,
                "num_degenerate": found.num_degenerate,
                "met": [_plain_offer(offer) for offer in found.met],
                "nearest": [_plain_offer(offer) for offer in found.nearest],
                "baselines": asdict(found.baselines),
            }
            for panel, found in self.panels.items()
        ]
        whole = ("num_members", "num_missing", "hypervolume_transferred", "hypervolume_own", "regret_hypervolume")
        transfers = [
            {
                "source": {"data": source.data, **asdict(source.privacy)},
                "target": {"data": target.data, **asdict(target.privacy)},
                "chosen": _plain_offer(moved.chosen),
                "there": _plain_offer(moved.there),
                "its_own": None if moved.chosen is None else _plain_offer(moved.best),
                "regret_accuracy": None if moved.chosen is None else moved.regret,
                "frontier": {name: getattr(moved, name) for name in whole},
            }
            for (source, target), moved in self.transfers.items()
        ]
        words = {"frontier": str(self.table), "distance": DISTANCE, "caveat": CAVEAT}
        return strict({"demand": asdict(self.demand), **words, "answers": answers, "transfers": transfers})


def _plain_offer(offer: Offer | None) -> dict[str, Any] | None:
    if offer is None:
        return None
    point = offer.point
    # Objectives of a point are minimised; a user reads accuracy and coverage, whose spread is the same.
    disparity = OBJECTIVES.index("disparity")
    seen = {name: point.seen_by(name) for name in NAMES}
    # In the order of `OBJECTIVES`, behind epsilon.
    spread = zip(("disparity", "accuracy", "coverage"), seen[DEFAULT].spread_O[1:].tolist(), strict=True)
    return {
        "method": point.method,
        "epsilon": point.value("epsilon"),
        "disparity": seen[DEFAULT].value("disparity"),
        "fairness": {
            name: {"mean": own.value("disparity"), "spread": float(own.spread_O[disparity])}
            for name, own in seen.items()
        },
        "accuracy": 1 - point.value("error"),
        "coverage": 1 - point.value("refused"),
        "spread": dict(spread),
        "seeds": list(point.seeds),
        "seeds_met": offer.seeds_met,
        "missed": dict(offer.missed),
        "distance": offer.distance,
        "majority_accuracy": point.majority_accuracy,
        "degenerate": list(point.degenerate),
        "underserved_groups": dict(point.groups.underserved),
        "unmeasured_groups": dict(point.groups.unmeasured),
        "noise_from_seed": point.is_seeded,
        "remarks": list(point.remarks),
        "settings": dict(point.settings),
        "commands": list(point.commands),
    }


def specify_guarantees(
    demand: Demand, table: Path | None, *, data: str | None = None, transfer_to: Path | None = None
) -> SpecifyAnswer:
    """Return which configurations in a table of results meet ``demand``, the user's limits.

    ``table`` is the file of the results; None: that of the newest comparison under ``runs``. ``data`` restricts the
    answer to one data set; ``transfer_to`` is a second table, on which each chosen configuration is looked up. Only
    epsilons that may be published are used. SpecifyError without a table, for a demand without limits, and if there is
    no finished run or no other data set to transfer to.
    """
    for option, path in (("--frontier", table), ("--transfer", transfer_to)):
        if path is not None and not path.is_file():
            raise SpecifyError(f"{option}: {path} is not a file; give the results.parquet of `fairpate compare`.")
    table = table or max(Path("runs").glob("*/results.parquet"), key=lambda path: path.stat().st_mtime, default=None)
    if table is None:
        raise SpecifyError(f"--frontier: found no table runs/*/results.parquet to choose from; {_MAKE_ONE}.")
    if not demand.limits:
        raise SpecifyError(
            "no limit was given, so there is nothing to search for; give at least one of --epsilon, --fair-at, "
            "--disparity, --fairness, --coverage, --accuracy, --max-error."
        )
    # Points carry the disparity of one notion; the values of all others are with them.
    notion = demand.notions[0]
    panels = by_panel(_points(table, data, notion))
    if demand.max_error is not None and all(np.isnan(each.max_error) for found in panels.values() for each in found):
        raise SpecifyError(
            f"--max-error: no run in {table} guarantees a bound on the errors of every group's answers; write "
            f"`student.reject.max_error: {demand.max_error:g}` among the settings of the comparison."
        )
    transfers: dict[tuple[Panel, Panel], Transfer] = {}
    if transfer_to is not None:
        targets = by_panel(_points(transfer_to, None, notion))
        # Deltas may differ, because they follow the number of records; unit and relation may not.
        transfers = {
            (source, target): transfer(here, there, demand)
            for source, here in stepwise(list(panels.items()))
            for target, there in targets.items()
            if source.data != target.data
            and (source.privacy.unit, source.privacy.relation) == (target.privacy.unit, target.privacy.relation)
        }
        if not transfers:
            raise SpecifyError(
                f"--transfer: {transfer_to} has no other data set under the same unit and relation as {table}; give "
                "the results.parquet of another comparison."
            )
    answers = {panel: achievable(found, demand) for panel, found in stepwise(list(panels.items()))}
    return SpecifyAnswer(demand=demand, table=table, panels=answers, transfers=transfers)


def _points(table: Path, data: str | None, notion: NotionName) -> list[Point]:
    rows = [row for row in read_rows(table) if not row.is_private]
    # Names from failed runs too: a data set without a finished run is not called unknown.
    names = sorted({row.data for row in rows})
    if data is not None and data not in names:
        raise SpecifyError(f"--data: {table} has no data set {data}; give one of {', '.join(names) or 'none'}.")
    done = [(row.record, row.command) for row in rows if row.record is not None and data in (None, row.data)]
    if not done:
        raise SpecifyError(f"{table}: has no finished run whose epsilon may be published; {_MAKE_ONE}.")
    return frontier.points_of([record for record, _ in done], commands=[command for _, command in done], notion=notion)


def fairness_limits(given: Sequence[str]) -> dict[NotionName, float]:
    """Return the limits that texts of the form ``NOTION=LIMIT`` set, by notion of fairness. ValueError for another
    form, and for an unknown or a repeated notion."""
    limits: dict[NotionName, float] = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            notion = notion_named(name)
        except ValueError as error:
            raise ValueError(f"fairness: {error}") from None
        if notion in limits:
            raise ValueError(f"fairness: {notion} is limited twice; leave one of the two limits out.")
        try:
            limits[notion] = float(text)
        except ValueError:
            raise ValueError(f"fairness: expected {notion}=LIMIT, got {each!r}; give a number as LIMIT.") from None
    return limits


_MOST_OFFERS = 5
_SEEDED = "noise from a seed: reproducible, not private; epsilon is what the same run would have with fresh noise."
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def describe_answer(answer: SpecifyAnswer) -> Group:
    """Return the printed form of the answer: for each panel, how many configurations meet the demand, a table of the
    best, and the command that repeats the best of them."""
    notions = answer.demand.notions
    asked = [
        f"{_limit_name(name)} {'>=' if name in _LEAST else '<='} {limit:g}"
        for name, limit in answer.demand.limits.items()
        if name != FAIR_AT
    ]
    if (rule := answer.demand.fair_at) is not None:
        asked.append(f"fair: {NOTIONS[rule.notion].measure} <= {rule.limit:g} with the whole interval of every seed")
    parts: list[Any] = [Text(f"frontier: {answer.table}\nasked: {', '.join(asked)}\n")]
    for panel, found in answer.panels.items():
        parts.append(Text(f"{panel.data}, {class_label(panel.privacy)}", style="bold"))
        parts += [Text(compared)] if (compared := baseline_words(found.baselines)) else []
        undefined = ""
        if found.num_undefined:
            undefined = f" Undefined in what is asked, or not known for every group: {found.num_undefined}."
        line = f"not achievable by any of {found.num_points} configurations.{undefined}"
        if not found.met and not found.nearest:
            parts.append(Text(f"{line}\n"))
            continue
        if found.met:
            more = f", the {_MOST_OFFERS} most accurate of them" if len(found.met) > _MOST_OFFERS else ""
            degenerate = ""
            if found.num_degenerate == len(found.met):
                degenerate = " But all of them are degenerate in at least one seed: none is recommended."
            elif found.num_degenerate:
                degenerate = f" Behind all others, as degenerate in at least one seed: {found.num_degenerate} of them."
            line = f"achievable by {len(found.met)} of {found.num_points} configurations{more}.{degenerate}{undefined}"
        else:
            line += f" The nearest on the frontier; distance is {DISTANCE}."

        offers = (found.met or found.nearest)[:_MOST_OFFERS]
        notes = list(dict.fromkeys(note for offer in offers for note in _notes(offer.point)))
        numbers = {note: str(number).translate(_RAISED) for number, note in enumerate(notes, 1)}
        gaps = [in_two_lines(NOTIONS[notion].measure) for notion in notions]
        names = ("ε", *gaps, "accuracy %", "coverage %", "seeds" if found.met else "distance")
        right = [Column(name, justify="right", no_wrap=True) for name in names]
        columns = [Column("method", no_wrap=True), *right]
        table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for each in offers:
            kept = f"{each.seeds_met} of {len(each.point.seeds)}" if found.met else f"{each.distance:.2f}"
            method = " ".join([each.point.method, *(numbers[note] for note in _notes(each.point))])
            _, accuracy, coverage = (words.replace("\N{NO-BREAK SPACE}%", "") for words in with_spread(each.point))
            coverage, *_ = coverage.partition(" ± ")  # 80 columns hold the longest name, not every spread
            fairness = [with_spread(each.point.seen_by(notion))[0] for notion in notions]
            table.add_row(method, epsilon_text(each.point.value("epsilon")), *fairness, accuracy, coverage, kept)
        parts += [Text(line), table, *(Text(f"{number} {note}") for note, number in numbers.items())]

        first = offers[0]
        if not found.met:
            parts.append(Text(f"the first misses {_missed_words(first)}"))
        # A degenerate predictor is not recommended, so no command repeats it.
        if not first.point.degenerate:
            commands = [command for command in first.point.commands if command]
            words = f"repeat the first: {commands[0]}" if commands else "no command is recorded for the first."
            # On one line, so that it can be copied.
            parts.append(Text(f"{words}\n", no_wrap=True, overflow="ignore"))
    for (source, target), moved in answer.transfers.items():
        parts += _transfer_parts(source, target, moved, notions)
    return Group(*parts, Text(CAVEAT))


def _notes(point: Point) -> list[str]:
    return [*([_SEEDED] if point.is_seeded else []), *point.remarks]


def _transfer_parts(source: Panel, target: Panel, moved: Transfer, notions: Sequence[NotionName]) -> list[Any]:
    """Return the printed lines on how the configuration and the frontier of one data set (``source``) perform on
    another (``target``), as measured by :func:`transfer` (``moved``)."""
    if moved.chosen is None:
        lines = ["nothing to choose: no configuration has all objectives defined."]
    elif moved.there is None:
        lines = [f"chosen: {_offer_words(moved.chosen, notions)}; it was not run on {target.data}."]
    else:
        lines = [
            f"chosen:  {_offer_words(moved.chosen, notions)}",
            f"there:   {_offer_words(moved.there, notions)}",
            *([] if moved.best is None else [f"its own: {_offer_words(moved.best, notions)}"]),
        ]
        if not math.isnan(moved.regret):
            lines.append(f"regret:  {100 * moved.regret:.1f} points of accuracy")
        elif moved.there.missed:
            own = "misses it too" if moved.best is None or moved.best.missed else "meets it"
            lines.append(f"regret:  the choice misses the demand there ({_missed_words(moved.there)}); its own {own}")
        else:
            lines.append("regret:  undefined, its own choice misses the demand")
    missing = f"; {moved.num_missing} of them were not run there" if moved.num_missing else ""
    lines.append(
        f"whole frontier: {moved.num_members} configurations reach {_share(1 - moved.regret_hypervolume)} of the "
        f"hypervolume on {target.data}{missing}.\n"
    )
    deltas = "" if source.privacy == target.privacy else f" (there {class_label(target.privacy)})"
    heading = f"chosen on {source.data}, applied on {target.data}: {class_label(source.privacy)}{deltas}"
    return [Text(heading, style="bold"), *map(Text, lines)]


def _offer_words(offer: Offer, notions: Sequence[NotionName]) -> str:
    point = offer.point
    _, accuracy, coverage = with_spread(point)
    fairness = ", ".join(f"{NOTIONS[notion].measure} {with_spread(point.seen_by(notion))[0]}" for notion in notions)
    missed = f"; misses {_missed_words(offer)}" if offer.missed else ""
    notes = "".join(f"; {note}" for note in _notes(point))
    return (
        f"{point.method}, epsilon {epsilon_text(point.value('epsilon'))}, {fairness}, accuracy {accuracy}, "
        f"coverage {coverage}{missed}{notes}"
    )


def _missed_words(offer: Offer) -> str:
    shares = {name: _share(excess) if excess >= 0.0005 else "less than 0.1 %" for name, excess in offer.missed.items()}
    return ", ".join(f"{_limit_name(name)} by {share}" for name, share in shares.items()) or "nothing"


def _limit_name(name: str) -> str:
    """Return the printed name of a limit: for a notion of fairness the name of its measure, such as parity gap."""
    if name in _OBJECTIVE_OF:
        return name
    if name == FAIR_AT:
        return "whole interval of what is called fair"
    if name == MAX_ERROR:
        return "wrong answers in every group"
    return NOTIONS[DEFAULT if name == "disparity" else notion_named(name)].measure


def _share(value: float) -> str:
    if math.isnan(value):
        return "undefined"
    return "infinitely much" if math.isinf(value) else f"{100 * value:.1f} %"
