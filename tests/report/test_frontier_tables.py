"""The tables of the frontier's page: how configurations are ranked, and who is missing from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_records import run_record

from fairpate.fairness.rates import NAMES
from fairpate.report.frontier import baselines, dominance, points_of
from fairpate.report.frontier_page import baseline_words, choices, left_out_words

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")


@pytest.fixture
def shown():
    """(caption, methods in the order of each setting) of the table that is made of some runs."""

    def make(*runs):
        points = points_of(list(runs))
        words = " ".join(filter(None, (baseline_words(baselines(points)), left_out_words(points))))
        ranked = choices(points).values()
        return words.replace("\u00a0", " "), [[point.series for point in found] for found in ranked]

    return make


def test_epsilons_that_promise_the_same_are_ranked_by_accuracy(shown):
    runs = [
        run_record("pate", epsilon=0.99946),
        run_record("dp_sgd", epsilon=0.99998, accuracy=0.86),
        run_record("dp_fermi", epsilon=0.5),
    ]
    _, (_, private, _) = shown(*runs)
    assert private == ["dp_fermi", "dp_sgd", "pate"]


def test_accuracies_stand_beside_their_baselines_and_degenerate_predictors_are_named_and_in_no_setting(shown):
    constant = {"accuracy": 0.75, "majority_accuracy": 0.75, "degenerate": ("predicts 'no' for every record",)}
    caption, (fair, private, accurate) = shown(
        run_record("dp_sgd", accuracy=0.80, disparity=0.1, majority_accuracy=0.75),
        run_record("pate", epsilon=0.2, disparity=0.0, **constant),
    )
    assert caption == "Accuracy to compare with: always the most common class: 75.0 %. Left out: pate (degenerate)."
    assert fair == private == accurate == ["dp_sgd"]
    (point,) = points_of([run_record("pate", seed=s, disparity=0.0, **constant) for s in (0, 1)])
    assert point.remarks == ("Degenerate: predicts 'no' for every record, in 2 of 2 runs.",)


def test_groups_that_a_constant_would_serve_better_are_counted_by_seeds():
    levelled = {"underserved_groups": ("men", "women")}
    runs = [run_record(seed=0, **levelled), run_record(seed=1, underserved_groups=("men",)), run_record(seed=2)]
    (point,) = points_of(runs)
    assert point.remarks == ("Served worse than by a constant: men (in 2 of 3 runs), women (in 1 of 3 runs).",)
    (alone,) = points_of([run_record(**levelled, unmeasured_groups=("children",))])
    left_out = "In no gap for lack of answered test records: children."
    assert alone.remarks == ("Served worse than by a constant: men, women.", left_out)


def test_a_gap_that_leaves_out_a_group_beats_none_that_has_it(shown):
    """Without the children any gap is smaller; where no model measures them, gaps among the others are compared."""
    lacking = {"unmeasured_groups": ("children",), "fairness": notions(0.0)}
    short, whole = run_record("pate", disparity=0.0, **lacking), run_record("dp_sgd", accuracy=0.79)
    caption, (fair, _, _) = shown(short, whole)
    assert fair == ["dp_sgd"]
    assert "pate (" in caption
    point, other = points_of([short, whole])
    assert (point.num_undefined, other.num_undefined) == (1, 0)
    assert math.isnan(point.seen_by("equalized_odds").value("disparity"))
    assert point.seen_by("false_negative_rate").value("disparity") == 0
    assert dominance([point, other]) == {}
    _, (fair, _, _) = shown(short, replace(whole, unmeasured_groups=("children",)))
    assert fair == ["pate", "dp_sgd"]


def notions(value):
    return {name: {"value": value, "low": value, "high": value} for name in NAMES}


def test_who_is_in_no_setting_is_named_with_the_threshold(shown):
    caption, ranked = shown(
        run_record("sgd", epsilon=math.inf, accuracy=0.98),
        run_record("dp_sgd", accuracy=0.90),
        run_record("dp_fermi", accuracy=0.76),
        run_record("fairpate", accuracy=0.70),
        run_record("pate_s_pre", accuracy=0.74),
        run_record("pate_s_in", coverage=0.5),
    )
    assert caption == (
        "Accuracy to compare with: best without privacy: 98.0 % (sgd). "
        "Left out: fairpate, pate_s_pre (accuracy below 75.0 %); pate_s_in (coverage below 60.0 %)."
    )
    assert all(set(setting) == {"sgd", "dp_sgd", "dp_fermi"} for setting in ranked)
    assert shown(run_record("pate"))[0] == ""
