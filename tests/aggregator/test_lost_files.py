"""Files of a ledger that are removed, cut short, replaced or linked, while it is open, after it was closed and after a
crash: the same answers or a refusal that names the file and the remedy, and never a fresh budget."""

import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import httpx
import pytest
from serving import TERMS, running
from stored_ledgers import ANSWER, REFUSAL, fill, holds_all, reserve

from aggregator import store
from aggregator.ledger import Ledger
from aggregator.store import LedgerError, head_path, ledger_files

pytestmark = pytest.mark.usefixtures("light_runs")

NAMES = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.head")
SUBSETS = [chosen for count in range(1, 5) for chosen in itertools.combinations(NAMES, count)]


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    return folder / "ledger.sqlite"


@pytest.fixture
def killed(path, tmp_path):
    """A folder as a crash leaves it: everything since the start is in the write-ahead log."""
    copy = tmp_path / "killed"
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        shutil.copytree(path.parent, copy)
    return copy / path.name


@pytest.mark.parametrize("removed", SUBSETS, ids=" ".join)
def test_after_a_crash_no_missing_file_gives_a_fresh_budget(killed, removed):
    for name in removed:
        (killed.parent / name).unlink()
    if removed == ("ledger.sqlite-shm",):  # an index of the log, which is made again
        assert holds_all(killed, create=True)
        return
    for create in (False,) if len(removed) == 4 else (False, True):
        with pytest.raises(LedgerError, match=r"ledger\.(sqlite|head).*from one copy"):
            Ledger(killed, TERMS, create=create)
    assert not any((killed.parent / name).exists() for name in set(removed) - {NAMES[2]})


@pytest.mark.parametrize("removed", [chosen for chosen in SUBSETS if set(chosen) < {NAMES[0], NAMES[3]}], ids=" ".join)
def test_after_an_orderly_end_no_missing_file_gives_a_fresh_budget(path, removed):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    for name in removed:
        (path.parent / name).unlink()
    with pytest.raises(LedgerError, match=r"ledger\.(sqlite|head).*from one copy"):
        Ledger(path, TERMS)


def test_a_ledger_is_made_only_where_that_is_asked_for(path):
    with pytest.raises(LedgerError, match="is gone"):
        Ledger(path, TERMS, create=False)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], NAMES[3]])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_after_a_crash_a_file_that_was_cut_short_is_noticed(killed, name, left):
    file = killed.parent / name
    os.truncate(file, left * file.stat().st_size // 3)
    try:
        assert holds_all(killed, create=True)  # the log holds every page of so small a ledger
        assert name == "ledger.sqlite"
    except LedgerError as error:
        assert "from one copy" in str(error) or "from a copy" in str(error)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_from_an_older_copy_is_refused_or_changes_nothing(path, tmp_path, name):
    older = tmp_path / "older"
    with Ledger(path, TERMS) as ledger:
        ledger.commit(reserve(ledger, "first"), [ANSWER])
        shutil.copytree(path.parent, older)
        ledger.commit(reserve(ledger, "second"), [ANSWER])
        reserve(ledger, "open")
        killed = shutil.copytree(path.parent, tmp_path / "killed") / path.name
    shutil.copy(older / name, killed.parent / name)
    try:
        assert holds_all(killed, create=True)
        assert name != "ledger.sqlite-wal"
    except LedgerError as error:
        assert "from one copy" in str(error)


def removed(file, _):
    file.unlink()


def replaced(file, _):
    copy = file.with_suffix(".tmp")
    shutil.copy(file, copy)
    copy.replace(file)


def linked(file, elsewhere):
    other = shutil.copy(file, elsewhere / "other")
    file.unlink()
    file.symlink_to(other)


def linked_hard(file, elsewhere):
    other = shutil.copy(file, elsewhere / "other")
    file.unlink()
    file.hardlink_to(other)


def emptied(file, _):
    os.truncate(file, 0)


CHANGES = [(removed, name) for name in NAMES] + [(replaced, name) for name in NAMES]
CHANGES += [(change, name) for change in (linked, linked_hard, emptied) for name in NAMES if name != NAMES[2]]


@pytest.mark.parametrize(("change", "name"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_an_open_ledger_whose_file_was_changed_writes_and_answers_no_more(path, tmp_path, change, name):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        reserved = reserve(ledger, "key")
        change(path.parent / name, tmp_path)
        for write in (lambda: ledger.commit(reserved, [REFUSAL]), lambda: reserve(ledger, "other"), ledger.check):
            with pytest.raises(LedgerError, match=rf"{name} (was|cannot be found).*restore all its files"):
                write()
        assert ledger.outcome_of.get("key") is None


def test_files_that_were_restored_under_a_refusing_ledger_survive_its_end(path, tmp_path):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        copy = shutil.copytree(path.parent, tmp_path / "copy")
        for file in ledger_files(path):
            file.unlink()
        with pytest.raises(LedgerError):
            reserve(ledger, "key")
        shutil.copytree(copy, path.parent, dirs_exist_ok=True)
    assert holds_all(path)


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[1:2], NAMES[3:], NAMES], ids=" ".join)
def test_a_service_whose_files_vanish_answers_what_it_answered_and_nothing_else(path, names):
    ask = [{"id": 0}, {"id": 1}]
    with running(path) as url, httpx.Client(base_url=url, timeout=60) as http:
        first = http.post("/v1/queries", json={"queries": ask}).json()
        for name in names:
            (path.parent / name).unlink()
        assert http.post("/v1/queries", json={"queries": [{"id": 2}]}).status_code == 503
        assert http.post("/v1/queries", json={"queries": ask}).json() == first
    with pytest.raises(LedgerError, match="from one copy"):
        Ledger(path, TERMS, create=False)


def test_a_ledger_behind_a_link_is_refused(path, tmp_path):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    linked(path, tmp_path)
    with pytest.raises(LedgerError, match="found a link"):
        Ledger(path, TERMS)


@pytest.mark.parametrize("stage", ["head", "ledger"])
def test_a_ledger_whose_making_was_interrupted_is_made(path, stage):
    Ledger(path, TERMS).close()
    made = path.with_name(path.name + ".new")
    path.replace(made)
    if stage == "ledger":  # a crash before the head was there
        head_path(path).unlink()
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    assert not made.exists()
    assert holds_all(path, create=True)


def test_a_head_without_entries_is_no_licence_to_start_again(path):
    Ledger(path, TERMS).close()
    empty = head_path(path).read_bytes()
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    path.unlink()
    head_path(path).write_bytes(empty)
    with pytest.raises(LedgerError, match="is gone"):
        Ledger(path, TERMS)


def test_a_ledger_that_is_replaced_while_it_is_opened_is_refused_and_let_go(path, monkeypatch):
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
    connect = store.connect

    def replaced(asked):
        other = asked.with_suffix(".other")
        shutil.copyfile(asked, other)
        other.replace(asked)
        return connect(asked)

    with monkeypatch.context() as changed:
        changed.setattr(store, "connect", replaced)
        with pytest.raises(LedgerError, match="was replaced while it was being opened"):
            Ledger(path, TERMS)
    assert holds_all(path, create=True)


def test_a_note_of_the_last_entry_that_was_written_in_part_is_an_error(path, monkeypatch):
    """The kernel may write less than it was given; such a head would refuse its ledger."""
    with Ledger(path, TERMS) as ledger:
        fill(ledger)
        reserved = reserve(ledger, "another")
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", lambda *_: 40)
            with pytest.raises(LedgerError, match="only 40 of the 86 bytes that note the last entry"):
                ledger.commit(reserved, [ANSWER])
        assert ledger.outcome_of.get("another") is None, "nothing leaves"
        with pytest.raises(LedgerError, match="writing to the ledger ended"):
            reserve(ledger, "third")
    # The entry was stored: the head is behind now, and is completed when the ledger is opened.
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *_: 40)
        with pytest.raises(LedgerError, match="only 40 of the 86 bytes"):
            Ledger(path, TERMS)
    with Ledger(path, TERMS) as ledger:
        assert ledger.outcome_of.get("another") == ANSWER


def test_an_anchor_that_was_written_in_part_is_an_error_and_is_not_left_behind(tmp_path):
    """The limit on a file's size ends the write in the middle, for real."""
    script = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from aggregator.store import FileAnchor, Head, LedgerError, StoreError
folder, head = Path(sys.argv[1]), Head(1, "0" * 64)
FileAnchor(folder / "anchor").make(head)
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
try:
    FileAnchor(folder / "new").make(head)
except LedgerError as error:
    print(error)
try:
    FileAnchor(folder / "anchor").note(Head(2, "1" * 64))
except StoreError as error:
    print(error)
"""
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, tmp_path, root], capture_output=True, text=True, check=True)  # noqa: S603
    first, second = done.stdout.splitlines()
    assert "the anchor cannot be created (only 40 of the 86 bytes" in first
    assert second.startswith("only 40 of the 86 bytes")
    assert not (tmp_path / "new").exists()
