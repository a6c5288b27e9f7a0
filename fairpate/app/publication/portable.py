"""The published student once more, for those without this package: ``model.onnx`` beside it, and ``model.json``.

Made of the student, public records and declared constants, so it costs nothing and can be made again at any time. It
is left out, with a line that says why, where the packages are not installed or torch cannot write the model: the run
is whole without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from fairpate.app.rundir import RunDirectory, read_json, write_json
from fairpate.app.terminal.progress import Reporter
from fairpate.data import Dataset
from fairpate.data.files import sha256_of
from fairpate.data.gradients import feature_names
from fairpate.files import write_atomically
from fairpate.named_code import PLACE
from student.portable import PortableError, PortableStudent, missing_packages, portable
from student.predict import Student

_MOST_RECORDS = 256


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
    """With the embedding inside, checked on public records as they were before it."""
    records = dataset.public.x[:_MOST_RECORDS]
    if dataset.before_embedding is not None:
        student, records = replace(student, embedding=dataset.embedding), dataset.before_embedding.examples
    return portable(student, records, encoding=encoding_of(dataset, tuple(records.shape[1:])))


def encoding_of(dataset: Dataset, record_shape: tuple[int, ...]) -> dict[str, Any]:
    """How a raw row becomes what the graph reads, as far as that was declared."""
    if len(record_shape) > 1:
        inside = "" if dataset.embedding is None else " and places them in the public embedding"
        return {"of": f"bytes 0 to 255: channels, rows, columns; the graph scales them{inside}"}
    if not dataset.feature_codes:
        before = dataset.before_embedding
        names = dataset.feature_names if before is None else before.feature_names
        return {"of": _of_named(names), "features": [{"feature": name} for name in names]}
    return {
        "of": "features of declared columns, in this order",
        "kinds": {
            "number": "(s(v) - s(low)) / (s(high) - s(low)), clipped to 0..1, where s(v) = v, or "
            "sign(v) ln(1 + |v|) for scale log; v is `missing` where it is not known: where its text is in `unknown`, "
            "or is a number equal to one in it, such as 9.0 where 9 is",
            "missing": "1 where v is not known, else 0",
            "category": "1 where the text is one of values, else 0",
            "element": "the number at `place` of the list, from 0",
            "other": "1 where the text is none of values, else 0",
            "band": "1 where at_least <= v < below, else 0; a last band has no below",
        },
        "features": [code.to_json() for code in dataset.feature_codes],
    }


def _of_named(names: tuple[str, ...]) -> str:
    if names == feature_names():
        return "histograms of a picture's oriented gradients (fairpate.oriented_gradients), in place of the picture"
    place = names[0].rpartition(" ")[0] if names else ""
    if PLACE.fullmatch(place):
        return f"what {place} gives for a picture, which is code that no graph holds: run it first"
    return "features in the order of the data set"
