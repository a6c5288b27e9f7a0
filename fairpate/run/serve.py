"""Serve a finished run over HTTP: its aggregator, with teachers that stay, or its published student.

The service writes the run's own ledger under the terms that the ledger was made with, so the queries of `fairpate run`
are answered again for free. Votes that the run collected are read from its table; teachers vote on other records, such
as those in requests.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI

from aggregator.audit import note_action
from aggregator.ledger import Ledger
from aggregator.service.api import Facts
from aggregator.service.auth import LiveTokens
from aggregator.service.server import (
    Backend,
    Service,
    ServiceSettings,
    check_exposure,
    find_service,
    is_restarted,
    start_service,
)
from aggregator.session import AggregatorSession, PublicPool
from fairpate.config import DataConfig, QueriesConfig, RayConfig
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.declaration import read_declaration
from fairpate.data.registry import CODEBOOKS
from fairpate.data.tables import RecordForm, feature_codes, form_of
from fairpate.http_server import HttpServer, ServiceError
from fairpate.methods.label_queries import choose_queries, ledger_terms, open_ledger, place_of, state_for_service
from fairpate.methods.own_votes import OwnVotes, read_votes_file
from fairpate.methods.pate import VotingMethod
from fairpate.run.context import RunDirectory, RunFolderError
from fairpate.run.folder import finished_run, open_run_directory
from fairpate.run.learn import as_trained, load_for, record_data, require_data_by_name
from fairpate.run.ledger_commands import last_backup_s
from fairpate.run.release_log import LedgerMeter, Odometer, ReleaseLog, state_folder
from fairpate.terminal import Output, require_extra, say, show
from fairpate.types import UsageError


def public_pool(dataset: Dataset, *, takes_posted: bool = True) -> PublicPool:
    """Return every public record, each content once; the run's own queries come first, in the order of its run.

    ``takes_posted``: whether the voters can vote on other records too.
    """
    # Without a number and an admission, so that every record is offered, not the run's selection.
    public = choose_queries(dataset, QueriesConfig())
    embedding = dataset.embedding

    def place(features: npt.NDArray[np.float32]) -> npt.NDArray[np.generic]:
        if embedding is None:
            return features
        import torch

        # As every record was embedded: the same record gets the same coordinates, bit for bit.
        return embedding(torch.from_numpy(features)[None])[0].numpy()

    return PublicPool(
        features=public.x.numpy(),
        groups_N=public.z.numpy(),
        record_ids=public.record_id,
        group_names=dataset.group_names,
        label_names=dataset.label_names,
        takes_posted=takes_posted,
        form=form_of(dataset.feature_codes),
        place=place,
    )


def public_words(run: RunDirectory, config: VotingMethod, dataset: Dataset) -> Facts:
    """Return the public description of the run that the service's page shows."""
    declared = entry_for(config.data) if config.data.declaration is not None else REGISTRY.get(dataset.name)
    record = ""  # without an embedding, the pool shows the features
    if dataset.embedding is not None:
        (coordinates,) = dataset.public.x.shape[1:]
        features = " × ".join(map(str, dataset.embedding.record_shape))
        record = f"{features} features, seen as {coordinates} coordinates of the public embedding"
    return Facts(
        run=run.root.name,
        method=config.title,
        data=dataset.name,
        task="" if declared is None else declared.task,
        attribute=dataset.sensitive_attribute,
        record=record,
    )


# Each look is a call of the actor; Ctrl-C interrupts the pause between two.
_WATCH_INTERVAL_S = 5.0
# A restart verifies the ledger and starts the voters again before the service answers.
_WATCH_TIMEOUT_S = 300.0

SPENT = (
    "The budget was planned for the run's own queries: they are answered again, and new ones hardly find room. To "
    "leave room for new ones, run with --keep 30%, or without a target and with aggregator.budget."
)


def open_backend(root: Path, config: VotingMethod, state: Path | None = None, take_over: bool = False) -> Backend:
    """Open dataset, voters and ledger of the run in ``root``, ready to answer; runs in the aggregator's actor.

    ``state`` is the operator's folder with the odometer; None: this process's own. ``take_over`` ends another writer of
    the ledger, where that is possible. An actor that Ray restarts takes nothing over, because a third writer may have
    done so meanwhile.
    """
    run = RunDirectory(root=root)
    if isinstance(config, OwnVotes):
        dataset = read_votes_file(config.votes).dataset
    else:
        named = load_for(run, config.data)
        record_data(run, named, given_from_python=False)
        dataset = config.queried(as_trained(run, config, named))
    voters, plan = config.standing_voters(dataset, run), config.plan(dataset)
    terms, queries = ledger_terms(plan, dataset, ensemble=voters.ensemble), choose_queries(dataset, config.queries)

    def open_books(*, take_over: bool = False) -> tuple[Ledger, AggregatorSession]:
        log = ReleaseLog(run, Odometer(state), data=dataset.name, method=config.method, part=dataset.part)
        ledger_meter = LedgerMeter(log, terms, unit=plan.unit, planned=plan.counted_beforehand)
        if take_over:
            note_action(run.actions, "take over")
        # Never made here: a run whose ledger is gone must not begin to count from zero.
        ledger = open_ledger(run, terms, queries, create=False, meter=ledger_meter, take_over=take_over)
        return ledger, AggregatorSession(ledger, source=plan.source)

    try:
        ledger, session = open_books(take_over=take_over and not is_restarted())
    except BaseException:
        # Their actors would outlive a service that never started.
        voters.close()
        raise
    # Before the service can answer: a crash after an answer must not leave a claim that is too small.
    state_for_service(run, terms)
    public = public_pool(dataset, takes_posted=config.votes_on_anything)
    return Backend(
        ledger=ledger,
        session=session,
        pool=public,
        count_votes=voters.count_votes,
        # Without `take_over`: a service that was deposed must not depose its successor by itself.
        reopen=open_books,
        voters_answer=voters.are_answering,
        try_vote=lambda: voters.try_vote(public.features[:1]),
        close=voters.close,
        last_backup=lambda: last_backup_s(run),
        facts=public_words(run, config, dataset),
    )


def serve_aggregator(
    root: Path,
    settings: ServiceSettings,
    *,
    data_dir: Path | None,
    detach: bool,
    take_over: bool = False,
) -> None:
    """Serve the run until interrupted, or leave the service on the cluster at RAY_ADDRESS (``detach``).

    ``data_dir`` is where the data set's files are now, if not where the run found them. ``take_over``, for a ledger in
    a database only: end a service elsewhere whose process hangs or whose node is lost. ServiceError, LedgerError or
    RunDirectoryError where it cannot start or ends for good.
    """
    # Before the check: the run's token store, too, lets a service listen beyond this machine.
    settings = replace(settings, tokens=replace(settings.tokens, store=RunDirectory(root=root.absolute()).tokens))
    check_exposure(settings)
    run, config = _run_with_votes(root)
    if not isinstance(config, OwnVotes):
        require_data_by_name(run)
    is_in_folder = place_of(run).is_in_folder
    if take_over and is_in_folder:
        raise UsageError("--take-over: needs a ledger in a database, and here it is in its run's folder; leave it out.")
    if data_dir is not None and isinstance(config, OwnVotes):
        raise UsageError("--data-dir: not read, for the records are in the file of votes; leave it out.")
    # Resolved here: the actor may have another working directory and environment.
    found = data_dir or config.data.data_dir
    if found is None and config.data.declaration is None:
        found = Path(os.environ["FAIRPATE_DATA"]) if os.environ.get("FAIRPATE_DATA") else None
    data = config.data.model_copy(update={"data_dir": None if found is None else found.absolute()})
    with _ray(config.ray, detach=detach):
        resources = None
        if detach and is_in_folder:
            import ray

            # A ledger in files is on this node's disk, where Ray must start its service again. A node has 1 of this
            # resource; 0.001 leaves room for many services.
            resources = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        service = start_service(
            service_name(run),
            open_backend,
            (run.root.absolute(), config.model_copy(update={"data": data}), state_folder(), take_over),
            settings,
            detached=detach,
            resources=resources,
        )
        say(f"{run.root} is served at {settings.url} (documentation: {settings.url}/docs)")
        write = f"fairpate report {shlex.quote(str(run.root))}"
        say(f"Its answers enter {run.statement} with `{write}`: give it before you publish.")
        if not config.leaves_room:
            say(SPENT)
        _show_served(run, settings, detached=detach)
        if detach:
            say(f"It stays on the cluster; end it with `fairpate serve {shlex.quote(str(root))} --stop`.")
            return
        _watch(service)


def _show_served(run: RunDirectory, settings: ServiceSettings, *, detached: bool) -> None:
    """Print the facts of the started service for a program; a person has seen them already."""
    show(Output(facts={"served": [{"run": run.root, "url": settings.url, "detached": detached}]}, words=""))


def _watch(service: Service) -> None:
    """Wait for Ctrl-C or SIGTERM, through restarts of the service. An error if the service ends for good."""
    # SIGTERM as Ctrl-C, so that the service is stopped in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while service.is_serving(timeout_s=_WATCH_TIMEOUT_S):
            time.sleep(_WATCH_INTERVAL_S)
        raise ServiceError(f"{service.url}: the HTTP server ended by itself; its log says why. Serve the run again.")
    except KeyboardInterrupt:
        return
    finally:
        # After an error too: a service that does not answer may still hold the ledger.
        service.stop()


def serve_student_of(
    root: Path,
    settings: ServiceSettings,
    *,
    num_replicas: int | None,
) -> None:
    """Serve the run's published student until interrupted.

    ``num_replicas`` copies run on Ray Serve, which reads only host and port of ``settings``; None: one in this process,
    with tokens, rate, TLS, log and traces. MissingExtraError if Ray Serve cannot be imported, UsageError for a setting
    that Ray Serve would drop.
    """
    run, config = finished_run(root)
    if not config.is_private:
        raise RunFolderError(
            f"{root}: a run of {config.method}, which has no privacy: its model may not be published; give another run."
        )
    if num_replicas is not None:
        dropped = {
            "--tls-cert": settings.tls is not None,
            "--rate": not math.isinf(settings.rate.per_s),
            "--log-file": settings.log_file is not None,
            "--traces": settings.traces,
            "tokens (a token file, FAIRPATE_ANALYST_TOKEN or FAIRPATE_OPERATOR_TOKEN)": not settings.tokens.is_empty,
        }
        for name in (name for name, is_given in dropped.items() if is_given):
            raise UsageError(
                f"--replicas: {name} would not be read by Ray Serve; leave it out and put a proxy in front, or serve "
                "one copy without --replicas."
            )
    ray = config.ray if isinstance(config, VotingMethod) else RayConfig()
    with (
        _student_here(run, settings, form_for(config.data))
        if num_replicas is None
        else _student_on_ray(run, settings, ray, num_replicas)
    ) as is_serving:
        # As Ctrl-C, so that the server finishes its requests.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(f"The student of {run.root} is served at {settings.url} (documentation: /docs)")
        if settings.tokens.is_empty:
            say("It needs no token: any client that reaches this address may query it.")
        else:
            say("It needs a token, of either role.")
        _show_served(run, settings, detached=False)
        with suppress(KeyboardInterrupt):
            while is_serving():
                time.sleep(_WATCH_INTERVAL_S)
            raise ServiceError(f"{settings.url}: the HTTP server ended by itself. Serve the run again.")


def form_for(data: DataConfig) -> RecordForm | None:
    """Return the form for records of a table, by its declaration alone; None for pictures, and if it is gone."""
    path = CODEBOOKS / f"{data.name}.yaml" if data.declaration is None else data.declaration.path
    if not path.exists() or (table := read_declaration(path)).pictures:
        return None
    return form_of(feature_codes(table.visible(entry_for(data).complete_options(data.options))))


@dataclass(frozen=True)
class _StudentApp:
    """The published student in ``path``, for :class:`HttpServer`."""

    path: Path
    form: RecordForm | None

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
        from student.server import student_in_one_process

        tokens = None if settings.tokens.is_empty else LiveTokens(settings.tokens)
        return student_in_one_process(self.path, form=self.form, tokens=tokens, rate=settings.rate, tracer=tracer)


@contextmanager
def _student_here(
    run: RunDirectory, settings: ServiceSettings, form: RecordForm | None
) -> Iterator[Callable[[], bool]]:
    """Serve the student with uvicorn in this process; yield a function that returns whether it serves."""
    server = HttpServer(_StudentApp(run.student, form), settings)
    try:
        yield lambda: server.is_alive
    finally:
        server.stop()


@contextmanager
def _student_on_ray(
    run: RunDirectory, settings: ServiceSettings, config: RayConfig, num_replicas: int
) -> Iterator[Callable[[], bool]]:
    """Serve copies of the student on Ray Serve, which restarts failed ones; yield a function that returns whether they
    serve."""
    require_extra("serve", "--replicas")
    from student.server import serve_student, stop_student

    with _ray(config, detach=False):
        # The replicas share what one actor of the run reserved.
        cpus = config.num_cpus / num_replicas
        try:
            serve_student(
                run.student,
                host=settings.host,
                port=settings.port,
                num_replicas=num_replicas,
                cpus_per_replica=cpus,
            )
            yield lambda: True
        finally:
            stop_student()


def stop_aggregator(root: Path) -> None:
    """Stop the service that ``serve_aggregator(detach=True)`` left on the cluster."""
    run, config = _run_with_votes(root)
    with _ray(config.ray, detach=True):
        name = service_name(run)
        actor = find_service(name)
        if actor is None:
            raise ServiceError(f"{root}: is not served on this cluster; nothing to stop.")
        Service(actor=actor, name=name, url="").stop()
        say(f"{root} is served no more.")


def service_name(run: RunDirectory) -> str:
    """Return the name of the ledger's service. It is unique per ledger, so that a second service for the run is
    refused."""
    # Resolved: a link and the folder that it leads to are one ledger.
    return f"aggregator-{hashlib.sha256(str(run.ledger.resolve()).encode()).hexdigest()[:12]}"


def _run_with_votes(root: Path) -> tuple[RunDirectory, VotingMethod]:
    """Return a run whose teachers can be queried. RunFolderError if its method has no teachers or the run keeps
    none."""
    run, config = open_run_directory(root)
    if isinstance(config, OwnVotes) and not config.votes.features:
        # Without features no student was trained, and the votes are in their file.
        run.require_finished(with_ledger=True, with_votes=False, with_student=False)
    else:
        run, config = finished_run(root)
    if not isinstance(config, VotingMethod):
        remedy = "serve its model with --student" if config.is_private else "give a run of a method that has some"
        raise RunFolderError(f"{root}: a run of {config.method}, which has no teachers to ask; {remedy}.")
    if not config.keeps_teachers:
        lost = "file of votes is gone" if isinstance(config, OwnVotes) else "teachers were not kept"
        raise RunFolderError(
            f"{root}: a run of {config.method} whose {lost}, so none can be asked; serve its model with --student."
        )
    return run, config


@contextmanager
def _ray(config: RayConfig, *, detach: bool) -> Iterator[None]:
    """Start Ray for a service. A detached service needs a cluster that outlives this process."""
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ServiceError("--detach and --stop need a cluster that stays; set RAY_ADDRESS, or leave them out.")
    from teachers.ray_pool import start_ray  # imports torch, which a refusal does not need

    with start_ray(config):
        yield
