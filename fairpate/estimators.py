"""Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``."""

from fairpate.app.estimators import (
    FairPateClassifier,
    PateClassifier,
    PateSInClassifier,
    PateSPreClassifier,
    SfPateClassifier,
)
from fairpate.methods.estimators import DpSgdClassifier, FairDpSgdClassifier, SgdClassifier
from fairpate.methods.fair_estimators import DpFermiClassifier, FLdClassifier, PfLdClassifier, RacoDpClassifier
from fairpate.methods.posthoc_estimators import (
    OracleLearnerClassifier,
    PostprocessingClassifier,
    RandomisedResponseClassifier,
)

__all__ = [
    "DpFermiClassifier",
    "DpSgdClassifier",
    "FLdClassifier",
    "FairDpSgdClassifier",
    "FairPateClassifier",
    "OracleLearnerClassifier",
    "PateClassifier",
    "PateSInClassifier",
    "PateSPreClassifier",
    "PfLdClassifier",
    "PostprocessingClassifier",
    "RacoDpClassifier",
    "RandomisedResponseClassifier",
    "SfPateClassifier",
    "SgdClassifier",
]
