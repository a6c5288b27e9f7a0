"""What the pages of a run show: plain records that the caller fills in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from fairpate.evaluation.metrics import Evaluation, WithoutPrivacy
from fairpate.evaluation.private_population import PrivatePopulation
from fairpate.evaluation.reject_option import RejectOptionSpread
from fairpate.types import UNITS, GateRule, Relation, Unit

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

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers in the order of ``OUTCOMES``."""
        return self.answered, self.rejected_fairness, self.rejected_confidence, self.refused_free

    @property
    def total(self) -> int:
        """All of the group's queries."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """The published guarantee; ``epsilon`` is inf where there is none, ``events`` say what touched private records.

    ``noise`` is ``os_entropy``, or says why nothing is private. ``not_protected`` is what the model may reveal without
    noise, ``remarks`` qualify the guarantee, ``tells_size`` says that an event tells the number of private records.
    ``epsilon_with_earlier`` is what ``earlier_releases`` of the same private data cost together with this one if all
    were fixed beforehand, ``epsilon_adaptive_with_earlier`` the least limit that admits them, each chosen in view of
    the earlier ones; None where that is not finite.
    """

    unit: Unit
    relation: Relation
    epsilon: float
    delta: float
    accounting: str
    noise: str
    tuning_accounted: bool
    events: Sequence[str]
    epsilon_sanitised: float | None = None
    not_protected: str | None = None
    remarks: Sequence[str] = ()
    tells_size: bool = False
    earlier_releases: int = 0
    epsilon_with_earlier: float | None = None
    epsilon_adaptive_with_earlier: float | None = None

    @property
    def is_attested(self) -> bool:
        """Whether the unit is one that the operator declared, for votes that were made elsewhere."""
        return self.unit not in UNITS

    @property
    def protects(self) -> bool:
        """Whether the guarantee holds of what was published."""
        return math.isfinite(self.epsilon) and self.noise == "os_entropy"


@dataclass(frozen=True, kw_only=True)
class Voting:
    """What teachers were asked and what was answered, as far as it may be published.

    ``voters``, at most ``num_teachers`` a query, are ``teachers`` or ``neighbours``.
    ``mechanism`` says in words how labels are released. ``epsilon_course_Q`` is the data-independent epsilon after each
    submitted query, at the guarantee's delta: it grows with every one, also with those refused before the vote.
    ``answered_GC[z][k]`` counts released labels.
    """

    mechanism: str
    gate: GateRule
    num_teachers: int
    voters: str
    num_public_records: int
    queries_submitted: int
    answered: int
    rejected_confidence: int
    rejected_fairness: int
    refused_free: int
    epsilon_course_Q: Sequence[float]
    outcomes: Sequence[GroupOutcomes]
    answered_GC: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if len(self.epsilon_course_Q) != self.queries_submitted:
            raise ValueError(
                f"Expected one epsilon for each of {self.queries_submitted} queries, got {len(self.epsilon_course_Q)}."
            )


@dataclass(frozen=True, kw_only=True)
class PublicReport:
    """What the public page shows, of a run of any method.

    ``title`` names the data set. ``voting`` is None for a method whose teachers, if it has any, answer no queries.
    ``num_private_records`` is a declared, public number (the exact count is itself protected when records may be added
    or removed); None leaves it out. ``evaluations`` maps what was measured on the test records to its result; the first
    is the headline. ``reject_option`` is how a model that may refuse fares in other orders of the test records; None
    for one that answers everything. ``num_training_labels``: released labels that the student was trained on, which the
    ledger may have outgrown; None where that is not known. ``private_population``: what a release by group tells.
    ``made`` says when and by which version.
    """

    title: str
    method: str
    guarantee: Guarantee
    evaluations: Mapping[str, Evaluation]
    voting: Voting | None = None
    reject_option: RejectOptionSpread | None = None
    num_private_records: int | None = None
    num_training_labels: int | None = None
    private_population: PrivatePopulation | None = None
    made: str = ""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("Expected at least one evaluation, got none.")
        num_groups = len(self.headline.group_names)
        if self.voting and len(self.voting.answered_GC) != num_groups:
            raise ValueError(
                f"Expected answered_GC to have a row for each of {num_groups} groups, "
                f"got {len(self.voting.answered_GC)}."
            )
        if self.reject_option and len(self.reject_option.coverage_G) != num_groups:
            raise ValueError(
                f"Expected reject_option to cover {num_groups} groups, got {len(self.reject_option.coverage_G)}."
            )

    @property
    def headline(self) -> Evaluation:
        """The first evaluation."""
        return next(iter(self.evaluations.values()))

    @property
    def model(self) -> str:
        """What the published model is called: a student has teachers that answered queries."""
        return "student" if self.voting else "model"


@dataclass(frozen=True, kw_only=True)
class PrivateReport:
    """What the operator's page adds to the report of a run with votes.

    Every array follows the order of the submitted queries and depends on the votes.
    ``rdp_Q`` is the data-dependent Renyi cost of each query at order ``rdp_order``, in nats. The courses are
    data-dependent epsilons after each query: ``epsilon_data_dependent_course_Q`` charges everything that was
    computed, ``epsilon_as_in_paper_course_Q`` leaves out rejections by the fairness gate. ``rdp_worst_Q`` is what each
    query costs at its worst case, whatever its votes. ``plurality_votes_Q`` counts the voters behind the most popular
    label, ``runner_up_votes_Q`` those behind the next, ``num_votes_Q`` all who voted. ``groups_Q`` are places in
    ``voting.outcomes``, ``at_Q`` seconds since 1970 (0: not known), ``callers_Q`` who asked (empty: the run itself).
    ``without_privacy`` is what a model without noise reaches that learned from the same private records.
    """

    public: PublicReport
    rdp_order: float
    rdp_Q: Sequence[float]
    rdp_worst_Q: Sequence[float]
    epsilon_data_dependent_course_Q: Sequence[float]
    epsilon_as_in_paper_course_Q: Sequence[float]
    plurality_votes_Q: Sequence[int]
    runner_up_votes_Q: Sequence[int]
    num_votes_Q: Sequence[int]
    groups_Q: Sequence[int]
    outcomes_Q: Sequence[Outcome]
    at_Q: Sequence[float]
    callers_Q: Sequence[str]
    without_privacy: WithoutPrivacy | None = None

    def __post_init__(self) -> None:
        if self.public.voting is None:
            raise ValueError("Expected a report with votes; without them there is nothing for the operator alone.")
        submitted = self.public.voting.queries_submitted
        for name in (each.name for each in fields(self) if each.name.endswith("_Q")):
            if len(getattr(self, name)) != submitted:
                raise ValueError(f"Expected {name} to have {submitted} entries, got {len(getattr(self, name))}.")
