"""What a service with one pool reads: queries and estimates, exactly as that pool's shape, range and groups allow.

The OpenAPI document is made of these types, so that it states what is accepted, and nothing else is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Discriminator, FailFast, Field, Tag, create_model

from aggregator.service.questions import PublicPool, Question
from aggregator.service.wire import MAX_QUERIES_PER_REQUEST, Body
from fairpate.data.declared.form import FormField, RecordForm
from fairpate.request_faults import FaultError, largest_body_bytes

_MAX_COUNT = 1_000_000
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """The types of the bodies that a service with one pool reads."""

    queries: type[BaseModel]
    estimate: Any


def bodies_for(pool: PublicPool) -> Bodies:
    """Request bodies that accept this pool's numbers, record shape, value range and groups."""
    number = _whole_number(ge=0, lt=len(pool), description="A record of the public pool, by number.")
    group: Any = operator.getitem(Literal, pool.group_names)
    by_id: Any = create_model("QueryById", __base__=Body, id=(number, ...))
    by_features: Any = create_model(
        "QueryByFeatures", __base__=Body, features=(_features_type(pool), ...), group=(group, ...)
    )
    kinds = [Annotated[by_id, Tag("id")]]
    if pool.takes_posted:
        kinds.append(Annotated[by_features, Tag("features")])
    if pool.takes_posted and pool.form is not None:
        columns: Any = _record_type(pool.form)
        by_record: Any = create_model("QueryByRecord", __base__=Body, record=(columns, ...), group=(group, ...))
        kinds.append(Annotated[by_record, Tag("record")])
    # The kind is told apart first: of a plain union a fault would be told once for every kind.
    kind_of = _kind_of_query if len(kinds) < 3 else _kind_with_form
    query: Any = by_id if len(kinds) == 1 else Annotated[functools.reduce(operator.or_, kinds), Discriminator(kind_of)]
    # FailFast: one fault ends the check, where a body of thousands of wrong values would be answered with as many.
    several: Any = Annotated[list[query], Field(min_length=1, max_length=MAX_QUERIES_PER_REQUEST), FailFast()]
    queries: Any = create_model("Queries", __base__=Body, queries=(several, ...))
    count: Any = create_model("Count", __base__=Body, count=(_whole_number(ge=0, le=_MAX_COUNT), ...))
    estimate: Any = Annotated[
        Annotated[queries, Tag("queries")] | Annotated[count, Tag("count")], Discriminator(_kind_of_estimate)
    ]
    return Bodies(queries=queries, estimate=estimate)


def max_body_bytes(pool: PublicPool) -> int:
    """The largest body that a request for this pool's records needs: 2 MiB, or one record where that is more."""
    is_bytes = pool.features.dtype == np.uint8
    return largest_body_bytes(pool.record_shape, is_bytes=is_bytes, most_records=MAX_QUERIES_PER_REQUEST)


def question_of(query: Any, pool: PublicPool) -> Question:
    """The question in a validated body. FaultError for a form's record that means nothing."""
    number = getattr(query, "id", None)
    if number is not None:
        return pool.question(number)
    if not hasattr(query, "record"):
        return pool.posted(query.features, query.group)
    values = {field.alias: getattr(query.record, name) for name, field in type(query.record).model_fields.items()}
    try:
        return pool.written(values, query.group)
    except ValueError as error:
        raise FaultError(422, "record", "", f"{error}.") from error


def _whole_number(**bounds: Any) -> Any:
    """An integer as JSON Schema has it: 3.0 is the integer 3; "3" and true are none."""
    return Annotated[
        int, Field(**bounds), BeforeValidator(lambda v: int(v) if type(v) is float and v.is_integer() else v)
    ]


def _features_type(pool: PublicPool) -> Any:
    # Beyond these bounds the pool's float32 is infinite, and different records would be one query.
    kind: Any = Annotated[float, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX, allow_inf_nan=False)]
    if pool.features.dtype == np.uint8:
        kind = _whole_number(ge=0, le=255)
    for size in reversed(pool.record_shape):
        kind = Annotated[list[kind], Field(min_length=size, max_length=size), FailFast()]
    return kind


def _record_type(form: RecordForm) -> Any:
    """A field per column, under its own name; Python's is a number, because a column may be called anything."""
    fields: dict[str, Any] = {
        f"column_{place}": (_column_type(field), Field(None if field.is_optional else ..., alias=field.name))
        for place, field in enumerate(form.fields)
    }
    return create_model("Record", __base__=Body, **fields)


def _column_type(field: FormField) -> Any:
    kind: Any = Annotated[float, Field(allow_inf_nan=False)]
    if field.low is None:
        kind = Annotated[str, Field(min_length=1, max_length=200)] if field.takes_other else _one_of(field.choices)
    return kind | None if field.is_optional else kind


def _one_of(choices: Sequence[str]) -> Any:
    return operator.getitem(Literal, tuple(choices))


def _kind_of_query(value: Any) -> str:
    has = value.__contains__ if isinstance(value, dict) else lambda name: hasattr(value, name)
    return "features" if has("features") or has("group") else "id"


def _kind_with_form(value: Any) -> str:
    has_record = "record" in value if isinstance(value, dict) else hasattr(value, "record")
    return "record" if has_record else _kind_of_query(value)


def _kind_of_estimate(value: Any) -> str:
    has_count = "count" in value if isinstance(value, dict) else hasattr(value, "count")
    return "count" if has_count else "queries"
