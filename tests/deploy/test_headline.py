"""The reduction of violation at common accuracies: by hand, and that the file of results is what its sources give."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import headline
import measured

pytestmark = pytest.mark.usefixtures("light_runs")


def cell(accuracy, violation, *, seeds=(0, 1), degenerate=(0, 0)):
    return {"seeds": list(seeds), "accuracy": accuracy, "odds": violation, "degenerate": list(degenerate)}


def test_the_frontier_is_what_nothing_beats_in_both():
    points = [(0.8, 0.1), (0.9, 0.2), (0.85, 0.3), (0.7, 0.1), (0.9, 0.25)]
    assert headline.frontier(points) == [(0.8, 0.1), (0.9, 0.2)]


def test_half_the_violation_everywhere_is_half():
    _, reduced = headline.reductions([(0.8, 0.1), (0.9, 0.2)], [(0.8, 0.2), (0.9, 0.4)])
    assert reduced == pytest.approx([0.5] * 21)


def test_a_rival_of_one_setting_stays_with_it():
    """From .80 to .85 ours rises from .1 to .2, where the rival has .4: from 3/4 less to 1/2 less."""
    accuracies, reduced = headline.reductions([(0.8, 0.1), (0.9, 0.3)], [(0.85, 0.4)])
    assert (accuracies[0], accuracies[-1]) == pytest.approx((0.8, 0.85))
    assert (reduced[0], reduced[10], reduced[-1]) == pytest.approx((0.75, 0.625, 0.5))


def test_means_over_seeds_are_compared_and_worthless_models_are_not():
    cells = {
        "adult/dp_fermi/weight=1,epsilon=3": cell([0.8, 0.9], [0.0, 0.2]),
        "adult/dp_fermi/weight=9,epsilon=3": cell([0.9, 0.9], [0.0, 0.0], degenerate=(0, 1)),
        "adult/dp_fermi/weight=1,epsilon=0.3": cell([0.9, 0.9], [0.0, 0.0]),
        "adult/pf_ld/dual_step=5,epsilon=3": cell([0.85, 0.85], [0.3, 0.5]),
    }
    found = headline.against(cells, "pf_ld", notion="odds")
    assert found.keys() == {"odds/pf_ld/adult/epsilon=3", "odds/pf_ld/all"}
    assert found["odds/pf_ld/adult/epsilon=3"]["own_reduction_mean"] == pytest.approx(0.75)
    # At the rival's .85 ours has .1 for its .4: three quarters less, and the rival three times more.
    own = {"own_reduction_mean": 0.75, "own_reduction_median": 0.75, "own_gain_mean": 3.0, "own_gain_median": 3.0}
    # The frontiers share the one accuracy .85: a range without width.
    assert found["odds/pf_ld/all"] == {"seeds": [0, 1]} | {name: pytest.approx(value) for name, value in own.items()}
    cells["adult/pf_ld/dual_step=5,epsilon=3"]["seeds"] = [0, 2]
    with pytest.raises(ValueError, match="same seeds"):
        headline.against(cells, "pf_ld", notion="odds")


def test_ranges_of_accuracies_are_pooled_by_their_width():
    """Over .10 of accuracy ours has half of the rival's violation, over .02 twice as much: (10 x .5 - 2 x 1) / 12."""
    cells = {
        "adult/dp_fermi/weight=1,epsilon=3": cell([0.8], [0.1], seeds=[0], degenerate=[0]),
        "adult/dp_fermi/weight=0,epsilon=3": cell([0.9], [0.2], seeds=[0], degenerate=[0]),
        "adult/pf_ld/dual_step=5,epsilon=3": cell([0.8], [0.2], seeds=[0], degenerate=[0]),
        "adult/pf_ld/dual_step=1,epsilon=3": cell([0.9], [0.4], seeds=[0], degenerate=[0]),
        "credit_default/dp_fermi/weight=1,epsilon=3": cell([0.8], [0.2], seeds=[0], degenerate=[0]),
        "credit_default/dp_fermi/weight=0,epsilon=3": cell([0.82], [0.4], seeds=[0], degenerate=[0]),
        "credit_default/pf_ld/dual_step=5,epsilon=3": cell([0.8], [0.1], seeds=[0], degenerate=[0]),
        "credit_default/pf_ld/dual_step=1,epsilon=3": cell([0.82], [0.2], seeds=[0], degenerate=[0]),
    }
    pooled = headline.against(cells, "pf_ld", notion="odds")["odds/pf_ld/all"]
    assert (pooled["reduction_mean"], pooled["reduction_median"]) == pytest.approx((0.25, 0.5))
    assert (pooled["own_reduction_mean"], pooled["own_gain_mean"]) == pytest.approx((-0.25, 0.25))


@pytest.mark.parametrize("unit", ["", "attribute/"])
@pytest.mark.parametrize("notion", headline.FILES)
def test_the_file_of_results_is_what_its_sources_give(notion, unit):
    stored, cells = measured.read("headline"), headline.compared(notion, unit)
    assert any(name.startswith(unit + notion) for name in stored)
    for rival in headline.RIVALS:
        for name, expected in headline.against(cells, rival, notion=notion).items():
            near = {metric: pytest.approx(value) for metric, value in expected.items()}
            assert stored[unit + name] == near, "write it anew: python benchmarks/papers/headline.py"
