"""The ensemble: shards by keyed hash, blocks of teachers in storage, their training and their votes.

Where blocks of teachers are computed: in this process, or on Ray actors (:mod:`teachers.ray_pool`).

A pool maps a pure function over items beside one shared value, or adds up what it returns, and knows nothing of
teachers.

Which teacher learns from which record: a keyed hash of the identifier of the record's unit, or of its person.

PATE's guarantee (Papernot et al. 2017, arXiv:1610.05755) needs one record to touch one teacher. The teacher of a record
is ``BLAKE2b(key, unit_id) mod num_teachers``: it does not depend on any other record, so adding or removing a record
changes exactly one shard. Where persons are protected, their identifiers stand for those of units: all records of a
person reach one teacher, and the guarantee holds for persons. A unit's identifier says nothing about the sensitive
attribute, so changing an attribute moves no record. Shards are ragged and may be empty; nothing here sees features or
labels.

Weights in storage: one safetensors object per block of teachers, named by a hash of everything that determines them.

A block is found again only for the same shards, model, training, seed and library, so a resumed run trains what is
missing and nothing else. Its own digest is stored beside the tensors, and an object that is cut short or altered
counts as missing. Teachers memorise their shards, so local folders and files are for their owner only; a location may
as well be a URI, and any process that reaches it, driver or worker, saves and loads there.

Blocks of teachers: what is stored of them and where, which are missing, and the work of those that are.

A block is named by what determines its teachers, so that it is found again for the same shards, settings and library,
and computed where it is not.

What teachers say about public queries: predictions per teacher, then counts per class.

``predictions_TQ`` is private and never leaves the worker; the counts stay with the operator, and only the aggregator's
noise may turn them into labels. Shapes: T teachers, Q queries, C classes, F features.

The ensemble's two stages: train all teachers on their shards, then add up their votes on public queries.

Both are a map over blocks of teachers on a :class:`teachers.ensemble.BlockPool`. A shard goes to the worker that trains
it and to no other. Where workers share a storage they read and write checkpoints there themselves; otherwise this
process does. Nothing here prices privacy: votes stay private until the aggregator releases a label.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from fairpate import __version__
from fairpate.config import TeachersConfig
from fairpate.files import Location, Storage, exists, join, read, write
from fairpate.nn.fit import frozen_features, predict_logits
from fairpate.nn.models import build_architecture, is_convolutional, scale_bytes
from fairpate.types import UserError
from teachers.teacher import (
    SHARD_MEAN,
    SHARD_STD,
    Engine,
    Shard,
    StackedWeights,
    TeacherSpec,
    choose_engine,
    standardize,
    train_teachers,
)

if TYPE_CHECKING:
    from fairpate.data.dataset import Split

SharedT = TypeVar("SharedT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Counts = npt.NDArray[np.integer[Any]]


class PoolError(UserError, RuntimeError):
    """Work that a pool could not finish; the cause is chained."""


class BlockPool(Protocol):
    """Computes ``function(shared, item, device)`` for many items."""

    @property
    def device(self) -> str:
        """The torch device of every worker."""
        ...

    def carry(self, module: ModuleType) -> None:
        """Let what comes from ``module`` be computed where that is not installed."""
        ...

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """Yield (position of the item, result) as results arrive, in any order; items are read when needed."""
        ...

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """The sum of all results, arrays of equal shape and type. ValueError without items.

        ``on_done(position)`` is told of each item; of one whose result was lost, again.
        """
        ...


class InProcessPool:
    """One item after another in this process: for a machine without Ray, or a single GPU."""

    def __init__(self, device: str = "cpu"):
        self.device = device

    def carry(self, module: ModuleType) -> None:
        """Nothing: it is here."""

    def run(
        self, function: Callable[[SharedT, ItemT, str], ResultT], shared: SharedT, items: Iterable[ItemT]
    ) -> Iterator[tuple[int, ResultT]]:
        """As :meth:`BlockPool.run`, in order."""
        for position, item in enumerate(items):
            yield position, function(shared, item, self.device)

    def sum(
        self,
        function: Callable[[SharedT, ItemT, str], Counts],
        shared: SharedT,
        items: Iterable[ItemT],
        on_done: Callable[[int], None],
    ) -> Counts:
        """As :meth:`BlockPool.sum`, in order."""
        total: Counts | None = None
        for position, counts in self.run(function, shared, items):
            total = added(total, counts)
            on_done(position)
        return at_least_one(total)


def added(total: Counts | None, counts: Counts) -> Counts:
    """A total and what comes to it; None: nothing yet."""
    # In fresh memory: what came out of Ray's store is read-only.
    return counts if total is None else total + counts


def at_least_one(total: Counts | None) -> Counts:
    """The total. ValueError where nothing came to it."""
    if total is None:
        raise ValueError("Expected at least one item to add up, got none.")
    return total


IntArray = npt.NDArray[np.int64]
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 16, 64
_TRIM = b"fairpate trim"


def shard_key(seed: int) -> bytes:
    """A 32-byte sharding key from a run's seed. The seed decides the shards; the guarantee does not need it secret."""
    return hashlib.blake2b(f"fairpate shard key {seed}".encode(), digest_size=32).digest()


def assign_teachers(unit_ids: Sequence[str], num_teachers: int, key: bytes) -> IntArray:
    """The teacher, in ``range(num_teachers)``, of each record; shape (N,). Records of one unit have one teacher.

    ValueError for fewer than one teacher or a key outside 16..64 bytes.
    """
    if num_teachers < 1:
        raise ValueError(f"Expected num_teachers >= 1, got {num_teachers}.")
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ValueError(f"Expected a key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, got {len(key)}.")
    digests = (hashlib.blake2b(unit_id.encode(), key=key, digest_size=8).digest() for unit_id in unit_ids)
    # Of 64 bits: no teacher is likelier than another by more than num_teachers / 2^64.
    return np.array([int.from_bytes(digest) % num_teachers for digest in digests], dtype=np.int64)


def trim_shards(rows_T: Sequence[IntArray], record_ids: Sequence[str], max_size: int, key: bytes) -> list[IntArray]:
    """The shards with at most ``max_size`` rows each: those whose identifiers come first by a keyed hash, ascending.

    Which rows stay depends on their own shard only. The hash is apart from the one that assigns records to teachers.
    """

    def rank(row: int) -> bytes:
        return hashlib.blake2b(record_ids[row].encode(), key=key, person=_TRIM, digest_size=16).digest()

    def trim(rows: IntArray) -> IntArray:
        return rows if len(rows) <= max_size else np.sort(np.array(sorted(rows.tolist(), key=rank)[:max_size]))

    return [trim(rows) for rows in rows_T]


def shard_rows(teacher_N: IntArray, num_teachers: int) -> list[IntArray]:
    """The rows of each teacher's shard, ascending; one array per teacher, empty shards included."""
    # Stable: a teacher's rows stay in their order.
    order = np.argsort(teacher_N, kind="stable")
    sizes = np.bincount(teacher_N, minlength=num_teachers)
    return list(np.split(order, np.cumsum(sizes)[:-1]))


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

    All of it is read. Where that is too much, :func:`fairpate.files.exists` looks without reading.
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


Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Teachers that are trained and stored together. ``content`` names what determines them; private, as shards are."""

    teacher_indices: tuple[int, ...]
    content: str
    checkpoint: str


ArrayShard = tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]
Given = list[ArrayShard] | list[IntArray]
"""Of a block's teachers: their records, or the rows of them in what a worker reads itself."""


def blocks_in(
    checkpoint_dir: Path | Storage, num_teachers: int, size: int, content_of: Callable[[tuple[int, ...]], str]
) -> tuple[tuple[Block, ...], Storage | None]:
    """All teachers by blocks of ``size``, with the places of their checkpoints, named by what determines them."""
    storage = checkpoint_dir if isinstance(checkpoint_dir, Storage) else None
    folder = checkpoint_dir.uri if isinstance(checkpoint_dir, Storage) else checkpoint_dir.absolute()

    def block(indices: tuple[int, ...]) -> Block:
        content = content_of(indices)
        # All who may read checkpoints may read the storage's marker; names are seen by all who may list them.
        name = content if storage is None else keyed_name(content, storage.identity)
        return Block(teacher_indices=indices, content=content, checkpoint=join(folder, name))

    teachers = range(num_teachers)
    return tuple(block(tuple(teachers[start : start + size])) for start in range(0, num_teachers, size)), storage


def computed(
    function: Callable[[SharedT, tuple[Block, Given], str], ResultT],
    shared: SharedT,
    blocks: tuple[Block, ...],
    storage: Storage | None,
    given: Callable[[tuple[int, ...]], Given],
    workers: BlockPool,
    on_progress: Progress | None,
) -> Iterator[tuple[Block, ResultT]]:
    """What ``function`` gives for every block that has no checkpoint yet, in any order; progress is told of all.

    ``given(teachers)`` is what a worker is sent of a block.
    """
    missing, report = missing_blocks(blocks, storage, workers), TeacherCounter(blocks, on_progress)
    report.add(*(position for position in range(len(blocks)) if position not in missing))
    # A generator: a shard is copied when a worker asks for it, not all shards at once.
    items = ((blocks[position], given(blocks[position].teacher_indices)) for position in missing)
    for number, result in workers.run(function, shared, items):
        yield blocks[missing[number]], result
        report.add(missing[number])  # once its caller has stored it


def digest_of(blocks: Sequence[Block]) -> str:
    """Sixteen hexadecimal digits of all that determines these blocks; private."""
    names = "\n".join(block.content for block in blocks)
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


def missing_blocks(blocks: tuple[Block, ...], storage: Storage | None, workers: BlockPool) -> list[int]:
    """The blocks that are to be trained. What writes checkpoints also reads them, to see which are intact."""
    readers = InProcessPool() if storage is None else workers
    found = dict(readers.run(_is_stored, storage, (block.checkpoint for block in blocks)))
    return [position for position in range(len(blocks)) if not found[position]]


def _is_stored(storage: Storage | None, checkpoint: str, _: str) -> bool:
    if storage is not None:
        storage.require_here()
    return is_intact(checkpoint)


class TeacherCounter:
    """Tells a progress callback how many teachers are done; a block that is done again counts once."""

    def __init__(self, blocks: tuple[Block, ...], on_progress: Progress | None):
        self._sizes = [len(block.teacher_indices) for block in blocks]
        self._done: set[int] = set()
        self._on_progress = on_progress

    def add(self, *positions: int) -> None:
        """These blocks are done."""
        self._done.update(positions)
        if self._on_progress is not None and positions:
            self._on_progress(sum(self._sizes[position] for position in self._done), sum(self._sizes))


PredictionArray = npt.NDArray[np.int16]
VoteArray = npt.NDArray[np.int64]

_MAX_LOGITS_AT_ONCE = 2**18  # a batch's activations stay in the caches
_MAX_VALUES_AT_ONCE = 2**24  # of queries: what a worker copies and scales, however many there are


def count_block(
    weights: StackedWeights,
    spec: TeacherSpec,
    queries: npt.NDArray[np.generic],
    *,
    count_type: npt.DTypeLike = np.int64,
    device: str = "cpu",
) -> Counts:
    """``votes_QC`` of a block of teachers on features (Q, ...), a bounded number of queries at a time."""
    parts = [queries] if _one_by_one(spec) else _bounded(queries)
    return np.concatenate(
        [
            count_votes(predict_votes(weights, spec, part, device=device), spec.num_classes).astype(count_type)
            for part in parts
        ]
    )


@torch.inference_mode()
def predict_votes(
    weights: StackedWeights, spec: TeacherSpec, queries: npt.NDArray[np.generic], *, device: str = "cpu"
) -> PredictionArray:
    """The class each of T teachers chooses for each of Q queries, (T, Q) ``int16``; ties go to the smaller class."""
    network = {name: value for name, value in weights.items() if name not in (SHARD_MEAN, SHARD_STD)}
    statistics = (weights[SHARD_MEAN], weights[SHARD_STD]) if SHARD_MEAN in weights else None
    if _one_by_one(spec):
        predictions = _predict_one_by_one(network, statistics, spec, queries, device)
    else:
        x = _tensor(queries)
        if spec.model.trainable == "head":
            x = frozen_features(spec.model, x, device=device)
        predictions = _predict_stacked(network, statistics, x, device)
    return predictions.to(torch.int16).numpy()


def count_votes(predictions_TQ: PredictionArray, num_classes: int) -> VoteArray:
    """``votes_QC``: how many teachers chose each class. Every row sums to T.

    ValueError for a prediction outside ``range(num_classes)``.
    """
    predictions = np.asarray(predictions_TQ)
    if predictions.size and not 0 <= predictions.min() <= predictions.max() < num_classes:
        raise ValueError(f"Expected predictions in 0..{num_classes - 1}, got {predictions.min()}..{predictions.max()}.")
    return np.stack([(predictions == k).sum(axis=0, dtype=np.int64) for k in range(num_classes)], axis=1)


def _one_by_one(spec: TeacherSpec) -> bool:
    return is_convolutional(spec.model) and spec.model.trainable == "all"


def _bounded(queries: npt.NDArray[np.generic]) -> list[npt.NDArray[np.generic]]:
    at_once = max(1, _MAX_VALUES_AT_ONCE // max(1, math.prod(queries.shape[1:])))
    # One part at least, of no queries too: no parts could not be joined.
    return [queries[start : start + at_once] for start in range(0, max(1, len(queries)), at_once)]


def _tensor(queries: npt.NDArray[np.generic]) -> Tensor:
    return torch.tensor(queries)  # a copy in torch's own memory: the object store's is read-only, and less aligned


def _predict_one_by_one(
    weights: StackedWeights,
    statistics: tuple[Tensor, Tensor] | None,
    spec: TeacherSpec,
    queries: npt.NDArray[np.generic],
    device: str,
) -> Tensor:
    """Convolutional teachers in turn: each takes its place in one network once, whatever the number of queries."""
    model = build_architecture(spec.model, input_shape=queries.shape[1:], num_classes=spec.num_classes).to(device)
    predictions = []
    for teacher in range(len(next(iter(weights.values())))):
        model.load_state_dict({name: value[teacher] for name, value in weights.items()})
        scaling = None if statistics is None else (statistics[0][teacher], statistics[1][teacher])
        parts = [predict_logits(model, _scaled(part, scaling)).argmax(dim=1) for part in _bounded(queries)]
        predictions.append(torch.cat(parts))
    return torch.stack(predictions)


def _scaled(queries: npt.NDArray[np.generic], statistics: tuple[Tensor, Tensor] | None) -> Tensor:
    x = _tensor(queries)
    return x if statistics is None else standardize(scale_bytes(x), *statistics)


def _predict_stacked(
    weights: StackedWeights, statistics: tuple[Tensor, Tensor] | None, x: Tensor, device: str
) -> Tensor:
    """Dense teachers at once: their first layers, one above the other, are one wide matrix product."""
    layers = [(w.to(device), b.to(device)) for w, b in _dense_layers(weights, statistics)]
    layers[-1] = _relative_to_class_0(*layers[-1])
    queries = scale_bytes(x).flatten(start_dim=1).to(layers[0][0].dtype)
    num_teachers, widest = len(layers[0][0]), max(w.shape[1] for w, _ in layers)
    batches = torch.split(queries, max(1, _MAX_LOGITS_AT_ONCE // (num_teachers * widest)))
    return torch.cat([_largest_class(_dense_logits(layers, batch.to(device))).cpu() for batch in batches], dim=1)


def _dense_layers(weights: StackedWeights, statistics: tuple[Tensor, Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    """(weight, bias) of each layer in order, shapes (T, out, in) and (T, out); a teacher's scaling joins the first."""
    # By number: as text, layer 10 comes before layer 2.
    names = sorted({name.split(".")[0] for name in weights}, key=int)
    layers = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
    if statistics is not None:
        weight, bias = layers[0]
        pixels = weight.shape[2] // statistics[0].shape[1]
        mean, std = (value.repeat_interleave(pixels, dim=1) for value in statistics)
        # W (x - mean) / std + b as one layer, so that scaling costs nothing at prediction.
        scaled = weight / std[:, None]
        layers[0] = (scaled, bias - (scaled @ mean[:, :, None])[:, :, 0])
    return layers


def _relative_to_class_0(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer for classes 1, 2, ... minus that for class 0, whose logit becomes 0 and costs nothing."""
    return weight[:, 1:] - weight[:, :1], bias[:, 1:] - bias[:, :1]


def _largest_class(logits: Tensor) -> Tensor:
    """The winner (T, B) ``int16`` from logits (T, C - 1, B) relative to class 0.

    Class by class over contiguous rows, which is 10 times as fast as ``argmax`` over few classes.
    """
    # Class 0 stands at 0, and strict comparisons leave ties to the smaller class.
    best = logits[:, 0].clamp(min=0)
    winner = (logits[:, 0] > 0).to(torch.int16)
    for k in range(1, logits.shape[1]):
        winner.masked_fill_(logits[:, k] > best, k + 1)
        best = torch.maximum(best, logits[:, k])
    return winner


def _dense_logits(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    """The last layer's values (T, out, B) for records (B, F) that all teachers share."""
    first_weight, first_bias = layers[0]
    num_teachers, width, _ = first_weight.shape
    out = torch.addmm(first_bias.reshape(-1, 1), first_weight.reshape(num_teachers * width, -1), x.T)
    out = out.view(num_teachers, width, len(x))
    for weight, bias in layers[1:]:
        out = torch.baddbmm(bias[:, :, None], weight, out.relu_())
    return out


# Teachers per block, whatever the number of workers, so that a checkpoint is found again with more or fewer of them. A
# stack gains from being wide, most of all on an accelerator; a loop only from workers that finish together. Large
# teachers come in small blocks: a block is what a lost worker costs.
_LOOPED_BLOCK, _STACKED_BLOCK, _ACCELERATED_BLOCK = 4, 50, 100
_MAX_BLOCK_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Trained teachers on disk, in blocks that cover ``range(num_teachers)`` in order.

    ``storage`` holds them for every node; None means a folder that only this process reads.
    """

    spec: TeacherSpec
    blocks: tuple[Block, ...]
    storage: Storage | None = None

    @property
    def num_teachers(self) -> int:
        """Number of teachers T."""
        return sum(len(block.teacher_indices) for block in self.blocks)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any shard, model, training, seed or library; private."""
        return digest_of(self.blocks)

    def sources(self) -> Iterator[str | ArrayWeights]:
        """Per block, what a worker reads its weights from: their place in the storage, or else the weights."""
        for block in self.blocks:
            yield load_block(block.checkpoint) if self.storage is None else block.checkpoint


@dataclass(frozen=True, kw_only=True)
class _Lessons:
    """What every block is trained with."""

    spec: TeacherSpec
    engine: Engine
    storage: Storage | None
    read: Callable[[], Split] | None


@dataclass(frozen=True, kw_only=True)
class _Ballot:
    """What every block votes on; its counts never exceed ``count_type``."""

    spec: TeacherSpec
    queries: npt.NDArray[np.generic]
    count_type: np.dtype[Any]


class _TrainedBlock(NamedTuple):
    """The weights, or None where the worker has stored them itself, and how many teachers diverged."""

    weights: ArrayWeights | None
    num_diverged: int


@dataclass(frozen=True, kw_only=True)
class _Shards:
    """The private records of every teacher, copied when they are asked for."""

    private: Split
    rows: list[IntArray]

    def of(self, teachers: tuple[int, ...]) -> list[Shard]:
        chosen = (torch.from_numpy(self.rows[teacher]) for teacher in teachers)
        return [Shard(x=self.private.x[row], y=self.private.y[row]) for row in chosen]

    def given(self, teachers: tuple[int, ...], *, as_rows: bool) -> Given:
        """What a worker is sent: rows of what it reads itself, or the records."""
        if as_rows:
            return [self.rows[teacher] for teacher in teachers]
        return [(shard.x.numpy(), shard.y.numpy()) for shard in self.of(teachers)]


def train_ensemble(
    private: Split,
    config: TeachersConfig,
    *,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    pool: BlockPool | None = None,
    on_progress: Progress | None = None,
    read: Callable[[], Split] | None = None,
) -> Ensemble:
    """Shard ``private`` by a keyed hash, and train the teachers that ``checkpoint_dir`` does not hold yet.

    ``pool`` None trains in this process. ``on_progress(teachers_done, num_teachers)`` counts restored ones too.
    ``read`` gives ``private`` again, wherever it is called: workers then read their shards and none is sent to them.
    ValueError for labels outside ``range(num_classes)``; PoolError where a worker reads other records.
    """
    _check_labels(private.y, num_classes)
    workers = pool or InProcessPool()
    spec = TeacherSpec(
        model=config.model,
        fit=config.fit,
        num_classes=num_classes,
        seed=seed,
        standardize=config.standardize,
        max_shard_size=config.max_shard_size,
    )
    engine = choose_engine(config.model, workers.device) if config.engine == "auto" else config.engine
    shards = _Shards(private=private, rows=rows_of_teachers(private, config, seed))

    def content_of(teachers: tuple[int, ...]) -> str:
        return block_name(shards.of(teachers), spec, teachers, engine)

    size = config.block_size or _block_size(spec, engine, workers.device, tuple(private.x.shape[1:]))
    blocks, storage = blocks_in(checkpoint_dir, config.num_teachers, size, content_of)
    lessons = _Lessons(spec=spec, engine=engine, storage=storage, read=read)
    _train_missing(blocks, lessons, shards, workers, on_progress)
    return Ensemble(spec=spec, blocks=blocks, storage=storage)


def _train_missing(
    blocks: tuple[Block, ...], lessons: _Lessons, shards: _Shards, workers: BlockPool, on_progress: Progress | None
) -> None:
    """Train and store the blocks that have no checkpoint yet; a warning says how many teachers diverged."""
    given = partial(shards.given, as_rows=lessons.read is not None)
    num_diverged = 0
    for block, done in computed(_train_block, lessons, blocks, lessons.storage, given, workers, on_progress):
        if done.weights is not None:
            save_block(block.checkpoint, done.weights)
        num_diverged += done.num_diverged
    if num_diverged:
        _log.warning(
            "%d of %d teachers diverged and vote with their initial weights; lower teachers.fit.learning_rate.",
            num_diverged,
            sum(len(block.teacher_indices) for block in blocks),
        )


def collect_votes(
    ensemble: Ensemble, queries_x: Tensor, *, pool: BlockPool | None = None, on_progress: Progress | None = None
) -> VoteArray:
    """``votes_QC``: how many teachers choose each class for each query; every row sums to T. Private.

    Workers count and add up; one total per worker comes here.
    """
    report = TeacherCounter(ensemble.blocks, on_progress)
    # Counts travel in the smallest type that holds all teachers.
    ballot = _Ballot(
        spec=ensemble.spec, queries=queries_x.numpy(), count_type=np.min_scalar_type(ensemble.num_teachers)
    )
    counts = (pool or InProcessPool()).sum(_count_block, ballot, ensemble.sources(), report.add)
    votes_QC = counts.astype(np.int64)
    # A block that was lost, or counted twice, shows in the sums.
    if (votes_QC.sum(axis=1) != ensemble.num_teachers).any():
        raise PoolError(f"Expected {ensemble.num_teachers} votes per query, got {sorted(set(votes_QC.sum(axis=1)))}.")
    return votes_QC


def rows_of_teachers(private: Split, config: TeachersConfig, seed: int) -> list[IntArray]:
    """The rows of ``private`` that each teacher learns from."""
    rows = shard_rows(assign_teachers(private.together, config.num_teachers, shard_key(seed)), config.num_teachers)
    if config.max_shard_size is not None:
        rows = _trimmed(rows, private.record_id, config.max_shard_size, shard_key(seed))
    return rows


def _trimmed(rows: list[IntArray], record_ids: Sequence[str], max_size: int, key: bytes) -> list[IntArray]:
    """The shards as they are trained on. How many were larger is for the operator's log alone."""
    num_larger = sum(len(row) > max_size for row in rows)
    if num_larger:
        _log.warning(
            "%d shards had more than teachers.max_shard_size=%d records and were trimmed.", num_larger, max_size
        )
    return trim_shards(rows, record_ids, max_size, key)


def _shards_of(block: Block, given: Any, lessons: _Lessons) -> list[Shard]:
    """The records that a block learns from: those that came, or the rows of what this process reads."""
    if lessons.read is None:
        # Copied, because arrays out of Ray's store are read-only.
        return [Shard(x=torch.tensor(x), y=torch.tensor(y)) for x, y in given]
    shards = read_shards(lessons.read, given)
    # What it is called follows from the records: by other ones it would be stored as what it is not.
    if block_name(shards, lessons.spec, block.teacher_indices, lessons.engine) != block.content:
        raise other_records()
    return shards


def read_shards(read: Callable[[], Split], given: Sequence[IntArray]) -> list[Shard]:
    """The records in rows ``given`` of what ``read`` gives. PoolError where it has no such rows."""
    private = read()
    if any(int(rows.max(initial=-1)) >= len(private) for rows in given):
        raise other_records()
    return [Shard(x=private.x[rows], y=private.y[rows]) for rows in map(torch.tensor, given)]


def other_records() -> PoolError:
    """What a worker raises that reads other records than the block's content says."""
    return PoolError(
        "ray.read_shards: a worker reads other private records than the run does; give every node the same files, or "
        "set it to false."
    )


def _train_block(lessons: _Lessons, item: tuple[Block, Given], device: str) -> _TrainedBlock:
    block, given = item
    shards = _shards_of(block, given, lessons)
    diverged: list[int] = []
    trained = train_teachers(
        shards,
        lessons.spec,
        teacher_indices=block.teacher_indices,
        engine=lessons.engine,
        device=device,
        on_diverged=diverged.append,
    )
    weights: ArrayWeights = {name: value.numpy() for name, value in trained.items()}
    if lessons.storage is None:
        return _TrainedBlock(weights, len(diverged))
    # A path may lead elsewhere on this node, and then nobody would find the checkpoint.
    lessons.storage.require_here()
    save_block(block.checkpoint, weights)
    return _TrainedBlock(None, len(diverged))


def _count_block(ballot: _Ballot, source: str | ArrayWeights, device: str) -> Counts:
    weights = load_block(source) if isinstance(source, str) else source
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    return count_block(tensors, ballot.spec, ballot.queries, count_type=ballot.count_type, device=device)


def _block_size(spec: TeacherSpec, engine: Engine, device: str, input_shape: tuple[int, ...]) -> int:
    stacked = _STACKED_BLOCK if device == "cpu" else _ACCELERATED_BLOCK
    if spec.model.trainable == "head":  # what is stored is small, and every block computes features of all queries
        return stacked
    model = build_architecture(spec.model, input_shape=input_shape, num_classes=spec.num_classes)
    teacher_bytes = sum(int(value.nbytes) for value in model.state_dict().values())
    return max(1, min(stacked if engine == "stacked" else _LOOPED_BLOCK, _MAX_BLOCK_BYTES // teacher_bytes))


def _check_labels(y: Tensor, num_classes: int) -> None:
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"Expected labels in 0..{num_classes - 1}, got {int(y.min())}..{int(y.max())}.")
