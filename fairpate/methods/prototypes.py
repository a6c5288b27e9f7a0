"""Embeddings of records and their centres, from public records alone: who votes in which cell.

Two embeddings. ``components``: principal components of the pool, a table's columns over the root of their spread, so
that neither rare values nor wide columns decide, pictures as oriented gradients (:mod:`fairpate.data.gradients`).
``graph``: the pool's neighbours in those components, and the leading eigenvectors of the graph that they make (Ng,
Jordan and Weiss 2001; diffusion maps, Coifman and Lafon 2006), which follow the shape of a class where distances alone
cut through it. Pictures are near when one is near a slightly turned, slanted, stretched or moved copy of the other.
Another record is the mean of its nearest public neighbours.

What a record's prototype is depends on that record and on public ones, never on another private record. Shapes: N
records, M public ones, V copies of each, D components, E eigenvectors, K prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from scipy.sparse.linalg import eigsh
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import pairwise_distances_argmin
from torch import Tensor
from torch.nn import functional

from fairpate.config import ConfigError
from fairpate.data.gradients import oriented_gradients
from fairpate.nn.models import scale_bytes
from fairpate.types import IntArray

Floats = npt.NDArray[np.float32]
Embedding = Callable[[Tensor], Floats]
EmbeddingName = Literal["components", "graph"]
_NEIGHBOURS, _VOTING_NEIGHBOURS, _EIGENVECTORS, _DIFFUSION = 6, 8, 20, 16
_AT_ONCE = 1024
_COPIES = (
    *((turn, 0.0, 1.0, 1.0, 0.0, 0.0) for turn in (0.0, -0.2, 0.2)),
    *((0.0, slant, 1.0, 1.0, 0.0, 0.0) for slant in (-0.25, 0.25)),
    *((0.0, 0.0, wide, high, 0.0, 0.0) for wide, high in ((0.85, 1.0), (1.18, 1.0), (1.0, 0.87), (1.0, 1.15))),
    *((0.0, 0.0, 1.0, 1.0, across, down) for across, down in ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1))),
)
"""Turn in radians, slant, width, height, and moves in half sides of the copies that a picture is compared with."""


@dataclass(frozen=True, kw_only=True)
class Prototypes:
    """An embedding, its centres (K, D or E), and of every public record the coordinates and the prototype."""

    embed: Embedding
    centres: Floats
    coordinates_MD: Floats
    prototype_M: IntArray

    @classmethod
    def of(cls, pool: Tensor, *, count: int, embedding: EmbeddingName, num_components: int, seed: int) -> Prototypes:
        """Of the public ``pool`` (M, ...). ConfigError for more prototypes than different public records."""
        embed: Embedding = Components.of(pool, num_components, seed=seed)
        embedded = embed(pool)
        if embedding == "graph":
            embed = Graph.of(pool, embed, seed=seed)
            embedded = embed.coordinates_ME
        different = len(np.unique(embedded, axis=0))
        if count > different:
            raise ConfigError(
                f"record_votes.num_prototypes: {count} of {different} places of public records; lower it, or raise "
                "data.num_public."
            )
        clusters = KMeans(count, n_init=1, random_state=seed).fit(embedded)
        return cls(
            embed=embed,
            centres=clusters.cluster_centers_,
            coordinates_MD=embedded,
            prototype_M=clusters.labels_.astype(np.int64),
        )

    def nearest(self, x: Tensor) -> IntArray:
        """The prototype (N,) of every record of ``x`` (N, ...); a function of that record alone."""
        nearest = [np.zeros(0, dtype=np.int64)]
        for part in torch.split(x, _AT_ONCE):
            # Full blocks only: how a row is rounded must not depend on how many other records there are.
            block = torch.cat([part, part.new_zeros(_AT_ONCE - len(part), *part.shape[1:])])
            nearest.append(pairwise_distances_argmin(self.embed(block), self.centres)[: len(part)])
        return np.concatenate(nearest)


@dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components of the pool's plain features (F)."""

    mean_F: Floats
    scale_F: Floats
    pca: PCA

    @classmethod
    def of(cls, pool: Tensor, num_components: int, *, seed: int) -> Components:
        """At most as many as the pool has."""
        plain_MF = plain_features(pool)
        spread_F = plain_MF.std(axis=0)
        scale_F = np.sqrt(np.where(spread_F > 0, spread_F, 1.0)) if pool.ndim == 2 else np.ones_like(spread_F)
        centred_MF = (plain_MF - plain_MF.mean(axis=0)) / scale_F
        pca = PCA(min(num_components, *centred_MF.shape), random_state=seed).fit(centred_MF)
        return cls(mean_F=plain_MF.mean(axis=0), scale_F=scale_F, pca=pca)

    def __call__(self, x: Tensor) -> Floats:
        """Coordinates (N, D) of records (N, ...)."""
        embedded_ND: Floats = self.pca.transform((plain_features(x) - self.mean_F) / self.scale_F)
        return embedded_ND


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Eigenvectors of the pool's graph of neighbours; other records lie where their neighbours are."""

    components: Embedding
    copies_VMD: list[Floats]
    coordinates_ME: Floats

    @classmethod
    def of(cls, pool: Tensor, components: Embedding, *, seed: int) -> Graph:
        """Of the public ``pool`` (M, ...)."""
        copies_VMD = [components(copy) for copy in _copies(pool)]
        found = [nearest_copies(part, copies_VMD, _NEIGHBOURS + 1) for part in _parts(copies_VMD[0])]
        near_MK, squared_MK = (np.concatenate(side) for side in zip(*found, strict=True))
        others = near_MK != np.arange(len(pool))[:, None]
        farthest_M1 = np.maximum(squared_MK.max(axis=1, keepdims=True), 1e-12)
        weights = np.where(others, np.exp(-2 * squared_MK / farthest_M1), 0.0)
        rows = np.repeat(np.arange(len(pool)), near_MK.shape[1])
        one_way = sparse.csr_matrix((weights.ravel(), (rows, near_MK.ravel())), shape=(len(pool),) * 2)
        adjacency = one_way.maximum(one_way.T)
        root_M = np.sqrt(np.asarray(adjacency.sum(axis=1)).ravel())
        scale = sparse.diags(1 / root_M)
        start = np.random.default_rng(seed).uniform(size=len(pool))
        values, vectors = eigsh(scale @ adjacency @ scale, k=min(_EIGENVECTORS, len(pool) - 1), which="LA", v0=start)
        diffused = vectors / root_M[:, None] * values**_DIFFUSION
        norms = np.linalg.norm(diffused, axis=1, keepdims=True)
        coordinates_ME = (diffused / np.maximum(norms, 1e-12)).astype(np.float32)
        return cls(components=components, copies_VMD=copies_VMD, coordinates_ME=coordinates_ME)

    def __call__(self, x: Tensor) -> Floats:
        """Coordinates (N, E) of records (N, ...)."""
        near, _ = nearest_copies(self.components(x), self.copies_VMD, _VOTING_NEIGHBOURS)
        mean: Floats = self.coordinates_ME[near].mean(axis=1)
        return mean


def nearest_copies(embedded_ND: Floats, copies_VMD: list[Floats], count: int) -> tuple[IntArray, Floats]:
    """The ``count`` public records with a copy nearest to each record, and the squared distances: each (N, count)."""
    squared_NM = np.full((len(embedded_ND), len(copies_VMD[0])), np.inf, dtype=np.float32)
    for copy_MD in copies_VMD:
        part_NM = embedded_ND @ (-2 * copy_MD.T)
        part_NM += np.square(copy_MD).sum(axis=1)
        np.minimum(squared_NM, part_NM, out=squared_NM)
    near = np.argpartition(squared_NM, min(count, squared_NM.shape[1]) - 1, axis=1)[:, :count]
    lengths_N1 = np.square(embedded_ND).sum(axis=1, keepdims=True)
    return near, np.maximum(np.take_along_axis(squared_NM, near, axis=1) + lengths_N1, 0.0)


def plain_features(x: Tensor) -> Floats:
    """A table as it is; pictures as the roots of their oriented gradients, which tames a few strong edges. (N, F)."""
    plain_NF: Floats = (oriented_gradients(x).sqrt() if x.ndim == 4 else scale_bytes(x).flatten(1)).float().numpy()
    return plain_NF


def _copies(pool: Tensor) -> Iterator[Tensor]:
    """The pool, and for pictures the pool as every other of ``_COPIES`` shows it."""
    if pool.ndim != 4:
        yield pool
        return
    for turn, slant, wide, high, across, down in _COPIES:
        cosine, sine = math.cos(turn), math.sin(turn)
        matrix = torch.tensor(
            [[cosine / wide, (slant - sine) / wide, across], [sine / high, cosine / high, down]], dtype=torch.float32
        )
        shown = []
        for part in torch.split(pool, _AT_ONCE):
            grid = functional.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
            shown.append(functional.grid_sample(part.float(), grid, align_corners=False))
        yield torch.cat(shown)


def _parts(rows: Floats) -> Iterator[Floats]:
    return (rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE))
