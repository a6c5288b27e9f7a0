"""CheXpert: a finding in frontal chest radiographs, by race (white, black, Asian).

Reads `train.csv` and `valid.csv` of CheXpert-v1.0-small, its pictures, and the separate demographics table (saved as
CSV). Patients of another or unknown race are left out and counted in the notes. A finding marked uncertain or left
blank counts as absent (the publisher's "U-Zeros"). All pictures of a patient go to one split, and are protected
together.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from fairpate.data.dataset import Split
from fairpate.data.declared.encode import codes
from fairpate.data.declared.tables import column_of, keep_rows, read_table, require_columns
from fairpate.data.entry import DataError, DatasetEntry, Option, Records, Request, SourceFile
from fairpate.data.files import read_bytes, resolve_data_dir
from fairpate.data.gradients import FEATURES
from fairpate.data.images import IMAGE_SIZE, decode, open_pictures
from fairpate.data.mapped import Pixels
from fairpate.later import torch

PUBLISHER = "https://stanfordmlgroup.github.io/competitions/chexpert"
MANUAL = f"Register at {PUBLISHER} and accept the research use agreement."
ROOT = "CheXpert-v1.0-small"
FOLDER = f"chexpert/{ROOT}"
ARCHIVE = SourceFile(path=f"chexpert/{ROOT}.zip", extracted=FOLDER, manual=MANUAL)
TRAIN = SourceFile(path=f"{FOLDER}/train.csv", manual=MANUAL)
VALID = SourceFile(path=f"{FOLDER}/valid.csv", manual=MANUAL)
DEMOGRAPHICS = SourceFile(
    path="chexpert/CHEXPERT DEMO.csv", manual=f"{MANUAL} Save its demographics table `CHEXPERT DEMO.xlsx` as CSV."
)
FINDINGS = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture",
    "Support Devices",
)  # fmt: skip
MARKS = {"1.0": 1, "0.0": 0, "-1.0": 0, "": 0, "1": 1, "0": 0, "-1": 0}
RACES = ("White", "Black", "Asian")
PATIENT = re.compile(r"/(patient\d+)/")


def load(request: Request) -> Records:
    """All frontal pictures of patients whose race is white, black or Asian, as (1, size, size), named by their path."""
    race_of = _races(request)
    table = pa.concat_tables([_frontal(file, request) for file in (TRAIN, VALID)])
    paths = column_of(table, "Path", TRAIN.path).to_pylist()
    known = np.array([_patient(path) in race_of for path in paths])
    table = keep_rows(table, known)
    paths = column_of(table, "Path", TRAIN.path).to_pylist()
    if not paths:
        raise DataError(f"{DEMOGRAPHICS.path}: no patient of {TRAIN.path} has a known race; check both files.")
    finding = request.options["finding"]
    pixels = _pixels(paths, request)
    return Records(
        kind="image",
        records=Split(
            x=pixels.x,
            y=codes(table, finding, MARKS, TRAIN.path),
            z=torch.tensor([race_of[_patient(path)] for path in paths]),
            record_id=tuple(paths),
        ),
        label_names=(f"{finding}: absent", f"{finding}: present"),
        group_names=RACES,
        sensitive_attribute="race",
        person_ids=tuple(_patient(path) for path in paths),
        pixels=pixels,
        notes=(f"{int((~known).sum())} frontal pictures of patients of another or unknown race left out",),
    )


def _frontal(file: SourceFile, request: Request) -> pa.Table:
    table = read_table(read_bytes(file, request.data_dir), file.path)
    require_columns(table, ("Path", "Frontal/Lateral", *FINDINGS), file.path)
    views = column_of(table, "Frontal/Lateral", file.path).to_pylist()
    table = keep_rows(table, np.array([view == "Frontal" for view in views]))
    return table.select(["Path", *FINDINGS])


def _races(request: Request) -> dict[str, int]:
    """Group code by patient, of the patients whose primary race begins with one of the three names."""
    spreadsheet = resolve_data_dir(request.data_dir) / DEMOGRAPHICS.path.replace(".csv", ".xlsx")
    if spreadsheet.is_file() and not spreadsheet.with_suffix(".csv").is_file():
        raise DataError(f"{spreadsheet}: save this spreadsheet as CSV beside it; only the CSV form is read.")
    table = read_table(read_bytes(DEMOGRAPHICS, request.data_dir), DEMOGRAPHICS.path)
    patients, races = (
        column_of(table, column, DEMOGRAPHICS.path).to_pylist() for column in ("PATIENT", "PRIMARY_RACE")
    )
    return {
        patient: code
        for patient, race in zip(patients, races, strict=True)
        for code, name in enumerate(RACES)
        if race.startswith(name)
    }


def _patient(path: str) -> str:
    match = PATIENT.search(path)
    if match is None:
        raise DataError(f"{TRAIN.path}: column Path: expected .../patient00001/..., got {path!r}.")
    return match[1]


def _pixels(paths: list[str], request: Request) -> Pixels:
    pictures = open_pictures(ARCHIVE, request.data_dir)
    place_of = {name.partition(f"{ROOT}/")[2] or name: name for name in pictures.names}
    places = [path.partition(f"{ROOT}/")[2] for path in paths]
    for place in places:
        if place not in place_of:
            raise DataError(f"{pictures.origin}: picture {place} is missing; restore the publisher's files.")
    return decode(pictures, [place_of[place] for place in places], size=request.options["image_size"], mode="L")


ENTRY = DatasetEntry(
    name="chexpert",
    task="a finding in a frontal chest radiograph",
    sensitive="race (3)",
    publisher="Stanford Machine Learning Group (J. Irvin, P. Rajpurkar and others)",
    address=PUBLISHER,
    licence="Stanford research use agreement; no redistribution",
    rows=224_316,
    persons=65_240,
    kind="image",
    load=load,
    files=(ARCHIVE, TRAIN, VALID, DEMOGRAPHICS),
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
