"""Colour digits, ColorMNIST and MNIST: the construction by hand, and its rates."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

from fairpate.config import DataConfig
from fairpate.data import DataError, Dataset, load_data
from fairpate.data.dataset import SourceFile, keyed_uniform
from fairpate.data.pictures import read_idx

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def whole(dataset: Dataset) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Names, x, y and z of all four splits, by name."""
    parts = list(dataset.splits.values())
    names = [name for part in parts for name in part.record_id]
    order = sorted(range(len(names)), key=names.__getitem__)
    x, y, z = (torch.cat([getattr(part, field) for part in parts])[order] for field in "xyz")
    return [names[i] for i in order], x, y, z


def assert_rate(hits: torch.Tensor, probability: float) -> None:
    assert stats.binomtest(int(hits.sum()), len(hits), probability).pvalue > 1e-4


def test_colour_is_hidden_where_it_is_no_feature() -> None:
    seen, unseen = (load_data(DataConfig(options={"colour_as_feature": visible})).private for visible in (True, False))
    assert unseen.record_id == seen.record_id
    assert torch.equal(unseen.z, seen.z)
    assert torch.equal(unseen.x, seen.x.amax(dim=1, keepdim=True))


def test_color_digits_are_sklearns_digits_in_one_channel() -> None:
    digits = load_digits()
    names, x, y, z = whole(load_data(DataConfig(name="color_digits")))
    assert names == [f"digit-{i:04d}" for i in range(1797)]
    assert x.dtype == torch.uint8
    assert x.shape == (1797, 2, 8, 8)
    assert y.tolist() == digits.target.tolist()
    ink = x[torch.arange(1797), z].double()
    assert torch.equal(ink, torch.from_numpy(digits.images * 255 / 16).round())
    assert (x[torch.arange(1797), 1 - z] == 0).all()


def test_who_changes_loaded_digits_changes_no_later_ones() -> None:
    first = load_data(DataConfig())
    kept = [part.clone() for part in whole(first)[1:]]
    for split in first.splits.values():
        for values in (split.x, split.y, split.z):
            values.fill_(0)
    assert all(map(torch.equal, whole(load_data(DataConfig()))[1:], kept))


def test_both_readings_of_color_digits_share_pixels_splits_and_flips() -> None:
    by_colour, by_label = (
        load_data(DataConfig(name="color_digits", options={"sensitive": reading})) for reading in ("colour", "label")
    )
    names, x, y, colour = whole(by_colour)
    other_names, other_x, _, label = whole(by_label)
    assert names == other_names
    assert torch.equal(x, other_x)
    assert [len(split) for split in by_colour.splits.values()] == [1200, 300, 97, 200]
    flipped = torch.from_numpy(keyed_uniform(names, seed=0, purpose="label flip") < 0.25)
    assert torch.equal(label, (y >= 5).long() ^ flipped.long())
    assert_rate(label != (y >= 5), 0.25)
    assert_rate(colour != label, 0.1)


def test_the_seed_draws_other_colours_and_another_division() -> None:
    first, second = (load_data(DataConfig(name="color_digits", seed=seed)) for seed in (0, 1))
    assert set(first.public.record_id) != set(second.public.record_id)
    assert not torch.equal(whole(first)[3], whole(second)[3])


def write_idx(path: Path, magic: int, shape: tuple[int, ...], content: bytes) -> None:
    header = struct.pack(f">{1 + len(shape)}I", magic, *shape)
    path.write_bytes(gzip.compress(header + content))


def test_idx_files_are_read_as_published(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / "images.gz", 2051, (3, 28, 28), pixels.tobytes())
    write_idx(tmp_path / "labels.gz", 2049, (3,), bytes([5, 0, 9]))
    assert np.array_equal(read_idx(SourceFile(path="images.gz"), tmp_path, dimensions=3), pixels)
    assert read_idx(SourceFile(path="labels.gz"), tmp_path, dimensions=1).tolist() == [5, 0, 9]
    with pytest.raises(DataError, match=r"labels\.gz: expected an idx file with magic number 2051, got 2049"):
        read_idx(SourceFile(path="labels.gz"), tmp_path, dimensions=3)


@pytest.fixture(scope="module")
def color_mnist(data_dir: Path) -> Dataset:
    """On the four published files."""
    return load_data(DataConfig(name="color_mnist", data_dir=data_dir))


@pytest.mark.slow
def test_teachers_see_the_first_39500_and_the_rest_comes_from_the_last_30000(color_mnist: Dataset) -> None:
    numbers = {
        name: [int(i.removeprefix("mnist-")) for i in split.record_id] for name, split in color_mnist.splits.items()
    }
    assert numbers["private"] == list(range(39_500))
    held_out = sorted(numbers["public"] + numbers["validation"] + numbers["test"])
    assert held_out == list(range(40_000, 70_000))
    assert [len(numbers[name]) for name in ("public", "validation", "test")] == [1000, 500, 28_500]


@pytest.mark.slow
def test_digits_and_ink_are_mnists(color_mnist: Dataset, data_dir: Path) -> None:
    content = gzip.decompress((data_dir / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    grey = np.frombuffer(content, np.uint8, offset=16).reshape(-1, 28, 28)
    labels = gzip.decompress((data_dir / "mnist" / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    private = color_mnist.private
    assert private.x.shape == (39_500, 2, 28, 28)
    assert bytes(private.y.tolist()) == labels[:39_500]
    assert np.array_equal(private.x.sum(dim=1, dtype=torch.int32).numpy(), grey[:39_500])
    assert (private.x.flatten(2).amax(dim=2).argmax(dim=1) == private.z).all()


@pytest.mark.slow
def test_flip_rates_and_sizes_are_the_authors(color_mnist: Dataset, data_dir: Path) -> None:
    config = DataConfig(name="color_mnist", data_dir=data_dir, options={"sensitive": "label"}, num_validation=0)
    by_label = load_data(config)
    assert [len(by_label.public), len(by_label.validation), len(by_label.test)] == [1000, 0, 29_000]
    assert by_label.private.record_id == color_mnist.private.record_id
    label, colour, digit = by_label.private.z, color_mnist.private.z, color_mnist.private.y
    assert_rate(label != (digit >= 5), 0.25)
    assert_rate(colour[:20_000] != label[:20_000], 0.2)
    assert_rate(colour[20_000:] != label[20_000:], 0.1)
    label_of = dict(zip(by_label.test.record_id, by_label.test.z.tolist(), strict=True))
    test_label = torch.tensor([label_of[name] for name in color_mnist.test.record_id])
    assert_rate(color_mnist.test.z != test_label, 0.9)


@pytest.mark.slow
def test_plain_mnist_is_divided_as_the_publisher_does_and_names_no_group(data_dir: Path) -> None:
    plain = load_data(DataConfig(name="mnist", data_dir=data_dir))
    content = gzip.decompress((data_dir / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((data_dir / "mnist" / "t10k-labels-idx1-ubyte.gz").read_bytes())[8:]
    assert plain.private.x.numpy().tobytes() == content[16:]
    names, _, y, _ = whole(replace(plain, private=plain.private.take([])))
    assert names == [f"mnist-{place:05d}" for place in range(60_000, 70_000)]
    assert bytes(y.tolist()) == labels
    assert [len(plain.public), len(plain.validation), len(plain.test)] == [9000, 0, 1000]
    assert plain.group_names == ("everyone",)
