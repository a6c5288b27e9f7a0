"""One table of teachers' votes: how far a person moves it, what it costs, and what a student learns from it."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.methods.base import Training, configured, price
from fairpate.methods.teacher_votes import TeacherVotes, two_moves
from fairpate.privacy.mechanism_events import event_json
from fairpate.privacy.second_accountant import recomputed_epsilon
from fairpate.releases.directory import RunDirectory
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

NUM_QUERIES, NUM_TEACHERS = 40, 7
QUIET = Reporter(quiet=True)


def records(first: int, count: int, *, persons: bool = False) -> Split:
    draws = np.random.default_rng(first)
    x = draws.normal(size=(count, 3)).astype(np.float32)
    return Split(
        x=torch.from_numpy(x),
        y=torch.from_numpy((x[:, 0] > 0).astype(np.int64)),
        z=torch.from_numpy(draws.integers(0, 2, count)),
        record_id=[f"record {first + row}" for row in range(count)],
        person_id=[f"person {(first + row) // 3}" for row in range(count)] if persons else (),
    )


def without(split: Split, person: str) -> Split:
    return split.take([row for row, name in enumerate(split.person_id) if name != person])


def dataset(private: Split, **settings: Any) -> Dataset:
    none = private.take(range(0))
    words = {"label_names": ("no", "yes"), "group_names": ("a", "b"), "sensitive_attribute": "group"}
    public = records(10_000, NUM_QUERIES + 5)
    return Dataset(
        name="made", kind="tabular", private=private, public=public, validation=none, test=none, **words, **settings
    )


def method(**target: Any) -> TeacherVotes:
    values = {
        "target": {"epsilon": 1.0} | target,
        "teachers": {"num_teachers": NUM_TEACHERS, "model": "logistic", "fit": {"epochs": 3, "learning_rate": 0.1}},
        "teacher_votes": {"num_queries": NUM_QUERIES},
        "student": {"model": "logistic", "fit": {"epochs": 3}},
        "ray": {"num_actors": 0},
    }
    config = configured(values, method="teacher_votes")
    assert isinstance(config, TeacherVotes)
    return config


def exact(config: TeacherVotes, data: Dataset, folder: Path) -> Any:
    """The table without noise, as a noisy sum would get it."""
    found: list[Any] = []

    def keep(exact_RW: Any, **_: Any) -> Any:
        found.append(exact_RW)
        return exact_RW

    run = RunDirectory(root=folder)
    training = Training(dataset=data, model=torch.nn.Identity(), run=run, reporter=QUIET, seed=0, noisy_sum=keep)
    config.measure(training)
    return found[0]


def test_a_person_moves_the_table_by_no_more_than_its_norm_allows(tmp_path: Path) -> None:
    config, everybody = method(), records(0, 90, persons=True)
    whole = exact(config, dataset(everybody), tmp_path / "all")
    assert whole.shape == (NUM_QUERIES, 2)
    assert (whole.sum(axis=1) == NUM_TEACHERS).all()
    moved = []
    for number in range(10):
        less = exact(config, dataset(without(everybody, f"person {number}")), tmp_path / str(number))
        # One shard, whose vote on a query goes from one class to the other or stays.
        assert set(np.abs(whole - less).sum(axis=1).tolist()) <= {0, 2}
        moved.append(np.linalg.norm(whole - less))
    assert 0 < max(moved) <= two_moves(NUM_QUERIES)


def test_shards_without_a_record_vote_and_nobody_votes_where_records_are_elsewhere(tmp_path: Path) -> None:
    """A first record may change the vote of its own shard, and must not bring the votes of all others."""
    config, nobody = method(), records(0, 0)
    alone = exact(config, dataset(nobody, shared_unit="record"), tmp_path / "none")
    assert (alone.sum(axis=1) == NUM_TEACHERS).all()
    one = exact(config, dataset(records(0, 1), shared_unit="record"), tmp_path / "one")
    assert np.linalg.norm(one - alone) <= two_moves(NUM_QUERIES)
    elsewhere = exact(config, dataset(nobody, shared_unit="record", is_elsewhere=True), tmp_path / "elsewhere")
    assert not elsewhere.any()


@pytest.mark.parametrize("num_queries", [1, 2, 40, 50, 999, 10**6])
def test_the_norm_is_rounded_up_and_exact_where_it_can_be(num_queries: int) -> None:
    assert Fraction(two_moves(num_queries)) ** 2 >= 2 * num_queries
    assert Fraction(math.nextafter(two_moves(num_queries), 0)) ** 2 < 2 * num_queries
    assert two_moves(50) == 10


def test_both_accountants_price_the_table_within_the_target() -> None:
    for epsilon in (0.1, 1.0, 3.0):
        event = method(epsilon=epsilon).sum_event("person", norm=two_moves(NUM_QUERIES), scale=1)
        stated = price([event], delta=1e-5).epsilon
        assert 0.99 * epsilon < stated <= epsilon
        assert recomputed_epsilon([event_json(event)], delta=1e-5) == pytest.approx(stated, rel=2e-3)
        # Half of the queries are half of the squared sensitivity: the same noise would cost less.
        half = method(epsilon=epsilon).sum_event("record", norm=two_moves(NUM_QUERIES // 2), scale=1)
        assert half.noise_stddev_votes == pytest.approx(event.noise_stddev_votes / math.sqrt(2), rel=0.05)


def test_a_student_learns_what_clear_counts_say_whatever_the_number_of_voters(tmp_path: Path) -> None:
    config, data = method(epsilon=15.0), dataset(records(0, 60))
    truth_Q = (data.public.x[:NUM_QUERIES, 0] > 0).long().numpy()
    for voters in (100, 1000):

        def said(exact_RW: Any, voters: int = voters, **_: Any) -> Any:
            return voters * np.eye(2, dtype=np.int64)[truth_Q]

        run = RunDirectory(root=tmp_path / str(voters))
        model = torch.nn.Linear(3, 2)
        training = Training(dataset=data, model=model, run=run, reporter=QUIET, seed=0, noisy_sum=said)
        trained = config.learn(training, config.measure(training))
        assert trained.num_training_labels == round(config.teacher_votes.taught_share * NUM_QUERIES)


def test_replacing_a_person_moves_two_shards_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.relation"):
        method(relation="replace one").check()
