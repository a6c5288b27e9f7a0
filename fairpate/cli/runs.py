"""Commands that train and compare methods, and commands that write or check what a run publishes.

Functions are imported inside the commands, so that `fairpate --help` does not wait for the libraries that train.
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

from fairpate.cli import commands
from fairpate.config import ConfigError, Override, fair_rule, read_yaml
from fairpate.files import check_output
from fairpate.terminal import Output, Reporter, facts, waiting
from fairpate.types import DEFAULT_NOTION, FairRule, UsageError

if TYPE_CHECKING:
    from fairpate.methods.base import Method


def demo(out: Path = Path("runs/demo")) -> Output:
    """Compare private methods on an embedded table of loans, and state the outcome in a few sentences.

    Takes a minute.

    Args:
        out: Folder of the demo. Finished runs in it are used again.
    """
    from fairpate.run.compare import demo as shown

    check_output(out, "--out")
    return shown(commands.EXAMPLES / "demo.yaml", out)


class RunCommand(TyperCommand):
    """The command `run`. Its help for `--method` lists all methods, which are loaded only when the help is printed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from fairpate.methods.base import method_names

        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.name == "method":
                parameter.help = f"One of {', '.join(method_names())}; or your own, as module:Class."
        super().format_help(ctx, formatter)


def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG")] = None,
    method: Annotated[str | None, commands.Sets("method")] = None,
    data: Annotated[str | None, commands.Sets("data.name", "data.declaration")] = None,
    options_of_data: Annotated[commands.OptionValues, commands.Sets("data.options")] = None,
    epsilon: commands.Epsilon = None,
    delta: commands.Delta = None,
    seed: Annotated[int | None, commands.Sets("seed")] = None,
    fair_at: commands.FairAt = None,
    max_error: Annotated[float | None, commands.Sets("student.reject.max_error")] = None,
    overrides: commands.Overrides = None,
    weights: Annotated[str | None, commands.Sets("backbone.weights")] = None,
    out: commands.Out = None,
    data_dir: commands.DataDir = None,
    release_of: Path | None = None,
    dry_run: bool = False,
    keep: Annotated[str | None, typer.Option(metavar="SHARE"), commands.Sets("aggregator.keep")] = None,
    yes: commands.Yes = False,
) -> Output:
    """Train one method, and publish its model with its privacy guarantee, its metrics and a report.

    Without arguments: train FairPATE on an embedded data set, in a minute. With --data, --method or --epsilon and no
    CONFIG, all other settings are chosen for the data set from public facts.

    Args:
        config: YAML configuration. Without one, settings are chosen for the data set.
        method: Name of the method.
        data: A name from `fairpate data list`, or a declaration of your own records (.yaml).
        seed: Seed of the model and its training; private noise never uses it.
        weights: File with initial weights of every ResNet and DenseNet, or `imagenet` (torchvision).
        max_error: Largest share of wrong answers in every group, with 95 % confidence, such as 0.05: the model leaves
            to a person what it is unsure of.
        release_of: Run whose noisy release is used again, at no privacy cost; without CONFIG, also its configuration.
        dry_run: Only show the privacy cost of the run and how much signal its noise would leave.
        keep: Share of the queries within the privacy budget to keep for `fairpate serve`, such as 30%; a larger share
            needs more noise.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.methods.base import configured
    from fairpate.methods.defaults import resolved
    from fairpate.run.folder import open_run_directory
    from fairpate.run.run import run_method

    if out is not None:  # checked first, because choosing settings may have to count public records
        check_output(out, "--out")
    if config is not None and {"files", "label"} <= read_yaml(config).keys():
        raise ConfigError(
            f"CONFIG: {config} is a declaration of records, not a configuration; give the file with --data {config}."
        )
    given = commands.data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "seed": seed}
    given |= {"evaluation.fair_at": fair_at, "out": out, "data.data_dir": data_dir, "backbone.weights": weights}
    given |= {"student.reject.max_error": max_error}
    if keep is not None:
        try:
            share = float(keep.removesuffix("%").strip()) / (100 if keep.endswith("%") else 1)
        except ValueError:
            raise UsageError(f"--keep: expected a share, got {keep!r}; give one such as 30% or 0.3.") from None
        if share > 1 and not keep.endswith("%"):
            raise UsageError(f"--keep: expected a share of at most 1, got {keep}; give {keep}% or 0.3.")
        given["aggregator.keep"] = share
    options: list[Override] = [*(overrides or []), *commands.settings_of(options_of_data, "data.options")]
    options += [(field, value) for field, value in given.items() if value is not None]
    # In front of the user's options, which are applied later and win.
    if release_of is not None and config is None:
        config = open_run_directory(release_of)[0].config
        options = ["out=null", *options]  # not the folder of the run whose release is used
    is_example = (config, method, data, epsilon) == (None, None, None, None)
    if is_example:
        options = [*_EXAMPLE, *options]
    found = resolved(options, method) if config is None else configured(config, options, method=method)
    if dry_run:
        # Other voters are of interest where the method was chosen for the user.
        is_named = method is not None or any(each.startswith("method=") for each in overrides or [])
        is_chosen = config is None and not is_example and not is_named
        return _dry_run(found, release_of, options if is_chosen else None, is_example=is_example)
    return outcome(run_method(found, Reporter(asks=not yes), release_of=release_of, with_graph=True))


_EXAMPLE: tuple[Override, ...] = (
    ("data.name", "loans"),
    ("method", "fairpate"),
    ("target.epsilon", 1.0),
    ("student.idp3", {"max_disparity": 0.08, "min_count": 25}),
    ("evaluation.least_cell", 1),  # the customers are invented: a small cell tells of nobody
)
"""What `fairpate run` runs if nothing is named."""


def _dry_run(
    config: Method, release_of: Path | None, overrides: Sequence[Override] | None, *, is_example: bool
) -> Output:
    """Return the forecast of a run of ``config``: its privacy cost, and how much signal its noise would leave.

    ``overrides`` are the user's settings if the method was chosen for the user. Other methods that label public records
    by noisy votes are then forecast too, for comparison. ``is_example``: the user named nothing, and the embedded
    example is run.
    """
    from fairpate.methods.base import check_release_of
    from fairpate.methods.defaults import default_method
    from fairpate.pages import delta_caution
    from fairpate.releases.directory import RunDirectory
    from fairpate.run.folder import check_run_directory, load_for
    from fairpate.run.forecast import describe, draft_caution, forecast, other_voters, public_units
    from fairpate.run.run import check_data

    config.require_trainable()
    folder = check_run_directory(config)
    # By the statement and not the model: labels are released without a model where votes have no features.
    spent = f"{folder.root} has its release already" if folder.statement.exists() else None
    source = folder
    if release_of is not None:
        check_release_of(config, release_of)
        spent, source = f"the release of {release_of} is used again", RunDirectory(root=release_of)
    with waiting("data"):
        dataset = load_for(source, config.data)
        check_data(config, dataset)
        cost = config.planned_cost(dataset)
        of_delta = "" if cost is None else delta_caution(cost.delta, public_units(config, dataset), cost.unit)
        caution = "\n".join(filter(None, [of_delta, draft_caution(config.data)]))
        found = [forecast(config, dataset, cost)]
    why = words = None
    if is_example:
        words = "None of --data, --method and --epsilon is given: this is the example on embedded loans."
    elif overrides is not None:
        why = default_method(overrides)[1]
        words = f"{config.method}, because no method was named and {why}"
        with waiting("voters"):
            found += other_voters(overrides, config.method)
    return Output(
        facts={"method": config.method, "data": dataset.name, "cost": cost, "spent_already": spent, "forecasts": found}
        | ({} if why is None else {"chosen_because": why})
        | ({"caution": caution} if caution else {}),
        words=describe(
            dataset.name,
            cost,
            spent,
            found,
            why=words,
            caution=caution,
            with_metrics=config.evaluation.metrics == "private",
        ),
    )


_MM_PER_INCH = 25.4


def compare(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG")] = None,
    example: str | None = None,
    figures: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    formats: Annotated[list[str] | None, typer.Option("--format")] = None,
    columns: Annotated[int | None, typer.Option(min=1, max=2)] = None,
    width_mm: Annotated[float | None, typer.Option(min=25, max=1000)] = None,
    font_size: Annotated[float | None, typer.Option(min=4, max=24)] = None,
    notion: str | None = None,
    fair_at: commands.FairAt = None,
    overrides: commands.Overrides = None,
    out: Annotated[Path | None, commands.Sets("out")] = None,
    data_dir: commands.DataDir = None,
    yes: commands.Yes = False,
) -> Output:
    """Run methods over data sets, seeds and grids, and draw their privacy, fairness and accuracy on one frontier.

    Only cells (a method with its settings, a data set and a seed) without a result run, so the same command resumes a
    comparison.

    Args:
        config: YAML file with methods, data sets, seeds and grids; with --figures, also the results.parquet of a
            finished comparison or its folder.
        example: Run an example instead of a CONFIG: quick or demo.
        out: Folder of the comparison. Cells that are finished in it are kept.
        figures: Folder for vector graphics of the frontier, to print in a paper.
        formats: pdf (default), svg or png; repeat it for several.
        columns: Width of a figure in columns of the journal: 1 (default) or 2.
        width_mm: Width in mm, instead of 85 or 178 mm.
        font_size: Size of all text in a figure, in points (default: 8).
        notion: Notion of fairness that figures show; default: that of the comparison.
    """
    from fairpate.fairness.rates import DEFAULT, notion_named
    from fairpate.report.paper_figures import FigureStyle
    from fairpate.run.compare import compare_methods, comparison_outcome, write_figures
    from fairpate.run.sweep import load_sweep

    of_figures: dict[str, Any] = {"--format": formats, "--columns": columns, "--width-mm": width_mm}
    of_figures |= {"--font-size": font_size, "--notion": notion}
    for option in (option for option, value in of_figures.items() if figures is None and value is not None):
        raise UsageError(f"{option}: read only together with --figures; add --figures, or leave {option} out.")
    if (config is None) == (example is None):
        raise UsageError(
            f"CONFIG: expected a file, or --example quick, got {'neither' if config is None else 'both'}; give one."
        )
    file = config or commands.example_files(str(example))[0]
    if config is None and file.suffix != ".yaml":
        raise UsageError(
            f"--example: {example} is not a comparison; copy its files with `fairpate new NAME --example {example}`."
        )
    if figures is not None:
        if columns is not None and width_mm is not None:
            raise UsageError(
                "--columns and --width-mm: expected one of these options, got both; leave one of them out."
            )
        if not file.exists():
            raise ConfigError(
                f"CONFIG: {file} not found; give a YAML file, a results.parquet or the folder of a comparison."
            )
        check_output(figures, "--figures")
        # Before the comparison, which may take hours: a wrong style or notion is refused now.
        with commands.checked_arguments():
            style = FigureStyle(
                columns=1 if columns is None else columns,
                font_size=8.0 if font_size is None else font_size,
                width_in=None if width_mm is None else width_mm / _MM_PER_INCH,
                formats=tuple(formats or ["pdf"]),
            )
            chosen = None if notion is None else notion_named(notion)
        # Finished results are drawn, and nothing runs.
        if file.is_dir() or file.suffix == ".parquet":
            unread = {"--fair-at": fair_at, "--set": overrides, "--out": out, "--data-dir": data_dir, "--yes": yes}
            for option in (option for option, value in unread.items() if value):
                raise UsageError(
                    f"{option}: not read when --figures draws finished results and nothing runs; leave the option out."
                )
            files = write_figures(file, style=style, notion=chosen or DEFAULT, out=figures)
            return Output(facts={"figures": files}, words="\n".join(map(str, files)))
    asked = [] if fair_at is None else [f"settings.evaluation.fair_at={fair_at}"]
    sweep = load_sweep(file, [*(overrides or []), *asked])
    # Now rather than after hours of training.
    check_output(out or sweep.out or Path("runs"), "--out")
    reporter = Reporter(asks=not yes)
    found = compare_methods(sweep, out=out, data_dir=data_dir, folder=file.parent, title=file.stem, reporter=reporter)
    compared = comparison_outcome(found)
    if figures is None or compared.code:  # where some cells failed, figures would miss them
        return compared
    results = compared.facts["files"]["results"]
    files = write_figures(results, style=style, notion=chosen or compared.facts["notion"], out=figures)
    words = Group(compared.words, Text("\n".join(map(str, files))))  # type: ignore[arg-type]
    return replace(compared, facts={**compared.facts, "figures": files}, words=words)


def select(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    epsilon: Annotated[float, typer.Option(min=1e-06)],
    out: Path,
    trials: float | None = None,
    shares: Annotated[list[str] | None, typer.Option("--share", metavar="GROUP=SHARE")] = None,
    overrides: commands.Overrides = None,
    data_dir: commands.DataDir = None,
    yes: commands.Yes = False,
) -> Output:
    """Choose settings by private validation records, within the privacy guarantee, and publish the chosen model.

    Without --trials, all settings learn from one noisy release, so that training has no further privacy cost. The
    exponential mechanism then draws one of the models. With --trials, each training reads private records, and the best
    of a secret number of trainings is published. The privacy statement accounts for the choice.

    Args:
        config: YAML file of a comparison: the settings to choose from.
        epsilon: Epsilon of the choice, for validation records alone; with --trials, of all trials and the choice.
        out: Folder for the choice, and for the run of the chosen settings.
        trials: Expected number of trials: settings drawn at random are trained a secret number of times, and the best
            model is published. Without it, all settings must share one release.
        shares: Public share of a group among all records; repeat it for each group. All groups then have equal weight
            in the choice.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.privacy.mechanism_events import MOST_TRIALS
    from fairpate.run.choice import select_by_trials, select_settings
    from fairpate.run.sweep import cells_of, load_sweep

    check_output(out, "--out")
    # The settings are written as a comparison, whose cells are checked before anything runs.
    cells = cells_of(load_sweep(config, overrides or []), folder=config.parent, data_dir=data_dir)
    given: dict[str, float] = {}
    for each in shares or ():
        # From the right: a group's name may hold an equals sign.
        name, _, share = each.rpartition("=")
        try:
            given[name] = float(share)
        except ValueError:
            raise UsageError(f"--share: {each} is not a share of a group; give GROUP=SHARE, such as F=0.5.") from None
    configs = [cell.config for cell in cells]
    common: dict[str, Any] = {"epsilon": epsilon, "out": out, "group_shares": given or None}
    common["reporter"] = Reporter(asks=not yes)
    if trials is None:
        return outcome(select_settings(configs, **common))
    if not 1 < trials <= MOST_TRIALS:
        raise UsageError(f"--trials: expected a number above 1 and at most {MOST_TRIALS:g}, got {trials:g}; change it.")
    return outcome(select_by_trials(configs, expected_trials=trials, **common))


def _given_rule(fair_at: str | None) -> FairRule | None:
    """Return the user's definition of fair, the value of `--fair-at`; None if the option was not given."""
    try:
        return None if fair_at is None else fair_rule(fair_at)
    except ValueError as error:
        said = str(error)
        raise ConfigError(f"--fair-at: {said[0].lower()}{said[1:]}") from error


def report(folder: commands.RunFolder, fair_at: commands.FairAt = None) -> Output:
    """Write the reports and model.onnx of a finished run again; nothing is trained or charged.

    With --fair-at the reports judge the model by another rule of fairness, which replaces the run's stored rule.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.run.folder import finished_run
    from fairpate.run.run import run_method

    # The folder may have been moved: it is the output folder now, not the one in its configuration.
    found, config = finished_run(folder)
    placed = config.model_copy(update={"out": found.root})
    if (rule := _given_rule(fair_at)) is not None:
        placed = placed.model_copy(update={"evaluation": config.evaluation.model_copy(update={"fair_at": str(rule)})})
    # Quiet, since stages would look as if the model were trained again.
    with waiting("report"):
        return outcome(run_method(placed, Reporter(quiet=True), with_graph=True))


def card(
    folder: commands.RunFolder,
    intended_use: str | None = None,
    out_of_scope: str | None = None,
    contact: str | None = None,
) -> Output:
    """Write the privacy-and-fairness card of a published model as HTML and JSON.

    Args:
        intended_use: What the model is for, in your words; default: that of the declaration of its records.
        out_of_scope: Uses that the model is not meant for; default: those of the declaration.
        contact: Contact for questions about the model; default: that of the declaration.
    """
    from fairpate.run.publication import write_card

    with waiting("card"):
        files = write_card(folder, intended_use=intended_use, out_of_scope=out_of_scope, contact=contact)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


def assess(
    predictions: Annotated[Path, typer.Argument()],
    group: list[str],
    prediction: str = "prediction",
    label: str | None = None,
    score: str | None = None,
    selected: str | None = None,
    classes: str | None = None,
    person: str | None = None,
    fair_at: commands.FairAt = None,
    least_cell: int = 10,
    out: Path | None = None,
) -> Output:
    """Report how predictions made elsewhere treat groups: rates, impact ratios, gaps, intervals.

    The numbers are exact, without any privacy guarantee.

    Args:
        predictions: CSV, Parquet or Feather file with a row per record: its prediction and its groups.
        group: Column of groups; repeat it for several columns, whose intersections are compared too.
        prediction: Column of predicted classes; an empty value is a refusal.
        label: Column of true classes: adds accuracy and all gaps.
        score: Column of scores instead of classes; a score above the median is selected.
        selected: The class that counts as selected; default: of two classes the last in alphabetical order.
        classes: All classes, separated by commas: needed if predictions and labels each lack a class of the other.
        person: Column of persons with several records each; intervals are then over persons.
        least_cell: Groups with fewer records (or persons) are not shown; 1 shows all.
        out: The page to write; default: FILE-fairness.html in this folder.
    """
    from datetime import UTC, datetime

    from fairpate.releases.directory import write_text
    from fairpate.run.assess import assess_predictions

    rule = _given_rule(fair_at)
    with waiting("assess"):
        found = assess_predictions(
            predictions,
            groups=group,
            prediction=prediction,
            label=label,
            score=score,
            selected=selected,
            classes=None if classes is None else classes.split(","),
            person=person,
            least_cell=least_cell,
            fair_at=rule,
        )
        page = out or Path(f"{predictions.name.split('.')[0]}-fairness.html")
        # Its numbers are exact: for its owner alone.
        write_text(page, found.html(made_on=datetime.now(UTC).date().isoformat()), private=True)
    words = Group(found, Text(""), facts([("page", str(page))]))
    return Output(facts=found.to_json() | {"file": page}, words=words)


def aggregate(
    votes: Annotated[Path, typer.Argument(), commands.Sets("votes.path")],
    unit: Annotated[str, commands.Sets("votes.unit")],
    classes: Annotated[str, commands.Sets("votes.classes")],
    voters: Annotated[int | None, typer.Option(min=2), commands.Sets("votes.num_voters", "votes.are_counts")] = None,
    features: Annotated[str | None, commands.Sets("votes.features")] = None,
    id_column: Annotated[str, typer.Option("--id"), commands.Sets("votes.id")] = "record_id",
    group: Annotated[str, commands.Sets("votes.group")] = "group",
    test: Annotated[Path | None, commands.Sets("votes.test")] = None,
    label: Annotated[str | None, commands.Sets("votes.label")] = None,
    name: Annotated[str | None, commands.Sets("votes.name")] = None,
    epsilon: commands.Epsilon = None,
    delta: commands.Delta = None,
    mechanism: Annotated[str | None, commands.Sets("aggregator.mechanism")] = None,
    overrides: commands.Overrides = None,
    out: commands.Out = None,
    yes: commands.Yes = False,
) -> Output:
    """Release labels from votes made elsewhere; with features, also train a student on the labels.

    Args:
        votes: CSV or Parquet file: a row per public record, a column per voter.
        unit: What one voter represents, such as hospital: the unit that is protected. You attest that each unit changes
            at most one vote of a query.
        classes: All classes, separated by commas; they are public.
        voters: Number of voters, if the file has a column of vote counts per class instead of a column per voter.
        features: Numeric columns to train a student on, separated by commas.
        id_column: Column with the names of the public records.
        group: Column with the groups of the public records.
        test: File of test records to evaluate the student on: the same columns, and true labels.
        label: Column with the true labels of the test records; default: label.
        name: Name under which the data set's privacy cost is totalled; default: that of the file.
        mechanism: Parameters of the noisy vote, instead of --epsilon, as in {threshold: 8, threshold_stddev_votes: 2,
            noise_stddev_votes: 1}.
    """
    from fairpate.releases.directory import read_statement
    from fairpate.report.records import Guarantee
    from fairpate.run.publication import read_claims
    from fairpate.run.run import aggregate as run_aggregator

    # The default is None, which distinguishes a label that was given from the default name.
    if label is not None and test is None:
        raise UsageError("--label: read only together with --test; add --test, or leave --label out.")
    if not votes.is_file():
        raise ConfigError(f"VOTES: {votes} not found; give the CSV or Parquet file of the votes.")
    feature_names, class_names = (
        [each.strip() for each in names.split(",")] if names else [] for names in (features, classes)
    )
    columns = {"id": id_column, "group": group, "features": feature_names, "name": name}
    voting = {"path": str(votes), "unit": unit, "classes": class_names, "num_voters": voters}
    tested = {"test": None if test is None else str(test), "label": label or "label"}
    given = {"votes": voting | columns | tested | {"are_counts": voters is not None}}
    terms = {"target.epsilon": epsilon, "target.delta": delta, "out": out}
    options: list[Override] = list(overrides or [])
    options += [(field, value) for field, value in terms.items() if value is not None]
    options += [] if mechanism is None else [f"aggregator.mechanism={mechanism}"]
    run = run_aggregator(given, options, Reporter(asks=not yes))
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


def methods(name: Annotated[str | None, typer.Argument()] = None) -> Output:
    """List all methods with what they protect and need, or describe one with its paper and all settings.

    Args:
        name: A method to describe; without one, lists all.
    """
    from fairpate.cli.summaries import describe_method, list_methods

    return list_methods() if name is None else describe_method(name)


def specify(
    epsilon: float | None = None,
    disparity: float | None = None,
    fairness: list[str] | None = None,
    fair_at: commands.FairAt = None,
    coverage: float | None = None,
    accuracy: float | None = None,
    max_error: float | None = None,
    frontier: Path | None = None,
    data: str | None = None,
    transfer: Path | None = None,
) -> Output:
    """Find the most accurate configuration of a comparison that meets your limits, or the nearest ones.

    --fair-at asks for what a report calls fair: the whole interval of the gap is within the limit, with every seed.
    --disparity and --fairness limit the gap itself.

    Args:
        epsilon: Largest privacy budget.
        disparity: Largest gap of demographic parity.
        fairness: Largest gap of another notion, as in equalized_odds=0.1; repeat it for several.
        coverage: Smallest share of records that are answered.
        accuracy: Smallest accuracy on answered records.
        max_error: Largest share of wrong answers in every group that a run guarantees, with 95 % confidence.
        frontier: A results.parquet; default: the newest in runs/.
        data: Only results on this data set.
        transfer: A second results.parquet: also show how the configurations chosen in the first do on its data sets.
    """
    from fairpate.run.specify import Demand, describe_answer, fairness_limits, specify_guarantees

    with commands.checked_arguments():
        limits, rule = fairness_limits(fairness or []), _given_rule(fair_at)
        # --disparity is a limit of the default notion.
        limited = [*limits] if disparity is None else [*limits, DEFAULT_NOTION]
        if rule is not None and rule.notion in limited:
            raise UsageError(f"--fair-at: {rule.notion} is limited by another option too; leave one of the two out.")
        demand = Demand(
            epsilon=epsilon,
            disparity=disparity,
            coverage=coverage,
            accuracy=accuracy,
            max_error=max_error,
            fairness=limits,
            fair_at=rule,
        )
    with waiting("specify"):
        answer = specify_guarantees(demand, frontier, data=data, transfer_to=transfer)
    return Output(facts=answer.to_json(), words=describe_answer(answer))


def audit(
    folder: commands.RunFolder,
    canaries: Annotated[int | None, typer.Option(min=2)] = None,
    quick: bool = False,
    on_private: bool = False,
    minutes: Annotated[float | None, typer.Option(min=0.01)] = None,
) -> Output:
    """Attack new releases drawn by a finished run's method, and compare lower bounds on epsilon with the run's claim.

    Every noisy release is attacked by itself and together with the others. The releases are of made-up records unless
    --on-private is given. Nothing is charged to a privacy budget. Exit code 1 if the claim is refuted.

    Args:
        canaries: Number of canaries: records whose presence an attacker guesses; default: 20,000, and 2,000 with
            --quick.
        quick: Audit with a tenth of the canaries, in two minutes at most; it may find less, and says what.
        minutes: Longest time for drawing releases, 60 by default and 2 with --quick; the audit says first how long they
            take, and draws fewer if needed.
        on_private: Add canaries to the private records instead; the result stays in private/.
    """
    from fairpate.cli.summaries import audit_output
    from fairpate.run.audit import audit_run, audit_size

    count, most = audit_size(canaries, minutes, quick=quick)
    found = audit_run(folder, reporter=Reporter(), num_canaries=count, minutes=most, on_private=on_private)
    return audit_output(*found)


def _hub(folder: commands.RunFolder, hub: Path | None = None, licence: str = "unknown") -> Output:
    from fairpate.run.bundle import write_hub_folder

    # This function runs only if its option is given.
    assert hub is not None
    with waiting("bundle"):
        path, digest = write_hub_folder(folder, hub, licence=licence)
    return Output(facts={"file": path, "head": digest}, words=f"{path}\n{digest}")


@commands.in_modes(hub=_hub)
def bundle(folder: commands.RunFolder, out: Path | None = None) -> Output:
    """Write everything that a finished run publishes to one zip file, for others to verify.

    Prints the file's path and its digest, which you may sign or publish elsewhere. With --hub, write it to a folder
    that a model hub's own tool can push.

    Args:
        out: The .zip file to write; default: bundle.zip in the run directory.
        hub: Folder to write instead: the same files, with the card as README.md. It may be a checkout of the hub.
        licence: Licence of the model in that README.md, as an identifier of the hub such as apache-2.0.
    """
    from fairpate.run.bundle import write_bundle

    with waiting("bundle"):
        path, digest = write_bundle(folder, out)
    return Output(facts={"file": path, "head": digest}, words=f"{path}\n{digest}")


def log(folder: commands.RunFolder, mlflow: str, experiment: str | None = None) -> Output:
    """Log a published run where your team keeps its runs: settings, metrics, gaps, card, model and bundle.

    Nothing leaves but what may be published. A token or a password is read from MLflow's own variables, such as
    MLFLOW_TRACKING_TOKEN.

    Args:
        mlflow: Address of an MLflow server, such as http://tracker:5000, or another tracking URI.
        experiment: Name of the experiment; default: the name of the data set.
    """
    from fairpate.run.tracking import log_to_mlflow

    with waiting("log"):
        entry = log_to_mlflow(folder, mlflow, experiment=experiment)
    return Output(facts={"run_id": entry}, words=f"run {entry} of {mlflow}")


def dossier(
    folder: commands.RunFolder,
    form: Annotated[str | None, typer.Option("--for")] = None,
    out: Path | None = None,
    key: Path | None = None,
) -> Output:
    """Fill in a form about a published run: registry entry, NIST's hazards, or egress report.

    A line is filled in from fields of published files, and names these fields. It is left to the operator if only the
    operator knows the answer, and it is open while no published file has the answer.

    Args:
        form: The form: registry, nist or egress.
        out: The .json file to write; default: in the run directory.
        key: File of `fairpate site key`, to sign with.
    """
    from fairpate.run.dossier import FORMS, make_dossier
    from fairpate.sites.plan import key_text, read_key

    if form not in FORMS:
        found = "missing" if form is None else f"{form} is not the name of a form"
        raise UsageError(f"--for: {found}; give one of {', '.join(FORMS)}.")
    if out is not None:
        check_output(out, "--out", is_file=True, suffixes=(".json",))
    # Before the form is filled in: a key that cannot be read is refused now.
    secret = None if key is None else read_key(key)
    signer = None if secret is None else (key_text(secret.public), secret.sign)
    with waiting("dossier"):
        files, counts = make_dossier(folder, form, signer=signer, out=out)
    said = f"{counts['filled']} lines filled in, {counts['operator']} for the operator, {counts['open']} open"
    return Output(facts={"files": files, "lines": counts}, words="\n".join([*map(str, files.values()), said]))


def verify(
    path: Annotated[Path, typer.Argument()],
    head: str | None = None,
    key: Annotated[str | None, typer.Option(metavar="TEXT")] = None,
) -> Output:
    """Verify a bundle: its files, epsilon by a second accountant, model and card; or the signature of a dossier.

    Exit code 1 if anything differs.

    Args:
        path: A file of `fairpate bundle`, the folder that it was unpacked to, or a signed dossier (.json).
        head: Digest of the bundle, as published elsewhere.
        key: The operator's public key, to check the signature of a dossier.
    """
    from fairpate.run.bundle import verify_bundle

    # A bundle is a zip file or a folder, a dossier JSON.
    if path.suffix == ".json":
        from fairpate.run.dossier import verify_dossier
        from fairpate.sites.plan import public_keys

        if head is not None:
            raise UsageError("--head: applies to bundles only; verify a dossier with --key.")
        if key is None:
            raise UsageError(
                "--key: missing; give the operator's published key, against which the dossier's signature is checked."
            )
        found = verify_dossier(path, signed=public_keys(key, "--key").signed)
        words = f"signed by this key: {found['for']}, of {len(found['files'])} files"
        return Output(facts={"holds": True, "for": found["for"], "files": found["files"]}, words=words)
    if key is not None:
        raise UsageError("--key: applies to dossiers only; verify a bundle with its published --head.")

    with waiting("verify"):
        verdict = verify_bundle(path, head=head)
    kinds = {"checked": verdict.checked, "differs": verdict.differs, "not checked": verdict.not_checked}
    lines = [f"{kind:<13}{line}" for kind, found_lines in kinds.items() for line in found_lines]
    return Output(
        facts={"holds": verdict.holds, **asdict(verdict)},
        words="\n".join([*lines, f"head         {verdict.digest}", verdict.words]),
        code=int(not verdict.holds),  # so that a script notices
    )
