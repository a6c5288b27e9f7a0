"""UTKFace: gender or age, by race, gender or both, read from the file names `age_gender_race_date.jpg.chip.jpg`.

Research use only: never redistribute a face, never show one. Names with a missing or impossible field are left out
and counted in the notes. The publisher's labels are estimates of a model, checked by a person.

Age has nine classes, as in Lowy et al. (DP-FERMI, section 4.2), who do not print their bounds: these are decades.

A file name tells the race, so records are named and ordered without it: by age, gender and date, and pictures that have
these in common by their content. Where the gender is in the group, names are without it too, so that the division is
another one.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping

from fairpate.data.dataset import Split
from fairpate.data.entry import (
    DataError,
    DatasetEntry,
    DataSettingsError,
    Option,
    Records,
    Request,
    SourceFile,
)
from fairpate.data.gradients import FEATURES
from fairpate.data.identity import counted
from fairpate.data.images import IMAGE_SIZE, Pictures, base_name, decode, open_pictures
from fairpate.later import torch

# Codes as the publisher numbers them; the index is the code.
GENDERS = ("male", "female")
RACES = ("White", "Black", "Asian", "Indian", "Others")
AGES = ("0 to 9", *(f"{first} to {first + 9}" for first in range(10, 80, 10)), "80 or older")
BOTH = tuple(f"{race} & {gender}" for race in RACES for gender in GENDERS)
GROUPS = {"race": RACES, "gender": GENDERS, "race_and_gender": BOTH}
LABEL = Option(default="gender", allowed=("gender", "age"), description="The class y: gender, or age by decades.")
SENSITIVE = Option(default="race", allowed=tuple(GROUPS), description="The group z.")
WELL_FORMED = re.compile(r"(?P<age>\d{1,3})_(?P<gender>[01])_(?P<race>[0-4])_(?P<date>\d+)\.jpg(\.chip\.jpg)?")
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
    label, sensitive = (str(request.options[name]) for name in ("label", "sensitive"))
    _require_difference(label, sensitive)
    pictures = open_pictures(ARCHIVE, request.data_dir)
    found = {name: WELL_FORMED.fullmatch(base_name(name)) for name in pictures.names}
    told = {name: match for name, match in found.items() if match}
    if not told:
        raise DataError(f"{pictures.origin}: no file name of the form age_gender_race_date.jpg.chip.jpg.")
    public = ("age", "gender", "date") if sensitive == "race" else ("age", "date")
    unit_of = {name: "utkface-" + "_".join(match.group(*public)) for name, match in told.items()}
    names = _in_public_order(pictures, unit_of)
    unit_ids = tuple(unit_of[name] for name in names)
    malformed = len(pictures.names) - len(names)
    pixels = decode(pictures, names, size=request.options["image_size"])
    return Records(
        kind="image",
        records=Split(
            x=pixels.x,
            y=torch.tensor([_code(told[name], label) for name in names]),
            z=torch.tensor([_code(told[name], sensitive) for name in names]),
            record_id=counted(unit_ids),
            unit_id=unit_ids,
        ),
        label_names=AGES if label == "age" else GENDERS,
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive.replace("_and_", " and "),
        pixels=pixels,
        notes=(f"pictures left out for their malformed names: {malformed:,}",) if malformed else (),
    )


def _require_difference(label: str, sensitive: str) -> None:
    """The class may not be the group, or a part of it."""
    if label in sensitive.split("_and_"):
        raise DataSettingsError(
            f"data.options.sensitive: expected race with label: {label}, got {sensitive}, which tells the label; "
            "set data.options.label to age, or leave sensitive out."
        )


def _code(match: re.Match[str], what: str) -> int:
    """The class or group of a picture."""
    age, gender, race = (int(match[part]) for part in ("age", "gender", "race"))
    codes = {"age": min(age // 10, len(AGES) - 1), "gender": gender, "race": race}
    return codes[what] if what in codes else race * len(GENDERS) + gender


def _in_public_order(pictures: Pictures, unit_of: Mapping[str, str]) -> list[str]:
    """Names by unit, and within one by content; :class:`DataError` for a picture that is there twice."""
    sizes = Counter(unit_of.values())
    content_of = dict.fromkeys(unit_of, "")
    # Only of pictures with a name in common: others need no content to be told apart, and reading all is slow.
    shared = [name for name in unit_of if sizes[unit_of[name]] > 1]
    pictures.read(shared, lambda name, content: content_of.update({name: hashlib.sha256(content).hexdigest()}))
    place_of = {name: (unit_of[name], content_of[name]) for name in unit_of}
    for place, count in Counter(place_of.values()).items():
        if count > 1:
            copies = ", ".join(name for name in unit_of if place_of[name] == place)
            raise DataError(f"{pictures.origin}: one picture {count} times: {copies}; remove the copies.")
    return sorted(unit_of, key=place_of.__getitem__)


ENTRY = DatasetEntry(
    name="utkface",
    task="gender or age (9 decades) of an aligned face",
    sensitive="race (5) or gender or race and gender (10)",
    publisher="Z. Zhang, Y. Song, H. Qi: University of Tennessee, Knoxville",
    address="https://susanqq.github.io/UTKFace",
    licence="non-commercial research only; no redistribution",
    rows=23_702,
    kind="image",
    load=load,
    files=(ARCHIVE,),
    options={"label": LABEL, "sensitive": SENSITIVE, "features": FEATURES, "image_size": IMAGE_SIZE},
    num_public=1500,
    num_validation=750,
    num_test=1500,
)
