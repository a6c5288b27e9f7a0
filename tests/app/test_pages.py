"""No page of this project asks another host for anything: each is shown whole on a machine without a network."""

from pathlib import Path

import pytest
from page_references import References

from fairpate.api_page import api_page

EVALUATION = Path(__file__).parents[2] / "fairpate" / "evaluation"


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/x.css">',
        "<style>@import 'https://fonts.example/x';</style>",
        "<p style=\"background: url('http://example/x.png')\">",
        '<script type="module">import x from "https://cdn.example/x.js"</script>',
        '<img srcset="https://example/x.png 2x">',
    ],
)
def test_what_a_browser_would_fetch_is_found(text: str) -> None:
    assert References(text).found


def test_a_link_to_read_is_nothing_that_is_fetched() -> None:
    assert not References('<a href="https://arxiv.org/abs/2302.09183">paper</a><link rel="icon" href="data:,">').found


def test_style_sheets_and_scripts_of_all_pages() -> None:
    """Of the frontier's page too, which is nothing but these and what is drawn from numbers."""
    resources = [path for kind in ("css", "js") for path in EVALUATION.glob(f"*.{kind}")]
    assert {path.name for path in resources} >= {"report.css", "frontier.css", "frontier.js", "card.css"}
    for path in resources:
        text = path.read_text(encoding="utf-8")
        assert References(f"<script>{text}</script>").found == [], path


def test_every_word_of_an_openapi_document_is_escaped() -> None:
    bad = "<script>alert(1)</script>"
    route = {
        "description": bad,
        "parameters": [{"name": bad, "in": "query", "schema": {"type": bad}}],
        "requestBody": {"content": {"application/json": {"schema": {"$ref": f"#/x/{bad}"}}}},
        "responses": {bad: {"description": bad, "content": {bad: {"schema": {"title": bad}}}}},
    }
    page = api_page(
        {
            "info": {"title": bad, "version": bad, "description": bad},
            "paths": {f"/{bad}": {"get": route}},
            "components": {"schemas": {bad: {"title": bad}}},
        }
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 10
