"""Centres of public records: who votes in which cell.

Two embeddings. ``components``: principal components of the pool (:mod:`fairpate.data.embedding`), of pictures those of
their oriented gradients. ``graph``: eigenvectors of the pool's graph of neighbours in those components
(:mod:`fairpate.data.neighbour_graph`).

What a record's prototype is depends on that record and on public ones, never on another private record. Shapes: N
records, M public ones, D components, E eigenvectors, K prototypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fairpate.config import ConfigError, EmbeddingConfig
from fairpate.data.embedding import Components
from fairpate.data.neighbour_graph import Embed, Floats, Graph, Nearness, largest_norm
from fairpate.later import sklearn, torch
from fairpate.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

EmbeddingName = Literal["components", "graph"]
_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Prototypes:
    """An embedding, its centres (K, D or E), and of every public record the coordinates and the prototype."""

    embed: Embed
    centres: Floats
    coordinates_MD: Floats
    prototype_M: IntArray

    @classmethod
    def of(cls, pool: Tensor, *, count: int, embedding: EmbeddingName, num_components: int, seed: int) -> Prototypes:
        """Of the public ``pool`` (M, ...). ConfigError for more prototypes than different public records."""
        plain = EmbeddingConfig(num_components=num_components, steps=0, pixels=None)
        embed: Embed = Components.of(pool, plain, evened=False)
        embedded = embed(pool).numpy()
        if embedding == "graph":
            embed = graph = Graph.of(pool, embed, seed=seed)
            embedded = graph.coordinates_ME
        different = len(np.unique(embedded, axis=0))
        if count > different:
            raise ConfigError(
                f"record_votes.num_prototypes: {count} of {different} places of public records; lower it, or raise "
                "data.num_public."
            )
        # From a public seed and public records: a run that is resumed finds the same prototypes.
        clusters = sklearn.cluster.KMeans(count, n_init=1, random_state=seed).fit(embedded)
        return cls(
            embed=embed,
            centres=clusters.cluster_centers_,
            coordinates_MD=embedded,
            prototype_M=clusters.labels_.astype(np.int64),
        )

    def nearest(self, x: Tensor) -> IntArray:
        """The prototype (N,) of every record of ``x`` (N, ...); a function of that record alone."""
        nearest = [np.zeros(0, dtype=np.int64)]
        nearness = Nearness.to(self.centres, radius=largest_norm(self.coordinates_MD))
        nearest += [nearness(self.embed(part).numpy()).argmax(axis=1) for part in torch.split(x, _AT_ONCE) if len(part)]
        return np.concatenate(nearest)
