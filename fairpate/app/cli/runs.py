"""`fairpate run`, `compare`, `report` and `card`: train, and write what is published of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from fairpate.app.cli.options import (
    AllowCode,
    ConfigFile,
    DataDir,
    MethodOption,
    Out,
    Overrides,
    RunFolder,
    Weights,
    data_named,
    with_data_dir,
)
from fairpate.app.terminal.output import Output
from fairpate.config import BACKBONES, ConfigError
from fairpate.config_reader import read_yaml
from fairpate.files import check_output_folder
from fairpate.named_code import allowing

_DEMO = Path(__file__).parents[1] / "color_digits.yaml"


class RunCommand(TyperCommand):
    """Its help names the methods there are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The parent's, with the registry's names."""
        from fairpate.methods import method_names

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
    allow_code: AllowCode = False,
) -> Output:
    """Run one method: data, teachers and votes where it has some, model, evaluation, statement, report.

    Without CONFIG, and with a method, data or an epsilon, all else is chosen from public facts of the data set.
    """
    from fairpate.app.run import run_method
    from fairpate.app.rundir import open_run_directory
    from fairpate.app.terminal.progress import Reporter
    from fairpate.app.terminal.summary import outcome
    from fairpate.methods.fitted import start_values
    from fairpate.methods.load import configured, load_method, merged

    if out is not None:  # before settings are fitted: public records may have to be counted
        check_output_folder(out, "--out")
    if config is not None:
        _require_configuration(config)
    given = data_named(data) | {"target.epsilon": epsilon, "target.delta": delta, "seed": seed}
    options = [f"{field}={json.dumps(value)}" for field, value in given.items() if value is not None]
    options = [*(overrides or []), *options]
    with allowing(allow_code):
        if release_of is not None and config is None:
            config = open_run_directory(release_of)[0].config
            options.append("out=null")
        path = config or (_DEMO if (method, data, epsilon) == (None, None, None) else None)
        start = start_values(options, method) if path is None else read_yaml(path)
        if weights is not None:
            options += _weights_of(merged(start, options, method=method), weights)
        found = configured(start, options, method=method) if path is None else load_method(path, options, method=method)
        placed = found.model_copy(update={"out": out or found.out, "data": with_data_dir(found.data, data_dir)})
        return outcome(run_method(placed, Reporter(), release_of=release_of, with_graph=True, allow_code=allow_code))


def compare(
    config: Annotated[Path, typer.Argument(help="YAML file: methods, data sets, seeds, grids.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; what is finished in it is kept.")] = None,
    data_dir: DataDir = None,
    allow_code: AllowCode = False,
) -> Output:
    """Run methods over data sets, seeds and grids; only what is missing runs. Ends in one table and one frontier."""
    from fairpate.app.compare.outcome import comparison_outcome
    from fairpate.app.compare.reading import load_sweep
    from fairpate.app.compare.report import compare_methods

    with allowing(allow_code):
        sweep = load_sweep(config, overrides or [], data_dir=data_dir)
        check_output_folder(out or sweep.out or Path("runs"), "--out")
        comparison = compare_methods(
            sweep, out=out, data_dir=data_dir, folder=config.parent, title=config.stem, allow_code=allow_code
        )
    return comparison_outcome(comparison)


def report(folder: RunFolder) -> Output:
    """Write the reports of a finished run again, and model.onnx; nothing is trained, asked or charged."""
    from fairpate.app.finished import finished_run
    from fairpate.app.run import run_method
    from fairpate.app.terminal.progress import Reporter, waiting
    from fairpate.app.terminal.summary import outcome

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
    from fairpate.app.publication.card import write_card
    from fairpate.app.terminal.progress import waiting

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
