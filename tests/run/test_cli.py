import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from fairpate import __version__
from fairpate.config import apply_override
from fairpate.data import entry_for
from fairpate.files import write_atomically
from fairpate.methods.base import all_methods, configured
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.releases.directory import RunDirectory
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import Odometer
from fairpate.types import UsageError

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]


@pytest.mark.xdist_group("torchvision")  # imports every extra
def test_version_and_help(fairpate):
    code, output, _ = fairpate("version")
    assert code == 0
    assert __version__ in output.splitlines()[0]
    code, output, _ = fairpate("--help")
    assert code == 0
    assert "run" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], ["rum", "run"]),
        (["run", "--sed", "1"], ["--sed"]),
        (["run", "--epsilon", "abc"], ["--epsilon: expected a number, got 'abc'."]),
        (["run", "--seed", "1.5"], ["--seed: expected a whole number, got '1.5'."]),
        (["new", "--kind", "foo", "x"], ["--kind: 'foo' is not one of 'table', 'images', 'embeddings'."]),
        (["data", "show"], ["No such command 'show'; known: ", "describe", "fetch"]),
        (["run", "missing.yaml"], ["missing.yaml", "no such file"]),
        (["run", "--set", "teachers.num_teacher=5"], ["teachers.num_teacher", "did you mean num_teachers"]),
        (["run", "--set", "teachers.num_teachers=1"], ["teachers.num_teachers", "expected >= 2"]),
        (["run", "--set", "aggregator.mechanism.noise_stddev_votes=0"], ["0 < mechanism.noise_stddev_votes", "got 0"]),
        (["run", "--set", "seed"], ["section.field=value"]),
        (["run", "--set", "data.name=colour_digits"], ["colour_digits", "did you mean color_digits"]),
        (["run", "--epsilon", "1", "--set", "data.options={sensitive: hue}"], ["data.options.sensitive", "hue"]),
        (["run", "--set", "data.name=adult", "--data-dir", "/nowhere"], ["/nowhere", "no such data folder"]),
        (["run", "--data", "color_digits", "--set", "data.num_test=5000"], ["5000"]),
        (["run", "--set", "data.num_public=-3"], ["error data.num_public: expected >= 0, got -3."]),
        (
            ["run", "--set", "teachers.model=foo"],
            ["teachers.model.name: expected 'log", "or 'ridge', got 'foo'."],
        ),
        (["run", "--method", "dpsgd"], ["method", "'dpsgd'", "did you mean dp_sgd?"]),
        (["run", "--method", "dp_sgd", "--data", "colour_digits"], ["colour_digits", "did you mean color_digits"]),
        (["run", "--method", "dp_sgd", "--epsilon", "-1"], ["target.epsilon", "expected > 0", "-1"]),
        (["run", "--method", "dp_sgd", "--epsilon", "two"], ["--epsilon", "expected a number, got 'two'"]),
        (["run", "--method", "dp_sgd", "--set", "dp_sgd.clip=1"], ["dp_sgd.clip", "did you mean clip_norm"]),
        (["run", "--method", "dp_sgd", "--set", "target.relation=swap"], ["target.relation", "swap"]),
        (
            ["run", "--method", "fair_dp_sgd", "--set", "fair_dp_sgd.variant=pre"],
            ["fair_dp_sgd.variant", "as_in_paper"],
        ),
        (["run", "--method=dp_sgd", "--set=raco_dp.bound=0.2"], ["raco_dp.bound: dp_sgd does not read it; leave"]),
        (["run", "--method=pate", "--set=aggregator.gate.min_count=2"], ["aggregator.gate.min_count: pate does"]),
        (["run", "--method=pate", "--set=aggregator={gate: {min_count: 2}}"], ["aggregator.gate: pate does not"]),
        (["run", "--method", "sgd", "--epsilon", "1"], ["target.epsilon: sgd does not read it"]),
        (["run", "--method", "no.such:Method"], ["no.such:Method cannot be imported", "module:Class"]),
        (["run", "--method", "fairpate.types:QueryBudget"], ["fairpate.types:QueryBudget: expected a subclass"]),
        (["run", "missing.yaml", "--method", "dp_sgd"], ["missing.yaml", "no such file"]),
        (["methods", "dp_fermy"], ["method", "'dp_fermy'", "did you mean dp_fermi?"]),
        (["compare", "missing.yaml"], ["missing.yaml", "no such file"]),
        (["compare"], ["CONFIG"]),
        (["run", "--data", "colour_digits", "--dry-run"], ["colour_digits", "did you mean color_digits"]),
        *(
            [[*words, "nowhere"], ["nowhere: holds no run (no such folder)"]]
            for words in (["report"], ["card"], ["serve"])
        ),
        (["serve", "--student", "nowhere"], ["nowhere: holds no run"]),
        (["serve", "--stop", "nowhere"], ["nowhere: holds no run"]),
        (["run", "--release-of", "nowhere", "--dry-run"], ["nowhere: holds no run"]),
        (["compare", "nowhere", "--figures", "here"], ["nowhere not found", "results.parquet"]),
        (["ledger", "verify", "nowhere"], ["nowhere: no such file or folder; give a ledger file"]),
        (["ledger", "show", "."], ["no ledger; give a ledger file"]),
        (["ledger", "export", "nowhere", "out.json"], ["nowhere: no such file or folder; give a ledger file"]),
        (["ledger", "limit", "adult", "--epsilon", "-1"], ["--epsilon", "0 < epsilon < inf", "-1"]),
        (["ledger", "limit", "adult", "--epsilon", "1", "--delta", "0"], ["--delta", "0 < delta < 1"]),
        (["data", "describe", "adult", "--option", "sensitive"], ["--option: expected NAME=VALUE, got 'sensitive'"]),
        (["data", "describe", "adult", "--option", "sensitive=height"], ["sensitive", "height"]),
        (["run", "--data", "adult", "--option", "sensitive"], ["--option: expected NAME=VALUE", "such as sensitive="]),
        (["run", "--data", "adult", "--option", "=race"], ["--option: expected NAME=VALUE, got '=race'"]),
        (["ledger", "limit", "adult", "--epsilon", "0"], ["0 < epsilon", "got 0"]),
        (["ledger", "limit", "adult", "--epsilon", "1", "--unit", "household"], ["--unit", "household"]),
        (["ledger", "total", "--delta", "1"], ["--delta", "got 1"]),
    ],
)
def test_bad_input_ends_in_one_message_and_no_traceback(fairpate, tmp_path, arguments, words):
    code, output, errors = fairpate(*arguments)
    assert code == 2
    assert output == ""
    assert "Traceback" not in errors
    for word in words:
        assert word in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free space there"), (errno.EFBIG, "raise the size limit of a file")]
)
def test_a_full_disk_is_told_with_the_file_and_what_to_do(fairpate, finished, monkeypatch, number, remedy):
    def full(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fairpate.files.os.fsync", full)
    code, _, errors = fairpate("card", finished[0].root)
    assert code == 1
    assert re.search(rf"card\.\w+: {os.strerror(number)}; {remedy}.*, and run the same command again\.$", errors)


def test_the_end_of_a_file_is_no_interrupt(fairpate, monkeypatch):
    def damaged():
        raise EOFError("marshal data too short")

    monkeypatch.setattr("fairpate.cli.summaries.findings", damaged)
    with pytest.raises(EOFError, match="marshal"):
        fairpate("version")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--set", "data.name=adult", "--data-dir", "."], ["adult.data", "fairpate data fetch", "missing file"]),
        (["query", "http://127.0.0.1:9", "budget"], ["no service answers", "start the service, or correct the URL"]),
    ],
)
def test_what_fails_for_another_reason_than_the_request_ends_in_exit_code_1(fairpate, monkeypatch, arguments, words):
    monkeypatch.setattr("aggregator.client.time.sleep", lambda _: None)
    code, output, errors = fairpate(*arguments)
    assert (code, output) == (1, "")
    assert all(word in errors for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", ["seed is given twice", "line 1"]),
        ("teachers: {num_teachers: 5, num_teachers: 6}\n", ["num_teachers is given twice"]),
        ("- a\n", ["mapping of sections", "list"]),
        ("[" * 1000, ["nested too deeply"]),
        ("- " * 100_000, ["nested too deeply"]),
        ("data: {name: adult\nseed: 1\n", ["line 2", "seed: 1"]),  # the line is quoted
        ("\0", ["cannot be read as YAML"]),
        ("1: 2\n", ["1: unknown field"]),
        ("data:\n", ["data", "expected a mapping"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(fairpate, tmp_path, text, words):
    (tmp_path / "sp ace é.yaml").write_text(text)
    code, output, errors = fairpate("run", "sp ace é.yaml")
    assert (code, output) == (2, "")
    assert all(word in errors for word in words), errors


def test_a_folder_is_no_configuration(fairpate, tmp_path):
    code, _, errors = fairpate("run", tmp_path)
    assert code == 2
    assert f"{tmp_path}: cannot be read (Is a directory)" in errors


def test_names_are_taken_as_they_are_typed(fairpate):
    for name in ("", "[x", "a: b", "1", "no"):
        code, _, errors = fairpate("run", "--method", name)
        assert code == 2
        assert f"no method {name!r}" in errors


def test_help_names_every_method(fairpate):
    code, output, _ = fairpate("run", "--help")
    assert code == 0
    words = set(output.replace(",", " ").replace(";", " ").split())
    assert set(all_methods()) <= words


def test_methods_are_listed_with_what_they_protect(fairpate):
    code, output, errors = fairpate("methods")
    assert (code, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= 100
    lines = {line.split()[0]: line for line in output.splitlines() if line.split()}
    for name, method in all_methods().items():
        protects = method().unit.split()[0] if method.is_private else "nothing"
        assert protects in lines[name], name
    assert "nothing" in lines["sgd"]
    assert "sensitive" in lines["pf_ld"]


@pytest.mark.parametrize("name", all_methods())
def test_one_method_is_shown_with_its_fields_and_defaults(fairpate, name):
    """Each field in the form that ``--set`` takes, and the defaults are the method's own."""
    code, output, _ = fairpate("methods", name)
    assert code == 0
    assert max(map(len, output.splitlines())) <= 100
    method = all_methods()[name]
    assert method.paper in " ".join(output.split())
    shown = [line for line in output.splitlines() if re.match(r"[a-z_0-9.]+=", line)]
    values = {}
    for line in shown:
        apply_override(values, line)
    assert configured(values) == configured({}, method=name)
    assert {"target.delta=1e-05", "student.fit.epochs=30"} <= set(shown)
    assert not any(line.startswith("raco_dp") for line in shown) or name == "raco_dp"


def test_a_file_may_serve_several_methods_and_is_checked_for_all(fairpate, tmp_path, monkeypatch):
    monkeypatch.setattr("fairpate.run.run.run_method", lambda config, *_, **__: found.append(config))
    monkeypatch.setattr("fairpate.cli.summaries.outcome", lambda _: None)
    found = []
    (tmp_path / "all.yaml").write_text("dp_sgd: {epochs: 2}\nraco_dp: {bound: 0.2}\nteachers: {num_teachers: 7}\n")
    for method in ("dp_sgd", "pate"):
        assert fairpate("run", "all.yaml", "--method", method)[0] == 0
    assert [config.method for config in found] == ["dp_sgd", "pate"]
    assert found[0].dp_sgd.epochs == 2
    assert not hasattr(found[0], "raco_dp")
    assert found[1].teachers.num_teachers == 7
    for text, words in (
        ("raco_dp: {bond: 0.2}", ["raco_dp.bond", "did you mean bound"]),
        ("raco_dp: {bound: 2}", ["raco_dp.bound", "expected <= 1"]),
        ("raco_pd: {bound: 0.2}", ["raco_pd: unknown field", "did you mean raco_dp"]),
        ("aggregator: {gate: {min_cont: 2}}", ["aggregator.gate.min_cont: unknown field; did you mean min_count"]),
        ("methods: [sgd]\ndata_sets: [adult]", ["fairpate compare"]),
    ):
        (tmp_path / "all.yaml").write_text(text)
        code, _, errors = fairpate("run", "all.yaml", "--method", "dp_sgd")
        assert code == 2, text
        assert all(word in errors for word in words), errors


def test_a_command_without_its_subcommand_shows_help(fairpate):
    code, output, errors = fairpate("data")
    assert (code, errors) == (2, "")
    assert "describe" in output


def test_every_fault_is_reported_at_once(fairpate, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: -1\nteachers: {num_teachers: none}\nstudnet: {}\n")
    code, _, errors = fairpate("run", "config.yaml")
    assert code == 2
    assert all(word in errors for word in ("seed", "teachers.num_teachers", "studnet", "did you mean student"))


def test_data_sets_are_listed_and_described(fairpate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, output, _ = fairpate("data", "list")
    assert code == 0
    longest = entry_for("communities")
    assert any(all(word in line for word in (longest.name, longest.sensitive)) for line in output.splitlines())
    code, output, _ = fairpate("data", "describe", "color_digits", "--json")
    assert code == 0
    assert sum(split["records"] for split in json.loads(output)["splits"]) == 1797


def test_fetch_needs_a_folder(fairpate, monkeypatch):
    monkeypatch.delenv("FAIRPATE_DATA", raising=False)
    code, _, errors = fairpate("data", "fetch", "adult")
    assert code == 2
    assert "--data-dir" in errors


def test_an_interrupt_says_how_to_go_on(fairpate, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairpate.run.run.run_method", interrupted)
    code, _, errors = fairpate("run")
    assert code == 130
    assert "the same command resumes" in errors


@pytest.mark.slow
def test_the_installed_module_answers_with_an_exit_code():
    command = [sys.executable, "-m", "fairpate", "run", "--sed", "1"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert (done.returncode, done.stdout) == (2, "")
    assert "--sed" in done.stderr


def test_a_limit_on_an_unknown_data_set_says_so(fairpate, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path))
    assert "No release is counted yet." in fairpate("ledger", "total")[1]
    assert fairpate("ledger", "limit", "adult", "--epsilon", "1")[2] == ""
    code, _, errors = fairpate("ledger", "limit", "adlt", "--epsilon", "1")
    assert code == 0
    assert "adlt: is not a known data set" in errors and "did you mean adult?" in errors


@pytest.mark.parametrize(
    ("units", "limited"),
    [(["person"], "record"), (["hospital"], "hospital"), (["hospital", "person"], "record"), ([], "record")],
)
def test_a_limit_without_a_unit_says_which_it_is_for(fairpate, tmp_path, monkeypatch, units, limited):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path))
    for unit in units:
        event = PoissonGaussians(count=1, noise_multiplier=10.0, sampling_rate=1.0, unit=unit)
        run = RunDirectory(root=tmp_path / unit)
        run.private.mkdir(parents=True)
        ReleaseLog(run, Odometer(), data="adult", method="dp_sgd").charge([event], noise="os_entropy")
    code, output, _ = fairpate("ledger", "limit", "adult", "--epsilon", "1")
    assert code == 0
    assert f"adult, unit {limited}: at most epsilon 1 at delta 10⁻⁵" in output
    assert ("includes releases by person" in output) == (limited == "record")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_ends_a_command_in_one_line_and_its_exit_code(fairpate, monkeypatch, number, code, swallowed):
    def ended(*_, **__):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except SystemExit:
            if not swallowed:
                raise
            raise RuntimeError("what a library made of it") from None

    monkeypatch.setattr("fairpate.run.run.run_method", ended)
    fresh = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    earlier = signal.signal(number, fresh)  # a Ray of this session may have put its own handler there
    try:
        found, output, errors = fairpate("run")
        assert signal.getsignal(number) == fresh
    finally:
        signal.signal(number, earlier)
    assert (found, output, errors.count("\n")) == (code, "", 1)
    assert "the same command resumes" in errors


OF_A_MODULE = re.compile(r"\w+(\.\w+)*:[A-Z]")  # a method of a module that is not here


def documented_runs():
    """Every `fairpate run` of the README and the documentation whose files are there."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for line in page.read_text(encoding="utf-8").splitlines():
            words = shlex.split(line, comments=True) if line.strip().startswith("fairpate run") else []
            files = [word for word in words if word.endswith((".yaml", ".pth")) or OF_A_MODULE.match(word)]
            if words and all((ROOT / file).is_file() for file in files):
                yield pytest.param(words[1:], id=" ".join(words))


@pytest.mark.parametrize("arguments", list(documented_runs()))
def test_every_documented_run_is_a_valid_configuration(arguments, fairpate, monkeypatch):
    asked = []

    def stop(config, *_, **__):
        config.require_trainable()
        asked.append(config)
        raise UsageError("far enough")

    monkeypatch.setattr("fairpate.run.run.run_method", stop)
    monkeypatch.setattr("fairpate.cli.runs._dry_run", stop)
    monkeypatch.chdir(ROOT)
    *_, said = fairpate(*(word.replace("~", "/nowhere") for word in arguments))
    assert asked, said


def test_the_documentation_has_runs():
    assert len(list(documented_runs())) > 12


@pytest.mark.parametrize("words", [["data", "list"], ["methods"], ["tokens", "list", "run"]])
def test_no_cell_of_a_table_is_cut_at_eighty_columns(fairpate, tmp_path, words):
    run = RunDirectory(root=tmp_path / "run")
    run.private.mkdir(parents=True)
    run.config.write_text("")
    fairpate("tokens", "add", "run", "a_name_of_someone_that_takes_its_room", "--expires", "30d", "--epsilon", "1.5")
    shown = Console(file=io.StringIO(), width=80)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fairpate.terminal.terminal", lambda **_: shown)
        assert fairpate(*words)[0] == 0
    lines = shown.file.getvalue().splitlines()
    assert lines
    assert max(map(len, lines)) <= 80
    assert "…" not in shown.file.getvalue()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["run", "data.yaml"], "not a configuration; give the file with --data data.yaml"),
        (["data", "describe", "rows.csv"], "fairpate data declare rows.csv --public"),
        (
            ["run", "--data", "rows.csv", "--epsilon", "1"],
            "not a declaration; draft a declaration with `fairpate data declare",
        ),
        (["ledger", "verify", "rows.csv"], "rows.csv: no ledger; give a ledger file"),
        (["aggregate", "no.csv", "--unit", "site", "--classes", "a,b"], "no.csv not found; give the CSV"),
        (["card", "."], "holds no run"),
        (["verify", "rows.csv"], "not a bundle"),
        (["verify", "nowhere.zip"], "nowhere.zip: no such file; give the file that `fairpate bundle` wrote"),
        (
            ["serve", ".", "--analyst-token-file", "no"],
            "no: cannot be read as a token file (No such file or directory); give",
        ),
        (["compare", "settings.yaml"], "this file configures one run, not a comparison"),
        (["new", "clinic"], "clinic exists already"),
    ],
)
def test_a_wrong_file_or_folder_is_named_with_what_to_give_instead(fairpate, tmp_path, monkeypatch, words, remedy):
    assert fairpate("new", "clinic")[0] == 0
    (tmp_path / "clinic/rows.csv").write_text("age\n1\n")
    monkeypatch.chdir(tmp_path if words[0] == "new" else tmp_path / "clinic")
    code, output, errors = fairpate(*words)
    assert (code, output) == (2, "")
    assert remedy in errors


def test_help_is_a_command_too(fairpate):
    """As people type it, for all commands and for one."""
    code, said, _ = fairpate("help")
    assert (code, said) == (0, fairpate("--help")[1])
    code, said, _ = fairpate("help", "run")
    assert (code, said) == (0, fairpate("run", "--help")[1])


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("run", "--data", "loans", "--method", "fairpate", "--keep", "30"), "give 30% or 0.3"),
        (("dossier", "."), "--for: missing; give one of registry, nist, egress"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(fairpate, words, remedy):
    code, _, said = fairpate(*words)
    assert code == 2
    assert remedy in " ".join(said.split())


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught:
        write_atomically(tmp_path / "missing" / "draft.yaml", lambda path: path.write_text(""))
    assert caught.value.filename == str(tmp_path / "missing" / "draft.yaml")
