"""Backing a run's ledger up, putting a copy back, moving it into a database: no charge is ever forgotten by it."""

import json
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from small_runs import open_terms, run

from aggregator import ledger_audit
from aggregator.ledger import Asker, Ledger
from aggregator.mechanism import Outcome
from aggregator.store import LedgerError, head_path, ledger_files
from fairpate.data import load_data
from fairpate.releases import run_ledger as of_runs
from fairpate.releases.directory import RunDirectory, read_labels
from fairpate.releases.run_ledger import open_ledger, place_of
from fairpate.run import ledgers
from fairpate.run.ledgers import back_up_run, last_backup_s, restore

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture
def copied(finished, tmp_path):
    """A finished run in a folder of the test, and its configuration."""
    folder, config = finished
    root = shutil.copytree(folder.root, tmp_path / "run")
    return RunDirectory(root=root), config.model_copy(update={"out": root})


@pytest.fixture
def terms(finished):
    """What the run's ledger is a ledger of."""
    return open_terms(finished[0])


def charge(folder, key, terms):
    """One more answered query, as a service charges it."""
    place = place_of(folder)
    with Ledger(place.ledger, terms, create=False, anchor=place.anchor) as ledger:
        votes = np.zeros((1, ledger.terms.num_classes), dtype=np.int64)
        votes[0, 0] = ledger.terms.num_teachers
        ledger.commit(ledger.reserve([key], [0], votes, [Asker("alice", "r")]), [Outcome(verdict="answer", label=0)])


def entries_of(folder):
    return ledger_audit.verify(place_of(folder).ledger).entries


def test_a_copy_is_taken_while_a_service_writes_and_verifies(fairpate, copied, tmp_path, terms):
    folder, _ = copied
    out = tmp_path / "copy.sqlite"
    assert last_backup_s(folder) is None
    with Ledger(folder.ledger, terms, create=False):
        code, told, _ = fairpate("ledger", "backup", str(folder.root), str(out))
    assert (code, told) == (0, f"{out}: {entries_of(folder)} entries\n")
    assert ledger_audit.verify(out) == ledger_audit.verify(folder.ledger)
    assert out.stat().st_mode & 0o077 == head_path(out).stat().st_mode & 0o077 == 0
    assert last_backup_s(folder) is not None
    code, _, error = fairpate("ledger", "backup", str(folder.root), str(out))
    assert (code, "already exists" in error) == (2, True)


def test_verify_compares_the_released_labels_with_the_ledger(fairpate, copied, terms):
    folder, _ = copied
    number = len(read_labels(folder.labels).labels)
    assert f"all {number} are in it" in fairpate("ledger", "verify", str(folder.root))[1]
    for file in ledger_files(folder.ledger):
        file.unlink()
    Ledger(folder.ledger, terms).close()  # whole in itself, and empty
    code, _, error = fairpate("ledger", "verify", str(folder.root))
    assert code == 1
    assert f"{number} of {number} released labels are not in the run's ledger" in error


@pytest.mark.parametrize("lost", ["nothing", "database", "all files"])
def test_a_copy_of_now_is_put_back_and_the_run_goes_on_with_the_same_labels(fairpate, copied, tmp_path, lost):
    folder, config = copied
    out, before = tmp_path / "copy.sqlite", folder.labels.read_bytes()
    back_up_run(folder.root, out)
    if lost != "nothing":
        folder.ledger.unlink()
    if lost == "all files":
        head_path(folder.ledger).unlink()
    assert fairpate("ledger", "restore", str(out), str(folder.root))[0] == 0
    assert entries_of(folder) == ledger_audit.verify(out).entries
    assert len(list(folder.private.glob("ledger.replaced-1.*"))) == {"nothing": 2, "database": 1}.get(lost, 0)
    run(config)
    assert folder.labels.read_bytes() == before


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_replaced_ledger_stays_whole_where_a_crash_came_between_its_files(
    copied, tmp_path, terms, monkeypatch, renamed
):
    """Its last entries are in the log alone, as a killed writer leaves them."""
    folder, _ = copied
    private, kept = folder.ledger.parent, tmp_path / "kept"
    with Ledger(folder.ledger, terms, create=False) as ledger:
        votes = np.array([[terms.num_teachers] + [0] * (terms.num_classes - 1)])
        ledger.commit(ledger.reserve(["last"], [0], votes), [Outcome(verdict="answer", label=0)])
        shutil.copytree(private, kept)
    for file in ledger_files(folder.ledger):
        file.unlink()
    for file in ledger_files(kept / folder.ledger.name):
        shutil.copy(file, private)
    out, rename, left = tmp_path / "copy.sqlite", type(private).rename, [renamed]
    entries = back_up_run(folder.root, out)

    def crash(path, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(private), "rename", crash)
        restore(folder, out, to=None)
    if renamed:
        with pytest.raises(LedgerError):
            Ledger(folder.ledger, terms, create=False)
    restore(folder, out, to=None)
    assert entries_of(folder) == entries
    assert ledger_audit.verify(private / "ledger.replaced-1.sqlite").entries == entries


def test_an_older_copy_is_refused_by_what_is_there_and_by_the_head_alone(copied, tmp_path, terms):
    folder, _ = copied
    out = tmp_path / "copy.sqlite"
    back_up_run(folder.root, out)
    charge(folder, "later", terms)
    with pytest.raises(LedgerError, match="charges would be forgotten"):
        restore(folder, out, to=None)
    folder.ledger.unlink()
    with pytest.raises(LedgerError, match="charges would be forgotten"):
        restore(folder, out, to=None)


def test_a_charge_of_the_last_moment_is_seen_with_the_ledger_in_hand(copied, tmp_path, terms, monkeypatch):
    folder, _ = copied
    out = tmp_path / "copy.sqlite"
    back_up_run(folder.root, out)
    lock = ledgers.lock

    def after_a_charge(path):
        charge(folder, "later", terms)  # by a service that ends just before
        return lock(path)

    monkeypatch.setattr(ledgers, "lock", after_a_charge)
    with pytest.raises(LedgerError, match="charges would be forgotten"):
        restore(folder, out, to=None)


def test_an_older_copy_is_refused_by_the_anchor_where_all_files_are_lost(fairpate, copied, tmp_path, terms):
    folder, _ = copied
    out, anchor = tmp_path / "copy.sqlite", tmp_path / "elsewhere"
    assert fairpate("ledger", "anchor", str(folder.root), str(anchor))[0] == 0
    back_up_run(folder.root, out)
    charge(folder, "later", terms)
    for file in ledger_files(folder.ledger):
        file.unlink()
    with pytest.raises(LedgerError, match="lacks entry"):
        restore(folder, out, to=None)
    code, _, error = fairpate("ledger", "anchor", str(folder.root), str(tmp_path / "other"))
    assert (code, "already has an anchor" in error) == (2, True)


def journal_of(folder):
    """What the journal of operators' actions says was done."""
    lines = folder.actions.read_text(encoding="utf-8").splitlines() if folder.actions.exists() else []
    return [json.loads(line)["event"] for line in lines]


def test_an_anchor_is_not_made_while_a_service_writes_which_would_not_move_it(fairpate, copied, tmp_path, terms):
    """As it stood still, a ledger of before the service's next start was accepted as current."""
    folder, _ = copied
    anchor = tmp_path / "elsewhere"
    with Ledger(folder.ledger, terms, create=False):
        code, _, error = fairpate("ledger", "anchor", str(folder.root), str(anchor))
    assert (code, "another process writes this ledger; stop that process" in error) == (1, True)
    assert not anchor.exists()
    assert not folder.ledger_place.exists()
    assert journal_of(folder) == []
    assert fairpate("ledger", "anchor", str(folder.root), str(anchor))[0] == 0
    assert journal_of(folder) == ["anchor"]
    before = anchor.read_bytes()
    charge(folder, "new", terms)
    assert anchor.read_bytes() != before


def test_a_ledger_that_got_an_anchor_while_it_was_opened_is_opened_again(
    finished, copied, tmp_path, terms, monkeypatch
):
    folder, config = copied
    opened = of_runs.Ledger

    def anchored_just_before(*arguments, **named):
        ledgers.add_anchor(folder, str(tmp_path / "elsewhere"))
        return opened(*arguments, **named)

    monkeypatch.setattr(of_runs, "Ledger", anchored_just_before)
    queries = config.plan(load_data(config.data)).queries
    with pytest.raises(LedgerError, match="while it was being opened"):
        open_ledger(folder, terms, queries, create=False, meter=None)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("ledger", "anchor", "RUN", "MISSING/anchor"), "cannot be created"),
        (("ledger", "anchor", "RUN", "FILE"), "cannot be created"),
        (("ledger", "export", "RUN", "FILE.json"), "already exists"),
        (("ledger", "backup", "RUN", "FILE.sqlite"), "already exists"),
        (("ledger", "restore", "OLD.sqlite", "RUN"), "charges would be forgotten"),
        (("tokens", "revoke", "RUN", "alise"), "no valid token"),
        (("tokens", "rotate", "RUN", "alise"), "no valid token"),
        (("tokens", "expire", "RUN", "alise", "1h"), "no valid token"),
        (("tokens", "limit", "RUN", "alise", "--queries", "5"), "no valid token"),
        (("tokens", "add", "RUN", "a b"), "expected a name"),
        (("tokens", "add", "RUN", "local"), "callers without a token"),
    ],
    ids=lambda given: "-".join(given[:2]) if isinstance(given, tuple) else "",
)
def test_a_refused_command_leaves_the_run_and_its_journal_as_they_were(
    fairpate, copied, tmp_path, terms, command, words
):
    folder, _ = copied
    back_up_run(folder.root, tmp_path / "OLD.sqlite")
    charge(folder, "new", terms)
    for name in ("FILE", "FILE.json", "FILE.sqlite"):
        (tmp_path / name).write_text("another's")

    def content():
        files = sorted(path for path in folder.root.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in files if not path.name.endswith("-shm")}

    before = content()
    made = ("MISSING/anchor", "FILE", "FILE.json", "FILE.sqlite", "OLD.sqlite")
    places = {"RUN": folder.root, **{name: tmp_path / name for name in made}}
    code, _, error = fairpate(*(str(places.get(word, word)) for word in command))
    assert (code in (1, 2), words in error) == (True, True), error
    assert content() == before


def test_an_export_of_a_ledger_that_was_edited_is_not_noted_as_one(fairpate, copied, tmp_path):
    folder, _ = copied
    with closing(sqlite3.connect(folder.ledger)) as database, database:
        database.execute("UPDATE entries SET payload = replace(payload, '1', '2') WHERE number = 1")
    database.close()
    for command in (("export", str(folder.root), str(tmp_path / "out.json")), ("show", str(folder.root))):
        assert fairpate("ledger", *command)[0] == 1
    assert journal_of(folder) == []


def test_an_anchor_in_the_run_s_own_folder_is_refused(fairpate, copied):
    folder, _ = copied
    code, _, error = fairpate("ledger", "anchor", str(folder.root), str(folder.private / "anchor"))
    assert (code, "give a file on another disk" in error) == (2, True)
    assert not folder.ledger_place.exists()


def test_a_run_without_a_ledger_has_none_to_anchor(fairpate, trained, tmp_path):
    code, _, error = fairpate("ledger", "anchor", str(trained("record_votes").root), str(tmp_path / "elsewhere"))
    assert (code, "no ledger; give a run of a method that asks teachers" in error) == (2, True)
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_or_damaged_copy_is_refused(copied, tmp_path, terms):
    folder, _ = copied
    out = tmp_path / "copy.sqlite"
    back_up_run(folder.root, out)
    with closing(sqlite3.connect(out)) as database, database:
        database.execute("UPDATE entries SET payload = replace(payload, '0', '1') WHERE number = 2")
    database.close()
    with pytest.raises(LedgerError, match="entry 2 was changed"):
        restore(folder, out, to=None)
    for file in (*ledger_files(out), *ledger_files(folder.ledger)):
        file.unlink()
    Ledger(out, terms).close()
    with pytest.raises(Exception, match="states"):
        restore(folder, out, to=None)


def test_a_ledger_that_is_written_is_not_replaced(copied, tmp_path, terms):
    folder, _ = copied
    out = tmp_path / "copy.sqlite"
    back_up_run(folder.root, out)
    with (
        Ledger(folder.ledger, terms, create=False),
        pytest.raises(LedgerError, match="another process writes"),
    ):
        restore(folder, out, to=None)


def test_a_ledger_moves_into_a_database_goes_on_there_and_comes_back(fairpate, copied, tmp_path, postgres, terms):
    folder, config = copied
    first, second = tmp_path / "first.sqlite", tmp_path / "second.sqlite"
    place, labels = postgres.url("moved"), folder.labels.read_bytes()
    assert fairpate("ledger", "backup", str(folder.root), str(first))[0] == 0
    assert fairpate("ledger", "restore", str(first), str(folder.root), "--to", place)[0] == 0
    assert not folder.ledger.exists()
    assert place_of(folder).ledger == place
    run(config)
    assert folder.labels.read_bytes() == labels
    charge(folder, "later", terms)
    assert "released labels" in fairpate("ledger", "verify", str(folder.root))[1]
    with pytest.raises(LedgerError, match="charges would be forgotten"):
        restore(folder, first, to=str(folder.ledger))
    with (
        Ledger(place, terms, create=False),
        pytest.raises(LedgerError, match="another process writes"),
    ):
        back_up_run(folder.root, second)
        restore(folder, second, to=str(folder.ledger))
    restore(folder, second, to=str(folder.ledger))
    assert place_of(folder).ledger == folder.ledger.absolute()
    with Ledger(folder.ledger, terms, create=False) as ledger:
        assert ledger.outcome_of.get("later") == Outcome(verdict="answer", label=0)
        assert ledger.charged_to["alice"] == 1


def test_the_audit_log_is_printed_or_gone_on_with_in_a_file(fairpate, copied, tmp_path, terms):
    folder, _ = copied
    log = tmp_path / "audit.jsonl"
    assert fairpate("ledger", "audit", str(folder.root), "--out", str(log))[0] == 0
    first = log.read_text()
    charge(folder, "later", terms)
    assert fairpate("ledger", "audit", str(folder.root), "--out", str(log))[0] == 0
    printed = fairpate("ledger", "audit", str(folder.root))[1]
    assert log.read_text() == printed
    assert printed.startswith(first)
    assert (printed.count('"later"'), log.stat().st_mode & 0o077) == (1, 0)
    assert fairpate("ledger", "show", str(folder.root))[0] == 0
    head = json.loads(log.read_text().splitlines()[-1])["chain"]
    log.chmod(0o644)
    assert fairpate("ledger", "audit", str(folder.root), "--out", str(log))[0] == 0
    assert '"event": "show"' in log.read_text().splitlines()[-1]
    assert log.stat().st_mode & 0o077 == 0
    assert fairpate("ledger", "audit", "--check", str(log), "--head", head)[0] == 0
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    code, _, told = fairpate("ledger", "audit", "--check", str(log), "--head", head)
    assert (code != 0, "line 1 or a line before it was changed" in told) == (True, True)
