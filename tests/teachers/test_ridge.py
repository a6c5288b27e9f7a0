"""Teachers in closed form: the minimum that they are, the classes that they lack, and whose records they depend on."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fairpate.config import ConfigError, FitConfig, ModelConfig, RidgeConfig, TeachersTraining
from fairpate.data import Dataset, Split
from fairpate.methods.base import configured
from teachers.ensemble import collect_votes, predict_votes, train_ensemble
from teachers.ridge import FeatureMap, solve_teachers
from teachers.teacher import Ridge, Shard, TeacherSpec, train_teachers
from tests.accelerator import DEVICES
from tests.teachers.test_independence import assert_only_one_changes, shards_of

PENALTY = 20.0


def pool(count: int = 400, width: int = 6) -> torch.Tensor:
    spread = torch.tensor([4.0, 0.01, 1.0, 0.3, 2.0, 0.0])[:width]
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)) * spread + 1


def spec(num_classes: int = 3, num_features: int | None = None) -> TeacherSpec:
    ridge = Ridge(features=FeatureMap.of(torch.randn(50, 6), num_features), penalty=PENALTY)
    return TeacherSpec(model=ModelConfig(), fit=FitConfig(), num_classes=num_classes, seed=0, ridge=ridge)


@pytest.mark.parametrize(("num_classes", "balanced"), [(2, True), (3, True), (2, False)])
def test_a_teacher_is_the_minimum_of_its_weighted_squares(num_classes: int, balanced: bool) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(14, 4)), np.array([0] * 9 + [1] * 5)
    shard = torch.from_numpy(x).float(), torch.from_numpy(y)
    made = solve_teachers([shard], [0], num_classes=num_classes, penalty=PENALTY, balanced=balanced)
    # Least squares of rows: records by the root of their weight, and one row for each penalised number.
    root = np.sqrt(np.where(y == 0, 14 / (2 * 9), 14 / (2 * 5)) if balanced else np.ones(14))[:, None]
    rows = np.vstack(
        [root * np.hstack([x, np.ones((14, 1))]), np.diag([math.sqrt(PENALTY)] * 4 + [math.sqrt(PENALTY) / 10])]
    )
    for label in range(2):
        target = np.concatenate([root[:, 0] * (y == label), np.zeros(5)])
        expected = np.linalg.lstsq(rows, target, rcond=None)[0]
        np.testing.assert_allclose(made["0.weight"][0, label], expected[:4], atol=1e-6)
        assert made["0.bias"][0, label] == pytest.approx(expected[4], abs=1e-6)


def test_classes_weigh_alike_whatever_their_share() -> None:
    """Without the weights a teacher with 11 records against 1 would vote for the common class nearly everywhere."""
    x = torch.tensor([[1.0]] * 11 + [[-1.0]])
    y = torch.tensor([0] * 11 + [1])
    made = solve_teachers([(x, y)], [0], num_classes=2, penalty=0.5)
    scores = [made["0.weight"][0] @ torch.tensor([value]) + made["0.bias"][0] for value in (1.0, -1.0)]
    assert [int(each.argmax()) for each in scores] == [0, 1]


def test_a_class_that_a_shard_lacks_gets_no_vote_and_an_empty_shard_a_public_one() -> None:
    draws = torch.Generator().manual_seed(2)
    queries = torch.randn(300, 6, generator=draws)
    shards = [
        Shard(x=torch.randn(size, 6, generator=draws), y=torch.tensor(labels).long())
        for size, labels in ((4, [1, 1, 1, 1]), (5, [0, 2, 0, 2, 2]), (0, []), (0, []))
    ]
    weights = train_teachers(shards, spec(), teacher_indices=[7, 8, 9, 11])
    votes = predict_votes(weights, spec(), queries.numpy())
    assert set(votes[0].tolist()) == {1}
    assert set(votes[1].tolist()) == {0, 2}
    assert set(votes[2].tolist()) == {9 % 3}
    assert set(votes[3].tolist()) == {11 % 3}


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_a_record_reaches_its_own_teacher_only(device: str, num_classes: int) -> None:
    shards = [Shard(x=shard.x, y=shard.y % num_classes) for shard in shards_of((6,))]
    assert_only_one_changes(shards, spec(num_classes), device=device)


def test_features_are_a_function_of_the_record_and_no_longer_than_twice_a_typical_one() -> None:
    features = FeatureMap.of(pool(), 4)
    # The widest columns, without the constant one.
    assert features.columns_K.tolist() == [0, 4, 2, 3]
    x = torch.cat([pool(50) * 3, torch.full((1, 6), torch.nan), torch.full((1, 6), 1e30)])
    together = features(x)
    assert torch.equal(together, torch.cat([features(row[None]) for row in x]))
    assert together.isfinite().all()
    assert together.norm(dim=1).max() <= 2 * math.sqrt(4) * (1 + 1e-6)
    typical = features(pool(4000))
    assert typical.square().mean().item() == pytest.approx(1, rel=0.1)
    # Of standard deviations 4 and .3 are left, in the ratio of their powers of .15.
    assert (typical[:, 0].std() / typical[:, 3].std()).item() == pytest.approx((4 / 0.3) ** 0.15, rel=0.1)


def test_pictures_and_a_pool_of_equal_records_are_refused(digits: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"set data\.embedding"):
        configured({"teachers": {"model": "ridge", "num_teachers": 5}}, method="fairpate").check_teachers(digits)
    with pytest.raises(ValueError, match="differ"):
        FeatureMap.of(torch.ones(9, 3))


def test_brute_force_one_record_moves_one_vote_of_a_query(tmp_path) -> None:
    draws = np.random.default_rng(5)
    x = torch.from_numpy(draws.normal(size=(40, 3)).astype(np.float32))
    y, none = torch.from_numpy(draws.integers(0, 3, 40)), torch.zeros(40, dtype=torch.int64)
    everybody = Split(x=x, y=y, z=none, record_id=tuple(f"r{row}" for row in range(40)))
    config, queries = TeachersTraining(num_teachers=9, ridge=RidgeConfig()), torch.randn(60, 3)

    def counts(private: Split, name: str) -> np.ndarray:
        ensemble = train_ensemble(
            private, config, num_classes=3, seed=0, checkpoint_dir=tmp_path / name, public_x=queries
        )
        return collect_votes(ensemble, queries)

    whole = counts(everybody, "all")
    assert (whole.sum(axis=1) == 9).all()
    for row in range(40):
        kept = [other for other in range(40) if other != row]
        moved = np.abs(whole - counts(everybody.take(kept), f"without {row}"))
        assert moved.max() <= 1
        assert moved.sum(axis=1).max() <= 2
        flipped = replace(everybody, y=y.where(torch.arange(40) != row, (y + 1) % 3))
        moved = np.abs(whole - counts(flipped, f"flipped {row}"))
        assert moved.max() <= 1
        assert moved.sum(axis=1).max() <= 2


def test_blocks_and_a_stored_block_give_the_same_votes(tmp_path) -> None:
    everybody, queries = shards_of((6,), sizes=(900,))[0], pool(80)
    private = Split(
        x=everybody.x, y=everybody.y, z=torch.zeros(900).long(), record_id=tuple(f"r{row}" for row in range(900))
    )
    found = []
    for size in (7, 50, 50):
        config = TeachersTraining(num_teachers=150, block_size=size, ridge=RidgeConfig(num_features=4))
        ensemble = train_ensemble(
            private, config, num_classes=3, seed=0, checkpoint_dir=tmp_path / "blocks", public_x=queries
        )
        found.append(collect_votes(ensemble, queries))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[1], found[2])
