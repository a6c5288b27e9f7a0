"""Pictures: read and decode them, and load public data sets of pictures in their publishers' own layouts.

**Reading**, from a publisher's archive or from the user's own files. The centre square of each picture is resized to
one size and stored as uint8. Decoded pixels are cached under FAIRPATE_CACHE (default ~/.cache/fairpate) in a file named
by a hash of the archive, the names and the size, and mapped into memory from there. It contains records, so only its
owner may read the folder. Pictures of a declared data set are listed in a column of paths, or are in nested folders.

**Data sets**, with the embedded digits in colour: one loader each. Publisher, licence, files and sizes are in
``pictures.yaml``. Records that are left out are counted in the notes of the data set. Pictures of people are for
research only: never redistribute or display a face.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, UnidentifiedImageError
from pydantic import BeforeValidator, Field

from fairpate import encoders
from fairpate.config import CODE_NAME, Section, read_yaml
from fairpate.data import dataset
from fairpate.data.dataset import LoadedRecords, Option, Request, SourceFile, Split, keyed_uniform
from fairpate.data.features import FEATURES
from fairpate.data.large_arrays import PixelArray, Pixels, kept_pixels
from fairpate.data.table_files import read_table
from fairpate.data.tables import codes, require_columns
from fairpate.files import cache_dir
from fairpate.lazy import torch
from fairpate.types import DataError, DataSettingsError, IntArray

CACHE_VERSION = 2  # raise it with any change that decodes the same archive to other pixels
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png")
Mode = Literal["RGB", "L"]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Encoded pictures (the bytes of their files) by name. ``key`` identifies the content of all pictures; ``read``
    yields pictures in the requested order."""

    origin: Path
    key: str
    names: tuple[str, ...]
    read: Callable[[Sequence[str]], Iterator[bytes]]


def open_pictures(archive: SourceFile, data_dir: Path | None) -> Pictures:
    """Return a publisher's pictures: from the extracted folder if it exists, otherwise from the ``archive`` itself,
    after a check of its checksum."""
    choice, path = dataset.locate(archive, data_dir)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_picture(file.name))
        return pictures_in(path, [file.relative_to(path).as_posix() for file in files])
    key = dataset.check_file(choice, path)
    try:
        with zipfile.ZipFile(path) as opened:
            # Sorted, because the order inside an archive means nothing and may differ between copies.
            names = tuple(sorted(name for name in opened.namelist() if _is_picture(name)))
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: damaged archive ({error}); delete it and fetch it again.") from error

    def read(wanted: Sequence[str]) -> Iterator[bytes]:
        with zipfile.ZipFile(path) as opened:
            yield from map(opened.read, wanted)

    return Pictures(origin=path, key=key, names=names, read=read)


def pictures_in(folder: Path, names: Sequence[str]) -> Pictures:
    """Return the pictures at the paths ``names`` below ``folder``."""
    # Keyed by paths, sizes and modification times: hashing every picture would cost as much as decoding it.
    stats = ((folder / name, (folder / name).stat()) for name in names)
    described = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)
    return Pictures(
        origin=folder,
        key=hashlib.sha256(described.encode()).hexdigest(),
        names=tuple(names),
        read=lambda wanted: ((folder / name).read_bytes() for name in wanted),
    )


def decode(pictures: Pictures, names: Sequence[str], *, size: int, mode: Mode = "RGB") -> Pixels:
    """Return the pixels (N, channels, size, size) of the pictures ``names``, in that order; they are read from the
    cache if it has them."""
    shape = (len(names), 3 if mode == "RGB" else 1, size, size)
    # The name contains everything that determines the pixels, so that no cached file is ever out of date.
    recipe = "\n".join((str(CACHE_VERSION), pictures.key, mode, str(size), *names))
    path = cache_dir() / f"pictures-{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.pixels"

    def decoded() -> Iterator[PixelArray]:
        for name, content in zip(names, pictures.read(names), strict=True):
            try:
                yield pixels_of(content, size=size, mode=mode)
            except ValueError as error:
                where = f"{pictures.origin}: {name}"
                raise DataError(
                    f"{where}: not a readable picture ({error}); restore the file, or leave it out."
                ) from error

    return kept_pixels(path, shape, decoded)


def pixels_of(content: bytes, *, size: int, mode: Mode = "RGB", most_pixels: int | None = None) -> PixelArray:
    """Return the pixels (channels, size, size) of one encoded picture, the bytes of its file: the centre square,
    resized. ValueError, with the reason, for a picture that cannot be read, or has more than ``most_pixels``."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            if most_pixels is not None and picture.width * picture.height > most_pixels:
                raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
            image = picture.convert(mode)
    # A header of billions of pixels is refused too, before memory is asked for them.
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError("of no known format" if isinstance(error, UnidentifiedImageError) else str(error)) from error
    if image.size != (size, size):
        edge = min(image.size)
        left, top = (image.width - edge) // 2, (image.height - edge) // 2
        # The centre square, cropped and resized in one step, without a copy of it.
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge))
    return np.asarray(image, dtype=np.uint8).reshape(size, size, -1).transpose(2, 0, 1)


_MODES: dict[int, Mode] = {1: "L", 3: "RGB"}
# Before they are decoded: a small file may stand for pixels that fill the memory of a service.
_MOST_PIXELS = 2**25


def is_square_picture(shape: tuple[int, ...]) -> bool:
    """Return whether records of ``shape`` are pictures that :func:`picture_in` reads from a file."""
    return len(shape) == len(("channels", "height", "width")) and shape[0] in _MODES and shape[1] == shape[2]


def picture_in(content: bytes, shape: tuple[int, ...]) -> PixelArray:
    """Return the pixels (``shape``) of one encoded picture that a client sent, as :func:`pixels_of` does; ValueError
    also for a picture that is too large."""
    return pixels_of(content, size=shape[1], mode=_MODES[shape[0]], most_pixels=_MOST_PIXELS)


def _is_picture(name: str) -> bool:
    # macOS adds a file of attributes, ._NAME, for each picture of an archive.
    return name.lower().endswith(PICTURE_SUFFIXES) and not name.rpartition("/")[2].startswith("._")


PATH, NAME, LEVEL = "path", "name", "level_"
_Channels = BeforeValidator(lambda value: int(value) if value in ("1", "3") else value)


class PicturesConfig(Section):
    """The pictures of a declared data set, and the features that a model sees."""

    column: str = Field(PATH, description="Column with the path of each picture, below the data folder.")
    size: int = Field(64, ge=8, le=512, description="Height and width in pixels: the centre square is resized.")
    channels: Annotated[Literal[1, 3], _Channels] = Field(3, description="3: colour; 1: grey.")
    features: str = Field(
        "pixels",
        pattern=rf"^(pixels|oriented_gradients|{encoders.PATTERN}|{CODE_NAME.pattern})$",
        description="Default of the option `features`: the picture; `oriented_gradients`, which are 900 histogram "
        "values of its edges; `encoder:NAME`, the vector of a public network, also with `+picture`; or "
        "`module:function` of a picture to a vector, code that runs with FAIRPATE_ALLOW_CODE=1 only.",
    )


def folder_table(folder: Path, below: Path) -> pa.Table:
    """Return a table with a row for each picture in ``folder``: its `path` relative to the folder ``below``, its
    `name`, and its subfolders as `level_1`, `level_2`, ..."""
    files = sorted(path for path in folder.rglob("*") if _is_picture(path.name))
    levels = [path.relative_to(folder).parts[:-1] for path in files]
    if not files or len({len(each) for each in levels}) != 1:
        raise DataError(
            f"{folder}: expected pictures ({', '.join(PICTURE_SUFFIXES)}) at one depth, got {len(files)} at "
            f"{len({len(each) for each in levels})} depths; arrange them as CLASS/GROUP/PICTURE."
        )
    columns = {PATH: [path.relative_to(below).as_posix() for path in files], NAME: [path.name for path in files]}
    for place, values in enumerate(zip(*levels, strict=True), start=1):
        columns[f"{LEVEL}{place}"] = list(values)
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


LABEL_FLIP = 0.25
FIRST_HIGH_DIGIT = 5
GROUPS = {"colour": ("red", "green"), "label": ("low digit", "high digit")}


def _coloured(
    request: Request, grey: PixelArray, digits: IntArray, names: Sequence[str], flips: npt.NDArray[np.float64]
) -> LoadedRecords:
    """Return coloured digits. Each digit's colour is its noisy binary label, flipped with the digit's own probability
    in ``flips``."""
    # Flips are hashes of names, not drawn from a stream: another record must not change the label of this one.
    high = np.asarray(digits) >= FIRST_HIGH_DIGIT
    binary = (high ^ (keyed_uniform(names, seed=request.seed, purpose="label flip") < LABEL_FLIP)).astype(np.int64)
    # The colour differs from that label in each record with the record's own probability.
    colour = binary ^ (keyed_uniform(names, seed=request.seed, purpose="colour flip") < flips).astype(np.int64)
    sensitive, is_visible = request.options["sensitive"], request.options["colour_as_feature"]
    # The ink (N, height, width) goes to channel 0 (red) or 1 (green); if the colour is hidden, to the only channel.
    painted = np.zeros((len(grey), 1 + is_visible, *grey.shape[1:]), dtype=np.uint8)
    painted[np.arange(len(grey)), colour if is_visible else 0] = grey
    x, y, z = map(torch.from_numpy, (painted, digits, colour if sensitive == "colour" else binary))
    return LoadedRecords(
        kind="image",
        records=Split(x=x, y=y, z=z, record_id=names),
        label_names=tuple(str(digit) for digit in range(10)),
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive,
    )


COLOUR_FLIP = 0.1
# In scikit-learn's digits, 16 is full ink.
INK_LEVELS = 16


def load_color_digits(request: Request) -> LoadedRecords:
    """Return all 1,797 of scikit-learn's handwritten digits, in red or green, as (2, 8, 8) images; needs no file.

    The construction is ColorMNIST's (Arjovsky et al. 2019, arXiv:1907.02893, section 5): a binary label says whether
    the digit is 5 or more, flipped with probability 0.25; the colour is that label flipped with probability 0.1. A high
    digit is then green with probability 0.7 and a low one with 0.3, so even a perfect classifier of the digit has a
    demographic-parity gap of about 0.08. Every flip is a keyed hash of the record's name: a record has the same colour
    in any file.
    """
    grey, digits = _published()
    names = tuple(f"digit-{index:04d}" for index in range(len(digits)))
    return _coloured(request, grey, digits.copy(), names, np.full(len(names), COLOUR_FLIP))


@cache
def _published() -> tuple[PixelArray, IntArray]:
    """Return scikit-learn's digits: grey images (1797, 8, 8) and labels (1797,), read once per process. Callers must
    copy the arrays before they write to them."""
    from sklearn.datasets import load_digits  # costs a second, and no other loader needs it

    published = load_digits()
    return np.rint(published.images * (255 / INK_LEVELS)).astype(np.uint8), published.target.astype(np.int64)


COLOUR_FLIPS = ((20_000, 0.2), (20_000, 0.1), (30_000, 0.9))
NUM_PRIVATE = 39_500
NUM_HELD_OUT = 30_000
NUM_TRAINING = 60_000  # images in MNIST's training file
IDX_BYTES = 0x800  # the magic number of bytes without sign, to which the number of dimensions is added


def load_color_mnist(request: Request) -> LoadedRecords:
    """Return 69,500 images of MNIST as (2, 28, 28), coloured as FairPATE's authors did it (arXiv:2302.09183).

    MNIST's training and test files are joined to 70,000 images, and records are named by their index there. A binary
    label (5 or more) is flipped with probability 0.25; the colour is that label flipped with probability 0.2 (first
    20,000 images), 0.1 (next 20,000) and 0.9 (last 30,000). The task is the digit. Teachers see the first 39,500
    images; public, validation and test records come from the last 30,000, where the correlation of colour and label is
    reversed. Deviations: flips are keyed hashes of the record's name and the public seed, not an unseeded stream; the
    500 images between 39,500 and 40,000 are left out, as they are by the authors' teachers.
    """
    grey, digits = _joined_mnist(request)
    flips = np.repeat([p for _, p in COLOUR_FLIPS], [count for count, _ in COLOUR_FLIPS])
    used = np.r_[0:NUM_PRIVATE, len(digits) - NUM_HELD_OUT : len(digits)]
    names = tuple(f"mnist-{index:05d}" for index in used)
    coloured = _coloured(request, grey[used], digits[used], names, flips[used])
    return replace(coloured, origins=dataset.origins(private=NUM_PRIVATE, held_out=NUM_HELD_OUT))


def load_mnist(request: Request) -> LoadedRecords:
    """Return MNIST's 70,000 images as (1, 28, 28); the task is the digit.

    Private records come from the 60,000 training images, public and test records from the 10,000 test images, as in
    Papernot et al. 2018 (arXiv:1802.08908). Records are named by their index in the joined files. All are in one group,
    as the publisher names none: there is no gap to measure.
    """
    grey, digits = _joined_mnist(request)
    return LoadedRecords(
        kind="image",
        records=Split(
            x=torch.from_numpy(grey[:, None]),
            y=torch.from_numpy(digits),
            z=torch.zeros(len(digits), dtype=torch.int64),
            record_id=tuple(f"mnist-{index:05d}" for index in range(len(digits))),
        ),
        label_names=tuple(str(digit) for digit in range(10)),
        group_names=("everyone",),
        sensitive_attribute="none",
        origins=dataset.origins(private=NUM_TRAINING, held_out=len(digits) - NUM_TRAINING),
    )


def _joined_mnist(request: Request) -> tuple[PixelArray, IntArray]:
    """Return MNIST's images (70000, 28, 28), those of the training file first, and their digits (70000,)."""
    files = facts_of("mnist")["files"]
    images, digits = (
        np.concatenate(
            [read_idx(files[f"{part}_{what}"], request.data_dir, dimensions=n) for part in ("train", "test")]
        )
        for what, n in (("images", 3), ("labels", 1))
    )
    return images, digits.astype(np.int64)


def read_idx(file: SourceFile, data_dir: Path | None, *, dimensions: int) -> PixelArray:
    """Read the bytes of an idx file with ``dimensions`` dimensions: 3 for images, 1 for labels."""
    content = gzip.decompress(dataset.read_any(file, data_dir)[1])
    (found,), magic = struct.unpack_from(">I", content), IDX_BYTES + dimensions
    if found != magic:
        raise DataError(f"{file.path}: expected an idx file with magic number {magic}, got {found}; restore the file.")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


WELL_FORMED = re.compile(r"(?P<age>\d{1,3})_(?P<gender>[01])_(?P<race>[0-4])_(?P<date>\d+)\.jpg(\.chip\.jpg)?")


def load_utkface(request: Request) -> LoadedRecords:
    """Return UTKFace as (3, size, size): the label is gender or age, the group is race, gender or both.

    Age, gender and race are read from file names `age_gender_race_date.jpg.chip.jpg`. The publisher's labels are
    estimates of a model, checked by a person. Age has nine classes, as in Lowy et al. (DP-FERMI, section 4.2); their
    bounds are not in that paper, and here they are decades.

    No record's name may depend on the race, so names consist of age, gender and date. Where these are equal, a number
    follows, in the order of the pictures' hashes. If the gender is in the group, names leave it out too; the records
    are then divided into splits differently.
    """
    label, sensitive = (str(request.options[name]) for name in ("label", "sensitive"))
    if label in sensitive.split("_and_"):
        raise DataSettingsError(
            f"data.options.sensitive: expected race if the label is {label}, as {sensitive} would reveal the label; "
            "set data.options.label to age, or leave sensitive out."
        )
    pictures = open_pictures(facts_of("utkface")["files"]["archive"], request.data_dir)
    found = {name: WELL_FORMED.fullmatch(name.rpartition("/")[2]) for name in pictures.names}
    fields = {name: match for name, match in found.items() if match}
    if not fields:
        raise DataError(
            f"{pictures.origin}: no file name of the form age_gender_race_date.jpg.chip.jpg; restore the names."
        )
    public = ("age", "gender", "date") if sensitive == "race" else ("age", "date")
    unit_of = {name: "utkface-" + "_".join(match.group(*public)) for name, match in fields.items()}
    # By unit, and within one by content. Only pictures with a unit in common are read for that, because it is slow.
    sizes = Counter(unit_of.values())
    shared = [name for name in unit_of if sizes[unit_of[name]] > 1]
    contents = (hashlib.sha256(content).hexdigest() for content in pictures.read(shared))
    content_of = dict(zip(shared, contents, strict=True))
    place_of = {name: (unit_of[name], content_of.get(name, "")) for name in unit_of}
    for place, count in Counter(place_of.values()).items():
        if count > 1:
            copies = ", ".join(name for name in unit_of if place_of[name] == place)
            raise DataError(f"{pictures.origin}: one picture {count} times: {copies}; remove the copies.")
    names = sorted(unit_of, key=place_of.__getitem__)
    meanings = dict(facts_of("utkface")["names"])
    age, gender, race = (
        torch.tensor([int(fields[name][part]) for name in names]) for part in ("age", "gender", "race")
    )
    # The last class is open: everybody of 80 or older.
    coded = {"age": (age // 10).clamp(max=len(meanings["age"]) - 1), "gender": gender, "race": race}
    coded["race_and_gender"] = race * len(meanings["gender"]) + gender
    meanings["race_and_gender"] = tuple(f"{one} & {other}" for one in meanings["race"] for other in meanings["gender"])
    unit_ids = tuple(unit_of[name] for name in names)
    malformed = len(pictures.names) - len(names)
    return _of_pictures(
        request,
        pictures,
        names,
        record_id=dataset.counted(unit_ids),
        unit_id=unit_ids,
        y=coded[label],
        z=coded[sensitive],
        label_names=meanings[label],
        group_names=meanings[sensitive],
        sensitive_attribute=sensitive.replace("_and_", " and "),
        notes=(f"pictures left out for their malformed names: {malformed:,}",) if malformed else (),
    )


def _of_pictures(
    request: Request,
    pictures: Pictures,
    names: Sequence[str],
    *,
    record_id: Sequence[str],
    y: torch.Tensor,
    z: torch.Tensor,
    unit_id: Sequence[str] = (),
    mode: Mode = "RGB",
    **facts: Any,
) -> LoadedRecords:
    """Return the records of the pictures ``names``, decoded at the requested size; ``facts`` are other fields of
    :class:`LoadedRecords`."""
    pixels = decode(pictures, names, size=request.options["image_size"], mode=mode)
    records = Split(x=pixels.x, y=y, z=z, record_id=record_id, unit_id=unit_id)
    return LoadedRecords(kind="image", records=records, mapped=pixels, **facts)


def _listed(file: SourceFile, request: Request, *columns: str) -> pa.Table:
    """Return the publisher's table that lists the pictures, read from ``file``; DataError if it lacks one of
    ``columns``."""
    table = read_table(dataset.read_any(file, request.data_dir)[1], file.path)
    require_columns(table, columns, file.path)
    return table


def _require_all(names: Iterable[str], present: Collection[str], where: object) -> None:
    for name in names:
        if name not in present:
            raise DataError(f"{where}: {name} of the publisher's list is missing; restore the publisher's files.")


def load_fairface(request: Request) -> LoadedRecords:
    """Return FairFace as (3, size, size): the label is gender, the group is race (7); records are named by their path.

    A subset of the pictures works with the full label files. The publisher's validation part is the test split.
    """
    files, meanings = (facts_of("fairface")[each] for each in ("files", "names"))
    pictures = open_pictures(files["archive"], request.data_dir)
    tables, absent = [], 0
    for file in (files["train"], files["val"]):
        labels = _listed(file, request, "file", "gender", "race")
        paths = pc.replace_substring_regex(labels["file"], "^fairface/", "")
        labels = labels.set_column(labels.column_names.index("file"), "file", paths)
        tables.append(labels.filter(pc.is_in(paths, value_set=pa.array(pictures.names, pa.string()))))
        # Counted for a note: a subset of the pictures is allowed.
        absent += len(labels) - len(tables[-1])
    table = pa.concat_tables(tables)
    if not (names := table["file"].to_pylist()):
        raise DataError(
            f"{pictures.origin}: has none of the pictures in the label files, such as train/1.jpg; restore it."
        )
    return _of_pictures(
        request,
        pictures,
        names,
        record_id=tuple(names),
        y=codes(table, "gender", meanings["gender"], files["train"].path),
        z=codes(table, "race", meanings["race"], files["train"].path),
        label_names=meanings["gender"],
        group_names=meanings["race"],
        sensitive_attribute="race",
        origins=dataset.origins(training=len(tables[0]), test=len(tables[1])),
        notes=(f"{absent} labelled pictures that are not present left out",),
    )


PRESENT = {"-1": 0, "1": 1}
TEST_PARTITION = "2"
PARTITIONS = ("0", "1", "2")


def load_celeba(request: Request) -> LoadedRecords:
    """Return CelebA as (3, size, size): the label is smiling, the group is gender; records are named by file name.

    The lists of attributes and of partitions may be the publisher's text files or their CSV form. The publisher's
    partition 2 is the test split; partitions 0 and 1 are for training.
    """
    files, meanings = (facts_of("celeba")[each] for each in ("files", "names"))
    attributes, partition = (_list(files[name], request) for name in ("attributes", "partition"))
    # Only for its checks: pictures of an unknown partition would count as training ones.
    codes(partition, "partition", PARTITIONS, files["partition"].path)
    part = dict(zip(*(column.to_pylist() for column in partition.columns), strict=True))

    require_columns(attributes, ["image_id"], files["attributes"].path)
    names = attributes["image_id"].to_pylist()
    pictures = open_pictures(files["archive"], request.data_dir)
    # The lists have bare file names; the pictures are in a folder of the archive.
    places = {name.rpartition("/")[2]: name for name in pictures.names}
    _require_all(names, places, pictures.origin)
    _require_all(names, part, files["partition"].path)
    return _of_pictures(
        request,
        pictures,
        [places[name] for name in names],
        record_id=tuple(names),
        y=codes(attributes, "Smiling", PRESENT, files["attributes"].path),
        z=codes(attributes, "Male", PRESENT, files["attributes"].path),
        label_names=meanings["smiling"],
        group_names=meanings["gender"],
        sensitive_attribute="gender",
        origins=tuple("test" if part[name] == TEST_PARTITION else "training" for name in names),
    )


def _list(file: SourceFile, request: Request) -> pa.Table:
    """Return the publisher's list of pictures in ``file``, with a column `image_id`; the file is text aligned with
    spaces, or its CSV form."""
    choice, content = dataset.read_any(file, request.data_dir)
    # The publisher gives no checksum: a truncated or different file is detected here.
    try:
        rows = [line.replace(",", " ").split() for line in content.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{choice.path}: not a readable table ({error}); restore the file, in UTF-8.") from error
    if len(rows) < 2:
        raise DataError(f"{choice.path}: not a readable table (it has no row); restore the file.")
    if not choice.path.endswith(".csv"):
        # The text of attributes opens with a count and their names, that of partitions with its first row.
        header, rows = (rows[1], rows[2:]) if len(rows[0]) == 1 else (["partition"], rows)
        rows = [["image_id", *header], *rows]
    return read_table("\n".join(map(",".join, rows)).encode(), choice.path)


ROOT = "CheXpert-v1.0-small"
# -1 marks a finding as uncertain, and an empty cell does not mention it: both count as absent ("U-Zeros").
MARKS = {"1.0": 1, "0.0": 0, "-1.0": 0, "": 0, "1": 1, "0": 0, "-1": 0}
PATIENT = re.compile(r"/(patient\d+)/")


def load_chexpert(request: Request) -> LoadedRecords:
    """Return CheXpert's frontal pictures as (1, size, size), named by their path.

    The label is whether a chosen finding is present; the group is race (white, black, Asian). Reads `train.csv` and
    `valid.csv` of CheXpert-v1.0-small, and the separate demographics table, saved as CSV. A finding marked uncertain or
    left blank counts as absent (the publisher's "U-Zeros"). All pictures of a patient go to one split, and are
    protected together.
    """
    files = facts_of("chexpert")["files"]
    train, demographics = files["train"], files["demographics"]
    spreadsheet = dataset.resolve_data_dir(request.data_dir) / demographics.path.replace(".csv", ".xlsx")
    if spreadsheet.is_file() and not spreadsheet.with_suffix(".csv").is_file():
        raise DataError(f"{spreadsheet}: save this spreadsheet as CSV next to it; only the CSV form is read.")
    known, finding = facts_of("chexpert")["names"]["race"], request.options["finding"]
    people = _listed(demographics, request, "PATIENT", "PRIMARY_RACE")
    patients, races = (people[name].to_pylist() for name in ("PATIENT", "PRIMARY_RACE"))
    race_of = {
        patient: code
        # No name is a prefix of another, so that a patient has one race at most.
        for patient, race in zip(patients, races, strict=True)
        for code, name in enumerate(known)
        if race.startswith(name)  # the publisher adds remarks such as ", non-Hispanic"
    }
    tables = []
    for file in (train, files["valid"]):
        listed = _listed(file, request, "Path", "Frontal/Lateral", finding)
        tables.append(listed.filter(pc.equal(listed["Frontal/Lateral"], "Frontal")).select(["Path", finding]))
    frontal = pa.concat_tables(tables)
    matches = [(path, PATIENT.search(path)) for path in frontal["Path"].to_pylist()]
    patient_of = {path: match[1] for path, match in matches if match}
    for path, match in matches:
        if match is None:
            raise DataError(
                f"{train.path}: column Path: expected .../patient00001/..., got {path!r}; restore the file."
            )
    table = frontal.filter(pa.array([patient_of[path] in race_of for path, _ in matches], pa.bool_()))
    if not (paths := table["Path"].to_pylist()):
        raise DataError(f"{demographics.path}: no patient of {train.path} has a known race; check both files.")
    pictures = open_pictures(files["archive"], request.data_dir)
    name_of = {name.partition(f"{ROOT}/")[2] or name: name for name in pictures.names}
    places = [path.partition(f"{ROOT}/")[2] for path in paths]
    _require_all(places, name_of, pictures.origin)
    return _of_pictures(
        request,
        pictures,
        [name_of[place] for place in places],
        mode="L",
        record_id=tuple(paths),
        y=codes(table, finding, MARKS, train.path),
        z=torch.tensor([race_of[patient_of[path]] for path in paths]),
        label_names=(f"{finding}: absent", f"{finding}: present"),
        group_names=known,
        sensitive_attribute="race",
        person_ids=tuple(patient_of[path] for path in paths),
        notes=(f"{len(frontal) - len(table)} frontal pictures of patients of another or unknown race left out",),
    )


LOADERS: Mapping[str, Callable[[Request], LoadedRecords]] = {
    "color_digits": load_color_digits,
    "color_mnist": load_color_mnist,
    "mnist": load_mnist,
    "utkface": load_utkface,
    "fairface": load_fairface,
    "celeba": load_celeba,
    "chexpert": load_chexpert,
}
"""The loader of each data set in ``pictures.yaml``."""


@cache
def facts_of(name: str) -> dict[str, Any]:
    """Return what ``pictures.yaml`` declares about the data set ``name``: among other facts its files by the keys that
    its loader uses, its options, and the names of the codes of each label and attribute."""
    facts: dict[str, Any] = read_yaml(Path(__file__).with_name("pictures.yaml"))[name]
    options = {key: Option(**each | {"allowed": tuple(each["allowed"])}) for key, each in facts["options"].items()}
    # All archives of pictures have this option.
    options |= {"features": FEATURES} if "image_size" in options else {}
    return facts | {
        "files": {key: SourceFile(**file) for key, file in facts.get("files", {}).items()},
        "options": options,
        "names": {what: tuple(names) for what, names in facts.get("names", {}).items()},
    }
