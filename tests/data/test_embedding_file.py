"""An embedding on disk places records as it did before, and a file that is none says so."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fairpate.config import DataConfig, EmbeddingConfig
from fairpate.data import load_data
from fairpate.data.embedding import Embedding, EmbeddingFileError, read_embedding, save_embedding

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


@pytest.mark.parametrize("kind", ["table", "pictures"])
def test_what_was_stored_places_every_record_bit_for_bit(kind, tmp_path):
    digits = load_data(DataConfig(num_public=120))
    pool, others = digits.public.x, digits.test.x[:50]
    if kind == "table":
        pool, others = pool.flatten(1).float(), others.flatten(1).float()
    embedding = Embedding.of(pool, EmbeddingConfig(num_components=20))
    save_embedding(embedding, tmp_path / "embedding.safetensors")
    again = read_embedding(tmp_path / "embedding.safetensors")
    assert again.config == embedding.config
    assert again.record_shape == tuple(pool.shape[1:])
    for x in (pool, others, others[:1]):
        assert torch.equal(again(x), embedding(x))


def test_components_whose_sums_are_not_exact_are_refused(tmp_path):
    """With rounded sums a record's coordinates depend on its place, and what one record moves has no bound."""
    path, embedding = tmp_path / "embedding.safetensors", Embedding.of(torch.randn(60, 4), EmbeddingConfig())
    whole_FE, unit_E = embedding.components.whole_FE, embedding.components.unit_E
    wrong = [{"whole_FE": each} for each in (whole_FE + 0.25, whole_FE * 2.0**20, whole_FE * torch.nan)]
    for changes in (*wrong, {"unit_E": unit_E * torch.inf}):
        save_embedding(replace(embedding, components=replace(embedding.components, **changes)), path)
        with pytest.raises(EmbeddingFileError, match="whole numbers whose sums are exact, and finite scales"):
            read_embedding(path)


def test_a_graph_whose_distances_are_not_exact_is_refused(tmp_path):
    digits, path = load_data(DataConfig(num_public=120)), tmp_path / "embedding.safetensors"
    embedding = Embedding.of(digits.public.x, EmbeddingConfig(num_components=20))
    nearness = embedding.graph.nearness
    nearness = replace(nearness, half_squares_VK=nearness.half_squares_VK + 0.25)
    save_embedding(replace(embedding, graph=replace(embedding.graph, nearness=nearness)), path)
    with pytest.raises(EmbeddingFileError, match="distances are exact"):
        read_embedding(path)


def test_a_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "embedding.safetensors"
    embedding = Embedding.of(torch.arange(40.0).reshape(10, 4), EmbeddingConfig())
    save_embedding(embedding, path)
    whole = path.read_bytes()
    for content in (b"", whole[:50], whole[:-4], whole[:-4] + b"abcd"):
        path.write_bytes(content)
        with pytest.raises(EmbeddingFileError, match=f"{re.escape(str(path))}: not a readable embedding .* restore it"):
            read_embedding(path)
    save_file({"weights": torch.zeros(2)}, path)
    with pytest.raises(EmbeddingFileError, match="not a readable embedding"):
        read_embedding(path)
    path.unlink()
    with pytest.raises(EmbeddingFileError, match=r"embedding\.safetensors: no such file; give"):
        read_embedding(path)
