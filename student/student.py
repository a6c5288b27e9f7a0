"""Train, store and use the published student: a model of public records and released labels.

Training and prediction are post-processing of what the mechanism released, so they cost no privacy. ``supervised``
trains on the answered records alone. ``pseudo_label`` adds, round by round, the records that the previous round's
student is sure of (Lee 2013). ``fixmatch`` requires that a strongly augmented image gets the label that the model gives
to a weakly augmented version (Sohn et al. 2020, arXiv 2001.07685), and returns a moving average of the weights. Refused
records count as unlabelled: their features are public.

A student is one safetensors file with weights and card. A prediction may be refused: with IDP3 (FairPATE, Algorithm 2)
the gate answers only while the demographic disparity of the answers stays within its margin; it starts empty at every
call and depends on the order. A student may be randomised: a uniform mixture of networks, one of them drawn for each
prediction, or a table of the labels to predict for a member of a group where the network predicts a label. Its labels
are drawn from the probabilities of its predictions. A student of embedded records has the public embedding in a file
next to it, which its card names by checksum; with it, the student takes records as the data set has them.

Shapes: N answered records, M unlabelled ones, C classes.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from fairpate.config import AugmentConfig, StudentConfig
from fairpate.data.embedding import Embedding, read_embedding
from fairpate.fairness.gate import filter_stream
from fairpate.nn.fit import (
    Mixture,
    Optimizer,
    Penalty,
    augment,
    draw_labels,
    epoch_learning_rate,
    fit,
    precision_of,
    predict_probabilities,
    said_labels,
)
from fairpate.nn.models import build_architecture, build_model, scale_bytes, seeded_torch
from student.card import FORMAT, StudentCard, content_digest, embedding_beside, read_student_file, readable


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """N predictions: ``probabilities_NC``, their argmax ``labels``, and which of them are ``answered``.

    For a randomised student ``probabilities_NC`` is how often each label is predicted, and ``labels`` are one draw.
    """

    labels: npt.NDArray[np.int64]
    probabilities_NC: npt.NDArray[np.float32]
    answered: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Student:
    """A model with its card, and the ``embedding`` that is applied to records first, or None."""

    card: StudentCard
    network: nn.Module
    embedding: Embedding | None = None

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record that it takes."""
        return self.card.input_shape if self.embedding is None else self.embedding.record_shape

    def predict(
        self,
        x: Tensor,
        sensitive_features: npt.NDArray[np.int64] | None = None,
        *,
        generator: np.random.Generator | None = None,
    ) -> Prediction:
        """Predict labels for features (N, ...).

        With IDP3 some predictions are not answered; IDP3 and a mixing by group need ``sensitive_features`` (N,), the
        groups. ``generator`` draws the labels of a randomised student; None: a fresh one.
        """
        # Asked here too: `probabilities` needs groups only where predictions are mixed.
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
        """Return the probability that each label is predicted, shape (N, C); a mixing by group needs groups."""
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
    """Write weights and card as one safetensors file. The card names the file of initial weights by sha256 only."""
    architecture = student.card.model.model_dump(mode="json", exclude={"weights": {"path"}})
    card = {"format": FORMAT} | asdict(student.card) | {"model": architecture}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in student.network.state_dict().items()}
    card["sha256"] = content_digest(card, {name: tensor.numpy() for name, tensor in tensors.items()})
    # Several keys would be written in random order.
    path.write_bytes(save(tensors, metadata={"card": json.dumps(card)}))
    # The model is public; a strict umask would hide it from the processes that serve it.
    path.chmod(0o644)


def load_student(path: Path) -> Student:
    """Read a file of :func:`save_student`, with the embedding that its card names.

    StudentFileError if a file is missing or damaged, or if its weights do not fit the network.
    """
    with readable(path):
        card, weights = read_student_file(path)
        network = build_network(card)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        embedding = None if card.embedding is None else read_embedding(embedding_beside(path))
        return Student(card=card, network=network.eval(), embedding=embedding)


def build_network(card: StudentCard) -> nn.Module:
    """Build the network of ``card`` with initial weights."""

    def one() -> nn.Module:
        return build_architecture(card.model, input_shape=card.input_shape, num_classes=len(card.label_names))

    return one() if card.num_members is None else Mixture([one() for _ in range(card.num_members)])


ProgressCallback = Callable[[int, int], None]
_AVERAGE_HORIZON_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class PublicRecords:
    """The training records of a student: answered features (N, ...), their labels, unlabelled features (M, ...).

    ``labels`` are classes (N,) ``int64``, or the probabilities (N, C) ``float32`` of every class. The loss is the cross
    entropy in both cases; label smoothing s moves both towards the uniform distribution: (1 - s) p + s / C.
    """

    answered_x: Tensor
    labels: Tensor
    unlabelled_x: Tensor

    def __post_init__(self) -> None:
        if len(self.answered_x) != len(self.labels):
            raise ValueError(f"Expected one label per record, got {len(self.labels)} for {len(self.answered_x)}.")


def train_student(
    records: PublicRecords,
    config: StudentConfig,
    *,
    num_classes: int,
    generator: torch.Generator,
    on_progress: ProgressCallback = lambda *_: None,
    initial_model: nn.Module | None = None,
    penalty: Penalty | None = None,
) -> nn.Module:
    """Return a trained model. ``on_progress(done, total)`` counts epochs over all rounds.

    Every round starts from a copy of ``initial_model``, or, without one, from new random weights. ``penalty(model)`` is
    added to the loss of every step.

    ValueError if no query was answered, for probabilities of other than ``num_classes`` classes, and for ``fixmatch``
    on records that are not images.
    """
    if not len(records.labels):
        raise ValueError(
            "No query was answered, so there is nothing to learn from; lower the threshold of the confidence check, "
            "raise aggregator.gate.max_disparity, or ask more queries."
        )
    if records.labels.ndim == 2 and records.labels.shape[1] != num_classes:
        raise ValueError(f"Expected chances of {num_classes} classes, got {records.labels.shape[1]}.")
    if config.method == "fixmatch" and records.answered_x.ndim != 4:
        raise ValueError("student.method: fixmatch changes images; use pseudo_label for a table.")
    x, targets, unlabelled_x = records.answered_x, records.labels, records.unlabelled_x

    def new_model() -> nn.Module:
        if initial_model is not None:
            # A copy: each round starts from the same weights.
            return copy.deepcopy(initial_model)
        seed = int(torch.randint(2**62, (), generator=generator))
        shape = tuple(records.answered_x.shape[1:])
        return build_model(config.model, input_shape=shape, num_classes=num_classes, generator_seed=seed)

    if config.method == "fixmatch" and len(unlabelled_x):
        return _fixmatch(records, config, new_model(), generator, on_progress, penalty)
    # One supervised fit, then more rounds with confident pseudo-labels if the method asks for them.
    total_rounds = 1 + (config.rounds if config.method == "pseudo_label" and len(unlabelled_x) else 0)
    total_epochs = total_rounds * config.fit.epochs
    for done in range(total_rounds):
        model = new_model()
        before = done * config.fit.epochs
        fit(
            model,
            x,
            targets,
            config.fit,
            generator=generator,
            on_epoch=lambda epoch, _, before=before: on_progress(before + epoch + 1, total_epochs),  # type: ignore[misc]
            penalty=penalty,
        )
        if done + 1 < total_rounds:
            probability, label = predict_probabilities(model, unlabelled_x).max(dim=1)
            sure = probability >= config.confidence
            added = label[sure]
            if records.labels.ndim == 2:
                added = F.one_hot(added, records.labels.shape[1]).to(records.labels.dtype)
            # From the released labels anew in each round: a label that this round's student doubts is dropped.
            x = torch.cat([records.answered_x, unlabelled_x[sure]])
            targets = torch.cat([records.labels, added])
    return model


def _fixmatch(
    records: PublicRecords,
    config: StudentConfig,
    model: nn.Module,
    generator: torch.Generator,
    on_progress: ProgressCallback,
    penalty: Penalty | None,
) -> nn.Module:
    """Train by FixMatch. An epoch visits every record at least once: the shorter of the two streams starts over."""

    def endless(total: int, batch_size: int) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(total, generator=generator).split(batch_size)

    def augmented(x: Tensor, how: AugmentConfig) -> Tensor:
        return augment(scale_bytes(x), how, generator).contiguous(memory_format=torch.channels_last)

    size, chunk = config.fit.batch_size, config.fit.batch_size * config.unlabelled_ratio
    answered, unlabelled = endless(len(records.labels), size), endless(len(records.unlabelled_x), chunk)
    num_steps = max(math.ceil(len(records.labels) / size), math.ceil(len(records.unlabelled_x) / chunk))
    optimizer = Optimizer((p for p in model.parameters() if p.requires_grad), config.fit)
    parameters: list[Tensor] = list(model.parameters())
    average, steps = [parameter.detach().clone() for parameter in parameters], 0
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    # Dropout takes no generator: torch's own state is seeded meanwhile.
    with seeded_torch(int(torch.randint(2**62, (), generator=generator))):
        for epoch in range(config.fit.epochs):
            for _ in range(num_steps):
                # The order of these draws is part of the meaning of a seed.
                others, rows = next(unlabelled), next(answered)
                with precision_of(config.fit, records.unlabelled_x.device):
                    answered_x = augmented(records.answered_x[rows], config.fit.augment)
                    weak_x = augmented(records.unlabelled_x[others], config.fit.augment)
                    strong_x = augmented(records.unlabelled_x[others], config.strong_augment)
                    # No gradient: a pseudo-label is a target, which the loss must not move towards the prediction.
                    with torch.no_grad():
                        probability, label = model(weak_x).softmax(dim=1).max(dim=1)
                    sure = probability >= config.confidence
                    both_x = torch.cat([answered_x, strong_x[sure]]).contiguous(memory_format=torch.channels_last)
                    logits = model(both_x)
                    targets, smoothing = records.labels[rows], config.fit.label_smoothing
                    loss = F.cross_entropy(logits[: len(rows)], targets, label_smoothing=smoothing)
                    # The sum over confident records is divided by all of them, so that a student that is sure of few
                    # records learns little from them.
                    consistency = F.cross_entropy(logits[len(rows) :], label[sure], reduction="sum") / len(others)
                    loss = loss + config.unlabelled_weight * consistency
                    if penalty is not None:
                        loss = loss + penalty(model)
                if not math.isfinite(loss.item()):
                    raise ValueError(f"The student diverged in epoch {epoch}; lower student.fit.learning_rate.")
                loss.backward()
                optimizer.step_from_backward(epoch_learning_rate(config.fit, epoch))
                steps += 1
                # A plain mean at first, so that early weights do not linger; then an exponential moving average.
                weight = max(1 / _AVERAGE_HORIZON_STEPS, 1 / steps)
                with torch.no_grad():
                    torch._foreach_lerp_(average, parameters, weight)
            on_progress(epoch + 1, config.fit.epochs)
    with torch.no_grad():
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.copy_(mean)
    return model.eval()
