"""`fairpate tokens`: who may ask a run's service. For the operator; a service sees a change within a second."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fairpate.app.cli.commands import Commands
from fairpate.app.cli.options import RunFolder
from fairpate.app.terminal.output import Output, say
from fairpate.app.terminal.progress import waiting

app = Commands(help="Who may ask a run's service, until when, and how much. Works while it runs.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Whose token; charges and limits are kept by name.")]
Epsilon = Annotated[float | None, typer.Option(help="Own privacy budget, within the shared one.")]
Queries = Annotated[int | None, typer.Option(help="New queries, ever.")]
PerDay = Annotated[float | None, typer.Option(help="New queries at once, refilled evenly over a day.")]


@app.command("add")
def add_token(
    folder: RunFolder,
    name: Name,
    role: Annotated[Literal["analyst", "operator"], typer.Option(help="What it may see.")] = "analyst",
    epsilon: Epsilon = None,
    queries: Queries = None,
    per_day: PerDay = None,
    expires: Annotated[str | None, typer.Option(help="30d, 12h, or a date; without: never.")] = None,
) -> Output:
    """Make a token for a new name and print it, once: only its digest is kept."""
    from fairpate.app.serving import tokens

    limit = tokens.own_limit(epsilon=epsilon, queries=queries, per_day=per_day)
    return _shown_once(name, tokens.add(folder, name, role=role, limit=limit, expires=expires))


@app.command("list")
def list_tokens(folder: RunFolder) -> Output:
    """Print whose tokens there are, until when, and their limits; also limits that the ledger alone knows."""
    from fairpate.app.serving import tokens

    with waiting("ledger"):
        return tokens.describe(folder)


@app.command("limit")
def limit_name(
    folder: RunFolder, name: Name, epsilon: Epsilon = None, queries: Queries = None, per_day: PerDay = None
) -> Output:
    """Give a name this limit instead of the one it has; what it was charged with before counts."""
    from fairpate.app.serving import tokens

    own = tokens.own_limit(epsilon=epsilon, queries=queries, per_day=per_day)
    tokens.limit(folder, name, own)
    return Output(facts={"name": name, "limit": own}, words=f"{name}: has this limit from now on")


@app.command("expire")
def expire_tokens(
    folder: RunFolder, name: Name, when: Annotated[str, typer.Argument(help="30d, 12h, 0s, a date, or never.")]
) -> Output:
    """Let a name's tokens end."""
    from fairpate.app.serving import tokens

    tokens.expire(folder, name, when)
    return Output(facts={"name": name, "ends": when}, words=f"{name}: its tokens end {when}")


@app.command("rotate")
def rotate_token(
    folder: RunFolder,
    name: Name,
    keep_old: Annotated[str, typer.Option(help="How long the old one stays good: 1h, 2d.")] = "0s",
) -> Output:
    """Make another token for a name and print it, once."""
    from fairpate.app.serving import tokens

    return _shown_once(name, tokens.rotate(folder, name, keep_old=keep_old))


@app.command("revoke")
def revoke_tokens(folder: RunFolder, name: Name) -> Output:
    """Take a name's tokens away; what it was charged with stays in the ledger."""
    from fairpate.app.serving import tokens

    tokens.revoke(folder, name)
    return Output(facts={"name": name, "revoked": True}, words=f"{name}: has no token any more")


def _shown_once(name: str, token: str) -> Output:
    say(f"This is {name}'s token; it is shown only now.")
    return Output(facts={"name": name, "token": token}, words=token)
