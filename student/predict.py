"""A published student: one safetensors file that holds the weights, and how to build and use the model.

Prediction may refuse: with IDP3 (FairPATE, Algorithm 2) the gate answers a prediction only while the demographic
disparity of what was answered stays within its margin. The gate starts empty at every call and depends on the order.

A student may be randomised: a uniform mixture of networks, of which a prediction draws one, or a table of what to
predict for a member of a group where the network says a label. Such a student is known by the probabilities of its
predictions, and its labels are drawn from them.

A student of embedded records has the public embedding in a file beside it, which its card knows by checksum; loaded
with it, it takes records as the data set has them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fairpate.config import ModelConfig
from fairpate.data.embedding import Embedding
from fairpate.data.embedding_file import read_embedding
from fairpate.fairness.gate import filter_stream
from fairpate.nn.mixture import Mixture, draw_labels, said_labels
from fairpate.nn.models import build_architecture
from fairpate.nn.predict import predict_probabilities
from fairpate.types import GateRule, UserError

FORMAT = "fairpate.student/1"
_EMBEDDING = "embedding.safetensors"


class StudentFileError(UserError):
    """A file that is no student."""


@dataclass(frozen=True, kw_only=True)
class StudentCard:
    """What a student's file says besides its weights. ``idp3`` is the gate it predicts with by default.

    ``num_members``: of a uniform mixture of networks; None for a single network. ``mixing[a][j][k]``: the probability
    of predicting k for a member of group a where the network says j; None predicts what it says.
    ``num_training_labels``: released labels that it was trained on; None where that was not recorded. ``embedding``: of
    the embedding whose coordinates it takes, the SHA-256 of its file; None where it takes records as they are.
    """

    model: ModelConfig
    input_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    idp3: GateRule | None = None
    num_members: int | None = None
    mixing: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    num_training_labels: int | None = None
    embedding: str | None = None

    @property
    def is_randomised(self) -> bool:
        """Whether equal records may be predicted differently."""
        return self.num_members is not None or self.mixing is not None

    @property
    def needs_group(self) -> bool:
        """Whether a prediction needs the record's group."""
        return self.idp3 is not None or self.mixing is not None

    def build_network(self) -> nn.Module:
        """The network with initial weights."""

        def one() -> nn.Module:
            classes = len(self.label_names)
            return build_architecture(self.model, input_shape=self.input_shape, num_classes=classes)

        return one() if self.num_members is None else Mixture([one() for _ in range(self.num_members)])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """N predictions: ``probabilities_NC``, their argmax ``labels``, and which of them are ``answered``.

    Of a randomised student ``probabilities_NC`` says how often each label is predicted, and ``labels`` are one draw.
    """

    labels: npt.NDArray[np.int64]
    probabilities_NC: npt.NDArray[np.float32]
    answered: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Student:
    """A model with its card, and the ``embedding`` that records go through first; None: through none."""

    card: StudentCard
    network: nn.Module
    embedding: Embedding | None = None

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of one record that it takes."""
        return self.card.input_shape if self.embedding is None else self.embedding.record_shape

    def predict(
        self,
        x: Tensor,
        sensitive_features: npt.NDArray[np.int64] | None = None,
        *,
        generator: np.random.Generator | None = None,
    ) -> Prediction:
        """Labels for features (N, ...).

        With IDP3 some stay unanswered; it and a mixing by group need ``sensitive_features`` (N,). ``generator`` draws a
        randomised student's labels; None draws fresh ones.
        """
        if self.card.idp3 is not None:
            self._require_groups(sensitive_features)
        probabilities = self.probabilities(x, sensitive_features)
        labels = probabilities.argmax(axis=1)
        if self.card.is_randomised:
            draws = generator or np.random.default_rng()
            labels = draw_labels(probabilities, draws.random(len(probabilities)))
        answered = np.ones(len(labels), dtype=np.bool_)
        if self.card.idp3 is not None:
            assert sensitive_features is not None
            answered = filter_stream(
                labels,
                sensitive_features,
                rule=self.card.idp3,
                num_groups=len(self.card.group_names),
                num_classes=len(self.card.label_names),
            )
        return Prediction(labels=labels, probabilities_NC=probabilities, answered=answered)

    def probabilities(
        self, x: Tensor, sensitive_features: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.float32]:
        """How likely each label is predicted for features (N, ...), shape (N, C); a mixing by group needs groups."""
        if tuple(x.shape[1:]) != self.record_shape:
            raise ValueError(f"Expected features of shape (N, *{self.record_shape}), got {tuple(x.shape)}.")
        if self.embedding is not None:
            x = self.embedding(x)
        if self.card.mixing is None:
            probabilities: npt.NDArray[np.float32] = predict_probabilities(self.network, x).numpy()
            return probabilities
        self._require_groups(sensitive_features)
        mixing_GCC = np.array(self.card.mixing, dtype=np.float32)
        mixed: npt.NDArray[np.float32] = np.einsum(
            "nj,njk->nk", said_labels(self.network, x), mixing_GCC[sensitive_features]
        )
        return mixed

    def _require_groups(self, sensitive_features: npt.NDArray[np.int64] | None) -> None:
        if sensitive_features is None:
            raise ValueError("This student predicts by group and needs sensitive_features, a group per record.")


def save_student(student: Student, path: Path) -> None:
    """Write weights and card as one safetensors file; of a weights file that it started from, the sha256 only."""
    architecture = student.card.model.model_dump(mode="json", exclude={"weights": {"path"}})
    card = {"format": FORMAT} | asdict(student.card) | {"model": architecture}
    tensors = {name: tensor.contiguous() for name, tensor in student.network.state_dict().items()}
    card["sha256"] = _digest(card, tensors)
    save_file(tensors, path, metadata={"card": json.dumps(card)})  # several keys would be written in random order
    path.chmod(0o644)


def load_student(path: Path) -> Student:
    """Read a file of :func:`save_student`; StudentFileError if it is missing, damaged or something else.

    The embedding that its card knows is read from ``embedding.safetensors`` beside it. Of a file that says no checksum,
    only what cannot be read counts as damage.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        values = json.loads(metadata.get("card", "{}"))
        if (found := values.get("format", metadata.get("format"))) != FORMAT:
            raise StudentFileError(f"{path}: expected format {FORMAT}, found {found}.")
        student = _student(values, tensors)
        return student if student.card.embedding is None else replace(student, embedding=_embedding(student.card, path))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StudentFileError(f"{path}: not a readable student ({reason}); restore it from a copy.") from error


def _student(values: dict[str, object], tensors: dict[str, Tensor]) -> Student:
    """ValueError, KeyError, TypeError or RuntimeError for a card or weights that are not what was saved."""
    expected = values.pop("sha256", None)
    if expected not in (None, _digest(values, tensors)):
        raise ValueError("its content is not that of its checksum")
    values.pop("format")
    card = _card(values)
    network = card.build_network()
    network.load_state_dict(tensors)
    return Student(card=card, network=network.eval())


def _embedding(card: StudentCard, path: Path) -> Embedding:
    """ValueError or OSError unless the file beside ``path`` is the one that the card knows."""
    beside = path.parent / _EMBEDDING
    if hashlib.sha256(beside.read_bytes()).hexdigest() != card.embedding:
        raise ValueError(f"{beside} is not the embedding that it was trained with")
    return read_embedding(beside)


def _digest(card: dict[str, object], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the card and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(json.dumps(card, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _card(values: dict[str, object]) -> StudentCard:
    fields = {name: _tuples(value) for name, value in values.items()}
    idp3 = fields.pop("idp3")
    return StudentCard(
        **fields | {"model": ModelConfig.model_validate(fields["model"])},  # type: ignore[arg-type]
        idp3=None if idp3 is None else GateRule(**idp3),  # type: ignore[arg-type]
    )


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
