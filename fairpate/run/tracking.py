"""A published run in the tracker where a team keeps its runs: MLflow.

An entry holds what the run published and nothing else: parameters from ``record.json``, numbers from statement and
metrics, the sentences of the report's first screen, and files of ``public/`` that a bundle may hold, with the bundle
itself. No file below ``private/`` is opened.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fairpate.config import flattened
from fairpate.fairness.rates import NOTIONS
from fairpate.releases.directory import RunDirectory, read_json, run_at
from fairpate.report.records import RunStatement
from fairpate.run.bundle import published_statement, write_bundle
from fairpate.run.publication import read_claims, require_card
from fairpate.terminal import require_extra
from fairpate.types import UsageError, tell

FILES = (
    *("statement.json", "metrics.json", "record.json", "report.html", "card.html", "card.json"),
    *("audit.html", "audit.json", "student.safetensors", "model.onnx", "model.json"),
)
"""The files of ``public/`` that an entry holds, each if it exists."""
BUNDLE = "bundle.zip"
_MOST_PARAMETER = 500  # characters that every version of MLflow takes
_MOST_AT_ONCE = 100  # parameters that MLflow takes in one request


class TrackingError(UsageError):
    """Raised if the tracker cannot be reached or refuses an entry; the message has its reason."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a tracker: its ``name`` in the ``experiment``, and what it holds."""

    experiment: str
    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    files: tuple[Path, ...]


def entry_of(run: RunDirectory) -> Entry:
    """Return what the tracker gets of a published run; RunDirectoryError if nothing of it may be published."""
    statement, claims = published_statement(run), read_claims(run)
    # A run of an estimator has no row of a comparison.
    record = read_json(run.record) if run.record.is_file() else {}
    data = str(record.get("data") or read_json(run.data)["name"])
    seed = f", seed {record['seed']}" if "seed" in record else ""
    settings = flattened(record["config"]) if record else {}
    note = "\n\n".join((claims.line, claims.guarantee.meaning, f"May it be published? {claims.decision.words}"))
    return Entry(
        experiment=data,
        name=f"{statement.method} on {data}{seed}",
        parameters={name: str(value)[:_MOST_PARAMETER] for name, value in settings.items() if value is not None},
        metrics={name: value for name, value in _numbers(claims).items() if math.isfinite(value)},
        tags={
            "fairpate.method": statement.method,
            "fairpate.data": data,
            "fairpate.unit": statement.unit,
            "fairpate.relation": statement.relation,
            "fairpate.metrics": claims.measured.metrics,
            "mlflow.note.content": note,  # MLflow shows it above everything else
        },
        files=tuple(path for path in (run.public / name for name in FILES) if path.is_file()),
    )


def _numbers(claims: RunStatement) -> dict[str, float]:
    """Return the numbers of an entry by name; a number that is hidden or undefined is NaN."""
    measured = claims.measured
    found = {"epsilon": claims.guarantee.epsilon, "delta": claims.guarantee.delta}
    names = ("accuracy", "coverage", "majority_accuracy", "num_records")
    found |= {name: float(getattr(measured, name)) for name in names}
    for notion in NOTIONS:
        gap = measured.measured(notion)
        found |= {notion: gap.value, f"{notion}_low": gap.low, f"{notion}_high": gap.high}
    for place, group in enumerate(measured.groups):
        # By place: MLflow allows few characters in names, and names of groups may have any.
        found |= {f"group_{place}_accuracy": group.accuracy, f"group_{place}_coverage": group.coverage}
    return found


def log_to_mlflow(
    run: Path | str | RunDirectory,
    uri: str | None = None,
    *,
    experiment: str | None = None,
    run_id: str | None = None,
) -> str:
    """Log a published run to MLflow, and return the id of the entry there.

    The entry holds the statement, metrics and gaps, the card, the model's files and the bundle, with the settings as
    parameters; nothing that may not be published leaves. The card is written if it is missing.

    Args:
        run: The folder of the run.
        uri: Address of the tracking server, or another tracking URI of MLflow; None: what MLflow is configured for,
            such as by MLFLOW_TRACKING_URI.
        experiment: Name of the experiment, which is created if it is missing; None: the name of the data set.
        run_id: An entry of MLflow that exists, such as that of ``mlflow.active_run()``; None makes a new one.

    Raises:
        MissingExtraError: MLflow's client is not installed (``pip install 'fairpate[mlflow]'``).
        RunDirectoryError: Nothing of this run may be published.
        TrackingError: MLflow cannot be reached, or refuses the entry.

    Example: ``fairpate.log_to_mlflow("runs/first", "http://tracker:5000")``.
    """
    require_extra("mlflow", "--mlflow")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    folder = run if isinstance(run, RunDirectory) else run_at(Path(run))
    require_card(folder, published_statement(folder))
    entry = entry_of(folder)
    with tempfile.TemporaryDirectory() as scratch:
        # A run of an estimator has no row of a comparison, and so no bundle.
        bundle = (write_bundle(folder.root, Path(scratch) / BUNDLE)[0],) if folder.record.is_file() else ()
        files, begun, made = (*entry.files, *bundle), None, run_id
        try:
            client = MlflowClient(tracking_uri=uri)
            if run_id is None:
                name = experiment or entry.experiment
                found = client.get_experiment_by_name(name)
                place = client.create_experiment(name) if found is None else found.experiment_id
                begun = made = client.create_run(place, run_name=entry.name).info.run_id
            client.log_batch(
                made,
                metrics=[Metric(name, value, 0, 0) for name, value in entry.metrics.items()],
                tags=[RunTag(*each) for each in entry.tags.items()],
            )
            parameters = [Param(*each) for each in entry.parameters.items()]
            for start in range(0, len(parameters), _MOST_AT_ONCE):
                client.log_batch(made, params=parameters[start : start + _MOST_AT_ONCE])
            for number, path in enumerate(files):
                client.log_artifact(made, str(path))
                tell(number + 1, len(files))
            if begun is not None:
                client.set_terminated(begun)
        except (MlflowException, ImportError, OSError) as error:
            if begun is not None:
                # A server that refused one file may still take the word that the entry is incomplete.
                with suppress(MlflowException, OSError):
                    client.set_terminated(begun, status="FAILED")
            # A database is reached through a server, or with MLflow as a whole: the client alone has no drivers.
            missing = "; give the address of a server, or pip install mlflow" * isinstance(error, ImportError)
            reason = f"{' '.join(str(error).split())}{missing}"
            raise TrackingError(f"--mlflow: {uri or 'the configured tracker'} takes no entry: {reason}") from error
    return str(made)
