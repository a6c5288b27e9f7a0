"""The published student once more, for those without this package: ``model.onnx`` beside it, and ``model.json``.

Made of the student, public records and declared constants, so it costs nothing and can be made again at any time. It
is left out, with a line that says why, where the packages are not installed or torch cannot write the model: the run
is whole without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory, read_json, write_json
from fairpate.data import Dataset
from fairpate.data.files import sha256_of
from fairpate.files import write_atomically
from student.portable import PortableError, PortableStudent, missing_packages, portable
from student.predict import Student

_MOST_RECORDS = 256
_COORDINATES = (
    "coordinates of a public embedding of pictures (data.embedding), which is not in this graph: this package computes "
    "them from embedding.safetensors"
)


def write_portable(run: RunDirectory, student: Student, dataset: Dataset, reporter: Reporter) -> None:
    """Write both files, unless they are there and belong to this student."""
    if _is_there(run):
        return
    missing = missing_packages()
    if missing:
        reporter.note("onnx", f"no model.onnx: {', '.join(missing)} missing; pip install 'fairpate[onnx]', run again")
        return
    try:
        with reporter.stage("onnx"):
            made = _portable(student, dataset)
    except PortableError as error:
        reporter.note("onnx", str(error))
        return
    # The description last: with it both are whole.
    write_atomically(run.graph, lambda path: path.write_bytes(made.graph))
    write_json(run.graph_description, made.description | {"student_sha256": sha256_of(run.student)})


def _is_there(run: RunDirectory) -> bool:
    if not (run.graph.is_file() and run.graph_description.is_file()):
        return False
    described = read_json(run.graph_description)
    found = {"sha256": hashlib.sha256(run.graph.read_bytes()).hexdigest(), "student_sha256": sha256_of(run.student)}
    return found.items() <= described.items()


def _portable(student: Student, dataset: Dataset) -> PortableStudent:
    """With the embedding of a table; public records as they were before it are not kept, so others check it."""
    embedding, records = dataset.embedding, dataset.public.x[:_MOST_RECORDS]
    if embedding is not None and _is_of_table(dataset):
        student, records = replace(student, embedding=embedding), _anything(embedding.record_shape)
    return portable(student, records, encoding=_encoding(dataset))


def _is_of_table(dataset: Dataset) -> bool:
    return dataset.embedding is None or len(dataset.embedding.record_shape) == 1


def _anything(shape: tuple[int, ...]) -> Tensor:
    """Records that no data set has: declared features lie between 0 and 1."""
    return torch.rand(_MOST_RECORDS, *shape, generator=torch.Generator().manual_seed(0))


def _encoding(dataset: Dataset) -> dict[str, Any]:
    """How a raw row becomes what the graph reads, as far as that was declared."""
    if not _is_of_table(dataset):
        return {"of": _COORDINATES}
    if dataset.kind == "image":
        return {"of": "bytes 0 to 255: channels, rows, columns; the graph scales them"}
    if not dataset.feature_codes:
        names = dataset.feature_names if dataset.embedding is None else ()
        return {"of": "features in the order of the data set", "features": [{"feature": name} for name in names]}
    return {
        "of": "features of declared columns, in this order",
        "kinds": {
            "number": "(s(v) - s(low)) / (s(high) - s(low)), clipped to 0..1, where s(v) = v, or "
            "sign(v) ln(1 + |v|) for scale log; v is `missing` where the text is in `unknown`",
            "category": "1 where the text is one of values, else 0",
            "element": "the number at `place` of the list, from 0",
            "other": "1 where the text is none of values, else 0",
            "band": "1 where at_least <= v < below, else 0; a last band has no below",
        },
        "features": [code.to_json() for code in dataset.feature_codes],
    }
