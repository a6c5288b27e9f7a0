"""Weights in storage: one safetensors object per block of teachers, named by a hash of everything that determines them.

A block is found again only for the same shards, model, training, seed and library, so a resumed run trains what is
missing and nothing else. Its own digest is stored beside the tensors, and an object that is cut short or altered
counts as missing. Teachers memorise their shards, so local folders and files are for their owner only; a location may
as well be a URI, and any process that reaches it, driver or worker, saves and loads there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fairpate import __version__
from fairpate.later import torch
from fairpate.storage import Location, exists, read, write
from fairpate.types import UserError
from teachers.teacher import Shard, TeacherSpec
from teachers.train import Engine

ArrayWeights = dict[str, npt.NDArray[np.generic]]
_DIGEST = "blake2b"
_DEFINITION = 2  # raised whenever the same inputs train other teachers
_HEADER_LENGTH = 8
_log = logging.getLogger(__name__)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be read; the message names its location and the remedy."""


def block_name(shards: Sequence[Shard], spec: TeacherSpec, teacher_indices: Sequence[int], engine: Engine) -> str:
    """What the block of ``teacher_indices`` with these shards is called; any change of an input changes the name."""
    determined_by = {
        # A weights file's checksum stands for it: the same file at another path trains the same teachers.
        "model": spec.model.model_dump(mode="json", exclude={"weights": {"path"}, "python": True}),
        "fit": spec.fit.model_dump(mode="json"),
        "num_classes": spec.num_classes,
        "seed": spec.seed,
        "standardize": spec.standardize,
        "max_shard_size": spec.max_shard_size,
        "teachers": list(teacher_indices),
        "definition": _DEFINITION,
        "engine": engine,
        "versions": [__version__, torch.__version__],
    }
    digest = hashlib.blake2b(json.dumps(determined_by, sort_keys=True).encode(), digest_size=16)
    for shard in shards:
        for tensor in (shard.x, shard.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return f"teachers-{min(teacher_indices):05d}-{digest.hexdigest()}.safetensors"


def keyed_name(name: str, key: str) -> str:
    """What a block of this name is called where others may list names: without ``key`` it confirms no guess of a shard.

    A plain name hashes whole shards, so that an attacker who knows all records of them but one could try that one.
    """
    start = name.rpartition("-")[0]
    sealed = hashlib.blake2b(name.encode(), key=key.encode(), digest_size=16).hexdigest()
    return f"{start}-{sealed}.safetensors"


def save_block(location: Location, weights: ArrayWeights) -> None:
    """Write ``weights`` so that ``location`` holds all of them or does not exist; a new local folder gets mode 0700."""
    # Of a view safetensors would write the memory behind it.
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    write(location, save(arrays, metadata={_DIGEST: _digest(arrays)}))


def load_block(location: Location) -> ArrayWeights:
    """The weights at ``location``; :class:`CheckpointError` where they are missing or damaged."""
    try:
        content = read(location)
        weights: ArrayWeights = dict(load(content))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{location}: cannot be read ({error}); train the teachers again.") from error
    if _stored_digest(content) != _digest(weights):
        raise CheckpointError(f"{location}: content does not match its digest; train the teachers again.")
    return weights


def is_intact(location: Location) -> bool:
    """Whether ``location`` holds a complete checkpoint; a damaged one is reported and counts as missing.

    All of it is read. Where that is too much, :func:`fairpate.storage.exists` looks without reading.
    """
    if not exists(location):
        return False
    try:
        load_block(location)
    except CheckpointError as error:
        _log.warning("Ignoring a damaged checkpoint: %s", error)
        return False
    return True


def _stored_digest(content: bytes) -> str | None:
    """From the header of a safetensors file that was read already: its length in eight bytes, then JSON."""
    end = _HEADER_LENGTH + int.from_bytes(content[:_HEADER_LENGTH], "little")
    metadata: dict[str, str] = json.loads(content[_HEADER_LENGTH:end]).get("__metadata__", {})
    return metadata.get(_DIGEST)


def _digest(weights: ArrayWeights) -> str:
    digest = hashlib.blake2b(digest_size=16)
    # By name: a file keeps no order of its tensors.
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {weights[name].shape}".encode())
        digest.update(weights[name].tobytes())
    return digest.hexdigest()
