"""What a declaration makes of its files, counted for the operator before anything is trained.

Counts are exact and cover private records: they are for those who may see the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from fairpate.config import DataConfig
from fairpate.data.declared.declaration import read_declaration
from fairpate.data.declared.faults import Faults
from fairpate.data.declared.reader import read_records
from fairpate.data.entry import DataError, DataSettingsError
from fairpate.data.load import dataset_of, request_of
from fairpate.data.registry import entry_for


@dataclass(frozen=True, kw_only=True)
class Counted:
    """How many of the ``rows`` of a column of ``file`` were clipped, missing, or of no declared category."""

    file: str
    column: str
    rows: int
    clipped: int = 0
    missing: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class Check:
    """``rows`` by file, what was done to columns where anything was, and ``refused``: every fault in words."""

    rows: dict[str, int]
    columns: tuple[Counted, ...]
    refused: tuple[str, ...]


def check_declaration(config: DataConfig) -> Check:
    """Read all files of the declaration that ``config`` names; :class:`DataSettingsError` where it is wrong itself."""
    if config.declaration is None:
        raise DataSettingsError(f"{config.name}: expected a declaration (.yaml) of your own to check.")
    entry, faults = entry_for(config), Faults()
    try:
        records = read_records(read_declaration(config.declaration.path), request_of(config, entry), faults)
        dataset_of(records, config, entry)
        refused = []
    except DataError as error:
        refused = str(error).splitlines()
    named = {(file, column): None for file, column, _ in faults.counts}
    columns = tuple(
        Counted(
            file=file,
            column=column,
            rows=faults.rows[file],
            **{what: faults.counts[file, column, what] for what in ("clipped", "missing", "other")},
        )
        for file, column in named
    )
    return Check(rows=dict(faults.rows), columns=columns, refused=tuple(refused))
