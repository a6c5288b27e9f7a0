"""Shared by all tests: one thread of torch, one Ray for the whole session, and no file of the user's own."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from fairpate.config import RayConfig
from teachers.cluster import start_ray

torch.set_num_threads(1)
_STATE = tempfile.TemporaryDirectory(prefix="fairpate-state-")
os.environ["FAIRPATE_STATE"] = _STATE.name  # before Ray starts: its workers inherit it


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray, started by the first test that asks for it and shut down with the session."""
    with start_ray(RayConfig()):
        yield
