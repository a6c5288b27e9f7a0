"""The tables that open a comparison's page, next to means and standard errors that were computed by hand.

Every configuration has four seeds, two of them r above and two r below their mean: a sample's standard deviation of
2 r / sqrt(3), hence a standard error of r / sqrt(3). A pair (a, b) here stands for the mean (a + b) / 2 and the
standard error |a - b| / 2.
"""

from __future__ import annotations

import math

import pytest
from run_records import run_record

from fairpate.report.frontier import points_of
from fairpate.report.frontier_page import findings

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

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
    texts = [budget.sentence.replace("\u00a0", " ") for budget in found.budgets]
    return texts, list(found.left_out)


def rows_of(*configurations):
    """The table of the first budget."""
    found = findings(points_of([run for runs in configurations for run in runs]))
    return [[words.replace("\u00a0", " ") for words in row] for row in found.budgets[0].rows]


def test_a_table_holds_means_and_standard_errors():
    rows = rows_of(
        configuration("fair_dp_sgd", (0.845, 0.855), (0.006, 0.008)),
        configuration("pate", (0.795, 0.805), (0.12, 0.14)),
        configuration("pate", (0.60, 0.62), (0.01, 0.03)),
    )
    assert rows == [
        ["fair_dp_sgd", "4", "85.0 % ± 0.5", "0.007 ± 0.001", "85.0 % ± 0.5"],
        ["pate", "4", "80.0 % ± 0.5", "0.020 ± 0.010", "61.0 % ± 1.0"],
    ]


def test_a_single_seed_has_no_standard_error():
    assert rows_of(configuration("dp_sgd", (0.9,), (0.01,))) == [["dp_sgd", "1", "90.0 %", "0.010", "90.0 %"]]


def test_a_highest_mean_takes_three_seeds():
    (text,), _ = said(configuration("dp_sgd", (0.9,), (0.01,)), configuration("pate", (0.8,), (0.1,)))
    assert "highest" not in text
    assert "smallest" not in text
    assert "three runs" in text
    (text,), _ = said(configuration("dp_sgd", (0.9,), (0.01,)), configuration("pate", (0.79, 0.81), (0.1, 0.1)))
    assert "dp_sgd" not in text
    assert "three runs" in text
    assert "highest mean accuracy is pate’s, 80.0 %" in text
    assert "gap is pate’s, 0.100 at 80.0 %" in text


def test_degenerate_models_win_nothing_and_are_counted():
    (text,), left_out = said(
        configuration("pate", (0.99, 0.99), (0.0, 0.0), degenerate=CONSTANT),
        configuration("dp_sgd", (0.8, 0.82), (0.1, 0.12)),
    )
    assert text == (
        "The highest mean accuracy is dp_sgd’s, 81.0 %. The smallest mean demographic-parity gap is dp_sgd’s, 0.110 at "
        "81.0 %."
    )
    assert left_out == ["1 configuration of pate: degenerate"]
    nobody = said(configuration("pate", (0.99, 0.99), (0.0, 0.0), degenerate=CONSTANT))
    assert nobody == ([], ["1 configuration of pate: degenerate"])


def test_groups_that_no_gap_compares_are_named():
    runs = configuration("pate", (0.8, 0.8), (0.1, 0.1), unmeasured_groups=("children",))
    words = "Not known for children: too few answered test records in some run, so no gap."
    assert findings(points_of(runs)).unsaid == (words,)


def test_configurations_that_serve_a_group_worse_than_a_constant_are_named_beside_the_sentences():
    runs = [
        *configuration("pate", (0.8, 0.82), (0.0, 0.0), underserved_groups=("men",)),
        *configuration("dp_sgd", (0.8, 0.82), (0.1, 0.12)),
    ]
    words = "1 configuration of pate with a group that is served worse than by a constant in some run: men."
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
        "The highest mean accuracy is dp_sgd’s, 80",  # within 1
        "The highest mean accuracy is weighted_votes’s, 79",  # within .3
        "The highest mean accuracy is dp_sgd’s, 80",  # within 3 still what costs 1
    ]


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
        "1 configuration of sgd: not private",
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
    assert "The smallest mean equalized-odds gap is dp_sgd’s, 0.041 at 80.0 %" in text
