"""Fixed features of records, computed from public records alone: components, neighbours, gradients, prototypes.

An :class:`Embedding` is fitted to public records: principal components of the public pool (:class:`Components`), and
for pictures also the position in the pool's graph of neighbours (:class:`Graph`). A table with few public records is
completed by made-up ones, spread evenly over its declared values. :class:`Prototypes` are centres of public records, to
which records are assigned for votes.

The coordinates of a record depend on that record and on public ones alone, bit for bit, so that the embedding of
private records has no privacy cost. A floating-point product of matrices does not have that property: the rounding of a
row depends on its position among the others. So both factors are rounded to whole numbers so small that every sum of
products is exact.

Shapes: N records, M public ones, V copies of each, F plain features (before the rotation to components), K thresholds,
public rows or prototypes, D or E components, E eigenvectors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import scipy
from pydantic import Field
from safetensors import SafetensorError, safe_open

from fairpate import types
from fairpate.config import EMBEDDED_NORM, ConfigError, Count, EmbeddingConfig, Section
from fairpate.data.tables import Floats
from fairpate.files import arrays_digest, write_atomically
from fairpate.lazy import functional, safetensors_torch, sklearn, torch
from fairpate.oriented_gradients import gradient_histograms
from fairpate.types import DataError, IntArray, in_blocks

if TYPE_CHECKING:
    from torch import Tensor

Embed = Callable[["Tensor"], "Tensor"]
# Edges of a public record, neighbours that place another record, number of eigenvectors, steps of the random walk.
_NEIGHBOURS, _VOTING_NEIGHBOURS, _EIGENVECTORS, _DIFFUSION = 6, 8, 20, 16
_AT_ONCE = 1024
_LARGEST_NORM = 2.0**11  # products of two such rows stay below 2^23, where float32 is exact
_COPIES = (
    *((turn, 0.0, 1.0, 1.0, 0.0, 0.0) for turn in (0.0, -0.2, 0.2)),
    *((0.0, slant, 1.0, 1.0, 0.0, 0.0) for slant in (-0.25, 0.25)),
    *((0.0, 0.0, wide, high, 0.0, 0.0) for wide, high in ((0.85, 1.0), (1.18, 1.0), (1.0, 0.87), (1.0, 1.15))),
    *((0.0, 0.0, 1.0, 1.0, across, down) for across, down in ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.1), (0.0, -0.1))),
)
"""The copies of a picture that others are compared with: rotation in radians, slant, width, height, and shifts in half
sides."""


@dataclass(frozen=True, kw_only=True)
class Nearness:
    """Compares rows with K public rows, to find the nearest ones. The nearness of a row e to a public row c is ``e . c
    - |c|^2 / 2``, which is largest where the distance is smallest.

    A public row has V copies, such as slightly rotated pictures; the copy nearest to a row determines its nearness. All
    rows are rounded to whole numbers so small that float32 computes exactly. The nearness of a row then depends on no
    other row.
    """

    scale: float
    others_VKD: Floats
    half_squares_VK: Floats

    @classmethod
    def to(cls, others_VKD: Floats, *, radius: float) -> Nearness:
        """Return an object that compares rows with the K public rows in ``others_VKD``, of which each has V copies.

        ``radius``: the largest norm that a public row may have. Rows are scaled by it before they are rounded.
        """
        scale = _LARGEST_NORM / max(radius, 1e-30)
        whole_VKD = np.rint(others_VKD * scale).astype(np.float32)
        # Rounded down to whole numbers: halves would take a binary digit from the exact range of float32.
        half_VK = np.floor(np.square(whole_VKD, dtype=np.float64).sum(axis=2) / 2)
        return cls(scale=scale, others_VKD=whole_VKD, half_squares_VK=half_VK.astype(np.float32))

    def __call__(self, rows_ND: Floats) -> tuple[Floats, Floats]:
        """Return the nearness of rows (N, D) to every public row, (N, K), and squared lengths (N, 1) of the rounded
        rows."""
        # A row that is longer than every public row is first shortened to their largest norm.
        scaled_ND = rows_ND.astype(np.float64) * self.scale
        lengths_N1 = np.linalg.norm(scaled_ND, axis=1, keepdims=True)
        shortened_ND = scaled_ND * np.minimum(1.0, _LARGEST_NORM / np.maximum(lengths_N1, 1e-30))
        whole_ND: Floats = np.rint(shortened_ND).astype(np.float32)
        nearness_NK: Floats = whole_ND @ self.others_VKD[0].T - self.half_squares_VK[0]
        for others_KD, half_K in zip(self.others_VKD[1:], self.half_squares_VK[1:], strict=True):
            np.maximum(nearness_NK, whole_ND @ others_KD.T - half_K, out=nearness_NK)
        return nearness_NK, np.square(whole_ND).sum(axis=1, keepdims=True)

    def nearest(self, rows_ND: Floats, count: int) -> tuple[IntArray, Floats]:
        """Return for each row the indices of the ``count`` nearest public rows, and the squared distances to them: two
        arrays (N, count)."""
        nearness_NK, squares_N1 = self(rows_ND)
        # Row by row: a record's neighbours, and their order, depend on its own row alone.
        near = np.argpartition(-nearness_NK, min(count, nearness_NK.shape[1]) - 1, axis=1)[:, :count]
        return near, np.maximum(squares_N1 - 2 * np.take_along_axis(nearness_NK, near, axis=1), 0.0)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Coordinates from the neighbourhood graph of public records, which connects records with similar principal
    components.

    Public records get their coordinates from the leading eigenvectors of the graph (Ng, Jordan and Weiss 2001;
    diffusion maps, Coifman and Lafon 2006), which follow the shape of a class better than distances do. The coordinates
    of any other record are the mean of those of its nearest public neighbours. To find neighbours, pictures are
    compared with slightly rotated, slanted, stretched and shifted copies of the public pictures.
    """

    components: Components
    nearness: Nearness
    coordinates_ME: Floats

    @classmethod
    def of(cls, pool: Tensor, components: Components, *, seed: int = 0) -> Graph:
        """Build the neighbourhood graph of the public ``pool`` (M, ...) and compute its eigenvectors. ``seed``
        determines the start of the iterative solver, so that the result is reproducible.
        """
        copies = []
        for turn, slant, wide, high, across, down in _COPIES if pool.ndim == 4 else ():
            cosine, sine = math.cos(turn), math.sin(turn)
            # Maps positions in the copy to positions in the picture, as affine_grid expects: the inverse of the visible
            # change.
            rows = [[cosine / wide, (slant - sine) / wide, across], [sine / high, cosine / high, down]]
            matrix, shown = torch.tensor(rows, dtype=torch.float32), []
            for part in torch.split(pool, _AT_ONCE):
                grid = functional.affine_grid(matrix.expand(len(part), 2, 3), list(part.shape), align_corners=False)
                shown.append(functional.grid_sample(part.float(), grid, align_corners=False))
            copies.append(components(torch.cat(shown)).numpy())
        copies_VMD = np.stack(copies or [components(pool).numpy()])
        nearness = Nearness.to(copies_VMD, radius=float(np.linalg.norm(copies_VMD, axis=2).max()))
        found = [nearness.nearest(part, _NEIGHBOURS + 1) for part in in_blocks(copies_VMD[0], _AT_ONCE, "neighbours")]
        near_MK, squared_MK = (np.concatenate(side) for side in zip(*found, strict=True))
        # A record is nearest to itself, in some copy.
        others = near_MK != np.arange(len(pool))[:, None]
        # Relative to each record's own neighbourhood, because the pool is not equally dense everywhere.
        farthest_M1 = np.maximum(squared_MK.max(axis=1, keepdims=True), 1e-12)
        weights = np.where(others, np.exp(-2 * squared_MK / farthest_M1), 0.0)
        ends = np.repeat(np.arange(len(pool)), near_MK.shape[1]), near_MK.ravel()
        one_way = scipy.sparse.csr_matrix((weights.ravel(), ends), shape=(len(pool),) * 2)
        # Made symmetric for the eigenvectors below: one record may be among the nearest of another, but not the
        # reverse.
        adjacency = one_way.maximum(one_way.T)
        root_M = np.sqrt(np.asarray(adjacency.sum(axis=1)).ravel())
        scale = scipy.sparse.diags(1 / root_M)
        # Without a fixed start the search is random, and so are the signs of eigenvectors.
        start = np.random.default_rng(seed).uniform(size=len(pool))
        values, vectors = scipy.sparse.linalg.eigsh(
            scale @ adjacency @ scale, k=min(_EIGENVECTORS, len(pool) - 1), which="LA", v0=start
        )
        # Steps of a random walk: components with small eigenvalues fade.
        diffused = vectors / root_M[:, None] * values**_DIFFUSION
        norms = np.linalg.norm(diffused, axis=1, keepdims=True)
        coordinates_ME = (diffused / np.maximum(norms, 1e-12)).astype(np.float32)
        return cls(components=components, nearness=nearness, coordinates_ME=coordinates_ME)

    def __call__(self, x: Tensor) -> Tensor:
        """Return coordinates (N, E) of records (N, ...)."""
        parts = []
        for part in in_blocks(x, _AT_ONCE, "neighbours"):
            near, _ = self.nearness.nearest(self.components(part).numpy(), _VOTING_NEIGHBOURS)
            parts.append(torch.from_numpy(self.coordinates_ME[near].mean(axis=1)))
        return torch.cat(parts)

    def at_once(self, x: Tensor) -> Tensor:
        """Return the coordinates (N, E) of a few records ``x``, computed by tensor operations without a loop, so that
        the computation can be exported (to ONNX).
        """
        scaled_ND = self.components(x, at_once=True).double() * self.nearness.scale
        lengths_N1 = scaled_ND.square().sum(dim=1, keepdim=True).sqrt()
        whole_ND = (scaled_ND * (_LARGEST_NORM / lengths_N1.clamp(min=1e-30)).clamp(max=1.0)).round().float()
        # An exported graph holds the pool as a constant: in 16 bits, which whole numbers up to 2^11 fit.
        nearness = [
            whole_ND @ torch.from_numpy(others_KD).short().T.float() - torch.from_numpy(half_K)
            for others_KD, half_K in zip(self.nearness.others_VKD, self.nearness.half_squares_VK, strict=True)
        ]
        near_NM = reduce(torch.maximum, nearness)
        near = near_NM.topk(min(_VOTING_NEIGHBOURS, near_NM.shape[1]), dim=1).indices
        return torch.from_numpy(self.coordinates_ME)[near].mean(dim=1)


def exact_solver(num_records: int, num_features: int) -> Literal["covariance_eigh", "full"]:
    """Return the faster of the solvers of scikit-learn's PCA without a random start, so that equal records have equal
    components: by the covariance of the features or, if there are fewer records, by the records themselves."""
    return "covariance_eigh" if num_records >= num_features else "full"


_EMBEDDED_AT_ONCE = 256
_LEAST_SPREAD = 1e-6  # of the widest component's: less is rounding
_LARGEST_PLAIN, _PLAIN_DIGITS = 64.0, 14  # of a scaled feature: 21 binary digits with its sign
_EXACT_DIGITS = 53  # of a float64
_GRAPH_COMPONENTS = 60
_STEPS, _SIDE = 10, 16  # quantiles of a column, and pixels of a side of a shrunk picture


@dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components of public records, computed from these features:

    - of tables: the columns, and for a column of many values also indicators: for each of some quantiles of the public
      records, 1 if the value reaches the quantile (``thresholds_K`` of the columns ``column_K``);
    - of vectors, such as those of an encoder or of hashed words: their numbers. A record consists of one vector or of
      several ``parts``, such as that of an encoder and gradients; each part gets the same total variance;
    - of pictures: square roots of oriented gradients (:mod:`fairpate.oriented_gradients`), averaged with those of the
      mirror image if configured, and the pixels of a shrunk picture of ``side`` pixels (0: without these pixels).

    Each feature of a table, and each component of pictures and vectors, is divided by the square root of its standard
    deviation over the public records. This keeps rare or large values from dominating. ``whole_FE`` has the components
    as whole multiples of ``unit_E``.
    """

    config: EmbeddingConfig
    side: int
    column_K: Tensor
    thresholds_K: Tensor
    mean_F: Tensor
    root_F: Tensor
    whole_FE: Tensor
    unit_E: Tensor

    @classmethod
    def of(cls, pool: Tensor, config: EmbeddingConfig, *, plain: bool = False, parts: Sequence[int] = ()) -> Components:
        """Compute the components of the public ``pool``: (M, F) floats, or (M, channels, height, width) bytes.

        ``parts``: the lengths of the vectors in a row, if rows are vectors and not columns of a table.

        With ``plain``, a table's indicators or the pixels of shrunk pictures are left out of the features, and the
        components of pictures are not divided by the square roots of their standard deviations. DataError for fewer
        than two records, and for numbers that are not finite.
        """
        if len(pool) < 2 or not pool.isfinite().all():
            raise DataError(
                f"data.num_public: an embedding needs two public records or more, of finite numbers, got {len(pool)}; "
                "raise it, or correct the records."
            )
        is_table = pool.ndim == 2 and not parts
        side, column_K, thresholds_K = 0 if plain else _SIDE, torch.zeros(0).long(), torch.zeros(0)
        if is_table and not plain:
            columns, thresholds = [], []
            for column, values in enumerate(pool.unbind(dim=1)):
                different, counts = values.unique(return_counts=True)
                if len(different) <= _STEPS:
                    continue
                # A value that most records share would make up most of the quantiles.
                common = different[counts.argmax()] if counts.max() * 2 > len(values) else None
                others = values if common is None else values[values != common]
                # Lower: a threshold is one of the values, never a rounded number between two.
                quantiles = torch.quantile(others, torch.arange(1, _STEPS + 1) / (_STEPS + 1), interpolation="lower")
                found = quantiles.unique() if common is None else torch.cat([others.min()[None], quantiles]).unique()
                columns += [column] * len(found)
                thresholds.append(found)
            column_K, thresholds_K = torch.tensor(columns).long(), torch.cat(thresholds or [torch.zeros(0)])
        pieces = torch.split(pool, _EMBEDDED_AT_ONCE)
        plain_MF = torch.cat([_plain(piece, config, side, column_K, thresholds_K) for piece in pieces])
        mean_F, spread_F = plain_MF.mean(dim=0), plain_MF.std(dim=0, correction=0)
        root_F = torch.where(spread_F > 0, spread_F, 1.0).sqrt() if is_table else torch.ones_like(spread_F)
        if parts:
            # A feature has the variance 1 on average in each part; the part with more numbers would count more.
            sizes = [spread_K.square().sum().sqrt() for spread_K in spread_F.split(list(parts))]
            average = math.sqrt(len(spread_F) / len(parts))
            scales = [size / average if size > 0 else torch.ones(()) for size in sizes]
            root_F = torch.cat([scale.expand(length) for scale, length in zip(scales, parts, strict=True)])
        pca = sklearn.decomposition.PCA(
            min(config.num_components, *plain_MF.shape), svd_solver=exact_solver(*plain_MF.shape)
        )
        pca.fit(((plain_MF - mean_F) / root_F).numpy())
        spread_E = torch.from_numpy(pca.explained_variance_).double().sqrt()
        kept_E = spread_E > _LEAST_SPREAD * spread_E.max()
        # Factors of 21 and of `digits` binary digits: their product, summed over all columns, fits into a float64.
        digits = min(20, _EXACT_DIGITS - 21 - plain_MF.shape[1].bit_length())
        unit = 2.0 ** -(digits + _PLAIN_DIGITS)
        scale_E = 1.0 if is_table or plain else spread_E[kept_E].sqrt()
        return cls(
            config=config,
            side=side,
            column_K=column_K,
            thresholds_K=thresholds_K,
            mean_F=mean_F,
            root_F=root_F,
            whole_FE=(torch.from_numpy(pca.components_.T).double()[:, kept_E] * 2.0**digits).round(),
            unit_E=unit / (torch.ones(int(kept_E.sum()), dtype=torch.float64) * scale_E),
        )

    def __call__(self, x: Tensor, *, at_once: bool = False) -> Tensor:
        """Return coordinates (N, E), ``float32``, of records ``x`` (N, ...). ``at_once``: for a few records, by tensor
        operations without a loop, so that the computation can be exported.
        """
        if not at_once:
            embedded_NE, start = torch.empty(len(x), len(self.unit_E)), 0
            for part in in_blocks(x, _EMBEDDED_AT_ONCE, "components"):
                embedded_NE[start : start + len(part)] = self(part, at_once=True)
                start += len(part)
            return embedded_NE
        plain = (_plain(x, self.config, self.side, self.column_K, self.thresholds_K) - self.mean_F) / self.root_F
        # A private record may have larger values than all public ones: without a bound its sums would not be exact.
        bounded = plain.nan_to_num(0.0).clamp(-_LARGEST_PLAIN, _LARGEST_PLAIN).double()
        whole = (bounded * 2.0**_PLAIN_DIGITS).round() @ self.whole_FE
        return (whole * self.unit_E).float()


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Replaces the features of records by coordinates: principal components of public records and, for pictures,
    coordinates of their nearest public pictures in a ``graph`` of neighbours. Coordinates are scaled so that a typical
    record has a fixed norm.

    ``radius``: the median norm of the public records' components, before this scaling. ``record_shape``: the shape of
    one record.
    """

    config: EmbeddingConfig
    components: Components
    graph: Graph | None
    radius: float
    record_shape: tuple[int, ...]

    @classmethod
    def of(cls, pool: Tensor, config: EmbeddingConfig, *, parts: Sequence[int] = ()) -> Embedding:
        """Fit the embedding to the public ``pool`` (M, ...). ``parts``: the lengths of the vectors in a row, if rows
        are vectors (:class:`Components`)."""
        components, graph = Components.of(pool, config, parts=parts), None
        if pool.ndim == 4 and config.graph_share:
            edges = EmbeddingConfig(num_components=_GRAPH_COMPONENTS)
            graph = Graph.of(pool, Components.of(pool, edges, plain=True))
        # A public number: private records must not affect it, and if half the pool is at 0, it must not divide by 0.
        radius = float(components(pool).norm(dim=1).median()) or 1.0
        return cls(config=config, components=components, graph=graph, radius=radius, record_shape=tuple(pool.shape[1:]))

    def __call__(self, x: Tensor, *, at_once: bool = False) -> Tensor:
        """Return coordinates (N, E), ``float32``, of records ``x`` (N, ...).

        ``at_once``: for a few records, by tensor operations without a loop, so that the computation can be exported. If
        several neighbours are equally near, it may then choose different ones.
        """
        share = 0.0 if self.graph is None else self.config.graph_share
        components_NE = self.components(x, at_once=at_once)
        # Roots, because `graph_share` is a share of the squared norm.
        scaled_NE: Tensor = components_NE * (EMBEDDED_NORM * (1 - share) ** 0.5 / self.radius)
        if self.graph is None:
            return scaled_NE
        places_NE = self.graph.at_once(x) if at_once else self.graph(x)
        return torch.cat([scaled_NE, functional.normalize(places_NE) * (EMBEDDED_NORM * share**0.5)], dim=1)


def _plain(x: Tensor, config: EmbeddingConfig, side: int, column_K: Tensor, thresholds_K: Tensor) -> Tensor:
    """Return the plain features (N, F) of records, from which their components are computed; :class:`Components` lists
    these features."""
    if x.ndim == 2:
        return torch.cat([x.float(), (x[:, column_K] >= thresholds_K).float()], dim=1)
    pictures = [x, x.flip(-1)] if config.mirrored else [x]
    parts = [torch.stack([gradient_histograms(each.float() / 255).sqrt() for each in pictures]).mean(dim=0)]
    if side:
        small = [functional.adaptive_avg_pool2d(each.float() / 255, side).flatten(1) for each in pictures]
        parts.append(torch.stack(small).mean(dim=0))
    return torch.cat(parts, dim=1)


FORMAT = "fairpate.embedding/2"
_COMPONENTS = ("column_K", "thresholds_K", "mean_F", "root_F", "whole_FE", "unit_E")


class EmbeddingFileError(types.UserError):
    """Raised for a file that does not contain a complete embedding."""


def embedding_bytes(embedding: Embedding) -> bytes:
    """Return the content of the file that :func:`read_embedding` reads."""
    tensors = {f"components.{name}": getattr(embedding.components, name) for name in _COMPONENTS}
    config, shape = embedding.config.model_dump(mode="json"), list(embedding.record_shape)
    values: dict[str, Any] = {"format": FORMAT, "config": config, "record_shape": shape, "radius": embedding.radius}
    if embedding.graph is not None:
        edges, nearness = embedding.graph.components, embedding.graph.nearness
        tensors |= {f"edges.{name}": getattr(edges, name) for name in _COMPONENTS}
        # Whole numbers of at most 2^11, which 16 bits hold exactly.
        tensors["graph.others_VKD"] = torch.from_numpy(nearness.others_VKD).short()
        tensors["graph.half_squares_VK"] = torch.from_numpy(nearness.half_squares_VK)
        tensors["graph.coordinates_ME"] = torch.from_numpy(embedding.graph.coordinates_ME)
        values |= {"scale": nearness.scale}
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    values["sha256"] = arrays_digest({name: tensor.numpy() for name, tensor in content.items()})
    return safetensors_torch.save(content, {"embedding": json.dumps(values)})


def save_embedding(embedding: Embedding, path: Path) -> None:
    """Write the embedding, which depends on public records alone, to a file that :func:`read_embedding` reads.

    The file is needed because an embedding that is fitted again on another machine may differ: some components may be
    rotated, depending on the processor and the number of threads.
    """
    encoded = embedding_bytes(embedding)
    write_atomically(path, lambda temporary: temporary.write_bytes(encoded))
    # Nothing in the file is private: all users of the model need to read it.
    path.chmod(0o644)


def read_embedding(path: Path) -> Embedding:
    """Return the embedding that :func:`save_embedding` wrote, bit for bit. EmbeddingFileError for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {})["embedding"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        digest = arrays_digest({name: tensor.numpy() for name, tensor in tensors.items()})
        if values["format"] != FORMAT or values["sha256"] != digest:
            raise ValueError(f"expected the format {FORMAT} and tensors that match the checksum")  # noqa: TRY301 - reported below

        kinds = {"components": (EmbeddingConfig.model_validate(values["config"]), _SIDE)}
        if "scale" in values:
            kinds["edges"] = EmbeddingConfig(num_components=_GRAPH_COMPONENTS), 0
        components = {}
        for kind, (config, side) in kinds.items():
            own = {name: tensors[f"{kind}.{name}"] for name in _COMPONENTS}
            components[kind] = each = Components(config=config, side=side, **own)
            # A file may come from somebody else. If sums were not exact, a record's coordinates would depend on its
            # position among the others, and no bound on the effect of one record would hold.
            most = max(each.whole_FE.abs().sum(dim=0).tolist(), default=0.0) * _LARGEST_PLAIN * 2.0**_PLAIN_DIGITS
            is_whole = bool((each.whole_FE == each.whole_FE.round()).all()) and most <= 2.0**_EXACT_DIGITS
            others = (each.thresholds_K, each.mean_F, each.root_F, each.unit_E)
            if not is_whole or not all(bool(some.isfinite().all()) for some in others) or not bool(each.root_F.all()):
                what = "components of whole numbers whose sums are exact, and finite scales"
                raise ValueError(f"expected {what}")  # noqa: TRY301 - reported below
        graph = None
        if "scale" in values:
            nearness = Nearness(
                scale=values["scale"],
                others_VKD=tensors["graph.others_VKD"].float().numpy(),
                half_squares_VK=tensors["graph.half_squares_VK"].numpy(),
            )
            coordinates_ME = tensors["graph.coordinates_ME"].numpy()
            graph = Graph(components=components["edges"], nearness=nearness, coordinates_ME=coordinates_ME)
            half_VK = np.floor(np.square(nearness.others_VKD, dtype=np.float64).sum(axis=2) / 2)
            # A norm after rounding: half a unit more for each number.
            most = (_LARGEST_NORM + math.sqrt(nearness.others_VKD.shape[2])) ** 2 / 2
            is_exact = not (half_VK > most).any() and np.array_equal(half_VK, nearness.half_squares_VK)
            if not 0 < nearness.scale < math.inf or not is_exact:
                raise ValueError("graph: expected whole numbers whose distances are exact")  # noqa: TRY301
            if not np.isfinite(coordinates_ME).all():
                raise ValueError("graph: expected finite coordinates")  # noqa: TRY301
        if not 0 < values["radius"] < math.inf:
            raise ValueError(f"radius: expected a positive number, got {values['radius']}")  # noqa: TRY301 - reported below
        config, radius, shape = kinds["components"][0], values["radius"], tuple(values["record_shape"])
        found = components["components"]
        return Embedding(config=config, components=found, graph=graph, radius=radius, record_shape=shape)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            raise EmbeddingFileError(f"{path}: no such file; give an embedding.safetensors of a run.") from error
        text = " ".join(str(error).split())
        raise EmbeddingFileError(f"{path}: not a readable embedding ({text}); restore it from a copy.") from error


_NEAREST_AT_ONCE = 1024


class SpaceConfig(Section):
    """The settings of a space in which records are compared, computed from public records alone."""

    embedding: Literal["components", "graph"] = Field(
        "components",
        description="Space in which records are compared: principal `components` of the pool, or its `graph` of "
        "neighbours.",
    )
    num_components: Count = Field(
        60, description="Number of principal components of the pool; fewer if the pool has fewer."
    )

    def fitted_to(self, pool: Tensor, *, seed: int) -> Components | Graph:
        """Return the map from records to coordinates of this space, fitted to the public ``pool`` (M, ...).

        ``seed`` determines the start of the iterative solver for the eigenvectors of a graph.
        """
        components = Components.of(pool, EmbeddingConfig(num_components=self.num_components), plain=True)
        return components if self.embedding == "components" else Graph.of(pool, components, seed=seed)


def clusters_of(coordinates_MD: npt.NDArray[Any], count: int, *, seed: int, field: str) -> Any:
    """Return ``count`` clusters of public records by k-means, as scikit-learn's fitted object.

    ConfigError, which names ``field``, for more clusters than different records.
    """
    different = len(np.unique(coordinates_MD, axis=0))
    if count > different:
        raise ConfigError(
            f"{field}: expected at most {different}, the number of different public records, got {count}; lower it, or "
            "raise data.num_public."
        )
    # From public records and a public seed: every stage of a run, and a resumed run, finds the same clusters.
    return sklearn.cluster.KMeans(count, n_init=1, random_state=seed).fit(coordinates_MD)


@dataclass(frozen=True, kw_only=True)
class Prototypes:
    """Prototypes: centres of K clusters of public records. Each private record votes for its nearest prototype.

    ``embed`` computes the coordinates of a record. ``centres`` are the coordinates of the prototypes, a row each.
    ``coordinates_MD`` and ``prototype_M`` are the coordinates and the nearest prototype of every public record.
    """

    embed: Embed
    centres: Floats
    coordinates_MD: Floats
    prototype_M: IntArray

    @classmethod
    def of(cls, pool: Tensor, space: SpaceConfig, *, count: int, seed: int) -> Prototypes:
        """Fit prototypes to the public ``pool`` (M, ...). ConfigError if ``count`` exceeds the number of different
        records."""
        embed = space.fitted_to(pool, seed=seed)
        embedded = embed.coordinates_ME if isinstance(embed, Graph) else embed(pool).numpy()
        clusters = clusters_of(embedded, count, seed=seed, field="record_votes.num_prototypes")
        prototype_M = clusters.labels_.astype(np.int64)
        return cls(embed=embed, centres=clusters.cluster_centers_, coordinates_MD=embedded, prototype_M=prototype_M)

    def nearest(self, x: Tensor) -> IntArray:
        """Return the index (N,) of the nearest prototype of every record in ``x`` (N, ...); it depends on that record
        alone."""
        nearest = [np.zeros(0, dtype=np.int64)]  # so that no records are an array too
        # No public record has a larger norm, and so no centre has.
        radius = float(np.linalg.norm(self.coordinates_MD, axis=1).max())
        nearness = Nearness.to(self.centres[None], radius=radius)
        parts = (part for part in torch.split(x, _NEAREST_AT_ONCE) if len(part))
        nearest += [nearness(self.embed(part).numpy())[0].argmax(axis=1) for part in parts]
        return np.concatenate(nearest)
