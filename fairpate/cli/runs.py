"""Commands that train and compare methods, and that write or check what is published of a run.

`run`, `compare` and `aggregate` train and release; `methods` and `specify` look up what there is and what was achieved;
`report`, `card`, `bundle` and `verify` write and check what a finished run publishes. Functions are imported inside the
commands, so that `fairpate --help` does not wait for the libraries that train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from fairpate.cli.base import (
    EXAMPLES,
    ConfigFile,
    DataDir,
    Delta,
    Epsilon,
    FairAt,
    Mode,
    Out,
    Overrides,
    RunFolder,
    Sets,
    Weights,
    Yes,
    as_overrides,
    checked_arguments,
    data_named,
    example_files,
    in_modes,
    with_data_dir,
)
from fairpate.config import BACKBONES, ConfigError, fair_rule
from fairpate.config_reader import Override, read_yaml
from fairpate.files import check_output_file, check_output_folder
from fairpate.terminal import Output, facts, waiting
from fairpate.types import DEFAULT_NOTION, UsageError

if TYPE_CHECKING:
    from fairpate.methods.base import Method


def demo(
    out: Annotated[Path, typer.Option(help="Folder of the demo. What is finished in it is kept.")] = Path("runs/demo"),
) -> Output:
    """Compare private methods on an embedded table of people, and state the outcome in two sentences: one minute."""
    from fairpate.cli.demo import demo as shown

    check_output_folder(out, "--out")
    return shown(out)


class RunCommand(TyperCommand):
    """Name the methods in the help of `--method`, without loading them for every command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from fairpate.methods.base import method_names

        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.name == "method":
                parameter.help = f"One of {', '.join(method_names())}; or your own, as module:Class."
        super().format_help(ctx, formatter)


def run(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="Name of the method."), Sets("method")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A name from `fairpate data list`, or a declaration of your own records (.yaml)."),
        Sets("data.name", "data.declaration"),
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the model and its training; private noise never uses it."), Sets("seed")
    ] = None,
    fair_at: FairAt = None,
    overrides: Overrides = None,
    weights: Weights = None,
    out: Out = None,
    data_dir: DataDir = None,
    release_of: Annotated[
        Path | None,
        typer.Option(
            help="Run whose release is reused, at no privacy cost; without CONFIG, its configuration is used too."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show the privacy cost of the run and how much signal its noise would leave."
        ),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the target's queries to keep for later, such as 30% for `fairpate serve`; a larger share "
            "needs more noise.",
        ),
        Sets("aggregator.keep"),
    ] = None,
    yes: Yes = False,
) -> Output:
    """Train one method, and publish its model, metrics and report with the privacy guarantee.

    Without arguments: FairPATE on an embedded data set, about a minute. With --data, --method or --epsilon and no
    CONFIG, all other settings are chosen for the data set from public facts.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.methods.base import configured, merged, start_values
    from fairpate.run.folder import open_run_directory
    from fairpate.run.run import run_method
    from fairpate.terminal import Reporter

    if out is not None:  # checked first, because choosing settings may have to count public records
        check_output_folder(out, "--out")
    if config is not None and {"files", "label"} <= read_yaml(config).keys():
        raise ConfigError(f"{config}: is a declaration of records, not a configuration; give it with --data {config}.")
    given = data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "seed": seed}
    given |= {"aggregator.keep": None if keep is None else _share_of(keep)}
    given |= {"evaluation.fair_at": fair_at}
    options: list[Override] = [*(overrides or []), *as_overrides(given)]
    # In front of the user's options, which are applied later and win.
    if release_of is not None and config is None:
        config = open_run_directory(release_of)[0].config
        options = ["out=null", *options]  # not the folder of the run whose release is used
    # Any of the three starts from what fits the data set; with none, from the embedded example.
    path = config or (EXAMPLES / "color_digits.yaml" if (method, data, epsilon) == (None, None, None) else None)
    start = start_values(options, method) if path is None else read_yaml(path)
    if weights is not None:
        values = merged(start, options, method=method)
        models = {
            name: values[name].get("model") for name in ("teachers", "student") if isinstance(values.get(name), dict)
        }
        named = {name: str(model.get("name")) if isinstance(model, dict) else "none" for name, model in models.items()}
        starting = [section for section, name in named.items() if name in BACKBONES]
        if not starting:
            raise ConfigError(
                f"--weights: expected a model.name among {', '.join(BACKBONES)}, got {' and '.join(named.values())}; "
                f"set {' or '.join(f'{section}.model.name' for section in named)}."
            )
        options += as_overrides({f"{section}.model.weights": weights for section in starting})
    found = configured(start if path is None else path, options, method=method)
    placed = found.model_copy(update={"out": out or found.out, "data": with_data_dir(found.data, data_dir)})
    if dry_run:
        is_named = method is not None or any(each.startswith("method=") for each in overrides or [])
        options += as_overrides({"data.data_dir": data_dir})
        return _dry_run(placed, release_of, None if path is not None or is_named else options)
    return outcome(run_method(placed, Reporter(asks=not yes), release_of=release_of, with_graph=True))


def _share_of(text: str) -> float:
    """Return the share that ``text`` says, such as 30% or 0.3."""
    try:
        return float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"--keep: expected a share such as 30% or 0.3, got {text!r}.") from None


def _dry_run(config: Method, release_of: Path | None, overrides: Sequence[Override] | None) -> Output:
    """Print what a run of ``config`` would spend; with ``overrides``, also what other voters would do under them."""
    from fairpate.methods.base import check_release_of
    from fairpate.run import run
    from fairpate.run.context import RunDirectory
    from fairpate.run.folder import check_run_directory, own_folder
    from fairpate.run.learn import load_for
    from fairpate.run.run import check_data

    config.require_trainable()
    folder = own_folder(check_run_directory(config), config)
    # By the statement and not the model: labels are released without a model where votes have no features.
    spent = f"{folder.root} has its release already" if folder.statement.exists() else None
    source = folder
    if release_of is not None:
        check_release_of(config, release_of)
        spent, source = f"the release of {release_of} is used again", RunDirectory(root=release_of)
    with waiting("data"):
        dataset = load_for(source, config.data)
        check_data(config, dataset)
        cost = run.planned_cost(config, dataset)
        found = [run.forecast(config, dataset, cost)]
    if overrides is not None:
        with waiting("voters"):
            found += run.other_voters(overrides, config.method)
    found = run.measured_before(folder.root.parent, found, config.data.name)
    return Output(
        facts={"method": config.method, "data": dataset.name, "cost": cost, "spent_already": spent, "forecasts": found},
        words=run.describe(dataset.name, cost, spent, found),
    )


Sweep = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        help="YAML file with methods, data sets, seeds and grids; with --figures, also the results.parquet of a "
        "finished comparison or its folder.",
    ),
]
Example = Annotated[str | None, typer.Option(help="Run an example instead of a CONFIG: quick or demo.")]
SweepFolder = Annotated[
    Path | None, typer.Option(help="Folder of the comparison. Cells that are finished in it are kept."), Sets("out")
]


def _sweep_file(config: Path | None, example: str | None) -> Path:
    """Return the file of the sweep that the user named in one of two ways."""
    if (config is None) == (example is None):
        got = "neither" if config is None else "both"
        raise UsageError(f"CONFIG: expected a file, or --example quick, got {got}.")
    if example is None:
        assert config is not None
        return config
    (file, *_) = example_files(example)
    if file.suffix != ".yaml":
        raise UsageError(
            f"--example: {example} is not a comparison; copy it with `fairpate new NAME --example {example}`."
        )
    return file


def _compare(
    config: Sweep = None,
    example: Example = None,
    fair_at: FairAt = None,
    overrides: Overrides = None,
    out: SweepFolder = None,
    data_dir: DataDir = None,
    yes: Yes = False,
) -> Output:
    from fairpate.run.compare import compare_methods, comparison_outcome
    from fairpate.run.sweep import load_sweep
    from fairpate.terminal import Reporter

    config = _sweep_file(config, example)
    asked = [] if fair_at is None else [f"settings.evaluation.fair_at={fair_at}"]
    sweep = load_sweep(config, [*(overrides or []), *asked], data_dir=data_dir)
    # Now rather than after hours of training.
    check_output_folder(out or sweep.out or Path("runs"), "--out")
    reporter = Reporter(asks=not yes)
    comparison = compare_methods(
        sweep, out=out, data_dir=data_dir, folder=config.parent, title=config.stem, reporter=reporter
    )
    return comparison_outcome(comparison)


_MM_PER_INCH = 25.4


def _compare_and_draw(
    config: Sweep = None,
    example: Example = None,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for vector graphics of the frontier, to print in a paper."),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="pdf (default), svg or png; repeat it for several.")
    ] = None,
    columns: Annotated[
        int | None, typer.Option(help="Width of a figure in columns of the journal: 1 (default) or 2.")
    ] = None,
    width_mm: Annotated[float | None, typer.Option(help="Width in mm, instead of 85 or 178 mm.")] = None,
    font_size: Annotated[float, typer.Option(help="Size of all text in a figure, in points.")] = 8.0,
    notion: Annotated[
        str | None, typer.Option(help="Notion of fairness that figures show; default: that of the comparison.")
    ] = None,
    fair_at: FairAt = None,
    overrides: Overrides = None,
    out: SweepFolder = None,
    data_dir: DataDir = None,
    yes: Yes = False,
) -> Output:
    from fairpate.fairness.rates import DEFAULT, notion_named
    from fairpate.report.figures import FigureStyle
    from fairpate.run.compare import write_figures

    assert figures is not None
    given, config = config, _sweep_file(config, example)
    if columns is not None and width_mm is not None:
        raise UsageError("--columns and --width-mm: expected one, got both; leave one out.")
    if not config.exists():
        raise ConfigError(f"{config}: not found; give a YAML file, a results.parquet or the folder of a comparison.")
    check_output_folder(figures, "--figures")
    # Before the comparison, which may take hours: a wrong style or notion is refused now.
    with checked_arguments():
        style = FigureStyle(
            columns=1 if columns is None else columns,
            font_size=font_size,
            width_in=None if width_mm is None else width_mm / _MM_PER_INCH,
            formats=tuple(formats or ["pdf"]),
        )
        chosen = None if notion is None else notion_named(notion)
    # Finished results are drawn, and nothing runs.
    if config.is_dir() or config.suffix == ".parquet":
        unread = {"--fair-at": fair_at, "--set": overrides, "--out": out, "--data-dir": data_dir, "--yes": yes}
        for option in (option for option, value in unread.items() if value):
            raise UsageError(f"{option}: not read where finished results are drawn and nothing runs; leave it out.")
        files = write_figures(config, style=style, notion=chosen or DEFAULT, out=figures)
        return Output(facts={"figures": files}, words="\n".join(map(str, files)))
    compared = _compare(given, example, fair_at, overrides, out, data_dir, yes)
    if compared.code:  # some cells failed: figures would miss them
        return compared
    results = compared.facts["files"]["results"]
    files = write_figures(results, style=style, notion=chosen or compared.facts["notion"], out=figures)
    words = Group(compared.words, Text("\n".join(map(str, files))))  # type: ignore[arg-type]
    return replace(compared, facts={**compared.facts, "figures": files}, words=words)


compare = in_modes(
    "compare",
    """Run methods over data sets, seeds and grids, and draw their privacy, fairness and accuracy on one frontier.

    Only cells without a result run, so the same command resumes a comparison.""",
    Mode(function=_compare),
    Mode(function=_compare_and_draw, option="figures"),
)


def select(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of a comparison: the settings to choose from.")
    ],
    epsilon: Annotated[
        float,
        typer.Option(
            min=1e-6,
            help="Epsilon of the choice, for validation records alone; with --trials, of all trials and the choice.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the choice, and for the run of the chosen settings.")],
    trials: Annotated[
        float | None,
        typer.Option(
            help="Expected number of trials: settings drawn at random are trained a secret number of times, and the "
            "best model is published. Without it, all settings must share one release.",
        ),
    ] = None,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            metavar="GROUP=SHARE",
            help="Public share of a group among records, once for each group; scores then weigh all groups equally.",
        ),
    ] = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    yes: Yes = False,
) -> Output:
    """Choose among settings by private validation records, inside the guarantee, and publish the chosen one.

    Settings that learn from one release train at no cost, and one is drawn by the exponential mechanism. With --trials
    each training touches private records, and the best of a secret number of them is published. The statement then
    says that tuning is accounted for.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.privacy.secret_trials import MOST_TRIALS
    from fairpate.run.choice import select_by_trials, select_settings
    from fairpate.run.sweep import cells_of, load_sweep
    from fairpate.terminal import Reporter

    check_output_folder(out, "--out")
    cells = cells_of(load_sweep(config, overrides or [], data_dir=data_dir), folder=config.parent, data_dir=data_dir)
    given: dict[str, float] = {}
    for each in shares or ():
        # From the right: a group's name may hold an equals sign.
        name, _, share = each.rpartition("=")
        try:
            given[name] = float(share)
        except ValueError:
            raise UsageError(f"--share {each}: expected GROUP=SHARE with a number, such as F=0.5.") from None
    configs = [cell.config for cell in cells]
    common: dict[str, Any] = {"epsilon": epsilon, "out": out, "group_shares": given or None}
    common["reporter"] = Reporter(asks=not yes)
    if trials is None:
        return outcome(select_settings(configs, **common))
    if not 1 < trials <= MOST_TRIALS:
        raise UsageError(f"--trials: expected a number above 1 and at most {MOST_TRIALS:g}, got {trials:g}.")
    return outcome(select_by_trials(configs, expected_trials=trials, **common))


def report(folder: RunFolder, fair_at: FairAt = None) -> Output:
    """Write the reports and model.onnx of a finished run again; nothing is trained or charged.

    With --fair-at they judge the model by another rule, which the run then keeps.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.run.folder import finished_run
    from fairpate.run.run import run_method
    from fairpate.terminal import Reporter

    # The folder may have been moved: it is the output folder now, not the one in its configuration.
    found, config = finished_run(folder)
    placed = config.model_copy(update={"out": found.root})
    if fair_at is not None:
        with checked_arguments():
            rule = fair_rule(fair_at)
        placed = placed.model_copy(update={"evaluation": config.evaluation.model_copy(update={"fair_at": rule})})
    with waiting("report"):
        return outcome(run_method(placed, Reporter(quiet=True), with_graph=True))


def card(
    folder: RunFolder,
    intended_use: Annotated[str | None, typer.Option(help="What the model is for, in your words.")] = None,
    out_of_scope: Annotated[str | None, typer.Option(help="Uses that the model is not meant for.")] = None,
    contact: Annotated[str | None, typer.Option(help="Contact for questions about the model.")] = None,
) -> Output:
    """Write the privacy-and-fairness card of a published model as HTML and JSON."""
    from fairpate.run.publication import write_card

    with waiting("card"):
        files = write_card(folder, intended_use=intended_use, out_of_scope=out_of_scope, contact=contact)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


def assess(
    predictions: Annotated[
        Path, typer.Argument(help="CSV, Parquet or Feather file with a row per record: its prediction and its groups.")
    ],
    group: Annotated[
        list[str],
        typer.Option(help="Column of groups; repeat it for several columns, whose intersections are compared too."),
    ],
    prediction: Annotated[
        str, typer.Option(help="Column of predicted classes; an empty one is a refusal.")
    ] = "prediction",
    label: Annotated[str | None, typer.Option(help="Column of true classes: adds accuracy and all gaps.")] = None,
    score: Annotated[
        str | None, typer.Option(help="Column of scores instead of classes; a score above the median is selected.")
    ] = None,
    selected: Annotated[
        str | None, typer.Option(help="The class that counts as selected; default: the last by name of two.")
    ] = None,
    person: Annotated[
        str | None, typer.Option(help="Column of persons with several records each; intervals are then over persons.")
    ] = None,
    fair_at: FairAt = None,
    least_cell: Annotated[
        int, typer.Option(help="Groups with fewer records (or persons) are not shown; 1 shows all.")
    ] = 10,
    out: Annotated[
        Path | None, typer.Option(help="The page to write; default: FILE-fairness.html in this folder.")
    ] = None,
) -> Output:
    """Report how predictions made elsewhere treat groups: rates, impact ratios, gaps, intervals.

    The numbers are exact, without any privacy guarantee.
    """
    from datetime import UTC, datetime

    from fairpate.run.assess import assess_predictions
    from fairpate.run.context import write_text

    with checked_arguments():
        rule = None if fair_at is None else fair_rule(fair_at)
    with waiting("assess"):
        found = assess_predictions(
            predictions,
            groups=group,
            prediction=prediction,
            label=label,
            score=score,
            selected=selected,
            person=person,
            least_cell=least_cell,
            fair_at=rule,
        )
        page = out or Path(f"{predictions.name.split('.')[0]}-fairness.html")
        write_text(page, found.html(made_on=datetime.now(UTC).date().isoformat()), private=True)
    words = Group(found, Text(""), facts([("page", str(page))]))
    return Output(facts=found.to_json() | {"file": page}, words=words)


def aggregate(
    votes: Annotated[
        Path,
        typer.Argument(help="CSV or Parquet file: a row per public record, a column per voter."),
        Sets("votes.path"),
    ],
    unit: Annotated[
        str,
        typer.Option(
            help="What one voter represents, such as hospital: the unit that is protected. You attest that each unit "
            "changes at most one vote of a query."
        ),
        Sets("votes.unit"),
    ],
    classes: Annotated[
        str, typer.Option(help="All classes, separated by commas; they are public."), Sets("votes.classes")
    ],
    voters: Annotated[
        int | None,
        typer.Option(min=2, help="The file has a column per class, with counts of this many voters."),
        Sets("votes.num_voters", "votes.are_counts"),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Numeric columns to train a student on, separated by commas."),
        Sets("votes.features"),
    ] = None,
    id_column: Annotated[
        str, typer.Option("--id", help="Column with the names of the public records."), Sets("votes.id")
    ] = "record_id",
    group: Annotated[
        str, typer.Option(help="Column with the groups of the public records."), Sets("votes.group")
    ] = "group",
    test: Annotated[
        Path | None,
        typer.Option(help="File of test records to evaluate the student on: the same columns, and true labels."),
        Sets("votes.test"),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Column with the true labels of the test records; default: label."),
        Sets("votes.label"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the data set in the odometer; default: that of the file."),
        Sets("votes.name"),
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="Parameters of the mechanism, instead of a target, as in {threshold: 8, threshold_stddev_votes: "
            "2, noise_stddev_votes: 1}."
        ),
        Sets("aggregator.mechanism"),
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
) -> Output:
    """Release labels from votes made elsewhere; with features, also train a student on the labels."""
    from fairpate.report.records import Guarantee
    from fairpate.run.context import read_statement
    from fairpate.run.publication import read_claims
    from fairpate.run.run import aggregate as run_aggregator
    from fairpate.terminal import Reporter

    # The default is None, which distinguishes a label that was given from the default name.
    if label is not None and test is None:
        raise UsageError("--label: read only together with --test; add that, or leave --label out.")
    if not votes.is_file():
        raise ConfigError(f"{votes}: not found; give the CSV or Parquet file of the votes.")
    columns = {"id": id_column, "group": group, "features": _listed(features), "name": name}
    voting = {"path": str(votes), "unit": unit, "classes": _listed(classes), "num_voters": voters}
    tested = {"test": None if test is None else str(test), "label": label or "label"}
    given = {"votes": voting | columns | tested | {"are_counts": voters is not None}}
    options: list[Override] = as_overrides({"target.epsilon": epsilon, "target.delta": delta, "out": out})
    options += [] if mechanism is None else [f"aggregator.mechanism={mechanism}"]
    run = run_aggregator(given, [*(overrides or []), *options], Reporter())
    statement = read_statement(run)
    queries = statement.queries
    assert queries is not None
    rows = [
        Guarantee.of(statement).row,
        ("attested", f"each {statement.unit} changes at most one vote of a query"),
        ("labels released", f"{queries.answered} of {queries.submitted} queries: {run.labels}"),
    ]
    if run.student.exists():
        rows += [*read_claims(run).measured_rows, ("model", str(run.student))]
    files = {"labels": run.labels, "model": run.student if run.student.exists() else None, "statement": run.statement}
    return Output(
        facts={"run": run.root, "statement": statement, "files": files},
        words=facts([*rows, ("statement", str(run.statement))]),
    )


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to describe; without one, lists all.")] = None,
) -> Output:
    """List all methods with what they protect and need, or describe one with its paper and all settings."""
    from fairpate.cli.summaries import describe_method, list_methods

    return list_methods() if name is None else describe_method(name)


def specify(
    epsilon: Annotated[float | None, typer.Option(help="Largest privacy budget.")] = None,
    disparity: Annotated[float | None, typer.Option(help="Largest gap of demographic parity.")] = None,
    fairness: Annotated[
        list[str] | None,
        typer.Option(help="Largest gap of another notion, as in equalized_odds=0.1; repeat it for several."),
    ] = None,
    fair_at: FairAt = None,
    coverage: Annotated[float | None, typer.Option(help="Smallest share of records that are answered.")] = None,
    accuracy: Annotated[float | None, typer.Option(help="Smallest accuracy on answered records.")] = None,
    frontier: Annotated[Path | None, typer.Option(help="A results.parquet; default: the newest in runs/.")] = None,
    data: Annotated[str | None, typer.Option(help="Only results on this data set.")] = None,
    transfer: Annotated[
        Path | None,
        typer.Option(help="A second results.parquet, in which the configurations chosen in the first are looked up."),
    ] = None,
) -> Output:
    """Find the most accurate configuration of a comparison that meets your limits, or the nearest ones."""
    from fairpate.run.specify import Demand, describe_answer, fairness_limits, specify_guarantees

    with checked_arguments():
        limits = fairness_limits(fairness or [])
        if fair_at is not None:
            rule = fair_rule(fair_at)
            if rule.notion in limits or (rule.notion == DEFAULT_NOTION and disparity is not None):
                raise UsageError(f"--fair-at: {rule.notion} is limited twice; leave one out.")
            limits |= {rule.notion: rule.limit}
        demand = Demand(epsilon=epsilon, disparity=disparity, coverage=coverage, accuracy=accuracy, fairness=limits)
    with waiting("specify"):
        answer = specify_guarantees(demand, frontier, data=data, transfer_to=transfer)
    return Output(facts=answer.to_json(), words=describe_answer(answer))


def audit(
    folder: RunFolder,
    canaries: Annotated[
        int, typer.Option(min=2, help="Number of canaries whose presence an attacker guesses.")
    ] = 20_000,
    on_private: Annotated[
        bool,
        typer.Option("--on-private", help="Add canaries to the private records instead; the result stays in private/."),
    ] = False,
) -> Output:
    """Attack shadow releases of a finished run, and compare the proved lower bounds with the epsilon that it claims.

    The records are made up unless --on-private is given, and nothing is charged. Exit code 1 if the claim is refuted.
    """
    from fairpate.run.audit import audit_run
    from fairpate.terminal import Reporter

    found, page = audit_run(folder, reporter=Reporter(), num_canaries=canaries, on_private=on_private)
    lines = []
    for each in found.releases:
        kinds = {"this run": each.found, f"control with {each.noise_words}": each.control}
        lines += [f"{each.title}, {name}: epsilon >= {of.words(found.delta)}" for name, of in kinds.items()]
    return Output(
        facts={**found.to_json(), "page": page},
        words="\n".join([*lines, found.headline, found.power_words, str(page)]),
        code=int(found.refuted),
    )


def bundle(
    folder: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="The .zip file to write; default: bundle.zip in the run directory.")
    ] = None,
) -> Output:
    """Write all that a finished run publishes to one zip file, for others to verify.

    Prints the file and its digest, which you may sign or publish elsewhere.
    """
    from fairpate.run.bundle import write_bundle

    with waiting("bundle"):
        path, digest = write_bundle(folder, out)
    return Output(facts={"file": path, "head": digest}, words=f"{path}\n{digest}")


def dossier(
    folder: RunFolder,
    form: Annotated[str, typer.Option("--for", help="The form: registry, nist or egress.")],
    out: Annotated[Path | None, typer.Option(help="The .json file to write; default: in the run directory.")] = None,
    key: Annotated[Path | None, typer.Option(help="File of `fairpate site key`, to sign with.")] = None,
) -> Output:
    """Fill in a form about a published run: registry entry, NIST's hazards, or egress report.

    Each line names the public fields that it was read from, or is left to the operator, or is open.
    """
    from fairpate.cli.dossier import FORMS, make_dossier

    if form not in FORMS:
        raise UsageError(f"--for: expected one of {', '.join(FORMS)}, got {form}.")
    if out is not None:
        check_output_file(out, "--out", suffixes=(".json",))
    with waiting("dossier"):
        files, counts = make_dossier(folder, form, key=key, out=out)
    said = f"{counts['filled']} lines filled in, {counts['operator']} for the operator, {counts['open']} open"
    return Output(facts={"files": files, "lines": counts}, words="\n".join([*map(str, files.values()), said]))


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            help="A file of `fairpate bundle`, the folder that it was unpacked to, or a signed dossier (.json)."
        ),
    ],
    head: Annotated[str | None, typer.Option(help="Digest of the bundle, as published elsewhere.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The operator's public key, to check the signature of a dossier.")
    ] = None,
) -> Output:
    """Verify a bundle: its files, epsilon by a second accountant, model and card. Exit code 1 if one differs.

    For a dossier, verify its signature.
    """
    from fairpate.run.bundle import verify_bundle

    if path.suffix == ".json":
        from fairpate.cli.dossier import verify_dossier

        if head is not None:
            raise UsageError("--head: applies to bundles only; verify a dossier with --key.")
        found = verify_dossier(path, key=key)
        words = f"signed by this key: {found['for']}, of {len(found['files'])} files"
        return Output(facts={"holds": True, "for": found["for"], "files": found["files"]}, words=words)
    if key is not None:
        raise UsageError("--key: applies to dossiers only; verify a bundle with its published --head.")

    with waiting("verify"):
        verdict = verify_bundle(path, head=head)
    lines = [f"checked      {line}" for line in verdict.checked]
    lines += [f"differs      {line}" for line in verdict.differs]
    lines += [f"not checked  {line}" for line in verdict.not_checked]
    return Output(
        facts={"holds": verdict.holds, **asdict(verdict)},
        words="\n".join([*lines, f"head         {verdict.digest}", verdict.words]),
        code=int(not verdict.holds),
    )
