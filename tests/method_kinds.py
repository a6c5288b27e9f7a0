"""Methods of which `make test` tries everything; what others share with one of them is left to the campaigns.

tests/contracts/test_fixed_results.py trains all of them each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# By votes for labels, by a release of sums, by steps, by steps with a dual variable, by a game, by randomised reports.
OF_EACH_KIND = ("fairpate", "sf_pate", "weighted_votes", "residual_votes", "teacher_votes", "sgd", "dp_sgd", "raco_dp")
OF_EACH_KIND += ("pf_ld", "dp_oracle_learner", "randomised_response")


def quick_and_slow(methods: Iterable[str]) -> list[Any]:
    """Parameters of a test for each of ``methods``, slow beyond those."""
    return [pytest.param(name, marks=() if name in OF_EACH_KIND else pytest.mark.slow) for name in methods]
