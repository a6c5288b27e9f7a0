"""Limits of one's own: both limits hold however callers race, charges name their caller, all outlives a restart."""

import asyncio
import concurrent.futures
import dataclasses
import threading
from itertools import pairwise

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import POOL, TERMS, ids, open_backend, running, table_votes

from aggregator.ledger import Asked, Asker, CallerLimit, Ledger
from aggregator.mechanism import Outcome
from aggregator.service.auth import TokenBook, added, change, limited
from aggregator.service.writer import Batcher, Books, Readiness, Writer
from aggregator.session import (
    DAY_S,
    AggregatorSession,
    OverBudget,
    QuotaExceededError,
    QuotaRule,
    Quotas,
    epsilon_data_independent,
    most_queries,
)
from fairpate.privacy.accountant import ConfidentGnmaxQueries, epsilon
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.types import KnownCaller, QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

ALICE, BOB, CAROL = Asker("alice", "r1"), Asker("bob", "r2"), Asker("carol", "r3")


def within(max_queries):
    return dataclasses.replace(TERMS, budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=max_queries))


def query(number, *askers):
    return dataclasses.replace(POOL.questions[number].query, askers=askers)


def vote(queries):
    by_key = {POOL.questions[number].query.key: POOL.questions[number] for number in range(len(POOL))}
    return table_votes([by_key[asked.key] for asked in queries])


def ask(session, numbers, *askers):
    return session.ask([query(number, *askers) for number in numbers], vote)


def answered(replies):
    return sum(isinstance(reply, Outcome) for reply in replies)


def test_who_asked_when_and_in_which_request_outlives_a_restart(path):
    with Ledger(path, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        ask(session, range(3), ALICE)
        ask(session, range(5), BOB)
        session.limit("bob", CallerLimit(max_queries=4, per_day=2.5))
    with Ledger(path, TERMS) as ledger:
        assert [charge.asker for charge in ledger.charges] == [ALICE] * 3 + [BOB] * 2
        times = [charge.at_s for charge in ledger.charges]
        assert times == sorted(times)
        assert times[0] > 1.7e9
        assert (ledger.charged_to["alice"], ledger.charged_to["bob"]) == (3, 2)
        assert [asked.asker for _, _, _, asked in ledger.charged(0, 5)] == [ALICE] * 3 + [BOB] * 2
        assert ledger.limits["bob"] == CallerLimit(max_queries=4, per_day=2.5)
        assert "alice" not in ledger.limits


def test_a_caller_without_room_is_not_charged_and_a_stored_answer_is_free_for_everybody(path):
    with Ledger(path, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        session.limit("alice", CallerLimit(max_queries=4))
        replies = ask(session, range(6), ALICE)
        assert [isinstance(reply, OverBudget) for reply in replies] == [False] * 4 + [True] * 2
        by_bob = ask(session, range(6), BOB)
        assert by_bob[:4] == replies[:4]
        assert ask(session, range(6), ALICE) == by_bob
        assert (ledger.charged_to["alice"], ledger.charged_to["bob"]) == (4, 2)


def test_of_several_who_ask_at_once_the_first_with_room_is_charged(path):
    with Ledger(path, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        session.limit("alice", CallerLimit(max_queries=1))
        assert answered(ask(session, range(3), ALICE, BOB)) == 3
        assert (ledger.charged_to["alice"], ledger.charged_to["bob"]) == (1, 2)


def test_nobody_is_charged_beyond_limit_or_quota_whoever_asks_together(path):
    with Ledger(path, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        session.limit("alice", CallerLimit(max_queries=2))
        queries = [query(number, ALICE, BOB, CAROL) for number in range(9)]
        replies = session.ask(queries, vote, quota=lambda caller: {"alice": 5, "bob": 1.5, "carol": 3}[caller])
        assert answered(replies) == 6
        assert [ledger.charged_to[name] for name in ("alice", "bob", "carol")] == [2, 1, 3]


def test_a_caller_with_a_quota_does_not_pay_for_another_who_has_no_room(path):
    """Alice, who may ask nothing, comes first in one group with bob, who may ask one a day."""
    backend = open_backend(path)
    writer = Writer(Books(ledger=backend.ledger, session=backend.session), reopen=None)
    limits = {"alice": CallerLimit(max_queries=0), "bob": CallerLimit(per_day=1)}
    batcher = Batcher(
        writer,
        Readiness(writer, voters_answer=lambda: True, try_vote=lambda: None, interval_s=1.0),
        count_votes=table_votes,
        quotas=Quotas(QuotaRule()),
        answer_step_s=0.0,
        own_limits=lambda: limits,
    )
    questions = [POOL.questions[number] for number in range(200)]
    analysts = {name: KnownCaller(name=name, role="analyst") for name in ("alice", "bob")}

    async def together():
        return await asyncio.gather(*(batcher.ask(questions, caller, "r") for caller in analysts.values()))

    told = asyncio.run(together())
    assert [answered(replies) for replies in told] == [1, 1]
    assert (backend.ledger.charged_to["alice"], backend.ledger.charged_to["bob"]) == (0, 1)
    with pytest.raises(QuotaExceededError):
        asyncio.run(batcher.ask(questions, analysts["bob"], "r"))
    with pytest.raises(QuotaExceededError):
        asyncio.run(batcher.ask(questions[:2], analysts["bob"], "r"))
    root = KnownCaller(name="root", role="operator")
    assert answered(asyncio.run(batcher.ask(questions[:5], root, "r"))) == 5
    writer.close()


def test_an_own_epsilon_admits_as_many_queries_as_cost_at_most_that(path):
    def price(count):
        event = ConfidentGnmaxQueries(count=count, **dataclasses.asdict(TERMS.mechanism))
        return epsilon([event], target_delta=1e-5).epsilon

    limit = CallerLimit(epsilon=(price(7) + price(8)) / 2)
    assert most_queries(TERMS, limit) == 7
    with Ledger(path, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        session.limit("alice", limit)
        assert answered(ask(session, range(20), ALICE)) == 7
        assert ledger.charged_to["alice"] == 7
        assert epsilon_data_independent(TERMS, num_queries=7) == price(7) <= limit.epsilon
        session.limit("alice", CallerLimit(epsilon=limit.epsilon, max_queries=3))
        assert most_queries(TERMS, ledger.limits["alice"]) == 3
        assert answered(ask(session, range(30, 40), ALICE)) == 0


def test_racing_threads_never_pass_their_own_limit_or_the_shared_one(path):
    """Two threads ask as alice (at most 10) and two as bob (at most 25), and all share 30."""
    with Ledger(path, within(30)) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3))
        session.limit("alice", CallerLimit(max_queries=10))
        session.limit("bob", CallerLimit(max_queries=25))
        together = threading.Barrier(4)

        def analyst(number):
            order = np.random.default_rng(number).permutation(100).tolist()
            together.wait()
            asker = (ALICE, BOB)[number % 2]
            return [ask(session, order[start : start + 4], asker) for start in range(0, 100, 4)]

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            list(threads.map(analyst, range(4)))
        assert len(ledger.keys) == 30
        assert ledger.charged_to["alice"] <= 10
        assert ledger.charged_to["bob"] <= 25
        assert ledger.charged_to["alice"] + ledger.charged_to["bob"] == 30


def test_clients_of_one_name_share_its_limit_over_http_and_all_read_what_is_left(tmp_path):
    store = tmp_path / "tokens.json"
    analyst = {"role": "analyst", "expires_s": None, "now_s": 0}
    alice = change(store, lambda s: added(s, "alice", limit=CallerLimit(max_queries=12), **analyst))
    bob = change(store, lambda s: added(s, "bob", limit=CallerLimit(), **analyst))

    def client(token):
        return httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {token}"})

    def race(number):
        with client((alice, bob)[number // 2]) as http:
            batches = [list(range(start, start + 5)) for start in range(100 * number, 100 * number + 20, 5)]
            return [http.post("/v1/queries", json=ids(batch)).json()["replies"] for batch in batches]

    path = tmp_path / "ledger.sqlite"
    with running(path, terms=within(30), tokens=TokenBook(store=store)) as url:
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            told = list(clients.map(race, range(3)))
        of_alice = [reply["status"] for replies in told[:2] for batch in replies for reply in batch]
        with client(alice) as http:
            assert len(of_alice) - of_alice.count("over_budget") == 12
            me = http.get("/v1/me").json()
            assert (me["name"], me["scope"], me["left"], me["expires_s"]) == ("alice", "analyst", {"queries": 0}, None)
            assert (me["limit"]["max_queries"], me["spent"]["queries"]) == (12, 12)
            change(store, lambda s: (limited(s, "alice", CallerLimit(max_queries=13)), None))
        with client(bob) as http:
            assert http.get("/v1/budget").json()["queries_submitted"] == 30
            assert http.get("/v1/me").json()["left"] is None
    with running(path, terms=within(30), tokens=TokenBook(store=store)) as url, client(alice) as http:
        assert http.get("/v1/me").json()["left"] == {"queries": 1}


def test_a_request_s_own_id_stands_beside_its_charges_where_it_is_a_plain_word(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with running(path) as url:
        for number, given in enumerate(["job-7", 'x"} injected', "y" * 65]):
            httpx.post(f"{url}/v1/queries", json=ids([number]), headers={"X-Request-ID": given})
    with Ledger(path, TERMS) as ledger:
        requests = [charge.asker.request for charge in ledger.charges]
    assert requests[0] == "job-7"
    assert all(len(request) == 16 and request.isalnum() for request in requests[1:])


class Charged:
    """The part of a ledger that quotas read."""

    def __init__(self):
        self.asked, self.limits = [], {}

    def charge(self, caller, count, at_s):
        self.asked.append(Asked(0, count, Asker(caller, ""), at_s))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 50)), max_size=40))
def test_in_any_period_a_caller_is_charged_at_most_the_quota_and_its_refill(requests):
    quotas, ledger, now_s, charged = Quotas(QuotaRule(max_queries=20, period_s=100)), Charged(), 1.0, [(1.0, 0)]
    for num_queries, pause_s in requests:
        now_s += pause_s
        if quotas.refusal(ledger, "alice", num_queries, now_s=now_s) is None:
            ledger.charge("alice", num_queries, now_s)
            charged.append((now_s, num_queries))
    for start, _ in enumerate(charged):
        for stop in range(start, len(charged)):
            taken = sum(count for _, count in charged[start : stop + 1])
            assert taken <= 20 + (charged[stop][0] - charged[start][0]) * 20 / 100 + 1e-6
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(charged))


def test_a_quota_goes_on_where_it_stood_before_a_restart_and_says_when_a_request_fits():
    ledger, rule = Charged(), QuotaRule(max_queries=10, period_s=100)
    ledger.charge("alice", 8, 1000.0)
    for quotas in (Quotas(rule), Quotas(rule)):
        refusal = quotas.refusal(ledger, "alice", 4, now_s=1000.0)
        assert (refusal.allowed_now, refusal.retry_after_s) == (2, pytest.approx(20))
        assert quotas.refusal(ledger, "bob", 10, now_s=1000.0) is None
        assert quotas.refusal(ledger, "alice", 4, now_s=1020.001) is None
        assert quotas.refusal(ledger, "alice", 11, now_s=2000.0).retry_after_s == float("inf")


def test_a_caller_s_own_quota_counts_what_was_charged_before_it():
    ledger, quotas = Charged(), Quotas(QuotaRule())
    ledger.charge("alice", 8, 1000.0)
    assert quotas.refusal(ledger, "alice", 1000, now_s=1000.0) is None
    ledger.limits["alice"] = CallerLimit(per_day=10)
    assert quotas.refusal(ledger, "alice", 4, now_s=1000.0).retry_after_s == pytest.approx(DAY_S / 5)
    ledger.limits["alice"] = CallerLimit(per_day=12)
    assert quotas.refusal(ledger, "alice", 4, now_s=1000.0) is None


@pytest.mark.parametrize(
    "values",
    [{"epsilon": 0}, {"epsilon": float("nan")}, {"max_queries": -1}, {"per_day": 0}, {"per_day": float("inf")}],
)
def test_a_limit_that_limits_nothing_or_all_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        CallerLimit(**values)


def test_a_clock_that_is_set_back_and_corrected_refills_no_quota():
    ledger, quotas = Charged(), Quotas(QuotaRule(max_queries=10, period_s=100))
    ledger.charge("alice", 8, 1000.0)
    refusal = quotas.refusal(ledger, "alice", 4, now_s=900.0)
    assert (refusal.allowed_now, refusal.retry_after_s) == (2, pytest.approx(100 + 20))
    ledger.charge("alice", 2, 900.0)
    assert quotas.room(ledger, "alice", now_s=1000.0) == pytest.approx(0)
    assert Quotas(QuotaRule(max_queries=10, period_s=100)).room(ledger, "alice", now_s=1010.0) == pytest.approx(1)
