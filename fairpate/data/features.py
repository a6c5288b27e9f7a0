"""A data set whose features are computed: coordinates in a public embedding, or histograms of a picture's edges."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fairpate import config as configuration
from fairpate.config import CODE_NAME, REMEDY, EmbeddingConfig
from fairpate.data.dataset import BeforeEmbedding, Dataset, LoadedRecords, Option
from fairpate.data.embedding import Embedding
from fairpate.data.tables import even_records
from fairpate.lazy import torch
from fairpate.oriented_gradients import NUM_CELLS, NUM_DIRECTIONS, oriented_gradients
from fairpate.types import DataError, DataSettingsError

if TYPE_CHECKING:
    from torch import Tensor

_EXAMPLES = 256
_MADE_UP, _REPLACED = 400, 4  # records without public ones, and how many each public record replaces
FEATURES = Option(
    default="pixels",
    allowed=("pixels", "oriented_gradients"),
    description="What a model sees: the picture, or 900 histogram values of its edges as a table.",
)


def with_features(records: LoadedRecords, features: str) -> LoadedRecords:
    """Return records whose pictures are replaced by features: ``oriented_gradients``, or the output of the user's own
    function, named as ``module:function``.

    The function maps one picture (channels, height, width), bytes, to a vector of finite numbers. It must not depend on
    private records. It gets one picture at a time, so that no record's features depend on another's. It runs only if
    the user allows files to name code (:mod:`fairpate.config`).
    """
    pictures = records.records.x
    if not CODE_NAME.fullmatch(features):
        x, names = oriented_gradients(pictures), feature_names()
    else:
        if not configuration.may_run(features):
            raise DataSettingsError(f"pictures.features: {features} is code that would run with your rights; {REMEDY}.")
        try:
            function = configuration.named_object(features)
            # One at a time and as a copy, so that features cannot depend on other pictures nor change the pixels.
            rows = [torch.as_tensor(function(picture.clone()), dtype=torch.float32) for picture in pictures]
        except Exception as error:  # the user's module may raise anything
            raise DataError(
                f"pictures.features: {features} failed ({type(error).__name__}: {error}); correct the function."
            ) from error
        sizes = {tuple(row.shape) for row in rows}
        if len(sizes) != 1 or len(min(sizes)) != 1 or not all(bool(row.isfinite().all()) for row in rows):
            expected = "one vector of finite numbers per picture, all of one length"
            raise DataError(
                f"pictures.features: {features}: expected {expected}, got shapes {sorted(sizes)[:3]}; correct the "
                "function."
            )
        x = torch.stack(rows)
        names = tuple(f"{features} {place}" for place in range(x.shape[1]))
    return replace(records, kind="tabular", records=replace(records.records, x=x), feature_names=names, mapped=None)


def feature_names() -> tuple[str, ...]:
    """Return a name for each feature that :func:`oriented_gradients` computes."""
    directions, cells = range(NUM_DIRECTIONS), range(NUM_CELLS)
    return tuple(
        f"direction {180 * d // NUM_DIRECTIONS}, row {i}, column {j}" for d in directions for i in cells for j in cells
    )


def embedded(dataset: Dataset, embedding: Embedding | EmbeddingConfig | None) -> Dataset:
    """Return the data set with the features of every split replaced by coordinates, from the given ``embedding`` or
    from one that is fitted to the public records; unchanged if ``embedding`` is None.

    If there are few public records and every feature is a declared number or category, made-up records are added to
    them (:func:`completed_pool`). DataSettingsError if there is no public or made-up record to fit an embedding to.
    """
    if embedding is None:
        return dataset
    pool = completed_pool(dataset)
    if isinstance(embedding, EmbeddingConfig):
        if not len(pool):
            raise DataSettingsError(
                f"data.embedding: {dataset.name} has no public records to fit an embedding to, and some features lack "
                "declared bounds or categories; name a file of public records (files.public), raise data.num_public, "
                "or set data.embedding to null."
            )
        embedding = Embedding.of(pool, embedding)
    splits: dict[str, Any] = {name: replace(split, x=embedding(split.x)) for name, split in dataset.splits.items()}
    names = tuple(f"coordinate {e}" for e in range(splits["public"].x.shape[1]))
    # A copy: a view of a few records would keep all of the pool in memory.
    before = BeforeEmbedding(examples=pool[:_EXAMPLES].clone(), feature_names=dataset.feature_names)
    return replace(dataset, kind="tabular", feature_names=names, embedding=embedding, before_embedding=before, **splits)


def completed_pool(dataset: Dataset) -> Tensor:
    """Return the public records (M, ...) of ``dataset``, to which an embedding is fitted. If a declared table has fewer
    than 100 of them, made-up records are added.

    The embedding then covers every declared column, and adapts to the public records that exist.
    """
    pool, codes = dataset.public.x, dataset.feature_codes
    # The numbers of a vector have no declared bounds.
    count = _MADE_UP - _REPLACED * len(pool)
    if count <= 0 or not codes or any(code.kind == "element" for code in codes):
        return pool
    return torch.cat([pool, torch.from_numpy(even_records(codes, count))])
