import dataclasses
import multiprocessing
import os
import signal
import sqlite3
import stat

import numpy as np
import pytest

from aggregator import session
from aggregator.ledger import Ledger, LedgerError, LedgerTerms
from aggregator.mechanism import Outcome
from aggregator.session import answer_queries, query_key
from fairpate.privacy.discrete_gaussian import OsEntropy, SeededSource
from fairpate.types import Answer, GateRule, MechanismParameters, Refusal, VoteBatch

TERMS = LedgerTerms(
    mechanism=MechanismParameters(threshold=30, threshold_stddev_votes=10, noise_stddev_votes=6),
    gate=GateRule(max_disparity=0.1, min_count=5),
    num_teachers=60,
    num_classes=3,
    num_groups=2,
    noise="seeded: not private",
    ensemble="teachers",
)
QUERY = ("key", 1, (40, 15, 5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    votes_QC = np.array([generator.multinomial(60, generator.dirichlet([0.5] * 3)) for _ in range(100)])
    ids = [f"record-{index}" for index in range(100)]
    return VoteBatch(record_ids=ids, groups_Q=generator.integers(0, 2, 100), votes_QC=votes_QC, ensemble="teachers")


def ask(batch, path, *, block_size=64, source=None, terms=TERMS):
    with Ledger(path, terms) as ledger:
        keys = list(batch.record_ids)
        return answer_queries(batch, keys=keys, ledger=ledger, source=source or SeededSource(3), block_size=block_size)


def edit(path, statement):
    database = sqlite3.connect(path)
    with database:
        database.execute(statement)
    database.close()


def test_a_reservation_is_durable_and_charged_before_it_has_an_outcome(path):
    with Ledger(path, TERMS) as ledger:
        ledger.reserve([QUERY])
    with Ledger(path, TERMS) as ledger:
        (charge,) = ledger.charges
        assert charge.outcome is None
        assert (charge.reservation.key, charge.reservation.group, charge.reservation.votes) == QUERY


def test_the_gate_s_counts_and_the_outcomes_come_back(path):
    with Ledger(path, TERMS) as ledger:
        (reservation,) = ledger.reserve([QUERY])
        ledger.commit({reservation: Outcome(verdict="answer", label=0)})
    with Ledger(path, TERMS) as ledger:
        assert ledger.outcome("key") == Outcome(verdict="answer", label=0)
        assert ledger.counts_GC == [[0, 0, 0], [1, 0, 0]]


def test_a_query_is_drawn_once(path):
    with Ledger(path, TERMS) as ledger:
        (reservation,) = ledger.reserve([QUERY])
        ledger.commit({reservation: Outcome(verdict="confidence")})
        with pytest.raises(ValueError, match="has an outcome already"):
            ledger.reserve([QUERY])
        with pytest.raises(ValueError, match="committed already"):
            ledger.commit({reservation: Outcome(verdict="answer", label=1)})


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = replace(payload, '40', '41') WHERE number = 1",
        "DELETE FROM entries WHERE number = 1",
        "DELETE FROM entries WHERE number = 2",
        "UPDATE chain SET length = 1",
        "UPDATE chain SET terms = replace(terms, '30', '31')",
    ],
)
def test_a_ledger_that_was_edited_or_cut_short_refuses_to_open(path, statement):
    with Ledger(path, TERMS) as ledger:
        (reservation,) = ledger.reserve([QUERY])
        ledger.commit({reservation: Outcome(verdict="fairness")})
    edit(path, statement)
    with pytest.raises(LedgerError):
        Ledger(path, TERMS)


def test_a_damaged_file_is_named(path):
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        Ledger(path, TERMS)


def test_a_changed_parameter_is_refused_with_both_values(path):
    Ledger(path, TERMS).close()
    mechanism = dataclasses.replace(TERMS.mechanism, noise_stddev_votes=7)
    with pytest.raises(LedgerError, match=r"noise_stddev_votes': 6.* cannot go on with .*noise_stddev_votes': 7"):
        Ledger(path, dataclasses.replace(TERMS, mechanism=mechanism))


def test_there_is_one_writer(path):
    with Ledger(path, TERMS), pytest.raises(LedgerError, match="another process"):
        Ledger(path, TERMS)


def test_only_its_owner_may_read_it(path):
    Ledger(path, TERMS).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replies_do_not_depend_on_the_block_size(batch, tmp_path):
    by_one, by_many = (ask(batch, tmp_path / f"{size}.sqlite", block_size=size) for size in (1, 40))
    assert by_one.replies == by_many.replies
    assert {type(reply) for reply in by_one.replies} == {Answer, Refusal}


def test_asking_again_charges_nothing_and_draws_nothing(batch, path):
    first = ask(batch, path)
    with Ledger(path, TERMS) as ledger:
        again = answer_queries(batch, keys=list(batch.record_ids), ledger=ledger, source=NoMoreNoise())
        assert len(ledger.charges) == len(batch.record_ids)
    assert again.replies == first.replies


def test_equal_content_is_one_query(batch, path):
    twice = VoteBatch(
        record_ids=["a", "b"], groups_Q=batch.groups_Q[[0, 0]], votes_QC=batch.votes_QC[[0, 0]], ensemble="teachers"
    )
    with Ledger(path, TERMS) as ledger:
        result = answer_queries(twice, keys=["same", "same"], ledger=ledger, source=SeededSource(0))
        assert len(ledger.charges) == 1
    first, second = result.replies
    assert (first.record_id, second.record_id) == ("a", "b")
    assert dataclasses.replace(first, record_id="b") == second


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
        assert len(ledger.charges) == len(batch.record_ids) + 1


class NoMoreNoise:
    label = "seeded: not private"

    def derive(self, *parts):
        raise AssertionError(f"drew again for {parts}")

    def randbelow(self, n):
        raise AssertionError("drew again")


def _ask_and_die(batch, path, after_reservations):
    drawn = iter(range(1, after_reservations + 1))
    draw = session.confident_fair_gnmax

    def draw_or_die(*args, **kwargs):
        if next(drawn) == after_reservations:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(*args, **kwargs)

    session.confident_fair_gnmax = draw_or_die
    ask(batch, path, block_size=1)
