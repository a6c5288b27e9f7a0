"""A public embedding: what every method sees of a record, fitted to public records alone.

    tables      the columns, and for a column of many values whether it reaches each of some public quantiles
    pictures    roots of oriented gradients (:mod:`.gradients`), perhaps averaged with the mirror image's, and the
                picture shrunk to few pixels

then the pool's principal components. Each value is divided once by the root of its spread over the pool, a table's
columns before they are rotated and a picture's components after, so that neither rare values nor large ones decide.
Beside them, pictures have their place in the pool's graph of neighbours (:mod:`.neighbour_graph`).

What a record becomes depends on that record and on public ones, bit for bit, so that it costs no privacy and moves no
sensitivity. A product of matrices of floats does not have that property: how a row is rounded depends on its place
among the others. So both factors are rounded to whole numbers, few enough digits that every sum of products is exact
in whatever order it is taken. Shapes: N records, M public ones, F plain features, K thresholds, E components.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fairpate.config import EmbeddingConfig
from fairpate.data.dataset import BeforeEmbedding, Dataset
from fairpate.data.entry import DataError
from fairpate.data.neighbour_graph import Graph
from fairpate.later import functional, sklearn, torch
from fairpate.oriented_gradients import gradient_histograms

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 256
_EXAMPLES = 256
_LEAST_SPREAD = 1e-6  # of the widest component's: less is rounding
_LARGEST_PLAIN, _PLAIN_DIGITS = 64.0, 14  # of a scaled feature: 21 binary digits with its sign
_EXACT_DIGITS = 53  # of a float64
_GRAPH_COMPONENTS = 60
_NORM = 4.0  # which usual learning rates suit


@dataclass(frozen=True, kw_only=True)
class Components:
    """Principal components. ``thresholds_K`` belong to the columns ``column_K`` of a table; pictures have none.

    ``whole_FE`` are components in whole numbers, and ``unit_E`` what one of them stands for.
    """

    config: EmbeddingConfig
    column_K: Tensor
    thresholds_K: Tensor
    mean_F: Tensor
    root_F: Tensor
    whole_FE: Tensor
    unit_E: Tensor

    @classmethod
    def of(cls, pool: Tensor, config: EmbeddingConfig, *, evened: bool = True) -> Components:
        """Of the public ``pool``: (M, F) floats, or (M, channels, height, width) bytes.

        ``evened``: components of pictures are divided by the roots of their spreads. DataError for fewer than two
        records, and for numbers that are none.
        """
        if len(pool) < 2 or not pool.isfinite().all():
            raise DataError(
                f"data.num_public: an embedding needs two public records or more, all of them finite, got {len(pool)}."
            )
        is_table = pool.ndim == 2
        column_K, thresholds_K = (
            _thresholds(pool, config.steps) if is_table else (torch.zeros(0).long(), torch.zeros(0))
        )
        plain_MF = torch.cat([_plain(part, config, column_K, thresholds_K) for part in torch.split(pool, _AT_ONCE)])
        mean_F, spread_F = plain_MF.mean(dim=0), plain_MF.std(dim=0, correction=0)
        root_F = torch.where(spread_F > 0, spread_F, 1.0).sqrt() if is_table else torch.ones_like(spread_F)
        # Solved by the covariance, whose answer depends on no random start.
        pca = sklearn.decomposition.PCA(min(config.num_components, *plain_MF.shape), svd_solver="covariance_eigh")
        pca.fit(((plain_MF - mean_F) / root_F).numpy())
        spread_E = torch.from_numpy(pca.explained_variance_).double().sqrt()
        kept_E = spread_E > _LEAST_SPREAD * spread_E.max()
        # Factors of 21 and of so many binary digits: their product, summed over all columns, fits into a float64.
        digits = min(20, _EXACT_DIGITS - 21 - plain_MF.shape[1].bit_length())
        unit = 2.0 ** -(digits + _PLAIN_DIGITS)
        scale_E = 1.0 if is_table or not evened else spread_E[kept_E].sqrt()
        return cls(
            config=config,
            column_K=column_K,
            thresholds_K=thresholds_K,
            mean_F=mean_F,
            root_F=root_F,
            whole_FE=(torch.from_numpy(pca.components_.T).double()[:, kept_E] * 2.0**digits).round(),
            unit_E=unit / (torch.ones(int(kept_E.sum()), dtype=torch.float64) * scale_E),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Coordinates (N, E), ``float32``, of records ``x`` (N, ...)."""
        embedded_NE = torch.empty(len(x), len(self.unit_E))
        for start in range(0, len(x), _AT_ONCE):
            part = x[start : start + _AT_ONCE]
            embedded_NE[start : start + len(part)] = self.at_once(part)
        return embedded_NE

    def at_once(self, x: Tensor) -> Tensor:
        """The same of few records, without a loop: one graph of tensor operations."""
        plain = (_plain(x, self.config, self.column_K, self.thresholds_K) - self.mean_F) / self.root_F
        # A private record may hold what no public one does: without a bound its sums would not be exact.
        bounded = plain.nan_to_num(0.0).clamp(-_LARGEST_PLAIN, _LARGEST_PLAIN).double()
        whole = (bounded * 2.0**_PLAIN_DIGITS).round() @ self.whole_FE
        return (whole * self.unit_E).float()


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Components, and perhaps a ``graph``, in shares of a norm that most records have about.

    ``radius``: the median norm of the pool's components; ``record_shape``: of one record that it takes.
    """

    config: EmbeddingConfig
    components: Components
    graph: Graph | None
    radius: float
    record_shape: tuple[int, ...]

    @classmethod
    def of(cls, pool: Tensor, config: EmbeddingConfig) -> Embedding:
        """Of the public ``pool`` (M, ...)."""
        components, graph = Components.of(pool, config), None
        if pool.ndim == 4 and config.graph_share:
            edges = EmbeddingConfig(num_components=_GRAPH_COMPONENTS, pixels=None)
            graph = Graph.of(pool, Components.of(pool, edges, evened=False))
        radius = float(components(pool).norm(dim=1).median()) or 1.0
        return cls(config=config, components=components, graph=graph, radius=radius, record_shape=tuple(pool.shape[1:]))

    def __call__(self, x: Tensor) -> Tensor:
        """Coordinates (N, E), ``float32``, of records ``x`` (N, ...)."""
        return self._joined(self.components(x), None if self.graph is None else self.graph(x))

    def at_once(self, x: Tensor) -> Tensor:
        """The same of few records, without a loop: one graph of tensor operations.

        Among neighbours that are equally near it may choose others.
        """
        if self.graph is None:
            return self._joined(self.components.at_once(x), None)
        assert isinstance(self.graph.components, Components)
        return self._joined(self.components.at_once(x), self.graph.at_once(self.graph.components.at_once(x)))

    def _joined(self, components_NE: Tensor, places_NE: Tensor | None) -> Tensor:
        share = 0.0 if places_NE is None else self.config.graph_share
        scaled_NE: Tensor = components_NE * (_NORM * (1 - share) ** 0.5 / self.radius)
        if places_NE is None:
            return scaled_NE
        return torch.cat([scaled_NE, functional.normalize(places_NE) * (_NORM * share**0.5)], dim=1)


def embedded(dataset: Dataset, config: EmbeddingConfig | None) -> Dataset:
    """The data set as a table of coordinates, in every split; None leaves it as it is."""
    return dataset if config is None else placed(dataset, Embedding.of(dataset.public.x, config))


def placed(dataset: Dataset, embedding: Embedding) -> Dataset:
    """The data set as ``embedding`` sees it."""
    splits: dict[str, Any] = {name: replace(split, x=embedding(split.x)) for name, split in dataset.splits.items()}
    names = tuple(f"coordinate {e}" for e in range(splits["public"].x.shape[1]))
    # A copy: a view of a few records would keep all of the pool in memory.
    before = BeforeEmbedding(examples=dataset.public.x[:_EXAMPLES].clone(), feature_names=dataset.feature_names)
    kept: dict[str, Any] = {"embedding": embedding, "before_embedding": before, "source": None}
    return replace(dataset, kind="tabular", feature_names=names, **kept, **splits)


def _plain(x: Tensor, config: EmbeddingConfig, column_K: Tensor, thresholds_K: Tensor) -> Tensor:
    """What is rotated: (N, F)."""
    if x.ndim == 2:
        return torch.cat([x.float(), (x[:, column_K] >= thresholds_K).float()], dim=1)
    pictures = [x, x.flip(-1)] if config.mirrored else [x]
    parts = [torch.stack([gradient_histograms(each.float() / 255).sqrt() for each in pictures]).mean(dim=0)]
    if config.pixels is not None:
        small = [functional.adaptive_avg_pool2d(each.float() / 255, config.pixels).flatten(1) for each in pictures]
        parts.append(torch.stack(small).mean(dim=0))
    return torch.cat(parts, dim=1)


def _thresholds(pool: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Columns and quantiles of columns of more than ``steps`` values; where one value fills half, of the others."""
    columns, thresholds = [], []
    for column, values in enumerate(pool.unbind(dim=1)):
        different, counts = values.unique(return_counts=True)
        if not steps or len(different) <= max(steps, 2):
            continue
        common = different[counts.argmax()] if counts.max() * 2 > len(values) else None
        others = values if common is None else values[values != common]
        # Lower: a threshold is one of the values, never a rounded number between two.
        quantiles = torch.quantile(others, torch.arange(1, steps + 1) / (steps + 1), interpolation="lower")
        found = quantiles.unique() if common is None else torch.cat([others.min()[None], quantiles]).unique()
        columns += [column] * len(found)
        thresholds.append(found)
    return torch.tensor(columns, dtype=torch.int64), torch.cat(thresholds or [torch.zeros(0)])
