"""Operate a finished run: serve its aggregator or its published student over HTTP; manage its ledger and tokens.

The service writes the run's own ledger, so the queries of `fairpate run` are answered again for free. Votes that the
run collected are read from its table; teachers vote anew on other records, such as those in requests.

A backup of a ledger may be made while a service writes. A backup is restored only if it contains the last entry that is
known from the present ledger, from its head file and from its anchor (a copy of the last entry at a second location),
and as many queries as the statement says: no charge may be forgotten. The files of the replaced ledger are renamed,
never removed.

Every action of an operator on a run is noted in the run's journal of actions before it is done.
"""

import dataclasses
import hashlib
import itertools
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI

from aggregator import audit, store
from aggregator.ledger import NO_LIMIT, Ledger, LedgerState, Offsets, OwnLimit, back_end, noted_at, read_ledger
from aggregator.service import auth, server
from aggregator.service.api import Facts, bodies_for
from aggregator.service.auth import LiveTokens, TokenStore
from aggregator.service.server import Backend, Service, ServiceSettings, start_service
from aggregator.session import AggregatorSession, PublicPool, Question
from aggregator.store import (
    Address,
    Head,
    Header,
    LedgerError,
    Row,
    UnreachableError,
    head_path,
    is_database,
    ledger_files,
    lock,
    shown,
)
from fairpate.config import ConfigError, QueriesConfig, RayConfig
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.declaration import read_declaration
from fairpate.data.registry import CODEBOOKS
from fairpate.data.tables import RecordForm, feature_codes, form_of
from fairpate.files import check_output, give_to_owner
from fairpate.http_server import HttpServer, Role, ServiceError
from fairpate.methods import pate
from fairpate.methods.noisy_counts import ServiceRule
from fairpate.methods.pate import LedgerPlace, VotingMethod, place_of
from fairpate.pages import delta_caution, delta_text
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    RunFolderError,
    read_json,
    read_statement,
    require_data_by_name,
    run_at,
    write_json,
    write_text,
)
from fairpate.releases.log import ReleaseLog
from fairpate.releases.meter import LedgerMeter
from fairpate.releases.odometer import COLUMNS, Odometer, OdometerError, state_folder
from fairpate.run.folder import as_trained, finished_run, load_for, open_run_directory, record_data
from fairpate.terminal import Output, listing, require_extra, say, show
from fairpate.types import UsageError, UserError

_KEY_SHOWN = 12  # of 64 digits; `--json` and an export have all
_SQLITE = b"SQLite format 3"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NO_QUOTA = "--per-day: an operator has no quota; leave it out, or limit --queries or --epsilon."


def public_pool(dataset: Dataset, *, takes_posted: bool = True) -> PublicPool:
    """Return the public records of a run from which callers of its service choose queries. Records with equal content
    are listed once; the run's own queries come first, in order.

    ``takes_posted``: whether the voters can also vote on records that a caller sends in a request.
    """
    # Without a number of queries and an admission rule, so that every record is offered, not the run's selection.
    public = pate.choose_queries(dataset, QueriesConfig())
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
    dataset = own
    plan = config.plan(dataset)
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
        ledger = pate.open_ledger(run, terms, plan.queries, create=False, meter=new_meter(), take_over=take_over)
        try:
            # Before the first query of a caller; from then on they are terms of the ledger.
            if (offsets := offsets_for(ledger, rule)) is not None:
                ledger.fix_offsets(offsets)
            return ledger, AggregatorSession(ledger, source=plan.source, with_offsets=True)
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
        public = public_pool(dataset, takes_posted=config.votes_on_anything)
        facts = public_words(run, config, dataset)

        def try_vote() -> None:
            # Not released, so that it is free and needs no name.
            voters.ask(public.features[:1], ["no query"])

        # An actor that Ray restarts takes nothing over, because a third writer may have done so meanwhile.
        takes_over = take_over and not server.is_restarted()
        if takes_over:
            # Before the other process is stopped, which does not come back by itself: all that may fail here.
            found = read_ledger(place, place_of(run).anchor)
            found.require_terms(terms)
            pate.require_released(run, plan.queries, found)
            offsets_for(found, rule)
            new_meter().check(found)
            bodies_for(public)
            try_vote()
            pate.state_for_service(run, terms)
            audit.note_action(run.actions, "take over")
        ledger, session = open_books(take_over=takes_over)
    except BaseException:
        # Their actors would outlive a service that never started.
        voters.close()
        raise
    # Before the service can answer: a crash after an answer must not leave a claim that is too small.
    pate.state_for_service(run, terms)
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
    server.check_exposure(settings)
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
            path = CODEBOOKS / f"{data.name}.yaml" if data.declaration is None else data.declaration.path
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
        name = service_name(run)
        actor = server.find_service(name)
        if actor is None:
            raise ServiceError(
                f"{root}: this run is not served on the cluster, so there is nothing to stop; check that RAY_ADDRESS "
                "names the right cluster."
            )
        Service(actor=actor, name=name, url="").stop()
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
    from teachers.ray_pool import start_ray  # imports torch, which a refusal does not need

    with start_ray(config):
        yield


def back_up_run(path: Path, out: Path) -> int:
    """Write a verified backup of a ledger to the file ``out``; return the number of its entries. A service may write to
    the ledger meanwhile.

    ``path``: a run's folder, or a ledger file. ConfigError if ``out`` exists, LedgerError for a ledger whose hash chain
    is broken.
    """
    run, source = ledger_of(path)
    if ledger_files(out):
        raise ConfigError(f"OUT: {out} already exists; give the backup another name.")
    # Verified before it is copied: a copy of a damaged ledger would pass for a backup. The note comes after this, so
    # that a refused command leaves none, and before the first byte is written.
    header, rows, _ = verified(source.ledger, source.anchor)
    _note_reading(run, "backup", out=str(out))
    back_end(out).write(out, header, rows)
    if run is not None:
        # Last: the time of the last backup is that of a complete one.
        write_text(run.ledger_backup, "", private=True)
    return len(rows)


def last_backup_s(run: RunDirectory) -> float | None:
    """Return the time of the last backup (:func:`back_up_run`) of the run's ledger, in seconds since 1970; None if
    there was no backup."""
    with suppress(OSError):
        return run.ledger_backup.stat().st_mtime
    return None


def restore(run: RunDirectory, copy: Address, *, to: str | None) -> str:
    """Replace the ledger of ``run`` by the backup ``copy``, at the ledger's present location or at the new location
    ``to``; return the location as text, without a password.

    LedgerError if the backup's hash chain is broken, or if another process writes to the ledger. LedgerError also if
    the backup lacks an entry that was made: the last one in the present ledger, in its head file, or in its anchor (a
    copy of the last entry elsewhere). RunDirectoryError if the backup has fewer queries than the privacy statement
    says.
    """
    before = place_of(run)
    header, rows, num_outcomes = verified(copy, before.anchor)
    target = LedgerPlace(ledger=before.ledger if to is None else pate.parsed(to), anchor=before.anchor)
    with _without_writer(run, before.ledger):
        # Under the lock: a service that ended a moment ago may have charged after a look without it.
        heads, known = {Head(number, digest) for number, _, _, digest in rows}, []
        with suppress(LedgerError):
            known.append(store.noted_head(head_path(run.ledger)))
        with suppress(LedgerError):
            # Without the anchor: what a ledger holds was charged, even if it lacks its anchor's entry.
            present = verified(before.ledger, None)[1]
            known += [Head(present[-1][0], present[-1][3])] if present else []
        for head in known:
            # Number 0 notes a ledger without an entry, which every copy holds.
            if head.number and head not in heads:
                raise LedgerError(
                    f"{shown(copy)}: this backup has {len(rows)} entries, but not entry number {head.number} of the "
                    "ledger that it would replace, so charges would be forgotten; give a backup made later."
                )
        # The statement may be all that is left of a ledger whose files are lost.
        stated = read_json(run.statement)["queries"]["submitted"] if run.statement.exists() else 0
        if num_outcomes < stated:
            raise RunDirectoryError(
                f"{shown(copy)}: this backup contains the outcomes of {num_outcomes} queries, but {run.statement} "
                f"states {stated}; give a later backup."
            )
        found: list[Row] | None = None
        if is_database(target.ledger):
            try:
                found = verified(target.ledger, None)[1]
            except UnreachableError:
                raise
            except LedgerError:
                found = None  # none there yet, or one that is damaged, which is not written over
            if found is not None and found != rows:
                raise LedgerError(f"{shown(target.ledger)}: there is another ledger; give the URL of a new one.")
        else:
            path = Path(target.ledger).absolute()
            check_output(path.parent, "--to" if to else "FOLDER")
            if path not in (run.ledger.absolute(), before.ledger) and (left := ledger_files(path)):
                raise ConfigError(f"--to: {left[0]} exists already; give the path of a new file.")
        # After every check: what is refused is not in the journal.
        audit.note_action(run.actions, "restore", copy=shown(copy), entries=len(rows), to=shown(target.ledger))
        if not is_database(target.ledger):
            # Renamed first: nothing is written over a ledger, and a crash in between leaves the old one whole.
            _set_aside(Path(target.ledger))
            back_end(target.ledger).write(target.ledger, header, rows)
        elif found != rows:  # otherwise a crash came before the place was noted
            back_end(target.ledger).write(target.ledger, header, rows)
        # Before the old files are set aside: a crash in between leaves them there unused.
        note_place(run, target)
        if is_database(target.ledger):
            _set_aside(run.ledger)
    return shown(target.ledger)


@contextmanager
def _without_writer(run: RunDirectory, ledger: Address) -> Iterator[None]:
    """Context manager: keep every process from writing the ledger of ``run`` at ``ledger`` inside the ``with`` block.
    LedgerError if a process writes it."""
    with ExitStack() as held:
        # A writer of files keeps the head locked: under that lock nothing is charged.
        if head_path(run.ledger).exists():
            held.callback(os.close, lock(head_path(run.ledger)))
        if is_database(ledger):
            # A database that is lost or damaged has no writer to keep out; that is when a copy is put back.
            is_readable = False
            with suppress(LedgerError):
                # Always true: what cannot be read raises.
                is_readable = bool(verified(ledger, None))
            if is_readable:
                held.callback(back_end(ledger).store(ledger, "", create=False, take_over=False).close)
        yield


def verified(place: Address, anchor: Address | None) -> tuple[Header, list[Row], int]:
    """Verify the hash chain of the ledger at ``place``, a path or a database URL. Return the ledger's header, its
    entries and the number of queries with an outcome.

    LedgerError if an entry is wrong, or if the entry is missing that is noted in the file or database ``anchor`` (None:
    no anchor).
    """
    noted = noted_at(anchor)
    with closing(back_end(place).reader(place)) as reader:
        noted = (reader.noted, *noted)
        rows = list(store.rows_after(reader))
        return reader.header, rows, len(LedgerState(shown(place), reader.header, noted, rows).outcome_of)


def _set_aside(path: Path) -> None:
    """Rename the files of the ledger at ``path``, so that another ledger can be written there. The renamed files can
    still be read as a ledger."""
    # The index of the write-ahead log, which SQLite makes again.
    Path(f"{path}-shm").unlink(missing_ok=True)
    for number in itertools.count(1):
        aside = path.with_name(f"{path.stem}.replaced-{number}{path.suffix}")
        # The log first: a database without the log that its head counts on is refused, and a log without its database
        # would be left to the ledger that is made next. The head last: until then it shows that a ledger was here.
        logs = Path(f"{path}-wal"), Path(f"{aside}-wal")
        renames = [logs, (path, aside), (head_path(path), head_path(aside))]
        # A file without its like there may belong to this ledger: a crash came after some of the files were renamed.
        if not any(os.path.lexists(target) for source, target in renames if os.path.lexists(source)):
            break
    for source, target in renames:
        with suppress(FileNotFoundError):
            source.rename(target)


def add_anchor(run: RunDirectory, text: str) -> str:
    """Give the ledger of ``run`` an anchor: from now on the ledger's last entry is also noted at the location ``text``,
    a file or a database URL. A ledger that was replaced by an older copy then lacks this entry, and is refused.

    Return the location as text, without a password. RunFolderError for a run without a ledger. ConfigError if the
    ledger has an anchor already, or the location is in the run's folder. LedgerError if a service writes to the ledger.
    """
    if not has_ledger(run):
        raise RunFolderError(f"{run.root}: this run has no ledger; give a run of a method that asks teachers.")
    place, anchor = place_of(run), pate.parsed(text)
    if place.anchor is not None:
        raise ConfigError(
            f"{run.root}: the ledger of this run already has an anchor, {shown(place.anchor)}, and can have only one; "
            "nothing has to be done."
        )
    if isinstance(anchor, Path) and run.root.absolute() in anchor.parents:
        raise ConfigError(
            f"PLACE: {anchor} is in the run's folder and would be rolled back with it; give a file on another disk."
        )
    # A service that runs would not note its entries there: the anchor would stand still until its next start.
    with _without_writer(run, place.ledger):
        # Made before the note: a crash between the two leaves an anchor unused, and never a ledger that lacks its own.
        with closing(back_end(anchor).anchor(anchor)) as noted:
            noted.make(read_ledger(place.ledger).head)
        # After all that may be refused, and before the ledger has its anchor.
        audit.note_action(run.actions, "anchor", place=shown(anchor))
        note_place(run, LedgerPlace(ledger=place.ledger, anchor=anchor))
    return shown(anchor)


def note_place(run: RunDirectory, place: LedgerPlace) -> None:
    """Write the file ``ledger.json`` of ``run``, which states ``place``: the location of its ledger and that of the
    ledger's anchor, a copy of the last entry elsewhere."""
    places = dataclasses.asdict(place).items()
    values = {name: str(value) for name, value in places if value not in (None, run.ledger)}
    write_json(run.ledger_place, values, private=True)  # an address may hold a password


def has_ledger(run: RunDirectory) -> bool:
    """Return True if the run has a ledger, either as a file in its folder, or elsewhere, as its file ``ledger.json``
    states."""
    return run.ledger_place.exists() or bool(ledger_files(run.ledger))


def ledger_of(path: Path) -> tuple[RunDirectory | None, LedgerPlace]:
    """Return the run in the folder ``path`` and the location of its ledger. If ``path`` is a ledger file, return None
    instead of a run, and the location of this file.

    RunFolderError if there is no ledger.
    """
    run = RunDirectory(root=path) if path.is_dir() else None
    if run is not None and has_ledger(run):
        return run, place_of(run)
    if run is None and ledger_files(path):
        # A file without a head that is not of SQLite is no ledger, not even a damaged one.
        is_ledger = head_path(path).exists() or not path.is_file()
        if not is_ledger:
            with path.open("rb") as file:
                is_ledger = file.read(len(_SQLITE)) == _SQLITE
        if is_ledger:
            return None, LedgerPlace(ledger=path)
    found = "no ledger" if path.exists() else "no such file or folder"
    raise RunFolderError(f"{path}: {found}; give a ledger file, or a run of a method that asks teachers.")


def verified_facts(path: Path) -> dict[str, Any]:
    """Verify the ledger in ``path``, a run's folder or a ledger file, and that it contains all labels that its run
    released; return the results of both checks by name.

    LedgerError if the ledger's hash chain is broken, RunDirectoryError if it lacks a released label.
    """
    run, place = ledger_of(path)
    summary = dataclasses.asdict(audit.verify(place.ledger, anchor=place.anchor))
    config = open_run_directory(run.root)[1] if run is not None and run.config.exists() else None
    # The plan of the queries is that of voters alone.
    if run is not None and isinstance(config, VotingMethod):
        outcome = read_ledger(place.ledger).outcome_of.get
        try:
            if (dataset := config.own_dataset()) is None:
                dataset = as_trained(run, config, load_for(run, config.data))
        except UserError as error:
            # The chain holds: a data set that cannot be read is reported, and is no fault of the ledger.
            held = f"not compared, because the data set cannot be read ({error})"
        else:
            total, lost = pate.missing_labels(run, config.plan(dataset).queries, outcome)
            if lost:
                raise RunDirectoryError(
                    f"{run.labels}: {lost} of {total} released labels are not in the run's ledger; restore the ledger "
                    "from a later copy."
                )
            held = f"all {total} are in it"
        summary["released_labels"] = held
    if place.anchor is not None:
        summary["anchor"] = shown(place.anchor)
    return summary


def export(path: Path, out: Path) -> None:
    """Write all entries of the ledger in ``path`` to the Parquet or JSON file ``out``. LedgerError if the ledger's hash
    chain is broken."""
    run, place = ledger_of(path)
    audit.export(place.ledger, out, before=partial(_note_reading, run, "export", out=str(out)))


def audit_lines(path: Path, *, follow: bool, out: Path | None) -> Iterator[str]:
    """Yield the lines of the audit log (charges, limits and operators' actions) of the ledger in ``path``. With
    ``out``, nothing is yielded: the lines that this file lacks are appended to it.

    ``follow``: wait for further lines, without an end.
    """
    run, place = ledger_of(path)
    actions = None if run is None else run.actions
    end = audit.START if out is None else audit.log_end(out)
    lines = audit.follow(place.ledger, end, actions) if follow else audit.lines_after(place.ledger, end, actions)
    if out is None:
        yield from (line for _, line in lines)
        return
    # The first line before the file is touched: a ledger or a log that is refused leaves the file as it was.
    lines = itertools.chain([*itertools.islice(lines, 1)], lines)
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)  # a log that exists too: its lines name who asked, and when
    give_to_owner(descriptor, out.absolute().parent)
    with open(descriptor, "a", encoding="utf-8") as file:  # noqa: PTH123 - of the descriptor, with its rights
        for last, line in lines:
            end = last
            file.write(line + "\n")
            if follow:
                file.flush()
    say(f"{out} ends with the head {end.chain}; note it elsewhere, for --check.")


def _note_reading(run: RunDirectory | None, event: str, **facts: object) -> None:
    """Note in the run's log of operators' actions that an operator read private entries of the ledger; ``event`` names
    the action. If the log cannot be written, print a remark instead."""
    try:
        # An operator can read the files without this command, so refusing here would protect nothing.
        audit.note_action(None if run is None else run.actions, event, **facts)
    except LedgerError as error:
        say(f"not noted in the journal: {error}")


def last_charges(path: Path, count: int) -> Output:
    """Return a table of the last ``count`` charges of the ledger in ``path``, not to be published."""
    run, place = ledger_of(path)
    rows = [charge.to_json() for charge in audit.rows(place.ledger)[-count:]]
    _note_reading(run, "show", last=count)  # before they are shown, and after all that may be refused
    table = listing(*audit.COLUMNS.names[:-1], "charged (UTC)")
    for row in rows:
        at = f"{datetime.fromtimestamp(row['at_s'], UTC):%Y-%m-%d %H:%M:%S}" if row["at_s"] else None
        values = (row | {"key": row["key"][:_KEY_SHOWN], "at_s": at}).values()
        table.add_row(*("" if value is None else str(value) for value in values))
    return Output(facts={"charges": rows}, words=table)


def describe_totals(*, data: str | None, delta: float) -> Output:
    """Return a table of the total privacy cost of all the operator's releases, per data set, unit and relation.

    ``data``: only this data set. OdometerError for a damaged odometer, and if it has no release on ``data``.
    """
    totals = Odometer().totals(delta=delta, data=data)
    if not totals and data is None:
        return Output(facts={"totals": []}, words="No release is counted yet.")
    if not totals:
        raise OdometerError(
            f"--data: no release of {data} was charged; give one of the data sets that `fairpate ledger total` lists."
        )
    table = listing(*(name.replace("epsilon", f"epsilon at {delta_text(delta)}") for name in COLUMNS))
    for total in totals:
        table.add_row(*total.cells)
    return Output(facts={"totals": totals}, words=table)


def change_tokens(
    root: Path,
    change: Literal["add", "rotate", "expire", "limit", "revoke"],
    name: str,
    *,
    role: Role = "analyst",
    limit: Mapping[str, Any] | None = None,
    when: str | None = None,
) -> str:
    """Change the tokens of the caller ``name`` of a run's service, after noting the change in the run's log of
    operators' actions. A change that is refused is not noted.

    The values of ``change``:

    * ``add``: create a token for a new caller. It expires at the time ``when`` (None: never).
    * ``rotate``: create another token for the caller. The earlier tokens expire at ``when``.
    * ``expire``: let all tokens of the caller expire at ``when`` (`never`: the latest token does not expire).
    * ``limit``: set the limit of the caller.
    * ``revoke``: remove all tokens of the caller.

    ``limit``: the fields of an :class:`OwnLimit`, for ``add`` and ``limit``. Return the new token of ``add`` and
    ``rotate``, which is stored nowhere; otherwise "". RunFolderError for a run without teachers, ConfigError for a
    limit or a time out of range, UsageError for a quota per day on an operator's token.
    """
    run, before, facts = run_at(root), NO_LIMIT, dict[str, object]()
    try:
        own = OwnLimit(**(limit or {}))
    except ValueError as error:
        raise ConfigError(f"Limit of a token: {error} For no limit, leave the option out.") from error
    ends_s = None if when is None or (change, when) == ("expire", "never") else moment(when)
    if change == "add":
        facts = {"role": role}
        if role == "operator" and own.per_day is not None:
            raise UsageError(_NO_QUOTA)
        _, config = open_run_directory(root)
        if not config.keeps_teachers:
            raise RunFolderError(
                f"{root}: this run of {config.method} has no stored teachers, so no service could use a token for it; "
                "serve its published student (`fairpate serve --student`), which needs no token."
            )
        # The ledger is asked only where a limit is given: without one, a token can be made while its database is down.
        if own != NO_LIMIT and has_ledger(run):
            # A lost token store has no limits.
            before = read_ledger(place_of(run).ledger).limits.get(name, NO_LIMIT)
    elif change in ("expire", "limit"):
        facts = {"when": when} if change == "expire" else {"limit": dataclasses.asdict(own)}

    def made(kept: TokenStore) -> tuple[TokenStore, str]:
        now_s = time.time()
        match change:
            case "add":
                return auth.added(kept, name, role=role, limit=own, before=before, expires_s=ends_s, now_s=now_s)
            case "rotate":
                assert ends_s is not None
                return auth.rotated(kept, name, old_expires_s=ends_s, now_s=now_s)
            case "expire":
                return auth.expired(kept, name, expires_s=ends_s), ""
            case "revoke":
                return auth.revoked(kept, name), ""
        is_operator = any(token.name == name and token.role == "operator" for token in kept.tokens)
        if is_operator and own.per_day is not None:
            raise UsageError(_NO_QUOTA)
        return auth.limited(kept, name, own), ""

    # The journal before the change: a crash in between leaves a note without a change, never a change without a note.
    noted = partial(audit.note_action, run.actions, "tokens", change=change, name=name, **facts)
    return auth.change(run.tokens, made, before=noted)


def describe(root: Path) -> Output:
    """Return a table of the tokens of a run's service, with name, role, expiry and limit, and of the limits of callers
    who have no token."""
    run, now_s = run_at(root), time.time()
    kept = auth.read_store(run.tokens) if run.tokens.exists() else auth.NO_TOKENS
    in_ledger: Mapping[str, OwnLimit] = {}
    try:
        in_ledger = read_ledger(place_of(run).ledger).limits if has_ledger(run) else {}
    except LedgerError as error:  # tokens can be listed while the ledger's database is down
        say(f"limits that are in the ledger alone are not shown: {error}")
    # A change waits in the store until a service writes it into the ledger, which keeps it.
    limits = {**in_ledger, **kept.limits}
    others = sorted({name for name, own in limits.items() if own != NO_LIMIT} - {token.name for token in kept.tokens})
    if not kept.tokens and not others:
        return Output(facts={"tokens": []}, words="No token yet; `fairpate tokens add` makes one.")
    found: list[dict[str, Any]] = []
    for token in kept.tokens:
        made, ends = (
            None if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
            for at_s in (token.created_s, token.expires_s)
        )
        known = {"name": token.name, "role": token.role, "made": made, "ends": ends, "ended": not token.is_good(now_s)}
        found.append(known | {"limit": limits.get(token.name, NO_LIMIT)})
    for name in others:
        found.append({"name": name, "role": None, "made": None, "ends": None, "ended": False, "limit": limits[name]})
    table = listing("name", "role", "made", "ends", "epsilon", "queries", "per day")
    for each in found:
        own, role, made = each["limit"], each["role"] or "no token", each["made"] or ""
        ends = (each["ends"] or "never") + (" (ended)" if each["ended"] else "") if each["role"] else ""
        numbers = ("" if value is None else f"{value:g}" for value in (own.epsilon, own.max_queries, own.per_day))
        table.add_row(each["name"], role, made, ends, *numbers)
    return Output(facts={"tokens": found}, words=table)


def moment(text: str) -> float:
    """Return the time that ``text`` describes, in seconds since 1970: a time from now (`30d`, `12h`, `90m`, `0s`) or a
    date such as 2027-01-31 (UTC). ConfigError for any other text."""
    try:
        if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
            date = datetime.now(UTC) + timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
        else:
            date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:  # beyond year 9999 no list of tokens could show it
        raise ConfigError(
            f"{text}: not a time; give a time from now such as 30d or 12h, or a date such as 2027-01-31."
        ) from error
