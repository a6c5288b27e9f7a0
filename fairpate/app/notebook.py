"""What results show of themselves in a notebook: their guarantee, their measures, and how to reach card and statement.

HTML of a few kilobytes, escaped, without a script and without colours of its own, so that it reads in light and dark
notebooks. Of a run only what is published is read.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairpate.app.rundir import RunDirectory, RunDirectoryError, read_json, read_statement
from fairpate.evaluation.page import decimal, epsilon_text, percent, render
from fairpate.meaning import delta_text, meaning
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.types import PrivacyStatement

_SEEN = "all that is published"
Rows = list[tuple[str, str]]


def run_html(run: RunDirectory) -> str:
    """A run in a notebook: what may be claimed, what was measured, where its files are."""
    try:
        return _published_html(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunDirectoryError):
        words = (
            f"No published result in {run.root}: the run is unfinished or damaged, or without privacy and so the "
            "operator's alone."
        )
        return notebook_html(title="Run", sentences=[words])


def _published_html(run: RunDirectory) -> str:
    """Errors of any kind for files that are missing or damaged."""
    statement, record, metrics = read_statement(run), read_json(run.record), read_json(run.metrics)
    places = (
        ("report", run.public_report),
        ("card", run.card_page),
        ("statement", run.statement),
        ("model", run.student),
    )
    return notebook_html(
        title=f"{record['method']} on {record['data']}, seed {record['seed']}",
        sentences=[_meaning(statement)],
        rows=[*_guarantee(statement), *_measured(metrics), *((name, from_here(p)) for name, p in places if p.exists())],
        remarks=statement.remarks,
        commands=[
            ("Card", f"fairpate card {shlex.quote(from_here(run.root))}"),
            ("Statement in Python", "fairpate.read_statement(run)"),
        ],
    )


def from_here(path: Path) -> str:
    """A path as it is reached from where the notebook runs; one that lies elsewhere as it is."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def fitted_html(statement: PrivacyStatement, *, name: str) -> str:
    """A fitted estimator in a notebook. Nothing was measured: that takes test records."""
    calls = "X_test, y_test, sensitive_features=groups"
    card = [] if statement.epsilon is None else [("Card", f".card(folder, {calls})")]
    return notebook_html(
        title=name,
        sentences=[_meaning(statement)],
        rows=_guarantee(statement),
        remarks=statement.remarks,
        commands=[("Accuracy, disparity and coverage", f".plot({calls})"), ("Statement", ".statement()"), *card],
    )


def _meaning(statement: PrivacyStatement) -> str:
    """What the epsilon means for one unit; nothing of noise from a seed."""
    if statement.noise != OS_ENTROPY:
        return f"Not private: the noise is {statement.noise.partition(':')[0]}."
    epsilon = math.inf if statement.epsilon is None else statement.epsilon
    return meaning(epsilon, statement.delta, unit=statement.unit, relation=statement.relation, seen=_SEEN)


def _guarantee(statement: PrivacyStatement) -> Rows:
    if statement.epsilon is None:
        return [("ε", "none: no guarantee")]
    of = f"per {statement.unit}, {statement.relation}"
    at = f"{epsilon_text(statement.epsilon)} at δ = {delta_text(statement.delta)}"
    return [("ε", f"{at}, {of} ({statement.accounting})")]


def _measured(metrics: dict[str, Any]) -> Rows:
    """Accuracy beside the most common class, demographic parity with its interval, coverage, what is degenerate."""
    if not metrics["num_records"]:
        few = "too few" if metrics.get("not_measured") else "no"
        return [("accuracy, disparity, coverage", f"not measured: {few} test records")]
    gap = metrics["gaps"]["dp_one_vs_rest"]
    interval = f", 95 % interval {_decimal(gap['low'])} to {_decimal(gap['high'])}" if gap["low"] is not None else ""
    common = metrics["majority_class"]
    always = "" if common is None else f"; {_percent(metrics['majority_accuracy'])} for always {common!r}"
    return [
        ("accuracy", f"{_percent(metrics['accuracy'])} of {metrics['num_answered']:,} test records{always}"),
        ("disparity", f"demographic-parity gap {_decimal(gap['value'])}{interval}"),
        ("coverage", _percent(metrics["coverage"])),
        *(("warning", f"degenerate: the model {words}") for words in metrics["degenerate"]),
        *(("warning", f"the model {words}") for words in metrics.get("underserved", ())),
        *(
            ("warning", f"gaps leave out {name}: too few answered test records")
            for name in metrics.get("not_measured", ())
        ),
    ]


def _decimal(value: float | None) -> str:
    return decimal(math.nan if value is None else value)


def _percent(value: float | None) -> str:
    return percent(math.nan if value is None else value)


def notebook_html(
    *,
    title: str,
    sentences: Sequence[str],
    rows: Rows | None = None,
    remarks: Sequence[str] = (),
    commands: Sequence[tuple[str, str]] = (),
    picture: str = "",
    alt: str = "",
) -> str:
    """Sentences, a table of names and words, remarks to unfold, a picture (PNG in base 64), and how to go on."""
    return render(
        "notebook.html",
        title=title,
        sentences=sentences,
        rows=rows or [],
        remarks=remarks,
        commands=commands,
        picture=picture,
        alt=alt,
    )
