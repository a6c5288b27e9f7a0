"""Audit the noise that sites add by themselves: attacks on simulated sums of a plan.

An audit of a run (:mod:`fairpate.run.audit`) draws its releases in one place, where nobody notices a site whose noise
is missing or known. Here all parties of a plan are in one process, with keys of their own, and exchange the real
messages (:mod:`fairpate.sites.secure_sum`). Their numbers are those of canaries alone: no private record is read, so
the result may be published, also before anybody joins.

- *Each site by itself.* All other sites collude with the coordinator, which then learns the site's numbers with its
  own noise. A sum over many sites hardly shows that one noise is missing; this does. What a site adds is compared with
  its share of the noise that the plan prices.
- *The sum*, as in the worst case that the plan allows: as many sites as may vanish do so after their first message,
  and as many as may collude tell the coordinator their noise. What is left is attacked for the epsilon of the plan.

A canary is a unit of one site that adds to one number of every sum, together as much as epsilon allows. The control has
half of each noise, drawn by the audit itself.

All simulated sites run the program that is installed here: each operator audits the own one.

Shapes: K sites, M canaries of one release, S sums, D numbers of a sum.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.methods.base import price
from fairpate.methods.shadows import MOST_EACH, Found, both_kinds, log_ratio, moments_of, own_noise_of, seen_of
from fairpate.privacy.accountant import Event
from fairpate.privacy.audit_bounds import (
    Claimed,
    Coins,
    Drawn,
    IdealAttack,
    NoiseSeen,
    Seen,
    Shadows,
    gaussian_epsilon,
    gaussian_mu,
    normal_scores,
)
from fairpate.privacy.mechanism_events import event_from
from fairpate.report.run_page import Audit
from fairpate.run.audit import CANARIES, MINUTES, attacked
from fairpate.run.publication import write_audit
from fairpate.sites.plan import SitePlan
from fairpate.sites.secure_sum import Coordinator, Draw, Site, SiteKey, Step, known_to_colluders
from fairpate.terminal import Reporter
from fairpate.types import FloatArray, IntArray

_ALONE = 12  # sites that are attacked by themselves; the others, with the same program, together
_MOST_PLACES = 1000  # numbers of a sum whose noise is looked at one by one
_MARGIN = 1.01  # of a shift; whole numbers do not divide epsilon exactly
_NOT_ATTACKED = "what a site computes of its records, and how it is bounded (`fairpate audit` attacks it, in a run)"


def audit_plan(
    plan: SitePlan, file: Path, *, reporter: Reporter, num_canaries: int = CANARIES, minutes: float = MINUTES
) -> tuple[Audit, Path]:
    """Audit the noise that the sites of ``plan`` would add if all of them ran the program of this machine. Write
    ``audit.json`` and ``audit.html`` next to the plan's ``file``, with its name before theirs, and return the audit and
    the path of its page.

    If the sums would take longer than ``minutes``, fewer are drawn, and the power says so. AuditError for too few
    canaries to detect that half the noise is missing.
    """
    target, parts = plan.settings["target"], {"private": plan.events, "test": plan.test_events}
    prices, releases = [], []
    for part, stated in parts.items():
        events = tuple(map(event_from, stated))
        if not events:
            continue
        cost = price(events, delta=target["delta"], accounting=target["accounting"])
        prices.append(cost.epsilon)
        shadows, control = (_shadows(plan, part, events, cost.epsilon, share) for share in (1.0, 0.5))
        options: dict[str, Any] = {"num_canaries": num_canaries, "minutes": minutes / (1 + bool(plan.test_events))}
        options |= {"epsilon": shadows.releases[0].claim.epsilon, "delta": target["delta"], "centred": False}
        releases.append(attacked(shadows, control, part, reporter, **options))
    found = Audit(
        method=plan.settings["method"],
        unit=plan.unit,
        relation=event_from(plan.events[0]).relation,
        delta=target["delta"],
        epsilon=max(prices),
        settings=plan.digest,
        records="sites",
        not_attacked=(_NOT_ATTACKED,),
        releases=tuple(releases),
    )
    page = file.with_suffix(".audit.html")
    write_audit(found, file.with_suffix(".audit.json"), page)
    return found, page


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """One sum of a plan under keys of the audit's own: its terms, what a canary adds to its number, and the stated
    standard deviations of a site's noise and of the noise that is priced."""

    draw: Draw
    added: int
    of_site: float
    of_all: float


def _sums(plan: SitePlan, part: str, keys: Sequence[SiteKey], mu: float) -> list[_Sum]:
    """Return the sums of the records of ``part``, and what a canary adds to each: together a shift of ``mu`` standard
    deviations."""
    numbers = [k for k in range(len(plan.sums)) if plan.reads_model(k) == (part == "test")]
    public, num_honest = tuple(key.public for key in keys), len(keys) - plan.may_vanish - plan.may_collude
    found: list[_Sum] = []
    for number in numbers:
        # The noise of a site follows from the plan here, not from the code under test.
        of_all = plan.sums[number].noise_stddev
        added = max(1, math.floor(of_all * mu / math.sqrt(len(numbers))))
        is_too_much = found and math.hypot(_shift(found, "of_all"), added / of_all) > _MARGIN * mu
        draw = replace(plan.draw(number), sites=public)
        of_site = of_all / math.sqrt(num_honest)
        found.append(_Sum(draw=draw, added=0 if is_too_much else added, of_site=of_site, of_all=of_all))
    return found


def _shift(sums: Sequence[_Sum], stddev: str) -> float:
    return math.hypot(*(each.added / getattr(each, stddev) for each in sums))


def _shadows(plan: SitePlan, part: str, events: tuple[Event, ...], epsilon: float, share: float) -> Shadows:
    """Return the attacks on simulated sums of ``plan`` over the records of ``part``; with ``share`` below 1, as a
    control, on sums with this share of each noise."""
    names, delta = list(plan.sites), plan.settings["target"]["delta"]
    keys = [SiteKey(secrets.token_bytes(32)) for _ in names]
    sums = _sums(plan, part, keys, gaussian_mu(epsilon, delta))
    alone = names if len(names) <= _ALONE else names[: _ALONE - 1]
    places = {f"site {name}": [place] for place, name in enumerate(alone)}
    if len(alone) < len(names):
        places[f"the other {len(names) - len(alone)} sites"] = list(range(len(alone), len(names)))
    num_canaries, turns = min(MOST_EACH, max(each.draw.size for each in sums)), count()

    def play(included_M: Coins) -> Seen:
        # In turn, so that every site is honest, colludes and vanishes.
        order = np.roll(np.arange(len(names)), next(turns))
        gone, colluding = order[: plan.may_vanish], order[plan.may_vanish :][: plan.may_collude]
        honest = order[plan.may_vanish + plan.may_collude :]
        site_M = honest[np.arange(num_canaries) % len(honest)]
        here = np.isin(np.arange(len(names)), gone, invert=True)
        of_sum, of_groups = list[_Shown](), [list[_Shown]() for _ in places]
        for each in sums:
            exact_KD = np.zeros((len(names), each.draw.size), np.int64)
            at_M = np.minimum(np.arange(num_canaries), each.draw.size - 1)
            added_M = each.added * (np.arange(num_canaries) < each.draw.size)
            np.add.at(exact_KD, (site_M, at_M), added_M * included_M)
            if share < 1:
                noisy_KD = exact_KD + own_noise_of(exact_KD.shape, share * each.of_site)
                total_D = noisy_KD[here].sum(axis=0)
            else:
                noisy_KD, total_D = _added_up(each.draw, keys, exact_KD, here)
            # The attacker subtracts what those who collude sent, and reads each number for its own canary.
            exact_D, shown_D = exact_KD[honest].sum(axis=0), total_D - noisy_KD[colluding].sum(axis=0)
            of_sum.append(_Shown(exact_D[None], shown_D[None], added_M, shown_D[at_M], each.of_all))
            for group, where in zip(of_groups, places.values(), strict=True):
                rows, is_own_M = [place for place in where if here[place]], np.isin(site_M, where)
                found_M = noisy_KD[site_M, at_M]
                group.append(_Shown(exact_KD[rows], noisy_KD[rows], added_M * is_own_M, found_M, each.of_site))
        return seen_of([_found(of_sum, share, is_sum=True), *(_found(group, share) for group in of_groups)])

    def claim(stddev: str) -> IdealAttack:
        mu = _shift(sums, stddev) / share
        return IdealAttack(epsilon=gaussian_epsilon(mu, delta), mu=mu)

    reach_K, of_total = _reaches(sums, keys) if share == 1 else (np.ones(len(names)), 1.0)
    return Shadows(
        attack="likelihood ratio of what the coordinator learns of one site if all others collude with it, and of the "
        "sum if as many sites vanish and collude as the plan allows",
        events=events,
        num_canaries=num_canaries,
        releases=(
            Claimed(name="sum of the honest sites", claim=claim("of_all"), reach=of_total),
            *(
                Claimed(name=name, claim=claim("of_site"), is_joint=False, reach=float(reach_K[where].max()))
                for name, where in places.items()
            ),
        ),
        play=play,
        is_gaussian=True,
        control_noise=share,
    )


@dataclass(frozen=True)
class _Shown:
    """One sum, as the attacker of a release sees it: exact and shown numbers (rows, D), what each canary adds and the
    number that shows it (M,), and the stated standard deviation of the noise."""

    exact_RD: IntArray
    shown_RD: IntArray
    added_M: IntArray
    found_M: IntArray
    stddev: float


def _found(shown: Sequence[_Shown], share: float, *, is_sum: bool = False) -> Found:
    """Return what is seen of one site or, with ``is_sum``, of the sum of all, over several sums of the plan with the
    share ``share`` of their noise."""
    score_M, gain_M = log_ratio(
        np.stack([each.found_M / each.stddev for each in shown]),
        np.stack([each.added_M / each.stddev for each in shown]),
        share,
    )
    kinds, of_numbers, divisors = list[NoiseSeen](), [], []
    for each in shown:
        noise_RD = each.shown_RD - each.exact_RD
        spread, kurtosis = moments_of(each.stddev)
        kinds += both_kinds(noise_RD, each.exact_RD > 0, spread, kurtosis=kurtosis)
        of_numbers.append(normal_scores(noise_RD[:, :_MOST_PLACES], each.stddev))
        divisors += [int(np.gcd.reduce(noise_RD, axis=None))] if noise_RD.size else []
    scores_RP = np.concatenate(of_numbers, axis=1)
    if not len(scores_RP):  # of a site that vanished
        scores_RP = np.full((1, scores_RP.shape[1]), np.nan)
    if is_sum:
        # The sum has the noise of the sites: with their signs it would seem to share theirs.
        scores_RP = np.abs(scores_RP) * np.random.default_rng().choice([-1.0, 1.0], scores_RP.shape)
    drawn = Drawn(scores_RP=scores_RP, divisor=math.gcd(*divisors) if divisors else None)
    return Found(score_M, np.where(gain_M > 0, gain_M, np.nan), tuple(kinds), drawn)


def _added_up(draw: Draw, keys: Sequence[SiteKey], exact_KD: IntArray, is_here_K: Coins) -> tuple[IntArray, IntArray]:
    """Run one sum with all its messages, in which sites that are not here vanish after the first one. Return what the
    coordinator learns of each site if all others collude with it (K, D), and the sum (D,)."""
    stores: dict[int, dict[str, bytes]] = {place: {} for place in range(len(keys))}
    sites = [Site(draw, place, key, stores[place]) for place, key in enumerate(keys)]
    coordinator, here = Coordinator(draw, {}), np.flatnonzero(is_here_K).tolist()

    def listed(name: str, place: int) -> bytes:
        found = coordinator.listed(name, place)
        assert found is not None
        return found

    def send(step: Step, message: Callable[[int], bytes], places: Sequence[int]) -> None:
        for place in places:
            coordinator.receive(step, place, message(place))
        coordinator.advance(time_is_up=True)

    send("hello", lambda place: sites[place].hello(), range(len(keys)))
    send("masked", lambda place: sites[place].masked(listed("members", place), exact_KD[place]), here)
    send("agreed", lambda place: sites[place].agreed(listed("survivors", place)), here)
    send("shares", lambda place: sites[place].shares(listed("agreement", place)), here)
    assert coordinator.total_D is not None
    known_KD = np.zeros_like(exact_KD)
    for place in here:
        known_KD[place] = known_to_colluders(draw, place, stores)
    return known_KD, coordinator.total_D


def _reaches(sums: Sequence[_Sum], keys: Sequence[SiteKey]) -> tuple[FloatArray, float]:
    """Return how often the numbers of each site (K,), and those of all sites, count: by numbers beside which no noise
    is seen."""
    reach_K, of_total = np.zeros(len(keys)), 0.0
    for each in sums:
        large_KD = np.full((len(keys), each.draw.size), 2**58 // len(keys), np.int64)
        known_KD, total_D = _added_up(each.draw, keys, large_KD, np.ones(len(keys), np.bool_))
        reach_K = np.maximum(reach_K, np.abs(known_KD / large_KD).mean(axis=1))
        of_total = max(of_total, float(np.abs(total_D / large_KD.sum(axis=0)).mean()))
    return reach_K, of_total
