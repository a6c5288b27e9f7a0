"""`fairpate version` shows what this machine has, and what has to be fixed."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fairpate import __version__
from fairpate.terminal import MODULES

pytestmark = [pytest.mark.xdist_group("torchvision"), pytest.mark.usefixtures("light_runs")]  # imports every extra

ROOT = Path(__file__).parents[2]


def test_it_tells_what_this_machine_has(fairpate, monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FAIRPATE_DATA", str(tmp_path))
    code, out, _ = fairpate("version", "--json")
    told = {finding["name"]: finding["value"] for finding in json.loads(out)["findings"]}
    assert code == 0
    assert told["fairpate"].startswith(__version__)
    # Of a build for a GPU torch's own version may say more, as in 2.11.0+cu130.
    assert told["torch"] in {torch.__version__, torch.__version__.split("+")[0]}
    assert told["cpus"] == str(os.cpu_count())
    assert (told["data folder"], told["state folder"]) == (str(tmp_path), str(tmp_path / "state"))
    assert {"gpus", "torch threads", "ray cluster", "disk", "extra onnx", "extra postgresql"} <= told.keys()
    assert not (tmp_path / "state").exists()


def test_what_does_not_work_is_named_with_its_remedy(fairpate, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "file"))
    monkeypatch.setenv("FAIRPATE_DATA", str(tmp_path / "nowhere"))
    code, out, _ = fairpate("version")
    assert code == 1
    assert "fix: FAIRPATE_STATE" in out
    assert f"fix: FAIRPATE_DATA: {tmp_path / 'nowhere'} is not a folder" in out


def test_an_extra_that_is_not_installed_says_how_to_install_it(fairpate, monkeypatch):
    monkeypatch.setitem(MODULES, "onnx", ("no_such_package.part",))
    code, out, _ = fairpate("version", "--json")
    told = {finding["name"]: finding for finding in json.loads(out)["findings"]}["extra onnx"]
    assert (code, told["level"]) == (0, "ok")
    assert "pip install 'fairpate[onnx]'" in told["value"]
    assert "no_such_package" in told["value"]


@pytest.mark.parametrize(
    ("extra", "package", "module"),
    [
        pytest.param("serve", "grpc", "ray.serve", marks=pytest.mark.slow),
        ("postgresql", "psycopg", "psycopg"),
        pytest.param("onnx", "onnxscript", "onnxscript", marks=pytest.mark.slow),
        pytest.param("traces", "opentelemetry", "opentelemetry.sdk", marks=pytest.mark.slow),
    ],
)
def test_an_extra_whose_packages_are_missing_is_not_installed(extra, package, module):
    """Ray brings `ray.serve` without what it needs: a module that is found says nothing of one that works."""
    assert "pip install" in fault_without(package, extra)


def test_an_extra_that_is_installed_and_broken_has_to_be_fixed(fairpate, monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("raise ImportError('no pq wrapper available')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MODULES, "postgresql", ("broken_package",))
    code, out, _ = fairpate("version", "--json")
    told = {finding["name"]: finding for finding in json.loads(out)["findings"]}["extra postgresql"]
    assert (code, told["level"]) == (1, "fix")
    assert "no pq wrapper available" in told["value"]


def test_every_extra_that_a_user_installs_is_looked_at():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert MODULES.keys() == declared.keys() - {"dev", "docs"}


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{package}":
            raise ModuleNotFoundError("No module named {package}", name="{package}")

sys.meta_path.insert(0, Missing())
from fairpate.terminal import extra_fault
print((fault := extra_fault("{extra}")) and fault.words)
"""


def fault_without(package, extra):
    """What keeps the extra from use in a process that cannot import ``package``."""
    ended = subprocess.run(  # noqa: S603
        [sys.executable, "-c", WITHOUT.format(package=package, extra=extra)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ended.stdout
