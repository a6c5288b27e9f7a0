"""What events cost under the terms of a target, for tests of methods."""

from __future__ import annotations

from collections.abc import Sequence

from fairpate.config import PrivacyTarget
from fairpate.methods.base import Price, price
from fairpate.privacy.accountant import Event


def priced(events: Sequence[Event], target: PrivacyTarget) -> Price:
    """At the target's delta, under its relation, by its accountant."""
    return price(events, delta=target.delta, relation=target.relation, accounting=target.accounting)
