"""The baseline without privacy reads test records alone, and is what an independent cross-validation finds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fairpate.app import baseline
from fairpate.app.assess import assess
from fairpate.app.baseline import without_privacy
from fairpate.app.students import student_card
from fairpate.config import DataConfig, StudentConfig
from fairpate.data import load_dataset
from fairpate.data.dataset import Split
from fairpate.nn.models import build_model
from student.predict import Student


def split(x, y, persons=()) -> Split:
    ids = tuple(map(str, range(len(y))))
    x = torch.as_tensor(x, dtype=torch.float32)
    return Split(x=x, y=torch.as_tensor(y), z=torch.zeros(len(y), dtype=torch.int64), record_id=ids, person_id=persons)


def everything(test: Split):
    return np.ones(len(test), dtype=np.bool_)


def test_what_can_be_told_is_told_and_noise_is_not() -> None:
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 400)
    clear, noise = np.stack([3.0 * y, random.normal(size=400)], 1), random.normal(size=(400, 2))
    found = [without_privacy(split(x, y), everything(split(x, y)), seed=0) for x in (clear, noise)]
    assert found[0] is not None
    assert found[1] is not None
    assert (found[0].accuracy, found[0].num_records) == (1.0, 320)
    assert found[1].accuracy < 0.6  # 1/2, within three standard errors of 400 draws


@pytest.mark.parametrize("x", [np.full((100, 2), np.nan), np.full((100, 2), np.inf), np.zeros((100, 0))])
def test_features_that_no_model_takes_end_no_run(x) -> None:
    test = split(x, [0, 1] * 50)
    assert without_privacy(test, everything(test), seed=0) is None


def test_a_person_is_not_learned_from_and_measured_on() -> None:
    """A label that is the person's own coin can be told from the other record of the person alone."""
    random = np.random.default_rng(1)
    coin, mark = random.integers(0, 2, 100), np.eye(100)
    y, x = np.repeat(coin, 2), np.repeat(mark, 2, axis=0)
    persons = tuple(f"p{number // 2}" for number in range(200))
    together, apart = (
        without_privacy(split(x, y, named), np.ones(200, dtype=np.bool_), seed=0) for named in (persons, ())
    )
    assert together is not None
    assert apart is not None
    assert together.accuracy < 0.65
    assert apart.accuracy > 0.75


@pytest.mark.parametrize(
    ("y", "answered"),
    [([0, 1] * 20, [True] * 40), ([0] * 100, [True] * 100), ([0, 1] * 50, [False] * 100)],
    ids=["few records", "one class", "none answered"],
)
def test_there_is_none_where_nothing_can_be_compared(y, answered) -> None:
    assert without_privacy(split(np.zeros((len(y), 1)), y), np.array(answered), seed=0) is None


def test_pictures_and_wide_records_are_seen_small() -> None:
    random = np.random.default_rng(2)
    y = random.integers(0, 2, 100)
    pictures = random.integers(0, 50, (100, 3, 40, 40)) + 100 * y[:, None, None, None]
    found = without_privacy(split(pictures, y), np.ones(100, dtype=np.bool_), seed=0)
    assert found is not None
    assert found.accuracy > 0.95


def test_no_private_record_moves_it() -> None:
    dataset = load_dataset(DataConfig())
    network = build_model(
        StudentConfig().model, input_shape=tuple(dataset.test.x.shape[1:]), num_classes=10, generator_seed=0
    )
    student = Student(card=student_card(StudentConfig(idp3=None), dataset), network=network)
    other = dataclasses.replace(dataset, private=dataset.private.take([0]), public=dataset.public.take([0]))
    found, again = (assess(student, each, seed=0).without_privacy for each in (dataset, other))
    assert found is not None
    assert found == again


def test_predictions_of_a_few_tests_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_MOST_KEPT", 2)
    rng = np.random.default_rng(4)
    y = rng.integers(0, 2, 60)
    tests = [split(rng.normal(y[:, None], 1.0, (60, 2)), y) for _ in range(3)]
    first = [without_privacy(test, everything(test), seed=0) for test in tests]
    assert len(baseline._predictions) == 2
    assert [without_privacy(test, everything(test), seed=0) for test in tests] == first
