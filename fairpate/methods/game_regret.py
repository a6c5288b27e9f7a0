"""How far from an equilibrium rules by group may end, before they are played (Jagielski et al. 2019, Theorem 4.3).

The paper's bound hides logarithms, and the constants of its Lemma 4.2. These are ours, for the play of
:class:`.oracle_releases.GroupRules` under the noise that it has. With probability 1 - beta nobody gains more than nu by
leaving the mean of T rounds, nu being the regrets of both sides (Freund and Schapire 1996):

    learner   2 S (G ln K + ln(3 T / beta)) / (m epsilon') + 4 B d    exponential mechanism; prices of noisy sizes
    auditor   B (ln(M + 1) / (eta T) + eta / 2) + 4 B (w + d)         exponentiated gradient, of gains within 2

with M = 2 (G - 1) E multipliers, S the most that one attribute changes a cost, d the most that a released size is off
and w the most noise of a counted rate, both as parts of the smallest cell. For cells stands the smallest released
share, so that the bound is public once sizes are released.
"""

from __future__ import annotations

import math

from fairpate.methods.oracle_releases import RULES_KJ
from fairpate.methods.parity_game import GameRules


def nu_before_play(
    rules: GameRules,
    *,
    num_records: int,
    num_groups: int,
    num_events: int,
    smallest_share: float,
    round_epsilon: float,
    size_epsilon: float,
    failure_probability: float,
) -> float:
    """nu, in units of the Lagrangian (an error rate); above 1 it says nothing.

    ``smallest_share``: of any released cell among ``num_records``; ``round_epsilon`` of either side's release in a
    round, ``size_epsilon`` of that of sizes, before. ValueError for arguments out of range.
    """
    if not (0 < smallest_share <= 1 and 0 < failure_probability < 1 and num_groups > 1 and num_events > 0):
        raise ValueError(
            "Expected 0 < smallest_share <= 1, 0 < failure_probability < 1, num_groups > 1 and num_events > 0, got "
            f"{smallest_share}, {failure_probability}, {num_groups} and {num_events}."
        )
    bound, rounds, others = rules.dual_bound, rules.num_rounds, num_groups - 1
    smallest = num_records * smallest_share
    # Each of the learner's answers, the sizes and the auditor's counts may fail with a third of beta.
    unlikely = 3 / failure_probability
    moves = 1 if num_groups == 2 else 2
    # The reference's size is what the others leave, and so off by the sum of their noises.
    size_error = others * moves / size_epsilon * math.log(others * num_events * unlikely) / smallest
    count_error = 2 / round_epsilon * math.log(rounds * num_groups * num_events * unlikely) / smallest
    # Of |c| and of |c - c'|, where c is 1 or -1 and a price of at most B over the cell's share.
    sensitivity = max(1 + bound / smallest_share, 2 * bound / smallest_share)
    complexity = num_groups * math.log(len(RULES_KJ)) + math.log(rounds * unlikely)
    learner = 2 * sensitivity * complexity / (num_records * round_epsilon) + 4 * bound * size_error
    auditor = bound * (math.log(2 * others * num_events + 1) / (rules.learning_rate * rounds) + rules.learning_rate / 2)
    return learner + auditor + 4 * bound * (count_error + size_error)
