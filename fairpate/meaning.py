"""What (epsilon, delta) means for one unit, in one sentence: how often an attacker who guesses can be right.

The attacker knows all of the private data but one unit, and that one up to two possibilities, both equally likely:
there or not ("add or remove one"), or one content or another ("replace one"). From what was published it decides for
one of them. Let S be the outputs for which it decides for the first, a = P[S] under the first and b = P[S] under the
second. It is right with probability (1 + a - b) / 2. Differential privacy says a <= e^eps b + delta and
1 - b <= e^eps (1 - a) + delta, whose sum is a - b <= (e^eps - 1 + 2 delta) / (e^eps + 1). Hence it is right with
probability at most (e^eps + delta) / (e^eps + 1), which randomised response with a leak of probability delta reaches
(Kairouz, Oh and Viswanath, arXiv 1311.0776).
"""

from __future__ import annotations

import math
from decimal import ROUND_FLOOR, Decimal
from typing import Literal

from fairpate.types import UNITS, Relation, Unit

Strength = Literal["bounded", "weak", "void"]
_WEAK, _VOID = 0.05, 0.001  # how often the attacker is wrong, at least
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
    """How often the attacker guesses wrongly at least: 1/2 would be a coin, 0 certainty."""
    if math.isinf(epsilon):
        return 0.0
    # Not e^eps, which overflows.
    return max(0.0, 1 - delta) * math.exp(-epsilon) / (1 + math.exp(-epsilon))


def strength(epsilon: float, delta: float) -> Strength:
    """``weak`` where the attacker may be right 95 % of the time, ``void`` where it may be 99.9 %."""
    wrong = least_wrong(epsilon, delta)
    return "void" if wrong <= _VOID else "weak" if wrong <= _WEAK else "bounded"


def most_often_right(epsilon: float, delta: float) -> str:
    """The largest share of right guesses in per cent, rounded up; close to all, with more digits."""
    wrong = 100 * Decimal(least_wrong(epsilon, delta))
    if wrong < 100 * _NEVER:
        return "practically 100\u00a0%"
    digits = Decimal("0.1") if wrong >= 1 else Decimal(1).scaleb(wrong.adjusted())
    return f"{100 - wrong.quantize(digits, rounding=ROUND_FLOOR)}\u00a0%"


def one_unit(unit: Unit) -> str:
    """``one record``."""
    return f"one {unit}"


def exact_text(value: float) -> str:
    """A number in as few digits as say it exactly: what is typed in a command must mean the same again."""
    short = f"{value:g}"
    return short if float(short) == value else str(value)


def delta_text(value: float) -> str:
    """A delta in powers of ten, as people write it; on pages, in remarks and on a terminal alike."""
    rounded = f"{value:.0e}"
    if value == 0 or float(rounded) != value:
        return f"{value:g}"
    mantissa, _, exponent = rounded.partition("e")
    return _power_of_ten(int(exponent)) if mantissa == "1" else f"{mantissa}·{_power_of_ten(int(exponent))}"


def meaning(epsilon: float, delta: float, *, unit: Unit, relation: Relation, seen: str) -> str:
    """One sentence, or two, of what an attacker who sees ``seen`` can learn about one unit."""
    if math.isinf(epsilon):
        return f"No ε is finite: there is no bound on what can be learned about {one_unit(unit)}."
    who = f"Somebody who sees {seen}, knows all other private data and, at even odds, has to guess"
    guess = f"{who} {_guess(unit, relation)}"
    share = most_often_right(epsilon, delta)
    if strength(epsilon, delta) == "void":
        return (
            f"{guess} may be right nearly always (up to {share} of the time; a coin would be 50\u00a0%): "
            f"this ε says next to nothing about {one_unit(unit)}."
        )
    weak = " This is a weak bound." if strength(epsilon, delta) == "weak" else ""
    return f"{guess} is right at most {share} of the time; a coin would be 50\u00a0%.{weak}"


def _guess(unit: Unit, relation: Relation) -> str:
    """What the attacker cannot tell, as a question."""
    if unit not in UNITS:
        return f"whether one given {unit} " + (
            "was behind the votes" if relation == "add or remove one" else "had one of two contents"
        )
    return (_WHETHER if relation == "add or remove one" else _WHICH)[unit]


def _power_of_ten(exponent: int) -> str:
    """10 with a raised exponent."""
    return f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
