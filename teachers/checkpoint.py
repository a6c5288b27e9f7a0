"""Weights on disk: one safetensors file per block of teachers, named by a hash of everything that determines them.

A file is found again only for the same shards, model, training, seed and library, so a resumed run trains what is
missing and nothing else. A file's own digest is stored beside the tensors, and a file that is cut short or altered
counts as missing. Teachers memorise their shards, so folder and files are for their owner only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fairpate import __version__
from fairpate.files import write_atomically
from fairpate.types import UserError
from teachers.teacher import Shard, TeacherSpec
from teachers.train import Engine

ArrayWeights = dict[str, npt.NDArray[np.generic]]
_DIGEST = "blake2b"
_log = logging.getLogger(__name__)


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be read; the message names the file and the remedy."""


def block_path(
    directory: Path, shards: Sequence[Shard], spec: TeacherSpec, teacher_indices: Sequence[int], engine: Engine
) -> Path:
    """Where the block of ``teacher_indices`` with these shards belongs; any change of an input changes the name."""
    determined_by = {
        "model": spec.model.model_dump(mode="json"),
        "fit": spec.fit.model_dump(mode="json"),
        "num_classes": spec.num_classes,
        "seed": spec.seed,
        "standardize": spec.standardize,
        "teachers": list(teacher_indices),
        "engine": engine,
        "versions": [__version__, torch.__version__],
    }
    digest = hashlib.blake2b(json.dumps(determined_by, sort_keys=True).encode(), digest_size=16)
    for shard in shards:
        for tensor in (shard.x, shard.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return directory / f"teachers-{min(teacher_indices):05d}-{digest.hexdigest()}.safetensors"


def save_block(path: Path, weights: ArrayWeights) -> None:
    """Write ``weights`` so that ``path`` holds all of them or does not exist; a new folder gets mode 0700."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}

    def write(temporary: Path) -> None:
        temporary.touch(mode=0o600)
        save_file(arrays, temporary, metadata={_DIGEST: _digest(arrays)})
        temporary.chmod(0o600)

    write_atomically(path, write)


def load_block(path: Path) -> ArrayWeights:
    """The weights in ``path``; :class:`CheckpointError` for a missing or damaged file."""
    try:
        with safe_open(path, framework="np") as file:
            stored = (file.metadata() or {}).get(_DIGEST)
            weights: ArrayWeights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); train the teachers again.") from error
    if stored != _digest(weights):
        raise CheckpointError(f"{path}: content does not match its digest; train the teachers again.")
    return weights


def is_intact(path: Path) -> bool:
    """Whether ``path`` holds a complete checkpoint; a damaged one is reported and counts as missing."""
    if not path.exists():
        return False
    try:
        load_block(path)
    except CheckpointError as error:
        _log.warning("Ignoring a damaged checkpoint: %s", error)
        return False
    return True


def _digest(weights: ArrayWeights) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {weights[name].shape}".encode())
        digest.update(weights[name].tobytes())
    return digest.hexdigest()
