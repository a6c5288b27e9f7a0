"""Write your own mechanism: a noisy vote without a threshold check, with ledger and budget.

    fairpate new mine --example own-mechanism
    python mine/own_mechanism.py

A hundred teachers vote on two classes; the class with the largest noisy count is the answer, unless the gate refuses
it. One record changes one teacher's vote from one class to another, so the counts change by at most sqrt(2) in L2 norm.
So a query is one noisy argmax for any votes: this is the event that the ledger reserves before any noise is drawn.
"""

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from aggregator.ledger import Ledger, LedgerTerms
from aggregator.mechanism import Mechanism, Outcome, gated, register
from aggregator.session import AggregatorSession, Query
from fairpate.fairness.gate import DemographicParityGate
from fairpate.pages import epsilon_text
from fairpate.privacy.accountant import NoisyArgmaxes
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, discrete_gaussians
from fairpate.types import GateRule, IntArray, QueryBudget


@register
@dataclass(frozen=True, kw_only=True)
class PlainVote(Mechanism):
    """A mechanism that always answers with the class of the largest noisy count."""

    name: ClassVar[str] = "example_plain_vote"
    noise_stddev_votes: float

    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """Return an outcome for each query: the class of its largest noisy count, unless the gate refuses it."""
        noise_QC = discrete_gaussians(self.noise_stddev_votes, source.machine_words(keys, votes_QC.shape[1]), source)
        # Of equal counts the first class wins: a fixed rule, which costs no privacy.
        return gated((votes_QC + noise_QC).argmax(axis=1).tolist(), groups, gate)

    def worst_case(self, num_queries: int) -> NoisyArgmaxes:
        """Return the privacy event of ``num_queries`` queries; it is the same for any votes."""
        return NoisyArgmaxes(count=num_queries, noise_stddev_votes=self.noise_stddev_votes)

    def scaled(self, factor: float) -> Self:
        """Return the same mechanism with its noise multiplied by ``factor``, to meet a target."""
        return dataclasses.replace(self, noise_stddev_votes=factor * self.noise_stddev_votes)

    def describe(self) -> str:
        """Return the parameters in words, for pages and statements."""
        return f"Noisy plurality, noise of {self.noise_stddev_votes:g} votes"


TERMS = LedgerTerms(
    mechanism=PlainVote(noise_stddev_votes=20.0),
    gate=GateRule(max_disparity=0.1, min_count=10),
    budget=QueryBudget(kind="data_independent", delta=1e-5, epsilon=3.0),
    num_teachers=100,
    num_classes=2,
    num_groups=2,
    noise=OsEntropy().label,
    ensemble="example",
)


def votes_on(asked: Sequence[Query]) -> IntArray:
    """Return simulated votes of a hundred teachers on the queries ``asked``; the second group gets the second class
    more often."""
    draws = np.random.default_rng()
    share_Q = [0.2 if query.group == 0 else 0.8 for query in asked]
    votes_Q = [draws.binomial(100, 0.85 if draws.random() < share else 0.15) for share in share_Q]
    return np.array([[100 - votes, votes] for votes in votes_Q], dtype=np.int64)


def main() -> None:
    """Submit queries until the budget is spent, and print how many had each outcome."""
    queries = [Query(key=f"query-{number}", group=number % 2, record_id=str(number)) for number in range(1000)]
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.sqlite", TERMS) as ledger:
        session = AggregatorSession(ledger, source=OsEntropy())
        replies = session.ask(queries, votes_on)
        status = session.budget_status()
    print(dict(Counter(reply.verdict if isinstance(reply, Outcome) else "over budget" for reply in replies)))
    spent = epsilon_text(status.epsilon_submitted, digits=3)
    print(f"epsilon {spent} of {TERMS.budget.epsilon} at delta {TERMS.budget.delta:g}")


if __name__ == "__main__":
    main()
