"""What the coordinator and colluding sites can compute together, at every point where somebody stops or lies.

Their knowledge is a system of linear equations in the honest sites' numbers and masks: a masked vector for each site
that sent one, and every mask whose seed enough shares give. The only combination of honest numbers that it determines
may be the sum over a list of survivors with as many honest sites as the price assumes. The matrix is that of a graph,
whose invariant factors are all 1: what no prime field determines, whole numbers modulo 2^64 do not determine either.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from parties import Parties, draw_of

from fairpate.privacy.mechanism_events import VoteTables, event_json
from fairpate.privacy.second_accountant import recomputed_epsilon
from fairpate.sites.secure_sum import LEAST_STDDEV, Coordinator, SumError

_SHARE = 17


def left_kernel(rows: list[list[int]], modulus: int) -> list[list[int]]:
    """A basis of the combinations of rows that vanish, modulo a prime."""
    work = [[value % modulus for value in row] + [int(i == k) for k in range(len(rows))] for i, row in enumerate(rows)]
    width, done = len(rows[0]) if rows else 0, 0
    for column in range(width):
        pivot = next((i for i in range(done, len(work)) if work[i][column]), None)
        if pivot is None:
            continue
        work[done], work[pivot] = work[pivot], work[done]
        inverse = pow(work[done][column], -1, modulus)
        work[done] = [value * inverse % modulus for value in work[done]]
        for i in range(len(work)):
            if i != done and work[i][column]:
                factor = work[i][column]
                work[i] = [(a - factor * b) % modulus for a, b in zip(work[i], work[done], strict=True)]
        done += 1
    return [row[width:] for row in work[done:]]


class Adversary:
    """The coordinator with the ``colluding`` sites, which give it their shares of everything."""

    def __init__(self, parties: Parties, colluding: Any) -> None:
        self.parties, self.colluding = parties, set(colluding)
        sites = range(len(parties.draw.sites))
        self.honest = [k for k in sites if k not in self.colluding]
        # Holders of a share of each secret of each honest site.
        self.own: dict[int, set[int]] = {k: set(self.colluding) for k in self.honest}
        self.key: dict[int, set[int]] = {k: set(self.colluding) for k in self.honest}

    def hear(self, holder: int, survivors: bytes) -> None:
        """Take the shares that an honest site releases for this list."""
        participants = [k for k in self.honest + list(self.colluding) if f"hello/{k}" in self.parties.kept]
        for k in participants:
            if k in self.honest:
                (self.own if survivors[k] else self.key)[k].add(holder)

    def determined(self, modulus: int) -> list[dict[int, int]]:
        """The combinations of honest numbers that it can compute, each as the factors of the sites."""
        threshold, kept = self.parties.draw.threshold, self.parties.kept
        sent = [k for k in self.honest if f"masked/{k}" in kept]
        members = {k for k in self.honest if f"hello/{k}" in kept}
        known_key = {k for k in self.honest if len(self.key[k]) >= threshold}
        unknown_own = [k for k in sent if len(self.own[k]) < threshold]
        pairs = [p for p in itertools.combinations(sorted(members), 2) if not known_key & set(p)]
        rows = [
            [int(k == j) for j in unknown_own] + [(1 if k == i else -1 if k == j else 0) for i, j in pairs]
            for k in sent
        ]
        if not sent:
            return []
        found = left_kernel(rows, modulus) if rows[0] else np.eye(len(sent), dtype=int).tolist()
        return [{k: value for k, value in zip(sent, row, strict=True) if value} for row in found]

    def check(self) -> None:
        draw = self.parties.draw
        for modulus in (2, 2**61 - 1):
            found = self.determined(modulus)
            assert len(found) <= 1, found
            for combination in found:
                assert len(set(combination.values())) == 1
                assert len(combination) >= draw.least - draw.may_collude


def stopped(parties: Parties, step: int, count: int, gone: Any) -> None:
    """Send all messages of the steps before ``step``, and ``count`` of that step; sites ``gone`` send no numbers."""
    for number, name in enumerate(("hello", "masked", "agreed", "shares")):
        places = [k for k in range(len(parties.draw.sites)) if not (number and k in gone)]
        parties.send(name, places[:count] if number == step else places)
        if number == step:
            return
        parties.coordinator.advance(time_is_up=True)


@pytest.mark.parametrize(
    ("sites", "may_vanish", "may_collude"),
    [(4, 1, 1), (5, 1, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((6, 2, 1), (7, 2, 2)))],
)
@pytest.mark.parametrize("step", range(4))
def test_nothing_but_the_total_is_determined_wherever_it_stops(
    sites: int, may_vanish: int, may_collude: int, step: int
) -> None:
    for gone, count in itertools.product((range(0), range(sites - may_vanish, sites)), range(sites + 1)):
        parties = Parties(draw_of(sites, may_vanish=may_vanish, may_collude=may_collude, size=1))
        stopped(parties, step, count, gone)
        survivors = parties.kept.get("survivors")
        adversary = Adversary(parties, range(may_collude))
        for k in adversary.honest:
            if f"shares/{k}" in parties.kept:
                assert survivors is not None
                assert len(parties.kept[f"shares/{k}"]) == _SHARE * sites + 64
                adversary.hear(k, survivors)
        adversary.check()
        heard = sum(f"shares/{k}" in parties.kept for k in adversary.honest)
        assert bool(adversary.determined(2)) == (heard + may_collude >= parties.draw.threshold)


def lists(parties: Parties) -> list[bytes]:
    """Every list of survivors that honest sites would sign."""
    draw, found = parties.draw, []
    for gone in itertools.chain.from_iterable(
        itertools.combinations(range(len(draw.sites)), n) for n in range(draw.may_vanish + 1)
    ):
        kept = {k: v for k, v in parties.kept.items() if k not in {f"masked/{place}" for place in gone}}
        coordinator = Coordinator(draw, kept)
        coordinator.advance(time_is_up=True)
        found.append(coordinator.listed("survivors"))
    return found


@pytest.mark.parametrize(("sites", "may_vanish", "may_collude"), [(4, 1, 1), (5, 1, 2), (6, 2, 1)])
def test_a_coordinator_that_shows_every_site_another_list_gets_no_share(
    sites: int, may_vanish: int, may_collude: int
) -> None:
    parties = Parties(draw_of(sites, may_vanish=may_vanish, may_collude=may_collude, size=1))
    stopped(parties, 1, sites, ())
    offered, generator = lists(parties), np.random.default_rng(1)
    colluding = set(range(may_collude))
    for _ in range(20):
        saved = [dict(store) for store in parties.stores]
        adversary, signed = Adversary(parties, colluding), {listed: {} for listed in offered}
        for k in range(sites):
            for listed in offered if k in colluding else [offered[generator.integers(len(offered))]]:
                if not listed[k]:
                    continue
                if k in colluding:  # it signs whatever the coordinator asks for
                    parties.stores[k].pop("survivors", None)
                signed[listed][k] = parties.site(k).agreed(listed)
        for k in adversary.honest:
            for listed, names in signed.items():
                agreement = parties.draw.flags(names) + b"".join(names[place] for place in sorted(names))
                try:
                    parties.site(k).shares(agreement)
                except SumError:
                    continue
                adversary.hear(k, listed)
        adversary.check()
        parties.stores = saved


def test_the_oracle_of_these_tests_finds_what_two_lists_would_give_away() -> None:
    parties = Parties(draw_of(4, size=1))
    stopped(parties, 1, 4, ())
    one, other = lists(parties)[:2]
    adversary = Adversary(parties, [3])
    for k in adversary.honest:  # as if every honest site released shares for both lists
        adversary.hear(k, one)
        adversary.hear(k, other)
    with pytest.raises(AssertionError):
        adversary.check()


@pytest.mark.parametrize(("sites", "may_vanish", "may_collude"), [(4, 1, 1), (12, 2, 3), (50, 10, 5)])
def test_the_second_accountant_never_finds_more_than_the_price(sites: int, may_vanish: int, may_collude: int) -> None:
    draw = draw_of(sites, may_vanish=may_vanish, may_collude=may_collude, noise_stddev=40.0)

    def epsilon(stddev: float) -> float:
        return recomputed_epsilon([event_json(VoteTables(count=1, noise_stddev_votes=stddev))], delta=1e-5)

    def of_noises(count: int) -> float:
        return epsilon(draw.share_stddev * math.sqrt(count))

    price = epsilon(draw.noise_stddev)
    # Of the noises of the fewest survivors, colluding sites know none, one, or as many as the plan allows.
    found = [of_noises(sites - may_vanish - known) for known in (0, 1, may_collude)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(price, rel=1e-9)
    assert of_noises(draw.num_honest - 1) > price, "one noise fewer costs more"
    assert draw.num_honest * Fraction(draw.share_stddev) ** 2 >= Fraction(40) ** 2


def test_a_sum_of_discrete_gaussians_is_one_within_the_stated_ripple() -> None:
    for stddev in (0.5, 0.7, 1.0):
        values = np.arange(-60, 61)
        one, two = (np.exp(-(values**2) / (2 * variance)) for variance in (stddev**2, 2 * stddev**2))
        summed = np.convolve(one / one.sum(), one / one.sum(), mode="same")
        seen = abs(values) <= 6 * stddev
        ratio = summed[seen] / (two / two.sum())[seen]
        assert np.abs(ratio - 1).max() <= 4 * math.exp(-(math.pi**2) * stddev**2)
    assert 500 * 4 * math.exp(-(math.pi**2) * LEAST_STDDEV**2) < 1e-35
