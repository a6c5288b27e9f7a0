"""Where real files lie, and a picture cache that belongs to the test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = os.environ.get("FAIRPATE_DATA")
    if not folder:
        pytest.skip("FAIRPATE_DATA is not set: no publishers' files on this machine")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def _own_picture_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRPATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
