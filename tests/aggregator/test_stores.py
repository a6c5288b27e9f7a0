"""What every back end keeps (aggregator.ledger.stores), tried on each; and what a database does besides."""

import fcntl
import multiprocessing
import os
import re
import signal
import sqlite3
import threading
import time

import numpy as np
import pytest
from serving import TERMS

from aggregator.ledger import audit
from aggregator.ledger.anchors import open_anchor
from aggregator.ledger.chain import SCHEMA_VERSION, Chain, Header
from aggregator.ledger.entries import Asker, OwnLimit
from aggregator.ledger.files import LedgerError
from aggregator.ledger.ledger import Ledger
from aggregator.ledger.stores import is_database, reading, shown, write_store
from aggregator.mechanism import Outcome

psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")
VOTES = np.array([[40, 15, 5]])
ANSWER, REFUSAL = Outcome(verdict="answer", label=0), Outcome(verdict="fairness")
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


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where a ledger of the test lies, in each back end."""
    if request.param == "sqlite":
        return tmp_path / "ledger.sqlite"
    return request.getfixturevalue("postgres").url(re.sub(r"\W", "-", request.node.name))


@pytest.fixture
def database(postgres, request):
    """A ledger's place in a database."""
    return postgres.url(re.sub(r"\W", "-", request.node.name))


def reserve(ledger, key):
    return ledger.reserve([key], [1], VOTES, [Asker("alice", "r1")])


def answer(ledger, key):
    ledger.commit(reserve(ledger, key), [ANSWER])


def fill(ledger):
    """Two answers, a limit, and a reservation that never gets an outcome."""
    for key in ("first", "second"):
        answer(ledger, key)
    ledger.limit("alice", OwnLimit(max_queries=7))
    reserve(ledger, "open")


def holds_all(place):
    with Ledger(place, TERMS, create=False) as ledger:
        outcomes = [ledger.outcome(key) for key in ("first", "second", "open")]
        charged = (ledger.num_reservations, ledger.charged_to("alice"), ledger.limit_of("alice").max_queries)
        return outcomes == [ANSWER, ANSWER, None] and charged == (3, 3, 7)


def execute(place, statement, **values):
    """An edit by hand, past the ledger."""
    for name, value in values.items():
        statement = statement.replace(f":{name}", f"'{value}'")
    if is_database(place):
        with psycopg.connect(place.partition("#")[0]) as connection:
            connection.execute("SET session_replication_role = replica")  # no foreign key hinders who owns the server
            condition = " AND " if "WHERE" in statement else " WHERE "
            column = "name" if "{ledgers}" in statement else "ledger"
            text = statement.format(entries="fairpate_entries", ledgers="fairpate_ledgers")
            connection.execute(f"{text}{condition}{column} = '{place.partition('#')[2]}'")
    else:
        connection = sqlite3.connect(place)
        with connection:
            connection.execute(statement.format(entries="entries", ledgers="chain"))
        connection.close()


def test_what_was_stored_is_there_for_the_next_writer_and_for_readers(place):
    with Ledger(place, TERMS) as ledger:
        fill(ledger)
        assert (audit.verify(place).reservations, audit.verify(place).open) == (3, 1)
    assert holds_all(place)
    rows = audit.rows(place)
    assert [(row.key, row.verdict, row.caller) for row in rows] == [
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
        assert ledger.num_reservations == 1
        assert ledger.outcome("key") == (ANSWER if step == "commit" else None)


def test_there_is_one_writer_and_readers_do_not_disturb_it(place):
    with Ledger(place, TERMS) as ledger:
        with pytest.raises(LedgerError, match="another process writes"):
            Ledger(place, TERMS)
        fill(ledger)
        for _ in range(3):
            audit.rows(place)
        answer(ledger, "third")
    assert audit.verify(place).answered == 3


@pytest.mark.parametrize("edit", EDITS)
def test_a_ledger_that_was_edited_or_cut_short_refuses_to_open_and_to_be_read(place, edit):
    with Ledger(place, TERMS) as ledger:
        answer(ledger, "first")
    execute(place, edit)
    for look in (lambda: Ledger(place, TERMS, create=False), lambda: audit.verify(place)):
        with pytest.raises(LedgerError):
            look()


@pytest.mark.parametrize("after", [0, 1, 255, 256, 257, 599, 600, 700])
def test_entries_are_read_in_order_from_anywhere(place, after):
    chain = Chain(bytes(32))
    rows, head = [], chain.start("{}")
    for number in range(1, 601):
        head = chain.after(head, "limit", f'{{"n":{number}}}')
        rows.append((number, "limit", f'{{"n":{number}}}', head.digest))
    write_store(place, Header(version=SCHEMA_VERSION, terms="{}", chain=chain), rows)
    with reading(place, after=after) as stored:
        assert [(row[0], row[2]) for row in stored.rows] == [(n, f'{{"n":{n}}}') for n in range(after + 1, 601)]


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
        monkeypatch.setattr(type(ledger._store), "append", _fail)
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.commit(reserved, [ANSWER])
        monkeypatch.undo()
        assert ledger.outcome("key") is None
        for write in (lambda: ledger.commit(reserved, [ANSWER]), lambda: reserve(ledger, "other"), ledger.check):
            with pytest.raises(LedgerError, match="writing ended"):
                write()


def test_nothing_is_written_behind_a_last_entry_that_is_another_one_now(database):
    """A database restored under a living writer, as through a pooler: epoch and number are those of before."""
    with Ledger(database, TERMS) as ledger:
        answer(ledger, "first")
        execute(database, "UPDATE {ledgers} SET digest = :digest", digest="0" * 64)
        with pytest.raises(LedgerError, match="last entry is another one"):
            reserve(ledger, "second")
        assert ledger.num_reservations == 1


def test_threads_that_read_while_one_writes_see_whole_entries(place):
    with Ledger(place, TERMS) as ledger:
        stop, seen, failures = threading.Event(), [], []

        def read():
            while not stop.is_set():
                try:
                    seen.append(audit.verify(place).entries)
                except LedgerError as error:
                    failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(30):
            answer(ledger, f"key{number}")
        stop.set()
        for reader in readers:
            reader.join()
    assert not failures
    assert len(seen) > 2


@pytest.fixture(params=["file", "database"])
def anchor(request, tmp_path):
    """Where the last entry is noted besides."""
    if request.param == "file":
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        return folder / "anchor"
    return request.getfixturevalue("postgres").url("anchor-" + re.sub(r"\W", "-", request.node.name))


def anchored(place, anchor):
    """A ledger with one answer, and its anchor."""
    with Ledger(place, TERMS) as ledger:
        answer(ledger, "first")
        noted = open_anchor(anchor)
        noted.make(ledger.head)
        noted.close()


def snapshot(place):
    """A whole copy of a ledger as it is now; calling it brings the copy back."""
    if is_database(place):
        name = place.partition("#")[2]
        with psycopg.connect(place.partition("#")[0]) as connection:
            (head,) = connection.execute(
                "SELECT (number, digest)::text FROM fairpate_ledgers WHERE name = %s", (name,)
            ).fetchone()
        number, digest = head.strip("()").split(",")

        def bring_back():
            execute(place, "DELETE FROM {entries} WHERE number > :number", number=number)
            execute(place, "UPDATE {ledgers} SET number = :number, digest = :digest", number=number, digest=digest)

        return bring_back
    files = {file: file.read_bytes() for file in place.parent.iterdir() if file.is_file()}

    def write_back():
        for file in place.parent.iterdir():
            if file.is_file():
                file.unlink()
        for file, content in files.items():
            file.write_bytes(content)

    return write_back


def test_a_ledger_that_was_rolled_back_as_a_whole_is_refused_where_it_has_an_anchor(place, anchor):
    anchored(place, anchor)
    bring_back = snapshot(place)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        answer(ledger, "second")
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        assert ledger.outcome("second") == ANSWER
    bring_back()
    with Ledger(place, TERMS, create=False) as ledger:  # it is whole in itself: nothing else tells
        assert ledger.outcome("second") is None
    bring_back()
    for look in (
        lambda: Ledger(place, TERMS, create=False, anchor=anchor),
        lambda: audit.verify(place, anchor=anchor),
    ):
        with pytest.raises(LedgerError, match="not the number"):
            look()


def test_a_lost_reservation_is_none_of_an_anchor_s_and_a_lost_limit_is(place, anchor):
    anchored(place, anchor)
    bring_back = snapshot(place)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        reserve(ledger, "drawn-and-never-answered")
    bring_back()
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        ledger.limit("alice", OwnLimit(max_queries=1))
    bring_back()
    with pytest.raises(LedgerError, match="not the number"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_answer_whose_note_a_crash_prevented_is_noted_before_it_is_given(place, anchor):
    anchored(place, anchor)
    bring_back = snapshot(place)
    with Ledger(place, TERMS, create=False) as ledger:  # as if it died between the entry and the anchor
        answer(ledger, "second")
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        assert ledger.outcome("second") == ANSWER  # and given from now on
    bring_back()
    with pytest.raises(LedgerError, match="not the number"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_anchor_that_is_gone_or_of_another_ledger_ends_the_writing_and_the_opening(place, anchor):
    anchored(place, anchor)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        reserved = reserve(ledger, "key")
        forget(anchor)
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.commit(reserved, [ANSWER])
        assert ledger.outcome("key") is None
    with pytest.raises(LedgerError, match="anchor"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_anchor_that_a_paused_process_holds_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    anchored(tmp_path / "ledger.sqlite", tmp_path / "anchor")
    monkeypatch.setattr("aggregator.ledger.anchors._LOCK_S", 0.1)
    with (tmp_path / "anchor").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="a process that hangs; end it"):
            Ledger(tmp_path / "ledger.sqlite", TERMS, create=False, anchor=tmp_path / "anchor")
    Ledger(tmp_path / "ledger.sqlite", TERMS, create=False, anchor=tmp_path / "anchor").close()


def test_an_anchor_never_goes_back(place, anchor):
    anchored(place, anchor)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        old = ledger.head
        answer(ledger, "second")
        noted = open_anchor(anchor)
        for head in (old, ledger.head._replace(digest="0" * 64)):
            with pytest.raises(OSError, match="another writer"):
                noted.note(head)
        assert noted.noted() == ledger.head
    with pytest.raises(LedgerError, match="anchor"):
        noted.make(old)
    noted.close()


def forget(anchor):
    if is_database(anchor):
        url, _, name = anchor.partition("#")
        with psycopg.connect(url) as connection:
            connection.execute("DELETE FROM fairpate_anchors WHERE name = %s", (name,))
    else:
        anchor.unlink()


def test_a_deposed_writer_that_was_paused_and_continues_writes_and_answers_nothing(database, tmp_path):
    """Stopped by SIGSTOP between draw and commit. Its connection is left alone: the epoch alone holds it back."""
    with Ledger(database, TERMS):
        pass
    said = tmp_path / "said"
    process = multiprocessing.get_context("fork").Process(target=_pause_and_go_on, args=(database, said))
    process.start()
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(LedgerError, match="another process writes"):
        Ledger(database, TERMS, create=False)
    with _without_ending(), Ledger(database, TERMS, create=False, take_over=True) as ledger:
        assert ledger.num_reservations == 1
        answer(ledger, "key")
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        answer(ledger, "other")
    assert said.read_text() == "cannot be written (another writer took over"
    with Ledger(database, TERMS, create=False) as ledger:
        assert [charge.outcome for charge in ledger.charges] == [None, ANSWER, ANSWER]


def test_taking_over_ends_the_connection_of_the_other_and_a_third_is_refused(database):
    with Ledger(database, TERMS) as first:
        reserved = reserve(first, "key")
        with Ledger(database, TERMS, create=False, take_over=True) as second:
            with pytest.raises(LedgerError, match=r"cannot be written|writing ended"):
                first.commit(reserved, [ANSWER])
            with pytest.raises(LedgerError, match="another process writes"):
                Ledger(database, TERMS, create=False)
            answer(second, "key")


def test_writers_that_take_over_from_each_other_in_turns_lose_and_double_nothing(database):
    with Ledger(database, TERMS):
        pass
    stored, stop = [], time.monotonic() + 2.0

    def take_turns(number):
        count = 0
        while time.monotonic() < stop:
            try:
                with Ledger(database, TERMS, create=False, take_over=True) as ledger:
                    for _ in range(3):
                        key, count = f"{number}-{count}", count + 1
                        answer(ledger, key)
                        stored.append(key)
            except LedgerError:
                continue

    writers = [threading.Thread(target=take_turns, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with Ledger(database, TERMS, create=False) as ledger:
        assert all(ledger.outcome(key) == ANSWER for key in stored)
    keys = [row.key for row in audit.rows(database)]
    assert len(keys) == len(set(keys)) >= len(stored) > 3


def test_a_server_that_loses_its_power_holds_what_it_confirmed(database, postgres):
    with Ledger(database, TERMS) as ledger:
        fill(ledger)
        postgres.kill()
        with pytest.raises(LedgerError, match="cannot be written"):
            reserve(ledger, "key")
        with pytest.raises(LedgerError, match="no database answers"):
            Ledger(database, TERMS, create=False)
        postgres.start()
    assert holds_all(database)


@pytest.mark.parametrize("setting", ["synchronous_commit = off", "synchronous_commit = local", "fsync = off"])
def test_a_server_that_does_not_wait_for_its_disk_is_refused(database, postgres, setting):
    with Ledger(database, TERMS) as ledger:
        fill(ledger)
    name, _, value = setting.partition(" = ")
    try:
        _alter(postgres, f"ALTER SYSTEM SET {setting}")
        with pytest.raises(LedgerError, match=f"{name} = {value}"):
            Ledger(database, TERMS, create=False)
    finally:
        _alter(postgres, f"ALTER SYSTEM RESET {name}")
    assert holds_all(database)


def test_a_server_that_stops_waiting_for_its_disk_meanwhile_takes_nothing_more(database, postgres):
    with Ledger(database, TERMS) as ledger:
        fill(ledger)
        try:
            _alter(postgres, "ALTER SYSTEM SET synchronous_commit = off")  # this session keeps its own
            answer(ledger, "third")
            _alter(postgres, "ALTER SYSTEM SET fsync = off")
            with pytest.raises(LedgerError, match="fsync"):
                reserve(ledger, "key")
        finally:
            _alter(postgres, "ALTER SYSTEM RESET ALL")


def test_a_place_needs_a_ledger_s_name_and_never_shows_a_password():
    place = "postgresql://me:secret@host/db?password=secret#name"
    assert shown(place) == "postgresql://me@host/db#name"
    with pytest.raises(LedgerError, match="names no ledger") as refused:
        Ledger(place.partition("#")[0], TERMS)
    assert "secret" not in str(refused.value)


def _alter(postgres, statement):
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute(statement)
        connection.execute("SELECT pg_reload_conf()")
    deadline_s = time.monotonic() + 10
    wanted = statement.split(" = ")[1] if " = " in statement else "on"
    name = statement.split("SET ")[1].split()[0] if " = " in statement else "fsync"
    while True:
        with psycopg.connect(postgres.url()) as connection:
            if connection.execute("SELECT current_setting(%s)", (name,)).fetchone()[0] == wanted:
                return
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def _fail(*_):
    raise OSError("No space left on device")


def _store_and_die(place, step):
    ledger = Ledger(place, TERMS)
    store = type(ledger._store)
    append = store.append

    def last(self, kind, text, head):
        append(self, kind, text, head)
        if kind == step:
            os.kill(os.getpid(), signal.SIGKILL)

    store.append = last
    answer(ledger, "key")


def _pause_and_go_on(place, said):
    with Ledger(place, TERMS, create=False) as ledger:
        reserved = reserve(ledger, "key")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            ledger.commit(reserved, [REFUSAL])
            said.write_text("wrote")
        except LedgerError as error:
            said.write_text(re.search(r"cannot be written \(another writer took over", str(error))[0])
        assert ledger.outcome("key") is None


def _without_ending():
    patch = pytest.MonkeyPatch()
    patch.setattr("aggregator.ledger.postgres_store._TAKE_OVER_S", 0.1)
    patch.setattr("aggregator.ledger.postgres_store._end_holder", lambda *_: None)
    return _Undone(patch)


class _Undone:
    def __init__(self, patch):
        self._patch = patch

    def __enter__(self):
        return self._patch

    def __exit__(self, *_):
        self._patch.undo()
