"""Whatever groups, classes, data sets and settings are called, a page shows the name and stays the page it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from run_records import run_record

from fairpate.fairness.rates import Population
from fairpate.pages import render
from fairpate.report.frontier import Row
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.report.metrics import evaluate
from fairpate.report.model_card import Card, CardData, CardModel, IntendedUse, card_page
from fairpate.report.population import PrivatePopulation, private_population
from fairpate.report.records import AnsweredQueries, Guarantee, PrivateReport, PublicReport, RunStatement
from fairpate.report.run_page import private_report, public_report
from fairpate.types import GateRule, MechanismParameters

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src='//example.org/x' onerror='alert(1)'> & ' \" ` &lt;b&gt; &amp;",
    "{{ 7 * 7 }}{% raw %}{# gone #}${report}",
    "--> ]]> </style></title></script></svg></td></body> <!-- <![CDATA[",
    r"$\frac{ and ${x}$ \u003c",
]
NAMES = {"hostile": " ".join(HOSTILE), "long": "Ω" * 3000}


class Parsed(HTMLParser):
    """Tags in their order, names of attributes and the text outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data


def guarantee(name: str) -> Guarantee:
    return Guarantee(
        unit="record",
        relation="replace one",
        epsilon=2.0,
        delta=1e-5,
        accounting=name,
        noise=f"seeded {name}",
        tuning_accounted=False,
        events=[name],
        not_protected=name,
        remarks=(name,),
    )


def evaluation(name: str):
    return evaluate(
        [0] * 20,
        labels_N=[0, 1] * 10,
        groups_N=[0, 0, 1, 1] * 5,
        class_names=[name, "1"],
        group_names=[name, "b"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )


def population(name: str) -> PrivatePopulation:
    joint = np.arange(1.0, 13.0).reshape(2, 2, 3)
    found = Population(joint_GYJ=joint, draws_RGYJ=joint + np.zeros((5, 1, 1, 1)))
    return private_population(found, group_names=(name, "b"), class_names=(name, "1"))


def report(name: str, *, votes: bool) -> PublicReport:
    counts = {"answered": 1, "rejected_confidence": 0, "rejected_fairness": 1, "refused_free": 0}
    voting = AnsweredQueries(
        mechanism=MechanismParameters(threshold=60, threshold_stddev_votes=40, noise_stddev_votes=15),
        gate=GateRule(max_disparity=0.1, min_count=2),
        voters="teachers",
        num_teachers=10,
        num_public_records=30,
        submitted=2,
        epsilon_submitted=2.0,
        **counts,
        epsilon_course=[(0, 0.0), (1, 1.0), (2, 2.0)],
        outcomes_GO=[[1, 1, 0, 0], [0, 0, 0, 0]],
        answered_GC=[[1, 0], [0, 0]],
    )
    return PublicReport(
        title=name,
        method=name,
        claims=RunStatement(guarantee=guarantee(name), measured=evaluation(name)),
        evaluations={name: evaluation(name)},
        voting=voting if votes else None,
        private_population=population(name),
    )


def operators(name: str) -> str:
    course = [(0, 0.0), (1, 0.5), (2, 0.9)]
    courses = {"epsilon_data_dependent_course": course, "epsilon_as_in_paper_course": course}
    votes = {"votes_QC": [[9, 1], [2, 7]], "outcomes_Q": ["answered", "fairness"]}
    public = report(name, votes=True)
    votes |= {"rdp_Q": [1e-3, 0.05], "rdp_worst_Q": [0.1, 0.1]}
    votes |= {"groups_Q": [0, 0], "at_Q": [0.0, 1e9], "callers_Q": ["", name]}
    return private_report(PrivateReport(operators=public, rdp_order=8.0, **courses, **votes))


def card(name: str) -> str:
    model = CardModel(
        method=name,
        architecture=name,
        input_shape=(3,),
        classes=(name, "1"),
        groups=(name, "b"),
        sensitive_attribute=name,
        reject_option=None,
        sha256=name,
        made_by=name,
    )
    data = {"task": name, "publisher": name, "address": name, "licence": name, "options": {name: name}}
    return card_page(
        Card(
            model=model,
            private_population=population(name),
            privacy=guarantee(name),
            data=CardData(name=name, kind=name, split_seed=0, **data),
            use=IntendedUse(intended=name, out_of_scope=name, contact=name),
            evaluation=evaluation(name),
        )
    )


def frontier(name: str, *, for_operator: bool) -> str:
    records = [
        run_record(name, data=data, seed=seed, config={name: name, "own": epsilon}, epsilon=epsilon, degenerate=(name,))
        for data in (name, "other")
        for seed in (0, 1)
        for epsilon in (1.0, 2.0)
    ]
    records += [replace(record, method="pate", epsilon_is_data_dependent=for_operator) for record in records]
    fields = {"digest": name, "command": name, "minutes": 1.0}
    rows = [
        Row(method=r.method, data=r.data, seed=r.seed, config=r.config, record=r, has_guarantee=True, **fields)
        for r in records
    ]
    rows.append(Row(method=name, data=name, seed=9, config={}, error=name, has_guarantee=True, **fields))
    return frontier_report(FrontierReport(title=name, rows=rows, for_operator=for_operator))


def service(name: str) -> str:
    route = {
        "description": name,
        "security": [{}],
        "parameters": [{"name": name, "in": "query", "schema": {"type": name}}],
        "requestBody": {"content": {"application/json": {"schema": {"title": name}}}},
        "responses": {name: {"description": name, "content": {name: {"schema": {"title": name}}}}},
    }
    return render(
        "api.html",
        document={
            "info": {"title": name, "version": name, "description": name},
            "paths": {f"/{name}": {"get": route}},
            "components": {"schemas": {name: {"title": name}}},
        },
    )


PAGES = {
    "public report": lambda name: public_report(report(name, votes=True)),
    "public report without votes": lambda name: public_report(report(name, votes=False)),
    "operator's report": operators,
    "card": card,
    "frontier": lambda name: frontier(name, for_operator=False),
    "operator's frontier": lambda name: frontier(name, for_operator=True),
    "service": service,
}


@pytest.fixture(scope="module", params=PAGES)
def page(request):
    """A page as a function of the name that everything has on it, and how it is with a harmless one."""
    make = PAGES[request.param]
    return make, Parsed(make("plain"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=kind, marks=pytest.mark.slow if kind == "long" else ()) for kind, name in NAMES.items()],
)
def test_a_name_is_shown_as_it_is_and_changes_nothing_else(page, name: str) -> None:
    make, harmless = page
    html = make(name)
    found = Parsed(html)
    assert found.tags == harmless.tags
    assert found.attributes == harmless.attributes
    assert not [attribute for attribute in found.attributes if attribute.startswith("on")]
    text = found.text
    for quoted in (repr(name), json.dumps(name, ensure_ascii=False)):  # in a sentence, in a schema
        text = text.replace(quoted[1:-1], name)
    assert text.count(name) == harmless.text.count("plain") > 0
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]*)"', html).group(1)
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    for data in re.findall('<script type="application/json" id="model">(.*?)</script>', html, flags=re.DOTALL):
        model = json.loads(data)
        assert name in {series["name"] for series in model["series"]}
        assert "<" not in data
