"""Many gates side by side say what one gate says of each stream alone."""

import math

import numpy as np
import pytest

from fairpate.fairness.gate import filter_stream, filter_streams
from fairpate.types import GateRule


@pytest.mark.parametrize("gap", ["one_vs_rest", "pairwise", "overall"])
@pytest.mark.parametrize("cold_start", ["group", "cell", "all_groups"])
@pytest.mark.parametrize("margin", [0.0, 0.05, 0.3, 0.1 + 0.2, 1e20, math.inf])
def test_every_stream_passes_a_gate_of_its_own(gap, cold_start, margin):
    """The fourth margin has a denominator that int64 cannot multiply by."""
    rule = GateRule(max_disparity=margin, min_count=4, cold_start=cold_start, gap=gap)
    generator = np.random.default_rng(7)
    sizes = {"num_groups": 3, "num_classes": 4}
    labels_RN = generator.integers(4, size=(12, 150))
    groups_RN = np.minimum(generator.integers(5, size=(12, 150)), 2)
    alone = [filter_stream(y, z, rule=rule, **sizes) for y, z in zip(labels_RN, groups_RN, strict=True)]
    together = filter_streams(labels_RN, groups_RN, rule=rule, **sizes)
    np.testing.assert_array_equal(together, alone)
    if 0 < margin < 0.2:
        assert 0.05 < together.mean() < 0.95


def test_streams_without_labels_are_empty():
    rule = GateRule(max_disparity=0.1, min_count=0)
    nothing = np.zeros((3, 0), dtype=np.int64)
    assert filter_streams(nothing, nothing, rule=rule, num_groups=2, num_classes=2).shape == (3, 0)
