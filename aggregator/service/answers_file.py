"""Stored replies as a file: what was answered, for other tools. Nothing is asked, drawn or charged."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from aggregator.mechanism import Outcome
from aggregator.service.questions import PublicPool

FileFormat = Literal["parquet", "csv"]
MEDIA_TYPES = {"parquet": "application/vnd.apache.parquet", "csv": "text/csv; charset=utf-8"}


def answers_file(
    keys: Sequence[str], outcomes: Sequence[Outcome | None], pool: PublicPool, file_format: FileFormat
) -> bytes:
    """A row per key: the pool's number of the record (null: posted), status and label; ``not_stored`` without reply."""
    labels = [None if outcome is None else outcome.label for outcome in outcomes]
    table = pa.table(
        {
            "key": list(keys),
            "id": pa.array([pool.number_of(key) for key in keys], pa.int64()),
            "status": [_status(outcome) for outcome in outcomes],
            "label": pa.array(labels, pa.int64()),
            "label_name": pa.array([None if k is None else pool.label_names[k] for k in labels], pa.string()),
        }
    )
    sink = io.BytesIO()
    if file_format == "parquet":
        pq.write_table(table, sink)
    else:
        csv.write_csv(table, sink)
    return sink.getvalue()


def _status(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not_stored"
    return "refused" if outcome.label is None else "answered"
