"""The sections of the public page, and the opening that both pages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from fairpate.evaluation import charts
from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.page import (
    card,
    cards,
    column,
    count,
    counted,
    course,
    decimal,
    delta_text,
    epsilon_text,
    percent,
    section,
    table,
)
from fairpate.evaluation.records import OUTCOMES, GroupOutcomes, PublicReport
from fairpate.evaluation.reject_option import RejectOptionSpread, Spread
from fairpate.types import STOPPED_BY_VOTES, GateRule, PrivacyStatement

GAP_NAMES = {
    "dp_one_vs_rest": "Demographic parity, one group against the rest",
    "dp_pairwise": "Demographic parity, between two groups",
    "dp_to_overall": "Demographic parity, group to overall",
    "eo_full": "Equalized odds, one group against the rest",
    "eo_lowy": "Equalized odds, each label's TPR and FPR",
    "accuracy_parity": "Accuracy, between two groups",
}


def seed_banner(statement: PrivacyStatement) -> str:
    """A warning when the noise was seeded, else nothing."""
    if statement.noise == "os_entropy":
        return ""
    return (
        '<div class="banner warn" role="note"><b>Reproducible run: not private.</b>The noise came from a seed. Anyone '
        "who knows the seed can remove it; every ε below is what the same run would have with fresh noise.</div>"
    )


def degenerate_banner(measured: Evaluation) -> str:
    """A warning that names what makes the gaps worth nothing, else nothing."""
    if not measured.degenerate:
        return ""
    return (
        '<div class="banner warn" role="note"><b>Degenerate predictions.</b>On the test records the student '
        f"{escape('; it '.join(measured.degenerate))}. A small gap is no merit then.</div>"
    )


def majority_words(measured: Evaluation) -> str:
    """The accuracy of a constant on the same records, to stand beside the model's."""
    if measured.majority_class is None:
        return "nothing to compare with"
    return f"always “{measured.majority_class}”, the most common class: {percent(measured.majority_accuracy)}"


def opening(report: PublicReport, kind: str) -> str:
    """Title, outcome in one sentence, four figures."""
    measured, statement = report.headline, report.statement
    parity = measured.gaps["dp_one_vs_rest"]
    interval = (
        "" if math.isnan(parity.low) else f"{parity.low:.3f} to {parity.high:.3f} ({percent(parity.level, digits=0)}); "
    )
    figures = [
        (
            "Student accuracy",
            percent(measured.accuracy),
            f"on {counted(measured.num_answered, 'answered test record')}; {majority_words(measured)}",
        ),
        (
            "Privacy budget ε",
            epsilon_text(statement.epsilon),
            f"at δ = {delta_text(statement.delta)}; per {statement.unit}, {statement.relation}; data-independent",
        ),
        (
            "Demographic-parity gap",
            decimal(parity.value),
            f"{interval}smallest cell {count(parity.min_cell_size)}",
        ),
        ("Coverage", percent(measured.coverage), f"of {count(measured.num_records)} test records"),
    ]
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="detail">{escape(detail)}</dd></div>'
        for name, value, detail in figures
    )
    return (
        f'<header><p class="kicker">{escape(kind)}</p><h1>{escape(report.title)}</h1>'
        f'<p class="outcome">{_outcome(report)}</p><dl class="figures">{cells}</dl></header>\n'
    )


def _outcome(report: PublicReport) -> str:
    measured, statement = report.headline, report.statement
    return (
        f"{count(report.num_teachers)} teachers answered {count(statement.queries.answered)} of "
        f"{count(statement.queries.submitted)} public queries, which cost "
        f"<b>ε = {epsilon_text(statement.epsilon)}</b> in all. The student was trained on "
        f"{_training_labels(report)}. It is right on <b>{percent(measured.accuracy)}</b> of the test records it "
        f"answers, and its demographic-parity gap is <b>{decimal(measured.disparity)}</b>."
    )


def _training_labels(report: PublicReport) -> str:
    """The labels behind the student, beside those that the ledger has released until now."""
    trained, answered = report.num_training_labels, report.statement.queries.answered
    if trained is None:
        return "released labels, of which the number was not recorded"
    if trained < answered:
        others = f"the other {count(answered - trained)} answer queries beside the run’s own"
        return f"{count(trained)} of these labels: {others}"
    return "these labels" if trained == answered else counted(trained, "released label")


def pipeline(report: PublicReport) -> str:
    """Records, teachers, queries, labels and student as one picture."""
    statement = report.statement
    records = "undisclosed" if report.num_private_records is None else count(report.num_private_records)
    declared = "" if report.num_private_records is None else "declared size; "
    private = _steps(
        [
            (records, "private records", f"{declared}each record belongs to one teacher"),
            (count(report.num_teachers), "teachers", "trained on disjoint shards"),
        ]
    )
    public = _steps(
        [
            (
                count(statement.queries.submitted),
                "queries",
                f"posed, of {count(report.num_public_records)} public records",
            ),
            (
                count(statement.queries.answered),
                "labels released",
                f"{count(statement.queries.rejected_confidence)} refused for low consensus, "
                f"{count(statement.queries.rejected_fairness)} by the fairness gate, "
                f"{count(statement.queries.refused_free)} before the vote",
            ),
            (
                percent(report.headline.accuracy),
                "student accuracy",
                f"{percent(report.headline.coverage)} of test records answered; trained on "
                + (
                    "labels of unrecorded number"
                    if report.num_training_labels is None
                    else counted(report.num_training_labels, "label")
                ),
            ),
        ]
    )
    settings = (
        f"{report.mechanism}. {_gate_words(report.gate)}. "
        f"Noise: {_noise(statement)}. "
        f"Tuning {'is' if statement.tuning_accounted else 'is not'} part of ε."
    )
    drawing = (
        f'<div class="pipeline"><div class="zone private"><p>Stays with the operator</p>{private}</div>'
        f'<div class="gateway"><div><b>ε = {epsilon_text(statement.epsilon)}</b>'
        f"<span>noisy votes{'' if math.isinf(report.gate.max_disparity) else ',<br>fairness gate'}</span></div></div>"
        f'<div class="zone public"><p>May be published</p>{public}</div></div>'
        f'<p class="note" style="margin-top:10px">{escape(settings)}</p>'
    )
    return section(
        "From private records to a student",
        "Of the private records only noisy answers leave the operator; the student is computed from these and from "
        "public records. Metrics are measured on test records.",
        drawing,
    )


def _steps(steps: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(detail)}</small></li>"
        for value, name, detail in steps
    )
    return f'<ul class="steps">{items}</ul>'


def answers(report: PublicReport) -> str:
    """The budget's course; who was answered and with which labels."""
    statement, measured = report.statement, report.headline
    curve = charts.curves(
        [
            charts.Curve(
                name=f"ε = {epsilon_text(statement.epsilon)}",
                points=course(report.epsilon_course_Q),
            )
        ],
        x_label="queries posed",
        y_label=f"ε at δ = {delta_text(statement.delta)}",
        title="Data-independent privacy budget spent against queries posed",
    )
    shares_CG = [
        [row[k] / sum(row) if sum(row) else math.nan for row in report.answered_GC]
        for k in range(len(measured.class_names))
    ]
    labels = charts.dumbbells(
        measured.class_names,
        shares_CG,
        x_label="share of the group’s released labels, %",
        title="Released labels by class and group",
    )
    counts = table(
        ["group", *measured.class_names],
        [
            [escape(name), *(count(value) for value in row)]
            for name, row in zip(measured.group_names, report.answered_GC, strict=True)
        ],
    )
    return section(
        "What was asked and answered",
        "The budget counts every query that was posed, also those that got no answer.",
        cards(
            column(
                card(
                    "Budget spent",
                    f"Data-independent: every posed query at its worst case, refusals before the vote included. "
                    f"Unit: {statement.unit}, {statement.relation}.",
                    curve,
                ),
                card(
                    "Answers and refusals by group",
                    "Shares of the queries that each group’s records made.",
                    _outcome_bars(report.outcomes),
                ),
            ),
            card(
                "Released labels by class and group",
                "The distance between the outermost marks is the gap between two groups in that class. A refused query "
                "has no label.",
                _group_legend(measured.group_names) + labels + _more("Counts", counts),
            ),
        ),
    )


def outcome_legend() -> str:
    """The colours and hatches of what can become of a query."""
    entries = "".join(f'<span><i class="swatch {css}"></i>{escape(words)}</span>' for css, words in OUTCOMES.items())
    return f'<div class="legend">{entries}</div>'


def _outcome_bars(outcomes: Sequence[GroupOutcomes]) -> str:
    rows = []
    for group in outcomes:
        parts = (group.answered, group.rejected_fairness, group.rejected_confidence, group.refused_free)
        total = sum(parts)
        segments = "".join(
            f'<i class="{css}" style="flex:{number}" title="{number} {escape(words)}">'
            f"{count(number) if number >= 0.1 * total else ''}</i>"
            for (css, words), number in zip(OUTCOMES.items(), parts, strict=True)
            if number
        )
        rows.append(
            f'<span>{escape(group.name)}</span><div class="bar">{segments}</div>'
            f'<span class="total">{count(group.answered)} of {count(total)}</span>'
        )
    numbers = table(
        ["group", *OUTCOMES.values()],
        [
            [
                escape(group.name),
                *map(count, (group.answered, group.rejected_fairness, group.rejected_confidence, group.refused_free)),
            ]
            for group in outcomes
        ],
    )
    return outcome_legend() + f'<div class="bars">{"".join(rows)}</div>' + _more("Counts", numbers)


def student(report: PublicReport) -> str:
    """Gaps, rates, coverage and accuracy for every evaluation; confusion for the headline."""
    gap_max = max(
        (
            end
            for measured in report.evaluations.values()
            for gap in measured.gaps.values()
            for end in (gap.value, gap.high)
            if not math.isnan(end)
        ),
        default=0.0,
    )
    measurements = "".join(
        _gap_card(name, measured, gap_max) + _rate_card(name, measured) + _group_card(name, measured)
        for name, measured in report.evaluations.items()
    )
    order = _order_card(report.reject_option, report.headline.group_names) if report.reject_option else ""
    return section(
        "How the student treats the groups",
        "Measured on test records with their true labels and groups; these numbers are outside the privacy guarantee.",
        cards(measurements, order, *_confusion_cards(report.headline)),
    )


def _order_card(spread: RejectOptionSpread, group_names: Sequence[str]) -> str:
    start = f"once every group has {count(max(spread.rule.min_count, 1))} answers"
    rows = [
        _spread_row("Accuracy on answered records", spread.accuracy, percent),
        _spread_row("Coverage", spread.coverage, percent),
        *(
            _spread_row(f"Coverage, {name}", shares, percent)
            for name, shares in zip(group_names, spread.coverage_G, strict=True)
        ),
        _spread_row("Gap after the last answer", spread.final_gap, decimal),
        _spread_row("Largest gap on the way", spread.max_gap, decimal, note=start),
    ]
    return card(
        "How much the order of predictions matters",
        "A student that may refuse decides on each record in view of its earlier answers: the figures with refusals "
        f"belong to one order. Here are {count(len(spread.orders))} random orders of the same "
        f"{count(spread.num_records)} predictions; margin {_gate(spread.rule)}.",
        table(["", "lowest", "mean", "highest"], rows),
        wide=True,
    )


def _spread_row(name: str, spread: Spread, words: Callable[[float], str], *, note: str = "") -> list[str]:
    partly = f"undefined in {count(spread.n_undefined)} orders" if spread.n_undefined else ""
    notes = "; ".join(filter(None, (note, partly)))
    detail = f"<small>{escape(notes)}</small>" if notes else ""
    return [f"{escape(name)}{detail}", words(spread.low), f"<b>{words(spread.mean)}</b>", words(spread.high)]


def _confusion_cards(measured: Evaluation) -> list[str]:
    return [
        card(
            f"Confusion: {name}",
            f"{count(group.num_answered)} answered records, {percent(group.accuracy)} right. Shade: share of the row.",
            charts.confusion(counts, measured.class_names, title=f"Confusion matrix of group {name}"),
        )
        for name, group, counts in zip(measured.group_names, measured.groups, measured.confusion_GYC, strict=True)
    ]


def _rate_card(name: str, measured: Evaluation) -> str:
    rates = charts.dumbbells(
        measured.class_names,
        list(zip(*measured.rates_GC, strict=True)),
        x_label="share of the group predicted this class, %",
        title=f"Predicted classes by group, {name}",
    )
    numbers = table(
        ["group", *measured.class_names],
        [
            [escape(group), *(percent(rate) for rate in row)]
            for group, row in zip(measured.group_names, measured.rates_GC, strict=True)
        ],
    )
    return card(
        f"Predicted classes by group, {name}",
        _rate_words(measured),
        _group_legend(measured.group_names) + rates + _more("Rates", numbers),
    )


def _rate_words(measured: Evaluation) -> str:
    """How many classes are predicted at all, for a gap is read beside that."""
    if not measured.num_answered:
        return "No record is answered."
    predicted = sum(any(rates[k] > 0 for rates in measured.rates_GC) for k in range(len(measured.class_names)))
    words = f"{count(predicted)} of {count(len(measured.class_names))} classes are predicted for some record."
    return f"The student {'; it '.join(measured.degenerate)}. {words}" if measured.degenerate else words


def _gap_card(name: str, measured: Evaluation, gap_max: float) -> str:
    rows = [
        charts.Whisker(
            name=GAP_NAMES.get(key, key), detail=decimal(gap.value), value=gap.value, low=gap.low, high=gap.high
        )
        for key, gap in measured.gaps.items()
    ]
    details = table(
        ["gap", "value, interval", "smallest cell", "undefined cells"],
        [
            [
                f"{escape(GAP_NAMES.get(key, key))}<small>{escape(gap.where)}</small>",
                f"{decimal(gap.value)}<small>"
                f"{'undefined' if math.isnan(gap.low) else f'{decimal(gap.low)} to {decimal(gap.high)}'}</small>",
                count(gap.min_cell_size),
                count(gap.n_undefined),
            ]
            for key, gap in measured.gaps.items()
        ],
    )
    level = next(iter(measured.gaps.values())).level
    drawing = charts.whiskers(rows, x_max=gap_max, x_label="gap (0 is equal treatment)", title=f"Fairness gaps: {name}")
    return card(
        f"Gaps, {name}",
        f"Largest difference over classes and groups, with {percent(level, digits=0)} bootstrap intervals over "
        "test records. A largest difference leans upwards when cells are small.",
        drawing + _more("Where each gap is attained, cell sizes", details),
    )


def _group_card(name: str, measured: Evaluation) -> str:
    rows = [
        [
            escape(group.name),
            count(group.num_records),
            count(group.num_answered),
            _meter(group.coverage),
            _meter(group.accuracy),
        ]
        for group in measured.groups
    ]
    rows.append(
        [
            "<b>all</b>",
            count(measured.num_records),
            count(measured.num_answered),
            _meter(measured.coverage),
            _meter(measured.accuracy),
        ]
    )
    return card(
        f"Coverage and accuracy by group, {name}",
        f"Accuracy is over answered records; {majority_words(measured)}.",
        table(["group", "records", "answered", "coverage", "accuracy"], rows),
        wide=True,
    )


def promises(report: PublicReport) -> str:
    """What the guarantee covers and what it does not."""
    statement = report.statement
    epsilon, delta = epsilon_text(statement.epsilon), delta_text(statement.delta)
    private = statement.noise == "os_entropy"
    held = [
        (
            "Released labels, and whatever is computed from them, satisfy "
            if private
            else "With fresh noise the labels would satisfy "
        )
        + f"(ε, δ)-differential privacy with ε = {epsilon}, δ = {delta}, for one {statement.unit} "
        f"({statement.relation}) among the private records.",
        "The bound is data-independent: every posed query is charged at its worst case, whatever the votes were.",
        *_totals_held(statement),
        *_refusals_held(statement),
        "Only a repeat of an earlier query costs nothing: it shows the stored outcome.",
    ]
    if statement.queries.epsilon_sanitised is not None:
        held.append(_sanitised_words(statement.queries.epsilon_sanitised, statement.epsilon))
    not_held = [
        "Test metrics use true labels and groups of the test records. They are outside the guarantee.",
        "No fairness margin was set: the aggregator answered whatever the gap between groups."
        if math.isinf(report.gate.max_disparity)
        else f"The fairness margin (γ = {_margin(report.gate)}) steers each answer as it is given. It does not bound "
        "the final gap of the labels, and even less the student’s.",
        "Small differences between groups on this test set may be chance: read the intervals and cell sizes.",
        "Public records and their groups are not protected"
        + ("." if report.num_private_records is None else ", nor is the declared number of private records."),
    ]
    if not statement.tuning_accounted:
        not_held.append("Choosing the settings was not charged. If private data guided the choice, ε is too low.")
    not_held[:0] = statement.remarks
    if not private:
        not_held.insert(
            0, "The noise came from a seed: this run is not private. It shows what a private run looks like."
        )
    held_items = "".join(f"<li>{escape(item)}</li>" for item in held)
    not_held_items = "".join(f"<li>{escape(item)}</li>" for item in not_held)
    return section(
        "What these numbers guarantee, and what not",
        "",
        '<div class="cards promises">',
        f'<div class="card"><h3>Promised</h3><ul>{held_items}</ul></div>',
        f'<div class="card"><h3>Not promised</h3><ul>{not_held_items}</ul></div></div>',
    )


def _totals_held(statement: PrivacyStatement) -> list[str]:
    """Why totals by step may be published; not where votes decided when to stop, which the statement remarks."""
    if STOPPED_BY_VOTES in statement.remarks:
        return []
    return [
        "How many queries were answered, and which step refused the others, is covered too: the check and the noisy "
        "vote of every query are charged, and the gate decides by their outcomes alone."
    ]


def _refusals_held(statement: PrivacyStatement) -> list[str]:
    """What becomes of refusals in the bound, for those there are."""
    rejected, free = statement.queries.rejected_fairness, statement.queries.refused_free
    held = []
    if rejected:
        held.append(
            f"{counted(rejected, 'query', 'queries')} that the fairness gate rejected: charged in full, because "
            "the noisy vote was drawn."
        )
    if free:
        held.append(
            f"{counted(free, 'refusal')} before the vote used no votes; the bound counts them all the same, because "
            "how many there are depends on the labels released."
        )
    return held


def _sanitised_words(sanitised: float, bound: float) -> str:
    """What a smooth-sensitivity release says of these votes, against the bound for any votes."""
    compared = (
        "less than the bound"
        if sanitised < bound
        else "as much as the bound"
        if sanitised == bound
        else "no less: the bound is smaller, and holds for any votes"
    )
    return (
        "On these votes, by a smooth-sensitivity release, which the bound includes, the labels cost at most "
        f"ε = {epsilon_text(sanitised)}, with 95 % confidence over the release’s own noise: {compared}."
    )


def _gate_words(rule: GateRule) -> str:
    return "No fairness gate" if math.isinf(rule.max_disparity) else f"Fairness margin {_gate(rule)}"


def _group_legend(group_names: Sequence[str]) -> str:
    marks = "".join(
        f'<span><svg viewBox="-9 -9 18 18" aria-hidden="true">{charts.mark(rank, 0, 0)}</svg>{escape(name)}</span>'
        for rank, name in enumerate(group_names)
    )
    return f'<div class="legend">{marks}</div>'


def _meter(share: float) -> str:
    if math.isnan(share):
        return percent(share)
    return f'<span class="meter"><i style="width:{100 * share:.1f}%"></i></span>{percent(share)}'


def _more(summary: str, content: str) -> str:
    return f'<details><summary>{escape(summary)}</summary><div class="scroll">{content}</div></details>'


def _gate(rule: GateRule) -> str:
    return f"γ = {_margin(rule)} after {rule.min_count} answers ({_words(rule.cold_start)}), gap {_words(rule.gap)}"


def _margin(rule: GateRule) -> str:
    return "off" if math.isinf(rule.max_disparity) else f"{rule.max_disparity:g}"


def _noise(statement: PrivacyStatement) -> str:
    return (
        "exact, from operating-system entropy"
        if statement.noise == "os_entropy"
        else statement.noise.replace(": ", ", ")
    )


def _words(name: str) -> str:
    return {
        "group": "in the group",
        "cell": "in the group and class",
        "all_groups": "in every group",
        "one_vs_rest": "against all other groups",
        "pairwise": "against each other group",
        "overall": "against the overall rate",
    }[name]


def footer(statement: PrivacyStatement) -> str:
    """How to read the numbers."""
    return (
        f"<footer>Made by FairPATE. Noise: {escape(_noise(statement))}. ε is rounded up; undefined numbers are "
        "called undefined, never 0.</footer>"
    )
