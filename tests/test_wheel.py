import ast
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest
from serving import free_port, until

from student.student import load_student

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = {"aggregator", "fairpate", "student", "teachers"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # What pip asks of the build backend, without pip.
    script = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    # A build folder of its own: setuptools would pack what an earlier build left in the checkout's.
    settings = folder / "settings.cfg"
    settings.write_text(f"[build]\nbuild_base = {folder / 'build'}\n", encoding="utf-8")
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(settings)}
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, timeout=240, env=environment, cwd=ROOT, capture_output=True)  # noqa: S603 - our own interpreter and arguments
    (wheel,) = folder.glob("fairpate-*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel_names(wheel):
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """A command that runs a program of an environment with the wheel and the libraries of this one, without ours."""
    folder = tmp_path_factory.mktemp("environment")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    apart = alone | {"PYTHONPATH": str(ROOT / "tests" / "without_graphs"), "FAIRPATE_DATA": ""}

    def run(*words, cwd=folder, start=subprocess.run):
        environment = apart | {"FAIRPATE_STATE": str(cwd / "state")}
        command = [folder / "bin" / words[0], *words[1:]]
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return start(command, cwd=cwd, env=environment, **given)

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)  # noqa: S603
    libraries = run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(libraries, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True, env=alone)  # noqa: S603
    return run


# Commands one after another in the process of a program, which imports torch once.
IN_TURN = """
import sys
from fairpate.cli import main

for command in sys.argv[1:]:
    print("$", command)
    sys.argv = ["fairpate", *command.split(" ")]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
"""

# The example that `fairpate new` wrote, with one cell of each method, less training and no Ray.
FEWER_CELLS = """
sys.argv = ["compare_families.py"]
sys.path.insert(0, "compared")
import compare_families

compare_families.SWEEP["data_sets"]["color_digits"]["grid"]["target.epsilon"] = [5]
for method in compare_families.SWEEP["methods"].values():
    method["grid"] = {field: values[:1] for field, values in method.get("grid", {}).items()}
compare_families.SWEEP["settings"] = {"dp_sgd": {"epochs": 4, "batch_size": 200}, "teachers": {"fit": {"epochs": 1}}}
compare_families.SWEEP["ray"] = {"num_actors": 0}
compare_families.main()
"""


SPECIFY = "specify --epsilon 1 --disparity 0.1 --frontier runs/demo/results.parquet --json"


@pytest.fixture(scope="session")
def shown(installed, tmp_path_factory):
    """The folder in which one process did what README shows, and what each command printed."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "predictions.csv").write_text("sex,label,prediction\n" + "f,yes,no\nm,yes,yes\n" * 50, encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    made = f"import fairpate, student\nassert {str(ROOT)!r} not in fairpate.__file__ + student.__file__\n"
    made += "import numpy as np; X = np.random.default_rng(0).normal(size=(300, 3)); y = (X[:, 0] > 0).astype(int)\n"
    made += "pool, X_test, y_test = X[:200] + 0.01, X, y; groups = np.arange(300) % 2\n"
    quick = "--set methods=[weighted_votes] --set seeds=[0] --set ray.num_actors=0"
    quick += ' --set data_sets={"color_digits":{"file":"color_digits.yaml"}} --set settings.student.fit.epochs=20'
    commands = [
        "demo --json",
        "demo",
        "ledger total --json",
        SPECIFY,
        "--version",
        "new mine",
        "run --data mine/data.yaml --epsilon 1 --out own",
        f"compare --example quick {quick}",
        "new compared --example compare-families",
        "new hospitals --example three-hospitals",
        "assess predictions.csv --group sex --label label",
        "card own",
        "audit own --canaries 300",
        "dossier own --for egress",
        "bundle own --out model.zip",
        "verify model.zip",
        "ledger total",
    ]
    done = installed("python", "-c", made + program + IN_TURN + FEWER_CELLS, *commands, cwd=folder)
    assert done.returncode == 0, done.stderr
    _, *printed = re.split(r"^\$ (.*)\n", done.stdout, flags=re.MULTILINE)
    return folder, dict(zip(printed[::2], printed[1::2], strict=True))


def answers(port):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/livez").is_success


def worded(text, names):
    """The words of a text: which method is best, and by how much, differs between runs."""
    return re.sub("|".join((r"\d[\d.,]*", *names)), "N", " ".join(text.split()))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_shows_what_the_runs_published(shown):
    folder, printed = shown
    shown, words = json.loads(printed["demo --json"]), printed["demo"]
    chosen, *names = shown["models"]
    assert names == ["residual_votes", "fairpate", "dp_sgd", "sgd, not private"]
    assert chosen == f"{shown['shown']}, may reject" == "residual_votes, may reject"
    assert all(0.9 < shown["models"][name]["epsilon"] <= 1 for name in (chosen, *names[:3]))
    assert shown["models"]["sgd, not private"]["epsilon"] is None
    assert shown["models"]["sgd, not private"]["disparity"] > 0.1
    found = (folder / "runs" / "demo" / "runs").glob("*-loans-*")
    answering = [path for path in found if "idp3: null" in (path / "config.yaml").read_text(encoding="utf-8")]
    runs = {path.name.split("-")[0]: path for path in answering}
    for name in names[:3]:
        metrics = json.loads((runs[name] / "public" / "metrics.json").read_text(encoding="utf-8"))
        statement = json.loads((runs[name] / "public" / "statement.json").read_text(encoding="utf-8"))
        assert shown["models"][name]["accuracy"] == metrics["accuracy"]
        assert (statement["unit"], statement["epsilon"]) == ("person", shown["models"][name]["epsilon"])
    # Without the marks of a quotation.
    readme = worded(README.replace("\n> ", "\n"), names)
    for sentence in shown["sentences"]:
        assert sentence in words
        assert worded(sentence, names) in readme, "README shows another sentence"
    # Number by number: README and the quick start show one run, and the noise of another moves its numbers a little.
    stored = json.loads((ROOT / "docs" / "results" / "demo.json").read_text(encoding="utf-8"))
    assert stored["rows"] == [*shown["models"]]
    for name, found in shown["models"].items():
        before = {of: values[0] for of, values in stored["cells"][name].items()}
        for of, most in {"epsilon": 1e-3, "accuracy": 0.02, "disparity": 0.08, "coverage": 0.03}.items():
            assert found[of] == before[of] or abs(found[of] - before[of]) < most, (name, of, found, before)
    for now, before in zip(shown["sentences"], stored["sentences"], strict=True):
        pairs = zip(*(map(float, re.findall(r"\d+(?:\.\d+)?", text)) for text in (now, before)), strict=True)
        assert all(abs(a - b) < (8 if max(a, b) > 2 else 0.08) for a, b in pairs), (now, before)
    totals = json.loads(printed["ledger total --json"])
    assert '"releases": 3' in printed["ledger total --json"], (
        "each private method releases once, also with a reject option or a second demo"
    )
    # What a choice costs is what the odometer says of the three together.
    (total,) = [each for each in totals["totals"] if each["releases"]]
    assert f"ε = {math.ceil(100 * total['epsilon']) / 100:.2f} (δ = 10⁻⁵)" in shown["sentences"][-1]
    public = (folder / shown["files"]["this model"]).parent
    assert load_student(public / "student.safetensors").card.idp3 is not None
    rejecting = json.loads((public / "metrics.json").read_text(encoding="utf-8"))
    assert shown["models"][chosen]["accuracy"] == rejecting["accuracy"]
    # The page of all models lets the reader choose as `specify` does: no other model keeps these limits.
    (answer,) = json.loads(printed[SPECIFY])["answers"]
    (met,) = answer["met"]
    assert (met["method"], met["disparity"]) == (shown["shown"], shown["models"][chosen]["disparity"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_readme_shows_works_from_the_wheel(installed, shown):
    folder, printed = shown
    quick_start = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    for line in re.search(r"```text\n(.*?)```", quick_start, re.DOTALL)[1].splitlines():
        name = line.strip().split("  ")[0]
        assert name in printed["demo"], f"the quick start shows another demo: {line}"
    began_s = time.monotonic()
    # Site key, plan, serve and join; of two hospitals, as a third does what the second does.
    done = installed("python", "hospitals/three_hospitals.py", "--sites", "2", "--out", "two", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_s < 300, "docs/sites.md: three hospitals in five minutes"
    together, alone = re.findall(r"([\d.]+)% at", done.stdout)
    assert "at epsilon 0.100" in done.stdout
    # One class has half of the visits. Most draws of the noise lead to some 84 %, one in 200 to 68 %; alone it is
    # less in nearly all, and no test should depend on a draw.
    assert float(together) > 55
    assert 0 <= float(alone) <= 100
    (run,), port = folder.glob("runs/demo/runs/fairpate-*"), free_port()
    service = installed("fairpate", "serve", run, "--port", str(port), cwd=folder, start=subprocess.Popen)
    try:
        until(lambda: answers(port), timeout_s=120)
        done = installed("fairpate", "query", f"http://127.0.0.1:{port}", "ask", "0:3", cwd=folder)
        assert done.returncode == 0, done.stderr
    finally:
        service.terminate()
        service.communicate(timeout=60)


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel_names):
    top_level = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES


def test_every_module_and_every_resource_is_in_the_wheel_and_no_other(wheel_names):
    tracked = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert tracked == {name for name in wheel_names if ".dist-info/" not in name}


def test_every_package_is_marked_as_typed(wheel_names):
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel_names)


DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "vl_convert": "vl-convert-python", "yaml": "pyyaml"}
# Of the libraries whose classes these are.
BROUGHT = {"starlette": "fastapi", "click": "typer", "pydantic_core": "pydantic"}


def statements(node):
    """All statements within ``node``, and not their expressions, which hold no import."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements(each)


def test_the_package_imports_what_it_declares_and_declares_what_it_imports():
    """A library that only an extra installs is imported inside a function, or in a module that is: postgres.py."""
    always, somewhere = set(), set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in statements(tree):
                named = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                named += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                found = {name.partition(".")[0] for name in named} - PACKAGES - set(sys.stdlib_module_names)
                somewhere |= found
                always |= found if node in tree.body else set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared, *extras = (
        {re.match(r"[\w-]+", words)[0] for words in each}
        for each in (project["dependencies"], *project["optional-dependencies"].values())
    )
    always, somewhere = (
        {DISTRIBUTIONS.get(name) or BROUGHT.get(name) or name.replace("_", "-") for name in each}
        for each in (always, somewhere)
    )
    assert always - {"psycopg"} <= declared <= somewhere
    assert len(declared) <= 22
    assert f"of which there are {len(declared)};" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    of_extras = set().union(*extras) | {"pandas"}  # which those have who ask for a frame
    assert {name for name in somewhere - declared if not any(each.startswith(name) for each in of_extras)} == set()


def test_the_declared_torch_range_admits_the_pinned_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_every_extra_bounds_ray_as_the_package_does():
    """Its insides are used: CONTRIBUTING.md."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [each for every in (project["dependencies"], *project["optional-dependencies"].values()) for each in every]
    bounds = {each.partition(">=")[2] for each in asked if re.match(r"ray\b", each)}
    assert bounds == {"2.60,<2.61"}
    assert "ray==2.60.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
