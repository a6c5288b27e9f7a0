"""UCI Default of Credit Card Clients (Taiwan 2005): default next month by sex.

87 features: 14 amounts and counts, 4 declared levels of education, 3 of marriage (undeclared published codes join
"others", as the publisher's note says) and 11 states of repayment for each of six months. Studies that count 85 leave
out two of those states which no record has; leaving them out would be a statistic of the records.
"""

from __future__ import annotations

from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Category, Field, Number, codes, encode, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import column_of, read_table

FILE = SourceFile(
    path="credit_default/UCI_Credit_Card.csv",
    sha256="a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1",
    manual="Download UCI_Credit_Card.csv from https://www.kaggle.com/datasets/uciml/default-of-credit-card-clients-dataset.",
    note="The CSV form of UCI's spreadsheet `default of credit card clients.xls`.",
)
LABEL = "default.payment.next.month"
SEXES = {"1": 0, "2": 1}
REPAYMENT_STATES = tuple(str(months) for months in range(-2, 9))
HIGHEST_AMOUNT = 2_000_000
CODEBOOK: tuple[Field, ...] = (
    Number(column="LIMIT_BAL", low=0, high=1_000_000),
    Category(column="SEX", values=("1", "2")),
    Category(column="EDUCATION", values=("1", "2", "3", "4"), aliases={"0": "4", "5": "4", "6": "4"}),
    Category(column="MARRIAGE", values=("1", "2", "3"), aliases={"0": "3"}),
    Number(column="AGE", low=18, high=100),
    *(Category(column=f"PAY_{month}", values=REPAYMENT_STATES, aliases={"9": "8"}) for month in (0, 2, 3, 4, 5, 6)),
    *(
        Number(column=f"BILL_AMT{month}", low=-HIGHEST_AMOUNT, high=HIGHEST_AMOUNT, scale="log")
        for month in range(1, 7)
    ),
    *(Number(column=f"PAY_AMT{month}", low=0, high=HIGHEST_AMOUNT, scale="log") for month in range(1, 7)),
)


def load(request: Request) -> Records:
    """All 30,000 clients, named by the publisher's ID."""
    table = read_table(read_bytes(FILE, request.data_dir), FILE.path)
    x, feature_names = encode(table, without_sensitive(CODEBOOK, "SEX", request.options), FILE.path)
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=codes(table, LABEL, {"0": 0, "1": 1}, FILE.path),
            z=codes(table, "SEX", SEXES, FILE.path),
            record_id=tuple(f"credit-{client}" for client in column_of(table, "ID", FILE.path).to_pylist()),
        ),
        label_names=("pays", "defaults"),
        group_names=("male", "female"),
        sensitive_attribute="sex",
        feature_names=feature_names,
    )


ENTRY = DatasetEntry(
    name="credit_default",
    task="default on the next payment",
    sensitive="sex",
    publisher="UCI Machine Learning Repository (I-C. Yeh)",
    address="https://archive.ics.uci.edu/dataset/350/default+of+credit+card+clients",
    licence="CC BY 4.0",
    rows=30_000,
    kind="tabular",
    load=load,
    files=(FILE,),
    options={"sensitive_as_feature": SENSITIVE_AS_FEATURE},
    num_public=1500,
    num_validation=1000,
)
