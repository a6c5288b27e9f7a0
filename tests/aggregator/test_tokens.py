import os
import subprocess
import sys

import pytest

from aggregator.service.auth import LiveTokens, TokenError, is_loopback, read_tokens
from fairpate.types import KnownCaller

pytestmark = pytest.mark.usefixtures("light_runs")

ALICE, BOB, ROOT = "a" * 24, "b" * 24, "r" * 32
ANALYST = KnownCaller(name="alice", role="analyst")


def token_file(folder, text, mode=0o600):
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_tokens_come_from_files_before_the_environment(tmp_path):
    path = token_file(tmp_path, f"alice {ALICE}\nbob {BOB}\n")
    environment = {"FAIRPATE_ANALYST_TOKEN": "x" * 24, "FAIRPATE_OPERATOR_TOKEN": ROOT}
    book = read_tokens(environment, analyst_file=path)
    tokens = LiveTokens(book)
    assert tokens.caller(ALICE) == ANALYST
    assert tokens.caller(BOB) == KnownCaller(name="bob", role="analyst")
    assert tokens.caller(ROOT).role == "operator"
    assert tokens.caller("x" * 24) is tokens.caller("") is tokens.caller(None) is tokens.caller(f"{ALICE} ") is None
    assert ALICE not in repr(book)
    assert read_tokens({}).is_empty


def test_a_bare_token_is_called_by_its_line_so_that_its_charges_stay_its_own(tmp_path):
    path = token_file(tmp_path, f"{ALICE}\n{BOB}\n")
    for _ in range(2):
        tokens = LiveTokens(read_tokens({}, analyst_file=path))
        assert [tokens.caller(token).name for token in (ALICE, BOB)] == ["analyst-1", "analyst-2"]


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("short", 0o600, "at least 24 characters, got 5"),
        ("", 0o600, "contains no token"),
        (ALICE, 0o640, "chmod 600"),
        (f"alice {ALICE} extra", 0o600, "got 3 words"),
        (f"alice {ALICE}\nbob {ALICE}", 0o600, "one token twice"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(tmp_path, text, mode, words):
    with pytest.raises(TokenError, match=words) as raised:
        read_tokens({}, analyst_file=token_file(tmp_path, text, mode))
    assert ALICE not in str(raised.value)


@pytest.mark.parametrize("name", ["jos\udce9", "josé", "../x", "<b>", "a" * 65])
def test_a_name_that_is_no_plain_word_is_refused(name):
    with pytest.raises(TokenError, match="FAIRPATE_ANALYST_TOKEN, line 1: expected a name") as raised:
        read_tokens({"FAIRPATE_ANALYST_TOKEN": f"{name} {ALICE}"})
    assert name not in str(raised.value)  # it may be a token


def test_one_token_for_both_roles_is_refused():
    with pytest.raises(TokenError, match="one token twice"):
        read_tokens({"FAIRPATE_ANALYST_TOKEN": ROOT, "FAIRPATE_OPERATOR_TOKEN": ROOT})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "", "2130706433"])  # noqa: S104
def test_everything_else_is_not(host):
    assert not is_loopback(host)


def test_a_token_file_is_read_again_when_it_changes_and_admits_nobody_once_it_is_damaged(tmp_path):
    first, second = "first-token-of-the-analysts", "second-token-of-the-analysts"
    path = tmp_path / "analysts"
    path.touch(mode=0o600)
    path.write_text(f"alice {first}\n", encoding="utf-8")
    tokens = LiveTokens(read_tokens({"FAIRPATE_OPERATOR_TOKEN": "token-of-the-operator-00"}, analyst_file=path))
    assert tokens.caller(first).name == "alice"
    for text, names in (
        (f"alice {first}\nbob {second}\n", ["alice", "bob"]),
        (f"bob {second}\n", [None, "bob"]),
        ("short\n", [None, None]),
        (f"bob {second}\n", [None, "bob"]),
    ):
        path.write_text(text, encoding="utf-8")
        tokens._look_again_s = 0.0
        found = [tokens.caller(token) for token in (first, second)]
        assert [caller and caller.name for caller in found] == names
        assert tokens.caller("token-of-the-operator-00").role == "operator"
    path.unlink()  # as on another node
    tokens._look_again_s = 0.0
    assert tokens.caller(second).name == "bob"


def test_tokens_leave_the_environment_once_they_were_read():
    """Ray's workers run code of teachers and would inherit them; the user's processes could read /proc/PID/environ."""
    program = (
        "import os, subprocess\n"
        "from pathlib import Path\n"
        "from fairpate.cli.services import _settings\n"
        "assert len(_settings().tokens.entries) == 2\n"
        "print(os.environ, os.environb, Path('/proc/self/environ').read_bytes())\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
    )
    given = {"FAIRPATE_ANALYST_TOKEN": ALICE, "FAIRPATE_OPERATOR_TOKEN": ROOT, "FAIRPATE_OTHER": "stays"}
    command, environment = [sys.executable, "-c", program], {**os.environ, **given}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stays") == 4
    assert ALICE not in done.stdout
    assert ROOT not in done.stdout
