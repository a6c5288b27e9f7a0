"""Methods whose voters answer public queries: what all of them do about targets, budgets and released labels.

With ``target.epsilon`` both noises of ``aggregator.mechanism`` are multiplied by the least factor at which the queries
fit, whatever the votes. Without one the noise is as configured, and ``aggregator.budget`` may limit what is spent; its
kind ``data_dependent``, as in the papers, stops where the data-dependent privacy cost reaches the limit: when that
happens leaks, and what is published is the price of the queries submitted, which the statement remarks.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field

from aggregator.labelling import Ballot
from aggregator.ledger.budget import mechanism_within
from aggregator.mechanism import Mechanism
from aggregator.mechanisms import mechanism_of
from fairpate.app.publication.reporting import Spending, costs
from fairpate.app.release import ReleasePlan, check_budget, choose_queries, release_labels
from fairpate.app.rundir import RunDirectory, write_json
from fairpate.app.votes import StandingVoters
from fairpate.config import ConfigError, Noise, RayConfig, StudentConfig
from fairpate.data import Dataset, Split
from fairpate.methods.definition import Method, Training, Voting
from fairpate.methods.trained import Trained
from fairpate.types import GateRule, LabelledSet
from fairpate.votes_config import AggregatorConfig, BudgetConfig, PublicationConfig, QueriesConfig, QueriesTarget

NO_GATE = GateRule(max_disparity=math.inf, min_count=0)


@dataclass(frozen=True, kw_only=True)
class Labels(Trained):
    """Released labels, before anybody learned from them.

    ``spending`` is the operator's; None where queries are no public records, and pages have no groups to show, and
    once somebody learned.
    """

    labelled: LabelledSet
    spending: Spending | None = None


class VotingMethod(Method):
    """What all methods share whose voters answer public queries; each says who votes and how it learns."""

    asks_teachers: ClassVar[bool] = True
    reads_groups: ClassVar[bool] = False

    target: QueriesTarget = QueriesTarget()
    noise: Noise = Field("os_entropy", description="`seeded` reproduces a run and gives no privacy.")
    ray: RayConfig = RayConfig()
    aggregator: QueriesConfig = QueriesConfig()
    student: StudentConfig = StudentConfig()

    @property
    def reads_public(self) -> bool:
        """They are the queries."""
        return True

    @property
    def reads_public_groups(self) -> bool:
        """A gate does."""
        return self.gate != NO_GATE or self.public_data.calibration is not None

    @property
    def keeps_teachers(self) -> bool:
        """Whether a service may go on asking them."""
        return True

    @property
    def votes_on_anything(self) -> bool:
        """Whether voters that stay can vote on records that are not in the pool."""
        return True

    @property
    def leaves_room(self) -> bool:
        """Whether a service may find room for queries that the run did not ask: a target is planned for the run's."""
        return self.target.epsilon is None

    @property
    def num_voters(self) -> int:
        """The most votes that a query gets."""
        raise NotImplementedError

    @property
    def mechanism(self) -> Mechanism:
        """What releases labels of votes, with the noise as configured."""
        raise NotImplementedError

    @property
    def publication(self) -> PublicationConfig | None:
        """How the data-dependent privacy cost is published, where it is."""
        return None

    @property
    def gate(self) -> GateRule:
        """What the aggregator holds its answers to."""
        return NO_GATE

    def check(self) -> None:
        """ConfigError for a target and a budget at once."""
        if self.target.epsilon is not None and self.aggregator.budget is not None:
            raise ConfigError("aggregator.budget: target.epsilon is the budget; leave one of them out.")

    def plan(self, dataset: Dataset) -> ReleasePlan:
        """What is fixed before the first vote: noises as configured, or scaled to the target."""
        settings, budget, target = self.aggregator, self.aggregator.budget, self.target
        mechanism = self.mechanism
        if target.epsilon is not None:
            mechanism = mechanism_within(
                mechanism,
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                # A public number of public records: noise that is scaled to it tells nothing.
                num_queries=settings.num_queries or len(choose_queries(dataset, settings)),
            )
            # The target limits the ledger as well: a service that goes on after the run may not pass it.
            budget = BudgetConfig(kind="data_independent", epsilon=target.epsilon)
        return ReleasePlan(
            settings=settings,
            mechanism=mechanism,
            publication=self.publication,
            gate=self.gate,
            budget=budget,
            delta=target.delta,
            num_teachers=self.num_voters,
            noise=self.noise,
            seed=self.seed,
            student=self.student,
            unit=self.unit_of(dataset),
        )

    def queried(self, dataset: Dataset) -> Dataset:
        """The data set as teachers see it: what they learn, and as public records whom they are asked about."""
        return dataset

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError for a release that cannot be, before any work."""
        self.num_fitting(dataset)

    def num_fitting(self, dataset: Dataset) -> int:
        """How many queries the budget has room for. ConfigError where it has none."""
        asked = self.queried(dataset)
        plan = self.plan(asked)
        return check_budget(plan, asked, choose_queries(asked, plan.settings))

    def voting(self, dataset: Dataset, num_records: int) -> Voting:  # noqa: ARG002 - as many voters vote whatever it is
        """All voters on every query."""
        plan = self.plan(dataset)
        noise = float(plan.mechanism.parameters["noise_stddev_votes"])
        return Voting(
            votes=self.num_voters, noise_stddev_votes=noise, labels=len(choose_queries(dataset, plan.settings))
        )

    def release(self, training: Training) -> Labels:
        """Labels within the target or budget. However often it runs in one folder, one release results."""
        dataset, run, reporter = self.queried(training.dataset), training.run, training.reporter
        plan = self.plan(dataset)
        queries = choose_queries(dataset, plan.settings)
        with self.ballot(dataset, queries, training) as votes, reporter.stage("aggregator") as advance:
            released = release_labels(run, plan, dataset, queries, votes, advance, meter=training.meter)
        outcomes = released.queries
        reporter.note("aggregator", f"{outcomes.answered} of {outcomes.submitted} queries answered")
        if released.over_budget:
            reporter.note("aggregator", f"not asked, because the budget has no room: {released.over_budget}")
        labels = Labels(
            model=training.model,
            events=released.events,
            noise=released.noise,
            remarks=released.remarks,
            queries=outcomes,
            epsilon_bound=released.epsilon_bound,
            labelled=released.labelled,
            spending=released.spending if dataset.group_names == training.dataset.group_names else None,
        )
        write_json(run.costs, costs(released.spending, unit=labels.events[0].unit, relation=labels.events[0].relation))
        return labels

    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> AbstractContextManager[Ballot]:
        """The queries with those who vote on them, for as long as they are asked."""
        raise NotImplementedError

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        """Voters of a finished run that a service goes on asking, inside the Ray that it started."""
        raise NotImplementedError

    def train(self, training: Training) -> Trained:
        """Release labels, then learn from them."""
        return self.learn(training, replace(self.release(training), spending=None))

    def learn(self, training: Training, labels: Labels) -> Trained:
        """A student of the labels; costs nothing more."""
        return self.taught(training, labels, labels.labelled)

    def taught(self, training: Training, labels: Labels, kept: LabelledSet, **options: Any) -> Trained:
        """``labels`` with a student of those ``kept``; ``options`` as :func:`fairpate.app.students.fit_student`."""
        from fairpate.app.students import fit_student  # torch: a configuration is read without it

        # Runs without a target have always drawn the student's first weights from its own stream.
        if self.target.epsilon is not None or self.public_data.pretrain is not None:
            options["initial_model"] = training.model
        network = fit_student(self.student, training.dataset, kept, training.reporter, seed=self.seed, **options)
        return replace(labels, model=network, num_training_labels=len(kept.labels))


class GnmaxMethod(VotingMethod):
    """Those whose voters have one vote each, and whose labels Confident-GNMax releases."""

    aggregator: AggregatorConfig = AggregatorConfig()

    @property
    def mechanism(self) -> Mechanism:
        """Confident-GNMax as configured."""
        return mechanism_of(self.aggregator.mechanism, self.aggregator.release)

    @property
    def publication(self) -> PublicationConfig | None:
        """As configured."""
        return self.aggregator.publication
