"""The page at ``/``: one file of HTML with its style and script inside, and headers that forbid everything else.

The script and the style are known to the browser by their digests, so that nothing that might ever get into the page
runs. Nothing is fetched but this service's own routes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fairpate import __version__
from fairpate.pages import environment

_PAGES = environment()
_FILES = files("fairpate") / "templates"
_STYLES = ("service.css", "terms.css")


def page(*, needs_token: bool) -> str:
    """The page; ``needs_token``: whether it begins by asking for one."""
    policy = f"; script-src {_digest('service.js')}; connect-src 'self'"
    return _PAGES.get_template("service.html").render(needs_token=needs_token, version=__version__, policy=policy)


@cache
def gateway_page() -> str:
    """The page in front of several services; it names none of them."""
    return _PAGES.get_template("gateway.html").render(version=__version__)


@cache
def page_headers() -> dict[str, str]:
    """Headers of the page."""
    policy = (
        "default-src 'none'",
        f"script-src {_digest('service.js')}",
        f"style-src {_digest(*_STYLES)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def _digest(*names: str) -> str:
    """Of the element that holds the files: a line break before and behind them, as the template has them."""
    text = "\n" + "".join((_FILES / name).read_text(encoding="utf-8") for name in names)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
