"""UCI Adult (census income 1994): income above 50,000 dollars by sex or race.

Features are those of `adult.names`: 97 declared categories and 5 numbers, 102 in all for the sex reading (race is
then a feature). A missing value (`?`) is none of the declared categories. `fnlwgt` is left out: it is a sampling
weight of the survey, computed from the sensitive attributes, and says nothing else about a person.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Category, Field, Number, codes, encode, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Option, Records, Request, SourceFile, origins
from fairpate.data.files import read_bytes
from fairpate.data.tables import read_table, row_ids

UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
TRAIN = SourceFile(
    path="adult/adult.data",
    sha256="5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    url=f"{UCI}/adult.data",
)
TEST = SourceFile(
    path="adult/adult.test",
    sha256="a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    url=f"{UCI}/adult.test",
)
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
# What may be the attribute, and the survey weight that was computed from both.
NOT_IN_IDS = ("sex", "race", "fnlwgt")
INCOMES = {"<=50K": 0, ">50K": 1}
GROUPS = {
    "sex": ("Female", "Male"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
}
WORKCLASSES = (
    "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
    "Never-worked",
)  # fmt: skip
EDUCATIONS = (
    "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th", "12th",
    "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
)  # fmt: skip
MARITAL_STATUSES = (
    "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
    "Married-AF-spouse",
)  # fmt: skip
OCCUPATIONS = (
    "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty", "Handlers-cleaners",
    "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving", "Priv-house-serv", "Protective-serv",
    "Armed-Forces",
)  # fmt: skip
RELATIONSHIPS = ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")
COUNTRIES = (
    "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)", "India",
    "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland", "Jamaica",
    "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador", "Taiwan", "Haiti",
    "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia", "El-Salvador",
    "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
)  # fmt: skip
CODEBOOK: tuple[Field, ...] = (
    Number(column="age", low=17, high=90),
    Category(column="workclass", values=WORKCLASSES, missing="?"),
    Category(column="education", values=EDUCATIONS),
    Number(column="education-num", low=1, high=16),
    Category(column="marital-status", values=MARITAL_STATUSES),
    Category(column="occupation", values=OCCUPATIONS, missing="?"),
    Category(column="relationship", values=RELATIONSHIPS),
    Category(column="race", values=GROUPS["race"]),
    Category(column="sex", values=GROUPS["sex"]),
    Number(column="capital-gain", low=0, high=99_999, scale="log"),
    Number(column="capital-loss", low=0, high=4_999, scale="log"),
    Number(column="hours-per-week", low=0, high=99),
    Category(column="native-country", values=COUNTRIES, missing="?"),
)


def load(request: Request) -> Records:
    """All 48,842 persons; the publisher's test persons stay in the test split unless `split: pooled`."""
    train, test = (_read(file, request) for file in (TRAIN, TEST))
    table = pa.concat_tables([train, test])
    sensitive = request.options["sensitive"]
    fields = without_sensitive(CODEBOOK, sensitive, request.options)
    x, feature_names = encode(table, fields, "adult")
    record_ids, unit_ids = row_ids("adult", table, without=NOT_IN_IDS)
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=codes(table, "income", INCOMES, "adult"),
            z=codes(table, sensitive, {name: code for code, name in enumerate(GROUPS[sensitive])}, "adult"),
            record_id=record_ids,
            unit_id=unit_ids,
        ),
        label_names=tuple(INCOMES),
        group_names=GROUPS[sensitive],
        sensitive_attribute=sensitive,
        feature_names=feature_names,
        origins=origins(training=len(train), test=len(test)) if request.options["split"] == "published" else None,
    )


def _read(file: SourceFile, request: Request) -> pa.Table:
    # The publisher's test file opens with a remark and ends each income with a full stop.
    content = read_bytes(file, request.data_dir)
    body = content.partition(b"\n")[2] if content.startswith(b"|") else content
    table = read_table(body, file.path, columns=COLUMNS)
    return table.set_column(table.num_columns - 1, "income", pc.utf8_rtrim(table["income"], "."))


ENTRY = DatasetEntry(
    name="adult",
    task="income above 50,000 dollars",
    sensitive="sex or race (5)",
    publisher="UCI Machine Learning Repository (B. Becker, R. Kohavi)",
    address="https://archive.ics.uci.edu/dataset/2/adult",
    licence="CC BY 4.0",
    rows=48_842,
    kind="tabular",
    load=load,
    files=(TRAIN, TEST),
    options={
        "sensitive": Option(default="sex", allowed=("sex", "race"), description="The group z."),
        "split": Option(
            default="published",
            allowed=("published", "pooled"),
            description="Keep the publisher's test file as the test split, or pool both files before dividing.",
        ),
        "sensitive_as_feature": SENSITIVE_AS_FEATURE,
    },
    num_public=1500,
    num_validation=1000,
)
