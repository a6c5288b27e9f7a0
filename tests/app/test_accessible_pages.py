"""Every page that a run writes, read by axe-core in a real browser: nothing serious or critical is in anybody's way."""

from __future__ import annotations

import pytest
from browser import barriers, needs_axe, opened_tab

pytestmark = needs_axe


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with opened_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


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
