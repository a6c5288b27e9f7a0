"""The student on a real Ray Serve: replicas that predict, one gate that counts for all of them."""

import asyncio
import json
import socket
from functools import partial
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from two_groups import untrained_student

from fairpate.data.columns import Feature, feature_codes
from fairpate.data.tables import form_of
from fairpate.fairness.gate import filter_stream
from fairpate.http_server import FaultError, Guard, RequestRate
from fairpate.types import GateRule, KnownCaller
from student.server import (
    MAX_RECORDS_PER_REQUEST,
    Record,
    StudentReplica,
    read_features,
    student_app,
    student_in_one_process,
    student_served,
)
from student.student import save_student

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

RULE = GateRule(max_disparity=0.05, min_count=10)


@pytest.fixture(scope="module")
def student():
    return untrained_student(RULE)


@pytest.fixture(scope="module")
def url(student, ray_session, tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "student.safetensors"
    save_student(student, path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with student_served(path, host="127.0.0.1", port=port, num_replicas=2, cpus_per_replica=0):
        yield f"http://127.0.0.1:{port}"


def records_of_two_groups():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((120, 4)).astype(np.float32)
    groups = generator.integers(0, 2, 120)
    x[groups == 1, 0] += 1.5
    return x, groups


def gated_as_one_stream(student):
    """The answers to all records in one stream, None where IDP3 refuses."""
    x, groups = records_of_two_groups()
    labels = student.predict(torch.from_numpy(x), groups).labels
    expected = filter_stream(labels, groups, rule=RULE, num_groups=2, num_classes=2)
    return [int(label) if ok else None for label, ok in zip(labels, expected, strict=True)]


def in_requests_of_eight(student):
    x, groups = records_of_two_groups()
    for start in range(0, 120, 8):
        yield [
            {"features": x[i].tolist(), "group": student.card.group_names[groups[i]]} for i in range(start, start + 8)
        ]


def test_one_process_gates_all_requests_as_one_stream(student, tmp_path):
    save_student(student, tmp_path / "student.safetensors")
    app = student_in_one_process(tmp_path / "student.safetensors")

    async def asked():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
            shown = []
            for records in in_requests_of_eight(student):
                shown += (await client.post("/v1/predictions", json={"records": records})).json()["labels"]
            return shown

    shown = asyncio.run(asked())
    assert shown == gated_as_one_stream(student)
    assert None in shown


@pytest.mark.slow
def test_replicas_share_one_gate(url, student):
    """Many small requests, spread over two replicas, are gated as one stream is."""
    expected = gated_as_one_stream(student)
    shown = []
    for records in in_requests_of_eight(student):
        shown += httpx.post(f"{url}/v1/predictions", json={"records": records}, timeout=120).json()["labels"]
    assert shown == expected
    assert None in shown
    assert httpx.get(f"{url}/v1/student").json()["group_names"] == ["red", "green"]
    bad = httpx.post(f"{url}/v1/predictions", json={"records": [{"features": [1, 2, 3], "group": "red"}]})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "records.0.features")


@pytest.mark.parametrize("features", [[1, 2, 3], [[1, 2, 3, 4]], [1, 2, 3, "x"], [1, 2, 3, 1e39], [1, [2], 3, 4]])
def test_a_record_of_another_shape_or_range_is_refused(features):
    with pytest.raises(FaultError, match="Expected"):
        read_features(Record(features=features, group="red"), 0, untrained_student().record_shape)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One copy without Ray, whose records of four numbers take at most 1024 + 26 * 4 bytes of a body."""
    path, threads = tmp_path_factory.mktemp("alone") / "student.safetensors", torch.get_num_threads()
    save_student(untrained_student(), path)
    replica = StudentReplica(path, None)
    torch.set_num_threads(threads)
    app = student_app(lambda: replica)

    async def asked(method, path, **content):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
            return await client.request(method, path, **content)

    return lambda *request, **content: asyncio.run(asked(*request, **content))


async def pieces():
    yield b"{}"


def test_a_body_that_is_too_large_or_of_unknown_length_is_refused_before_it_is_read(alone):
    most = MAX_RECORDS_PER_REQUEST * (1024 + 26 * 4)
    ask = partial(alone, "POST", "/v1/predictions")
    assert ask(content=b" " * most).status_code == 422
    declared = ask(content=b" " * (most + 1))
    assert (declared.status_code, declared.json()["errors"][0]["value"]) == (413, f"{most + 1} bytes")
    assert ask(content=pieces()).status_code == 411
    record = {"features": [1.0, 2.0, 3.0, 4.0]}
    assert len(ask(json={"records": [record] * 3}).json()["labels"]) == 3


def test_a_body_that_does_not_come_is_waited_for_no_longer():
    async def send_half():
        yield b"{"
        await asyncio.sleep(10)

    async def asked():
        late = Guard(
            pytest.fail,
            tokens=None,
            max_body_bytes=lambda: 10,
            rate=RequestRate(),
            body_timeout_s=0.05,
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(late), base_url="http://student") as client:
            return await client.post("/v1/predictions", content=send_half(), headers={"Content-Length": "2"})

    response = asyncio.run(asked())
    assert (response.status_code, response.json()["errors"][0]["value"]) == (408, "no complete body")


def test_one_caller_s_large_bodies_leave_places_for_others():
    """24 slow connections of one address, and one large request of another."""
    answered = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def slowly():
        yield b" "
        await answered.wait()
        yield b" " * 99_999

    async def asked():
        guard = Guard(app, tokens=None, max_body_bytes=lambda: 10**6, rate=RequestRate())

        async def post(address, content):
            transport = httpx.ASGITransport(guard, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://student") as client:
                return await client.post("/v1/predictions", content=content, headers={"Content-Length": "100000"})

        slow = [asyncio.create_task(post("192.0.2.1", slowly())) for _ in range(24)]
        await asyncio.sleep(0.1)
        other = await post("192.0.2.2", b" " * 100_000)
        answered.set()
        return other, await asyncio.gather(*slow)

    other, slow = asyncio.run(asked())
    assert other.status_code == 200
    assert sorted(answer.status_code for answer in slow) == [200] * 4 + [503] * 20


class OneToken:
    needs_token = True

    def caller(self, token):
        return {"a-token-of-the-ward": KnownCaller(name="ward-3", role="analyst")}.get(token)


def test_a_student_with_tokens_answers_nobody_else_and_counts_requests_by_name():
    app = student_app(
        lambda: SimpleNamespace(max_body_bytes=10), tokens=OneToken(), rate=RequestRate(per_s=0.001, burst=2)
    )

    async def asked():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://student") as client:
            strange = [(await client.get(path)).status_code for path in ("/v1/student", "/docs", "/livez")]
            headers = {"Authorization": "Bearer a-token-of-the-ward"}
            return strange, [(await client.get("/docs", headers=headers)).status_code for _ in range(3)]

    assert asyncio.run(asked()) == ([401, 401, 200], [200, 200, 429])


@pytest.mark.parametrize("features", [["1", 2, 3, 4], [True, 2, 3, 4], [None, 2, 3, 4]])
def test_words_and_truth_values_are_not_numbers(features):
    with pytest.raises(FaultError, match="Expected nested lists of numbers"):
        read_features(Record(features=features, group="red"), 0, untrained_student().record_shape)


@pytest.mark.parametrize("depth", [2, 31, 32, 33, 64, 65, 200, 900])
@pytest.mark.parametrize("inner", ["1", "", "[1, 2], [3, 4]", '"x"'])
def test_features_that_are_nested_deeply_are_refused(alone, depth, inner):
    features = "[" * depth + inner + "]" * depth
    response = alone(
        "POST",
        "/v1/predictions",
        content=f'{{"records": [{{"features": {features}}}]}}',
        headers={"Content-Type": "application/json"},
    )
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "records.0.features")


def test_a_record_with_one_column_twice_is_refused(alone):
    body = b'{"records": [{"columns": {"age": 25, "ward": "A", "age": 90}}]}'
    response = alone("POST", "/v1/predictions", content=body, headers={"Content-Type": "application/json"})
    (fault,) = response.json()["errors"]
    assert (response.status_code, fault["value"]) == (422, "age")


def test_probes_may_ask_by_head_and_options(alone):
    assert [alone(verb, "/readyz").status_code for verb in ("GET", "HEAD", "OPTIONS")] == [200, 200, 204]


@pytest.mark.parametrize(
    ("body", "field", "remedy"),
    [
        (b"{", "body", "Expected JSON; Expecting property name enclosed in double quotes."),
        ({"records": [{}]}, "records.0.features", "A record needs features or columns; add one of the two."),
        ({"records": [{"features": [1, 2, 3]}]}, "records.0.features", "Expected features of shape (4,)."),
        ({"records": [], "x": 1}, "records", "Expected at least 1 item."),
        (
            {"records": [{"age": 30}]},
            "records.0.age",
            "Unknown field; a record has features, a picture, or values by column, as "
            '{"columns": {"age": 30}}; see /docs.',
        ),
    ],
)
def test_a_bad_request_is_refused_with_field_value_and_remedy(alone, body, field, remedy):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = alone("POST", "/v1/predictions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.json()["errors"][0].items() >= {"field": field, "remedy": remedy}.items()


@pytest.mark.parametrize(
    "body", [b"\xff{", b'{"records": %s1%s}' % (b"[" * 100_000, b"]" * 100_000)], ids=["no UTF-8", "too deep"]
)
def test_a_body_that_no_parser_reads_is_told_as_a_body(alone, body):
    response = alone("POST", "/v1/predictions", content=body, headers={"Content-Type": "application/json"})
    (fault,) = response.json()["errors"]
    assert (response.status_code, fault["field"]) == (400, "body")
    assert "aggregator" not in fault["remedy"]


def test_a_body_of_another_type_is_told_which_to_send(alone):
    form = alone("POST", "/v1/predictions", content="a=1", headers={"Content-Type": "text/plain"})
    remedy = "Expected JSON; send Content-Type: application/json."
    assert form.json()["errors"] == [{"field": "body", "value": "a=1", "remedy": remedy}]


def test_another_verb_is_told_which_there_are(alone):
    refused = alone("GET", "/v1/predictions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_who_takes_it_for_an_aggregator_is_told_what_it_is(alone):
    (fault,) = alone("GET", "/v1/budget").json()["errors"]
    assert (fault["field"], fault["value"]) == ("path", "GET /v1/budget")
    assert "a published student is served here, not an aggregator" in fault["remedy"]


def test_a_defect_is_told_without_its_message():
    def broken():
        raise RuntimeError("of the inside")

    async def asked():
        transport = httpx.ASGITransport(student_app(broken), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://student") as client:
            return await client.get("/v1/student")

    response = asyncio.run(asked())
    fault = {"field": "server", "value": "RuntimeError", "remedy": "A defect; inform the operator."}
    assert (response.status_code, response.json()) == (500, {"errors": [fault]})


def test_the_routes_start_before_there_is_a_copy():
    received, sent = iter(["startup", "shutdown"]), []

    async def receive():
        return {"type": f"lifespan.{next(received)}"}

    async def send(message):
        sent.append(message["type"])

    asyncio.run(student_app(pytest.fail)({"type": "lifespan", "state": {}}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.slow
def test_the_documentation_is_a_page_of_its_own_that_fetches_nothing(url):
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "/v1/predictions" in page.text
    assert "<script" not in page.text
    assert "//" not in page.text


def test_a_record_of_a_declared_table_is_given_by_its_columns(tmp_path):
    """The row of the file that says the same, or an error that names the column."""
    described = (("age", Feature(bounds=(0, 100), missing="50")), ("ward", Feature(categories=("A", "B"))))
    form = form_of(feature_codes(described))
    path = tmp_path / "student.safetensors"
    save_student(untrained_student(), path)
    app = student_in_one_process(path, form=form)

    def asked(*records):
        async def posted():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
                columns = (await client.get("/v1/student")).json()["columns"]
                assert [column["name"] for column in columns] == ["age", "ward"]
                return await client.post("/v1/predictions", json={"records": list(records)})

        return asyncio.run(posted())

    same = asked({"columns": {"age": 25, "ward": "B"}}, {"features": [0.25, 0, 0, 1]}, {"columns": {"ward": "B"}})
    assert same.status_code == 200, same.text
    labels = same.json()["labels"]
    assert labels[0] == labels[1]
    record = Record(columns={"age": 25, "ward": "B"})
    assert read_features(record, 0, (4,), form).tolist() == [0.25, 0, 0, 1]
    for wrong, field, value, remedy in (
        ({"columns": {"age": 25, "ward": "C"}}, ".columns.ward", "C", "expected one of A, B"),
        ({"columns": {"aeg": 25, "ward": "A"}}, ".columns.aeg", "25", "Expected one of the columns: age, ward."),
        ({"columns": {"age": "ten", "ward": "A"}}, ".columns.age", "ten", "expected a number from 0 to 100"),
        ({"columns": {"age": 25, "ward": "A"}, "features": [0, 0, 0, 0]}, ".features", "", "either"),
    ):
        found = asked(wrong)
        (fault,) = found.json()["errors"]
        assert (found.status_code, fault["field"], fault["value"]) == (422, f"records.0{field}", value)
        assert remedy in fault["remedy"]
    with pytest.raises(FaultError, match="does not know"):
        read_features(record, 0, (4,))


def test_a_code_is_one_category_whether_sent_as_text_or_as_a_number(tmp_path):
    """`other: true` must not turn the number 2 into another category than the text."""
    described = (("level", Feature(categories=("1", "2"), other=True, unknown=("9",))), ("age", Feature(bounds=(0, 9))))
    form = form_of(feature_codes(described))
    path = tmp_path / "student.safetensors"
    save_student(untrained_student(), path)
    seen = []

    class Listening(type(form)):
        def encode(self, values):
            seen.append(super().encode(values).tolist())
            return np.array(seen[-1], dtype=np.float32)

    app = student_in_one_process(path, form=Listening(columns=form.columns))

    async def posted(body):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
            return await client.post("/v1/predictions", content=body, headers={"content-type": "application/json"})

    for text, place in (
        *(('"2"', 1), ("2", 1), ("2.0", 1), ("2e0", 1), ('" 2 "', 1), ("9", None), ("9.0", None), ('"9"', None)),
        *(("null", None), ("3", 2), ("true", 2), ('"2.0"', 2), ("9007199254740993", 2), ("-0", 2)),
    ):
        reply = asyncio.run(posted(f'{{"records": [{{"columns": {{"level": {text}, "age": 0}}}}]}}'))
        assert reply.status_code == 200, (text, reply.text)
        assert seen.pop() == [float(place == each) for each in range(3)] + [0.0], text
    for text in ("[2]", "{}"):
        reply = asyncio.run(posted(f'{{"records": [{{"columns": {{"level": {text}, "age": 0}}}}]}}'))
        assert reply.status_code == 422
    assert asyncio.run(posted('{"records": [{"columns": {"level": 1, "age": true}}]}')).status_code == 422
