"""Long outputs of commands: on methods and their settings, finished runs, data sets, this installation and new
projects."""

import csv
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fairpate.config import ConfigError, Section, read_yaml
from fairpate.data.draft import Check
from fairpate.data.registry import REGISTRY, DatasetDescription
from fairpate.files import PlaceError, check_output
from fairpate.methods.base import find_method, looks_of, method_names
from fairpate.methods.defaults import COUNTS, FITTED
from fairpate.pages import counted, epsilon_text
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.releases.directory import RunDirectory, read_json, read_statement
from fairpate.releases.odometer import Odometer, OdometerError, spent, state_folder
from fairpate.report.figures import FAMILIES, LOOKS
from fairpate.report.run_page import Audit
from fairpate.run.folder import environment
from fairpate.terminal import MODULES, Output, extra_fault, facts, listing
from fairpate.types import REMARKS, UsageError
from student.card import read_card

_WIDTH = 100  # columns; otherwise prose is as wide as its longest sentence


def audit_output(found: Audit, page: Path) -> Output:
    """Return the output of a command that attacked releases: bounds, faults, and what it would have found. The exit
    code is 1 if the claim is refuted, so that a script notices."""
    lines = []
    for each in found.releases:
        kinds = {"this run": each.found, f"control with {each.noise_words}": each.control}
        lines += [f"{each.title}, {name}: epsilon >= {of.words(found.delta)}" for name, of in kinds.items()]
    lines += [f"fault: {each}" for each in found.findings]
    return Output(
        facts={**found.to_json(), "page": page},
        words="\n".join([*lines, found.headline, found.power_words, str(page)]),
        code=int(found.refuted),
    )


def list_methods() -> Output:
    """Return a table of all registered methods: what each protects and needs with its default settings."""
    found, table = [], listing("name", "family", "protects", "needs")
    for name in sorted(method_names(), key=_place_of):
        try:
            found.append(_method_facts(name))
            table.add_row(*(found[-1][column] for column in ("name", "family", "protects", "needs")))
        except ConfigError as error:  # a method of another package, no reason to hide the others
            found.append({"name": name, "broken": str(error)})
            table.add_row(name, "broken", "", Text(str(error)))
    when = facts((family.title, f"for {family.take_when}") for family in FAMILIES.values())
    note = (
        f"A method that protects nothing shows what privacy costs. `fairpate run --data NAME` without --method takes "
        f"{FITTED}, or {COUNTS} where many classes have few records each; --dry-run says why. "
        "`fairpate methods NAME`: its paper and settings."
    )
    return Output(facts={"methods": found}, words=Constrain(Group(table, Text(), when, Text(f"\n{note}")), _WIDTH))


def _place_of(name: str) -> tuple[int, int]:
    """Return the place of a method among others: by family and colour, methods of other packages last."""
    look = looks_of([name]).get(name)
    return (len(FAMILIES), 0) if look is None else (list(FAMILIES).index(look[0]), look[1])


def _method_facts(name: str) -> dict[str, str]:
    method = find_method(name)
    config = method()
    look = looks_of([name]).get(name)
    family = None if look is None else FAMILIES[look[0]]
    if not method.is_private:
        take_for = "showing what privacy costs; never to publish"
    elif config.protects_attribute_only:
        take_for = LOOKS["groups_alone"]
    else:
        take_for = "" if family is None else family.take_when
    return {
        "name": name,
        "title": method.title,
        "family": "" if family is None else family.title,
        "protects": config.unit,
        "needs": ", ".join(config.needs) or "nothing",
        "take_for": take_for,
        "source": method.paper,
    }


def describe_method(name: str) -> Output:
    """Return all settings of a method, each with its default and meaning. ConfigError for an unknown name."""
    method, about = find_method(name), _method_facts(name)
    found = list(fields_of(method()))
    heading = Text(f"{method.title}: {method.paper}\n{(method.__doc__ or '').strip().splitlines()[0]}\n")
    told = facts((title.replace("_", " "), about[title]) for title in ("family", "protects", "needs", "take_for"))
    lines: list[RenderableType] = [heading, told, Text()]
    for each in found:
        lines.append(Text(each.get("set", each["field"]), style="bold"))
        if each["meaning"]:
            lines.append(Padding(Text(each["meaning"]), (0, 0, 0, 4), expand=False))
    return Output(facts=about | {"fields": found}, words=Constrain(Group(*lines), _WIDTH))


def fields_of(section: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yield a mapping for each field of a configuration section and of its subsections.

    Each mapping has the dotted name (``field``), the ``meaning``, the ``default``, and the argument of `--set` that
    sets this default (``set``). A subsection with a description also has a mapping of its own, with its name and
    meaning only. ``prefix`` is put in front of all names.
    """
    described = getattr(type(section), "model_fields", {})
    for name in described or [field.name for field in fields(section)]:
        value, meaning = getattr(section, name), (described[name].description or "") if described else ""
        known = {"field": f"{prefix}{name}", "meaning": meaning}
        if isinstance(value, Section) or is_dataclass(value):
            if meaning:
                yield known
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield known | {"default": value, "set": f"{prefix}{name}={as_yaml(value)}"}


def as_yaml(value: Any) -> str:
    """Return the value of a configuration field as text that `--set` accepts."""
    # JSON is YAML as well, except for infinity.
    return value if isinstance(value, str) else json.dumps(value, default=str).replace("Infinity", "inf")


def outcome(run: RunDirectory) -> Output:
    """Return the published numbers of a finished run as the output of a command: values for a program (`--json`), and
    words for a person."""
    from fairpate.run.publication import read_claims

    record, statement, metrics = read_json(run.record), read_statement(run), read_json(run.metrics)
    trained = read_card(run.student).num_training_labels
    queries = statement.queries
    places = {
        "model": run.student,
        "without_this_package": run.graph,
        "record": run.record,
        "statement": run.statement,
        "metrics": run.metrics,
        "report": run.public_report,
        "operator_only": run.private_report,
    }
    files = {name: path for name, path in places.items() if path.exists()}
    what = f"{record['method']} on {record['data']}, seed {record['seed']}"
    claims = read_claims(run, for_operator=True)
    # The verdict as the report has it, which anyone may read; what the operator alone knows is in the rows.
    verdict = replace(claims, without_privacy=None, for_operator=False).line
    rows = [("method", what), ("verdict", verdict), ("meaning", claims.guarantee.meaning), *claims.rows]
    if queries is not None:
        rows.append(("labels released", f"{queries.answered} of {queries.submitted} queries"))
        # The ledger may have released more labels since.
        if trained not in (None, queries.answered):
            rows.append(("student trained on", f"{trained} of these labels, those of the run's own queries"))
    unnamed = {"statement", "metrics"}  # their numbers are above
    rows += [(name.replace("_", " "), str(path)) for name, path in files.items() if name not in unnamed]
    if statement.epsilon is not None and statement.noise == OS_ENTROPY:  # another run adds to no sum
        own = f"ε = {epsilon_text(statement.epsilon)} of each {statement.unit}"
        rows.append(("spent", f"{own}; so far {spent(record['data'], Odometer(), delta=statement.delta)}"))
    found = {name: record[name] for name in ("method", "data", "seed")} | {
        "run": run.root,
        "statement": read_json(run.statement),
        "metrics": metrics,
        "training_labels": trained,
        "files": files,
    }
    return Output(facts=found, words=Group(Text(), facts(rows)))


def check_table(check: Check, declaration: str, questions: int) -> Group:
    """Return what `fairpate data check` prints about a declaration of records: a table of rows by file and counts by
    column, the faults, and doubts about the names of persons. If there are no faults, the command to run next is
    printed.

    ``questions`` is the number of questions in a drafted declaration that are still to be answered.
    """
    table = listing("file", "column", "rows", "clipped", "missing", "other")
    for file, rows in check.rows.items():
        table.add_row(file, "", f"{rows:,}", "", "", "")
        for each in check.columns:
            if each.file == file:
                counts = (f"{count:,}" if count else "" for count in (each.clipped, each.missing, each.other))
                table.add_row("", each.column, "", *counts)
    verdict = f"nothing is refused; fairpate run --data {shlex.quote(declaration)} --epsilon 1 --dry-run"
    if check.refused:
        verdict = f"refused: {counted(len(check.refused), 'fault')}"
    still = [f"{counted(questions, 'question')} of the draft to answer: the lines with `# ?`"] if questions else []
    doubts = list(check.doubts)
    for found in check.alike:
        other = f"one in {found.other_part}" if found.other_part else "another one"
        doubts.append(
            f"{found.part}: {counted(found.names, 'name')} of persons or records equal {other} {found.words}; they "
            "count as different ones, each protected by itself: write every name in one way"
        )
    for repeated in check.repeated:
        doubts.append(
            f"column {repeated.column} is left out, and its {repeated.values:,} values repeat in {repeated.rows:,} "
            f"rows: if each is a person, declare `person: {repeated.column}`; without, one row is protected by itself"
        )
    said = Text("\n".join([*check.refused, *doubts, *still, verdict]))
    return Group(Text(REMARKS["reading_tells"]), *([table] if check.rows else []), said)


def describe_table(description: DatasetDescription) -> Group:
    """Return a table of a data set: the number of records in each split by group and label."""
    heading = Text(
        f"{description.name}: {description.kind} records of shape {description.record_shape}, "
        f"sensitive attribute {description.sensitive_attribute}"
    )
    labels = (Column(Text(name)) for name in description.label_names)
    lacking = ["without label"] if any(sum(split.unlabelled_G) for split in description.splits) else []
    table = Table("split", "group", *labels, *lacking, "records", box=SIMPLE_HEAD)
    for split in description.splits:
        for name, counts, without in zip(description.group_names, split.counts_GC, split.unlabelled_G, strict=True):
            shown = (*counts, without) if lacking else counts
            table.add_row(split.name, Text(name), *(f"{count:,}" for count in shown), f"{sum(shown):,}")
        table.add_section()
    return Group(heading, table, *(Text(note) for note in description.notes))


_LITTLE_DISK = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about this installation: its ``name`` and ``value``. ``level`` is "fix" if something does not work; then
    ``value`` says what to do."""

    name: str
    value: str
    level: Literal["ok", "fix"] = "ok"


def findings() -> Iterator[Finding]:
    """Yield a :class:`Finding` for each version, processor, folder and optional extra of this installation."""
    import torch

    from fairpate.encoders import prepare_torchvision

    found = environment()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    known = {
        "fairpate": " ".join(filter(None, (found["fairpate"], found["revision"]))),
        "python": found["python"],
        "platform": found["platform"],
        **found["libraries"],
        "cpus": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "gpus": ", ".join(gpus) or "none",
        "ray cluster": os.environ.get("RAY_ADDRESS") or "this machine alone (RAY_ADDRESS is not set)",
    }
    yield from (Finding(name=name, value=value) for name, value in known.items())
    # Runs are written below the working directory unless --out says otherwise.
    free, here = shutil.disk_usage(Path.cwd()).free, Path.cwd()
    is_full, remedy = free < _LITTLE_DISK, ": make room, or give --out elsewhere"
    room = f"{free / 2**30:.1f} GiB free in {here}{remedy * is_full}"
    yield Finding(name="disk", value=room, level="fix" if is_full else "ok")
    folder = os.environ.get("FAIRPATE_DATA")
    value = folder or "FAIRPATE_DATA is not set; data sets with files need --data-dir"
    if is_missing := bool(folder) and not Path(value).is_dir():
        value = f"FAIRPATE_DATA: {folder} is not a folder; create it"
    yield Finding(name="data folder", value=value, level="fix" if is_missing else "ok")
    try:
        check_output(state_folder(), "FAIRPATE_STATE")
        yield Finding(name="state folder", value=str(state_folder()))
    except (PlaceError, OdometerError) as error:
        yield Finding(name="state folder", value=str(error), level="fix")
    # Beside a torch of another build torchvision can be imported, and used, only after this.
    with suppress(UsageError):
        prepare_torchvision()
    for extra in MODULES:
        fault = extra_fault(extra)
        value = "installed" if fault is None else fault.words
        # An extra that is not installed is a choice; one that is installed and broken is a fault.
        yield Finding(name=f"extra {extra}", value=value, level="fix" if fault and fault.is_broken else "ok")


Kind = Literal["table", "images", "embeddings"]
Files = dict[str, bytes]
# Records of each part, in the order of `_PARTS`.
_SIZES = {"table": (1200, 400, 400), "images": (900, 300, 300), "embeddings": (1200, 400, 400)}
_PARTS = ("private", "public", "test")
_WARDS = ("surgery", "medicine", "other")
_SEED = 20260101
_SIDE, _SPOT = 16, 5
_EXAMPLE_WIDTH = 32


def _example_records(kind: Kind) -> Files:
    """Return the example records of a new project for a data set of the given ``kind``, as contents by file name: one
    CSV file each for private, public and test records, with the label as last column, and any pictures or vectors.

    The probability of the label yes differs a little between groups, so that there is a fairness gap to measure.
    """
    # A fixed seed: every project gets the same records, which are about no real person.
    generator, sizes = np.random.default_rng(_SEED), _SIZES[kind]
    count, starts = sum(sizes), np.cumsum(sizes)[:-1]
    is_woman_N = generator.random(count) < 0.5
    sex_N, files = np.where(is_woman_N, "F", "M"), Files()
    columns: dict[str, Any]
    if kind == "table":
        # Older patients with longer and earlier stays come back more often, and women a little.
        age_N = np.clip(generator.normal(62, 15, count), 18, 100).round().astype(int)
        days_N = np.minimum(generator.poisson(6, count), 30)
        earlier_N = np.minimum(generator.poisson(1.2, count), 10)
        ward_N = np.array(_WARDS)[generator.integers(len(_WARDS), size=count)]
        score_N = 0.09 * (age_N - 62) + 0.35 * (days_N - 6) + 0.9 * (earlier_N - 1.2) + 0.3 * is_woman_N
        columns = {"visit": [f"v{n:05d}" for n in range(count)], "sex": sex_N, "age": age_N, "days": days_N}
        columns |= {"earlier_visits": earlier_N, "ward": ward_N}
        label, is_so_N = "readmitted", generator.logistic(size=count) < 1.5 * score_N
    elif kind == "images":
        # Grey pictures, some with a bright spot; more often those of men, which are a little brighter as a whole.
        label, is_so_N = "spot", generator.random(count) < np.where(is_woman_N, 0.45, 0.55)
        pixels_NHW = generator.normal(90, 20, (count, _SIDE, _SIDE)) + np.where(is_woman_N, 0, 8)[:, None, None]
        for pixels_HW, (top, left), has_spot in zip(
            pixels_NHW, generator.integers(3, 7, size=(count, 2)), is_so_N, strict=True
        ):
            pixels_HW[top : top + _SPOT, left : left + _SPOT] += 70 * has_spot
            content = io.BytesIO()
            Image.fromarray(np.clip(pixels_HW, 0, 255).astype(np.uint8)).save(content, "PNG")
            files[f"pictures/scan{len(files):04d}.png"] = content.getvalue()
        columns = {"path": list(files), "sex": sex_N}
    else:
        # Vectors as a language model makes them of letters; some directions show what is urgent, and one the sex.
        vectors_NF = generator.normal(size=(count, _EXAMPLE_WIDTH))
        vectors_NF[:, 0] += np.where(is_woman_N, 0.6, -0.6)
        label, is_so_N = "urgent", vectors_NF[:, :4].sum(axis=1) + generator.logistic(scale=0.4, size=count) > 0
        columns = {"note": [f"n{n:05d}" for n in range(count)], "sex": sex_N}
        for part, array in zip(_PARTS, np.split(vectors_NF.astype(np.float32), starts), strict=True):
            content = io.BytesIO()
            np.save(content, array)
            files[f"example_{part}.npy"] = content.getvalue()
    columns[label] = np.where(is_so_N, "yes", "no")
    # The parts share no record: a private record that is public or tested too would have no protection there.
    for part, rows in zip(_PARTS, np.split(np.arange(count), starts), strict=True):
        # Public records lack the label.
        kept, text = list(columns)[: -1 if part == "public" else None], io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(kept)
        writer.writerows([columns[name][row] for name in kept] for row in rows)
        files[f"example_{part}.csv"] = text.getvalue().encode()
    return files


_TEMPLATES = Path(__file__).with_name("project")
_FILES = {
    "README.md": "README.md",
    "data_{kind}.yaml": "data.yaml",
    "settings_{kind}.yaml": "settings.yaml",
    "test_project.txt": "test_project.py",
}
_LONGEST = 64


class ProjectError(UsageError, ValueError):
    """Raised if a new project cannot have the name that the user chose; the message gives the reason."""


def write_project(folder: Path, kind: Kind = "table", *, intended_use: str = "") -> tuple[str, list[Path]]:
    """Write a new project for a data set of the given ``kind`` to ``folder``, completely or not at all; return the name
    of its data set, and the paths of its files. ``intended_use``: what its model is for, in the user's words.

    ProjectError if the folder's name has no letter or has a control character, or is that of a known data set.
    PlaceError if ``folder`` exists already or cannot be written.
    """
    if not folder.name.isprintable():
        raise ProjectError(f"NAME: {str(folder)!r} has a character that cannot be printed; leave it out.")
    name = re.sub(r"[^a-z0-9]+", "_", folder.name.lower()).strip("_")[:_LONGEST]
    if not re.match("[a-z]", name):
        raise ProjectError(f"NAME: {str(folder)!r} has no letter a-z to begin with; give a name such as hospital.")
    if name in [*REGISTRY]:  # without loading entries
        raise ProjectError(f"NAME: {name} is the name of a known data set; give another, such as my_{name}.")
    words = {"name": name, **read_yaml(_TEMPLATES / "words.yaml")[kind]}
    words["intended_use"] = json.dumps(intended_use, ensure_ascii=False)  # in quotes for YAML
    contents = {
        target: Template((_TEMPLATES / source.format(kind=kind)).read_text(encoding="utf-8")).substitute(words).encode()
        for source, target in _FILES.items()
    }
    contents |= {".gitignore": b"runs/\n"} | _example_records(kind)
    return name, write_folder(folder, contents)


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write the files ``contents`` (content by name) to a new ``folder``, all or none; return their paths. PlaceError
    if the folder exists or cannot be written."""
    # A link that leads nowhere is in the way too.
    if os.path.lexists(folder):
        raise PlaceError(f"NAME: {folder} exists already; give another name, or remove it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk: there a rename is one step.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            made = Path(scratch) / "project"
            made.mkdir()
            for file, content in contents.items():
                (made / file).parent.mkdir(exist_ok=True)
                (made / file).write_bytes(content)
            made.rename(folder)
    except OSError as error:
        raise PlaceError(f"NAME: {folder} cannot be written ({error.strerror}); give another place.") from error
    return sorted(folder.iterdir())
