"""The audit log: complete, the same whatever the votes, gone on with, and a witness against a rolled-back ledger."""

import itertools
import json
import re
import threading
import time

import pytest
from serving import POOL, TERMS, table_votes

from aggregator.ledger import Asker, CallerLimit, Ledger
from aggregator.ledger_audit import START, check_log, follow, lines_after, log_end, note_action
from aggregator.session import AggregatorSession, Query
from aggregator.store import LedgerError
from fairpate.privacy.discrete_gaussian import SeededSource

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    if request.param == "sqlite":
        return tmp_path / "ledger.sqlite"
    return request.getfixturevalue("postgres").url("log-" + re.sub(r"\W", "-", request.node.name))


def use(place, *, salt=0):
    """Two callers who ask, and a limit."""

    def vote(queries):
        by_key = {POOL.questions[number].query.key: POOL.questions[number] for number in range(len(POOL))}
        return table_votes([by_key[query.key] for query in queries], salt=salt)

    def ask(numbers, *askers):
        asked = [POOL.questions[number].query for number in numbers]
        queries = [Query(key=q.key, group=q.group, record_id=q.record_id, askers=askers) for q in asked]
        return session.ask(queries, vote)

    with Ledger(place, TERMS) as ledger:
        session = AggregatorSession(ledger, source=SeededSource(3 + salt))
        ask(range(40), Asker("alice", "r1"))
        session.limit("bob", CallerLimit(max_queries=20))
        ask(range(30, 70), Asker("bob", "r2"))


def log_of(place):
    return [json.loads(line) for _, line in lines_after(place, START)]


def test_every_charge_names_who_what_and_when(place):
    use(place)
    lines = log_of(place)
    assert [line["event"] for line in lines] == ["charge", "stored", "limit", "charge", "stored"]
    assert [line["entry"] for line in lines] == [1, 2, 3, 4, 5]
    (by_alice,), (by_bob,) = lines[0]["charges"], lines[3]["charges"]
    assert (by_alice["caller"], by_alice["request"]) == ("alice", "r1")
    assert by_alice["keys"] == [POOL.questions[number].query.key for number in range(40)]
    assert by_alice["groups"] == [number % 2 for number in range(40)]
    assert by_bob["keys"] == [POOL.questions[number].query.key for number in range(40, 60)]
    assert (lines[2]["caller"], lines[2]["limit"]["max_queries"]) == ("bob", 20)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", lines[0]["at"])


def test_with_other_votes_and_other_noise_the_log_is_the_same(tmp_path):
    """Two ensembles that disagree everywhere; only times and keyed digests differ."""
    logs = []
    for salt in (0, 1):
        path = tmp_path / f"{salt}.sqlite"
        use(path, salt=salt)
        logs.append([{k: v for k, v in line.items() if k not in ("at", "digest", "chain")} for line in log_of(path)])
    assert logs[0] == logs[1]
    assert not re.search("vote|label|answer|refus|verdict|epsilon_data", json.dumps(logs))


def test_a_log_goes_on_where_it_ends_also_after_a_line_was_cut(place, tmp_path):
    use(place)
    whole = [line for _, line in lines_after(place, START)]
    log = tmp_path / "audit.jsonl"
    for written in ("", whole[0] + "\n", whole[0] + "\n" + whole[1][:10], whole[0][:5]):
        log.write_text(written)
        rest = [line for _, line in lines_after(place, log_end(log))]
        assert log.read_text().splitlines() + rest == whole


@pytest.mark.parametrize("text", ["notes of mine", "notes\nand more", "{}", '{"entry": 1}\nnotes', "\n\n"])
def test_of_a_file_that_is_no_log_nothing_is_cut_off(tmp_path, text):
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(LedgerError, match="is not an audit log"):
        log_end(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == text


def test_a_log_of_what_the_ledger_lacks_is_a_witness(tmp_path):
    path, other = tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    use(path)
    use(other)
    (*_, (last, _)) = lines_after(path, START)
    with pytest.raises(LedgerError, match="rolled back, or the log belongs to another"):
        list(lines_after(other, last))
    with pytest.raises(LedgerError, match="entry 5 was changed"):
        list(lines_after(other, last._replace(entry=last.entry._replace(number=4))))
    log = tmp_path / "no-log"
    log.write_text("something else\n")
    with pytest.raises(LedgerError, match="not an audit log"):
        log_end(log)


def test_it_follows_a_ledger_that_is_written(path):
    seen = []
    with Ledger(path, TERMS) as ledger:

        def read():
            seen.extend(itertools.islice(follow(path, START, pause_s=0.02), 10))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(10):
            ledger.limit("alice", CallerLimit(max_queries=number))
            time.sleep(0.01)
        reader.join(20)
    assert [end.entry.number for end, _ in seen] == list(range(1, 11))


@pytest.fixture
def log(place, tmp_path):
    """A log of a ledger and of what its operators did."""
    use(place)
    actions = tmp_path / "actions.jsonl"
    note_action(actions, "tokens", change="add", name="josé\u2028")
    note_action(actions, "take over")
    log = tmp_path / "audit.jsonl"
    log.write_text("".join(line + "\n" for _, line in lines_after(place, START, actions)), encoding="utf-8")
    return log


def test_actions_of_operators_are_in_the_log(place, tmp_path, log):
    end, actions = log_end(log), tmp_path / "actions.jsonl"
    assert (end.entry.number, end.action.number) == (5, 2)
    assert actions.stat().st_mode & 0o777 == 0o600
    note_action(actions, "restore", copy="c")
    ((end, line),) = lines_after(place, end, actions)
    assert (json.loads(line)["event"], end.action.number) == ("restore", 3)
    with actions.open("ab") as file:
        file.write(b'{"action": 4, "a')  # a crash left a part of a line
    note_action(actions, "show", last=1)
    assert [json.loads(line)["event"] for _, line in lines_after(place, end, actions)] == ["show"]


@pytest.mark.parametrize("edit", ["cut", "changed", "anew"])
def test_a_journal_that_was_cut_or_edited_is_refused(place, tmp_path, log, edit):
    actions = tmp_path / "actions.jsonl"
    lines = actions.read_text(encoding="utf-8").split("\n")
    if edit == "changed":
        lines[0] = lines[0].replace("add", "end")
    actions.write_text("\n".join(lines) if edit == "changed" else "", encoding="utf-8")
    if edit == "anew":
        note_action(actions, "restore")
        note_action(actions, "take over")
    with pytest.raises(LedgerError, match=r"action [12].*(was changed|the journal was cut)"):
        list(lines_after(place, log_end(log), actions))


def test_a_log_is_checked_against_a_head_that_was_noted(log):
    lines = log.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    heads = [json.loads(line)["chain"] for line in lines]
    assert check_log(log, heads[2]) == (7, 3, heads[-1])
    log.write_text("\n".join(lines[:5]) + "\n", encoding="utf-8")
    assert check_log(log, heads[4]) == (5, 5, heads[4])
    with pytest.raises(LedgerError, match="none of its 5 lines has the chain"):
        check_log(log, heads[-1])
    for edited in ([*lines[:2], *lines[3:]], [lines[0].replace("alice", "carol"), *lines[1:]], [*lines, lines[-1]]):
        log.write_text("\n".join(edited) + "\n", encoding="utf-8")
        for read in (lambda: check_log(log, heads[-1]), lambda: log_end(log)):
            with pytest.raises(LedgerError, match="was changed or removed"):
                read()
