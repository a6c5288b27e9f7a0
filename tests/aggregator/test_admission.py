"""Admission: what the gate would refuse is left out before it is paid, and nothing but public values is looked at."""

import inspect
import math

import numpy as np

from aggregator.session import admit_queries
from fairpate.fairness.gate import DemographicParityGate
from fairpate.types import GateRule


def gate_of(counts_GC, *, max_disparity=0.1, min_count=0):
    counts_GC = np.array(counts_GC)
    groups, classes = counts_GC.shape
    rule = GateRule(max_disparity=max_disparity, min_count=min_count)
    return DemographicParityGate(rule, num_groups=groups, num_classes=classes, counts_GC=counts_GC)


def sure_of(labels, *, confidence=0.9, num_classes=2):
    """Probabilities that are largest at ``labels``."""
    rest = (1 - np.asarray(confidence, dtype=float)) / (num_classes - 1)
    probabilities_NC = np.repeat(np.broadcast_to(rest, len(labels))[:, None], num_classes, axis=1)
    probabilities_NC[np.arange(len(labels)), labels] = confidence
    return probabilities_NC


def test_what_the_gate_would_refuse_is_left_out():
    # Both groups at rate 1/2. One more label 1 for group 0 makes 6/11 against 5/10: a gap of .045, beyond .04.
    gate = gate_of([[5, 5], [5, 5]], max_disparity=0.04)
    rows = admit_queries(sure_of([1, 1, 1]), np.array([0, 0, 0]), gate=gate, count=3)
    assert rows == []


def test_an_admitted_query_moves_the_counters_and_lets_a_postponed_one_in():
    # By hand: label 1 for group 0 is refused at first, as above; label 0 for it is refused too; group 1 likewise. With
    # a margin of .05 each is admitted once, and then only what balances it.
    gate = gate_of([[5, 5], [5, 5]], max_disparity=0.05)
    rows = admit_queries(sure_of([1, 1, 0, 1]), np.array([0, 0, 0, 1]), gate=gate, count=4)
    assert rows == [0, 2, 3, 1]


def test_never_more_than_asked_for_and_in_the_given_order():
    gate = gate_of([[0, 0], [0, 0]], max_disparity=math.inf)
    rows = admit_queries(sure_of([0, 1, 1, 0, 1]), np.array([0, 1, 0, 1, 0]), gate=gate, count=3)
    assert rows == [0, 1, 2]


def test_with_right_guesses_the_gate_accepts_every_admitted_query():
    generator = np.random.default_rng(0)
    groups_N, labels_N = generator.integers(0, 3, 300), generator.integers(0, 4, 300)
    counts_GC = np.full((3, 4), 50)
    expected, acting = (gate_of(counts_GC, max_disparity=0.02) for _ in range(2))
    probabilities_NC = sure_of(labels_N, confidence=generator.uniform(0.5, 1, 300), num_classes=4)
    rows = admit_queries(probabilities_NC, groups_N, gate=expected, count=200)
    assert len(rows) > 50
    assert all(acting.admit(int(groups_N[row]), int(labels_N[row])) for row in rows)


def test_there_is_no_way_in_for_votes():
    assert set(inspect.signature(admit_queries).parameters) == {"probabilities_NC", "groups_N", "gate", "count"}
