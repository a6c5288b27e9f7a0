"""Arguments and options that several commands take, and the configuration that they mean."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fairpate.config import ConfigError, DataConfig
from fairpate.config_reader import apply_override, parse_config

ConfigFile = Annotated[Path | None, typer.Argument(help="YAML configuration; none runs the embedded colour digits.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.field=value, on top of the file.")]
Out = Annotated[Path | None, typer.Option(help="Run directory; an earlier run of the same configuration goes on.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the publisher's files, instead of FAIRPATE_DATA.")]
Weights = Annotated[
    str | None, typer.Option(help="File that every ResNet and DenseNet starts from, or `imagenet`: torchvision's own.")
]
OptionValues = Annotated[list[str] | None, typer.Option("--option", help="The loader's own option, name=value.")]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Let code run that files name (method: module:Class, teachers.model.python)."),
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.")]
RunFolders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="A run directory, or several.")]
Folder = Annotated[Path, typer.Argument(help="Folder to write.")]
MethodOption = Annotated[str | None, typer.Option(help="Its name.")]
RunOrLedger = Annotated[Path, typer.Argument(help="A run directory, or a ledger file.")]
Words = Annotated[list[str] | None, typer.Argument(help="[URL] and one command; none opens a shell.")]
Host = Annotated[str, typer.Option(help="Address to listen on; an aggregator's beyond loopback only with tokens.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
AnalystToken = Annotated[Path | None, typer.Option(help="Analysts' token file, instead of FAIRPATE_ANALYST_TOKEN.")]
OperatorToken = Annotated[Path | None, typer.Option(help="Operator's token file, instead of FAIRPATE_OPERATOR_TOKEN.")]
Oidc = Annotated[
    Path | None, typer.Option(help="YAML that names an OpenID Connect issuer, whose signed tokens are good besides.")
]
TokenFile = Annotated[Path | None, typer.Option(help="File with your token, instead of FAIRPATE_TOKEN.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate with its chain, PEM; with --tls-key: serve HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, PEM, without a password.")]
Rate = Annotated[float, typer.Option(help="Requests per second of one token; twice as many at once.")]
LogFile = Annotated[Path | None, typer.Option(help="Append the log to it as JSON lines, one for each request too.")]
Traces = Annotated[bool, typer.Option("--traces", help="Send OpenTelemetry spans where OTEL_EXPORTER_OTLP_* say.")]
Quota = Annotated[float, typer.Option(help="New queries per analyst's token and day.")]
DatasetName = Annotated[str, typer.Argument(help="A name from `fairpate data list`, or a declaration.")]


_TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq", ".feather", ".arrow")


def data_named(data: str | None) -> dict[str, Any]:
    """The fields that name a data set; a declaration of one's own is known by its ending."""
    if data is not None and data.endswith(_TABLES):
        raise ConfigError(
            f"{data}: records, and no declaration of them; draft one with `fairpate data declare "
            f"{shlex.quote(data)} --public PUBLIC -o NAME.yaml` and give that."
        )
    if data is None or not data.endswith((".yaml", ".yml")):
        return {"data.name": data}
    from fairpate.data.declared.declaration import read_declaration

    return {"data.name": read_declaration(Path(data)).name, "data.declaration": data}


def data_config(name: str, options: list[str] | None, data_dir: Path | None) -> DataConfig:
    """The section ``data`` that the arguments of a command mean."""
    values = {field.removeprefix("data."): value for field, value in data_named(name).items()}
    for option in options or []:
        apply_override(values, f"options.{option}")
    return with_data_dir(parse_config(values, DataConfig), data_dir)


def with_data_dir(config: DataConfig, data_dir: Path | None) -> DataConfig:
    """The same section, read from ``data_dir`` if one was given."""
    return config if data_dir is None else config.model_copy(update={"data_dir": data_dir})
