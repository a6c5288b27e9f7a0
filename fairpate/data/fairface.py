"""FairFace: gender by race (7), read from the publisher's two label files and its pictures.

Rows whose picture is not in the archive are left out and counted in the notes, so a subset of the pictures works with
the full label files. The publisher's validation part is the test split.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.dataset import Split
from fairpate.data.declared.encode import codes
from fairpate.data.declared.tables import column_of, keep_rows, read_table, require_columns
from fairpate.data.entry import DataError, DatasetEntry, Records, Request, SourceFile, origins
from fairpate.data.files import read_bytes
from fairpate.data.gradients import FEATURES
from fairpate.data.images import IMAGE_SIZE, Pictures, decode, open_pictures

PUBLISHER = "https://github.com/joojs/fairface"
ARCHIVE = SourceFile(
    path="fairface/fairface-64px.zip",
    extracted="fairface/pictures",
    sha256="e8fa1f9585c4431192a4bd6f2d9bb168b2b62304a37411f877b17eae57c19185",
    manual=f"Follow the download links of {PUBLISHER} and extract the pictures as fairface/pictures/train and val.",
    note="25,000 of the pictures (20,000 of train, 5,000 of val) resized to 64 x 64 under their original names.",
)
TRAIN_LABELS = SourceFile(
    path="fairface/fairface_label_train.csv",
    sha256="90624451f2214ae1aa84021ae51c19ce45a375bd0bff901b935feadc59514795",
    manual=f"Follow the download links of {PUBLISHER}.",
)
VAL_LABELS = SourceFile(
    path="fairface/fairface_label_val.csv",
    sha256="d0eb9c60135c0768fbe688509912c85b0dfb86ff8b1ba93bee0055bae849e821",
    manual=f"Follow the download links of {PUBLISHER}.",
    note="Paths in this copy carry a `fairface/` prefix.",
)
GENDERS = ("Male", "Female")
RACES = ("White", "Black", "Latino_Hispanic", "East Asian", "Southeast Asian", "Indian", "Middle Eastern")


def load(request: Request) -> Records:
    """All labelled faces whose picture is present, as (3, size, size), named by their path."""
    pictures = open_pictures(ARCHIVE, request.data_dir)
    (train, num_train), (val, num_val) = (_labelled(file, pictures, request) for file in (TRAIN_LABELS, VAL_LABELS))
    table = pa.concat_tables([train, val])
    names = column_of(table, "file", "labels").to_pylist()
    if not names:
        raise DataError(f"{pictures.origin}: no picture that the label files name, such as train/1.jpg.")
    pixels = decode(pictures, names, size=request.options["image_size"])
    return Records(
        kind="image",
        records=Split(
            x=pixels.x,
            y=codes(table, "gender", {name: code for code, name in enumerate(GENDERS)}, TRAIN_LABELS.path),
            z=codes(table, "race", {name: code for code, name in enumerate(RACES)}, TRAIN_LABELS.path),
            record_id=tuple(names),
        ),
        label_names=GENDERS,
        group_names=RACES,
        sensitive_attribute="race",
        pixels=pixels,
        origins=origins(training=len(train), test=len(val)),
        notes=(f"{num_train + num_val} labelled pictures that are not present left out",),
    )


def _labelled(file: SourceFile, pictures: Pictures, request: Request) -> tuple[pa.Table, int]:
    """The rows whose picture is present, and how many are not."""
    table = read_table(read_bytes(file, request.data_dir), file.path)
    require_columns(table, ("file", "gender", "race"), file.path)
    names = pc.replace_substring_regex(table["file"], "^fairface/", "")
    table = table.set_column(table.column_names.index("file"), "file", names)
    present = pc.is_in(table["file"], value_set=pa.array(pictures.names, pa.string())).to_numpy()
    return keep_rows(table, present), int((~present).sum())


ENTRY = DatasetEntry(
    name="fairface",
    task="gender of a face",
    sensitive="race (7)",
    publisher="K. Karkkainen, J. Joo: University of California, Los Angeles",
    address=PUBLISHER,
    licence="CC BY 4.0",
    rows=97_698,
    kind="image",
    load=load,
    files=(ARCHIVE, TRAIN_LABELS, VAL_LABELS),
    options={"features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=3000,
    num_validation=1000,
)
