"""Oriented gradients: known edges, mirror images, contrast, and no record that depends on another."""

from __future__ import annotations

import pytest
import torch

from fairpate.data.gradients import NUM_CELLS, NUM_DIRECTIONS, feature_names, oriented_gradients


def grids(pixels: torch.Tensor) -> torch.Tensor:
    """(N, directions, rows, columns)."""
    return oriented_gradients(pixels).reshape(-1, NUM_DIRECTIONS, NUM_CELLS, NUM_CELLS)


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.randint(0, 256, (7, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def ramp(degrees: float) -> torch.Tensor:
    """A picture whose brightness grows in one direction."""
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    angle = torch.deg2rad(torch.tensor(degrees))
    level = 128 + 4.4 * ((columns - 20) * torch.cos(angle) + (rows - 20) * torch.sin(angle))
    return level.round().to(torch.uint8).expand(1, 1, 40, 40)


@pytest.mark.parametrize("degrees", [0.0, 40.0, 100.0, 220.0])
def test_a_slope_is_counted_in_its_direction_and_in_that_of_its_opposite(degrees: float) -> None:
    inner = grids(ramp(degrees))[0, :, 2:-2, 2:-2].mean(dim=(1, 2))
    assert int(inner.argmax()) == round(degrees % 180 / 20)
    assert inner.max() > 0.7 * inner.sum()


def test_a_mirrored_picture_has_mirrored_cells_and_directions(pictures: torch.Tensor) -> None:
    mirrored = grids(pictures.flip(-1))
    opposite = [(-d) % NUM_DIRECTIONS for d in range(NUM_DIRECTIONS)]
    torch.testing.assert_close(mirrored, grids(pictures)[:, opposite].flip(-1), rtol=1e-4, atol=1e-4)


def test_contrast_hardly_matters_and_a_flat_picture_has_no_edges(pictures: torch.Tensor) -> None:
    faint = oriented_gradients((pictures // 2 // 2) * 2)
    strong = oriented_gradients((pictures // 4) * 4)
    torch.testing.assert_close(faint, strong, rtol=0.2, atol=0.02)
    assert not oriented_gradients(torch.full((2, 1, 32, 32), 90, dtype=torch.uint8)).any()


def test_a_record_is_described_by_itself_alone(pictures: torch.Tensor) -> None:
    together = oriented_gradients(pictures)
    for picture, described in zip(pictures, together, strict=True):
        torch.testing.assert_close(oriented_gradients(picture[None])[0], described)
    assert together.shape == (7, len(feature_names()))
    assert oriented_gradients(pictures[:0]).shape == (0, len(feature_names()))
