"""A short version of benchmarks/campaigns/crash_campaign.py: the same program, fewer kills."""

import contextlib
import random

import crash_campaign
import numpy as np
import pytest
from local_postgres import programs

from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.mark.slow  # test_actor.py kills a service under load once
@pytest.mark.parametrize("back_end", ["file", "database"])
def test_killed_again_and_again_no_guarantee_is_broken(back_end):
    if back_end == "database" and programs() is None:
        pytest.skip("PostgreSQL is not installed")
    told = crash_campaign.told_after(6, seed=1, in_database=back_end == "database")
    assert (told["kills"], told["guarantees broken"]) == (6, 0)
    assert told["answers heard"] > 60
    # In a database hardly any of so few kills hits a query between its two transactions.
    assert told["left open, and charged"] > 0 or back_end == "database"
    assert told["rolled back, and refused"] > 1


@pytest.fixture
def state(tmp_path):
    """The state of a campaign in which one answer was heard, charged and drawn."""
    state = crash_campaign.Campaign(folder=tmp_path, port=0)
    state.ledger.parent.mkdir()
    with Ledger(state.ledger, crash_campaign.TERMS) as ledger:
        ledger.commit(ledger.reserve(["key"], [0], np.array([[60, 0, 0]])), [Outcome(verdict="answer", label=0)])
    state.heard["key"] = ("answered", 0)
    (tmp_path / "witness").write_text("key\n")
    return state


def test_a_broken_promise_is_seen(state):
    crash_campaign.check(state)
    for break_it, said in [
        (lambda: state.broken.append("key had two answers"), "two answers"),
        (lambda: state.heard.update(key=("answered", 1)), "the ledger holds"),
        (lambda: state.heard.update(other=("refused", None)), "the ledger holds None"),
        (lambda: (state.folder / "witness").write_text("key\nkey\n"), "drawn 2 times and charged 1 times"),
        (state.ledger.unlink, "gone"),
    ]:
        before = (list(state.broken), dict(state.heard), (state.folder / "witness").read_text())
        break_it()
        with pytest.raises(crash_campaign.BrokenGuaranteeError, match=said):
            crash_campaign.check(state)
        state.broken[:], state.heard = before[0], before[1]
        (state.folder / "witness").write_text(before[2])


def test_a_charge_that_is_forgotten_without_its_log_is_seen(state, monkeypatch):
    crash_campaign.check_losses(state, random.Random(1))
    assert state.losses["files taken, and refused"] == 1
    # Opens whatever is missing.
    monkeypatch.setattr(crash_campaign, "Ledger", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(
        crash_campaign.ledger_audit, "rows", lambda path, **_: ["charge"] if path == state.ledger else []
    )
    with pytest.raises(crash_campaign.BrokenGuaranteeError, match="the ledger opens"):
        crash_campaign.check_losses(state, random.Random(1))
