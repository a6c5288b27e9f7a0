"""BRFSS 2015 heart-disease indicators: coronary heart disease or a heart attack, by sex.

Every answer has a declared range, so each of the 21 columns is one number, and diabetes (no, before, yes) three.
"""

from __future__ import annotations

from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Category, Field, Number, codes, encode, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import read_table, row_ids

FILE = SourceFile(
    path="heart/heart_disease_health_indicators_BRFSS2015.csv",
    sha256="953fb23bb131736d7879539a071d3f6d1eaae8d4867ab05335d0ba89b94d5f99",
    manual="Download it from https://www.kaggle.com/datasets/alexteboul/heart-disease-health-indicators-dataset.",
)
NO_YES = {"0.0": 0, "1.0": 1}
YES_NO_COLUMNS = (
    "HighBP", "HighChol", "CholCheck", "Smoker", "Stroke", "PhysActivity", "Fruits", "Veggies", "HvyAlcoholConsump",
    "AnyHealthcare", "NoDocbcCost", "DiffWalk", "Sex",
)  # fmt: skip
CODEBOOK: tuple[Field, ...] = (
    *(Number(column=column, low=0, high=1) for column in YES_NO_COLUMNS),
    Category(column="Diabetes", values=("0.0", "1.0", "2.0")),
    Number(column="BMI", low=12, high=100),
    Number(column="GenHlth", low=1, high=5),
    Number(column="MentHlth", low=0, high=30),
    Number(column="PhysHlth", low=0, high=30),
    Number(column="Age", low=1, high=13),
    Number(column="Education", low=1, high=6),
    Number(column="Income", low=1, high=8),
)


def load(request: Request) -> Records:
    """All 253,680 answers, named by a content hash: many persons answered alike."""
    table = read_table(read_bytes(FILE, request.data_dir), FILE.path)
    x, feature_names = encode(table, without_sensitive(CODEBOOK, "Sex", request.options), FILE.path)
    record_ids, unit_ids = row_ids("heart", table, without=["Sex"])
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=codes(table, "HeartDiseaseorAttack", NO_YES, FILE.path),
            z=codes(table, "Sex", NO_YES, FILE.path),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=("no", "heart disease"),
        group_names=("female", "male"),
        sensitive_attribute="sex",
        feature_names=feature_names,
    )


ENTRY = DatasetEntry(
    name="heart",
    task="coronary heart disease or heart attack",
    sensitive="sex",
    publisher="US Centers for Disease Control and Prevention, BRFSS 2015; table by A. Teboul",
    address="https://www.cdc.gov/brfss/annual_data/annual_2015.html",
    licence="public domain (survey), CC0 (table)",
    rows=253_680,
    kind="tabular",
    load=load,
    files=(FILE,),
    options={"sensitive_as_feature": SENSITIVE_AS_FEATURE},
    num_public=5000,
    num_validation=2000,
)
