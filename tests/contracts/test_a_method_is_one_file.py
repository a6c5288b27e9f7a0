"""The example of docs/recipes.md, copied into the folder of methods, is a method as others are; no other file changes.

In a copy of the repository, in processes of their own.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]
COPIED = ("aggregator", "fairpate", "student", "teachers", "tests")
LINKED = ("benchmarks", "configs", "deploy", "docs", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md")
NAME = "class_means"
# All that run over every method, or hold a list of what methods have.
OVER_ALL_METHODS = (
    *(
        "tests/contracts",
        "tests/test_architecture.py",
        "tests/test_public_interface.py",
        "tests/test_estimator_checks.py",
    ),
    *("tests/test_python_for_editors.py", "tests/report/test_frontier_looks.py", "tests/methods/test_fitted.py"),
    *("tests/run/test_every_method_runs.py", "tests/run/test_plan.py", "tests/run/test_second_release.py"),
    *("tests/run/test_configuration_ranges.py", "tests/run/test_own_method.py"),
)

SWEEP = """
data_sets: [color_digits]
seeds: [0]
settings: {target: {epsilon: 3}, data: {num_public: 100, num_test: 200}}
ray: {num_actors: 0}
methods: {dp_sgd: {settings: {dp_sgd: {epochs: 1}}}, class_means: {}}
"""
# Commands one after another in one process, which imports torch once: the exit code and the output of each.
IN_TURN = """
import json, sys
from fairpate.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["fairpate", *words], 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    print(f"\\0{code}\\0", flush=True)
import numpy as np
from fairpate import FairClassifier
x = np.random.default_rng(0).normal(size=(200, 3))
model = FairClassifier("class_means", epsilon=3.0, class_means={"least_count": 9})
print(model.fit(x, x[:, 0] > 0, sensitive_features=x[:, 1] > 0).statement().method)
"""
# `make stored`, as far as it is about methods.
STORE = """
import sys
sys.path.insert(0, "tests/contracts")
import typed_sections
typed_sections.main()
import fixed_results
fixed_results.main()
"""
MADE_BY_STORED = {"tests/contracts/test_fixed_results.py": "test_every_method_has_a_stored_result"}
MADE_BY_STORED |= {"tests/test_python_for_editors.py": "test_parameters_are_typed_for_every_method"}


class Copy:
    """A copy of the repository in which commands run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in LINKED:
            (root / name).symlink_to(ROOT / name)
        shutil.copy(root / "fairpate" / "examples" / "own_method.py", root / "fairpate" / "methods" / f"{NAME}.py")

    def run(self, *command: str) -> tuple[int, str]:
        """Return the exit code and the output of a Python module or script."""
        # Commands leave out model.onnx, which takes seconds; a session of tests does so by itself.
        path = [self.root, *([] if "pytest" in command else [self.root / "tests" / "without_graphs"])]
        # Not as a worker of this session: its tests would find the shared runs of an earlier one.
        there = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "FAIRPATE_STATE": str(self.root / "state"),
            "COLUMNS": "300",
        }
        done = subprocess.run(  # noqa: S603
            [sys.executable, *command],
            cwd=self.root,
            env=there,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def works(self, *command: str) -> str:
        code, output = self.run(*command)
        assert code == 0, output
        return output


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("repository"))


ASKED = """
import json, sys
import fairpate
from fairpate.methods.base import all_methods, find_method, looks_of, method_names, voters_of_each_kind
from fairpate.report.figures import COLOURS, FAMILIES
looks, kind = looks_of(method_names()), find_method("class_means")
assert "torch" not in sys.modules, "listing methods imports no torch"
config = fairpate.configured({"class_means": {"least_count": 9}}, method="class_means")
facts = {
    "place": f"{kind.__module__}:{kind.__qualname__}",
    "family": FAMILIES[kind.family].title,
    "alike": [name for name in looks if looks[name] == looks["class_means"]],
    "colour": 0 <= kind.colour < len(COLOURS),
    "needs": config.needs,
    "unit": config.unit,
    "attacked": [name for name, each in all_methods().items() if each.attack is kind.attack],
}
print(json.dumps(facts))
"""


def test_its_class_says_all_there_is_to_say(copy: Copy) -> None:
    told = json.loads(copy.works("-c", ASKED))
    assert told["place"] == f"fairpate.methods.{NAME}:ClassMeans"
    assert (told["family"], told["alike"], told["colour"]) == ("Records vote", [NAME], True)
    assert (told["needs"], told["unit"]) == (["groups"], "record")
    assert {NAME, "sgd", "private_knn"} <= set(told["attacked"]), "those that have no attack"


@pytest.mark.slow
def test_commands_and_estimators_know_it(copy: Copy, tmp_path: Path) -> None:
    """Listed with its family, compared, drawn in a colour of its own, fitted as an estimator, refused by an audit."""
    sweep, out, run = tmp_path / "sweep.yaml", tmp_path / "compared", str(tmp_path / "run")
    sweep.write_text(SWEEP, encoding="utf-8")
    small = ("--set", "data.num_public=100", "--set", "data.num_test=200")
    commands = [
        ["methods", "--json"],
        ["methods", NAME],
        ["compare", str(sweep), "--out", str(out)],
        ["run", "--method", NAME, "--epsilon", "3", *small, "--out", run],
        ["audit", run],
    ]
    *parts, fitted = copy.works("-u", "-c", IN_TURN, json.dumps(commands)).split("\0")
    (listed, described, compared, ran, audited), codes = parts[::2], [int(code) for code in parts[1::2]]
    assert codes == [0, 0, 0, 0, 2], (compared, ran, audited)
    facts = json.loads(listed)["methods"]
    assert [(each["family"], each["protects"]) for each in facts if each["name"] == NAME] == [
        ("Records vote", "record")
    ]
    assert "class_means.least_count" in described
    page = (out / "report.html").read_text(encoding="utf-8")
    for method, colour in ((NAME, 6), ("dp_sgd", 2)):
        (button,) = re.findall(
            rf"<button[^>]*data-series[^>]*>((?:(?!</button>).)*) {method}</button>", page, re.DOTALL
        )
        assert f'class="m{colour} filled"' in button
    assert f"no attack on the releases of {NAME} is known; audit a run of" in audited
    assert fitted.strip().endswith(NAME)


@pytest.fixture(scope="module")
def before(copy: Copy) -> tuple[int, str]:
    """The exit code and the output of the tests that fail until `make stored` has run, as it then did."""
    asked = [f"{file}::{test}" for file, test in MADE_BY_STORED.items()]
    found = copy.run("-m", "pytest", "-q", "-n", "0", *asked)
    copy.works("-c", STORE)
    return found


@pytest.mark.slow
def test_the_contracts_fail_until_its_results_are_stored(copy: Copy, before: tuple[int, str]) -> None:
    code, output = before
    assert code == 1
    assert output.count("FAILED ") == 2
    assert "make stored" in output
    changed = {
        str(path.relative_to(copy.root))
        for folder in COPIED
        for path in (copy.root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not _is_as_in_the_repository(path, copy.root)
    }
    stored = {"fairpate/methods/sections.py", "tests/contracts/fixed_results.json"}
    assert changed == {f"fairpate/methods/{NAME}.py"} | stored


def _is_as_in_the_repository(path: Path, root: Path) -> bool:
    there = ROOT / path.relative_to(root)
    return there.is_file() and filecmp.cmp(path, there, shallow=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_passes_lint_types_and_the_tests_over_all_methods(copy: Copy, before: tuple[int, str]) -> None:
    copy.works("-m", "ruff", "check", "fairpate", "tests")
    copy.works("-m", "ruff", "format", "--check", "fairpate", "tests")
    # What `make types` knows of the other modules, if it ran; while it runs, a file that it replaces is left out.
    cache = copy.root / ".mypy_cache"
    with contextlib.suppress(shutil.Error, FileNotFoundError):
        shutil.copytree(ROOT / ".mypy_cache", cache)
    types = ("-m", "mypy", f"fairpate/methods/{NAME}.py", "fairpate/methods/sections.py", "fairpate/estimators.py")
    if "INTERNAL ERROR" in copy.run(*types)[1]:  # the copy of a database in the middle of a transaction
        shutil.rmtree(cache)
    copy.works(*types)
    chosen = f"{NAME} or architecture or public_interface or looks or page_states or digest_changes"
    chosen = " or ".join((chosen, *MADE_BY_STORED.values()))
    copy.works("-m", "pytest", "-q", "-n", "0", *OVER_ALL_METHODS, "-k", chosen, "-m", "campaign or not campaign")
