"""The published model of a run: taught by released labels, described, stored and read back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fairpate.app.rundir import RunDirectory, RunDirectoryError
from fairpate.app.seeds import Stream, torch_generator
from fairpate.app.terminal.progress import Reporter
from fairpate.config import ModelConfig, PublishedConfig, StudentConfig
from fairpate.data import Dataset, Split
from fairpate.later import torch
from fairpate.nn.models import is_convolutional
from fairpate.types import LabelledSet
from student.card import StudentCard, StudentFileError
from student.predict import Student, load_student
from student.train import PublicRecords, train_student

if TYPE_CHECKING:
    from torch import nn

_MAX_STUDENT_THREADS = 4


def fit_student(
    config: StudentConfig, dataset: Dataset, labelled: LabelledSet, reporter: Reporter, *, seed: int, **options: Any
) -> nn.Module:
    """A student of released labels; ``options`` as :func:`student.train.train_student` takes them."""
    with reporter.stage("student") as advance, _torch_threads(config.model):
        return train_student(
            public_records(dataset.public, labelled),
            config,
            num_classes=dataset.num_classes,
            generator=torch_generator(seed, Stream.STUDENT),
            on_progress=advance,
            **options,
        )


@contextmanager
def _torch_threads(model: ModelConfig) -> Iterator[None]:
    """One thread for small dense layers, which lose by sharing; a few for convolutions. Restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _MAX_STUDENT_THREADS) if is_convolutional(model) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def public_records(public: Split, labelled: LabelledSet) -> PublicRecords:
    """Features of the public split with the released labels, or their chances; its own labels are not read."""
    row_of = {record_id: row for row, record_id in enumerate(public.record_id)}
    answered = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    is_answered = torch.zeros(len(public), dtype=torch.bool)
    is_answered[answered] = True
    labels = torch.from_numpy(labelled.labels if labelled.chances is None else labelled.chances.astype(np.float32))
    return PublicRecords(answered_x=public.x[answered], labels=labels, unlabelled_x=public.x[~is_answered])


def student_card(config: PublishedConfig, dataset: Dataset) -> StudentCard:
    """What a user of the published model must know."""
    return StudentCard(
        model=config.model,
        input_shape=tuple(dataset.public.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        idp3=config.idp3,
    )


def read_student(run: RunDirectory, *, is_free: bool) -> Student:
    """The published student, of coordinates where it has an embedding.

    RunDirectoryError for a damaged file; ``is_free``: training it again costs no privacy.
    """
    try:
        return replace(load_student(run.student), embedding=None)
    except StudentFileError as error:
        remedy = (
            "Or delete it and give the same command again: it is then trained again from the released labels, at no "
            "privacy cost."
            if is_free
            else "It cannot be made again: another training would be a second release of the same records. Without a "
            "copy, start a new run folder with --out and count both epsilons."
        )
        raise RunDirectoryError(f"{error} {remedy}") from error
