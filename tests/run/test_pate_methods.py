"""The PATE family in `fairpate run`: four methods, one release, and what each does with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from each_method import weights
from small_runs import read_json

from aggregator.mechanism import ConfidentGnmax
from aggregator.session import mechanism_within
from fairpate.config import ConfigError
from fairpate.methods.base import configured
from fairpate.methods.learning import NoLabelsError
from fairpate.privacy.accountant import ConfidentGnmaxQueries, epsilon
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_labels, write_labels
from fairpate.run.folder import open_run_directory
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import REMARKS, UserError

pytestmark = pytest.mark.usefixtures("light_runs")

SMALL: dict[str, Any] = {
    "noise": "seeded",
    "target": {"epsilon": 40},
    "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
    "teachers": {"num_teachers": 20, "fit": {"epochs": 3}},
    "aggregator": {
        "num_queries": 60,
        "mechanism": {"threshold": 5, "threshold_stddev_votes": 2, "noise_stddev_votes": 1},
        "gate": {"max_disparity": 0.05, "min_count": 5},
    },
    "student": {"model": {"name": "mlp", "hidden": [16]}, "fit": {"epochs": 3}},
    "ray": {"num_actors": 0},
}
BY_VOTES = ["aggregator.budget={epsilon: 8, accept_leak: true}", "target.epsilon=null"]
COUNTS = "aggregator.release=counts"
Train = Callable[..., RunDirectory]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs by method and overrides; equal ones are made once, and all share their teachers."""
    root, made = tmp_path_factory.mktemp("pate"), dict[tuple[str, ...], RunDirectory]()

    def run(method: str, *overrides: str) -> RunDirectory:
        key = (method, *overrides)
        if key not in made:
            places = [f"out={root / str(len(made))}", f"storage={root / 'teachers'}"]
            made[key] = run_method(configured(SMALL, [*places, *overrides], method=method), Reporter(quiet=True))
        return made[key]

    return run


def run_again(run: RunDirectory) -> RunDirectory:
    _, config = open_run_directory(run.root)
    return run_method(config.model_copy(update={"out": run.root}), Reporter(quiet=True))


def test_noise_is_scaled_until_the_queries_fit_and_no_further() -> None:
    plan = ConfidentGnmax(threshold=120, threshold_stddev_votes=110, noise_stddev_votes=20)
    scaled = mechanism_within(plan, target_epsilon=3.0, target_delta=1e-5, num_queries=1000)
    assert scaled.threshold == 120
    assert scaled.threshold_stddev_votes / scaled.noise_stddev_votes == pytest.approx(5.5)

    def price(factor: float) -> float:
        event = ConfidentGnmaxQueries(
            count=1000,
            threshold=120,
            threshold_stddev_votes=factor * scaled.threshold_stddev_votes,
            noise_stddev_votes=factor * scaled.noise_stddev_votes,
        )
        return epsilon([event], target_delta=1e-5).epsilon

    assert price(1.0) <= 3.0 < price(0.99)


def test_a_gate_behind_the_aggregator_changes_no_release(train: Train) -> None:
    pate, before, inside = (read_labels(train(method).labels) for method in ("pate", "pate_s_pre", "pate_s_in"))
    assert pate.record_ids == before.record_ids == inside.record_ids
    assert pate.labels.tolist() == before.labels.tolist() == inside.labels.tolist()
    assert len(read_labels(train("fairpate").labels).labels) < len(pate.labels)


def test_a_record_counts_the_labels_that_were_released_also_by_group(train: Train) -> None:
    run = train("fairpate")
    record, labels = read_json(run.record), read_labels(run.labels)
    assert record["answered"] == len(labels.labels) == sum(record["answered_by_group"])
    assert record["answered_by_group"] == [int((labels.groups == group).sum()) for group in (0, 1)]


def test_without_their_parity_the_fair_methods_are_pate(train: Train) -> None:
    plain = weights(train("pate"))
    assert weights(train("pate_s_in", "pate_s_in.weight=0")) == plain
    for method in ("fairpate", "pate_s_pre"):
        assert weights(train(method, "aggregator.gate={max_disparity: .inf, min_count: 5}")) == plain
        assert weights(train(method)) != plain
    assert weights(train("pate_s_in")) != plain


def test_the_filter_keeps_what_the_gate_accepts(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: with a margin of 0 after five answers per group, only labels that close a gap go on."""
    seen: dict[str, Any] = {}

    def spy(method: Any, training: Any, labelled: Any, **options: Any) -> Any:
        seen["labels"] = labelled
        return options["initial_model"].eval()

    monkeypatch.setattr("fairpate.methods.voting.fit_student", spy)
    run = train("pate_s_pre", "aggregator.gate={max_disparity: 0.0, min_count: 5}", "seed=0")
    released, kept = read_labels(run.labels), seen["labels"]
    counts = [[0] * 10, [0] * 10]
    expected = []
    for record, group, label in zip(
        released.record_ids, released.groups.tolist(), released.labels.tolist(), strict=True
    ):
        own, other = counts[group], counts[1 - group]
        if sum(own) >= 5 and sum(other) and (own[label] + 1) / (sum(own) + 1) - other[label] / sum(other) >= 0:
            continue
        own[label] += 1
        expected.append(record)
    assert list(kept.record_ids) == expected


def test_the_operators_record_holds_the_price_of_the_votes(train: Train) -> None:
    run = train("fairpate")
    public, private = read_json(run.record), read_json(run.private_record)
    assert not public["epsilon_is_data_dependent"]
    assert private["epsilon_is_data_dependent"]
    assert public["epsilon"] == read_json(run.statement)["epsilon"] <= 40
    assert private["epsilon"] == read_json(run.costs)["epsilon_data_dependent"] < public["epsilon"]
    assert {**public, "epsilon": 0, "epsilon_is_data_dependent": 0} == {
        **private,
        "epsilon": 0,
        "epsilon_is_data_dependent": 0,
    }


def test_a_budget_of_votes_stops_early_and_is_published_at_its_full_price(train: Train) -> None:
    run = train("pate", *BY_VOTES)
    statement = read_json(run.statement)
    assert 0 < read_json(run.private_record)["epsilon"] <= 8
    assert read_json(run.record)["epsilon"] == statement["epsilon"] > 0
    (event,) = statement["events"]
    assert 0 < event["count"] < 60
    assert event["noise_stddev_votes"] == 1


def test_a_stop_that_depends_on_votes_is_remarked_with_its_price(train: Train) -> None:
    leaking, kept = train("pate", *BY_VOTES), train("fairpate")
    assert read_json(leaking.statement)["remarks"] == [REMARKS["stopped_by_votes"]]
    assert read_json(kept.statement)["remarks"] == []
    page, card = (path.read_text(encoding="utf-8") for path in write_card(leaking.root))
    assert REMARKS["stopped_by_votes"] in page
    assert REMARKS["stopped_by_votes"] in json.loads(card)["limits"]


@pytest.mark.parametrize(
    ("method", "overrides", "named"),
    [
        ("fairpate", (), "aggregator.mechanism.threshold: 1000.0, aggregator.gate.max_disparity: 0.05: "),
        ("pate", ("data.embedding={}", "teachers.model.name=ridge"), "aggregator.mechanism.threshold: 1000.0: "),
    ],
)
def test_a_run_whose_labels_are_all_refused_names_what_refused_them(
    method: str, overrides: tuple[str, ...], named: str, train: Train, tmp_path: Path
) -> None:
    """Also where a rule is fitted to what small teachers answered: the message is for the user, no fault of ours."""
    with pytest.raises(NoLabelsError, match=f"^{re.escape(named)}every label was refused.*stays charged") as refused:
        train(method, f"out={tmp_path / 'run'}", "aggregator.mechanism.threshold=1000", *overrides)
    assert isinstance(refused.value, UserError)


@pytest.mark.parametrize("method", ["pate", "pate_s_pre"])
def test_counts_come_with_the_same_labels_at_the_same_price_and_teach_another_student(
    train: Train, method: str
) -> None:
    labels, counts = train(method), train(method, COUNTS)
    plain, rich = read_labels(labels.labels), read_labels(counts.labels)
    assert rich.record_ids == plain.record_ids
    assert rich.labels.tolist() == plain.labels.tolist()
    assert plain.counts is None
    assert rich.counts is not None
    assert rich.counts.shape == (len(rich.labels), 10)
    assert read_json(counts.statement)["epsilon"] == read_json(labels.statement)["epsilon"]
    # No price depends on votes: the operator's is the one that is published.
    assert read_json(counts.private_record)["epsilon"] == read_json(counts.record)["epsilon"]
    assert read_json(labels.private_record)["epsilon"] < read_json(labels.record)["epsilon"]
    assert weights(counts) != weights(labels)
    assert "noisy counts released with every label" in counts.public_report.read_text(encoding="utf-8")


def test_a_repeated_run_with_counts_releases_nothing_anew(train: Train) -> None:
    run = train("pate", COUNTS, "aggregator.admission={rounds: 2}", "aggregator.num_queries=30")
    before = {path.name: path.read_bytes() for path in run.public.iterdir()}
    learned = weights(run)
    run.student.unlink()
    again = run_again(run)
    assert again.labels.read_bytes() == before["labels.parquet"]
    assert weights(again) == learned


def test_a_released_count_that_the_ledger_does_not_hold_is_noticed(train: Train) -> None:
    run = train("pate", COUNTS, "seed=5")
    released = read_labels(run.labels)
    assert released.counts is not None
    write_labels(replace(released, counts=released.counts + 1), run.labels)
    with pytest.raises(RunDirectoryError, match=r"ledger.sqlite: this ledger lacks .* labels"):
        run_again(run)


def test_without_a_target_the_noise_is_as_configured(train: Train) -> None:
    """The same votes, so that only the noise and the student's first weights differ."""
    run = train("fairpate", "target.epsilon=null")
    (event,) = read_json(run.statement)["events"]
    assert (event["threshold_stddev_votes"], event["noise_stddev_votes"], event["count"]) == (2, 1, 60)
    planned = ConfidentGnmaxQueries(count=60, threshold=5, threshold_stddev_votes=2, noise_stddev_votes=1)
    assert read_json(run.statement)["epsilon"] == epsilon([planned], target_delta=1e-5).epsilon > 40
    (scaled,) = read_json(train("fairpate").statement)["events"]
    assert scaled["noise_stddev_votes"] > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["target.relation=replace one"], r"target\.relation: pate does not read it"),
        (["aggregator.gate.min_count=1"], r"aggregator\.gate\.min_count: pate does not read it"),
        (["aggregator.budget={epsilon: 3}"], r"aggregator\.budget: target\.epsilon is the budget already; leave one"),
        (["target.epsilon=null", "aggregator.budget={accept_leak: true}"], "expected epsilon or max_queries"),
        (["target.epsilon=null", "aggregator.budget={max_queries: 3, accept_leak: true}"], "expected epsilon with acc"),
        ([*BY_VOTES, COUNTS], "aggregator: expected no budget.accept_leak with release: counts, got true"),
        (["aggregator.release=all"], r"aggregator\.release: expected 'label' or 'counts', got 'all'\."),
        (["target.epsilon=1.0e-9"], "raise target_epsilon"),
        (["target.epsilon=0"], r"target\.epsilon: .*expected > 0"),
    ],
)
def test_a_target_that_votes_cannot_keep_is_refused(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        run_method(configured(SMALL, [f"out={tmp_path / 'run'}", *settings], method="pate"), Reporter(quiet=True))
    assert not (tmp_path / "run").exists()
