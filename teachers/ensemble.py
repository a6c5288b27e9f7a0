"""The ensemble of teachers: shards by keyed hash, training and storage in blocks of teachers, and the votes.

**Shards.** PATE's guarantee (Papernot et al. 2017, arXiv:1610.05755) needs one record to touch one teacher. The teacher
of a record is ``BLAKE2b(key, unit_id) mod num_teachers``: it does not depend on any other record, so adding or removing
a record changes exactly one shard. Where persons are protected, person ids replace record ids: all records of a person
reach one teacher. Ids do not depend on the sensitive attribute, so changing an attribute moves no record. A shard may
be empty.

**Blocks.** Training and voting are maps over blocks of teachers on a pool (:class:`teachers.work.BlockPool`): this
process, or Ray actors (:mod:`teachers.ray_pool`). A block is stored as one safetensors object, named by a hash of
everything that determines its teachers: shards, model, training, seed and library versions. So a resumed run trains
only the missing blocks. An object that is truncated or altered counts as missing. Teachers memorise their shards, so
local checkpoints are readable by their owner only. A shard is sent only to the worker that trains it.

**Votes.** ``predictions_TQ`` is private and never leaves the worker; the vote counts stay with the operator, and only
the aggregator's noise may turn them into labels.

Shapes: T teachers, N records, Q queries, C classes, F features, B records of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from fairpate import __version__
from fairpate.config import AugmentConfig, ShardsConfig, TeachersTraining
from fairpate.files import Location, Storage, arrays_digest, exists, join, read, write
from fairpate.nn.fit import UNCHANGED, exact_convolutions, frozen_features, predict_logits
from fairpate.nn.models import CONVOLUTIONAL, build_model, scale_bytes
from fairpate.types import Advance, IntArray, UserError
from teachers.ridge import FeatureMap
from teachers.teacher import Engine, Ridge, Shard, StackedWeights, TeacherSpec, choose_engine, train_teachers
from teachers.work import BlockFunction, BlockPool, Counts, PoolError, count

if TYPE_CHECKING:
    from fairpate.data.dataset import Split

PredictionArray = npt.NDArray[np.int16]
ArrayWeights = dict[str, npt.NDArray[np.generic]]
_MIN_KEY_BYTES, _MAX_KEY_BYTES = 16, 64
_TRIM = b"fairpate trim"
_DIGEST = "sha256"
_DEFINITION = 2  # increase it with any change after which the same inputs train other teachers
_HEADER_LENGTH = 8
_MAX_LOGITS_AT_ONCE = 2**18  # a batch's activations stay in the caches
_MAX_VALUES_AT_ONCE = 2**24  # of queries, which a worker copies and scales
# Teachers per block, independent of the number of workers, so that checkpoints are found again with more or fewer
# workers. A stack gains from being wide, most of all on an accelerator; a loop only from workers that finish together.
# Large teachers come in small blocks: a lost worker loses one block.
_LOOPED_BLOCK, _STACKED_BLOCK, _ACCELERATED_BLOCK, _SOLVED_BLOCK = 4, 50, 100, 500
_MAX_BLOCK_BYTES = 2**29
_log = logging.getLogger(__name__)


def shard_key(seed: int) -> bytes:
    """Derive the 32-byte key of the hash that assigns records to shards from a run's seed. The privacy guarantee does
    not need the seed to be secret."""
    return hashlib.blake2b(f"fairpate shard key {seed}".encode(), digest_size=32).digest()


def assign_teachers(unit_ids: Sequence[str], num_teachers: int, key: bytes) -> IntArray:
    """Return the index of each record's teacher, shape (N,). ``unit_ids`` are ids of records, or of persons; records
    with equal ids get the same teacher.

    ``key`` is the key of the hash that assigns them. ValueError for fewer than one teacher, or for a key of fewer than
    16 or more than 64 bytes.
    """
    if num_teachers < 1:
        raise ValueError(f"Expected num_teachers >= 1, got {num_teachers}.")
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ValueError(f"Expected a hash key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, got {len(key)}.")
    # A function of the unit alone: in equal pieces of a table, one record more would shift many others.
    digests = (hashlib.blake2b(unit_id.encode(), key=key, digest_size=8).digest() for unit_id in unit_ids)
    # With 64 bits no teacher is likelier than another by more than num_teachers / 2^64.
    return np.array([int.from_bytes(digest) % num_teachers for digest in digests], dtype=np.int64)


def trim_shards(rows_T: Sequence[IntArray], record_ids: Sequence[str], max_size: int, key: bytes) -> list[IntArray]:
    """Cut each shard to at most ``max_size`` rows, and return the row numbers that remain in it, in ascending order.

    Rows are ordered by a hash of their record ids, keyed with ``key``, and the first ones remain. So which rows of a
    shard remain depends on this shard only. The hash is independent of the one that assigns teachers.
    """
    kept = []
    for rows in rows_T:
        first = np.arange(len(rows))
        if len(rows) > max_size:
            names = (record_ids[row].encode() for row in rows)
            ranks = [hashlib.blake2b(name, key=key, person=_TRIM, digest_size=16).digest() for name in names]
            # Sorted back: the hash decides which rows stay, and nothing else.
            first = np.sort(sorted(range(len(rows)), key=ranks.__getitem__)[:max_size])
        kept.append(rows[first])
    return kept


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read; the message names its location and the remedy."""


def save_block(location: Location, weights: ArrayWeights) -> None:
    """Write a block of teachers' ``weights`` to ``location`` atomically; a new local folder gets mode 0700."""
    # For a view safetensors would write the memory behind it.
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    write(location, save(arrays, metadata={_DIGEST: arrays_digest(arrays)}))


def load_block(location: Location) -> ArrayWeights:
    """Read and return a block of teachers' weights at ``location``; :class:`CheckpointError` if they are missing or
    damaged."""
    try:
        content = read(location)
        weights: ArrayWeights = dict(load(content))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{location}: this checkpoint cannot be read ({error}); train the teachers again."
        ) from error
    # The header of a safetensors file is its length in eight bytes, then JSON.
    end = _HEADER_LENGTH + int.from_bytes(content[:_HEADER_LENGTH], "little")
    metadata: dict[str, str] = json.loads(content[_HEADER_LENGTH:end]).get("__metadata__", {})
    # safetensors has no checksum of its own: altered tensors of the right size would load.
    if metadata.get(_DIGEST) != arrays_digest(weights):
        raise CheckpointError(f"{location}: this checkpoint does not match its digest; train the teachers again.")
    return weights


def is_stored(storage: Storage | None, location: Location, _: str = "") -> bool:
    """Return whether there is a complete checkpoint of teachers at ``location``, which is read in full. A damaged
    checkpoint is logged as a warning."""
    if storage is not None:
        storage.require_here()
    if not exists(location):
        return False
    try:
        load_block(location)
    except CheckpointError as error:
        _log.warning("The teachers of a damaged checkpoint are trained again: %s", error)
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Block:
    """Teachers that are trained and stored together, and the location of their ``checkpoint``.

    ``content`` is a hash of everything that determines the teachers, shards included, and so as private as the shards.
    """

    teacher_indices: tuple[int, ...]
    content: str
    checkpoint: str


ArrayShard = tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]


def stored_blocks(
    checkpoint_dir: Path | Storage,
    num_teachers: int,
    size: int,
    *,
    kind: str,
    determined_by: Mapping[str, Any],
    shards_of: Callable[[tuple[int, ...]], Sequence[tuple[Any, Any]]],
    function: BlockFunction,
    shared: Any,
    workers: BlockPool,
    on_progress: Advance | None,
) -> tuple[tuple[Block, ...], str, list[Any]]:
    """Compute and store the blocks of ``size`` teachers that are missing in ``checkpoint_dir``.

    Return all blocks, a private digest of all their contents (sixteen hexadecimal digits), and a list with one value
    for each block that this call computed, in any order.

    A block's file is named after ``kind``, its first teacher, and a hash of everything that determines the block:
    ``determined_by`` (JSON values), its teachers' numbers, and their shards. ``shards_of(teachers)`` returns the shards
    as pairs of tensors or arrays. They are sent to the block's worker, where ``function(shared, (block, shards),
    device)`` returns the arrays to store (None if the worker stored them itself) and the value for the list.
    ``on_progress`` counts the teachers of blocks stored before as done.
    """
    storage = checkpoint_dir if isinstance(checkpoint_dir, Storage) else None
    folder = checkpoint_dir.uri if isinstance(checkpoint_dir, Storage) else checkpoint_dir.absolute()
    blocks = []
    for start in range(0, num_teachers, size):
        indices = tuple(range(start, min(start + size, num_teachers)))
        # A teacher's number too: it seeds the teacher's weights and batches.
        settings = json.dumps({**determined_by, "teachers": indices}, sort_keys=True)
        hashed = hashlib.blake2b(settings.encode(), digest_size=16)
        for array in itertools.chain.from_iterable(shards_of(indices)):
            # Type and shape too: the same bytes may be another array.
            hashed.update(f"{array.dtype} {tuple(array.shape)}".encode())
            hashed.update(np.ascontiguousarray(array).tobytes())
        name = content = f"{kind}-{start:05d}-{hashed.hexdigest()}.safetensors"
        if storage is not None:
            # A plain name is a hash of whole shards: where others may list names, an attacker who knows all records but
            # one could try candidates for it. Only readers of checkpoints can read the storage's marker, the key.
            sealed = hashlib.blake2b(content.encode(), key=storage.identity.encode(), digest_size=16).hexdigest()
            name = f"{content.rpartition('-')[0]}-{sealed}.safetensors"
        blocks.append(Block(teacher_indices=indices, content=content, checkpoint=join(folder, name)))
    # Workers read and write a shared storage, so they test it; a local folder is known to this process alone.
    readers = BlockPool() if storage is None else workers
    found = dict(readers.run(is_stored, storage, (block.checkpoint for block in blocks)))
    missing = [block for position, block in enumerate(blocks) if not found[position]]
    report, values = on_progress or (lambda *_: None), []
    if done := num_teachers - sum(len(block.teacher_indices) for block in missing):
        report(done, num_teachers)
    # A generator: a shard is copied when a worker asks for it, not all shards at once.
    items = (
        (block, [(np.asarray(x), np.asarray(y)) for x, y in shards_of(block.teacher_indices)]) for block in missing
    )
    for number, (arrays, value) in workers.run(function, shared, items):
        block = missing[number]
        if arrays is not None:
            save_block(block.checkpoint, arrays)
        values.append(value)
        count("blocks_trained")
        count("teachers_trained", len(block.teacher_indices))
        done += len(block.teacher_indices)
        report(done, num_teachers)
    contents = "\n".join(block.content for block in blocks)
    return tuple(blocks), hashlib.blake2b(contents.encode(), digest_size=8).hexdigest(), values


@torch.inference_mode()
def predict_votes(
    weights: StackedWeights, spec: TeacherSpec, queries: npt.NDArray[np.generic], *, device: str = "cpu"
) -> PredictionArray:
    """Return the class that each teacher predicts for each query, (T, Q) ``int16``; ties go to the smaller class.

    ``weights`` have the teachers as their first axis. Convolutional teachers predict one after another. Dense teachers
    predict together: their stacked first layers are one wide matrix product.
    """
    at_once = max(1, _MAX_VALUES_AT_ONCE // max(1, math.prod(queries.shape[1:])))
    # At least one part, also without queries, because an empty list cannot be concatenated. Each part is copied into
    # torch's own memory below: the memory of Ray's object store is read-only, and less aligned.
    parts = [queries[start : start + at_once] for start in range(0, max(1, len(queries)), at_once)]
    if spec.model.name in CONVOLUTIONAL and spec.model.trainable == "all":
        model = build_model(spec.model, input_shape=queries.shape[1:], num_classes=spec.num_classes).to(device)
        chosen = []
        for teacher in range(len(next(iter(weights.values())))):
            # Loaded into the network once for all queries.
            model.load_state_dict({name: value[teacher] for name, value in weights.items()})
            with exact_convolutions():
                chosen.append(torch.cat([predict_logits(model, torch.tensor(part)).argmax(dim=1) for part in parts]))
        return torch.stack(chosen).to(torch.int16).numpy()
    # (weight, bias) of each layer, shapes (T, out, in) and (T, out). By number: as text, layer 10 comes before layer 2.
    names = sorted({name.split(".")[0] for name in weights}, key=int)
    layers = [(weights[f"{name}.weight"].to(device), weights[f"{name}.bias"].to(device)) for name in names]
    weight, bias = layers[-1]
    if spec.num_classes == 2:
        # Minus the row of class 0, the logit of class 0 is 0 and need not be computed.
        layers[-1] = weight[:, 1:] - weight[:, :1], bias[:, 1:] - bias[:, :1]
    (first_weight, first_bias), (num_teachers, width, _) = layers[0], layers[0][0].shape
    widest = max(weight.shape[1] for weight, _ in layers)
    winners = []
    for part in parts:
        x = torch.tensor(part)
        if spec.ridge is not None:
            x = spec.ridge.features(x)
        elif spec.model.trainable == "head":
            with exact_convolutions():
                x = frozen_features(spec.model, x, device=device)
        flat = scale_bytes(x).flatten(start_dim=1).to(first_weight.dtype)
        for batch in torch.split(flat, max(1, _MAX_LOGITS_AT_ONCE // (num_teachers * widest))):
            rows = first_weight.reshape(num_teachers * width, -1)
            out = torch.addmm(first_bias.reshape(-1, 1), rows, batch.to(device).T).view(num_teachers, width, len(batch))
            for weight, bias in layers[1:]:
                out = torch.baddbmm(bias[:, :, None], weight, out.relu_())
            # Class by class over contiguous rows, which is 10 times as fast as `argmax` over few classes. Strict
            # comparisons leave ties to the smaller class.
            if spec.num_classes == 2:
                winners.append((out[:, 0] > 0).to(torch.int16).cpu())
                continue
            best, winner = out[:, 0], torch.zeros_like(out[:, 0], dtype=torch.int16)
            for k in range(1, out.shape[1]):
                winner.masked_fill_(out[:, k] > best, k)
                best = torch.maximum(best, out[:, k])
            winners.append(winner.cpu())
    return torch.cat(winners, dim=1).numpy()


def count_votes(predictions_TQ: PredictionArray, num_classes: int) -> IntArray:
    """Return ``votes_QC``: how many teachers chose each class for each query. Every row sums to T.

    ValueError for a prediction outside ``range(num_classes)``.
    """
    predictions = np.asarray(predictions_TQ)
    if predictions.size and not 0 <= predictions.min() <= predictions.max() < num_classes:
        raise ValueError(
            f"Expected class predictions in 0..{num_classes - 1}, got {predictions.min()}..{predictions.max()}."
        )
    return np.stack([(predictions == k).sum(axis=0, dtype=np.int64) for k in range(num_classes)], axis=1)


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Trained and stored teachers, in blocks that cover ``range(num_teachers)`` in order.

    ``storage`` is the storage that all nodes share. With None, blocks are in a local folder that only this process
    reads, and weights are sent to the workers that count votes.
    """

    spec: TeacherSpec
    num_teachers: int
    blocks: tuple[Block, ...]
    digest: str
    """Sixteen hexadecimal digits, a hash of shards, model, training, seed and library versions. Private: not to be
    published."""
    storage: Storage | None = None

    @property
    def sources(self) -> Iterator[str | ArrayWeights]:
        """The location of each block in the storage, or the weights of each block in a local folder."""
        places = (block.checkpoint for block in self.blocks)
        return map(load_block, places) if self.storage is None else places


@dataclass(frozen=True, kw_only=True)
class CountTask:
    """The settings with which workers count votes: the specification of the teachers, the queries (Q, ...), and the
    type of vote counts."""

    spec: TeacherSpec
    queries: npt.NDArray[np.generic]
    count_type: str = "int64"


def train_ensemble(
    private: Split,
    config: TeachersTraining,
    *,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    augment: AugmentConfig = UNCHANGED,
    public_x: Tensor | None = None,
    pool: BlockPool | None = None,
    on_progress: Advance | None = None,
) -> Ensemble:
    """Divide ``private`` into shards, train the teachers that ``checkpoint_dir`` lacks, and return all teachers.

    ``public_x``: the public vectors to which the features of teachers in closed form are fitted; networks need none.
    Without a ``pool``, teachers are trained in this process. ``on_progress(teachers_done, num_teachers)`` counts
    teachers that were stored before as done. ValueError for labels outside ``range(num_classes)``.
    """
    y = private.y
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ValueError(f"Expected labels in 0..{num_classes - 1}, got {int(y.min())}..{int(y.max())}.")
    workers, ridge = pool or BlockPool(), None
    if config.ridge is not None:
        assert public_x is not None
        features = FeatureMap.of(public_x, config.ridge.num_features)
        ridge = Ridge(features=features, penalty=config.ridge.penalty)
    spec = TeacherSpec(
        model=config.model,
        fit=config.fit,
        # If the last layer alone is trained, a picture's features are computed once, so it cannot be augmented.
        augment=UNCHANGED if config.model.trainable == "head" else augment,
        num_classes=num_classes,
        seed=seed,
        max_shard_size=config.max_shard_size,
        ridge=ridge,
    )
    engine = choose_engine(config.model, workers.device)
    rows = rows_of_teachers(private, config, seed)

    def shards_of(teachers: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        # Cut anew for each use: all shards together would be a second copy of the private records.
        chosen = (torch.from_numpy(rows[teacher]) for teacher in teachers)
        return [(private.x[row], private.y[row]) for row in chosen]

    size = config.block_size
    if not size:
        size = _STACKED_BLOCK if workers.device == "cpu" else _ACCELERATED_BLOCK
        if ridge is not None:
            size = _SOLVED_BLOCK
        # If the last layer alone is trained, a block stores few weights but computes the features of all queries:
        # blocks may be large.
        elif config.model.trainable != "head":
            model = build_model(config.model, input_shape=tuple(private.x.shape[1:]), num_classes=num_classes)
            teacher_bytes = sum(int(value.nbytes) for value in model.state_dict().values())
            size = max(1, min(size if engine == "stacked" else _LOOPED_BLOCK, _MAX_BLOCK_BYTES // teacher_bytes))
    storage = checkpoint_dir if isinstance(checkpoint_dir, Storage) else None
    blocks, digest, diverged = stored_blocks(
        checkpoint_dir,
        config.num_teachers,
        size,
        kind="teachers",
        determined_by={
            # A weights file counts by its checksum: the same file at another path trains the same teachers.
            "model": spec.model.model_dump(mode="json", exclude={"weights": {"path"}, "python": True}),
            "fit": spec.fit.model_dump(mode="json"),
            "augment": spec.augment.model_dump(mode="json"),
            "num_classes": num_classes,
            "seed": seed,
            "max_shard_size": config.max_shard_size,
            "definition": _DEFINITION,
            # Engines agree up to rounding only.
            "engine": engine,
            # Another library may round otherwise, and so train other teachers.
            "versions": [__version__, torch.__version__],
        }
        | ({} if ridge is None else {"ridge": ridge.digest}),
        shards_of=shards_of,
        function=_train_block,
        shared=(spec, engine, storage),
        workers=workers,
        on_progress=on_progress,
    )
    if num_diverged := sum(diverged):
        _log.warning(
            "%d of %d teachers diverged and vote with their initial weights; lower teachers.fit.learning_rate.",
            num_diverged,
            config.num_teachers,
        )
    return Ensemble(spec=spec, num_teachers=config.num_teachers, blocks=blocks, digest=digest, storage=storage)


def collect_votes(
    ensemble: Ensemble, queries_x: Tensor, *, pool: BlockPool | None = None, on_progress: Advance = lambda *_: None
) -> IntArray:
    """Return ``votes_QC``, the number of teachers that predict each class for each query. Private: not to be published.

    Every row sums to T. Each worker adds up the votes of its teachers and returns only the sum. Without a ``pool``,
    votes are counted in this process.
    """
    # Counts travel in the smallest type that holds all teachers.
    count_type = np.min_scalar_type(ensemble.num_teachers).name
    task = CountTask(spec=ensemble.spec, queries=queries_x.numpy(), count_type=count_type)
    num_done = 0

    def advance(position: int) -> None:
        nonlocal num_done
        size = len(ensemble.blocks[position].teacher_indices)
        count("votes_collected", size * len(queries_x))
        num_done += size
        on_progress(num_done, ensemble.num_teachers)

    counts = (pool or BlockPool()).sum(count_block, task, ensemble.sources, on_done=advance)
    return checked_votes(counts.astype(np.int64), ensemble.num_teachers)


def checked_votes(votes_QC: IntArray, num_teachers: int) -> IntArray:
    """Return ``votes_QC`` unchanged. PoolError unless every teacher voted once on every query."""
    # A block that was lost, or counted twice, shows in the sums.
    if (votes_QC.sum(axis=1) != num_teachers).any():
        raise PoolError(
            f"Expected {num_teachers} votes per query, got {sorted(set(votes_QC.sum(axis=1)))}: a block of teachers "
            "was lost or counted twice; give the same command again."
        )
    return votes_QC


def rows_of_teachers(private: Split, config: ShardsConfig, seed: int) -> list[IntArray]:
    """Return for each teacher the row numbers, ascending, of the ``private`` records from which it learns; a teacher
    may have none."""
    teacher_N = assign_teachers(private.together, config.num_teachers, shard_key(seed))
    sizes = np.bincount(teacher_N, minlength=config.num_teachers)
    # Stable: a teacher's rows stay in their order.
    rows = np.split(np.argsort(teacher_N, kind="stable"), np.cumsum(sizes)[:-1])
    max_size = config.max_shard_size
    if max_size is None:
        return rows
    if num_larger := int((sizes > max_size).sum()):
        # The number depends on private records: it is written to the operator's log only.
        _log.warning(
            "%d shards were trimmed to teachers.max_shard_size=%d records; raise it to use all records.",
            num_larger,
            max_size,
        )
    return trim_shards(rows, private.record_id, max_size, shard_key(seed))


def _train_block(
    shared: tuple[TeacherSpec, Engine, Storage | None], item: tuple[Block, list[ArrayShard]], device: str
) -> tuple[ArrayWeights | None, int]:
    """Train one block of teachers. Return their weights (None if this worker stored them), and the number of teachers
    whose training diverged."""
    (spec, engine, storage), (block, given) = shared, item
    # Copied, because arrays from Ray's store are read-only.
    shards = [Shard(x=torch.tensor(x), y=torch.tensor(y)) for x, y in given]
    diverged: list[int] = []
    trained = train_teachers(
        shards, spec, teacher_indices=block.teacher_indices, engine=engine, device=device, on_diverged=diverged.append
    )
    weights: ArrayWeights = {name: value.numpy() for name, value in trained.items()}
    if storage is None:
        return weights, len(diverged)
    # The path may be another folder on this node, where no other process would find the checkpoint.
    storage.require_here()
    save_block(block.checkpoint, weights)
    return None, len(diverged)


def count_block(task: CountTask, source: str | ArrayWeights | StackedWeights, device: str) -> Counts:
    """Return ``votes_QC``, the vote counts of one block of teachers; ``source`` is the block's weights or their
    location."""
    predictions_TQ = predict_votes(tensors_of(source), task.spec, task.queries, device=device)
    return count_votes(predictions_TQ, task.spec.num_classes).astype(task.count_type)


def tensors_of(source: str | ArrayWeights | StackedWeights) -> StackedWeights:
    """Return the weights of a block of teachers as tensors; ``source`` is the weights themselves or their location."""
    weights = load_block(source) if isinstance(source, str) else source
    return {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in weights.items()}
