"""`fairpate tokens`: what it prints, what it keeps, and what it refuses."""

import time

import pytest
from serving import TERMS

from aggregator.ledger import CallerLimit, Ledger
from aggregator.service.auth import LiveTokens, TokenBook, read_store, token_digest
from fairpate.releases.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture
def run(tmp_path):
    """As much of a run as its tokens need."""
    found = RunDirectory(root=tmp_path / "run")
    found.private.mkdir(parents=True)
    found.config.write_text("")
    return found


def test_a_token_is_printed_once_and_only_its_digest_is_kept(fairpate, run):
    code, token, _ = fairpate("tokens", "add", str(run.root), "alice", "--queries", "500", "--expires", "30d")
    assert code == 0
    (stored,) = read_store(run.tokens).tokens
    assert stored.sha256 == token_digest(token.strip()).hex()
    assert stored.expires_s == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert read_store(run.tokens).limits == {"alice": CallerLimit(max_queries=500)}
    assert token.strip() not in run.tokens.read_text()
    listed = fairpate("tokens", "list", str(run.root))[1]
    assert "alice" in listed
    assert "500" in listed
    assert stored.sha256 not in listed


def test_a_quota_of_an_operator_who_has_none_is_refused(fairpate, run):
    folder = str(run.root)
    assert fairpate("tokens", "add", folder, "root", "--role", "operator", "--per-day", "5")[0] == 2
    assert not run.tokens.exists()
    assert fairpate("tokens", "add", folder, "root", "--role", "operator", "--queries", "9")[0] == 0
    code, _, errors = fairpate("tokens", "limit", folder, "root", "--per-day", "5")
    assert (code, "--per-day" in errors) == (2, True)
    assert read_store(run.tokens).limits == {"root": CallerLimit(max_queries=9)}
    assert fairpate("tokens", "revoke", folder, "root")[0] == 0


def test_a_mistyped_name_does_not_lock_a_service_without_tokens(fairpate, run):
    """A refused `revoke` left the mark that tokens are needed: at its next start the service admitted nobody."""
    code, _, errors = fairpate("tokens", "revoke", str(run.root), "alise")
    assert (code, "alise: this name has no valid token" in errors) == (2, True)
    assert TokenBook(store=run.tokens).is_empty
    assert not LiveTokens(TokenBook(store=run.tokens)).needs_token
    assert sorted(path.name for path in run.private.iterdir()) == []


def test_limit_expire_rotate_and_revoke_change_what_a_service_reads(fairpate, run):
    folder = str(run.root)
    first = fairpate("tokens", "add", folder, "root", "--role", "operator")[1]
    assert fairpate("tokens", "limit", folder, "root", "--epsilon", "1.5", "--queries", "20")[0] == 0
    assert read_store(run.tokens).limits["root"] == CallerLimit(epsilon=1.5, max_queries=20)
    assert fairpate("tokens", "expire", folder, "root", "2027-01-31")[0] == 0
    assert read_store(run.tokens).tokens[0].expires_s == 1801353600  # date --utc --date=2027-01-31 +%s
    assert fairpate("tokens", "expire", folder, "root", "never")[0] == 0
    second = fairpate("tokens", "rotate", folder, "root", "--keep-old", "1h")[1]
    assert first != second
    assert [token.role for token in read_store(run.tokens).tokens] == ["operator"] * 2
    assert fairpate("tokens", "revoke", folder, "root")[0] == 0
    assert read_store(run.tokens).tokens == ()


def test_a_token_store_that_was_lost_takes_no_limit_with_it(fairpate, run):
    with Ledger(run.ledger, TERMS) as ledger:
        ledger.limit("alice", CallerLimit(epsilon=2.0, max_queries=7))
    assert fairpate("tokens", "add", str(run.root), "alice", "--per-day", "5", "--queries", "9")[0] == 0
    assert fairpate("tokens", "add", str(run.root), "bob", "--per-day", "5")[0] == 0
    found = read_store(run.tokens).limits
    assert found == {"alice": CallerLimit(epsilon=2.0, max_queries=9, per_day=5.0), "bob": CallerLimit(per_day=5.0)}


def test_a_list_shows_limits_that_stand_in_the_ledger_alone(fairpate, run):
    with Ledger(run.ledger, TERMS) as ledger:
        ledger.limit("alice", CallerLimit(max_queries=41))
        ledger.limit("bob", CallerLimit(max_queries=42))
        ledger.limit("carol", CallerLimit(max_queries=43))
        ledger.limit("dave", CallerLimit(max_queries=45))
        ledger.limit("dave", CallerLimit())
    fairpate("tokens", "add", str(run.root), "bob")
    fairpate("tokens", "add", str(run.root), "carol")
    fairpate("tokens", "limit", str(run.root), "carol", "--queries", "44")
    rows = [line.split() for line in fairpate("tokens", "list", str(run.root))[1].splitlines()]
    shown = {row[0]: (row[1], row[-1]) for row in rows if row and row[0] in ("alice", "bob", "carol", "dave")}
    assert shown == {"alice": ("no", "41"), "bob": ("analyst", "42"), "carol": ("analyst", "44")}


def test_tokens_are_listed_while_the_ledger_cannot_be_read(fairpate, run):
    Ledger(run.ledger, TERMS).close()
    assert fairpate("tokens", "add", str(run.root), "alice")[0] == 0
    run.ledger.write_bytes(b"no database")
    code, output, errors = fairpate("tokens", "list", str(run.root))
    assert code == 0
    assert "alice" in output
    assert "in the ledger alone are not shown" in errors
    assert fairpate("tokens", "add", str(run.root), "bob", "--queries", "5")[0] == 1, "which might replace a limit"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "RUN", "two words"], "expected a name"),
        (["add", "RUN", "local"], "give another name"),
        (["add", "RUN", "alice", "--epsilon", "-1"], "0 < epsilon"),
        (["add", "RUN", "alice", "--expires", "soon"], "30d or 12h"),
        (["add", "RUN", "alice", "--expires", "999999999d"], "30d or 12h"),
        (["add", "RUN", "alice", "--role", "root"], "analyst"),
        (["revoke", "RUN", "bob"], "bob: this name has no valid token"),
        (["add", "nowhere", "alice"], "holds no run"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_written(fairpate, run, arguments, words):
    code, output, error = fairpate("tokens", *(str(run.root) if word == "RUN" else word for word in arguments))
    assert (code, output) == (2, "")
    assert words in error
    assert not run.tokens.exists()
