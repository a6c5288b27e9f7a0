import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"aggregator", "fairpate", "student", "teachers"}


@pytest.fixture(scope="session")
def wheel_names(tmp_path_factory):
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
    return zipfile.ZipFile(wheel).namelist()


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


def test_the_declared_torch_range_admits_the_pinned_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.9,<2.14" in project["dependencies"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
