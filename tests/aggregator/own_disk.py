"""A script of a test in a mount namespace of its own, where it may fill or remount a disk that nobody else sees."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

IN_A_NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def told_beside_own_disk(script, disk):
    """The JSON that ``script`` prints. Its arguments are the folder ``disk`` to mount on, and two to import from."""
    try:
        subprocess.run([*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", disk], check=True, capture_output=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespaces for this user: {error}")
    tests = Path(__file__).parents[1]
    found = subprocess.run(  # noqa: S603
        [*IN_A_NAMESPACE, sys.executable, "-c", script, disk, tests, tests.parent],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)
