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

STORED = "test_fixed_seeds_give_the_stored_result"
SWEEP = """
data_sets: [color_digits]
seeds: [0]
settings: {target: {epsilon: 3}, data: {num_public: 100, num_test: 200}}
ray: {num_actors: 0}
methods: {dp_sgd: {settings: {dp_sgd: {epochs: 1}}}, class_means: {}}
"""


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
        # Not as a worker of this session: its tests would find the shared runs of an earlier one.
        there = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | {
            "PYTHONPATH": str(self.root),
            "FAIRPATE_STATE": str(self.root / "state"),
            "COLUMNS": "300",
        }
        done = subprocess.run(  # noqa: S603
            [sys.executable, *command], cwd=self.root, env=there, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

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
    facts = json.loads(copy.works("-m", "fairpate", "methods", "--json"))["methods"]
    assert [(each["family"], each["protects"]) for each in facts if each["name"] == NAME] == [
        ("Records vote", "record")
    ]
    assert "class_means.least_count" in copy.works("-m", "fairpate", "methods", NAME)

    sweep, out = tmp_path / "sweep.yaml", tmp_path / "compared"
    sweep.write_text(SWEEP, encoding="utf-8")
    copy.works("-m", "fairpate", "compare", str(sweep), "--out", str(out))
    page = (out / "report.html").read_text(encoding="utf-8")
    for method, colour in ((NAME, 6), ("dp_sgd", 2)):
        (button,) = re.findall(
            rf"<button[^>]*data-series[^>]*>((?:(?!</button>).)*) {method}</button>", page, re.DOTALL
        )
        assert f'class="m{colour} filled"' in button

    run = tmp_path / "run"
    copy.works("-m", "fairpate", "run", "--method", NAME, "--epsilon", "3", "--out", str(run))
    code, output = copy.run("-m", "fairpate", "audit", str(run))
    assert code == 2
    assert f"no attack on the releases of {NAME} is known; audit a run of" in output

    program = (
        "import numpy as np; from fairpate import FairClassifier; x = np.random.default_rng(0).normal(size=(200, 3));"
        f"model = FairClassifier({NAME!r}, epsilon=3.0, class_means={{'least_count': 9}});"
        "print(model.fit(x, x[:, 0] > 0, sensitive_features=x[:, 1] > 0).statement().method)"
    )
    assert copy.works("-c", program).strip().endswith(NAME)


@pytest.mark.slow
def test_the_contracts_fail_until_its_results_are_stored(copy: Copy) -> None:
    asked = ("tests/contracts/test_fixed_results.py::test_every_method_has_a_stored_result",)
    asked += ("tests/test_python_for_editors.py::test_parameters_are_typed_for_every_method",)
    code, output = copy.run("-m", "pytest", "-q", "-n", "0", *asked)
    assert code == 1
    assert output.count("FAILED ") == 2
    assert "make stored" in output
    for script in ("typed_sections.py", "fixed_results.py"):
        copy.works(f"tests/contracts/{script}")
    copy.works("-m", "pytest", "-q", "-n", "0", *asked, f"tests/contracts/test_fixed_results.py::{STORED}[{NAME}]")
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
def test_it_passes_lint_types_and_the_tests_over_all_methods(copy: Copy) -> None:
    for script in ("typed_sections.py", "fixed_results.py"):
        copy.works(f"tests/contracts/{script}")
    copy.works("-m", "ruff", "check", "fairpate", "tests")
    copy.works("-m", "ruff", "format", "--check", "fairpate", "tests")
    # What `make types` knows of the other modules, if it ran; while it runs, a file that it replaces is left out.
    with contextlib.suppress(shutil.Error, FileNotFoundError):
        shutil.copytree(ROOT / ".mypy_cache", copy.root / ".mypy_cache")
    copy.works("-m", "mypy", "fairpate")
    chosen = f"{NAME} or architecture or public_interface or looks or editors or page_states or digest_changes"
    copy.works("-m", "pytest", "-q", "-n", "0", *OVER_ALL_METHODS, "-k", chosen)
