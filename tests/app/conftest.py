import sys

import pytest

from fairpate.app import cli
from fairpate.config import load_config

SMALL = [
    "teachers.num_teachers=12",
    "teachers.fit.epochs=8",
    "teachers.fit.batch_size=16",
    "aggregator.num_queries=80",
    "aggregator.mechanism.threshold=6",
    "aggregator.mechanism.threshold_stddev_votes=3",
    "aggregator.mechanism.noise_stddev_votes=2",
    "aggregator.gate.min_count=10",
    "aggregator.noise=seeded",
    "student.fit.epochs=5",
    "ray.num_actors=1",
]


@pytest.fixture(scope="session")
def small_overrides():
    """A pipeline of seconds: as `--set` arguments."""
    return list(SMALL)


@pytest.fixture(scope="session")
def small_config():
    """The same as a configuration; further overrides and the folder are arguments."""

    def make(out, *overrides):
        return load_config(None, [*SMALL, *overrides, f"out={out}"])

    return make


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
