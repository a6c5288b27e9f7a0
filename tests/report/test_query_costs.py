"""Sentences about what queries cost: each is true of the queries that it counts."""

from __future__ import annotations

import numpy as np
import pytest

from fairpate.pages import compared_costs

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")


@pytest.mark.parametrize(
    ("costs", "voted", "words"),
    [
        ([0.2, 0.2], [True, True], "Every query costs its worst case"),
        ([0.2, 0.0], [True, False], "Every query that was voted on costs its worst case"),
        ([0.2, 0.1], [True, True], "half of the queries cost 75\u00a0% of it or more, and 1 of 2 queries all of it"),
        ([0.0], [False], "No query has cost anything"),
    ],
)
def test_what_a_refusal_before_the_vote_cost_is_not_called_its_worst_case(
    costs: list[float], voted: list[bool], words: str
) -> None:
    assert words in compared_costs(np.array(costs), np.full(len(costs), 0.2), np.array(voted)).words
