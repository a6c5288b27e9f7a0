"""dlib's network for faces: its file is read without dlib, and dlib itself is the oracle where it is installed."""

from __future__ import annotations

import importlib.util
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


def test_scale_and_shift_of_a_channel_are_computed_with_its_convolution() -> None:
    generator = np.random.default_rng(3)
    with torch.device("meta"):
        expected: Any = face_network.network()
    convolutions = [each for each in expected.modules() if isinstance(each, torch.nn.Conv2d)]
    assert len(convolutions) == 29
    written, x = b"\x01\x0dloss_metric_2", torch.randn(1, 3, 150, 150, generator=torch.Generator().manual_seed(1))
    layers = []
    for each in convolutions:
        # Plain numbers but in the first layer: five million random ones would take a second.
        filters = generator.normal(size=each.weight.numel()) if not layers else np.ones(each.weight.numel())
        biases, scale, shift = generator.normal(size=(3, each.out_channels))
        written += b"\x01\x05con_4" + array(np.concatenate([filters, biases])) + b"\x02\x00\x01"
        written += b"\x01\x07affine_" + array(np.concatenate([scale, shift]))
        layers.append((filters.reshape(each.weight.shape), biases, scale, shift))
    last = generator.normal(size=(256, 128))
    written += b"\x01\x04fc_2" + number(128) + number(256) + b"".join(map(number, (2, 256, 128, 1, 1)))
    written += last.astype("<f4").tobytes()
    read = face_network.read_weights(written)
    expected.load_state_dict(read, assign=True)
    # The first layer, written out: a convolution, then a scale and a shift of each channel.
    filters, biases, scale, shift = (torch.from_numpy(each).float() for each in layers[0])
    with torch.no_grad():
        plain = torch.nn.functional.conv2d(x, filters, biases, stride=2)
        plain = plain * scale[:, None, None] + shift[:, None, None]
        torch.testing.assert_close(expected[0](x), plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(expected[-1].weight, torch.from_numpy(last.T.astype(np.float32)))
    with pytest.raises(ValueError, match="Expected arrays of format 2, got 1"):
        face_network.read_weights(b"con_4" + b"".join(map(number, (1, 4, 1, 1, 1))) + bytes(16))
    with pytest.raises(ValueError, match="ends early"):
        face_network.read_weights(written[: len(written) // 2])


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
