"""Which parameters of a test `make test` tries; what others share with one of these is left to the campaigns.

tests/contracts/test_fixed_results.py trains all methods each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# By votes for labels, by a release of sums, by steps, by steps with a dual variable, by randomised reports.
OF_EACH_KIND = ("fairpate", "weighted_votes", "sgd", "dp_sgd", "raco_dp", "randomised_response")


def quick_and_slow(values: Iterable[Any], quick: Collection[Any] = OF_EACH_KIND) -> list[Any]:
    """Parameters of a test for each of ``values``, slow beyond the ``quick`` ones."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in quick else pytest.mark.slow
        )
        for value in values
    ]
