"""HTML pages from the templates of this package, and the documentation of a service as one of them.

Every value that enters a page is escaped, a name that a template lacks is an error, and the frame of every page forbids
a browser to fetch anything. Style sheets, scripts and drawings are HTML already and are marked as such here and where
they are drawn. A word of the glossary is a button that opens its meaning (``parts.html``); each page holds the meanings
of its own words.

The documentation of an HTTP service is made from its OpenAPI document. A page that loads a viewer from another server
is blank without a network, and shows that server who reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from fairpate.words import term_by_key, term_of

_OPENS = re.compile(r'popovertarget="(term-[^"]+)"')
_LOADER = jinja2.PackageLoader("fairpate")


def environment(**filters: Callable[..., Any]) -> jinja2.Environment:
    """Return the environment that renders ``fairpate/templates``; ``filters`` write numbers as text."""
    made = jinja2.Environment(
        loader=_LOADER, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(filters)
    # JSON has no NaN: a script in the page could not parse it.
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    made.globals["term_of"] = term_of
    # The terms that buttons of a page explain, each once, in their order.
    made.filters["terms"] = lambda html: [term_by_key(key) for key in dict.fromkeys(_OPENS.findall(html))]
    made.globals["resource"] = lambda name: Markup(_LOADER.get_source(made, name)[0])  # noqa: S704 - our own file
    return made


Json = Mapping[str, Any]
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""With these a browser fetches nothing for the page, even if a value in it asks for that."""
_METHODS = ("get", "post", "put", "patch", "delete")
_PAGES = environment()


def api_page(document: Json) -> str:
    """Return the page of an OpenAPI 3 document as HTML: every route with its parameters, bodies and responses."""
    routes = [
        {
            "path": path,
            "method": method.upper(),
            "text": route.get("description") or route.get("summary", ""),
            "needs_token": bool(route.get("security")),
            "parameters": [
                (each["name"], each["in"], each.get("description") or _name(each["schema"]))
                for each in route.get("parameters", ())
            ],
            "bodies": [
                _name(content.get("schema", {})) for content in route.get("requestBody", {}).get("content", {}).values()
            ],
            "responses": [
                (
                    status,
                    response.get("description", ""),
                    ", ".join(
                        _name(content.get("schema", {})) or kind
                        for kind, content in response.get("content", {}).items()
                    ),
                )
                for status, response in route.get("responses", {}).items()
            ],
        }
        for path, methods in document["paths"].items()
        for method, route in ((method, methods[method]) for method in _METHODS if method in methods)
    ]
    schemas = document.get("components", {}).get("schemas", {})
    return _PAGES.get_template("api.html").render(
        info={"description": "", **document["info"]},
        routes=routes,
        types=[(name, json.dumps(schema, indent=2, ensure_ascii=False)) for name, schema in sorted(schemas.items())],
    )


def _name(schema: Json) -> str:
    """Return the name of a schema, or its kind where it has none."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_name(part) for part in schema.get("anyOf") or schema["oneOf"])
    return str(schema.get("title") or schema.get("type", ""))
