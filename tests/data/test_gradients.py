"""Oriented gradients: known edges, mirror images, contrast, and no record that depends on another."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from fairpate.data.features import feature_names
from fairpate.oriented_gradients import NUM_CELLS, NUM_DIRECTIONS, angles, oriented_gradients


def grids(pixels: torch.Tensor) -> torch.Tensor:
    """(N, directions, rows, columns)."""
    return oriented_gradients(pixels).reshape(-1, NUM_DIRECTIONS, NUM_CELLS, NUM_CELLS)


@pytest.fixture
def pictures() -> torch.Tensor:
    return torch.randint(0, 256, (7, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


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
        assert torch.equal(oriented_gradients(picture[None])[0], described)
    assert together.shape == (7, len(feature_names()))
    assert oriented_gradients(pictures[:0]).shape == (0, len(feature_names()))


@pytest.mark.parametrize("side", [8, 17, 28])
def test_its_place_among_others_and_the_threads_do_not_move_a_digit(side: int, one_thread_again: None) -> None:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randint(0, 256, (101, 2, side, side), dtype=torch.uint8, generator=generator)
    order = torch.randperm(101, generator=generator)
    some = torch.arange(0, 101, 5)
    alone = torch.cat([oriented_gradients(pictures[row][None]) for row in some])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        together = oriented_gradients(pictures[order])
        assert torch.equal(together[order.argsort()][some], alone)
        for part in (slice(0, 1), slice(5, 12), slice(1, None)):
            assert torch.equal(oriented_gradients(pictures[order][part]), together[part])


def test_angles_are_those_of_the_arctangent() -> None:
    across, down = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    expected = torch.atan2(down.double(), across.double()).remainder(math.pi)
    torch.testing.assert_close(angles(across, down).double(), expected, rtol=0, atol=5e-7)
    edges = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0], [-1.0, 0.0]])
    halves = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.75, 0.0])
    torch.testing.assert_close(angles(*edges.T), math.pi * halves)
    assert angles(torch.zeros(1), torch.zeros(1)).isfinite().all()
