"""From a sweep's file, or its values, to its configuration; where its form is wrong, with the faults of its cells."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fairpate.app.compare.cells import Values, cells_of
from fairpate.compare_config import SweepConfig, flat_grid, overlapping
from fairpate.config import ConfigError
from fairpate.config_reader import apply_override, parse_config, read_yaml
from fairpate.methods import all_methods
from fairpate.methods.load import require_trusted


def load_sweep(path: Path, overrides: Sequence[str] = (), *, data_dir: Path | None = None) -> SweepConfig:
    """Read a sweep's YAML file and apply overrides such as ``seeds=[0,1]``; as :func:`parse_sweep`."""
    values = read_yaml(path)
    for override in overrides:
        apply_override(values, override)
    methods = values.get("methods")
    for method in methods if isinstance(methods, dict | list) else ():
        require_trusted(method, path)
    return parse_sweep(values, folder=path.parent, data_dir=data_dir)


def parse_sweep(values: Values, *, folder: Path, data_dir: Path | None = None) -> SweepConfig:
    """The sweep that ``values`` write down. Where its form is wrong, ConfigError lists the faults of its cells too."""
    _require_sweep(values)
    try:
        return parse_config(values, SweepConfig)
    except ConfigError as error:
        in_cells = _faults_of_the_rest(values, error, folder, data_dir)
        raise ConfigError("\n".join([str(error), *in_cells])) from error


def _require_sweep(values: Values) -> None:
    """ConfigError, in one line, for the configuration of a run."""
    fields = {
        name for schema in all_methods().values() for name in schema.model_fields
    } - SweepConfig.model_fields.keys()
    of_a_run = [name for name in values if name in fields]
    if of_a_run and not {"methods", "data_sets"} & values.keys():
        raise ConfigError(
            f"no sweep: it has {', '.join(of_a_run)} and neither methods nor data_sets; a configuration of one run is "
            "for `fairpate run`."
        )


def _faults_of_the_rest(values: Values, form: ConfigError, folder: Path, data_dir: Path | None) -> list[str]:
    """The faults of the cells that are left without the parts whose form is wrong; none where too little is left."""
    assert isinstance(form.__cause__, ValidationError)
    rest = copy.deepcopy(values)
    for part in [rest, *_sections(rest.get("data_sets")), *_sections(rest.get("methods"))]:
        if "grid" in part:
            part["grid"] = flat_grid(part["grid"])
    left_out: list[str] = []
    for fault in form.__cause__.errors():
        place = [str(name) for name in fault["loc"]]
        if place[:1] == ["data_sets"] and place[2:3] not in (["grid"], ["settings"]):
            place = place[:2]  # without its own file it may be another data set
            left_out += place[1:]
        _leave_out(rest, place)
    try:
        sweep = SweepConfig.model_validate(rest)
    except ValidationError:
        return []
    try:
        cells_of(sweep, folder=folder, data_dir=data_dir, left_out=left_out)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _sections(parts: Any) -> list[Values]:
    return [part for part in parts.values() if isinstance(part, dict)] if isinstance(parts, dict) else []


def _leave_out(section: Values, place: Sequence[str]) -> None:
    """Remove what stands at ``place``, or the part that holds it; of axes that overlap, all but the first."""
    name, *inner = place
    if inner and isinstance(section.get(name), dict):
        _leave_out(section[name], inner)
    elif name == "grid" and isinstance(section.get(name), dict):
        kept: Values = {}
        for axis, values in section[name].items():
            if not any(overlapping(axis, other) for other in kept):
                kept[axis] = values
        section[name] = kept
    else:
        section.pop(name, None)
