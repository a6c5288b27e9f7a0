"""Serve the published student over HTTP: in one process, or as replicas on Ray Serve that share one gate.

The student costs no further privacy, so any number of replicas may predict. With IDP3, FairPATE's reject option
(Algorithm 2), whether a prediction is answered depends on every answer before it. Its counters are therefore in one
place: in the one process, or in a deployment with one replica, which processes the predictions of a request together
and in order. The counters are zero when the service starts.
"""

import base64
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from fairpate.data.pictures import is_square_picture, picture_in
from fairpate.data.tables import RecordForm
from fairpate.fairness.gate import DemographicParityGate
from fairpate.http_server import Body, FaultError, largest_body_bytes, new_app
from fairpate.lazy import torch
from fairpate.types import GateRule
from student.card import read_card
from student.student import load_student, with_encoder

MAX_RECORDS_PER_REQUEST = 1024
_IMAGE_DIMENSIONS = 3
_MOST_DIMENSIONS = 32
OfferToGate = Callable[[list[int], list[int]], Awaitable[list[bool]]]
"""Takes the groups and labels of some predictions, in order; returns whether each may be answered."""


class Record(Body):
    """One record, and the name of its group. The record is given as features, nested lists of the student's input
    shape, as values by column, or as a picture."""

    features: list[Any] | None = None
    picture: str | None = Field(
        None,
        description="Instead of features, for a student that reads pictures: a PNG or JPEG file in base64; its centre "
        "square is resized as in training.",
    )
    # Whole numbers stay whole: as floats, large codes would become their neighbours.
    columns: dict[str, str | bool | int | float | None] | None = Field(
        None,
        description="Instead of features, where `/v1/student` lists columns: a value for each, as in a file. A code "
        "may be a number; null is a missing value.",
    )
    group: str | None = Field(None, description="Needed by a student that predicts by group, or with IDP3.")


class Records(Body):
    """The records of one request. The student predicts a label for each."""

    records: list[Record] = Field(min_length=1, max_length=MAX_RECORDS_PER_REQUEST)


class SharedGate:
    """IDP3, the option to refuse predictions, as one demographic-parity gate with counters of answers that all replicas
    of a student share."""

    def __init__(self, rule: GateRule, num_groups: int, num_classes: int) -> None:
        self._gate = DemographicParityGate(rule, num_groups=num_groups, num_classes=num_classes)

    async def offer(self, groups: list[int], labels: list[int]) -> list[bool]:
        """Decide for each prediction, in order, whether the gate lets it be answered, and count the answered ones.
        Return these decisions: True for a prediction that is answered."""
        # Nothing is awaited between two predictions, so that the requests of two clients do not mix.
        return [self._gate.admit(group, label) for group, label in zip(groups, labels, strict=True)]


class StudentReplica:
    """A copy of the student that predicts. If the copies share a gate, the gate decides which predictions are
    answered."""

    def __init__(self, path: Path, offer: OfferToGate | None, form: RecordForm | None = None) -> None:
        student = with_encoder(load_student(path), path)
        self._form = form
        self._card = student.card
        # Without the student's own gate, which would count the answers of this replica only.
        self._student = replace(student, card=replace(student.card, idp3=None))
        self._offer = offer

    async def answer(self, body: Records) -> dict[str, Any]:
        """Predict one label per record; the label is null if the student refuses to answer: it is not confident
        enough, or its reject option IDP3 refuses.

        FaultError for an invalid record.
        """
        card, shape, groups = self._card, self._student.record_shape, []
        features = np.stack([read_features(record, i, shape, self._form) for i, record in enumerate(body.records)])
        for i, record in enumerate(body.records):
            if record.group is None and not card.needs_group:
                # Any number: this student neither mixes by group nor has a gate.
                groups.append(0)
            elif record.group in card.group_names:
                groups.append(card.group_names.index(record.group))
            else:
                remedy = f"Expected one of the groups: {', '.join(card.group_names)}."
                raise FaultError(422, f"records.{i}.group", record.group, remedy)
        # All records are valid by now: a request that fails must not have moved the gate's counters.
        predicted = self._student.predict(torch.from_numpy(features), np.array(groups))
        labels, answered = predicted.labels.tolist(), predicted.answered.tolist()
        if self._offer is not None:
            # The gate counts answers: it is not offered what is refused for too little confidence.
            offered = [place for place, shown in enumerate(answered) if shown]
            kept = await self._offer([groups[place] for place in offered], [labels[place] for place in offered])
            for place, shown in zip(offered, kept, strict=True):
                answered[place] = shown
        return {"labels": [label if shown else None for label, shown in zip(labels, answered, strict=True)]}

    @property
    def max_body_bytes(self) -> int:
        """The size in bytes of the largest request body that is accepted."""
        shape = self._student.record_shape
        is_image = len(shape) == _IMAGE_DIMENSIONS
        return largest_body_bytes(shape, is_bytes=is_image, most_records=MAX_RECORDS_PER_REQUEST)

    def describe(self) -> dict[str, Any]:
        """Return a description of the student as JSON: its inputs, labels and groups, and the rule of its reject
        option."""
        card = self._card
        rule = card.idp3
        return {
            "input_shape": self._student.record_shape,
            "encoder": None if card.encoder is None else asdict(card.encoder),
            "columns": None if self._form is None else [asdict(field) for field in self._form.fields],
            "label_names": card.label_names,
            "group_names": card.group_names,
            "sensitive_attribute": card.sensitive_attribute,
            "randomised": card.is_randomised,
            "needs_group": card.needs_group,
            # As text, because the margin may be infinite, which JSON cannot say.
            "idp3": None if rule is None else {"max_disparity": str(rule.max_disparity), "min_count": rule.min_count},
            "answers": None if card.answers is None else asdict(card.answers),
        }


def read_features(
    record: Record, position: int, shape: tuple[int, ...], form: RecordForm | None = None
) -> npt.NDArray[np.generic]:
    """Return the record's features in the type of the student's inputs: bytes for images, ``float32`` for tables.

    ``form`` encodes values by column; ``position`` is the record's index in the request, for messages. FaultError for
    invalid values, and unless either features, columns or a picture are given.
    """
    field, is_image = f"records.{position}.features", len(shape) == _IMAGE_DIMENSIONS
    if record.picture is not None:
        field = f"records.{position}.picture"
        if record.features is not None or record.columns is not None:
            raise FaultError(422, field, "", "A record has either a picture or its numbers; leave one of the two out.")
        if not is_square_picture(shape):
            raise FaultError(422, field, "", f"This student reads no pictures; give features of shape {shape}.")
        try:
            return picture_in(base64.b64decode(record.picture, validate=True), shape)
        except ValueError as error:
            raise FaultError(422, field, "", f"Expected a PNG or JPEG file in base64 ({error}).") from error
    if record.columns is None and record.features is None:
        raise FaultError(422, field, "", "A record needs features or columns; add one of the two.")
    if record.columns is not None:
        if record.features is not None:
            raise FaultError(422, field, "", "A record has either features or columns; leave one of the two out.")
        field = f"records.{position}.columns"
        if form is None:
            remedy = "This service does not know the columns of records; give features instead."
            raise FaultError(422, field, "", remedy)
        names = [column.name for column in form.fields]
        for unknown in record.columns.keys() - set(names):
            remedy = f"Expected one of the columns: {', '.join(names)}."
            raise FaultError(422, f"{field}.{unknown}", record.columns[unknown], remedy)
        try:
            return form.encode(record.columns)
        except ValueError as error:
            # The error begins with the name of its column.
            column = next(name for name in names if str(error).startswith(f"{name}: "))
            raise FaultError(422, f"{field}.{column}", record.columns.get(column), f"{error}.") from error
    try:
        depth, inner = 0, record.features
        while isinstance(inner, list):
            depth, inner = depth + 1, inner[0] if inner else None
        # NumPy cannot hold more dimensions than 64, nor iterate over more than 32.
        if depth > _MOST_DIMENSIONS:
            raise FaultError(422, field, record.features, f"Expected features of shape {shape}.")
        # NumPy reads "1" and true as numbers, so types are checked first.
        if not set(map(type, np.array(record.features, dtype=object).flat)) <= {int, float}:
            raise TypeError("expected numbers")  # noqa: TRY301 - one error for all
        # In double precision: a byte would lose a fraction without notice, and float32 makes large numbers infinite.
        values = np.array(record.features, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        remedy = "Expected nested lists of numbers, all lists of a level of one length."
        raise FaultError(422, field, record.features, remedy) from None
    if values.shape != shape:
        raise FaultError(422, field, values.shape, f"Expected features of shape {shape}.")
    low, high = (0.0, 255.0) if is_image else (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max))
    if not ((values >= low) & (values <= high)).all() or (is_image and (values % 1).any()):
        kind = "whole numbers" if is_image else "finite numbers"
        raise FaultError(422, field, "out of range", f"Expected features that are {kind} from {low:g} to {high:g}.")
    return values.astype(np.uint8 if is_image else np.float32)


def student_app(replica: Callable[[], StudentReplica], **options: Any) -> FastAPI:
    """Return the HTTP application of a student; ``replica()`` returns the copy of the student that answers a request.

    ``options`` are tokens, rate and tracer as in :func:`fairpate.http_server.new_app`. Without tokens every caller is
    admitted. The rate of requests is limited for each caller, who is known by the name of a token or, if no token is
    needed, by an address.
    """

    async def reasons() -> Sequence[str]:
        replica()
        return ()

    app = new_app(
        title="FairPATE student",
        description="Predictions of a published model: any number of them costs no further privacy.",
        reasons=reasons,
        max_body_bytes=lambda: replica().max_body_bytes,
        # A client of an aggregator shows this to the user who gave it this URL.
        unrouted="a published student is served here, not an aggregator: it answers POST /v1/predictions, see /docs.",
        # Clients that read a table send its columns as fields of the record.
        unknown='a record has features, a picture, or values by column, as {"columns": {"age": 30}}; see /docs.',
        **options,
    )

    @app.post("/v1/predictions")
    async def predict(body: Records) -> Any:
        """Predict one label per record; the label is null if the student refuses to answer: it is not confident
        enough, or its reject option IDP3 refuses."""
        return await replica().answer(body)

    @app.get("/v1/student")
    async def card() -> Any:
        """Return a description of the student: its inputs, labels and groups, and the rule of its reject option."""
        return replica().describe()

    return app


def student_in_one_process(path: Path, *, form: RecordForm | None = None, **options: Any) -> FastAPI:
    """Return the HTTP application of the student in the file ``path``, with its reject option.

    ``form`` lets requests give a record as values by column; ``options`` as in :func:`student_app`. StudentFileError if
    the file is missing or damaged.
    """
    card, offer = read_card(path), None
    if card.idp3 is not None:
        offer = SharedGate(card.idp3, len(card.group_names), len(card.label_names)).offer
    replica = StudentReplica(path, offer, form)
    return student_app(lambda: replica, **options)


class ServedStudent(BaseModel):
    """The arguments of :func:`application` in a Ray Serve configuration: the student's file, and the number of copies
    that serve it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    student: Path = Field(description="Absolute path of the student's file, the same on every node.")
    num_replicas: int = Field(2, ge=1)
    cpus_per_replica: float = Field(1.0, ge=0)


def application(arguments: dict[str, Any]) -> Any:
    """Build a Ray Serve application, without starting it, from arguments with the fields of :class:`ServedStudent`.

    A Ray Serve configuration names it as `import_path: student.server:application`. StudentFileError if the file is
    missing or damaged.
    """
    from ray import serve

    served = ServedStudent.model_validate(arguments)
    card, gate = read_card(served.student), None
    if card.idp3 is not None:
        # Exactly one: parity is bounded over all answers together. It only counts, so it reserves no CPU.
        one = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})(SharedGate)
        gate = one.bind(card.idp3, len(card.group_names), len(card.label_names))

    # Defined here rather than in the module, so that Ray sends the class with its routes to the replicas.
    class Replica(StudentReplica):
        def __init__(self, path: Path, gate: Any | None) -> None:
            # Copies share a node: with a thread for every core in each, they would slow each other down.
            torch.set_num_threads(1)
            super().__init__(path, None if gate is None else gate.offer.remote)

    def replica() -> StudentReplica:
        found: Any = serve.get_replica_context().servable_object
        assert isinstance(found, StudentReplica)
        return found

    deployed: Any = serve.deployment(
        name="StudentReplica", num_replicas=served.num_replicas, ray_actor_options={"num_cpus": served.cpus_per_replica}
    )(serve.ingress(student_app(replica))(Replica))
    return deployed.bind(served.student, gate)


@contextmanager
def student_served(path: Path, *, host: str, port: int, num_replicas: int, cpus_per_replica: float) -> Iterator[None]:
    """Serve ``num_replicas`` copies of the student in the file ``path`` on the running Ray, inside the block.
    StudentFileError if the file is missing or damaged."""
    from ray import serve

    arguments = {"student": path.absolute(), "num_replicas": num_replicas, "cpus_per_replica": cpus_per_replica}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(arguments), name="student", route_prefix="/")
        yield
    finally:
        serve.shutdown()
