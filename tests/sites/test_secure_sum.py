"""One noisy sum over sites: exact for any sites that vanish within the plan, and otherwise nothing is unmasked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parties import KEYS, Parties, draw_of

from fairpate.privacy.discrete_gaussian import SeededSource, discrete_gaussians
from fairpate.sites import secure_sum
from fairpate.sites.plan import PlanError, key_text, new_key, read_key, read_roster
from fairpate.sites.secure_sum import ENDED, Coordinator, PublicKeys, Site, SumError

pytestmark = pytest.mark.usefixtures("light_runs")


def noise_of(parties: Parties, place: int) -> Any:
    source, draw = SeededSource(place), parties.draw
    return discrete_gaussians(draw.share_stddev, source.machine_words(["sum 0"], draw.size)[0], source)


def total_of(parties: Parties, places: Any) -> Any:
    return sum(parties.exact[place] + noise_of(parties, place) for place in places)


@given(st.data())
def test_the_sum_of_the_survivors_is_exact_or_nothing_is_unmasked(data: Any) -> None:
    sites = data.draw(st.integers(3, 7))
    may_vanish = data.draw(st.integers(0, (sites - 2) // 2))
    parties = Parties(draw_of(sites, may_vanish=may_vanish))
    vanished = data.draw(st.dictionaries(st.integers(0, sites - 1), st.integers(0, 3), max_size=sites))
    # The plan allows `may_vanish` sites to be lost before their numbers arrive, and afterwards all but a threshold.
    early, late = ([k for k, sent in vanished.items() if sent in at] for at in ((0, 1), (2, 3)))
    allowed = len(early) <= may_vanish and sites - len(early) - len(late) >= parties.draw.threshold
    if allowed:
        total = parties.run(vanished)
        survivors = [k for k in range(sites) if k not in early]
        assert parties.survivors() == survivors
        assert np.array_equal(total, total_of(parties, survivors))
    else:
        with pytest.raises(SumError, match="Time is up"):
            parties.run(vanished)
        assert parties.coordinator.total_D is None


def test_every_message_may_be_asked_for_again_and_is_the_same() -> None:
    parties = Parties(draw_of(5))
    for step in ("hello", "masked", "agreed", "shares"):
        first = [parties.message(step, place) for place in range(5)]
        # Other noise and other numbers, which a site that forgot would send.
        parties.exact = [values + 1 for values in parties.exact]
        parties.source = lambda place: SeededSource(f"again {place}")  # type: ignore[method-assign]
        assert [parties.message(step, place) for place in range(5)] == first
        for _ in range(2):
            parties.send(step, range(5))
        parties.coordinator.advance()
    assert parties.coordinator.total_D is not None


def test_wide_numbers_are_exact_and_wider_ones_are_refused() -> None:
    parties = Parties(draw_of(5))
    parties.exact = [np.array([2**58, -(2**58), 0])] * 5
    assert np.array_equal(parties.run({}), total_of(parties, range(5)))
    for numbers, fault in (
        (np.array([2**60, 0, 0]), "the sum overflows"),
        (np.array([1.0, 0.0, 0.0]), "whole numbers"),
    ):
        again = Parties(draw_of(5))
        again.exact = [numbers] * 5
        with pytest.raises(SumError, match=fault):
            again.run({})


def masked(parties: Parties) -> Parties:
    parties.send("hello", range(len(parties.draw.sites)))
    parties.coordinator.advance()
    parties.send("masked", range(len(parties.draw.sites)))
    return parties


def lists_of(parties: Parties, places: Any) -> bytes:
    """What a coordinator that chooses its own survivors sends."""
    kept = {key: value for key, value in parties.kept.items() if not key.startswith("masked")}
    kept |= {f"masked/{k}": parties.kept[f"masked/{k}"] for k in places}
    other = Coordinator(parties.draw, kept)
    other.advance(time_is_up=True)
    return other.listed("survivors")


def test_a_site_signs_one_list_of_survivors_for_ever() -> None:
    parties = masked(Parties(draw_of(6, may_vanish=2)))
    one, other = lists_of(parties, range(6)), lists_of(parties, range(5))
    signature = parties.site(0).agreed(one)
    with pytest.raises(SumError, match="two different lists of survivors"):
        parties.site(0).agreed(other)
    assert parties.site(0).agreed(one) == signature


def test_a_list_of_a_threshold_alone_is_refused() -> None:
    parties = masked(Parties(draw_of(8, may_vanish=1)))
    assert parties.draw.threshold < parties.draw.least
    few = dict(list(parties.draw.parts(lists_of(parties, range(8)), 96).items())[: parties.draw.threshold])
    with pytest.raises(SumError, match="at least 7"):
        parties.site(0).agreed(parties.draw.flags(few) + b"".join(few.values()))


def test_shares_need_a_threshold_of_signatures_of_the_very_list_that_was_signed() -> None:
    parties = masked(Parties(draw_of(6, may_vanish=2)))
    one, other = lists_of(parties, range(6)), lists_of(parties, range(5))
    draw = parties.draw
    with pytest.raises(SumError, match="no list of survivors yet"):
        parties.site(0).shares(bytes(6))
    signed = {place: parties.site(place).agreed(one) for place in range(3)}
    signed |= {place: parties.site(place).agreed(other) for place in (3, 4)}

    def agreement(places: Any) -> bytes:
        return draw.flags(places) + b"".join(signed[place] for place in places)

    for places, fault in (
        ([0, 1, 2], "Expected 4 sites to sign"),
        ([0, 1, 2, 3], "Site 3"),
        ([0, 1, 2, 3, 4], "Site 3"),
    ):
        with pytest.raises(SumError, match=fault):
            parties.site(0).shares(agreement(places))
    signed[5] = parties.site(5).agreed(one)
    assert len(parties.site(0).shares(agreement([0, 1, 2, 5]))) == 6 * 17 + 64


def test_sites_with_different_lists_of_participants_never_unmask() -> None:
    parties = Parties(draw_of(6, may_vanish=2))
    parties.send("hello", range(6))
    parties.coordinator.advance()
    # The coordinator shows site 0 a list without site 5.
    fewer = Coordinator(parties.draw, {k: v for k, v in parties.kept.items() if k not in ("members", "hello/5")})
    fewer.advance(time_is_up=True)
    parties.site(0).masked(fewer.listed("members", 0), parties.exact[0])
    for place in range(1, 6):
        parties.send("masked", [place])
    odd = parties.site(0).masked(fewer.listed("members", 0), parties.exact[0])
    with pytest.raises(SumError, match="Site 0"):
        parties.coordinator.receive("masked", 0, odd)
    with pytest.raises(SumError, match="two different lists of members"):
        parties.site(0).masked(parties.coordinator.listed("members", 0), parties.exact[0])
    # A coordinator that lists it all the same is found out by the others.
    body = parties.coordinator
    body._messages["masked"][0] = odd
    body.advance()
    with pytest.raises(SumError, match="Site 0"):
        parties.site(1).agreed(body.listed("survivors"))


@pytest.mark.parametrize("changed", ["plan", "number"])
def test_messages_of_another_plan_or_sum_are_refused(changed: str) -> None:
    other = {"plan": b"q" * 32} if changed == "plan" else {"number": 1}
    parties = Parties(draw_of(4))
    stale = Parties(draw_of(4, **other))
    stale.send("hello", range(4))
    with pytest.raises(SumError, match="no valid signature for this plan"):
        parties.coordinator.receive("hello", 0, stale.message("hello", 0))


def flipped(message: bytes, at: int) -> bytes:
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


@pytest.mark.parametrize("step", ["hello", "masked", "agreed", "shares"])
def test_a_message_that_was_changed_or_is_of_another_length_is_refused(step: Any) -> None:
    parties = Parties(draw_of(4))
    for earlier in ("hello", "masked", "agreed", "shares"):
        if earlier == step:
            break
        parties.send(earlier, range(4))
        parties.coordinator.advance()
    message = parties.message(step, 2)
    for wrong in (flipped(message, 3), flipped(message, len(message) - 1), message[:-1], message + b"\0", b""):
        with pytest.raises(SumError, match="Site 2"):
            parties.coordinator.receive(step, 2, wrong)
    with pytest.raises(SumError, match="Site 1"):
        parties.coordinator.receive(step, 1, message)
    with pytest.raises(SumError, match="the plan has 4 sites"):
        parties.coordinator.receive(step, 4, message)
    parties.coordinator.receive(step, 2, message)


def test_a_second_different_message_and_one_that_is_late_are_refused() -> None:
    parties = Parties(draw_of(5))
    parties.send("hello", range(4))
    again = Site(parties.draw, 0, KEYS[0], {}).hello()
    with pytest.raises(SumError, match="differs from an earlier one"):
        parties.coordinator.receive("hello", 0, again)
    parties.coordinator.advance(time_is_up=True)
    with pytest.raises(SumError, match="is late"):
        parties.coordinator.receive("hello", 4, parties.message("hello", 4))
    with pytest.raises(SumError, match="an earlier one did not come in time"):
        parties.coordinator.receive("masked", 4, bytes(8 * 3 + 64))


def test_one_wrong_share_is_left_out_and_two_end_the_sum() -> None:
    def shared(liars: int) -> Any:
        parties = masked(Parties(draw_of(6)))
        parties.coordinator.advance()
        parties.send("agreed", range(6))
        parties.coordinator.advance()
        for place in range(6):
            message = parties.message("shares", place)
            if place < liars:
                # Signed by the site itself: only the secret that comes out shows that it is wrong.
                body, site = flipped(message[:-64], 0), parties.site(place)
                coordinator = parties.coordinator
                digest = coordinator._draw.digest(coordinator._heads, coordinator.listed("survivors"))
                message = body + site._signed("shares", digest + body)
            parties.coordinator.receive("shares", place, message)
        assert parties.draw.threshold == 4
        parties.coordinator.advance()
        return parties

    for liars in (0, 1, 2):
        parties = shared(liars)
        assert np.array_equal(parties.coordinator.total_D, total_of(parties, range(6)))
    with pytest.raises(SumError, match="wrong shares"):
        shared(3)


def test_a_site_that_ended_draws_nothing_anew() -> None:
    parties = masked(Parties(draw_of(4)))
    parties.stores[0] = {ENDED: b"the sum is known"}
    with pytest.raises(SumError, match="new plan"):
        parties.site(0)


@pytest.mark.parametrize(
    ("sites", "may_vanish", "may_collude"), [(3, 1, 1), (4, 2, 1), (5, 1, 0), (5, -1, 1), (2, 0, 2)]
)
def test_plans_that_cannot_hold_are_refused(sites: int, may_vanish: int, may_collude: int) -> None:
    with pytest.raises(SumError, match="Expected"):
        draw_of(sites, may_vanish=may_vanish, may_collude=may_collude)


def test_a_key_in_two_places_is_refused(tmp_path: Path) -> None:
    """One party would count as two honest sites, each with noise that nobody knows."""
    with pytest.raises(SumError, match="a different key"):
        replace(draw_of(5), sites=draw_of(5).sites[:4] + draw_of(5).sites[:1])
    text = key_text(KEYS[0].public)
    spaced = f"{text[:8].upper()} {text[8:]}"  # the same key in hexadecimal digits
    roster = tmp_path / "roster.yaml"
    roster.write_text(f"north: {text}\nsouth: {spaced}\n", encoding="utf-8")
    with pytest.raises(PlanError, match="two sites have the same key"):
        read_roster(roster)


def test_a_damaged_key_says_its_length(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * 31, encoding="ascii")
    path.chmod(0o600)
    with pytest.raises(PlanError, match="expected 32 bytes, got 31"):
        read_key(path)
    with pytest.raises(PlanError, match="exists already"):
        new_key(path)


def test_noise_that_so_many_sites_would_cut_too_small_is_refused() -> None:
    draw_of(12, noise_stddev=10.0)
    with pytest.raises(SumError, match="Expected noise of 3"):
        draw_of(16, noise_stddev=10.0)


@pytest.mark.parametrize("sites", range(2, 30))
def test_two_lists_of_a_threshold_share_an_honest_site(sites: int) -> None:
    for may_collude in range(1, sites):
        for may_vanish in range((sites - may_collude + 1) // 2):
            draw = draw_of(sites, may_vanish=may_vanish, may_collude=may_collude)
            honest = sites - may_collude
            # Colluding sites sign both lists; honest ones sign one each.
            assert 2 * (draw.threshold - may_collude) > honest
            assert draw.threshold <= draw.least


def test_keys_of_small_order_are_refused() -> None:
    good = KEYS[0].public
    with pytest.raises(SumError, match="X25519"):
        PublicKeys(signing=good.signing, sealing=bytes(32))
    parties = Parties(draw_of(4))
    site, head = parties.site(1), bytes(32 + 32 + 32)
    hello = head + site._signed("hello", head) + bytes(62 * 4)
    with pytest.raises(SumError, match="usable X25519"):
        parties.coordinator.receive("hello", 1, hello)


def test_shares_give_the_secret_at_the_threshold_and_any_secret_below_it() -> None:
    secret = bytes(range(16))
    shares = list(secure_sum._shares(secret, threshold=3, count=5))
    for holders in itertools.combinations(range(5), 3):
        assert next(secure_sum._secrets({k: shares[k] for k in holders}, threshold=3)) == secret
    # Two shares and any third value are those of some secret: they leave all secrets open.
    field, two = secure_sum._FIELD, {k: int.from_bytes(shares[k], "little") for k in (0, 1)}
    weights = secure_sum._weights((0, 1, 2))
    for other in (0, 1, 2**128 - 1):
        rest = other - sum(weights[k] * two[k] for k in two)
        third = rest * pow(weights[2], -1, field) % field
        pieces = {k: shares[k] for k in (0, 1)} | {2: third.to_bytes(17, "little")}
        assert next(secure_sum._secrets(pieces, threshold=3)) == other.to_bytes(16, "little")
