"""The example of a mechanism of one's own: it runs as it stands, and its budget stops where hand arithmetic says."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import numpy as np
import pytest

from aggregator import mechanism

EXAMPLE = Path(__file__).parents[2] / "fairpate" / "examples" / "own_mechanism.py"


def epsilon_by_hand(queries: int) -> float:
    """Counts move by sqrt(2) under noise 20: order * queries / 400, converted by Canonne, Kamath and Steinke 2020."""
    order = np.linspace(1.05, 200, 100_000)
    conversion = np.log((order - 1) / order) - (np.log(1e-5) + np.log(order)) / (order - 1)
    return float((order * queries / 400 + conversion).min())


def test_it_asks_until_its_budget_is_used_up(capsys, monkeypatch):
    monkeypatch.setattr(mechanism, "_KINDS", dict(mechanism._KINDS))  # the example's name is given up again
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    outcomes, spent = capsys.readouterr().out.splitlines()
    counts = ast.literal_eval(outcomes)
    assert set(counts) == {"answer", "fairness", "over budget"}
    charged = counts["answer"] + counts["fairness"]
    assert counts["over budget"] == 1000 - charged
    assert float(spent.split()[1]) == pytest.approx(epsilon_by_hand(charged), abs=2e-3)
    assert epsilon_by_hand(charged) <= 3 < epsilon_by_hand(charged + 1)
