"""The terms of a small ledger, which tests change where that is their subject."""

from aggregator.ledger import LedgerTerms
from aggregator.mechanism import ConfidentGnmax
from fairpate.types import GateRule, QueryBudget

MECHANISM = ConfidentGnmax(threshold=30, threshold_stddev_votes=10, noise_stddev_votes=6)
TERMS = LedgerTerms(
    mechanism=MECHANISM,
    gate=GateRule(max_disparity=0.1, min_count=5),
    num_teachers=60,
    num_classes=3,
    num_groups=2,
    noise="seeded: not private",
    ensemble="teachers",
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=1000),
)
