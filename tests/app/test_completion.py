"""Completion by the shell's own protocol: names, run folders and fields, quickly, and nothing of a file is run."""

import os
import shutil
import subprocess
import sys

import pytest

from fairpate.app import kept
from fairpate.app.cli import completion
from fairpate.app.terminal.catalogue import data_set_names
from fairpate.config_reader import apply_override
from fairpate.data import REGISTRY
from fairpate.methods import all_methods, find_method
from fairpate.methods.load import configured


@pytest.fixture
def complete(fairpate, monkeypatch, tmp_path):
    """What bash is offered for the last of these words, in an empty folder; words as bash hands them on."""
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "cache"))

    def offered(*words):
        monkeypatch.setenv("_FAIRPATE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["fairpate", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        code, output, errors = fairpate()
        assert (code, errors) == (0, "")
        return output.split()

    return offered


def make_run(folder):
    (folder / "public").mkdir(parents=True)
    (folder / "config.yaml").write_text("method: sgd\n")


def test_commands_and_options(complete):
    assert {"run", "compare", "ledger", "new"} <= set(complete(""))
    assert complete("led") == ["ledger"]
    assert "verify" in complete("ledger", "")
    assert {"--method", "--json"} <= set(complete("run", "--"))
    assert complete("tokens", "add", "run", "alice", "--role", "op") == ["operator"]


def test_names_of_methods_and_data_sets(complete):
    assert complete("run", "--method", "") == list(all_methods())
    assert complete("run", "--method", "dp_f") == ["dp_fermi"]
    assert complete("methods", "raco") == ["raco_dp"]
    assert sorted(complete("data", "describe", "")) == sorted(REGISTRY)
    assert complete("run", "--data", "colo") == ["color_digits", "color_mnist"]
    assert complete("plan", "--data", "nothing") == []


def test_options_with_an_equals_sign(complete):
    """At which bash takes words apart; what it replaces is the last part."""
    assert complete("run", "--method", "=") == list(all_methods())
    assert complete("run", "--method", "=", "dp_f") == ["dp_fermi"]
    assert complete("run", "--data", "=", "color_digits", "--method", "=", "fair_") == ["fair_dp_sgd"]
    raco = complete("run", "--method", "raco_dp", "--set", "raco_dp.")
    assert complete("run", "--method", "=", "raco_dp", "--set", "=", "raco_dp.") == raco
    field, value = next(word for word in raco if not word.endswith("=")).split("=")
    assert complete("run", "--set", field, "=", value, "--method", "=", "raco") == ["raco_dp"]
    assert complete("run", "--method", "raco_dp", "--set", field, "=", value) == []
    assert complete("run", "--method", "=", "=", "x") == []


def test_the_names_of_data_sets_are_those_of_the_registry():
    assert data_set_names() == list(REGISTRY)


def test_a_declaration_is_offered_beside_data_sets(complete, tmp_path):
    (tmp_path / "clinic.yaml").write_text("")
    assert complete("data", "check", "cli") == []
    assert complete("data", "describe", "cli") == ["clinic.yaml"]
    assert complete("data", "describe", str(tmp_path / "cl")) == [str(tmp_path / "clinic.yaml")]


def test_run_folders_where_the_word_points_and_one_below(complete, tmp_path):
    for name in ("runs/first", "runs/second", "single", "deep/er/run", "two words"):
        make_run(tmp_path / name)
    (tmp_path / "runs/empty").mkdir()
    assert complete("card", "") == ["runs/first", "runs/second", "single", "two\\", "words"]  # one word, for a shell
    assert complete("serve", "single", "runs/s") == ["runs/second"]
    assert complete("ledger", "verify", "deep/") == ["deep/er/run"]
    assert complete("report", str(tmp_path / "si")) == [str(tmp_path / "single")]
    assert complete("report", "nowhere/") == []


def test_fields_of_the_method_that_is_named_so_far(complete, tmp_path, monkeypatch):
    found = complete("run", "--method", "raco_dp", "--set", "raco_dp.")
    assert found
    assert all(word.startswith("raco_dp.") for word in found)
    assert not complete("run", "--method", "pate", "--set", "raco_dp.")
    (tmp_path / "mine.yaml").write_text("method: raco_dp\n")
    assert complete("run", "mine.yaml", "--set", "raco_dp.") == found
    assert "grid=" in complete("compare", "sweep.yaml", "--set", "")
    monkeypatch.setattr("fairpate.app.terminal.catalogue.fields_of", None)
    assert complete("run", "--method", "raco_dp", "--set", "raco_dp.") == found, "kept"


def test_what_is_kept_is_made_again_once_any_source_is_newer(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "_PACKAGE", tmp_path)
    (source := tmp_path / "privacy" / "texts.py").parent.mkdir()
    source.touch()
    assert [kept.kept("texts", lambda: 1), kept.kept("texts", lambda: 2)] == [1, 1]
    os.utime(source, (2**31, 2**31))
    assert kept.kept("texts", lambda: 2) == 2


@pytest.mark.parametrize("method", all_methods())
def test_what_is_offered_is_a_field_with_its_default(method):
    values = {}
    for field in completion._fields_of(method):
        if not field.endswith("="):
            apply_override(values, field)
    assert configured(values, method=method) == configured({}, method=method)
    assert isinstance(configured(values, method=method), find_method(method))


def test_nothing_of_a_file_is_run(complete, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    assert complete("run", "--method", "mine:Mine", "--set", "") == []
    (tmp_path / "mine.yaml").write_text("method: mine:Mine\n")
    assert complete("run", "mine.yaml", "--set", "") == []


@pytest.mark.parametrize("content", ["[", "method: [a, b]", "- a", "\0", "method: nosuch"])
def test_a_file_that_is_no_configuration_offers_what_there_is(complete, tmp_path, content):
    (tmp_path / "broken.yaml").write_text(content)
    complete("run", "broken.yaml", "--set", "see")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself_is_offered_them(tmp_path):
    """The script that `--show-completion` prints, sourced by bash, asks this process."""
    (tmp_path / "fairpate").write_text(f"#!{sys.executable}\nfrom fairpate.__main__ import main\n\nmain()\n")
    (tmp_path / "fairpate").chmod(0o755)
    script = """
    eval "$(_FAIRPATE_COMPLETE=source_bash fairpate)"
    complete=$(complete -p fairpate | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    COMP_WORDS=(fairpate run --method fair_) COMP_CWORD=3
    $complete fairpate; printf '%s\\n' "${COMPREPLY[@]}"
    COMP_WORDS=(fairpate run --method = fair_) COMP_CWORD=4
    $complete fairpate; printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(  # noqa: S603
        [shutil.which("bash"), "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["fair_dp_sgd"] * 2, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shells_that_evaluate_what_they_are_offered_are_offered_plain_names(fairpate, tmp_path, monkeypatch, shell):
    for name in ("runs/first", "a`touch here`", "b$(id)", "c d", "e\\", "f'$(id)'", 'g"'):
        make_run(tmp_path / name)
    (tmp_path / "h`id`.yaml").write_text("")
    monkeypatch.delenv("COMP_WORDS", raising=False)
    monkeypatch.setenv("_FAIRPATE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for words, offered in (("card ", "runs/first"), ("data describe h", "")):
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"fairpate {words}")
        output = fairpate()[1]
        assert offered in output
        assert not set(output) & set("`$\\")


def test_names_are_offered_without_the_libraries_that_take_seconds(tmp_path):
    code = (
        "import os, sys; sys.argv = ['fairpate']; from fairpate.app.cli import completion as c;"
        "c.methods(''); c.data_sets(''); c.run_folders('');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'pyarrow', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False).returncode == 0  # noqa: S603
