"""A real service on loopback over a small pool; teachers are a table of votes."""

import contextlib
import socket
import time
from dataclasses import replace

import ledger_terms
import numpy as np

from aggregator.ledger import Ledger
from aggregator.mechanism import ConfidentGnmax
from aggregator.service.actor import Backend, ServiceSettings
from aggregator.service.auth import read_tokens
from aggregator.session import AggregatorSession, PublicPool
from fairpate.http_server import HttpServer
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.types import QueryBudget

NUM_TEACHERS = 60
ANALYST, OPERATOR = "analyst-token-of-the-tests", "operator-token-of-the-tests"
TERMS = replace(
    ledger_terms.TERMS,
    mechanism=ConfidentGnmax(threshold=36, threshold_stddev_votes=6, noise_stddev_votes=4),
    ensemble="table",
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=10_000),
)
POOL = PublicPool(
    features=np.random.default_rng(1).standard_normal((300, 2, 3)).astype(np.float32),
    groups_N=np.arange(300) % 2,
    record_ids=tuple(f"record-{i}" for i in range(300)),
    group_names=("red", "green"),
    label_names=("zero", "one", "two"),
)


def table_votes(questions, *, salt=0):
    """Votes that are a function of the features alone; a table of the teachers' answers."""
    rows = []
    for question in questions:
        generator = np.random.default_rng([salt, *question.features.tobytes()])
        rows.append(generator.multinomial(NUM_TEACHERS, generator.dirichlet([0.4] * 3)))
    return np.array(rows, dtype=np.int64)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def until(condition, *, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.05)


def ids(numbers):
    """The body of a request for records of the pool."""
    return {"queries": [{"id": number} for number in numbers]}


def tokens_of_both_roles():
    return read_tokens({"FAIRPATE_ANALYST_TOKEN": ANALYST, "FAIRPATE_OPERATOR_TOKEN": OPERATOR})


def open_backend(path, *, terms=TERMS, count_votes=table_votes, seed=3, pool=POOL, anchor=None, **facts):
    def open_books():
        ledger = Ledger(path, terms, anchor=anchor)
        return ledger, AggregatorSession(ledger, source=SeededSource(seed))

    ledger, session = open_books()
    return Backend(
        ledger=ledger,
        session=session,
        pool=pool,
        count_votes=count_votes,
        reopen=open_books,
        close=ledger.close,
        **facts,
    )


@contextlib.contextmanager
def running(path, *, terms=TERMS, count_votes=table_votes, backend=None, tracer=None, **settings):
    """The URL of a service on the ledger at ``path``, or on another ``backend``."""
    backend = backend or open_backend(path, terms=terms, count_votes=count_votes)
    chosen = ServiceSettings(port=free_port(), **{"answer_step_s": 0.0, **settings})
    server = HttpServer(backend.app, chosen, tracer=tracer)
    try:
        yield chosen.url
    finally:
        server.stop()
        backend.close()
