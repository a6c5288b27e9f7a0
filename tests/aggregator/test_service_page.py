"""The service's page in a real browser: read, asked, downloaded, and met with everything that goes wrong at night."""

from __future__ import annotations

import dataclasses
import itertools
import json

import httpx
import numpy as np
import pytest
from browser import barriers, faults, needs_axe
from serving import ANALYST, OPERATOR, TERMS, free_port, open_backend, tokens_of_both_roles

from aggregator.service.actor import ServiceSettings
from aggregator.service.api import Facts
from aggregator.session import PublicPool
from fairpate.data.columns import Feature, feature_codes
from fairpate.data.tables import form_of
from fairpate.http_server import HttpServer
from fairpate.pages import delta_text
from fairpate.types import QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

HOSTILE = "<img src=x onerror=alert(1)>"
FORM = form_of(
    feature_codes(
        [
            ("age", Feature(bounds=(17, 90))),
            ("hours per week", Feature(bounds=(0, 99), missing="40")),
            ("work <b>class</b>", Feature(categories=("Private", "State", HOSTILE))),
            ("city", Feature(categories=("A", "B"), other=True)),
        ]
    )
)
WIDTH = sum(map(len, FORM.columns.values()))
TABLE = PublicPool(
    features=np.random.default_rng(1).random((300, WIDTH)).astype(np.float32),
    groups_N=np.arange(300) % 2,
    record_ids=tuple(f"record-{i}" for i in range(300)),
    group_names=("women", "men"),
    label_names=("no income", HOSTILE, "high income"),
    form=FORM,
)
FACTS = Facts(
    run="runs/adult",
    method="FairPATE",
    data="adult",
    task="income above 50,000 dollars",
    attribute="sex",
    record="13 features, seen as 52 coordinates of the public embedding",
)


@pytest.fixture
def serve(tmp_path):
    """``serve(max_queries, tokens)`` is a server with its URL; it is stopped after the test."""
    servers = []

    def start(*, max_queries=1000, tokens=tokens_of_both_roles, port=None):
        budget = QueryBudget(kind="query_count", epsilon=None, delta=1e-5, max_queries=max_queries)
        terms = dataclasses.replace(TERMS, budget=budget)
        backend = open_backend(tmp_path / "ledger.sqlite", terms=terms, pool=TABLE, facts=FACTS)
        settings = ServiceSettings(port=port or free_port(), **({"tokens": tokens()} if tokens else {}))
        server = HttpServer(backend.app, settings)
        servers.append((server, backend))
        return server, f"http://127.0.0.1:{settings.port}"

    yield start
    for server, backend in servers:
        server.stop()
        backend.close()


def enter(tab, url, token, *, width=1280, height=900):
    tab.run("sessionStorage.clear()") if tab.run("location.protocol") == "http:" else None
    tab.open(url, width=width, height=height)
    tab.run(f"byId('token').value = {token!r}; byId('access').requestSubmit()")
    assert tab.until("!byId('main').hidden && byId('left').textContent", seconds=20)


def ask(tab, numbers):
    tab.run(f"byId('numbers').value = {numbers!r}; byId('ask').requestSubmit()")
    assert tab.until("!byId('submit').disabled && /answered/.test(byId('told').textContent)", seconds=20)


def text(tab, name):
    return tab.run(f"byId({name!r}).innerText")


def looks(tab, path, width):
    """A picture for people, and what a picture must not show: anything wider than the screen."""
    tab.picture(path)
    assert tab.run("document.documentElement.scrollWidth") <= width


def test_an_analyst_reads_asks_and_downloads_on_a_desk_and_on_a_phone(tab, serve, tmp_path):
    _, url = serve()
    for width in (1280, 390):
        enter(tab, url, ANALYST, width=width)
        tab.run("byId('numbers').value = '0:20'; byId('numbers').dispatchEvent(new Event('input', {bubbles: true}))")
        assert tab.until("byId('cost').textContent", seconds=10)
        ask(tab, "0:20")
        assert tab.until("/980 queries left of 1,000/.test(byId('left').textContent)", seconds=10)
        assert tab.run("byId('operator').hidden")
        looks(tab, tmp_path / f"analyst-{width}.png", width)
        assert faults(tab) == []
    assert tab.until("/You were charged with 20 queries/.test(byId('own').textContent)", seconds=10)
    told = {name: text(tab, name) for name in ("about", "answers", "guarantee")}
    assert all(word in told["about"] for word in ("adult", "income above 50,000 dollars", "women, men", "60 teachers"))
    assert HOSTILE in told["about"]
    assert "each of 13 features, seen as 52 coordinates" in told["about"]
    for delta in (1e-5, 2e-6, 2.5e-5, 1.234567e-7, 0.00083, 0.25, 0.5, 1 / 30162):
        assert tab.run(f"delta({delta!r})") == delta_text(delta)
    assert "Nothing is bounded: the noise is seeded." in told["guarantee"]
    assert "says next to nothing about one record" in told["guarantee"]  # its noise is a test's
    assert tab.run("document.querySelectorAll('main img').length") == 0
    assert all(asked.startswith((url, "about:", "blob:", "data:")) for asked in tab.requests)
    assert not any(ANALYST in asked for asked in tab.requests)


def test_a_record_that_is_typed_is_the_record_of_its_features(tab, serve):
    _, url = serve()
    enter(tab, url, ANALYST)
    typed = ["30", "", "State", "elsewhere"]
    tab.run("document.querySelector('[value=record]').click(); choose()")
    tab.run(f"{json.dumps(typed)}.forEach((value, i) => {{ byId(`column-${{i}}`).value = value; }})")
    tab.run("byId('group').value = 'men'; byId('ask').requestSubmit()")
    assert tab.until("/1 query answered/.test(byId('told').textContent)", seconds=20)
    features = FORM.encode({"age": 30.0, "work <b>class</b>": "State", "city": "elsewhere"}).tolist()
    body = {"queries": [{"features": features, "group": "men"}]}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ANALYST}"}) as http:
        assert http.post("/v1/estimate", json=body).json()["stored_replies"] == 1
    assert faults(tab) == []


@pytest.mark.slow
def test_the_operator_sees_what_to_do_and_how_long_the_budget_lasts(tab, serve, tmp_path):
    _, url = serve()
    for width in (1280, 390):
        enter(tab, url, OPERATOR, width=width)
        assert tab.until("/Fine|Soon/.test(byId('advice').textContent)", seconds=20)
        ask(tab, "0:150" if width == 1280 else "150:200")
        assert tab.until("/queries left last about|quiet/.test(byId('forecast').textContent)", seconds=20)
        assert tab.until("document.querySelectorAll('#burn-down svg polyline').length === 2", seconds=20)
        tab.run("byId('verify').click()")
        assert tab.until("/hold/.test(byId('verified').textContent)", seconds=20)
        looks(tab, tmp_path / f"operator-{width}.png", width)
        assert faults(tab) == []
    assert "women" in text(tab, "groups")
    assert "operator-1" in text(tab, "callers")
    assert "not confident" in text(tab, "groups")


def test_a_wrong_token_is_said_and_forgotten(tab, serve):
    _, url = serve()
    tab.open(url, width=390, height=800)
    assert faults(tab) == []  # nothing is asked before there is a token
    tab.run("byId('token').value = 'wrong-wrong-wrong-wrong-wrong'; byId('access').requestSubmit()")
    assert tab.until("/token is wrong/.test(byId('trouble').textContent)", seconds=10)
    assert tab.run("sessionStorage.length") == 0
    assert tab.run("document.activeElement.id") == "token"
    assert all("401" in said for said in faults(tab))


@pytest.mark.slow
def test_a_dead_service_is_said_and_found_again(tab, serve, tmp_path):
    server, url = serve()
    enter(tab, url, ANALYST)
    ask(tab, "0:5")
    server.stop()
    assert tab.until("/does not answer/.test(byId('pulse').textContent)", seconds=20)
    tab.run("byId('numbers').value = '7'; byId('ask').requestSubmit()")
    assert tab.until("/Not asked/.test(byId('told').textContent)", seconds=10)
    tab.picture(tmp_path / "dead.png")
    serve(port=int(url.rpartition(":")[2]))
    assert tab.until("/Live/.test(byId('pulse').textContent)", seconds=40)
    assert tab.until("/995 queries left/.test(byId('left').textContent)", seconds=10)


@pytest.mark.slow
def test_a_budget_that_is_used_up_is_said_and_stored_answers_are_given(tab, serve, tmp_path):
    _, url = serve(max_queries=12)
    enter(tab, url, ANALYST)
    ask(tab, "0:20")
    assert "8 not asked" in text(tab, "told")
    assert tab.until("/used up/.test(byId('left').textContent)", seconds=10)
    ask(tab, "0:3")
    assert "not asked" not in text(tab, "told")
    tab.picture(tmp_path / "used-up.png")
    assert faults(tab) == []


def test_every_control_has_a_name_and_the_page_can_be_read_by_its_headings(tab, serve):
    _, url = serve()
    enter(tab, url, OPERATOR)
    controls = "[...document.querySelectorAll('input, select, textarea, button, progress')]"
    named = "c => c.labels?.length || c.textContent.trim() || c.getAttribute('aria-labelledby')"
    assert tab.run(f"{controls}.filter(c => !({named})(c)).map(c => c.outerHTML)") == []
    levels = tab.run("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    identifiers = tab.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(identifiers)) == len(identifiers)
    described = "[...document.querySelectorAll('[aria-describedby], [aria-labelledby]')]"
    missing = "e => !byId(e.getAttribute('aria-describedby') ?? e.getAttribute('aria-labelledby'))"
    assert tab.run(f"{described}.filter({missing}).length") == 0
    assert tab.run("document.documentElement.lang") == "en"


def test_without_tokens_the_page_opens_at_once(tab, serve):
    _, url = serve(tokens=None)
    tab.open(url, width=390, height=800)
    assert tab.until("!byId('main').hidden && byId('left').textContent", seconds=20)
    assert tab.run("byId('access').hidden")
    assert faults(tab) == []


def test_the_page_s_headers_forbid_everything_but_its_own_script(serve):
    _, url = serve()
    response = httpx.get(url)
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["cache-control"] == "no-store"
    assert "//" not in response.text.replace("http://www.w3.org/2000/svg", "").split("<script>")[0]


@needs_axe
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_and_that_of_the_routes_have_no_barrier(tab, serve, width):
    _, url = serve()
    tab.open(url, width=width, height=900)
    assert barriers(tab) == []
    for token in (ANALYST, OPERATOR):
        enter(tab, url, token, width=width)
        ask(tab, "0:60")
        tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert barriers(tab) == []
    tab.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {OPERATOR}"})
    tab.call("Page.navigate", url=f"{url}/docs")
    assert tab.until("location.pathname === '/docs' && document.readyState === 'complete'")
    tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert barriers(tab) == []
