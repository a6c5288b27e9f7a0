"""Train a student on released labels, and on the public records that got none.

Everything here is post-processing of what the mechanism released: it costs no privacy. ``supervised`` uses the
answered records alone. ``pseudo_label`` adds, round by round, the records that the student of the round before is
sure of (Lee 2013). ``fixmatch`` asks that a strongly changed image gets the label that the model gives its weakly
changed self (Sohn et al. 2020, arXiv 2001.07685), with a moving average of the weights as the result. Refused records
count as unlabelled: their features are public.

Shapes: N answered records, M unlabelled ones, C classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairpate.config import AugmentConfig, StudentConfig
from fairpate.nn.augment import augment
from fairpate.nn.fit import Penalty, fit, precision_of
from fairpate.nn.models import build_model, scale_bytes, seeded_torch
from fairpate.nn.optimizer import Optimizer, epoch_learning_rate
from fairpate.nn.predict import predict_probabilities

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
