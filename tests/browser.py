"""A real browser for tests of pages: one headless Chromium, one tab, and everything that it complains about.

Chromium is spoken to over its debugging pipe: commands and events are JSON, each ended by a null byte.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What Chromium says of its own software renderer is no fault of the page.
NOT_THE_PAGES = ("GL Driver Message", "willReadFrequently", "WebGL-0x")


class Browser:
    """One tab. ``complaints`` collects warnings, errors and exceptions, ``requests`` every address asked for.

    ``is_drawn`` is what a page says of itself once it is complete.
    """

    is_drawn = "document.documentElement?.dataset.drawn > 0"

    def __init__(self, to_browser, from_browser):
        self.to_browser, self.from_browser = to_browser, from_browser
        self.number, self.unread, self.session = 0, b"", None
        self.complaints, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.to_browser.write(json.dumps(message).encode() + b"\0")
        self.to_browser.flush()
        while True:
            reply = self.read()
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]
            self.note(reply)

    def read(self):
        while b"\0" not in self.unread:
            received = os.read(self.from_browser.fileno(), 1 << 20)
            assert received, "the browser closed its pipe"
            self.unread += received
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def note(self, event):
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(said["exceptionDetails"].get("exception", said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in {"error", "warning", "assert"}:
            self.complaints.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"][:300])

    def resize(self, *, width, height):
        """The page that is shown, on another screen; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def open(self, address, *, width, height):
        """Show a page from scratch, until it has drawn everything."""
        self.resize(width=width, height=height)
        self.call("Page.navigate", url="about:blank")
        self.complaints, self.requests = [], []
        self.call("Page.navigate", url=address)
        assert self.until(self.is_drawn), "the page did not finish drawing"

    def run(self, script):
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.run(f"Boolean({condition})"):
                return True
            time.sleep(0.1)
        return False

    def click(self, x, y):
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)

    def touch(self, *, on):
        """Whether the screen is touched, and no mouse is there."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=on, maxTouchPoints=1)

    def tap(self, selector):
        """A finger in the middle of what ``selector`` finds first."""
        find = f"document.querySelector({selector!r})"
        self.run(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({find}.getBoundingClientRect())")
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def quit(self):
        self.session = None
        self.call("Browser.close")

    def picture(self, path, *, full=True):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile):
    commands_out, commands_in = os.pipe()
    events_out, events_in = os.pipe()
    # The browser reads commands from descriptor 3 and writes events to descriptor 4.
    for descriptor in (commands_out, events_in):
        os.set_inheritable(descriptor, True)
    options = ["--headless", "--no-sandbox", "--remote-debugging-pipe", "--enable-unsafe-swiftshader"]
    number = os.posix_spawn(
        CHROMIUM,
        [CHROMIUM, *options, "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, commands_out, 3),
            (os.POSIX_SPAWN_DUP2, events_in, 4),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )
    os.close(commands_out)
    os.close(events_in)
    try:
        with os.fdopen(commands_in, "wb") as to_browser, os.fdopen(events_out, "rb", buffering=0) as from_browser:
            tab = Browser(to_browser, from_browser)
            yield tab
            tab.quit()
    finally:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)
        os.waitpid(number, 0)


@contextmanager
def opened_tab(profile):
    """One tab for all tests of a file; they are skipped where there is no Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with browser(profile) as tab:
        yield tab


def faults(tab):
    tab.run("new Promise(done => setTimeout(done, 300))")
    return [said for said in map(str, tab.complaints) if not any(known in said for known in NOT_THE_PAGES)]


def _axe_source():
    """axe-core, or None; only its one file is used of a package that brings it."""
    found = importlib.util.find_spec("axe_playwright_python")
    return None if found is None else Path(found.submodule_search_locations[0], "axe.min.js").read_text("utf-8")


AXE = _axe_source()
needs_axe = pytest.mark.skipif(AXE is None, reason="needs axe-core: `pip install --no-deps axe-playwright-python`")


# Contrast, most of its time, is the same for texts of one colour, size and weight on one ground: a few of each do.
_OF_EACH_LOOK = """
for (const element of document.querySelectorAll('[data-look]')) delete element.dataset.look;
const counts = new Map(), grounds = new Map([[null, '']]);
for (const element of document.querySelectorAll('*')) {
  const style = getComputedStyle(element);
  const own = [style.backgroundColor, style.backgroundImage, style.opacity].join();
  const ground = grounds.get(element.parentElement) + (own === 'rgba(0, 0, 0, 0),none,1' ? '' : own);
  grounds.set(element, ground);
  const says = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!says || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  const look = [ground, style.color, style.fill, style.fontSize, style.fontWeight, style.textShadow].join();
  counts.set(look, (counts.get(look) ?? 0) + 1);
  if (counts.get(look) <= 3) element.dataset.look = '';
}
axe.configure({rules: [{id: 'color-contrast', selector: '[data-look]'}]});
"""


def barriers(tab, *impacts, rules=()):
    """What axe-core finds on the page that is shown, of ``impacts``, by all rules or ``rules``: its rule, and where."""
    tab.call("Runtime.evaluate", expression=AXE)
    tab.run(f"(() => {{{_OF_EACH_LOOK}}})()")
    # A page opened from a file may neither read a style sheet a second time (`preload`) nor write to
    # a frame it holds (`iframes`); what we show in frames is opened on its own as well.
    options = {"resultTypes": ["violations"], "preload": False, "iframes": False}
    if rules:
        options["runOnly"] = list(rules)
    found = tab.run(f"axe.run(document, {json.dumps(options)}).then(r => r.violations)")
    return [
        f"{rule['impact']} {rule['id']}: {node['target']} {node['html'][:150]} {node['failureSummary'][:300]}"
        for rule in found
        if rule["impact"] in (impacts or ("serious", "critical"))
        for node in rule["nodes"]
    ]
