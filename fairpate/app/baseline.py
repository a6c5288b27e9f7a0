"""How well a simple model does without privacy, found without a look at private records: to stand beside an accuracy.

A logistic model of test records alone, by cross-validation: every test record is predicted by a model that learned from
the other folds. Like all metrics it says something of test records, which are outside the guarantee, and nothing of
private ones. A model that learns from private records without noise would tell more, and its accuracy could not be
published: it depends on every one of them.

Pictures are seen small, and features beyond 256 by their principal components, so that it takes a second.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fairpate.data.dataset import Split
from fairpate.evaluation.metrics import WithoutPrivacy
from fairpate.later import functional, sklearn
from fairpate.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

_FOLDS = 5
_FEWEST, _MOST = 50, 4000
_SIDE, _MOST_FEATURES, _COMPONENTS = 16, 256, 64
_MOST_KEPT = 32  # a sweep goes through its data sets, and seeds of their splits, one after another
_predictions: dict[bytes, IntArray] = {}


def without_privacy(test: Split, answered_N: npt.NDArray[np.bool_], *, seed: int) -> WithoutPrivacy | None:
    """Accuracy on the answered records of ``test``; of 4,000 of them where there are more.

    None for fewer than 50 records, for none answered, where a fold leaves one class to learn from, and where features
    are missing or not finite: a run that was paid for must not end here.
    """
    rows = np.sort(np.random.default_rng(seed).permutation(len(test))[:_MOST])
    if len(rows) < _FEWEST or not answered_N[rows].any():
        return None
    chosen = test.take(rows.tolist())
    labels = chosen.y.numpy()
    if not (chosen.x.numel() and chosen.x.isfinite().all()):
        return None
    # By person: of somebody it learned from, a model predicts other records too well.
    folds = sklearn.model_selection.GroupKFold(_FOLDS, shuffle=True, random_state=seed)
    persons = np.arange(len(rows)) if chosen.person_N is None else chosen.person_N.numpy()
    if len(np.unique(persons)) < _FOLDS:
        return None
    parts = list(folds.split(labels, groups=persons))
    if any(len(np.unique(labels[learned])) < 2 for learned, _ in parts):
        return None
    predicted, answered = _predicted(_features(chosen.x), labels, parts), answered_N[rows]
    return WithoutPrivacy(
        accuracy=float((predicted == labels)[answered].mean()),
        num_records=round(np.mean([len(learned) for learned, _ in parts])),
    )


def _predicted(
    x_NF: npt.NDArray[np.float64], labels_N: IntArray, parts: Sequence[tuple[IntArray, IntArray]]
) -> IntArray:
    """By the model that learned from the other folds; once for the same records, on which a sweep measures many."""
    # With -1 behind each fold: the same rows divided otherwise are other models.
    tested = np.concatenate([np.append(rows, -1) for _, rows in parts])
    key = hashlib.blake2b(b"|".join(each.tobytes() for each in (np.array(x_NF.shape), x_NF, labels_N, tested))).digest()
    predicted = _predictions.get(key)
    if predicted is None:
        learner = sklearn.linear_model.LogisticRegression(max_iter=100, tol=1e-2)
        model = sklearn.pipeline.make_pipeline(sklearn.preprocessing.StandardScaler(), learner)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)  # near enough for a comparison
            predicted = sklearn.model_selection.cross_val_predict(model, x_NF, labels_N, cv=parts)
        while len(_predictions) >= _MOST_KEPT:
            _predictions.pop(next(iter(_predictions)), None)
        _predictions[key] = predicted
    return predicted


def _features(x: Tensor) -> npt.NDArray[np.float64]:
    """Records as rows of at most 256 numbers, which know of no label."""
    if x.ndim == 4:
        x = functional.adaptive_avg_pool2d(x.float(), (min(x.shape[2], _SIDE), min(x.shape[3], _SIDE)))
    rows: npt.NDArray[np.float64] = x.flatten(1).numpy().astype(np.float64)
    if rows.shape[1] > _MOST_FEATURES:
        # Not "auto", which takes a randomised solver for some shapes: equal records must give an equal baseline.
        rows = sklearn.decomposition.PCA(min(_COMPONENTS, len(rows)), svd_solver="covariance_eigh").fit_transform(rows)
    return rows
