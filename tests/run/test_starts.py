"""Which libraries a command does not import: a second each, for a command that trains, draws and prices nothing."""

import json
import os
import subprocess
import sys

import pytest
from small_runs import run

LIBRARIES = ("torch", "torchvision", "sklearn", "scipy.stats", "pandas", "matplotlib", "dp_accounting", "ray", "onnx")
WATCHED = """
import importlib, json, os, sys
import sitecustomize
sys.meta_path.remove(sitecustomize.WithoutPandas)
from fairpate.cli import main

def ended(words):
    if words[0] == "import":
        return importlib.import_module(words[1]) and 0
    sys.argv = ["fairpate", *words]
    try:
        main()
    except SystemExit as leaving:
        return leaving.code
    return 0

LIBRARIES, commands = json.loads(sys.argv[1])
report = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for words in commands:
    told = [ended(words), *(name for name in LIBRARIES if name in sys.modules)]
    print(json.dumps(told), file=report, flush=True)
"""
pytestmark = [pytest.mark.usefixtures("light_runs"), pytest.mark.slow]  # a process that runs all these commands
PRICES = {"scipy.stats"}
RUNS = {  # one process runs them in this order, so each may find what those before it imported
    "--help": set(),
    "new project": set(),
    "data list": set(),
    "card RUN": set(),
    "bundle RUN": set(),
    "tokens add RUN ada": set(),
    "tokens list RUN": set(),
    "ledger audit RUN": set(),
    "ledger backup RUN copy.sqlite": set(),
    "ledger show RUN": PRICES,
    "verify RUN/bundle.zip": {"torch", "scipy.stats", "pandas"},  # builds the model; pyarrow looks for pandas
    "run RUN/config.yaml --out without-actors": {*LIBRARIES} - {"ray", "dp_accounting"},
}
REFUSED = ("query --ids 0:2 ask 1", "serve nowhere")  # as far as their own modules go
MODULES = (
    *("fairpate.config", "fairpate.data", "fairpate.privacy.accountant", "fairpate.methods.base"),
    *("fairpate.methods.own_votes", "aggregator.client", "aggregator.service.actor", "fairpate.methods.dp_sgd"),
    *("fairpate.methods.dp_fermi", "fairpate.methods.f_ld", "fairpate.methods.dp_fair_learning"),
    *("fairpate.methods.raco_dp", "fairpate.run.jobs", "teachers.ray_pool"),
)


@pytest.fixture(scope="module")
def started(small_config, tmp_path_factory):
    """Code of each command, and the libraries imported by its end, in one process: first by those that need none."""
    root = tmp_path_factory.mktemp("starts")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(root / "state"))
        run(small_config(root / "run", "noise=os_entropy"))
    words = [["import", module] for module in MODULES]
    words += [[word.replace("RUN", "run") for word in each.split()] for each in (*REFUSED, *RUNS)]
    ended = subprocess.run(  # noqa: S603
        [sys.executable, "-c", WATCHED, json.dumps([LIBRARIES, words])],
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1", "FAIRPATE_STATE": str(root / "state")},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    return dict(zip((*MODULES, *REFUSED, *RUNS), told, strict=True)), ended.stderr


@pytest.mark.parametrize("command", RUNS)
def test_a_command_imports_only_what_it_uses(started, command):
    code, *libraries = started[0][command]
    assert code == 0, started[1]
    assert set(libraries) <= RUNS[command]


@pytest.mark.parametrize("name", [*REFUSED, *MODULES])
def test_a_client_a_service_and_a_configuration_start_without_them(started, name):
    code, *libraries = started[0][name]
    assert code == (2 if name in REFUSED else 0), started[1]
    assert not libraries
