"""The same event per record and per person: one price, never added, and stored and read back with its unit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fairpate.privacy import accountant
from fairpate.privacy.accountant import ConfidentGnmaxQueries, PoissonGaussians, ThresholdChecks, of_unit
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    AttributeQueries,
    NeighbourVotes,
    PoissonGaussianLaplaces,
    SmoothRelease,
    VoteSums,
    VoteTables,
    event_from,
    event_json,
    merged,
    of_teachers,
)

GNMAX = {"count": 3, "threshold": 5.0, "threshold_stddev_votes": 2.0, "noise_stddev_votes": 4.0}
EVENTS: list[Any] = [
    ConfidentGnmaxQueries(**GNMAX),
    ThresholdChecks(count=2, threshold_stddev_votes=3.0),
    PoissonGaussians(count=4, noise_multiplier=2.0, sampling_rate=0.1),
    PoissonGaussianLaplaces(count=2, gradient_noise_multiplier=2.0, laplace_scale=3.0, sampling_rate=0.2),
    VoteTables(count=1, noise_stddev_votes=4.0),
    VoteSums(count=1, noise_stddev_votes=400.0, norm=100),
    NeighbourVotes(count=2, noise_stddev_votes=4.0, sampling_rate=0.1),
    SmoothRelease(order=10.0, beta=0.01, noise_stddev=2.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_a_person_who_adds_no_more_than_a_record_costs_what_a_record_costs(event: Any) -> None:
    person = of_unit(event, "person")
    assert (event.unit, person.unit, type(person)) == ("record", "person", type(event))
    by_record, by_person = (accountant.epsilon([each], target_delta=1e-5) for each in (event, person))
    assert by_record == by_person
    if accountant.has_loss_distributions([event]):
        assert accountant.epsilon_pld([event], target_delta=1e-5) == accountant.epsilon_pld([person], target_delta=1e-5)
    with pytest.raises(ValueError, match="under one unit and relation"):
        accountant.rdp([event, person])
    assert len(merged([event, person])) == 2
    assert of_unit(person, "record") == event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_unit_is_stored_and_an_earlier_event_without_one_is_of_records(event: Any) -> None:
    for each in (event, of_unit(event, "person")):
        assert event_from(event_json(each)) == each
    stored = event_json(event)
    stored.pop("unit")
    assert event_from(stored) == event


def test_queries_to_teachers_of_each_unit() -> None:
    queries, release = EVENTS[0], EVENTS[-1]
    assert of_teachers(queries, "record") is queries
    assert of_teachers(queries, "person") == dataclasses.replace(queries, unit="person")
    assert of_teachers(queries, "sensitive attribute") == AttributeQueries(**GNMAX)
    assert (of_teachers(release, "person").unit, of_teachers(release, "sensitive attribute")) == ("person", release)


def test_an_event_that_is_priced_for_one_unit_alone_is_not_renamed() -> None:
    event = AttributeGaussians(count=1, attribute_noise_multiplier=2.0)
    assert of_unit(event, "sensitive attribute") is event
    with pytest.raises(TypeError, match="AttributeGaussians has a cost per sensitive attribute only, not per person"):
        of_unit(event, "person")
