"""The published student: trained on released labels and public records, stored in one file, and its predictions.

A published student: one safetensors file that holds the weights, and how to build and use the model.

Prediction may refuse: with IDP3 (FairPATE, Algorithm 2) the gate answers a prediction only while the demographic
disparity of what was answered stays within its margin. The gate starts empty at every call and depends on the order.

A student may be randomised: a uniform mixture of networks, of which a prediction draws one, or a table of what to
predict for a member of a group where the network says a label. Such a student is known by the probabilities of its
predictions, and its labels are drawn from them.

A student of embedded records has the public embedding in a file beside it, which its card knows by checksum; loaded
with it, it takes records as the data set has them.

Train a student on released labels, and on the public records that got none.

Everything here is post-processing of what the mechanism released: it costs no privacy. ``supervised`` uses the
answered records alone. ``pseudo_label`` adds, round by round, the records that the student of the round before is
sure of (Lee 2013). ``fixmatch`` asks that a strongly changed image gets the label that the model gives its weakly
changed self (Sohn et al. 2020, arXiv 2001.07685), with a moving average of the weights as the result. Refused records
count as unlabelled: their features are public.

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


ProgressCallback = Callable[[int, int], None]
_AVERAGE_HORIZON_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class PublicRecords:
    """What a student may learn from: answered features (N, ...), their labels, other features (M, ...).

    ``labels`` are classes (N,) ``int64``, or the probabilities (N, C) ``float32`` of every class. The loss is the cross
    entropy with either; label smoothing s moves both towards the uniform distribution: (1 - s) p + s / C.
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
    """A trained model. ``on_progress(done, total)`` counts epochs over all rounds.

    Every round starts from a copy of ``initial_model``, or without one from weights of its own. ``penalty(model)``
    joins the loss of every step.

    ValueError when nothing was answered, for probabilities of other than ``num_classes`` classes, and when ``fixmatch``
    is asked for records that are not images.
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

    def new_model() -> nn.Module:
        if initial_model is not None:
            return copy.deepcopy(initial_model)
        return _new_model(records, config, num_classes, generator)

    if config.method == "fixmatch" and len(records.unlabelled_x):
        return _fixmatch(records, config, new_model(), generator, on_progress, penalty)
    return _self_training(records, config, new_model, generator, on_progress, penalty)


def _new_model(
    records: PublicRecords, config: StudentConfig, num_classes: int, generator: torch.Generator
) -> nn.Module:
    seed = int(torch.randint(2**62, (), generator=generator))
    return build_model(
        config.model, input_shape=tuple(records.answered_x.shape[1:]), num_classes=num_classes, generator_seed=seed
    )


def _self_training(
    records: PublicRecords,
    config: StudentConfig,
    new_model: Callable[[], nn.Module],
    generator: torch.Generator,
    on_progress: ProgressCallback,
    penalty: Penalty | None,
) -> nn.Module:
    """One supervised fit, then ``rounds`` more with confident pseudo-labels if the method asks for them."""
    total_rounds = 1 + (config.rounds if config.method == "pseudo_label" and len(records.unlabelled_x) else 0)
    total_epochs = total_rounds * config.fit.epochs
    x, targets = records.answered_x, records.labels
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
            x, targets = _with_pseudo_labels(model, records, config.confidence)
    return model


def _with_pseudo_labels(model: nn.Module, records: PublicRecords, confidence: float) -> tuple[Tensor, Tensor]:
    """The answered records, and the unlabelled ones that ``model`` is sure of with the label it gives them."""
    probability, label = predict_probabilities(model, records.unlabelled_x).max(dim=1)
    sure = probability >= confidence
    x = torch.cat([records.answered_x, records.unlabelled_x[sure]])
    added = label[sure]
    if records.labels.ndim == 2:
        added = F.one_hot(added, records.labels.shape[1]).to(records.labels.dtype)
    return x, torch.cat([records.labels, added])


def _fixmatch(
    records: PublicRecords,
    config: StudentConfig,
    model: nn.Module,
    generator: torch.Generator,
    on_progress: ProgressCallback,
    penalty: Penalty | None,
) -> nn.Module:
    """An epoch visits every record at least once: the answered or the others, whichever end first, start over."""
    average = _WeightAverage(model)
    optimizer = Optimizer((p for p in model.parameters() if p.requires_grad), config.fit)
    num_answered, num_unlabelled, size = len(records.labels), len(records.unlabelled_x), config.fit.batch_size
    chunk = size * config.unlabelled_ratio
    answered = _endless_batches(num_answered, size, generator)
    unlabelled = _endless_batches(num_unlabelled, chunk, generator)
    num_steps = max(math.ceil(num_answered / size), math.ceil(num_unlabelled / chunk))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    # Dropout takes no generator: torch's own state is seeded meanwhile.
    with seeded_torch(int(torch.randint(2**62, (), generator=generator))):
        for epoch in range(config.fit.epochs):
            for _ in range(num_steps):
                rows = next(unlabelled)  # before the answered ones: the order of draws is part of a seed's meaning
                with precision_of(config.fit, records.unlabelled_x.device):
                    loss = _fixmatch_loss(model, records, next(answered), rows, config, generator)
                    if penalty is not None:
                        loss = loss + penalty(model)
                if not math.isfinite(loss.item()):
                    raise ValueError(f"The student diverged in epoch {epoch}; lower student.fit.learning_rate.")
                loss.backward()
                optimizer.step_from_backward(epoch_learning_rate(config.fit, epoch))
                average.update()
            on_progress(epoch + 1, config.fit.epochs)
    average.copy_to_model()
    return model.eval()


def _fixmatch_loss(
    model: nn.Module,
    records: PublicRecords,
    answered: Tensor,
    unlabelled: Tensor,
    config: StudentConfig,
    generator: torch.Generator,
) -> Tensor:
    answered_x = _changed(records.answered_x[answered], config.fit.augment, generator)
    weak_x = _changed(records.unlabelled_x[unlabelled], config.fit.augment, generator)
    strong_x = _changed(records.unlabelled_x[unlabelled], config.strong_augment, generator)
    with torch.no_grad():
        probability, label = model(weak_x).softmax(dim=1).max(dim=1)
    sure = probability >= config.confidence
    logits = model(torch.cat([answered_x, strong_x[sure]]).contiguous(memory_format=torch.channels_last))
    supervised = F.cross_entropy(
        logits[: len(answered)], records.labels[answered], label_smoothing=config.fit.label_smoothing
    )
    # The sum over confident records is divided by all of them: a student that is sure of little follows little.
    consistency = F.cross_entropy(logits[len(answered) :], label[sure], reduction="sum") / len(unlabelled)
    return supervised + config.unlabelled_weight * consistency


def _changed(x: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    return augment(scale_bytes(x), config, generator).contiguous(memory_format=torch.channels_last)


def _endless_batches(total: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(total, generator=generator).split(batch_size)


class _WeightAverage:
    """Exponential moving average of a model's parameters, warmed up so that early steps do not linger."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._average = [parameter.detach().clone() for parameter in self._parameters]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        self._steps += 1
        # A plain mean, until its weights would fall below those of the moving one.
        weight = max(1 / _AVERAGE_HORIZON_STEPS, 1 / self._steps)
        torch._foreach_lerp_(self._average, self._parameters, weight)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.copy_(average)
