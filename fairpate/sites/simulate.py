"""Simulate a release over sites on one machine: distribute records to sites, and run the real commands as processes.

Only the distribution of the records is simulated; the protocol is the real one. Records of a table are distributed as
rows of the publisher's text, at random or by the value of a column, such as the state of a census record; pictures are
distributed at random as vectors of numbers. All records of a person go to one site.

This is meant for public records: one machine has them all, so nothing is hidden. The records of a user's own
declaration may be private, so their release is also charged to the operator's odometer (the total cost of all releases
on these records) before a party begins.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from fairpate.config import ConfigError, DataConfig, Override
from fairpate.data.dataset import Dataset, holds
from fairpate.data.declaration import read_declaration, rows_of
from fairpate.data.registry import MADE, declaration_path, entry_for, load_data, request_of
from fairpate.data.table_files import text_of
from fairpate.methods.defaults import resolved
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import event_from
from fairpate.releases.directory import RunDirectory
from fairpate.releases.odometer import Odometer, RunCharge
from fairpate.sites.plan import key_text, make_plan, new_key
from fairpate.sites.site import TURN
from fairpate.terminal import Reporter
from fairpate.types import IntArray, UsageError, UserError

# The fields of a codebook that describe how to read the publisher's files, or how to divide them.
_OF_FILES = ("files", "header", "comment", "separator", "trim", "num_public", "num_validation", "num_test", "rows")
_PARTS = ("private", "public", "test")
_WAIT_S = "600"


class SimulationError(UserError):
    """A process of a simulated party failed; the message ends with the output of that process."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of a simulation: the coordinator's run, the number of private records of each site, and the time and
    memory that were used.

    ``site_mb`` is the largest memory, in megabytes, of a site's process that exchanges messages.
    """

    run: RunDirectory
    records: tuple[int, ...]
    seconds: float
    largest_process_mb: float
    site_mb: int


def site_folders(folder: Path, sites: int) -> list[Path]:
    """Return the folders of the ``sites`` simulated sites in ``folder``."""
    return [folder / f"site{number}" for number in range(1, sites + 1)]


def deal(data: DataConfig, folder: Path, *, sites: int, by: str | None = None) -> tuple[int, ...]:
    """Distribute the private records of ``data`` to ``sites`` sites, and write the files of all parties below
    ``folder``; return the number of private records of each site.

    Records are distributed at random or by ``by``, a column of the publisher's table, whose values are assigned to
    sites in turn, the most frequent first; ``COLUMN:N`` uses the first N characters of a value. ConfigError for a
    column with fewer values than sites, and for pictures whose features are pixels.
    """
    path = declaration_path(data)
    if path.is_file():
        rows, declared, of_person = _rows(data, path)
    elif by is None:
        (rows, declared), of_person = _vectors(load_data(data)), ""
    else:
        raise ConfigError(f"--by: {data.name} are pictures, which have no columns; leave --by out.")
    order = np.random.default_rng(data.seed)
    site_N = _dealt(rows["private"], of_person, order, sites=sites, by=by)
    # The plan's settings are computed from this public number, by site, and not from the records.
    declared |= {"files": {part: f"{part}.parquet" for part in _PARTS}, "rows": max(1, len(site_N) // sites)}
    for number, party in enumerate([folder / "coordinator", *site_folders(folder, sites)], start=-1):
        party.mkdir(parents=True)
        (party / "data.yaml").write_text(yaml.safe_dump(declared, sort_keys=False), encoding="utf-8")
        pq.write_table(rows["public"], party / "public.parquet")
        # The coordinator has no private record, and no site needs test records that are public.
        own = rows["private"].filter(pa.array(site_N == number))
        pq.write_table(own if number >= 0 else rows["test"], party / f"{'private' if number >= 0 else 'test'}.parquet")
    return tuple(np.bincount(site_N, minlength=sites).tolist())


def _rows(data: DataConfig, path: Path) -> tuple[dict[str, pa.Table], dict[str, Any], str]:
    """Read the table that the YAML declaration ``path`` describes. Return its rows as text, by part of the data set
    (such as the test records), the declaration without its fields about files, and the name of the column of person
    ids, empty for a table without them."""
    table, entry = read_declaration(path), entry_for(data)
    found: dict[str, list[pa.Table]] = {}
    request = request_of(data, entry)
    if data.declaration is None and data.name in MADE:
        request = replace(request, tables={"records": MADE[data.name]()})
    # All columns: records may be dealt by one that is not a feature.
    for part, _, rows in rows_of(table, request, table.files.parts, others=True):
        for rule in (rule for rule in table.keep if holds(rule.when, request.options)):
            rows = rows.filter(pc.invert(pc.is_in(text_of(rows[rule.column]), pa.array(rule.other_than, pa.string()))))
        found.setdefault(part, []).append(rows)
    rows_of_part = {part: pa.concat_tables(tables, promote_options="default") for part, tables in found.items()}
    pooled = rows_of_part.pop("records", None)
    persons = table.persons(request.options)
    person = persons.column if persons else ""
    if pooled is not None:
        unit_N = np.arange(len(pooled))
        if person:
            unit_N = np.unique(np.array(text_of(pooled[person]).to_pylist(), dtype=str), return_inverse=True)[1]
        # Another stream than that which later deals the private records to sites.
        drawn = np.random.default_rng([data.seed, 1]).permutation(unit_N.max(initial=-1) + 1)
        rank_N = np.argsort(drawn)[unit_N]
        free = np.argsort(rank_N, kind="stable")
        for part in ("public", "test"):
            if part not in rows_of_part:
                asked = getattr(data, f"num_{part}")
                size = asked if asked is not None else getattr(table, f"num_{part}") or len(pooled) // 10
                # With all records of the last person: a person is in one part, as sites ask for.
                size = np.searchsorted(rank_N[free], rank_N[free[:size][-1]], side="right") if size else 0
                rows_of_part[part], free = pooled.take(free[:size]), free[size:]
        rows_of_part["private"] = pooled.take(free)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    declared = {name: value for name, value in values.items() if name not in _OF_FILES}
    if "when" not in json.dumps(declared):
        declared.pop("options", None)  # options that only choose files
    return rows_of_part, declared | {"name": f"{data.name}_sites"}, person


def _vectors(dataset: Dataset) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Return the records of a data set as tables of numbers, by part of the data set (such as the test records), and a
    declaration (a description as in a YAML file) of these tables."""
    if dataset.kind == "image":
        raise ConfigError(
            f"data.options.features: {dataset.name} are pictures; set oriented_gradients, as sites exchange no pixels."
        )
    rows = {}
    for part in _PARTS:
        split = dataset.splits[part]
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(split.x.numpy().ravel()), split.x.shape[1])
        words: Mapping[str, Sequence[str]] = {"label": dataset.label_names, "group": dataset.group_names}
        codes = {"label": split.y.tolist(), "group": split.z.tolist()}
        named = {name: [words[name][code] if code >= 0 else "" for code in codes[name]] for name in words}
        rows[part] = pa.table({"record": [f"{part}-{number}" for number in range(len(split))], "x": vectors} | named)
    declared = {
        "name": f"{dataset.name}_sites",
        "kind": "embeddings",
        "features": {"x": {"vector": int(dataset.private.x.shape[1])}},
        "label": {"column": "label", "classes": {name: name for name in dataset.label_names}},
        "group": {"column": "group", "values": {name: name for name in dataset.group_names}},
        "identity": {"key": ["record"]},
    }
    return rows, declared


def _dealt(private: pa.Table, of_person: str, order: np.random.Generator, *, sites: int, by: str | None) -> IntArray:
    """Return for each record of the table ``private`` the index of the site to which it goes. ``of_person``: the column
    of person ids; ``by`` as in :func:`deal`."""
    column, _, length = (by or "").partition(":")
    column = column or of_person
    if not column:
        return order.permutation(len(private)) % sites
    if column not in private.column_names:
        raise ConfigError(f"--by: there is no column {column}; give one of {', '.join(private.column_names)}.")
    text = text_of(private[column])
    values = text if not length else pc.utf8_slice_codeunits(text, 0, int(length))
    found, value_N = np.unique(np.array(values.to_pylist(), dtype=str), return_inverse=True)
    if len(found) < sites:
        raise ConfigError(
            f"--by: {by or column} has {len(found)} values, fewer than {sites} sites; simulate fewer sites."
        )
    # Values are dealt in turn: those of a column by frequency, persons in random order.
    ranked = np.argsort(-np.bincount(value_N), kind="stable") if by else order.permutation(len(found))
    site_of = np.empty(len(found), np.int64)
    site_of[ranked] = np.arange(len(found)) % sites
    dealt_N: IntArray = site_of[value_N]
    if by and of_person:
        # A person at two sites is two units, and the statement of one machine's simulation would claim one.
        names = text_of(private[of_person])
        pairs = pa.table({"person": names, "site": dealt_N}).group_by(["person", "site"]).aggregate([])
        counts = pc.value_counts(pairs["person"]).field("counts")
        if parted := pc.sum(pc.greater(counts, 1)).as_py():
            raise ConfigError(
                f"--by: {by} divides the records of {parted:,} persons between sites; give a column that is the same "
                "for all records of a person, or leave --by out."
            )
    return dealt_N


def simulate(
    data: DataConfig,
    folder: Path,
    *,
    sites: int,
    by: str | None = None,
    method: str = "weighted_votes",
    overrides: Sequence[Override] = (),
    may_vanish: int = 0,
    may_collude: int = 1,
) -> Simulated:
    """Distribute the records of ``data`` to simulated sites in ``folder``, plan a release, and run the commands of
    coordinator and sites as processes.

    ``by`` as in :func:`deal`; ``may_vanish`` and ``may_collude`` as in :func:`fairpate.sites.plan.make_plan`;
    ``overrides`` are settings of ``method``. UsageError for a folder that exists; ConfigError or PlanError for a
    release that cannot be planned; SimulationError for a process that fails, after all others were ended.
    LimitReachedError if the records are declared by the user, and their release would exceed a limit in the operator's
    odometer (the database of privacy costs).
    """
    if folder.exists():
        raise UsageError(f"--out: {folder} exists already; give another folder.")
    records = deal(data, folder, sites=sites, by=by)
    coordinator, parties = folder / "coordinator", site_folders(folder, sites)
    keys = {party.name: key_text(new_key(party / "own.key").public) for party in parties}
    began_s = time.monotonic()
    named = {"data.name": f"{data.name}_sites", "data.declaration": str(coordinator / "data.yaml")}
    config = resolved([*overrides, *named.items()], method, num_sites=sites)
    numbers = {"may_vanish": may_vanish, "may_collude": may_collude}
    plan = make_plan(config, keys, coordinator / "plan.json", **numbers, reporter=Reporter(quiet=True))
    started: list[subprocess.Popen[str]] = []
    # Each takes hundreds of megabytes: of the processes that compute tables, as many at once as there are processors.
    turns = [folder / f"turn{number}" for number in range(min(sites, os.cpu_count() or 1))]
    for each in turns:
        each.touch()

    def start(party: Path, *words: str) -> subprocess.Popen[str]:
        # A file: a pipe is not read while the others work, and a full one would stop a party.
        state, turn = (party / "state").absolute(), turns[len(started) % len(turns)].absolute()
        command = [sys.executable, "-m", "fairpate", "site", *words, "--json"]
        # Its own odometer, as each party would have on a machine of its own.
        environment = os.environ | {"FAIRPATE_STATE": str(state), TURN: str(turn)}
        with (party / f"{words[0]}.log").open("w") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command, cwd=party, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        started.append(process)
        return process

    def result(process: subprocess.Popen[str], party: Path, command: str) -> dict[str, Any]:
        output, _ = process.communicate()
        if process.returncode:
            raise SimulationError(
                f"{party.name}: `fairpate site {command}` failed; correct the cause in its output: "
                f"{output or '(no output)'}"
            )
        return json.loads(output)

    try:
        if data.declaration is not None:
            # In the operator's own odometer. LimitReachedError if a limit has no room.
            events = tuple(map(event_from, (*plan.events, *plan.test_events)))
            release = RunCharge(
                run=plan.id,
                data=data.name,
                unit=plan.unit,
                relation=events[0].relation,
                noise=OS_ENTROPY,
                method=str(plan.settings["method"]),
                path=str((coordinator / "run").absolute()),
                events=events,
            )
            Odometer().charge(release)
        # Chosen here: the sites are started with the port before the coordinator listens.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        own = ("--data", "data.yaml", "--out", "run", "--wait-s", _WAIT_S)
        serving = start(coordinator, "serve", "plan.json", "--port", port, *own)
        agreed = ("--key", "own.key", "--plan", plan.digest, "--yes")
        joining = [start(party, "join", f"http://127.0.0.1:{port}", *own, *agreed) for party in parties]
        joined = [result(process, party, "join") for party, process in zip(parties, joining, strict=True)]
        result(serving, coordinator, "serve")
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return Simulated(
        run=RunDirectory(root=coordinator / "run"),
        records=records,
        seconds=time.monotonic() - began_s,
        # In kB, on Linux; the coordinator's process, which trains the model, is mostly the largest.
        largest_process_mb=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        site_mb=max(each["largest_mb"] or 0 for each in joined),
    )
