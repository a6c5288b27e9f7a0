"""Commands that set up a Ray cluster, and run jobs on one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fairpate.cli import commands
from fairpate.pages import counted
from fairpate.terminal import Output, is_for_program, listing, say, terminal
from fairpate.types import UsageError

cluster_app = commands.Commands("Set up a Ray cluster and run jobs on it, as docs/cluster.md describes.")


@cluster_app.command("certificates")
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    node: Annotated[Path | None, typer.Option("--node", metavar="FOLDER")] = None,
    addresses: Annotated[list[str] | None, typer.Option("--address")] = None,
    days: Annotated[int, typer.Option(min=1, max=36500)] = 365,
) -> Output:
    """Make the certificates by which a cluster's nodes encrypt their traffic. Without --node: a new authority in DIR,
    once for a cluster. With --node: the certificate of this machine, signed by the authority in DIR, each time that
    Ray starts on it; the command prints the environment variables by which Ray uses it.

    Args:
        folder: Folder of the authority, whose key can admit a machine to the cluster.
        node: Folder for this machine's key and certificate, which replace earlier ones.
        addresses: An IP address or name by which others reach this machine; default: the one that `ray start` takes.
        days: How long the certificate is valid; a machine's ends with the authority's at the latest.
    """
    from teachers.certificates import make_authority, make_node_certificate, variables

    if node is None:
        if addresses:
            raise UsageError("--address: an authority has no addresses; leave --address out, or add --node FOLDER.")
        made = make_authority(folder, days=days)
        words = f"Made the authority {made.certificate}, valid until {made.ends:%Y-%m-%d}. Keep the folder private."
        return Output(facts={"certificate": made.certificate, "ends": made.ends.isoformat()}, words=words)
    if addresses is None:
        from teachers.ray_cluster import own_address

        addresses = [own_address()]
    made = make_node_certificate(folder, node, addresses, days=days)
    environment = variables(node.absolute())
    return Output(
        facts={
            "certificate": made.certificate,
            "addresses": list(made.addresses),
            "ends": made.ends.isoformat(),
            "environment": environment,
        },
        words="\n".join(f"{name}={value}" for name, value in environment.items()),
    )


_On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="ADDRESS",
        envvar="RAY_API_SERVER_ADDRESS",
        help="Dashboard of the cluster's head, to which `ray dashboard` forwards.",
    ),
]
_DASHBOARD = "http://127.0.0.1:8265"


@cluster_app.command("submit", context_settings={"allow_interspersed_args": False})
def submit(
    ctx: typer.Context,
    command: Annotated[str, typer.Argument(metavar="run|compare")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[WORDS]...")] = None,
    on: _On = _DASHBOARD,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> Output:
    """Run `fairpate run` or `fairpate compare` as a job on a cluster: show its log, end with its exit code, and fetch
    what it publishes.

    Options of this command stand before the word run or compare. Configurations are sent with the job; data, and all
    other files that the command names, must be on the cluster. Ctrl-C leaves the job running.

    Args:
        command: Either run or compare.
        words: The arguments of that command. --out is an absolute path on the cluster's head.
        to: Folder on this machine for what the job publishes; default: runs/NAME, after the folder of --out.
    """
    from fairpate.run.jobs import Cluster, plan_job

    group: Any = ctx.find_root().command
    given = group.get_command(ctx, command)
    values = {} if given is None else given.make_context(command, [*(words or [])]).params
    if values.get("as_json"):
        raise UsageError("--json: not passed on to a job; give it before the job's command, as in `submit --json run`.")
    job = plan_job(command, words or [], values, to=to)
    cluster = Cluster(on)
    return _followed(cluster, cluster.submit(job))


@cluster_app.command("follow")
def follow(job: Annotated[str, typer.Argument(metavar="JOB")], on: _On = _DASHBOARD) -> Output:
    """Show the log of a job until it ends, and fetch what it publishes.

    Args:
        job: Name of the job, which `fairpate cluster submit` and `fairpate cluster jobs` print.
    """
    from fairpate.run.jobs import Cluster

    return _followed(Cluster(on), job)


def _followed(cluster: Any, job: str) -> Output:
    """Show a job's log until the job ends, and fetch what it publishes."""
    told, console = cluster.told(job), terminal(stderr=is_for_program())
    if not is_for_program():
        say(f"Job {job} on {cluster.address}. Ctrl-C leaves it running: {cluster.come_back(job)}.")
    try:
        code, why = cluster.follow(job, lambda line: console.print(line, soft_wrap=True))
        # A comparison in which some cells failed has results of the others.
        is_published = told.out is not None and (code == 0 or (told.command == "compare" and code == 1))
        files = cluster.fetch(job, told, has_failed=code != 0) if is_published else []
    except KeyboardInterrupt:
        return Output(facts={"job": job}, words="", code=130, failure=f"The job goes on: {cluster.come_back(job)}.")
    facts = {"job": job, "on_head": told.out, "folder": told.to if files else None, "files": files}
    words = f"Fetched {counted(len(files), 'public file')} to {told.to}" if files else ""
    return Output(facts=facts, words=words, code=code, failure=f"{why}." if code else None)


@cluster_app.command("jobs")
def jobs(on: _On = _DASHBOARD) -> Output:
    """List the jobs of a cluster that `fairpate cluster submit` submitted, newest first."""
    from datetime import UTC, datetime

    from fairpate.run.jobs import Cluster

    cluster = Cluster(on)
    rows = []
    for each in cluster.jobs():
        name = each.submission_id
        started = datetime.fromtimestamp((each.start_time or 0) / 1000, UTC).strftime("%Y-%m-%d %H:%M")
        rows.append({"job": name, "status": each.status.value, "started": started, "command": cluster.told(name).line})
    table = listing("job", "status", "started (UTC)", "command")
    for row in rows:
        table.add_row(*row.values())
    return Output(facts={"jobs": rows}, words=table)


@cluster_app.command("stop")
def stop(job: Annotated[str, typer.Argument(metavar="JOB")], on: _On = _DASHBOARD) -> Output:
    """End a job; finished work is kept, and the same command, submitted again, resumes.

    Args:
        job: Name of the job.
    """
    from fairpate.run.jobs import Cluster

    was_running = Cluster(on).stop(job)
    words = f"{job}: {'asked to end' if was_running else 'had ended'}"
    return Output(facts={"job": job, "stopped": was_running}, words=words)
