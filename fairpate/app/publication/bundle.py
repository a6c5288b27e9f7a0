"""A finished run as one file for somebody who checks it: everything that was published, and a head that binds it.

The public part alone is read, and the versions of software beside it. The head holds digests of those files and the
claim; nothing in it follows from votes, private records or a ledger, whose own digests would confirm guesses about
votes. Equal runs give equal bytes. What :mod:`fairpate.app.publication.verify` checks of it is said in its README.txt.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aggregator.service.wire import worded
from fairpate.app.publication.card import guarantee_of, write_card
from fairpate.app.rundir import RunDirectory, RunDirectoryError, read_json, read_statement, run_at
from fairpate.data.files import sha256_of
from fairpate.files import check_output_file, write_atomically
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.event_values import event_from, event_json
from fairpate.steps import tell
from fairpate.strict_json import strict
from fairpate.types import PrivacyStatement

FORMAT = "fairpate.bundle/1"
HEAD, README, EVENTS, VERSIONS = "head.json", "README.txt", "events.json", "versions.json"
REQUIRED = ("card.html", "card.json", "metrics.json", "record.json", "statement.json", "student.safetensors")
OPTIONAL = (
    *("embedding.safetensors", "labels.parquet", "model.json", "model.onnx", "private_population.json"),
    "released.safetensors",
)
CLAIM = ("method", "unit", "relation", "delta", "epsilon", "noise")
# The earliest that a zip file can name.
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
# Rights of Unix stand in the upper half of an entry.
_READABLE = 0o644 << 16
_BLOCK = 2**20
_README = Path(__file__).with_name("bundle_readme.txt")


def write_bundle(root: Path, out: Path | None = None) -> tuple[Path, str]:
    """Write the bundle of the run in ``root`` to ``out`` (None: ``bundle.zip`` in it); its path and its head's digest.

    The card is made if it is not there, or is not that of the statement. RunFolderError for a folder without a run,
    RunDirectoryError for a run that published nothing; PlaceError where ``out`` cannot be written.
    """
    run = run_at(root)
    out = root / "bundle.zip" if out is None else out
    check_output_file(out, "--out", suffixes=(".zip",))
    statement = _published_statement(run)
    _require_card(run, statement)
    parts = _parts(run, statement)
    steps = _Steps(total=2 * sum(map(_size, parts.values())))
    digests = {name: _digest(part, steps) for name, part in parts.items()}
    head = head_of(statement, digests)
    parts[HEAD] = json_bytes(head)
    write_atomically(out, lambda path: _write_zip(path, parts, steps))
    return out, head["digest"]


@dataclass
class _Steps:
    """How many bytes were read, first for their digests and then into the file."""

    total: int
    done: int = 0

    def add(self, count: int) -> None:
        self.done += count
        tell(min(self.done, self.total), self.total)  # the head comes besides


def _size(part: bytes | Path) -> int:
    return len(part) if isinstance(part, bytes) else part.stat().st_size


def _digest(part: bytes | Path, steps: _Steps) -> str:
    found = hashlib.sha256(part).hexdigest() if isinstance(part, bytes) else sha256_of(part)
    steps.add(_size(part))
    return found


def head_of(statement: PrivacyStatement, files: Mapping[str, str]) -> dict[str, Any]:
    """What binds a bundle: the claim, the SHA-256 of every file, and one digest over both."""
    plain = statement.to_json()
    bound = {"format": FORMAT, "claim": {name: plain[name] for name in CLAIM}, "files": dict(sorted(files.items()))}
    return bound | {"digest": hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()}


def events_of(statement: PrivacyStatement) -> list[dict[str, Any]]:
    """The statement's events with kind, unit and relation in every one; those of other packages as they stand."""
    return [_complete(event, statement) for event in statement.events]


def json_bytes(value: Any) -> bytes:
    """Strict JSON, as everything of a bundle that is not a copy."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _complete(values: Mapping[str, Any], statement: PrivacyStatement) -> dict[str, Any]:
    try:
        event = event_from(values, statement.unit)
    except (TypeError, ValueError):  # a kind that is registered where its package is
        return {"unit": statement.unit, "relation": statement.relation, **values}
    return worded(event_json(event)) | {"unit": event.unit, "relation": event.relation}


def _published_statement(run: RunDirectory) -> PrivacyStatement:
    """RunDirectoryError, which says why, for a run without anything that may be published."""
    if not run.statement.is_file():
        raise RunDirectoryError(
            f"{run.statement}: missing, so there is nothing to bundle. A run of a method without privacy publishes "
            "nothing; an interrupted run is finished by giving its command again."
        )
    statement = read_statement(run)
    if statement.noise != OS_ENTROPY:
        raise RunDirectoryError(
            f"{run.statement}: noise is {statement.noise!r}, which is not private, so nothing of this run may be "
            f"published; run with noise {OS_ENTROPY}."
        )
    if statement.epsilon is None or not math.isfinite(statement.epsilon):
        raise RunDirectoryError(
            f"{run.statement}: epsilon is infinite, so nothing of this run may be published; set a finite target."
        )
    return statement


def _require_card(run: RunDirectory, statement: PrivacyStatement) -> None:
    """Both files of a card that is of this statement and student; what it says of the use is kept."""
    use: Mapping[str, Any] = {}
    if run.card.is_file():
        card = read_json(run.card)
        use = card.get("use", {})
        # A service that was started since may have raised what the statement claims, or answered more queries.
        claimed = strict(asdict(guarantee_of(statement)))
        is_current = json.loads(json.dumps(claimed)) == card.get("privacy")
        is_current = is_current and card.get("model", {}).get("sha256") == sha256_of(run.student)
        if is_current and run.card_page.is_file():
            return
    write_card(
        run.root, intended_use=use.get("intended"), out_of_scope=use.get("out_of_scope"), contact=use.get("contact")
    )


def _parts(run: RunDirectory, statement: PrivacyStatement) -> dict[str, bytes | Path]:
    """Everything but the head by its name: files as they are, and what is made of them."""
    parts: dict[str, bytes | Path] = {name: run.public / name for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if not (run.public / name).is_file()]
    if missing:
        raise RunDirectoryError(f"{run.public}: {', '.join(missing)} missing; give the command of the run again.")
    parts = {name: path for name, path in parts.items() if isinstance(path, Path) and path.is_file()}
    versions = read_json(run.environment)
    # Of the machine that ran it nothing more is said.
    told = {name: versions.get(name) for name in ("fairpate", "revision", "python", "libraries")}
    return parts | {
        README: _README.read_bytes(),
        EVENTS: json_bytes(events_of(statement)),
        VERSIONS: json_bytes(told),
    }


def _write_zip(path: Path, parts: Mapping[str, bytes | Path], steps: _Steps) -> None:
    """Not compressed: then the bytes do not depend on the library that packs them."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as bundle:
        for name in sorted(parts):
            part = parts[name]
            entry = zipfile.ZipInfo(name, _FIXED_TIME)
            # As on Unix, whatever the machine: equal runs give equal bytes.
            entry.create_system, entry.external_attr = 3, _READABLE
            if isinstance(part, bytes):
                bundle.writestr(entry, part)
                steps.add(len(part))
                continue
            # By the size zipfile decides on 64-bit fields beforehand; without it, a part beyond 2 GiB fails at its end.
            entry.file_size = part.stat().st_size
            with part.open("rb") as source, bundle.open(entry, "w") as target:
                while block := source.read(_BLOCK):
                    target.write(block)
                    steps.add(len(block))
