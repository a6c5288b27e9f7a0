"""The documentation of an HTTP service as one page, made from its OpenAPI document: nothing is fetched, nothing runs.

A page that loads a viewer from somebody's server is blank without a network, and tells that server who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}
"""A browser that keeps to these fetches nothing for the page, whatever is in it."""
_METHODS = ("get", "post", "put", "patch", "delete")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733;
  background: #fff; }
h2 { font: 600 1.05rem/1.4 ui-monospace, monospace; margin: 2.2rem 0 .3rem; }
h2 b { color: #0b5cad; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #c5ced8; }
pre { background: #f3f5f8; padding: .8rem; overflow: auto; font-size: .85rem; }
.note { color: #55636f; }
@media (prefers-color-scheme: dark) { body { color: #e4e9ee; background: #14191f; } pre { background: #1e252d; }
  h2 b { color: #7cb8f5; } .note { color: #9aa7b3; } }
"""


def api_page(document: Json) -> str:
    """The page of an OpenAPI 3 document, as HTML: every route with its parameters, bodies and responses."""
    info = document["info"]
    schemas = document.get("components", {}).get("schemas", {})
    routes = "".join(_route(path, method, route) for path, method, route in _routes(document))
    types = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    title = escape(info["title"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>{escape(info.get('description', ''))}</p>\n"
        f'<p class="note">Version {escape(info["version"])}. The same for programs: <a href="openapi.json">'
        f"openapi.json</a>.</p>\n{routes}<h2>Types</h2>\n{types}</body>\n</html>\n"
    )


def _routes(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, routes in document["paths"].items():
        yield from ((path, method, routes[method]) for method in _METHODS if method in routes)


def _route(path: str, method: str, route: Json) -> str:
    text = escape(route.get("description") or route.get("summary", ""))
    token = '<p class="note">Needs a bearer token, once tokens are configured.</p>' if route.get("security") else ""
    parameters = _table(
        ("parameter", "in", "what"),
        [(p["name"], p["in"], p.get("description") or _name(p["schema"])) for p in route.get("parameters", ())],
    )
    body = route.get("requestBody", {}).get("content", {})
    bodies = "".join(f"<p>Body: {escape(_name(content.get('schema', {})))}</p>" for content in body.values())
    responses = _table(
        ("status", "what", "type"),
        [(status, said.get("description", ""), _types(said)) for status, said in route.get("responses", {}).items()],
    )
    return f"<h2><b>{method.upper()}</b> {escape(path)}</h2>\n<p>{text}</p>\n{token}{parameters}{bodies}{responses}"


def _types(response: Json) -> str:
    return ", ".join(_name(content.get("schema", {})) or kind for kind, content in response.get("content", {}).items())


def _name(schema: Json) -> str:
    """The name of a schema, or its kind where it has none."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(_name(part) for part in schema.get("anyOf") or schema["oneOf"])
    return str(schema.get("title") or schema.get("type", ""))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{name}</th>" for name in head)
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table>\n<tr>{top}</tr>\n{cells}</table>\n"


def _schema(name: str, schema: Json) -> str:
    text = escape(json.dumps(schema, indent=2, ensure_ascii=False))
    return f"<details><summary>{escape(name)}</summary>\n<pre>{text}</pre></details>\n"
