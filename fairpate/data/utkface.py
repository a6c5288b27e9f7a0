"""UTKFace: gender by race, read from the file names `age_gender_race_date.jpg.chip.jpg`.

Research use only: never redistribute a face, never show one. Names with a missing or impossible field are left out
and counted in the notes. The publisher's labels are estimates of a model, checked by a person.
"""

from __future__ import annotations

import re

import torch

from fairpate.data.dataset import Split
from fairpate.data.entry import DataError, DatasetEntry, Records, Request, SourceFile
from fairpate.data.gradients import FEATURES
from fairpate.data.images import IMAGE_SIZE, base_name, decode, open_pictures

# Codes as the publisher numbers them; the index is the code.
GENDERS = ("male", "female")
RACES = ("White", "Black", "Asian", "Indian", "Others")
WELL_FORMED = re.compile(r"(?P<age>\d{1,3})_(?P<gender>[01])_(?P<race>[0-4])_\d+\.jpg(\.chip\.jpg)?")
ARCHIVE = SourceFile(
    path="utkface/UTKFace-64px.zip",
    extracted="utkface/UTKFace",
    sha256="4775e79124777c55ad61e11e0d06b7cc3ed8c91ed10b742cc16792c017b637c8",
    manual=(
        "Download `Aligned&Cropped Faces` from https://susanqq.github.io/UTKFace (links there lead to Google Drive; "
        "accept the terms: non-commercial research only) and extract it as utkface/UTKFace/."
    ),
    note="A copy of the aligned faces resized to 64 x 64 under their original names; the publisher's are 200 x 200.",
)


def load(request: Request) -> Records:
    """All faces with well-formed names, as (3, size, size)."""
    pictures = open_pictures(ARCHIVE, request.data_dir)
    matches = {name: WELL_FORMED.fullmatch(base_name(name)) for name in pictures.names}
    labels = {name: (int(match["gender"]), int(match["race"])) for name, match in matches.items() if match}
    if not labels:
        raise DataError(f"{pictures.origin}: no file name of the form age_gender_race_date.jpg.chip.jpg.")
    names = tuple(labels)
    malformed = len(pictures.names) - len(names)
    pixels = decode(pictures, names, size=request.options["image_size"])
    return Records(
        kind="image",
        records=Split(
            x=pixels.x,
            y=torch.tensor([labels[name][0] for name in names]),
            z=torch.tensor([labels[name][1] for name in names]),
            record_id=tuple(base_name(name) for name in names),
        ),
        label_names=GENDERS,
        group_names=RACES,
        sensitive_attribute="race",
        pixels=pixels,
        notes=(f"{malformed} pictures with malformed names left out",) if malformed else (),
    )


ENTRY = DatasetEntry(
    name="utkface",
    task="gender of an aligned face",
    sensitive="race (5)",
    publisher="Z. Zhang, Y. Song, H. Qi: University of Tennessee, Knoxville",
    address="https://susanqq.github.io/UTKFace",
    licence="non-commercial research only; no redistribution",
    rows=23_702,
    kind="image",
    load=load,
    files=(ARCHIVE,),
    options={"features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=1500,
    num_validation=750,
    num_test=1500,
)
