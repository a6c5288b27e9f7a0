"""UCI Communities and Crime: much violent crime by the share of black inhabitants.

One record per community. The publisher scaled every column to [0, 1]. Both thresholds are public constants, the
medians that the publisher's codebook states: 0.15 for violent crime and 0.06 for the share of black inhabitants. The
22 columns of the police survey are left out: only 319 communities answered it. `OtherPerCap` is unknown for one
community and carries a flag.
"""

from __future__ import annotations

import numpy as np
import torch

from fairpate.data.codebook import SENSITIVE_AS_FEATURE, Field, Number, encode, numbers, without_sensitive
from fairpate.data.dataset import Split
from fairpate.data.entry import DatasetEntry, Records, Request, SourceFile
from fairpate.data.files import read_bytes
from fairpate.data.tables import column_of, read_table

FILE = SourceFile(
    path="communities/communities.data",
    sha256="09e0b5c07eae24c1efab19b2edee05e160e7f5743b6f31e31eec3d73624da2ea",
    url="https://archive.ics.uci.edu/ml/machine-learning-databases/communities/communities.data",
)
HIGH_CRIME = 0.15
BLACK_SHARE = 0.06
LABEL = "ViolentCrimesPerPop"
GROUP = "racepctblack"
NOT_PREDICTIVE = ("state", "county", "community", "communityname", "fold", LABEL)
MISSING = "?"
COLUMNS = (
    "state", "county", "community", "communityname", "fold", "population", "householdsize", "racepctblack",
    "racePctWhite", "racePctAsian", "racePctHisp", "agePct12t21", "agePct12t29", "agePct16t24", "agePct65up",
    "numbUrban", "pctUrban", "medIncome", "pctWWage", "pctWFarmSelf", "pctWInvInc", "pctWSocSec", "pctWPubAsst",
    "pctWRetire", "medFamInc", "perCapInc", "whitePerCap", "blackPerCap", "indianPerCap", "AsianPerCap",
    "OtherPerCap", "HispPerCap", "NumUnderPov", "PctPopUnderPov", "PctLess9thGrade", "PctNotHSGrad", "PctBSorMore",
    "PctUnemployed", "PctEmploy", "PctEmplManu", "PctEmplProfServ", "PctOccupManu", "PctOccupMgmtProf",
    "MalePctDivorce", "MalePctNevMarr", "FemalePctDiv", "TotalPctDiv", "PersPerFam", "PctFam2Par", "PctKids2Par",
    "PctYoungKids2Par", "PctTeen2Par", "PctWorkMomYoungKids", "PctWorkMom", "NumIlleg", "PctIlleg", "NumImmig",
    "PctImmigRecent", "PctImmigRec5", "PctImmigRec8", "PctImmigRec10", "PctRecentImmig", "PctRecImmig5",
    "PctRecImmig8", "PctRecImmig10", "PctSpeakEnglOnly", "PctNotSpeakEnglWell", "PctLargHouseFam",
    "PctLargHouseOccup", "PersPerOccupHous", "PersPerOwnOccHous", "PersPerRentOccHous", "PctPersOwnOccup",
    "PctPersDenseHous", "PctHousLess3BR", "MedNumBR", "HousVacant", "PctHousOccup", "PctHousOwnOcc",
    "PctVacantBoarded", "PctVacMore6Mos", "MedYrHousBuilt", "PctHousNoPhone", "PctWOFullPlumb", "OwnOccLowQuart",
    "OwnOccMedVal", "OwnOccHiQuart", "RentLowQ", "RentMedian", "RentHighQ", "MedRent", "MedRentPctHousInc",
    "MedOwnCostPctInc", "MedOwnCostPctIncNoMtg", "NumInShelters", "NumStreet", "PctForeignBorn", "PctBornSameState",
    "PctSameHouse85", "PctSameCity85", "PctSameState85", "LemasSwornFT", "LemasSwFTPerPop", "LemasSwFTFieldOps",
    "LemasSwFTFieldPerPop", "LemasTotalReq", "LemasTotReqPerPop", "PolicReqPerOffic", "PolicPerPop",
    "RacialMatchCommPol", "PctPolicWhite", "PctPolicBlack", "PctPolicHisp", "PctPolicAsian", "PctPolicMinor",
    "OfficAssgnDrugUnits", "NumKindsDrugsSeiz", "PolicAveOTWorked", "LandArea", "PopDens", "PctUsePubTrans",
    "PolicCars", "PolicOperBudg", "LemasPctPolicOnPatr", "LemasGangUnitDeploy", "LemasPctOfficDrugUn",
    "PolicBudgPerPop", "ViolentCrimesPerPop",
)  # fmt: skip
POLICE_SURVEY = (
    "LemasSwornFT", "LemasSwFTPerPop", "LemasSwFTFieldOps", "LemasSwFTFieldPerPop", "LemasTotalReq",
    "LemasTotReqPerPop", "PolicReqPerOffic", "PolicPerPop", "RacialMatchCommPol", "PctPolicWhite", "PctPolicBlack",
    "PctPolicHisp", "PctPolicAsian", "PctPolicMinor", "OfficAssgnDrugUnits", "NumKindsDrugsSeiz",
    "PolicAveOTWorked", "PolicCars", "PolicOperBudg", "LemasPctPolicOnPatr", "LemasGangUnitDeploy",
    "PolicBudgPerPop",
)  # fmt: skip
CODEBOOK: tuple[Field, ...] = tuple(
    Number(column=column, low=0, high=1, missing=MISSING if column == "OtherPerCap" else None)
    for column in COLUMNS
    if column not in NOT_PREDICTIVE and column not in POLICE_SURVEY
)


def load(request: Request) -> Records:
    """All 1,994 communities, named by state and community name."""
    table = read_table(read_bytes(FILE, request.data_dir), FILE.path, columns=COLUMNS)
    x, feature_names = encode(table, without_sensitive(CODEBOOK, GROUP, request.options), FILE.path)
    states, names = (column_of(table, column, FILE.path).to_pylist() for column in ("state", "communityname"))
    return Records(
        kind="tabular",
        records=Split(
            x=x,
            y=torch.from_numpy((numbers(table, LABEL, FILE.path) > HIGH_CRIME).astype(np.int64)),
            z=torch.from_numpy((numbers(table, GROUP, FILE.path) > BLACK_SHARE).astype(np.int64)),
            record_id=tuple(f"community-{state}-{name}" for state, name in zip(states, names, strict=True)),
        ),
        label_names=("less violent crime", "more violent crime"),
        group_names=("fewer black inhabitants", "more black inhabitants"),
        sensitive_attribute="share of black inhabitants",
        feature_names=feature_names,
    )


ENTRY = DatasetEntry(
    name="communities",
    task="violent crime above the codebook's median",
    sensitive="share of black inhabitants above the codebook's median",
    publisher="UCI Machine Learning Repository (M. Redmond)",
    address="https://archive.ics.uci.edu/dataset/183/communities+and+crime",
    licence="CC BY 4.0",
    rows=1_994,
    kind="tabular",
    load=load,
    files=(FILE,),
    options={"sensitive_as_feature": SENSITIVE_AS_FEATURE},
    num_public=400,
    num_validation=100,
)
