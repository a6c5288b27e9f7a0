"""HTML pages from the templates of this package.

Every value that enters a page is escaped, a name that a template lacks is an error, and the frame of every page forbids
a browser to fetch anything. What is HTML already is the style sheets, the scripts and the drawings, marked as such here
and where they are drawn. A word of the glossary is a button that opens its meaning (``parts.html``); each page holds
the meanings of its own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

from fairpate.glossary import Term, term_by_key, term_of

_OPENS = re.compile(r'popovertarget="(term-[^"]+)"')
_LOADER = jinja2.PackageLoader("fairpate")


def environment(**filters: Callable[..., Any]) -> jinja2.Environment:
    """What renders ``fairpate/templates``, with ``filters`` for the words of numbers."""
    made = jinja2.Environment(
        loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(filters)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    made.globals["term_of"] = term_of
    made.filters["terms"] = _terms
    made.globals["resource"] = lambda name: Markup(_LOADER.get_source(made, name)[0])  # noqa: S704 - our own file
    return made


def _terms(html: str) -> list[Term]:
    """The words that buttons of ``html`` explain, each once, in their order."""
    return [term_by_key(key) for key in dict.fromkeys(_OPENS.findall(html))]
