"""How well a simple model does without privacy, for the operator: to stand beside an accuracy.

A logistic model that learns without noise from private records, of which the measured method had as many or more. Its
accuracy depends on every one of them, so that it stays in ``private/``, on the operator's page and on the terminal.
Nothing that is published is compared with it; a model that learned from test records would compare 160 records with
thousands.

Pictures are seen small, and features beyond 256 by their principal components, so that it takes seconds.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fairpate.data.dataset import Split
from fairpate.evaluation.metrics import WithoutPrivacy
from fairpate.later import functional, sklearn
from fairpate.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 4000
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[bytes, IntArray] = {}


def without_privacy(
    private: Split, test: Split, measured_N: npt.NDArray[np.bool_], *, seed: int
) -> WithoutPrivacy | None:
    """Accuracy on the test records ``measured_N`` of what learns from ``private``, or from 4,000 records of it.

    None where no test record is measured, where there is one class to learn from, and where features are missing or not
    finite: a run that was paid for must not end here.
    """
    rows = np.sort(np.random.default_rng(seed).permutation(len(private))[:_MOST])
    chosen = private.take(rows.tolist())
    parts = (chosen.x, test.x)
    if not measured_N.any() or len(np.unique(chosen.y.numpy())) < 2:
        return None
    if any(not (x.numel() and x.isfinite().all()) for x in parts):
        return None
    predicted = _predicted(_features(chosen.x), _features(test.x), chosen.y.numpy())
    return WithoutPrivacy(accuracy=float((predicted == test.y.numpy())[measured_N].mean()), num_records=len(rows))


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
        x = functional.adaptive_avg_pool2d(x.float(), (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE)))
    rows: npt.NDArray[np.float64] = x.flatten(1).numpy().astype(np.float64)
    return rows
