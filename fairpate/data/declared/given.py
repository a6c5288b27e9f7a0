"""A declared data set from Python: its files, or tables that the caller holds, read by the same declaration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fairpate.config import DataConfig
from fairpate.config_reader import parse_config
from fairpate.data.dataset import Dataset
from fairpate.data.declared.declaration import Declaration, parse_declaration, read_values
from fairpate.data.declared.reader import entry_of
from fairpate.data.declared.sources import PARTS
from fairpate.data.entry import DataSettingsError, Part, Request
from fairpate.data.load import dataset_of


def load_data(
    declaration: str | Path | Mapping[str, Any],
    *,
    records: Any = None,
    private: Any = None,
    public: Any = None,
    validation: Any = None,
    test: Any = None,
    data_dir: str | Path | None = None,
    **settings: Any,
) -> Dataset:
    """The data set that ``declaration`` declares (docs/data.md), in four splits.

    ``declaration`` is the path of a YAML file, or the same as a dictionary. Its files lie in ``data_dir``, else beside
    the YAML file. Any of the parts that is given is read instead of all files: a pandas or polars frame, a
    :class:`pyarrow.Table`, or a dictionary of columns; ``records`` are divided, or ``private`` and ``public`` are
    given, as in `files`. ``settings`` are those of the section `data`: ``seed``, ``options``, ``num_public``,
    ``num_validation``, ``num_test``, ``embedding``.

    :class:`fairpate.data.DataError` lists every fault of the declaration, or of its columns, with the remedy.

        dataset = fairpate.load_data("hospital.yaml", private=patients, public=pool)
        config = fairpate.configured({"target": {"epsilon": 1}}, method="weighted_votes")
        run = fairpate.run_method(config, fairpate.Reporter(), dataset)
    """
    parts: dict[Part, Any] = dict(zip(PARTS, (records, private, public, validation, test), strict=True))
    given = {part: as_table(frame, part) for part, frame in parts.items() if frame is not None}
    table = _declared(declaration, list(given))
    entry = entry_of(table)
    config = parse_config({"name": table.name, "data_dir": data_dir} | settings, DataConfig)
    beside = None if isinstance(declaration, Mapping) else Path(declaration).expanduser().absolute().parent
    request = Request(
        data_dir=config.data_dir or beside,
        seed=config.seed,
        options=entry.complete_options(config.options),
        tables=given or None,
        unit=config.unit,
    )
    return dataset_of(entry.load(request), config, entry)


def as_table(frame: Any, part: str) -> pa.Table:
    """A frame, a table or a dictionary of columns as an Arrow table."""
    try:
        if isinstance(frame, pa.Table):
            return frame
        if isinstance(frame, Mapping):
            return pa.table({str(name): pa.array(np.asarray(column)) for name, column in frame.items()})
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise DataSettingsError(
            f"{part}: expected a frame, a pyarrow.Table or a dictionary of columns of one length, got "
            f"{type(frame).__name__} ({error})."
        ) from error


def _declared(declaration: str | Path | Mapping[str, Any], parts: list[Part]) -> Declaration:
    """The declaration; of given tables, ``parts`` stand in the place of its files."""
    if isinstance(declaration, Mapping):
        values, where = _as_text(dict(declaration)), "declaration"
    elif isinstance(declaration, (str, Path)):
        values, where = read_values(Path(declaration)), str(declaration)
    else:
        raise DataSettingsError(
            f"declaration: expected the path of a YAML file or a dictionary, got {type(declaration).__name__}."
        )
    if parts:
        values["files"] = {part: part for part in parts}
    return parse_declaration(values, where)


def _as_text(value: Any) -> Any:
    """What a YAML file would say: every value as text."""
    if isinstance(value, Mapping):
        return {_as_text(name): _as_text(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_text(each) for each in value]
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    return value if value is None else str(value)
