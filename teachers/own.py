"""Teachers of the user's own: any model with scikit-learn's ``fit`` and ``predict``, one for each shard.

Code of the user's that makes teachers: a factory of models with scikit-learn's ``fit`` and ``predict``.

One record touches one vote only if no two teachers share an object; what can be seen of that from outside is looked at.

Teachers of the user's own: any model with scikit-learn's ``fit`` and ``predict``, one for each shard.

A teacher is made by the user's factory, learns from its shard, votes on the public queries, and is forgotten. What is
kept are its votes: numbers, and no pickle. They are found again for the same shards, code, queries and seed.

A teacher has to be a function of its own shard, or one record would touch several votes. So every teacher is a new
object with a seed of its own, the process's own random states are seeded for each, and one that fails, because its
shard has one class perhaps, votes for its shard's most common class: an error would tell of the shard. What the code
keeps outside of its objects is not seen here.

Shapes: T teachers, Q queries, C classes, N records, F features.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import sklearn
from threadpoolctl import threadpool_limits

from fairpate import __version__
from fairpate.config import TeachersConfig, is_own_file, named_object
from fairpate.files import Storage
from fairpate.later import torch
from fairpate.nn.models import scale_bytes, seeded_torch
from fairpate.types import UserError
from teachers.ensemble import (
    ArrayShard,
    ArrayWeights,
    Block,
    BlockPool,
    Given,
    InProcessPool,
    Progress,
    VoteArray,
    blocks_in,
    computed,
    count_votes,
    digest_of,
    load_block,
    other_records,
    read_shards,
    rows_of_teachers,
    save_block,
)
from teachers.teacher import seed_of_training

if TYPE_CHECKING:
    from torch import Tensor

    from fairpate.data.dataset import Split

Factory = Callable[..., Any]


class OwnTeacherError(UserError, ValueError):
    """Code of the user's that cannot vote; the message names it, what was wrong and the remedy."""


def load_factory(place: str) -> Factory:
    """The factory, after it made two teachers that share nothing. OwnTeacherError otherwise."""
    try:
        factory: Factory = named_object(place)
        first, second = (made(factory, 0) for _ in range(2))
    except Exception as error:  # whatever the user's module raises
        raise OwnTeacherError(
            f"teachers.model.python: {place} makes no teacher ({type(error).__name__}: {error}); give module:factory, "
            "its folder in PYTHONPATH or as the working directory."
        ) from error
    lacking = [name for name in ("fit", "predict") if not callable(getattr(first, name, None))]
    if lacking:
        raise OwnTeacherError(
            f"teachers.model.python: {place} makes a {type(first).__name__} without {' and '.join(lacking)}; give a "
            "factory of models that have both."
        )
    require_apart(place, first, [second])
    return factory


def own_modules(factory: Factory) -> list[ModuleType]:
    """The factory's module, and what it uses of other modules in the working directory, in any depth."""
    found: dict[str, ModuleType] = {}
    waiting = [getattr(factory, "__module__", "")]
    while waiting:
        module = sys.modules.get(waiting.pop())
        if module is None or module.__name__ in found or not is_own_file(module):
            continue
        found[module.__name__] = module
        held = vars(module).values()
        waiting += [v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) or "" for v in held]
    return list(found.values())


def made(factory: Factory, seed: int) -> Any:
    """A new teacher; ``random_state`` is given to a factory that takes one."""
    parameters = inspect.signature(factory).parameters.values()
    takes = any(each.name == "random_state" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return factory(random_state=seed) if takes else factory()


def require_apart(place: str, teacher: Any, others: Sequence[Any]) -> None:
    """OwnTeacherError where two teachers are, or hold, the same object: a second fit would change the first."""
    own = {id(part) for part in _parts(teacher)}
    if any(id(part) in own for other in others for part in _parts(other)):
        raise OwnTeacherError(
            f"teachers.model.python: {place} gives the same object twice, so that one record could touch several "
            "votes; make a new one at each call."
        )


def _parts(teacher: Any) -> list[Any]:
    """A teacher with the models in it, whether parameters or attributes, in any depth."""
    found, waiting = {id(teacher): teacher}, [teacher]
    while waiting:
        for value in _held(waiting.pop()):
            if hasattr(value, "fit") and not isinstance(value, type) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def _held(model: Any) -> Iterator[Any]:
    """What parameters and attributes hold, and what is in their lists."""
    parameters = model.get_params(deep=False) if callable(getattr(model, "get_params", None)) else {}
    for value in (*parameters.values(), *getattr(model, "__dict__", {}).values()):
        yield value
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inner:
            yield from item if isinstance(item, tuple) else (item,)


_BLOCK = 4
_DEFINITION = 1  # raised whenever the same inputs give other votes
_PREDICTIONS, _FAILED = "predictions", "failed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnVotes:
    """``votes_QC``, whose rows sum to T, and sixteen hexadecimal digits of all that determines them. Private."""

    votes_QC: VoteArray
    digest: str


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """What every teacher is made with, and asked."""

    place: str
    factory: Factory
    num_classes: int
    seed: int
    queries: npt.NDArray[np.float32]
    told: bytes
    read: Callable[[], Split] | None


def ask_own_teachers(
    private: Split,
    config: TeachersConfig,
    queries_x: Tensor,
    *,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    pool: BlockPool | None = None,
    on_progress: Progress | None = None,
    read: Callable[[], Split] | None = None,
) -> OwnVotes:
    """The votes of one teacher per shard; those that ``checkpoint_dir`` lacks are trained.

    ``read`` gives ``private`` again, wherever it is called: workers then read their shards and none is sent to them.
    OwnTeacherError where the factory makes no teachers, all of them fail, or one votes for what is no class; PoolError
    where a worker reads other records.
    """
    place, workers = config.model.python, pool or InProcessPool()
    assert place is not None
    factory = load_factory(place)
    settings: dict[str, Any] = {"place": place, "num_classes": num_classes, "seed": seed}
    queries = _table(queries_x)
    told = _told(factory, queries, settings)
    lesson = _Lesson(factory=factory, queries=queries, told=told, read=read, **settings)
    for module in own_modules(factory):
        workers.carry(module)  # other nodes do not have it
    rows = rows_of_teachers(private, config, seed)

    def shards(teachers: Sequence[int]) -> list[ArrayShard]:
        return [_array_shard(private.x[rows[t]], private.y[rows[t]]) for t in teachers]

    def given(teachers: Sequence[int]) -> Given:
        return shards(teachers) if read is None else [rows[teacher] for teacher in teachers]

    def content_of(teachers: tuple[int, ...]) -> str:
        return _name(told, teachers, shards(teachers))

    blocks, storage = blocks_in(checkpoint_dir, config.num_teachers, config.block_size or _BLOCK, content_of)
    failures: list[str] = []
    for block, (asked, failure) in computed(_ask_block, lesson, blocks, storage, given, workers, on_progress):
        save_block(block.checkpoint, asked)
        failures += [] if failure is None else [failure]
    stored = [load_block(each.checkpoint) for each in blocks]
    _tell_failures(sum(int(each[_FAILED].sum()) for each in stored), config.num_teachers, place, failures)
    return OwnVotes(
        votes_QC=count_votes(np.concatenate([each[_PREDICTIONS] for each in stored]), num_classes),
        digest=digest_of(blocks),
    )


def _shards_of(block: Block, given: Any, lesson: _Lesson) -> list[ArrayShard]:
    """The records that a block learns from: those that came, or the rows of what this process reads."""
    if lesson.read is None:
        return list(given)
    shards = [_array_shard(shard.x, shard.y) for shard in read_shards(lesson.read, given)]
    if _name(lesson.told, block.teacher_indices, shards) != block.content:
        raise other_records()
    return shards


def _ask_block(lesson: _Lesson, item: tuple[Block, Given], _: str) -> tuple[ArrayWeights, str | None]:
    """The votes of a block, and what the first teacher that failed raised."""
    block, given = item
    shards = _shards_of(block, given, lesson)
    kept: list[Any] = []  # alive, so that no new object gets the identity of one that is gone
    predictions, failures = [], []
    for teacher, (x, y) in zip(block.teacher_indices, shards, strict=True):
        with _own_randomness(seed_of_training(lesson.seed, teacher)) as seed:
            model = made(lesson.factory, seed)
            require_apart(lesson.place, model, kept)
            kept.append(model)
            # Copies: code that writes into what it is given must not change what the next teacher sees.
            said, failure = _said(model, x.copy(), y.copy(), lesson.queries.copy())
        failures.append(failure)
        if failure is not None:
            said = np.full(len(lesson.queries), _constant(y, lesson.num_classes, teacher))
        predictions.append(_classes(said, lesson, teacher))
    told = next((failure for failure in failures if failure is not None), None)
    failed = np.array([failure is not None for failure in failures], dtype=np.uint8)
    return {_PREDICTIONS: np.stack(predictions), _FAILED: failed}, told


def _said(model: Any, x: npt.NDArray[Any], y: npt.NDArray[Any], queries: npt.NDArray[Any]) -> tuple[Any, str | None]:
    """What the model predicts, or what it raised."""
    if not len(y):
        return None, "no record in the shard"
    try:
        model.fit(x, y)
        return model.predict(queries), None
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises; an error would tell of its shard
        return None, f"{type(error).__name__}: {error}"


def _constant(y: npt.NDArray[Any], num_classes: int, teacher: int) -> int:
    """Of a teacher that cannot learn: its shard's most common class, or without records a public one."""
    return int(np.bincount(y, minlength=num_classes).argmax()) if len(y) else teacher % num_classes


def _classes(said: Any, lesson: _Lesson, teacher: int) -> npt.NDArray[np.int16]:
    """Codes of classes (Q,). OwnTeacherError for anything else, which is the code's fault and not the shard's."""
    try:
        values = np.asarray(said)
    except Exception:  # noqa: BLE001 - ragged lists, tensors of another device: whatever it is, it is no array
        values = np.asarray(None)
    expected = (len(lesson.queries),)
    codes = values.astype(np.float64) if values.dtype.kind in "iufb" else np.full(values.shape, np.nan)
    right = (codes >= 0) & (codes < lesson.num_classes) & (codes == np.floor(codes))
    if values.shape != expected or not right.all():
        found = f"shape {values.shape}" if values.shape != expected else f"others, as {values.dtype}"
        raise OwnTeacherError(
            f"teachers.model.python: teacher {teacher} of {lesson.place} predicted {found}, where a class in "
            f"0..{lesson.num_classes - 1} for each of {expected[0]} queries is expected; correct its predict."
        )
    return codes.astype(np.int16)


@contextmanager
def _own_randomness(seed: int) -> Iterator[int]:
    """Random states that a teacher may use without being told: else it would depend on those before it.

    Yields a seed below 2^32, as scikit-learn takes them.
    """
    short = seed % 2**32
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - what the user's code may draw from
    random.seed(seed)
    np.random.seed(short)  # noqa: NPY002 - the same
    try:
        # A worker's share of the cores, as torch has it: BLAS and OpenMP would take all of them.
        with seeded_torch(seed), threadpool_limits(torch.get_num_threads()):
            yield short
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002 - the same


def _table(x: Tensor) -> npt.NDArray[np.float32]:
    """Features (N, F): pictures become rows of values from 0 to 1."""
    table: npt.NDArray[np.float32] = scale_bytes(x).flatten(start_dim=1).float().numpy()
    return table


def _array_shard(x: Tensor, y: Tensor) -> ArrayShard:
    return _table(x), y.numpy()


def _told(factory: Factory, queries: npt.NDArray[np.float32], settings: dict[str, Any]) -> bytes:
    """What determines votes beside the shards."""
    try:
        # Of an installed package, whose version is told apart, its own module alone.
        modules = own_modules(factory) or [sys.modules[factory.__module__]]
        code = "".join(inspect.getsource(module) for module in sorted(modules, key=lambda module: module.__name__))
    except (OSError, TypeError, KeyError, AttributeError):
        code = ""
    told = settings | {
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "queries": hashlib.sha256(queries.tobytes()).hexdigest(),
        "definition": _DEFINITION,
        "versions": [__version__, sklearn.__version__, np.__version__],
    }
    return json.dumps(told, sort_keys=True).encode()


def _name(told: bytes, teachers: Sequence[int], shards: Sequence[ArrayShard]) -> str:
    digest = hashlib.blake2b(told + json.dumps(list(teachers)).encode(), digest_size=16)
    for arrays in shards:
        for array in arrays:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return f"votes-{min(teachers):05d}-{digest.hexdigest()}.safetensors"


def _tell_failures(num_failed: int, num_teachers: int, place: str, failures: Sequence[str]) -> None:
    """A warning for the operator; OwnTeacherError where nobody learned anything."""
    first = f", the first with {failures[0]}" if failures else ""
    if num_failed == num_teachers:
        raise OwnTeacherError(
            f"teachers.model.python: every one of {num_teachers} teachers of {place} failed{first}; correct it."
        )
    if num_failed:
        _log.warning(
            "%d of %d teachers failed and vote for their shard's most common class%s.", num_failed, num_teachers, first
        )
