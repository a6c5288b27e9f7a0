"""The token store: what an operator changes while a service runs, and that nothing in it ever opens more."""

import concurrent.futures
import json
import stat
import time

import httpx
import pytest
from serving import ANALYST, running, tokens_of_both_roles, until

from aggregator.ledger import CallerLimit
from aggregator.service.auth import (
    LiveTokens,
    TokenBook,
    TokenError,
    added,
    change,
    expired,
    limited,
    read_store,
    revoked,
    rotated,
    token_digest,
)

pytestmark = pytest.mark.usefixtures("light_runs")

OLD_AND_NOW = {"old_expires_s": 0.0, "now_s": 0.0}


@pytest.fixture
def store(tmp_path):
    return tmp_path / "tokens.json"


def add(store, name, *, role="analyst", limit=CallerLimit(), expires_s=None):  # noqa: B008 - frozen
    return change(store, lambda s: added(s, name, role=role, limit=limit, expires_s=expires_s, now_s=time.time()))


def test_a_running_service_sees_every_change_within_a_second_or_so(tmp_path, store):
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:

        def status(token, path="/v1/me"):
            return httpx.get(url + path, headers={"Authorization": f"Bearer {token}"}).status_code

        assert status("none") == 200  # nobody needs a token yet, on this machine
        alice = add(store, "alice")
        until(lambda: status("none") == 401)
        assert status(alice) == 200
        root = add(store, "root", role="operator")
        until(lambda: status(root, "/v1/operator/ledger") == 200)
        assert status(alice, "/v1/operator/ledger") == 403
        second = change(store, lambda s: rotated(s, "alice", old_expires_s=time.time() + 2, now_s=time.time()))
        until(lambda: status(second) == 200)
        assert status(alice) == 200  # until its two seconds are over
        until(lambda: status(alice) == 401)
        change(store, lambda s: (expired(s, "alice", expires_s=time.time() - 1), None))
        until(lambda: status(second) == 401)
        change(store, lambda s: (revoked(s, "root"), None))
        until(lambda: status(root) == 401)
        store.unlink()
        time.sleep(0.6)
        assert status("none") == 401


def test_nothing_in_the_store_opens_the_service(store):
    token = add(store, "alice")
    text = store.read_text()
    assert token not in text
    digest = json.loads(text)["tokens"][0]["sha256"]
    tokens = LiveTokens(TokenBook(store=store))
    assert tokens.caller(token).name == "alice"
    assert tokens.caller(digest) is tokens.caller("") is tokens.caller(None) is None
    assert len(token) == 64
    assert stat.S_IMODE(store.stat().st_mode) == 0o600


def one_token(**changed):
    token = {"name": "x", "role": "analyst", "sha256": token_digest("t" * 32).hex(), "created_s": 0, **changed}
    return json.dumps({"format": "fairpate.tokens/1", "tokens": [token], "limits": {}})


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[" * 100_000,
        '{"format": "other", "tokens": [], "limits": {}}',
        '{"format": "fairpate.tokens/1"}',
        '{"format": "fairpate.tokens/1", "tokens": [], "limits": []}',
        '{"format": "fairpate.tokens/1", "tokens": [], "limits": {"alice": {"epsilon": NaN}}}',
        one_token(expires_s="never"),
        one_token(expires_s=float("inf")),
        one_token(role="root"),
        one_token(sha256="00"),
        one_token(name="two words"),
        one_token(more=1),
    ],
)
def test_a_store_that_is_damaged_admits_nobody_and_is_named(store, damage, caplog):
    token = add(store, "alice", limit=CallerLimit(max_queries=5))
    tokens = LiveTokens(TokenBook(store=store))
    assert tokens.caller(token) is not None
    tokens._look_again_s = 0
    store.write_text(damage)
    assert tokens.caller(token) is tokens.caller("t" * 32) is None
    assert tokens.stored.limits == {"alice": CallerLimit(max_queries=5)}  # no limit is lifted by damage
    assert "tokens.json: the token store is damaged" in caplog.text
    with pytest.raises(TokenError, match=r"tokens\.json: the token store is damaged"):
        add(store, "bob")


def test_a_store_that_others_may_read_from_now_on_admits_nobody_until_it_is_private_again(store):
    token = add(store, "alice")
    tokens = LiveTokens(TokenBook(store=store))
    for mode, is_admitted in ((0o600, True), (0o644, False), (0o600, True)):
        store.chmod(mode)
        tokens._look_again_s = 0
        assert (tokens.caller(token) is not None) == is_admitted


def test_whatever_goes_wrong_in_reading_a_store_what_was_good_is_forgotten(store, monkeypatch):
    token = add(store, "alice")
    tokens = LiveTokens(TokenBook(store=store))
    assert tokens.caller(token) is not None
    add(store, "bob")
    monkeypatch.setattr("aggregator.service.auth.read_store", lambda _: 1 / 0)
    tokens._look_again_s = 0
    assert tokens.caller(token) is None


def test_a_digest_of_nothing_admits_nobody(store):
    add(store, "alice")
    store.write_text(one_token(sha256=token_digest("").hex()))
    tokens = LiveTokens(TokenBook(store=store))
    assert tokens.caller("") is tokens.caller(None) is None


def test_tokens_of_the_start_stay_good_beside_the_store(store):
    given = TokenBook(entries=tokens_of_both_roles().entries, store=store)
    tokens = LiveTokens(given)
    assert tokens.caller(ANALYST).name == "analyst-1"
    alice = add(store, "alice")
    tokens._look_again_s = 0
    assert (tokens.caller(ANALYST).name, tokens.caller(alice).name) == ("analyst-1", "alice")


def test_an_empty_store_still_asks_for_tokens(store):
    add(store, "alice")
    change(store, lambda s: (revoked(s, "alice"), None))
    assert not TokenBook(store=store).is_empty
    assert LiveTokens(TokenBook(store=store)).caller("") is None


def lose(store):
    add(store, "alice")
    store.unlink()


def see_one_of_an_earlier_version_and_lose_it(store):
    add(store, "alice")
    store.with_suffix(".needed").unlink()
    LiveTokens(TokenBook(store=store)).caller("")
    store.unlink()


def start_with_tokens(store):
    LiveTokens(TokenBook(entries=tokens_of_both_roles().entries, store=store))


@pytest.mark.parametrize("before", [lose, see_one_of_an_earlier_version_and_lose_it, start_with_tokens])
def test_once_a_token_was_asked_for_a_restart_without_the_store_opens_nothing(tmp_path, store, before):
    before(store)
    assert not store.exists()
    assert not TokenBook(store=store).is_empty
    with running(tmp_path / "ledger.sqlite", tokens=TokenBook(store=store)) as url:
        assert httpx.get(f"{url}/v1/budget", headers={"Host": "localhost"}).status_code == 401
        alice = add(store, "alice")
        until(lambda: httpx.get(f"{url}/v1/me", headers={"Authorization": f"Bearer {alice}"}).status_code == 200)


def test_without_a_place_for_the_mark_tokens_are_needed_all_the_same(tmp_path, caplog):
    gone = TokenBook(entries=tokens_of_both_roles().entries, store=tmp_path / "gone" / "tokens.json")
    assert LiveTokens(gone).needs_token
    assert "a restarted service" in caplog.text


def test_a_name_keeps_its_limit_when_its_token_is_made_again(store):
    add(store, "alice", limit=CallerLimit(max_queries=5))
    change(store, lambda s: (revoked(s, "alice"), None))
    add(store, "alice")
    assert read_store(store).limits["alice"] == CallerLimit(max_queries=5)


def test_a_name_that_is_made_again_keeps_each_limit_that_is_not_stated(store):
    add(store, "alice", limit=CallerLimit(epsilon=2.0, max_queries=5))
    change(store, lambda s: (revoked(s, "alice"), None))
    add(store, "alice", limit=CallerLimit(per_day=50, max_queries=9))
    assert read_store(store).limits["alice"] == CallerLimit(epsilon=2.0, max_queries=9, per_day=50)


def test_a_rotation_lengthens_no_token_that_was_to_end_sooner(store):
    now_s = time.time()
    add(store, "alice", expires_s=now_s + 100)
    change(store, lambda s: rotated(s, "alice", old_expires_s=now_s + 500, now_s=now_s))
    assert [token.expires_s for token in read_store(store).tokens] == [now_s + 100] * 2


def expire(store, expires_s):
    change(store, lambda s: (expired(s, "alice", expires_s=expires_s), None))


@pytest.mark.parametrize("later", [30 * 86400, None])
def test_a_token_that_was_rotated_out_is_never_good_for_longer(store, later):
    now_s = time.time()
    first = add(store, "alice", expires_s=now_s + 1000)
    second = change(store, lambda s: rotated(s, "alice", old_expires_s=now_s, now_s=now_s))
    third = change(store, lambda s: rotated(s, "alice", old_expires_s=now_s + 60, now_s=now_s))
    expire(store, None if later is None else now_s + later)
    ends = {token.sha256: token.expires_s for token in read_store(store).tokens}
    wanted = {second: now_s + 60, third: None if later is None else now_s + later}
    assert ends == {token_digest(token).hex(): end for token, end in wanted.items()}
    tokens = LiveTokens(TokenBook(store=store))
    assert tokens.caller(first) is None
    assert tokens.caller(second).name == tokens.caller(third).name == "alice"


def test_what_ended_stays_ended_and_its_name_may_have_a_new_token(store):
    first = add(store, "alice", limit=CallerLimit(max_queries=5))
    expire(store, time.time())
    for revive in (lambda s: (expired(s, "alice", expires_s=None), ""), lambda s: rotated(s, "alice", **OLD_AND_NOW)):
        with pytest.raises(TokenError, match="alice: this name has no valid token; add one"):
            change(store, revive)
    second = add(store, "alice")
    tokens = LiveTokens(TokenBook(store=store))
    assert (tokens.caller(first), tokens.caller(second).name) == (None, "alice")
    assert tokens.stored.limits["alice"] == CallerLimit(max_queries=5)


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "../x", "x" * 65, "<b>"])
def test_a_name_is_a_plain_word(store, name):
    with pytest.raises(TokenError, match="expected a name"):
        add(store, name)


def test_unknown_names_and_names_that_are_taken_are_refused_with_those_there_are(store):
    add(store, "alice")
    with pytest.raises(TokenError, match="has a token already"):
        add(store, "alice")
    for function in (lambda s: limited(s, "bob", CallerLimit()), lambda s: revoked(s, "bob")):
        with pytest.raises(TokenError, match=r"bob: this name has no valid token; .* names: alice"):
            change(store, lambda s, f=function: (f(s), None))


def test_operators_who_change_it_at_the_same_time_lose_nothing(store):
    with concurrent.futures.ThreadPoolExecutor(8) as operators:
        made = list(operators.map(lambda number: add(store, f"analyst-{number}"), range(24)))
    assert len(set(made)) == len(read_store(store).tokens) == 24
