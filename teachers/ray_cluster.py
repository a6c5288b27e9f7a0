"""A Ray cluster that this process joins or sends jobs to: whether its head answers, and what is said when the head or a
node is lost.

Ray waits for minutes at an address where nobody answers. A process whose head or own node is lost is ended by Ray
(`_Exit`, without an exception): no Python code of that process could say why. So :func:`require_head` asks before Ray
does, :func:`head_watched` warns while the head is silent, and :func:`last_words` leaves the reason to another process.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fairpate.lazy import Later
from fairpate.types import UsageError
from teachers.work import PoolError

if TYPE_CHECKING:
    import ray as ray
else:
    ray = Later("ray")  # imported when it is first used, as it takes a second

_HEAD_LIMIT_S = 8.0
_JOB_ANSWER_LIMIT_S = 4.0  # for a connection, and for each part of an answer
# What a client of HTTP/2 says first, with empty settings; a server answers with its own settings (RFC 9113, 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_BYTES, _KIND_AT, _SETTINGS = 9, 3, 4
_CLIENT_PORT = 10001  # of Ray Client, where the address names none
# Two in a row, because one connection may be lost on a busy network.
_WATCH_INTERVAL_S, _ANSWER_LIMIT_S, _MOST_MISSED = 5.0, 5.0, 2
_log = logging.getLogger(__name__)


def cluster_address() -> str | None:
    """Return the address of the Ray cluster that RAY_ADDRESS names; None if it names none, so that Ray is started on
    this machine."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def own_address() -> str:
    """Return the address that `ray start` takes on this machine unless it is given one, at which other nodes reach
    it."""
    found: str = ray.util.get_node_ip_address()
    return found


def require_cluster() -> None:
    """Raise PoolError within ten seconds if RAY_ADDRESS names a cluster whose head does not answer, unless this process
    has joined a cluster already."""
    if (address := cluster_address()) is not None and not ray.is_initialized():
        require_head(address)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Give variables of this process's environment these ``values`` inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def read_authentication_again() -> None:
    """Have Ray read its settings of authentication from the environment, which it did when it was imported."""
    from ray import _raylet

    compiled: Any = _raylet
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


def require_head(address: str) -> None:
    """Raise PoolError within ten seconds unless the head of a Ray cluster answers at ``address``.

    ``address`` is what RAY_ADDRESS may be: ``host:port``, ``auto`` (the cluster of this machine), or ``ray://`` with
    the host and port of Ray Client. A head speaks gRPC, so what does not speak HTTP/2 is not a head; what does is asked
    for the id of its cluster, which it tells those who have its token.
    """
    from ray import _raylet
    from ray._private import services
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled

    remedy = "start the cluster, correct the address, or unset RAY_ADDRESS to use this machine alone"
    named = f"RAY_ADDRESS={address}"
    try:
        if "://" in address:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port or _CLIENT_PORT
        else:
            # As Ray resolves it: of this machine, an address at which other nodes reach it.
            found = services.canonicalize_bootstrap_address(address) or ""
            host, _, digits = found.rpartition(":")
            host, port = host.strip("[]"), int(digits)
    except ConnectionError as error:
        raise PoolError(f"{named}: no Ray cluster runs on this machine; {remedy}.") from error
    except ValueError:
        host, port = "", 0
    if not host or not 0 < port < 2**16:
        raise PoolError(f"{named}: not an address of a Ray cluster; give HOST:PORT of its head, or auto.")
    where, deadline_s, answer = f"{host}:{port}", time.monotonic() + _HEAD_LIMIT_S, b""
    encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    try:
        with ExitStack() as opened:
            reader = opened.enter_context(socket.create_connection((host, port), timeout=_HEAD_LIMIT_S / 2))
            if encrypted:
                reader = opened.enter_context(_ray_certificates().wrap_socket(reader))
            reader.sendall(_PREFACE)
            while len(answer) < _FRAME_BYTES:
                reader.settimeout(max(0.1, deadline_s - time.monotonic()))
                if not (more := reader.recv(_FRAME_BYTES - len(answer))):
                    break
                answer += more
    except ssl.SSLError:
        answer = b""
    except OSError as error:
        raise PoolError(f"{named}: nobody answers at {where} ({error.strerror or error}); {remedy}.") from error
    if encrypted and not answer:  # a server that does not trust a certificate may end the connection without a word
        raise PoolError(
            f"{named}: {where} does not accept an encrypted connection of this process; with RAY_USE_TLS=1 the cluster "
            "is encrypted too, and RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT name files of one "
            "authority (`fairpate cluster certificates`)."
        )
    other = PoolError(
        f"{named}: what answers at {where} is not the head of a Ray cluster; give the head's own port, 6379 unless it "
        "was started with another one, and set RAY_USE_TLS=1 if the cluster is encrypted."
    )
    if len(answer) < _FRAME_BYTES or answer[_KIND_AT] != _SETTINGS:
        raise other
    if "://" not in address:
        read_authentication_again()  # the environment may name another cluster than when Ray was imported
        try:
            # Without a token at hand the client would end this process.
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            unknown: Any = _raylet  # its types lack this class
            unknown.InnerGcsClient.standalone(found, None, round(1000 * _HEAD_LIMIT_S / 2))
        except ray.exceptions.AuthenticationError as error:
            raise PoolError(
                f"{named}: the cluster refuses this process's token; set RAY_AUTH_MODE=token, with the cluster's token "
                "in ~/.ray/auth_token or RAY_AUTH_TOKEN."
            ) from error
        except ray.exceptions.RpcError as error:
            raise other from error


def job_client(address: str) -> Any:
    """Return Ray's client of the job server at ``address``, the URL of the dashboard of a cluster's head.

    PoolError within ten seconds if no dashboard answers there, and from a later call of the client if the cluster
    refuses its token. Authentication is Ray's own: RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token,
    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH. UsageError for what is not a URL of HTTP.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    parts, named = urlsplit(address), f"--on {address}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{named}: not the address of a dashboard; give one such as http://127.0.0.1:8265, to which `ray "
            "dashboard` forwards."
        )

    class Client(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            try:
                # Ray's own client waits for ever.
                return super()._do_request(*arguments, **{"timeout": _JOB_ANSWER_LIMIT_S} | options)
            except AuthenticationError as error:
                raise PoolError(
                    f"{named}: the cluster refuses this process's token; set RAY_AUTH_MODE=token, with the cluster's "
                    "token in ~/.ray/auth_token or RAY_AUTH_TOKEN."
                ) from error

    read_authentication_again()
    try:
        # Ray's client prefers this variable to the address that it is given.
        with environment({"RAY_API_SERVER_ADDRESS": address}):
            return Client(address)
    except PoolError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        # Another program's answer: an error of HTTP, or not Ray's JSON.
        is_other = not isinstance(error, OSError) or type(error).__name__ in ("HTTPError", "JSONDecodeError")
        found = "what answers there is not the dashboard of a Ray cluster" if is_other else "nobody answers there"
        raise PoolError(
            f"{named}: {found}; start the cluster, forward its dashboard (`ray dashboard CLUSTER.yaml`), or correct "
            "the address."
        ) from error


def _ray_certificates() -> ssl.SSLContext:
    """Return the TLS context of a Ray process: its certificate, and the authority that it trusts. OSError if a file
    cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificates of a cluster need not name its addresses to this probe
    context.set_alpn_protocols(["h2"])
    if authority := os.environ.get("RAY_TLS_CA_CERT"):
        context.load_verify_locations(authority)
    else:
        context.verify_mode = ssl.CERT_NONE
    if certificate := os.environ.get("RAY_TLS_SERVER_CERT"):
        context.load_cert_chain(certificate, os.environ.get("RAY_TLS_SERVER_KEY"))
    return context


@contextmanager
def head_watched(address: str, *, interval_s: float = _WATCH_INTERVAL_S) -> Iterator[None]:
    """Inside the block, warn once when the head (the main node) of a Ray cluster stops answering, and report when it
    answers again.

    ``address`` is the head's ``host:port``; the head is contacted every ``interval_s`` seconds.
    """
    host, _, port = address.rpartition(":")
    place, ended = (host.strip("[]"), int(port)), threading.Event()

    def watch() -> None:
        missed = 0
        while not ended.wait(interval_s):
            try:
                socket.create_connection(place, timeout=_ANSWER_LIMIT_S).close()
                answers = True
            except OSError:
                answers = False
            if answers and missed >= _MOST_MISSED:
                _log.warning("The head of the Ray cluster answers again.")
            missed = 0 if answers else missed + 1
            # Equal, so that an outage is reported once.
            if missed == _MOST_MISSED:
                _log.warning("The head of the Ray cluster, %s:%d, does not answer; Ray waits a minute for it.", *place)

    thread = threading.Thread(target=watch, daemon=True, name="head watch")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_RESUMES = "it resumes from what is stored, and what was charged stays charged"
_LOST_HEAD = (
    "The head of the Ray cluster, {head}, is gone, and Ray ended this command: give the same command again once "
    f"RAY_ADDRESS names a running cluster; {_RESUMES}."
)
_LOST_NODE = (
    "The Ray node of this machine died, and ended this command: start the node again, free memory if it ran out, and "
    f"give the same command again; {_RESUMES}."
)
_LOST_OWN = (
    "Ray on this machine died, and ended this command: free memory if it ran out, and give the same command again; "
    f"{_RESUMES}."
)
_KILLED = f"This command was killed, maybe because memory ran out: give the same command again; {_RESUMES}."
# Waits for this process's end; then finds out who else is gone.
_WITNESS = r"""
import socket, sys
head, node, *words = sys.argv[1:]
if not sys.stdin.read():
    def gone(kind, place):
        try:
            with socket.socket(kind) as tried:
                tried.settimeout(2)
                tried.connect(place)
        except OSError:
            return True
        return False
    host, _, port = head.rpartition(":")
    host = host.strip("[]")
    lost_head = gone(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port)))
    lost_node = gone(socket.AF_UNIX, node)
    shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
    sys.stderr.write(shown + "error " + words[0 if lost_head else 1 if lost_node else 2] + "\n")
"""


@contextmanager
def last_words(head: str, node_socket: str, *, is_own: bool) -> Iterator[None]:
    """Inside the block, have another process print one sentence on standard error if this process is killed, or ended
    by Ray: what was lost, and what to do.

    ``head`` is the ``host:port`` of the cluster's head, ``node_socket`` the path of the socket of this machine's Ray
    node. ``is_own``: Ray was started by this process, on this machine alone.
    """
    words = (_LOST_OWN, _LOST_OWN, _KILLED) if is_own else (_LOST_HEAD.format(head=head), _LOST_NODE, _KILLED)
    witness = subprocess.Popen(  # noqa: S603 our own program
        [sys.executable, "-I", "-S", "-c", _WITNESS, head, node_socket, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )
    try:
        yield
    finally:
        # This process ends in words of its own.
        witness.communicate(b"ended")
