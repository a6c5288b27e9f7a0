"""What a service is about, in public words: the data set, what is released of it, and how a record is written down."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from aggregator.ledger.budget import epsilon_fixed_beforehand
from aggregator.ledger.terms import LedgerTerms
from aggregator.service.questions import PublicPool
from aggregator.service.tokens import Caller
from fairpate.meaning import delta_text, meaning
from fairpate.privacy.discrete_gaussian import OS_ENTROPY
from fairpate.types import GateRule

_COLD_STARTS = {"group": "for a group", "cell": "for a group and a class", "all_groups": "for every group"}
_SEEN = "all replies to all analysts together"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public words that only the run knows; empty where nobody told. ``record``: what one is, beside its numbers."""

    run: str = "this run"
    method: str = ""
    data: str = ""
    task: str = ""
    attribute: str = "group"
    record: str = ""


def about_json(facts: Facts, pool: PublicPool, terms: LedgerTerms, caller: Caller) -> dict[str, Any]:
    """A :class:`aggregator.service.wire.About`."""
    form = pool.form
    return {
        **dataclasses.asdict(facts),
        "mechanism": f"{terms.num_teachers:,} {terms.mechanism.voters} vote. {terms.mechanism.describe()}.",
        "gate": gate_words(terms.gate),
        "guarantee": _guarantee(terms),
        "is_private": terms.noise == OS_ENTROPY,
        "may_publish": terms.publication is not None,
        "form": None if form is None else [dataclasses.asdict(field) for field in form.fields],
        "takes_posted": pool.takes_posted,
        "caller": {"name": caller.name, "role": caller.role},
    }


def gate_words(rule: GateRule) -> str:
    """What is refused for the sake of parity."""
    if math.isinf(rule.max_disparity):
        return "No fairness gate: answers are not held to parity between groups."
    return (
        f"Shares of an answer may differ between groups by less than {rule.max_disparity:g}, after {rule.min_count} "
        f"answers {_COLD_STARTS[rule.cold_start]}; what would break that is refused, and charged like an answer."
    )


def _guarantee(terms: LedgerTerms) -> str:
    epsilon = epsilon_fixed_beforehand(terms)
    if epsilon is None:
        return "Votes decide when the budget ends, which leaks: there is no guarantee that held beforehand."
    said = meaning(epsilon, terms.budget.delta, unit=terms.unit, relation=terms.relation, seen=_SEEN)
    if terms.noise != OS_ENTROPY:
        said = f"Nothing is bounded: the noise is seeded. With fresh noise: {said[0].lower()}{said[1:]}"
    limit = f"ε = {epsilon:.4g}, δ = {delta_text(terms.budget.delta)}, {terms.relation}"
    return f"{said} That is the limit of this budget ({limit}). Other releases on the same records add to it."
