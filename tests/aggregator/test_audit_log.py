"""The audit log: complete, the same whatever the votes, gone on with, and a witness against a rolled-back ledger."""

import itertools
import json
import re
import threading
import time

import pytest
from serving import POOL, TERMS, table_votes

from aggregator.audit import START, follow, last_of, lines_after
from aggregator.chain import LedgerError
from aggregator.ledger import Asker, Ledger, OwnLimit
from aggregator.session import AggregatorSession, Query
from fairpate.privacy.discrete_gaussian import SeededSource


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        return tmp_path / "ledger.sqlite"
    return request.getfixturevalue("postgres").url("log-" + re.sub(r"\W", "-", request.node.name))


def use(place, *, salt=0):
    """Two callers who ask, a limit, a publication."""

    def vote(queries):
        by_key = {POOL.question(number).query.key: POOL.question(number) for number in range(len(POOL))}
        return table_votes([by_key[query.key] for query in queries], salt=salt)

    def ask(numbers, *askers):
        asked = [POOL.question(number).query for number in numbers]
        queries = [Query(key=q.key, group=q.group, record_id=q.record_id, askers=askers) for q in asked]
        return session.ask(queries, vote)

    with Ledger(place, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3 + salt))
        ask(range(40), Asker("alice", "r1"))
        session.limit("bob", OwnLimit(max_queries=20))
        ask(range(30, 70), Asker("bob", "r2"))
        session.publish()


def log_of(place):
    return [json.loads(line) for _, line in lines_after(place, START)]


def test_every_charge_names_who_what_and_when(place):
    use(place)
    lines = log_of(place)
    assert [line["event"] for line in lines] == ["charge", "stored", "limit", "charge", "stored", "publication"]
    assert [line["entry"] for line in lines] == [1, 2, 3, 4, 5, 6]
    (by_alice,), (by_bob,) = lines[0]["charges"], lines[3]["charges"]
    assert (by_alice["caller"], by_alice["request"]) == ("alice", "r1")
    assert by_alice["keys"] == [POOL.question(number).query.key for number in range(40)]
    assert by_alice["groups"] == [number % 2 for number in range(40)]
    assert by_bob["keys"] == [POOL.question(number).query.key for number in range(40, 60)]
    assert (lines[2]["caller"], lines[2]["limit"]["max_queries"]) == ("bob", 20)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", lines[0]["at"])


def test_with_other_votes_and_other_noise_the_log_is_the_same(tmp_path):
    """Two ensembles that disagree everywhere; only times and keyed digests differ."""
    logs = []
    for salt in (0, 1):
        path = tmp_path / f"{salt}.sqlite"
        use(path, salt=salt)
        logs.append([{k: v for k, v in line.items() if k not in ("at", "digest")} for line in log_of(path)])
    assert logs[0] == logs[1]
    assert not re.search("vote|label|answer|refus|verdict|epsilon_data", json.dumps(logs))


def test_a_log_goes_on_where_it_ends_also_after_a_line_was_cut(place, tmp_path):
    use(place)
    whole = [line for _, line in lines_after(place, START)]
    log = tmp_path / "audit.jsonl"
    for written in ("", whole[0] + "\n", whole[0] + "\n" + whole[1][:10], whole[0][:5]):
        log.write_text(written)
        rest = [line for _, line in lines_after(place, last_of(log))]
        assert log.read_text().splitlines() + rest == whole


@pytest.mark.parametrize("text", ["notes of mine", "notes\nand more", "{}", '{"entry": 1}\nnotes', "\n\n"])
def test_of_a_file_that_is_no_log_nothing_is_cut_off(tmp_path, text):
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(LedgerError, match="is no audit log"):
        last_of(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == text


def test_a_log_of_what_the_ledger_lacks_is_a_witness(tmp_path):
    path, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    use(path)
    use(other)
    (*_, (last, _)) = lines_after(path, START)
    with pytest.raises(LedgerError, match="rolled back, or the log is another"):
        list(lines_after(other, last))
    with pytest.raises(LedgerError, match="entry 5 was changed"):
        list(lines_after(other, last._replace(number=4)))
    log = tmp_path / "no-log"
    log.write_text("something else\n")
    with pytest.raises(LedgerError, match="no audit log"):
        last_of(log)


def test_it_follows_a_ledger_that_is_written(path):
    seen = []
    with Ledger(path, TERMS) as ledger:

        def read():
            seen.extend(itertools.islice(follow(path, START, pause_s=0.02), 10))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(10):
            ledger.limit("alice", OwnLimit(max_queries=number))
            time.sleep(0.01)
        reader.join(20)
    assert [head.number for head, _ in seen] == list(range(1, 11))
