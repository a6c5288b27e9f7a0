"""The claim under which a run publishes: one statement that prices what was released, written before anything is shown.

A released model is never trained again, and a statement that is gone is not made up again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from aggregator.service.wire import worded
from fairpate.app.rundir import RunDirectory, RunDirectoryError, read_statement, write_json
from fairpate.app.spending.meter import Meter
from fairpate.app.spending.odometer import Standing, standing_remarks
from fairpate.app.terminal.progress import Reporter
from fairpate.data import REGISTRY, Dataset
from fairpate.methods.definition import Method
from fairpate.methods.releasing import ReleasingMethod, shared_remarks
from fairpate.methods.trained import Trained
from fairpate.privacy.event_values import event_from, event_json
from fairpate.privacy.events import Event
from fairpate.strict_json import strict
from fairpate.types import READING_TELLS, RECORDS_ALONE, TELLS_SIZE, PrivacyStatement, Unit

_NOT_PROTECTED: dict[Unit, str] = {
    "sensitive attribute": "features and labels, which the model is trained on as if they were public",
}


def require_unreleased(config: Method, run: RunDirectory, *, is_free: bool) -> None:
    """RunDirectoryError where what was released is gone, and making it again would be another release."""
    if run.statement.exists() and not is_free:
        gone = run.released if isinstance(config, ReleasingMethod) else run.student
        raise RunDirectoryError(
            f"{gone}: gone, although {run.statement} says it was released. Training again would be a second "
            "release of the same records: restore it from a copy, or start a new run folder with --out and count both "
            "epsilons."
        )


def require_statement(run: RunDirectory, *, is_free: bool) -> None:
    """RunDirectoryError where the statement of a released model is gone: what qualifies the claim stood there only."""
    if not run.statement.exists():
        remedy = f"delete {run.student} and give the same command again" if is_free else "restore it from a copy"
        raise RunDirectoryError(f"{run.statement}: gone, although {run.student} was released under it; {remedy}.")


def count_earlier(meter: Meter, run: RunDirectory) -> None:
    """Count a model that a version without an odometer released, by its statement.

    So is a kept release that another run drew and this odometer does not know.
    """
    if meter.stored() is not None:
        return
    statement = read_statement(run)
    events = [event_from(values, statement.unit) for values in statement.events]
    if run.released.exists():
        meter.count_again(events, noise=statement.noise)
    else:
        meter.record(events, noise=statement.noise, enforce=False)


def state_release(
    config: Method, run: RunDirectory, dataset: Dataset, trained: Trained, meter: Meter, reporter: Reporter
) -> None:
    """Write the statement that prices what was released, and show the operator what earlier releases add to it."""
    standing = meter.standing(delta=config.target.delta)
    for remark in standing_remarks(standing, delta=config.target.delta):
        reporter.note("odometer", remark)
    alone, shared = dataset.records_alone, shared_remarks(run)
    statement = statement_of(config, trained, standing=standing, records_alone=alone, shared=shared)
    write_json(run.statement, strict(statement.to_json()))


def statement_of(
    config: Method,
    trained: Trained,
    *,
    standing: Standing | None = None,
    records_alone: bool = False,
    shared: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> PrivacyStatement:
    """The claim that prices ``trained``.

    ``standing``: what the operator's odometer says of it and of earlier releases, for ``names_earlier``; None where it
    was not counted.
    ``records_alone``: as the data set says. ``shared`` are remarks about a release that several runs go on from, and
    ``remarks`` come last.
    """
    cost = config.price(trained)
    if standing is not None:  # the odometer composes events, and a bound fixed beforehand may be above what they cost
        standing = replace(
            standing,
            epsilon=max(standing.epsilon, cost.epsilon),
            epsilon_adaptive=max(standing.epsilon_adaptive, cost.epsilon),
        )
    if not config.names_earlier:
        standing = None
    return PrivacyStatement(
        method=config.method,
        unit=cost.unit,
        relation=cost.relation,
        delta=cost.delta,
        epsilon=None if math.isinf(cost.epsilon) else cost.epsilon,
        accounting=cost.accounting,
        noise=trained.noise,
        events=tuple(worded(event_json(event)) for event in trained.events),
        queries=trained.queries,
        not_protected=_NOT_PROTECTED.get(cost.unit),
        epsilon_as_in_paper=trained.epsilon_as_in_paper,
        earlier_releases=None if standing is None else standing.earlier,
        epsilon_with_earlier=None if standing is None else standing.epsilon,
        epsilon_adaptive_with_earlier=None if standing is None else standing.epsilon_adaptive,
        remarks=(
            *trained.remarks,
            *shared,
            *size_remarks(config, trained.events, cost.unit),
            *unit_remarks(config, cost.unit, records_alone=records_alone),
            *((READING_TELLS,) if config.is_private and config.data.name not in REGISTRY else ()),
            *standing_remarks(standing, delta=cost.delta),
            *remarks,
        ),
    )


def size_remarks(config: Method, events: tuple[Event, ...], unit: Unit) -> tuple[str, ...]:
    """Where records or persons come and go their number is private, but a sampling rate that is set for it tells it."""
    samples = any(getattr(event, "sampling_rate", 1) < 1 for event in events)
    return (TELLS_SIZE[unit],) if samples and unit in TELLS_SIZE and config.rate_tells_size else ()


def unit_remarks(config: Method, unit: Unit, *, records_alone: bool) -> tuple[str, ...]:
    """Where a person may have several records, and each is protected by itself."""
    return (RECORDS_ALONE,) if config.is_private and records_alone and unit == "record" else ()
