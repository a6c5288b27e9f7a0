"""DP-postprocessing, DP-oracle-learner and randomised response behind scikit-learn's interface.

``fit`` reads features, labels and the private ``sensitive_features``; only the latter are protected, unless the base of
the post-processing is private too. The sets of classes and groups are public. A fitted classifier is randomised:
``predict_proba`` says how often each label is predicted, and ``predict`` draws. After ``fit``, ``events_`` are what
touched the sensitive attribute, ``privacy_`` is their price and ``trained_`` all that was released.

Shapes: N records, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fairpate.config import FitConfig, ModelConfig, PrivacyTarget
from fairpate.methods import dp_oracle_learner, dp_postprocessing, randomised_response
from fairpate.methods.attribute import require_unseen
from fairpate.methods.dp_oracle_learner import DpOracleLearnerConfig
from fairpate.methods.dp_postprocessing import DpPostprocessingConfig
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.randomised_response import RandomisedResponseConfig
from fairpate.methods.trained import Trained, price, private_randomness
from fairpate.nn.mixture import draw_labels, said_labels
from fairpate.nn.models import build_model
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource

_MODEL, _FIT, _DP_SGD = ModelConfig(name="logistic"), FitConfig(), DpSgdConfig()
_MAX_SEED = 2**31


class _RandomisedClassifier(ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What the estimators share; each says how it trains."""

    noise: str
    random_state: Any

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: npt.ArrayLike) -> _RandomisedClassifier:
        """Train on ``X`` (N, ...), bytes or floats, ``y`` (N,) and the group of each record (N,).

        ValueError for settings out of range, a single group, what the method itself refuses, and where only the group
        is protected and a column of ``X`` is the group or an encoding of it.
        """
        features = _tensor(X)
        self.classes_, labels = np.unique(np.asarray(y), return_inverse=True)
        self.groups_, groups = np.unique(np.asarray(sensitive_features), return_inverse=True)
        if not len(features) == len(labels) == len(groups):
            raise ValueError(
                "Expected one label and one of sensitive_features per record, got "
                f"{len(features)} records, {len(labels)} labels and {len(groups)} groups."
            )
        self._model_seed, self._training_seed, self._noise_seed, self._prediction_seed = (
            int(seed) for seed in check_random_state(self.random_state).randint(_MAX_SEED, size=4)
        )
        label_codes, group_codes = (torch.from_numpy(values.astype(np.int64)) for values in (labels, groups))
        if self._attribute_only:
            require_unseen(features, group_codes, method=type(self).__name__)
        self.trained_ = self._train(features, label_codes, group_codes)
        self.events_, self.noise_ = self.trained_.events, self.trained_.noise
        self.privacy_ = price(self.events_, self._target())
        self.n_features_in_ = int(features[0].numel())
        return self

    def predict_proba(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float64]:
        """How often each of ``classes_`` is predicted (N, C); by group where predictions are mixed by group."""
        check_is_fitted(self, "trained_")
        said_NC = said_labels(self.trained_.model, _tensor(X)).astype(np.float64)
        if self.trained_.mixing_GCC is None:
            return said_NC
        if sensitive_features is None:
            raise ValueError("This classifier predicts by group and needs sensitive_features, a group per record.")
        mixed: npt.NDArray[np.float64] = np.einsum(
            "nj,njk->nk", said_NC, self.trained_.mixing_GCC[self._group_codes(sensitive_features)]
        )
        return mixed

    def predict(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None, random_state: Any = None
    ) -> npt.NDArray[Any]:
        """One draw of labels (N,); the same at every call unless ``random_state`` says otherwise."""
        probabilities_NC = self.predict_proba(X, sensitive_features=sensitive_features)
        draws = check_random_state(self._prediction_seed if random_state is None else random_state)
        codes = draw_labels(probabilities_NC, draws.random_sample(len(probabilities_NC)))
        labels: npt.NDArray[Any] = self.classes_[codes]
        return labels

    @abstractmethod
    def _train(self, x: Tensor, y: Tensor, groups: Tensor) -> Trained:
        """Train on codes of labels and groups."""

    @property
    def _attribute_only(self) -> bool:
        """Whether features and labels count as public."""
        return True

    def _target(self) -> PrivacyTarget:
        """What the price is stated under."""
        target: PrivacyTarget = self._section(PrivacyTarget)
        return target

    def _section(self, schema: Any) -> Any:
        return schema(**{name: getattr(self, name) for name in schema.model_fields if hasattr(self, name)})

    def _source(self) -> NoiseSource:
        return SeededSource(self._noise_seed) if self.noise == "seeded" else OsEntropy()

    def _group_codes(self, sensitive_features: npt.ArrayLike) -> npt.NDArray[np.int64]:
        values = np.asarray(sensitive_features)
        if not np.isin(values, self.groups_).all():
            raise ValueError(f"Expected sensitive_features among {self.groups_.tolist()}, got {np.unique(values)}.")
        return np.searchsorted(self.groups_, values)

    def _require_two_classes(self) -> None:
        if len(self.classes_) != 2:
            raise ValueError(f"Expected two classes, got {len(self.classes_)}.")


class PostprocessingClassifier(_RandomisedClassifier):
    """DP-postprocessing: parameters are those of ``PrivacyTarget`` and ``DpPostprocessingConfig``.

    ``model`` is the base's architecture, ``fit_config`` its loop, or ``dp_sgd_config`` where ``base`` is ``dp_sgd``.
    ``predict`` and ``predict_proba`` need ``sensitive_features``.
    """

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        accounting: str = "pld",
        constraint: str = "equalized_odds",
        max_gap: float = 0.02,
        failure_probability: float = 0.05,
        slack: bool = True,
        min_share: float = 1e-3,
        reference_group: int = 0,
        base: str = "sgd",
        count_share: float = 0.1,
        fit_config: FitConfig = _FIT,
        dp_sgd_config: DpSgdConfig = _DP_SGD,
        noise: str = "os_entropy",
        random_state: Any = None,
    ) -> None:
        self.model, self.epsilon, self.delta, self.accounting = model, epsilon, delta, accounting
        self.constraint, self.max_gap, self.failure_probability = constraint, max_gap, failure_probability
        self.slack, self.min_share, self.reference_group = slack, min_share, reference_group
        self.base, self.count_share = base, count_share
        self.fit_config, self.dp_sgd_config = fit_config, dp_sgd_config
        self.noise, self.random_state = noise, random_state

    @property
    def _attribute_only(self) -> bool:
        return self.base == "sgd"

    def _train(self, x: Tensor, y: Tensor, groups: Tensor) -> Trained:
        network = build_model(
            self.model,
            input_shape=tuple(x.shape[1:]),
            num_classes=len(self.classes_),
            generator_seed=self._model_seed,
        )
        return dp_postprocessing.train(
            network,
            x,
            y,
            groups,
            self._section(DpPostprocessingConfig),
            target=self._target(),
            sgd_config=self.fit_config,
            dp_sgd_config=self.dp_sgd_config,
            num_groups=len(self.groups_),
            source=self._source(),
            randomness=private_randomness(self.noise, self._noise_seed),
            generator=torch.Generator().manual_seed(self._training_seed),
        )


class OracleLearnerClassifier(_RandomisedClassifier):
    """DP-oracle-learner for two classes: parameters are those of ``PrivacyTarget`` and ``DpOracleLearnerConfig``."""

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        accounting: str = "pld",
        constraint: str = "equalized_odds",
        max_gap: float = 0.02,
        num_rounds: int | None = 25,
        dual_bound: float = 2.0,
        learning_rate: float | None = 0.5,
        ridge: float = 1.0,
        num_directions: int | None = 16,
        release: str = "once",
        frequency_share: float = 0.1,
        feature_share: float = 0.45,
        min_share: float = 0.01,
        reference_group: int = 0,
        noise: str = "os_entropy",
        random_state: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.accounting = epsilon, delta, accounting
        self.constraint, self.max_gap = constraint, max_gap
        self.num_rounds, self.dual_bound, self.learning_rate = num_rounds, dual_bound, learning_rate
        self.ridge, self.num_directions, self.release = ridge, num_directions, release
        self.frequency_share, self.feature_share, self.min_share = frequency_share, feature_share, min_share
        self.reference_group, self.noise, self.random_state = reference_group, noise, random_state

    def _train(self, x: Tensor, y: Tensor, groups: Tensor) -> Trained:
        self._require_two_classes()
        return dp_oracle_learner.train(
            x,
            y,
            groups,
            self._section(DpOracleLearnerConfig),
            target=self._target(),
            num_groups=len(self.groups_),
            source=self._source(),
        )


class RandomisedResponseClassifier(_RandomisedClassifier):
    """Randomised response for two classes: parameters are those of ``RandomisedResponseConfig``.

    ``epsilon`` is pure and local; ``delta`` is what the price is stated at. ``two_step`` needs ``sensitive_features``
    at prediction.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        accounting: str = "pld",
        constraint: str = "equalized_odds",
        max_gap: float = 0.02,
        form: str = "one_step",
        corrects_bound: bool = True,
        mixing_gap: float = 1e-4,
        min_share: float = 1e-3,
        num_rounds: int = 50,
        dual_bound: float = 2.0,
        learning_rate: float = 0.5,
        reference_group: int = 0,
        noise: str = "os_entropy",
        random_state: Any = None,
    ) -> None:
        self.epsilon, self.delta, self.accounting = epsilon, delta, accounting
        self.constraint, self.max_gap = constraint, max_gap
        self.form, self.corrects_bound, self.mixing_gap, self.min_share = form, corrects_bound, mixing_gap, min_share
        self.num_rounds, self.dual_bound, self.learning_rate = num_rounds, dual_bound, learning_rate
        self.reference_group, self.noise, self.random_state = reference_group, noise, random_state

    def _train(self, x: Tensor, y: Tensor, groups: Tensor) -> Trained:
        self._require_two_classes()
        return randomised_response.train(
            x,
            y,
            groups,
            self._section(RandomisedResponseConfig),
            epsilon=self.epsilon,
            num_groups=len(self.groups_),
            source=self._source(),
            generator=torch.Generator().manual_seed(self._training_seed),
        )


def _tensor(features: npt.ArrayLike) -> Tensor:
    values = np.asarray(features)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=None if values.dtype == np.uint8 else np.float32))
