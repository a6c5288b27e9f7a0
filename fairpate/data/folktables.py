"""ACSIncome from the Census Bureau's person files (Ding et al. 2021, arXiv:2108.04884): income above 50,000 dollars.

Reads `psam_pXX.csv` of the American Community Survey's public use microdata, one file per state. The filter is the
paper's: older than 16, income above 100 dollars, at least one hour of work a week, a positive weight. Occupation and
place of birth become the Bureau's major groups instead of hundreds of codes. Races of few members form one public
group: white, black, Asian, other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from fairpate.data.acs import GROUP_CODES, GROUP_NAMES, HIGH_INCOME_DOLLARS
from fairpate.data.codebook import (
    SENSITIVE_AS_FEATURE,
    Bands,
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
from fairpate.data.tables import column_of, keep_rows, read_table, require_columns

# Postal code and the Census Bureau's number of each state.
STATES = {
    "AL": 1, "AK": 2, "AZ": 4, "AR": 5, "CA": 6, "CO": 8, "CT": 9, "DE": 10, "FL": 12, "GA": 13, "HI": 15, "ID": 16,
    "IL": 17, "IN": 18, "IA": 19, "KS": 20, "KY": 21, "LA": 22, "ME": 23, "MD": 24, "MA": 25, "MI": 26, "MN": 27,
    "MS": 28, "MO": 29, "MT": 30, "NE": 31, "NV": 32, "NH": 33, "NJ": 34, "NM": 35, "NY": 36, "NC": 37, "ND": 38,
    "OH": 39, "OK": 40, "OR": 41, "PA": 42, "RI": 44, "SC": 45, "SD": 46, "TN": 47, "TX": 48, "UT": 49, "VT": 50,
    "VA": 51, "WA": 53, "WV": 54, "WI": 55, "WY": 56, "PR": 72,
}  # fmt: skip
CENSUS = "https://www2.census.gov/programs-surveys/acs/data/pums/2018/1-Year"
MIN_INCOME_DOLLARS = 100
MIN_AGE = 16
# Major groups of the Census occupation code (2018) and of the place of birth; a band runs to the next start.
OCCUPATION_STARTS = (
    0, 500, 800, 1000, 1300, 1600, 2000, 2100, 2200, 2600, 3000, 3600, 3700, 4000, 4200, 4300, 4700, 5000, 6000, 6200,
    6800, 7000, 7700, 9000, 9800, 9900,
)  # fmt: skip
OCCUPATIONS = (
    "MGR", "BUS", "FIN", "CMM", "ENG", "SCI", "CMS", "LGL", "EDU", "ENT", "MED", "HLS", "PRT", "EAT", "CLN", "PRS",
    "SAL", "OFF", "FFF", "CON", "EXT", "RPR", "PRD", "TRN", "MIL", "UNEMPLOYED",
)  # fmt: skip
BIRTHPLACES = ("US state", "US territory", "Europe", "Asia", "Americas", "Africa", "Oceania")
CODEBOOK: tuple[Field, ...] = (
    Number(column="AGEP", low=0, high=99),
    Category(column="COW", values=tuple(str(code) for code in range(1, 10))),
    Category(column="SCHL", values=tuple(str(code) for code in range(1, 25))),
    Category(column="MAR", values=tuple(str(code) for code in range(1, 6))),
    Bands(column="OCCP", starts=OCCUPATION_STARTS, names=OCCUPATIONS),
    Bands(column="POBP", starts=(1, 60, 100, 200, 300, 400, 500), names=BIRTHPLACES),
    Category(column="RELP", values=tuple(str(code) for code in range(18))),
    Number(column="WKHP", low=0, high=99),
    Category(column="SEX", values=("1", "2")),
    Category(column="RAC1P", values=tuple(str(code) for code in range(1, 10))),
)
FILTERED = ("AGEP", "PINCP", "WKHP", "PWGTP")
IDENTITY = ("SERIALNO", "SPORDER")


def state_file(state: str) -> SourceFile:
    """The person file of one state, 2018."""
    name = f"psam_p{STATES[state]:02d}.csv"
    return SourceFile(path=f"folktables/{name}", url=f"{CENSUS}/csv_p{state.lower()}.zip", member=name)


def load(request: Request) -> Records:
    """The working adults of one state, named by household and person number."""
    file, sensitive = state_file(request.options["state"]), request.options["sensitive"]
    table = read_table(read_bytes(file, request.data_dir), file.path)
    require_columns(table, IDENTITY, file.path)
    table = keep_rows(table.select(_used(table, file.path)), _acs_income_filter(table, file.path))
    # Codes are zero-padded in some years and not in others.
    table = _without_leading_zeros(table, ("COW", "SCHL", "MAR", "RELP", "SEX", "RAC1P"))
    x, feature_names = encode(table, without_sensitive(CODEBOOK, sensitive, request.options), file.path)
    household, person = (column_of(table, column, file.path).to_pylist() for column in IDENTITY)
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=torch.from_numpy((numbers(table, "PINCP", file.path) > HIGH_INCOME_DOLLARS).astype(np.int64)),
            z=codes(table, sensitive, GROUP_CODES[sensitive], file.path),
            record_id=tuple(f"acs-{serial}-{order}" for serial, order in zip(household, person, strict=True)),
        ),
        label_names=("at most 50,000", "above 50,000"),
        group_names=GROUP_NAMES[sensitive],
        sensitive_attribute={"SEX": "sex", "RAC1P": "race"}[sensitive],
        feature_names=feature_names,
    )


def _used(table: pa.Table, name: str) -> list[str]:
    used = list(dict.fromkeys((*IDENTITY, *FILTERED, *(field.column for field in CODEBOOK))))
    require_columns(table, used, name)
    return used


def _acs_income_filter(table: pa.Table, name: str) -> npt.NDArray[np.bool_]:
    # An empty field is nan, and every comparison with nan is false.
    age, income, hours, weight = (numbers(table, column, name, missing="") for column in FILTERED)
    return (age > MIN_AGE) & (income > MIN_INCOME_DOLLARS) & (hours > 0) & (weight >= 1)


def _without_leading_zeros(table: pa.Table, columns: tuple[str, ...]) -> pa.Table:
    for column in columns:
        stripped = [text.lstrip("0") or "0" for text in table[column].to_pylist()]
        table = table.set_column(table.column_names.index(column), column, pa.array(stripped, pa.string()))
    return table


ENTRY = DatasetEntry(
    name="folktables",
    task="income above 50,000 dollars (ACSIncome)",
    sensitive="sex or race (4)",
    publisher="US Census Bureau, American Community Survey 2018; task by F. Ding, M. Hardt, J. Miller, L. Schmidt",
    address="https://www.census.gov/programs-surveys/acs/microdata.html",
    licence="Census terms of use",
    rows=195_665,
    kind="tabular",
    load=load,
    files=tuple(state_file(state) for state in STATES),
    select_files=lambda options: (state_file(options["state"]),),
    options={
        "state": Option(default="CA", allowed=tuple(STATES), description="Which state's person file."),
        "sensitive": Option(default="SEX", allowed=tuple(GROUP_NAMES), description="The group z."),
        "sensitive_as_feature": SENSITIVE_AS_FEATURE,
    },
    num_public=1500,
    num_validation=1000,
    num_test=2000,
)
