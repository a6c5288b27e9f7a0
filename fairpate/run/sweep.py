"""A sweep: its configuration, its cells, its folder, and the table of results that is published.

A cell is the whole configuration of one method on one data set with one seed, checked before anything runs. It contains
only what its method reads, so that configurations that compute the same are one cell.

        results.parquet, report.html,
        figures/                       assembled from the parts; may be published
        private/ (mode 0700)           teachers and votes; the unpublished table and page; and
            parts/DIGEST.parquet       the rows of a finished cell, whole or absent
            failed/DIGEST.parquet      the cause, for a cell that failed when it was last tried
        runs/                          the cells' run directories, each with its own private and public part

Run times and error messages depend on private records: they stay under ``private/``, and so does everything about a
cell without a guarantee.
"""

import copy
import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import ValidationError

from fairpate.config import (
    ConfigError,
    DataConfig,
    RayConfig,
    SweepConfig,
    SweepPart,
    apply_override,
    axis_fields,
    disabling,
    flattened,
    merge,
    nearest,
    overlapping,
    parse_config,
    read_yaml,
    values_digest,
)
from fairpate.data.registry import REGISTRY, entry_for, request_of
from fairpate.fairness.rates import NOTIONS
from fairpate.files import PathIn, make_folder, private_folder, write_atomically
from fairpate.methods import base, defaults
from fairpate.methods.base import Method, determining_values, find_method, read_and_unread, refused
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_json
from fairpate.report.frontier import FAILED, Row
from fairpate.types import DataError, RunRecord, UserError, restored, strict

Values = dict[str, Any]
Schemas = dict[str, type[Method]]

# The columns of every notion of fairness: its value, the ends of its interval, and the smallest limit at which the
# records suffice to call it fair.
_FAIRNESS = {
    name if end == "value" else f"{name}_{end}": (name, end)
    for name in NOTIONS
    for end in ("value", "low", "high", "fair_from")
}
_WORDS = ("degenerate", "underserved_groups", "unmeasured_groups")
_UNITS = ("declared_units",)
_TEXT, _NUMBER, _COUNT = pa.string(), pa.float64(), pa.int64()
# Columns that cannot be null are known for a failed cell too.
_KNOWN = ("digest", "method", "data", "seed", "config", "status", "error", "command")
SCHEMA = pa.schema(
    pa.field(name, kind, nullable=name not in _KNOWN)
    for kind, names in (
        (_TEXT, ("digest", "method", "data")),
        (_COUNT, ("seed",)),
        (_TEXT, ("unit", "relation")),
        (_NUMBER, ("delta", "epsilon")),
        (pa.bool_(), ("epsilon_is_data_dependent",)),
        (_NUMBER, ("accuracy", "coverage", "disparity")),
        (_TEXT, ("config", "status", "error", "command")),
        (_NUMBER, ("minutes",)),
        (pa.bool_(), ("has_guarantee",)),
        (_NUMBER, ("majority_accuracy",)),
        (pa.list_(_TEXT), _WORDS),
        (_COUNT, ("answered",)),
        (pa.list_(_COUNT), ("answered_by_group",)),
        (_TEXT, ("metrics",)),
        (_NUMBER, tuple(_FAIRNESS)),
        (_COUNT, _UNITS),
        (_NUMBER, ("max_error", "max_error_confidence")),
    )
    for name in names
)
_GIVE_ONE = "give the results.parquet of `fairpate compare`"
_CELL = ("digest", "method", "data", "seed", "command", "error", "has_guarantee")
# Fields of a record without a column of the same meaning: those of the cell, and others in several columns.
_OWN = {"method", "data", "seed", "config", "fairness"}
_MEASURED = tuple(field.name for field in fields(RunRecord) if field.name not in _OWN)


class RecordsTableError(UserError, ValueError):
    """Raised if a file that should be the results table of a comparison is something else; the message names the file
    and the remedy."""


def write_rows(rows: Sequence[Row], path: Path, *, private: bool = False) -> None:
    """Write ``rows`` to the file ``path`` as a results table, in their order and atomically. With ``private`` only the
    file's owner may read it.

    ValueError for a row whose epsilon depends on private votes, unless the table is private.
    """
    plain = []
    for row in rows:
        values: dict[str, Any] = {name: getattr(row, name) for name in (*_CELL, "status", "minutes")}
        values["config"] = json.dumps(strict(row.config), allow_nan=False)
        if (found := row.record) is not None:
            values |= {name: getattr(found, name) for name in _MEASURED}
            values |= {column: found.fairness.get(name, {}).get(end) for column, (name, end) in _FAIRNESS.items()}
        # Undefined numbers are null; infinite ones stay.
        nan = [name for name, each in values.items() if isinstance(each, float) and math.isnan(each)]
        plain.append(values | dict.fromkeys(nan))
    write_table(pa.Table.from_pylist(plain, schema=SCHEMA), path, private=private)


def write_table(table: pa.Table, path: Path, *, private: bool = False) -> None:
    """Write a results table, whose columns are those of ``SCHEMA``, after the checks of :func:`write_rows`."""
    secret = table.filter(pc.fill_null(table["epsilon_is_data_dependent"], False))["digest"].to_pylist()
    if secret and not private:
        raise ValueError(
            f"rows: expected rows that may be published, got data-dependent epsilons of {', '.join(secret)}; write the "
            "rows with private=True."
        )
    write_atomically(path, lambda temporary: pq.write_table(table, temporary), private=private)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of the results table in the file ``path``, such as ``results.parquet``. RecordsTableError if the
    file is damaged or of another kind."""
    rows = []
    for values in read_table(path).to_pylist():
        config, record = json.loads(values["config"]), None
        if values["status"] == "ok":
            found = {name: values[name] for name in ("method", "data", "seed", *_MEASURED)} | {"config": config}
            found |= {name: values[name] or () for name in _WORDS}
            fairness: dict[str, dict[str, float | None]] = {}
            for column, (name, end) in _FAIRNESS.items():
                fairness.setdefault(name, {})[end] = values[column]
            # Each notion has columns; null is one that was undefined or not recorded.
            found["fairness"] = {name: ends for name, ends in fairness.items() if ends["value"] is not None}
            record = restored(RunRecord, found)
        minutes = math.nan if values["minutes"] is None else values["minutes"]
        rows.append(Row(**{name: values[name] for name in _CELL}, config=config, minutes=minutes, record=record))
    return rows


def read_table(path: Path) -> pa.Table:
    """Return the results table in a file, with the columns of ``SCHEMA``; errors as in :func:`read_rows`."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
        # A notion that the version of the table did not know was not recorded.
        for name in {*_FAIRNESS, *_UNITS} - {*table.column_names}:
            table = table.append_column(name, pa.nulls(len(table), SCHEMA.field(name).type))
        missing = [name for name in SCHEMA.names if name not in table.column_names]
    except FileNotFoundError:
        raise RecordsTableError(f"{path}: no such file; {_GIVE_ONE}.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise RecordsTableError(
            f"{path}: cannot be read ({error}); {_GIVE_ONE}, or if it is a damaged table of a comparison, delete it "
            "and run `fairpate compare` again."
        ) from error
    if missing:
        raise RecordsTableError(
            f"{path}: not the results table of a comparison, as it lacks columns {', '.join(missing)}; {_GIVE_ONE}."
        )
    # A table of a later version may have further columns.
    return table.select(SCHEMA.names).cast(SCHEMA)


def publishable(table: pa.Table, *, unprotected: bool) -> pa.Table:
    """Return the rows of the results ``table`` that may be published, without their run times and causes of failures.

    Rows whose epsilon depends on votes are left out. Unless ``unprotected`` is set, all rows of methods without a
    privacy guarantee are left out too, those of failed runs included.
    """
    # A failed run has no epsilon.
    is_infinite = pc.fill_null(pc.is_inf(table["epsilon"]), False)
    may_be_seen = pc.or_(pc.and_not(table["has_guarantee"], is_infinite), unprotected)
    # Two rules: a data-dependent epsilon stays private also where results without a guarantee are published.
    kept = table.filter(pc.and_not(may_be_seen, pc.fill_null(table["epsilon_is_data_dependent"], False)))
    causes = pc.if_else(pc.equal(kept["status"], "failed"), FAILED, "")
    for name, values in {"minutes": pa.nulls(len(kept), pa.float64()), "error": causes}.items():
        kept = kept.set_column(SCHEMA.names.index(name), SCHEMA.field(name), values)
    return kept


_FILES = (".weights.path", "data.declaration.path")
_SET_ELSEWHERE = {"seed": "seeds", "method": "methods", "out": "out, or give --out", "ray": "ray"}


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep (a comparison of methods): a method with its settings on one data set with one seed.
    ``data``: the data set's name in the results. ``digest``: a hash of the settings that determine the result, which is
    part of the names of its files."""

    data: str
    config: Method
    digest: str

    @property
    def method(self) -> str:
        return self.config.method

    @cached_property
    def command(self) -> str:
        """A shell command that runs this configuration again; it sets only what differs from the defaults of `fairpate
        run`.

        The command is published, so it names files of weights without their folders; a checksum identifies each file.
        """
        data = self.config.data
        # Without the settings that this cell leaves unread: the start may read them, and the command need not set them.
        start = flattened(determining_values(self.config, _begun(self.config).model_dump()))
        # A default that is derived from other fields is not the same as that value when set.
        dumped = flattened(self.config.model_dump())
        now = flattened(determining_values(self.config))
        every = flattened(self.config.model_dump(mode="json"))
        now |= {path: Path(value).name for path, value in every.items() if path.endswith(_FILES) and value}
        words = ["fairpate run --method", shlex.quote(self.method), "--data", shlex.quote(data.name)]
        for path, value in now.items():
            if path in ("method", "data.name"):
                continue
            if path not in start or start[path] != dumped[path]:
                # In one line, for a shell. PyYAML ends a bare scalar with `...`, the mark of a document's end.
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
                text = text.removesuffix("\n").removesuffix("\n...")
                words.append(f"--set {shlex.quote(f'{path}={text}')}")
        return " ".join(words)

    def row(self, **found: Any) -> Row:
        """Return the row of this configuration in the results table. ``found`` are the fields of the row that a run
        gives: ``minutes``, and either ``record`` (the result) or ``error``."""
        return Row(
            digest=self.digest,
            method=self.method,
            data=self.data,
            seed=self.config.seed,
            # Under the name that the sweep gives the data set, and without the places where the cell ran.
            config=strict(determining_values(self.config)),
            command=self.command,
            has_guarantee=self.config.is_private,
            **found,
        )

    def rows(self, run: RunDirectory, *, minutes: float) -> list[Row]:
        """Return the rows of ``run``, a finished run of this configuration: the public one and, if its privacy cost
        depends on votes, another one with that cost, which must not be published."""
        row, found = self.row(minutes=minutes), []
        # Once: a run without privacy keeps both records in one private file.
        for path in dict.fromkeys(path for path in (run.record, run.private_record) if path.exists()):
            # A sweep may call a data set by another name than the run does.
            values = read_json(path) | {"data": row.data, "config": row.config}
            # JSON has no infinity, so the file holds null.
            epsilon = math.inf if values["epsilon"] is None else values["epsilon"]
            found.append(replace(row, record=restored(RunRecord, values | {"epsilon": epsilon})))
        return found


def cells_of(sweep: SweepConfig, *, folder: Path, data_dir: Path | None = None) -> list[Cell]:
    """Return the cells of a sweep (each one method with its settings, data set and seed), each once, in the order of
    data sets, seeds, methods and grids.

    ``folder`` is the folder of the sweep's file. ConfigError lists all faults of all cells, each with the section of
    the sweep that set the field at fault.
    """
    # The values depend on the public files too, which may have changed since the last sweep.
    _fitted_values.cache_clear()
    _start.cache_clear()
    faults: list[str] = []
    schemas: Schemas = {}
    methods_on: dict[str, Schemas] = {data: {} for data in sweep.data_sets}
    for method, listing in sweep.methods.items():
        try:
            schemas[method] = find_method(method)
        except ConfigError as error:
            faults.append(f"methods.{method}: {str(error).removeprefix('method: ')}")
        for name in sweep.data_sets if listing.data_sets is None else listing.data_sets:
            if name not in sweep.data_sets:
                words = f"unknown data set {name}{nearest(name, list(sweep.data_sets))}."
                faults.append(f"methods.{method}.data_sets: {words}")
            elif method in schemas:
                methods_on[name][method] = schemas[method]
    faults += _misplaced(sweep, schemas, methods_on)
    last = [] if data_dir is None else [_Layer("--data-dir", {"data.data_dir": str(data_dir)})]
    cells: dict[str, Cell] = {}
    for data, part in sweep.data_sets.items():
        here = methods_on[data]
        try:
            read = None if part.file is None else read_yaml(folder / part.file)
            if read is not None and {"files", "label"} <= read.keys():
                raise ConfigError(  # noqa: TRY301 - reworded below
                    f"{part.file} is a declaration of records, not a configuration; give "
                    f"{data}: {{settings: {{data.declaration: {part.file}}}}}, under the name that it declares."
                )
            start = None if read is None else merge({"data": {"name": data}}, read)
        except ConfigError as error:
            faults.append(f"data_sets.{data}.file: {error}")
            continue
        _, unread = read_and_unread(list(here.values()), start or {})
        faults += [f"data_sets.{data}: {fault}" for path, value in unread for fault in refused(path, value)]
        tried = [
            _config(data, method, schema, start, [*layers, *last], faults)
            for method, schema in here.items()
            for layers in _layers(sweep, data, method)
        ]
        configs = [config for config in tried if config is not None]
        # Results must not carry the name of a data set other than their own.
        for name in {config.data.name for config in configs} - {data}:
            if data in REGISTRY:
                words = f"names another data set than data.name={name}; give the results another name."
                faults.append(f"data_sets.{data}: {words}")
        for seed in sweep.seeds:
            for config in configs:
                # The seed alone changes, so one validation serves all.
                split = config.data.model_copy(update={"seed": seed}) if sweep.split_by_seed else config.data
                of_seed = config.model_copy(update={"seed": seed, "data": split})
                # A data set that the sweep calls by two names has a cell, and rows, under each.
                digest = base.config_digest(of_seed) + ("" if config.data.name == data else f"-{data}")
                cells[digest] = Cell(data=data, config=of_seed, digest=digest)
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return list(cells.values())


@dataclass(frozen=True)
class _Layer:
    """The settings in one section of a sweep (a comparison of methods), by dotted field name. They override those of
    earlier sections; ``place`` is the section's name in error messages."""

    place: str
    values: Mapping[str, Any]


def _layers_of(part: SweepPart | SweepConfig, place: str) -> tuple[_Layer, dict[str, list[_Layer]]]:
    """Return the settings of one section of a sweep (a comparison of methods): those that do not vary, and for each
    axis of its grid a list with the settings of each value on this axis."""
    axes = {
        axis: [_Layer(f"{place}grid", dict.fromkeys(axis_fields(axis), value)) for value in values]
        for axis, values in part.grid.items()
    }
    return _Layer(f"{place}settings", part.settings), axes


def _misplaced(sweep: SweepConfig, schemas: Schemas, methods_on: Mapping[str, Schemas]) -> Iterator[str]:
    """Yield an error message for each field that is set in a section of the sweep where it has no effect.

    Either the sweep has another field for it (``seeds`` for ``seed``), or its section applies only to methods that do
    not read it. ``schemas``: the methods of the sweep; ``methods_on``: those that run on each data set.
    """
    words = _SET_ELSEWHERE | ({"data.seed": "seeds, or set split_by_seed: false"} if sweep.split_by_seed else {})
    parts: list[tuple[str, SweepPart | SweepConfig, Schemas]] = [("", sweep, schemas)]
    parts += [(f"data_sets.{name}.", part, methods_on[name]) for name, part in sweep.data_sets.items()]
    for name, own in sweep.methods.items():
        parts.append((f"methods.{name}.", own, {name: schemas[name]} if name in schemas else {}))
    for place, part, reading in parts:
        alone = next(iter(reading), "") if place.startswith("methods.") else ""
        settings, axes = _layers_of(part, place)
        for layer in [settings, *itertools.chain(*axes.values())]:
            for field in flattened(layer.values):
                word = words.get(field) or words.get(field.partition(".")[0])
                if word is not None:
                    yield f"{layer.place}.{field}: a sweep does not read this field here; use {word}."
            try:
                _, unread = read_and_unread(list(reading.values()), _nested(layer.values))
            except ConfigError:
                continue  # reported with the cells
            for path, value in unread:
                faults = [f"{'.'.join(path)}: {alone} does not read it; leave it out."] if alone else []
                yield from (f"{layer.place}.{fault}" for fault in refused(path, value) or faults)


def _layers(sweep: SweepConfig, data: str, method: str) -> Iterator[list[_Layer]]:
    """Yield the settings of each cell of the method ``method`` on the data set ``data``, without its seed: one list of
    layers for every combination of grid values.

    Each layer holds the settings of one section and overrides defaults and earlier layers. If grids of several sections
    set the same field, the method's values replace the data set's, and the data set's replace the sweep's.
    """
    # A cell runs in a Ray task: actors of its own would wait for the CPUs that it holds.
    in_task = RayConfig(num_actors=0, num_gpus=sweep.tasks.num_gpus, num_cpus=sweep.tasks.torch_threads)
    settings, axes = [_Layer("tasks", {"ray": in_task.model_dump()})], dict[str, list[_Layer]]()
    of_data, of_method = sweep.data_sets[data], sweep.methods[method]
    for place, part in (("", sweep), (f"data_sets.{data}.", of_data), (f"methods.{method}.", of_method)):
        settings_here, own = _layers_of(part, place)
        settings.append(settings_here)
        axes = {axis: kept for axis, kept in axes.items() if not any(overlapping(axis, other) for other in own)} | own
    for chosen in itertools.product(*axes.values()):
        yield [*settings, *chosen]


def _config(
    data: str, method: str, schema: type[Method], start: Values | None, layers: Sequence[_Layer], faults: list[str]
) -> Method | None:
    """Return the configuration of a cell: the values ``start``, overridden by the settings in ``layers``. None if the
    configuration has a fault, whose message is added to ``faults``.

    If ``start`` is None, the values are those that `fairpate run` starts from on this data set.
    """
    config = None
    found: list[Exception] = []
    laid: list[_Layer] = []
    begun: Values = {"data": {"name": data}} if start is None else start
    if start is None:
        # What `fairpate run --method METHOD --data NAME` starts from, with the layers' own data section.
        try:
            settings = begun
            for layer in layers:
                settings = merge(settings, _nested(layer.values))
            own_data = parse_config(settings["data"], DataConfig)
        except ConfigError:
            pass  # reported below with the rest
        else:
            try:
                begun = _fitted_values(method, own_data.model_dump_json(), defaults.kind_of_teachers(settings))
            except (ConfigError, DataError) as error:
                found.append(error)
    values = merge(schema().model_dump(), read_and_unread([schema], begun)[0])
    try:
        for layer in layers:
            if not isinstance(values["data"], dict):
                break  # reported below; a merge would replace it unseen
            laid.append(layer)
            values = merge(values, read_and_unread([schema], _nested(layer.values))[0])
        config = parse_config(values | {"method": method}, schema)
        # Unread settings get the values that the cell's command starts from, so that they make no second cell.
        beneath = flattened(_begun(config).model_dump())
        reasons, given = config.unread, flattened(values).keys() & beneath.keys()
        if unread := [path for path in given if disabling(path, reasons)]:
            kept = merge(values, _nested({path: beneath[path] for path in unread}))
            config = parse_config(kept | {"method": method}, schema)
        config.require_trainable()
    except (ConfigError, DataError) as error:
        found.append(error)
    try:
        section = DataConfig.model_validate(values["data"])
        entry = entry_for(section)
        entry.located(request_of(section, entry))
    except ValidationError:
        assert found  # the section was reported with the rest
    except DataError as error:
        found.append(error)
    for fault in (line for error in found for line in str(error).splitlines()):
        field = fault.partition(": ")[0]
        # The last layer that names a field is the one that set it; otherwise it is a default of the data set.
        places = [each.place for each in laid if any(overlapping(field, path) for path in flattened(dict(each.values)))]
        faults.append(f"{places[-1]}.{fault}" if places else f"data_sets.{data}: {fault}")
    return None if found else config


def _nested(settings: Mapping[str, Any]) -> Values:
    """Return ``settings``, which have dotted names, as nested sections. ConfigError if one setting gives a field a
    plain value and another sets a field inside it."""
    nested: Values = {}
    # A copy, because sections are written into: a caller's section stays its own.
    for path, value in copy.deepcopy(dict(settings)).items():
        section, parts = nested, path.split(".")
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"{path}: {part} is a value, not a section, so nothing can be set inside it; leave out one of "
                    "the two settings."
                )
        section.update(merge(section, {parts[-1]: value}))
    return nested


@lru_cache
def _fitted_values(method: str, data_json: str, teachers: defaults.TeacherKind) -> Values:
    # One mapping for all callers, which merge it and never write into it.
    data = DataConfig.model_validate_json(data_json)
    return merge(defaults.fitted(data, method, teachers=teachers), {"data": {"name": data.name}})


def _begun(config: Method) -> Method:
    """Return the configuration from which `fairpate run` with the method, the data set and the kind of teachers of
    ``config`` starts, before any ``--set``."""
    return _start(config.method, config.data.model_dump_json(), defaults.kind_of_teachers(config.model_dump()))


@lru_cache
def _start(method: str, data_json: str, teachers: defaults.TeacherKind) -> Method:
    """Return the configuration of :func:`_begun`; ``data_json`` is the data set's :class:`DataConfig` as JSON text."""
    return base.configured(_fitted_values(method, data_json, teachers), method=method)


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read the YAML file of a sweep (a comparison of methods), apply overrides such as ``seeds=[0,1]``, and return the
    configuration; errors as in :func:`parse_sweep`."""
    values = read_yaml(path)
    if {"files", "label"} <= values.keys():
        raise ConfigError(
            f"{path}: a declaration of records, not a comparison; name the file in a comparison, as in `data_sets: "
            f"{{NAME: {{settings: {{data.declaration: {path}}}}}}}`, or run one method with `fairpate run --data "
            f"{path}`."
        )
    apply_override(values, *overrides)
    # Before the values are checked, because that imports the class of a method of another package.
    methods = values.get("methods")
    for method in methods if isinstance(methods, dict | list) else ():
        base.require_trusted(method, path)
    return parse_sweep(values)


def parse_sweep(values: Values) -> SweepConfig:
    """Return the configuration of a sweep (a comparison of methods) that ``values`` describe. ConfigError lists all
    faults of its own fields; :func:`cells_of` checks the settings of methods."""
    fields_of_a_run = {name for schema in base.all_methods().values() for name in schema.model_fields}
    of_a_run = [name for name in values if name in fields_of_a_run - SweepConfig.model_fields.keys()]
    if of_a_run and not {"methods", "data_sets"} & values.keys():
        raise ConfigError(
            f"CONFIG: this file configures one run, not a comparison, as it has {', '.join(of_a_run)} and neither "
            "methods nor data_sets; give it to `fairpate run`."
        )
    return parse_config(values, SweepConfig)


@dataclass(frozen=True, kw_only=True)
class SweepFolder:
    """The folder of one sweep (a comparison of methods): the paths in it, and the result rows of its cells (one method
    with its settings, data set and seed each).

    ``publish_unprotected``: results without privacy are included in the public table.
    """

    root: Path
    publish_unprotected: bool = False

    private = PathIn("root", "private")
    teachers = PathIn("private", "teachers", "Checkpoints of the teachers that several cells of the sweep share.")
    votes = PathIn("private", "votes", "Teachers' votes that several cells of the sweep share.")
    parts = PathIn("private", "parts", "The results rows of each finished cell of the sweep, in a file per cell.")
    failed = PathIn("private", "failed", "The results row, with the cause, of each failed cell, in a file per cell.")
    results = PathIn("root", "results.parquet", "The results table that may be published.")
    private_results = PathIn("private", "results.parquet", "The table not to be published: all rows, with causes.")
    work = PathIn("private", "work.json", "What the workers of the sweep did, in numbers; for its operator.")
    report = PathIn("root", "report.html", "The report of the comparison that may be published, as a page.")
    figures = PathIn("root", "figures", "The figures of the public report as image files.")
    private_report = PathIn("private", "report.html", "The report that must not be published, as a page.")
    config = PathIn("root", "sweep.yaml", "The configuration of the sweep as it was last requested.")

    def run(self, cell: Cell | Row) -> Path:
        return self.root / "runs" / f"{cell.method}-{cell.data}-{cell.digest}"

    def shared_file(self, cell: Cell) -> Path | None:
        """Return the path of the file that the cell may share with other cells: a release, or teachers' votes (then it
        ends in ``.parquet``); None if it shares neither.

        The file name is a digest of the settings that determine the file's content.
        """
        if (shared := cell.config.shared_release) is not None:
            return RunDirectory(root=self.root / f"runs/release-{values_digest(shared)}").released
        if (asked := cell.config.shared_votes) is None:
            return None
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        return self.votes / f"{name}.parquet"

    def add(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Store the rows of a finished cell, one configuration of the sweep, in the folder."""
        # The result first: a crash in between leaves both, and a part outranks a failure.
        write_rows(rows, self.parts / f"{cell.digest}.parquet", private=True)
        (self.failed / f"{cell.digest}.parquet").unlink(missing_ok=True)

    def holds(self, cells: Sequence[Cell]) -> bool:
        """Return True if the results tables contain exactly the configurations ``cells``, and all of these have
        finished."""
        # Only the digests are read: a sweep that has nothing to do should end at once.
        finished = []
        for path in (self.results, self.private_results):
            try:
                # Not `pq.read_table`, which imports pandas.
                with pq.ParquetFile(path) as file:
                    table = file.read(columns=["digest", "status"])
            except (OSError, pa.ArrowInvalid):
                return False
            finished.append(table["digest"].filter(pc.equal(table["status"], "ok")).to_pylist())
        public = [cell.digest for cell in cells if cell.config.is_private or self.publish_unprotected]
        # In order, as cells are written; a cell has two rows in the operator's table where an epsilon depends on votes.
        return finished[0] == public and set(finished[1]) == {cell.digest for cell in cells}

    def assemble(self, cells: Sequence[Cell]) -> None:
        """Write the public and the private results table: for each configuration in ``cells`` its rows, or the cause of
        its failure."""
        # Results last, which outrank failures: a crash may have left both a failure and the result that came later.
        files = {path.stem: path for folder in (self.failed, self.parts) for path in folder.glob("*.parquet")}
        known = SCHEMA.empty_table()
        # Rows that the private table has are taken from there, so that only new parts are read.
        with suppress(RecordsTableError):  # there is none yet, or a damaged one: it is assembled anew from the parts
            known = read_table(self.private_results)
            # A failure is read from its own file, which may have another cause by now.
            known = known.filter(pc.equal(known["status"], "ok"))
            done = [digest for digest, path in files.items() if path.parent == self.parts]
            known = known.filter(pc.is_in(known["digest"], value_set=pa.array(done, pa.string())))
        digests, read = [cell.digest for cell in cells], set(known["digest"].to_pylist())
        new = [read_table(files[digest]) for digest in digests if digest in files and digest not in read]
        rows, wanted = pa.concat_tables([known, *new]), pa.array(digests, pa.string())
        rows = rows.filter(pc.is_in(rows["digest"], value_set=wanted))
        # A cell whose epsilon also has a value that depends on votes has two rows here, which keep their order.
        rows = rows.take(pc.array_sort_indices(pc.index_in(rows["digest"], value_set=wanted)))
        # The operator's table first: after a crash in between, `holds` finds that the public one lacks rows.
        write_table(rows, self.private_results, private=True)
        write_table(publishable(rows, unprotected=self.publish_unprotected), self.results)


def open_sweep_folder(root: Path, sweep: SweepConfig) -> SweepFolder:
    """Create the folder ``root`` for a sweep, or reopen the folder of an earlier sweep, and return the paths in it.
    Results in the folder stay there, so that a configuration that has finished need not run again.

    RunDirectoryError for a folder that holds something else.
    """
    folder = SweepFolder(root=root, publish_unprotected=sweep.publish_unprotected)
    # Parts mark the folder of a sweep, also one that a crash left without tables.
    if not folder.parts.is_dir() and any(path.is_file() for path in root.rglob("*")):
        raise RunDirectoryError(
            f"{root}: this folder is not empty and holds no comparison; give another folder with --out."
        )
    make_folder(root / "runs")
    private_folder(folder.private)
    for path in (folder.votes, folder.parts, folder.failed):
        make_folder(path)
    return folder
