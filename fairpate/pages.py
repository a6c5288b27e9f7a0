"""HTML pages from the templates of this package.

Every value that enters a page is escaped, a name that a template lacks is an error, and the frame of every page forbids
a browser to fetch anything. What is HTML already is the style sheets, the scripts and the drawings, marked as such here
and where they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

_LOADER = jinja2.PackageLoader("fairpate")


def environment(**filters: Callable[..., Any]) -> jinja2.Environment:
    """What renders ``fairpate/templates``, with ``filters`` for the words of numbers."""
    made = jinja2.Environment(
        loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(filters)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    made.globals["resource"] = lambda name: Markup(_LOADER.get_source(made, name)[0])  # noqa: S704 - our own file
    return made
