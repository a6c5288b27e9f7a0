"""Teachers of the user's own, from Python: any model with ``fit`` and ``predict`` votes on public queries.

:func:`ask_own_teachers` makes a teacher for each shard of the private records with the user's factory, trains it, lets
it vote and discards it. What is kept are votes, which `fairpate aggregate` releases labels of: numbers, and no pickle.
A second call with the same shards, code, queries and seed reads them again.

A teacher must be a function of its own shard, or one record would change several votes. So each teacher is a new
object with a seed of its own, the process's random states are seeded for each, and a teacher that raises an error (of
a shard with one class, say) votes for its shard's most common class: the error would tell something of the shard.
State that the user's code keeps outside of its objects is not seen here.

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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import sklearn
from threadpoolctl import threadpool_limits

from fairpate import __version__
from fairpate.config import TeachersConfig, is_own_file
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


def require_factory(factory: Factory) -> None:
    """Make two teachers to look at. OwnTeacherError unless both can fit and predict and share no object."""
    try:
        first, second = (made(factory, 0) for _ in range(2))
    except Exception as error:  # whatever the user's code raises
        raise OwnTeacherError(
            f"{named(factory)} makes no teacher ({type(error).__name__}: {error}); give a function that returns a new "
            "model."
        ) from error
    lacking = [name for name in ("fit", "predict") if not callable(getattr(first, name, None))]
    if lacking:
        raise OwnTeacherError(
            f"{named(factory)} makes a {type(first).__name__} without {' and '.join(lacking)}; give a factory of "
            "models that have both."
        )
    require_apart(factory, first, [second])


def named(factory: Factory) -> str:
    """The factory's name in messages and in the digest of votes."""
    return f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"


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


def require_apart(factory: Factory, teacher: Any, others: Sequence[Any]) -> None:
    """OwnTeacherError where two teachers are, or hold, the same object: a second fit would change the first."""
    own = {id(part) for part in _parts(teacher)}
    if any(id(part) in own for other in others for part in _parts(other)):
        raise OwnTeacherError(
            f"{named(factory)} gives the same object twice, so that one record could touch several "
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


_DEFINITION = 1  # raised whenever the same inputs give other votes
_PREDICTIONS, _FAILED = "predictions", "failed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TeacherVotes:
    """``votes_QC``, whose rows sum to T, and sixteen hexadecimal digits of all that determines them. Private."""

    votes_QC: VoteArray
    digest: str


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """What every teacher is made with, and asked."""

    factory: Factory
    num_classes: int
    seed: int
    queries: npt.NDArray[np.float32]
    told: bytes


def ask_own_teachers(
    factory: Factory,
    private: Split,
    queries_x: Tensor,
    *,
    num_teachers: int,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    block_size: int = 4,
    pool: BlockPool | None = None,
    on_progress: Progress | None = None,
) -> TeacherVotes:
    """The votes of one teacher per shard on the queries. Private, as the records are.

    Args:
        factory: Returns a new model with ``fit(X, y)`` and ``predict(X)`` at each call; gets ``random_state`` if it has
            such a parameter. ``X`` has one row of features per record (pictures flattened, 0 to 1), ``y`` class codes.
        private: Records to divide into shards, by a keyed hash of the record id (or of the person id).
        queries_x: Features of the public records (Q, ...).
        num_teachers: Number of shards.
        num_classes: Number of classes; ``predict`` returns codes below it.
        seed: Seed of shards and of teachers.
        checkpoint_dir: Where votes are kept; only teachers whose votes are missing are trained.
        block_size: Teachers that are trained and stored together.
        pool: Where blocks are computed; None: in this process.
        on_progress: Called with the number of blocks that are done, and of all.

    Raises:
        OwnTeacherError: The factory makes no teachers, all of them fail, or one votes for something that is no class.
    """
    workers = pool or InProcessPool()
    require_factory(factory)
    config = TeachersConfig(num_teachers=num_teachers, block_size=block_size)
    queries = _table(queries_x)
    told = _told(factory, queries, {"num_classes": num_classes, "seed": seed})
    lesson = _Lesson(factory=factory, queries=queries, told=told, num_classes=num_classes, seed=seed)
    for module in own_modules(factory):
        workers.carry(module)  # other nodes do not have it
    rows = rows_of_teachers(private, config, seed)

    def shards(teachers: Sequence[int]) -> list[ArrayShard]:
        return [_array_shard(private.x[rows[t]], private.y[rows[t]]) for t in teachers]

    def content_of(teachers: tuple[int, ...]) -> str:
        return _name(told, teachers, shards(teachers))

    blocks, storage = blocks_in(checkpoint_dir, num_teachers, block_size, content_of)
    failures: list[str] = []
    for block, (asked, failure) in computed(_ask_block, lesson, blocks, storage, shards, workers, on_progress):
        save_block(block.checkpoint, asked)
        failures += [] if failure is None else [failure]
    stored = [load_block(each.checkpoint) for each in blocks]
    _tell_failures(sum(int(each[_FAILED].sum()) for each in stored), num_teachers, named(factory), failures)
    return TeacherVotes(
        votes_QC=count_votes(np.concatenate([each[_PREDICTIONS] for each in stored]), num_classes),
        digest=digest_of(blocks),
    )


def _ask_block(lesson: _Lesson, item: tuple[Block, Given], _: str) -> tuple[ArrayWeights, str | None]:
    """The votes of a block, and what the first teacher that failed raised."""
    block, given = item
    shards = cast("list[ArrayShard]", list(given))  # whole shards, never row numbers
    kept: list[Any] = []  # alive, so that no new object gets the identity of one that is gone
    predictions, failures = [], []
    for teacher, (x, y) in zip(block.teacher_indices, shards, strict=True):
        with _own_randomness(seed_of_training(lesson.seed, teacher)) as seed:
            model = made(lesson.factory, seed)
            require_apart(lesson.factory, model, kept)
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
            f"teacher {teacher} of {named(lesson.factory)} predicted {found}, where a class in "
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
    """All that determines votes except the shards."""
    try:
        # Of an installed package, whose version is told apart, its own module alone.
        modules = own_modules(factory) or [sys.modules[factory.__module__]]
        code = "".join(inspect.getsource(module) for module in sorted(modules, key=lambda module: module.__name__))
    except (OSError, TypeError, KeyError, AttributeError):
        code = ""
    told = settings | {
        "factory": named(factory),
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
        raise OwnTeacherError(f"every one of {num_teachers} teachers of {place} failed{first}; correct it.")
    if num_failed:
        _log.warning(
            "%d of %d teachers failed and vote for their shard's most common class%s.", num_failed, num_teachers, first
        )
