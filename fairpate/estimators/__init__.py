"""Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``.

:class:`FairClassifier` takes the method by name. Its parameters are the sections that the method's configuration has,
so that they cannot differ from those of the command line, and the same seed on the same records gives the same weights.

    classifier    :class:`FairClassifier`
    parameters    its parameters, and the configuration that they say
    records       arrays and frames as the data set that a run reads
    pipelines     what stands in front of a fit
    kept          the folder of a fitted estimator, without pickle
    told          statement, card and plot
    checks        which of scikit-learn's own checks fail, and why
"""

from fairpate.estimators.classifier import FairClassifier
from fairpate.estimators.records import dataset_of

__all__ = ["FairClassifier", "dataset_of"]
