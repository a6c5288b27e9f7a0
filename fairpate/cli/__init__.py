"""The command line: parse, build, run, close. What each command does is in the file of its subject."""

from __future__ import annotations

from fairpate import __version__
from fairpate.cli import runs, services
from fairpate.cli.base import Commands, exit_with_code
from fairpate.terminal import Output

app = Commands(
    help="Private and fair learning from many teachers, with an epsilon that is true.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=runs.RunCommand)(runs.run)
app.command()(runs.methods)
app.command()(runs.compare)
app.command()(runs.figures)
app.command()(runs.aggregate)
app.command()(runs.specify)
app.command()(runs.plan)
app.command()(runs.filter_cost)
app.command()(runs.card)
app.command()(runs.report)
app.command()(runs.bundle)
app.command()(runs.verify)
app.command()(services.serve)
app.command(cls=services.QueryCommand)(services.query)
app.command()(services.doctor)
app.command()(services.new)


@app.command()
def version() -> Output:
    """Print the version."""
    return Output(facts={"version": __version__}, words=__version__)


app.add_typer(services.data_app, name="data")
app.add_typer(services.ledger_app, name="ledger")
app.add_typer(services.tokens_app, name="tokens")


def main() -> None:
    """Entry point: a user's error ends in one message and exit code 2 (bad usage) or 1, a signal in 128 + number."""
    exit_with_code(app)
