"""Votes that were made elsewhere: aggregator, ledger and student for a consortium whose members keep their models.

    votes        a file: for each public record the class that every voter chose, or how many voters chose each class
    labels       Confident-GNMax with a gate, as in FairPATE (Algorithm 1)
    student      of the released labels, where features of the public records are known

Which private units are behind a vote cannot be seen here. The operator declares one (``votes.unit``) and attests that
each touches one vote of a query at most; then one unit moves one vote, and the price of queries to teachers is that of
the unit. Statement, ledger, odometer and every page name the unit, and the statement remarks the attestation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from aggregator.labelling import Ballot
from fairpate.app.rundir import RunDirectory
from fairpate.app.votes import StandingVoters
from fairpate.app.votes_file import VotesConfig, read_votes_file
from fairpate.config import ConfigError
from fairpate.data import Dataset, Split
from fairpate.methods.definition import Training
from fairpate.methods.voting import NO_GATE, GnmaxMethod, Labels
from fairpate.types import GateRule, MechanismParameters, Unit
from fairpate.votes_config import GatedAggregatorConfig

_NO_CHECK = MechanismParameters(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=1)


class OwnAggregatorConfig(GatedAggregatorConfig):
    """Confident&Fair-GNMax, by default without a check of consensus and without a gate."""

    mechanism: MechanismParameters = _NO_CHECK
    gate: GateRule = NO_GATE


class OwnVotes(GnmaxMethod):
    """Labels from votes in a file."""

    title: ClassVar[str] = "Votes made elsewhere"
    paper: ClassVar[str] = "Papernot et al. 2018, arXiv 1802.08908; Yaghini et al. 2023 (FairPATE), Algorithm 1"

    method: str = "own_votes"
    votes: VotesConfig = VotesConfig()
    aggregator: OwnAggregatorConfig = OwnAggregatorConfig()

    @property
    def unit(self) -> str:
        """As declared."""
        return self.votes.unit or "what the operator declares"

    def unit_of(self, dataset: Dataset) -> Unit:  # noqa: ARG002 - of the operator
        """As declared."""
        assert self.votes.unit is not None
        return self.votes.unit

    @property
    def keeps_teachers(self) -> bool:
        """They are elsewhere; what stays are their votes, in the file."""
        return self.votes.path is not None and self.votes.path.is_file()

    @property
    def votes_on_anything(self) -> bool:
        """Only on what is in the file."""
        return False

    @property
    def num_voters(self) -> int:
        """As the file's header, or the operator, says."""
        return self.votes.num_voters or 0

    @property
    def gate(self) -> GateRule:
        """As configured."""
        return self.aggregator.gate

    def check(self) -> None:
        """ConfigError besides for a file or a unit that is not named, and for noise that nobody chose."""
        super().check()
        if self.votes.path is None or self.votes.unit is None or not self.votes.classes:
            raise ConfigError("votes: give path, unit and classes, as `fairpate aggregate` does.")
        # A standard deviation of 1 vote is the default's alone, and hides next to nothing.
        if self.target.epsilon is None and self.aggregator.mechanism == _NO_CHECK:
            raise ConfigError("target.epsilon: no epsilon and no noise was chosen; give --epsilon, or --mechanism.")

    def own_dataset(self) -> Dataset | None:
        """The public records of the file. ConfigError where no features are known, so that no student can learn."""
        self.check()
        if not self.votes.features:
            raise ConfigError("votes.features: none, so no student can learn; `fairpate aggregate` releases labels.")
        return read_votes_file(self.votes).dataset

    def check_data(self, dataset: Dataset) -> None:
        """ConfigError besides for other records than those of the file."""
        if dataset.public.record_id != tuple(read_votes_file(self.votes).votes.record_ids):
            raise ConfigError(f"data.name: {self.votes.path} has votes on other records than {dataset.name}.")
        super().check_data(dataset)

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:  # noqa: ARG002
        """The votes of the file on the queries."""
        votes = read_votes_file(self.votes).votes
        row_of = {name: row for row, name in enumerate(votes.record_ids)}
        yield votes.take([row_of[name] for name in queries.record_id])

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:  # noqa: ARG002 - none is trained
        """The votes of the file, as often as they are asked for."""
        votes = read_votes_file(self.votes).votes
        row_of = {name: row for row, name in enumerate(votes.record_ids)}
        return StandingVoters(
            ensemble=votes.ensemble,
            count_votes=lambda questions: votes.counts([row_of[each.query.record_id] for each in questions]),
            try_vote=lambda _: None,
            are_answering=lambda: True,
            close=lambda: None,
        )

    def release(self, training: Training) -> Labels:
        """With what the operator attests."""
        labels = super().release(training)
        return replace(labels, remarks=(attestation(self.unit_of(training.dataset)), *labels.remarks))


def attestation(unit: Unit) -> str:
    """What a statement remarks, and what every page shows."""
    return (
        f"The votes were made elsewhere. The operator attests that each {unit} touches one vote of a query at most; ε "
        f"does not cover a {unit} that touches more."
    )
