"""Votes from a file: aggregator, ledger and student for a consortium whose members do not share their models.

    votes        a file: for each public record the class that every voter chose, or how many voters chose each class
    labels       Confident-GNMax with a gate, as in FairPATE (Algorithm 1)
    student      learns from the released labels, if features of the public records are known; where the noise hides
                 every single answer, from the shares of votes that a linear rule, fitted to all answers, estimates
                 (:mod:`fairpate.methods.noisy_counts`)

A row of the file is a public record: its id, its group, and either one column per voter with a class, or one column per
class with the number of voters who chose it. Other columns are features, which the configuration names. A second file
may contain test records, with true labels instead of votes.

The private units behind a vote are not visible here. The operator declares a unit (``votes.unit``) and attests that
each unit influences at most one vote of a query; then queries cost as much as queries to teachers. The statement
mentions the attestation.

Shapes: Q records, C classes, T voters, F features, N test records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from pydantic import Field

from aggregator.session import Ballot
from fairpate.config import ConfigError, Count, GateConfig, GatedAggregatorConfig, Refused, Section
from fairpate.data import Dataset, Split
from fairpate.data.dataset import sha256_of
from fairpate.data.table_files import text_of
from fairpate.data.tables import TableFaults, cells, numbers
from fairpate.lazy import torch
from fairpate.methods.base import ExpectedVotes, Trained, Training
from fairpate.methods.record_votes import labels_of_chances
from fairpate.methods.voting import NO_GATE, GnmaxMethod, ReleasedLabels, StandingVoters
from fairpate.pages import counted
from fairpate.releases.directory import RunDirectory
from fairpate.types import IntArray, MechanismParameters, Unit, UserError, VoteBatch

# 128 bits: two ids of one file share a digest with negligible probability.
_DIGEST_BYTES = 16


class VotesFileError(UserError):
    """Raised if a file of votes cannot be used; the message lists all its faults."""


GROUP, EVERYONE = "group", "everyone"


class VotesConfig(Section):
    """A file of votes, and the meaning of its columns."""

    path: Path | None = Field(None, description="File of votes: CSV, or Parquet (.parquet).")
    unit: str | None = Field(
        None,
        pattern="^[a-z][a-z ]{0,39}$",
        description="Whose presence is protected, such as `hospital`: the operator attests that each touches one vote.",
    )
    classes: tuple[str, ...] = Field((), description="All classes, in the order of their codes: public constants.")
    num_voters: Count | None = Field(
        None,
        description="For a file of counts: the number of voters on every record. null: the file has one column per "
        "voter.",
    )
    id: str = Field("record_id", description="Column with the names of the public records.")
    group: str = Field(
        GROUP, description="Column with the groups of the public records; without a gate a file may lack `group`."
    )
    features: tuple[str, ...] = Field(
        (), description="Numeric columns that the student learns from; empty: no student."
    )
    test: Path | None = Field(
        None,
        description="File of test records to evaluate the student: the same columns, and `label`; null: no evaluation.",
    )
    label: str = Field("label", description="Column with the true labels of the test records.")
    name: str | None = Field(None, description="Name of the data set in the odometer; null: the name of the file.")
    are_counts: bool = Field(False, description="Whether the columns are counts by class instead of voters.")

    refused: ClassVar[Refused] = {
        "Expected two or more classes, each named once, got {0.classes}": lambda votes: (
            votes.classes and len(set(votes.classes)) < max(2, len(votes.classes))
        ),
        "Expected features with a file of test records, which evaluates a student: name feature columns, or leave the "
        "test file out": lambda votes: votes.test is not None and not votes.features,
    }


@dataclass(frozen=True, kw_only=True)
class VotesFile:
    """A file of votes: its public records as a data set without private records, and the votes on them."""

    dataset: Dataset
    votes: VoteBatch
    num_voters: int


def read_votes_file(config: VotesConfig) -> VotesFile:
    """Read the file of votes, and the file of test records if there is one. VotesFileError lists all faults of both
    files."""
    path = config.path
    assert path is not None
    faults: list[str] = []
    table, names, groups, x = _records(path, config, config.classes if config.are_counts else (), faults)
    votes_QC, num_voters = _votes(table, config, path, faults)
    # The records are public, and so are the names of their groups.
    group_names = sorted(set(groups.tolist()))
    codes_Q: IntArray = np.searchsorted(group_names, groups).astype(np.int64)
    none = torch.zeros(0, dtype=torch.int64)
    empty = test = Split(x=x[:0], y=none, z=none, record_id=())
    if config.test is not None:
        table, test_names, test_groups, test_x = _records(config.test, config, (config.label,), faults)
        code_of, label_of = ({value: code for code, value in enumerate(of)} for of in (group_names, config.classes))
        z = np.array([code_of.get(group, -1) for group in test_groups.tolist()], dtype=np.int64)
        y = np.array([label_of.get(label, -1) for label in _text(table, config.label).tolist()], dtype=np.int64)
        of_groups = f"a group that no public record has ({', '.join(group_names)})"
        for column, wrong, what in (
            (config.id, np.isin(test_names, names), "an id of the file of votes, whose record may teach the student"),
            (config.group, (z < 0) & (test_groups != ""), of_groups),
            (config.label, y < 0, f"no label among {', '.join(config.classes)}"),
        ):
            faults += _faulty(config.test, column, wrong, what)
        test = Split(x=test_x, y=torch.from_numpy(y), z=torch.from_numpy(z), record_id=tuple(test_names.tolist()))
    # After all files were looked at: one message lists what is to be corrected.
    if faults:
        raise VotesFileError("\n".join(faults))
    record_ids = tuple(names.tolist())
    dataset = Dataset(
        name=config.name or path.stem,
        kind="tabular",
        private=empty,
        public=Split(x=x, y=torch.full((len(names),), -1), z=torch.from_numpy(codes_Q), record_id=record_ids),
        validation=empty,
        test=test,
        label_names=config.classes,
        group_names=tuple(group_names),
        sensitive_attribute=config.group,
        feature_names=config.features,
    )
    # The terms of a ledger hold this checksum: the votes of an edited file are those of another ensemble.
    votes = VoteBatch(record_ids=names.tolist(), groups_Q=codes_Q, votes_QC=votes_QC, ensemble=sha256_of(path)[:16])
    return VotesFile(dataset=dataset, votes=votes, num_voters=num_voters)


def _records(
    path: Path, config: VotesConfig, columns: Sequence[str], faults: list[str]
) -> tuple[pa.Table, npt.NDArray[np.str_], npt.NDArray[np.str_], torch.Tensor]:
    """Read one file; return its table, and the names, groups and features (Q, F) of its records.

    The file must have ``columns`` in addition to those that ``config`` names. Faults of values are added to ``faults``.
    """
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
        else:
            with csv.open_csv(path) as reader:
                header = reader.schema.names
            # All columns as text: 007 stays 007.
            kinds = csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()))
            table = csv.read_csv(path, convert_options=kinds)
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise VotesFileError(f"{path}: cannot be read ({error}); give a CSV file in UTF-8, or Parquet.") from error
    wanted = (config.id, config.group, *config.features, *columns)
    missing = [name for name in wanted if name not in (*table.column_names, GROUP)]
    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if missing or repeated or not len(table):
        what = f"no column {', '.join(missing)}" if missing else f"column {', '.join(repeated)} twice"
        what = what if missing or repeated else "no row"
        raise VotesFileError(
            f"{path}: {what}; the file has the columns {', '.join(table.column_names)}. Correct the file, or the names "
            "of columns."
        )
    names = _text(table, config.id)
    # Only a gate needs groups, and checks for them (:meth:`OwnVotes.check_data`).
    groups = _text(table, config.group) if config.group in table.column_names else np.full(len(names), EVERYONE)
    twice = np.ones(len(names), dtype=np.bool_)
    # The first row of each id repeats nothing.
    twice[np.unique(names, return_index=True)[1]] = False
    faults += _faulty(path, config.id, names == "", "no id")
    faults += _faulty(
        path, config.id, twice & (names != ""), "an id that another row has too; every record has one row"
    )
    faults += _faulty(path, config.group, groups == "", "no group")
    if not config.features:
        # A digest of each id makes the queries different.
        digests = [hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest() for name in names.tolist()]
        x = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(names), -1).astype(np.float32)
        return table, names, groups, torch.from_numpy(x)
    # A number too large for 32 bits becomes infinite, and is reported below.
    with np.errstate(over="ignore"):
        features = [_numbers(table, name).astype(np.float32) for name in config.features]
    for name, column in zip(config.features, features, strict=True):
        faults += _faulty(path, name, ~np.isfinite(column), "no finite number of 32 bits")
    return table, names, groups, torch.from_numpy(np.stack(features, axis=1))


def _votes(table: pa.Table, config: VotesConfig, path: Path, faults: list[str]) -> tuple[IntArray, int]:
    """Return the vote counts (Q, C) of a file with a column per class or per voter, and the number of voters."""
    votes_QC = np.zeros((len(table), len(config.classes)), dtype=np.int64)
    others = [name for name in table.column_names if name not in (config.id, config.group, *config.features)]
    if config.are_counts:
        assert config.num_voters is not None
        if extra := sorted(set(others) - set(config.classes)):
            raise VotesFileError(f"{path}: unknown column {', '.join(extra)}; name it as class or feature.")
        for place, name in enumerate(config.classes):
            numbers = _numbers(table, name)
            # The bound of `num_voters` too: below it no sum of a row overflows.
            whole = np.isfinite(numbers) & (numbers >= 0) & (numbers == np.floor(numbers)) & (numbers < 2**31)
            faults += _faulty(path, name, ~whole, "no whole number of votes")
            votes_QC[:, place] = np.where(whole, numbers, 0)
        wrong_Q = votes_QC.sum(axis=1) != config.num_voters
        faults += _faulty(path, ", ".join(config.classes), wrong_Q, f"votes whose sum is not {config.num_voters}")
        return votes_QC, config.num_voters
    # Each column that has no other meaning is a voter.
    if config.label in table.column_names:
        what = f"column {config.label} holds true labels; leave it out, or name another one as the label."
        raise VotesFileError(f"{path}: {what}")
    for voter in others:
        known_QC = _text(table, voter)[:, None] == np.array(config.classes)
        faults += _faulty(path, voter, ~known_QC.any(axis=1), f"no vote for one of {', '.join(config.classes)}")
        votes_QC += known_QC
    # A run that is repeated states the number of voters, so that a file with a column more is refused.
    if len(others) < 2 or config.num_voters not in (None, len(others)):
        raise VotesFileError(
            f"{path}: expected a column for each of {config.num_voters or '2 or more'} voters, found {len(others)}; "
            "name columns that are not voters as features, or give a file of counts."
        )
    return votes_QC, len(others)


def _faulty(path: Path, column: str, wrong_Q: npt.NDArray[np.bool_], what: str) -> list[str]:
    """Return a list with one message about the wrong values of ``column``: what is wrong, their number, and the first
    row; empty if no value is wrong."""
    if not wrong_Q.any():
        return []
    first, rows = int(wrong_Q.argmax()) + 1, counted(int(wrong_Q.sum()), "row has", "rows have")
    return [f"{path}: column {column}: {rows} {what} (the first is row {first}); correct the file."]


def _text(table: pa.Table, column: str) -> npt.NDArray[np.str_]:
    # pandas writes a column of whole numbers with gaps as floats: 3.0 means 3.
    return np.array(text_of(table[column]).to_pylist(), dtype=np.str_)


def _numbers(table: pa.Table, column: str) -> npt.NDArray[np.float64]:
    """Return a column of ``table`` as numbers; NaN for values that are not finite numbers."""
    return numbers(cells(table, column, "", TableFaults()))


_NO_CHECK = MechanismParameters(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=1)


class OwnAggregatorConfig(GatedAggregatorConfig):
    """Settings of the aggregator (noisy argmax of votes), by default without a threshold check and without a fairness
    gate."""

    mechanism: MechanismParameters = _NO_CHECK
    gate: GateConfig = GateConfig(max_disparity=NO_GATE.max_disparity, min_count=NO_GATE.min_count)


class OwnVotes(GnmaxMethod):
    """A method that releases labels from a file of votes, which voters cast elsewhere, and trains a student on them."""

    title: ClassVar[str] = "Votes made elsewhere"
    paper: ClassVar[str] = "Papernot et al. 2018, arXiv 1802.08908; Yaghini et al. 2023 (FairPATE), Algorithm 1"
    colour: ClassVar[int] = 6

    is_listed: ClassVar[bool] = False  # it trains nothing, and needs a file of votes
    brings_data: ClassVar[bool] = True
    lost_voters: ClassVar[str] = "file of votes is gone"
    votes_on_anything: ClassVar[bool] = False  # only on records in the file

    method: str = "own_votes"
    votes: VotesConfig = VotesConfig()
    aggregator: OwnAggregatorConfig = OwnAggregatorConfig()

    @property
    def unit(self) -> str:
        return self.votes.unit or "what the operator declares"

    def unit_of(self, dataset: Dataset) -> Unit:  # noqa: ARG002 - of the operator
        assert self.votes.unit is not None
        return self.votes.unit

    @property
    def publishes_model(self) -> bool:  # type: ignore[override]
        """True if the file of votes has features, from which a student learns."""
        return bool(self.votes.features)

    def own_dataset(self, *, to_train: bool = False) -> Dataset:
        """Return the records of the file of votes."""
        if to_train:
            self.check()
        if to_train and not self.publishes_model:
            raise ConfigError(
                "votes.features: missing, so no student can be trained; name columns of features, or release labels "
                "alone by `fairpate aggregate`."
            )
        return read_votes_file(self.votes).dataset

    @property
    def keeps_teachers(self) -> bool:  # type: ignore[override]
        """True if the file of votes exists, so that a service can submit further queries."""
        return self.votes.path is not None and self.votes.path.is_file()

    @property
    def num_voters(self) -> int:
        """The configured number of voters; 0 if none is configured."""
        return self.votes.num_voters or 0

    def check(self) -> None:
        """Raise ConfigError as the parent class does, and if the file of votes, the unit of privacy or the class
        names are missing, or neither epsilon nor noise is set."""
        super().check()
        if self.votes.path is None or self.votes.unit is None or not self.votes.classes:
            raise ConfigError("votes: path, unit or classes missing; give all three, as `fairpate aggregate` does.")
        # A standard deviation of 1 vote is the default, which gives hardly any privacy.
        if self.target.epsilon is None and self.aggregator.mechanism == _NO_CHECK:
            raise ConfigError("target.epsilon: no epsilon and no noise was chosen; give --epsilon, or --mechanism.")

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError as the parent class does, for a data set whose records are not those of the file of votes,
        and for a configured gate if the file has no groups."""
        if dataset.public.record_id != tuple(read_votes_file(self.votes).votes.record_ids):
            raise ConfigError(
                f"data.name: {self.votes.path} has votes on other records than those of {dataset.name}; give the file "
                "of the votes on this data set (votes.path)."
            )
        if self.gate != NO_GATE and dataset.group_names == (EVERYONE,):
            raise ConfigError(
                f"aggregator.gate: {self.votes.path} has no column {self.votes.group}, and a gate needs groups; name "
                "their column (--group), or leave the gate out."
            )
        super().check_data(dataset)

    @contextmanager
    def ballot(self, dataset: Dataset, queries: Split, training: Training) -> Iterator[Ballot]:  # noqa: ARG002
        """Yield the votes on ``queries``, read from the file of votes."""
        votes = read_votes_file(self.votes).votes
        row_of = {name: row for row, name in enumerate(votes.record_ids)}
        yield votes.take([row_of[name] for name in queries.record_id])

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:  # noqa: ARG002 - none is trained
        """Return the votes of the file as voters of a service, which answers further queries."""
        votes = read_votes_file(self.votes).votes
        # Nobody votes on a record that the file lacks.
        return StandingVoters(ensemble=votes.ensemble, collected=votes, ask=lambda *_: votes.counts([]))

    def voting(self, dataset: Dataset, num_records: int) -> ExpectedVotes:
        """Return an estimate of how clearly votes decide a label: on one record or, where no lead on one record stands
        out from the noise and a student can be trained, on average over all of them."""
        expected = super().voting(dataset, num_records)
        # Public numbers decide: voters, noise and queries. A student of answers that each stand out does better than a
        # line: it need not be one.
        return replace(expected, fitted_together=bool(self.votes.features) and expected.lead_of_one > 1)

    def learn(self, training: Training, labels: ReleasedLabels) -> Trained:
        """Return a student of the released answers. Where the noise hides single answers, a rule is fitted to all of
        them, and the student learns from the shares of votes that the rule estimates on every public record."""
        dataset = training.dataset
        if not self.voting(dataset, 0).fitted_together:
            return super().learn(training, labels)
        shares_MC = self.answers_to_fit(dataset, labels).shares(dataset)
        training.reporter.note("student", "no single answer stands out from the noise: a rule fitted to all teaches it")
        return self.taught(training, labels, labels_of_chances(shares_MC).of(dataset.public))

    def release(self, training: Training) -> ReleasedLabels:
        """Release labels; a remark in the run's privacy statement says that the operator attests the unit of
        privacy."""
        labels, unit = super().release(training), self.unit_of(training.dataset)
        attestation = (
            f"The votes were made elsewhere. The operator attests that each {unit} touches one vote of a query at "
            f"most; ε does not cover a {unit} that touches more."
        )
        return replace(labels, remarks=(attestation, *labels.remarks))
