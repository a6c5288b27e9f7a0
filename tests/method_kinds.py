"""Which parameters of a test `make test` tries, and which `make test-all`; what others share with one of these is left
to `make campaigns`.

tests/contracts/test_fixed_results.py trains all methods each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# By votes for labels, by a release of sums, by steps, by steps with a dual variable, by randomised reports.
OF_EACH_KIND = ("fairpate", "weighted_votes", "sgd", "dp_sgd", "raco_dp", "randomised_response")


def quick_and_slow(
    values: Iterable[Any], quick: Collection[Any] = OF_EACH_KIND, slow: Collection[Any] | None = None
) -> list[Any]:
    """Parameters of a test for each of ``values``, slow beyond the ``quick`` ones, and campaigns beyond ``slow``, if
    it is given."""

    def marks(value: Any) -> Any:
        if value in quick:
            return ()
        return pytest.mark.slow if slow is None or value in slow else pytest.mark.campaign

    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks(value)) for value in values]
