import contextlib
import re
from functools import cache

import fastapi.routing
import httpx
import pytest
from serving import ANALYST, running, tokens_of_both_roles


@pytest.fixture(scope="session", autouse=True)
def _models_of_replies_are_built_once():
    """FastAPI builds the models of replies anew for each service: a process has one, and tests start hundreds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fastapi.routing, "create_model_field", cache(fastapi.routing.create_model_field))
        yield


@pytest.fixture
def path(tmp_path):
    """Where a ledger of the test lies."""
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def short_pauses(monkeypatch):
    """A service tries again, looks again and prices again a tenth of a second later."""
    for place in ("writer._REOPEN_PAUSE_S", "writer._SHARED_S", "api._ANALYSTS_AGE_S", "api._OPERATORS_AGE_S"):
        monkeypatch.setattr(f"aggregator.service.{place}", 0.1)


@pytest.fixture
def service(tmp_path):
    """``service(**settings)`` starts one service and returns its URL; all are stopped after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(tmp_path / "ledger.sqlite", **options))


@pytest.fixture
def http(service):
    """A client of a service with tokens, as the analyst."""
    url = service(tokens=tokens_of_both_roles())
    with httpx.Client(base_url=url, timeout=120, headers={"Authorization": f"Bearer {ANALYST}"}) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where a ledger of the test lies, in each back end."""
    if request.param == "sqlite":
        return tmp_path / "ledger.sqlite"
    return request.getfixturevalue("postgres").url(re.sub(r"\W", "-", request.node.name))


@pytest.fixture
def database(postgres, request):
    """A ledger's place in a database."""
    return postgres.url(re.sub(r"\W", "-", request.node.name))
