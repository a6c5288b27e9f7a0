import shutil
import sys
from functools import cache

import pytest
import typer.main
from each_method import train

from fairpate import cli
from fairpate.config import apply_override
from fairpate.methods.base import configured
from fairpate.run.folder import ShownRun, finished_run
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

SMALL = [
    "noise=seeded",
    "teachers.num_teachers=12",
    "teachers.fit.epochs=8",
    "teachers.fit.batch_size=16",
    "aggregator.num_queries=80",
    "aggregator.mechanism.threshold=6",
    "aggregator.mechanism.threshold_stddev_votes=3",
    "aggregator.mechanism.noise_stddev_votes=2",
    "aggregator.gate.min_count=10",
    "student.fit.epochs=5",
    "evaluation.least_cell=1",  # of ten classes: nearly every cell is small
    "ray.num_actors=0",
]
IDP3 = "student.idp3={max_disparity: 0.1, min_count: 10}"


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once():
    """Typer builds all commands anew for each that is given, which a process does once; tests give hundreds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def small_overrides():
    """A run of FairPATE of seconds: as `--set` arguments."""
    return list(SMALL)


@pytest.fixture(scope="session")
def small_config():
    """The same as a configuration of any method; further overrides and the folder are arguments."""
    values = {}
    for override in SMALL:
        apply_override(values, override)

    def make(out, *overrides, method=None):
        return configured(values, [*overrides, f"out={out}"], method=method)

    return make


@pytest.fixture(scope="session")
def made_once(small_config, shared, light):
    """One run of FairPATE with a reject option, which `finished` copies; its pages hold their charts."""
    with shared("finished") as root, light():
        config = small_config(root / "run", IDP3)
        made = root / "made"
        if not made.exists():
            run_method(config, Reporter(quiet=True))
            made.touch()
    return config


@pytest.fixture(scope="module")
def finished(made_once, tmp_path_factory):
    """That run, copied so that no module sees what another wrote: (folder, configuration)."""
    out = shutil.copytree(made_once.out, tmp_path_factory.mktemp("finished") / "run")
    return ShownRun(root=out), made_once.model_copy(update={"out": out})


@pytest.fixture(scope="session")
def trained(shared):
    """One run of each method, made when it is first asked for; only to be read."""

    def run_of(method):
        with shared(method) as folder:
            made = folder.with_suffix(".made")
            if not made.exists():
                train(folder, method)
                made.touch()
        return finished_run(folder)[0]

    return run_of


@pytest.fixture
def fairpate(monkeypatch, capsys, tmp_path):
    """Run the command line in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fairpate", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
