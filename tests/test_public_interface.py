"""The public interface: what it names is there, is documented, and costs nothing before it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import fairpate

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", fairpate.__all__)
def test_every_public_name_is_there_with_a_contract_and_on_the_page(name):
    value = getattr(fairpate, name)
    if name != "__version__":
        assert value.__doc__
        assert f"`{name}" in PAGE


def test_other_names_are_no_part_of_it():
    with pytest.raises(AttributeError, match="no attribute 'run_pipeline'"):
        fairpate.run_pipeline  # noqa: B018


def test_importing_it_imports_nothing_heavy_and_configurations_of_all_methods_neither_torch_nor_ray():
    watched = (
        "import sys, fairpate\n"
        "assert not {'torch', 'ray', 'sklearn', 'numpy'} & set(sys.modules)\n"
        "from fairpate.methods.base import all_methods\n"
        "all_methods()\n"
        "assert not {'torch', 'ray', 'sklearn', 'httpx'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", watched], check=False, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stderr
