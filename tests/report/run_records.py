"""Records of finished runs, for tests of frontiers and of their tables."""

from __future__ import annotations

from typing import Any

from fairpate.types import RunRecord


def run_record(method: str = "pate", data: str = "adult", seed: int = 0, **changes: Any) -> RunRecord:
    """A run that protects a record at epsilon 1, but for what ``changes`` say."""
    fields: dict[str, Any] = {
        "unit": "record",
        "relation": "add or remove one",
        "delta": 1e-5,
        "epsilon": 1.0,
        "epsilon_is_data_dependent": False,
        "accuracy": 0.8,
        "coverage": 1.0,
        "disparity": 0.1,
        "config": {},
    }
    return RunRecord(method=method, data=data, seed=seed, **(fields | changes))
