"""What fair may mean: one table of notions, from which metrics, columns, demands, cards, pages and figures follow.

A notion is a reading of one contingency table (:mod:`fairpate.fairness.gaps`) with a name and words of its own. Four
compare groups, and their value is a gap: 0 is equal treatment. Three bound how often a prediction is wrong, whomever it
is about, and their value is that rate; RaCO-DP (appendix A.2) calls them constraints of performance.

Rates are over answered records: where a reject option answers nobody of a cell, the cell has no rate. A value is NaN,
never 0, where no two groups can be compared, or where no rate has a record. Intervals are bootstrap percentiles over
the evaluated records, or over their persons where these are named (:func:`fairpate.fairness.gaps.bootstrap_interval`).

With two classes the second is the positive one, whose rate equal opportunity and the error rates are about; with more
every class is, against all others, and the worst one counts. With more than two groups demographic parity compares each
with all others together, as FairPATE and RaCO-DP do, and the other gaps the two groups that are furthest apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from fairpate.fairness import gaps
from fairpate.names import nearest
from fairpate.types import DEFAULT_NOTION
from fairpate.types import NotionName as NotionName

DEFAULT = DEFAULT_NOTION


@dataclass(frozen=True, kw_only=True)
class Notion:
    """One row of the table.

    ``measure`` is its name on axes and in columns of a page, ``words`` what is compared, ``formula`` the same in
    symbols (g, h: groups; k: a class; y: the true, p: the predicted one). ``reading`` names its metric in
    ``metrics.json``. ``source`` says where it is defined. ``bounds_rate``: the value is a rate and no gap.
    """

    name: NotionName
    title: str
    measure: str
    words: str
    formula: str
    reading: str
    metric: gaps.Metric
    source: str
    bounds_rate: bool = False


_ROWS = (
    Notion(
        name="demographic_parity",
        title="Demographic parity",
        measure="demographic-parity gap",
        words="how much more often one group is predicted a class than all others together",
        formula="max over g, k: P[p = k | g] - P[p = k | not g]",
        reading="dp_one_vs_rest",
        metric=gaps.dp_one_vs_rest,
        source="FairPATE eq. 1; RaCO-DP definition A.1",
    ),
    Notion(
        name="equalized_odds",
        title="Equalized odds",
        measure="equalized-odds gap",
        words="how far two groups are apart in how often a class is predicted where it is true, or where it is not",
        formula="max over g, h, k: |P[p = k | y = k, g] - P[p = k | y = k, h]|, and the same given y != k",
        reading="eo_lowy",
        metric=gaps.eo_lowy,
        source="DP-FERMI eq. 11 (Hardt et al. 2016 definition 2.1); of two classes also PF-LD section 3",
    ),
    Notion(
        name="equal_opportunity",
        title="Equal opportunity",
        measure="equal-opportunity gap",
        words="how far two groups are apart in how often the positive class is found where it is true",
        formula="max over g, h: |P[p = k | y = k, g] - P[p = k | y = k, h]|, k positive",
        reading="equal_opportunity",
        metric=gaps.found_apart,
        source="Hardt et al. 2016 definition 2.2; of two classes as fairlearn has it",
    ),
    Notion(
        name="accuracy_parity",
        title="Accuracy parity",
        measure="accuracy gap",
        words="how far two groups are apart in how often the prediction is right",
        formula="max over g, h: |P[p = y | g] - P[p = y | h]|",
        reading="accuracy_parity",
        metric=gaps.accuracy_parity,
        source="PF-LD section 3 (the error itself, not the loss)",
    ),
    Notion(
        name="false_negative_rate",
        title="False-negative rate",
        measure="false-negative rate",
        words="how often the positive class is missed where it is true",
        formula="P[p != k | y = k], k positive",
        reading="false_negative_rate",
        metric=gaps.error_rate("fnr"),
        source="RaCO-DP definition A.3",
        bounds_rate=True,
    ),
    Notion(
        name="false_positive_rate",
        title="False-positive rate",
        measure="false-positive rate",
        words="how often the positive class is predicted where it is not true",
        formula="P[p = k | y != k], k positive",
        reading="false_positive_rate",
        metric=gaps.error_rate("fpr"),
        source="RaCO-DP eq. 6, with the cells of all other labels",
        bounds_rate=True,
    ),
    Notion(
        name="false_discovery_rate",
        title="False-discovery rate",
        measure="false-discovery rate",
        words="how often a prediction of the positive class is wrong",
        formula="P[y != k | p = k], k positive",
        reading="false_discovery_rate",
        metric=gaps.error_rate("fdr"),
        source="1 - precision; of the form of RaCO-DP eq. 6 (fairpate.fairness.rate_constraints)",
        bounds_rate=True,
    ),
)
NOTIONS: Mapping[NotionName, Notion] = {notion.name: notion for notion in _ROWS}
"""The table, in the order in which pages list it."""
NAMES: tuple[NotionName, ...] = get_args(NotionName)


def notion_named(name: str) -> NotionName:
    """The notion of this name. ValueError for one that there is not, with the nearest."""
    found = next((known for known in NAMES if known == name.strip()), None)
    if found is None:
        raise ValueError(f"no notion {name!r}{nearest(name, NAMES)}.")
    return found
