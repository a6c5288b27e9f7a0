"""SF-PATE on the records of a training: PATE's teachers, ledger and release, for the sensitive attribute alone.

``aggregator`` and ``teachers`` are PATE's settings, ``f_ld`` those of what is fair: the student of SF_S, which asks for
the attributes of private records, or the teachers of SF_T, who are asked for the labels of the public pool.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import torch

from fairpate.app.methods.lagrangian import check_attribute
from fairpate.app.methods.pate import NO_GATE, learn_from_labels, release_within_target
from fairpate.app.methods.training import Training
from fairpate.app.pipeline import AskTeachers, ask_teachers
from fairpate.app.progress import Reporter
from fairpate.app.rundir import RunDirectory, read_json, write_json
from fairpate.app.seeds import Stream, stream_seed
from fairpate.app.tables import write_votes
from fairpate.baselines import pf_ld
from fairpate.baselines.mean_parity import UNKNOWN, MeanParity
from fairpate.baselines.method import Trained
from fairpate.baselines.sf_pate import AttributeQueries, with_labels
from fairpate.config import ConfigError, RunConfig
from fairpate.data import Dataset, Split
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_logits
from fairpate.train_config import FldConfig, TrainConfig
from fairpate.types import LabelledSet, VoteBatch
from teachers.shard import assign_teachers, shard_key, shard_rows
from teachers.vote import count_votes


def train_sf_pate(training: Training) -> Trained:
    """Within the target for one sensitive attribute."""
    return _train_sf_s(training) if training.config.sf_pate.variant == "sf_s" else _train_sf_t(training)


def check_sf_pate(config: TrainConfig) -> None:
    """ConfigError for a target or a budget that it cannot be held to."""
    check_attribute(config)
    if config.aggregator.budget is not None:
        raise ConfigError("aggregator.budget: the target is the budget of a method; leave it out.")
    if config.aggregator.publication is not None:
        raise ConfigError("aggregator.publication: prices whole records, not a sensitive attribute; leave it out.")


def _train_sf_s(training: Training) -> Trained:
    """Attributes of private records are released; F-LD learns from all records, some without an attribute."""
    dataset, config = training.dataset, training.config
    asked = attribute_questions(dataset)
    labelled, release = _release(replace(training, dataset=asked), ask_teachers)
    groups = released_groups(dataset.private, labelled)
    with training.reporter.stage(config.method) as advance:
        fair = pf_ld.train_f_ld(
            training.model,
            dataset.private.x,
            dataset.private.y,
            groups,
            config.f_ld,
            parity=_parity(dataset, config.f_ld),
            generator=training.generator(Stream.TRAINING),
            allow_empty_cells=True,
            on_progress=advance,
        )
    return replace(release, model=fair.model)


def _train_sf_t(training: Training) -> Trained:
    """Fair teachers answer for labels of the public pool."""
    labelled, release = _release(training, _ask_fair_teachers(training))
    return learn_from_labels(training, labelled, release)


def attribute_questions(dataset: Dataset) -> Dataset:
    """The data set of teachers that predict attributes: (x, y) as features, the attribute as label, one group."""
    private = dataset.private
    split = Split(
        x=with_labels(private.x, private.y, dataset.num_classes),
        y=private.z,
        z=torch.zeros_like(private.z),
        record_id=private.record_id,
        unit_id=private.unit_id,
    )
    return replace(dataset, private=split, public=split, label_names=dataset.group_names, group_names=("everyone",))


def _release(training: Training, ask: AskTeachers) -> tuple[LabelledSet, Trained]:
    """Released labels, priced for the attribute; the operator's costs name that unit too."""
    labelled, release = release_within_target(training, gate=NO_GATE, ask=ask, attribute_only=True)
    events = tuple(AttributeQueries(**vars(event)) for event in release.events)
    path = training.run.costs
    named = {"unit": AttributeQueries.unit, "relation": AttributeQueries.relation}
    write_json(path, read_json(path) | named)
    return labelled, replace(release, events=events)


def released_groups(private: Split, labelled: LabelledSet) -> torch.Tensor:
    """Groups (N,) of private records, ``UNKNOWN`` where none was released."""
    row_of = {record_id: row for row, record_id in enumerate(private.record_id)}
    groups = torch.full((len(private),), UNKNOWN, dtype=torch.int64)
    rows = torch.tensor([row_of[record_id] for record_id in labelled.record_ids], dtype=torch.int64)
    groups[rows] = torch.from_numpy(labelled.labels)
    return groups


def _ask_fair_teachers(training: Training) -> AskTeachers:
    """As :func:`fairpate.app.pipeline.ask_teachers`, with teachers that F-LD trains one after another."""
    settings = training.config.f_ld

    def ask(run: RunDirectory, config: RunConfig, dataset: Dataset, queries: Split, reporter: Reporter) -> VoteBatch:
        if run.votes.exists():
            return ask_teachers(run, config, dataset, queries, reporter)
        private, count = dataset.private, config.teachers.num_teachers
        rows_T = shard_rows(assign_teachers(private.unit_id, count, shard_key(config.seed)), count)
        votes_QC = np.zeros((len(queries), dataset.num_classes), dtype=np.int64)
        with reporter.stage("teachers") as advance:
            for teacher, rows in enumerate(rows_T):
                shard = private.take(torch.from_numpy(rows))
                prediction = _fair_vote(shard, queries, dataset, config, settings, teacher=teacher)
                votes_QC += count_votes(prediction.to(torch.int16).numpy()[None], dataset.num_classes)
                advance(teacher + 1, count)
        batch = VoteBatch(
            record_ids=queries.record_id,
            groups_Q=queries.z.numpy(),
            votes_QC=votes_QC,
            ensemble=_digest(config, settings, private),
        )
        write_votes(batch, run.votes)
        return batch

    return ask


def _fair_vote(
    shard: Split, queries: Split, dataset: Dataset, config: RunConfig, settings: FldConfig, *, teacher: int
) -> torch.Tensor:
    """One teacher's labels of the queries, (Q,)."""
    generator = torch.Generator().manual_seed(stream_seed(config.seed, Stream.TRAINING) + teacher)
    model = build_model(
        config.teachers.model,
        input_shape=tuple(shard.x.shape[1:]),
        num_classes=dataset.num_classes,
        generator_seed=int(torch.randint(2**62, (), generator=generator)),
    )
    if len(shard):
        pf_ld.train_f_ld(
            model,
            shard.x,
            shard.y,
            shard.z,
            settings,
            parity=_parity(dataset, settings),
            generator=generator,
            allow_empty_cells=True,
        )
    return predict_logits(model, queries.x).argmax(dim=1)


def _parity(dataset: Dataset, config: FldConfig) -> MeanParity:
    return MeanParity(
        constraint=config.constraint,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        sharpness=config.sharpness,
    )


def _digest(config: RunConfig, settings: FldConfig, private: Split) -> str:
    """Sixteen hexadecimal digits that change with the teachers' records, settings or seed."""
    told = (config.teachers.model_dump(mode="json"), settings.model_dump(mode="json"), config.seed, private.record_id)
    digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=8)
    for values in (private.x, private.y, private.z):
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
