"""The gate against hand arithmetic on short streams, and against its own guarantees on random ones."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairpate.fairness.gate import DemographicParityGate, filter_stream
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
    return gate, [gate.admit(group, label) for group, label in stream]


def accepts(counts_GC: list[list[int]], rule: GateRule, group: int, label: int) -> bool:
    """What a gate with these counts says."""
    counts = np.array(counts_GC)
    return DemographicParityGate(rule, num_groups=len(counts), num_classes=counts.shape[1], counts_GC=counts).admit(
        group, label
    )


@pytest.mark.parametrize(
    ("margin", "pattern", "counts"),
    [(0.11, "111101101011", [[2, 2], [2, 3]]), (0.0, "111101101000", [[2, 2], [2, 1]])],
)
def test_accept_pattern_worked_by_hand(margin: float, pattern: str, counts: list[list[int]]) -> None:
    gate, decisions = run_stream(GateRule(max_disparity=margin, min_count=2), STREAM)
    assert "".join(str(int(accepted)) for accepted in decisions) == pattern
    assert gate.counts_GC.tolist() == counts


def test_gaps_worked_by_hand() -> None:
    by_hand = ["1", "-2/3", "-1/3", "5/12", "-1/6", "4/15", "0", "1/10"]
    counts = [[0, 0], [0, 0]]
    for (group, label), gap in zip(STREAM, [None] * 4 + by_hand, strict=True):
        # A margin of the gap itself refuses, the next decimal above it accepts; a negative one lies below any margin.
        if gap is None or Fraction(gap) <= 0:
            assert accepts(counts, GateRule(max_disparity=1e-6, min_count=2), group, label)
        else:
            above, below = (math.ceil(Fraction(gap) * 10**6) / 10**6 + step for step in (1e-6, -1e-6))
            assert accepts(counts, GateRule(max_disparity=above, min_count=2), group, label)
            assert not accepts(counts, GateRule(max_disparity=below, min_count=2), group, label)
        counts[group][label] += gap is None or Fraction(gap) < Fraction("0.11")


@pytest.mark.parametrize(
    ("definition", "gap"),
    [
        ("one_vs_rest", Fraction(4, 5) - Fraction(3, 8)),
        ("pairwise", Fraction(4, 5) - Fraction(1, 4)),
        ("overall", Fraction(4, 5) - Fraction(7, 13)),
    ],
)
def test_three_gap_definitions_worked_by_hand(definition: str, gap: Fraction) -> None:
    counts = [[3, 1], [1, 3], [2, 2]]
    above, below = (float(gap) + step for step in (1e-9, -1e-9))
    assert accepts(counts, GateRule(max_disparity=above, min_count=0, gap=definition), 0, 0)
    assert not accepts(counts, GateRule(max_disparity=below, min_count=0, gap=definition), 0, 0)


@pytest.mark.parametrize("margin", [0.1, 0.3, 0.7])
def test_a_gap_equal_to_the_decimal_margin_is_refused(margin: float) -> None:
    # 9 + 1 answers in group 0, of which 10 * margin with label 1; group 1 never has label 1.
    hits = round(10 * margin) - 1
    counts = [[9 - hits, hits], [10, 0]]
    assert not accepts(counts, GateRule(max_disparity=margin, min_count=0), 0, 1)
    assert accepts(counts, GateRule(max_disparity=margin + 1e-9, min_count=0), 0, 1)


def test_cold_start_rules_differ_as_named() -> None:
    # Label 0 would raise a gap of 3/5 at margin 0: accepted where the rule's own count is below 3.
    accepted = {
        rule: accepts([[0, 4], [2, 2]], GateRule(max_disparity=0.0, min_count=3, cold_start=rule), 1, 0)
        for rule in ("group", "cell", "all_groups")
    }
    assert accepted == {"group": False, "cell": True, "all_groups": False}
    waiting = GateRule(max_disparity=0.0, min_count=3, cold_start="all_groups")
    assert accepts([[0, 4], [1, 1]], waiting, 0, 1)


@pytest.mark.parametrize("gap", ["one_vs_rest", "pairwise", "overall"])
def test_no_other_group_yet_counts_as_cold_start(gap: str) -> None:
    assert accepts([[5, 5], [0, 0]], GateRule(max_disparity=0.0, min_count=0, gap=gap), 0, 1)


@given(groups_and_labels, rules)
def test_every_decision_is_its_definition_read_literally(stream, rule) -> None:
    counts = [[0] * NUM_CLASSES for _ in range(NUM_GROUPS)]
    gate = DemographicParityGate(rule, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES)
    for group, label in stream:
        every_label = [literal_decision(counts, rule, group, k) for k in range(NUM_CLASSES)]
        assert gate.accepts_any(group) == any(every_label)
        assert gate.admit(group, label) == every_label[label]
        counts[group][label] += every_label[label]
    assert gate.counts_GC.tolist() == counts


def literal_decision(counts: list[list[int]], rule: GateRule, group: int, label: int) -> bool:
    counted = {"group": sum(counts[group]), "cell": counts[group][label], "all_groups": min(map(sum, counts))}
    if counted[rule.cold_start] < rule.min_count or not any(sum(row) for z, row in enumerate(counts) if z != group):
        return True
    return brute_force_gap(counts, group, label, rule.gap) < Fraction(str(rule.max_disparity))


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
    assert decisions == renamed_decisions
    assert np.array_equal(gate.counts_GC, renamed_gate.counts_GC[np.ix_(group_names, class_names)])


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
        resumed.admit(group, label)
    assert np.array_equal(whole.counts_GC, resumed.counts_GC)


@settings(max_examples=20)
@given(groups_and_labels, rules)
def test_the_stream_filter_is_the_gate_offered_one_by_one(stream, rule) -> None:
    groups, labels = zip(*stream, strict=True)
    _, decisions = run_stream(rule, stream, NUM_GROUPS, NUM_CLASSES)
    mask_N = filter_stream(labels, groups, rule=rule, num_groups=NUM_GROUPS, num_classes=NUM_CLASSES)
    assert mask_N.tolist() == decisions


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
        gate.admit(-1, 0)
    with pytest.raises(IndexError, match="0 <= label < 2, got 2"):
        gate.admit(0, 2)
    with pytest.raises(ValueError, match=r"shape \(3, 2\), got \(2, 2\)"):
        DemographicParityGate(gate.rule, num_groups=3, num_classes=2, counts_GC=gate.counts_GC)
    with pytest.raises(ValueError, match="integers >= 0"):
        DemographicParityGate(gate.rule, num_groups=1, num_classes=2, counts_GC=np.array([[-1, 0]]))
    with pytest.raises(ValueError, match="3 labels and 2 groups"):
        filter_stream([0, 1, 0], [0, 1], rule=gate.rule, num_groups=2, num_classes=2)
