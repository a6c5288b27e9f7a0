"""The noise of DP-FERMI's Theorem 3.3 (Lowy, Gupta and Razaviyayn 2023, arXiv 2210.08781) and what it costs.

    python benchmarks/papers/reproductions/dp_fermi_noise.py

prints, for Adult, the accountant's price at each epsilon of the paper. The paper calibrates each of its two streams of
noise to the whole budget; two releases of one multiplier are one release of it over sqrt(2).
"""

from __future__ import annotations

import math

from fairpate.config import PrivacyTarget
from fairpate.methods.base import price
from fairpate.methods.dp_sgd import DpSgdConfig, plan_steps
from fairpate.nn.private_fit import PrivateSteps
from fairpate.privacy.accountant import PoissonGaussians

ADULT_RECORDS, BATCH, STEPS = 36631, 1024, 7200


def published_noise_multiplier(target: PrivacyTarget, steps: PrivateSteps) -> float:
    """The paper's noise of *each* of its two streams over a sum's sensitivity: q sqrt(2 T ln(1 / delta)) / epsilon.

    Its closed form is sigma^2 = 2 (m / n)^2 T S^2 ln(1 / delta) / epsilon^2 for a sensitivity S. ValueError outside the
    range that its theorem states.
    """
    log_inverse = math.log(1 / target.delta)
    least_steps = target.epsilon / (2 * steps.sampling_rate) ** 2
    if target.epsilon > 2 * log_inverse or steps.num_steps < least_steps:
        raise ValueError(
            f"Expected epsilon <= {2 * log_inverse:.3g} and at least {math.ceil(least_steps)} steps, got "
            f"{target.epsilon} and {steps.num_steps}."
        )
    return steps.sampling_rate * math.sqrt(2 * steps.num_steps * log_inverse) / target.epsilon


def streams(target: PrivacyTarget, steps: PrivateSteps, *, count: int) -> PoissonGaussians:
    """The event of ``count`` of the paper's streams of noise, released together in every step."""
    return PoissonGaussians(
        count=steps.num_steps,
        noise_multiplier=published_noise_multiplier(target, steps) / math.sqrt(count),
        sampling_rate=steps.sampling_rate,
    )


def adult_steps() -> PrivateSteps:
    """The steps of the paper on Adult."""
    base = DpSgdConfig(epochs=STEPS * BATCH / ADULT_RECORDS, batch_size=BATCH)
    return plan_steps(base, num_records=ADULT_RECORDS, noise_multiplier=0.0)


def main() -> None:
    """Print the price of one stream and of both."""
    for epsilon in (1.0, 3.0, 9.0):
        target = PrivacyTarget(epsilon=epsilon, delta=ADULT_RECORDS**-2)
        one, both = (
            price([streams(target, adult_steps(), count=count)], delta=target.delta).epsilon for count in (1, 2)
        )
        print(f"nominal {epsilon:g}: one stream costs {one:.3g}, both {both:.3g}")


if __name__ == "__main__":
    main()
