import contextlib
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from serving import ANALYST, running, tokens_of_both_roles

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from local_postgres import Server, programs


@pytest.fixture
def path(tmp_path):
    """Where a ledger of the test lies."""
    return tmp_path / "ledger.sqlite"


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


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of the session."""
    pytest.importorskip("psycopg", reason="needs `pip install 'fairpate[postgresql]'`")
    if programs() is None:
        pytest.skip("PostgreSQL is not installed")
    # Not below pytest's own folder, which another user may not enter.
    with tempfile.TemporaryDirectory(prefix="fairpate-postgres-") as folder:
        Path(folder).chmod(0o755)
        with Server(Path(folder) / "server") as server:
            yield server
