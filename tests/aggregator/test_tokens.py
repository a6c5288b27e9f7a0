import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.tokens import Caller, QuotaRule, Quotas, TokenError, is_loopback, read_tokens

ALICE, BOB, ROOT = "a" * 24, "b" * 24, "r" * 32
ANALYST = Caller(name="alice", role="analyst")


def token_file(folder, text, mode=0o600):
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens_come_from_files_before_the_environment(tmp_path):
    path = token_file(tmp_path, f"alice {ALICE}\nbob {BOB}\n")
    environment = {"FAIRPATE_ANALYST_TOKEN": "x" * 24, "FAIRPATE_OPERATOR_TOKEN": ROOT}
    book = read_tokens(environment, analyst_file=path)
    assert book.caller(ALICE) == ANALYST
    assert book.caller(BOB) == Caller(name="bob", role="analyst")
    assert book.caller(ROOT).role == "operator"
    assert book.caller("x" * 24) is book.caller("") is book.caller(None) is book.caller(f"{ALICE} ") is None
    assert ALICE not in repr(book)
    assert read_tokens({}).is_empty


def test_every_bare_token_has_a_quota_of_its_own_and_no_name_that_tells_it(tmp_path):
    path = token_file(tmp_path, f"{ALICE}\n{BOB}\n")
    alice, bob = (read_tokens({}, analyst_file=path).caller(token) for token in (ALICE, BOB))
    assert alice.name != bob.name
    assert ALICE not in alice.name
    assert hashlib.sha256(ALICE.encode()).hexdigest()[:8] not in alice.name
    assert read_tokens({}, analyst_file=path).caller(ALICE).name != alice.name  # salted
    quotas = Quotas(QuotaRule(max_queries=10, period_s=100))
    assert quotas.take(alice, 10, now_s=0) is quotas.take(bob, 10, now_s=0) is None


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("short", 0o600, "at least 24 characters, got 5"),
        ("", 0o600, "holds no token"),
        (ALICE, 0o640, "chmod 600"),
        (f"alice {ALICE} extra", 0o600, "got 3 words"),
        (f"alice {ALICE}\nbob {ALICE}", 0o600, "one token twice"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(tmp_path, text, mode, words):
    with pytest.raises(TokenError, match=words) as raised:
        read_tokens({}, analyst_file=token_file(tmp_path, text, mode))
    assert ALICE not in str(raised.value)


def test_one_token_for_both_roles_is_refused():
    with pytest.raises(TokenError, match="one token twice"):
        read_tokens({"FAIRPATE_ANALYST_TOKEN": ROOT, "FAIRPATE_OPERATOR_TOKEN": ROOT})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "", "2130706433"])  # noqa: S104
def test_everything_else_is_not(host):
    assert not is_loopback(host)


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0, 50)), max_size=40))
def test_in_any_period_a_token_takes_at_most_the_bucket_and_its_refill(requests):
    quotas, now_s, taken = Quotas(QuotaRule(max_queries=20, period_s=100)), 0.0, 0
    for num_queries, pause_s in requests:
        now_s += pause_s
        if quotas.take(ANALYST, num_queries, now_s=now_s) is None:
            taken += num_queries
    assert taken <= 20 + now_s * 20 / 100 + 1e-6


def test_what_is_given_back_may_be_taken_again_and_never_overfills():
    quotas = Quotas(QuotaRule(max_queries=10, period_s=100))
    quotas.give_back(ANALYST, 5)
    assert quotas.take(ANALYST, 8, now_s=0) is None
    quotas.give_back(ANALYST, 3)
    assert quotas.take(ANALYST, 6, now_s=0).allowed_now == 5
    quotas.give_back(ANALYST, 50)
    assert quotas.take(ANALYST, 11, now_s=0).allowed_now == 10


def test_a_refused_request_takes_nothing_and_says_when_it_fits():
    quotas = Quotas(QuotaRule(max_queries=10, period_s=100))
    assert quotas.take(ANALYST, 8, now_s=0) is None
    refusal = quotas.take(ANALYST, 4, now_s=0)
    assert (refusal.allowed_now, refusal.retry_after_s) == (2, pytest.approx(20))
    assert quotas.take(Caller(name="bob", role="analyst"), 10, now_s=0) is None
    assert quotas.take(ANALYST, 4, now_s=20.001) is None
    assert math.isinf(quotas.take(ANALYST, 11, now_s=1000).retry_after_s)
    assert quotas.take(Caller(name="root", role="operator"), 10**6, now_s=0) is None
