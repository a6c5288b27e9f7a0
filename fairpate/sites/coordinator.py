"""The coordinator of a noisy sum over sites: it relays the sites' messages, closes lists of sites on time, and unmasks
each sum.

It is trusted only to be available; docs/sites.md lists what it can see and do. Every message that it accepts and every
list that it closes is stored in its journal (a durable file) before it is answered, so that it can be stopped and
resumed. Its clock alone determines when sites are late.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Request, Response

from aggregator.service.auth import is_loopback
from fairpate.http_server import FaultError, HttpServer, HttpSettings, new_app
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import event_from
from fairpate.sites.plan import (
    MOST_FILE_BYTES,
    Journal,
    PlanError,
    SitePlan,
    config_of,
    embedding_file,
    loader_of,
    read_plan,
)
from fairpate.sites.secure_sum import ENDED, LISTS, STEPS, Coordinator, LateError, SumError
from fairpate.types import IntArray

if TYPE_CHECKING:
    from fairpate.releases.directory import RunDirectory
    from fairpate.releases.log import ReleaseLog
    from fairpate.terminal import Reporter

# Keys, signatures and framing of a message; sealed shares take less than 128 bytes for each site.
_OVERHEAD = 2**16
_POLL_S = 0.2
_LINGER_S = 30.0  # for sites to fetch the last sum


async def _body(request: Request) -> bytes:
    return await request.body()


RawBody = Annotated[bytes, Depends(_body)]


class CoordinatorSums:
    """Computes the noisy sums of a release together with the sites, which send their messages to its HTTP application.

    ``plan`` (the file on which all parties agree) lists the sums. An object of this class is called once for each sum,
    in this order, and waits for the sites. A sum has several steps, in each of which every site sends one message.
    ``wait_s`` is how long a step waits for missing sites before the sum continues without them. If too few sites answer
    in one step, the release is given up, and its plan cannot be used again.
    """

    def __init__(self, plan: SitePlan, journal: Journal, *, wait_s: float, embedding: bytes | None = None) -> None:
        self._plan, self._journal, self._wait_s, self._embedding = plan, journal, wait_s, embedding
        # Guards machines and journal: requests come from a pool of threads, and the run waits in its own.
        self._changed = threading.Condition()
        self._machines: list[Coordinator] = []
        for number in range(len(plan.sums)):
            # Messages about a model can be read once it is known.
            about = journal.get("model") if plan.reads_model(number) else b""
            if about is not None:
                self._begin(number, about)
        self._number = 0
        self._done: set[int] = set()

    def _begin(self, number: int, about: bytes) -> None:
        self._machines.append(Coordinator(self._plan.draw(number, about), self._journal.part(f"sum {number}")))

    def __call__(self, exact_RW: IntArray, *, stddev: float, name: str, about: bytes = b"") -> IntArray:
        """Wait for the sites and return the noisy sum of their tables. SumError if too few sites answer in time, now or
        in an earlier call.

        Arguments are those of :class:`fairpate.methods.base.NoisySum`; ``exact_RW``, the coordinator's own table, must
        be all zeros.
        """
        number = self._plan.number_of(self._number, exact_RW, stddev=stddev, name=name, about=about)
        self._number += 1
        if exact_RW.any():
            raise SumError(
                "The coordinator's data set has private records; remove them from it, and let one more site join with "
                "these records."
            )
        if len(about) > MOST_FILE_BYTES:
            raise SumError(
                f"The model's file has {len(about)} bytes, and sites accept at most {MOST_FILE_BYTES}; make a new plan "
                "with a smaller model."
            )
        with self._changed:
            if self._plan.reads_model(number):
                if self._journal.setdefault("model", about) != about:
                    raise SumError(
                        "The model differs from the one that was sent to the sites; restore the run's folder."
                    )
                if number == len(self._machines):
                    self._begin(number, about)
            machine = self._machines[number]
            stage, deadline_s = -1, math.inf
            while (total_D := machine.total_D) is None:
                if (reason := self._journal.get(ENDED)) is not None:
                    raise SumError(f"The plan has ended; make a new plan. Cause: {reason.decode()}")
                try:
                    closed = machine.advance(time_is_up=time.monotonic() >= deadline_s)
                except SumError as error:
                    # Durable before any site hears of it: a coordinator that comes back does not try again.
                    self._journal.setdefault(ENDED, str(error).encode())
                    raise
                if closed != stage:
                    # Each list has its own time, also the list that was open when the coordinator was started again.
                    stage, deadline_s = closed, time.monotonic() + self._wait_s
                else:
                    # Messages wake it; the timeout is for lateness, which no message reports.
                    self._changed.wait(_POLL_S)
        return total_D.reshape(exact_RW.shape)

    def wait_for_sites(self, timeout_s: float) -> None:
        """Wait until all sites have reported that they need nothing more, but at most ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self._done) < len(self._plan.sites) and time.monotonic() < deadline_s:
                self._changed.wait(_POLL_S)

    def app(self, settings: Any = None, *, tracer: Any = None) -> FastAPI:  # noqa: ARG002 - as HttpServer asks
        """Return the HTTP application for the sites; it needs no tokens, since every message is signed by its site."""

        largest = max(8 * each.rows * each.columns for each in self._plan.sums)
        app = new_app(
            title="FairPATE sites",
            description="The coordinator of one release over sites that share nothing.",
            max_body_bytes=lambda: _OVERHEAD + 128 * len(self._plan.sites) + largest,
            # Without a limit on requests: sites poll until their lists close.
            tracer=tracer,
        )

        # Functions without `async` run in threads: they wait for machines and journal.
        app.get("/v1/plan")(self.plan)
        app.get("/v1/embedding")(self.embedding)
        app.get("/v1/model")(self.model)
        app.post("/v1/done/{place}")(self.done)
        app.post("/v1/sums/{number}/{step}/{place}")(self.message)
        app.get("/v1/sums/{number}/{name}/{place}")(self.listed)
        return app

    def plan(self) -> Response:
        """Answer with the bytes of the plan's file, which states the sums, their noise and the sites."""
        return _bytes(self._plan.content)

    def embedding(self) -> Response:
        """Answer with the file of the embedding that is applied to all records, or status 404 if the plan has none."""
        return _bytes(self._embedding)

    def _machine(self, number: int) -> Coordinator:
        if not 0 <= number < len(self._machines):
            begun = f"{len(self._machines)} of {len(self._plan.sums)} sums"
            words = f"Only {begun} have begun; give the number of one of them, counted from 0, or try later."
            raise FaultError(404, "number", number, words)
        return self._machines[number]

    def model(self) -> Response:
        """Answer with the file of the trained model whose private metrics the last sum measures; status 202 until it is
        trained."""
        with self._changed:
            found = self._journal.get("model")
            if found is None:
                self._refuse_if_ended()
        return Response(status_code=202) if found is None else _bytes(found)

    def done(self, place: int, body: RawBody) -> Response:
        """Accept a site's signed report that it needs nothing more."""
        sites = len(self._plan.sites)
        if not 0 <= place < sites:
            words = f"The plan has {sites} sites, numbered from 0; give the number of one of them."
            raise FaultError(422, "place", place, words)
        try:
            # Signed: a stranger's request must not let the coordinator stop before a site has its sum.
            self._plan.draw(0).verify(place, body, b"", "done")
        except SumError as error:
            raise FaultError(422, "message", "done", str(error)) from error
        with self._changed:
            self._done.add(place)
            self._changed.notify_all()
        return _bytes(b"")

    def _refuse_if_ended(self, machine: Coordinator | None = None) -> None:
        # A sum that is known stays available after the end: sites may still fetch it.
        if (reason := self._journal.get(ENDED)) is not None and (machine is None or machine.total_D is None):
            words = "The plan has ended, and what was charged stays charged; make a new plan to try again."
            raise FaultError(410, "plan", reason.decode(), words)

    def message(self, number: int, step: str, place: int, body: RawBody) -> Response:
        """Accept the message that site ``place`` sends in sum ``number`` for the protocol's ``step`` (`hello`,
        `masked`, `agreed` or `shares`)."""
        machine = self._machine(number)
        if step not in STEPS:
            words = f"Expected a step of the protocol: {', '.join(STEPS)}; give one of these."
            raise FaultError(404, "step", step, words)
        with self._changed:
            self._refuse_if_ended(machine)
            try:
                # This checks ``place`` too.
                machine.receive(step, place, body)
            # 409 for a late site, which then only waits for the sum; 422 for a message that no honest site sends.
            except SumError as error:
                raise FaultError(409 if isinstance(error, LateError) else 422, "message", step, str(error)) from error
            self._changed.notify_all()
        return _bytes(b"")

    def listed(self, number: int, name: str, place: int) -> Response:
        """Answer site ``place`` with the noisy sum ``number`` or with one of its lists of sites; status 202 while the
        list is open. ``name``: `members` (the participants), `survivors` (sites that sent masked numbers), `agreement`
        (survivors that signed the list of survivors) or `sum`."""
        machine = self._machine(number)
        if name not in LISTS or not 0 <= place < len(self._plan.sites):
            words = "The path must end in members, survivors, agreement or sum, and a site's number; correct the path."
            raise FaultError(404, "path", f"{name}/{place}", words)
        with self._changed:
            found = machine.listed(name, place)
            if found is None:
                # Only now: a list that was closed before the end is still answered.
                self._refuse_if_ended(machine)
                return Response(status_code=202)
        return _bytes(found)


def serve(
    plan_file: Path, settings: HttpSettings, *, reporter: Reporter, wait_s: float = 3600.0, **party: Any
) -> RunDirectory:
    """Coordinate the noisy sums over sites that the plan in ``plan_file`` states, train a model on them, and return the
    run folder with privacy statement and report.

    If the plan has an embedding, it is read from the file next to the plan. ``party`` are the coordinator's own files
    and settings, as arguments of :func:`fairpate.sites.plan.config_of`. ``wait_s`` as in :class:`CoordinatorSums`.
    PlanError or ConfigError for files that do not match, ServiceError for an address that cannot be used, SumError if
    a sum fails, for example because too few sites took part.
    """
    from fairpate.run.run import run_method

    plan = read_plan(plan_file.read_bytes(), str(plan_file))
    if settings.tls is None and not is_loopback(settings.host):
        raise PlanError(
            f"--host: {settings.host} can be reached from other machines; encrypt with --tls-cert and --tls-key."
        )
    embedding = embedding_file(plan_file) if plan.embedding else None
    config = config_of(plan, **party)
    with ExitStack() as stack:

        def sums(run: RunDirectory, log: ReleaseLog) -> CoordinatorSums:
            # A limit of the coordinator's own odometer should not be found out after the sum is known.
            if log.stored() is None:
                log.check(tuple(map(event_from, plan.events)), noise=OS_ENTROPY)
                if plan.test_events:
                    log.of_part("test").check(tuple(map(event_from, plan.test_events)), noise=OS_ENTROPY)
            journal = stack.enter_context(Journal.opened(run.journal, plan))
            content = None if embedding is None else embedding.read_bytes()
            found = CoordinatorSums(plan, journal, wait_s=wait_s, embedding=content)
            server = HttpServer(found.app, settings)
            # In reverse order: sites learn the end, then the server stops, then the journal is closed.
            stack.callback(server.stop)
            stack.callback(found.wait_for_sites, _LINGER_S)
            reporter.note("sites", f"plan {plan.digest} at {settings.url}, waiting for {len(plan.sites)} sites")
            return found

        load = loader_of(plan, embedding, has_private=False)
        return run_method(config, reporter, load=load, sums=sums, remarks=plan.remarks)


def _bytes(content: bytes | None) -> Response:
    return Response(content, status_code=404 if content is None else 200, media_type="application/octet-stream")
