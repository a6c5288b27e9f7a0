"""Settings that fit a data set and a budget, from public facts alone, where nobody gave a configuration.

Read are the kind of the records, the publisher's own count of them, and the size of the public pool: never a record. So
choosing costs no privacy. The values are defaults: whatever is said besides takes their place.

    every method     a public embedding and logistic regression on it: seconds, and little for noise to spoil
    DP-SGD and kin   five epochs of batches of a fiftieth of the records
    PATE family      linear teachers of about a hundred records each, no confidence check, all noisy counts released
"""

from __future__ import annotations

from typing import Any

from fairpate.config import DataConfig
from fairpate.data import entry_for
from fairpate.methods import find_method

Values = dict[str, Any]
DEFAULT = "weighted_votes"
"""The method, where none is named: one release, priced before any record is read, at the epsilon that is published."""
_PER_TEACHER, _FEWEST_TEACHERS, _MOST_TEACHERS = 100, 20, 500
_MOST_QUERIES = 1000
_BATCHES, _SMALLEST_BATCH, _LARGEST_BATCH = 50, 32, 512


def fitted(data: DataConfig, method: str | None = None) -> Values:
    """Values of a configuration of ``method`` for ``data``, with sections of others; None: of :data:`DEFAULT`."""
    name = DEFAULT if method is None else method
    entry = entry_for(data)
    num_public = entry.num_public if data.num_public is None else data.num_public
    linear = {"model": {"name": "logistic"}, "fit": {"epochs": 60, "batch_size": 128, "learning_rate": 0.01}}
    teachers = max(_FEWEST_TEACHERS, min(entry.rows // _PER_TEACHER, _MOST_TEACHERS))
    values: Values = {
        "method": name,
        "student": linear,
        "teachers": linear | {"num_teachers": teachers},
        "aggregator": {
            "num_queries": _MOST_QUERIES if num_public > _MOST_QUERIES else None,
            "release": "counts",
            "mechanism": {"threshold": float("-inf"), "noise_stddev_votes": teachers / 10},
        },
        "dp_sgd": {
            "epochs": 5,
            "batch_size": max(_SMALLEST_BATCH, min(entry.rows // _BATCHES, _LARGEST_BATCH)),
            "learning_rate": 0.5,
        },
    }
    if not find_method(name)().protects_attribute_only:
        values["data"] = {"embedding": {}}
    return values
