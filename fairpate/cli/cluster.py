"""Commands that set up a Ray cluster."""

from pathlib import Path
from typing import Annotated

import typer

from fairpate.cli import base
from fairpate.terminal import Output
from fairpate.types import UsageError

cluster_app = base.Commands("Set up a Ray cluster, as docs/cluster.md describes.")


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
        from teachers.cluster import own_address

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
