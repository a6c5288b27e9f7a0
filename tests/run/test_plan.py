"""Plans: the target is kept and not undershot, and forecasts are those of a simulation."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from aggregator.mechanism import ConfidentGnmax
from fairpate import cli
from fairpate.privacy import accountant
from fairpate.privacy.events import ConfidentGnmaxQueries, ConfidentGnmaxVotes
from fairpate.run.context import write_votes
from fairpate.run.plan import (
    Plan,
    Profile,
    Proposal,
    assumed_profile,
    describe,
    plans,
    profile_of_votes,
    proposal_json,
    propose,
)
from fairpate.types import VoteBatch

TARGET = {"epsilon": 2.0, "delta": 1e-5}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return assumed_profile(num_teachers=100, num_classes=4, agreement=0.6, spread=0.2)


def test_an_assumed_profile_has_the_moments_that_were_assumed(profile: Profile) -> None:
    share_R = profile.votes_RC[:, 0] / 100
    assert (profile.votes_RC.sum(axis=1) == 100).all()
    assert np.ptp(profile.votes_RC[:, 1:], axis=1).max() <= 1
    assert share_R.mean() == pytest.approx(0.6, abs=0.005)
    assert share_R.std() == pytest.approx(0.2, abs=0.01)
    constant = assumed_profile(num_teachers=10, num_classes=3, agreement=0.5, spread=0.0, num_rows=2)
    assert constant.votes_RC.tolist() == [[5, 3, 2]] * 2
    for agreement, spread in ((0.0, 0.1), (1.0, 0.0), (0.5, 0.5), (math.nan, 0.1)):
        with pytest.raises(ValueError, match="agreement"):
            assumed_profile(num_teachers=10, num_classes=3, agreement=agreement, spread=spread)


def test_forecasts_are_those_of_a_simulation(profile: Profile) -> None:
    mechanism = ConfidentGnmax(threshold=55, threshold_stddev_votes=30, noise_stddev_votes=15)
    votes_RC, class_R = profile.votes_RC[::10], profile.right_R[::10]
    generator = np.random.default_rng(0)
    draws = 20_000
    votes_DRC = votes_RC + generator.normal(0, 15, (draws, *votes_RC.shape))
    right_R = (votes_DRC.argmax(axis=2) == 0).mean(axis=0)
    largest_DR = votes_RC.max(axis=1) + generator.normal(0, 30, (draws, len(right_R)))
    answered_R = (largest_DR >= 55).mean(axis=0)
    error = 4 * 0.5 / math.sqrt(draws)
    np.testing.assert_allclose(mechanism.right_probability(votes_RC, class_R), right_R, atol=error)
    # Whole-numbered noise passes a threshold as continuous noise passes one half a vote lower.
    half_a_vote = 0.5 / 30 * 0.4
    np.testing.assert_allclose(mechanism.answer_probability(votes_RC), answered_R, atol=error + half_a_vote)
    for scale in (2 / 3, 3 / 2):
        assert np.abs(mechanism.scaled(scale).right_probability(votes_RC, class_R) - right_R).max() > error


def test_two_classes_are_won_as_one_gaussian_says() -> None:
    """The difference of two noises is Gaussian: P[right] = Phi(lead / (sigma sqrt 2))."""
    votes_RC, right_R = np.array([[60, 40], [50, 50], [30, 70]]), np.array([0, 0, 1])
    mechanism = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=10)
    expected = [0.5 * (1 + math.erf(lead / (10 * math.sqrt(2)) / math.sqrt(2))) for lead in (20, 0, 40)]
    np.testing.assert_allclose(mechanism.right_probability(votes_RC, right_R), expected, rtol=1e-9)


def check_price(plan: Plan, profile: Profile) -> None:
    queries = ConfidentGnmaxQueries(count=plan.num_queries, **vars(plan.mechanism))
    assert plan.epsilon == accountant.epsilon([queries], target_delta=1e-5).epsilon
    repeated = np.repeat(profile.votes_RC, plan.num_queries // len(profile.votes_RC), axis=0)
    votes = ConfidentGnmaxVotes(votes_QC=repeated, **vars(plan.mechanism))
    of_votes = accountant.epsilon_data_dependent([votes], target_delta=1e-5).epsilon
    assert plan.epsilon_data_dependent == pytest.approx(of_votes, rel=1e-9)
    assert plan.epsilon_data_dependent <= plan.epsilon


def test_data_independent_plans_use_the_target_up(profile: Profile) -> None:
    found = plans([profile], query_counts=[100, 300], price="data_independent", **TARGET)
    assert sorted(plan.num_queries for plan in found) == [100, 300]
    assert [plan.worth for plan in found] == sorted((plan.worth for plan in found), reverse=True)
    for plan in found:
        assert 2 * 0.995 < plan.epsilon <= 2
        check_price(plan, profile)
        advantage = (plan.right - 1 / 4) / (3 / 4)
        assert plan.worth == pytest.approx(plan.num_queries * plan.answered * advantage**2)


def test_data_dependent_plans_keep_the_target_by_the_votes_alone() -> None:
    sure = assumed_profile(num_teachers=300, num_classes=4, agreement=0.9, spread=0.05)
    (plan,) = plans([sure], query_counts=[1000], price="data_dependent", **TARGET)
    assert plan.epsilon_data_dependent <= 2 < plan.epsilon
    check_price(plan, sure)
    unsure = assumed_profile(num_teachers=5, num_classes=4, agreement=0.3, spread=0.05)
    assert plans([unsure], query_counts=[1000], price="data_dependent", **TARGET) == []


def test_what_noise_leaves_unchanged_is_the_class_with_most_votes_right_or_not() -> None:
    """Of two rows one has most votes for the wrong class: noise keeps its winner with Phi(40 / (sigma sqrt 2))."""
    half_right = Profile(votes_RC=np.array([[70, 30], [30, 70]]), right_R=np.zeros(2, dtype=np.int64))
    (plan,) = plans([half_right], query_counts=[100], price="data_independent", **TARGET)
    sigma = plan.mechanism.noise_stddev_votes
    assert plan.winner_kept == pytest.approx(math.erf(40 / (2 * sigma)) / 2 + 1 / 2)
    assert plan.right == pytest.approx(1 / 2)


def text(proposal: Proposal) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(describe(proposal))
    return captured.get()


def test_real_votes_are_called_private_and_assumed_ones_are_not(profile: Profile) -> None:
    assumed = propose([profile], query_counts=[100], assumption="assumed", **TARGET)
    assert not assumed.from_votes
    assert "nothing here costs privacy" in text(assumed)
    real = propose([profile_of_votes(profile.votes_RC)], query_counts=[100], assumption="real", **TARGET)
    assert real.from_votes
    assert "Operator only" in text(real)
    assert "costs privacy" in text(real)
    for said in (text(assumed), text(real)):
        assert "winner kept" in said
        assert " right " not in said
        assert "It is no accuracy" in said
    values = proposal_json(real)
    assert values["from_private_votes"] is True
    assert values["right"] == "as most teachers chose"
    assert set(values["for_any_votes"][0]) == set(Plan.__dataclass_fields__)


def test_the_command_plans_from_assumptions_and_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Profile
) -> None:
    def fairpate(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fairpate", "plan", "--data", "color_digits", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    monkeypatch.setattr("fairpate.run.plan.VOTERS", {"fairpate": "models"})  # all: test_candidates.py
    code, output, _ = fairpate("--epsilon", "2", "--teachers", "100", "--queries", "100", "--queries", "9999", "--json")
    assert code == 0
    assert [plan["num_queries"] for plan in json.loads(output)["for_any_votes"]] == [100]
    batch = VoteBatch(
        record_ids=tuple(map(str, range(100))),
        groups_Q=np.zeros(100, dtype=np.int64),
        votes_QC=profile.votes_RC,
        ensemble="ensemble",
    )
    (tmp_path / "private").mkdir()
    write_votes(batch, tmp_path / "private" / "votes.parquet")
    (tmp_path / "config.yaml").write_text("data: {name: color_digits}\n")
    code, output, _ = fairpate("--epsilon", "2", "--queries", "100", "--votes", str(tmp_path))
    assert code == 0
    assert "Operator only" in output
    for arguments, words in (
        (["--epsilon", "2", "--queries", "9999"], ["--queries", "9999", "lower it"]),
        (["--epsilon", "2", "--votes", str(tmp_path / "nowhere")], ["nowhere", "no votes"]),
        (
            ["--epsilon", "2", "--votes", str(tmp_path), "--teachers", "50", "--agreement", "0.75", "--spread", "0.2"],
            ["--teachers, --agreement, --spread", "--votes"],
        ),
        (["--epsilon", "0"], ["epsilon", "expected > 0"]),
        (["--epsilon", "2", "--agreement", "1.5"], ["agreement", "1.5"]),
    ):
        code, output, errors = fairpate(*arguments)
        assert (code, output) == (2, "")
        assert all(word in errors for word in words), errors
    (tmp_path / "config.yaml").write_text("data: {name: color_mnist}\n")
    code, output, errors = fairpate("--epsilon", "2", "--votes", str(tmp_path))
    assert (code, output) == (2, "")
    assert "is a run on color_mnist, not on color_digits; give --data color_mnist" in errors
