"""UCI Bank Marketing (Portugal 2008 to 2013): subscription to a deposit by age or marital status.

Two published files: `additional` (41,188 calls with economic indicators) and `full` (45,211 calls). The age groups
are 25 to 60 against younger or older. Calls of unknown marital status are left out when that is the group. The length
of the call is known only when its outcome is, so it is a feature only where asked for.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fairpate.data.codebook import (
    SENSITIVE_AS_FEATURE,
    Category,
    Field,
    Number,
    codes,
    encode,
    numbers,
    without_sensitive,
)
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Option, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import column_of, keep_rows, read_table, row_ids

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/00222"
ADDITIONAL = SourceFile(
    path="bank/bank-additional-full.csv",
    sha256="74adfc578bf77a7ff4bb1ba4a9f8709d9e3c6907342959c2c8416847e0afb4d8",
    url=f"{UCI}/bank-additional.zip",
    member="bank-additional/bank-additional-full.csv",
)
FULL = SourceFile(
    path="bank/bank-full.csv",
    sha256="d1513ec63b385506f7cfce9f2c5caa9fe99e7ba4e8c3fa264b3aaf0f849ed32d",
    url=f"{UCI}/bank.zip",
    member="bank-full.csv",
)
FILES = {"additional": ADDITIONAL, "full": FULL}
MIDDLE_AGES = (25, 60)
GROUPS = {"age": ("younger than 25 or older than 60", "25 to 60"), "marital": ("married", "single", "divorced")}
JOBS = (
    "admin.", "blue-collar", "entrepreneur", "housemaid", "management", "retired", "self-employed", "services",
    "student", "technician", "unemployed",
)  # fmt: skip
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
PERSON: tuple[Field, ...] = (
    Number(column="age", low=17, high=100),
    Category(column="job", values=JOBS, missing="unknown"),
    Category(column="marital", values=GROUPS["marital"], missing="unknown"),
    Category(column="default", values=("no", "yes"), missing="unknown"),
    Category(column="housing", values=("no", "yes"), missing="unknown"),
    Category(column="loan", values=("no", "yes"), missing="unknown"),
    Category(column="contact", values=("cellular", "telephone"), missing="unknown"),
    Category(column="month", values=MONTHS),
    Number(column="duration", low=0, high=5000, scale="log"),
    Number(column="campaign", low=1, high=100, scale="log"),
)
CODEBOOKS: dict[str, tuple[Field, ...]] = {
    "additional": (
        *PERSON,
        Category(
            column="education",
            values=(
                "basic.4y", "basic.6y", "basic.9y", "high.school", "illiterate", "professional.course",
                "university.degree",
            ),
            missing="unknown",
        ),
        Category(column="day_of_week", values=("mon", "tue", "wed", "thu", "fri")),
        Number(column="pdays", low=0, high=30, missing="999"),
        Number(column="previous", low=0, high=10),
        Category(column="poutcome", values=("failure", "nonexistent", "success")),
        Number(column="emp.var.rate", low=-5, high=5),
        Number(column="cons.price.idx", low=90, high=96),
        Number(column="cons.conf.idx", low=-60, high=-20),
        Number(column="euribor3m", low=0, high=6),
        Number(column="nr.employed", low=4900, high=5300),
    ),
    "full": (
        *PERSON,
        Category(column="education", values=("primary", "secondary", "tertiary"), missing="unknown"),
        Number(column="balance", low=-10_000, high=100_000, scale="log"),
        Number(column="day", low=1, high=31),
        Number(column="pdays", low=0, high=1000, scale="log", missing="-1"),
        Number(column="previous", low=0, high=300, scale="log"),
        Category(column="poutcome", values=("failure", "other", "success"), missing="unknown"),
    ),
}  # fmt: skip


def load(request: Request) -> Records:
    """All calls of one published file, named by a content hash."""
    file = FILES[request.options["file"]]
    sensitive = request.options["sensitive"]
    table, notes = _known_groups(
        read_table(read_bytes(file, request.data_dir), file.path, separator=";"), sensitive, file
    )
    x, feature_names = encode(table, _fields(request), file.path)
    record_ids, unit_ids = row_ids("bank", table, without=tuple(GROUPS))
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=codes(table, "y", {"no": 0, "yes": 1}, file.path),
            z=_groups(table, sensitive, file),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("no", "yes"),
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive,
        feature_names=feature_names,
        notes=notes,
    )


def _fields(request: Request) -> tuple[Field, ...]:
    fields = without_sensitive(CODEBOOKS[request.options["file"]], request.options["sensitive"], request.options)
    return tuple(field for field in fields if field.column != "duration" or request.options["duration_as_feature"])


def _known_groups(table: pa.Table, sensitive: str, file: SourceFile) -> tuple[pa.Table, tuple[str, ...]]:
    if sensitive != "marital":
        return table, ()
    known = np.array([value != "unknown" for value in column_of(table, "marital", file.path).to_pylist()])
    return keep_rows(table, known), (f"{int((~known).sum())} calls of unknown marital status left out",)


def _groups(table: pa.Table, sensitive: str, file: SourceFile) -> Tensor:
    if sensitive == "marital":
        return codes(table, "marital", {value: code for code, value in enumerate(GROUPS["marital"])}, file.path)
    age = numbers(table, "age", file.path)
    low, high = MIDDLE_AGES
    return torch.from_numpy(((age >= low) & (age <= high)).astype(np.int64))


ENTRY = DatasetEntry(
    name="bank",
    task="subscription to a term deposit",
    sensitive="age (25 to 60 or not) or marital status (3)",
    publisher="UCI Machine Learning Repository (S. Moro, P. Cortez, P. Rita)",
    address="https://archive.ics.uci.edu/dataset/222/bank+marketing",
    licence="CC BY 4.0",
    rows=41_188,
    kind="tabular",
    load=load,
    files=tuple(FILES.values()),
    select_files=lambda options: (FILES[options["file"]],),
    options={
        "file": Option(default="additional", allowed=tuple(FILES), description="Which published file."),
        "sensitive": Option(default="age", allowed=("age", "marital"), description="The group z."),
        "duration_as_feature": Option(
            default=False, allowed=(False, True), description="Whether the model may see the length of the call."
        ),
        "sensitive_as_feature": SENSITIVE_AS_FEATURE,
    },
    num_public=1500,
    num_validation=1000,
)
