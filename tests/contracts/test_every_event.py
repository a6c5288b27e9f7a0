"""What holds for every event that has a price: pages can name it, and say under what it is priced."""

from __future__ import annotations

import importlib
import pkgutil
from typing import get_args

import pytest

from fairpate import privacy
from fairpate.privacy.accountant import event_kinds
from fairpate.report.records import described_event
from fairpate.types import UNITS, Relation

for module in pkgutil.iter_modules(privacy.__path__):
    importlib.import_module(f"{privacy.__name__}.{module.name}")  # registers its events


@pytest.mark.parametrize("kind", event_kinds().values(), ids=event_kinds())
def test_an_event_has_a_noun_a_unit_and_a_relation(kind: type) -> None:
    noun = getattr(kind, "noun", "")
    assert noun
    assert noun == noun.strip()
    assert described_event({"noun": noun, "count": 1}) == f"1 {noun}"
    assert getattr(kind, "unit", None) in UNITS
    assert getattr(kind, "relation", None) in get_args(Relation)
