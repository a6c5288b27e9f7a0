"""Imports point one way: a floor may use the floors below it, and on its own floor only its own package."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks" / "speed"))

import structure  # noqa: E402

pytestmark = pytest.mark.usefixtures("light_runs")

FLOORS = (
    ("fairpate.types", "fairpate.lazy", "fairpate.face_network"),
    ("fairpate.config", "fairpate.files", "fairpate.pages", "fairpate.oriented_gradients"),
    ("fairpate.http_server", "fairpate.terminal", "fairpate.encoders"),
    ("fairpate.privacy", "fairpate.fairness"),
    ("fairpate.data", "fairpate.nn"),
    ("teachers", "aggregator", "student"),
    ("fairpate.report",),
    ("fairpate.releases",),
    ("fairpate.methods",),
    ("fairpate.run",),
    ("fairpate.sites",),
    ("fairpate.estimators", "fairpate.cli"),
    ("fairpate.search",),
    ("fairpate.__main__",),
)
HEAVY = {"torch", "torchvision", "ray"}
WITHOUT_HEAVY = (
    *("fairpate.types", "fairpate.files", "fairpate.config"),
    *("fairpate.privacy", "fairpate.fairness", "fairpate.sites"),
)
MODULES = structure.read_modules(ROOT)


@cache
def edges():
    """Read when a test asks: every worker collects this file, and parsing all modules takes seconds."""
    return structure.edges(MODULES)


def is_within(module, package):
    return module == package or module.startswith(f"{package}.")


def place_of(module):
    """(floor, package) of a module. ``fairpate`` itself is on no floor: it imports each name when it is asked for."""
    return next((floor, package) for floor, row in enumerate(FLOORS) for package in row if is_within(module, package))


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"fairpate"}))
def test_a_module_imports_only_what_stands_below_it(module):
    floor, package = place_of(module)
    for other in set(edges()[module]) - {"fairpate"}:
        other_floor, other_package = place_of(other)
        assert other_floor < floor or other_package == package, f"{module} imports {other}"


def test_a_method_is_told_about_its_run_by_a_protocol_alone():
    for name in MODULES:
        if is_within(name, "fairpate.methods"):
            assert not {"fairpate.releases.log", "fairpate.releases.odometer"} & set(edges()[name]), name


def test_the_picture_of_the_house_shows_these_floors():
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    drawn = [set(names.replace("/", ".").split()) for names in re.findall(r'class="layer"[^>]*>([^<]+)<', picture)]
    assert drawn == [set(row) for row in reversed(FLOORS[:-1])]  # the last only starts the command line


def test_no_import_runs_in_a_circle():
    """Neither when modules are imported, nor inside a function, nor for type checkers."""
    assert structure.circles(edges(), kinds={"first", "later", "types"}) == []


@pytest.mark.parametrize("package", WITHOUT_HEAVY)
def test_the_mathematics_needs_neither_torch_nor_ray(package):
    for name, module in MODULES.items():
        if is_within(name, package):
            # What it names for type checkers, other modules import by it when they first use it.
            runs = [each for each in module.imports if each[0] != "types" or name != "fairpate.lazy"]
            imported = {top.split(".")[0] for _, top, _ in runs}
            put_off = {part for _, top, part in module.imports if top == "fairpate.lazy"}
            assert not (imported | put_off) & HEAVY, name


def test_ray_is_imported_by_the_shell_only():
    shells = {name for name, module in MODULES.items() if any(is_within(top, "ray") for _, top, _ in module.imports)}
    assert shells <= {
        "aggregator.service.actor",
        "fairpate.run.compare",
        "fairpate.run.serve",
        "student.server",
        "teachers.ray_cluster",
        "teachers.ray_pool",
        "teachers.work",
    }


def test_nothing_of_ours_uses_pickle_or_relative_imports():
    for name, module in MODULES.items():
        assert not {"pickle", "cloudpickle", "joblib"} & {top for _, top, _ in module.imports}, name
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(module.tree)), name


def asked_classes():
    """Where a module outside ``methods`` asks which class a method is: by `isinstance`, `issubclass` or a pattern with
    a class of a method, or by `getattr` or `hasattr` on what is named as one."""
    of_methods = {
        node.name
        for name, module in MODULES.items()
        if is_within(name, "fairpate.methods")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and not node.name.endswith(("Config", "Trained"))
    } - {"Trained", "Labels", "Training", "Audited"}
    named = {"config", "method", "schema", "target", "checked", "opened"}
    for name, module in MODULES.items():
        if not is_within(name, "fairpate") or is_within(name, "fairpate.methods"):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.MatchClass):
                asked = {each.id for each in ast.walk(node.cls) if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                last = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in node.args}
                if node.func.id in ("isinstance", "issubclass"):
                    inner = [each for argument in node.args[1:] for each in ast.walk(argument)]
                    asked = {getattr(each, "attr", getattr(each, "id", "")) for each in inner}
                # By a name that is written there: who reads all fields of a class by their names asks nothing.
                elif node.func.id in ("getattr", "hasattr") and last & named and isinstance(node.args[1], ast.Constant):
                    asked = of_methods
                else:
                    continue
            else:
                continue
            if asked & of_methods:
                yield f"{name}:{node.lineno}"


def test_a_method_is_asked_for_what_is_needed_and_not_for_its_class():
    found = sorted(asked_classes())
    # `aggregate` reads the file of votes that one method has; two commands on a ledger read the plan of the voters.
    assert [place.partition(":")[0] for place in found] == [
        "fairpate.run.ledgers",
        "fairpate.run.run",
        "fairpate.run.serve",
    ], found
