"""The noise that each site adds by itself is attacked: a site without it is found, whatever the others add."""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parties import KEYS, Parties, draw_of

from fairpate import cli
from fairpate.methods.base import price
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import VoteSums, event_json
from fairpate.report.run_page import Audit
from fairpate.sites import secure_sum
from fairpate.sites.audit_of_sites import audit_plan
from fairpate.sites.plan import SitePlan, key_text, read_plan
from fairpate.sites.secure_sum import known_to_colluders
from fairpate.terminal import Reporter

QUIET = Reporter(quiet=True)
STDDEV, NORM = 60.0, 60
NAMES = ("north", "south", "west", "east")


def planned(*, sums: int = 2, may_vanish: int = 1) -> SitePlan:
    """A plan of sums with 60 and 40 numbers, of which a unit changes each by a vector of length 60."""
    events = (VoteSums(count=sums, noise_stddev_votes=STDDEV, norm=NORM),)
    values = {
        "format": "fairpate.site-plan/1",
        "id": "0",
        "settings": {"method": "weighted_votes", "target": {"delta": 1e-5, "accounting": "pld"}},
        "unit": "record",
        "events": [event_json(each) for each in events],
        "sums": [
            {"name": f"sum {i}", "rows": 2, "columns": c, "noise_stddev": STDDEV} for i, c in enumerate((30, 20)[:sums])
        ],
        "public_arrays": "",
        "test_events": [],
        "embedding": None,
        "sites": {name: key_text(KEYS[k].public) for k, name in enumerate(NAMES)},
        "may_vanish": may_vanish,
        "may_collude": 1,
    }
    return read_plan(json.dumps(values).encode(), "plan")


def audited(folder: Path, plan: SitePlan) -> Audit:
    found, page = audit_plan(plan, folder / "plan.json", reporter=QUIET, num_canaries=600)
    assert page == folder / "plan.audit.html" and "simulated sites" in page.read_text(encoding="utf-8")
    assert found.refuted or found.power_words.startswith("No power over what a site computes of its records")
    assert Audit.from_json(json.loads((folder / "plan.audit.json").read_text())) == found
    return found


def test_a_correct_plan_is_not_refuted_and_a_control_with_half_the_noise_is_further_apart(tmp_path: Path) -> None:
    plan = planned()
    found = audited(tmp_path, plan)
    if found.refuted:  # by design one in a hundred
        found = audited(tmp_path, plan)
    (step,) = found.releases
    assert not found.refuted and step.control_noise == 0.5
    assert found.epsilon == price((VoteSums(count=2, noise_stddev_votes=STDDEV, norm=NORM),), delta=1e-5).epsilon
    names = [single.name for single in step.singles]
    assert names == ["sum of the honest sites", *(f"site {name}" for name in NAMES)]
    # Two of four sites are honest: each has half of the variance, so that its own numbers tell more.
    joint, *alone = (single.claim.mu for single in step.singles)
    assert joint == pytest.approx(math.sqrt(2) * NORM / STDDEV, rel=0.03)
    assert alone == pytest.approx([math.sqrt(2) * joint] * 4)
    for single in step.singles:
        less, twice = found.powers_of(single)
        assert min(less, twice) > 0.9 and single.reach == pytest.approx(1, abs=1e-6)
        assert single.control is not None and single.found is not None
        assert max(single.control.bounds(1e-5)) > max(single.found.bounds(1e-5))


Noise = Callable[[Any, Any, Any], Any]
"""Returns noisy numbers in the place of ``_with_noise(draw, exact, source)``."""


def times(share: float) -> Noise:
    def with_noise(draw: Any, exact_D: Any, source: Any) -> Any:
        return exact_D + np.rint(share * (WHOLE(draw, exact_D, source) - exact_D)).astype(np.int64)

    return with_noise


WHOLE = secure_sum._with_noise


def only_at(place: int, change: Noise) -> Callable[[pytest.MonkeyPatch], None]:
    def fault(patched: pytest.MonkeyPatch) -> None:
        masked = secure_sum.Site.masked

        def of_one(self: Any, *given: Any) -> bytes:
            with pytest.MonkeyPatch.context() as here:
                if self._place == place:
                    here.setattr(secure_sum, "_with_noise", change)
                return masked(self, *given)

        patched.setattr(secure_sum.Site, "masked", of_one)

    return fault


def everywhere(change: Noise) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patched: patched.setattr(secure_sum, "_with_noise", change)


def shared_by_all_sites(patched: pytest.MonkeyPatch) -> None:
    """As many noises as honest sites; in truth one."""
    drawn: dict[bytes, SeededSource] = {}
    masked = secure_sum.Site.masked

    def seeded(self: Any, members: bytes, exact_D: Any, source: Any = None) -> bytes:
        # The list of members is another one in every sum, and the same for all sites but for their own shares.
        key = members[: len(NAMES) + 32]
        return masked(self, members, exact_D, drawn.setdefault(key, SeededSource(secrets.randbits(32))))

    patched.setattr(secure_sum.Site, "masked", seeded)


def drawn_for_every_site(patched: pytest.MonkeyPatch) -> None:
    """A share of the noise as if nobody could vanish or collude."""
    patched.setattr(
        secure_sum.Draw, "share_stddev", property(lambda self: self.noise_stddev / math.sqrt(len(self.sites)))
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (only_at(1, times(0.0)), "site south: "),
        (only_at(2, times(0.5)), "site west: "),
        (only_at(0, times(2 / 3)), "site north: "),
        (only_at(3, lambda draw, exact, source: WHOLE(draw, 2 * exact, source)), "site east: one unit adds 2.00 times"),
        (
            only_at(1, lambda draw, exact, source: exact + (WHOLE(draw, exact, source) - exact) // 2 * 2),
            "site south: all",
        ),
        (everywhere(lambda draw, exact, _: WHOLE(draw, exact, SeededSource(3))), "site north: "),
        (shared_by_all_sites, "signs of"),
        (drawn_for_every_site, "site west: its noise is"),
    ],
    ids=["none", "half", "two thirds", "counted twice", "even", "drawn from a seed", "shared", "for more honest sites"],
)
def test_a_fault_in_the_noise_of_one_site_or_of_all_is_found_and_named(
    fault: Callable[[pytest.MonkeyPatch], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = audited(tmp_path, planned())
    assert found.refuted
    assert any(each.startswith(words) or words in each for each in found.findings)


def test_the_command_fails_where_less_noise_is_found_than_the_plan_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes(planned().content)
    everywhere(times(0.5))(monkeypatch)
    words = ["fairpate", "site", "audit", str(tmp_path / "plan.json"), "--canaries", "600", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1 and found["refuted"] and Path(found["page"]).read_text().count("Do not join this plan")
    monkeypatch.setattr(sys, "argv", [*words[:3], str(tmp_path / "no.json")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "no.json not found; give the file" in capsys.readouterr().err


def test_what_all_others_know_of_a_site_is_its_numbers_with_its_own_noise_alone() -> None:
    """Also where a site vanished after its first message, whose masks the others had added."""
    parties = Parties(draw_of(4, may_vanish=1, size=5))
    parties.run({2: 1})
    for place in (0, 1, 3):
        stores = dict(enumerate(parties.stores))
        own_noise = secure_sum._with_noise(parties.draw, np.zeros(5, np.int64), parties.source(place))
        assert known_to_colluders(parties.draw, place, stores).tolist() == (parties.exact[place] + own_noise).tolist()
