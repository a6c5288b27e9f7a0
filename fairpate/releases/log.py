"""The log of one run's releases: each is read from the run's folder or, if it is missing, drawn, charged and stored.

The run's folder has a receipt, the run's own record of what it was charged; the operator's odometer
(:mod:`fairpate.releases.odometer`) has a row for every run. Both are written durably before anything of the release
becomes visible.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from fairpate.files import PathIn, arrays_digest
from fairpate.privacy import accountant
from fairpate.privacy.accountant import Event
from fairpate.privacy.mechanism_events import beyond, covering, event_from, merged
from fairpate.releases.directory import (
    Origin,
    ReleasedArrays,
    RunDirectory,
    RunDirectoryError,
    read_release,
    save_release,
    write_json,
)
from fairpate.releases.odometer import (
    Odometer,
    OdometerError,
    RunCharge,
    Standing,
    charge_values,
    composed_epsilon,
    counted_by,
)

_log = logging.getLogger(__name__)


def read_receipt(run: RunDirectory) -> RunCharge | None:
    """Return the receipt of ``run``, its own record of what it released and charged; None if there is none.
    OdometerError if the file is damaged."""
    if not run.receipt.exists():
        return None
    try:
        values = json.loads(run.receipt.read_text(encoding="utf-8"))
        return RunCharge(**values | {name: tuple(map(event_from, values[name])) for name in ("events", "plan")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OdometerError(f"{run.receipt}: damaged ({error}); restore the file from a copy.") from error


@dataclass(frozen=True, kw_only=True)
class _OneFile(RunDirectory):
    """The paths of a release that a run draws from its test or validation records, and that is charged separately from
    the run's training (:meth:`ReleaseLog.of_part`).

    The release has its own file and its own receipt (the record of what was charged). ``statement`` is the file whose
    existence proves that the release was published. If both files were deleted, the release may be drawn
    again. The new file then lists the events of all draws, the latest last, and the run's privacy statement
    includes the cost of all.
    """

    states_all_draws: ClassVar[bool] = True


class MetricsFolder(_OneFile):
    """The paths of the noisy table of predictions from which a run computes private metrics. The table is charged as a
    release of its own, separate from the run's training."""

    released = PathIn("public", "metrics.safetensors")
    receipt = PathIn("private", "metrics_release.json")
    statement = PathIn("public", "metrics.json")


class ChoiceFolder(_OneFile):
    """The paths of a private choice: which of several settings is best on the validation records. The choice is a
    release, charged separately from the run's training. If its file was deleted, another choice may be made, which is
    charged too."""

    released = PathIn("public", "choice.safetensors")
    receipt = PathIn("private", "choice_release.json")
    statement = PathIn("public", "choice.safetensors")


# The result of a training, with its ``events`` and ``noise``: methods define it, and import this module.
AnyPriced = TypeVar("AnyPriced", bound=Any)


class ReleaseLog:
    """The log of one run's releases of private records. It reads each release from the run's folder, or, if the release
    is missing, draws, charges and stores it.

    A method releases arrays step by step (:meth:`step`), a model that it trains (:meth:`model`), or labels through a
    ledger (:class:`LedgerMeter`). A release is charged durably before anything of it becomes visible, so that a crash
    may charge one release too many but never one too few. A stored release is never drawn again. If the file of a
    release was deleted after the run was published, the log refuses to draw it again; before that, the deleted release
    stays charged, and the next one is charged in addition.

    A run has a random ``id`` in its receipt, the run's own record of what it charged. A run that is repeated is charged
    once; one whose folder is deleted stays charged. If the odometer lost the run's row, the run is charged again as
    soon as it is opened. A copy of a run's folder counts as another run. A run that only learns from the release of
    another run has the id of that release, and no receipt.
    """

    def __init__(self, run: RunDirectory, odometer: Odometer, *, data: str, method: str, part: str = "") -> None:
        self._run, self._odometer = run, odometer
        self._data, self._method, self._part = data, method, part
        self._planned: tuple[Event, ...] | None = None
        self._is_reserved = False
        self._before: tuple[Event, ...] = ()
        self._steps: list[tuple[ReleasedArrays, Origin]] = []
        # Whether the next release continues a draw that was interrupted after it was charged. Set only if its noise was
        # stored: a draw with new noise is another release.
        self.continues = False
        kept = read_release(run.released)[1].id if run.released.exists() else None
        receipt = read_receipt(run)
        # Random, no digest of settings: two runs with equal settings draw noise twice, and cost twice.
        self.id = receipt.run if receipt is not None else kept or secrets.token_hex(16)
        if receipt is None:
            return
        if self.stored(receipt.run) is None:
            _log.warning("%s: this run's release was not in %s, so it is charged there again.", run.root, odometer.path)
            # Beyond a limit too: it was released, and a refusal would leave it out of the sum.
            odometer.charge(receipt, enforce=False)
        # A copy that has the released arrays reads the same release, which costs nothing more.
        elif kept is None and self._is_copy(receipt):
            self.id = secrets.token_hex(16)

    def step(
        self,
        draw: Callable[[], ReleasedArrays],
        *,
        settings: dict[str, Any],
        pool: str,
        noise: str,
        name: str = "",
        events: Sequence[Event] = (),
    ) -> ReleasedArrays:
        """Return one release of arrays: the stored release, or else what ``draw`` returns, which is charged before it
        is stored.

        ``settings`` are all settings that determine the release, and ``pool`` is the digest of the public records.
        ``noise`` describes the source of the noise (``os_entropy`` if the noise is secret). The first release of a run
        has no ``name``, each later one has its own. ``events``: the privacy events, if they are known beforehand; they
        are charged before the draw. If they are not given, ``draw`` must either call :meth:`charge_ahead` before it
        draws noise, or make nothing of the release visible before it returns.

        RunDirectoryError if the stored release was made from other settings, public records or earlier releases, or was
        deleted although its run was published. LimitReachedError if a limit would be exceeded.
        """
        path = self._run.released
        if name:
            path = path.with_stem(f"{path.stem}-{name}")
        after = tuple(arrays_digest(released.arrays) for released, _ in self._steps)
        if path.exists():
            released, origin = read_release(path)
            origin.require_settings(settings, path)
            if origin.pool != pool:
                raise RunDirectoryError(
                    f"{path}: this release was made with other public records of {self._data}; give the same public "
                    "records as then."
                )
            if origin.after != after:
                raise RunDirectoryError(
                    f"{path}: this release was made after other releases than those in this folder; restore all of its "
                    "releases from one copy."
                )
            self._count_found([*self._steps, (released, origin)], noise=noise)
        else:
            # Before the draw: refuse what must not be drawn again while no noise exists.
            self._begin(path)
            if events:
                self.charge_ahead(events, noise=noise)
            released = draw()
            # Charged as soon as its events are known, and before it is stored: until then nothing of it is visible.
            self.charge((*self._before, *released.events), noise=noise, plan=self._planned)
            self._is_reserved = False
            if self._run.states_all_draws:
                released = replace(released, events=(*self._before, *released.events))
            origin = Origin(id=self.id, settings=settings, pool=pool, after=after)
            save_release(path, released, origin)
        self._steps.append((released, origin))
        return released

    def model(self, train: Callable[[], AnyPriced], *, is_release: bool) -> AnyPriced:
        """Return the result of ``train`` after charging its privacy events to the odometer, except those that
        :meth:`step` charged already.

        ``is_release``: True if the model itself is a release of private records, which cannot be repeated; False if it
        is learned from released arrays alone, or without privacy. If ``train`` raises SpentError (it gave up, which
        reveals something), the error's events are charged before it is raised again. RunDirectoryError and
        LimitReachedError as in :meth:`step`.
        """
        if is_release:
            self._begin(self._run.student)
        try:
            trained = train()
        except accountant.SpentError as error:
            reason = error
        else:
            own = beyond(trained.events, [event for released, _ in self._steps for event in released.events])
            if own:
                if self._steps and not self._is_reserved:  # counted with them, under one id
                    self._begin(self._run.student)
                self.charge((*self._before, *own), noise=trained.noise)
            return trained
        # Outside of the handler: if a limit refuses the release, its refusal must not carry that message.
        if self._steps and not self._is_reserved:
            self._begin(self._run.student)
        # Limits are checked for the whole plan: giving up must be refused just when a run that does not is refused too.
        self.charge(self._planned or (*self._before, *reason.events), noise=reason.noise)
        self.charge((*self._before, *reason.events), noise=reason.noise, enforce=False)
        raise reason

    def _begin(self, path: Path) -> None:
        """Set the id under which the release in the file ``path`` will be charged, and read the privacy events that
        were charged under this id before.

        RunDirectoryError if the run was published: then its release was deleted, and drawing it again would be another
        release.
        """
        if self._run.statement.exists():
            raise RunDirectoryError(
                f"{path}: missing, although {self._run.statement} says that it was released. Drawing it again would be "
                "a second release of the same records: restore the file from a copy, or start a new run folder with "
                "--out and add up both epsilons."
            )
        receipt = read_receipt(self._run)
        # The receipt charges this very release already: as earlier events it would be charged twice.
        if self.continues and receipt is not None:
            self.id, self._before = receipt.run, ()
            return
        # A further release of this run: one row charges it together with those before it.
        is_kept = self._run.released.exists()
        if receipt is not None and (is_kept or self._run.states_all_draws) and not self._is_copy(receipt):
            self.id, self._before = receipt.run, receipt.events
            return
        if receipt is not None and not is_kept:
            _log.warning("%s: may have released a model that was deleted; the next one is charged too.", self._run.root)
        # A new id, so that the row of what was charged before is not replaced.
        if receipt is not None or is_kept:
            self.id = secrets.token_hex(16)
        self._before = ()

    def count_published(self, events: Sequence[Event], *, noise: str) -> None:
        """Charge the privacy events of the run's published releases to the odometer (the database of privacy costs),
        even beyond a limit, unless they were charged already.

        The events are read from the stored releases; if none is stored, they are the argument ``events``.
        """
        if self._run.released.exists():
            self._count_found([read_release(path) for path in self._run.release_files()], noise=noise)
        elif self.stored() is None:
            self.charge(events, noise=noise, enforce=False)

    def _count_found(self, steps: Sequence[tuple[ReleasedArrays, Origin]], *, noise: str) -> None:
        """Charge those of the stored releases ``steps`` that this odometer (the database of privacy costs) does not
        contain, such as a copied release of another operator's run. No receipt is written."""
        for run in dict.fromkeys(origin.id for _, origin in steps):
            events = merged([event for released, origin in steps if origin.id == run for event in released.events])
            known = self.stored(run)
            if known is None or covering(known.events, events) != known.events:
                _log.warning(
                    "%s: learns from a release that was not in %s; it is charged.", self._run.root, self._odometer.path
                )
                # Under the id of the run that drew it: many runs that learn from it charge it once.
                release = replace(self.charge_of(events, noise=noise), run=run)
                self._odometer.charge(release, enforce=False)

    def shared_remarks(self) -> tuple[str, ...]:
        """Return remarks for the privacy statement: one for each release of another run from which this run learned.
        The cost of such a release is spent only once."""
        if not self._run.released.exists():
            return ()
        origins = dict.fromkeys(read_release(path)[1].id for path in self._run.release_files())
        receipt = read_receipt(self._run)
        # Without a receipt all of it was drawn by other runs; with one, only what has another id.
        if receipt is None:
            words = "It learned from the release of another run ({}): this ε counts once for both."
        else:
            words = "It learned also from the release of another run ({}): that part of ε counts once for both."
        return tuple(words.format(run) for run in origins if receipt is None or run != receipt.run)

    def charge(
        self,
        events: Sequence[Event],
        *,
        noise: str,
        num_queries: int | None = None,
        plan: Sequence[Event] | None = None,
        enforce: bool = True,
    ) -> None:
        """Charge the privacy ``events`` of everything that the run released or is about to release to the odometer, and
        write the run's receipt, its own record of this charge.

        ``noise`` describes the source of the noise (``os_entropy`` if the noise is secret). ``num_queries``: the number
        of queries in the run's ledger; None leaves the stored number unchanged. ``plan``, ``enforce`` and errors as in
        :meth:`Odometer.charge`.
        """
        if num_queries is None:
            before = self.stored()
            num_queries = 0 if before is None else before.num_queries
        release = self.charge_of(events, noise=noise, num_queries=num_queries)
        stored = self._odometer.charge(release, plan=plan, enforce=enforce, holds=self._planned is not None)
        # The row before the receipt: a crash between them charges a release that was not seen, never the reverse.
        write_json(self._run.receipt, charge_values(stored))

    def charge_of(self, events: Sequence[Event], *, noise: str, num_queries: int = 0) -> RunCharge:
        """Return the row of the odometer that :meth:`charge` would store for these arguments; nothing is stored."""
        return RunCharge(
            run=self.id,
            data=self._data,
            unit=events[0].unit,
            relation=events[0].relation,
            noise=noise,
            method=self._method,
            path=str(self._run.root.absolute()),
            # Equal events are joined: a row stays short for any number of steps.
            events=merged(events),
            num_queries=num_queries,
            part=self._part,
        )

    def check(self, events: Sequence[Event], *, noise: str) -> None:
        """Raise LimitReachedError if a run with the privacy ``events``, all fixed beforehand, would exceed a limit of
        the data set; nothing is stored. ``noise`` as in :meth:`charge`."""
        self._odometer.check(self.charge_of(events, noise=noise))

    def fix_plan(self, events: Sequence[Event], *, noise: str) -> None:
        """Check ``events``, all future privacy events of the run, against the limits of the data set (:meth:`check`),
        and fix them as the plan of the run.

        From the first charge on, limits charge the whole plan, so that no other run can use its share of a limit. A
        later call replaces the plan.
        """
        self.check(events, noise=noise)
        self._planned = tuple(events)

    def charge_ahead(self, events: Sequence[Event], *, noise: str) -> None:
        """Charge the privacy ``events`` of a release durably, before its noise is drawn.

        The charge for the finished draw replaces this one. If the draw fails, crashes or never begins, the charge
        stays. LimitReachedError, with nothing charged, if a limit would be exceeded.
        """
        if self._steps and not self._is_reserved:
            self._begin(self._run.student)
        self.charge((*self._before, *events), noise=noise, plan=self._planned)
        self._is_reserved = True

    def standing(self, *, delta: float, and_of: Sequence[RunCharge] = ()) -> Standing | None:
        """Return the cost of this run together with all earlier releases of the same data set, unit and relation; None
        if this run has no privacy guarantee.

        ``and_of``: releases of the same run from other parts of the data set, which are included even if they have not
        been charged yet.
        """
        own = self.stored()
        if own is None or not own.is_private:
            return None
        rows = list(self._odometer.charges(own.data).values())
        place_of = {row.run: place for place, row in enumerate(rows)}
        others = {other.run for other in and_of}
        # Up to its own last row: later releases are reported by their own statements. A run that learns from another's
        # release may draw its own table long after it; a table that is still to be drawn comes after all rows.
        last = max(place_of.get(each, len(rows) - 1) for each in {self.id, *others})
        before = [row for row in rows[: last + 1] if row.run not in others]
        same = [row for row in counted_by(own.unit, before) if row.is_private and row.relation == own.relation]
        together = [*same, *and_of]
        return Standing(
            earlier=len(same) - 1,
            epsilon=composed_epsilon(together, delta=delta),
            epsilon_adaptive=composed_epsilon(together, delta=delta, is_adaptive=True),
        )

    def of_part(self, part: Literal["test", "validation"]) -> ReleaseLog:
        """Return the log of the release that the same run makes from the test or the validation records of the data
        set."""
        folder = (MetricsFolder if part == "test" else ChoiceFolder)(root=self._run.root)
        # The split's rule stays: only parts of one split are known to be disjoint.
        rule = self._part.partition("/")[0]
        name = f"{rule}/{part}" if rule else ""
        return ReleaseLog(folder, self._odometer, data=self._data, method=self._method, part=name)

    def stored(self, run: str | None = None) -> RunCharge | None:
        """Return the row of the odometer for this run, or for the run with the id ``run``; None if the odometer has no
        such row."""
        return self._odometer.row(run or self.id)

    def _is_copy(self, receipt: RunCharge) -> bool:
        """Return True if this run's folder is a copy, which is charged as a run of its own. It is a copy if the run
        that ``receipt`` names has another path in the odometer, and the folder at that path still holds this run."""
        stored = self.stored(receipt.run)
        other = type(self._run)(root=Path((stored or receipt).path))
        if other.root == self._run.root.absolute():
            return False
        # A folder that was moved leaves no receipt at its old place, and is the same run.
        try:
            other.receipt.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            # Such as another user's folder, in which the run may go on: charged too much rather than too little.
            _log.warning(
                "%s: charged as another run, because its earlier folder %s cannot be looked into (%s) and may still "
                "hold it.",
                self._run.root,
                other.root,
                error.strerror,
            )
            return True
        found = read_receipt(other)
        if found is None or found.run != receipt.run:
            return False
        _log.warning("%s: a copy of %s, so it is charged as another run.", self._run.root, other.root)
        return True
