"""Where the ledger of a run lies: in its folder, unless a note there names a database; and its anchor, if any."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from aggregator.ledger.anchors import open_anchor
from aggregator.ledger.files import ledger_files
from aggregator.ledger.ledger import read_ledger
from aggregator.ledger.stores import Place, is_database, shown
from fairpate.app.rundir import RunDirectory, RunDirectoryError, RunFolderError, read_json, write_json
from fairpate.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class LedgerPlace:
    """A ledger, and where its last entry is noted besides; None: nowhere."""

    ledger: Place
    anchor: Place | None = None

    @property
    def is_in_folder(self) -> bool:
        """Whether the ledger is a file, which belongs to one node."""
        return not is_database(self.ledger)


def place_of(run: RunDirectory) -> LedgerPlace:
    """Where the ledger of ``run`` lies. RunDirectoryError for a damaged note."""
    if not run.ledger_place.exists():
        return LedgerPlace(ledger=run.ledger)
    values = read_json(run.ledger_place)
    anchor = values.get("anchor")
    if not all(isinstance(value, str | None) for value in values.values()) or values.keys() - {"ledger", "anchor"}:
        raise RunDirectoryError(f"{run.ledger_place}: damaged; restore it from a copy.")
    return LedgerPlace(ledger=values.get("ledger") or run.ledger, anchor=anchor and parsed(anchor))


def note_place(run: RunDirectory, place: LedgerPlace) -> None:
    """Put the note there: from then on the ledger of ``run`` is this one."""
    values = {name: str(value) for name, value in asdict(place).items() if value is not None and value != run.ledger}
    write_json(run.ledger_place, values, private=True)  # an address may hold a password


def has_ledger(run: RunDirectory) -> bool:
    """Whether anything of a ledger is there, as far as is seen without asking a database."""
    return run.ledger_place.exists() or bool(ledger_files(run.ledger))


def parsed(text: str) -> Place:
    """A database's ledger as it is, or the path of a file."""
    return text if is_database(text) else Path(text).absolute()


def add_anchor(run: RunDirectory, text: str) -> str:
    """Note the last entry of a run's ledger at another place too, from now on; returns the place in words.

    RunFolderError without a ledger. ConfigError where it has an anchor, or the place is in the run's folder.
    LedgerError where a service writes.
    """
    if not has_ledger(run):
        raise RunFolderError(f"{run.root}: no ledger; give a run of a method that asks teachers.")
    place, anchor = place_of(run), parsed(text)
    if place.anchor is not None:
        raise ConfigError(f"{run.root}: its ledger has an anchor already, {shown(place.anchor)}.")
    if isinstance(anchor, Path) and run.root.absolute() in anchor.parents:
        raise ConfigError(f"{anchor}: is rolled back with the run, in whose folder it lies; give a place elsewhere.")
    # Made before the note: a crash between the two leaves an anchor unused, and never a ledger that lacks its own.
    noted = open_anchor(anchor)
    try:
        noted.make(read_ledger(place.ledger)[3])
    finally:
        noted.close()
    note_place(run, LedgerPlace(ledger=place.ledger, anchor=anchor))
    return shown(anchor)
