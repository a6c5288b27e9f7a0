"""Commands about data sets, ledgers, services, tokens, this installation and new projects.

Functions are imported inside the commands, so that `fairpate --help` does not wait for the libraries they need.
"""

import inspect
import json
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from fairpate.cli import commands
from fairpate.config import ConfigError, nearest
from fairpate.files import check_output, write_atomically
from fairpate.lazy import Later
from fairpate.pages import at_most, counted, delta_text
from fairpate.terminal import Output, Reporter, facts, is_for_program, listing, say, waiting
from fairpate.types import REMARKS, UNITS, UsageError, strict

if TYPE_CHECKING:
    from fairpate.run import ledgers, tokens
    from fairpate.run import serve as serving
else:  # imported when a command first uses it
    ledgers, tokens, serving = map(Later, ("fairpate.run.ledgers", "fairpate.run.tokens", "fairpate.run.serve"))

data_app = commands.Commands("List, fetch and describe data sets; declare your own records.")


@data_app.command("list")
def list_data(data_dir: commands.DataDir = None) -> Output:
    """List all data sets with task, sensitive attribute, size and licence."""
    # A mistyped folder would look like one without any files.
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError(f"--data-dir: {data_dir} is not a folder; give the folder with the publishers' files.")
    from fairpate.data import REGISTRY

    table = listing("name", "task", "sensitive attribute", "records", "licence", "here")
    found = []
    folder = os.environ.get("FAIRPATE_DATA")
    for entry in REGISTRY.values():
        is_here = entry.is_in(data_dir or (Path(folder) if folder else None))
        rows = "" if entry.rows is None else f"{entry.rows:,}"
        table.add_row(entry.name, entry.task, entry.sensitive, rows, entry.licence, "yes" if is_here else "no")
        known = {name: getattr(entry, name) for name in ("name", "task", "sensitive", "rows", "licence")}
        found.append(known | {"here": is_here})
    return Output(facts={"data_sets": found}, words=table)


@data_app.command("fetch")
def fetch_data(
    name: commands.DatasetName, data_dir: commands.DataDir = None, options: commands.OptionValues = None
) -> Output:
    """Download a data set from its publisher and verify its checksum."""
    from fairpate.data.registry import fetch

    target = data_dir or os.environ.get("FAIRPATE_DATA")
    if not target:
        raise ConfigError("--data-dir: missing; give the folder for the files, or set FAIRPATE_DATA.")
    # Which files there are may depend on the loader's own options.
    options_of_loader = commands.data_config(name, options, None).options
    files = fetch(name, Path(target), options=options_of_loader, stage=Reporter().stage)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


@data_app.command("describe")
def describe_data(
    name: commands.DatasetName, data_dir: commands.DataDir = None, options: commands.OptionValues = None
) -> Output:
    """Count the records of a data set by split, group and label. The counts are exact: do not publish them."""
    from fairpate.cli.summaries import describe_table
    from fairpate.data import describe, load_data

    with waiting("data"):
        description = describe(load_data(commands.data_config(name, options, data_dir)))
    return Output(facts=strict(description), words=describe_table(description))


@data_app.command("declare")
def declare_data(
    file: Annotated[Path, typer.Argument()],
    public: Path | None = None,
    label: str | None = None,
    group: str | None = None,
    person: str | None = None,
    test: Path | None = None,
    intended_use: str | None = None,
    read_private: bool = False,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
) -> Output:
    """Draft a declaration of your own records, with questions where public records do not suffice.

    Args:
        file: Table of private records, of which only the header is read, or a folder of pictures.
        public: Table of public records: the same columns, the label may be missing.
        label: Column of the label; default: one that --public lacks.
        group: Column of the group whose fairness counts.
        person: Column that is the same in all rows of one person; default: an id column whose values repeat.
        test: Table of labelled records to measure the model on; this command does not read it.
        intended_use: What a model of these records is for, in your words; report and card state it.
        read_private: Also read private rows, for the values of the label and for ids that repeat; the draft asks you to
            confirm these lines from your own knowledge. Bounds and categories are never taken from private rows.
        output: YAML file to write; default: the draft is only printed.
    """
    # An existing draft may hold answers of the user.
    if output is not None and output.exists():
        raise ConfigError(f"--output: {output} exists already; give the path of a new file.")
    for name, table in (("file", file), ("--public", public), ("--test", test)):
        if table is not None and not table.exists():
            raise ConfigError(f"{name}: {table} not found; give the path of a table.")
        if table is not None and table.suffix in (".yaml", ".yml"):
            raise ConfigError(f"{name}: {table} is a declaration or a configuration; give the table of records itself.")
    from fairpate.data.declaration import open_questions
    from fairpate.data.draft import draft_declaration

    with waiting("data"):
        folder = Path.cwd() if output is None else output.parent
        text = draft_declaration(
            file,
            public,
            folder,
            label=label,
            group=group,
            person=person,
            test=test,
            intended_use=intended_use,
            reads_private=read_private,
        )
    facts, questions = {"declaration": text, "file": output}, open_questions(text)
    if output is None:
        return Output(facts=facts | {"questions": questions}, words=text.removesuffix("\n"))
    write_atomically(output, lambda partial: partial.write_text(text, encoding="utf-8"))
    words = f"{output}: {counted(questions, 'question')} to answer; then fairpate data check {shlex.quote(str(output))}"
    if public is None and not file.is_dir():
        words += (
            "\nWithout --public every column is a question. Records with the same columns that need no protection, "
            "such as an older extract, a published survey or invented ones, answer most; many methods need some."
        )
    return Output(facts=facts | {"questions": questions}, words=words)


@data_app.command("check")
def check_data(
    name: Annotated[str, typer.Argument()], data_dir: commands.DataDir = None, options: commands.OptionValues = None
) -> Output:
    """Count the values that a declaration clips, fills in or refuses, and names of persons that are in doubt. The
    counts are exact: do not publish them.

    Args:
        name: A declaration (.yaml).
    """
    from fairpate.cli.summaries import check_table
    from fairpate.data.declaration import open_questions
    from fairpate.data.draft import check_declaration

    with waiting("data"):
        found = check_declaration(commands.data_config(name, options, data_dir))
    questions = open_questions(Path(name).read_text(encoding="utf-8"))
    # Exit code 1 where a run would refuse the records, so that scripts notice.
    facts = strict(found) | {"remarks": [REMARKS["reading_tells"]], "questions": questions}
    return Output(facts=facts, words=check_table(found, name, questions), code=int(bool(found.refused)))


ledger_app = commands.Commands("Verify, copy and audit a run's ledger; total and limit all releases. For the operator.")


@ledger_app.command("verify")
def verify_ledger(path: commands.RunOrLedger) -> Output:
    """Verify the hash chain of all entries of a ledger; a service may write to it meanwhile."""
    with waiting("ledger"):
        return Output(facts=ledgers.verified_facts(path))


@ledger_app.command("audit")
def audit_ledger(
    path: Annotated[Path | None, typer.Argument(show_default=False)] = None,
    follow: bool = False,
    out: Path | None = None,
    check: Path | None = None,
    head: str | None = None,
) -> Output:
    """Print a log of charges, limits and actions of operators as JSON lines, or check a log that was printed before.

    No line depends on votes.

    Args:
        path: A run folder or a ledger file.
        follow: Keep printing new entries.
        out: File to append to; default: standard output.
        check: A log to verify against --head, instead of printing one.
        head: The value `chain` of a line of the log, which you noted elsewhere before.
    """
    if check is not None or head is not None:
        # A log alone proves nothing: it can be written anew, chain included. The head must come from elsewhere.
        if check is None or head is None or path is not None or follow or out is not None:
            raise UsageError("--check LOG and --head HASH: both are needed; give both, and no PATH, --follow or --out.")
        from aggregator.ledger_audit import check_log

        count, number, last = check_log(check, head)
        words = f"{check}: {count} lines, none changed; line {number} has the head, the last line has {last}"
        return Output(facts={"file": check, "lines": count, "head_line": number, "head": last}, words=words)
    if path is None:
        raise UsageError("PATH: missing; give a run folder or a ledger file, or --check LOG --head HASH.")
    if out is not None:
        check_output(out, "--out", is_file=True)
    # JSON lines are read line by line; one document of an endless log would never be complete.
    if follow and is_for_program():
        raise UsageError(
            "--follow: never ends, but --json prints one document; leave out --json, as each line is JSON already."
        )
    lines = ledgers.audit_lines(path, follow=follow, out=out)
    # Both are lazy and share one iterator: only one of them is ever printed.
    return Output(facts={"file": out, "entries": (json.loads(line) for line in lines)}, words=lines)


@ledger_app.command("backup")
def back_up_ledger(path: commands.RunOrLedger, out: Annotated[Path, typer.Argument()]) -> Output:
    """Copy a ledger and verify every entry; a service may write to it meanwhile. Do not publish the copy.

    Args:
        out: The .sqlite file to write, with a .head file next to it.
    """
    # Before the imports, which take a second: a wrong name is refused at once.
    check_output(out, "out", is_file=True, suffixes=(".sqlite",))
    with waiting("ledger"):
        entries = ledgers.back_up_run(path, out)
    return Output(facts={"file": out, "entries": entries}, words=f"{out}: {counted(entries, 'entry', 'entries')}")


@ledger_app.command("restore")
def restore_ledger(
    copy: Annotated[Path, typer.Argument()], folder: commands.RunFolder, to: str | None = None
) -> Output:
    """Replace the ledger of a run by a copy. A copy that lacks a charge of the ledger is refused.

    Args:
        copy: A copy of `fairpate ledger backup`.
        to: Restore to postgresql://HOST/DATABASE#NAME; default: where the ledger was.
    """
    from fairpate.releases.directory import run_at

    with waiting("ledger"):
        place = ledgers.restore(run_at(folder), copy, to=to)
    return Output(facts={"run": folder, "ledger": place}, words=f"The ledger of {folder} is now {place}")


@ledger_app.command("anchor")
def anchor_ledger(folder: commands.RunFolder, place: Annotated[str, typer.Argument()]) -> Output:
    """Record the last entry of a ledger at a second location too, so that an older copy of the ledger is refused.

    From then on, each new entry is recorded there too. Refused while a service writes the ledger: stop it first.

    Args:
        place: A file on another disk, or postgresql://HOST/DATABASE#NAME.
    """
    from fairpate.releases.directory import run_at

    with waiting("ledger"):
        anchor = ledgers.add_anchor(run_at(folder), place)
    return Output(facts={"run": folder, "anchor": anchor}, words=f"The last entry of {folder} is recorded at {anchor}")


@ledger_app.command("export")
def export_ledger(path: commands.RunOrLedger, out: Annotated[Path, typer.Argument()]) -> Output:
    """Write all entries of a ledger, including votes, to a file. Do not publish the file.

    Args:
        out: A .parquet or .json file.
    """
    check_output(out, "out", is_file=True, suffixes=(".parquet", ".json"))
    with waiting("ledger"):
        ledgers.export(path, out)
    return Output(facts={"file": out}, words=str(out))


@ledger_app.command("show")
def show_ledger(path: commands.RunOrLedger, last: Annotated[int, typer.Option(min=1)] = 20) -> Output:
    """Print the last charges of a ledger and their outcomes. Do not publish the output.

    Args:
        last: Number of charges.
    """
    with waiting("ledger"):
        return ledgers.last_charges(path, last)


_DELTA = "--delta: expected 0 < delta < 1, got {}."


@ledger_app.command("total")
def total_of_releases(data: str | None = None, delta: float = 1e-5) -> Output:
    """Print the privacy cost of all your releases on each data set together: runs, comparisons and services.

    Args:
        data: Only this data set.
        delta: Delta at which the total epsilons are stated.
    """
    if not 0 < delta < 1:
        raise ConfigError(_DELTA.format(delta))
    with waiting("total"):
        return ledgers.describe_totals(data=data, delta=delta)


@ledger_app.command("limit")
def limit_releases(data: commands.DatasetName, epsilon: float, unit: str | None = None, delta: float = 1e-5) -> Output:
    """Set a limit for all releases on a data set; a release that would exceed it is refused.

    Args:
        epsilon: Largest epsilon of all releases together.
        unit: Unit of privacy: record, person, sensitive attribute, or one that you declared. A limit on record includes
            releases by person. Default: the unit of all earlier releases, if they have only one and it is not person;
            otherwise record.
        delta: Delta at which the sum of all releases is compared with the limit.
    """
    from fairpate.data import REGISTRY
    from fairpate.releases.odometer import Odometer

    if not 0 < delta < 1:
        raise ConfigError(_DELTA.format(delta))
    odometer = Odometer()
    released = dict.fromkeys(total.unit for total in odometer.totals(delta=delta) if total.data == data)
    units = dict.fromkeys((*UNITS, *released))  # also declared ones, of votes made elsewhere
    # Persons are protected with their records, so a limit on records includes releases by person.
    if unit is None:
        unit = "record" if len(released) != 1 or "person" in released else next(iter(released))
    if unit not in units:
        raise ConfigError(f"--unit: {unit} is not a known unit of privacy; give one of {', '.join(units)}.")
    if not 0 < epsilon < float("inf"):
        raise ConfigError(f"--epsilon: expected 0 < epsilon < inf, got {epsilon}; give a positive number such as 3.")
    spent = odometer.set_limit(data, unit, epsilon=epsilon, delta=delta)
    known = dict.fromkeys([*REGISTRY, *(total.data for total in odometer.totals(delta=delta))])
    if data not in known:  # Python may give a data set any name, so a mistyped one is only reported
        say(f"{data}: is not a known data set, and nothing was released on it yet{nearest(data, known)}")
    # The limit is set all the same: it refuses further releases.
    if spent > epsilon:
        say(
            f"{data}, unit {unit}: earlier releases count as {at_most(spent)} where later ones may depend on them, "
            f"which is above {epsilon:g}: every new release is refused"
        )
    includes = {"record": "; includes releases by person", "sensitive attribute": "; includes releases of all units"}
    return Output(
        facts={"data": data, "unit": unit, "epsilon_limit": epsilon, "delta": delta, "is_known": data in known},
        words=f"{data}, unit {unit}: at most epsilon {epsilon:g} at delta {delta_text(delta)}{includes.get(unit, '')}",
    )


def _settings(
    host: commands.Host = "127.0.0.1",
    port: commands.Port = 8517,
    analyst_token_file: Path | None = None,
    operator_token_file: Path | None = None,
    rate: float = math.inf,
    tls_cert: commands.TlsCert = None,
    tls_key: commands.TlsKey = None,
    log_file: commands.LogFile = None,
    traces: bool = False,
) -> Any:
    """Check the options of a command that starts a service, and return them as
    :class:`aggregator.service.actor.ServiceSettings`.

    Tokens are read from the files or from the environment; an aggregator also accepts the tokens in its run's token
    store.
    """
    from aggregator.service.actor import ServiceSettings
    from aggregator.service.auth import forget_variables, read_tokens
    from fairpate.http_server import RequestRate, TlsFiles
    from fairpate.terminal import require_extra

    with commands.checked_arguments():
        if traces:
            require_extra("traces", "--traces")
        settings = ServiceSettings(
            host=host,
            port=port,
            tokens=read_tokens(os.environ, analyst_file=analyst_token_file, operator_file=operator_token_file),
            # A bucket that holds less than one request would let none in, however long the caller waits.
            rate=RequestRate(per_s=rate, burst=max(1.0, 2 * rate)),
            tls=TlsFiles.given(tls_cert, tls_key),
            log_file=None if log_file is None else log_file.absolute(),
            traces=traces,
        )
    # Before Ray is started: its workers, which run voters and their code, would inherit the tokens.
    forget_variables()
    return settings


def _with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` as a command that has the options of :func:`_settings` instead of the parameter ``settings``.

    The attribute ``parts`` of the returned function lists the functions that read these options: ``function`` and
    :func:`_settings`.
    """
    # The options of both servers are declared once, so that neither can drop one.
    own, shared = (inspect.signature(each, eval_str=True).parameters for each in (function, _settings))

    @wraps(function)
    def command(**values: Any) -> None:
        settings = _settings(**{name: values.pop(name) for name in shared})
        function(settings=settings, **values)

    first, *rest = (each for name, each in own.items() if name != "settings")
    command.__signature__ = inspect.Signature([first, *shared.values(), *rest])  # type: ignore[attr-defined]
    command.parts = (function, _settings)  # type: ignore[attr-defined]
    return command


@_with_settings
def _serve_student(
    folder: commands.RunFolder, settings: Any, replicas: Annotated[int | None, typer.Option(min=1)] = None
) -> None:
    serving.serve_student_of(folder, settings, num_replicas=replicas)


def _stop(folder: commands.RunFolder) -> Output:
    serving.stop_aggregator(folder)
    return Output(facts={"stopped": [folder]}, words="")


@commands.in_modes(stop=_stop, student=_serve_student)
@_with_settings
def serve(
    folder: commands.RunFolder,
    settings: Any,
    quota: float = math.inf,
    data_dir: commands.DataDir = None,
    detach: bool = False,
    take_over: bool = False,
) -> None:
    """Serve a finished run over HTTP: its aggregator, or its published model (--student).

    An aggregator charges its ledger before it answers, until the budget is used up.

    Args:
        analyst_token_file: File with the analysts' token; default: FAIRPATE_ANALYST_TOKEN.
        operator_token_file: File with the operator's token; default: FAIRPATE_OPERATOR_TOKEN.
        quota: New queries per analyst token and day.
        rate: Requests per second and token; bursts of twice as many.
        traces: Send OpenTelemetry traces to the address in OTEL_EXPORTER_OTLP_*.
        stop: Stop a service started with --detach.
        student: Serve the published model; without tokens it is open to all users.
        detach: Start the service on the cluster at RAY_ADDRESS, and return.
        take_over: Stop another service that writes the same ledger in a database, if it hangs or is lost.
        replicas: Replicas of the model on Ray Serve; default: one, in this process.
    """
    from aggregator.session import QuotaRule

    with commands.checked_arguments():
        settings = replace(settings, quota=QuotaRule(max_queries=quota))
    serving.serve_aggregator(folder, settings, data_dir=data_dir, detach=detach, take_over=take_over)


class QueryCommand(TyperCommand):
    """The command `query`, which reports a negative number, such as -1, as a wrong record number and not as an unknown
    option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            if word[:1] == "-" and word[1:2].isdecimal():
                raise UsageError(f"{word}: expected the number of a record (from 0), or a range such as 0:500.")
        return super().parse_args(ctx, args)


Words = Annotated[list[str] | None, typer.Argument()]


def _query_batch(
    ids: str = "",
    words: Words = None,
    out: Path | None = None,
    batch_size: Annotated[int, typer.Option(min=1, max=1024)] = 256,
    token_file: Path | None = None,
) -> Output:
    from aggregator.client import query_batch

    return query_batch(words or [], ids, out=out, batch_size=batch_size, token_file=token_file)


@commands.in_modes(ids=_query_batch)
def query(words: Words = None, token_file: Path | None = None) -> Output | None:
    """Query a running aggregator: in a shell, by one command (`fairpate query ask 17`), or in a batch (--ids).

    Args:
        words: [URL] and one command; without a command, opens a shell.
        token_file: File with your token; default: FAIRPATE_TOKEN.
        ids: Records of the public pool, such as 0:500; prints their labels.
        out: The .parquet or .csv file to write the replies to.
        batch_size: Queries per request.
    """
    from aggregator.client import query_words
    from fairpate.releases.odometer import state_folder

    return query_words(words or [], token_file=token_file, history=state_folder() / "history")


tokens_app = commands.Commands(
    "Say who may query a run's service, until when, and how much. A running service follows within a second."
)
Name = Annotated[str, typer.Argument(help="Name of the token's owner; charges and limits are kept by name.")]
OwnEpsilon = Annotated[
    float | None, typer.Option("--epsilon", help="Privacy budget of this name, within the run's budget.")
]
Queries = Annotated[int | None, typer.Option(help="Largest total number of new queries.")]
PerDay = Annotated[float | None, typer.Option(help="New queries allowed at once; refills evenly over a day.")]


@tokens_app.command("add")
def add_token(
    folder: commands.RunFolder,
    name: Name,
    role: Literal["analyst", "operator"] = "analyst",
    epsilon: OwnEpsilon = None,
    queries: Queries = None,
    per_day: PerDay = None,
    expires: str | None = None,
) -> Output:
    """Make a token for a new name and print it. It is shown only once, as only its digest is stored.

    Args:
        role: What the token gives access to.
        expires: When the token expires: 30d, 12h, or a date; default: never.
    """
    limit = {"epsilon": epsilon, "max_queries": queries, "per_day": per_day}
    return _shown_once(name, tokens.change_tokens(folder, "add", name, role=role, limit=limit, when=expires))


@tokens_app.command("list")
def list_tokens(folder: commands.RunFolder) -> Output:
    """Print the name, role, expiry and limits of every token, and the limits of owners whose tokens are gone."""
    with waiting("ledger"):
        return tokens.describe(folder)


@tokens_app.command("limit")
def limit_name(
    folder: commands.RunFolder, name: Name, epsilon: OwnEpsilon = None, queries: Queries = None, per_day: PerDay = None
) -> Output:
    """Replace the limit of a token's owner; charges before the change count towards the new limit."""
    own = {"epsilon": epsilon, "max_queries": queries, "per_day": per_day}
    tokens.change_tokens(folder, "limit", name, limit=own)
    return Output(facts={"name": name, "limit": own}, words=f"{name}: has this limit from now on")


@tokens_app.command("expire")
def expire_tokens(folder: commands.RunFolder, name: Name, when: Annotated[str, typer.Argument()]) -> Output:
    """Set the time at which the tokens of an owner expire.

    Args:
        when: When the tokens expire: 30d, 12h, 0s, a date, or never.
    """
    tokens.change_tokens(folder, "expire", name, when=when)
    return Output(facts={"name": name, "ends": when}, words=f"{name}: its tokens end {when}")


@tokens_app.command("rotate")
def rotate_token(folder: commands.RunFolder, name: Name, keep_old: str = "0s") -> Output:
    """Make a new token for an owner who has one and print it, only once.

    Args:
        keep_old: How long the old token stays valid, such as 1h or 2d; default: it ends now.
    """
    return _shown_once(name, tokens.change_tokens(folder, "rotate", name, when=keep_old))


@tokens_app.command("revoke")
def revoke_tokens(folder: commands.RunFolder, name: Name) -> Output:
    """Delete all tokens of an owner, whose charges stay in the ledger."""
    tokens.change_tokens(folder, "revoke", name)
    return Output(facts={"name": name, "revoked": True}, words=f"{name}: all tokens are revoked")


def _shown_once(name: str, token: str) -> Output:
    # On standard error, so that the token alone can be piped into a file.
    say(f"This is the token of {name}; it is shown only now.")
    return Output(facts={"name": name, "token": token}, words=token)


def version() -> Output:
    """Print versions, processors, folders and optional extras. Exit code 1 if something has to be fixed."""
    from fairpate import __version__
    from fairpate.cli.summaries import findings

    found, marks = list(findings()), {"ok": "", "fix": "fix: "}
    return Output(
        facts={"version": __version__, "findings": found},
        words=facts((finding.name, marks[finding.level] + finding.value) for finding in found),
        code=int(any(finding.level == "fix" for finding in found)),
    )


ProjectFolder = Annotated[Path, typer.Argument(metavar="NAME", help="Folder to create.")]


def _new_example(
    name: ProjectFolder,
    example: Annotated[
        str | None, typer.Option(help=f"Copy an example instead: {', '.join(commands.EXAMPLE_FILES)}.")
    ] = None,
) -> Output:
    from fairpate.cli.summaries import write_folder

    # This function runs only if its option is given.
    assert example is not None
    files = commands.example_files(example)
    written = write_folder(name, {file.name: file.read_bytes() for file in files})
    main = files[0].name
    command = f"fairpate compare {main}" if main.endswith(".yaml") else f"python {main}"
    if example == "own-method":
        command = "fairpate run --method own_method:ClassMeans --epsilon 3"
    about = f"{main}, with its explanation at the top."
    return _created(name, about, command, example=example, files=written)


def _created(name: Path, about: str, command: str, **found: Any) -> Output:
    # `cd` would read a leading hyphen as an option.
    place = shlex.quote(f"./{name}" if str(name).startswith("-") else str(name))
    return Output(facts={"folder": name, **found}, words=f"{name}: {about} To begin:\n  cd {place}\n  {command}")


@commands.in_modes(example=_new_example)
def new(
    name: ProjectFolder,
    kind: Literal["table", "images", "embeddings"] = "table",
    intended_use: str | None = None,
) -> Output:
    """Create a project that runs: example records to replace by yours, their declaration, settings and a test.

    With --example, create a folder with a comparison, a method or a script to change.

    Args:
        kind: Kind of records: rows of a table, images, or vectors.
        intended_use: What the model is for, in your words; report and card state it.
    """
    from fairpate.cli.summaries import write_project

    data, files = write_project(name, kind, intended_use=intended_use or "")
    about = f"data set {data}, with example records to replace by yours, see README.md."
    return _created(name, about, "fairpate run settings.yaml", kind=kind, data=data, files=files)
