"""A finished run for its reviewers: a bundle of all that it published, which ``fairpate verify`` recomputes.

A bundle holds everything that the run published, the versions of its software, and ``head.json`` with the claim and the
SHA-256 of every file. Nothing in it is computed from votes, private records or a ledger. Equal runs give equal bytes.

Verification checks the files against the head, epsilon against the events, and card and student against the statement.
It recomputes epsilon by :mod:`fairpate.privacy.second_accountant`, which shares no code with the accountant that
computed the stated epsilon. It names every difference and everything that it cannot check. A bundle is untrusted input:
only files with known names are read, and no code in it is run.
"""

import hashlib
import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.config import values_digest, without
from fairpate.data.dataset import sha256_of
from fairpate.fairness import rates
from fairpate.files import PathIn, PlaceError, check_output, write_atomically
from fairpate.pages import at_most, counted, delta_caution, delta_text, epsilon_text
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.privacy.mechanism_events import event_from, event_json
from fairpate.privacy.second_accountant import NotRecomputedError, guarantee_of, recomputed_epsilon
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    read_json,
    read_labels,
    read_release,
    read_statement,
    run_at,
)
from fairpate.report.metrics import GAPS, with_labels
from fairpate.report.model_card import Card, CardData, IntendedUse, card_page, card_text
from fairpate.report.reject_option import OrderResult, RejectOptionSpread
from fairpate.report.run_page import Audit, audit_page
from fairpate.run.bounded_answers import without_rule
from fairpate.run.folder import environment
from fairpate.run.private_metrics import Assessment, assessment_of
from fairpate.run.publication import card_of, card_values, evaluation_of, read_answers, read_evaluation, require_card
from fairpate.types import GateRule, PrivacyStatement, UsageError, UserError, restored, stepwise, strict, tell
from student.card import read_card

FORMAT = "fairpate.bundle/1"
HEAD, README, EVENTS, VERSIONS = "head.json", "README.txt", "events.json", "versions.json"
REQUIRED = ("card.html", "card.json", "metrics.json", "record.json", "statement.json", "student.safetensors")
OPTIONAL = (
    *("audit.html", "audit.json", "choice.safetensors", "embedding.safetensors", "labels.parquet"),
    *("metrics.safetensors", "model.json", "model.onnx", "private_population.json", "released.safetensors"),
)
_OF_TABLES = ("perfect_gap", "majority_class", "majority_accuracy", "degenerate", "underserved", "underserved_groups")
CLAIM = ("method", "unit", "relation", "delta", "epsilon", "noise")
# Allowed relative difference of the recomputed from the stated epsilon, as two accountants round differently.
TOLERANCE = 1e-3
CARD_TEXT = "README.md"  # the card, as model hubs show it
_LICENCE = r"[A-Za-z0-9][A-Za-z0-9.+_-]*"
HUB_OWN = (".cache", ".git", ".gitattributes")
"""What hubs and their tools keep in a folder; verification neither reads nor lists it."""
_NAMES = {*REQUIRED, *OPTIONAL, README, EVENTS, VERSIONS, CARD_TEXT}
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip file can name
_READABLE = 0o644 << 16  # rights of Unix are in the upper half of an entry
# Bytes: read at once; at most of one JSON file; at most of all files, as the archive declares them.
_BLOCK, _MOST_TEXT, _MOST_BYTES = 2**20, 2**26, 2**34
# Errors that reading a maliciously made file can raise; nesting that is too deep raises a RuntimeError.
_SENSELESS = (UserError, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


Parts = Mapping[str, bytes | Path]
"""The content or the file of each part of a bundle, by name."""
Count = Callable[[int], None]


def write_bundle(root: Path, out: Path | None = None) -> tuple[Path, str]:
    """Write all published files of the run in the folder ``root`` to the zip file ``out`` (None: ``bundle.zip`` in that
    folder). Return the path of the zip file and the digest in its file ``head.json``, which identifies the content.

    The model card is written first if it is missing or does not match the privacy statement. RunFolderError for a
    folder without a run, RunDirectoryError for a run that published nothing, PlaceError if ``out`` cannot be written.
    """
    out = root / "bundle.zip" if out is None else out
    check_output(out, "--out", is_file=True, suffixes=(".zip",))
    return out, _written(run_at(root), lambda parts, count: write_atomically(out, partial(_zipped, parts, count)))


def write_hub_folder(root: Path, folder: Path, *, licence: str = "unknown") -> tuple[Path, str]:
    """Write all published files of the run in the folder ``root`` to ``folder``, with the card as ``README.md`` for a
    model hub; return the folder and the digest of its ``head.json``, as of a bundle, which it is. ``licence``: the
    model's, as an identifier of the hub.

    The folder may be a checkout of the hub, or hold an earlier bundle: its files are replaced. PlaceError if it holds
    anything else or cannot be written; other errors as :func:`write_bundle`.
    """
    check_output(folder, "--hub")
    if not re.fullmatch(_LICENCE, licence):
        raise UsageError(
            f"--licence: expected an identifier such as apache-2.0, got {licence!r}; give one of the hub's."
        )
    known = {*_NAMES, HEAD, *HUB_OWN}
    if folder.is_dir() and (others := sorted({path.name for path in folder.iterdir()} - known)):
        raise PlaceError(f"--hub: {folder} holds other files ({', '.join(others[:3])}); give a new or an empty folder.")

    def write(parts: Parts, count: Count) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.name in {*_NAMES, HEAD} - parts.keys():
                    path.unlink()
            # The head last: until then the folder is no bundle.
            for name, part in parts.items():
                content = part if isinstance(part, bytes) else part.read_bytes()
                write_atomically(folder / name, partial(Path.write_bytes, data=content))
                count(len(content))
        except OSError as error:
            raise PlaceError(f"--hub: {folder} cannot be written ({error.strerror}); give another place.") from error

    return folder, _written(run_at(root), write, licence=licence)


def _written(run: RunDirectory, write: Callable[[Parts, Count], None], *, licence: str | None = None) -> str:
    """Collect what ``run`` published and let ``write`` write it, given the parts by name and a function that counts
    bytes; return the digest of the head. With ``licence``, the card is a part as README.md."""
    statement = published_statement(run)
    require_card(run, statement)
    if missing := [name for name in REQUIRED if not (run.public / name).is_file()]:
        raise RunDirectoryError(
            f"{run.public}: {', '.join(missing)} missing; repeat the run's command, which writes them again."
        )
    # Public files alone: even a ledger's digest would confirm guesses about votes.
    paths = [run.public / name for name in (*REQUIRED, *OPTIONAL)]
    versions = read_json(run.environment)
    parts: dict[str, bytes | Path] = {path.name: path for path in paths if path.is_file()}
    parts[README] = Path(__file__).with_name("bundle_readme.txt").read_bytes()
    if licence is not None:
        card = _card_of(run, read_json(run.card))
        parts[CARD_TEXT] = card_text(card, has_graph=run.graph.is_file(), licence=licence).encode()
    parts[EVENTS] = json_bytes(events_of(statement))
    # Nothing else about the machine that ran it: a bundle is published.
    parts[VERSIONS] = json_bytes({each: versions.get(each) for each in ("fairpate", "revision", "python", "libraries")})

    total, done = 2 * sum(map(_size, parts.values())), 0  # every byte is read for its digest, and again into the file

    def count(size: int) -> None:
        nonlocal done
        done += size
        tell(min(done, total), total)  # the head is not in the total

    digests = {}
    for name, part in parts.items():
        digests[name] = hashlib.sha256(part).hexdigest() if isinstance(part, bytes) else sha256_of(part)
        count(_size(part))
    head = head_of(statement, digests)
    parts[HEAD] = json_bytes(head)
    write(parts, count)
    return str(head["digest"])


def _size(part: bytes | Path) -> int:
    return len(part) if isinstance(part, bytes) else part.stat().st_size


def _zipped(parts: Parts, count: Count, path: Path) -> None:
    """Write ``parts`` to a zip file at ``path``."""
    # Not compressed: then the bytes do not depend on the library that packs them.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as bundle:
        for name, part in sorted(parts.items()):
            entry = zipfile.ZipInfo(name, _FIXED_TIME)
            # As on Unix, on every machine: equal runs give equal bytes.
            entry.create_system, entry.external_attr = 3, _READABLE
            # zipfile decides on 64-bit fields by the size beforehand; without it, a part beyond 2 GiB fails.
            entry.file_size = _size(part)
            opened = io.BytesIO(part) if isinstance(part, bytes) else part.open("rb")
            with opened as source, bundle.open(entry, "w") as target:
                while block := source.read(_BLOCK):
                    target.write(block)
                    count(len(block))


def head_of(statement: PrivacyStatement, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a bundle's ``head.json``: the run's privacy claim, the mapping ``files`` from the name of
    every file to its SHA-256, and one digest over both."""
    plain = asdict(statement)
    bound = {"format": FORMAT, "claim": {name: plain[name] for name in CLAIM}, "files": dict(sorted(files.items()))}
    return bound | {"digest": hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()}


def events_of(statement: PrivacyStatement, part: str | None = None) -> list[dict[str, Any]]:
    """Return privacy events of the statement as JSON values, each with a kind, a unit and a relation: those on private
    records or, with ``part``, those on "test" or "validation" records. An event of a kind that only another package
    defines keeps its stated values."""
    found = []
    for values in statement.events if part is None else statement.part_events[part]:
        try:
            event = event_from(values)
        except (TypeError, ValueError):  # a kind that is registered only where its package is installed
            found.append({"unit": statement.unit, "relation": statement.relation, **values})
        else:
            found.append(event_json(event) | {"unit": event.unit, "relation": event.relation})
    return found


def json_bytes(value: Any) -> bytes:
    """Return ``value`` as the bytes of a strict JSON document in the format that all JSON files made for a bundle
    have."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def published_statement(run: RunDirectory) -> PrivacyStatement:
    """Return the privacy statement of a published run; RunDirectoryError, with the reason, if nothing of the run may be
    published."""
    if not run.statement.is_file():
        raise RunDirectoryError(
            f"{run.statement}: missing, so this run has published nothing. Repeat the command of an interrupted run to "
            "finish it; a run of a method without privacy publishes nothing, so give another run."
        )
    statement = read_statement(run)
    if statement.noise != OS_ENTROPY:
        raise RunDirectoryError(
            f"{run.statement}: noise is {statement.noise!r}, which is not private, so nothing of this run may be "
            f"published; run again with noise {OS_ENTROPY}."
        )
    if statement.epsilon is None or not math.isfinite(statement.epsilon):
        raise RunDirectoryError(
            f"{run.statement}: epsilon is infinite, so nothing of this run may be published; run again with a finite "
            "target."
        )
    return statement


class BundleError(UsageError):
    """Raised if a path that should be a bundle, the zip file or folder of a run's published files, is something
    else."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of checking a bundle, the published files of a run.

    ``differs`` lists every difference between the bundle and what verification expects; the privacy claim holds if the
    list is empty. ``recomputed`` is the independent accountant's epsilon, None if that accountant could not compute
    one. ``not_checked`` lists what cannot be checked from a bundle.
    """

    digest: str
    stated: float | None = None
    recomputed: float | None
    delta: float | None = None
    unit: str = ""
    relation: str = ""
    checked: tuple[str, ...]
    differs: tuple[str, ...]
    not_checked: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.differs

    @property
    def words(self) -> str:
        """Return the verdict on the bundle as one line of text."""
        if not self.holds or self.recomputed is None or self.stated is None or self.delta is None:
            return f"refused: {len(self.differs)} {'thing differs' if len(self.differs) == 1 else 'things differ'}"
        compared = "<=" if self.recomputed <= self.stated else f"within {TOLERANCE:.1%} of"
        return (
            f"holds: recomputed epsilon {_epsilon(self.recomputed)} {compared} stated {_epsilon(self.stated)} at delta "
            f"{delta_text(self.delta)}, unit: {self.unit}, relation: {self.relation}"
        )


@dataclass(frozen=True, kw_only=True)
class Unpacked(RunDirectory):
    """An unpacked bundle, read as if it were the folder of the run: all of its files are public."""

    public = PathIn("root", ".")


def verify_bundle(path: Path, *, head: str | None = None) -> Verdict:
    """Check the bundle at ``path``, a zip file or the folder that it was unpacked to, and return the verdict.

    ``head``: the digest of the bundle's ``head.json`` that the operator published elsewhere; None does not compare it.
    BundleError if ``path`` is not a bundle.
    """
    with _unpacked(path) as bundle:
        found = _Check(bundle)
        checked = (found.files, found.claim, found.epsilon, found.queries, found.student, found.release)
        for check in stepwise((*checked, found.metrics, found.record, found.choice, found.audit, found.card)):
            found.run(check)
        digest = str(found.head.get("digest", ""))
        # Only this check detects a forged bundle whose files and head agree with each other.
        if head is not None and head != digest:
            found.differs.append(f"{HEAD}: digest {digest}, the published one is {head}")
        stated: dict[str, Any] = {}
        if found.statement is not None:
            stated = {name: getattr(found.statement, name) for name in ("delta", "unit", "relation")}
            stated["stated"] = found.statement.epsilon
        return Verdict(
            digest=digest,
            **stated,
            recomputed=found.recomputed,
            checked=tuple(found.checked),
            differs=tuple(found.differs),
            not_checked=tuple(found.not_checked),
        )


@dataclass
class _Check:
    """The checks of one bundle, and the differences and values that they have found so far."""

    bundle: RunDirectory
    checked: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    recomputed: float | None = None
    head: dict[str, Any] = field(default_factory=dict)
    statement: PrivacyStatement | None = None
    # The privacy statement: the same as ``statement``, but never None. Only checks that run after the statement was
    # read use it.
    said: PrivacyStatement = field(init=False)
    # Computed from the released table of private metrics; None for other metrics.
    assessment: Assessment | None = None

    def run(self, check: Callable[[], str | None]) -> None:
        """Run one check of the bundle and store what it returns; a malformed file counts as a difference. Until the
        privacy statement has been read, all checks but ``files`` and ``claim`` are skipped."""
        if self.statement is None and check not in (self.files, self.claim):
            return
        before = len(self.differs)
        try:
            done = check()
        except _SENSELESS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self.differs.append(f"{check.__name__}: cannot be checked ({reason})")
            return
        if done and len(self.differs) == before:
            self.checked.append(done)

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.differs.append(otherwise)

    def require_claim(
        self, file: str, values: Mapping[str, Any], statement: PrivacyStatement, names: Iterable[str] = CLAIM[:-1]
    ) -> None:
        """Record a difference for each of the fields ``names`` that has another value in ``values``, the content of
        ``file``, than in the privacy statement."""
        # By default without the noise, which record.json and audit.json do not state.
        for name in names:
            found, stated = values.get(name), getattr(statement, name)
            self.require(found == stated, f"{file}: {name} is {found!r}, the statement says {stated!r}")

    def settings_digest(self) -> str:
        """Return the digest of the settings in ``record.json`` that determine the model."""
        # Those of the evaluation do not change it, and are not in the digests of candidates.
        return values_digest(without(_json(self.bundle, "record.json")["config"], ("evaluation",)))

    def files(self) -> str:
        """Check that the bundle has exactly the files that its ``head.json`` lists, each with the SHA-256 listed
        there."""
        self.head = _json(self.bundle, HEAD)
        listed = self.head["files"]
        present = {entry.name for entry in self.bundle.public.iterdir()} - {HEAD, *HUB_OWN}
        for fault, names in {
            f"not in {HEAD}": present - set(listed),
            "no file of a bundle": (present & set(listed)) - _NAMES,
            f"missing, {HEAD} lists it": set(listed) - present,
            f"missing from {HEAD}": {*REQUIRED, EVENTS, VERSIONS, README} - set(listed),
        }.items():
            self.differs += [f"{name}: {fault}" for name in sorted(names)]
        # Only known names are opened: the head comes from others, and may list any path.
        for name in sorted(present & set(listed) & _NAMES):
            same = sha256_of(self.bundle.public / name) == listed[name]
            self.require(same, f"{name}: not the file of {HEAD} (its SHA-256 differs)")
        return f"{len(listed)} files are those of {HEAD}"

    def claim(self) -> str:
        """Check that the statement is of a private run, and that ``head.json`` and ``record.json`` (the run as a row of
        a comparison) state the same privacy claim."""
        statement = read_statement(self.bundle)
        # Made of the statement: a head that is only consistent in itself proves nothing.
        expected = head_of(statement, self.head.get("files", {}))
        self.require_claim(HEAD, self.head.get("claim", {}), statement, CLAIM)
        self.require(self.head.get("digest") == expected["digest"], f"{HEAD}: its digest is not that of its content")
        self.require(statement.noise == OS_ENTROPY, f"statement.json: noise {statement.noise!r} is not private")
        stated = statement.epsilon_as_in_paper
        self.require(stated is None, f"statement.json: epsilon_as_in_paper is {stated}, which no run states")
        units, delta = statement.declared_units, statement.delta
        caution = "" if units is None else delta_caution(delta, units, statement.unit)
        self.require(not caution or caution in statement.remarks, "statement.json: no remark says that delta is large")
        if units is not None:
            self.not_checked.append("statement.json: declared_units, the operator's word, with which delta is compared")
        # For every other unit, all of a record is protected.
        is_partly, named = statement.unit == "sensitive attribute", statement.not_protected
        self.require(bool(named) == is_partly, f"statement.json: not_protected is {named!r} for {statement.unit!r}")
        self.require_claim("record.json", _json(self.bundle, "record.json"), statement)
        self.statement = self.said = statement
        return f"{HEAD} and record.json claim what the statement claims"

    def epsilon(self) -> str | None:
        """Recompute epsilon from the statement's privacy events with the independent accountant, under their unit and
        relation."""
        statement = self.said
        events = events_of(statement)
        self.require(_json(self.bundle, EVENTS) == events, f"{EVENTS}: not the events of the statement")
        self.require(bool(events), "statement.json: no events, so nothing is priced")
        unknown = set(statement.part_events) - {"test", "validation"}
        self.require(not unknown, f"statement.json: {unknown} are no parts that a rule keeps apart")
        try:
            recomputed = 0.0
            # A unit is a private, a test or a validation record: the largest cost holds for all.
            for of_part in (events, *(events_of(statement, part) for part in statement.part_events)):
                for event in of_part:
                    for name, value in zip(("unit", "relation"), guarantee_of(event), strict=True):
                        for stated in {getattr(statement, name), event[name]} - {value}:
                            kind = event["kind"]
                            self.differs.append(f"statement.json: {name} {stated!r}, {kind} is defined for {value!r}")
                recomputed = max(recomputed, recomputed_epsilon(of_part, delta=statement.delta))
        except NotRecomputedError as error:
            self.differs.append(f"epsilon: not recomputed, priced by this package's accountant alone ({error})")
            return None
        self.recomputed = recomputed
        stated = math.inf if statement.epsilon is None else statement.epsilon
        self.require(math.isfinite(stated), "statement.json: epsilon is infinite: nothing is guaranteed")
        # One-sided: a claim may exceed the cost of its events, as a bound does that was fixed beforehand.
        words = f"recomputed {_epsilon(recomputed)} > stated {_epsilon(stated)} at delta {delta_text(statement.delta)}"
        self.require(recomputed <= stated * (1 + TOLERANCE), f"epsilon: {words}")
        return "epsilon recomputed from the statement's events by an accountant of its own"

    def queries(self) -> str | None:
        """Check the statement's counts of queries. Its privacy events must cover all submitted queries. No more queries
        may have ended than were submitted, and no more labels may be released than queries were answered."""
        statement, queries = self.said, self.said.queries
        for name in ("epsilon_with_earlier", "epsilon_adaptive_with_earlier"):
            together = getattr(statement, name)
            if not statement.earlier_releases and together is not None:
                self.differs.append(f"statement.json: {name} is {together} without an earlier release")
            elif statement.earlier_releases:
                total = "infinite" if together is None else at_most(together)
                self.not_checked.append(f"{name}, {total}: the events of earlier releases are not here")
                alone = self.recomputed or 0.0
                is_sum = together is None or together >= alone * (1 - TOLERANCE)
                self.require(is_sum, f"statement.json: {name} is below the {_epsilon(alone)} of this release alone")
        if statement.remarks:
            self.not_checked.append(f"statement.json: {counted(len(statement.remarks), 'remark')}, which are words")
        if queries is None:
            return None
        priced = sum(event.get("count", 0) for event in statement.events)
        # More may be priced: where released labels decide how many are submitted, the plan is priced.
        self.require(priced >= queries.submitted, f"events: {priced} queries priced, {queries.submitted} submitted")
        ended = queries.answered + queries.rejected_confidence + queries.rejected_fairness + queries.refused_free
        self.require(ended <= queries.submitted, f"queries: {ended} ended, {queries.submitted} submitted")
        if self.bundle.labels.is_file():
            labels = len(read_labels(self.bundle.labels).labels)
            # Answers to a service's callers are counted too, and are not in the file.
            self.require(labels <= queries.answered, f"labels.parquet: {labels} labels, {queries.answered} answered")
        self.not_checked.append("queries: how many were refused by which step, which the ledger knows")
        events = events_of(statement)
        if sum("count" in event for event in events) == 1:
            submitted = [event | ({"count": queries.submitted} if "count" in event else {}) for event in events]
            if submitted == events and not statement.part_events and self.recomputed is not None:
                spent = self.recomputed
            else:
                spent = recomputed_epsilon(submitted, delta=statement.delta) if queries.submitted else 0.0
            words = f"queries: epsilon_submitted {queries.epsilon_submitted:.4f}, recomputed {_epsilon(spent)}"
            self.require(spent <= queries.epsilon_submitted * (1 + TOLERANCE), words)
        stated = math.inf if statement.epsilon is None else statement.epsilon
        words = f"queries: epsilon_submitted {queries.epsilon_submitted:.4f} is above the stated epsilon"
        self.require(queries.epsilon_submitted <= stated * (1 + TOLERANCE), words)
        return f"{queries.submitted} queries submitted, {priced} priced"

    def student(self) -> str:
        """Check that the student (the published model) is readable and complete, and that model card and ONNX graph
        were made from it."""
        from student.student import load_student  # imports torch, which writing a bundle does not need

        card = load_student(self.bundle.student).card
        digest = sha256_of(self.bundle.student)
        carded = _json(self.bundle, "card.json")["model"]["sha256"]
        self.require(carded == digest, "student.safetensors: not the student of card.json")
        if self.bundle.graph.is_file():
            described = _json(self.bundle, "model.json")
            same = described["student_sha256"] == digest and described["sha256"] == sha256_of(self.bundle.graph)
            self.require(same, "model.onnx: not made of this student")
        if self.bundle.labels.is_file() and card.num_training_labels is not None:
            labels = len(read_labels(self.bundle.labels).labels)
            enough = card.num_training_labels <= labels
            self.require(enough, f"student.safetensors: learned {card.num_training_labels} labels, {labels} are here")
        return f"the student {digest[:12]} is that of card and head"

    def release(self) -> str | None:
        """Check that the privacy statement lists all privacy events of the released arrays in the bundle, from which
        the student (the published model) learned."""
        if not self.bundle.released.is_file():
            return None
        released, _ = read_release(self.bundle.released)
        # Through the event, so that fields that another version left at their default compare equal.
        stated = [event_json(event_from(event)) for event in self.said.events]
        left_out = [event for event in map(event_json, released.events) if event not in stated]
        self.require(not left_out, f"released.safetensors: {len(left_out)} of its events are not in the statement")
        return "the release's events are in the statement"

    def metrics(self) -> str | None:
        """Check that the private metrics equal those computed here from the released noisy table of test records, and
        that the statement lists the privacy event of that table."""
        measured, card = read_evaluation(self.bundle), read_card(self.bundle.student)
        guarantee = read_answers(self.bundle)
        said = None if guarantee is None else guarantee.sentence
        same = said == self.said.errors_of_answers
        self.require(same, "statement.json: what it says of the errors of answers is not what metrics.json says")
        stated = {"record.json": _json(self.bundle, "record.json").get("metrics", "outside")}
        stated["statement.json"] = "private" if "test" in self.said.part_events else measured.metrics
        for name, kind in stated.items():
            # Without a table, public and outside differ by the operator's word alone.
            self.require(kind == measured.metrics, f"{name}: metrics are {kind}, metrics.json says {measured.metrics}")
        if measured.metrics != "private":
            why = "declared public" if measured.metrics == "public" else "outside the guarantee"
            self.not_checked.append(f"metrics.json: {why}, of test records that are not here")
            given = _json(self.bundle, "metrics.json")
            if None in measured.confusion_GYC:
                self.not_checked.append("metrics.json: accuracies, rates and gaps of tables that are not shown")
            for name, part in {"": given, "without_refusals.": given.get("without_refusals")}.items():
                if part is not None:
                    wrong = [f"{name}{each}" for each in unlike_tables(part)]
                    self.require(not wrong, f"metrics.json: not what its tables give ({', '.join(wrong)})")
            if guarantee is not None:
                same = guarantee.rule == card.answers
                self.require(same, "metrics.json: its thresholds are not those of the student")
                same = said == given["answers"]["said"]
                self.require(same, "metrics.json: its guarantee is not what its numbers give")
                self.not_checked.append("metrics.json: the thresholds of answers, from test records that are not here")
            if (orders := given.get("orders")) is not None:
                each = tuple(restored(OrderResult, order) for order in orders["orders"])
                spread = RejectOptionSpread(
                    rule=restored(GateRule, orders["rule"] | {"max_disparity": orders["rule"]["max_disparity"] or 0.0}),
                    num_records=orders["num_records"],
                    orders=each,
                    answers_needed=0,
                ).to_json()
                names = ("accuracy", "coverage", "final_gap", "max_gap", "coverage_G")
                wrong = [name for name in names if not alike(spread[name], orders.get(name))]
                self.require(not wrong, f"metrics.json: not what its orders give ({', '.join(wrong)})")
            return None
        released, origin = read_release(self.bundle.metrics_table)
        same = [event_json(event) for event in released.events] == events_of(self.said, "test")
        self.require(same, "metrics.safetensors: its event is not that of the statement")
        from student.student import load_student  # imports torch, which writing a bundle does not need

        about = hashlib.sha256(without_rule(load_student(self.bundle.student))).hexdigest()
        self.require(origin.settings["student"] == about, "metrics.safetensors: a table of another model's predictions")
        # With what a reject option does in other orders, which is simulated from the table by the run's public seed.
        seed = _json(self.bundle, "record.json")["seed"]
        bound = None if card.answers is None else card.answers.bound
        # With the thresholds that keep a bound on the errors of answers.
        found = self.assessment = assessment_of(released, card, seed=seed, fair_at=measured.fair_at, bound=bound)
        same = (None if found.answers is None else found.answers.rule) == card.answers
        self.require(same, "student.safetensors: its thresholds are not those that metrics.safetensors gives")
        expected, given = strict(found.to_json()), _json(self.bundle, "metrics.json")
        names = expected.keys() | given.keys()
        wrong = sorted(name for name in names if not alike(expected.get(name), given.get(name)))
        self.require(not wrong, f"metrics.json: not what metrics.safetensors gives ({', '.join(wrong)})")
        return "metrics are private: what metrics.safetensors gives, a noisy table that the statement lists"

    def record(self) -> str:
        """Check that ``record.json``, the run as a row of a comparison, has the numbers of statement and metrics."""
        given, answers, queries = _json(self.bundle, "record.json"), read_answers(self.bundle), self.said.queries
        config = given["config"]
        # Private metrics are of all predictions, the row is of those that the model answers.
        measured = read_evaluation(self.bundle) if self.assessment is None else self.assessment.of_answers
        expected: dict[str, Any] = {
            name: getattr(measured, name)
            for name in ("accuracy", "coverage", "disparity", "majority_accuracy", "degenerate", "underserved_groups")
        }
        expected |= {
            "unmeasured_groups": measured.not_measured,
            "epsilon_is_data_dependent": False,
            "answered": None if queries is None else queries.answered,
            "declared_units": self.said.declared_units,
            **dict.fromkeys(("max_error", "max_error_confidence")),
            **({} if answers is None else answers.kept),
            # As far as its settings name them.
            **{name: config.get(name, given[name]) for name in ("method", "seed")},
            "data": config.get("data", {}).get("name", given["data"]),
        }
        by_group, labels = given.get("answered_by_group"), self.bundle.labels
        if by_group is not None and labels.is_file():
            groups = np.asarray(read_labels(labels).groups)
            expected["answered_by_group"] = np.bincount(groups, minlength=len(by_group)).tolist()
        wrong = [name for name, value in strict(expected).items() if not alike(value, given.get(name))]
        for name, ends in given["fairness"].items():
            gap = measured.measured(name)
            values = strict({each: getattr(gap, each) for each in ("value", "low", "high")})
            values |= strict({"fair_from": measured.fair_from(name)})
            # An undefined number claims nothing: a gap that leaves out a comparison has none here.
            wrong += [
                f"fairness.{name}.{end}"
                for end, value in ends.items()
                if value is not None and not alike(value, values.get(end))
            ]
        self.differs += [f"record.json: {name} is not that of statement, metrics and settings" for name in wrong]
        self.not_checked.append("record.json: its settings, unless a choice or an audit was made of them")
        if self.bundle.private_population.is_file():
            self.not_checked.append("private_population.json: estimates that need the public records")
        if self.bundle.graph.is_file():
            self.not_checked.append("model.onnx: whether its graph computes what the student does")
        return "record.json has the numbers of statement and metrics"

    def choice(self) -> str | None:
        """Check that the run's settings are those that a private choice among several settings selected, and that the
        statement includes the cost of this choice."""
        made, is_stated = self.bundle.choice, "validation" in self.said.part_events
        self.require(made.is_file() == is_stated, "choice.safetensors: the statement and this file go together")
        self.require(is_stated or not self.said.tuning_accounted, "statement.json: no choice that is accounted for")
        if not made.is_file():
            return None
        released, origin = read_release(made)
        events = [event_json(event) for event in released.events]
        same = events == events_of(self.said, "validation")
        self.require(same, "choice.safetensors: its event is not that of the statement")
        # The choice is among these trainings: trainings and scores are charged for one random number of trials.
        of_scores, of_trainings = (
            [(event["expected_trials"], event["eta"]) for event in some if event["kind"] == "SecretTrials"]
            for some in (events, self.said.events)
        )
        same = of_scores == of_trainings
        self.require(same, "statement.json: trainings and their scores are not of the same secret number of trials")
        candidates = origin.settings["candidates"]
        chosen = candidates[int(released.arrays["chosen"][0])]
        self.require(self.settings_digest() == chosen, "record.json: not the settings that were chosen")
        return f"the settings are those that were chosen among {len(candidates)}"

    def audit(self) -> str | None:
        """Check that the audit in the bundle is of this run's settings, that its lower bounds on epsilon follow from
        its counts of right guesses, and that none of them exceeds the stated epsilon."""
        if not self.bundle.audit.is_file():
            self.require(not self.bundle.audit_page.is_file(), "audit.html: a page without audit.json")
            return None
        values = _json(self.bundle, "audit.json")
        audit = Audit.from_json(values)
        self.require(audit.records == "made", f"audit.json: of {audit.records} records, which may not be published")
        self.require(alike(strict(audit.to_json()), values), "audit.json: its bounds are not those of its counts")
        self.require_claim("audit.json", values, self.said)
        self.require(audit.settings == self.settings_digest(), "audit.json: of other settings than record.json")
        self.require(not audit.refuted, f"audit.json: {audit.headline}")
        if not audit.has_power:
            self.not_checked.append(f"audit.json: {audit.power_words}")
        if self.bundle.audit_page.read_bytes() != audit_page(audit).encode():
            self.not_checked.append("audit.html: another version wrote it, or it is not the page of audit.json")
        return f"an audit of these settings by made records: {audit.proved():.2f} is proved of the stated epsilon"

    def card(self) -> str:
        """Check that the model card and its page equal the card and page computed here from statement, metrics and
        student."""
        given = _json(self.bundle, "card.json")
        card = _card_of(self.bundle, given)
        expected = card_values(card)
        for section in ("model", "privacy", "evaluation", "refusals", "protects", "private_population"):
            ours, theirs = expected[section], given.get(section)
            wrong = [] if ours == theirs else [""]
            if isinstance(ours, dict) and isinstance(theirs, dict):
                # Versions differ in their fields; those that both have are compared, and always those of the claim.
                names = ((theirs.keys() | CLAIM) & ours.keys()) - {"made_by", "method_title"}
                wrong = [f".{name}" for name in sorted(names) if theirs.get(name) != ours[name]]
            self.differs += [f"card.json: {section}{name} is not what statement and metrics say" for name in wrong]
        text, is_same_text = self.bundle.public / CARD_TEXT, True
        if text.is_file():
            written = text.read_bytes().decode()
            # The licence is the owner's to choose; all other words follow from the card.
            licence = re.search(rf"^license: ({_LICENCE})$", written, re.MULTILINE)
            options = {} if licence is None else {"licence": licence[1]}
            is_same_text = written == card_text(card, has_graph=self.bundle.graph.is_file(), **options)
        if card_page(card).encode() == self.bundle.card_page.read_bytes() and given == expected and is_same_text:
            return "card and page say what statement, metrics and student say"
        versions = _json(self.bundle, VERSIONS)
        here = environment()
        if {name: versions.get(name) for name in ("fairpate", "revision")}.items() <= here.items():
            self.differs.append(
                f"card: card.json, card.html or {CARD_TEXT} is not the card of statement, metrics and student"
            )
        else:
            files = f"card.html{f', {CARD_TEXT}' if text.is_file() else ''}"
            self.not_checked.append(f"{files}, and the words of card.json, which another version wrote")
        return "the numbers of card.json are those of statement, metrics and student"


def _card_of(run: RunDirectory, given: Mapping[str, Any]) -> Card:
    """Return the card of ``run``, with the words that only ``given``, the content of its ``card.json``, has."""
    fields = {name: given["data"][name] for name in CardData.__dataclass_fields__ if name in given["data"]}
    data, use, made_on = CardData(**fields), IntendedUse(**given["use"]), given["model"].get("made_on")
    return card_of(run, method=read_statement(run).method, data=data, use=use, made_on=made_on)


def unlike_tables(given: Mapping[str, Any]) -> list[str]:
    """Return the names of the numbers in ``given``, an evaluation as JSON, that are not those of its own tables of
    counts, or that no records could have; empty if all agree.

    Undefined numbers are not compared, and intervals only with their values: both depend on single records. Tables that
    are not shown for every group leave the numbers of all groups unchecked.
    """
    measured = evaluation_of(given)
    wrong = [
        f"gaps.{name}"
        for name, gap in measured.gaps.items()
        if not math.isnan(gap.low + gap.high) and not gap.low <= gap.value <= gap.high
    ]
    compared: dict[str, tuple[Any, Any]] = {}
    answered: dict[str, Any] = {"": measured} | {f"groups.{each.name}.": each for each in measured.groups}
    for place, answers in answered.items():
        if answers.num_records:
            compared[f"{place}coverage"] = (answers.coverage, (answers.num_answered or 0) / answers.num_records)
    for group, table, predicted in zip(measured.groups, measured.confusion_GYC, measured.rates_GC, strict=True):
        # Of each group by itself: the tables of others may be hidden.
        if table is not None and group.num_answered is not None:
            one_GYC, name = np.array([table], np.float64), f"groups.{group.name}"
            compared[f"{name}.num_answered"] = (group.num_answered, round(one_GYC.sum()))
            compared[f"{name}.accuracy"] = (group.accuracy, rates.accuracies(one_GYC)[0])
            compared[f"{name}.rates"] = (predicted, rates.group_rates(one_GYC)[0].tolist())
    tables = np.array(measured.confusion_GYC, dtype=object)
    if tables.ndim == 3 and not any(each is None for each in tables.ravel()):
        joint_GYC, found = tables.astype(np.float64), with_labels(measured)
        compared |= {
            "num_answered": (measured.num_answered, round(joint_GYC.sum())),
            "accuracy": (measured.accuracy, rates.accuracies(joint_GYC)[0]),
            "ermi": (measured.ermi, rates.ermi(joint_GYC)),
            "ermi_given_label": (measured.ermi_given_label, rates.ermi_given_label(joint_GYC)),
            **{name: (getattr(measured, name), getattr(found, name)) for name in _OF_TABLES},
        }
        for name, gap in measured.gaps.items():
            # A hidden gap has no size either.
            if name in GAPS and not math.isnan(gap.value):
                worst = GAPS[name](joint_GYC)
                for each in ("value", "n_undefined", "min_cell_size"):
                    compared[f"gaps.{name}.{each}"] = (getattr(gap, each), getattr(worst, each))
    both = strict(compared).items()
    return [*wrong, *(name for name, (one, other) in both if one is not None and not alike(one, other))]


def alike(one: Any, other: Any, rel_tol: float = 1e-9) -> bool:
    """Return True if two JSON values are equal, where floats may differ by the relative difference ``rel_tol``, because
    their last digits depend on the processor."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name], rel_tol) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(*pair, rel_tol) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=rel_tol, abs_tol=1e-9)
    return bool(one == other)


def _epsilon(value: float) -> str:
    """Return an epsilon with four decimals, rounded up."""
    return epsilon_text(value, digits=4)


def _json(bundle: RunDirectory, name: str) -> Any:
    # Bundles come from others: nothing is read that could fill the memory.
    path = bundle.public / name
    if path.stat().st_size > _MOST_TEXT:
        raise ValueError(
            f"{name} is larger than {_MOST_TEXT} bytes, the limit for a JSON file; ask for a bundle where it is smaller"
        )
    return json.loads(path.read_bytes()) if name == EVENTS else read_json(path)


@contextmanager
def _unpacked(path: Path) -> Iterator[RunDirectory]:
    """Context manager: inside the ``with`` block the files of the bundle at ``path`` are in a folder, which is yielded;
    a zip file is unpacked for this time. BundleError for anything that is not a bundle."""
    if path.is_dir():
        if not (path / HEAD).is_file():
            raise BundleError(
                f"{path}: not a bundle (no {HEAD}); give the file that `fairpate bundle` wrote, or its unpacked folder."
            )
        for entry in path.iterdir():
            # A link may lead to any file of this machine, and a pipe or a device has no end.
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                raise BundleError(
                    f"{entry}: expected plain files in a bundle, got a link, pipe or device; remove this entry, or "
                    "give the bundle's zip file instead of its folder."
                )
        yield Unpacked(root=path)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as bundle:
                names, entries = bundle.namelist(), bundle.infolist()
                # Of two entries with one name, programs differ in which they extract.
                faults = {
                    f"{HEAD} missing, or two files of one name": HEAD not in names or len(set(names)) < len(names),
                    f"unknown entries {sorted(set(names) - _NAMES - {HEAD})}": set(names) - _NAMES - {HEAD},
                    # As declared: zipfile reads no more of an entry than that.
                    f"more than {_MOST_BYTES} bytes": sum(entry.file_size for entry in entries) > _MOST_BYTES,
                }
                if fault := next((words for words, is_there in faults.items() if is_there), None):
                    raise BundleError(f"{path}: not a bundle ({fault}); give the file that `fairpate bundle` wrote.")
                # Every name is known and without a folder, so none leads out of this one.
                bundle.extractall(folder)
        except FileNotFoundError:
            raise BundleError(f"{path}: no such file; give the file that `fairpate bundle` wrote.") from None
        except (OSError, zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError) as error:
            raise BundleError(f"{path}: not a bundle ({error}); give the file that `fairpate bundle` wrote.") from error
        yield Unpacked(root=Path(folder))
