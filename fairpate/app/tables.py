"""The run directory's Parquet tables: votes, which are private, and released labels, which are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fairpate.app.rundir import RunDirectoryError
from fairpate.files import write_atomically
from fairpate.types import IntArray, LabelledSet, VoteBatch

_ENSEMBLE = b"ensemble"


def write_votes(batch: VoteBatch, path: Path) -> None:
    """One row per query: record_id, group, and how many teachers chose each class; the metadata name the teachers."""
    table = pa.table({"record_id": list(batch.record_ids), "group": batch.groups_Q, "votes": _rows(batch.votes_QC)})
    table = table.replace_schema_metadata({_ENSEMBLE: batch.ensemble})
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=True)


def read_votes(path: Path) -> VoteBatch:
    """The votes that :func:`write_votes` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    metadata = table.schema.metadata or {}
    if _ENSEMBLE not in metadata:
        raise RunDirectoryError(f"{path}: does not say which teachers voted; delete it and run again.")
    return VoteBatch(
        record_ids=table["record_id"].to_pylist(),
        groups_Q=table["group"].to_numpy().astype(np.int64),
        votes_QC=np.array(table["votes"].to_pylist(), dtype=np.int64),
        ensemble=metadata[_ENSEMBLE].decode(),
    )


def write_labels(labelled: LabelledSet, path: Path) -> None:
    """One row per answered query, in the order asked: record_id, group, label, and noisy counts if released."""
    columns = {"record_id": list(labelled.record_ids), "group": labelled.groups, "label": labelled.labels}
    if labelled.counts is not None:
        columns["counts"] = _rows(labelled.counts)
    table = pa.table(columns)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def read_labels(path: Path) -> LabelledSet:
    """What :func:`write_labels` wrote. RunDirectoryError for a damaged file."""
    table = _read(path)
    counts = table["counts"].to_pylist() if "counts" in table.column_names else None
    return LabelledSet(
        record_ids=tuple(table["record_id"].to_pylist()),
        labels=table["label"].to_numpy().astype(np.int64),
        groups=table["group"].to_numpy().astype(np.int64),
        # For no row numpy cannot infer the number of classes.
        counts=None if counts is None else np.array(counts, dtype=np.int64).reshape(len(counts), -1 if counts else 0),
    )


def _rows(values_QC: IntArray) -> pa.Array:
    return pa.array(values_QC.tolist(), type=pa.list_(pa.int64(), values_QC.shape[1]))


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise RunDirectoryError(f"{path}: cannot be read ({error}); delete it and run again.") from error
