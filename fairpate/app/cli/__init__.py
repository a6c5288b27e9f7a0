"""The command line: parse, build, run, close. What each command does is in the file of its subject."""

from __future__ import annotations

from fairpate import __version__
from fairpate.app.cli import bundles, choices, data, figures, ledger, machine, projects, runs, services, tokens, votes
from fairpate.app.cli.commands import Commands
from fairpate.app.cli.endings import exit_with_code
from fairpate.app.terminal.output import Output

app = Commands(
    help="Private and fair learning from many teachers, with an epsilon that is true.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=runs.RunCommand)(runs.run)
app.command()(choices.methods)
app.command()(runs.compare)
app.command()(figures.figures)
app.command()(votes.aggregate)
app.command()(choices.specify)
app.command()(choices.plan)
app.command()(choices.filter_cost)
app.command()(runs.card)
app.command()(runs.report)
app.command()(bundles.bundle)
app.command()(bundles.verify)
app.command()(services.serve)
app.command(cls=services.QueryCommand)(services.query)
app.command()(machine.doctor)
app.command()(projects.new)


@app.command()
def version() -> Output:
    """Print the version."""
    return Output(facts={"version": __version__}, words=__version__)


app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(tokens.app, name="tokens")


def main() -> None:
    """Entry point: a user's error ends in one message and exit code 2 (bad usage) or 1, a signal in 128 + number."""
    exit_with_code(app)
