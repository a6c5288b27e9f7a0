"""`fairpate figures`: the charts of a comparison as pictures for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairpate.app.cli.endings import checked_arguments
from fairpate.app.terminal.output import Output
from fairpate.config import ConfigError
from fairpate.files import check_output_folder
from fairpate.types import UsageError

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
    from fairpate.app.compare.pictures import write_figures
    from fairpate.evaluation.figure_style import FigureStyle
    from fairpate.fairness.notions import notion_named

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
