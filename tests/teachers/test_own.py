"""Teachers of the user's own vote as functions of their shards alone, and their votes are what is kept."""

import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fairpate.config import RayConfig, named_object
from fairpate.data.dataset import Split
from teachers.ensemble import assign_teachers, shard_key
from teachers.own import OwnTeacherError, _determined_by, ask_own_teachers
from teachers.ray_pool import open_pool

pytestmark = pytest.mark.xdist_group("ray")

TEACHERS, CLASSES = 6, 3
QUERIES = torch.randn(40, 4, generator=torch.Generator().manual_seed(9))


def records(count=240, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, 0] > 0.5).long() + (x[:, 0] > -0.5).long()
    names = tuple(f"record {row}" for row in range(count))
    return Split(x=x, y=y, z=torch.zeros(count, dtype=torch.int64), record_id=names)


def ask(factory, folder, private=None, *, told=None, **options):
    private = records() if private is None else private
    words = {"num_teachers": TEACHERS, "num_classes": CLASSES, "seed": 5, "checkpoint_dir": folder} | (told or {})
    return ask_own_teachers(factory, private, QUERIES, **words, **options)


def boosting(random_state):
    return HistGradientBoostingClassifier(max_iter=5, random_state=random_state)


def test_any_model_votes_as_if_it_were_trained_by_hand(tmp_path):
    def forest(random_state):
        made.append(random_state)
        return RandomForestClassifier(5, random_state=random_state)

    made = []
    found = ask(forest, tmp_path)
    private = records()
    teacher_of = assign_teachers(private.record_id, TEACHERS, shard_key(5))
    expected = np.zeros((len(QUERIES), CLASSES), dtype=int)
    for teacher, random_state in enumerate(made[1:]):  # one was made to be looked at
        shard = teacher_of == teacher
        model = RandomForestClassifier(5, random_state=random_state)
        said = model.fit(private.x.numpy()[shard], private.y.numpy()[shard]).predict(QUERIES.numpy())
        expected[np.arange(len(said)), said] += 1
    np.testing.assert_array_equal(found.votes_QC, expected)
    assert len(set(made[1:])) == TEACHERS
    assert max(made) < 2**32


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(boosting, marks=pytest.mark.slow),
        pytest.param(lambda: make_pipeline(StandardScaler(), LogisticRegression()), marks=pytest.mark.slow),
        lambda **options: RandomForestClassifier(3, **options),
        LogisticRegression,
    ],
    ids=["boosting", "pipeline", "keywords", "class"],
)
def test_models_of_many_kinds_vote_again_alike(tmp_path, factory):
    first = ask(factory, tmp_path / "a")
    again = ask(factory, tmp_path / "b", block_size=1)
    np.testing.assert_array_equal(first.votes_QC, again.votes_QC)
    assert (first.votes_QC.sum(axis=1) == TEACHERS).all()
    right = first.votes_QC.argmax(axis=1) == ((QUERIES[:, 0] > 0.5).long() + (QUERIES[:, 0] > -0.5).long()).numpy()
    assert right.mean() > 0.6


def test_a_class_of_an_installed_package_is_a_factory(tmp_path):
    assert ask(GaussianNB, tmp_path).votes_QC.sum() == TEACHERS * len(QUERIES)


class Gambler:
    """Draws from every random state of the process, as often as its shard says."""

    def fit(self, x, y):
        for _ in range(int(abs(x).sum() * 100) % 97):
            random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
        return self

    def predict(self, x):
        draws = [int(random.random() * 1e6) + int(np.random.rand() * 1e6) + int(torch.rand(()) * 1e6) for _ in x]  # noqa: NPY002
        return np.array(draws) % CLASSES


@pytest.mark.parametrize(
    "factory", [pytest.param(boosting, marks=pytest.mark.slow), Gambler], ids=["boosting", "global randomness"]
)
@pytest.mark.parametrize(
    "block_size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(6, marks=pytest.mark.slow)]
)
def test_one_record_moves_one_vote_at_most(tmp_path, factory, block_size):
    """The brute force behind the price: remove or change a record, and count what moves."""
    place, private = factory, records()
    before = ask(place, tmp_path, private, block_size=block_size).votes_QC
    moved = 0
    for row in range(6):
        others = [other for other in range(len(private)) if other != row]
        changed = Split(
            x=private.x.index_fill(0, torch.tensor([row]), 50.0),
            y=private.y.index_fill(0, torch.tensor([row]), 0),
            z=private.z,
            record_id=private.record_id,
        )
        for neighbour in (private.take(others), changed):
            apart = np.abs(ask(place, tmp_path, neighbour, block_size=block_size).votes_QC - before).sum(axis=1)
            assert set(apart.tolist()) <= {0, 2}
            moved += int((apart == 2).sum())
    assert moved


def test_votes_are_kept_and_models_are_not(tmp_path):
    fits = Counter()

    class Counting(LogisticRegression):
        def fit(self, x, y):
            fits[len(fits)] += 1
            return super().fit(x, y)

    place = type("Counted", (Counting,), {})
    first = ask(place, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert all(file.name.startswith("votes-") and file.suffix == ".safetensors" for file in files)
    assert len(fits) == TEACHERS
    np.testing.assert_array_equal(ask(place, tmp_path).votes_QC, first.votes_QC)
    assert len(fits) == TEACHERS
    files[0].write_bytes(files[0].read_bytes()[:-3])  # of four teachers
    again = ask(place, tmp_path)
    assert len(fits) == TEACHERS + 4
    assert (again.votes_QC == first.votes_QC).all()
    assert again.digest == first.digest


def test_another_seed_or_another_shard_asks_anew(tmp_path):
    place = boosting
    assert ask(place, tmp_path).digest != ask(place, tmp_path, records(239)).digest
    assert len(list(tmp_path.iterdir())) > 2


class Fussy(LogisticRegression):
    """Refuses what its shard may look like."""

    def fit(self, x, y):
        if len(set(y.tolist())) < CLASSES:
            raise ValueError(f"only {set(y.tolist())}")
        return super().fit(x, y)


def test_a_teacher_that_fails_votes_for_its_shards_most_common_class(tmp_path, caplog):
    private = records()
    teacher_of = torch.from_numpy(assign_teachers(private.record_id, TEACHERS, shard_key(5)))
    one_class = torch.where(teacher_of == 2, torch.ones_like(private.y), private.y)
    poor = Split(x=private.x, y=one_class, z=private.z, record_id=private.record_id)
    found, other = ask(lambda: Fussy(), tmp_path / "a", poor), ask(lambda: Fussy(), tmp_path / "b", private)
    assert "1 of 6 teachers failed" in caplog.text
    assert (found.votes_QC.sum(axis=1) == TEACHERS).all()
    assert (np.abs(found.votes_QC - other.votes_QC).sum(axis=1) <= 2).all()
    empty = ask(lambda: Fussy(), tmp_path / "c", private.take((teacher_of != 2).nonzero()[:, 0]))
    assert (empty.votes_QC[:, 2] >= 1).all()  # teacher 2 of 3 classes, whatever the shards of others


def test_code_that_never_works_is_an_error_with_its_cause_also_when_asked_again(tmp_path):
    class Broken(LogisticRegression):
        def fit(self, x, y):
            raise TypeError("fit() misses something")

    for _ in range(2):
        with pytest.raises(OwnTeacherError, match="all 6 teachers"):
            ask(lambda: Broken(), tmp_path)


def saying(values):
    class Model:
        def fit(self, x, y):
            return self

        def predict(self, x):
            return values(x)

    return Model


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (lambda x: np.full(len(x), 3), "a class in 0..2"),
        (lambda x: np.full(len(x), -1), "a class in 0..2"),
        (lambda x: np.full(len(x), np.nan), "others, as float64"),
        (lambda x: [[0], *([0] for _ in x[2:]), [0, 1]], "predicted shape"),
        (lambda x: np.full(len(x), 0.5), "others, as float64"),
        (lambda x: np.full(len(x), "yes"), "others, as <U3"),
        (lambda x: np.zeros((len(x), 3)), r"shape \(40, 3\)"),
        (lambda x: np.zeros(len(x) - 1), r"shape \(39,\)"),
        (lambda _: None, r"shape \(\)"),
    ],
)
def test_votes_for_what_is_no_class_are_refused(tmp_path, values, words):
    with pytest.raises(OwnTeacherError, match=words):
        ask(saying(values), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("values", [lambda x: x[:, 0] > 0, lambda x: np.ones(len(x)), lambda x: [2] * len(x)])
def test_whole_numbers_of_any_type_are_classes(tmp_path, values):
    assert ask(saying(values), tmp_path).votes_QC.sum() == TEACHERS * len(QUERIES)


class Shared:
    """A teacher that is no object of its own."""

    fit, predict = print, print


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: Shared, "makes no teacher .OwnTeacherError: a type cannot be copied"),
        (lambda: threading.Lock(), "makes no teacher .TypeError: cannot pickle"),
        (lambda: object(), "without fit and predict"),
        (lambda: 1 / 0, "makes no teacher .ZeroDivisionError"),
        (lambda _size: LogisticRegression(), "makes no teacher .TypeError"),
        (None, "makes no teacher .TypeError"),
    ],
)
def test_a_factory_that_makes_no_teachers_is_refused(tmp_path, factory, words):
    with pytest.raises(OwnTeacherError, match=words):
        ask(factory, tmp_path)


class Remembering:
    """A teacher that keeps every record it ever saw, in an object behind it."""

    def __init__(self):
        self.seen = {"labels": []}

    def fit(self, x, y):
        self.seen["labels"] += y.tolist()

    def predict(self, x):
        return np.full(len(x), np.bincount(self.seen["labels"]).argmax())


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        (Remembering, lambda model: model),
        (LogisticRegression, lambda model: model),
        (LogisticRegression, lambda model: make_pipeline(StandardScaler(), model)),
    ],
)
def test_a_factory_that_returns_one_object_again_makes_teachers_of_their_own(tmp_path, kind, inside):
    kept = kind()
    again = ask(lambda: inside(kept), tmp_path / "again", block_size=6)
    fresh = ask(lambda: inside(kind()), tmp_path / "fresh", block_size=1)
    np.testing.assert_array_equal(again.votes_QC, fresh.votes_QC)
    assert vars(kept) == vars(kind())  # it was never fitted itself


MODULE = """
import helper_of_mine
from sklearn.tree import DecisionTreeClassifier

class Stump(DecisionTreeClassifier):
    pass

def make_teacher(random_state):
    return Stump(max_depth=helper_of_mine.DEPTH, random_state=random_state)
"""


@pytest.mark.slow
def test_workers_of_ray_find_the_module_in_the_working_directory(ray_session, tmp_path, monkeypatch):
    (tmp_path / "models_of_mine.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "helper_of_mine.py").write_text("DEPTH = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    make_teacher = named_object("models_of_mine:make_teacher")
    here = ask(make_teacher, tmp_path / "here", block_size=2)
    with open_pool(RayConfig(num_actors=1)) as pool:
        there = ask(make_teacher, tmp_path / "there", block_size=2, pool=pool)
    np.testing.assert_array_equal(here.votes_QC, there.votes_QC)
    assert here.digest == there.digest


def test_another_helper_module_asks_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    helper = tmp_path / "depth_of_mine.py"
    helper.write_text("DEPTH = 2\n")
    (tmp_path / "trees_of_mine.py").write_text(
        "import depth_of_mine\nfrom sklearn.tree import DecisionTreeClassifier\n\n"
        "def make_teacher():\n    return DecisionTreeClassifier(max_depth=depth_of_mine.DEPTH)\n"
    )
    factory = named_object("trees_of_mine:make_teacher")
    before = _determined_by(factory, np.zeros((1, 2), np.float32), {})
    assert _determined_by(factory, np.zeros((1, 2), np.float32), {}) == before
    helper.write_text("DEPTH = 30\n")
    assert _determined_by(factory, np.zeros((1, 2), np.float32), {}) != before
