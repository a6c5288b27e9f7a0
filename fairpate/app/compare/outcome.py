"""What a sweep ended in, as `fairpate compare` puts it out: in words, and as numbers for a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fairpate.app.compare.records_table import Row
from fairpate.app.compare.report import summarise_comparison
from fairpate.app.compare.run import Comparison
from fairpate.app.terminal.output import Output
from fairpate.evaluation.degenerate import GroupsTold
from fairpate.evaluation.frontier import notion_value
from fairpate.evaluation.page import counted
from fairpate.fairness.notions import NotionName
from fairpate.types import RunRecord


def comparison_outcome(comparison: Comparison) -> Output:
    """Ranges over finished cells by data set and method, what is degenerate, failed or left out, and the files."""
    folder, failed = comparison.folder, comparison.failed
    facts = {
        "notion": comparison.notion,
        "data_sets": [_data_set(data, rows, comparison.notion) for data, rows in comparison.rows_by_data.items()],
        "degenerate": [_named(row) | {"words": words} for row in comparison.rows if (words := _degenerate(row))],
        "failed": [_named(row) | {"command": row.command, "cause": row.error} for row in failed],
        "left_out": Counter(row.method for row in comparison.withheld),
        "files": {"results": folder.results, "report": folder.report, "operator_only": folder.private},
    }
    failure = f"{counted(len(failed), 'cell')} failed; the same command tries them again." if failed else None
    return Output(facts=facts, words=summarise_comparison(comparison), code=int(bool(failed)), failure=failure)


def _data_set(data: str, by_method: Mapping[str, Sequence[Row]], notion: NotionName) -> dict[str, Any]:
    found = [record for rows in by_method.values() for record in _records(rows)]
    return {
        "data": data,
        "majority_accuracy": _range(record.majority_accuracy for record in found),
        "methods": [_method(method, rows, notion) for method, rows in by_method.items()],
    }


def _method(method: str, rows: Sequence[Row], notion: NotionName) -> dict[str, Any]:
    records = _records(rows)
    told = GroupsTold.of(records)
    return {
        "method": method,
        "cells": len(rows),
        "finished": len(records),
        "epsilon": _range(record.epsilon for record in records),
        "accuracy": _range(record.accuracy for record in records),
        "disparity": _range(notion_value(record, notion) for record in records),
        "coverage": _range(record.coverage for record in records),
        "underserved_groups": dict(told.underserved),
        "unmeasured_groups": dict(told.unmeasured),
    }


def _records(rows: Sequence[Row]) -> list[RunRecord]:
    return [row.record for row in rows if row.record is not None]


def _range(values: Iterable[float | None]) -> list[float] | None:
    """The least and the greatest; None where none is defined."""
    there = [value for value in values if value is not None]
    return [min(there), max(there)] if there else None


def _degenerate(row: Row) -> tuple[str, ...]:
    return () if row.record is None else row.record.degenerate


def _named(row: Row) -> dict[str, Any]:
    return {"method": row.method, "data": row.data, "seed": row.seed, "digest": row.digest}
