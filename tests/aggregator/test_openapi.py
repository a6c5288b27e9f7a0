"""Any request against the OpenAPI document: what it admits is accepted, what it excludes is refused, nothing breaks."""

import httpx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from serving import OPERATOR, running, tokens_of_both_roles

from fairpate.http_server import RequestRate

pytestmark = pytest.mark.usefixtures("light_runs")

AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
WITH_INPUT = ("POST /v1/queries", "GET /v1/queries/{key}", "POST /v1/estimate", "GET /v1/operator/ledger")
WITH_INPUT += ("POST /v1/answers",)
WITHOUT = ("GET /v1/budget", "GET /v1/statement", "GET /metrics")
WITHOUT += ("GET /livez", "GET /readyz", "GET /healthz", "GET /v1/about", "GET /v1/state", "GET /v1/me")
WITHOUT += ("GET /v1/operator/overview", "GET /v1/operator/metrics", "POST /v1/operator/verification")
STREAMS = ("GET /v1/events", "GET /v1/operator/events")
ADMITTED, EXCLUDED = "positive", "negative"  # as schemathesis calls what it makes
VARIED = [(route, mode) for route in WITH_INPUT for mode in (ADMITTED, EXCLUDED)]
CASES = [(route, ADMITTED, 3) for route in WITHOUT] + [(*case, 8) for case in VARIED]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with running(
        tmp_path_factory.mktemp("ledger") / "ledger.sqlite", tokens=tokens_of_both_roles(), strangers=RequestRate()
    ) as url:
        yield url


@pytest.fixture(scope="module")
def operations(url):
    import schemathesis  # takes seconds, which only these cases need

    document = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=AS_OPERATOR)
    return {operation.label: operation for operation in (result.ok() for result in document.get_all_operations())}


def test_the_document_holds_these_routes_and_no_other(url):
    paths = httpx.get(f"{url}/openapi.json", headers=AS_OPERATOR).json()["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert set(routes) == {*WITH_INPUT, *WITHOUT, *STREAMS}


@pytest.mark.slow
@pytest.mark.parametrize(("route", "mode", "num_requests"), CASES)
def test_every_request_gets_the_response_that_the_document_promises(operations, route, mode, num_requests):
    from schemathesis import GenerationMode

    requests = 0

    @settings(max_examples=num_requests, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operations[route].as_strategy(generation_mode=GenerationMode(mode)))
    def check(case):
        nonlocal requests
        assume(all(value not in ([], {}) for value in (case.query or {}).values()))  # such a field is sent as nothing
        requests += 1
        response = case.call_and_validate(headers={"Authorization": f"Bearer {OPERATOR}"}, timeout=120)
        assert b"Traceback" not in response.content

    check()
    assert requests


def test_the_document_says_which_routes_need_a_token(url):
    document = httpx.get(f"{url}/openapi.json", headers=AS_OPERATOR).json()
    for path, routes in document["paths"].items():
        for method, route in routes.items():
            with httpx.stream(method, url + path) as response:
                needs_token = response.status_code == 401
            assert needs_token == bool(route["security"]), path


def test_every_refusal_has_one_declared_shape(url):
    document = httpx.get(f"{url}/openapi.json", headers=AS_OPERATOR).json()
    assert set(document["components"]["schemas"]["Faults"]["properties"]) == {"errors"}
    for path, routes in document["paths"].items():
        for route in routes.values():
            refusals = [response for status, response in route["responses"].items() if status.startswith("4")]
            schemas = [response["content"]["application/json"]["schema"] for response in refusals]
            assert len(schemas) >= 10, path
            assert all(schema == {"$ref": "#/components/schemas/Faults"} for schema in schemas), path


def test_the_documentation_is_a_page_of_its_own_that_names_every_route_and_fetches_nothing(url):
    page = httpx.get(f"{url}/docs", headers=AS_OPERATOR)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for path in httpx.get(f"{url}/openapi.json", headers=AS_OPERATOR).json()["paths"]:
        assert path in page.text
    assert "<script" not in page.text
    assert "//" not in page.text
