"""Serving a finished run: its aggregator over HTTP, with teachers that stay, or its published student.

The run's own ledger goes on, under the terms it was made with, so that what `fairpate run` asked is answered again for
free. Votes the run already collected are read from its table; other records, posted ones included, go to the teachers.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aggregator.about import Facts
from aggregator.actor import Service, ServiceError, check_exposure, find_service, start_service
from aggregator.api import Backend, ServiceSettings, TlsFiles, url_host
from aggregator.ledger import Ledger
from aggregator.own_limits import QuotaRule
from aggregator.questions import PublicPool
from aggregator.rates import RequestRate
from aggregator.session import AggregatorSession
from aggregator.tokens import read_tokens
from fairpate.app.meter import LedgerMeter, Meter
from fairpate.app.odometer import Odometer, state_folder
from fairpate.app.release import choose_queries, ledger_terms, open_ledger, state_for_service
from fairpate.app.run import finished_run
from fairpate.app.rundir import RunDirectory, RunFolderError
from fairpate.app.trained_on import load_for, record_data, require_data_by_name
from fairpate.config import QueriesConfig, RayConfig
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.declared.form import form_of
from fairpate.methods.pate import VotingMethod
from teachers.cluster import start_ray

_WATCH_INTERVAL_S = 5.0
_WATCH_TIMEOUT_S = 300.0
_DAY_S = 86400.0
SPENT = (
    "The budget was planned for the run's own queries: they are answered again, and new ones hardly find room. To "
    "leave room for new ones, run without a target and with aggregator.budget."
)


def open_backend(root: Path, config: VotingMethod, state: Path | None = None) -> Backend:
    """Dataset, voters and ledger of the run in ``root``, ready to answer; runs in the aggregator's actor.

    ``state`` is the operator's folder, where the odometer lies; None: this process's own.
    """
    run = RunDirectory(root=root)
    named = load_for(run, config.data)
    record_data(run, named, given_from_python=False)
    dataset = config.queried(named)
    voters, plan = config.standing_voters(dataset, run), config.plan(dataset)
    terms, queries = ledger_terms(plan, dataset, ensemble=voters.ensemble), choose_queries(dataset, plan.settings)

    def open_books() -> tuple[Ledger, AggregatorSession]:
        meter = Meter(run, Odometer(state), data=dataset.name, method=config.method)
        ledger_meter = LedgerMeter(meter, terms, unit=plan.unit, planned=plan.counted_beforehand)
        ledger = open_ledger(run, terms, queries, create=False, meter=ledger_meter)
        return ledger, AggregatorSession(ledger, source=plan.source)

    try:
        ledger, session = open_books()
    except BaseException:
        voters.close()
        raise
    state_for_service(run, terms)
    public = public_pool(dataset, plan.settings)
    return Backend(
        ledger=ledger,
        session=session,
        pool=public,
        count_votes=voters.count_votes,
        reopen=open_books,
        voters_answer=voters.are_answering,
        try_vote=lambda: voters.try_vote(public.features[:1]),
        close=voters.close,
        facts=_facts(run, config, dataset),
    )


def _facts(run: RunDirectory, config: VotingMethod, dataset: Dataset) -> Facts:
    """What the page says of the run, in public words."""
    declared = entry_for(config.data) if config.data.declaration is not None else REGISTRY.get(dataset.name)
    task = "" if declared is None else declared.task
    return Facts(
        run=run.root.name, method=config.title, data=dataset.name, task=task, attribute=dataset.sensitive_attribute
    )


def public_pool(dataset: Dataset, settings: QueriesConfig) -> PublicPool:
    """Every public record, each content once; the run's own queries come first, in the order they were asked."""
    public = choose_queries(dataset, settings.model_copy(update={"num_queries": None, "admission": None}))
    return PublicPool(
        features=public.x.numpy(),
        groups_N=public.z.numpy(),
        record_ids=public.record_id,
        group_names=dataset.group_names,
        label_names=dataset.label_names,
        form=None if dataset.embedding is not None else form_of(dataset.feature_codes),
    )


def serve_aggregator(
    root: Path, settings: ServiceSettings, *, data_dir: Path | None, detach: bool, say: Callable[[str], None]
) -> None:
    """Serve the run in ``root`` until interrupted, or leave the service on the cluster at RAY_ADDRESS (``detach``).

    ``data_dir`` is where the data set's files are now, if not where the run found them.
    ServiceError, LedgerError or RunDirectoryError where it cannot start or ends for good.
    """
    check_exposure(settings)
    run, config = _run_with_votes(root)
    require_data_by_name(run)
    with _ray(config.ray, detach=detach):
        service = start_service(
            service_name(run),
            open_backend,
            (run.root.absolute(), _with_absolute_places(config, data_dir), state_folder()),
            settings,
            detached=detach,
            resources=_this_node() if detach else None,
        )
        say(f"{run.root} is served at {service.url} (documentation: {service.url}/docs)")
        say(f"Its answers enter {run.statement} with `fairpate report {root}`: give it before you publish.")
        if not config.leaves_room:
            say(SPENT)
        if detach:
            say(f"It stays on the cluster; end it with `fairpate serve {root} --stop`.")
            return
        _watch(service)


def settings(
    root: Path | None = None,
    *,
    host: str,
    port: int,
    analyst_file: Path | None,
    operator_file: Path | None,
    daily_quota: float,
    rate: float = math.inf,
    tls: tuple[Path | None, Path | None] = (None, None),
    json_logs: bool = False,
    traces: bool = False,
) -> ServiceSettings:
    """Where to listen and for whom: tokens of files or the environment, and the token store of the run in ``root``.

    TokenError for a bad one, ValueError for files of TLS that do not go together, and for traces without their package.
    """
    store = None if root is None else RunDirectory(root=root.absolute()).tokens
    tokens = read_tokens(os.environ, analyst_file=analyst_file, operator_file=operator_file, store=store)
    return ServiceSettings(
        host=host,
        port=port,
        tokens=tokens,
        quota=QuotaRule(max_queries=daily_quota, period_s=_DAY_S),
        rate=RequestRate(per_s=rate, burst=max(1.0, 2 * rate)),
        tls=_tls_files(*tls),
        logs="json" if json_logs else "plain",
        traces=_can_trace(traces),
    )


def _tls_files(cert: Path | None, key: Path | None) -> TlsFiles | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ValueError("--tls-cert and --tls-key: expected both, got one; give both, or let a proxy end TLS.")
    return TlsFiles(cert=cert.absolute(), key=key.absolute())


def _can_trace(traces: bool) -> bool:
    if traces:
        try:
            importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError as error:
            raise ValueError(
                f"--traces: OpenTelemetry is not installed ({error}); run `pip install 'fairpate[traces]'`."
            ) from error
    return traces


def serve_student_of(root: Path, *, host: str, port: int, num_replicas: int, say: Callable[[str], None]) -> None:
    """Serve the run's published student on Ray Serve until interrupted. ServiceError if Ray Serve is not installed."""
    run, config = finished_run(root)
    if not config.is_private:
        raise RunFolderError(
            f"{root}: a run of {config.method}, which has no privacy: its model may not be published; give another run."
        )
    try:
        from student.replicas import serve_student, stop_student
    except ImportError as error:
        raise ServiceError(f"Ray Serve is not installed ({error}); run `pip install 'fairpate[serve]'`.") from error
    ray = config.ray if isinstance(config, VotingMethod) else RayConfig()
    with _ray(ray, detach=False):
        cpus = ray.num_cpus / num_replicas
        serve_student(run.student, host=host, port=port, num_replicas=num_replicas, cpus_per_replica=cpus)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        say(f"The student of {run.root} is served at http://{url_host(host)}:{port} (documentation: /docs)")
        try:
            while True:
                time.sleep(_WATCH_INTERVAL_S)
        except KeyboardInterrupt:
            stop_student()


def stop_aggregator(root: Path, *, say: Callable[[str], None]) -> None:
    """End the service that ``serve_aggregator(detach=True)`` left on the cluster."""
    run, config = _run_with_votes(root)
    with _ray(config.ray, detach=True):
        name = service_name(run)
        actor = find_service(name)
        if actor is None:
            raise ServiceError(f"{root}: is not served on this cluster; nothing to stop.")
        Service(actor=actor, name=name, url="").stop()
    say(f"{root} is served no more.")


def service_name(run: RunDirectory) -> str:
    """One name per ledger: a second service for the same run is refused."""
    return f"aggregator-{hashlib.sha256(str(run.ledger.resolve()).encode()).hexdigest()[:12]}"


def _run_with_votes(root: Path) -> tuple[RunDirectory, VotingMethod]:
    """RunFolderError for a run of a method that asks no teachers, or keeps none."""
    run, config = finished_run(root)
    if not isinstance(config, VotingMethod):
        remedy = "serve its model with --student" if config.is_private else "give a run of a method that has some"
        raise RunFolderError(f"{root}: a run of {config.method}, which has no teachers to ask; {remedy}.")
    if not config.keeps_teachers:
        raise RunFolderError(
            f"{root}: a run of {config.method} whose teachers were not kept, so none can be asked; serve its model "
            "with --student."
        )
    return run, config


def _with_absolute_places(config: VotingMethod, data_dir: Path | None) -> VotingMethod:
    """The configuration for a process with another working directory and environment."""
    found = data_dir or config.data.data_dir
    if found is None and config.data.declaration is None:
        found = os.environ.get("FAIRPATE_DATA")  # type: ignore[assignment]
    data = config.data.model_copy(update={"data_dir": None if found is None else Path(found).absolute()})
    return config.model_copy(update={"data": data})


def _watch(service: Service) -> None:
    """Until Ctrl-C or SIGTERM; a restart is waited out, an end for good is an error."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while service.is_serving(timeout_s=_WATCH_TIMEOUT_S):
            time.sleep(_WATCH_INTERVAL_S)
        raise ServiceError(f"{service.url}: the HTTP server ended by itself; its log says why. Serve the run again.")
    except KeyboardInterrupt:
        return
    finally:
        service.stop()


def _this_node() -> dict[str, float]:
    """Ray's own resource of this node's address: after a crash the actor waits for the node that has the ledger."""
    import ray

    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


@contextmanager
def _ray(config: RayConfig, *, detach: bool) -> Iterator[None]:
    """Ray for a service; one that stays needs a cluster that stays."""
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ServiceError("--detach and --stop need a cluster that stays; set RAY_ADDRESS, or leave them out.")
    with start_ray(config):
        yield
