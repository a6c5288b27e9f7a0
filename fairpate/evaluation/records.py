"""What the two pages of a run show: plain records that whoever ran it fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.reject_option import RejectOptionSpread
from fairpate.types import GateRule, PrivacyStatement

Outcome = Literal["answered", "confidence", "fairness", "free"]
OUTCOMES: Mapping[Outcome, str] = {
    "answered": "answered",
    "fairness": "refused by the fairness gate",
    "confidence": "refused: too little consensus",
    "free": "refused before the vote",
}


@dataclass(frozen=True, kw_only=True)
class GroupOutcomes:
    """How the queries of one public group ended."""

    name: str
    answered: int
    rejected_confidence: int
    rejected_fairness: int
    refused_free: int


@dataclass(frozen=True, kw_only=True)
class PublicReport:
    """What the public page shows.

    ``title`` names the data set, ``mechanism`` says in words how labels are released. ``num_private_records`` is a
    declared, public number (the exact count is itself protected when records may be added or removed); None leaves it
    out. ``epsilon_course_Q`` is the data-independent epsilon after each posed query, at the statement's delta: it grows
    with every one, also with those refused before the vote. ``answered_GC[z][k]`` counts released labels.
    ``evaluations`` maps what was measured on the test records to its result; the first is the headline.
    ``reject_option`` is how a student that may refuse fares in other orders of the test records; None for one that
    answers everything. ``num_training_labels``: released
    labels that the student was trained on, which the ledger may have outgrown; None where that is not known.
    """

    title: str
    statement: PrivacyStatement
    mechanism: str
    gate: GateRule
    num_private_records: int | None
    num_teachers: int
    num_public_records: int
    epsilon_course_Q: Sequence[float]
    outcomes: Sequence[GroupOutcomes]
    answered_GC: Sequence[Sequence[int]]
    evaluations: Mapping[str, Evaluation]
    reject_option: RejectOptionSpread | None = None
    num_training_labels: int | None = None

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("Expected at least one evaluation, got none.")
        if len(self.epsilon_course_Q) != self.statement.queries.submitted:
            raise ValueError(
                f"Expected one epsilon per posed query ({self.statement.queries.submitted}), "
                f"got {len(self.epsilon_course_Q)}."
            )
        if len(self.answered_GC) != len(self.headline.group_names):
            raise ValueError(
                f"Expected answered_GC to have a row for each of {len(self.headline.group_names)} groups, "
                f"got {len(self.answered_GC)}."
            )
        if self.reject_option and len(self.reject_option.coverage_G) != len(self.headline.group_names):
            raise ValueError(
                f"Expected reject_option to cover {len(self.headline.group_names)} groups, "
                f"got {len(self.reject_option.coverage_G)}."
            )

    @property
    def headline(self) -> Evaluation:
        """The first evaluation."""
        return next(iter(self.evaluations.values()))


@dataclass(frozen=True, kw_only=True)
class PrivateReport:
    """What the operator's page adds; every array follows the order of the posed queries and depends on the votes.

    ``rdp_Q`` is the data-dependent Renyi cost of each query at order ``rdp_order``, in nats. The courses are
    data-dependent epsilons after each query: ``epsilon_data_dependent_course_Q`` charges everything that was
    computed, ``epsilon_as_published_course_Q`` leaves out rejections by the fairness gate.
    ``plurality_votes_Q`` counts the teachers behind the most popular label.
    """

    public: PublicReport
    rdp_order: float
    rdp_Q: Sequence[float]
    epsilon_data_dependent_course_Q: Sequence[float]
    epsilon_as_published_course_Q: Sequence[float]
    plurality_votes_Q: Sequence[int]
    outcomes_Q: Sequence[Outcome]

    def __post_init__(self) -> None:
        posed = self.public.statement.queries.submitted
        for field in (
            "rdp_Q",
            "epsilon_data_dependent_course_Q",
            "epsilon_as_published_course_Q",
            "plurality_votes_Q",
            "outcomes_Q",
        ):
            if len(getattr(self, field)) != posed:
                raise ValueError(f"Expected {field} to have {posed} entries, got {len(getattr(self, field))}.")
