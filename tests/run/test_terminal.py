"""Names and messages of others are shown on a terminal, and never obeyed."""

import http.server
import io
import json
import threading

import pytest
from rich.json import JSON
from rich.table import Table
from rich.text import Text

from aggregator.client import describe
from aggregator.service.api import Reply
from fairpate.terminal import facts, fail, listing, terminal

pytestmark = pytest.mark.usefixtures("light_runs")

HOSTILE = "digit\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x08"
OBEYED = set("\x1b\x07\x08\x9b\r\u202e")


def _table():
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    return table


@pytest.mark.parametrize(
    "words", [HOSTILE, Text(HOSTILE), _table(), facts([(HOSTILE, HOSTILE)]), JSON(json.dumps({HOSTILE: HOSTILE}))]
)
def test_nothing_that_is_printed_steers_the_terminal(capsys, words):
    terminal().print(words)
    shown = capsys.readouterr().out
    assert "digit" in shown
    assert not OBEYED & set(shown)


def test_a_reader_that_left_is_no_failure_of_the_command(monkeypatch):
    class Left(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Left())
    with pytest.raises(BrokenPipeError):
        terminal().print("name")


def test_a_name_keeps_its_own_letters(capsys):
    terminal().print("Äpfel\t½\n数字 می\u200cشود")
    assert capsys.readouterr().out == "Äpfel   ½\n数字 می\u200cشود\n"


def test_a_listing_begins_with_its_names_and_ends_with_its_last_row(capsys):
    table = listing("name", "size")
    table.add_row("adult", "48,842")
    terminal().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0].split(), lines[-1].split()) == (["name", "size"], ["adult", "48,842"])


def test_errors_too(capsys):
    assert fail(f"{HOSTILE}: unknown") == 1
    assert not OBEYED & set(capsys.readouterr().err)


def test_what_a_service_says_of_itself_is_printed_plainly(fairpate, capsys):
    """A service that was taken over, or only claims to be one."""

    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(422)
            self.end_headers()
            self.wfile.write(json.dumps({"errors": [dict.fromkeys(("field", "value", "remedy"), HOSTILE)]}).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, output, errors = fairpate("query", f"http://127.0.0.1:{server.server_port}", "budget")
        server.shutdown()
    assert code == 1
    assert "digit" in errors
    assert not OBEYED & set(output + errors)
    terminal().print(describe(Reply(key="0" * 64, status="answered", label=0), [HOSTILE]))
    assert not OBEYED & set(capsys.readouterr().out)
