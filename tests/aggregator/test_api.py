import concurrent.futures
import dataclasses
import json
import math
import sqlite3
import threading

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import ANALYST, OPERATOR, POOL, TERMS, ids, running, table_votes, tokens_of_both_roles

from aggregator.service.api import MAX_QUERIES_PER_REQUEST
from aggregator.service.writer import until_next_step
from aggregator.session import QuotaRule, VotesUnavailableError
from aggregator.store import LedgerError
from fairpate.http_server import largest_body_bytes
from fairpate.types import QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

FEATURES = [[0.5, 1.0, -2.0], [0.0, 3.0, 1.5]]
AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
DIFFERING = ("date", "x-request-id")


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A client of one service for all requests that are refused; none of them is charged."""
    path = tmp_path_factory.mktemp("refusing") / "ledger.sqlite"
    with (
        running(path, tokens=tokens_of_both_roles()) as url,
        httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {ANALYST}"}) as client,
    ):
        yield client
        assert client.get("/v1/budget").json()["queries_submitted"] == 0


def replies(response):
    assert response.status_code == 200, response.text
    return response.json()["replies"]


def verdicts(http):
    page = http.get("/v1/operator/ledger?limit=1000", headers=AS_OPERATOR).json()
    return {entry["key"]: entry["verdict"] for entry in page["entries"]}


def test_queries_are_answered_once_and_looked_up_for_ever(http):
    first = replies(http.post("/v1/queries", json=ids(range(20))))
    assert {reply["status"] for reply in first} == {"answered", "refused"}
    assert replies(http.post("/v1/queries", json=ids(range(20)))) == first
    assert [http.get(f"/v1/queries/{reply['key']}").json() for reply in first] == first
    assert http.get("/v1/budget").json()["queries_submitted"] == 20


def test_a_record_s_own_features_are_the_same_query_as_its_number(http):
    posted = {"features": POOL.features[4].tolist(), "group": POOL.group_names[POOL.groups_N[4]]}
    by_number, by_features = replies(http.post("/v1/queries", json={"queries": [{"id": 4}, posted]}))
    assert by_number == by_features
    assert http.get("/v1/budget").json()["queries_submitted"] == 1


def test_other_spellings_of_the_same_numbers_are_one_query(http):
    spellings = [[[0.1, 0, 0.0], [1, 2, 3]], [[0.10000000149, -0.0, 0], [1.0, 2.0, 3.0]]]
    first, second = replies(
        http.post("/v1/queries", json={"queries": [{"features": x, "group": "red"} for x in spellings]})
    )
    assert first == second


def test_both_kinds_of_refusal_are_the_same_bytes(http):
    """Bodies and headers of single queries, apart from the key: one for all refusals."""
    seen = {}
    for number in range(60):
        response = http.post("/v1/queries", json=ids([number]))
        (reply,) = replies(response)
        if reply["status"] == "refused":
            looked_up = http.get(f"/v1/queries/{reply['key']}")
            headers = {name: value for name, value in response.headers.items() if name not in DIFFERING}
            shown = (response.text.replace(reply["key"], ""), looked_up.text.replace(reply["key"], ""), str(headers))
            seen[reply["key"]] = shown
    kinds = verdicts(http)
    assert {kinds[key] for key in seen} == {"confidence", "fairness"}
    assert len(set(seen.values())) == 1


def test_nothing_an_analyst_can_read_depends_on_votes_beyond_labels(tmp_path):
    """Two ensembles that disagree everywhere: every body but the replies is the same, byte for byte."""

    def read(folder, salt):
        with (
            running(folder / "ledger.sqlite", count_votes=lambda q: table_votes(q, salt=salt)) as url,
            httpx.Client(base_url=url, timeout=120) as http,
        ):
            labels = [reply["label"] for reply in replies(http.post("/v1/queries", json=ids(range(100))))]
            again = replies(http.post("/v1/queries", json=ids(range(100))))
            assert [reply["label"] for reply in again] == labels
            paths = ("/", "/v1/about", "/v1/state", "/v1/budget", "/v1/statement", "/healthz", "/metrics")
            texts = [http.get(path).text for path in paths]
            with http.stream("GET", "/v1/events") as events:
                texts.append(next(events.iter_text()))
            texts.append(http.post("/v1/estimate", json={"count": 7}).text)
            # What queries cost by their votes is for the operator, and in no text of the analyst's.
            assert not any(word in text for text in texts[1:] for word in ("dearest", "of_worst", "of_total"))
            for path in ("/v1/operator/overview", "/v1/operator/events", "/v1/operator/ledger"):
                assert "dearest" not in http.get(path).text
            return labels, [line for text in texts for line in text.splitlines() if "_created" not in line]

    folders = [tmp_path / name for name in ("one", "other")]
    (labels, first), (other_labels, second) = (read(folder, salt) for salt, folder in enumerate(folders))
    assert labels != other_labels
    assert [line for line in first if "started" not in line] == [line for line in second if "started" not in line]


@pytest.mark.parametrize(
    ("body", "field", "value", "remedy"),
    [
        ({"queries": [{"id": 300}]}, "queries.0.id", "300", "Expected < 300"),
        ({"queries": [{"id": -1}]}, "queries.0.id", "-1", "Expected >= 0"),
        ({"queries": [{"id": "3"}]}, "queries.0.id", "3", "Expected a whole number"),
        ({"queries": [{"id": True}]}, "queries.0.id", "true", "Expected a whole number"),
        ({"queries": [{"id": 1}, {"id": 2, "votes": 1}]}, "queries.1.votes", "1", "Unknown field"),
        ({"queries": [{"id": 1}], "noise": 0}, "noise", "0", "Unknown field"),
        ({"queries": []}, "queries", "[]", "at least 1"),
        ({"queries": [{"id": 1}] * 1025}, "queries", "id", "at most 1024"),
        ({}, "queries", "{}", "Required"),
        ({"queries": [{"features": FEATURES}]}, "queries.0.group", "features", "Required"),
        ({"queries": [{"features": FEATURES, "group": "blue"}]}, "queries.0.group", "blue", "'red' or 'green'"),
        ({"queries": [{"features": FEATURES[:1], "group": "red"}]}, "queries.0.features", "0.5", "at least 2 items"),
        ({"queries": [{"features": [[1, 2], [1, 2]], "group": "red"}]}, "queries.0.features.0", "2", "at least 3"),
        (
            {"queries": [{"features": [[1, 2, "x"], [1, 2, 3]], "group": "red"}]},
            "queries.0.features.0.2",
            "x",
            "number",
        ),
        (
            {"queries": [{"features": [[1, 2, 1e39], [1, 2, 3]], "group": "red"}]},
            "features.0.2",
            "1e+39",
            "Expected <=",
        ),
        ({"queries": [{"features": 5, "group": "red"}]}, "queries.0.features", "5", "Expected a list"),
    ],
)
def test_bad_input_names_field_value_and_remedy(refusing, body, field, value, remedy):
    response = refusing.post("/v1/queries", json=body)
    assert response.status_code == 422
    fault = response.json()["errors"][0]
    assert fault["field"].endswith(field)
    assert value in fault["value"]
    assert remedy in fault["remedy"]
    assert refusing.get("/v1/budget").json()["queries_submitted"] == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(refusing, number):
    text = json.dumps({"queries": [{"features": FEATURES, "group": "red"}]}).replace("-2.0", number)
    response = refusing.post("/v1/queries", content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert "queries.0.features.0.2" in response.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"queries": [{"id": ' + b"9" * 5000 + b"}]}"]
)
def test_a_body_that_is_no_json_is_refused_with_an_explanation(refusing, content):
    response = refusing.post("/v1/queries", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.json()["errors"][0]["remedy"]


def test_an_oversized_body_and_one_of_unknown_length_are_refused_before_they_are_read(http):
    most = largest_body_bytes(POOL.record_shape, is_bytes=False, most_records=MAX_QUERIES_PER_REQUEST)
    # The server closes after a body that it did not read, which a connection that is used again may hear too late.
    http.headers["Connection"] = "close"
    assert http.post("/v1/queries", content=b" " * most).status_code == 422
    declared = http.post("/v1/queries", content=b" " * (most + 1))
    assert (declared.status_code, declared.json()["errors"][0]["value"]) == (413, f"{most + 1} bytes")
    assert http.post("/v1/queries", content=iter([b"{}"])).status_code == 411
    assert http.get("/livez").status_code == 200


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        (np.uint8, (8, 8), 1024 * (1024 + 6 * 64)),  # 1,024 records fit
        (np.uint8, (3, 32, 32), 2 * 2**20),  # they do not
        (np.float32, (3, 224, 224), 1024 + 26 * 150_528),  # not even one fits 2 MiB, and one is let in
    ],
)
def test_the_largest_body_follows_from_the_public_shape_of_a_record(dtype, shape, expected):
    assert largest_body_bytes(shape, is_bytes=dtype == np.uint8, most_records=MAX_QUERIES_PER_REQUEST) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"queries": [{"id": 1}], "queries": [{"id": 2}]}',
        b'{"queries": [{"id": 1, "id": 2}]}',
        b'{"queries": [{"id": 1, "\\u0069d": 1}]}',
    ],
)
@pytest.mark.parametrize("route", ["/v1/queries", "/v1/estimate"])
def test_a_key_that_is_given_twice_is_refused_and_nothing_is_charged(http, route, body):
    answer = http.post(route, content=body, headers={"Content-Type": "application/json"})
    (fault,) = answer.json()["errors"]
    assert (answer.status_code, fault["field"]) == (422, "body")
    assert fault["value"] in ("id", "queries")
    assert "given twice" in fault["remedy"]
    assert http.get("/v1/budget").json()["queries_submitted"] == 0


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/"])
def test_paths_without_a_token_answer_head_and_options(http, path):
    got = http.get(path, headers={"Authorization": ""})
    head = http.head(path, headers={"Authorization": ""})
    assert (head.status_code, head.content) == (200, b"")
    assert {name: head.headers[name] for name in ("content-length", "content-type", "cache-control")} == {
        name: got.headers[name] for name in ("content-length", "content-type", "cache-control")
    }
    options = http.options(path, headers={"Authorization": ""})
    assert (options.status_code, options.content, options.headers["allow"]) == (204, b"", "GET, HEAD, OPTIONS")
    refused = http.post(path, headers={"Authorization": ""})
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}
    assert http.get("/v1/budget").status_code == 200  # the connection is in order


def test_a_service_that_is_not_ready_says_so_to_head(service):
    def lost(_):
        raise VotesUnavailableError("gone")

    url = service(count_votes=lost)
    assert httpx.post(f"{url}/v1/queries", json=ids([1])).status_code == 503
    assert httpx.head(f"{url}/readyz").status_code == httpx.get(f"{url}/readyz").status_code == 503


def test_unknown_paths_and_methods_are_explained(refusing):
    for response in (refusing.get("/v1/votes"), refusing.delete("/v1/budget"), refusing.get("/v1/queries/xyz")):
        assert response.status_code in (404, 405, 422)
        assert set(response.json()["errors"][0]) == {"field", "value", "remedy"}
    assert refusing.get(f"/v1/queries/{'0' * 64}").status_code == 404


def test_each_role_sees_its_own(http):
    def status(path, token):
        return http.get(path, headers={"Authorization": token}).status_code

    for path in ("/v1/budget", "/v1/statement", "/metrics", "/v1/operator/ledger", "/v1/no-such-thing"):
        assert status(path, "") == status(path, "Bearer wrong") == status(path, ANALYST) == 401
    # Not by the client: it sends a token of its own.
    for headers, value in (({}, "no header"), ({"Authorization": "Bearer wrong"}, "(not shown)")):
        refused = httpx.get(f"{http.base_url}/v1/budget", headers=headers)
        assert (refused.status_code, refused.json()["errors"][0]["value"]) == (401, value)
    assert status("/v1/budget", f"Bearer {ANALYST}") == status("/v1/budget", f"bearer {OPERATOR}") == 200
    assert status("/v1/operator/ledger", f"Bearer {ANALYST}") == 403
    assert status("/v1/operator/ledger", f"Bearer {OPERATOR}") == 200
    assert [status(path, "") for path in ("/", "/livez", "/readyz", "/healthz")] == [200] * 4
    # Both name groups and columns.
    for path in ("/docs", "/openapi.json"):
        assert (status(path, ""), status(path, f"Bearer {ANALYST}")) == (401, 200)


def test_two_tokens_in_one_request_are_refused(http):
    both = [("Authorization", f"Bearer {OPERATOR}"), ("Authorization", f"Bearer {ANALYST}")]
    for path in ("/v1/budget", "/v1/operator/ledger", "/"):
        refused = httpx.get(f"{http.base_url}{path}", headers=both)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, "Authorization")


def test_every_response_is_kept_by_nobody_and_of_its_own_type(http):
    for answer in (http.get("/v1/budget"), http.get("/livez"), http.get("/v1/no"), httpx.get(f"{http.base_url}/v1/me")):
        assert answer.headers.get_list("cache-control") == ["no-store"]
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert "strict-transport-security" not in answer.headers
    over_tls = http.get("/v1/budget", headers={"X-Forwarded-Proto": "https"})
    assert "max-age" in over_tls.headers["strict-transport-security"]


def test_no_redirect_repeats_the_host_that_was_asked_for(http):
    answer = http.get("/v1/budget/", headers={"Host": "evil.example"})
    assert answer.status_code == 404
    assert "evil.example" not in str(answer.headers) + answer.text


def test_without_tokens_a_foreign_host_name_and_an_operator_s_route_are_refused(service):
    with httpx.Client(base_url=service(), timeout=120) as http:
        assert http.get("/v1/budget").status_code == 200
        assert http.get("/v1/budget", headers={"Host": "rebound.example"}).status_code == 400
        assert http.get("/v1/operator/ledger").status_code == 403


def test_the_operator_sees_reasons_and_the_price_that_depends_on_votes(http):
    asked = replies(http.post("/v1/queries", json=ids(range(150))))
    page = http.get("/v1/operator/ledger?start=100&limit=1000", headers=AS_OPERATOR).json()
    assert (page["total"], len(page["entries"])) == (150, 50)
    assert [entry["key"] for entry in page["entries"]] == [reply["key"] for reply in asked[100:]]
    assert 0 < page["epsilon_data_dependent"] < http.get("/v1/budget").json()["epsilon_submitted"]
    assert "votes" not in json.dumps(page)
    assert {entry["caller"] for entry in page["entries"]} == {"analyst-1"}
    assert len({(entry["request"], entry["at_s"]) for entry in page["entries"]}) == 1


def test_a_quota_counts_new_queries_only(service):
    url = service(tokens=tokens_of_both_roles(), quota=QuotaRule(max_queries=10, period_s=86400))
    with httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {ANALYST}"}) as http:
        replies(http.post("/v1/queries", json=ids(range(8))))
        replies(http.post("/v1/queries", json=ids(range(8))))
        refused = http.post("/v1/queries", json=ids(range(12)))
        assert (refused.status_code, refused.json()["errors"][0]["value"]) == (429, "4 new")
        assert int(refused.headers["Retry-After"]) > 0
        assert "2 new queries now" in refused.json()["errors"][0]["remedy"]
        assert "Retry-After" not in http.post("/v1/queries", json=ids(range(20, 31))).headers
        assert http.get("/v1/budget").json()["queries_submitted"] == 8
        replies(http.post("/v1/queries", json=ids(range(12)), headers=AS_OPERATOR))


def test_a_quota_counts_charges_however_many_ask_for_the_same_at_once(service):
    """Twelve times the same ten new ids are ten charges; what a closed budget has no room for is none."""
    there = threading.Event()

    def votes(questions):
        there.wait(0.2)  # so that the others come meanwhile
        return table_votes(questions)

    budget = QueryBudget(kind="query_count", epsilon=None, delta=1e-5, max_queries=15)
    settings = {"tokens": tokens_of_both_roles(), "quota": QuotaRule(max_queries=20, period_s=1e9)}
    url = service(count_votes=votes, terms=dataclasses.replace(TERMS, budget=budget), **settings)
    with httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {ANALYST}"}) as http:
        with concurrent.futures.ThreadPoolExecutor(12) as clients:
            asked = list(clients.map(lambda _: http.post("/v1/queries", json=ids(range(10))), range(12)))
        assert {response.status_code for response in asked} == {200}
        assert len({response.text for response in asked}) == 1
        assert http.get("/v1/budget").json()["queries_submitted"] == 10
        refused = http.post("/v1/queries", json=ids(range(11, 22)))  # eleven where ten are left
        assert "10 new queries now" in refused.json()["errors"][0]["remedy"]
        assert http.post("/v1/queries", json=ids(range(100, 110))).json()["budget_crossed_at"] == 5
        refused = http.post("/v1/queries", json=ids(range(200, 206)))  # of those ten five had room
        assert "5 new queries now" in refused.json()["errors"][0]["remedy"]


def test_a_quota_is_given_back_where_the_vote_failed(service):
    there = threading.Event()

    def votes(questions):
        if not there.is_set():
            raise VotesUnavailableError("gone")
        return table_votes(questions)

    settings = {"tokens": tokens_of_both_roles(), "quota": QuotaRule(max_queries=10, period_s=1e9)}
    with httpx.Client(
        base_url=service(count_votes=votes, **settings), headers={"Authorization": f"Bearer {ANALYST}"}
    ) as http:
        for _ in range(3):
            assert http.post("/v1/queries", json=ids(range(10))).status_code == 503
        there.set()
        assert len(replies(http.post("/v1/queries", json=ids(range(10))))) == 10
        assert http.post("/v1/queries", json=ids([11])).status_code == 429


def test_an_estimate_charges_nothing_and_is_what_asking_then_costs(http):
    replies(http.post("/v1/queries", json=ids(range(5))))
    estimate = http.post("/v1/estimate", json=ids(range(9))).json()
    assert (estimate["new_queries"], estimate["stored_replies"]) == (4, 5)
    assert estimate["now"] == http.get("/v1/budget").json()
    assert http.post("/v1/estimate", json={"count": 4}).json()["afterwards"] == estimate["afterwards"]
    replies(http.post("/v1/queries", json=ids(range(9))))
    assert http.get("/v1/budget").json() == estimate["afterwards"]


def test_a_batch_stops_at_the_query_that_crosses_the_budget_and_says_so(service):
    budget = QueryBudget(kind="query_count", epsilon=None, delta=1e-5, max_queries=12)
    with httpx.Client(base_url=service(terms=dataclasses.replace(TERMS, budget=budget))) as http:
        first = replies(http.post("/v1/queries", json=ids(range(10))))
        response = http.post("/v1/queries", json=ids(range(20)))
        crossed = replies(response)
        assert response.json()["budget_crossed_at"] == 12
        assert crossed[:10] == first
        assert "over_budget" not in {reply["status"] for reply in crossed[:12]}
        assert {reply["status"] for reply in crossed[12:]} == {"over_budget"}
        assert http.get(f"/v1/queries/{crossed[15]['key']}").status_code == 404
        assert replies(http.post("/v1/queries", json=ids(range(12)))) == crossed[:12]


def test_racing_clients_get_one_answer_and_never_pass_the_budget(service):
    budget = QueryBudget(kind="query_count", epsilon=None, delta=1e-5, max_queries=100)
    url = service(terms=dataclasses.replace(TERMS, budget=budget))

    def ask(client_number):
        order = np.random.default_rng(client_number).permutation(150).tolist()
        with httpx.Client(base_url=url, timeout=120) as http:
            batches = [order[start : start + 10] for start in range(0, 150, 10)]
            return {
                reply["key"]: reply for batch in batches for reply in replies(http.post("/v1/queries", json=ids(batch)))
            }

    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        views = list(clients.map(ask, range(8)))
    with httpx.Client(base_url=url, timeout=120) as http:
        assert http.get("/v1/budget").json()["queries_submitted"] == 100
        final = {r["key"]: r for r in replies(http.post("/v1/queries", json=ids(range(150))))}
    assert sum(reply["status"] != "over_budget" for reply in final.values()) == 100
    for view in views:
        assert all(reply == final[key] for key, reply in view.items() if reply["status"] != "over_budget")


def test_an_analyst_who_repeats_and_perturbs_pays_for_every_new_content(http):
    """Repeats are identical and free; a changed record is another query, charged in full, which the budget bounds."""
    record = {"features": FEATURES, "group": "red"}
    repeated = {json.dumps(replies(http.post("/v1/queries", json={"queries": [record]}))) for _ in range(50)}
    assert len(repeated) == 1
    assert http.get("/v1/budget").json()["queries_submitted"] == 1
    near = [[[0.5 + 1e-6 * step, *FEATURES[0][1:]], FEATURES[1]] for step in range(1, 21)]
    answers = replies(http.post("/v1/queries", json={"queries": [{"features": x, "group": "red"} for x in near]}))
    assert len({answer["key"] for answer in answers}) == 20
    assert http.get("/v1/budget").json()["queries_submitted"] == 21


def test_near_copies_average_noise_away_and_each_of_them_is_paid_for(service):
    """The documented limit: 150 near copies find a narrow plurality that 150 repeats do not, for 150 charges."""

    def narrow(questions):
        return np.array([[31, 26, 3]] * len(questions), dtype=np.int64)

    mechanism = dataclasses.replace(TERMS.mechanism, threshold=0)
    gate = dataclasses.replace(TERMS.gate, max_disparity=math.inf)
    url = service(terms=dataclasses.replace(TERMS, mechanism=mechanism, gate=gate), count_votes=narrow)
    with httpx.Client(base_url=url, timeout=120) as http:
        record = {"features": FEATURES, "group": "red"}
        same = {str(replies(http.post("/v1/queries", json={"queries": [record]}))) for _ in range(150)}
        assert len(same) == 1
        assert http.get("/v1/budget").json()["queries_submitted"] == 1
        near = [{"features": [[step / 64, 0, 0], [0, 0, 0]], "group": "red"} for step in range(150)]
        labels = [reply["label"] for reply in replies(http.post("/v1/queries", json={"queries": near}))]
        assert len(set(labels)) > 1
        assert labels.count(0) > 75
        assert http.get("/v1/budget").json()["queries_submitted"] == 151


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (VotesUnavailableError("teacher block 3 of 12 is gone"), "votes"),
        (LedgerError("entry 12 was changed"), "ledger"),
        (sqlite3.OperationalError("disk I/O error 12"), "ledger"),
    ],
)
def test_lost_teachers_and_a_failing_ledger_are_an_explained_503(service, error, field):
    there = threading.Event()

    def votes(questions):
        if not there.is_set():
            raise error
        return table_votes(questions)

    with httpx.Client(base_url=service(count_votes=votes, health_interval_s=60)) as http:
        lost = http.post("/v1/queries", json=ids(range(3)))
        assert (lost.status_code, lost.headers["Retry-After"]) == (503, "2")
        assert lost.json()["errors"][0]["field"] == field
        assert "12" not in lost.text
        assert http.get("/healthz").json() == {"status": "failing", "reasons": [field]}
        there.set()
        assert len(replies(http.post("/v1/queries", json=ids(range(3))))) == 3
        assert http.get("/healthz").json() == {"status": "ok", "reasons": []}


def test_a_defect_shows_no_traceback(service):
    def broken(_):
        raise ZeroDivisionError("the votes were 17 to 3")

    with httpx.Client(base_url=service(count_votes=broken)) as http:
        response = http.post("/v1/queries", json=ids([0]))
    assert response.status_code == 500
    assert "17" not in response.text
    assert "Traceback" not in response.text


@given(st.floats(0, 1e4), st.floats(1e-3, 1))
def test_replies_leave_at_whole_multiples_of_the_step(elapsed_s, step_s):
    wait_s = until_next_step(elapsed_s, step_s)
    assert 0 <= wait_s <= step_s * (1 + 1e-9)
    steps = (elapsed_s + wait_s) / step_s
    assert steps == pytest.approx(round(steps), abs=1e-6)
    assert until_next_step(elapsed_s, 0) == 0
