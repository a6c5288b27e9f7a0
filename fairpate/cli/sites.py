"""Commands of a release over sites that share nothing: keys, plans, the coordinator and the sites."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fairpate.cli import base
from fairpate.config import ConfigError
from fairpate.files import check_output_file, check_output_folder, write_atomically
from fairpate.terminal import Output, Reporter, is_for_program, say, waiting
from fairpate.types import UsageError

site_app = base.Commands(
    help="Release one result of several sites' private records, which no site shows to anybody.", no_args_is_help=True
)
_Declaration = Annotated[Path, typer.Option("--data", help="The declaration of the plan, with your own files.")]
_Workers = Annotated[
    list[str] | None,
    typer.Option("--set", help="ray.FIELD=VALUE: your own workers; the plan fixes all other settings."),
]
_Wait = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for others at each step.")]


@site_app.command("key")
def make_key(file: Annotated[Path, typer.Argument()]) -> Output:
    """Make a site's private keys, and print the public ones, for the roster of the plan's author.

    Args:
        file: File to write, for you alone.
    """
    check_output_file(file, "FILE")
    from fairpate.sites.plan import key_text, new_key

    public = key_text(new_key(file).public)
    return Output(facts={"file": file, "key": public}, words=public)


@site_app.command("plan")
def make_plan(
    data: Annotated[str, typer.Argument()],
    sites: Path,
    output: Annotated[Path, typer.Option("--output", "-o")],
    may_vanish: Annotated[int, typer.Option(min=0)] = 0,
    may_collude: Annotated[int, typer.Option(min=1)] = 1,
    method: str = "weighted_votes",
    epsilon: base.Epsilon = None,
    delta: base.Delta = None,
    overrides: base.Overrides = None,
    data_dir: base.DataDir = None,
) -> Output:
    """Plan a release: its method, noise and price, its sites, and how many of them may vanish or collude.

    Args:
        data: Declaration (.yaml); its file of private records need not be here.
        sites: YAML file with a line `name: key` for every site.
        output: File of the plan to write.
        may_vanish: Sites that may be lost on the way.
        may_collude: Sites that may collude with the coordinator without exposing the others.
        method: weighted_votes, record_votes, residual_votes or teacher_votes.
    """
    check_output_file(output, "--output", suffixes=(".json",))
    from fairpate.methods.base import resolved
    from fairpate.sites import plan as plans

    given = base.data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "data.data_dir": data_dir}
    roster = plans.read_roster(sites)
    config = resolved([*(overrides or []), *base.as_overrides(given)], method, num_sites=len(roster))
    plan, embedding = plans.make_plan(
        config, roster, may_vanish=may_vanish, may_collude=may_collude, reporter=Reporter()
    )
    if embedding is not None:
        write_atomically(plans.embedding_file(output), lambda partial: partial.write_bytes(embedding))
    # The plan last: where it is, the embedding that it needs is next to it.
    write_atomically(output, lambda partial: partial.write_bytes(plan.content))
    facts = {"file": output, "digest": plan.digest, "sites": len(roster), "sums": len(plan.sums)}
    return Output(facts=facts, words=f"{output}: plan {plan.digest}")


@site_app.command("serve")
def serve_plan(
    plan: Annotated[Path, typer.Argument()],
    data: _Declaration,
    out: base.Out = None,
    data_dir: base.DataDir = None,
    host: base.Host = "127.0.0.1",
    port: base.Port = 8518,
    tls_cert: base.TlsCert = None,
    tls_key: base.TlsKey = None,
    wait_s: _Wait = 3600.0,
    log_file: base.LogFile = None,
    workers: _Workers = None,
) -> Output:
    """Coordinate a plan: add up what the sites send, learn from the sum, and leave a run folder.

    Args:
        plan: The file of the plan.
    """
    if not plan.is_file():
        raise ConfigError(f"PLAN: {plan} not found; give the file that `fairpate site plan` wrote.")
    from fairpate.http_server import HttpSettings, TlsFiles
    from fairpate.sites.coordinator import serve

    with base.checked_arguments():
        settings = HttpSettings(host=host, port=port, tls=TlsFiles.given(tls_cert, tls_key), log_file=log_file)
    run = serve(
        plan,
        settings,
        declaration=data,
        reporter=Reporter(),
        data_dir=data_dir,
        out=out,
        wait_s=wait_s,
        own=workers or (),
    )
    return Output(facts={"run": run.root}, words=str(run.root))


@site_app.command("join")
def join_plan(
    url: Annotated[str, typer.Argument()],
    data: _Declaration,
    key: Path,
    out: base.Out = None,
    data_dir: base.DataDir = None,
    wait_s: _Wait = 3600.0,
    ca: Path | None = None,
    plan: Annotated[str | None, typer.Option(metavar="DIGEST")] = None,
    yes: bool = False,
    workers: _Workers = None,
) -> Output:
    """Take part in a plan with your own private records, which stay here.

    Args:
        url: Address of the coordinator.
        key: File of `fairpate site key`.
        ca: Certificate authority (PEM) of the coordinator's HTTPS.
        plan: The only plan to take part in.
        yes: Agree to --plan without being asked, as in a script.
    """
    if yes and plan is None:
        # Otherwise a script that is repeated would agree, and pay, for whatever plan the address serves next.
        raise UsageError("--yes: agrees to one plan; name it with --plan DIGEST, which `fairpate site plan` printed.")
    if out is not None:
        check_output_folder(out, "--out")
    from fairpate.sites.site import join

    def agree(offer: str) -> bool:
        if not is_for_program():
            say(offer)
        if not yes and (is_for_program() or not sys.stdin.isatty()):
            raise UsageError("--yes: there is no terminal to ask on; give --yes to agree.")
        return yes or typer.confirm("Take part?", err=True)

    run = join(
        url,
        declaration=data,
        key=key,
        agree=agree,
        reporter=Reporter(),
        digest=plan,
        data_dir=data_dir,
        out=out,
        wait_s=wait_s,
        ca=None if ca is None else str(ca),
        own=workers or (),
    )
    if run is None:
        return Output(facts={"run": None}, words="Nothing was sent, and nothing was charged.", code=1)
    # Of this process alone, which exchanged messages: those that computed tables are gone.
    status = Path("/proc/self/status")
    peak_kb = re.search(r"VmHWM:\s+(\d+)", status.read_text("ascii")) if status.exists() else None  # on Linux
    return Output(facts={"run": run, "largest_mb": peak_kb and int(peak_kb[1]) // 1024}, words=str(run))


@site_app.command("simulate")
def simulate_plan(
    out: Path,
    sites: Annotated[int, typer.Option(min=2)] = 3,
    data: str = "adult",
    by: Annotated[str | None, typer.Option(metavar="COLUMN[:N]")] = None,
    may_vanish: Annotated[int, typer.Option(min=0)] = 0,
    may_collude: Annotated[int, typer.Option(min=1)] = 1,
    method: str = "weighted_votes",
    epsilon: base.Epsilon = None,
    options: Annotated[list[str] | None, typer.Option("--option")] = None,
    overrides: base.Overrides = None,
    data_dir: base.DataDir = None,
) -> Output:
    """Deal public records to sites on this machine, and let them share a release with the real protocol.

    One machine sees them all. A declaration's records may be private: your own odometer counts their release too.

    Args:
        out: New folder, with a folder for each party.
        sites: Number of sites.
        data: Data set, or declaration (.yaml), whose records are dealt to the sites.
        by: Deal by this column, or by its first N characters; default: at random.
        may_vanish: Sites that may be lost on the way.
        may_collude: Sites that may collude with the coordinator.
        method: weighted_votes, record_votes, residual_votes or teacher_votes.
        options: NAME=VALUE: an option of the data set.
    """
    from fairpate.cli.base import data_config
    from fairpate.run.context import read_json
    from fairpate.sites.simulate import simulate

    given = {"--method": method, "--epsilon": epsilon, "--may-vanish": may_vanish, "--may-collude": may_collude}
    planning = [str(word) for option, value in given.items() if value is not None for word in (option, value)]
    planning += [word for value in overrides or [] for word in ("--set", value)]
    with waiting("sites"):
        found = simulate(data_config(data, options, data_dir), out, sites=sites, by=by, planning=planning)
    statement, metrics = read_json(found.run.statement), read_json(found.run.metrics)
    facts = {
        "run": found.run.root,
        "records": list(found.records),
        "epsilon": statement["epsilon"],
        "accuracy": metrics["accuracy"],
        "seconds": round(found.seconds, 1),
        "largest_process_mb": round(found.largest_process_mb),
        "site_mb": found.site_mb,
    }
    return Output(facts=facts)
