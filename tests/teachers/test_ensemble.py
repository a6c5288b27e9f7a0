"""The two stages on a pool that is not Ray: order, resumption, interruption, progress."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import teachers.ensemble
from fairpate.config import FitConfig, ModelConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.files import Storage, StorageError, open_storage
from teachers.ensemble import (
    Ensemble,
    assign_teachers,
    collect_votes,
    count_votes,
    load_block,
    predict_votes,
    shard_key,
    train_ensemble,
)
from teachers.work import BlockPool, tallied

pytestmark = pytest.mark.usefixtures("light_runs")

CONFIG = TeachersTraining(
    num_teachers=7, model=ModelConfig(name="logistic"), fit=FitConfig(epochs=3, learning_rate=0.1), block_size=2
)


class FakePool:
    """Computes in this process, hands results over last first, and fails after ``fail_after`` results."""

    device = "cpu"

    def __init__(self, fail_after: int | None = None):
        self.fail_after = fail_after
        self.num_computed = 0

    def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for position, item in reversed(list(enumerate(items))):
            if self.num_computed == self.fail_after:
                raise RuntimeError("the power went out")
            self.num_computed += 1
            yield position, function(shared, item, self.device)

    sum = BlockPool.sum


def _split(count: int = 60, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    y = (x[:, 0] + 0.1 * x[:, 1] > 0).long()
    return Split(x=x, y=y, z=torch.zeros_like(y), record_id=tuple(f"{seed}-{i}" for i in range(count)))


def _train(
    directory: Path | Storage, split: Split | None = None, config: TeachersTraining = CONFIG, **options: Any
) -> Ensemble:
    return train_ensemble(split or _split(), config, num_classes=2, seed=5, checkpoint_dir=directory, **options)


QUERIES = _split(40, seed=9).x


def test_pools_and_their_order_do_not_change_the_votes(tmp_path: Path) -> None:
    in_process = collect_votes(_train(tmp_path / "a"), QUERIES)
    fake = collect_votes(_train(tmp_path / "b", pool=FakePool()), QUERIES, pool=FakePool())
    np.testing.assert_array_equal(in_process, fake)
    assert (in_process.shape, in_process.dtype) == ((40, 2), np.int64)
    assert in_process.sum(axis=1).tolist() == [7] * 40


def test_votes_are_those_of_the_teachers_one_by_one(tmp_path: Path) -> None:
    ensemble, queries = _train(tmp_path), QUERIES.numpy()
    chosen = [
        predict_votes({name: torch.from_numpy(value) for name, value in weights.items()}, ensemble.spec, queries)
        for weights in (load_block(block.checkpoint) for block in ensemble.blocks)
    ]
    np.testing.assert_array_equal(collect_votes(ensemble, QUERIES), count_votes(np.concatenate(chosen), 2))


def test_more_teachers_than_a_byte_counts_are_counted(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"num_teachers": 300, "block_size": 100, "fit": FitConfig(epochs=1)})
    votes = collect_votes(_train(tmp_path, config=config), torch.zeros(2, 4), pool=FakePool())
    assert votes.sum(axis=1).tolist() == [300, 300]
    assert votes.max() > 150


def test_the_plurality_learns_the_rule(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"fit": FitConfig(epochs=30, learning_rate=0.1)})
    queries = _split(300, seed=3)
    votes = collect_votes(_train(tmp_path, _split(350), config), queries.x)
    assert (votes.argmax(axis=1) == queries.y.numpy()).mean() > 0.9


def test_blocks_of_any_size_hold_the_same_teachers(tmp_path: Path) -> None:
    sizes = [
        collect_votes(_train(tmp_path, config=CONFIG.model_copy(update={"block_size": n})), QUERIES) for n in (1, 7)
    ]
    np.testing.assert_array_equal(*sizes)


def test_a_finished_ensemble_is_not_trained_again(tmp_path: Path) -> None:
    first, second = FakePool(), FakePool()
    with tallied() as worked:
        ensemble = _train(tmp_path, pool=first)
        with tallied() as later:
            assert _train(tmp_path, pool=second) == ensemble
    assert (first.num_computed, second.num_computed) == (4, 0)
    assert (worked, later) == ({"blocks_trained": 4, "teachers_trained": 7}, {})


@pytest.mark.parametrize(("engine", "num_blocks"), [("loop", 15), ("stacked", 2)])
def test_blocks_follow_the_engine_and_large_teachers_come_in_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, num_blocks: int
) -> None:
    monkeypatch.setattr(teachers.ensemble, "choose_engine", lambda *_: engine)
    config = CONFIG.model_copy(update={"num_teachers": 60, "block_size": None, "fit": FitConfig(epochs=1)})
    assert len(_train(tmp_path, config=config).blocks) == num_blocks
    monkeypatch.setattr(teachers.ensemble, "_MAX_BLOCK_BYTES", 3 * 4 * (4 * 2 + 2))  # three teachers of 4 features
    assert len(_train(tmp_path, config=config).blocks) == 20


def test_workers_that_share_a_storage_read_and_write_it_themselves(tmp_path: Path) -> None:
    pool, again = FakePool(), FakePool()
    storage = open_storage(str(tmp_path / "shared"))
    ensemble = _train(storage, pool=pool)
    assert ensemble.digest == _train(tmp_path / "local").digest
    sent: list[Any] = []

    class Seen(FakePool):
        def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
            sent.extend(items)
            return super().run(function, shared, sent)

    collect_votes(ensemble, QUERIES, pool=Seen())
    assert sent == [block.checkpoint for block in ensemble.blocks]
    for local, shared in zip(_train(tmp_path / "local").blocks, ensemble.blocks, strict=True):
        assert Path(local.checkpoint).read_bytes() == Path(shared.checkpoint).read_bytes()
    assert _train(storage, pool=again) == ensemble
    assert (pool.num_computed, again.num_computed) == (4 + 4, 4)  # four looks, then four blocks or none


def test_names_in_a_shared_storage_confirm_no_guess_of_a_shard(tmp_path: Path) -> None:
    """Somebody who may list names, and guesses all shards right, computes none of them; the storage's owner does."""
    names = [
        {Path(block.checkpoint).name for block in _train(open_storage(str(tmp_path / folder))).blocks}
        for folder in ("first", "second", "first")
    ]
    guessed = {block.content for block in _train(tmp_path / "guessed").blocks}
    assert names[0] == names[2]
    assert not names[0] & names[1]
    assert not guessed & (names[0] | names[1])


def test_a_storage_that_is_another_folder_on_a_worker_is_refused(tmp_path: Path) -> None:
    storage = replace(open_storage(str(tmp_path)), identity="what the driver's node sees")
    with pytest.raises(StorageError, match="not the same place on every node"):
        _train(storage)


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
    Path(ensemble.blocks[1].checkpoint).write_bytes(b"half a file")
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
    difference = np.abs(collect_votes(before, QUERIES) - collect_votes(after, QUERIES)).sum(axis=1)
    assert set(difference) == {0, 2}


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
    assert seen == [(2, 7), (4, 7), (6, 7), (7, 7)]


def test_unknown_labels_are_refused_before_training(tmp_path: Path) -> None:
    split = _split()
    split.y[3] = 2
    with pytest.raises(ValueError, match=r"labels in 0\.\.1, got 0\.\.2"):
        _train(tmp_path, split)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_bound_on_shards_trims_them_and_tells_the_operator_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """Adding a record to a full shard changes its teacher or none; an error would tell that the shard is full."""
    monkeypatch.setattr(teachers.ensemble, "choose_engine", lambda *_: engine)
    config = CONFIG.model_copy(update={"max_shard_size": 8, "block_size": 1})
    split, without = _split(), _split().take(range(1, 60))
    sizes = np.bincount(assign_teachers(split.record_id, 7, shard_key(5)))
    assert sizes.max() > 8 > sizes.min()
    before, after = _train(tmp_path, split, config), _train(tmp_path, without, config)
    assert f"{(sizes > 8).sum()} shards were trimmed to teachers.max_shard_size=8 records" in caplog.text
    touched = assign_teachers(split.record_id[:1], 7, shard_key(5)).tolist()
    assert [t for t in range(7) if before.blocks[t] != after.blocks[t]] in ([], touched)
    unbounded = _train(tmp_path, split, config.model_copy(update={"max_shard_size": None}))
    assert not {block.checkpoint for block in unbounded.blocks} & {block.checkpoint for block in before.blocks}


def test_teachers_that_diverge_vote_untrained_and_the_operator_hears_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = _split()
    split.x[3] = torch.inf
    votes = collect_votes(_train(tmp_path, split), QUERIES)
    assert votes.sum(axis=1).tolist() == [7] * 40
    assert "1 of 7 teachers diverged and vote with their initial weights" in caplog.text


def test_all_records_of_a_person_reach_one_teacher_and_without_them_only_that_one_differs(tmp_path: Path) -> None:
    """Brute force over persons; a teacher's name is a digest of all that it was trained on."""
    split = replace(_split(), person_id=tuple(f"person {place % 13}" for place in range(60)))
    assigned = assign_teachers(split.person_id, 7, shard_key(5)).tolist()
    teacher_of = dict(zip(split.person_id, assigned, strict=True))
    assert assigned == [teacher_of[person] for person in split.person_id]
    config = CONFIG.model_copy(update={"block_size": 1})
    everybody = _train(tmp_path, split, config)
    votes_QC = collect_votes(everybody, QUERIES)
    for person, teacher in teacher_of.items():
        others = split.take([row for row, name in enumerate(split.person_id) if name != person])
        ensemble = _train(tmp_path, others, config)
        differing = [
            block.teacher_indices[0]
            for block, before in zip(ensemble.blocks, everybody.blocks, strict=True)
            if block.content != before.content
        ]
        assert differing == [teacher]
        assert np.abs(collect_votes(ensemble, QUERIES) - votes_QC).sum(axis=1).max() <= 2
