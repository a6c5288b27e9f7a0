"""Importing torchvision beside a CPU-only torch."""

import subprocess
import sys

import pytest


@pytest.mark.slow  # in the process of other tests tests/pretrained.py imports it in the same way
def test_torchvision_imports_in_a_fresh_process() -> None:
    script = (
        "from fairpate.nn.models import prepare_torchvision as prepare; prepare(); prepare();"
        "from torchvision import transforms; from torchvision.models import resnet18; print(resnet18 is not None)"
    )
    done = subprocess.run(  # noqa: S603 (our own interpreter and script)
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr
