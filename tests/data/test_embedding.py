"""A public embedding: one record's coordinates, public records alone, nothing that moves with other records."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fairpate.data.embedding
from fairpate.config import DataConfig, EmbeddingConfig
from fairpate.data import load_data
from fairpate.data.dataset import DataError
from fairpate.data.embedding import Components, Embedding
from fairpate.data.registry import embedded

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def table(rows: int = 400, seed: int = 0) -> torch.Tensor:
    """A number, a column of two values, a column that is mostly 0, and one that never changes."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randn(rows, generator=generator)
    rare = torch.where(torch.rand(rows, generator=generator) < 0.9, 0.0, torch.rand(rows, generator=generator))
    return torch.stack([number, (number > 0).float(), rare, torch.ones(rows)], dim=1)


@pytest.fixture
def few_quantiles(monkeypatch):
    monkeypatch.setattr(fairpate.data.embedding, "_STEPS", 4)


@pytest.fixture
def few_pixels(monkeypatch):
    monkeypatch.setattr(fairpate.data.embedding, "_SIDE", 4)


@pytest.mark.usefixtures("few_quantiles")
def test_columns_of_many_values_are_compared_with_public_quantiles():
    components = Components.of(table(), EmbeddingConfig())
    assert components.column_K.tolist() == [0] * 4 + [2] * 5
    quantiles = components.thresholds_K[:4]
    assert torch.allclose(quantiles, torch.quantile(table()[:, 0], torch.tensor([0.2, 0.4, 0.6, 0.8])), atol=0.05)
    rare = table()[:, 2]
    assert components.thresholds_K[4] == rare[rare > 0].min()
    assert Components.of(table(), EmbeddingConfig(), plain=True).column_K.tolist() == []


@pytest.mark.usefixtures("few_quantiles")
def test_components_are_those_of_the_plain_features_scaled_by_the_root_of_their_spread():
    pool = table()
    embedding = components = Components.of(pool, EmbeddingConfig())
    column, threshold = components.column_K, components.thresholds_K
    plain = torch.cat([pool, (pool[:, column] >= threshold).float()], dim=1)
    spread = plain.std(dim=0, correction=0)
    scaled = (plain - plain.mean(dim=0)) / torch.where(spread > 0, spread, 1.0).sqrt()
    # A rotation: distances between records stay.
    torch.testing.assert_close(
        torch.cdist(embedding(pool), embedding(pool)), torch.cdist(scaled, scaled), atol=5e-3, rtol=0
    )
    few = Components.of(pool, EmbeddingConfig(num_components=2))
    torch.testing.assert_close(few(pool).abs(), embedding(pool)[:, :2].abs())


def test_a_few_long_vectors_keep_their_distances():
    """One component fewer than records holds all that they differ by."""
    pool = torch.randn(30, 200, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, 200)
    components = Components.of(pool, EmbeddingConfig(num_components=29), plain=True, parts=(200,))
    assert len(components.unit_E) == 29
    scaled, found = (pool - pool.mean(dim=0)) / components.root_F, components(pool)
    torch.testing.assert_close(torch.pdist(found), torch.pdist(scaled), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("few_pixels")
@pytest.mark.parametrize("kind", ["table", "pictures"])
def test_what_a_record_becomes_is_its_own_affair(kind, digits):
    """Other records before and beside it, however many, change nothing: bit by bit the same coordinates."""
    pool, private = (table(), table(3000, seed=1)) if kind == "table" else (digits.public.x, digits.private.x)
    embedding = Embedding.of(pool, EmbeddingConfig())
    full = embedding(private)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(0))
    assert torch.equal(embedding(private[order]), full[order])
    for part in (slice(0, 1), slice(5, 12), slice(1, None)):
        assert torch.equal(embedding(private[part]), full[part])
    assert len(embedding(private[:0])) == 0


@pytest.mark.usefixtures("few_pixels")
def test_private_records_do_not_enter_what_is_fitted(digits):
    config = EmbeddingConfig()
    whole = embedded(digits, config)
    fewer = embedded(dataclasses.replace(digits, private=digits.private.take(range(7))), config)
    assert torch.equal(whole.private.x[:7], fewer.private.x)
    assert torch.equal(whole.test.x, fewer.test.x)
    assert whole.kind == "tabular"
    assert len(whole.feature_names) == whole.private.x.shape[1] <= 220


def test_a_mirrored_picture_has_the_coordinates_of_the_picture(digits):
    embedding = Components.of(digits.public.x, EmbeddingConfig(mirrored=True))
    x = digits.private.x[:50]
    torch.testing.assert_close(embedding(x.flip(-1)), embedding(x), atol=1e-4, rtol=1e-4)
    plain = Components.of(digits.public.x, EmbeddingConfig())
    assert not torch.allclose(plain(x.flip(-1)), plain(x), atol=1e-2)


def test_pictures_may_be_told_by_their_edges_alone(digits):
    grey = digits.public.x.float().mean(dim=1, keepdim=True).expand_as(digits.public.x).to(torch.uint8)
    edges = Components.of(digits.public.x, EmbeddingConfig(), plain=True)
    assert edges.mean_F.shape == (900,)
    torch.testing.assert_close(edges(grey), edges(digits.public.x), atol=0.6, rtol=0.2)


@pytest.mark.usefixtures("few_pixels")
def test_it_is_part_of_the_configuration_of_the_data():
    config = DataConfig(options={"colour_as_feature": False}, embedding=EmbeddingConfig(num_components=30))
    dataset = load_data(config)
    assert dataset.embedding is not None
    assert dataset.public.x.shape[1] == 30 + 20
    lengths = dataset.public.x.square()
    torch.testing.assert_close(lengths[:, 30:].sum(dim=1), torch.full((300,), 16 * 0.2))
    assert lengths[:, :30].sum(dim=1).median() == pytest.approx(16 * 0.8, rel=1e-3)
    alone = load_data(config.model_copy(update={"embedding": EmbeddingConfig(num_components=30, graph_share=0.0)}))
    assert alone.public.x.shape[1] == 30
    assert dataset.public.x.dtype == torch.float32


@pytest.mark.parametrize("pool", [table()[:1], torch.full((5, 3), torch.nan)])
def test_a_pool_that_cannot_be_embedded_is_named(pool):
    with pytest.raises(DataError, match=r"data\.num_public: an embedding needs two public records or more"):
        Components.of(pool, EmbeddingConfig())
