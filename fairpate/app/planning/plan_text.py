"""The plans of :mod:`fairpate.app.planning.plan` in words: tables for a terminal, values for a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairpate.app.planning.plan import Plan, Proposal
from fairpate.evaluation.page import epsilon_text
from fairpate.meaning import delta_text
from fairpate.strict_json import strict

_NUM_PLANS = 6


def describe(proposal: Proposal) -> Group:
    """The best plans as tables."""
    source = "these votes" if proposal.from_votes else "the assumption"
    warning = (
        "Operator only: every number below was computed from private votes. Choosing by them costs privacy that no "
        "epsilon here covers."
        if proposal.from_votes
        else "From an assumption and no votes: nothing here costs privacy. Below, the numbers under ε alone are "
        "guarantees."
    )
    notes = (
        f"ε: at delta {delta_text(proposal.delta)}, add or remove one {proposal.unit}, whatever the votes; this is "
        f"what a run publishes.\nby votes, answered, winner kept: what {source} would give; the epsilon by votes "
        "must not be published."
        "\nwinner kept: the share of answers that are the class with most votes, unchanged by noise. It is no "
        "accuracy: where most teachers err, the answer is wrong."
        "\nworth: how many noiseless labels the answers stand for."
    )
    return Group(
        Text(f"{warning}\n{proposal.assumption}\n\nWithin epsilon {proposal.epsilon:g} whatever the votes:"),
        _table(proposal.for_any_votes[:_NUM_PLANS]),
        Text(
            f"\nWithin epsilon {proposal.epsilon:g} by the data-dependent privacy cost alone, which is no guarantee "
            "and leaks:"
        ),
        _table(proposal.for_these_votes[:_NUM_PLANS]),
        Text(f"\n{notes}"),
    )


def _table(found: Sequence[Plan]) -> Table | Text:
    if not found:
        return Text("\n  nothing fits\n")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in (
        *("teachers", "queries", *found[0].mechanism.columns()),
        *("ε", "by votes", "answered", "winner kept", "worth"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in found:
        table.add_row(
            str(plan.num_teachers),
            str(plan.num_queries),
            *plan.mechanism.columns().values(),
            epsilon_text(plan.epsilon),
            epsilon_text(plan.epsilon_data_dependent),
            f"{plan.answered:.0%}",
            "undefined" if math.isnan(plan.winner_kept) else f"{plan.winner_kept:.1%}",
            f"{plan.worth:.0f}",
        )
    return table


def proposal_json(proposal: Proposal) -> dict[str, Any]:
    """The plans as values of strict JSON, in which no threshold, and what is undefined, is null."""

    def rows(found: Sequence[Plan]) -> list[dict[str, Any]]:
        return [{**vars(plan), "mechanism": plan.mechanism.parameters} for plan in found]

    values = {
        "epsilon": proposal.epsilon,
        "delta": proposal.delta,
        "unit": proposal.unit,
        "assumption": proposal.assumption,
        "from_private_votes": proposal.from_votes,
        "right": "as most teachers chose" if proposal.from_votes else "by the assumption",
        "for_any_votes": rows(proposal.for_any_votes),
        "for_these_votes": rows(proposal.for_these_votes),
    }
    return dict(strict(values))
