"""The frontier's page in a real browser: everything is drawn, nothing is fetched, nothing is wrong, a click works."""

from __future__ import annotations

from dataclasses import replace

import pytest
from browser import barriers, faults, needs_axe

from fairpate.config import fair_rule
from fairpate.report.frontier import by_panel, points_of
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.run.specify import Demand, achievable
from fairpate.types import REMARKS

pytestmark = pytest.mark.slow  # a browser of its own


def page(path, rows, **options):
    report = FrontierReport(title="Two data sets", rows=rows, **options)
    path.write_text(frontier_report(report), encoding="utf-8")
    return path.as_uri()


def test_the_page_draws_on_a_desk_and_on_a_phone_and_its_points_can_be_clicked(tab, tmp_path, comparison):
    rows = comparison(operator=True)
    address = page(tmp_path / "report.html", rows, for_operator=True)
    for width in (360, 1280):
        tab.open(f"{address}#all", width=width, height=800)
        charts = tab.run("document.querySelectorAll('[data-chart]').length")
        assert tab.run("document.querySelectorAll('.plot svg.marks').length") >= charts
        assert tab.run("document.documentElement.scrollWidth") <= width
        wider = "[...document.querySelectorAll('.plot')].filter(p => p.clientWidth > innerWidth).length"
        assert tab.run(wider) == 0
        cut = "row => row.offsetWidth > row.closest('.scroll').clientWidth"
        assert not tab.run(f"[...document.querySelectorAll('tr.setting')].some({cut})")
        assert faults(tab) == []
    at = tab.run(
        "(() => { const mark = document.querySelector('.plot.planes .mark-symbol path'); mark.scrollIntoView({block: "
        "'center'}); const box = mark.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height "
        "/ 2]; })()"
    )
    tab.click(*at)
    assert tab.until("document.getElementById('point').open", seconds=10)
    shown = tab.run("document.getElementById('point').innerText")
    assert "fairpate run" in shown
    assert "target.epsilon" in shown
    traces = "document.querySelectorAll('.plot.planes .mark-symbol path').length"
    drawn = tab.run(traces)
    tab.run("document.querySelector('.keys button').click()")
    assert tab.until(f"{traces} < {drawn}", seconds=20)
    assert faults(tab) == []
    assert all(asked.startswith((address, "about:", "data:", "blob:")) for asked in tab.requests)
    assert tab.run("document.documentElement.dataset.errors") == "0"


def test_the_details_of_a_point_hold_its_remarks(tab, tmp_path, comparison):
    first = comparison()[0]
    config = first.config | {"aggregator": {"budget": {"accept_leak": True}}}
    address = page(
        tmp_path / "report.html", [replace(first, config=config, record=replace(first.record, config=config))]
    )
    tab.open(f"{address}#point-0", width=390, height=800)
    assert REMARKS["stopped_by_votes"] in tab.run("document.getElementById('point').innerText")
    assert faults(tab) == []


def test_controls_change_what_is_drawn(tab, tmp_path, comparison):
    address = page(tmp_path / "report.html", comparison())
    tab.open(f"{address}#all", width=500, height=800)
    marks = "document.querySelector('.plot.planes').querySelectorAll('.mark-symbol path').length"
    everything = tab.run(marks)
    tab.run("document.querySelector('.keys button').click()")
    assert tab.until(f"{marks} < {everything}", seconds=10)
    tab.run("document.querySelector('.keys button').click()")
    assert tab.until(f"{marks} === {everything}", seconds=10)
    disparity = "document.querySelectorAll('.plot.planes')[1]"
    title = f"[...{disparity}.querySelectorAll('.role-axis-title')].map(t => t.textContent).join()"
    assert tab.run(title) == "demographic-parity gap,accuracy"
    heights = f"[...{disparity}.querySelectorAll('.mark-symbol path')].map(p => p.getBoundingClientRect().x).join()"
    settings = "[...document.querySelectorAll('tr.setting small')]"
    shown = f"{settings}.filter(words => words.checkVisibility()).map(words => words.innerText).join()"
    before = tab.run(heights)
    assert "sorted by demographic-parity gap" in tab.run(shown)
    tab.run(
        "(() => { const notion = document.getElementById('notion'); notion.value = '1'; "
        "notion.dispatchEvent(new Event('change')); })()"
    )
    assert tab.until(f"{title} === 'equalized-odds gap,accuracy'", seconds=10)
    assert tab.until(f"{heights} !== '{before}'", seconds=10)
    assert "sorted by equalized-odds gap" in tab.run(shown)
    assert "sorted by demographic-parity gap" not in tab.run(shown)
    tab.run(
        "(() => { const plane = document.querySelector('select[data-charts=\"2\"]'); plane.value = '4'; "
        "plane.dispatchEvent(new Event('input')); })()"
    )
    third = "document.querySelectorAll('.plot.planes')[2].querySelector('.role-axis-title').textContent"
    assert tab.until(f"{third} === 'coverage'", seconds=10)
    assert tab.run(title) == "equalized-odds gap,accuracy"
    shown = f"{disparity}.querySelectorAll('.mark-symbol path').length"
    within = tab.run(shown)
    tab.run(
        "(() => { const level = document.querySelector('[data-sets=level]'); level.value = '0'; "
        "level.dispatchEvent(new Event('input')); })()"
    )
    assert tab.until(f"{shown} < {within}", seconds=10)
    tab.run("document.querySelector('button.name').click()")
    assert tab.run("document.getElementById('point').open")
    assert faults(tab) == []


def test_long_names_and_many_guarantees_fit(tab, tmp_path, comparison):
    """A name of 80 letters on a phone; six guarantees."""
    first = comparison()[0]
    name = f"package.module:{'Method' * 11}"
    named = replace(first, method=name, record=replace(first.record, method=name))
    tab.open(f"{page(tmp_path / 'report.html', [first, named])}#all", width=390, height=800)
    assert tab.run("document.documentElement.scrollWidth") == 390
    deltas = [replace(first, record=replace(first.record, delta=10.0**-power)) for power in range(4, 10)]
    tab.open(f"{page(tmp_path / 'report.html', deltas)}#all", width=1280, height=800)
    assert tab.run("document.querySelectorAll('.plot.planes').length") == 18
    assert faults(tab) == []


def test_two_limits_lead_to_the_command_that_the_terminal_finds(tab, tmp_path, comparison):
    """Two sliders, moved by keys: the answer is announced, and is the command of the best configuration in both."""
    rows = [row for row in comparison() if row.record is not None]
    tab.open(f"{page(tmp_path / 'report.html', rows)}#all", width=390, height=800)
    points = points_of([row.record for row in rows], commands=[row.command for row in rows])
    panels = list(by_panel(points).values())
    boxes = tab.run("[...document.querySelectorAll('.limits')].map(box => [box.dataset.data, box.innerText])")
    assert len(boxes) == len(panels)
    move = (
        "((number, budget, gap) => { const box = document.querySelectorAll('.limits')[number]; const [a, b] = "
        "box.querySelectorAll('input'); a.value = box.dataset.budgets.split(' ').indexOf(budget); b.value = gap; "
        "a.dispatchEvent(new Event('input')); b.dispatchEvent(new Event('input')); "
        "return box.querySelector('.answer pre')?.innerText ?? box.querySelector('.answer').innerText; })"
    )
    for number, found in enumerate(panels):
        for epsilon, gap in ((1, 0.02), (3, 0.1), (10, 0.3), (10, 0)):
            met = achievable(found, Demand(epsilon=epsilon, disparity=gap)).met
            shown = tab.run(f"{move}({number}, '{epsilon}.00', {gap})")
            expected = met[0].point.commands[0] if met else "No configuration keeps both."
            assert shown.startswith(expected), (number, epsilon, gap)
    tab.run("document.querySelectorAll('.limits input')[1].focus()")
    for _ in range(3):
        for kind in ("keyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert tab.run("document.querySelectorAll('.limits output')[1].textContent") == "0.03"
    tab.run("document.querySelectorAll('.limits input')[1].value = 0.5")
    tab.run("document.querySelectorAll('.limits input')[1].dispatchEvent(new Event('input'))")
    tab.run("document.querySelector('.answer .name').click()")
    assert tab.until("document.getElementById('point').open", seconds=10)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert faults(tab) == []


def press(tab, key, code, times=1):
    for _ in range(times):
        for kind in ("keyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


def test_the_command_is_four_actions_away_and_the_keyboard_is_enough(tab, tmp_path, comparison):
    """Choose the notion, the epsilon and the gap, and copy: from a file, without a network."""
    rows = [row for row in comparison() if row.record is not None]
    rule = fair_rule("equalized_odds=0.075")
    address = page(tmp_path / "report.html", rows, fair_at=rule)
    assert (tmp_path / "report.html").stat().st_size < 0.9e6
    tab.open(f"{address}#all", width=390, height=800)
    assert "“Fair” means an equalized-odds gap of at most 0.075" in tab.run("document.body.innerText")
    box = "document.querySelector('.limits')"
    tab.run("document.getElementById('notion').focus()")
    press(tab, "ArrowDown", 40)  # 1: the next notion
    assert tab.run("document.getElementById('notion').selectedOptions[0].dataset.name") == rule.notion
    # The slider begins where the user's rule is, as soon as it shows the rule's notion.
    assert tab.run(f"{box}.querySelectorAll('output')[1].textContent") == "0.075"
    press(tab, "Tab", 9)
    press(tab, "Home", 36)  # 2: the smallest epsilon
    press(tab, "Tab", 9)
    press(tab, "End", 35)  # 3: any gap
    limits = tab.run(f"[...{box}.querySelectorAll('output')].map(output => output.textContent)")
    assert limits == ["1.00", "0.50"]
    panel = by_panel(points_of([row.record for row in rows], commands=[row.command for row in rows]))
    (found,) = [each for key, each in panel.items() if key.data == "adult" and key.privacy.unit == "record"]
    best = achievable(found, Demand(epsilon=1.0, fairness={rule.notion: 0.5})).met[0]
    assert tab.run(f"{box}.querySelector('.answer pre').innerText") == best.point.commands[0]
    stated = tab.run(f"{box}.querySelector('.answer').innerText")
    assert "is right at most 73.2\u00a0% of the time" in stated
    assert "Fair means that the whole 95\u00a0% interval is at most 0.075." in stated
    tab.run(f"{box}.querySelector('[data-copy]').focus()")
    press(tab, "Enter", 13)  # 4: copy
    tab.run(f"{box}.querySelector('[data-copy]').click()")
    assert tab.until(f"{box}.querySelector('[data-copy]').textContent !== 'Copy command'", seconds=10)
    assert faults(tab) == []
    assert all(asked.startswith((address, "about:", "data:", "blob:")) for asked in tab.requests)


def test_a_faulty_page_would_be_noticed(tab, tmp_path, comparison):
    address = page(tmp_path / "report.html", comparison())
    path = tmp_path / "report.html"
    before, _, after = path.read_text(encoding="utf-8").rpartition("</body>")
    faulty = "<script>setTimeout(() => { fetch('https://example.org'); null.x; })</script>"
    path.write_text(f"{before}{faulty}</body>{after}", encoding="utf-8")
    tab.open(f"{address}#all", width=390, height=800)
    said = " ".join(faults(tab))
    assert "Content Security Policy" in said
    assert "TypeError" in said
    assert tab.run("document.documentElement.dataset.errors") == "1"


@needs_axe
@pytest.mark.parametrize(
    ("width", "place"),
    [(390, ""), pytest.param(390, "#all", marks=pytest.mark.campaign), (1280, "#all"), (1280, "#point-0")],
)
def test_the_page_has_no_barrier(tab, tmp_path, comparison, width, place):
    address = page(tmp_path / "report.html", comparison(operator=True), for_operator=True)
    if place:
        tab.open(f"{address}{place}", width=width, height=900)
    else:  # as it is opened first, nothing is drawn yet
        tab.call("Page.navigate", url=address)
        assert tab.until(f"location.href === {address!r} && document.readyState === 'complete'")
    assert barriers(tab) == []


def test_the_first_screen_has_the_picture_with_the_choice_marked(tab, tmp_path, comparison):
    """On a laptop the chart is beside the sliders and whole; on a phone it follows them. The ring is on the choice."""
    rows = [row for row in comparison() if row.record is not None]
    address = page(tmp_path / "report.html", rows)
    boxes = (
        "['.scales', '.pick', '.answer'].map(part => { const at = document.querySelector(`.limits ${part}`)"
        ".getBoundingClientRect(); return [at.left, at.right, at.top, at.bottom]; })"
    )
    ring = (
        "(() => { const plot = document.querySelector('.pick .plot'); const rings = [...plot.querySelectorAll("
        "'.mark-symbol path')].filter(path => path.getAttribute('fill') === 'transparent'); return rings.map(ring => {"
        " const at = ring.getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; }); })()"
    )
    tab.open(f"{address}#all", width=390, height=844)
    sliders, picture, answer = tab.run(boxes)
    assert sliders[3] <= picture[2] < picture[3] <= answer[2]
    assert 0 <= picture[0] < picture[1] <= 390
    tab.open(f"{address}#all", width=1400, height=900)
    sliders, picture, answer = tab.run(boxes)
    assert max(sliders[1], answer[1]) <= picture[0] and picture[3] <= 900 and picture[2] < sliders[3]
    (before,) = tab.run(ring)
    # A click into the ring opens what the answer names.
    tab.click(*before)
    assert tab.until("document.getElementById('point').open", seconds=10)
    chosen = "document.querySelector('.limits .answer .name').dataset.point"
    assert tab.run(f"document.getElementById('point').dataset.point === {chosen}")
    marks = "document.querySelectorAll('.pick .plot')[0].querySelectorAll('.mark-symbol path').length"
    affordable = tab.run(marks)
    budget = "document.querySelector('.limits input')"
    tab.run(f"{budget}.value = {budget}.max; {budget}.dispatchEvent(new Event('input'))")
    assert tab.until(f"{marks} > {affordable}", seconds=10)
    (after,) = tab.run(ring)
    assert after != before
    # Where nothing keeps both limits, nothing is marked.
    gap = "document.querySelectorAll('.limits input')[1]"
    tab.run(f"{gap}.value = 0; {gap}.dispatchEvent(new Event('input'))")
    assert tab.until(f"{ring}.length === 0", seconds=10)
    assert faults(tab) == []
