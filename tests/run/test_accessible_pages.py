"""Every page of a run in a real browser: axe-core finds nothing serious or critical, and a finger opens words."""

from __future__ import annotations

import pytest
from browser import barriers, needs_axe

pytestmark = pytest.mark.usefixtures("light_runs")


@needs_axe
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_of_a_run_has_a_barrier(tab, finished, fairpate, width):
    folder, _ = finished
    assert fairpate("card", str(folder.root))[0] == 0
    pages = sorted(folder.root.glob("**/*.html"))
    assert {page.name for page in pages} >= {"card.html", "report.html"}
    for page in pages:
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        tab.call("Page.navigate", url=page.as_uri())
        assert tab.until(f"location.href === {page.as_uri()!r} && document.readyState === 'complete'")
        tab.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert barriers(tab) == [], page
        least = "Math.min(24, ...[...document.querySelectorAll('summary')].map(e => e.getBoundingClientRect().height))"
        assert tab.run(least) == 24, page  # pixels that a finger hits, WCAG 2.2
    # Pale words would have been found.
    pale = "const pale = document.body.appendChild(document.createElement('p'))"
    tab.run(
        f"(() => {{ {pale}; pale.textContent = 'pale'; pale.style.color = '#777'; pale.style.background = '#888'; }})()"
    )
    (found,) = barriers(tab)
    assert found.startswith("serious color-contrast")


@pytest.mark.slow
def test_a_tap_on_a_word_opens_its_meaning_and_a_tap_elsewhere_closes_it(tab, finished, fairpate):
    """On a telephone, where nothing hovers."""
    folder, _ = finished
    assert fairpate("card", str(folder.root))[0] == 0
    shown = "document.querySelectorAll('.meaning:popover-open').length"
    tab.touch(on=True)
    for page in (folder.card_page, folder.public_report):
        tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        tab.call("Page.navigate", url=page.as_uri())
        assert tab.until(f"location.href === {page.as_uri()!r} && document.readyState === 'complete'")
        assert tab.run("matchMedia('(pointer: coarse)').matches")
        assert tab.run(shown) == 0
        tab.tap("button.term")
        assert tab.until(f"{shown} === 1", seconds=5), page
        box = "document.querySelector('.meaning:popover-open').getBoundingClientRect()"
        assert tab.run(f"{box}.left >= 0 && {box}.right <= innerWidth && {box}.bottom <= innerHeight"), page
        tab.tap("h1")
        assert tab.until(f"{shown} === 0", seconds=5), page
    tab.touch(on=False)
