"""A graph of public neighbours, and where other records lie in it.

The pool's records are joined to those that are near in some components, and the leading eigenvectors of the graph
that they make (Ng, Jordan and Weiss 2001; diffusion maps, Coifman and Lafon 2006) follow the shape of a class where
distances alone cut through it. Pictures are near when one is near a slightly turned, slanted, stretched or moved copy
of the other. Another record is the mean of its nearest public neighbours.

Shapes: N records, M public ones, V copies of each, D components, E eigenvectors, K rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import scipy

from fairpate.later import functional, torch
from fairpate.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

Embed = Callable[["Tensor"], "Tensor"]
Floats = npt.NDArray[np.float32]
_NEIGHBOURS, _VOTING_NEIGHBOURS, _EIGENVECTORS, _DIFFUSION = 6, 8, 20, 16
_AT_ONCE = 1024
_LARGEST_NORM = 2.0**11  # products of two such rows stay below 2^23, where float32 is exact
_COPIES = (
    *((turn, 0.0, 1.0, 1.0, 0.0, 0.0) for turn in (0.0, -0.2, 0.2)),
    *((0.0, slant, 1.0, 1.0, 0.0, 0.0) for slant in (-0.25, 0.25)),
    *((0.0, 0.0, wide, high, 0.0, 0.0) for wide, high in ((0.85, 1.0), (1.18, 1.0), (1.0, 0.87), (1.0, 1.15))),
    *((0.0, 0.0, 1.0, 1.0, across, down) for across, down in ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1))),
)
"""Turn in radians, slant, width, height, and moves in half sides of the copies that a picture is compared with."""


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """How near rows are to public ``others``: e . c - |c|^2 / 2, largest where the distance is least, exactly.

    Both are rounded to whole numbers, of at most 2^23 in every sum of their products: then a row's values depend on no
    other row (:mod:`fairpate.data.embedding`), and rows that are equally near stay so.
    """

    scale: float
    others_KD: Floats
    half_squares_K: Floats

    @classmethod
    def to(cls, others_KD: Floats, *, radius: float) -> Nearness:
        """``others_KD`` are public; no public row has a larger norm than ``radius``."""
        scale = _LARGEST_NORM / max(radius, 1e-30)
        whole_KD = np.rint(others_KD * scale).astype(np.float32)
        half_K = np.floor(np.square(whole_KD, dtype=np.float64).sum(axis=1) / 2)
        return cls(scale=scale, others_KD=whole_KD, half_squares_K=half_K.astype(np.float32))

    def __call__(self, rows_ND: Floats) -> Floats:
        """Of rows (N, D) to every other: (N, K)."""
        products_NK: Floats = self.whole(rows_ND) @ self.others_KD.T
        return products_NK - self.half_squares_K

    def whole(self, rows_ND: Floats) -> Floats:
        """Rows in whole numbers; one longer than all public ones is made as long."""
        scaled_ND = rows_ND.astype(np.float64) * self.scale
        lengths_N1 = np.linalg.norm(scaled_ND, axis=1, keepdims=True)
        whole_ND: Floats = np.rint(scaled_ND * np.minimum(1.0, _LARGEST_NORM / np.maximum(lengths_N1, 1e-30))).astype(
            "f4"
        )
        return whole_ND


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Eigenvectors of the pool's graph of neighbours; other records lie where their neighbours are."""

    components: Embed
    copies: list[Nearness]
    coordinates_ME: Floats

    @classmethod
    def of(cls, pool: Tensor, components: Embed, *, seed: int = 0) -> Graph:
        """Of the public ``pool`` (M, ...); ``seed`` starts the search for eigenvectors."""
        copies_VMD = [components(copy).numpy() for copy in _copies(pool)]
        radius = max(largest_norm(copy_MD) for copy_MD in copies_VMD)
        copies = [Nearness.to(copy_MD, radius=radius) for copy_MD in copies_VMD]
        found = [nearest_copies(part, copies, _NEIGHBOURS + 1) for part in _parts(copies_VMD[0])]
        near_MK, squared_MK = (np.concatenate(side) for side in zip(*found, strict=True))
        # A record is nearest to itself, in one copy or another.
        others = near_MK != np.arange(len(pool))[:, None]
        # Distances against each record's own neighbourhood: the pool is denser in some places than in others.
        farthest_M1 = np.maximum(squared_MK.max(axis=1, keepdims=True), 1e-12)
        weights = np.where(others, np.exp(-2 * squared_MK / farthest_M1), 0.0)
        rows = np.repeat(np.arange(len(pool)), near_MK.shape[1])
        one_way = scipy.sparse.csr_matrix((weights.ravel(), (rows, near_MK.ravel())), shape=(len(pool),) * 2)
        # Symmetric, though nearness to the nearest is not: eigenvectors are asked for below.
        adjacency = one_way.maximum(one_way.T)
        root_M = np.sqrt(np.asarray(adjacency.sum(axis=1)).ravel())
        scale = scipy.sparse.diags(1 / root_M)
        # Left to itself the search starts at random, and the signs of eigenvectors with it.
        start = np.random.default_rng(seed).uniform(size=len(pool))
        values, vectors = scipy.sparse.linalg.eigsh(
            scale @ adjacency @ scale, k=min(_EIGENVECTORS, len(pool) - 1), which="LA", v0=start
        )
        # So many steps of a random walk: what belongs to small eigenvalues fades.
        diffused = vectors / root_M[:, None] * values**_DIFFUSION
        norms = np.linalg.norm(diffused, axis=1, keepdims=True)
        coordinates_ME = (diffused / np.maximum(norms, 1e-12)).astype(np.float32)
        return cls(components=components, copies=copies, coordinates_ME=coordinates_ME)

    def __call__(self, x: Tensor) -> Tensor:
        """Coordinates (N, E) of records (N, ...)."""
        parts = []
        for part in torch.split(x, _AT_ONCE):
            near, _ = nearest_copies(self.components(part).numpy(), self.copies, _VOTING_NEIGHBOURS)
            parts.append(torch.from_numpy(self.coordinates_ME[near].mean(axis=1)))
        return torch.cat(parts)

    def at_once(self, rows_ND: Tensor) -> Tensor:
        """Coordinates (N, E) of few records whose components are ``rows_ND``: one graph of tensor operations."""
        scaled_ND = rows_ND.double() * self.copies[0].scale
        lengths_N1 = scaled_ND.square().sum(dim=1, keepdim=True).sqrt()
        whole_ND = (scaled_ND * (_LARGEST_NORM / lengths_N1.clamp(min=1e-30)).clamp(max=1.0)).round().float()
        # An exported graph holds the pool as a constant: in 16 bits, which whole numbers up to 2^11 fit.
        nearness = [
            whole_ND @ torch.from_numpy(copy.others_KD).short().T.float() - torch.from_numpy(copy.half_squares_K)
            for copy in self.copies
        ]
        near_NM = reduce(torch.maximum, nearness)
        near = near_NM.topk(min(_VOTING_NEIGHBOURS, near_NM.shape[1]), dim=1).indices
        return torch.from_numpy(self.coordinates_ME)[near].mean(dim=1)


def largest_norm(rows_ND: Floats) -> float:
    """Of public rows."""
    return float(np.linalg.norm(rows_ND, axis=1).max())


def nearest_copies(embedded_ND: Floats, copies: list[Nearness], count: int) -> tuple[IntArray, Floats]:
    """The ``count`` public records with a copy nearest to each record, and the squared distances: each (N, count)."""
    nearness_NM = copies[0](embedded_ND)
    for copy in copies[1:]:
        np.maximum(nearness_NM, copy(embedded_ND), out=nearness_NM)
    near = np.argpartition(-nearness_NM, min(count, nearness_NM.shape[1]) - 1, axis=1)[:, :count]
    lengths_N1 = np.square(copies[0].whole(embedded_ND)).sum(axis=1, keepdims=True)
    return near, np.maximum(lengths_N1 - 2 * np.take_along_axis(nearness_NM, near, axis=1), 0.0)


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
