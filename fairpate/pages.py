"""HTML pages from the templates of this package, the words for numbers in them, and the documentation of a service.

Every value that enters a page is escaped, a name that a template lacks is an error, and the frame of every page forbids
a browser to fetch anything. Style sheets, scripts and drawings are HTML already and are marked as such here and where
they are drawn. A word of the glossary is a button that opens its meaning (``parts.html``); each page holds the meanings
of its own words.

The documentation of an HTTP service is made from its OpenAPI document. A page that loads a viewer from another server
is blank without a network, and shows that server who reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import ROUND_CEILING, Context, Decimal
from functools import partial
from typing import Any

import jinja2
from markupsafe import Markup

from fairpate.words import delta_text, term_by_key, term_of

_ALL_DIGITS = Context(prec=400)  # all digits of any float, and two decimals
# Written out: strftime would follow the language of the machine.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def count(value: int | None) -> str:
    """A whole number with separators; None: a number that is too small to be shown."""
    return "too few" if value is None else f"{value:,}"


def counted(value: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, such as ``1 seed`` or ``2 seeds``; ``plural`` if the noun does not just take an s."""
    return f"{count(value)} {noun if value == 1 else plural or f'{noun}s'}"


def percent(share: float, *, digits: int = 1) -> str:
    """A share in per cent, or the word undefined. 0 % and 100 % have no decimals when they are exact."""
    if math.isnan(share):
        return "undefined"
    return f"{100 * share:.0f}\u00a0%" if share in (0, 1) else f"{100 * share:.{digits}f}\u00a0%"


def decimal(value: float) -> str:
    """A number with three decimals, or the word undefined."""
    if math.isnan(value):
        return "undefined"
    return "∞" if math.isinf(value) else f"{value:.3f}"


def interval(found: Any, words: Callable[[float], str] = decimal) -> str:
    """The ends of an interval in ``words``. ``found`` has ``low`` and ``high``, which are NaN if there is no
    interval."""
    return "undefined" if math.isnan(found.low) else f"{words(found.low)} to {words(found.high)}"


def estimated(found: Any) -> str:
    """A share with its interval."""
    return percent(found.value) + ("" if math.isnan(found.low) else f" ({interval(found, percent)})")


def estimate(found: Any) -> tuple[str, str]:
    """The value and the interval of an estimated share, ratio or count."""
    kinds: dict[str, Callable[[float], str]] = {
        "share": percent,
        "ratio": decimal,
        "count": lambda value: count(round(max(value, 0.0))),
    }
    words = kinds[found.kind]
    return words(found.value), interval(found, words)


def number(value: float) -> str:
    """A number in its shortest readable form: whole numbers in full, others with three digits."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def epsilon_text(value: float) -> str:
    """An epsilon to two decimals, rounded up: a printed budget is never below the true one.

    The true one is the decimal that ``value`` prints as: 0.07 stays 0.07. For pages, command line and benchmarks.
    """
    if not math.isfinite(value):
        return decimal(value)
    # `quantize` fails where its result has more digits than the context's precision.
    return str(Decimal(repr(float(value))).quantize(Decimal("0.01"), rounding=ROUND_CEILING, context=_ALL_DIGITS))


def made_words(made_on: str | None, version: str) -> str:
    """Say when and with which version a page was made. ``made_on`` is an ISO 8601 date; None: unknown."""
    if made_on is None:
        return f"FairPATE {version}"
    day = date.fromisoformat(made_on)
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year} · FairPATE {version}"


def in_two_lines(measure: str) -> str:
    """Break the name of a measure into two lines, after its first hyphen or else its first space."""
    mark = "-" if "-" in measure else " "
    first, _, second = measure.partition(mark)
    return f"{first}{mark.strip()}\n{second}"


def place(value: float, *, largest: float) -> float:
    """The position of a value between 0 and ``largest``, in per cent."""
    return round(100 * min(max(value / largest, 0), 1), 1) if largest > 0 else 0.0


def scale_end(values: Sequence[float]) -> float:
    """The end of an axis that starts at 0: a round number, at least .01, that no finite value exceeds."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    power = 10.0 ** math.floor(math.log10(max(largest, 0.01)))
    # Rounded, as 3 * 0.1 is a little more than 0.3 in floating point and would be printed so.
    return next(end for step in (1, 1.5, 2, 3, 4, 5, 7.5, 10, 20) if (end := round(step * power, 12)) >= largest)


_OPENS = re.compile(r'popovertarget="(term-[^"]+)"')
_LOADER = jinja2.PackageLoader("fairpate")
_PAGES = jinja2.Environment(
    loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
# JSON has no NaN: a script in the page could not parse it.
_PAGES.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
_PAGES.globals["term_of"] = term_of
_PAGES.globals["resource"] = lambda name: Markup(_LOADER.get_source(_PAGES, name)[0])  # noqa: S704 - our own file
_FILTERS = (count, counted, decimal, estimate, estimated, interval, number, percent, place, scale_end, zip)
_PAGES.filters |= {each.__name__: each for each in _FILTERS}
_PAGES.filters.update(
    indented=partial(json.dumps, indent=2, ensure_ascii=False),
    delta=delta_text,
    epsilon=epsilon_text,
    # The terms that buttons of a page explain, each once, in their order.
    terms=lambda html: [term_by_key(key) for key in dict.fromkeys(_OPENS.findall(html))],
    transposed=lambda rows: [list(column) for column in zip(*rows, strict=True)],
    # No line break inside "ε = 2.00". The text was escaped before.
    unbroken=lambda html: Markup(re.sub("([γδε]) = ", "\\1\u00a0=\u00a0", html)),  # noqa: S704
)
_PAGES.tests |= {"undefined_number": math.isnan, "finite_number": math.isfinite}


def render(template: str, **view: Any) -> str:
    """Render a template of ``fairpate/templates`` as one HTML document; ``view`` holds the names that it uses."""
    return _PAGES.get_template(template).render(**view)


Json = Mapping[str, Any]
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""With these a browser fetches nothing for the page, even if a value in it asks for that."""


def api_page(document: Json) -> str:
    """Return the page of an OpenAPI 3 document as HTML: every route with its parameters, bodies and responses."""
    return render("api.html", document=document, name_of=_name)


def _name(schema: Json) -> str:
    """Return the name of a schema, or its kind where it has none."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_name(part) for part in schema.get("anyOf") or schema["oneOf"])
    return str(schema.get("title") or schema.get("type", ""))
