"""`fairpate tokens`: who may ask a run's service. For the operator; a service sees a change within a second."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fairpate.app.cli.endings import say
from fairpate.app.cli.options import RunFolder
from fairpate.app.terminal import terminal

app = typer.Typer(
    help="Who may ask a run's service, until when, and how much. Works while it runs.", no_args_is_help=True
)
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
) -> None:
    """Make a token for a new name and print it, once: only its digest is kept."""
    from fairpate.app import tokens

    limit = tokens.own_limit(epsilon=epsilon, queries=queries, per_day=per_day)
    typer.echo(tokens.add(folder, name, role=role, limit=limit, expires=expires))
    say(f"This is {name}'s token; it is shown only now.")


@app.command("list")
def list_tokens(folder: RunFolder) -> None:
    """Print whose tokens there are, until when, and their limits."""
    from fairpate.app import tokens

    terminal().print(tokens.describe(folder))


@app.command("limit")
def limit_name(
    folder: RunFolder, name: Name, epsilon: Epsilon = None, queries: Queries = None, per_day: PerDay = None
) -> None:
    """Give a name this limit instead of the one it has; what it was charged with before counts."""
    from fairpate.app import tokens

    tokens.limit(folder, name, tokens.own_limit(epsilon=epsilon, queries=queries, per_day=per_day))


@app.command("expire")
def expire_tokens(
    folder: RunFolder, name: Name, when: Annotated[str, typer.Argument(help="30d, 12h, 0s, a date, or never.")]
) -> None:
    """Let a name's tokens end."""
    from fairpate.app import tokens

    tokens.expire(folder, name, when)


@app.command("rotate")
def rotate_token(
    folder: RunFolder,
    name: Name,
    keep_old: Annotated[str, typer.Option(help="How long the old one stays good: 1h, 2d.")] = "0s",
) -> None:
    """Make another token for a name and print it, once."""
    from fairpate.app import tokens

    typer.echo(tokens.rotate(folder, name, keep_old=keep_old))
    say(f"This is {name}'s token; it is shown only now.")


@app.command("revoke")
def revoke_tokens(folder: RunFolder, name: Name) -> None:
    """Take a name's tokens away; what it was charged with stays in the ledger."""
    from fairpate.app import tokens

    tokens.revoke(folder, name)
