"""Imports point one way: each package may use what stands left of it in design order, and nothing else of ours.

Methods and the application share the top floor: each may use everything, and nothing below uses either.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {
    "fairpate",
    "fairpate.types",
    "fairpate.names",
    "fairpate.faults",
    "fairpate.request_faults",
    "fairpate.named_code",
    "fairpate.config",
    "fairpate.votes_config",
    "fairpate.config_reader",
    "fairpate.compare_config",
    "fairpate.files",
    "fairpate.storage",
    "fairpate.steps",
    "fairpate.later",
    "fairpate.strict_json",
    "fairpate.glossary",
    "fairpate.meaning",
    "fairpate.query_costs",
    "fairpate.pages",
    "fairpate.api_page",
    "fairpate.oriented_gradients",
}
LIBRARY = BASE | {"fairpate.privacy", "fairpate.fairness", "fairpate.data", "fairpate.nn"}
ALLOWED = {
    "fairpate.types": set(),
    "fairpate.names": set(),
    "fairpate.named_code": set(),
    "fairpate.files": {"fairpate.types"},
    "fairpate.steps": set(),
    "fairpate.later": set(),
    "fairpate.strict_json": set(),
    "fairpate.glossary": set(),
    "fairpate.meaning": {"fairpate.types"},
    "fairpate.query_costs": set(),
    "fairpate.pages": {"fairpate.glossary"},
    "fairpate.oriented_gradients": {"fairpate.later"},
    "fairpate.api_page": {"fairpate.pages"},
    "fairpate.storage": {"fairpate.types", "fairpate.files"},
    "fairpate.config": {"fairpate.types", "fairpate.names"},
    "fairpate.votes_config": {"fairpate.types", "fairpate.config"},
    "fairpate.faults": {"fairpate.meaning"},
    "fairpate.request_faults": {"fairpate.faults"},
    "fairpate.config_reader": {"fairpate.config", "fairpate.names", "fairpate.faults"},
    "fairpate.compare_config": {"fairpate.types", "fairpate.config"},
    "fairpate.privacy": BASE,
    "fairpate.fairness": BASE,
    "fairpate.data": BASE,
    "fairpate.nn": BASE,
    "teachers": LIBRARY,
    "aggregator": LIBRARY,
    "aggregator.mechanism": LIBRARY,
    "aggregator.ledger": LIBRARY | {"aggregator.mechanism", "aggregator.mechanisms", "aggregator.gnmax"},
    "aggregator.session": LIBRARY | {"aggregator.mechanism", "aggregator.ledger"},
    "aggregator.labelling": LIBRARY | {"aggregator.mechanism", "aggregator.ledger", "aggregator.session"},
    "student": LIBRARY,
    "fairpate.evaluation": {
        "fairpate",
        "fairpate.types",
        "fairpate.fairness",
        "fairpate.strict_json",
        "fairpate.glossary",
        "fairpate.meaning",
        "fairpate.query_costs",
        "fairpate.pages",
        "fairpate.later",
    },
}
HEAVY = {"torch", "torchvision", "ray"}
WITHOUT_HEAVY = (
    "fairpate.types",
    "fairpate.files",
    "fairpate.storage",
    "fairpate.strict_json",
    "fairpate.config",
    "fairpate.votes_config",
    "fairpate.config_reader",
    "fairpate.compare_config",
    "fairpate.privacy",
    "fairpate.fairness",
)
OURS = ("fairpate", "teachers", "aggregator", "student")


def files_of(package):
    path = ROOT / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@cache
def imported_modules(path):
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module)
            if node.module == "fairpate.later":  # libraries, put off
                modules.update(alias.name for alias in node.names)
    return frozenset(modules)


def imported_first(path):
    """What a module imports before anything of it can be used: at its top level, and not for type checkers alone."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module, package):
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_stands_before_it(package):
    for path in files_of(package):
        for module in imported_modules(path):
            if module.split(".")[0] not in OURS or is_within(module, package):
                continue
            exact = module in ALLOWED[package] & {"fairpate"}
            inside = any(is_within(module, allowed) for allowed in ALLOWED[package] - {"fairpate"})
            assert exact or inside, f"{path.relative_to(ROOT)} imports {module}"


def test_every_module_below_the_top_floor_is_listed():
    """All but what users import: ``fairpate.app``, ``fairpate.methods`` and the public modules that stand on them."""
    top_floor = {"__init__", "__main__", "app", "methods", "comparing", "estimators"}
    names = {path.stem for path in (ROOT / "fairpate").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert {f"fairpate.{name}" for name in names - top_floor} <= set(ALLOWED)


def test_every_module_of_the_top_floor_can_be_imported_first():
    """Imports at module level form no circle, wherever one begins."""
    floor = {}
    for path in [*files_of("fairpate.app"), *files_of("fairpate.methods")]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        floor[name] = path
    leads_to = {name: {m for m in imported_first(path) if m in floor} - {name} for name, path in floor.items()}
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("package", WITHOUT_HEAVY)
def test_the_mathematics_needs_neither_torch_nor_ray(package):
    for path in files_of(package):
        heavy = {module.split(".")[0] for module in imported_modules(path)} & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy}"


def test_ray_is_imported_by_the_shell_only():
    shells = {
        path.relative_to(ROOT).as_posix()
        for package in OURS
        for path in files_of(package)
        if any(is_within(module, "ray") for module in imported_modules(path))
    }
    assert shells <= {
        "aggregator/service/actor.py",
        "fairpate/app/compare/releases.py",
        "fairpate/app/compare/run.py",
        "fairpate/app/serving/serve.py",
        "student/replicas.py",
        "teachers/cluster.py",
        "teachers/neighbourhood.py",
        "teachers/ray_pool.py",
        "teachers/voters.py",
    }


def test_no_package_of_ours_uses_pickle():
    for package in OURS:
        for path in files_of(package):
            assert not {"pickle", "cloudpickle", "joblib"} & imported_modules(path), path
