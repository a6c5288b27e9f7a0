"""The data set that a run is trained on and the student that it publishes: recorded, read back and measured.

A configuration names a data set; a data set that was given from Python has no name that could be looked up. So the run
records the facts of the data set that it read in ``data.json``, next to the configuration. All that describes the run
or reads its data set again uses this record.

A published model is measured on the test split, and with IDP3 also in other orders, on which its refusals
depend. Nothing here touches private records to learn from them, so it costs no privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.config import DataConfig, EvaluationConfig
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import without_order
from fairpate.data.embedding import EmbeddingFileError, placed, read_embedding
from fairpate.data.registry import load_at_site
from fairpate.methods.base import Stream, stream_seed
from fairpate.report.metrics import Evaluation, RejectOptionSpread, evaluate, reject_option_spread, shown_records
from fairpate.run.context import RunDirectory, RunDirectoryError, changed_fields, read_json, write_json, write_text
from fairpate.types import GateRule, Unit, restored
from student.card import StudentCard, StudentFileError, read_card

if TYPE_CHECKING:
    from fairpate.methods.base import Method
    from student.student import Student

_GIVEN = "a data set that was given from Python"


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The public facts of a data set: its name, kind, names of labels and groups, and the shape of one record.

    ``given_from_python``: the caller handed the records in, and no name leads to them. ``unit``: what is protected as a
    whole.
    """

    name: str
    kind: str
    record_shape: tuple[int, ...]
    label_names: tuple[str, ...]
    group_names: tuple[str, ...]
    sensitive_attribute: str
    given_from_python: bool
    unit: Unit


def with_given_data(config: Method, dataset: Dataset) -> Method:
    """``config`` with the name of the given data set and without the data options, which were not read."""
    return config.model_copy(update={"data": DataConfig(name=dataset.name)})


def record_data(run: RunDirectory, dataset: Dataset, *, given_from_python: bool) -> None:
    """Record the data set that ``run`` is trained on. If the folder has a record already, require that it is the same.

    The records of a data set that was given are recognised by a digest, which is private. RunDirectoryError for others.
    """
    found = recorded_data(run)
    now = DataRecord(
        name=dataset.name,
        kind=dataset.kind,
        record_shape=tuple(dataset.private.x.shape[1:]),
        label_names=dataset.label_names,
        group_names=dataset.group_names,
        sensitive_attribute=dataset.sensitive_attribute,
        given_from_python=given_from_python,
        unit=dataset.unit,
    )
    if found is not None:
        if not given_from_python:
            require_data_by_name(run)
        if changes := changed_fields(asdict(found), asdict(now)):
            raise RunDirectoryError(
                f"{run.root}: was trained on another data set ({'; '.join(changes.values())}); restore the data set, "
                "or give another folder with --out."
            )
    if given_from_python:
        digest, path = _digest(dataset), run.private / "data.sha256"
        if not path.exists():
            write_text(path, digest + "\n", private=True)
        elif path.read_text(encoding="utf-8").strip() != digest:
            raise RunDirectoryError(
                f"{run.root}: was trained on other records than those given now; give those, or another folder (out)."
            )
    if found is None:
        if run.student.exists():  # the record was lost, and the student may be of other data
            require_student_of(run, now, read_card(run.student))
        write_json(run.data, asdict(now))


def load_for(run: RunDirectory, data: DataConfig, load: Callable[[DataConfig], Dataset] = load_data) -> Dataset:
    """The data set that ``data`` names, embedded if ``run`` stores an embedding.

    RunDirectoryError if the embedding is damaged, or missing although the student reads its coordinates.
    """
    if load is load_data and run.journal.exists() and run.student.exists():
        # Of a model that was learned from several sites' sum: no private record is here, and none is needed any more.
        load = partial(load_at_site, has_private=False)
    if data.embedding is not None and run.embedding.exists():
        try:
            # Placed by the embedding that is kept: one that is fitted again may have other axes.
            return placed(load(data.model_copy(update={"embedding": None})), read_embedding(run.embedding))
        except EmbeddingFileError as error:
            raise RunDirectoryError(str(error)) from error
    # Fitted again it may have other axes, and the student's weights belong to the old ones.
    if data.embedding is not None and run.student.exists():
        raise RunDirectoryError(
            f"{run.embedding}: gone, although {run.student} reads its coordinates; restore it from a copy, or start a "
            "new run folder with --out."
        )
    return load(data)


def as_trained(run: RunDirectory, config: Method, dataset: Dataset) -> Dataset:
    """``dataset`` as the method reads it. If the attribute alone is protected, records get an order and names that do
    not reveal it.

    The order's key is drawn once per run and stored in ``private/``. With seeded noise it is derived from the seed.
    """
    if not (config.protects_attribute_only and config.is_private):
        return dataset
    path = run.private / "order.key"
    if config.is_seeded:
        # A seeded run is not private anyway, and can be repeated on any machine.
        secret = stream_seed(config.seed, Stream.ORDER_OF_RECORDS).to_bytes(8, "little")
    else:
        if not path.exists():
            if run.receipt.exists():
                raise RunDirectoryError(
                    f"{path}: is gone, although a release of this run read the records in its order; restore it from a "
                    "copy, or start a new run folder with --out."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, secrets.token_hex(32) + "\n", private=True)
        secret = bytes.fromhex(path.read_text(encoding="utf-8").strip())
    private = without_order(dataset.private, seed=config.seed, secret=secret)
    # The source is left out: it has the records in another order.
    return replace(dataset, private=private, source=None)


def recorded_data(run: RunDirectory) -> DataRecord | None:
    """The recorded facts of the run's data set; None if there are none. RunDirectoryError if damaged."""
    if not run.data.is_file():
        return None
    try:
        return restored(DataRecord, read_json(run.data))
    except TypeError as error:
        raise RunDirectoryError(f"{run.data}: damaged ({error}); restore it from a copy.") from error


def require_data(run: RunDirectory) -> DataRecord:
    """The result of :func:`recorded_data`. RunDirectoryError if nothing is recorded."""
    record = recorded_data(run)
    if record is None:
        raise RunDirectoryError(
            f"{run.data}: missing, so it is not known what this run was trained on; give the command of the run again, "
            "which records it and trains nothing anew."
        )
    return record


def require_data_by_name(run: RunDirectory) -> None:
    """Raise RunDirectoryError if the run was trained on records that cannot be loaded by name."""
    record = recorded_data(run)
    if record is not None and record.given_from_python:
        raise RunDirectoryError(
            f"{run.root}: was trained on {record.name!r}, {_GIVEN}; it cannot be loaded by its name, so "
            "continue this run from Python."
        )


def require_student_of(run: RunDirectory, record: DataRecord, student: StudentCard) -> None:
    """Raise RunDirectoryError if the run's student was trained on other data than ``record`` describes."""
    words = ("label_names", "group_names", "sensitive_attribute")
    differing = [name for name in words if getattr(record, name) != getattr(student, name)]
    if record.record_shape != student.input_shape:
        differing.append("record_shape")
    if differing:
        raise RunDirectoryError(
            f"{run.student}: was not trained on {record.name}, it differs in {', '.join(differing)}; restore the "
            "folder, or start a new one."
        )


def _digest(dataset: Dataset) -> str:
    """A digest of all records in order. It is private, because it would confirm a guess about the records."""
    # Test records given with votes made elsewhere, where no record is private, may be named later.
    if not len(dataset.private):
        dataset = replace(dataset, test=dataset.private)
    digest = hashlib.sha256()
    for split in dataset.splits.values():
        # JSON of names and shape, name by name: where records do not fit into memory, a list of names may not.
        digest.update(b"[[")
        for row, name in enumerate(split.record_id):
            digest.update(f"{', ' if row else ''}{json.dumps(name)}".encode())
        digest.update(f"], {json.dumps(list(split.x.shape))}]".encode())
        for values in (split.x, split.y, split.z):
            digest.update(np.ascontiguousarray(values.numpy()).data)
        # Only where they say more than the names of records.
        together = {"unit_id": split.unit_id, "person_id": split.person_id}
        if others := {name: list(ids) for name, ids in together.items() if len(ids) and ids != split.record_id}:
            digest.update(json.dumps(others).encode())
    return digest.hexdigest()


def read_student(run: RunDirectory, *, is_free: bool) -> Student:
    """The published student, with the embedding that it reads, if any.

    RunDirectoryError for a damaged file; ``is_free``: training it again costs no privacy.
    """
    from student.student import load_student  # with torch, which most readers of a run do not need

    try:
        # Records are placed when they are loaded (:func:`load_for`): the model gets coordinates.
        return replace(load_student(run.student), embedding=None)
    except StudentFileError as error:
        remedy = (
            "Or delete it and give the same command again: it is then trained again from the released labels, at no "
            "privacy cost."
            if is_free
            else "It cannot be trained again: another training would be a second release of the same records. Without "
            "a copy, start a new run folder with --out and count both epsilons."
        )
        raise RunDirectoryError(f"{error} {remedy}") from error


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Metrics of the student by name, the headline first. With IDP3 they include the spread over orders of the test
    records.

    ``measured_N`` marks the test records that the headline's accuracy is over.
    """

    evaluations: dict[str, Evaluation]
    measured_N: npt.NDArray[np.bool_]
    reject_option: RejectOptionSpread | None = None

    @property
    def headline(self) -> Evaluation:
        """The evaluation of the student as it predicts."""
        return next(iter(self.evaluations.values()))

    def to_json(self) -> dict[str, Any]:
        """The headline's metrics, and with IDP3 also those without refusals."""
        values = self.headline.to_json()
        if self.reject_option is not None:
            unrefused = self.evaluations["student without refusals"]
            values |= {"without_refusals": unrefused.to_json(), "orders": self.reject_option.to_json()}
        return values


def assess(student: Student, dataset: Dataset, settings: EvaluationConfig, *, seed: int) -> Assessment:
    """Measure the student on the test split: as it predicts, and with IDP3 also unrefused and in other orders.

    What rests on fewer than ``settings.least_cell`` test records of a group, or of a group and class, is left out. A
    randomised student is measured by expectation, but where IDP3 refuses: that depends on the labels drawn.
    """
    test, rule, least_cell = dataset.test, student.card.idp3, settings.least_cell
    groups, persons = test.z.numpy(), test.person_N
    prediction = student.predict(test.x, groups, generator=_generator(seed, Stream.PREDICTION))
    expected = prediction.probabilities_NC if student.card.is_randomised else prediction.labels

    def measure(
        predictions: npt.NDArray[Any],
        answered_N: npt.NDArray[np.bool_],
        rule: GateRule | None = None,
        apart_N: npt.NDArray[np.bool_] | None = None,
    ) -> Evaluation:
        measured = evaluate(
            predictions,
            labels_N=test.y.numpy(),
            groups_N=groups,
            answered_N=answered_N,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            # A fresh one for each measurement: an interval does not depend on what else was measured before.
            generator=_generator(seed, Stream.BOOTSTRAP),
            rule=rule,
            persons_N=persons,
            least_cell=least_cell,
            apart_N=apart_N,
        )
        return replace(measured, metrics=settings.metrics, fair_at=settings.rule)

    kept = shown_records(
        groups, test.y.numpy(), prediction.answered, least=least_cell, num_groups=dataset.num_groups, persons_N=persons
    ).kept_N
    # Refusals depend on the labels drawn, so that with a rule these labels are measured, not their expectation.
    headline = measure(expected if rule is None else prediction.labels, prediction.answered, rule)
    measured = prediction.answered & kept
    if rule is None:
        return Assessment(evaluations={"student": headline}, measured_N=measured)
    # Both evaluations are published, so their difference may show no small cell either.
    unrefused = measure(expected, np.ones(len(test), dtype=np.bool_), apart_N=~prediction.answered)
    spread = reject_option_spread(
        prediction.labels,
        groups,
        true_labels_N=test.y.numpy(),
        rule=rule,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        generator=_generator(seed, Stream.ORDERS),
        kept_N=kept,
        least_cell=least_cell,
    )
    # The accuracy in other orders would reveal the one that is not shown.
    if math.isnan(headline.accuracy) or math.isnan(unrefused.accuracy):
        spread = spread.without_accuracy()
    return Assessment(
        evaluations={"student with IDP3": headline, "student without refusals": unrefused},
        measured_N=measured,
        reject_option=spread,
    )


def _generator(seed: int, stream: Stream) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, stream))
