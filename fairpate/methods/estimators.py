"""The methods of this folder behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``.

``fit`` reads private records; public ones, where a method or an option needs them, come without labels. After it,
``events_`` are what touched private records and ``privacy_`` is their price. The groups of private records are never
read: parity is learned from public ones. The set of classes and, unless declared, the number of private records are
treated as public.

Shapes: N records to predict or private, M public, C classes.
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
from torch import Tensor, nn

from fairpate.config import CalibrationConfig, FitConfig, ModelConfig, PrivacyTarget
from fairpate.fairness.gate import filter_stream
from fairpate.methods import dp_sgd, fair_dp_sgd, sgd
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.fair_dp_sgd import FairDpSgdConfig
from fairpate.methods.trained import PublicPool, Trained, price, private_randomness
from fairpate.nn.calibrate import calibrate
from fairpate.nn.models import build_model
from fairpate.nn.predict import predict_probabilities
from fairpate.types import GateRule, Relation

_MODEL, _FIT = ModelConfig(), FitConfig()
_MAX_SEED = 2**31


class Classifier(ClassifierMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What the estimators share; each says how it trains and what it promises."""

    calibration: CalibrationConfig | None
    idp3: GateRule | None
    random_state: Any

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: npt.ArrayLike | None = None,  # noqa: ARG002 - for a uniform call; see above
        public_X: npt.ArrayLike | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
    ) -> Classifier:
        """Train on private ``X`` (N, ...), bytes or floats, and ``y`` (N,).

        ``public_X`` (M, ...) and ``public_sensitive_features`` (M,) are for FairDP-SGD and for calibration.
        ``sensitive_features`` of private records are accepted and not read. ValueError where public records are
        needed and absent, and for settings out of range.
        """
        features, public = _tensor(X), _pool(public_X, public_sensitive_features)
        self.classes_, codes = np.unique(np.asarray(y), return_inverse=True)
        model_seed, self._training_seed, self._noise_seed, calibration_seed = (
            int(seed) for seed in check_random_state(self.random_state).randint(_MAX_SEED, size=4)
        )
        network = build_model(
            self._architecture(),
            input_shape=tuple(features.shape[1:]),
            num_classes=len(self.classes_),
            generator_seed=model_seed,
        )
        trained = self._train(network, features, torch.from_numpy(codes.astype(np.int64)), public)
        if self.calibration is not None:
            pool = required_pool(public, "calibration")
            generator = torch.Generator().manual_seed(calibration_seed)
            calibrate(trained.model, pool.x, pool.groups, self.calibration, generator=generator)
        self.network_, self.events_, self.noise_ = trained.model, trained.events, trained.noise
        self.privacy_ = price(trained.events, self._target())
        self.n_features_in_ = int(features[0].numel()) if len(features) else 0
        return self

    def predict_proba(self, X: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Probabilities (N, C), columns in the order of ``classes_``."""
        check_is_fitted(self, "network_")
        probabilities: npt.NDArray[np.float32] = predict_probabilities(self.network_, _tensor(X)).numpy()
        return probabilities

    def predict(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None
    ) -> npt.NDArray[Any] | np.ma.MaskedArray[Any, Any]:
        """Labels (N,). With ``idp3`` a masked array, masked where the gate refuses; it needs ``sensitive_features``."""
        codes = self.predict_proba(X).argmax(axis=1)
        labels: npt.NDArray[Any] = self.classes_[codes]
        if self.idp3 is None:
            return labels
        if sensitive_features is None:
            raise ValueError("This classifier predicts with idp3 and needs sensitive_features, a group per record.")
        names, groups = np.unique(np.asarray(sensitive_features), return_inverse=True)
        answered = filter_stream(codes, groups, rule=self.idp3, num_groups=len(names), num_classes=len(self.classes_))
        return np.ma.masked_array(labels, mask=~answered)

    @abstractmethod
    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:
        """Train ``network`` in place."""

    def _architecture(self) -> ModelConfig:
        """What is trained."""
        architecture: ModelConfig = self.get_params(deep=False)["model"]
        return architecture

    def _target(self) -> PrivacyTarget:
        """What the price is stated under."""
        return PrivacyTarget()

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._training_seed)


class SgdClassifier(Classifier):
    """Plain SGD, without privacy. ``fit_config`` is its loop; other parameters as :class:`DpSgdClassifier`."""

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        fit_config: FitConfig = _FIT,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.fit_config = model, fit_config
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        return sgd.train(network, x, y, self.fit_config, generator=self._generator())


class DpSgdClassifier(Classifier):
    """DP-SGD within (``epsilon``, ``delta``) for one record under ``relation``.

    Parameters are those of ``PrivacyTarget`` and ``DpSgdConfig``; ``model`` is the architecture, ``calibration`` a
    fine-tuning on public records, ``idp3`` a reject option at prediction. ``random_state`` seeds the model and what
    is not secret; sampling and noise come from the operating system unless ``noise`` is ``seeded``.
    """

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        relation: Relation = "add or remove one",
        accounting: str = "pld",
        epochs: float = 20.0,
        batch_size: int = 256,
        clip_norm: float = 1.0,
        learning_rate: float = 0.5,
        momentum: float = 0.9,
        num_records: int | None = None,
        max_records: int = 512,
        noise: str = "os_entropy",
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.epsilon, self.delta, self.relation, self.accounting = (
            model,
            epsilon,
            delta,
            relation,
            accounting,
        )
        self.epochs, self.batch_size, self.clip_norm = epochs, batch_size, clip_norm
        self.learning_rate, self.momentum = learning_rate, momentum
        self.num_records, self.max_records, self.noise = num_records, max_records, noise
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        return dp_sgd.train(network, x, y, **self._arguments(len(x)))

    def _arguments(self, num_records: int) -> dict[str, Any]:
        config = self._section(DpSgdConfig)
        return {
            "steps": dp_sgd.calibrated_steps(config, self._target(), num_records=num_records),
            "randomness": private_randomness(config.noise, self._noise_seed),
            "generator": self._generator(),
            "relation": self.relation,
        }

    def _target(self) -> PrivacyTarget:
        target: PrivacyTarget = self._section(PrivacyTarget)
        return target

    def _section(self, schema: Any) -> Any:
        return schema(**{name: getattr(self, name) for name in schema.model_fields})


class FairDpSgdClassifier(DpSgdClassifier):
    """FairDP-SGD; parameters beyond :class:`DpSgdClassifier` are those of ``FairDpSgdConfig``."""

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        relation: Relation = "add or remove one",
        accounting: str = "pld",
        epochs: float = 20.0,
        batch_size: int = 256,
        clip_norm: float = 1.0,
        learning_rate: float = 0.5,
        momentum: float = 0.9,
        num_records: int | None = None,
        max_records: int = 512,
        noise: str = "os_entropy",
        weight: float = 1.0,
        variant: str = "post",
        maximum: str = "hardmax",
        temperature: float = 0.01,
        max_temperature: float = 0.1,
        public_batch_size: int = 64,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            model=model,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            accounting=accounting,
            epochs=epochs,
            batch_size=batch_size,
            clip_norm=clip_norm,
            learning_rate=learning_rate,
            momentum=momentum,
            num_records=num_records,
            max_records=max_records,
            noise=noise,
            calibration=calibration,
            idp3=idp3,
            random_state=random_state,
        )
        self.weight, self.variant, self.maximum = weight, variant, maximum
        self.temperature, self.max_temperature = temperature, max_temperature
        self.public_batch_size = public_batch_size

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:
        pool = required_pool(public, "FairDP-SGD")
        arguments = self._arguments(len(x))
        return fair_dp_sgd.train(network, x, y, config=self._section(FairDpSgdConfig), public=pool, **arguments)


def _tensor(features: npt.ArrayLike) -> Tensor:
    values = np.asarray(features)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=None if values.dtype == np.uint8 else np.float32))


def _pool(x: npt.ArrayLike | None, groups: npt.ArrayLike | None) -> PublicPool | None:
    if x is None and groups is None:
        return None
    if x is None or groups is None:
        raise ValueError("Expected public_X and public_sensitive_features together, got one of them.")
    codes = np.unique(np.asarray(groups), return_inverse=True)[1]
    return PublicPool(x=_tensor(x), groups=torch.from_numpy(codes.astype(np.int64)))


def required_pool(public: PublicPool | None, what: str) -> PublicPool:
    """``public``. ValueError, naming ``what`` needs them, where there is none."""
    if public is None:
        raise ValueError(f"{what} needs public records: give public_X and public_sensitive_features to fit.")
    return public
