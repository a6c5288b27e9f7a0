"""Released labels: their parts stay together, and chances are distributions."""

from __future__ import annotations

import numpy as np
import pytest

from fairpate.config import DataConfig
from fairpate.data import load_data
from fairpate.methods.learning import public_records
from fairpate.types import LabelledSet, RealArray

pytestmark = pytest.mark.usefixtures("light_runs")


def labelled(chances: RealArray | None) -> LabelledSet:
    return LabelledSet(record_ids=("a", "b", "c"), labels=np.array([1, 0, 1]), groups=np.zeros(3, int), chances=chances)


def test_chances_stay_with_their_records() -> None:
    kept = labelled(np.array([[0.2, 0.8], [0.9, 0.1], [0.4, 0.6]])).take(np.array([True, False, True]))
    assert kept.record_ids == ("a", "c")
    assert kept.chances is not None
    np.testing.assert_array_equal(kept.chances, [[0.2, 0.8], [0.4, 0.6]])
    assert labelled(None).take(np.ones(3, dtype=np.bool_)).chances is None


@pytest.mark.parametrize(
    ("chances", "message"),
    [
        (np.full((2, 2), 0.5), r"Expected chances of shape \(3, classes\), got \(2, 2\)"),
        (np.full(3, 1.0), r"Expected chances of shape \(3, classes\), got \(3,\)"),
        (np.array([[1.0, 0.0], [0.5, 0.4], [1.0, 0.0]]), r"chances >= 0 that sum to one, got \[0.5, 0.4\] in row 1"),
        (np.array([[1.0, 0.0], [1.0, 0.0], [1.5, -0.5]]), "in row 2"),
        (np.full((3, 2), np.nan), "in row 0"),
    ],
)
def test_chances_that_are_no_distributions_are_refused(chances: RealArray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labelled(chances)


def test_a_student_reads_chances_where_there_are_any() -> None:
    public = load_data(DataConfig(num_public=20)).public
    chances = np.random.default_rng(0).dirichlet(np.ones(10), size=3)
    ids = tuple(public.record_id[row] for row in (4, 1, 7))
    released = LabelledSet(record_ids=ids, labels=chances.argmax(axis=1), groups=np.zeros(3, int), chances=chances)
    records = public_records(public, released)
    np.testing.assert_array_equal(records.labels, chances.astype(np.float32))
    assert (records.answered_x == public.x[[4, 1, 7]]).all()
    assert len(records.unlabelled_x) == 17
