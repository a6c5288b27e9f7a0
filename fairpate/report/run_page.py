"""The pages of one run: report, private report, card and audit, each one HTML file without scripts.

A page is a function of plain records (:mod:`fairpate.report.records`) and opens with the verdict. The report may be
published: it has the guarantee, metrics on test records and what was released. The card describes the published model.
The private report depends on votes, query by query, and must not be published. It compares the data-independent epsilon
with the data-dependent one, and with epsilon as FairPATE's authors published theirs, for which a label that the
fairness gate rejects costs nothing. An audit's bounds follow from counts and a t statistic alone, so that anyone with
its record can check them.

Charts are Vega-Lite specifications, drawn by vl-convert as inline SVG. Their colours are variables of ``report.css``,
so that a reader's dark theme applies to them too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from fairpate import pages
from fairpate.config import merge
from fairpate.fairness.rates import NOTIONS
from fairpate.pages import count, counted, delta_text, epsilon_text, percent, render
from fairpate.privacy.audit_bounds import (
    LESS_NOISE,
    Guesses,
    IdealAttack,
    NoiseSeen,
    NoiseTest,
    Separation,
    epsilon_lower_bound,
    gaussian_epsilon,
)
from fairpate.report import records
from fairpate.report.figures import LOOKS, SHAPES, chart_config
from fairpate.report.metrics import Evaluation
from fairpate.report.records import AnsweredQueries, PrivateReport, PublicReport, RunStatement
from fairpate.types import REMARKS, FloatArray, GateRule, restored

Values = Mapping[str, Any]
_STROKES, _DASHES = ("var(--answered)", "var(--fairness)", "var(--muted)"), ([1, 0], [7, 4], [2, 4])
_CHART_CONFIG = merge(chart_config(12), LOOKS["page"])
_NOTHING = Markup('<p class="note">{}: nothing to draw, no finite value.</p>')
_HATCH = (
    '<defs><pattern id="{}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="var(--fairness)"/><rect width="1.5" height="6" fill="var(--paper)"/>'
    "</pattern></defs>"
)


def curves(lines: Mapping[str, records.Course], *, delta: float, title: str) -> Markup:
    """Return an SVG drawing of how up to three epsilons at ``delta`` grow with the submitted queries; ``lines`` maps
    the name of each to its course.

    The name of a single line is at its end; names of several lines are in a legend below the chart.
    """
    points = [point for line in lines.values() for point in line]
    if not points or not all(math.isfinite(y) for _, y in points):
        return _NOTHING.format(title)
    place = {
        field: {
            "field": field,
            "type": "quantitative",
            "title": label,
            # Never of length 0, for which there is no scale.
            "scale": {"domain": [0, max(*values, 1e-12)], "nice": 4},
            "axis": {"tickCount": 4},
        }
        for field, label, values in zip("xy", ("submitted queries", None), zip(*points, strict=True), strict=True)
    }
    rows = [{"line": name, "x": x, "y": y} for name, line in lines.items() for x, y in line]
    look: dict[str, Any] = {"field": "line", "type": "nominal", "legend": None}
    before, after = list[dict[str, Any]](), list[dict[str, Any]]()
    if len(lines) > 1:
        look["legend"] = {"title": None, "columns": 1, "symbolType": "stroke", "symbolSize": 900, "rowPadding": 0}
    else:
        label = {"type": "text", "text": next(iter(lines)), "align": "right", "dx": -9, "dy": -9, "fontSize": 12}
        # The area lies below the line.
        before.append({"mark": {"type": "area", "fill": "var(--wash)"}})
        after.append({"mark": {**label, "fill": "var(--ink)"}, "data": {"values": rows[-1:]}})
    line = {
        "mark": {"type": "line", "strokeWidth": 2.2, "clip": False},
        "encoding": {
            channel: {**look, "scale": {"domain": list(lines), "range": values}}
            for channel, values in (("stroke", _STROKES), ("strokeDash", _DASHES))
        },
    }
    return _drawn(rows, place, [*before, line, *after], y_label=f"ε at δ = {delta_text(delta)}", title=title)


def histogram(shares: Mapping[str, FloatArray], *, x_label: str, title: str) -> Markup:
    """Return an SVG drawing of a stacked histogram of queries by a share in per cent.

    ``shares`` maps the colour of each part of the bars (a variable of the style sheet) to the shares of its queries.
    """
    edges = np.linspace(0, 100, 21).tolist()
    stacks = {name: np.histogram(100 * share_Q, bins=edges)[0].tolist() for name, share_Q in shares.items()}
    rows = [
        {"stack": name, "order": order, "left": left, "right": right, "number": number}
        for order, (name, counts) in enumerate(stacks.items())
        for (left, right), number in zip(pairwise(edges), counts, strict=True)
        if number  # an empty bar would be drawn as a line, by its outline
    ]
    if not rows:
        return _NOTHING.format(title)
    largest = max(map(sum, zip(*stacks.values(), strict=True)))
    # Whole steps, because queries are counted.
    step = next(
        step for power in range(20) for step in (10**power, 2 * 10**power, 5 * 10**power) if 4 * step >= largest
    )
    # Refusals by the gate are hatched, because not every reader can tell colours apart. The id is made from the title:
    # the drawings of a page share one space of ids.
    hatch = re.sub("[^a-z]+", "-", title.lower())
    fills = [f"url(#{hatch})" if name == "fairness" else f"var(--{name})" for name in stacks]
    place = {
        "x": {
            "field": "left",
            "bin": {"binned": True},
            "title": x_label,
            "scale": {"domain": [0, 100], "nice": False},
            "axis": {"values": edges[::4], "labelFlush": False},
        },
        "x2": {"field": "right"},
        "y": {
            "field": "number",
            "type": "quantitative",
            "title": None,
            "scale": {"domain": [0, step * -(-largest // step)], "nice": False},
            "axis": {"values": list(range(0, largest + step, step)), "format": ",d"},
        },
        "fill": {"field": "stack", "legend": None, "scale": {"domain": list(stacks), "range": fills}},
        "order": {"field": "order"},
    }
    bars = {"mark": {"type": "bar", "binSpacing": 0, "stroke": "var(--paper)", "strokeWidth": 1}}
    return _drawn(rows, place, [bars], y_label="queries", title=title, definitions=_HATCH.format(hatch))


def _drawn(
    rows: Sequence[Values], place: Values, layers: Sequence[Values], *, y_label: str, title: str, definitions: str = ""
) -> Markup:
    import vl_convert

    specification = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": 370,
        "height": 188,
        "title": y_label,
        "data": {"values": rows},
        "encoding": place,
        "layer": layers,
        "config": _CHART_CONFIG,
    }
    drawing = vl_convert.vegalite_to_svg(specification)
    # Without width and height the drawing takes the width of its place on the page.
    frame, body = re.match(r'<svg [^>]*(viewBox="[^"]*")>(.*)</svg>$', drawing, re.DOTALL).groups()  # type: ignore[union-attr]
    # The SVG's own label names the drawing as a whole, so that a screen reader does not read every mark.
    body = re.sub(r' (?:role|aria-[a-z]+)="[^"]*"', "", body)
    name = escape(title)
    return Markup(f'<svg {frame} role="img" aria-label="{name}"><title>{name}</title>{definitions}{body}</svg>')  # noqa: S704 - vl-convert escapes its text


GAP_NAMES = {notion.reading: notion.title for notion in NOTIONS.values()} | records.WORDS["other_gaps"]


def public_report(report: PublicReport) -> str:
    """Return the public report of a run as one HTML document; it has sections about votes only if teachers voted."""
    assert not report.claims.for_operator and report.claims.without_privacy is None, "claims of the operator alone"
    guarantee, voting = report.claims.guarantee, report.voting
    budget_curve: Markup | str = ""
    released_CG: list[list[float]] = []
    if voting:
        budget_curve = curves(
            {f"ε = {epsilon_text(guarantee.epsilon)}": voting.epsilon_course},
            delta=guarantee.delta,
            title="Data-independent privacy budget spent against submitted queries",
        )
        released_CG = [
            # Undefined, not 0, for a group without an answer.
            [row[k] / sum(row) if sum(row) else math.nan for row in voting.answered_GC]
            for k in range(len(report.claims.measured.class_names))
        ]
    return render(
        "report.html",
        **_opening(report),
        **treated(report.evaluations, report.model),
        gate=_gate,
        budget_curve=budget_curve,
        released_CG=released_CG,
        outcomes=records.OUTCOMES,
        stopped_by_votes=REMARKS["stopped_by_votes"],
        population=report.private_population,
    )


def _opening(report: PublicReport) -> dict[str, Any]:
    """Return the values for the template ``run.html``, the first part of both the public and the private report."""
    voting, trained, guarantee = report.voting, report.num_training_labels, report.claims.guarantee
    # The noise on votes is exact, that of training is in floating point.
    exact = "exact, " if voting and guarantee.noise == "os_entropy" else ""
    labels = ""
    if voting:
        if trained is None:
            labels = "an unrecorded number of released labels"
        elif trained < voting.answered:
            others = f"the other {count(voting.answered - trained)} answer queries from outside the run"
            labels = f"{count(trained)} of these labels: {others}"
        else:
            labels = "these labels" if trained == voting.answered else counted(trained, "released label")
    return {
        "report": report,
        "guarantee": guarantee,
        "voting": voting,
        "measured": report.claims.measured,
        "noise": f"{exact}{guarantee.words['noise']}",
        "training_labels": labels,
    }


def with_first_screen(html: str, found: RunStatement) -> str:
    """Return the public report ``html`` with the parts of its first screen that may change after the run: whether the
    model may be published, and the tiles with the numbers."""
    decision, tiles = render("first_screen.html", found=found).split("<!-- -->")
    for pattern, part in ((r'<div class="decision\b.*?</div>', decision), (r'<dl class="tiles">.*?</dl>', tiles)):
        html = re.sub(pattern, lambda _, part=part: part.strip(), html, count=1, flags=re.DOTALL)  # type: ignore[misc]
    return html


def answered_words(measured: Evaluation) -> str:
    """Return words for the records over which rates are computed, such as "all test records"."""
    which = "all" if measured.num_answered == measured.num_records else "answered"
    return f"{which} test records{' of groups that are large enough' if measured.not_measured else ''}"


def treated(evaluations: Mapping[str, Evaluation], model: str) -> dict[str, Any]:
    """Return the template values with which pages show how a model treats groups: the marks of groups, the names of
    fairness gaps and the end of their axis, functions that describe an evaluation in words, and for each of
    ``evaluations`` a sentence on its predictions.

    ``model``: the word that the sentences use for the model.
    """
    gaps = [gap for found in evaluations.values() for gap in found.gaps_of("gap").values()]
    predictions = {}
    for name, found in evaluations.items():
        predicted = sum(any(rates[k] > 0 for rates in found.rates_GC) for k in range(len(found.class_names)))
        words = f"{count(predicted)} of {count(len(found.class_names))} classes are predicted for some record."
        measured = zip(found.groups, found.rates_GC, strict=True)
        if any(math.isnan(rate) for group, rates in measured if group.num_answered for rate in rates):
            words = "Which classes are predicted is not shown: some class is predicted for too few of a group."
        # Before the number of classes, as they explain why it is small.
        cautions = (*found.degenerate, *found.underserved)
        words = f"The {model} {'; it '.join(cautions)}. {words}" if cautions else words
        predictions[name] = words if found.num_answered else "No record is answered."
    return {
        "shapes": list(SHAPES.values()),
        "gap_names": GAP_NAMES,
        "gap_end": pages.scale_end([end for gap in gaps for end in (gap.value, gap.high)]),
        "answered": answered_words,
        "baseline": records.majority_words,
        "small_cells": records.small_cell_words,
        "left_out": records.left_out_words,
        "prediction_words": predictions,
    }


def _gate(rule: GateRule) -> str:
    start, gap = records.WORDS["scopes"][rule.cold_start], records.WORDS["scopes"][rule.gap]
    margin = "off" if math.isinf(rule.max_disparity) else f"{rule.max_disparity:g}"
    return f"γ = {margin} {gap}, after {rule.min_count} answers {start}"


def operator_report(report: PublicReport) -> str:
    """Return the operator's report of a run without queries as one HTML document: the first screen of the public one,
    with the operator's own claims. It depends on private records: never publish it."""
    return render("operator.html", **_opening(report))


def private_report(report: PrivateReport) -> str:
    """Return the private report as one HTML document. It depends on private votes: never publish it."""
    guarantee, voting = report.operators.claims.guarantee, report.operators.voting
    assert voting is not None
    courses = (voting.epsilon_course, report.epsilon_data_dependent_course, report.epsilon_as_in_paper_course)
    # The stated total may exceed the end of its course: it was fixed before the first query.
    totals = [guarantee.epsilon, *(course[-1][1] if course else 0.0 for course in courses[1:])]
    queries = _query_by_query(report, voting)
    # If no cost depends on votes there is one ledger: the paper's rule belongs to another mechanism.
    are_one = all(courses[0] == other for other in courses[1:]) and not queries["costs"]
    ledgers = list(zip(records.WORDS["ledgers"].items(), totals, courses, strict=True))[: 1 if are_one else None]

    # The totals are compared as they are printed, rounded up to hundredths.
    def against(value: float, other: float) -> str:
        if not (math.isfinite(value) and math.isfinite(other)):
            return "equal to" if value == other else "above" if value > other else "below"
        difference = Decimal(epsilon_text(value)) - Decimal(epsilon_text(other))
        return f"{abs(difference)} {'above' if difference > 0 else 'below'}" if difference else "equal to"

    rejected, (independent, dependent, as_in_paper) = voting.rejected_fairness, totals
    rejections = f"{counted(rejected, 'rejection')} by the fairness gate"
    if are_one:
        gates = f" {rejections} cost the same as an answer." if rejected else ""
        words = f"What was released costs the same whatever the votes, and the published ε is the whole cost.{gates}"
    else:
        left_out = f"The paper’s leaves out {rejections}" if rejected else "The gate rejected none"
        words = (
            f"Of these votes the data-dependent ε is {against(dependent, independent)} the data-independent one. The "
            f"ledger as in the paper is {against(as_in_paper, dependent)} the data-dependent one. {left_out}; "
            "whichever way it differs, it is no privacy guarantee."
        )
    return render(
        "operator.html",
        **_opening(report.operators),
        ledgers=ledgers,
        compared=words,
        curve=curves(
            {f"{name}: {epsilon_text(total)}": course for (name, _), total, course in ledgers},
            delta=guarantee.delta,
            title=f"{'The ledger' if are_one else 'Three ledgers'} against submitted queries",
        ),
        **queries,
        outcomes=records.OUTCOMES,
    )


def _query_by_query(report: PrivateReport, voting: AnsweredQueries) -> dict[str, Any]:
    """Return the template values for the part of the private report that shows single queries: the data-dependent
    privacy cost of each query as a share of its worst case, and how many voters agreed, as charts and words."""
    outcomes_Q, groups_Q = np.array(report.outcomes_Q, dtype=object), np.asarray(report.groups_Q, dtype=np.int64)
    ranked_Q, votes_Q = [sorted(votes, reverse=True) for votes in report.votes_QC], list(map(sum, report.votes_QC))
    # At least 1: a query without a vote has a share of 0.
    share_Q = np.array([votes[0] for votes in ranked_Q], dtype=np.float64) / np.maximum(votes_Q, 1)
    cost_Q, worst_Q = (np.asarray(of_Q, dtype=np.float64) for of_Q in (report.rdp_Q, report.rdp_worst_Q))
    voted_Q, names = outcomes_Q != "free", report.operators.claims.measured.group_names
    compared, total = pages.compared_costs(cost_Q, worst_Q, voted_Q), float(cost_Q.sum())

    consensus = "No query was voted on."
    if voted_Q.any():
        voted_share_Q, voted_cost_Q = share_Q[voted_Q], cost_Q[voted_Q]
        median = float(np.median(voted_share_Q))
        all_agree, some = f"all {voting.voters} agree", f"of the {voting.voters} or more agree"
        agree = all_agree if median == 1 else f"{percent(median, digits=0)} {some}"
        consensus = f"On half of the queries that were voted on, {agree}."
        # Stable, so that a page that is drawn again is the same.
        clearer_Q = np.argsort(-voted_share_Q, kind="stable")[: (len(voted_share_Q) + 1) // 2]
        # Infinite without noise, 0 if no query has a cost: then there are no shares.
        if 0 < voted_cost_Q.sum() < math.inf:
            share = percent(float(voted_cost_Q[clearer_Q].sum() / voted_cost_Q.sum()), digits=0)
            consensus += f" The {count(len(clearer_Q))} with the clearest votes made up {share} of the cost."

    def by_outcome(share_Q: FloatArray) -> dict[str, FloatArray]:
        return {each: share_Q[outcomes_Q == each] for each in records.OUTCOMES}

    by_group = []
    for group, name in enumerate(names):
        of_group_Q = groups_Q == group
        agreement_Q = share_Q[of_group_Q & voted_Q]
        # Without noise the costs are infinite and have no shares.
        of_total = float(cost_Q[of_group_Q].sum()) / total if 0 < total < math.inf else math.nan
        by_group.append(
            (
                name,
                count(int(of_group_Q.sum())),
                percent(float(np.median(agreement_Q)) if len(agreement_Q) else math.nan, digits=0),
                percent(of_total, digits=0),
            )
        )
    charges = [
        (
            f"№ {count(query + 1)}",
            names[report.groups_Q[query]],
            records.OUTCOMES[report.outcomes_Q[query]],
            f"{ranked_Q[query][0]} : {ranked_Q[query][1]}",
            percent(float(compared.of_worst_Q[query]), digits=0),
            percent(float(cost_Q[query]) / total, digits=2),
            # Day and time may stand on two lines where the column is narrow; neither is broken itself.
            f"{datetime.fromtimestamp(at_s, UTC):%Y\u2011%m\u2011%d %H:%M:%S}"
            if (at_s := report.at_Q[query])
            else "not recorded",
        )
        for query in compared.dearest
    ]
    known = [at_s for at_s in report.at_Q if at_s]  # a time of 0 means that none was recorded
    if not votes_Q:
        voters = "Nobody was asked."
    elif voting.voters != "teachers":
        least, most = count(min(votes_Q)), count(max(votes_Q))
        voters = f"{records.upper(voting.voters)} that voted on a query: {least} to {most}."
    elif fewer := sum(votes < voting.num_teachers for votes in votes_Q):
        voters = (
            f"Not all {count(voting.num_teachers)} teachers voted on {counted(fewer, 'query', 'queries')}: "
            f"{count(min(votes_Q))} at least."
        )
    else:
        voters = f"All {count(voting.num_teachers)} teachers voted on every query."
    time = "When the queries were charged was not recorded."
    if known:
        first, last = (datetime.fromtimestamp(at_s, UTC) for at_s in (min(known), max(known)))
        until = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
        asked = counted(sum(map(bool, report.callers_Q)), "query", "queries")
        whose = f"{asked} came from callers of a service" if any(report.callers_Q) else "All are the run’s own"
        time = f"Charged from {first:%Y-%m-%d %H:%M:%S} to {until} (UTC). {whose}."
    return {
        "cost_words": compared.words,
        "consensus_words": consensus,
        "voter_rows": [("Voters", voters), ("Time", time)],
        "charges": charges,
        "by_group": by_group,
        "costs": compared.varies
        and histogram(
            by_outcome(compared.of_worst_Q),
            x_label=f"cost of a query, % of its worst case (Rényi, order {report.rdp_order:g})",
            title="Cost per query",
        ),
        "consensus": histogram(
            by_outcome(share_Q),
            x_label=f"{voting.voters} that agree on the most popular label, %",
            title=f"Consensus of the {voting.voters}",
        ),
    }


AUDIT_FORMAT = "fairpate.audit/2"
_SERIES = ("planned", "found", "control")
SURE = 0.99
"""The confidence at which a claim counts as refuted, over all attacks and checks of an audit together. Much more cannot
be reached, because delta allows for a few right guesses."""
POWER = 0.9
"""The least probability with which an audit with power finds a fault."""
_ROUNDING = 1e-3  # of a norm in floats
_BOUNDS = ("epsilon_assumption_free", "epsilon_if_gaussian")
# A bound is the result of a search; verdict, page and JSON need the same ones.
_bound = lru_cache(epsilon_lower_bound)


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """The result of a membership-inference attack on canaries (records added to test privacy).

    ``guesses``: how often the attacker was right about which canaries were included. ``separation``: how far the scores
    of included canaries are above those of the others; None if scores are not Gaussian.
    """

    guesses: Guesses
    separation: Separation | None = None

    @property
    def num_bounds(self) -> int:
        """The number of lower bounds that :meth:`bounds` returns."""
        return 1 + (self.separation is not None)

    def bounds(self, delta: float, confidence: float = 0.95) -> tuple[float, ...]:
        """Return lower bounds on epsilon that the attack proves. The first assumes nothing. Attacks that give each
        record a score have a second, which holds if the scores are Gaussian."""
        free = _bound(self.guesses, delta=delta, confidence=confidence)
        if self.separation is None:
            return (free,)
        return free, gaussian_epsilon(self.separation.mu_lower_bound(confidence), delta)

    def words(self, delta: float) -> str:
        """Return in words the lower bounds on epsilon that the attack proves."""
        free, *gaussian = (f"{bound:.2f}" for bound in self.bounds(delta))
        return f"{free} without assumptions" + (f", {gaussian[0]} if scores are Gaussian" if gaussian else "")


@dataclass(frozen=True, kw_only=True)
class SingleRelease:
    """What an audit found of one noisy release of a method by itself, such as one round of residuals.

    - ``claim``: the strongest attack on what the statement claims of this release alone.
    - ``attack``: the audit's attack, as it would be on correct code; None if the release is not attacked by itself.
    - ``found``, ``control``: the results of this attack, and of the attack on releases with half of this noise.
    - ``control_claim``: the strongest attack on what is claimed of the control.
    - ``noise``: how much noise was seen, in several kinds of draws; ``tests``: how it was drawn.
    - ``reach``: the most that one unit added without noise, over its bound; None if this was not seen.
    """

    name: str
    claim: IdealAttack
    attack: IdealAttack | None = None
    found: AttackResult | None = None
    control: AttackResult | None = None
    control_claim: IdealAttack | None = None
    noise: tuple[NoiseSeen, ...] = ()
    tests: tuple[NoiseTest, ...] = ()
    reach: float | None = None

    def sees_shape(self, confidence: float) -> bool:
        """Return whether the audit would find noise of another shape, such as Laplace instead of Gaussian noise. Where
        only answers are released, they do not show it."""
        shows_numbers = any(seen.what == "noise" for seen in self.noise)
        return shows_numbers and any(test.sees_shape(confidence) for test in self.tests)

    @property
    def num_tests(self) -> int:
        """The number of tests of this release by itself, among which an audit divides its level."""
        bounds = 0 if self.found is None else self.found.num_bounds
        has_plan = self.control is not None and self.control.separation is not None
        return bounds + len(self.noise) + len(self.tests) + has_plan

    @property
    def claim_words(self) -> str:
        """The epsilon that is claimed of this release alone, in words."""
        return f"{self.claim.epsilon:.2f}" if self.found is not None else "only with the others"

    @property
    def noise_seen_words(self) -> str:
        """The noise that was seen, as a share of what is stated, in words."""
        kinds = [each for each in self.noise if each.num and each.what != "samples"]
        if not kinds:
            return "not seen"
        least = min(kinds, key=lambda each: (each.value - each.expected) / max(each.stddev, 1e-300))
        if least.what == "noise":
            return f"{percent(math.sqrt(least.value))} of what is stated"
        return f"{percent(least.value)} of answers changed, {percent(least.expected)} expected"

    @property
    def reach_words(self) -> str:
        """The most that a canary added without noise, in words."""
        return "not seen" if self.reach is None else f"{percent(self.reach)} of its bound"

    def findings(self, delta: float, confidence: float) -> Iterator[str]:
        """Yield a sentence for every fault that was found, each at this confidence."""
        if self.found is not None:
            proved = max(self.found.bounds(delta, confidence))
            if proved > self.claim.epsilon:
                yield (
                    f"{self.name}: an attack on this release alone proves ε ≥ {proved:.2f}, and "
                    f"{epsilon_text(self.claim.epsilon)} is claimed for it."
                )
        for seen in self.noise:
            if seen.is_off(confidence):
                value, expected = (percent(each, digits=2) for each in (seen.value, seen.expected))
                what = {
                    "noise": f"its noise is {percent(math.sqrt(seen.value))} of what is stated.",
                    "answers": f"{value} of its answers differ from the exact ones, where the stated noise changes "
                    f"{expected}.",
                    "samples": f"its samples leave a unit out of {value} of the steps, and {expected} are stated.",
                }
                yield f"{self.name}: {what[seen.what]}"
        for test in self.tests:
            if test.is_off(confidence):
                value, share = f"{test.value:.2f}", percent(test.value)
                how = {
                    "place": f"at one place its noise is {share} of what is stated.",
                    "shift": f"at one place the mean of its noise is {value} standard deviations from 0, as if it were "
                    "drawn once for all releases, or known.",
                    "shape": f"only {share} of the numbers that should be have noise this far from 0.",
                    "distribution": f"its noise is not distributed as stated: a probability is {share} apart.",
                    "pair": f"two of its numbers, or one of it and one of another release, have the same noise: their "
                    f"signs go together in {share} of draws.",
                    "draws": f"two draws, or all draws that are equally far apart, have the same noise: the signs of "
                    f"{share} of their numbers go together.",
                    "distance": f"its numbers do not have noise of their own: the signs of {share} of those at one "
                    "distance, or of those of two releases, go together.",
                    "grid": f"all of its noise is divisible by {test.value:.0f}, so that the rest of a released number "
                    "is exact.",
                    "samples": f"its samples are no Poisson samples: how often a unit is sampled varies {value} times "
                    "as much as stated.",
                    "weights": f"the weights move by something else than what is released: {value} standard deviations "
                    "of the noise apart.",
                }
                yield f"{self.name}: {how[test.what]}"
        if self.reach is not None and self.reach > 1 + _ROUNDING:
            yield f"{self.name}: one unit adds {self.reach:.2f} times what its bound allows."
        limit = None if self.control_claim is None else self.control_claim.mu
        if self.control is not None and self.control.separation is not None and limit is not None:
            seen_mu = self.control.separation.mu_lower_bound(confidence)
            if seen_mu > limit:
                yield (
                    f"{self.name}: the control is far from its plan, a shift of at least {seen_mu:.2f} standard "
                    f"deviations where {limit:.2f} are possible."
                )

    def powers(self, delta: float, confidence: float) -> tuple[float, float]:
        """Return the probabilities that the audit finds two thirds of the noise of this release, and a unit that counts
        twice. They are computed from claims and numbers of draws; results can only lower them."""
        less = max((seen.power(confidence) for seen in self.noise if seen.what != "samples"), default=0.0)
        twice = float(self.reach is not None and 2 * self.reach > 1)
        # Where only answers are seen, votes that count twice are as half the noise.
        twice = max([twice, *(seen.power(confidence) for seen in self.noise if seen.what == "answers")])
        # A unit may also count twice by being sampled twice as often.
        twice = min([twice, *(seen.power(confidence) for seen in self.noise if seen.what == "samples")])
        attack, found = self.attack, self.found
        if attack is None or found is None:
            return less, twice
        mu = attack.mu
        if mu is not None and found.separation is not None:
            mu = min(mu, found.separation.mu_upper_limit(confidence))
            if self.control is not None and self.control.separation is not None:
                # An attack that does not see the control, which shifts scores twice as far, sees no fault either.
                mu = min(mu, self.control.separation.mu_upper_limit(confidence) / 2)
        # Without a test of the shift, guesses alone decide.
        is_gaussian, count = found.separation is not None, found.guesses.num_canaries
        options: dict[str, Any] = {"num_canaries": count, "delta": delta, "confidence": confidence}

        def power(factor: float) -> float:
            stronger = IdealAttack(epsilon=factor * attack.epsilon, mu=None if mu is None else factor * mu)
            return stronger.power(self.claim, is_gaussian=is_gaussian, **options)

        return max(less, power(1 / LESS_NOISE)), max(twice, power(2.0))


@dataclass(frozen=True, kw_only=True)
class AuditedRelease:
    """The results of an audit's attacks on one step of the run, such as noisy sums: on all its releases together, and
    on each of them by itself (``singles``).

    ``part``: the records that the release reads, ``private`` or ``test``. ``planned``: the median result that an ideal
    attack would have. ``found``: the result of this attack. ``control``: the attack's result on releases that have only
    the share ``control_noise`` of the noise, about half. ``canaries_each``: the number of canaries per release.
    ``unseen``: faults that this attack cannot see, in words.
    """

    part: str
    release: str
    attack: str
    events: tuple[Mapping[str, Any], ...]
    num_releases: int
    canaries_each: int
    control_noise: float
    planned: AttackResult
    found: AttackResult
    control: AttackResult
    singles: tuple[SingleRelease, ...]
    unseen: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The kind of release in words, as a title."""
        return f"{records.upper(self.release)}{' of test records' if self.part == 'test' else ''}"

    @property
    def noise_words(self) -> str:
        """Words for the noise of the control, which is a release with too little noise that should fail the audit, such
        as "half the noise"."""
        return (
            "half the noise" if abs(self.control_noise - 0.5) < 0.01 else f"{percent(self.control_noise)} of the noise"
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The results of an audit, which attacks releases to test the claimed ``epsilon`` at ``delta`` for ``unit`` and
    ``relation``.

    ``settings``: the digest of the settings, or of the plan over sites, that was audited. ``records``: whether the
    records other than canaries are ``made`` up or are the ``private`` ones; an audit with private ones must not be
    published. ``sites``: simulated sites of a plan added up canaries alone. ``not_attacked``: what the privacy
    statement covers but the audit did not attack.
    """

    method: str
    unit: str
    relation: str
    delta: float
    epsilon: float
    settings: str
    records: str
    not_attacked: tuple[str, ...]
    releases: tuple[AuditedRelease, ...]

    @property
    def singles(self) -> list[SingleRelease]:
        """Every release by itself, of all steps."""
        return [single for step in self.releases for single in step.singles]

    def each(self, confidence: float) -> float:
        """Return the confidence of each test at which all tests of the audit together have ``confidence``."""
        tests = sum(each.num_tests for each in self.singles) + sum(step.found.num_bounds for step in self.releases)
        return 1 - (1 - confidence) / max(1, tests)

    def proved(self, confidence: float = 0.95) -> float:
        """Return the largest lower bound on epsilon that any attack on the run's releases proves at this confidence,
        which holds for all attacks together."""
        each, results = self.each(confidence), [step.found for step in self.releases]
        results += [single.found for single in self.singles if single.found is not None]
        return max(max(result.bounds(self.delta, each)) for result in results)

    @property
    def findings(self) -> tuple[str, ...]:
        """A sentence for every fault that was found at a confidence of 99 % over all tests together."""
        each = self.each(SURE)
        found: list[str] = []
        for step in self.releases:
            # At 95 %, a nearly ideal attack would exceed the claim of one in twenty correct releases.
            proved = max(step.found.bounds(self.delta, each))
            if proved > self.epsilon:
                found.append(f"an attack proves ε ≥ {proved:.2f}, and {epsilon_text(self.epsilon)} is claimed.")
            for single in step.singles:
                found += single.findings(self.delta, each)
        return tuple(found)

    @property
    def refuted(self) -> bool:
        """True if a fault was found at a confidence of 99 %: a lower bound above a claim, less noise than is stated, a
        unit that adds more than its bound, or a control far from its plan."""
        return bool(self.findings)

    def powers_of(self, single: SingleRelease) -> tuple[float, float]:
        """Return the probabilities that this audit finds two thirds of the noise of one release, and a unit that counts
        twice in it."""
        return single.powers(self.delta, self.each(SURE))

    def powers(self) -> list[tuple[str, float, float]]:
        """Return for each release by itself its name and the probabilities that the audit finds two thirds of its
        noise, and a unit that counts twice."""
        return [(single.name, *self.powers_of(single)) for single in self.singles]

    @property
    def unseen(self) -> tuple[str, ...]:
        """The faults that this audit could not have found, in words: in the shape of noise, and those that the attacks
        of its releases cannot see."""
        each = self.each(SURE)
        shapes = [single.name for single in self.singles if not single.sees_shape(each)]
        of_shape = [f"noise of another shape than stated, of the same size ({', '.join(shapes)})"] if shapes else []
        return (*of_shape, *(words for step in self.releases for words in step.unseen))

    @property
    def has_power(self) -> bool:
        """True if the audit attacked every release, and would find in each by itself, with a probability of 90 % or
        more, that a third of the noise is missing, and that a unit counts twice."""
        return not self.not_attacked and all(min(less, twice) >= POWER for _, less, twice in self.powers())

    @property
    def headline(self) -> str:
        """The result of the audit in a sentence."""
        claimed, findings = epsilon_text(self.epsilon), self.findings
        if findings:
            more = f" {counted(len(findings), 'fault')} in all." if len(findings) > 1 else ""
            return f"The claim is refuted: {findings[0]}{more}"
        # Of each attack alone: with all together at 95 %, fewer would be asked to repeat.
        proved = self.proved()
        if proved > self.epsilon:
            return (
                f"Not decided: ε ≥ {proved:.2f} at 95 % confidence is more than the {claimed} that is claimed, and at "
                "99 % it is not; repeat the audit with more canaries."
            )
        return f"No attack exceeds the claim: ε ≥ {proved:.2f} is proved, and {claimed} is claimed."

    @property
    def power_words(self) -> str:
        """A sentence on whether the audit would have found missing noise and a unit that counts twice; it is computed
        from the claims and the number of draws, not from what the code under test did."""
        without = [each for each in self.powers() if min(each[1:]) < POWER]
        if self.refuted:
            return "What the audit would have found does not matter here: it found a fault."
        unseen = f" No power against {'; nor against '.join(self.unseen)}." if self.unseen else ""
        if not without:
            said = (
                "Of each release by itself it would have found two thirds of the noise, and a unit that counts twice, "
                f"in at least {percent(POWER, digits=0)} of audits."
            )
            missing = ", nor over ".join(self.not_attacked)
            return (f"No power over {missing}: it did not attack this. {said}" if missing else said) + unseen
        listed = "; ".join(
            f"{name}: "
            + " and ".join(
                f"{what} is found in {percent(chance, digits=0)} of audits"
                for what, chance in (("two thirds of the noise", less), ("a unit that counts twice", twice))
                if chance < POWER
            )
            for name, less, twice in without
        )
        return (
            f"No power: this audit could not have found every such fault ({listed}). Give more canaries; against some "
            f"methods no strong attack is known.{unseen}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, together with the bounds, the verdict and the sentence, which are computed
        from the fields."""
        plain = asdict(self)
        for values, each in zip(plain["releases"], self.releases, strict=True):
            for name in _SERIES:
                values[name] |= dict(zip(_BOUNDS, getattr(each, name).bounds(self.delta), strict=False))
        verdict = {"refuted": self.refuted, "has_power": self.has_power, "headline": self.headline}
        return {"format": AUDIT_FORMAT, **plain, **verdict, "findings": list(self.findings)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Audit:
        """Return the audit that :meth:`to_json` wrote; ValueError, TypeError or KeyError for anything else."""
        if values["format"] != AUDIT_FORMAT:
            raise ValueError(
                f"audit.json: expected format {AUDIT_FORMAT}, got {values['format']!r}; run the audit again."
            )
        # Fields alone: bounds and verdict follow from them and are computed again, so that a file cannot state others.
        plain = {name: values[name] for name in cls.__dataclass_fields__}
        plain["releases"] = [
            release
            | {
                series: {name: release[series][name] for name in AttackResult.__dataclass_fields__}
                for series in _SERIES
            }
            for release in plain["releases"]
        ]
        return restored(cls, plain)


def audit_page(audit: Audit) -> str:
    """Return the page that reports an audit as one HTML document."""
    return render("audit.html", audit=audit)
