"""From a sweep's configuration to its cells: every one a whole TrainConfig, checked before anything runs.

All faults of all cells are reported at once, each under the place in the sweep that set the field. Two cells that
compute the same are one.
"""

from __future__ import annotations

import copy
import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fairpate.app.methods import METHODS
from fairpate.app.rundir import determining_values, values_digest
from fairpate.compare_config import DataSetPart, SweepConfig, SweepPart, axis_fields, overlapping
from fairpate.config import ConfigError, DataConfig, apply_override, load_config, merge, parse_config, read_yaml
from fairpate.data import REGISTRY, DataError, find_entry
from fairpate.data.files import locate
from fairpate.methods.TODO import TrainConfig
from fairpate.names import nearest

DEMO = Path(__file__).parents[1] / "color_digits.yaml"
_PLACES = ("out", "storage", "ray", "data.data_dir", "teachers.engine", "teachers.block_size")
_WEIGHTS = ".weights.path"
_SAID_ELSEWHERE = {"seed": "seeds", "method": "methods", "out": "out, or give --out"}


@dataclass(frozen=True)
class Cell:
    """One configuration of a sweep. ``data`` is the name that results carry, ``digest`` that of what is computed."""

    data: str
    config: TrainConfig
    digest: str

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config.method

    @property
    def is_private(self) -> bool:
        """Whether the method promises anything."""
        return METHODS[self.method].promises(self.config)

    @cached_property
    def command(self) -> str:
        """A shell command that computes the same: only what differs from where `fairpate train` starts is named.

        It is published, so it names files of weights without their folders; the checksum says which file is meant.
        """
        name = self.config.data.name
        start = flattened(_start(name).model_dump(mode="json"))
        now = flattened(self.config.model_dump(mode="json"))
        changed = {
            path: now.get(path)
            for path in now
            if path not in start or now[path] != start[path]
            if path not in ("method", "data.name") and not path.startswith(_PLACES)
        }
        changed |= {path: Path(value).name for path, value in changed.items() if path.endswith(_WEIGHTS) and value}
        overrides = [f"--set {shlex.quote(f'{path}={_yaml(value)}')}" for path, value in changed.items()]
        return " ".join(["fairpate train", self.method, "--data", shlex.quote(name), *overrides])


def load_sweep(path: Path, overrides: Sequence[str] = (), *, data_dir: Path | None = None) -> SweepConfig:
    """Read a sweep's YAML file and apply overrides such as ``seeds=[0,1]``; as :func:`parse_sweep`."""
    values = read_yaml(path)
    for override in overrides:
        apply_override(values, override)
    return parse_sweep(values, folder=path.parent, data_dir=data_dir)


def parse_sweep(values: dict[str, Any], *, folder: Path, data_dir: Path | None = None) -> SweepConfig:
    """The sweep that ``values`` write down. Where its form is wrong, ConfigError lists the faults of its cells too."""
    _require_sweep(values)
    try:
        return parse_config(values, SweepConfig)
    except ConfigError as error:
        in_cells = _faults_of_the_rest(values, error, folder, data_dir)
        raise ConfigError("\n".join([str(error), *in_cells])) from error


def _require_sweep(values: Mapping[str, Any]) -> None:
    """ConfigError, in one line, for the configuration of a run."""
    of_a_run = [name for name in values if name in TrainConfig.model_fields and name not in SweepConfig.model_fields]
    if of_a_run and not {"methods", "data_sets"} & values.keys():
        raise ConfigError(
            f"no sweep: it has {', '.join(of_a_run)} and neither methods nor data_sets; a configuration of one run is "
            "for `fairpate run`, or for `fairpate train METHOD --config`."
        )


def _faults_of_the_rest(values: dict[str, Any], form: ConfigError, folder: Path, data_dir: Path | None) -> list[str]:
    """The faults of the cells that are left without the parts whose form is wrong; none where too little is left."""
    assert isinstance(form.__cause__, ValidationError)
    rest = copy.deepcopy(values)
    left_out: list[str] = []
    for fault in form.__cause__.errors():
        place = [str(name) for name in fault["loc"]]
        if place[:1] == ["data_sets"] and place[2:3] not in (["grid"], ["settings"]):
            place = place[:2]  # without its own file it may be another data set
        _leave_out(rest, place)
        if place[:1] == ["data_sets"] and place[1:] and place[1] not in (rest.get("data_sets") or {}):
            left_out.append(place[1])
    try:
        sweep = SweepConfig.model_validate(rest)
    except ValidationError:
        return []
    try:
        cells_of(sweep, folder=folder, data_dir=data_dir, left_out=left_out)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _leave_out(values: dict[str, Any], place: Sequence[str]) -> None:
    """Remove what stands at ``place``, or the part of it that is there; of axes that overlap, all but the first."""
    section: Any = values
    for number, name in enumerate(place):
        if not isinstance(section, dict):
            return
        if name not in section:
            _leave_out_dotted(section, name)
            return
        inner = section[name]
        if number == len(place) - 1 and name == "grid" and isinstance(inner, dict):
            section[name] = _first_axes(inner)
        elif number == len(place) - 1 or not isinstance(inner, dict):
            del section[name]
            return
        section = inner


def _leave_out_dotted(section: dict[str, Any], dotted: str) -> None:
    """Remove an axis that is written as sections in sections."""
    first, _, rest = dotted.partition(".")
    if isinstance(section.get(first), dict) and rest and rest not in section[first]:
        _leave_out_dotted(section[first], rest)
    elif isinstance(section.get(first), dict) and rest:
        del section[first][rest]


def _first_axes(grid: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for axis, values in flattened(grid).items():
        if not any(overlapping(axis, other) for other in kept):
            kept[axis] = values
    return kept


def cells_of(
    sweep: SweepConfig, *, folder: Path, data_dir: Path | None = None, left_out: Sequence[str] = ()
) -> list[Cell]:
    """Every cell once, in the order of data sets, seeds, methods and grids.

    ``folder`` is where the sweep's file lies; ``left_out`` names data sets that methods may list and that are not here.
    ConfigError lists all faults of all cells.
    """
    faults = dict.fromkeys([*_unknown_names(sweep, left_out), *_said_elsewhere(sweep)])
    cells: dict[str, Cell] = {}
    for data, part in sweep.data_sets.items():
        try:
            start = _data_set_start(data, part, folder)
        except ConfigError as error:
            faults[f"data_sets.{data}.file: {error}"] = None
            continue
        configs = [_config(data, start, layers, data_dir, faults) for layers in _layers(sweep, data)]
        faults |= dict.fromkeys(_misnamed(data, configs))
        over_seeds = [_over_seeds(data, config, sweep) for config in configs if config is not None]
        cells |= {cell.digest: cell for of_seed in zip(*over_seeds, strict=True) for cell in of_seed}
    if faults:
        raise ConfigError("\n".join(faults))
    return list(cells.values())


def _misnamed(data: str, configs: Iterable[TrainConfig | None]) -> Iterator[str]:
    """Results must not carry the name of a data set that they are not of."""
    for name in {config.data.name for config in configs if config is not None} - {data}:
        if data in REGISTRY:
            yield f"data_sets.{data}: names another data set than data.name={name}; give the results another name."


def _unknown_names(sweep: SweepConfig, left_out: Sequence[str]) -> Iterator[str]:
    data_sets = [*sweep.data_sets, *left_out]
    for method, part in sweep.methods.items():
        if method not in METHODS:
            yield f"methods.{method}: unknown method{nearest(method, METHODS)}."
        for name in part.data_sets or ():
            if name not in data_sets:
                yield f"methods.{method}.data_sets: unknown data set {name}{nearest(name, data_sets)}."


def _said_elsewhere(sweep: SweepConfig) -> Iterator[str]:
    """Fields that would be overwritten: the sweep has words of its own for them."""
    parts: dict[str, SweepConfig | SweepPart] = {"": sweep}
    parts |= {f"data_sets.{name}.": part for name, part in sweep.data_sets.items()}
    parts |= {f"methods.{name}.": part for name, part in sweep.methods.items()}
    words = _SAID_ELSEWHERE | ({"data.seed": "seeds, or set split_by_seed: false"} if sweep.split_by_seed else {})
    for place, part in parts.items():
        fields = [("settings", field) for field in flattened(part.settings)]
        fields += [("grid", field) for axis in part.grid for field in axis_fields(axis)]
        for section, field in fields:
            if field in words:
                yield f"{place}{section}.{field}: a sweep does not read it here; use {words[field]}."


def _over_seeds(data: str, config: TrainConfig, sweep: SweepConfig) -> list[Cell]:
    """The cell of every seed. The seed alone changes, so one validation serves all."""
    values, cells = determining_values(config), []
    suffix = "" if config.data.name == data else f"-{data}"
    for seed in sweep.seeds:
        values["seed"] = seed
        of_seed = config.model_copy(update={"seed": seed})
        if sweep.split_by_seed:
            values["data"]["seed"] = seed
            of_seed = of_seed.model_copy(update={"data": config.data.model_copy(update={"seed": seed})})
        cells.append(Cell(data=data, config=of_seed, digest=values_digest(values) + suffix))
    return cells


@dataclass(frozen=True)
class _Layer:
    """Dotted fields that one place of the sweep sets."""

    place: str
    values: Mapping[str, Any]


def _layers(sweep: SweepConfig, data: str) -> Iterator[list[_Layer]]:
    """What the sweep lays over the start, for every method and every combination of its axes."""
    part = sweep.data_sets[data]
    for method in (name for name in sweep.methods if name in METHODS):
        own = sweep.methods[method]
        if own.data_sets is not None and data not in own.data_sets:
            continue
        settings = [
            _Layer("settings", sweep.settings),
            _Layer(f"data_sets.{data}.settings", part.settings),
            _Layer(f"methods.{method}.settings", own.settings),
            _Layer("methods", {"method": method}),
        ]
        axes = _axes(sweep, data, method)
        for values in itertools.product(*(axis.values for axis in axes)):
            chosen = zip(axes, values, strict=True)
            yield [*settings, *(_Layer(axis.place, dict.fromkeys(axis.fields, value)) for axis, value in chosen)]


@dataclass(frozen=True)
class _Axis:
    """Fields that take the same values, and the place of the sweep that says so."""

    place: str
    name: str
    values: Sequence[Any]

    @property
    def fields(self) -> list[str]:
        return axis_fields(self.name)


def _axes(sweep: SweepConfig, data: str, method: str) -> list[_Axis]:
    """The axes of a method: its own replace those of the data set, and these the sweep's, that share a field."""
    has_target = METHODS[method].promises(TrainConfig(method=method))
    axes: list[_Axis] = []
    for place, grid in (
        ("grid", sweep.grid),
        (f"data_sets.{data}.grid", sweep.data_sets[data].grid),
        (f"methods.{method}.grid", sweep.methods[method].grid),
    ):
        new = [_Axis(place, name, values) for name, values in grid.items() if has_target or "target." not in name]
        axes = [axis for axis in axes if not any(overlapping(axis.name, other.name) for other in new)] + new
    return axes


def _config(
    data: str, start: dict[str, Any], layers: list[_Layer], data_dir: Path | None, faults: dict[str, None]
) -> TrainConfig | None:
    """The configuration under all layers; None where ``faults`` gained some."""
    values, config = start, None
    found: list[Exception] = []
    laid: list[_Layer] = []
    try:
        for layer in layers:
            if not isinstance(values["data"], dict):
                break  # to be reported, and not to be replaced unseen
            laid.append(layer)
            values = merge(values, _nested(layer))
        config = parse_config(values, TrainConfig)
        METHODS[config.method].require_trainable(config)
    except ConfigError as error:
        found.append(error)
    try:
        read = DataConfig.model_validate(values["data"])
        _check_data(read.model_copy(update={"data_dir": data_dir or read.data_dir}).model_dump_json())
    except (DataError, ValidationError) as error:
        # A section that is no section was reported with the rest of the configuration.
        found += [error] if isinstance(error, DataError) else []
    faults.update(dict.fromkeys(_placed(line, data, laid) for error in found for line in str(error).splitlines()))
    if found or config is None:
        return None
    return (
        config
        if data_dir is None
        else config.model_copy(update={"data": read.model_copy(update={"data_dir": data_dir})})
    )


def _nested(layer: _Layer) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in layer.values.items():
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
    for layer in reversed(layers):
        if any(overlapping(field, path) for path in flattened(dict(layer.values))):
            return f"{layer.place}.{fault}"
    return f"data_sets.{data}: {fault}"


def _data_set_start(data: str, part: DataSetPart, folder: Path) -> dict[str, Any]:
    """What lies under all settings; of these only the name of the data set matters here."""
    if part.file is not None:
        return merge(merge(TrainConfig().model_dump(), {"data": {"name": data}}), read_yaml(folder / part.file))
    name = flattened(part.settings).get("data.name", data)
    return _start(name if isinstance(name, str) else data).model_dump()


@lru_cache
def _start(name: str) -> TrainConfig:
    """Where `fairpate train --data NAME` starts."""
    return load_config(DEMO if name == DataConfig().name else None, [f"data.name={name}"], schema=TrainConfig)


@lru_cache
def _check_data(config_json: str) -> None:
    """DataError unless the data set, its options and its files are there."""
    config = DataConfig.model_validate_json(config_json)
    for file in find_entry(config.name).needed_files(config.options):
        locate(file, config.data_dir)


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted paths of the leaves; an empty section is a leaf."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        path: leaf
        for name, value in values.items()
        for path, leaf in flattened(value, f"{prefix}.{name}" if prefix else name).items()
    }


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
