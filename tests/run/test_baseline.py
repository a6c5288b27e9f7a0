"""The baseline without privacy learns from private records, as many as the model had, and stays private."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fairpate.data.dataset import Split
from fairpate.report.metrics import WithoutPrivacy
from fairpate.run import baseline
from fairpate.run.baseline import _predictions, without_privacy

pytestmark = pytest.mark.usefixtures("light_runs")


def split(x, y) -> Split:
    ids = tuple(map(str, range(len(y))))
    x = torch.as_tensor(x, dtype=torch.float32)
    return Split(x=x, y=torch.as_tensor(y), z=torch.zeros(len(y), dtype=torch.int64), record_id=ids)


def measured(test: Split):
    return np.ones(len(test), dtype=np.bool_)


def two_classes(count: int, seed: int) -> Split:
    random = np.random.default_rng(seed)
    y = random.integers(0, 2, count)
    return split(random.normal(y[:, None], 1.0, (count, 3)), y)


def test_it_is_a_logistic_model_of_the_private_records() -> None:
    private, test = two_classes(1200, 0), two_classes(300, 1)
    scale = StandardScaler().fit(private.x.double().numpy())
    model = LogisticRegression().fit(scale.transform(private.x.double().numpy()), private.y.numpy())
    expected = model.score(scale.transform(test.x.double().numpy()), test.y.numpy())
    found = without_privacy(private, test, measured(test))
    assert found == WithoutPrivacy(accuracy=pytest.approx(expected, abs=1 / 300), num_records=1200)
    half = np.arange(300) < 150
    again = without_privacy(private, test, half)
    assert again is not None
    assert again.accuracy == pytest.approx(
        model.score(scale.transform(test.x[:150].double().numpy()), test.y[:150]), abs=1 / 150
    )


def test_it_learns_from_as_many_records_as_the_model_had_or_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    private, test = two_classes(5000, 0), two_classes(60, 1)
    found = without_privacy(private, test, measured(test))
    assert found is not None
    assert found.num_records == 5000
    monkeypatch.setattr(baseline, "_MOST_VALUES", 3 * 5000 - 1)
    assert without_privacy(private, test, measured(test)) is None
    pictures = split(np.random.default_rng(2).normal(size=(20, 3, 40, 8)), [0, 1] * 10)
    monkeypatch.setattr(baseline, "_MOST_VALUES", 20 * 3 * 16 * 8)
    assert without_privacy(pictures, pictures, measured(pictures)) is not None
    monkeypatch.setattr(baseline, "_MOST_VALUES", 20 * 3 * 16 * 8 - 1)
    assert without_privacy(pictures, pictures, measured(pictures)) is None


@pytest.mark.parametrize("x", [np.full((100, 2), np.nan), np.full((100, 2), np.inf), np.zeros((100, 0))])
def test_features_that_no_model_takes_end_no_run(x) -> None:
    private = split(x, [0, 1] * 50)
    assert without_privacy(private, private, measured(private)) is None


def test_there_is_none_where_nothing_can_be_compared() -> None:
    private = split(np.zeros((100, 1)), [0, 1] * 50)
    one_class, empty = split(np.zeros((100, 1)), [0] * 100), private.take([])
    assert without_privacy(one_class, private, measured(private)) is None
    assert without_privacy(empty, private, measured(private)) is None
    assert without_privacy(private, private, ~measured(private)) is None
    assert without_privacy(private, empty, measured(empty)) is None


def test_pictures_and_wide_records_are_seen_small() -> None:
    random = np.random.default_rng(2)
    y = random.integers(0, 2, 100)
    pictures = split(random.integers(0, 50, (100, 3, 40, 40)) + 100 * y[:, None, None, None], y)
    found = without_privacy(pictures, pictures, measured(pictures))
    assert found is not None
    assert found.accuracy > 0.95


def test_predictions_of_a_few_tests_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_MOST_KEPT", 2)
    splits = [two_classes(60, seed) for seed in range(3)]
    first = [without_privacy(each, each, measured(each)) for each in splits]
    assert len(_predictions) == 2
    assert [without_privacy(each, each, measured(each)) for each in splits] == first
