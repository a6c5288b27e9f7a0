"""Serves a run's aggregator or student over HTTP, with the settings of its command.

What a service shows of a run: its public records, how one is written down, and the run in public words.

How a service is to be reached, from the options of `fairpate serve`: each is checked before anything starts.

Serving a finished run: its aggregator over HTTP, with teachers that stay, or its published student.

The run's own ledger goes on, under the terms it was made with, so that what `fairpate run` asked is answered again for
free. Votes the run already collected are read from its table; other records, posted ones included, go to the teachers.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI

from aggregator.audit import note_action
from aggregator.budgets import QuotaRule
from aggregator.ledger import Ledger
from aggregator.service.auth import OidcConfig, RequestRate, read_tokens
from aggregator.service.server import (
    PREFIX,
    Backend,
    HttpServer,
    Runs,
    Service,
    ServiceError,
    ServiceSettings,
    TlsFiles,
    check_exposure,
    find_service,
    is_restarted,
    start_service,
)
from aggregator.service.wire import Facts, PublicPool
from aggregator.session import AggregatorSession
from fairpate.config import QueriesConfig, RayConfig
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.columns import form_of
from fairpate.data.embedding import Embedding
from fairpate.later import torch
from fairpate.methods.own_votes import OwnVotes, read_votes_file
from fairpate.methods.pate import VotingMethod
from fairpate.run.folder import RunDirectory, RunFolderError, open_run_directory
from fairpate.run.label_queries import choose_queries, ledger_terms, open_ledger, place_of, state_for_service
from fairpate.run.learn import as_trained, load_for, record_data, require_data_by_name
from fairpate.run.ledger_commands import last_backup_s
from fairpate.run.release_log import LedgerMeter, Meter, Odometer, state_folder
from fairpate.run.run import finished_run
from fairpate.terminal import require_extra
from fairpate.types import UsageError
from teachers.ray_pool import start_ray


def public_pool(dataset: Dataset, settings: QueriesConfig, *, takes_posted: bool = True) -> PublicPool:
    """Every public record, each content once; the run's own queries come first, in the order they were asked.

    ``takes_posted``: whether the voters can vote on other records too.
    """
    public = choose_queries(dataset, settings.model_copy(update={"num_queries": None, "admission": None}))
    return PublicPool(
        features=public.x.numpy(),
        groups_N=public.z.numpy(),
        record_ids=public.record_id,
        group_names=dataset.group_names,
        label_names=dataset.label_names,
        takes_posted=takes_posted,
        form=form_of(dataset.feature_codes),
        place=_placed_by(dataset.embedding),
    )


def public_words(run: RunDirectory, config: VotingMethod, dataset: Dataset) -> Facts:
    """What the page says of the run, in public words."""
    declared = entry_for(config.data) if config.data.declaration is not None else REGISTRY.get(dataset.name)
    task = "" if declared is None else declared.task
    return Facts(
        run=run.root.name,
        method=config.title,
        data=dataset.name,
        task=task,
        attribute=dataset.sensitive_attribute,
        record=_record_words(dataset),
    )


def _record_words(dataset: Dataset) -> str:
    """Of records that are seen as coordinates: how many features each has. Empty where the pool shows the features."""
    if dataset.embedding is None:
        return ""
    (coordinates,) = dataset.public.x.shape[1:]
    features = " × ".join(map(str, dataset.embedding.record_shape))
    return f"{features} features, seen as {coordinates} coordinates of the public embedding"


def _placed_by(embedding: Embedding | None) -> Callable[[npt.NDArray[np.float32]], npt.NDArray[np.generic]]:
    """What every record went through; the same record has the same place, bit for bit."""
    if embedding is None:
        return lambda features: features
    return lambda features: embedding(torch.from_numpy(features)[None])[0].numpy()


_DAY_S = 86400.0


def service_settings(
    *,
    host: str,
    port: int,
    analyst_file: Path | None,
    operator_file: Path | None,
    daily_quota: float,
    rate: float = math.inf,
    tls: tuple[Path | None, Path | None] = (None, None),
    log_file: Path | None = None,
    traces: bool = False,
    oidc: Path | None = None,
) -> ServiceSettings:
    """Where to listen and for whom: tokens of files or the environment, beside the token store of each run.

    ``oidc``: a file that names an issuer whose tokens are good besides. TokenError for a bad token, ConfigError for a
    bad file, ValueError for files of TLS that do not go together, and for a package that is missing.
    """
    if traces:
        require_extra("traces", "--traces")
    tokens = read_tokens(os.environ, analyst_file=analyst_file, operator_file=operator_file)
    tokens = replace(tokens, oidc=_issuer(oidc))
    return ServiceSettings(
        host=host,
        port=port,
        tokens=tokens,
        quota=QuotaRule(max_queries=daily_quota, period_s=_DAY_S),
        # A bucket that holds less than one request would let none in, however long the caller waits.
        rate=RequestRate(per_s=rate, burst=max(1.0, 2 * rate)),
        tls=_tls_files(*tls),
        log_file=_writable(log_file),
        traces=traces,
    )


def _issuer(path: Path | None) -> OidcConfig | None:
    if path is None:
        return None
    require_extra("oidc", "--oidc")
    return parse_config(read_yaml(path), OidcConfig)


def _tls_files(cert: Path | None, key: Path | None) -> TlsFiles | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ValueError("--tls-cert and --tls-key: expected both, got one; give both, or let a proxy end TLS.")
    return TlsFiles(cert=cert.absolute(), key=key.absolute())


def _writable(log_file: Path | None) -> Path | None:
    if log_file is not None:
        try:
            log_file.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ValueError(f"--log-file: {log_file} cannot be written ({error}); give another file.") from error
        log_file = log_file.absolute()
    return log_file


_WATCH_INTERVAL_S = 5.0
_WATCH_TIMEOUT_S = 300.0

Started = Callable[[Sequence[Mapping[str, object]]], object]
"""Told which runs are served where, once they are."""
_LOOPBACK = "127.0.0.1"
SPENT = (
    "The budget was planned for the run's own queries: they are answered again, and new ones hardly find room. To "
    "leave room for new ones, run without a target and with aggregator.budget."
)


def open_backend(root: Path, config: VotingMethod, state: Path | None = None, take_over: bool = False) -> Backend:
    """Dataset, voters and ledger of the run in ``root``, ready to answer; runs in the aggregator's actor.

    ``state`` is the operator's folder, where the odometer lies; None: this process's own. ``take_over`` ends another
    writer of the ledger, where that can be; a process that Ray starts in the place of one that died does not, for a
    third may have taken over meanwhile.
    """
    run = RunDirectory(root=root)
    dataset = _queried(run, config)
    voters, plan = config.standing_voters(dataset, run), config.plan(dataset)
    terms, queries = ledger_terms(plan, dataset, ensemble=voters.ensemble), choose_queries(dataset, plan.settings)

    def open_books(*, take_over: bool = False) -> tuple[Ledger, AggregatorSession]:
        meter = Meter(run, Odometer(state), data=dataset.name, method=config.method)
        ledger_meter = LedgerMeter(meter, terms, unit=plan.unit, planned=plan.counted_beforehand)
        if take_over:
            note_action(run.actions, "take over")
        ledger = open_ledger(run, terms, queries, create=False, meter=ledger_meter, take_over=take_over)
        return ledger, AggregatorSession(ledger, source=plan.source)

    try:
        ledger, session = open_books(take_over=take_over and not is_restarted())
    except BaseException:
        voters.close()
        raise
    # Before the service can answer: a crash after an answer must not leave a claim that is too small.
    state_for_service(run, terms)
    public = public_pool(dataset, plan.settings, takes_posted=config.votes_on_anything)
    return Backend(
        ledger=ledger,
        session=session,
        pool=public,
        count_votes=voters.count_votes,
        reopen=open_books,
        voters_answer=voters.are_answering,
        try_vote=lambda: voters.try_vote(public.features[:1]),
        close=voters.close,
        last_backup=lambda: last_backup_s(run),
        facts=public_words(run, config, dataset),
    )


def _queried(run: RunDirectory, config: VotingMethod) -> Dataset:
    """What voters are asked about: the data set of the run, or what is in its file of votes."""
    if isinstance(config, OwnVotes):
        return read_votes_file(config.votes).dataset
    named = load_for(run, config.data)
    record_data(run, named, given_from_python=False)
    return config.queried(as_trained(run, config, named))


def serve_aggregators(
    roots: Sequence[Path],
    settings: ServiceSettings,
    *,
    data_dir: Path | None,
    detach: bool,
    say: Callable[[str], None],
    started: Started = list,
    take_over: bool = False,
) -> None:
    """Serve these runs until interrupted, or leave the services on the cluster at RAY_ADDRESS (``detach``).

    Several runs stand behind one address, each under ``/v1/runs/NAME/``. ``data_dir`` is where the data set's files are
    now, if not where the runs found them. ``take_over``: from a service elsewhere whose process hangs, or whose node is
    lost; of a ledger in a database alone. ServiceError, LedgerError or RunDirectoryError where one cannot start or ends
    for good.
    """
    for root in roots:
        check_exposure(_with_tokens_of(RunDirectory(root=root.absolute()), settings))
    runs = _runs_by_name(roots)
    if take_over and all(place_of(run).is_in_folder for run, _ in runs.values()):
        raise UsageError(
            "--take-over: needs a ledger in a database, and here each is in its run's folder; leave it out."
        )
    if data_dir is not None and all(isinstance(config, OwnVotes) for _, config in runs.values()):
        raise UsageError("--data-dir: not read, for the records are in the file of votes; leave it out.")
    alone = len(runs) == 1
    with _ray(next(iter(runs.values()))[1].ray, detach=detach), ExitStack() as held:
        # Behind a gateway each service is on this node's loopback, and so is the gateway.
        behind = {
            name: _with_tokens_of(run, settings) if alone else _behind_gateway(run, settings, held)
            for name, (run, _) in runs.items()
        }
        services = _started_services(runs, behind, settings, data_dir=data_dir, detach=detach, take_over=take_over)
        urls = {name: settings.url if alone else f"{settings.url}{PREFIX}{name}" for name in runs}
        for name, (run, config) in runs.items():
            _announce(run, config, urls[name], say)
        started([{"run": run.root, "url": urls[name], "detached": detach} for name, (run, _) in runs.items()])
        if detach:
            say(f"It stays on the cluster; end it with `fairpate serve {shlex.join(map(str, roots))} --stop`.")
            return
        _watch(services)


def _started_services(
    runs: Mapping[str, tuple[RunDirectory, VotingMethod]],
    behind: Mapping[str, ServiceSettings],
    settings: ServiceSettings,
    *,
    data_dir: Path | None,
    detach: bool,
    take_over: bool,
) -> list[Service]:
    """The service of each run, as ``behind`` says where, and the gateway of several; all of them or none."""
    services: list[Service] = []
    alone, start = len(runs) == 1, partial(start_service, detached=detach)
    try:
        for name, (run, config) in runs.items():
            arguments = (run.root.absolute(), _with_absolute_places(config, data_dir), state_folder(), take_over)
            # A ledger in files belongs to this node's disk, where Ray must start its service again.
            here = not alone or (detach and place_of(run).is_in_folder)
            where = _this_node() if here else None
            services.append(start(service_name(run), open_backend, arguments, behind[name], resources=where))
        if not alone:
            ports = Runs(ports={name: place.port for name, place in behind.items()})
            # It reads no token, and is open to those alone who have one of a run.
            front = replace(settings, tokens=next(iter(behind.values())).tokens)
            services.append(start(gateway_name(runs), _opened, (ports,), front, resources=_this_node()))
    except BaseException:
        for service in services:
            service.stop()
        raise
    return services


def _runs_by_name(roots: Sequence[Path]) -> dict[str, tuple[RunDirectory, VotingMethod]]:
    """RunFolderError besides where two have one name, under which they would be reached."""
    found: dict[str, tuple[RunDirectory, VotingMethod]] = {}
    for root in roots:
        run, config = _run_with_votes(root)
        if not isinstance(config, OwnVotes):
            require_data_by_name(run)
        name = run.root.absolute().name
        if name in found:
            raise RunFolderError(f"{root}: another run given is called {name} too; rename one of the folders.")
        found[name] = (run, config)
    return found


def _opened(runs: Runs) -> Runs:
    """Nothing is to be opened for a gateway."""
    return runs


def _announce(run: RunDirectory, config: VotingMethod, url: str, say: Callable[[str], None]) -> None:
    say(f"{run.root} is served at {url} (documentation: {url}/docs)")
    write = f"fairpate report {shlex.quote(str(run.root))}"
    say(f"Its answers enter {run.statement} with `{write}`: give it before you publish.")
    if not config.leaves_room:
        say(SPENT)


def serve_student_of(
    root: Path,
    settings: ServiceSettings,
    *,
    num_replicas: int | None,
    say: Callable[[str], None],
    started: Started = list,
) -> None:
    """Serve the run's published student until interrupted, at the host and port of ``settings``; no other is read.

    ``num_replicas`` copies on Ray Serve; None: one in this process, under the limits of ``settings`` on connections.
    MissingExtraError if Ray Serve cannot be imported.
    """
    run, config = finished_run(root)
    if not config.is_private:
        raise RunFolderError(
            f"{root}: a run of {config.method}, which has no privacy: its model may not be published; give another run."
        )
    ray = config.ray if isinstance(config, VotingMethod) else RayConfig()
    with (
        _student_here(run, settings) if num_replicas is None else _student_on_ray(run, settings, ray, num_replicas)
    ) as is_serving:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(f"The student of {run.root} is served at {settings.url} (documentation: /docs)")
        say("It takes no token: everybody who reaches this address may ask it.")
        started([{"run": run.root, "url": settings.url, "detached": False}])
        with suppress(KeyboardInterrupt):
            while is_serving():
                time.sleep(_WATCH_INTERVAL_S)
            raise ServiceError(f"{settings.url}: the HTTP server ended by itself. Serve the run again.")


@dataclass(frozen=True)
class _StudentApp:
    """The published student in ``path`` as what :class:`HttpServer` serves."""

    path: Path

    def app(self, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:  # noqa: ARG002 - open, and not traced
        from student.server import student_in_one_process

        return student_in_one_process(self.path)


@contextmanager
def _student_here(run: RunDirectory, settings: ServiceSettings) -> Iterator[Callable[[], bool]]:
    """The student behind uvicorn in this process; yields whether it is serving."""
    server = HttpServer(_StudentApp(run.student), settings)
    try:
        yield lambda: server.is_alive
    finally:
        server.stop()


@contextmanager
def _student_on_ray(
    run: RunDirectory, settings: ServiceSettings, config: RayConfig, num_replicas: int
) -> Iterator[Callable[[], bool]]:
    """Copies of the student on Ray Serve, which starts an ended one again; yields that it is serving."""
    require_extra("serve", "--replicas")
    from student.server import serve_student, stop_student

    with _ray(config, detach=False):
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


def stop_aggregators(roots: Sequence[Path], *, say: Callable[[str], None]) -> None:
    """End the services that ``serve_aggregators(detach=True)`` left on the cluster."""
    runs = _runs_by_name(roots)
    with _ray(next(iter(runs.values()))[1].ray, detach=True):
        for root, (run, _) in zip(roots, runs.values(), strict=True):
            if not _stop(service_name(run)):
                raise ServiceError(f"{root}: is not served on this cluster; nothing to stop.")
            say(f"{root} is served no more.")
        if len(runs) > 1:
            _stop(gateway_name(runs))


def _stop(name: str) -> bool:
    actor = find_service(name)
    if actor is not None:
        Service(actor=actor, name=name, url="").stop()
    return actor is not None


def service_name(run: RunDirectory) -> str:
    """One name per ledger: a second service for the same run is refused."""
    return f"aggregator-{hashlib.sha256(str(run.ledger.resolve()).encode()).hexdigest()[:12]}"


def gateway_name(runs: Mapping[str, tuple[RunDirectory, VotingMethod]]) -> str:
    """One name for these runs together."""
    names = " ".join(sorted(service_name(run) for run, _ in runs.values()))
    return f"gateway-{hashlib.sha256(names.encode()).hexdigest()[:12]}"


def _behind_gateway(run: RunDirectory, settings: ServiceSettings, held: ExitStack) -> ServiceSettings:
    """The same on a free port of loopback, where no TLS is needed, and with the token store of the run."""
    place = held.enter_context(socket.socket())
    # Bound, and not listened on, until the service listens: the system gives the port to nobody who asks for any, and
    # to the service, which asks for this one. Teachers take their time, and Ray takes many ports meanwhile.
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((_LOOPBACK, 0))
    return replace(_with_tokens_of(run, settings), host=_LOOPBACK, port=place.getsockname()[1], tls=None)


def _with_tokens_of(run: RunDirectory, settings: ServiceSettings) -> ServiceSettings:
    return replace(settings, tokens=replace(settings.tokens, store=run.tokens))


def _run_with_votes(root: Path) -> tuple[RunDirectory, VotingMethod]:
    """RunFolderError for a run of a method that asks no teachers, or keeps none."""
    run, config = open_run_directory(root)
    if isinstance(config, OwnVotes) and not config.votes.features:
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


def _with_absolute_places(config: VotingMethod, data_dir: Path | None) -> VotingMethod:
    """The configuration for a process with another working directory and environment."""
    found = data_dir or config.data.data_dir
    if found is None and config.data.declaration is None:
        found = os.environ.get("FAIRPATE_DATA")  # type: ignore[assignment]
    data = config.data.model_copy(update={"data_dir": None if found is None else Path(found).absolute()})
    return config.model_copy(update={"data": data})


def _watch(services: Sequence[Service]) -> None:
    """Until Ctrl-C or SIGTERM; a restart is waited out, an end for good is an error."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            ended = [service for service in services if not service.is_serving(timeout_s=_WATCH_TIMEOUT_S)]
            if ended:
                break
            time.sleep(_WATCH_INTERVAL_S)
        raise ServiceError(f"{ended[0].url}: the HTTP server ended by itself; its log says why. Serve the run again.")
    except KeyboardInterrupt:
        return
    finally:
        for service in services:
            service.stop()


def _this_node() -> dict[str, float]:
    """Ray's own resource of this node's address: after a crash the actor waits for the node that has the ledger."""
    import ray

    # Of the 1 that a node has: so little that many services fit, and none waits for another.
    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


@contextmanager
def _ray(config: RayConfig, *, detach: bool) -> Iterator[None]:
    """Ray for a service; one that stays needs a cluster that stays."""
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ServiceError("--detach and --stop need a cluster that stays; set RAY_ADDRESS, or leave them out.")
    with start_ray(config):
        yield
