"""SF-PATE on a small file in Adult's layout: one sex changes one teacher, and what is published does not tell it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fairpate.config import DataConfig, apply_override
from fairpate.data import Dataset, Split, load_data
from fairpate.methods.base import Training
from fairpate.methods.base import configured as load_configured
from fairpate.methods.sf_pate import SfPate, attribute_questions
from fairpate.methods.voting import choose_queries
from fairpate.nn.models import build_model
from fairpate.releases.directory import RunDirectory, read_labels
from fairpate.run.folder import as_trained, create_run_directory
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import VoteBatch
from teachers.work import BlockPool

pytestmark = pytest.mark.usefixtures("light_runs")

QUIET = Reporter(quiet=True)
NUM_ROWS, NUM_TEACHERS = 60, 4
SEXES = ("Male", "Female")


def rows_of_adult(count: int) -> list[list[str]]:
    """Persons of few ages, hours and incomes: several are equal but for their sex and their survey weight."""
    draw = random.Random(0)
    return [
        [
            *(str(draw.choice(range(20, 60, 4))), "Private", str(draw.randrange(10_000, 99_999)), "HS-grad", "9"),
            *("Divorced", "Sales", "Unmarried", "White", draw.choice(SEXES), "0", "0", str(draw.choice((20, 40)))),
            *("Japan", draw.choice(("<=50K", ">50K"))),
        ]
        for _ in range(count)
    ]


def with_other_sex(row: list[str]) -> list[str]:
    return [*row[:9], SEXES[1 - SEXES.index(row[9])], *row[10:]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("fairpate.data.dataset.check_sha256", lambda *_: None)
    (tmp_path / "data" / "adult").mkdir(parents=True)
    write(tmp_path / "data" / "adult" / "adult.test", rows_of_adult(20))
    return tmp_path / "data"


def write(path: Path, rows: list[list[str]]) -> None:
    path.write_text("".join(", ".join(row) + "\n" for row in rows), encoding="utf-8")


def load(folder: Path, rows: list[list[str]]) -> Dataset:
    write(folder / "adult" / "adult.data", rows)
    return load_data(DataConfig(name="adult", data_dir=folder, num_public=12, num_validation=8))


def configured(folder: Path, out: Path, *overrides: str) -> SfPate:
    settings = [
        "method=sf_pate",
        "target.epsilon=20",
        f"data={{name: adult, data_dir: {folder}, num_public: 12, num_validation: 8}}",
        "student={model: {name: logistic}, fit: {epochs: 1}}",
        f"teachers={{num_teachers: {NUM_TEACHERS}, model: {{name: logistic}}, block_size: 1}}",
        "teachers.fit={epochs: 5, batch_size: 4, learning_rate: 0.1}",
        "f_ld={warmup_epochs: 1, epochs: 6, batch_size: 64, learning_rate: 1.0, dual_step: 5.0}",
        "training.optimizer=sgd",
        "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}",
        "ray.num_actors=0",
        f"out={out}",
    ]
    values: dict[str, Any] = {}  # as in a file, which may hold what a variant leaves unread
    for setting in settings:
        apply_override(values, setting)
    config = load_configured(values, overrides)
    assert isinstance(config, SfPate)
    return config


def training(dataset: Dataset, config: SfPate) -> Training:
    model = build_model(config.student_training.model, input_shape=(1,), num_classes=2, generator_seed=0)
    return Training(dataset=dataset, model=model, run=create_run_directory(config), reporter=QUIET, seed=config.seed)


def votes_on_attributes(dataset: Dataset, config: SfPate) -> tuple[npt.NDArray[np.int64], list[str]]:
    """SF_S: votes, and what names each teacher by its shard and training."""
    asked, given = attribute_questions(dataset), training(dataset, config)
    batch = config.collect_votes(asked, choose_queries(asked, config.queries), given.run.teachers, QUIET)
    ensemble = config.train_teachers(asked, given.run.teachers, BlockPool())
    return batch.votes_QC, [Path(block.checkpoint).name for block in ensemble.blocks]


def votes_on_labels(dataset: Dataset, config: SfPate) -> tuple[npt.NDArray[np.int64], list[str]]:
    """SF_T: votes, and what each teacher voted."""
    teachers = []
    with pytest.MonkeyPatch.context() as patch:
        fair_vote = SfPate._fair_vote

        def witnessed(*arguments: object, **options: object) -> object:
            votes = fair_vote(*arguments, **options)  # type: ignore[arg-type]
            teachers.append(str(votes.tolist()))
            return votes

        patch.setattr(SfPate, "_fair_vote", witnessed)
        given = training(dataset, config)
        batch = config.collect_votes(dataset, dataset.public, given.run.teachers, QUIET)
    return batch.votes_QC, teachers


@pytest.mark.parametrize(("variant", "ask"), [("sf_s", votes_on_attributes), ("sf_t", votes_on_labels)])
def test_one_changed_attribute_changes_one_teacher_and_moves_counts_by_one(
    variant: str,
    ask: Callable[[Dataset, SfPate], tuple[npt.NDArray[np.int64], list[str]]],
    folder: Path,
    tmp_path: Path,
) -> None:
    rows = rows_of_adult(NUM_ROWS)
    before = load(folder, rows)
    assert len(before.private) - len(set(before.private.unit_id)) > 5
    votes_QC, teachers = ask(before, configured(folder, tmp_path / "before", f"sf_pate.variant={variant}"))
    changed_counts = 0
    for place in range(0, NUM_ROWS, 8):
        after = load(folder, [*rows[:place], with_other_sex(rows[place]), *rows[place + 1 :]])
        other_QC, others = ask(after, configured(folder, tmp_path / f"after-{place}", f"sf_pate.variant={variant}"))
        assert sum(mine != theirs for mine, theirs in zip(teachers, others, strict=True)) <= 1
        assert np.abs(other_QC - votes_QC).max() <= 1
        changed_counts += int((other_QC != votes_QC).any())
    assert changed_counts > 1


def knowing_teachers(config: SfPate, dataset: Dataset, queries: Split, *_: object) -> VoteBatch:
    """A thousand of them, so that no label is overturned or refused."""
    votes_QC = config.teachers.num_teachers * np.eye(dataset.num_classes, dtype=np.int64)[queries.y.numpy()]
    return VoteBatch(record_ids=queries.record_id, groups_Q=queries.z.numpy(), votes_QC=votes_QC, ensemble="known")


def test_whoever_hashes_both_candidates_learns_no_sex_from_published_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker knows all but one sex and the run's secret, and lets the run itself name the record under both."""
    monkeypatch.setattr("fairpate.run.folder.secrets.token_hex", lambda size: "5a" * size)
    monkeypatch.setattr(SfPate, "collect_votes", knowing_teachers)
    monkeypatch.setattr(SfPate, "check_data", lambda *_: None)  # as many as records are enough for others
    rows = rows_of_adult(NUM_ROWS)

    def published(out: Path) -> tuple[tuple[str, ...], str]:
        monkeypatch.setenv("FAIRPATE_STATE", f"{out}-state")  # neither release came before the other
        run = run_method(configured(folder, out, "teachers.num_teachers=1000"), QUIET)
        return read_labels(run.labels).record_ids, run.statement.read_text(encoding="utf-8")

    def named(candidates: list[list[str]]) -> set[str]:
        run = RunDirectory(root=tmp_path / "attacker")
        return set(as_trained(run, configured(folder, run.root), load(folder, candidates)).private.record_id)

    load(folder, rows)
    names, statement = published(tmp_path / "run")
    assert len(names) >= 10
    assert set(names) <= named(rows)
    recovered = set()
    for place, row in itertools.islice(enumerate(rows), 0, None, 6):
        guesses = [named([*rows[:place], guess, *rows[place + 1 :]]) for guess in (row, with_other_sex(row))]
        recovered |= {name for name in names if (name in guesses[0]) != (name in guesses[1])}
    assert recovered == set()
    load(folder, [with_other_sex(row) for row in rows])
    assert published(tmp_path / "others") == (names, statement)
