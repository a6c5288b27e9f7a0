"""Frozen dataclasses that pass from one stage of a run to the next, errors that a user can fix, strict JSON values and
progress reports.

Every package may import this module; it documents the meaning, unit and range of shared values once. Long loops report
their progress with :func:`tell` to the command that runs them.

Shapes: Q queries, C classes, G groups.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import yaml

MAX_THRESHOLD_VOTES = 2.0**23
"""The largest finite threshold for which noise tables exist; no ensemble has so many teachers."""
# Chances may be float32, whose sums over many classes are off by their rounding.
_SUM_TOLERANCE = 1e-4

PACKAGES = ("fairpate", "aggregator", "teachers", "student")
"""The packages of this project; a node on which it is installed has all of them."""
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
RealArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]
BudgetKind = Literal["data_independent", "query_count", "data_dependent"]
ReleaseKind = Literal["label", "counts"]
ColdStart = Literal["group", "cell", "all_groups"]
GapDefinition = Literal["one_vs_rest", "pairwise", "overall"]
Tail = Literal["gaussian", "discrete"]
Unit = str
"""The unit of privacy: one of :data:`UNITS`, or a word that the operator declares for votes made elsewhere."""
UNITS: tuple[Unit, ...] = ("record", "person", "sensitive attribute")
NotionName = Literal[
    "demographic_parity",
    "equalized_odds",
    "equal_opportunity",
    "accuracy_parity",
    "impact_ratio",
    "false_negative_rate",
    "false_positive_rate",
    "false_discovery_rate",
]
"""The notions of fairness, which `fairpate.fairness.rates` defines."""
DEFAULT_NOTION: NotionName = "demographic_parity"


@dataclass(frozen=True, kw_only=True)
class FairRule:
    """The user's definition of fair: a model is called fair if the value of ``notion`` is at most ``limit``.

    ValueError for a limit that is not above 0 and at most 1.
    """

    notion: NotionName = DEFAULT_NOTION
    limit: float = 0.1

    def __post_init__(self) -> None:
        # A limit of 0 would call no model fair, as rates of a sample always differ a little. NaN is refused too.
        if not 0 < self.limit <= 1:
            raise ValueError(
                "Expected a fairness limit above 0 and at most 1, four-fifths, or NOTION=LIMIT, got "
                f"{self.limit}; give one of these."
            )

    def __str__(self) -> str:
        """Return this definition of fair as text in the form that a configuration takes: NOTION=LIMIT."""
        return f"{self.notion}={self.limit}"


FOUR_FIFTHS = FairRule(notion="impact_ratio", limit=0.2)
"""The four-fifths rule: every group's selection rate is at least four fifths of the highest group's (29 CFR 1607.4
D)."""
MetricsKind = Literal["outside", "public", "private"]
"""How metrics are published: outside every guarantee, from public test records, or from a private release."""
Relation = Literal["add or remove one", "replace one"]


REMARKS: Mapping[str, str] = yaml.safe_load(Path(__file__).with_name("remarks.yaml").read_text(encoding="utf-8"))
"""The remarks that qualify a privacy statement, by name; remarks.yaml says when each is made."""
TELLS_SIZE: Mapping[Unit, str] = {unit: REMARKS["tells_size"].format(unit) for unit in ("record", "person")}
"""Remark of a privacy statement, by unit, if no number of records was declared."""


class UserError(Exception):
    """The base class of errors that the user can fix: the message names the field or file, the value and the remedy."""


class UsageError(UserError):
    """Raised for a fault of the user's request itself (an option, a name or a configuration), which would fail on any
    machine.

    A command ends with exit code 2 for this error, and with 1 for other failures.
    """


class DataError(UserError, ValueError):
    """Raised for records that cannot be used; the message names the file, column or option, the value and the
    remedy."""


class DataSettingsError(DataError, UsageError):
    """Raised for a request for records that no files could fulfil: an unknown data set, option or size."""


@dataclass(frozen=True, kw_only=True)
class GateRule:
    """The rule by which a demographic-parity gate accepts or rejects labels. FairPATE uses it in CF-GNMax (answers to
    queries), P_pre (training labels of a student) and IDP3 (predictions of a student).

    ``max_disparity`` is the margin gamma, at least 0. A label is answered only if the demographic-parity gap that would
    result (its tentative gap) is strictly below the margin; ``inf`` switches the gate off. ``min_count`` is M, at least
    0: the margin applies only after M answers. ``cold_start`` says which answers are counted for this: those of the
    query's group (``group``, Algorithm 1 of FairPATE), those with its group and label (``cell``), or those of each
    group (``all_groups``).
    """

    max_disparity: float
    min_count: int
    cold_start: ColdStart = "group"
    gap: GapDefinition = "one_vs_rest"

    def __post_init__(self) -> None:
        # In this form NaN is refused too.
        if not self.max_disparity >= 0:
            raise ValueError(f"Expected max_disparity >= 0, got {self.max_disparity}; set inf to switch the gate off.")
        if not 0 <= self.min_count < 2**31:
            raise ValueError(f"Expected 0 <= min_count < {2**31}, got {self.min_count}.")


ErrorKind = Literal["error", "false_negative", "false_positive"]


@dataclass(frozen=True, kw_only=True)
class ErrorBound:
    """A bound on the error rate of the answers of every group: a model answers only where it is confident enough.

    With probability ``confidence`` at most a share ``max_error`` of the answers of every group is wrong. ``of``: the
    answers that are counted, all of them or those to records of the second class (``false_negative``) or the first
    (``false_positive``). ``groups``: a threshold for ``each`` group, or one for ``all`` groups, for which the model
    need not know a record's group. ``otherwise``: what happens to a group for which no threshold keeps the bound: the
    model refuses all of its records, or the run stops with an error before a model is published.
    """

    max_error: float
    confidence: float = 0.95
    of: ErrorKind = "error"
    groups: Literal["each", "all"] = "each"
    otherwise: Literal["refuse", "stop"] = "refuse"

    def __post_init__(self) -> None:
        # In this form NaN is refused too.
        if not 0 < self.max_error < 1:
            raise ValueError(f"Expected 0 < max_error < 1, got {self.max_error}; .05 allows one wrong answer in 20.")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"Expected 0.5 <= confidence < 1, got {self.confidence}; 0.95 is usual.")


@dataclass(frozen=True, kw_only=True)
class AnswerRule:
    """The rule by which a model refuses records: a record is answered if its confidence, the largest probability of a
    class, is at least the threshold of its group and predicted label.

    ``thresholds_GC[g][k]`` is None where no record is answered. ``bound`` is what the rule guarantees.
    """

    bound: ErrorBound
    thresholds_GC: tuple[tuple[float | None, ...], ...]

    @property
    def needs_group(self) -> bool:
        """True if the threshold depends on the group."""
        return len(set(self.thresholds_GC)) > 1


@dataclass(frozen=True, kw_only=True)
class MechanismParameters:
    """The parameters of Confident-GNMax: threshold T and the standard deviations of its two noises, all in votes.

    ``threshold`` may be ``-inf`` (always confident) or ``inf`` (never). A standard deviation is at least 0; 0 means no
    noise, which is useful for tests and has infinite cost.
    """

    threshold: float
    threshold_stddev_votes: float
    noise_stddev_votes: float

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise ValueError("Expected threshold to be a number, inf or -inf; got nan.")
        # Tables of noise end there; an infinite threshold needs none.
        if MAX_THRESHOLD_VOTES < abs(self.threshold) < math.inf:
            raise ValueError(f"Expected |threshold| <= {MAX_THRESHOLD_VOTES:.0f} or infinite, got {self.threshold}.")
        for name in ("threshold_stddev_votes", "noise_stddev_votes"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"Expected 0 <= {name} < inf, got {value}.")


@dataclass(frozen=True, kw_only=True)
class QueryBudget:
    """The limit on all queries in a ledger (the record of queries and their costs); fixed when the ledger is created.

    A budget of the kind ``data_independent`` ends before the data-independent cost of the submitted queries exceeds
    (``epsilon``, ``delta``). One of the kind ``query_count`` ends after ``max_queries`` queries. One of the kind
    ``data_dependent`` limits the data-dependent cost, as the PATE papers do. The query at which it ends depends on
    private votes, and so leaks information about them. ``delta`` is also the delta at which costs are stated.
    """

    kind: BudgetKind
    delta: float
    epsilon: float | None = None
    max_queries: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(f"Expected 0 < delta < 1, got {self.delta}.")
        limits = f"max_queries {self.max_queries}, epsilon {self.epsilon}"
        if self.kind == "query_count":
            if self.epsilon is not None or self.max_queries is None or self.max_queries < 1:
                raise ValueError(f"Budget of kind {self.kind}: expected max_queries >= 1 and no epsilon, got {limits}.")
        elif self.max_queries is not None or self.epsilon is None or not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"Budget of kind {self.kind}: expected 0 < epsilon < inf and no max_queries, got {limits}."
            )


@dataclass(frozen=True, kw_only=True)
class VoteBatch:
    """The votes of teachers on public queries; not to be published.

    ``votes_QC[i, k]`` counts the teachers that chose class k for ``record_ids[i]``, whose public group is
    ``groups_Q[i]``; every row sums to the number of teachers. ``ensemble`` identifies the teachers: a digest of their
    training data and settings.
    """

    record_ids: Sequence[str]
    groups_Q: IntArray
    votes_QC: IntArray
    ensemble: str

    def __post_init__(self) -> None:
        num_queries = len(self.record_ids)
        if self.votes_QC.ndim != 2 or not num_queries == len(self.groups_Q) == len(self.votes_QC):
            sizes = num_queries, len(self.groups_Q), self.votes_QC.shape
            raise ValueError(
                "Expected one item of groups_Q and one row of votes_QC for each record id, got record_ids, groups_Q, "
                f"votes_QC of sizes {sizes}; give as many of each."
            )

    def counts(self, rows: Sequence[int]) -> IntArray:
        """Return the votes per class on the queries with the indices ``rows``: these rows of ``votes_QC``."""
        return self.votes_QC[list(rows)]

    def take(self, rows: Sequence[int]) -> VoteBatch:
        """Return the votes on the queries in ``rows`` as a new batch, in this order."""
        return VoteBatch(
            record_ids=[self.record_ids[row] for row in rows],
            groups_Q=self.groups_Q[list(rows)],
            votes_QC=self.votes_QC[list(rows)],
            ensemble=self.ensemble,
        )


@dataclass(frozen=True, kw_only=True)
class LabelledSet:
    """The public records whose queries were answered, in the order of the queries, with their released labels.

    ``counts`` (Q, C) are the noisy votes, if they were released with every label. ``chances`` (Q, C), if given, are the
    probabilities of all classes given what was released; a student learns from them instead of ``labels``.
    """

    record_ids: tuple[str, ...]
    labels: IntArray
    groups: IntArray
    counts: IntArray | None = None
    chances: RealArray | None = None

    def __post_init__(self) -> None:
        if not len(self.record_ids) == len(self.labels) == len(self.groups):
            raise ValueError("Expected one label and one group per record id; the numbers of the three differ.")
        for name, values in (("counts", self.counts), ("chances", self.chances)):
            if values is not None and (values.ndim != 2 or len(values) != len(self.record_ids)):
                raise ValueError(f"Expected {name} of shape ({len(self.record_ids)}, classes), got {values.shape}.")
        if (chances := self.chances) is not None:
            wrong = ~((chances >= 0).all(axis=1) & (np.abs(chances.sum(axis=1) - 1) < _SUM_TOLERANCE))
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(f"Expected chances >= 0 that sum to one, got {chances[row].tolist()} in row {row}.")

    def take(self, kept_N: BoolArray) -> LabelledSet:
        """Return the records for which the mask ``kept_N`` is true, in their order."""
        (rows,) = kept_N.nonzero()
        arrays = ((name, getattr(self, name)) for name in ("labels", "groups", "counts", "chances"))
        taken: dict[str, Any] = {name: None if values is None else values[rows] for name, values in arrays}
        return LabelledSet(record_ids=tuple(self.record_ids[row] for row in rows.tolist()), **taken)


Role = Literal["analyst", "operator"]


@dataclass(frozen=True, kw_only=True)
class KnownCaller:
    """The sender of a request to a service. Callers with the same ``name`` share limits and charges.

    ``expires_s``: when the token expires, in seconds since 1970; None: never.
    """

    name: str
    role: Role
    expires_s: float | None = None


LOCAL_ANALYST = KnownCaller(name="local", role="analyst")


@dataclass(frozen=True, kw_only=True)
class QueryOutcomes:
    """The number of submitted queries, and how many of them were answered or refused by each step. Outcomes are
    released, so counting them has no privacy cost.

    ``epsilon_submitted`` is the epsilon of all queries in the ledger at their full cost. It includes queries that were
    refused before a vote and so cost nothing, because their number depends on the released labels. It also includes
    queries that a crash left without an outcome.
    """

    submitted: int
    answered: int
    rejected_confidence: int
    rejected_fairness: int
    refused_free: int
    epsilon_submitted: float


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """The privacy claim that is published with a run of any method.

    ``epsilon`` may be published. It holds at ``delta`` for the stated unit and relation; null means that the run has no
    guarantee. It is the cost of ``events``, computed by ``accounting``. ``noise`` is ``os_entropy``, or says why the
    run is not private. ``not_protected`` says what the model may reveal without noise. ``epsilon_as_in_paper`` is the
    epsilon as the method's paper computes it, if it was requested; it is not a guarantee.

    ``queries`` counts the queries of a method that submits queries (null for others). Then ``epsilon`` is a bound that
    was fixed before the first query. It exceeds ``queries.epsilon_submitted``, the cost of the queries that were
    submitted, only if released labels may decide how many queries follow: in a service, or if queries are chosen in
    rounds.

    ``earlier_releases`` is the number of releases on the same data set that were charged to the operator's odometer
    before this one. ``epsilon_with_earlier`` is the cost of these and this one together if all were fixed before the
    first; ``epsilon_adaptive_with_earlier`` is the least limit of a privacy filter that admits all of them even if each
    was chosen after seeing the results of earlier ones. All three are null if they are not to be published, or if the
    run was not charged to the odometer or is not private.

    ``declared_units`` is the public number of protected units, with which ``delta`` is compared; null if none is
    public.

    ``part_events`` are the events on test records and on validation records. No other event reads these records, so
    ``epsilon`` is the largest of the costs of training, test and validation records. ``tuning_accounted`` is true if
    ``epsilon`` includes the choice of settings. ``remarks`` qualify the claim in words. ``errors_of_answers`` is no
    claim of privacy: it says of a model that may refuse what is guaranteed about the errors of its answers.
    """

    method: str
    unit: Unit
    relation: Relation
    delta: float
    epsilon: float | None
    accounting: str
    noise: str
    events: tuple[dict[str, Any], ...]
    queries: QueryOutcomes | None = None
    not_protected: str | None = None
    epsilon_as_in_paper: float | None = None
    earlier_releases: int | None = None
    epsilon_with_earlier: float | None = None
    epsilon_adaptive_with_earlier: float | None = None
    tuning_accounted: bool = False
    declared_units: int | None = None
    part_events: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    errors_of_answers: str | None = None

    def __str__(self) -> str:
        """Return a table of all fields that are not empty, one line for each value."""
        lines = []
        for each in fields(self):
            value = getattr(self, each.name)
            # What is undefined or empty is left out.
            values = list(value) if isinstance(value, tuple) else [] if value is None or value == {} else [value]
            names = [each.name.replace("_", " "), *[""] * len(values)]
            lines += [f"{name:<30}{item}" for name, item in zip(names, values, strict=False)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run: the method, its configuration and the results. Runs are compared by their records, in
    tables and in frontiers of privacy, accuracy and fairness.

    ``epsilon`` holds for ``unit``, ``relation`` and ``delta``. If ``epsilon_is_data_dependent``, it depends on private
    votes and must not be published. Metrics that are undefined are null.

    ``fairness`` maps each notion's name (:mod:`fairpate.fairness.rates`) to its ``value``, ``low`` and ``high`` over
    answered test records, and to ``fair_from``, the smallest limit at which the records suffice to call it fair; null:
    undefined, also if some comparison of a measured group is. ``disparity`` is the value of demographic parity.
    ``majority_accuracy`` is the accuracy of always predicting the most common class of the same test records.
    ``degenerate`` says in words why the other metrics mean nothing; empty if they are meaningful. For
    ``underserved_groups``, always predicting the group's own most common class would be more accurate, by more than
    chance; ``unmeasured_groups`` have too few
    answered test records and are left out of gaps. ``answered`` is the number of released labels of a method that
    answers queries, ``answered_by_group`` that of each public group in the order of its codes; null for other methods.
    ``metrics`` says whether a privacy guarantee covers the metrics. ``declared_units`` is the public number of
    protected units, with which ``delta`` is compared; null if none is. ``max_error``: with probability
    ``max_error_confidence`` at most this share of the answers in every group is wrong, as the run guarantees; both are
    null if no bound was asked for, or if it holds for some groups alone.
    """

    method: str
    data: str
    seed: int
    unit: Unit
    relation: Relation
    delta: float
    epsilon: float
    epsilon_is_data_dependent: bool
    accuracy: float | None
    coverage: float | None
    disparity: float | None
    config: dict[str, Any]
    majority_accuracy: float | None = None
    degenerate: tuple[str, ...] = ()
    underserved_groups: tuple[str, ...] = ()
    unmeasured_groups: tuple[str, ...] = ()
    fairness: dict[str, dict[str, float | None]] = field(default_factory=dict)
    answered: int | None = None
    answered_by_group: tuple[int, ...] | None = None
    metrics: MetricsKind = "outside"
    declared_units: int | None = None
    max_error: float | None = None
    max_error_confidence: float | None = None


ItemT = TypeVar("ItemT")


def stream_seed(seed: int, *stream: int) -> int:
    """Return a seed below 2**63 for one part of a run, derived from the run's ``seed``; the numbers ``stream`` identify
    the part, so that parts have independent seeds."""
    # Hashed together: by a sum, one part of this seed would draw the numbers of another part of the next.
    # 63 bits, because torch's seeds are signed.
    return int(np.random.SeedSequence([seed, *stream]).generate_state(1, np.uint64)[0] >> 1)


def strict(value: Any) -> Any:
    """Return a copy of nested values for strict JSON, with None for undefined or infinite numbers.

    Tuples and iterators become lists, dataclasses become mappings, paths and keys become text.
    """
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Iterator):
        return [strict(item) for item in value]
    # A class may be a dataclass too, and has no values.
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: strict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def worded(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``values`` with infinities replaced by the texts "inf" and "-inf", because JSON has no number
    for them."""
    return {
        name: str(value) if isinstance(value, float) and math.isinf(value) else value for name, value in values.items()
    }


_type_hints = cache(get_type_hints)


def restored(kind: type[ItemT], value: Any) -> ItemT:
    """Convert ``value``, the JSON form that :func:`strict` made of an object of type ``kind``, back to such an object.
    A null number becomes NaN.

    TypeError for a dataclass with a missing or unknown field, and for a JSON value of another form.
    """
    found, inside = value, get_args(kind)
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise TypeError(f"expected an object with the fields of {kind.__name__}, got {value!r}")
        # Annotations are text under `from __future__ import annotations`: only this evaluates them.
        types = _type_hints(kind)
        found = kind(**{name: restored(types.get(name, object), each) for name, each in value.items()})
    elif get_origin(kind) is tuple:
        # All items of one type: no record has a tuple of several.
        found = tuple(restored(inside[0], each) for each in value)
    # A `dict` stays unchanged: only a Mapping may hold records.
    elif get_origin(kind) is Mapping:
        found = {name: restored(inside[1], each) for name, each in value.items()}
    elif type(None) in inside and value is not None:
        found = restored(inside[0], value)
    elif kind is float and value is None:
        found = math.nan
    return found


def joined_names(parts: Sequence[str], mark: str) -> str:
    """Return the name of an intersection of groups: the names of its ``parts`` with ``mark`` between them, as in ``F ·
    old``.

    A part that contains the mark is written as a JSON string, as in ``"a · b" · c``: different parts, if they are as
    many, never have the same name.
    """
    return f" {mark} ".join(
        json.dumps(part, ensure_ascii=False) if mark in part or part.startswith('"') else part for part in parts
    )


Advance = Callable[[int, int], None]
Announce = Callable[[str, float], None]
# By context and not global: runs in several threads of a process do not report to each other's listener.
_listener: ContextVar[tuple[Advance | None, Announce | None]] = ContextVar("listener", default=(None, None))
_LONG_S = 20.0


def tell(done: int, total: int) -> None:
    """Report that ``done`` of ``total`` steps of a loop are done, to the listener that :func:`heard_by` installed, if
    any."""
    advance, _ = _listener.get()
    if advance is not None:
        advance(done, total)


def in_blocks(items: Any, size: int, what: str) -> Iterator[Any]:
    """Yield ``items`` in blocks of ``size`` items, and report each finished block as progress; ``what`` names the loop
    for the user.

    If the time for the first block shows that the loop will take 20 seconds or more, its expected duration is
    announced.
    """
    started_s, count = time.monotonic(), len(items)
    # One block even for no items: callers join the results, which needs at least one of the right shape.
    for start in range(0, max(count, 1), size):
        yield items[start : start + size]
        if not (done := min(start + size, count)):
            return
        tell(done, count)
        expected_s, (_, announce) = (time.monotonic() - started_s) * count / done, _listener.get()
        if start == 0 and expected_s >= _LONG_S and announce is not None:
            announce(f"{what} of {count:,} records", expected_s)


def stepwise(items: Sequence[ItemT]) -> Iterator[ItemT]:
    """Yield the items one by one, and report each as a finished step of a loop when the next one is requested."""
    for number, item in enumerate(items, 1):
        yield item
        # By now the caller has worked on it.
        tell(number, len(items))


@contextmanager
def heard_by(advance: Advance, announce: Announce | None = None) -> Iterator[None]:
    """Context manager: listen to the progress that loops report inside the ``with`` block.

    ``advance(done, total)`` is called for every reported step, and ``announce(what, seconds)`` early in a long loop,
    with its name and expected duration.
    """
    token = _listener.set((advance, announce))
    try:
        yield
    finally:
        _listener.reset(token)
