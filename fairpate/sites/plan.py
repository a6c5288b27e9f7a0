"""The plan of a release over sites (its sums, their noise, and the sites), and the journal, in which each party stores
what it sent.

A plan is one JSON file, identified by the digest of its bytes, which every site signs with each message. It contains
the method's configuration, the events from which the release's cost is computed, every sum in order, the sites with
their public keys, and the numbers of sites that may vanish and collude. Events and sums come from a rehearsal, which
runs the method without private records; each site rehearses the plan itself and refuses one that differs.

With private metrics, the last sum is the table of predictions on the sites' test records. The terms of this sum
identify the model that predicted, so that tables about different models are not added up.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import numpy as np
from pydantic import Field, FiniteFloat, ValidationError, model_validator

from fairpate.config import ConfigError, Count, DataConfig, Section, expected, flattened, read_yaml
from fairpate.files import write_atomically
from fairpate.sites.secure_sum import ENDED, Draw, PublicKeys, SiteKey, SumError
from fairpate.types import IntArray, Unit, UsageError, UserError, strict

if TYPE_CHECKING:
    from fairpate.data import Dataset
    from fairpate.methods.base import Method
    from fairpate.privacy.accountant import Event
    from fairpate.terminal import Reporter

Format = Literal["fairpate.site-plan/1"]
(FORMAT,) = get_args(Format)
# A plan comes from a coordinator that may lie: what it makes a site compute, keep or fetch is bounded.
MOST_PLAN_BYTES = 2**20
MOST_FILE_BYTES = 2**28
"""The largest embedding, and the largest model, that a coordinator may send to a site."""
_MOST_SITES, _MOST_SUMS, _MOST_NUMBERS = 1000, 1000, 2**27
_NAME = re.compile(r"[\w .-]{1,64}")
_OF_A_MACHINE = re.compile(r"(out|data\.data_dir|data\.declaration|ray|storage|(.*\.)?weights)(\..*)?")


class JournalError(UserError):
    """A party's journal, the file in which it stores messages before it sends them, cannot be read or written. No
    message was sent that is not stored."""


class PlanError(UsageError):
    """A plan (the file with the terms of a release over sites), a roster (the file of the sites' public keys) or a key
    cannot be used; the message names the file or field and the remedy."""


class PlannedSum(Section):
    """One noisy sum of a release: its name, the shape of its table, and the standard deviation of noise for which its
    cost is computed."""

    name: str
    rows: Count
    columns: Count
    noise_stddev: FiniteFloat


class SitePlan(Section):
    """The plan of a release from the records of several sites: the terms on which all parties agree. ``content`` are
    the bytes of its file.

    ``settings`` are the method's configuration without paths; ``events`` are the release's privacy events, as JSON;
    ``public_arrays`` and ``embedding`` are digests; ``sites`` maps names of sites to public keys, in order.
    ``test_events`` are the privacy events of a last sum over test records, which are read by no other sum; it is empty
    if the plan has no such sum.
    """

    format: Format
    id: str
    settings: dict[str, Any]
    unit: Unit
    events: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    sums: Annotated[tuple[PlannedSum, ...], Field(min_length=1, max_length=_MOST_SUMS)]
    public_arrays: str
    embedding: str | None
    sites: Annotated[dict[str, str], Field(max_length=_MOST_SITES)]
    may_vanish: int
    may_collude: int
    test_events: tuple[dict[str, Any], ...]
    content: bytes = b""

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        if not all(_NAME.fullmatch(name) for name in self.sites):
            raise PlanError(
                "sites: expected names of at most 64 letters, digits, spaces, dots, dashes or underscores; rename "
                "the sites."
            )
        for number, each in enumerate(self.sums):
            if each.rows * each.columns > _MOST_NUMBERS:
                raise PlanError(
                    f"sums.{number}: expected at most {_MOST_NUMBERS} numbers, got {each.rows} x {each.columns}; make "
                    "a plan with fewer public records, features or classes."
                )
        # What an author's file says of folders, packages or machines would be done here, unseen.
        said = [field for field, value in flattened(self.settings).items() if value not in (None, {})]
        if refused := list(filter(_OF_A_MACHINE.fullmatch, said)):
            raise PlanError(
                f"settings.{min(refused)}: a plan must not set folders, files or machines; make a plan without it."
            )
        try:
            # ``Draw`` checks the numbers of sites and the noise of each sum.
            for number in range(len(self.sums)):
                self.draw(number)
        except SumError as error:
            raise PlanError(str(error)) from error
        return self

    @property
    def digest(self) -> str:
        """The SHA-256 of the plan's bytes, which operators of sites can compare by telephone."""
        return hashlib.sha256(self.content).hexdigest()

    def reads_model(self, number: int) -> bool:
        """Return whether sum ``number`` is the table of predictions on test records, and so describes a model."""
        return bool(self.test_events) and number == len(self.sums) - 1

    def number_of(self, drawn: int, exact_RW: IntArray, *, stddev: float, name: str, about: bytes) -> int:
        """Return the position in the plan of the sum that a method asks for now, after ``drawn`` earlier sums.

        ``about`` is the file of the model that the sum describes: such a sum is the plan's last. SumError unless the
        plan has a sum with the name, the noise (``stddev``) and the shape of ``exact_RW`` at this position.
        """
        # Where the release is stored already, its sums are not asked for again: that about the model is the first.
        number = len(self.sums) - 1 if about else drawn
        rows, columns = exact_RW.shape
        asked = PlannedSum(name=name, rows=rows, columns=columns, noise_stddev=stddev)
        if number >= len(self.sums) or self.sums[number] != asked:
            raise SumError(
                f"The plan's sum number {number} differs from {asked!r}, which the method needs; use the version of "
                "fairpate that made the plan."
            )
        return number

    def draw(self, number: int, about: bytes = b"") -> Draw:
        """Return the terms of sum ``number``, such as sites, noise and length, under which the sites compute it.
        ``about`` is the file of the model that the sum describes, if any."""
        planned = self.sums[number]
        # Of the file's bytes: the same values written differently are another plan.
        digest = bytes.fromhex(self.digest)
        return Draw(
            plan=hashlib.sha256(digest + hashlib.sha256(about).digest()).digest() if about else digest,
            number=number,
            sites=tuple(public_keys(key, f"sites.{name}") for name, key in self.sites.items()),
            may_vanish=self.may_vanish,
            may_collude=self.may_collude,
            size=planned.rows * planned.columns,
            noise_stddev=planned.noise_stddev,
        )

    def place_of(self, key: SiteKey) -> int:
        """Return the position in the plan of the site with the private ``key``. PlanError for a key that is not in the
        plan."""
        for place, (name, text) in enumerate(self.sites.items()):
            if public_keys(text, f"sites.{name}") == key.public:
                return place
        raise PlanError(
            f"key: the key does not belong to a site of the plan ({', '.join(self.sites)}); give the key whose public "
            "part you sent to the plan's author."
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the privacy statement: which sites took part, and which parties are trusted for what."""
        return (
            f"Summed over {len(self.sites)} sites ({', '.join(self.sites)}), none of which revealed its records or "
            f"its own sum; plan {self.digest}. ε holds if at most {self.may_collude} of them collude with "
            f"the coordinator, also where {self.may_vanish} of them vanish.",
            "A person with records at two sites is two units. A site that sends wrong numbers can spoil the model, "
            "and no other site's privacy.",
        )


@lru_cache(2 * _MOST_SITES)  # each of a plan's sums has the same keys, and testing a key takes a while
def public_keys(text: str, field: str) -> PublicKeys:
    """Parse a site's public keys from ``text``, as :func:`key_text` writes them. PlanError for other text. The error's
    message begins with ``field``, the name of the field that contains the text."""
    try:
        found = bytes.fromhex(text)
        return PublicKeys(signing=found[:32], sealing=found[32:])
    except (ValueError, TypeError, SumError) as error:
        raise PlanError(
            f"{field}: expected the text that `fairpate site key` printed ({error}); copy the text again."
        ) from error


def read_plan(content: bytes, where: str) -> SitePlan:
    """Parse a plan, the terms of a release over sites, from ``content``, the bytes of its file. PlanError if it is not
    a valid plan, or longer than ``MOST_PLAN_BYTES``. The error's message begins with ``where``, the source of the
    bytes."""
    if len(content) > MOST_PLAN_BYTES:
        raise PlanError(
            f"{where}: not a plan (expected at most {MOST_PLAN_BYTES} bytes, got {len(content)}); give the file that "
            "`fairpate site plan` wrote."
        )
    try:
        plan = SitePlan.model_validate_json(content, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        words = ": ".join(filter(None, (".".join(map(str, fault["loc"])), expected(fault))))
        raise PlanError(f"{where}: not a plan ({words}); give the file that `fairpate site plan` wrote.") from error
    return plan.model_copy(update={"content": content})


def embedding_file(plan_file: Path) -> Path:
    """Return the path of the file with a plan's embedding (the network that maps all records to features): next to the
    plan, with another suffix."""
    return plan_file.with_suffix(".safetensors")


def new_key(path: Path) -> SiteKey:
    """Create the private keys of a site in a new file that only its owner can read. PlanError if the file exists."""
    secret = secrets.token_bytes(32)
    try:
        # Never over a key that another call has just made.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise PlanError(f"{path}: a key file exists already; use its key, or give another file.") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret.hex() + "\n")
        file.flush()
        os.fsync(descriptor)
    return SiteKey(secret)


def read_key(path: Path) -> SiteKey:
    """Read the private keys that :func:`new_key` wrote. PlanError if the file is missing, damaged or readable by
    others."""
    try:
        # No permission for the group or others.
        if path.stat().st_mode & 0o077:
            raise PlanError(
                f"{path}: other users may read this key file; restrict it with chmod 600, or make another key."
            )
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
        if len(secret) != 32:
            raise ValueError(f"expected 32 bytes, got {len(secret)}")  # noqa: TRY301 - reworded below
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: not a key ({error}); make one with `fairpate site key`.") from error
    return SiteKey(secret)


def key_text(keys: PublicKeys) -> str:
    """Return a site's public keys as one text for the roster, the file that maps names of sites to such texts."""
    return (keys.signing + keys.sealing).hex()


def read_roster(path: Path) -> dict[str, str]:
    """Read a roster, a YAML file that maps sites' names to the texts of their keys. PlanError for a wrong or repeated
    key."""
    try:
        roster = read_yaml(path, as_text=True)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    # In one spelling, so that two entries with the same key are seen.
    keys = {str(name): key_text(public_keys(text, f"sites.{name}")) for name, text in roster.items()}
    if len(set(keys.values())) < len(keys):
        raise PlanError(f"{path}: two sites have the same key; let every site make its own with `fairpate site key`.")
    return keys


def rehearse(config: Method, dataset: Dataset) -> dict[str, Any]:
    """Run the release of ``config`` on public records only, to find out what a plan has to state about it: its unit,
    its privacy events, its sums and a digest of its public arrays. Return these as the fields of a plan.

    ConfigError for a method whose sums cannot be computed over sites.
    """
    from fairpate.fairness.bounded_errors import NUM_BINS
    from fairpate.files import arrays_digest
    from fairpate.methods.base import all_methods, price
    from fairpate.privacy.mechanism_events import event_json
    from fairpate.run.private_metrics import PREDICTIONS, table_event
    from fairpate.run.run import check_data

    if config.is_seeded or not config.is_private:
        raise ConfigError(
            "noise: expected os_entropy, and a finite target.epsilon, because sites are protected from each other; "
            "set both."
        )
    config.check_sites()
    config.check()
    check_data(config, dataset)
    known = [name for name, method in all_methods().items() if method.sums_over_sites]
    refusal = ConfigError(
        f"method: {config.method} releases no sum that sites can draw together; take {', '.join(known[:-1])} or "
        f"{known[-1]}."
    )
    if not config.sums_over_sites:
        raise refusal
    sums: list[PlannedSum] = []

    def recorded(exact_RW: IntArray, *, stddev: float, name: str, about: bytes = b"") -> IntArray:  # noqa: ARG001
        # A site rehearses the settings of a plan before its operator agrees to it.
        if len(sums) == _MOST_SUMS:
            raise ConfigError(f"method: these settings release more than {_MOST_SUMS} sums; set fewer rounds.")
        rows, columns = exact_RW.shape
        sums.append(PlannedSum(name=name, rows=rows, columns=columns, noise_stddev=stddev))
        return np.zeros_like(exact_RW)

    released = config.rehearse(dataset, recorded)
    test_events: tuple[Event, ...] = ()
    # Fewer sums than events: then a part of the release is drawn from the records of one site alone.
    if len(sums) < sum(getattr(event, "count", math.inf) for event in released.events):
        raise refusal
    if config.evaluation.metrics == "private":
        # Of any model: the cells are the same, and so is the price.
        cost = price(released.events, delta=config.target.delta, accounting=config.target.stated["accounting"])
        event = table_event(cost, config.student.reject)
        bins, groups, classes = len(config.evaluation.score_edges) + 1, dataset.num_groups, dataset.num_classes
        empty = np.zeros((bins * groups, classes**2), np.int64)
        if config.student.reject is not None:  # with the table by confidence, in one column
            strata = groups * (1 if config.student.idp3 is None else classes)
            empty = np.zeros((empty.size + strata * NUM_BINS * 2, 1), np.int64)
        recorded(empty, stddev=event.noise_stddev_weights, name=PREDICTIONS)
        test_events = (event,)
    return {
        "unit": dataset.unit,
        "events": [strict(event_json(event)) for event in released.events],
        "sums": [each.model_dump() for each in sums],
        "public_arrays": arrays_digest(released.arrays),
        "test_events": [strict(event_json(event)) for event in test_events],
    }


def make_plan(
    config: Method, sites: Mapping[str, str], file: Path, *, may_vanish: int, may_collude: int, reporter: Reporter
) -> SitePlan:
    """Write a new plan, the terms of a release over ``sites`` (a mapping from names to public keys), to ``file``, and
    return it. If all records are embedded, the embedding is written to :func:`embedding_file`. No private record is
    read.

    ``may_vanish`` and ``may_collude``: how many sites may vanish, and how many may collude with the coordinator.
    DataError as :func:`fairpate.data.registry.load_at_site`, ConfigError as :func:`rehearse`, PlanError if the numbers
    of sites and the noise are not compatible.
    """
    from fairpate.data.embedding import embedding_bytes
    from fairpate.data.registry import load_at_site
    from fairpate.run.forecast import announce_delta

    with reporter.stage("data"):  # and their embedding, which may take minutes for pictures
        dataset, embedding = load_at_site(config.data, has_private=False), None
    with reporter.stage("rehearsal"):
        rehearsed = rehearse(config, dataset)
    if dataset.embedding is not None:
        embedding = embedding_bytes(dataset.embedding)
        if len(embedding) > MOST_FILE_BYTES:
            raise PlanError(
                f"data.embedding: its file has {len(embedding)} bytes, and sites accept at most {MOST_FILE_BYTES}; "
                "choose a smaller embedding."
            )
    # Paths differ between the parties; of the declaration and of an encoder's weights, digests go into the plan.
    left_out = {"data_dir", "declaration", "weights"}
    settings = config.model_dump(mode="json", exclude={"out": True, "ray": True, "data": left_out})
    settings["declaration"] = config.data.declaration and config.data.declaration.sha256
    if dataset.encoder is not None:
        settings["encoder"] = dataset.encoder.sha256
    values = {
        # A plan is used once: the same settings again are another plan, with another digest.
        "id": secrets.token_hex(16),
        "settings": settings,
        **rehearsed,
        "embedding": None if embedding is None else hashlib.sha256(embedding).hexdigest(),
        "sites": dict(sites),
        "may_vanish": may_vanish,
        "may_collude": may_collude,
    }
    announce_delta(config.target.delta, dataset.declared_units, dataset.unit, reporter, is_own=True)
    plan = read_plan(json.dumps({"format": FORMAT} | values, indent=1, allow_nan=False).encode(), "plan")
    if embedding is not None:
        write_atomically(embedding_file(file), lambda partial: partial.write_bytes(embedding))
    # The plan last: where it is, the embedding that it needs is next to it.
    write_atomically(file, lambda partial: partial.write_bytes(plan.content))
    return plan


def config_of(
    plan: SitePlan, declaration: Path, *, data_dir: Path | None = None, out: Path | None = None, own: Sequence[str] = ()
) -> Method:
    """Return the configuration of the method that ``plan`` names, with the paths of one party's files and with ``own``,
    the party's settings ``ray.FIELD=VALUE`` for its workers and ``data.weights=FILE`` for an encoder of pictures.

    ``declaration`` is the YAML file that describes the data set. PlanError if it is not the one that the plan names, if
    the weights of the encoder are other ones than the plan's, or if ``own`` has another setting. ConfigError for a plan
    that names code which the operator has not allowed, EncoderError for an encoder whose file of weights is missing.
    """
    from fairpate.data.features import encoder_of
    from fairpate.data.registry import entry_for
    from fairpate.methods.base import configured, find_method, require_trusted

    values = {name: value for name, value in plan.settings.items() if name not in ("declaration", "encoder")}
    # Before the configuration is made, which imports the code that ``method`` names.
    require_trusted(values.get("method"), Path("plan"))
    if others := [each for each in own if not each.startswith(("ray.", "data.weights="))]:
        raise PlanError(
            f"--set: {others[0]} is fixed by the plan, for all sites alike; set only fields of ray and data.weights."
        )
    if "ray" in find_method(values["method"]).model_fields:
        values["ray"] = {"num_actors": 0}  # this process, unless the operator says otherwise
    fields = {"data.declaration": str(declaration), "data.data_dir": data_dir, "out": out}
    config = configured(values, [*((name, str(value)) for name, value in fields.items() if value is not None), *own])
    declared = config.data.declaration
    if declared is None or declared.sha256 != plan.settings["declaration"]:
        raise PlanError(
            f"--data: {declaration} is not the declaration of the plan; get that file from the plan's author."
        )
    # Before a picture is read: vectors of another network would be added to the other sites'.
    features = entry_for(config.data).complete_options(config.data.options).get("features")
    encoder, planned = encoder_of(features, config.data.weights, ()), plan.settings.get("encoder")
    if (found := None if encoder is None else encoder.sha256) != planned:
        raise PlanError(
            f"data.weights: the plan's encoder has weights with sha256 {planned}, and those here have {found}; get the "
            "plan's file of weights, or the version of fairpate that made the plan."
        )
    return config


def loader_of(plan: SitePlan, embedding: Path | None, *, has_private: bool) -> Callable[[DataConfig], Dataset]:
    """Return a function that loads one party's data set and applies the plan's embedding, in the file ``embedding``
    (None: no embedding), to all records. PlanError if the file is not the one that the plan names.

    ``has_private`` is False for the coordinator, which has no private records.
    """
    from fairpate.data.embedding import read_embedding
    from fairpate.data.registry import embedded, load_at_site

    if (None if embedding is None else hashlib.sha256(embedding.read_bytes()).hexdigest()) != plan.embedding:
        raise PlanError(
            "embedding: the file is not the one that the plan names; get plan and embedding from the plan's author."
        )
    placing = None if embedding is None else read_embedding(embedding)
    read: list[Dataset] = []

    def load(data: DataConfig) -> Dataset:
        # Once: it is read for the rehearsal, and again for the release.
        if not read:
            read.append(load_at_site(data.model_copy(update={"embedding": None}), has_private=has_private))
        # Without an embedding in ``data``, the caller places the records by the one that its folder keeps.
        return read[0] if data.embedding is None or placing is None else embedded(read[0], placing)

    return load


def require_rehearsed(plan: SitePlan, config: Method, dataset: Dataset) -> None:
    """Raise PlanError unless a rehearsal by this party (the method run without private records) gives the sums, privacy
    events, unit and public arrays that ``plan``, the agreed terms of the release, states."""
    stated = json.loads(plan.content)
    # A plan of fewer events than sums, or of less noise, would price too little.
    for name, here in rehearse(config, dataset).items():
        if here != stated[name]:
            raise PlanError(
                f"{name}: a trial run without private records on this machine differs from the plan; compare the "
                "public records, the declaration and the version of this software with those of the plan's author."
            )


@dataclass(frozen=True, eq=False)
class Journal:
    """The durable store in which one party of a release over sites keeps what it sent and decided. It is a file that
    only its owner can read. A stored value is never replaced.

    Every value is on the disk when :meth:`setdefault` returns. JournalError if that fails.
    """

    database: sqlite3.Connection
    path: Path
    prefix: str = ""

    @classmethod
    @contextmanager
    def opened(cls, path: Path, plan: SitePlan) -> Iterator[Journal]:
        """Context manager: open the journal in the file ``path`` inside the ``with`` block; a missing file is created.

        PlanError for the journal of another plan than ``plan``, JournalError if another process has it open.
        """
        # SQLite would create the file with the rights of the umask, readable for others.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        # One thread at a time uses it, and not always the same one.
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)) as database:
            journal = cls(database, path)
            # Lists and charges must outlast a loss of power, erased secrets must not.
            for command in (
                # Two processes of one party would each draw noise. SQLite's lock ends with its process.
                "PRAGMA locking_mode = EXCLUSIVE",
                "PRAGMA synchronous = FULL",
                "PRAGMA secure_delete = ON",
                # Kept from one transaction to the next, so that `erase` knows where old pages are.
                "PRAGMA journal_mode = PERSIST",
                "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value BLOB)",
            ):
                journal._do(command)
            # Noise that was drawn for another plan must not answer for this one.
            if journal.setdefault("plan", plan.digest.encode()) != plan.digest.encode():
                raise PlanError(f"{path}: this journal belongs to another plan; give another folder with --out.")
            yield journal

    def part(self, prefix: str) -> Journal:
        """Return a view of this journal that contains the keys with this ``prefix`` only, and shows them without it."""
        return Journal(self.database, self.path, f"{self.prefix}{prefix}/")

    def get(self, key: str, /) -> bytes | None:
        """Return the value of ``key``, None if it has none."""
        found = self._do("SELECT value FROM kept WHERE key = ?", self.prefix + key)
        return bytes(found[0][0]) if found else None

    def setdefault(self, key: str, value: bytes, /) -> bytes:
        """Store ``value`` unless ``key`` has a value, and return the value that it has."""
        self._do("INSERT OR IGNORE INTO kept VALUES (?, ?)", self.prefix + key, value)
        stored = self.get(key)
        assert stored is not None
        return stored

    def erase(self, reason: str) -> None:
        """Overwrite and delete all values of this journal, or of this part of one, and store ``reason`` under the key
        ``ENDED``."""
        # The reason first: after a crash in between, no secret is drawn anew.
        self._do("INSERT OR REPLACE INTO kept VALUES (?, ?)", self.prefix + ENDED, reason.encode())
        size, own = len(self.prefix), self.prefix
        self._do("DELETE FROM kept WHERE substr(key, 1, ?) = ? AND key != ?", size, own, own + ENDED)
        # SQLite's own journal still has the pages as they were. The change is committed, so nothing needs them.
        old = self.path.with_name(f"{self.path.name}-journal")
        try:
            with old.open("r+b") as file:
                file.write(bytes(old.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(
                f"{old}: this file still has secrets of an ended sum and cannot be overwritten ({error}); restore the "
                "rights to write it."
            ) from error

    def _do(self, command: str, *values: Any) -> list[Any]:
        try:
            return self.database.execute(command, values).fetchall()
        except sqlite3.Error as error:
            words = (
                f"the journal cannot be read and written ({error}); free space or restore the rights to it, and give "
                "the same command again."
            )
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                words = "another process uses this journal; wait until that process ends."
            raise JournalError(f"{self.path}: {words}") from error
