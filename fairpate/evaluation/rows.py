"""One row of a comparison: a configuration that was run, and the record that came out or the cause why none did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fairpate.types import RunRecord

Status = Literal["ok", "failed"]
FAILED = "failed"
"""All that is published of an error."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of a comparison.

    ``digest`` identifies the configuration. ``record`` is None exactly where the run failed, and then ``error`` says
    why in one line; ``method``, ``data``, ``seed`` and ``config`` are known in both cases. ``command`` makes the run
    again in a shell. ``minutes`` is wall-clock time of the run alone, NaN where it is not known. ``has_guarantee``:
    whether the configuration guarantees any privacy, whatever became of the run. Time and error depend on private
    records: a published row has no time, and ``FAILED`` for every error.
    """

    digest: str
    method: str
    data: str
    seed: int
    config: dict[str, Any]
    command: str
    minutes: float
    record: RunRecord | None = None
    error: str = ""
    has_guarantee: bool = True

    def __post_init__(self) -> None:
        if (self.record is None) != bool(self.error):
            raise ValueError(f"Expected a record or an error and not both, got {self.record} and {self.error!r}.")
        if self.minutes < 0:
            raise ValueError(f"Expected minutes >= 0, or NaN where unknown, got {self.minutes}.")
        if self.record is not None and self._names != (self.record.method, self.record.data, self.record.seed):
            raise ValueError(f"Expected the record of {self._names}, got that of {self.record.method}.")

    @property
    def status(self) -> Status:
        """Whether there is a record."""
        return "failed" if self.record is None else "ok"

    @property
    def is_private(self) -> bool:
        """Whether the row must not be published: its price depends on private votes."""
        return self.record is not None and self.record.epsilon_is_data_dependent

    @property
    def is_unprotected(self) -> bool:
        """Whether the row is of a run without privacy guarantee."""
        return not self.has_guarantee or (self.record is not None and math.isinf(self.record.epsilon))

    @property
    def _names(self) -> tuple[str, str, int]:
        return self.method, self.data, self.seed
