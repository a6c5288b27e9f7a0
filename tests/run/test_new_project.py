"""`fairpate new` writes a project that runs, whole or not at all, whatever it is called."""

import csv
import json
import re
import shlex
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from method_kinds import quick_and_slow

from fairpate import load_data
from fairpate.cli import summaries
from fairpate.data.declaration import read_declaration
from fairpate.methods.base import configured
from fairpate.releases.odometer import Odometer

pytestmark = pytest.mark.usefixtures("light_runs")

FILES = {
    *("README.md", "settings.yaml", "data.yaml", "test_project.py", ".gitignore"),
    *("example_private.csv", "example_public.csv", "example_test.csv"),
}
BESIDE = {
    "table": set(),
    "images": {"pictures"},
    "embeddings": {"example_private.npy", "example_public.npy", "example_test.npy"},
}
KINDS = pytest.mark.parametrize("kind", BESIDE)


@pytest.mark.parametrize("kind", quick_and_slow(BESIDE, ("table",)))
def test_a_new_project_passes_its_own_test(fairpate, tmp_path, monkeypatch, kind):
    """Which reads the declaration, and trains with the configuration as it is written; what it trains is of use."""
    assert fairpate("new", "hospital", "--kind", kind)[0] == 0
    path = tmp_path / "hospital/test_project.py"
    spec = spec_from_file_location("hospital_test_project", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_the_declaration_reads_its_files()
    module.test_a_run_keeps_its_target(tmp_path / "by_test", monkeypatch)
    assert (tmp_path / "by_test/run/public/student.safetensors").is_file()
    assert Odometer(tmp_path / "by_test/state").totals(delta=1e-5)[0].data == "hospital"
    measured = json.loads((tmp_path / "by_test/run/public/metrics.json").read_text())
    assert measured["accuracy"] > measured["majority_accuracy"] + 0.1


@pytest.mark.slow
@KINDS
def test_a_new_project_runs_by_the_commands_of_its_readme(fairpate, tmp_path, monkeypatch, kind):
    """Its own test, by pytest, where it is a table; of the other kinds that test is the one above."""
    assert fairpate("new", "hospital", "--kind", kind)[0] == 0
    monkeypatch.chdir(tmp_path / "hospital")
    for words in (["data", "check", "data.yaml"], ["run", "settings.yaml"]):
        code, output, errors = fairpate(*words)
        assert code == 0, output + errors
    if kind == "table":
        monkeypatch.setattr(sys, "path", [*sys.path])  # pytest adds the folder
        assert pytest.main(["-q"]) == 0
    assert (tmp_path / "hospital/runs/first/public/report.html").is_file()


@KINDS
def test_what_it_says_is_there_and_its_words_name_the_made_up_records(fairpate, tmp_path, kind):
    code, output, _ = fairpate("new", "hospital", "--kind", kind)
    assert code == 0
    assert {path.name for path in (tmp_path / "hospital").iterdir()} == FILES | BESIDE[kind]
    assert "example records" in output
    readme = (tmp_path / "hospital/README.md").read_text()
    assert "**The records here are made up.**" in readme
    assert set(re.findall(r"`([\w.]+\.(?:yaml|csv|py))`", readme)) - {"yours.yaml"} <= FILES
    assert yaml.safe_load((tmp_path / "hospital/settings.yaml").read_text())["data"]["name"] == "hospital"


def test_every_command_of_the_readme_is_one_of_ours(fairpate, tmp_path):
    fairpate("new", "hospital")
    lines = (tmp_path / "hospital/README.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("    fairpate")]
    assert len(commands) == 3
    for words in commands:
        assert fairpate(*words[1:-1], "--help")[0] == 0


@pytest.mark.parametrize("kind", [pytest.param("images", marks=pytest.mark.slow), "embeddings"])
def test_what_lies_beside_the_tables_is_the_same_each_time(fairpate, tmp_path, kind):
    for name in ("one", "two"):
        assert fairpate("new", name, "--kind", kind)[0] == 0
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two")
    )
    assert {path for path in first if first[path] != second[path]} == {
        Path("README.md"),
        Path("data.yaml"),
        Path("settings.yaml"),
    }
    dataset = load_data(tmp_path / "one/data.yaml")
    assert dataset.kind == {"images": "image", "embeddings": "tabular"}[kind]
    assert len(set(dataset.private.record_id) & set(dataset.public.record_id)) == 0
    assert set(dataset.public.y.tolist()) == {-1}


def test_an_unknown_kind_is_refused(fairpate, tmp_path):
    assert fairpate("new", "hospital", "--kind", "sounds")[0] == 2
    assert not list(tmp_path.iterdir())


def test_the_records_are_the_same_each_time_and_parts_share_none(fairpate, tmp_path):
    fairpate("new", "one")
    fairpate("new", "two")
    visits = []
    for part, size in (("private", 1200), ("public", 400), ("test", 400)):
        first, second = (tmp_path / name / f"example_{part}.csv" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
        with first.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == size
        assert ("readmitted" in rows[0]) == (part != "public")
        visits += [row["visit"] for row in rows]
    assert len(set(visits)) == len(visits)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("two words", "two_words"),
        ("deep/er/Clinic-2", "clinic_2"),
        ("$(touch owned); rm -rf *", "touch_owned_rm_rf"),
        ("quote\"'{}: [x", "quote_x"),
        *((word, word) for word in ("yes", "no", "null", "true", "on")),
        ("ünicode", "nicode"),
        ("x" * 200, "x" * 64),
    ],
)
def test_any_name_of_a_folder_gives_a_name_of_a_data_set(fairpate, tmp_path, monkeypatch, name, data):
    code, output, errors = fairpate("new", name)
    assert code == 0, errors
    assert read_declaration(tmp_path / name / "data.yaml").name == data
    assert f"cd {shlex.quote(name)}" in output
    assert fairpate("run", tmp_path / name / "settings.yaml", "--set", "nothing=1")[0] == 2
    assert not list(tmp_path.rglob("owned"))
    monkeypatch.chdir(tmp_path / name)
    assert configured(Path("settings.yaml")).data.name == data


def test_a_name_that_looks_like_an_option_is_told_as_a_path(fairpate):
    assert "  cd ./-x\n" in fairpate("new", "--", "-x")[1]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "123", "---x", "日本", "x" * 300, "file/below", "adult", "e\x1b[2J", "a\nb"]
)
def test_a_name_that_none_can_have_is_refused_and_leaves_nothing(fairpate, tmp_path, name):
    (tmp_path / "file").write_text("")
    code, output, errors = fairpate("new", name)
    assert (code, output) == (2, "")
    assert errors.startswith("error ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_is_never_touched(fairpate, tmp_path, kind):
    there = tmp_path / "hospital"
    make = {"folder": there.mkdir, "file": there.touch, "link": lambda: there.symlink_to(tmp_path / "nowhere")}
    make[kind]()
    before = there.lstat()
    code, _, errors = fairpate("new", "hospital")
    assert code == 2
    assert "hospital exists already; give another name" in errors
    assert there.lstat().st_mtime_ns == before.st_mtime_ns
    assert fairpate("new", "clinic")[0] == 0
    assert "clinic exists already" in fairpate("new", "clinic")[2]


def test_an_interrupt_leaves_no_part_of_a_project(fairpate, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(summaries.Path, "rename", interrupted)
    assert fairpate("new", "hospital")[0] == 130
    assert list(tmp_path.iterdir()) == []
