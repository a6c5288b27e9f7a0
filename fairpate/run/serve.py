"""Operate a finished run: serve its aggregator or its published student over HTTP.

The service writes the run's own ledger, so the queries of `fairpate run` are answered again for free. Votes that the
run collected are read from its table; teachers vote anew on other records, such as those in requests.
"""

import hashlib
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI

from aggregator import ledger_audit
from aggregator.ledger import Ledger, LedgerState, Offsets, read_ledger
from aggregator.service.actor import (
    Backend,
    ServiceSettings,
    check_exposure,
    find_service,
    is_restarted,
    start_service,
)
from aggregator.service.api import Facts, bodies_for
from aggregator.service.auth import LiveTokens
from aggregator.session import AggregatorSession, PublicPool, Question
from aggregator.store import is_database
from fairpate.config import QueriesConfig, RayConfig, WeightsConfig
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.columns import feature_codes
from fairpate.data.declaration import read_declaration
from fairpate.data.pictures import is_square_picture, picture_in
from fairpate.data.registry import declaration_path
from fairpate.data.tables import RecordForm, form_of
from fairpate.encoders import Encoder
from fairpate.http_server import HttpServer, ServiceError
from fairpate.methods import voting
from fairpate.methods.noisy_counts import ServiceRule
from fairpate.methods.voting import VotingMethod
from fairpate.pages import delta_caution
from fairpate.releases.directory import RunDirectory, RunFolderError, read_statement, require_data_by_name
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import Odometer, state_folder
from fairpate.releases.run_ledger import LedgerMeter, open_ledger, place_of, require_released, state_for_service
from fairpate.run.folder import as_trained, finished_run, load_for, open_run_directory, record_data
from fairpate.run.ledgers import last_backup_s
from fairpate.terminal import Output, require_extra, say, show
from fairpate.types import UsageError


def public_pool(dataset: Dataset, *, takes_posted: bool = True, weights: WeightsConfig | None = None) -> PublicPool:
    """Return the public records of a run from which callers of its service choose queries. Records with equal content
    are listed once; the run's own queries come first, in order.

    ``takes_posted``: whether the voters can also vote on records that a caller sends in a request; if records are
    pictures, or vectors of an encoder with its file of ``weights``, as pictures too.
    """
    # Without a number of queries and an admission rule, so that every record is offered, not the run's selection.
    public = voting.choose_queries(dataset, QueriesConfig())
    embedding = dataset.embedding

    def place(features: npt.NDArray[np.float32]) -> npt.NDArray[np.generic]:
        if embedding is None:
            return features
        import torch

        # As every record was embedded: the same record gets the same coordinates, bit for bit.
        return embedding(torch.from_numpy(features)[None])[0].numpy()

    picture, encoder = None, None
    shape = tuple(dataset.public.x.shape[1:]) if embedding is None else embedding.record_shape
    if dataset.encoder is not None:
        encoder = Encoder.of(dataset.encoder, None if weights is None else weights.path)
        shape = encoder.public.picture_shape
    if takes_posted and is_square_picture(shape):
        import torch

        def picture(content: bytes) -> npt.NDArray[np.generic]:
            # As the pool's were read: a public picture that is posted is the query that is in the pool.
            x: Any = picture_in(content, shape)
            return place(x if encoder is None else encoder(torch.from_numpy(x.copy())[None])[0].numpy())

    return PublicPool(
        features=public.x.numpy(),
        groups_N=public.z.numpy(),
        record_ids=public.record_id,
        group_names=dataset.group_names,
        label_names=dataset.label_names,
        takes_posted=takes_posted,
        form=form_of(dataset.feature_codes),
        place=place,
        picture=picture,
    )


def public_words(run: RunDirectory, config: VotingMethod, dataset: Dataset) -> Facts:
    """Return the public facts about the run (method, data set, task, attribute) that the page of its service
    displays."""
    declared = entry_for(config.data) if config.data.declaration is not None else REGISTRY.get(dataset.name)
    record = ""  # without an embedding, the pool shows the features
    if dataset.embedding is not None:
        (coordinates,) = dataset.public.x.shape[1:]
        features = " × ".join(map(str, dataset.embedding.record_shape))
        record = f"{features} features, seen as {coordinates} coordinates of the public embedding"
    task, attribute = "" if declared is None else declared.task, dataset.sensitive_attribute
    return Facts(
        run=run.root.name, method=config.title, data=dataset.name, task=task, attribute=attribute, record=record
    )


# Each check is a call of the actor; Ctrl-C interrupts the pause between two.
_WATCH_INTERVAL_S = 5.0
# A restart verifies the ledger and starts the voters again before the service answers.
_WATCH_TIMEOUT_S = 300.0

SPENT = (
    "The budget was planned for the run's own queries: they are answered again, and new ones hardly find room. To "
    "leave room for new ones, run with --keep 30%, or without a target and with aggregator.budget."
)


TOOK_OVER = (
    "A service that wrote this ledger before cannot write it any more: it still gives stored replies, answers new "
    "queries with 503, and does not come back by itself. End it. To go back to it, stop this service and start the "
    "earlier one again."
)


def open_backend(root: Path, config: VotingMethod, state: Path | None = None, take_over: bool = False) -> Backend:
    """Open data set, voters and ledger of the run in ``root``, and return the backend that answers the queries of its
    service. Called in the service's Ray actor.

    ``state``: the operator's folder with the odometer; None: the folder of this process. ``take_over``: stop another
    process that writes the ledger, which only a ledger in a database allows. It is stopped last, after records, voters
    and ledger were read and checked: an error before leaves it as it was.
    """
    run = RunDirectory(root=root)
    own = config.own_dataset()
    if own is None:
        named = load_for(run, config.data)
        record_data(run, named, given_from_python=False)
        own = as_trained(run, config, named)
    plan = config.plan(own)
    dataset, rule = plan.dataset, config.service_rule(plan.dataset, run)
    voters = config.standing_voters(dataset, run)
    terms = plan.terms(voters.ensemble)

    place = place_of(run).ledger

    def new_meter() -> LedgerMeter:
        log = ReleaseLog(
            run, Odometer(state or state_folder()), data=dataset.name, method=config.method, part=dataset.part
        )
        return LedgerMeter(log, terms, unit=plan.unit, planned=plan.counted_beforehand)

    def open_books(*, take_over: bool = False) -> tuple[Ledger, AggregatorSession]:
        # Never made here: a run whose ledger was deleted must not begin to count from zero.
        ledger = open_ledger(run, terms, plan.queries, create=False, meter=new_meter(), take_over=take_over)
        try:
            # Before the first query of a caller; from then on they are terms of the ledger.
            if (offsets := offsets_for(ledger, rule)) is not None:
                ledger.fix_offsets(offsets)
            return ledger, AggregatorSession(ledger, source=config.source, with_offsets=True)
        except BaseException:
            ledger.close()
            raise

    def public_labels(questions: Sequence[Question]) -> Sequence[int | None]:
        # A ledger whose first callers asked a session from Python, which has no offsets, goes on without them.
        if rule is None or session.offsets is None or not questions:
            return [None] * len(questions)
        import torch

        # The session that was opened first: opened again, a ledger has the same offsets.
        x = torch.from_numpy(np.stack([question.features for question in questions]))
        return rule.labels(x, session.offsets.votes)

    try:
        public = public_pool(dataset, takes_posted=config.votes_on_anything, weights=config.data.weights)
        facts = public_words(run, config, dataset)

        def try_vote() -> None:
            # Not released, so that it is free and needs no name.
            voters.ask(public.features[:1], ["no query"])

        # An actor that Ray restarts takes nothing over, because a third writer may have done so meanwhile.
        takes_over = take_over and not is_restarted()
        if takes_over:
            # Before the other process is stopped, which does not come back by itself: all that may fail here.
            found = read_ledger(place, place_of(run).anchor)
            found.require_terms(terms)
            require_released(run, plan.queries, found)
            offsets_for(found, rule)
            new_meter().check(found)
            bodies_for(public)
            try_vote()
            state_for_service(run, terms)
            ledger_audit.note_action(run.actions, "take over")
        ledger, session = open_books(take_over=takes_over)
    except BaseException:
        # Their actors would outlive a service that never started.
        voters.close()
        raise
    # Before the service can answer: a crash after an answer must not leave a claim that is too small.
    state_for_service(run, terms)
    return Backend(
        ledger=ledger,
        session=session,
        pool=public,
        count_votes=voters.count_votes,
        # Without `take_over`: a service that was taken over must not take its successor over by itself.
        reopen=open_books,
        voters_answer=voters.are_answering,
        try_vote=try_vote,
        close=voters.close,
        last_backup=lambda: last_backup_s(run),
        facts=facts,
        public_labels=public_labels,
    )


def offsets_for(ledger: LedgerState, rule: ServiceRule | None) -> Offsets | None:
    """Return the offsets with which a service answers from ``ledger``: those of the ledger if it has some, otherwise
    those of ``rule``. None without a rule, and for a ledger that callers have queried without offsets.

    LedgerError if the ledger's offsets were computed from other releases than those of ``rule``.
    """
    if rule is None or (ledger.offsets is None and ledger.has_callers):
        return ledger.offsets
    # Computed again on another machine, an offset may round to the next vote: those of the ledger hold.
    if ledger.offsets is not None and ledger.offsets.released == rule.released:
        return ledger.offsets
    offsets = Offsets(votes=rule.offsets, released=rule.released)
    ledger.require_offsets(offsets)
    return offsets


def serve_aggregator(
    root: Path, settings: ServiceSettings, *, data_dir: Path | None, detach: bool, take_over: bool = False
) -> None:
    """Serve the run's aggregator, which answers queries by noisy votes, until interrupted. With ``detach``, leave the
    service running on the cluster at RAY_ADDRESS, and return.

    ``data_dir``: the folder of the data set's files, if they were moved since the run. ``take_over``, for a ledger in a
    database only: stop a service elsewhere whose process hangs or whose node is lost. ServiceError, LedgerError or
    RunDirectoryError if the service cannot start or stops for good.
    """
    # Before the check: the run's token store, too, lets a service listen beyond this machine.
    settings = replace(settings, tokens=replace(settings.tokens, store=RunDirectory(root=root.absolute()).tokens))
    check_exposure(settings)
    run, config = _run_with_votes(root)
    if not config.brings_data:
        require_data_by_name(run)
    is_file = not is_database(place_of(run).ledger)
    if take_over and is_file:
        raise UsageError(
            "--take-over: works for a ledger in a database, but this ledger is a file in the run's folder; leave the "
            "option out."
        )
    if data_dir is not None and config.brings_data:
        raise UsageError("--data-dir: not read, because the records are in the file of votes; leave the option out.")
    # Resolved here: the actor may have another working directory and environment.
    found = data_dir or config.data.data_dir
    if found is None and config.data.declaration is None:
        found = Path(os.environ["FAIRPATE_DATA"]) if os.environ.get("FAIRPATE_DATA") else None
    data = config.data.model_copy(update={"data_dir": None if found is None else found.absolute()})
    with _ray(config.ray, detach=detach):
        resources = None
        if detach and is_file:
            import ray

            # A ledger in files is on this node's disk, where Ray must start its service again. A node has 1 of this
            # resource; 0.001 leaves room for many services.
            resources = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        arguments = (run.root.absolute(), config.model_copy(update={"data": data}), state_folder(), take_over)
        name = service_name(run)
        service = start_service(name, open_backend, arguments, settings, detached=detach, resources=resources)
        say(f"{run.root} is served at {settings.url} (documentation: {settings.url}/docs)")
        if take_over:
            say(TOOK_OVER)
        write = f"fairpate report {shlex.quote(str(run.root))}"
        say(f"Its answers enter {run.statement} with `{write}`: give it before you publish.")
        if not config.leaves_room:
            say(SPENT)
        stated = read_statement(run) if run.statement.exists() else None
        if stated and (caution := delta_caution(stated.delta, stated.declared_units, stated.unit)):
            say(caution)
        # For a program; a person has seen these facts already.
        show(Output(facts={"served": [{"run": run.root, "url": settings.url, "detached": detach}]}, words=""))
        if detach:
            say(f"It stays on the cluster; end it with `fairpate serve {shlex.quote(str(root))} --stop`.")
            return
        try:
            # Waits while it restarts.
            _watch(settings.url, partial(service.is_serving, timeout_s=_WATCH_TIMEOUT_S))
        finally:
            # After an error too: a service that does not answer may still hold the ledger.
            service.stop()


def _watch(url: str, is_serving: Callable[[], bool]) -> None:
    """Wait until Ctrl-C or SIGTERM. ServiceError if the HTTP server at ``url`` stops by itself before, which
    ``is_serving`` shows."""
    # SIGTERM as Ctrl-C, so that the server is stopped in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while is_serving():
            time.sleep(_WATCH_INTERVAL_S)
        raise ServiceError(f"{url}: the HTTP server stopped by itself; see its log for the cause, and serve again.")


def serve_student_of(root: Path, settings: ServiceSettings, *, num_replicas: int | None) -> None:
    """Serve predictions of the run's published student over HTTP until interrupted.

    ``num_replicas`` copies run on Ray Serve, which reads only host and port of ``settings``; None runs one copy in this
    process, with tokens, rate, TLS, log and traces. MissingExtraError if Ray Serve cannot be imported, UsageError for a
    setting that Ray Serve would ignore.
    """
    run, config = finished_run(root)
    if not config.is_private:
        raise RunFolderError(
            f"{root}: this run of {config.method} has no privacy guarantee, so its model may not be published; give "
            "another run."
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
                f"--replicas: Ray Serve would ignore {name}; leave that out and put a proxy in front, or leave "
                "--replicas out to serve one copy."
            )
    http: HttpServer | None = None
    with ExitStack() as stack:
        if num_replicas is None:
            # The form for records of a table, by its declaration alone; none for pictures, and if it is gone.
            data, form = config.data, None
            path = declaration_path(data)
            if path.exists() and not (table := read_declaration(path)).pictures:
                form = form_of(feature_codes(table.visible(entry_for(data).complete_options(data.options))))
            http = HttpServer(partial(student_app, run.student, form), settings)
            stack.callback(http.stop)
        else:
            require_extra("serve", "--replicas")
            from student.server import student_served

            ray = config.service_ray
            stack.enter_context(_ray(ray, detach=False))
            # The replicas share what one actor of the run reserved.
            cpus = ray.num_cpus / num_replicas
            served = student_served(
                run.student, host=settings.host, port=settings.port, num_replicas=num_replicas, cpus_per_replica=cpus
            )
            stack.enter_context(served)
        say(f"The student of {run.root} is served at {settings.url} (documentation: /docs)")
        open_to_all = "It needs no token: any client that reaches this address may query it."
        say(open_to_all if settings.tokens.is_empty else "It needs a token, of either role.")
        show(Output(facts={"served": [{"run": run.root, "url": settings.url, "detached": False}]}, words=""))
        _watch(settings.url, lambda: http is None or http.is_alive())  # Ray Serve restarts failed copies


def student_app(path: Path, form: RecordForm | None, settings: ServiceSettings, *, tracer: Any = None) -> FastAPI:
    """Return the web application that serves the published student in the file ``path``, for :class:`HttpServer`.
    With ``form``, requests may give a record as values by column."""
    from student.server import student_in_one_process

    tokens = None if settings.tokens.is_empty else LiveTokens(settings.tokens)
    return student_in_one_process(path, form=form, tokens=tokens, rate=settings.rate, tracer=tracer)


def stop_aggregator(root: Path) -> None:
    """Stop the service of the run in ``root`` that ``serve_aggregator(detach=True)`` left running on the cluster."""
    run, config = _run_with_votes(root)
    with _ray(config.ray, detach=True):
        service = find_service(service_name(run))
        if service is None:
            raise ServiceError(
                f"{root}: this run is not served on the cluster, so there is nothing to stop; check that RAY_ADDRESS "
                "names the right cluster."
            )
        service.stop()
        say(f"{root} is served no more.")


def service_name(run: RunDirectory) -> str:
    """Return the name of the Ray actor that serves the run's ledger. The name depends on the ledger alone, so that a
    second service for the same ledger is refused."""
    # Resolved: a link and the folder that it leads to are one ledger.
    return f"aggregator-{hashlib.sha256(str(run.ledger.resolve()).encode()).hexdigest()[:12]}"


def _run_with_votes(root: Path) -> tuple[RunDirectory, VotingMethod]:
    """Return the run in ``root`` and its configuration. RunFolderError if the run has no voters to query, because its
    method has no teachers or they were not stored."""
    run, config = open_run_directory(root)
    if not config.publishes_model:
        # Without features no student was trained, and the votes are in their file.
        run.require_finished(with_ledger=True, with_votes=False, with_student=False)
    else:
        run, config = finished_run(root)
    # From here on the run is one of voters: its service asks for their plan and rule.
    if not isinstance(config, VotingMethod):
        remedy = "serve its model with --student" if config.is_private else "give a run of a method that has some"
        raise RunFolderError(f"{root}: this is a run of {config.method}, which has no teachers to ask; {remedy}.")
    if not config.keeps_teachers:
        raise RunFolderError(
            f"{root}: this is a run of {config.method} whose {config.lost_voters}, so no query can be answered; serve "
            "its model with --student."
        )
    return run, config


@contextmanager
def _ray(config: RayConfig, *, detach: bool) -> Iterator[None]:
    """Context manager: start Ray for a service. With ``detach``, ServiceError unless RAY_ADDRESS names a running
    cluster, on which the service remains after this process ends."""
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ServiceError(
            "--detach and --stop: need a running Ray cluster; set RAY_ADDRESS to its address, or leave the option out."
        )
    from teachers.ray_pool import start_ray

    with start_ray(config):
        yield
