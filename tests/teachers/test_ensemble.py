"""The two stages on a pool that is not Ray: order, resumption, interruption, progress."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairpate.config import FitConfig, ModelConfig, TeachersConfig
from fairpate.data.dataset import Split
from teachers.ensemble import Ensemble, collect_votes, train_ensemble
from teachers.shard import assign_teachers, shard_key
from teachers.vote import count_votes

CONFIG = TeachersConfig(
    num_teachers=7, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=3, learning_rate=0.1), block_size=2
)


class FakePool:
    """Computes in this process, hands results over last first, and fails after ``fail_after`` results."""

    device = "cpu"

    def __init__(self, fail_after: int | None = None, num_workers: int = 3):
        self.fail_after, self.num_workers = fail_after, num_workers
        self.num_computed = 0

    def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for position, item in reversed(list(enumerate(items))):
            if self.num_computed == self.fail_after:
                raise RuntimeError("the power went out")
            self.num_computed += 1
            yield position, function(shared, item, self.device)


def _split(count: int = 60, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, 0] + 0.1 * x[:, 1] > 0).long()
    return Split(x=x, y=y, z=torch.zeros_like(y), record_id=tuple(f"{seed}-{i}" for i in range(count)))


def _train(directory: Path, split: Split | None = None, config: TeachersConfig = CONFIG, **options: Any) -> Ensemble:
    return train_ensemble(split or _split(), config, num_classes=2, seed=5, checkpoint_dir=directory, **options)


QUERIES = _split(40, seed=9).x


def test_pools_and_their_order_do_not_change_the_votes(tmp_path: Path) -> None:
    in_process = collect_votes(_train(tmp_path / "a"), QUERIES)
    fake = collect_votes(_train(tmp_path / "b", pool=FakePool()), QUERIES, pool=FakePool())
    np.testing.assert_array_equal(in_process, fake)
    assert (in_process.shape, in_process.dtype) == ((7, 40), np.int16)
    assert count_votes(in_process, 2).sum(axis=1).tolist() == [7] * 40


def test_the_plurality_learns_the_rule(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"fit": FitConfig(epochs=30, learning_rate=0.1)})
    queries = _split(300, seed=3)
    votes = count_votes(collect_votes(_train(tmp_path, _split(350), config), queries.x), 2)
    assert (votes.argmax(axis=1) == queries.y.numpy()).mean() > 0.9


def test_blocks_of_any_size_hold_the_same_teachers(tmp_path: Path) -> None:
    sizes = [
        collect_votes(_train(tmp_path, config=CONFIG.model_copy(update={"block_size": n})), QUERIES) for n in (1, 7)
    ]
    np.testing.assert_array_equal(*sizes)


def test_a_finished_ensemble_is_not_trained_again(tmp_path: Path) -> None:
    first, second = FakePool(), FakePool()
    assert _train(tmp_path, pool=first) == _train(tmp_path, pool=second)
    assert (first.num_computed, second.num_computed) == (4, 0)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_another_number_of_workers_finds_every_checkpoint(tmp_path: Path, engine: Any) -> None:
    config = CONFIG.model_copy(update={"num_teachers": 60, "block_size": None, "engine": engine})
    one, many = FakePool(num_workers=1), FakePool(num_workers=15)
    assert _train(tmp_path, config=config, pool=one) == _train(tmp_path, config=config, pool=many)
    assert (one.num_computed, many.num_computed) == ({"loop": 15, "stacked": 2}[engine], 0)


def test_the_digest_follows_the_teachers_and_not_their_place(tmp_path: Path) -> None:
    fewer, slower = _split().take(range(1, 60)), CONFIG.model_copy(update={"fit": FitConfig(epochs=2)})
    here, elsewhere = _train(tmp_path / "a"), _train(tmp_path / "b", pool=FakePool())
    others = [_train(tmp_path / "a", fewer), _train(tmp_path / "a", config=slower)]
    assert here.digest == elsewhere.digest
    assert len({here.digest, *(other.digest for other in others)}) == 3
    assert re.fullmatch("[0-9a-f]{16}", here.digest)


def test_an_interrupted_training_resumes_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="power"):
        _train(tmp_path / "a", pool=FakePool(fail_after=3))
    resumed = FakePool()
    votes = collect_votes(_train(tmp_path / "a", pool=resumed), QUERIES)
    assert resumed.num_computed == 1
    np.testing.assert_array_equal(votes, collect_votes(_train(tmp_path / "b"), QUERIES))


def test_a_damaged_checkpoint_is_trained_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ensemble = _train(tmp_path)
    votes = collect_votes(ensemble, QUERIES)
    ensemble.blocks[1].checkpoint.write_bytes(b"half a file")
    pool = FakePool()
    np.testing.assert_array_equal(collect_votes(_train(tmp_path, pool=pool), QUERIES), votes)
    assert pool.num_computed == 1
    assert "damaged checkpoint" in caplog.text


def test_one_record_changes_one_teacher(tmp_path: Path) -> None:
    split = _split()
    without = split.take(range(1, 60))
    config = CONFIG.model_copy(update={"block_size": 1})
    before = _train(tmp_path, split, config)
    pool = FakePool()
    after = _train(tmp_path, without, config, pool=pool)
    changed = [t for t in range(7) if before.blocks[t] != after.blocks[t]]
    assert changed == assign_teachers(split.record_id[:1], 7, shard_key(5)).tolist()
    assert pool.num_computed == 1
    different = (collect_votes(before, QUERIES) != collect_votes(after, QUERIES)).any(axis=1)
    assert set(np.flatnonzero(different)) <= set(changed)


def test_more_teachers_than_records_still_vote(tmp_path: Path) -> None:
    votes = collect_votes(_train(tmp_path, _split(3)), QUERIES)
    np.testing.assert_array_equal(votes, collect_votes(_train(tmp_path / "again", _split(3)), QUERIES))


def test_progress_counts_teachers_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ensemble = _train(tmp_path, pool=FakePool(), on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 7), (3, 7), (5, 7), (7, 7)]
    seen.clear()
    _train(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(7, 7)]
    seen.clear()
    collect_votes(ensemble, QUERIES, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (7, 7)


def test_unknown_labels_are_refused_before_training(tmp_path: Path) -> None:
    split = _split()
    split.y[3] = 2
    with pytest.raises(ValueError, match=r"labels in 0\.\.1, got 0\.\.2"):
        _train(tmp_path, split)
    assert not list(tmp_path.iterdir())
