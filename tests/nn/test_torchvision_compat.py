"""Importing torchvision beside a CPU-only torch."""

import subprocess
import sys

import pytest

from fairpate.encoders import prepare_torchvision
from fairpate.types import UsageError

pytestmark = pytest.mark.xdist_group("torchvision")


@pytest.mark.slow  # in the process of other tests tests/pretrained.py imports it in the same way
def test_torchvision_imports_in_a_fresh_process() -> None:
    script = (
        "from fairpate.encoders import prepare_torchvision as prepare; prepare(); prepare();"
        "from torchvision import transforms; from torchvision.models import resnet18; print(resnet18 is not None)"
    )
    done = subprocess.run(  # noqa: S603 (our own interpreter and script)
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


def test_without_torchvision_the_extra_that_has_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UsageError, match=r"resnet18, .* need torchvision.*pip install 'fairpate\[backbones\]'"):
        prepare_torchvision.__wrapped__()
