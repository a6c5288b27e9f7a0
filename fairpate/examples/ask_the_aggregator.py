"""Submit queries to a running aggregator, and watch the budget.

    fairpate run                   # once: teachers, votes, a ledger in runs/NAME
    fairpate serve runs/NAME       # in another terminal
    fairpate new mine --example ask-the-aggregator
    python mine/ask_the_aggregator.py --queries 40

The script first asks for the cost, submits the queries only if they fit the budget, submits them again to show that
repeats are free, and counts the answers per group. Set FAIRPATE_TOKEN if the service needs tokens.
"""

import argparse
import os
from collections import Counter

from aggregator.client import DEFAULT_URL, AggregatorClient


def main() -> None:
    """Ask an aggregator for the privacy cost of queries, submit these queries twice, and count the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--queries", type=int, default=40, help="How many records of the public pool to ask about.")
    arguments = parser.parse_args()

    with AggregatorClient(arguments.url, token=os.environ.get("FAIRPATE_TOKEN")) as client:
        statement = client.statement()
        print(f"{statement.num_teachers} teachers, {statement.pool_size} public records, delta {statement.delta:g}")

        numbers = range(min(arguments.queries, statement.pool_size))
        price = client.estimate(numbers)
        print(f"{price.new_queries} of {len(numbers)} queries are new")
        for name, budget in (("now", price.now), ("afterwards", price.afterwards)):
            print(f"  epsilon {name}: {budget.epsilon_submitted}")
        if price.afterwards.closed:
            print("The budget has no room for all of them; the service will stop at the first that does not fit.")

        replies = [reply for batch in client.ask_many(numbers) for reply in batch.replies]
        again = [reply for batch in client.ask_many(numbers) for reply in batch.replies]
        print(f"asked again: {'the same replies' if again == replies else 'other replies'}, nothing charged")
        print(f"queries charged so far: {client.budget().queries_submitted}")

        for status, count in Counter(reply.status for reply in replies).items():
            print(f"  {status:<12} {count}")
        for label, count in sorted(Counter(reply.label for reply in replies if reply.label is not None).items()):
            print(f"  label {statement.label_names[label]:<6} {count}")


if __name__ == "__main__":
    main()
