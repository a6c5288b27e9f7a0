"""Features computed from pictures: histograms of edges, the vector of a public encoder, or a user's own function."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fairpate import encoders
from fairpate.config import CODE_NAME, WeightsConfig
from fairpate.data.dataset import LoadedRecords, Option
from fairpate.data.large_arrays import Pixels, kept_pixels
from fairpate.data.tables import vectors_by_code
from fairpate.files import cache_dir
from fairpate.lazy import torch
from fairpate.oriented_gradients import NUM_CELLS, NUM_DIRECTIONS, oriented_gradients

if TYPE_CHECKING:
    from torch import Tensor

CACHE_VERSION = 1  # raise it with any change that computes other vectors from the same pictures
_PICTURES_HASHED_AT_ONCE = 1024
FEATURES = Option(
    default="pixels",
    allowed=("pixels", "oriented_gradients"),
    description="What a model sees: the picture; 900 histogram values of its edges as a table; or the vector of a "
    "public network, `encoder:NAME` or `encoder:NAME+picture`.",
    pattern=encoders.PATTERN,
)


def encoder_of(
    features: object, weights: WeightsConfig | None, picture_shape: tuple[int, ...]
) -> encoders.PublicEncoder | None:
    """Return the description of the encoder that ``features`` name, with its file of ``weights``; None if they name
    none. EncoderError if the file does not belong to these features."""
    if isinstance(features, str) and features.startswith(encoders.PREFIX):
        return encoders.described(features, weights, picture_shape)
    if weights is not None:
        raise encoders.EncoderError(
            f"data.weights: read only with features of an encoder, such as options.features=encoder:resnet50, got "
            f"features {features}; leave the file out, or name its architecture."
        )
    return None


def with_features(records: LoadedRecords, features: str, weights: WeightsConfig | None = None) -> LoadedRecords:
    """Return records whose pictures are replaced by features: ``oriented_gradients``, the vectors of an encoder
    (:mod:`fairpate.encoders`) with its file of ``weights``, or the output of the user's own function, named as
    ``module:function``.

    The function maps one picture (channels, height, width), bytes, to a vector of finite numbers. It must not depend on
    private records. It gets one picture at a time, so that no record's features depend on another's. It runs only if
    the user allows files to name code (:mod:`fairpate.config`).
    """
    pictures = records.records.x
    if (public := encoder_of(features, weights, tuple(pictures.shape[1:]))) is not None:
        encoder = encoders.Encoder.of(public, None if weights is None else weights.path)
        vectors = kept_vectors(encoder, pictures)
        return replace(
            records,
            kind="tabular",
            records=replace(records.records, x=vectors.x),
            feature_names=encoder.names(),
            mapped=vectors if vectors.file else None,
            encoder=public,
            notes=(*records.notes, public.words),
        )
    if CODE_NAME.fullmatch(features):
        # Copies, so that the function cannot change the pixels.
        vectors_NF = vectors_by_code(
            features,
            (picture.clone() for picture in pictures),
            field="pictures.features",
            expected="one vector of finite numbers per picture, all of one length",
            remedy="correct the function",
        )
        x = torch.from_numpy(vectors_NF)
        names = tuple(f"{features} {place}" for place in range(x.shape[1]))
    else:
        x, names = oriented_gradients(pictures), feature_names()
    return replace(records, kind="tabular", records=replace(records.records, x=x), feature_names=names, mapped=None)


def kept_vectors(encoder: encoders.Encoder, pictures: Tensor) -> Pixels:
    """Return the vectors (N, F) that ``encoder`` computes from pictures (N, channels, height, width), from the cache if
    it has them. They are computed and stored in blocks, so that they may be larger than memory."""
    digest = hashlib.sha256(repr((CACHE_VERSION, torch.__version__, encoder.public, tuple(pictures.shape))).encode())
    for part in torch.split(pictures, _PICTURES_HASHED_AT_ONCE):
        digest.update(part.contiguous().numpy().data)
    path, shape = cache_dir() / f"vectors-{digest.hexdigest()[:32]}.floats", (len(pictures), encoder.size)
    blocks = lambda: (block.numpy() for block in encoder.blocks(pictures))  # noqa: E731
    return kept_pixels(path, shape, blocks, kind=np.dtype(np.float32))


def feature_names() -> tuple[str, ...]:
    """Return a name for each feature that :func:`oriented_gradients` computes."""
    directions, cells = range(NUM_DIRECTIONS), range(NUM_CELLS)
    return tuple(
        f"direction {180 * d // NUM_DIRECTIONS}, row {i}, column {j}" for d in directions for i in cells for j in cells
    )
