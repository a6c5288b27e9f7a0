"""Every command has `--json`: one strict document, and nothing else, on standard output; in words the same facts."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import typer

from fairpate import __version__
from fairpate.cli import app
from fairpate.cli.commands import Commands
from fairpate.pages import percent
from fairpate.terminal import Output, show, speaking

pytestmark = pytest.mark.usefixtures("light_runs")

DECLARATION = """
name: clinic
task: comes back
rows: 100
files: {private: private.csv, public: public.csv}
label: {column: back, classes: {stays: no, back: yes}}
group: {column: sex, values: {female: F, male: M}}
features: {age: {bounds: [0, 110]}}
identity: {key: [visit]}
"""
SUCCEEDS = {
    "version": [],
    "new": ["project"],
    "demo": None,
    "methods": [],
    "run": ["run/config.yaml", "--out", "run"],
    "assess": ["private.csv", "--group", "sex", "--prediction", "back", "--least-cell", "1"],
    "report": ["run"],
    "card": ["run", "--contact", "somebody"],
    "specify": None,
    "compare": None,
    "select": None,
    "aggregate": ["votes.csv", "--unit", "hospital", "--classes", "no,yes", "--epsilon", "1", "--out", "labels"],
    "site key": ["own.key"],
    "site plan": None,
    "site serve": None,
    "site join": None,
    "site audit": None,
    "site simulate": None,
    "audit": None,
    "bundle": None,
    "dossier": None,
    "verify": None,
    "serve": None,
    "query": None,
    "data list": [],
    "data fetch": None,
    "data describe": ["color_digits"],
    "data declare": ["private.csv", "--public", "public.csv"],
    "data check": ["clinic.yaml"],
    "log": None,
    "ledger verify": ["run"],
    "ledger audit": ["run"],
    "ledger backup": ["run", "another.sqlite"],
    "ledger restore": ["copy.sqlite", "run"],
    "ledger anchor": ["run", "elsewhere.anchor"],
    "ledger export": ["run", "entries.json"],
    "ledger show": ["run", "--last", "3"],
    "ledger total": [],
    "ledger limit": ["color_digits", "--epsilon", "5"],
    "tokens add": ["run", "alice", "--queries", "10"],
    "tokens list": ["run"],
    "tokens limit": ["run", "bob", "--epsilon", "1"],
    "tokens expire": ["run", "bob", "30d"],
    "tokens rotate": ["run", "bob"],
    "tokens revoke": ["run", "bob"],
    "cluster certificates": ["authority"],
    "cluster submit": None,
    "cluster follow": None,
    "cluster jobs": None,
    "cluster stop": None,
}
"""Arguments with which a command succeeds; None: where its success is tested needs more (a service, a sweep, a
publisher, minutes), and is in the file of its subject."""


def leaves(group, *path):
    for name, command in group.commands.items():
        yield from (
            leaves(command, *path, name) if hasattr(command, "commands") else [(" ".join([*path, name]), command)]
        )


COMMANDS = dict(leaves(typer.main.get_command(app)))


def strictly(text):
    """The one document; what JSON has no word for is refused."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_every_command_is_tried_here():
    assert COMMANDS.keys() == SUCCEEDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_option(name):
    assert ["--json"] in [parameter.opts for parameter in COMMANDS[name].params]


@pytest.fixture
def given(finished, fairpate, tmp_path, monkeypatch):
    """A folder with a run, a copy of its ledger, a token, votes and a declaration; the commands run there."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    shutil.copytree(finished[0].root, tmp_path / "run")
    rows = "visit,age,sex,back\n" + "".join(
        f"{n},{20 + n},{'FM'[n % 2]},{('no', 'yes')[n % 3 == 0]}\n" for n in range(40)
    )
    (tmp_path / "private.csv").write_text(rows)
    (tmp_path / "public.csv").write_text(rows.replace("\n", "\n9").removesuffix("9"))
    (tmp_path / "clinic.yaml").write_text(DECLARATION)
    votes = "".join(f"r{n},a,{','.join(['yes'] * 12)}\n" for n in range(20))
    (tmp_path / "votes.csv").write_text(f"record_id,group,{','.join(f'h{n}' for n in range(12))}\n{votes}")
    assert fairpate("ledger", "backup", "run", "copy.sqlite")[0] == 0
    assert fairpate("tokens", "add", "run", "bob")[0] == 0
    return tmp_path


@pytest.mark.parametrize("name", [name for name, arguments in SUCCEEDS.items() if arguments is not None])
def test_success_is_one_strict_document(given, fairpate, name):
    arguments = SUCCEEDS[name]
    code, output, errors = fairpate(*name.split(), *arguments, "--json")
    assert code == 0, (output, errors)
    found = strictly(output)
    assert isinstance(found, dict)
    assert found
    assert "error" not in found
    assert "started" not in errors, "no progress"


@pytest.mark.parametrize("name", COMMANDS)
def test_bad_usage_is_one_document_too_and_keeps_its_exit_code(fairpate, name):
    code, output, errors = fairpate(*name.split(), "--no-such-option", "--json")
    assert code == 2
    assert strictly(output)["error"]["exit_code"] == 2
    assert "--no-such-option" in strictly(output)["error"]["message"]
    assert errors.startswith("error ")


def test_a_failure_that_is_no_bad_usage_is_code_1_in_the_document(fairpate):
    code, output, _ = fairpate("run", "--set", "data.name=adult", "--data-dir", ".", "--json")
    assert (code, strictly(output)["error"]["exit_code"]) == (1, 1)
    assert "adult.data" in strictly(output)["error"]["message"]


@pytest.mark.parametrize("words", [["--json"], ["rum", "--json"], ["ledger", "--json"], ["ledger", "verfy", "--json"]])
def test_a_line_without_a_command_is_refused_as_a_document(fairpate, words):
    code, output, _ = fairpate(*words)
    assert (code, strictly(output)["error"]["exit_code"]) == (2, 2)
    assert any(found in strictly(output)["error"]["message"] for found in ("known: ", "Did you mean"))


def test_help_for_a_program_is_a_document(fairpate):
    code, output, _ = fairpate("methods", "--help", "--json")
    assert (code, fairpate("methods", "--help")[1]) == (0, strictly(output)["help"])


def test_what_a_run_says_in_words_is_in_the_document(given, fairpate):
    words, found = fairpate("report", "run")[1], strictly(fairpate("report", "run", "--json")[1])
    statement, metrics = found["statement"], found["metrics"]
    assert f"{percent(metrics['accuracy'])} of {metrics['num_answered']} test records" in words
    assert percent(metrics["coverage"]) in words
    assert statement["delta"] == 1e-5
    assert "at delta 10⁻⁵" in words
    assert f"{statement['queries']['answered']} of {statement['queries']['submitted']} queries" in words
    assert all(path in words for name, path in found["files"].items() if name not in ("statement", "metrics"))
    assert statement == json.loads((given / "run/public/statement.json").read_text())


def test_numbers_are_numbers_and_what_is_infinite_is_null(fairpate):
    fields = {each["field"]: each for each in strictly(fairpate("methods", "pate", "--json")[1])["fields"]}
    assert fields["target.delta"]["default"] == 1e-5
    assert fields["target.delta"]["set"] == "target.delta=1e-05"
    assert fields["student.model.hidden"]["default"] is None
    with speaking(to_program=True):
        assert show(Output(facts={"rate": math.inf, "undefined": [math.nan]})) == 0


def test_what_a_command_prints_by_the_way_is_not_on_standard_output(fairpate, monkeypatch):
    def noisy():
        sys.stdout.write("by the way")
        return []

    monkeypatch.setattr("fairpate.cli.summaries.findings", noisy)
    code, output, errors = fairpate("version", "--json")
    assert (code, strictly(output)) == (0, {"version": __version__, "findings": []})
    assert "by the way" in errors


def test_there_is_never_a_second_document(capsys):
    with speaking(to_program=True):
        assert show(Output(facts={"answer": 1}, code=1, failure="what went wrong")) == 1
        show(Output(facts={"answer": 2}))
    found = strictly(capsys.readouterr().out)
    assert found == {"answer": 1, "error": {"message": "what went wrong", "exit_code": 1}}


def test_a_defect_is_a_document_and_a_traceback(fairpate, monkeypatch, capsys):
    monkeypatch.setattr("fairpate.cli.summaries.findings", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fairpate("version", "--json")
    assert "ZeroDivisionError" in strictly(capsys.readouterr().out)["error"]["message"]


def test_a_value_that_reads_like_the_option_is_a_value(fairpate):
    code, output, _ = fairpate("methods", "--", "--json")
    assert (code, output) == (2, ""), "a name of a method"


def test_an_audit_without_an_end_is_no_document(given, fairpate):
    code, output, _ = fairpate("ledger", "audit", "run", "--follow", "--json")
    assert code == 2
    assert "each line is JSON" in strictly(output)["error"]["message"]
    entries = strictly(fairpate("ledger", "audit", "run", "--json")[1])["entries"]
    assert [json.dumps(entry) for entry in entries] == fairpate("ledger", "audit", "run")[1].splitlines()


def test_a_command_of_a_plain_typer_app_has_no_json():
    """What makes the tests above fail for a command that is declared otherwise."""
    plain, ours = typer.Typer(), Commands()
    for made in (plain, ours):
        made.command()(lambda: None)
    has = [["--json"] in [each.opts for each in typer.main.get_command(made).params] for made in (plain, ours)]
    assert has == [False, True]


def test_a_process_puts_out_ascii_whatever_the_locale(tmp_path):
    command = [sys.executable, "-m", "fairpate", "data", "list", "--data-dir", "Zürich-\udcff", "--json"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False)  # noqa: S603
    assert done.returncode == 2
    assert "Zürich-\udcff" in strictly(done.stdout.decode("ascii"))["error"]["message"]
    assert b"Traceback" not in done.stderr
