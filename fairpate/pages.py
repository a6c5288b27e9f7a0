"""Text and HTML of pages: the glossary, the meaning of (epsilon, delta), numbers as text, and templates.

``python -m fairpate.pages`` writes ``docs/glossary.md`` from ``glossary.yaml``. On a page a term of the glossary is a
button that opens its definition. Every value on a page is escaped, and a browser may fetch nothing for a page.

The meaning of an epsilon is how often an attacker can be right (:func:`least_wrong`). The attacker knows all private
data but one unit, and knows that one of two equally likely cases holds for this unit: present or absent ("add or remove
one"), or one of two contents ("replace one"). From what was published it chooses one case. Let S be the outputs for
which it chooses the first, a = P[S] in the first case and b = P[S] in the second. It is right with probability (1 + a -
b) / 2. Differential privacy gives a <= e^eps b + delta and 1 - b <= e^eps (1 - a) + delta, whose sum is a - b <= (e^eps
- 1 + 2 delta) / (e^eps + 1). Hence it is right with probability at most (e^eps + delta) / (e^eps + 1), which randomised
response that leaks with probability delta reaches (Kairouz, Oh and Viswanath, arXiv 1311.0776).

Shapes: Q charges, in order; costs are Renyi divergences of one order, which add up.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import Any, Literal

import jinja2
import numpy as np
import numpy.typing as npt
import yaml
from markupsafe import Markup

from fairpate.types import REMARKS, UNITS, FloatArray, Relation, Unit

_LEAD = "The terms on FairPATE's pages. The pages show the same definitions for terms with a dotted underline."


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of the glossary: its name, its synonyms, the labels on pages that refer to it, and its meaning."""

    name: str
    meaning: str
    also: Sequence[str] = ()
    labels: Sequence[str] = ()

    @property
    def key(self) -> str:
        """The id of the HTML element that contains this term's meaning."""
        return "term-" + "".join(letter if letter.isalnum() else "-" for letter in self.name.lower())


@cache
def glossary() -> Mapping[str, tuple[Term, ...]]:
    """Return all terms of the glossary by chapter, in the order of the file ``glossary.yaml``."""
    text = files("fairpate").joinpath("glossary.yaml").read_text(encoding="utf-8")
    return {
        chapter: tuple(Term(name=name, **entry) for name, entry in entries.items())
        for chapter, entries in yaml.safe_load(text).items()
    }


@lru_cache(maxsize=1024)
def term_of(word: str) -> Term | None:
    """Return the glossary's term for ``word`` (a name, label or element id, in any case); None if the glossary lacks
    it."""
    terms = (term for chapter in glossary().values() for term in chapter)
    named = ((term, (term.key, term.name, *term.also, *term.labels)) for term in terms)
    return next((term for term, names in named if word.lower() in map(str.lower, names)), None)


def markdown() -> str:
    """Return the glossary as Markdown, which is the content of ``docs/glossary.md``."""
    lines = ["# Glossary", "", _LEAD]
    for chapter, terms in glossary().items():
        lines += ["", f"## {chapter}"]
        for term in terms:
            also = f" Also: {', '.join(term.also)}." if term.also else ""
            lines += ["", f"### {term.name}", "", f"{term.meaning}{also}"]
    return "\n".join(lines) + "\n"


Strength = Literal["bounded", "weak", "void"]
_WEAK, _VOID = 0.05, 0.001  # least share of wrong guesses
# Of wrong guesses: below it, the share of right ones would be a row of nines.
_NEVER = 1e-8

_WHETHER: dict[Unit, str] = {
    "record": "whether one given record was among the private ones",
    "person": "whether one given person was among the people of the private records",
    "sensitive attribute": "whether the sensitive attribute of one given record was used",
}
_WHICH: dict[Unit, str] = {
    "record": "which of two contents one private record has",
    "person": "which of two contents the records of one given person have together",
    "sensitive attribute": "which of two values the sensitive attribute of one given record has",
}


def least_wrong(epsilon: float, delta: float) -> float:
    """Return the least error rate that an (epsilon, delta) guarantee leaves to an attacker. The attacker guesses which
    of two equally likely neighbouring data sets was used. 1/2 is the error rate of a coin; at 0 all guesses may be
    right."""
    if math.isinf(epsilon):
        return 0.0
    # By e^-eps, because e^eps overflows.
    return max(0.0, 1 - delta) * math.exp(-epsilon) / (1 + math.exp(-epsilon))


def most_detected(false_alarms: float, epsilon: float, delta: float) -> float:
    """Return the largest share of privacy units (records or persons) that an attacker can detect as members, given the
    share of ``false_alarms`` among non-members.

    This is the trade-off curve of an (epsilon, delta) guarantee (Kairouz, Oh and Viswanath, arXiv 1311.0776):
    P[detected] <= e^eps P[false alarm] + delta, and 1 - P[false alarm] <= e^eps (1 - P[detected]) + delta.
    """
    missed = max(0.0, math.exp(-epsilon) * (1 - delta - false_alarms))
    # Compared as logarithms: e^eps may overflow.
    found = math.exp(min(epsilon + math.log(false_alarms), 0.0)) + delta if false_alarms else delta
    return min(found, 1 - missed, 1.0)


def strength(epsilon: float, delta: float) -> Strength:
    """Return a word for the strength of an (epsilon, delta) guarantee. An attacker guesses which of two equally likely
    neighbouring data sets was used. The word is ``void`` if the guesses may be right 99.9 % of the time, ``weak`` if 95
    %, otherwise ``bounded``."""
    wrong = least_wrong(epsilon, delta)
    return "void" if wrong <= _VOID else "weak" if wrong <= _WEAK else "bounded"


def most_often_right(epsilon: float, delta: float) -> str:
    """Return, as text in per cent, the largest share of right guesses that an (epsilon, delta) guarantee allows an
    attacker. The attacker guesses which of two equally likely neighbouring data sets was used. The text is rounded up,
    with more digits near 100 %."""
    return right_at_most(least_wrong(epsilon, delta))


def right_at_most(wrong_share: float) -> str:
    """Return, as text in per cent, the share of right guesses of an attacker who is wrong at least in the share
    ``wrong_share`` of all cases. The text is rounded up, with more digits near 100 %."""
    wrong = 100 * Decimal(wrong_share)
    if wrong < 100 * _NEVER:
        return "practically 100\u00a0%"
    # The wrong share is rounded down, so that the right share is rounded up and stays a bound.
    digits = Decimal("0.1") if wrong >= 1 else Decimal(1).scaleb(wrong.adjusted())
    return f"{100 - wrong.quantize(digits, rounding=ROUND_FLOOR)}\u00a0%"


def delta_text(value: float) -> str:
    """Return a delta as text in powers of ten, for pages, remarks and the terminal; with six digits, rounded up, if one
    does not suffice."""
    rounded = f"{value:.0e}"
    if value == 0 or float(rounded) != value:
        return at_most(value, digits=6)
    mantissa, _, exponent = rounded.partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if mantissa == "1" else f"{mantissa}·10{raised}"


_UNDECLARED = 1e-4
MOST_EXPOSED, MOST_DELTA = 10.0, 0.01
"""From this number of units that a mechanism with the same delta may publish whole, on average, and from this delta on,
a command asks before it spends anything. Even one such unit is a reason for a caution: delta has to be far below one in
the number of units (Dwork and Roth 2014, section 2.3; NIST SP 800-226, section 2.3). Ten are a group that other
statistics would show, and a probability of 1 % is none that anyone takes for the whole of a record."""


def is_void_delta(delta: float, units: int | None) -> bool:
    """Return True if ``delta`` is so large for the public number of ``units`` (None: not public) that a guarantee says
    next to nothing."""
    return delta >= MOST_DELTA or (units is not None and delta * units >= MOST_EXPOSED)


def delta_caution(delta: float, units: int | None, unit: Unit) -> str:
    """Return a caution about a ``delta`` that is not below one in the public number of ``units``, or is above
    :data:`MOST_DELTA`; empty for a smaller one. If the number is not public (None), the caution says for which numbers
    ``delta`` would be small enough, unless these are usual ones."""
    if units is None:
        words, known = REMARKS["large_delta_of_unknown"], math.ceil(round(1 / delta, 6))
        return words.format(delta=delta_text(delta), unit=unit, units=known) if delta >= _UNDECLARED else ""
    # Rounded, as 1/n times n may be a little below 1 in floating point.
    exposed = round(delta * units, 9)
    if exposed < 1 and not is_void_delta(delta, units):
        return ""
    return REMARKS["large_delta"].format(delta=delta_text(delta), unit=unit, units=units, exposed=f"{exposed:,.3g}")


def delta_words(delta: float, units: int | None, unit: Unit) -> str:
    """Return a sentence that compares ``delta`` with one in the public number n of protected ``units`` (None: not
    public), below which it has to be: the caution (:func:`delta_caution`) if it is too large."""
    if caution := delta_caution(delta, units, unit):
        return caution
    most = math.ceil(round(1 / delta, 6))
    if units is None:
        return f"How many {unit}s there are is not public; δ is below 1/n for fewer than {most:,}."
    declared = f"below 1 in {units:,}, the declared number of {unit}s"
    return f"δ, roughly the chance that the privacy loss exceeds ε, is 1 in {most:,}: {declared}."


def question(unit: Unit, relation: Relation) -> str:
    """Return the question about one privacy unit on which a guarantee bounds guesses, as the object of "to guess"."""
    is_added = relation == "add or remove one"
    if unit in UNITS:
        return (_WHETHER if is_added else _WHICH)[unit]
    return f"whether one given {unit} {'was behind the votes' if is_added else 'had one of two contents'}"


SEEN: Mapping[bool, str] = {False: "the model", True: "the model and its metrics"}
"""What an attacker sees of a run, by whether its guarantee covers the metrics too."""


def meaning(epsilon: float, delta: float, *, unit: Unit, relation: Relation, seen: str) -> str:
    """Return one or two sentences on what an attacker who sees ``seen`` (the published output, in words) can learn
    about one privacy unit."""
    if math.isinf(epsilon):
        return f"No ε is finite: there is no bound on what can be learned about one {unit}."
    guess = (
        f"Somebody sees {seen}, knows all other private data, and has to guess {question(unit, relation)}; "
        "both are equally likely. The guess"
    )
    share, coin = most_often_right(epsilon, delta), "that of a tossed coin 50\u00a0%"
    if strength(epsilon, delta) == "void":
        return (
            f"{guess} may be right nearly always (up to {share} of the time, {coin}): this ε says next to nothing "
            f"about one {unit}."
        )
    weak = " This is a weak bound." if strength(epsilon, delta) == "weak" else ""
    return f"{guess} is right at most {share} of the time, {coin}.{weak}"


_MOST_SHOWN = 8
_NEARLY = 0.99  # of the worst case


@dataclass(frozen=True, kw_only=True)
class ComparedCosts:
    """Each query's data-dependent privacy cost, compared with its worst case over all possible votes. The comparison
    depends on votes, so only the operator may see it.

    ``of_worst_Q``: each cost as a share of the worst case, 0 to 1; NaN if the worst case is infinite, as without noise.
    ``varies``: whether votes change the cost of any query that was voted on. ``dearest``: indices of the most expensive
    queries, highest cost first; empty if the cost does not vary. ``words``: a summary in sentences.
    """

    of_worst_Q: FloatArray
    varies: bool
    dearest: Sequence[int]
    words: str


def compared_costs(cost_Q: FloatArray, worst_Q: FloatArray, voted_Q: npt.NDArray[np.bool_]) -> ComparedCosts:
    """Compare the data-dependent privacy cost of each query (``cost_Q``) with its worst case over all possible votes
    (``worst_Q``). ``voted_Q`` is True for the queries on which teachers voted."""
    known_Q = np.isfinite(worst_Q) & (worst_Q > 0)
    of_worst_Q, total = np.full(len(cost_Q), math.nan), float(cost_Q.sum())
    of_worst_Q[known_Q] = np.clip(cost_Q[known_Q] / worst_Q[known_Q], 0, 1)
    charged_Q = of_worst_Q[voted_Q]
    # Less than rounding below the worst case is the worst case.
    varies = len(charged_Q) > 0 and not np.isnan(charged_Q).any() and float(charged_Q.min()) < 1 - 1e-9
    if not total:
        words = "No query has cost anything."
    elif not math.isfinite(total):
        words = "Some query has no finite cost."
    elif not varies:
        # A query that was refused before the vote has no cost that depends on votes.
        which = "Every query" if (of_worst_Q > 0).all() else "Every query that was voted on"
        words = f"{which} costs its worst case: here the price does not depend on votes."
    else:
        number = max(1, len(cost_Q) // 10)
        share = percent(float(np.sort(cost_Q)[::-1][:number].sum() / total), digits=0)
        full = int((of_worst_Q >= _NEARLY).sum())
        all_of_it = f"{full:,} of {counted(len(cost_Q), 'query', 'queries')}" if full else "none of them"
        words = (
            f"The published ε counts every query at its worst case. These votes made half of the queries cost "
            f"{percent(float(np.median(of_worst_Q)), digits=0)} of it or more, and {all_of_it} all of it. The "
            f"dearest {number:,} of {len(cost_Q):,} made up {share} of the cost."
        )
    # Stable, so that a page that is drawn again is the same.
    order = np.argsort(-cost_Q, kind="stable")[:_MOST_SHOWN].tolist() if varies else []
    return ComparedCosts(
        of_worst_Q=of_worst_Q, varies=varies, dearest=[query for query in order if cost_Q[query] > 0], words=words
    )


_ALL_DIGITS = Context(prec=400)  # all digits of any float, and two decimals
# Written out: strftime would follow the language of the machine.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def count(value: int | None) -> str:
    """Return a whole number as text with thousands separators. None, a number too small to be shown, becomes "too
    few"."""
    return "too few" if value is None else f"{value:,}"


def counted(value: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as ``1 seed`` or ``2 seeds``. Give the ``plural`` if it is not the noun with
    an s."""
    return f"{value:,} {noun if value == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str]) -> str:
    """Join names as ``a, b and c``; empty for no name."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def percent(share: float, *, digits: int = 1) -> str:
    """Return a share in per cent, or "undefined" for NaN. Exact 0 % and 100 % have no decimals."""
    if math.isnan(share):
        return "undefined"
    return f"{100 * share:.0f}\u00a0%" if share in (0, 1) else f"{100 * share:.{digits}f}\u00a0%"


def decimal(value: float) -> str:
    """Return a number with three decimals; "undefined" for NaN."""
    if math.isnan(value):
        return "undefined"
    return "∞" if math.isinf(value) else f"{value:.3f}"


def interval(found: Any, words: Callable[[float], str] = decimal) -> str:
    """Return the confidence interval of an estimate as text, ``low to high``; "undefined" if its ``low`` is NaN.
    ``words`` formats a number."""
    return "undefined" if math.isnan(found.low) else f"{words(found.low)} to {words(found.high)}"


def estimated(found: Any) -> str:
    """Return an estimated share with its confidence interval as text; if it has no interval, the share alone."""
    return percent(found.value) + ("" if math.isnan(found.low) else f" ({interval(found, percent)})")


def estimate(found: Any) -> tuple[str, str]:
    """Return two texts for an estimated share, ratio or count: its value and its confidence interval."""
    kinds: dict[str, Callable[[float], str]] = {
        "share": percent,
        "ratio": decimal,
        "count": lambda value: count(round(max(value, 0.0))),
    }
    words = kinds[found.kind]
    return words(found.value), interval(found, words)


def number(value: float) -> str:
    """Return a number in its shortest readable form: whole numbers in full, others with three significant digits."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def epsilon_text(value: float, *, digits: int = 2) -> str:
    """Return an epsilon with two decimals, or ``digits``, rounded up: a printed epsilon is never below the true one.

    ``value`` is rounded as the decimal number that it prints as, so that 0.07 stays 0.07.
    """
    if not math.isfinite(value):
        return decimal(value)
    # `quantize` fails where its result has more digits than the context's precision.
    return str(
        Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING, context=_ALL_DIGITS)
    )


def at_most(value: float, *, digits: int = 4) -> str:
    """Return an upper bound as text with ``digits`` significant digits, rounded up: the text is never below the bound.

    ``value`` is rounded as the decimal number that it prints as.
    """
    if not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(rounded):.{digits}g}"


def percent_at_most(share: float) -> str:
    """Return an upper bound on a share in per cent with one decimal, rounded up. Exact 0 % and 100 % have no
    decimals."""
    if not 0 < share < 1:
        return percent(share)
    return f"{(100 * Decimal(repr(float(share)))).quantize(Decimal('0.1'), rounding=ROUND_CEILING)}\u00a0%"


def made_words(made_on: str | None, version: str) -> str:
    """Return the last line of a page, with the date on which it was made and the version of FairPATE.

    ``made_on`` is an ISO 8601 date; None: unknown, and left out.
    """
    if made_on is None:
        return f"FairPATE {version}"
    day = date.fromisoformat(made_on)
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year} · FairPATE {version}"


def in_two_lines(measure: str) -> str:
    """Return the name of a measure in two lines, for a narrow table column: broken at its first hyphen, or else at its
    first space."""
    mark = "-" if "-" in measure else " "
    first, _, second = measure.partition(mark)
    return f"{first}{mark.strip()}\n{second}"


def place(value: float, *, largest: float) -> float:
    """Return the position of a value on an axis from 0 to ``largest``, in per cent of the axis's length; values beyond
    the axis get 0 or 100."""
    return round(100 * min(max(value / largest, 0), 1), 1) if largest > 0 else 0.0


def scale_end(values: Sequence[float]) -> float:
    """Return the end of an axis that starts at 0: a round number >= 0.01 that is at least the largest finite value."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    power = 10.0 ** math.floor(math.log10(max(largest, 0.01)))
    # Rounded, as 3 * 0.1 is a little more than 0.3 in floating point and would be printed so.
    return next(end for step in (1, 1.5, 2, 3, 4, 5, 7.5, 10, 20) if (end := round(step * power, 12)) >= largest)


def name_of(schema: Mapping[str, Any]) -> str:
    """Return the name of ``schema``, a schema in an OpenAPI document; if it has no name, its type."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(map(name_of, schema.get("anyOf") or schema["oneOf"]))
    return str(schema.get("title") or schema.get("type", ""))


_OPENS = re.compile(r'popovertarget="(term-[^"]+)"')
_LOADER = jinja2.PackageLoader("fairpate")
# A name that a template does not get is an error: an empty string would silently leave a number out of a page.
_PAGES = jinja2.Environment(
    loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
# JSON has no NaN: a script in the page could not parse it.
_PAGES.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
_PAGES.globals |= {"term_of": term_of, "name_of": name_of}
_PAGES.globals["resource"] = lambda name: Markup(_LOADER.get_source(_PAGES, name)[0])  # noqa: S704 - our own file
_FILTERS = (count, counted, decimal, estimate, estimated, interval, number, percent, place, scale_end, zip)
_PAGES.filters |= {each.__name__: each for each in _FILTERS}
_PAGES.filters.update(
    indented=partial(json.dumps, indent=2, ensure_ascii=False),
    delta=delta_text,
    epsilon=epsilon_text,
    # The terms that buttons of a page explain, each once, in their order.
    terms=lambda html: [term_of(key) for key in dict.fromkeys(_OPENS.findall(html))],
    transposed=lambda rows: [list(column) for column in zip(*rows, strict=True)],
    # No line break inside "ε = 2.00". The text was escaped before.
    unbroken=lambda html: Markup(re.sub("([γδε]) = ", "\\1\u00a0=\u00a0", html)),  # noqa: S704
)
_PAGES.tests |= {"undefined_number": math.isnan, "finite_number": math.isfinite}


def render(template: str, **view: Any) -> str:
    """Render a template of ``fairpate/templates`` as one HTML document; the keyword arguments are the values of its
    variables."""
    return _PAGES.get_template(template).render(**view)


HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""Headers with which a browser fetches nothing for the page, even if a value in it asks for that."""


if __name__ == "__main__":
    sys.stdout.write(markdown())
