import io
import json

import httpx
import numpy as np
import pytest
from rich.console import Console
from serving import ANALYST, OPERATOR, POOL, tokens_of_both_roles

from aggregator.client import (
    AggregatorClient,
    CommandError,
    QueryError,
    QueryShell,
    parse_questions,
    parse_range,
)

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.fixture
def client(service):
    with AggregatorClient(service(tokens=tokens_of_both_roles()), token=ANALYST) as client:
        yield client


@pytest.fixture
def shell(client):
    """Run a command: what it prints."""

    def run(line):
        console = Console(file=io.StringIO(), width=200)
        QueryShell(client, console).onecmd(line)
        return console.file.getvalue()

    return run


def test_the_client_asks_in_batches_and_reads_typed_replies(client):
    batches = list(client.ask_many(range(20), batch_size=8))
    assert [len(batch.replies) for batch in batches] == [8, 8, 4]
    first = batches[0].replies[0]
    assert client.reply(first.key) == first
    posted = {"features": POOL.features[0].tolist(), "group": POOL.group_names[POOL.groups_N[0]]}
    assert client.ask([posted]).replies == [first]
    assert client.statement().pool_size == len(POOL)
    with pytest.raises(ValueError, match="batch_size"):
        list(client.ask_many([1], batch_size=0))


def test_a_refused_request_is_an_error_with_the_service_s_words(client):
    with pytest.raises(QueryError, match=r"queries\.1\.id: got 999\. Expected < 300") as raised:
        client.ask([0, 999])
    assert raised.value.status == 422
    with pytest.raises(QueryError, match="operator") as raised:
        client.ledger()
    assert raised.value.status == 403


def test_the_operator_s_client_reads_the_ledger(client):
    client.ask(range(4))
    with AggregatorClient(client.url, token=OPERATOR) as operator:
        assert operator.ledger(start=1).total == 4


def test_commands(shell, capsys):
    assert all(word in shell("ask 0:3 7") for word in ("0 ", "2 ", "7 "))
    assert "query-count), queries 4 of 10000" in shell("budget")
    assert "queries: 2 new, 4 with a stored reply" in shell("estimate 0:3 7 8 9")
    assert "504" in shell("estimate 500 new")
    assert '"pool_size": 300' in shell("statement")
    assert "unknown command" in shell("vote 3")
    shell("help")
    assert {"budget", "quit"} < set(capsys.readouterr().out.split()) - {"EOF"}
    assert "Expected < 300" in shell("ask 300")
    assert shell("") == ""


@pytest.mark.parametrize(
    "text", ["", "x", "1:", "-3", "0:99999999999999999999", "1:2:3", '{"id": ', "0x1", "2:2", "10:0"]
)
def test_a_question_that_is_none_is_explained(text):
    with pytest.raises(CommandError, match=r"Expected|expected"):
        parse_questions(text)


def test_questions():
    assert parse_questions("3 5:8") == [3, 5, 6, 7]
    assert parse_questions('{"id": 4}') == [{"id": 4}]
    assert list(parse_range("2:3")) == [2]


def test_a_refusal_that_concerns_no_value_names_none():
    fault = {"field": "ledger", "value": "", "remedy": "The ledger cannot be written."}
    refusing = httpx.MockTransport(lambda _: httpx.Response(503, json={"errors": [fault]}))
    with AggregatorClient("http://service", attempts=1) as client:
        client._http = httpx.Client(base_url=client.url, transport=refusing)
        with pytest.raises(QueryError, match=r"^ledger: The ledger cannot be written\.$"):
            client.budget()


def test_numbers_of_numpy_are_sent_as_numbers_and_nan_is_refused():
    sent = []

    def answer(request):
        sent.append(json.loads(request.content))
        return httpx.Response(422, json={"errors": [{"field": "queries", "value": "", "remedy": "Enough."}]})

    with AggregatorClient("http://service", attempts=1) as client:
        client._http = httpx.Client(base_url=client.url, transport=httpx.MockTransport(answer))
        record = {"level": np.int64(2), "age": np.float32(0.5), "name": "ä", "gone": None}
        with pytest.raises(QueryError, match="Enough"):
            client.ask([np.int64(3), {"record": record, "group": "red"}, {"features": np.eye(2), "group": "red"}])
        assert sent == [
            {
                "queries": [
                    {"id": 3},
                    {"record": {"level": 2, "age": 0.5, "name": "ä", "gone": None}, "group": "red"},
                    {"features": [[1, 0], [0, 1]], "group": "red"},
                ]
            }
        ]
        for wrong in (float("nan"), {1}):
            with pytest.raises(QueryError, match="send None for a missing value"):
                client.ask([{"record": {"level": wrong}, "group": "red"}])
