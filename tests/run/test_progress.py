"""Progress: bars with the time left on a terminal, rare lines in a log, nothing for a program; Ctrl-C in one line."""

import gzip
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from rich.console import Console

from fairpate import terminal
from fairpate.data import table_files
from fairpate.run.compare import _ThisProcess
from fairpate.terminal import Pace, Reporter, duration, speaking, waiting
from fairpate.types import heard_by, tell

pytestmark = pytest.mark.usefixtures("light_runs")

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def clock(monkeypatch):
    """The moment it is, as the test says."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    found = Clock()
    monkeypatch.setattr("fairpate.terminal.time.monotonic", found)
    return found


def test_the_time_left_follows_from_the_pace_since_the_first_report(clock):
    pace = Pace()
    assert pace.left(500, 1000) == ""  # found done
    clock.now += 10
    assert pace.left(600, 1000) == "about 40 s left"  # 400 steps at 10 a second
    clock.now += 10
    assert pace.left(1000, 1000) == "about 0 s left"
    assert pace.left(1, 7) == ""  # other steps begin


def test_durations_are_words():
    assert [duration(seconds) for seconds in (0, 7.4, 59, 61, 3599, 3661, 90000)] == [
        *("0 s", "7 s", "59 s", "1 min", "1 h 0 min", "1 h 1 min", "25 h 0 min")
    ]


def test_a_log_has_plain_lines_that_become_rarer(clock):
    console = Console(file=io.StringIO(), width=80)
    with Reporter(console).stage("teachers") as advance:
        for step in range(1001):
            clock.now = float(step)
            advance(step, 1000)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "teachers     started"
    assert lines[1] == "teachers     10/1000, 10 s so far, about 16 min left"
    assert lines[-1] == "teachers     done in 1000.0 s"
    assert 8 <= len(lines) <= 16
    assert max(map(len, lines)) < 80


def test_what_is_quick_says_nothing_and_what_takes_longer_says_how_far_it_is(clock, monkeypatch):
    for seconds, said in (
        (1, ""),
        (30, "ledger       3/4, 30 s so far, about 10 s left\nledger       done in 30.0 s\n"),
    ):
        console = Console(file=io.StringIO(), width=80)
        monkeypatch.setattr(terminal, "terminal", lambda console=console, **_: console)
        clock.now = 0.0
        with waiting("ledger"):
            tell(0, 4)
            clock.now = float(seconds)
            tell(3, 4)
        assert console.file.getvalue() == said


def test_a_program_hears_nothing(capsys):
    with speaking(to_program=True), waiting("ledger"), Reporter().stage("votes") as advance:
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_loops_below_tell_whoever_listens(finished):
    from aggregator import ledger, ledger_audit

    told = []
    with heard_by(lambda *steps: told.append(steps)):
        tell(1, 2)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ledger, "_TOLD_EVERY", 1)
            entries = ledger_audit.verify(finished[0].ledger).entries
    tell(2, 2)
    assert told == [(1, 2), *((number, entries) for number in range(1, entries + 1))]


def test_the_steps_of_a_cell_in_this_process_are_not_counted_as_cells():
    told = []
    with heard_by(lambda *steps: told.append(steps)):
        assert _ThisProcess().get(lambda: tell(1, 2) or "row") == "row"
    assert told == []


def test_every_long_command_tells_how_far_it_is(finished, fairpate, monkeypatch):
    """Steps of a known number, so that the time left follows; none goes beyond its number or back within one."""
    told = []

    def heard(name, **_):
        told.append([])
        return heard_by(lambda *steps: told[-1].append(steps))

    run, _ = finished
    monkeypatch.setattr("fairpate.cli.runs.waiting", heard)
    for words in (["card", run.root], ["report", run.root]):
        told.clear()
        assert fairpate(*words)[0] == 0
        (steps,) = told
        assert len(steps) >= 2
        assert all(0 <= done <= total for done, total in steps)
        assert any(done == total for done, total in steps)


def drawn(code, **environment):
    """What a process writes on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    settings = plain | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"} | environment
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=settings
    )
    os.close(follower)
    content, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 1)[0]:
            try:
                content += os.read(leader, 4096)
            except OSError:
                break
    process.wait(timeout=30)
    os.close(leader)
    return content.decode()


STAGE = """
import time
from fairpate.terminal import Reporter
reporter = Reporter()
with reporter.stage("teachers") as advance:
    for step in range(5):
        advance(step, 40)
        time.sleep(.3)
    reporter.note("teachers", "[bold]as it is[/bold]")
"""


def test_a_terminal_shows_a_bar_with_the_time_left_within_its_width():
    shown = drawn(STAGE)
    assert "about 1" in shown
    assert "4/40" in shown
    assert COLOUR.search(shown)
    assert "[bold]as it is[/bold]" in shown
    rows = re.split(r"[\r\n]|\x1b\[\d*[A-HJK]", shown)
    assert max(len(re.sub(r"\x1b\[[?0-9;]*[a-z]", "", row)) for row in rows) <= 80


@pytest.mark.slow
def test_no_color_is_heeded():
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", drawn(STAGE, NO_COLOR="1"))


@pytest.mark.slow
def test_a_dumb_terminal_gets_the_lines_of_a_log():
    shown = drawn(STAGE, TERM="dumb")
    assert "\x1b" not in shown
    assert "teachers     started" in shown


def test_an_interrupt_is_a_document_for_a_program(fairpate, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fairpate.cli.summaries.findings", interrupted)
    code, output, errors = fairpate("version", "--json")
    assert (code, json.loads(output)["error"]["exit_code"], errors.count("\n")) == (130, 130, 1)


def test_control_c_while_the_command_line_is_imported_is_one_line_too(tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text("raise KeyboardInterrupt\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "fairpate", "version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.parquet"])
def test_reading_a_large_file_says_how_much_of_it_is_read(tmp_path, monkeypatch, name):
    rows = pa.table({"age": [str(number) for number in range(20_000)]})
    monkeypatch.setattr(table_files, "_BYTES_AT_ONCE", 2**14)
    monkeypatch.setattr(table_files, "_ROWS_AT_ONCE", 2**11)
    if name.endswith("parquet"):
        pq.write_table(rows, tmp_path / name)
    else:
        with gzip.open(tmp_path / name, "wb") if name.endswith("gz") else (tmp_path / name).open("wb") as file:
            csv.write_csv(rows, file)
    told = []
    with heard_by(lambda *steps: told.append(steps)):
        read = sum(map(len, table_files.read_batches(tmp_path / name, name)))
    assert read == 20_000
    assert len(told) > 3
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1
