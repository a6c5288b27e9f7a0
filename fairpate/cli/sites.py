"""Commands about sites: the keys, plan and audit of one joint release, its coordinator, a site, and a simulation.

Functions are imported inside the commands, so that `fairpate --help` does not wait for the libraries they need.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fairpate.cli import commands
from fairpate.config import ConfigError, Override
from fairpate.files import check_output
from fairpate.terminal import Output, Reporter, is_for_program, say, waiting
from fairpate.types import UsageError

site_app = commands.Commands("Release one result of several sites' private records, which no site shows to anybody.")
_Declaration = Annotated[Path, typer.Option("--data", help="The declaration of the plan, with your own files.")]
_Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="ray.FIELD=VALUE: your own workers; data.weights=FILE: the weights of an encoder, whose digest is in the "
        "plan. The plan fixes all other settings.",
    ),
]
_Wait = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for others at each step.")]


@site_app.command("key")
def make_key(file: Annotated[Path, typer.Argument()]) -> Output:
    """Make a site's private keys, and print the public ones, which `fairpate site plan` needs in its list of sites.

    Args:
        file: File to write, for you alone.
    """
    check_output(file, "FILE", is_file=True)
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
    epsilon: commands.Epsilon = None,
    delta: commands.Delta = None,
    overrides: commands.Overrides = None,
    data_dir: commands.DataDir = None,
    yes: commands.Yes = False,
) -> Output:
    """Plan a release: its method, noise and privacy cost, its sites, and how many of them may be lost or collude.

    Args:
        data: Declaration (.yaml); its file of private records need not be here.
        sites: YAML file with a line `name: key` for every site.
        output: File of the plan to write.
        may_vanish: Number of sites that may be lost during the release.
        may_collude: Number of sites that may collude with the coordinator without exposing the others.
        method: A method whose releases are sums, such as weighted_votes.
    """
    # Before an embedding is fitted, which takes a while.
    check_output(output, "--output", is_file=True, suffixes=(".json",))
    from fairpate.methods.defaults import resolved
    from fairpate.sites import plan as plans

    given = commands.data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "data.data_dir": data_dir}
    roster = plans.read_roster(sites)
    options: list[Override] = [*(overrides or []), *((name, each) for name, each in given.items() if each is not None)]
    config = resolved(options, method, num_sites=len(roster))
    reporter = Reporter(asks=not yes)
    plan = plans.make_plan(config, roster, output, may_vanish=may_vanish, may_collude=may_collude, reporter=reporter)
    facts = {"file": output, "digest": plan.digest, "sites": len(roster), "sums": len(plan.sums)}
    return Output(facts=facts, words=f"{output}: plan {plan.digest}")


def _plan_bytes(plan: Path) -> bytes:
    if not plan.is_file():
        raise ConfigError(f"PLAN: {plan} not found; give the file that `fairpate site plan` wrote.")
    return plan.read_bytes()


@site_app.command("serve")
def serve_plan(
    plan: Annotated[Path, typer.Argument()],
    data: _Declaration,
    out: commands.Out = None,
    data_dir: commands.DataDir = None,
    host: commands.Host = "127.0.0.1",
    port: commands.Port = 8518,
    tls_cert: commands.TlsCert = None,
    tls_key: commands.TlsKey = None,
    wait_s: _Wait = 3600.0,
    log_file: commands.LogFile = None,
    workers: _Workers = None,
) -> Output:
    """Coordinate a planned release: add up what the sites send, learn from the sum, and write a run directory.

    Args:
        plan: The file of the plan.
    """
    _plan_bytes(plan)
    from fairpate.http_server import HttpSettings, TlsFiles
    from fairpate.sites.coordinator import serve

    with commands.checked_arguments():
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
    out: commands.Out = None,
    data_dir: commands.DataDir = None,
    wait_s: _Wait = 3600.0,
    ca: Path | None = None,
    plan: Annotated[str | None, typer.Option(metavar="DIGEST")] = None,
    yes: bool = False,
    workers: _Workers = None,
) -> Output:
    """Take part in a planned release with your own private records, which stay on this machine.

    Args:
        url: Address of the coordinator.
        key: File of `fairpate site key`.
        ca: Certificate authority (PEM) of the coordinator's HTTPS.
        plan: Digest of the only plan to take part in.
        yes: Agree to --plan without being asked, as in a script.
    """
    if yes and plan is None:
        # Otherwise a script that is repeated would agree, and pay, for any plan that the address serves next.
        raise UsageError(
            "--yes: agrees to one plan only; name this plan with --plan DIGEST, which `fairpate site plan` printed."
        )
    if out is not None:
        check_output(out, "--out")
    from fairpate.sites.site import join

    def agree(offer: str) -> bool:
        if not is_for_program():
            say(offer)
        if not yes and (is_for_program() or not sys.stdin.isatty()):
            raise UsageError(
                "--yes: missing, and there is no terminal on which to ask; give --yes to agree to the plan."
            )
        # On standard error: standard output has the result alone.
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


@site_app.command("audit")
def audit_sums(
    plan: Annotated[Path, typer.Argument()],
    canaries: Annotated[int | None, typer.Option(min=2)] = None,
    quick: bool = False,
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None,
) -> Output:
    """Attack the noise that each site of a plan would add with the program of this machine, in simulated sums.

    All sites are simulated, with keys of their own; no private record is read, and nothing is charged. Each site is
    attacked as if all others colluded with the coordinator. Exit code 1 if less noise is found than the plan prices.

    Args:
        plan: The file of the plan; the result is written next to it.
        canaries: Number of canaries: units whose presence an attacker guesses; default: 20,000, and 2,000 with --quick.
        quick: Audit with a tenth of the canaries, in two minutes at most; it may find less, and says what.
        minutes: Longest time for drawing sums, 60 by default and 2 with --quick.
    """
    from fairpate.cli.summaries import audit_output
    from fairpate.run.audit import audit_size
    from fairpate.sites.audit_of_sites import audit_plan
    from fairpate.sites.plan import read_plan

    count, most = audit_size(canaries, minutes, quick=quick)
    declared = read_plan(_plan_bytes(plan), str(plan))
    return audit_output(*audit_plan(declared, plan, reporter=Reporter(), num_canaries=count, minutes=most))


@site_app.command("simulate")
def simulate_plan(
    out: Path,
    sites: Annotated[int, typer.Option(min=2)] = 3,
    data: str = "adult",
    by: Annotated[str | None, typer.Option(metavar="COLUMN[:N]")] = None,
    may_vanish: Annotated[int, typer.Option(min=0)] = 0,
    may_collude: Annotated[int, typer.Option(min=1)] = 1,
    method: str = "weighted_votes",
    epsilon: commands.Epsilon = None,
    options: Annotated[list[str] | None, typer.Option("--option")] = None,
    overrides: commands.Overrides = None,
    data_dir: commands.DataDir = None,
) -> Output:
    """Distribute public records to sites on this machine, which compute one joint release by the real protocol.

    This machine has all the records. If they are your own declared ones, they may be private: your odometer (the total
    of all your releases) then charges this release too.

    Args:
        out: New folder, with a folder for each party.
        sites: Number of sites.
        data: Data set, or declaration (.yaml), whose records are distributed to the sites.
        by: Distribute by this column, or by its first N characters; default: at random.
        may_vanish: Number of sites that may be lost during the release.
        may_collude: Number of sites that may collude with the coordinator.
        method: A method whose releases are sums, such as weighted_votes.
        options: NAME=VALUE: an option of the data set.
    """
    from fairpate.releases.directory import read_json
    from fairpate.sites.simulate import simulate

    settings: list[Override] = list(overrides or [])
    if epsilon is not None:
        settings.append(("target.epsilon", epsilon))
    with waiting("sites"):
        found = simulate(
            commands.data_config(data, options, data_dir),
            out,
            sites=sites,
            by=by,
            method=method,
            overrides=settings,
            may_vanish=may_vanish,
            may_collude=may_collude,
        )
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
