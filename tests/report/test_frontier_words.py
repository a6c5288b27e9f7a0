"""Sentences about a comparison, beside means and standard errors that were computed by hand.

Every configuration has four seeds, two of them r above and two r below their mean: a sample's standard deviation of
2 r / sqrt(3), hence a standard error of r / sqrt(3). A pair (a, b) here stands for the mean (a + b) / 2 and the
standard error |a - b| / 2.
"""

from __future__ import annotations

import math

import pytest
from run_records import run_record

from fairpate.report.frontier import points_of
from fairpate.report.frontier_page import dominated, findings, is_beyond

CONSTANT = ("predicts 'no' for every record",)


def of_seeds(pair):
    """Four values with the mean and the standard error that ``pair`` stands for; one alone is of one seed."""
    if len(pair) == 1:
        return pair
    if None in pair:
        return pair * 2
    mean, reach = sum(pair) / 2, math.sqrt(3) * (pair[1] - pair[0]) / 2
    return (mean - reach, mean - reach, mean + reach, mean + reach)


def configuration(method, accuracy, disparity, *, epsilon=1.0, seeds=of_seeds, **more):
    """Runs of one configuration: a seed for each value of ``seeds``."""
    pairs = zip(seeds(accuracy), seeds(disparity), strict=True)
    config = {"target": {"epsilon": epsilon}, "gap": disparity[0]}
    return [
        run_record(method, seed=seed, accuracy=right, disparity=gap, epsilon=epsilon, config=config, **more)
        for seed, (right, gap) in enumerate(pairs)
    ]


def said(*configurations, notion="demographic_parity"):
    """Sentences of each budget as one text, and what was left out."""
    found = findings(points_of([run for runs in configurations for run in runs], notion=notion))
    texts = [" ".join(budget.sentences).replace("\u00a0", " ") for budget in found.budgets]
    return texts, list(found.left_out)


def test_one_method_is_ahead_in_everything():
    # Means .85 and .80, standard errors .005 each: .05 apart, the error of the difference is .0071.
    (text,), left_out = said(
        configuration("fair_dp_sgd", (0.845, 0.855), (0.006, 0.008)),
        configuration("pate", (0.795, 0.805), (0.10, 0.12)),
    )
    assert text == (
        "fair_dp_sgd is the most accurate: 85.0 %. fair_dp_sgd is the only method with a demographic-parity gap below "
        ".01 (.007 at 85.0 %). fair_dp_sgd dominates pate."
    )
    assert left_out == []


def test_within_one_standard_error_nobody_is_ahead_and_nobody_dominates():
    # .850 and .845 differ by .005; each standard error is .005, that of the difference .0071. Gaps are equal.
    (text,), _ = said(
        configuration("dp_sgd", (0.845, 0.855), (0.03, 0.03)),
        configuration("pate", (0.840, 0.850), (0.03, 0.03)),
        configuration("sf_pate", (0.60, 0.60), (0.03, 0.03)),
    )
    assert text == (
        "dp_sgd (85.0 %) and pate (84.5 %) are the most accurate, within one standard error. "
        "Every method has a demographic-parity gap below .05; the smallest is dp_sgd’s, .03 at 85.0 %. "
        "dp_sgd dominates sf_pate. pate dominates sf_pate."
    )


def test_all_level():
    (text,), _ = said(
        configuration("dp_sgd", (0.84, 0.86), (0.04, 0.04)), configuration("pate", (0.83, 0.85), (0.03, 0.03))
    )
    assert text.startswith("In accuracy all are level, within one standard error: dp_sgd has 85.0 %.")
    assert text.endswith("No method dominates another.")


@pytest.mark.parametrize(("second_gap", "only"), [((0.011, 0.013), True), ((0.008, 0.014), False)])
def test_only_is_said_beyond_a_standard_error(second_gap, only):
    """Means .012 with an error of .001 or of .003: the second may be below .01, so the first is not the only one."""
    (text,), _ = said(
        configuration("fairpate", (0.78, 0.78), (0.002, 0.004), coverage=0.61),
        configuration("dp_sgd", (0.85, 0.85), second_gap),
    )
    words = "is the only method with" if only else "has"
    assert f"fairpate {words} a demographic-parity gap below .01 (.003 at 78.0 % of the 61.0 % answered)." in text
    assert "No method dominates another." in text


def test_a_gap_that_is_printed_as_the_limit_is_not_below_it():
    (text,), _ = said(
        configuration("fairpate", (0.78, 0.78), (0.0495, 0.0497)), configuration("dp_sgd", (0.78, 0.78), (0.29, 0.31))
    )
    assert "fairpate is the only method with a demographic-parity gap below .1 (.05 at 78.0 %)" in text


def test_a_trade_of_coverage_is_no_dominance():
    (text,), _ = said(
        configuration("fairpate", (0.9, 0.9), (0.001, 0.001), coverage=0.5),
        configuration("dp_sgd", (0.8, 0.8), (0.1, 0.1)),
    )
    assert text.endswith("No method dominates another.")


def test_one_seed_is_no_ground_for_better():
    (text,), _ = said(configuration("dp_sgd", (0.9,), (0.01,)), configuration("pate", (0.7,), (0.2,)))
    assert text == (
        "The highest mean accuracy is dp_sgd’s, 90.0 %. The smallest mean demographic-parity gap is dp_sgd’s, .01 at "
        "90.0 %. Some have one seed alone, so no method is called better than another."
    )
    mixed = [*configuration("dp_sgd", (0.9,), (0.01,)), *configuration("pate", (0.7, 0.71), (0.2, 0.2))]
    assert "dominates" not in said(mixed)[0][0]


def test_two_seeds_are_no_ground_for_better_either():
    (text,), _ = said(
        configuration("dp_sgd", (0.90, 0.91), (0.01, 0.011), seeds=tuple), configuration("pate", (0.7, 0.7), (0.2, 0.2))
    )
    assert text.endswith("Some have two seeds alone, so no method is called better than another.")
    assert "most accurate" not in text


def test_a_spread_of_zero_was_not_measured():
    """Five equal seeds each: .8001 is no better than .8000, nor .01 than .2."""
    better = configuration("dp_sgd", (0.8001,), (0.01,), seeds=lambda value: value * 5)
    worse = configuration("pate", (0.8,), (0.2,), seeds=lambda value: value * 5)
    (text,), _ = said(better, worse)
    assert text == (
        "In accuracy all are level, within what 5 seeds can tell: dp_sgd has 80.0 %. dp_sgd has a demographic-parity "
        "gap below .02 (.01 at 80.0 %). No method dominates another."
    )
    (one,), (other,) = points_of(better), points_of(worse)
    assert not is_beyond(one, other, "error")
    assert not dominated([other], [one], (1.0,))
    (measured,) = points_of(configuration("pate", (0.79, 0.81), (0.1, 0.3)))
    assert is_beyond(one, measured, "disparity"), "a spread of either will do"


def test_degenerate_models_win_nothing_and_are_counted():
    (text,), left_out = said(
        configuration("pate", (0.99, 0.99), (0.0, 0.0), degenerate=CONSTANT),
        configuration("dp_sgd", (0.8, 0.82), (0.1, 0.12)),
    )
    assert text == (
        "dp_sgd is the only method: its highest accuracy is 81.0 %, its smallest demographic-parity gap .11 at 81.0 %."
    )
    assert left_out == ["1 configuration of pate: degenerate"]
    nobody = said(configuration("pate", (0.99, 0.99), (0.0, 0.0), degenerate=CONSTANT))
    assert nobody == ([], ["1 configuration of pate: degenerate"])


def test_groups_that_no_gap_compares_are_named():
    runs = configuration("pate", (0.8, 0.8), (0.1, 0.1), unmeasured_groups=("children",))
    words = "Not known for children: too few answered test records in some seed, so no gap."
    assert findings(points_of(runs)).unsaid == (words,)


def test_configurations_that_serve_a_group_worse_than_a_constant_are_named_beside_the_sentences():
    runs = [
        *configuration("pate", (0.8, 0.82), (0.0, 0.0), underserved_groups=("men",)),
        *configuration("dp_sgd", (0.8, 0.82), (0.1, 0.12)),
    ]
    words = "1 configuration of pate with a group that is served worse than by a constant in some seed: men."
    assert findings(points_of(runs)).unsaid == (words,)
    assert findings(points_of(runs[4:])).unsaid == ()


def test_a_budget_holds_all_that_costs_no_more_and_the_middle_one_comes_first():
    texts, _ = said(
        *(
            configuration("dp_sgd", (a - 0.001, a + 0.001), (0.1, 0.1), epsilon=e)
            for e, a in ((0.3, 0.7), (1.0, 0.8), (3.0, 0.75))
        ),
        configuration("weighted_votes", (0.79, 0.79), (0.1, 0.1), epsilon=0.3),
    )
    assert [text.partition(".")[0] for text in texts] == [
        "dp_sgd is the most accurate: 80",  # within 1
        "weighted_votes is the most accurate: 79",  # within .3
        "dp_sgd is the most accurate: 80",  # within 3 still what costs 1
    ]
    assert texts[1].endswith("weighted_votes dominates dp_sgd.")
    assert texts[0].endswith("No method dominates another.")  # 80 % at 1 is dominated by nothing


def test_a_cheaper_level_dominates_an_equal_result():
    levels = (0.3, 1.0)
    (cheap,) = points_of(configuration("weighted_votes", (0.8, 0.8), (0.1, 0.1), epsilon=0.3))
    (dear,) = points_of(configuration("dp_sgd", (0.8, 0.8), (0.1, 0.1), epsilon=1.0))
    assert dominated([dear], [cheap], levels)
    assert not dominated([cheap], [dear], levels)
    assert not dominated([cheap], [cheap], levels)  # a tie


def test_a_difference_of_exactly_one_standard_error_is_not_beyond_it():
    # Errors .003 and .004 make .005 of the difference.
    (one,) = points_of(configuration("dp_sgd", (0.847, 0.853), (0.1, 0.1)))
    (level,) = points_of(configuration("pate", (0.841, 0.849), (0.1, 0.1)))
    (beyond,) = points_of(configuration("pate", (0.840, 0.848), (0.1, 0.1)))
    assert not is_beyond(one, level, "error")
    assert is_beyond(one, beyond, "error")
    assert not is_beyond(level, one, "error")


def test_what_no_sentence_is_about_is_counted_with_its_reason():
    texts, left_out = said(
        configuration("dp_sgd", (0.8, 0.8), (0.1, 0.1)),
        configuration("sgd", (0.9, 0.9), (0.1, 0.1), epsilon=math.inf),
        configuration("pate", (0.8, 0.8), (0.1, 0.1), coverage=math.nan),
        configuration("fairpate", (0.8, 0.8), (None, None)),
        configuration("fairpate", (0.8, 0.8), (0.1, 0.1), epsilon=0.4, epsilon_is_data_dependent=True),
    )
    assert len(texts) == 1
    assert left_out == [
        "1 configuration of sgd: no finite ε",
        "1 configuration of pate: coverage undefined",
        "1 configuration of fairpate: demographic-parity gap undefined",
        "1 configuration of fairpate: ε depends on private votes",
    ]


def test_sentences_are_of_the_notion_that_is_asked_for():
    def with_odds(method, value):
        runs = configuration(method, (0.8, 0.8), (0.1, 0.1))

        def odds(seed):
            measured = value + 0.001 * (seed % 2)
            return {"equalized_odds": {"value": measured, "low": measured, "high": measured}}

        return [run_record(method, seed=r.seed, accuracy=0.8, config=r.config, fairness=odds(r.seed)) for r in runs]

    (text,), _ = said(with_odds("dp_sgd", 0.04), with_odds("pate", 0.3), notion="equalized_odds")
    assert "dp_sgd is the only method with an equalized-odds gap below .05" in text
