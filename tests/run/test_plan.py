"""`fairpate run --dry-run`: what it says a run would spend is what the run publishes, and it touches nothing."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from each_method import METHODS, config_of, load_two_labels
from method_kinds import quick_and_slow

from aggregator.mechanism import ConfidentGnmax
from aggregator.session import queries_that_fit
from fairpate.config import SweepConfig, parse_config
from fairpate.methods.base import Method, price
from fairpate.releases.directory import read_statement
from fairpate.releases.odometer import Odometer
from fairpate.run.compare import announce_releases
from fairpate.run.forecast import forecast, question_above
from fairpate.run.sweep import Cell, cells_of
from fairpate.terminal import Reporter
from fairpate.types import UsageError

pytestmark = pytest.mark.usefixtures("light_runs")


def test_the_right_class_wins_as_often_as_in_a_simulation() -> None:
    generator = np.random.default_rng(0)
    mechanism = ConfidentGnmax(threshold=55, threshold_stddev_votes=30, noise_stddev_votes=15)
    votes_RC = generator.multinomial(100, [0.5, 0.3, 0.1, 0.1], size=10)
    class_R = np.zeros(10, dtype=np.int64)
    draws = 20_000
    right_R = ((votes_RC + generator.normal(0, 15, (draws, *votes_RC.shape))).argmax(axis=2) == 0).mean(axis=0)
    error = 4 * 0.5 / math.sqrt(draws)
    np.testing.assert_allclose(mechanism.right_probability(votes_RC, class_R), right_R, atol=error)
    for scale in (2 / 3, 3 / 2):
        assert np.abs(mechanism.scaled(scale).right_probability(votes_RC, class_R) - right_R).max() > error


def test_two_classes_are_won_as_one_gaussian_says() -> None:
    """The difference of two noises is Gaussian: P[right] = Phi(lead / (sigma sqrt 2))."""
    votes_RC, right_R = np.array([[60, 40], [50, 50], [30, 70]]), np.array([0, 0, 1])
    mechanism = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=10)
    expected = [0.5 * (1 + math.erf(lead / (10 * math.sqrt(2)) / math.sqrt(2))) for lead in (20, 0, 40)]
    np.testing.assert_allclose(mechanism.right_probability(votes_RC, right_R), expected, rtol=1e-9)


@pytest.mark.parametrize("method", quick_and_slow(METHODS))
def test_a_run_publishes_what_was_planned_or_less(method, trained, tmp_path) -> None:
    config = config_of(method, tmp_path)
    dataset = load_two_labels(config.data)
    cost, statement = config.planned_cost(dataset), read_statement(trained(method))
    if cost is None:
        assert statement.epsilon is None
    else:
        assert (cost.unit, cost.relation, cost.delta) == (statement.unit, statement.relation, statement.delta)
        assert 0 < statement.epsilon <= cost.epsilon * (1 + 1e-9)
    found = forecast(config, dataset, cost)
    assert found.epsilon == (None if cost is None else cost.epsilon)
    assert (found.votes is not None) == (type(config).voting is not Method.voting)
    if statement.queries is not None:
        assert found.labels == statement.queries.submitted


def test_the_lead_that_is_needed_survives_noise_19_times_in_20(tmp_path) -> None:
    """Of 1,000 votes for two classes a lead of that share of them, under the noise that is planned."""
    config = config_of("pate", tmp_path)
    dataset = load_two_labels(config.data)
    found = forecast(config, dataset, config.planned_cost(dataset))
    noise = found.noise_stddev_votes * 1000 / found.votes  # on the scale of 1,000 votes
    lead = round(1000 * found.lead_needed)
    mechanism = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=noise)
    kept = mechanism.right_probability(np.array([[lead, 0]]), np.zeros(1, dtype=np.int64))
    assert kept[0] == pytest.approx(0.95, abs=0.001)


def test_it_says_which_method_was_chosen_and_why(fairpate) -> None:
    chosen = {}
    for epsilon in ("0.1", "1"):
        code, output, _ = fairpate("run", "--data", "color_digits", "--epsilon", epsilon, "--dry-run", "--json")
        assert code == 0
        found = json.loads(output)
        chosen[found["method"]] = found["chosen_because"]
    assert "sums of vectors do not stand out" in chosen["record_votes"]
    assert "its sums stand out" in chosen["residual_votes"]


def test_the_command_prints_every_kind_of_voters_and_leaves_nothing(fairpate, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    code, output, _ = fairpate("run", "--data", "color_digits", "--epsilon", "1", "--dry-run", "--json")
    assert code == 0
    told = json.loads(output)
    assert (told["method"], told["data"], told["spent_already"]) == ("residual_votes", "color_digits", None)
    assert (told["cost"]["epsilon"], told["cost"]["delta"], told["cost"]["unit"]) == (1, 1e-5, "record")
    first, *others = told["forecasts"]
    assert first["method"] == "residual_votes"
    assert {each["method"] for each in others} == {"weighted_votes", "record_votes", "private_knn", "fairpate"}
    assert [each["lead_needed"] for each in others] == sorted(each["lead_needed"] for each in others)
    for each in told["forecasts"]:
        assert each["refused"] is None
        assert 0 < each["epsilon"] <= 1
        assert each["caution"] is None
    assert not list(tmp_path.iterdir())


def test_a_run_whose_voters_cannot_be_heard_asks_before_it_spends(fairpate, tmp_path, monkeypatch) -> None:
    """Of 20 networks an epsilon of 1 leaves 300 labels to noise; 300 small teachers are heard."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    words = ("run", "--data", "color_digits", "--method", "fairpate", "--epsilon", "1", "--out", str(tmp_path / "run"))
    networks = ("--set", "teachers.model=logistic", "--set", "teachers.fit.epochs=1", "--set", "ray.num_actors=0")
    code, _, errors = fairpate(*words, *networks)
    assert code == 2
    assert "Even if all 20 voters agree, the noise of" in errors
    found = re.search(r"([\d,]+) teachers, \d+ queries or an epsilon about ([\d.]+) times", " ".join(errors.split()))
    assert found is not None
    needed, factor = (float(each.replace(",", "")) for each in found.groups())
    assert needed == pytest.approx(20 * factor, rel=0.01)
    assert not (tmp_path / "run" / "private" / "release.json").exists()
    code, _, errors = fairpate(*words, *networks, "--yes")
    assert code == 0
    assert "caution" in errors


def test_what_cannot_vote_says_why_and_the_others_stand(fairpate) -> None:
    code, output, _ = fairpate("run", "--method", "fairpate", "--epsilon", "50", "--dry-run")
    assert code == 0
    assert "fairpate on color_digits would spend at most ε = " in output
    assert "weighted_votes" not in output
    code, output, errors = fairpate("run", "--method", "private_knn", "--epsilon", "50", "--dry-run")
    assert (code, output) == (2, "")
    assert "target.epsilon" in errors


def test_a_finished_run_would_spend_nothing_more(finished, fairpate) -> None:
    run, _ = finished
    code, output, _ = fairpate("run", run.config, "--dry-run")
    assert code == 0
    assert "nothing more" in output


def test_a_run_says_before_it_begins_what_it_spends_and_what_was_spent(fairpate, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    fast = ("--set", "student.fit.epochs=1", "--set", "evaluation.least_cell=1")
    fast += ("--epsilon", "1.3", "--data", "color_digits")

    def spends(*words: str) -> list[str]:
        code, _, errors = fairpate("run", "--method", "weighted_votes", *fast, *words)
        assert code == 0, errors
        return [line.removeprefix("spends").strip() for line in errors.splitlines() if line.startswith("spends")]

    most = "at most ε = 1.30 (δ = 10⁻⁵) of each record"
    assert spends("--out", "first") == [f"{most}; so far nothing"]
    assert spends("--out", "first") == []  # released already
    assert spends("--out", "of-first", "--release-of", "first") == []
    assert fairpate("ledger", "limit", "color_digits", "--epsilon", "9")[0] == 0
    (line,) = spends("--out", "second", "--set", "seed=1")
    assert line.startswith(f"{most}; so far 1 release at ε = 1.3")
    assert line.endswith(" per record, limit 9.00")
    assert spends("--out", "seeded", "--set", "noise=seeded") == []


def test_a_comparison_counts_a_shared_release_once_and_leaves_out_what_is_not_private(tmp_path, capsys) -> None:
    rejecting = {"grid": {"student.idp3": [None, {"max_disparity": 0.1, "min_count": 25}]}}
    methods = {"sgd": {}, "dp_sgd": {}, "weighted_votes": rejecting, "pate": {"data_sets": []}}
    sweep = {"data_sets": {"color_digits": {"grid": {"target.epsilon": [1, 3]}}, "loans": {}}, "methods": methods}
    sweep["settings"] = {"target.epsilon": 2}
    cells = cells_of(parse_config(sweep, SweepConfig), folder=tmp_path)

    def spends(cells: list[Cell]) -> list[str]:
        announce_releases(cells, Odometer(tmp_path), Reporter())
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("spends").strip() for line in lines if line.startswith("spends")]

    assert spends(cells) == [
        "4 releases on color_digits, of at most ε = 8.00 in sum; so far nothing",
        "2 releases on loans, of at most ε = 4.00 in sum; so far nothing",
    ]
    seeded = [replace(cell, config=cell.config.model_copy(update={"noise": "seeded"})) for cell in cells]
    assert spends(seeded) == []


def test_a_comparison_above_a_limit_asks_and_without_a_terminal_names_yes(fairpate, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "methods: [weighted_votes]\ndata_sets: [color_digits]\ngrid: {target.epsilon: [6, 7]}\n"
        "settings: {student.fit.epochs: 1}\nray: {num_cpus: 1}\n",
        encoding="utf-8",
    )
    Odometer().set_limit("color_digits", "record", epsilon=9, delta=1e-5)
    code, _, errors = fairpate("compare", sweep, "--out", "sweep")
    assert (code, "ε = 13.00 in sum (0.00 so far), above the limit of 9" in errors) == (2, True), errors
    assert "give --yes" in errors
    assert Odometer().totals(delta=1e-5) == []


@pytest.mark.parametrize(("is_own", "limit", "asks"), [(True, None, True), (False, None, False), (False, 11, True)])
def test_own_records_are_asked_for_above_ten_and_published_ones_above_their_limit(
    tmp_path: Path, is_own: bool, limit: float | None, asks: bool
) -> None:
    odometer = Odometer(tmp_path)
    if limit is not None:
        odometer.set_limit("clinic", "record", epsilon=limit, delta=1e-5)
    words = question_above("clinic", planned=12, odometer=odometer, delta=1e-5, is_own=is_own)
    assert (words is not None) == asks
    assert question_above("clinic", planned=9, odometer=odometer, delta=1e-5, is_own=is_own) is None


def test_a_terminal_is_asked_and_a_no_spends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    answers = iter([False, True])
    monkeypatch.setattr("fairpate.terminal.Confirm.ask", lambda *_, **__: next(answers))
    reporter = Reporter(quiet=True, asks=True)
    with pytest.raises(UsageError, match="Not agreed: nothing was"):
        reporter.consent("Above 10.")
    reporter.consent("Above 10.")
    Reporter(quiet=True).consent("Above 10.")  # from Python nobody is asked


def test_a_finished_run_ends_with_what_it_spent(fairpate, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    fast = ("--set", "student.fit.epochs=1", "--data", "color_digits", "--method", "weighted_votes")
    assert fairpate("run", *fast, "--epsilon", "1", "--out", "first")[0] == 0
    code, output, _ = fairpate("run", *fast, "--epsilon", "2", "--out", "second")
    assert code == 0
    last = " ".join(output.splitlines()[-1].split())
    assert last.startswith("spent ε = 2.00 of each record; so far 2 releases at ε = 2.")
    assert last.endswith("per record, no limit set")


def test_a_dry_run_says_what_is_guaranteed(fairpate) -> None:
    code, output, _ = fairpate("run", "--method", "weighted_votes", "--epsilon", "2", "--dry-run")
    assert code == 0
    words = " ".join(output.split())
    # e^2 / (1 + e^2) = 88.08 %, as in the report of such a run.
    guess = "has to guess whether one given record was among the private ones; both are equally likely."
    assert f"{guess} The guess is right at most 88.1 %" in words


def test_a_run_says_what_its_dry_run_said(fairpate) -> None:
    """The cost, what it means and which lead stands out are the same sentences before a run, in it and after it."""
    words = ("run", "--method", "weighted_votes", "--epsilon", "2", "--set", "student.fit.epochs=1", "--out", "one")
    before = " ".join(fairpate(*words, "--dry-run")[1].split())
    code, after, during = fairpate(*words)
    assert code == 0
    after, during = " ".join(after.split()), " ".join(during.split())
    cost, _, meaning = before.partition(", add or remove one. ")
    assert f"spends {cost.partition('would spend ')[2]}; so far" in during
    assert meaning.partition(".0")[0].partition("50")[0] in after
    lead = before.partition("noise: ")[2].partition(" 19 times")[0]
    assert "stands out" in lead and f"noise {lead} 19 times in 20" in during


def test_methods_say_their_family_what_they_need_and_when_to_take_them(fairpate) -> None:
    code, output, _ = fairpate("methods", "--json")
    assert code == 0
    about = {each["name"]: each for each in json.loads(output)["methods"]}
    assert (about["fairpate"]["family"], about["fairpate"]["needs"]) == ("PATE family", "teachers, pool, groups")
    assert (about["residual_votes"]["needs"], about["dp_sgd"]["needs"]) == ("nothing", "nothing")
    assert "two classes" in about["randomised_response"]["needs"]
    assert "never to publish" in about["sgd"]["take_for"]
    assert all(each["take_for"] for each in about.values())
    words = fairpate("methods", "fairpate")[1]
    assert "needs     teachers, pool, groups" in words
    assert "take for  many private records" in words


@pytest.mark.parametrize("method", ["pate", pytest.param("private_knn", marks=pytest.mark.slow)])
def test_a_share_that_is_kept_leaves_room_for_later_queries_within_the_target(tmp_path: Path, method: str) -> None:
    own = ("noise=os_entropy", "aggregator.num_queries=70")
    alone = config_of(method, tmp_path, *own)
    kept = config_of(method, tmp_path, *own, "aggregator.keep=0.3")
    dataset = load_two_labels(alone.data)
    room, noise = [], []
    for config in (alone, kept):
        plan = config.plan(dataset)
        terms = plan.terms("0" * 16)
        # The run itself asks its own 70; what is left is for a service.
        assert plan.count_fitting() == 70
        room.append(queries_that_fit(terms, 10**6))
        noise.append(float(asdict(plan.mechanism)["noise_stddev_votes"]))
        assert price(plan.worst_case(room[-1]), delta=1e-4).epsilon <= 2 * (1 + 1e-3)
    assert 70 <= room[0] < 72
    assert 100 <= room[1] < 102
    assert noise[1] == pytest.approx(noise[0] * math.sqrt(100 / 70), rel=0.05)
    assert (alone.leaves_room, kept.leaves_room) == (False, True)


def test_a_share_is_kept_of_a_target_only(fairpate) -> None:
    for words, message in (
        (
            ("--keep", "30%", "--set", "target.epsilon=null"),
            "aggregator.keep: reserves a share of target.epsilon",
        ),
        (("--keep", "lots", "--epsilon", "1"), "--keep: expected a share, got 'lots'; give one such as 30% or 0.3"),
        (("--keep", "120%", "--epsilon", "1"), "aggregator.keep: expected <= 0.9, got 1.2"),
    ):
        code, _, errors = fairpate("run", "--method", "pate", *words)
        assert (code, message in errors) == (2, True), errors


def test_settings_follow_from_the_files_in_another_folder(fairpate, tmp_path: Path) -> None:
    """The declaration lies in one folder and its files in another: the public records there are counted."""
    (tmp_path / "files").mkdir()
    rows = [f"{i},{20 + i % 60},{'FM'[i % 2]},{'yes' if i % 60 > 30 else 'no'}" for i in range(600)]
    parts = {"private": rows[:400], "public": rows[400:500], "test": rows[500:]}
    for name, part in parts.items():
        (tmp_path / "files" / f"{name}.csv").write_text("\n".join(["id,age,sex,y", *part]) + "\n", encoding="utf-8")
    (tmp_path / "clinic.yaml").write_text(
        f"name: clinic\nrows: 400\nfiles: {{{', '.join(f'{name}: {name}.csv' for name in parts)}}}\n"
        "label: {column: y, classes: ['no', 'yes']}\ngroup: {column: sex, values: [F, M]}\nidentity: {key: id}\n"
        "features: {age: {bounds: [18, 80]}}\n",
        encoding="utf-8",
    )
    named = ("--data", "clinic.yaml", "--method", "weighted_votes", "--epsilon", 1)
    code, output, errors = fairpate("run", "--dry-run", *named, "--data-dir", "files", "--json")
    assert code == 0, errors
    (found,) = json.loads(output)["forecasts"]
    assert found["labels"] == 100
    assert fairpate("run", "--dry-run", *named)[0] == 1  # next to the declaration there are none
