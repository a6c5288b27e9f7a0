"""Vectors of pictures that Ray workers compute in parts are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretrained import small_network, write_pictures

from fairpate import encoders, load_data
from fairpate.config import RayConfig, WeightsConfig
from fairpate.types import heard_by
from teachers import vectors
from teachers.ray_pool import open_pool
from teachers.vectors import vectors_on

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.slow  # it starts Ray
@pytest.mark.usefixtures("ray_session")
def test_workers_compute_parts_with_the_same_bits_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(small_network().state_dict(), tmp_path / "small.pth")
    weights, declaration = WeightsConfig.model_validate(str(tmp_path / "small.pth")), write_pictures(tmp_path)
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "one"))
    alone = load_data(declaration, weights=weights)
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "several"))
    monkeypatch.setattr(encoders, "FEWEST_FOR_WORKERS", 10)
    monkeypatch.setattr(vectors, "_SENT", 2)
    seen: list[tuple[int, int]] = []
    with (
        heard_by(lambda done, total: seen.append((done, total))),
        vectors_on(lambda: open_pool(RayConfig(num_actors=2, num_cpus=0.5))),
    ):
        parted = load_data(declaration, weights=weights)
    for name, split in alone.splits.items():
        assert torch.equal(parted.splits[name].x, split.x), name
    assert set(range(2, 19, 2)) <= {done for done, total in seen if total == 18}
    # From the cache no worker is needed.
    with vectors_on(lambda: pytest.fail("workers were started")):
        assert torch.equal(load_data(declaration, weights=weights).private.x, alone.private.x)
