"""DP-oracle-learner with the noise and the accounting of its paper (Jagielski et al. 2019): nothing is guaranteed.

    python benchmarks/papers/reproductions/oracle_as_in_paper.py

prints what the paper's rounds cost by advanced composition in full. :func:`sides_as_in_paper` gives the learner and the
auditor of the paper to :func:`fairpate.methods.dp_fair_learning.play`. What is wrong with them:

- epsilon' = epsilon / (4 sqrt(T ln(1 / delta))) of a round holds the first term of advanced composition at
  epsilon / 2; the second, left out, exceeds the rest for large epsilon.
- Noise scales and costs use exact cell shares, which are private: the accountant charges infinity.
"""

from __future__ import annotations

import math

import numpy as np

from fairpate.methods.dp_fair_learning import Regression, Setting, Sides, violations_of
from fairpate.privacy.accountant import PureReleases
from fairpate.privacy.laplace import add_laplace
from fairpate.types import FloatArray


def published_round_epsilon(*, epsilon: float, delta: float, num_rounds: int) -> float:
    """The paper's epsilon' of each of its 2 T releases."""
    return epsilon / (4 * math.sqrt(num_rounds * math.log(1 / delta)))


def composed_in_full(epsilon: float, *, delta: float, num_rounds: int) -> float:
    """The epsilon of twice ``num_rounds`` releases by Dwork, Rothblum and Vadhan 2010, both terms."""
    count = 2 * num_rounds
    return math.sqrt(2 * count * math.log(1 / delta)) * epsilon + count * epsilon * math.expm1(epsilon)


def sides_as_in_paper(setting: Setting) -> Sides:
    """Every round, in all directions; exact shares in costs and noise scales, which they are no cover for."""
    features, cells, target, source = setting.features, setting.cells, setting.target, setting.source
    regression = Regression(features, cells, ridge=setting.config.ridge, num_directions=None)
    count, num_rounds = len(features), setting.rules.num_rounds
    shares_GE, sums_GED = cells.counts() / count, cells.sums(regression.components)
    smallest = float(shares_GE.min())
    if not smallest * count > 1:
        raise ValueError("Expected more than one record in every cell, as the paper's noise does; merge groups.")
    epsilon = published_round_epsilon(epsilon=target.epsilon, delta=target.delta, num_rounds=num_rounds)
    feature_reach = 2 * float(regression.norms_E.max()) * setting.config.dual_bound / smallest
    rate_reach = 2 * cells.num_groups / (count * smallest - 1)

    def answer(prices_GE: FloatArray) -> FloatArray:
        priced_D = np.tensordot(prices_GE, sums_GED, axes=2)
        noisy_D = add_laplace(priced_D, l1_sensitivity=feature_reach, epsilon=epsilon, source=source)
        return regression.public + regression.lift @ noisy_D

    def violations(coefficients_D: FloatArray) -> FloatArray:
        rates_GE, rules = cells.rates(features @ coefficients_D < 0), setting.rules
        exact = violations_of(rates_GE, max_gap=rules.max_gap, reference_group=rules.reference_group)
        return add_laplace(exact, l1_sensitivity=rate_reach, epsilon=epsilon, source=source)

    # Exact shares are used unreleased: the accountant hears that nothing is guaranteed.
    return Sides(answer, violations, shares_GE, (PureReleases(count=1, epsilon=math.inf),), epsilon)


def main() -> None:
    """Print the nominal epsilon and the composed one, for 20 rounds at delta 1e-7."""
    for nominal in (10.0, 30.0, 60.0):
        epsilon = published_round_epsilon(epsilon=nominal, delta=1e-7, num_rounds=20)
        print(f"nominal {nominal:g}, costs {composed_in_full(epsilon, delta=1e-7, num_rounds=20):.3g}")


if __name__ == "__main__":
    main()
