"""Mechanisms from outside the package, registered as one line: session, ledger, prices, restart and odometer take them.

Two that vote otherwise than teachers do: the nearest records of a sample, and a table to which every record adds one
vote. What votes is a table here; how the outcomes are drawn, priced, stored and found again is what is tested.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from aggregator import ledger_audit
from aggregator.ledger import Ledger, LedgerTerms
from aggregator.mechanism import Mechanism, Outcome, gated, mechanism_named, register
from aggregator.service import writer
from aggregator.service.api import statement_json
from aggregator.service.writer import Books
from aggregator.session import (
    AggregatorSession,
    OverBudget,
    PublicPool,
    Query,
    VotesUnavailableError,
    epsilon_fixed_beforehand,
    queries_that_fit,
)
from aggregator.store import LedgerError
from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.privacy.discrete_gaussian import NoiseSource, SeededSource, discrete_gaussians
from fairpate.privacy.mechanism_events import NeighbourVotes, VoteTables, event_from, event_json
from fairpate.types import GateRule, IntArray, QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

NEAREST, SEED = 50, 7


@register
@dataclass(frozen=True, kw_only=True)
class NearestRecords(Mechanism):
    """The noisy argmax of the labels of at most ``num_teachers`` sampled records near the query."""

    name: ClassVar[str] = "test_nearest_records"
    all_vote: ClassVar[bool] = False
    sampling_rate: float
    noise_stddev_votes: float

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        noise_QC = discrete_gaussians(self.noise_stddev_votes, source.machine_words(keys, votes_QC.shape[1]), source)
        return gated((votes_QC + noise_QC).argmax(axis=1).tolist(), groups, gate)

    def worst_case(self, num_queries: int) -> NeighbourVotes:
        return NeighbourVotes(count=num_queries, **dataclasses.asdict(self))

    def scaled(self, factor: float) -> Self:
        return dataclasses.replace(self, noise_stddev_votes=factor * self.noise_stddev_votes)

    def describe(self) -> str:
        return f"Nearest records of a sample of {self.sampling_rate:g}, noise of {self.noise_stddev_votes:g} votes"


@register
@dataclass(frozen=True, kw_only=True)
class OneVotePerRecord(Mechanism):
    """A whole table is one query, and its noisy counts are what is released."""

    name: ClassVar[str] = "test_one_vote_per_record"
    noise_stddev_votes: float

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        noise_QC = discrete_gaussians(self.noise_stddev_votes, source.machine_words(keys, votes_QC.shape[1]), source)
        rows = (votes_QC + noise_QC).tolist()
        return [Outcome(verdict="answer", label=int(np.argmax(row)), counts=tuple(row)) for row in rows]

    def worst_case(self, num_queries: int) -> VoteTables:
        return VoteTables(count=num_queries, **dataclasses.asdict(self))

    def scaled(self, factor: float) -> Self:
        return dataclasses.replace(self, noise_stddev_votes=factor * self.noise_stddev_votes)

    def describe(self) -> str:
        return f"One vote per record, noise of {self.noise_stddev_votes:g} votes"


TERMS = LedgerTerms(
    mechanism=NearestRecords(sampling_rate=0.1, noise_stddev_votes=20.0),
    gate=GateRule(max_disparity=0.2, min_count=5),
    budget=QueryBudget(kind="data_independent", delta=1e-5, epsilon=0.2),
    num_teachers=NEAREST,
    num_classes=3,
    num_groups=2,
    noise=SeededSource(SEED).label,
    ensemble="records",
)
TABLE = dataclasses.replace(
    TERMS,
    mechanism=OneVotePerRecord(noise_stddev_votes=30.0),
    gate=GateRule(max_disparity=math.inf, min_count=0),
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=2),
    num_teachers=435,
    num_classes=12,
    num_groups=1,
)


def queries(count: int) -> list[Query]:
    return [Query(key=f"key-{i}", group=i % 2, record_id=str(i)) for i in range(count)]


def near(asked: Sequence[Query]) -> IntArray:
    """Fewer than NEAREST votes for some: a sample may be small."""
    rows = [np.random.default_rng(int(query.record_id)).multinomial(NEAREST - 3, [0.7, 0.2, 0.1]) for query in asked]
    return np.array(rows, dtype=np.int64)


def session(ledger: Ledger) -> AggregatorSession:
    return AggregatorSession(ledger, source=SeededSource(SEED))


def test_queries_are_answered_priced_stopped_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    wanted = 1000
    fitting = queries_that_fit(TERMS, wanted)
    assert 10 < fitting < wanted
    with Ledger(path, TERMS) as ledger:
        first = session(ledger).ask(queries(fitting // 2), near)
        ledger.reserve(["left-open-by-a-crash"], [0], near(queries(1)))
    with Ledger(path, TERMS, create=False) as ledger:
        again = session(ledger)
        assert again.ask(queries(fitting // 2), lambda _: pytest.fail("asked again")) == first
        replies = again.ask(queries(wanted), near)
        status = again.budget_status()
        assert replies[: fitting // 2] == first
    kinds = [type(reply) for reply in replies]
    assert kinds == [Outcome] * (fitting - 1) + [OverBudget] * (wanted - fitting + 1)
    assert {reply.verdict for reply in replies if isinstance(reply, Outcome)} == {"answer", "fairness"}
    assert status.closed
    # By hand: one Poisson-sampled Gaussian of multiplier sigma / sqrt 2 per reservation, the open one included.
    event = PoissonGaussians(count=fitting, noise_multiplier=20 / math.sqrt(2), sampling_rate=0.1)
    expected = accountant.epsilon([event], target_delta=1e-5).epsilon
    assert status.epsilon_submitted == pytest.approx(expected, rel=1e-9)
    assert 0.19 < expected <= 0.2 == epsilon_fixed_beforehand(TERMS)
    found = ledger_audit.verify(path)
    assert (found.reservations, found.open, found.epsilon_submitted) == (fitting, 1, expected)


def test_blocks_change_no_outcome(tmp_path: Path) -> None:
    replies = []
    for size in (1, 7, 60):
        with Ledger(tmp_path / f"{size}.sqlite", TERMS) as ledger:
            asked = session(ledger)
            blocks = [queries(60)[at : at + size] for at in range(0, 60, size)]
            replies.append([reply for block in blocks for reply in asked.ask(block, near)])
    assert replies[0] == replies[1] == replies[2]


def test_a_price_that_does_not_depend_on_votes_is_the_same_for_the_operator(tmp_path: Path) -> None:
    """So a budget on it stops where the other does."""
    limit = dataclasses.replace(TERMS.budget, kind="data_dependent")
    with Ledger(tmp_path / "ledger.sqlite", dataclasses.replace(TERMS, budget=limit)) as ledger:
        asked = session(ledger)
        replies = asked.ask(queries(1000), near)
        count = len(ledger.keys)
        assert abs(count - queries_that_fit(TERMS, 1000)) <= 1
        books = Books(ledger=ledger, session=asked)
        worst = accountant.epsilon([TERMS.mechanism.worst_case(count)], target_delta=1e-5).epsilon
        assert books.epsilon(count) == pytest.approx(worst, rel=1e-9)
    assert isinstance(replies[-1], OverBudget)


def test_an_event_of_one_s_own_that_holds_votes_is_priced_query_by_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody said what each of its queries costs; here contested ones cost as much as at worst, and others nothing."""

    @dataclass(frozen=True, kw_only=True)
    class Contested(PoissonGaussians):
        data_dependent: ClassVar[bool] = True

    def realised(mechanism: NearestRecords, votes_QC: IntArray) -> Contested:
        worst = mechanism.worst_case(int((votes_QC.max(axis=1) < 33).sum()))
        return Contested(count=worst.count, noise_multiplier=20 / math.sqrt(2), sampling_rate=0.1)

    monkeypatch.setattr(NearestRecords, "realised", realised)
    with Ledger(tmp_path / "ledger.sqlite", TERMS) as ledger:
        asked = session(ledger)
        asked.ask(queries(20), near)
        price = Books(ledger=ledger, session=asked)
        event = TERMS.mechanism.realised(ledger.votes_QC)
        assert 0 < event.count < 20
        expected = accountant.epsilon_data_dependent([event], target_delta=1e-5).epsilon
        assert price.epsilon(20) == pytest.approx(expected, rel=1e-9)
        np.testing.assert_array_equal(price.priced(20)[0] > 0, ledger.votes_QC.max(axis=1) < 33)


def test_a_price_that_failed_half_way_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_PRICED_TOGETHER", 6)
    with Ledger(tmp_path / "ledger.sqlite", TERMS) as ledger:
        asked = session(ledger)
        asked.ask(queries(20), near)
        price, expected = (Books(ledger=ledger, session=asked) for _ in range(2))
        prices = NearestRecords.realised_rdp

        def fails_at_the_end(mechanism: NearestRecords, votes_QC: IntArray, orders_A: Any) -> Any:
            if len(votes_QC) == 2:
                raise MemoryError
            return prices(mechanism, votes_QC, orders_A)

        with monkeypatch.context() as failing:
            failing.setattr(NearestRecords, "realised_rdp", fails_at_the_end)
            with pytest.raises(MemoryError):
                price.epsilon(20)
        assert price.epsilon(20) == expected.epsilon(20)
        assert len(price.priced(100)[0]) == 20


def test_votes_of_more_records_than_may_vote_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite", TERMS) as ledger:
        with pytest.raises(VotesUnavailableError):
            session(ledger).ask(queries(1), lambda _: np.array([[NEAREST, 1, 0]]))
        assert len(ledger.keys) == 0


def test_a_table_s_noisy_counts_come_back_after_a_restart(tmp_path: Path) -> None:
    path, table = tmp_path / "ledger.sqlite", np.array([[100, 5, 0, 40] * 3])
    query = [Query(key="prototypes", group=0, record_id="prototypes")]
    with Ledger(path, TABLE) as ledger:
        (released,) = session(ledger).ask(query, lambda _: table)
    assert isinstance(released, Outcome)
    assert released.counts is not None
    assert len(released.counts) == 12
    assert released.counts != tuple(table[0])
    assert np.abs(np.array(released.counts) - table[0]).max() < 6 * 30
    with Ledger(path, TABLE, create=False) as ledger:
        assert session(ledger).ask(query, lambda _: pytest.fail("asked again")) == (released,)
        assert [(charge.group, charge.outcome.label) for charge in ledger.charges] == [(0, released.label)]
    one_table = accountant.epsilon_pld([VoteTables(count=1, noise_stddev_votes=30.0)], target_delta=1e-5)
    assert ledger_audit.verify(path).epsilon_submitted == one_table


@pytest.mark.parametrize("terms", [TERMS, TABLE], ids=["near", "table"])
def test_a_ledger_of_another_mechanism_or_with_other_parameters_is_refused(tmp_path: Path, terms: LedgerTerms) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, terms).close()
    for other in (terms.mechanism.scaled(2.0), mechanism_named("confident_gnmax", GNMAX)):
        with pytest.raises(LedgerError, match=r"mechanism = .*give the old value"):
            Ledger(path, dataclasses.replace(terms, mechanism=other))


GNMAX: dict[str, Any] = {"threshold": 30, "threshold_stddev_votes": 10, "noise_stddev_votes": 6}


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("nobody", {}, "unknown mechanism 'nobody'; give one of: confident_counts, confident_gnmax, "),
        ("confident_gnmax", {"sigma": 1}, "confident_gnmax: .*sigma"),
        ("confident_gnmax", {**GNMAX, "noise_stddev_votes": -1}, "noise_stddev_votes"),
    ],
)
def test_what_a_ledger_stores_must_name_a_mechanism_and_its_parameters(
    name: str, parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        mechanism_named(name, parameters)


def test_a_name_is_given_once_and_no_other_class_goes_by_it(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Impostor(NearestRecords):
        pass

    with pytest.raises(ValueError, match="another mechanism has this name"):
        register(Impostor)
    with pytest.raises(ValueError, match="Impostor: another mechanism class is registered as test_nearest_records"):
        Ledger(
            tmp_path / "ledger.sqlite",
            dataclasses.replace(TERMS, mechanism=Impostor(sampling_rate=0.1, noise_stddev_votes=20.0)),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("terms", [TERMS, TABLE], ids=["near", "table"])
def test_the_odometer_and_the_service_know_its_event_and_its_name(tmp_path: Path, terms: LedgerTerms) -> None:
    event = terms.mechanism.worst_case(5)
    assert event_from(event_json(event)) == event
    pool = PublicPool(
        features=np.zeros((1, 2), dtype=np.float32),
        groups_N=np.zeros(1, dtype=np.int64),
        record_ids=("0",),
        group_names=("all",),
        label_names=("no", "yes"),
    )
    with Ledger(tmp_path / "ledger.sqlite", terms) as ledger:
        snapshot = Books(ledger=ledger, session=session(ledger)).snapshot()
        said = statement_json(pool, snapshot)["mechanism"]
    assert said == {"name": terms.mechanism.name, **dataclasses.asdict(terms.mechanism)}
