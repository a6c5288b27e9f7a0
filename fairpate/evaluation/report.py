"""The two pages of a run: one to publish, one for the operator alone.

The public page is a function of ``PublicReport``, which holds released labels, the published statement and metrics on
the test records, and nothing that depends on votes otherwise. The operator's page adds what depends on the votes:
data-dependent costs, consensus, and the ledger as FairPATE's authors published theirs, where a label that the
fairness gate rejects costs nothing. Each page is one self-contained HTML file without scripts.
"""

from __future__ import annotations

from fairpate.evaluation.operator_page import ledgers, operator_banner, query_by_query
from fairpate.evaluation.page import page
from fairpate.evaluation.public_page import (
    answers,
    degenerate_banner,
    footer,
    opening,
    pipeline,
    promises,
    seed_banner,
    student,
)
from fairpate.evaluation.records import GroupOutcomes, Outcome, PrivateReport, PublicReport

__all__ = ["GroupOutcomes", "Outcome", "PrivateReport", "PublicReport", "private_report", "public_report"]


def public_report(report: PublicReport) -> str:
    """The page to publish, as one HTML document."""
    statement = report.statement
    body = (
        seed_banner(statement)
        + degenerate_banner(report.headline)
        + opening(report, "Privacy and fairness report")
        + pipeline(report)
        + answers(report)
        + student(report)
        + promises(report)
        + footer(statement)
    )
    return page(title=f"{report.title} · FairPATE report", body=body)


def private_report(report: PrivateReport) -> str:
    """The operator's page, as one HTML document. It depends on private votes: never publish it."""
    statement = report.public.statement
    body = (
        operator_banner()
        + seed_banner(statement)
        + degenerate_banner(report.public.headline)
        + opening(report.public, "Operator’s report")
        + ledgers(report)
        + query_by_query(report)
        + footer(statement)
    )
    return page(title=f"{report.public.title} · operator only", body=body)
