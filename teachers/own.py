"""The user's own teachers: any Python model with ``fit`` and ``predict`` votes on public queries.

:func:`ask_own_teachers` creates a teacher for each shard of the private records with the user's factory, trains it,
lets it vote and discards it. Only the votes are stored (as numbers, not pickles); `fairpate aggregate` releases labels
from them. A second call with the same shards, code, queries and seed reads the stored votes.

A teacher must be a function of its own shard, or one record would change several votes. So each teacher is a copy of
what the factory returns, has its own seed, and trains after the process's random states were seeded. If a teacher
raises an error, it votes for its shard's most common class: the error would reveal something of the shard. State that
the user's code keeps outside of its objects is not checked.

Shapes: T teachers, Q queries, C classes, N records, F features.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
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
from fairpate.config import ShardsConfig
from fairpate.files import Storage
from fairpate.lazy import torch
from fairpate.nn.models import scale_bytes, seeded_torch
from fairpate.types import PACKAGES, Advance, IntArray, UserError, stream_seed
from teachers import ensemble
from teachers.ensemble import ArrayShard, ArrayWeights, Block
from teachers.teacher import TRAINING
from teachers.work import BlockPool

if TYPE_CHECKING:
    from fairpate.data.dataset import Split

Factory = Callable[..., Any]
_DEFINITION = 1  # increase it with any change after which the same inputs give other votes
_PREDICTIONS, _FAILED = "predictions", "failed"
_log = logging.getLogger(__name__)


class OwnTeacherError(UserError, ValueError):
    """The user's own teachers cannot vote; the message names the function that makes them (their factory), the fault
    and the remedy."""


def named(factory: Factory) -> str:
    """Return the name of ``factory``, the function that makes teachers, as ``module:qualified name``, for messages and
    for the digest of votes."""
    return f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"


def own_modules(factory: Factory) -> list[ModuleType]:
    """Return the module of ``factory``, and all modules in the working directory that it uses, also indirectly, so that
    workers can import them."""
    found: dict[str, ModuleType] = {}
    waiting = [getattr(factory, "__module__", "")]
    while waiting:
        module = sys.modules.get(waiting.pop())
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ in found:
            continue
        place = Path(file).resolve()
        # Another machine finds what is installed there, and a virtual environment is often below the working directory.
        is_installed = module.__name__.partition(".")[0] in PACKAGES or "site-packages" in place.parts
        if is_installed or not place.is_relative_to(Path.cwd().resolve()):
            continue
        found[module.__name__] = module
        held = vars(module).values()
        waiting += [v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) or "" for v in held]
    return list(found.values())


def made(factory: Factory, seed: int) -> Any:
    """Return a new teacher from ``factory``, which is called with ``random_state=seed`` if it has this parameter.

    OwnTeacherError if the teacher cannot be copied.
    """
    parameters = inspect.signature(factory).parameters.values()
    takes = any(each.name == "random_state" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    teacher = factory(random_state=seed) if takes else factory()
    # A copy, with all that it holds: of an object that the factory returns again, a second fit would change the first.
    own = copy.deepcopy(teacher)
    if own is teacher:  # a class, say
        raise OwnTeacherError(
            f"a {type(teacher).__name__} cannot be copied, so all teachers would be one object; let copy.deepcopy "
            "work on it"
        )
    return own


@dataclass(frozen=True, kw_only=True)
class OwnTeachersVotes:
    """The votes of a user's own teachers: ``votes_QC``, whose rows sum to T, and ``digest``, a hash of everything that
    determines the votes. Both are private."""

    votes_QC: IntArray
    digest: str


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """What a worker needs to train any of the user's teachers and to collect their votes: the settings, and the
    features of the queries."""

    factory: Factory
    num_classes: int
    seed: int
    queries: npt.NDArray[np.float32]


def ask_own_teachers(
    factory: Factory,
    private: Split,
    queries_x: torch.Tensor,
    *,
    num_teachers: int,
    num_classes: int,
    seed: int,
    checkpoint_dir: Path | Storage,
    block_size: int = 4,
    pool: BlockPool | None = None,
    on_progress: Advance | None = None,
) -> OwnTeachersVotes:
    """Train one teacher per shard, and return the votes on the queries; the votes are as private as the records.

    Args:
        factory: Returns a new model with ``fit(X, y)`` and ``predict(X)`` at each call; is called with ``random_state``
            if it has such a parameter. ``X`` has one row of features per record (pictures flattened, 0 to 1), ``y``
            class codes.
        private: Records to divide into shards, by a keyed hash of the record id (or of the person id).
        queries_x: Features of the public records (Q, ...).
        num_teachers: Number of shards.
        num_classes: Number of classes; ``predict`` returns codes in ``range(num_classes)``.
        seed: Seed of shards and of teachers.
        checkpoint_dir: Where votes are stored; only teachers whose votes are missing are trained.
        block_size: Number of teachers that are trained and stored together.
        pool: Where blocks are computed; None: in this process.
        on_progress: Called with the number of teachers that are done, and the number of all teachers.

    Raises:
        OwnTeacherError: The factory returns no teachers, all teachers fail, or one predicts something other than a
            class.
    """
    workers = pool or BlockPool()
    try:
        teacher = made(factory, 0)
    except Exception as error:  # any error of the user's code
        what = f"{named(factory)} makes no teacher ({type(error).__name__}: {error})"
        raise OwnTeacherError(f"{what}; give a function that returns a new model.") from error
    if lacking := [name for name in ("fit", "predict") if not callable(getattr(teacher, name, None))]:
        made_without = f"{type(teacher).__name__} without {' and '.join(lacking)}"
        raise OwnTeacherError(
            f"{named(factory)} makes a {made_without}; give a factory of models with fit and predict."
        )
    config = ShardsConfig(num_teachers=num_teachers, block_size=block_size)
    queries = _table(queries_x)
    determined_by = _determined_by(factory, queries, {"num_classes": num_classes, "seed": seed})
    lesson = _Lesson(factory=factory, queries=queries, num_classes=num_classes, seed=seed)
    for module in own_modules(factory):
        workers.carry(module)  # other nodes do not have it
    rows = ensemble.rows_of_teachers(private, config, seed)

    def shards_of(teachers: Sequence[int]) -> list[ArrayShard]:
        return [(_table(private.x[rows[t]]), private.y[rows[t]].numpy()) for t in teachers]

    blocks, digest, errors = ensemble.stored_blocks(
        checkpoint_dir,
        num_teachers,
        block_size,
        kind="votes",
        determined_by=determined_by,
        shards_of=shards_of,
        function=_ask_block,
        shared=lesson,
        workers=workers,
        on_progress=on_progress,
    )
    failures = [error for error in errors if error is not None]
    stored = [ensemble.load_block(each.checkpoint) for each in blocks]
    num_failed = sum(int(each[_FAILED].sum()) for each in stored)
    first_failure = f", the first with {failures[0]}" if failures else ""
    if num_failed == num_teachers:
        raise OwnTeacherError(
            f"all {num_teachers} teachers of {named(factory)} failed{first_failure}; correct their code."
        )
    if num_failed:
        _log.warning(
            "%d of %d teachers failed and vote for their shard's most common class%s.",
            num_failed,
            num_teachers,
            first_failure,
        )
    return OwnTeachersVotes(
        votes_QC=ensemble.count_votes(np.concatenate([each[_PREDICTIONS] for each in stored]), num_classes),
        digest=digest,
    )


def _ask_block(lesson: _Lesson, item: tuple[Block, list[ArrayShard]], _: str) -> tuple[ArrayWeights, str | None]:
    """Train one block of teachers; return their predictions, and the error of the first teacher that failed (None if
    none did).

    OwnTeacherError for predictions that are not one class per query.
    """
    (block, given), expected = item, (len(lesson.queries),)
    predictions: list[npt.NDArray[np.int16]] = []
    failures: list[str | None] = []
    for teacher, (x, y) in zip(block.teacher_indices, given, strict=True):
        with _own_randomness(stream_seed(lesson.seed, teacher, TRAINING)) as seed:
            model = made(lesson.factory, seed)
            failure: str | None = None if len(y) else "no record in the shard"
            if failure is None:
                try:
                    # Copies: code that writes into its arguments must not change those of the next teacher.
                    model.fit(x.copy(), y.copy())
                    predicted = model.predict(lesson.queries.copy())
                except Exception as error:  # noqa: BLE001 - any error of the user's code, which would reveal its shard
                    failure = f"{type(error).__name__}: {error}"
        failures.append(failure)
        if failure is not None:
            # The shard's most common class. Without records the teacher's number decides: if all teachers without
            # records voted for one class, counts would be biased.
            counts_C = np.bincount(y, minlength=lesson.num_classes)
            constant = int(counts_C.argmax()) if len(y) else teacher % lesson.num_classes
            predicted = np.full(len(lesson.queries), constant)
        try:
            values = np.asarray(predicted)
        except Exception:  # noqa: BLE001 - ragged lists, tensors of another device: not an array
            values = np.asarray(None)
        # What is not a number becomes NaN, which passes no comparison below.
        codes = values.astype(np.float64) if values.dtype.kind in "iufb" else np.full(values.shape, np.nan)
        right = (codes >= 0) & (codes < lesson.num_classes) & (codes == np.floor(codes))
        # A wrong shape or code is a fault of the user's code, not of this shard: so it is raised and not hidden in a
        # vote.
        if values.shape != expected or not right.all():
            found = f"shape {values.shape}" if values.shape != expected else f"others, as {values.dtype}"
            raise OwnTeacherError(
                f"teacher {teacher} of {named(lesson.factory)} predicted {found}, where a class in "
                f"0..{lesson.num_classes - 1} for each of {expected[0]} queries is expected; correct its predict."
            )
        predictions.append(codes.astype(np.int16))
    first_failure = next((failure for failure in failures if failure is not None), None)
    failed = np.array([failure is not None for failure in failures], dtype=np.uint8)
    return {_PREDICTIONS: np.stack(predictions), _FAILED: failed}, first_failure


@contextmanager
def _own_randomness(seed: int) -> Iterator[int]:
    """Seed the process's random states inside the block, so that no teacher depends on the teachers trained before it.

    The block gets a seed below 2^32, the range of scikit-learn's seeds.
    """
    short = seed % 2**32
    ours, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - what the user's code may draw from
    random.seed(seed)
    np.random.seed(short)  # noqa: NPY002 - the same
    try:
        # BLAS and OpenMP would take all cores: they are limited to the worker's share, which torch knows.
        with seeded_torch(seed), threadpool_limits(torch.get_num_threads()):
            yield short
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)  # noqa: NPY002 - the same


def _table(x: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return records' features ``x`` as a table (N, F); a picture becomes a row of values from 0 to 1."""
    return scale_bytes(x).flatten(start_dim=1).float().numpy()


def _determined_by(factory: Factory, queries: npt.NDArray[np.float32], settings: dict[str, Any]) -> dict[str, Any]:
    """Return everything that determines the votes of a user's teachers, except the shards, as JSON values from which a
    digest is computed."""
    try:
        # Of an installed package only the factory's own module: its version is in the digest.
        modules = own_modules(factory) or [sys.modules[factory.__module__]]
        code = "".join(inspect.getsource(module) for module in sorted(modules, key=lambda module: module.__name__))
    except (OSError, TypeError, KeyError, AttributeError):
        code = ""
    return settings | {
        "factory": named(factory),
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "queries": hashlib.sha256(queries.tobytes()).hexdigest(),
        "definition": _DEFINITION,
        "versions": [__version__, sklearn.__version__, np.__version__],
    }
