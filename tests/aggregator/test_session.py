"""Asking: one outcome per query, one price, one limit, for every caller and however often."""

import dataclasses
import multiprocessing
import os
import signal
import threading

import numpy as np
import pytest
from ledger_terms import MECHANISM, TERMS

from aggregator.ledger import Ledger
from aggregator.mechanism import ConfidentGnmax, Outcome
from aggregator.session import (
    AggregatorSession,
    OverBudget,
    Query,
    VotesUnavailableError,
    answer_queries,
    epsilon_fixed_beforehand,
    query_key,
)
from aggregator.store import LedgerError
from fairpate.privacy.accountant import ConfidentGnmaxQueries, ConfidentGnmaxVotes, epsilon, epsilon_data_dependent
from fairpate.privacy.discrete_gaussian import OsEntropy, SeededSource
from fairpate.types import QueryBudget, VoteBatch


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    votes_QC = np.array([generator.multinomial(60, generator.dirichlet([0.5] * 3)) for _ in range(100)])
    ids = [f"record-{index}" for index in range(100)]
    return VoteBatch(record_ids=ids, groups_Q=generator.integers(0, 2, 100), votes_QC=votes_QC, ensemble="teachers")


def ask(batch, path, *, block_size=64, source=None, terms=TERMS):
    with Ledger(path, terms) as ledger:
        asked = AggregatorSession(ledger, source=source or SeededSource(3))
        return answer_queries(batch, keys=list(batch.record_ids), session=asked, block_size=block_size)


def queries_of(batch, rows):
    return [Query(key=batch.record_ids[i], group=int(batch.groups_Q[i]), record_id=batch.record_ids[i]) for i in rows]


def voter(batch):
    row_of = {key: row for row, key in enumerate(batch.record_ids)}
    return lambda queries: batch.votes_QC[[row_of[query.key] for query in queries]]


def within(budget):
    return dataclasses.replace(TERMS, budget=budget)


def price(count):
    return epsilon([ConfidentGnmaxQueries(count=count, **dataclasses.asdict(MECHANISM))], target_delta=1e-5).epsilon


def test_replies_do_not_depend_on_the_block_size(batch, tmp_path):
    by_one, by_many = (ask(batch, tmp_path / f"{size}.sqlite", block_size=size) for size in (1, 40))
    assert by_one.replies == by_many.replies
    assert {reply.verdict == "answer" for reply in by_one.replies} == {True, False}
    assert by_one.labelled.record_ids == by_many.labelled.record_ids


def test_asking_again_charges_nothing_draws_nothing_and_asks_no_teacher(batch, path):
    first = ask(batch, path)
    with Ledger(path, TERMS) as ledger:
        asked = AggregatorSession(ledger, source=NoMoreNoise())
        again = answer_queries(batch, keys=list(batch.record_ids), session=asked)
        asked.ask(queries_of(batch, range(100)), lambda _: pytest.fail("asked the teachers again"))
        assert len(ledger.keys) == len(batch.record_ids)
    assert again.replies == first.replies


def test_equal_content_is_one_query(batch, path):
    twice = VoteBatch(
        record_ids=["a", "b"], groups_Q=batch.groups_Q[[0, 0]], votes_QC=batch.votes_QC[[0, 0]], ensemble="teachers"
    )
    with Ledger(path, TERMS) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(0))
        result = answer_queries(twice, keys=["same", "same"], session=asked)
        assert len(ledger.keys) == 1
    first, second = result.replies
    assert first == second
    assert result.labelled.record_ids in {("a", "b"), ()}


def test_a_query_key_covers_features_shape_type_and_group():
    features = np.arange(6, dtype=np.float32)
    keys = {
        query_key(features, 0),
        query_key(features, 1),
        query_key(features.reshape(2, 3), 0),
        query_key(features.astype(np.float64), 0),
        query_key(features[::-1], 0),
    }
    assert len(keys) == 5
    assert query_key(features.copy(), 0) in keys


def test_the_noise_source_must_be_the_one_the_ledger_declares(batch, path):
    with pytest.raises(ValueError, match="seeded: not private"):
        ask(batch, path, source=OsEntropy())


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ([20.5, 20.5, 19], ValueError),
        ([30, 30], ValueError),
        ([-1, 31, 30], ValueError),
        (["a", "b", "c"], ValueError),
        (20, ValueError),
        ([20, 20, 19], VotesUnavailableError),
        ([20, 20, 21], VotesUnavailableError),
    ],
)
def test_votes_that_are_no_counts_of_all_teachers_are_refused_and_charge_nothing(batch, path, row, error):
    with Ledger(path, TERMS) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(0))
        with pytest.raises(error, match="votes"):
            asked.ask(queries_of(batch, range(1)), lambda _: np.array([row]))
        assert not ledger.keys
        assert len(asked.ask(queries_of(batch, range(1)), lambda _: np.array([[20, 20, 20]]))) == 1


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_a_batch_stops_at_the_exact_query_that_crosses_the_budget(batch, path, block_size):
    limit = (price(23) + price(24)) / 2
    result = ask(
        batch,
        path,
        block_size=block_size,
        terms=within(QueryBudget(kind="data_independent", delta=1e-5, epsilon=limit)),
    )
    assert len(result.replies) == 23
    assert result.over_budget == 77


def test_known_queries_are_answered_behind_the_one_that_crosses_the_budget(batch, path):
    terms = within(QueryBudget(kind="query_count", delta=1e-5, max_queries=3))
    with Ledger(path, terms) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(3))
        first = asked.ask(queries_of(batch, [0, 1]), voter(batch))
        replies = asked.ask(queries_of(batch, [5, 6, 0, 7, 1]), voter(batch))
        assert [isinstance(reply, OverBudget) for reply in replies] == [False, True, False, True, False]
        assert (replies[2], replies[4]) == first
        assert asked.budget_status().closed
        assert len(ledger.keys) == 3


def test_a_reopened_ledger_remembers_what_is_spent(batch, path):
    terms = within(QueryBudget(kind="query_count", delta=1e-5, max_queries=30))
    first = ask(batch, path, terms=terms)
    assert ask(batch, path, terms=terms).replies == first.replies
    with Ledger(path, terms) as ledger:
        assert AggregatorSession(ledger, source=SeededSource(3)).budget_status().closed


@pytest.mark.parametrize("block_size", [1, 40])
def test_a_data_dependent_budget_stops_before_the_price_of_the_votes_passes_it(batch, path, block_size):
    prices = [
        epsilon_data_dependent(
            [ConfidentGnmaxVotes(votes_QC=batch.votes_QC[:n], **dataclasses.asdict(MECHANISM))], target_delta=1e-5
        ).epsilon
        for n in (17, 18)
    ]
    terms = within(QueryBudget(kind="data_dependent", delta=1e-5, epsilon=sum(prices) / 2))
    assert len(ask(batch, path, block_size=block_size, terms=terms).replies) == 17
    assert len(ask(batch, path, block_size=block_size, terms=terms).replies) == 17


def test_an_estimate_says_what_asking_would_cost(batch, path):
    limit = (price(100) + price(101)) / 2
    terms = within(QueryBudget(kind="data_independent", delta=1e-5, epsilon=limit))
    with Ledger(path, terms) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(3))
        asked.ask(queries_of(batch, range(10)), voter(batch))
        status = asked.budget_status(25)
        assert (status.queries_submitted, status.epsilon_submitted, status.closed) == (35, price(35), False)
        assert (asked.budget_status(90).closed, asked.budget_status(89).closed) == (True, False)
        assert asked.budget_status().queries_submitted == len(ledger.keys) == 10


def test_threads_together_never_pass_the_limit_and_agree_on_every_answer(batch, path):
    terms = within(QueryBudget(kind="query_count", delta=1e-5, max_queries=37))
    rows_of = [np.random.default_rng(thread).permutation(60)[:45] for thread in range(8)]
    heard = [{} for _ in rows_of]

    def analyst(asked, number):
        for start in range(0, 45, 5):
            rows = rows_of[number][start : start + 5]
            heard[number].update(zip(rows.tolist(), asked.ask(queries_of(batch, rows), voter(batch)), strict=True))

    with Ledger(path, terms) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(3))
        threads = [threading.Thread(target=analyst, args=(asked, number)) for number in range(len(rows_of))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ledger.keys) == 37
        keys = [charge.key for charge in ledger.charges]
    assert len(set(keys)) == 37
    answers = {}
    for replies in heard:
        for row, reply in replies.items():
            if isinstance(reply, Outcome):
                assert answers.setdefault(row, reply) == reply
    assert {batch.record_ids[row] for row in answers} == set(keys)


def test_teachers_that_are_lost_cost_nothing_and_are_never_left_out(batch, path):
    def gone(_):
        raise VotesUnavailableError("two teachers are gone")

    def partial(queries):
        return voter(batch)(queries) - np.array([1, 0, 0])

    with Ledger(path, TERMS) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(3))
        for vote, said in [(gone, "two teachers are gone"), (partial, "all 60 teachers")]:
            with pytest.raises(VotesUnavailableError, match=said):
                asked.ask(queries_of(batch, range(3)), vote)
        assert len(ledger.keys) == 0
        assert len(asked.ask(queries_of(batch, range(3)), voter(batch))) == 3


def test_after_a_failed_write_nothing_is_drawn_and_stored_answers_stay(batch, path, monkeypatch):
    with Ledger(path, TERMS) as ledger:
        asked = AggregatorSession(ledger, source=SeededSource(3))
        stored = asked.ask(queries_of(batch, range(5)), voter(batch))
        ledger.store._database.close()
        monkeypatch.setattr(ConfidentGnmax, "answer", lambda *_, **__: pytest.fail("drew"))
        for _ in range(2):
            with pytest.raises(LedgerError):
                asked.ask(queries_of(batch, range(5, 8)), voter(batch))
        assert asked.ask(queries_of(batch, range(5)), voter(batch)) == stored


@pytest.mark.parametrize("after_reservations", [1, 17])
def test_a_process_killed_between_reserve_and_commit_loses_budget_and_nothing_else(batch, path, after_reservations):
    process = multiprocessing.get_context("fork").Process(
        target=_ask_and_die, args=(batch, path, after_reservations), daemon=True
    )
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL

    with Ledger(path, TERMS) as ledger:
        open_charges = [charge for charge in ledger.charges if charge.outcome is None]
    assert len(open_charges) == 1
    resumed = ask(batch, path, block_size=1)
    assert resumed.replies == ask(batch, path.with_name("undisturbed.sqlite"), block_size=1).replies
    with Ledger(path, TERMS) as ledger:
        assert len(ledger.keys) == len(batch.record_ids) + 1


def gaussian_epsilon(rho, delta):
    """The conversion of the Renyi curve rho alpha, over a fine grid of orders."""
    orders = np.linspace(1.01, 60, 20_000)
    return (rho * orders + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)).min()


def test_the_bound_that_was_fixed_beforehand_follows_from_the_terms_alone():
    mechanism = TERMS.mechanism
    per_query = 1 / (2 * mechanism.threshold_stddev_votes**2) + 1 / mechanism.noise_stddev_votes**2
    of_a_count = epsilon_fixed_beforehand(TERMS)
    assert of_a_count == pytest.approx(gaussian_epsilon(1000 * per_query, 1e-5), rel=0.02)
    for kind, expected in [("data_independent", 2.5), ("data_dependent", None)]:
        terms = dataclasses.replace(TERMS, budget=QueryBudget(kind=kind, delta=1e-5, epsilon=2.5))
        assert epsilon_fixed_beforehand(terms) == expected


class NoMoreNoise:
    label = "seeded: not private"

    def derive(self, *parts):
        raise AssertionError(f"drew again for {parts}")

    def randbelow(self, n):
        raise AssertionError("drew again")

    def machine_words(self, keys, count):
        raise AssertionError(f"drew again for {keys}")


def _ask_and_die(batch, path, after_reservations):
    drawn = iter(range(1, after_reservations + 1))
    draw = ConfidentGnmax.answer

    def draw_or_die(*args, **kwargs):
        if next(drawn) == after_reservations:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(*args, **kwargs)

    ConfidentGnmax.answer = draw_or_die
    ask(batch, path, block_size=1)
