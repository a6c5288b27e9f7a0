"""Seconds and bytes of a secure sum over many sites, and what faults at random messages end in.

    python benchmarks/sites.py --sites 500 --numbers 400       one sum: seconds and bytes of a site and the coordinator
    python benchmarks/sites.py --faults 500                    500 sums of 5 to 9 sites, each with random faults

A fault stops a site for good or for a moment, loses or changes a message, repeats an old one, or stops the coordinator;
a party that comes back is made anew from its store. A sum may be exact or not come about: anything else is an error.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from fairpate.privacy.discrete_gaussian import SeededSource, discrete_gaussians
from fairpate.sites.secure_sum import STEPS, Coordinator, Draw, Site, SiteKey, Step, SumError
from fairpate.types import IntArray


class Parties:
    """A coordinator and sites in one process, made anew from their stores at every message."""

    def __init__(self, num_sites: int, num_numbers: int, *, may_vanish: int, may_collude: int) -> None:
        self.keys = [SiteKey(hashlib.sha256(str(place).encode()).digest()) for place in range(num_sites)]
        self.draw = Draw(
            plan=bytes(32),
            number=0,
            sites=tuple(key.public for key in self.keys),
            may_vanish=may_vanish,
            may_collude=may_collude,
            size=num_numbers,
            noise_stddev=2.0**20,
        )
        numbers = np.random.default_rng(0)
        self.exact_KD = numbers.integers(-(2**40), 2**40, (num_sites, num_numbers))
        self.stores: list[dict[str, bytes]] = [{} for _ in range(num_sites)]
        self.kept: dict[str, bytes] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began_s = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began_s

    def message(self, step: Step, place: int, coordinator: Coordinator) -> bytes | None:
        """What site ``place`` sends at this step; None before its list is there, or if it is not in it."""
        site = Site(self.draw, place, self.keys[place], self.stores[place])
        if step == "hello":
            return site.hello()
        if step == "masked":
            found = coordinator.members(place)
        else:
            found = coordinator.published("survivors" if step == "agreed" else "agreement")
        listed = found if step != "shares" else coordinator.published("survivors")
        if found is None or listed is None or not self.draw.lists(listed, place):
            return None
        self.bytes["to a site"] += len(found)
        if step == "masked":
            return site.masked(found, self.exact_KD[place], SeededSource(place))
        return site.agreed(found) if step == "agreed" else site.shares(found)

    def expected(self, places: list[int]) -> IntArray:
        """The sum of these sites' numbers and noise."""
        total_D: IntArray = np.zeros(self.draw.size, dtype=np.int64)
        for place in places:
            source = SeededSource(place)
            words_D = source.words(["sum 0"], self.draw.size)[0]
            total_D = total_D + self.exact_KD[place] + discrete_gaussians(self.draw.share_stddev, words_D, source)
        return total_D


def measure(num_sites: int, num_numbers: int) -> None:
    """Print the seconds of processor time and the bytes of one sum in which a fiftieth of the sites vanish."""
    vanish, collude = num_sites // 50, max(1, num_sites // 50)
    parties = Parties(num_sites, num_numbers, may_vanish=vanish, may_collude=collude)
    coordinator = Coordinator(parties.draw, parties.kept)
    for step in STEPS:
        for place in range(num_sites if step == "hello" else num_sites - vanish):
            with parties.timed("site"):
                message = parties.message(step, place, coordinator)
            assert message is not None
            parties.bytes["from a site"] += len(message)
            with parties.timed("coordinator"):
                coordinator.receive(step, place, message)
        with parties.timed("coordinator"):
            coordinator.advance(time_is_up=True)
    total_D = coordinator.total_D
    assert total_D is not None
    assert np.array_equal(total_D, parties.expected(list(range(num_sites - vanish))))
    print(f"{num_sites} sites, {num_numbers} numbers, {vanish} vanish, {collude} may collude: the sum is exact")
    print(f"a site: {parties.seconds['site'] / num_sites:.2f} s", end="")
    for name in ("from a site", "to a site"):
        print(f", {parties.bytes[name] / num_sites / 1000:.1f} kB {name}", end="")
    print(f"; the coordinator: {parties.seconds['coordinator']:.1f} s")


def campaign(count: int, seed: int) -> Counter[str]:
    """The outcomes of ``count`` sums with faults at random messages."""
    return Counter(faulty(random.Random(f"{seed} {number}")) for number in range(count))


def faulty(draws: random.Random) -> str:
    """One sum whose messages meet faults; its outcome in words. AssertionError for a wrong sum."""
    num_sites = draws.randint(5, 9)
    parties = Parties(num_sites, 2, may_vanish=draws.randint(0, (num_sites - 2) // 2), may_collude=1)
    rate = draws.choice((0.02, 0.1, 0.3))
    gone: set[int] = set()
    old: list[tuple[Step, int, bytes]] = []
    try:
        for step in STEPS:
            # Twice: a message that was lost, and a site that came back, have another chance before time is up.
            for place in [*draws.sample(range(num_sites), num_sites), *range(num_sites)]:
                coordinator = Coordinator(parties.draw, parties.kept)  # as if it had been stopped in between
                message = None if place in gone else parties.message(step, place, coordinator)
                if message is None:
                    continue
                if draws.random() < rate:
                    fault = draws.choice(("vanish", "lose", "change", "shorten", "replay"))
                    if fault == "vanish":
                        gone.add(place)
                    if fault in ("change", "shorten"):
                        at = draws.randrange(len(message))
                        wrong = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
                        message = wrong if fault == "change" else message[:at]
                    if fault in ("vanish", "lose"):
                        continue
                    if fault == "replay" and old:
                        step_then, place_then, message_then = draws.choice(old)
                        with suppress(SumError):
                            coordinator.receive(step_then, place_then, message_then)
                with suppress(SumError):
                    coordinator.receive(step, place, message)
                    old.append((step, place, message))
            Coordinator(parties.draw, parties.kept).advance(time_is_up=True)
    except SumError as error:
        assert "sum" not in parties.kept
        return "ended: " + ("too few sites" if "Time is up" in str(error) else str(error))
    coordinator = Coordinator(parties.draw, parties.kept)
    flags, total_D = coordinator.published("survivors"), coordinator.total_D
    assert flags is not None
    assert total_D is not None
    survivors = [place for place in range(num_sites) if parties.draw.lists(flags, place)]
    assert len(survivors) >= parties.draw.least
    assert np.array_equal(total_D, parties.expected(survivors))
    return "exact, all sites" if len(survivors) == num_sites else "exact, some sites lost"


def main() -> None:
    """Print one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--numbers", type=int, default=400)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not given.faults:
        measure(given.sites, given.numbers)
        return
    for outcome, times in campaign(given.faults, given.seed).most_common():
        print(f"{times:6} {outcome}")


if __name__ == "__main__":
    main()
