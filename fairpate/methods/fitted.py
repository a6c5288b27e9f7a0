"""Settings that fit a data set and a budget, from public facts alone, where nobody gave a configuration.

Read are the kind of the records, the publisher's own count of them, or of persons where these are protected, and the
size of the public pool: never a record. So choosing costs no privacy. The values are defaults: whatever is said besides
takes their place.

    every method     a public embedding and logistic regression on it: seconds, and little for noise to spoil
    DP-SGD and kin   five epochs of batches of a fiftieth of the records or persons
    trained teachers linear, of about a hundred of them each, no confidence check, all noisy counts released
    neighbours       asked like teachers; few records, about clusters of the pool, so that few queries label all of it

Where no method is named, every record votes in one release, which is priced before any record is read. Where public
records are too few to vote on and private ones many, it is DP-SGD, which needs the pool for nothing but the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairpate.config import DataConfig, Section
from fairpate.config_reader import apply_override, merge, parse_config
from fairpate.data import entry_for, pool_size
from fairpate.methods import find_method
from fairpate.methods.definition import Method
from fairpate.methods.load import configured

Values = dict[str, Any]
ONE_RELEASE, _WITHOUT_VOTES = "weighted_votes", "dp_sgd"
_PER_TEACHER, _FEWEST_TEACHERS, _MOST_TEACHERS, _FEWEST_EACH = 100, 20, 500, 4
_SMALL_POOL = 400
_MOST_QUERIES = 1000
_MANY_RECORDS, _SMALL_RATE, _LARGE_RATE = 5000, 0.1, 0.5
_SMALL_SHARE, _LARGE_SHARE = 0.05, 0.1  # of a sample that votes
_FEWEST_NEIGHBOURS, _CLUSTERS = 20, 30
_FOLLOW_FROM_COUNT = frozenset({"teachers", "private_knn", "record_votes", "dp_sgd"})
_BATCHES, _SMALLEST_BATCH, _LARGEST_BATCH = 50, 32, 512


def resolved(overrides: Sequence[str], method: str | None = None) -> Method:
    """The configuration of a run that starts from no file: what fits the data set that ``overrides`` name, under them.

    This is what `fairpate run` without a configuration computes, and so what every command that is printed means.
    """
    return configured(start_values(overrides, method), overrides, method=method)


def start_values(overrides: Sequence[str], method: str | None = None) -> Values:
    """What lies under ``overrides`` there."""
    said: Values = {}
    for override in overrides:
        apply_override(said, override)
    name = said.get("method") if method is None else method
    if name is not None and not isinstance(name, str):
        return {}  # refused with the rest of the configuration
    return fitted(parse_config(said.get("data", {}), DataConfig), name)


def fitted(data: DataConfig, method: str | None = None) -> Values:
    """Values of a configuration of ``method`` for ``data``, with sections of others; None: of :func:`method_for`."""
    name = method_for(data) if method is None else method
    # A declaration need not say how many records there are, unless a setting follows from it.
    follows = _FOLLOW_FROM_COUNT & find_method(name).model_fields.keys()
    return fitted_to(name, count=count_protected(data) if follows else 1, num_public=pool_size(data))


def fitted_to(name: str, *, count: int, num_public: int) -> Values:
    """The same for a data set of which nothing is known but ``count``, of what is protected, and the size of its pool.

    What the method's class sets itself stands above it.
    """
    method = find_method(name)()
    own = {section: value for section, value in method if isinstance(value, Section)}
    linear = {"model": {"name": "logistic"}, "fit": {"epochs": 60, "batch_size": 128, "learning_rate": 0.01}}
    # Of few persons a part is private; teachers and batches are to have some of them.
    most = max(2, count // _FEWEST_EACH)
    teachers = min(max(_FEWEST_TEACHERS, min(count // _PER_TEACHER, _MOST_TEACHERS)), most)
    many = count > _MANY_RECORDS
    rate, share = (_SMALL_RATE, _SMALL_SHARE) if many else (_LARGE_RATE, _LARGE_SHARE)
    num_queries = _MOST_QUERIES if num_public > _MOST_QUERIES else None
    # Sections of other methods too: the caller keeps what the method reads.
    values: Values = {
        "method": name,
        "student": linear,
        "teachers": linear | {"num_teachers": teachers},
        "aggregator": {
            "num_queries": num_queries,
            "release": "label" if method.protects_attribute_only else "counts",
            "mechanism": {"threshold": float("-inf"), "noise_stddev_votes": teachers / 10},
        },
        "private_knn": {
            "queries": "first" if many else "typical",
            "sampling_rate": rate,
            "num_neighbours": max(_FEWEST_NEIGHBOURS, int(share * rate * count)),
        },
        "record_votes": {"rule": "linear", "num_records": count},
        "dp_sgd": {
            "epochs": 5,
            "batch_size": min(max(_SMALLEST_BATCH, min(count // _BATCHES, _LARGEST_BATCH)), most),
            "learning_rate": 0.5,
        },
    }
    if name == "private_knn":
        asked = num_queries if many else min(_CLUSTERS, num_public)
        values["aggregator"] = {"num_queries": asked, "release": "counts"}
    if not method.protects_attribute_only:
        values["data"] = {"embedding": {}}
    return merge(values, {section: value.model_dump(exclude_unset=True) for section, value in own.items()})


def count_protected(data: DataConfig) -> int:
    """The publisher's count of what is protected: of rows, or of persons where these are and were counted."""
    return entry_for(data).count_protected(data.options, data.unit)


def method_for(data: DataConfig) -> str:
    """The method where none is named."""
    is_known = entry_for(data).rows is not None
    few_public = pool_size(data) < _SMALL_POOL and is_known and count_protected(data) > _MANY_RECORDS
    return _WITHOUT_VOTES if few_public else ONE_RELEASE
