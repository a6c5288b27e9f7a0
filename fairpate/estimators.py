"""Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``."""

from fairpate.app.estimators import FairPateClassifier, PateClassifier, PateSInClassifier, PateSPreClassifier
from fairpate.baselines.estimators import DpSgdClassifier, FairDpSgdClassifier, SgdClassifier

__all__ = [
    "DpSgdClassifier",
    "FairDpSgdClassifier",
    "FairPateClassifier",
    "PateClassifier",
    "PateSInClassifier",
    "PateSPreClassifier",
    "SgdClassifier",
]
