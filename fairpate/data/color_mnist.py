"""ColorMNIST as FairPATE's authors built it (arXiv:2302.09183; the construction is arXiv:1907.02893, section 5).

MNIST's training and test files are joined to 70,000 images. A binary label says whether the digit is 5 or more,
flipped with probability 0.25; the colour is that label flipped with probability 0.2 (first 20,000 images), 0.1 (next
20,000) and 0.9 (last 30,000). The task is the digit. Teachers see the first 39,500 images; public, validation and
test come from the last 30,000, where colour and label are related the other way round.

Deviations: flips are keyed hashes of the record's name and the public seed, not an unseeded stream. The 500 images
between 39,500 and 40,000 are left out, as they are by the authors' teachers.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fairpate.data.colouring import COLOUR_AS_FEATURE, GROUPS, SENSITIVE, colour_flips, noisy_binary_label, paint
from fairpate.data.dataset import Split
from fairpate.data.entry import DataError, DatasetEntry, Records, Request, SourceFile, origins
from fairpate.data.files import read_bytes
from fairpate.later import torch

COLOUR_FLIPS = ((20_000, 0.2), (20_000, 0.1), (30_000, 0.9))
NUM_PRIVATE = 39_500
NUM_HELD_OUT = 30_000
PIXELS = 28
IMAGE_MAGIC = 2051
LABEL_MAGIC = 2049
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"


def _file(name: str, sha256: str) -> SourceFile:
    return SourceFile(path=f"mnist/{name}", sha256=sha256, url=f"{MIRROR}/{name}")


TRAIN_IMAGES = _file("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609")
TRAIN_LABELS = _file("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c")
TEST_IMAGES = _file("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6")
TEST_LABELS = _file("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6")


def load(request: Request) -> Records:
    """The 69,500 used images as (2, 28, 28), named by their place in the joined files."""
    grey = np.concatenate([read_images(file, request.data_dir) for file in (TRAIN_IMAGES, TEST_IMAGES)])
    digits = np.concatenate([read_labels(file, request.data_dir) for file in (TRAIN_LABELS, TEST_LABELS)])
    ids = np.array([f"mnist-{index:05d}" for index in range(len(digits))])
    flip_probability = np.repeat([p for _, p in COLOUR_FLIPS], [count for count, _ in COLOUR_FLIPS])
    binary = noisy_binary_label(digits, ids.tolist(), seed=request.seed)
    colour = binary ^ colour_flips(ids.tolist(), flip_probability, seed=request.seed)
    sensitive = request.options["sensitive"]
    used = np.r_[0:NUM_PRIVATE, len(ids) - NUM_HELD_OUT : len(ids)]
    return Records(
        kind="image",
        records=Split(
            x=torch.from_numpy(paint(grey, colour, visible=request.options["colour_as_feature"])[used]),
            y=torch.from_numpy(digits[used]),
            z=torch.from_numpy((colour if sensitive == "colour" else binary)[used]),
            record_id=tuple(ids[used].tolist()),
        ),
        label_names=tuple(str(digit) for digit in range(10)),
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive,
        origins=origins(private=NUM_PRIVATE, held_out=NUM_HELD_OUT),
    )


def read_images(file: SourceFile, data_dir: Path | None) -> npt.NDArray[np.uint8]:
    """(N, 28, 28) of an idx3 file."""
    content = _unpack(file, data_dir)
    count, height, width = struct.unpack_from(">III", _checked(content, file, IMAGE_MAGIC), 4)
    if (height, width) != (PIXELS, PIXELS):
        raise DataError(f"{file.path}: expected images of {PIXELS} x {PIXELS}, got {height} x {width}.")
    return np.frombuffer(content, np.uint8, offset=16).reshape(count, height, width)


def read_labels(file: SourceFile, data_dir: Path | None) -> npt.NDArray[np.int64]:
    """(N,) digits of an idx1 file."""
    content = _checked(_unpack(file, data_dir), file, LABEL_MAGIC)
    return np.frombuffer(content, np.uint8, offset=8).astype(np.int64)


def _unpack(file: SourceFile, data_dir: Path | None) -> bytes:
    # The pinned bytes are the gzipped ones; 16 says that they begin with a header of gzip.
    return zlib.decompress(read_bytes(file, data_dir), wbits=zlib.MAX_WBITS | 16)


def _checked(content: bytes, file: SourceFile, magic: int) -> bytes:
    (found,) = struct.unpack_from(">I", content)
    if found != magic:
        raise DataError(f"{file.path}: expected an idx file with magic number {magic}, got {found}.")
    return content


ENTRY = DatasetEntry(
    name="color_mnist",
    task="digit of a red or green image of 28 x 28 pixels",
    sensitive="colour or noisy binary label",
    publisher="Y. LeCun, C. Cortes, C. Burges: MNIST; coloured here",
    address="https://yann.lecun.com/exdb/mnist",
    licence="CC BY-SA 3.0",
    rows=70_000,
    kind="image",
    load=load,
    files=(TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS),
    options={"sensitive": SENSITIVE, "colour_as_feature": COLOUR_AS_FEATURE},
    num_public=1000,
    num_validation=500,
)
