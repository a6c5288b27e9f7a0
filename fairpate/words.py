"""Words that pages and terminals share: the glossary, what an (epsilon, delta) means, and what queries cost.

Pages show the meaning of a word where it stands (:mod:`fairpate.pages`); ``python -m fairpate.words`` writes
``docs/glossary.md`` from ``glossary.yaml``.

The meaning of an epsilon is how often an attacker can be right (:func:`least_wrong`). The attacker knows all private
data but one unit, and of that unit that one of two equally likely cases holds: present or absent ("add or remove one"),
or one of two contents ("replace one"). From what was published it chooses one. Let S be the outputs for which it
chooses the first case, a = P[S] in the first case and b = P[S] in the second. It is right with probability
(1 + a - b) / 2. Differential privacy gives a <= e^eps b + delta and 1 - b <= e^eps (1 - a) + delta, whose sum is
a - b <= (e^eps - 1 + 2 delta) / (e^eps + 1). Hence it is right with probability at most (e^eps + delta) / (e^eps + 1),
which randomised response that leaks with probability delta reaches (Kairouz, Oh and Viswanath, arXiv 1311.0776).

Shapes: Q charges, in the order in which they came; costs are Renyi divergences of one order, which add up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
import numpy.typing as npt
import yaml

from fairpate.types import UNITS, Relation, Unit

_TITLE = "Glossary"
_LEAD = "The terms on FairPATE's pages. The pages show the same definitions for terms with a dotted underline."


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word, its other names, the labels of pages that it explains, and its meaning."""

    name: str
    also: tuple[str, ...]
    labels: tuple[str, ...]
    meaning: str

    @property
    def key(self) -> str:
        """The id of the HTML element that holds the meaning."""
        return "term-" + "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())


@cache
def glossary() -> Mapping[str, tuple[Term, ...]]:
    """Return all words by chapter, in the order of the file."""
    text = files("fairpate").joinpath("glossary.yaml").read_text(encoding="utf-8")
    return {
        chapter: tuple(
            Term(
                name=name,
                also=tuple(entry.get("also", ())),
                labels=tuple(entry.get("labels", ())),
                meaning=entry["meaning"],
            )
            for name, entry in entries.items()
        )
        for chapter, entries in yaml.safe_load(text).items()
    }


@cache
def _by_name() -> Mapping[str, Term]:
    """Return all names and labels that are looked up, in lower case."""
    terms = [term for chapter in glossary().values() for term in chapter]
    return {name.lower(): term for term in terms for name in (term.name, *term.also, *term.labels)}


def term_of(word: str) -> Term | None:
    """Return the term that explains ``word`` in upper or lower case; None for a word that is not in the glossary."""
    return _by_name().get(word.lower())


@cache
def _by_key() -> Mapping[str, Term]:
    return {term.key: term for terms in glossary().values() for term in terms}


def term_by_key(key: str) -> Term:
    """Return the term whose HTML element has this id. KeyError for another."""
    return _by_key()[key]


def markdown() -> str:
    """Return the text of ``docs/glossary.md``."""
    lines = [f"# {_TITLE}", "", _LEAD]
    for chapter, terms in glossary().items():
        lines += ["", f"## {chapter}"]
        for term in terms:
            also = f" Also: {', '.join(term.also)}." if term.also else ""
            lines += ["", f"### {term.name}", "", f"{term.meaning}{also}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())


Strength = Literal["bounded", "weak", "void"]
_WEAK, _VOID = 0.05, 0.001  # least share of wrong guesses
# Of wrong guesses: below it, the share of right ones would be a row of nines.
_NEVER = 1e-8

_WHETHER: dict[Unit, str] = {
    "record": "whether one given record was among the private ones",
    "person": "whether one given person was among those of the private records",
    "sensitive attribute": "whether the sensitive attribute of one given record was used",
}
_WHICH: dict[Unit, str] = {
    "record": "which of two contents one private record has",
    "person": "which of two contents the records of one given person have together",
    "sensitive attribute": "which of two values the sensitive attribute of one given record has",
}


def least_wrong(epsilon: float, delta: float) -> float:
    """Return the least share of guesses in which the attacker is wrong: 1/2 is a coin, 0 is certainty."""
    if math.isinf(epsilon):
        return 0.0
    # By e^-eps, because e^eps overflows.
    return max(0.0, 1 - delta) * math.exp(-epsilon) / (1 + math.exp(-epsilon))


def most_detected(false_alarms: float, epsilon: float, delta: float) -> float:
    """Return the largest share of units that an attacker can find, with this share of false alarms.

    The trade-off curve of an (epsilon, delta) guarantee (Kairouz, Oh and Viswanath, arXiv 1311.0776): P[found] <=
    e^eps P[false alarm] + delta, and the same for what is not found, with the two exchanged.
    """
    missed = max(0.0, math.exp(-epsilon) * (1 - delta - false_alarms))
    # Compared as logarithms: e^eps may overflow.
    found = math.exp(min(epsilon + math.log(false_alarms), 0.0)) + delta if false_alarms else delta
    return min(found, 1 - missed, 1.0)


def strength(epsilon: float, delta: float) -> Strength:
    """Return ``weak`` if the attacker may be right 95 % of the time, ``void`` if 99.9 %."""
    wrong = least_wrong(epsilon, delta)
    return "void" if wrong <= _VOID else "weak" if wrong <= _WEAK else "bounded"


def most_often_right(epsilon: float, delta: float) -> str:
    """Return the largest share of right guesses in per cent, rounded up; near 100 % with more digits."""
    wrong = 100 * Decimal(least_wrong(epsilon, delta))
    if wrong < 100 * _NEVER:
        return "practically 100\u00a0%"
    # The wrong share is rounded down, so that the right share is rounded up and stays a bound.
    digits = Decimal("0.1") if wrong >= 1 else Decimal(1).scaleb(wrong.adjusted())
    return f"{100 - wrong.quantize(digits, rounding=ROUND_FLOOR)}\u00a0%"


def exact_text(value: float) -> str:
    """Return a number in as few digits as are exact: what is typed in a command must mean the same again."""
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def delta_text(value: float) -> str:
    """Return a delta in powers of ten, as people write it; on pages, in remarks and on a terminal alike."""
    rounded = f"{value:.0e}"
    if value == 0 or float(rounded) != value:
        return f"{value:g}"
    mantissa, _, exponent = rounded.partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


def meaning(epsilon: float, delta: float, *, unit: Unit, relation: Relation, seen: str) -> str:
    """Return one or two sentences on what an attacker who sees ``seen`` can learn about one unit."""
    if math.isinf(epsilon):
        return f"No ε is finite: there is no bound on what can be learned about one {unit}."
    if unit in UNITS:
        guess = (_WHETHER if relation == "add or remove one" else _WHICH)[unit]
    else:
        question = "was behind the votes" if relation == "add or remove one" else "had one of two contents"
        guess = f"whether one given {unit} {question}"
    guess = f"Somebody who sees {seen}, knows all other private data and, at even odds, has to guess {guess}"
    share = most_often_right(epsilon, delta)
    if strength(epsilon, delta) == "void":
        return (
            f"{guess} may be right nearly always (up to {share} of the time; a coin would be 50\u00a0%): "
            f"this ε says next to nothing about one {unit}."
        )
    weak = " This is a weak bound." if strength(epsilon, delta) == "weak" else ""
    return f"{guess} is right at most {share} of the time; a coin would be 50\u00a0%.{weak}"


FloatArray = npt.NDArray[np.float64]
_MOST_SHOWN = 8
_NEARLY = 0.99  # of the worst case


def shares_of_worst(cost_Q: FloatArray, worst_Q: FloatArray) -> FloatArray:
    """Return costs as shares of the worst case, 0 to 1; NaN where that is not finite, as without noise."""
    known_Q = np.isfinite(worst_Q) & (worst_Q > 0)
    share_Q = np.full(len(cost_Q), math.nan)
    share_Q[known_Q] = np.clip(cost_Q[known_Q] / worst_Q[known_Q], 0, 1)
    return share_Q


def votes_matter(of_worst_Q: FloatArray, voted_Q: npt.NDArray[np.bool_]) -> bool:
    """Return whether votes change the cost of a query that was voted on."""
    charged_Q = of_worst_Q[voted_Q]
    # Less than rounding below the worst case is the worst case.
    return len(charged_Q) > 0 and not np.isnan(charged_Q).any() and float(charged_Q.min()) < 1 - 1e-9


def dearest(cost_Q: FloatArray) -> list[int]:
    """Return the queries that cost most, the most expensive first; empty if nothing was charged."""
    order: list[int] = np.argsort(-cost_Q, kind="stable")[:_MOST_SHOWN].tolist()
    return [query for query in order if cost_Q[query] > 0]


def cost_words(cost_Q: FloatArray, of_worst_Q: FloatArray, *, varies: bool) -> str:
    """Return how the cost of queries compares with their worst case, and the share of the most expensive ones; for the
    operator alone."""
    if not len(cost_Q) or not cost_Q.sum():
        return "No query has cost anything."
    if not math.isfinite(cost_Q.sum()):
        return "Some query has no finite cost."
    if not varies:
        # A query that was refused before the vote has no cost that depends on votes.
        which = "Every query" if (of_worst_Q > 0).all() else "Every query that was voted on"
        return f"{which} costs its worst case: here the price does not depend on votes."
    number = max(1, len(cost_Q) // 10)
    share = _percent(float(np.sort(cost_Q)[::-1][:number].sum() / cost_Q.sum()))
    full = int((of_worst_Q >= _NEARLY).sum())
    queries = f"{len(cost_Q):,} {'query' if len(cost_Q) == 1 else 'queries'}"
    all_of_it = f"{full:,} of {queries}" if full else "none of them"
    return (
        f"The published ε counts every query at its worst case. These votes made half of the queries cost "
        f"{_percent(float(np.median(of_worst_Q)))} of it or more, and {all_of_it} all of it. The "
        f"dearest {number:,} of {len(cost_Q):,} made up {share} of the cost."
    )


def _percent(share: float) -> str:
    return "undefined" if math.isnan(share) else f"{100 * share:.0f}\u00a0%"
