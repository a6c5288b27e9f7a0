"""Weights files: torchvision's own network is the oracle, and a wrong file is refused by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from method_kinds import quick_and_slow
from pretrained import BACKBONES, published
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ModelConfig
from fairpate.encoders import WeightsError
from fairpate.nn.fit import predict_logits
from fairpate.nn.models import (
    HEAD_OF,
    build_model,
    imagenet_file,
    load_weights,
    pin_weights,
)
from fairpate.nn.per_example import CrossEntropy, GradientClipper

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

QUICK_AND_SLOW = [pytest.param(name, marks=() if name == "resnet18" else pytest.mark.slow) for name in BACKBONES]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One for each architecture, written when it is first asked for."""

    class Files(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp("weights") / f"{name}.pth"
            torch.save(published(name).state_dict(), self[name])
            return self[name]

    return Files()


def config_of(name: str, path: Path, **options: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "weights": path, **options})


def pictures(channels: int = 3, side: int = 64) -> Tensor:
    shape = (2, channels, side, side)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


def without_head(model: nn.Module, name: str) -> nn.Module:
    """The model up to the values that its last layer reads."""
    backbone = model[1] if isinstance(model, nn.Sequential) else model  # type: ignore[assignment]
    setattr(backbone, HEAD_OF[name], nn.Identity())
    return model.eval()


def penultimate(name: str, x: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = without_head(published(name), name)((x / 255 - MEAN[:, None, None]) / STD[:, None, None])
    return result


@pytest.mark.parametrize("name", QUICK_AND_SLOW)
def test_frozen_batch_norm_gives_what_torchvision_gives(name: str, files: dict[str, Path]) -> None:
    model = build_model(config_of(name, files[name]), input_shape=(3, 64, 64), num_classes=5, generator_seed=1)
    head = getattr(model[1], HEAD_OF[name])  # type: ignore[index]
    assert head[-1].out_features == 5
    x = pictures()
    expected = penultimate(name, x)
    features = predict_logits(without_head(model, name), x)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    alone = predict_logits(model, x[:1])
    torch.testing.assert_close(alone, features[:1], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_grey_picture_is_three_equal_channels(files: dict[str, Path]) -> None:
    grey = pictures(channels=1)
    model = build_model(
        config_of("resnet18", files["resnet18"]), input_shape=(1, 64, 64), num_classes=2, generator_seed=0
    )
    features = predict_logits(without_head(model, "resnet18"), grey)
    expected = penultimate("resnet18", grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_two_channels_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"backbone\.weights: .* 3 channels, or of 1 .*, got 2"):
        build_model(config_of("resnet18", files["resnet18"]), input_shape=(2, 64, 64), num_classes=2, generator_seed=0)


def test_the_head_follows_the_seed_and_the_rest_the_file(files: dict[str, Path]) -> None:
    config = config_of("resnet18", files["resnet18"])
    first, second = (
        build_model(config, input_shape=(3, 64, 64), num_classes=2, generator_seed=seed).state_dict() for seed in (1, 2)
    )
    assert {key for key in first if not torch.equal(first[key], second[key])} == {"1.fc.0.weight", "1.fc.0.bias"}


def test_training_one_model_leaves_the_next_ones_start_alone(files: dict[str, Path]) -> None:
    config = config_of("resnet18", files["resnet18"])
    model = build_model(config, input_shape=(3, 64, 64), num_classes=2, generator_seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again = build_model(config, input_shape=(3, 64, 64), num_classes=2, generator_seed=0)
    assert torch.equal(again[1].conv1.weight, published("resnet18").conv1.weight)  # type: ignore[index, union-attr, arg-type]


def test_only_the_head_is_trained_where_asked(files: dict[str, Path]) -> None:
    config = config_of("resnet18", files["resnet18"], trainable="head")
    model = build_model(config, input_shape=(3, 64, 64), num_classes=2, generator_seed=0)
    assert [key for key, value in model.named_parameters() if value.requires_grad] == ["1.fc.0.weight", "1.fc.0.bias"]


@pytest.mark.parametrize(
    "form",
    quick_and_slow(
        ["safetensors", "old names", "head of another size", "no head", "half precision"], ["safetensors", "old names"]
    ),
)
def test_a_file_may_differ_in_form(form: str, tmp_path: Path) -> None:
    state = published("densenet121").state_dict()
    path = tmp_path / ("file.safetensors" if form == "safetensors" else "file.pth")
    if form == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(_changed(state, form), path)
    expected = {key: value for key, value in state.items() if "classifier" not in key and "num_batches" not in key}
    loaded = load_weights(config_of("densenet121", path))
    assert loaded.keys() == expected.keys()
    tolerance = 1e-2 if form == "half precision" else 0
    assert all(torch.allclose(loaded[key], expected[key], rtol=tolerance, atol=tolerance) for key in expected)


def _changed(state: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    if form == "old names":  # as in the published file: norm.1, and no counters of batches
        kept = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
        for layer in ("norm1", "norm2", "conv1", "conv2"):
            kept = {key.replace(f".{layer}.", f".{layer[:-1]}.{layer[-1]}."): value for key, value in kept.items()}
        return kept
    if form == "half precision":
        return {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    kept = {key: value for key, value in state.items() if not key.startswith("classifier")}
    return kept if form == "no head" else kept | {"classifier.weight": torch.zeros(7, 1024)}


def test_a_file_of_another_architecture_is_named(files: dict[str, Path]) -> None:
    with pytest.raises(
        WeightsError, match=r"resnet18\.pth: no weights of resnet50 .*it is a resnet18: set model\.name"
    ):
        load_weights(config_of("resnet50", files["resnet18"]))


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    # One number each, which torch.save writes once.
    state = {key: torch.zeros(()).expand(value.shape) for key, value in published("resnet18").state_dict().items()}
    faults = {
        "1 of 100 tensors missing: conv1.weight": {k: v for k, v in state.items() if k != "conv1.weight"},
        "1 of 100 tensors unexpected: extra": state | {"extra": torch.zeros(1)},
        "1 of 100 tensors of other shape: bn1.bias": state | {"bn1.bias": torch.zeros(3)},
    }
    for number, (message, content) in enumerate(faults.items()):
        torch.save(content, tmp_path / f"{number}.pth")
        with pytest.raises(WeightsError, match=message):
            load_weights(config_of("resnet18", tmp_path / f"{number}.pth"))


@pytest.mark.parametrize("content", [b"", b"hello " * 40, b"\x80\x02cos\nsystem\nU\x04true\x85R."])
def test_what_is_no_state_dict_is_refused_and_never_run(content: bytes, tmp_path: Path) -> None:
    for suffix in ("pth", "safetensors"):
        path = tmp_path / f"file.{suffix}"
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"not a readable \.pth or \.safetensors file"):
            load_weights(config_of("resnet18", path))


def test_a_wrapped_state_dict_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": published("resnet18").state_dict(), "epoch": 3}, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match="expected tensors by name"):
        load_weights(config_of("resnet18", tmp_path / "file.pth"))


def test_the_configuration_is_pinned_to_the_file_it_was_read_with(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "own.pth"
    path.write_bytes(files["resnet18"].read_bytes())
    config = config_of("resnet18", path)
    assert config.weights is not None
    assert config.weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    torch.save({}, path)
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(WeightsError, match=f"expected sha256 {config.weights.sha256}, found"):
        load_weights(config)
    path.unlink()
    with pytest.raises(WeightsError, match="put it at this path on every node"):
        load_weights(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "resnet18", "weights": "nowhere.pth"}, r"nowhere\.pth cannot be read"),
        ({"name": "cnn", "weights": "imagenet"}, "Expected no weights with cnn, got imagenet"),
        ({"name": "resnet18", "trainable": "head"}, "Expected weights with trainable: head"),
        ({"name": "resnet18", "weights": {"path": "imagenet", "sha256": "12"}}, "sha256"),
    ],
)
def test_an_impossible_start_is_refused_in_the_configuration(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(values)


def test_imagenet_is_torchvisions_file_in_the_hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    config = ModelConfig(name="resnet18", weights="imagenet")  # type: ignore[arg-type]
    address, place = (
        r"https://download\.pytorch\.org/models/resnet18-f37072fd\.pth",
        r"hub/checkpoints/resnet18-f37072fd\.pth",
    )
    with pytest.raises(WeightsError, match=f"{address} cannot be downloaded .* put it at .*{place}"):
        pin_weights(config)
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    torch.save(published("resnet18").state_dict(), file)
    assert imagenet_file("resnet18") == file
    pinned = pin_weights(config)
    assert pinned.weights is not None
    assert (pinned.weights.path, pinned.weights.sha256) == (file, hashlib.sha256(file.read_bytes()).hexdigest())
    assert torch.equal(load_weights(config)["conv1.weight"], published("resnet18").conv1.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.slow
def test_an_architecture_takes_a_trained_state_without_the_file(files: dict[str, Path]) -> None:
    config = config_of("resnet18", files["resnet18"])
    model = build_model(config, input_shape=(3, 64, 64), num_classes=2, generator_seed=3)
    elsewhere = ModelConfig.model_validate(config.model_dump(mode="json", exclude={"weights": {"path"}}))
    copy = build_model(elsewhere, input_shape=(3, 64, 64), num_classes=2)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(predict_logits(copy, pictures()), predict_logits(model, pictures()))
    with pytest.raises(WeightsError, match="give the path of the file"):
        build_model(elsewhere, input_shape=(3, 64, 64), num_classes=2, generator_seed=3)


@pytest.mark.parametrize(
    "trainable",
    # Of all layers of the architecture tests/nn/test_per_example.py finds the same without a file.
    [pytest.param("all", marks=pytest.mark.slow), "head"],
)
def test_clipped_sums_match_one_backward_pass_per_record(trainable: str, files: dict[str, Path]) -> None:
    config = config_of("resnet18", files["resnet18"], trainable=trainable)
    model = build_model(config, input_shape=(3, 32, 32), num_classes=3, generator_seed=0).double()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, parameters = torch.tensor([0, 2]), [p for p in model.parameters() if p.requires_grad]
    per_record = [
        torch.autograd.grad(functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), parameters) for i in (0, 1)
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in gradients]).norm() for gradients in per_record])
    clip_norm = float(norms.mean())
    factors = (clip_norm / norms).clamp(max=1)
    expected = [factors[0] * first + factors[1] * second for first, second in zip(*per_record, strict=True)]
    got = GradientClipper(model, CrossEntropy(), clip_norm=clip_norm).sum(x, y)
    torch.testing.assert_close(got.squared_norms_B.sqrt(), norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(got.gradients, expected, rtol=1e-9, atol=1e-12)
