"""A disk that fills up, and one that turns read-only, for real: a small file system in a mount namespace of its own."""

import pytest
from own_disk import told_beside_own_disk

pytestmark = pytest.mark.usefixtures("light_runs")

SCRIPT = """
import json, subprocess, sys
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from aggregator.ledger import Ledger
from aggregator.store import LedgerError
from aggregator.mechanism import Outcome
from aggregator.session import AggregatorSession
from serving import POOL, TERMS, table_votes
from fairpate.privacy.discrete_gaussian import SeededSource

disk = Path(sys.argv[1])

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)

def ask(ledger, numbers):
    questions = [POOL.questions[number] for number in numbers]
    by_key = {question.query.key: question for question in questions}
    session = AggregatorSession(ledger, source=SeededSource(3))
    return session.ask(list(q.query for q in questions), lambda new: table_votes([by_key[q.key] for q in new]))

mount("size=192k")
path, given, failure = disk / "ledger.sqlite", {}, None
with Ledger(path, TERMS) as ledger:
    for number in range(len(POOL)):
        try:
            (given[number],) = ask(ledger, [number])
        except LedgerError as error:
            failure = str(error)
            break
    charged = len(ledger.keys)
    stored = ask(ledger, list(given)) == tuple(given.values())

mount("remount,size=8m")
with Ledger(path, TERMS) as ledger:
    kept = ask(ledger, list(given)) == tuple(given.values())
    kept = kept and len(ledger.keys) >= charged
    ask(ledger, [len(given)])

mount("remount,ro")
try:
    Ledger(path, TERMS)
    read_only = None
except LedgerError as error:
    read_only = str(error)
mount("remount,rw")
with Ledger(path, TERMS) as ledger:
    after = ask(ledger, list(given)) == tuple(given.values())
told = dict(answered=len(given), failure=failure, stored=stored, kept=kept, read_only=read_only, after=after)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return told_beside_own_disk(SCRIPT, tmp_path_factory.mktemp("disk"))


def test_a_full_disk_ends_the_answers_with_a_clear_message_and_loses_none(told):
    assert 10 < told["answered"] < 300
    assert "cannot be written" in told["failure"]
    assert "Repair its disk" in told["failure"]
    assert told["stored"]
    assert told["kept"]


def test_a_read_only_disk_is_refused_and_nothing_is_lost(told):
    assert "ledger.sqlite: the ledger cannot be" in told["read_only"]
    assert "Read-only" in told["read_only"]
    assert told["after"]
