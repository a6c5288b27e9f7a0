"""All parties of one secure sum in one process, whose messages a test can lose, repeat or change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.sites.secure_sum import Coordinator, Draw, Site, SiteKey, Step

KEYS = [SiteKey(hashlib.sha256(bytes([number])).digest()) for number in range(64)]


def draw_of(sites: int, *, may_vanish: int = 1, may_collude: int = 1, size: int = 3, **other: Any) -> Draw:
    settings = {"plan": b"p" * 32, "number": 0, "noise_stddev": 20.0, **other}
    keys = tuple(key.public for key in KEYS[:sites])
    return Draw(sites=keys, may_vanish=may_vanish, may_collude=may_collude, size=size, **settings)


@dataclass
class Parties:
    """Sites with their numbers and stores; the sites and the coordinator are made anew from stores at every message."""

    draw: Draw
    stores: list[dict[str, bytes]] = field(init=False)
    kept: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stores = [{} for _ in self.draw.sites]
        numbers = np.random.default_rng(0)
        self.exact = [numbers.integers(-(2**40), 2**40, self.draw.size) for _ in self.draw.sites]

    def site(self, place: int) -> Site:
        return Site(self.draw, place, KEYS[place], self.stores[place])

    @property
    def coordinator(self) -> Coordinator:
        return Coordinator(self.draw, self.kept)

    def source(self, place: int) -> SeededSource:
        return SeededSource(place)

    def message(self, step: Step, place: int) -> bytes | None:
        """What a site sends at this step, or None where the coordinator has no list for it yet."""
        coordinator, site = self.coordinator, self.site(place)
        if step == "hello":
            return site.hello()
        if step == "masked":
            members = coordinator.listed("members", place)
            if members is None or not members[place]:
                return None
            return site.masked(members, self.exact[place], self.source(place))
        listed = coordinator.listed("survivors" if step == "agreed" else "agreement")
        survivors = coordinator.listed("survivors")
        if listed is None or not survivors[place]:
            return None
        return site.agreed(listed) if step == "agreed" else site.shares(listed)

    def send(self, step: Step, places: Any) -> None:
        for place in places:
            message = self.message(step, place)
            if message is not None:
                self.coordinator.receive(step, place, message)

    def run(self, vanished: dict[int, int]) -> Any:
        """The sum where site k sends its first ``vanished[k]`` messages alone."""
        for number, step in enumerate(("hello", "masked", "agreed", "shares")):
            self.send(step, [k for k in range(len(self.draw.sites)) if vanished.get(k, 4) > number])
            self.coordinator.advance(time_is_up=True)
        return self.coordinator.total_D

    def survivors(self) -> list[int]:
        flags = self.coordinator.listed("survivors")[: len(self.draw.sites)]
        return [place for place, flag in enumerate(flags) if flag]
