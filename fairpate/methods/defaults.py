"""Default settings of methods, chosen from public facts: the size and kind of the data set, and the number of sites.

Without a configuration file, settings are chosen that fit the data set and the budget (:func:`fitted`,
:func:`default_method`). The choice reads the kind of the records, their published number (or that of persons, if these
are protected), and the size of the public pool, which is the set of public records. It never reads a record, so it
costs no privacy. Options take precedence over it.

    every method     a public embedding and logistic regression on it: fast, and accurate under noise
    DP-SGD methods   five epochs, batches of a fiftieth of the records or persons
    trained teachers thousands in closed form, which vote on the whole pool, without a check; noisy counts released
    networks         if chosen as teachers: about 100 records or persons each, and 1,000 queries
    neighbours       queries as for networks; with few records, one query per cluster of the public pool
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal

from aggregator.mechanism import lead_needed
from fairpate import config as configuration
from fairpate.config import ConfigError, DataConfig, Section, apply_override, parse_config
from fairpate.data.registry import entry_for, pool_size
from fairpate.methods.base import Method, Values, configured, find_method, read_and_unread
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import VoteTables

FITTED = "residual_votes"
"""The method that is used if none is named and :func:`default_method` finds no reason for another."""
COUNTS = "record_votes"
STDDEVS_PER_CELL = 4
"""The least useful count of `record_votes`, in standard deviations of its noise."""
_PER_TEACHER, _FEWEST_TEACHERS, _MOST_TEACHERS, _FEWEST_EACH = 100, 20, 500, 4
_PER_SMALL, _PER_LABELLING, _FEWEST_SMALL, _MOST_SMALL = 6, 45, 50, 5000
_MOST_QUERIES = 1000
_HEARD, _FEWEST_FITTED = 0.08, 200
_MANY_RECORDS, _SMALL_RATE, _LARGE_RATE = 5000, 0.1, 0.5
_SMALL_SHARE, _LARGE_SHARE = 0.05, 0.1  # of a sample that votes
_FEWEST_NEIGHBOURS, _CLUSTERS = 20, 30
_RECORDS_PER_COMPONENT, _FEWEST_COMPONENTS, _MOST_COMPONENTS = 100, 10, 200
_FOLLOW_FROM_COUNT = frozenset({"teachers", "private_knn", "record_votes", "dp_sgd"})
_BATCHES, _SMALLEST_BATCH, _LARGEST_BATCH = 50, 32, 512


def resolved(overrides: Sequence[configuration.Override], method: str | None = None, *, num_sites: int = 1) -> Method:
    """Return the configuration of a run without a file: settings that fit the data set, replaced by ``overrides``.

    `fairpate run` without a file uses this configuration. Each of ``num_sites`` sites has as many records as the data
    set declares.
    """
    said, start = apply_override({}, *overrides), Values()
    name = said.get("method") if method is None else method
    if name is None:
        name, _ = default_method(overrides, num_sites=num_sites)
    # Anything else than a name is refused with the rest of the configuration.
    if isinstance(name, str):
        data, teachers = parse_config(said.get("data", {}), DataConfig, at="data"), kind_of_teachers(said)
        start = fitted(data, name, num_sites=num_sites, teachers=teachers)
        with suppress(ConfigError):  # raised again with the rest of the configuration
            start = leaving_room(start, said, num_public=pool_size(data))
    return configured(start, overrides, method=method)


def default_method(overrides: Sequence[configuration.Override], *, num_sites: int = 1) -> tuple[str, str]:
    """Return the method that is used if ``overrides`` name none, and the reason; both depend on public facts only.

    The method is `residual_votes`, which releases sums of vectors by class, unless these sums would be smaller than
    their noise. Then it is `record_votes`, in which each record adds one count at the nearest of few prototypes, if
    enough of its counts would stand out from their noise. If persons are protected, it is always `residual_votes`.
    ``num_sites``: the number of sites, each with as many records as the data set declares.
    """
    said = apply_override({}, *overrides)
    data = parse_config(said.get("data", {}), DataConfig, at="data")
    entry = entry_for(data)
    if read_and_unread([find_method(COUNTS)], said)[1]:
        return FITTED, "its settings are given."
    if entry.rows is None:
        return FITTED, "the data set declares no number of records."
    if pool_size(data) == 0:
        return FITTED, "there are no public records."
    if entry.protected(data.options, data.unit)[1] == "person":
        return FITTED, "persons are protected."
    count, num_classes = entry.rows * num_sites, entry.num_classes
    try:
        # A class's sum of n / C vectors has norm n / C at most. The means of C classes differ in C - 1 directions, in
        # which noise of standard deviation s on each number has norm s sqrt(C - 1).
        usual: Any = find_method(FITTED)(
            target=parse_config(said.get("target", {}), configuration.PrivacyTarget, at="target")
        )
        noise = usual.noise_of_sums * math.sqrt(num_classes - 1)
        cells = int(count / (STDDEVS_PER_CELL * usual.multiplier()))
    except ValueError:  # refused with the rest of the configuration, or by the run
        return FITTED, "no noise meets the target."
    facts = (
        f"{noise:,.0f}, and a class has {count / num_classes:,.0f} records on average by the publisher's count "
        f"({num_classes} classes)"
    )
    if noise <= count / num_classes:
        return FITTED, f"its sums stand out from the noise, whose norm is {facts}."
    if cells < num_classes:
        return FITTED, f"counts are no better: {cells} of them stand out from their noise, for {num_classes} classes."
    return COUNTS, (
        f"sums of vectors do not stand out from their noise, whose norm would be {facts}; {cells} counts do."
    )


@cache
def multiplier_within(target_epsilon: float, target_delta: float) -> float:
    """Return the noise multiplier of a single table that uses all of the target."""

    def event(noise: float) -> list[VoteTables]:
        return [VoteTables(count=1, noise_stddev_votes=noise)]

    return accountant.least_noise(event, target_epsilon=target_epsilon, target_delta=target_delta)


def leaving_room(start: Values, said: Values, *, num_public: int) -> Values:
    """Return the settings ``start`` with a number of queries that leaves the noise on each small enough for single
    answers, if ``said``, the settings given, keep a share of the target for a service of small teachers.

    A rule that is fitted to all counts needs few queries, as their noise averages out. The answers of a service are
    read one by one, and what a query costs in noise is the same for all. So run and service together get as many
    queries as leave a lead of :data:`_HEARD` of the votes standing out from the noise, by public numbers alone.
    """
    values = configuration.merge(start, said)
    asked = values.get("aggregator", {})
    keep, teachers = asked.get("keep"), values.get("teachers", {})
    if not keep or asked.get("num_queries") or teachers.get("model") != {"name": "ridge"}:
        return start
    target = parse_config(values.get("target", {}), configuration.QueriesTarget, at="target")
    if target.epsilon is None or not isinstance(keep, float) or not 0 < keep < 1:
        return start
    multiplier = multiplier_within(target.epsilon, target.delta)
    # One vote of a teacher on each of Q queries moves 2 Q counts by one: noise of sqrt(2 Q) times the multiplier.
    in_all = (_HEARD * teachers["num_teachers"] / lead_needed(1.0) / multiplier) ** 2 / 2
    own = max(_FEWEST_FITTED, int(in_all * (1 - keep)))
    return start if own >= num_public else configuration.merge(start, {"aggregator": {"num_queries": own}})


TeacherKind = Literal["counted", "labelling", "networks"]
"""The kinds of teachers that defaults distinguish: small ones whose noisy counts are released, small ones of which only
labels are released, and networks."""


def kind_of_teachers(values: Mapping[str, Any]) -> TeacherKind:
    """Return which kind of teachers ``values``, nested settings, choose; networks by the teachers' model, or by how
    they are trained."""
    teachers, asked = values.get("teachers"), values.get("aggregator")
    model, fit = (teachers.get("model"), teachers.get("fit")) if isinstance(teachers, Mapping) else (None, None)
    name = model.get("name") if isinstance(model, Mapping) else model
    if name not in (None, "ridge") or (name is None and fit):
        return "networks"
    return "labelling" if isinstance(asked, Mapping) and asked.get("release") == "label" else "counted"


def fitted(
    data: DataConfig, method: str | None = None, *, num_sites: int = 1, teachers: TeacherKind = "counted"
) -> Values:
    """Return default settings chosen for the size and kind of the data set ``data``, for ``method`` (None: the usual
    default, :data:`FITTED`) and the kind of ``teachers``, if the method has some."""
    name, entry = FITTED if method is None else method, entry_for(data)
    # A declaration need not say how many records there are, unless a section is computed from it. Then they are many.
    needed = _FOLLOW_FROM_COUNT & find_method(name).model_fields.keys() or entry.rows is not None
    count = _RECORDS_PER_COMPONENT * _MOST_COMPONENTS
    if needed:
        count, _ = entry.protected(data.options, data.unit)
    return fitted_to(name, count=count, num_public=pool_size(data), num_sites=num_sites, teachers=teachers)


def fitted_to(
    name: str, *, count: int, num_public: int, num_sites: int = 1, teachers: TeacherKind = "counted"
) -> Values:
    """Return suggested settings of the method ``name``, by section, for a data set of ``num_public`` public records
    and, at each site, ``count`` protected records or persons. ``teachers``: their kind, if the method has some.

    The number of teachers and the size of batches suit the records of one site. The size of the embedding suits the
    records of all sites. Values that the method's class sets itself take precedence.
    """
    method = find_method(name)()
    own = {section: value for section, value in method if isinstance(value, Section)}
    linear = {"model": {"name": "logistic"}, "fit": {"epochs": 60, "batch_size": 128, "learning_rate": 0.01}}
    # Only a part of few persons is private; teachers and batches must have some of them.
    most = max(2, count // _FEWEST_EACH)
    num_teachers = min(max(_FEWEST_TEACHERS, min(count // _PER_TEACHER, _MOST_TEACHERS)), most)
    # Teachers of attributes learn from features without an embedding.
    is_small = teachers != "networks" and not method.protects_attribute_only
    if is_small:
        # A label shows nothing of a lead that no noise reverses: fewer teachers have smaller leads.
        each = _PER_LABELLING if teachers == "labelling" else _PER_SMALL
        num_teachers = min(max(_FEWEST_SMALL, min(count // each, _MOST_SMALL)), most)
    many = count > _MANY_RECORDS
    rate, share = (_SMALL_RATE, _SMALL_SHARE) if many else (_LARGE_RATE, _LARGE_SHARE)
    # None: a smaller pool is queried in full.
    num_queries = _MOST_QUERIES if num_public > _MOST_QUERIES else None
    has_small = is_small and "teachers" in own
    values: Values = {
        "method": name,
        "student": linear,
        "teachers": ({"model": {"name": "ridge"}} if is_small else linear) | {"num_teachers": num_teachers},
        "aggregator": {
            # The noise of single counts averages out over a pool that is queried in full.
            "num_queries": None if has_small else num_queries,
            # Counts teach no student that learns from released attributes.
            "release": "label" if method.protects_attribute_only else "counts",
            # A start: where there is a target, the noise is scaled until the queries fit.
            "mechanism": {"threshold": float("-inf"), "noise_stddev_votes": num_teachers / 10},
        },
        # A rule that is fitted to all counts labels every record.
        "teacher_votes": {"taught_share": 1.0} if is_small else {},
        "private_knn": {
            "queries": "first" if many else "typical",
            "sampling_rate": rate,
            "num_neighbours": max(_FEWEST_NEIGHBOURS, int(share * rate * count)),
        },
        "record_votes": {"rule": "linear", "num_records": count * num_sites},
        "dp_sgd": {
            "epochs": 5,
            "batch_size": min(max(_SMALLEST_BATCH, min(count // _BATCHES, _LARGEST_BATCH)), most),
            "learning_rate": 0.5,
        },
    }
    if name == "private_knn":
        asked = num_queries if many else max(1, min(_CLUSTERS, num_public))
        values["aggregator"] = {"num_queries": asked, "release": "counts"}
    if not method.protects_attribute_only:
        # Every number of a record gets the same noise, and few records stand out against it in few numbers only.
        wanted = max(_FEWEST_COMPONENTS, count * num_sites // _RECORDS_PER_COMPONENT)
        values["data"] = {"embedding": {"num_components": min(wanted, _MOST_COMPONENTS)}}
    # What the class sets itself counts as set in its sections; defaults of a section do not.
    own_values = {section: value.model_dump(exclude_unset=True) for section, value in own.items()}
    return read_and_unread([type(method)], configuration.merge(values, own_values))[0]
