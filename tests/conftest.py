"""Shared by all tests: one thread of torch, and one Ray for the whole session."""

from collections.abc import Iterator

import pytest
import torch

from fairpate.config import RayConfig
from teachers.cluster import start_ray

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray, started by the first test that asks for it and shut down with the session."""
    with start_ray(RayConfig()):
        yield
