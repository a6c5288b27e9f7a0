"""The command line: lists all commands in their order; each is a function in the module of its subject."""

from functools import partial

from fairpate.cli import cluster, runs, services, sites
from fairpate.cli.commands import Commands, exit_with_code, options

_BEGIN, _TRAIN, _PUBLISH, _OPERATE = "Begin", "Train and compare", "Publish and verify", "Serve and keep accounts"

app = Commands(
    "Train classifiers that are private and fair, compare methods, and serve private answers.\n\n"
    "Begin with `fairpate demo`: a minute on an embedded table of loans. `fairpate run --data NAME --epsilon 2` "
    "trains on another data set.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.callback(invoke_without_command=True)(options)
app.command(rich_help_panel=_BEGIN)(runs.demo)
app.command(cls=runs.RunCommand, rich_help_panel=_BEGIN)(runs.run)
app.command(rich_help_panel=_BEGIN)(services.new)
app.command(rich_help_panel=_BEGIN)(runs.methods)
app.add_typer(services.data_app, name="data", rich_help_panel=_BEGIN)
app.command(rich_help_panel=_BEGIN)(services.version)
for _training in (runs.compare, runs.select, runs.specify, runs.aggregate):
    app.command(rich_help_panel=_TRAIN)(_training)
app.add_typer(sites.site_app, name="site", rich_help_panel=_TRAIN)
for _publishing in (runs.assess, runs.report, runs.card, runs.audit, runs.bundle, runs.log, runs.dossier, runs.verify):
    app.command(rich_help_panel=_PUBLISH)(_publishing)
app.command(rich_help_panel=_OPERATE)(services.serve)
app.command(cls=services.QueryCommand, rich_help_panel=_OPERATE)(services.query)
app.add_typer(services.tokens_app, name="tokens", rich_help_panel=_OPERATE)
app.add_typer(services.ledger_app, name="ledger", rich_help_panel=_OPERATE)
app.add_typer(cluster.cluster_app, name="cluster", rich_help_panel=_OPERATE)
main = partial(exit_with_code, app)
