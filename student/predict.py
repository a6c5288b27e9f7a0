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

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fairpate.data.embedding import Embedding
from fairpate.data.embedding_file import read_embedding
from fairpate.fairness.gate import filter_stream
from fairpate.nn.mixture import Mixture, draw_labels, said_labels
from fairpate.nn.models import build_architecture
from fairpate.nn.predict import predict_probabilities
from student.card import (
    FORMAT,
    StudentCard,
    content_digest,
    embedding_beside,
    read_student_file,
    readable,
)


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
    tensors = {name: tensor.cpu().contiguous() for name, tensor in student.network.state_dict().items()}
    card["sha256"] = content_digest(card, {name: tensor.numpy() for name, tensor in tensors.items()})
    # Several keys would be written in random order.
    path.write_bytes(save(tensors, metadata={"card": json.dumps(card)}))
    path.chmod(0o644)


def load_student(path: Path) -> Student:
    """Read a file of :func:`save_student`, with the embedding that its card knows; StudentFileError unless it is whole.

    As :func:`student.card.read_card`, and besides for weights that the network has no place for.
    """
    with readable(path):
        card, weights = read_student_file(path)
        network = build_network(card)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        embedding = None if card.embedding is None else read_embedding(embedding_beside(path))
        return Student(card=card, network=network.eval(), embedding=embedding)


def build_network(card: StudentCard) -> nn.Module:
    """The network of ``card`` with initial weights."""

    def one() -> nn.Module:
        return build_architecture(card.model, input_shape=card.input_shape, num_classes=len(card.label_names))

    return one() if card.num_members is None else Mixture([one() for _ in range(card.num_members)])
