"""`fairpate serve` and `query`: both ends of a service."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fairpate.app.cli.commands import Mode, in_modes
from fairpate.app.cli.endings import checked_arguments
from fairpate.app.cli.options import (
    AnalystToken,
    DataDir,
    Host,
    LogFile,
    Oidc,
    OperatorToken,
    Port,
    Quota,
    Rate,
    RunFolders,
    TlsCert,
    TlsKey,
    TokenFile,
    Traces,
    Words,
)
from fairpate.app.terminal.output import Output, say, show
from fairpate.types import UsageError


def _serve_aggregators(
    folders: RunFolders,
    host: Host = "127.0.0.1",
    port: Port = 8517,
    analyst_token_file: AnalystToken = None,
    operator_token_file: OperatorToken = None,
    oidc: Oidc = None,
    quota: Quota = math.inf,
    rate: Rate = math.inf,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    log_file: LogFile = None,
    traces: Traces = False,
    data_dir: DataDir = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it on the cluster at RAY_ADDRESS.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End another writer of a ledger in a database, which hangs or is lost.")
    ] = False,
) -> None:
    from fairpate.app.serving import serve as serving
    from fairpate.app.serving.settings import service_settings

    with checked_arguments():
        settings = service_settings(
            host=host,
            port=port,
            analyst_file=analyst_token_file,
            operator_file=operator_token_file,
            daily_quota=quota,
            rate=rate,
            tls=(tls_cert, tls_key),
            log_file=log_file,
            traces=traces,
            oidc=oidc,
        )
    serving.serve_aggregators(
        folders, settings, data_dir=data_dir, detach=detach, say=say, started=_started, take_over=take_over
    )


def _serve_student(
    folders: RunFolders,
    host: Host = "127.0.0.1",
    port: Port = 8517,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies of the student on Ray Serve; none: one, in this process.")
    ] = None,
) -> None:
    from aggregator.service.api import ServiceSettings
    from fairpate.app.serving import serve as serving

    if len(folders) > 1:
        raise UsageError(f"--student: expected one run directory, got {len(folders)}; serve each on its own port.")
    with checked_arguments():
        settings = ServiceSettings(host=host, port=port)
    serving.serve_student_of(folders[0], settings, num_replicas=replicas, say=say, started=_started)


def _stop(folders: RunFolders) -> Output:
    from fairpate.app.serving import serve as serving

    serving.stop_aggregators(folders, say=say)
    return Output(facts={"stopped": folders}, words="")


serve = in_modes(
    "serve",
    "Serve finished runs over HTTP: their aggregators, each under its own path, or of one its published model.",
    Mode(function=_serve_aggregators),
    Mode(function=_stop, option="stop", flag=typer.Option("--stop", help="End what --detach left.")),
    Mode(
        function=_serve_student,
        option="student",
        flag=typer.Option("--student", help="Serve the published student: plain HTTP, open to everybody."),
        instead=", and let a proxy in front of the student ask for tokens and end TLS",
    ),
)


def _started(served: Sequence[Mapping[str, Any]]) -> None:
    """For a program; a person was told in words."""
    show(Output(facts={"served": served}, words=""))


class QueryCommand(TyperCommand):
    """A negative number is a wrong record, and no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The parent's. UsageError for a negative number."""
        for word in args:
            if word[:1] == "-" and word[1:2].isdecimal():
                raise UsageError(f"{word}: expected a record's number, from 0 on, or a range such as 0:500.")
        return super().parse_args(ctx, args)


def _query_words(words: Words = None, token_file: TokenFile = None) -> Output | None:
    from fairpate.app.serving.query import query_words

    return query_words(words or [], token_file=token_file)


def _query_batch(
    ids: Annotated[str, typer.Option(help="Pool records such as 0:500; prints their labels.")] = "",
    words: Words = None,
    out: Annotated[Path | None, typer.Option(help="A .parquet or .csv file for the batch's replies.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Queries in one request.")] = 256,
    token_file: TokenFile = None,
) -> Output:
    from fairpate.app.serving.query import query_batch

    return query_batch(words or [], ids, out=out, batch_size=batch_size, token_file=token_file)


query = in_modes(
    "query",
    "Query a running aggregator: a shell, one command (`fairpate query ask 17`), or a batch (--ids).",
    Mode(function=_query_words),
    Mode(function=_query_batch, option="ids"),
)
