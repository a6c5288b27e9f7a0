"""The privacy-and-fairness card of a published student: what it guarantees, how it treats groups, what it must not
claim.

Everything is read from the public part of a run directory, from what the run recorded of its data set, and from the
public entry of that; the private part is not opened, and of the configuration only the data set's options and the
method enter. Of a data set that was given from Python no publisher is known, and the card says so. It is written
beside the student, as JSON and as a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fairpate import __version__
from fairpate.app.rundir import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_statement,
    run_at,
    write_json,
    write_text,
)
from fairpate.app.trained_on import DataRecord, require_data, require_student_of
from fairpate.config import ConfigError, DataConfig
from fairpate.config_reader import parse_config
from fairpate.data import entry_for
from fairpate.data.files import sha256_of
from fairpate.evaluation.card_page import (
    Card,
    CardData,
    CardModel,
    CardRefusals,
    IntendedUse,
    card_page,
)
from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.page import counted
from fairpate.evaluation.private_population import PrivatePopulation
from fairpate.evaluation.records import Guarantee
from fairpate.evaluation.verdict import verdict
from fairpate.methods import method_title
from fairpate.privacy.event_values import event_from
from fairpate.steps import tell
from fairpate.strict_json import strict
from fairpate.types import PrivacyStatement, Unit
from student.card import read_card as read_student_card

FORMAT = "fairpate.card/1"


def write_card(
    root: Path, *, intended_use: str | None = None, out_of_scope: str | None = None, contact: str | None = None
) -> tuple[Path, Path]:
    """Write ``public/card.html`` and ``public/card.json`` of the run in ``root``, and return their paths.

    What the caller does not say of the use is named as not stated. RunFolderError for a folder without
    a run, RunDirectoryError for a run that published nothing.
    """
    run = run_at(root)
    card = read_card(run, use=IntendedUse(intended=intended_use, out_of_scope=out_of_scope, contact=contact))
    tell(1, 3)
    write_json(run.card, card_values(card))
    tell(2, 3)
    write_text(run.card_page, card_page(card))
    tell(3, 3)
    return run.card_page, run.card


def card_values(card: Card) -> dict[str, Any]:
    """What ``card.json`` holds."""
    derived = {name: getattr(card, name) for name in ("description", "publishable", "not_publishable", "limits")}
    said = verdict(card.evaluation, card.privacy)
    derived |= {"verdict": said.line, "meaning": said.meaning}
    protects = {"protects": card.privacy.protects}
    plain = asdict(card) | {"evaluation": card.evaluation.to_json()}
    if card.refusals is not None and card.refusals.unrefused is not None:
        plain["refusals"]["unrefused"] = card.refusals.unrefused.to_json()
    values: dict[str, Any] = strict({"format": FORMAT, **plain, **derived, **protects})
    return values


def read_card(run: RunDirectory, *, use: IntendedUse) -> Card:
    """The card of a run; only its public part, its method and what names its data set are read."""
    for path in (run.statement, run.metrics, run.student):
        if not path.is_file():
            raise RunDirectoryError(
                f"{path}: missing; a card is of a published student: finish the run first. A run of a method without "
                "privacy publishes nothing."
            )
    if "least_cell" not in read_json(run.metrics):
        raise RunDirectoryError(
            f"{run.metrics}: measured by an earlier version, which showed groups of any size; repeat the run's "
            "command, which measures the same model again and charges nothing."
        )
    # As plain values: a card needs the method's name, and not the package that it is from.
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    trained_on = require_data(run)
    require_student_of(run, trained_on, read_student_card(run.student))
    return card_of(run, method=config["method"], data=_data(trained_on, config["data"]), use=use, made_on=run.made_on)


def card_of(run: RunDirectory, *, method: str, data: CardData, use: IntendedUse, made_on: str | None) -> Card:
    """The card that follows from statement, metrics and student of ``run``, and what else is to be said."""
    statement, metrics = read_statement(run), read_json(run.metrics)
    population = read_json(run.private_population) if run.private_population.is_file() else None
    refusals, unrefused = metrics.pop("orders", None), metrics.pop("without_refusals", None)
    metrics.pop("without_privacy", None)  # published by earlier versions, of a model that learned from test records
    student = read_student_card(run.student)
    return Card(
        model=CardModel(
            method=method,
            architecture=student.model.name,
            input_shape=student.input_shape,
            classes=student.label_names,
            groups=student.group_names,
            sensitive_attribute=student.sensitive_attribute,
            reject_option=student.idp3,
            sha256=sha256_of(run.student),
            method_title=method_title(method),
            made_on=made_on,
            made_by=f"FairPATE {__version__}",
            num_training_labels=student.num_training_labels,
        ),
        privacy=guarantee_of(statement),
        data=data,
        use=use,
        evaluation=Evaluation.from_json(metrics),
        refusals=None if refusals is None else _refusals(refusals, unrefused),
        private_population=None if population is None else PrivatePopulation.from_json(population),
    )


def guarantee_of(statement: PrivacyStatement) -> Guarantee:
    """The statement in the words of pages."""
    queries, events = statement.queries, statement.events
    return Guarantee(
        unit=statement.unit,
        relation=statement.relation,
        epsilon=math.inf if statement.epsilon is None else statement.epsilon,
        delta=statement.delta,
        accounting=statement.accounting,
        noise=statement.noise,
        tuning_accounted=statement.tuning_accounted,
        events=[described_event(event, statement.unit) for event in events]
        if queries is None
        else [f"{queries.submitted} queries to {_voters(statement)}, every one priced at its worst case"],
        epsilon_sanitised=None if queries is None else queries.epsilon_sanitised,
        not_protected=statement.not_protected,
        remarks=statement.remarks,
        earlier_releases=statement.earlier_releases or 0,
        epsilon_with_earlier=statement.epsilon_with_earlier,
        epsilon_adaptive_with_earlier=statement.epsilon_adaptive_with_earlier,
        # Neighbours are sampled at a rate that is configured, whatever the number of records.
        tells_size=queries is None and any(event.get("sampling_rate", 1) < 1 for event in events),
    )


def _voters(statement: PrivacyStatement) -> str:
    """Who was asked, by what was priced."""
    sampled = any("sampling_rate" in event for event in statement.events)
    whose = " of persons" if statement.unit == "person" else ""
    return f"the nearest records of Poisson samples{whose}" if sampled else "teachers"


def described_event(event: Mapping[str, Any], unit: Unit | None = None) -> str:
    """One event of a statement as a line; ``unit`` is the statement's."""
    numbers = ", ".join(
        f"{name.replace('_', ' ')} {f'{value:,.0f}' if 1e4 <= abs(value) < math.inf else f'{value:.4g}'}"
        for name, value in event.items()
        if isinstance(value, int | float) and name != "count"
    )
    # Older statements lack the noun.
    head, *of = str(event.get("noun") or event_from(event, unit).noun).partition(" of ")
    sample = "over Poisson samples" if event.get("sampling_rate", 1) < 1 else ""
    number = event.get("count", 1)
    each = " each" if number > 1 else ""
    words = [counted(number, head) + "".join(of), sample, f"({numbers}{each})" if numbers else ""]
    return " ".join(filter(None, words))


def _data(trained_on: DataRecord, values: Mapping[str, Any]) -> CardData:
    if trained_on.given_from_python:
        return CardData(name=trained_on.name, kind=trained_on.kind, given_from_python=True)
    config = parse_config(
        {name: values[name] for name in ("name", "seed", "options", "declaration") if name in values}, DataConfig
    )
    if config.name != trained_on.name:
        raise ConfigError(f"data.name: the run was trained on {trained_on.name}, its configuration says {config.name}.")
    entry = entry_for(config)
    return CardData(
        name=entry.name,
        kind=trained_on.kind,
        task=entry.task,
        publisher=entry.publisher,
        address=entry.address,
        licence=entry.licence,
        options=entry.complete_options(config.options),
        split_seed=config.seed,
    )


def _refusals(orders: Mapping[str, Any], unrefused: Mapping[str, Any] | None) -> CardRefusals:
    lowest, highest = ([orders[name][end] for name in ("accuracy", "coverage")] for end in ("low", "high"))
    return CardRefusals(
        num_orders=len(orders["orders"]),
        accuracy=(lowest[0], highest[0]),
        coverage=(lowest[1], highest[1]),
        unrefused=None if unrefused is None else Evaluation.from_json(unrefused),
    )
