"""How well a simple model does without privacy, for the operator: to stand beside an accuracy.

A logistic model that learns without noise from the private records, all of those that the measured method had. Its
accuracy depends on every one of them, so that it stays in ``private/``, on the operator's page and on the terminal.
Nothing that is published is compared with it. Where the records are too many for seconds there is none: one of fewer
would compare thousands of records with more.

Pictures are seen small, and features beyond 256 by their principal components, so that it takes seconds.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fairpate.data.dataset import Split
from fairpate.evaluation.metrics import WithoutPrivacy
from fairpate.later import functional, sklearn, torch
from fairpate.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

_MOST_VALUES = 50_000_000  # 0.4 GB
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_AT_ONCE = 4096  # pictures
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[bytes, IntArray] = {}


def without_privacy(private: Split, test: Split, measured_N: npt.NDArray[np.bool_]) -> WithoutPrivacy | None:
    """Accuracy on the test records ``measured_N`` of what learns from ``private``.

    None where no test record is measured, where there is one class to learn from, where records are too many, and where
    features are missing or not finite: a run that was paid for must not end here.
    """
    parts = (private.x, test.x)
    if not measured_N.any() or len(np.unique(private.y.numpy())) < 2 or len(private) * _width(private.x) > _MOST_VALUES:
        return None
    if any(not (x.numel() and x.isfinite().all()) for x in parts):
        return None
    predicted = _predicted(_features(private.x), _features(test.x), private.y.numpy())
    return WithoutPrivacy(accuracy=float((predicted == test.y.numpy())[measured_N].mean()), num_records=len(private))


def _predicted(x_NF: npt.NDArray[np.float64], test_MF: npt.NDArray[np.float64], labels_N: IntArray) -> IntArray:
    """Classes of test records; once for the same records, on which a sweep measures many models."""
    key = hashlib.blake2b(
        b"|".join(each.tobytes() for each in (np.array(x_NF.shape), x_NF, test_MF, labels_N))
    ).digest()
    predicted = _predictions.get(key)
    if predicted is None:
        steps = [sklearn.preprocessing.StandardScaler()]
        if x_NF.shape[1] > _MOST_FEATURES:
            # Not "auto", which takes a randomised solver for some shapes: equal records must give an equal baseline.
            steps = [sklearn.decomposition.PCA(min(_COMPONENTS, len(x_NF)), svd_solver="covariance_eigh"), *steps]
        model = sklearn.pipeline.make_pipeline(*steps, sklearn.linear_model.LogisticRegression(max_iter=100, tol=1e-2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # near enough for a comparison
            predicted = model.fit(x_NF, labels_N).predict(test_MF)
        while len(_predictions) >= _MOST_KEPT:
            _predictions.pop(next(iter(_predictions)), None)
        _predictions[key] = predicted
    return predicted


def _features(x: Tensor) -> npt.NDArray[np.float64]:
    """Records as rows of numbers, pictures at most 16 pixels a side."""
    if x.ndim == 4:
        side = (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE))
        x = torch.cat([functional.adaptive_avg_pool2d(some.float(), side) for some in x.split(_AT_ONCE)])
    rows: npt.NDArray[np.float64] = x.flatten(1).numpy().astype(np.float64)
    return rows


def _width(x: Tensor) -> int:
    """The numbers of a row of :func:`_features`."""
    return math.prod(min(side, _SIDE) if x.ndim == 4 and place else side for place, side in enumerate(x.shape[1:]))
