"""What the command line prints at the end: the outcome of a run, and what is in a data set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from fairpate.app.rundir import RunDirectory, read_json, read_statement
from fairpate.app.terminal.console import facts, listing
from fairpate.app.terminal.output import Output
from fairpate.data import DatasetDescription, DatasetListing
from fairpate.data.declared.check import Check
from fairpate.evaluation.page import counted, epsilon_text
from fairpate.fairness.notions import DEFAULT, NOTIONS, Notion
from fairpate.meaning import delta_text
from fairpate.types import READING_TELLS, PrivacyStatement
from student.card import read_card


def outcome(run: RunDirectory) -> Output:
    """The published numbers of a finished run, in words and as the files hold them."""
    files = {
        "model": run.student,
        "without_this_package": run.graph,
        "record": run.record,
        "statement": run.statement,
        "metrics": run.metrics,
        "report": run.public_report,
        "operator_only": run.private_report,
    }
    record = read_json(run.record)
    facts = {name: record[name] for name in ("method", "data", "seed")} | {
        "run": run.root,
        "statement": read_json(run.statement),
        "metrics": read_json(run.metrics),
        "training_labels": read_card(run.student).num_training_labels,
        "files": {name: path for name, path in files.items() if path.exists()},
    }
    return Output(facts=facts, words=summarise(run))


def _guarantee(statement: PrivacyStatement) -> str:
    if statement.epsilon is None:
        return f"none: no guarantee ({statement.noise})"
    return (
        f"{epsilon_text(statement.epsilon)} at delta {delta_text(statement.delta)} ({statement.relation} "
        f"{statement.unit}; {statement.accounting}; noise: {statement.noise})"
    )


def summarise(run: RunDirectory) -> Group:
    """The published numbers of a finished run, and where its files are."""
    statement, metrics, record = read_statement(run), read_json(run.metrics), read_json(run.record)
    queries = statement.queries
    rows = [
        ("method", f"{record['method']} on {record['data']}, seed {record['seed']}"),
        ("epsilon", _guarantee(statement)),
        *measured_rows(metrics),
        *_without_privacy(run),
    ]
    if queries is not None:
        rows += [
            ("labels released", f"{queries.answered} of {queries.submitted} queries"),
            *_trained_on(read_card(run.student).num_training_labels, queries.answered),
        ]
    rows += [("model", str(run.student))]
    rows += [("without this package", str(run.graph))] if run.graph.exists() else []
    rows += [("record", str(run.record))]
    rows += [("report", str(run.public_report))] if run.public_report.exists() else []
    rows += [("operator only", str(run.private_report))] if queries is not None else []
    return Group(Text(), facts(rows))


def measured_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Accuracy and gap on the test records, or that there were none."""
    if not metrics["num_records"]:
        return [("accuracy", f"unknown: {'too few' if metrics.get('not_measured') else 'no'} test records")]
    gap = metrics["gaps"]["dp_one_vs_rest"]
    return [
        ("accuracy", f"{number_text(metrics['accuracy'])} on {metrics['num_answered']} test records"),
        *baseline_rows(metrics),
        ("coverage", number_text(metrics["coverage"])),
        ("demographic disparity", f"{number_text(gap['value'])}, {interval_text(gap)}"),
        *_other_notions(metrics),
        *_not_shown(metrics),
    ]


def _not_shown(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """That counts by true label are left out, where every group is measured and they are."""
    if metrics.get("not_measured") or None not in metrics["confusion_GYC"]:
        return []
    few = f"fewer than {metrics['least_cell']} test records of a group and class"
    return [("not shown", f"counts by true label, gaps given it: {few}")]


def _without_privacy(run: RunDirectory) -> list[tuple[str, str]]:
    """The operator's baseline, where private files are here."""
    if not run.without_privacy.exists():
        return []
    found = read_json(run.without_privacy)
    learned = counted(found["num_records"], "private record")
    words = f"{number_text(found['accuracy'])}: a logistic model of {learned}; operator only"
    return [("without privacy", words)]


def _other_notions(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The other notions of fairness, in one line of gaps and one of rates; none of an earlier version's run."""
    gaps, of_worst = metrics["gaps"], " (worst class)" if len(metrics["class_names"]) > 2 else ""
    known = [notion for notion in NOTIONS.values() if notion.name != DEFAULT and notion.reading in gaps]
    of_kind = (("other gaps", False), (f"errors{of_worst}", True))
    lines = [
        (name, ", ".join(_measure(notion, gaps) for notion in known if notion.bounds_rate == bounds_rate))
        for name, bounds_rate in of_kind
    ]
    return [(name, words) for name, words in lines if words]


def _measure(notion: Notion, gaps: Mapping[str, Any]) -> str:
    kind = "rate" if notion.bounds_rate else "gap"
    return f"{notion.measure.removesuffix(f' {kind}')} {number_text(gaps[notion.reading]['value'])}"


def _trained_on(num_labels: int | None, num_released: int) -> list[tuple[str, str]]:
    """Said where the ledger released more labels than the student learned from."""
    if num_labels is None or num_labels == num_released:
        return []
    return [("student trained on", f"{num_labels} of these labels, those of the run's own queries")]


def baseline_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Beside an accuracy, that of the most common class on the same test records; and what is degenerate."""
    # Files of earlier versions lack the second and the third.
    said = (*metrics["degenerate"], *metrics.get("underserved", ()))
    warnings = [("warning", f"the model {words}") for words in said]
    if groups := metrics.get("not_measured"):
        warnings.append(("warning", f"gaps leave out {', '.join(groups)}: too few answered test records"))
    if metrics["majority_class"] is None:
        return warnings
    always = f"always {metrics['majority_class']!r}, the most common class"
    compared = [("to compare", f"{number_text(metrics['majority_accuracy'])}: {always}")]
    return [*compared, *warnings]


def check_table(check: Check) -> Group:
    """What the check itself reveals, then rows by file, what was made of their columns, and what is refused."""
    table = listing("file", "column", "rows", "clipped", "missing", "other")
    for file, rows in check.rows.items():
        table.add_row(file, "", f"{rows:,}", "", "", "")
        for each in check.columns:
            if each.file == file:
                counts = (f"{count:,}" if count else "" for count in (each.clipped, each.missing, each.other))
                table.add_row("", each.column, "", *counts)
    verdict = f"refused: {counted(len(check.refused), 'fault')}" if check.refused else "nothing is refused"
    said = Text("\n".join([*check.refused, verdict]))
    return Group(Text(READING_TELLS), *([table] if check.rows else []), said)


def listing_table(listings: Sequence[DatasetListing]) -> Table:
    """Every data set on one line."""
    table = listing("name", "task", "sensitive attribute", "records", "licence", "here")
    for each in listings:
        entry, here = each.entry, "yes" if each.present else "no"
        rows = "" if entry.rows is None else f"{entry.rows:,}"
        table.add_row(entry.name, entry.task, entry.sensitive, rows, entry.licence, here)
    return table


def describe_table(description: DatasetDescription) -> Group:
    """Records of each split by group and label."""
    heading = Text(
        f"{description.name}: {description.kind} records of shape {description.record_shape}, "
        f"sensitive attribute {description.sensitive_attribute}"
    )
    labels = (Column(Text(name)) for name in description.label_names)
    lacking = ["without label"] if any(sum(split.unlabelled_G) for split in description.splits) else []
    table = Table("split", "group", *labels, *lacking, "records", box=SIMPLE_HEAD)
    for split in description.splits:
        for name, counts, without in zip(description.group_names, split.counts_GC, split.unlabelled_G, strict=True):
            shown = (*counts, without) if lacking else counts
            table.add_row(split.name, Text(name), *(f"{count:,}" for count in shown), f"{sum(shown):,}")
        table.add_section()
    return Group(heading, table, *(Text(note) for note in description.notes))


def interval_text(gap: Mapping[str, Any]) -> str:
    """The bootstrap interval of a gap."""
    return f"95 % interval {number_text(gap['low'])} to {number_text(gap['high'])}"


def number_text(value: float | None) -> str:
    """A rate or a gap with three decimals."""
    return "undefined" if value is None or math.isnan(value) else f"{value:.3f}"
