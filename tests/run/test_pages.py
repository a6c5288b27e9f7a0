"""No page of this project asks another host for anything: each is shown whole on a machine without a network."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from page_references import References

TEMPLATES = Path(__file__).parents[2] / "fairpate" / "templates"


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


def test_templates_style_sheets_and_scripts_of_all_pages() -> None:
    """Of the templates too: what they hold and what is put into them is all that a page is."""
    resources = {path.name: path.read_text(encoding="utf-8") for path in TEMPLATES.iterdir()}
    assert set(resources) >= {"report.css", "frontier.css", "frontier.js", "api.css", "frame.html"}
    for name, text in resources.items():
        page = text if name.endswith("html") else f"<script>{text}</script>"
        assert References(page).found == [], name


def texts(constant: Any) -> Iterator[str]:
    """All strings of a module's code; those of a syntax tree take three times as long."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        yield from texts(constant.co_consts)
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from texts(each)


def test_pages_are_made_by_templates_alone() -> None:
    """No module writes a tag, where nothing would escape what it puts into it; only drawings are HTML before."""
    package = TEMPLATES.parent
    for path in sorted(package.rglob("*.py")):
        code = compile(path.read_text("utf-8"), path, "exec", dont_inherit=True)
        tags = [text for text in texts(code) if re.search(r"</\w|<\w+ \w+=", text)]
        assert not tags or path == package / "report" / "run_page.py", (path, tags)
