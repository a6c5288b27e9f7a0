"""Where records lie for a search of neighbours: whole coordinates, a function of each record alone, to the last digit.

The embeddings are those of :mod:`fairpate.methods.prototypes`, of public records alone: principal components, and the
place in the pool's graph of neighbours. Both come from exact sums (:mod:`fairpate.data.embedding`); here each
coordinate is rounded to whole steps, of which distances are exact too.

Shapes: N records, M public ones, D or E coordinates.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fairpate.config import ConfigError, EmbeddingConfig
from fairpate.data import Split
from fairpate.data.embedding import Components
from fairpate.data.neighbour_graph import Embed, Graph
from fairpate.later import sklearn
from fairpate.methods.prototypes import EmbeddingName
from fairpate.types import IntArray
from teachers.neighbours import LARGEST_COORDINATE, MOST_COORDINATES, Coordinates

_AT_ONCE = 1024
_STEPS = 2**15
"""Of the pool's largest coordinate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """An embedding in whole steps; what lies far outside the pool is moved to a border."""

    embed: Embed
    steps: float

    @classmethod
    def of(cls, pool: Tensor, *, embedding: EmbeddingName, num_components: int, seed: int) -> Places:
        """Of the public ``pool`` (M, ...); ``seed`` starts the search for the graph's eigenvectors."""
        plain = EmbeddingConfig(num_components=min(num_components, MOST_COORDINATES), steps=0, pixels=None)
        embed: Embed = Components.of(pool, plain, evened=False)
        if embedding == "graph":
            embed = Graph.of(pool, embed, seed=seed)
        largest = max(float(embed(part).abs().max()) for part in torch.split(pool, _AT_ONCE))
        return cls(embed=embed, steps=_STEPS / (largest or 1.0))

    def __call__(self, x: Tensor) -> Coordinates:
        """Coordinates (N, D or E) of records (N, ...)."""
        parts = [self.embed(part).double().numpy() for part in torch.split(x, _AT_ONCE)]
        # A private record may lie far outside the pool, where sums of squares would no longer be exact.
        whole = np.clip(np.rint(np.concatenate(parts) * self.steps), -LARGEST_COORDINATE, LARGEST_COORDINATE)
        return whole.astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Public records that lie together: the one nearest to each centre (K,), and the cluster of each record (M,)."""

    typical_K: IntArray
    cluster_M: IntArray

    @classmethod
    def of(cls, coordinates_MD: Coordinates, count: int, *, seed: int) -> Clusters:
        """By k-means. ConfigError for more clusters than places."""
        places = len(np.unique(coordinates_MD, axis=0))
        if count > places:
            raise ConfigError(
                f"aggregator.num_queries: {count} clusters of public records that lie in {places} places; lower it, or "
                "raise data.num_public."
            )
        # From public records and a public seed: every stage of a run finds the same clusters.
        found = sklearn.cluster.KMeans(count, n_init=1, random_state=seed).fit(coordinates_MD.astype(np.float64))
        cluster_M = found.labels_.astype(np.int64)
        squared_M = np.square(coordinates_MD - found.cluster_centers_[cluster_M]).sum(axis=1)
        # Among a cluster's own: another's may lie nearer to its centre.
        nearest_first = np.lexsort((squared_M, cluster_M))
        _, first_K = np.unique(cluster_M[nearest_first], return_index=True)
        return cls(typical_K=nearest_first[first_K], cluster_M=cluster_M)


@dataclass(frozen=True)
class Pool:
    """Public records, equal in any order: as queries they are another order than the data set has."""

    digest: bytes
    x: Tensor = field(compare=False)

    @classmethod
    def of(cls, public: Split) -> Pool:
        """Of the public records."""
        in_order = np.argsort(np.array(public.record_id))
        return cls(hashlib.blake2b(public.x.numpy()[in_order].tobytes()).digest(), public.x)


# A pool of thousands takes a minute to embed, and a run asks for it at each stage.
@lru_cache(maxsize=1)
def places_of(pool: Pool, embedding: EmbeddingName, num_components: int, seed: int) -> Places:
    """As :meth:`Places.of`, once for a pool."""
    return Places.of(pool.x, embedding=embedding, num_components=num_components, seed=seed)


@lru_cache(maxsize=1)
def clusters_of(pool: Pool, rows: bytes, places: Places, count: int, seed: int) -> Clusters:  # noqa: ARG001 - a key
    """By row of the pool, in the order that ``rows`` is a digest of."""
    return Clusters.of(places(pool.x), count, seed=seed)
