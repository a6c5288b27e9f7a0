"""NIST's excerpts of the American Community Survey 2019: income above 50,000 dollars by sex or race.

Persons whose income the survey declares (15 years and older). Income deciles and the income-to-poverty ratio are
computed from the label and left out, as are survey weights. `N` means "does not apply" and is a declared value or a
flag. Races of few members form one public group: white, black, Asian, other.
"""

from __future__ import annotations

import numpy as np
import torch

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
from fairpate.data.tables import keep_rows, read_table, row_ids

NIST = "https://raw.githubusercontent.com/usnistgov/SDNist/main/BenchmarkData/ACSDataExcerpts"
FILES = {
    "ma2019": SourceFile(
        path="acs/ma2019.csv",
        sha256="5489f7d45bccad8ae591dfe9011638def521b3f8641edf169bb45fea2c62fb44",
        url=f"{NIST}/massachusetts/ma2019.csv",
    ),
    "national2019": SourceFile(
        path="acs/national2019.csv",
        sha256="9e039c8e47c9e998d60f66fd50ec620fc2d0703decdc21f3069c9844fbef979b",
        url=f"{NIST}/national/national2019.csv",
    ),
}
HIGH_INCOME_DOLLARS = 50_000
NOT_APPLICABLE = "N"
# What may be the attribute, and the survey weights that were computed from both.
NOT_IN_IDS = ("SEX", "RAC1P", "PWGTP", "WGTP")
GROUP_NAMES = {"SEX": ("male", "female"), "RAC1P": ("white", "black", "Asian", "other")}
GROUP_CODES = {
    "SEX": {"1": 0, "2": 1},
    "RAC1P": {"1": 0, "2": 1, "6": 2, "3": 3, "4": 3, "5": 3, "7": 3, "8": 3, "9": 3},
}


def _codes_to(last: int, first: int = 1) -> tuple[str, ...]:
    return tuple(str(code) for code in range(first, last + 1))


CODEBOOK: tuple[Field, ...] = (
    Number(column="AGEP", low=0, high=99),
    Category(column="SEX", values=_codes_to(2)),
    Category(column="MSP", values=_codes_to(6), missing=NOT_APPLICABLE),
    Category(column="HISP", values=_codes_to(4, first=0)),
    Category(column="RAC1P", values=_codes_to(9)),
    Number(column="NOC", low=0, high=19, scale="log", missing=NOT_APPLICABLE),
    Number(column="NPF", low=2, high=20, scale="log", missing=NOT_APPLICABLE),
    Category(column="HOUSING_TYPE", values=_codes_to(3)),
    Category(column="OWN_RENT", values=_codes_to(2, first=0)),
    Number(column="DENSITY", low=10, high=55_000, scale="log"),
    Category(column="INDP_CAT", values=_codes_to(18, first=0), missing=NOT_APPLICABLE),
    Category(column="EDU", values=_codes_to(12), missing=NOT_APPLICABLE),
    Category(column="DVET", values=_codes_to(6), missing=NOT_APPLICABLE),
    Category(column="DREM", values=_codes_to(2), missing=NOT_APPLICABLE),
    Category(column="DPHY", values=_codes_to(2), missing=NOT_APPLICABLE),
    Category(column="DEYE", values=_codes_to(2)),
    Category(column="DEAR", values=_codes_to(2)),
)


def load(request: Request) -> Records:
    """All persons of one excerpt with a declared income, named by a content hash."""
    file, sensitive = FILES[request.options["excerpt"]], request.options["sensitive"]
    table = read_table(read_bytes(file, request.data_dir), file.path)
    income = numbers(table, "PINCP", file.path, missing=NOT_APPLICABLE)
    declared = ~np.isnan(income)
    table = keep_rows(table, declared)
    x, feature_names = encode(table, without_sensitive(CODEBOOK, sensitive, request.options), file.path)
    record_ids, unit_ids = row_ids("acs", table, without=NOT_IN_IDS)
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=torch.from_numpy((income[declared] > HIGH_INCOME_DOLLARS).astype(np.int64)),
            z=codes(table, sensitive, GROUP_CODES[sensitive], file.path),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("at most 50,000", "above 50,000"),
        group_names=GROUP_NAMES[sensitive],
        sensitive_attribute={"SEX": "sex", "RAC1P": "race"}[sensitive],
        feature_names=feature_names,
        notes=(f"{int((~declared).sum())} persons without a declared income (younger than 15) left out",),
    )


ENTRY = DatasetEntry(
    name="acs",
    task="income above 50,000 dollars",
    sensitive="sex or race (4)",
    publisher="US National Institute of Standards and Technology, from the US Census Bureau",
    address="https://github.com/usnistgov/SDNist",
    licence="NIST notice; Census terms of use",
    rows=27_253,
    kind="tabular",
    load=load,
    files=tuple(FILES.values()),
    select_files=lambda options: (FILES[options["excerpt"]],),
    options={
        "excerpt": Option(default="national2019", allowed=tuple(FILES), description="Which excerpt."),
        "sensitive": Option(default="SEX", allowed=tuple(GROUP_NAMES), description="The group z."),
        "sensitive_as_feature": SENSITIVE_AS_FEATURE,
    },
    num_public=1500,
    num_validation=500,
    num_test=2000,
)
