"""UCI Parkinsons telemonitoring: a total UPDRS score above 27.576 by sex.

42 subjects gave 5,875 recordings. The threshold is the published studies' constant. Two divisions are offered and
a result must name which: by `subject` (nobody is in two splits: what a new patient would see), and by `row` as
published, where a model meets recordings of a subject it was trained on. `motor_UPDRS` is a part of the total score
and kept as a feature, as published, unless the option says otherwise: 19 features with it, sex left out.

Under `row` one subject's recordings reach many teachers: the record-level guarantee is then not one per person.
"""

from __future__ import annotations

import numpy as np
import torch

from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Field, Number, codes, encode, numbers, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Option, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import column_of, read_table, row_ids

FILE = SourceFile(
    path="parkinsons/parkinsons_updrs.csv",
    sha256="cacdc7007846c68ca852cb3dbb43b1f68b7a9edefa2336f965f6610551cd30e6",
    url="https://archive.ics.uci.edu/ml/machine-learning-databases/parkinsons/telemonitoring/parkinsons_updrs.data",
)
HIGH_TOTAL_UPDRS = 27.576
CODEBOOK: tuple[Field, ...] = (
    Number(column="age", low=30, high=90),
    Number(column="sex", low=0, high=1),
    Number(column="test_time", low=-10, high=220),
    Number(column="motor_UPDRS", low=0, high=108),
    Number(column="Jitter(%)", low=0, high=0.1),
    Number(column="Jitter(Abs)", low=0, high=0.0005),
    Number(column="Jitter:RAP", low=0, high=0.06),
    Number(column="Jitter:PPQ5", low=0, high=0.07),
    Number(column="Jitter:DDP", low=0, high=0.18),
    Number(column="Shimmer", low=0, high=0.3),
    Number(column="Shimmer(dB)", low=0, high=2.2),
    Number(column="Shimmer:APQ3", low=0, high=0.17),
    Number(column="Shimmer:APQ5", low=0, high=0.17),
    Number(column="Shimmer:APQ11", low=0, high=0.28),
    Number(column="Shimmer:DDA", low=0, high=0.5),
    Number(column="NHR", low=0, high=0.75),
    Number(column="HNR", low=0, high=40),
    Number(column="RPDE", low=0, high=1),
    Number(column="DFA", low=0.5, high=1),
    Number(column="PPE", low=0, high=1),
)


def load(request: Request) -> Records:
    """All 5,875 recordings, named by a content hash."""
    table = read_table(read_bytes(FILE, request.data_dir), FILE.path)
    fields = without_sensitive(CODEBOOK, "sex", request.options)
    if not request.options["motor_updrs_as_feature"]:
        fields = tuple(field for field in fields if field.column != "motor_UPDRS")
    x, feature_names = encode(table, fields, FILE.path)
    high = numbers(table, "total_UPDRS", FILE.path) > HIGH_TOTAL_UPDRS
    subjects = tuple(f"subject-{name}" for name in column_of(table, "subject#", FILE.path).to_pylist())
    record_ids, unit_ids = row_ids("parkinsons", table, without=["sex"])
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=torch.from_numpy(high.astype(np.int64)),
            z=codes(table, "sex", {"0": 0, "1": 1}, FILE.path),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("UPDRS at most 27.576", "UPDRS above 27.576"),
        group_names=("male", "female"),
        sensitive_attribute="sex",
        feature_names=feature_names,
        person_ids=subjects if request.options["split"] == "subject" else None,
    )


ENTRY = DatasetEntry(
    name="parkinsons",
    task="total UPDRS score above 27.576",
    sensitive="sex",
    publisher="UCI Machine Learning Repository (A. Tsanas, M. Little)",
    address="https://archive.ics.uci.edu/dataset/189/parkinsons+telemonitoring",
    licence="CC BY 4.0",
    rows=5_875,
    kind="tabular",
    load=load,
    files=(FILE,),
    options={
        "split": Option(
            default="subject", allowed=("subject", "row"), description="Divide by subject, or by row as published."
        ),
        "motor_updrs_as_feature": Option(
            default=True, allowed=(True, False), description="Keep the motor part of the score as a feature."
        ),
        "sensitive_as_feature": SENSITIVE_AS_FEATURE,
    },
    num_public=1000,
    num_validation=500,
)
