"""Shared by all tests: one thread a process, one Ray for all files that ask for it, and no file of the user's own.

Packages are imported where they are used: the process that hands out files to workers, and waits, needs none.
"""

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
from typing import Any

import certifi
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


_CHECK_TYPES = ("test_a_method_is_one_file.py", "test_python_for_editors.py")
_EMBEDDED_DATA = ("color_digits", "loans")
_OF_RAY = pytest.StashKey[set[Path]]()
_WITHOUT_GRAPHS = str(Path(__file__).with_name("without_graphs"))
_TEMPORARY = _temporary()
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_TEMPORARY))  # where tmp_path is
tempfile.tempdir = str(_TEMPORARY)  # where an estimator writes while it trains; Ray and other processes keep their own
_STATE = tempfile.TemporaryDirectory(prefix="fairpate-state-")
_CERTIFICATE = tempfile.TemporaryDirectory(prefix="fairpate-certificate-")
os.environ["FAIRPATE_STATE"] = _STATE.name  # before Ray starts: its workers inherit it


def _one_certificate() -> str:
    """The file of one authority. Every client of HTTP would read a hundred and more: a fifth of the time of tests of a
    service, none of which leaves this machine."""
    path = Path(_CERTIFICATE.name) / "authority.pem"
    end = "-----END CERTIFICATE-----\n"
    path.write_text(Path(certifi.where()).read_text(encoding="ascii").partition(end)[0] + end, encoding="ascii")
    return str(path)


os.environ["SSL_CERT_FILE"] = _one_certificate()


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
    if request.path not in request.config.stash[_OF_RAY]:
        _started_ray.close()


@cache
def _whole() -> tuple[Callable[[], tuple[str, ...]], Callable[[], str]]:
    """What names the packages that graphs lack, and what bundles the library of charts, before ``light`` replaces
    them."""
    import student.student
    from fairpate.report import frontier_page

    return student.student.missing_packages, frontier_page._library


@pytest.fixture(scope="session")
def light(shared: Callable[[str], AbstractContextManager[Path]]) -> Callable[[], AbstractContextManager[None]]:
    """In the block runs leave out model.onnx, which takes seconds, as where its packages are missing; intervals of
    metrics come from 100 resampled tables, not from 1,000; and the library of a comparison's charts, which takes
    seconds to bundle, is bundled once by all workers."""

    @cache
    def bundled() -> str:
        with shared("library") as kept:
            if not kept.exists():
                kept.write_text(_whole()[1](), encoding="ascii")
            return kept.read_text(encoding="ascii")

    @contextmanager
    def block() -> Iterator[None]:
        import student.student
        from fairpate.report import frontier_page
        from fairpate.report.metrics import evaluate

        _whole()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(student.student, "missing_packages", lambda: student.student.PACKAGES)
            patched.setattr(frontier_page, "_library", bundled)
            patched.setitem(evaluate.__kwdefaults__, "num_replicates", 100)
            yield

    return block


@pytest.fixture(scope="module")
def few_replicates(light: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Runs of the file are ``light``, and their pages hold charts."""
    with light():
        yield


@pytest.fixture(scope="module")
def without_charts() -> Iterator[None]:
    """Pages leave out their charts, half of the time of a report: for files whose subject is no page."""
    from markupsafe import Markup

    from fairpate.report import run_page
    from fairpate.run import publication

    def undrawn(*_: Any, title: str, **__: Any) -> Markup:
        return Markup('<p class="note">{}</p>').format(title)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("curves", "histogram"):
            patched.setattr(run_page, name, undrawn)
        patched.setattr(publication, "_MAX_COMPOSED_POINTS", 1)
        patched.setattr(publication, "_MAX_COURSE_POINTS", 2)
        yield


@pytest.fixture
def with_graphs(quick_graphs: None) -> Iterator[None]:
    """Commands write model.onnx, as do processes."""
    import student.student

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.environ["PYTHONPATH"].removeprefix(_WITHOUT_GRAPHS).removeprefix(os.pathsep))
        patched.setattr(student.student, "missing_packages", _whole()[0])
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
def _logs_are_caught_at_the_root() -> None:
    """pytest would look through thousands of loggers, six times a test, for those that do not propagate. No option of
    pytest's leaves that out."""
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
    """Return a loader of an embedded data set, a division of one, embeddings and coordinates, which remember what they
    made."""
    from fairpate.data import registry

    loads, divide = {name: registry.entry_for(name).load for name in _EMBEDDED_DATA}, registry.dataset_of
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

    def load_once(name: str, request: Any) -> Any:
        place = repr((name, request.seed, request.options, request.unit))
        return remembered("loaded", place, lambda: loads[name](request))

    def divide_once(loaded: Any, config: Any, entry: Any, **given: Any) -> Any:
        if entry.name not in _EMBEDDED_DATA or given:
            return divide(loaded, config, entry, **given)
        return remembered("divided", config.model_dump_json(), lambda: divide(loaded, config, entry))

    def embedding_of(of: Any, pool: Any, config: Any, **given: Any) -> Any:
        place = (of, config.model_dump_json(), *given.items(), *digest(pool))
        return remembered("embedding", place, lambda: of(pool, config, **given))

    def coordinates(call: Any, embedding: Any, x: Any, **given: Any) -> Any:
        if given:
            return call(embedding, x, **given)
        return remembered("coordinates", (id(embedding), *digest(x)), lambda: call(embedding, x), embedding).clone()

    return load_once, divide_once, embedding_of, coordinates


@pytest.fixture(scope="module")
def remembered_digits(_remembered_data: tuple[Callable[..., Any], ...]) -> Iterator[None]:
    """The digits, and the loans, of a configuration are made, divided and embedded once by all files that ask for this:
    a third of the time of their runs. For files whose subject is not data."""
    from fairpate.data import registry
    from fairpate.data.embedding import Components, Embedding

    load_once, divide_once, embedding_of, coordinates = _remembered_data
    published = [registry.entry_for(name) for name in _EMBEDDED_DATA]
    loads = [entry.load for entry in published]
    for entry in published:
        object.__setattr__(entry, "load", partial(load_once, entry.name))  # of a frozen record that the registry keeps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "dataset_of", divide_once)
        for kind in (Components, Embedding):
            patched.setattr(kind, "of", partial(embedding_of, kind.of))
            patched.setattr(kind, "__call__", partialmethod(partial(coordinates, kind.__call__)))
        yield
    for entry, load in zip(published, loads, strict=True):
        object.__setattr__(entry, "load", load)


@pytest.fixture(scope="module")
def light_runs(few_replicates: None, without_charts: None, remembered_digits: None) -> None:
    """Runs of the file leave out what it says nothing of: graphs, most replicates, charts, data that are known."""


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first, as one at the end would run alone: those of the cluster and of Ray, those with a
    timeout of their own, those of sites, which wait, and those with slow tests; before the others, those that check
    types, as by then `make types` of .ci/run has left its cache. Campaigns run where they are asked for."""
    if "campaign" not in config.getoption("markexpr"):
        left = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]
    of_ray = [item for item in items if "ray_session" in getattr(item, "fixturenames", ())]
    for item in of_ray:
        if [mark.args for mark in item.iter_markers("xdist_group")] != [("ray",)]:
            raise pytest.UsageError(f"{item.path}: asks for Ray; mark the file with xdist_group('ray').")
    config.stash[_OF_RAY] = {item.path for item in of_ray}
    timed, slow = ({item.path for item in items if item.get_closest_marker(name)} for name in ("timeout", "slow"))
    typed = {item.path for item in items if item.path.name in _CHECK_TYPES}
    items.sort(
        key=lambda item: (
            item.path.parent.name != "cluster",
            item.path not in config.stash[_OF_RAY],
            item.path not in timed - typed,
            item.path.parent.name != "sites",
            item.path not in slow - typed,
            item.path not in typed,
        )
    )


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test fails whose group is lost, which nothing else would show: each worker would start a Ray of its own."""
    if getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group"):
        assert "@" in item.nodeid, "pytest-xdist sees no groups of tests; install what constraints.txt names"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has all files of a group (`xdist_group`): of "ray", as another Ray would idle and fill memory, and of
    what takes seconds to import. Any other file is a group of its own."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFileOrGroup(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("::")[0]

    return ByFileOrGroup(config, log)
