"""A short version of benchmarks/crash_campaign.py: the same program, fewer kills."""

import contextlib
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from local_postgres import programs

from aggregator.ledger import Ledger
from aggregator.mechanism import Outcome

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "crash_campaign.py"


@pytest.mark.slow  # test_actor.py kills a service under load once
@pytest.mark.parametrize("back_end", ["file", "database"])
def test_killed_again_and_again_no_guarantee_is_broken(back_end):
    command = [sys.executable, CAMPAIGN, "--kills", "12", "--seed", "1", "--json"]
    if back_end == "database":
        if programs() is None:
            pytest.skip("PostgreSQL is not installed")
        command.append("--database")
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert (told["kills"], told["guarantees broken"]) == (12, 0)
    assert told["answers heard"] > 120
    assert told["left open, and charged"] > 0
    assert told["rolled back, and refused"] > 3


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """The program as a module, and a state of it in which one answer was heard, charged and drawn."""
    spec = importlib.util.spec_from_file_location("crash_campaign", CAMPAIGN)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "crash_campaign", module)
    spec.loader.exec_module(module)
    state = module.Campaign(folder=tmp_path, port=0)
    state.ledger.parent.mkdir()
    with Ledger(state.ledger, module.TERMS) as ledger:
        ledger.commit(ledger.reserve(["key"], [0], np.array([[60, 0, 0]])), [Outcome(verdict="answer", label=0)])
    state.heard["key"] = ("answered", 0)
    (tmp_path / "witness").write_text("key\n")
    return module, state


def test_a_broken_promise_is_seen(campaign):
    module, state = campaign
    module.check(state)
    for break_it, said in [
        (lambda: state.broken.append("key had two answers"), "two answers"),
        (lambda: state.heard.update(key=("answered", 1)), "the ledger holds"),
        (lambda: state.heard.update(other=("refused", None)), "the ledger holds None"),
        (lambda: (state.folder / "witness").write_text("key\nkey\n"), "drawn 2 times and charged 1 times"),
        (state.ledger.unlink, "gone"),
    ]:
        before = (list(state.broken), dict(state.heard), (state.folder / "witness").read_text())
        break_it()
        with pytest.raises(module.BrokenGuaranteeError, match=said):
            module.check(state)
        state.broken[:], state.heard = before[0], before[1]
        (state.folder / "witness").write_text(before[2])


def test_a_charge_that_is_forgotten_without_its_log_is_seen(campaign, monkeypatch):
    module, state = campaign
    module.check_losses(state, random.Random(1))
    assert state.losses["files taken, and refused"] == 1
    monkeypatch.setattr(module, "Ledger", lambda *_, **__: contextlib.nullcontext())  # opens whatever is missing
    monkeypatch.setattr(module.audit, "rows", lambda path, **_: ["charge"] if path == state.ledger else [])
    with pytest.raises(module.BrokenGuaranteeError, match="the ledger opens"):
        module.check_losses(state, random.Random(1))
