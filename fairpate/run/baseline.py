"""The accuracy of a model without privacy on the same records: the operator's yardstick for a run, never published."""

import math
import warnings

import numpy as np
import numpy.typing as npt
import torch

from fairpate.data.dataset import Split
from fairpate.data.embedding import exact_solver
from fairpate.files import arrays_digest
from fairpate.lazy import functional, sklearn
from fairpate.report.metrics import WithoutPrivacy
from fairpate.types import IntArray

_MOST_VALUES = 50_000_000  # 0.4 GB
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_AT_ONCE = 4096  # pictures
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[str, IntArray] = {}


def without_privacy(private: Split, test: Split, measured_N: npt.NDArray[np.bool_]) -> WithoutPrivacy | None:
    """Return the accuracy, on the test records that ``measured_N`` marks, of a logistic model learned from ``private``
    without noise.

    The operator compares it with the accuracy of the run's model. It must not be published, as it depends on every
    private record. Pictures are reduced to 16 pixels a side, and more than 256 features to principal components, so
    that it takes seconds.

    Return None if no test record is measured, if there is only one class, or if features are missing or not finite;
    also if there are too many records to learn from in seconds, because the accuracy for a subset would not be
    comparable. No error is raised, because it would end a run whose privacy cost was charged already.
    """
    parts, sizes = (private.x, test.x), private.x.shape[1:]
    width = math.prod(min(side, _SIDE) if private.x.ndim == 4 and place else side for place, side in enumerate(sizes))
    if not measured_N.any() or len(np.unique(private.y.numpy())) < 2 or len(private) * width > _MOST_VALUES:
        return None
    if any(not (x.numel() and x.isfinite().all()) for x in parts):
        return None
    # Records as rows of numbers; pictures are reduced to at most 16 pixels a side.
    rows = []
    for x in parts:
        if x.ndim == 4:
            side = (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE))
            x = torch.cat([functional.adaptive_avg_pool2d(some.float(), side) for some in x.split(_AT_ONCE)])
        rows.append(x.flatten(1).numpy().astype(np.float64))
    x_NF, test_MF = rows
    labels_N = private.y.numpy()
    # A sweep measures many models on the same records: it predicts them once.
    key = arrays_digest({"x": x_NF, "labels": labels_N, "test": test_MF})
    predicted = _predictions.get(key)
    if predicted is None:
        steps = [sklearn.preprocessing.StandardScaler()]
        if x_NF.shape[1] > _MOST_FEATURES:
            reduced = min(_COMPONENTS, len(x_NF))
            steps = [sklearn.decomposition.PCA(reduced, svd_solver=exact_solver(*x_NF.shape)), *steps]
        model = sklearn.pipeline.make_pipeline(*steps, sklearn.linear_model.LogisticRegression(max_iter=100, tol=1e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # near enough for a comparison
            predicted = model.fit(x_NF, labels_N).predict(test_MF)
        while len(_predictions) >= _MOST_KEPT:
            # The oldest entry; another thread may have removed it already.
            _predictions.pop(next(iter(_predictions)), None)
        _predictions[key] = predicted
    return WithoutPrivacy(accuracy=float((predicted == test.y.numpy())[measured_N].mean()), num_records=len(private))
