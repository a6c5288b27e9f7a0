"""How a student learns from released labels of public records: by training, behind a demographic-parity filter.

All of it is post-processing of what a mechanism released, and costs no privacy.

Shapes: N records, C classes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpate.config import flattened
from fairpate.data import Dataset, Split
from fairpate.fairness.gate import filter_stream
from fairpate.lazy import Later, torch
from fairpate.methods.base import Method, Stream, Training, determining_values, torch_generator
from fairpate.types import GateRule, LabelledSet, UserError

if TYPE_CHECKING:
    from fairpate.nn import models
    from student import student as students
else:  # both import torch, which readers of votes and configurations do not need
    models, students = Later("fairpate.nn.models"), Later("student.student")

_MAX_STUDENT_THREADS = 4
_REFUSING = ("threshold", "max_disparity")
"""The last names of settings by which a label is refused: a threshold of votes, and the margin of a gate or filter."""


class NoLabelsError(UserError, ValueError):
    """Raised if every label was refused, so that a student has nothing to learn from; what was released is charged."""


def fit_student(method: Method, training: Training, labelled: LabelledSet, **options: Any) -> torch.nn.Module:
    """Train the student of ``method`` on released labels and return it. Further keyword arguments, ``options``, are
    passed to :func:`student.student.train_student`. NoLabelsError if there are no labels."""
    require_labels(method, labelled)
    config, dataset, threads = method.student_training, training.dataset, torch.get_num_threads()
    # Small dense layers are slower on several threads.
    torch.set_num_threads(min(threads, _MAX_STUDENT_THREADS) if config.model.name in models.CONVOLUTIONAL else 1)
    try:
        with training.reporter.stage("student") as advance:
            return students.train_student(
                public_records(dataset.public, labelled),
                config,
                num_classes=dataset.num_classes,
                augmentation=method.augment,
                generator=torch_generator(method.seed, Stream.STUDENT),
                on_progress=advance,
                **options,
            )
    finally:
        torch.set_num_threads(threads)


def require_labels(method: Method, labelled: LabelledSet) -> None:
    """Raise NoLabelsError, which names the settings of ``method`` that refuse labels, if there is none to learn
    from."""
    if len(labelled.labels):
        return
    # The reject option of the published model has a margin too, which labels do not meet.
    said = [
        f"{field}: {value}"
        for field, value in flattened(determining_values(method)).items()
        if field.rpartition(".")[2] in _REFUSING and not field.startswith("student.") and value not in (None, -math.inf)
    ]
    raise NoLabelsError(
        f"{', '.join(said) or 'method: ' + method.method}: every label was refused, so a student has nothing to learn "
        "from. Lower the threshold, raise max_disparity or ask more queries, in a new run folder (--out); what was "
        "released here stays charged."
    )


def unread_beside_rule(method: Method) -> dict[str, str]:
    """Return the settings of a student's training, each with the setting that disables it, for a method that publishes
    a fitted linear rule itself. None are disabled if the rule labels records to learn from
    (``public_data.self_label``)."""
    if method.public_data.self_label is not None:
        return {}
    return dict.fromkeys(("student.fit", "training", "augment"), "student.model.name")


def passing(labelled: LabelledSet, rule: GateRule, dataset: Dataset) -> LabelledSet:
    """Return the labels that a demographic-parity gate with this ``rule`` accepts, in their order; the gate starts
    without earlier labels."""
    # It reads only released labels and public groups, so it is post-processing: labels that it drops stay charged.
    sizes = {"num_groups": dataset.num_groups, "num_classes": dataset.num_classes}
    return labelled.take(filter_stream(labelled.labels, labelled.groups, rule=rule, **sizes))


def public_records(public: Split, labelled: LabelledSet) -> students.PublicRecords:
    """Return the public features with the released labels or class probabilities.

    True labels in ``public`` are not read.
    """
    answered = torch.tensor(public.rows_of(labelled.record_ids), dtype=torch.int64)
    is_answered = torch.zeros(len(public), dtype=torch.bool)
    is_answered[answered] = True
    labels = torch.from_numpy(labelled.labels if labelled.chances is None else labelled.chances.astype(np.float32))
    return students.PublicRecords(answered_x=public.x[answered], labels=labels, unlabelled_x=public.x[~is_answered])
