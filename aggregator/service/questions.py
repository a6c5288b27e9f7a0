"""What may be asked: the public pool, and how a number or a posted record becomes a query with its content hash.

A query is its content. Posted features take the pool's own type and shape before they are hashed, so that another
spelling of the same numbers (0.1 or 0.10000000149, 0.0 or -0.0) is the same query; nothing here sees a vote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.session import Query, query_key
from fairpate.data.declared.form import RecordForm
from fairpate.types import IntArray

Features = npt.NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A query and the features that the teachers must see to answer it."""

    query: Query
    features: Features


CountVotes = Callable[[Sequence[Question]], IntArray]
"""Votes of all teachers on Q questions, shape (Q, C); raises ``VotesUnavailableError`` rather than leave one out."""


@dataclass(frozen=True, kw_only=True)
class PublicPool:
    """N public records that analysts ask by number, and the public words for groups and labels.

    ``features`` (N, ...) is ``uint8`` or ``float32``; ``groups_N`` holds indices into ``group_names``. ``form``: how a
    person writes a record down, where features are those of declared columns, or follow from them by ``place``.
    ``takes_posted``: whether anybody could vote on a record that is not in the pool.
    """

    features: Features
    groups_N: IntArray
    record_ids: Sequence[str]
    group_names: tuple[str, ...]
    label_names: tuple[str, ...]
    form: RecordForm | None = None
    takes_posted: bool = True
    place: Callable[[npt.NDArray[np.float32]], Features] = lambda features: features

    def __post_init__(self) -> None:
        if not len(self.features) == len(self.groups_N) == len(self.record_ids):
            raise ValueError("Expected as many groups and record_ids as records.")
        if self.features.dtype not in (np.uint8, np.float32):
            raise ValueError(f"Expected features of uint8 or float32, got {self.features.dtype}.")

    def __len__(self) -> int:
        return len(self.record_ids)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one record's features."""
        return tuple(self.features.shape[1:])

    def hash_all(self) -> None:
        """Compute every record's content hash now rather than at the first question."""
        _ = self._questions

    def question(self, number: int) -> Question:
        """The record at ``number``."""
        return self._questions[number]

    def posted(self, features: Sequence[Any], group: str) -> Question:
        """A record that came with the request; its values were checked against the pool's shape and range."""
        array = _without_negative_zero(np.asarray(features, dtype=self.features.dtype))
        code = self.group_names.index(group)
        key = query_key(array, code)
        return Question(query=Query(key=key, group=code, record_id=f"posted-{key[:16]}"), features=array)

    def written(self, record: Mapping[str, Any], group: str) -> Question:
        """A record as its form has it. ValueError names a column whose value means nothing."""
        assert self.form is not None
        features: Any = self.place(self.form.encode(record))
        return self.posted(features, group)

    def number_of(self, key: str) -> int | None:
        """The record with this content hash; None for one that was posted."""
        return self._numbers.get(key)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {question.query.key: number for number, question in enumerate(self._questions)}

    @cached_property
    def _questions(self) -> tuple[Question, ...]:
        return tuple(
            Question(
                query=Query(key=query_key(_without_negative_zero(x), group), group=group, record_id=record_id),
                features=x,
            )
            for x, group, record_id in zip(self.features, self.groups_N.tolist(), self.record_ids, strict=True)
        )


def _without_negative_zero(features: Features) -> Features:
    """-0.0 becomes 0.0: equal values have equal bytes, so that a record has one key."""
    zeroed: Features = np.add(features, features.dtype.type(0))
    return zeroed
