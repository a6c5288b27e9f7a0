"""Shared by all tests: one thread a process, one Ray for all files that ask for it, and no file of the user's own.

Packages are imported where they are used: the process that hands out files to workers, and waits, needs none.
"""

import asyncio
import atexit
import fcntl
import gc
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import cache, partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).parents[1] / "benchmarks" / name) for name in ("campaigns", "papers", "speed"))
from local_postgres import Server, programs

gc.set_threshold(50_000, 10, 10)  # what is imported stays: looking through it again and again is a tenth of the time
atexit.register(gc.freeze)  # and so is the last look
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that tests start


def _temporary() -> Path:
    """Memory where there is room for a gigabyte of files: on a disk every charge of a ledger waits for it."""
    memory = Path("/dev/shm")  # noqa: S108 - folders of our own are made in it
    if memory.is_dir() and shutil.disk_usage(memory).free > 2**32 and not os.statvfs(memory).f_flag & os.ST_NOEXEC:
        return memory
    return Path(tempfile.gettempdir())


_WITHOUT_GRAPHS = str(Path(__file__).with_name("without_graphs"))
_TEMPORARY = _temporary()
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_TEMPORARY))  # where tmp_path is
tempfile.tempdir = str(_TEMPORARY)  # where an estimator writes while it trains; Ray and other processes keep their own
_STATE = tempfile.TemporaryDirectory(prefix="fairpate-state-")
os.environ["FAIRPATE_STATE"] = _STATE.name  # before Ray starts: its workers inherit it


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where tests are collected, before they are."""
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        return
    from hypothesis import settings

    examples = 10 if session.config.getoption("markexpr") == "not slow" else 25
    settings.register_profile("untimed", deadline=None, max_examples=examples)
    settings.load_profile("untimed")
    # Not earlier: it is for the processes that tests start, and workers of tests read graphs.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_WITHOUT_GRAPHS, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def _started_ray() -> Iterator[ExitStack]:
    with ExitStack() as started:
        yield started


@pytest.fixture(scope="module")
def ray_session(_started_ray: ExitStack) -> None:
    """Start Ray for the first file that asks for it; the first one that does not ends it."""
    import ray

    from fairpate.config import RayConfig
    from teachers.ray_pool import start_ray

    if not ray.is_initialized():
        _started_ray.enter_context(start_ray(RayConfig()))


@pytest.fixture(scope="module", autouse=True)
def _idle_ray_ends(request: pytest.FixtureRequest, _started_ray: ExitStack) -> None:
    """An idle Ray takes a twentieth of a processor."""
    if not _says(request.path, "ray_session"):
        _started_ray.close()


@pytest.fixture(scope="session", autouse=True)
def missing_packages() -> Iterator[Callable[[], tuple[str, ...]]]:
    """Commands leave out model.onnx, which takes seconds, as where its packages are missing; see ``with_graphs``."""
    import student.student

    real = student.student.missing_packages
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("student.student.missing_packages", lambda: student.student.PACKAGES)
        yield real


@pytest.fixture
def with_graphs(quick_graphs: None, missing_packages: Callable[[], tuple[str, ...]]) -> Iterator[None]:
    """Commands write model.onnx, as do processes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.environ["PYTHONPATH"].removeprefix(_WITHOUT_GRAPHS).removeprefix(os.pathsep))
        patched.setattr("student.student.missing_packages", missing_packages)
        yield


@pytest.fixture(scope="session", autouse=True)
def drawings() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Pages leave out their charts, half of the time of a report, but within this; see ``with_drawings``."""
    from markupsafe import Markup

    from fairpate.report import run_page
    from fairpate.run import publication

    def undrawn(*_: Any, title: str, **__: Any) -> Markup:
        return Markup('<p class="note">{}</p>').format(title)

    without = {
        (run_page, "curves"): undrawn,
        (run_page, "histogram"): undrawn,
        (publication, "_MAX_COMPOSED_POINTS"): 1,
        (publication, "_MAX_COURSE_POINTS"): 2,
    }
    real = {place: getattr(*place) for place in without}

    @contextmanager
    def replaced(by: dict[Any, Any]) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for place, value in by.items():
                patched.setattr(*place, value)
            yield

    with replaced(without):
        yield partial(replaced, real)


@pytest.fixture(scope="session", autouse=True)
def _few_replicates() -> Iterator[None]:
    """Intervals of metrics come from 100 resampled tables of a run's test records, not from 1,000."""
    from fairpate.report.metrics import evaluate

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(evaluate.__kwdefaults__, "num_replicates", 100)
        yield


@pytest.fixture
def with_drawings(drawings: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Pages hold their charts."""
    with drawings():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AbstractContextManager[Path]]:
    """A folder of all workers of the session by its name, for one of them at a time."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @contextmanager
    def folder(name: str) -> Iterator[Path]:
        with (root / f"shared-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield root / f"shared-{name}"

    return folder


@pytest.fixture(scope="session", autouse=True)
def _library_is_bundled_once(shared: Callable[[str], AbstractContextManager[Path]]) -> None:
    """Every worker that writes a page of a comparison would bundle the library of its charts, which takes seconds."""
    from fairpate.report import frontier_page

    bundle = frontier_page._library

    @cache
    def bundled() -> str:
        with shared("library") as kept:
            if not kept.exists():
                kept.write_text(bundle(), encoding="ascii")
            return kept.read_text(encoding="ascii")

    frontier_page._library = bundled


@pytest.fixture(scope="session")
def quick_graphs() -> None:
    """For every graph torch's exporter parses and registers all of onnxscript's operators anew: most of its time."""
    try:
        from onnxscript import TracedOnnxFunction
    except ImportError:
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    TracedOnnxFunction.function_ir = property(cache(TracedOnnxFunction.function_ir.fget))  # type: ignore[method-assign,attr-defined]
    registered = cache(ONNXRegistry.from_torchlib)

    def copied(**version: int) -> ONNXRegistry:
        registry = copy(registered(**version))  # a graph adds operators of its own
        registry.functions = {name: [*ways] for name, ways in registry.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign,assignment]


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> None:
    """Every client would read this machine's trusted certificates anew: a fifth of the time of tests of a service."""
    import httpx._transports.default as transports

    transports.create_ssl_context = cache(transports.create_ssl_context)


@pytest.fixture(scope="session", autouse=True)
def _services_stop_at_once() -> None:
    """uvicorn would look every tenth of a second whether it should stop, and then wait for another one."""
    import uvicorn.server

    uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda s: asyncio.sleep(s / 4)})  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _logs_are_caught_at_the_root() -> None:
    """pytest would look through thousands of loggers, six times a test, for those that do not propagate."""
    from _pytest.logging import catching_logs

    before = catching_logs.__enter__

    def enter(catching: Any) -> Any:
        if catching.level is not None:  # somebody asked for more: --log-level
            return before(catching)
        root = logging.getLogger()
        root.addHandler(catching.handler)
        catching.attached_loggers.append(root)
        return catching.handler

    catching_logs.__enter__ = enter  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def _odometer_of_one_file() -> None:
    """Releases that other files made on data of the same name would be added to those of this one."""
    for path in Path(_STATE.name).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty odometer of the test's own."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def _remembered_data() -> tuple[Callable[..., Any], ...]:
    """Return a loader of the digits, a division of them, embeddings, coordinates and principal axes, which remember
    what they made."""
    import torch

    from fairpate.data import registry

    load, divide = registry.entry_for("color_digits").load, registry.dataset_of
    known: dict[str, dict[Any, Any]] = defaultdict(dict)  # apart, as coordinates are many and the others few and dear

    def remembered(kind: str, place: Any, compute: Callable[[], Any], given: Any = None) -> Any:
        found = known[kind]
        if place not in found:
            if len(found) == 512:
                found.clear()
            # What was given stays, so that no other object gets its address.
            found[place] = given, compute()
        return found[place][1]

    def digest(x: Any) -> tuple[Any, ...]:
        return (*x.shape, hashlib.blake2b(x.contiguous().numpy()).digest())

    def load_once(request: Any) -> Any:
        return remembered("loaded", repr((request.seed, request.options)), lambda: load(request))

    def divide_once(loaded: Any, config: Any, entry: Any, **given: Any) -> Any:
        if entry.name != "color_digits" or given:
            return divide(loaded, config, entry, **given)
        return remembered("divided", config.model_dump_json(), lambda: divide(loaded, config, entry))

    def embedding_of(of: Any, pool: Any, config: Any, **given: Any) -> Any:
        place = (of, config.model_dump_json(), *given.items(), *digest(pool))
        return remembered("embedding", place, lambda: of(pool, config, **given))

    def coordinates(call: Any, embedding: Any, x: Any, **given: Any) -> Any:
        if given:
            return call(embedding, x, **given)
        return remembered("coordinates", (id(embedding), *digest(x)), lambda: call(embedding, x), embedding).clone()

    def axes_of(fit: Any, pca: Any, table: Any) -> Any:
        """All axes at once, of which most pools are asked for several numbers."""
        if pca.svd_solver != "covariance_eigh":
            return fit(pca, table)
        place = (str(table.dtype), *digest(torch.from_numpy(table)))
        whole = remembered("axes", place, lambda: fit(type(pca)(svd_solver=pca.svd_solver), table))
        pca.components_ = whole.components_[: pca.n_components]
        pca.explained_variance_ = whole.explained_variance_[: pca.n_components]
        return pca

    return load_once, divide_once, embedding_of, coordinates, axes_of


@pytest.fixture(scope="module", autouse=True)
def _data_are_made_once(
    request: pytest.FixtureRequest, _remembered_data: tuple[Callable[..., Any], ...]
) -> Iterator[None]:
    """Most runs read the same digits: a third of their time went into colouring, dividing and embedding them."""
    from sklearn.decomposition import PCA

    from fairpate.data import registry
    from fairpate.data.embedding import Components, Embedding

    if request.path.parent.name == "data":  # tests of these themselves
        yield
        return
    published, (load_once, divide_once, embedding_of, coordinates, axes_of) = (
        registry.entry_for("color_digits"),
        _remembered_data,
    )
    load = published.load
    object.__setattr__(published, "load", load_once)  # of a frozen record that the registry keeps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "dataset_of", divide_once)
        for kind in (Components, Embedding):
            patched.setattr(kind, "of", partial(embedding_of, kind.of))
            patched.setattr(kind, "__call__", partialmethod(partial(coordinates, kind.__call__)))
        patched.setattr(PCA, "fit", partialmethod(partial(axes_of, PCA.fit)))
        yield
    object.__setattr__(published, "load", load)


@pytest.fixture(scope="session")
def digits() -> Any:
    """The digits without their colours."""
    from fairpate.config import DataConfig
    from fairpate.data import load_data

    return load_data(DataConfig(options={"colour_as_feature": False}))


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One tab of a browser."""
    from browser import opened_tab

    with opened_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@contextmanager
def _postgres() -> Iterator[Any]:
    pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")
    if programs() is None:
        pytest.skip("PostgreSQL is not installed")
    # Not below pytest's own folder, which another user may not enter.
    with tempfile.TemporaryDirectory(prefix="fairpate-postgres-") as folder:
        Path(folder).chmod(0o755)
        with Server(Path(folder) / "server") as server:
            yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server of the session, started by the first test that asks for it."""
    with _postgres() as server:
        yield server


@pytest.fixture(scope="module")
def own_server() -> Iterator[Any]:
    """A PostgreSQL server that a test may stop; each test leaves it running."""
    with _postgres() as server:
        yield server


@cache
def _says(file: Path, words: str) -> bool:
    return words in file.read_text(encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """In a new checkout one worker compiles the tests, half of its time until here, and the others read them."""
    with Path(__file__).open() as lock:
        if "PYTEST_XDIST_WORKER" in os.environ and not any(Path(__file__).parent.glob("__pycache__/test_*.pyc")):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, as one at the end would run alone: those of the cluster and of Ray, those with a
    timeout of their own, those of sites, which wait, and those with campaigns."""
    items.sort(
        key=lambda item: (
            item.path.parent.name != "cluster",
            not _says(item.path, "ray_session"),
            not _says(item.path, "mark.timeout"),
            item.path.parent.name != "sites",
            not _says(item.path, "mark.slow"),
        )
    )


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that ask for Ray share one worker, and the cluster's one: another Ray would idle and fill memory."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FewRays(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if _says(config.rootpath / file, "ray_session"):
                return "ray"
            # What takes seconds to import is imported once.
            if _says(config.rootpath / file, "resnet18"):
                return "torchvision"
            if _says(config.rootpath / file, "_graphs"):
                return "graphs"
            return "cluster" if file.startswith("tests/cluster/") else file

    return FewRays(config, log)
