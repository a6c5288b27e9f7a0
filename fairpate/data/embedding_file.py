"""A public embedding as a file: all that places a record, so that nobody who has it need make it from the pool again.

Made again elsewhere it may come out otherwise: components of nearly equal spread, and a graph of few pictures, turn
with the processor and the number of threads. Everything in the file is computed from public records.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fairpate.config import EmbeddingConfig
from fairpate.data.embedding import Components, Embedding
from fairpate.data.neighbour_graph import Graph, Nearness
from fairpate.files import write_atomically
from fairpate.later import safetensors_torch, torch
from fairpate.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "fairpate.embedding/1"
_COMPONENTS = ("column_K", "thresholds_K", "mean_F", "root_F", "whole_FE", "unit_E")


class EmbeddingFileError(UserError):
    """A file that is no embedding."""


def save_embedding(embedding: Embedding, path: Path) -> None:
    """Write the file that :func:`read_embedding` reads."""
    tensors = {f"components.{name}": getattr(embedding.components, name) for name in _COMPONENTS}
    values: dict[str, Any] = {
        "format": FORMAT,
        "config": embedding.config.model_dump(mode="json"),
        "record_shape": list(embedding.record_shape),
        "radius": embedding.radius,
    }
    if embedding.graph is not None:
        edges, copies = embedding.graph.components, embedding.graph.copies
        assert isinstance(edges, Components)
        tensors |= {f"edges.{name}": getattr(edges, name) for name in _COMPONENTS}
        # Whole numbers of at most 2^11.
        tensors["graph.others_VKD"] = torch.stack([torch.from_numpy(copy.others_KD).short() for copy in copies])
        tensors["graph.half_squares_VK"] = torch.stack([torch.from_numpy(copy.half_squares_K) for copy in copies])
        tensors["graph.coordinates_ME"] = torch.from_numpy(embedding.graph.coordinates_ME)
        values |= {"edges": edges.config.model_dump(mode="json"), "scale": copies[0].scale}
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    values["sha256"] = _digest(content)
    write_atomically(
        path,
        lambda temporary: temporary.write_bytes(safetensors_torch.save(content, {"embedding": json.dumps(values)})),
    )
    # Nothing in it is private: whoever may use the model may read it.
    path.chmod(0o644)


def read_embedding(path: Path) -> Embedding:
    """What :func:`save_embedding` wrote, to the last digit. EmbeddingFileError if missing, damaged or another thing."""
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads((file.metadata() or {})["embedding"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        return _embedding(values, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            raise EmbeddingFileError(f"{path}: no such file; give an embedding.safetensors of a run.") from error
        raise EmbeddingFileError(
            f"{path}: no embedding that can be read ({' '.join(str(error).split())}); restore it from a copy."
        ) from error


def _embedding(values: dict[str, Any], tensors: dict[str, Tensor]) -> Embedding:
    if values["format"] != FORMAT or values["sha256"] != _digest(tensors):
        raise ValueError(f"expected {FORMAT}, and the tensors of its checksum")
    return Embedding(
        config=EmbeddingConfig.model_validate(values["config"]),
        components=_components("components", values["config"], tensors),
        graph=_graph(values, tensors) if "edges" in values else None,
        radius=values["radius"],
        record_shape=tuple(values["record_shape"]),
    )


def _components(prefix: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Components:
    return Components(
        config=EmbeddingConfig.model_validate(config), **{name: tensors[f"{prefix}.{name}"] for name in _COMPONENTS}
    )


def _graph(values: dict[str, Any], tensors: dict[str, Tensor]) -> Graph:
    others_VKD, halves_VK = tensors["graph.others_VKD"].float().numpy(), tensors["graph.half_squares_VK"].numpy()
    return Graph(
        components=_components("edges", values["edges"], tensors),
        copies=[
            Nearness(scale=values["scale"], others_KD=others_KD, half_squares_K=halves_K)
            for others_KD, halves_K in zip(others_VKD, halves_VK, strict=True)
        ],
        coordinates_ME=tensors["graph.coordinates_ME"].numpy(),
    )


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
