"""The Ray that work runs on: the one there is, a cluster's, or one of this machine for as long as it is needed.

One of this machine is for the process that starts it: it listens on loopback alone, and asks for a token that is made
for it and stays in memory.

When the head of a cluster dies Ray ends this process after a minute or so, without a word; a thread that watches the
head says it before.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fairpate.config import RayConfig
from fairpate.later import torch
from teachers.pool import InProcessPool, Pool, PoolError
from teachers.ray_pool import RayPool

_PACKAGES = ("fairpate", "teachers", "aggregator", "student")
_WATCH_INTERVAL_S, _ANSWER_LIMIT_S, _MOST_MISSED = 5.0, 5.0, 2
_log = logging.getLogger(__name__)


@contextmanager
def open_pool(config: RayConfig) -> Iterator[Pool]:
    """The pool that ``config`` asks for: this process where ``num_actors`` is 0, which imports no Ray; else actors.

    Work that runs in a Ray task itself takes 0: it would wait for CPUs that it holds.
    """
    if config.num_actors == 0:
        threads = torch.get_num_threads()
        torch.set_num_threads(config.torch_threads)
        try:
            yield InProcessPool("cuda" if config.num_gpus else "cpu")
        finally:
            torch.set_num_threads(threads)
        return
    with start_ray(config), RayPool(config) as pool:
        yield pool


@contextmanager
def start_ray(config: RayConfig) -> Iterator[None]:
    """Ray inside the block: the running one, the cluster at RAY_ADDRESS, or a new one here, shut down afterwards.

    Workers of a cluster receive this checkout's packages from the driver; other dependencies must be installed there.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would start workers at nice 15
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with ExitStack() as stack:
        if os.environ.get("RAY_ADDRESS"):
            with _own_sigterm():
                _join_cluster(**quiet, runtime_env={"py_modules": _own_packages()})
            stack.callback(ray.shutdown)
            stack.enter_context(HeadWatch(ray.get_runtime_context().gcs_address))
        else:
            stack.enter_context(_private_to_this_process())
            stack.callback(ray.shutdown)
            with _own_sigterm():
                _start_here(**quiet, include_dashboard=False, num_gpus=None if config.num_gpus else 0)
        yield


@contextmanager
def _private_to_this_process() -> Iterator[None]:
    """A Ray started inside the block is reached from this machine only, and only with a token of its own.

    Ray binds to loopback where it is told that there are no clusters, as on macOS; `_node_ip_address` does not do it.
    A mode of authentication or a token that the user chose in the environment stays. Ray would write its token into a
    file that everybody may read.
    """
    from ray._private import ray_constants

    mode = os.environ.get("RAY_AUTH_MODE", "token")
    chosen = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", "RAY_AUTH_MODE": mode}
    if mode == "token" and os.environ.keys().isdisjoint({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}):
        chosen["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray puts the working directory on a worker's path, where any folder named as a package would be taken for it.
    root = str(Path(_own_packages()[0]).parent)
    if root not in sys.path:  # an editable installation
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    before = {name: os.environ.get(name) for name in chosen}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(chosen)
    ray_constants.ENABLE_RAY_CLUSTER = False  # the variable is read when Ray is imported
    _read_authentication_again()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        _read_authentication_again()


def _read_authentication_again() -> None:
    from ray import _raylet

    compiled: Any = _raylet
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this process's handler of SIGTERM: Ray puts its own there, which ends in a stack of C++ on the terminal."""
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as ending:
        if ending.code == signal.SIGTERM:  # it came while Ray's handler was there
            handler(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _start_here(**options: Any) -> None:
    """PoolError where Ray does not come up on this machine, in two tries, each of half a minute at most."""
    import ray

    try:
        try:
            ray.init("local", **options)
        except Exception:  # noqa: BLE001 - Ray raises bare ones
            # Where a machine is busy Ray gives up on a process of its own after 15 seconds; then its files are cached.
            ray.init("local", **options)
    except Exception as error:
        said = f"{error}".strip().splitlines() or [type(error).__name__]
        raise PoolError(
            f"Ray did not start on this machine: {said[0].rstrip('.')}. Where it is busy or short of memory or of "
            "space in /tmp, wait until it is not and give the same command again; what is stored is found."
        ) from error


def _join_cluster(**options: Any) -> None:
    """PoolError where no cluster answers at RAY_ADDRESS, or not to somebody without its token."""
    import ray

    try:
        ray.init(**options)
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise PoolError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: no cluster answers. If it asks for a token, set "
            "RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or in RAY_AUTH_TOKEN."
        ) from error


class HeadWatch:
    """Warns, once, when nobody answers at the address of a cluster's head; says so when it answers again."""

    def __init__(self, address: str, *, interval_s: float = _WATCH_INTERVAL_S):
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="head watch")

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        missed = 0
        while not self._ended.wait(self._interval_s):
            answers = self._answers()
            if answers and missed >= _MOST_MISSED:
                _log.warning("The head of the Ray cluster answers again.")
            missed = 0 if answers else missed + 1
            if missed == _MOST_MISSED:
                _log.warning(
                    "The head of the Ray cluster, %s:%d, does not answer. If it stays away Ray ends this command: give "
                    "it again once there is a cluster. What is stored is found, and what was charged stays charged.",
                    *self._place,
                )

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=_ANSWER_LIMIT_S).close()
        except OSError:
            return False
        return True


def _own_packages() -> list[str]:
    """The folders of this project's packages, which travel together: a worker may run any of them."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    return [str(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or []]
