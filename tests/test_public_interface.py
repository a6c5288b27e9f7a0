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


def test_importing_it_imports_nothing_heavy():
    watched = "import sys, fairpate; sys.exit(bool({'torch', 'ray', 'sklearn', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", watched], check=False).returncode == 0  # noqa: S603
