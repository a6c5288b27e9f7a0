"""A run that cannot beat the most common class says so before it spends, from public facts alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from fairpate.methods.base import ExpectedVotes
from fairpate.run.forecast import Majority, too_little_to_learn

pytestmark = pytest.mark.usefixtures("light_runs")

DECLARATION = """
name: clinic
files: {private: private.csv, public: public.csv, test: test.csv}
label: {column: ill, classes: [no, yes]SHARES}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100]}
rows: 600
"""


@pytest.mark.parametrize(
    ("labels", "share", "says_so"), [(300, None, True), (3000, None, False), (3000, 0.95, True), (3000, 0.8, False)]
)
def test_labels_that_stand_for_fewer_than_one_of_another_class_teach_nothing(labels, share, says_so) -> None:
    """Ten votes that agree, under noise of 100: right with probability Phi(10 / (100 sqrt 2)) = .528. Then 300 labels
    stand for 300 (2 * .528 - 1)^2 = .95 noiseless ones, 3,000 for 9.5, of which 5 % are .48 and 20 % 1.9."""
    voting = ExpectedVotes(votes=10, noise_stddev_votes=100.0, labels=labels)
    majority = None if share is None else Majority(share=share, source="the declaration")
    said = too_little_to_learn(voting, 2, majority)
    assert (said is not None) == says_so
    if said is not None:
        assert f"stand for {0.95 if labels == 300 else 9.5:g} without noise" in said
        assert ("95.0" in said) == (share is not None)


@pytest.mark.parametrize(("noise", "worth"), [(0.01, "5"), (10.0, "0.36"), (20.0, "0.061")])
def test_labels_of_many_classes_stand_for_the_square_of_their_lead_over_chance(noise, worth) -> None:
    """Right with probability 1, .340 and .200, by 400,000 draws: 5 ((p - .1) / .9)^2 noiseless labels."""
    voting = ExpectedVotes(votes=10, noise_stddev_votes=noise, labels=5)
    said = too_little_to_learn(voting, 10, Majority(share=0.99, source="the declaration"))
    assert said is not None
    assert f"stand for {worth} without noise" in said


@pytest.fixture
def clinic(tmp_path: Path):
    """One in twenty is ill."""

    def made(shares: str = "") -> Path:
        draws = random.Random(0)
        for name, count in (("private", 600), ("public", 150), ("test", 100)):
            rows = [(draws.randint(0, 100), draws.choice("FM")) for _ in range(count)]
            lines = ["age,sex" + ",ill" * (name != "public")]
            lines += [f"{age},{sex}" + f",{'yes' if age > 94 else 'no'}" * (name != "public") for age, sex in rows]
            (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = DECLARATION.replace("SHARES", f", shares: {shares}" if shares else "")
        (tmp_path / "clinic.yaml").write_text(text, encoding="utf-8")
        return tmp_path / "clinic.yaml"

    return made


def test_a_run_says_it_before_it_asks_its_teachers(clinic, fairpate, monkeypatch) -> None:
    """An epsilon of 1/10 leaves the labels of 20 teachers to noise."""
    asked = ["run", "--method", "fairpate", "--epsilon", "0.1", "--set", "teachers.num_teachers=20"]
    asked += ["--set", "teachers.model=logistic", "--set", "teachers.fit.epochs=1", "--set", "ray.num_actors=0"]
    asked += ["--data", str(clinic("[0.95, 0.05]")), "--yes"]
    code, _, said = fairpate(*asked)
    assert code == 0
    assert "95.0 % of records by the declaration" in " ".join(said.split())
    assert said.index("cannot be expected to beat the most common class") < said.index("teachers")
    code, _, said = fairpate(*asked[:4], "8", *asked[5:], "--yes")
    assert code == 0
    assert "cannot be expected" not in said


@pytest.mark.slow
def test_an_earlier_run_that_did_not_beat_it_is_named(clinic, fairpate, tmp_path) -> None:
    record = {"method": "dp_sgd", "data": "clinic", "epsilon": 2.0, "accuracy": 0.95, "majority_accuracy": 0.95}
    earlier = tmp_path / "runs" / "earlier" / "public"
    earlier.mkdir(parents=True)
    (earlier / "record.json").write_text(json.dumps(record), encoding="utf-8")
    asked = ["run", "--method", "dp_sgd", "--set", "dp_sgd.epochs=1", "--data", str(clinic()), "--yes"]
    for epsilon, says_so in (("1", True), ("4", False)):
        code, _, said = fairpate(*asked, "--epsilon", epsilon)
        assert code == 0
        assert ("an earlier run of dp_sgd, earlier, did not beat" in " ".join(said.split())) == says_so


@pytest.mark.parametrize("shares", ["[0.9]", "[0.9, 0.2]", "[1.5, -0.5]"])
def test_shares_that_are_none_are_refused(clinic, fairpate, shares) -> None:
    code, _, said = fairpate("run", "--method", "dp_sgd", "--epsilon", "1", "--data", str(clinic(shares)))
    assert code != 0
    assert "shares" in said
