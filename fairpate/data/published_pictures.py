"""Picture data sets in their publishers' own layouts, and the embedded digits in colour: a loader and an entry each.

Records that are left out, for malformed names, missing pictures or unknown groups, are counted in the notes of the data
set. Pictures of people are for research only: never redistribute a face, never show one.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.dataset import (
    DataError,
    DatasetEntry,
    DataSettingsError,
    LoadedRecords,
    Option,
    Request,
    SourceFile,
    Split,
    counted,
    keyed_uniform,
    origins,
    read_any,
    read_bytes,
    resolve_data_dir,
)
from fairpate.data.embedding import FEATURES
from fairpate.data.pictures import IMAGE_SIZE, Mode, Pictures, base_name, decode, open_pictures
from fairpate.data.tables import codes, column_of, read_table, require_columns
from fairpate.later import torch

if TYPE_CHECKING:
    from torch import Tensor

LABEL_FLIP = 0.25
FIRST_HIGH_DIGIT = 5
GROUPS = {"colour": ("red", "green"), "label": ("low digit", "high digit")}
SENSITIVE = Option(
    default="colour",
    allowed=("colour", "label"),
    description="The group z: the drawn colour, or the noisy binary label behind it.",
)
COLOUR_AS_FEATURE = Option(
    default=True,
    allowed=(True, False),
    description="Whether the image shows its colour; else it has one channel, and a model cannot learn from colour.",
    shows_attribute=True,  # the noisy label too: the colour is that label under public flips
)
Codes = npt.NDArray[np.int64]


def noisy_binary_label(digits: npt.ArrayLike, names: Sequence[str], *, seed: int) -> Codes:
    """1 for a digit of 5 or more, else 0; flipped with probability 0.25."""
    # Flips are hashes of names and no stream: another record must not change the label of this one.
    high = np.asarray(digits) >= FIRST_HIGH_DIGIT
    return (high ^ (keyed_uniform(names, seed=seed, purpose="label flip") < LABEL_FLIP)).astype(np.int64)


def colour_flips(names: Sequence[str], probability: npt.NDArray[np.float64], *, seed: int) -> Codes:
    """1 where the colour differs from the noisy binary label, each with its own ``probability``."""
    return (keyed_uniform(names, seed=seed, purpose="colour flip") < probability).astype(np.int64)


def paint(grey: npt.NDArray[np.uint8], colour: Codes, *, visible: bool = True) -> npt.NDArray[np.uint8]:
    """(N, height, width) ink into channel 0 (red) or 1 (green): (N, 2, height, width).

    Where colour is not ``visible`` the ink has one channel: (N, 1, height, width).
    """
    if not visible:
        # A copy, because the published pictures are cached or read-only.
        return grey[:, None].copy()
    painted = np.zeros((len(grey), 2, *grey.shape[1:]), dtype=np.uint8)
    painted[np.arange(len(grey)), colour] = grey
    return painted


def _coloured(
    request: Request, grey: npt.NDArray[np.uint8], digits: Codes, names: Sequence[str], flips: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """The digits in colour, each different from its noisy binary label with its probability of ``flips``."""
    binary = noisy_binary_label(digits, names, seed=request.seed)
    colour = binary ^ colour_flips(names, flips, seed=request.seed)
    sensitive = request.options["sensitive"]
    return {
        "kind": "image",
        "records": Split(
            x=torch.from_numpy(paint(grey, colour, visible=request.options["colour_as_feature"])),
            y=torch.from_numpy(digits),
            z=torch.from_numpy(colour if sensitive == "colour" else binary),
            record_id=names,
        ),
        "label_names": tuple(str(digit) for digit in range(10)),
        "group_names": GROUPS[sensitive],
        "sensitive_attribute": sensitive,
    }


COLOUR_FLIP = 0.1
INK_LEVELS = 16


def load_color_digits(request: Request) -> LoadedRecords:
    """All 1,797 of scikit-learn's handwritten digits, in red or green, as (2, 8, 8) images; needs no file.

    The construction is ColorMNIST's (Arjovsky et al. 2019, arXiv:1907.02893, section 5): a binary label says whether
    the digit is 5 or more, flipped with probability 0.25; the colour is that label flipped with probability 0.1. Green
    is then 0.7 likely for a high digit and 0.3 for a low one, so even a perfect classifier of the digit shows a
    demographic-parity gap of about 0.08. Every flip is a keyed hash of the record's name: a record has the same colour
    in any file.
    """
    grey, digits = _published()
    names = tuple(f"digit-{index:04d}" for index in range(len(digits)))
    return LoadedRecords(**_coloured(request, grey, digits.copy(), names, np.full(len(names), COLOUR_FLIP)))


@cache
def _published() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Ink (1797, 8, 8) and digits, read once a process; only to be copied."""
    from sklearn.datasets import load_digits  # costs a second, and no other loader needs it

    published = load_digits()
    return np.rint(published.images * (255 / INK_LEVELS)).astype(np.uint8), published.target.astype(np.int64)


COLOR_DIGITS = DatasetEntry(
    name="color_digits",
    task="digit of a red or green image of 8 x 8 pixels",
    sensitive="colour or noisy binary label",
    publisher="scikit-learn, from UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak)",
    address="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    licence="CC BY 4.0",
    rows=1797,
    kind="image",
    load=load_color_digits,
    options={"sensitive": SENSITIVE, "colour_as_feature": COLOUR_AS_FEATURE},
    num_public=300,
    num_validation=97,
    num_test=200,
)


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


def load_color_mnist(request: Request) -> LoadedRecords:
    """69,500 images of MNIST as (2, 28, 28), coloured as FairPATE's authors did it (arXiv:2302.09183).

    MNIST's training and test files are joined to 70,000 images, and records are named by their place there. A binary
    label (5 or more) is flipped with probability 0.25; the colour is that label flipped with probability 0.2 (first
    20,000 images), 0.1 (next 20,000) and 0.9 (last 30,000). The task is the digit. Teachers see the first 39,500
    images; public, validation and test come from the last 30,000, where colour and label are related the other way
    round. Deviations: flips are keyed hashes of the record's name and the public seed, not an unseeded stream; the 500
    images between 39,500 and 40,000 are left out, as they are by the authors' teachers.
    """
    grey = np.concatenate([read_images(file, request.data_dir) for file in (TRAIN_IMAGES, TEST_IMAGES)])
    digits = np.concatenate([read_labels(file, request.data_dir) for file in (TRAIN_LABELS, TEST_LABELS)])
    flips = np.repeat([p for _, p in COLOUR_FLIPS], [count for count, _ in COLOUR_FLIPS])
    used = np.r_[0:NUM_PRIVATE, len(digits) - NUM_HELD_OUT : len(digits)]
    names = tuple(f"mnist-{index:05d}" for index in used)
    coloured = _coloured(request, grey[used], digits[used], names, flips[used])
    return LoadedRecords(**coloured, origins=origins(private=NUM_PRIVATE, held_out=NUM_HELD_OUT))


def read_images(file: SourceFile, data_dir: Path | None) -> npt.NDArray[np.uint8]:
    """(N, 28, 28) of an idx3 file."""
    content = _idx_content(file, data_dir, IMAGE_MAGIC)
    count, height, width = struct.unpack_from(">III", content, 4)
    if (height, width) != (PIXELS, PIXELS):
        raise DataError(f"{file.path}: expected images of {PIXELS} x {PIXELS}, got {height} x {width}.")
    return np.frombuffer(content, np.uint8, offset=16).reshape(count, height, width)


def read_labels(file: SourceFile, data_dir: Path | None) -> Codes:
    """(N,) digits of an idx1 file."""
    return np.frombuffer(_idx_content(file, data_dir, LABEL_MAGIC), np.uint8, offset=8).astype(np.int64)


def _idx_content(file: SourceFile, data_dir: Path | None, magic: int) -> bytes:
    # The pinned bytes are the gzipped ones; 16 says that they begin with a header of gzip.
    content = zlib.decompress(read_bytes(file, data_dir), wbits=zlib.MAX_WBITS | 16)
    (found,) = struct.unpack_from(">I", content)
    if found != magic:
        raise DataError(f"{file.path}: expected an idx file with magic number {magic}, got {found}.")
    return content


COLOR_MNIST = DatasetEntry(
    name="color_mnist",
    task="digit of a red or green image of 28 x 28 pixels",
    sensitive="colour or noisy binary label",
    publisher="Y. LeCun, C. Cortes, C. Burges: MNIST; coloured here",
    address="https://yann.lecun.com/exdb/mnist",
    licence="CC BY-SA 3.0",
    rows=70_000,
    kind="image",
    load=load_color_mnist,
    files=(TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS),
    options={"sensitive": SENSITIVE, "colour_as_feature": COLOUR_AS_FEATURE},
    num_public=1000,
    num_validation=500,
)


# Codes as the publisher numbers them; the index is the code.
UTKFACE_GENDERS = ("male", "female")
UTKFACE_RACES = ("White", "Black", "Asian", "Indian", "Others")
AGES = ("0 to 9", *(f"{first} to {first + 9}" for first in range(10, 80, 10)), "80 or older")
BOTH = tuple(f"{race} & {gender}" for race in UTKFACE_RACES for gender in UTKFACE_GENDERS)
UTKFACE_GROUPS = {"race": UTKFACE_RACES, "gender": UTKFACE_GENDERS, "race_and_gender": BOTH}
LABEL = Option(default="gender", allowed=("gender", "age"), description="The class y: gender, or age by decades.")
UTKFACE_SENSITIVE = Option(default="race", allowed=tuple(UTKFACE_GROUPS), description="The group z.")
WELL_FORMED = re.compile(r"(?P<age>\d{1,3})_(?P<gender>[01])_(?P<race>[0-4])_(?P<date>\d+)\.jpg(\.chip\.jpg)?")
UTKFACE_ARCHIVE = SourceFile(
    path="utkface/UTKFace-64px.zip",
    extracted="utkface/UTKFace",
    sha256="4775e79124777c55ad61e11e0d06b7cc3ed8c91ed10b742cc16792c017b637c8",
    manual=(
        "Download `Aligned&Cropped Faces` from https://susanqq.github.io/UTKFace (links there lead to Google Drive; "
        "accept the terms: non-commercial research only) and extract it as utkface/UTKFace/."
    ),
    note="A copy of the aligned faces resized to 64 x 64 under their original names; the publisher's are 200 x 200.",
)


def load_utkface(request: Request) -> LoadedRecords:
    """Gender or age by race, gender or both, read from names `age_gender_race_date.jpg.chip.jpg`; (3, size, size).

    The publisher's labels are estimates of a model, checked by a person. Age has nine classes, as in Lowy et al.
    (DP-FERMI, section 4.2), who do not print their bounds: these are decades. A file name contains the race, so records
    are named and ordered without it: by age, gender and date, and pictures that have these in common by their content.
    Where the gender is in the group, names leave it out too, which gives another division.
    """
    label, sensitive = (str(request.options[name]) for name in ("label", "sensitive"))
    if label in sensitive.split("_and_"):
        raise DataSettingsError(
            f"data.options.sensitive: expected race with label: {label}, got {sensitive}, which reveals the label; "
            "set data.options.label to age, or leave sensitive out."
        )
    pictures = open_pictures(UTKFACE_ARCHIVE, request.data_dir)
    found = {name: WELL_FORMED.fullmatch(base_name(name)) for name in pictures.names}
    fields = {name: match for name, match in found.items() if match}
    if not fields:
        raise DataError(f"{pictures.origin}: no file name of the form age_gender_race_date.jpg.chip.jpg.")
    public = ("age", "gender", "date") if sensitive == "race" else ("age", "date")
    unit_of = {name: "utkface-" + "_".join(match.group(*public)) for name, match in fields.items()}
    # By unit, and within one by content. Only pictures with a unit in common are read for that, because it is slow.
    sizes, content_of = Counter(unit_of.values()), dict.fromkeys(unit_of, "")
    shared = [name for name in unit_of if sizes[unit_of[name]] > 1]
    pictures.read(shared, lambda name, content: content_of.update({name: hashlib.sha256(content).hexdigest()}))
    place_of = {name: (unit_of[name], content_of[name]) for name in unit_of}
    for place, count in Counter(place_of.values()).items():
        if count > 1:
            copies = ", ".join(name for name in unit_of if place_of[name] == place)
            raise DataError(f"{pictures.origin}: one picture {count} times: {copies}; remove the copies.")
    names = sorted(unit_of, key=place_of.__getitem__)

    codes_of: dict[str, list[int]] = {"age": [], "gender": [], "race": [], "race_and_gender": []}
    for name in names:
        age, gender, race = (int(fields[name][part]) for part in ("age", "gender", "race"))
        both = race * len(UTKFACE_GENDERS) + gender
        for what, code in zip(codes_of, (min(age // 10, len(AGES) - 1), gender, race, both), strict=True):
            codes_of[what].append(code)
    unit_ids = tuple(unit_of[name] for name in names)
    malformed = len(pictures.names) - len(names)
    return _of_pictures(
        request,
        pictures,
        names,
        record_id=counted(unit_ids),
        unit_id=unit_ids,
        y=torch.tensor(codes_of[label]),
        z=torch.tensor(codes_of[sensitive]),
        label_names=AGES if label == "age" else UTKFACE_GENDERS,
        group_names=UTKFACE_GROUPS[sensitive],
        sensitive_attribute=sensitive.replace("_and_", " and "),
        notes=(f"pictures left out for their malformed names: {malformed:,}",) if malformed else (),
    )


def _of_pictures(
    request: Request,
    pictures: Pictures,
    names: Sequence[str],
    *,
    record_id: Sequence[str],
    y: Tensor,
    z: Tensor,
    unit_id: Sequence[str] = (),
    mode: Mode = "RGB",
    **facts: Any,
) -> LoadedRecords:
    """The records of the pictures called ``names`` in their archive, decoded at the requested size."""
    pixels = decode(pictures, names, size=request.options["image_size"], mode=mode)
    records = Split(x=pixels.x, y=y, z=z, record_id=record_id, unit_id=unit_id)
    return LoadedRecords(kind="image", records=records, pixels=pixels, **facts)


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: code for code, name in enumerate(names)}


UTKFACE = DatasetEntry(
    name="utkface",
    task="gender or age (9 decades) of an aligned face",
    sensitive="race (5) or gender or race and gender (10)",
    publisher="Z. Zhang, Y. Song, H. Qi: University of Tennessee, Knoxville",
    address="https://susanqq.github.io/UTKFace",
    licence="non-commercial research only; no redistribution",
    rows=23_702,
    kind="image",
    load=load_utkface,
    files=(UTKFACE_ARCHIVE,),
    options={"label": LABEL, "sensitive": UTKFACE_SENSITIVE, "features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=1500,
    num_validation=750,
    num_test=1500,
)


FAIRFACE_PUBLISHER = "https://github.com/joojs/fairface"
FAIRFACE_ARCHIVE = SourceFile(
    path="fairface/fairface-64px.zip",
    extracted="fairface/pictures",
    sha256="e8fa1f9585c4431192a4bd6f2d9bb168b2b62304a37411f877b17eae57c19185",
    manual=f"Follow the links of {FAIRFACE_PUBLISHER} and extract the pictures as fairface/pictures/train and val.",
    note="25,000 of the pictures (20,000 of train, 5,000 of val) resized to 64 x 64 under their original names.",
)
FAIRFACE_TRAIN_LABELS = SourceFile(
    path="fairface/fairface_label_train.csv",
    sha256="90624451f2214ae1aa84021ae51c19ce45a375bd0bff901b935feadc59514795",
    manual=f"Follow the download links of {FAIRFACE_PUBLISHER}.",
)
VAL_LABELS = SourceFile(
    path="fairface/fairface_label_val.csv",
    sha256="d0eb9c60135c0768fbe688509912c85b0dfb86ff8b1ba93bee0055bae849e821",
    manual=f"Follow the download links of {FAIRFACE_PUBLISHER}.",
    note="Paths in this copy carry a `fairface/` prefix.",
)
FAIRFACE_GENDERS = ("Male", "Female")
FAIRFACE_RACES = ("White", "Black", "Latino_Hispanic", "East Asian", "Southeast Asian", "Indian", "Middle Eastern")


def load_fairface(request: Request) -> LoadedRecords:
    """Gender by race (7) of the labelled faces, as (3, size, size), named by their path.

    A subset of the pictures works with the full label files. The publisher's validation part is the test split.
    """
    pictures = open_pictures(FAIRFACE_ARCHIVE, request.data_dir)
    tables, absent = [], 0
    for file in (FAIRFACE_TRAIN_LABELS, VAL_LABELS):
        labels = read_table(read_bytes(file, request.data_dir), file.path)
        require_columns(labels, ("file", "gender", "race"), file.path)
        paths = pc.replace_substring_regex(labels["file"], "^fairface/", "")
        labels = labels.set_column(labels.column_names.index("file"), "file", paths)
        tables.append(labels.filter(pc.is_in(paths, value_set=pa.array(pictures.names, pa.string()))))
        absent += len(labels) - len(tables[-1])
    table = pa.concat_tables(tables)
    names = table["file"].to_pylist()
    if not names:
        raise DataError(f"{pictures.origin}: no picture that the label files name, such as train/1.jpg.")
    return _of_pictures(
        request,
        pictures,
        names,
        record_id=tuple(names),
        y=codes(table, "gender", _numbered(FAIRFACE_GENDERS), FAIRFACE_TRAIN_LABELS.path),
        z=codes(table, "race", _numbered(FAIRFACE_RACES), FAIRFACE_TRAIN_LABELS.path),
        label_names=FAIRFACE_GENDERS,
        group_names=FAIRFACE_RACES,
        sensitive_attribute="race",
        origins=origins(training=len(tables[0]), test=len(tables[1])),
        notes=(f"{absent} labelled pictures that are not present left out",),
    )


FAIRFACE = DatasetEntry(
    name="fairface",
    task="gender of a face",
    sensitive="race (7)",
    publisher="K. Karkkainen, J. Joo: University of California, Los Angeles",
    address=FAIRFACE_PUBLISHER,
    licence="CC BY 4.0",
    rows=97_698,
    kind="image",
    load=load_fairface,
    files=(FAIRFACE_ARCHIVE, FAIRFACE_TRAIN_LABELS, VAL_LABELS),
    options={"features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=3000,
    num_validation=1000,
)


CELEBA_PUBLISHER = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
CELEBA_MANUAL = f"Agree to the terms at {CELEBA_PUBLISHER} (non-commercial research) and follow its links."
CELEBA_ARCHIVE = SourceFile(
    path="celeba/img_align_celeba.zip", extracted="celeba/img_align_celeba", manual=CELEBA_MANUAL
)


def _list(name: str) -> SourceFile:
    csv_form = SourceFile(path=f"celeba/{name}.csv", manual=CELEBA_MANUAL)
    return SourceFile(path=f"celeba/{name}.txt", manual=CELEBA_MANUAL, alternatives=(csv_form,))


ATTRIBUTES = _list("list_attr_celeba")
PARTITION = _list("list_eval_partition")
PRESENT = {"-1": 0, "1": 1}
TEST_PARTITION = "2"
PARTITIONS = ("0", "1", "2")


def load_celeba(request: Request) -> LoadedRecords:
    """Smiling by gender of all listed pictures, as (3, size, size), named by file name.

    Both lists may be the publisher's text files or the CSV form of them. The publisher's partition 2 is the test split;
    partitions 0 and 1 train.
    """
    file, content = read_any(ATTRIBUTES, request.data_dir)
    if file.path.endswith(".csv"):
        attributes = read_table(content, file.path)
    else:
        # A count, the 40 names, then rows aligned with runs of spaces.
        _count, header, *rows = _lines(content, file.path)
        attributes = read_table(_comma_separated(rows), file.path, columns=("image_id", *header.split()))
    file, content = read_any(PARTITION, request.data_dir)
    rows = _lines(content, file.path)[1 if file.path.endswith(".csv") else 0 :]
    partition = read_table(_comma_separated(rows), file.path, columns=("image_id", "partition"))
    # For its refusals alone: pictures of an unknown partition would count as training ones.
    codes(partition, "partition", _numbered(PARTITIONS), file.path)
    part = dict(zip(*(column.to_pylist() for column in partition.columns), strict=True))

    names = column_of(attributes, "image_id", ATTRIBUTES.path).to_pylist()
    pictures = open_pictures(CELEBA_ARCHIVE, request.data_dir)
    places = {base_name(name): name for name in pictures.names}
    for name in names:
        if name not in places or name not in part:
            where = pictures.origin if name not in places else PARTITION.path
            raise DataError(f"{where}: {name} of the attribute list is missing; restore the publisher's files.")
    return _of_pictures(
        request,
        pictures,
        [places[name] for name in names],
        record_id=tuple(names),
        y=codes(attributes, "Smiling", PRESENT, ATTRIBUTES.path),
        z=codes(attributes, "Male", PRESENT, ATTRIBUTES.path),
        label_names=("not smiling", "smiling"),
        group_names=("female", "male"),
        sensitive_attribute="gender",
        origins=tuple("test" if part[name] == TEST_PARTITION else "training" for name in names),
    )


def _lines(content: bytes, path: str) -> list[str]:
    # The publisher pins no checksum: a cut or different file is noticed here.
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a readable table ({error}); restore the file, in UTF-8.") from error
    if len(lines) < 2:
        raise DataError(f"{path}: not a readable table (it has no row); restore the file.")
    return lines


def _comma_separated(rows: list[str]) -> bytes:
    return "\n".join(",".join(row.replace(",", " ").split()) for row in rows).encode()


CELEBA = DatasetEntry(
    name="celeba",
    task="smiling",
    sensitive="gender",
    publisher="Z. Liu, P. Luo, X. Wang, X. Tang: Chinese University of Hong Kong",
    address=CELEBA_PUBLISHER,
    licence="non-commercial research only; no redistribution",
    rows=202_599,
    kind="image",
    load=load_celeba,
    files=(CELEBA_ARCHIVE, ATTRIBUTES, PARTITION),
    options={"features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=9000,
    num_validation=750,
    num_test=4500,
)


CHEXPERT_PUBLISHER = "https://stanfordmlgroup.github.io/competitions/chexpert"
CHEXPERT_MANUAL = f"Register at {CHEXPERT_PUBLISHER} and accept the research use agreement."
ROOT = "CheXpert-v1.0-small"
FOLDER = f"chexpert/{ROOT}"
CHEXPERT_ARCHIVE = SourceFile(path=f"chexpert/{ROOT}.zip", extracted=FOLDER, manual=CHEXPERT_MANUAL)
TRAIN = SourceFile(path=f"{FOLDER}/train.csv", manual=CHEXPERT_MANUAL)
VALID = SourceFile(path=f"{FOLDER}/valid.csv", manual=CHEXPERT_MANUAL)
DEMOGRAPHICS = SourceFile(
    path="chexpert/CHEXPERT DEMO.csv",
    manual=f"{CHEXPERT_MANUAL} Save its demographics table `CHEXPERT DEMO.xlsx` as CSV.",
)
FINDINGS = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture",
    "Support Devices",
)  # fmt: skip
MARKS = {"1.0": 1, "0.0": 0, "-1.0": 0, "": 0, "1": 1, "0": 0, "-1": 0}
CHEXPERT_RACES = ("White", "Black", "Asian")
PATIENT = re.compile(r"/(patient\d+)/")


def load_chexpert(request: Request) -> LoadedRecords:
    """A finding by race (white, black, Asian) in frontal pictures, as (1, size, size), named by their path.

    Reads `train.csv` and `valid.csv` of CheXpert-v1.0-small, and the separate demographics table, saved as CSV. A
    finding marked uncertain or left blank counts as absent (the publisher's "U-Zeros"). All pictures of a patient go to
    one split, and are protected together.
    """
    spreadsheet = resolve_data_dir(request.data_dir) / DEMOGRAPHICS.path.replace(".csv", ".xlsx")
    if spreadsheet.is_file() and not spreadsheet.with_suffix(".csv").is_file():
        raise DataError(f"{spreadsheet}: save this spreadsheet as CSV next to it; only the CSV form is read.")
    people = read_table(read_bytes(DEMOGRAPHICS, request.data_dir), DEMOGRAPHICS.path)
    patients, races = (column_of(people, name, DEMOGRAPHICS.path).to_pylist() for name in ("PATIENT", "PRIMARY_RACE"))
    race_of = {
        patient: code
        for patient, race in zip(patients, races, strict=True)
        for code, name in enumerate(CHEXPERT_RACES)
        if race.startswith(name)  # the publisher adds remarks such as ", non-Hispanic"
    }
    tables = []
    for file in (TRAIN, VALID):
        listed = read_table(read_bytes(file, request.data_dir), file.path)
        require_columns(listed, ("Path", "Frontal/Lateral", *FINDINGS), file.path)
        tables.append(listed.filter(pc.equal(listed["Frontal/Lateral"], "Frontal")).select(["Path", *FINDINGS]))
    frontal = pa.concat_tables(tables)
    matches = [(path, PATIENT.search(path)) for path in frontal["Path"].to_pylist()]
    patient_of = {path: match[1] for path, match in matches if match}
    for path, match in matches:
        if match is None:
            raise DataError(f"{TRAIN.path}: column Path: expected .../patient00001/..., got {path!r}.")
    table = frontal.filter(pa.array([patient_of[path] in race_of for path, _ in matches], pa.bool_()))
    paths = table["Path"].to_pylist()
    if not paths:
        raise DataError(f"{DEMOGRAPHICS.path}: no patient of {TRAIN.path} has a known race; check both files.")
    pictures = open_pictures(CHEXPERT_ARCHIVE, request.data_dir)
    name_of = {name.partition(f"{ROOT}/")[2] or name: name for name in pictures.names}
    places = [path.partition(f"{ROOT}/")[2] for path in paths]
    for place in places:
        if place not in name_of:
            raise DataError(f"{pictures.origin}: picture {place} is missing; restore the publisher's files.")
    finding = request.options["finding"]
    return _of_pictures(
        request,
        pictures,
        [name_of[place] for place in places],
        mode="L",
        record_id=tuple(paths),
        y=codes(table, finding, MARKS, TRAIN.path),
        z=torch.tensor([race_of[patient_of[path]] for path in paths]),
        label_names=(f"{finding}: absent", f"{finding}: present"),
        group_names=CHEXPERT_RACES,
        sensitive_attribute="race",
        person_ids=tuple(patient_of[path] for path in paths),
        notes=(f"{len(frontal) - len(table)} frontal pictures of patients of another or unknown race left out",),
    )


CHEXPERT = DatasetEntry(
    name="chexpert",
    task="a finding in a frontal chest radiograph",
    sensitive="race (3)",
    publisher="Stanford Machine Learning Group (J. Irvin, P. Rajpurkar and others)",
    address=CHEXPERT_PUBLISHER,
    licence="Stanford research use agreement; no redistribution",
    rows=224_316,
    persons=65_240,
    kind="image",
    load=load_chexpert,
    files=(CHEXPERT_ARCHIVE, TRAIN, VALID, DEMOGRAPHICS),
    options={
        "finding": Option(
            default="No Finding", allowed=FINDINGS, description="Which of the 14 observations is the label."
        ),
        "features": FEATURES,
        "image_size": IMAGE_SIZE,
    },
    num_public=4000,
    num_validation=1000,
    num_test=5000,
)
