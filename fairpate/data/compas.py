"""ProPublica's COMPAS records (Broward County 2013, 2014): recidivism within two years by race.

ProPublica's own filter is applied: a charge within 30 days of the screening, a known outcome, no ordinary traffic
offence, a score that was given. It leaves 6,172 of 7,214. Features are what was known at the screening; the COMPAS
scores themselves are left out. The three smallest groups (Asian, Native American, Other) are one public group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
from fairpate.data.entry import DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_any
from fairpate.data.tables import column_of, keep_rows, read_table, row_ids

DEIDENTIFIED = SourceFile(
    path="compas/compas-scores-two-years-deidentified.csv",
    sha256="3ec90ec5a3d88f8274078e6064f5df44bf550a6ef8836bb5a9a4ab1a8a9902f9",
    manual="Remove names, birth dates and case numbers from the published compas-scores-two-years.csv.",
    note="The published file less names, birth dates and case numbers.",
)
PUBLISHED = SourceFile(
    path="compas/compas-scores-two-years.csv",
    url="https://raw.githubusercontent.com/propublica/compas-analysis/master/compas-scores-two-years.csv",
    note="Holds names and birth dates; no column of them is read.",
    alternatives=(DEIDENTIFIED,),
)
RACES = {"African-American": 0, "Caucasian": 1, "Hispanic": 2, "Asian": 3, "Native American": 3, "Other": 3}
MAX_DAYS_FROM_ARREST = 30
CODEBOOK: tuple[Field, ...] = (
    Category(column="sex", values=("Female", "Male")),
    Number(column="age", low=18, high=100),
    Category(column="race", values=tuple(RACES)),
    Number(column="juv_fel_count", low=0, high=20, scale="log"),
    Number(column="juv_misd_count", low=0, high=20, scale="log"),
    Number(column="juv_other_count", low=0, high=20, scale="log"),
    Number(column="priors_count", low=0, high=40, scale="log"),
    Category(column="c_charge_degree", values=("F", "M")),
)
IDENTITY = (
    "compas_screening_date", "sex", "age", "race", "juv_fel_count", "juv_misd_count", "juv_other_count",
    "priors_count", "days_b_screening_arrest", "c_jail_in", "c_jail_out", "c_charge_degree", "c_charge_desc",
    "two_year_recid",
)  # fmt: skip


def load(request: Request) -> Records:
    """The 6,172 persons that pass the filter, named by a hash of what was known at their screening."""
    file, content = read_any(PUBLISHED, request.data_dir)
    table = read_table(content, file.path)
    table = keep_rows(table, _usual_filter(table, file.path))
    x, feature_names = encode(table, without_sensitive(CODEBOOK, "race", request.options), file.path)
    record_ids, unit_ids = row_ids("compas", table.select(IDENTITY), without=["race"])
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=codes(table, "two_year_recid", {"0": 0, "1": 1}, file.path),
            z=codes(table, "race", RACES, file.path),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("no new offence", "reoffends"),
        group_names=("African-American", "Caucasian", "Hispanic", "other"),
        sensitive_attribute="race",
        feature_names=feature_names,
    )


def _usual_filter(table: pa.Table, name: str) -> npt.NDArray[np.bool_]:
    # Where no arrest is on file the difference is empty: the comparison with nan is false.
    days = numbers(table, "days_b_screening_arrest", name, missing="")
    unwanted = {"is_recid": "-1", "c_charge_degree": "O", "score_text": "N/A"}
    keep = np.abs(days) <= MAX_DAYS_FROM_ARREST
    for column, value in unwanted.items():
        keep &= np.array([found != value for found in column_of(table, column, name).to_pylist()])
    return keep


ENTRY = DatasetEntry(
    name="compas",
    task="recidivism within two years",
    sensitive="race (4)",
    publisher="ProPublica (J. Larson, S. Mattu, L. Kirchner, J. Angwin)",
    address="https://github.com/propublica/compas-analysis",
    licence="as published by ProPublica",
    rows=6_172,
    kind="tabular",
    load=load,
    files=(PUBLISHED,),
    options={"sensitive_as_feature": SENSITIVE_AS_FEATURE},
    num_public=1000,
    num_validation=500,
)
