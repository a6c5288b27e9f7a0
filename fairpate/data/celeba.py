"""CelebA: smiling by gender, read from the publisher's lists and aligned pictures.

`list_attr_celeba` and `list_eval_partition` may be the publisher's text files or the CSV form of them. The
publisher's partition 2 is the test split; partitions 0 and 1 train.
"""

from __future__ import annotations

import pyarrow as pa

from fairpate.data.dataset import Split
from fairpate.data.declared.encode import codes
from fairpate.data.declared.tables import column_of, read_table
from fairpate.data.entry import DataError, DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_any
from fairpate.data.gradients import FEATURES
from fairpate.data.images import IMAGE_SIZE, base_name, decode, open_pictures

PUBLISHER = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
MANUAL = f"Agree to the terms at {PUBLISHER} (non-commercial research) and follow its links."
ARCHIVE = SourceFile(path="celeba/img_align_celeba.zip", extracted="celeba/img_align_celeba", manual=MANUAL)


def _list(name: str) -> SourceFile:
    csv_form = SourceFile(path=f"celeba/{name}.csv", manual=MANUAL)
    return SourceFile(path=f"celeba/{name}.txt", manual=MANUAL, alternatives=(csv_form,))


ATTRIBUTES = _list("list_attr_celeba")
PARTITION = _list("list_eval_partition")
PRESENT = {"-1": 0, "1": 1}
TEST_PARTITION = "2"
PARTITIONS = {"0": 0, "1": 1, "2": 2}


def load(request: Request) -> Records:
    """All listed pictures as (3, size, size), named by file name."""
    attributes, partition = _attributes(request), _partition(request)
    names = column_of(attributes, "image_id", ATTRIBUTES.path).to_pylist()
    part = dict(zip(*(column.to_pylist() for column in partition.columns), strict=True))
    pictures = open_pictures(ARCHIVE, request.data_dir)
    places = {base_name(name): name for name in pictures.names}
    for name in names:
        if name not in places or name not in part:
            where = pictures.origin if name not in places else PARTITION.path
            raise DataError(f"{where}: {name} of the attribute list is missing; restore the publisher's files.")
    pixels = decode(pictures, [places[name] for name in names], size=request.options["image_size"])
    return Records(
        kind="image",
        records=Split(
            x=pixels.x,
            y=codes(attributes, "Smiling", PRESENT, ATTRIBUTES.path),
            z=codes(attributes, "Male", PRESENT, ATTRIBUTES.path),
            record_id=tuple(names),
        ),
        label_names=("not smiling", "smiling"),
        group_names=("female", "male"),
        sensitive_attribute="gender",
        pixels=pixels,
        origins=tuple("test" if part[name] == TEST_PARTITION else "training" for name in names),
    )


def _attributes(request: Request) -> pa.Table:
    file, content = read_any(ATTRIBUTES, request.data_dir)
    if file.path.endswith(".csv"):
        return read_table(content, file.path)
    # A count, the 40 names, then rows aligned with runs of spaces.
    _count, header, *rows = _lines(content, file.path)
    return read_table(_comma_separated(rows), file.path, columns=("image_id", *header.split()))


def _partition(request: Request) -> pa.Table:
    file, content = read_any(PARTITION, request.data_dir)
    columns = ("image_id", "partition")
    rows = _lines(content, file.path)
    if file.path.endswith(".csv"):
        rows = rows[1:]
    table = read_table(_comma_separated(rows), file.path, columns=columns)
    # For its refusals alone: pictures of an unknown partition would count as training ones.
    codes(table, "partition", PARTITIONS, file.path)
    return table


def _lines(content: bytes, path: str) -> list[str]:
    """The publisher pins no checksum: what was cut off, or is another thing, shows here."""
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a readable table ({error}); restore the file, in UTF-8.") from error
    if len(lines) < 2:
        raise DataError(f"{path}: not a readable table (it has no row); restore the file.")
    return lines


def _comma_separated(rows: list[str]) -> bytes:
    return "\n".join(",".join(row.replace(",", " ").split()) for row in rows).encode()


ENTRY = DatasetEntry(
    name="celeba",
    task="smiling",
    sensitive="gender",
    publisher="Z. Liu, P. Luo, X. Wang, X. Tang: Chinese University of Hong Kong",
    address=PUBLISHER,
    licence="non-commercial research only; no redistribution",
    rows=202_599,
    kind="image",
    load=load,
    files=(ARCHIVE, ATTRIBUTES, PARTITION),
    options={"features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=9000,
    num_validation=750,
    num_test=4500,
)
