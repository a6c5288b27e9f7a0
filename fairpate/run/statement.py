"""The privacy statement of a run: what its releases cost, alone and together with the operator's earlier ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from fairpate import types
from fairpate.data import REGISTRY, Dataset, word_vectors
from fairpate.data.registry import compared_on
from fairpate.encoders import PublicEncoder
from fairpate.methods import base
from fairpate.methods.base import Method, Trained
from fairpate.pages import delta_caution
from fairpate.privacy.accountant import Event
from fairpate.privacy.mechanism_events import SecretTrials, event_from, event_json, flat
from fairpate.releases.directory import read_release, write_json
from fairpate.releases.odometer import Standing, standing_remarks
from fairpate.run.forecast import public_units
from fairpate.run.opened import OpenRun
from fairpate.run.private_metrics import stated_tables, table_event
from fairpate.types import REMARKS, PrivacyStatement, strict


def stated_units(config: Method, dataset: Dataset, events: Sequence[Event]) -> int | None:
    """Return the public number of protected units, with which delta is compared; None if it is not public.

    It is the declared number (:func:`public_units`). Without one it is the real number only if ``events``, those of the
    release that is stated, publish it by their sampling rate.
    """
    declared = public_units(config, dataset)
    if declared is None and size_remarks(config, flat(events), dataset.unit):
        return dataset.private.num_protected
    return declared


def state_release(opened: OpenRun, trained: Trained, remarks: Sequence[str] = ()) -> None:
    """Write the privacy statement of what a run released, and print the total cost together with earlier releases.

    ``trained`` has the released model and its privacy events; ``remarks`` are further remarks for the statement.
    """
    config, run, log = opened.config, opened.run, opened.log
    parts: dict[Literal["test", "validation"], tuple[Event, ...]] = {}
    if config.evaluation.metrics == "private":
        # The table is drawn after this statement, which prices it before anything of it is visible.
        parts["test"] = stated_tables(run, lambda: table_event(config.price(trained), config.student.reject))
    if run.choice.exists():
        parts["validation"] = read_release(run.choice)[0].events
        # Made under another odometer, perhaps: this one counts it by the id of the choice, once.
        log.of_part("validation").count_published(parts["validation"], noise=trained.noise)
    and_of = [log.of_part(part).charge_of(events, noise=trained.noise) for part, events in parts.items()]
    standing = log.standing(delta=config.target.delta, and_of=and_of)
    for remark in standing_remarks(standing, delta=config.target.delta):
        opened.reporter.note("odometer", remark)
    statement = statement_of(
        config,
        trained,
        standing=standing,
        records_alone=opened.dataset.records_alone,
        shared=log.shared_remarks(),
        remarks=remarks,
        parts=parts,
        units=stated_units(config, opened.dataset, trained.events),
        encoder=opened.dataset.encoder,
        reads_word_vectors=any(code.ngrams == word_vectors.NAME for code in opened.dataset.feature_codes),
    )
    write_json(run.statement, strict(statement))


def with_lost_tables(opened: OpenRun, statement: PrivacyStatement) -> PrivacyStatement:
    """Return the privacy ``statement`` of an existing model after adding the cost of every noisy table that the run
    drew for private metrics, including tables whose files were deleted. Write the statement if it changed."""
    # The statement of an existing model is not made again, but its table of metrics may be drawn once more.
    log, tables = opened.log, stated_tables(opened.run, lambda: event_from(statement.part_events["test"][-1]))
    if list(map(event_json, tables)) == list(statement.part_events["test"]):
        return statement
    cost = base.price(tables, delta=statement.delta).epsilon
    standing = log.standing(
        delta=statement.delta, and_of=[log.of_part("test").charge_of(tables, noise=statement.noise)]
    )
    is_named = statement.earlier_releases is not None and standing is not None
    found = replace(
        statement,
        epsilon=None if statement.epsilon is None else max(statement.epsilon, cost),
        part_events={**statement.part_events, "test": tuple(map(event_json, tables))},
        epsilon_with_earlier=max(standing.epsilon, cost) if is_named and standing else None,
        epsilon_adaptive_with_earlier=max(standing.epsilon_adaptive, cost) if is_named and standing else None,
        remarks=(*(each for each in statement.remarks if each != REMARKS["tables_lost"]), REMARKS["tables_lost"]),
    )
    write_json(opened.run.statement, strict(found))
    return found


_AS_IF_PUBLIC = "features and labels, which the model is trained on as if they were public"


def statement_of(
    config: Method,
    trained: Trained,
    *,
    standing: Standing | None = None,
    records_alone: bool = False,
    shared: Sequence[str] = (),
    remarks: Sequence[str] = (),
    parts: Mapping[Any, Sequence[Event]] = MappingProxyType({}),
    units: int | None = None,
    encoder: PublicEncoder | None = None,
    reads_word_vectors: bool = False,
) -> PrivacyStatement:
    """Return the privacy statement of a trained model.

    ``standing``: the total cost with the operator's earlier releases, which is stated if ``config.names_earlier``; None
    if the release was not charged. ``records_alone``: True if a person may have several records, but the unit of
    privacy is a record. ``shared``: remarks on releases from which several runs learn. ``remarks``: further remarks,
    which come last. ``parts``: the privacy events on test or validation records, which are not among the events of
    ``trained``. ``units``: the public number of protected units, with which delta is compared. ``encoder``: the
    network, trained elsewhere, that computed the features. ``reads_word_vectors``: whether public vectors of words did.
    """
    cost = config.price(trained)
    for events in parts.values():  # in parallel: a unit is in one part, and the largest price holds for all
        cost = replace(cost, epsilon=max(cost.epsilon, base.price(events, delta=cost.delta).epsilon))
    if standing is not None:  # the odometer composes events, and a bound fixed beforehand may be above what they cost
        fixed, adaptive = (max(each, cost.epsilon) for each in (standing.epsilon, standing.epsilon_adaptive))
        standing = replace(standing, epsilon=fixed, epsilon_adaptive=adaptive)
    if not config.names_earlier:
        standing = None
    known = compared_on(config.data) if "validation" in parts else {}
    # Of a choice of settings, with the data sets on which the defaults were compared.
    choice = parts.get("validation", ())
    how = "tried" if any(isinstance(event, SecretTrials) for event in choice) else "chosen"
    defaults = {name: "tested_defaults" if protected else "public_defaults" for name, protected in known.items()}
    chosen = (REMARKS[how], *(REMARKS[words].format(name) for name, words in defaults.items()))
    keeps_key = bool(parts) and cost.relation == "replace one" and cost.unit != "sensitive attribute"
    return PrivacyStatement(
        method=config.method,
        unit=cost.unit,
        relation=cost.relation,
        delta=cost.delta,
        # JSON has no infinity.
        epsilon=None if math.isinf(cost.epsilon) else cost.epsilon,
        accounting=cost.accounting,
        noise=trained.noise,
        events=tuple(map(event_json, trained.events)),
        queries=trained.queries,
        not_protected=_AS_IF_PUBLIC if cost.unit == "sensitive attribute" else None,
        earlier_releases=None if standing is None else standing.earlier,
        epsilon_with_earlier=None if standing is None else standing.epsilon,
        epsilon_adaptive_with_earlier=None if standing is None else standing.epsilon_adaptive,
        # Defaults of this package were chosen by the test records of the data sets that it knows.
        tuning_accounted="validation" in parts and not any(known.values()),
        part_events={part: tuple(event_json(event) for event in events) for part, events in parts.items()},
        declared_units=units if config.is_private else None,
        remarks=(
            *filter(None, (delta_caution(cost.delta, units, cost.unit) if config.is_private else "",)),
            *trained.remarks,
            *shared,
            *((REMARKS["in_parallel"],) if "test" in parts else ()),
            *(chosen if choice else ()),
            *((REMARKS["tables_lost"],) if len(parts.get("test", ())) > 1 else ()),
            *((REMARKS["keeps_key"],) if keeps_key else ()),
            *size_remarks(config, flat(trained.events), cost.unit),
            *((REMARKS["records_alone"],) if config.is_private and records_alone and cost.unit == "record" else ()),
            *((REMARKS["persons_by_name"],) if cost.unit == "person" and config.data.name not in REGISTRY else ()),
            *((REMARKS["reading_tells"],) if config.is_private and config.data.name not in REGISTRY else ()),
            *(trained_elsewhere(config, encoder, reads_word_vectors) if config.is_private else ()),
            *standing_remarks(standing, delta=cost.delta),
            *remarks,
        ),
    )


_DIGITS_SHOWN = 12


def trained_elsewhere(
    config: Method, encoder: PublicEncoder | None, reads_word_vectors: bool = False
) -> tuple[str, ...]:
    """Return the remarks for a privacy statement that no epsilon covers the training records of what was trained
    elsewhere: of the ``encoder`` that computed the features, of the vectors of words from which they were computed
    (``reads_word_vectors``), and of the initial weights that ``config`` names."""
    found = []
    if encoder is not None:
        facts = encoder.name, encoder.sha256[:_DIGITS_SHOWN], encoder.licence, encoder.trained_on
        found.append(REMARKS["encoder"].format(*facts))
    if reads_word_vectors:
        named = word_vectors.NAME, word_vectors.SHA256[:_DIGITS_SHOWN], word_vectors.LICENCE, word_vectors.TRAINED_ON
        found.append(REMARKS["word_vectors"].format(*named))
    weights = config.backbone.weights
    if weights is not None and config.networks and weights.sha256 is not None:
        found.append(REMARKS["pretrained"].format(weights.sha256[:_DIGITS_SHOWN]))
    return tuple(found)


def size_remarks(config: Method, events: tuple[Event, ...], unit: types.Unit) -> tuple[str, ...]:
    """Return the remark for a privacy statement that a published sampling rate reveals the private number of records or
    persons from which it was computed. Empty if no rate was computed from a private number."""
    # Events without sampling, and those that read every record, reveal no rate.
    samples = any(getattr(event, "sampling_rate", 1) < 1 for event in events)
    return (types.TELLS_SIZE[unit],) if samples and unit in types.TELLS_SIZE and config.rate_tells_size else ()
