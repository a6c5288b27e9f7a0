"""Teachers that start from a weights file: engines agree, frozen parts stay, and a head is logistic regression."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretrained import published
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import AugmentConfig, FitConfig, ModelConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.nn.fit import predict_logits
from fairpate.nn.models import build_model
from teachers.ensemble import collect_votes, load_block, predict_votes, train_ensemble
from teachers.teacher import Shard, StackedWeights, TeacherSpec, choose_engine, train_teachers

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

SIDE, CLASSES = 32, 3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(published("resnet18").state_dict(), path)
    return path


def spec_of(file: Path, *, precision: str = "float32", **model: object) -> TeacherSpec:
    fit = FitConfig(epochs=1, batch_size=4, optimizer="sgd", learning_rate=1e-3, precision=precision)  # type: ignore[arg-type]
    config = ModelConfig.model_validate({"name": "resnet18", "weights": file, **model})
    return TeacherSpec(model=config, fit=fit, num_classes=CLASSES, seed=2)


def shards(sizes: tuple[int, ...]) -> list[Shard]:
    generator = torch.Generator().manual_seed(3)
    return [
        Shard(x=pictures(size, generator), y=torch.randint(0, CLASSES, (size,), generator=generator)) for size in sizes
    ]


def pictures(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)


def assert_close(left: StackedWeights, right: StackedWeights, tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
def test_engines_agree_and_statistics_of_the_file_stay(file: Path) -> None:
    spec, start = spec_of(file), published("resnet18").state_dict()
    loop, stacked = (train_teachers(shards((4, 2)), spec, engine=engine) for engine in ("loop", "stacked"))  # type: ignore[arg-type]
    assert_close(loop, stacked, 1e-4)
    for name in ("bn1.running_mean", "layer3.1.bn2.running_var", "bn1.weight", "bn1.bias"):
        assert torch.equal(loop[f"1.{name}"], start[name].expand(2, -1))
    assert not torch.equal(loop["1.conv1.weight"][0], start["conv1.weight"])
    one = build_model(spec.model, input_shape=(3, SIDE, SIDE), num_classes=CLASSES)
    one.load_state_dict({name: value[1] for name, value in loop.items()})
    queries = pictures(5, torch.Generator().manual_seed(9))
    votes = predict_votes(loop, spec, queries.numpy())
    assert votes[1].tolist() == predict_logits(one, queries).argmax(dim=1).tolist()


def test_stacked_teachers_in_bfloat16_are_those_of_the_loop_up_to_rounding() -> None:
    fit = FitConfig(epochs=2, batch_size=4, learning_rate=1e-3, precision="bfloat16")
    spec = TeacherSpec(model=ModelConfig(name="cnn", hidden=(4,)), fit=fit, num_classes=CLASSES, seed=2)
    loop, stacked = (train_teachers(shards((8, 5)), spec, engine=engine) for engine in ("loop", "stacked"))  # type: ignore[arg-type]
    assert {value.dtype for value in stacked.values()} == {torch.float32}
    assert_close(loop, stacked, 1e-2)
    exact = train_teachers(shards((8, 5)), replace(spec, fit=fit.model_copy(update={"precision": "float32"})))
    assert any(not torch.equal(exact[name], stacked[name]) for name in exact)


def features_of_torchvision(x: Tensor) -> Tensor:
    network = published("resnet18")
    network.fc = nn.Identity()
    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    with torch.no_grad():
        result: Tensor = network((x / 255 - mean) / std)
    return result


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_head_is_logistic_regression_on_the_files_features(engine: str, file: Path) -> None:
    spec = spec_of(file, trainable="head")
    (shard, *_) = block = shards((4, 0))  # one batch: a single step, done by hand below
    start = train_teachers(shards((0, 0)), spec, engine=engine)  # type: ignore[arg-type]
    trained = train_teachers(block, spec, engine=engine)  # type: ignore[arg-type]
    assert {name: tuple(value.shape) for name, value in trained.items()} == {"2.weight": (2, 3, 512), "2.bias": (2, 3)}
    features = features_of_torchvision(shard.x)
    weight, bias = (start[name][0].clone().requires_grad_() for name in ("2.weight", "2.bias"))
    functional.cross_entropy(features @ weight.T + bias, shard.y).backward()
    torch.testing.assert_close(trained["2.weight"][0], weight - 1e-3 * weight.grad, rtol=1e-3, atol=1e-4)
    assert torch.equal(trained["2.weight"][1], start["2.weight"][1])
    queries = pictures(6, torch.Generator().manual_seed(9))
    expected = (features_of_torchvision(queries) @ trained["2.weight"][0].T + trained["2.bias"][0]).argmax(dim=1)
    assert predict_votes(trained, spec, queries.numpy())[0].tolist() == expected.tolist()


def test_heads_are_stacked_everywhere_and_never_augmented(file: Path, tmp_path: Path) -> None:
    spec = spec_of(file, trainable="head")
    assert [choose_engine(spec.model, device) for device in ("cpu", "cuda")] == ["stacked", "stacked"]
    x, y = pictures(6, torch.Generator()), torch.arange(6) % 2
    private = Split(x=x, y=y, z=y, record_id=tuple("abcdef"))
    config = TeachersTraining(num_teachers=2, model=spec.model, fit=spec.fit)
    plain, flipped = (
        train_ensemble(private, config, num_classes=CLASSES, seed=2, checkpoint_dir=tmp_path, augment=augment)
        for augment in (AugmentConfig(), AugmentConfig(horizontal_flip=0.5))
    )
    assert plain.digest == flipped.digest


def test_a_checkpoint_is_named_by_the_files_content_not_its_place(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.pth"
    shutil.copy(file, copy)
    y = torch.arange(6) % 2
    private = Split(x=pictures(6, torch.Generator()), y=y, z=y, record_id=tuple("abcdef"))

    def content(path: Path) -> str:
        spec = spec_of(path, trainable="head")
        config = TeachersTraining(num_teachers=2, model=spec.model, fit=spec.fit)
        trained = train_ensemble(private, config, num_classes=CLASSES, seed=2, checkpoint_dir=tmp_path)
        return trained.blocks[0].content

    names = [content(path) for path in (file, copy)]
    torch.save(published("resnet18").state_dict() | {"fc.bias": torch.ones(1000)}, copy)
    assert len(set(names)) == 1
    assert content(copy) != names[0]


@pytest.mark.slow
def test_an_ensemble_of_heads_is_one_block_of_small_checkpoints(file: Path, tmp_path: Path) -> None:
    spec, generator = spec_of(file, trainable="head"), torch.Generator().manual_seed(5)
    y = torch.randint(0, CLASSES, (24,), generator=generator)
    private = Split(x=pictures(24, generator), y=y, z=y, record_id=tuple(f"r{i}" for i in range(24)))
    config = TeachersTraining(num_teachers=6, model=spec.model, fit=spec.fit)
    ensemble = train_ensemble(private, config, num_classes=CLASSES, seed=2, checkpoint_dir=tmp_path)
    assert [len(block.teacher_indices) for block in ensemble.blocks] == [6]
    weights = load_block(ensemble.blocks[0].checkpoint)
    assert sum(value.nbytes for value in weights.values()) == 6 * (512 + 1) * CLASSES * 4
    votes_QC = collect_votes(ensemble, pictures(5, generator))
    assert votes_QC.sum(axis=1).tolist() == [6] * 5
