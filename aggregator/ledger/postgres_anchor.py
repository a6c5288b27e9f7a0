"""An anchor (:mod:`aggregator.ledger.anchors`) in a row of a PostgreSQL database."""

from __future__ import annotations

from contextlib import closing

from aggregator.ledger.chain import Head
from aggregator.ledger.files import LedgerError, UnreachableError
from aggregator.ledger.postgres import Commits, split_place
from aggregator.ledger.stores import StoreError, shown


class DatabaseAnchor:
    """The row of one name in ``fairpate_anchors``."""

    def __init__(self, place: str) -> None:
        self._place, (self._url, self._name) = shown(place), split_place(place)
        self._opened: Commits | None = None

    def make(self, head: Head) -> None:
        """Insert the row."""
        try:
            made = self._commits().run(
                "INSERT INTO fairpate_anchors VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", (self._name, *head)
            )
        except StoreError as error:
            raise LedgerError(f"{self._place}: no anchor can be made there ({error}); give another place.") from error
        if made.rowcount != 1:
            raise LedgerError(f"{self._place}: an anchor is there already; give another name.")

    def noted(self) -> Head:
        """What the row holds."""
        try:
            run = self._commits().run
            found = run("SELECT number, digest FROM fairpate_anchors WHERE name = %s", (self._name,)).fetchone()
        except StoreError as error:
            raise UnreachableError(
                f"{self._place}: the ledger's anchor cannot be read ({error}); bring it back."
            ) from error
        if found is None:
            raise LedgerError(
                f"{self._place}: the ledger's anchor is gone, and says which entry the ledger must hold; bring it back."
            )
        return Head(*found)

    def look(self) -> None:
        """Read the row on a connection that is made for it."""
        with closing(DatabaseAnchor(f"{self._url}#{self._name}")) as anchor:
            anchor.noted()

    def note(self, head: Head) -> None:
        """Move the row on."""
        # Compared and moved by one statement: no other writer's note comes in between.
        moved = self._commits().run(
            "UPDATE fairpate_anchors SET number = %s, digest = %s "
            "WHERE name = %s AND (number < %s OR (number = %s AND digest = %s))",
            (*head, self._name, head.number, *head),
        )
        if moved.rowcount != 1:
            raise StoreError(f"{self._place}: is gone, or another writer noted an entry that this one does not have")

    def close(self) -> None:
        """End the connection."""
        if self._opened is not None:
            self._opened.connection.close()

    def _commits(self) -> Commits:
        if self._opened is None or self._opened.connection.closed:
            self._opened = Commits(self._url, self._place)
        return self._opened
