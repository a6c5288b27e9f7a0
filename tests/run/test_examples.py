"""Examples come with the package: each is copied whole, and what its last line says to run is a command that runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fairpate import __version__
from fairpate.cli.commands import EXAMPLE_FILES, EXAMPLES

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("example", EXAMPLE_FILES)
def test_an_example_is_copied_whole_or_not_at_all(fairpate, example):
    code, output, _ = fairpate("new", "mine", "--example", example)
    assert code == 0
    assert {path.name: path.read_bytes() for path in Path("mine").iterdir()} == {
        name: (EXAMPLES / name).read_bytes() for name in EXAMPLE_FILES[example]
    }
    assert Path(EXAMPLE_FILES[example][0]).stem in output.splitlines()[-1]
    code, _, errors = fairpate("new", "mine", "--example", example)
    assert code == 2
    assert "mine exists already" in errors


def test_every_file_of_the_folder_belongs_to_an_example():
    there = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert there == {name for files in EXAMPLE_FILES.values() for name in files}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare",), "CONFIG: expected a file, or --example quick, got neither; give one."),
        (
            ("compare", "a.yaml", "--example", "quick"),
            "CONFIG: expected a file, or --example quick, got both; give one.",
        ),
        (("compare", "--example", "quik"), "--example: no example is named 'quik'; did you mean quick?"),
        (("compare", "--example", "own-method"), "--example: own-method is not a comparison;"),
        (("new", "mine", "--example", "quick", "--kind", "table"), "--kind: not read with --example"),
    ],
)
def test_a_wrong_example_is_named_with_the_remedy(fairpate, words, message):
    code, _, errors = fairpate(*words)
    assert code == 2
    assert message in errors
    assert not Path("mine").exists()


def test_the_version_is_an_option_too(fairpate):
    assert fairpate("--version")[:2] == (0, f"fairpate {__version__}\n")


@pytest.mark.parametrize("name", ["aggregator", "student", "teachers"])
def test_another_package_of_the_same_name_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import fairpate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT / "docs")  # noqa: S603
    assert done.returncode == 1
    assert f"needs its own package {name}, and Python finds {tmp_path / name}.py;" in done.stderr
