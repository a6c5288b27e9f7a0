"""A run names whom a constant would serve better, and groups that were not measured, beside what is degenerate."""

from __future__ import annotations

import numpy as np
import pytest
from report_pages import GUARANTEE

from fairpate.report.metrics import Evaluation, evaluate
from fairpate.report.records import RunStatement
from fairpate.report.run_page import treated

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

LOST = "the model is right about 80.0 % of men, always predicting 'no' about 90.0 %"


def measured(*, children: int) -> Evaluation:
    """Women are told apart; of 100 men 15 are lost and 5 found; children answered as they are."""
    labels = [0, 1] * 50 + [0] * 90 + [1] * 10 + [0, 1] * (children // 2)
    predicted = [0, 1] * 50 + [1] * 15 + [0] * 75 + [1] * 5 + [0] * 5 + [0, 1] * (children // 2)
    return evaluate(
        predicted,
        labels_N=labels,
        groups_N=[0] * 100 + [1] * 100 + [2] * children,
        class_names=["no", "yes"],
        group_names=["women", "men", "children"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )


@pytest.mark.parametrize("children", [0, 40])
def test_the_terminal_names_them(children: int) -> None:
    rows = RunStatement(guarantee=GUARANTEE, measured=measured(children=children)).rows
    warnings = [words for name, words in rows if name == "warning"]
    left_out = [] if children else ["gaps leave out children: too few answered test records"]
    assert warnings == [LOST, *left_out]


def test_the_report_says_it_beside_predicted_classes() -> None:
    words = treated({"all": measured(children=40)}, "student")["prediction_words"]["all"]
    assert words.startswith("The student is right about 80.0 % of men")
    assert words.endswith("2 of 2 classes are predicted for some record.")
