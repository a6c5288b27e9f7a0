"""The pages of one run: report, operator's report and card, with their charts.

Curves and histograms as inline SVG by matplotlib: no script, no request, colours and letters of the page.

Text stays text. A colour is drawn as it stands in the light style sheet and then named by its variable, so that a
reader's dark theme holds for drawings too. What is empty or not finite is said, not drawn.

The page of a run that is published, and what the operator's page opens with too.

It is a function of ``PublicReport``, which holds the published guarantee, metrics on the test records and what was
released, and nothing that depends on votes otherwise. It opens with a verdict in words
(:mod:`fairpate.report.records`) and is one self-contained HTML file without scripts. Sections about votes stand
only where there were votes.

The operator's page of a run with votes: what it really cost, query by query. It depends on votes: never publish it.

Beside the published cost stand the data-dependent one and the ledger as FairPATE's authors published theirs, where a
label that the fairness gate rejects costs nothing. What a query cost is shown as a share of its worst case, which is
what was published for it: close votes cost nearly all of it, clear ones little.

The privacy-and-fairness card of a published student, as records and as one page without scripts.

A card is a function of what was published: the statement of privacy, the student's file, metrics on test records, and
the public entry of the data set. It says what is not stated, undefined or not guaranteed in as many words.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fairpate.fairness.rates import NOTIONS, FloatArray
from fairpate.later import matplotlib
from fairpate.report.figures import SHAPES
from fairpate.report.metrics import Evaluation, RejectOptionSpread, WithoutPrivacy
from fairpate.report.page import count, counted, course, epsilon_text, made_words, percent, render, scale_end
from fairpate.report.records import (
    OUTCOMES,
    Guarantee,
    PrivatePopulation,
    PrivateReport,
    PublicReport,
    Voting,
    earlier_words,
    interval_words,
    majority_words,
    population_words,
    published_epsilon,
    several_records,
    small_cell_words,
    unit_words,
    verdict,
    why_not_private,
)
from fairpate.types import STOPPED_BY_VOTES, TELLS_SIZE, GateRule
from fairpate.words import cost_words, dearest, delta_text, shares_of_worst, votes_matter

WIDTH, _HEIGHT, _LEGEND_LINE = 440, 256, 20
_COLORS = {
    "answered": "#0b5a8f",
    "fairness": "#c4571b",
    "confidence": "#e8b34a",
    "free": "#d3d8de",
    "muted": "#5b6672",
    "line": "#d8dce1",
    "wash": "#e6eff6",
    "paper": "#ffffff",
    "ink": "#18212b",
}
"""Variables of ``report.css`` and a colour that stands for each."""
_CURVES = (("answered", "-"), ("fairness", (0, (7, 4))), ("muted", (0, (2, 4))))
_SVG = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>')
_NOTHING = Markup('<p class="note">{}: nothing to draw, no finite value.</p>')


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line through ``points`` of (x, y) and the words that label it."""

    name: str
    points: Sequence[tuple[float, float]]


def curves(lines: Sequence[Curve], *, x_label: str, y_label: str, title: str) -> Markup:
    """Up to three lines on linear axes from 0: one is labelled at its end, several in a legend beneath the chart."""
    points = [point for line in lines for point in line.points]
    if not points or not all(math.isfinite(y) for _, y in points):
        return _NOTHING.format(title)
    legend = _LEGEND_LINE * len(lines) if len(lines) > 1 else 0
    figure, axes = _axes(x_label, y_label, legend=legend)
    _ticks(axes, x=max(x for x, _ in points), y=max(y for _, y in points))
    for line, (color, dash) in zip(lines, _CURVES, strict=False):
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, color=_COLORS[color], linestyle=dash, linewidth=2.2, clip_on=False, label=line.name)
    if legend:
        figure.legend(loc="lower left", frameon=False, handlelength=3, labelcolor=_COLORS["ink"])
    else:
        (only,) = lines
        axes.fill(
            *zip((0, 0), *only.points, (only.points[-1][0], 0), strict=True), color=_COLORS["wash"], clip_on=False
        )
        axes.annotate(only.name, only.points[-1], (-9, 8), textcoords="offset points", ha="right", color=_COLORS["ink"])
    return _inline(figure, title)


def histogram(
    edges: Sequence[float],
    stacks: Mapping[str, Sequence[int]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    ticks: Sequence[tuple[float, str]],
) -> Markup:
    """Counts between ``edges`` (one more than counts), stacked in the order given by the name of their colour."""
    totals = [sum(column) for column in zip(*stacks.values(), strict=True)]
    if not any(totals):
        return _NOTHING.format(title)
    figure, axes = _axes(x_label, y_label)
    _ticks(axes, y=max(totals), whole=True)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks([at for at, _ in ticks], [words for _, words in ticks])
    left, width, base = np.asarray(edges)[:-1], np.diff(edges), np.zeros(len(totals))
    for color, counts in stacks.items():
        kept = np.asarray(counts) > 0
        axes.bar(
            left[kept],
            np.asarray(counts)[kept],
            width[kept],
            bottom=base[kept],
            align="edge",
            color=_COLORS[color],
            edgecolor=_COLORS["paper"],
            hatch="///" if color == "fairness" else None,
            clip_on=False,
        )
        base += counts
    return _inline(figure, title)


def _axes(x_label: str, y_label: str, *, legend: int = 0) -> tuple[matplotlib.figure.Figure, Any]:
    height = _HEIGHT + legend
    figure = matplotlib.figure.Figure(figsize=(WIDTH / 72, height / 72), dpi=72, frameon=False)
    axes = figure.add_axes((46 / WIDTH, (44 + legend) / height, 374 / WIDTH, 188 / height))
    axes.patch.set_visible(False)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_COLORS["muted"])
    axes.tick_params(length=0, pad=6, labelcolor=_COLORS["muted"])
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=_COLORS["muted"])
    # Places that are said are not looked for among the ticks, each of whose labels would be laid out for it again.
    axes.yaxis.set_label_coords(0, 0)
    axes.set_title(y_label, loc="left", x=-46 / 374, y=1, pad=11, fontsize=10, color=_COLORS["muted"])
    return figure, axes


def _ticks(axes: Any, *, y: float, x: float | None = None, whole: bool = False) -> None:
    """Round numbers from 0 to at least the largest, where the axes end; a line for each of y."""
    if x is not None:
        ends = matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(0, x)
        axes.set_xticks(ends, [f"{end:,g}" for end in ends])
        axes.set_xlim(0, ends[-1])
    ends = matplotlib.ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(0, max(y, 1e-12))
    axes.set_yticks(ends, [f"{end:,g}" for end in ends])
    axes.set_ylim(0, ends[-1])
    for end in ends:
        axes.axhline(end, color=_COLORS["line"], linewidth=1, zorder=0, clip_on=False)


def _inline(figure: matplotlib.figure.Figure, title: str) -> Markup:
    """The drawing inside a page: without the names, the style sheet and the font that a file of its own would need."""
    drawn = io.StringIO()
    # Ids follow from the title: drawings on one page do not share them, and the same numbers give the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        canvas = matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
        canvas.print_svg(drawn, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))  # type: ignore[no-untyped-call]
    body = drawn.getvalue()
    body = body[body.index('<g id="figure_1"') : body.rindex("</svg>")]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font[a-z-]*: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    for name, color in _COLORS.items():
        body = body.replace(color, f"var(--{name})")
    height = round(figure.get_figheight() * 72)
    return _SVG.format(WIDTH, height, title, title, Markup(body))  # noqa: S704 - matplotlib escapes its text


GAP_NAMES = {
    **{notion.reading: notion.title for notion in NOTIONS.values()},
    "dp_pairwise": "Demographic parity, between two groups",
    "dp_to_overall": "Demographic parity, group to overall",
    "eo_full": "Equalized odds, one group against the rest",
}
_SCOPES = {
    "group": "in the group",
    "cell": "in the group and class",
    "all_groups": "in every group",
    "one_vs_rest": "against all other groups",
    "pairwise": "against each other group",
    "overall": "against the overall rate",
}


def public_report(report: PublicReport) -> str:
    """The page to publish, as one HTML document."""
    gaps = [gap for found in report.evaluations.values() for gap in found.between_groups.values()]
    return render(
        "report.html",
        **opening(report),
        settings=_settings(report),
        budget_curve=_budget_curve(report),
        released_CG=_released(report),
        outcomes=OUTCOMES,
        gap_names=GAP_NAMES,
        answered=answered_words,
        small_cells=small_cell_words(report.headline),
        gap_end=scale_end([end for gap in gaps for end in (gap.value, gap.high)]),
        prediction_words={name: prediction_words(found, report.model) for name, found in report.evaluations.items()},
        order_words=_order_words(report.reject_option),
        margin=None if report.voting is None else _margin(report.voting.gate),
        stopped_by_votes=STOPPED_BY_VOTES,
        population=report.private_population,
        population_words=report.private_population and population_words(report.private_population),
    )


def opening(report: PublicReport, without_privacy: WithoutPrivacy | None = None) -> dict[str, Any]:
    """Title, verdict, what was done; ``without_privacy`` for the operator's page alone."""
    guarantee = report.guarantee
    return {
        "report": report,
        "guarantee": guarantee,
        "protected": unit_words(guarantee.unit),
        "voting": report.voting,
        "measured": report.headline,
        "shapes": SHAPES,
        "noise": _noise(report),
        "training_labels": _training_labels(report),
        "baseline": majority_words,
        "verdict": verdict(report.headline, guarantee, without_privacy),
        "earlier": earlier_words(guarantee),
        "why_not": why_not_private(guarantee),
    }


def answered_words(measured: Evaluation) -> str:
    """Of which records rates are."""
    return "all test records" if measured.num_answered == measured.num_records else "answered test records"


def prediction_words(measured: Evaluation, model: str) -> str:
    """How many classes are predicted at all, for a gap is read beside that."""
    if not measured.num_answered:
        return "No record is answered."
    predicted = sum(any(rates[k] > 0 for rates in measured.rates_GC) for k in range(len(measured.class_names)))
    words = f"{count(predicted)} of {count(len(measured.class_names))} classes are predicted for some record."
    said = (*measured.degenerate, *measured.underserved)
    return f"The {model} {'; it '.join(said)}. {words}" if said else words


def _training_labels(report: PublicReport) -> str:
    """The labels behind the student, beside those that the ledger has released until now."""
    if report.voting is None:
        return ""
    trained, answered = report.num_training_labels, report.voting.answered
    if trained is None:
        return "released labels, of which the number was not recorded"
    if trained < answered:
        others = f"the other {count(answered - trained)} answer queries beside the run’s own"
        return f"{count(trained)} of these labels: {others}"
    return "these labels" if trained == answered else counted(trained, "released label")


def _settings(report: PublicReport) -> str:
    guarantee, votes = report.guarantee, report.voting
    how = f"Touched private records: {'; '.join(guarantee.events)}" if guarantee.events else "No event was priced"
    if votes:
        how = f"{votes.mechanism}. " + (
            "No fairness gate" if math.isinf(votes.gate.max_disparity) else f"Fairness margin {_gate(votes.gate)}"
        )
    tuning = "is" if guarantee.tuning_accounted else "is not"
    return f"Method: {report.method}. {how}. Noise: {_noise(report)}. Tuning {tuning} part of ε."


def _budget_curve(report: PublicReport) -> Any:
    if report.voting is None:
        return ""
    total = f"ε = {epsilon_text(report.guarantee.epsilon)}"
    return curves(
        [Curve(name=total, points=course(report.voting.epsilon_course_Q))],
        x_label="submitted queries",
        y_label=f"ε at δ = {delta_text(report.guarantee.delta)}",
        title="Data-independent privacy budget spent against submitted queries",
    )


def _released(report: PublicReport) -> list[list[float]]:
    """The share of each class in each group's released labels."""
    if report.voting is None:
        return []
    return [
        [row[k] / sum(row) if sum(row) else math.nan for row in report.voting.answered_GC]
        for k in range(len(report.headline.class_names))
    ]


def _order_words(spread: RejectOptionSpread | None) -> str:
    """Over what the figures of a model that may refuse are spread."""
    if spread is None:
        return ""
    return (
        "A model that may refuse decides on each record in view of its earlier answers: the figures with refusals "
        f"belong to one order. Here are {count(len(spread.orders))} random orders of the same "
        f"{count(spread.num_records)} predictions; margin {_gate(spread.rule)}."
    )


def _gate(rule: GateRule) -> str:
    start, gap = _SCOPES[rule.cold_start], _SCOPES[rule.gap]
    return f"γ = {_margin(rule)} after {rule.min_count} answers ({start}), gap {gap}"


def _margin(rule: GateRule) -> str:
    return "off" if math.isinf(rule.max_disparity) else f"{rule.max_disparity:g}"


def _noise(report: PublicReport) -> str:
    """Where the noise comes from; that of votes is exact, that of training is of floating point."""
    label = report.guarantee.noise
    if label != "os_entropy":
        return label.replace(": ", ", ")
    return "exact, from operating-system entropy" if report.voting else "from operating-system entropy"


_LEDGERS = {
    "Data-independent": "Every submitted query at its worst case, whatever the votes. May be published.",
    "Data-dependent": "Everything that was computed, at what these votes make it cost. Private.",
    "Data-dependent, as in the paper": (
        "As FairPATE’s authors reported theirs: rejections by the fairness gate are free, and a noisy vote counts with "
        "the probability that it is drawn, whether it was or not. No bound; for comparison only."
    ),
}


@dataclass(frozen=True, kw_only=True)
class ChargedQuery:
    """One row of the largest charges; ``number`` counts submitted queries from 1."""

    number: int
    group: str
    outcome: str
    votes: str
    of_worst: float
    of_total: float
    when: str


@dataclass(frozen=True, kw_only=True)
class GroupVotes:
    """How the voters agreed on one group's queries, and what these made up of the cost."""

    name: str
    num_queries: int
    agreement: float
    of_total: float


def private_report(report: PrivateReport) -> str:
    """The operator's page, as one HTML document. It depends on private votes: never publish it."""
    public, voting = report.public, report.public.voting
    assert voting is not None
    courses = (
        voting.epsilon_course_Q,
        report.epsilon_data_dependent_course_Q,
        report.epsilon_as_in_paper_course_Q,
    )
    totals = [public.guarantee.epsilon, *(float(epsilon_Q[-1]) if len(epsilon_Q) else 0.0 for epsilon_Q in courses[1:])]
    queries = _query_by_query(report, voting)
    # Where no price depends on votes there is one ledger: the paper's rule is of a mechanism that this one is not.
    are_one = all(np.array_equal(courses[0], other) for other in courses[1:])
    num_ledgers = 1 if are_one and not queries["costs"] else len(_LEDGERS)
    return render(
        "operator.html",
        **opening(public, report.without_privacy),
        ledgers=list(zip(_LEDGERS.items(), totals, strict=True))[:num_ledgers],
        compared=compared_ledgers(*totals, rejected=voting.rejected_fairness)
        if num_ledgers > 1
        else one_ledger(voting.rejected_fairness),
        curve=curves(
            [
                Curve(name=f"{name}: {epsilon_text(total)}", points=course(epsilon_Q))
                for name, total, epsilon_Q in list(zip(_LEDGERS, totals, courses, strict=True))[:num_ledgers]
            ],
            x_label="submitted queries",
            y_label=f"ε at δ = {delta_text(public.guarantee.delta)}",
            title=f"{'Three ledgers' if num_ledgers > 1 else 'The ledger'} against submitted queries",
        ),
        **queries,
        outcomes=OUTCOMES,
    )


def one_ledger(rejected: int) -> str:
    """What is said of a run whose price does not depend on votes."""
    gates = f" {counted(rejected, 'rejection')} by the fairness gate cost the same as an answer." if rejected else ""
    return f"What was released costs the same whatever the votes, and the published ε is the whole cost.{gates}"


def compared_ledgers(independent: float, dependent: float, as_in_paper: float, *, rejected: int) -> str:
    """How the three totals lie to one another, in words; as they are printed, rounded up to hundredths."""
    left_out = f"The paper’s leaves out {counted(rejected, 'rejection')} by the fairness gate"
    gates = left_out if rejected else "The gate rejected none"
    return (
        f"Of these votes the data-dependent ε is {_against(dependent, independent)} the data-independent one. The "
        f"ledger as in the paper is {_against(as_in_paper, dependent)} the data-dependent one. {gates}; whichever "
        "way it differs, it is no privacy guarantee."
    )


def _against(value: float, other: float) -> str:
    """``0.15 above``, ``0.15 below`` or ``equal to``, from the numbers as they are printed."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return "equal to" if value == other else "above" if value > other else "below"
    difference = Decimal(epsilon_text(value)) - Decimal(epsilon_text(other))
    if not difference:
        return "equal to"
    return f"{abs(difference)} {'above' if difference > 0 else 'below'}"


def _query_by_query(report: PrivateReport, voting: Voting) -> dict[str, Any]:
    """What each query cost and how far the voters agreed on it."""
    outcomes_Q = np.array(report.outcomes_Q, dtype=object)
    votes_Q = np.asarray(report.plurality_votes_Q, dtype=np.float64)
    share_Q = votes_Q / np.maximum(report.num_votes_Q, 1)
    cost_Q, worst_Q = (np.asarray(of_Q, dtype=np.float64) for of_Q in (report.rdp_Q, report.rdp_worst_Q))
    of_worst_Q = shares_of_worst(cost_Q, worst_Q)
    voted_Q = outcomes_Q != "free"
    edges = np.linspace(0, 1, 21)
    ticks = [(tick / 100, str(tick)) for tick in range(0, 101, 20)]
    varies = votes_matter(of_worst_Q, voted_Q)
    return {
        "cost_words": cost_words(cost_Q, of_worst_Q, varies=varies),
        "consensus_words": _consensus_words(share_Q[voted_Q], cost_Q[voted_Q], voting.voters),
        "voters_words": _voters_words(report.num_votes_Q, voting),
        "time_words": _time_words(report.at_Q, report.callers_Q),
        "charges": _largest(report, cost_Q, of_worst_Q) if varies else [],
        "by_group": _by_group(report, share_Q, cost_Q, voted_Q),
        "costs": histogram(
            edges.tolist(),
            _stacks(of_worst_Q, outcomes_Q, edges),
            x_label=f"cost of a query, % of its worst case (Rényi, order {report.rdp_order:g})",
            y_label="queries",
            title="Cost per query",
            ticks=ticks,
        )
        if varies
        else "",
        "consensus": histogram(
            edges.tolist(),
            _stacks(share_Q, outcomes_Q, edges),
            x_label=f"{voting.voters} that agree on the most popular label, %",
            y_label="queries",
            title=f"Consensus of the {voting.voters}",
            ticks=ticks,
        ),
    }


def _consensus_words(share_Q: FloatArray, cost_Q: FloatArray, voters: str) -> str:
    """Where the middle of the consensus lies, and what the clearer half of the votes made up of the cost."""
    if not len(share_Q):
        return "No query was voted on."
    median = float(np.median(share_Q))
    agree = f"all {voters} agree" if median == 1 else f"{percent(median, digits=0)} of the {voters} or more agree"
    middle = f"On half of the queries that were voted on, {agree}."
    clearer_Q = np.argsort(-share_Q, kind="stable")[: (len(share_Q) + 1) // 2]
    if not cost_Q.sum() or not math.isfinite(cost_Q.sum()):
        return middle
    share = percent(float(cost_Q[clearer_Q].sum() / cost_Q.sum()), digits=0)
    return f"{middle} The {count(len(clearer_Q))} with the clearest votes made up {share} of the cost."


def _voters_words(num_votes_Q: Sequence[int], voting: Voting) -> str:
    """Whether all voters voted, where all should; else how many were near enough."""
    if not num_votes_Q:
        return "Nobody was asked."
    least, most = min(num_votes_Q), max(num_votes_Q)
    if voting.voters != "teachers":
        return f"{_upper(voting.voters)} that voted on a query: {count(least)} to {count(most)}."
    if least == most == voting.num_teachers:
        return f"All {count(voting.num_teachers)} teachers voted on every query."
    fewer = sum(votes < voting.num_teachers for votes in num_votes_Q)
    return (
        f"Not all {count(voting.num_teachers)} teachers voted on {counted(fewer, 'query', 'queries')}: "
        f"{count(least)} at least."
    )


def _time_words(at_Q: Sequence[float], callers_Q: Sequence[str]) -> str:
    """When the queries were charged, and by whom."""
    known = [at_s for at_s in at_Q if at_s]
    if not known:
        return "When the queries were charged was not recorded."
    first, last = (datetime.fromtimestamp(at_s, UTC) for at_s in (min(known), max(known)))
    until = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    asked = sum(bool(caller) for caller in callers_Q)
    whose = f"{counted(asked, 'query', 'queries')} came from callers of a service" if asked else "All are the run’s own"
    return f"Charged from {first:%Y-%m-%d %H:%M:%S} to {until} (UTC). {whose}."


def _largest(report: PrivateReport, cost_Q: FloatArray, of_worst_Q: FloatArray) -> list[ChargedQuery]:
    """Those that cost most, the dearest first."""
    total = float(cost_Q.sum())
    names = [group.name for group in report.public.voting.outcomes] if report.public.voting else []
    return [
        ChargedQuery(
            number=query + 1,
            group=names[report.groups_Q[query]],
            outcome=OUTCOMES[report.outcomes_Q[query]],
            votes=f"{report.plurality_votes_Q[query]} : {report.runner_up_votes_Q[query]}",
            of_worst=float(of_worst_Q[query]),
            of_total=float(cost_Q[query]) / total,
            when=_moment(report.at_Q[query]),
        )
        for query in dearest(cost_Q)
    ]


def _moment(at_s: float) -> str:
    # Day and time may stand on two lines where the column is narrow; neither is broken itself.
    return f"{datetime.fromtimestamp(at_s, UTC):%Y\u2011%m\u2011%d %H:%M:%S}" if at_s else "not recorded"


def _by_group(
    report: PrivateReport, share_Q: FloatArray, cost_Q: FloatArray, voted_Q: npt.NDArray[np.bool_]
) -> list[GroupVotes]:
    """Median agreement and share of the cost of each group's queries."""
    voting, groups_Q, total = report.public.voting, np.asarray(report.groups_Q, dtype=np.int64), float(cost_Q.sum())
    assert voting is not None
    found = []
    for group, outcomes in enumerate(voting.outcomes):
        of_group = groups_Q == group
        voted = share_Q[of_group & voted_Q]
        found.append(
            GroupVotes(
                name=outcomes.name,
                num_queries=int(of_group.sum()),
                agreement=float(np.median(voted)) if len(voted) else math.nan,
                of_total=float(cost_Q[of_group].sum()) / total if total and math.isfinite(total) else math.nan,
            )
        )
    return found


def _stacks(values_Q: FloatArray, outcomes_Q: npt.NDArray[np.object_], edges: FloatArray) -> Mapping[str, list[int]]:
    return {outcome: np.histogram(values_Q[outcomes_Q == outcome], bins=edges)[0].tolist() for outcome in OUTCOMES}


def _upper(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}"


_MOST_NAMED = 11
_ACCOUNTING = {"pld": "privacy loss distributions", "rdp": "Rényi curves"}


@dataclass(frozen=True, kw_only=True)
class CardModel:
    """The published model: how it came about, what goes in, what comes out. ``reject_option`` None answers everything.

    ``sha256`` is that of the published file, ``num_training_labels`` how many released labels it was trained on, where
    that was recorded. ``method_title`` is what people call the method, ``made_on`` the day in ISO 8601.
    """

    method: str
    architecture: str
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    sensitive_attribute: str
    reject_option: GateRule | None
    sha256: str
    made_by: str
    num_training_labels: int | None = None
    method_title: str | None = None
    made_on: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardData:
    """The data set as its publisher describes it, and the options it was read with.

    One that was ``given_from_python`` has a name and a kind; nothing else is known of it.
    """

    name: str
    kind: str
    given_from_python: bool = False
    task: str | None = None
    publisher: str | None = None
    address: str | None = None
    licence: str | None = None
    options: Mapping[str, Any] | None = None
    split_seed: int | None = None

    @property
    def records(self) -> str:
        """What the records are."""
        kinds = {"image": "pictures", "tabular": "rows of numbers"}
        return kinds.get(self.kind, f"{self.kind} records") + " that were given from Python" * self.given_from_python


@dataclass(frozen=True, kw_only=True)
class IntendedUse:
    """In the publisher's words; None is shown as not stated."""

    intended: str | None = None
    out_of_scope: str | None = None
    contact: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardRefusals:
    """A student that may refuse: lowest and highest figures over orders of the test records, and it unrefused."""

    num_orders: int
    accuracy: tuple[float | None, float | None]
    coverage: tuple[float | None, float | None]
    unrefused: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything that a card says."""

    model: CardModel
    privacy: Guarantee
    data: CardData
    use: IntendedUse
    evaluation: Evaluation
    refusals: CardRefusals | None = None
    private_population: PrivatePopulation | None = None

    @property
    def description(self) -> str:
        """What the model does, in sentences."""
        model, (*others, last) = self.model, self.model.classes
        shown = [*others[:_MOST_NAMED], *(["…"] if len(others) > _MOST_NAMED else [])]
        classes = f"one of {count(len(others) + 1)} classes: {', '.join(shown)} or {last}"
        task = f" Task: {self.data.task}." if self.data.task else ""
        return (
            f"For {self.data.records} like those of {self.data.name} it predicts {classes}.{task} Method: "
            f"{model.method_title or model.method}. Groups: those of {model.sensitive_attribute} "
            f"({', '.join(model.groups)})."
        )

    @property
    def publishable(self) -> list[str]:
        """What may be published with the model."""
        if not self.privacy.protects:
            return ["Nothing: neither the model nor its predictions or metrics are protected."]
        bare = self.privacy.not_protected
        return [
            "The model's file, any number of its predictions at no further cost, and anything computed from them"
            + (f", if these may be public too: {bare}." if bare else "."),
            "Epsilon, delta, unit and relation as stated here, always together.",
            "The metrics of this card, if the test records' owner agrees: they are outside the guarantee.",
        ]

    @property
    def not_publishable(self) -> list[str]:
        """What must stay with the operator."""
        return [
            "The private records, models that were trained on them without noise, and their votes.",
            "Any price that was computed from votes, and any ledger: both depend on private values.",
            "Counts or statistics of the private records that were not released with noise"
            + (", but for the number that a sampling rate tells." if self.privacy.tells_size else "."),
        ]

    @property
    def protected(self) -> str:
        """Whose presence or value does not show."""
        if not self.privacy.protects:
            return "nothing"
        among = "in" if self.privacy.unit == "person" else "of"
        if self.privacy.is_attested:
            return f"{unit_words(self.privacy.unit)} behind the votes"
        return f"{unit_words(self.privacy.unit)} {among} the private training records"

    @property
    def _covered(self) -> str:
        if self.privacy.is_attested:
            return f"what the operator calls a {self.privacy.unit}, each behind one vote,"
        whose = {"person": "the persons behind the ", "sensitive attribute": "the sensitive attribute of "}
        return f"{whose.get(self.privacy.unit, 'the ')}private training records"

    @property
    def _alone(self) -> list[str]:
        if not self.privacy.protects:
            return []
        return [
            f"The privacy guarantee is for {self._covered} alone: not for public or test records, and not for people "
            "whom the model is used on."
        ]

    @property
    def limits(self) -> list[str]:
        """What the numbers do not say."""
        privacy = self.privacy
        limits = [
            *privacy.remarks,
            *(f"Degenerate: on the test records the model {words}." for words in self.evaluation.degenerate),
            *(f"On the test records the model {words}." for words in self.evaluation.underserved),
            *(f"Gaps leave out {name}: too few answered test records." for name in self.evaluation.not_measured),
            *filter(None, (small_cell_words(self.evaluation),)),
            *self._alone,
            "The gaps are those of one test set. Other people, or another share of groups, may be treated otherwise."
            if self.evaluation.is_measured
            else f"{self.evaluation.why_unknown.capitalize()}: how accurate the model is, and how it treats groups, is "
            "unknown.",
            "Demographic parity compares rates of predictions; a small gap does not mean that errors fall evenly: each "
            "notion says another thing.",
        ]
        if privacy.tells_size and TELLS_SIZE.get(privacy.unit) not in privacy.remarks:
            units = "persons" if privacy.unit == "person" else "private records"
            limits.append(f"The sampling rate tells the number of {units}, or the one declared: it is public.")
        if not privacy.tuning_accounted:
            limits.append("Choosing the settings was not charged. If private data guided the choice, ε is too low.")
        # To the front: what is not protected outweighs all other limits.
        if privacy.noise != "os_entropy":
            limits.insert(0, f"Noise: {privacy.noise}. This model is not private; ε is what fresh noise would give.")
        if privacy.not_protected is not None:
            limits.insert(0, f"Not protected: {privacy.not_protected}. The model may reveal them.")
        if self.model.reject_option is not None:
            limits.append(
                "What the model refuses depends on its earlier answers; people whom it refuses get no answer."
            )
        return limits


def card_page(card: Card) -> str:
    """The card as one HTML document."""
    return render(
        "card.html",
        card=card,
        privacy=card.privacy,
        why_not=why_not_private(card.privacy),
        verdict=verdict(card.evaluation, card.privacy),
        made=made_words(card.model.made_on, card.model.made_by.removeprefix("FairPATE ")),
        several=several_records(card.privacy),
        epsilon=published_epsilon(card.privacy),
        accounting=_ACCOUNTING.get(card.privacy.accounting, card.privacy.accounting),
        gap_names=GAP_NAMES,
        words_of={notion.reading: notion.words for notion in NOTIONS.values()},
        answered=answered_words,
        error_rate_words=_error_rate_words(card.evaluation),
        baseline=majority_words(card.evaluation),
        interval=interval_words,
        reject_option=_reject_option(card),
        population=card.private_population,
        population_words=card.private_population and population_words(card.private_population),
    )


def _error_rate_words(measured: Evaluation) -> str:
    """Whose errors, and of which class."""
    *_, last = measured.class_names
    of = f"of “{last}”" if len(measured.class_names) == 2 else "of the class where it is largest"
    return f"Of all groups together, {of}, among {answered_words(measured)}."


def _reject_option(card: Card) -> str:
    rule = card.model.reject_option
    if rule is None:
        return "none: every record is answered"
    words = f"margin γ = {rule.max_disparity:g} after {rule.min_count} answers"
    if card.refusals is None:
        return words
    low, high = card.refusals.coverage
    spread = "" if low is None or high is None else f"; coverage {percent(low)} to {percent(high)}"
    return f"{words}{spread} over {count(card.refusals.num_orders)} orders of the test records"
