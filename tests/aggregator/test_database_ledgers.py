"""What a ledger in a database does besides: one writer takes over from another, and a server that loses its power."""

import multiprocessing
import os
import re
import signal
import threading
import time

import pytest
from serving import TERMS
from stored_ledgers import ANSWER, REFUSAL, answer, execute, fill, holds_all, reserve

from aggregator import ledger_audit
from aggregator.ledger import Ledger
from aggregator.store import LedgerError, shown

psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")
from aggregator.postgres import split_place  # noqa: E402

pytestmark = pytest.mark.usefixtures("light_runs")


def test_nothing_is_written_behind_a_last_entry_that_is_another_one_now(database):
    """A database restored under a living writer, as through a pooler: epoch and number are those of before."""
    with Ledger(database, TERMS) as ledger:
        answer(ledger, "first")
        execute(database, "UPDATE {ledgers} SET digest = :digest", digest="0" * 64)
        with pytest.raises(LedgerError, match="last entry has changed"):
            reserve(ledger, "second")
        assert len(ledger.keys) == 1


def test_a_deposed_writer_that_was_paused_and_continues_writes_and_answers_nothing(database, tmp_path):
    """Stopped by SIGSTOP between draw and commit. Its connection is left alone, and its last entry is the ledger's:
    the epoch alone holds it back."""
    with Ledger(database, TERMS):
        pass
    said = tmp_path / "said"
    process = multiprocessing.get_context("fork").Process(target=_pause_and_go_on, args=(database, said))
    process.start()
    os.waitpid(process.pid, os.WUNTRACED)
    with pytest.raises(LedgerError, match="another process writes"):
        Ledger(database, TERMS, create=False)
    with _without_ending(), Ledger(database, TERMS, create=False, take_over=True) as ledger:
        assert len(ledger.keys) == 1
        os.kill(process.pid, signal.SIGCONT)
        process.join(60)
        answer(ledger, "key")
        answer(ledger, "other")
    assert said.read_text() == "cannot be written (another writer took over"
    with Ledger(database, TERMS, create=False) as ledger:
        assert [charge.outcome for charge in ledger.charges] == [None, ANSWER, ANSWER]


def test_taking_over_ends_the_connection_of_the_other_and_a_third_is_refused(database):
    with Ledger(database, TERMS) as first:
        reserved = reserve(first, "key")
        with Ledger(database, TERMS, create=False, take_over=True) as second:
            with pytest.raises(LedgerError, match=r"cannot be written|writing to the ledger ended"):
                first.commit(reserved, [ANSWER])
            with pytest.raises(LedgerError, match="another process writes"):
                Ledger(database, TERMS, create=False)
            answer(second, "key")


def test_the_next_writer_waits_for_a_session_that_is_about_to_end(database):
    """A server ends the session of a closed connection when it is that session's turn: under load, not at once."""
    with Ledger(database, TERMS) as ledger:
        answer(ledger, "key")
    url, name = split_place(database)
    with psycopg.connect(url, autocommit=True) as held:
        held.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", (name,))
        ending = threading.Timer(0.3, held.close)
        ending.start()
        with Ledger(database, TERMS, create=False) as ledger:
            assert [charge.outcome for charge in ledger.charges] == [ANSWER]
        ending.join()


def test_writers_that_take_over_from_each_other_in_turns_lose_and_double_nothing(database):
    with Ledger(database, TERMS):
        pass
    stored, stop = [], time.monotonic() + 1.0

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
        assert all(ledger.outcome_of.get(key) == ANSWER for key in stored)
    keys = [row.key for row in ledger_audit.rows(database)]
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
    for secret in ("me:p@ss@host/db", "me:p?ss@host/db", "me:p#ss@host/db", "me:p/ss@host/db", "host/db?password=p@ss"):
        assert "ss" not in shown(f"postgresql://{secret}#name").removeprefix("postgresql"), secret
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


def _pause_and_go_on(place, said):
    with Ledger(place, TERMS, create=False) as ledger:
        reserved = reserve(ledger, "key")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            ledger.commit(reserved, [REFUSAL])
            said.write_text("wrote")
        except LedgerError as error:
            said.write_text(re.search(r"cannot be written \(another writer took over", str(error))[0])
        assert ledger.outcome_of.get("key") is None


def _without_ending():
    patch = pytest.MonkeyPatch()
    patch.setattr("aggregator.postgres._TAKE_OVER_S", 0.1)
    patch.setattr("aggregator.postgres._END_HOLDER", "SELECT %s::text")
    return _Undone(patch)


class _Undone:
    def __init__(self, patch):
        self._patch = patch

    def __enter__(self):
        return self._patch

    def __exit__(self, *_):
        self._patch.undo()
