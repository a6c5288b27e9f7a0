"""Comparisons in Python: run a sweep, read its rows, ask for the frontier and for a choice on it."""

from fairpate.config import SweepConfig
from fairpate.fairness.rates import NOTIONS
from fairpate.report.frontier import (
    Frontier,
    Panel,
    Point,
    Row,
    SelectionRule,
    best_error,
    by_panel,
    frontier,
    points_of,
    select,
)
from fairpate.run.compare import Comparison, compare_methods, summarise_comparison
from fairpate.run.specify import Demand, achievable
from fairpate.run.sweep import read_rows

__all__ = [
    "NOTIONS",
    "Comparison",
    "Demand",
    "Frontier",
    "Panel",
    "Point",
    "Row",
    "SelectionRule",
    "SweepConfig",
    "achievable",
    "best_error",
    "by_panel",
    "compare_methods",
    "frontier",
    "points_of",
    "read_rows",
    "select",
    "summarise_comparison",
]
