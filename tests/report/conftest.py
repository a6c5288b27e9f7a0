import math

import pytest

from fairpate.report.frontier import Row
from fairpate.types import RunRecord

METHODS = {
    # unit, relation, whether a margin matters, coverage
    "fairpate": ("record", "add or remove one", True, 0.9),
    "dp_sgd": ("record", "add or remove one", False, 1.0),
    "dp_fermi": ("sensitive attribute", "replace one", True, 1.0),
}


def _config(method, data, seed, epsilon, margin):
    return {
        "method": method,
        "seed": seed,
        "data": {"name": data, "seed": seed},
        "target": {"epsilon": epsilon},
        "noise": "os_entropy",
        "aggregator": {"gate": {"max_disparity": margin}},
    }


def _row(method, data, seed, epsilon, margin, price=None, **changes):
    unit, relation, has_margin, coverage = METHODS[method]
    config = _config(method, data, seed, epsilon, margin)
    number = sum(map(ord, f"{method}{data}{epsilon}{margin}")) % 7 + seed
    fields = {
        "unit": unit,
        "relation": relation,
        "delta": 1e-5,
        "epsilon": price or epsilon,
        "epsilon_is_data_dependent": False,
        "accuracy": 0.9 - 0.3 * math.exp(-epsilon) - 0.005 * number,
        "coverage": coverage if margin == 0.01 else 1.0,
        "disparity": (margin if has_margin else 0.2) + 0.002 * number,
    }
    # The larger epsilon, the larger the gap of odds; of DP-FERMI it is undefined.
    odds = None if method == "dp_fermi" else 0.05 + 0.01 * epsilon + 0.001 * number
    fields["fairness"] = {"equalized_odds": {"value": odds, "low": odds, "high": odds}}
    identity = {"method": method, "data": data, "seed": seed, "config": config}
    command = f"fairpate run --method {method} --data {data} --set target.epsilon={epsilon} --seed {seed}"
    record = RunRecord(**identity, **(fields | changes))
    return Row(digest=f"{method}{data}{seed}{epsilon}{margin}", command=command, minutes=0.5, record=record, **identity)


@pytest.fixture(scope="session")
def comparison():
    """Rows of a made-up comparison: three methods in two privacy classes, two data sets, two seeds, one failure."""

    def make(*, operator=False):
        rows = [
            _row(method, data, seed, epsilon, margin)
            for data in ("adult", "color_mnist")
            for method, (_, _, has_margin, _) in METHODS.items()
            for epsilon in (1.0, 3.0, 10.0)
            for margin in ((0.01, 0.1) if has_margin else (0.1,))
            for seed in (0, 1)
        ]
        if operator:
            rows += [
                _row("fairpate", "adult", seed, 1.0, 0.1, price=0.4, epsilon_is_data_dependent=True) for seed in (0, 1)
            ]
        config = _config("dp_fermi", "adult", 0, 0.1, 0.1)
        identity = {"method": "dp_fermi", "data": "adult", "seed": 0, "config": config}
        failed = Row(
            digest="failed",
            command="fairpate run --method dp_fermi --epsilon 0.1",
            minutes=0.1,
            error="no <noise> fits",
            **identity,
        )
        return [*rows, failed]

    return make
