"""HTML pages from the templates of this package, and an OpenAPI document as one of them.

HTML pages from the templates of this package.

Every value that enters a page is escaped, a name that a template lacks is an error, and the frame of every page forbids
a browser to fetch anything. What is HTML already is the style sheets, the scripts and the drawings, marked as such here
and where they are drawn. A word of the glossary is a button that opens its meaning (``parts.html``); each page holds
the meanings of its own words.

The documentation of an HTTP service as one page, made from its OpenAPI document: nothing is fetched, nothing runs.

A page that loads a viewer from somebody's server is blank without a network, and tells that server who reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from fairpate.words import Term, term_by_key, term_of

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


Json = Mapping[str, Any]
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""A browser that keeps to these fetches nothing for the page, whatever is in it."""
_METHODS = ("get", "post", "put", "patch", "delete")
_PAGES = environment()


def api_page(document: Json) -> str:
    """The page of an OpenAPI 3 document, as HTML: every route with its parameters, bodies and responses."""
    schemas = document.get("components", {}).get("schemas", {})
    return _PAGES.get_template("api.html").render(
        info={"description": "", **document["info"]},
        routes=_routes(document),
        types=[(name, json.dumps(schema, indent=2, ensure_ascii=False)) for name, schema in sorted(schemas.items())],
    )


def _routes(document: Json) -> Iterator[Json]:
    for path, routes in document["paths"].items():
        yield from (_route(path, method, routes[method]) for method in _METHODS if method in routes)


def _route(path: str, method: str, route: Json) -> Json:
    body = route.get("requestBody", {}).get("content", {})
    return {
        "path": path,
        "method": method.upper(),
        "text": route.get("description") or route.get("summary", ""),
        "needs_token": bool(route.get("security")),
        "parameters": [
            (p["name"], p["in"], p.get("description") or _name(p["schema"])) for p in route.get("parameters", ())
        ],
        "bodies": [_name(content.get("schema", {})) for content in body.values()],
        "responses": [
            (status, said.get("description", ""), _types(said)) for status, said in route.get("responses", {}).items()
        ],
    }


def _types(response: Json) -> str:
    return ", ".join(_name(content.get("schema", {})) or kind for kind, content in response.get("content", {}).items())


def _name(schema: Json) -> str:
    """The name of a schema, or its kind where it has none."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_name(part) for part in schema.get("anyOf") or schema["oneOf"])
    return str(schema.get("title") or schema.get("type", ""))
