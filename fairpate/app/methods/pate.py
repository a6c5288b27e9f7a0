"""The PATE family: teachers vote, an aggregator releases labels within the target, a student learns from them.

Four members differ in where demographic parity enters (FairPATE, Section 4 and Appendix B): nowhere (``pate``), while
the aggregator answers (``fairpate``), between the released labels and the student (``pate_s_pre``, Algorithm 3), in
the student's loss (``pate_s_in``). ``aggregator.gate`` is the rule of the two in the middle. What follows the released
labels is post-processing: all four cost what their queries cost.

``pate.price`` says what the target limits. ``data_independent``: both noises are scaled by one factor, so that the
queries fit whatever the votes. ``data_dependent``, as in the papers: the noises stay, and queries stop when the price
of the votes reaches the target; when that happens leaks, and the published epsilon is the data-independent one, which
the statement remarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fairpate.app.methods.training import Training
from fairpate.app.pipeline import AskTeachers, ask_teachers, fit_student
from fairpate.app.release import check_budget, choose_queries, release_labels
from fairpate.app.reporting import costs
from fairpate.app.rundir import write_json
from fairpate.app.seeds import Stream
from fairpate.baselines.method import Trained
from fairpate.baselines.preprocess import streaming_filter
from fairpate.config import BudgetConfig, ConfigError
from fairpate.nn.dpfr import dpfr, group_batches
from fairpate.nn.models import memory_format_for, scale_bytes
from fairpate.privacy.accountant import ConfidentGnmaxQueries, Event
from fairpate.privacy.calibration import least_noise
from fairpate.train_config import PrivacyTarget, TrainConfig
from fairpate.types import GateRule, LabelledSet, MechanismParameters

NO_GATE = GateRule(max_disparity=math.inf, min_count=0)


def train_pate(training: Training) -> Trained:
    """PATE: no parity anywhere."""
    labelled, release = release_within_target(training, gate=NO_GATE)
    return learn_from_labels(training, labelled, release)


def train_fairpate(training: Training) -> Trained:
    """FairPATE: the gate stands in the aggregator."""
    labelled, release = release_within_target(training, gate=training.config.aggregator.gate)
    return learn_from_labels(training, labelled, release)


def train_pate_s_pre(training: Training) -> Trained:
    """PATE-S_pre: the gate stands between PATE's labels and the student."""
    labelled, release = release_within_target(training, gate=NO_GATE)
    dataset = training.dataset
    kept_N = streaming_filter(
        labelled.labels,
        labelled.groups,
        rule=training.config.aggregator.gate,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
    )
    training.reporter.note("filter", f"{int(kept_N.sum())} of {len(kept_N)} released labels kept")
    return learn_from_labels(training, labelled.take(kept_N), release)


def train_pate_s_in(training: Training) -> Trained:
    """PATE-S_in: the student's loss holds the demographic-parity regulariser of public batches."""
    labelled, release = release_within_target(training, gate=NO_GATE)
    return learn_from_labels(training, labelled, release, penalty=_penalty(training))


def check_pate(config: TrainConfig) -> None:
    """ConfigError for a target that PATE cannot be held to."""
    if config.target.record_relation != "add or remove one":
        raise ConfigError(
            f"target.relation: {config.target.relation!r} changes two teachers and is not priced here; use 'add or "
            "remove one'."
        )
    if config.aggregator.budget is not None:
        raise ConfigError("aggregator.budget: the target is the budget of a method; leave it out.")


def mechanism_within(mechanism: MechanismParameters, target: PrivacyTarget, *, num_queries: int) -> MechanismParameters:
    """``mechanism`` with both noises multiplied by the least factor that keeps ``num_queries`` within ``target``.

    Whatever the votes. ValueError for a target that no noise reaches.
    """

    def scaled(factor: float) -> MechanismParameters:
        return replace(
            mechanism,
            threshold_stddev_votes=factor * mechanism.threshold_stddev_votes,
            noise_stddev_votes=factor * mechanism.noise_stddev_votes,
        )

    def events(factor: float) -> list[Event]:
        return [ConfidentGnmaxQueries(count=num_queries, **vars(scaled(factor)))]

    factor = least_noise(events, target_epsilon=target.epsilon, target_delta=target.delta)
    return scaled(factor)


def release_within_target(
    training: Training, *, gate: GateRule, ask: AskTeachers = ask_teachers, attribute_only: bool = False
) -> tuple[LabelledSet, Trained]:
    """Released labels, and what their release cost; the model in it is the one that has yet to learn.

    ``ask`` trains teachers and lets them vote; ``attribute_only`` where they tell of the sensitive attribute alone.
    """
    dataset, run, reporter = training.dataset, training.run, training.reporter
    config = _with_target(training, gate)
    queries = choose_queries(dataset, config)
    check_budget(config, dataset, queries)
    votes = ask(run, config, dataset, queries, reporter)
    with reporter.stage("aggregator") as advance:
        release = release_labels(
            run, config, dataset, queries, votes, advance, meter=training.meter, attribute_only=attribute_only
        )
    statement = release.statement
    reporter.note("aggregator", f"{statement.answered} of {statement.queries_posed} queries answered")
    write_json(run.costs, costs(release.spending, statement))
    return release.labelled, Trained(
        model=training.model, events=release.planned, noise=statement.noise, remarks=statement.remarks
    )


def _with_target(training: Training, gate: GateRule) -> TrainConfig:
    config = training.config
    settings, target = config.aggregator, config.target
    updates: dict[str, Any] = {"gate": gate, "target_delta": target.delta}
    if config.pate.price == "data_dependent":
        updates["budget"] = BudgetConfig(kind="data_dependent", epsilon=target.epsilon, accept_leak=True)
    else:
        num_queries = settings.num_queries or len(choose_queries(training.dataset, config))
        updates["budget"] = BudgetConfig(kind="data_independent", epsilon=target.epsilon)
        updates["mechanism"] = mechanism_within(settings.mechanism, target, num_queries=num_queries)
    return config.model_copy(update={"aggregator": settings.model_copy(update=updates)})


def learn_from_labels(training: Training, labelled: LabelledSet, release: Trained, **options: Any) -> Trained:
    """The release with a student of its labels; ``options`` as :func:`fairpate.app.pipeline.fit_student` takes them."""
    network = fit_student(
        training.config, training.dataset, labelled, training.reporter, initial_model=training.model, **options
    )
    return replace(release, model=network)


def _penalty(training: Training) -> Callable[[nn.Module], Tensor] | None:
    """The weighted regulariser of a fresh public batch at each call; None for weight 0."""
    public, config = training.dataset.public, training.config.pate_s_in
    if not config.weight:
        return None
    batches = group_batches(public.z, config.batch_size, training.generator(Stream.TRAINING))
    memory_format = memory_format_for(public.x)

    def penalty(model: nn.Module) -> Tensor:
        rows = next(batches)
        logits = model(scale_bytes(public.x[rows]).contiguous(memory_format=memory_format))
        return config.weight * dpfr(logits, public.z[rows], config)

    return penalty
