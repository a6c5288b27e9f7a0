"""The ledger file: durable, chained, one writer, and refused when anything about it is not as it was left."""

import dataclasses
import errno
import os
import sqlite3
import stat

import numpy as np
import pytest
from ledger_terms import TERMS

from aggregator.ledger import Asker, CallerLimit, Ledger
from aggregator.mechanism import Outcome
from aggregator.store import LedgerError, head_path, ledger_files, noted_head

VOTES = np.array([[40, 15, 5]])
ANSWER, REFUSAL = Outcome(verdict="answer", label=0), Outcome(verdict="fairness")


def reserve(ledger, *keys):
    return ledger.reserve(list(keys), [1] * len(keys), np.tile(VOTES, (len(keys), 1)))


def ask(ledger, *keys, outcome=REFUSAL):
    ledger.commit(reserve(ledger, *keys), [outcome] * len(keys))


def edit(path, statement):
    database = sqlite3.connect(path)
    with database:
        database.execute(statement)
    database.close()


def copy_of(path, copy):
    """The files of a ledger, as a crash would leave them now."""
    for file in ledger_files(path):
        if not file.name.endswith("-shm"):
            file.with_name(file.name.replace(path.stem, copy.stem)).write_bytes(file.read_bytes())


def test_text_that_could_not_be_read_again_is_never_stored(path):
    with Ledger(path, TERMS) as ledger:
        with pytest.raises(ValueError, match="surrogate"):
            ledger.reserve(["key"], [1], VOTES, [Asker("jos\udce9", "r")])
        with pytest.raises(ValueError, match="surrogate"):
            ledger.limit("jos\udce9", CallerLimit(max_queries=1))
        ledger.reserve(["key"], [1], VOTES, [Asker("josé 🙂", "r")])
    with Ledger(path, TERMS) as ledger:
        assert ledger.charged_to == {"josé 🙂": 1}


def test_an_entry_that_is_no_json_is_named(path, monkeypatch):
    with Ledger(path, TERMS) as ledger, monkeypatch.context() as patched:
        patched.setattr("aggregator.ledger.canonical", lambda _: "{")
        reserve(ledger, "key")
    with pytest.raises(LedgerError, match="entry 1 cannot be read"):
        Ledger(path, TERMS)


def test_a_reservation_is_durable_and_charged_before_it_has_an_outcome(path):
    with Ledger(path, TERMS) as ledger:
        reserve(ledger, "key")
    with Ledger(path, TERMS) as ledger:
        (charge,) = ledger.charges
        assert charge.outcome is None
        assert (charge.key, charge.group, charge.votes) == ("key", 1, (40, 15, 5))


def test_the_gate_s_counts_and_the_outcomes_come_back(path):
    with Ledger(path, TERMS) as ledger:
        ask(ledger, "key", outcome=ANSWER)
    with Ledger(path, TERMS) as ledger:
        assert ledger.outcome_of.get("key") == ANSWER
        outcomes = [(charge.group, charge.outcome) for charge in ledger.charges]
        assert [(group, found.label) for group, found in outcomes if found and found.label is not None] == [(1, 0)]


def test_a_query_is_drawn_once(path):
    with Ledger(path, TERMS) as ledger:
        reserved = reserve(ledger, "key")
        ledger.commit(reserved, [REFUSAL])
        with pytest.raises(ValueError, match="has an outcome already"):
            reserve(ledger, "key")
        with pytest.raises(ValueError, match="that has none yet"):
            ledger.commit(reserved, [ANSWER])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET payload = replace(payload, 'key', 'kez') WHERE number = 1",
        "UPDATE entries SET payload = replace(payload, 'fairness', 'free') WHERE number = 2",
        "UPDATE entries SET kind = 'commit' WHERE number = 1",
        "UPDATE entries SET number = 3 WHERE number = 2",
        "DELETE FROM entries WHERE number = 1",
        "DELETE FROM entries WHERE number = 2",
        "DELETE FROM entries",
        "UPDATE chain SET terms = replace(terms, '30', '31')",
        "UPDATE chain SET version = 1",
        "UPDATE chain SET key = replace(key, substr(key, 1, 4), '0000')",
        "DROP TABLE entries",
    ],
)
def test_a_ledger_that_was_edited_or_cut_short_refuses_to_open(path, statement):
    with Ledger(path, TERMS) as ledger:
        ask(ledger, "key")
    edit(path, statement)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        Ledger(path, TERMS)
    assert path.read_bytes() == before


def test_a_write_ahead_log_that_was_cut_short_is_noticed(path, tmp_path):
    copy = tmp_path / "copy.sqlite"
    with Ledger(path, TERMS) as ledger:
        for number in range(5):
            ask(ledger, f"key{number}")
        copy_of(path, copy)  # as a crash leaves them: nothing is checkpointed yet
    wal = copy.with_name(copy.name + "-wal")
    whole, database = wal.read_bytes(), copy.read_bytes()
    with Ledger(copy, TERMS) as ledger:
        assert len(ledger.keys) == 5
    copy.write_bytes(database)
    wal.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LedgerError, match=r"was written|cannot be read"):
        Ledger(copy, TERMS)


@pytest.mark.parametrize("damage", ["flipped", "zeroed"])
def test_a_corrupted_page_is_noticed(path, damage):
    with Ledger(path, TERMS) as ledger:
        for number in range(200):
            ask(ledger, f"key{number}")
    content = bytearray(path.read_bytes())
    page = content.index(b"key150") // 4096
    if damage == "zeroed":
        content[4096 * page : 4096 * (page + 1)] = bytes(4096)
    else:
        content[content.index(b"key150") + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite.*from a copy"):
        Ledger(path, TERMS)
    assert path.read_bytes() == content


def test_an_outcome_whose_note_cannot_be_written_is_not_given(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger(path, TERMS) as ledger:
        reserved = reserve(ledger, "key")
        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(LedgerError, match="No space left"):
            ledger.commit(reserved, [ANSWER])
        assert ledger.outcome_of.get("key") is None
    monkeypatch.undo()
    with Ledger(path, TERMS) as ledger:  # it was durable, and may be given now: its note comes first
        assert ledger.outcome_of.get("key") == ANSWER
        assert noted_head(head_path(path)) == ledger.head


def test_a_damaged_file_is_named(path):
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        Ledger(path, TERMS)


def test_a_changed_parameter_is_refused_with_both_values(path):
    Ledger(path, TERMS).close()
    mechanism = dataclasses.replace(TERMS.mechanism, noise_stddev_votes=7)
    with pytest.raises(LedgerError, match=r"noise_stddev_votes': 6.*noise_stddev_votes': 7"):
        Ledger(path, dataclasses.replace(TERMS, mechanism=mechanism))


def test_there_is_one_writer(path):
    with Ledger(path, TERMS), pytest.raises(LedgerError, match="another process"):
        Ledger(path, TERMS)


def test_only_its_owner_may_read_it(path):
    Ledger(path, TERMS).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_teachers_are_refused_without_showing_what_names_them(path):
    """The name is a digest of private shards."""
    Ledger(path, TERMS).close()
    with pytest.raises(LedgerError, match=r"other teachers \(ensemble\)") as refused:
        Ledger(path, dataclasses.replace(TERMS, ensemble="c0ffee"))
    assert "c0ffee" not in str(refused.value)
    assert "= teachers" not in str(refused.value)
