"""The gate against hand arithmetic on short streams, and against its own guarantees on random ones."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.fairness.gate import DemographicParityGate, decide, filter_stream, tentative_gap
from fairpate.types import GateRule

STREAM = [(0, 1), (0, 1), (1, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (1, 1)]
NUM_GROUPS, NUM_CLASSES = 3, 4

groups_and_labels = st.lists(
    st.tuples(st.integers(0, NUM_GROUPS - 1), st.integers(0, NUM_CLASSES - 1)), min_size=1, max_size=60
)
rules = st.builds(
    GateRule,
    max_disparity=st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5]),
    min_count=st.integers(0, 5),
    cold_start=st.sampled_from(["group", "cell", "all_groups"]),
    gap=st.sampled_from(["one_vs_rest", "pairwise", "overall"]),
)


def run_stream(rule: GateRule, stream: list[tuple[int, int]], num_groups: int = 2, num_classes: int = 2):
    gate = DemographicParityGate(rule, num_groups=num_groups, num_classes=num_classes)
    return gate, [gate.offer(group, label) for group, label in stream]


@pytest.mark.parametrize(
    ("margin", "pattern", "counts"),
    [(0.11, "111101101011", [[2, 2], [2, 3]]), (0.0, "111101101000", [[2, 2], [2, 1]])],
)
def test_accept_pattern_worked_by_hand(margin: float, pattern: str, counts: list[list[int]]) -> None:
    gate, decisions = run_stream(GateRule(max_disparity=margin, min_count=2), STREAM)
    assert "".join(str(int(decision.accepted)) for decision in decisions) == pattern
    assert gate.counts_GC.tolist() == counts


def test_gaps_worked_by_hand() -> None:
    _, decisions = run_stream(GateRule(max_disparity=0.11, min_count=2), STREAM)
    by_hand = ["1", "-2/3", "-1/3", "5/12", "-1/6", "4/15", "0", "1/10"]
    assert [decision.gap for decision in decisions[4:]] == [float(Fraction(gap)) for gap in by_hand]
    assert all(math.isnan(decision.gap) and decision.reason == "cold_start" for decision in decisions[:4])


def test_three_gap_definitions_worked_by_hand() -> None:
    counts_GC = np.array([[3, 1], [1, 3], [2, 2]])
    gaps = {gap: tentative_gap(counts_GC, group=0, label=0, gap=gap) for gap in ("one_vs_rest", "pairwise", "overall")}
    assert gaps == {
        "one_vs_rest": Fraction(4, 5) - Fraction(3, 8),
        "pairwise": Fraction(4, 5) - Fraction(1, 4),
        "overall": Fraction(4, 5) - Fraction(7, 13),
    }


@pytest.mark.parametrize("margin", [0.1, 0.3, 0.7])
def test_a_gap_equal_to_the_decimal_margin_is_refused(margin: float) -> None:
    # 9 + 1 answers in group 0, of which 10 * margin with label 1; group 1 never has label 1.
    hits = round(10 * margin) - 1
    counts_GC = np.array([[9 - hits, hits], [10, 0]])
    assert not decide(counts_GC, rule=GateRule(max_disparity=margin, min_count=0), group=0, label=1).accepted
    wider = GateRule(max_disparity=margin + 1e-9, min_count=0)
    assert decide(counts_GC, rule=wider, group=0, label=1).accepted


def test_cold_start_rules_differ_as_named() -> None:
    counts_GC = np.array([[0, 4], [2, 2]])
    accepted = {
        rule: decide(counts_GC, rule=GateRule(max_disparity=0.0, min_count=3, cold_start=rule), group=1, label=0).reason
        for rule in ("group", "cell", "all_groups")
    }
    assert accepted == {"group": "gap_exceeded", "cell": "cold_start", "all_groups": "gap_exceeded"}
    lopsided_GC = np.array([[0, 4], [1, 1]])
    waiting = GateRule(max_disparity=0.0, min_count=3, cold_start="all_groups")
    assert decide(lopsided_GC, rule=waiting, group=0, label=1).reason == "cold_start"


@pytest.mark.parametrize("gap", ["one_vs_rest", "pairwise", "overall"])
def test_no_other_group_yet_counts_as_cold_start(gap: str) -> None:
    counts_GC = np.array([[5, 5], [0, 0]])
    decision = decide(counts_GC, rule=GateRule(max_disparity=0.0, min_count=0, gap=gap), group=0, label=1)
    assert decision.accepted
    assert decision.reason == "cold_start"


@given(groups_and_labels, rules)
def test_every_acceptance_after_the_cold_start_kept_the_gap_below_the_margin(stream, rule) -> None:
    counts = [[0] * NUM_CLASSES for _ in range(NUM_GROUPS)]
    _, decisions = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    for (group, label), decision in zip(stream, decisions, strict=True):
        if decision.reason != "cold_start":
            gap = brute_force_gap(counts, group, label, rule.gap)
            assert decision.accepted == (gap < Fraction(str(rule.max_disparity)))
        counts[group][label] += decision.accepted


def brute_force_gap(counts: list[list[int]], group: int, label: int, definition: str) -> Fraction:
    """The definitions read literally over an explicit list of answers."""
    answers = [(z, k) for z, row in enumerate(counts) for k, count in enumerate(row) for _ in range(count)]
    answers.append((group, label))

    def rate(members: list[int]) -> Fraction | None:
        labels = [k for z, k in answers if z in members]
        return Fraction(labels.count(label), len(labels)) if labels else None

    here, others = rate([group]), [z for z in range(NUM_GROUPS) if z != group]
    if definition == "one_vs_rest":
        return here - rate(others)
    if definition == "overall":
        return here - rate([group, *others])
    return max(here - rate([z]) for z in others if rate([z]) is not None)


@given(groups_and_labels, rules)
def test_infinite_margin_or_endless_cold_start_keeps_everything(stream, rule) -> None:
    groups, labels = zip(*stream, strict=True)
    for kept_by in (
        GateRule(max_disparity=math.inf, min_count=rule.min_count, cold_start=rule.cold_start, gap=rule.gap),
        GateRule(max_disparity=0.0, min_count=10**9, cold_start=rule.cold_start, gap=rule.gap),
    ):
        assert filter_stream(labels, groups, rule=kept_by, num_groups=3, num_classes=4).all()


@given(groups_and_labels, rules, st.permutations(range(NUM_CLASSES)), st.permutations(range(NUM_GROUPS)))
def test_renaming_classes_and_groups_changes_no_decision(stream, rule, class_names, group_names) -> None:
    renamed = [(group_names[group], class_names[label]) for group, label in stream]
    gate, decisions = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    renamed_gate, renamed_decisions = run_stream(rule, renamed, NUM_GROUPS, NUM_CLASSES)
    # repr, because the NaN of a cold start is not equal to itself
    assert repr(decisions) == repr(renamed_decisions)
    assert np.array_equal(gate.counts_GC, renamed_gate.counts_GC[np.ix_(group_names, class_names)])


@given(groups_and_labels, rules)
def test_accepts_any_is_false_exactly_when_every_label_would_be_refused(stream, rule) -> None:
    gate, _ = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    for group in range(NUM_GROUPS):
        every_label = [
            decide(gate.counts_GC, rule=rule, group=group, label=label).accepted for label in range(NUM_CLASSES)
        ]
        assert gate.accepts_any(group) == any(every_label)


def test_free_refusal_needs_a_margin_near_zero() -> None:
    # Gaps of one group sum to (C - 1) / (n_z + 1): a margin above their mean leaves some label open.
    # Here both labels leave 13/25 - 1/2 = 0.02.
    counts_GC = np.array([[12, 12], [8, 8]])
    for margin, open_ in ((0.0, False), (0.02, False), (0.021, True)):
        rule = GateRule(max_disparity=margin, min_count=0)
        gate = DemographicParityGate(rule, num_groups=2, num_classes=2, counts_GC=counts_GC)
        assert gate.accepts_any(0) is open_


@given(groups_and_labels, rules, st.integers(0, 60))
def test_a_gate_restored_from_its_counts_decides_as_if_never_stopped(stream, rule, stop) -> None:
    whole, _ = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    first, _ = run_stream(rule, stream[:stop], NUM_GROUPS, NUM_CLASSES)
    resumed = DemographicParityGate(rule, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES, counts_GC=first.counts_GC)
    for group, label in stream[stop:]:
        resumed.offer(group, label)
    assert np.array_equal(whole.counts_GC, resumed.counts_GC)


@settings(max_examples=20)
@given(groups_and_labels, rules)
def test_the_stream_filter_is_the_gate_offered_one_by_one(stream, rule) -> None:
    groups, labels = zip(*stream, strict=True)
    _, decisions = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    mask_N = filter_stream(labels, groups, rule=rule, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES)
    assert mask_N.tolist() == [decision.accepted for decision in decisions]


@pytest.mark.parametrize(("gap", "published_answers"), [("pairwise", 1661), ("overall", 1832), ("one_vs_rest", 1722)])
def test_published_trial_up_to_the_order_of_its_stream(gap: str, published_answers: int) -> None:
    # Appendix H gives the table of 2,000 points and the margin, not their order or M; M = 50 is the released code's.
    table_GC = np.array([[324, 287], [420, 274], [445, 250]])
    groups = np.repeat([0, 0, 1, 1, 2, 2], table_GC.ravel())
    labels = np.repeat([0, 1, 0, 1, 0, 1], table_GC.ravel())
    rule = GateRule(max_disparity=0.01, min_count=50, gap=gap)
    answers = []
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(2000)
        answers.append(filter_stream(labels[order], groups[order], rule=rule, num_groups=3, num_classes=2).sum())
    assert abs(np.mean(answers) - published_answers) < 50


def test_order_of_the_stream_matters() -> None:
    rule = GateRule(max_disparity=0.11, min_count=2)
    groups, labels = np.array(STREAM).T
    forward = filter_stream(labels, groups, rule=rule, num_groups=2, num_classes=2)
    backward = filter_stream(labels[::-1], groups[::-1], rule=rule, num_groups=2, num_classes=2)
    assert forward.tolist() != backward[::-1].tolist()


def test_counts_are_a_read_only_copy() -> None:
    gate, _ = run_stream(GateRule(max_disparity=0.1, min_count=2), STREAM)
    with pytest.raises(ValueError, match="read-only"):
        gate.counts_GC[0, 0] = 7


def test_bad_input_is_named() -> None:
    gate = DemographicParityGate(GateRule(max_disparity=0.1, min_count=2), num_groups=2, num_classes=2)
    with pytest.raises(IndexError, match="0 <= group < 2, got -1"):
        gate.offer(-1, 0)
    with pytest.raises(IndexError, match="0 <= label < 2, got 2"):
        gate.offer(0, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\), got \(2, 2\)"):
        DemographicParityGate(gate.rule, num_groups=3, num_classes=2, counts_GC=gate.counts_GC)
    with pytest.raises(ValueError, match="integers >= 0"):
        DemographicParityGate(gate.rule, num_groups=1, num_classes=2, counts_GC=np.array([[-1, 0]]))
    with pytest.raises(ValueError, match="3 labels and 2 groups"):
        filter_stream([0, 1, 0], [0, 1], rule=gate.rule, num_groups=2, num_classes=2)


@pytest.mark.parametrize("cold_start", ["group", "cell", "all_groups"])
@pytest.mark.parametrize("gap", ["one_vs_rest", "pairwise", "overall"])
@pytest.mark.parametrize("max_disparity", [0.0, 0.1, 1 / 3, math.inf])
def test_admitting_is_offering_without_the_words(cold_start, gap, max_disparity):
    rule = GateRule(max_disparity=max_disparity, min_count=3, cold_start=cold_start, gap=gap)
    offering, admitting = (DemographicParityGate(rule, num_groups=3, num_classes=4) for _ in range(2))
    generator = np.random.default_rng(0)
    for group, label in zip(generator.integers(0, 3, 300), generator.integers(0, 4, 300), strict=True):
        decisions = [decide(offering.counts_GC, rule=rule, group=group, label=k).accepted for k in range(4)]
        assert admitting.accepts_any(group) == any(decisions)
        assert admitting.admit(group, label) == offering.offer(group, label).accepted == decisions[label]
    np.testing.assert_array_equal(admitting.counts_GC, offering.counts_GC)
