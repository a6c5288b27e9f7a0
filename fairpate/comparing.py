"""Comparisons in Python: run a sweep, read its rows, ask for the frontier and for a choice on it."""

from fairpate.app.compare.records_table import Row, read_rows
from fairpate.app.compare.report import compare_methods, summarise_comparison
from fairpate.app.compare.run import Comparison
from fairpate.compare_config import SweepConfig
from fairpate.evaluation.demands import Demand, achievable
from fairpate.evaluation.frontier import Frontier, Panel, Point, by_panel, frontier, points_of
from fairpate.evaluation.selection import SelectionRule, best_error, select
from fairpate.fairness.notions import NOTIONS

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
