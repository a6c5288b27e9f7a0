"""A command that is refused changes nothing: no file of the run, no journal, no token store, no odometer, no output."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from small_runs import copied, open_terms
from test_take_over import contents
from test_take_over import finished as finished

from aggregator.ledger import Ledger
from aggregator.service.auth import TokenBook
from fairpate.run.ledgers import back_up_run

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A finished run in RUN, beside what the commands below name, all in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    for name in ("FAIRPATE_ANALYST_TOKEN", "FAIRPATE_OPERATOR_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    run = copied(finished, tmp_path / "RUN")
    back_up_run(run.root, tmp_path / "copy.sqlite")
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "there.sqlite").write_text("somebody's")
    (tmp_path / "there").write_text("somebody's")
    Ledger(tmp_path / "empty.sqlite", open_terms(run)).close()
    # Another ledger of the same terms, and the log of another one.
    shutil.copytree(run.root, tmp_path / "OTHER")
    for file in (tmp_path / "OTHER" / "private").glob("ledger.*"):
        file.unlink()
    Ledger(tmp_path / "OTHER" / "private" / "ledger.sqlite", open_terms(run)).close()
    shutil.copytree(run.root, tmp_path / "DAMAGED")
    with closing(sqlite3.connect(tmp_path / "DAMAGED" / "private" / "ledger.sqlite")) as database, database:
        database.execute("UPDATE entries SET payload = replace(payload, '0', '1') WHERE number = 1")
    database.close()
    for name in ("RUN", "OTHER", "DAMAGED"):
        (tmp_path / name / "private" / "ledger.sqlite-shm").unlink(missing_ok=True)
    (tmp_path / "half.jsonl").touch(mode=0o644)
    return run


COMMANDS = [
    "tokens revoke RUN nobody",
    "tokens limit RUN nobody --queries 5",
    "tokens expire RUN nobody 0s",
    "tokens rotate RUN nobody",
    "tokens rotate RUN nobody --keep-old soon",
    "tokens add RUN local",
    "tokens add RUN two/words",
    "tokens add RUN alice --role operator --per-day 5",
    "tokens add RUN alice --expires soon",
    "tokens add DAMAGED alice --queries 5",
    "ledger anchor RUN there",
    "ledger anchor RUN nowhere/anchor",
    "ledger anchor RUN RUN/private/anchor",
    "ledger anchor DAMAGED anchor",
    "ledger export RUN there.json",
    "ledger export RUN new.txt",
    "ledger export DAMAGED new.json",
    "ledger show DAMAGED",
    "ledger backup RUN there.sqlite",
    "ledger backup DAMAGED new.sqlite",
    "ledger restore empty.sqlite RUN",
    "ledger restore copy.sqlite RUN --to there.sqlite",
    "ledger restore copy.sqlite DAMAGED --to postgresql://127.0.0.1:1/none#name",
    "ledger audit OTHER --out audit.jsonl",
    "ledger audit DAMAGED --out half.jsonl --follow",
    "ledger limit adult 3 --unit nothing",
    "ledger limit adult -1",
    "ledger total --data nothing",
    "serve RUN --take-over --log-file new.jsonl",
    "serve RUN --host 0.0.0.0 --log-file new.jsonl",
    "serve RUN --port 99999",
    "serve RUN --stop",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_command_changes_nothing(fairpate, run, tmp_path, command):
    if "audit.jsonl" in command:  # which ends with an entry that OTHER lacks
        assert fairpate("ledger", "audit", "RUN", "--out", "audit.jsonl")[0] == 0
        (tmp_path / "audit.jsonl").chmod(0o644)
    before = contents(tmp_path)
    code, output, errors = fairpate(*command.split())
    assert (code in (1, 2), output) == (True, "")
    assert "Traceback" not in errors
    assert contents(tmp_path) == before
    assert TokenBook(store=run.tokens).is_empty


def test_a_mistyped_name_leaves_the_tokens_as_they_are(fairpate, run, tmp_path):
    assert fairpate("tokens", "add", "RUN", "alice")[0] == 0
    before = contents(tmp_path)
    for command in ("revoke RUN alcie", "add RUN alice", "limit RUN alcie --queries 3", "rotate RUN alcie"):
        assert fairpate("tokens", *command.split())[0] == 2
        assert contents(tmp_path) == before
    run.tokens.write_text("{")
    before = contents(tmp_path)
    assert fairpate("tokens", "revoke", "RUN", "alice")[0] == 2
    assert contents(tmp_path) == before
