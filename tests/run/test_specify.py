"""`fairpate specify` on small tables, through the command line."""

from __future__ import annotations

import json
import os

import pytest

from fairpate.report.frontier import Row, points_of
from fairpate.run.sweep import write_rows
from fairpate.types import REMARKS, RunRecord

pytestmark = pytest.mark.usefixtures("light_runs")


def row(
    method,
    data,
    seed,
    *,
    epsilon=1.0,
    disparity=0.04,
    accuracy=0.8,
    relation="add or remove one",
    settings=None,
    **changes,
):
    config = {
        "method": method,
        "data": {"name": data},
        "target": {"epsilon": epsilon},
        "seed": seed,
        **(settings or {}),
    }
    identity = {"method": method, "data": data, "seed": seed, "config": config}
    fields = {
        "unit": "record",
        "relation": relation,
        "delta": 1e-5,
        "epsilon": epsilon,
        "epsilon_is_data_dependent": False,
        "accuracy": accuracy,
        "coverage": 1.0,
        "disparity": disparity,
    }
    return Row(
        digest=f"{method}-{data}-{seed}-{epsilon}",
        command=f"fairpate run --method {method} --data {data} --epsilon {epsilon} --seed {seed}",
        minutes=1.0,
        record=RunRecord(**identity, **(fields | changes)),
        **identity,
    )


@pytest.fixture
def tables(tmp_path):
    """Two tables: (faces, others)."""
    faces = [
        row("fairpate", "fairface", 0, accuracy=0.80),
        row("fairpate", "fairface", 1, accuracy=0.84, disparity=0.06),
        row("fairpate", "fairface", 0, epsilon=8.0, accuracy=0.90),
        row("dp_sgd", "fairface", 0, accuracy=0.85, disparity=0.20),
        row("pf_ld", "fairface", 0, accuracy=0.70, relation="replace one"),
    ]
    others = [
        row("fairpate", "utkface", 0, accuracy=0.70, delta=1e-6),
        row("fairpate", "utkface", 0, epsilon=8.0, accuracy=0.75, delta=1e-6),
        row("pate_s_pre", "utkface", 0, accuracy=0.73, delta=1e-6),
    ]
    for name, rows in (("faces", faces), ("others", others)):
        write_rows(rows, tmp_path / f"{name}.parquet")
    return tmp_path / "faces.parquet", tmp_path / "others.parquet"


@pytest.fixture
def specify(fairpate):
    """Run `fairpate specify`: (exit code, output, errors)."""
    return lambda *arguments: fairpate("specify", *arguments)


def answers(output):
    return {answer["relation"]: answer for answer in json.loads(output)["answers"]}


def test_what_is_achievable_is_answered_per_class_with_mean_and_spread(specify, tables):
    code, output, _ = specify("--epsilon", 3, "--disparity", 0.05, "--coverage", 0.9, "--frontier", tables[0], "--json")
    assert code == 0
    (met,) = answers(output)["add or remove one"]["met"]
    assert met["method"] == "fairpate"
    assert met["accuracy"] == pytest.approx(0.82)
    assert met["spread"]["accuracy"] == pytest.approx(0.04 / 2**0.5)
    assert met["seeds_met"] == 1
    assert met["settings"]["target.epsilon"] == 1.0
    assert met["commands"][0] == "fairpate run --method fairpate --data fairface --epsilon 1.0 --seed 0"
    assert answers(output)["replace one"]["met"][0]["method"] == "pf_ld"


CONSTANT = {"accuracy": 0.9, "disparity": 0.0, "degenerate": ("predicts 'no' for every record",)}


def test_a_degenerate_predictor_is_named_and_recommended_before_none(specify, tmp_path):
    rows = [
        row("dp_sgd", "adult", 0, accuracy=0.8, majority_accuracy=0.76),
        row("pate", "adult", 0, majority_accuracy=0.76, **CONSTANT),
        row("sgd", "adult", 0, epsilon=float("inf"), accuracy=0.85, disparity=0.2),
    ]
    write_rows(rows, tmp_path / "results.parquet")
    asked = ("--disparity", 0.05, "--epsilon", 3, "--frontier", tmp_path / "results.parquet")
    code, output, _ = specify(*asked)
    words = " ".join(output.split())
    assert code == 0
    compared = "always the most common class: 76.0 %; best without privacy: 85.0 % (sgd)."
    assert f"Accuracy to compare with: {compared}" in words
    assert "achievable by 2 of 3 configurations. Behind all others, as degenerate" in words
    assert "¹ Degenerate: predicts 'no' for every record." in words
    assert "repeat the first: fairpate run --method dp_sgd" in words
    (answer,) = json.loads(specify(*asked, "--json")[1])["answers"]
    assert [offer["degenerate"] for offer in answer["met"]] == [[], ["Degenerate: predicts 'no' for every record."]]
    assert answer["num_degenerate"] == 1
    assert answer["baselines"] == {"majority": 0.76, "unprotected": 0.85, "unprotected_method": "sgd"}
    write_rows(rows[1:2], tmp_path / "results.parquet")
    alone = " ".join(specify(*asked)[1].split())
    assert "But all of them are degenerate in at least one seed: none is recommended." in alone
    assert "repeat the first" not in alone


def test_a_demand_that_is_met_by_serving_a_group_worse_than_a_constant_says_so(specify, tmp_path):
    levelled = {"underserved_groups": ("men",)}
    write_rows([row("pate", "adult", 0, **levelled), row("pate", "adult", 1)], tmp_path / "results.parquet")
    asked = ("--disparity", 0.05, "--frontier", tmp_path / "results.parquet")
    words = " ".join(specify(*asked)[1].split())
    assert "¹ Served worse than by a constant: men (in 1 of 2 runs)." in words
    ((met,),) = (answer["met"] for answer in json.loads(specify(*asked, "--json")[1])["answers"])
    assert (met["underserved_groups"], met["unmeasured_groups"]) == ({"men": 1}, {})


def test_a_limit_on_groups_is_not_met_where_one_was_not_measured(specify, tmp_path):
    lacking = {"unmeasured_groups": ("children",)}
    write_rows([row("pate", "adult", 0, **lacking), row("pate", "adult", 1)], tmp_path / "results.parquet")
    table = ("--frontier", tmp_path / "results.parquet", "--json")
    for asked, met in (
        (("--disparity", 0.05), []),
        (("--fairness", "equalized_odds=1"), []),
        (("--epsilon", 100), [1]),
    ):
        (answer,) = json.loads(specify(*asked, *table)[1])["answers"]
        assert (len(answer["met"]), answer["num_undefined"]) == (len(met), 1 - len(met))


def test_what_is_not_achievable_gets_the_nearest_with_its_distance(specify, tables):
    code, output, _ = specify("--epsilon", 4, "--accuracy", 0.9, "--frontier", tables[0], "--json")
    assert code == 0
    found = answers(output)["add or remove one"]
    assert not found["achievable"]
    # dp_sgd lacks .05 of .9, fairpate at 1 lacks .08 of .9, at 8 it is twice as dear.
    assert [near["method"] for near in found["nearest"]] == ["dp_sgd", "fairpate", "fairpate"]
    assert [near["distance"] for near in found["nearest"]] == pytest.approx([0.05 / 0.9, 0.08 / 0.9, 1.0])
    assert "relative excess" in json.loads(output)["distance"]


def test_the_words_name_method_spread_and_command(specify, tables):
    code, output, _ = specify("--epsilon", 3, "--disparity", 0.05, "--frontier", tables[0])
    assert code == 0
    for words in ("per record, replace one", "82.0", "± 2.8", "1 of 2", "run --method fairpate", "costs privacy"):
        assert words in output
    code, output, _ = specify("--epsilon", 0.5, "--frontier", tables[0])
    assert "not achievable" in output
    assert "1.00" in output


def odds(value):
    return {"equalized_odds": {"value": value, "low": value, "high": value}}


def test_fair_at_demands_the_whole_interval_of_every_seed_as_a_report_does(specify, tmp_path):
    def fairness(low, high, fair_from=0.01):
        return {"equalized_odds": {"value": 0.05, "low": low, "high": high, "fair_from": fair_from}}

    rows = [
        row("fairpate", "adult", 0, accuracy=0.80, fairness=fairness(0.01, 0.09)),
        row("fairpate", "adult", 1, accuracy=0.80, fairness=fairness(0.01, 0.1)),
        row("dp_sgd", "adult", 0, accuracy=0.85, fairness=fairness(0.01, 0.09)),
        row("dp_sgd", "adult", 1, accuracy=0.85, fairness=fairness(0.01, 0.11)),
        row("pf_ld", "adult", 0, accuracy=0.84, fairness=fairness(0.01, 0.09, fair_from=0.2)),  # too few records
        row("pate", "adult", 0, accuracy=0.86, fairness=odds(0.05)),  # of an earlier version
    ]
    write_rows(rows, tmp_path / "rows.parquet")
    table = ("--frontier", tmp_path / "rows.parquet")
    code, output, _ = specify("--fair-at", "equalized_odds=0.1", *table, "--json")
    assert code == 0
    (answer,) = json.loads(output)["answers"]
    assert [(met["method"], met["seeds_met"]) for met in answer["met"]] == [("fairpate", 2)]
    assert answer["num_undefined"] == 1
    # A limit on the gap itself is met by all of them.
    _, output, _ = specify("--fairness", "equalized_odds=0.1", *table, "--json")
    assert len(json.loads(output)["answers"][0]["met"]) == 4
    _, output, _ = specify("--fair-at", "equalized_odds=0.05", *table)
    words = " ".join(output.split())
    assert "fair: equalized-odds gap <= 0.05 with the whole interval of every seed" in words
    assert "the first misses whole interval of what is called fair by 100.0 %" in words


def test_a_demand_names_any_notion(specify, tmp_path):
    """Of three configurations one keeps both; the fourth is of an earlier version, which recorded parity alone."""
    rows = [
        row("fairpate", "adult", 0, disparity=0.02, accuracy=0.80, fairness=odds(0.05)),
        row("fairpate", "adult", 1, disparity=0.02, accuracy=0.80, fairness=odds(0.15)),
        row("dp_sgd", "adult", 0, disparity=0.02, accuracy=0.85, fairness=odds(0.30)),
        row("pf_ld", "adult", 0, disparity=0.30, accuracy=0.84, fairness=odds(0.04)),
        row("pate", "adult", 0, disparity=0.01, accuracy=0.86),
    ]
    write_rows(rows, tmp_path / "rows.parquet")
    table = ("--frontier", tmp_path / "rows.parquet")
    both = ("--fairness", "equalized_odds=0.1", "--disparity", 0.05)
    code, output, _ = specify(*both, *table, "--json")
    assert code == 0
    (answer,) = json.loads(output)["answers"]
    (met,) = answer["met"]
    assert (met["method"], met["seeds_met"], answer["num_undefined"]) == ("fairpate", 1, 1)
    assert met["fairness"]["equalized_odds"] == pytest.approx({"mean": 0.10, "spread": 0.1 / 2**0.5})
    assert met["fairness"]["accuracy_parity"] == {"mean": None, "spread": None}
    _, output, _ = specify(*both, *table)
    words = " ".join(output.split())
    assert "asked: demographic-parity gap <= 0.05, equalized-odds gap <= 0.1" in words
    assert "0.100 ± 0.071" in words
    # With a demand on odds alone the nearest are those that nothing beats in odds, whatever their parity.
    _, output, _ = specify("--fairness", "equalized_odds=0.01", *table, "--json")
    (answer,) = json.loads(output)["answers"]
    assert [offer["method"] for offer in answer["nearest"]] == ["pf_ld", "dp_sgd"]
    assert answer["nearest"][0]["missed"] == pytest.approx({"equalized_odds": 3.0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("equalised_odds=.1",),
            "fairness: no notion of fairness is called 'equalised_odds'; did you mean equalized_odds?",
        ),
        (("equalized_odds",), "fairness: expected equalized_odds=LIMIT, got"),
        (("equalized_odds=1.5",), "fairness: equalized_odds: expected a limit between 0 and 1, got 1.5"),
        (("equalized_odds=nan",), "expected a limit between 0 and 1, got nan"),
        (("equalized_odds=.1", "equalized_odds=.2"), "fairness: equalized_odds is limited twice"),
    ],
)
def test_a_limit_that_is_wrong_is_refused(specify, tables, given, message):
    limits = [word for each in given for word in ("--fairness", each)]
    code, _, errors = specify(*limits, "--frontier", tables[0])
    assert code == 2
    assert message in " ".join(errors.split())


def test_a_limit_on_errors_is_met_by_guarantees_of_every_seed_alone(specify, tmp_path):
    """Accuracy is no guarantee, nor is a bound that one of two seeds has, or one of less confidence."""
    sure, table = {"max_error": 0.05, "max_error_confidence": 0.95}, tmp_path / "rows.parquet"
    undefined = {"disparity": None, "coverage": 0.6}
    rows = [row("dp_sgd", "adult", seed, accuracy=0.97, **sure, **undefined) for seed in (0, 1)]
    rows += [row("sgd", "adult", 0, accuracy=0.999), row("pate", "adult", 0, **sure), row("pate", "adult", 1)]
    rows += [row("fairpate", "adult", 0, **sure | {"max_error_confidence": 0.9})]
    write_rows(rows, table)
    for limit, met in ((0.05, 1), (0.1, 1), (0.04, 0)):
        code, output, _ = specify("--max-error", limit, "--epsilon", 3, "--frontier", table, "--json")
        assert code == 0
        (answer,) = json.loads(output)["answers"]
        assert [each["method"] for each in answer["met"]] == ["dp_sgd"] * met
        assert answer["num_undefined"] == 3
    # A gap that nobody asked for does not hide the nearest.
    (nearest,) = answer["nearest"]
    assert nearest["missed"] == {"max_error": pytest.approx(0.25)}
    _, output, _ = specify("--max-error", 0.05, "--frontier", table)
    words = " ".join(output.split())
    assert "asked: wrong answers in every group <= 0.05" in words
    assert "Of the answers in every group at most 5 % are wrong, with probability 95 % in each run." in words


def test_a_demand_that_is_missed_by_a_hair_is_not_missed_by_nothing(specify, tmp_path):
    write_rows([row("fairpate", "adult", 0, disparity=0.05001)], tmp_path / "rows.parquet")
    _, output, _ = specify("--epsilon", 0.5, "--disparity", 0.05, "--frontier", tmp_path / "rows.parquet")
    assert "misses epsilon by 100.0 %, demographic-parity gap by less than 0.1 %" in " ".join(output.split())


def test_the_newest_comparison_is_taken_where_none_is_given(specify, tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, (name, table) in enumerate(zip(("new", "old"), tables, strict=True)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        table = table.rename(tmp_path / "runs" / name / "results.parquet")
        os.utime(table, (1e9 - age, 1e9 - age))
    code, output, _ = specify("--epsilon", 3)
    assert code == 0
    assert output.splitlines()[0] == "frontier: runs/new/results.parquet"
    assert "fairface" in output
    _, output, _ = specify("--epsilon", 3, "--json")
    assert json.loads(output)["frontier"] == "runs/new/results.parquet"


def test_an_offer_says_what_qualifies_its_epsilon(specify, tmp_path):
    rows = [
        row("dp_sgd", "adult", 0, settings={"noise": "seeded"}),
        row("fairpate", "adult", 0, settings={"aggregator": {"budget": {"accept_leak": True}}}),
        row("dp_fermi", "adult", 0, settings={"noise": "os_entropy"}),
    ]
    moved = [row("dp_sgd", "bank", 0, settings={"noise": "seeded"})]
    for name, found in (("rows", rows), ("moved", moved)):
        write_rows(found, tmp_path / f"{name}.parquet")
    asked = ("--epsilon", 3, "--frontier", tmp_path / "rows.parquet")
    _, output, _ = specify(*asked, "--json")
    offers = {offer["method"]: offer for offer in answers(output)["add or remove one"]["met"]}
    assert {name: offer["noise_from_seed"] for name, offer in offers.items()} == {
        "dp_sgd": True,
        "fairpate": False,
        "dp_fermi": False,
    }
    assert {name: offer["remarks"] for name, offer in offers.items()} == {
        "dp_sgd": [],
        "fairpate": [REMARKS["stopped_by_votes"]],
        "dp_fermi": [],
    }
    _, output, _ = specify(*asked, "--transfer", tmp_path / "moved.parquet")
    words = " ".join(output.split())
    for text in ("dp_sgd ¹ ", "fairpate ² ", "dp_fermi 1.00", "¹ noise from a seed: reproducible, not private"):
        assert text in words
    assert f"² {REMARKS['stopped_by_votes']}" in words
    assert (
        "chosen: dp_sgd, epsilon 1.00, demographic-parity gap 0.040, accuracy 80.0 %, coverage 100 %; noise from a seed"
        in words
    )


def test_the_longest_name_fits_in_80_columns(specify, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    noise = {"noise": "seeded"}
    rows = [
        row("randomised_response", "adult", s, accuracy=0.8 + s / 100, coverage=0.9, settings=noise) for s in (0, 1)
    ]
    write_rows(rows, tmp_path / "rows.parquet")
    for epsilon, kept in ((3, "2 of 2"), (0.5, "1.00")):
        _, output, _ = specify("--epsilon", epsilon, "--frontier", tmp_path / "rows.parquet")
        line = next(line for line in output.splitlines() if line.startswith("randomised_response ¹"))
        assert " ".join(line.split()) == f"randomised_response ¹ 1.00 0.040 ± 0.000 80.5 ± 0.7 90.0 {kept}"


def test_a_choice_is_transferred_with_its_regret(specify, tables):
    limits = ("--epsilon", 3, "--disparity", 0.05)
    code, output, _ = specify(*limits, "--frontier", tables[0], "--transfer", tables[1], "--json")
    assert code == 0
    (moved,) = json.loads(output)["transfers"]
    assert (moved["source"]["data"], moved["target"]["data"]) == ("fairface", "utkface")
    assert (moved["chosen"]["method"], moved["its_own"]["method"]) == ("fairpate", "pate_s_pre")
    assert moved["regret_accuracy"] == pytest.approx(0.03)
    assert 0 <= moved["frontier"]["regret_hypervolume"] < 1
    _, output, _ = specify(*limits, "--frontier", tables[0], "--transfer", tables[1])
    assert "3.0 points of accuracy" in output
    assert "10⁻⁶" in output


def test_prices_that_depend_on_votes_are_not_offered(specify, tmp_path):
    rows = [row("fairpate", "adult", 0), row("fairpate", "adult", 1, epsilon=0.1, epsilon_is_data_dependent=True)]
    write_rows(rows, tmp_path / "private.parquet", private=True)
    _, output, _ = specify("--epsilon", 3, "--frontier", tmp_path / "private.parquet", "--json")
    (answer,) = json.loads(output)["answers"]
    assert [offer["epsilon"] for offer in answer["met"]] == [1.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", 3], ["--frontier", "runs/*/results.parquet", "fairpate compare"]),
        (["--frontier", "FACES"], ["no limit was given", "--epsilon"]),
        (["--epsilon", 3, "--frontier", "missing.parquet"], ["missing.parquet", "fairpate compare"]),
        (["--epsilon", -1, "--frontier", "FACES"], ["epsilon", "-1"]),
        (["--coverage", 90, "--frontier", "FACES"], ["coverage", "90"]),
        (["--max-error", 0.05, "--frontier", "FACES"], ["--max-error", "student.reject.max_error: 0.05"]),
        (["--epsilon", 3, "--data", "adult", "--frontier", "FACES"], ["adult", "fairface"]),
        (["--epsilon", 3, "--frontier", "FACES", "--transfer", "FACES"], ["--transfer", "no other data set"]),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_to_give(specify, tables, monkeypatch, arguments, words):
    monkeypatch.chdir(tables[0].parent)
    code, output, errors = specify(*[tables[0] if value == "FACES" else value for value in arguments])
    assert code == 2
    assert output == ""
    for word in words:
        assert word in errors


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "fairpate run --method fairpate --data 'my data' --set noise=seeded --set 'teachers.model.hidden=[8, 8]'",
            "fairpate run --method fairpate --data 'my data' --set 'teachers.model.hidden=[8, 8]'",
        ),
        ("fairpate run --method dp_sgd --set seed=1 --set noise=seeded", "fairpate run --method dp_sgd --set seed=1"),
        ("fairpate run --method sgd --set seed=1", "fairpate run --method sgd --set seed=1"),
        ("fairpate train dp_sgd --set dp_sgd.noise=seeded", "fairpate train dp_sgd --set dp_sgd.noise=seeded"),
        ("make results", "make results"),
    ],
)
def test_the_command_to_repeat_has_fresh_noise(command, expected):
    record = row("fairpate", "fairface", 0).record
    assert points_of([record], commands=[command])[0].commands == (expected,)
