"""The reduction of violation at common accuracies: by hand, and that the file of results is what its sources give."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import headline
import measured


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
    assert found["odds/pf_ld/adult/epsilon=3"]["reduction_mean"] == pytest.approx(0.75)
    assert found["odds/pf_ld/all"] == {"seeds": [0, 1], "reduction_mean": pytest.approx(0.75)} | {
        "reduction_median": pytest.approx(0.75)
    }
    cells["adult/pf_ld/dual_step=5,epsilon=3"]["seeds"] = [0, 2]
    with pytest.raises(ValueError, match="same seeds"):
        headline.against(cells, "pf_ld", notion="odds")


@pytest.mark.parametrize("notion", headline.FILES)
def test_the_file_of_results_is_what_its_sources_give(notion):
    stored, cells = measured.read("headline"), measured.read(headline.FILES[notion])
    assert any(name.startswith(notion) for name in stored)
    for rival in headline.RIVALS:
        for name, expected in headline.against(cells, rival, notion=notion).items():
            near = {metric: pytest.approx(value) for metric, value in expected.items()}
            assert stored[name] == near, "write it anew: python benchmarks/headline.py"
