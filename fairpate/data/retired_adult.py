"""Retired Adult: the reconstruction of UCI Adult with exact incomes (Ding et al. 2021, arXiv:2108.04884), by gender.

The columns and categories are Adult's; the label is an income above 50,000 dollars. 101 features: Adult's 102 less
`Never-worked`, whose members have no income and are not in the reconstruction.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fairpate.data import adult
from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Category, Field, codes, encode, numbers, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import read_table, row_ids

FILE = SourceFile(
    path="retired_adult/adult_reconstruction.csv",
    url="https://raw.githubusercontent.com/socialfoundations/folktables/main/adult_reconstruction.csv",
)
HIGH_INCOME_DOLLARS = 50_000


def _field(field: Field) -> Field:
    """Adult's declaration under this file's names."""
    if isinstance(field, Category) and field.column == "sex":
        return replace(field, column="gender")
    if isinstance(field, Category) and field.column == "workclass":
        return replace(field, values=tuple(value for value in field.values if value != "Never-worked"))
    return field


CODEBOOK = tuple(_field(field) for field in adult.CODEBOOK)


def load(request: Request) -> Records:
    """All reconstructed persons, named by a content hash."""
    table = read_table(read_bytes(FILE, request.data_dir), FILE.path)
    x, feature_names = encode(table, without_sensitive(CODEBOOK, "gender", request.options), FILE.path)
    income = numbers(table, "income", FILE.path)
    record_ids, unit_ids = row_ids("retired-adult", table, without=["gender"])
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=torch.from_numpy((income > HIGH_INCOME_DOLLARS).astype(np.int64)),
            z=codes(table, "gender", {"Female": 0, "Male": 1}, FILE.path),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("<=50K", ">50K"),
        group_names=("Female", "Male"),
        sensitive_attribute="gender",
        feature_names=feature_names,
    )


ENTRY = DatasetEntry(
    name="retired_adult",
    task="income above 50,000 dollars",
    sensitive="gender",
    publisher="F. Ding, M. Hardt, J. Miller, L. Schmidt",
    address="https://github.com/socialfoundations/folktables",
    licence="MIT (reconstruction); Census terms of use",
    rows=49_531,
    kind="tabular",
    load=load,
    files=(FILE,),
    options={"sensitive_as_feature": SENSITIVE_AS_FEATURE},
    num_public=1500,
    num_validation=1000,
)
