"""From a sweep's configuration to its cells: each the whole configuration of a method, checked before anything runs.

All faults of all cells are reported at once, each under the place in the sweep that set the field. A cell holds what
its method reads and nothing else, so that an axis it does not read makes no second one: two that compute the same are
one.
"""

from __future__ import annotations

import copy
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fairpate.app.identity import config_digest, determining, determining_values, flattened
from fairpate.compare_config import SweepConfig, SweepPart, axis_fields, overlapping
from fairpate.config import ConfigError, DataConfig, RayConfig
from fairpate.config_reader import merge, parse_config, read_yaml
from fairpate.data import REGISTRY, DataError, data_dir_of, entry_for
from fairpate.data.files import locate
from fairpate.evaluation.settings_read import unread_because_of
from fairpate.methods import find_method
from fairpate.methods.definition import Method
from fairpate.methods.fitted import fitted
from fairpate.methods.load import configured, read_of, refused, start_of, unread_by
from fairpate.names import nearest

_FILES = (".weights.path", "data.declaration.path")
_SAID_ELSEWHERE = {"seed": "seeds", "method": "methods", "out": "out, or give --out", "ray": "ray"}

Values = dict[str, Any]
Faults = dict[str, None]
"""Each once, in the order in which they were found."""


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep. ``data`` is the name that results carry, ``digest`` that of what is computed."""

    data: str
    config: Method
    digest: str

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method

    @cached_property
    def command(self) -> str:
        """A shell command that computes the same: only what differs from where `fairpate run` starts is named.

        It is published, so it names files of weights without their folders; the checksum says which file is meant.
        """
        data = self.config.data
        # Without what this cell leaves unread, which where it starts may read, and the other way about.
        start = flattened(determining(_start(self.method, data.model_dump_json()).model_dump(), self.config))
        # A default that follows from other fields is unlike the same value, said: it would follow from others there.
        said = flattened(self.config.model_dump())
        now = flattened(determining_values(self.config))
        every = flattened(self.config.model_dump(mode="json"))
        now |= {path: Path(value).name for path, value in every.items() if path.endswith(_FILES) and value}
        overrides = [
            f"--set {shlex.quote(f'{path}={_yaml(value)}')}"
            for path, value in now.items()
            if (path not in start or start[path] != said[path])
            and path not in ("method", "data.name")
            and unread_because_of(path, every) is None
        ]
        return " ".join(
            ["fairpate run --method", shlex.quote(self.method), "--data", shlex.quote(data.name), *overrides]
        )


def cells_of(
    sweep: SweepConfig, *, folder: Path, data_dir: Path | None = None, left_out: Sequence[str] = ()
) -> list[Cell]:
    """Every cell once, in the order of data sets, seeds, methods and grids.

    ``folder`` is where the sweep's file lies; ``left_out`` names data sets that methods may list and that are not here.
    ConfigError lists all faults of all cells.
    """
    faults: Faults = {}
    schemas = _schemas(sweep, faults)
    faults |= dict.fromkeys([*_unknown_data_sets(sweep, left_out), *_misplaced(sweep, schemas)])
    cells: dict[str, Cell] = {}
    for data, part in sweep.data_sets.items():
        here = {name: schemas[name] for name in _methods_on(sweep, data) if name in schemas}
        try:
            start = None if part.file is None else merge({"data": {"name": data}}, read_yaml(folder / part.file))
        except ConfigError as error:
            faults[f"data_sets.{data}.file: {error}"] = None
            continue
        unread = unread_by(list(here.values()), start or {})
        faults |= {f"data_sets.{data}: {fault}": None for path, value in unread for fault in refused(path, value)}
        configs = [
            _config(data, method, schema, start, layers, data_dir, faults)
            for method, schema in here.items()
            for layers in _layers(sweep, data, method)
        ]
        faults |= dict.fromkeys(_misnamed(data, configs))
        over_seeds = [_over_seeds(data, config, sweep) for config in configs if config is not None]
        cells |= {cell.digest: cell for of_seed in zip(*over_seeds, strict=True) for cell in of_seed}
    if faults:
        raise ConfigError("\n".join(faults))
    return list(cells.values())


def _schemas(sweep: SweepConfig, faults: Faults) -> dict[str, type[Method]]:
    """The class of every method that there is."""
    schemas = {}
    for method in sweep.methods:
        try:
            schemas[method] = find_method(method)
        except ConfigError as error:
            faults[f"methods.{method}: {str(error).removeprefix('method: ')}"] = None
    return schemas


def _methods_on(sweep: SweepConfig, data: str) -> list[str]:
    return [name for name, part in sweep.methods.items() if part.data_sets is None or data in part.data_sets]


def _misnamed(data: str, configs: Iterable[Method | None]) -> Iterator[str]:
    """Results must not carry the name of a data set that they are not of."""
    for name in {config.data.name for config in configs if config is not None} - {data}:
        if data in REGISTRY:
            yield f"data_sets.{data}: names another data set than data.name={name}; give the results another name."


def _unknown_data_sets(sweep: SweepConfig, left_out: Sequence[str]) -> Iterator[str]:
    data_sets = [*sweep.data_sets, *left_out]
    for method, part in sweep.methods.items():
        for name in part.data_sets or ():
            if name not in data_sets:
                yield f"methods.{method}.data_sets: unknown data set {name}{nearest(name, data_sets)}."


@dataclass(frozen=True)
class _Layer:
    """Dotted fields that one place of the sweep sets."""

    place: str
    values: Mapping[str, Any]


def _settings(part: SweepPart | SweepConfig, place: str) -> _Layer:
    return _Layer(f"{place}settings", part.settings)


def _axes(part: SweepPart | SweepConfig, place: str) -> dict[str, list[_Layer]]:
    """A layer for each value of each axis."""
    return {
        axis: [_Layer(f"{place}grid", dict.fromkeys(axis_fields(axis), value)) for value in values]
        for axis, values in part.grid.items()
    }


def _misplaced(sweep: SweepConfig, schemas: Mapping[str, type[Method]]) -> Iterator[str]:
    """Fields for which the sweep has words of its own, and what is wrong with those that no cell there reads."""
    words = _SAID_ELSEWHERE | ({"data.seed": "seeds, or set split_by_seed: false"} if sweep.split_by_seed else {})
    parts: list[tuple[str, SweepPart | SweepConfig, Iterable[str]]] = [("", sweep, sweep.methods)]
    parts += [(f"data_sets.{name}.", part, _methods_on(sweep, name)) for name, part in sweep.data_sets.items()]
    parts += [(f"methods.{name}.", part, [name]) for name, part in sweep.methods.items()]
    for place, part, methods in parts:
        reading = [schemas[name] for name in methods if name in schemas]
        alone = place.removeprefix("methods.").removesuffix(".") if place.startswith("methods.") and reading else ""
        for layer in [_settings(part, place), *itertools.chain(*_axes(part, place).values())]:
            for field in flattened(layer.values):
                word = words.get(field) or words.get(field.partition(".")[0])
                if word is not None:
                    yield f"{layer.place}.{field}: a sweep does not read it here; use {word}."
            try:
                unread = list(unread_by(reading, _nested(layer)))
            except ConfigError:
                continue  # reported with the cells
            for path, value in unread:
                faults = [f"{'.'.join(path)}: {alone} does not read it; leave it out."] if alone else []
                yield from (f"{layer.place}.{fault}" for fault in refused(path, value) or faults)


def _over_seeds(data: str, config: Method, sweep: SweepConfig) -> list[Cell]:
    """The cell of every seed. The seed alone changes, so one validation serves all."""
    # A data set that the sweep calls by two names has a cell, and rows, under each.
    suffix, cells = "" if config.data.name == data else f"-{data}", []
    for seed in sweep.seeds:
        split = config.data.model_copy(update={"seed": seed}) if sweep.split_by_seed else config.data
        of_seed = config.model_copy(update={"seed": seed, "data": split})
        cells.append(Cell(data=data, config=of_seed, digest=config_digest(of_seed) + suffix))
    return cells


def _layers(sweep: SweepConfig, data: str, method: str) -> Iterator[list[_Layer]]:
    """What the sweep lays over the start, for every combination of the method's axes.

    The method's own axes replace those of the data set, and these the sweep's, that share a field.
    """
    in_task = RayConfig(num_actors=0, num_gpus=sweep.tasks.num_gpus, torch_threads=sweep.tasks.torch_threads)
    settings, axes = [_Layer("tasks", {"ray": in_task.model_dump()})], dict[str, list[_Layer]]()
    for place, part in (
        ("", sweep),
        (f"data_sets.{data}.", sweep.data_sets[data]),
        (f"methods.{method}.", sweep.methods[method]),
    ):
        settings.append(_settings(part, place))
        own = _axes(part, place)
        axes = {axis: kept for axis, kept in axes.items() if not any(overlapping(axis, other) for other in own)} | own
    for chosen in itertools.product(*axes.values()):
        yield [*settings, *chosen]


def _config(
    data: str,
    method: str,
    schema: type[Method],
    start: Values | None,
    layers: Sequence[_Layer],
    data_dir: Path | None,
    faults: Faults,
) -> Method | None:
    """The configuration under all layers; None where ``faults`` gained some."""
    config = None
    found: list[Exception] = []
    laid: list[_Layer] = []
    try:
        begun = _fitted_start(data, method, layers) if start is None else start
    except (ConfigError, DataError) as error:
        found.append(error)
        begun = {"data": {"name": data}}
    values = merge(start_of(schema), read_of(schema, begun))
    try:
        for layer in layers:
            if not isinstance(values["data"], dict):
                break  # to be reported, and not to be replaced unseen
            laid.append(layer)
            values = merge(values, read_of(schema, _nested(layer)))
        config = parse_config(values | {"method": method}, schema)
        # Where the command of the cell starts, whatever file the cell itself started from.
        kept = _without_unread(config, values, _start(method, config.data.model_dump_json()).model_dump())
        if kept is not values:
            config = parse_config(kept | {"method": method}, schema)
        config.require_trainable()
    except (ConfigError, DataError) as error:
        found.append(error)
    read = None
    with suppress(ValidationError):  # a section that is no section was reported with the rest of the configuration
        read = DataConfig.model_validate(values["data"])
    try:
        # As text, by which thousands of cells share the look-up of a few data sets, and by which workers read it.
        if read is not None:
            _check_data(read.model_copy(update={"data_dir": data_dir or read.data_dir}).model_dump_json())
    except DataError as error:
        found.append(error)
    faults.update(dict.fromkeys(_placed(line, data, laid) for error in found for line in str(error).splitlines()))
    if found or config is None or data_dir is None or read is None:
        return None if found else config
    return config.model_copy(update={"data": read.model_copy(update={"data_dir": data_dir})})


def _without_unread(config: Method, values: Values, beneath: Values) -> Values:
    """``values`` with what other settings leave unread as it is ``beneath``: it makes no other cell."""
    settings, start = flattened(config.model_dump(mode="json")), flattened(beneath)
    for path in flattened(values).keys() & start.keys():
        if unread_because_of(path, settings) is not None:
            values = merge(values, _nested(_Layer("", {path: start[path]})))
    return values


def _nested(layer: _Layer) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in copy.deepcopy(
        dict(layer.values)
    ).items():  # written into below: a caller's section stays its own
        section, parts = nested, path.split(".")
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{path}: {part} is a value, not a section.")
        last = section.get(parts[-1])
        section[parts[-1]] = merge(last, value) if isinstance(last, dict) and isinstance(value, dict) else value
    return nested


def _placed(fault: str, data: str, layers: Sequence[_Layer]) -> str:
    """``fault`` under the place that set its field, or under the data set whose defaults did."""
    field = fault.partition(": ")[0]
    # The last layer that names a field is the one that set it.
    for layer in reversed(layers):
        if any(overlapping(field, path) for path in flattened(dict(layer.values))):
            return f"{layer.place}.{fault}"
    return f"data_sets.{data}: {fault}"


def _fitted_start(data: str, method: str, layers: Sequence[_Layer]) -> Values:
    """What `fairpate run --method METHOD --data NAME` starts from, where the layers say the same of the data."""
    said: Values = {"data": {"name": data}}
    for layer in layers:
        if isinstance(own := _nested(layer).get("data", {}), dict):
            said = merge(said, {"data": own})
    try:
        config = parse_config(said["data"], DataConfig)
    except ConfigError:  # told with the rest of the configuration
        return said
    return merge(_fitted_values(method, config.model_dump_json()), {"data": {"name": config.name}})


@lru_cache
def _fitted_values(method: str, data_json: str) -> Values:
    return fitted(DataConfig.model_validate_json(data_json), method)


@lru_cache
def _start(method: str, data_json: str) -> Method:
    """Where `fairpate run --method METHOD --data NAME` starts."""
    name = DataConfig.model_validate_json(data_json).name
    return configured(merge(_fitted_values(method, data_json), {"data": {"name": name}}), method=method)


@lru_cache
def _check_data(config_json: str) -> None:
    """DataError unless the data set, its options and its files are there."""
    config = DataConfig.model_validate_json(config_json)
    for file in entry_for(config).needed_files(config.options):
        locate(file, data_dir_of(config))


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
