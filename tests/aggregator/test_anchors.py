"""An anchor tells a ledger that was rolled back as a whole, wherever both lie."""

import fcntl
import re

import pytest
from serving import TERMS
from stored_ledgers import ANSWER, answer, execute, reserve

from aggregator import ledger_audit
from aggregator.ledger import CallerLimit, Ledger, back_end
from aggregator.store import LedgerError, is_database

pytestmark = pytest.mark.usefixtures("light_runs")

psycopg = pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")


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
        noted = back_end(anchor).anchor(anchor)
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
        assert ledger.outcome_of.get("second") == ANSWER
    bring_back()
    with Ledger(place, TERMS, create=False) as ledger:  # it is whole in itself: nothing else tells
        assert ledger.outcome_of.get("second") is None
    bring_back()
    for look in (
        lambda: Ledger(place, TERMS, create=False, anchor=anchor),
        lambda: ledger_audit.verify(place, anchor=anchor),
    ):
        with pytest.raises(LedgerError, match="lacks entry"):
            look()


def test_a_lost_reservation_is_none_of_an_anchor_s_and_a_lost_limit_is(place, anchor):
    anchored(place, anchor)
    bring_back = snapshot(place)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        reserve(ledger, "drawn-and-never-answered")
    bring_back()
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        ledger.limit("alice", CallerLimit(max_queries=1))
    bring_back()
    with pytest.raises(LedgerError, match="lacks entry"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_answer_whose_note_a_crash_prevented_is_noted_before_it_is_given(place, anchor):
    anchored(place, anchor)
    bring_back = snapshot(place)
    with Ledger(place, TERMS, create=False) as ledger:  # as if it died between the entry and the anchor
        answer(ledger, "second")
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        assert ledger.outcome_of.get("second") == ANSWER  # and given from now on
    bring_back()
    with pytest.raises(LedgerError, match="lacks entry"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_anchor_that_is_gone_or_of_another_ledger_ends_the_writing_and_the_opening(place, anchor):
    anchored(place, anchor)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        reserved = reserve(ledger, "key")
        forget(anchor)
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.commit(reserved, [ANSWER])
        assert ledger.outcome_of.get("key") is None
    with pytest.raises(LedgerError, match="anchor"):
        Ledger(place, TERMS, create=False, anchor=anchor)


def test_an_anchor_that_a_paused_process_holds_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    anchored(tmp_path / "ledger.sqlite", tmp_path / "anchor")
    monkeypatch.setattr("aggregator.store._LOCK_S", 0.1)
    with (tmp_path / "anchor").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="a process that hangs has locked this anchor"):
            Ledger(tmp_path / "ledger.sqlite", TERMS, create=False, anchor=tmp_path / "anchor")
    Ledger(tmp_path / "ledger.sqlite", TERMS, create=False, anchor=tmp_path / "anchor").close()


def test_an_anchor_never_goes_back(place, anchor):
    anchored(place, anchor)
    with Ledger(place, TERMS, create=False, anchor=anchor) as ledger:
        old = ledger.head
        answer(ledger, "second")
        noted = back_end(anchor).anchor(anchor)
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
