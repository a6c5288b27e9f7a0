"""What every back end keeps (aggregator.store), tried on each."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import closing

import pytest
from serving import TERMS
from stored_ledgers import ANSWER, answer, execute, fill, holds_all, reserve

from aggregator import ledger_audit
from aggregator.ledger import CallerLimit, Ledger, back_end
from aggregator.store import Head, Header, LedgerError, rows_after

pytestmark = pytest.mark.usefixtures("light_runs")

EDITS = [
    "UPDATE {entries} SET payload = replace(payload, 'first', 'fisrt') WHERE number = 1",
    "UPDATE {entries} SET payload = replace(payload, '[0]', '[1]') WHERE number = 2",
    "UPDATE {entries} SET kind = 'commit' WHERE number = 1",
    "UPDATE {entries} SET kind = kind || '\t' WHERE number = 2",
    "UPDATE {entries} SET payload = payload || '\n' WHERE number = 2",
    "UPDATE {entries} SET number = 9000000000000 WHERE number = 2",
    "UPDATE {entries} SET number = 0 WHERE number = 1",
    "DELETE FROM {entries} WHERE number = 1",
    "DELETE FROM {entries} WHERE number = 2",
    "DELETE FROM {entries}",
    "UPDATE {ledgers} SET terms = replace(terms, '36', '35')",
    "UPDATE {ledgers} SET version = 1",
    "UPDATE {ledgers} SET key = replace(key, substr(key, 1, 4), '0000')",
]


def test_what_was_stored_is_there_for_the_next_writer_and_for_readers(place):
    with Ledger(place, TERMS) as ledger:
        fill(ledger)
        ledger.limit("alice", CallerLimit(max_queries=7))
        assert (ledger_audit.verify(place).reservations, ledger_audit.verify(place).open) == (3, 1)
    assert holds_all(place)
    with Ledger(place, TERMS, create=False) as ledger:
        assert (ledger.charged_to["alice"], ledger.limits["alice"].max_queries) == (3, 7)
    rows = ledger_audit.rows(place)
    assert [(row.key, row.to_json()["verdict"], row.asker.caller) for row in rows] == [
        ("first", "answer", "alice"),
        ("second", "answer", "alice"),
        ("open", "open", "alice"),
    ]


@pytest.mark.parametrize("step", ["reserve", "commit"])
def test_what_a_killed_writer_stored_is_there(place, step):
    """Killed by itself right after the store took the entry, before anything else happens."""
    process = multiprocessing.get_context("fork").Process(target=_store_and_die, args=(place, step))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with Ledger(place, TERMS, create=False) as ledger:
        assert len(ledger.keys) == 1
        assert ledger.outcome_of.get("key") == (ANSWER if step == "commit" else None)


def test_there_is_one_writer_and_readers_do_not_disturb_it(place):
    with Ledger(place, TERMS) as ledger:
        with pytest.raises(LedgerError, match="another process writes"):
            Ledger(place, TERMS)
        fill(ledger)
        for _ in range(3):
            ledger_audit.rows(place)
        answer(ledger, "third")
    assert ledger_audit.verify(place).answered == 3


@pytest.mark.parametrize("edit", EDITS)
def test_a_ledger_that_was_edited_or_cut_short_refuses_to_open_and_to_be_read(place, edit):
    with Ledger(place, TERMS) as ledger:
        answer(ledger, "first")
    execute(place, edit)
    for look in (lambda: Ledger(place, TERMS, create=False), lambda: ledger_audit.verify(place)):
        with pytest.raises(LedgerError):
            look()


@pytest.mark.parametrize("after", [0, 1, 255, 256, 257, 599, 600, 700])
def test_entries_are_read_in_order_from_anywhere(place, after):
    header = Header("{}", bytes(32))
    rows, head = [], header.start
    for number in range(1, 601):
        head = Head(number, header.link(head.digest, "limit", f'{{"n":{number}}}'))
        rows.append((number, "limit", f'{{"n":{number}}}', head.digest))
    back_end(place).write(place, header, rows)
    with closing(back_end(place).reader(place)) as reader:
        assert [(row[0], row[2]) for row in rows_after(reader, after)] == [
            (n, f'{{"n":{n}}}') for n in range(after + 1, 601)
        ]


def test_a_ledger_is_made_once_and_never_again_where_that_is_not_asked_for(place):
    with pytest.raises(LedgerError, match=r"is gone|no such"):
        Ledger(place, TERMS, create=False)
    with Ledger(place, TERMS) as ledger:
        fill(ledger)
    with Ledger(place, TERMS, create=True):
        pass
    assert holds_all(place)


def test_a_writer_whose_entry_failed_writes_no_more(place, monkeypatch):
    with Ledger(place, TERMS) as ledger:
        reserved = reserve(ledger, "key")
        monkeypatch.setattr(type(ledger.store), "append", _fail)
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.commit(reserved, [ANSWER])
        monkeypatch.undo()
        assert ledger.outcome_of.get("key") is None
        for write in (lambda: ledger.commit(reserved, [ANSWER]), lambda: reserve(ledger, "other"), ledger.check):
            with pytest.raises(LedgerError, match="writing to the ledger ended"):
                write()


def test_threads_that_read_while_one_writes_see_whole_entries(place):
    with Ledger(place, TERMS) as ledger:
        stop, seen, failures = threading.Event(), [], []

        def read():
            while not stop.is_set():
                try:
                    seen.append(ledger_audit.verify(place).entries)
                except LedgerError as error:
                    failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        number, end = 0, time.monotonic() + 60
        while number < 30 or (len(seen) < 3 and time.monotonic() < end):  # readers may be slow on a busy machine
            answer(ledger, f"key{number}")
            number += 1
        stop.set()
        for reader in readers:
            reader.join()
    assert not failures
    assert len(seen) > 2


def _fail(*_):
    raise OSError("No space left on device")


def _store_and_die(place, step):
    ledger = Ledger(place, TERMS)
    store = type(ledger.store)
    append = store.append

    def last(self, kind, text, head):
        append(self, kind, text, head)
        if kind == step:
            os.kill(os.getpid(), signal.SIGKILL)

    store.append = last
    answer(ledger, "key")
