"""A mechanism of one's own in a run: one file with the mechanism, its section and a method that has it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from each_method import SMALL, load_two_labels
from small_runs import QUIET

from aggregator import mechanism
from aggregator.ledger import read_ledger
from fairpate.methods.base import configured
from fairpate.releases.directory import read_json, read_statement
from fairpate.run.run import run_method

pytestmark = pytest.mark.usefixtures("light_runs")

EXAMPLES = Path(__file__).parents[2] / "fairpate" / "examples"
FILE = '''
from typing import ClassVar

from own_mechanism import PlainVote
from pydantic import Field

from aggregator.mechanism import Mechanism
from fairpate.config import Positive, Section
from fairpate.methods.pate import PateFamily


class PlainVoteConfig(Section):
    """The noise of the vote."""

    noise_stddev_votes: Positive = Field(3.0, description="Standard deviation of the noise on each count.")


class PlainPate(PateFamily):
    """PATE without a consensus check."""

    title: ClassVar[str] = "Plain PATE"

    method: str = "plain_pate"
    plain_vote: PlainVoteConfig = PlainVoteConfig()

    @property
    def mechanism(self) -> Mechanism:
        return PlainVote(noise_stddev_votes=self.plain_vote.noise_stddev_votes)
'''


def test_it_runs_in_the_ledger_of_a_run_and_is_priced(tmp_path, monkeypatch):
    shutil.copy(EXAMPLES / "own_mechanism.py", tmp_path)
    (tmp_path / "plain_pate.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mechanism, "_KINDS", dict(mechanism._KINDS))  # the example's name is given up again
    values = {**SMALL, "plain_vote": {"noise_stddev_votes": 4.0}}
    del values["target"], values["aggregator"]["mechanism"]
    try:
        config = configured(values, [f"out={tmp_path / 'run'}"], method="plain_pate:PlainPate")
        run = run_method(config, QUIET, load=load_two_labels)
        name = read_ledger(run.ledger).stored_terms["mechanism"]["name"]
    finally:
        for module in ("plain_pate", "own_mechanism"):
            sys.modules.pop(module, None)
    statement = read_statement(run)
    (event,) = statement.events
    assert event["noise_stddev_votes"] == 4.0
    assert event["count"] == SMALL["aggregator"]["num_queries"]
    # Counts move by sqrt(2) under noise 4: order * queries / 16, converted by Canonne, Kamath and Steinke 2020.
    order = np.linspace(1.01, 200, 100_000)
    conversion = np.log((order - 1) / order) - (np.log(statement.delta) + np.log(order)) / (order - 1)
    assert statement.epsilon == pytest.approx((order * event["count"] / 16 + conversion).min(), rel=5e-3)
    assert name == "example_plain_vote"
    assert read_json(run.metrics)["accuracy"] > 0.5
