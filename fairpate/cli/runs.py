"""Commands about runs and comparisons, and about what is published of them.

`fairpate run`, `compare`, `report` and `card`: train, and write what is published of it.

`fairpate aggregate`: the aggregator on votes that were made elsewhere.

`fairpate methods`, `plan`, `filter-cost` and `specify`: what there is, what a budget allows, what was achieved.

`fairpate figures`: the charts of a comparison as pictures for a paper.

`fairpate bundle` and `verify`: a finished run as one file, and the check of one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from typer.core import TyperCommand, TyperOption

from fairpate.cli.base import (
    ConfigFile,
    DataDir,
    MethodOption,
    Out,
    Overrides,
    RunFolder,
    Weights,
    checked_arguments,
    data_config,
    data_named,
    with_data_dir,
)
from fairpate.config import BACKBONES, ConfigError
from fairpate.config_reader import read_yaml
from fairpate.files import check_output_folder
from fairpate.terminal import Output, facts, waiting
from fairpate.types import UsageError
from fairpate.words import delta_text

if TYPE_CHECKING:
    from fairpate.run.context import RunDirectory

_DEMO = Path(__file__).parents[1] / "color_digits.yaml"


class RunCommand(TyperCommand):
    """Its help names the methods there are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The parent's, with the registry's names."""
        from fairpate.methods.base import method_names

        for parameter in self.params:
            if isinstance(parameter, TyperOption) and parameter.name == "method":
                parameter.help = f"One of {', '.join(method_names())}; or module:Class."
        super().format_help(ctx, formatter)


def run(
    config: ConfigFile = None,
    method: MethodOption = None,
    data: Annotated[
        str | None,
        typer.Option(help="A name from `fairpate data list`, or a declaration (.yaml)."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="To publish; the noise follows from it.")] = None,
    delta: Annotated[float | None, typer.Option(help="At which epsilon is stated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model and training; never of private noise.")] = None,
    overrides: Overrides = None,
    weights: Weights = None,
    out: Out = None,
    data_dir: DataDir = None,
    release_of: Annotated[
        Path | None,
        typer.Option(
            help="A run whose release this one goes on from, at no cost; also its configuration, if none is.",
        ),
    ] = None,
) -> Output:
    """Run one method: data, teachers and votes where it has some, model, evaluation, statement, report.

    Without CONFIG, and with a method, data or an epsilon, all else is chosen from public facts of the data set.
    """
    from fairpate.cli.summaries import outcome
    from fairpate.methods.base import configured, merged, start_values
    from fairpate.run.folder import open_run_directory
    from fairpate.run.run import run_method
    from fairpate.terminal import Reporter

    if out is not None:  # before settings are fitted: public records may have to be counted
        check_output_folder(out, "--out")
    if config is not None:
        _require_configuration(config)
    given = data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "seed": seed}
    options = [f"{field}={json.dumps(value)}" for field, value in given.items() if value is not None]
    options = [*(overrides or []), *options]
    if release_of is not None and config is None:
        config = open_run_directory(release_of)[0].config
        options.append("out=null")
    path = config or (_DEMO if (method, data, epsilon) == (None, None, None) else None)
    start = start_values(options, method) if path is None else read_yaml(path)
    if weights is not None:
        options += _weights_of(merged(start, options, method=method), weights)
    found = configured(start if path is None else path, options, method=method)
    placed = found.model_copy(update={"out": out or found.out, "data": with_data_dir(found.data, data_dir)})
    return outcome(run_method(placed, Reporter(), release_of=release_of, with_graph=True))


def compare(
    config: Annotated[Path, typer.Argument(help="YAML file: methods, data sets, seeds, grids.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; what is finished in it is kept.")] = None,
    data_dir: DataDir = None,
) -> Output:
    """Run methods over data sets, seeds and grids; only what is missing runs. Ends in one table and one frontier."""
    from fairpate.run.compare import compare_methods, comparison_outcome
    from fairpate.run.sweep import load_sweep

    sweep = load_sweep(config, overrides or [], data_dir=data_dir)
    check_output_folder(out or sweep.out or Path("runs"), "--out")
    comparison = compare_methods(sweep, out=out, data_dir=data_dir, folder=config.parent, title=config.stem)
    return comparison_outcome(comparison)


def report(folder: RunFolder) -> Output:
    """Write the reports of a finished run again, and model.onnx; nothing is trained, asked or charged."""
    from fairpate.cli.summaries import outcome
    from fairpate.run.folder import finished_run
    from fairpate.run.run import run_method
    from fairpate.terminal import Reporter, waiting

    found, config = finished_run(folder)
    placed = config.model_copy(update={"out": found.root})
    with waiting("report"):
        return outcome(run_method(placed, Reporter(quiet=True), with_graph=True))


def card(
    folder: RunFolder,
    intended_use: Annotated[str | None, typer.Option(help="What the model is for, in your words.")] = None,
    out_of_scope: Annotated[str | None, typer.Option(help="What it must not be used for.")] = None,
    contact: Annotated[str | None, typer.Option(help="Who answers questions about it.")] = None,
) -> Output:
    """Write the privacy-and-fairness card of a published student, as HTML and JSON, beside it."""
    from fairpate.run.publication import write_card
    from fairpate.terminal import waiting

    with waiting("card"):
        files = write_card(folder, intended_use=intended_use, out_of_scope=out_of_scope, contact=contact)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


def _require_configuration(path: Path) -> None:
    """ConfigError for a declaration, which is given otherwise; all other faults are told where they are read."""
    if {"files", "label", "features"} <= read_yaml(path).keys():
        raise ConfigError(f"{path}: declares records, and is no configuration; give it with --data {path}.")


def _weights_of(values: dict[str, Any], weights: str) -> list[str]:
    """The overrides that give ``weights`` to all models of a configuration that can start from a file."""
    named = {name: _model_name(values[name]) for name in ("teachers", "student") if name in values}
    starting = [section for section, name in named.items() if name in BACKBONES]
    if not starting:
        raise ConfigError(
            f"--weights: expected a model.name among {', '.join(BACKBONES)}, got {' and '.join(named.values())}; "
            f"set {' or '.join(f'{section}.model.name' for section in named)}."
        )
    return [f"{section}.model.weights={json.dumps(weights)}" for section in starting]


def _model_name(section: Any) -> str:
    """As it stands there, before anything is checked."""
    model = section.get("model") if isinstance(section, dict) else None
    return str(model.get("name")) if isinstance(model, dict) else "none"


_UNIT = "Whose presence is protected, such as hospital: you attest that each touches one vote of a query at most."


def aggregate(
    votes: Annotated[Path, typer.Argument(help="CSV or Parquet: a row per public record, a column per voter.")],
    unit: Annotated[str, typer.Option(help=_UNIT)],
    classes: Annotated[str, typer.Option(help="All classes, by commas: public constants.")],
    voters: Annotated[
        int | None, typer.Option(min=2, help="A column per class instead: counts of so many voters each.")
    ] = None,
    features: Annotated[str | None, typer.Option(help="Columns of numbers for a student, by commas.")] = None,
    id_column: Annotated[str, typer.Option("--id", help="Column of the public records' names.")] = "record_id",
    group: Annotated[str, typer.Option(help="Column of their public groups.")] = "group",
    test: Annotated[
        Path | None, typer.Option(help="Test records that measure the student: the same columns, and true labels.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of the test records' true labels, with --test; none: label.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the data set, in the odometer; none: the file's.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="To publish; the noise follows from it.")] = None,
    delta: Annotated[float | None, typer.Option(help="At which epsilon is stated.")] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="{threshold: 8, threshold_stddev_votes: 2, noise_stddev_votes: 1}, instead.")
    ] = None,
    overrides: Overrides = None,
    out: Out = None,
) -> Output:
    """Release labels from votes made elsewhere: one ledger, one price, and a student where there are features."""
    from fairpate.run.run import aggregate as run_aggregator
    from fairpate.terminal import Reporter

    if label is not None and test is None:
        raise UsageError("--label: read only with --test; give that too, or leave --label out.")
    if not votes.is_file():
        raise ConfigError(f"{votes}: no such file; give the CSV or Parquet file of the votes.")
    columns = {"id": id_column, "group": group, "features": _listed(features), "name": name}
    told = {"path": str(votes), "unit": unit, "classes": _listed(classes), "num_voters": voters}
    tested = {"test": None if test is None else str(test), "label": label or "label"}
    given = {"votes": told | columns | tested | {"are_counts": voters is not None}}
    target = {"target.epsilon": epsilon, "target.delta": delta, "out": None if out is None else str(out)}
    options = [f"{field}={json.dumps(value)}" for field, value in target.items() if value is not None]
    options += [] if mechanism is None else [f"aggregator.mechanism={mechanism}"]
    return _outcome(run_aggregator(given, [*(overrides or []), *options], Reporter()))


def _outcome(run: RunDirectory) -> Output:
    """What was released, at what price, and what a student made of it."""
    from fairpate.cli.summaries import measured_rows
    from fairpate.report.page import epsilon_text
    from fairpate.run.context import read_json, read_statement

    statement = read_statement(run)
    queries = statement.queries
    assert queries is not None
    stated = "none: no guarantee" if statement.epsilon is None else epsilon_text(statement.epsilon)
    rows = [
        ("epsilon", f"{stated} at delta {delta_text(statement.delta)} ({statement.relation} {statement.unit})"),
        ("attested", f"each {statement.unit} touches one vote of a query at most"),
        ("labels released", f"{queries.answered} of {queries.submitted} queries: {run.labels}"),
    ]
    if run.student.exists():
        rows += [*measured_rows(read_json(run.metrics)), ("model", str(run.student))]
    files = {"labels": run.labels, "model": run.student if run.student.exists() else None, "statement": run.statement}
    return Output(
        facts={"run": run.root, "statement": statement, "files": files},
        words=facts([*rows, ("statement", str(run.statement))]),
    )


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if names else []


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Its fields, defaults and paper; none lists all."),
    ] = None,
) -> Output:
    """List every method with what it protects and its source, or one with all of its fields."""
    from fairpate.cli.summaries import describe_method, list_methods

    return list_methods() if name is None else describe_method(name)


def plan(
    data: Annotated[
        str,
        typer.Option(
            help="A name from `fairpate data list`: its classes and its public pool.",
        ),
    ],
    epsilon: Annotated[float, typer.Option(min=0, help="Target.")],
    delta: Annotated[float, typer.Option(min=0, max=1, help="Target.")] = 1e-5,
    teachers: Annotated[list[int] | None, typer.Option(min=2, help="Numbers of teachers to look at.")] = None,
    queries: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of queries to look at.")] = None,
    agreement: Annotated[
        float | None, typer.Option(help="Assumed share of teachers that are right, on average; none: 0.75.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(help="Assumed standard deviation of that share over queries; none: 0.2.")
    ] = None,
    votes: Annotated[Path | None, typer.Option(help="A run's real votes instead. For the operator: private.")] = None,
    data_dir: DataDir = None,
) -> Output:
    """Who could vote at an epsilon, with the command of each; and of trained teachers every way to spend it."""
    from fairpate.methods.base import method_for
    from fairpate.run.plan import candidates, describe, describe_candidates, plan_for, proposal_json

    config = data_config(data, None, data_dir)
    with checked_arguments(), waiting("plan"):
        proposal = plan_for(
            config,
            epsilon=epsilon,
            delta=delta,
            teacher_counts=teachers or None,
            query_counts=queries or [100, 300, 1000],
            agreement=agreement,
            spread=spread,
            votes=votes,
        )
        found = (
            []
            if votes is not None
            else candidates(config, data, epsilon=epsilon, delta=delta, agreement=agreement, spread=spread)
        )
    words = [describe_candidates(found, epsilon=epsilon, chosen=method_for(config))] if found else []
    return Output(
        facts=proposal_json(proposal) | {"candidates": found, "chosen": method_for(config) if found else None},
        words=Group(*words, describe(proposal)),
    )


def filter_cost(
    epsilon: Annotated[float, typer.Option(min=0, help="Of one record in what sees only the records kept.")],
    disparity: Annotated[
        float, typer.Option(min=0, help="The filter's gamma: what two groups' shares of a label may differ by.")
    ],
    delta: Annotated[float, typer.Option(min=0, help="Beside it.")] = 1e-5,
) -> Output:
    """What private training costs behind a filter of private records for parity, and what may be spent behind it."""
    from fairpate.run.plan import cost_of_filter, describe_cost

    with checked_arguments():
        cost = cost_of_filter(epsilon, delta, disparity)
    return Output(facts=cost, words=describe_cost(cost))


def specify(
    epsilon: Annotated[float | None, typer.Option(help="At most this privacy budget.")] = None,
    disparity: Annotated[float | None, typer.Option(help="At most this gap of demographic parity.")] = None,
    fairness: Annotated[
        list[str] | None,
        typer.Option(help="NOTION=LIMIT: at most this, such as equalized_odds=0.1; once for each notion."),
    ] = None,
    coverage: Annotated[float | None, typer.Option(help="At least this share of records answered.")] = None,
    accuracy: Annotated[float | None, typer.Option(help="At least this accuracy on them.")] = None,
    frontier: Annotated[Path | None, typer.Option(help="A results.parquet; none takes the newest in runs/.")] = None,
    data: Annotated[str | None, typer.Option(help="Only this data set of the table.")] = None,
    transfer: Annotated[Path | None, typer.Option(help="Another table: apply there what is chosen here.")] = None,
) -> Output:
    """Which guarantees are achievable together: at what accuracy, by which configuration; or the nearest ones."""
    from fairpate.run.specify import Demand, describe_answer, fairness_limits, specify_guarantees

    with checked_arguments():
        limits = fairness_limits(fairness or [])
        demand = Demand(epsilon=epsilon, disparity=disparity, coverage=coverage, accuracy=accuracy, fairness=limits)
    with waiting("specify"):
        answer = specify_guarantees(demand, frontier, data=data, transfer_to=transfer)
    return Output(facts=answer.to_json(), words=describe_answer(answer))


_MM_PER_INCH = 25.4


def figures(
    results: Annotated[Path, typer.Argument(help="A results.parquet of `fairpate compare`, or the folder of a sweep.")],
    columns: Annotated[
        int | None, typer.Option(help="Columns of the journal that a picture is wide: 1 or 2; none: 1.")
    ] = None,
    font_size: Annotated[float, typer.Option(help="Of all text in it, in points.")] = 8.0,
    width_mm: Annotated[float | None, typer.Option(help="Its width, where the journal's is not 85 or 178 mm.")] = None,
    formats: Annotated[list[str] | None, typer.Option("--format", help="pdf, svg or png; once for each.")] = None,
    notion: Annotated[str, typer.Option(help="The notion of fairness that disparity is of.")] = "demographic_parity",
    out: Annotated[Path | None, typer.Option(help="Folder to write to, instead of `paper` beside the table.")] = None,
) -> Output:
    """Draw the frontier of a finished comparison for a paper: vector, a column wide, in the journal's font size."""
    from fairpate.fairness.rates import notion_named
    from fairpate.report.figures import FigureStyle
    from fairpate.run.compare import write_figures

    if columns is not None and width_mm is not None:
        raise UsageError("--columns and --width-mm: expected one, got both; leave one out.")
    if not results.exists():
        raise ConfigError(f"results: {results} is no file; give the results.parquet of `fairpate compare`.")
    if out is not None:
        check_output_folder(out, "--out")
    with checked_arguments():
        width_in = None if width_mm is None else width_mm / _MM_PER_INCH
        style = FigureStyle(
            columns=1 if columns is None else columns,
            font_size=font_size,
            width_in=width_in,
            formats=tuple(formats or ["pdf"]),
        )
        chosen = notion_named(notion)
    files = write_figures(results, style=style, notion=chosen, out=out)
    return Output(facts={"files": files}, words="\n".join(map(str, files)))


def bundle(
    folder: RunFolder,
    out: Annotated[Path | None, typer.Option(help="A .zip file; bundle.zip in the run directory.")] = None,
) -> Output:
    """Write everything that a finished run published as one zip file, for somebody who checks it.

    Prints the file and the digest of its head, which you may publish elsewhere or sign.
    """
    from fairpate.run.bundle import write_bundle

    with waiting("bundle"):
        path, digest = write_bundle(folder, out)
    return Output(facts={"file": path, "head": digest}, words=f"{path}\n{digest}")


def verify(
    path: Annotated[Path, typer.Argument(help="A file of `fairpate bundle`, or the folder it was unpacked to.")],
    head: Annotated[str | None, typer.Option(help="Digest of the head, as published elsewhere.")] = None,
) -> Output:
    """Check a bundle: files, epsilon by an independent accountant, student and card. Refused, it ends with code 1."""
    from fairpate.run.bundle import verify_bundle

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
