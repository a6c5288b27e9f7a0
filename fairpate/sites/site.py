"""One site's part in a release over sites: it connects to the coordinator; nobody connects to it.

Before anything leaves, the site has rehearsed the plan (run the method without private records), its operator has
agreed, and its own odometer (the total cost of all releases on its records) has charged all events of the plan. Then it
computes every sum of the release together with the others (:mod:`fairpate.sites.secure_sum`). What it sent is in the
journal in ``private/`` of its run folder, so that a site that was stopped resumes. Once a sum is known, or the plan has
ended, its secrets and noise are deleted.

Computing a table of the site's records needs torch and hundreds of megabytes; exchanging messages needs neither. So
each table is computed in a separate process (:func:`take_part`), which ends before the first message about the table
leaves. The process that asks the operator, keeps the journal and waits for the others (:class:`Messenger`) stays small.
For the next table, another process starts the release from the beginning, with the sums that are known so far.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from fairpate.files import make_folder, sync, write_atomically
from fairpate.pages import at_most, delta_caution
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, NoiseSource
from fairpate.sites import plan as plans
from fairpate.sites.plan import MOST_FILE_BYTES, MOST_PLAN_BYTES, Journal, PlanError, SitePlan
from fairpate.sites.secure_sum import List, Site, SiteKey, Step, SumError, sum_of
from fairpate.terminal import Reporter
from fairpate.types import IntArray, UserError

if TYPE_CHECKING:
    from fairpate.data import Dataset
    from fairpate.methods.base import NoisySum, Price
    from fairpate.privacy.accountant import Event
    from fairpate.releases.directory import RunDirectory
    from fairpate.releases.log import ReleaseLog
    from student.student import Student

# Short at first, since most lists close at once; then longer, since a wait may take hours.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_TIMEOUT_S = 60.0
_PATIENCE_S = 2.0  # without a word about waiting
_LEAVES_S = 30.0  # a process that closed its end of a pipe
# An environment variable that names a lock file: only one of the processes that compute tables works at a time.
TURN = "FAIRPATE_TURN"
_SHORT_BYTES = 2**16  # of a reply that reports an error, or only that a message was received
_HERE = ("localhost", "127.0.0.1", "::1")


class CoordinatorError(UserError):
    """The coordinator of a release over sites cannot be reached, refuses a message, or ended the release; the message
    says what to do."""


class CoordinatorClient:
    """Sends a site's requests to the coordinator, and repeats each for up to ``wait_s`` seconds while the coordinator
    cannot be reached or has no answer yet. No reply is kept beyond the length that an honest one can have, and none may
    be compressed: the coordinator is not trusted with this machine's memory."""

    def __init__(self, url: str, *, wait_s: float, ca: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _HERE):
            raise PlanError(
                f"URL: expected https://, or http:// on this machine, got {url}; ask for the HTTPS address."
            )
        # Over plain HTTP there is no certificate to verify, and reading the known authorities takes a while.
        verify = parts.scheme == "https" if ca is None else ssl.create_default_context(cafile=ca)
        # Neither proxies nor certificates come from environment variables.
        self._http = httpx.Client(
            base_url=url,
            timeout=_TIMEOUT_S,
            verify=verify,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
        )
        self._wait_s, self.close = wait_s, self._http.close

    def request(
        self,
        path: str,
        content: bytes | None = None,
        *,
        most_bytes: int = _SHORT_BYTES,
        wait_s: float | None = None,
        into: Path | None = None,
    ) -> bytes | None:
        """Send ``content`` to the coordinator's ``path``, or fetch ``path`` if there is no ``content``; return the
        reply, or None if the coordinator answers that the message came too late.

        The request is repeated for up to ``wait_s`` seconds (None: the ``wait_s`` of this client) until there is a
        reply. With ``into``, the reply is written to this file piece by piece, and empty bytes are returned.
        CoordinatorError if the coordinator ended the plan or refused the message, if its reply has more than
        ``most_bytes`` or is compressed, or if time is up.
        """
        wait_s = self._wait_s if wait_s is None else wait_s
        deadline_s, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
        while True:
            method = "GET" if content is None else "POST"
            try:
                # Safe to repeat: the coordinator keeps the first message, and the same again changes nothing.
                with self._http.stream(method, path, content=content) as reply:
                    if reply.status_code != 200:
                        # The rest of a longer one, such as a proxy's page of an error, is not read.
                        text = next(reply.iter_raw(_SHORT_BYTES), b"")
                    elif into is None:
                        return b"".join(_pieces(reply, most_bytes, path))
                    else:
                        with into.open("wb") as file:
                            file.writelines(_pieces(reply, most_bytes, path))
                        return b""
            except httpx.TransportError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):  # waiting does not make it valid
                    raise CoordinatorError(
                        f"The coordinator's certificate is refused ({error}); give its authority with --ca, and "
                        "compare this machine's clock with the certificate's dates."
                    ) from error
                reason = f"cannot be reached ({error})"
            else:
                if reply.status_code == 409:
                    return None
                try:
                    words = "; ".join(f"{each['value']}: {each['remedy']}" for each in json.loads(text)["errors"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    words = f"status {reply.status_code}"
                if reply.status_code == 410:
                    raise PlanEndedError(
                        f"The coordinator ended the plan; ask its author for a new plan. Cause: {words}"
                    )
                # Not there yet, busy, or failing for a while: everything else is wrong for good.
                if reply.status_code not in (202, 429) and reply.status_code < 500:
                    raise CoordinatorError(
                        f"{path}: the coordinator refused this request ({words}); correct its cause, then "
                        "give the command again."
                    )
                reason = "waits for other sites" if reply.status_code == 202 else f"answers {reply.status_code}"
            # After a try: with a wait of 0, each request is made once.
            if time.monotonic() >= deadline_s:
                raise CoordinatorError(
                    f"The coordinator {reason}, for {wait_s:g} s now; give the same command again to continue."
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _pieces(reply: httpx.Response, most_bytes: int, path: str) -> Iterator[bytes]:
    """Yield the body of ``reply`` to a request of ``path`` as it arrives. CoordinatorError for a body that is
    compressed, which would have another length in memory, and as soon as there are more than ``most_bytes``."""
    # Named as of this request: the address may be a proxy's.
    longer = CoordinatorError(
        f"{path}: the coordinator's reply is longer than the {most_bytes} bytes that it can have; ask its operator for "
        "the right address, and do not trust it otherwise."
    )
    if (coding := reply.headers.get("content-encoding", "identity").lower()) != "identity":
        raise CoordinatorError(
            f"{path}: the coordinator's reply is compressed ({coding[:20]!r}), which this site did not accept; ask its "
            "operator to switch compression off, also in a proxy."
        )
    # Beforehand where the length is stated, so that nothing of it is kept.
    if int(reply.headers.get("content-length", "0")) > most_bytes:
        raise longer
    received = 0
    for piece in reply.iter_raw():
        received += len(piece)
        if received > most_bytes:
            raise longer
        yield piece


class PlanEndedError(CoordinatorError):
    """The coordinator gave up the release over sites before all noisy sums were known. Costs that a site was charged
    stay charged."""


class Messenger:
    """The part of a site that needs no records: it asks the operator for consent, keeps the site's journal of sent
    messages, and talks to the coordinator.

    :func:`take_part` calls ``agree``, ``begin``, then ``sum`` for each sum in the plan's order, ``model`` and
    ``leave``. If :func:`take_part` is started again, the sums and the model that are known already are returned without
    waiting. ``source`` draws the site's noise; None: from the operating system's entropy.
    """

    def __init__(
        self,
        plan: SitePlan,
        key: SiteKey,
        client: CoordinatorClient,
        agree: Callable[[str], bool] = bool,
        *,
        reporter: Reporter | None = None,
        source: NoiseSource | None = None,
    ) -> None:
        self._plan, self._key, self._place, self._client = plan, key, plan.place_of(key), client
        # Shows the operator a text (what leaves the site, and its cost), and returns whether the operator agrees.
        self.agree = agree
        self._reporter, self._source = reporter or Reporter(quiet=True), source
        # Holds the journal.
        self._opened, self._model = ExitStack(), b""
        self.close = self._opened.close
        self.has_agreed = self._has_begun = False
        # Whether the plan's cost is charged to the site's odometer, the total cost of all its releases.
        self.is_charged = False

    def begin(self, path: Path, begun: Path, records: bytes, charge: Callable[[], object]) -> bool:
        """Open the site's journal in the file ``path``; return whether an earlier process began to charge the
        plan, the agreed terms of the release.

        ``charge`` charges the whole plan to the site's odometer, the total cost of all releases on its records.
        ``begun`` is a folder next to the odometer, in which an empty file is named after the journal that this site
        uses for the plan: a second journal is refused. ``records`` is a digest of the site's private records. SumError
        if the site began the plan with another journal or with other records.
        """
        if not self._has_begun:
            self._journal, self._has_begun = self._opened.enter_context(Journal.opened(path, self._plan)), True
        self._begun, self._charge, self._number = begun, charge, 0
        self._require_own_journal()
        self.is_charged = self._journal.get("charged") is not None
        # Its release is of one set of records, also where the site was stopped between two sums.
        if self._journal.setdefault("records", records) != records:
            raise SumError(
                "This site's private records are not those with which it began the plan; restore them and give the "
                "same command again, or ask for a new plan, which is charged again."
            )
        return self._journal.get("charging") is not None

    def waits_for(self, what: str, about: bytes = b"") -> bool:
        """Return whether the next call of the method ``what`` has to wait for the other sites, as ``sum`` and ``model``
        may have to. ``about`` is the argument of ``sum``."""
        if what == "sum":
            return self._journal.get(f"total {len(self._plan.sums) - 1 if about else self._number}") is None
        return what == "model" and not self._model

    def sum(self, exact_RW: IntArray, *, stddev: float, name: str, about: bytes = b"") -> IntArray:
        """Add up this site's table ``exact_RW`` and the tables of all other sites; return the noisy sum.

        ``stddev`` and ``name`` must be those of the plan; ``about`` is the file of the model that the table describes,
        if any.
        """
        number = self._plan.number_of(self._number, exact_RW, stddev=stddev, name=name, about=about)
        self._number += 1
        # Noise is drawn once for a table, and a table of another model is another one.
        if about and self._journal.setdefault("model", digest := hashlib.sha256(about).digest()) != digest:
            raise SumError("The coordinator sent another model than before; ask its operator for a new plan.")
        total = self._journal.get(f"total {number}")
        if total is None:
            with self._waiting("sum"):
                total = self._drawn(number, exact_RW, about)
            # Stored before the secrets are erased: without it, an erased sum could not be drawn again.
            total = self._journal.setdefault(f"total {number}", total)
        # Its noise and masks are no longer needed. Also after a stop between the two lines.
        self._journal.part(f"sum {number}").erase("the sum is known")
        return sum_of(total).reshape(exact_RW.shape)

    def model(self) -> bytes:
        """Wait until the coordinator has trained the model, and return the model's file. The plan's last sum, if it is
        about a model, counts this model's errors."""
        if not self._model:
            with self._waiting("model"):
                self._model = self._client.request("/v1/model", most_bytes=MOST_FILE_BYTES) or b""
        return self._model

    def leave(self) -> None:
        """Report to the coordinator, signed, that this site needs nothing more. Without the report the coordinator
        waits for a while before it stops."""
        signature = self._key.sign(self._plan.draw(0).tag("done", self._place))
        with suppress(CoordinatorError):
            self._client.request(f"/v1/done/{self._place}", signature, wait_s=0.0)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Context manager: show the operator that the site waits for others, with the text ``what``. If the coordinator
        ends the plan meanwhile, erase from the site's journal what belongs to a sum, secrets included."""
        try:
            with self._reporter.stage(what, patience_s=_PATIENCE_S):
                yield
        except PlanEndedError as error:
            for each in range(len(self._plan.sums)):
                self._journal.part(f"sum {each}").erase(str(error))
            self.leave()
            raise

    def _require_own_journal(self) -> None:
        own = (self._journal.get("id") or b"").hex()
        if self._begun.exists() and {path.name for path in self._begun.iterdir()} - {own}:
            # Its noise and lists are in another journal: drawn anew, two sums with one site's numbers would exist.
            raise SumError(
                "This site took part in this plan with another folder for its run, or this folder was deleted. A new "
                "run folder cannot continue the plan: give the earlier one with --out, or ask for a new plan, which is "
                "charged again."
            )

    def _drawn(self, number: int, exact_RW: IntArray, about: bytes) -> bytes:
        draw = self._plan.draw(number, about)
        site = Site(draw, self._place, self._key, self._journal.part(f"sum {number}"))
        # Counted durably, and within the site's limit, before its first message leaves. After a stop between the lines
        # the charge replaces its own row, by the id that the folder keeps once a charge has begun.
        if not self.is_charged:
            own = self._journal.setdefault("id", secrets.token_bytes(16))
            # Next to the odometer, which outlasts this folder. Durable before anything is sent, and seen by others
            # before this site looks for theirs: of two folders at once, none continues.
            make_folder(self._begun)
            (self._begun / own.hex()).touch(mode=0o600)
            sync(self._begun)
            self._require_own_journal()
            self._journal.setdefault("charging", b"yes")
            self._charge()
            self._journal.setdefault("charged", b"yes")
            self.is_charged = True

        def send(step: Step, message: bytes) -> None:
            self._client.request(f"/v1/sums/{number}/{step}/{self._place}", message)

        def fetch(name: List) -> bytes:
            path = f"/v1/sums/{number}/{name}/{self._place}"
            found = self._client.request(path, most_bytes=draw.longest(name))
            if found is None:
                raise SumError(
                    f"The coordinator has no {name} (a list of sites, or the sum) for this site; ask its operator "
                    "for a new plan."
                )
            return found

        send("hello", site.hello())
        members = fetch("members")
        # A site that came too late is in no list, and only learns the sum.
        if members[self._place : self._place + 1] == b"\1":
            send("masked", site.masked(members, np.ascontiguousarray(exact_RW).reshape(-1), self._source))
            survivors = fetch("survivors")
            if survivors[self._place : self._place + 1] == b"\1":
                # The site's own record of the list is on its disk before its signature leaves.
                send("agreed", site.agreed(survivors))
                send("shares", site.shares(fetch("agreement")))
        total = fetch("sum")
        if len(total) != 8 * draw.size:
            raise SumError(
                f"The coordinator sent a sum of {len(total)} bytes, expected {8 * draw.size}; use its version of "
                "fairpate."
            )
        return total


class ComputingError(UserError):
    """The process that computes a site's tables ended without a result; the message says how to continue."""


@dataclass(eq=False)
class _RemoteMessenger:
    """Stands for the :class:`Messenger` in the process that computes a site's tables: each method calls that of the
    messenger's process through a pipe."""

    pipe: Connection
    has_agreed: bool

    def __getattr__(self, method: str) -> Any:
        return partial(self._ask, method)

    def begin(self, path: Path, begun: Path, records: bytes, charge: Callable[[], object]) -> bool:
        self._charge = charge
        return bool(self._ask("begin", path, begun, records))

    def _ask(self, method: str, *values: Any, **named: Any) -> Any:
        self.pipe.send((method, values, named))
        # Before it answers, the other process may ask for the charge: the odometer's code is only here.
        while isinstance(answer := self.pipe.recv(), str):
            self._charge()
            self.pipe.send((answer, (), {}))
        return answer


_AnyMessenger = Messenger | _RemoteMessenger
Work = Callable[[_AnyMessenger], Path | None]


def _end_after(other: BaseProcess) -> None:
    other.join()
    os._exit(1)


def _compute(work: Work, pipe: Connection, has_agreed: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the other process ends this one
    other = parent_process()
    assert other is not None
    # If that was killed, this table is not needed, and the folder must be free for its next start.
    threading.Thread(target=_end_after, args=(other,), daemon=True).start()
    if turn := os.environ.get(TURN):
        fcntl.flock(os.open(turn, os.O_RDWR), fcntl.LOCK_EX)  # until this process ends
    with redirect_stdout(sys.stderr):
        try:
            pipe.send(("result", work(_RemoteMessenger(pipe, has_agreed=has_agreed)), {}))
        except (UserError, ValueError, OSError) as error:
            pipe.send(("error", error, {}))


def in_processes(work: Work, messenger: Messenger) -> Path | None:
    """Call ``work``, which is :func:`take_part` with all but its messenger, in a separate process, and return its
    result. To save memory, the process is ended while ``messenger`` waits for other sites; then a new process starts
    ``work`` again, which continues."""
    # Spawned, not forked: a copy of this process would hold its connections and its journal.
    context = get_context("spawn")
    while True:
        pipe, theirs = context.Pipe()
        process = context.Process(target=_compute, args=(work, theirs, messenger.has_agreed))
        process.start()
        theirs.close()
        try:
            if found := _answered(pipe, process, messenger):
                return found[0]
        finally:
            process.kill()
            process.join()
            pipe.close()


def _answered(pipe: Connection, process: BaseProcess, messenger: Messenger) -> list[Path | None]:
    """Answer the calls that ``process``, which runs :func:`take_part`, sends through ``pipe``, until it ends.

    Return a list with its result, or an empty list if it was ended before it had one: a process that has to wait for
    other sites is ended to free its memory, and started anew when they have answered.
    """

    def receive() -> tuple[str, Any, Any]:
        try:
            asked, values, named = pipe.recv()
        except EOFError:
            process.join(_LEAVES_S)
            raise ComputingError(
                f"The process that computes this site's tables ended with code {process.exitcode} (-9: killed, mostly "
                "because memory ran out); give the same command again to continue."
            ) from None
        if asked == "error":
            raise values
        return asked, values, named

    def charge() -> None:
        pipe.send("charge")
        receive()
        process.kill()  # with all that it did on the disk: it has asked, and waits
        process.join()

    while True:
        asked, values, named = receive()
        if asked == "result":
            return [values]
        if asked == "begin":
            named["charge"] = charge
        waits = messenger.waits_for(asked, named.get("about", b""))
        if waits and messenger.is_charged:
            process.kill()
            process.join()
        answer = getattr(messenger, asked)(*values, **named)
        if asked == "agree":
            messenger.has_agreed = answer
        if waits:
            return []
        pipe.send(answer)


def join(
    url: str,
    *,
    key: Path,
    agree: Callable[[str], bool],
    reporter: Reporter,
    digest: str | None = None,
    wait_s: float = 3600.0,
    ca: str | None = None,
    **party: Any,
) -> Path | None:
    """Take part, as one site, in the release over sites that the coordinator at ``url`` plans. Return the run folder
    with the results, or None if the operator did not agree.

    ``key`` is the file of this site's private keys. ``agree`` gets a text that says what leaves the site and what it
    costs, and returns whether the operator agrees. ``digest`` is the digest of the only plan to accept (None: any).
    The further arguments ``party`` are this site's files and settings (:func:`fairpate.sites.plan.config_of`).

    PlanError, ConfigError or DataError if plan, key and records do not match. LimitReachedError if the site's odometer
    (the total cost of its releases) has no room for the plan. CoordinatorError or SumError if the release is given
    up. ComputingError if the process that computes the site's tables was killed. Only these last three may be raised
    after the plan was charged or a message was sent.
    """
    own_key = plans.read_key(key)  # before the coordinator is waited for
    with closing(CoordinatorClient(url, wait_s=wait_s, ca=ca)) as client, TemporaryDirectory() as folder:
        plan = plans.read_plan(client.request("/v1/plan", most_bytes=MOST_PLAN_BYTES) or b"", url)
        if digest is not None and digest.lower() != plan.digest:
            raise PlanError(
                f"--plan: {url} serves another plan, {plan.digest}; ask the plan's author which of the two is right."
            )
        place, embedding = plan.place_of(own_key), None
        if plan.embedding:
            # Never whole in this process, which waits for hours: of pictures it is a quarter of its size.
            embedding = Path(folder) / "embedding.safetensors"
            client.request("/v1/embedding", most_bytes=MOST_FILE_BYTES, into=embedding)
        work = partial(take_part, plan, place, embedding=embedding, is_quiet=reporter.console.quiet, **party)
        with closing(Messenger(plan, own_key, client, agree, reporter=reporter)) as messenger:
            return in_processes(work, messenger)


def take_part(
    plan: SitePlan, place: int, messenger: _AnyMessenger, *, embedding: Path | None, is_quiet: bool, **party: Any
) -> Path | None:
    """Take part in ``plan`` as the site at the position ``place``: check the plan by a rehearsal without private
    records, compute this site's tables, and write the results to a run folder. Return this folder, or None if the
    operator did not agree.

    ``embedding`` is the file of the plan's embedding, ``party`` are the site's own files and settings, as arguments of
    :func:`fairpate.sites.plan.config_of`.
    """
    from fairpate.methods.base import price
    from fairpate.methods.voting import digest_of_records
    from fairpate.privacy.mechanism_events import event_from
    from fairpate.releases.log import ReleaseLog
    from fairpate.releases.odometer import state_folder
    from fairpate.run.private_metrics import release_table
    from fairpate.run.run import open_run

    reporter = Reporter(quiet=is_quiet or messenger.has_agreed)
    config, load = plans.config_of(plan, **party), plans.loader_of(plan, embedding, has_private=True)
    events, test_events = (tuple(map(event_from, each)) for each in (plan.events, plan.test_events))
    if not messenger.has_agreed:
        with reporter.stage("data"):
            dataset = load(config.data)
            plans.require_rehearsed(plan, config, dataset)
        # A unit is in one part of the site's records, so that it pays the larger of both prices.
        prices = [price(events, delta=config.target.delta, accounting=config.target.stated["accounting"])]
        prices += [price(test_events, delta=config.target.delta)] if test_events else []
        if not messenger.agree(offer(plan, place, max(prices, key=lambda each: each.epsilon), dataset)):
            return None
    charges: list[tuple[ReleaseLog, tuple[Event, ...]]] = []

    def charge() -> None:
        for each in (ReleaseLog.check, ReleaseLog.charge):
            for log, counted in charges:
                each(log, counted, noise=OS_ENTROPY)

    def sums(run: RunDirectory, log: ReleaseLog) -> NoisySum:
        charges.append((log, events))
        if test_events:
            charges.append((log.of_part("test"), test_events))
        begun = state_folder() / "sites" / f"{plan.digest}-{place}"
        # As they were read, before an embedding.
        private = load(config.data.model_copy(update={"embedding": None})).private
        digest = digest_of_records(list(private.record_id), private.x, private.y, private.z)
        has_begun = messenger.begin(run.journal, begun, digest.encode(), charge)
        if has_begun and run.receipt.exists():
            for each, _ in charges:
                each.continues = True
        return messenger.sum

    with open_run(config, reporter, load=load, command="fairpate site join") as opened:
        opened = replace(opened, noisy_sum=sums(opened.run, opened.log))
        opened.config.release(opened)
        if test_events:
            run, content = opened.run, messenger.model()
            write_atomically(run.student, lambda path: path.write_bytes(content))
            student = measurable(run, opened.dataset)
            (_, (parts, _)) = charges
            parts.continues = True  # counted with the release
            (event,) = test_events
            release_table(opened, student, event, parts, noise=OS_ENTROPY)
        messenger.leave()
    return opened.run.root


def measurable(run: RunDirectory, dataset: Dataset) -> Student:
    """Return the model that the coordinator sent, read from the run folder, so that it can be measured on this site's
    test records. SumError if the file is not a model, or if the model is for records of another shape, or with other
    labels or groups, than those of ``dataset``."""
    from student.card import StudentFileError
    from student.student import load_student

    try:
        student = load_student(run.student)
    except StudentFileError as error:
        raise SumError(
            f"The coordinator sent a file that is not a model ({error}); ask its operator for a new plan."
        ) from error
    found = (student.card.input_shape, student.card.label_names, student.card.group_names)
    if found != (tuple(dataset.private.x.shape[1:]), dataset.label_names, dataset.group_names):
        raise SumError(
            "The coordinator sent a model for another shape of records, other labels or other groups than those of "
            "this site's data; ask its operator for a new plan."
        )
    return replace(student, embedding=None)


def offer(plan: SitePlan, place: int, cost: Price, dataset: Dataset) -> str:
    """Return the text that a site's operator has to agree to: what leaves the site, who receives it, and what it
    costs. ``place`` is the site's position in the plan; ``cost`` is the privacy cost of each record or person
    at the site."""
    of_test = len(plan.sums) - bool(plan.test_events)
    numbers, tested = (
        " and ".join(f"{each.rows} x {each.columns}" for each in some)
        for some in (plan.sums[:of_test], plan.sums[of_test:])
    )
    tested = (
        tested and f", and {tested} about the model's errors on {len(dataset.test)} test records set aside from them"
    )
    unit = "person" if cost.unit == "person" else "record"
    # 32 digits are enough to compare keys by telephone.
    keys = {name: hashlib.sha256(bytes.fromhex(key)).hexdigest()[:32] for name, key in plan.sites.items()}
    return (
        f"Plan {plan.digest}, site {list(plan.sites)[place]!r} of {len(plan.sites)}. Compare the digest and these keys "
        "with the other sites by telephone:\n"
        + "".join(f"  {name}: {key}\n" for name, key in keys.items())
        + f"Method {plan.settings.get('method')}, protecting every {unit}"
        f"{' although the declaration names persons' if dataset.records_alone else ''}.\n"
        f"Leaves this site: {numbers} whole numbers computed from {len(dataset.private)} private records{tested}, with "
        "noise and under masks. The coordinator can only add them up with those of the other sites.\n"
        f"Costs every {unit} here: epsilon {at_most(cost.epsilon)} at delta {at_most(cost.delta)}, if at most "
        f"{plan.may_collude} of the other sites collude with the coordinator. It is charged to the odometer of "
        f"{dataset.name!r} now, and stays charged also if the plan ends without a result. Somebody with records at "
        "several sites pays at each."
        + (f"\n{caution}" if (caution := delta_caution(cost.delta, dataset.declared_units, cost.unit)) else "")
    )
