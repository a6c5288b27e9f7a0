"""Export a published student as an ONNX graph, which predicts without this package, and a JSON that explains its use.

The graph holds everything between a record and the probabilities of its labels: the scaling of bytes, the public
embedding of a table or of pictures, the network, and the mixing by group of a randomised student. onnxruntime checks it
against the student on public records. The JSON holds the rest: how a raw row becomes features, the names of the
outputs, how a label follows from probabilities, and the reject option with its state.

Both are functions of the student, of declared constants and of public records. Shapes: N records, F values, C classes,
G groups.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.nn.fit import Mixture
from fairpate.types import UserError
from student.card import StudentCard
from student.student import Student

FORMAT = "fairpate.portable/1"
OPSET = 18
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_TOLERANCE, _MOST_APART = 1e-4, 0.01
_FLOAT, _DOUBLE = 1, 11  # as ONNX numbers them
_COLD = {"group": "n", "cell": "counts[g][k]", "all_groups": "the smallest group's sum of counts"}
_OTHER = {
    "one_vs_rest": "(answers k of all other groups together) / (their answers)",
    "pairwise": "(the least rate of k among other groups that have answers)",
    "overall": "(answers k of all groups, this one included) / (all answers, this one included)",
}


class PortableError(UserError):
    """A student without an ONNX graph, or with a graph that predicts differently."""


@dataclass(frozen=True, kw_only=True)
class PortableStudent:
    """The bytes of ``model.onnx`` and the values of ``model.json``."""

    graph: bytes
    description: dict[str, Any]


def missing_packages() -> tuple[str, ...]:
    """Return the names in :data:`PACKAGES` that are not installed."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def portable(student: Student, records: Tensor, *, encoding: Mapping[str, Any] | None = None) -> PortableStudent:
    """Return the graph and its description. ``records`` (N, ...): public inputs of the student to check the graph on.

    ``encoding`` describes how a raw row becomes an input of the graph. PortableError if torch cannot write the graph,
    or if it does not predict what the student predicts.
    """
    groups = None
    if student.card.mixing is not None:
        groups = torch.arange(len(records)) % len(student.card.group_names)
    # Two records: with one, the exporter takes the number of records for a constant.
    graph = _graph(_Whole(student).eval(), records[:2], None if groups is None else groups[:2])
    codes = None if groups is None else groups.numpy()
    _check(graph, student.card, records.numpy(), codes, student.probabilities(records, codes))
    card = student.card
    inputs = [{"name": "records", "type": str(records.numpy().dtype), "shape": ["N", *records.shape[1:]]}]
    if card.mixing is not None:
        inputs.append({"name": "groups", "type": "int64", "shape": ["N"]})
    description = {
        "format": FORMAT,
        "sha256": hashlib.sha256(graph).hexdigest(),
        "opset": OPSET,
        "inputs": inputs,
        "output": {"name": "probabilities", "type": "float32", "shape": ["N", len(card.label_names)]},
        "classes": list(card.label_names),
        "label": "draw one from the probabilities" if card.is_randomised else "the class of the largest probability",
        "groups": {"attribute": card.sensitive_attribute, "names": list(card.group_names), "needed": card.needs_group},
        "encoding": encoding,
        "reject_option": None if card.idp3 is None else _reject_option(card),
    }
    return PortableStudent(graph=graph, description=description)


class _Whole(nn.Module):
    """Maps records, and groups if predictions are mixed by group, to the probabilities of labels."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.network, self._embedding = student.network, student.embedding
        self._is_mixture = isinstance(student.network, Mixture)
        mixing = student.card.mixing
        self.register_buffer("mixing_GCC", None if mixing is None else torch.tensor(mixing, dtype=torch.float32))

    def forward(self, records: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return probabilities (N, C) for records (N, ...) and groups (N,)."""
        x = records if self._embedding is None else self._embedding.at_once(records)
        probabilities: Tensor = self.network(x).softmax(dim=1)
        if self.mixing_GCC is None or groups is None:
            return probabilities
        assert isinstance(self.mixing_GCC, Tensor)
        if not self._is_mixture:
            said = probabilities.argmax(dim=1)
            probabilities = functional.one_hot(said, probabilities.shape[1]).to(probabilities.dtype)
        mixed: Tensor = (probabilities[:, None, :] @ self.mixing_GCC[groups])[:, 0]
        return mixed


def _graph(whole: nn.Module, records: Tensor, groups: Tensor | None) -> bytes:
    """Return the file: weights inside, any number of records, and no trace of the machine that made it."""
    from onnxscript import opset18

    def hypot(one: Any, other: Any) -> Any:
        # The square of a 24-bit number is exact in 53 bits, so the root is rounded as torch rounds it.
        wide: list[Any] = [opset18.Cast(side, to=_DOUBLE) for side in (one, other)]
        squares: list[Any] = [opset18.Mul(side, side) for side in wide]
        root: Any = opset18.Sqrt(opset18.Add(*squares))
        return opset18.Cast(root, to=_FLOAT)

    count = torch.export.Dim("records")
    arguments = {"records": records} | ({} if groups is None else {"groups": groups})
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own internals
        try:
            program = torch.onnx.export(
                whole,
                args=tuple(arguments.values()),
                input_names=list(arguments),
                output_names=["probabilities"],
                dynamic_shapes=tuple({0: count} for _ in arguments),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
                custom_translation_table={torch.ops.aten.hypot.default: hypot},
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise PortableError(f"model.onnx: torch {torch.__version__} cannot write this model: {reason}") from error
    assert program is not None
    model: Any = program.model_proto
    # Documentation strings and metadata, where the exporter writes paths and lines of code.
    parts = [model, model.graph, *model.functions]
    for graph in (model.graph, *model.functions):
        parts += graph.node
    for entries in (model.graph.input, model.graph.output, model.graph.value_info, model.graph.initializer):
        parts += entries
    for part in parts:
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    # Equal students give equal bytes, and so equal digests.
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _check(
    graph: bytes,
    card: StudentCard,
    records: npt.NDArray[Any],
    groups: npt.NDArray[np.int64] | None,
    expected: npt.NDArray[np.float32],
) -> None:
    """Raise PortableError unless the graph predicts what the student does, for one record and for all.

    For a randomised student, where a mixing follows the most likely label, rounding may break a tie differently: then
    few records may differ.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    # One record too: a graph may have stored the number of records that it was made with.
    for count in (1, len(records)):
        given = {"records": records[:count]} | ({} if groups is None else {"groups": groups[:count]})
        (found,) = session.run(["probabilities"], given)
        apart = (np.abs(found - expected[:count]).max(axis=1) > _TOLERANCE).mean()
        if found.shape != expected[:count].shape or not apart <= (_MOST_APART if card.is_randomised else 0):
            raise PortableError(
                f"model.onnx: predicts something other than the student on {apart:.0%} of {count} public records, so "
                "it is not published."
            )


def _reject_option(card: StudentCard) -> dict[str, Any]:
    """Describe IDP3 (FairPATE, Algorithm 2): the rule, and the state that the caller has to keep."""
    assert card.idp3 is not None
    margin = card.idp3.max_disparity
    return {
        # JSON has no infinity: null is a margin that refuses nothing.
        "rule": asdict(card.idp3) | {"max_disparity": margin if np.isfinite(margin) else None},
        "state": {
            "name": "counts",
            "shape": [len(card.group_names), len(card.label_names)],
            "starts_with": 0,
            "means": "answers so far, by group and class; the order of records matters",
        },
        "steps": [
            "Of a record of group g with label k: n = sum(counts[g]).",
            f"While {_COLD[card.idp3.cold_start]} < min_count, or no other group has an answer: answer.",
            f"Otherwise r = (counts[g][k] + 1) / (n + 1), and answer if r - {_OTHER[card.idp3.gap]} < max_disparity, "
            "compared exactly; null never refuses.",
            "Answered: counts[g][k] += 1. Refused: give no label, and change nothing.",
        ],
    }
