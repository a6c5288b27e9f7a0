"""Read the card (the description of a student) and the weights from a student's file without building the network.

The file's checksum covers card and weights, so that a file whose card can be read is complete.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError, safe_open

from fairpate.config import ModelConfig
from fairpate.encoders import PublicEncoder
from fairpate.types import AnswerRule, GateRule, UserError

FORMAT = "fairpate.student/1"
EMBEDDING_FILE = "embedding.safetensors"
"""The name of the file with a student's embedding, in the same folder as the student's file."""
Weights = Mapping[str, npt.NDArray[np.generic]]
_UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


class StudentFileError(UserError):
    """The file of a student is missing or damaged, or is another kind of file."""


@dataclass(frozen=True, kw_only=True)
class StudentCard:
    """The description of a student, stored in its file.

    ``idp3`` is the rule of the demographic-parity gate that refuses predictions; None if none is refused. ``answers``
    is the rule by which predictions of too little confidence are refused, before that gate; None if none is.
    ``num_members`` is the number of networks if each label is predicted by one of them, drawn at random; None for a
    single network. ``mixing[a][j][k]`` is the probability of predicting k for a record of group a if the network
    predicts j; None: the network's prediction is used. ``num_training_labels`` is the number of released labels on
    which the student was trained; None if not recorded. ``embedding`` is the SHA-256 of the file of the embedding that
    is applied to records first; None without an embedding. ``encoder`` describes the public network that computes the
    student's records from pictures; None if they are not vectors of an encoder.
    """

    model: ModelConfig
    input_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    idp3: GateRule | None = None
    answers: AnswerRule | None = None
    num_members: int | None = None
    mixing: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    num_training_labels: int | None = None
    embedding: str | None = None
    encoder: PublicEncoder | None = None
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        groups, classes = len(self.group_names), len(self.label_names)
        # A mixing of another shape may fail for some records alone, and the failure would tell who is there.
        if self.mixing is not None and np.shape(self.mixing) != (groups, classes, classes):
            raise ValueError(f"Expected mixing of shape {(groups, classes, classes)}, got {np.shape(self.mixing)}.")
        if self.answers is not None and [len(row) for row in self.answers.thresholds_GC] != [classes] * groups:
            raise ValueError(f"Expected thresholds of answers of shape {(groups, classes)}.")

    @property
    def is_randomised(self) -> bool:
        """True if equal records may get different predictions."""
        return self.num_members is not None or self.mixing is not None

    @property
    def needs_group(self) -> bool:
        """True if a prediction needs the record's group."""
        by_group = self.answers is not None and self.answers.needs_group
        return self.idp3 is not None or self.mixing is not None or by_group


def read_card(path: Path) -> StudentCard:
    """Return the card, the description of a student, from the student's file ``path``. StudentFileError if this is not
    a student's file."""
    with readable(path):
        return read_student_file(path)[0]


def read_student_file(path: Path) -> tuple[StudentCard, Weights]:
    """Return the card and the weights in a student's file.

    Call this inside :func:`readable`, which converts errors to StudentFileError. If the card names an embedding, the
    embedding's file must be next to the student's. A file without a checksum is accepted if it can be read.
    """
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    values = json.loads(metadata.get("card", "{}"))
    # The format is in the card; a file without a card may name its own in the metadata.
    if (found := values.get("format", metadata.get("format"))) != FORMAT:
        raise StudentFileError(
            f"{path}: expected a student of format {FORMAT}, found {found}; give the student.safetensors of a run."
        )
    expected = values.pop("sha256", None)
    if expected not in (None, content_digest(values, weights)):
        raise ValueError("its content does not match its checksum")
    del values["format"]
    card = _validator().validate_python(values)
    if card.embedding is not None:
        beside = path.with_name(EMBEDDING_FILE)
        if hashlib.sha256(beside.read_bytes()).hexdigest() != card.embedding:
            raise ValueError(f"{beside} is not the embedding that the student was trained with")
    return card, weights


@cache
def _validator() -> TypeAdapter[StudentCard]:
    """Return what reads a card; building it takes longer than reading."""
    return TypeAdapter(StudentCard)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside the block, convert errors of reading the student's file ``path`` (missing, damaged or of another kind) to
    StudentFileError."""
    try:
        yield
    except _UNREADABLE as error:
        if not path.exists():
            raise StudentFileError(f"{path}: not found; give the student.safetensors of a run.") from error
        reason = " ".join(str(error).split())
        raise StudentFileError(
            f"{path}: this file is not a readable student ({reason}); restore it from a copy."
        ) from error


def content_digest(card: Mapping[str, object], weights: Weights) -> str:
    """Return the SHA-256 of a student's card and of the name, type, shape and bytes of every array of weights."""
    digest = hashlib.sha256(json.dumps(card, sort_keys=True).encode())
    for name, array in sorted(weights.items()):
        # Types have torch's names, because torch writes these files.
        digest.update(json.dumps([name, f"torch.{array.dtype}", list(array.shape)]).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
