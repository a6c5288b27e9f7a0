"""A word of the glossary opens its meaning by mouse, key and touch, and nothing of a run's pages is cut off."""

from __future__ import annotations

import pytest
from browser import faults
from report_pages import published
from test_hostile_names import card, operators, report

from fairpate.report.run_page import public_report

PAGES = {
    "card": lambda: card("a name"),
    "report": lambda: public_report(report("a name", votes=True)),
    "operator": lambda: operators("a name"),
}
OPEN = "[...document.querySelectorAll('[popover]')].filter(e => e.matches(':popover-open'))"


@pytest.fixture(scope="module")
def tab(tab):
    tab.is_drawn = "document.readyState === 'complete'"
    return tab


def key(tab, name, code):
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
        tab.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text)


@pytest.mark.parametrize("name", ["card", pytest.param("report", marks=pytest.mark.slow), "operator"])
def test_words_have_meanings_and_nothing_is_cut_off(tab, name: str, tmp_path) -> None:
    path = tmp_path / f"{name}.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    for width in (1280, 390):
        tab.open(path.as_uri(), width=width, height=900)
        assert tab.run("document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        assert tab.run(f"{cut}.map(e => e.textContent.slice(0, 60))") == []
        assert tab.run("document.querySelectorAll('button.term').length") > 3
        described = "document.querySelectorAll('button.term:not([aria-describedby])').length"
        assert tab.run(described) == 0
        x, y = tab.run(
            "(() => { const term = document.querySelector('.tiles .term');"
            " term.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const at = term.getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; })()"
        )
        tab.click(x, y)
        assert tab.run(f"{OPEN}.map(e => e.firstChild.textContent)") == ["epsilon"]
        box = tab.run(f"(() => {{ const at = {OPEN}[0].getBoundingClientRect(); return [at.left, at.right]; }})()")
        assert 0 <= box[0] < box[1] <= width
        key(tab, "Escape", 27)
        assert tab.run(f"{OPEN}.length") == 0
        tab.run("document.querySelector('.tiles .term').focus()")
        key(tab, "Enter", 13)
        assert tab.run(f"{OPEN}.length") == 1
        assert faults(tab) == []


def test_the_first_screen_answers_whether_to_publish(tab, tmp_path) -> None:
    """On a laptop all four tiles and what is open; on a phone the verdict and what is open, before the tiles."""
    path = tmp_path / "report.html"
    path.write_text(public_report(published()), encoding="utf-8")
    ends = "(names => names.map(name => document.querySelector(name).getBoundingClientRect().bottom))"
    before = (".verdict", ".decision")
    for width, height, inside in ((1400, 900, (*before, ".tiles")), (390, 844, before)):
        tab.open(path.as_uri(), width=width, height=height)
        found = tab.run(f"{ends}({list(inside)})")
        assert found == sorted(found) and found[-1] <= height, found
