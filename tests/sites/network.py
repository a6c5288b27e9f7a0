"""A plan of two small sums, its coordinator on real HTTP, and sites that may be stopped at any of their requests."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from parties import KEYS

from fairpate.http_server import HttpServer, HttpSettings, TlsFiles
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.sites.coordinator import CoordinatorSums
from fairpate.sites.plan import Journal, SitePlan, key_text, read_plan
from fairpate.sites.secure_sum import SumError
from fairpate.sites.site import CoordinatorClient, Messenger

SHAPES = ((2, 3), (1, 4))
# FastAPI silences a warning while it makes an application; of two threads that do so at once, one may hear it.
_MAKING = threading.Lock()


class StoppedError(Exception):
    """A process that was killed, as far as the others can see."""


def plan_of(sites: int, *, may_vanish: int = 1, number: int = 0) -> SitePlan:
    values = {
        "format": "fairpate.site-plan/1",
        "id": str(number),
        "settings": {},
        "unit": "record",
        "events": [{}],
        "sums": [
            {"name": f"sum {i}", "rows": r, "columns": c, "noise_stddev": 40.0} for i, (r, c) in enumerate(SHAPES)
        ],
        "public_arrays": "",
        "test_events": [],
        "embedding": None,
        "sites": {f"site {k}": key_text(KEYS[k].public) for k in range(sites)},
        "may_vanish": may_vanish,
        "may_collude": 1,
    }
    return read_plan(json.dumps(values).encode(), "plan")


class StoppedClient(CoordinatorClient):
    """Stops before or after its request number ``at``."""

    def __init__(self, url: str, *, at: int, after: bool, wait_s: float, ca: str | None = None) -> None:
        super().__init__(url, wait_s=wait_s, ca=ca)
        self._left, self._after = at, after

    def request(self, path: str, content: bytes | None = None, **named: Any) -> bytes | None:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise StoppedError
        found = super().request(path, content, **named)
        if self._left < 0:
            raise StoppedError
        return found


class Network:
    """The coordinator's and the sites' journals in one folder."""

    def __init__(self, root: Path, sites: int, *, may_vanish: int = 1, wait_s: float = 30.0) -> None:
        self.root, self.plan, self.wait_s = root, plan_of(sites, may_vanish=may_vanish), wait_s
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = int(found.getsockname()[1])
        numbers = np.random.default_rng(0)
        self.exact = [[numbers.integers(-(2**40), 2**40, shape) for shape in SHAPES] for _ in range(sites)]
        self.charges = [0] * sites
        self.tls: TlsFiles | None = None
        self.found: dict[Any, Any] = {}

    @contextmanager
    def coordinator(self, name: str = "coordinator", **settings: Any) -> Iterator[CoordinatorSums]:
        """A coordinator that serves; made again, it goes on from its journal."""
        with Journal.opened(self.root / f"{name}.sqlite", self.plan) as journal:
            sums = CoordinatorSums(self.plan, journal, **{"wait_s": self.wait_s} | settings)
            with _MAKING:
                server = HttpServer(sums.app, HttpSettings(port=self.port, tls=self.tls))
            try:
                yield sums
            finally:
                server.stop()

    def draw(self, sums: Any, tables: Any = None) -> list[Any]:
        """All sums in order, as a method would ask for them."""
        zeros = [np.zeros(shape, dtype=np.int64) for shape in SHAPES]
        tables = zeros if tables is None else tables
        return [sums(table, stddev=40.0, name=f"sum {number}") for number, table in enumerate(tables)]

    def join(
        self,
        k: int,
        *,
        at: int = 10**6,
        after: bool = False,
        wait_s: float = 30.0,
        leaves: bool = True,
        ca: str | None = None,
    ) -> list[Any]:
        """Take part as site ``k``, until request number ``at``; the noise is a function of the site. Unless it
        ``leaves``, a coordinator waits for it."""
        url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        client = StoppedClient(url, at=at, after=after, wait_s=wait_s, ca=ca)

        def charge() -> None:
            self.charges[k] += 1

        try:
            with closing(Messenger(self.plan, KEYS[k], client, source=SeededSource(k))) as messenger:
                messenger.begin(self.root / f"site-{k}.sqlite", self.root / "begun" / str(k), b"", charge)
                drawn = self.draw(messenger.sum, self.exact[k])
                if leaves:
                    messenger.leave()
                return drawn
        finally:
            client.close()

    def expected(self, number: int, sites: Any) -> Any:
        """The sum of these sites' numbers and noise."""
        from fairpate.sites.secure_sum import _with_noise

        draw = self.plan.draw(number)
        tables = [_with_noise(draw, self.exact[k][number].reshape(-1), SeededSource(k)) for k in sites]
        return sum(tables).reshape(SHAPES[number])

    def together(self, works: dict[Any, Any]) -> dict[Any, Any]:
        """The result or error of each work, all at once."""

        def act(name: Any, work: Any) -> None:
            try:
                self.found[name] = work()
            except (StoppedError, SumError, OSError, Exception) as error:  # noqa: BLE001 - a test looks at it
                self.found[name] = error

        threads = [threading.Thread(target=act, args=pair) for pair in works.items()]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return self.found
