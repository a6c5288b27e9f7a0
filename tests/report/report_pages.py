"""Reports of made-up runs, and a page as a browser reads it."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from fairpate.report.metrics import evaluate
from fairpate.report.records import AnsweredQueries, Guarantee, PrivateReport, PublicReport, RunStatement
from fairpate.report.reject_option import RejectOptionSpread, reject_option_spread
from fairpate.report.run_page import private_report, public_report
from fairpate.types import GateRule

VOID = {"meta", "link", "br"}
OUTCOMES = ["answered", "answered", "fairness", "confidence", "answered", "free"]


def course(epsilon_Q):
    return [(0.0, 0.0), *enumerate(epsilon_Q, start=1)]


def measured(answered=None, group_names=("red", "green")):
    random = np.random.default_rng(0)
    return evaluate(
        random.integers(0, 3, 80),
        labels_N=random.integers(0, 3, 80),
        groups_N=random.integers(0, 2, 80),
        answered_N=answered,
        class_names=["zero", "one", "two"],
        group_names=group_names,
        generator=random,
        num_replicates=50,
    )


GUARANTEE = Guarantee(
    unit="record",
    relation="add or remove one",
    epsilon=6.1234,
    delta=1e-5,
    accounting="rdp",
    noise="os_entropy",
    tuning_accounted=False,
    events=["6 queries to teachers"],
)
VOTING = AnsweredQueries(
    mechanism="Threshold 60 votes, threshold noise σ₁ = 40 votes, label noise σ₂ = 15 votes",
    gate=GateRule(max_disparity=0.1, min_count=2),
    voters="teachers",
    num_teachers=100,
    num_public_records=300,
    submitted=6,
    epsilon_submitted=6.1234,
    answered=3,
    rejected_confidence=1,
    rejected_fairness=1,
    refused_free=1,
    epsilon_course=course([1.0, 2.0, 3.0, 4.0, 5.0, 6.1234]),
    outcomes_GO=[[2, 1, 0, 1], [1, 0, 1, 0]],
    answered_GC=[[1, 1, 0], [0, 0, 1]],
)


def published(**changes) -> PublicReport:
    """A report; what changes of the guarantee or of the votes is named as a field of theirs."""
    parts = {"guarantee": GUARANTEE, "voting": VOTING}
    own = {"title": "Colour digits", "method": "fairpate"} | parts
    for name, value in changes.items():
        part = next((part for part, record in parts.items() if name in record.__dict__ and name not in own), None)
        if part is None:
            own[name] = value
        else:
            own[part] = replace(own[part], **{name: value})
    own = {"evaluations": {"student": measured()}} | own
    headline, may_refuse = next(iter(own["evaluations"].values())), "reject_option" in own
    claims = RunStatement(guarantee=own.pop("guarantee"), measured=headline, has_reject_option=may_refuse)
    return PublicReport(claims=claims, **own)


def reordered(num_groups=2, min_count=2) -> RejectOptionSpread:
    random = np.random.default_rng(0)
    return reject_option_spread(
        random.integers(0, 3, 80),
        random.integers(0, 2, 80),
        true_labels_N=random.integers(0, 3, 80),
        rule=GateRule(max_disparity=0.3, min_count=min_count),
        num_groups=num_groups,
        num_classes=3,
        generator=random,
    )


def operated(public=None, **changes) -> PrivateReport:
    public = public or published()
    fields = {
        "operators": replace(public, claims=replace(public.claims, for_operator=True)),
        "rdp_order": 8.0,
        "rdp_Q": [1e-3, 2e-4, 0.05, 0.1, 0.0, 0.0],
        "rdp_worst_Q": [0.1] * 6,
        "epsilon_data_dependent_course": course([0.5, 0.9, 1.3, 1.9, 2.3456, 2.3456]),
        "epsilon_as_in_paper_course": course([0.5, 0.9, 0.9, 1.5, 1.7891, 1.7891]),
        "votes_QC": [[95, 5, 0], [10, 90, 0], [10, 20, 70], [35, 40, 25], [100, 0, 0], [50, 50, 0]],
        "groups_Q": [0, 0, 0, 1, 1, 0],
        "outcomes_Q": OUTCOMES,
        "at_Q": [1767225600.0 + second for second in range(6)],
        "callers_Q": [""] * 6,
    }
    return PrivateReport(**(fields | changes))


class Page(HTMLParser):
    """Checks nesting while reading; keeps tags, attribute values and text, but for the meanings of words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words, self.meaning = "", 0
        self.feed(html)
        assert not self.open
        self.words = " ".join(self.words.replace("\u00a0", "~").split()).replace("~", "\u00a0")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if ("popover", None) in attrs:
            self.meaning = len(self.open)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if len(self.open) < self.meaning:
            self.meaning = 0

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and not self.meaning:
            self.words += data


PAGES = {
    "public": lambda **changes: public_report(published(**changes)),
    "private": lambda **changes: private_report(operated(public=published(**changes))),
}
