"""The frame of a report: one HTML file with its style sheet inside, and the words for numbers.

Nothing is fetched, and nothing runs but the scripts that a page brings along. Whoever passes text passes it
unescaped; ``escape`` is applied where it enters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal
from html import escape
from importlib import resources


def page(*, title: str, body: str, style: str = "", scripts: str = "") -> str:
    """A complete document around ``body``, in which no line breaks inside "ε = 2.00".

    ``style`` follows the common style sheet, ``scripts`` is HTML that follows the body.
    """
    style = resource("report.css") + style
    body = re.sub("([γδε]) = ", "\\1\u00a0=\u00a0", body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"{scripts}</body>\n</html>\n"
    )


def resource(name: str) -> str:
    """A text file of this package."""
    return resources.files("fairpate.evaluation").joinpath(name).read_text(encoding="utf-8")


def section(heading: str, intro: str, *parts: str) -> str:
    """A section; ``intro`` is text, ``parts`` are HTML."""
    lead = f"<p>{escape(intro)}</p>" if intro else ""
    return f"<section>\n<h2>{escape(heading)}</h2>{lead}\n{''.join(parts)}\n</section>\n"


def cards(*figures: str) -> str:
    """Cards side by side, one below the other on a phone."""
    return f'<div class="cards">{"".join(figures)}</div>'


def card(heading: str, caption: str, content: str, *, wide: bool = False) -> str:
    """A figure with its heading and caption; ``content`` is HTML."""
    css = "card wide" if wide else "card"
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{css}"><h3>{escape(heading)}</h3>{words}<div class="scroll">{content}</div></figure>\n'


def column(*figures: str) -> str:
    """Cards above one another in one column of ``cards``."""
    return f'<div class="column">{"".join(figures)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells under escaped headings."""
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def count(value: int) -> str:
    """A whole number with separators."""
    return f"{value:,}"


def counted(value: int, noun: str, plural: str | None = None) -> str:
    """``1 seed``, ``2 seeds``; ``plural`` for a noun that takes no s."""
    return f"{count(value)} {noun if value == 1 else plural or f'{noun}s'}"


def percent(share: float, *, digits: int = 1) -> str:
    """A share in per cent, or the word undefined; exactly everything and nothing carry no decimals."""
    if math.isnan(share):
        return "undefined"
    return f"{100 * share:.0f}\u00a0%" if share in (0, 1) else f"{100 * share:.{digits}f}\u00a0%"


def decimal(value: float, *, digits: int = 3) -> str:
    """A number with fixed decimals, or the word undefined."""
    if math.isnan(value):
        return "undefined"
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def epsilon_text(value: float) -> str:
    """An epsilon to two decimals, rounded up: a printed budget is never below the true one.

    The true one is the decimal that ``value`` prints as: 0.07 stays 0.07. For pages, command line and benchmarks.
    """
    if not math.isfinite(value):
        return decimal(value)
    return str(Decimal(repr(float(value))).quantize(Decimal("0.01"), rounding=ROUND_CEILING))


def delta_text(value: float) -> str:
    """A delta in powers of ten, as people write it."""
    rounded = f"{value:.0e}"
    if float(rounded) != value:
        return f"{value:g}"
    mantissa, _, exponent = rounded.partition("e")
    return power_of_ten(int(exponent)) if mantissa == "1" else f"{mantissa}·{power_of_ten(int(exponent))}"


def power_of_ten(exponent: int) -> str:
    """10 with a raised exponent."""
    return f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def course(epsilon_Q: Sequence[float], *, max_points: int = 240) -> list[tuple[float, float]]:
    """(queries posed, epsilon) from (0, 0) to the last query, thinned to what a page can show."""
    num_queries = len(epsilon_Q)
    num_steps = min(num_queries, max_points)
    steps = [round(num_queries * step / num_steps) for step in range(1, num_steps + 1)]
    return [(0.0, 0.0), *((float(step), float(epsilon_Q[step - 1])) for step in steps)] if steps else []
